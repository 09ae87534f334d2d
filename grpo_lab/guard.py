"""Runs a command and ends with the process that asked for it: `python guard.py PID COMMAND...`.

The guard leads a process group of its own, so that a terminal's ^C does not reach it. It kills the whole group, what
the command started included, as soon as process PID is no longer its parent. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

LOOK_EVERY = 0.3


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command, close_fds=False)
    # Asked to end, the command gets its time, and the guard sees it out.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The ends of pipes that are the command's: while a copy stays open here, nobody would notice that it died.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    while (status := child.poll()) is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        time.sleep(LOOK_EVERY)
    # The shell's way of saying which signal ended it.
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
