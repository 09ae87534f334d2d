"""Verdicts on one response. Pure; the slow part is loaded only when it is reached."""

from __future__ import annotations

from grpo_lab.rewards.extract import final_answer, text_after_hash
from grpo_lab.rewards.written import may_be_undefined, read_plain, same_written, tolerates
from grpo_lab.types import Judgement, Verdict


def judge_math(gold: str, completion: str, tolerance: float | None = None) -> Judgement:
    """The verdict on the final answer in `completion`, by mathematical equality with `gold`.

    `tolerance` is an absolute bound on the error, where the data set states one. Nothing limits the time: hostile
    answers belong in a `Verifier`.
    """
    answer = final_answer(completion)
    if answer is None:
        return Judgement(verdict="unparsed")
    quick = quick_verdict(gold, answer, tolerance)
    if quick is None:
        # Here, because sympy takes long to load and most processes never need it.
        from grpo_lab.rewards.compare import compare

        quick = compare(gold, answer, tolerance).verdict
    return Judgement(verdict=quick, extracted=answer)


def judge_exact(gold: str, completion: str) -> Judgement:
    """The verdict on the text after the last `#`: correct only where it is the gold text; unparsed without a `#`."""
    answer = text_after_hash(completion)
    if answer is None:
        return Judgement(verdict="unparsed")
    return Judgement(verdict="correct" if answer == gold.strip() else "wrong", extracted=answer)


def reward(judgement: Judgement) -> float:
    """1.0 for a correct response, 0.0 for every other verdict."""
    return 1.0 if judgement.verdict == "correct" else 0.0


def quick_verdict(gold: str, answer: str, tolerance: float | None) -> Verdict | None:
    """The verdict where it is plain to see: the same text, or two plain decimals; None where it takes a parser."""
    gold = gold.strip()
    if gold and gold == answer and not may_be_undefined(gold):
        return "correct"
    gold_number, answer_number = read_plain(gold), read_plain(answer)
    if gold_number is None or answer_number is None:
        return None
    if tolerance is not None and tolerates(gold_number.value, answer_number.value, tolerance):
        return "correct"
    if same_written(gold_number, answer_number):
        return "correct"
    # 100,200 against 200,100 may be two lists.
    return None if "," in gold and "," in answer else "wrong"
