"""The learned cost model, read side: what measurements say about the analytic model's errors.

A model predicts log(us / estimate.us) of a schedule from its ``features``, so that its answers are
microseconds too and what it never saw costs what the analytic model says. It is a JSON document
that ``autotune/ranker.py`` writes: boosted trees of XGBoost, and with them what they were trained
on. Two places are read: the user's, beside the user's records, then the package's
``schedules/tuned/*.ranker.json``. A model serves operations that have features, on one arch, and
only the programs and numbers of its records. Without XGBoost, or without a model, the analytic
model ranks alone; a model that is damaged, or that was trained on another analytic model than this
one, is left out with a ``RankerWarning``."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from math import exp, isclose, nan
from typing import Any

from ..json_reader import parse_json
from .operations import AnyWorkload, Estimate, estimate, operation, workload_from_json
from .records import records_path
from .schedule import Schedule
from .target import Target

VERSION = 1  # of the document
SUFFIX = ".ranker.json"
COMMAND = "python -m tilebit.autotune.ranker"  # trains a model
# Relative; a probe's prediction and its features differ by more only when the analytic model or the features were changed.
SAME, SAME_FEATURE = 1e-3, 1e-6
_SWITCHES = tuple(f.name for f in fields(Schedule) if isinstance(f.default, bool))


class RankerWarning(UserWarning):
    """A ranker model cannot be used; schedules are ranked by the analytic model, or by the next
    model."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranker:
    """A loaded model.

    ``arch`` and ``gpus`` are where its ``records`` measurements of ``workloads`` workloads were
    made, ``digest`` is theirs (``records_digest``), ``kinds`` what they were of, ``names`` the
    features in the order of the trees' columns."""

    arch: str
    gpus: tuple[str, ...]
    kinds: frozenset[str]
    names: tuple[str, ...]
    records: int
    workloads: int
    digest: str
    booster: Any = field(repr=False)

    def serves(self, workload: AnyWorkload, schedules: Sequence[Schedule]) -> bool:
        """Whether every one of ``schedules`` is of a kind the model was trained on: among others
        its numbers would not compare."""
        return operation(workload.op).features is not None and all(kind(workload, s) in self.kinds for s in schedules)

    def predict(self, workload: AnyWorkload, schedules: Sequence[Schedule], target: Target) -> list[float]:
        """Microseconds expected of each schedule (legal ones, of kinds the model serves), in one
        pass over the trees."""
        return self.predict_pairs([(workload, s) for s in schedules], target)

    def predict_pairs(self, pairs: Sequence[tuple[AnyWorkload, Schedule]], target: Target) -> list[float]:
        """``predict`` for schedules of several workloads at once."""
        if not pairs:
            return []
        import numpy as np  # here: `select` without a model needs neither

        expected = [estimate(w, s, target) for w, s in pairs]
        rows = [vector(seen(w, s, target, e), self.names) for (w, s), e in zip(pairs, expected, strict=True)]
        corrections = self.booster.inplace_predict(np.array(rows, dtype=np.float32), missing=nan)
        return [e.us * exp(float(c)) for e, c in zip(expected, corrections, strict=True)]


def kind(workload: AnyWorkload, schedule: Schedule) -> str:
    """What a model must have seen to judge a schedule: its program, its switches and the numbers
    ("gemm_wgmma stream_k w4")."""
    switches = [name for name in _SWITCHES if getattr(schedule, name)]
    return " ".join([schedule.program, *switches, workload.kind])


def seen(workload: AnyWorkload, schedule: Schedule, target: Target, expected: Estimate) -> dict[str, float]:
    """The named values of one schedule, as the workload's operation defines them; none where it has
    no ranker."""
    features = operation(workload.op).features
    return {} if features is None else features(workload, schedule, target, expected)


def vector(values: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """The values of ``names`` in order; NaN, which the trees know as missing, for one that is not
    there (a program's column: 0)."""
    return list(map(values.get, names, _missing(tuple(names))))


@lru_cache(maxsize=16)
def _missing(names: tuple[str, ...]) -> tuple[float, ...]:
    return tuple(0.0 if name.startswith("program=") else nan for name in names)


def expected_us(workload: AnyWorkload, schedules: Sequence[Schedule], target: Target, ranker: Ranker | None) -> list[float]:
    """Microseconds expected of each schedule: ``ranker``'s prediction where it serves all of them,
    else the analytic estimate."""
    if ranker is not None and ranker.serves(workload, schedules):
        return ranker.predict(workload, schedules, target)
    return [estimate(workload, s, target).us for s in schedules]


def known_ranker(target: Target) -> Ranker | None:
    """The model for ``target``'s arch: the user's, else the shipped one of the same GPU, else the
    first shipped one; None: there is none, or XGBoost is not installed. Read once per process;
    ``forget_rankers`` reads again."""
    return _known_ranker(target.arch, target.name)


def forget_rankers() -> None:
    _known_ranker.cache_clear()


def user_model_path(arch: str) -> str:
    """Where the user's model for ``arch`` lies: beside the user's records."""
    return str(records_path().with_suffix(f".{arch}{SUFFIX}"))


@lru_cache(maxsize=16)
def _known_ranker(arch: str, gpu: str) -> Ranker | None:
    if _xgboost() is None:
        return None
    shipped, own = [], user_model_path(arch)
    for text, source in _model_files(arch):
        try:
            ranker = load_ranker(text, source) if source == own else _shipped_ranker(text, source)
        except ValueError as error:
            warnings.warn(str(error), RankerWarning, 4)
            continue
        if ranker.arch == arch and (source == own or gpu in ranker.gpus):
            return ranker
        if ranker.arch == arch:
            shipped.append(ranker)
    return shipped[0] if shipped else None


def _model_files(arch: str) -> Iterator[tuple[bytes, str]]:
    """(content, name) of the user's model, then of the shipped ones in name order."""
    path = user_model_path(arch)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            yield file.read(), path
    folder = resources.files("tilebit.schedules") / "tuned"
    if folder.is_dir():
        for found in sorted((f for f in folder.iterdir() if f.name.endswith(SUFFIX)), key=lambda f: f.name):
            yield found.read_bytes(), found.name


def load_ranker(text: bytes, source: str) -> Ranker:
    """The model in a document. Raises ``ValueError`` that names ``source`` when it is damaged, from
    another version, or was trained on other features than the present ones, and ``ImportError``
    without XGBoost."""
    import xgboost

    try:
        data = parse_json(text)
        if data["version"] != VERSION:
            raise ValueError(f"version is {data['version']!r}; accepted: {VERSION}")
        if trees_digest(data["trees"]) != data["trees_digest"]:
            raise ValueError("its trees are not those that were written")
        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(json.dumps(data["trees"]).encode()))
        ranker = Ranker(
            str(data["arch"]),
            tuple(data["gpus"]),
            frozenset(data["kinds"]),
            tuple(data["features"]),
            int(data["records"]),
            int(data["workloads"]),
            str(data["records_digest"]),
            booster,
        )
        probes = list(data["probes"])
        if not probes:
            raise ValueError("it has no probes")
        changed = [name for probe in probes for name in _changed(ranker, probe)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # XGBoostError is a ValueError
        why = f"{error!r}" if isinstance(error, KeyError) else f"{error}".split("\n")[0]
        raise ValueError(f"{source} is not a ranker model that can be used: {why}; write it again with `{COMMAND}`") from None
    if changed:
        raise ValueError(
            f"{source} was trained when the cost model or its features were different ({', '.join(dict.fromkeys(changed))}); "
            f"train it again with `{COMMAND}`"
        )
    return ranker


@lru_cache(maxsize=4)
def _shipped_ranker(text: bytes, source: str) -> Ranker:
    """Its trees take a tenth of a second, after every ``forget_rankers``."""
    return load_ranker(text, source)


def _changed(ranker: Ranker, probe: Mapping[str, Any]) -> list[str]:
    """The features whose values for a probe are no longer those of training; "us" when only the
    prediction differs."""
    workload, schedule = workload_from_json(probe["workload"]), Schedule.from_json(probe["schedule"])
    target = Target.from_json(probe["target"])
    now = vector(seen(workload, schedule, target, estimate(workload, schedule, target)), ranker.names)
    then = [nan if value is None else float(value) for value in probe["features"]]
    differing = [
        name
        for name, a, b in zip(ranker.names, now, then, strict=True)
        if not (isclose(a, b, rel_tol=SAME_FEATURE, abs_tol=SAME_FEATURE) or (a != a and b != b))  # NaN: missing both times
    ]
    same = differing or isclose(ranker.predict(workload, [schedule], target)[0], float(probe["us"]), rel_tol=SAME)
    return differing if same else ["us"]


def trees_digest(trees: Any) -> str:
    """sha256 of the trees as canonical JSON."""
    return hashlib.sha256(json.dumps(trees, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _xgboost() -> Any | None:
    """The library, or None where it is not installed or does not load."""
    try:
        import xgboost
    except (ImportError, OSError, ValueError):
        return None
    return xgboost
