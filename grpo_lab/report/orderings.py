"""Whether the orderings that a paper states hold in our runs.

A verdict is of all parts together: the pairs that a list of cells stands for, and the stretches of updates that `when`
speaks of.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from grpo_lab.report.collate import Collated, Group
from grpo_lab.report.comparing import compare
from grpo_lab.report.measures import KINDS, Accuracy, Training
from grpo_lab.report.readings import Reader
from grpo_lab.report.rules import Comparison, Side, Verdict, together
from grpo_lab.report.trends import trend
from grpo_lab.tables.definition import Labels, Ordering, matches

ONE_SEED = " (one seed)"


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """An ordering and what became of it. `variant`: labels of this scale's own cells, in place of the
    paper's."""

    ordering: Ordering
    verdict: Verdict
    comparisons: tuple[Comparison, ...]
    variant: Labels = field(default_factory=dict)

    @property
    def said(self) -> str:
        """The verdict, and whether a part that it rests on has one seed."""
        return f"{self.verdict}{ONE_SEED}" if any(each.rests_on_one_seed for each in self.comparisons) else self.verdict


def judge(collated: Collated) -> list[Judged]:
    """A verdict for each ordering of a table; one more where this scale has its own cells."""
    found = []
    for ordering in collated.definition.orderings:
        for variant, lefts, rights in _sides(collated, ordering):
            parts = tuple(_parts(collated, ordering, lefts, rights))
            found.append(Judged(ordering, together([each.verdict for each in parts]), parts, variant))
    return found


def claim(collated: Collated, judged: Judged) -> Hashable:
    """What an ordering states of which runs: equal for two that targets state with the same cells and measure, which at
    the tiny scale several of the paper's measures are."""
    ordering, kind, reader = judged.ordering, KINDS[judged.ordering.measure], collated.reader
    measure: tuple[Hashable, ...] = (ordering.measure,)
    told_apart = (ordering.than, ordering.each_benchmark)
    if isinstance(kind, Accuracy) and not reader.of_evaluations(ordering.measure):
        measure = (kind.score,)
    elif isinstance(kind, Accuracy):
        measure = (ordering.measure, tuple(reader.benchmarks.items()))
    elif isinstance(kind, Training):
        measure = (kind.column, kind.reduce, reader.window)
    relation, pairs = (
        ordering.relation,
        [(_runs(each.left_side), _runs(each.right_side)) for each in judged.comparisons],
    )
    if relation == "<":
        relation, pairs = ">", [(right, left) for left, right in pairs]
    return measure, told_apart, relation, ordering.when, frozenset(pairs)


def _runs(side: Side | None) -> Hashable:
    """What a side is: the folders of its groups; the untrained model is one, whatever runs began with it."""
    groups = () if side is None else side.groups
    return tuple("base" if each.is_base else frozenset(placed.folder for placed in each.placed) for each in groups)


def _parts(
    collated: Collated, ordering: Ordering, lefts: Sequence[Group], rights: Sequence[Group] | None
) -> Iterator[Comparison]:
    """Each pair of sides, or each group's trend."""
    why = _why_not(collated, ordering)
    if rights is None:
        for group in lefts:
            side = Side(group=group, measure=ordering.measure)
            yield _not_compared(side, None, why) if why else trend(collated.reader, ordering, group)
        return
    for left, right in _pairs(collated, ordering, lefts, rights):
        if why:
            yield _not_compared(left, right, why)
            continue
        for benchmark, reader in _readers(collated.reader, ordering):
            yield replace(compare(reader, ordering, left, right), benchmark=benchmark)


def _why_not(collated: Collated, ordering: Ordering) -> str:
    """Why nothing can be compared; empty where it can."""
    if ordering.each_benchmark and not collated.reader.benchmarks:
        return f"scale {collated.scale} has no benchmarks"
    mixed = [each for name in (ordering.measure, ordering.than) if name for each in collated.mixed.get(name, ())]
    return f"{mixed[0]}, and {len(mixed) - 1} more" if len(mixed) > 1 else "".join(mixed)


def _not_compared(left: Side, right: Side | None, why: str) -> Comparison:
    return Comparison(left_side=left, right_side=right, verdict="not compared", why=why)


def _readers(reader: Reader, ordering: Ordering) -> Iterator[tuple[str | None, Reader]]:
    """What reads final scores: all benchmarks together, or each."""
    if not ordering.each_benchmark:
        yield None, reader
        return
    for benchmark, n in reader.benchmarks.items():
        yield benchmark, replace(reader, benchmarks={benchmark: n})


def _pairs(
    collated: Collated, ordering: Ordering, lefts: Sequence[Group], rights: Sequence[Group]
) -> Iterator[tuple[Side, Side]]:
    """The sides, each group with each; those that are above another group, with the same labels taken off."""
    than = ordering.than or ordering.measure
    if ordering.less is None:
        for left, right in itertools.product(lefts, rights):
            if left is not right:
                yield Side(group=left, measure=ordering.measure), Side(group=right, measure=than)
        return
    choices = [each if isinstance(each, list) else [each] for each in ordering.less.values()]
    for values in itertools.product(*choices):
        less = dict(zip(ordering.less, values, strict=True))
        for left, right in itertools.product(lefts, rights):
            left_side = Side(group=left, measure=ordering.measure, less=_with_labels(collated, left, less))
            yield left_side, Side(group=right, measure=than, less=_with_labels(collated, right, less))


def _with_labels(collated: Collated, group: Group, labels: Labels) -> Group:
    """The group that has these labels in place of its own; of several that have no others, the one with the most."""
    wanted = {**group.labels, **labels}
    return max((each for each in collated.groups if matches(wanted, each.labels)), key=lambda each: len(each.labels))


def _sides(collated: Collated, ordering: Ordering) -> Iterator[tuple[Labels, list[Group], list[Group] | None]]:
    """The groups on both sides: the paper's, then with each set of labels that only this scale has."""
    paper = [group for group in collated.groups if group.of_paper]
    own = [group for group in collated.groups if not group.of_paper]
    lefts = [group for group in paper if matches(group.labels, ordering.left)]
    rights = None if ordering.right is None else [group for group in paper if matches(group.labels, ordering.right)]
    yield {}, lefts, rights
    extras: list[Labels] = []
    for group in own:
        extra: Labels = {
            k: v for k, v in group.labels.items() if not any(k in each.labels and each.labels[k] == v for each in paper)
        }
        if extra not in extras:
            extras.append(extra)
    for extra in extras:
        here = [group for group in own if matches(group.labels, extra)]
        new_lefts = _replaced(lefts, here, ordering.left)
        new_rights = None if rights is None or ordering.right is None else _replaced(rights, here, ordering.right)
        if new_lefts != lefts or new_rights != rights:
            yield extra, new_lefts, new_rights


def _replaced(groups: list[Group], own: Sequence[Group], at: Labels) -> list[Group]:
    """Each group by this scale's own one with its labels and more, where there is one."""
    matching = [group for group in own if matches(group.labels, at)]
    return [next((each for each in matching if matches(each.labels, group.labels)), group) for group in groups]
