"""Two groups of runs against each other, or two gains: figures, intervals, and what they say of a relation.

With two seeds or more there is a t interval over seeds and, of accuracy, a paired bootstrap over problems of the seeds'
mean; with one seed the latter alone. A measure of training with one seed is not tested: updates of one run are no
independent evidence about another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from grpo_lab.report.collate import Group
from grpo_lab.report.inference import interval_over_problems, interval_over_seeds
from grpo_lab.report.measures import KINDS, Accuracy, Reading
from grpo_lab.report.readings import Reader
from grpo_lab.report.rules import Comparison, Side, Stretch, agreed, margin_of, together, verdict_of
from grpo_lab.report.stored import StoredRun
from grpo_lab.tables.definition import Ordering
from grpo_lab.tables.when import PLACES

# One stretch of updates (a, b]; None: the one place in a run that the ordering names.
Span = tuple[int, int] | None
# What both sides have for one seed in one stretch.
Pair = tuple[Reading, Reading]


def compare(reader: Reader, ordering: Ordering, left: Side, right: Side) -> Comparison:
    """Judge one pair of sides by the seeds that both have finished."""
    nothing = partial(Comparison, left_side=left, right_side=right)
    groups = (*left.groups, *right.groups)
    both = sorted(set.intersection(*(set(each.finished) for each in groups)))
    if not both:
        lacking = not any(each.finished for each in groups)
        return nothing(verdict="not run", why="no run is finished" if lacking else "no seed is finished on both sides")
    trained = {seed: [each.finished[seed] for each in groups if not each.is_base] for seed in both}
    spans = _spans(reader, ordering, [run for runs in trained.values() for run in runs])
    for span in spans:
        if why := _other_checkpoints(reader, ordering, span, trained):
            return nothing(verdict="not compared", why=why)
    pairs = {seed: pair for seed in both if (pair := _pairs(reader, ordering, left, right, seed, spans))}
    if not pairs:
        return nothing(verdict="not run", why=f"no {ordering.measure} {ordering.when} on both sides")
    counts = [_checkpoints(reader, ordering, span, trained[next(iter(pairs))]) for span in spans]
    stretches = tuple(
        _judge(ordering, span, stretch, count)
        for span, stretch, count in zip(spans, zip(*pairs.values(), strict=True), counts, strict=True)
    )
    one = stretches[0] if len(stretches) == 1 else None
    values = [float(np.mean([each.left for each in stretches])), float(np.mean([each.right for each in stretches]))]
    return Comparison(
        left_side=left,
        right_side=right,
        verdict=together([each.verdict for each in stretches]),
        left=values[0],
        right=values[1],
        difference=values[0] - values[1],
        seeds=tuple(pairs),
        intervals=() if one is None else one.intervals,
        margin=margin_of(ordering.measure, values[1]) if ordering.relation in ("~", "<=") else None,
        checkpoints=None if one is None else one.checkpoints,
        stretches=stretches if one is None else (),
        why="" if one is None else one.why,
    )


def by_problem(mappings: Sequence[Mapping[str, float]]) -> np.ndarray:
    """[N]: for each problem that all of them have, by its id, their mean."""
    common = [each for each in mappings[0] if all(each in other for other in mappings[1:])]
    return np.array([np.mean([each[problem] for each in mappings]) for problem in common])


def _spans(reader: Reader, ordering: Ordering, runs: Sequence[StoredRun]) -> list[Span]:
    """The stretches to compare over, that all runs have."""
    if ordering.when.phrase in PLACES:
        return [None]
    evaluated = set.intersection(*(set(reader.evaluated(run, ordering.measure)) for run in runs))
    return list(ordering.when.spans(min(run.updates for run in runs), evaluated))


def _inside(reader: Reader, ordering: Ordering, span: Span, run: StoredRun) -> list[int]:
    """Updates of a stretch whose evaluations a measure of accuracy averages."""
    if span is None or not isinstance(KINDS[ordering.measure], Accuracy):
        return []
    return [update for update in reader.evaluated(run, ordering.measure) if span[0] < update <= span[1]]


def _checkpoints(reader: Reader, ordering: Ordering, span: Span, runs: Sequence[StoredRun]) -> int | None:
    return len(_inside(reader, ordering, span, runs[0])) or None


def _other_checkpoints(reader: Reader, ordering: Ordering, span: Span, runs: Mapping[int, Sequence[StoredRun]]) -> str:
    """Why the means of both sides are of different evaluations; empty where they are of the same."""
    for seed, sides in runs.items():
        found = [_inside(reader, ordering, span, run) for run in sides]
        if span is not None and any(each != found[0] for each in found):
            said = " against ".join(str(len(each)) for each in found)
            odd = sorted(set(found[0]) ^ set(found[-1]))
            return (
                f"seed {seed} has {said} evaluations in updates {span[0] + 1} to {span[1]}, not of the same updates "
                f"({', '.join(map(str, odd[:4]))}{', ...' if len(odd) > 4 else ''} on one side alone)"
            )
    return ""


def _pairs(reader: Reader, ordering: Ordering, left: Side, right: Side, seed: int, spans: Sequence[Span]) -> list[Pair]:
    """What both sides have for a seed, one pair a stretch; none where anything is missing."""
    sides = [_of_side(reader, ordering, side, seed, spans) for side in (left, right)]
    pairs = [(a, b) for a, b in zip(*sides, strict=True) if a is not None and b is not None]
    return pairs if len(pairs) == len(spans) else []


def _of_side(reader: Reader, ordering: Ordering, side: Side, seed: int, spans: Sequence[Span]) -> list[Reading | None]:
    """A side's readings for one seed, one a stretch: a group's, or by how much they are above another's."""
    found, *taken_off = (_readings(reader, ordering, side.measure, group, seed, spans) for group in side.groups)
    return found if not taken_off else [_above(a, b) for a, b in zip(found, taken_off[0], strict=True)]


def _above(reading: Reading | None, other: Reading | None) -> Reading | None:
    if reading is None or other is None:
        return None
    return Reading(reading.value - other.value, _differences_of(reading, other))


def _readings(
    reader: Reader, ordering: Ordering, name: str, group: Group, seed: int, spans: Sequence[Span]
) -> list[Reading | None]:
    """A group's readings for one seed, one a stretch; the untrained model's is the same in all."""
    if group.is_base:
        runs = [each.run for each in group.placed if each.seed == seed and each.run is not None]
        found = next((each for run in runs if (each := reader.base(run, name)) is not None), None)
        return [found] * len(spans)
    run = group.finished[seed]
    if ordering.when.phrase in PLACES:
        return [reader.at(run, name, ordering.when)]
    return reader.over(run, name, [span for span in spans if span is not None])


def _judge(ordering: Ordering, span: Span, pairs: Sequence[Pair], checkpoints: int | None) -> Stretch:
    """One stretch, from the readings of both sides for each seed."""
    left, right = (float(np.mean([pair[side].value for pair in pairs])) for side in (0, 1))
    by_seed = [a.value - b.value for a, b in pairs]
    margin = margin_of(ordering.measure, right)
    finite = all(map(math.isfinite, by_seed))
    differences = _problem_differences(pairs) if finite else None
    tests = [
        interval_over_seeds(by_seed) if finite else None,
        None if differences is None else interval_over_problems(differences),
    ]
    intervals = tuple(each for each in tests if each is not None)
    verdict = agreed([verdict_of(ordering.relation, each, margin) for each in intervals])
    few = "one seed" if differences is None else f"one seed, and {len(differences)} problems"
    return Stretch(
        span=span,
        verdict=verdict,
        left=left,
        right=right,
        intervals=intervals,
        checkpoints=checkpoints,
        why="" if verdict != "not tested" else few if finite else "not finite",
    )


def _problem_differences(pairs: Sequence[Pair]) -> np.ndarray | None:
    """[N]: differences of each problem that every reading has, averaged over seeds; None where they are of none."""
    differences = [each for a, b in pairs if (each := _differences_of(a, b)) is not None]
    return by_problem(differences) if len(differences) == len(pairs) else None


def _differences_of(a: Reading, b: Reading) -> dict[str, float] | None:
    """Of each problem that both are of; None where one is of none."""
    if a.problems is None or b.problems is None:
        return None
    return {each: a.problems[each] - b.problems[each] for each in a.problems if each in b.problems}
