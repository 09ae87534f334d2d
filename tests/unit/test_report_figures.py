"""Figures: what is drawn, checked by the data of their lines, bands and scales, from run folders made by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figure_runs import cells_of, collated, write_run
from matplotlib.colors import to_hex

from grpo_lab.report.addenda import draw_figures, whole_plate
from grpo_lab.report.document import write_report
from grpo_lab.report.drawing import STYLES, colour, draw
from grpo_lab.report.figures import ACCURACIES, FIGURES, Y_LABELS
from grpo_lab.report.plates import Look, Panel, Plate, average_runs, in_blocks, moving_mean
from grpo_lab.report.stored import Series
from grpo_lab.tables.cells import Run
from grpo_lab.tables.definition import load_definition, targets

# What a hand-made run of an objective logs, times a number of its seed.
LEVEL = {"grpo": 1.0, "agro": 2.0, "ggpo": 3.0}
SEEDS = {42: 1.0, 1234: 2.0, 2027: 6.0}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def row(run: Run, update: int) -> Mapping[str, Any]:
    level = LEVEL.get(run.config.objective.name, 4.0) * SEEDS[run.config.seed]
    delay = run.config.schedule.v
    return {
        # Within each collection of 8, age 0 .. 7.
        "mismatch/k3": level * ((update - 1) % 8),
        "entropy": level,
        "mismatch/ess_sequence": level / delay,
        "response/length": 10.0 + delay,
        "total/responses": 100.0 * level * update,
        "reward/retained": float(update),
        "group/within_success_ess_mean": level + (update - 1) // 160,
        "group/share_k2": 0.5,
        "loss/raw": 0.1,
    }


def correct(run: Run, update: int) -> Sequence[int]:
    """Four problems, n = 4: p0 is 0, 1/4, 3/4 and 1. The first is solved from update 64 on."""
    return [0, 1, 3, 4] if update < 64 else [1, 2, 4, 4]


def panels_of(target: str, scale: str = "tiny") -> list[Panel]:
    plate = whole_plate(collated(target, scale))
    assert plate is not None
    return list(plate.panels)


def by_label(panel: Panel) -> dict[str, Any]:
    return {curve.label: curve for curve in panel.curves}


# --- series -----------------------------------------------------------------------------------------------------


def test_blocks_are_means_at_their_last_update() -> None:
    series = Series(np.arange(1, 12), np.arange(1.0, 12.0))
    blocks = in_blocks(series, 4)
    # 1 to 4 and 5 to 8; 9 to 11 are no whole block.
    assert (blocks.update.tolist(), blocks.value.tolist()) == ([4, 8], [2.5, 6.5])
    # A measure logged once in 4 updates is its own mean; a block without one is left out.
    sparse = in_blocks(Series(np.array([4, 12]), np.array([7.0, 9.0])), 4)
    assert (sparse.update.tolist(), sparse.value.tolist()) == ([4, 12], [7.0, 9.0])


def test_moving_means_have_all_their_points() -> None:
    series = Series(np.array([8, 16, 24, 32]), np.array([1.0, 2.0, 6.0, 4.0]))
    middle = moving_mean(series, 3, trailing=False)
    assert (middle.update.tolist(), middle.value.tolist()) == ([16, 24], [3.0, 4.0])
    last = moving_mean(series, 3, trailing=True)
    assert (last.update.tolist(), last.value.tolist()) == ([24, 32], [3.0, 4.0])
    assert len(moving_mean(series, 5, trailing=True)) == 0


def test_over_seeds_takes_the_updates_that_all_have() -> None:
    averaged = average_runs(
        [Series(np.array([1, 2, 3]), np.array([1.0, 2.0, 3.0])), Series(np.array([2, 3]), np.array([4.0, 9.0]))]
    )
    assert (averaged.update.tolist(), averaged.mean.tolist(), averaged.seeds) == ([2, 3], [3.0, 6.0], 2)
    # Sample deviation of 2 and 4, and of 3 and 9.
    assert averaged.spread.tolist() == pytest.approx([2**0.5, 18**0.5])
    assert np.isnan(average_runs([Series(np.array([1]), np.array([5.0]))]).spread).all()


# --- panels -----------------------------------------------------------------------------------------------------


def test_every_shown_measure_is_the_tables_and_has_a_name() -> None:
    assert set(FIGURES) <= set(targets())
    for target, shown in FIGURES.items():
        assert {each.measure for each in shown} <= set(load_definition(target).measures), target
        assert {each.measure for each in shown} <= {*ACCURACIES, *Y_LABELS}
    drawn = {name for name in targets() if "fig" in name}
    assert drawn - set(FIGURES) == {"gg-fig6"}, "figure 6 is of no runs"


def test_figure_1_smooths_each_seed_and_leaves_unfinished_runs_out() -> None:
    for run in cells_of("gg-fig1"):
        unfinished = run.config.objective.name == "agro" and run.config.seed == 2027
        if run.config.objective.name != "grpo":
            write_run(
                run,
                updates=120,
                row=row,
                every=40,
                correct=correct,
                status="running" if unfinished else "finished",
            )
    plate = whole_plate(collated("gg-fig1"))
    assert plate is not None
    k3, entropy, best, mean = plate.panels
    curves = by_label(k3)
    assert set(curves) == {"AGRO (n = 2)", "GGPO (n = 3)"}
    ggpo = curves["GGPO (n = 3)"]
    # 15 blocks of 8, the middles of 7 windows of 9 from the fifth; ages 0 to 7 have mean 3.5, seeds mean 3.
    assert ggpo.x.tolist() == [40, 48, 56, 64, 72, 80, 88]
    assert ggpo.y.tolist() == pytest.approx([3.0 * 3.0 * 3.5] * 7)
    # Sample deviation of the seeds' 1, 2, 6: sqrt(7).
    assert ggpo.spread.tolist() == pytest.approx([3.0 * 3.5 * 7**0.5] * 7)
    assert ggpo.faint.update.tolist() == list(range(8, 121, 8))
    assert by_label(entropy)["AGRO (n = 2)"].y[0] == pytest.approx(2.0 * 1.5)
    assert mean.curves[0].x.tolist() == [0, 40, 80, 120]
    # 8 of 16 right, then 11.
    assert by_label(mean)["GGPO (n = 3)"].y.tolist() == pytest.approx([50.0, 50.0, 68.75, 68.75])
    assert best.curves == [], "best@32 takes 32 responses, and there are 4"
    notes = " ".join(plate.footnotes)
    assert "scale=tiny" in notes
    assert "5 finished runs of 120 updates; seeds 42, 1234, 2027" in notes
    assert "Left out: 4 of 9 runs" in notes
    assert "half done, at update 120" in notes
    assert (k3.log_y, mean.y_label) == (False, "held-out sums: mean@32, %")


def test_figure_2_puts_accuracy_against_the_responses_generated_by_then() -> None:
    for run in cells_of("gg-fig2"):
        if run.config.objective.name == "ggpo":
            write_run(run, updates=64, row=row, every=32, correct=correct)
    responses, accuracy = panels_of("gg-fig2")
    # 100 x 3 x update, times the seeds' mean 3.
    assert by_label(responses)["GGPO (n = 3)"].y[-1] == pytest.approx(900 * 64)
    curve = by_label(accuracy)["GGPO (n = 3)"]
    assert curve.x.tolist() == pytest.approx([0, 900 * 32, 900 * 64])
    assert curve.y.tolist() == pytest.approx([50.0, 50.0, 68.75])


def test_figure_5_splits_problems_by_the_untrained_models_share() -> None:
    for run in cells_of("gg-fig5"):
        write_run(run, updates=64, row=row, every=32, correct=correct)
    solvable, unsolved = panels_of("gg-fig5")
    # Problems with p0 of 1/4 and 3/4; then 2 and 4 of 4. One problem has p0 = 0, solved at 64.
    assert by_label(solvable)["GRPO (n = 1)"].y.tolist() == pytest.approx([50.0, 50.0, 75.0])
    assert by_label(unsolved)["GRPO (n = 1)"].y.tolist() == [0.0, 0.0, 100.0]
    plate, first = whole_plate(collated("gg-fig5")), cells_of("gg-fig5")[0].folder.name
    assert plate is not None
    assert f"Problems with 0 < p0 <= 0.75 at update 0 of {first}, for all runs: 2." in plate.footnotes
    assert f"Problems with p0 = 0 at update 0 of {first}, for all runs: 1." in plate.footnotes


def test_figures_3_and_7_are_ladders_with_the_aligned_refresh_as_a_curve_of_its_own() -> None:
    for run in cells_of("gg-fig3"):
        if run.config.objective.name != "grpo" or run.config.schedule.v < 64:
            write_run(run, updates=300, row=row, every=300, correct=correct)
    k3, ess, _entropy, length = panels_of("gg-fig7")
    curves = by_label(length)
    assert set(curves) == {
        "GRPO (n = 1)",
        "AGRO (n = 1)",
        "GGPO (n = 1)",
        "AGRO, T_ref = 128 (n = 1)",
        "GGPO, T_ref = 128 (n = 1)",
    }
    assert (curves["GRPO (n = 1)"].x.tolist(), curves["GRPO (n = 1)"].y.tolist()) == ([8, 16, 32], [18, 26, 42])
    assert curves["GGPO, T_ref = 128 (n = 1)"].x.tolist() == [64, 128]
    assert by_label(ess)["GGPO (n = 1)"].y.tolist() == pytest.approx([3 / v for v in (8, 16, 32, 64, 128)])
    assert (k3.log_y, ess.log_y, length.log_y) == (True, True, False)
    (average,) = panels_of("gg-fig3")
    (by_drift,) = panels_of("gg-table4")
    assert set(by_label(average)) == set(by_label(by_drift))
    # The same rungs, each where its K3 is.
    assert by_drift.x_scale == "log"
    ladder, drift = (by_label(panel)["GRPO (n = 3 at N = 8; else 1)"] for panel in (average, by_drift))
    assert drift.y.tolist() == ladder.y.tolist()
    # The mean over ages is 3.5 levels; at N = 8 of three seeds, else of the first.
    seeds = np.mean(list(SEEDS.values())), SEEDS[42], SEEDS[42]
    assert drift.x.tolist() == pytest.approx([3.5 * LEVEL["grpo"] * each for each in seeds])
    ggpo = by_label(average)["GGPO (n = 3 at N = 8, 128; else 1)"]
    assert np.isfinite(ggpo.spread).tolist() == [True, False, False, False, True]


def test_a_window_of_this_scales_own_is_said() -> None:
    """The title is the paper's, whose window is of 800 updates."""
    for run in cells_of("gg-fig7")[:1]:
        write_run(run, updates=300, row=row)
    plate = whole_plate(collated("gg-fig7"))
    assert plate is not None
    assert "Means over the last 256 updates at scale=tiny." in plate.footnotes


def test_figure_8_names_what_this_scale_sets_otherwise() -> None:
    for run in cells_of("gg-fig8"):
        write_run(run, updates=8, row=row, every=8, correct=correct)
    (panel,) = panels_of("gg-fig8")
    labels = [curve.label for curve in panel.curves]
    assert labels[0] == "beta = 0.32 (the paper's 0.01), fixed reference (n = 1)"
    assert labels[-1] == "beta = 3.2 (the paper's 0.1), T_ref = 160 (n = 1)"
    assert [curve.look for curve in panel.curves] == [Look("ggpo", k) for k in range(5)]


def test_figure_9_has_a_point_for_each_refresh_window() -> None:
    for run in cells_of("gg-fig9"):
        write_run(run, updates=400, row=row)
    panel, share, _ = panels_of("gg-fig9")
    curve = by_label(panel)["fixed reference (n = 1)"]
    # 3 in the first window and 4 in the second; the third is not whole.
    assert (curve.x.tolist(), curve.y.tolist()) == ([160, 320], [3.0, 4.0])
    assert share.curves[0].y.tolist() == [0.5, 0.5]


def test_figure_10_trails_160_updates() -> None:
    for run in cells_of("gg-fig10"):
        write_run(run, updates=176, row=row)
    (panel,) = panels_of("gg-fig10")
    curve = by_label(panel)["GGPO, token clipping (n = 1)"]
    # Means of 1 .. 160, 9 .. 168 and 17 .. 176.
    assert (curve.x.tolist(), curve.y.tolist()) == ([160, 168, 176], [80.5, 88.5, 96.5])
    assert curve.faint.value[:2].tolist() == [4.5, 12.5]


def test_rgs_figures_and_their_curves() -> None:
    for run in cells_of("rg-fig2") + cells_of("rg-fig3"):
        write_run(run, updates=32, row=row, every=16, correct=correct)
    (panel,) = panels_of("rg-fig2")
    assert [curve.label for curve in panel.curves] == [
        "v = 1, i = 1 (n = 1)",
        "v = 1, i = 1, masked (n = 1)",
        "v = 10, i = 1 (n = 1)",
        "v = 1, i = 10, fixed reference (n = 1)",
    ]
    # Both benchmarks are the same held-out problems at tiny.
    (panel,) = panels_of("rg-fig3")
    assert [curve.label for curve in panel.curves] == ["v = 1 (n = 1)", "v = 10 (n = 1)"]


def test_published_numbers_are_levels_at_the_papers_scale_alone() -> None:
    for scale in ("tiny", "paper"):
        for run in cells_of("gg-fig9", scale):
            write_run(run, updates=1600, row=row)
    assert not [level for panel in panels_of("gg-fig9") for level in panel.levels]
    ess, share, loss = panels_of("gg-fig9", "paper")
    # Over the last 800 updates, as published.
    assert [(each.y, each.left, each.right) for each in ess.levels] == [(0.582, 800.0, 1600.0), (0.69, 800.0, 1600.0)]
    assert ess.levels[0].label == "published: 0.582 (fixed reference)"
    assert [each.y for each in (*share.levels, *loss.levels)] == [0.758, 0.839, 0.619, 0.531]
    plate = whole_plate(collated("gg-fig9", "paper"))
    assert plate is not None
    axes = draw(plate).axes[0]
    dashed = [line for line in axes.lines if str(line.get_label()).startswith("published")]
    assert [line.get_xydata().tolist() for line in dashed] == [
        [[800.0, 0.582], [1600.0, 0.582]],
        [[800.0, 0.69], [1600.0, 0.69]],
    ]


def test_a_figure_without_a_finished_run_is_not_drawn_and_an_old_one_goes(tmp_path: Path) -> None:
    old = tmp_path / "gg-fig9.png"
    old.write_bytes(b"old")
    assert whole_plate(collated("gg-fig9")) is None
    assert draw_figures(collated("gg-fig9"), tmp_path) == []
    assert not old.exists()


# --- drawing ----------------------------------------------------------------------------------------------------


def ladder_plate() -> Plate:
    for run in cells_of("gg-fig7"):
        write_run(run, updates=300, row=row)
    plate = whole_plate(collated("gg-fig7"))
    assert plate is not None
    return plate


def test_lines_bands_and_legends_of_the_drawn_figure() -> None:
    for run in cells_of("gg-fig1"):
        write_run(run, updates=120, row=row, every=40, correct=correct)
    plate = whole_plate(collated("gg-fig1"))
    assert plate is not None
    figure = draw(plate)
    k3 = figure.axes[0]
    lines = {str(line.get_label()): line for line in k3.lines}
    ggpo = lines["GGPO (n = 3)"]
    assert ggpo.get_xydata().tolist() == pytest.approx(
        np.column_stack([plate.panels[0].curves[2].x, plate.panels[0].curves[2].y])
    )
    assert to_hex(ggpo.get_color()) == STYLES["ggpo"][0].lower()
    band = k3.collections[2].get_paths()[0].vertices
    centre, spread = 3.0 * 3.0 * 3.5, 3.0 * 3.5 * 7**0.5
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((centre - spread, centre + spread))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "GRPO (n = 3)",
        "AGRO (n = 3)",
        "GGPO (n = 3)",
    ]
    accuracy = figure.axes[3]
    assert [line.get_marker() for line in accuracy.lines] == ["s", "^", "o"]
    assert [text.get_text() for text in figure.axes[2].texts] == ["no values"]
    assert any("scale=tiny" in text.get_text() for text in figure.texts)


def test_a_ladder_has_its_rungs_evenly_and_logarithmic_axes_where_the_paper_has_them() -> None:
    figure = draw(ladder_plate())
    k3, ess, entropy, _length = figure.axes
    assert [axes.get_yscale() for axes in (k3, ess, entropy)] == ["log", "log", "linear"]
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
    assert k3.xaxis.get_major_locator()().tolist() == [8, 16, 32, 64, 128]
    ends = [np.log2(tick) for tick in k3.xaxis.get_major_locator()()]
    assert np.diff(ends).tolist() == [1.0] * 4


def test_error_bars_stand_where_there_are_seeds() -> None:
    for run in cells_of("gg-fig3"):
        if run.config.objective.name == "ggpo" and run.config.schedule.t_ref != 128:
            write_run(
                run, updates=8, row=row, every=8, correct=lambda run, _: [int(SEEDS[run.config.seed]) % 5, 2, 2, 2]
            )
    plate = whole_plate(collated("gg-fig3"))
    assert plate is not None
    (axes,) = draw(plate).axes
    (bars,) = axes.containers
    segments = bars.lines[2][0].get_segments()
    assert [segment[0][0] for segment in segments] == [8.0, 128.0]
    # Seeds have 7, 8 and 7 of 16 right: 43.75, 50, 43.75; mean 45.83, deviation 3.608.
    assert [segment[:, 1].tolist() for segment in segments] == [
        pytest.approx([45.8333 - 3.6084, 45.8333 + 3.6084], abs=1e-3)
    ] * 2


def test_objectives_have_colours_and_markers_of_their_own() -> None:
    assert len({colour for colour, _ in STYLES.values()}) == len(STYLES)
    assert len({marker for _, marker in STYLES.values()}) == len(STYLES)
    shades = [colour(Look("ggpo", variant)) for variant in range(5)]
    assert len(set(shades)) == 5
    assert to_hex(shades[0]) == STYLES["ggpo"][0].lower()


def test_the_same_data_give_the_same_bytes_and_other_data_others(tmp_path: Path) -> None:
    runs = cells_of("gg-fig10")
    for run in runs:
        write_run(run, updates=176, row=row)
    files = [draw_figures(collated("gg-fig10"), tmp_path / name) for name in ("a", "b")]
    assert [path.name for path in files[0]] == ["gg-fig10.png", "gg-fig10.svg"]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    metrics = runs[0].folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"reward/retained": 7.0', '"reward/retained": 70.0'))
    changed = draw_figures(collated("gg-fig10"), tmp_path / "c")
    assert all(one.read_bytes() != two.read_bytes() for one, two in zip(files[0], changed, strict=True))


def test_panels_are_made_without_loading_what_draws_or_learns() -> None:
    probe = (
        "import sys, grpo_lab.report.addenda; "
        "print([name for name in ('torch', 'matplotlib', 'matplotlib.pyplot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"
    probe = "import sys, grpo_lab.report.drawing; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_report_shows_its_figure_and_the_table_beside_it(tmp_path: Path) -> None:
    write_report(collated("gg-fig6"), tmp_path, draw_figures)
    page = (tmp_path / "gg-fig6.md").read_text()
    assert "![figure 6](gg-fig6.png)" in page
    assert "| GGPO   | 7 | 0.377964    | " in page
    assert (tmp_path / "gg-fig6-coefficients.csv").read_text().splitlines()[1].startswith("GRPO,0,0.000000,0.000000,")
    assert r"\begin{tabular}{lllllll}" in (tmp_path / "gg-fig6.tex").read_text()
    assert (tmp_path / "gg-fig6.svg").is_file()
    write_report(collated("rg-throughput"), tmp_path, draw_figures)
    page = (tmp_path / "rg-throughput.md").read_text()
    assert "## Seconds an update, by phase" in page
    assert "![" not in page
