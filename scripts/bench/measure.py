"""Child processes, their time and their memory.

This process stays small and loads no torch: Linux hands the peak of a process down to what it starts, so that a large
parent would hide the peaks of its children. Work is done in children forked from a server that has loaded the libraries
and computed nothing, and in commands.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from grpo_lab.composition import compose_run
from grpo_lab.process import set_threads

ROOT = Path(__file__).resolve().parents[2]
# Loaded once, by the process that children are forked from.
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "scripts.bench.work"]

T = TypeVar("T")


class ChildFailed(RuntimeError):
    """A child process raised, or a command did not end with 0; the message holds what it said."""


def start_server() -> None:
    """Start the process that children are forked from, in the environment that a run loads its libraries in."""
    before = dict(os.environ)
    set_threads(compose_run([]))
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


def child(function: Callable[..., T], *arguments: Any) -> T:
    """What `function` returns in a process of its own, set up as a run is.

    Raises:
        ChildFailed: it raised, or was killed.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        failure, value = ours.recv()
    except EOFError:
        process.join()
        raise ChildFailed(f"{function.__name__} ended with exit code {process.exitcode}") from None
    process.join()
    if failure is not None:
        raise ChildFailed(f"{function.__name__} failed:\n{failure}")
    result: T = value
    return result


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import transformers

    from grpo_lab.heap import keep_freed_memory

    torch.set_num_threads(compose_run([]).hardware.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    keep_freed_memory()
    try:
        pipe.send((None, function(*arguments)))
    except Exception:
        pipe.send((traceback.format_exc(), None))


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process: now, and the most since `reset_peak`."""

    now: int
    peak: int


def memory() -> Memory:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return Memory(now, peak)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Command:
    """A program that runs beside this one. What it prints on its error stream goes to `log`.

    Raises:
        ChildFailed: it ended with an exit code that is not 0.
    """

    def __init__(self, arguments: Sequence[str | Path], *, log: Path, changes: Mapping[str, str]) -> None:
        self.log = log
        self.name = " ".join(str(each) for each in arguments[:3])
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(each) for each in arguments],
                cwd=ROOT,
                env={**os.environ, **changes},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, mark: str) -> str:
        """Write a line and read on to the one that begins with `mark`; what follows the mark."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.finish()
        for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        self.finish()
        raise ChildFailed(f"{self.name} ... ended before its time: see {self.log}")

    def finish(self) -> int:
        """Wait for its end; the most resident bytes that it had."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.read()
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.process.stdout.close()
        if self.process.returncode != 0:
            end = "\n".join(self.log.read_text().splitlines()[-5:])
            raise ChildFailed(f"{self.name} ... ended with exit code {self.process.returncode}:\n{end}")
        return usage.ru_maxrss * 1024


def python(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, *arguments]
