"""Metric values that merge: any split of a minibatch over micro-batches or ranks gives the same reported number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Of a histogram, in a log line.
QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as its sum and its count. Merging adds both, so there is no mean of means. Empty: left out of logs."""

    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    maximum: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.maximum, other.maximum))

    def value(self) -> float | None:
        return self.maximum if math.isfinite(self.maximum) else None


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between fixed edges: bin k holds edges[k-1] <= x < edges[k], the two outer bins are open."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.edges) + 1, "a histogram has one bin more than edges"

    def merge(self, other: Histogram) -> Histogram:
        assert self.edges == other.edges, "histograms merge only over the same edges"
        return Histogram(self.edges, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def value(self) -> float | None:
        return self.quantile(0.5)

    def quantile(self, q: float) -> float | None:
        """The q-quantile, linear within its bin; an outer bin answers with its finite edge."""
        total = sum(self.counts)
        if total == 0:
            return None
        rank, below = q * total, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                low = self.edges[index - 1] if index > 0 else self.edges[0]
                high = self.edges[index] if index < len(self.edges) else self.edges[-1]
                return low + (high - low) * min(max((rank - below) / count, 0.0), 1.0)
            below += count
        return self.edges[-1]


Metric = Mean | Sum | Max | Histogram


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge metrics by name; a name may be missing from some of the parts."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def scalars(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metrics as plain numbers for a log line. Histograms give their quantiles; what is empty is left out."""
    row: dict[str, float] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Histogram):
            for q in QUANTILES:
                if (quantile := metric.quantile(q)) is not None:
                    row[f"{name}/q{q * 100:02.0f}"] = quantile
        elif (value := metric.value()) is not None:
            row[name] = value
    return row
