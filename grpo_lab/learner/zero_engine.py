"""DeepSpeed engines: how they are configured and started, and the one update step that all ZeRO stages share."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lab.config import ConfigError, LearnerConfig
from grpo_lab.policy import Policy

MISSING = "learner.engine=deepspeed needs DeepSpeed: `make engines`, or pip install 'grpo-lab[deepspeed]'"
# Elements of gradients that are summed over ranks at a time, and of parameters gathered ahead of their use (stage 3).
BUCKET = 50_000_000
# Parameters of fewer elements are kept whole on every rank at stage 3: gathering them costs more than holding them.
PERSISTENT = 100_000
# AdamW squares gradients in FP32. Stage 3 takes norms in float64 and would not see that overflow.
LARGEST_NORM = 1e18


def import_deepspeed(device: str) -> Any:
    """The library, for this device and without its running commentary.

    Raises:
        ConfigError: it is not installed.
    """
    if torch.device(device).type == "cpu":
        # Read when it is imported; it would look for other devices and warn that there are none.
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(MISSING) from error
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Calls of its own that torch has renamed, several a pass.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    # Compiled for two minutes on first use otherwise, for a collective that training does not call.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def compute_dtype(settings: LearnerConfig) -> torch.dtype:
    """The type that parameters have on the device.

    BF16 parameters have FP32 master weights in the ZeRO optimizer. Stage 0 has none: there parameters stay FP32 and
    the forward pass runs under autocast, as in the embedded learner.
    """
    return torch.bfloat16 if settings.precision == "bf16" and settings.zero_stage > 0 else torch.float32


def engine_config(settings: LearnerConfig, *, pin_memory: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. The caller owns the divisor, the accumulation, the rate and the schedule.

    Gradients are summed over ranks in FP32. Stage 3 can only average them, so there `loss_factor` undoes it.
    """
    stage = settings.zero_stage
    host = {"device": "cpu", "pin_memory": pin_memory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Stage 0 clips in `apply_update`: there the engine gives no norm.
        "gradient_clipping": min(settings.grad_clip, LARGEST_NORM) if stage > 0 else 0.0,
        "gradient_allreduce_op": "sum" if stage < 3 else "mean",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": compute_dtype(settings) == torch.bfloat16},
        # torch's AdamW: the same arithmetic as the embedded learner, and nothing to compile.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": PERSISTENT,
            **({"offload_optimizer": host} if settings.offload_optimizer else {}),
            **({"offload_param": host} if settings.offload_parameters else {}),
        },
    }


def loss_factor(settings: LearnerConfig, ranks: int) -> int:
    """What a loss is multiplied by, so that what the engine makes of the ranks' gradients is their sum."""
    return ranks if settings.zero_stage == 3 else 1


def shard(model: nn.Module, settings: LearnerConfig, *, device: str) -> None:
    """At stage 3, cut a model on the CPU into the ranks' shards on their devices, a parameter at a time.

    An engine would do so as well, once it has the whole model on its device.
    """
    if settings.zero_stage < 3:
        return
    config = engine_config(settings, pin_memory=torch.device(device).type == "cuda")
    with quiet():
        import_deepspeed(device).zero.Init(module=model, config_dict_or_path=config, dtype=compute_dtype(settings))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what DeepSpeed prints past its logger."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class ZeroEngine:
    """A policy under a DeepSpeed engine, with AdamW."""

    def __init__(self, policy: Policy, settings: LearnerConfig, *, device: str) -> None:
        self.policy = policy
        self.settings = settings
        deepspeed = import_deepspeed(device)
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
        )
        config = engine_config(settings, pin_memory=torch.device(device).type == "cuda")
        with quiet():
            self.engine, *_ = deepspeed.initialize(model=policy, optimizer=self.optimizer, config=config)
        # At stage 0 it would sum the gradients inside `step`, too late to refuse the update.
        self.engine.enable_backward_allreduce = settings.zero_stage > 0

    def apply_update(self, rate: float) -> float | None:
        """Sum the gradients over ranks, clip them and update. Returns their norm before clipping.

        None where it is not finite, on every rank alike: then nothing but the gradients, which are gone, has changed.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.settings.zero_stage > 0:
            self.engine.step()
            return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else None
        self.engine.buffered_allreduce_fallback(elements_per_buffer=BUCKET)
        norm = float(nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.grad_clip))
        if not math.isfinite(norm):
            self.engine.zero_grad()
            return None
        self.engine.step()
        return norm


def frozen_engine(policy: Policy, settings: LearnerConfig, *, device: str) -> Any:
    """Something to call for the scores of a frozen policy: sharded like the learner's at stage 3, else the policy."""
    if settings.zero_stage < 3:
        return policy.to(device)
    config = engine_config(settings, pin_memory=torch.device(device).type == "cuda")
    with quiet():
        engine, *_ = import_deepspeed(device).initialize(model=policy, config=config)
    return engine


def poison(logprobs: Tensor) -> Tensor:
    """A loss whose gradient is no number anywhere, so that the engine refuses the update on all ranks and tidies up."""
    return logprobs.sum() * math.nan
