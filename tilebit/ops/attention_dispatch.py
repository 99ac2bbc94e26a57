"""What a call of an attention op asks for, by its key: the fields of an ``AttentionWorkload`` in
their order (batch, q_len and kv_len as buckets, the format's name, a torch dtype), and the device.
``plans.py`` does the rest."""

from __future__ import annotations

from ..layouts.kv_formats import KVFormat
from ..schedules.attention.workload import AttentionWorkload
from .dispatch import DTYPE_NAMES, device_target
from .operands import check
from .plans import Key, Operands, launcher


def workload_of(key: Key) -> AttentionWorkload:
    """What calls with ``key`` ask for. Raises ``ValueError`` for what no kernel supports."""
    op, batch, q_len, kv_len, heads_q, heads_kv, head_dim, name, dtype, *options, _ = key
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"the dtype of q, k and v is {dtype}; accepted: torch.float16 and torch.bfloat16; convert them with x.to(...)")
    return AttentionWorkload(op, batch, q_len, kv_len, heads_q, heads_kv, head_dim, KVFormat.from_name(name), DTYPE_NAMES[dtype], *options)


def _words(w: AttentionWorkload) -> str:
    """What needs its operands."""
    return f"{w.op} with {w.format.name}, {w.dtype}, heads_q = {w.heads_q}, heads_kv = {w.heads_kv} and pages of {w.page_size} tokens"


def check_operands(key: Key, operands: Operands) -> None:
    """Raise ``ValueError`` for operands that do not fit, where no kernel is asked that would."""
    workload, device = workload_of(key), key[-1]
    check(workload.operands(device_target(device).arch), operands, device, _words(workload))


launch = launcher(workload_of, _words)
