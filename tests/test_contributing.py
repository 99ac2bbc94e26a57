"""CONTRIBUTING.md names what is there, and a format touches few files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("layouts", "schedules", "tiles", "autotune", "tilebit", "tests", "results")
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"^## ", TEXT, flags=re.M)[1:])


def named(text: str) -> list[str]:
    """Files and folders of the tree in backquotes, in order, without those of commands."""
    return [w for w in re.findall(r"`([^`\s]+)`", text) if (w.split("/")[0] in FOLDERS and "/" in w) or w.endswith(".md")]


def missing(names: list[str]) -> list[str]:
    """Names of nothing: "KIND", "*", a path with <...> stand for any."""
    return [name for name in names if not list(ROOT.glob(re.sub(r"KIND|<[^>]*>", "*", name)))]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_named_is_there(section: str):
    assert not missing(named(SECTIONS[section]))


def test_a_file_that_is_not_there_is_seen():
    assert missing(named("see `tiles/no_such_file.py` and `schedules/rule.py`")) == ["tiles/no_such_file.py"]


def test_a_format_touches_at_most_ten_files():
    steps = re.search(r"^1\. .*?(?=\n\n)", SECTIONS["Adding a format"], re.M | re.S)
    assert steps is not None
    touched = [name for name in dict.fromkeys(named(steps[0])) if name != "README.md"]  # which `make results` writes
    assert 2 <= len(touched) <= 10, touched


def test_every_step_of_adding_names_a_file():
    for title, text in SECTIONS.items():
        if title.startswith("Adding a ") or title == "Adding an operation":
            assert named(text), title
