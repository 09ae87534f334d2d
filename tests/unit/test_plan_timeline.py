"""When what happens, and how many responses that makes, by hand."""

from __future__ import annotations

import pytest
from run_config import run_config

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.plan.timeline import Timeline, timeline
from grpo_lab.plan.volume import (
    collection_of,
    completes_epoch,
    evaluated_problems,
    lengths_of,
    problems_of,
    updates_of,
    volume,
)
from grpo_lab.schedule import Schedule


def line_of(config: TrainConfig, *, mixed: float = 1.0) -> Timeline:
    collection = collection_of(config, mixed=mixed)
    return timeline(
        Schedule.from_config(config),
        updates=updates_of(config, collection),
        completes_epoch=lambda done: completes_epoch(config, collection, done),
    )


def test_counts_over_the_budget() -> None:
    config = run_config(
        "objective=ggpo",
        "schedule.v=4",
        "schedule.i=2",
        "schedule.minibatches_per_collection=2",
        "schedule.t_ref=5",
        "schedule.updates=20",
        "evaluation.every=6",
        "checkpoint.every=8",
    )
    line = line_of(config)
    # Syncs before 0, 8, 16; collections before 0, 4, ... 16; refreshes after 5, 10, 15, 20; evaluations at 0, 6, 12, 18
    # and the end; saves after 8, 16 and at the end.
    assert line.counts == {"evaluate": 5, "sync": 3, "collect": 5, "step": 20, "refresh": 4, "save": 3}
    assert line.every == {"evaluate": 6, "sync": 8, "collect": 4, "step": 1, "refresh": 5, "save": 8}
    assert line.oldest == 7
    assert line.opening[:5] == (
        "before update 0: evaluate",
        "update 0: sync, collect, step",
        "updates 1 to 3: step",
        "update 4: collect, step, refresh",
        "update 5: step, evaluate",
    )


def test_overlap_makes_samples_older() -> None:
    assert line_of(run_config("schedule.v=8")).oldest == 7
    assert line_of(run_config("schedule.v=8", "schedule.overlap=true")).oldest == 15


def test_a_budget_in_epochs() -> None:
    config = run_config(
        "dataset.train_problems=1000",
        "schedule.epochs=3",
        "schedule.v=2",
        "schedule.t_ref=epoch",
        "groups_per_minibatch=32",
        "evaluation.every=10",
        "checkpoint.every=null",
    )
    # 64 prompts a collection of two updates, 15 whole batches a pass; the rest of a pass is dropped.
    assert updates_of(config, collection_of(config, mixed=1.0)) == 90
    line = line_of(config)
    assert line.counts["refresh"] == 3
    assert line.counts["collect"] == line.counts["sync"] == 45
    # Half of the groups are of equal rewards: twice the batches a collection, so half the updates.
    assert line_of(config, mixed=0.5).updates == 44


def test_the_last_epoch_ends_with_an_evaluation_and_a_save() -> None:
    config = run_config(
        "dataset.train_problems=64", "schedule.epochs=1", "schedule.v=2", "evaluation.every=50", "checkpoint.every=50"
    )
    counts = line_of(config).counts
    assert (counts["step"], counts["evaluate"], counts["save"]) == (2, 2, 1)


def test_epochs_of_an_unknown_number_of_problems_are_refused() -> None:
    config = run_config("dataset=orz_math", "model=qwen2_5_7b", "schedule.epochs=1")
    assert problems_of(config.dataset) is None
    with pytest.raises(ConfigError, match="how many problems dataset=orz_math has is not known"):
        line_of(config)


def test_epochs_that_fill_no_collection_are_refused() -> None:
    config = run_config("dataset.train_problems=100", "schedule.epochs=1", "schedule.v=8")
    with pytest.raises(ConfigError, match="do not fill one collection of 256 groups"):
        line_of(config)


def test_responses_and_tokens() -> None:
    config = run_config(
        "schedule.v=4",
        "schedule.i=2",
        "schedule.updates=16",
        "groups_per_minibatch=8",
        "group_size=4",
        "collection.prompts_per_batch=20",
        "evaluation.problems=10",
        "evaluation.n=8",
    )
    # 32 groups of 20 x 0.7 = 14 mixed a batch: three batches, 60 prompts, 240 responses for 8 updates.
    collection = collection_of(config, mixed=0.7)
    assert (collection.groups, collection.batches, collection.responses) == (32, 3, 240)
    lengths = lengths_of(config, prompt=8, response=10)
    drawn = volume(config, collection, lengths, collections=2, evaluations=3)
    assert (drawn.used_responses, drawn.used_tokens) == (32, 320)
    assert (drawn.drawn_responses, drawn.drawn_tokens) == (30, 300)
    assert (drawn.total_responses, drawn.total_tokens) == (480, 4800)
    assert (drawn.evaluated_responses, drawn.evaluated_tokens) == (240, 2400)


def test_groups_that_are_not_filtered_are_all_kept() -> None:
    config = run_config("objective.zero_variance=mask")
    assert collection_of(config, mixed=0.01).batches == 1
    # A share that divides evenly takes no batch more by rounding.
    assert collection_of(run_config(), mixed=1 / 3).batches == 3


def test_too_few_mixed_groups_are_refused_before_the_run_is() -> None:
    with pytest.raises(ConfigError, match=r"takes 100 batches of 256 prompts, and collection\.max_batches=32"):
        collection_of(run_config(), mixed=0.01)


def test_lengths_stay_within_the_runs_limits() -> None:
    config = run_config("evaluation.max_tokens=64")
    lengths = lengths_of(config, prompt=None, response=None)
    assert (lengths.prompt, lengths.response, lengths.evaluated) == (32, 32, 64)
    with pytest.raises(ConfigError, match=r"lengths\.response=33 is above .*rollout\.max_response_tokens=32"):
        lengths_of(config, prompt=None, response=33)


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        (["evaluation.problems=100"], 100),
        (["evaluation.problems=null"], 512),
        (["evaluation.every=null"], 0),
        (["scale=paper"], 500),
        (["dataset=math500", "model=smollm2_135m", "evaluation.problems=null"], 500),
        (["dataset=gsm8k", "model=smollm2_135m", "evaluation.problems=null"], 1319),
        (["dataset=deepscaler", "model=smollm2_135m", "evaluation.problems=null"], None),
    ],
)
def test_held_out_problems_as_far_as_they_are_known(overrides: list[str], problems: int | None) -> None:
    assert evaluated_problems(run_config(*overrides)) == problems
