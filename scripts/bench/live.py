"""What tensors hold at once, counted as they are made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """`peak`: the most bytes at once of what is made while this is entered, each storage counted once.

    `width`: only tensors [..., width] count. `before`: tensors that were there already, and what is a view of them.
    """

    def __init__(self, *, before: Iterable[Tensor] = (), width: int | None = None) -> None:
        super().__init__()
        self.width = width
        self.peak = 0
        self._before = {tensor.data_ptr() for tensor in before}
        self._live: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and self._counts(leaf)]
        for tensor in found:
            # The storage and not the tensor: what autograd saves outlives the tensor that it was made as.
            storage = tensor.untyped_storage()
            self._live[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
        if found:
            self._live = {pointer: entry for pointer, entry in self._live.items() if entry[0]() is not None}
            self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _counts(self, tensor: Tensor) -> bool:
        if self.width is not None and (tensor.dim() < 2 or tensor.shape[-1] != self.width):
            return False
        return tensor.untyped_storage().data_ptr() not in self._before
