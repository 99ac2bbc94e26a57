"""The layout of a KV cache: which bit of which page holds which token's channel, and where the
scales lie.

Both operands are packed as the A operand of mma.m16n8k16 finds them (BitDecoding, section IV (1);
TurboMind, section 4.2): S^T = K Q^T multiplies *key granules*, 16 tokens (rows) x head_dim channels
(k steps of 16), and O^T = V^T P^T *value granules*, head_dim channels (row tiles of 16) x 16
tokens. A granule is a tile of a ``PackedLayout`` that ``induce`` derives from the fragment.

A page of one kv head is one contiguous record:

    key granules | value granules | key parameters | value parameters

Tokens of an unfinished group of 128 are not in pages: they lie in 16 bits in the sequence's
residual window (section IV (2)).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from .fragments import mma_a
from .kv_formats import KVFormat
from .packing import WORD_BITS, PackedLayout, induce

GRANULE = 16  # tokens: the rows of the instruction's A operand for keys, its k for values
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128, 256)
WARP_TILE_TOKENS = 8  # P_n: tokens that one mma.m16n8k16 of a warp covers along n
RESIDUAL_WARPS = {2: 2, 4: 4, 8: 8, 16: 16}  # W_n by bits of a code
PAIR_BYTES = 4  # an fp16 scale and an fp16 zero
ORDER = 2  # of what a page holds; counted up when it changes, so that a cache saved in another order is refused


def residual_tokens(bits: int, warps: int, warp_tile: int = WARP_TILE_TOKENS, word_bits: int = 16) -> int:
    """N_r = P_n * W_n * (word bits / bits): the tokens that fill whole packed fragments of every
    warp (BitDecoding, equation 1)."""
    return warp_tile * warps * (word_bits // bits)


# Tokens of a residual window and of a group that shares a channel's parameters. The warps of
# RESIDUAL_WARPS make equation 1 give this for every width, so one cache may mix widths.
RESIDUAL = residual_tokens(4, RESIDUAL_WARPS[4])


@cache
def key_granule(bits: int, head_dim: int) -> PackedLayout:
    """16 tokens (n) x ``head_dim`` channels (k) of keys: mma.m16n8k16's A, a k step of 16 channels
    after the other, loads of 16 bytes a lane (8 at 2 bits and 64 channels: a lane has no more)."""
    return induce(mma_a(16), bits, f"key_b{bits}_d{head_dim}", load_bits=_load_bits(bits, head_dim), k_steps=head_dim // 16)


@cache
def value_granule(bits: int, head_dim: int) -> PackedLayout:
    """``head_dim`` channels (n) x 16 tokens (k) of values: mma.m16n8k16's A, a tile of 16 channels
    after the other; loads as the key's."""
    load_bits = _load_bits(bits, head_dim)
    return induce(mma_a(16), bits, f"value_b{bits}_d{head_dim}", load_bits=load_bits, k_steps=1, n_tiles=head_dim // 16)


def lane_words(bits: int, head_dim: int) -> int:
    """Words of a granule that one lane of a warp owns."""
    return head_dim * bits // 64


def window_words(head_dim: int) -> int:
    """32-bit words of a residual window of one kv head: a page of 128 tokens in 16 bits."""
    return KVLayout(KVFormat(), head_dim, RESIDUAL).page_words


def _load_bits(bits: int, head_dim: int) -> int:
    return WORD_BITS * min(4, lane_words(bits, head_dim))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A page of ``page_size`` tokens of one kv head of ``head_dim`` channels in ``format``. Bytes
    count from the start of the page.

    Codes: granule g of an operand holds tokens 16 g .. 16 g + 15 of the page. Parameters, fp16:

    - ``int*`` keys scaled by "channel": for each group of 128 tokens a record of ``4 * head_dim`` bytes in the order of the B operand,
      [k step f][c = 0..3]{zeros of channels 16 f + 2 c + 0, 1, their scales, zeros of the channels 8 later, their scales}. A page of fewer
      than 128 tokens holds its share of its group's record: page j of the group the j-th of 128 / page_size equal slices. A page of 256
      tokens holds two records.
    - ``int*`` keys scaled by "token" and ``int*`` values: [token]{scale, zero}.
    - float and fp8: none.

    Raises ``ValueError`` for other head dims or page sizes.
    """

    format: KVFormat
    head_dim: int
    page_size: int = RESIDUAL

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {self.head_dim!r}; accepted: {HEAD_DIMS}")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size is {self.page_size!r}; accepted: {PAGE_SIZES}")

    @property
    def key(self) -> PackedLayout:
        return key_granule(self.format.key_bits, self.head_dim)

    @property
    def value(self) -> PackedLayout:
        return value_granule(self.format.value_bits, self.head_dim)

    @property
    def granules(self) -> int:
        """Granules of each operand in a page."""
        return self.page_size // GRANULE

    @property
    def group_pages(self) -> int:
        """Pages that share a group of 128 tokens (1 for pages that hold whole groups)."""
        return max(1, RESIDUAL // self.page_size)

    @property
    def key_bytes(self) -> int:
        """Bytes of a page's key granules."""
        return self.page_size * self.head_dim * self.format.key_bits // 8

    @property
    def value_bytes(self) -> int:
        """Bytes of a page's value granules."""
        return self.page_size * self.head_dim * self.format.value_bits // 8

    @property
    def key_parameter_bytes(self) -> int:
        """Bytes of a page's key parameters."""
        per_group = {"channel": PAIR_BYTES * self.head_dim, "token": PAIR_BYTES * RESIDUAL}.get(self.format.key_scales, 0)
        return per_group * self.page_size // RESIDUAL

    @property
    def value_parameter_bytes(self) -> int:
        """Bytes of a page's value parameters."""
        return PAIR_BYTES * self.page_size if self.format.value_scales == "token" else 0

    @property
    def value_offset(self) -> int:
        """Byte at which the value granules begin (the key granules begin at 0)."""
        return self.key_bytes

    @property
    def key_parameter_offset(self) -> int:
        """Byte at which the key parameters begin."""
        return self.value_offset + self.value_bytes

    @property
    def value_parameter_offset(self) -> int:
        """Byte at which the value parameters begin."""
        return self.key_parameter_offset + self.key_parameter_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one kv head, a multiple of 16."""
        return self.value_parameter_offset + self.value_parameter_bytes

    @property
    def page_words(self) -> int:
        """32-bit words of a page of one kv head."""
        return self.page_bytes * 8 // WORD_BITS

    @property
    def token_bytes(self) -> int:
        """Memory per packed token and kv head: codes and parameters. (A sequence's window comes on
        top: ``window_words`` words a head.)"""
        return self.page_bytes // self.page_size

    def key_position(self, token: np.ndarray | int, channel: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(word of the page, lowest bit), int64, of a key's code; ``token`` counts from the page's
        first."""
        return self.key.position(token, channel, self.page_size, self.head_dim)

    def value_position(self, token: np.ndarray | int, channel: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(word of the page, lowest bit), int64, of a value's code; ``token`` counts from the
        page's first."""
        word, bit = self.value.position(channel, token, self.head_dim, self.page_size)
        return word + self.value_offset * 8 // WORD_BITS, bit

    def key_parameter_position(self, token: np.ndarray | int, channel: np.ndarray | int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(page, byte of the scale, byte of the zero), int64, of a key's parameters; ``token`` is a
        position in the sequence and ``page`` the sequence's page that holds them, which need not be
        the page of the token. Raises ``ValueError`` if the format has none."""
        self._needs_parameters("keys", self.format.key_scales)
        token, channel = np.broadcast_arrays(np.asarray(token, dtype=np.int64), np.asarray(channel, dtype=np.int64))
        if self.format.key_scales == "token":
            scale = PAIR_BYTES * token
            zero = scale + PAIR_BYTES // 2
        else:
            group = token // RESIDUAL * PAIR_BYTES * self.head_dim
            scale, zero = (group + part for part in channel_parameter_bytes(channel))
        share = self.key_parameter_bytes  # consecutive pages hold consecutive shares
        return scale // share, self.key_parameter_offset + scale % share, self.key_parameter_offset + zero % share

    def value_parameter_position(self, token: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(byte of the scale, byte of the zero), int64, of a value's parameters; ``token`` counts
        from the page's first. Raises ``ValueError`` if the format has none."""
        self._needs_parameters("values", self.format.value_scales)
        scale = self.value_parameter_offset + PAIR_BYTES * np.asarray(token, dtype=np.int64)
        return scale, scale + PAIR_BYTES // 2

    def _needs_parameters(self, what: str, scales: str) -> None:
        if scales not in ("channel", "token"):
            raise ValueError(
                f"{self.format.name}: pages hold no parameters of {what} (scales: {scales!r}); accepted: int8, int4, int2 {what}"
            )


def channel_parameter_bytes(channel: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """(byte of the scale, byte of the zero), int64, of a channel in its group's record of key
    parameters: lane c of mma.m16n8k16's B operand finds those of its four channels of a k step, 16
    f + 2 c + {0, 1, 8, 9}, in one 16-byte load, as four registers of an A operand: pairs of zeros
    are rows 0..7, pairs of scales rows 8..15."""
    channel = np.asarray(channel, dtype=np.int64)
    step, in_step = channel // 16, channel % 16
    lane, slot = in_step % 8 // 2, in_step // 8 * 4 + in_step % 2
    zero = (step * 4 + lane) * 16 + slot * 2
    return zero + 4, zero
