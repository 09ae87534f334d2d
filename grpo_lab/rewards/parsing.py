"""From plain-spelled text to sympy objects, by math-verify, with what it misreads put right."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from sympy import Basic, Rational, Symbol

from grpo_lab.rewards.written import read_written

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

_TWO_NUMBERS = re.compile(r"\d\s+\.?\d|\\(?:\s|$)")
# Factors side by side, one of them in brackets: 2(3), (2)(3). The library adds them up: it takes any whole number in
# front of a number for the whole part of a mixed one.
_FACTORS = re.compile(
    r"(?:(?<![\w^_.\\])\d+|\)|\\[dt]?binom\{[^{}]*\}\{[^{}]*\})\s*(?=[(\[]|\\[dt]?binom)"
    r"|(?:\)|\\[dt]?binom\{[^{}]*\}\{[^{}]*\})\s*(?=\d|\\frac)"
)
_E_NOTATION = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,4})(?![\w.])")
_MISREAD_COMMANDS = frozenset([r"\gamma", r"\beta"])
_SYMBOL = re.compile(
    r"\\text\{[^{}]*\}|\\[A-Za-z]+"
    r"|(?P<letter>[A-Za-z])(?P<primes>'*)(?P<index>_(?:\{\s*\w+\s*\}|\w))?(?P<late>'*)"
)


class Unreadable(ValueError):
    """An answer, or a part of one, that the parser cannot read."""


def has_letters(text: str) -> bool:
    """Whether there are letters that are no part of a command."""
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) is not None


@lru_cache(maxsize=4096)
def parse_value(text: str) -> Any:
    """The sympy object that math-verify reads in a single value or relation, its decimals as exact fractions.

    Raises:
        Unreadable: it reads none, or the text is two numbers side by side (which it would add up).

    Alternatives (`x < 2 or x > 3`) are the union of their solutions.
    """
    if len(alternatives := text.split(" or ")) > 1:
        return sympy.Union(*(parse_value(one).as_set() for one in alternatives))
    text = _E_NOTATION.sub(r"\1 \\times 10^{\2}", text) if read_written(text) is not None else text
    if not text.strip() or _TWO_NUMBERS.search(text):
        raise Unreadable(text)
    text = _FACTORS.sub(lambda match: rf"{match[0]} \cdot ", text)
    boxed = rf"\boxed{{{_apart(text)}}}"
    found = parse(boxed, extraction_config=_EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or not isinstance(found[0], (Basic, sympy.MatrixBase)):
        raise Unreadable(text)
    return found[0].xreplace({one: Rational(str(one)) for one in found[0].atoms(sympy.Float)})


def exact(value: Any) -> Any:
    """i as the imaginary unit, symbols without assumptions, everything worked out."""
    # dv/dt of plain symbols would be worked out to 0.
    rates = (rate for rate in value.atoms(sympy.Derivative) if not rate.expr.has(*rate.variables))
    value = value.xreplace({rate: Symbol(str(rate)) for rate in rates})
    bound = value.atoms(Symbol) - value.free_symbols
    value = value.xreplace(
        {
            one: sympy.I if one.name in ("i", "imath") and one not in bound else Symbol(one.name)
            for one in value.atoms(Symbol)
        }
    )
    return value.doit()


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
