"""A table's runs as `make` starts them: finished ones stay, half-done ones go on, failed ones are tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import SMALL, rows, run_process

from grpo_lab.composition import save_config
from grpo_lab.config import ConfigError
from grpo_lab.ledger import FAILURE_FILE, claimed, standing
from grpo_lab.tables.cells import Run, runs_of
from grpo_lab.tables.definition import load_definition
from grpo_lab.tables.pools import missing_pools, record
from grpo_lab.train import failure_of

# Two cells that differ in their objective alone.
TARGET = "gg-fig10"
# What the cells set, or small runs leave to their experiment.
WORDS = [*SMALL, "schedule.v=2", "schedule.updates=4", "checkpoint.every=1", "evaluation.k=[1]", "evaluation.n=2"]


@pytest.fixture
def words(model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*WORDS, f"model.cache_dir={model_cache}"]


def tables(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo_lab.tables", TARGET, *words]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=250, env=dict(os.environ))


def runs(words: list[str]) -> list[Run]:
    return runs_of(load_definition(TARGET), "tiny", words)


def states(found: list[Run]) -> list[str]:
    return [standing(run.folder).state for run in found]


def written(found: list[Run]) -> list[int]:
    return [(run.folder / "metrics.jsonl").stat().st_mtime_ns for run in found]


def test_missing_runs_are_run_once_and_another_setting_is_another_run(words: list[str]) -> None:
    cells = runs(words)
    assert states(cells) == ["missing", "missing"]
    dry = tables("dry=true", *words)
    assert dry.returncode == 0
    assert dry.stdout.count("missing") == 2
    assert not Path("outputs").exists()

    done = tables(*words)
    assert done.returncode == 0, done.stderr
    assert states(cells) == ["finished", "finished"]
    assert [[row["update"] for row in rows(run.folder)] for run in cells] == [[1, 2, 3, 4]] * 2

    before = written(cells)
    again = tables(*words)
    assert again.returncode == 0
    assert again.stdout.count("finished") >= 2
    assert written(cells) == before

    # What only says where and how a run is made is no other run; a rate is.
    assert states(runs([*words, "hardware.threads=2", "learner.micro_batch_tokens=128"])) == ["finished", "finished"]
    assert states(runs([*words, "learner.weight_decay=0.02"])) == ["missing", "missing"]


def test_a_half_done_run_goes_on_where_it_was_killed(words: list[str]) -> None:
    half, _ = cells = runs(words)
    half.folder.mkdir(parents=True)
    save_config(half.config, half.folder / "config.yaml")
    assert run_process(half.config, half.folder, kill_at=("grpo_lab.loop", "Loop._save", 3)) == -9
    assert states(cells) == ["half done", "missing"]
    assert str(standing(half.folder)) == "half done, at update 3"

    done = tables(*words)
    assert done.returncode == 0, done.stderr
    assert states(cells) == ["finished", "finished"]
    assert [row["update"] for row in rows(half.folder)] == [1, 2, 3, 4]
    assert "resumed from" in (half.folder / "run.log").read_text()


def test_failures_are_told_at_the_end_and_tried_again(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cells = runs(words)
    failed = tables(*words, f"model.cache_dir={tmp_path}/file/models")
    assert failed.returncode == 1
    assert states(cells) == ["failed", "failed"]
    said = " ".join(failed.stdout.partition("did not finish")[2].split())
    assert said.count("failed at update 0: ") == 2
    assert "Not a directory" in (cells[0].folder / FAILURE_FILE).read_text()

    done = tables(*words)
    assert done.returncode == 0, done.stderr
    assert states(cells) == ["finished", "finished"]
    assert not (cells[0].folder / FAILURE_FILE).exists()


def test_a_run_that_another_process_holds_is_left_to_it(words: list[str]) -> None:
    held, _ = cells = runs(words)
    held.folder.mkdir(parents=True)
    with claimed(held.folder):
        assert states(cells) == ["running", "missing"]
        done = tables(*words)
    assert done.returncode == 0, done.stderr
    assert states(cells) == ["missing", "finished"]
    assert not (held.folder / "metrics.jsonl").exists()


def test_two_runs_side_by_side(words: list[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    done = tables(*words, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert done.returncode == 0, done.stderr
    assert states(runs(words)) == ["finished", "finished"]


def test_a_sweep_of_ones_own_goes_on_in_its_folder(words: list[str]) -> None:
    command = [sys.executable, "-m", "grpo_lab.train", "-m", f"experiment={TARGET.replace('-', '/')}", *words]
    command += ["seed=1,2", "hydra.sweep.dir=mine"]
    for _ in range(2):
        done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=250)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished, left as it is") == 2
    changed = subprocess.run([*command, "learner.lr=1"], text=True, capture_output=True, check=False, timeout=250)
    assert changed.returncode == 2
    assert "holds another run already" in changed.stderr
    summary = json.loads(Path("mine/0_ggpo_v2_i1_seed1/summary.json").read_text())
    assert summary["updates"] == 4


def test_an_offline_run_learns_from_the_pool_that_its_table_records(words: list[str]) -> None:
    first, *_ = runs_of(load_definition("gg-table5"), "tiny", words)
    assert first.pool is not None
    missing = missing_pools([first.pool, first.pool])
    assert missing == [first.pool]
    record(missing)
    (pool,) = Path("outputs/papers/tiny/pools").iterdir()
    assert {path.suffix for path in pool.iterdir()} == {".json", ".parquet"}
    assert missing_pools([first.pool]) == []

    first.folder.mkdir(parents=True)
    save_config(first.config, first.folder / "config.yaml")
    assert run_process(first.config, first.folder) == 0
    assert standing(first.folder).state == "finished"
    assert rows(first.folder)[-1]["pool/left"] == 0


def test_a_pool_that_cannot_be_recorded_stops_its_table(words: list[str]) -> None:
    first, *_ = runs_of(load_definition("gg-table5"), "tiny", words)
    assert first.pool is not None
    broken = replace(first.pool, words=(*first.pool.words, "dataset.operands=99"))
    with pytest.raises(ConfigError, match="could not be recorded: mend what is said above"):
        record([broken])
    assert not first.pool.folder.exists()


def test_a_cluster_is_not_sampled_for_on_the_machine_that_submits(words: list[str]) -> None:
    command = [sys.executable, "-m", "grpo_lab.tables", "gg-table5", "hydra/launcher=submitit_slurm", *words]
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=250, env=dict(os.environ))
    assert done.returncode == 2
    assert done.stderr.count("python -m grpo_lab.pool out=outputs/papers/tiny/pools/seed") == 3
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("code", "why"),
    [(130, None), (-2, None), (-15, None), (-9, "killed by signal 9"), (2, "ended with exit code 2")],
)
def test_a_stop_is_no_failure(code: int, why: str | None) -> None:
    assert failure_of(code) == why
