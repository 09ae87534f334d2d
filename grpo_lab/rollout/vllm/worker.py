"""vLLM in a child process of its own. The parent's side is `WorkerHost`, the child's is `main`.

vLLM makes a process group of torch.distributed and changes its process in other ways; here it does so where nothing
else lives. Commands go through a socket pair, weights through a folder.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_lab.guarded import GRACE, GuardedProcess, last_lines
from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.folder import WeightFolder
from grpo_lab.rollout.vllm.host import Answer, Batch, HostLost
from grpo_lab.rollout.vllm.settings import start_failure
from grpo_lab.weights import Weights

# Seconds that a dead process may take to be seen as such, for the sake of a better message.
SETTLE = 2.0


class WorkerHost:
    """The parent's side. Times are limits in seconds."""

    name = "the vLLM worker"
    reads_back = True

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        *,
        weights_dir: Path,
        start_timeout: float,
        generate_timeout: float,
        sync_timeout: float,
    ) -> None:
        self._arguments = arguments
        self._environment = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._log = log
        self._folder = WeightFolder(weights_dir)
        self._start_timeout = start_timeout
        self._generate_timeout = generate_timeout
        self._sync_timeout = sync_timeout
        self._process: GuardedProcess | None = None
        self._connection: Connection | None = None
        # The child itself, not its guard.
        self.pid: int | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "grpo_lab.rollout.vllm.worker", str(theirs.fileno())]
        self._process = GuardedProcess(
            command, environment=self._environment, log=self._log, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        try:
            self.pid = self._ask("start", self._start_timeout, self._arguments)
        except HostLost as lost:
            self.kill()
            raise EngineError(start_failure(self.name, str(lost), self._log)) from lost

    def check(self) -> None:
        if self._process is not None and (end := self._process.ended()) is not None:
            raise HostLost(f"it ended ({end})")

    def sample(self, batch: Batch) -> list[list[Answer]]:
        answers: list[list[Answer]] = self._ask("sample", self._generate_timeout, batch)
        return answers

    def load(self, weights: Weights, label: str) -> dict[str, str]:
        folder = self._folder.write(weights)
        digests: dict[str, str] = self._ask("load_folder", self._sync_timeout, str(folder))
        self.reset_prefix_cache()
        self._ask("mark", self._sync_timeout, label)
        self._folder.keep(folder)
        return digests

    def reset_prefix_cache(self) -> None:
        self._ask("reset_prefix_cache", self._sync_timeout)

    def reload(self, label: str) -> dict[str, str] | None:
        digests: dict[str, str] | None = None
        if self._folder.latest is not None:
            digests = self._ask("load_folder", self._sync_timeout, str(self._folder.latest))
        self._ask("mark", self._sync_timeout, label)
        return digests

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._forget()

    def close(self) -> None:
        if self._process is not None:
            assert self._connection is not None
            # The child's sign to go. Shut, not only closed here: processes forked since then hold copies of this end.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            deadline = time.monotonic() + GRACE
            while self._process.ended() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            self._process.kill()
        self._forget()
        self._folder.close()

    def _forget(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = self.pid = None

    def _ask(self, command: str, timeout: float, *values: Any) -> Any:
        """One command, one answer.

        Raises:
            HostLost: it died, did not answer in time, or answered with an error.
        """
        connection = self._connection
        assert connection is not None
        replies: queue.SimpleQueue[tuple[bool, Any] | None] = queue.SimpleQueue()

        def exchange() -> None:
            try:
                connection.send((command, values))
                replies.put(connection.recv())
            except (EOFError, OSError, TypeError):
                # A TypeError where this side was closed meanwhile.
                replies.put(None)

        # On a thread of its own: a child that stands still in the middle of a message would hold up this one for ever.
        threading.Thread(target=exchange, daemon=True, name="vLLM worker").start()
        try:
            reply = replies.get(timeout=timeout)
        except queue.Empty:
            raise HostLost(f"it did not answer within {timeout:g} seconds") from None
        if reply is None:
            raise HostLost(f"it died ({self._end()}); its log ends {last_lines(self._log)}")
        succeeded, value = reply
        if not succeeded:
            raise HostLost(value)
        return value

    def _end(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + SETTLE
        while (end := self._process.ended()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return end or "how is not known"


def main() -> None:
    """The child: `python -m grpo_lab.rollout.vllm.worker FD` answers commands until the pipe ends."""
    connection = Connection(int(sys.argv[1]))
    commands: dict[str, Callable[..., Any]] = {}

    def start(arguments: Mapping[str, Any]) -> int:
        from grpo_lab.rollout.vllm.local import LocalLLM

        llm = LocalLLM(arguments, sleep=False)
        commands.update(
            sample=llm.sample, load_folder=llm.load_folder, reset_prefix_cache=llm.reset_prefix_cache, mark=llm.mark
        )
        return os.getpid()

    commands["start"] = start
    while True:
        try:
            command, values = connection.recv()
        except (EOFError, OSError):
            # Not sys.exit: what vLLM would still tidy up takes seconds, and the operating system does it at once.
            os._exit(0)
        try:
            answer: tuple[bool, Any] = (True, commands[command](*values))
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)


if __name__ == "__main__":
    main()
