"""Which folder a run has, who may write settings into it, and what a resumed run may change."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_config import run_config

from grpo_lab import ledger, train
from grpo_lab.composition import load_config, save_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import HELD_VARIABLE
from grpo_lab.ledger import BusyError, claimed
from grpo_lab.runs import CONFIG_FILE, choose_folder, last_update, settle


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CLAIM_SECONDS", 0.05)


def log(run_dir: Path, *updates: int) -> None:
    rows = "".join(json.dumps({"kind": "update", "update": each}) + "\n" for each in updates)
    (run_dir / "metrics.jsonl").write_text(rows)


def begun(run_dir: Path, *overrides: str) -> TrainConfig:
    run_dir.mkdir()
    config = run_config(*overrides)
    save_config(config, run_dir / CONFIG_FILE)
    return config


def test_a_second_start_leaves_the_settings_of_one_that_has_logged_nothing_yet(tmp_path: Path) -> None:
    first = begun(tmp_path / "run", "seed=1")
    second = run_config("seed=2", f"run_dir={tmp_path / 'run'}")
    with claimed(tmp_path / "run"), pytest.raises(BusyError, match="in use by another process"):
        train._start(second, [])
    assert load_config(tmp_path / "run" / CONFIG_FILE) == first


def test_a_longer_budget_for_a_run_that_is_under_way_changes_nothing(tmp_path: Path) -> None:
    first = begun(tmp_path / "run", "schedule.updates=50", "evaluation.every=10")
    log(tmp_path / "run", 1, 2)
    longer = run_config(f"resume={tmp_path / 'run'}", "schedule.updates=90")
    with claimed(tmp_path / "run"), pytest.raises(BusyError):
        train._start(longer, [f"resume={tmp_path / 'run'}", "schedule.updates=90"])
    assert load_config(tmp_path / "run" / CONFIG_FILE) == first


def test_a_job_of_a_sweep_leaves_a_run_that_begins_elsewhere_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begun(tmp_path / "run", "seed=1")
    started: list[Path] = []
    monkeypatch.setattr(train, "_child", started.append)
    with claimed(tmp_path / "run"):
        train._run_in_child(run_config("seed=2"), tmp_path / "run", [])
    assert load_config(tmp_path / "run" / CONFIG_FILE) == first
    assert started == []
    assert "run: running, at update 0, left as it is" in capsys.readouterr().out


def test_ranks_of_our_own_do_not_claim_what_is_held_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path / "run")
    config = run_config(f"resume={tmp_path / 'run'}")
    with claimed(tmp_path / "run"):
        monkeypatch.setitem(os.environ, HELD_VARIABLE, "1")
        with train._opened(config, []) as (_, run_dir):
            assert run_dir == tmp_path / "run"
        monkeypatch.delitem(os.environ, HELD_VARIABLE)
        with pytest.raises(BusyError), train._opened(config, []):
            pass


def test_a_folder_that_holds_a_run_is_not_begun_in(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    log(tmp_path / "run", 1)
    config = run_config(f"run_dir={tmp_path / 'run'}")
    folder = choose_folder(config, [])
    with pytest.raises(ConfigError, match="holds a run already: continue it with resume="):
        settle(config, [], folder)


def test_a_budget_below_what_is_logged_is_refused(tmp_path: Path) -> None:
    begun(tmp_path / "run", "schedule.updates=90", "evaluation.every=10")
    log(tmp_path / "run", 1, 79, 80)
    words = [f"resume={tmp_path / 'run'}", "schedule.updates=60"]
    with pytest.raises(ConfigError, match=r"schedule\.updates=60 is less than the 80 that the run has logged"):
        settle(run_config(*words), words, tmp_path / "run")
    assert load_config(tmp_path / "run" / CONFIG_FILE).schedule.updates == 90
    words[1] = "schedule.updates=80"
    assert settle(run_config(*words), words, tmp_path / "run").schedule.updates == 80


def test_the_row_of_an_evaluated_checkpoint_says_nothing_of_where_a_run_is(tmp_path: Path) -> None:
    log(tmp_path, 299, 300)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "checkpoint", "update": 160}) + "\n")
    assert last_update(tmp_path) == 300
