"""Intervals for differences, over seeds and over problems. Pure functions of numbers.

All are of level 0.95, two-sided, and none is corrected for the number of comparisons in a report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lab.evaluation.estimators import LEVEL, RESAMPLES, bootstrap_means, percentile_interval
from grpo_lab.seeds import derive

# Fewer problems are not resampled: their spread is not known.
FEWEST_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class Interval:
    """`low` to `high`, of what, in words for a reader."""

    low: float
    high: float
    method: str


def interval_over_seeds(differences: Sequence[float]) -> Interval | None:
    """Student's t interval of the mean of one difference a seed; None from fewer than two."""
    n = len(differences)
    if n < 2:
        return None
    mean = float(np.mean(differences))
    half = student_quantile(n - 1) * float(np.std(differences, ddof=1)) / math.sqrt(n)
    return Interval(mean - half, mean + half, f"t interval over {n} seeds")


def interval_over_problems(differences: np.ndarray) -> Interval | None:
    """Percentile bootstrap interval of the mean of one difference a problem, [N]: the same problems, answered by both
    sides. None from fewer than FEWEST_PROBLEMS."""
    if len(differences) < FEWEST_PROBLEMS:
        return None
    means = bootstrap_means(differences[:, None], derive(0, "report", "problems"))
    ((low, high),) = percentile_interval(means)
    return Interval(
        float(low), float(high), f"paired bootstrap over {len(differences)} problems, {RESAMPLES:,} resamples"
    )


def change(update: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What the least-squares line changes from the first to the last update: `value` [..., T] at `update` [T]."""
    centred = update - update.mean()
    slope = (value * centred).sum(axis=-1) / (centred**2).sum()
    return np.asarray(slope * (update[-1] - update[0]))


def off_neighbours(values: np.ndarray) -> np.ndarray:
    """[T - 2]: how far each value of [T] but the ends is off the mean of the one before and the one behind it."""
    return np.asarray(values[1:-1] - (values[:-2] + values[2:]) / 2)


def student_probability(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's distribution with a whole number of degrees of freedom, in closed form (Abramowitz and
    Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def student_quantile(freedom: int) -> float:
    """t with P(|T| <= t) = LEVEL, by bisection."""
    low, high = 0.0, 1e3
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, freedom) < LEVEL else (low, middle)
    return high
