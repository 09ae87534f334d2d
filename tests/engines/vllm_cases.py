"""What the tests of vLLM share: a model that it runs, configurations, and learners to be synced from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import composed, make_learner, tiny_model

from grpo_lab.config import TrainConfig
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.rollout.vllm.engine import VllmEngine
from grpo_lab.types import Rollout

BuildEngine = Callable[..., VllmEngine]


def vllm_shaped() -> Any:
    """The tiny Qwen3 with heads of a size that vLLM runs on a CPU."""
    return tiny_model("qwen3", head_dim=32)


def vllm_config(*overrides: str) -> TrainConfig:
    return composed(
        "rollout.engine=vllm",
        "rollout.max_prompt_tokens=40",
        "rollout.max_response_tokens=24",
        # A prompt of 40 tokens then fills a block of the prefix cache.
        "+rollout.vllm.extra.block_size=32",
        # A few prompts then fill a step.
        "+rollout.vllm.extra.max_num_batched_tokens=256",
        "hardware.threads=1",
        *overrides,
    )


def perturbed_learner(temperature: float = 1.0, *, seed: int = 1) -> TorchLearner:
    """The model that engines start with, every weight moved by a normal number of 5 % of it."""
    model = vllm_shaped()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
    return make_learner(model, temperature=temperature)


def same(one: Sequence[Rollout], other: Sequence[Rollout]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.behaviour_logprobs, b.behaviour_logprobs)
        for a, b in zip(one, other, strict=True)
    )


def members(group: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdigit() and int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found
