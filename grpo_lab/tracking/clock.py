"""Where the time goes: every second of a run belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PHASES = ("collect", "sync", "learn", "evaluate", "save", "other")


class PhaseClock:
    """Seconds by phase. A nested phase stops its outer one, and what no phase claims is `other`, so that the phases
    add up to the time since the clock was made, plus what was loaded from an earlier session."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._stack = ["other"]
        self._since = now()

    @property
    def current(self) -> str:
        return self._stack[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`.

        Raises:
            ValueError: no such phase.
        """
        if name not in self._seconds:
            raise ValueError(f"no phase is called {name}: one of {', '.join(PHASES)}")
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase until now. Safe to call from the view's thread: it changes nothing."""
        seconds = dict(self._seconds)
        seconds[self._stack[-1]] += self._now() - self._since
        return seconds

    def load(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of earlier sessions."""
        for name, value in seconds.items():
            self._seconds[name] += value

    def _charge(self) -> None:
        now = self._now()
        self._seconds[self._stack[-1]] += now - self._since
        self._since = now
