"""What another package adds is named by its module: what becomes of names that are not at hand, and of the sources behind one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from toy.scaled_add import RULE, ScaledAdd

from tilebit.autotune.store import RecordStore
from tilebit.autotune.worker_process import _arguments
from tilebit.layouts.formats import GemmFormat, Numbers, Scale
from tilebit.layouts.outside import NotInstalled, stated
from tilebit.schedules.gemm.codecs import codec_of
from tilebit.schedules.operations import find_rule, operation
from tilebit.schedules.records import TuningRecord, load_records
from tilebit.schedules.schedule import Schedule
from tilebit.tiles.programs import program_sources

LOST = "nobodys_package.scaled_add"
RECORD = TuningRecord(ScaledAdd(8, 96), Schedule("toy.scaled_add", 8, 1, 1, num_warps=1), "a processor", "cpu", 2, us=1.0)


@pytest.mark.parametrize("ask", [operation, find_rule, GemmFormat.parse, lambda name: codec_of(GemmFormat(Numbers(name, 4, (Scale(64),))))])
def test_a_module_that_is_not_here_is_named(ask):
    with pytest.raises(NotInstalled, match=r"the module 'nobodys_package.scaled_add', which \w+ is read from, cannot be imported"):
        ask(LOST)
    with pytest.raises(
        ValueError, match=r"the module 'toy.planted_bug' has no (OPERATION|FORMAT|CODEC); accepted: a module that states it"
    ):
        operation("toy.planted_bug") if ask is find_rule else ask("toy.planted_bug")
    with pytest.raises(ValueError, match=r"'w4a16_g12.8' is no path of a module; accepted"):
        ask("w4a16_g12.8")


def test_stated_reads_the_attribute():
    assert stated("toy.scaled_add", "RULE") is RULE


@pytest.mark.filterwarnings("error")
def test_records_of_a_package_that_is_not_here_are_kept_and_left_out(tmp_path: Path):
    here, data = json.dumps(RECORD.to_json()), RECORD.to_json()
    lost = json.dumps({**data, "workload": {**data["workload"], "op": LOST}})
    store = RecordStore(tmp_path / "records.jsonl")
    store.path.write_text(f"{lost}\n{here}\n{lost}")  # the last one without its newline
    assert load_records(store.path) == [RECORD]
    store.append(replace(RECORD, us=2.0))
    assert store.path.read_text().splitlines()[:3] == [lost, here, lost] and not store.torn_path.exists()
    assert [r.us for r in store.records()] == [1.0, 2.0]


def test_a_codebook_has_a_number_for_each_code():
    book = (-1.0, 0.0, 0.5, 1.0)
    assert Numbers("a.codec", 2, (Scale(64),), book).values == book
    with pytest.raises(ValueError, match=r"codebook has 4 numbers; accepted for 4 bits: 16"):
        Numbers("a.codec", 4, (Scale(64),), book)


def test_a_kernels_key_covers_what_its_program_imports_of_its_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not only the files beside the program: a package may have its operations in one folder and what they share in another."""
    for name, text in {
        "far/__init__.py": "",
        "far/shared/__init__.py": "",
        "far/shared/loops.py": "STEP = 4\n",
        "far/shared/unused.py": "",
        "far/cpu/__init__.py": "",
        "far/cpu/program.py": "from dataclasses import replace\nfrom toy.scaled_add import RULE as toys\n"
        "from toy.scaled_add_program import PROGRAM\nfrom ..shared.loops import STEP\n"
        "RULE = replace(toys, program=__name__, module=__name__)\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {path.relative_to(tmp_path).as_posix() for path in program_sources("far.cpu.program") if path.is_relative_to(tmp_path)}
    assert files >= {"far/cpu/program.py", "far/shared/loops.py"} and "far/shared/unused.py" not in files


def test_an_operand_called_x_may_have_any_shape():
    """A product's x gets zero columns that its kernel reads beyond k; another operation's x is as it is."""

    def given(shape: Sequence[int | str], x: torch.Tensor) -> torch.Tensor:
        kernel = SimpleNamespace(params=("x",), manifest={"params": [{"name": "x", "shape": shape}]})
        return _arguments(kernel, {"x": x})[0]  # type: ignore[arg-type]

    for shape, x in ((["m"], torch.ones(3)), (["m", "n"], torch.ones(3, 5)), (["m", 2, 3], torch.ones(4, 2, 3))):
        assert given(shape, x) is x
    assert given(["m", 8], torch.ones(3, 5)).tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]] * 3
