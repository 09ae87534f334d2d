"""What DeepSpeed learners do, by ranks of their own: `python deepspeed_cases.py FOLDER` with RANK and WORLD_SIZE set.

Importing torch and DeepSpeed takes longer than most cases, so one process a rank runs them all and writes down what
came out: FOLDER/results_<ranks>_<rank>.pkl, which the tests read. FOLDER/models holds the models. A case that fails
leaves its traceback.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import (
    PRESETS,
    UNEVEN,
    learner_settings,
    make_group,
    minibatch_of,
    plain_logprobs,
    preset,
    random_groups,
    tiny_model,
)
from torch import Tensor

from grpo_lab import distributed
from grpo_lab.config import ConfigError
from grpo_lab.learner import Learner, NonFiniteError, StepResult, gathering, zero_engine
from grpo_lab.learner.deepspeed_zero import DeepSpeedLearner
from grpo_lab.logprobs import masked_sum
from grpo_lab.minibatches import Minibatch
from grpo_lab.objectives import Objective
from grpo_lab.types import Group, LossInputs, LossOutput

STAGES = (0, 1, 2, 3)
TEMPERATURE = 0.7
LR = 1e-3
# The groups below have 20, 21, 15 and 41 positions: all whole; two groups cut in rows; all of them.
WHOLE, CUT, ALL_CUT = 1000, 20, 8
UPDATES = 5
# The first at half the rate, the last three on the way to zero.
SCHEDULE = {"lr": LR, "warmup_updates": 2, "lr_schedule": "linear"}
MODELS = ("qwen3", "llama", "narrow", "overflowing")


def make_models() -> dict[str, Any]:
    """The models of the cases: tied and untied, one with weights of the usual size for BF16, one whose gradients
    overflow."""
    overflowing = tiny_model("llama")
    with torch.no_grad():
        # Hidden states near 1e15 and an output matrix near 1e-15: ordinary logits, and a gradient of the matrix that
        # is 1e15 times the usual.
        overflowing.model.norm.weight.mul_(1e15)
        overflowing.lm_head.weight.mul_(1e-15)
    narrow = tiny_model("qwen3", initializer_range=0.05)
    return {"qwen3": tiny_model("qwen3"), "llama": tiny_model("llama"), "narrow": narrow, "overflowing": overflowing}


def near_policy_groups() -> list[Group]:
    """Groups of very different lengths whose behaviour log-probs lie around the initial model's, by 0.3 nats: some
    tokens are clipped, most are not. The third has equal rewards."""
    model, rng = tiny_model("qwen3"), np.random.default_rng(1)
    rewards = ((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 0.0))
    groups = []
    for group, reward in zip(random_groups((*UNEVEN, (3, (25, 2, 11, 4))), seed=3), rewards, strict=True):
        with torch.no_grad():
            scores = plain_logprobs(model, group, TEMPERATURE)
        groups.append(
            make_group(
                group.prompt.id,
                group.prompt.token_ids,
                [rollout.token_ids.tolist() for rollout in group.rollouts],
                behaviour=[(score.numpy() + rng.normal(0, 0.3, len(score))).tolist() for score in scores],
                rewards=reward,
            )
        )
    return groups


GROUPS = near_policy_groups()


def likelihood() -> Objective:
    """Minus the mean log-prob of all tokens."""

    def loss(inputs: LossInputs) -> LossOutput:
        total = masked_sum(inputs.logprobs, inputs.loss_mask).sum()
        return LossOutput(loss=-total / inputs.counts.tokens, metrics={})

    return Objective(
        name="likelihood",
        loss=loss,
        response_weights=lambda rewards, log_ratio: torch.zeros_like(rewards),
        needs_reference=False,
    )


def train(learner: Learner, name: str, minibatch: Minibatch, updates: int = UPDATES) -> list[StepResult]:
    """Updates under the first reference, then a refresh, then under a fresh reference and under an old one."""
    objective = preset(name)
    old = learner.logprobs(minibatch) if objective.old_policy == "block" else None
    results = []
    for update in range(updates):
        if update == 2:
            learner.refresh_reference()
        reference = learner.reference_logprobs(minibatch) if objective.needs_reference else None
        results.append(learner.step(minibatch, objective, update=update, reference=reference, old=old))
    return results


def minibatch_for(name: str) -> Minibatch:
    return minibatch_of(GROUPS, mask=name == "grpo_rg")


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


@dataclass(frozen=True)
class Bench:
    folder: Path
    world: distributed.World

    def learner(
        self, *, stage: int, model: str = "qwen3", needs_reference: bool = True, **settings: Any
    ) -> DeepSpeedLearner:
        return DeepSpeedLearner.from_folder(
            self.folder / "models" / model,
            settings=learner_settings(engine="deepspeed", zero_stage=stage, **(SCHEDULE | settings)),
            temperature=TEMPERATURE,
            device="cpu",
            needs_reference=needs_reference,
            updates=UPDATES,
            world=self.world,
        )

    def checkpoint(self, ranks: int, stage: int, precision: str) -> Path:
        return self.folder / "checkpoints" / f"ranks_{ranks}" / f"{precision}_{stage}"


# --- the same update as the embedded learner --------------------------------------------------------------------


def trained(bench: Bench, name: str, stage: int, **settings: Any) -> dict[str, Any]:
    learner = bench.learner(stage=stage, needs_reference=preset(name).needs_reference, **settings)
    steps = train(learner, name, minibatch_for(name))
    return {"steps": steps, "weights": weights(learner)}


def fewer_groups_than_ranks(bench: Bench, stage: int) -> dict[str, Any]:
    learner = bench.learner(stage=stage)
    steps = train(learner, "ggpo", minibatch_of(GROUPS[:1]))
    return {"steps": steps, "weights": weights(learner)}


def untied(bench: Bench, stage: int) -> dict[str, Any]:
    """The model whose output matrix is its own."""
    learner = bench.learner(stage=stage, model="llama")
    steps = train(learner, "agro", minibatch_of(GROUPS))
    return {"steps": steps, "weights": weights(learner)}


def small_parameters_kept_whole(bench: Bench) -> dict[str, Any]:
    """Stage 3 as it is used: parameters below a size, which are all of this model's, stay whole on every rank."""
    zero_engine.PERSISTENT = 100_000
    try:
        return trained(bench, "ggpo", 3)
    finally:
        zero_engine.PERSISTENT = 0


# --- numbers that are not finite --------------------------------------------------------------------------------


def refusal(bench: Bench, stage: int, kind: str, precision: str) -> dict[str, Any]:
    """What a bad minibatch raises, and whether its learner and one that never met it go on alike."""
    model, name, bad = {
        "loss": ("qwen3", "grpo", bad_behaviour()),
        "gradient": ("overflowing", "agro", [*GROUPS[:2], replace(GROUPS[2], rewards=(1e26, 0.0, 0.0, 1e26))]),
    }[kind]
    objective, good = preset(name), minibatch_of(GROUPS[:3])
    # A rate at which the overflowing model's loss is still a number.
    settings = {"model": model, "precision": precision, "micro_batch_tokens": 21, "lr": 1e-4}
    learner, twin = (bench.learner(stage=stage, **settings) for _ in range(2))
    for each in (learner, twin):
        each.step(good, objective, update=0, reference=None, old=None)
    message = None
    try:
        learner.step(minibatch_of(bad, index=7), objective, update=1, reference=None, old=None)
    except NonFiniteError as error:
        message = str(error)
    kept = same(weights(learner), weights(twin))
    for each in (learner, twin):
        each.step(good, objective, update=1, reference=None, old=None)
    return {"message": message, "kept": kept, "goes_on": same(weights(learner), weights(twin))}


def bad_behaviour() -> list[Group]:
    rollouts = list(GROUPS[1].rollouts)
    broken = rollouts[3].behaviour_logprobs.copy()
    broken[2] = np.nan
    rollouts[3] = replace(rollouts[3], behaviour_logprobs=broken)
    return [GROUPS[0], replace(GROUPS[1], rollouts=tuple(rollouts)), GROUPS[2]]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- reference and weights --------------------------------------------------------------------------------------


def refreshed_reference(bench: Bench, stage: int, precision: str) -> dict[str, Any]:
    """Scores by the learner and by its reference, of which the second is made to be asked although it is fresh."""
    learner, minibatch = bench.learner(stage=stage, precision=precision), minibatch_of(GROUPS)
    first = learner.logprobs(minibatch)
    train(learner, "ggpo", minibatch, updates=2)
    stale = learner.reference_logprobs(minibatch)
    learner.refresh_reference()
    fresh = learner.reference_logprobs(minibatch)
    learner.reference_is_current = False
    return {
        "first": first,
        "stale": stale,
        "fresh": fresh,
        "asked": learner.reference_logprobs(minibatch),
        "current": learner.logprobs(minibatch),
    }


def streamed_weights(bench: Bench, stage: int) -> dict[str, Any]:
    """The stream in buckets of a few parameters: one rank keeps what comes, the others run it to its end."""
    gathering.BUCKET_BYTES = 10_000
    try:
        learner = bench.learner(stage=stage)
        train(learner, "agro", minibatch_of(GROUPS), updates=3)
        keep = bench.world.is_leader
        kept = {name: tensor.clone() if keep else torch.zeros(0) for name, tensor in learner.weights()}
        # The same once more, and the learner goes on after it.
        again = weights(learner)
        learner.logprobs(minibatch_of(GROUPS))
        return {"kept": kept, "again": again}
    finally:
        gathering.BUCKET_BYTES = 256 * 2**20


# --- saved and read back ----------------------------------------------------------------------------------------


def resumed(bench: Bench, stage: int, precision: str) -> dict[str, Any]:
    """A learner with an old reference saves; a fresh one loads that, and both make three more updates."""
    minibatch = minibatch_of(GROUPS)
    learner = bench.learner(stage=stage, precision=precision)
    train(learner, "ggpo", minibatch, updates=3)
    folder = bench.checkpoint(bench.world.size, stage, precision)
    bench.world.lead(lambda: folder.mkdir(parents=True))
    learner.save(folder)
    listed = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    other = bench.learner(stage=stage, precision=precision)
    other.load(folder)
    result = {"files": listed, "saved": weights(learner), "loaded": weights(other)}
    for key, each in (("went_on", learner), ("resumed", other)):
        result[key] = weights_after(each, minibatch)
    return result


def resumed_with_current_reference(bench: Bench, stage: int) -> dict[str, Any]:
    minibatch = minibatch_of(GROUPS)
    learner = bench.learner(stage=stage)
    train(learner, "ggpo", minibatch, updates=2)
    learner.refresh_reference()
    folder = bench.folder / "checkpoints" / f"current_{bench.world.size}_{stage}"
    bench.world.lead(lambda: folder.mkdir(parents=True))
    learner.save(folder)
    other = bench.learner(stage=stage)
    other.load(folder)
    is_current = other.reference_logprobs(minibatch) is None
    return {
        "is_current": is_current,
        "has_file": (folder / "reference.safetensors").exists(),
        "went_on": weights_after(learner, minibatch),
        "resumed": weights_after(other, minibatch),
    }


def weights_after(learner: Learner, minibatch: Minibatch) -> dict[str, Tensor]:
    """Three updates more; the reference, an old one from the second on, has a say in them."""
    objective = preset("ggpo")
    for update in range(2, 5):
        reference = learner.reference_logprobs(minibatch)
        learner.step(minibatch, objective, update=update, reference=reference, old=None)
    return weights(learner)


def loaded_from_other_ranks(bench: Bench, ranks: int, stage: int, precision: str) -> dict[str, Any]:
    folder = bench.checkpoint(ranks, stage, precision)
    learner = bench.learner(stage=stage, precision=precision)
    learner.load(folder)
    left = [path.name for path in folder.parent.iterdir() if path.name.startswith(".")]
    loaded = weights(learner)
    return {"loaded": loaded, "resumed": weights_after(learner, minibatch_of(GROUPS)), "left": left}


def refused_checkpoints(bench: Bench) -> dict[str, str]:
    """The errors over checkpoints that do not fit."""
    folder = bench.checkpoint(bench.world.size, 2, "fp32")
    embedded = bench.folder / "embedded"
    messages = {}
    for key, path, settings in (
        ("stage", folder, {"stage": 1}),
        ("precision", folder, {"stage": 2, "precision": "bf16"}),
        ("engine", embedded, {"stage": 2}),
    ):
        try:
            bench.learner(**settings).load(path)
        except ConfigError as error:
            messages[key] = str(error)
    return messages


# --- precision and memory ---------------------------------------------------------------------------------------


def bf16(bench: Bench, stage: int) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    rows = {}
    for precision in ("fp32", "bf16"):
        learner = bench.learner(stage=stage, model="narrow", precision=precision, needs_reference=False)
        minibatch = minibatch_of(GROUPS)
        rows[precision] = [
            learner.step(minibatch, likelihood(), update=update, reference=None, old=None).metrics for update in (0, 1)
        ]
    parameters = list(learner.policy.parameters())
    result = {"rows": rows, "dtypes": {p.dtype for p in parameters}}
    buffers = dict(learner.policy.model.named_buffers())
    result["buffers"] = {name: buffer.clone() for name, buffer in buffers.items()}
    if stage:
        masters = [safe_get_full_fp32_param(p) for p in parameters]
        result["master_dtypes"] = {master.dtype for master in masters}
        result["moment_dtypes"] = {safe_get_full_optimizer_state(p, "exp_avg").dtype for p in parameters}
        result["finer"] = sum(int((master != master.bfloat16().float()).sum()) for master in masters)
        with gathering.gathered(parameters):
            result["rounded"] = all(torch.equal(m.bfloat16(), p) for m, p in zip(masters, parameters, strict=True))
    return result


def many_equal_gradients(bench: Bench, stage: int) -> tuple[float, float]:
    """The norm of one group's gradient, and of the mean over 320 passes with that same group."""
    norms = []
    for copies in (1, 320):
        learner = bench.learner(
            stage=stage, model="narrow", precision="bf16", needs_reference=False, micro_batch_tokens=1
        )
        group = make_group("p", [3, 4], [[5]])
        minibatch = minibatch_of([group] * copies)
        metrics = learner.step(minibatch, likelihood(), update=0, reference=None, old=None).metrics
        norms.append(metrics["grad_norm"].value())
    return norms[0], norms[1]


def offloaded(bench: Bench, stage: int, parameters: bool) -> dict[str, Any]:
    return trained(bench, "ggpo", stage, micro_batch_tokens=CUT, offload_optimizer=True, offload_parameters=parameters)


def checkpointed(bench: Bench, stage: int) -> dict[str, Any]:
    return trained(bench, "ggpo", stage, micro_batch_tokens=CUT, activation_checkpointing=True)


# --- running them -----------------------------------------------------------------------------------------------

Case = tuple[Any, ...]


def cases(ranks: int) -> Iterator[tuple[Case, Callable[[Bench], Any]]]:
    """Names and functions, first those whose checkpoints the other world waits for."""
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            yield ("resumed", stage, precision), lambda b, s=stage, p=precision: resumed(b, s, p)
    for stage in STAGES:
        for name in PRESETS:
            for budget in (WHOLE, CUT, ALL_CUT) if name == "ggpo" else (WHOLE, CUT) if ranks > 1 else (WHOLE,):
                yield (
                    ("trained", name, stage, budget),
                    lambda b, n=name, s=stage, t=budget: trained(b, n, s, micro_batch_tokens=t),
                )
        yield ("untied", stage), lambda b, s=stage: untied(b, s)
        yield ("fewer_groups", stage), lambda b, s=stage: fewer_groups_than_ranks(b, s)
        for kind, precision in (("loss", "fp32"), ("loss", "bf16"), ("gradient", "fp32")):
            yield (
                ("refusal", kind, stage, precision),
                lambda b, s=stage, k=kind, p=precision: refusal(b, s, k, p),
            )
        yield ("current_reference", stage), lambda b, s=stage: resumed_with_current_reference(b, s)
    for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")):
        yield ("reference", stage, precision), lambda b, s=stage, p=precision: refreshed_reference(b, s, p)
    for stage in (2, 3):
        yield ("stream", stage), lambda b, s=stage: streamed_weights(b, s)
    yield ("kept_whole",), small_parameters_kept_whole
    yield ("refused_checkpoints",), refused_checkpoints
    for stage, parameters in ((1, False), (2, False), (3, False), (3, True)):
        yield ("offloaded", stage, parameters), lambda b, s=stage, p=parameters: offloaded(b, s, p)
    for stage in STAGES:
        yield ("bf16", stage), lambda b, s=stage: bf16(b, s)
        if ranks == 1 and stage:
            yield ("many_equal_gradients", stage), lambda b, s=stage: many_equal_gradients(b, s)
        yield ("checkpointed", stage), lambda b, s=stage: checkpointed(b, s)
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            yield (
                ("other_ranks", stage, precision),
                lambda b, s=stage, p=precision: loaded_from_other_ranks(b, 3 - ranks, s, p),
            )


def wait_for_checkpoints(bench: Bench, limit: float = 300.0) -> None:
    """Until the other world has saved all of its own."""
    deadline = time.monotonic() + limit
    while not saved_mark(bench.folder, 3 - bench.world.size).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the other world has saved no checkpoints")
        time.sleep(0.1)


def saved_mark(folder: Path, ranks: int) -> Path:
    return folder / f"saved_{ranks}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.PATIENCE = timedelta(minutes=2)
    # The tiny model's parameters would all stay whole, and nothing be sharded.
    zero_engine.PERSISTENT = 0
    place = {key: int(os.environ[name]) for key, name in (("rank", "RANK"), ("size", "WORLD_SIZE"))}
    bench = Bench(folder, distributed.join(**place, local_rank=place["rank"]))
    path = folder / f"results_{place['size']}_{place['rank']}.pkl"
    for case, run in cases(place["size"]):
        if case[0] != "resumed":
            saved_mark(folder, place["size"]).touch()
        if case[0] == "other_ranks":
            wait_for_checkpoints(bench)
        started = time.monotonic()
        try:
            result = run(bench)
        except Exception:
            result = traceback.format_exc()
        with path.open("ab") as file:
            pickle.dump((case, result, time.monotonic() - started), file)
    distributed.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
