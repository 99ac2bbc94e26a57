"""Write everything that is generated from measured rows and from code: results/README.md, its plots, and the marked parts of README.md.

    make results        (or: python -m results.report.render [--check])

``--check`` writes nothing and fails when a text is not what it would write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .attention_rows import read_attention
from .attention_tables import attention_section, readme_attention
from .chains import read_chains
from .kv_cache import accuracy_section
from .overheads import overheads_section
from .plots import draw
from .rows import json_rows, read_rows
from .static import page as static_page
from .studies import ablation_section, attention_ablation_section, ranker_section, read_ablation, selection_section, sweep_section
from .support import attention_support_table, support_table
from .tables import readme_table, results_page

ROOT = Path(__file__).resolve().parent.parent.parent


def between_markers(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Raises ``ValueError`` when the markers are not there once, in this order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the text has no single pair {begin} ... {end}; put both markers back where the generated part belongs")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def texts(root: Path) -> dict[Path, str]:
    """Every generated text under ``root`` and what it must say."""
    results, rows = root / "results", root / "results" / "rows"
    devices, attention = read_rows(rows / "gemm"), read_attention(rows / "attention")
    readme = (root / "README.md").read_text()
    for name, content in (
        ("support", support_table()),
        ("results", readme_table(devices)),
        ("attention-support", attention_support_table()),
        ("attention-results", readme_attention(attention)),
    ):
        readme = between_markers(readme, name, content)
    sections = [
        attention_section(attention),
        attention_ablation_section(rows / "ablation_attention"),
        accuracy_section(rows / "kv_cache"),
        ablation_section(read_ablation(rows / "ablation")),
        ranker_section(rows / "ranker"),
        selection_section(rows / "selection"),
        sweep_section(rows / "sweep"),
        overheads_section(rows / "overheads"),
    ]
    page = results_page(devices, read_chains(rows / "chain"))
    page += "".join(f"\n{section}\n" for section in sections if section)
    static = {results / "pages" / f"static_{arch}.md": static_page(found) for arch, found in by_arch(rows / "static").items()}
    return {root / "README.md": readme, results / "README.md": page, **static}


def by_arch(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The static rows of each architecture, in order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _, row in json_rows(folder, ("arch",)):
        found.setdefault(row["arch"], []).append(row)
    return found


def main(arguments: list[str] | None = None) -> int:
    """0: written (or, with --check, current); 1: --check found a stale text; 2: rows or markers that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m results.report.render", description="Generate the results page, its plots and README.md's tables."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a text is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to read and write (default: this one)")
    options = parser.parse_args(arguments)
    try:
        wanted = texts(options.root)
    except ValueError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    if options.check:
        stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"results: {path.relative_to(options.root)} is not what its rows and the code say; run `make results`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    results, rows = options.root / "results", options.root / "results" / "rows"
    plots = draw(read_rows(rows / "gemm"), read_ablation(rows / "ablation"), results / "plots", read_attention(rows / "attention"))
    print(f"results: wrote {', '.join(str(path.relative_to(options.root)) for path in [*wanted, *plots])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
