"""Two groups of runs against each other, and the trend of one: figures, intervals, and what they say of a relation.

With two seeds or more there is a t interval over seeds and, of accuracy, a paired bootstrap over problems of the seeds'
mean; with one seed the latter alone. A measure of training with one seed is not tested: updates of one run are no
independent evidence about another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from grpo_lab.report.collate import Group
from grpo_lab.report.inference import Interval, change, over_problems, over_seeds, within_run
from grpo_lab.report.measures import MEASURES, Accuracy, Reading, curve, read_at
from grpo_lab.report.readings import Reader
from grpo_lab.report.stored import StoredRun
from grpo_lab.tables.definition import Ordering

Verdict = Literal["holds", "reversed", "differs", "not distinguishable", "not tested", "not run"]
# The most cautious first.
CAUTION: tuple[Verdict, ...] = ("reversed", "differs", "not run", "not distinguishable", "not tested", "holds")
# "~" and "flat" hold where the interval lies within this: a hundredth of responses (one point of accuracy), of a
# measure of training a share of the right side's value (of a trend's own mean).
POINT = 0.01
RELATIVE = 0.1
FEWEST_POINTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two groups, or the trend of one. `left`, `right`: their values, over the seeds that both have; `difference`: left
    - right, or what a trend changes from the first to the last update. `margin`: of equivalence, where one counts."""

    left_group: Group
    right_group: Group | None
    verdict: Verdict
    left: float | None = None
    right: float | None = None
    difference: float | None = None
    seeds: tuple[int, ...] = ()
    intervals: tuple[Interval, ...] = ()
    margin: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One stretch of one comparison: values, and differences by seed and, of accuracy, by problem (seeds' mean)."""

    left: float
    right: float
    by_seed: tuple[float, ...]
    by_problem: np.ndarray | None


def most_cautious(verdicts: Sequence[Verdict]) -> Verdict:
    """What several verdicts say together; of none, that nothing was run."""
    return min(verdicts, key=CAUTION.index, default="not run")


def verdict_of(relation: str, interval: Interval, margin: float) -> Verdict:
    """What an interval of left - right, or of a trend's change, says about a relation."""
    low, high = interval.low, interval.high
    if relation in ("~", "flat"):
        if -margin < low and high < margin:
            return "holds"
        return "differs" if low > 0 or high < 0 else "not distinguishable"
    if relation in ("<", "falls"):
        low, high = -high, -low
    return "holds" if low > 0 else "reversed" if high < 0 else "not distinguishable"


def compare(reader: Reader, ordering: Ordering, left: Group, right: Group) -> Comparison:
    both = sorted(_seeds(left) & _seeds(right))
    if not both:
        return Comparison(left_group=left, right_group=right, verdict="not run", why=_why_not(left, right))
    name = ordering.measure
    spans = _spans(ordering, [run for group in (left, right) for seed in both for run in _runs(group, seed)])
    readings = {seed: [_readings(reader, ordering, group, seed, spans) for group in (left, right)] for seed in both}
    # A seed counts where nothing is missing on either side.
    pairs = {
        seed: [(a, b) for a, b in zip(*sides, strict=True) if a is not None and b is not None]
        for seed, sides in readings.items()
        if sides[0] and all(each is not None for side in sides for each in side)
    }
    if not pairs:
        why = f"no {name} {ordering.when} on both sides"
        return Comparison(left_group=left, right_group=right, verdict="not run", why=why)
    seeds = tuple(pairs)
    parts = [_part(stretch) for stretch in zip(*pairs.values(), strict=True)]
    values = [float(np.mean([each.left for each in parts])), float(np.mean([each.right for each in parts]))]
    judged = [_judge_part(ordering.relation, part, _margin(name, part.right)) for part in parts]
    verdict = most_cautious([each for each, _ in judged])
    return Comparison(
        left_group=left,
        right_group=right,
        verdict=verdict,
        left=values[0],
        right=values[1],
        difference=values[0] - values[1],
        seeds=seeds,
        intervals=judged[0][1] if len(judged) == 1 else (),
        margin=_margin(name, values[1]) if ordering.relation == "~" else None,
        why=_stretches([each for each, _ in judged]) if len(judged) > 1 else _untested(verdict, parts[0]),
    )


def _judge_part(relation: str, part: _Part, margin: float) -> tuple[Verdict, tuple[Interval, ...]]:
    if not all(map(math.isfinite, part.by_seed)):
        return "not tested", ()
    found = [over_seeds(part.by_seed), None if part.by_problem is None else over_problems(part.by_problem)]
    intervals = tuple(each for each in found if each is not None)
    verdicts = [verdict_of(relation, each, margin) for each in intervals]
    return _agreed(verdicts), intervals


def _agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """What all tests of one difference say; where they do not say the same, nothing can be told."""
    if not verdicts:
        return "not tested"
    return verdicts[0] if len(set(verdicts)) == 1 else "not distinguishable"


def trend(reader: Reader, ordering: Ordering, group: Group) -> Comparison:
    seeds = tuple(sorted(_seeds(group)))
    if not seeds:
        return Comparison(left_group=group, right_group=None, verdict="not run", why=_why_not(group))
    runs = [group.finished[seed] for seed in seeds]
    found = [_stretch(ordering, run) for run in runs]
    if any(len(update) < FEWEST_POINTS for update, _ in found):
        why = f"fewer than {FEWEST_POINTS} points {ordering.when}"
        return Comparison(left_group=group, right_group=None, verdict="not run", seeds=seeds, why=why)
    # [T] of training, [N, T] of problems.
    values = [value.mean(axis=0) if value.ndim > 1 else value for _, value in found]
    changes = [float(change(update, value)) for (update, _), value in zip(found, values, strict=True)]
    mean = float(np.mean([value.mean() for value in values]))
    margin = _margin(ordering.measure, mean)
    intervals = _trend_intervals(found, changes) if all(map(math.isfinite, changes)) else ()
    verdict = _agreed([verdict_of(ordering.relation, each, margin) for each in intervals])
    return Comparison(
        left_group=group,
        right_group=None,
        verdict=verdict,
        left=mean,
        difference=float(np.mean(changes)),
        seeds=seeds,
        intervals=intervals,
        margin=margin if ordering.relation == "flat" else None,
        why="not finite" if not all(map(math.isfinite, changes)) else "too few points" if not intervals else "",
    )


def _trend_intervals(found: Sequence[tuple[np.ndarray, np.ndarray]], changes: Sequence[float]) -> tuple[Interval, ...]:
    tests = [over_seeds(changes)]
    if all(value.ndim > 1 for _, value in found):
        by_seed = [change(update, value) for update, value in found]
        if len({len(each) for each in by_seed}) == 1:
            tests.append(over_problems(np.mean(by_seed, axis=0)))
    elif len(found) == 1:
        tests.append(within_run(*found[0]))
    return tuple(each for each in tests if each is not None)


def _stretch(ordering: Ordering, run: StoredRun) -> tuple[np.ndarray, np.ndarray]:
    """Updates [T] of the stretch that a trend is of, both ends included, and values: [T], or [N, T] of problems."""
    spans = ordering.when.spans(run.updates, run.evaluations)
    after, to = (spans[0][0], spans[-1][1]) if spans else (0, run.updates)
    if not isinstance(MEASURES[ordering.measure], Accuracy):
        series = curve(run, ordering.measure).within(after, to)
        return series.update, series.value
    readings = [(u, read_at(run, ordering.measure, u)) for u in sorted(run.evaluations) if after <= u <= to]
    whole = [(u, each.problems) for u, each in readings if each is not None and each.problems is not None]
    update = np.array([u for u, _ in whole])
    return update, np.array([list(problems.values()) for _, problems in whole]).T


def _spans(ordering: Ordering, runs: Sequence[StoredRun]) -> list[tuple[int, int]]:
    """The stretches to compare over, that all runs have."""
    evaluated = set.intersection(*(set(run.evaluations) for run in runs))
    return ordering.when.spans(min(run.updates for run in runs), evaluated)


def _runs(group: Group, seed: int) -> list[StoredRun]:
    return [each.run for each in group.placed if each.seed == seed and each.run is not None]


def _seeds(group: Group) -> set[int]:
    return {each.seed for each in group.placed if each.run is not None}


def _readings(
    reader: Reader, ordering: Ordering, group: Group, seed: int, spans: Sequence[tuple[int, int]]
) -> list[Reading | None]:
    """A side's readings for one seed, one a stretch."""
    name = ordering.measure
    if group.is_base:
        found = next((each for run in _runs(group, seed) if (each := reader.base(run, name)) is not None), None)
        return [found] * max(len(spans), 1)
    run = group.finished[seed]
    if ordering.when.phrase in ("end", "at update N"):
        return [reader.at(run, name, ordering.when)]
    return reader.over(run, name, spans)


def _part(pairs: Sequence[tuple[Reading, Reading]]) -> _Part:
    """One stretch, from the readings of both sides for each seed."""
    return _Part(
        left=float(np.mean([a.value for a, _ in pairs])),
        right=float(np.mean([b.value for _, b in pairs])),
        by_seed=tuple(a.value - b.value for a, b in pairs),
        by_problem=_by_problem(pairs),
    )


def _by_problem(pairs: Sequence[tuple[Reading, Reading]]) -> np.ndarray | None:
    """[N]: differences of each problem that every reading has, averaged over seeds; None where they are of none."""
    problems = [(a.problems, b.problems) for a, b in pairs if a.problems is not None and b.problems is not None]
    if len(problems) < len(pairs):
        return None
    common = [each for each in problems[0][0] if all(each in a and each in b for a, b in problems)]
    return np.array([np.mean([a[each] - b[each] for a, b in problems]) for each in common])


def _margin(name: str, value: float) -> float:
    """Of equivalence."""
    measure = MEASURES[name]
    return POINT * measure.unit if isinstance(measure, Accuracy) else RELATIVE * abs(value)


def _why_not(*groups: Group) -> str:
    lacking = [each for group in groups for each in group.placed if each.run is None]
    if lacking and all(not _seeds(group) for group in groups):
        return "no run is finished"
    return "no seed is finished on both sides" if len(groups) > 1 else "no run is finished"


def _untested(verdict: Verdict, part: _Part) -> str:
    if verdict != "not tested":
        return ""
    if not all(map(math.isfinite, part.by_seed)):
        return "not finite"
    return "one seed" if part.by_problem is None else f"one seed, and {len(part.by_problem)} problems"


def _stretches(verdicts: Sequence[Verdict]) -> str:
    counts = {each: verdicts.count(each) for each in dict.fromkeys(verdicts)}
    return f"of {len(verdicts)} stretches " + ", ".join(f"{count} {each}" for each, count in counts.items())
