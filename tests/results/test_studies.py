"""Each study is registered once: its rows, its page and its commands are there, and no rows or pages besides."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from results.report.render import study_page
from results.report.rows import ROWS, Row
from results.report.targets_page import NAME as TARGETS_PAGE
from results.studies import STUDIES, Study

RESULTS = ROWS.parent
README_LINES = 150


def test_each_study_is_registered_once():
    names = [study.name for study in STUDIES]
    assert len(names) == len(set(names)) == len({study.title for study in STUDIES})


def test_every_file_of_rows_belongs_to_a_study():
    folders = {path.relative_to(ROWS).parts[0] for path in ROWS.rglob("*.jsonl")}
    assert folders == {study.name for study in STUDIES}, "a folder of results/rows has no study, or a study has no rows"
    assert not [path for path in RESULTS.rglob("*.jsonl") if ROWS not in path.parents]


def test_every_page_is_of_a_study_or_of_targets_and_linked_from_a_short_readme():
    readme = (RESULTS / "README.md").read_text()
    pages = {path.name for path in (RESULTS / "pages").iterdir()}
    assert pages == {*(f"{study.name}.md" for study in STUDIES), TARGETS_PAGE}
    assert pages == set(re.findall(r"\]\(pages/([^)]+)\)", readme))
    assert len(readme.splitlines()) <= README_LINES


def test_every_finding_is_one_numbered_and_listed():
    notes = {path.name: path.read_text() for path in (RESULTS / "notes").glob("*.md")}
    listed = re.findall(r"\]\(([a-z0-9-]+\.md)\)", notes.pop("README.md"))
    assert sorted(listed) == sorted(notes)
    for name, text in notes.items():
        assert text.count("# ") == 1 and re.search(r"\d", text.split("\n", 1)[1]) and "\nWhere: " in text, name


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_row_can_be_read(study: Study):
    assert sum(1 for _ in study.rows(ROWS)) > 0


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_commands_name_modules(study: Study):
    assert study.commands
    for command in study.commands:
        module = re.match(r"python -m ([a-z_.]+)", command)
        assert command.startswith("make ") or (module and find_spec(module[1]) is not None), command


def test_a_row_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "some.jsonl").write_text('{"op": "gemm"}\n')
    for row, said in ((Row, "line 1: not a measured row"), (("op", "us"), "line 1: us missing")):
        with pytest.raises(ValueError, match=said):
            list(Study("x", "X", "What?", row, lambda _: "", ("make x",)).rows(tmp_path))


def test_a_page_without_rows_says_so(tmp_path: Path):
    for study in STUDIES:
        assert study_page(study, tmp_path).endswith("No rows yet.\n")
