"""``w4a8_g128_asym`` whose groups' int32 sums become fp32 in another way (``Conversion`` in
``device/codecs/group_sums.cuh``), for the ablation of group-wise sums. Numbers and layout are the
library's.
"""

from __future__ import annotations

from dataclasses import replace

from tilebit.layouts.formats import FORMATS, GemmFormat
from tilebit.schedules.gemm.codecs import GROUPED_BYTES, Codec

GROUP_WISE = FORMATS["w4a8_g128_asym"]


def variant(name: str, conversion: str) -> tuple[GemmFormat, Codec]:
    """The format and the codec of the module ``name``. Programs that sum groups on tensor cores take them."""
    return (
        replace(GROUP_WISE, weight=replace(GROUP_WISE.weight, kind=name), module=name),
        replace(GROUPED_BYTES, kind=name, conversion=conversion, programs=GROUPED_BYTES.programs - {"gemm_cpu"}),
    )
