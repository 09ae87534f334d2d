"""Groups to rows to micro-batches to tensors: against tensors written out by hand, and laws over random lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, make_group, minibatch_of, random_groups

from grpo_lab.minibatches import (
    Minibatch,
    Row,
    make_minibatch,
    micro_batches,
    pack,
    padded,
    padding_share,
    plan_rows,
    splits_groups,
)
from grpo_lab.types import Counts

# Prompt 5 6 7 with responses `8 <eos>` and `9 8 <eos>`; prompt 4 with responses `<eos>` and `3 2 9` (cut off).
HAND = (
    make_group("a", [5, 6, 7], [[8, EOS], [9, 8, EOS]]),
    make_group("b", [4], [[EOS], [3, 2, 9]]),
)


def lengths_only(*shapes: tuple[int, tuple[int, ...]]) -> Minibatch:
    return minibatch_of(random_groups(shapes))


SHAPES = st.integers(1, 4).flatmap(
    lambda m: st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 40), min_size=m, max_size=m)), min_size=1, max_size=6
    )
)


# --- divisors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "divisor", "kept", "counts"),
    [
        (False, "all", (True, True, True), Counts(tokens=22, responses=6, groups=3)),
        (True, "all", (True, False, True), Counts(tokens=22, responses=6, groups=3)),
        (True, "kept", (True, False, True), Counts(tokens=15, responses=4, groups=2)),
    ],
)
def test_counts(mask: bool, divisor: str, kept: tuple[bool, ...], counts: Counts) -> None:
    groups = [
        make_group("a", [5], [[3, 3, 3], [3, 3]]),
        make_group("equal", [5], [[3, 3, 3, 3], [3, 3, 3]], rewards=[0.3, 0.3]),
        make_group("c", [5], [[3] * 9, [3]]),
    ]
    minibatch = make_minibatch(7, groups, mask_zero_variance=mask, mask_divisor=divisor)
    assert (minibatch.kept, minibatch.counts, minibatch.index) == (kept, counts, 7)
    assert (minibatch.group_size, len(minibatch.groups)) == (2, 3)


# --- rows -------------------------------------------------------------------------------------------------------


def test_whole_groups_where_they_fit() -> None:
    # A response of T tokens has T - 1 inputs: 3 + 1 + 2 and 1 + 0 + 2 positions.
    minibatch = minibatch_of(HAND)
    rows = plan_rows(minibatch, budget=6)
    assert rows == [Row(0, (0, 1), 6), Row(1, (0, 1), 3)]
    assert not splits_groups(rows, minibatch)


def test_a_group_over_the_budget_is_cut_with_its_prompt_in_each_row() -> None:
    minibatch = lengths_only((4, (3, 5, 2, 9)), (1, (2, 2, 2, 2)))
    rows = plan_rows(minibatch, budget=10)
    # 4+2+4 = 10 fits; 4+1 = 5 and 8 more do not; 4+8 alone is over the budget and still a row.
    assert rows == [Row(0, (0, 1), 10), Row(0, (2,), 5), Row(0, (3,), 12), Row(1, (0, 1, 2, 3), 5)]
    assert splits_groups(rows, minibatch)


def test_rows_of_one_response() -> None:
    minibatch = minibatch_of(HAND)
    rows = plan_rows(minibatch, budget=1000, whole_groups=False)
    assert rows == [Row(0, (0,), 4), Row(0, (1,), 5), Row(1, (0,), 1), Row(1, (1,), 3)]
    assert splits_groups(rows, minibatch)


@given(shapes=SHAPES, budget=st.integers(1, 120), whole=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_response_is_in_one_row_within_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int, whole: bool
) -> None:
    minibatch = minibatch_of(random_groups(shapes))
    rows = plan_rows(minibatch, budget=budget, whole_groups=whole)
    held = [(row.group, member) for row in rows for member in row.members]
    assert held == [(g, j) for g, (_, lengths) in enumerate(shapes) for j in range(len(lengths))]
    for row in rows:
        prompt, lengths = shapes[row.group]
        assert row.length == prompt + sum(lengths[j] - 1 for j in row.members)
        assert row.length <= budget or len(row.members) == 1
        assert whole or len(row.members) == 1


# --- micro-batches ----------------------------------------------------------------------------------------------


def test_micro_batches_by_hand() -> None:
    rows = [Row(g, (0,), length) for g, length in enumerate([18, 20, 10, 45, 19, 10])]
    # 45 is over the budget and goes alone; 20 and 19 are held as 2 x 20 = 40, and a third would be over; 10 beside 18
    # would be padded by more than a tenth.
    batches = micro_batches(rows, budget=40)
    assert [[row.group for row in batch] for batch in batches] == [[3], [1, 4], [0], [2, 5]]
    # Padding: 20 - 19 of the 45 + 40 + 18 + 20 positions.
    assert padding_share(batches) == pytest.approx(1 / 123)


@given(shapes=SHAPES, budget=st.integers(1, 300), whole=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_micro_batches_hold_each_row_once_within_the_budget(
    shapes: list[tuple[int, list[int]]], budget: int, whole: bool, data: st.DataObject
) -> None:
    rows = plan_rows(minibatch_of(random_groups(shapes)), budget=budget, whole_groups=whole)
    batches = micro_batches(rows, budget=budget)
    flat = [row for batch in batches for row in batch]
    assert len(flat) == len(rows)
    assert set(flat) == set(rows)
    assert [row.length for row in flat] == sorted((row.length for row in rows), reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(row.length for row in batch) <= budget
    assert micro_batches(data.draw(st.permutations(rows)), budget=budget) == batches
    assert 0 <= padding_share(batches) < 0.1


@pytest.mark.parametrize("whole", [True, False])
def test_little_padding_on_uneven_groups(whole: bool) -> None:
    # Reasoning-like lengths: log-normal around 250 tokens, a few at the limit of 1024; 256 responses, 8192 positions.
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.6, size=(32, 8)), 8, 1024).astype(int)
    prompts = rng.integers(40, 160, size=32)
    minibatch = lengths_only(*((int(p), tuple(row.tolist())) for p, row in zip(prompts, lengths, strict=True)))
    share = padding_share(micro_batches(plan_rows(minibatch, budget=8192, whole_groups=whole), budget=8192))
    assert share < 0.10


# --- tensors ----------------------------------------------------------------------------------------------------


def test_pack_by_hand() -> None:
    batch = pack(minibatch_of(HAND), [Row(0, (0, 1), 6), Row(1, (0, 1), 3)], pad_id=14)
    # A response's last token is predicted and predicts nothing: `<eos>` and the cut-off 9 are no inputs.
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 8], [4, 3, 2, 14, 14, 14]]
    # Each response goes on where the prompt ends.
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 3, 4], [0, 1, 2, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 2, 2], [0, 2, 2, -1, -1, -1]]
    # First tokens are predicted by the prompt's last position: 2 in the first row, 6 + 0 in the second.
    assert batch.predictors.tolist() == [2, 3, 2, 4, 5, 6, 6, 7, 8]
    assert batch.tokens.tolist() == [8, EOS, 9, 8, EOS, EOS, 3, 2, 9]
    assert batch.loss_mask.tolist() == [
        [True, True, False],
        [True, True, True],
        [True, False, False],
        [True, True, True],
    ]
    assert batch.responses == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_pack_some_members_of_a_group() -> None:
    batch = pack(minibatch_of(HAND), [Row(0, (1,), 5)])
    assert batch.input_ids.tolist() == [[5, 6, 7, 9, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.predictors.tolist() == [2, 3, 4]
    assert batch.responses == ((0, 1),)


def test_the_mask_comes_from_lengths_where_padding_is_the_end_token() -> None:
    minibatch = minibatch_of([make_group("a", [5], [[11, 12, 2], [3, 4, 5, 6, 2]])])
    for pad_id in (2, 0):
        batch = pack(minibatch, plan_rows(minibatch, budget=100), pad_id=pad_id)
        assert batch.loss_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
        assert batch.tokens.tolist() == [11, 12, 2, 3, 4, 5, 6, 2]


@given(shapes=SHAPES, budget=st.integers(1, 200), whole=st.booleans())
@settings(max_examples=40, deadline=None)
def test_packed_tensors_hold_every_response_once(shapes: list[tuple[int, list[int]]], budget: int, whole: bool) -> None:
    minibatch = minibatch_of(random_groups(shapes))
    seen = set()
    for rows in micro_batches(plan_rows(minibatch, budget=budget, whole_groups=whole), budget=budget):
        batch = pack(minibatch, rows)
        tokens = torch.full(batch.loss_mask.shape, -1, dtype=torch.long)
        tokens[batch.loss_mask] = batch.tokens
        previous = torch.full_like(tokens, -1)
        previous[batch.loss_mask] = batch.input_ids.flatten()[batch.predictors]
        where = torch.full_like(tokens, -1)
        where[batch.loss_mask] = batch.position_ids.flatten()[batch.predictors]
        for b, (g, j) in enumerate(batch.responses):
            group = minibatch.groups[g]
            response, mask = group.rollouts[j].token_ids.tolist(), batch.loss_mask[b]
            assert tokens[b][mask].tolist() == response
            # Each token is predicted from the one before it, at that one's place in the plain form.
            assert previous[b][mask].tolist() == [group.prompt.token_ids[-1], *response[:-1]]
            first = len(group.prompt.token_ids) - 1
            assert where[b][mask].tolist() == list(range(first, first + len(response)))
            seen.add((g, j))
    assert len(seen) == len(minibatch.groups) * minibatch.group_size


def test_padded_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    values = [np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0, 5.0, 6.0])]
    assert padded(values, mask).tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert padded(values, mask).dtype == torch.float32
