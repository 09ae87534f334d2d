"""Parameters that may be sharded over ranks (ZeRO stage 3), gathered a bucket at a time. Others pass as they are.

Gathering is something that ranks do together: all of them, for the same buckets, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

# Bytes gathered at a time; a parameter larger than this comes alone.
BUCKET_BYTES = 256 * 2**20


def gathered(parameters: Sequence[nn.Parameter], *, modified: bool = False) -> AbstractContextManager[Any]:
    """Within it the parameters are whole on every rank. `modified`: what rank 0 then holds is kept on all ranks."""
    import deepspeed

    modifier = 0 if modified else None
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=modifier)
    return context


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name, tied ones under each of theirs. A tensor is valid until the next is asked for."""
    for bucket in _buckets(list(model.named_parameters(remove_duplicate=False))):
        with gathered([parameter for _, parameter in bucket]):
            for name, parameter in bucket:
                yield name, parameter.detach()


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give `target`, of the same shape and sharded the same way, the values of `source`."""
    theirs = dict(target.named_parameters())
    for bucket in _buckets(list(source.named_parameters())):
        ours = [parameter for _, parameter in bucket]
        with gathered(ours), gathered([theirs[name] for name, _ in bucket], modified=True), torch.no_grad():
            for name, parameter in bucket:
                theirs[name].copy_(parameter)


def set_parameters(target: nn.Module, value_of: Callable[[str], Tensor]) -> None:
    """Give `target` its values by name, the same on every rank."""
    for bucket in _buckets(list(target.named_parameters())):
        with gathered([parameter for _, parameter in bucket], modified=True), torch.no_grad():
            for name, parameter in bucket:
                parameter.copy_(value_of(name))


def _buckets(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Neighbours together, up to `BUCKET_BYTES` of their whole size."""
    bucket: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in named:
        size = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if bucket and held + size > BUCKET_BYTES:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, parameter))
        held += size
    if bucket:
        yield bucket
