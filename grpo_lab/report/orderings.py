"""Whether the orderings that a paper states hold in our runs.

A verdict is of all parts together: the pairs that a list of cells stands for, and the stretches of updates that `when`
speaks of.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from grpo_lab.report.collate import Collated, Group
from grpo_lab.report.comparing import compare
from grpo_lab.report.measures import KINDS, Accuracy, Training
from grpo_lab.report.rules import Comparison, Verdict, together
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
    if isinstance(kind, Accuracy) and not reader.of_evaluations(ordering.measure):
        measure = (kind.score,)
    elif isinstance(kind, Accuracy):
        measure = (ordering.measure, reader.benchmarks, reader.n)
    elif isinstance(kind, Training):
        measure = (kind.column, kind.reduce, reader.window)
    relation, pairs = (
        ordering.relation,
        [(_runs(each.left_group), _runs(each.right_group)) for each in judged.comparisons],
    )
    if relation == "<":
        relation, pairs = ">", [(right, left) for left, right in pairs]
    return measure, relation, ordering.when, frozenset(pairs)


def _runs(group: Group | None) -> Hashable:
    """What a side is: its folders; the untrained model is one, whatever runs began with it."""
    if group is None or group.is_base:
        return None if group is None else "base"
    return frozenset(each.folder for each in group.placed)


def _parts(
    collated: Collated, ordering: Ordering, lefts: Sequence[Group], rights: Sequence[Group] | None
) -> Iterator[Comparison]:
    """Each pair of groups, or each group's trend."""
    pairs = [(left, right) for left in lefts for right in rights or () if left is not right]
    if mixed := collated.mixed.get(ordering.measure, ()):
        more = f", and {len(mixed) - 1} more" if len(mixed) > 1 else ""
        part = partial(Comparison, verdict="not compared", why=f"{mixed[0]}{more}")
        yield from (part(left_group=left, right_group=right) for left, right in pairs)
        yield from (part(left_group=left, right_group=None) for left in (lefts if rights is None else ()))
    elif rights is None:
        yield from (trend(collated.reader, ordering, group) for group in lefts)
    else:
        yield from (compare(collated.reader, ordering, left, right) for left, right in pairs)


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
