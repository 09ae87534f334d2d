"""The summaries on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

# Columns where no terminal says how many there are.
WIDTH = 140
SIDES = {"solvable": "0 < p0 <= 0.75", "unsolved": "p0 = 0", "easy": "p0 > 0.75"}


def show(parts: Iterator[RenderableType]) -> None:
    """Print them."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def of_run(title: str, summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The tables of one run, or of a few models by themselves."""
    yield Text(title, "bold")
    benchmarks = list(dict.fromkeys(name for row in summary["rows"] for name in row["benchmarks"]))
    for name in benchmarks:
        rows = [(row["target"], row["benchmarks"][name]) for row in summary["rows"] if name in row["benchmarks"]]
        yield _benchmark(name, rows)
    if len(benchmarks) > 1:
        yield _average(summary["rows"])
    if any(row["split"] for row in summary["rows"]):
        yield _split(summary["rows"])
    if summary["over_checkpoints"]:
        yield _over_checkpoints(summary["over_checkpoints"])


def of_runs(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Mean and deviation over runs of each mean@n; pass@K and the split are in the file."""
    yield Text(f"over {len(summary['runs'])} runs: mean ± sample deviation, %", "bold")
    table = summary["over_runs"]
    columns = [
        name
        for name in dict.fromkeys(name for row in table.values() for name in row)
        if "/mean@" in name and not name.startswith("split/")
    ]
    rows = [
        [
            target,
            *(
                f"{_percent(row[name]['mean'])} ± {_percent(row[name]['sd'])}" if name in row else ""
                for name in columns
            ),
        ]
        for target, row in table.items()
    ]
    yield _table("", ["model", *columns], rows)


def _benchmark(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    keys = list(rows[0][1]["interval_95"])
    lines = []
    for target, each in rows:
        scores, (low, high) = each["scores"], each["interval_95"][keys[0]]
        lines.append(
            [
                target,
                _percent(scores[keys[0]]),
                f"{_percent(low)} to {_percent(high)}",
                *(_percent(scores[key]) for key in keys[1:]),
                _percent(scores["response/truncated"]),
                _percent(scores["verdict/unparsed"]),
                f"{scores['response/length']:.0f}",
            ]
        )
    problems = int(rows[0][1]["scores"]["problems"])
    columns = ["model", keys[0], "95 % interval", *keys[1:], "truncated", "unparsed", "tokens"]
    return _table(f"{name}: {problems} problems, %", columns, lines)


def _average(rows: Sequence[Mapping[str, Any]]) -> Table:
    most = max(len(row["benchmarks"]) for row in rows)
    whole = [row for row in rows if len(row["benchmarks"]) == most]
    keys = list(whole[0]["average"])
    lines = []
    for row in whole:
        low, high = row["average"][keys[0]]["interval_95"]
        values = [_percent(row["average"][key]["value"]) for key in keys]
        lines.append([row["target"], values[0], f"{_percent(low)} to {_percent(high)}", *values[1:]])
    problems = sum(int(each["scores"]["problems"]) for each in whole[0]["benchmarks"].values())
    title = f"average over the {problems} problems of {most} benchmarks, %"
    return _table(title, ["model", keys[0], "95 % interval", *keys[1:]], lines)


def _split(rows: Sequence[Mapping[str, Any]]) -> Table:
    split = [(row["target"], row["split"]) for row in rows if row["split"]]
    sides = [side for side in SIDES if any(side in each for _, each in split)]
    keys = list(next(iter(split[0][1].values()))["scores"])
    # mean@n, and the last K: between them the rest lie.
    shown = list(dict.fromkeys((keys[0], keys[-1])))
    columns = [f"{SIDES[side]} ({split[0][1][side]['problems']}) {key}" for side in sides for key in shown]
    lines = [
        [target, *(_percent(each[side]["scores"][key]) for side in sides for key in shown)] for target, each in split
    ]
    return _table("by the base model's success rate p0 (problems), %", ["model", *columns], lines)


def _over_checkpoints(spreads: Mapping[str, Mapping[str, float]]) -> Table:
    columns = ("min", "max", "median", "mean")
    shown = {name: each for name, each in spreads.items() if not name.startswith("split/")}
    lines = [[name, *(_percent(each[column]) for column in columns)] for name, each in shown.items()]
    return _table("over the checkpoints, %", ["score", *columns], lines)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column is text, the others are numbers."""
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
