"""A pool sampled by a run's initial weights: what its first collections would be, one after the other, without a step
in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_lab.build import Teller, build_collector, build_verifier, load_split, training_prompts
from grpo_lab.collect import Collector, Exhausted
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.distributed import World
from grpo_lab.learner import Learner, build_learner
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.models import prepare_model
from grpo_lab.offline.header import Header, Sampler
from grpo_lab.offline.identity import template_hash, tokenizer_hash
from grpo_lab.offline.proof import weights_hash
from grpo_lab.policy import end_tokens, load_tokenizer
from grpo_lab.pool.draft import Draft
from grpo_lab.rollout import RolloutEngine, build_rollout_engine
from grpo_lab.schedule import Schedule
from grpo_lab.sync import hand_over, prove_by_scoring


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What both ways of making a pool begin with: the run's initial model as tokenizer and scorer, and the tokens that
    end its responses."""

    folder: str
    tokenizer: Any
    learner: TorchLearner
    ends: frozenset[int]


def build_parts(config: TrainConfig, tell: Teller) -> Parts:
    """Load the model that the configuration names."""
    folder = prepare_model(config, tell.message)
    learner = build_learner(config, folder, World(), needs_reference=False, updates=None)
    assert isinstance(learner, TorchLearner), "one process has the embedded learner"
    tokenizer = load_tokenizer(folder, revision=config.model.revision)
    return Parts(folder=folder, tokenizer=tokenizer, learner=learner, ends=end_tokens(learner.policy.model, tokenizer))


def record(config: TrainConfig, draft: Draft, *, wanted: int, version: int, tell: Teller) -> Header:
    """Sample `wanted` groups by the training collector's rules, a collection at a time, and finish the draft.

    Raises:
        ConfigError: data or model cannot be loaded, or the prompts are used up.
        CollectionError: a collection could not be filled.
        SyncError: the sampler's log-probs are not those of its weights.
    """
    parts = build_parts(config, tell)
    prompts = training_prompts(config, load_split(config, tell), parts.tokenizer, tell)
    engine = build_rollout_engine(config, parts.folder, draft.folder, World())
    try:
        with build_verifier(config) as verifier:
            collector = build_collector(config, engine, verifier, prompts)
            _sample(config, draft, collector, parts.learner, engine, wanted=wanted, version=version, tell=tell)
        tolerance = engine.drift_tolerance
    finally:
        # Before the draft becomes the pool: an engine's log and weights in transit are no part of it.
        engine.close()
    return draft.finish(
        config,
        Sampler(
            model=parts.folder,
            weights=weights_hash(parts.learner),
            version=version,
            engine=config.rollout.engine,
            logprobs="recorded",
            tolerance=tolerance,
        ),
        order="sampled",
        tokenizer=tokenizer_hash(parts.tokenizer),
        template=template_hash(config.dataset, parts.tokenizer),
        drawn={
            "groups": collector.drawn_groups,
            "responses": collector.total_responses,
            "tokens": collector.total_tokens,
        },
    )


def _sample(
    config: TrainConfig,
    draft: Draft,
    collector: Collector,
    learner: Learner,
    engine: RolloutEngine,
    *,
    wanted: int,
    version: int,
    tell: Teller,
) -> None:
    if draft.state is not None:
        collector.load_state(draft.state)
        tell.message(f"going on behind {draft.groups} of {wanted} groups")
    at_once = Schedule.from_config(config).minibatches_per_collection * config.groups_per_minibatch
    hand_over(engine, learner.weights(), version=version)
    proved = False
    while draft.groups < wanted:
        gathered = collector.collect(min(at_once, wanted - draft.groups))
        if isinstance(gathered, Exhausted):
            raise ConfigError(
                f"the prompts of schedule.epochs={config.schedule.epochs} gave {draft.groups} groups, and groups="
                f"{wanted} are wanted: leave schedule.epochs out, or ask for fewer"
            )
        if not proved:
            drift = prove_by_scoring(learner, engine, gathered.groups)
            tell.message(
                f"the sampler's log-probs are its weights': scored again they differ by {drift:.2g} nats a token"
            )
            proved = True
        draft.add(gathered.groups, collector.state())
        row = gathered.accounting
        tell.message(
            f"{draft.groups} of {wanted} groups; of those drawn {row['collect/mixed_fraction']:.0%} were mixed, mean "
            f"reward {row['reward/drawn']:.3f}"
        )
