"""One minibatch, however it is cut: micro-batches, permutations, split and masked groups, and what the mask hides."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from objective_cases import PRESETS, Case, gradient, objective, random_case, response_weights, select, tensors
from torch import Tensor

from grpo_lab.metrics import merge
from grpo_lab.minibatches import Minibatch, make_minibatch
from grpo_lab.objectives import Objective
from grpo_lab.types import Group, LossInputs, LossOutput, Problem, Prompt, Rollout

GROUPS, M = 6, 4
AGGREGATIONS = ("token_mean", "sequence_mean", "constant_length")
# Every preset, and GRPO's options that change how a token weighs.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PRESETS),
    *(("grpo", {"aggregation": each, "beta": 0.5}) for each in AGGREGATIONS[1:]),
    ("grpo_rg", {"clip_center": "pi_k"}),
    ("agro", {"beta": 1.0}),
    ("ggpo", {"beta": 1.0}),
    ("ggpo_clip", {"beta": 1.0}),
]


def pieces(
    inputs: LossInputs, chosen: Objective, parts: Sequence[Sequence[int]], **changes: Any
) -> tuple[Tensor, Tensor]:
    """The summed loss and gradient of some micro-batches, each a list of rows."""
    outputs = [chosen.loss(select(inputs, part, **changes_of(changes, part))) for part in parts]
    total = torch.stack([output.loss.double() for output in outputs]).sum()
    (slope,) = torch.autograd.grad(total, inputs.logprobs)
    return total.detach(), slope


def changes_of(changes: dict[str, Any], part: Sequence[int]) -> dict[str, Any]:
    return {name: value[torch.tensor(part)] for name, value in changes.items()}


def rows_of(groups: Sequence[int]) -> list[int]:
    return [g * M + j for g in groups for j in range(M)]


def same(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
@pytest.mark.parametrize(
    "parts", [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[5], [4, 3], [2, 0, 1]], [[3, 1, 5, 0, 2, 4]]]
)
def test_any_split_into_whole_groups_and_any_order_of_groups(
    name: str, changes: dict[str, Any], parts: list[list[int]]
) -> None:
    inputs, chosen = tensors(random_case(1, groups=GROUPS, m=M)), objective(name, **changes)
    whole = pieces(inputs, chosen, [range(GROUPS * M)])
    assert whole[1].abs().max() > 1e-3
    same(pieces(inputs, chosen, [rows_of(groups) for groups in parts]), whole)


@pytest.mark.parametrize("name", PRESETS)
def test_any_order_of_the_responses_within_a_group(name: str) -> None:
    inputs, chosen = tensors(random_case(2, groups=GROUPS, m=M)), objective(name)
    rng = random.Random(0)
    order = [g * M + j for g in range(GROUPS) for j in rng.sample(range(M), M)]
    same(pieces(inputs, chosen, [order]), pieces(inputs, chosen, [range(GROUPS * M)]))


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_split_groups_with_weights_worked_out_beforehand(name: str, changes: dict[str, Any], seed: int) -> None:
    """Rows of any group anywhere: the gradient is that of whole groups, where GGPO's loss is differentiated itself."""
    inputs, chosen = tensors(random_case(3, groups=GROUPS, m=M)), objective(name, **changes)
    rows = list(range(GROUPS * M))
    rng = random.Random(seed)
    rng.shuffle(rows)
    cuts = [0, *sorted(rng.sample(range(1, GROUPS * M), 5)), GROUPS * M]
    parts = [rows[start:stop] for start, stop in pairwise(cuts)]
    split = pieces(inputs, chosen, parts, response_weights=response_weights(chosen, inputs))
    whole = pieces(inputs, chosen, [range(GROUPS * M)])
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=1e-12)
    if name != "ggpo":  # whose value is the gap where groups are whole
        torch.testing.assert_close(split[0], whole[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_metrics_merge_to_those_of_the_whole(name: str, changes: dict[str, Any]) -> None:
    inputs, chosen = tensors(random_case(4, groups=GROUPS, m=M)), objective(name, **changes)
    whole = chosen.loss(inputs).metrics
    merged = merge(chosen.loss(select(inputs, rows_of([g]))).metrics for g in range(GROUPS))
    assert merged.keys() == whole.keys()
    for key, metric in whole.items():
        assert merged[key].value() == pytest.approx(metric.value(), rel=1e-12)


def test_micro_batches_with_their_own_divisors_would_differ() -> None:
    """The fault that the given counts prevent: a mean of token means is not the token mean."""
    inputs, chosen = tensors(random_case(1, groups=GROUPS, m=M)), objective("grpo")
    parts = [rows_of([g]) for g in range(GROUPS)]
    own = []
    for part in parts:
        piece = select(inputs, part)
        counts = replace(inputs.counts, tokens=int(piece.loss_mask.sum()))
        own.append(chosen.loss(replace(piece, counts=counts)).loss / len(parts))
    assert abs((sum(own) - chosen.loss(inputs).loss).item()) > 1e-3


# --- zero-variance groups ---------------------------------------------------------------------------------------


def group(sequence: int, rewards: Sequence[float], lengths: Sequence[int]) -> Group:
    problem = Problem(id=str(sequence), question="q", gold="1")
    rollouts = tuple(
        Rollout(
            token_ids=np.arange(length, dtype=np.int32),
            behaviour_logprobs=np.full(length, -1.0, dtype=np.float32),
            finish_reason="stop",
            policy_version=0,
            text="",
        )
        for length in lengths
    )
    return Group(
        prompt=Prompt(problem=problem, text="q", token_ids=(1,)),
        rollouts=rollouts,
        rewards=tuple(rewards),
        verdicts=("correct",) * len(rewards),
        sequence=sequence,
    )


def masked_pair(divisor: str, *, mask: bool = True) -> tuple[LossInputs, Minibatch]:
    """A mixed group of 4 tokens and an all-correct one of 6, whose policies all differ."""
    minibatch = make_minibatch(
        0,
        [group(0, (1.0, 0.0), (1, 3)), group(1, (1.0, 1.0), (4, 2))],
        mask_zero_variance=mask,
        mask_divisor=divisor,
    )
    lengths = [len(rollout.token_ids) for each in minibatch.groups for rollout in each.rollouts]
    rng = random.Random(0)
    draw = [[[rng.uniform(-1.1, -0.9) for _ in range(n)] for n in lengths] for _ in range(4)]
    rewards = [r for each in minibatch.groups for r in each.rewards]
    case = Case(m=2, rewards=rewards, current=draw[0], behaviour=draw[1], ref=draw[2], old=draw[3])
    flags = torch.tensor([float(keep) for keep in minibatch.kept for _ in range(2)], dtype=torch.float64)
    return tensors(case, group_weights=flags, counts=minibatch.counts), minibatch


@pytest.mark.parametrize("name", PRESETS)
def test_a_masked_group_has_no_surrogate_no_kl_and_no_gradient(name: str) -> None:
    """RG Eq. 8: with `all` its tokens still count in T_tok = 10, with `kept` T_tok = 4."""
    chosen = objective(name)
    losses, slopes = {}, {}
    for divisor in ("all", "kept"):
        inputs, minibatch = masked_pair(divisor)
        assert minibatch.kept == (True, False)
        output = chosen.loss(inputs)
        losses[divisor], slopes[divisor] = output.loss.item(), gradient(output, inputs)
        assert (slopes[divisor][2:] == 0).all()
        assert (slopes[divisor][:2][inputs.loss_mask[:2]] != 0).all()
    inputs, minibatch = masked_pair("kept")
    alone = chosen.loss(select(inputs, [0, 1])).loss.item()
    assert losses["kept"] == pytest.approx(alone, rel=1e-12)
    assert losses["all"] == pytest.approx(alone * 4 / 10, rel=1e-12)
    torch.testing.assert_close(slopes["all"] * 10, slopes["kept"] * 4, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("aggregation", "share"), [("token_mean", 4 / 10), ("sequence_mean", 2 / 4), ("constant_length", 2 / 4)]
)
def test_the_divisor_of_each_aggregation_counts_masked_groups_alike(aggregation: str, share: float) -> None:
    chosen = objective("grpo_rg", aggregation=aggregation)
    of_all, of_kept = (chosen.loss(masked_pair(divisor)[0]).loss.item() for divisor in ("all", "kept"))
    assert of_all == pytest.approx(of_kept * share, rel=1e-12)


def test_without_the_mask_only_the_reference_acts_on_such_a_group() -> None:
    """`keep`: GRPO's advantage is 0 but the KL term pulls; AGRO and GGPO still level the log ratios."""
    for name in ("grpo_rg", "agro", "ggpo", "ggpo_clip"):
        inputs, minibatch = masked_pair("all", mask=False)
        assert minibatch.kept == (True, True)
        slope = gradient(objective(name).loss(inputs), inputs)
        assert (slope[2:][inputs.loss_mask[2:]] != 0).all()
    for name, changes in (("grpo_rg", {"beta": 0.0}), ("ggpo_reward_only", {})):
        inputs, _ = masked_pair("all", mask=False)
        assert (gradient(objective(name, **changes).loss(inputs), inputs)[2:] == 0).all()


def test_equal_rewards_are_told_from_the_rewards_not_from_their_spread() -> None:
    equal, nearly = group(0, [0.1] * 7, [1] * 7), group(1, [0.3] * 6 + [0.1 + 0.2], [1] * 7)
    assert np.std(equal.rewards) > 0
    minibatch = make_minibatch(0, [equal, nearly], mask_zero_variance=True, mask_divisor="kept")
    assert minibatch.kept == (False, True)
    assert (minibatch.counts.tokens, minibatch.counts.responses, minibatch.counts.groups) == (7, 7, 1)
    both = make_minibatch(0, [equal, nearly], mask_zero_variance=True, mask_divisor="all").counts
    assert (both.tokens, both.responses, both.groups) == (14, 14, 2)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_learn_from_is_a_differentiable_zero(name: str, aggregation: str) -> None:
    """Every group masked, with the divisors of `kept` 0 as well; and responses without a token."""
    changes = {"aggregation": aggregation} if name.startswith("grpo") else {}
    inputs = tensors(random_case(6, groups=2, m=3))
    nothing = replace(inputs.counts, tokens=0, responses=0, groups=0)
    masked = replace(inputs, group_weights=torch.zeros(6, dtype=torch.float64), counts=nothing)
    empty = replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask), counts=nothing)
    for each in (masked, empty):
        if each is empty and name == "ggpo":
            each = replace(each, rewards=torch.zeros(6, dtype=torch.float64))  # whose value the rewards alone make
        output = objective(name, **changes).loss(each)
        assert output.loss.item() == 0
        assert (gradient(output, each) == 0).all()


# --- NaN --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 1e30])
def test_what_the_mask_hides_stays_hidden(name: str, changes: dict[str, Any], fill: float) -> None:
    case, chosen = random_case(7, groups=2, m=M), objective(name, **changes)
    clean, dirty = tensors(case, fill=0.0), tensors(case, fill=fill)
    left, right = chosen.loss(clean), chosen.loss(dirty)
    assert left.loss.item() == right.loss.item()
    slope = gradient(right, dirty)
    assert torch.equal(slope, gradient(left, clean))
    assert (slope[~dirty.loss_mask] == 0).all()
    assert left.metrics == right.metrics


READ = {
    "grpo": ("logprobs", "behaviour_logprobs", "ref_logprobs"),
    "grpo_rg": ("logprobs", "behaviour_logprobs", "ref_logprobs"),
    "grpo_tis": ("logprobs", "behaviour_logprobs", "ref_logprobs", "old_logprobs"),
    "agro": ("logprobs", "ref_logprobs"),
    "ggpo": ("logprobs", "ref_logprobs"),
    "ggpo_clip": ("logprobs", "ref_logprobs"),
    "ggpo_reward_only": ("logprobs",),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in READ.items() for field in fields])
@pytest.mark.parametrize("equal_rewards", [False, True])
def test_a_nan_that_the_mask_does_not_hide_is_not_hidden(name: str, field: str, equal_rewards: bool) -> None:
    inputs = tensors(random_case(8, groups=1, m=M))
    spoilt = getattr(inputs, field).detach().clone()
    spoilt[2, 0] = math.nan
    changes: dict[str, Any] = {field: spoilt.requires_grad_(field == "logprobs")}
    if equal_rewards:
        changes["rewards"] = torch.ones(M, dtype=torch.float64)
    spoilt_inputs = replace(inputs, **changes)
    assert not math.isfinite(objective(name).loss(spoilt_inputs).loss.item())


def test_a_masked_nan_next_to_a_token() -> None:
    """Log-probs -1, -2, old ones -1, NaN, mask 1, 0, advantage 2: the loss is -2."""
    case = Case(m=1, rewards=[0.0], current=[[-1.0]], behaviour=[[-1.0]], ref=[[-1.0]], old=[[-1.0]])
    inputs = tensors(case, response_weights=torch.tensor([2.0], dtype=torch.float64))
    inputs = replace(inputs, logprobs=torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True))
    output = objective("grpo", beta=0.0).loss(inputs)
    assert output.loss.item() == -2.0
    assert gradient(output, inputs).tolist() == [[-2.0, 0.0]]


def test_losses_are_plain_scalars() -> None:
    for name in PRESETS:
        output: LossOutput = objective(name).loss(tensors(random_case(9, groups=1, m=2)))
        assert output.loss.shape == ()
        assert output.loss.requires_grad
