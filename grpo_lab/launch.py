"""Which rank of a run this process is, as a launcher has told it; and the launch of ranks where none has.

Reading the environment loads nothing heavy, so that a wrong setting still fails at once.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TextIO

from grpo_lab.config import ConfigError, HardwareConfig

# What the user typed, for processes that a run starts of itself.
TYPED_VARIABLE = "GRPO_LAB_COMMAND"
# Seconds in which a child that was stopped by Ctrl-C ends; afterwards it has not heard of it.
GRACE = 15.0
# Set for ranks that a process of ours has started: it holds the run's folder for them.
HELD_VARIABLE = "GRPO_LAB_FOLDER_IS_HELD"
# What a launcher tells its ranks. A program of its own that reads it takes itself for one of them.
LAUNCHER_VARIABLES = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_\w+"
    r"|TORCHELASTIC_\w+|SLURM_\w+|PMI_\w+|PMIX_\w+|OMPI_\w+|CROSS_RANK|CROSS_SIZE"
)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them; empty: all of the machine."""
    return [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def typed_command() -> list[str]:
    """The command line that the user typed to start this run."""
    typed = os.environ.get(TYPED_VARIABLE)
    return shlex.split(typed) if typed else [sys.executable, *sys.argv]


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a program that is no rank of this run."""
    return {name: value for name, value in environment.items() if not LAUNCHER_VARIABLES.fullmatch(name)}


def run_child(command: Sequence[str], environment: Mapping[str, str], *, stdout: TextIO | None = None) -> int:
    """Run a command of this package to its end, `environment` added to ours. Returns its exit code.

    A stop (Ctrl-C, SIGTERM, a scheduler's notice) is the child's as well, which ends tidily; it is waited for.

    `stdout`: where its output goes, if not where ours does.
    """
    process: subprocess.Popen[bytes] | None = None
    told = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal told
        told = True
        # While the child is being started nobody could wait for it: see below.
        if process is not None:
            process.terminate()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=stdout)
        if told:
            process.terminate()
            raise KeyboardInterrupt
        return process.wait()
    except BaseException as stopped:
        if process is not None:
            # What else is raised here, such as submitit's notice of a time limit, the child has not heard of.
            if not isinstance(stopped, KeyboardInterrupt):
                process.terminate()
                told = True
            _wait_for_end(process, told=told)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for_end(process: subprocess.Popen[bytes], *, told: bool) -> None:
    """Of a child that is stopping. A Ctrl-C reaches it as well; a signal to this process alone (not `told` on) does
    not."""
    if not told:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.terminate()
    process.wait()


class RankKilled(RuntimeError):
    """A rank ended without a word."""


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    size: int
    local_rank: int


def place_from_environment() -> Place | None:
    """What torchrun, or srun with several tasks a step, says of this process; None where neither started it.

    Under srun the environment is completed to what torchrun would have set.
    """
    environment = os.environ
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_RANK"]))
    # SLURM_NTASKS is set in batch scripts as well, where one process has yet to start the others.
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        environment.setdefault("MASTER_ADDR", _first_host(environment))
        # Steps of one job may share a node.
        step = int(environment["SLURM_JOB_ID"]) + 101 * int(environment.get("SLURM_STEP_ID", 0))
        environment.setdefault("MASTER_PORT", str(20_000 + step % 20_000))
        return Place(
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_LOCALID"]),
        )
    return None


def _first_host(environment: Mapping[str, str]) -> str:
    hosts = environment["SLURM_STEP_NODELIST"]
    if "[" not in hosts:
        return hosts.split(",")[0]
    listed = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True)
    return listed.stdout.split()[0]


def check_place(place: Place, hardware: HardwareConfig) -> None:
    """Whether the launcher started as many ranks as the run is configured for.

    Raises:
        ConfigError: it did not.
    """
    if place.size != hardware.ranks:
        raise ConfigError(
            f"the launcher started {place.size} ranks and hardware.ranks={hardware.ranks}: set "
            f"hardware.ranks={place.size}, or start as many"
        )


def start_ranks(hardware: HardwareConfig, arguments: Sequence[str]) -> None:
    """Run `python <arguments>` as `hardware.ranks` processes of this machine, to their end, by torch elastic.

    Raises:
        ConfigError: the ranks belong on several machines, which only a launcher can reach.
        RankKilled: one of them was killed; the others were stopped.
        SystemExit: one of them failed, and has said why; the others were stopped.
    """
    if hardware.nodes > 1:
        raise ConfigError(
            f"hardware.nodes={hardware.nodes}: start the run on every node with torchrun --nnodes={hardware.nodes} "
            f"--nproc-per-node={hardware.ranks // hardware.nodes} -m grpo_lab.train ..., or with srun"
        )
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It would repeat what the ranks have said, in fifty lines. Its loggers have levels of their own.
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=hardware.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        max_restarts=0,
        monitor_interval=0.2,
    )
    os.environ[TYPED_VARIABLE] = shlex.join(typed_command())
    os.environ[HELD_VARIABLE] = "1"
    try:
        elastic_launch(launch, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        reason = f"rank {rank} was killed by signal {-failure.exitcode}"
        raise RankKilled(f"{reason}; out of memory? go on from the last checkpoint with resume=") from error
    except SignalException as error:
        raise KeyboardInterrupt from error
