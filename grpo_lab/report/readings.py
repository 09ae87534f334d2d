"""What a table asks of a run: a measure at the end, over its checkpoints, or when an ordering says.

At the papers' scale final scores are of stored evaluations (`python -m grpo_lab.evaluate` with the definition's words),
at the tiny scale of the run's own held-out problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from grpo_lab.config import ConfigError
from grpo_lab.evaluation.estimators import over_checkpoints
from grpo_lab.report.evaluated import Evaluated, Opinion, evaluated_on, lighteval_opinions
from grpo_lab.report.measures import (
    ALONE,
    KINDS,
    Accuracy,
    Frame,
    Reading,
    curve,
    read_at,
    read_end,
    read_over,
    score_counts,
)
from grpo_lab.report.stored import Counts, Series, StoredRun
from grpo_lab.tables.definition import Definition
from grpo_lab.tables.when import When

BASE = "base"
# The seed that papers show where they show one alone.
ONE_SEED = 42
# `Spread` by the words of a definition.
_STATISTICS = {"minimum": "min", "maximum": "max", "median": "median", "mean": "mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A definition at a scale. `benchmarks`: of final scores, each with its responses a problem; none: the run's own
    held-out problems, as many responses as the run's evaluations have. `lighteval`: scores of RG's tables are its.
    `frame`: all runs share it."""

    window: int | None = None
    benchmarks: Mapping[str, int] = field(default_factory=dict)
    lighteval: bool = False
    frame: Frame = ALONE

    @classmethod
    def of(cls, definition: Definition, scale: str) -> Self:
        """
        Raises:
            ConfigError: the definition's `evaluate` names benchmarks without a number of responses, or with several
                where all count together.
        """
        benchmarks: dict[str, int] = {}
        commands = definition.evaluate.get(scale, ())
        for words in commands:
            named = re.search(r"evaluation\.benchmarks=\[([^\]]*)\]", words)
            n = re.search(r"evaluation\.n=(\d+)", words)
            if not named or not n:
                raise ConfigError(
                    f"{definition.target}.yaml: evaluate.{scale} must say evaluation.benchmarks=[...] evaluation.n=..."
                )
            benchmarks |= dict.fromkeys(named.group(1).split(","), int(n.group(1)))
        lighteval = any("lighteval=true" in words.split() for words in commands)
        if not lighteval and len(set(benchmarks.values())) > 1:
            # Their problems are pooled.
            raise ConfigError(f"{definition.target}.yaml: evaluate.{scale} must say one evaluation.n= for all")
        return cls(window=definition.window.get(scale), benchmarks=benchmarks, lighteval=lighteval)

    def end(self, run: StoredRun, name: str) -> Reading | None:
        """A measure at a run's end; None where nothing there gives it."""
        measure = KINDS[name]
        if isinstance(measure, Accuracy):
            if measure.after_training and self.benchmarks:
                return self._evaluated(run, name, _last(run))
            if self._task(name) is not None:
                series = self.checkpoints(run, name)
                return Reading(float(series.value[-1])) if len(series) else None
        return read_end(run, name, self.window, self.frame)

    def base(self, run: StoredRun, name: str) -> Reading | None:
        """A measure of accuracy of the untrained model that a run began with; None for others."""
        measure = KINDS[name]
        if not isinstance(measure, Accuracy):
            return None
        if measure.after_training and self.benchmarks:
            return self._evaluated(run, name, BASE)
        if self._task(name) is not None:
            judged = self._opinions(run, name).get(BASE)
            return None if judged is None else Reading(judged.score)
        return read_at(run, name, 0, self.frame)

    def checkpoints(self, run: StoredRun, name: str) -> Series:
        """A measure of accuracy at each checkpoint: by lighteval where the table asks for it, else at each evaluation
        while training. Without the untrained model."""
        if self._task(name) is None:
            return curve(run, name, self.frame).within(0, run.updates)
        judged = self._opinions(run, name)
        return Series.of(sorted((e.update, e.score) for target, e in judged.items() if target != BASE and e.update))

    def curve(self, run: StoredRun, name: str) -> Series:
        """A measure against updates, with the untrained model where it is known."""
        if self._task(name) is None:
            return curve(run, name, self.frame)
        after = self.checkpoints(run, name)
        before = self.base(run, name)
        pairs = [] if before is None else [(0, before.value)]
        return Series.of([*pairs, *zip(after.update.tolist(), after.value.tolist(), strict=True)])

    def statistic(self, run: StoredRun, name: str, statistic: str) -> float | None:
        """Minimum, maximum, median or mean over a run's checkpoints; None without any."""
        values = self.checkpoints(run, name).value
        return float(getattr(over_checkpoints(values.tolist()), _STATISTICS[statistic])) if len(values) else None

    def course(self, run: StoredRun, name: str, after: int, to: int) -> list[tuple[int, Reading]]:
        """A measure at each update from `after` to `to`, both included, that gives it."""
        if not isinstance(KINDS[name], Accuracy) or self._task(name) is not None:
            series = self.curve(run, name).within(after - 1, to)
            return [(u, Reading(value)) for u, value in zip(series.update.tolist(), series.value.tolist(), strict=True)]
        found = [(u, read_at(run, name, u, self.frame)) for u in sorted(run.evaluations) if after <= u <= to]
        return [(u, reading) for u, reading in found if reading is not None]

    def evaluated(self, run: StoredRun, name: str) -> list[int]:
        """Updates with an evaluation that gives a measure; of one of training, with any."""
        return self.curve(run, name).update.tolist() if self._task(name) else sorted(run.evaluations)

    def of_evaluations(self, name: str) -> bool:
        """Whether a measure is of stored evaluations, and not of the run's own."""
        measure = KINDS[name]
        if not isinstance(measure, Accuracy):
            return False
        return (measure.after_training and bool(self.benchmarks)) or self._task(name) is not None

    def evaluation_settings(self, run: StoredRun, name: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Of each stored evaluation that a measure is read from: what it is on, of which model, and its settings."""
        if not self.of_evaluations(name):
            return
        if (task := self._task(name)) is not None:
            for model, opinion in self._opinions(run, name).items():
                yield task, model, opinion.settings
            return
        for benchmark in self.benchmarks:
            for model in (BASE, _last(run)):
                if (found := self._evaluation(run, model, benchmark)) is not None:
                    yield benchmark, model, found.settings

    def at(self, run: StoredRun, name: str, when: When) -> Reading | None:
        """A measure at the one place of a run that `when` names: its end, or an update (of a measure of training, the
        last value logged by then)."""
        if when.phrase == "end":
            return self.end(run, name)
        assert when.phrase == "at update N", when
        assert when.update is not None
        if isinstance(KINDS[name], Accuracy):
            return read_at(run, name, when.update, self.frame)
        until = curve(run, name).within(0, when.update).value if when.update <= run.updates else np.array([])
        return Reading(float(until[-1])) if len(until) else None

    def over(self, run: StoredRun, name: str, spans: Sequence[tuple[int, int]]) -> list[Reading | None]:
        """A measure over each of several stretches of updates."""
        if self._task(name) is None:
            return [read_over(run, name, *span, self.frame) for span in spans]
        parts = [self.checkpoints(run, name).within(*span).value for span in spans]
        return [Reading(float(np.mean(part))) if len(part) else None for part in parts]

    def _task(self, name: str) -> str | None:
        """lighteval's task, where a measure is of its scores."""
        measure = KINDS[name]
        return measure.task if isinstance(measure, Accuracy) and self.lighteval else None

    def _opinions(self, run: StoredRun, name: str) -> dict[str, Opinion]:
        task = self._task(name)
        assert task is not None, name
        return lighteval_opinions(run.folder, task, self.benchmarks[name])

    def _evaluation(self, run: StoredRun, model: str, benchmark: str) -> Evaluated | None:
        return evaluated_on(run.folder, model, benchmark, self.benchmarks[benchmark])

    def _evaluated(self, run: StoredRun, name: str, model: str) -> Reading | None:
        """From stored evaluations on all benchmarks together, each problem counting the same; None unless all are
        there."""
        parts = [(each, self._evaluation(run, model, each)) for each in self.benchmarks]
        if any(found is None for _, found in parts):
            return None
        whole = [(benchmark, found.counts) for benchmark, found in parts if found is not None]
        pooled = Counts(
            tuple(f"{benchmark}/{each}" for benchmark, counts in whole for each in counts.ids),
            np.concatenate([counts.correct for _, counts in whole]),
            whole[0][1].n,
        )
        return score_counts(name, pooled, None)


def _last(run: StoredRun) -> str:
    """The name of a run's last model."""
    return f"update_{run.updates:06d}"
