"""Rules that span keys, checked before any model loads. Each problem is one line: the keys, the numbers, the fix."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from grpo_lab.config import (
    BENCHMARKS,
    AgroConfig,
    ArithmeticConfig,
    ConfigError,
    DatasetConfig,
    GgpoConfig,
    GrpoConfig,
    MixtureConfig,
    TrainConfig,
)
from grpo_lab.schedule import Schedule
from grpo_lab.validation_engines import engine_problems, engine_warnings
from grpo_lab.validation_hand_off import hand_off_problems, hand_off_warnings

CHOICES = {
    "objective.zero_variance": ("filter", "mask", "keep"),
    "objective.mask_divisor": ("all", "kept"),
    "objective.advantage": ("gg", "rg", "centred"),
    "objective.clip_center": ("one", "pi_k"),
    "objective.kl_clamp": ("none", "verl"),
    "objective.aggregation": ("token_mean", "sequence_mean", "constant_length"),
    "rollout.engine": ("hf", "vllm"),
    "rollout.vllm.mode": ("worker", "in_process", "server"),
    "rollout.vllm.dtype": ("fp32", "bf16"),
    "learner.engine": ("torch_local", "deepspeed"),
    "learner.precision": ("fp32", "bf16"),
    "learner.lr_schedule": ("constant", "linear"),
    "dataset.verifier": ("math", "exact"),
    "dataset.on_error": ("stop", "skip"),
    "evaluation.hand_off": ("inline", "background", "slurm"),
    "tracking.wandb": ("auto", "online", "offline", "disabled"),
    "tracking.view": ("auto", "live", "plain", "off"),
}
AT_LEAST_ONE = (
    "groups_per_minibatch",
    "schedule.v",
    "schedule.i",
    "schedule.updates",
    "schedule.epochs",
    "collection.prompts_per_batch",
    "collection.max_batches",
    "rollout.max_prompt_tokens",
    "rollout.max_response_tokens",
    "rollout.max_rows",
    "rollout.vllm.tensor_parallel",
    "rollout.vllm.kv_cache_gb",
    "rollout.vllm.max_model_len",
    "learner.micro_batch_tokens",
    "learner.logit_chunk",
    "evaluation.every",
    "evaluation.problems",
    "evaluation.n",
    "evaluation.max_tokens",
    "checkpoint.every",
    "checkpoint.keep",
    "tracking.rollouts_every",
    "tracking.block",
    "verifier.workers",
    "hardware.threads",
    "hardware.ranks",
    "hardware.nodes",
)
# What the parts of a mixture do not have by themselves.
OF_THE_MIXTURE = (
    "template",
    "system_prompt",
    "chat",
    "verifier",
    "on_error",
    "held_out",
    "test_path",
    "test_split",
    "expected_test_rows",
)
REFERENCE_FAMILIES = ("agro", "ggpo")


def _lookup(config: TrainConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def validate(config: TrainConfig) -> list[str]:
    """Check a run's configuration. Returns warnings, one line each.

    Raises:
        ConfigError: all problems found, one line each.
    """
    problems = [*_value_problems(config), *_batch_problems(config), *_objective_problems(config)]
    problems += [*engine_problems(config), *hand_off_problems(config), *_source_problems(config)]
    if not problems:
        problems = list(_schedule_problems(config))
    if problems:
        raise ConfigError("\n".join(problems))
    return list(_warnings(config))


def _value_problems(config: TrainConfig) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        value = _lookup(config, key)
        if value is not None and value not in allowed:
            yield f"{key}={value} is not known: choose {' or '.join(allowed)}"
    for key in AT_LEAST_ONE:
        value = _lookup(config, key)
        if isinstance(value, int) and value < 1:
            yield f"{key}={value} must be at least 1"
    learner = config.learner
    if not (math.isfinite(learner.lr) and learner.lr >= 0):
        yield f"learner.lr={learner.lr} must be a number from 0"
    if len(learner.betas) != 2 or not all(0 <= beta < 1 for beta in learner.betas):
        yield f"learner.betas={learner.betas} must be two numbers in [0, 1)"
    if not 0 <= learner.weight_decay < math.inf:
        yield f"learner.weight_decay={learner.weight_decay} must be a number of at least 0"
    if not learner.grad_clip > 0:
        yield f"learner.grad_clip={learner.grad_clip} must be above 0 (.inf for none)"
    if learner.warmup_updates < 0:
        yield f"learner.warmup_updates={learner.warmup_updates} must be at least 0"
    if not 0 <= config.seed < 2**32:
        yield f"seed={config.seed} must lie in 0 .. 2^32 - 1"
    if not 0 < config.verifier.timeout < math.inf:
        yield f"verifier.timeout={config.verifier.timeout} must be a number of seconds above 0"
    if not 0 <= config.dataset.held_out <= 1:
        yield f"dataset.held_out={config.dataset.held_out} must lie in [0, 1] (1 makes an evaluation set of a data set)"
    yield from _unread_keys(config.dataset)
    if "{question}" not in config.dataset.template:
        yield f"dataset.template={config.dataset.template!r} must hold {{question}}"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", config.hardware.device):
        yield f"hardware.device={config.hardware.device} is not known: choose cpu, cuda or cuda:0"


def _batch_problems(config: TrainConfig) -> Iterator[str]:
    if config.group_size < 2:
        yield f"group_size={config.group_size} must be at least 2: every objective compares the responses of a group"
    rollout = config.rollout
    if not rollout.temperature > 0:
        yield (
            f"rollout.temperature={rollout.temperature} must be above 0 in training "
            "(evaluation.temperature=0 is greedy)"
        )
    if rollout.top_p != 1 or rollout.top_k != 0:
        yield (
            f"rollout.top_p={rollout.top_p} rollout.top_k={rollout.top_k}: training samples the whole distribution "
            "(top_p=1, top_k=0), else behaviour log-probs are of another policy; evaluation.top_p and .top_k are free"
        )
    if rollout.max_rows < config.group_size:
        yield f"rollout.max_rows={rollout.max_rows} must hold one group of group_size={config.group_size}"
    if config.evaluation.every is not None or config.evaluation.checkpoints:
        yield from _evaluation_problems(config)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if config.learner.micro_batch_tokens < longest:
        yield (
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens} must hold one prompt and one response: "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}"
        )


def _evaluation_problems(config: TrainConfig) -> Iterator[str]:
    evaluation, rollout = config.evaluation, config.rollout
    if not evaluation.k or min(evaluation.k) < 1 or max(evaluation.k) > evaluation.n:
        yield f"evaluation.k={list(evaluation.k)} must name values from 1 to evaluation.n={evaluation.n}"
    if rollout.max_rows < evaluation.n:
        yield f"rollout.max_rows={rollout.max_rows} must hold the evaluation.n={evaluation.n} responses of a problem"
    if evaluation.temperature is not None and evaluation.temperature < 0:
        yield f"evaluation.temperature={evaluation.temperature} must be at least 0"
    if evaluation.top_k is not None and evaluation.top_k < 0:
        yield f"evaluation.top_k={evaluation.top_k} must be at least 0 (0 is off)"
    if evaluation.top_p is not None and not 0 < evaluation.top_p <= 1:
        yield f"evaluation.top_p={evaluation.top_p} must lie in (0, 1]"
    known = {*BENCHMARKS, config.dataset.name}
    for name in evaluation.benchmarks:
        if name not in known:
            yield f"evaluation.benchmarks names {name!r}, which is not known: choose {', '.join(sorted(known))}"
    for name in evaluation.paths:
        if name not in known:
            yield f"evaluation.paths.{name} names no benchmark: choose {', '.join(sorted(known))}"
    if len(set(evaluation.benchmarks)) < len(evaluation.benchmarks):
        yield f"evaluation.benchmarks={list(evaluation.benchmarks)} names one twice"


def _unread_keys(dataset: DatasetConfig) -> Iterator[str]:
    """Keys of a data set that its kind does not read, set to something."""
    if isinstance(dataset, ArithmeticConfig):
        yield from _set_in_vain(dataset, "dataset", ("held_out", "on_error"), "made here, in a split of its own")
    if not isinstance(dataset, MixtureConfig):
        return
    for index, part in enumerate(dataset.parts):
        yield from _set_in_vain(part, f"dataset.parts.{index}", OF_THE_MIXTURE, "part of a mixture, which has its own")
    if dataset.test_set is None and dataset.test_path is not None:
        yield f"dataset.test_path={dataset.test_path} is a copy of dataset.test_set, which is null: name that set"


def _set_in_vain(dataset: DatasetConfig, where: str, keys: Sequence[str], why: str) -> Iterator[str]:
    plain = type(dataset)()
    for key in keys:
        if (value := getattr(dataset, key)) != getattr(plain, key):
            yield f"{where}.{key}={value} has no effect on {dataset.name}, which is {why}: leave it out"


def _objective_problems(config: TrainConfig) -> Iterator[str]:
    objective = config.objective
    beta = getattr(objective, "beta", 0.0)
    if isinstance(objective, AgroConfig | GgpoConfig) and not beta > 0:
        yield f"objective.beta={beta} must be above 0 for {objective.name}"
    if isinstance(objective, GgpoConfig):
        if objective.token_clip is not None and not objective.token_clip > 0:
            yield f"objective.token_clip={objective.token_clip} must be above 0 (null for none)"
        if objective.token_clip is not None and objective.reward_only:
            yield "objective.token_clip clips the log ratio, which objective.reward_only=true leaves out: drop one"
    if isinstance(objective, GrpoConfig):
        yield from _grpo_problems(objective)


def _grpo_problems(objective: GrpoConfig) -> Iterator[str]:
    if not objective.beta >= 0:
        yield f"objective.beta={objective.beta} must be at least 0"
    if not (0 <= objective.eps_low <= 1 and objective.eps_high >= 0):
        yield (
            f"objective.eps_low={objective.eps_low} objective.eps_high={objective.eps_high}: eps_low lies in [0, 1], "
            "eps_high is at least 0"
        )
    if objective.dual_clip is not None and not 1 + objective.eps_high < objective.dual_clip < math.inf:
        yield (
            f"objective.dual_clip={objective.dual_clip} must be a number above 1 + objective.eps_high = "
            f"{1 + objective.eps_high:g} (null for none)"
        )
    if objective.clip_center == "pi_k" and objective.dual_clip is not None:
        yield (
            f"objective.clip_center=pi_k is RG's Eq. 6, which has no dual clip: set objective.dual_clip=null "
            f"(it is {objective.dual_clip:g})"
        )
    if (objective.tis_block is None) != (objective.tis_cap is None):
        yield (
            f"objective.tis_block={objective.tis_block} and objective.tis_cap={objective.tis_cap} go together: set "
            "both or neither"
        )
    if objective.tis_block is not None and objective.tis_block < 1:
        yield f"objective.tis_block={objective.tis_block} must be at least 1"
    if objective.tis_cap is not None and not objective.tis_cap > 0:
        yield f"objective.tis_cap={objective.tis_cap} must be above 0 (.inf for plain importance weights)"
    if objective.tis_block is not None and objective.clip_center == "pi_k":
        yield "objective.tis_block divides by pi_old, so objective.clip_center must be one"


def _source_problems(config: TrainConfig) -> Iterator[str]:
    if config.source != "pool":
        if config.pool.path is not None:
            yield f"pool.path={config.pool.path} is read with source=pool alone: add it, or leave pool.path out"
        return
    if config.pool.path is None:
        yield "source=pool needs pool.path=<folder>, which python -m grpo_lab.pool out=<folder> makes"
    if config.schedule.overlap:
        yield "schedule.overlap=true samples beside learning, and source=pool samples nothing: drop one"
    if config.schedule.epochs is not None:
        yield (
            f"schedule.epochs={config.schedule.epochs} counts passes over prompts, and source=pool uses each group of "
            "the pool once: set schedule.updates instead"
        )
    if config.schedule.t_ref == "epoch":
        yield "schedule.t_ref=epoch waits for a pass over the prompts, which source=pool has not: set a number or null"


def _schedule_problems(config: TrainConfig) -> Iterator[str]:
    try:
        schedule = Schedule.from_config(config)
    except ConfigError as error:
        yield str(error)
        return
    if schedule.v % schedule.minibatches_per_collection:
        yield (
            f"schedule.minibatches_per_collection={schedule.minibatches_per_collection} must divide "
            f"schedule.v={schedule.v}: a collection is sampled by one set of weights"
        )
    if isinstance(schedule.t_ref, int) and schedule.t_ref < 1:
        yield f"schedule.t_ref={schedule.t_ref} must be at least 1 (null for a fixed reference)"
    if config.schedule.updates is None and config.schedule.epochs is None:
        yield "schedule.updates and schedule.epochs are both null: one of them is the budget"
    if schedule.updates is None and config.learner.lr_schedule == "linear":
        yield "learner.lr_schedule=linear needs a budget in updates: set schedule.updates instead of schedule.epochs"
    needed = schedule.minibatches_per_collection * config.groups_per_minibatch
    batch = config.collection.prompts_per_batch
    if not schedule.offline and batch is not None and batch * config.collection.max_batches < needed:
        yield (
            f"collection.prompts_per_batch={batch} x collection.max_batches={config.collection.max_batches} = "
            f"{batch * config.collection.max_batches} groups cannot fill a collection of {needed}"
        )


def _warnings(config: TrainConfig) -> Iterator[str]:
    schedule, objective = Schedule.from_config(config), config.objective
    if schedule.t_ref is not None and not objective.reads_reference:
        yield f"schedule.t_ref={config.schedule.t_ref} has no effect: {objective.name} as set here uses no reference"
    if objective.family in REFERENCE_FAMILIES and objective.reads_reference and isinstance(schedule.t_ref, int):
        period = schedule.v * schedule.i
        if schedule.t_ref < period:
            yield (
                f"schedule.t_ref={schedule.t_ref} is shorter than a sync period of {period} updates: "
                f"{objective.name} is then regularised to a policy newer than the one that sampled"
            )
        elif schedule.t_ref % period:
            yield (
                f"schedule.t_ref={schedule.t_ref} is no multiple of the sync period of {period} updates: the "
                "reference changes inside collections"
            )
    yield from engine_warnings(config)
    yield from hand_off_warnings(config)
    if objective.zero_variance != "mask" and objective.mask_divisor != "all":
        yield f"objective.mask_divisor={objective.mask_divisor} has no effect unless objective.zero_variance=mask"
    if config.evaluation.every is not None and schedule.updates and config.evaluation.every > schedule.updates:
        yield (
            f"evaluation.every={config.evaluation.every} is beyond the budget of {schedule.updates} updates: scores at "
            "the start and the end only"
        )
