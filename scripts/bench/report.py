"""Rows, and what is made of measured numbers: ratios, fits, Markdown tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Target:
    """A bound that a number is to reach."""

    bound: float
    at_least: bool

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.bound)}"


def at_least(bound: float) -> Target:
    return Target(bound, at_least=True)


def at_most(bound: float) -> Target:
    return Target(bound, at_least=False)


@dataclass(frozen=True)
class Row:
    """One measured number, with what it is to reach and what it comes from."""

    what: str
    measured: float
    unit: str = ""
    target: Target | None = None
    details: dict[str, float | str] = field(default_factory=dict)
    # What it was made of, for the file alone.
    raw: dict[str, list[float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        row: dict[str, Any] = {"what": self.what, "measured": self.measured, "unit": self.unit}
        if self.target is not None:
            row |= {"target": str(self.target), "met": self.target.is_met(self.measured)}
        return row | self.details | ({"raw": self.raw} if self.raw else {})


def number(value: float) -> str:
    """Three digits, and no more than there are before the point; thousands set apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(2 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def cell(value: float | str) -> str:
    return value if isinstance(value, str) else number(value)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a column for each detail that any row has."""
    details = list(dict.fromkeys(name for row in rows for name in row.details))
    lines = [["what", "measured", "target", "met", *details]]
    for row in rows:
        bounded = [str(row.target), "yes" if row.target.is_met(row.measured) else "NO"] if row.target else ["", ""]
        measured = f"{number(row.measured)} {row.unit}".strip()
        lines.append([row.what, measured, *bounded, *(cell(row.details.get(name, "")) for name in details)])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of the medians, and the least and largest of all pairs."""
    pairs = [one / other for one in slow for other in fast]
    return median(slow) / median(fast), min(pairs), max(pairs)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power of the size that the cost grows with: the slope of a straight line through their logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - middle_x) ** 2 for a in x)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread
