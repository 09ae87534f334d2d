"""The runs that a table asks for, and their folders: which are used, and whether they can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.ledger import Standing, short_hash, standing
from grpo_lab.report.measures import Frame
from grpo_lab.report.readings import ONE_SEED, Reader
from grpo_lab.report.settings import changed_settings, differing
from grpo_lab.report.stored import Shelf, StoredRun
from grpo_lab.report.throughput import sync_period
from grpo_lab.tables.cells import Run, runs_of
from grpo_lab.tables.definition import Definition


@dataclass(frozen=True, slots=True)
class Choice:
    """A table's runs with words of the user's. `canonical`: whether these leave every run's results as the definition
    has them. `name`: of the report's files, which for other runs are files of their own."""

    runs: Sequence[Run]
    canonical: bool
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRun:
    """A run that a table asks for. `run`: what it holds, if it is finished and has the cell's settings; None of any
    other, which is not used. `changed`: settings that it has otherwise."""

    seed: int
    folder: Path
    standing: Standing
    run: StoredRun | None
    changed: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """In a word or two."""
        return "changed" if self.changed else self.standing.state

    @property
    def said(self) -> str:
        """The same at length."""
        return f"its settings were changed: {', '.join(self.changed)}" if self.changed else str(self.standing)


def choose(definition: Definition, scale: str, words: Sequence[str]) -> Choice:
    """
    Raises:
        ConfigError: a word that is not of the table's runs.
        HydraException, OmegaConfBaseException: a word that does not exist.
    """
    runs = runs_of(definition, scale, words)
    # A folder is named after the hash of what decides its run's results.
    canonical = not words or [run.folder for run in runs] == [run.folder for run in runs_of(definition, scale, ())]
    name = definition.target if canonical else f"{definition.target}-{short_hash({'words': list(words)})}"
    return Choice(runs, canonical, name)


def place(run: Run, shelf: Shelf) -> PlacedRun:
    """Look into a cell's folder.

    Raises:
        UnreadableRun: it cannot be read.
    """
    seed, stands = run.config.seed, standing(run.folder)
    if stands.state != "finished":
        return PlacedRun(seed, run.folder, stands, None)
    stored = shelf.read(run.folder)
    changed = changed_settings(stored.config, run.config)
    return PlacedRun(seed, run.folder, stands, None if changed else stored, changed)


def frame_of(runs: Sequence[Run], placed: Sequence[PlacedRun]) -> Frame:
    """What all runs share: problems are split by the first run that has counts of the untrained model, seed 42 before
    others; the longest sync period warms up."""
    evaluated = [each.run for each in placed if each.run is not None and 0 in each.run.evaluations]
    first = next((each for each in placed if each.seed == ONE_SEED and each.run in evaluated), None)
    chosen = first.run if first is not None else next(iter(evaluated), None)
    return Frame(
        split=None if chosen is None else chosen.evaluations[0],
        split_run=chosen,
        warm_up=max((sync_period(run.config) for run in runs), default=0),
    )


def mixed_evaluations(reader: Reader, measures: Iterable[str], placed: Sequence[PlacedRun]) -> dict[str, list[str]]:
    """Measures whose stored evaluations were not all made with the same settings, each with what differs."""
    found: dict[str, list[str]] = {}
    for measure in measures:
        first: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for each in placed:
            for on, model, settings in () if each.run is None else reader.evaluation_settings(each.run, measure):
                where, others = first.setdefault(on, (f"{each.folder}, {model}", settings))
                if json.dumps(settings, sort_keys=True) != json.dumps(others, sort_keys=True):
                    keys = ", ".join(differing(settings, others))
                    found.setdefault(measure, []).append(
                        f"{measure}: {on} was evaluated with another {keys} of {each.folder}, {model}, than of {where}"
                    )
    return found
