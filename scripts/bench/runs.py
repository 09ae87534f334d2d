"""Whole runs of `python -m grpo_lab.train` and of TRL's trainer, at a shape."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from grpo_lab.composition import compose_run
from scripts.bench.measure import ROOT, Command, child, python
from scripts.bench.shapes import Model, Shape, write_model, write_prompts
from scripts.bench.trl_run import MARK

# Names the python of an environment that has TRL; else the one that `make bench` makes.
TRL_VARIABLE = "BENCH_TRL_PYTHON"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
TRL_RUN = Path(__file__).with_name("trl_run.py")
PHASES = ("collect", "sync", "learn", "other")


@dataclass(frozen=True)
class Run:
    """Seconds of each update by phase, the first ones left out, and the most resident bytes."""

    updates: tuple[dict[str, float], ...]
    peak: int

    @property
    def seconds(self) -> list[float]:
        return [sum(update.values()) for update in self.updates]

    def middle(self) -> dict[str, float]:
        """The median of each phase."""
        return {phase: median(update[phase] for update in self.updates) for phase in PHASES}


@dataclass(frozen=True)
class Bench:
    """Where models, prompts and logs lie, and the runs made so far, by shape."""

    folder: Path
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def model(self, model: Model) -> Path:
        folder = self.folder / model.name
        if not (folder / "tokenizer.json").is_file():
            child(write_model, model, folder)
        return folder

    def prompts(self, shape: Shape) -> Path:
        path = self.folder / f"{shape.name}.jsonl"
        if not path.is_file():
            write_prompts(shape, path)
        return path

    def overrides(self, shape: Shape) -> list[str]:
        """The run that makes updates of this shape, on-policy, and nothing beside them."""
        return [
            "model=smollm2_135m",
            f"model.path={self.model(shape.model)}",
            "dataset=gsm8k",
            f"dataset.path={self.prompts(shape)}",
            f"dataset.expected_rows={len(self.prompts(shape).read_text().splitlines())}",
            "dataset.template='{question}'",
            "dataset.columns.gold=plain",
            "dataset.columns.tolerance=tolerance",
            "objective=grpo",
            "objective.zero_variance=keep",
            "objective.beta=0",
            "schedule.v=1",
            f"group_size={shape.group_size}",
            f"groups_per_minibatch={shape.groups}",
            f"rollout.max_prompt_tokens={shape.prompt}",
            f"rollout.max_response_tokens={shape.response}",
            "learner.lr=1e-6",
            f"learner.micro_batch_tokens={shape.micro_batch_tokens}",
            f"learner.logit_chunk={shape.logit_chunk}",
            "evaluation.every=null",
            "checkpoint.every=null",
            "tracking.wandb=disabled",
            "tracking.view=off",
            "tracking.rollouts_every=null",
        ]

    def train(self, shape: Shape, *, updates: int, warm: int = 1) -> Run:
        """A run of `updates` updates after `warm` that do not count, kept with the others of its shape."""
        folder = self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        settings = [*self.overrides(shape), f"schedule.updates={warm + updates}", f"run_dir={folder}"]
        command = Command(python("-m", "grpo_lab.train", *settings), log=self.folder / "train.log", changes={})
        peak = command.finish()
        run = Run(read_updates(folder / "metrics.jsonl", shape)[warm:], peak)
        self.runs.setdefault(shape.name, []).append(run)
        return run


def read_updates(path: Path, shape: Shape) -> tuple[dict[str, float], ...]:
    """Seconds of each update by phase.

    Raises:
        ValueError: responses of another length than the shape's.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["response/length"] != shape.response:
            raise ValueError(f"update {row['update']} had responses of {row['response/length']} tokens on average")
    return tuple({phase: row["time"][phase] for phase in PHASES} for row in rows)


def trl_python() -> Path | None:
    """The interpreter of TRL's environment, where there is one."""
    named = os.environ.get(TRL_VARIABLE)
    path = Path(named) if named else TRL_PYTHON
    return path if path.is_file() else None


class Trl:
    """TRL's trainer in a process of its own, an update at a time.

    Its environment is left as it is: threads that wait, and memory that is freed, are torch's own defaults.
    """

    def __init__(self, bench: Bench, shape: Shape, interpreter: Path, *, micro_batch: int, options: list[str]) -> None:
        self.shape = shape
        arguments: list[str | Path] = [
            interpreter,
            # Without the folder of the script on its path, whose modules are ours.
            "-P",
            TRL_RUN,
            bench.model(shape.model),
            bench.prompts(shape),
            f"--out={bench.folder / 'trl'}",
            f"--responses={shape.responses}",
            f"--group-size={shape.group_size}",
            f"--response={shape.response}",
            f"--threads={compose_run([]).hardware.threads}",
            f"--micro-batch={micro_batch}",
            *options,
        ]
        self.command = Command(arguments, log=bench.folder / "trl.log", changes={"HF_HUB_OFFLINE": "1"})
        self.peak = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.command.process.kill()
            self.command.process.wait()
        else:
            self.peak = self.command.finish()

    def update(self) -> float:
        """Seconds of one more update.

        Raises:
            ValueError: responses of another length than the shape's.
        """
        answer = json.loads(self.command.ask(MARK))
        if answer["mean_length"] != self.shape.response:
            raise ValueError(f"TRL's responses have {answer['mean_length']} tokens on average")
        return float(answer["seconds"])
