"""What the command is told besides the run's own keys, and the configuration that it makes a pool with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.evaluation.settings import on_one_process
from grpo_lab.validation import validate

OWN = ("out", "groups", "checkpoint", "import")
OF_TRAINING = ("resume", "run_dir", "source", "pool.path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`groups` None: as many as the run's budget takes. `checkpoint` None: the run's initial model. `file`: responses
    to import; None: sample them."""

    out: str | None = None
    groups: int | None = None
    checkpoint: str | None = None
    file: str | None = None


def take_request(words: Sequence[str]) -> tuple[Request, list[str]]:
    """The command's own words read, and the rest, which are Hydra's.

    Raises:
        ConfigError: `groups` is no number from 1.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in OWN:
            if value not in ("null", ""):
                given[key] = value
        else:
            rest.append(word)
    groups = given.get("groups")
    if groups is not None and not (groups.isdecimal() and int(groups) > 0):
        raise ConfigError(f"groups={groups} must be a number from 1")
    return (
        Request(
            out=given.get("out"),
            groups=None if groups is None else int(groups),
            checkpoint=given.get("checkpoint"),
            file=given.get("import"),
        ),
        rest,
    )


def check_request(request: Request, overrides: Sequence[str]) -> Path:
    """The folder that is to become the pool.

    Raises:
        ConfigError: words that do not go together, or a folder that is there already.
    """
    if request.out is None:
        raise ConfigError("name the folder of the pool: out=<folder>")
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in OF_TRAINING:
            raise ConfigError(f"{key}= is of training: leave it out of python -m grpo_lab.pool")
    if request.file is not None and request.groups is not None:
        raise ConfigError("groups= says how many to sample, and import= takes those of its file: drop one")
    if request.file is not None and not Path(request.file).is_file():
        raise ConfigError(f"import={request.file} is no file: point it at JSON lines of prompts and responses")
    out = Path(request.out)
    if out.exists():
        raise ConfigError(f"out={out} is there already: name another folder, or remove it")
    return out


def settings(request: Request, config: TrainConfig) -> tuple[TrainConfig, int]:
    """The configuration of the pool's making, on one process, and the updates behind the weights that it begins with.

    Raises:
        ConfigError: a setting that cannot work, or no such checkpoint.
    """
    config = on_one_process(config)
    # A pool evaluates nothing.
    config.evaluation.every = None
    version = 0
    if request.checkpoint is not None:
        folder = Path(request.checkpoint)
        try:
            version = int(json.loads((folder / "manifest.json").read_text())["update"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"checkpoint={folder} is no checkpoint, it holds no manifest.json that can be read: name "
                "<run>/checkpoints/update_..., or set model.path= to the folder of a model"
            ) from error
        config.model.path = str(folder / "model")
    validate(config)
    return config, version


def groups_wanted(request: Request, config: TrainConfig) -> int:
    """How many groups to sample.

    Raises:
        ConfigError: neither `groups` nor a budget in updates says it.
    """
    if request.groups is not None:
        return request.groups
    schedule = config.schedule
    if schedule.updates is None or schedule.epochs is not None:
        raise ConfigError("say how many groups to sample: groups=<number>, or schedule.updates=<the run's budget>")
    return -(-schedule.updates // schedule.i) * config.groups_per_minibatch
