"""What a loader returns, and the rule that says which side of the split a problem is on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from grpo_lab.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The problems of a data set. `report` says what was read, dropped and found; `warnings` are full sentences."""

    train: list[Problem]
    test: list[Problem]
    report: dict[str, int | float | str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def problem_id(question: str) -> str:
    """16 hexadecimal digits that name a question on every machine and in every run."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


def is_held_out(identity: str, share: float) -> bool:
    """Whether a problem belongs to the test side: by its id alone, so adding or dropping rows moves no other row."""
    return int(identity, 16) < share * 2**64


def split_by_hash(problems: Iterable[Problem], share: float) -> tuple[list[Problem], list[Problem]]:
    """The problems as (train, test), order kept, with about `share` of them in test (0: none, 1: all)."""
    train: list[Problem] = []
    test: list[Problem] = []
    for problem in problems:
        (test if is_held_out(problem.id, share) else train).append(problem)
    return train, test
