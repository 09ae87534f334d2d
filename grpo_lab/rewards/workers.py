"""What runs in a worker process, and how such processes start. Loads no torch, and nothing of the caller's program."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from multiprocessing.process import BaseProcess
from types import ModuleType

from grpo_lab.rewards.finding import Finding

# Address space of a worker: 10^(10^10) asks for 4 GB in one go, and is refused instead of filling the machine.
MEMORY_BYTES = 3 * 2**30
# The kernel's limit comes after the pool's, and holds where the pool is gone.
GRACE_SECONDS = 2

_starting = threading.Lock()


def prepare() -> None:
    """Make the calling process a worker: killable at once, bounded in memory, gone when its parent is."""
    # The pool's own handler is Python code, which a long C call (a huge power) would put off.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # Before the first item, so that no item's time goes into it.
    import grpo_lab.rewards.compare  # noqa: F401


def judge_item(gold: str, answer: str, tolerance: float | None, timeout: float) -> Finding:
    """One comparison, under a limit on processor time that needs no living parent."""
    from grpo_lab.rewards.compare import compare

    with _processor_limit(timeout + GRACE_SECONDS):
        return compare(gold, answer, tolerance)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _processor_limit(seconds: float) -> Iterator[None]:
    """Have the kernel end this process (SIGXCPU) once it has used that much more processor time."""
    usual = resource.getrlimit(resource.RLIMIT_CPU)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = [math.ceil(used.ru_utime + used.ru_stime + seconds), *usual]
    lowest = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_CPU, (lowest, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, usual)


class _WorkerProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:
        with _without_main():
            return ForkServerProcess._Popen(process_obj)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the caller's main module while a worker starts.

    A started process imports its parent's main module again: for a training run that is torch and all the rest, in
    every worker and after every time-out.
    """
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class WorkerContext(ForkServerContext):
    """Workers are forked from a server process that has the parser loaded and no threads, never from the caller."""

    Process = _WorkerProcess


def worker_context() -> WorkerContext:
    context = WorkerContext()
    # Heeded where no fork server runs yet; `prepare` does it otherwise.
    context.set_forkserver_preload(["grpo_lab.rewards.compare"])
    return context
