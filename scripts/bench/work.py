"""Minibatches, learners and samplers of a shape, built as a run builds them. Loads torch: for child processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from grpo_lab.composition import compose_run
from grpo_lab.config import LearnerConfig, TrainConfig
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.minibatches import Minibatch, make_minibatch
from grpo_lab.objectives import build_objective
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.types import Group, Problem, Prompt, Rollout, Sampling
from scripts.bench.shapes import SHORT, Model, Shape, tokenizer


def config(*overrides: str) -> TrainConfig:
    """The embedded default with GRPO and no reference, as all runs here."""
    return compose_run(["objective=grpo", "objective.beta=0", *overrides])


def prompts(shape: Shape) -> list[Prompt]:
    draw = np.random.default_rng(0)
    problem = Problem(id="bench", question="", gold="0")
    return [
        Prompt(problem=problem, text="", token_ids=tuple(int(t) for t in row))
        for row in draw.integers(1, shape.model.vocab, size=(shape.groups, shape.prompt))
    ]


def minibatch(shape: Shape) -> Minibatch:
    """Random responses, half of each group right."""
    draw = np.random.default_rng(1)
    rewards = tuple(float(j % 2) for j in range(shape.group_size))
    groups = [
        Group(
            prompt=prompt,
            rollouts=tuple(
                Rollout(
                    token_ids=draw.integers(1, shape.model.vocab, size=shape.response).astype(np.int32),
                    behaviour_logprobs=np.full(shape.response, -np.log(shape.model.vocab), dtype=np.float32),
                    finish_reason="length",
                    policy_version=0,
                    text="",
                )
                for _ in range(shape.group_size)
            ),
            rewards=rewards,
            verdicts=tuple("correct" if value > 0 else "wrong" for value in rewards),
            sequence=index,
        )
        for index, prompt in enumerate(prompts(shape))
    ]
    return make_minibatch(0, groups, mask_zero_variance=False, mask_divisor="all")


def learner(
    model: Model, settings: LearnerConfig, *, device: torch.device | str = "cpu"
) -> tuple[TorchLearner, Callable[[Minibatch], None]]:
    """A learner that has its optimizer's state already, and its update on a minibatch."""
    whole = config()
    objective = build_objective(whole.objective, max_response_tokens=whole.rollout.max_response_tokens)
    made = TorchLearner(
        model.make().to(device),
        tokenizer(model.vocab),
        settings=replace(settings, lr=1e-6),
        temperature=1.0,
        needs_reference=False,
        updates=None,
    )

    def update(batch: Minibatch) -> None:
        made.step(batch, objective, update=0, reference=None, old=None)

    update(minibatch(replace(SHORT, model=model, groups=1, group_size=2, prompt=2, response=2)))
    return made, update


def shaped_learner(shape: Shape) -> tuple[TorchLearner, Callable[[Minibatch], None]]:
    """As `learner`, with the shape's budgets."""
    settings = config().learner
    return learner(
        shape.model,
        replace(settings, micro_batch_tokens=shape.micro_batch_tokens, logit_chunk=shape.logit_chunk),
    )


def sampler(model: Model, *, device: torch.device | str = "cpu", autocast: torch.dtype | None = None) -> HfEngine:
    return HfEngine(
        model.make().to(device), tokenizer(model.vocab), max_rows=config().rollout.max_rows, autocast=autocast
    )


def sample(shape: Shape, engine: Any) -> list[list[Rollout]]:
    """One collection's worth of responses, by any engine."""
    given = prompts(shape)
    sampling = Sampling(temperature=1.0, max_tokens=shape.response)
    seeds = [1000 * index for index in range(len(given))]
    groups: list[list[Rollout]] = engine.generate(given, group_size=shape.group_size, sampling=sampling, seeds=seeds)
    assert {len(rollout.token_ids) for group in groups for rollout in group} == {shape.response}
    return groups


def seconds(work: Callable[[], object], *, times: int = 1) -> list[float]:
    """What each of `times` runs of `work` took."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken
