"""Runs of the real loop, small enough for a second each: one-digit sums, a one-layer Qwen3, warm-started once.

They happen in processes of their own, which can be killed at a chosen point.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from grpo_lab import checkpoint
from grpo_lab.composition import compose_run
from grpo_lab.config import TrainConfig
from grpo_lab.runs import last_update

SMALL = [
    "dataset=arithmetic_plain",
    "dataset.min_digits=1",
    "dataset.max_digits=1",
    "dataset.train_problems=85",
    "dataset.test_problems=5",
    "model.recipe.hidden=32",
    "model.recipe.layers=1",
    "model.recipe.heads=1",
    "model.recipe.intermediate=64",
    "model.recipe.warm_target=0.3",
    "groups_per_minibatch=4",
    "group_size=4",
    "rollout.max_response_tokens=6",
    "rollout.max_prompt_tokens=8",
    "collection.prompts_per_batch=16",
    "learner.lr=1e-3",
    "learner.micro_batch_tokens=64",
    "evaluation.every=null",
    "checkpoint.every=null",
    "tracking.wandb=disabled",
    "tracking.view=off",
    "tracking.rollouts_every=4",
    "verifier.workers=1",
    "hardware.threads=1",
]


def compose_small(overrides: list[str]) -> TrainConfig:
    return compose_run([*SMALL, *overrides])


KillPoint = tuple[str, str, int]


def _kill_at(point: KillPoint) -> None:
    """Replace a function by one that ends this process with SIGKILL when it is called for the n-th time."""
    import importlib

    module_name, attribute, count = point
    owner: Any = importlib.import_module(module_name)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    calls = 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, deadly)


def _child(config: TrainConfig, run_dir: Path, resuming: bool, point: KillPoint | None) -> None:
    from grpo_lab.train import train

    if point is not None:
        _kill_at(point)
    train(config, run_dir, resuming=resuming)


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["grpo_lab.build", "grpo_lab.train"])


def run_process(
    config: TrainConfig,
    run_dir: Path,
    *,
    resuming: bool = False,
    kill_at: KillPoint | None = None,
    kill_after: float | None = None,
) -> int:
    """Train in a new process; -9 if it was killed (at a point, or so many seconds after the first update that it logs),
    else its exit code."""
    process = _PROCESSES.Process(target=_child, args=(config, run_dir, resuming, kill_at))
    metrics = run_dir / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    from_update = max(checkpoint.saved(run_dir), default=0)
    process.start()
    if kill_after is None:
        process.join(120)
    else:
        # A resumed run first cuts the rows behind its checkpoint.
        while process.is_alive() and not (
            metrics.exists() and metrics.stat().st_mtime_ns > before and last_update(run_dir) > from_update
        ):
            process.join(0.01)
        process.join(kill_after)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def run_module(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command of the package, to its end."""
    return subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=cwd,
        env=dict(os.environ),
        text=True,
        capture_output=True,
        check=False,
        timeout=200,
    )
