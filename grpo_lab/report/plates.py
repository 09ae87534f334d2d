"""A figure before it is drawn: panels of curves, all numbers and words in them. Nothing here draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from grpo_lab.report.stored import Series


@dataclass(frozen=True, slots=True)
class Look:
    """How a curve is told from others: the objective, which has its colour and marker in every figure, and which of
    the figure's curves of that objective it is."""

    objective: str
    variant: int = 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Curve:
    """`x`, `y` [P]. `spread` [P]: sample deviation over seeds, NaN where there is one seed. `faint`: what `y` smooths.
    `form`: points joined or alone."""

    label: str
    look: Look
    x: np.ndarray
    y: np.ndarray
    spread: np.ndarray
    faint: Series | None = None
    form: Literal["line", "points"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A number that a paper's text states, as a dashed line: from `left` to `right`, or over the panel's width."""

    label: str
    look: Look
    y: float
    left: float | None = None
    right: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`x_scale`: updates and counts are linear; a ladder's rungs lie evenly, at their values' logarithms; drift is
    logarithmic."""

    x_label: str
    y_label: str
    curves: Sequence[Curve]
    levels: Sequence[Level] = ()
    x_scale: Literal["linear", "ladder", "log"] = "linear"
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plate:
    """A figure: panels side by side over `footnotes`, which say what was run and how it is shown."""

    name: str
    title: str
    panels: Sequence[Panel]
    footnotes: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Averaged:
    """Over seeds: `mean` and sample deviation `spread` [T] at the updates that all of `seeds` have."""

    update: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    seeds: int


def average_runs(runs: Sequence[Series]) -> Averaged:
    """Mean and sample deviation at each update that every run has; the deviation of one run is NaN. Not of no runs."""
    common = runs[0].update
    for each in runs[1:]:
        common = np.intersect1d(common, each.update)
    values = np.stack([each.value[np.isin(each.update, common)] for each in runs])
    spread = values.std(axis=0, ddof=1) if len(runs) > 1 else np.full(len(common), np.nan)
    return Averaged(common, values.mean(axis=0), spread, len(runs))


def in_blocks(series: Series, size: int) -> Series:
    """Means over `size` updates at a time, each at its last update; a block that is not complete is left out, and so
    is one without a value."""
    if not len(series):
        return series
    block = (series.update - 1) // size
    complete = (block + 1) * size <= series.update[-1]
    block, value = block[complete], series.value[complete]
    found, place = np.unique(block, return_inverse=True)
    sums = np.bincount(place, weights=value, minlength=len(found))
    return Series((found + 1) * size, sums / np.bincount(place, minlength=len(found)))


def moving_mean(series: Series, points: int, *, trailing: bool) -> Series:
    """Means over `points` neighbours, at the middle one or (`trailing`) the last; only where all of them are there."""
    if len(series) < points:
        return Series(series.update[:0], series.value[:0])
    means = np.lib.stride_tricks.sliding_window_view(series.value, points).mean(axis=-1)
    first = points - 1 if trailing else (points - 1) // 2
    return Series(series.update[first : first + len(means)], means)
