"""From `conf/` to a typed run, and from a run folder back.

With `command.py` the only place that sees Hydra; what it returns are the dataclasses of `config.py`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from grpo_lab.atomic import write_atomically
from grpo_lab.config import (
    DATASET_SCHEMAS,
    OBJECTIVE_SCHEMAS,
    ConfigError,
    DatasetConfig,
    TrainConfig,
    first_line,
)


def register() -> None:
    """Tell Hydra the schemas. A YAML of a group with variants names its own first in its defaults list."""
    store = ConfigStore.instance()
    store.store(name="schema", node=TrainConfig)
    for kind, dataset_node in DATASET_SCHEMAS.items():
        store.store(group="schema/dataset", name=kind, node=dataset_node)
    for family, objective_node in OBJECTIVE_SCHEMAS.items():
        store.store(group="schema/objective", name=family, node=objective_node)


def conf_dir() -> Path:
    """The folder of YAML files: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed, checkout = package / "conf", package.parent / "conf"
    return installed if installed.is_dir() else checkout


def dataset_config(name: str) -> DatasetConfig:
    """The data set that `conf/dataset/<name>.yaml` describes, composed as in a run.

    Raises:
        ConfigError: there is no such file, or it does not fit the schema.
    """
    if not (conf_dir() / "dataset" / f"{name}.yaml").is_file():
        raise ConfigError(f"there is no data set {name!r}: {conf_dir() / 'dataset'} holds no {name}.yaml")
    register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = OmegaConf.to_object(compose(f"dataset/{name}").dataset)
    except (OmegaConfBaseException, HydraException) as error:
        raise ConfigError(f"conf/dataset/{name}.yaml: {' '.join(str(error).split())}") from error
    assert isinstance(config, DatasetConfig)
    return config


@cache
def _composed_once(words: tuple[str, ...]) -> DictConfig:
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(words))


def compose_run(words: Sequence[str], values: Mapping[str, Any] | None = None) -> TrainConfig:
    """The run that `python -m grpo_lab.train <words>` describes, with `values` set by key on top.

    The words are composed once, which takes a hundred milliseconds; the values, a few.

    Raises:
        ConfigError: a key without a value, or an interpolation that leads nowhere.
        HydraException, OmegaConfBaseException: a group, key or type that does not exist.
    """
    tree = copy.deepcopy(_composed_once(tuple(words)))
    for key, value in (values or {}).items():
        OmegaConf.update(tree, key, value)
    return to_config(tree)


def to_config(composed: DictConfig) -> TrainConfig:
    """The composed tree as typed objects, every interpolation resolved once.

    Raises:
        ConfigError: a key without a value, or an interpolation that leads nowhere.
    """
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error
    assert isinstance(config, TrainConfig)
    return config


def save_config(config: TrainConfig, path: Path) -> None:
    """Write every key, so that `load_config` gives an equal configuration; a crash leaves the old file or the new."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.structured(config)).encode())


def load_config(path: Path) -> TrainConfig:
    """Read back what `save_config` wrote.

    Raises:
        ConfigError: the file is missing, or does not fit this version's schema.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing: resume= takes a run folder, which holds config.yaml")
    try:
        raw = OmegaConf.load(path)
        assert isinstance(raw, DictConfig), "it holds a list"
        schema = OmegaConf.structured(TrainConfig)
        schema.dataset = OmegaConf.structured(DATASET_SCHEMAS[raw.dataset.kind])
        schema.objective = OmegaConf.structured(OBJECTIVE_SCHEMAS[raw.objective.family])
        merged = OmegaConf.merge(schema, raw)
        assert isinstance(merged, DictConfig)
        return to_config(merged)
    except (OmegaConfBaseException, YAMLError, AttributeError, KeyError, AssertionError) as error:
        raise ConfigError(f"{path} does not fit this version of grpo_lab: {' '.join(str(error).split())}") from error


def config_hash(section: Any) -> str:
    """A short stable name for the values of a config section."""
    plain = OmegaConf.to_container(OmegaConf.structured(section), resolve=True)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
