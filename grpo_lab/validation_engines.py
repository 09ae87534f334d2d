"""Rules about engines and ranks: what can run beside what."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_lab.config import TrainConfig


def engine_problems(config: TrainConfig) -> Iterator[str]:
    if config.schedule.overlap:
        yield from _overlap_problems(config)
    yield from _learner_problems(config)
    if config.rollout.engine == "vllm":
        yield from _vllm_problems(config)
    elif config.rollout.url is not None:
        yield f"rollout.url={config.rollout.url} needs rollout.engine=vllm and rollout.vllm.mode=server"


def _overlap_problems(config: TrainConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "hf" and config.hardware.ranks > 1:
        yield (
            f"schedule.overlap=true needs a sampler apart from the learner: with rollout.engine=hf all "
            f"hardware.ranks={config.hardware.ranks} sample; set rollout.engine=vllm"
        )
    if rollout.engine == "vllm" and rollout.vllm.mode == "in_process":
        yield (
            "schedule.overlap=true needs a sampler apart from the learner, and rollout.vllm.mode=in_process shares its "
            "processes and device: choose worker or server"
        )


def _learner_problems(config: TrainConfig) -> Iterator[str]:
    learner, hardware = config.learner, config.hardware
    if hardware.nodes > 0 and hardware.ranks % hardware.nodes:
        yield f"hardware.ranks={hardware.ranks} must be a multiple of hardware.nodes={hardware.nodes}"
    if hardware.first_gpu < 0:
        yield f"hardware.first_gpu={hardware.first_gpu} must be at least 0"
    if learner.zero_stage not in (0, 1, 2, 3):
        yield f"learner.zero_stage={learner.zero_stage} is not known: choose 0, 1, 2 or 3"
    if learner.engine == "torch_local":
        if hardware.ranks > 1:
            yield f"hardware.ranks={hardware.ranks} needs learner.engine=deepspeed: torch_local is one process"
        for key in ("zero_stage", "offload_optimizer", "offload_parameters"):
            if value := getattr(learner, key):
                yield f"learner.{key}={value} needs learner.engine=deepspeed: torch_local shards and offloads nothing"
        return
    if hardware.ranks > 1 and hardware.device.startswith("cuda:"):
        yield f"hardware.device={hardware.device} is one GPU, and hardware.ranks={hardware.ranks}: choose cuda"
    if learner.offload_optimizer and learner.zero_stage == 0:
        yield "learner.offload_optimizer=true needs learner.zero_stage=1, 2 or 3"
    if learner.offload_parameters and learner.zero_stage != 3:
        yield f"learner.offload_parameters=true needs learner.zero_stage=3 (it is {learner.zero_stage})"


def _vllm_problems(config: TrainConfig) -> Iterator[str]:
    vllm, hardware, url = config.rollout.vllm, config.hardware, config.rollout.url
    on_gpu = hardware.device != "cpu"
    if url is not None and vllm.mode != "server":
        yield f"rollout.url={url} is a server's: set rollout.vllm.mode=server (it is {vllm.mode})"
    if url is not None and not url.startswith(("http://", "https://")):
        yield f"rollout.url={url} must start with http:// or https://"
    if not 0 < vllm.memory_share <= 1:
        yield f"rollout.vllm.memory_share={vllm.memory_share} must lie in (0, 1]"
    for key in ("start_timeout", "generate_timeout", "sync_timeout"):
        if not getattr(vllm, key) > 0:
            yield f"rollout.vllm.{key}={getattr(vllm, key)} must be above 0 seconds"
    if vllm.restarts < 0:
        yield f"rollout.vllm.restarts={vllm.restarts} must be at least 0"
    if vllm.sleep and not (vllm.mode == "in_process" and on_gpu):
        yield (
            f"rollout.vllm.sleep=true needs rollout.vllm.mode=in_process on a GPU (mode is {vllm.mode}, "
            f"hardware.device={hardware.device}): elsewhere no memory is shared"
        )
    chosen = hardware.device not in ("cpu", "cuda", "cuda:0") or hardware.first_gpu > 0
    if vllm.mode == "in_process" and chosen:
        yield (
            "rollout.vllm.mode=in_process takes the first GPUs that the process sees (hardware.device="
            f"{hardware.device} hardware.first_gpu={hardware.first_gpu}): choose others by CUDA_VISIBLE_DEVICES"
        )
    if vllm.mode == "in_process" and config.learner.engine == "deepspeed" and hardware.ranks == 1:
        yield (
            "rollout.vllm.mode=in_process shares the process group of learner.engine=deepspeed, which takes "
            "hardware.ranks of 2 or more: set rollout.vllm.mode=worker, or learner.engine=torch_local"
        )
    if vllm.mode == "in_process" and vllm.tensor_parallel > 0 and hardware.ranks % vllm.tensor_parallel:
        yield (
            f"rollout.vllm.tensor_parallel={vllm.tensor_parallel} must divide hardware.ranks={hardware.ranks}: in "
            "process, each rank is a part of one engine"
        )


def engine_warnings(config: TrainConfig) -> Iterator[str]:
    rollout, precision = config.rollout, config.learner.precision
    if rollout.engine == "vllm" and rollout.vllm.dtype != precision:
        yield (
            f"rollout.vllm.dtype={rollout.vllm.dtype} and learner.precision={precision} differ: the sampler and the "
            "learner then disagree by rounding right after a sync"
        )
    unread = rollout.vllm.mode == "in_process" or (rollout.vllm.mode == "server" and config.hardware.device != "cpu")
    if rollout.engine == "vllm" and rollout.vllm.dtype == "bf16" and unread:
        yield (
            f"rollout.vllm.mode={rollout.vllm.mode} does not tell which weights arrived, and in bf16 a sync is proved "
            "by scoring alone: the staleness of a few updates may hide below rounding; rollout.vllm.mode=worker "
            "compares digests"
        )
