"""Train: `python -m grpo_lab.train [group=option] [key=value]`, or `resume=<run folder>` to go on where a run stopped.

Composes and checks the configuration, builds the parts of a run in the order that data flows through them, and hands
them to the loop.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.config import ConfigError, TrainConfig, conf_dir, load_config, register, save_config, to_config
from grpo_lab.schedule import Schedule
from grpo_lab.validation import validate

CONFIG_FILE = "config.yaml"
# What a resumed run may change: its length.
RESUME_MAY_SET = ("resume", "schedule.updates")

# The user's own switch for whole tracebacks, read before `main` sets it for Hydra's sake.
HYDRA_TRACEBACK = "HYDRA_FULL_ERROR"
WANTS_TRACEBACK = os.environ.get(HYDRA_TRACEBACK) == "1"

register()


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    # Hydra would print an exception itself; here it comes through, to be one line or a whole traceback.
    os.environ[HYDRA_TRACEBACK] = "1"
    try:
        _hydra_main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if WANTS_TRACEBACK or not _is_foreseen(error):
            raise
        print(f"error: {_as_lines(error)}", file=sys.stderr)
        sys.exit(2)


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def _hydra_main(composed: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        try:
            _run_in_child(to_config(composed), Path(hydra_config.runtime.output_dir))
        except ConfigError as error:
            # Hydra raises only the first failure of a sweep, at its end: each is to be seen.
            print(f"error: {error}", file=sys.stderr)
            raise
        return
    config, run_dir, resuming = _choose_run(composed, hydra_config.overrides.task)
    train(config, run_dir, resuming=resuming)


class JobError(RuntimeError):
    """A job of a sweep ended with an error, which it has printed itself."""


def _is_foreseen(error: Exception) -> bool:
    """Whether an error explains itself: ours, or one of composition."""
    return type(error).__module__.startswith(("grpo_lab", "__main__")) or isinstance(
        error, HydraException | OmegaConfBaseException
    )


def _as_lines(error: Exception) -> str:
    """An error's text; what Hydra spreads over lines and causes, on one."""
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return str(error)
    cause = error.__cause__
    parts = str(error).splitlines() + ([str(cause).splitlines()[0]] if cause is not None and str(cause) else [])
    return " ".join(" ".join(parts).split())


def _choose_run(composed: DictConfig, overrides: Sequence[str]) -> tuple[TrainConfig, Path, bool]:
    """The configuration, the run folder (made, and holding the configuration), and whether the run is resumed."""
    config = to_config(composed)
    if config.resume is not None:
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if key not in RESUME_MAY_SET:
                raise ConfigError(
                    f"{key}= cannot be combined with resume=, which takes its settings from the run; only "
                    "schedule.updates= may change"
                )
        run_dir = Path(config.resume)
        saved = load_config(run_dir / CONFIG_FILE)
        if any(override.startswith("schedule.updates=") for override in overrides):
            _lengthen(saved, config.schedule.updates)
            # Kept, so that resuming once more does not fall back to the old budget.
            save_config(saved, run_dir / CONFIG_FILE)
        return saved, run_dir, True
    validate(config)
    run_dir = _new_run_dir(config)
    save_config(config, run_dir / CONFIG_FILE)
    return config, run_dir, False


def _lengthen(saved: TrainConfig, updates: int | None) -> None:
    """Give a saved configuration another budget.

    Raises:
        ConfigError: the run's budget or rate depends on the old one, or the new one is none.
    """
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
    """Make the run's folder: `run_dir`, or one under outputs/ named after what is run.

    Raises:
        ConfigError: `run_dir` holds a run already.
    """
    if config.run_dir is not None:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if _holds_a_run(run_dir):
            raise ConfigError(
                f"run_dir={run_dir} holds a run already: continue it with resume={run_dir}, or name another"
            )
        return run_dir
    schedule = Schedule.from_config(config)
    what = f"{config.model.name}_{config.dataset.name}_{config.objective.name}_v{schedule.v}_i{schedule.i}"
    name = f"{datetime.now():%Y%m%d-%H%M%S}_{what}_seed{config.seed}"
    for suffix in ("", *(f"-{k}" for k in range(2, 1000))):
        run_dir = Path("outputs") / f"{name}{suffix}"
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:
            continue
        return run_dir
    raise ConfigError(f"outputs/{name} and its numbered siblings exist: name the folder with run_dir=")


def _holds_a_run(run_dir: Path) -> bool:
    """Whether anything was logged there; a start that failed over a setting leaves the folder free."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def _run_in_child(config: TrainConfig, run_dir: Path) -> None:
    """One job of a sweep, in a process of its own, so that nothing of one job is left to the next."""
    if config.resume is not None:
        raise ConfigError("resume= goes on with one run and makes no sweep: leave out -m")
    validate(config)
    run_dir = Path(config.run_dir) if config.run_dir is not None else run_dir
    if _holds_a_run(run_dir):
        raise ConfigError(f"{run_dir} holds a run already: choose another hydra.sweep.dir, or resume that run")
    run_dir.mkdir(parents=True, exist_ok=True)
    if config.tracking.group is None:
        config.tracking.group = run_dir.parent.name
    save_config(config, run_dir / CONFIG_FILE)
    command = [sys.executable, "-m", "grpo_lab.train", f"resume={shlex.quote(str(run_dir))}"]
    environment = {**os.environ, HYDRA_TRACEBACK: str(int(WANTS_TRACEBACK))}
    process = subprocess.Popen(command, env=environment)

    def forward(_signal: int, _frame: FrameType | None) -> None:
        process.terminate()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, forward)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The job was told as well (by the terminal, or by `forward`) and ends tidily; wait for it.
        process.wait()
        raise
    if code != 0:
        raise JobError(f"the job in {run_dir} ended with exit code {code}")


def train(config: TrainConfig, run_dir: Path, *, resuming: bool) -> None:
    """Run one configuration to its end, in `run_dir`, from its newest whole checkpoint if it is resumed.

    Raises:
        ConfigError: a setting, data set, model or checkpoint that cannot be used.
    """
    warnings = validate(config)
    _set_up_process(config)
    # Only now the heavy libraries: a wrong setting has failed by here.
    from grpo_lab import checkpoint
    from grpo_lab.build import build_loop
    from grpo_lab.tracking import Tracker, forward_warnings

    folder, damaged = _find_checkpoint(config, run_dir) if resuming else (None, [])
    saved = None if folder is None else checkpoint.load_state(folder)
    at = None if not resuming else -1 if saved is None else saved["run"]["update"]
    tracker = Tracker.open(run_dir, config, total_updates=Schedule.from_config(config).updates, resume_from=at)
    status, loop = "failed", None
    forwarding = forward_warnings(tracker)
    try:
        if saved is not None:
            tracker.load_state(saved["tracker"])
        elif resuming:
            tracker.start_afresh()
        for line in (*warnings, *damaged):
            tracker.warning(line)
        loop = build_loop(config, run_dir, tracker)
        if saved is not None and folder is not None:
            loop.learner.load(folder)
            loop.restore(saved)
            tracker.message(f"resumed from {folder}")
        loop.run()
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        tracker.finish(status=status, next_command=_next_command(config, run_dir, status))
        forwarding.close()
        if loop is not None:
            loop.close()


def _find_checkpoint(config: TrainConfig, run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint and warnings about damaged ones; None only where a run was killed before its first.

    Raises:
        ConfigError: starting over would erase what the run has logged.
    """
    from grpo_lab import checkpoint

    checkpoint.tidy(run_dir)
    folder, damaged = checkpoint.newest(run_dir)
    if folder is None and _holds_a_run(run_dir):
        if damaged:
            raise ConfigError(f"no checkpoint of {run_dir} is whole: {'; '.join(damaged)}")
        if config.checkpoint.every is None:
            raise ConfigError(f"{run_dir} has no checkpoint to go on from (checkpoint.every was null): start a new run")
    return folder, damaged


def _next_command(config: TrainConfig, run_dir: Path, status: str) -> str:
    if status != "finished":
        return f"python -m grpo_lab.train resume={run_dir}"
    if config.objective.name != "ggpo":
        return "python -m grpo_lab.train objective=ggpo"
    return "python -m grpo_lab.train -m objective=grpo,agro,ggpo schedule.v=8,32,128"


def _set_up_process(config: TrainConfig) -> None:
    """Threads as configured, and SIGTERM (a scheduler's notice) as an interruption that ends tidily."""
    # Waiting threads that spin starve each other on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(config.hardware.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers

    torch.set_num_threads(config.hardware.threads)
    # Bars for reading and writing weights would tear the live view.
    transformers.utils.logging.disable_progress_bar()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    main()
