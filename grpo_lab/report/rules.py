"""What intervals say of a relation, what several verdicts say together, and what a comparison consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_lab.report.collate import Group
from grpo_lab.report.inference import Interval
from grpo_lab.report.measures import KINDS, Accuracy

Verdict = Literal[
    "holds", "not distinguishable", "not tested", "not compared", "not run", "fails in part", "differs", "reversed"
]
VERDICTS: tuple[Verdict, ...] = (
    "holds",
    "not distinguishable",
    "not tested",
    "not compared",
    "not run",
    "fails in part",
    "differs",
    "reversed",
)
FAILING: tuple[Verdict, ...] = ("reversed", "differs", "fails in part")
# Of those that are no failure, the most cautious first.
CAUTION: tuple[Verdict, ...] = ("not run", "not compared", "not distinguishable", "not tested", "holds")
# Those that a test came to.
TESTED: tuple[Verdict, ...] = ("holds", "not distinguishable", *FAILING)
# "~" and "flat" hold where the interval lies within this, "<=" where it lies below: a hundredth of responses (one point
# of accuracy), of a measure of training a share of the right side's value (of a trend's own mean).
POINT = 0.01
RELATIVE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One part of a comparison: updates after the first of `span` up to the second (None: one place in a run), with
    both sides' values, their difference and its intervals. `checkpoints`: evaluations in it, of accuracy."""

    span: tuple[int, int] | None
    verdict: Verdict
    left: float
    right: float
    intervals: tuple[Interval, ...]
    checkpoints: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """A measure of a group, or how far it is above that of another, `less`."""

    group: Group
    measure: str
    less: Group | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.group,) if self.less is None else (self.group, self.less)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides, or the trend of one. `left`, `right`: their values, over the seeds that both have; `difference`: left
    - right, or what a trend changes from the first to the last update. `margin`: of equivalence, where one counts.
    `stretches`: where there are several, each by itself. `quarters`: means of a trend's quarters, where they count.
    `benchmark`: the one that it is of, where each counts by itself."""

    left_side: Side
    right_side: Side | None
    verdict: Verdict
    left: float | None = None
    right: float | None = None
    difference: float | None = None
    seeds: tuple[int, ...] = ()
    intervals: tuple[Interval, ...] = ()
    margin: float | None = None
    checkpoints: int | None = None
    stretches: tuple[Stretch, ...] = ()
    quarters: tuple[float, ...] = ()
    benchmark: str | None = None
    why: str = ""

    @property
    def groups(self) -> list[Group]:
        """All that it reads, each once."""
        sides = [each for each in (self.left_side, self.right_side) if each is not None]
        return list(dict.fromkeys(group for side in sides for group in side.groups))

    @property
    def rests_on_one_seed(self) -> bool:
        return self.verdict in TESTED and len(self.seeds) == 1


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """What the parts of one claim say: it fails where each of them does, fails in part where some do, and is else what
    the most cautious part is; of no parts, nothing was run."""
    kinds = set(verdicts)
    if kinds.intersection(FAILING):
        return verdicts[0] if len(kinds) == 1 else "fails in part"
    return min(verdicts, key=CAUTION.index, default="not run")


def agreed(verdicts: Sequence[Verdict]) -> Verdict:
    """What all tests of one difference say; where they do not say the same, nothing can be told."""
    if not verdicts:
        return "not tested"
    return verdicts[0] if len(set(verdicts)) == 1 else "not distinguishable"


def verdict_of(relation: str, interval: Interval, margin: float) -> Verdict:
    """What an interval of left - right, or of a trend's change, says about a relation."""
    low, high = interval.low, interval.high
    if relation in ("~", "flat"):
        if -margin < low and high < margin:
            return "holds"
        return "differs" if low > 0 or high < 0 else "not distinguishable"
    if relation == "<=":
        return "holds" if high < margin else "reversed" if low > 0 else "not distinguishable"
    if relation in ("<", "falls"):
        low, high = -high, -low
    return "holds" if low > 0 else "reversed" if high < 0 else "not distinguishable"


def margin_of(name: str, value: float) -> float:
    """Of equivalence, for a measure with this value."""
    kind = KINDS[name]
    return POINT * kind.unit if isinstance(kind, Accuracy) else RELATIVE * abs(value)
