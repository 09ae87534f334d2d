"""Attention of packed rows [prompt | r_1 | ... | r_k]: each response sees its prompt and itself, and nothing else.

A mask over the whole row would have every response attend to all others for nothing. Here queries are taken out of the
rows segment by segment, segments of like length side by side, each against the keys it sees; what is masked is left
out before it is computed. Cost and memory grow with a response's own length, not with its group's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_lab.minibatches import PackedBatch

# By this name transformers finds the function below.
IMPLEMENTATION = "grpo_lab_segments"
# A block of segments may hold this many times the query-key pairs that its segments have by themselves.
MAX_WASTE = 1.25

# (layer's attention module, query [R, h, L, d], key, value [R, h_kv, L, d], scaling) to outputs [R, L, h, d].
SegmentAttention = Callable[[Any, Tensor, Tensor, Tensor, float | None], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Segments attended to side by side: `n` of up to S queries, each seeing up to P prompt keys and its own.

    queries [n, S] and keys [n, P + S] are positions, flat in the batch's R * L; padding repeats position 0.
    mask    [n or 1, 1, S, P + S] bool; None where plain causal attention is meant (no prompt in front)
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """All segments of a batch. `places` [R, L] says where, flat in the blocks' outputs, each position's output is."""

    blocks: tuple[Block, ...]
    places: Tensor

    def to(self, device: torch.device) -> Blocks:
        moved = [
            Block(each.queries.to(device), each.keys.to(device), None if each.mask is None else each.mask.to(device))
            for each in self.blocks
        ]
        return Blocks(tuple(moved), self.places.to(device))


@dataclass(frozen=True, slots=True)
class _Segment:
    """Flat positions: a prompt (prompt_length 0), or a response behind its prompt."""

    start: int
    length: int
    prompt_start: int
    prompt_length: int


def blocks_of(batch: PackedBatch) -> Blocks:
    """The blocks of a packed batch, on the CPU."""
    segments = batch.segments.numpy()
    found = [segment for row in range(len(segments)) for segment in _segments(segments[row], row * segments.shape[1])]
    places = np.zeros(segments.size, dtype=np.int64)
    blocks: list[Block] = []
    offset = 0
    for alike in _alike(found):
        block = _block(alike)
        width = block.queries.shape[1]
        for index, segment in enumerate(alike):
            first = offset + index * width
            places[segment.start : segment.start + segment.length] = np.arange(first, first + segment.length)
        offset += block.queries.numel()
        blocks.append(block)
    return Blocks(tuple(blocks), torch.from_numpy(places.reshape(segments.shape)))


def _segments(row: np.ndarray, offset: int) -> Iterator[_Segment]:
    """The segments of one row, from its labels: 0 for the prompt, k for the k-th response, -1 for padding."""
    edges = np.flatnonzero(np.diff(row)) + 1
    prompt = int(edges[0]) if len(edges) else len(row)
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(row)], strict=True):
        if row[start] >= 0:
            yield _Segment(offset + start, stop - start, offset, prompt if row[start] else 0)


def _alike(segments: Sequence[_Segment]) -> Iterator[list[_Segment]]:
    """Segments of like size together: prompts, then responses, the longest first."""
    held: list[_Segment] = []
    real = 0
    for segment in sorted(segments, key=lambda each: (each.prompt_length > 0, -each.length, -each.prompt_length)):
        pairs = segment.length * (segment.prompt_length + segment.length)
        if held:
            longest = max(each.prompt_length for each in [*held, segment])
            area = (len(held) + 1) * held[0].length * (longest + held[0].length)
            if bool(held[0].prompt_length) != bool(segment.prompt_length) or area > MAX_WASTE * (real + pairs):
                yield held
                held, real = [], 0
        held.append(segment)
        real += pairs
    yield held


def _block(segments: Sequence[_Segment]) -> Block:
    starts = np.array([segment.start for segment in segments])[:, None]
    lengths = np.array([segment.length for segment in segments])[:, None]
    own = np.arange(lengths.max())[None, :]
    queries = np.where(own < lengths, starts + own, 0)
    if not segments[0].prompt_length:
        return Block(torch.from_numpy(queries), torch.from_numpy(queries), None)
    prompt_starts = np.array([segment.prompt_start for segment in segments])[:, None]
    prompt_lengths = np.array([segment.prompt_length for segment in segments])[:, None]
    before = np.arange(prompt_lengths.max())[None, :]
    seen = before < prompt_lengths
    keys = np.concatenate([np.where(seen, prompt_starts + before, 0), queries], axis=1)
    causal = own <= own.T
    if seen.all():
        # One mask for all of them.
        seen = seen[:1]
    shape = (len(seen), own.size)
    mask = np.concatenate(
        [
            np.broadcast_to(seen[:, None, :], (*shape, before.size)),
            np.broadcast_to(causal[None], (*shape, own.size)),
        ],
        axis=2,
    )
    return Block(torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(mask[:, None]))


def attend(blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """[R, L, h, d] from queries [R, h, L, d] and keys and values [R, h_kv, L, d]; anything at padding."""
    rows, heads, length, dim = query.shape
    # Under a mask the fused kernels of CUDA want as many keys as queries, or full scores are kept.
    repeats = heads // key.shape[1] if query.is_cuda else 1
    flat_query, flat_key, flat_value = (each.transpose(1, 2).reshape(rows * length, -1) for each in (query, key, value))
    outputs = []
    for block in blocks.blocks:
        # `embedding` and not indexing: its backward pass adds whole rows, in parallel and in a fixed order.
        taken = F.embedding(block.queries, flat_query).unflatten(-1, (heads, dim)).transpose(1, 2)
        keys = F.embedding(block.keys, flat_key).unflatten(-1, (key.shape[1], dim)).transpose(1, 2)
        values = F.embedding(block.keys, flat_value).unflatten(-1, (value.shape[1], value.shape[-1])).transpose(1, 2)
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        output = F.scaled_dot_product_attention(
            taken,
            keys,
            values,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
            enable_gqa=keys.shape[1] != heads,
        )
        outputs.append(output.transpose(1, 2).reshape(block.queries.numel(), -1))
    together = F.embedding(blocks.places, torch.cat(outputs))
    return together.unflatten(-1, (heads, value.shape[-1]))


# Keywords of attention that change what is computed, which `attend` does not do.
_CHANGES = ("softcap", "s_aux", "sliding_window")


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_attention: SegmentAttention | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer. Without `segment_attention`, its own fused attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if segment_attention is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output
    for name in _CHANGES:
        assert options.get(name) is None, f"{type(module).__name__} asks for {name}, which rows of a group do not have"
    return segment_attention(module, query, key, value, options.get("scaling")), None


def install(model: Any) -> None:
    """Have the model's layers hand attention to whoever passes `segment_attention` to its forward pass.

    Called without, the model is what it was.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)


def handed_through(device: torch.device) -> Tensor:
    """A mask that transformers passes on as it is, in place of making one [L, L] that nobody reads."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def prompt_attention() -> SegmentAttention:
    """For prompts [R, L] padded on the right, each a row of its own: what is behind a position is not seen."""

    def segment_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        shared = key.shape[1] != query.shape[1]
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=shared)
        return output.transpose(1, 2)

    return segment_attention


def packed_attention(batch: PackedBatch, device: torch.device) -> dict[str, Any]:
    """What to pass to a model's forward pass, `install` done, with a packed batch's tokens and positions."""
    blocks = blocks_of(batch).to(device)

    def segment_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        return attend(blocks, query, key, value, scaling)

    return {"attention_mask": handed_through(device), "segment_attention": segment_attention}
