"""A short real run of the same overrides, in a process of its own, for what it tells of speed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from grpo_lab.config import TrainConfig
from grpo_lab.launch import run_child
from grpo_lab.plan.rates import Measured, measured
from grpo_lab.schedule import prompts_at_a_time

# The first update warms up and is not counted.
UPDATES = 3


class ProbeError(RuntimeError):
    """The probe ended with an error, which it has printed itself."""


def probe_words(config: TrainConfig, run_dir: Path) -> list[str]:
    """What a probe changes. Each update has a sync and a collection of its own, which draws as many prompts at a time
    as the run would: how many are sampled side by side decides how fast that is."""
    return [
        f"run_dir={run_dir}",
        "schedule.v=1",
        "schedule.i=1",
        "schedule.minibatches_per_collection=1",
        "schedule.overlap=false",
        f"schedule.updates={UPDATES}",
        "schedule.epochs=null",
        f"collection.prompts_per_batch={prompts_at_a_time(config)}",
        "evaluation.every=null",
        "evaluation.checkpoints=false",
        "checkpoint.every=null",
        "tracking.wandb=disabled",
        "tracking.view=off",
        "tracking.rollouts_every=null",
    ]


def probe(config: TrainConfig, overrides: Sequence[str]) -> Measured:
    """Run it, read it, and remove it. What it prints goes to stderr.

    Raises:
        ProbeError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="grpo_lab_probe_") as folder:
        run_dir = Path(folder) / "run"
        words = [*overrides, *probe_words(config, run_dir)]
        code = run_child([sys.executable, "-m", "grpo_lab.train", *words], {}, stdout=sys.stderr)
        if code != 0:
            raise ProbeError(f"the probe ended with exit code {code}; what it said is above")
        return measured(run_dir)
