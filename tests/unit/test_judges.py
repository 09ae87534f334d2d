"""Our verifier on gold answers in the dresses of `scripts.judges`: right by construction, or wrong."""

from __future__ import annotations

import pytest

from grpo_lab.rewards import judge_math
from scripts.judges.dresses import DRESSES, Dress

GOLDS = [
    "18",
    "-7",
    "0",
    "1234567",
    r"\frac{14}{3}",
    r"-\frac{3}{8}",
    r"3\sqrt{13}",
    r"\pi",
    "x^2 + 3x - 5",
    "y = 2x + 3",
    "(3,4]",
    "(2, 5)",
    "1, 2, 5",
    r"\text{Evelyn}",
    r"\text{(C)}",
    "4.5e33",
    r"2 \times 10^{-3}",
]
CASES = [
    pytest.param(gold, dress, id=f"{dress.name}: {gold}")
    for dress in DRESSES
    for gold in GOLDS
    if dress.truth != "policy" and dress.make(gold) is not None
]


@pytest.mark.parametrize(("gold", "dress"), CASES)
def test_the_verdict_is_the_truth(gold: str, dress: Dress) -> None:
    response = dress.make(gold)
    assert response is not None
    assert (judge_math(gold, response).verdict == "correct") == (dress.truth == "right")


def test_every_dress_suits_an_answer() -> None:
    unused = [dress.name for dress in DRESSES if all(dress.make(gold) is None for gold in GOLDS)]
    assert unused == []
    assert len({dress.name for dress in DRESSES}) == len(DRESSES)
