"""GG figure 6 as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_lab.report.coefficients import GROUP_SIZE, NORMALISED_AT, Sums, normalised
from grpo_lab.report.naming import METHODS
from grpo_lab.report.plates import Curve, Look, Panel, Plate
from grpo_lab.report.render import Grid

HEADER = (
    "method",
    "k",
    "closed form",
    "implemented",
    "implemented - closed form",
    f"closed form, relative to k = {NORMALISED_AT}",
    f"implemented, relative to k = {NORMALISED_AT}",
)


def coefficient_grid(found: Sequence[Sums]) -> Grid:
    """A row a method and number of right responses."""
    return Grid(HEADER, tuple(row for each in found for row in _rows(each)))


def _rows(sums: Sums) -> list[tuple[str, ...]]:
    closed_form, implemented = normalised(sums.closed_form), normalised(sums.implemented)
    return [
        (
            METHODS[sums.objective],
            str(k),
            f"{closed:.6f}",
            f"{real:.6f}",
            f"{real - closed:+.1e}",
            f"{closed_form[k]:.6f}",
            f"{implemented[k]:.6f}",
        )
        for k, (closed, real) in enumerate(zip(sums.closed_form, sums.implemented, strict=True))
    ]


def coefficient_notes(found: Sequence[Sums], scale: str) -> list[str]:
    """What the two columns are, and why they may differ."""
    betas = ", ".join(f"{METHODS[each.objective]} {each.beta:g}" for each in found)
    return [
        "Implemented: from the losses that train, by differentiation, at learner = behaviour = reference, in float64, "
        f"with the betas of scale={scale}: {betas}.",
        "Closed forms: GRPO without the 1e-6 beside the deviation; AGRO for equal log ratios to the reference; GGPO in "
        "the limit of small beta, in which wrong responses keep nothing of their weight exp(-1/beta).",
        f"Groups of equal rewards, k = 0 and {GROUP_SIZE}, push nothing.",
    ]


def coefficient_plate(found: Sequence[Sums], name: str, scale: str) -> Plate:
    """Closed forms as lines, the losses as points, over mixed groups."""
    panel = Panel(
        x_label=f"right responses k of {GROUP_SIZE}",
        y_label=f"sum of coefficients, relative to k = {NORMALISED_AT}",
        curves=[curve for each in found for curve in _curves(each)],
    )
    return Plate(
        name=name,
        title="GG figure 6: coefficient sums of right responses",
        panels=[panel],
        footnotes=["No runs.", *coefficient_notes(found, scale)],
    )


def _curves(sums: Sums) -> list[Curve]:
    k = np.arange(1, GROUP_SIZE, dtype=np.float64)
    name, look, unknown = METHODS[sums.objective], Look(sums.objective), np.full(len(k), np.nan)
    closed_form = np.array(normalised(sums.closed_form))[1:GROUP_SIZE]
    implemented = np.array(normalised(sums.implemented))[1:GROUP_SIZE]
    return [
        Curve(label=f"{name}, closed form", look=look, x=k, y=closed_form, spread=unknown, form="line"),
        Curve(label=f"{name}, implemented", look=look, x=k, y=implemented, spread=unknown, form="points"),
    ]
