"""The recorded pools that a table's offline runs learn from: one for all runs that sample alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import run_child
from grpo_lab.ledger import sampling_settings, short_hash
from grpo_lab.schedule import Schedule


@dataclass(frozen=True, slots=True)
class PoolRecipe:
    """A pool's folder, named after the hash of what decides its groups, and the words of `grpo_lab.pool` for it."""

    folder: Path
    words: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """What records it."""
        return ["python", "-m", "grpo_lab.pool", f"out={self.folder}", *self.words]


def pool_recipe(config: TrainConfig, words: Sequence[str], place: Path) -> PoolRecipe:
    """The pool, inside `place`, that a run with `source=pool` and these words learns from."""
    schedule = Schedule.from_config(config)
    decides = sampling_settings(config) | {"updates": schedule.updates, "i": schedule.i}
    return PoolRecipe(place / f"seed{config.seed}_{short_hash(decides)}", tuple(words))


def missing_pools(recipes: Sequence[PoolRecipe]) -> list[PoolRecipe]:
    """Those that are not there, each once."""
    return [recipe for recipe in {recipe.folder: recipe for recipe in recipes}.values() if not recipe.folder.exists()]


def record(recipes: Sequence[PoolRecipe]) -> None:
    """Record pools, one after the other.

    Raises:
        ConfigError: one could not be recorded; why is on the terminal.
    """
    for recipe in recipes:
        print(f"recording the pool {recipe.folder}", file=sys.stderr, flush=True)
        recipe.folder.parent.mkdir(parents=True, exist_ok=True)
        if run_child([sys.executable, *recipe.command[1:]], {}):
            raise ConfigError(f"the pool {recipe.folder} could not be recorded: mend what is said above, then go on")
