"""What an update costs as it grows: by group size, response length, minibatch size, and v."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from scripts.bench.measure import child
from scripts.bench.report import Row, at_most, exponent
from scripts.bench.runs import PHASES, Bench
from scripts.bench.shapes import SHORT, Shape

FACTORS = (1, 2, 8)
# Cheap updates, where what does not grow with tokens shows first.
SMALL = replace(SHORT, groups=8)
STALENESS = (1, 8)


SWEPT = {"group_size": "group size", "response": "response length", "groups": "minibatch size"}


def measure(bench: Bench) -> list[Row]:
    return [*(swept_row(name, label) for name, label in SWEPT.items()), staleness_row(bench)]


def swept_row(name: str, label: str) -> Row:
    shapes = [replace(SHORT, **{name: getattr(SHORT, name) * factor}) for factor in FACTORS]
    sampling, learning = child(update_seconds, shapes)
    tokens = [shape.tokens for shape in shapes]
    costs = [one + other for one, other in zip(sampling, learning, strict=True)]
    base = costs[0] / tokens[0]
    details: dict[str, float | str] = {
        "sampling": exponent(tokens, sampling),
        "learning": exponent(tokens, learning),
        "seconds at x1": costs[0],
        **{f"x{n}": cost / count / base for n, count, cost in zip(FACTORS, tokens, costs, strict=True)},
    }
    raw = {"sampling": sampling, "learning": learning}
    return Row(f"cost by {label}: exponent of tokens", exponent(tokens, costs), "", at_most(1.1), details, raw)


def update_seconds(shapes: list[Shape]) -> tuple[list[float], list[float]]:
    """Sampling and learning at each shape; the smallest, which noise moves most, more often."""
    from scripts.bench.work import minibatch, sample, sampler, seconds, shaped_learner

    engine = sampler(shapes[0].model)
    _, update = shaped_learner(shapes[0])
    sampling, learning = [], []
    for factor, shape in zip(FACTORS, shapes, strict=True):
        batch = minibatch(shape)
        times = 3 if factor == 1 else 1
        if factor == 1:
            sample(shape, engine)
            update(batch)
        sampling.append(median(seconds(partial(sample, shape, engine), times=times)))
        learning.append(median(seconds(partial(update, batch), times=times)))
    return sampling, learning


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
