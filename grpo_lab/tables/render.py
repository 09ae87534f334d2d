"""What the command prints: the cells of a table and where each stands."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from grpo_lab.ledger import Standing
from grpo_lab.tables.cells import Run
from grpo_lab.tables.definition import Definition, load_definition, targets

# Columns of a file or pipe, which has no width of its own.
WIDTH = 160


def open_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def show_targets(console: Console) -> None:
    table = Table("target", "of", "what", "runs: paper", "tiny")
    for target in targets():
        definition = load_definition(target)
        counts = [str(len(definition.cells(scale))) for scale in ("paper", "tiny")]
        table.add_row(target, f"{definition.paper.upper()} {definition.label}", definition.title, *counts)
    console.print(table)


def show_runs(console: Console, definition: Definition, runs: Sequence[Run], found: Sequence[Standing]) -> None:
    keys = list(dict.fromkeys(key for run in runs for key in run.cell.words))
    if not runs:
        console.print(f"{definition.target}: {definition.title}: no runs")
        return
    table = Table(*keys, "stands", "folder", title=f"{definition.target}: {definition.title}")
    for run, standing in zip(runs, found, strict=True):
        words = ["" if key not in run.cell.words else str(run.cell.words[key]) for key in keys]
        table.add_row(*words, str(standing), str(run.folder))
    console.print(table)


def show_failures(console: Console, runs: Sequence[Run], found: Sequence[Standing]) -> None:
    table = Table("run", "why", title="did not finish")
    for run, standing in zip(runs, found, strict=True):
        why = "not started: the sweep ended before it" if standing.state == "missing" else str(standing)
        table.add_row(str(run.folder), why)
    console.print(table)
