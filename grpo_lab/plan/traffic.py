"""Bytes that a sync moves, and that checkpoints take on disk."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.config import TrainConfig
from grpo_lab.plan.sampler import WIDTHS
from grpo_lab.plan.shape import Shape, named_parameters, parameters
from grpo_lab.plan.states import parameter_width
from grpo_lab.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Bytes of one weight sync. stream: the weights under all their names, in the engine's type. gathered: what each
    rank receives of the others' shards (ZeRO stage 3). way: how they travel."""

    stream: int
    gathered: int
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Bytes of one checkpoint by file, of all that are kept, and while a further one is written."""

    parts: dict[str, int]
    one: int
    kept: int
    highest: int
    weights: int


def sync_traffic(shape: Shape, config: TrainConfig) -> Sync:
    """What a sync hands over."""
    rollout, ranks = config.rollout, config.hardware.ranks
    width = 4 if rollout.engine == "hf" else WIDTHS[rollout.vllm.dtype]
    sharded = config.learner.zero_stage == 3 and ranks > 1
    held = parameter_width(config.learner, config.learner.zero_stage) * named_parameters(shape)
    return Sync(
        stream=width * named_parameters(shape), gathered=held * (ranks - 1) // ranks if sharded else 0, way=_way(config)
    )


def _way(config: TrainConfig) -> str:
    rollout = config.rollout
    if rollout.engine == "hf" or rollout.vllm.mode == "in_process":
        return "in process"
    if rollout.vllm.mode == "server" and config.hardware.device != "cpu":
        return "NCCL"
    return "files"


def checkpoint_disk(shape: Shape, config: TrainConfig) -> Disk:
    """What checkpoints take; the collection at hand, a few bytes a token, is not counted. A reference that is still
    the policy is not written by DeepSpeed; counted is one that is not."""
    learner, count = config.learner, parameters(shape)
    width = parameter_width(learner, learner.zero_stage)
    parts = {"model": width * count}
    if learner.engine == "torch_local":
        parts["optimizer"] = 8 * count
    elif learner.zero_stage == 0:
        parts["engine"] = width * count + 8 * count
    else:
        # Master and moments; below stage 3 the parameters once more.
        parts["engine"] = 12 * count + (width * count if learner.zero_stage < 3 else 0)
    if config.objective.reads_reference:
        parts["reference"] = width * count
    schedule = Schedule.from_config(config)
    if schedule.minibatches_per_collection < schedule.v:
        parts["behaviour weights"] = width * named_parameters(shape)
    one = sum(parts.values())
    saves = schedule.save_every is not None
    # Where weights travel as files, those of the last sync stay until the next are taken.
    traffic = sync_traffic(shape, config)
    return Disk(
        parts=parts,
        one=one,
        kept=one * config.checkpoint.keep if saves else 0,
        highest=one * (config.checkpoint.keep + 1) if saves else 0,
        weights=2 * traffic.stream if traffic.way == "files" else 0,
    )
