"""What samples: the protocol of a rollout engine, and the choice of one. Adapters are imported when they are built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from grpo_lab.config import TrainConfig
from grpo_lab.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from torch import Tensor

Weights = Iterable[tuple[str, "Tensor"]]


class RolloutEngine(Protocol):
    """A sampler with weights of its own. What it holds is what the last `load_weights` gave it, and nothing else.

    drift_tolerance: nats; the mean |learner - sampler log-prob| that rounding alone may cause between this engine and
    the learner with equal weights.
    """

    policy_version: int
    drift_tolerance: float

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        """`group_size` responses to each prompt, in order. Member j of a prompt with seed s draws from seed s + j."""
        ...

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace all weights. Raises ValueError where a name or shape does not fit; then nothing was replaced."""
        ...

    def fingerprint(self) -> str | None:
        """A hash of the weights held, as `weights.fingerprint` makes it; None where they cannot be read back."""
        ...

    def close(self) -> None: ...


def build_rollout_engine(config: TrainConfig, model_folder: str) -> RolloutEngine:
    """The engine that `rollout.engine` names, holding the initial weights."""
    assert config.rollout.engine == "hf", config.rollout.engine
    from grpo_lab.policy import AUTOCAST
    from grpo_lab.rollout.hf import HfEngine

    return HfEngine.from_folder(
        model_folder,
        revision=config.model.revision,
        max_rows=config.rollout.max_rows,
        device=config.hardware.device,
        # The learner's own: what differs between the two is then rounding, and not precision.
        autocast=AUTOCAST[config.learner.precision],
    )
