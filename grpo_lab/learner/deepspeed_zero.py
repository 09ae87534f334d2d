"""The learner on DeepSpeed: data-parallel ranks at ZeRO stage 0 to 3, the same update as the embedded learner's.

All ranks are given the same minibatch, make the same plan, run their share of its rows, and end with the same result.
Gradients of ranks are sums in another order than one process's, so that parameters agree within float32 rounding.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_lab.config import LearnerConfig
from grpo_lab.distributed import World
from grpo_lab.learner import NonFiniteError, Scores, StepResult, gathering, zero_state
from grpo_lab.learner.dealing import Deal, deal
from grpo_lab.learner.passes import (
    Given,
    empty_scores,
    flat,
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
from grpo_lab.learner.zero_engine import (
    ZeroEngine,
    compute_dtype,
    frozen_engine,
    import_deepspeed,
    loss_factor,
    poison,
    shard,
)
from grpo_lab.metrics import Mean, Metric, merge
from grpo_lab.minibatches import Minibatch, Row, pack, plan_rows
from grpo_lab.objectives import Objective
from grpo_lab.policy import AUTOCAST, Policy, checkpoint_activations, load_model, load_tokenizer


class DeepSpeedLearner:
    """See the module.

    The reference is sharded as the learner is at stage 3; below, where the policy itself is whole on every rank, so is
    the reference: sharding a model without gradients and optimizer is what stage 3 alone can do.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        tokenizer: Any,
        *,
        settings: LearnerConfig,
        device: str,
        updates: int | None,
        world: World,
    ) -> None:
        self.settings = settings
        self.updates = updates
        self.tokenizer = tokenizer
        self.world = world
        self.policy = policy
        self.reference = reference
        self.zero = ZeroEngine(policy, settings, device=device)
        self._score_reference = None if reference is None else frozen_engine(reference, settings, device=device)
        self.reference_is_current = True

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
        world: World,
        revision: str | None = None,
    ) -> DeepSpeedLearner:
        """The learner at the weights in `folder`, once `distributed.join` has brought the ranks together.

        Raises:
            ConfigError: DeepSpeed is not installed, or no model can be loaded.
        """
        import_deepspeed(device)
        if (index := torch.device(device).index) is not None:
            # By this DeepSpeed chooses the GPU.
            os.environ["LOCAL_RANK"] = str(index)
        dtype = compute_dtype(settings)
        model = load_model(folder, revision=revision, dtype=dtype)
        for parameter in model.parameters():
            # Those too that transformers would have kept wider: an engine knows one type.
            parameter.data = parameter.data.to(dtype)
        frozen = copy.deepcopy(model).requires_grad_(False) if needs_reference else None
        for each in (model, frozen):
            if each is not None:
                shard(each, settings, device=device)
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        # Parameters that are BF16 already need no autocast.
        autocast = AUTOCAST[settings.precision] if dtype == torch.float32 else None

        def policy(of: Any) -> Policy:
            return Policy(of, temperature=temperature, logit_chunk=settings.logit_chunk, autocast=autocast)

        return cls(
            policy(model),
            None if frozen is None else policy(frozen),
            load_tokenizer(folder, revision=revision),
            settings=settings,
            device=device,
            updates=updates,
            world=world,
        )

    # --- scoring ---

    def logprobs(self, minibatch: Minibatch) -> Scores:
        return self._score(self.zero.engine, minibatch)

    def reference_logprobs(self, minibatch: Minibatch) -> Scores | None:
        if self._score_reference is None or self.reference_is_current:
            return None
        return self._score(self._score_reference, minibatch)

    def _score(self, scorer: Any, minibatch: Minibatch) -> Scores:
        """Scores by `scorer`, an engine or a policy: what it is called with is the same."""
        dealt = self._deal(self._rows(minibatch))
        scores = empty_scores(minibatch)
        with torch.no_grad():
            for rows in dealt.of(self.world.rank):
                batch = pack(minibatch, rows or [dealt.filler])
                logprobs, _ = scorer(batch=batch)
                if rows is not None:
                    scatter(scores, batch, logprobs)
        return self._complete(scores)

    def _rows(self, minibatch: Minibatch) -> list[Row]:
        budget = self.settings.micro_batch_tokens
        return plan_rows(minibatch, budget=budget, whole_groups=self.policy.whole_groups)

    def _deal(self, rows: Sequence[Row]) -> Deal:
        return deal(rows, ranks=self.world.size, budget=self.settings.micro_batch_tokens)

    def _complete(self, scores: Scores) -> Scores:
        """Every rank's share put together: exact, since each entry is one rank's and 0 on the others."""
        lengths = [len(values) for values in flat(scores)]
        total = self.world.sum(np.concatenate(flat(scores)))
        pieces = iter(np.split(total, np.cumsum(lengths)[:-1]))
        return [[next(pieces) for _ in group] for group in scores]

    # --- learning ---

    def step(
        self, minibatch: Minibatch, objective: Objective, *, update: int, reference: Scores | None, old: Scores | None
    ) -> StepResult:
        rows = self._rows(minibatch)
        given = Given(
            minibatch=minibatch,
            objective=objective,
            reference=reference,
            old=old,
            response_weights=response_weights(minibatch, objective, rows, reference, self.logprobs),
        )
        dealt = self._deal(rows)
        scores = empty_scores(minibatch)
        parts: list[dict[str, Metric]] = []
        bad: str | None = None
        for own in dealt.of(self.world.rank):
            fault = self._pass(given, own, dealt.filler, scores, parts)
            bad = bad or fault
        rate = learning_rate(update, self.settings, self.updates)
        norm = self.zero.apply_update(rate)
        if norm is None:
            raise self._refusal(given, rows, update, bad)
        self.reference_is_current = False
        scores = self._complete(scores)
        metrics = merge(part for rank in self.world.gather(parts) for part in rank)
        metrics |= {
            "grad_norm": Mean(norm, 1),
            "lr": Mean(rate, 1),
            "learn/padding": Mean(dealt.padding_share, 1),
        }
        return StepResult(logprobs=scores, metrics=metrics | group_metrics(minibatch, objective, scores, reference))

    def _pass(
        self, given: Given, rows: Sequence[Row] | None, filler: Row, scores: Scores, parts: list[dict[str, Metric]]
    ) -> str | None:
        """Forward and backward of one micro-batch, or of `filler` with no weight. Returns what is bad in it.

        A loss that is no number goes backward all the same, since other ranks wait for this one in the pass.
        """
        batch = pack(given.minibatch, rows or [filler])
        logprobs, entropies = self.zero.engine(batch=batch)
        if rows is None:
            self.zero.engine.backward(logprobs.sum() * 0.0)
            return None
        scatter(scores, batch, logprobs.detach())
        output = loss_of(given, batch, logprobs)
        parts.append(metrics_of(output, entropies, batch))
        if not torch.isfinite(output.loss):
            self.zero.engine.backward(poison(logprobs))
            return name_bad_response(given.minibatch, batch, logprobs.detach())
        self.zero.engine.backward(output.loss * loss_factor(self.settings, self.world.size))
        return None

    def _refusal(self, given: Given, rows: Sequence[Row], update: int, bad: str | None) -> NonFiniteError:
        """The error of an update that the engine refused: the same on every rank."""
        losses = [name for name in self.world.gather(bad) if name is not None]
        if losses:
            return NonFiniteError("the loss is not finite", sample=losses[0])
        sample = self._find_bad_gradient(given, rows)
        return NonFiniteError(f"the gradient of update {update} is not finite", sample=sample)

    def _find_bad_gradient(self, given: Given, rows: Sequence[Row]) -> str:
        """Repeat the passes row by row, and look at the gradients as they come, before ranks' are summed."""
        dealt = deal(rows, ranks=self.world.size, budget=1)
        finite: list[Tensor] = []
        handles = [
            parameter.register_hook(lambda gradient: finite.append(torch.isfinite(gradient).all()))
            for parameter in self.policy.parameters()
        ]
        bad: str | None = None
        for own in dealt.of(self.world.rank):
            finite.clear()
            self._pass(given, own, dealt.filler, empty_scores(given.minibatch), [])
            if own is not None and not all(finite):
                bad = bad or name_row(given.minibatch, own[0])
        for handle in handles:
            handle.remove()
        logprobs, _ = self.zero.engine(batch=pack(given.minibatch, [dealt.filler]))
        self.zero.engine.backward(poison(logprobs))
        assert self.zero.apply_update(0.0) is None, "a gradient that is no number was applied"
        found = [name for name in self.world.gather(bad) if name is not None]
        return found[0] if found else name_whole(given.minibatch)

    # --- weights and state ---

    def refresh_reference(self) -> None:
        if self.reference is None:
            return
        gathering.copy_parameters(self.policy.model, self.reference.model)
        self.reference_is_current = True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gathering.weights(self.policy.model)

    def save(self, folder: Path) -> None:
        zero_state.save(
            folder,
            engine=self.zero.engine,
            model=self.policy.model,
            tokenizer=self.tokenizer,
            reference=None if self.reference is None or self.reference_is_current else self.reference.model,
            settings=self.settings,
            world=self.world,
        )

    def load(self, folder: Path) -> None:
        self.reference_is_current = zero_state.load(
            folder,
            engine=self.zero.engine,
            policy=self.policy.model,
            reference=None if self.reference is None else self.reference.model,
            settings=self.settings,
            world=self.world,
        )
