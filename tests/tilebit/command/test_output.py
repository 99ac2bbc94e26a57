"""Where output cannot go: one line on stderr and exit code 1, never a traceback; paths are refused
before the work, not after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lanes import one_of_each
from typer.testing import CliRunner

from tilebit.command.cli import app

SHAPE = ("--n", "64", "--k", "128", "--target", "cpu")
COMMANDS = (("explain", *SHAPE), ("explain", *SHAPE, "--json"), ("show", "list"), ("--version",))


def run(shell: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with its standard output where ``shell`` sends it."""
    line = f'exec "$0" -m tilebit "$@" {shell}'
    return subprocess.run(["sh", "-c", line, sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("arguments", one_of_each(COMMANDS, lambda arguments: arguments[0] == "show"), ids=" ".join)
@pytest.mark.parametrize(
    ("shell", "says"),
    [("> /dev/full", "error: standard output cannot be written (No space left on device)"), (">&-", "error: standard output is closed")],
    ids=["full", "closed"],
)
def test_a_standard_output_that_takes_nothing(arguments, shell, says):
    done = run(shell, *arguments)
    assert done.returncode == 1 and done.stderr.startswith(says) and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_reader_that_has_left():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "tilebit", "show", "list"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and not done.stderr, done.stderr


@pytest.mark.parametrize("command", ["show", "bench", "pack"])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(command, tmp_path: Path, monkeypatch):
    """The folder is missing, or a file stands where one belongs; root may write everywhere else."""
    monkeypatch.setattr("tilebit.kernels.build", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr("tilebit.command.bench.measure_workloads", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.svg", *([tmp_path / "none" / "a.svg"] if command == "show" else [])):
        arguments = {
            "show": ("show", "mma_c", "--out", str(path)),
            "bench": ("bench", "--n", "64", "--k", "128", "--device", "cpu", "--out", str(path)),
            "pack": ("pack", str(path), *SHAPE),
        }[command]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1 and f"error: {path} cannot be written: {path.parent} is no folder; accepted: " in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_only_the_system_refuses_names_the_file():
    """As root, whom no permission stops: /proc takes no files."""
    result = CliRunner().invoke(app, ["show", "mma_c", "--out", "/proc/picture.svg"])
    assert result.exit_code == 1 and "error: /proc/picture.svg" in result.stderr and "accepted: " in result.stderr, result.output


def test_a_pack_that_exists_is_refused_in_the_command_s_words(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tilebit.kernels.build", lambda *_: pytest.fail("compiled"))
    for arguments in (("pack",), ("attention", "pack")):
        more = SHAPE if arguments == ("pack",) else ("--heads", "4/2", "--target", "cpu")
        result = CliRunner().invoke(app, [*arguments, str(tmp_path), *more])
        assert result.exit_code == 1 and "exists; accepted: a directory that does not exist yet" in result.stderr
        assert "overwrite" not in result.output
