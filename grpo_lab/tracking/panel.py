"""How the board looks: the live panel, the plain line and the closing table. Pure: data in, renderables out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_lab.tracking.board import Board
from grpo_lab.tracking.clock import PHASES
from grpo_lab.tracking.summary import Summary

SPARKS = "▁▂▃▄▅▆▇█"
# Leaves room at 80 columns for the scores beside it.
SPARK_WIDTH = 16
PHASE_COLOURS = {
    "collect": "cyan",
    "sync": "yellow",
    "learn": "green",
    "evaluate": "magenta",
    "save": "blue",
    "other": "bright_black",
}
# The numbers under the curves, three to a row: label, metric, format.
NUMBERS = (
    ("K3", "mismatch/k3", ".2e"),
    ("entropy", "entropy", ".3f"),
    ("length", "response/length", ",.1f"),
    ("ESS (seq.)", "mismatch/ess_sequence", ".3f"),
    ("grad norm", "grad_norm", ".3g"),
    ("truncated", "response/truncated", ".1%"),
    ("sample age", "sample_age", ".1f"),
    ("mixed", "collect/mixed_fraction", ".1%"),
    ("tokens/s", "", ",.0f"),
)


def panel(board: Board, seconds: Mapping[str, float], phase: str) -> Panel:
    """The live view: progress, held-out accuracy and reward, the numbers, and where the time goes.

    Args:
        seconds: by phase, until now.
        phase: the running one.
    """
    body = Stack(_progress(board, sum(seconds.values())), "", _curves(board), "", _numbers(board), "", _time(seconds))
    # Text, not a string: what is in square brackets in a name is no markup.
    return Panel(body, title=Text(f"grpo_lab  {board.title}"), subtitle=Text(f"now: {phase}"), border_style="dim")


def plain_line(board: Board, seconds: Mapping[str, float]) -> str:
    """The board on one line, for logs."""
    elapsed = sum(seconds.values())
    progress = f"update {board.update}" + (f"/{board.total}" if board.total is not None else "")
    parts = [progress]
    if board.evaluations:
        last, best = board.evaluations[-1], board.best
        assert best is not None
        parts.append(f"held-out {last[1]:.4f} @{last[0]} (best {best[1]:.4f} @{best[0]})")
    if "reward/retained" in board.latest:
        drawn = number(board.latest.get("reward/drawn"), ".3f")
        parts.append(f"reward {number(board.latest['reward/retained'], '.3f')} (drawn {drawn})")
    parts += [
        f"{label} {number(board.latest[name], form)}" for label, name, form in NUMBERS[:6] if name in board.latest
    ]
    if board.tokens_per_second is not None:
        parts.append(f"{board.tokens_per_second:,.0f} tokens/s")
    left = board.seconds_left(elapsed)
    parts.append(duration(elapsed) + (f", {duration(left)} left" if left is not None else ""))
    return " | ".join(parts)


def closing_table(summary: Summary, seconds: Mapping[str, float], status: str) -> RenderableType:
    """First, best and last evaluation side by side, the scores over checkpoints, and what the run cost."""
    total = sum(seconds.values())
    shares = ", ".join(f"{name} {seconds[name] / total:.0%}" for name in PHASES if total and seconds[name])
    cost = (
        f"{status}: {summary.updates:,} updates, {summary.responses:,} responses, {summary.tokens:,} tokens, "
        f"{duration(total)} ({shares})"
    )
    return Stack(*_held_out(summary), *_over_checkpoints(summary), Text(cost))


def _held_out(summary: Summary) -> Iterator[Table]:
    evaluations = {"first": summary.first, "best": summary.best, "last": summary.last}
    held = {name: scores for name, scores in evaluations.items() if scores is not None}
    if not held:
        return
    table = Table()
    table.add_column("held-out")
    for name, scores in held.items():
        table.add_column(f"{name} @{scores['update']}", justify="right")
    for metric in dict.fromkeys(key for scores in held.values() for key in scores if key != "update"):
        values = [scores.get(metric) for scores in held.values()]
        table.add_row(metric, *(number(value, "," if isinstance(value, int) else ".4f") for value in values))
    yield table


def _over_checkpoints(summary: Summary) -> Iterator[Table]:
    if not (spreads := summary.over_checkpoints()):
        return
    columns = ("min", "max", "median", "mean")
    table = Table()
    table.add_column(f"over {len(summary.checkpoints)} checkpoints")
    for column in columns:
        table.add_column(column, justify="right")
    for name, spread in spreads.items():
        table.add_row(name, *(number(getattr(spread, column), ".4f") for column in columns))
    yield table


def number(value: Any, form: str) -> str:
    """A metric's value as text; a dash where there is none (not logged yet, or not finite)."""
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of at most `width` characters scaled from lowest to highest; more values are averaged."""
    if not values:
        return ""
    columns = min(width, len(values))
    cuts = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def _progress(board: Board, elapsed: float) -> RenderableType:
    left = board.seconds_left(elapsed)
    times = Text(duration(elapsed) + (f"  {duration(left)} left" if left is not None else ""))
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    if board.total is None:
        grid.add_row(Text(f"update {board.update:,}", "bold"), "", times)
        return grid
    share = board.update / board.total if board.total else 1.0
    label = Text(f"update {board.update:,} / {board.total:,}  {share:.0%}", "bold")
    grid.add_row(label, ProgressBar(total=max(board.total, 1), completed=board.update), times)
    return grid


def _curves(board: Board) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style="bold", justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1)
    grid.add_column(style="cyan", justify="right", no_wrap=True, width=SPARK_WIDTH)
    scores = [score for _, score in board.evaluations]
    best = board.best
    detail = f"first {scores[0]:.4f}  best {best[1]:.4f} @{best[0]}" if best else "not evaluated yet"
    grid.add_row(
        "held-out pass@1",
        number(scores[-1] if scores else None, ".4f"),
        detail,
        sparkline(scores, SPARK_WIDTH),
    )
    grid.add_row(
        "reward",
        number(board.latest.get("reward/retained"), ".4f"),
        f"drawn {number(board.latest.get('reward/drawn'), '.4f')}",
        sparkline(board.rewards, SPARK_WIDTH),
    )
    return grid


def _numbers(board: Board) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True, ratio=1)
    cells = [
        (label, number(board.latest.get(name) if name else board.tokens_per_second, form))
        for label, name, form in NUMBERS
    ]
    for start in range(0, len(cells), 3):
        grid.add_row(*(text for cell in cells[start : start + 3] for text in cell))
    return grid


def _time(seconds: Mapping[str, float]) -> RenderableType:
    total = sum(seconds.values())
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for name in PHASES:
        share = seconds[name] / total if total else 0.0
        colour = PHASE_COLOURS[name]
        bar = ProgressBar(total=1.0, completed=share, complete_style=colour, finished_style=colour)
        grid.add_row(name, bar, f"{share:.0%}", duration(seconds[name]))
    return grid
