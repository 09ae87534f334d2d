"""Seconds of an update, hours of a run, and what a longer sync period can gain at most.

RG's bound: with step seconds for one minibatch at v = 1, of which sync seconds are the weight sync, a period of v
minibatches takes v step - (v - 1) sync, so that it is step / (step - sync (1 - 1/v)) times as fast, and never more than
step / (step - sync) times.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.config import TrainConfig
from grpo_lab.plan.rates import Rates
from grpo_lab.plan.sampler import sampling_devices
from grpo_lab.plan.shape import Shape
from grpo_lab.plan.timeline import Timeline
from grpo_lab.plan.traffic import checkpoint_disk, sync_traffic
from grpo_lab.plan.volume import Volume
from grpo_lab.schedule import Schedule, speedup_bound

LADDER = (1, 2, 5, 10, 20, 50, 100, 200)
# The share of the largest possible gain that counts as having it.
ENOUGH = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """Seconds of one sync, collection, update (learning alone), save and evaluation (None: not known, and left out),
    of an update with its share of all that belongs to it, and hours of the run by phase and in all.

    Where sampling and learning overlap, the shorter of the two is hidden by the other: `phases` then counts the longer.
    """

    sync: float
    collect: float
    learn: float
    save: float
    evaluate: float | None
    per_update: float
    phases: dict[str, float]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """step: seconds of a minibatch at v = 1. speedups: by v. enough: the least v with `ENOUGH` of the possible gain."""

    step: float
    sync: float
    speedups: dict[int, float]
    limit: float
    enough: int


def hours(shape: Shape, config: TrainConfig, rates: Rates, volume: Volume, line: Timeline, *, learning: int) -> Hours:
    """What a run takes at these rates. `learning`: ranks that have anything to learn from."""
    schedule = Schedule.from_config(config)
    sampled = rates.sample * sampling_devices(config)
    sync = 0.0 if rates.sync is None else sync_traffic(shape, config).stream / rates.sync
    save = 0.0 if rates.save is None else checkpoint_disk(shape, config).one / rates.save
    updates_per_collection = schedule.minibatches_per_collection * schedule.i
    collect = volume.drawn_tokens * updates_per_collection / sampled
    learn = volume.used_tokens / (rates.learn * learning)
    evaluate = rates.evaluate
    if evaluate is None and volume.evaluated_tokens is not None and line.counts["evaluate"]:
        evaluate = volume.evaluated_tokens / line.counts["evaluate"] / sampled
    work = _together(collect / updates_per_collection, learn, overlap=config.schedule.overlap)
    counts, updates = line.counts, line.updates
    seconds = {"sync": counts["sync"] * sync}
    if config.schedule.overlap:
        seconds["collect and learn"] = updates * work
    else:
        seconds |= {"collect": counts["collect"] * collect, "learn": updates * learn}
    seconds |= {"evaluate": counts["evaluate"] * (evaluate or 0.0), "save": counts["save"] * save}
    return Hours(
        sync=sync,
        collect=collect,
        learn=learn,
        save=save,
        evaluate=evaluate,
        per_update=sync / (schedule.v * schedule.i) + work,
        phases={name: each / 3600 for name, each in seconds.items()},
        total=sum(seconds.values()) / 3600,
    )


def _together(collect: float, learn: float, *, overlap: bool) -> float:
    return max(collect, learn) if overlap else collect + learn


def bound(config: TrainConfig, predicted: Hours) -> Bound:
    """The speed-up over v = 1 for the times of `predicted`, whatever its own v."""
    schedule = Schedule.from_config(config)
    collect = predicted.collect / schedule.minibatches_per_collection
    learn = schedule.i * predicted.learn
    sync = predicted.sync
    step = sync + _together(collect, learn, overlap=config.schedule.overlap)
    limit = step / (step - sync)
    return Bound(
        step=step,
        sync=sync,
        speedups={v: speedup_bound(step, sync, v) for v in LADDER},
        limit=limit,
        enough=least_v(step, sync, share=ENOUGH),
    )


def least_v(step: float, sync: float, *, share: float) -> int:
    """The least v whose gain over v = 1 is `share` of the gain without bound; 1 where nothing can be gained."""
    gain = share * (step / (step - sync) - 1)
    v = 1
    while speedup_bound(step, sync, v) - 1 < gain * (1 - 1e-12):
        v += 1
    return v
