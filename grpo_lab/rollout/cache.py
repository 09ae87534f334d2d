"""A key-value cache with room ahead: a token is written in place instead of copying all that came before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# Positions made room for at a time: the cache is copied once per so many tokens, and this much of it may lie empty.
ROOM = 64


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
