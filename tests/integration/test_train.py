"""The whole loop, every objective, and what the schedule promises about the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import rows

from grpo_lab import checkpoint, rollout
from grpo_lab.collect import CollectionError
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.learner import NonFiniteError
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.sync import SyncError
from grpo_lab.train import train

OBJECTIVES = ["grpo", "grpo_rg", "grpo_tis", "agro", "ggpo", "ggpo_clip", "ggpo_reward_only"]


def _updates(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir) if row["kind"] == "update"]


def _run(config: TrainConfig, run_dir: Path) -> list[dict[str, Any]]:
    train(config, run_dir, resuming=False)
    return _updates(run_dir)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains_off_policy(objective: str, small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = small(f"objective={objective}", "schedule.v=3", "schedule.updates=6", "schedule.t_ref=3")
    log = _run(config, tmp_path / "run")
    assert [row["update"] for row in log] == [1, 2, 3, 4, 5, 6]
    # Right after a sync the sampler and the learner are one policy; from then on they part.
    drift = [row["mismatch/drift"] for row in log]
    assert max(drift[0], drift[3]) < 1e-5
    assert min(drift[1], drift[2], drift[4], drift[5]) > 1e-5
    assert [row["sample_age"] for row in log] == [0, 1, 2, 0, 1, 2]
    assert [row["update"] for row in log if "sync/drift" in row] == [1, 4]
    assert all(row["sync/drift"] < 1e-5 for row in log if "sync/drift" in row)
    assert all(np.isfinite(row["loss"]) for row in log)
    idle = [row for row in log if row["grad_norm"] == 0]
    # It masks groups of equal rewards, and now and then all four groups of a minibatch are such.
    assert len(idle) <= (1 if objective == "grpo_rg" else 0)


def test_ess_is_of_blocks_and_the_bound_of_last_passes(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    passes = ["schedule.v=2", "schedule.i=2", "schedule.updates=12"]
    log = _run(small("objective=ggpo", *passes, "tracking.block=2"), tmp_path / "run")
    for name in ("sequence", "token"):
        found = {row["update"]: row[f"mismatch/ess_{name}"] for row in log if f"mismatch/ess_{name}" in row}
        assert list(found) == [4, 8, 12]
        assert all(0 < each <= 1 for each in found.values())
    assert [row["update"] for row in log if "bound/lower" in row] == [2, 4, 6, 8, 10, 12]
    # Right after a sync the first pass is by the behaviour policy itself, the second no longer.
    assert log[1]["bound/tv_pi_k"] < 1e-5 < log[1]["bound/tv_pi"]


def test_the_reference_scores_a_minibatch_once_for_all_its_passes(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[tuple[int, bool]] = []
    original = TorchLearner.reference_logprobs

    def recorded(self: TorchLearner, minibatch: Any) -> Any:
        scored.append((minibatch.index, self.reference_is_current))
        return original(self, minibatch)

    monkeypatch.setattr(TorchLearner, "reference_logprobs", recorded)
    config = small("objective=grpo", "schedule.v=2", "schedule.i=3", "schedule.t_ref=5", "schedule.updates=9")
    _run(config, tmp_path / "run")
    # Updates 0-2, 3-5, 6-8. The first pass of all reads the current policy itself; the refresh after update 5 falls
    # before the last pass over the second minibatch, which then reads the current policy again.
    assert scored == [(0, True), (0, False), (1, False), (1, True), (2, False)]


OVERLAPS = {
    # (overrides, age of each update's responses, updates at which a sync is proved)
    "one collection a sync": (["schedule.v=3"], [0, 1, 2, 3, 4, 5, 3, 4, 5], [1, 4, 7]),
    "passes": (["schedule.v=2", "schedule.i=2"], [0, 1, 2, 3, 4, 5, 6, 7, 4], [1, 5, 9]),
    "three collections a sync": (
        ["schedule.v=3", "schedule.minibatches_per_collection=1"],
        # The one consumed first after a sync was sampled before it.
        [0, 1, 2, 3, 1, 2, 3, 1, 2],
        [1, 4, 7],
    ),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_with_overlap_samples_are_older_and_say_so(
    name: str, small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    overrides, ages, proofs = OVERLAPS[name]
    config = small("objective=ggpo", *overrides, "schedule.updates=9", "schedule.overlap=true")
    log = _run(config, tmp_path / "run")
    assert [row["sample_age"] for row in log] == ages
    assert [row["update"] for row in log if "sync/drift" in row] == proofs
    assert all(row["sync/drift"] < 1e-5 for row in log if "sync/drift" in row)
    # Responses of age 0 alone come from the learner's own weights.
    assert [row["mismatch/drift"] < 1e-5 for row in log] == [age == 0 for age in ages]
    totals = [row["total/responses"] for row in log]
    assert totals == sorted(totals)


def test_with_overlap_sampling_is_timed_beside_the_phases(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = small("schedule.v=2", "schedule.updates=6", "schedule.overlap=true")
    train(config, tmp_path / "run", resuming=False)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines]
    assert ["sampled_beside" in each for each in times] == [False, False, True, False, True, False]
    assert all("tokens_per_second" in times[k] for k in (0, 2, 4))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the prompts that samplers are asked for groups of, one after the other."""
    ids: list[str] = []
    original = HfEngine.generate

    def recorded(self: HfEngine, prompts: Any, *, group_size: int, **settings: Any) -> Any:
        if group_size > 1:
            ids.extend(prompt.id for prompt in prompts)
        return original(self, prompts, group_size=group_size, **settings)

    monkeypatch.setattr(HfEngine, "generate", recorded)
    return ids


def test_with_overlap_and_a_budget_in_epochs_each_prompt_is_seen_once(
    small: Callable[..., TrainConfig], tmp_path: Path, asked: list[str]
) -> None:
    common = ["objective=ggpo", "objective.zero_variance=mask", "schedule.v=2", "schedule.epochs=1"]
    plain = _run(small(*common), tmp_path / "plain")
    first, asked[:] = list(asked), []
    ahead = _run(small(*common, "schedule.overlap=true"), tmp_path / "ahead")
    assert asked == first
    assert len(set(asked)) == len(asked) == 80
    assert [row["update"] for row in plain] == [row["update"] for row in ahead]
    assert plain[-1]["total/responses"] == ahead[-1]["total/responses"]


def test_evaluation_changes_nothing_with_overlap(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    common = ["objective=ggpo", "schedule.v=4", "schedule.minibatches_per_collection=2", "schedule.updates=9"]
    without = _run(small(*common, "schedule.overlap=true"), tmp_path / "without")
    evaluating = ["evaluation.every=1", "evaluation.n=3", "evaluation.k=[1]"]
    within = _run(small(*common, "schedule.overlap=true", *evaluating), tmp_path / "within")
    assert without == within


def test_the_default_objective_learns(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = small(
        "schedule.updates=100",
        "schedule.v=1",
        "groups_per_minibatch=8",
        "group_size=8",
        "evaluation.every=100",
        "evaluation.n=8",
        "evaluation.k=[1]",
    )
    drawn = [row["reward/drawn"] for row in _run(config, tmp_path / "run")]
    # A model of 11 thousand parameters: 0.22 to 0.31 in this time. A broken sign or mask does not rise at all.
    assert np.mean(drawn[-20:]) > np.mean(drawn[:20]) + 0.05
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["updates"] == 100
    assert {"collect", "sync", "learn", "evaluate", "save", "other"} == set(summary["seconds"])
    assert {"update", "pass@1"} <= set(summary["first"])


def _sampled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[list[int]]]]:
    """Every call of the engine: version, group size, and the tokens it drew."""
    calls: list[tuple[int, int, list[list[int]]]] = []
    original = HfEngine.generate

    def recorded(self: HfEngine, prompts: Any, **settings: Any) -> Any:
        answers = original(self, prompts, **settings)
        tokens = [rollout.token_ids.tolist() for group in answers for rollout in group]
        calls.append((self.policy_version, settings["group_size"], tokens))
        return answers

    monkeypatch.setattr(HfEngine, "generate", recorded)
    return calls


def test_evaluation_changes_nothing_in_the_training_stream(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _sampled(monkeypatch)
    common = ["objective=ggpo", "schedule.v=4", "schedule.minibatches_per_collection=1", "schedule.updates=6"]
    without = _run(small(*common), tmp_path / "without")
    plain, calls[:] = list(calls), []
    within = _run(small(*common, "evaluation.every=2", "evaluation.n=3", "evaluation.k=[1]"), tmp_path / "within")
    trained = [call for call in calls if call[1] == 4]
    evaluated = [call for call in calls if call[1] == 3]
    assert [version for version, _, _ in evaluated] == [0, 2, 4, 6]
    assert trained == plain
    assert without == within


def test_matched_runs_see_the_same_prompts_in_the_same_order(
    small: Callable[..., TrainConfig], tmp_path: Path, asked: list[str]
) -> None:
    seen: list[list[str]] = []
    for objective in ("grpo", "ggpo"):
        asked.clear()
        _run(small(f"objective={objective}", "schedule.v=2", "schedule.updates=4"), tmp_path / objective)
        seen.append(list(asked))
    shared = min(len(ids) for ids in seen)
    assert shared >= 32
    assert seen[0][:shared] == seen[1][:shared]


def test_the_budget_may_end_inside_a_collection(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    log = _run(small("schedule.v=4", "schedule.updates=6", "collection.prompts_per_batch=16"), tmp_path / "run")
    assert len(log) == 6
    # The second collection is gathered in full, and counts.
    assert sum(row["collect/kept"] for row in log if "collect/kept" in row) == 32


def test_a_budget_in_epochs_ends_after_them_and_drops_the_incomplete_batch(
    small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = small(
        "objective=grpo_rg",
        "schedule.v=1",
        "schedule.updates=null",
        "schedule.epochs=2",
        "schedule.t_ref=epoch",
        "collection.prompts_per_batch=4",
        "evaluation.every=1000",
        "evaluation.n=2",
        "evaluation.k=[1]",
        "checkpoint.every=1000",
    )
    log = _run(config, tmp_path / "run")
    # 85 prompts: 21 batches of 4 a pass, one prompt left over.
    assert len(log) == 42
    assert checkpoint.newest(tmp_path / "run")[0] == checkpoint.folder_of(tmp_path / "run", 42)
    evaluated = [row["update"] for row in rows(tmp_path / "run") if row["kind"] == "evaluation"]
    assert evaluated == [0, 42]
    # The reference was refreshed after the first pass: the learner starts the second one at it.
    ratios = [row["reference/log_ratio"] for row in log]
    assert [update for update, ratio in enumerate(ratios) if ratio == 0] == [0, 21]


def test_prompts_that_run_out_while_refilling_are_said(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    # 85 prompts, filtered, for collections of 28 groups: the last refill finds no more.
    config = small("schedule.v=7", "schedule.updates=null", "schedule.epochs=1", "collection.prompts_per_batch=8")
    log = _run(config, tmp_path / "run")
    assert len(log) == 7
    text = (tmp_path / "run/run.log").read_text()
    assert "the prompts of schedule.epochs=1 are used up: the last" in text
    assert "are not trained on" in text
    # Not even one collection: that is no finished run.
    nothing = small("schedule.v=30", "schedule.updates=null", "schedule.epochs=1", "collection.prompts_per_batch=8")
    with pytest.raises(CollectionError, match=r"do not fill a collection.*schedule\.v"):
        train(nothing, tmp_path / "nothing", resuming=False)


def test_bf16_runs_on_both_sides(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    settings = ["schedule.v=2", "schedule.updates=4"]
    narrow = _run(small(*settings, "learner.precision=bf16"), tmp_path / "narrow")
    wide = _run(small(*settings), tmp_path / "wide")
    assert [row["update"] for row in narrow if "sync/drift" in row] == [1, 3]
    assert all(row["sync/drift"] < 1e-2 for row in narrow if "sync/drift" in row)
    # It is another precision, and the same policy.
    assert narrow[0]["entropy"] != wide[0]["entropy"]
    assert narrow[0]["entropy"] == pytest.approx(wide[0]["entropy"], rel=0.2)


def test_each_sync_leaves_its_hash_and_each_evaluation_its_problems(
    small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    _run(
        small("schedule.v=2", "schedule.updates=4", "evaluation.every=4", "evaluation.n=4", "evaluation.k=[1]"),
        tmp_path,
    )
    notes = [line.split("sync: ")[1] for line in (tmp_path / "run.log").read_text().splitlines() if "sync: " in line]
    assert [note.split(",")[0] for note in notes] == ["version 0", "version 2"]
    assert len({note.split()[-1] for note in notes}) == 2
    kept = json.loads((tmp_path / "evaluations/update_000004.json").read_text())
    assert len(kept["problems"]) == 5
    shares = [problem["correct"] / problem["n"] for problem in kept["problems"]]
    assert kept["scores"]["pass@1"] == pytest.approx(np.mean(shares))


def test_learning_rate_zero_shows_what_the_engines_alone_differ_by(
    small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    log = _run(small("debug=frozen", "schedule.updates=4", "schedule.v=4", "learner.lr=0"), tmp_path / "run")
    assert max(row["mismatch/drift"] for row in log) < 1e-5


def test_a_task_without_mixed_groups_stops_and_says_what_was_drawn(
    small: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    # Answers cut after one token never hold one: every reward is 0.
    config = small("rollout.max_response_tokens=1", "collection.max_batches=3", "schedule.v=1")
    with pytest.raises(
        CollectionError, match=r"3 batches of 16 prompts held 0 groups.*0/4: 48.*collection\.max_batches"
    ):
        train(config, tmp_path / "run", resuming=False)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


def test_a_non_finite_loss_stops_names_the_sample_and_keeps_the_batch(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TorchLearner.step

    def poisoned(self: TorchLearner, minibatch: Any, *arguments: Any, **settings: Any) -> Any:
        if settings["update"] == 2:
            minibatch.groups[1].rollouts[3].behaviour_logprobs[0] = np.nan
        return original(self, minibatch, *arguments, **settings)

    monkeypatch.setattr(TorchLearner, "step", poisoned)
    with pytest.raises(NonFiniteError, match="response 3 to prompt"):
        train(small("schedule.v=4", "schedule.updates=4"), tmp_path / "run", resuming=False)
    assert len(_updates(tmp_path / "run")) == 2
    kept = torch.load(tmp_path / "run/failed_minibatch.pt", weights_only=True)
    groups = checkpoint.groups_from_state(kept["groups"])
    assert kept["update"] == 2
    assert np.isnan(groups[1].rollouts[3].behaviour_logprobs[0])


def test_an_engine_that_ignores_a_sync_is_caught(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HfEngine.load_weights

    def forgetful(self: HfEngine, weights: Any, *, version: int) -> None:
        if version:
            self.policy_version = version
        else:
            original(self, weights, version=version)

    monkeypatch.setattr(HfEngine, "load_weights", forgetful)
    # An engine with weights of its own, since a second batch comes from those that the learner has moved on from.
    config = small("schedule.v=2", "schedule.minibatches_per_collection=1", "schedule.updates=4")
    with pytest.raises(SyncError, match=r"weights of version 2 did not arrive.*resume="):
        train(config, tmp_path / "run", resuming=False)
    # Without digests to compare, scoring finds it.
    monkeypatch.setattr(HfEngine, "digests", lambda self: None)
    with pytest.raises(SyncError, match=r"does not sample from version 2.*nats a token"):
        train(config, tmp_path / "again", resuming=False)


def test_borrowed_weights_make_the_same_run(
    small: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("objective=ggpo", "schedule.v=3", "schedule.updates=6", "evaluation.every=2")
    for name, borrows in (("borrowed", True), ("copied", False)):
        assert rollout.shares_weights(config)
        if not borrows:
            monkeypatch.setattr(rollout, "shares_weights", lambda _: False)
        train(config, tmp_path / name, resuming=False)
    borrowed, copied = (rows(tmp_path / name) for name in ("borrowed", "copied"))
    assert len(borrowed) > 6
    assert borrowed == copied


def test_a_new_run_does_not_start_in_the_folder_of_another(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = small("schedule.updates=1", "schedule.v=1")
    train(config, tmp_path, resuming=False)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="holds a run already"):
        train(config, tmp_path, resuming=False)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_checkpoint_is_an_ordinary_model_folder(small: Callable[..., TrainConfig], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(small("schedule.updates=2", "schedule.v=2", "checkpoint.every=2"), tmp_path, resuming=False)
    folder = checkpoint.folder_of(tmp_path, 2) / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("3+4=", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("3+4=")
