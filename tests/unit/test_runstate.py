"""What a checkpoint remembers of the loop comes back."""

from __future__ import annotations

from tiny import UNEVEN, random_groups

from grpo_lab.collect import Collection, Exhausted
from grpo_lab.diagnostics import EssSums
from grpo_lab.runstate import RunState, gathered_from_state, gathered_to_state


def test_counters_and_flags_come_back() -> None:
    state = RunState(
        update=7,
        totals={"epoch": 1.0},
        epoch_completed=True,
        block_ess=EssSums(1.0, 2.0, 3),
        block_token_ess=EssSums(4.0, 5.0, 6),
        block_minibatches=2,
        finished=True,
    )
    assert RunState.from_state(state.to_state(collection_open=True, samples_again=True)) == state


def test_a_collection_that_waits_comes_back() -> None:
    groups = tuple(random_groups(UNEVEN))
    waiting = Collection(groups=groups, accounting={"a": 1.0}, totals={"b": 2.0}, epoch_completed=True)
    back = gathered_from_state(gathered_to_state(waiting) or {})
    assert isinstance(back, Collection)
    assert (back.accounting, back.totals, back.epoch_completed) == ({"a": 1.0}, {"b": 2.0}, True)
    assert [each.prompt for each in back.groups] == [each.prompt for each in groups]
    assert gathered_from_state(gathered_to_state(Exhausted(3, 1)) or {}) == Exhausted(3, 1)
    assert gathered_to_state(None) is None
