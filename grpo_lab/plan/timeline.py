"""What happens when, counted over the whole budget by asking the schedule at every update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from grpo_lab.schedule import Schedule

EVENTS = ("evaluate", "sync", "collect", "step", "refresh", "save")
# Lines of the opening that are worth reading.
OPENING_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """`every`: updates from one to the next of each of `EVENTS` (None: never; "epoch": by passes over the prompts).
    `counts`: how often each happens in `updates` updates. `opening`: the first updates as lines, equal neighbours
    together. `oldest`: updates between the weights that sampled a response and its last use, at most."""

    updates: int
    every: dict[str, int | str | None]
    counts: dict[str, int]
    opening: tuple[str, ...]
    oldest: int


# Whether the collection that ends with `done` updates holds the end of a pass over the prompts.
Completes = Callable[[int], bool]


def timeline(schedule: Schedule, *, updates: int, completes_epoch: Completes) -> Timeline:
    """Count the events of `updates` updates."""
    counts: Counter[str] = Counter(dict.fromkeys(EVENTS, 0))
    if schedule.evaluate(0):
        counts["evaluate"] += 1
    for u in range(updates):
        counts.update(_events(schedule, u, updates, completes_epoch(u + 1)))
    period = schedule.v * schedule.i
    return Timeline(
        updates=updates,
        every={
            "evaluate": schedule.evaluate_every,
            "sync": period,
            "collect": schedule.minibatches_per_collection * schedule.i,
            "step": 1,
            "refresh": schedule.t_ref,
            "save": schedule.save_every,
        },
        counts=dict(counts),
        opening=tuple(_opening(schedule, updates, completes_epoch)),
        oldest=schedule.oldest_age,
    )


def _events(schedule: Schedule, u: int, updates: int, epoch_completed: bool) -> tuple[str, ...]:
    """What happens around update u, in order. With a budget in epochs the schedule does not know its end."""
    done = u + 1
    last = done == updates
    happens = (
        ("sync", schedule.sync(u)),
        ("collect", schedule.collect(u)),
        ("step", True),
        ("refresh", schedule.refresh(done, epoch_completed=epoch_completed)),
        ("evaluate", schedule.evaluate(done) or (last and schedule.evaluate_every is not None)),
        ("save", schedule.save(done) or (last and schedule.save_every is not None)),
    )
    return tuple(name for name, does in happens if does)


def _opening(schedule: Schedule, updates: int, completes_epoch: Completes) -> Iterator[str]:
    """Two sync periods, or what `OPENING_LINES` lines hold of them."""
    shown = range(min(2 * schedule.v * schedule.i, updates))
    lines = groupby(shown, key=lambda u: _events(schedule, u, updates, completes_epoch(u + 1)))
    if schedule.evaluate(0):
        yield "before update 0: evaluate"
    for _, (events, group) in zip(range(OPENING_LINES), lines, strict=False):
        span = list(group)
        where = f"update {span[0]}" if len(span) == 1 else f"updates {span[0]} to {span[-1]}"
        yield f"{where}: {', '.join(events)}"
