"""Groups to packed rows to micro-batches to tensors.

A packed row is [prompt | r_1 | ... | r_k]: the members of one group behind their prompt, which is computed once. Each
response attends to the prompt and to itself, at the positions it would have alone, so that its log-probs are those of
the plain form. A row usually holds a whole group; a group longer than the token budget is cut into several rows, each
with its own copy of the prompt. A model whose attention cannot take such a mask gets rows of one response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_lab.types import Counts, Group

MAX_PADDING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """The groups of `i` optimizer updates. `index` counts minibatches from 0 over the whole run.

    `kept` flags the groups that carry weight (all, unless zero-variance groups are masked).
    """

    index: int
    groups: tuple[Group, ...]
    kept: tuple[bool, ...]
    counts: Counts

    @property
    def group_size(self) -> int:
        return len(self.groups[0].rollouts)


def make_minibatch(index: int, groups: Sequence[Group], *, mask_zero_variance: bool, mask_divisor: str) -> Minibatch:
    """A minibatch with its divisors.

    `mask_divisor="all"`: masked groups count in the divisors (RG Eq. 8 takes the indicator inside the expectation over
    prompts); `"kept"`: they do not.
    """
    kept = tuple(group.is_mixed or not mask_zero_variance for group in groups)
    counted = [group for group, keep in zip(groups, kept, strict=True) if keep or mask_divisor == "all"]
    counts = Counts(
        tokens=sum(group.num_tokens for group in counted),
        responses=sum(len(group.rollouts) for group in counted),
        groups=len(counted),
    )
    return Minibatch(index=index, groups=tuple(groups), kept=kept, counts=counts)


@dataclass(frozen=True, slots=True)
class Row:
    """Some members of one group, to be packed behind their prompt."""

    group: int
    members: tuple[int, ...]
    length: int


def plan_rows(minibatch: Minibatch, *, budget: int, whole_groups: bool = True) -> list[Row]:
    """Rows of at most `budget` positions: whole groups where they fit, else as many members a row as fit.

    `whole_groups=False` gives rows of one response.
    """
    rows = []
    for g, group in enumerate(minibatch.groups):
        prompt = len(group.prompt.token_ids)
        # The last token of a response is predicted but predicts nothing: it is not an input.
        inputs = [len(rollout.token_ids) - 1 for rollout in group.rollouts]
        members: list[int] = []
        length = prompt
        for j, extra in enumerate(inputs):
            if members and (length + extra > budget or not whole_groups):
                rows.append(Row(g, tuple(members), length))
                members, length = [], prompt
            members.append(j)
            length += extra
        rows.append(Row(g, tuple(members), length))
    return rows


def splits_groups(rows: Sequence[Row], minibatch: Minibatch) -> bool:
    return len(rows) > len(minibatch.groups)


def micro_batches(rows: Sequence[Row], *, budget: int) -> list[list[Row]]:
    """Rows ordered by length (ties by position), filled up to `budget` positions with padding counted.

    No row is padded by more than `MAX_PADDING` of its batch's width: one outlier would widen all others.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (-row.length, row.group, row.members)):
        # Longest first: the first row of a batch sets its width.
        width = batches[-1][0].length if batches else 0
        fits = batches and (len(batches[-1]) + 1) * width <= budget
        if fits and row.length >= (1 - MAX_PADDING) * width:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def padding_share(batches: Sequence[Sequence[Row]]) -> float:
    """The share of positions that are padding."""
    held = sum(len(batch) * batch[0].length for batch in batches)
    return 1 - sum(row.length for batch in batches for row in batch) / held


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Tensors of one micro-batch: R packed rows of width L, and its B responses of up to T tokens.

    input_ids, position_ids  [R, L]
    segments      [R, L] 0 for the prompt, k for the k-th response of the row, -1 for padding
    predictors    [N] the position (flat in R * L) whose hidden state predicts each response token, N = loss_mask.sum()
    tokens        [N] those tokens, in the order of loss_mask's True entries
    loss_mask     [B, T] bool
    responses     the (group, member) of each of the B rows
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Tensor
    predictors: Tensor
    tokens: Tensor
    loss_mask: Tensor
    responses: tuple[tuple[int, int], ...]


def pack(minibatch: Minibatch, rows: Sequence[Row], *, pad_id: int = 0) -> PackedBatch:
    """The tensors of one micro-batch, on the CPU."""
    length = max(row.length for row in rows)
    input_ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    position_ids = np.zeros((len(rows), length), dtype=np.int64)
    segments = np.full((len(rows), length), -1, dtype=np.int64)
    predictors, tokens, lengths, responses = [], [], [], []
    for r, row in enumerate(rows):
        group = minibatch.groups[row.group]
        prompt = len(group.prompt.token_ids)
        input_ids[r, :prompt] = group.prompt.token_ids
        position_ids[r, :prompt] = np.arange(prompt)
        segments[r, :prompt] = 0
        start = prompt
        for k, member in enumerate(row.members, start=1):
            response = group.rollouts[member].token_ids
            stop = start + len(response) - 1
            input_ids[r, start:stop] = response[:-1]
            position_ids[r, start:stop] = np.arange(prompt, prompt + len(response) - 1)
            segments[r, start:stop] = k
            predictors.append(r * length + np.concatenate(([prompt - 1], np.arange(start, stop))))
            tokens.append(response)
            lengths.append(len(response))
            responses.append((row.group, member))
            start = stop
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        segments=torch.from_numpy(segments),
        predictors=torch.from_numpy(np.concatenate(predictors)),
        tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        loss_mask=torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None],
        responses=tuple(responses),
    )


def padded(values: Sequence[np.ndarray], like: Tensor) -> Tensor:
    """[B, T] from the per-token values of each response, in the rows of the mask `like`; 0 behind the mask."""
    out = torch.zeros(like.shape, dtype=torch.float32)
    out[like] = torch.from_numpy(np.concatenate(values).astype(np.float32))
    return out
