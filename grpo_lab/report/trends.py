"""The trend of one group: what its least-squares line changes over a stretch of updates, and whether the quarters of
the stretch bear it out.

Tested over seeds and, of accuracy, over problems; a measure of training with one seed is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from grpo_lab.report.collate import Group
from grpo_lab.report.comparing import by_problem
from grpo_lab.report.inference import Interval, change, interval_over_problems, interval_over_seeds
from grpo_lab.report.readings import Reader
from grpo_lab.report.rules import Comparison, Side, Verdict, agreed, margin_of, verdict_of
from grpo_lab.report.stored import StoredRun
from grpo_lab.tables.definition import Ordering
from grpo_lab.tables.when import QUARTERS

FEWEST_POINTS = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Course:
    """A run's points in the stretch: `update`, `value` [T], both ends of the stretch included; `changes`: of each
    problem that all points have, by id; None of what is not of problems."""

    update: np.ndarray
    value: np.ndarray
    changes: Mapping[str, float] | None

    @property
    def change(self) -> float:
        return float(change(self.update, self.value))

    @property
    def parts(self) -> list[float]:
        """Means of its quarters; of fewer points, the points."""
        return [float(each.mean()) for each in np.array_split(self.value, min(QUARTERS, len(self.value)))]


def trend(reader: Reader, ordering: Ordering, group: Group) -> Comparison:
    """Judge whether a group rises, falls or stays flat, by its finished seeds."""
    seeds = tuple(sorted(group.finished))
    side = Side(group=group, measure=ordering.measure)
    nothing = partial(Comparison, left_side=side, right_side=None, verdict="not run")
    if not seeds:
        return nothing(why="no run is finished")
    found = [_course(reader, ordering, group.finished[seed]) for seed in seeds]
    courses = [each for each in found if each is not None]
    if len(courses) < len(seeds):
        return nothing(seeds=seeds, why=f"fewer than {FEWEST_POINTS} points {ordering.when}")
    changes = [each.change for each in courses]
    mean = float(np.mean([each.value.mean() for each in courses]))
    finite = all(map(math.isfinite, changes))
    intervals = _intervals(courses, changes) if finite else ()
    margin = margin_of(ordering.measure, mean)
    quarters = tuple(np.mean(list(zip(*(each.parts for each in courses), strict=False)), axis=1).tolist())
    counting = ordering.relation == "flat" or ordering.when.phrase == "throughout"
    verdict = agreed([verdict_of(ordering.relation, each, margin) for each in intervals])
    return Comparison(
        left_side=side,
        right_side=None,
        verdict=_borne_out(ordering, verdict, quarters, mean, margin) if counting else verdict,
        left=mean,
        difference=float(np.mean(changes)),
        seeds=seeds,
        intervals=intervals,
        margin=margin if ordering.relation == "flat" else None,
        quarters=quarters if counting else (),
        why="" if intervals else "one seed" if finite else "not finite",
    )


def _course(reader: Reader, ordering: Ordering, run: StoredRun) -> _Course | None:
    """A run's points; None where there are too few for a line."""
    spans = ordering.when.spans(run.updates, reader.evaluated(run, ordering.measure))
    points = reader.course(run, ordering.measure, spans[0][0], spans[-1][1]) if spans else []
    if len(points) < FEWEST_POINTS:
        return None
    update = np.array([u for u, _ in points])
    problems = [each.problems for _, each in points if each.problems is not None]
    changes = None
    if len(problems) == len(points):
        common = [each for each in problems[0] if all(each in other for other in problems[1:])]
        rows = np.array([[each[problem] for each in problems] for problem in common])
        changes = dict(zip(common, change(update, rows).tolist(), strict=True)) if common else None
    return _Course(update, np.array([each.value for _, each in points]), changes)


def _intervals(courses: Sequence[_Course], changes: Sequence[float]) -> tuple[Interval, ...]:
    tests = [interval_over_seeds(changes)]
    problems = [each.changes for each in courses if each.changes is not None]
    if len(problems) == len(courses):
        tests.append(interval_over_problems(by_problem(problems)))
    return tuple(each for each in tests if each is not None)


def _borne_out(ordering: Ordering, verdict: Verdict, quarters: Sequence[float], mean: float, margin: float) -> Verdict:
    """A verdict on the whole stretch, as its quarters leave it: flat means each within the margin of the whole's mean;
    a rise or fall throughout, each beyond the one before. A change the other way that not each quarter has part in is a
    failure in part."""
    if ordering.relation == "flat":
        within = all(abs(each - mean) < margin for each in quarters)
        return "not distinguishable" if verdict == "holds" and not within else verdict
    if verdict not in ("holds", "reversed"):
        return verdict
    upwards = (ordering.relation == "rises") == (verdict == "holds")
    steps = np.diff(quarters)
    if np.all(steps > 0 if upwards else steps < 0):
        return verdict
    return "not distinguishable" if verdict == "holds" else "fails in part"
