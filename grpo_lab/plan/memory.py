"""Memory of a device at the peak of each phase of an update, and by ZeRO stage."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from grpo_lab.config import LearnerConfig, TrainConfig
from grpo_lab.plan.activations import MicroBatch, activations, micro_batch
from grpo_lab.plan.sampler import Sampler, sampler
from grpo_lab.plan.shape import Shape, named_parameters, parameters
from grpo_lab.plan.states import STAGES, States, parameter_width, states
from grpo_lab.plan.volume import Lengths
from grpo_lab.schedule import Schedule

GIB = 2**30
# Of a GPU where gpu_gib= says nothing: an H100's.
GPU_GIB = 80
# Interpreter and imported libraries. On a CPU as measured (docs/plan.md); on a GPU the context and the kernels of
# torch, an assumption.
LIBRARIES = {"cpu": 520 * 2**20, "deepspeed": 30 * 2**20, "gpu": GIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One ZeRO stage: bytes a rank while it learns. `configured`: the run's own."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    sampler: int
    other: int
    total: int
    configured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """`phases`: by phase, bytes by what they are for. `peak` is of the phase `peak_phase`. `limit`: of one device, or
    of all processes of this machine on a CPU. `host`: CPU memory of a node by what it is for, where devices are GPUs.
    """

    on_gpu: bool
    processes: int
    limit: int
    phases: dict[str, dict[str, int]]
    peak_phase: str
    peak: int
    by_stage: tuple[StageRow, ...]
    host: dict[str, int]
    sampler: Sampler
    batch: MicroBatch

    @property
    def fits(self) -> bool:
        return self.peak * (1 if self.on_gpu else self.processes) <= self.limit


def device_bytes(config: TrainConfig, gpu_gib: float | None) -> int:
    """Memory of one device: a GPU's, or this machine's."""
    if config.hardware.device != "cpu":
        return round((gpu_gib or GPU_GIB) * GIB)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory(shape: Shape, config: TrainConfig, lengths: Lengths, *, gpu_gib: float | None) -> Memory:
    """The estimate for a run as configured."""
    limit = device_bytes(config, gpu_gib)
    samples = sampler(shape, config, lengths, device_bytes=limit)
    batch = micro_batch(config, lengths)
    phases = _phases(shape, config, config.learner, samples, batch)
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    peak_phase = max(totals, key=lambda name: totals[name])
    on_gpu = config.hardware.device != "cpu"
    return Memory(
        on_gpu=on_gpu,
        processes=config.hardware.ranks // config.hardware.nodes,
        limit=limit,
        phases=phases,
        peak_phase=peak_phase,
        peak=totals[peak_phase],
        by_stage=tuple(_row(shape, config, samples, batch, stage) for stage in STAGES),
        host=_host(shape, config, samples) if on_gpu else {},
        sampler=samples,
        batch=batch,
    )


def _phases(
    shape: Shape, config: TrainConfig, learner: LearnerConfig, samples: Sampler, batch: MicroBatch
) -> dict[str, dict[str, int]]:
    held = _states(shape, config, learner)
    libraries = _libraries(config, learner)
    stays = {
        "libraries": libraries,
        "parameters": held.parameters,
        "optimizer": held.optimizer,
        "reference": held.reference,
    }
    beside = {"sampler": _beside(samples)}
    at_work = activations(shape, learner, batch, stage=learner.zero_stage, temperature=config.rollout.temperature)
    return {
        "load": {
            "libraries": libraries,
            "parameters": held.parameters,
            "flattening": held.load,
            "reference": held.reference,
        },
        "sample": {
            **stays,
            "sampler": samples.total if samples.where in ("ranks", "first") else 0,
        },
        "learn": {
            **stays,
            **beside,
            # Whole from the start: those of the micro-batch before, or room that activations leave in pieces.
            "gradients": held.gradients,
            "activations": at_work.peak,
            "gathered": held.gathered,
            "buffers": held.buffers,
        },
        "update": {**stays, **beside, "gradients": held.gradients, "temporary": held.update},
    }


def _states(shape: Shape, config: TrainConfig, learner: LearnerConfig) -> States:
    return states(
        shape,
        learner,
        stage=learner.zero_stage,
        ranks=config.hardware.ranks,
        reference=config.objective.reads_reference,
        on_gpu=config.hardware.device != "cpu",
    )


def _beside(samples: Sampler) -> int:
    """What the sampler keeps of the device while the learner learns."""
    if samples.where not in ("ranks", "first") or samples.sleeps:
        return 0
    # The embedded sampler's cache lives only while it samples.
    return samples.weights if samples.sequences is None else samples.total


def _libraries(config: TrainConfig, learner: LearnerConfig) -> int:
    if config.hardware.device != "cpu":
        return LIBRARIES["gpu"]
    return LIBRARIES["cpu"] + (LIBRARIES["deepspeed"] if learner.engine == "deepspeed" else 0)


def _row(shape: Shape, config: TrainConfig, samples: Sampler, batch: MicroBatch, stage: int) -> StageRow:
    """The learn phase at another stage, as DeepSpeed would run it (the embedded learner: stage 0)."""
    configured = stage == config.learner.zero_stage
    learner = replace(
        config.learner,
        engine=config.learner.engine if configured else "deepspeed",
        zero_stage=stage,
        offload_optimizer=config.learner.offload_optimizer and stage > 0,
        offload_parameters=config.learner.offload_parameters and stage == 3,
    )
    phases = _phases(shape, config, learner, samples, batch)
    parts = phases["learn"]
    named = ("parameters", "gradients", "optimizer", "reference", "activations", "sampler")
    held = {name: parts[name] for name in named}
    return StageRow(
        stage=stage,
        **held,
        other=sum(parts.values()) - sum(held.values()),
        total=max(sum(each.values()) for each in phases.values()),
        configured=configured,
    )


def _host(shape: Shape, config: TrainConfig, samples: Sampler) -> dict[str, int]:
    """CPU memory of the leading rank's node."""
    here = config.hardware.ranks // config.hardware.nodes
    held = _states(shape, config, config.learner)
    width = parameter_width(config.learner, config.learner.zero_stage)
    schedule = Schedule.from_config(config)
    copies = 2 if config.learner.engine == "deepspeed" and held.reference else 1
    keeps = schedule.minibatches_per_collection < schedule.v
    return {
        # Every rank reads the whole model, and copies it for the reference, before it goes to its device.
        "while loading": here * copies * width * parameters(shape),
        "offloaded": here * (held.host_parameters + held.host_optimizer),
        "behaviour weights": width * named_parameters(shape) if keeps else 0,
        "sampler asleep": here * samples.weights if samples.sleeps else 0,
    }
