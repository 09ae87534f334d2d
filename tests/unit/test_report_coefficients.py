"""GG figure 6: the sums of coefficients in closed form, and from the losses that train."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from objective_cases import objective

from grpo_lab.objectives import GG_STD_EPS
from grpo_lab.report.coefficient_report import coefficient_grid, coefficient_notes, coefficient_plate
from grpo_lab.report.coefficients import CLOSED_FORMS, closed_form, coefficient_sums, implemented, normalised

M = 8


def exact(name: str, k: int) -> float:
    """By hand: the paper's form, GRPO's with the 1e-6 that the form leaves out."""
    if k in (0, M):
        return 0.0
    if name == "grpo":
        deviation = math.sqrt(k * (M - k) / (M * (M - 1)))
        return k * (1 - k / M) / (deviation + GG_STD_EPS)
    return {"agro": k * (M - k) / 7, "ggpo": (M - k) / math.sqrt(7)}[name]


@pytest.mark.parametrize("k", range(M + 1))
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_the_loss_has_the_closed_form(name: str, k: int) -> None:
    real = implemented(objective(name), k, M)
    assert real == pytest.approx(exact(name, k), rel=1e-12, abs=1e-12)
    # The stabiliser's part: 1e-6 beside a deviation of at least 0.35.
    assert real == pytest.approx(closed_form(name, k, M), rel=3e-6, abs=1e-12)


def test_known_points() -> None:
    """GRPO at k = 1 of 8: sqrt(1 * 7 * 7 / 8); AGRO 7 / 7; GGPO 7 / sqrt(7)."""
    assert [closed_form(name, 1, M) for name in ("grpo", "agro", "ggpo")] == pytest.approx(
        [math.sqrt(49 / 8), 1.0, math.sqrt(7)]
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"advantage": "rg"}),
        ("grpo", {"advantage": "centred"}),
        ("ggpo", {"beta": 0.5}),
    ],
)
def test_another_loss_has_other_sums(name: str, changes: dict[str, object]) -> None:
    other = implemented(objective(name, **changes), 2, M)
    assert abs(other / closed_form(name, 2, M) - 1) > 0.01


def test_a_wrong_loss_would_be_seen() -> None:
    chosen = objective("agro")
    doubled = replace(chosen, loss=lambda inputs: replace(out := chosen.loss(inputs), loss=2 * out.loss))
    assert implemented(doubled, 3, M) == pytest.approx(2 * closed_form("agro", 3, M))


def test_the_papers_betas_give_the_forms_and_the_tiny_scales_do_not() -> None:
    """A wrong response keeps exp(-1 / 0.32) of a right one's weight: k = 1 has q = 1 / (1 + 7 exp(-1 / 0.32))."""
    for each in coefficient_sums("paper"):
        np.testing.assert_allclose(each.implemented, each.closed_form, rtol=3e-6)
    tiny = {each.objective: each for each in coefficient_sums("tiny")}
    q = 1 / (1 + 7 * math.exp(-1 / 0.32))
    assert tiny["ggpo"].beta == 0.32
    assert tiny["ggpo"].implemented[1] == pytest.approx((8 * q - 1) / math.sqrt(7), rel=1e-12)


def test_table_and_figure() -> None:
    found = coefficient_sums("paper")
    grid = coefficient_grid(found)
    assert len(grid.rows) == 3 * (M + 1)
    ggpo = {row[1]: row for row in grid.rows if row[0] == "GGPO"}
    # (8 - k) / sqrt(7), and relative to k = 7: 8 - k; nothing at k = 0.
    assert ggpo["1"][2] == ggpo["1"][3] == "2.645751"
    assert [ggpo[str(k)][5] for k in range(M + 1)] == ["0.000000", *(f"{8 - k:.6f}" for k in range(1, M + 1))]
    assert "GGPO 0.01" in coefficient_notes(found, "paper")[0]
    (panel,) = coefficient_plate(found, "gg-fig6", "paper").panels
    curves = {curve.label: curve for curve in panel.curves}
    assert curves["GGPO, closed form"].y.tolist() == pytest.approx([7, 6, 5, 4, 3, 2, 1])
    assert curves["GGPO, closed form"].x.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert curves["AGRO, implemented"].y.tolist() == pytest.approx([1, 12 / 7, 15 / 7, 16 / 7, 15 / 7, 12 / 7, 1])
    assert (curves["AGRO, implemented"].form, curves["AGRO, closed form"].form) == ("points", "line")


def test_normalised_is_relative_to_seven_right_responses() -> None:
    assert normalised([0, 1, 2, 3, 4, 5, 6, 2, 0]) == [0, 0.5, 1, 1.5, 2, 2.5, 3, 1, 0]
