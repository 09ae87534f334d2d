"""What learns: the protocol of a learner, and the choice of one. Adapters are imported when they are built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_lab.config import TrainConfig
from grpo_lab.distributed import World, device_of
from grpo_lab.metrics import Metric

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from grpo_lab.minibatches import Minibatch
    from grpo_lab.objectives import Objective

# Per-token values of each response of a minibatch: [G][m] arrays of [T] float32.
Scores = list[list["np.ndarray"]]


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite. Nothing was updated; `sample` names the response or group."""

    def __init__(self, message: str, *, sample: str) -> None:
        super().__init__(f"{message} at {sample}; no update was made")
        self.sample = sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """One optimizer update: the policy's scores before it, and what the losses reported, merged."""

    logprobs: Scores
    metrics: dict[str, Metric]


class Learner(Protocol):
    """The policy being trained, its optimizer and its reference."""

    def logprobs(self, minibatch: Minibatch) -> Scores:
        """Scores of every response under the current policy, without gradient."""
        ...

    def reference_logprobs(self, minibatch: Minibatch) -> Scores | None:
        """Scores under the active reference; None while it equals the current policy, whose own scores then serve."""
        ...

    def step(
        self, minibatch: Minibatch, objective: Objective, *, update: int, reference: Scores | None, old: Scores | None
    ) -> StepResult:
        """One optimizer update, which is number `update` from 0.

        Raises:
            NonFiniteError: before anything has changed.
        """
        ...

    def refresh_reference(self) -> None:
        """The reference becomes the current policy."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names (tied ones under each of theirs), in one fixed order.

        A stream: a tensor is valid only until the next is asked for. Every rank must run it to its end, and nothing
        else that ranks do together may happen in between.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder `model/`, and what else it takes to go on. On every rank."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, before any step. On every rank."""
        ...


def build_learner(
    config: TrainConfig, model_folder: str, world: World, *, needs_reference: bool, updates: int | None
) -> Learner:
    """The learner that `learner.engine` names, at the initial weights. `updates` is the budget, where there is one."""
    if config.learner.engine == "deepspeed":
        from grpo_lab.learner.deepspeed_zero import DeepSpeedLearner

        return DeepSpeedLearner.from_folder(
            model_folder,
            revision=config.model.revision,
            settings=config.learner,
            temperature=config.rollout.temperature,
            device=device_of(config.hardware, world),
            needs_reference=needs_reference,
            updates=updates,
            world=world,
        )
    assert config.learner.engine == "torch_local", config.learner.engine
    from grpo_lab.learner.torch_local import TorchLearner

    return TorchLearner.from_folder(
        model_folder,
        revision=config.model.revision,
        settings=config.learner,
        temperature=config.rollout.temperature,
        device=device_of(config.hardware, world),
        needs_reference=needs_reference,
        updates=updates,
    )
