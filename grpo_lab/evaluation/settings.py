"""Which configuration an evaluation has: a run's, with a few keys replaced, or the composed one; on one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.composition import load_config
from grpo_lab.config import ConfigError, PoolConfig, TrainConfig
from grpo_lab.runs import CONFIG_FILE
from grpo_lab.validation import validate

# Words of the command that are not keys of a run. Some are lists: run=a,b or run=[a,b].
OWN = ("run", "checkpoint", "out", "row")
# What a hardware preset sets, besides what only learning reads.
PRESET = (
    "hardware",
    "verifier",
    "rollout.engine",
    "rollout.max_rows",
    "rollout.url",
    "rollout.vllm",
    "learner.precision",
)
# What may be typed beside run=.
MAY_SET = (
    "evaluation.",
    "hardware.",
    "verifier.",
    "rollout.engine",
    "rollout.max_rows",
    "rollout.url",
    "rollout.vllm.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command was asked for, besides keys. `checkpoints` empty: every saved one. `row`: a file for the scores
    of the one checkpoint, as training reads them."""

    runs: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    out: str | None = None
    row: str | None = None


def take_request(words: Sequence[str]) -> tuple[Request, list[str]]:
    """The command's own words read, and the rest, which are Hydra's.

    Raises:
        ConfigError: nothing to evaluate was named, or a key that a run does not let go of.
    """
    given: dict[str, tuple[str, ...]] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in OWN:
            given[key] = () if value == "null" else _listed(value)
        elif equals and key == "lighteval":
            rest.append(f"evaluation.{word}")
        else:
            rest.append(word)
    for key, what in (("out", "folder"), ("row", "file")):
        if len(given.get(key, ())) > 1:
            raise ConfigError(f"{key}={','.join(given[key])} must be one {what}")
    request = Request(
        runs=given.get("run", ()),
        checkpoints=given.get("checkpoint", ()),
        out=next(iter(given.get("out", ())), None),
        row=next(iter(given.get("row", ())), None),
    )
    if len(set(request.runs)) < len(request.runs):
        raise ConfigError(f"run={','.join(request.runs)} names a folder twice")
    return request, rest


def check_request(request: Request, overrides: Sequence[str]) -> None:
    """Whether there is something to evaluate, and no key was typed that would be another run's.

    Raises:
        ConfigError: a line about the first fault.
    """
    if request.row is not None and not (len(request.runs) == len(request.checkpoints) == 1):
        raise ConfigError(f"row={request.row} takes the scores of one model: name one run= and one checkpoint=")
    if not request.runs:
        if not request.checkpoints:
            raise ConfigError("nothing to evaluate: name run=<run folder>, or checkpoint=<folder, hub id or base>")
        for override in overrides:
            if _key(override) in ("resume", "run_dir"):
                raise ConfigError(f"{_key(override)}= is of training: run=<run folder> evaluates a run")
        return
    if request.out is not None and len(request.runs) > 1:
        raise ConfigError("out= is the folder of one model or run: leave it out with several runs")
    for override in overrides:
        key = _key(override)
        if key != "hardware" and not key.startswith(MAY_SET):
            raise ConfigError(
                f"{key}= cannot be combined with run=, which takes its settings from the run; evaluation.*, "
                "verifier.*, hardware, rollout.engine, rollout.url, rollout.vllm.* and rollout.max_rows may change"
            )


def run_settings(run_dir: Path, composed: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """A run's configuration with the typed keys at their composed values; `hardware=NAME` stands for all it sets.

    Raises:
        ConfigError: there is no such run, or a setting cannot work.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"run={run_dir} is no run folder: it holds no {CONFIG_FILE}")
    config = load_config(run_dir / CONFIG_FILE)
    keys = [_key(override) for override in overrides]
    for key in (*(PRESET if "hardware" in keys else ()), *(key for key in keys if key != "hardware")):
        _copy(composed, config, key)
    return single_process(config)


def single_process(config: TrainConfig) -> TrainConfig:
    """The configuration on one process that only evaluates, checked.

    Raises:
        ConfigError: all problems found, one line each.
    """
    config = on_one_process(config)
    # The rules about evaluation, and the room that its responses need, count whether or not the run itself evaluated.
    config.evaluation.every = config.evaluation.every or 1
    validate(config)
    return config


def on_one_process(config: TrainConfig) -> TrainConfig:
    """A copy of the configuration for one process that samples and does not learn."""
    config = copy.deepcopy(config)
    config.source, config.pool = "policy", PoolConfig()
    config.hardware = replace(config.hardware, ranks=1, nodes=1)
    config.learner = replace(
        config.learner, engine="torch_local", zero_stage=0, offload_optimizer=False, offload_parameters=False
    )
    config.schedule = replace(config.schedule, overlap=False)
    config.evaluation = replace(config.evaluation, checkpoints=False)
    vllm = config.rollout.vllm
    if vllm.mode == "in_process" and vllm.tensor_parallel > 1:
        # In process its parts would be ranks of the run; a worker starts them itself.
        config.rollout.vllm = replace(vllm, mode="worker", sleep=False)
    return config


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _listed(value: str) -> tuple[str, ...]:
    parts = [part.strip().strip("'\"") for part in value.strip().removeprefix("[").removesuffix("]").split(",")]
    return tuple(part for part in parts if part)


def _copy(source: Any, target: Any, key: str) -> None:
    *path, last = key.split(".")
    for part in path:
        source, target = _member(source, part), _member(target, part)
    if isinstance(target, dict):
        target[last] = source[last]
    else:
        setattr(target, last, copy.deepcopy(getattr(source, last)))


def _member(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)
