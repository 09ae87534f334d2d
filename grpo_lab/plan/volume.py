"""Prompts, responses and tokens: of a collection, of an update, and in all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_lab.composition import dataset_config
from grpo_lab.config import ArithmeticConfig, ConfigError, DatasetConfig, MixtureConfig, TableConfig, TrainConfig
from grpo_lab.schedule import Schedule, prompts_at_a_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean tokens of a prompt and of a response, as far as they are known; the run's limits where they are not."""

    prompt: float
    response: float
    evaluated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """One collection. `batches` of `prompts` prompts are drawn for the `groups` that are kept."""

    groups: int
    prompts: int
    batches: int
    responses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Responses and their tokens. `used` of an update count once, in however many passes they are learned from.
    `evaluated` is None where the number of held-out problems is not known."""

    collection: Collection
    used_responses: int
    used_tokens: float
    drawn_responses: float
    drawn_tokens: float
    total_responses: int
    total_tokens: float
    evaluated_responses: int | None
    evaluated_tokens: float | None


def lengths_of(config: TrainConfig, *, prompt: float | None, response: float | None) -> Lengths:
    """`prompt` and `response` are means that are known, or None.

    Raises:
        ConfigError: one is above the run's limit.
    """
    rollout = config.rollout
    for name, mean, limit in (
        ("prompt", prompt, rollout.max_prompt_tokens),
        ("response", response, rollout.max_response_tokens),
    ):
        if mean is not None and mean > limit:
            raise ConfigError(
                f"lengths.{name}={mean:g} is above the run's own limit, rollout.max_{name}_tokens={limit}"
            )
    evaluated = response or config.evaluation.max_tokens or rollout.max_response_tokens
    return Lengths(
        prompt=prompt or rollout.max_prompt_tokens,
        response=response or rollout.max_response_tokens,
        evaluated=evaluated,
    )


def collection_of(config: TrainConfig, *, mixed: float) -> Collection:
    """`mixed`: the share of drawn groups whose rewards differ; it counts where the others are filtered out.

    Raises:
        ConfigError: so few are mixed that collection.max_batches batches do not fill a collection.
    """
    groups = Schedule.from_config(config).minibatches_per_collection * config.groups_per_minibatch
    prompts = prompts_at_a_time(config)
    kept = prompts * (mixed if config.objective.zero_variance == "filter" else 1.0)
    if kept == 0:
        raise ConfigError("none of the groups is mixed: objective.zero_variance=filter could fill no collection")
    batches = math.ceil(groups / kept - 1e-9)
    if batches > config.collection.max_batches:
        raise ConfigError(
            f"with {mixed:.3g} of the groups mixed a collection of {groups} groups takes {batches} batches of {prompts}"
            f" prompts, and collection.max_batches={config.collection.max_batches}"
        )
    return Collection(groups=groups, prompts=prompts, batches=batches, responses=batches * prompts * config.group_size)


def updates_of(config: TrainConfig, collection: Collection) -> int:
    """The budget in updates.

    Raises:
        ConfigError: it is in epochs, and the configuration does not tell how many problems there are.
    """
    schedule = Schedule.from_config(config)
    if schedule.updates is not None:
        return schedule.updates
    assert schedule.epochs is not None, "validated"
    problems = problems_of(config.dataset)
    if problems is None:
        raise ConfigError(
            f"schedule.epochs={schedule.epochs}: how many problems dataset={config.dataset.name} has is not known here;"
            " plan with schedule.epochs=null schedule.updates=N"
        )
    batches = schedule.epochs * (problems // collection.prompts)
    updates = batches // collection.batches * schedule.minibatches_per_collection * schedule.i
    if updates == 0:
        raise ConfigError(
            f"schedule.epochs={schedule.epochs} of {problems} problems do not fill one collection of "
            f"{collection.groups} groups: lower schedule.minibatches_per_collection or collection.prompts_per_batch"
        )
    return updates


def problems_of(dataset: DatasetConfig) -> int | None:
    """Training problems, as far as the configuration tells."""
    if isinstance(dataset, ArithmeticConfig):
        return dataset.train_problems
    if isinstance(dataset, MixtureConfig):
        return dataset.expected_fitting or dataset.expected_unique or dataset.expected_rows
    if isinstance(dataset, TableConfig) and dataset.expected_rows is not None:
        return round(dataset.expected_rows * (1 - dataset.held_out))
    return None


def held_out_of(dataset: DatasetConfig) -> int | None:
    """Held-out problems, as far as the configuration tells."""
    if isinstance(dataset, ArithmeticConfig):
        return dataset.test_problems
    if isinstance(dataset, MixtureConfig) and dataset.test_set is not None:
        return held_out_of(dataset_config(dataset.test_set))
    if isinstance(dataset, TableConfig) and (dataset.test_path is not None or dataset.test_split is not None):
        return dataset.expected_test_rows
    if isinstance(dataset, TableConfig) and dataset.expected_rows is not None and dataset.held_out > 0:
        return round(dataset.expected_rows * dataset.held_out)
    return None


def evaluated_problems(config: TrainConfig) -> int | None:
    """Problems of one evaluation; 0 where there is none, None where it is not known."""
    if config.evaluation.every is None:
        return 0
    known = [count for count in (config.evaluation.problems, held_out_of(config.dataset)) if count is not None]
    return min(known, default=None)


def volume(
    config: TrainConfig, collection: Collection, lengths: Lengths, *, collections: int, evaluations: int
) -> Volume:
    """What `collections` collections and `evaluations` evaluations come to."""
    schedule = Schedule.from_config(config)
    per_update = collection.responses / (schedule.minibatches_per_collection * schedule.i)
    used = config.groups_per_minibatch * config.group_size
    problems = evaluated_problems(config)
    evaluated = None if problems is None else problems * config.evaluation.n * evaluations
    return Volume(
        collection=collection,
        used_responses=used,
        used_tokens=used * lengths.response,
        drawn_responses=per_update,
        drawn_tokens=per_update * lengths.response,
        total_responses=collections * collection.responses,
        total_tokens=collections * collection.responses * lengths.response,
        evaluated_responses=evaluated,
        evaluated_tokens=None if evaluated is None else evaluated * lengths.evaluated,
    )


def completes_epoch(config: TrainConfig, collection: Collection, done: int) -> bool:
    """Whether the collection just consumed after `done` updates holds the end of a pass over the prompts, by the mean
    number of prompts a collection draws; False where the number of problems is not known."""
    problems = problems_of(config.dataset)
    if problems is None:
        return False
    if config.schedule.epochs is not None:
        # A pass ends with its last full batch.
        problems = problems // collection.prompts * collection.prompts
    schedule = Schedule.from_config(config)
    collected = -(-done // (schedule.minibatches_per_collection * schedule.i))
    drawn = collection.batches * collection.prompts
    return collected * drawn // problems > (collected - 1) * drawn // problems
