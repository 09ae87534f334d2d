"""What samples: the protocol of a rollout engine, and the choice of one. Adapters are imported when they are built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_lab.config import TrainConfig
from grpo_lab.distributed import World, device_of
from grpo_lab.schedule import shares_weights
from grpo_lab.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    import torch

    from grpo_lab.weights import Weights


# Nats a token by which scores of equal weights may be apart on average, by the type that is computed in: rounding
# alone. In BF16 it depends on the model and on how rows are batched: 1.5e-3 to 1.2e-2 measured on small shapes, 1.1e-2
# reported of vLLM beside Megatron on 4B, and a deviation of 5e-2 on 0.5B, as much as a trainer in BF16 is off itself in
# other batches. A small stale step hides below that; digests, where there are any, do not let it pass.
DRIFT_TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}


class EngineError(RuntimeError):
    """The engine did not start, died, hung or answered an error; the message says what to do."""


class RolloutEngine(Protocol):
    """A sampler. What it holds is what the last `load_weights` gave it, and nothing else.

    drift_tolerance: nats; the mean |learner - sampler log-prob| that rounding alone may cause between this engine and
    the learner with equal weights. dtype: the type it takes weights in. reads_back: whether `digests` can
    tell what it holds; making digests to compare takes time. rows_at_once: how many responses it samples side by side,
    so that more are better asked for in parts, each judged while the next is sampled; None where it sees to that.
    """

    @property
    def policy_version(self) -> int: ...

    @property
    def drift_tolerance(self) -> float: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def reads_back(self) -> bool: ...

    @property
    def rows_at_once(self) -> int | None: ...

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        """`group_size` responses to each prompt, in order. Member j of a prompt with seed s draws from seed s + j.

        Raises:
            EngineError: the engine is lost; no part of the answers is used.
        """
        ...

    def load_weights(self, weights: Weights, *, version: int) -> None:
        """Replace all weights by a stream of them, each used before the next is asked for.

        Raises:
            ValueError: a name or shape does not fit. Nothing may be sampled afterwards.
            EngineError: the engine did not take them.
        """
        ...

    def digests(self) -> dict[str, str] | None:
        """The digest (`weights.digest`) of each weight as it lies in the engine, or as it arrived there where it is
        then repacked; None where neither can be read."""
        ...

    def close(self) -> None: ...


def build_rollout_engine(config: TrainConfig, model_folder: str, run_dir: Path, world: World) -> RolloutEngine:
    """This rank's engine, which `rollout.engine` names, holding the initial weights. Its log goes to `run_dir`.

    Raises:
        EngineError: it does not start.
    """
    if config.rollout.engine == "vllm":
        from grpo_lab.rollout.vllm.engine import build_vllm_engine

        return build_vllm_engine(config, model_folder, run_dir)
    assert config.rollout.engine == "hf", config.rollout.engine
    from grpo_lab.policy import AUTOCAST
    from grpo_lab.rollout.hf import HfEngine

    return HfEngine.from_folder(
        model_folder,
        revision=config.model.revision,
        max_rows=config.rollout.max_rows,
        device=device_of(config.hardware, world),
        # The learner's own: what differs between the two is then rounding, and not precision.
        autocast=AUTOCAST[config.learner.precision],
        borrows=shares_weights(config),
    )
