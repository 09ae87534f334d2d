"""RG's speed as a table, and as a panel beside the curves of its runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from grpo_lab.report.captions import DELAY
from grpo_lab.report.collate import Collated
from grpo_lab.report.layout import NO_VALUE, NOT_RUN
from grpo_lab.report.machines import hardware_notes
from grpo_lab.report.plates import Curve, Look, Panel
from grpo_lab.report.render import Grid
from grpo_lab.report.throughput import PHASES, Speed, speeds, timing_of

HEADER = (
    "v",
    "iterations/s",
    "deviation over updates",
    "seconds an update",
    *PHASES,
    "speed-up",
    "bound",
    "updates timed",
    "scale",
)
OBJECTIVE = "grpo_rg"


def speeds_by_v(collated: Collated) -> dict[int, Speed | None]:
    """The speed at each v of the table; None where no finished run of it is long enough. All leave out the same
    updates to warm up."""
    timings, warm_up = {}, collated.reader.frame.warm_up
    for group in collated.groups:
        found = [timing for run in group.finished.values() if (timing := timing_of(run, warm_up)) is not None]
        # One seed each: timings of several would be of several machines.
        timings[int(group.labels[DELAY])] = found[0] if found else None
    known = speeds([each for each in timings.values() if each is not None])
    by_v = {each.timing.v: each for each in known}
    return {v: by_v.get(v) for v in timings}


def speed_grid(collated: Collated) -> Grid:
    """A row a v: where an update's seconds go, how much faster than v = 1, and the most that fewer syncs can give."""
    finished = {int(group.labels[DELAY]) for group in collated.groups if group.finished}
    absent = {v: NO_VALUE if v in finished else NOT_RUN for v in speeds_by_v(collated)}
    without_first = f"v = 1: {absent.get(1, NOT_RUN)}"
    rows = [
        _row(v, speed, without_first) if speed is not None else (str(v), *[absent[v]] * (len(HEADER) - 2))
        for v, speed in speeds_by_v(collated).items()
    ]
    return Grid(HEADER, tuple((*row, collated.scale) for row in rows))


def _row(v: int, speed: Speed, without_first: str) -> tuple[str, ...]:
    timing = speed.timing
    return (
        str(v),
        f"{timing.rate:.4g}",
        f"{timing.spread:.2g}",
        f"{timing.step:.4g}",
        *(f"{getattr(timing, phase):.3g}" for phase in PHASES),
        *(without_first if each is None else f"{each:.3f}" for each in (speed.speedup, speed.bound)),
        str(timing.updates),
    )


def speed_notes(collated: Collated) -> list[str]:
    """How it was timed, what the bound is, and on what machine."""
    runs = [run for group in collated.groups for run in group.finished.values()]
    return [
        f"Timed: whole sync periods (v updates) after the first {collated.reader.frame.warm_up} updates, which warm "
        "up: the longest period of the table, so that every v leaves out the same. A finished run that ends before has "
        "*no value*. Evaluations and checkpoints are left out. Deviation: of 1 / seconds, over updates.",
        "Bound: step / (step - sync (1 - 1/v)), both of v = 1: an update takes `step` seconds, `sync` of them for the "
        "synchronisation, of which a sync every v updates saves at most the share 1 - 1/v.",
        "A speed-up above the bound is not from fewer syncs: noise, or what else v changes.",
        *(hardware_notes(runs) if runs else []),
    ]


def speed_panel(collated: Collated) -> Panel | None:
    """Speed-up and bound against v; None without a timing at v = 1."""
    found: Mapping[int, Speed] = {v: s for v, s in speeds_by_v(collated).items() if s is not None and s.bound}
    if not found:
        return None
    x = np.array(sorted(found), dtype=np.float64)
    return Panel(
        x_label="v",
        y_label="speed-up over v = 1",
        x_scale="ladder",
        curves=[
            _curve("measured", 0, x, [found[v].speedup for v in sorted(found)]),
            _curve("bound: syncs alone", 1, x, [found[v].bound for v in sorted(found)]),
        ],
    )


def _curve(label: str, variant: int, x: np.ndarray, y: list[float | None]) -> Curve:
    values = np.array(y, dtype=np.float64)
    return Curve(label=label, look=Look(OBJECTIVE, variant), x=x, y=values, spread=np.full(len(x), np.nan))
