"""Whether two parsed expressions, relations or equations are the same: exact forms, evaluated to hundreds of digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import sympy
from math_verify import verify
from sympy import Expr, Rational, Symbol
from sympy.logic.boolalg import Boolean

from grpo_lab.rewards.parsing import exact, parse_value

# Differences are evaluated until they are known to this many digits, or taken for zero.
_DIGITS = 250
_ZERO = sympy.Float("1e-150")
# Where symbols are tried: with all signs, of three symbols in every combination; positive where roots and logarithms
# have branches; whole, of both parities, where the functions are about integers. 37/23 and the like are on nobody's
# special values.
_SIZES = [(37, 23), (41, 29), (53, 31), (19, 43), (61, 17), (71, 47), (83, 59)]
# Of the k-th symbol, by the parity of the bits that it shares with the row's number.
_SIGNS = [1, 2, 4, 7, 3, 5, 6]
_ROWS = 8
_WHOLE_ROWS = 24
_REAL_NAMES = frozenset("xyzt")


def equal(gold: Any, answer: Any) -> bool:
    """Whether two parsed values are the same, decided on exact forms."""
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        one, other = exact(gold), exact(answer)
        if other.has(sympy.nan, sympy.zoo):
            return False
        if one.is_infinite or other.is_infinite:
            return bool(one == other)
        agreed = _agree(one, other)
        if agreed is not None:
            return agreed
    return _library_says_equal(gold, answer)


def same_relation(gold: str, answer: str) -> bool:
    """Inequalities, intervals and unions: the library's comparison, in either form.

    Raises:
        Unreadable: the answer cannot be parsed.
    """
    sides = [parse_value(gold), parse_value(answer)]
    if any(isinstance(side, Boolean) for side in sides) and any(isinstance(side, sympy.FiniteSet) for side in sides):
        # To the library 1 < x < 2 is the interval (1, 2), that the pair 1, 2.
        return False
    return _library_says_equal(*sides)


def same_equation(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether two equations say the same: their differences of sides are a constant factor apart.

    Raises:
        Unreadable: the answer cannot be parsed.
    """
    if len(gold) != 2 or len(answer) != 2:
        return False
    golds, answers = [exact(parse_value(side)) for side in gold], [exact(parse_value(side)) for side in answer]
    if not all(isinstance(side, Expr) for side in [*golds, *answers]):
        return False
    one, other = golds[0] - golds[1], answers[0] - answers[1]
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    ratios = [one.subs(point) / other.subs(point) for point in _points(one, other)]
    if any(
        not ratio.is_number or ratio.has(sympy.nan, sympy.zoo) or _is_zero(ratio, sympy.Integer(0)) for ratio in ratios
    ):
        return False
    return all(_is_zero(ratio, ratios[0]) for ratio in ratios[1:])


def _library_says_equal(gold: Any, answer: Any) -> bool:
    return verify(
        [gold],
        [answer],
        float_rounding=12,
        numeric_precision=50,
        strict=True,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )


def _agree(gold: Expr, answer: Expr) -> bool | None:
    """Whether two expressions take the same values; None where they cannot be evaluated."""
    if gold.has(sympy.Integral, sympy.Derivative, sympy.Limit, sympy.Sum, sympy.Product):
        return None
    outcomes = []
    for point in _points(gold, answer):
        outcome = _is_zero(gold.subs(point), answer.subs(point))
        if outcome is False:
            return False
        outcomes.append(outcome)
    return True if outcomes.count(True) >= min(2, len(outcomes)) else None


def _is_zero(one: Expr, other: Expr) -> bool | None:
    """Whether one - other is zero, to `_DIGITS` digits of the larger of the two; None where it has no value."""
    difference = one - other
    if difference.is_Rational:
        return bool(difference == 0)
    value = difference.evalf(20, maxn=_DIGITS)
    scale = max(_size(one), _size(other), key=lambda size: -1 if size is None else size)
    size = _size(value)
    if size is None or scale is None:
        return None
    return bool(size <= _ZERO * scale)


def _size(value: Expr) -> Expr | None:
    size = sympy.Abs(value.evalf(20))
    return size if size.is_Float or size.is_Rational else None


def _points(gold: Expr, answer: Expr) -> list[Mapping[Symbol, Expr]]:
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=lambda symbol: symbol.name)
    if not symbols:
        return [{}]
    if any(one.has(sympy.floor, sympy.ceiling, sympy.factorial, sympy.binomial, sympy.Mod) for one in (gold, answer)):
        return [{symbol: _whole(symbol, k, row) for k, symbol in enumerate(symbols)} for row in range(_WHOLE_ROWS)]
    positive = _has_branches(gold) or _has_branches(answer)
    points: list[Mapping[Symbol, Expr]] = []
    for row in range(_ROWS):
        point = {}
        for k, symbol in enumerate(symbols):
            size = Rational(*_SIZES[(k + 2 * row) % len(_SIZES)]) + k // len(_SIZES)
            is_negative = (_SIGNS[k % len(_SIGNS)] & row).bit_count() % 2 == 1
            point[symbol] = -size if is_negative and not positive else size
        points.append(point)
    return points


def _whole(symbol: Symbol, index: int, row: int) -> Expr:
    """Every number from 2 on for the first symbol, other orders of the same numbers for the rest."""
    number = 2 + (row * (1, 5, 7, 11, 13)[index % 5] + 3 * index) % _WHOLE_ROWS
    return Rational(3 * number + 1, 3) if symbol.name in _REAL_NAMES else sympy.Integer(number)


def _has_branches(value: Expr) -> bool:
    """Whether there is a root or logarithm of something that varies."""
    roots = (power for power in value.atoms(sympy.Pow) if power.base.free_symbols and not power.exp.is_integer)
    logarithms = (log for log in value.atoms(sympy.log) if log.free_symbols)
    return any(roots) or any(logarithms)


def to_fraction(value: Any) -> Fraction | None:
    """A real number to far more digits than anybody writes; None for anything else."""
    if not isinstance(value, Expr):
        return None
    number = exact(value)
    if number.free_symbols:
        return None
    if not number.is_Rational:
        number = number.evalf(60)
        if not number.is_Float:
            return None
        number = Rational(number)
    return Fraction(int(number.p), int(number.q))
