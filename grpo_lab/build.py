"""From a configuration to the parts of a run, in the order that data flows through them."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.collect import Collector
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.evaluation import evaluation_sampling
from grpo_lab.learner import build_learner
from grpo_lab.loop import Loop
from grpo_lab.models import prepare_model
from grpo_lab.objectives import build_objective
from grpo_lab.policy import load_tokenizer
from grpo_lab.prompts import PromptStream, fitting_warnings, load_problems, render
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import build_rollout_engine
from grpo_lab.runstate import RunState
from grpo_lab.schedule import Schedule
from grpo_lab.seeds import derive
from grpo_lab.tracking import Tracker
from grpo_lab.types import Prompt, Sampling


def build_loop(config: TrainConfig, run_dir: Path, tracker: Tracker) -> Loop:
    """Load data and model, and build everything that a run consists of.

    Raises:
        ConfigError: data or model cannot be loaded, or do not fit together.
    """
    schedule = Schedule.from_config(config)
    objective = build_objective(config.objective, max_response_tokens=config.rollout.max_response_tokens)
    folder = prepare_model(config, tracker.message)
    train_prompts, test_prompts = _load_prompts(config, folder, tracker)
    batch = config.collection.prompts_per_batch or schedule.minibatches_per_collection * config.groups_per_minibatch
    if schedule.epochs is not None and len(train_prompts) < batch:
        raise ConfigError(
            f"{len(train_prompts)} training prompts do not fill one batch of {batch}, and schedule.epochs drops "
            "incomplete ones: lower collection.prompts_per_batch, or set schedule.updates instead"
        )
    learner = build_learner(config, folder, needs_reference=objective.needs_reference, updates=schedule.updates)
    engine = build_rollout_engine(config, folder)
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
        batch=batch,
        max_batches=config.collection.max_batches,
        filter_mixed=config.objective.zero_variance == "filter",
        epochs=schedule.epochs,
        seed=config.seed,
    )
    tokenizer = load_tokenizer(folder, revision=config.model.revision)
    return Loop(
        config=config,
        run_dir=run_dir,
        schedule=schedule,
        objective=objective,
        learner=learner,
        engine=engine,
        collector=collector,
        tracker=tracker,
        test_prompts=test_prompts,
        decode=tokenizer.decode,
        state=RunState(),
    )


def _load_prompts(config: TrainConfig, folder: str, tracker: Tracker) -> tuple[list[Prompt], list[Prompt]]:
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
    if config.evaluation.every is None:
        return train.prompts, []
    if not split.test:
        raise ConfigError(
            f"dataset={config.dataset.name} has no held-out problems: set dataset.test_path or dataset.held_out, or "
            "evaluation.every=null"
        )
    problems = split.test
    if config.evaluation.problems is not None and config.evaluation.problems < len(problems):
        # The same subset for every seed: chosen by the problems' own hashes.
        chosen = sorted(problems, key=lambda problem: derive(0, "held out", problem.id))
        problems = chosen[: config.evaluation.problems]
    test = render(problems, config.dataset, tokenizer, max_prompt_tokens=limit)
    if test.dropped:
        tracker.warning(f"{test.dropped} held-out prompts are longer than rollout.max_prompt_tokens={limit}: dropped")
    sampling = evaluation_sampling(config)
    tracker.message(
        f"held out: {len(test.prompts)} problems, {config.evaluation.n} responses each at temperature "
        f"{sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k or 'off'}"
    )
    return train.prompts, test.prompts
