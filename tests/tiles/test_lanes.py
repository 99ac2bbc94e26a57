"""Which tests run at every edit: of each kind of many cases one of each sort, and nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

from lanes import TESTS, one_of_each, slow_functions

ROOT = Path(__file__).parents[2]


def test_one_of_each_sort_runs_at_every_edit() -> None:
    parameters = one_of_each([("a", 1), ("a", 2), ("b", 3)], lambda case: case[0])
    assert [p.values for p in parameters] == [(("a", 1),), (("a", 2),), (("b", 3),)]
    assert [[m.name for m in p.marks] for p in parameters] == [[], ["slow"], []]
    assert one_of_each([("a", 1)], lambda case: case[0], several=True)[0].values == ("a", 1)


def test_every_line_of_the_slow_list_names_a_test() -> None:
    names = list(slow_functions())
    assert names and names == sorted(set(names))
    for name in names:
        path, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(", (TESTS / path).read_text(encoding="utf-8"), re.MULTILINE), name


def test_the_fast_lane_leaves_out_what_is_slow_and_ci_nothing() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^([a-z-]+): SELECTED = (.*)$", makefile, re.M) == [("test", '-m "not slow"')]
    for lane in ("test", "test-all"):
        assert re.search(rf"^{lane}: \$\(SETUP\) links\n\t\$\(tests\)$", makefile, re.M)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test-all"
    assert all(f"make {lane}`" in (ROOT / page).read_text() for lane in ("test-all",) for page in ("README.md", "CONTRIBUTING.md"))
