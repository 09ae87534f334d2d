"""Options, rates, hours and the bound, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_config import run_config

from grpo_lab.composition import save_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.plan.hours import least_v
from grpo_lab.plan.options import Options, take_options
from grpo_lab.plan.probe import UPDATES, probe_words
from grpo_lab.plan.rates import measured
from grpo_lab.plan.report import Plan, make_plan
from grpo_lab.schedule import speedup_bound
from grpo_lab.validation import validate


def plan(*overrides: str, **options: Any) -> Plan:
    return make_plan(run_config(*overrides), overrides, Options(**options))


# --- options ----------------------------------------------------------------------------------------------------


def test_the_plans_own_words_are_taken_off() -> None:
    words = ["objective=ggpo", "rates.sample=2e3", "rates.learn=500", "rates.sync=1.5", "json=true", "mixed=0.5"]
    options, rest = take_options([*words, "lengths.response=700", "gpu_gib=40", "--cfg", "job", "seed=1"])
    assert options == Options(sample=2000, learn=500, sync=1.5, json=True, mixed=0.5, response_tokens=700, gpu_gib=40)
    # What is not the plan's is Hydra's, which knows what is wrong with it.
    assert rest == ["objective=ggpo", "--cfg", "job", "seed=1"]
    assert take_options(["rates.speed=1", "probes=true"]) == (Options(), ["rates.speed=1", "probes=true"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe=yes"], "probe=yes must be true or false"),
        (["rates.sample=fast", "rates.learn=1"], "rates.sample=fast must be a number above 0"),
        (["gpu_gib=-1"], "gpu_gib=-1 must be a number above 0"),
        (["lengths.prompt=nan"], "lengths.prompt=nan must be a number above 0"),
        (["mixed=1.5"], "mixed=1.5 must lie in"),
        (["probe=true", "from_run=x"], "give one of them"),
        (["from_run=x", "rates.sample=1", "rates.learn=1"], "give one of them"),
        (["rates.sample=1"], "rates.sample= and rates.learn= go together"),
        (["rates.sync=1"], "rates.sync= needs rates.sample= and rates.learn="),
    ],
)
def test_values_that_do_not_fit_are_named(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        take_options(words)
    assert "\n" not in str(raised.value)


# --- the bound --------------------------------------------------------------------------------------------------


def test_the_bound_by_hand() -> None:
    # 10 seconds, of which 4 sync: v = 2 takes 16 for two, v = 4 takes 28 for four, at best 6 each.
    assert speedup_bound(10, 4, 1) == 1
    assert speedup_bound(10, 4, 2) == pytest.approx(20 / 16)
    assert speedup_bound(10, 4, 4) == pytest.approx(40 / 28)
    # Of a gain of 2/3, 90 % is 0.6: x = 1 - 1/v with 10 / (10 - 4 x) = 1.6, x = 0.9375.
    assert least_v(10, 4, share=0.9) == 16
    assert least_v(10, 4, share=0.5) == 3
    assert least_v(10, 0, share=0.9) == 1


def test_the_bound_holds_for_rgs_run() -> None:
    """RG's 7B run: 0.02828 iterations a second at v = 1, 0.03828 at v = 10, 1.35 times."""
    step = 1 / 0.02828
    sync = (step - 1 / 0.03828) / (1 - 1 / 10)
    assert speedup_bound(step, sync, 10) == pytest.approx(1.35, abs=0.005)
    # 10.3 of 35.4 seconds: without any sync it would be 1.41 times.
    assert step / (step - sync) == pytest.approx(1.409, abs=0.001)


# --- hours ------------------------------------------------------------------------------------------------------

RUN = (
    "schedule.v=4",
    "schedule.i=2",
    "schedule.updates=16",
    "groups_per_minibatch=8",
    "group_size=4",
    "evaluation.every=8",
    "evaluation.problems=10",
    "evaluation.n=8",
    "checkpoint.every=null",
)
# 428,672 parameters and the tied matrix once more, in FP32.
STREAM = 4 * (428_672 + 128 * 15)


def test_hours_at_stated_rates() -> None:
    told = plan(*RUN, sample=64, learn=32, sync=STREAM / 1e9 / 3, response_tokens=10)
    assert told.hours is not None
    # A collection of 128 responses, 1280 tokens; an update uses 32 responses, 320 tokens.
    assert told.hours.collect == pytest.approx(20)
    assert told.hours.learn == pytest.approx(10)
    assert told.hours.sync == pytest.approx(3)
    # 80 responses of 10 tokens in each of three evaluations.
    assert told.hours.evaluate == pytest.approx(12.5)
    assert told.hours.per_update == pytest.approx(3 / 8 + 20 / 8 + 10)
    seconds = {name: 3600 * each for name, each in told.hours.phases.items()}
    assert seconds == pytest.approx({"sync": 6, "collect": 40, "learn": 160, "evaluate": 37.5, "save": 0})
    assert 3600 * told.hours.total == pytest.approx(243.5)
    assert told.bound is not None
    # At v = 1 a minibatch has a sync, a quarter of the collection, and two updates.
    assert told.bound.step == pytest.approx(3 + 5 + 20)
    assert told.bound.speedups[2] == pytest.approx(56 / 53)
    assert told.bound.limit == pytest.approx(28 / 25)


def test_overlap_hides_the_shorter_of_sampling_and_learning() -> None:
    told = plan(*RUN, "schedule.overlap=true", sample=64, learn=32, sync=STREAM / 1e9 / 3, response_tokens=10)
    assert told.hours is not None
    assert told.hours.per_update == pytest.approx(3 / 8 + 10)
    assert 3600 * told.hours.phases["collect and learn"] == pytest.approx(160)
    assert told.bound is not None
    assert told.bound.step == pytest.approx(3 + 20)


def test_rates_are_of_a_device() -> None:
    settings = ("scale=paper", "groups_per_minibatch=64", "evaluation.every=null")
    server = plan(*settings, "hardware=8gpu_server", sample=100, learn=100)
    shared = plan(*settings, "hardware=8gpu_colocate_tp4", sample=100, learn=100)
    assert server.hours is not None
    assert shared.hours is not None
    # One GPU samples and seven learn; or eight do both.
    assert server.hours.collect == pytest.approx(8 * shared.hours.collect)
    assert server.hours.learn == pytest.approx(8 / 7 * shared.hours.learn)


def test_ranks_without_rows_learn_nothing() -> None:
    settings = ("scale=paper", "hardware=2node", "evaluation.every=null")
    few = plan(*settings, "hardware.ranks=32", "hardware.nodes=4", sample=1, learn=1)
    many = plan(*settings, "hardware.ranks=64", "hardware.nodes=8", sample=1, learn=1)
    assert few.hours is not None
    assert many.hours is not None
    assert many.hours.learn == few.hours.learn
    assert any("32 ranks have nothing to learn from" in note for note in many.notes)
    assert not any("nothing to learn from" in note for note in few.notes)


def test_without_a_rate_there_are_no_hours() -> None:
    told = plan(*RUN)
    assert told.rates is None
    assert told.hours is None
    assert told.bound is None
    assert any("lengths.response=" in note for note in told.notes)
    assert any("mixed=" in note for note in told.notes)


def test_a_plan_of_a_run_that_could_not_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must divide schedule\.v=8"):
        plan("schedule.minibatches_per_collection=3")
    with pytest.raises(ConfigError, match="resume= goes on with a run"):
        plan("resume=somewhere")


def test_warnings_of_a_run_are_in_its_plan() -> None:
    told = plan("objective=ggpo", "schedule.v=8", "schedule.t_ref=4")
    assert any("is shorter than a sync period of 8 updates" in note for note in told.notes)


# --- rates of a run ---------------------------------------------------------------------------------------------


def write_run(folder: Path, config: TrainConfig, rows: list[dict[str, Any]], **seconds: float) -> None:
    save_config(config, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"kind": "update", **row}) + "\n" for row in rows))
    summary = {"seconds": {"collect": 0, "sync": 0, "learn": 0, "evaluate": 0, "save": 0, "other": 0, **seconds}}
    (folder / "summary.json").write_text(json.dumps(summary))


def row(update: int, length: float, total: int, *, collect: float, sync: float, learn: float, drawn: int = 0) -> Any:
    collected = {"collect/drawn": drawn, "collect/mixed_fraction": 0.5} if drawn else {}
    time = {"collect": collect, "sync": sync, "learn": learn}
    return {"update": update, "response/length": length, "total/tokens": total, "time": time, **collected}


def test_rates_of_a_run(tmp_path: Path) -> None:
    config = run_config(
        "schedule.v=2", "schedule.updates=4", "groups_per_minibatch=2", "group_size=4", "evaluation.every=2"
    )
    config.checkpoint.every = 2
    rows = [
        # Slow: everything is cold.
        row(1, 10, 1000, collect=50, sync=9, learn=40, drawn=4),
        row(2, 10, 1000, collect=0, sync=0, learn=2),
        row(3, 20, 2200, collect=6, sync=0.5, learn=3, drawn=12),
        row(4, 20, 2200, collect=0, sync=0, learn=5),
    ]
    write_run(tmp_path, config, rows, evaluate=9, save=4)
    found = measured(tmp_path)
    assert found.response_tokens == 15
    assert found.mixed == pytest.approx(0.5)
    assert found.rates.sample == pytest.approx(1200 / 6)
    # 8 responses of 10, 20 and 20 tokens in 2 + 3 + 5 seconds.
    assert found.rates.learn == pytest.approx(8 * 50 / 10)
    assert found.rates.sync == pytest.approx(STREAM / 0.5)
    # Evaluations at 0, 2, 4 and saves at 2, 4.
    assert found.rates.evaluate == pytest.approx(3)
    assert found.rates.save == pytest.approx(2 * 16 * 428_672 / 4)
    # The plan of a longer run takes its rates, lengths and share of mixed groups from there.
    told = make_plan(replace(config, group_size=8), [], Options(from_run=str(tmp_path)))
    assert told.hours is not None
    assert told.lengths.response == 15
    assert told.volume.collection.batches == 2
    assert told.hours.collect == pytest.approx(2 * 4 * 8 * 15 / 200)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("config.yaml", "config.yaml is missing"),
        ("metrics.jsonl", "metrics.jsonl cannot be read"),
        ("summary.json", "summary.json cannot be read"),
    ],
)
def test_a_folder_that_is_no_run_is_named(broken: str, said: str, tmp_path: Path) -> None:
    write_run(tmp_path, run_config(), [row(1, 10, 10, collect=1, sync=1, learn=1, drawn=4)])
    (tmp_path / broken).unlink()
    with pytest.raises(ConfigError, match=said):
        measured(tmp_path)


def test_a_run_that_tells_nothing_of_speed_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, run_config(), [])
    with pytest.raises(ConfigError, match="has logged no collection"):
        measured(tmp_path)
    write_run(tmp_path, run_config("schedule.overlap=true"), [])
    with pytest.raises(ConfigError, match="its phases cannot be told apart"):
        measured(tmp_path)


def test_a_probe_draws_as_a_run_draws() -> None:
    words = ["schedule.v=8", "schedule.i=3", "checkpoint.every=8", "evaluation.checkpoints=true"]
    probed = run_config(*words, *probe_words(run_config(*words), Path("somewhere")))
    validate(probed)
    # As many prompts side by side as a collection of eight minibatches has.
    assert probed.collection.prompts_per_batch == 8 * 32
    assert (probed.schedule.v, probed.schedule.i, probed.schedule.updates) == (1, 1, UPDATES)
    assert probed.evaluation.every is None
    assert probed.checkpoint.every is None
