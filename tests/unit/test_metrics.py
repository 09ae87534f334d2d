"""Metrics merge: any split gives the number of the whole."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.metrics import Histogram, Max, Mean, Metric, Sum, merge, scalars

EDGES = (0.0, 1.0, 2.0, 4.0)


def histogram(values: list[float]) -> Histogram:
    """Bin k holds edges[k-1] <= x < edges[k]."""
    counts = [0] * (len(EDGES) + 1)
    for value in values:
        counts[sum(edge <= value for edge in EDGES)] += 1
    return Histogram(EDGES, tuple(counts))


def described(values: list[float]) -> dict[str, Metric]:
    return {
        "mean": Mean(math.fsum(values), len(values)),
        "sum": Sum(math.fsum(values)),
        "max": Max(max(values, default=-math.inf)),
        "histogram": histogram(values),
    }


# Eighths, whose sums are exact in any order.
numbers = st.lists(st.integers(-80, 80).map(lambda n: n / 8))


@given(numbers, numbers, numbers)
def test_merging_is_associative_commutative_and_gives_the_whole(a: list[float], b: list[float], c: list[float]) -> None:
    parts = [described(values) for values in (a, b, c)]
    whole = described(a + b + c)
    assert merge(parts) == whole
    assert merge([merge(parts[:2]), parts[2]]) == merge([parts[0], merge(parts[1:])]) == whole
    assert merge(reversed(parts)) == whole
    assert merge([*parts, described([])]) == whole


def test_a_mean_is_not_a_mean_of_means() -> None:
    merged = merge([{"x": Mean(1.0, 1)}, {"x": Mean(0.0, 3)}])
    assert scalars(merged) == {"x": 0.25}


def test_a_name_may_be_missing_from_some_parts() -> None:
    merged = merge([{"a": Sum(1.0)}, {"b": Max(2.0)}, {"a": Sum(2.5), "b": Max(-1.0)}])
    assert merged == {"a": Sum(3.5), "b": Max(2.0)}
    assert merge([]) == {}


def test_merging_leaves_the_parts_alone() -> None:
    part: dict[str, Metric] = {"a": Sum(1.0)}
    merge([part, part])
    assert part == {"a": Sum(1.0)}


def test_what_is_empty_has_no_value_and_is_left_out() -> None:
    empty = described([])
    assert empty["mean"].value() is None
    assert empty["max"].value() is None
    assert empty["histogram"].value() is None
    # A sum of nothing is nothing: 0.
    assert scalars(empty) == {"sum": 0.0}
    assert scalars({"zero": Mean(0.0, 4)}) == {"zero": 0.0}


def test_fractional_weights() -> None:
    assert Mean(1.5, 0.5).merge(Mean(0.5, 1.5)).value() == 1.0


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        # Four values in [1, 2): the quantile is linear in the bin.
        ([1.0, 1.2, 1.5, 1.9], 0.5, 1.5),
        ([1.0, 1.2, 1.5, 1.9], 0.0, 1.0),
        ([1.0, 1.2, 1.5, 1.9], 1.0, 2.0),
        ([1.0, 1.2, 1.5, 1.9], 0.25, 1.25),
        # One value in [0, 1), three in [2, 4): rank 2 of 4 is a third into the second.
        ([0.5, 2.0, 3.0, 3.5], 0.5, 2.0 + 2.0 / 3),
        ([0.5, 2.0, 3.0, 3.5], 0.25, 1.0),
        # An edge belongs to the bin above it.
        ([2.0], 0.0, 2.0),
        # The open bins answer with their finite edge.
        ([-5.0, -6.0], 0.5, 0.0),
        ([100.0], 0.5, 4.0),
        ([-1.0, 100.0], 1.0, 4.0),
    ],
)
def test_quantiles(values: list[float], q: float, expected: float) -> None:
    assert histogram(values).quantile(q) == pytest.approx(expected)


def test_quantiles_are_within_a_bin_of_the_values_own() -> None:
    rng = random.Random(0)
    edges = tuple(i / 20 for i in range(21))
    values = sorted(rng.random() for _ in range(1001))
    counts = [0] * 22
    for value in values:
        counts[sum(edge <= value for edge in edges)] += 1
    metric = Histogram(edges, tuple(counts))
    quantiles = [metric.quantile(q) for q in (0.01, 0.25, 0.5, 0.99)]
    for got, rank in zip(quantiles, (10, 250, 500, 990), strict=True):
        assert got == pytest.approx(values[rank], abs=1 / 20)
    assert quantiles == sorted(q for q in quantiles if q is not None)


def test_scalars_name_the_quantiles() -> None:
    row = scalars({"ratio": histogram([1.5] * 100), "loss": Sum(2.0)})
    assert row == {
        "ratio/q01": pytest.approx(1.01),
        "ratio/q50": pytest.approx(1.5),
        "ratio/q99": pytest.approx(1.99),
        "loss": 2.0,
    }


def test_histograms_over_other_edges_do_not_merge() -> None:
    with pytest.raises(AssertionError, match="same edges"):
        histogram([1.0]).merge(Histogram((0.0, 1.0), (0, 0, 0)))
    with pytest.raises(AssertionError, match="one bin more"):
        Histogram((0.0, 1.0), (1, 2))
