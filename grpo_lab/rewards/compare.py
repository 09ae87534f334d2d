"""Whether an answer equals the gold one. Text is parsed by math-verify; the comparison is exact, by shape.

This is the one module that loads sympy and math-verify. Everything here may take for ever on a hostile answer: run it
in the pool (`pool.py`), or accept that.
"""

from __future__ import annotations

import itertools
import re

from grpo_lab.rewards.dress import undress
from grpo_lab.rewards.expressions import same_equation, same_relation
from grpo_lab.rewards.finding import Finding
from grpo_lab.rewards.parsing import Unreadable, has_letters
from grpo_lab.rewards.scalars import is_defined, same_value
from grpo_lab.rewards.shape import (
    Answer,
    Braces,
    Equation,
    Listing,
    Named,
    Ordered,
    Relation,
    Value,
    read,
    readings,
    values,
)
from grpo_lab.rewards.written import may_be_undefined

MAX_ANSWER_CHARACTERS = 2_000
MAX_NESTING = 50

_SYMBOLS_ONLY = re.compile(r"(?:[A-Za-z()+*/\s-]|\\cdot|\\times)+")
_INNER_BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


def compare(gold: str, answer: str, tolerance: float | None = None) -> Finding:
    """The verdict on an extracted answer. Never raises for what an answer holds.

    `error` is a gold answer that cannot be read, or a fault here; `timeout` is an answer too large to work out.
    """
    try:
        return _compare(gold, answer, tolerance)
    except MemoryError:
        return Finding("timeout")
    except Exception as error:
        return Finding("error", f"{type(error).__name__} while comparing: {_first_line(error)}")


def _compare(gold: str, answer: str, tolerance: float | None) -> Finding:
    gold_text = undress(gold)
    golds = [reading for reading in readings(gold_text) if all(map(is_defined, values(reading)))]
    if not gold_text or not golds:
        if gold_text and not may_be_undefined(gold_text) and _squeezed(gold_text) == _squeezed(undress(answer)):
            return Finding("correct")
        return Finding("error", "the gold answer cannot be parsed; correct it or drop the problem")
    if len(answer) > MAX_ANSWER_CHARACTERS or _nesting(answer) > MAX_NESTING:
        return Finding("unparsed")
    answer_text = undress(answer)
    answers = readings(answer_text)
    if not answer_text or not answers:
        return Finding("unparsed")
    if _squeezed(gold_text) == _squeezed(answer_text):
        return Finding("correct")
    unreadable = False
    # Sympy's ways to refuse a value (too many digits, no order, no number): they are about the answer, as the gold one
    # has been through it.
    refusals = (Unreadable, ValueError, ArithmeticError, TypeError, NotImplementedError, RecursionError)
    for one_gold, one_answer in itertools.product(golds, answers):
        try:
            if same(one_gold, one_answer, tolerance):
                return Finding("correct")
        except refusals:
            unreadable = True
    return Finding("unparsed" if unreadable else "wrong")


def same(gold: Answer, answer: Answer, tolerance: float | None) -> bool:
    """Whether two shapes hold the same answer. Not symmetric: the gold one says what form was asked for.

    Raises:
        Unreadable: a part of the answer that the comparison came to cannot be parsed.
    """
    match gold, answer:
        case Named(), Named():
            if gold.name == answer.name:
                return same(gold.value, answer.value, tolerance)
            return same_equation(_sides(gold), _sides(answer))
        case (Named() | Equation(), Equation()) if _is_equation_pair(gold, answer):
            return same_equation(_sides(gold), _sides(answer))
        case Equation(), Named():
            return same_equation(gold.sides, _sides(answer))
        case Named(), _:
            return same(gold.value, answer, tolerance)
        case Equation(), _:
            return _is_worked_out(gold) and same(read(gold.sides[-1]), answer, tolerance)
        case _, Named():
            return same(gold, answer.value, tolerance)
        case _, Equation():
            # 3 * 4 = 12 for 12: true as it stands, every side is the answer. m + n = 12 only says what is meant.
            sides = answer.sides[1:] if _SYMBOLS_ONLY.fullmatch(answer.sides[0]) else answer.sides
            return all(same(gold, read(side), tolerance) for side in sides)
        case _ if isinstance(gold, Relation) or isinstance(answer, Relation):
            return same_relation(_source(gold), _source(answer))
    return _same_members(gold, answer, tolerance)


def _same_members(gold: Answer, answer: Answer, tolerance: float | None) -> bool:
    match gold, answer:
        case Value(), Value():
            return same_value(gold.text, answer.text, tolerance)
        case Listing(), Listing():
            if _names(gold) and not _names(answer):
                return _in_order(gold.parts, answer.parts, tolerance)
            return len(gold.parts) == len(answer.parts) and _all_found(gold.parts, answer.parts, tolerance)
        case Braces(ours), Braces(theirs) | Listing(theirs):
            return _same_set(ours, theirs, tolerance)
        case Listing(ours), Braces(theirs):
            return len(ours) == len(theirs) and _same_set(ours, theirs, tolerance)
        case Braces((only,)), _:
            return same(only, answer, tolerance)
        case _, Braces((only,)):
            return same(gold, only, tolerance)
        case Ordered(), Ordered():
            return _same_brackets(gold, answer) and _in_order(gold.parts, answer.parts, tolerance)
        case (Ordered("()", ours), Listing(theirs)) | (Listing(ours), Ordered("()", theirs)):
            # Parentheses left out or put in: the order still says what was meant.
            return _in_order(ours, theirs, tolerance)
        case Ordered("base", (digits, _)), Value():
            # The question names the base, as it names a unit.
            return same(digits, answer, tolerance)
    return False


def _same_brackets(gold: Ordered, answer: Ordered) -> bool:
    if gold.brackets == answer.brackets:
        return True
    # A vector may be written as a tuple, a row or a column.
    return all(re.fullmatch(r"\(\)|matrix (?:1x\d+|\d+x1)", one.brackets) for one in (gold, answer))


def _in_order(golds: tuple[Answer, ...], answers: tuple[Answer, ...], tolerance: float | None) -> bool:
    return len(golds) == len(answers) and all(
        same(one, other, tolerance) for one, other in zip(golds, answers, strict=True)
    )


def _same_set(golds: tuple[Answer, ...], answers: tuple[Answer, ...], tolerance: float | None) -> bool:
    """Each member of either is a member of the other."""
    pairs = [[same(gold, answer, tolerance) for answer in answers] for gold in golds]
    return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True))) and bool(golds) == bool(answers)


def _all_found(golds: tuple[Answer, ...], answers: tuple[Answer, ...], tolerance: float | None) -> bool:
    """Each gold member is met by a member of its own."""
    left = list(answers)
    for gold in golds:
        found = next((index for index, answer in enumerate(left) if same(gold, answer, tolerance)), None)
        if found is None:
            return False
        del left[found]
    return True


def _names(listing: Listing) -> bool:
    """Whether the members are named apart (x=1, y=2), so that bare values can only follow the same order."""
    names = {part.name for part in listing.parts if isinstance(part, Named)}
    return len(names) > 1


def _is_equation_pair(gold: Answer, answer: Answer) -> bool:
    """Whether a whole equation is asked for: 2x - y + 3 = 0 against y = 2x + 3, but not 2 + 3 = 5 against x = 5."""
    assert isinstance(answer, Equation)
    return isinstance(gold, Equation) or not _is_worked_out(answer)


def _is_worked_out(equation: Equation) -> bool:
    """Whether the sides hold numbers only: a calculation, not an equation to satisfy."""
    return not any(map(has_letters, equation.sides))


def _sides(answer: Answer) -> tuple[str, ...]:
    if isinstance(answer, Named):
        return (answer.name, _source(answer.value))
    return answer.sides if isinstance(answer, Equation) else (_source(answer),)


def _source(answer: Answer) -> str:
    """The text again, for the comparisons that take it whole."""
    match answer:
        case Value(text) | Relation(text):
            return text
        case Named(name, value):
            return f"{name} = {_source(value)}"
        case Equation(sides):
            return " = ".join(sides)
        case Listing(parts):
            return ", ".join(map(_source, parts))
        case Braces(parts):
            return rf"\{{{', '.join(map(_source, parts))}\}}"
        case Ordered(brackets, parts) if len(brackets) == 2:
            return f"{brackets[0]}{', '.join(map(_source, parts))}{brackets[1]}"
        case Ordered(_, parts):
            return ", ".join(map(_source, parts))


def _squeezed(text: str) -> str:
    """Without blanks, but for those between two numbers."""
    return _INNER_BLANKS.sub("", text)


def _nesting(text: str) -> int:
    deepest = depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else "no message"
