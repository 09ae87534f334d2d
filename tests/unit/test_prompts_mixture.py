"""Mixtures: order, duplicates, published counts, the overlap report; and the recipe of ALP-Math on small stand-ins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table

from grpo_lab.composition import dataset_config
from grpo_lab.config import ColumnsConfig, ConfigError, DatasetConfig, MixtureConfig, TableConfig
from grpo_lab.prompts import Rendered, fitting_warnings, load_problems
from grpo_lab.prompts.overlap import normalise

GURU_SUFFIX = " Please output the final answer within \\boxed{}."


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def alp_math(tmp_path: Path) -> MixtureConfig:
    """conf/dataset/alp_math.yaml over stand-ins: 4 Guru rows, 5 OpenR1 rows, 3 of them of middling difficulty."""
    guru = [
        {
            "data_source": "math__a",
            "prompt": [{"role": "user", "content": question + GURU_SUFFIX}],
            "reward_model": {"style": "rule", "ground_truth": gold},
        }
        for question, gold in [("What is $1+1$?", "2"), ("Shared?", "7"), ("What is $1+1$?", "2"), ("Halve 5.", "2.5")]
    ]
    write_table(pyarrow.Table.from_pylist(guru), tmp_path / "guru.parquet")
    openr1 = [
        {"prompt": "Easy.", "answer": "1", "scores": [1, 1, 1, 1]},
        {"prompt": "Shared?", "answer": "8", "scores": [0, 1]},
        {"prompt": "Middling.", "answer": "3", "scores": [0, 0, 1]},
        {"prompt": "On the bound.", "answer": "4", "scores": [0, 0, 0, 0, 1]},
        {"prompt": "Find  $a \\, b$.", "answer": "5", "scores": [1, 0, 1]},
    ]
    benchmarks = {
        "math500": [{"problem": "find $ab$.", "answer": "5"}, {"problem": "Halve 5.", "answer": "2.5"}],
        "aime24": [{"problem": "New.", "solution": "\\boxed{113}"}],
    }
    paths = {name: write(tmp_path / f"{name}.jsonl", rows) for name, rows in benchmarks.items()}
    config = dataset_config("alp_math")
    assert isinstance(config, MixtureConfig)
    first, second = config.parts
    return dataclasses.replace(
        config,
        parts=[
            dataclasses.replace(first, path=str(tmp_path / "guru.parquet")),
            dataclasses.replace(second, path=write(tmp_path / "openr1.jsonl", openr1)),
        ],
        overlap_with=["math500", "aime24"],
        overlap_paths=paths,
    )


def test_alp_math_joins_filters_and_keeps_the_first(alp_math: MixtureConfig) -> None:
    split = load_problems(alp_math)
    # "Shared?" keeps Guru's answer; the suffix of Guru's prompts is gone, else nothing would be shared.
    assert [(problem.question, problem.gold, problem.tags["source"]) for problem in split.train] == [
        ("What is $1+1$?", "2", "guru"),
        ("Shared?", "7", "guru"),
        ("Halve 5.", "2.5", "guru"),
        ("Middling.", "3", "openr1"),
        ("Find  $a \\, b$.", "5", "openr1"),
    ]
    expected = {
        "rows": 7,
        "guru/rows": 4,
        "openr1/rows": 5,
        "openr1/outside_score": 2,
        "duplicates": 2,
        "duplicates_with_another_gold": 1,
        "unique": 5,
        "train": 5,
        "test": 2,
    }
    assert {key: split.report[key] for key in expected} == expected


def test_alp_math_compares_with_the_published_counts(alp_math: MixtureConfig) -> None:
    warnings = load_problems(alp_math).warnings
    for sentence in (
        "guru: rows: 4 found, 54404 published",
        "openr1: rows: 3 found, 23036 published",
        "alp_math: rows: 7 found, 77440 published",
        "alp_math: rows without duplicates: 5 found, 73293 published",
    ):
        assert any(line.startswith(sentence) for line in warnings), sentence
    fitting = dataclasses.replace(alp_math, expected_fitting=0)
    assert fitting_warnings(fitting, Rendered(prompts=[], dropped=5)) == []
    (line,) = fitting_warnings(alp_math, Rendered(prompts=[], dropped=5))
    assert line.startswith("alp_math: prompts within the length limit: 0 found, 73290 published")
    assert fitting_warnings(DatasetConfig(kind="table", name="t"), Rendered(prompts=[], dropped=5)) == []


def test_counts_as_published_raise_no_warning(alp_math: MixtureConfig) -> None:
    parts = [dataclasses.replace(part, expected_rows=rows) for part, rows in zip(alp_math.parts, (4, 3), strict=True)]
    split = load_problems(dataclasses.replace(alp_math, parts=parts, expected_rows=7, expected_unique=5))
    assert not any("published" in line for line in split.warnings)


def test_the_overlap_report(alp_math: MixtureConfig) -> None:
    split = load_problems(alp_math)
    # "Halve 5." word for word, "find $ab$." after normalising.
    assert (split.report["overlap/math500/exact"], split.report["overlap/math500/normalised"]) == (1, 2)
    assert (split.report["overlap/aime24/exact"], split.report["overlap/aime24/normalised"]) == (0, 0)
    assert "2 of 2 problems of math500 are among the training problems" in split.warnings
    assert [problem.question for problem in split.test] == ["find $ab$.", "Halve 5."]


def test_an_evaluation_set_that_cannot_be_loaded_is_said(alp_math: MixtureConfig, tmp_path: Path) -> None:
    paths = alp_math.overlap_paths | {"aime24": str(tmp_path / "absent.jsonl")}
    split = load_problems(dataclasses.replace(alp_math, overlap_paths=paths))
    (line,) = [line for line in split.warnings if line.startswith("overlap with aime24 is unknown")]
    assert "+dataset.overlap_paths.aime24=" in line
    assert "absent.jsonl does not exist" in line
    assert "overlap/aime24/exact" not in split.report


def test_a_test_set_that_cannot_be_loaded_stops(alp_math: MixtureConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.test_set=math500 cannot be loaded, set dataset\.test_path"):
        load_problems(dataclasses.replace(alp_math, test_path=str(tmp_path / "absent.jsonl")))
    with pytest.raises(ConfigError, match=r"data set arithmetic is no table"):
        load_problems(dataclasses.replace(alp_math, test_set="arithmetic"))
    with pytest.raises(ConfigError, match=r"there is no data set 'nothing'"):
        load_problems(dataclasses.replace(alp_math, test_set="nothing"))


def test_without_a_test_set_a_share_is_held_out(alp_math: MixtureConfig) -> None:
    split = load_problems(dataclasses.replace(alp_math, test_set=None, held_out=1.0, overlap_with=[]))
    assert (len(split.train), len(split.test)) == (0, 5)


def test_skip_on_the_mixture_reaches_every_part(alp_math: MixtureConfig, tmp_path: Path) -> None:
    rows = [{"prompt": "No answer.", "scores": [0, 1]}, {"prompt": "Fine.", "answer": "1", "scores": [0, 1]}]
    second = dataclasses.replace(alp_math.parts[1], path=write(tmp_path / "faulty.jsonl", rows))
    faulty = dataclasses.replace(alp_math, parts=[alp_math.parts[0], second])
    with pytest.raises(ConfigError, match=r"faulty\.jsonl line 1: there is no column answer or gt"):
        load_problems(faulty)
    split = load_problems(dataclasses.replace(faulty, on_error="skip"))
    assert split.report["openr1/skipped_rows"] == 1
    assert any(line.startswith("openr1: 1 of 2 rows skipped") for line in split.warnings)


def test_a_part_that_is_missing_is_named_by_its_position(alp_math: MixtureConfig) -> None:
    gone = TableConfig(kind="table", name="gone", columns=ColumnsConfig(question=["q"], answer="a"))
    with pytest.raises(ConfigError, match=r"dataset\.parts\.1\.id is not set.*dataset\.parts\.1\.path="):
        load_problems(dataclasses.replace(alp_math, parts=[alp_math.parts[0], gone]))
    with pytest.raises(ConfigError, match=r"dataset\.parts is empty"):
        load_problems(dataclasses.replace(alp_math, parts=[]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $a \\, b$.", "find  $ab$."),
        ("$x\\quad y\\qquad z$", "$xyz$"),
        ("a~b\\ c\\;d\\!e", "ABCDE"),
        ("line\nbreak\t", "LineBreak"),
    ],
)
def test_normalise_ignores_case_and_spacing(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(("one", "other"), [("a,b", "ab"), ("a\\\\,b", "a\\\\b"), ("\\quadric", "ric"), ("x^2", "x2")])
def test_normalise_keeps_what_matters(one: str, other: str) -> None:
    """A comma after a line break is a comma, and \\quadric is no \\quad."""
    assert normalise(one) != normalise(other)
