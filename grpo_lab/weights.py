"""Named weights on their way from the learner to a sampler: hashing and copying.

Weights travel as a stream of (name, tensor). A tensor is valid only until the next is asked for: a sharded learner
gathers a bucket at a time and lets it go again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

Weights = Iterable[tuple[str, Tensor]]


def digest(name: str, tensor: Tensor) -> str:
    """A hash of one weight's name, shape, type and bytes. It is to find mistakes, not forgers, and takes the time that
    reading the bytes takes."""
    held = tensor.detach().cpu().contiguous()
    hasher = xxhash.xxh3_128(f"{name}|{tuple(held.shape)}|{held.dtype}|".encode())
    hasher.update(_bytes(held).data)
    return hasher.hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """One hash of all, whatever the order they came in."""
    return xxhash.xxh3_128("".join(sorted(digests.values())).encode()).hexdigest()


def fingerprint(weights: Weights) -> str:
    """A hash of names, shapes, types and bytes, whatever the order they come in."""
    return combine({name: digest(name, tensor) for name, tensor in weights})


def cast(weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The stream in `dtype`."""
    for name, tensor in weights:
        yield name, tensor.detach().to(dtype)


def hashed(weights: Weights, digests: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The stream, with each weight's digest noted as it passes."""
    for name, tensor in weights:
        digests[name] = digest(name, tensor)
        yield name, tensor


def _bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor, where they are."""
    return tensor.flatten().view(torch.uint8).numpy()


def copied(weights: Weights, copies: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The stream, with a copy of each weight made as it passes: on the CPU, where later updates leave it alone."""
    for name, tensor in weights:
        copies[name] = tensor.detach().to("cpu", copy=True)
        yield name, tensor
