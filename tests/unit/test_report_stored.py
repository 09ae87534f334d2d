"""Run folders read back, whole or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_config import run_config
from stored_runs import leave_run

from grpo_lab.config import ConfigError
from grpo_lab.report.stored import Series, Shelf, read_run

CONFIG = run_config("objective=ggpo", "seed=7")


def test_a_run_read_back(tmp_path: Path) -> None:
    columns = {"mismatch/k3": [0.1, 0.2, 0.3], "mismatch/ess_sequence": [None, 0.5, None], "loss": [9.0, 9.0, 9.0]}
    folder = leave_run(tmp_path / "run", CONFIG, columns, {0: [1, 0], 3: [4, 2]}, hours=2.0, dirty=True)
    run = read_run(folder)
    assert (run.updates, run.hours, run.standing.state, run.skipped) == (3, 2.0, "finished", 0)
    assert run.series("mismatch/k3").value.tolist() == [0.1, 0.2, 0.3]
    assert run.series("mismatch/ess_sequence").update.tolist() == [2]
    assert len(run.series("entropy")) == 0
    with pytest.raises(KeyError):
        run.series("loss")
    assert run.evaluations[3].ids == ("p0", "p1")
    assert run.evaluations[3].correct.tolist() == [4, 2]
    assert (run.provenance.commits, run.provenance.dirty) == (("0123456789ab",), True)
    assert (run.config.seed, run.config.objective.name) == (7, "ggpo")


def test_clock_and_numbers_that_are_not_finite(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", CONFIG, {"entropy": [1.0]}, {})
    row = {"kind": "update", "update": 2, "entropy": None, "non_finite": {"entropy": "inf"}, "time": {"learn": 0.25}}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    run = read_run(folder)
    assert run.series("entropy").value.tolist() == [1.0, np.inf]
    assert run.damaged == {"entropy": 1}
    assert run.series("time/learn").value.tolist() == [0.25]


def test_half_a_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", CONFIG, {"entropy": [1.0, 2.0]}, {})
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "update", "upd')
    run = read_run(folder)
    assert (run.updates, run.skipped) == (2, 1)


def test_rows_of_evaluations_are_no_updates(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", CONFIG, {"entropy": [1.0]}, {})
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"kind": "checkpoint", "update": 99, "entropy": 5.0}) + "\n")
    run = read_run(folder)
    assert (run.updates, len(run.series("entropy"))) == (1, 1)


def test_what_cannot_be_read_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder: it holds no config.yaml"):
        read_run(tmp_path)
    folder = leave_run(tmp_path / "run", CONFIG, {"entropy": [1.0, 2.0]}, {4: [1]})
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(["nonsense", *lines]))
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1 is no row of metrics"):
        read_run(folder)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds settings and no logged update"):
        read_run(folder)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "evaluations" / "update_000004.json").write_text('{"update": 4}')
    with pytest.raises(ConfigError, match=r"update_000004.json is no evaluation \(KeyError\('problems'\)"):
        read_run(folder)
    (folder / "evaluations" / "update_000004.json").write_text('{"upd')
    with pytest.raises(ConfigError, match=r"update_000004.json is not JSON"):
        read_run(folder)


def test_a_shelf_reads_each_run_once(tmp_path: Path) -> None:
    folder = leave_run(tmp_path / "run", CONFIG, {"entropy": [1.0]}, {})
    shelf = Shelf()
    assert shelf.read(folder) is shelf.read(tmp_path / "other" / ".." / "run")


def test_within_leaves_the_first_update_out_and_the_last_in() -> None:
    series = Series.of([(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)])
    assert series.within(1, 3).value.tolist() == [2.0, 3.0]
