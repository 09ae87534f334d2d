"""Tables of problems: rows to problems, faults stopped at or counted, duplicates removed, a test side."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.config import ConfigError, TableConfig
from grpo_lab.prompts.columns import check_columns, score_is_inside, to_problem
from grpo_lab.prompts.gold import NoReference, RowFault
from grpo_lab.prompts.overlap import first_of_each
from grpo_lab.prompts.render import user_content
from grpo_lab.prompts.rows import Row, read_file, read_hub
from grpo_lab.prompts.split import Split, split_by_hash
from grpo_lab.types import Problem


@dataclass
class Reading:
    """The problems of one source in file order, duplicates included, and what became of the other rows."""

    problems: list[Problem]
    rows: int = 0
    outside_score: int = 0
    proof_rows: int = 0
    skipped_rows: int = 0
    first_fault: str | None = None

    @property
    def selected(self) -> int:
        """The rows that published counts speak of: after the score filter, before anything else is left out."""
        return self.rows - self.outside_score

    def counts(self, prefix: str) -> dict[str, int | float | str]:
        names = ("rows", "outside_score", "proof_rows", "skipped_rows")
        return {f"{prefix}{name}": getattr(self, name) for name in names}

    def warnings(self) -> list[str]:
        if not self.skipped_rows:
            return []
        return [f"{self.skipped_rows} of {self.rows} rows skipped; the first: {self.first_fault}"]


def load_table(config: TableConfig) -> Split:
    """Load a table: its training problems, and the held-out ones from `test_path`, `test_split` or `held_out`.

    A training problem that is also a test problem is left out of training, counted and warned of.

    Raises:
        ConfigError: a source that cannot be loaded, a mapping that cannot work, or, with `on_error=stop`, the first
            row that cannot be used, with its place and the fix.
    """
    reading = read_table(config, "dataset")
    warnings = reading.warnings() + count_warnings(config.expected_rows, reading.selected, f"{config.name}: rows")
    problems, dropped, disagreeing = _unique(config, reading)
    report: dict[str, int | float | str] = {
        "source": config.path or f"{config.id}@{config.revision or 'unpinned'}",
        **reading.counts(""),
        "duplicates": dropped,
        "duplicates_with_another_gold": disagreeing,
    }
    test_reading = _read_test(config)
    if test_reading is None:
        train, test = split_by_hash(problems, config.held_out)
    else:
        test, test_dropped, _ = _unique(config, test_reading)
        in_test = {problem.id for problem in test}
        train = [problem for problem in problems if problem.id not in in_test]
        leaked = len(problems) - len(train)
        report |= {**test_reading.counts("test_"), "test_duplicates": test_dropped, "train_also_in_test": leaked}
        warnings += test_reading.warnings()
        warnings += count_warnings(config.expected_test_rows, test_reading.selected, f"{config.name}: test rows")
        if leaked:
            warnings.append(f"{config.name}: {leaked} training problems are also test problems and were left out")
    if not test:
        warnings.append(f"{config.name}: no held-out problems; set dataset.test_path or dataset.held_out")
    report |= {"train": len(train), "test": len(test)}
    return Split(train=train, test=test, report=report, warnings=warnings)


def read_table(config: TableConfig, key: str, *, skip: bool = False) -> Reading:
    """Read the main source of a table. `key` is its place in the config; `skip` overrides `on_error`.

    Raises:
        ConfigError: as in `load_table`.
    """
    check_columns(config.columns, key)
    if config.path is not None:
        rows = read_file(Path(config.path), f"{key}.path")
    else:
        rows = read_hub(config, config.split, key)
    return _read(rows, config, skip=skip or config.on_error == "skip")


def count_warnings(expected: int | None, found: int, what: str) -> list[str]:
    """A sentence if a published count is not the one found."""
    if expected is None or found == expected:
        return []
    return [f"{what}: {found} found, {expected} published; the source differs from the one described"]


def _read_test(config: TableConfig) -> Reading | None:
    """The separate test source, if there is one. A local copy of the training rows has no other split beside it."""
    if config.test_path is not None:
        rows = read_file(Path(config.test_path), "dataset.test_path")
    elif config.test_split is not None and config.path is None:
        rows = read_hub(config, config.test_split, "dataset")
    else:
        return None
    return _read(rows, config, skip=config.on_error == "skip")


def _read(rows: Iterator[Row], config: TableConfig, *, skip: bool) -> Reading:
    reading = Reading(problems=[])
    for row in rows:
        reading.rows += 1
        try:
            if row.fault is not None:
                raise RowFault(row.fault)
            if not score_is_inside(row.values, config.columns):
                reading.outside_score += 1
                continue
            reading.problems.append(to_problem(row.values, config.columns, config.name))
        except NoReference:
            reading.proof_rows += 1
        except RowFault as fault:
            message = f"{row.place}: {fault}"
            if not skip:
                raise ConfigError(
                    f"{message}; repair the row, map other columns (dataset.columns), or set dataset.on_error=skip"
                ) from fault
            reading.skipped_rows += 1
            reading.first_fault = reading.first_fault or message
    if reading.rows and not reading.problems and reading.skipped_rows:
        raise ConfigError(f"{config.name}: no row can be used; the first fault: {reading.first_fault}")
    return reading


def _unique(config: TableConfig, reading: Reading) -> tuple[list[Problem], int, int]:
    return first_of_each(reading.problems, functools.partial(user_content, config))
