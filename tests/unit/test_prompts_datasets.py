"""The files of conf/dataset: all compose, and the same files serve the hub's columns and the published local copies."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from grpo_lab.composition import conf_dir, dataset_config, register
from grpo_lab.config import ArithmeticConfig, ConfigError, TableConfig
from grpo_lab.prompts import Split, load_problems

NAMES = sorted(path.stem for path in (conf_dir() / "dataset").glob("*.yaml"))
EVALUATION_SETS = ["math500", "aime24", "aime25", "olympiadbench", "minerva"]
DATA = Path(os.environ.get("GRPO_LAB_TEST_DATA", conf_dir().parent.parent / "shared" / "data"))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_composes_under_its_own_name(name: str) -> None:
    config = dataset_config(name)
    assert config.name == name
    assert "{question}" in config.template
    assert OmegaConf.is_missing(OmegaConf.structured(config), "kind") is False


def test_an_unknown_or_ill_fitting_file_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no data set 'gsm9k'"):
        dataset_config("gsm9k")
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "odd.yaml").write_text(
        "defaults:\n  - /schema/dataset/table@_here_\n  - _self_\nkind: table\nname: odd\ncolour: red\n"
    )
    monkeypatch.setattr("grpo_lab.composition.conf_dir", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"conf/dataset/odd\.yaml: .*colour"):
        dataset_config("odd")


@pytest.mark.parametrize("name", [*EVALUATION_SETS, "alp_math"])
def test_gg_sets_carry_gg_prompts(name: str) -> None:
    config = dataset_config(name)
    assert config.system_prompt == "Please reason step by step, and put your final answer within \\boxed{}."
    assert config.template == "{question} Let's think step by step and output the final answer within \\boxed{}."


def test_rg_sets_use_the_models_own_template() -> None:
    for name in ("gsm8k", "deepscaler", "orz_math"):
        config = dataset_config(name)
        assert config.system_prompt is None
        assert config.chat
        assert "\\boxed{}" in config.template


def test_variants_of_the_made_task_differ_only_in_what_they_say() -> None:
    base = dataset_config("arithmetic")
    assert isinstance(base, ArithmeticConfig)
    assert dataset_config("arithmetic_plain") == dataclasses.replace(base, name="arithmetic_plain", scratchpad=False)
    assert dataset_config("arithmetic_hard") == dataclasses.replace(
        base, name="arithmetic_hard", min_digits=4, max_digits=4
    )


def test_parts_can_be_pointed_at_local_copies_on_the_command_line() -> None:
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose(
            "dataset/alp_math",
            overrides=["dataset.parts.0.path=/data/guru.parquet", "+dataset.overlap_paths.aime24=/data/aime24.jsonl"],
        )
    assert composed.dataset.parts[0].path == "/data/guru.parquet"
    assert composed.dataset.overlap_paths == {"aime24": "/data/aime24.jsonl"}
    assert composed.dataset.parts[0].columns.gold == "chat_gold"


# One row as the hub has it: (data set, row, question, gold).
HUB_ROWS: list[tuple[str, Any, str, str]] = [
    ("gsm8k", {"question": "Q", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200"}, "Q", "1200"),
    ("math500", {"problem": "Q", "solution": "S", "answer": "\\frac{1}{2}", "subject": "Algebra"}, "Q", "\\frac{1}{2}"),
    ("aime24", {"id": 60, "problem": "Q", "solution": "\\boxed{204}", "url": "u"}, "Q", "204"),
    ("aime25", {"problem": "Q", "answer": "070", "id": "0"}, "Q", "070"),
    ("olympiadbench", {"question": "Q", "final_answer": ["$2$,$5$"], "is_multiple_answer": True}, "Q", "$2$,$5$"),
    ("minerva", {"question": "Q", "answer": "4.5e33"}, "Q", "4.5e33"),
    ("mawps", {"question": "Q", "result": "14", "result_float": 14.0}, "Q", "14"),
    ("svamp", {"Body": "B.", "Question": "Q?", "Answer": "145.0", "Type": "Sum"}, "B. Q?", "145"),
    ("deepscaler", {"problem": "Q", "solution": "", "answer": "26"}, "Q", "26"),
    (
        "orz_math",
        [{"from": "human", "value": "Q"}, {"from": "assistant", "ground_truth": {"value": "24"}}],
        "Q",
        "24",
    ),
]


@pytest.mark.parametrize(("name", "row", "question", "gold"), HUB_ROWS, ids=[row[0] for row in HUB_ROWS])
def test_the_hubs_columns(tmp_path: Path, name: str, row: Any, question: str, gold: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    split = load_problems(table(name, path, held_out=0.0))
    assert [(problem.question, problem.gold) for problem in split.train] == [(question, gold)]


def table(name: str, path: Path, **changes: Any) -> TableConfig:
    config = dataset_config(name)
    assert isinstance(config, TableConfig)
    return dataclasses.replace(config, path=str(path), **changes)


def local(name: str, file: str, **changes: Any) -> Split:
    if not (DATA / file).is_file():
        pytest.skip(f"{file} is not there: set GRPO_LAB_TEST_DATA to the folder of published files")
    return load_problems(table(name, DATA / file, **changes))


# (data set, local file, rows, duplicates, first question, first gold), read off the files.
LOCAL_FILES = [
    ("gsm8k", "gsm8k_train.jsonl", 7473, 0, "Natalia sold clips", "72"),
    ("gsm8k", "gsm8k_test.jsonl", 1319, 0, "Janet\u2019s ducks lay", "18"),
    ("math500", "math500.jsonl", 500, 0, "Convert the point", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("aime24", "aime24.jsonl", 30, 0, "Every morning Aya", "204"),
    ("aime25", "aime25.jsonl", 30, 0, "Find the sum of all integer bases", "70"),
    ("olympiadbench", "olympiadbench.jsonl", 675, 0, "Xenia and Sergey", "2"),
    ("minerva", "minerva_math.jsonl", 272, 0, "Each of the two Magellan", "1.6"),
    ("mawps", "mawps_singleop.jsonl", 562, 31, "If there are 7 bottle caps", "14"),
    ("mawps", "mawps_test.jsonl", 2065, 84, "Joan found 70 seashells", "43"),
    ("svamp", "svamp_test.jsonl", 1000, 0, "There are 87 oranges", "145"),
]


@pytest.mark.parametrize(
    ("name", "file", "rows", "duplicates", "question", "gold"), LOCAL_FILES, ids=[row[1] for row in LOCAL_FILES]
)
def test_the_published_files_load_whole(
    name: str, file: str, rows: int, duplicates: int, question: str, gold: str
) -> None:
    split = local(name, file, held_out=0.0)
    assert (split.report["rows"], split.report["skipped_rows"], split.report["proof_rows"]) == (rows, 0, 0)
    assert split.report["duplicates"] == duplicates
    assert len(split.train) == rows - duplicates
    assert split.train[0].question.startswith(question)
    assert split.train[0].gold == gold
    assert all(problem.gold.strip() for problem in split.train)


def test_gsm8k_with_both_files() -> None:
    split = local("gsm8k", "gsm8k_train.jsonl", test_path=str(DATA / "gsm8k_test.jsonl"))
    assert (len(split.train), len(split.test), split.report["train_also_in_test"]) == (7473, 1319, 0)
    assert split.warnings == []
    assert all(problem.gold.lstrip("-").replace(".", "").isdigit() for problem in split.train + split.test)


@pytest.mark.parametrize(
    ("name", "file"),
    [(name, file) for name, file, *_ in LOCAL_FILES if name in EVALUATION_SETS],
)
def test_evaluation_sets_hold_out_every_problem(name: str, file: str) -> None:
    split = local(name, file)
    assert split.train == []
    assert len(split.test) == split.report["rows"]


def test_olympiadbench_keeps_members_units_and_bounds() -> None:
    split = local("olympiadbench", "olympiadbench.jsonl")
    assert any("675 found, 674 published" in line for line in split.warnings)
    assert any(problem.gold == "$69$,$84$" for problem in split.test)
    assert [problem.tolerance for problem in split.test if problem.tolerance is not None] == [0.1]
    assert sum("unit" in problem.tags for problem in split.test) == 8
    assert sum(problem.tags["answer_type"] == "Tuple" for problem in split.test) == 33


def test_aime_keeps_leading_zeros() -> None:
    golds = [problem.gold for problem in local("aime24", "aime24.jsonl").test]
    assert [gold for gold in golds if gold.startswith("0")] == ["025", "073", "023", "045", "033", "080", "055"]
