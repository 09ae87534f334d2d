"""Mixtures of tables: parts in order, one prompt format, exact duplicates removed keeping the first, an overlap
report against evaluation sets. ALP-Math (GG C.1) is one."""

from __future__ import annotations

import dataclasses
import functools

from grpo_lab.composition import dataset_config
from grpo_lab.config import ConfigError, DatasetConfig, MixtureConfig, TableConfig
from grpo_lab.prompts.overlap import count_shared, first_of_each
from grpo_lab.prompts.render import Rendered, user_content
from grpo_lab.prompts.split import Split, split_by_hash
from grpo_lab.prompts.tables import count_warnings, load_table, read_table
from grpo_lab.types import Problem

Report = dict[str, int | float | str]


def load_mixture(config: MixtureConfig) -> Split:
    """Load every part, join them, remove duplicates of the formatted prompt, and report the overlap.

    Published counts that differ from the ones found, and evaluation sets that cannot be loaded, are warnings.

    Raises:
        ConfigError: no parts, or a part (or `test_set`) that cannot be loaded.
    """
    if not config.parts:
        raise ConfigError("dataset.parts is empty: a mixture needs at least one table")
    union, report, warnings = _read_parts(config)
    warnings += count_warnings(config.expected_rows, int(report["rows"]), f"{config.name}: rows")
    problems, dropped, disagreeing = first_of_each(union, functools.partial(user_content, config))
    warnings += count_warnings(config.expected_unique, len(problems), f"{config.name}: rows without duplicates")
    report |= {"duplicates": dropped, "duplicates_with_another_gold": disagreeing, "unique": len(problems)}
    if config.test_set is not None:
        train, test = problems, _test_set(config, config.test_set)
    else:
        train, test = split_by_hash(problems, config.held_out)
    overlap, unavailable = _overlap(config, train)
    report |= {**overlap, "train": len(train), "test": len(test)}
    return Split(train=train, test=test, report=report, warnings=warnings + unavailable)


def fitting_warnings(config: DatasetConfig, rendered: Rendered) -> list[str]:
    """A sentence if the training prompts within the length limit are not as many as published for this mixture."""
    if not isinstance(config, MixtureConfig):
        return []
    return count_warnings(
        config.expected_fitting, len(rendered.prompts), f"{config.name}: prompts within the length limit"
    )


def _read_parts(config: MixtureConfig) -> tuple[list[Problem], Report, list[str]]:
    union: list[Problem] = []
    report: Report = {"rows": 0}
    warnings: list[str] = []
    for position, part in enumerate(config.parts):
        reading = read_table(part, f"dataset.parts.{position}", skip=config.on_error == "skip")
        union += reading.problems
        report["rows"] = int(report["rows"]) + reading.selected
        report |= reading.counts(f"{part.name}/")
        warnings += [f"{part.name}: {warning}" for warning in reading.warnings()]
        warnings += count_warnings(part.expected_rows, reading.selected, f"{part.name}: rows")
    return union, report, warnings


def _test_set(config: MixtureConfig, name: str) -> list[Problem]:
    try:
        return _evaluation_set(config, name, config.test_path).test
    except ConfigError as error:
        raise ConfigError(
            f"dataset.test_set={name} cannot be loaded, set dataset.test_path to a local copy: {error}"
        ) from error


def _overlap(config: MixtureConfig, train: list[Problem]) -> tuple[Report, list[str]]:
    report: Report = {}
    warnings: list[str] = []
    for name in config.overlap_with:
        try:
            evaluation = _evaluation_set(config, name, None).test
        except ConfigError as error:
            warnings.append(
                f"overlap with {name} is unknown, point +dataset.overlap_paths.{name}= at a local copy: {error}"
            )
            continue
        exact, normalised = count_shared(train, evaluation)
        report |= {f"overlap/{name}/exact": exact, f"overlap/{name}/normalised": normalised}
        if normalised:
            warnings.append(f"{normalised} of {len(evaluation)} problems of {name} are among the training problems")
    return report, warnings


def _evaluation_set(config: MixtureConfig, name: str, path: str | None) -> Split:
    """The evaluation set `conf/dataset/<name>.yaml` describes, from a local copy where one is given."""
    table = dataset_config(name)
    if not isinstance(table, TableConfig):
        raise ConfigError(f"data set {name} is no table: dataset.test_set and dataset.overlap_with take tables")
    return load_table(dataclasses.replace(table, path=path or config.overlap_paths.get(name)))
