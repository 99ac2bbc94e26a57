"""What dequantizing costs in whole kernels of LiquidGEMM's weights (4.3): three instructions to unpack a word of eight codes, one
multiplication and one exclusive or for each four, and nothing between these and the product. In machine code, followed from register to
register; ``tests/tiles/device/test_int8.py`` counts the device function alone."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from toolchain import machine_code, needs_nvcc

from results.measure.ablation import by_lanes
from tilebit.layouts.formats import FORMATS
from tilebit.schedules.gemm.stream import warp_rows
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import target_from_name
from tilebit.tiles.compiler.cache import ArtifactCache
from tilebit.tiles.compiler.compile import CompileRequest
from tilebit.tiles.compiler.kernel import Kernel
from tilebit.tiles.compiler.pool import CompilePool

LQQ64, LQQ128 = FORMATS["w4a8_lqq_g64"], FORMATS["w4a8_lqq_g128"]
CASES = {
    "gemm_wgmma": ("sm_90a", Workload(256, 512, 1024, LQQ128), Schedule("gemm_wgmma", 128, 128, 128, 4, 8)),
    "gemm_stream_bulk": ("sm_90a", Workload(16, 512, 1024, LQQ128), Schedule("gemm_stream_bulk", 64, 16, 128, 2, 8)),
    "gemm_wgmma, groups of 64": ("sm_90a", Workload(64, 512, 1024, LQQ64), Schedule("gemm_wgmma", 64, 64, 256, 3, 4)),
    "gemm_stream": ("sm_80", Workload(8, 512, 1024, LQQ64), Schedule("gemm_stream", 64, 8, 64, 3, 4)),
    "gemm_mma": ("sm_80", Workload(64, 512, 1024, LQQ128), Schedule("gemm_mma", 128, 64, 128, 3, 8)),
}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+([^;]*);", re.M)
REGISTER = re.compile(r"\bR(\d+)\b")
# What a chain is made of, from the product back to the packed word: (name, its operation, its operands). LUT 0x3c is a ^ b, 0xc0 a & b.
XOR = r"R\d+, 0x80808080, RZ, 0x3c"
AND = r"R\d+, 0xf0f0f0f, RZ, 0xc0"
STEPS = (
    ("xor", "LOP3.LUT", XOR),
    ("multiply", "IMAD", r"R\d+, R\d+, R\d+$"),
    ("and", "LOP3.LUT", AND),
    ("shift", "SHF.R.U32.HI", r"RZ, 0x4, R\d+"),
)
PRODUCTS = ("IGMMA", "IMMA", "QGMMA", "HGMMA", "HMMA")


class Listing:
    """Instructions of a kernel, in order: (operation, register that it writes, other operands)."""

    def __init__(self, sass: str) -> None:
        self.found: list[tuple[str, str, str]] = []
        for operation, operands in INSTRUCTION.findall(sass.replace(".reuse", "")):
            first, _, rest = operands.partition(", ")
            self.found.append((operation, first.strip(), rest.strip()))

    def written_before(self, register: str, at: int) -> int:
        """The instruction before ``at`` that wrote ``register`` last; of a load of several registers too."""
        number = int(register[1:])
        for place in range(at - 1, -1, -1):
            operation, first, _ = self.found[place]
            wide = 4 if ".128" in operation else 2 if ".64" in operation else 1
            if re.fullmatch(r"R\d+", first) and 0 <= number - int(first[1:]) < wide and not operation.startswith(("ST", *PRODUCTS)):
                return place
        raise AssertionError(f"nothing writes {register} before instruction {at}")

    def is_multiplied(self, register: str, at: int) -> bool:
        """What instruction ``at`` writes there is the left side of a product, as it is."""
        number = int(register[1:])
        for operation, first, rest in self.found[at + 1 :]:
            if operation.startswith(PRODUCTS):
                left = REGISTER.search(rest)
                if left is not None and 0 <= number - int(left[1]) < 4:
                    return True
            elif register in (first, *(f"R{n}" for n in REGISTER.findall(rest))) or operation == "EXIT":
                return False
        return False

    def unpacked(self, operands: str, at: int) -> int:
        """The instruction that wrote the factor of a multiplication that is no scale."""
        factors = [self.written_before(f"R{number}", at) for number in REGISTER.findall(operands)[:2]]
        (found,) = [place for place in factors if not self.found[place][0].startswith("LDS")]
        return found


def dequantized(sass: str) -> tuple[Counter[str], int]:
    """How many instructions of each kind make operands of packed codes, and how many words of eight codes they are made of. Raises
    ``AssertionError`` where a value takes another way."""
    listing, kinds, words = Listing(sass), {name: set() for name, *_ in STEPS}, set()
    for at, (operation, made, operands) in enumerate(listing.found):
        if operation != STEPS[0][1] or not re.match(XOR, operands):
            continue
        assert listing.is_multiplied(made, at), f"{made} of instruction {at} is no operand of a product"
        for name, wanted, shape in STEPS:
            kind, _, operands = listing.found[at]
            if name == "shift" and kind.startswith("LD"):
                break  # low nibbles are where they are wanted
            assert kind == wanted and re.match(shape, operands), f"instruction {at} is {kind} {operands}; accepted: {wanted} {shape}"
            kinds[name].add(at)
            at = listing.unpacked(operands, at) if name == "multiply" else listing.written_before(f"R{REGISTER.findall(operands)[0]}", at)
        assert listing.found[at][0].startswith("LDS") and ".128" in listing.found[at][0], listing.found[at]
        words.add(at)
    return Counter({name: len(places) for name, places in kinds.items()}), 4 * len(words)


def weights_of_a_thread(schedule: Schedule) -> int:
    """In a step."""
    if schedule.program in ("gemm_wgmma", "gemm_mma"):
        return schedule.block_n * schedule.block_k // (schedule.num_warps * 32)
    return warp_rows(schedule) * schedule.block_k // 32


def machine_code_of(arch: str, workload: Workload, schedule: Schedule) -> str:
    with CompilePool(jobs=1, cache=ArtifactCache(), keep=True) as pool:
        (kernel,) = pool.compile([CompileRequest(schedule.program, workload, schedule, target_from_name(arch))])
    assert isinstance(kernel, Kernel), kernel
    return machine_code(kernel.path / "kernel.cubin")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_eight_weights_take_seven_instructions(case: str):
    arch, workload, schedule = CASES[case]
    counts, words = dequantized(machine_code_of(arch, workload, schedule))
    of_a_step = weights_of_a_thread(schedule) // 8
    assert words == of_a_step or (schedule.program == "gemm_mma" and words % of_a_step == 0)  # whose steps nvcc may write out
    assert counts == {"xor": 2 * words, "multiply": 2 * words, "and": 2 * words, "shift": words}
    assert counts.total() == 7 * words


@needs_nvcc
@pytest.mark.slow
def test_other_arithmetic_is_told_apart():
    """QServe's, on the same weights."""
    arch, workload, schedule = CASES["gemm_wgmma"]
    sass = machine_code_of(arch, Workload(workload.m, workload.n, workload.k, by_lanes.FORMAT), schedule)
    try:
        counts, words = dequantized(sass)
    except AssertionError:
        return
    assert counts.total() != 7 * words or words != weights_of_a_thread(schedule) // 8
