"""Rows of a table, from a local file or the hub, each with the place it came from. Types are those of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError, TableConfig, first_line


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it is, and its values, or the fault that kept them from being read."""

    place: str
    values: Mapping[str, Any]
    fault: str | None = None


def read_file(path: Path, key: str) -> Iterator[Row]:
    """The rows of a local .jsonl, .json or .parquet file. `key` is the setting that named it.

    JSON is read by the standard library and not by `datasets`, which gives a column one type: "033" beside 33
    becomes 33, and an integer of 30 digits a rounded float.

    Raises:
        ConfigError: no such file, a suffix that is not read, or a file that is damaged as a whole.
    """
    if not path.is_file():
        raise ConfigError(f"{key}={path} does not exist: point it at a .jsonl, .json or .parquet file")
    if path.suffix == ".parquet":
        return _parquet(path, key)
    if path.suffix == ".json" and _starts_with_bracket(path):
        return _array(path, key)
    if path.suffix in (".jsonl", ".json"):
        return _lines(path)
    raise ConfigError(f"{key}={path} has a suffix that is not read: convert it to .jsonl, .json or .parquet")


def read_hub(config: TableConfig, split: str, key: str) -> Iterator[Row]:
    """The rows of a hub data set at its pinned revision; of `config.file`, where that is set, exactly as stored.

    Remote code is never run. `key` is the config path of the table, `dataset` or a part of a mixture.

    Raises:
        ConfigError: the hub, the id, the revision or the split cannot be had. The message tells how to use a copy.
    """
    if config.id is None:
        raise ConfigError(f"{key}.id is not set and neither is {key}.path: point {key}.path= at a local copy")
    if config.file is not None:
        return read_file(_download(config, config.id, config.file, key), f"{key}.file")
    from datasets import load_dataset

    try:
        table = load_dataset(config.id, name=config.subset, revision=config.revision, split=split)
    except Exception as error:
        raise _unavailable(config, key, error) from error
    return (Row(f"{config.id} ({split}) row {number}", values) for number, values in enumerate(table, 1))


def _download(config: TableConfig, repository: str, file: str, key: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=config.revision))
    except Exception as error:
        raise _unavailable(config, key, error) from error


def _unavailable(config: TableConfig, key: str, error: Exception) -> ConfigError:
    """One message for the many ways a library says that it cannot have a data set."""
    reason = first_line(error)
    return ConfigError(
        f"{key}.id={config.id} cannot be loaded from the hub ({type(error).__name__}: {reason}): check the id, the "
        f"revision and the network, or point {key}.path= at a local .jsonl, .json or .parquet copy"
    )


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                # Decimal keeps the digits that the file has.
                value = json.loads(line, parse_float=Decimal)
            except (ValueError, RecursionError) as error:
                yield Row(place, {}, f"the row is not JSON ({error})")
            else:
                yield _row(place, value)


def _array(path: Path, key: str) -> Iterator[Row]:
    try:
        values = json.loads(path.read_bytes(), parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={path} is not JSON ({error}): repair the file or fetch it again") from error
    return (_row(f"{path} row {number}", value) for number, value in enumerate(values, 1))


def _parquet(path: Path, key: str) -> Iterator[Row]:
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", values)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{key}={path} is no readable parquet file ({error}): fetch it again") from error


def _row(place: str, value: Any) -> Row:
    """A JSON value as a row. A list (Open-Reasoner-Zero) has its positions as column names, as on the hub."""
    if isinstance(value, list):
        value = {str(position): member for position, member in enumerate(value)}
    if not isinstance(value, dict):
        return Row(place, {}, f"the row is a {type(value).__name__}, not an object")
    return Row(place, value)


def _starts_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
