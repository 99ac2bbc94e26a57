"""A group of 128 tokens, quantized and packed in registers into its pages, as programs write it
(BitDecoding V-B): the steps of its warps, which are CUDA (``device/kv/pack.cuh``)."""

from collections.abc import Callable
from typing import Any

from ...schedules.attention.workload import AttentionWorkload


def packing_macros(w: AttentionWorkload, call: Callable[..., Any], keys_meet: Any) -> tuple[Any, Any]:
    """(pack_keys, pack_values) of the ``rows`` that a block has opened: macros that its eight warps with
    keys, and with values, call together. ``fragments`` are a warp's registers, ``staged`` shared
    memory for a granule of each warp, ``parameters`` for those of all channels; ``keys_meet`` is a
    barrier of the warps with keys."""
    import tilelang.language as T

    by_channel = w.format.key_scales == "channel"

    @T.macro
    def pack_keys(rows, fragments, staged, parameters, head_scale):
        call("Pack::load<true>", rows, staged, fragments)
        if by_channel:
            call("Pack::find_extremes", fragments, staged)
            keys_meet()  # all warps' extremes are there
            call("Pack::find_parameters", rows, staged, parameters)
            keys_meet()  # all channels' parameters are there
            call("Pack::quantize_channels", fragments, parameters)
        call("Pack::store_keys", rows, fragments, head_scale)

    @T.macro
    def pack_values(rows, fragments, staged, head_scale):
        call("Pack::load<false>", rows, staged, fragments)
        call("Pack::store_values", rows, fragments, head_scale)

    return pack_keys, pack_values
