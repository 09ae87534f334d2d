"""The order of prompts: each pass complete, seeded by (seed, epoch) alone, resumable at any point."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from grpo_lab.config import ConfigError
from grpo_lab.prompts import PromptStream
from grpo_lab.types import Problem, Prompt

# Worked out with a Philox4x64-10 written from the paper (Salmon et al. 2011), not with numpy's.
FIRST_TWO_PASSES = [1, 4, 3, 5, 0, 2, 4, 5, 3, 0, 2, 1]


def prompts(count: int, first_token: int = 1) -> list[Prompt]:
    problems = [Problem(id=f"{index:016x}", question=f"q{index}", gold="1") for index in range(count)]
    return [
        Prompt(problem=problem, text=problem.question, token_ids=(first_token, index))
        for index, problem in enumerate(problems)
    ]


def ids(taken: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in taken]


def test_a_pass_has_every_prompt_once_and_the_next_another_order() -> None:
    stream = PromptStream(prompts(16), seed=42)
    first, second = ids(stream.take(16)), ids(stream.take(16))
    assert sorted(first) == sorted(second) == ids(prompts(16))
    assert len({tuple(first), tuple(second), tuple(ids(prompts(16)))}) == 3


def test_equal_seeds_give_equal_orders_whatever_the_batch_size() -> None:
    whole, pieces, other = (PromptStream(prompts(10), seed=seed) for seed in (1, 1, 2))
    order = ids(whole.take(37))
    assert order == [identity for size in (1, 4, 13, 19) for identity in ids(pieces.take(size))]
    assert order != ids(other.take(37))


def test_the_order_is_the_same_on_every_machine() -> None:
    stream = PromptStream(prompts(6), seed=42)
    assert [int(identity, 16) for identity in ids(stream.take(12))] == FIRST_TWO_PASSES


def test_a_batch_crosses_the_border_and_may_hold_several_passes() -> None:
    stream = PromptStream(prompts(4), seed=0)
    stream.take(3)
    assert (stream.epoch, stream.cursor, stream.remaining_in_epoch) == (0, 3, 1)
    stream.take(2)
    assert (stream.epoch, stream.cursor, stream.remaining_in_epoch) == (1, 1, 3)
    taken = Counter(ids(stream.take(3 + 4 + 4)))
    assert (stream.epoch, stream.cursor, stream.remaining_in_epoch) == (4, 0, 4)
    assert sum(taken.values()) == 11
    assert set(taken.values()) == {2, 3}
    assert stream.take(0) == []


@pytest.mark.parametrize("before", [0, 5, 8, 16, 19])
def test_a_resumed_stream_continues_like_an_unbroken_one(before: int) -> None:
    """8 and 16 are the very ends of passes."""
    unbroken = PromptStream(prompts(8), seed=3)
    unbroken.take(before)
    saved = json.loads(json.dumps(unbroken.state()))
    resumed = PromptStream(prompts(8), seed=3)
    resumed.take(2)
    resumed.load_state(saved)
    assert (resumed.epoch, resumed.cursor) == (before // 8, before % 8)
    assert ids(resumed.take(21)) == ids(unbroken.take(21))


def test_other_prompts_or_another_seed_are_refused() -> None:
    state = PromptStream(prompts(8), seed=3).state()
    with pytest.raises(ConfigError, match="the saved run had 8 prompts, this one has 9"):
        PromptStream(prompts(9), seed=3).load_state(state)
    with pytest.raises(ConfigError, match="the prompts are not those of the saved run"):
        PromptStream(prompts(8)[::-1], seed=3).load_state(state)
    with pytest.raises(ConfigError, match="the prompts are not those of the saved run"):
        PromptStream(prompts(8, first_token=2), seed=3).load_state(state)
    with pytest.raises(ConfigError, match="seed=4 is not the saved run's 3"):
        PromptStream(prompts(8), seed=4).load_state(state)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="no training prompts"):
        PromptStream([], seed=0)
