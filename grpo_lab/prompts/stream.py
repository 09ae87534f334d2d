"""An endless, seeded, resumable order over the prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_lab.config import ConfigError
from grpo_lab.types import Prompt


class PromptStream:
    """Prompts without end: every pass has each prompt once, in an order that depends on (seed, epoch) alone.

    `epoch` counts completed passes and `cursor` the prompts taken of the current one. Taking the last prompt of a
    pass completes it: epoch + 1, cursor 0.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        """Raises ConfigError if there are no prompts."""
        if not prompts:
            raise ConfigError("there are no training prompts: dataset.held_out=1 makes an evaluation set of a data set")
        self._prompts = list(prompts)
        self._seed = seed
        self._digest = _digest(self._prompts)
        self.epoch = 0
        self.cursor = 0
        self._order = self._shuffled(0)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def remaining_in_epoch(self) -> int:
        """Prompts left in the current pass: `len(self)` right at its start, never 0."""
        return len(self) - self.cursor

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts. Where a pass ends inside them, the next one fills up."""
        taken: list[Prompt] = []
        while len(taken) < n:
            stop = min(self.cursor + n - len(taken), len(self))
            taken += [self._prompts[index] for index in self._order[self.cursor : stop]]
            self.cursor = stop
            if self.cursor == len(self):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._shuffled(self.epoch)
        return taken

    def state(self) -> dict[str, Any]:
        """All that `load_state` needs, as plain numbers and text."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self._seed,
            "count": len(self),
            "digest": self._digest,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ConfigError: the prompts, or the seed of their order, are not those of the saved run.
        """
        if state["count"] != len(self):
            raise ConfigError(
                f"the saved run had {state['count']} prompts, this one has {len(self)}: resume with the data set, "
                "model and rollout.max_prompt_tokens of the saved run"
            )
        if state["digest"] != self._digest:
            raise ConfigError(
                "the prompts are not those of the saved run, though as many: resume with its data set, template and "
                "tokenizer"
            )
        if state["seed"] != self._seed:
            raise ConfigError(f"seed={self._seed} is not the saved run's {state['seed']}: resume with the same seed")
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])
        self._order = self._shuffled(self.epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        """The order of one pass. Raw Philox words, because their values are the same in every numpy version."""
        key = np.array([self._seed % 2**64, epoch], dtype=np.uint64)
        order: list[int] = np.argsort(np.random.Philox(key=key).random_raw(len(self)), kind="stable").tolist()
        return order


def _digest(prompts: Sequence[Prompt]) -> str:
    content = hashlib.sha256()
    for prompt in prompts:
        content.update(f"{prompt.id}:{','.join(map(str, prompt.token_ids))};".encode())
    return content.hexdigest()[:16]
