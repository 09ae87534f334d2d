"""The ranks of a run: who leads, and what they tell each other. A run of one rank needs no process group.

Every rank runs the same loop. What only one can do (sampling, judging, writing files) the leader does, through `lead`,
while the others wait for its result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from grpo_lab.config import HardwareConfig
from grpo_lab.launch import free_port

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

# How long a rank waits for what the leading one does alone. Sampling a collection or an evaluation is one such wait and
# has time limits of its own; over gloo a rank that dies is noticed at once.
PATIENCE = timedelta(hours=12)
# How long it waits inside what all ranks compute together, where NCCL notices nothing of a rank that died.
PASS_PATIENCE = timedelta(minutes=30)


# What gloo and NCCL say of a rank that ended.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")


class LeaderFailed(RuntimeError):
    """The leading rank stopped with an error, which it reports itself."""


class RankLost(RuntimeError):
    """Another rank is gone; it reports why itself."""


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks. `local_rank` counts within its node; `group` is a gloo group of all ranks."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    group: Any = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def lead(self, work: Callable[[], T]) -> T:
        """`work()` done by the leader, its result on every rank.

        Raises:
            LeaderFailed: on the others, where the leader's work raised.
        """
        if self.size == 1:
            return work()
        if not self.is_leader:
            box: list[Any] = [None]
            with noticing_lost_ranks():
                dist.broadcast_object_list(box, src=0, group=self.group)
            if isinstance(box[0], _Failure):
                raise LeaderFailed(box[0].reason)
            result: T = box[0]
            return result
        try:
            result = work()
        except BaseException as error:
            # The others may be gone already, over the same thing.
            with suppress(RuntimeError):
                dist.broadcast_object_list([_Failure(f"{type(error).__name__}: {error}")], src=0, group=self.group)
            raise
        with noticing_lost_ranks():
            dist.broadcast_object_list([result], src=0, group=self.group)
        return result

    def lead_alone(self, work: Callable[[], T]) -> T | None:
        """`work()` done by the leader, its result there, and None on the others, which wait for it.

        Raises:
            LeaderFailed: on the others, where the leader's work raised.
        """
        kept: list[T] = []
        self.lead(lambda: kept.append(work()))
        return kept[0] if kept else None

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """The leading rank's items, one by one, on every rank. All of them take them to the end."""
        if self.size == 1:
            yield from items
            return
        mine = iter(items)
        while (item := self.lead(lambda: next(mine, None))) is not None:
            yield item

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with noticing_lost_ranks():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_leader(self, value: T) -> list[T] | None:
        """Every rank's value, in the order of ranks, on the leading rank; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_leader else None
        with noticing_lost_ranks():
            dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over ranks of arrays of one shape. Exact where at most one rank's entry is not 0."""
        if self.size == 1:
            return values
        total = torch.from_numpy(values.copy())
        with noticing_lost_ranks():
            dist.all_reduce(total, group=self.group)
        return total.numpy()

    def barrier(self) -> None:
        if self.size > 1:
            with noticing_lost_ranks():
                dist.barrier(group=self.group)


def join(*, rank: int = 0, size: int = 1, local_rank: int = 0) -> World:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT, which a launcher has set; alone, at a free port of this host.

    DeepSpeed reads the environment besides, so it is completed here.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}
    if size == 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=PASS_PATIENCE)
    return World(rank, size, local_rank, dist.new_group(backend="gloo", timeout=PATIENCE))


def leave() -> None:
    """Take the process group down, where one was started."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def noticing_lost_ranks() -> Iterator[None]:
    """Around what ranks do together: errors over a connection that ended become `RankLost`; others stay."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST):
            raise
        raise RankLost(f"another rank is gone: {' '.join(str(error).split())}") from error


def device_of(hardware: HardwareConfig, world: World) -> str:
    """This rank's device: the CPU, or the GPU of its place on its node, counted from `hardware.first_gpu`."""
    if hardware.device != "cuda":
        return hardware.device
    return f"cuda:{hardware.first_gpu + world.local_rank}"
