"""What is estimated from counts of correct responses: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
# Problems that the base model solves in more than this share of its responses belong to neither side of GG's split.
HARD_SHARE = 0.75
# Elements of one block of resampled problems: bounds memory.
_BLOCK = 4_000_000


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the mean, over all k-subsets of n responses, of whether one is correct (GG C.1).

    best@K for binary rewards. K = 1 gives c / n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n, and n is {n}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def problem_values(correct: Sequence[int], n: int, ks: Sequence[int]) -> np.ndarray:
    """[N, 1 + len(ks)] float64: mean@n and each pass@K of every problem, from its correct responses out of n."""
    return np.array([[c / n, *(pass_at_k(n, c, k) for k in ks)] for c in correct])


def bootstrap_means(values: np.ndarray, seed: int) -> np.ndarray:
    """[RESAMPLES, M]: means of `values` [N, M] over N problems drawn with replacement, the same ones for all M."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    count = len(values)
    block = max(_BLOCK // values.size, 1)
    means = [
        values[rng.integers(count, size=(min(block, RESAMPLES - start), count))].mean(axis=1)
        for start in range(0, RESAMPLES, block)
    ]
    return np.concatenate(means)


def percentile_interval(means: np.ndarray) -> np.ndarray:
    """[M, 2]: the percentile bootstrap interval of level LEVEL from resampled means [RESAMPLES, M]."""
    tail = (1 - LEVEL) / 2
    return np.quantile(means, [tail, 1 - tail], axis=0).T


def pooled(parts: Sequence[tuple[int, float, np.ndarray]]) -> tuple[float, tuple[float, float]]:
    """The problem-weighted average over benchmarks and its interval.

    `parts`: problems, mean, and resampled means [RESAMPLES] of each. Problems are resampled within their benchmark,
    since its size is fixed.
    """
    total = sum(count for count, _, _ in parts)
    mean = sum(count * value for count, value, _ in parts) / total
    resampled = np.sum([count * means for count, _, means in parts], axis=0) / total
    ((low, high),) = percentile_interval(resampled[:, None])
    return mean, (float(low), float(high))


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one score over the checkpoints of a run (RG tables 2 and 3)."""

    min: float
    max: float
    median: float
    mean: float


def over_checkpoints(scores: Sequence[float]) -> Spread:
    return Spread(min(scores), max(scores), float(np.median(scores)), float(np.mean(scores)))


def over_seeds(scores: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1) over runs; no deviation from one run."""
    return float(np.mean(scores)), float(np.std(scores, ddof=1)) if len(scores) > 1 else None


def difficulty(base: Mapping[str, float]) -> dict[str, list[str]]:
    """Problems by p0, the base model's success rate (GG): `solvable` 0 < p0 <= 0.75, `unsolved` p0 = 0, `easy` above.

    p0 is measured on a finite number of responses, so that `unsolved` means none of them was correct.
    """
    sides: dict[str, list[str]] = {"solvable": [], "unsolved": [], "easy": []}
    for problem, rate in base.items():
        side = "unsolved" if rate == 0 else "solvable" if rate <= HARD_SHARE else "easy"
        sides[side].append(problem)
    return sides
