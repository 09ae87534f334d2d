"""The embedded learner: one process, plain torch. Parameters, gradients and optimizer state are float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from grpo_lab.config import ConfigError, LearnerConfig
from grpo_lab.learner import NonFiniteError, Scores, StepResult
from grpo_lab.learner.passes import (
    MODEL_FOLDER,
    Given,
    empty_scores,
    group_metrics,
    learning_rate,
    loss_of,
    metrics_of,
    name_bad_response,
    name_row,
    name_whole,
    response_weights,
    scatter,
)
from grpo_lab.metrics import Mean, Metric, merge
from grpo_lab.minibatches import Minibatch, Row, micro_batches, pack, padding_share, plan_rows
from grpo_lab.objectives import Objective
from grpo_lab.policy import AUTOCAST, Policy, checkpoint_activations, load_model, load_tokenizer

STATE_FILE = "learner.pt"


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
        self.reference: Policy | None = None
        if needs_reference:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self.reference = Policy(
                frozen, temperature=temperature, logit_chunk=settings.logit_chunk, autocast=autocast
            )
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        self.policy = Policy(model, temperature=temperature, logit_chunk=settings.logit_chunk, autocast=autocast)
        self.reference_is_current = True
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
            # One pass over each parameter and its state instead of ten.
            fused=True,
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
        scores = empty_scores(minibatch)
        with torch.no_grad():
            for rows in self._cut(minibatch):
                batch = pack(minibatch, rows)
                logprobs, _ = policy.logprobs(batch)
                scatter(scores, batch, logprobs)
        return scores

    def _cut(self, minibatch: Minibatch) -> list[list[Row]]:
        budget = self.settings.micro_batch_tokens
        rows = plan_rows(minibatch, budget=budget, whole_groups=self.policy.whole_groups)
        return micro_batches(rows, budget=budget)

    # --- learning ---

    def step(
        self, minibatch: Minibatch, objective: Objective, *, update: int, reference: Scores | None, old: Scores | None
    ) -> StepResult:
        batches = self._cut(minibatch)
        rows = [row for batch in batches for row in batch]
        given = Given(
            minibatch=minibatch,
            objective=objective,
            reference=reference,
            old=old,
            response_weights=response_weights(minibatch, objective, rows, reference, self.logprobs),
        )
        scores = empty_scores(minibatch)
        self.optimizer.zero_grad(set_to_none=True)
        metrics = merge([self._micro_batch(given, batch, scores) for batch in batches])
        parameters = list(self.policy.model.parameters())
        norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
        if not torch.isfinite(norm):
            sample = self._find_bad_gradient(given, rows)
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"the gradient of update {update} is not finite", sample=sample)
        if norm > self.settings.grad_clip:
            clip_grads_with_norm_(parameters, self.settings.grad_clip, norm)
        rate = learning_rate(update, self.settings, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.reference_is_current = False
        metrics |= {
            "grad_norm": Mean(float(norm), 1),
            "lr": Mean(rate, 1),
            "learn/padding": Mean(padding_share(batches), 1),
        }
        return StepResult(logprobs=scores, metrics=metrics | group_metrics(minibatch, objective, scores, reference))

    def _micro_batch(self, given: Given, rows: Sequence[Row], scores: Scores) -> dict[str, Metric]:
        """Forward and backward of one micro-batch; gradients add up in the parameters."""
        batch = pack(given.minibatch, rows)
        logprobs, entropies = self.policy.logprobs(batch)
        scatter(scores, batch, logprobs.detach())
        output = loss_of(given, batch, logprobs)
        if not torch.isfinite(output.loss):
            self.optimizer.zero_grad(set_to_none=True)
            sample = name_bad_response(given.minibatch, batch, logprobs.detach())
            raise NonFiniteError("the loss is not finite", sample=sample)
        output.loss.backward()
        return metrics_of(output, entropies, batch)

    def _find_bad_gradient(self, given: Given, rows: Sequence[Row]) -> str:
        """Repeat the backward pass row by row until one row's gradient is not finite."""
        for row in rows:
            self.optimizer.zero_grad(set_to_none=True)
            self._micro_batch(given, [row], empty_scores(given.minibatch))
            gradients = (p.grad for p in self.policy.model.parameters() if p.grad is not None)
            if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
                return name_row(given.minibatch, row)
        return name_whole(given.minibatch)

    # --- weights and state ---

    def refresh_reference(self) -> None:
        if self.reference is None:
            return
        with torch.no_grad():
            pairs = zip(self.reference.model.parameters(), self.policy.model.parameters(), strict=True)
            for frozen, new in pairs:
                frozen.copy_(new)
        self.reference_is_current = True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.policy.model.named_parameters(remove_duplicate=False):
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
        if not (folder / STATE_FILE).is_file():
            raise ConfigError(
                f"{folder} was not saved by learner.engine=torch_local: set learner.engine to the one that saved it"
            )
        saved = load_model(folder / MODEL_FOLDER).state_dict()
        self.policy.model.load_state_dict(saved)
        state = torch.load(folder / STATE_FILE, map_location=self.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.reference is not None:
            self.reference.model.load_state_dict(state["reference"])
        self.reference_is_current = state["reference_is_current"]
