"""Named weights on their way from the learner to a sampler: hashing and copying."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, shapes, types and bytes, whatever the order they come in."""
    digests = []
    for name, tensor in weights:
        held = tensor.detach().cpu().contiguous()
        head = f"{name}|{tuple(held.shape)}|{held.dtype}|".encode()
        digests.append(hashlib.blake2b(head + _bytes(held), digest_size=16).digest())
    return hashlib.blake2b(b"".join(sorted(digests)), digest_size=16).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def clone(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A copy on the CPU that later updates leave alone."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
