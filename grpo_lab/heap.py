"""How the process keeps its memory."""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 2**30


def keep_freed_memory() -> bool:
    """Have blocks of up to 1 GiB that are freed kept for the next of their kind. False where the C library cannot, or
    where the user has set it by the library's own MALLOC_MMAP_THRESHOLD_.

    glibc hands a large block back to the system when it is freed, and the system clears it page by page when the next
    is asked for. torch asks for the same blocks in every layer of every pass.
    """
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # One arena: those of further threads give their blocks back whatever the thresholds.
    return mallopt is not None and all(
        mallopt(parameter, value) == 1
        for parameter, value in ((_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, 2 * _LARGE - 1), (_ARENA_MAX, 1))
    )
