"""Which run: a new folder with its configuration, or one to go on in."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from grpo_lab.composition import load_config, save_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.schedule import Schedule
from grpo_lab.validation import validate

CONFIG_FILE = "config.yaml"
# Bytes of metrics.jsonl that surely hold its last line.
TAIL_BYTES = 65536
# What a resumed run may change: its length, and over how many ranks it goes on.
RESUME_MAY_SET = ("resume", "schedule.updates", "hardware.ranks")
# A sweep over runs to go on with: a preset of hardware may bring its launcher.
RESUMED_SWEEP_MAY_SET = ("resume", "hardware")


def choose_folder(config: TrainConfig, overrides: Sequence[str]) -> Path:
    """The run's folder: the one to go on in, or one that is made. Nothing is written into it.

    `config` is as composed, from `overrides` among others.

    Raises:
        ConfigError: a setting that cannot work, or a folder that cannot be used.
    """
    if config.resume is not None:
        _refuse_beside_resume(overrides, RESUME_MAY_SET)
        run_dir = Path(config.resume)
        load_config(run_dir / CONFIG_FILE)
        return run_dir
    validate(config)
    return _new_run_dir(config)


def settle(config: TrainConfig, overrides: Sequence[str], run_dir: Path) -> TrainConfig:
    """The run's settings, which its folder holds from here on. The folder is the caller's alone.

    Raises:
        ConfigError: a setting that cannot work, or a folder that holds another run.
    """
    if config.resume is None:
        if holds_a_run(run_dir):
            raise ConfigError(
                f"run_dir={run_dir} holds a run already: continue it with resume={run_dir}, or name another"
            )
        save_config(config, run_dir / CONFIG_FILE)
        return config
    saved = load_config(run_dir / CONFIG_FILE)
    before = copy.deepcopy(saved)
    if any(override.startswith("schedule.updates=") for override in overrides):
        _lengthen(saved, config.schedule.updates, reached=last_update(run_dir))
    if any(override.startswith("hardware.ranks=") for override in overrides):
        saved.hardware.ranks = config.hardware.ranks
        validate(saved)
    if saved != before:
        # Kept, so that resuming once more does not fall back to the old values.
        save_config(saved, run_dir / CONFIG_FILE)
    return saved


def resumed_job(config: TrainConfig, overrides: Sequence[str]) -> tuple[TrainConfig, Path]:
    """The run that a job of a sweep over `resume=` goes on with: its own settings, and its folder.

    Raises:
        ConfigError: the folder holds no settings, or others were typed.
    """
    assert config.resume is not None
    _refuse_beside_resume(overrides, RESUMED_SWEEP_MAY_SET)
    return load_config(Path(config.resume) / CONFIG_FILE), Path(config.resume)


def _refuse_beside_resume(overrides: Sequence[str], allowed: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key not in allowed:
            raise ConfigError(
                f"{key}= cannot be combined with resume=, which takes its settings from the run; only "
                f"{' and '.join(f'{each}=' for each in allowed if each != 'resume')} may change"
            )


def _lengthen(saved: TrainConfig, updates: int | None, *, reached: int) -> None:
    """Give a saved configuration another budget.

    Raises:
        ConfigError: the run's budget or rate depends on the old one, or the new one is none, or less than the run has
            `reached`.
    """
    if updates is not None and updates < reached:
        raise ConfigError(f"schedule.updates={updates} is less than the {reached} that the run has logged: name more")
    if saved.schedule.epochs is not None:
        raise ConfigError(
            f"schedule.updates= has no effect: the run's budget is schedule.epochs={saved.schedule.epochs}"
        )
    if saved.learner.lr_schedule != "constant":
        raise ConfigError(
            f"schedule.updates= cannot change: the run's learner.lr_schedule={saved.learner.lr_schedule} ends at "
            f"update {saved.schedule.updates}, and another end would make the rate jump"
        )
    saved.schedule.updates = updates
    validate(saved)


def _new_run_dir(config: TrainConfig) -> Path:
    """Make the run's folder: `run_dir`, or one under outputs/ named after what is run."""
    if config.run_dir is not None:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir
    schedule = Schedule.from_config(config)
    what = f"{config.model.name}_{config.dataset.name}_{config.objective.name}_{schedule.title}"
    name = f"{datetime.now():%Y%m%d-%H%M%S}_{what}_seed{config.seed}"
    for suffix in ("", *(f"-{k}" for k in range(2, 1000))):
        run_dir = Path("outputs") / f"{name}{suffix}"
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        return run_dir
    raise ConfigError(f"outputs/{name} and its numbered siblings exist: name the folder with run_dir=")


def holds_a_run(run_dir: Path) -> bool:
    """Whether anything was logged there; a start that failed over a setting leaves the folder free."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def last_update(run_dir: Path) -> int:
    """The last one logged; 0 where none is."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
            # An evaluated checkpoint's update may lie far behind.
            if row["kind"] != "checkpoint":
                return int(row["update"])
        except (ValueError, KeyError, TypeError):
            # The last line may be half written, and the first one cut.
            continue
    return 0
