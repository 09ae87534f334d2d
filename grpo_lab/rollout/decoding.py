"""One forward pass after another with what was computed before kept: prompts first, then a token a row.

`PromptDecoder` holds the keys and values of a prompt once for its whole group; `PlainDecoder` is for models whose
attention cannot be replaced (sliding windows) and holds them for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_lab.attention import handed_through, install, prompt_attention
from grpo_lab.policy import takes_groups
from grpo_lab.rollout.cache import GroupCache, make_cache
from grpo_lab.types import Prompt


class Decoder(Protocol):
    """The rows of one batch: `group_size` for each prompt, side by side, fewer as they finish."""

    def prefill(self, prompts: Sequence[Prompt], group_size: int) -> Tensor:
        """The logits [P * m, V] of each row's first token."""
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """The logits [B, V] after each row's token [B]."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these of the present rows, given by their numbers in rising order."""
        ...


def make_decoder(model: Any) -> Decoder:
    """A decoder for one batch; the model stays as it is for others."""
    if not takes_groups(model):
        return PlainDecoder(model)
    install(model)
    return PromptDecoder(model)


class PromptDecoder:
    """See the module: attention is over the prompt's keys, read once a group, and a row's own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    def prefill(self, prompts: Sequence[Prompt], group_size: int) -> Tensor:
        lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
        lengths = lengths.to(self.device)
        self.cache = GroupCache(lengths, group_size)
        hidden = self._hidden(
            ids.to(self.device),
            torch.arange(ids.shape[1], device=self.device).expand(len(prompts), -1),
            prompt_attention(),
        )
        last = hidden[torch.arange(len(prompts), device=self.device), lengths - 1]
        self.positions = lengths.repeat_interleave(group_size)
        return self._logits(last).repeat_interleave(group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        hidden = self._hidden(tokens[:, None], self.positions[:, None], self.cache.attend)
        self.positions = self.positions + 1
        self.cache.advance()
        return self._logits(hidden[:, -1])

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.positions = self.positions[rows]

    def _hidden(self, ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        hidden: Tensor = self.model.base_model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            attention_mask=handed_through(self.device),
            segment_attention=attention,
        ).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits


class PlainDecoder:
    """Any causal language model of transformers, prompts padded on the left."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = next(model.parameters()).device

    def prefill(self, prompts: Sequence[Prompt], group_size: int) -> Tensor:
        width = max(len(prompt.token_ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        self.cache = make_cache(self.model.config)
        self.mask = mask.to(self.device)
        logits = self._forward(ids.to(self.device), (self.mask.cumsum(-1) - 1).clamp(min=0))
        self.cache.batch_repeat_interleave(group_size)
        self.mask = self.mask.repeat_interleave(group_size, 0)
        return logits.repeat_interleave(group_size, 0)

    def step(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        return self._forward(tokens[:, None], self.mask.sum(-1, keepdim=True) - 1)

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids,
            # Without padding there is nothing to mask, and attention is faster unmasked.
            attention_mask=None if bool(self.mask.all()) else self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
