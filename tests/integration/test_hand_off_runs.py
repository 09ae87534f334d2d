"""Checkpoints evaluated by the real command while a run trains: what is logged, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, compose_small, rows, run_module, run_process

from grpo_lab import checkpoint
from grpo_lab.composition import save_config
from grpo_lab.config import TrainConfig

SETTINGS = [
    "schedule.v=2",
    "schedule.updates=4",
    "checkpoint.every=2",
    "checkpoint.keep=1",
    "evaluation.every=2",
    "evaluation.n=4",
    "evaluation.k=[1,2,4]",
    "evaluation.temperature=0.9",
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Path:
    """The same run without a hand-off."""
    run_dir = tmp_path_factory.mktemp("plain")
    assert run_process(_config(run_dir, model_cache, "evaluation.checkpoints=false"), run_dir) == 0
    return run_dir


def _config(run_dir: Path, cache: Path, *overrides: str) -> TrainConfig:
    config = compose_small([*SETTINGS, f"model.cache_dir={cache}", "evaluation.checkpoints=true", *overrides])
    run_dir.mkdir(exist_ok=True)
    save_config(config, run_dir / "config.yaml")
    return config


def _of_checkpoints(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir) if row["kind"] == "checkpoint"]


def _assert_evaluated(run_dir: Path, plain: Path) -> None:
    """Training is the same to the last digit, and each checkpoint scores as the evaluation inside the loop."""
    assert [row for row in rows(run_dir) if row["kind"] != "checkpoint"] == rows(plain)
    inside = {row["update"]: row for row in rows(plain) if row["kind"] == "evaluation"}
    expected = [
        {
            "kind": "checkpoint",
            "update": update,
            **{f"arithmetic_plain/{name}": value for name, value in inside[update].items() if name not in ABOUT},
        }
        for update in (2, 4)
    ]
    assert sorted(_of_checkpoints(run_dir), key=lambda row: row["update"]) == expected
    assert list(checkpoint.saved(run_dir)) == [4]
    over = json.loads((run_dir / "summary.json").read_text())["checkpoints"]
    assert over["updates"] == [2, 4]
    two, four = (inside[update]["pass@2"] for update in (2, 4))
    assert over["over"]["arithmetic_plain/pass@2"] == {
        "min": min(two, four),
        "max": max(two, four),
        "median": (two + four) / 2,
        "mean": (two + four) / 2,
    }


ABOUT = ("kind", "update")


def test_inline_each_row_follows_its_checkpoint(plain: Path, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_process(_config(run_dir, model_cache), run_dir) == 0
    _assert_evaluated(run_dir, plain)
    kinds = [(row["kind"], row["update"]) for row in rows(run_dir)]
    assert kinds[3:6] == [("evaluation", 2), ("checkpoint", 2), ("update", 3)]
    # Nothing but the evaluations took their time.
    seconds = json.loads((run_dir / "summary.json").read_text())["seconds"]
    assert seconds["evaluate"] > seconds["learn"]


def test_killed_with_an_evaluation_open_and_resumed(plain: Path, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = _config(run_dir, model_cache, "evaluation.hand_off=background")
    point = ("grpo_lab.learner.torch_local", "TorchLearner.step", 4)
    assert run_process(config, run_dir, kill_at=point) == -9
    assert _of_checkpoints(run_dir) == []
    # Both what was being evaluated and what was saved since are there.
    assert list(checkpoint.saved(run_dir)) == [2]
    assert run_process(config, run_dir, resuming=True) == 0
    _assert_evaluated(run_dir, plain)
    # Once more: there is nothing left to do.
    before = rows(run_dir)
    assert run_process(config, run_dir, resuming=True) == 0
    assert rows(run_dir) == before


@pytest.mark.slow
def test_stopped_while_the_end_waits(plain: Path, model_cache: Path, tmp_path: Path) -> None:
    """The commands as a user types them."""
    words = [*SMALL, *SETTINGS, f"model.cache_dir={model_cache}", "run_dir=run"]
    words += ["evaluation.checkpoints=true", "evaluation.hand_off=background", "tracking.view=plain"]
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_lab.train", *words],
        cwd=tmp_path,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run_dir = tmp_path / "run"
    log, deadline = run_dir / "run.log", time.monotonic() + 100
    while not (log.exists() and "waiting for the evaluation" in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline  # noqa: PT018
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "next: python -m grpo_lab.train resume=run" in said
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    done = run_module("grpo_lab.train", "resume=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "over 2 checkpoints" in done.stdout
    _assert_evaluated(run_dir, plain)
