"""Numbers as they are written down: read and compared exactly, without sympy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# A decimal stands for a value it rounds (1/3, sqrt 19) from this many significant digits on.
ROUNDED_DIGITS = 6
# A gold decimal with this many digits is the image of a float (13/3 stored as 4.333333333333333), not an exact value.
FLOAT_DIGITS = 12
FLOAT_RELATIVE_ERROR = Fraction(1, 10**11)
# Python reads no integer of more than 4300 digits.
MAX_CHARACTERS = 2_000

_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<mantissa>\d+\.?\d*|\.\d+)"
    r"(?:[eE](?P<e>[-+]?\d{1,4})|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*(?P<power>[-+]?\d{1,4})\s*\}|(?P<digit>\d)))?"
)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_MAYBE_UNDEFINED = re.compile(r"\\[a-z]?frac|/|nan", re.IGNORECASE)
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")


@dataclass(frozen=True, slots=True)
class Written:
    """A number with the precision it was written in.

    `value` is exact, `digits` counts significant digits, `place` is the value of one unit of the last digit (None for
    a whole number without a point or exponent, which is never a rounding of anything).
    """

    value: Fraction
    digits: int
    place: Fraction | None

    def rounds(self, exact: Fraction) -> bool:
        """Whether this is `exact`, correctly rounded or cut off, to enough digits."""
        if self.place is None or self.digits < ROUNDED_DIGITS:
            return False
        error = abs(self.value - exact)
        return error <= self.place / 2 or (error < self.place and abs(self.value) < abs(exact))

    @property
    def is_float_image(self) -> bool:
        return self.place is not None and self.digits >= FLOAT_DIGITS

    def percent(self) -> Written:
        return Written(self.value / 100, self.digits, self.place / 100 if self.place is not None else None)


def read_written(text: str) -> Written | None:
    r"""A decimal, or scientific notation (`4.5e33`, `4.5 \times 10^{33}`); None for anything else."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        return None
    mantissa = match["mantissa"]
    whole, point, decimals = mantissa.partition(".")
    exponent = match["e"] or match["power"] or match["digit"]
    scale = Fraction(10) ** int(exponent or 0)
    value = Fraction(int((whole or "0") + decimals), 10 ** len(decimals)) * scale
    digits = len((whole + decimals).lstrip("0"))
    place = Fraction(1, 10 ** len(decimals)) * scale if point or exponent else None
    return Written(-value if match["sign"] == "-" else value, digits, place)


def same_written(gold: Written, answer: Written) -> bool:
    """Equal as exact numbers; a gold that is the image of a float is met by what rounds it."""
    if gold.value == answer.value:
        return True
    return gold.is_float_image and (is_close(gold, answer.value) or answer.rounds(gold.value))


def is_close(image: Written, value: Fraction) -> bool:
    return abs(image.value - value) <= FLOAT_RELATIVE_ERROR * abs(image.value)


def tolerates(gold: Fraction, answer: Fraction, tolerance: float) -> bool:
    """|gold - answer| <= tolerance, all three read as decimals so that the bound itself is still within."""
    return abs(gold - answer) <= Fraction(str(float(tolerance)))


def read_plain(text: str) -> Written | None:
    """An integer or decimal with nothing around it but perhaps `$` or thousands commas: the fast path's numbers."""
    text = text.strip().strip("$").strip()
    if _GROUPED.fullmatch(text):
        return read_written(text.replace(",", ""))
    return read_written(text) if _PLAIN.fullmatch(text) else None


def may_be_undefined(text: str) -> bool:
    """Whether it may have no value, so that the same text in gold and answer proves nothing."""
    return _MAYBE_UNDEFINED.search(text) is not None
