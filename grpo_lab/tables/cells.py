"""From a table's cells to runs: their settings, and the folders that all tables share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.composition import compose_run
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.ledger import result_hash
from grpo_lab.schedule import Schedule
from grpo_lab.tables.definition import Cell, Definition
from grpo_lab.tables.pools import PoolRecipe, pool_recipe
from grpo_lab.validation import validate

OUTPUTS = Path("outputs/papers")
POOLS = "pools"
# Cell keys that choose an option of a group: composed as words, since an option brings a file of values.
GROUPS = ("objective", "model")


@dataclass(frozen=True, slots=True)
class Run:
    """A cell with its settings, and the folder that any table with an equal cell finds it in. `pool`: what an offline
    run learns from, unless a word of the user's names another."""

    cell: Cell
    config: TrainConfig
    folder: Path
    pool: PoolRecipe | None


def runs_of(definition: Definition, scale: str, extra: Sequence[str]) -> list[Run]:
    """The runs of a table at a scale, with further words of the user's.

    Raises:
        ConfigError: a word that the table's cells differ in, or settings that cannot work.
        HydraException, OmegaConfBaseException: a word that does not exist.
    """
    if definition.experiment is None:
        return []
    cells = definition.cells(scale)
    taken = {key for cell in cells for key in cell.words}
    for word in extra:
        if (key := word.partition("=")[0].lstrip("+~")) in {*taken, "experiment", "scale", "run_dir", "resume"}:
            raise ConfigError(f"{key}= is set by the cells of {definition.target}: leave it out")
    return [_run(definition, cell, scale, extra) for cell in cells]


def _run(definition: Definition, cell: Cell, scale: str, extra: Sequence[str]) -> Run:
    options = [f"{key}={value}" for key, value in cell.words.items() if key in GROUPS]
    values = {key: value for key, value in cell.words.items() if key not in GROUPS}
    words = [f"experiment={definition.experiment}", f"scale={scale}", *options, *extra]
    config = compose_run(words, values)
    pool = None
    if config.source == "pool" and config.pool.path is None:
        given = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
        pool = pool_recipe(config, [*words, *given], OUTPUTS / scale / POOLS)
        config.pool.path = str(pool.folder)
    validate(config)
    folder = OUTPUTS / scale / _name(config)
    config.run_dir = str(folder)
    if config.tracking.group is None:
        config.tracking.group = f"papers_{scale}"
    return Run(cell, config, folder, pool)


def _name(config: TrainConfig) -> str:
    schedule = Schedule.from_config(config)
    return f"{config.objective.name}_v{schedule.v}_i{schedule.i}_seed{config.seed}_{result_hash(config)}"
