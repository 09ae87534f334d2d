"""The embedded learner: one update is the same however the minibatch is cut, and the reference, the optimizer, the
saved state and the errors are what they say."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    EOS,
    PRESETS,
    UNEVEN,
    composed,
    learner_settings,
    make_group,
    make_learner,
    minibatch_of,
    plain_logprobs,
    preset,
    random_groups,
    save_model,
    tiny_model,
)
from torch import Tensor

from grpo_lab.config import ConfigError
from grpo_lab.distributed import World
from grpo_lab.learner import NonFiniteError, build_learner
from grpo_lab.learner.torch_local import TorchLearner, learning_rate
from grpo_lab.logprobs import masked_sum
from grpo_lab.metrics import Mean, Metric, scalars
from grpo_lab.minibatches import Minibatch, plan_rows
from grpo_lab.objectives import Objective, build_objective
from grpo_lab.types import Group, LossInputs, LossOutput

TEMPERATURE = 0.7
LR = 1e-4
# The groups below have rows of 20, 21 and 15 positions: all in one micro-batch; one group each; two groups cut in
# rows; rows of one or two responses; of one.
BUDGETS = (1000, 21, 17, 8, 1)


def near_policy_groups() -> list[Group]:
    """Groups whose behaviour log-probs lie around the initial model's, by 0.3 nats: some tokens are clipped, most are
    not. The last group has equal rewards."""
    model, rng = tiny_model("qwen3"), np.random.default_rng(1)
    rewards = ((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0))
    groups = []
    for group, reward in zip(random_groups(UNEVEN, seed=3), rewards, strict=True):
        with torch.no_grad():
            scores = plain_logprobs(model, group, TEMPERATURE)
        groups.append(
            make_group(
                group.prompt.id,
                group.prompt.token_ids,
                [rollout.token_ids.tolist() for rollout in group.rollouts],
                behaviour=[(score.numpy() + rng.normal(0, 0.3, len(score))).tolist() for score in scores],
                rewards=reward,
            )
        )
    return groups


GROUPS = near_policy_groups()


def learner_for(objective: Objective, **settings: Any) -> TorchLearner:
    return make_learner(
        tiny_model("qwen3"),
        temperature=TEMPERATURE,
        needs_reference=objective.needs_reference,
        **({"lr": LR, "grad_clip": math.inf} | settings),
    )


@cache
def train(name: str, budget: int, order: tuple[int, ...] = (0, 1, 2)) -> tuple[TorchLearner, list[dict[str, Metric]]]:
    """Four updates: two under the first reference, a refresh, one under a fresh reference and one under an old one.

    Kept for all tests, which must not change what they get.
    """
    objective = preset(name)
    minibatch = minibatch_of([GROUPS[k] for k in order], mask=name == "grpo_rg")
    learner = learner_for(objective, micro_batch_tokens=budget)
    old = learner.logprobs(minibatch) if objective.old_policy == "block" else None
    reported = []
    for update in range(4):
        if update == 2:
            learner.refresh_reference()
        reference = learner.reference_logprobs(minibatch) if objective.needs_reference else None
        assert (reference is None) == (update in (0, 2) or not objective.needs_reference)
        reported.append(learner.step(minibatch, objective, update=update, reference=reference, old=old).metrics)
    return learner, reported


def parameters(learner: TorchLearner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.policy.model.parameters()]


def first_moments(learner: TorchLearner) -> list[Tensor]:
    return [learner.optimizer.state[p]["exp_avg"].clone() for p in learner.policy.model.parameters()]


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_same_training(ours: TorchLearner, theirs: TorchLearner) -> None:
    """Equal within float32 rounding.

    AdamW's first moments are linear in the gradients of all updates: 1e-5 of the largest, for sums of a few dozen
    float32 terms in another order, carried through four updates. Its steps are gradients over their own size, which
    for an element whose gradient is itself rounding (near its eps of 1e-8) is a random share of lr: hence 2 % of lr for
    the worst of 17,000 parameters, and 2e-4 of it at root mean square.
    """
    for a, b in zip(first_moments(ours), first_moments(theirs), strict=True):
        largest = max(float(moment.abs().max()) for moment in first_moments(theirs))
        assert float((a - b).abs().max()) < 1e-5 * largest
    difference = torch.cat([(a - b).flatten() for a, b in zip(parameters(ours), parameters(theirs), strict=True)])
    assert float(difference.abs().max()) < LR / 50
    assert float(difference.square().mean().sqrt()) < 2e-4 * LR


# --- one update, however it is cut ------------------------------------------------------------------------------


def test_the_budgets_cut_as_they_say() -> None:
    minibatch = minibatch_of(GROUPS)
    assert [len(plan_rows(minibatch, budget=budget)) for budget in BUDGETS] == [3, 3, 5, 10, 12]


@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches_do_not_change_the_update(name: str) -> None:
    whole, whole_metrics = train(name, BUDGETS[0])
    # Learning has taken place, by far more than the tolerance.
    start = torch.cat([p.detach().flatten() for p in tiny_model("qwen3").parameters()])
    assert float((torch.cat([p.flatten() for p in parameters(whole)]) - start).abs().max()) > 2 * LR
    for budget in BUDGETS[1:]:
        cut, metrics = train(name, budget)
        assert_same_training(cut, whole)
        for ours, theirs in zip(metrics, whole_metrics, strict=True):
            row, expected = scalars(ours), scalars(theirs)
            assert row.keys() == expected.keys()
            # How much is padding depends on the cut, of course. GGPO's loss of split groups is another function with
            # the same gradient, as its docstring says; `loss/raw` reports the gap in either case.
            left_out = {"learn/padding"} | ({"loss"} if name == "ggpo" and budget < 21 else set())
            for key in row.keys() - left_out:
                # Sums over a response of differences of log-probs, each rounded by some 1e-6 nats.
                assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), (budget, key)


@pytest.mark.parametrize("name", ["grpo", "agro", "ggpo"])
def test_the_order_of_groups_does_not_matter(name: str) -> None:
    for budget in (1000, 8):
        assert_same_training(train(name, budget, order=(2, 0, 1))[0], train(name, budget)[0])


def test_rows_of_one_for_sliding_windows() -> None:
    objective, minibatch = preset("ggpo"), minibatch_of(GROUPS)
    before = [tiny_model("mistral").state_dict()[name] for name in ("lm_head.weight", "model.norm.weight")]
    results = []
    for budget in (1000, 1):
        learner = make_learner(tiny_model("mistral"), temperature=TEMPERATURE, lr=LR, micro_batch_tokens=budget)
        learner.step(minibatch, objective, update=0, reference=None, old=None)
        results.append(learner)
    assert_same_training(*results)
    assert not same_bits([dict(results[0].weights())[name] for name in ("lm_head.weight", "model.norm.weight")], before)


# --- a hand-fed gradient ----------------------------------------------------------------------------------------


def mean_logprob_objective(scale: float = 1.0) -> Objective:
    """-scale x the mean log-prob of all tokens: plain maximum likelihood, whose gradient is easily had otherwise."""

    def loss(inputs: LossInputs) -> LossOutput:
        total = masked_sum(inputs.logprobs, inputs.loss_mask).sum()
        return LossOutput(loss=-scale * total / inputs.counts.tokens, metrics={})

    return Objective(
        name="likelihood",
        loss=loss,
        response_weights=lambda rewards, log_ratio: torch.zeros_like(rewards),
        needs_reference=False,
    )


def plain_gradient(model: Any, minibatch: Minibatch, scale: float = 1.0) -> float:
    """Fill the model's gradients with those of the same loss, in the plain form. Returns their norm."""
    scores = [score for group in minibatch.groups for score in plain_logprobs(model, group, TEMPERATURE)]
    (-scale * torch.cat(scores).mean()).backward()
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))


@pytest.mark.parametrize("budget", [1000, 8])
def test_an_update_is_adamw_on_the_clipped_gradient(budget: int) -> None:
    minibatch, twin = minibatch_of(GROUPS), tiny_model("qwen3")
    norm = plain_gradient(twin, minibatch)
    clip, lr, decay = norm / 3, 1e-3, 0.1
    learner = learner_for(
        mean_logprob_objective(), lr=lr, weight_decay=decay, grad_clip=clip, micro_batch_tokens=budget
    )
    before = parameters(learner)
    result = learner.step(minibatch, mean_logprob_objective(), update=0, reference=None, old=None)
    # The norm is reported as it was before clipping.
    assert result.metrics["grad_norm"].value() == pytest.approx(norm, rel=1e-5)
    for start, parameter, plain in zip(before, learner.policy.model.parameters(), twin.parameters(), strict=True):
        gradient = plain.grad.double() * (clip / norm)
        state = learner.optimizer.state[parameter]
        torch.testing.assert_close(state["exp_avg"].double(), 0.1 * gradient, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(state["exp_avg_sq"].double(), 0.001 * gradient**2, rtol=1e-4, atol=1e-12)
        # At the first step both moments, corrected for their start at 0, are those of this gradient alone.
        moment, square = state["exp_avg"].double() / 0.1, state["exp_avg_sq"].double() / 0.001
        expected = start.double() * (1 - lr * decay) - lr * moment / (square.sqrt() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-6, atol=1e-8)


def test_several_updates_equal_torchs_adamw() -> None:
    minibatch, twin = minibatch_of(GROUPS), tiny_model("qwen3")
    objective = mean_logprob_objective()
    learner = learner_for(objective, lr=0.01, betas=[0.8, 0.95], weight_decay=0.1, grad_clip=1.0)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for update in range(3):
        learner.step(minibatch, objective, update=update, reference=None, old=None)
        optimizer.zero_grad()
        norm = plain_gradient(twin, minibatch)
        for parameter in twin.parameters():
            parameter.grad *= min(1.0, 1.0 / norm)
        optimizer.step()
    for ours, theirs in zip(learner.policy.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01 / 20)
        torch.testing.assert_close(
            learner.optimizer.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(("scale", "clipped"), [(1e-3, False), (1.0, True)])
def test_only_large_gradients_are_clipped(scale: float, clipped: bool) -> None:
    minibatch = minibatch_of(GROUPS)
    objective = mean_logprob_objective(scale)
    free, bound = learner_for(objective, grad_clip=math.inf), learner_for(objective, grad_clip=0.5)
    norms = []
    for learner in (free, bound):
        result = learner.step(minibatch, objective, update=0, reference=None, old=None)
        norms.append(result.metrics["grad_norm"].value())
    assert norms[0] == norms[1]
    assert (norms[0] > 0.5) == clipped
    # After one update the first moment is a tenth of the gradient.
    length = 10 * math.sqrt(sum(float(moment.square().sum()) for moment in first_moments(bound)))
    assert length == pytest.approx(0.5 if clipped else norms[0], rel=1e-4)
    assert same_bits(first_moments(free), first_moments(bound)) != clipped


# --- the learning rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "linear", "constant"),
    [
        (0, 2e-6, 2e-6),
        (6, 1.4e-5, 1.4e-5),
        (24, 5e-5, 5e-5),
        (25, 5e-5, 5e-5),
        (26, 5e-5 * 224 / 225, 5e-5),
        (160, 2e-5, 5e-5),
        (249, 5e-5 / 225, 5e-5),
        (250, 0.0, 5e-5),
    ],
)
def test_warm_up_then_constant_or_linear_to_zero(update: int, linear: float, constant: float) -> None:
    for shape, expected in (("linear", linear), ("constant", constant)):
        settings = learner_settings(lr=5e-5, warmup_updates=25, lr_schedule=shape)
        assert learning_rate(update, settings, 250) == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_the_first_update_has_the_full_rate() -> None:
    assert learning_rate(0, learner_settings(lr=5e-5), None) == 5e-5
    assert learning_rate(0, learner_settings(lr=5e-5, lr_schedule="linear"), 10) == 5e-5


def test_the_rate_counts_updates_and_not_micro_batches() -> None:
    objective, minibatch = preset("ggpo_reward_only"), minibatch_of(GROUPS)
    learner = make_learner(
        tiny_model("qwen3"), lr=0.01, warmup_updates=4, lr_schedule="linear", updates=8, micro_batch_tokens=1
    )
    for update, rate in enumerate([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.0075]):
        metrics = learner.step(minibatch, objective, update=update, reference=None, old=None).metrics
        assert metrics["lr"].value() == pytest.approx(rate)
        assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_rate_of_zero_changes_no_parameter() -> None:
    learner = learner_for(preset("grpo"), lr=0.0, weight_decay=0.1)
    before = parameters(learner)
    for update in range(2):
        reference = learner.reference_logprobs(minibatch_of(GROUPS))
        learner.step(minibatch_of(GROUPS), preset("grpo"), update=update, reference=reference, old=None)
    assert same_bits(parameters(learner), before)
    assert max(float(moment.abs().max()) for moment in first_moments(learner)) > 0


# --- scores and the reference -----------------------------------------------------------------------------------


def assert_scores(scores: Any, model: Any, groups: list[Group]) -> None:
    with torch.no_grad():
        for group, row in zip(groups, scores, strict=True):
            for ours, theirs in zip(row, plain_logprobs(model, group, TEMPERATURE), strict=True):
                assert ours.dtype == np.float32
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", BUDGETS)
def test_scores_are_the_plain_forms_and_a_step_reports_those_before_it(budget: int) -> None:
    objective, minibatch = preset("grpo"), minibatch_of(GROUPS)
    learner = learner_for(objective, micro_batch_tokens=budget)
    before = learner.logprobs(minibatch)
    assert_scores(before, tiny_model("qwen3"), GROUPS)
    result = learner.step(minibatch, objective, update=0, reference=None, old=None)
    assert_scores(result.logprobs, tiny_model("qwen3"), GROUPS)
    assert_scores(learner.logprobs(minibatch), learner.policy.model, GROUPS)
    moved = [np.abs(a - b).max() for a, b in zip(learner.logprobs(minibatch)[0], before[0], strict=True)]
    assert max(moved) > 1e-3


def test_the_reference_is_frozen_until_it_is_refreshed() -> None:
    objective, minibatch = preset("agro"), minibatch_of(GROUPS)
    learner = learner_for(objective)
    assert learner.reference_logprobs(minibatch) is None
    for update in range(2):
        reference = learner.reference_logprobs(minibatch)
        learner.step(minibatch, objective, update=update, reference=reference, old=None)
        assert_scores(learner.reference_logprobs(minibatch), tiny_model("qwen3"), GROUPS)
    refreshed_to = copy.deepcopy(learner.policy.model)
    learner.refresh_reference()
    assert learner.reference_logprobs(minibatch) is None
    learner.step(minibatch, objective, update=2, reference=None, old=None)
    scores = learner.reference_logprobs(minibatch)
    assert_scores(scores, refreshed_to, GROUPS)
    # It is a copy: the last step moved the policy and left it behind.
    assert np.abs(scores[0][1] - learner.logprobs(minibatch)[0][1]).max() > 1e-3
    assert all(not parameter.requires_grad for parameter in learner.reference.model.parameters())


def test_none_stands_for_the_current_policy() -> None:
    minibatch = minibatch_of(GROUPS)
    for name in ("grpo", "agro", "ggpo", "ggpo_clip", "grpo_tis"):
        objective = preset(name)
        implied, explicit = learner_for(objective), learner_for(objective)
        scores = explicit.logprobs(minibatch)
        implied.step(minibatch, objective, update=0, reference=None, old=None)
        explicit.step(minibatch, objective, update=0, reference=scores, old=scores)
        assert_same_training(explicit, implied)


def shift_changes_the_gradient(objective: Objective, changed: str) -> bool:
    """Whether it matters that the reference, or the old policy, is not the current one."""
    learners = [learner_for(objective) for _ in range(2)]
    scores = learners[0].logprobs(minibatch_of(GROUPS))
    # Not by a constant, which would cancel within a group of equal lengths.
    other = [[values - 0.1 * (j + 1) for j, values in enumerate(row)] for row in scores]
    for learner, given in zip(learners, (None, other), strict=True):
        earlier = {"reference": None, "old": None, changed: given}
        learner.step(minibatch_of(GROUPS), objective, update=0, **earlier)
    first, second = first_moments(learners[0]), first_moments(learners[1])
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) > 1e-4


@pytest.mark.parametrize("name", PRESETS)
def test_the_reference_given_is_used_where_one_is_needed(name: str) -> None:
    assert shift_changes_the_gradient(preset(name), "reference") == (name != "ggpo_reward_only")


@pytest.mark.parametrize("name", PRESETS)
def test_the_old_scores_given_are_used_under_tis(name: str) -> None:
    assert shift_changes_the_gradient(preset(name), "old") == (name == "grpo_tis")


def test_the_old_scores_given_are_used_as_the_clips_center() -> None:
    config = composed("objective=grpo", "objective.clip_center=pi_k", "objective.dual_clip=null")
    assert shift_changes_the_gradient(build_objective(config.objective, max_response_tokens=32), "old")


@pytest.mark.parametrize("masked", [True, False])
def test_a_masked_group_counts_and_carries_no_gradient(masked: bool) -> None:
    # Two groups of equal rewards and lengths and different tokens; the KL term would pull on either.
    objective = preset("grpo_rg")
    others = random_groups([UNEVEN[2]], seed=8)
    results = []
    for last in (GROUPS[2], replace(others[0], rewards=(1.0,) * 4)):
        minibatch = minibatch_of([*GROUPS[:2], last], mask=masked)
        learner = learner_for(objective)
        reference = [[scores - 0.5 for scores in row] for row in learner.logprobs(minibatch)]
        learner.step(minibatch, objective, update=0, reference=reference, old=None)
        results.append(first_moments(learner))
    difference = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    assert difference < 1e-7 if masked else difference > 1e-3


def test_no_reference_where_none_is_needed() -> None:
    learner = learner_for(preset("ggpo_reward_only"))
    learner.step(minibatch_of(GROUPS), preset("ggpo_reward_only"), update=0, reference=None, old=None)
    learner.refresh_reference()
    assert learner.reference is None
    assert learner.reference_logprobs(minibatch_of(GROUPS)) is None


# --- metrics ----------------------------------------------------------------------------------------------------


def test_padding_is_the_share_of_positions() -> None:
    """56 of 57: rows of the three groups in one pass."""
    _, reported = train("grpo", 1000)
    assert reported[0]["learn/padding"].value() == pytest.approx(1 - 56 / 57)


def test_what_another_engine_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"was not saved by learner.engine=torch_local: set learner.engine to"):
        learner_for(preset("grpo")).load(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_metrics_of_an_update(name: str) -> None:
    _, reported = train(name, 1000)
    expected = {"loss", "grad_norm", "lr", "entropy", "learn/padding"}
    if name != "ggpo_reward_only":
        expected |= {"reference/log_ratio"}
    if name.startswith("grpo"):
        expected |= {"clip/low", "clip/high", "clip/dual", "kl/reference", "kl/clamped"}
    if name == "grpo_tis":
        expected |= {"tis/weight", "tis/capped"}
    if name.startswith("ggpo"):
        expected |= {
            "group/weight_ess",
            "group/within_success_ess",
            "group/within_success_ess_mean",
            "group/share_k2",
            "loss/raw",
        }
    if name == "ggpo_clip":
        expected |= {"clip/token"}
    for row in reported:
        assert row.keys() == expected


@pytest.mark.parametrize("budget", [1000, 8])
def test_loss_entropy_and_log_ratio_equal_the_plain_form(budget: int) -> None:
    minibatch, model = minibatch_of(GROUPS), tiny_model("qwen3")
    # The likelihood objective, made to ask for a reference that is 0.1 nats a token lower than the policy.
    objective = replace(mean_logprob_objective(), needs_reference=True)
    learner = learner_for(objective, micro_batch_tokens=budget)
    reference = [[scores - np.float32(0.1) for scores in row] for row in learner.logprobs(minibatch)]
    metrics = learner.step(minibatch, objective, update=0, reference=reference, old=None).metrics
    scores, entropies = [], []
    with torch.no_grad():
        for group in GROUPS:
            scores += plain_logprobs(model, group, TEMPERATURE)
            for rollout in group.rollouts:
                ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids.tolist()]])
                logits = model(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1]
                entropies.append(torch.distributions.Categorical(logits=logits / TEMPERATURE).entropy())
    assert metrics["loss"].value() == pytest.approx(-float(torch.cat(scores).mean()), rel=1e-5)
    assert metrics["entropy"].value() == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)
    # 53 tokens in 12 responses.
    assert metrics["reference/log_ratio"].value() == pytest.approx(0.1 * 53 / 12, rel=1e-4)
    assert metrics["entropy"].count == 53
    assert metrics["lr"] == Mean(LR, 1)


# --- state ------------------------------------------------------------------------------------------------------


def optimizer_tensors(learner: TorchLearner) -> list[Tensor]:
    states = [learner.optimizer.state[p] for p in learner.policy.model.parameters()]
    return [state[key].clone() for state in states for key in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("refreshed", [False, True])
def test_a_saved_learner_goes_on_bit_for_bit(refreshed: bool, tmp_path: Path) -> None:
    objective, minibatch = preset("ggpo"), minibatch_of(GROUPS)
    learner = learner_for(objective)
    for update in range(2):
        reference = learner.reference_logprobs(minibatch)
        learner.step(minibatch, objective, update=update, reference=reference, old=None)
    if refreshed:
        learner.refresh_reference()
    learner.save(tmp_path)
    # Other weights to begin with, so that all it holds afterwards comes from the folder.
    other = make_learner(
        tiny_model("qwen3", seed=5), temperature=TEMPERATURE, needs_reference=True, lr=LR, grad_clip=math.inf
    )
    other.load(tmp_path)
    assert same_bits(parameters(other), parameters(learner))
    assert same_bits(optimizer_tensors(other), optimizer_tensors(learner))
    assert same_bits(list(other.reference.model.parameters()), list(learner.reference.model.parameters()))
    for each in (learner, other):
        reference = each.reference_logprobs(minibatch)
        assert (reference is None) == refreshed
        each.step(minibatch, objective, update=2, reference=reference, old=None)
    assert same_bits(parameters(other), parameters(learner))
    assert same_bits(optimizer_tensors(other), optimizer_tensors(learner))


def test_the_saved_model_is_a_hugging_face_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = learner_for(preset("ggpo_reward_only"))
    learner.step(minibatch_of(GROUPS), preset("ggpo_reward_only"), update=0, reference=None, old=None)
    learner.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.arange(2, 15)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, learner.policy.model(input_ids=ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("1+2=")["input_ids"] == [3, 12, 4, 13]
    assert tokenizer.eos_token_id == EOS


def test_a_model_with_sampling_values_in_its_folder_can_be_saved(tmp_path: Path) -> None:
    # transformers reads such a file and refuses to write it: `temperature` is set and `do_sample` is not.
    folder = save_model(tiny_model("qwen3"), tmp_path / "initial")
    values = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "temperature": 0.7, "eos_token_id": [EOS, 5]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    learner = TorchLearner.from_folder(
        folder, settings=learner_settings(), temperature=1.0, device="cpu", needs_reference=False, updates=None
    )
    learner.save(tmp_path)
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [EOS, 5]


def test_weights_go_by_all_their_names() -> None:
    learner = learner_for(preset("grpo"))
    names = [name for name, _ in learner.weights()]
    # The output matrix is the input matrix; an engine that packs them apart must be given both.
    assert names == [*(name for name, _ in tiny_model("qwen3").named_parameters()), "lm_head.weight"]
    assert not any(tensor.requires_grad for _, tensor in learner.weights())


def test_a_learner_is_built_from_a_configuration(model_folder: Path) -> None:
    config = composed("objective=agro", "rollout.temperature=0.7", "learner.lr=0.25", "learner.micro_batch_tokens=99")
    learner = build_learner(config, str(model_folder), World(), needs_reference=True, updates=10)
    assert_scores(learner.logprobs(minibatch_of(GROUPS)), tiny_model("qwen3"), GROUPS)
    assert (learner.settings.lr, learner.settings.micro_batch_tokens, learner.updates) == (0.25, 99, 10)
    assert learner.reference is not None


def test_bf16_keeps_parameters_and_optimizer_in_float32() -> None:
    minibatch, objective = minibatch_of(GROUPS), mean_logprob_objective()
    rows = {}
    for precision in ("fp32", "bf16"):
        # Weights of the usual size: the wide ones of the other tests are too much for the 8 bits of bfloat16.
        learner = make_learner(tiny_model("qwen3", initializer_range=0.05), precision=precision)
        rows[precision] = scalars(learner.step(minibatch, objective, update=0, reference=None, old=None).metrics)
        assert {p.dtype for p in learner.policy.model.parameters()} == {torch.float32}
        assert {moment.dtype for moment in first_moments(learner)} == {torch.float32}
    assert rows["bf16"]["loss"] == pytest.approx(rows["fp32"]["loss"], rel=1e-2)
    assert rows["bf16"]["grad_norm"] == pytest.approx(rows["fp32"]["grad_norm"], rel=3e-2)
    assert rows["bf16"]["loss"] != rows["fp32"]["loss"]


# --- numbers that are not finite --------------------------------------------------------------------------------


def assert_nothing_changed(learner: TorchLearner, twin: TorchLearner) -> None:
    """The learner that met the bad minibatch and one that did not go on alike."""
    assert same_bits(parameters(learner), parameters(twin))
    assert same_bits(optimizer_tensors(learner), optimizer_tensors(twin))
    for each in (learner, twin):
        each.step(minibatch_of(GROUPS), mean_logprob_objective(), update=1, reference=None, old=None)
    assert same_bits(parameters(learner), parameters(twin))


@pytest.mark.parametrize("budget", [1000, 21, 8])
def test_a_loss_that_is_no_number_names_the_response(budget: int) -> None:
    learner, twin = (learner_for(preset("grpo"), micro_batch_tokens=budget) for _ in range(2))
    for each in (learner, twin):
        each.step(minibatch_of(GROUPS), preset("grpo"), update=0, reference=None, old=None)
    groups = copy.deepcopy(GROUPS)
    groups[0].rollouts[3].behaviour_logprobs[2] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        learner.step(minibatch_of(groups, index=4), preset("grpo"), update=1, reference=None, old=None)
    assert caught.value.sample == "response 3 to prompt p0 of minibatch 4"
    assert str(caught.value) == ("the loss is not finite at response 3 to prompt p0 of minibatch 4; no update was made")
    assert_nothing_changed(learner, twin)


def test_a_loss_from_infinite_rewards_names_the_prompts() -> None:
    learner = learner_for(preset("agro"), micro_batch_tokens=21)
    groups = [*GROUPS[:2], replace(GROUPS[2], rewards=(math.inf, 0.0, 0.0, 0.0))]
    with pytest.raises(NonFiniteError, match=r"whose log-probs are finite \(prompts p2\)"):
        learner.step(minibatch_of(groups), preset("agro"), update=0, reference=None, old=None)


def overflowing_model() -> Any:
    """Hidden states near 1e15 and an output matrix near 1e-15: ordinary logits, and a gradient of the matrix that is
    1e15 times the usual."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1e15)
        model.lm_head.weight.mul_(1e-15)
    return model


@pytest.mark.parametrize("budget", [1000, 8])
def test_a_gradient_that_overflows_names_the_prompt(budget: int) -> None:
    learner, twin = (
        make_learner(overflowing_model(), temperature=TEMPERATURE, lr=LR, micro_batch_tokens=budget) for _ in range(2)
    )
    for each in (learner, twin):
        each.step(minibatch_of(GROUPS), preset("agro"), update=0, reference=None, old=None)
    # float32 holds the loss, near 1e26, and not its gradient, above 1e39. p2 has the shortest rows: they come last.
    groups = [*GROUPS[:2], replace(GROUPS[2], rewards=(1e26, 0.0, 0.0, 1e26))]
    with pytest.raises(NonFiniteError) as caught:
        learner.step(minibatch_of(groups, index=7), preset("agro"), update=1, reference=None, old=None)
    assert caught.value.sample == "prompt p2 of minibatch 7"
    assert str(caught.value).startswith("the gradient of update 1 is not finite at prompt p2")
    assert_nothing_changed(learner, twin)


def test_a_norm_that_overflows_while_each_row_is_finite() -> None:
    learner = make_learner(overflowing_model(), temperature=TEMPERATURE, lr=LR)
    before = parameters(learner)
    # Gradients near 1e15 x 1e8: each is a number, the sum of their squares is none.
    groups = [*GROUPS[:2], replace(GROUPS[2], rewards=(1e8, 0.0, 0.0, 1e8))]
    with pytest.raises(NonFiniteError, match="as a whole"):
        learner.step(minibatch_of(groups), preset("agro"), update=0, reference=None, old=None)
    assert same_bits(parameters(learner), before)
