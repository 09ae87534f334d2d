"""The rows of a minibatch dealt to ranks, so that all have about as much to do and run equally many passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.minibatches import Row, micro_batches


@dataclass(frozen=True, slots=True)
class Deal:
    """The micro-batches of each rank, and a row that a rank runs through where it has fewer than others.

    Every rank runs `passes` passes, since an engine that shards gradients or parameters talks to the others inside
    each. What `filler` gives is thrown away.
    """

    batches: list[list[list[Row]]]
    filler: Row

    @property
    def passes(self) -> int:
        return max(len(own) for own in self.batches)

    def of(self, rank: int) -> list[list[Row] | None]:
        """A rank's passes; None is one through `filler`."""
        own = self.batches[rank]
        return [*own, *[None] * (self.passes - len(own))]

    @property
    def padding_share(self) -> float:
        """The share of positions, over all ranks, that are padding or filler."""
        real = sum(row.length for own in self.batches for batch in own for row in batch)
        held = sum(len(batch) * batch[0].length for own in self.batches for batch in own)
        idle = sum(self.passes - len(own) for own in self.batches) * self.filler.length
        return 1 - real / (held + idle)


def deal(rows: Sequence[Row], *, ranks: int, budget: int) -> Deal:
    """Rows to ranks, the longest first to the rank with the least so far (ties: the lower rank), then cut by `budget`.

    The same on every rank, since it depends on the rows alone.
    """
    hands: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda row: (-row.length, row.group, row.members)):
        rank = loads.index(min(loads))
        hands[rank].append(row)
        loads[rank] += row.length
    filler = min(rows, key=lambda row: (row.length, row.group, row.members))
    return Deal([micro_batches(hand, budget=budget) for hand in hands], filler)
