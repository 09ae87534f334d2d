"""The command as a user types it, on small runs: which models, what is reused, what the loop says, and refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, compose_small, run_module, run_process

from grpo_lab import checkpoint
from grpo_lab.composition import save_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.evaluation.settings import run_settings
from grpo_lab.evaluation.stage import Job, evaluate_models
from grpo_lab.models import prepare_model

SETTINGS = [
    "schedule.v=2",
    "schedule.updates=4",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "evaluation.every=2",
    "evaluation.n=4",
    "evaluation.k=[1,2,4]",
    "evaluation.temperature=0.9",
    # Two problems at a time.
    "rollout.max_rows=8",
]
BENCHMARK = "arithmetic_plain"


def _train(folder: Path, cache: Path, seed: int) -> Path:
    run_dir = folder / f"seed{seed}"
    run_dir.mkdir()
    config = compose_small([*SETTINGS, f"model.cache_dir={cache}", f"seed={seed}"])
    save_config(config, run_dir / "config.yaml")
    assert run_process(config, run_dir) == 0
    return run_dir


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> list[Path]:
    """Two runs that differ by their seed. Tests copy them."""
    folder = tmp_path_factory.mktemp("runs")
    return [_train(folder, model_cache, seed) for seed in (1, 2)]


@pytest.fixture
def runs(trained: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(run, tmp_path / run.name)) for run in trained]


command = partial(run_module, "grpo_lab.evaluate")


def _evaluate(run_dir: Path, *wanted: str, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """The summary of a run's models, in this process, and what was said."""
    config: TrainConfig = run_settings(run_dir, compose_small([]), [])
    for name, value in changes.items():
        setattr(config.evaluation, name, value)
    said: list[str] = []
    job = Job(
        config=config,
        run_dir=run_dir,
        wanted=wanted,
        root=run_dir / "evaluation",
        base=lambda: prepare_model(config, said.append),
    )
    return evaluate_models(job, said.append), said


def _scores(run_dir: Path, target: str, folder: str = BENCHMARK) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "evaluation" / target / folder / "scores.json").read_text())
    return result


def test_all_checkpoints_and_base_score_as_the_loop_scored_them(runs: list[Path]) -> None:
    run_dir = runs[0]
    summary, _ = _evaluate(run_dir)
    assert [row["target"] for row in summary["rows"]] == ["update_000002", "update_000004"]
    # A later command adds to the summary what an earlier one evaluated.
    summary, _ = _evaluate(run_dir, "base")
    assert [row["target"] for row in summary["rows"]] == ["base", "update_000002", "update_000004"]
    for row in summary["rows"]:
        inside = json.loads((run_dir / f"evaluations/update_{row['update']:06d}.json").read_text())
        assert row["benchmarks"][BENCHMARK]["scores"] == inside["scores"]
        result = _scores(run_dir, row["target"])
        assert result["scores"] == inside["scores"]
        assert [{key: each[key] for key in ("id", "correct", "n")} for each in result["problems"]] == inside["problems"]
    # The weights differ, and so do the responses.
    responses = {
        (run_dir / "evaluation" / row["target"] / BENCHMARK / "responses.jsonl").read_text().partition("\n")[2]
        for row in summary["rows"]
    }
    assert len(responses) == 3

    both = [row["benchmarks"][BENCHMARK]["scores"]["mean@4"] for row in summary["rows"][1:]]
    spread = summary["over_checkpoints"][f"{BENCHMARK}/mean@4"]
    assert spread == {"min": min(both), "max": max(both), "median": sum(both) / 2, "mean": sum(both) / 2}
    split = summary["rows"][0]["split"]
    assert sum(each["problems"] for each in split.values()) == 5
    assert json.loads((run_dir / "evaluation/summary.json").read_text()) == summary


@pytest.mark.parametrize("part", [1, 2, 3])
def test_killed_and_gone_on_with_equals_uninterrupted(part: int, runs: list[Path], tmp_path: Path) -> None:
    whole = runs[0]
    stopped = Path(shutil.copytree(whole, tmp_path / "stopped"))
    expected, _ = _evaluate(whole, "2")
    # Killed while the part-th pair of problems is being sampled.
    probe = (
        "import os, sys; from grpo_lab.rollout.hf import HfEngine; original = HfEngine.generate; calls = []\n"
        "def deadly(*a, **k):\n"
        f"    calls.append(1)\n    if len(calls) == {part}: os._exit(9)\n    return original(*a, **k)\n"
        "HfEngine.generate = deadly\n"
        f"sys.argv = ['evaluate', 'run={stopped}', 'checkpoint=2']\n"
        "from grpo_lab.evaluate import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True).returncode == 9
    path = stopped / "evaluation/update_000002" / BENCHMARK / "responses.jsonl"
    assert len(path.read_text().splitlines()) == 1 + 2 * (part - 1)
    assert not (path.parent / "scores.json").exists()
    again, said = _evaluate(stopped, "2")
    assert again == expected
    assert any(f"{7 - 2 * part} problems in" in line for line in said)
    assert path.read_bytes() == (whole / "evaluation/update_000002" / BENCHMARK / "responses.jsonl").read_bytes()


def test_what_was_answered_is_not_sampled_again_and_other_weights_are(runs: list[Path]) -> None:
    run_dir = runs[0]
    first, _ = _evaluate(run_dir, "2")
    again, said = _evaluate(run_dir, "2", k=[1, 3])
    assert any("all answers were there" in line for line in said)
    assert not any("in the engine" in line for line in said)
    # Other K from the same answers.
    assert set(again["rows"][0]["benchmarks"][BENCHMARK]["interval_95"]) == {"mean@4", "pass@1", "pass@3"}
    assert _scores(run_dir, "update_000002")["seconds"]["problems"] == 5

    # The same update of another run lies there: its answers are not this one's.
    other = runs[1]
    for name in ("model", "manifest.json"):
        source, place = checkpoint.folder_of(other, 2) / name, checkpoint.folder_of(run_dir, 2) / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
    replaced, said = _evaluate(run_dir, "2")
    assert any("5 problems in" in line for line in said)
    folders = sorted(path.name for path in (run_dir / "evaluation/update_000002").iterdir())
    assert folders[0] == BENCHMARK
    assert folders[1].startswith(f"{BENCHMARK}-")
    assert len(replaced["rows"]) == 1
    assert replaced["rows"] != first["rows"]
    # Fewer responses are other answers as well.
    _evaluate(run_dir, "4")
    few, _ = _evaluate(run_dir, "4", n=2, k=[1])
    assert [row["target"] for row in few["rows"]] == ["update_000004"]
    assert len(list((run_dir / "evaluation/update_000004").iterdir())) == 2


def test_damaged_checkpoints_are_skipped_or_refused(runs: list[Path]) -> None:
    run_dir = runs[0]
    weights = checkpoint.folder_of(run_dir, 2) / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    # What only training needs may be gone.
    (checkpoint.folder_of(run_dir, 4) / "learner.pt").unlink()
    summary, said = _evaluate(run_dir)
    assert [row["update"] for row in summary["rows"]] == [4]
    assert any(line.startswith("warning: skipping the damaged checkpoint") for line in said)
    with pytest.raises(ConfigError, match=r"checkpoint=2: .* is damaged: model/model.safetensors is not as it was"):
        _evaluate(run_dir, "2")
    with pytest.raises(ConfigError, match=r"no checkpoint of that update \(there are: 2, 4\)"):
        _evaluate(run_dir, "3")


def test_the_command_on_several_runs_and_on_folders(runs: list[Path], model_cache: Path, tmp_path: Path) -> None:
    done = command(f"run={runs[0].name},{runs[1].name}", "evaluation.n=2", "evaluation.k=[2]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "over 2 runs: mean ± sample deviation" in done.stdout
    (path,) = (tmp_path / "outputs/evaluation").glob("*/summary.json")
    over = json.loads(path.read_text())["over_runs"]
    each = [_scores(run, "update_000004")["scores"]["mean@2"] for run in runs]
    assert over["update_000004"][f"{BENCHMARK}/mean@2"]["mean"] == pytest.approx(sum(each) / 2)
    assert over["update_000004"][f"{BENCHMARK}/mean@2"]["sd"] == pytest.approx(abs(each[0] - each[1]) / 2**0.5)

    # A model by itself, with the settings of the command line: the same answers as in its run, but for the seed.
    folder = checkpoint.folder_of(runs[0], 4)
    settings = [*SMALL, *SETTINGS, f"model.cache_dir={model_cache}", "evaluation.n=2", "evaluation.k=[2]", "seed=1"]
    alone = command(f"checkpoint={folder}", "out=alone", *settings, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    (place,) = (tmp_path / "alone").iterdir()
    assert place.name == f"{runs[0].name}_update_000004"
    mine = runs[0] / "evaluation/update_000004" / BENCHMARK / "responses.jsonl"
    assert (place / BENCHMARK / "responses.jsonl").read_bytes() == mine.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to evaluate: name run=<run folder>, or checkpoint="),
        (["run=nowhere"], "run=nowhere is no run folder: it holds no config.yaml"),
        (["checkpoint=nowhere"], "checkpoint=nowhere is neither an update, nor a folder that exists, nor a hub id"),
        (["checkpoint=."], "checkpoint=. holds no config.json"),
        (["run=seed1", "seed=3"], "seed= cannot be combined with run="),
        (["run=seed1", "dataset=gsm8k"], "dataset= cannot be combined with run="),
        (["run=seed1", "evaluation.benchmarks=[math501]"], "names 'math501', which is not known: choose aime24"),
        (["run=seed1", "evaluation.benchmarks=[math500]"], "knows only the characters of the made task"),
        (["run=seed1", "evaluation.paths.math501=x"], "Key 'math501' is not in struct"),
        (["run=seed1", "evaluation.n=2"], "evaluation.k=[1, 2, 4] must name values from 1 to evaluation.n=2"),
        (["run=seed1", "checkpoint=7"], "has no checkpoint of that update (there are: 2, 4)"),
        (["-m", "run=seed1", "evaluation.n=4,8"], "name several runs as run=A,B"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], said: str, runs: list[Path], tmp_path: Path) -> None:
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    line = done.stderr.splitlines()[0]
    assert line.startswith("error: ")
    assert said in line
    # Nothing was begun. (Hydra makes the folder of a sweep before it asks.)
    assert arguments[:1] == ["-m"] or not (tmp_path / "outputs").exists()


def test_help_says_what_may_be_typed(tmp_path: Path) -> None:
    shown = command("--help", cwd=tmp_path).stdout
    assert "checkpoint=base|<update>|<folder>|<hub id>[@revision]" in shown
    assert list(tmp_path.iterdir()) == []
