"""Attention of packed rows: what each position sees, by hand; values and gradients of the dense form; its cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_group, minibatch_of, random_groups, tiny_model
from torch import Tensor

from grpo_lab.attention import IMPLEMENTATION, MAX_WASTE, Blocks, attend, blocks_of, install
from grpo_lab.minibatches import PackedBatch, Row, micro_batches, pack, plan_rows

HEADS, DIM = 4, 8


def two_rows() -> PackedBatch:
    """Prompt 5 6 with responses of two inputs and one, and one position of padding beside a longer row."""
    minibatch = minibatch_of([make_group("a", [5, 6], [[8, 8, 2], [9, 2]]), make_group("b", [2, 3, 4, 5, 6, 7], [[8]])])
    return pack(minibatch, [Row(0, (0, 1), 5), Row(1, (0,), 6)])


def seen(blocks: Blocks, size: int) -> dict[int, set[int]]:
    """The flat positions that each flat position sees, as the blocks say."""
    found: dict[int, set[int]] = {}
    at = 0
    for block in blocks.blocks:
        n, width = block.queries.shape
        for row in range(n):
            for query in range(width):
                if block.mask is None:
                    visible = block.keys[row][: query + 1]
                else:
                    visible = block.keys[row][block.mask[row % len(block.mask), 0, query]]
                found[at] = set(visible.tolist())
                at += 1
    return {position: found[place] for position, place in enumerate(blocks.places.flatten().tolist()[:size])}


def test_what_each_position_sees() -> None:
    batch = two_rows()
    visible = seen(blocks_of(batch), 12)
    assert visible[0] == {0}
    assert visible[1] == {0, 1}
    # The first response: the prompt and itself.
    assert visible[2] == {0, 1, 2}
    assert visible[3] == {0, 1, 2, 3}
    # The second does not see the first.
    assert visible[4] == {0, 1, 4}
    # The other row is a prompt alone: its response has one token, which is no input.
    assert [visible[6 + k] for k in range(6)] == [set(range(6, 7 + k)) for k in range(6)]


def dense(batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The plain form, [R, L, h, d]: one mask over the whole row."""
    length = batch.segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    one, other = batch.segments[:, :, None], batch.segments[:, None, :]
    mask = (causal & ((other == one) | (other == 0)))[:, None]
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(-1, -2) * DIM**-0.5).masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=3, max_size=3)), min_size=1, max_size=5
)


@given(shapes=SHAPES, budget=st.integers(1, 80), shared=st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_equals_the_dense_form_in_value_and_gradient(
    shapes: list[tuple[int, list[int]]], budget: int, shared: int
) -> None:
    minibatch = minibatch_of(random_groups(shapes))
    generator = torch.Generator().manual_seed(budget)
    for rows in micro_batches(plan_rows(minibatch, budget=budget), budget=budget):
        batch = pack(minibatch, rows)
        real = batch.segments >= 0

        def leaf(heads: int, size: tuple[int, ...] = tuple(batch.segments.shape)) -> Tensor:
            made = torch.randn(size[0], heads, size[1], DIM, generator=generator, dtype=torch.float64)
            return made.requires_grad_()

        query, key, value = leaf(HEADS), leaf(HEADS // shared), leaf(HEADS // shared)
        weights = torch.randn(*real.shape, HEADS, DIM, generator=generator, dtype=torch.float64) * real[..., None, None]
        ours = attend(blocks_of(batch), query, key, value, None)
        theirs = dense(batch, query, key, value)
        torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-12)
        slopes = torch.autograd.grad((ours * weights).sum(), (query, key, value))
        expected = torch.autograd.grad((theirs * weights).sum(), (query, key, value))
        for one, other in zip(slopes, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@given(shapes=SHAPES, budget=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_little_is_computed_for_nothing(shapes: list[tuple[int, list[int]]], budget: int) -> None:
    minibatch = minibatch_of(random_groups(shapes))
    for rows in micro_batches(plan_rows(minibatch, budget=budget), budget=budget):
        batch = pack(minibatch, rows)
        real, held = 0, 0
        for row in rows:
            prompt = shapes[row.group][0]
            real += prompt * prompt
            real += sum(
                (length - 1) * (prompt + length - 1) for length in (shapes[row.group][1][j] for j in row.members)
            )
        for block in blocks_of(batch).blocks:
            held += block.queries.numel() * block.keys.shape[1]
        assert real <= held <= MAX_WASTE * real


def test_uniform_groups_share_one_mask() -> None:
    batch = pack(minibatch_of(random_groups([(6, (5, 5, 5))] * 4)), [Row(g, (0, 1, 2), 18) for g in range(4)])
    prompts, responses = blocks_of(batch).blocks
    assert prompts.mask is None
    assert prompts.queries.shape == (4, 6)
    assert responses.queries.shape == (12, 4)
    assert responses.keys.shape == (12, 10)
    assert responses.mask is not None
    assert responses.mask.shape == (1, 1, 4, 10)


# --- inside a model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_a_model_called_plainly_is_what_it_was(architecture: str) -> None:
    model = tiny_model(architecture)
    ids = torch.tensor([[0, 0, 3, 4, 5, 6], [3, 4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        install(model)
        after = model(input_ids=ids, attention_mask=mask).logits
    assert model.config._attn_implementation == IMPLEMENTATION
    assert torch.equal(before[mask.bool()], after[mask.bool()])


def test_the_implementation_is_not_written_into_checkpoints(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    install(model)
    model.save_pretrained(tmp_path)
    assert IMPLEMENTATION not in "".join(path.read_text() for path in tmp_path.glob("*.json"))
