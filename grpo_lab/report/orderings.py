"""Whether the orderings that a paper states hold in our runs.

A verdict is the most cautious of its parts: of the pairs that a list of cells stands for, of the stretches of updates
that `when` speaks of, and of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from grpo_lab.report.collate import Collated, Group
from grpo_lab.report.comparing import Comparison, Verdict, compare, most_cautious, trend
from grpo_lab.tables.definition import Labels, Ordering, matches


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """An ordering and what became of it. `variant`: labels of this scale's own cells, in place of the
    paper's."""

    ordering: Ordering
    verdict: Verdict
    comparisons: tuple[Comparison, ...]
    variant: Labels = field(default_factory=dict)


def judge(collated: Collated) -> list[Judged]:
    """A verdict for each ordering of a table; one more where this scale has its own cells."""
    found = []
    for ordering in collated.definition.orderings:
        for variant, lefts, rights in _sides(collated, ordering):
            if rights is None:
                parts = [trend(collated.reader, ordering, group) for group in lefts]
            else:
                pairs = [(left, right) for left in lefts for right in rights if left is not right]
                parts = [compare(collated.reader, ordering, left, right) for left, right in pairs]
            found.append(Judged(ordering, most_cautious([each.verdict for each in parts]), tuple(parts), variant))
    return found


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
