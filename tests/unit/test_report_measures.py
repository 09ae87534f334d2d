"""Measures of stored runs, by hand, and intervals against textbook values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_config import run_config
from stored_runs import leave_run

from grpo_lab.report.inference import (
    change,
    interval_over_problems,
    interval_over_seeds,
    student_probability,
    student_quantile,
)
from grpo_lab.report.measures import KINDS, Frame, curve, read_end, read_over
from grpo_lab.report.stored import Counts, StoredRun, read_run
from grpo_lab.tables import definition


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    """Twenty updates; four problems with four responses each."""
    columns = {
        "mismatch/k3": [float(u) for u in range(1, 21)],
        "mismatch/ess_sequence": [0.5 if u % 4 == 0 else None for u in range(1, 21)],
        "total/responses": [float(10 * u) for u in range(1, 21)],
    }
    evaluations = {0: [0, 1, 3, 4], 10: [0, 2, 4, 4], 20: [1, 3, 4, 4]}
    folder = leave_run(tmp_path / "run", run_config("seed=1"), columns, evaluations, hours=10 / 3600)
    return read_run(folder)


def test_every_measure_of_the_definitions_is_there() -> None:
    assert set(KINDS) == set(definition.MEASURES)


def test_accuracy_by_hand(run: StoredRun) -> None:
    end = read_end(run, "average", None)
    assert end is not None
    assert end.value == pytest.approx(100 * 12 / 16)
    assert end.problems == {"p0": 25.0, "p1": 75.0, "p2": 100.0, "p3": 100.0}
    assert curve(run, "mean").value.tolist() == [50.0, 62.5, 75.0]
    # RG's tables print shares.
    aime = read_end(run, "aime24", None)
    assert aime is not None
    assert aime.value == pytest.approx(0.75)
    # pass@4 of 4: whether any is right.
    best = read_end(run, "pass@4", None)
    assert best is not None
    assert best.value == 100.0
    # 1 - C(n - c, 1) / C(n, 1); more than n responses cannot be drawn.
    assert read_end(run, "pass@8", None) is None


def test_problems_by_the_untrained_models_share(run: StoredRun) -> None:
    """p0 is 0, 1/4, 3/4 and 1: two are solvable (0 < p0 <= 0.75), one unsolved, and the last counts nowhere."""
    frame = Frame(split=run.evaluations[0])
    solvable = read_end(run, "solvable", None, frame)
    assert solvable is not None
    assert solvable.problems == {"p1": 75.0, "p2": 100.0}
    assert solvable.value == 87.5
    assert curve(run, "unsolved", frame).value.tolist() == [0.0, 0.0, 100.0]
    # Nothing splits the problems of a run by itself.
    assert read_end(run, "solvable", None) is None


def test_training_over_its_window(run: StoredRun) -> None:
    def value(name: str, window: int | None) -> float:
        reading = read_end(run, name, window)
        assert reading is not None
        assert reading.problems is None
        return reading.value

    assert value("k3", 4) == (17 + 18 + 19 + 20) / 4
    # The last tenth of twenty updates.
    assert value("k3", None) == 19.5
    assert value("responses", 4) == 200
    assert value("ess", 4) == 0.5
    assert read_end(run, "iterations/s", None) is None, "it logs no seconds"
    assert read_end(run, "ess", 1) is not None
    assert read_end(run, "ess", None) is not None
    assert read_end(run, "entropy", 4) is None


def test_how_far_evaluations_are_off_their_neighbours(run: StoredRun) -> None:
    """Of the second half: 50, 100, 50 and 75 % are +50 and -37.5 points off."""
    ids = ("a", "b", "c", "d")
    counts = {update: Counts(ids, np.array([2, 2, 2, right]), 2) for update, right in [(0, 0), (5, 2)]}
    counts |= {update: Counts(ids, np.array([right] * 4), 4) for update, right in [(11, 2), (14, 4), (17, 2), (20, 3)]}
    reading = read_end(replace(run, evaluations=counts), "instability", None)
    assert reading is not None
    assert reading.value == pytest.approx(((50**2 + 37.5**2) / 2) ** 0.5)
    few = {update: each for update, each in counts.items() if update <= 14}
    assert read_end(replace(run, evaluations=few), "instability", None) is None


def test_a_stretch_averages_its_evaluations_problem_by_problem(run: StoredRun) -> None:
    both = read_over(run, "mean", 0, 20)
    assert both is not None
    assert both.problems == {"p0": 12.5, "p1": 62.5, "p2": 100.0, "p3": 100.0}
    assert both.value == pytest.approx((62.5 + 75) / 2)
    assert read_over(run, "mean", 10, 19) is None


# --- intervals ---


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262)])
def test_students_quantiles_as_tables_have_them(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, abs=5e-4)
    assert student_probability(expected, freedom) == pytest.approx(0.95, abs=1e-4)


def test_the_interval_over_seeds_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1, half 4.303 / sqrt(3)."""
    interval = interval_over_seeds([1.0, 2.0, 3.0])
    assert interval is not None
    half = 4.3027 / math.sqrt(3)
    assert (interval.low, interval.high) == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert interval.method == "t interval over 3 seeds"
    assert interval_over_seeds([1.0]) is None


def test_the_interval_over_problems_is_that_of_a_mean() -> None:
    """400 problems, half of them better by 2, half equal: mean 1, standard error 1 / 20."""
    interval = interval_over_problems(np.repeat([0.0, 2.0], 200))
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((1 - 1.96 / 20, 1 + 1.96 / 20), abs=0.01)
    assert interval_over_problems(np.repeat([0.0, 2.0], 200)) == interval
    assert interval_over_problems(np.ones(9)) is None
    assert interval_over_problems(np.ones(10)) is not None


def test_the_change_of_a_line() -> None:
    update = np.array([0, 10, 40])
    assert change(update, 3.0 + 0.5 * update) == pytest.approx(20.0)
    rows = np.stack([0.5 * update, -0.25 * update])
    assert change(update, rows).tolist() == pytest.approx([20.0, -10.0])
    # Of no line, by least squares: a slope of (100 / 3) / (2600 / 3), times 40.
    assert change(update, np.array([0.0, 9.0, 4.0])) == pytest.approx(20 / 13)
