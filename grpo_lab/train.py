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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.config import ConfigError, TrainConfig, conf_dir, register, save_config, to_config
from grpo_lab.launch import (
    TYPED_VARIABLE,
    Place,
    check_place,
    place_from_environment,
    start_ranks,
    typed_command,
)
from grpo_lab.runs import CONFIG_FILE, choose_run, holds_a_run
from grpo_lab.schedule import Schedule
from grpo_lab.validation import validate

if TYPE_CHECKING:
    from grpo_lab.distributed import World
    from grpo_lab.tracking import Tracker

# Errors that every rank raises, or raises because another did: the leading rank reports them.
RAISED_BY_ALL = ("LeaderFailed", "RankLost", "NonFiniteError", "SyncError", "CollectionError")

# Hydra's own words do not say where a launcher comes from.
NO_SUBMITIT = "(it comes with hydra-submitit-launcher: pip install 'grpo-lab[slurm]')"

# The user's own switch for whole tracebacks, read before `main` sets it for Hydra's sake.
HYDRA_TRACEBACK = "HYDRA_FULL_ERROR"
WANTS_TRACEBACK = os.environ.get(HYDRA_TRACEBACK) == "1"

# A composed configuration, and the words of the command line that it came from.
Command = tuple[TrainConfig, Sequence[str]]

register()


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    # Hydra would print an exception itself; here it comes through, to be one line or a whole traceback.
    os.environ[HYDRA_TRACEBACK] = "1"
    commands: list[Command] = []
    try:
        _compose(commands)
        os.environ[HYDRA_TRACEBACK] = str(int(WANTS_TRACEBACK))
        for command in commands:
            _start(*command)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if WANTS_TRACEBACK or not _is_foreseen(error):
            raise
        place = place_from_environment()
        if place is None or place.rank == 0:
            print(f"error: {_as_lines(error)}", file=sys.stderr)
        elif type(error).__name__ not in RAISED_BY_ALL:
            print(f"error: rank {place.rank}: {_as_lines(error)}", file=sys.stderr)
        sys.exit(2)


def _compose(commands: list[Command]) -> None:
    """Let Hydra read the command line: it runs a sweep's jobs itself; a single run is noted in `commands`, to be run
    outside of Hydra, which would comment on its errors; what only prints (--help, --cfg) notes nothing."""

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def compose(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        if hydra_config.mode != RunMode.MULTIRUN:
            commands.append((to_config(composed), hydra_config.overrides.task))
            return
        try:
            _run_in_child(to_config(composed), Path(hydra_config.runtime.output_dir))
        except ConfigError as error:
            # Hydra raises only the first failure of a sweep, at its end: each is to be seen.
            print(f"error: {error}", file=sys.stderr)
            raise

    compose()


def _start(config: TrainConfig, overrides: Sequence[str]) -> None:
    """A run, in this process or in as many as it has ranks."""
    if (place := place_from_environment()) is not None:
        _train_as_rank(place, config, overrides)
        return
    config, run_dir, resuming = choose_run(config, overrides)
    if config.hardware.ranks > 1:
        start_ranks(config.hardware, ["-m", "grpo_lab.train", f"resume={shlex.quote(str(run_dir))}"])
    else:
        train(config, run_dir, resuming=resuming)


def _train_as_rank(place: Place, config: TrainConfig, overrides: Sequence[str]) -> None:
    """Train as one of the ranks that a launcher has started: the leading one chooses the run, for all."""
    from grpo_lab import distributed

    def choose() -> tuple[TrainConfig, Path, bool]:
        chosen = choose_run(config, overrides)
        check_place(place, chosen[0].hardware)
        return chosen

    world = distributed.join(rank=place.rank, size=place.size, local_rank=place.local_rank)
    chosen, run_dir, resuming = world.lead(choose)
    train(chosen, run_dir, resuming=resuming, world=world)


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
    said = " ".join(" ".join(parts).split())
    return f"{said} {NO_SUBMITIT}" if "hydra/launcher/submitit" in said else said


def _run_in_child(config: TrainConfig, run_dir: Path) -> None:
    """One job of a sweep, in a process of its own, so that nothing of one job is left to the next."""
    if config.resume is not None:
        raise ConfigError("resume= goes on with one run and makes no sweep: leave out -m")
    if place_from_environment() is not None:
        raise ConfigError("a sweep starts the ranks of its jobs itself: run -m without torchrun or srun")
    validate(config)
    run_dir = Path(config.run_dir) if config.run_dir is not None else run_dir
    if holds_a_run(run_dir):
        raise ConfigError(f"{run_dir} holds a run already: choose another hydra.sweep.dir, or resume that run")
    run_dir.mkdir(parents=True, exist_ok=True)
    if config.tracking.group is None:
        config.tracking.group = run_dir.parent.name
    save_config(config, run_dir / CONFIG_FILE)
    command = [sys.executable, "-m", "grpo_lab.train", f"resume={shlex.quote(str(run_dir))}"]
    typed = shlex.join(typed_command())
    environment = {**os.environ, HYDRA_TRACEBACK: str(int(WANTS_TRACEBACK)), TYPED_VARIABLE: typed}
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


def train(config: TrainConfig, run_dir: Path, *, resuming: bool, world: World | None = None) -> None:
    """Run one configuration to its end, in `run_dir`, from its newest whole checkpoint if it is resumed.

    `world`: the ranks, where there are several.

    Raises:
        ConfigError: a setting, data set, model or checkpoint that cannot be used.
    """
    warnings = validate(config)
    _set_threads(config)
    # Only now the heavy libraries: a wrong setting has failed by here.
    from grpo_lab import checkpoint, distributed
    from grpo_lab.build import build_loop
    from grpo_lab.tracking import QuietTracker, forward_warnings

    if world is None:
        world = distributed.join() if config.learner.engine == "deepspeed" else distributed.World()
    _set_up_process(config, world)
    folder, damaged = world.lead(lambda: _find_checkpoint(config, run_dir)) if resuming else (None, [])
    saved = None if folder is None else checkpoint.load_state(folder)
    tracker = _open_tracker(config, run_dir, saved, resuming) if world.is_leader else QuietTracker()
    status, loop = "failed", None
    forwarding = forward_warnings(tracker)
    try:
        for line in (*warnings, *damaged):
            tracker.warning(line)
        loop = build_loop(config, run_dir, tracker, world)
        if saved is not None and folder is not None:
            loop.learner.load(folder)
            loop.restore(saved)
            tracker.message(f"resumed from {folder}")
        with distributed.noticing_lost_ranks():
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
        distributed.leave()


def _open_tracker(config: TrainConfig, run_dir: Path, saved: dict[str, Any] | None, resuming: bool) -> Tracker:
    from grpo_lab.tracking import Tracker

    at = None if not resuming else -1 if saved is None else saved["run"]["update"]
    tracker = Tracker.open(run_dir, config, total_updates=Schedule.from_config(config).updates, resume_from=at)
    if saved is not None:
        tracker.load_state(saved["tracker"])
    elif resuming:
        tracker.start_afresh()
    return tracker


def _find_checkpoint(config: TrainConfig, run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint and warnings about damaged ones; None only where a run was killed before its first.

    Raises:
        ConfigError: starting over would erase what the run has logged.
    """
    from grpo_lab import checkpoint

    checkpoint.tidy(run_dir)
    folder, damaged = checkpoint.newest(run_dir)
    if folder is None and holds_a_run(run_dir):
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


def _set_threads(config: TrainConfig) -> None:
    """What libraries read when they are loaded."""
    # Waiting threads that spin starve each other on a shared machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # torchrun sets 1 of its own accord.
    if place_from_environment() is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.hardware.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.hardware.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.hardware.device == "cpu":
        # Where DeepSpeed is installed it looks for an accelerator whenever a library imports it, and prints about it.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _set_up_process(config: TrainConfig, world: World) -> None:
    """Threads and device as configured, and SIGTERM (a scheduler's notice) as an interruption that ends tidily.

    Raises:
        ConfigError: there is no such device.
    """
    import torch
    import transformers

    from grpo_lab.distributed import device_of

    torch.set_num_threads(config.hardware.threads)
    if config.hardware.device != "cpu":
        if not torch.cuda.is_available():
            raise ConfigError(f"hardware.device={config.hardware.device}: torch sees no GPU here; choose hardware=cpu")
        torch.cuda.set_device(device_of(config.hardware, world))
    # Bars for reading and writing weights would tear the live view.
    transformers.utils.logging.disable_progress_bar()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    main()
