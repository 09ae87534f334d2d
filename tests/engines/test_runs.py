"""Whole runs with the real engines, started as a user starts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, rows

pytest.importorskip("vllm", reason="install the engines: make engines")
pytest.importorskip("deepspeed", reason="install the engines: make engines")

# A collection every two updates, a reference refresh inside the second one.
RUN = ["schedule.v=2", "schedule.updates=6", "schedule.t_ref=3", "objective=ggpo", "learner.micro_batch_tokens=64"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]


def start(
    arguments: Sequence[str], model_cache: Path, cwd: Path, launcher: Sequence[str] = ()
) -> subprocess.Popen[str]:
    # A resumed run takes its settings from its folder. Options come last, as Hydra wants them.
    resumes = any(each.startswith("resume=") for each in arguments)
    settings = [] if resumes else [*SMALL, f"model.cache_dir={model_cache}"]
    return subprocess.Popen(
        [*launcher, sys.executable, "-m", "grpo_lab.train", *settings, *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(
    arguments: Sequence[str], model_cache: Path, cwd: Path, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    process = start(arguments, model_cache, cwd, launcher)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(arguments: Sequence[str], model_cache: Path, cwd: Path, launcher: Sequence[str] = ()) -> None:
    done = run(arguments, model_cache, cwd, launcher)
    assert done.returncode == 0, done.stderr[-3000:]


def updates(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir) if row["kind"] == "update"]


def assert_close(run_dir: Path, other: Path) -> None:
    """Two runs' updates, by all that rounding alone may change."""
    for row, expected in zip(updates(run_dir), updates(other), strict=True):
        for key in ("loss", "reward/retained", "entropy", "grad_norm", "response/length", "sample_age", "total/tokens"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (row["update"], key)
        assert ("sync/drift" in row) == ("sync/drift" in expected)
        assert row.get("sync/drift", 0) < 1e-5


@pytest.fixture(scope="module")
def one_rank(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that others are compared with: plain torch, one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    finish([*RUN, f"run_dir={run_dir}"], model_cache, run_dir.parent)
    return run_dir


@pytest.fixture(scope="module")
def two_ranks(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same over two ranks that the command starts itself, with checkpoints."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    finish(["hardware=cpu_2rank", *RUN, "checkpoint.every=3", f"run_dir={run_dir}"], model_cache, run_dir.parent)
    return run_dir


def test_two_ranks_train_as_one_does(one_rank: Path, two_ranks: Path) -> None:
    assert_close(two_ranks, one_rank)
    assert json.loads((two_ranks / "summary.json").read_text())["updates"] == 6
    # What was typed, and not what the ranks were started with.
    (session,) = json.loads((two_ranks / "provenance.json").read_text())["sessions"]
    assert "hardware=cpu_2rank" in session["command"]


def test_an_evaluation_inside_a_sync_period_leaves_each_engine_its_weights(model_cache: Path, tmp_path: Path) -> None:
    """A period of two collections: after an evaluation the second is sampled by the weights of their sync."""
    period = ["schedule.v=2", "schedule.minibatches_per_collection=1", "schedule.updates=4", "objective=ggpo"]
    period += ["evaluation.every=1", "checkpoint.every=null"]
    finish([*period, "run_dir=one"], model_cache, tmp_path)
    finish(["hardware=cpu_2rank", *period, "run_dir=two"], model_cache, tmp_path)
    assert_close(tmp_path / "two", tmp_path / "one")
    assert [row["sample_age"] for row in updates(tmp_path / "two")] == [0, 1, 0, 1]


def test_torchrun_ranks_join(one_rank: Path, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = ["hardware=cpu_2rank", "learner.zero_stage=3", *RUN, f"run_dir={run_dir}"]
    finish(overrides, model_cache, tmp_path, TORCHRUN)
    assert_close(run_dir, one_rank)


def test_a_launcher_with_another_number_of_ranks_is_refused(model_cache: Path, tmp_path: Path) -> None:
    done = run(["hardware=cpu_2rank", "hardware.ranks=3", f"run_dir={tmp_path / 'r'}"], model_cache, tmp_path, TORCHRUN)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert said == ["error: the launcher started 2 ranks and hardware.ranks=3: set hardware.ranks=2, or start as many"]


def test_a_sweep_under_a_launcher_is_refused(model_cache: Path, tmp_path: Path) -> None:
    done = run(["hardware=cpu_2rank", "seed=1,2", "hydra.sweep.dir=sweep", "-m"], model_cache, tmp_path, TORCHRUN)
    assert done.returncode != 0
    assert "error: a sweep starts the ranks of its jobs itself: run -m without torchrun or srun" in done.stderr
    assert not list((tmp_path / "sweep").glob("*/metrics.jsonl"))


def test_an_error_on_two_ranks_is_one_line(model_cache: Path, tmp_path: Path) -> None:
    done = run(["hardware=cpu_2rank", "model.path=nowhere"], model_cache, tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: model.path=nowhere holds no config.json: it must be a Hugging Face model folder"
    )


def test_two_ranks_killed_and_resumed_were_never_killed(two_ranks: Path, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = ["hardware=cpu_2rank", *RUN, "checkpoint.every=3", f"run_dir={run_dir}"]
    process = start(overrides, model_cache, tmp_path)
    wait_for(run_dir / "checkpoints/update_000003/manifest.json", process)
    rank = next(pid for pid in descendants(process.pid) if b"LOCAL_RANK=1" in environment_of(pid))
    os.kill(rank, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: rank 1 was killed by signal 9; out of memory? go on from the last checkpoint with resume=" in err
    assert descendants(process.pid) == []
    finish([f"resume={run_dir}"], model_cache, tmp_path)
    assert updates(run_dir) == updates(two_ranks)


@pytest.mark.parametrize("moment", ["metrics.jsonl", "rollouts/update_000004.txt"], ids=["starting", "training"])
def test_an_interrupted_run_ends_tidily_on_all_ranks(moment: str, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(["hardware=cpu_2rank", "schedule.updates=4000", f"run_dir={run_dir}"], model_cache, tmp_path)
    wait_for(run_dir / moment, process)
    ranks = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_run_goes_on_over_another_number_of_ranks(two_ranks: Path, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finish(
        ["hardware=cpu_2rank", *RUN, "schedule.updates=3", "checkpoint.every=3", f"run_dir={run_dir}"],
        model_cache,
        tmp_path,
    )
    finish([f"resume={run_dir}", "schedule.updates=6", "hardware.ranks=1"], model_cache, tmp_path)
    assert_close(run_dir, two_ranks)


VLLM = {
    "a worker": ["hardware=cpu_vllm"],
    "a worker beside two ranks": ["hardware=cpu_vllm_2rank"],
    # What a preset of eight GPUs does, with two ranks on a CPU.
    "both ranks, in process, tensor parallel": [
        "hardware=cpu_vllm_2rank",
        "learner.zero_stage=3",
        "rollout.vllm.mode=in_process",
        "rollout.vllm.tensor_parallel=2",
        "model.recipe.heads=2",
    ],
}


@pytest.mark.parametrize("where", VLLM)
def test_vllm_samples_for_each_learner(where: str, model_cache: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start([*RUN, *VLLM[where], f"run_dir={run_dir}"], model_cache, tmp_path)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, ""), err[-3000:]
    log = updates(run_dir)
    synced = [row["sync/drift"] for row in log if "sync/drift" in row]
    assert len(synced) == 3
    assert max(synced) < 1e-5
    assert [row["sample_age"] for row in log] == [0, 1, 0, 1, 0, 1]
    # Off policy from the second update on: the sampler really is the older policy.
    assert min(row["mismatch/drift"] for row in log if row["sample_age"]) > 1e-5
    assert (run_dir / "vllm.log").exists()
    assert descendants(process.pid) == []


def test_jobs_of_a_sweep_start_their_own_ranks(model_cache: Path, tmp_path: Path) -> None:
    overrides = ["hardware=cpu_2rank", "schedule.v=2,3", "schedule.updates=2", "hydra.sweep.dir=sweep"]
    # The second job cannot run, and does not take the first with it.
    done = run([*overrides, "schedule.minibatches_per_collection=2", "-m"], model_cache, tmp_path)
    assert done.returncode == 2
    finished = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json"))
    assert finished == ["0_grpo_v2_i1_seed42"]
    assert "must divide schedule.v=3" in done.stderr


def test_a_sweep_goes_through_the_launcher_of_choice(model_cache: Path, tmp_path: Path) -> None:
    """submitit's local launcher does what its Slurm launcher does, without Slurm."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    overrides = ["hydra/launcher=submitit_local", "schedule.v=1,2", "schedule.updates=2", "hydra.sweep.dir=sweep"]
    finish([*overrides, "-m"], model_cache, tmp_path)
    finished = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/summary.json"))
    assert finished == ["0_grpo_v1_i1_seed42", "1_grpo_v2_i1_seed42"]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """Processes of the group and session that `pid` began, or below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def test_vllm_samples_ahead_of_two_ranks(model_cache: Path, tmp_path: Path) -> None:
    """Ages as the schedule says, a checkpoint with a collection in waiting, and the rest of the run from it."""
    run_dir = tmp_path / "run"
    overrides = ["hardware=cpu_vllm_2rank", *RUN, "schedule.overlap=true", "checkpoint.every=3", "evaluation.every=3"]
    finish([*overrides, f"run_dir={run_dir}"], model_cache, tmp_path)
    log = updates(run_dir)
    assert [row["sample_age"] for row in log] == [0, 1, 2, 3, 2, 3]
    assert [row["update"] for row in log if "sync/drift" in row] == [1, 3, 5]
    assert all(row["sync/drift"] < 1e-5 for row in log if "sync/drift" in row)
    shutil.rmtree(run_dir / "checkpoints/update_000006")
    finish([f"resume={run_dir}"], model_cache, tmp_path)
    for row, expected in zip(updates(run_dir), log, strict=True):
        for key in ("loss", "grad_norm", "sample_age", "total/tokens"):
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (row["update"], key)
