"""The steps of the ablation of any precision, and the schedules that each of them tries:

0  planes are rows of bits in the order of k, of which a lane loads 32 at a time; it puts the bits
   of a code together one by one, and looks each number up in its row's table in shared memory
1  weight bitplane layout: planes lie as lanes read them, 16 bytes each, and so do the pieces of x
2  bit transposition: matrices of 8 x 8 bits (Warren), what the paper's baseline has
3  efficient bit transposition: bits of the planes' words are selected, each plane being rotated
4  a table for each lane, in a bank of its own, whose addresses are byte permutations (not in the
   paper)
5  merged look-ups: tables of pairs, a look-up gives two numbers; of up to 4 bits
6  a quarter of the codes is looked up in registers (not in the paper); of 3 bits
7  planes are multiplied as they lie, on binary tensor cores, and nothing is looked up (not in the
   paper): ``gemm_any_binary``; of up to 4 bits

Layout, transposition and merging are those of Any-Precision LLM (Park et al., 2024), 5.3. Steps that
look up are variants of ``gemm_any`` (``any_variants``), the last of them is ``gemm_any`` itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilebit.schedules.gemm import any_binary
from tilebit.schedules.gemm.any import PAIRED_BITS, PROGRAM
from tilebit.schedules.gemm.workload import Workload
from tilebit.schedules.operations import find_rule, legal
from tilebit.schedules.records import TuningRecord, shipped_records
from tilebit.schedules.schedule import Schedule
from tilebit.schedules.target import Target

from .any_variants import apart, merged, permuted, plain, selected, turned

TRIED = 6  # schedules of a step, at most
TUNED = 2  # of them
IN_REGISTERS = 3  # bits of codes of which some are looked up there


@dataclass(frozen=True, slots=True)
class Step:
    """One rung: ``program`` has its idea and none of a later one; for codes of up to ``bits``."""

    number: int
    idea: str
    program: str
    bits: int = 8


STEPS = (
    Step(0, "plain planes, 32-bit loads, codes bit by bit", plain.PROGRAM.name),
    Step(1, "weight bitplane layout", permuted.PROGRAM.name),
    Step(2, "bit transposition of 8 x 8 matrices", turned.PROGRAM.name),
    Step(3, "efficient bit transposition", selected.PROGRAM.name),
    Step(4, "a table for each lane", apart.PROGRAM.name),
    Step(5, "merged look-ups", merged.PROGRAM.name, PAIRED_BITS),
    Step(6, "a quarter of the look-ups in registers", PROGRAM, IN_REGISTERS),
    Step(7, "planes multiplied as bits", any_binary.PROGRAM, max(any_binary.BITS)),
)


def steps_of(bits: int) -> tuple[Step, ...]:
    """The steps of codes of so many bits. The last one that looks up is the library's ``gemm_any``,
    which has the same ideas."""
    own = [step for step in STEPS if bits <= step.bits]
    last = max(i for i, step in enumerate(own) if step.program != any_binary.PROGRAM)
    return tuple(replace(step, program=PROGRAM) if i == last else step for i, step in enumerate(own))


def drawn(workload: Workload, target: Target, records: Iterable[TuningRecord] | None = None) -> dict[Step, list[Schedule]]:
    """The schedules to try of every step: the fastest that were tuned for this workload on devices
    of this architecture (``records``, default: the shipped), then the program's candidates, the
    first of each number of warps before others."""
    tuned = [r for r in (shipped_records() if records is None else records) if r.ok and r.workload == workload and r.arch == target.arch]
    known = [r.schedule for r in sorted(tuned, key=lambda r: r.us or 0.0)]
    found = {}
    for step in steps_of(workload.format.bits):
        own = step.program if step.program == any_binary.PROGRAM else PROGRAM
        named = dict.fromkeys(replace(s, program=step.program) for s in known if s.program == own)
        first = [s for s in named if not legal(workload, s, target)][:TUNED]
        rest = find_rule(step.program).candidates(workload, target)
        one_each = {s.num_warps: s for s in reversed(rest)}
        found[step] = [*dict.fromkeys([*first, *sorted(one_each.values(), key=rest.index), *rest])][:TRIED]
    return found
