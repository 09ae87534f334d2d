"""The engine of a rank that does not sample: it runs the stream of weights, which ranks gather together, to its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from grpo_lab.types import Prompt, Rollout, Sampling
from grpo_lab.weights import Weights


class FollowerEngine:
    """`drift_tolerance` and `dtype` are the leader's engine's, so that every rank comes to the same verdict."""

    reads_back = False
    rows_at_once = None

    def __init__(self, *, drift_tolerance: float, dtype: torch.dtype) -> None:
        self.drift_tolerance = drift_tolerance
        self.dtype = dtype
        self.policy_version = 0

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        raise NotImplementedError("only the leading rank samples")

    def load_weights(self, weights: Weights, *, version: int) -> None:
        deque(weights, maxlen=0)
        self.policy_version = version

    def digests(self) -> None:
        return None

    def close(self) -> None:
        """Nothing to stop."""
