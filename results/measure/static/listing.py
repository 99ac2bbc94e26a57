"""The inner loop of a kernel in its SASS (or PTX), and what it spends on a KiB of packed weights.

**Which loop.** A loop is a backward branch whose target dominates it (every path to the branch passes the target), and its body is what
lies between the two; a jump back from code that was moved out of line is no loop. Of the loops that multiply (HMMA, HGMMA) and hold no
other loop that does, the one with the most multiplications is the inner loop, the shortest where several have as many.

**Which instructions.** Those that every pass executes: of the body, the blocks that dominate all branches back, and those that request
data of a later pass by asynchronous copies, which only the last passes skip. So neither the spins behind a barrier's first try count nor,
in a persistent kernel, the end of a tile. A kernel without a loop (k so short that the compiler unrolled it) counts whole.

**How much weight.** Each warp fetches packed weights as 512-byte lines, one 128-bit load a lane, and nothing else in every pass is fetched
so wide: x comes by ldmatrix or is read by the tensor core, scales come by ldmatrix or two bytes at a time. So 128-bit loads to registers
times 512 is what one pass of one warp turns into products.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

LINE_BYTES = 512  # of a warp-wide 128-bit load
KIB = 1024

# What an opcode is for; the first pattern that fits counts.
CLASSES = {
    "sass": {
        "mma": r"[HIQ]G?MMA$",
        "bits": r"(LOP3|SHF|PRMT)$",
        "arithmetic": r"(HFMA2|HMUL2|HADD2|FFMA|FMUL|FADD)$",
        "shared": r"(LDS|LDSM)$",
        "global": r"(LDG|LDGSTS|UTMALDG|UBLKCP)$",
    },
    "ptx": {
        "mma": r"(mma\.sync|wgmma\.mma_async)\b",
        "bits": r"(lop3|and|or|xor|shf|shl|shr|prmt)\.",
        "arithmetic": r"(fma|mul|add|sub)\.(rn\.)?(f16x2|bf16x2|f16|bf16|f32)|fma\.",
        "shared": r"(ld\.shared|ldmatrix)",
        "global": r"(ld\.global|cp\.async\.(c[ag]|bulk))",
    },
}
REQUEST = re.compile(r"(LDGSTS|UBLKCP|UTMALDG)\b|cp\.async\.(c[ag]|bulk)\.")  # asynchronous copies from global memory
_SASS_LINE = re.compile(r"^\s*(?:(?P<label>\.L\w+):|/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<code>[^;]*?)\s*;)")
_PTX_LINE = re.compile(r"^\s*\{?\s*(?:(?P<label>[$\w]+):|(?P<code>(?:@!?%?\w+\s+)?[a-z][\w.:]*(?:\s[^;]*)?);)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its ``name`` with modifiers ("LDS.128"), where it may jump to (an index into
    the listing) and whether it may also go on to the next one."""

    name: str
    target: int | None = None
    falls_through: bool = True


@dataclass(frozen=True, slots=True)
class Loop:
    """The instructions ``first`` to ``last`` (both included) of a listing, of which passes execute
    ``each``; ``looped`` is False for a whole listing without a loop."""

    first: int
    last: int
    each: tuple[int, ...]
    looped: bool = True


@dataclass(frozen=True, slots=True)
class Spent:
    """What one pass of one warp through the inner loop executes: ``instructions`` in all and by
    class, for ``weight_bytes`` packed bytes and ``flops`` operations of the tensor cores (the
    warp's share)."""

    instructions: int
    by_class: dict[str, int]
    weight_bytes: int
    flops: float
    looped: bool

    def per_kib(self, what: str | None = None) -> float:
        """Instructions (of one class) for each KiB of packed weights."""
        return (self.instructions if what is None else self.by_class[what]) / (self.weight_bytes / KIB)


def parse(text: str, level: str) -> list[Instruction]:
    """The instructions of a listing by nvdisasm or cuobjdump (``level`` "sass") or of PTX ("ptx").

    Raises ``ValueError`` when there is none, or one jumps to a label or address that the listing
    has not."""
    pattern = {"sass": _SASS_LINE, "ptx": _PTX_LINE}[level]
    codes: list[tuple[str, tuple[int, ...]]] = []  # with the scopes that an instruction stands in, the innermost last
    places: dict[tuple[int, str], int] = {}  # labels, of inline PTX in a scope of its own, and addresses
    scopes, opened = [0], 0
    for line in text.splitlines():
        found = pattern.match(line)
        depth = line.count("{") - line.count("}") if level == "ptx" else 0
        for _ in range(depth):
            opened += 1
            scopes.append(opened)
        if found is not None and found["label"]:
            places[scopes[-1], found["label"]] = len(codes)
        elif found is not None:
            if level == "sass":
                places[0, f"{int(found['address'], 16):#x}"] = len(codes)
            codes.append((found["code"], tuple(scopes)))
        del scopes[max(1, len(scopes) + min(depth, 0)) :]
    if not codes:
        raise ValueError(f"no instruction in {len(text)} characters; accepted: the output of nvdisasm -c, cuobjdump --dump-sass, or PTX")
    return [_instruction(code, within, places) for code, within in codes]


def _instruction(code: str, scopes: tuple[int, ...], places: dict[tuple[int, str], int]) -> Instruction:
    predicate, code = ("", code) if not code.startswith("@") else code.split(maxsplit=1)
    name, _, operands = code.partition(" ")
    operands = operands.strip()
    base = name.split(".")[0]
    if base not in ("BRA", "bra"):
        return Instruction(name, None, bool(predicate) or base not in ("EXIT", "RET", "ret", "exit", "trap"))
    label = re.search(r"`\((.+?)\)|(0x[0-9a-f]+)$|([$\w]+)$", operands)
    wanted = next(filter(None, label.groups())) if label else ""
    target = next((places[scope, wanted] for scope in reversed(scopes) if (scope, wanted) in places), None)
    if label is None or target is None:
        raise ValueError(f"{code!r} jumps to a place that the listing has not; accepted: the listing of one whole kernel")
    # `BRA P0, target` and `BRA.DIV UR4, target` may fall through although nothing stands before
    # them.
    return Instruction(name, target, bool(predicate) or operands != label.group(0))


def inner_loop(listing: list[Instruction], level: str) -> Loop:
    """The loop that the module's first paragraphs describe."""
    flow = _Flow(listing)
    multiplies = [_class(i.name, level) == "mma" for i in listing]
    backward: dict[int, list[int]] = {}  # branches by target, in order
    for index, instruction in enumerate(listing):
        target = instruction.target
        if target is not None and target <= index and flow.dominates(target, index):
            backward.setdefault(target, []).append(index)
    loops = {(first, branches[-1]) for first, branches in backward.items() if any(multiplies[first : branches[-1] + 1])}
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        return Loop(0, len(listing) - 1, tuple(range(len(listing))), looped=False)
    first, last = max(inner, key=lambda loop: (sum(multiplies[loop[0] : loop[1] + 1]), loop[0] - loop[1], -loop[0]))
    body = range(first, last + 1)
    requesting = {flow.block_of[index] for index in body if REQUEST.match(listing[index].name)}
    each = (i for i in body if flow.block_of[i] in requesting or all(flow.dominates(i, branch) for branch in backward[first]))
    return Loop(first, last, tuple(each))


def spent(text: str, level: str) -> Spent:
    """What the inner loop of the kernel in ``text`` spends. Raises ``ValueError`` when it holds no
    128-bit load."""
    listing = parse(text, level)
    loop = inner_loop(listing, level)
    names = [listing[index].name for index in loop.each]
    counts = Counter(_class(name, level) for name in names)
    lines = sum(_is_wide(name, level) for name in names)
    if not lines:
        raise ValueError(f"no 128-bit load among the {len(names)} instructions of the inner loop; accepted: kernels that read packed lines")
    by_class = {name: counts[name] for name in (*CLASSES[level], "other")}
    return Spent(len(names), by_class, lines * LINE_BYTES, sum(map(_flops, names)), loop.looped)


def _class(name: str, level: str) -> str:
    opcode = name.split(".")[0] if level == "sass" else name
    return next((known for known, pattern in CLASSES[level].items() if re.match(pattern, opcode)), "other")


def _is_wide(name: str, level: str) -> bool:
    """A load of 16 bytes a lane into registers."""
    if level == "sass":
        parts = name.split(".")
        return parts[0] in ("LDS", "LDG") and "128" in parts
    return bool(re.match(r"ld\.(shared|global)[\w.:]*\.(v4\.[bufs]32|v2\.[bufs]64)", name))


def _flops(name: str) -> float:
    """Operations of one warp's tensor-core instruction, its quarter of a warpgroup's; an HGMMA of
    fewer than 32 columns takes as long as one of 32. 0 for every other instruction."""
    group = re.search(r"HGMMA\.64x(\d+)x(\d+)|wgmma\.mma_async.*\.m64n(\d+)k(\d+)", name)
    if group:
        columns, depth = (int(v) for v in group.groups() if v)
        return 2 * 16 * max(columns, 32) * depth
    single = re.search(r"HMMA\.16816|mma\.sync.*\.m16n8k16", name)
    return 2 * 16 * 8 * 16 if single else 0


class _Flow:
    """The blocks of a listing (``block_of`` each instruction), and which of them dominate which."""

    def __init__(self, listing: list[Instruction]) -> None:
        leaders = {0} | {i.target for i in listing if i.target is not None}
        leaders |= {n + 1 for n, i in enumerate(listing[:-1]) if i.target is not None or not i.falls_through}
        starts = sorted(leaders)
        stops = [*starts[1:], len(listing)]
        self.block_of = [block for block, (start, stop) in enumerate(zip(starts, stops, strict=True)) for _ in range(start, stop)]
        sources: list[list[int]] = [[] for _ in starts]
        for block, stop in enumerate(stops):
            end = listing[stop - 1]
            if end.target is not None:
                sources[self.block_of[end.target]].append(block)
            if end.falls_through and stop < len(listing):
                sources[block + 1].append(block)
        self._dominators = _dominators(sources)

    def dominates(self, a: int, b: int) -> bool:
        """Whether every path from the first instruction to b passes a; true of unreachable code."""
        block_a, block_b = self.block_of[a], self.block_of[b]
        return a <= b if block_a == block_b else bool(self._dominators[block_b] >> block_a & 1)


def _dominators(sources: list[list[int]]) -> list[int]:
    """For each block, the set of those that dominate it, as bits; ``sources`` are the blocks that
    lead to it, block 0 is the entry."""
    everything = (1 << len(sources)) - 1
    found = [1, *[everything] * (len(sources) - 1)]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(sources)):
            common = everything
            for source in sources[block]:
                common &= found[source]
            common |= 1 << block
            if common != found[block]:
                found[block], changed = common, True
    return found
