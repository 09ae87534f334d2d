"""A pool in memory, checked, and the source that gives its groups out in their order, each once (GG C.3)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.collect import Collection, Exhausted
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.offline.files import content_hash, file_hash, read_part
from grpo_lab.offline.header import Header, PoolError, read_header
from grpo_lab.offline.identity import template_hash, tokenizer_hash
from grpo_lab.prompts import render
from grpo_lab.types import Group

# Groups whose prompts are rendered again, and whose first response is scored, spread over the pool.
SPOT_CHECKS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """The groups of a pool as they were written, with its header."""

    path: Path
    header: Header
    groups: tuple[Group, ...]

    @property
    def sample(self) -> tuple[Group, ...]:
        """A few groups, spread evenly."""
        count = min(SPOT_CHECKS, len(self.groups))
        return tuple(self.groups[index * len(self.groups) // count] for index in range(count))


def load_pool(folder: Path) -> Pool:
    """Read a pool and check that it is as it was written.

    Raises:
        PoolError: a file is missing or changed.
    """
    header = read_header(folder)
    for name, written in header.parts.items():
        if not (folder / name).is_file():
            raise PoolError(f"pool.path={folder}: {name} is missing: fetch the pool again, or make it again")
        if file_hash(folder / name) != written:
            raise PoolError(f"pool.path={folder}: {name} is not as it was written: fetch or make the pool again")
    groups = tuple(group for name in header.parts for group in read_part(folder / name))
    if content_hash(groups) != header.content:
        raise PoolError(f"pool.path={folder}: the groups are not those that pool.json is of: fetch or make it again")
    return Pool(path=folder, header=header, groups=groups)


def check_prompts(pool: Pool, config: TrainConfig, tokenizer: Any) -> None:
    """Whether the pool's tokens mean to this run what they meant to the sampler, and its prompts are this run's.

    Raises:
        PoolError: another tokenizer, or another template.
    """
    where, dataset = f"pool.path={pool.path}", config.dataset
    if tokenizer_hash(tokenizer) != pool.header.tokenizer:
        raise PoolError(
            f"{where} was made with another tokenizer than model={config.model.name} has (by "
            f"{pool.header.sampler.model}): its tokens would mean other text; make a pool with this model"
        )
    if pool.header.template is None:
        return
    again = render(
        [group.prompt.problem for group in pool.sample],
        dataset,
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    ).prompts
    same = [prompt.token_ids for prompt in again] == [group.prompt.token_ids for group in pool.sample]
    if template_hash(dataset, tokenizer) != pool.header.template or not same:
        raise PoolError(
            f"{where} has prompts of another template than this run's (its data set: {pool.header.dataset}): set "
            "dataset.template, dataset.system_prompt, dataset.chat and the model's chat template as they were, or make "
            "the pool again"
        )


class PoolSource:
    """The groups of a pool in their order, each once, and at most as many as fill minibatches."""

    def __init__(self, pool: Pool, *, groups_per_minibatch: int) -> None:
        self._pool = pool
        self._size = groups_per_minibatch
        self.taken = 0

    def collect(self, wanted: int) -> Collection | Exhausted:
        """The next `wanted` groups, or what is left of them at the pool's end in whole minibatches.

        Nothing was sampled for them, so that nothing adds to the totals.
        """
        left = len(self._pool.groups) - self.taken
        count = min(wanted, left // self._size * self._size)
        if not count:
            return Exhausted(drawn=left, kept=left)
        groups = self._pool.groups[self.taken : self.taken + count]
        self.taken += count
        return Collection(
            groups=groups,
            accounting={"pool/taken": float(self.taken), "pool/left": float(len(self._pool.groups) - self.taken)},
            totals={"total/responses": 0, "total/tokens": 0},
            epoch_completed=False,
        )

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken, "content": self._pool.header.content}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ConfigError: it is of another pool.
        """
        if state["content"] != self._pool.header.content:
            raise ConfigError(
                f"pool.path={self._pool.path} holds another pool than the run began with (content "
                f"{self._pool.header.content[:12]}, it was {state['content'][:12]}): put the old one back"
            )
        self.taken = state["taken"]
