"""The rates that LiquidGEMM's cost model divides by, of each device: measured where rows hold them, else what
the vendor publishes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilebit.schedules.target import target_from_name

from .rows import Row
from .targets import H100, H200

INT8 = ("w8a8_int8", "w8a8_channel")  # formats whose products multiply int8 by int8 and dequantize nothing
PUBLISHED_READ = {H200: 4800.0, H100: 3352.0}  # GB/s of memory, NVIDIA's data sheets of the SXM boards
PUBLISHED_INT8 = 1979.0  # TOP/s without sparsity, of both


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """``read_gbps`` of memory, ``int8_tops`` of tensor cores, ``instructions`` of all lanes together in G/s;
    ``said``: where they come from, in words."""

    read_gbps: float
    int8_tops: float
    instructions: float
    said: str


def device_rates(gpu: str, rows: Iterable[Row]) -> DeviceRates | None:
    """Those of the device ``gpu``, from its ``rows`` of ``int8``; None for a device that none are known of.

    int8: the fastest product of int8 by int8 that any row has. Instructions: those that the four
    schedulers of each SM issue at the boost clock, one of 32 lanes a clock each (the paper's).
    """
    if gpu not in PUBLISHED_READ:
        return None
    hopper = target_from_name("sm_90a")  # both have as many SMs and the same boost clock
    read, how = (hopper.read_gbps, "measured") if hopper.name == gpu else (PUBLISHED_READ[gpu], "published")
    found = max((row.flops / row.us / 1e6 for row in rows if row.gpu == gpu and row.format in INT8), default=None)
    int8 = PUBLISHED_INT8 if found is None else found
    said = (
        f"{read:,.0f} GB/s read ({how}), {int8:,.0f} TOP/s of int8 "
        f"({'published' if found is None else 'the fastest W8A8 product of its rows'}), {hopper.dequant_gops:,.0f} G instructions a second "
        "(published: 132 SMs, 128 lanes, 1.98 GHz)"
    )
    return DeviceRates(read, int8, hopper.dequant_gops, said)
