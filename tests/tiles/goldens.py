"""The stored digests of what the programs generate: of a kernel's body by case, and of each file of ``tiles/device``."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tilebit.schedules.attention.workload import AttentionWorkload
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.compiler.headers import device_source
from tilebit.tiles.programs import program

STORED = Path(__file__).with_name("goldens.json")
ENTRY = 'extern "C" __global__'
RENEWED = "Where this is intended, renew goldens.json: see the top of tests/tiles/test_goldens.py."


def stored() -> dict[str, dict[str, str]]:
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def label(case: tuple[str, Any, Schedule]) -> str:
    """Of what tells the cases apart, and of nothing that a new field of a dataclass would change."""
    arch, w, s = case
    asked_for = [name for name in ("window", "sinks", "soft_cap", "lse") if getattr(w, name, None)]
    size = f"head{w.head_dim}" if isinstance(w, AttentionWorkload) else f"m{w.m}"
    tile = f"{s.block_n}x{s.block_m}x{s.block_k}"
    return "-".join((arch, s.program, w.format.name, w.dtype, size, *asked_for, tile)) + parts_of(w)


def parts_of(w: Any) -> str:
    """What a product does besides, as the end of a label."""
    halves = "halves" * getattr(w, "gate_halves", False)
    found = ("norm" * getattr(w, "norm", False), getattr(w, "gate", ""), halves, "residual" * getattr(w, "residual", False))
    return "".join(f"-{name}" for name in found if name)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def without_comments(text: str) -> str:
    """C++ without comments (strings are kept, whatever they hold), trailing blanks and blank lines."""
    found = re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', lambda m: m[0] if m[0][0] == '"' else " ", text, flags=re.S)
    return "\n".join(line.rstrip() for line in found.splitlines() if line.strip())


def body_of(source: str, included: str) -> str:
    """The kernels of a generated source that includes ``included`` as text."""
    before, found, after = source.partition(included.strip())
    assert found, "the generated source does not hold the program's headers as they are"
    assert ENTRY not in before
    return after[after.index(ENTRY) :].strip()


def differences(kind: str, stored: dict[str, str], found: dict[str, str]) -> list[str]:
    """What is not as it is stored, a sentence each."""
    changed = [f"{kind}: {name} changed" for name in found if name in stored and stored[name] != found[name]]
    return changed + [f"{kind}: {name} is only {'stored' if name in stored else 'found'}" for name in sorted(stored.keys() ^ found.keys())]


def check_source(case: tuple[str, Any, Schedule], source: str) -> None:
    """The compiled ``source`` of ``case`` has the body that is stored for it."""
    found = digest(body_of(source, device_source(program(case[2].program).headers)))
    changes = differences("bodies", {label(case): stored()["bodies"].get(label(case), "")}, {label(case): found})
    assert not changes, "\n".join((*changes, RENEWED))
