"""What the command was asked for, with which configuration, on which problems, of which models."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_config import run_config
from tiny import char_tokenizer

from grpo_lab.composition import conf_dir, dataset_config, save_config
from grpo_lab.config import ConfigError, TableConfig, TrainConfig
from grpo_lab.evaluation.benchmarks import held_out_source, load_benchmarks, some_of
from grpo_lab.evaluation.settings import Request, check_request, run_settings, single_process, take_request
from grpo_lab.evaluation.targets import digest_of, other_targets, run_targets, weights_of
from grpo_lab.types import Problem
from grpo_lab.weights import fingerprint

DATA = Path(os.environ.get("GRPO_LAB_TEST_DATA", conf_dir().parent.parent / "shared" / "data"))


# --- the request ---


def test_the_commands_own_words_are_taken_off() -> None:
    words = ["run=[a, b]", "evaluation.n=4", "checkpoint=base,160", "out=x", "--cfg", "job", "hardware=cpu"]
    request, rest = take_request(words)
    assert request == Request(runs=("a", "b"), checkpoints=("base", "160"), out="x")
    assert rest == ["evaluation.n=4", "--cfg", "job", "hardware=cpu"]
    assert take_request(["run=null", "checkpoint=null"])[0] == Request()


@pytest.mark.parametrize(
    ("request_", "overrides", "said"),
    [
        (Request(), [], "nothing to evaluate"),
        (Request(checkpoints=("m",)), ["resume=x"], "resume= is of training"),
        (Request(runs=("a", "b"), out="x"), [], "out= is the folder of one"),
        (Request(runs=("a",)), ["rollout.temperature=1"], "rollout.temperature= cannot be combined with run="),
        (Request(runs=("a",)), ["evaluation=default"], "evaluation= cannot be combined with run="),
    ],
)
def test_what_makes_no_sense_is_refused(request_: Request, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_request(request_, overrides)


def test_what_a_run_lets_go_of() -> None:
    check_request(
        Request(runs=("a",)), ["evaluation.n=3", "hardware=1gpu", "rollout.vllm.eager=true", "verifier.workers=1"]
    )
    check_request(Request(checkpoints=("m",)), ["seed=3", "dataset=gsm8k"])


def test_a_row_is_of_one_model() -> None:
    request, _ = take_request(["run=a", "checkpoint=160", "row=x.json"])
    assert request.row == "x.json"
    check_request(request, [])
    with pytest.raises(ConfigError, match=r"row=x,y must be one file"):
        take_request(["row=x,y"])
    for words in (["run=a"], ["run=a", "checkpoint=1,2"], ["run=a,b", "checkpoint=1"], ["checkpoint=1"]):
        with pytest.raises(ConfigError, match=r"row=x takes the scores of one model: name one run= and one"):
            check_request(take_request([*words, "row=x"])[0], [])


# --- the configuration ---


def _run(tmp_path: Path, *overrides: str) -> Path:
    save_config(run_config(*overrides), tmp_path / "config.yaml")
    return tmp_path


def test_a_run_keeps_its_settings_but_for_what_was_typed(tmp_path: Path) -> None:
    run_dir = _run(tmp_path, "seed=7", "rollout.temperature=0.7", "evaluation.n=16", "evaluation.every=null")
    typed = ["evaluation.k=[1,2]", "verifier.workers=5", "rollout.vllm.eager=false", "evaluation.paths.math500=m.jsonl"]
    config = run_settings(run_dir, run_config(*typed), typed)
    assert (config.seed, config.rollout.temperature, config.evaluation.n) == (7, 0.7, 16)
    assert (config.evaluation.k, config.verifier.workers, config.rollout.vllm.eager) == ([1, 2], 5, False)
    assert config.evaluation.paths["math500"] == "m.jsonl"


def test_a_hardware_preset_brings_what_it_sets(tmp_path: Path) -> None:
    run_dir = _run(tmp_path, "hardware=8gpu_server", "seed=7")
    config = run_settings(run_dir, run_config("hardware=cpu"), ["hardware=cpu"])
    plain = run_config("hardware=cpu")
    assert config.hardware == plain.hardware
    assert config.rollout.vllm == plain.rollout.vllm
    assert (config.rollout.engine, config.learner.precision, config.seed) == ("hf", "fp32", 7)


@pytest.mark.parametrize(
    "hardware", sorted(path.stem for path in (conf_dir() / "hardware").glob("*.yaml") if path.stem != "slurm")
)
def test_every_preset_can_be_evaluated_on_one_process(hardware: str) -> None:
    config = single_process(run_config(f"hardware={hardware}"))
    assert (config.hardware.ranks, config.hardware.nodes) == (1, 1)
    assert not (config.rollout.vllm.mode == "in_process" and config.rollout.vllm.tensor_parallel > 1)


def test_an_evaluation_hands_nothing_over() -> None:
    """What the hand-off needs, its run has; the process that evaluates may be elsewhere, on the GPU that is named."""
    settings = ("hardware=8gpu_server", "hardware.ranks=6", "evaluation.checkpoints=true", "checkpoint.every=1")
    run = run_config(*settings, "evaluation.hand_off=background", "evaluation.device=cuda:7")
    run.hardware.device = "cuda:7"
    assert not single_process(run).evaluation.checkpoints


def test_the_rules_of_evaluation_hold_where_the_run_did_not_evaluate() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.k=\[1, 4, 8\] must name values from 1 to evaluation\.n=4"):
        single_process(run_config("evaluation.every=null", "evaluation.n=4"))
    with pytest.raises(ConfigError, match=r"evaluation\.benchmarks names 'gsm9k', which is not known"):
        single_process(run_config("evaluation.benchmarks=[gsm9k]"))
    with pytest.raises(ConfigError, match=r"evaluation\.benchmarks=\['aime24', 'aime24'\] names one twice"):
        single_process(run_config("evaluation.benchmarks=[aime24,aime24]"))


# --- benchmarks ---


def _file(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _model(*overrides: str) -> TrainConfig:
    config = run_config(*overrides)
    config.model.path = "elsewhere"
    return config


def test_a_named_benchmark_has_every_problem_and_its_own_prompt(tmp_path: Path) -> None:
    rows = [{"question": f"{k} apples", "answer": f"so\n#### {k}"} for k in range(4)]
    config = _model("evaluation.benchmarks=[gsm8k]", "evaluation.problems=2", "rollout.max_prompt_tokens=3")
    config.evaluation.paths["gsm8k"] = _file(tmp_path, rows)
    (benchmark,) = load_benchmarks(config, char_tokenizer(), limit_all=False)
    assert [prompt.problem.gold for prompt in benchmark.prompts] == ["0", "1", "2", "3"]
    assert benchmark.prompts[1].text == "1 apples\n\nGive the final answer in \\boxed{}."
    assert (benchmark.found, benchmark.expected) == (4, 1319)
    # The local file is the test file: its published count is the test split's.
    assert benchmark.warnings == ["gsm8k: rows: 4 found, 1319 published; the source differs from the one described"]
    (limited,) = load_benchmarks(config, char_tokenizer(), limit_all=True)
    assert (len(limited.prompts), limited.found) == (2, 4)


def test_the_runs_own_problems_are_those_of_its_evaluations() -> None:
    config = run_config("dataset.train_problems=50", "dataset.test_problems=8", "evaluation.problems=3")
    (own,) = load_benchmarks(config, char_tokenizer(), limit_all=False)
    assert (own.name, len(own.prompts), own.found, own.expected) == ("arithmetic", 3, 8, 8)
    config.rollout.max_prompt_tokens = 7
    with pytest.raises(ConfigError, match="drops all 3 prompts"):
        load_benchmarks(config, char_tokenizer(), limit_all=False)


def test_where_held_out_problems_come_from() -> None:
    gsm8k = dataset_config("gsm8k")
    assert isinstance(gsm8k, TableConfig)
    hub = held_out_source(gsm8k, None)
    assert isinstance(hub, TableConfig)
    assert (hub.split, hub.test_split, hub.held_out, hub.expected_rows, hub.path) == ("test", None, 1.0, 1319, None)
    beside = held_out_source(replace(gsm8k, path="train.jsonl", test_path="test.jsonl"), None)
    assert isinstance(beside, TableConfig)
    assert (beside.path, beside.test_path, beside.held_out) == ("test.jsonl", None, 1.0)
    # A local copy with nothing beside it holds out a share.
    share = replace(gsm8k, path="all.jsonl", held_out=0.2)
    assert held_out_source(share, None) == share
    # A mixture's are another file's, posed as the mixture poses its own.
    mixture = replace(dataset_config("alp_math"), template="{question}!", test_path="math500.jsonl")  # type: ignore[call-arg]
    table = held_out_source(mixture, None)
    assert isinstance(table, TableConfig)
    assert (table.name, table.path, table.template, table.expected_rows) == (
        "math500",
        "math500.jsonl",
        "{question}!",
        500,
    )
    with pytest.raises(ConfigError, match=r"evaluation\.paths\.arithmetic has no effect"):
        held_out_source(dataset_config("arithmetic"), "x.jsonl")


def test_a_missing_file_and_a_model_that_cannot_read_are_named(tmp_path: Path) -> None:
    config = _model("evaluation.benchmarks=[aime24]")
    config.evaluation.paths["aime24"] = str(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match=r"benchmark aime24 cannot be loaded; evaluation\.paths\.aime24=FILE reads a"):
        load_benchmarks(config, char_tokenizer(), limit_all=False)
    config.model.path = None
    with pytest.raises(ConfigError, match="model=tiny knows only the characters of the made task, not those of aime24"):
        load_benchmarks(config, char_tokenizer(), limit_all=False)


def test_some_of_the_problems_are_the_same_whatever_their_order() -> None:
    problems = [Problem(id=str(k), question=str(k), gold="1") for k in range(20)]
    some = some_of(problems, 5)
    assert some == some_of(problems[::-1], 5)
    assert some == some_of(problems, 9)[:5]
    assert some_of(problems, None) == some_of(problems, 20) == problems


@pytest.mark.parametrize(
    ("name", "file", "found", "expected"),
    [
        ("gsm8k", "gsm8k_test.jsonl", 1319, 1319),
        ("math500", "math500.jsonl", 500, 500),
        ("aime24", "aime24.jsonl", 30, 30),
        ("aime25", "aime25.jsonl", 30, 30),
        ("olympiadbench", "olympiadbench.jsonl", 675, 674),
        ("minerva", "minerva_math.jsonl", 272, 272),
    ],
)
def test_the_published_files(name: str, file: str, found: int, expected: int) -> None:
    if not (DATA / file).is_file():
        pytest.skip(f"{file} is not there: set GRPO_LAB_TEST_DATA to the folder of published files")
    config = _model(f"evaluation.benchmarks=[{name}]")
    config.evaluation.paths[name] = str(DATA / file)
    (benchmark,) = load_benchmarks(config, char_tokenizer(), limit_all=False)
    assert (benchmark.found, benchmark.expected, len(benchmark.prompts)) == (found, expected, found)
    assert (benchmark.warnings == []) is (found == expected)


# --- models ---


def _nothing() -> str:
    raise AssertionError("base was not asked for")


def test_models_by_themselves(model_folder: Path, tmp_path: Path) -> None:
    (by_folder,) = other_targets([str(model_folder)], _nothing)
    assert (by_folder.update, by_folder.folder, by_folder.name) == (None, model_folder, model_folder.name)
    (base,) = other_targets(["base"], lambda: str(model_folder))
    assert (base.name, base.update, base.folder) == ("base", 0, model_folder)
    held = tmp_path / "run" / "checkpoints" / "update_000008"
    held.mkdir(parents=True)
    (held / "model").symlink_to(model_folder)
    (inside,) = other_targets([str(held)], _nothing)
    assert inside.folder == held / "model"
    with pytest.raises(ConfigError, match=r"no/such cannot be had from the hub .*: check the id and the network"):
        other_targets(["no/such"], _nothing)
    with pytest.raises(ConfigError, match="has no checkpoint: train with checkpoint"):
        run_targets(tmp_path, [], _nothing, print)


def test_two_models_of_one_name_are_refused_and_one_named_twice_is_one(model_folder: Path, tmp_path: Path) -> None:
    assert len(other_targets([str(model_folder), str(model_folder)], _nothing)) == 1
    copy = tmp_path / "c" / model_folder.name
    shutil.copytree(model_folder, copy)
    with pytest.raises(ConfigError, match=rf"both would be called {model_folder.name} in results"):
        other_targets([str(model_folder), str(copy)], _nothing)


def test_a_models_digest_is_of_its_contents(model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "README.md").write_text("says nothing")
    digest = digest_of(copy)
    assert digest == digest_of(model_folder)
    tokenizer = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(tokenizer + " ")
    other = digest_of(copy)
    (copy / "tokenizer.json").write_text(tokenizer)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert len({digest, other, digest_of(copy)}) == 3
    weights.unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        digest_of(copy)


def test_weights_come_under_all_their_names(model: Any, model_folder: Path) -> None:
    named = model.named_parameters(remove_duplicate=False)
    read = dict(weights_of(model_folder, next(model.parameters()).dtype))
    assert "lm_head.weight" in read
    assert fingerprint(read.items()) == fingerprint(named)
