"""The recorded pools that a table's offline runs learn from: one for all runs that sample alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import run_child
from grpo_lab.ledger import result_settings, short_hash

# What decides the groups of a pool, of all that decides a run's results; besides, which groups are dropped, how many
# are sampled at a time, and how many in all.
SAMPLING = ("model", "dataset", "rollout", "verifier", "collection", "group_size", "groups_per_minibatch", "seed")


@dataclass(frozen=True, slots=True)
class PoolRecipe:
    """A pool's folder, named after the hash of what decides its groups, and the words of `grpo_lab.pool` for it."""

    folder: Path
    words: tuple[str, ...]


def pool_recipe(config: TrainConfig, words: Sequence[str], place: Path) -> PoolRecipe:
    """The pool, inside `place`, that a run with `source=pool` and these words learns from."""
    # As the run that would sample it, whose collections are a sync's.
    settings = result_settings(replace(config, source="policy"))
    schedule: dict[str, Any] = settings["schedule"]
    decides = {
        **{key: settings[key] for key in SAMPLING},
        "zero_variance": settings["objective"]["zero_variance"],
        **{key: schedule[key] for key in ("minibatches_per_collection", "updates", "i")},
    }
    return PoolRecipe(place / f"seed{config.seed}_{short_hash(decides)}", tuple(words))


def record_missing(recipes: Sequence[PoolRecipe]) -> None:
    """Record each pool that is not there, one after the other.

    Raises:
        ConfigError: one could not be recorded; why is on the terminal.
    """
    for recipe in {recipe.folder: recipe for recipe in recipes}.values():
        if recipe.folder.exists():
            continue
        print(f"recording the pool {recipe.folder}", file=sys.stderr, flush=True)
        recipe.folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "grpo_lab.pool", f"out={recipe.folder}", *recipe.words]
        if run_child(command, {}):
            raise ConfigError(f"the pool {recipe.folder} could not be recorded: mend what is said above, then go on")
