"""The embedded learner: one process, plain torch. Parameters, gradients and optimizer state are float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_lab.config import LearnerConfig
from grpo_lab.learner import NonFiniteError, Scores, StepResult
from grpo_lab.metrics import Mean, Metric, Sum, merge
from grpo_lab.minibatches import (
    Minibatch,
    PackedBatch,
    Row,
    micro_batches,
    pack,
    padded,
    padding_share,
    plan_rows,
    splits_groups,
)
from grpo_lab.objectives import Objective
from grpo_lab.policy import AUTOCAST, Policy, load_model, load_tokenizer
from grpo_lab.types import LossInputs

MODEL_FOLDER = "model"
STATE_FILE = "learner.pt"


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


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a minibatch is cut, and the per-response weights where groups had to be split ([G, m], else None)."""

    batches: list[list[Row]]
    response_weights: Tensor | None


class TorchLearner:
    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        settings: LearnerConfig,
        temperature: float,
        needs_reference: bool,
        updates: int | None,
    ) -> None:
        self.settings = settings
        self.updates = updates
        self.tokenizer = tokenizer
        autocast = AUTOCAST[settings.precision]
        self.policy = Policy(model, temperature=temperature, logit_chunk=settings.logit_chunk, autocast=autocast)
        self.reference: Policy | None = None
        if needs_reference:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self.reference = Policy(
                frozen, temperature=temperature, logit_chunk=settings.logit_chunk, autocast=autocast
            )
        self.reference_is_current = True
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
        )
        self.device = next(model.parameters()).device

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        settings: LearnerConfig,
        temperature: float,
        device: str,
        needs_reference: bool,
        updates: int | None,
        revision: str | None = None,
    ) -> TorchLearner:
        return cls(
            load_model(folder, revision=revision).to(device),
            load_tokenizer(folder, revision=revision),
            settings=settings,
            temperature=temperature,
            needs_reference=needs_reference,
            updates=updates,
        )

    # --- scoring ---

    def logprobs(self, minibatch: Minibatch) -> Scores:
        return self._score(self.policy, minibatch)

    def reference_logprobs(self, minibatch: Minibatch) -> Scores | None:
        if self.reference is None or self.reference_is_current:
            return None
        return self._score(self.reference, minibatch)

    def _score(self, policy: Policy, minibatch: Minibatch) -> Scores:
        scores = _empty_scores(minibatch)
        with torch.no_grad():
            for rows in self._cut(minibatch):
                batch = pack(minibatch, rows)
                logprobs, _ = policy.logprobs(batch)
                _scatter(scores, batch, logprobs)
        return scores

    def _cut(self, minibatch: Minibatch) -> list[list[Row]]:
        budget = self.settings.micro_batch_tokens
        rows = plan_rows(minibatch, budget=budget, whole_groups=self.policy.whole_groups)
        return micro_batches(rows, budget=budget)

    # --- learning ---

    def step(
        self, minibatch: Minibatch, objective: Objective, *, update: int, reference: Scores | None, old: Scores | None
    ) -> StepResult:
        plan = self._plan(minibatch, objective, reference)
        scores = _empty_scores(minibatch)
        parts: list[dict[str, Metric]] = []
        self.optimizer.zero_grad(set_to_none=True)
        for rows in plan.batches:
            parts.append(self._micro_batch(minibatch, rows, plan, objective, reference, old, scores))
        metrics = merge(parts)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.settings.grad_clip)
        if not torch.isfinite(norm):
            sample = self._find_bad_gradient(minibatch, plan, objective, reference, old)
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"the gradient of update {update} is not finite", sample=sample)
        rate = learning_rate(update, self.settings, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.reference_is_current = False
        metrics |= {
            "grad_norm": Mean(float(norm), 1),
            "lr": Mean(rate, 1),
            "learn/padding": Mean(padding_share(plan.batches), 1),
        }
        return StepResult(
            logprobs=scores, metrics=metrics | self._group_metrics(minibatch, objective, scores, reference)
        )

    def _plan(self, minibatch: Minibatch, objective: Objective, reference: Scores | None) -> _Plan:
        batches = self._cut(minibatch)
        if not splits_groups([row for batch in batches for row in batch], minibatch):
            return _Plan(batches, None)
        # A group that is split cannot weigh its responses against each other: a first pass, without gradient, does.
        current = self.logprobs(minibatch) if objective.log_ratio is not None else _empty_scores(minibatch)
        rewards, log_ratio = _group_tensors(minibatch, objective, current, reference)
        return _Plan(batches, objective.response_weights(rewards, log_ratio))

    def _micro_batch(
        self,
        minibatch: Minibatch,
        rows: Sequence[Row],
        plan: _Plan,
        objective: Objective,
        reference: Scores | None,
        old: Scores | None,
        scores: Scores,
    ) -> dict[str, Metric]:
        """Forward and backward of one micro-batch; gradients add up in the parameters."""
        batch = pack(minibatch, rows)
        logprobs, entropies = self.policy.logprobs(batch)
        mask = batch.loss_mask.to(self.device)
        current = logprobs.detach()
        _scatter(scores, batch, current)

        def given(values: Scores | None) -> Tensor:
            # None stands for the current policy: a fresh reference, or the first pass over a minibatch.
            if values is None:
                return current
            return padded([values[g][j] for g, j in batch.responses], batch.loss_mask).to(self.device)

        groups = minibatch.groups
        output = objective.loss(
            LossInputs(
                logprobs=logprobs,
                behaviour_logprobs=padded(
                    [groups[g].rollouts[j].behaviour_logprobs for g, j in batch.responses], batch.loss_mask
                ).to(self.device),
                ref_logprobs=given(reference) if objective.needs_reference else None,
                old_logprobs=given(old) if objective.old_policy != "none" else None,
                loss_mask=mask,
                rewards=torch.tensor([groups[g].rewards[j] for g, j in batch.responses], device=self.device),
                group_weights=torch.tensor([float(minibatch.kept[g]) for g, _ in batch.responses], device=self.device),
                response_weights=None
                if plan.response_weights is None
                else torch.stack([plan.response_weights[g, j] for g, j in batch.responses]).to(self.device),
                group_size=minibatch.group_size,
                counts=minibatch.counts,
            )
        )
        if not torch.isfinite(output.loss):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError("the loss is not finite", sample=_name_bad_response(minibatch, batch, current, mask))
        output.loss.backward()
        entropy = Mean(float(entropies.double().sum()), int(mask.sum()))
        # The loss is already this micro-batch's share of the minibatch's, so the parts add up.
        return {**output.metrics, "loss": Sum(float(output.loss.detach())), "entropy": entropy}

    def _find_bad_gradient(
        self, minibatch: Minibatch, plan: _Plan, objective: Objective, reference: Scores | None, old: Scores | None
    ) -> str:
        """Repeat the backward pass row by row until one row's gradient is not finite."""
        for row in (row for batch in plan.batches for row in batch):
            self.optimizer.zero_grad(set_to_none=True)
            self._micro_batch(minibatch, [row], plan, objective, reference, old, _empty_scores(minibatch))
            gradients = (p.grad for p in self.policy.model.parameters() if p.grad is not None)
            if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
                return f"prompt {minibatch.groups[row.group].prompt.id} of minibatch {minibatch.index}"
        return f"minibatch {minibatch.index} as a whole (each row alone is finite)"

    def _group_metrics(
        self, minibatch: Minibatch, objective: Objective, scores: Scores, reference: Scores | None
    ) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        if objective.needs_reference:
            pairs = zip(_flat(scores), _flat(reference or scores), strict=True)
            ratios = [float(np.sum(current.astype(np.float64) - ref)) for current, ref in pairs]
            metrics["reference/log_ratio"] = Mean(sum(ratios), len(ratios))
        if objective.group_metrics is not None:
            metrics |= objective.group_metrics(*_group_tensors(minibatch, objective, scores, reference))
        return metrics

    # --- weights and state ---

    def refresh_reference(self) -> None:
        if self.reference is None:
            return
        with torch.no_grad():
            pairs = zip(self.reference.model.parameters(), self.policy.model.parameters(), strict=True)
            for old, new in pairs:
                old.copy_(new)
        self.reference_is_current = True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach()

    def save(self, folder: Path) -> None:
        self.policy.model.save_pretrained(folder / MODEL_FOLDER)
        self.tokenizer.save_pretrained(folder / MODEL_FOLDER)
        state = {
            "optimizer": self.optimizer.state_dict(),
            "reference": None if self.reference is None else self.reference.model.state_dict(),
            "reference_is_current": self.reference_is_current,
        }
        torch.save(state, folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        saved = load_model(folder / MODEL_FOLDER).state_dict()
        self.policy.model.load_state_dict(saved)
        state = torch.load(folder / STATE_FILE, map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None:
            self.reference.model.load_state_dict(state["reference"])
        self.reference_is_current = state["reference_is_current"]


def _empty_scores(minibatch: Minibatch) -> Scores:
    return [
        [np.zeros(len(rollout.token_ids), dtype=np.float32) for rollout in group.rollouts] for group in minibatch.groups
    ]


def _flat(scores: Scores) -> list[np.ndarray]:
    return [values for group in scores for values in group]


def _scatter(scores: Scores, batch: PackedBatch, logprobs: Tensor) -> None:
    host = logprobs.float().cpu().numpy()
    for row, (g, j) in enumerate(batch.responses):
        scores[g][j] = host[row, : len(scores[g][j])].copy()


def _group_tensors(
    minibatch: Minibatch, objective: Objective, scores: Scores, reference: Scores | None
) -> tuple[Tensor, Tensor]:
    """Rewards and log ratios of whole groups, [G, m] float64, from scores."""
    rewards = torch.tensor([group.rewards for group in minibatch.groups], dtype=torch.float64)
    if objective.log_ratio is None:
        return rewards, torch.zeros_like(rewards)
    lengths = torch.tensor([len(values) for values in _flat(scores)])
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    current, ref = padded(_flat(scores), mask), padded(_flat(reference or scores), mask)
    return rewards, objective.log_ratio(current, ref, mask).reshape(rewards.shape)


def _name_bad_response(minibatch: Minibatch, batch: PackedBatch, logprobs: Tensor, mask: Tensor) -> str:
    groups = minibatch.groups
    for row, (g, j) in enumerate(batch.responses):
        rollout = groups[g].rollouts[j]
        finite = bool(torch.isfinite(logprobs[row][mask[row]]).all()) and bool(
            np.isfinite(rollout.behaviour_logprobs).all()
        )
        if not finite:
            return f"response {j} to prompt {groups[g].prompt.id} of minibatch {minibatch.index}"
    prompts = ", ".join(sorted({groups[g].prompt.id for g, _ in batch.responses}))
    return f"minibatch {minibatch.index}, whose log-probs are finite (prompts {prompts})"
