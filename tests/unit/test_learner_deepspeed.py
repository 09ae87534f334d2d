"""The parts of the DeepSpeed learner that need no DeepSpeed: who runs which rows, what is refused, and what is said
where it is not installed. And activations computed again, which both learners can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import UNEVEN, learner_settings, make_learner, minibatch_of, preset, random_groups, tiny_model

from grpo_lab.config import ConfigError
from grpo_lab.distributed import World
from grpo_lab.learner.dealing import deal
from grpo_lab.learner.deepspeed_zero import DeepSpeedLearner
from grpo_lab.learner.zero_engine import engine_config, loss_factor
from grpo_lab.minibatches import Row, plan_rows
from grpo_lab.policy import checkpoint_activations


def rows_of(*lengths: int) -> list[Row]:
    return [Row(group, (0, 1), length) for group, length in enumerate(lengths)]


def groups_of(batches: list[list[Row]]) -> list[list[int]]:
    return [[row.group for row in batch] for batch in batches]


# --- dealing ----------------------------------------------------------------------------------------------------


def test_the_longest_rows_go_first_and_to_the_rank_with_the_least() -> None:
    # 9 to rank 0, 7 to rank 1, 6 to rank 1 (13), 5 to rank 0 (14), 2 to rank 1 (15).
    dealt = deal(rows_of(5, 9, 2, 7, 6), ranks=2, budget=10)
    # A budget of 10 holds one row of 9, 7 or 6, and neither 5 nor 2 beside another of its rank.
    assert [groups_of(own) for own in dealt.batches] == [[[1], [0]], [[3], [4], [2]]]
    assert dealt.passes == 3


def test_every_rank_runs_as_many_passes_as_the_busiest() -> None:
    dealt = deal(rows_of(5, 9, 2, 7, 6), ranks=2, budget=10)
    assert [rows and [row.group for row in rows] for rows in dealt.of(0)] == [[1], [0], None]
    assert [rows and [row.group for row in rows] for rows in dealt.of(1)] == [[3], [4], [2]]
    # The cheapest row stands in where there is none: 29 positions of rows, and 2 more for rank 0's third pass.
    assert dealt.filler.group == 2
    assert dealt.padding_share == pytest.approx(1 - 29 / 31)


def test_padding_within_a_batch_counts_as_well() -> None:
    dealt = deal(rows_of(20, 19, 20), ranks=1, budget=60)
    assert dealt.passes == 1
    assert dealt.padding_share == pytest.approx(1 - 59 / 60)


def test_equal_rows_are_dealt_in_their_order() -> None:
    dealt = deal(rows_of(4, 4, 4, 4), ranks=2, budget=4)
    assert [groups_of(own) for own in dealt.batches] == [[[0], [2]], [[1], [3]]]


def test_ranks_without_rows_run_the_filler() -> None:
    dealt = deal(rows_of(7), ranks=3, budget=100)
    assert [len(own) for own in dealt.batches] == [1, 0, 0]
    assert dealt.of(1) == dealt.of(2) == [None]
    assert dealt.padding_share == pytest.approx(2 / 3)


@pytest.mark.parametrize("budget", [1000, 21, 8, 1])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_row_is_run_once_and_no_batch_is_over_the_budget(ranks: int, budget: int) -> None:
    rows = plan_rows(minibatch_of(random_groups(UNEVEN * 2)), budget=budget)
    dealt = deal(rows, ranks=ranks, budget=budget)
    batches = [batch for own in dealt.batches for batch in own]
    run = [row for batch in batches for row in batch]
    assert sorted(run, key=lambda row: (row.group, row.members)) == rows
    assert all(len(batch) == 1 or len(batch) * batch[0].length <= budget for batch in batches)
    loads = [sum(row.length for batch in own for row in batch) for own in dealt.batches]
    # Longest first to the least loaded: no two ranks differ by more than one row.
    assert max(loads) - min(loads) <= max(row.length for row in rows)


# --- settings ---------------------------------------------------------------------------------------------------


def test_what_ranks_give_is_added_up() -> None:
    for stage in (0, 1, 2):
        assert engine_config(learner_settings(zero_stage=stage), pin_memory=False)["gradient_allreduce_op"] == "sum"
        assert loss_factor(learner_settings(zero_stage=stage), 4) == 1
    # There the average is all that DeepSpeed offers: 4 x the mean of 4.
    assert engine_config(learner_settings(zero_stage=3), pin_memory=False)["gradient_allreduce_op"] == "mean"
    assert loss_factor(learner_settings(zero_stage=3), 4) == 4


def start(folder: Path, **settings: object) -> DeepSpeedLearner:
    return DeepSpeedLearner.from_folder(
        folder,
        settings=learner_settings(engine="deepspeed", **settings),
        temperature=1.0,
        device="cpu",
        needs_reference=True,
        updates=None,
        world=World(),
    )


def test_a_missing_deepspeed_is_said_in_a_line(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError) as caught:
        start(model_folder, zero_stage=2)
    assert str(caught.value) == (
        "learner.engine=deepspeed needs DeepSpeed: `make engines`, or pip install 'grpo-lab[deepspeed]'"
    )


# --- activations computed again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_computing_activations_again_changes_no_bit_and_drops_nothing_out(architecture: str) -> None:
    # GPT-2 has dropout of 0.1 in four places, which training mode would wake.
    minibatch, objective = minibatch_of(random_groups(UNEVEN, seed=3)), preset("ggpo")
    learners = [
        make_learner(tiny_model(architecture), lr=1e-3, activation_checkpointing=checkpointing)
        for checkpointing in (False, True)
    ]
    for update in range(2):
        norms = []
        for learner in learners:
            reference = learner.reference_logprobs(minibatch)
            result = learner.step(minibatch, objective, update=update, reference=reference, old=None)
            norms.append(result.metrics["grad_norm"])
        assert norms[0] == norms[1]
    kept, again = (list(learner.policy.model.parameters()) for learner in learners)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_activations_are_computed_again() -> None:
    calls = []
    learner = make_learner(tiny_model("qwen3"), activation_checkpointing=True)
    layer = learner.policy.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    minibatch = minibatch_of(random_groups([(3, (4, 5))]))
    learner.logprobs(minibatch)
    assert calls == [False]
    learner.step(minibatch, preset("grpo"), update=0, reference=None, old=None)
    # Once forward, and once more in the backward pass.
    assert calls == [False, True, True]


def test_a_model_whose_layers_cannot_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^Linear cannot compute activations again: set learner\.activation_ch"):
        checkpoint_activations(torch.nn.Linear(2, 2))
