"""Every invalid call gets one clear error, before any launch, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bad_file_cases import CASES as FILES
from bad_tensor_cases import CASES as TENSORS
from bad_tensor_cases import Bad
from typer.testing import CliRunner

from tilebit.command.cli import app
from tilebit.ops import dispatch
from tilebit.runtime import load_kernel
from tilebit.tiles.compiler.cache import ArtifactCache, default_root

CASES = [*TENSORS, *FILES]
# How a message says what is accepted, or what to do.
ADVICE = re.compile(
    r"accepted|need|must|hold|expected|pass |use |choose|quantize|delete|set "
    r"|convert|copy|correct|repair|supported|missing|move|fits|lists|"
    r"has no|only|None"
)

# (arguments, what stderr must say): bad usage, exit code 2.
SHAPE = ["--n", "64", "--k", "64"]
USAGE = [
    ([], "Usage"),
    (["fly"], "No such command"),
    (["compile"], "--n"),
    (["compile", "--n", "64"], "--k"),
    (["compile", "--n", "0", "--k", "64"], "greater than or equal to 1"),
    (["compile", "--n", "64", "--k", "-1"], "greater than or equal to 1"),
    (["compile", "--n", "many", "--k", "64"], "a valid integer"),
    (["compile", *SHAPE, "--m", "0"], "no whole number from 1 on"),
    (["compile", *SHAPE, "--format", "int4"], "w4a16_g128"),
    (["compile", *SHAPE, "--dtype", "float32"], "float16"),
    (["compile", *SHAPE, "--target", "sm_70"], "sm_80"),
    (["compile", *SHAPE, "--jobs", "0"], "greater than or equal to 1"),
    (["compile", *SHAPE, "--speed"], "No such option"),
    (["tune", *SHAPE, "--budget", "0"], "greater than or equal to 1"),
    (["tune", *SHAPE, "--target", "gpu"], "sm_90a"),
    (["bench", *SHAPE, "--device", "tpu"], "accepted"),
    (["bench", *SHAPE, "--dtype", "int8"], "bfloat16"),
    (["explain", *SHAPE, "--limit", "-1"], "greater than or equal to 0"),
    (["explain", *SHAPE, "--format", "w4a16_g100"], "w4a16_g128"),
    (["show"], "name"),
    (["show", "sm_70:4"], "sm_80:4"),
    (["show", "mma_a:k16", "--by", "side"], "word"),
    (["show", "mma_a:k16", "--out", "picture.pdf"], ".svg"),
    (["pack", *SHAPE], "path"),
    (["pack", "p", *SHAPE, "--format", "fp8"], "w4a16_g128"),
    (["doctor", "now"], "unexpected extra argument"),
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Other tests write to the run's cache meanwhile."""
    monkeypatch.setenv("TILEBIT_CACHE", str(tmp_path_factory.mktemp("cache")))


def tree(*folders: Path) -> dict[str, bytes]:
    """Every file below ``folders`` with its content (what it holds, for anything but small files, by size)."""
    return {
        str(p): p.read_bytes() if p.stat().st_size < 1 << 16 else str(p.stat().st_size).encode()
        for f in folders
        for p in f.rglob("*")
        if p.is_file()
    }


def plain(output: str) -> str:
    """Without colours, boxes and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[^\x00-\x7f]", "", output).split())


def test_there_are_enough_cases():
    assert len(CASES) + len(USAGE) >= 200
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_an_invalid_call_raises_one_clear_error_before_any_launch(case: Bad, launches, tmp_path):
    dispatch.forget()  # the ids of weights that were checked are used again by later cases
    before = tree(default_root())
    with pytest.raises(case.error) as caught:
        case.call(tmp_path)
    message = str(caught.value).replace(str(tmp_path), "")  # the test's own folder has numbers in its name
    for text in case.says:
        assert text in message, f"{text!r} is not said in: {message}"
    assert ADVICE.search(message), f"nothing to go by in: {message}"
    assert not launches.seen, "a kernel was launched"
    assert tree(default_root()) == before, "something was left in the cache"
    assert not [p for p in tmp_path.rglob(".*")], "something half-written was left"


@pytest.mark.parametrize(("arguments", "says"), USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_usage_exits_with_2(arguments, says, launches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = tree(default_root())
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert says in plain(result.output)
    assert not launches.seen and tree(default_root()) == before and not list(tmp_path.iterdir())


def test_a_corrupted_cache_entry_is_set_aside_and_built_again(tmp_path):
    """The cache never raises for one: it moves it to quarantine, with the reason, and reports it as absent."""
    from bad_file_cases import artifact

    cache = ArtifactCache(tmp_path / "cache")
    key = "0" * 64
    artifact(cache.kernels / key)
    (cache.kernels / key / "kernel.so").write_bytes(b"")
    assert cache.lookup(key) is None
    (place,) = cache.quarantined.iterdir()
    assert "kernel.so has 0 bytes" in (place / "REASON").read_text()
    with pytest.raises(Exception, match=r"kernel\.so has 0 bytes"):
        load_kernel(place)
