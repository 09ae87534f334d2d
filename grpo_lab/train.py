"""Train: `python -m grpo_lab.train [group=option] [key=value]`, or `resume=<run folder>` to go on where a run stopped.

Composes and checks the configuration, builds the parts of a run in the order that data flows through them, and hands
them to the loop.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.command import HYDRA_TRACEBACK, INTERRUPTED, WANTS_TRACEBACK, composed, errors_on_one_line
from grpo_lab.composition import load_config, save_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.heap import keep_freed_memory
from grpo_lab.launch import (
    HELD_VARIABLE,
    TYPED_VARIABLE,
    Place,
    check_place,
    place_from_environment,
    run_child,
    start_ranks,
    typed_command,
)
from grpo_lab.ledger import (
    BusyError,
    claimed,
    clear,
    failures_recorded,
    forget_failure,
    has_recorded_failure,
    record_failure,
    result_hash,
    standing,
)
from grpo_lab.offline.header import check_settings
from grpo_lab.process import set_threads, set_up_process
from grpo_lab.runs import CONFIG_FILE, choose_folder, holds_a_run, resumed_job, settle
from grpo_lab.schedule import Schedule
from grpo_lab.validation import validate

if TYPE_CHECKING:
    from grpo_lab.distributed import World
    from grpo_lab.tracking import Tracker

# Errors that every rank raises, or raises because another did: the leading rank reports them.
RAISED_BY_ALL = ("LeaderFailed", "RankLost", "NonFiniteError", "SyncError", "CollectionError", "PoolError")


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    with errors_on_one_line(raised_by_all=RAISED_BY_ALL):
        for config, overrides in composed(_run_in_child):
            _start(config, overrides)


def _start(config: TrainConfig, overrides: Sequence[str]) -> None:
    """A run, in this process or in as many as it has ranks."""
    if (place := place_from_environment()) is not None:
        _train_as_rank(place, config, overrides)
        return
    resuming = config.resume is not None
    with _opened(config, overrides) as (config, run_dir), failures_recorded(run_dir):
        if config.hardware.ranks > 1:
            start_ranks(config.hardware, ["-m", "grpo_lab.train", f"resume={shlex.quote(str(run_dir))}"])
        else:
            train(config, run_dir, resuming=resuming)


@contextmanager
def _opened(config: TrainConfig, overrides: Sequence[str]) -> Iterator[tuple[TrainConfig, Path]]:
    """A run's settings and its folder, which no other process has while the block runs. Settings are written only once
    the folder is held: those of a run that is under way stay as they are."""
    run_dir = choose_folder(config, overrides)
    # The process that started the ranks of a run holds its folder.
    with nullcontext() if HELD_VARIABLE in os.environ else claimed(run_dir):
        yield settle(config, overrides, run_dir), run_dir


def _train_as_rank(place: Place, config: TrainConfig, overrides: Sequence[str]) -> None:
    """Train as one of the ranks that a launcher has started: the leading one chooses the run, for all."""
    from grpo_lab import distributed

    world = distributed.join(rank=place.rank, size=place.size, local_rank=place.local_rank)
    with ExitStack() as stack:

        def choose() -> tuple[TrainConfig, Path]:
            chosen, run_dir = stack.enter_context(_opened(config, overrides))
            check_place(place, chosen.hardware)
            return chosen, run_dir

        chosen, run_dir = world.lead(choose)
        if world.is_leader:
            # It knows what went wrong.
            stack.enter_context(failures_recorded(run_dir))
        train(chosen, run_dir, resuming=config.resume is not None, world=world)


class JobError(RuntimeError):
    """A job of a sweep ended with an error, which it has printed itself."""


def _run_in_child(config: TrainConfig, run_dir: Path, overrides: Sequence[str]) -> None:
    """One job of a sweep, in a process of its own, so that nothing of one job is left to the next.

    A folder that holds the same run already is gone on with where it is half done or failed, and left alone where it is
    finished, or runs elsewhere.
    """
    if place_from_environment() is not None:
        raise ConfigError("a sweep starts the ranks of its jobs itself: run -m without torchrun or srun")
    prepared = config.resume is not None
    if prepared:
        config, run_dir = resumed_job(config, overrides)
    else:
        run_dir = _job_folder(config, run_dir)
    found = standing(run_dir)
    if found.state in ("finished", "running"):
        print(f"{run_dir}: {found}, left as it is")
        return
    try:
        with claimed(run_dir):
            if config.checkpoint.every is None and holds_a_run(run_dir):
                print(f"{run_dir}: {found}, and no checkpoint to go on from (checkpoint.every=null): it starts over")
                clear(run_dir)
            elif not prepared and not holds_a_run(run_dir):
                _leave_settings(config, run_dir)
            forget_failure(run_dir)
    except BusyError:
        print(f"{run_dir}: {standing(run_dir)}, left as it is")
        return
    code = _child(run_dir)
    if code != 0:
        if (now := standing(run_dir)).state == "running":
            # Another process took it in the moment between.
            print(f"{run_dir}: {now}, left as it is")
            return
        if (why := failure_of(code)) is not None and not has_recorded_failure(run_dir):
            record_failure(run_dir, why)
        raise JobError(f"the job in {run_dir} ended with exit code {code}")


def failure_of(code: int) -> str | None:
    """What a job's exit code says it failed of; None where it was stopped, also before it could end tidily."""
    if code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
        return None
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _job_folder(config: TrainConfig, run_dir: Path) -> Path:
    """The folder of a job, made where it is not there.

    Raises:
        ConfigError: a setting that cannot work, or a folder that holds another run.
    """
    validate(config)
    run_dir = Path(config.run_dir) if config.run_dir is not None else run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    if holds_a_run(run_dir) and result_hash(load_config(run_dir / CONFIG_FILE)) != result_hash(config):
        raise ConfigError(f"{run_dir} holds another run already: choose another hydra.sweep.dir or run_dir")
    return run_dir


def _leave_settings(config: TrainConfig, run_dir: Path) -> None:
    """For the process that runs the job."""
    if config.tracking.group is None:
        config.tracking.group = run_dir.parent.name
    save_config(config, run_dir / CONFIG_FILE)


def _child(run_dir: Path) -> int:
    """Go on with a run in a process of its own, to its end. Returns its exit code."""
    command = [sys.executable, "-m", "grpo_lab.train", f"resume={shlex.quote(str(run_dir))}"]
    typed = shlex.join(typed_command())
    return run_child(command, {HYDRA_TRACEBACK: str(int(WANTS_TRACEBACK)), TYPED_VARIABLE: typed})


def train(config: TrainConfig, run_dir: Path, *, resuming: bool, world: World | None = None) -> None:
    """Run one configuration to its end, in `run_dir`, from its newest whole checkpoint if it is resumed.

    `world`: the ranks, where there are several.

    Raises:
        ConfigError: a setting, data set, model or checkpoint that cannot be used.
    """
    warnings = validate(config)
    if config.source == "pool" and (world is None or world.is_leader):
        check_settings(config)
    set_threads(config)
    if config.hardware.device == "cpu":
        keep_freed_memory()
    # Only now the heavy libraries: a wrong setting has failed by here.
    from grpo_lab import checkpoint, distributed
    from grpo_lab.build import build_loop
    from grpo_lab.tracking import QuietTracker, forward_warnings

    if world is None:
        world = distributed.join() if config.learner.engine == "deepspeed" else distributed.World()
    set_up_process(config, world)
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


if __name__ == "__main__":
    main()
