"""What every learner does alike: its rate, the loss of a micro-batch, scores, metrics, and naming what is bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_lab.config import LearnerConfig
from grpo_lab.learner import Scores
from grpo_lab.metrics import Mean, Metric, Sum
from grpo_lab.minibatches import Minibatch, PackedBatch, Row, padded, splits_groups
from grpo_lab.objectives import Objective
from grpo_lab.types import LossInputs, LossOutput

MODEL_FOLDER = "model"


def learning_rate(update: int, settings: LearnerConfig, updates: int | None) -> float:
    """The rate of update number `update` (from 0): linear warm-up, then constant or linear to zero at the budget.

    A function of the counter alone, so that a resumed run cannot jump.
    """
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    if settings.lr_schedule == "constant":
        return settings.lr
    assert updates is not None, "a linear schedule has a budget in updates"
    return settings.lr * (updates - update) / max(updates - settings.warmup_updates, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """What the loss of every micro-batch of one update reads.

    `reference` and `old` are None where they are the current policy's own scores: a fresh reference, or the first pass
    over a minibatch. `response_weights` [G, m] are given where groups had to be split, else None.
    """

    minibatch: Minibatch
    objective: Objective
    reference: Scores | None
    old: Scores | None
    response_weights: Tensor | None


def response_weights(
    minibatch: Minibatch,
    objective: Objective,
    rows: Sequence[Row],
    reference: Scores | None,
    score: Callable[[Minibatch], Scores],
) -> Tensor | None:
    """[G, m] weights from a first pass without gradient, where `rows` split groups; None where they are whole.

    A group that is split cannot weigh its responses against each other.
    """
    if not splits_groups(rows, minibatch):
        return None
    current = score(minibatch) if objective.log_ratio is not None else empty_scores(minibatch)
    rewards, log_ratio = _group_tensors(minibatch, objective, current, reference)
    return objective.response_weights(rewards, log_ratio)


def loss_of(given: Given, batch: PackedBatch, logprobs: Tensor) -> LossOutput:
    """The loss of one micro-batch whose responses have these `logprobs` [B, T], on their device."""
    minibatch, objective, device = given.minibatch, given.objective, logprobs.device
    groups, current = minibatch.groups, logprobs.detach()

    def scores_or_current(values: Scores | None) -> Tensor:
        if values is None:
            return current
        return padded([values[g][j] for g, j in batch.responses], batch.loss_mask).to(device)

    return objective.loss(
        LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=padded(
                [groups[g].rollouts[j].behaviour_logprobs for g, j in batch.responses], batch.loss_mask
            ).to(device),
            ref_logprobs=scores_or_current(given.reference) if objective.needs_reference else None,
            old_logprobs=scores_or_current(given.old) if objective.old_policy != "none" else None,
            loss_mask=batch.loss_mask.to(device),
            rewards=torch.tensor([groups[g].rewards[j] for g, j in batch.responses], device=device),
            group_weights=torch.tensor([float(minibatch.kept[g]) for g, _ in batch.responses], device=device),
            response_weights=None
            if given.response_weights is None
            else torch.stack([given.response_weights[g, j] for g, j in batch.responses]).to(device),
            group_size=minibatch.group_size,
            counts=minibatch.counts,
        )
    )


def metrics_of(output: LossOutput, entropies: Tensor, batch: PackedBatch) -> dict[str, Metric]:
    """What one micro-batch reports. Its loss is already its share of the minibatch's, so the parts add up."""
    entropy = Mean(float(entropies.double().sum()), int(batch.loss_mask.sum()))
    return {**output.metrics, "loss": Sum(float(output.loss.detach())), "entropy": entropy}


def group_metrics(
    minibatch: Minibatch, objective: Objective, scores: Scores, reference: Scores | None
) -> dict[str, Metric]:
    """What is reported of whole groups, from scores before the update."""
    metrics: dict[str, Metric] = {}
    if objective.needs_reference:
        pairs = zip(flat(scores), flat(reference or scores), strict=True)
        ratios = [float(np.sum(current.astype(np.float64) - ref)) for current, ref in pairs]
        metrics["reference/log_ratio"] = Mean(sum(ratios), len(ratios))
    if objective.group_metrics is not None:
        metrics |= objective.group_metrics(*_group_tensors(minibatch, objective, scores, reference))
    return metrics


def _group_tensors(
    minibatch: Minibatch, objective: Objective, scores: Scores, reference: Scores | None
) -> tuple[Tensor, Tensor]:
    """Rewards and log ratios of whole groups, [G, m] float64, from scores."""
    rewards = torch.tensor([group.rewards for group in minibatch.groups], dtype=torch.float64)
    if objective.log_ratio is None:
        return rewards, torch.zeros_like(rewards)
    lengths = torch.tensor([len(values) for values in flat(scores)])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    current, ref = padded(flat(scores), mask), padded(flat(reference or scores), mask)
    return rewards, objective.log_ratio(current, ref, mask).reshape(rewards.shape)


# --- scores -----------------------------------------------------------------------------------------------------


def empty_scores(minibatch: Minibatch) -> Scores:
    """Zeros of the shape of a minibatch's scores."""
    return [
        [np.zeros(len(rollout.token_ids), dtype=np.float32) for rollout in group.rollouts] for group in minibatch.groups
    ]


def flat(scores: Scores) -> list[np.ndarray]:
    return [values for group in scores for values in group]


def scatter(scores: Scores, batch: PackedBatch, logprobs: Tensor) -> None:
    """Put the log-probs [B, T] of a micro-batch in their places."""
    host = logprobs.float().cpu().numpy()
    for row, (g, j) in enumerate(batch.responses):
        scores[g][j] = host[row, : len(scores[g][j])].copy()


# --- names for errors -------------------------------------------------------------------------------------------


def name_bad_response(minibatch: Minibatch, batch: PackedBatch, logprobs: Tensor) -> str:
    """The first response of a micro-batch with a log-prob that is not finite, else its prompts."""
    groups = minibatch.groups
    for row, (g, j) in enumerate(batch.responses):
        rollout = groups[g].rollouts[j]
        scored = logprobs[row][batch.loss_mask[row].to(logprobs.device)]
        if not (bool(torch.isfinite(scored).all()) and bool(np.isfinite(rollout.behaviour_logprobs).all())):
            return f"response {j} to prompt {groups[g].prompt.id} of minibatch {minibatch.index}"
    prompts = ", ".join(sorted({groups[g].prompt.id for g, _ in batch.responses}))
    return f"minibatch {minibatch.index}, whose log-probs are finite (prompts {prompts})"


def name_row(minibatch: Minibatch, row: Row) -> str:
    return f"prompt {minibatch.groups[row.group].prompt.id} of minibatch {minibatch.index}"


def name_whole(minibatch: Minibatch) -> str:
    return f"minibatch {minibatch.index} as a whole (each row alone is finite)"
