"""One update end to end: the real command, split by what it spends its time on."""

from __future__ import annotations

from statistics import median

from scripts.bench.measure import child
from scripts.bench.report import Row, at_most
from scripts.bench.runs import PHASES, Bench
from scripts.bench.shapes import LONG, REAL, SHORT, Shape, word

UPDATES = {SHORT.name: 4, LONG.name: 1, REAL.name: 1}


def measure(bench: Bench) -> list[Row]:
    rows = []
    for shape in (SHORT, LONG, REAL):
        # Those that the comparison with TRL has made serve here as well.
        runs = bench.runs.get(shape.name) or [bench.train(shape, updates=UPDATES[shape.name])]
        updates = [update for run in runs for update in run.updates]
        parts = {phase: median(update[phase] for update in updates) for phase in PHASES}
        written, parsed = child(verify_seconds, shape)
        parts["collect"] -= written
        parts["verify"] = written
        total = sum(parts.values())
        outside = parts["verify"] + parts["other"]
        named = {phase: parts[phase] for phase in ("collect", "sync", "learn", "verify", "other")}
        rows += [
            Row(f"{shape.name}: one update", total, "s", details={**named}),
            Row(f"{shape.name}: outside collect, sync and learn", 100 * outside / total, "%", at_most(5)),
            Row(f"{shape.name}: the same if every answer takes a parser", 100 * (outside + parsed) / total, "%"),
        ]
    return rows


def verify_seconds(shape: Shape) -> tuple[float, float]:
    """Seconds to judge a minibatch's answers: numbers, which is what the runs here have; and expressions, each of which
    takes a parser in a worker."""
    from grpo_lab.rewards import Verifier
    from grpo_lab.types import Problem
    from scripts.bench.work import config, seconds

    settings = config().verifier
    filler = f"{word(1)} " * (shape.response - 1)
    number = Problem(id="bench", question="", gold="0", tolerance=shape.model.vocab / 2)
    numbers = [(number, filler + word(index)) for index in range(shape.responses)]
    expressions = [
        (
            Problem(id="bench", question="", gold=rf"\frac{{{index}}}{{7}}"),
            rf"{filler}\boxed{{\frac{{{index}}}{{7}}+0}}",
        )
        for index in range(shape.responses)
    ]
    with Verifier("math", workers=settings.workers, timeout=settings.timeout) as verifier:
        # Workers start with the first answer that takes one.
        verifier.judge(expressions[:4])
        (parsed,) = seconds(lambda: verifier.judge(expressions))
        return median(seconds(lambda: verifier.judge(numbers), times=3)), parsed
