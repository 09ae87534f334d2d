"""scores.json and summaries, from counts worked out by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_lab.evaluation.answers import Identity
from grpo_lab.evaluation.render import of_run, of_runs
from grpo_lab.evaluation.report import (
    SCORES,
    earlier_results,
    make_scores,
    seconds_in,
    summarise,
    summarise_runs,
    write_json,
)
from grpo_lab.evaluation.scoring import Tally

KS = [1, 2]


def _result(target: str, update: int | None, benchmark: str, correct: list[int], **settings: Any) -> dict[str, Any]:
    """Of n = 4 responses to each problem."""
    tallies = [
        Tally(id=f"{benchmark}{k}", n=4, correct=c, truncated=1, unparsed=0, timeout=0, error=0, tokens=20)
        for k, c in enumerate(correct)
    ]
    identity = Identity(f"weights of {target}", {"n": 4} | settings)
    provenance = {"target": target, "update": update, "seconds": {"total": 1.0}}
    return make_scores(benchmark, tallies, KS, identity, provenance)


RESULTS = [
    _result("base", 0, "a", [0, 1, 3, 4]),
    _result("base", 0, "b", [0, 2]),
    _result("update_000010", 10, "a", [1, 2, 4, 4]),
    _result("update_000010", 10, "b", [0, 4]),
    _result("update_000020", 20, "a", [0, 0, 4, 4]),
    _result("update_000020", 20, "b", [2, 4]),
]


def test_the_scores_of_one_model() -> None:
    result = RESULTS[0]
    assert result["scores"]["mean@4"] == result["scores"]["pass@1"] == 8 / 16
    # pass@2 of 0, 1, 3 and 4 of four: 0, 1/2, 1, 1.
    assert result["scores"]["pass@2"] == pytest.approx(2.5 / 4)
    assert result["scores"]["response/truncated"] == 0.25
    assert result["scores"]["response/length"] == 5.0
    low, high = result["interval_95"]["mean@4"]
    assert 0 <= low < 0.5 < high <= 1
    assert [each["correct"] for each in result["problems"]] == [0, 1, 3, 4]
    assert result["identity"]["model"] == "weights of base"


def test_the_summary_of_a_run() -> None:
    summary = summarise(RESULTS[::-1], KS)
    assert [row["target"] for row in summary["rows"]] == ["base", "update_000010", "update_000020"]
    base, ten, twenty = summary["rows"]
    # Six problems of four responses each: every problem counts the same, whichever benchmark it is in.
    assert [row["average"]["mean@4"]["value"] for row in summary["rows"]] == pytest.approx([10 / 24, 15 / 24, 14 / 24])
    # p0: a0 and b0 are unsolved, a1, a2 and b1 lie in (0, 0.75], a3 is above.
    assert {side: each["problems"] for side, each in ten["split"].items()} == {"solvable": 3, "unsolved": 2, "easy": 1}
    assert base["split"]["solvable"]["scores"]["mean@4"] == pytest.approx(6 / 12)
    assert ten["split"]["solvable"]["scores"]["mean@4"] == pytest.approx(10 / 12)
    assert ten["split"]["unsolved"]["scores"]["mean@4"] == pytest.approx(1 / 8)
    assert twenty["split"]["unsolved"]["scores"]["pass@2"] == pytest.approx((0 + 5 / 6) / 2)
    # Over the checkpoints, without the base.
    spread = summary["over_checkpoints"]["a/mean@4"]
    assert spread == {"min": 8 / 16, "max": 11 / 16, "median": 9.5 / 16, "mean": 9.5 / 16}
    assert summary["over_checkpoints"]["average/mean@4"]["max"] == pytest.approx(15 / 24)


def test_other_k_come_from_the_same_counts() -> None:
    summary = summarise(RESULTS, [3])
    assert set(summary["rows"][0]["benchmarks"]["a"]["interval_95"]) == {"mean@4", "pass@3"}
    # pass@3 of 0, 1, 3 and 4 of four: 0, 3/4, 1, 1.
    assert summary["rows"][0]["benchmarks"]["a"]["scores"]["pass@3"] == pytest.approx(2.75 / 4)


def test_without_base_there_is_no_split_and_one_benchmark_has_no_average() -> None:
    (row,) = summarise([RESULTS[2]], KS)["rows"]
    assert (row["split"], row["average"]) == ({}, {})


def test_a_problem_that_one_model_has_not_is_left_out_of_its_split() -> None:
    """Its tokenizer made the prompt too long."""
    whole = summarise(RESULTS, KS)["rows"][2]["split"]
    fewer = [*RESULTS[:5], _result("update_000020", 20, "b", [2])]
    cut = summarise(fewer, KS)["rows"][2]["split"]
    assert sum(each["problems"] for each in cut.values()) == sum(each["problems"] for each in whole.values()) - 1


def test_over_runs_at_common_updates() -> None:
    one = summarise([RESULTS[2], RESULTS[4]], KS)
    other = summarise([_result("update_000010", 10, "a", [1, 1, 1, 4]), _result("update_000030", 30, "a", [1] * 4)], KS)
    over = summarise_runs({"one": one, "other": other})
    assert list(over["over_runs"]) == ["update_000010"]
    # 11/16 and 7/16: the deviation of two values is their difference over the root of two.
    assert over["over_runs"]["update_000010"]["a/mean@4"] == {
        "mean": pytest.approx(9 / 16),
        "sd": pytest.approx(4 / 16 / 2**0.5),
    }


def test_earlier_scores_count_only_with_the_same_settings(tmp_path: Path) -> None:
    kept, other = RESULTS[2], _result("update_000020", 20, "a", [0] * 4, seed=2)
    write_json(tmp_path / "update_000010" / "a" / SCORES, kept)
    write_json(tmp_path / "update_000020" / "a" / SCORES, other)
    write_json(tmp_path / "update_000010" / "b" / SCORES, RESULTS[3])
    assert earlier_results(tmp_path, {"a": {"n": 4}}) == [kept]
    # Trained again to the same update: the newer answers are that run's.
    newer = _result("update_000010", 10, "a", [4] * 4)
    write_json(tmp_path / "update_000010" / "a-1234" / SCORES, newer)
    assert earlier_results(tmp_path, {"a": {"n": 4}}) == [newer]
    assert seconds_in(tmp_path / "update_000010" / "a" / SCORES) == {"total": 1.0}
    assert seconds_in(tmp_path / SCORES) is None


def test_the_tables_hold_the_numbers() -> None:
    console = Console(file=io.StringIO(), width=200)
    summary = summarise(RESULTS, KS)
    for part in (*of_run("a run", summary), *of_runs(summarise_runs({"one": summary, "two": summary}))):
        console.print(part)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "a: 4 problems, %",
        "average over the 6 problems of 2 benchmarks, %",
        "p0 = 0 (2) mean@4",
        "over the checkpoints, %",
        "over 2 runs: mean ± sample deviation, %",
        "68.8 ± 0.0",
    ):
        assert words in shown
    (line,) = [each for each in shown.splitlines() if each.startswith("a/mean@4")]
    assert line.split() == ["a/mean@4", "50.0", "68.8", "59.4", "59.4"]
