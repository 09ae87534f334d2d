"""Distances between the learner and the policy that sampled, against numbers worked by hand, and at the extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.diagnostics import (
    LOG_RATIO_EDGES,
    EssSums,
    bound_parts,
    bound_values,
    k3,
    log_ratios,
    mismatch,
    sequence_ess,
    token_ess,
)
from grpo_lab.metrics import Metric, merge, scalars
from grpo_lab.minibatches import Minibatch, make_minibatch
from grpo_lab.types import Group, Problem, Prompt, Rollout


def arrays(*rows: Sequence[float]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.float64) for row in rows]


def minibatch(rewards: Sequence[Sequence[float]], behaviour: Sequence[Sequence[Sequence[float]]]) -> Minibatch:
    groups = []
    for sequence, (values, rows) in enumerate(zip(rewards, behaviour, strict=True)):
        rollouts = tuple(
            Rollout(
                token_ids=np.zeros(len(row), dtype=np.int32),
                behaviour_logprobs=np.array(row, dtype=np.float32),
                finish_reason="stop",
                policy_version=0,
                text="",
            )
            for row in rows
        )
        prompt = Prompt(problem=Problem(id=str(sequence), question="q", gold="1"), text="q", token_ids=(1,))
        verdicts = ("correct",) * len(values)
        groups.append(
            Group(prompt=prompt, rollouts=rollouts, rewards=tuple(values), verdicts=verdicts, sequence=sequence)
        )
    return make_minibatch(0, groups, mask_zero_variance=False, mask_divisor="all")


def one_token_each(rewards: Sequence[Sequence[float]]) -> Minibatch:
    return minibatch(rewards, [[[-1.0]] * len(group) for group in rewards])


# --- token level ------------------------------------------------------------------------------------------------


def test_lambda_is_learner_minus_behaviour() -> None:
    batch = minibatch([[1, 0]], [[[-1.0, -2.0], [-0.5]]])
    scores = [[np.array([-1.5, -1.75], dtype=np.float32), np.array([-0.25], dtype=np.float32)]]
    first, second = log_ratios(batch, scores)
    assert first.dtype == np.float64
    assert (first.tolist(), second.tolist()) == ([-0.5, 0.25], [0.25])


def test_worked_by_hand() -> None:
    # lambda = ln 2, -ln 2 | 0: K3 = 1 - ln 2, ln 2 - 1/2, 0.
    got = mismatch(arrays([math.log(2), -math.log(2)], [0.0]))
    assert got["mismatch/k3"].value() == pytest.approx(0.5 / 3, rel=1e-14)
    assert got["mismatch/drift"].value() == pytest.approx(2 * math.log(2) / 3, rel=1e-14)
    assert got["mismatch/log_ratio_max"].value() == pytest.approx(math.log(2), rel=1e-15)
    assert k3(np.array([0.1]))[0] == pytest.approx(0.0051709, abs=5e-8)
    fallen = mismatch(arrays([math.log(2), -math.log(3)]))
    assert fallen["mismatch/log_ratio_max"].value() == pytest.approx(math.log(3), rel=1e-15)


def test_the_token_mean_is_over_tokens_not_over_responses() -> None:
    got = mismatch(arrays([1.0], [0.0] * 9))
    assert got["mismatch/drift"].value() == pytest.approx(0.1)
    assert got["mismatch/k3"].value() == pytest.approx((math.e - 2) / 10)


def test_small_ratios_keep_their_digits() -> None:
    """exp(x) - x - 1 would round 5e-19 to 0 or to 1e-16."""
    assert k3(np.array([1e-9, -1e-9])).tolist() == pytest.approx([5e-19, 5e-19], rel=1e-6)


@given(st.floats(-700, 700))
def test_k3_is_never_negative(x: float) -> None:
    assert k3(np.array([x]))[0] >= 0


def test_k3_estimates_the_divergence_of_behaviour_from_learner() -> None:
    """At tokens of the behaviour policy its mean is KL(behaviour || learner), and not the other direction."""
    behaviour, learner = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.3, 0.4])
    tokens = np.random.default_rng(0).choice(3, size=200_000, p=behaviour)
    estimate = mismatch([np.log(learner / behaviour)[tokens]])["mismatch/k3"].value()
    divergence = float((behaviour * np.log(behaviour / learner)).sum())
    other = float((learner * np.log(learner / behaviour)).sum())
    values = k3(np.log(learner / behaviour))
    error = math.sqrt(float((behaviour * values**2).sum() - divergence**2) / 200_000)
    assert estimate == pytest.approx(divergence, abs=4 * error)
    assert abs(divergence - other) > 40 * error


def test_quantiles_come_from_the_histogram() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.normal(0.0, 0.1, size=5000)
    row = scalars(mismatch([tokens]))
    for name, q in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        exact = float(np.quantile(tokens, q))
        assert row[f"mismatch/log_ratio/{name}"] == pytest.approx(exact, rel=0.27, abs=5e-3)


def test_the_edges_are_fixed_sorted_and_symmetric() -> None:
    assert list(LOG_RATIO_EDGES) == sorted(set(LOG_RATIO_EDGES))
    assert [-edge for edge in reversed(LOG_RATIO_EDGES)] == list(LOG_RATIO_EDGES)
    assert (LOG_RATIO_EDGES[0], LOG_RATIO_EDGES[-1]) == (pytest.approx(-20), pytest.approx(20))
    on_policy = mismatch([np.zeros(10)])["mismatch/log_ratio"]
    assert on_policy.value() == pytest.approx(0, abs=1e-7)


# --- effective sample size --------------------------------------------------------------------------------------


def test_ess_worked_by_hand() -> None:
    """Weights 0.5, 3, 8: (11.5)^2 / (3 * 73.25) = 0.6018. Under a cap of 2 they would look like 0.8182."""
    sums = sequence_ess(arrays(*([math.log(w)] for w in (0.5, 3.0, 8.0))))
    assert sums.value() == pytest.approx(0.6018, abs=5e-5)
    assert sums.value() * 3 == pytest.approx(1.8055, abs=5e-5)
    capped = EssSums.of(np.minimum(np.log([0.5, 3.0, 8.0]), math.log(2)))
    assert capped.value() == pytest.approx(0.8182, abs=5e-5)


def test_sequence_weights_sum_over_tokens_and_token_weights_do_not() -> None:
    # Sequences: w = 6, 1/2. Tokens: w = 2, 3, 1/2, 1.
    ratios = arrays([math.log(2), math.log(3)], [math.log(0.5), 0.0])
    assert sequence_ess(ratios).value() == pytest.approx(6.5**2 / (2 * 36.25), rel=1e-14)
    assert token_ess(ratios).value() == pytest.approx(6.5**2 / (4 * 14.25), rel=1e-14)


log_weights = st.lists(st.floats(-800, 800), min_size=1, max_size=20)


@given(log_weights, st.floats(-300, 300))
def test_ess_is_scale_invariant_and_lies_between_its_bounds(values: list[float], shift: float) -> None:
    plain, scaled = EssSums.of(np.array(values)), EssSums.of(np.array(values) + shift)
    assert scaled.value() == pytest.approx(plain.value(), rel=1e-9)
    for sums in (plain, scaled):
        assert 1 / len(values) <= sums.value() <= 1


def test_ess_of_equal_weights_is_one_and_of_a_lone_weight_one_over_b() -> None:
    for level in (0.0, 45.0, -1234.5, 7e4):
        assert EssSums.of(np.full(7, level)).value() == pytest.approx(1, rel=1e-9)
        assert EssSums.of(np.full(7, level)).value() <= 1
    collapsed = EssSums.of(np.array([700.0] + [-700.0] * 2047)).value()
    assert collapsed == pytest.approx(1 / 2048, rel=1e-9)
    assert collapsed >= 1 / 2048


@given(st.lists(log_weights, min_size=1, max_size=5))
def test_ess_merges_over_any_split(parts: list[list[float]]) -> None:
    whole = EssSums.of(np.array([value for part in parts for value in part]))
    merged = reduce(EssSums.merge, [EssSums.of(np.array(part)) for part in parts], EssSums())
    assert merged.count == whole.count
    assert merged.value() == pytest.approx(whole.value(), rel=1e-9)


# --- merging and extremes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3, 4)])
def test_parts_merge_to_the_whole(cuts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    ratios = [rng.normal(size=length) for length in (3, 1, 7, 2, 5)]
    bounds = [0, *cuts, len(ratios)]
    parts = [mismatch(ratios[start:stop]) for start, stop in pairwise(bounds)]
    whole, merged = mismatch(ratios), merge(parts)
    assert merged["mismatch/log_ratio"] == whole["mismatch/log_ratio"]
    for name, metric in whole.items():
        assert merged[name].value() == pytest.approx(metric.value(), rel=1e-12)


EXTREMES = [
    pytest.param(arrays([0.0, 750.0, -800.0]), id="one response"),
    pytest.param(arrays([0.0], [750.0], [-800.0], [400.0]), id="four responses"),
    pytest.param(arrays([0.005] * 9000, [0.0], [0.1], [-0.1]), id="9000 tokens"),
    pytest.param(arrays([800.0], [800.0], [800.0], [0.0]), id="all infinite"),
    pytest.param(arrays(*[[709.0]] * 4), id="finite but not their sum"),
]


@pytest.mark.parametrize("ratios", EXTREMES)
def test_extremes_are_finite_or_infinite_without_a_warning(ratios: list[np.ndarray]) -> None:
    """Warnings are errors here. Infinity is a value; NaN is none."""
    for value in scalars(mismatch(ratios)).values():
        assert not math.isnan(value)
    assert 1 / len(ratios) <= sequence_ess(ratios).value() <= 1
    assert math.isfinite(token_ess(ratios).value())


def test_a_long_response_drifts_by_its_sum() -> None:
    """9,000 tokens at 0.005 are 45 nats: one such response among 2,048 is all that counts, at a drift of 0.005."""
    ratios = arrays([0.005] * 9000, *[[0.0]] * 2047)
    assert sequence_ess(ratios).log_sum == pytest.approx(45.0, rel=1e-12)
    assert sequence_ess(ratios).value() == pytest.approx(1 / 2048, rel=1e-9)
    got = mismatch(ratios[:1])
    assert got["mismatch/drift"].value() == pytest.approx(0.005)
    assert token_ess(ratios[:1]).value() == pytest.approx(1.0)


# --- RG's bound -------------------------------------------------------------------------------------------------


def values_of(parts: dict[str, Metric]) -> dict[str, float]:
    return {name: float(value) for name, metric in parts.items() if (value := metric.value()) is not None}


def test_the_bound_worked_by_hand() -> None:
    """Two prompts of two responses, one token each. First pass w = 2, 1/2 | 1, 1; last pass w = 2, 1/4 | 1, 1/2."""
    batch = one_token_each([[1.0, 0.0], [1.0, 1.0]])
    first = arrays([math.log(2)], [math.log(0.5)], [0.0], [0.0])
    last = arrays([math.log(2)], [math.log(0.25)], [0.0], [math.log(0.5)])
    parts = bound_parts(batch, first, last)
    s = (math.sqrt(0.25 + 1e-4), 0.01)
    inverse = [(1 - each) / each for each in s]
    tv = (0.5 * (1 + 0.75) / 2, 0.5 * (0 + 0.5) / 2)
    # w - 1 - ln w: 1 - ln 2, ln 4 - 3/4 | 0, ln 2 - 1/2
    pinsker = (math.sqrt(0.5 * (0.25 + math.log(2)) / 2), math.sqrt(0.5 * (math.log(2) - 0.5) / 2))
    got = values_of(parts)
    assert got == {
        "bound/s": pytest.approx(sum(s) / 2, rel=1e-13),
        "bound/one_minus_s_over_s": pytest.approx(sum(inverse) / 2, rel=1e-13),
        "bound/inverse_square": pytest.approx((inverse[0] ** 2 + inverse[1] ** 2) / 2, rel=1e-13),
        "bound/tv_pi": pytest.approx(sum(tv) / 2, rel=1e-13),
        "bound/tv_pi_square": pytest.approx((tv[0] ** 2 + tv[1] ** 2) / 2, rel=1e-13),
        "bound/tv_pi_k": pytest.approx((0.5 * (1 + 0.5) / 2 + 0) / 2, rel=1e-13),
        "bound/pinsker": pytest.approx(sum(pinsker) / 2, rel=1e-13),
        # A = +-1/2 / s_1 and 0.
        "bound/surrogate": pytest.approx((2 - 0.25) * 0.5 / s[0] / 2 / 2, rel=1e-13),
        "bound/reward_max": 1.0,
    }
    logged = bound_values(parts)
    penalty = 2 * math.sqrt(got["bound/inverse_square"]) * math.sqrt(got["bound/tv_pi_square"])
    expected = got["bound/surrogate"] - penalty - 2 * got["bound/tv_pi_k"]
    assert logged["bound/lower"] == pytest.approx(expected, rel=1e-13)
    # The squares serve the bound alone.
    shown = {"s", "one_minus_s_over_s", "tv_pi", "tv_pi_k", "pinsker", "surrogate", "lower"}
    assert set(logged) == {f"bound/{name}" for name in shown}


def test_the_bound_scales_with_the_largest_reward() -> None:
    batch = one_token_each([[3.0, -1.0]])
    ratio = arrays([math.log(2)], [0.0])
    got = bound_parts(batch, ratio, ratio)
    assert values_of(got)["bound/reward_max"] == 3.0
    turned = bound_parts(one_token_each([[-3.0, 1.0]]), ratio, ratio)
    assert values_of(turned)["bound/reward_max"] == 3.0
    s = math.sqrt(4 + 1e-4)
    expected = (2 * 2 / s - 2 / s) / 2 - 2 * 3 * abs((1 - s) / s) * 0.25 - 2 * 3 * 0.25
    assert bound_values(got)["bound/lower"] == pytest.approx(expected, rel=1e-13)


def test_on_policy_the_bound_is_zero() -> None:
    batch = one_token_each([[1.0, 0.0], [0.0, 1.0]])
    zero = arrays(*[[0.0]] * 4)
    got = bound_values(bound_parts(batch, zero, zero))
    for name in ("tv_pi", "tv_pi_k", "pinsker", "surrogate", "lower"):
        assert got[f"bound/{name}"] == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("size", [1e-6, 1e-9, 3e-9, 1e-12, 1e-15])
def test_rounding_noise_between_engines_leaves_pinsker_real(size: float) -> None:
    """w - 1 - log w is x^2/2 for small x, which exp(x) - 1 - x rounds to either side of 0."""
    batch = one_token_each([[1.0, 0.0]])
    for sign in (1, -1):
        noise = arrays([sign * size], [-0.7 * sign * size])
        got = bound_values(bound_parts(batch, noise, noise))
        expected = math.sqrt(0.5 * (1 + 0.49) / 2 / 2) * size
        assert got["bound/pinsker"] == pytest.approx(expected, rel=1e-3, abs=1e-15)


def test_bound_parts_merge_over_prompts() -> None:
    rng = np.random.default_rng(3)
    rewards = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    ratios = [rng.normal(scale=0.3, size=1) for _ in range(9)]
    whole = bound_parts(one_token_each(rewards), ratios, ratios)
    parts = [
        bound_parts(one_token_each([row]), ratios[3 * g : 3 * g + 3], ratios[3 * g : 3 * g + 3])
        for g, row in enumerate(rewards)
    ]
    assert values_of(merge(parts)) == pytest.approx(values_of(whole), rel=1e-12)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 1.0, 0.0], [1.0] * 4])
@pytest.mark.parametrize("ratios", [*EXTREMES[1:], pytest.param(arrays([800.0], [800.0], [0.0], [400.0]), id="both")])
def test_the_bound_at_the_extremes(ratios: list[np.ndarray], rewards: list[float]) -> None:
    parts: dict[str, Any] = bound_parts(one_token_each([rewards]), ratios, ratios)
    values = bound_values(parts)
    for name, value in values.items():
        assert not math.isnan(value), name
    assert values["bound/lower"] == -math.inf or max(ratio.sum() for ratio in ratios) < 700


def test_weights_that_overflow_and_cancel_leave_the_finite_rest() -> None:
    """Advantages +A, -A, +A, -A on log weights 800, 800, 0, 400: what remains is A (1 - e^400) / 4."""
    ratios = arrays([800.0], [800.0], [0.0], [400.0])
    surrogate = bound_parts(one_token_each([[1.0, 0.0, 1.0, 0.0]]), ratios, ratios)["bound/surrogate"].value()
    assert surrogate == pytest.approx(-0.5 / math.sqrt(0.2501) * math.exp(400) / 4, rel=1e-12)
