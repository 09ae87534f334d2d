"""Verdicts in words: what was compared, by how much, by which test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_lab.evaluation.estimators import LEVEL
from grpo_lab.report.collate import Collated, Group, Slot
from grpo_lab.report.comparing import CAUTION, POINT, RELATIVE, Comparison
from grpo_lab.report.naming import NONE, group_name, key_name, number_text, slot_name
from grpo_lab.report.orderings import Judged
from grpo_lab.report.render import Grid

LEGEND = (
    f"Intervals are of level {LEVEL:.2f}, each for itself: none is corrected for how many there are. *holds*, "
    "*reversed*: every interval lies on that side of 0. *~* and *flat* hold where it lies within the equivalence "
    f"margin, {100 * POINT:g} point of accuracy or {RELATIVE:.0%} of the value of a measure of training; *differs*: it "
    "excludes 0 and does not. With two seeds or more, a t interval over seeds and, of accuracy, a bootstrap over "
    "problems must agree; with one seed the problems alone are tested, which says nothing of another seed, and a "
    "measure of training is *not tested*. A list on one side, and several stretches of updates, must hold each."
)


def verdict_grid(collated: Collated, judged: Sequence[Judged]) -> Grid:
    """A row an ordering."""
    rows = [
        (
            _claim(collated, each),
            str(each.ordering.when),
            each.verdict,
            "; ".join(dict.fromkeys(_figures(collated, each, one) for one in each.comparisons)) or "no such cells",
            NONE if each.ordering.margin is None else number_text(each.ordering.measure, each.ordering.margin),
            "; ".join(filter(None, (_tests(each, one) for one in each.comparisons))),
            each.ordering.source,
        )
        for each in judged
    ]
    return Grid(("ordering", "when", "verdict", "ours", "published margin", "tests", "source"), tuple(rows))


def tally(judged: Sequence[Judged]) -> str:
    """How many orderings have each verdict."""
    counts = Counter(each.verdict for each in judged)
    return ", ".join(f"{counts[each]} {each}" for each in reversed(CAUTION) if counts[each]) or "no orderings"


def _claim(collated: Collated, judged: Judged) -> str:
    ordering = judged.ordering
    lefts = _names(collated, [each.left_group for each in judged.comparisons])
    rights = _names(collated, [each.right_group for each in judged.comparisons if each.right_group is not None])
    measure = slot_name(Slot(ordering.measure))
    said = f"{measure}: {lefts} {ordering.relation} {rights}".rstrip()
    paper = collated.definition.paper
    own = ", ".join(f"{key_name(key, paper)} {value}" for key, value in judged.variant.items())
    return f"{said} (here with {own})" if own else said


def _names(collated: Collated, groups: Sequence[Group]) -> str:
    return " and ".join(dict.fromkeys(group_name(collated, group) for group in groups))


def _figures(collated: Collated, judged: Judged, one: Comparison) -> str:
    measure = judged.ordering.measure
    if one.left is None or one.difference is None:
        return one.why
    difference = number_text(measure, one.difference, signed=True)
    if one.right is None:
        text = f"{number_text(measure, one.left)} on average, changes by {difference}"
    else:
        text = f"{number_text(measure, one.left)} against {number_text(measure, one.right)}: {difference}"
    if len(judged.comparisons) > 1:
        other = "" if one.right_group is None else f" against {group_name(collated, one.right_group)}"
        text = f"{group_name(collated, one.left_group)}{other} {text}, {one.verdict}"
    return f"{text} ({len(one.seeds)} {'seed' if len(one.seeds) == 1 else 'seeds'})"


def _tests(judged: Judged, one: Comparison) -> str:
    measure = judged.ordering.measure
    parts = [
        f"[{number_text(measure, each.low, signed=True)}, {number_text(measure, each.high, signed=True)}] {each.method}"
        for each in one.intervals
    ]
    if one.margin is not None and one.intervals:
        parts.append(f"margin {number_text(measure, one.margin)}")
    if one.why and one.left is not None:
        parts.append(one.why if one.intervals or "stretches" in one.why else f"not tested: {one.why}")
    return ", ".join(parts)
