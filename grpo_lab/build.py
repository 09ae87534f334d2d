"""From a configuration to the parts of a run, in the order that data flows through them."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.ahead import Ahead
from grpo_lab.collect import Collector
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.distributed import World
from grpo_lab.evaluation.benchmarks import some_of
from grpo_lab.evaluation.scoring import evaluation_sampling
from grpo_lab.hand_off import HandOff, check_hand_off
from grpo_lab.learner import build_learner
from grpo_lab.loop import Leading, Loop
from grpo_lab.models import prepare_model
from grpo_lab.objectives import build_objective
from grpo_lab.policy import load_tokenizer
from grpo_lab.prompts import PromptStream, fitting_warnings, load_problems, render
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine, build_rollout_engine
from grpo_lab.rollout.follower import FollowerEngine
from grpo_lab.rollout.spread import SpreadEngine
from grpo_lab.runstate import RunState
from grpo_lab.schedule import Schedule
from grpo_lab.tracking import QuietTracker, Tracker
from grpo_lab.types import Prompt, Sampling


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
    prompts = world.lead_alone(lambda: _load_prompts(config, folder, tracker))
    if config.evaluation.checkpoints:
        world.lead(lambda: check_hand_off(config, run_dir, folder))
    learner = build_learner(config, folder, world, needs_reference=objective.needs_reference, updates=schedule.updates)
    engine = _build_engine(config, folder, run_dir, world)
    return Loop(
        config=config,
        run_dir=run_dir,
        world=world,
        schedule=schedule,
        objective=objective,
        learner=learner,
        engine=engine,
        lead_sampling=engine.lead if isinstance(engine, SpreadEngine) else world.lead,
        leading=None if prompts is None else _build_leading(config, folder, engine, *prompts),
        hand_off=_build_hand_off(config, run_dir, tracker),
        tracker=tracker,
        state=RunState(),
    )


def _build_engine(config: TrainConfig, folder: str, run_dir: Path, world: World) -> RolloutEngine:
    """One engine of all ranks where each has one of its own (or a part of one); else the leading rank's."""
    rollout = config.rollout
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
    config: TrainConfig, folder: str, engine: RolloutEngine, train_prompts: list[Prompt], test_prompts: list[Prompt]
) -> Leading:
    schedule = Schedule.from_config(config)
    collector = Collector(
        PromptStream(train_prompts, seed=config.seed),
        engine,
        Verifier(config.dataset.verifier, workers=config.verifier.workers, timeout=config.verifier.timeout),
        group_size=config.group_size,
        sampling=Sampling(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_tokens,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
        ),
        batch=_batch(config),
        max_batches=config.collection.max_batches,
        filter_mixed=config.objective.zero_variance == "filter",
        epochs=schedule.epochs,
        seed=config.seed,
    )
    decode = load_tokenizer(folder, revision=config.model.revision).decode
    return Leading(collector=collector, ahead=Ahead(collector), test_prompts=test_prompts, decode=decode)


def _build_hand_off(config: TrainConfig, run_dir: Path, tracker: Tracker | QuietTracker) -> HandOff | None:
    """The leading rank's, where checkpoints are evaluated while the run trains."""
    if not config.evaluation.checkpoints or isinstance(tracker, QuietTracker):
        return None
    return HandOff(config, run_dir, tracker)


def _batch(config: TrainConfig) -> int:
    """Prompts drawn at a time."""
    schedule = Schedule.from_config(config)
    return config.collection.prompts_per_batch or schedule.minibatches_per_collection * config.groups_per_minibatch


def _load_prompts(
    config: TrainConfig, folder: str, tracker: Tracker | QuietTracker
) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts, and the held-out ones that evaluations score."""
    split = load_problems(config.dataset)
    for line in split.warnings:
        tracker.warning(line)
    tracker.message("data: " + ", ".join(f"{name} {value}" for name, value in split.report.items()))
    tokenizer = load_tokenizer(folder, revision=config.model.revision)
    limit = config.rollout.max_prompt_tokens
    train = render(split.train, config.dataset, tokenizer, max_prompt_tokens=limit)
    for line in fitting_warnings(config.dataset, train):
        tracker.warning(line)
    if train.dropped:
        tracker.warning(f"{train.dropped} training prompts are longer than rollout.max_prompt_tokens={limit}: dropped")
    if config.schedule.epochs is not None and len(train.prompts) < _batch(config):
        raise ConfigError(
            f"{len(train.prompts)} training prompts do not fill one batch of {_batch(config)}, and schedule.epochs "
            "drops incomplete ones: lower collection.prompts_per_batch, or set schedule.updates instead"
        )
    if config.evaluation.every is None:
        return train.prompts, []
    if not split.test:
        raise ConfigError(
            f"dataset={config.dataset.name} has no held-out problems: set dataset.test_path or dataset.held_out, or "
            "evaluation.every=null"
        )
    problems = some_of(split.test, config.evaluation.problems)
    test = render(problems, config.dataset, tokenizer, max_prompt_tokens=limit)
    if test.dropped:
        tracker.warning(f"{test.dropped} held-out prompts are longer than rollout.max_prompt_tokens={limit}: dropped")
    sampling = evaluation_sampling(config)
    tracker.message(
        f"held out: {len(test.prompts)} problems, {config.evaluation.n} responses each at temperature "
        f"{sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}"
    )
    return train.prompts, test.prompts
