"""Intervals, averages, spreads and the split, against what is worked out by hand or by brute force."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from grpo_lab.evaluation.estimators import (
    RESAMPLES,
    bootstrap_means,
    difficulty,
    over_checkpoints,
    over_seeds,
    pass_at_k,
    percentile_interval,
    pooled,
    problem_values,
)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(n: int) -> None:
    for correct in range(n + 1):
        responses = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = [any(subset) for subset in combinations(responses, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(np.mean(subsets), abs=1e-12)


@pytest.mark.parametrize("k", [0, 9])
def test_pass_at_k_needs_k_responses(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs 1 <= k <= n, and n is 8"):
        pass_at_k(8, 4, k)


def test_values_of_problems() -> None:
    # Two of four correct: pass@2 = 1 - 1/6.
    assert problem_values([0, 2, 4], 4, [1, 2]).tolist() == [[0, 0, 0], [0.5, 0.5, 5 / 6], [1, 1, 1]]


def test_resampled_means_have_the_distribution_of_all_samples_with_replacement() -> None:
    values = np.array([[0.0], [0.5], [1.0]])
    means = bootstrap_means(values, seed=3)
    assert means.shape == (RESAMPLES, 1)
    every = np.array([np.mean(each) for each in product([0.0, 0.5, 1.0], repeat=3)])
    for value in np.unique(np.round(every, 9)):
        expected = np.mean(np.isclose(every, value))
        # Five standard errors of a share of 10,000.
        assert np.mean(np.isclose(means, value)) == pytest.approx(expected, abs=5 * np.sqrt(0.25 / RESAMPLES))
    assert np.array_equal(means, bootstrap_means(values, seed=3))
    assert not np.array_equal(means, bootstrap_means(values, seed=4))


def test_columns_share_their_resamples() -> None:
    values = np.random.default_rng(0).random((700, 1)) * np.array([1.0, 2.0])
    means = bootstrap_means(values, seed=0)
    assert np.allclose(means[:, 1], 2 * means[:, 0])


def test_a_percentile_interval_by_hand() -> None:
    # 0 .. 1000 evenly: the 2.5 % and 97.5 % quantiles.
    means = np.stack([np.arange(1001.0), np.full(1001, 7.0)], axis=1)
    assert percentile_interval(means) == pytest.approx(np.array([[25.0, 975.0], [7.0, 7.0]]), abs=1e-9)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    truth, covered, trials = 0.4, 0, 150
    for trial in range(trials):
        correct = rng.binomial(4, truth, size=120)
        ((low, high),) = percentile_interval(bootstrap_means(problem_values(correct.tolist(), 4, []), seed=trial))
        covered += low <= truth <= high
    # 95 % of 150 is 142.5, with a standard deviation of 2.7.
    assert 133 <= covered <= 149


def test_the_average_weighs_problems_and_resamples_inside_benchmarks() -> None:
    wide = np.linspace(0, 1, RESAMPLES)
    fixed = np.full(RESAMPLES, 0.2)
    mean, (low, high) = pooled([(30, 0.5, wide), (90, 0.2, fixed)])
    assert mean == pytest.approx((30 * 0.5 + 90 * 0.2) / 120)
    assert (low, high) == pytest.approx((0.25 * 0.025 + 0.15, 0.25 * 0.975 + 0.15), abs=1e-6)


def test_over_checkpoints_and_seeds() -> None:
    spread = over_checkpoints([0.2, 0.5, 0.3, 0.4])
    assert (spread.min, spread.max, spread.median) == (0.2, 0.5, pytest.approx(0.35))
    assert spread.mean == pytest.approx(0.35)
    # Deviations -1, 0, 1: the sample variance is 2 / 2.
    assert over_seeds([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert over_seeds([2.0]) == (2.0, None)


def test_the_split_by_base_success() -> None:
    base = {"none": 0.0, "one": 1 / 32, "edge": 0.75, "over": 25 / 32, "all": 1.0}
    assert difficulty(base) == {"solvable": ["one", "edge"], "unsolved": ["none"], "easy": ["over", "all"]}
