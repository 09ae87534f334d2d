"""The one door to every kind of data set."""

from __future__ import annotations

from grpo_lab.config import ArithmeticConfig, ConfigError, DatasetConfig, MixtureConfig, TableConfig
from grpo_lab.prompts import arithmetic, mixture, tables
from grpo_lab.prompts.split import Split


def load_problems(config: DatasetConfig) -> Split:
    """Load (or make) the problems of a data set, training and held out, with what was counted on the way.

    Raises:
        ConfigError: a key that cannot work, a source that cannot be loaded, or a row that cannot be used while
            `on_error=stop`.
    """
    if config.on_error not in ("stop", "skip"):
        raise ConfigError(f"dataset.on_error={config.on_error} is unknown: it takes stop or skip")
    if not 0.0 <= config.held_out <= 1.0:
        raise ConfigError(f"dataset.held_out={config.held_out} is not a share: it takes a number from 0 to 1")
    if isinstance(config, ArithmeticConfig):
        return arithmetic.make_problems(config)
    if isinstance(config, TableConfig):
        return tables.load_table(config)
    if isinstance(config, MixtureConfig):
        return mixture.load_mixture(config)
    raise ConfigError(f"dataset.kind={config.kind} is unknown: it takes arithmetic, table or mixture")
