"""A command line to configurations, and errors to one line each: what the package's commands have in common."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo_lab.composition import conf_dir, register, to_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import place_from_environment

# Hydra's own words do not say where a launcher comes from.
NO_SUBMITIT = "(it comes with hydra-submitit-launcher: pip install 'grpo-lab[slurm]')"

# The user's own switch for whole tracebacks, read before `composed` sets it for Hydra's sake.
HYDRA_TRACEBACK = "HYDRA_FULL_ERROR"
WANTS_TRACEBACK = os.environ.get(HYDRA_TRACEBACK) == "1"

# Errors of the system that a user can answer: no such place, not allowed, no folder, in the way, read-only, full.
UNUSABLE = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
)

# The exit code of a command that was told to stop.
INTERRUPTED = 130

HELP_FLAGS = ("--help", "-h")

# A composed configuration, and the words of the command line that it came from.
Command = tuple[TrainConfig, Sequence[str]]
# One job of a sweep: its configuration, the folder that Hydra has chosen for it, and the words that it came from.
Job = Callable[[TrainConfig, Path, Sequence[str]], None]

register()


def composed_for_one(rest: Sequence[str], *, help_file: str, no_sweep: str) -> list[Command]:
    """As `composed`, for a command that takes words of its own and is about one run at a time.

    `rest`: the words that are left for Hydra. `help_file`: in conf/hydra/help, what --help shows. `no_sweep`: the error
    that answers -m.
    """

    def refuse(_config: TrainConfig, _folder: Path, _words: Sequence[str]) -> None:
        raise ConfigError(no_sweep)

    words = [word for word in rest if word not in HELP_FLAGS]
    if len(words) < len(rest):
        words += [f"hydra/help={help_file}", HELP_FLAGS[0]]
    sys.argv[1:] = words
    return composed(refuse)


def composed(job: Job) -> list[Command]:
    """Let Hydra read the command line: the one configuration to run, outside of Hydra, which would comment on errors.

    Empty after what only prints (--help, --cfg), and after a sweep (-m), whose jobs Hydra gives to `job` itself.
    """
    commands: list[Command] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def compose(tree: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        if hydra_config.mode != RunMode.MULTIRUN:
            commands.append((to_config(tree), hydra_config.overrides.task))
            return
        try:
            job(to_config(tree), Path(hydra_config.runtime.output_dir), hydra_config.overrides.task)
        except ConfigError as error:
            # Hydra raises only the first failure of a sweep, at its end: each is to be seen.
            print(f"error: {error}", file=sys.stderr)
            raise

    # Hydra would print an exception itself; here it comes through, to be one line or a whole traceback.
    os.environ[HYDRA_TRACEBACK] = "1"
    compose()
    os.environ[HYDRA_TRACEBACK] = str(int(WANTS_TRACEBACK))
    return commands


@contextmanager
def errors_on_one_line(*, raised_by_all: Collection[str] = ()) -> Iterator[None]:
    """Around a command: exit code 2 after an error that names what to mend, 130 after an interruption.

    `raised_by_all`: names of errors that every rank raises, or raises because another did: the leading rank reports
    them.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if WANTS_TRACEBACK or not _is_foreseen(error):
            raise
        place = place_from_environment()
        if place is None or place.rank == 0:
            print(f"error: {_as_lines(error)}", file=sys.stderr)
        elif type(error).__name__ not in raised_by_all:
            print(f"error: rank {place.rank}: {_as_lines(error)}", file=sys.stderr)
        sys.exit(2)


def _is_foreseen(error: Exception) -> bool:
    """Whether an error explains itself: ours, one of composition, or of a folder or disk that takes no files."""
    if type(error).__module__.startswith(("grpo_lab", "__main__")):
        return True
    # Some of Hydra's are errors of the system as well.
    if isinstance(error, HydraException | OmegaConfBaseException):
        return True
    # What it says of its own options is none of them: "Only one of --run, --multirun, --cfg, ... can be specified".
    if isinstance(error, ValueError) and _raised_in(error).startswith("hydra."):
        return True
    return isinstance(error, OSError) and error.errno in UNUSABLE and error.filename is not None


def _raised_in(error: Exception) -> str:
    """The module that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def _as_lines(error: Exception) -> str:
    """An error's text; what Hydra spreads over lines and causes, on one."""
    if not isinstance(error, HydraException | OmegaConfBaseException):
        if isinstance(error, OSError) and error.filename is not None:
            return (
                f"{error.filename} cannot be used: {error.strerror}; name another place (run_dir=, out=), or make room"
            )
        return str(error)
    cause = error.__cause__
    parts = str(error).splitlines() + ([str(cause).splitlines()[0]] if cause is not None and str(cause) else [])
    said = " ".join(" ".join(parts).split())
    return f"{said} {NO_SUBMITIT}" if "hydra/launcher/submitit" in said else said
