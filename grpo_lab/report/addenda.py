"""What reports have besides measures of runs: figures, and the tables of GG figure 6 and of RG's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_lab.config import ConfigError
from grpo_lab.report.collate import Collated
from grpo_lab.report.figures import plate_of
from grpo_lab.report.plates import Plate
from grpo_lab.report.render import Grid
from grpo_lab.report.speed_report import speed_grid, speed_notes, speed_panel

COEFFICIENTS, SPEED = "gg-fig6", "rg-throughput"
# What the files of their further tables are called.
SUFFIXES = {COEFFICIENTS: "coefficients", SPEED: "phases"}


@dataclass(frozen=True, slots=True)
class Addendum:
    """A table beside a target's own, and what has to be said of it."""

    title: str
    grid: Grid
    notes: Sequence[str]


def addendum_of(collated: Collated) -> Addendum | None:
    """The table that a target has beside its measures; None of most.

    Raises:
        UnreadableRun: a run's provenance cannot be read.
    """
    if collated.definition.target == COEFFICIENTS:
        # Only here: they are of the losses, whose library takes seconds to load.
        from grpo_lab.report.coefficient_report import coefficient_grid, coefficient_notes
        from grpo_lab.report.coefficients import GROUP_SIZE, coefficient_sums

        found = coefficient_sums(collated.scale)
        title = f"Sums of coefficients over the k right responses of {GROUP_SIZE}"
        return Addendum(title, coefficient_grid(found), coefficient_notes(found, collated.scale))
    if collated.definition.target == SPEED:
        return Addendum("Seconds an update, by phase", speed_grid(collated), speed_notes(collated))
    return None


def whole_plate(collated: Collated) -> Plate | None:
    """A target's figure, what is not of measures included; None where it has none, or nothing was run."""
    target = collated.definition.target
    if target == COEFFICIENTS:
        from grpo_lab.report.coefficient_report import coefficient_plate
        from grpo_lab.report.coefficients import coefficient_sums

        return coefficient_plate(coefficient_sums(collated.scale), collated.name, collated.scale)
    plate = plate_of(collated)
    if target == SPEED and plate is not None and (panel := speed_panel(collated)) is not None:
        return replace(plate, panels=[panel, *plate.panels])
    return plate


def draw_figures(collated: Collated, folder: Path) -> list[Path]:
    """Draw a target's figure as <name>.png and <name>.svg; without one, none, and an old one goes.

    Raises:
        ConfigError: what draws is not installed.
        OSError: the folder cannot be written.
    """
    plate = whole_plate(collated)
    if plate is None:
        for suffix in ("png", "svg"):
            (folder / f"{collated.name}.{suffix}").unlink(missing_ok=True)
        return []
    try:
        # Only here: loading it takes a second.
        from grpo_lab.report.drawing import save
    except ModuleNotFoundError as error:
        raise ConfigError(f"figures need {error.name}: pip install 'grpo-lab[report]'") from error
    return save(plate, folder)
