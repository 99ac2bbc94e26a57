"""What programs include: each file's text, after the numbers that schedules decide by and its functions use."""

from __future__ import annotations

import os
import re

from tilebit.schedules.gemm.rules import TICKETS
from tilebit.tiles.compiler.headers import CONSTANTS, device_source
from tilebit.tiles.program import DEVICE_DIR


def test_numbers_come_before_the_file_that_uses_them():
    source = device_source(("ptx/instructions.cuh", "store/split_k.cuh"))
    assert source.count(f"constexpr int TICKETS = {TICKETS};") == 1
    assert source.index("constexpr int TICKETS") < source.index((DEVICE_DIR / "store/split_k.cuh").read_text())
    assert "SHARING_STEPS" not in source


def test_numbers_are_stated_once_and_used():
    texts = {path.relative_to(DEVICE_DIR).as_posix(): path.read_text() for path in DEVICE_DIR.rglob("*.cuh")}
    for header, numbers in CONSTANTS.items():
        for name in numbers:
            assert re.search(rf"\b{name}\b", texts[header])
            assert not any(re.search(rf"\bconstexpr int {name}\b", text) for text in texts.values())


def test_any_file_may_be_included(tmp_path):
    own = tmp_path / "own.cuh"
    own.write_text("// of another package\n")
    assert device_source((str(own),)) == "// of another package\n"
    own.write_text("// as it is now\n")
    os.utime(own, ns=(0, 1))  # two writes in one tick of the clock would have one time
    assert device_source((str(own),)) == "// as it is now\n"
