"""The timeline against event traces written by hand.

A trace has one word an update: S sync and C collect before it, `.` the update itself, and after it R refresh,
E evaluate, W save. A word of its own, E, is what happens before update 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from run_config import run_config

from grpo_lab.config import ConfigError
from grpo_lab.schedule import Schedule, prompts_at_a_time

COMBINATIONS = [(1, 1, 1), (1, 10, 1), (10, 1, 1), (8, 1, 8), (4, 1, 2), (2, 3, 1), (4, 2, 2), (6, 2, 3)]


def schedule(v: int, i: int = 1, per_collection: int | None = None, **changes: Any) -> Schedule:
    fields: dict[str, Any] = {
        "t_ref": None,
        "overlap": False,
        "updates": None,
        "epochs": None,
        "evaluate_every": None,
        "save_every": None,
        **changes,
    }
    return Schedule(v=v, i=i, minibatches_per_collection=per_collection or v, **fields)


def trace(timeline: Schedule, updates: int) -> str:
    words = ["E"] if timeline.evaluate(0) else []
    for u in range(updates):
        before = "S" * timeline.sync(u) + "C" * timeline.collect(u)
        after = "R" * timeline.refresh(u + 1) + "E" * timeline.evaluate(u + 1) + "W" * timeline.save(u + 1)
        words.append(f"{before}.{after}")
    return " ".join(words)


TRACES = [
    # on-policy
    pytest.param(schedule(1), "SC. SC. SC. SC.", id="v1 i1"),
    # each batch used ten times
    pytest.param(schedule(1, 10), "SC. . . . . . . . . . SC. . .", id="v1 i10"),
    # RG: fresh batches from a server that is ten behind
    pytest.param(schedule(10, 1, 1), "SC. C. C. C. C. C. C. C. C. C. SC. C. C.", id="v10 i1 one a collection"),
    # GG: one collection a sync
    pytest.param(schedule(8), "SC. . . . . . . . SC. .", id="v8 one collection"),
    pytest.param(schedule(4, 1, 2), "SC. . C. . SC. . C. . SC.", id="v4 two a collection"),
    pytest.param(schedule(2, 3, 1), "SC. . . C. . . SC. . . C. . .", id="v2 i3 one a collection"),
    pytest.param(schedule(4, 2, 2), "SC. . . . C. . . . SC. . . . C.", id="v4 i2 two a collection"),
    # refreshes count updates and ignore collections
    pytest.param(schedule(4, t_ref=3), "SC. . .R . SC. .R . . SC.R .", id="t_ref 3"),
    pytest.param(schedule(2, 2, t_ref=4), "SC. . . .R SC. . . .R SC.", id="t_ref 4 i2"),
    pytest.param(schedule(1, t_ref=1), "SC.R SC.R SC.R", id="t_ref 1"),
    # evaluation at 0 and at the end, saves at the end but not at 0; refresh, evaluate, save in this order
    pytest.param(
        schedule(7, updates=7, evaluate_every=3, save_every=2), "E SC. .W .E .W . .EW .EW", id="evaluate and save"
    ),
    pytest.param(schedule(2, updates=4, evaluate_every=2, save_every=4, t_ref=2), "E SC. .RE SC. .REW", id="all"),
    pytest.param(schedule(2, updates=2, evaluate_every=100, save_every=100), "E SC. .EW", id="only ends"),
]


@pytest.mark.parametrize(("timeline", "expected"), TRACES)
def test_traces(timeline: Schedule, expected: str) -> None:
    assert trace(timeline, sum("." in word for word in expected.split())) == expected


def test_a_refresh_inside_a_collection() -> None:
    """GG's N = 128 with T_ref = 160: the second collection (updates 128 to 255) changes reference after 32 updates."""
    timeline = schedule(128, t_ref=160)
    events = {
        u: "S" * timeline.sync(u) + "C" * timeline.collect(u) + "." + "R" * timeline.refresh(u + 1) for u in range(8000)
    }
    shown = {u: word for u, word in events.items() if word != "."}
    assert {u: word for u, word in shown.items() if u <= 640} == {
        0: "SC.",
        128: "SC.",
        159: ".R",
        256: "SC.",
        319: ".R",
        384: "SC.",
        479: ".R",
        512: "SC.",
        639: ".R",
        640: "SC.",
    }
    assert timeline.position_in_collection(160) == 32
    # The budget ends in the 63rd collection, of which 64 minibatches are used.
    assert sum("C" in word for word in shown.values()) == 63
    assert timeline.position_in_collection(7999) == 63


def test_epoch_refresh_waits_for_the_last_update_on_the_collection() -> None:
    timeline = schedule(4, 2, 2, t_ref="epoch", epochs=3)
    assert [u for u in range(1, 13) if timeline.refresh(u, epoch_completed=True)] == [4, 8, 12]
    assert not any(timeline.refresh(u) for u in range(1, 13))


def test_a_fixed_reference_is_never_refreshed() -> None:
    assert not any(schedule(4).refresh(u, epoch_completed=True) for u in range(1, 100))


# --- positions, ages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("v", "i", "per_collection"), COMBINATIONS)
def test_ages_run_from_zero_to_the_end_of_the_sync_period(v: int, i: int, per_collection: int) -> None:
    timeline = schedule(v, i, per_collection)
    ages = [u - timeline.last_sync(u) for u in range(3 * v * i)]
    assert ages == [*range(v * i)] * 3
    assert all(timeline.sync(timeline.last_sync(u)) for u in range(3 * v * i))


def test_the_oldest_age_with_overlap_is_a_collection_more() -> None:
    assert schedule(4, 1, 2).oldest_age == 3
    assert schedule(4, 1, 2, overlap=True).oldest_age == 5
    assert schedule(3, 2, 1, overlap=True).oldest_age == 7


def test_prompts_drawn_at_a_time_are_a_collections() -> None:
    config = run_config("schedule.v=8", "schedule.minibatches_per_collection=2", "collection.prompts_per_batch=null")
    assert prompts_at_a_time(config) == 2 * config.groups_per_minibatch
    config.collection.prompts_per_batch = 5
    assert prompts_at_a_time(config) == 5


def test_minibatches_passes_and_positions() -> None:
    timeline = schedule(4, 3, 2)
    span = range(13)
    assert [timeline.minibatch(u) for u in span] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert [timeline.pass_index(u) for u in span] == [0, 1, 2] * 4 + [0]
    assert [timeline.is_last_pass(u) for u in span] == [False, False, True] * 4 + [False]
    assert [timeline.position_in_collection(u) for u in span] == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(("v", "i", "per_collection"), COMBINATIONS)
def test_every_minibatch_is_gathered_just_before_its_first_pass_or_earlier(v: int, i: int, per_collection: int) -> None:
    timeline = schedule(v, i, per_collection)
    gathered = 0
    for u in range(3 * v * i):
        gathered += per_collection * timeline.collect(u)
        assert gathered - per_collection <= timeline.minibatch(u) < gathered
        assert timeline.collect(u) or not timeline.sync(u)


@pytest.mark.parametrize(
    ("timeline", "expected"),
    [
        (schedule(8), "........."),
        (schedule(1, 10), "............"),
        (schedule(1), "....."),
        # A collection at update 2 under the weights of update 0; that at 4 comes with a sync.
        (schedule(4, 1, 2), ".yy..yy.."),
        (schedule(10, 1, 1), ".yyyyyyyyy.yy"),
        (schedule(2, 3, 1), ".yyy...yyy..."),
        (schedule(6, 2, 3), ".yyyyyy......yyyyyy....."),
    ],
)
def test_whether_the_engine_must_get_its_weights_back_after_an_evaluation(timeline: Schedule, expected: str) -> None:
    assert "".join(".y"[timeline.samples_again_before_sync(u)] for u in range(len(expected))) == expected


@pytest.mark.parametrize(("v", "i", "per_collection"), COMBINATIONS)
def test_samples_again_is_the_next_collection_without_a_sync(v: int, i: int, per_collection: int) -> None:
    """By definition: going on from u, the first update that collects does not sync."""
    timeline = schedule(v, i, per_collection)
    for u in range(2 * v * i + 1):
        first = next(w for w in range(u, u + v * i + 1) if timeline.collect(w))
        assert timeline.samples_again_before_sync(u) == (not timeline.sync(first))


@pytest.mark.parametrize(("v", "i", "per_collection"), COMBINATIONS)
@pytest.mark.parametrize(("evaluate", "save"), [(None, None), (3, None), (None, 4), (5, 7)])
def test_weights_are_kept_where_something_may_displace_them(
    v: int, i: int, per_collection: int, evaluate: int | None, save: int | None
) -> None:
    """By definition, sync by sync: an evaluation or a save, and behind it a collection before the next sync."""
    timeline = replace(schedule(v, i, per_collection), evaluate_every=evaluate, save_every=save, updates=3 * v * i)
    for u in range(0, 3 * v * i, v * i):
        collections = [w for w in range(u + 1, u + v * i) if timeline.collect(w)]
        displaced = [w for w in range(u + 1, u + v * i + 1) if timeline.evaluate(w) or timeline.save(w)]
        assert timeline.displaces_engine(u) == any(w <= c for w in displaced for c in collections)


# --- blocks of GRPO+TIS -----------------------------------------------------------------------------------------

BLOCKS = [
    # One collection at N = 128: updates 8b .. 8b + 7.
    (schedule(128), 8, [*range(0, 256, 8)], 256),
    (schedule(8), 8, [0, 8, 16], 24),
    # Cut at a sync every 12 updates.
    (schedule(12), 8, [0, 8, 12, 16, 24, 32], 36),
    # Cut where the next minibatch has not been sampled yet.
    (schedule(6, 1, 3), 8, [0, 3, 6, 8, 9, 12, 15, 16], 18),
    (schedule(10, 1, 1), 8, [*range(20)], 20),
    (schedule(1, 10), 8, [0, 8, 10, 16, 20, 24], 30),
    (schedule(4, 4, 2), 8, [0, 8, 16, 24], 32),
    (schedule(4), 3, [0, 3, 4, 6, 8, 9], 12),
]


@pytest.mark.parametrize(("timeline", "size", "starts", "end"), BLOCKS)
def test_blocks(timeline: Schedule, size: int, starts: list[int], end: int) -> None:
    assert [u for u in range(end) if timeline.block_start(u, size)] == starts
    ends = [*starts[1:], end]
    for start, stop in zip(starts, ends, strict=True):
        assert [timeline.block_end(u, size) for u in range(start, stop)] == [stop] * (stop - start)
        # One sync and one collection cover a block, so that it can be scored at its start.
        assert not any(timeline.sync(u) or timeline.collect(u) for u in range(start + 1, stop))


# --- from the configuration -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("agro", 160),
        ("ggpo", 160),
        ("ggpo_clip", 160),
        ("ggpo_reward_only", None),
        ("grpo", None),
        ("grpo_rg", None),
        ("grpo_tis", None),
    ],
)
def test_t_ref_auto_follows_the_objective(name: str, expected: int | None) -> None:
    assert Schedule.from_config(run_config(f"objective={name}")).t_ref == expected


def test_words_and_numbers_of_the_configuration() -> None:
    config = run_config("objective=ggpo", "schedule.v=4", "schedule.i=2", "evaluation.every=5", "checkpoint.every=7")
    expected = Schedule(
        v=4,
        i=2,
        minibatches_per_collection=4,
        t_ref=160,
        overlap=False,
        updates=1024,
        epochs=None,
        evaluate_every=5,
        save_every=7,
    )
    assert Schedule.from_config(config) == expected
    for written, meant in ((320, 320), (None, None), ("epoch", "epoch"), ("auto", 160)):
        config.schedule.t_ref = written
        assert Schedule.from_config(config).t_ref == meant
    for written, meant in ((2, 2), ("v", 4)):
        config.schedule.minibatches_per_collection = written
        assert Schedule.from_config(config).minibatches_per_collection == meant
    config.schedule.epochs = 4
    budget = Schedule.from_config(config)
    assert (budget.updates, budget.epochs) == (None, 4)
    assert not budget.finished(10**6)


def test_with_a_pool_nothing_is_synced_and_no_block_is_cut() -> None:
    common = ("source=pool", "pool.path=p", "schedule.v=3", "schedule.updates=30")
    # Blocks of 8 updates and passes of 1, 2, 3: what is read at a time ends with a block, in the fewest minibatches.
    for i, read in ((1, 8), (2, 4), (3, 8), (16, 1)):
        schedule = Schedule.from_config(run_config("objective=grpo_tis", *common, f"schedule.i={i}"))
        assert (schedule.minibatches_per_collection, schedule.v) == (read, read)
        assert not any(schedule.sync(u) for u in range(100))
        assert [u for u in range(100) if schedule.block_start(u, 8)] == list(range(0, 100, 8))
        assert {schedule.last_sync(u) for u in range(100)} == {0}
        assert not any(schedule.samples_again_before_sync(u) for u in range(100))
    ggpo = Schedule.from_config(run_config("objective=ggpo", *common, "schedule.i=2"))
    assert (ggpo.minibatches_per_collection, ggpo.t_ref, ggpo.title) == (1, 160, "pool_i2")
    assert [u for u in range(8) if ggpo.collect(u)] == [0, 2, 4, 6]


def test_values_that_are_neither() -> None:
    config = run_config()
    for value in ("often", 1.5, True):
        config.schedule.t_ref = value
        with pytest.raises(ConfigError, match=rf"^schedule.t_ref={value} must be a number of updates, null, `epoch`"):
            Schedule.from_config(config)
    config.schedule.t_ref = None
    for value in ("w", 2.0, True, 0, -1):
        config.schedule.minibatches_per_collection = value
        with pytest.raises(ConfigError, match=rf"^schedule.minibatches_per_collection={value} must be `v` or a whole"):
            Schedule.from_config(config)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("on_policy", "SC. SC. SC."),
        ("default", "SC. . . . . . . . SC."),
        ("rg_reuse", "SC. . . . . . . . . . SC. ."),
        ("rg_off_policy", "SC. C. C. C. C. C. C. C. C. C. SC."),
    ],
)
def test_the_schedules_of_the_papers(option: str, expected: str) -> None:
    config = run_config("scale=paper", f"schedule={option}", "evaluation.every=null", "checkpoint.every=null")
    timeline = Schedule.from_config(config)
    assert timeline.updates == 8000
    assert trace(timeline, len(expected.split())) == expected


def test_the_end_of_the_budget() -> None:
    timeline = schedule(1, updates=5)
    assert [timeline.finished(u) for u in (0, 4, 5, 6)] == [False, False, True, True]
    assert not any(timeline.evaluate(u) or timeline.save(u) for u in range(7))
    saving = schedule(1, updates=5, save_every=2)
    assert [saving.save(u) for u in range(6)] == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    ("timeline", "begins"),
    [
        # Before each collection but the last: nothing is sampled that nobody would consume.
        (schedule(4, overlap=True, updates=12), [0, 4]),
        (schedule(4, overlap=True, updates=9), [0, 4]),
        (schedule(4, 2, overlap=True, updates=16), [0]),
        (schedule(4, per_collection=2, overlap=True, updates=8), [0, 2, 4]),
        (schedule(4, overlap=True, epochs=1), [0, 4, 8, 12]),
        (schedule(4, updates=12), []),
    ],
)
def test_a_collection_ahead_begins_where_one_is_still_wanted(timeline: Schedule, begins: list[int]) -> None:
    assert [u for u in range(16) if not timeline.finished(u) and timeline.collects_ahead(u)] == begins
