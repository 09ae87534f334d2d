"""Finding the same problem twice: exact duplicates inside a data set, and problems shared with an evaluation set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from grpo_lab.types import Problem

# \, \; \: \! \> "\ " \quad \qquad and ~: spacing that changes nothing. A backslash before belongs to a line break.
_LATEX_SPACING = re.compile(r"(?<!\\)\\(?:[,;:!> ]|q?quad(?![A-Za-z]))|~")
_WHITESPACE = re.compile(r"\s+")


def first_of_each(problems: Iterable[Problem], content: Callable[[str], str]) -> tuple[list[Problem], int, int]:
    """Drop problems whose formatted user content was seen before.

    Returns (the first of each, in order; how many were dropped; how many of those had another gold answer).
    """
    kept: dict[str, Problem] = {}
    dropped = disagreeing = 0
    for problem in problems:
        first = kept.setdefault(content(problem.question), problem)
        if first is not problem:
            dropped += 1
            disagreeing += first.gold != problem.gold
    return list(kept.values()), dropped, disagreeing


def normalise(question: str) -> str:
    """A question without case, whitespace and LaTeX spacing."""
    return _WHITESPACE.sub("", _LATEX_SPACING.sub("", question)).casefold()


def count_shared(train: Iterable[Problem], evaluation: Iterable[Problem]) -> tuple[int, int]:
    """How many evaluation problems are among the training problems: (word for word, after normalising)."""
    evaluation = list(evaluation)
    questions = {problem.question for problem in train}
    exact = sum(problem.question in questions for problem in evaluation)
    normalised = {normalise(question) for question in questions}
    return exact, sum(normalise(problem.question) in normalised for problem in evaluation)
