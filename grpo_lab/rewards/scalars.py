"""Single values against each other: numbers with their units and percent signs, expressions, words."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import sympy
from sympy import Expr

from grpo_lab.rewards.expressions import equal, to_fraction
from grpo_lab.rewards.parsing import Unreadable, exact, has_letters, parse_value
from grpo_lab.rewards.units import without_bare_unit, without_marked_unit, without_percent
from grpo_lab.rewards.written import Written, is_close, read_written, same_written, tolerates

# fmt: off
_FUNCTION_WORDS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "det", "mod", "gcd", "lcm", "max", "min",
    "arcsin", "arccos", "arctan",
])
# fmt: on


def same_value(gold: str, answer: str, tolerance: float | None) -> bool:
    """Whether a single value meets the gold one.

    Raises:
        Unreadable: the answer cannot be parsed.
    """
    if (gold_words := words(gold)) is not None and gold_words == words(answer, loosely=True):
        return True
    if gold_words is not None and len(gold_words) > 3:
        return False
    gold, gold_percent = without_percent(without_marked_unit(gold))
    answer, answer_percent = without_percent(without_marked_unit(answer))
    if gold_percent or answer_percent:
        gold, answer = without_marked_unit(gold), without_marked_unit(answer)
    gold = without_bare_unit(gold, numeric=False)
    answer = without_bare_unit(answer, numeric=not has_letters(gold))
    gold_number, answer_number = Number(gold), Number(answer)
    if gold_percent == answer_percent:
        return gold_number.meets(answer_number, tolerance)
    if gold_percent:
        return gold_number.meets(answer_number, tolerance) or gold_number.percent().meets(answer_number, tolerance)
    # 50% for 50: the question asked for per cent. 0.5% is never 0.5, which is a share.
    unsigned = not gold_number.is_proper_share() and gold_number.meets(answer_number, tolerance)
    return unsigned or gold_number.meets(answer_number.percent(), tolerance)


def is_defined(text: str) -> bool:
    """Whether a part of a gold answer can be compared with at all: words, or mathematics with a value."""
    if words(text) is not None or read_written(text) is not None:
        return True
    value_text, _ = without_percent(without_marked_unit(text))
    try:
        value = parse_value(without_bare_unit(without_marked_unit(value_text), numeric=False))
    except Unreadable:
        return False
    return not (isinstance(value, Expr) and exact(value).has(sympy.nan, sympy.zoo))


def words(text: str, *, loosely: bool = False) -> str | None:
    """Answers in words, for comparison; None for mathematics. `loosely` takes any letters at all."""
    marked = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    bare = (marked[1] if marked else text).strip(" .()")
    if not re.fullmatch(r"[A-Za-z][A-Za-z' \-]*", bare):
        return None
    names = bare.casefold().split()
    if not loosely and (max(map(len, names)) < 3 or not _FUNCTION_WORDS.isdisjoint(names)):
        return None
    return " ".join(names)


class Number:
    """A value as it is written and as sympy reads it, the latter on demand."""

    def __init__(self, text: str, *, per: int = 1) -> None:
        self.text = text
        self.per = per
        written = read_written(text)
        self.written = written.percent() if written is not None and per == 100 else written

    def percent(self) -> Number:
        return Number(self.text, per=100)

    def is_proper_share(self) -> bool:
        value = self.exact()
        return value is not None and 0 < abs(value) < 1

    def expression(self) -> Any:
        parsed = parse_value(self.text)
        return parsed / self.per if self.per != 1 and isinstance(parsed, Expr) else parsed

    def exact(self) -> Fraction | None:
        """The value to far more digits than anybody writes; None where it is not a real number."""
        if self.written is not None:
            return self.written.value
        return to_fraction(self.expression())

    def meets(self, answer: Number, tolerance: float | None) -> bool:
        """Whether `answer` is this gold value."""
        if tolerance is not None:
            gold_value, answer_value = self.exact(), answer.exact()
            if gold_value is not None and answer_value is not None:
                return tolerates(gold_value, answer_value, tolerance)
        if self.written is not None and answer.written is not None:
            return same_written(self.written, answer.written)
        if equal(self.expression(), answer.expression()):
            return True
        return self._rounded(answer)

    def _rounded(self, answer: Number) -> bool:
        if answer.written is not None:
            return _is_rounding(self.expression(), answer.written)
        if self.written is not None and self.written.is_float_image:
            value = answer.exact()
            return value is not None and is_close(self.written, value)
        return False


def _is_rounding(gold: Any, answer: Written) -> bool:
    """A decimal for a value that has no finite one (1/3, sqrt 19): rounded or cut off, to enough digits."""
    value = to_fraction(gold)
    if value is None or not answer.rounds(value):
        return False
    reduced = exact(gold)
    if not reduced.is_Rational:
        return True
    denominator = int(reduced.q)
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator > 1
