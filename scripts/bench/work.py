"""Groups, learners and samplers of a shape, built as a run builds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_lab.config import LearnerConfig
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.minibatches import Minibatch, make_minibatch
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.types import Group, Problem, Prompt, Rollout
from scripts.bench.shapes import Model, Shape, tokenizer


def prompts(shape: Shape) -> list[Prompt]:
    draw = np.random.default_rng(0)
    problem = Problem(id="bench", question="", gold="w1")
    return [
        Prompt(problem=problem, text="", token_ids=tuple(int(t) for t in row))
        for row in draw.integers(1, shape.model.vocab, size=(shape.groups, shape.prompt))
    ]


def minibatch(shape: Shape) -> Minibatch:
    """Random responses, half of each group right."""
    draw = np.random.default_rng(1)
    rewards = tuple(1.0 if j % 2 else -1.0 for j in range(shape.group_size))
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


def learner_config(**changes: Any) -> LearnerConfig:
    settings: dict[str, Any] = {
        "engine": "torch_local",
        "lr": 1e-6,
        "betas": [0.9, 0.999],
        "weight_decay": 0.01,
        "grad_clip": 1.0,
        "lr_schedule": "constant",
        "warmup_updates": 0,
        "precision": "fp32",
        "zero_stage": 0,
        "offload_optimizer": False,
        "offload_parameters": False,
        "activation_checkpointing": False,
        "micro_batch_tokens": 8192,
        "logit_chunk": 4096,
    }
    return LearnerConfig(**(settings | changes))


def learner(model: Model, **changes: Any) -> TorchLearner:
    return TorchLearner(
        model.make(),
        tokenizer(model.vocab),
        settings=learner_config(**changes),
        temperature=1.0,
        needs_reference=False,
        updates=None,
    )


def sampler(model: Model, **settings: Any) -> HfEngine:
    return HfEngine(model.make(), tokenizer(model.vocab), **({"max_rows": 2048} | settings))
