"""A run folder read back: settings, rows of training, evaluations problem by problem, and where it all came from.

Each folder is read once, and of its rows only the columns are kept that a measure or a figure needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from grpo_lab.composition import load_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.ledger import Standing, standing
from grpo_lab.runs import CONFIG_FILE, holds_a_run

METRICS, SUMMARY, PROVENANCE, EVALUATIONS = "metrics.jsonl", "summary.json", "provenance.json", "evaluations"
# Columns of training rows that are kept; those under `time` are named time/....
COLUMNS = (
    "mismatch/k3",
    "mismatch/drift",
    "mismatch/ess_sequence",
    "grad_norm",
    "entropy",
    "response/length",
    "reward/retained",
    "reference/log_ratio",
    "kl/reference",
    "group/within_success_ess_mean",
    "group/within_success_ess/q50",
    "group/share_k2",
    "group/weight_ess/q50",
    "loss/raw",
    "total/responses",
    "time/collect",
    "time/sync",
    "time/learn",
    "time/other",
)


class UnreadableRun(ConfigError):
    """A run folder, or a file in it, that cannot be read: of a report, what asks for that run fails alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Values against updates, as logged: `update` [T] int64, ascending; `value` [T] float64, not all finite."""

    update: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.update)

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, float]]) -> Self:
        return cls(np.array([u for u, _ in pairs], dtype=np.int64), np.array([v for _, v in pairs], dtype=np.float64))

    def within(self, after: int, to: int) -> Self:
        """The part of updates u with `after` < u <= `to`."""
        kept = (self.update > after) & (self.update <= to)
        return type(self)(self.update[kept], self.value[kept])


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Correct responses out of n, problem by problem: `ids`, `correct` [N] int64."""

    ids: tuple[str, ...]
    correct: np.ndarray
    n: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Over all sessions of a run. `dirty`: whether a checkout differed from its commit in any of them."""

    commits: tuple[str, ...] = ()
    dirty: bool = False
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRun:
    """What a run folder holds.

    `updates`: optimizer updates done. `hours`: wall clock over all sessions, None before the first summary.
    `evaluations`: of the run's own held-out problems, by update. `skipped`: lines of metrics.jsonl that are no rows.
    `damaged`: rows whose value was no finite number, by column.
    """

    folder: Path
    standing: Standing
    updates: int
    columns: Mapping[str, Series]
    evaluations: Mapping[int, Counts]
    hours: float | None
    provenance: Provenance
    skipped: int = 0
    damaged: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def config(self) -> TrainConfig:
        """Its settings, read where they are wanted: that takes longer than all the rest.

        Raises:
            UnreadableRun: they do not fit this version.
        """
        try:
            return load_config(self.folder / CONFIG_FILE)
        except ConfigError as error:
            raise UnreadableRun(str(error)) from error

    def series(self, column: str) -> Series:
        """A column of training rows; empty where the run does not log it."""
        return self.columns[column]


class Shelf:
    """Runs by folder, each read once however many tables show it."""

    def __init__(self) -> None:
        self._runs: dict[Path, StoredRun] = {}

    def read(self, folder: Path) -> StoredRun:
        """As `read_run`, remembered."""
        key = folder.resolve()
        if key not in self._runs:
            try:
                self._runs[key] = read_run(folder)
            except OSError as error:
                raise UnreadableRun(f"{folder} cannot be read ({error}): repair or move it") from error
        return self._runs[key]


def read_run(folder: Path) -> StoredRun:
    """Read a run folder, finished or not.

    Raises:
        UnreadableRun: it is no run folder, or one of its files cannot be read; names the file and the fix.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise UnreadableRun(f"{folder} is no run folder: it holds no {CONFIG_FILE}")
    if not holds_a_run(folder):
        raise UnreadableRun(f"{folder} holds settings and no logged update: train there first")
    stands = standing(folder)
    columns, updates, skipped = _read_rows(folder / METRICS)
    summary = read_json(folder / SUMMARY, {})
    seconds = summary.get("seconds_total")
    return StoredRun(
        folder=folder,
        standing=stands,
        updates=updates,
        columns=columns,
        evaluations=_read_evaluations(folder / EVALUATIONS),
        hours=None if seconds is None else float(seconds) / 3600,
        provenance=_provenance(folder),
        skipped=skipped,
        damaged={
            name: count for name, each in columns.items() if (count := int(np.count_nonzero(~np.isfinite(each.value))))
        },
    )


def _read_rows(path: Path) -> tuple[dict[str, Series], int, int]:
    """The kept columns, the last update, and how many lines were no rows: only the last may be."""
    pairs: dict[str, list[tuple[int, float]]] = {name: [] for name in COLUMNS}
    last, skipped = 0, 0
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            update, kind = int(row["update"]), row["kind"]
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise UnreadableRun(
                    f"{path}, line {number} is no row of metrics: repair or delete that line"
                ) from error
            # A run that was killed, or that is writing now.
            skipped += 1
            continue
        if kind == "update":
            last = max(last, update)
            _take(row, update, pairs)
    return {name: Series.of(each) for name, each in pairs.items()}, last, skipped


def _take(row: Mapping[str, Any], update: int, pairs: Mapping[str, list[tuple[int, float]]]) -> None:
    time, odd = row.get("time", {}), row.get("non_finite", {})
    for name, kept in pairs.items():
        value = time.get(name.removeprefix("time/")) if name.startswith("time/") else row.get(name)
        if value is None and name in odd:
            value = float(odd[name])
        if value is not None:
            kept.append((update, value))


def _read_evaluations(folder: Path) -> dict[int, Counts]:
    found = {}
    for path in sorted(folder.glob("update_*.json")):
        document = read_json(path)
        try:
            found[int(document["update"])] = counts_of(document["problems"], path)
        except (KeyError, TypeError) as error:
            raise UnreadableRun(f"{path} is no evaluation ({error!r} is missing): delete it") from error
    return found


def counts_of(problems: Sequence[Mapping[str, Any]], path: Path) -> Counts:
    """The counts of a file's problems.

    Raises:
        UnreadableRun: they have different numbers of responses.
    """
    sizes = {each["n"] for each in problems}
    if len(sizes) != 1:
        raise UnreadableRun(f"{path} has problems with {sorted(sizes)} responses: all must have as many")
    return Counts(
        tuple(each["id"] for each in problems),
        np.array([each["correct"] for each in problems], dtype=np.int64),
        sizes.pop(),
    )


def read_sessions(folder: Path) -> list[Any]:
    """The sessions that a run was trained in; none where nothing recorded them.

    Raises:
        UnreadableRun: the file cannot be read.
    """
    path = folder / PROVENANCE
    try:
        return list(read_json(path, {"sessions": []})["sessions"])
    except (KeyError, TypeError) as error:
        raise UnreadableRun(f"{path} cannot be read ({error!r}): repair or move that file") from error


def _provenance(folder: Path) -> Provenance:
    sessions = read_sessions(folder)
    try:
        known = [each["git"] for each in sessions if each.get("git")]
        return Provenance(
            commits=tuple(dict.fromkeys(each["commit"][:12] for each in known)),
            dirty=any(each["dirty"] for each in known),
            hosts=tuple(dict.fromkeys(each["host"] for each in sessions)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableRun(f"{folder / PROVENANCE} cannot be read ({error!r}): repair or move that file") from error


def read_json(path: Path, default: Any = None) -> Any:
    """What a file holds; `default`, where one is given, if there is no file.

    Raises:
        UnreadableRun: it cannot be read, or holds no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if default is None:
            raise UnreadableRun(f"{path} is missing") from error
        return default
    except OSError as error:
        raise UnreadableRun(f"{path} cannot be read ({error.strerror}): repair or move it") from error
    except ValueError as error:
        raise UnreadableRun(f"{path} is not JSON ({error}): repair or delete that file") from error
