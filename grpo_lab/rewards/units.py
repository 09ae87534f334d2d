r"""Units and percent signs after a value. The question states the unit, so an answer may carry it or leave it out."""

from __future__ import annotations

import re

_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?"
# The unit may be joined on by a slash or a product sign: \text{m}/\text{s}^2.
_TEXT_UNIT = re.compile(
    rf"(?P<value>.*?\S)?(?P<joint>(?:\s|/|\\cdot|\\times)*)\\text\{{[^{{}}]*\}}{_POWER}\s*", re.DOTALL
)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\(?:circ|degrees?)\s*\}?|\\degrees?)$")
_PERCENT = re.compile(r"\s*(?:\\?%|\bper\s?cent(?:age)?|\\text\{\s*per\s?cent(?:age)?\s*\})\s*$", re.IGNORECASE)
_VALUE_AND_TAIL = re.compile(r"(?P<value>.*?(?:[\d)}]|\\pi))(?P<blank> ?)(?P<tail>[A-Za-z].*)", re.DOTALL)
_UNIT_WORD = re.compile(rf"([A-Za-z]+)\.?{_POWER}")
_SYMBOLS = frozenset(["m", "g", "s", "h", "l", "L", "N", "J", "W", "V", "A", "K", "C", "F"])
# fmt: off
_ABBREVIATIONS = frozenset([
    "cm", "mm", "km", "dm", "nm", "kg", "mg", "ml", "mL", "cl", "dl", "ft", "in", "yd", "mi", "oz", "lb", "lbs", "hr",
    "hrs", "min", "sec", "ms", "mph", "kph", "kmh", "Hz", "kHz", "MHz", "Pa", "kPa", "eV", "kW", "kWh", "kJ", "rad",
    "deg", "sq", "cu", "rs", "Rs",
])
# fmt: on
# Bare letters after a number that are mathematics, whatever their length.
# fmt: off
_FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "csc", "log", "exp", "sqrt", "mod", "and", "or", "max", "gcd", "lcm", "arcsin",
    "arccos", "arctan", "sinh", "cosh", "tanh", "choose", "div", "pi", "inf", "infinity", "if", "for", "where",
    "times", "over", "of",
])
# fmt: on


def without_percent(text: str) -> tuple[str, bool]:
    """The text before a final percent sign, and whether there was one."""
    rest = _PERCENT.sub("", text)
    return (rest, True) if rest and rest != text else (text, False)


def without_marked_unit(text: str) -> str:
    r"""Drop what cannot be part of a formula: a final `\text{...}` with its power, and degree signs."""
    while True:
        match = _TEXT_UNIT.fullmatch(text)
        shorter = match["value"] if match is not None and match["value"] else _DEGREES.sub("", text)
        if not shorter.strip() or shorter == text:
            return text
        text = shorter.strip()


def without_bare_unit(text: str, *, loosely: bool) -> str:
    """Drop bare words after a number: `18 dollars`, `5 km/h`, `12cm^2`.

    `loosely` also takes short words and single letters. That is for an answer to a gold without letters: there, `5 m`
    cannot be the product of 5 and m.
    """
    match = _VALUE_AND_TAIL.fullmatch(text)
    if match is None or not _is_unit(match["tail"], loosely=loosely and bool(match["blank"])):
        return text
    return match["value"]


def _is_unit(tail: str, *, loosely: bool) -> bool:
    words = [word for word in re.split(r"\s*(?:/|\\cdot|\*|\s)\s*", tail) if word]
    matches = [_UNIT_WORD.fullmatch(word) for word in words]
    return all(match is not None and _is_unit_name(match[1], loosely=loosely) for match in matches)


def _is_unit_name(name: str, *, loosely: bool) -> bool:
    if name.lower() in _FUNCTIONS:
        return False
    if name in _ABBREVIATIONS or len(name) >= 4:
        return True
    return loosely and (len(name) == 3 or name in _SYMBOLS)
