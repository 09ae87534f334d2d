"""Rules about the evaluation of checkpoints while a run trains: what it needs, and where it may take place."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpo_lab.config import TrainConfig


def hand_off_problems(config: TrainConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.device is not None and not re.fullmatch(r"cpu|cuda:\d+", evaluation.device):
        yield f"evaluation.device={evaluation.device} is not known: choose cpu, or one GPU such as cuda:7, or null"
        return
    if not evaluation.checkpoints:
        return
    if config.checkpoint.every is None:
        yield "evaluation.checkpoints=true needs checkpoints: set checkpoint.every, which is null"
    if config.rollout.engine == "vllm" and config.hardware.device != "cpu" and evaluation.device == "cpu":
        yield "evaluation.device=cpu cannot run the GPU's rollout.engine=vllm: name a GPU, such as cuda:7"
    elif evaluation.hand_off == "slurm":
        if evaluation.device is not None and evaluation.device != "cpu":
            yield (
                f"evaluation.device={evaluation.device} is of this machine, and evaluation.hand_off=slurm gives each "
                "job its own GPUs: set evaluation.device=null, and --gres=gpu:1 in evaluation.sbatch"
            )
    else:
        yield from _device_problems(config)


def _device_problems(config: TrainConfig) -> Iterator[str]:
    """A process on this machine, beside what trains and samples here."""
    evaluation, ranks, engines = config.evaluation, _gpus_of_ranks(config), _gpus_of_engines(config)
    if evaluation.device is None:
        # An engine in the ranks' own processes sleeps meanwhile; one in another process keeps its memory.
        apart = config.rollout.engine == "vllm" and config.rollout.vllm.mode != "in_process"
        if config.hardware.device != "cpu" and (evaluation.hand_off == "background" or apart):
            yield (
                f"evaluation.checkpoints=true with evaluation.hand_off={evaluation.hand_off} needs a GPU that neither "
                f"training nor vLLM uses: free one (they have {_listed(ranks | engines)}) and name it, such as "
                "evaluation.device=cuda:7"
            )
        return
    if evaluation.device == "cpu":
        return
    taken = engines | (ranks if evaluation.hand_off == "background" else set())
    if int(evaluation.device.removeprefix("cuda:")) in taken:
        yield (
            f"evaluation.device={evaluation.device} is in use: training and vLLM have {_listed(ranks | engines)}; free "
            "it (hardware.ranks, hardware.first_gpu, rollout.vllm.devices), or name another"
        )


def hand_off_warnings(config: TrainConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if not evaluation.checkpoints and (evaluation.hand_off != "inline" or evaluation.device or evaluation.sbatch):
        yield (
            f"evaluation.hand_off={evaluation.hand_off} evaluation.device={evaluation.device} evaluation.sbatch="
            f"{list(evaluation.sbatch)} have no effect without evaluation.checkpoints=true"
        )
    elif evaluation.sbatch and evaluation.hand_off != "slurm":
        yield f"evaluation.sbatch={list(evaluation.sbatch)} has no effect unless evaluation.hand_off=slurm"


def _gpus_of_ranks(config: TrainConfig) -> set[int]:
    """On each node."""
    hardware = config.hardware
    if named := re.fullmatch(r"cuda:(\d+)", hardware.device):
        return {int(named[1])}
    if hardware.device != "cuda":
        return set()
    return set(range(hardware.first_gpu, hardware.first_gpu + hardware.ranks // max(hardware.nodes, 1)))


def _gpus_of_engines(config: TrainConfig) -> set[int]:
    """Those of a worker or server that the run starts: it takes the first that it sees."""
    rollout, vllm = config.rollout, config.rollout.vllm
    on_gpu = config.hardware.device != "cpu"
    if rollout.engine != "vllm" or rollout.url is not None or vllm.mode == "in_process" or not on_gpu:
        return set()
    if vllm.devices is None:
        return set(range(vllm.tensor_parallel))
    return {int(name) for name in vllm.devices.split(",") if name.strip().isdigit()}


def _listed(gpus: set[int]) -> str:
    return ", ".join(f"cuda:{gpu}" for gpu in sorted(gpus)) or "none"
