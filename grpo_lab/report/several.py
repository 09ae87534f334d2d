"""A table of any runs: what differs in their settings, and how they ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError
from grpo_lab.evaluation.estimators import over_seeds
from grpo_lab.ledger import NO_RESULT, result_hash, standing
from grpo_lab.report.layout import commits_text
from grpo_lab.report.measures import read_end
from grpo_lab.report.naming import NONE, number_text, seeds_text
from grpo_lab.report.render import Grid, markdown
from grpo_lab.report.settings import flat
from grpo_lab.report.stored import Shelf, StoredRun
from grpo_lab.runs import CONFIG_FILE, holds_a_run

POOL = "pool.path"
# Measures, each with its heading.
SHOWN = {
    "mean": "held-out score (%)",
    "k3": "K3",
    "ess": "ESS",
    "entropy": "entropy",
    "drift": "drift",
    "length": "length",
    "responses": "responses",
}
EXPLAINED = (
    "The score is of the last evaluation of a run's own held-out problems; measures of training are means over the "
    "last tenth of the updates; mean ± sample deviation over seeds."
)


def run_folders(folder: Path) -> list[Path]:
    """The folder itself where it is a run, else the runs in it: a sweep's, or any folder of runs.

    Raises:
        ConfigError: neither.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder, and no table or figure of this name is known")
    if (folder / CONFIG_FILE).is_file():
        return [folder]
    found = sorted(each for each in folder.iterdir() if (each / CONFIG_FILE).is_file())
    if not found:
        raise ConfigError(f"{folder} is no run folder and holds none: name folders with a {CONFIG_FILE}")
    return found


def make_runs_page(title: str, folders: Sequence[Path], shelf: Shelf) -> tuple[str, Grid]:
    """A page about runs, and its table. Runs that differ in their seed alone are one row; unfinished ones are named and
    not used.

    Raises:
        ConfigError: a folder that cannot be read.
    """
    found: dict[str, StoredRun] = {}
    notes = []
    for folder in folders:
        stands = standing(folder)
        if stands.state != "finished" or not holds_a_run(folder):
            notes.append(f"{folder}: {stands}; not used")
            continue
        run = shelf.read(folder)
        # A seed that was run twice is no second seed.
        if (other := found.setdefault(result_hash(run.config), run)) is not run:
            notes.append(f"{folder}: the settings and the seed of {other.folder}; not used")
    used = list(found.values())
    grid = runs_grid(used)
    page = [f"# {title}", f"{len(used)} of {len(folders)} runs are used."]
    if used:
        page += [markdown(grid).rstrip(), EXPLAINED, markdown(_sources(used)).rstrip()]
    if notes:
        page.append("\n".join(f"- {each}" for each in notes))
    return "\n\n".join(page) + "\n", grid


def runs_grid(runs: Sequence[StoredRun]) -> Grid:
    """A row for each of the settings that differ."""
    settings = [_settings(run) for run in runs]
    if not _pools_differ(runs, settings):
        settings = [{key: value for key, value in each.items() if key != POOL} for each in settings]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if _differs(key, settings)]
    families: dict[tuple[str, ...], list[StoredRun]] = {}
    for run, each in zip(runs, settings, strict=True):
        families.setdefault(tuple(_word(each.get(key, NONE)) for key in keys), []).append(run)
    rows = [(*labels, *_measured(family)) for labels, family in families.items()]
    return Grid((*keys, "updates", *SHOWN.values(), "hours", "seeds"), tuple(rows))


def _measured(family: Sequence[StoredRun]) -> tuple[str, ...]:
    cells = [", ".join(dict.fromkeys(str(run.updates) for run in family))]
    for measure in SHOWN:
        readings = [read_end(run, measure, None) for run in family]
        values = [each.value for each in readings if each is not None]
        if not values:
            cells.append("not logged")
            continue
        mean, deviation = over_seeds(values)
        spread = NONE if deviation is None else f" ± {number_text(measure, deviation)}"
        part = f" ({len(values)} of {len(family)} seeds)" if len(values) < len(family) else NONE
        cells.append(number_text(measure, mean) + spread + part)
    hours = [run.hours for run in family if run.hours is not None]
    cells.append(f"{sum(hours):.2f}" if hours else NONE)
    return (*cells, seeds_text([run.config.seed for run in family]))


def _sources(runs: Sequence[StoredRun]) -> Grid:
    rows = [
        (
            str(run.folder),
            str(run.config.seed),
            commits_text(run.provenance.commits, run.provenance.dirty),
            ", ".join(run.provenance.hosts),
        )
        for run in runs
    ]
    return Grid(("folder", "seed", "commit", "host"), tuple(rows))


def _settings(run: StoredRun) -> dict[str, Any]:
    """What decides a run's results, by dotted key, the seed left out."""
    values = dict(flat(asdict(run.config)))
    hidden = (*NO_RESULT, "seed")
    return {
        key: value
        for key, value in values.items()
        if not any(key == each or key.startswith(f"{each}.") for each in hidden)
    }


def _pools_differ(runs: Sequence[StoredRun], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two runs that are equal but for their recorded pools have the same seed: else pools differ as seeds do,
    since each seed's is its own."""
    found: dict[tuple[object, ...], set[str]] = {}
    for run, each in zip(runs, settings, strict=True):
        others = tuple((key, _word(value)) for key, value in each.items() if key != POOL)
        found.setdefault((run.config.seed, others), set()).add(_word(each[POOL]))
    return any(len(pools) > 1 for pools in found.values())


def _differs(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the runs that have a key differ in it; what only some objectives have goes by their names."""
    return key != "objective.family" and len({_word(each[key]) for each in settings if key in each}) > 1


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
