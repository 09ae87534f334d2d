"""The training loop, as GG's Algorithm 1 writes it, over parts that are built elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_lab import checkpoint, diagnostics, metrics
from grpo_lab.ahead import Ahead
from grpo_lab.atomic import write_atomically
from grpo_lab.collect import Collection, CollectionError, Exhausted, GroupSource, probe, retained_metrics
from grpo_lab.config import TrainConfig
from grpo_lab.distributed import World
from grpo_lab.evaluation.scoring import evaluate, evaluation_sampling, per_problem, scores, training_sampling
from grpo_lab.hand_off import HandOff
from grpo_lab.learner import Learner, NonFiniteError, Scores, StepResult
from grpo_lab.metrics import Metric
from grpo_lab.minibatches import Minibatch, make_minibatch
from grpo_lab.objectives import Objective
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine
from grpo_lab.rollout.spread import SpreadEngine
from grpo_lab.runstate import RunState, gathered_from_state, gathered_to_state
from grpo_lab.schedule import Schedule
from grpo_lab.sync import PROOF_RESPONSES, hand_over, prove_by_scoring
from grpo_lab.tracking import QuietTracker, Tracker
from grpo_lab.tracking.rollouts import Decode
from grpo_lab.types import Prompt
from grpo_lab.weights import Weights, copied

# Groups that a sample of rollouts shows.
SAMPLE_GROUPS = 4
FAILED_BATCH = "failed_minibatch.pt"
EVALUATIONS = "evaluations"


@dataclass(frozen=True, kw_only=True)
class Leading:
    """What only the leading rank has: the source of groups, now and ahead, what judges, the held-out prompts, and how
    tokens are read."""

    source: GroupSource
    ahead: Ahead
    verifier: Verifier
    test_prompts: Sequence[Prompt]
    decode: Decode


@dataclass(kw_only=True)
class Loop:
    """One run, as every rank of it runs it. `state` is where it stands; everything else is fixed while it runs.

    The leading rank alone collects, judges and writes; `leading` is None on the others.
    """

    config: TrainConfig
    run_dir: Path
    world: World
    schedule: Schedule
    objective: Objective
    learner: Learner
    engine: RolloutEngine
    # Work that samples, done by the leading rank: by itself, or with the others' help.
    lead_sampling: Callable[[Callable[[], Any]], Any]
    leading: Leading | None
    # What becomes of saved checkpoints, where they are evaluated meanwhile: on the leading rank.
    hand_off: HandOff | None
    tracker: Tracker | QuietTracker
    state: RunState

    def run(self) -> None:
        """Train until the budget is used up."""
        schedule, state, tracker, learner = self.schedule, self.state, self.tracker, self.learner
        self._lead_hand_off(lambda hand_off: hand_off.resume(state.update))
        if state.update == 0 and schedule.evaluate(0):
            self._evaluate()
        while not (state.finished or schedule.finished(state.update)):
            row: dict[str, float] = {}
            ahead = self._take_ahead()
            if schedule.sync(state.update):
                with tracker.phase("sync"):
                    row |= self._sync(ahead)
            if schedule.collect(state.update):
                gathered, proof = self._collect(ahead)
                row |= proof
                if isinstance(gathered, Exhausted):
                    self._finish_epochs(gathered)
                    break
                row |= self._begin_collection(gathered)
            with tracker.phase("learn"):
                minibatch = self._minibatch(schedule.minibatch(state.update))
                old = self._old_logprobs(minibatch)
                reference = self._reference_logprobs(minibatch)
                result = self._step(minibatch, reference, old)
            if self.leading is not None:
                row |= self._diagnose(minibatch, result)
            state.update += 1
            if schedule.refresh(state.update, epoch_completed=state.epoch_completed):
                with tracker.phase("learn"):
                    learner.refresh_reference()
                state.reference_scores = None
            if self.leading is not None:
                self._log(self.leading, row, minibatch, result)
            if schedule.evaluate(state.update):
                self._evaluate()
            if schedule.save(state.update):
                self._save()
        self._lead_hand_off(HandOff.finish)

    # --- the steps of the algorithm ---

    def _take_ahead(self) -> Collection | Exhausted | None:
        """The collection that was sampled beside the last one's updates; None where none was."""
        if not (self.schedule.overlap and self.schedule.collect(self.state.update)):
            return None
        with self.tracker.phase("collect"):
            taken = self.world.lead(lambda: self._leading.ahead.take())
        if taken is None:
            return None
        self.tracker.sampled_beside(taken.seconds)
        return taken.result

    def _sync(self, ahead: Collection | Exhausted | None) -> dict[str, float]:
        """Hand the weights over. Where the coming updates' collection is there already, the proof has none to wait for,
        and samples a little of its own."""
        update, weights = self.state.update, self.learner.weights()
        self.state.behaviour_weights = None
        if self.leading is not None and self.schedule.displaces_engine(update):
            self.state.behaviour_weights = {}
            weights = copied(weights, self.state.behaviour_weights)
        digest = hand_over(self.engine, weights, version=update)
        self.tracker.note(f"sync: version {update}, weights {digest or 'not read back'}")
        if not isinstance(ahead, Collection):
            return {}
        prompts = [group.prompt for group in ahead.groups[:PROOF_RESPONSES]]
        sampling, seed = training_sampling(self.config), self.config.seed
        probes = self.lead_sampling(lambda: probe(self.engine, prompts, sampling=sampling, seed=seed, update=update))
        return {"sync/drift": prove_by_scoring(self.learner, self.engine, probes)}

    def _collect(self, ahead: Collection | Exhausted | None) -> tuple[Collection | Exhausted, dict[str, float]]:
        """The collection that is there already, else one by the engine's present weights, with what the proof of their
        sync found, where it is due."""
        if ahead is not None:
            return ahead, {}
        with self.tracker.phase("collect"):
            gathered: Collection | Exhausted = self.lead_sampling(lambda: self._leading.source.collect(self._wanted))
            if isinstance(gathered, Exhausted) or not self.schedule.sync(self.state.update):
                return gathered, {}
            drift = prove_by_scoring(self.learner, self.engine, gathered.groups)
        return gathered, {"sync/drift": drift}

    @property
    def _wanted(self) -> int:
        """Groups of a collection."""
        return self.schedule.minibatches_per_collection * self.config.groups_per_minibatch

    def _begin_collection(self, collection: Collection) -> dict[str, float]:
        """Make it the one that is consumed, and begin with the next where it is sampled meanwhile."""
        state = self.state
        state.groups, state.epoch_completed = collection.groups, collection.epoch_completed
        state.totals = collection.totals
        if self.leading is not None and self.schedule.collects_ahead(state.update):
            self.leading.ahead.start(self._wanted)
        return collection.accounting | collection.totals

    def _minibatch(self, index: int) -> Minibatch:
        size = self.config.groups_per_minibatch
        start = index % self.schedule.minibatches_per_collection * size
        objective = self.config.objective
        return make_minibatch(
            index,
            self.state.groups[start : start + size],
            mask_zero_variance=objective.zero_variance == "mask",
            mask_divisor=objective.mask_divisor,
        )

    def _reference_logprobs(self, minibatch: Minibatch) -> Scores | None:
        """Once for all passes over a minibatch under one reference; None where the loss reads none, or where the
        reference is the current policy."""
        if not self.objective.needs_reference:
            return None
        state = self.state
        if self.schedule.pass_index(state.update) == 0 or state.reference_scores is None:
            state.reference_scores = self.learner.reference_logprobs(minibatch)
        return state.reference_scores

    def _old_logprobs(self, minibatch: Minibatch) -> Scores | None:
        """The scores the loss divides by; None where they are those of the coming forward pass itself."""
        state, schedule, objective = self.state, self.schedule, self.objective
        if objective.old_policy == "minibatch":
            return state.first_scores if schedule.pass_index(state.update) else None
        if objective.block is None:
            return None
        if schedule.block_start(state.update, objective.block):
            last = schedule.minibatch(schedule.block_end(state.update, objective.block) - 1)
            # A pool may end inside a block.
            held = len(state.groups) // self.config.groups_per_minibatch
            stop = min(last + 1, minibatch.index - schedule.position_in_collection(state.update) + held)
            indices = range(minibatch.index, stop)
            state.old_scores = {index: self.learner.logprobs(self._minibatch(index)) for index in indices}
        return state.old_scores[minibatch.index]

    def _step(self, minibatch: Minibatch, reference: Scores | None, old: Scores | None) -> StepResult:
        try:
            result = self.learner.step(
                minibatch, self.objective, update=self.state.update, reference=reference, old=old
            )
        except NonFiniteError:
            if self.leading is not None:
                self._save_failed(minibatch)
            raise
        if self.schedule.pass_index(self.state.update) == 0:
            self.state.first_scores = result.logprobs
        return result

    def _save_failed(self, minibatch: Minibatch) -> None:
        """What went in. The weights of this moment are the last checkpoint's only right after a save."""
        groups = checkpoint.groups_to_state(minibatch.groups)
        torch.save({"update": self.state.update, "groups": groups}, self.run_dir / FAILED_BATCH)
        self.tracker.message(f"the minibatch is saved in {self.run_dir / FAILED_BATCH}")

    # --- what is seen of it ---

    @property
    def _leading(self) -> Leading:
        assert self.leading is not None, "only the leading rank comes here"
        return self.leading

    def _diagnose(self, minibatch: Minibatch, result: StepResult) -> dict[str, float]:
        state, schedule, update = self.state, self.schedule, self.state.update
        ratios = diagnostics.log_ratios(minibatch, result.logprobs)
        parts: dict[str, Metric] = result.metrics | diagnostics.mismatch(ratios) | retained_metrics(minibatch.groups)
        row = metrics.scalars(parts)
        # One collection, hence one version, for all of a minibatch.
        row["sample_age"] = float(update - minibatch.groups[0].rollouts[0].policy_version)
        row["sync/version"] = float(schedule.last_sync(update))
        row["pass"] = float(schedule.pass_index(update))
        row |= {name: state.totals[name] for name in ("total/responses", "total/tokens")}
        if schedule.is_last_pass(update):
            assert state.first_scores is not None
            first = diagnostics.log_ratios(minibatch, state.first_scores)
            row |= diagnostics.bound_values(diagnostics.bound_parts(minibatch, first, ratios))
            state.block_ess = state.block_ess.merge(diagnostics.sequence_ess(ratios))
            state.block_token_ess = state.block_token_ess.merge(diagnostics.token_ess(ratios))
            state.block_minibatches += 1
            if state.block_minibatches == self.config.tracking.block:
                row["mismatch/ess_sequence"] = state.block_ess.value()
                row["mismatch/ess_token"] = state.block_token_ess.value()
                state.block_ess, state.block_token_ess = diagnostics.EssSums(), diagnostics.EssSums()
                state.block_minibatches = 0
        return row

    def _log(self, leading: Leading, row: dict[str, float], minibatch: Minibatch, result: StepResult) -> None:
        update, every = self.state.update, self.config.tracking.rollouts_every
        self.tracker.log_update(update, row)
        if self.hand_off is not None:
            self.hand_off.take()
        if every is not None and update % every == 0:
            groups = minibatch.groups[:SAMPLE_GROUPS]
            self.tracker.log_rollouts(update, groups, result.logprobs[:SAMPLE_GROUPS], leading.decode)

    def _evaluate(self) -> None:
        """Score the learner's weights on held-out problems. It is no sync: the engine gets its own weights back
        where it still has to sample, and age and version are untouched."""
        update = self.state.update
        self._settle()
        with self.tracker.phase("evaluate"):
            hand_over(self.engine, self.learner.weights(), version=update)
            row: dict[str, float] = self.lead_sampling(lambda: self._score_held_out(self._leading))
            if self._samples_again:
                self.restore_behaviour()
        self.tracker.log_evaluation(update, row)

    def _settle(self) -> None:
        """Wait for what is being sampled ahead: the engine is then free, and the collector's state at rest."""
        if self.leading is not None:
            with self.tracker.phase("collect"):
                self.leading.ahead.settle()

    def _score_held_out(self, leading: Leading) -> dict[str, float]:
        settings, update = self.config.evaluation, self.state.update
        groups = evaluate(
            self.engine,
            leading.verifier,
            leading.test_prompts,
            n=settings.n,
            sampling=evaluation_sampling(self.config),
            seed=self.config.seed,
        )
        row = scores(groups, settings.k)
        counts = json.dumps({"update": update, "scores": row, "problems": per_problem(groups)})
        (self.run_dir / EVALUATIONS).mkdir(exist_ok=True)
        write_atomically(self.run_dir / EVALUATIONS / f"update_{update:06d}.json", counts.encode())
        return row

    @property
    def _samples_again(self) -> bool:
        """Whether the engine's weights have to sample once more before they are replaced."""
        state = self.state
        return not state.finished and self.schedule.samples_again_before_sync(state.update)

    def restore_behaviour(self) -> None:
        """Put the kept behaviour weights back into the engine."""
        kept = self.state.behaviour_weights
        assert kept is not None or self.leading is None, "weights that have to sample again are kept at their sync"
        version = self.schedule.last_sync(self.state.update)
        weights: Weights = (kept or {}).items()
        if isinstance(self.engine, SpreadEngine):
            # The leading rank keeps them for all; here each has an engine, or its part of one, that needs them.
            weights = self.world.share(weights)
        hand_over(self.engine, weights, version=version)

    def _save(self) -> None:
        self._settle()
        with self.tracker.phase("save"):
            checkpoint.save(self.run_dir, self.state.update, self._state_to_save, self.learner.save, self.world)
            self.world.lead(self._prune)
        self._lead_hand_off(lambda hand_off: hand_off.hand_over(self.state.update))

    def _prune(self) -> None:
        spare = self.hand_off.needed if self.hand_off is not None else ()
        checkpoint.prune(self.run_dir, self.config.checkpoint.keep, at=self.state.update, spare=spare)

    def _lead_hand_off(self, act: Callable[[HandOff], None]) -> None:
        """Done by the leading rank; the others wait, as an inline evaluation takes its time."""

        def lead() -> None:
            assert self.hand_off is not None, "the leading rank has it"
            act(self.hand_off)

        if self.config.evaluation.checkpoints:
            self.world.lead(lead)

    def _state_to_save(self) -> dict[str, Any]:
        return {
            "run": self.state.to_state(
                collection_open=not self.schedule.collect(self.state.update), samples_again=self._samples_again
            ),
            "ahead": gathered_to_state(self._leading.ahead.result()),
            "collector": self._leading.source.state(),
            "tracker": self.tracker.state(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state; the learner and the tracker have loaded their own parts."""
        self.state = RunState.from_state(saved["run"])
        if self.leading is not None:
            self.leading.source.load_state(saved["collector"])
            if saved["ahead"] is not None:
                self.leading.ahead.restore(gathered_from_state(saved["ahead"]))
        else:
            self.state.behaviour_weights = None
        if self._samples_again:
            self.restore_behaviour()

    def close(self) -> None:
        """Stop the engine, what samples ahead with it, the verifier's workers, and an evaluation of a checkpoint."""
        if self.hand_off is not None:
            self.hand_off.close()
        self.engine.close()
        if self.leading is not None:
            self.leading.ahead.close()
            self.leading.verifier.close()

    def _finish_epochs(self, exhausted: Exhausted) -> None:
        """With a budget in epochs the end is known only when it is reached: score and save it if that is not done.

        Raises:
            CollectionError: the prompts did not fill one collection.
        """
        update = self.state.update
        if exhausted.drawn:
            text = (
                f"the prompts of schedule.epochs={self.schedule.epochs} are used up: the last {exhausted.drawn} groups "
                f"drawn ({exhausted.kept} of them kept) do not fill a collection and are not trained on"
            )
            if update == 0:
                raise CollectionError(f"{text}; lower schedule.minibatches_per_collection or schedule.v")
            self.tracker.warning(text)
        self.state.finished = True
        if self.schedule.evaluate_every is not None and not self.schedule.evaluate(update):
            self._evaluate()
        if self.schedule.save_every is not None and not self.schedule.save(update):
            self._save()
