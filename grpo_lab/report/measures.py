"""The measures of `grpo_lab.tables.definition.MEASURES`, each as a function of a stored run.

Values are in the unit that the papers print: per cent where they print per cent. A measure of accuracy comes from
counts of right responses, so that two runs can be compared problem by problem; one of training from rows of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from grpo_lab.evaluation.estimators import difficulty, pass_at_k
from grpo_lab.report.inference import off_neighbours
from grpo_lab.report.stored import Counts, Series, StoredRun
from grpo_lab.report.throughput import timing_of

# Where a table names no window, the end of a run is this share of its updates.
END_SHARE = 0.1
PERCENT = 100.0
# One number from the rows of a stretch of updates.
Reduce = Callable[[np.ndarray], float]
# Values of problems [N] from counts, those of the untrained model beside them, by problem; not a problem's: NaN.
Score = Callable[[Counts, Counts], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """A share of right responses or of solved problems, times `unit`. `after_training`: at the papers' scale it is of
    stored evaluations by `grpo_lab.evaluate`; `task`: by lighteval, on this task of its own. `digits`: decimals, as the
    papers print them."""

    score: Score
    unit: float = PERCENT
    digits: int = 2
    after_training: bool = False
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A column of training rows, reduced over a stretch of updates. `digits`: significant ones."""

    column: str
    reduce: Reduce
    digits: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One number of a whole run; of timings, but for its first `warm_up` updates."""

    of: Callable[[StoredRun, int], float | None]
    digits: int = 3


Measure = Accuracy | Training | Whole


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """What a table lays over all its runs alike. `split`: the untrained model's counts, which say of each problem
    whether it is solvable, and the run that they are of. `warm_up`: updates that no timing counts."""

    split: Counts | None = None
    split_run: StoredRun | None = None
    warm_up: int = 0


# Of a run by itself.
ALONE = Frame()


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values))


def _last(values: np.ndarray) -> float:
    return float(values[-1])


def _share(counts: Counts, _base: Counts) -> np.ndarray:
    return counts.correct / counts.n


def _pass_at(k: int) -> Score:
    def score(counts: Counts, _base: Counts) -> np.ndarray:
        if k > counts.n:
            return np.full(len(counts), np.nan)
        return np.array([pass_at_k(counts.n, int(c), k) for c in counts.correct])

    return score


def _side(base: Counts, name: str) -> np.ndarray:
    """[N]: whether each problem is on that side of GG's split."""
    rates = dict(zip(base.ids, (base.correct / base.n).tolist(), strict=True))
    return np.isin(base.ids, difficulty(rates)[name])


def _solvable(counts: Counts, base: Counts) -> np.ndarray:
    return np.where(_side(base, "solvable"), counts.correct / counts.n, np.nan)


def _unsolved(counts: Counts, base: Counts) -> np.ndarray:
    return np.where(_side(base, "unsolved"), (counts.correct > 0).astype(float), np.nan)


def _rate(run: StoredRun, warm_up: int) -> float | None:
    timing = timing_of(run, warm_up)
    return None if timing is None else timing.rate


def _instability(run: StoredRun, _warm_up: int) -> float | None:
    scores = curve(run, "mean").within(run.updates // 2, run.updates).value
    off = off_neighbours(scores)
    return float(np.sqrt(np.mean(off**2))) if len(off) else None


KINDS: Mapping[str, Measure] = {
    "average": Accuracy(score=_share, after_training=True),
    **{f"pass@{k}": Accuracy(score=_pass_at(k), after_training=True) for k in (1, 4, 8, 16, 32)},
    "mean": Accuracy(score=_share),
    "best": Accuracy(score=_pass_at(32)),
    "pass@1 of 50": Accuracy(score=_share, digits=1),
    "instability": Whole(of=_instability),
    "aime24": Accuracy(score=_share, unit=1.0, digits=4, task="aime24"),
    "math500": Accuracy(score=_share, unit=1.0, digits=4, task="math_500"),
    "solvable": Accuracy(score=_solvable),
    "unsolved": Accuracy(score=_unsolved, digits=1),
    "k3": Training(column="mismatch/k3", reduce=_mean),
    "ess": Training(column="mismatch/ess_sequence", reduce=_mean),
    "drift": Training(column="mismatch/drift", reduce=_mean),
    "gradient norm": Training(column="grad_norm", reduce=_mean),
    "entropy": Training(column="entropy", reduce=_mean),
    "length": Training(column="response/length", reduce=_mean),
    "responses": Training(column="total/responses", reduce=_last, digits=6),
    "reward": Training(column="reward/retained", reduce=_mean),
    "iterations/s": Whole(of=_rate, digits=4),
    "reference KL": Training(column="kl/reference", reduce=_mean),
    "log ratio": Training(column="reference/log_ratio", reduce=_mean),
    "within-success ESS": Training(column="group/within_success_ess_mean", reduce=_mean),
    "median within-success ESS": Training(column="group/within_success_ess/q50", reduce=_mean),
    "groups with two right": Training(column="group/share_k2", reduce=_mean),
    "raw loss": Training(column="loss/raw", reduce=_mean),
    # The median over groups of each minibatch, its mean over minibatches.
    "q-ESS": Training(column="group/weight_ess/q50", reduce=_mean),
}


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A measure over a stretch of a run. `problems`: what each held-out problem contributes, by id, their mean being
    `value`; None where it is not of problems."""

    value: float
    problems: Mapping[str, float] | None = None


def curve(run: StoredRun, name: str, frame: Frame = ALONE) -> Series:
    """A measure against updates: at each evaluation, or at each update that logs it. Empty where nothing is there."""
    measure = KINDS[name]
    match measure:
        case Accuracy():
            readings = [(update, read_at(run, name, update, frame)) for update in sorted(run.evaluations)]
            return Series.of([(update, each.value) for update, each in readings if each is not None])
        case Training():
            return run.series(measure.column)
        case Whole():
            return Series.of([])


def read_at(run: StoredRun, name: str, update: int, frame: Frame = ALONE) -> Reading | None:
    """A measure of accuracy at one evaluation of the run's own held-out problems; None where there is none, or none of
    its problems counts."""
    counts = run.evaluations.get(update)
    return None if counts is None else score_counts(name, counts, frame.split)


def splits(name: str) -> bool:
    """Whether a measure is of problems by the untrained model's share of right responses."""
    measure = KINDS[name]
    return isinstance(measure, Accuracy) and measure.score in (_solvable, _unsolved)


def score_counts(name: str, counts: Counts, split: Counts | None) -> Reading | None:
    """A measure of accuracy from counts. `split`: the untrained model's, without which a measure that splits problems
    has no value, nor has it on other problems."""
    measure = KINDS[name]
    assert isinstance(measure, Accuracy), name
    if splits(name) and (split is None or split.ids != counts.ids):
        return None
    values = measure.unit * measure.score(counts, counts if split is None else split)
    counted = ~np.isnan(values)
    if not counted.any():
        return None
    problems = {each: float(value) for each, value, yes in zip(counts.ids, values, counted, strict=True) if yes}
    return Reading(float(np.mean(values[counted])), problems)


def read_over(run: StoredRun, name: str, after: int, to: int, frame: Frame = ALONE) -> Reading | None:
    """A measure over updates u with `after` < u <= `to`: the mean over the evaluations there, problem by problem, or
    over rows of training (of a count that only grows: the last). None where there is none."""
    measure = KINDS[name]
    match measure:
        case Accuracy():
            found = [
                reading
                for update in sorted(run.evaluations)
                if after < update <= to and (reading := read_at(run, name, update, frame)) is not None
            ]
            return _averaged(found)
        case Training():
            values = run.series(measure.column).within(after, to).value
            return Reading(measure.reduce(values)) if len(values) else None
        case Whole():
            value = measure.of(run, frame.warm_up)
            return None if value is None else Reading(value)


def read_end(run: StoredRun, name: str, window: int | None, frame: Frame = ALONE) -> Reading | None:
    """A measure at the end of a run: its last evaluation, or the last `window` updates (None: the last tenth)."""
    if isinstance(KINDS[name], Accuracy):
        return read_at(run, name, max(run.evaluations, default=-1), frame)
    return read_over(run, name, run.updates - end_length(run.updates, window), run.updates, frame)


def end_length(updates: int, window: int | None) -> int:
    """How many last updates are a run's end."""
    return window if window is not None else max(round(END_SHARE * updates), 1)


def _averaged(readings: list[Reading]) -> Reading | None:
    if not readings:
        return None
    problems = [each.problems for each in readings if each.problems is not None]
    assert len(problems) == len(readings), "evaluations are of problems"
    mean = {key: float(np.mean([each[key] for each in problems])) for key in problems[0]}
    return Reading(float(np.mean(list(mean.values()))), mean)
