"""A pool is recorded, and every objective learns from it as it would from a frozen policy's own collection."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, KillPoint, rows, run_module, run_process

from grpo_lab import checkpoint
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.offline.header import PoolError, read_header
from grpo_lab.offline.source import load_pool
from grpo_lab.train import train

OBJECTIVES = ["grpo", "grpo_tis", "agro", "ggpo"]
# What says how groups came about, and of which sync: a pool's run has none of it.
OF_COLLECTING = ("collect/", "reward/drawn", "verdict/", "total/", "epoch", "pool/", "sync/")


pool_command = partial(run_module, "grpo_lab.pool")


@pytest.fixture(scope="module")
def settings(model_cache: Path) -> list[str]:
    return [*SMALL, f"model.cache_dir={model_cache}"]


@pytest.fixture(scope="module")
def pool(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 mixed groups, 12 minibatches, sampled in collections of 16 groups as a run of v=4 does."""
    folder = tmp_path_factory.mktemp("pools")
    done = pool_command("out=made", "groups=48", "schedule.v=4", *settings, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "python -m grpo_lab.train source=pool pool.path=made"
    assert [path.name for path in folder.iterdir()] == ["made"]
    return folder / "made"


def _learned(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(OF_COLLECTING)}


def _updates(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir) if row["kind"] == "update"]


def _weights(run_dir: Path, update: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.folder_of(run_dir, update) / "model/model.safetensors")


def _assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_pool_says_what_it_is(pool: Path) -> None:
    header = read_header(pool)
    assert (header.groups, header.mixed, header.group_size, header.order) == (48, 48, 4, "sampled")
    assert (header.sampler.version, header.sampler.logprobs, header.sampler.engine) == (0, "recorded", "hf")
    assert header.drawn is not None
    assert header.drawn["groups"] > 48
    assert header.drawn["responses"] == 4 * header.drawn["groups"]
    sequences = [group.sequence for group in load_pool(pool).groups]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_period_from_a_pool_equals_one_period_of_a_run_that_sampled_it(
    objective: str, pool: Path, small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    common = [f"objective={objective}", "schedule.updates=4", "checkpoint.every=4", "schedule.t_ref=3"]
    train(small(*common, "schedule.v=4"), tmp_path / "sampled", resuming=False)
    train(small(*common, "source=pool", f"pool.path={pool}"), tmp_path / "pool", resuming=False)
    sampled, read = _updates(tmp_path / "sampled"), _updates(tmp_path / "pool")
    assert [_learned(row) for row in sampled] == [_learned(row) for row in read]
    _assert_equal_weights(_weights(tmp_path / "sampled", 4), _weights(tmp_path / "pool", 4))
    assert read[0]["mismatch/drift"] < 1e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_on_the_whole_pool_each_group_once(
    objective: str, pool: Path, small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lab.learner.torch_local import TorchLearner
    from grpo_lab.rollout.hf import HfEngine

    seen: list[int] = []
    step = TorchLearner.step

    def recorded(self: TorchLearner, minibatch: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(group.sequence for group in minibatch.groups)
        return step(self, minibatch, *args, **kwargs)

    def refused(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("nothing is sampled where nothing is evaluated")

    monkeypatch.setattr(TorchLearner, "step", recorded)
    monkeypatch.setattr(HfEngine, "from_folder", refused)
    config = small(f"objective={objective}", "source=pool", f"pool.path={pool}", "schedule.updates=12")
    train(config, tmp_path, resuming=False)
    assert seen == [group.sequence for group in load_pool(pool).groups]
    log = _updates(tmp_path)
    assert [row["sample_age"] for row in log] == list(range(12))
    # Nothing brings the sampler back to the learner.
    assert log[0]["mismatch/drift"] < 1e-5 < log[1]["mismatch/drift"] < log[11]["mismatch/drift"]
    assert {row["total/responses"] for row in log} == {0}
    assert [row["pool/left"] for row in log if "pool/left" in row][-1] == 0


def test_tis_blocks_are_eight_updates_and_the_pool_may_end_inside_one(
    pool: Path, small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks 0-7 and 8-11 of the 12 minibatches; with two passes each: 0-3, 4-7, 8-11. schedule.v cuts none."""
    from grpo_lab.learner.torch_local import TorchLearner

    scored: list[int] = []
    score = TorchLearner.logprobs

    def recorded(self: TorchLearner, minibatch: Any) -> Any:
        scored.append(minibatch.index)
        return score(self, minibatch)

    monkeypatch.setattr(TorchLearner, "logprobs", recorded)
    common = ["objective=grpo_tis", "source=pool", f"pool.path={pool}", "schedule.v=3"]
    train(small(*common, "schedule.updates=9"), tmp_path / "once", resuming=False)
    # The first is the spot check.
    assert scored == [0, *range(8), *range(8, 12)]
    scored.clear()
    train(small(*common, "schedule.i=2", "schedule.updates=20"), tmp_path / "twice", resuming=False)
    assert scored == [0, *range(4), *range(4, 8), *range(8, 12)]


def test_an_evaluation_changes_nothing(pool: Path, small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    common = ["objective=ggpo", "source=pool", f"pool.path={pool}", "schedule.updates=6", "schedule.t_ref=4"]
    evaluated = ["evaluation.every=2", "evaluation.n=2", "evaluation.k=[1]"]
    train(small(*common), tmp_path / "plain", resuming=False)
    train(small(*common, *evaluated), tmp_path / "evaluated", resuming=False)
    assert _updates(tmp_path / "plain") == _updates(tmp_path / "evaluated")
    scores = [row["update"] for row in rows(tmp_path / "evaluated") if row["kind"] == "evaluation"]
    assert scores == [0, 2, 4, 6]


KILLS: list[tuple[list[str], KillPoint]] = [
    # Inside a block, with a stretch of the pool open; and between the two passes over a minibatch.
    (["objective=grpo_tis"], ("grpo_lab.learner.torch_local", "TorchLearner.step", 6)),
    (["objective=ggpo", "schedule.i=2", "schedule.t_ref=5"], ("grpo_lab.learner.torch_local", "TorchLearner.step", 9)),
]


@pytest.mark.parametrize(("overrides", "point"), KILLS, ids=[" ".join(overrides) for overrides, _ in KILLS])
def test_killed_and_resumed_is_never_killed(
    overrides: Sequence[str], point: KillPoint, pool: Path, small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    common = ["source=pool", f"pool.path={pool}", "schedule.updates=12", "checkpoint.every=3"]
    config = small(*overrides, *common, "evaluation.every=4", "evaluation.n=2", "evaluation.k=[1]")
    assert run_process(config, tmp_path / "whole") == 0
    assert run_process(config, tmp_path / "killed", kill_at=point) == -9
    assert run_process(config, tmp_path / "killed", resuming=True) == 0
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")
    _assert_equal_weights(_weights(tmp_path / "whole", 12), _weights(tmp_path / "killed", 12))


def test_a_run_does_not_go_on_with_another_pool(
    pool: Path, small: Callable[..., TrainConfig], settings: list[str], tmp_path: Path
) -> None:
    shutil.copytree(pool, tmp_path / "pool")
    config = small("source=pool", f"pool.path={tmp_path / 'pool'}", "schedule.updates=2", "checkpoint.every=1")
    train(config, tmp_path / "run", resuming=False)
    done = pool_command("out=other", "groups=16", "seed=7", "schedule.v=4", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "pool")
    (tmp_path / "other").rename(tmp_path / "pool")
    config.schedule.updates = 4
    with pytest.raises(ConfigError, match="holds another pool than the run began with"):
        train(config, tmp_path / "run", resuming=True)


def test_a_pool_of_another_model_or_template_is_told(
    pool: Path, small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    common = ["source=pool", f"pool.path={pool}", "schedule.updates=3"]
    with pytest.raises(PoolError, match="has prompts of another template than this run's"):
        train(small(*common, "dataset.template='{question}+'"), tmp_path / "template", resuming=False)
    # Another warm start: the same characters, other weights.
    train(small(*common, "model.recipe.seed=1"), tmp_path / "model", resuming=False)
    assert "the pool was sampled by other weights than this run begins with: K3 is" in (
        (tmp_path / "model/run.log").read_text()
    )
    with pytest.raises(PoolError, match="takes 13 minibatches"):
        train(small(*common, "schedule.updates=13"), tmp_path / "long", resuming=False)


def test_a_recording_that_was_killed_goes_on_and_gives_the_same_pool(
    pool: Path, settings: list[str], tmp_path: Path
) -> None:
    """Half of it is made as a killed command leaves it: the parts that were whole, and the state after the last."""
    from grpo_lab.pool.draft import STATE

    words = ["out=made", "groups=48", "schedule.v=4", *settings]
    killer = (
        "import os, signal, sys; from grpo_lab.pool import draft; from grpo_lab.pool.__main__ import main\n"
        "add = draft.Draft.add\n"
        "def deadly(self, *given):\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if self.parts == 2 else add(self, *given)\n"
        "draft.Draft.add = deadly\n"
        "sys.argv[1:] = " + repr(words) + "\nmain()"
    )
    killed = subprocess.run([sys.executable, "-c", killer], cwd=tmp_path, capture_output=True, check=False)
    assert killed.returncode == -9
    making = tmp_path / ".made.making"
    assert json.loads((making / STATE).read_text())["groups"] == 32
    assert not (tmp_path / "made").exists()
    again = pool_command(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "going on behind 32 of 48 groups" in again.stderr
    assert (tmp_path / "made/pool.json").read_bytes() == (pool / "pool.json").read_bytes()
    assert not making.exists()


def test_a_checkpoint_makes_a_pool_as_well(
    small: Callable[..., TrainConfig], settings: list[str], tmp_path: Path
) -> None:
    train(small("schedule.v=1", "schedule.updates=2", "checkpoint.every=2"), tmp_path / "run", resuming=False)
    folder = checkpoint.folder_of(tmp_path / "run", 2)
    done = pool_command("out=later", "groups=8", "schedule.v=2", f"checkpoint={folder}", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_header(tmp_path / "later").sampler.version == 2
    # A run that begins with that checkpoint's weights is on-policy.
    start = small("source=pool", f"pool.path={tmp_path / 'later'}", "schedule.updates=2", f"model.path={folder}/model")
    train(start, tmp_path / "next", resuming=False)
    assert _updates(tmp_path / "next")[0]["mismatch/drift"] < 1e-5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the folder of the pool: out=<folder>"),
        (["out=p", "groups=some"], "groups=some must be a number from 1"),
        (["out=p", "source=pool", "pool.path=q"], "source= is of training"),
        (["out=.", "groups=4"], "out=. is there already"),
        (["out=p", "import=nothing.jsonl"], "import=nothing.jsonl is no file"),
        (["out=p", "import=x", "groups=4"], "groups= says how many to sample, and import= takes those of its file"),
        (["out=p", "checkpoint=nowhere"], "checkpoint=nowhere is no checkpoint"),
        (["out=p", "schedule.epochs=1"], "say how many groups to sample"),
        (["out=p", "rollout.top_p=0.9"], "rollout.top_p=0.9"),
        (["-m", "out=p", "seed=1,2"], "-m makes sweeps"),
    ],
)
def test_bad_words_are_one_clear_line(words: list[str], said: str, tmp_path: Path) -> None:
    done = pool_command(*words, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    assert said in line
    # Of a sweep, Hydra makes a folder first.
    assert {path.name for path in tmp_path.iterdir()} <= ({"outputs"} if "-m" in words else set())


def test_help_is_of_this_command(tmp_path: Path) -> None:
    shown = pool_command("--help", cwd=tmp_path).stdout
    assert "out=<folder>   groups=<number>" in shown
    assert "objective: agro, ggpo" in shown
