r"""Units and percent signs after a value. The question states the unit, so an answer may carry it or leave it out."""

from __future__ import annotations

import re

_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?"
# The unit may be joined on by a slash or a product sign: \text{m}/\text{s}^2.
_TEXT_UNIT = re.compile(
    rf"(?P<value>.*?\S)?(?P<joint>(?:\s|/|\\cdot|\\times)*)\\text\{{[^{{}}]*\}}{_POWER}\s*", re.DOTALL
)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\(?:circ|degrees?)\s*\}?|\\degrees?)(?:\s*[CFK])?$")
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
# Those that are also products of quantities: right behind a number they are letters, until a blank says otherwise.
_PRODUCTS = frozenset(["nm", "mg", "ms", "ml", "mL", "cl", "dl", "hr", "Pa", "rs", "Rs", "mi", "sq", "cu"])
# fmt: on
# sinx, logt: a function of a letter, whatever its length.
_FUNCTION_OF_LETTER = re.compile(r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp)[xyzt]")
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


def without_bare_unit(text: str, *, numeric: bool) -> str:
    """Drop bare words after a number: `18 dollars`, `5 km/h`, `12cm^2`.

    `numeric`: this is an answer to a gold without letters, where `5 m` and `3mg` cannot be products. Elsewhere short
    words and single letters stay, and so do words right behind a number that may be products (`2rs`, `3abcd`).
    """
    match = _VALUE_AND_TAIL.fullmatch(text)
    if match is None:
        return text
    words = [word for word in re.split(r"\s*(?:/|\\cdot|\*|\s)\s*", match["tail"]) if word]
    found = [_UNIT_WORD.fullmatch(word) for word in words]
    is_unit = all(
        each is not None and _is_unit_name(each[1], blank=bool(match["blank"]), numeric=numeric) for each in found
    )
    return match["value"] if is_unit else text


def _is_unit_name(name: str, *, blank: bool, numeric: bool) -> bool:
    if name.lower() in _FUNCTIONS or _FUNCTION_OF_LETTER.fullmatch(name):
        return False
    if name in _ABBREVIATIONS:
        return blank or numeric or name not in _PRODUCTS
    if len(name) >= 4:
        return blank or numeric
    return blank and numeric and (len(name) == 3 or name in _SYMBOLS)
