"""Where a run stands, by what its folder holds, and who may train in it."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from grpo_lab import ledger
from grpo_lab.ledger import BusyError, Standing, claimed, failures_recorded, is_claimed, standing


def leave(run_dir: Path, *updates: int, status: str | None = None, half_a_line: bool = False) -> None:
    lines = "".join(json.dumps({"kind": "update", "update": u}) + "\n" for u in updates)
    (run_dir / "metrics.jsonl").write_text(lines + ('{"kind": "upda' if half_a_line else ""))
    if status is not None:
        (run_dir / "summary.json").write_text(json.dumps({"status": status, "updates": updates[-1]}))


def test_missing_until_something_is_logged(tmp_path: Path) -> None:
    assert standing(tmp_path / "none") == Standing("missing")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").touch()
    assert standing(tmp_path) == Standing("missing")


def test_half_done_is_what_was_killed_or_interrupted(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2, 3, half_a_line=True)
    assert standing(tmp_path) == Standing("half done", 3)
    for status in ("running", "interrupted"):
        leave(tmp_path, 1, 2, 3, 4, status=status)
        assert str(standing(tmp_path)) == "half done, at update 4"


def test_finished_whatever_came_before(tmp_path: Path) -> None:
    leave(tmp_path, 1, 2, status="finished")
    (tmp_path / "failure.txt").write_text("an earlier attempt\n")
    assert standing(tmp_path) == Standing("finished", 2)


def test_failures_keep_their_first_line_until_the_next_attempt(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="first"), failures_recorded(tmp_path):
        raise ValueError("the first line\nand a second")
    assert str(standing(tmp_path)) == "failed at update 0: the first line"
    with pytest.raises(KeyError), failures_recorded(tmp_path):
        raise KeyError
    assert standing(tmp_path).why == "KeyError"
    with failures_recorded(tmp_path):
        assert standing(tmp_path) == Standing("missing")
    with pytest.raises(KeyboardInterrupt), failures_recorded(tmp_path):
        raise KeyboardInterrupt
    assert standing(tmp_path).state != "failed"


def _hold(run_dir: Path, ready: Any, end: Any) -> None:
    with claimed(run_dir):
        ready.set()
        end.wait(60)


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CLAIM_SECONDS", 0.05)
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, end))
    other.start()
    assert ready.wait(60)
    leave(tmp_path, 1, 2)
    assert is_claimed(tmp_path)
    assert str(standing(tmp_path)) == "running, at update 2"
    with pytest.raises(BusyError, match="is in use by another process"), claimed(tmp_path):
        pass
    # Freed however the process ends.
    other.kill()
    other.join()
    assert not is_claimed(tmp_path)
    with claimed(tmp_path):
        pass


def test_a_folder_is_cleared_of_what_the_run_has_logged_and_of_nothing_else(tmp_path: Path) -> None:
    leave(tmp_path, 1, status="failed")
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    for folder in ("rollouts", "wandb", "thesis"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    ledger.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "notes.txt", "thesis"]
