"""What tensors as wide as a vocabulary hold at once."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WideTensors(TorchDispatchMode):
    """`peak`: the most bytes of live tensors [..., width] while this is entered, each storage counted once.

    `leave_out`: bytes of the output matrix, whose transpose is that wide as well and is no logits.
    """

    def __init__(self, *, width: int, leave_out: int) -> None:
        super().__init__()
        self.width = width
        self.leave_out = leave_out
        self.peak = 0
        self._live: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and self._is_wide(leaf)]
        for tensor in found:
            storage = tensor.untyped_storage()
            self._live[id(tensor)] = (weakref.ref(tensor), storage.data_ptr(), storage.nbytes())
        if found:
            self._live = {key: entry for key, entry in self._live.items() if entry[0]() is not None}
            self.peak = max(self.peak, sum({pointer: size for _, pointer, size in self._live.values()}.values()))
        return result

    def _is_wide(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2 or tensor.shape[-1] != self.width:
            return False
        return tensor.untyped_storage().nbytes() != self.leave_out
