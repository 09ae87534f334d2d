"""RG's speed: iterations a second, where an update's time goes, and how much rarer weight syncs could save at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lab.config import TrainConfig
from grpo_lab.report.stored import StoredRun
from grpo_lab.schedule import Schedule, speedup_bound

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


def speeds(timings: Sequence[Timing]) -> list[Speed]:
    """Each beside the one at v = 1."""
    first = next((each for each in timings if each.v == 1), None)
    if first is None:
        return [Speed(timing=each, speedup=None, bound=None) for each in timings]
    return [
        Speed(timing=each, speedup=each.rate / first.rate, bound=speedup_bound(first.step, first.sync, each.v))
        for each in timings
    ]
