"""A process of another program that this one started: its log, its end, and its group."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from grpo_lab import guard

# Lines of the log that an error message repeats.
TAIL_LINES = 3
TAIL_CHARACTERS = 600
COMPLAINT = r"\b\w*(?:Error|Exception): .+|error: unrecognized arguments: .+"
# Seconds to end in peace.
GRACE = 5.0


class GuardedProcess:
    """A command and all that it starts, as one process group, which never outlives this process."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
    ) -> None:
        self.log = log
        self._log_start = log.stat().st_size if log.is_file() else 0
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                guarded,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    @property
    def group(self) -> int:
        """The id of its process group."""
        return self._process.pid

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        return f"signal {status - 128}" if status > 128 else f"exit status {status}"

    def complaint(self) -> str | None:
        """The error that its log tells, where it does: the last one that does not point at another above it."""
        text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        told = [line for line in re.findall(COMPLAINT, text) if "root cause" not in line]
        return told[-1] if told else None

    def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        if self.ended() is None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def last_lines(log: Path) -> str:
    """Where the log is, and how it ends, in one line."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return f"{log}: {' | '.join(lines)[-TAIL_CHARACTERS:]}" if lines else str(log)
