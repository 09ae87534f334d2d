"""One collection ahead: gathered in a thread while the learner works on the one before.

Only where the sampler has its weights for itself and no other rank takes part in sampling. The engine belongs to the
thread until the collection is there: whoever wants it meanwhile calls `settle` first.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from grpo_lab.collect import Collection, Exhausted, GroupSource


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a collection came to, and the seconds it took beside other work; None where that was before a resume."""

    result: Collection | Exhausted
    seconds: float | None


class Ahead:
    """At most one collection that is being gathered, or waits to be taken."""

    def __init__(self, source: GroupSource) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collect_ahead")
        self._future: Future[Gathered] | None = None

    def start(self, wanted: int) -> None:
        """Begin to gather `wanted` groups from the engine's present weights."""
        assert self._future is None, "the last collection has not been taken"
        self._future = self._thread.submit(self._gather, wanted)

    def _gather(self, wanted: int) -> Gathered:
        began = time.perf_counter()
        result = self._source.collect(wanted)
        return Gathered(result, time.perf_counter() - began)

    def settle(self) -> None:
        """Wait until the engine is free. What went wrong is raised by `take` and `result`."""
        if self._future is not None:
            wait([self._future])

    def result(self) -> Collection | Exhausted | None:
        """What was gathered and not taken, None where nothing was begun. Waits for it."""
        return None if self._future is None else self._future.result().result

    def take(self) -> Gathered | None:
        """What was gathered, once; None where nothing was begun. Waits for it."""
        future, self._future = self._future, None
        return None if future is None else future.result()

    def restore(self, result: Collection | Exhausted) -> None:
        """Put back what a checkpoint held."""
        self._future = Future()
        self._future.set_result(Gathered(result, None))

    def close(self) -> None:
        """Wait for the thread: to be called when the engine is closed, which ends it."""
        self._thread.shutdown()
