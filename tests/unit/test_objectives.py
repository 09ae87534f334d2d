"""The seven presets against numbers worked on paper, plain Python, their documented gradients and their limits."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_cases import (
    PLAIN,
    PRESETS,
    Case,
    central_differences,
    gradient,
    group_gap,
    log_ratios,
    mean,
    objective,
    plain_agro,
    preset,
    random_case,
    response_weights,
    softmax,
    tensors,
    variance,
)
from torch import Tensor

from grpo_lab.metrics import Histogram
from grpo_lab.objectives import gibbs_gap, group_advantages

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)

# Two groups of two, six tokens, l_bar = 1.5. The current policy's ratios are
#   to the behaviour policy  [0.55, 4.5] [0.5] | [12] [0.9, 4]
#   to the old policy        [1.1,  1.5] [0.5] | [12] [0.9, 1]    and old to behaviour [0.5, 3] [1] | [1] [1, 4],
# and the reference is twice the current policy at the first token, equal to it elsewhere (Delta_1 = -ln 2).
CURRENT = [[-0.5, -1.0], [-2.0], [-1.0], [-0.25, -0.5]]
OLD = [[-0.5 - math.log(1.1), -1.0 - math.log(1.5)], [-2.0 + LN2], [-1.0 - math.log(12)], [-0.25 - math.log(0.9), -0.5]]
HAND = Case(
    m=2,
    rewards=[1.0, 0.0, 0.0, 1.0],
    current=CURRENT,
    old=OLD,
    behaviour=[[OLD[0][0] + LN2, OLD[0][1] - LN3], OLD[1], OLD[2], [OLD[3][0], OLD[3][1] - LN4]],
    ref=[[-0.5 + LN2, -1.0], *CURRENT[1:]],
)

WORKED: list[tuple[str, dict[str, Any], float]] = [
    # A = +-0.5 / (sqrt(0.5) + 1e-6) = +-0.7071058; K3 = 2 - ln 2 - 1 = 0.3068528 at one token.
    # -A (0.55 + 1.2 - 0.8 - 10 + 0.9 + 1.2) / 6 + 0.01 K3 / 6
    ("grpo", {}, 0.819576),
    # A = +-0.5 / sqrt(0.25 + 1e-4) = +-0.9998001; no dual clip: -A (0.55 + 1.2 - 0.8 - 12 + 0.9 + 1.2) / 6 + 0.1 K3 / 6
    ("grpo_rg", {}, 1.496483),
    # -A (0.5 * 1.1 + 2 * 1.2 - 0.8 - 10 + 0.9 + 2 * 1) / 6 + 0.01 K3 / 6
    ("grpo_tis", {}, 0.583874),
    # z = (1 + 0.01 ln 2, 0 | 0, 1), a = 2 (z - mean), s = (-1.5, -2 | -1, -0.75): -(1.0069315 * 0.5 + 0.25) / 6
    ("agro", {}, -0.125578),
    ("agro", {"beta": 1.0}, -0.182762),
    # R / beta = (100 + ln 2, 0 | 0, 100): J / beta = 50 - ln 2 / 2, 50 - ln 2; their mean / 1.5
    ("ggpo", {}, 32.986760),
    # J = ln((2e + 1)/2) - (1 + ln 2)/2 = 0.3222732 and ln((e + 1)/2) - 1/2 = 0.1201145; their mean / 1.5
    ("ggpo", {"beta": 1.0}, 0.147463),
    # Delta_1 clipped to -0.05: q = sigmoid(1.05), sigmoid(1); -((2 q_1 - 1) 0.5 + (2 q_4 - 1) 0.25) / 6
    ("ggpo_clip", {"beta": 1.0}, -0.059384),
    # q = sigmoid(1) in both: -tanh(1/2) 0.75 / 6
    ("ggpo_reward_only", {"beta": 1.0}, -0.057765),
]


@pytest.mark.parametrize(("name", "changes", "expected"), WORKED)
def test_worked_on_paper(name: str, changes: dict[str, Any], expected: float) -> None:
    loss = objective(name, **changes).loss(tensors(HAND)).loss
    assert loss.item() == pytest.approx(expected, abs=6e-7)


def test_coefficients_worked_on_paper() -> None:
    # m = 4, one correct, beta = 1: q = e / (e + 3), 1 / (e + 3); c = (4 q - 1) / sqrt(3). AGRO: 4/3 (r - 1/4).
    rewards, equal = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64)
    c = objective("ggpo", beta=1.0).response_weights(rewards, equal)
    assert c[0].tolist() == pytest.approx([0.520463, -0.173488, -0.173488, -0.173488], abs=6e-7)
    a = objective("agro", beta=1.0).response_weights(rewards, equal)
    assert a[0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], abs=1e-15)
    gg = objective("grpo").response_weights(rewards, equal)
    assert gg[0].tolist() == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=6e-7)
    rg = objective("grpo_rg").response_weights(rewards, equal)
    assert rg[0].tolist() == pytest.approx([1.731589, -0.577196, -0.577196, -0.577196], abs=6e-7)
    centred = objective("grpo", advantage="centred").response_weights(rewards, equal)
    assert centred[0].tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_are_those_of_the_formulas(name: str, seed: int) -> None:
    case = random_case(seed, groups=3, m=4)
    inputs = tensors(case)
    output = objective(name).loss(inputs)
    plain = PLAIN[name]
    assert output.loss.item() == pytest.approx(plain(case.current, case.current, case), rel=1e-12)
    slopes = central_differences(lambda now: plain(now, case.current, case), case.current)
    got = gradient(output, inputs)
    for i, row in enumerate(slopes):
        assert got[i, : len(row)].tolist() == pytest.approx(row, rel=1e-6, abs=1e-8)
        assert (got[i, len(row) :] == 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_gradcheck(name: str) -> None:
    case = random_case(11, groups=2, m=3)
    inputs, chosen = tensors(case), objective(name)
    if name != "ggpo":
        # What a stop-gradient covers is held fixed, as the check's finite differences would move it.
        inputs = replace(inputs, response_weights=response_weights(chosen, inputs))
    mask = inputs.loss_mask

    def loss(tokens: Tensor) -> Tensor:
        return chosen.loss(
            replace(inputs, logprobs=torch.zeros_like(inputs.logprobs).masked_scatter(mask, tokens))
        ).loss

    assert torch.autograd.gradcheck(loss, (inputs.logprobs.detach()[mask].requires_grad_(),))


@pytest.mark.parametrize("name", PRESETS)
def test_float32_log_probs_give_float32_gradients_close_to_float64(name: str) -> None:
    case = random_case(5, groups=2, m=4)
    narrow, wide = tensors(case, dtype=torch.float32), tensors(case)
    chosen = objective(name)
    got, expected = gradient(chosen.loss(narrow), narrow), gradient(chosen.loss(wide), wide)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)


# --- the gradients that the papers state ------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.01, 0.3, 5.0])
def test_gradient_of_the_group_gap(beta: float) -> None:
    """d J_g / d s_i = -beta (q_i - 1/m) (GG Eq. 9), and J >= 0."""
    case = random_case(3, groups=1, m=5)
    delta = torch.tensor([log_ratios(case.current, case)], dtype=torch.float64, requires_grad=True)
    gap = beta * gibbs_gap(torch.tensor([case.rewards], dtype=torch.float64), delta, beta)
    (got,) = torch.autograd.grad(gap.sum(), delta)
    q = softmax([r / beta - d for r, d in zip(case.rewards, delta[0].tolist(), strict=True)])
    assert got[0].tolist() == pytest.approx([-beta * (weight - 1 / 5) for weight in q], rel=1e-12, abs=1e-15)
    assert gap.item() > 0


@pytest.mark.parametrize("beta", [0.01, 0.3, 5.0])
def test_ggpo_has_the_gradient_of_the_token_mean_form(beta: float) -> None:
    """-1/(G m l_bar) sum c_i s_i with c_i = m (q_i - 1/m) / sqrt(m - 1) (GG Eq. 29)."""
    case = random_case(4, groups=3, m=4)
    inputs = tensors(case)
    got = gradient(objective("ggpo", beta=beta).loss(inputs), inputs)
    delta = log_ratios(case.current, case)
    for group in case.groups():
        q = softmax([case.rewards[i] / beta - delta[i] for i in group])
        for i, weight in zip(group, q, strict=True):
            c = 4 * (weight - 1 / 4) / math.sqrt(3)
            expected = torch.full((len(case.current[i]),), -c / case.tokens, dtype=torch.float64)
            torch.testing.assert_close(got[i][inputs.loss_mask[i]], expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("beta", [0.01, 0.3, 5.0])
def test_agro_has_the_gradient_of_half_the_variance(beta: float) -> None:
    """That of mean_g[Var_{ddof=1}(R) / 2] / (beta l_bar), differentiated through R."""
    case = random_case(4, groups=3, m=4)
    inputs, other = tensors(case), tensors(case)
    got = gradient(objective("agro", beta=beta).loss(inputs), inputs)
    zero = torch.zeros((), dtype=torch.float64)
    s = torch.where(other.loss_mask, other.logprobs - other.ref_logprobs, zero).sum(-1)
    adjusted = (other.rewards - beta * s).reshape(3, 4)
    half_variance = (adjusted.var(-1, correction=1) / 2).mean() / (beta * case.tokens / 12)
    (expected,) = torch.autograd.grad(half_variance, other.logprobs)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-14)


def test_agro_stops_the_gradient_of_its_whole_advantage() -> None:
    """Through a_i the loss would have a second term, beta s_i da_i: the gradient has none."""
    case = random_case(6, groups=1, m=3)
    inputs = tensors(case)
    got = gradient(objective("agro", beta=0.5).loss(inputs), inputs)
    stopped = central_differences(lambda now: plain_agro(now, case.current, case, 0.5), case.current)
    through = central_differences(lambda now: plain_agro(now, now, case, 0.5), case.current)
    assert float(got[0, 0]) == pytest.approx(stopped[0][0], abs=1e-8)
    assert abs(float(got[0, 0]) - through[0][0]) > 1e-2


# --- limits -----------------------------------------------------------------------------------------------------


def weights(name: str, rewards: list[float], delta: list[float], **changes: Any) -> list[float]:
    of = objective(name, **changes).response_weights
    row: list[float] = of(torch.tensor([rewards], dtype=torch.float64), torch.tensor([delta], dtype=torch.float64))[0]
    return [float(value) for value in row]


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_ggpo_at_beta_to_zero(k: int) -> None:
    m = 8
    rng = random.Random(k)
    rewards, delta = [1.0] * k + [0.0] * (m - k), [rng.uniform(-3, 3) for _ in range(m)]
    c = weights("ggpo", rewards, delta, beta=1e-3)
    inside = softmax([-delta[i] for i in range(k)])
    assert c[:k] == pytest.approx([(m * q - 1) / math.sqrt(m - 1) for q in inside], abs=1e-12)
    assert c[k:] == pytest.approx([-1 / math.sqrt(m - 1)] * (m - k), abs=1e-12)
    assert sum(c[:k]) == pytest.approx((m - k) / math.sqrt(m - 1), abs=1e-12)


def test_when_a_correct_response_is_pushed_down() -> None:
    """At beta -> 0 exactly when (m-1) e^{-Delta_i} < sum_{j in S, j != i} e^{-Delta_j}; never when it is alone."""
    m, seen = 6, {True: 0, False: 0}
    rng = random.Random(0)
    for _ in range(200):
        k = rng.randint(1, m - 1)
        delta = [rng.uniform(-4, 4) for _ in range(m)]
        c = weights("ggpo", [1.0] * k + [0.0] * (m - k), delta, beta=1e-3)
        for i in range(k):
            others = math.fsum(math.exp(-delta[j]) for j in range(k) if j != i)
            down = (m - 1) * math.exp(-delta[i]) < others
            assert (c[i] < 0) == down
            assert k > 1 or not down
            seen[down] += 1
    assert min(seen.values()) > 50


@pytest.mark.parametrize("name", ["ggpo", "ggpo_reward_only"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_equal_log_ratios_at_beta_to_zero_are_maxrl(name: str, k: int) -> None:
    m = 6
    rewards = [1.0] * k + [0.0] * (m - k)
    expected = [(m * r / k - 1) / math.sqrt(m - 1) for r in rewards]
    assert weights(name, rewards, [0.7] * m, beta=1e-3) == pytest.approx(expected, abs=1e-12)


def test_reward_only_needs_no_equal_log_ratios() -> None:
    chosen = objective("ggpo_reward_only", beta=1e-3)
    assert chosen.log_ratio is None
    assert not chosen.needs_reference
    case = random_case(8, groups=2, m=4, spread=2.0)
    inputs = replace(tensors(case), ref_logprobs=None)
    got = gradient(chosen.loss(inputs), inputs)
    for group in case.groups():
        k = sum(case.rewards[i] for i in group)
        for i in group:
            expected = -(4 * case.rewards[i] / k - 1) / math.sqrt(3) / case.tokens
            assert got[i, 0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_small_spread_is_half_the_variance_over_beta(beta: float) -> None:
    """J = Var_{ddof=0}(R) / (2 beta) + O(spread^3 / beta^2): the error shrinks eightfold when the spread halves."""
    shape = torch.tensor([[1.0, 0.1, 0.0, -0.3, 0.2]], dtype=torch.float64)
    errors = []
    for spread in (0.04 * beta, 0.02 * beta):
        rewards = spread * shape
        gap = beta * float(gibbs_gap(rewards, torch.zeros_like(rewards), beta))
        errors.append(gap - variance(rewards[0].tolist(), 0) / (2 * beta))
        # Third central moment over 6 beta^2 leads the error.
        third = mean([(r - mean(rewards[0].tolist())) ** 3 for r in rewards[0].tolist()])
        assert errors[-1] == pytest.approx(third / (6 * beta**2), rel=0.05)
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize("beta", [0.5, 4.0])
def test_small_spread_makes_ggpo_a_multiple_of_agro(m: int, beta: float) -> None:
    """c_i / a_i -> sqrt(m - 1) / (m beta)."""
    rng = random.Random(m)
    rewards, delta = [1e-7 * rng.random() for _ in range(m)], [1e-7 * rng.random() for _ in range(m)]
    c, a = weights("ggpo", rewards, delta, beta=beta), weights("agro", rewards, delta, beta=beta)
    for over, under in zip(c, a, strict=True):
        assert over / under == pytest.approx(math.sqrt(m - 1) / (m * beta), rel=1e-5)


@pytest.mark.parametrize("k", range(1, 8))
def test_sums_over_correct_and_over_all_responses(k: int) -> None:
    m = 8
    rewards = [1.0] * k + [0.0] * (m - k)
    a = weights("grpo", rewards, [0.0] * m)
    without_stabiliser = math.sqrt(k * (m - k) * (m - 1) / m)
    spread = math.sqrt(variance(rewards, 1))
    assert sum(a[:k]) == pytest.approx(without_stabiliser * spread / (spread + 1e-6), rel=1e-12)
    assert sum(weights("agro", rewards, [0.4] * m)[:k]) == pytest.approx(k * (m - k) / (m - 1), rel=1e-12)
    rng = random.Random(k)
    delta = [rng.uniform(-3, 3) for _ in range(m)]
    for name in PRESETS:
        assert sum(weights(name, rewards, delta)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_shifting_all_rewards_of_a_group_changes_nothing(name: str) -> None:
    case = random_case(9, groups=2, m=4)
    shifted = replace(case, rewards=[r + (4.0 if i < 4 else -2.0) for i, r in enumerate(case.rewards)])
    for left, right in zip(*(evaluated(name, each) for each in (case, shifted)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


def evaluated(name: str, case: Case) -> tuple[Tensor, Tensor]:
    inputs = tensors(case)
    output = objective(name).loss(inputs)
    return output.loss.detach(), gradient(output, inputs)


groups_of_numbers = st.integers(2, 8).flatmap(
    lambda m: st.tuples(
        st.lists(st.floats(-2, 2), min_size=m, max_size=m), st.lists(st.floats(-30, 30), min_size=m, max_size=m)
    )
)


@given(groups_of_numbers, st.sampled_from([0.05, 0.31, 2.0]))
def test_the_gap_is_the_divergence_of_uniform_from_the_tilt(
    group: tuple[list[float], list[float]], beta: float
) -> None:
    """J / beta = KL(uniform || q) >= 0, the same as the literal log-mean-exp."""
    rewards, delta = group
    m = len(rewards)
    got = float(gibbs_gap(*(torch.tensor([values], dtype=torch.float64) for values in group), beta))
    logits = [r / beta - d for r, d in zip(rewards, delta, strict=True)]
    top = max(logits)
    log_normaliser = top + math.log(math.fsum(math.exp(value - top) for value in logits))
    divergence = math.fsum((-math.log(m) - (value - log_normaliser)) / m for value in logits)
    assert got == pytest.approx(divergence, rel=1e-12, abs=1e-12)
    assert got == pytest.approx(group_gap([beta * value for value in logits], beta) / beta, rel=1e-9, abs=1e-11)
    assert got >= -1e-13


def test_the_gap_is_zero_exactly_where_adjusted_rewards_agree() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    agree = torch.tensor([[2.0, 0.0, 0.0], [2.1, 0.0, 0.0]], dtype=torch.float64)
    gaps = gibbs_gap(rewards, agree, 0.5)
    assert float(gaps[0]) == pytest.approx(0, abs=1e-15)
    assert float(gaps[1]) > 1e-4


def test_long_responses_do_not_overflow() -> None:
    """R / beta of thousands of nats: the log-sum-exp is the stable one."""
    rewards = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    delta = torch.tensor([[5000.0, -4000.0, 0.0]], dtype=torch.float64, requires_grad=True)
    gap = gibbs_gap(rewards, delta, 1e-4)
    # R / beta = 5000, 4000, 10000
    assert gap.item() == pytest.approx(10000 - LN3 - 19000 / 3, rel=1e-14)
    (slope,) = torch.autograd.grad(gap.sum(), delta)
    assert slope[0].tolist() == pytest.approx([1 / 3, 1 / 3, -2 / 3], abs=1e-15)


# --- token clipping, and what is reported -----------------------------------------------------------------------


def test_without_clipping_ggpo_clip_has_the_gradient_of_ggpo() -> None:
    case = random_case(12, groups=3, m=4)
    for beta in (0.01, 1.0):
        (_, clipped), (_, plain) = (
            evaluated_with(name, case, beta=beta, **extra)
            for name, extra in (("ggpo_clip", {"token_clip": math.inf}), ("ggpo", {}))
        )
        torch.testing.assert_close(clipped, plain, rtol=0, atol=1e-12)


def evaluated_with(name: str, case: Case, **changes: Any) -> tuple[Tensor, Tensor]:
    inputs = tensors(case)
    output = objective(name, **changes).loss(inputs)
    return output.loss.detach(), gradient(output, inputs)


def test_saturated_tokens_keep_their_score_gradient_and_are_counted() -> None:
    # Token log ratios to the reference: -0.04, -0.06 and 0, 0.2, 0.
    case = Case(
        m=2,
        rewards=[1.0, 0.0],
        current=[[-1.0, -1.0], [-1.0, -1.0, -1.0]],
        behaviour=[[-1.0, -1.0], [-1.0, -1.0, -1.0]],
        old=[[-1.0, -1.0], [-1.0, -1.0, -1.0]],
        ref=[[-0.96, -0.94], [-1.0, -1.2, -1.0]],
    )
    inputs, chosen = tensors(case), objective("ggpo_clip", beta=1.0)
    output = chosen.loss(inputs)
    # R_bar = 1 + 0.04 + 0.05, 0 - 0.05: c = 2 sigmoid(1.14) - 1 = tanh(0.57)
    c = math.tanh(0.57)
    got = gradient(output, inputs)
    assert got[0, :2].tolist() == pytest.approx([-c / 5] * 2, rel=1e-12)
    assert got[1, :3].tolist() == pytest.approx([c / 5] * 3, rel=1e-12)
    assert output.metrics["clip/token"].value() == pytest.approx(2 / 5)
    # GG Eq. 66, logged through the clipped log ratio.
    assert chosen.log_ratio is not None
    assert chosen.group_metrics is not None
    assert inputs.ref_logprobs is not None
    delta = chosen.log_ratio(inputs.logprobs.detach(), inputs.ref_logprobs, inputs.loss_mask)
    assert delta.tolist() == pytest.approx([-0.09, 0.05], abs=1e-15)
    raw = chosen.group_metrics(inputs.rewards.reshape(1, 2), delta.reshape(1, 2))["loss/raw"].value()
    assert raw == pytest.approx(math.log((math.exp(1.09) + math.exp(-0.05)) / 2) - 0.52, rel=1e-12)


def test_the_radius_itself_is_no_saturation() -> None:
    """A log ratio of 1/16, exact in binary, at a radius of 1/16."""
    case = Case(
        m=2,
        rewards=[1.0, 0.0],
        current=[[-1.0], [-1.0]],
        behaviour=[[-1.0], [-1.0]],
        old=[[-1.0], [-1.0]],
        ref=[[-1.0625], [-1.125]],
    )
    output = objective("ggpo_clip", beta=1.0, token_clip=0.0625).loss(tensors(case))
    assert output.metrics["clip/token"].value() == 1 / 2


def quantile(metric: object, q: float = 0.5) -> float:
    assert isinstance(metric, Histogram)
    value = metric.quantile(q)
    assert value is not None
    return value


def test_group_weight_metrics() -> None:
    """ESS 1/sum q^2 in [1, m], within-success ESS over groups with k >= 2, their share, and J."""
    metrics_of = objective("ggpo", beta=0.01).group_metrics
    assert metrics_of is not None
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    # In the first group e^{-Delta} = 3 and 1: q = 3/4, 1/4 on the correct ones, so 1/sum q^2 = 1.6, and 0.8 of k = 2.
    delta = torch.tensor([[-LN3, 0.0, 0.0, 0.0], [0.0] * 4], dtype=torch.float64)
    got = metrics_of(rewards, delta)
    assert quantile(got["group/within_success_ess"]) == pytest.approx(0.8, abs=1 / 64)
    assert quantile(got["group/weight_ess"], 0.25) == pytest.approx(1.0, abs=3 / 64)
    assert quantile(got["group/weight_ess"], 0.99) == pytest.approx(1.6, abs=3 / 64)
    assert got["group/within_success_ess_mean"].value() == pytest.approx(0.8, rel=1e-12)
    assert got["group/share_k2"].value() == 0.5
    # J / beta = log-mean-exp - mean: ln(4 / 4) + 100 - (200 + ln 3) / 4, and 100 - ln 4 - 25.
    assert got["loss/raw"].value() == pytest.approx(0.01 * ((50 - LN3 / 4) + (75 - LN4)) / 2, rel=1e-12)


def test_uniform_group_weights_are_the_upper_end_not_an_overflow() -> None:
    metrics_of = objective("ggpo", beta=1.0).group_metrics
    assert metrics_of is not None
    got = metrics_of(torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 4, dtype=torch.float64))
    for name in ("group/weight_ess", "group/within_success_ess"):
        metric = got[name]
        assert isinstance(metric, Histogram)
        assert metric.counts[-1] == 0
        assert metric.counts[-2] == 1


def test_a_group_without_a_success_has_no_successful_responses() -> None:
    """k counts correct responses: an all-wrong group (which a mask or `keep` lets through) has k = 0."""
    metrics_of = objective("ggpo", beta=0.1).group_metrics
    assert metrics_of is not None
    rewards = torch.tensor([[0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    got = metrics_of(rewards, torch.zeros(3, 4, dtype=torch.float64))
    assert got["group/share_k2"].value() == pytest.approx(1 / 3)
    within = got["group/within_success_ess"]
    assert isinstance(within, Histogram)
    assert sum(within.counts) == 1


# --- what the table says of each --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "reference", "old_policy", "block"),
    [
        ("grpo", {}, True, "none", None),
        ("grpo", {"beta": 0.0}, False, "none", None),
        ("grpo_rg", {}, True, "none", None),
        ("grpo_rg", {"clip_center": "pi_k"}, True, "minibatch", None),
        ("grpo_tis", {}, True, "block", 8),
        ("agro", {}, True, "none", None),
        ("ggpo", {}, True, "none", None),
        ("ggpo_clip", {}, True, "none", None),
        ("ggpo_reward_only", {}, False, "none", None),
    ],
)
def test_what_the_pipeline_must_provide(
    name: str, changes: dict[str, Any], reference: bool, old_policy: str, block: int | None
) -> None:
    chosen = objective(name, **changes)
    assert chosen.name == name
    assert (chosen.needs_reference, chosen.old_policy, chosen.block) == (reference, old_policy, block)
    # What it does not ask for, it does not read.
    inputs = tensors(random_case(1, groups=1, m=3))
    if not reference:
        inputs = replace(inputs, ref_logprobs=None)
    if old_policy == "none":
        inputs = replace(inputs, old_logprobs=None)
    assert torch.isfinite(chosen.loss(inputs).loss)


def test_presets_have_the_papers_numbers() -> None:
    numbers = {name: vars(preset(name)) for name in PRESETS}
    for name in ("grpo", "grpo_tis", "agro", "ggpo", "ggpo_clip", "ggpo_reward_only"):
        assert numbers[name]["beta"] == 0.01
        assert numbers[name]["zero_variance"] == "filter"
    assert numbers["grpo_rg"]["beta"] == 0.1
    assert numbers["grpo_rg"]["zero_variance"] == "mask"
    for name, dual in (("grpo", 10.0), ("grpo_tis", 10.0), ("grpo_rg", None)):
        assert (numbers[name]["eps_low"], numbers[name]["eps_high"], numbers[name]["dual_clip"]) == (0.2, 0.2, dual)
    assert (numbers["grpo_tis"]["tis_block"], numbers["grpo_tis"]["tis_cap"]) == (8, 2.0)
    assert numbers["ggpo_clip"]["token_clip"] == 0.05


def test_a_group_of_equal_rewards_has_advantage_exactly_zero() -> None:
    """Decided on the rewards: the mean of eight 0.1 is not 0.1, and a spread of 1e-17 must not be scaled up to 1."""
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((1, 7), 0.1, dtype=dtype)
        for rule in ("gg", "rg", "centred"):
            assert (group_advantages(rewards, rule) == 0).all()
