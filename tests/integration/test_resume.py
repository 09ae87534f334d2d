"""Killed at any moment and resumed equals never killed, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import KillPoint, rows, run_process

from grpo_lab import checkpoint
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.runs import last_update
from grpo_lab.train import train

EVERY_PART = ["schedule.updates=12", "evaluation.every=2", "evaluation.n=2", "evaluation.k=[1,2]", "checkpoint.keep=9"]
# A checkpoint inside a collection, inside the passes over a minibatch, and inside a block.
SAVES = ["checkpoint.every=3"]

RUNS: dict[str, list[str]] = {
    "ggpo, refresh inside a collection": ["objective=ggpo", "schedule.v=4", "schedule.t_ref=6"],
    "grpo_tis, open block": ["objective=grpo_tis", "schedule.v=12", "collection.prompts_per_batch=48"],
    "grpo_rg, pi_k, i=2, a batch each": [
        "objective=grpo_rg",
        "objective.clip_center=pi_k",
        "objective.zero_variance=mask",
        "schedule.v=4",
        "schedule.i=2",
        "schedule.minibatches_per_collection=1",
    ],
    # Sampled by weights one sync older than those of the plain run; at update 3 the collection of 4 .. 7 is there.
    "ggpo, overlap": ["objective=ggpo", "schedule.v=4", "schedule.t_ref=6", "schedule.overlap=true"],
    "agro, overlap, two collections a sync": [
        "objective=agro",
        "schedule.v=4",
        "schedule.minibatches_per_collection=2",
        "schedule.overlap=true",
    ],
    "agro, a batch each": ["objective=agro", "schedule.v=4", "schedule.minibatches_per_collection=1"],
}
KILLS: list[tuple[str, KillPoint]] = [
    # Inside a collection: a second batch is sampled and not yet judged.
    ("ggpo, refresh inside a collection", ("grpo_lab.rewards.pool", "Verifier.submit", 2)),
    # Inside the second save: files are written, the folder has no final name.
    ("ggpo, refresh inside a collection", ("grpo_lab.checkpoint", "_fsync", 14)),
    # After the refresh at update 6, before the collection of 4 .. 7 is used up.
    ("ggpo, refresh inside a collection", ("grpo_lab.learner.torch_local", "TorchLearner.step", 8)),
    # Resumed from update 3, before the refresh: the reference is another policy than the learner.
    ("ggpo, refresh inside a collection", ("grpo_lab.learner.torch_local", "TorchLearner.step", 5)),
    # Inside the block of updates 0 .. 7.
    ("grpo_tis, open block", ("grpo_lab.learner.torch_local", "TorchLearner.step", 6)),
    # Between the two passes over a minibatch, while stale weights still have to sample.
    ("grpo_rg, pi_k, i=2, a batch each", ("grpo_lab.learner.torch_local", "TorchLearner.step", 4)),
    # Resumed from update 6, where the weights of update 4 sample next: neither the learner's nor the model folder's.
    ("agro, a batch each", ("grpo_lab.learner.torch_local", "TorchLearner.step", 8)),
    # During an evaluation, when the engine holds the learner's weights.
    ("agro, a batch each", ("grpo_lab.loop", "evaluate", 4)),
    # Inside a collection, with the next one sampled and saved, and at a save between two collections.
    ("ggpo, overlap", ("grpo_lab.learner.torch_local", "TorchLearner.step", 6)),
    ("ggpo, overlap", ("grpo_lab.learner.torch_local", "TorchLearner.step", 11)),
    # Resumed from update 6, where collections of the weights of update 4 are yet to be sampled.
    ("agro, overlap, two collections a sync", ("grpo_lab.learner.torch_local", "TorchLearner.step", 8)),
    # While the thread samples.
    ("ggpo, overlap", ("grpo_lab.rewards.pool", "Verifier.submit", 3)),
    # Before anything was saved.
    ("agro, a batch each", ("grpo_lab.learner.torch_local", "TorchLearner.step", 2)),
]


@pytest.fixture(scope="module")
def straight() -> dict[str, Path]:
    """Finished runs that nobody killed, by name; filled as they are needed."""
    return {}


def _straight(name: str, config: TrainConfig, store: dict[str, Path], tmp_path: Path) -> Path:
    if name not in store:
        run_dir = tmp_path / "straight"
        assert run_process(config, run_dir) == 0
        store[name] = run_dir
    return store[name]


def _assert_equal(left: Any, right: Any, where: str) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            _assert_equal(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            _assert_equal(a, b, f"{where}[{index}]")
    else:
        assert left == right or (left != left and right != right), where


def _assert_same_run(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    samples = sorted(path.name for path in (one / "rollouts").iterdir())
    assert samples == sorted(path.name for path in (other / "rollouts").iterdir())
    for name in samples:
        assert (one / "rollouts" / name).read_text() == (other / "rollouts" / name).read_text()
    last, other_last = checkpoint.newest(one)[0], checkpoint.newest(other)[0]
    assert last is not None
    assert other_last is not None
    assert last.name == other_last.name == "update_000012"
    _assert_equal(
        load_file(last / "model/model.safetensors"), load_file(other_last / "model/model.safetensors"), "model"
    )
    _assert_equal(
        torch.load(last / "learner.pt", weights_only=True), torch.load(other_last / "learner.pt", weights_only=True), ""
    )
    state, other_state = checkpoint.load_state(last), checkpoint.load_state(other_last)
    for part in (state, other_state):
        part["tracker"].pop("seconds")
    _assert_equal(state, other_state, "state")


@pytest.mark.parametrize(("name", "point"), KILLS, ids=[f"{name} @ {point[1]} {point[2]}" for name, point in KILLS])
def test_killed_and_resumed_is_never_killed(
    name: str, point: KillPoint, small: Callable[..., TrainConfig], straight: dict[str, Path], tmp_path: Path
) -> None:
    config = small(*RUNS[name], *EVERY_PART, *SAVES)
    whole = _straight(name, config, straight, tmp_path)
    run_dir = tmp_path / "killed"
    assert run_process(config, run_dir, kill_at=point) == -9
    assert run_process(config, run_dir, resuming=True) == 0
    _assert_same_run(whole, run_dir)


def test_killed_at_random_moments(small: Callable[..., TrainConfig], straight: dict[str, Path], tmp_path: Path) -> None:
    name = "grpo_rg, pi_k, i=2, a batch each"
    config = small(*RUNS[name], *EVERY_PART, *SAVES)
    whole = _straight(name, config, straight, tmp_path)
    run_dir = tmp_path / "killed"
    moments = random.Random(0)
    killed = []
    for attempt in range(4):
        if run_process(config, run_dir, resuming=attempt > 0, kill_after=moments.uniform(0, 0.3)) == 0:
            break
        killed.append(last_update(run_dir))
    # Between the first update and the last, which is what is to be seen.
    assert any(0 < each < 12 for each in killed)
    code = run_process(config, run_dir, resuming=True)
    assert code == 0
    _assert_same_run(whole, run_dir)


def test_a_damaged_checkpoint_is_named_and_skipped(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = small("objective=grpo", *EVERY_PART, "checkpoint.every=2", "schedule.updates=6", "schedule.v=2")
    run_dir = tmp_path / "run"
    assert run_process(config, run_dir) == 0
    learner_file = checkpoint.folder_of(run_dir, 6) / "learner.pt"
    learner_file.write_bytes(learner_file.read_bytes()[: learner_file.stat().st_size // 2])
    (checkpoint.folder_of(run_dir, 4) / "manifest.json").write_text("{}")
    found, warnings = checkpoint.newest(run_dir)
    assert found == checkpoint.folder_of(run_dir, 2)
    assert len(warnings) == 2
    assert "learner.pt is not as it was written" in warnings[0]
    assert "update_000004" in warnings[1]
    assert run_process(config, run_dir, resuming=True) == 0
    assert checkpoint.newest(run_dir) == (checkpoint.folder_of(run_dir, 6), [])


def test_what_cannot_be_resumed_keeps_its_log(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    without = small("schedule.v=1", "schedule.updates=2")
    train(without, tmp_path / "without", resuming=False)
    before = (tmp_path / "without/metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="has no checkpoint to go on from"):
        train(without, tmp_path / "without", resuming=True)
    assert (tmp_path / "without/metrics.jsonl").read_text() == before

    damaged = small("schedule.v=1", "schedule.updates=2", "checkpoint.every=1")
    train(damaged, tmp_path / "damaged", resuming=False)
    for update in (1, 2):
        (checkpoint.folder_of(tmp_path / "damaged", update) / "run.pt").unlink()
    before = (tmp_path / "damaged/metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole: .*run\.pt is missing"):
        train(damaged, tmp_path / "damaged", resuming=True)
    assert (tmp_path / "damaged/metrics.jsonl").read_text() == before


def test_a_resume_that_fails_while_loading_keeps_the_summary(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    settings = ["schedule.v=1", "schedule.updates=2", "checkpoint.every=1", "evaluation.every=1", "evaluation.n=2"]
    config = small(*settings, "evaluation.k=[1]")
    train(config, tmp_path, resuming=False)
    before = json.loads((tmp_path / "summary.json").read_text())
    config.model.path = str(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"model\.path"):
        train(config, tmp_path, resuming=True)
    after = json.loads((tmp_path / "summary.json").read_text())
    assert after["status"] == "failed"
    assert [after[key] for key in ("first", "best", "last", "updates", "tokens")] == [
        before[key] for key in ("first", "best", "last", "updates", "tokens")
    ]


def test_resuming_a_finished_budget_in_epochs_adds_nothing(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = small(
        "objective=grpo_rg",
        "schedule.v=1",
        "schedule.epochs=1",
        "collection.prompts_per_batch=16",
        "evaluation.every=100",
        "evaluation.n=2",
        "evaluation.k=[1]",
        "checkpoint.every=100",
    )
    train(config, tmp_path, resuming=False)
    before = rows(tmp_path)
    train(config, tmp_path, resuming=True)
    assert rows(tmp_path) == before
