"""Tables: columns to problems, faults stopped at or counted, duplicates, the test side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.config import ColumnsConfig, ConfigError, DatasetConfig, TableConfig
from grpo_lab.prompts import load_problems
from grpo_lab.prompts.split import is_held_out, problem_id


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def table(path: str, **changes: Any) -> TableConfig:
    columns = changes.pop("columns", ColumnsConfig(question=["q"], answer="a"))
    return dataclasses.replace(TableConfig(kind="table", name="t", path=path, columns=columns), **changes)


def test_a_row_becomes_a_problem(tmp_path: Path) -> None:
    row = {"q": " Find $x$. ", "a": "2.5", "err": "1e-1", "u": "km", "topic": "Algebra", "level": 3}
    columns = ColumnsConfig(
        question=["q"], answer="a", tolerance="err", unit="u", tags=["topic", "level", "not_in_this_copy"]
    )
    (problem,) = load_problems(table(write(tmp_path / "t.jsonl", [row]), columns=columns)).train
    assert problem.question == "Find $x$."
    # First 16 hexadecimal digits of sha256("Find $x$."), worked out with sha256sum.
    assert problem.id == "f89efc4522efe8ee"
    assert (problem.gold, problem.tolerance, problem.solution) == ("2.5", 0.1, None)
    assert problem.tags == {"source": "t", "unit": "km", "topic": "Algebra", "level": "3"}


def test_question_columns_are_joined_and_alternatives_tried_in_order(tmp_path: Path) -> None:
    rows = [
        {"body": "Two birds.", "q": "How many?", "a": "2", "s": "\\boxed{9}"},
        {"body": "Three birds.", "problem": "How many?", "a": None, "s": "so \\boxed{3}"},
        {"body": "Four birds.", "q": None, "problem": "How many?", "s": "so \\boxed{4}"},
    ]
    columns = ColumnsConfig(question=["body", "q|problem"], answer="a|s", gold="plain|boxed")
    problems = load_problems(table(write(tmp_path / "t.jsonl", rows), columns=columns)).train
    assert [(problem.question, problem.gold) for problem in problems] == [
        ("Two birds. How many?", "2"),
        ("Three birds. How many?", "3"),
        ("Four birds. How many?", "4"),
    ]


def test_the_last_user_message_of_a_chat_is_the_question(tmp_path: Path) -> None:
    rows = [
        {
            "q": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q1\nBox it."}],
            "a": {"ground_truth": "1"},
        },
        {
            "q": [
                {"from": "human", "value": "old"},
                {"from": "gpt", "value": "reply"},
                {"from": "human", "value": "Q2"},
            ],
            "a": {"ground_truth": {"value": "2"}},
        },
        {"q": {"from": "human", "value": "Q3 Box it."}, "a": {"ground_truth": 3}},
    ]
    columns = ColumnsConfig(question=["q"], answer="a", gold="chat_gold", strip_suffix="Box it.")
    problems = load_problems(table(write(tmp_path / "t.jsonl", rows), columns=columns)).train
    assert [(problem.question, problem.gold) for problem in problems] == [("Q1", "1"), ("Q2", "2"), ("Q3", "3")]


FAULTS: list[tuple[Any, str]] = [
    ("{not json", "the row is not JSON"),
    ({"q": "Q"}, "there is no column a"),
    ({"a": "1"}, "there is no column q"),
    ({"q": "Q", "a": "  "}, "the gold answer is empty"),
    ({"q": "Q", "a": None}, r"the gold answer is unreadable \(null\)"),
    ({"q": "Q", "a": {"x": 1}}, r"the gold answer is unreadable \(dict\)"),
    ({"q": "  ", "a": "1"}, "the question is empty"),
    ({"q": 5, "a": "1"}, r"column q holds no text \(int\)"),
    ({"q": None, "a": "1"}, r"column q holds no text \(null\)"),
    ({"q": [{"role": "assistant", "content": "Q"}], "a": "1"}, "column q holds no message of a user"),
    ('{"q": "half \\ud800", "a": "1"}', "half a surrogate pair"),
    ({"q": "Q", "a": "1", "err": "small"}, "the tolerance 'small' is no number"),
    ({"q": "Q", "a": "1", "err": "-1"}, "the tolerance '-1' is no finite number"),
]


@pytest.mark.parametrize(("row", "fault"), FAULTS)
def test_a_row_that_cannot_be_used_stops_with_file_line_and_fix(tmp_path: Path, row: Any, fault: str) -> None:
    path = write(tmp_path / "t.jsonl", [{"q": "Q1", "a": "1"}, {"q": "Q2", "a": "2"}, row])
    columns = ColumnsConfig(question=["q"], answer="a", tolerance="err")
    with pytest.raises(ConfigError, match=rf"t\.jsonl line 3: .*{fault}.*dataset\.on_error=skip$") as caught:
        load_problems(table(path, columns=columns))
    assert "\n" not in str(caught.value)


def test_skipped_rows_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    rows = [{"q": "good", "a": "1"}, *(row for row, _ in FAULTS), {"q": "also good", "a": 2}]
    columns = ColumnsConfig(question=["q"], answer="a", tolerance="err")
    split = load_problems(table(write(tmp_path / "t.jsonl", rows), columns=columns, on_error="skip"))
    assert [problem.question for problem in split.train] == ["good", "also good"]
    assert (split.report["rows"], split.report["skipped_rows"]) == (15, 13)
    assert any("13 of 15 rows skipped; the first:" in line and "t.jsonl line 2" in line for line in split.warnings)


def test_skipping_everything_stops(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"q": "Q", "wrong": "1"}] * 3)
    with pytest.raises(ConfigError, match=r"no row can be used.*line 1: there is no column a \(there are q, wrong\)"):
        load_problems(table(path, on_error="skip"))


def test_proofs_are_dropped_and_counted_under_their_own_name(tmp_path: Path) -> None:
    rows = [
        {"q": "Solve.", "a": ["$2$,$5$"]},
        {"q": "Prove it.", "a": None},
        {"q": "How long?", "a": ["$2.5$"], "err": "1e-1"},
    ]
    columns = ColumnsConfig(question=["q"], answer="a", gold="list", tolerance="err")
    split = load_problems(table(write(tmp_path / "t.jsonl", rows), columns=columns))
    assert [(problem.gold, problem.tolerance) for problem in split.train] == [("$2$,$5$", None), ("$2.5$", 0.1)]
    assert (split.report["proof_rows"], split.report["skipped_rows"]) == (1, 0)


def test_mixed_types_of_gold_survive(tmp_path: Path) -> None:
    lines = [
        '{"q": "1", "a": "033"}',
        '{"q": "2", "a": 33}',
        '{"q": "3", "a": 0.5}',
        '{"q": "4", "a": ["2", "5"]}',
        '{"q": "5", "a": 123456789012345678901234567890}',
        '{"q": "6", "a": 0.1234567890123456789012345}',
    ]
    problems = load_problems(table(write(tmp_path / "t.jsonl", lines))).train
    assert [problem.gold for problem in problems] == [
        "033",
        "33",
        "0.5",
        "2, 5",
        "123456789012345678901234567890",
        "0.1234567890123456789012345",
    ]


def test_only_scores_strictly_between_the_bounds_are_kept(tmp_path: Path) -> None:
    scores: list[Any] = [[0, 0, 0, 0, 1], [0, 1], 0.5, [1, 1, 1, 1, 0], 0.79, 1.0]
    rows = [{"q": str(index), "a": "1", "s": score} for index, score in enumerate(scores)]
    columns = ColumnsConfig(question=["q"], answer="a", score="s", score_above=0.2, score_below=0.8)
    split = load_problems(table(write(tmp_path / "t.jsonl", rows), columns=columns, expected_rows=3))
    # Means .2, .5, .5, .8, .79, 1: the bounds themselves are out.
    assert [problem.question for problem in split.train] == ["1", "2", "4"]
    assert split.report["outside_score"] == 3
    assert not any("published" in line for line in split.warnings)


@pytest.mark.parametrize("score", [[], "high", None, ["x"]])
def test_an_unreadable_score_is_a_fault(tmp_path: Path, score: Any) -> None:
    path = write(tmp_path / "t.jsonl", [{"q": "Q", "a": "1", "s": score}])
    columns = ColumnsConfig(question=["q"], answer="a", score="s", score_above=0.2)
    with pytest.raises(ConfigError, match=r"line 1: the score .* is neither a number nor a list of numbers"):
        load_problems(table(path, columns=columns))


def test_the_first_of_equal_questions_is_kept(tmp_path: Path) -> None:
    rows = [
        {"q": "A", "a": "1"},
        {"q": "B", "a": "2"},
        {"q": " A", "a": "1"},
        {"q": "A", "a": "9"},
        {"q": "a", "a": "1"},
    ]
    split = load_problems(table(write(tmp_path / "t.jsonl", rows)))
    assert [(problem.question, problem.gold) for problem in split.train] == [("A", "1"), ("B", "2"), ("a", "1")]
    assert (split.report["duplicates"], split.report["duplicates_with_another_gold"]) == (2, 1)


def test_a_published_count_that_differs_is_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"q": "A", "a": "1"}])
    assert any("1 found, 7473 published" in line for line in load_problems(table(path, expected_rows=7473)).warnings)


def test_held_out_goes_by_the_question_alone(tmp_path: Path) -> None:
    rows = [{"q": f"question {index}", "a": "1"} for index in range(400)]
    split = load_problems(table(write(tmp_path / "t.jsonl", rows), held_out=0.25))
    # 400 fair draws at 0.25: 100 expected, standard deviation 8.7.
    assert 70 < len(split.test) < 130
    assert len(split.train) + len(split.test) == 400
    fewer = load_problems(table(write(tmp_path / "fewer.jsonl", rows[::-2]), held_out=0.25))
    test_questions = {problem.question for problem in split.test}
    assert {problem.question for problem in fewer.test} == test_questions & {row["q"] for row in rows[::-2]}
    everything = load_problems(table(str(tmp_path / "t.jsonl"), held_out=1.0))
    assert (len(everything.train), len(everything.test)) == (0, 400)


def test_the_share_is_a_cut_on_the_hash() -> None:
    assert problem_id("") == "e3b0c44298fc1c14"
    # 0xe3b0.. / 2^64 is 0.8894.
    assert is_held_out("e3b0c44298fc1c14", 0.89)
    assert not is_held_out("e3b0c44298fc1c14", 0.88)
    assert is_held_out("f" * 16, 1.0)
    assert not is_held_out("0" * 16, 0.0)


def test_a_test_file_wins_over_held_out_and_cleans_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"q": "A", "a": "1"}, {"q": "B", "a": "2"}])
    test = write(tmp_path / "test.jsonl", [{"q": "B", "a": "2"}, {"q": "C", "a": "3"}, {"q": "C", "a": "3"}])
    split = load_problems(table(train, test_path=test, held_out=1.0))
    assert [problem.question for problem in split.train] == ["A"]
    assert [problem.question for problem in split.test] == ["B", "C"]
    assert (split.report["train_also_in_test"], split.report["test_duplicates"], split.report["test_rows"]) == (1, 1, 3)
    assert any("1 training problems are also test problems" in line for line in split.warnings)


def test_a_hub_split_is_the_test_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "source"
    source.mkdir()
    write(source / "train.jsonl", [{"q": "A", "a": "1"}])
    write(source / "test.jsonl", [{"q": "B", "a": "2"}])
    config = dataclasses.replace(table(""), path=None, id=str(source), test_split="test")
    split = load_problems(config)
    assert [problem.question for problem in split.train] == ["A"]
    assert [problem.question for problem in split.test] == ["B"]
    assert split.report["source"] == f"{source}@unpinned"
    # A local copy of the training rows has no hub split beside it: said, not silently fetched.
    local = load_problems(dataclasses.replace(config, path=str(source / "train.jsonl")))
    assert local.test == []
    assert any("no held-out problems; set dataset.test_path" in line for line in local.warnings)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"gold": "hashes"}, r"dataset\.columns\.gold=hashes is unknown: it takes plain, hash"),
        ({"answer": "a|b|c", "gold": "plain|boxed"}, r"dataset\.columns\.gold=plain\|boxed does not pair"),
        ({"score_above": 0.2}, r"dataset\.columns\.score and its bounds go together"),
        ({"score": "s"}, r"dataset\.columns\.score and its bounds go together"),
    ],
)
def test_a_mapping_that_cannot_work_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "t.jsonl", [{"q": "Q", "a": "1"}])
    with pytest.raises(ConfigError, match=message):
        load_problems(table(path, columns=ColumnsConfig(**{"question": ["q"], "answer": "a"} | columns)))


def test_settings_out_of_range_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"q": "Q", "a": "1"}])
    with pytest.raises(ConfigError, match=r"dataset\.on_error=ignore is unknown"):
        load_problems(table(path, on_error="ignore"))
    with pytest.raises(ConfigError, match=r"dataset\.held_out=20 is not a share"):
        load_problems(table(path, held_out=20))
    with pytest.raises(ConfigError, match=r"dataset\.kind=video is unknown"):
        load_problems(DatasetConfig(kind="video", name="v"))
    with pytest.raises(ConfigError, match=r"dataset\.template='no place' has no \{question\}"):
        load_problems(table(path, template="no place"))
