"""RG's speed: iterations a second, where an update's time goes, and how much rarer weight syncs could save at most."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.config import TrainConfig
from grpo_lab.report.stored import PROVENANCE, SUMMARY, StoredRun, UnreadableRun
from grpo_lab.schedule import Schedule

# What an update is made of. Evaluations and checkpoints come as often as one likes, and are left out.
PHASES = ("collect", "sync", "learn", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of an update by phase, means over `updates` whole sync periods' worth of updates after a warm-up.
    `spread`: sample deviation, over updates, of 1 / seconds."""

    v: int
    updates: int
    collect: float
    sync: float
    learn: float
    other: float
    spread: float

    @property
    def step(self) -> float:
        """Seconds an update."""
        return self.collect + self.sync + self.learn + self.other

    @property
    def rate(self) -> float:
        """Updates a second."""
        return 1 / self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A run's timing beside that of v = 1. `speedup`: of rates. `bound`: the largest that fewer syncs alone can give.
    None: v = 1 has no timing."""

    timing: Timing
    speedup: float | None
    bound: float | None


def sync_period(config: TrainConfig) -> int:
    """Updates between two weight syncs."""
    schedule = Schedule.from_config(config)
    return schedule.v * schedule.i


def timing_of(run: StoredRun, warm_up: int) -> Timing | None:
    """A run's timing; None where no whole sync period follows the warm-up, or it has no times.

    The first sync period holds the first collection, which warms up; a last one that is not whole would count too much
    or too little of its sync. Both are left out. `warm_up`: updates to leave out at least, so that runs of different
    periods warm up alike; the longest period of those that are compared.
    """
    period = sync_period(run.config)
    first = math.ceil(max(warm_up, period) / period) * period
    last = run.updates // period * period
    if last <= first:
        return None
    seconds = {name: run.series(f"time/{name}").within(first, last).value for name in PHASES}
    if len({len(each) for each in seconds.values()}) != 1 or not len(seconds["learn"]):
        return None
    steps = np.sum(list(seconds.values()), axis=0)
    means = {name: float(value.mean()) for name, value in seconds.items()}
    return Timing(
        v=Schedule.from_config(run.config).v, updates=len(steps), spread=float(np.std(1 / steps, ddof=1)), **means
    )


def bound(step: float, sync: float, v: int) -> float:
    """step / (step - sync (1 - 1/v)): at v = 1 an update takes `step` seconds, `sync` of them for the synchronisation;
    a sync every v updates saves at most sync (1 - 1/v) of them."""
    return step / (step - sync * (1 - 1 / v))


def speeds(timings: Sequence[Timing]) -> list[Speed]:
    """Each beside the one at v = 1."""
    first = next((each for each in timings if each.v == 1), None)
    if first is None:
        return [Speed(timing=each, speedup=None, bound=None) for each in timings]
    return [
        Speed(timing=each, speedup=each.rate / first.rate, bound=bound(first.step, first.sync, each.v))
        for each in timings
    ]


def hardware_notes(runs: Sequence[StoredRun]) -> list[str]:
    """What timings were made on, and what is known to speak against comparing them.

    Raises:
        UnreadableRun: a run's provenance cannot be read.
    """
    machines = dict.fromkeys(machine for run in runs for machine in _machines(run.folder))
    notes = [f"Hardware: {'; '.join(machines) or 'not recorded'}."]
    if len(machines) > 1:
        notes.append("Warning: the runs were not all made on one machine with one number of threads.")
    for run in runs:
        if beside := _beside(run.folder):
            notes.append(
                f"Warning: {run.folder.name} trained while {', '.join(beside)} did, on the same machine: its timing is "
                "not of a quiet one."
            )
    return [*notes, "Whether other programs were at work on the machine is not recorded."]


def _machines(folder: Path) -> list[str]:
    return [
        f"{each['host']}, {each['platform']}, {each['cpus']} CPUs, threads a rank {each['threads']['hardware.threads']}"
        for each in _sessions(folder)
    ]


def _sessions(folder: Path) -> list[dict[str, Any]]:
    path = folder / PROVENANCE
    if not path.is_file():
        return []
    try:
        return list(json.loads(path.read_bytes())["sessions"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableRun(f"{path} cannot be read ({error!r}): repair or move that file") from error


def _beside(folder: Path) -> list[str]:
    """Runs in the same folder of runs that were under way on one host at one time with this one."""
    own = _span(folder)
    if own is None:
        return []
    others = {path.parent.name: _span(path.parent) for path in sorted(folder.parent.glob(f"*/{PROVENANCE}"))}
    return [
        name
        for name, other in others.items()
        if name != folder.name and other and other[0] == own[0] and own[1] < other[2] and other[1] < own[2]
    ]


def _span(folder: Path) -> tuple[str, datetime, datetime] | None:
    """A run's host, start and end; None of a run in several sessions, whose breaks are not recorded."""
    sessions = _sessions(folder)
    summary = folder / SUMMARY
    if len(sessions) != 1 or not summary.is_file():
        return None
    began = datetime.fromisoformat(sessions[0]["started"])
    return sessions[0]["host"], began, began + timedelta(seconds=json.loads(summary.read_bytes())["seconds_total"])
