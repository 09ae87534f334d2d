"""Verdicts in words: what was compared, by how much, by which test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_lab.evaluation.estimators import LEVEL
from grpo_lab.report.collate import Collated, Slot
from grpo_lab.report.inference import Interval
from grpo_lab.report.naming import NONE, failures_text, group_name, key_name, number_text, slot_name
from grpo_lab.report.orderings import ONE_SEED, Judged
from grpo_lab.report.render import Grid
from grpo_lab.report.rules import POINT, RELATIVE, VERDICTS, Comparison, Side, Stretch

LEGEND = (
    f"Intervals are of level {LEVEL:.2f}, each for itself: none is corrected for how many there are. *holds*, "
    "*reversed*: every interval of every part lies on that side of 0. *~* and *flat* hold where it lies within the "
    f"equivalence margin, {100 * POINT:g} point of accuracy or {RELATIVE:.0%} of the value of a measure of training, "
    "*<=* where it lies below it; *differs*: it excludes 0 and does not. *fails in part*: of a list on one side, or of "
    "several stretches of updates, some are reversed or differ, and not all. *not compared*: the sides were evaluated "
    "in different ways. With two seeds or more, a t interval over seeds and, of accuracy, a bootstrap over problems "
    "must agree; with one seed the problems alone are tested, which says nothing of another seed and is marked *(one "
    "seed)*, and a measure of training is *not tested*."
)


def verdict_grid(collated: Collated, judged: Sequence[Judged]) -> Grid:
    """A row an ordering."""
    rows = [
        (
            _claim(collated, each),
            str(each.ordering.when),
            each.said,
            "; ".join(dict.fromkeys(_figures(collated, each, one) for one in each.comparisons)) or "no such cells",
            NONE if each.ordering.margin is None else number_text(each.ordering.measure, each.ordering.margin),
            "; ".join(filter(None, (_tests(each, one) for one in each.comparisons))),
            each.ordering.source,
        )
        for each in judged
    ]
    return Grid(("ordering", "when", "verdict", "ours", "published margin", "tests", "source"), tuple(rows))


def tally(verdicts: Sequence[str]) -> str:
    """How many orderings have each verdict; those that rest on one seed by themselves."""
    counts = Counter(verdicts)
    kinds = [f"{verdict}{mark}" for verdict in VERDICTS for mark in ("", ONE_SEED)]
    return ", ".join(f"{counts[each]} {each}" for each in kinds if counts[each]) or "no orderings"


def _claim(collated: Collated, judged: Judged) -> str:
    ordering = judged.ordering
    lefts = _names(collated, [each.left_side for each in judged.comparisons])
    rights = _names(collated, [each.right_side for each in judged.comparisons if each.right_side is not None])
    measure = slot_name(Slot(ordering.measure), collated.scale)
    than = "" if ordering.than is None else f"{slot_name(Slot(ordering.than), collated.scale)}: "
    said = f"{measure}: {lefts} {ordering.relation} {than}{rights}".rstrip()
    said += ", on each benchmark" if ordering.each_benchmark else ""
    paper = collated.definition.paper
    own = ", ".join(f"{key_name(key, paper)} {value}" for key, value in judged.variant.items())
    return f"{said} (here with {own})" if own else said


def _names(collated: Collated, sides: Sequence[Side]) -> str:
    return " and ".join(dict.fromkeys(_name(collated, each) for each in sides))


def _name(collated: Collated, side: Side) -> str:
    return " less ".join(group_name(collated, each) for each in side.groups)


def _figures(collated: Collated, judged: Judged, one: Comparison) -> str:
    """What was found, over which seeds, and which seeds failed."""
    failed = failures_text(collated, one.groups)
    if one.left is None or one.difference is None:
        return "; ".join([one.why, *failed])
    measure = judged.ordering.measure
    difference = number_text(measure, one.difference, signed=True)
    if one.right is None:
        text = f"{number_text(measure, one.left)} on average, changes by {difference}"
    else:
        gains = one.left_side.less is not None
        left, right = (number_text(measure, each, signed=gains) for each in (one.left, one.right))
        if judged.ordering.than is not None:
            left, right = f"{left} of {measure}", f"{right} of {judged.ordering.than}"
        text = f"{left} against {right}: {difference}"
    if len(judged.comparisons) > 1:
        benchmark = "" if one.benchmark is None else f"{one.benchmark}: "
        names = [_name(collated, each) for each in (one.left_side, one.right_side) if each is not None]
        text = f"{benchmark}{' against '.join(dict.fromkeys(names))} {text}, {one.verdict}"
    over = [f"{len(one.seeds)} {'seed' if len(one.seeds) == 1 else 'seeds'}"]
    if one.checkpoints is not None:
        over.append(_over(one.checkpoints))
    return f"{text} ({'; '.join([', '.join(over), *failed])})"


def _tests(judged: Judged, one: Comparison) -> str:
    measure = judged.ordering.measure
    parts = [_interval(measure, each) for each in one.intervals]
    if one.margin is not None and one.intervals:
        parts.append(f"margin {number_text(measure, one.margin)}")
    if one.quarters:
        parts.append(f"means of its quarters {', '.join(number_text(measure, each) for each in one.quarters)}")
    parts += [_stretch(measure, each) for each in one.stretches]
    if one.why and one.left is not None:
        parts.append(f"not tested: {one.why}")
    return ", ".join(parts)


def _stretch(measure: str, one: Stretch) -> str:
    """One of several stretches: updates, difference, verdict, and the intervals that it rests on."""
    assert one.span is not None
    after, to = one.span
    where = f"update {to}" if to == after + 1 else f"updates {after + 1} to {to}"
    said = f"{where}: {number_text(measure, one.left - one.right, signed=True)} {one.verdict}"
    details = [_interval(measure, each) for each in one.intervals]
    if one.checkpoints is not None and to > after + 1:
        details.append(_over(one.checkpoints))
    if one.why:
        details.append(one.why)
    return f"{said} ({', '.join(details)})"


def _over(checkpoints: int) -> str:
    return f"over {checkpoints} {'checkpoint' if checkpoints == 1 else 'checkpoints'}"


def _interval(measure: str, one: Interval) -> str:
    return f"[{number_text(measure, one.low, signed=True)}, {number_text(measure, one.high, signed=True)}] {one.method}"
