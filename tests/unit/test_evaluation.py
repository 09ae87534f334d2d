"""The scores of a set of groups."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_lab.evaluation.scoring import per_problem, scores
from grpo_lab.types import Group, Problem, Prompt, Rollout, Verdict


def _group(verdicts: list[Verdict], reasons: str) -> Group:
    rollouts = [
        Rollout(
            token_ids=np.arange(length + 1, dtype=np.int32),
            behaviour_logprobs=np.zeros(length + 1, dtype=np.float32),
            finish_reason="stop" if reason == "s" else "length",
            policy_version=0,
            text="",
        )
        for length, reason in enumerate(reasons)
    ]
    prompt = Prompt(problem=Problem(id="p", question="q", gold="1"), text="q", token_ids=(1,))
    rewards = tuple(float(verdict == "correct") for verdict in verdicts)
    return Group(prompt=prompt, rollouts=tuple(rollouts), rewards=rewards, verdicts=tuple(verdicts), sequence=0)


def test_what_failed_counts_as_wrong_and_is_reported() -> None:
    groups = [
        _group(["correct", "wrong", "timeout", "error"], "ssll"),
        _group(["correct", "correct", "unparsed", "wrong"], "ssss"),
    ]
    row = scores(groups, [1, 2, 4])
    assert row["mean@4"] == row["pass@1"] == pytest.approx(3 / 8)
    # One of four correct: 1 - C(3,2)/C(4,2) = 1/2; two of four: 1 - 1/6.
    assert row["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert row["pass@4"] == 1.0
    assert (row["verdict/timeout"], row["verdict/error"], row["verdict/unparsed"]) == (1 / 8, 1 / 8, 1 / 8)
    assert row["response/truncated"] == 2 / 8
    assert row["response/length"] == 2.5
    assert row["problems"] == 2
    assert per_problem(groups) == [{"id": "p", "correct": 1, "n": 4}, {"id": "p", "correct": 2, "n": 4}]
