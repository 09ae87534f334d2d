"""When in a run something is compared: the few phrases that a definition may use, and the updates that each means."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

# N is an update; docs/reports.md says what each means.
PHRASES = (
    "end",
    "early",
    "late",
    "throughout",
    "at equal updates",
    "over checkpoints",
    "at update N",
    "from update N on",
    "after update N",
)
# Those that are one place in a run, and no stretch of it.
PLACES = ("end", "at update N")
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class When:
    """A phrase of `PHRASES` with its update, where it names one."""

    phrase: str = "end"
    update: int | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """
        Raises:
            ValueError: it is none of the phrases.
        """
        phrase = re.sub(r"\d+", "N", text, count=1)
        if phrase not in PHRASES or "N" in text:
            raise ValueError(f"is {text!r}: choose {', '.join(PHRASES)}")
        number = re.search(r"\d+", text)
        return cls(phrase, int(number.group()) if number else None)

    def __str__(self) -> str:
        return self.phrase if self.update is None else self.phrase.replace("N", str(self.update))

    def spans(self, updates: int, evaluated: Iterable[int]) -> list[tuple[int, int]]:
        """The stretches (a, b], a < u <= b, of a run of `updates` updates that it speaks of, each to be borne out;
        none for the end, which depends on the measure. `evaluated`: updates with an evaluation."""
        n = self.update or 0
        quarters = [round(k * updates / QUARTERS) for k in range(QUARTERS + 1)]
        match self.phrase:
            case "early":
                return [(0, quarters[1])]
            case "late":
                return [(quarters[-2], updates)]
            case "throughout":
                return list(itertools.pairwise(quarters))
            case "at equal updates" | "over checkpoints":
                return [(0, updates)]
            case "at update N":
                return [(n - 1, n)]
            case "from update N on":
                return [(each - 1, each) for each in sorted(evaluated) if each >= n]
            case "after update N":
                return [(n, updates)]
        return []


END = When()
