"""Single values against each other: numbers, expressions, words, equations; parsed by math-verify, compared exactly."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, Rational, Symbol

from grpo_lab.rewards.units import without_bare_unit, without_marked_unit, without_percent
from grpo_lab.rewards.written import Written, is_close, read_written, same_written

# The pool's limit kills what is too slow, wherever it runs; the library's own alarm works in a main thread only, and
# without it the library warns on every start.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Boxed text only, last box, and no unit stripping: the library's takes the m off 6m.
_EXTRACTION = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        ),
    )
]

# Differences are evaluated until they are known to this many digits, or taken for zero.
_DIGITS = 250
_ZERO = sympy.Float("1e-150")
# Where symbols are tried. Both signs; positive ones where roots and logarithms have branches; whole ones, of both
# parities, where the functions are about integers. 37/23 and the like are on nobody's special values.
_ANY_SIGN = [(37, 23), (-41, 29), (53, 31), (-19, 43), (61, 17), (-71, 47), (83, 59)]
_OFFSETS = [0, 2, 5]
_WHOLE_ROWS = 24
_REAL_NAMES = frozenset("xyzt")

_FUNCTION_WORDS = frozenset("sin cos tan cot sec csc log ln exp sqrt det mod gcd lcm max min arcsin arccos arctan".split())
_TWO_NUMBERS = re.compile(r"\d\s+\.?\d|\\(?:\s|$)")
_E_NOTATION = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,4})(?![\w.])")


_MISREAD_COMMANDS = frozenset([r"\gamma", r"\beta"])
_SYMBOL = re.compile(
    r"\\text\{[^{}]*\}|\\[A-Za-z]+"
    r"|(?P<letter>[A-Za-z])(?P<primes>'*)(?P<index>_(?:\{\s*\w+\s*\}|\w))?(?P<late>'*)"
)


class Unreadable(ValueError):
    """An answer, or a part of one, that the parser cannot read."""


def same_value(gold: str, answer: str, tolerance: Fraction | None) -> bool:
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
    if not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", gold)):
        answer = without_bare_unit(answer)
    gold_number, answer_number = Number(gold), Number(answer)
    if gold_percent == answer_percent:
        return gold_number.meets(answer_number, tolerance)
    if gold_percent:
        return gold_number.meets(answer_number, tolerance) or gold_number.percent().meets(answer_number, tolerance)
    # 50% for 50: the question asked for per cent. 0.5% is never 0.5, which is a share.
    unsigned = not gold_number.is_proper_share() and gold_number.meets(answer_number, tolerance)
    return unsigned or gold_number.meets(answer_number.percent(), tolerance)


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
        return self.written is not None and 0 < abs(self.written.value) < 1

    def expression(self) -> Basic | sympy.MatrixBase:
        parsed = parse_value(self.text)
        return parsed / self.per if self.per != 1 and isinstance(parsed, Expr) else parsed

    def exact(self) -> Fraction | None:
        """The value to far more digits than anybody writes; None where it is not a real number."""
        if self.written is not None:
            return self.written.value
        return _to_fraction(self.expression())

    def meets(self, answer: Number, tolerance: Fraction | None) -> bool:
        """Whether `answer` is this gold value."""
        if tolerance is not None:
            gold_value, answer_value = self.exact(), answer.exact()
            if gold_value is not None and answer_value is not None:
                return abs(gold_value - answer_value) <= tolerance
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


def _is_rounding(gold: Basic | sympy.MatrixBase, answer: Written) -> bool:
    """A decimal for a value that has no finite one (1/3, sqrt 19): rounded or cut off, to enough digits."""
    value = _to_fraction(gold)
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


def is_defined(text: str) -> bool:
    """Whether a part of a gold answer can be compared with at all: words, or mathematics with a value."""
    if words(text) is not None or read_written(text) is not None:
        return True
    value_text, _ = without_percent(without_marked_unit(text))
    try:
        value = parse_value(without_marked_unit(value_text))
    except Unreadable:
        return False
    return not (isinstance(value, Expr) and exact(value).has(sympy.nan, sympy.zoo))


@lru_cache(maxsize=4096)
def parse_value(text: str) -> Any:
    """The sympy object that math-verify reads in a single value or relation.

    Raises:
        Unreadable: it reads none, or the text is two numbers side by side (which it would add up).
    """
    text = _E_NOTATION.sub(r"\1 \\times 10^{\2}", text) if read_written(text) is not None else text
    if not text.strip() or _TWO_NUMBERS.search(text):
        raise Unreadable(text)
    boxed = rf"\boxed{{{_apart(text)}}}"
    found = parse(boxed, extraction_config=_EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or not isinstance(found[0], (Basic, sympy.MatrixBase)):
        raise Unreadable(text)
    return found[0]


def _apart(text: str) -> str:
    """Symbols that the library misreads, under names it reads well.

    It takes letters in lower case (M - m is 0), drops primes, knows no index on E, and takes \\gamma and \\beta for
    functions.
    """
    letters = re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text))
    clashing = {letter for letter in letters if letter.isupper() and letter.lower() in letters}

    def rename(match: re.Match[str]) -> str:
        letter, primes, index = match["letter"], match["primes"] or match["late"], match["index"]
        if letter is None and match[0] not in _MISREAD_COMMANDS:
            return match[0]
        if letter and not (letter in clashing or primes or (index and letter in "eE")):
            return match[0]
        return rf"\Omega_{{{''.join(f'{ord(char):03d}' for char in match[0] if char not in '{}')}}} "

    return _SYMBOL.sub(rename, text)


def exact(value: Any) -> Any:
    """Decimals as fractions, i as the imaginary unit, symbols without assumptions, everything worked out."""
    value = value.xreplace({one: Rational(str(one)) for one in value.atoms(sympy.Float)})
    # dv/dt of plain symbols would be worked out to 0.
    rates = (rate for rate in value.atoms(sympy.Derivative) if not rate.expr.has(*rate.variables))
    value = value.xreplace({rate: Symbol(str(rate)) for rate in rates})
    bound = value.atoms(Symbol) - value.free_symbols
    value = value.xreplace(
        {one: sympy.I if one.name in ("i", "imath") and one not in bound else Symbol(one.name) for one in value.atoms(Symbol)}
    )
    return value.doit()


def equal(gold: Any, answer: Any) -> bool:
    """Whether two parsed values are the same, decided on exact forms."""
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        one, other = exact(gold), exact(answer)
        if other.has(sympy.nan, sympy.zoo):
            return False
        if not one.is_finite and one.is_infinite or other.is_infinite:
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
    return _library_says_equal(parse_value(gold), parse_value(answer))


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
    if any(not ratio.is_number or ratio.has(sympy.nan, sympy.zoo) or _is_zero(ratio, sympy.Integer(0)) for ratio in ratios):
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
    points = []
    for offset in _OFFSETS:
        point = {}
        for k, symbol in enumerate(symbols):
            numerator, denominator = _ANY_SIGN[(k + offset) % len(_ANY_SIGN)]
            value = Rational(numerator, denominator) + k // len(_ANY_SIGN)
            point[symbol] = abs(value) if positive else value
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


def _to_fraction(value: Any) -> Fraction | None:
    if not isinstance(value, Expr) or value.free_symbols - {Symbol("i")} and exact(value).free_symbols:
        return None
    number = exact(value)
    if not number.is_Rational:
        number = number.evalf(60)
        if not number.is_Float:
            return None
        number = Rational(number)
    return Fraction(int(number.p), int(number.q))
