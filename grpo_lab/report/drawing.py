"""Plates as PNG and SVG, in one style. The same plate gives the same bytes, so that a stored figure changes only where
its data do."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from grpo_lab.atomic import write_atomically
from grpo_lab.report.plates import Curve, Level, Look, Panel, Plate

DPI = 150
PANEL_WIDTH, PANEL_HEIGHT = 4.0, 3.1  # inches
LEAST_WIDTH = 5.5  # inches
TITLE_LINE, LEGEND_LINE, FOOTNOTE_LINE = 0.2, 0.17, 0.15  # inches
TITLE_CHARACTERS, LEGEND_CHARACTERS, FOOTNOTE_CHARACTERS = 13, 15, 18  # an inch, at their sizes
# What a legend's sample of a line takes, in characters.
SAMPLE_CHARACTERS = 9
# Okabe and Ito's colours, which colour-blind readers tell apart; GRPO, AGRO, GGPO and TIS as GG has them.
STYLES = {
    "grpo": ("#E69F00", "s"),
    "agro": ("#009E73", "^"),
    "ggpo": ("#0072B2", "o"),
    "grpo_tis": ("#CC79A7", "D"),
    "grpo_rg": ("#D55E00", "p"),
    "ggpo_clip": ("#56B4E9", "v"),
    "ggpo_reward_only": ("#000000", "P"),
}
# Further curves of one objective: towards white (above 0) or black, and their dashes.
SHADES = (0.0, 0.45, -0.45, 0.2, -0.7)
DASHES = ("-", "--", "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)))
# Curves with more points than this have no markers.
MARKED_POINTS = 60
# Settings of the library's, whose names are literals of its own.
HOUSE: Mapping[Any, Any] = {
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 7.0,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.0,
    # A fixed salt names the same parts of an SVG alike each time.
    "svg.hashsalt": "grpo_lab",
}


def save(plate: Plate, folder: Path) -> list[Path]:
    """Write `<name>.png` and `<name>.svg` into a folder, each whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with _house_style():
        figure = draw(plate)
        # What dates a file, or names the library's version, is left out.
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            stream = io.BytesIO()
            figure.savefig(stream, format=suffix, dpi=DPI, metadata=metadata)
            paths.append(folder / f"{plate.name}.{suffix}")
            write_atomically(paths[-1], stream.getvalue())
    return paths


@contextmanager
def _house_style() -> Iterator[None]:
    """The library's own defaults and ours over them, whatever a user's settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(HOUSE)
        yield


def draw(plate: Plate) -> Figure:
    """The figure: one axes a panel, side by side."""
    width = max(PANEL_WIDTH * len(plate.panels), LEAST_WIDTH)
    title = textwrap.wrap(plate.title, int(TITLE_CHARACTERS * width))
    notes = [line for note in plate.footnotes for line in textwrap.wrap(note, int(FOOTNOTE_CHARACTERS * width))]
    names = _shared_names(plate)
    columns = _legend_columns(names, width)
    foot = FOOTNOTE_LINE * (len(notes) + 1)
    head = TITLE_LINE * (len(title) + 1)
    legend = LEGEND_LINE * (math.ceil(len(names) / columns) + 1) if names else 0.0
    height = head + legend + PANEL_HEIGHT + foot
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(rect=_between(foot, head + legend, height)))
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(title), y=1 - TITLE_LINE / 2 / height, va="top")
    figure.text(0.1 / width, 0.07 / height, "\n".join(notes), fontsize=6.5, va="bottom", ha="left", color="0.25")
    for axes, panel in zip(figure.subplots(1, len(plate.panels), squeeze=False)[0], plate.panels, strict=True):
        _fill(axes, panel, with_legend=not names)
    if names:
        first = next(axes for axes, panel in zip(figure.axes, plate.panels, strict=True) if panel.curves)
        handles, labels = first.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 1 - head / height), ncols=columns)
    return figure


def _between(below: float, above: float, height: float) -> tuple[float, float, float, float]:
    """The part of a figure that its panels have: left, bottom, width, height, as shares."""
    return 0.0, below / height, 1.0, 1 - (below + above) / height


def _shared_names(plate: Plate) -> list[str]:
    """What one legend over all panels names; none where they show different curves, each then having its own."""
    shown = [panel for panel in plate.panels if panel.curves]
    named = [[each.label for each in panel.curves] + [each.label for each in panel.levels] for panel in shown]
    return named[0] if named and all(each == named[0] for each in named) else []


def _legend_columns(names: Sequence[str], width: float) -> int:
    longest = max((len(each) for each in names), default=0) + SAMPLE_CHARACTERS
    return max(min(int(LEGEND_CHARACTERS * width) // longest, len(names)), 1)


def colour(look: Look) -> tuple[float, float, float]:
    """An objective's colour, in a shade of its own for each further curve."""
    red, green, blue = to_rgb(STYLES[look.objective][0])
    shade = SHADES[look.variant]
    end = 1.0 if shade > 0 else 0.0
    mixed = [each + abs(shade) * (end - each) for each in (red, green, blue)]
    return mixed[0], mixed[1], mixed[2]


def _fill(axes: Axes, panel: Panel, *, with_legend: bool) -> None:
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.x_scale == "ladder":
        axes.set_xscale("log", base=2)
        rungs = sorted({float(x) for curve in panel.curves for x in curve.x})
        axes.xaxis.set_major_locator(FixedLocator(rungs))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
    elif panel.x_scale == "log":
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log", nonpositive="clip")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-2, 5))
    for curve in panel.curves:
        _add_curve(axes, curve, bars=panel.x_scale != "linear")
    for level in panel.levels:
        _add_level(axes, level)
    if not panel.curves:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center")
    elif with_legend:
        axes.legend()


def _add_curve(axes: Axes, curve: Curve, *, bars: bool) -> None:
    marker = STYLES[curve.look.objective][1]
    first = curve.look.variant == 0 and curve.form == "line"
    tone = colour(curve.look)
    if curve.faint is not None:
        axes.plot(curve.faint.update, curve.faint.value, color=tone, alpha=0.3, linewidth=0.6)
    axes.plot(
        curve.x,
        curve.y,
        color=tone,
        linestyle=DASHES[curve.look.variant] if curve.form == "line" else "none",
        marker=marker if len(curve.x) <= MARKED_POINTS else "none",
        markerfacecolor=tone if first else "white",
        label=curve.label,
    )
    known = np.isfinite(curve.spread)
    if not known.any():
        return
    if bars:
        axes.errorbar(
            curve.x[known], curve.y[known], yerr=curve.spread[known], fmt="none", ecolor=tone, capsize=3, elinewidth=1
        )
    else:
        low, high = curve.y - curve.spread, curve.y + curve.spread
        axes.fill_between(curve.x, low, high, color=tone, alpha=0.18, linewidth=0)


def _add_level(axes: Axes, level: Level) -> None:
    style: dict[str, Any] = {
        "color": colour(level.look),
        "linestyle": (0, (2, 2)),
        "linewidth": 1.0,
        "label": level.label,
    }
    if level.left is None or level.right is None:
        axes.axhline(level.y, **style)
    elif axes.get_xscale() == "log":
        # A rung: half the way to its neighbours, on either side.
        half = math.sqrt(math.sqrt(2))
        axes.plot([level.left / half, level.right * half], [level.y, level.y], **style)
    else:
        axes.plot([level.left, level.right], [level.y, level.y], **style)
