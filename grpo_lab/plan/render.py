"""A plan on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from grpo_lab.plan.hours import ENOUGH, Bound, Hours
from grpo_lab.plan.memory import GIB, Memory
from grpo_lab.plan.report import Plan
from grpo_lab.plan.timeline import EVENTS

NO_RATES = (
    "no hours: give probe=true (three updates, run here), from_run=<run folder>, or rates.sample= and rates.learn= "
    "(tokens/s a GPU) with rates.sync= (GB/s)"
)
# Columns where no terminal says how many there are.
WIDTH = 120
PLACES = {
    "ranks": "beside the learner on every rank",
    "first": "on the first rank's GPU",
    "own": "on devices of its own",
    "elsewhere": "at rollout.url",
}


def show(plan: Plan) -> None:
    """Print it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for part in _parts(plan):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield Text(plan.title, "bold")
    yield Text(
        f"{plan.parameters:,} parameters, {plan.forward_flop / 1e9:,.4g} GFLOP a token forward; prompts of "
        f"{plan.lengths.prompt:g} and responses of {plan.lengths.response:g} tokens"
    )
    yield from _timeline(plan)
    yield from _volume(plan)
    yield from _memory(plan.memory)
    yield from _traffic(plan)
    yield from _time(plan)
    for note in plan.notes:
        yield Text(f"note: {note}", "dim")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, bold: int | None = None) -> Table:
    """The first column is text, the others are numbers. `bold`: a row that stands out."""
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    for index, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), style="bold" if index == bold else None)
    return table


def _timeline(plan: Plan) -> Iterator[RenderableType]:
    line = plan.timeline
    rows = [(event, _every(line.every[event]), f"{line.counts[event]:,}") for event in EVENTS]
    yield _table(f"Timeline of {line.updates:,} updates", ("", "every (updates)", "times"), rows)
    for text in line.opening:
        yield Text(f"  {text}")
    yield Text(f"  a response is at most {line.oldest} updates old when it is learned from")


def _every(period: int | str | None) -> str:
    return "-" if period is None else str(period)


def _volume(plan: Plan) -> Iterator[RenderableType]:
    volume, collection = plan.volume, plan.volume.collection
    rows = [
        ("learned from, an update", f"{volume.used_responses:,}", f"{volume.used_tokens:,.0f}"),
        ("generated, an update", f"{volume.drawn_responses:,.6g}", f"{volume.drawn_tokens:,.0f}"),
        (
            f"generated, a collection of {collection.groups} groups ({collection.batches} x {collection.prompts})",
            f"{collection.responses:,}",
            f"{collection.responses * plan.lengths.response:,.0f}",
        ),
        ("generated, in all", f"{volume.total_responses:,}", f"{volume.total_tokens:,.0f}"),
    ]
    if volume.evaluated_responses and volume.evaluated_tokens:
        rows.append(("evaluated, in all", f"{volume.evaluated_responses:,}", f"{volume.evaluated_tokens:,.0f}"))
    yield _table("Responses and tokens", ("", "responses", "tokens"), rows)


def _memory(memory: Memory) -> Iterator[RenderableType]:
    unit = "GPU" if memory.on_gpu else "process"
    names = list(dict.fromkeys(name for parts in memory.phases.values() for name in parts))
    phases = list(memory.phases)
    rows = [
        (name, *(_gib(memory.phases[phase].get(name, 0)) for phase in phases))
        for name in names
        if any(parts.get(name) for parts in memory.phases.values())
    ]
    rows.append(("total", *(_gib(sum(memory.phases[phase].values())) for phase in phases)))
    yield _table(f"Memory of a {unit}, GiB, by phase", ("", *phases), rows, bold=len(rows) - 1)
    batch, sampler = memory.batch, memory.sampler
    yield Text(f"  a pass holds {batch.rows} rows of {batch.length} positions; {batch.passes} passes a rank and update")
    fit = "" if sampler.sequences is None else f"; {sampler.sequences:,} sequences of the longest kind fit at once"
    yield Text(
        f"  sampler {PLACES[sampler.where]}: weights {_gib(sampler.weights)}, keys and values {_gib(sampler.cache)} "
        f"GiB a device, {sampler.kv_per_token:,} bytes a token{fit}"
    )
    many = f" in each of {memory.processes} processes" if not memory.on_gpu and memory.processes > 1 else ""
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield Text(
        f"  peak {_gib(memory.peak)} GiB ({memory.peak_phase}){many}: {verdict} in {_gib(memory.limit)} GiB",
        "bold" if memory.fits else "bold red",
    )
    columns = ("stage", "parameters", "gradients", "optimizer", "reference", "activations", "sampler", "other")
    stages = [
        (
            f"{row.stage}{' (this run)' if row.configured else ''}",
            *(_gib(getattr(row, column)) for column in columns[1:]),
            _gib(row.total),
        )
        for row in memory.by_stage
    ]
    yield _table(
        f"A {unit} while it learns, GiB, and its peak, by ZeRO stage",
        (*columns, "peak"),
        stages,
        bold=next(index for index, row in enumerate(memory.by_stage) if row.configured),
    )
    host = ", ".join(f"{name} {_gib(size)}" for name, size in memory.host.items() if size)
    if host:
        yield Text(f"  CPU memory of a node, GiB: {host}")


def _traffic(plan: Plan) -> Iterator[RenderableType]:
    sync, disk = plan.sync, plan.disk
    gathered = f", and each rank receives {_gib(sync.gathered)} GiB of shards" if sync.gathered else ""
    yield Text("Traffic and disk", "italic")
    yield Text(f"  a sync hands over {_gib(sync.stream)} GiB ({sync.way}){gathered}")
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in disk.parts.items())
    yield Text(
        f"  a checkpoint takes {_gib(disk.one)} GiB ({parts}); kept {_gib(disk.kept)} GiB, {_gib(disk.highest)} GiB "
        "while one is written"
    )
    if disk.weights:
        yield Text(f"  weights laid for the engine take up to {_gib(disk.weights)} GiB")


def _time(plan: Plan) -> Iterator[RenderableType]:
    if plan.rates is None or plan.hours is None or plan.bound is None:
        yield Text(NO_RATES)
        return
    rates = plan.rates
    sync = "a sync takes no time" if rates.sync is None else f"sync {rates.sync / 1e9:,.4g} GB/s"
    yield Text(
        f"Rates ({rates.source}): sample {rates.sample:,.0f} and learn {rates.learn:,.0f} tokens/s a device, {sync}"
    )
    yield from _hours(plan.hours)
    yield from _bound(plan.bound)


def _hours(hours: Hours) -> Iterator[RenderableType]:
    rows = [(name, _three(each)) for name, each in hours.phases.items() if each]
    rows.append(("total", _three(hours.total)))
    yield Text(
        f"{_three(hours.per_update)} s an update: a sync takes {_three(hours.sync)} s, a collection "
        f"{_three(hours.collect)} s, learning {_three(hours.learn)} s"
    )
    yield _table("Hours", ("", "hours"), rows, bold=len(rows) - 1)


def _bound(bound: Bound) -> Iterator[RenderableType]:
    columns = ("v", *(str(v) for v in bound.speedups), "no end")
    row = ("speed-up", *(f"{value:.3f}" for value in bound.speedups.values()), f"{bound.limit:.3f}")
    yield _table("Speed-up over v = 1, at most: step / (step - sync (1 - 1/v))", columns, [row])
    yield Text(
        f"  v={bound.enough} has {ENOUGH:.0%} of what a longer period can gain. What staleness costs (K3 rises with v) "
        "is not in this number."
    )


def _gib(size: float) -> str:
    return _three(size / GIB)


def _three(value: float) -> str:
    """A number with the three digits that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
