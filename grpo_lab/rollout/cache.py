"""Key-value caches with room ahead: a token is written in place instead of copying all that came before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions made room for at a time: the cache is copied once per so many tokens, and this much of it may lie empty.
ROOM = 64
# Prompts of up to so many tokens are copied to each of their rows.
COPIED_PROMPT = 32


class RoomyLayer(DynamicLayer):
    """A transformers cache layer whose `keys` and `values` are the filled parts of larger buffers.

    Selecting or repeating rows (the base class's own methods) leaves plain tensors; the next token makes room anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            self.keys = self._append("keys", self.keys, key_states)
            self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        length, stop = held.shape[-2], held.shape[-2] + new.shape[-2]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.data_ptr() != held.data_ptr() or buffer.shape[-2] < stop:
            buffer = held.new_empty(*held.shape[:-2], stop + ROOM, held.shape[-1])
            buffer[..., :length, :] = held
            self._buffers[name] = buffer
        buffer[..., length:stop, :] = new
        return buffer[..., :stop, :]


def make_cache(config: Any) -> DynamicCache:
    """An empty cache for a model of this config; layers of another kind (sliding windows) stay as transformers has
    them."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@dataclass
class _Layer:
    """One layer's keys and values: of the prompts [G, h_kv, P, d], and of each row's own tokens [B, h_kv, room, d]."""

    prompt_keys: Tensor
    prompt_values: Tensor
    keys: Tensor
    values: Tensor


class GroupCache:
    """Keys and values of prompts, once for each group, and of the tokens sampled since, for each row.

    A transformers model calls `update`; attention over what is held is `attend`. Held and computed in float32 at least:
    a score rounded to BF16 would be off by more than all the rest of a BF16 pass. Prompts too short to be worth a
    matrix product of their own are copied to their rows.

    prompt_lengths  [G]
    """

    def __init__(self, prompt_lengths: Tensor, group_size: int) -> None:
        device, width = prompt_lengths.device, int(prompt_lengths.max())
        self.group_size = group_size
        self.groups = len(prompt_lengths)
        self._copied = width if width <= COPIED_PROMPT else 0
        # Columns in the rows' own keys.
        self.length = self._copied
        # The place of each row among G * m; None while all of them are there.
        self._slots: Tensor | None = None
        self._layers: dict[int, _Layer] = {}
        # [G, 1, 1, P] or, for copied prompts, [B, 1, 1, P]: minus infinity where a prompt is padded.
        self._bias: Tensor | None = None
        padding = torch.arange(width, device=device)[None] >= prompt_lengths[:, None]
        if padding.any():
            bias = torch.zeros(padding.shape, device=device).masked_fill(padding, -torch.inf)[:, None, None]
            self._bias = bias.repeat_interleave(group_size, 0) if self._copied else bias

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """What transformers asks of a cache; positions are given to it, so that nothing follows from this."""
        return self.length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take in what a layer computed; its own keys and values go on to attention."""
        held = self._layers.get(layer)
        if held is None:
            self._layers[layer] = self._start(keys, values)
        else:
            held.keys = self._write(held.keys, keys)
            held.values = self._write(held.values, values)
        return keys, values

    def _start(self, keys: Tensor, values: Tensor) -> _Layer:
        wide = torch.promote_types(keys.dtype, torch.float32)
        keys, values = keys.to(wide).contiguous(), values.to(wide).contiguous()
        # Where a prompt is not copied its rows begin empty.
        own = [each[:, :, : self._copied].repeat_interleave(self.group_size, 0) for each in (keys, values)]
        return _Layer(keys, values, *own)

    def _write(self, held: Tensor, new: Tensor) -> Tensor:
        if self.length == held.shape[2]:
            roomy = held.new_empty(*held.shape[:2], self.length + ROOM, held.shape[3])
            roomy[:, :, : self.length] = held
            held = roomy
        held[:, :, self.length] = new[:, :, 0]
        return held

    def advance(self) -> None:
        """The token of this step is in every layer."""
        self.length += 1

    def attend(self, module: Any, query: Tensor, _key: Tensor, _value: Tensor, scaling: float | None) -> Tensor:
        """[B, 1, h, d] from queries [B, h, 1, d] over the prompt's and the row's own keys, this step's included."""
        # Autocast would round what is held in float32.
        with torch.autocast(query.device.type, enabled=False):
            return self._attend(self._layers[module.layer_idx], query, scaling)

    def _attend(self, held: _Layer, query: Tensor, scaling: float | None) -> Tensor:
        rows, heads, _, dim = query.shape
        kv, length = held.keys.shape[1], self.length + 1
        # Heads that share keys are rows of one matrix product.
        queries = query.to(held.keys.dtype).reshape(rows * kv, heads // kv, dim)
        queries = queries * (dim**-0.5 if scaling is None else scaling)
        own = torch.bmm(queries, held.keys[:, :, :length].flatten(0, 1).transpose(1, 2))
        values = held.values[:, :, :length].flatten(0, 1)
        if self._copied:
            if self._bias is not None:
                own.view(rows, kv, -1, length)[..., : self._copied].add_(self._bias)
            output = torch.bmm(torch.softmax(own, -1), values)
        else:
            prompt = self._of_prompts(queries, held.prompt_keys.transpose(-1, -2), self._bias)
            weights = torch.softmax(torch.cat([prompt, own], -1), -1)
            before = self._of_prompts(weights[..., : -own.shape[-1]], held.prompt_values, None)
            output = torch.baddbmm(before, weights[..., -own.shape[-1] :], values)
        return output.view(rows, 1, heads, -1).to(query.dtype)

    def _of_prompts(self, of_rows: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        """Rows [B * h_kv, s, x] by their prompt's matrix [G, h_kv, x, y], one product a group: [B * h_kv, s, y]."""
        kv, m, (_, shared, width) = matrices.shape[1], self.group_size, of_rows.shape
        rows = of_rows.view(-1, kv, shared, width)
        if self._slots is not None:
            rows = rows.new_zeros(self.groups * m, kv, shared, width).index_copy_(0, self._slots, rows)
        grouped = rows.view(self.groups, m, kv, shared, width).transpose(1, 2).reshape(-1, kv, m * shared, width)
        product = grouped @ matrices
        if bias is not None:
            product += bias
        rows = product.view(self.groups, kv, m, shared, -1).transpose(1, 2).flatten(0, 1)
        return (rows if self._slots is None else rows[self._slots]).reshape(len(of_rows), shared, -1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these of the present rows; prompts without any left are dropped."""
        for layer in self._layers.values():
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        if self._copied:
            self._bias = None if self._bias is None else self._bias[rows]
            return
        m = self.group_size
        slots = rows if self._slots is None else self._slots[rows]
        alive, order = torch.unique(slots // m, return_inverse=True)
        if len(alive) < self.groups:
            for layer in self._layers.values():
                layer.prompt_keys, layer.prompt_values = layer.prompt_keys[alive], layer.prompt_values[alive]
            self._bias = None if self._bias is None else self._bias[alive]
            self.groups = len(alive)
        slots = order * m + slots % m
        self._slots = None if len(slots) == self.groups * m else slots
