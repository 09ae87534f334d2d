"""From a configuration to the parts of a run, in the order that data flows through them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from grpo_lab.ahead import Ahead
from grpo_lab.collect import Collector, GroupSource
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.distributed import World
from grpo_lab.evaluation.benchmarks import some_of
from grpo_lab.evaluation.scoring import evaluation_sampling, training_sampling
from grpo_lab.hand_off import HandOff, check_hand_off
from grpo_lab.learner import Learner, build_learner
from grpo_lab.loop import Leading, Loop
from grpo_lab.models import prepare_model
from grpo_lab.objectives import build_objective
from grpo_lab.offline.proof import prove_pool
from grpo_lab.offline.source import Pool, PoolSource, check_prompts, load_pool
from grpo_lab.policy import load_tokenizer
from grpo_lab.prompts import PromptStream, Split, fitting_warnings, load_problems, render
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import DRIFT_TOLERANCE, RolloutEngine, build_rollout_engine
from grpo_lab.rollout.follower import FollowerEngine
from grpo_lab.rollout.spread import SpreadEngine
from grpo_lab.runstate import RunState
from grpo_lab.schedule import Schedule, prompts_at_a_time
from grpo_lab.tracking import QuietTracker, Tracker
from grpo_lab.types import Prompt


class Teller(Protocol):
    """Whom to tell what was found: a tracker, or a terminal."""

    def message(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...


def build_loop(config: TrainConfig, run_dir: Path, tracker: Tracker | QuietTracker, world: World) -> Loop:
    """Load data and model, and build everything that a run consists of, or this rank's part of it.

    Raises:
        ConfigError: data or model cannot be loaded, or do not fit together.
        EngineError: the rollout engine does not start.
    """
    schedule = Schedule.from_config(config)
    objective = build_objective(config.objective, max_response_tokens=config.rollout.max_response_tokens)
    # Before the learner loads: what a user can have got wrong shows first, and a model is made once.
    folder = world.lead(lambda: prepare_model(config, tracker.message))
    data = world.lead_alone(lambda: _load_data(config, folder, tracker))
    if config.evaluation.checkpoints:
        world.lead(lambda: check_hand_off(config, run_dir, folder))
    learner = build_learner(config, folder, world, needs_reference=objective.needs_reference, updates=schedule.updates)
    engine = _build_engine(config, folder, run_dir, world)
    if schedule.offline:
        _prove(world, learner, engine, None if data is None else data[0], tracker)
    return Loop(
        config=config,
        run_dir=run_dir,
        world=world,
        schedule=schedule,
        objective=objective,
        learner=learner,
        engine=engine,
        lead_sampling=engine.lead if isinstance(engine, SpreadEngine) else world.lead,
        leading=None if data is None else _build_leading(config, folder, engine, *data),
        hand_off=_build_hand_off(config, run_dir, tracker),
        tracker=tracker,
        state=RunState(),
    )


def _prove(
    world: World, learner: Learner, engine: RolloutEngine, data: Pool | list[Prompt] | None, tell: Teller
) -> None:
    """The spot check of a pool, which the leading rank has, by all of them."""

    def shown() -> Any:
        assert isinstance(data, Pool)
        return data.header, data.sample

    header, sample = world.lead(shown)
    prove_pool(learner, header, sample, tolerance=engine.drift_tolerance, say=tell.message, warn=tell.warning)


def _build_engine(config: TrainConfig, folder: str, run_dir: Path, world: World) -> RolloutEngine:
    """One engine of all ranks where each has one of its own (or a part of one); else the leading rank's. None to speak
    of where nothing is sampled: a pool is learned from, and never evaluated."""
    rollout = config.rollout
    if config.source == "pool" and config.evaluation.every is None:
        return FollowerEngine(drift_tolerance=DRIFT_TOLERANCE[config.learner.precision], dtype=torch.float32)
    if world.size > 1 and (rollout.engine == "hf" or rollout.vllm.mode == "in_process"):
        inner = build_rollout_engine(config, folder, run_dir, world)
        return SpreadEngine(
            inner, world, ranks_per_engine=1 if rollout.engine == "hf" else rollout.vllm.tensor_parallel
        )
    engine = world.lead_alone(lambda: build_rollout_engine(config, folder, run_dir, world))
    drift_tolerance, dtype = world.lead(lambda: (_held(engine).drift_tolerance, _held(engine).dtype))
    return engine or FollowerEngine(drift_tolerance=drift_tolerance, dtype=dtype)


def _held(engine: RolloutEngine | None) -> RolloutEngine:
    assert engine is not None, "the leading rank has an engine"
    return engine


def _build_leading(
    config: TrainConfig, folder: str, engine: RolloutEngine, data: Pool | list[Prompt], test_prompts: list[Prompt]
) -> Leading:
    verifier = build_verifier(config)
    source: GroupSource
    if isinstance(data, Pool):
        source = PoolSource(data, groups_per_minibatch=config.groups_per_minibatch)
    else:
        source = build_collector(config, engine, verifier, data)
    decode = load_tokenizer(folder, revision=config.model.revision).decode
    return Leading(source=source, ahead=Ahead(source), verifier=verifier, test_prompts=test_prompts, decode=decode)


def build_verifier(config: TrainConfig) -> Verifier:
    return Verifier(config.dataset.verifier, workers=config.verifier.workers, timeout=config.verifier.timeout)


def build_collector(
    config: TrainConfig, engine: RolloutEngine, verifier: Verifier, prompts: Sequence[Prompt]
) -> Collector:
    """What samples the groups that are trained on, from the start of the run's own order of prompts."""
    return Collector(
        PromptStream(prompts, seed=config.seed),
        engine,
        verifier,
        group_size=config.group_size,
        sampling=training_sampling(config),
        batch=prompts_at_a_time(config),
        max_batches=config.collection.max_batches,
        filter_mixed=config.objective.zero_variance == "filter",
        epochs=config.schedule.epochs,
        seed=config.seed,
    )


def _build_hand_off(config: TrainConfig, run_dir: Path, tracker: Tracker | QuietTracker) -> HandOff | None:
    """The leading rank's, where checkpoints are evaluated while the run trains."""
    if not config.evaluation.checkpoints or isinstance(tracker, QuietTracker):
        return None
    return HandOff(config, run_dir, tracker)


def _load_data(config: TrainConfig, folder: str, tell: Teller) -> tuple[Pool | list[Prompt], list[Prompt]]:
    """What is trained on, a pool or prompts to sample from, and the held-out prompts that evaluations score."""
    if config.source == "policy":
        split = load_split(config, tell)
        tokenizer = load_tokenizer(folder, revision=config.model.revision)
        return training_prompts(config, split, tokenizer, tell), _held_out_prompts(config, split, tokenizer, tell)
    assert config.pool.path is not None, "validated"
    pool = load_pool(Path(config.pool.path))
    tokenizer = load_tokenizer(folder, revision=config.model.revision)
    check_prompts(pool, config, tokenizer)
    tell.message(f"pool: {len(pool.groups)} groups, content {pool.header.content[:12]}, of {pool.header.dataset}")
    if config.evaluation.every is None:
        return pool, []
    test = _held_out_prompts(config, load_split(config, tell), tokenizer, tell)
    if shared := {prompt.id for prompt in test} & {group.prompt.id for group in pool.groups}:
        tell.warning(f"{len(shared)} of the {len(test)} held-out problems are in the pool: their scores are of no use")
    return pool, test


def load_split(config: TrainConfig, tell: Teller) -> Split:
    """The problems of the run's data set, with what was found on the way told."""
    split = load_problems(config.dataset)
    for line in split.warnings:
        tell.warning(line)
    tell.message("data: " + ", ".join(f"{name} {value}" for name, value in split.report.items()))
    return split


def training_prompts(config: TrainConfig, split: Split, tokenizer: Any, tell: Teller) -> list[Prompt]:
    """The training problems as prompts; those that are too long are told and left out.

    Raises:
        ConfigError: none is left, or too few for a pass.
    """
    limit = config.rollout.max_prompt_tokens
    train = render(split.train, config.dataset, tokenizer, max_prompt_tokens=limit)
    for line in fitting_warnings(config.dataset, train):
        tell.warning(line)
    if train.dropped:
        tell.warning(f"{train.dropped} training prompts are longer than rollout.max_prompt_tokens={limit}: dropped")
    batch = prompts_at_a_time(config)
    if config.schedule.epochs is not None and len(train.prompts) < batch:
        raise ConfigError(
            f"{len(train.prompts)} training prompts do not fill one batch of {batch}, and schedule.epochs "
            "drops incomplete ones: lower collection.prompts_per_batch, or set schedule.updates instead"
        )
    return train.prompts


def _held_out_prompts(config: TrainConfig, split: Split, tokenizer: Any, tell: Teller) -> list[Prompt]:
    if config.evaluation.every is None:
        return []
    limit = config.rollout.max_prompt_tokens
    if not split.test:
        raise ConfigError(
            f"dataset={config.dataset.name} has no held-out problems: set dataset.test_path or dataset.held_out, or "
            "evaluation.every=null"
        )
    problems = some_of(split.test, config.evaluation.problems)
    test = render(problems, config.dataset, tokenizer, max_prompt_tokens=limit)
    if test.dropped:
        tell.warning(f"{test.dropped} held-out prompts are longer than rollout.max_prompt_tokens={limit}: dropped")
    sampling = evaluation_sampling(config)
    tell.message(
        f"held out: {len(test.prompts)} problems, {config.evaluation.n} responses each at temperature "
        f"{sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}"
    )
    return test.prompts
