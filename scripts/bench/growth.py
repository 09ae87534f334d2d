"""What an update costs as it grows: by group size, response length, minibatch size, and v."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

from scripts.bench.measure import child
from scripts.bench.report import Row, at_most, exponent
from scripts.bench.runs import PHASES, Bench
from scripts.bench.shapes import SHORT, Shape

FACTORS = (1, 2, 4, 8)
# Cheap updates, where what does not grow with tokens shows first.
SMALL = replace(SHORT, groups=8)
STALENESS = (1, 2, 4, 8)


def measure(bench: Bench) -> list[Row]:
    rows = []
    for name in ("group_size", "response", "groups"):
        shapes = [replace(SHORT, **{name: getattr(SHORT, name) * factor}) for factor in FACTORS]
        costs = child(update_seconds, shapes)
        tokens = [shape.tokens for shape in shapes]
        rows.append(
            Row(
                f"cost by {LABELS[name]}: exponent of tokens",
                exponent(tokens, costs),
                "",
                at_most(1.1),
                per_token(tokens, costs),
            )
        )
    rows.append(staleness_row(bench))
    return rows


LABELS = {"group_size": "group size", "response": "response length", "groups": "minibatch size"}


def per_token(tokens: list[int], costs: list[float]) -> dict[str, float | str]:
    """Seconds at the smallest, and the cost of a token at each size over that."""
    base = costs[0] / tokens[0]
    relative = {f"x{n}": cost / count / base for n, count, cost in zip(FACTORS, tokens, costs, strict=True)}
    return {"seconds at x1": costs[0], **relative}


def update_seconds(shapes: list[Shape]) -> list[float]:
    """Sampling and learning at each shape; the smallest, which noise moves most, more often."""
    from scripts.bench.work import minibatch, sample, sampler, seconds, shaped_learner

    engine = sampler(shapes[0].model)
    costs = []
    for factor, shape in zip(FACTORS, shapes, strict=True):
        _, update = shaped_learner(shape)
        batch = minibatch(shape)

        def work(shape: Shape = shape, update=update, batch=batch) -> None:  # type: ignore[no-untyped-def]
            sample(shape, engine)
            update(batch)

        if factor == 1:
            work()
        costs.append(median(seconds(work, times=3 if factor == 1 else 1)))
    return costs


def staleness_row(bench: Bench) -> Row:
    """One collection of v minibatches from frozen weights and v updates: the loop itself."""
    costs = {v: child(loop_seconds, bench, v) for v in STALENESS}
    details: dict[str, float | str] = {f"x{v}": cost / costs[1] for v, cost in costs.items()}
    return Row(
        f"cost of an update by v: v={STALENESS[-1]} over v=1",
        costs[STALENESS[-1]] / costs[1],
        "",
        at_most(1.1),
        {"seconds at x1": costs[1], **details},
    )


def loop_seconds(bench: Bench, v: int) -> float:
    """Seconds of an update over whole collections, the first left out."""
    from grpo_lab.train import train
    from scripts.bench.work import config

    cycles = 2 * STALENESS[-1]
    folder = bench.folder / "loop"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    overrides = [*bench.overrides(SMALL), f"schedule.v={v}", f"schedule.updates={cycles}", f"run_dir={folder}"]
    train(config(*overrides), folder, resuming=False)
    rows = [json.loads(line)["time"] for line in Path(folder / "metrics.jsonl").read_text().splitlines()]
    counted = rows[STALENESS[-1] :]
    return sum(row[phase] for row in counted for phase in PHASES) / len(counted)
