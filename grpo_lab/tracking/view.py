"""What reaches the terminal while a run goes: a live panel, plain lines, or warnings alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live

from grpo_lab.tracking.board import Board
from grpo_lab.tracking.clock import PhaseClock
from grpo_lab.tracking.panel import panel, plain_line

# Seconds between two plain lines.
PLAIN_EVERY = 10.0


class QuietView:
    """Nothing but warnings. The other views are this one with more on the terminal."""

    def start(self) -> None:
        """Begin to draw."""

    def show(self, board: Board, *, evaluated: bool) -> None:
        """A new state of the run."""

    def message(self, text: str) -> None:
        """A line for the user to keep."""

    def warning(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def close(self, *closing: RenderableType) -> None:
        """Stop drawing and print what ends the run. May be called again."""


class PlainView(QuietView):
    """One line every PLAIN_EVERY seconds and at every evaluation."""

    def __init__(self, console: Console, clock: PhaseClock, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._now = now
        self._shown = -float("inf")

    def show(self, board: Board, *, evaluated: bool) -> None:
        if evaluated or self._now() - self._shown >= PLAIN_EVERY:
            self._shown = self._now()
            self.message(plain_line(board, self._clock.seconds()))

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, *closing: RenderableType) -> None:
        for renderable in closing:
            self._console.print(renderable, markup=False, highlight=False, soft_wrap=isinstance(renderable, str))


class LiveView(PlainView):
    """A panel that is redrawn in place, also while a long phase runs; messages scroll by above it."""

    def __init__(self, console: Console, clock: PhaseClock, board: Board) -> None:
        super().__init__(console, clock)
        self._board = board
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def show(self, board: Board, *, evaluated: bool) -> None:
        self._board = board

    def warning(self, text: str) -> None:
        self._console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def close(self, *closing: RenderableType) -> None:
        self._live.stop()
        super().close(*closing)

    def _render(self) -> RenderableType:
        return panel(self._board, self._clock.seconds(), self._clock.current)


def build_view(mode: str, console: Console, clock: PhaseClock, board: Board) -> QuietView:
    """The view that `tracking.view` asks for.

    `auto` and `live` draw live on a terminal, in plain lines elsewhere. A terminal here is one that can move its
    cursor and print more than ASCII: the panel's bars would raise an encoding error on another.
    """
    if mode == "off":
        return QuietView()
    drawable = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    if mode != "plain" and drawable:
        return LiveView(console, clock, board)
    view = PlainView(console, clock)
    if mode == "live":
        view.warning("tracking.view=live needs a UTF-8 terminal: plain lines instead")
    return view
