"""Prompts to rollouts to rewards to groups: one collection from the frozen behaviour policy (GG C.1).

A batch of prompts is drawn in dataloader order and answered m times each. Complete groups are kept first come, first
kept; where mixed-reward groups are wanted and too few came, another full batch is drawn, `max_batches` in all. Prompts
left over are spent. A response belongs to exactly one minibatch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from grpo_lab.metrics import Mean, Metric, Sum, scalars
from grpo_lab.prompts import PromptStream
from grpo_lab.rewards import Pending, Verifier, reward
from grpo_lab.rollout import RolloutEngine
from grpo_lab.seeds import derive
from grpo_lab.types import Group, Judgement, Prompt, Rollout, Sampling

# Tokens of a response that is sampled for a proof alone.
PROBE_TOKENS = 64


class CollectionError(RuntimeError):
    """A collection could not be filled; the message says what was drawn and kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collection:
    """Groups for whole minibatches, in order, with the accounting of how they came about, by metric name.

    `totals`: of all collections so far. `epoch_completed`: the prompt cursor completed a pass while this was gathered.
    """

    groups: tuple[Group, ...]
    accounting: dict[str, float]
    totals: dict[str, float]
    epoch_completed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The responses to one prompt and what the verifier says of each."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    judgements: tuple[Judgement, ...]


class Generate(Protocol):
    """An engine's `generate` with its other settings fixed."""

    def __call__(self, prompts: Sequence[Prompt], /, *, seeds: Sequence[int]) -> list[list[Rollout]]: ...


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The budget in epochs is used up; `drawn` groups, of which `kept` would have been kept, are not trained on."""

    drawn: int
    kept: int


class GroupSource(Protocol):
    """Where the groups of a run come from."""

    def collect(self, wanted: int) -> Collection | Exhausted:
        """The next `wanted` groups."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs, as plain values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Collector:
    """Gathers collections. `batch` prompts are drawn at a time; `filter_mixed` keeps only groups of unequal rewards."""

    def __init__(
        self,
        stream: PromptStream,
        engine: RolloutEngine,
        verifier: Verifier,
        *,
        group_size: int,
        sampling: Sampling,
        batch: int,
        max_batches: int,
        filter_mixed: bool,
        epochs: int | None,
        seed: int,
    ) -> None:
        self.stream = stream
        self.engine = engine
        self.verifier = verifier
        self.group_size = group_size
        self.sampling = sampling
        self.batch = batch
        self.max_batches = max_batches
        self.filter_mixed = filter_mixed
        self.epochs = epochs
        self.seed = seed
        self.drawn_groups = 0
        self.total_responses = 0
        self.total_tokens = 0

    def collect(self, wanted: int) -> Collection | Exhausted:
        """`wanted` groups from the engine's present weights, or the end of the budget in epochs.

        Raises:
            CollectionError: `max_batches` batches did not hold enough groups.
        """
        epoch = self.stream.epoch
        kept: list[Group] = []
        drawn: list[Group] = []
        for _ in range(self.max_batches):
            prompts = self._next_prompts()
            if prompts is None:
                return Exhausted(len(drawn), len(kept))
            groups = self._answer(prompts)
            drawn += groups
            kept += [group for group in groups if group.is_mixed or not self.filter_mixed]
            if len(kept) >= wanted:
                return Collection(
                    groups=tuple(kept[:wanted]),
                    accounting=scalars(_accounting(drawn, kept, wanted)),
                    totals=self._totals(),
                    epoch_completed=self.stream.epoch > epoch,
                )
        raise CollectionError(self._shortfall(drawn, kept, wanted))

    def _next_prompts(self) -> list[Prompt] | None:
        """The next batch. With a budget in epochs a pass ends with its last full batch, else the next pass fills it."""
        if self.epochs is None:
            return self.stream.take(self.batch)
        if self.stream.epoch >= self.epochs:
            return None
        prompts = self.stream.take(self.batch)
        if self.stream.remaining_in_epoch < self.batch:
            # Dropped here and not when the next batch is due: the pass ends with its last full batch.
            self.stream.take(self.stream.remaining_in_epoch)
        return prompts

    def _answer(self, prompts: Sequence[Prompt]) -> list[Group]:
        first = self.drawn_groups
        seeds = [derive(self.seed, "rollout", first + k) for k in range(len(prompts))]
        groups = judged_groups(
            self.engine,
            self.verifier,
            prompts,
            group_size=self.group_size,
            sampling=self.sampling,
            seeds=seeds,
            first=first,
        )
        self.drawn_groups += len(prompts)
        self.total_responses += len(prompts) * self.group_size
        self.total_tokens += sum(group.num_tokens for group in groups)
        return groups

    def _totals(self) -> dict[str, float]:
        return {
            "total/responses": self.total_responses,
            "total/tokens": self.total_tokens,
            "epoch": self.stream.epoch,
        }

    def _shortfall(self, drawn: Sequence[Group], kept: Sequence[Group], wanted: int) -> str:
        correct = Counter(sum(value > 0 for value in group.rewards) for group in drawn)
        histogram = ", ".join(f"{k}/{self.group_size}: {correct[k]}" for k in range(self.group_size + 1) if correct[k])
        return (
            f"collection.max_batches={self.max_batches} batches of {self.batch} prompts held {len(kept)} groups of "
            f"mixed rewards where {wanted} are needed; groups by correct responses: {histogram}. Choose problems "
            "nearer the model's level, raise group_size or collection.max_batches, or set objective.zero_variance=mask"
        )

    def state(self) -> dict[str, Any]:
        return {
            "stream": self.stream.state(),
            "drawn_groups": self.drawn_groups,
            "total_responses": self.total_responses,
            "total_tokens": self.total_tokens,
            "verifier": self.verifier.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.load_state(state["stream"])
        self.drawn_groups = state["drawn_groups"]
        self.total_responses = state["total_responses"]
        self.total_tokens = state["total_tokens"]
        self.verifier.load_state(state["verifier"])


def probe(
    engine: RolloutEngine, prompts: Sequence[Prompt], *, sampling: Sampling, seed: int, update: int
) -> list[Group]:
    """A short response to each prompt by the engine's present weights, which counts for nothing and is not judged: for
    a proof of a sync whose own collection is yet to come."""
    seeds = [derive(seed, "proof", f"{update}.{index}") for index in range(len(prompts))]
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, PROBE_TOKENS))
    answers = engine.generate(prompts, group_size=1, sampling=sampling, seeds=seeds)
    return [
        Group(prompt=prompt, rollouts=tuple(rollouts), rewards=(0.0,), verdicts=("unparsed",), sequence=index)
        for index, (prompt, rollouts) in enumerate(zip(prompts, answers, strict=True))
    ]


def judged_groups(
    engine: RolloutEngine,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
    first: int,
) -> list[Group]:
    """`group_size` responses to each prompt with their rewards, judged while further ones are sampled. `first` numbers
    the first group."""
    size = len(prompts) if engine.rows_at_once is None else max(engine.rows_at_once // group_size, 1)
    parts = [slice(start, start + size) for start in range(0, len(prompts), size)]
    generate = partial(engine.generate, group_size=group_size, sampling=sampling)
    judged = judged_parts(generate, verifier, [(prompts[part], seeds[part]) for part in parts])
    answers = [answer for part in judged for answer in part]
    return [_group(answer, sequence) for sequence, answer in enumerate(answers, start=first)]


def judged_parts(
    generate: Generate, verifier: Verifier, parts: Iterable[tuple[Sequence[Prompt], Sequence[int]]]
) -> Iterator[list[Answer]]:
    """The answers to each part of the prompts (with their seeds), in order, once it and those before it are judged. No
    sampling waits for a verdict."""
    waiting: deque[tuple[Sequence[Prompt], list[list[Rollout]], Pending]] = deque()
    for prompts, seeds in parts:
        rollouts = generate(prompts, seeds=seeds)
        pairs = [(prompt.problem, each.text) for prompt, row in zip(prompts, rollouts, strict=True) for each in row]
        waiting.append((prompts, rollouts, verifier.submit(pairs)))
        while waiting and waiting[0][2].is_ready:
            yield _answers(*waiting.popleft())
    while waiting:
        yield _answers(*waiting.popleft())


def _answers(prompts: Sequence[Prompt], rollouts: Sequence[list[Rollout]], pending: Pending) -> list[Answer]:
    judgements = iter(pending.result())
    return [
        Answer(prompt=prompt, rollouts=tuple(row), judgements=tuple(next(judgements) for _ in row))
        for prompt, row in zip(prompts, rollouts, strict=True)
    ]


def _group(answer: Answer, sequence: int) -> Group:
    return Group(
        prompt=answer.prompt,
        rollouts=answer.rollouts,
        rewards=tuple(reward(judgement) for judgement in answer.judgements),
        verdicts=tuple(judgement.verdict for judgement in answer.judgements),
        sequence=sequence,
    )


def _accounting(drawn: Sequence[Group], kept: Sequence[Group], wanted: int) -> dict[str, Metric]:
    mixed = sum(group.is_mixed for group in drawn)
    equal = [group for group in drawn if not group.is_mixed]
    verdicts = Counter(verdict for group in drawn for verdict in group.verdicts)
    responses = sum(len(group.rollouts) for group in drawn)
    metrics: dict[str, Metric] = {
        "collect/mixed_fraction": Mean(mixed, len(drawn)),
        "collect/drawn": Sum(len(drawn)),
        "collect/kept": Sum(wanted),
        "collect/all_correct": Sum(sum(group.rewards[0] > 0 for group in equal)),
        "collect/all_wrong": Sum(sum(group.rewards[0] <= 0 for group in equal)),
        "collect/surplus": Sum(len(kept) - wanted),
        "reward/drawn": Mean(sum(sum(group.rewards) for group in drawn), responses),
    }
    for verdict in ("correct", "wrong", "unparsed", "timeout", "error"):
        metrics[f"verdict/{verdict}"] = Sum(verdicts[verdict])
    return metrics


def retained_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Reward, length and truncation of the responses that a minibatch trains on."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "reward/retained": Mean(float(np.sum([group.rewards for group in groups])), len(rollouts)),
        "response/length": Mean(sum(len(rollout.token_ids) for rollout in rollouts), len(rollouts)),
        "response/truncated": Mean(sum(rollout.finish_reason == "length" for rollout in rollouts), len(rollouts)),
    }
