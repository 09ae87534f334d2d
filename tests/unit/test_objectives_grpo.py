"""GRPO's parts one at a time: advantages, clip regions, TIS weights, the KL term, and the three aggregations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import Case, gradient, grpo_token, objective, tensors
from torch import Tensor

from grpo_lab.objectives import group_advantages
from grpo_lab.types import LossInputs, LossOutput


def rows(
    ratios: list[list[float]],
    advantages: list[float],
    *,
    ref_minus_current: list[list[float]] | None = None,
    old_over_behaviour: list[list[float]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Responses with given advantages and ratios of the current to the old policy (the behaviour where it is not
    given apart)."""
    current = [[-1.0] * len(row) for row in ratios]

    def below(values: list[list[float]], parts: list[list[float]]) -> list[list[float]]:
        return [[v - math.log(p) for v, p in zip(*pair, strict=True)] for pair in zip(values, parts, strict=True)]

    old = below(current, ratios)
    d = ref_minus_current or [[0.0] * len(row) for row in ratios]
    case = Case(
        m=len(ratios),
        rewards=[0.0] * len(ratios),
        current=current,
        old=old,
        behaviour=old if old_over_behaviour is None else below(old, old_over_behaviour),
        ref=[[c + x for c, x in zip(*pair, strict=True)] for pair in zip(current, d, strict=True)],
    )
    return tensors(case, dtype=dtype, response_weights=torch.tensor(advantages, dtype=torch.float64))


def one_token(name: str, rho: float, a: float, *, old: float = 1.0, **changes: Any) -> tuple[float, float, LossOutput]:
    """Surrogate and d surrogate / d log pi of one token, without the KL term."""
    inputs = rows([[rho]], [a], old_over_behaviour=[[old]])
    output = objective(name, **{"beta": 0.0, **changes}).loss(inputs)
    return -output.loss.item(), -gradient(output, inputs)[0, 0].item(), output


# --- advantages -------------------------------------------------------------------------------------------------


def test_no_second_whitening_over_the_batch() -> None:
    """Two groups of rewards (1, 0): +-0.7071 in each, not the +-0.8660 of a second pass over all four."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.707107, -0.707107]] * 2, dtype=torch.float64)
    torch.testing.assert_close(objective("grpo").response_weights(rewards, rewards), expected, rtol=0, atol=2e-6)
    # The loss's own advantages too: with ratio 1 the token's gradient is -A / T.
    inputs = replace(rows([[1.0]] * 4, [0.0] * 4), response_weights=None, rewards=rewards.reshape(-1), group_size=2)
    got = -4 * gradient(objective("grpo", beta=0.0).loss(inputs), inputs)[:, 0]
    torch.testing.assert_close(got, expected.reshape(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", ["gg", "rg", "centred"])
def test_groups_do_not_see_each_other(rule: str) -> None:
    """Rows of two prompts that came back interleaved, (P0, P1, P0, P1) with rewards (1, 0, 1, 0): grouped by prompt
    every advantage is 0, where a reshape in order of arrival would give +-0.7071."""
    arrived = [("P0", 1.0), ("P1", 0.0), ("P0", 1.0), ("P1", 0.0)]
    by_prompt = [[reward for prompt, reward in arrived if prompt == name] for name in ("P0", "P1")]
    assert (group_advantages(torch.tensor(by_prompt), rule) == 0).all()
    assert (group_advantages(torch.tensor([r for _, r in arrived]).reshape(2, 2), rule) != 0).all()
    rewards = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    order, swap = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([2, 0, 3, 1])
    expected = group_advantages(rewards, rule)[order][:, swap]
    torch.testing.assert_close(group_advantages(rewards[order][:, swap], rule), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(("rule", "expected"), [("gg", 0.499999), ("rg", 0.576811), ("centred", 0.25)])
def test_graded_rewards(rule: str, expected: float) -> None:
    # Rewards 0.75, 0.25, 0.75, 0.25 ... of mean 0.5: var_{ddof=0} = 1/16; four of them: var_{ddof=1} = 1/12.
    a = group_advantages(torch.tensor([[0.75, 0.25, 0.75, 0.25]], dtype=torch.float64), rule)
    if rule == "gg":
        expected = 0.25 / (math.sqrt(1 / 12) + 1e-6)
    if rule == "rg":
        expected = 0.25 / math.sqrt(1 / 16 + 1e-4)
    assert a[0].tolist() == pytest.approx([expected, -expected] * 2, rel=1e-14)


# --- the clip ---------------------------------------------------------------------------------------------------

# preset, ratio, advantage -> surrogate, its slope in log pi, which clip acts (eps 0.2 and 0.2, dual clip 10).
REGIONS: list[tuple[str, float, float, float, float, str | None]] = [
    ("grpo", 0.5, 1.0, 0.5, 0.5, None),
    ("grpo", 1.0, 2.0, 2.0, 2.0, None),
    ("grpo", 1.19, 1.0, 1.19, 1.19, None),
    ("grpo", 1.21, 1.0, 1.2, 0.0, "high"),
    ("grpo", 50.0, 1.0, 1.2, 0.0, "high"),
    # A < 0: flat below 0.8, active from 0.8 to 10, constant beyond.
    ("grpo", 0.01, -1.0, -0.8, 0.0, "low"),
    ("grpo", 0.79, -1.0, -0.8, 0.0, "low"),
    ("grpo", 0.81, -1.0, -0.81, -0.81, None),
    ("grpo", 1.5, -1.0, -1.5, -1.5, None),
    ("grpo", 9.99, -1.0, -9.99, -9.99, None),
    ("grpo", 10.01, -1.0, -10.0, 0.0, "dual"),
    ("grpo", 1e6, -2.0, -20.0, 0.0, "dual"),
    # RG has no dual clip.
    ("grpo_rg", 50.0, -1.0, -50.0, -50.0, None),
    ("grpo_rg", 0.79, -1.0, -0.8, 0.0, "low"),
    ("grpo_rg", 1.21, 1.0, 1.2, 0.0, "high"),
]


@pytest.mark.parametrize(("name", "rho", "a", "value", "slope", "side"), REGIONS)
def test_clip_regions(name: str, rho: float, a: float, value: float, slope: float, side: str | None) -> None:
    got, got_slope, output = one_token(name, rho, a)
    assert got == pytest.approx(value, rel=1e-12)
    assert got_slope == pytest.approx(slope, rel=1e-12, abs=0)
    assert {each: output.metrics[f"clip/{each}"].value() for each in ("low", "high", "dual")} == {
        each: float(each == side) for each in ("low", "high", "dual")
    }


def test_the_two_sides_have_their_own_width() -> None:
    assert one_token("grpo", 1.27, 1.0, eps_low=0.1, eps_high=0.28)[:2] == pytest.approx((1.27, 1.27))
    assert one_token("grpo", 1.29, 1.0, eps_low=0.1, eps_high=0.28)[:2] == pytest.approx((1.28, 0.0))
    assert one_token("grpo", 0.85, -1.0, eps_low=0.1, eps_high=0.28)[:2] == pytest.approx((-0.9, 0.0))


@pytest.mark.parametrize("center", [0.1, 0.5, 1.0, 1.5, 6.0])
@pytest.mark.parametrize("a", [1.0, -1.0])
def test_clip_around_pi_k(center: float, a: float) -> None:
    """RG Eq. 6: min(rho A, clip(rho, max(rho' - eps, 0), rho' + eps) A), rho = pi / alpha and rho' = pi_k / alpha."""
    for rho in (0.01, 0.25, 0.45, 0.75, 0.95, 1.1, 1.25, 1.45, 1.75, 5.9, 6.5):
        # `old` is pi_k: pi / pi_k = rho / rho'.
        value, slope, _ = one_token("grpo_rg", rho / center, a, old=center, clip_center="pi_k")
        assert value == pytest.approx(grpo_token(rho, a, center=center), rel=1e-12)
        clipped = rho > center + 0.2 if a > 0 else rho < max(center - 0.2, 0.0)
        assert slope == pytest.approx(0.0 if clipped else rho * a, rel=1e-12, abs=0)


def test_at_the_first_pass_pi_k_moves_the_window_to_where_the_learner_is() -> None:
    """With i = 1, pi = pi_k: nothing is clipped around pi_k, whatever the staleness; around 1 it is."""
    far = rows([[1.0, 1.0]], [1.0], old_over_behaviour=[[3.0, 0.2]])
    around = {c: objective("grpo_rg", beta=0.0, clip_center=c).loss(far) for c in ("pi_k", "one")}
    assert around["pi_k"].loss.item() == pytest.approx(-(3.0 + 0.2) / 2)
    assert around["one"].loss.item() == pytest.approx(-(1.2 + 0.2) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("a", [1.0, -1.0, 0.0])
def test_a_ratio_beyond_the_floats_leaves_the_clipped_loss_finite(dtype: torch.dtype, a: float) -> None:
    """exp(900) is infinite: A > 0 and A < 0 are clipped, and an advantage of 0 makes 0 of it, not NaN."""
    inputs = replace(
        rows([[1.0, 1.0]], [a], dtype=dtype), behaviour_logprobs=torch.tensor([[-901.0, -1.0, 0.0]]).to(dtype)
    )
    output = objective("grpo", beta=0.0).loss(inputs)
    bound = {1.0: 1.2, -1.0: -10.0, 0.0: 0.0}[a]
    assert output.loss.item() == pytest.approx(-(bound + a) / 2, rel=1e-6)
    assert gradient(output, inputs)[0].tolist() == pytest.approx([0.0, -a / 2, 0.0], rel=1e-6)


# --- truncated importance sampling ------------------------------------------------------------------------------

# old / behaviour, current / old, advantage -> weighted surrogate, slope.
TIS: list[tuple[float, float, float, float, float]] = [
    (0.5, 1.0, 1.0, 0.5, 0.5),
    (1.9, 1.0, -1.0, -1.9, -1.9),
    (3.0, 1.0, 1.0, 2.0, 2.0),
    # The weight multiplies the clipped surrogate: 2 * 1.2, not min(2 * 1.5, 1.2).
    (3.0, 1.5, 1.0, 2.4, 0.0),
    (3.0, 0.5, -1.0, -1.6, 0.0),
    # The dual-clipped one as well: 2 * -10 and 0.5 * -10, the dual clip at current / old = 10.
    (3.0, 20.0, -1.0, -20.0, 0.0),
    (0.5, 20.0, -1.0, -5.0, 0.0),
    (0.5, 9.0, -1.0, -4.5, -4.5),
]


@pytest.mark.parametrize(("old", "rho", "a", "value", "slope"), TIS)
def test_tis_multiplies_the_dual_clipped_surrogate(
    old: float, rho: float, a: float, value: float, slope: float
) -> None:
    got, got_slope, output = one_token("grpo_tis", rho, a, old=old)
    assert got == pytest.approx(value, rel=1e-12)
    assert got_slope == pytest.approx(slope, rel=1e-12, abs=0)
    assert output.metrics["tis/weight"].value() == pytest.approx(min(old, 2.0))
    assert output.metrics["tis/capped"].value() == float(old > 2)


def test_an_infinite_cap_is_plain_importance_weights() -> None:
    value, slope, output = one_token("grpo_tis", 1.1, 1.0, old=40.0, tis_cap=math.inf)
    assert (value, slope) == pytest.approx((44.0, 44.0))
    assert output.metrics["tis/capped"].value() == 0.0


def test_no_token_is_rejected_and_none_leaves_the_divisor() -> None:
    """Log weights 0.2, -2, 1, -8, 0.3 under a cap of 2: their mean is (1.2214 + 0.1353 + 2 + 0.0003 + 1.3499) / 5."""
    weights = [math.exp(x) for x in (0.2, -2.0, 1.0, -8.0, 0.3)]
    output = objective("grpo_tis", beta=0.0).loss(rows([[1.0] * 5], [-1.0], old_over_behaviour=[weights]))
    assert output.loss.item() == pytest.approx(0.9414, abs=5e-5)
    assert output.metrics["tis/weight"].value() == pytest.approx(0.9414, abs=5e-5)
    assert output.metrics["tis/capped"].value() == pytest.approx(0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0])
def test_a_capped_weight_is_the_cap_and_is_counted_in_either_precision(cap: float, dtype: torch.dtype) -> None:
    """Also where exp(log(cap)) is not cap in float32, and where the weight itself would be infinite."""
    inputs = rows([[1.0, 1.0]], [1.0], dtype=dtype)
    inputs = replace(
        inputs, behaviour_logprobs=inputs.logprobs.detach() - torch.tensor([[900.0, 4.0, 0.0]], dtype=dtype)
    )
    output = objective("grpo_tis", beta=0.0, tis_cap=cap).loss(inputs)
    assert output.metrics["tis/capped"].value() == 1.0
    assert output.metrics["tis/weight"].value() == pytest.approx(cap, rel=1e-7)
    assert output.loss.item() == pytest.approx(-cap, rel=1e-7)


def test_the_kl_term_has_no_importance_weight() -> None:
    inputs = rows([[1.0]], [0.0], old_over_behaviour=[[3.0]], ref_minus_current=[[math.log(2)]])
    output = objective("grpo_tis", beta=1.0).loss(inputs)
    assert output.loss.item() == pytest.approx(1 - math.log(2), rel=1e-12)


# --- aggregation ------------------------------------------------------------------------------------------------

# Lengths 2 and 6, ratio 1, advantages 1 and -1, at most 8 tokens.
AGGREGATED = {"sequence_mean": 0.0, "token_mean": 0.5, "constant_length": 0.25}


@pytest.mark.parametrize("name", ["grpo", "grpo_rg", "grpo_tis"])
@pytest.mark.parametrize(("aggregation", "expected"), AGGREGATED.items())
def test_aggregations(name: str, aggregation: str, expected: float) -> None:
    inputs = rows([[1.0] * 2, [1.0] * 6], [1.0, -1.0])
    loss = objective(name, beta=0.0, aggregation=aggregation, max_response_tokens=8).loss(inputs).loss
    assert loss.item() == pytest.approx(expected, abs=1e-15)


def test_the_default_is_the_token_mean() -> None:
    for name in ("grpo", "grpo_rg", "grpo_tis"):
        loss = objective(name, beta=0.0).loss(rows([[1.0] * 2, [1.0] * 6], [1.0, -1.0])).loss
        assert loss.item() == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # K3 of a = 1 - ln 2 on 2 tokens and b = ln 2 - 1/2 on 6: means over tokens, over responses, over 2 * 8.
    [("token_mean", (2, 6, 8)), ("sequence_mean", (1, 1, 2)), ("constant_length", (2, 6, 16))],
)
def test_the_kl_term_uses_the_same_aggregation(aggregation: str, expected: tuple[int, int, int]) -> None:
    d = [[math.log(2)] * 2, [-math.log(2)] * 6]
    inputs = rows([[1.0] * 2, [1.0] * 6], [0.0, 0.0], ref_minus_current=d)
    loss = objective("grpo", beta=3.0, aggregation=aggregation, max_response_tokens=8).loss(inputs).loss
    a, b = 1 - math.log(2), math.log(2) - 0.5
    assert loss.item() == pytest.approx(3.0 * (expected[0] * a + expected[1] * b) / expected[2], rel=1e-13)


# --- the KL term ------------------------------------------------------------------------------------------------


def kl_only(d: list[float], dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[LossOutput, Tensor]:
    inputs = rows([[1.0] * len(d)], [0.0], ref_minus_current=[d], dtype=dtype)
    output = objective("grpo", **{"beta": 1.0, **changes}).loss(inputs)
    return output, gradient(output, inputs)[0, : len(d)] * len(d)


def test_k3_and_its_gradient() -> None:
    """exp(d) - d - 1 with d = ref - current; its slope in log pi is 1 - exp(d)."""
    for d, value in ((0.0, 0.0), (0.1, 0.0051709), (-1.0, math.exp(-1)), (3.0, math.exp(3) - 4)):
        output, slope = kl_only([d])
        assert output.loss.item() == pytest.approx(value, rel=1e-5, abs=1e-16)
        assert slope.item() == pytest.approx(1 - math.exp(d), rel=1e-12, abs=1e-16)
        assert output.metrics["kl/reference"].value() == pytest.approx(value, rel=1e-5, abs=1e-16)
    # Small d keeps its digits: 1e-9^2 / 2, where exp(d) - d - 1 rounds to 0 or 1e-16.
    assert kl_only([1e-9])[0].loss.item() == pytest.approx(5e-19, rel=1e-3)


def test_the_gradient_is_that_of_the_other_divergence() -> None:
    """Summed exactly over a small categorical, E_pi[d K3 / d log pi * d log pi] is the gradient of KL(ref || pi)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    log_pi = torch.log_softmax(logits, -1)
    pi = log_pi.detach().exp()
    case = Case(
        m=3,
        rewards=[0.0] * 3,
        current=[[x] for x in log_pi.tolist()],
        old=[[0.0]] * 3,
        behaviour=[[x] for x in log_pi.tolist()],
        ref=[[math.log(p)] for p in ref.tolist()],
    )
    inputs = tensors(case, response_weights=torch.zeros(3, dtype=torch.float64))
    slope = gradient(objective("grpo", beta=1.0).loss(inputs), inputs)[:, 0] * 3
    (of_k3,) = torch.autograd.grad(((pi * slope) * log_pi).sum(), logits, retain_graph=True)
    (of_kl,) = torch.autograd.grad((ref * (ref.log() - log_pi)).sum(), logits)
    torch.testing.assert_close(of_k3, of_kl, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verl_clamps_keep_huge_ratios_finite_and_count_them(dtype: torch.dtype) -> None:
    # Current -120, -1, -3 against -20, -1, -2.9; and d = -15, in range, but its K3 of 14 is not.
    output, slope = kl_only([100.0, 0.0, 0.1, -15.0], dtype, kl_clamp="verl")
    assert output.loss.item() == pytest.approx((10 + 0 + 0.0051709 + 10) / 4, rel=1e-5)
    assert slope.tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(0.1), 0.0], rel=1e-5)
    assert output.metrics["kl/clamped"].value() == 0.5


def test_verl_clamps_change_nothing_in_range() -> None:
    d = [-10.9, -2.0, 0.0, 1.5, 2.5]
    (clamped, with_clamp), (free, without) = (kl_only(d, kl_clamp=clamp) for clamp in ("verl", "none"))
    assert clamped.loss.item() == free.loss.item()
    assert torch.equal(with_clamp, without)
    assert clamped.metrics["kl/clamped"].value() == free.metrics["kl/clamped"].value() == 0.0


def test_beta_zero_reads_no_reference() -> None:
    inputs = replace(rows([[1.0]], [1.0]), ref_logprobs=None)
    output = objective("grpo", beta=0.0).loss(inputs)
    assert output.loss.item() == -1.0
    assert "kl/reference" not in output.metrics
