"""The same work in TRL's GRPOTrainer and in `grpo_lab.train`, in turn: A B A B."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from scripts.bench.report import Row, at_least, at_most, ratio
from scripts.bench.runs import TRL_PYTHON, TRL_VARIABLE, Bench, Trl, trl_python
from scripts.bench.shapes import LONG, REAL, SHORT, Shape

ROUNDS = 2
MIB = 2**20


@dataclass(frozen=True)
class Comparison:
    """`updates` are timed in each turn, after `warm` that are not, in which memory takes its shape. To reach: so many
    times TRL's updates a second, with this share of its peak."""

    shape: Shape
    warm: int
    updates: int
    speed: float
    memory: float


COMPARISONS = (
    Comparison(SHORT, warm=1, updates=4, speed=1.5, memory=0.6),
    Comparison(LONG, warm=1, updates=1, speed=5.0, memory=0.3),
    Comparison(REAL, warm=2, updates=2, speed=3.0, memory=0.4),
)


def measure(bench: Bench) -> list[Row]:
    interpreter = trl_python()
    if interpreter is None:
        print(f"TRL is not installed: `make bench` makes {TRL_PYTHON}, or {TRL_VARIABLE}=python names another\n")
        return []
    rows = []
    for comparison in COMPARISONS:
        shape, theirs, ours, peaks = comparison.shape, [], [], []
        # One batch of all responses, float32, no recomputation: its fastest settings here.
        with Trl(bench, shape, interpreter, micro_batch=shape.responses, options=[]) as trl:
            for _ in range(comparison.warm):
                trl.update()
            for _ in range(ROUNDS):
                theirs += [trl.update() for _ in range(comparison.updates)]
                run = bench.train(shape, warm=comparison.warm, updates=comparison.updates)
                ours += run.seconds
                peaks.append(run.peak)
        speed, least, largest = ratio(theirs, ours)
        rows += [
            Row(
                f"{shape.name}: updates/s over TRL's",
                speed,
                "x",
                at_least(comparison.speed),
                {
                    "ours": f"{median(ours):.3g} s",
                    "TRL": f"{median(theirs):.3g} s",
                    "pairs": f"{least:.2f}..{largest:.2f}",
                },
                {"ours": ours, "TRL": theirs},
            ),
            Row(
                f"{shape.name}: peak memory over TRL's",
                max(peaks) / trl.peak,
                "",
                at_most(comparison.memory),
                {"ours": f"{max(peaks) // MIB} MiB", "TRL": f"{trl.peak // MIB} MiB"},
            ),
        ]
    return rows


def measure_settings(bench: Bench) -> list[Row]:
    """TRL with other settings than the ones compared with: passes over fewer responses, and its own defaults."""
    interpreter = trl_python()
    rows = []
    if interpreter is not None:
        for shape in (SHORT, LONG, REAL):
            for name, micro_batch, options in (
                ("FP32, passes of 4 groups", 4 * shape.group_size, []),
                ("FP32, passes of 1 group", shape.group_size, []),
                ("its defaults: BF16, recomputation, passes of 8", 8, ["--bf16", "--checkpointing"]),
            ):
                with Trl(bench, shape, interpreter, micro_batch=micro_batch, options=options) as trl:
                    trl.update()
                    taken = trl.update()
                rows.append(Row(f"{shape.name}: TRL, {name}", taken, "s", details={"peak": f"{trl.peak // MIB} MiB"}))
    return rows
