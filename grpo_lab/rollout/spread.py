"""One engine over all ranks: each rank holds an engine, or a part of one, and prompts are dealt out to them.

The leading rank works through its own code (a collection, an evaluation) and asks for responses in the middle of it;
the others stand by until it is done. `lead` is that arrangement: all ranks call it at the same point of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from grpo_lab.distributed import RankLost, World
from grpo_lab.rollout import RolloutEngine
from grpo_lab.types import Prompt, Rollout, Sampling
from grpo_lab.weights import Weights

T = TypeVar("T")
_Request = tuple[Sequence[Prompt], int, Sampling, Sequence[int]]


class SpreadEngine:
    """`inner` is this rank's engine. Of every `ranks_per_engine` neighbouring ranks the inner engines are one, tensor
    parallel: they are asked for the same, and the first answers."""

    def __init__(self, inner: RolloutEngine, world: World, *, ranks_per_engine: int = 1) -> None:
        assert world.size % ranks_per_engine == 0, "each rank belongs to one engine"
        self.inner = inner
        self.world = world
        self.engines = world.size // ranks_per_engine
        self.engine, self.part = divmod(world.rank, ranks_per_engine)

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    @property
    def drift_tolerance(self) -> float:
        return self.inner.drift_tolerance

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def reads_back(self) -> bool:
        return self.inner.reads_back

    @property
    def rows_at_once(self) -> int | None:
        return None if self.inner.rows_at_once is None else self.inner.rows_at_once * self.engines

    def lead(self, work: Callable[[], T]) -> T:
        """`work()` by the leading rank, which may call `generate`; its result on every rank."""
        if not self.world.is_leader:
            while (request := self.world.lead(_nothing)) is not None:
                self._answer(request)
        return self.world.lead(lambda: self._work_and_dismiss(work))

    def _work_and_dismiss(self, work: Callable[[], T]) -> T:
        try:
            result = work()
        except BaseException:
            # The others may be gone already, over the same thing.
            with suppress(RankLost):
                self.world.lead(_nothing)
            raise
        self.world.lead(_nothing)
        return result

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        request: _Request = (prompts, group_size, sampling, seeds)
        parts = self._answer(self.world.lead(lambda: request))
        assert parts is not None, "only the leading rank asks"
        answers: list[list[Rollout]] = [[] for _ in prompts]
        for engine in range(self.engines):
            answers[engine :: self.engines] = parts[engine]
        return answers

    def _answer(self, request: _Request) -> list[list[list[Rollout]]] | None:
        """This rank's share of the prompts; at the leading rank all shares, in the order of engines."""
        prompts, group_size, sampling, seeds = request
        mine = slice(self.engine, None, self.engines)
        answers: list[list[Rollout]] = []
        if prompts[mine]:
            answers = self.inner.generate(prompts[mine], group_size=group_size, sampling=sampling, seeds=seeds[mine])
        shares = self.world.gather_to_leader(answers if self.part == 0 else None)
        return None if shares is None else [share for share in shares if share is not None]

    def load_weights(self, weights: Weights, *, version: int) -> None:
        self.inner.load_weights(weights, version=version)

    def digests(self) -> dict[str, str] | None:
        return self.inner.digests()

    def close(self) -> None:
        self.inner.close()


def _nothing() -> None:
    return None
