"""RG's speed: seconds by phase over whole sync periods, the bound on what fewer syncs give, and shared machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from figure_runs import cells_of, collated, write_provenance, write_run
from stored_runs import groups_of

from grpo_lab.config import ConfigError
from grpo_lab.report.addenda import addendum_of, whole_plate
from grpo_lab.report.collate import Slot
from grpo_lab.report.layout import NO_VALUE, NOT_RUN
from grpo_lab.report.machines import hardware_notes
from grpo_lab.report.measures import read_end
from grpo_lab.report.stored import read_run
from grpo_lab.report.throughput import Timing, speeds, timing_of
from grpo_lab.schedule import speedup_bound
from grpo_lab.tables.cells import Run

V = (1, 2, 5, 10, 20)


def seconds(run: Run, update: int) -> Mapping[str, Any]:
    """0.5 + 0.3 + 0.1 s, and 0.2 s for a sync every v updates; the first update warms up, evaluations are not timed."""
    warm = 9.0 if update == 1 else 0.0
    sync = 0.2 if (update - 1) % run.config.schedule.v == 0 else 0.0
    time = {"collect": 0.5 + warm, "sync": sync, "learn": 0.3, "evaluate": 4.0, "save": 2.0, "other": 0.1}
    return {"reward/retained": 0.5, "kl/reference": 0.01, "time": time}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Run]:
    monkeypatch.chdir(tmp_path)
    return {run.config.schedule.v: run for run in cells_of("rg-throughput")}


def test_the_table_has_five_delays_at_both_scales(runs: dict[int, Run]) -> None:
    assert tuple(runs) == V
    assert tuple(run.config.schedule.v for run in cells_of("rg-throughput", "paper")) == V


def test_seconds_of_whole_periods_after_the_first(runs: dict[int, Run]) -> None:
    write_run(runs[5], updates=18, row=seconds)
    timing = timing_of(read_run(runs[5].folder), warm_up=0)
    assert timing is not None
    # Updates 6 to 15: two syncs in ten updates; 16 to 18 are no whole period.
    assert (timing.v, timing.updates) == (5, 10)
    assert timing.sync == pytest.approx(0.04)
    assert (timing.collect, timing.learn, timing.other) == pytest.approx((0.5, 0.3, 0.1))
    assert timing.step == pytest.approx(0.94)
    assert timing.rate == pytest.approx(1 / 0.94)
    # Two updates of 1.1 s and eight of 0.9: rates 0.909 and 1.111, sample deviation 0.202 * sqrt(1.6 / 9).
    assert timing.spread == pytest.approx((1 / 0.9 - 1 / 1.1) * (1.6 / 9) ** 0.5)


def test_a_run_of_one_period_has_no_timing(runs: dict[int, Run]) -> None:
    write_run(runs[10], updates=19, row=seconds)
    assert timing_of(read_run(runs[10].folder), warm_up=0) is None


def test_iterations_a_second_are_the_tables_measure(runs: dict[int, Run]) -> None:
    """Without what is evaluated, saved and warmed up: 1.1 s an update at v = 1."""
    write_run(runs[1], updates=6, row=seconds)
    reading = read_end(read_run(runs[1].folder), "iterations/s", None)
    assert reading is not None
    assert reading.value == pytest.approx(1 / 1.1)


def test_rows_without_times_have_no_timing(runs: dict[int, Run]) -> None:
    write_run(runs[1], updates=6, row=lambda run, update: {"reward/retained": 0.5})
    assert timing_of(read_run(runs[1].folder), warm_up=0) is None


def test_the_bound_by_hand() -> None:
    """An update of 10 s, 4 s of them sync: at v = 2 two are saved, at 4 three; without end, 10 / 6."""
    assert [speedup_bound(10, 4, v) for v in (1, 2, 4)] == pytest.approx([1, 10 / 8, 10 / 7])
    assert speedup_bound(10, 4, 10**9) == pytest.approx(10 / 6)


def timing(v: int, sync: float) -> Timing:
    return Timing(v=v, updates=1, collect=6.0, sync=sync, learn=0.0, other=0.0, spread=0.0)


def test_speed_up_is_of_rates_and_stands_beside_the_bound_of_v_1() -> None:
    first, second = speeds([timing(1, 4.0), timing(2, 3.0)])
    assert (first.speedup, first.bound) == (1.0, 1.0)
    assert (second.speedup, second.bound) == pytest.approx((10 / 9, 10 / 8))
    (alone,) = speeds([timing(2, 3.0)])
    assert (alone.speedup, alone.bound) == (None, None)


def test_the_table_and_what_is_not_run(runs: dict[int, Run]) -> None:
    for v in (1, 2, 10):
        write_run(runs[v], updates=40, row=seconds)
    addendum = addendum_of(collated("rg-throughput"))
    assert addendum is not None
    rows = {row[0]: dict(zip(addendum.grid.header, row, strict=True)) for row in addendum.grid.rows}
    assert tuple(rows) == tuple(map(str, V))
    # 1.1 s an update at v = 1, 1.0 at 2, 0.92 at 10: as much as the bound says, since nothing else changes.
    assert [rows[v]["iterations/s"] for v in ("1", "2", "10")] == ["0.9091", "1", "1.087"]
    assert [rows[v]["speed-up"] for v in ("1", "2", "10")] == ["1.000", "1.100", "1.196"]
    assert [rows[v]["bound"] for v in ("1", "2", "10")] == ["1.000", "1.100", "1.196"]
    # All leave out 20 updates, the period of v = 20.
    assert [rows[v]["updates timed"] for v in ("1", "2", "10")] == ["20", "20", "20"]
    assert set(rows["20"].values()) == {"20", NOT_RUN, "tiny"}
    plate = whole_plate(collated("rg-throughput"))
    assert plate is not None
    speed = plate.panels[0]
    assert [curve.label for curve in speed.curves] == ["measured", "bound: syncs alone"]
    assert speed.curves[1].x.tolist() == [1, 2, 10]
    assert speed.curves[1].y.tolist() == pytest.approx([1, 1.1, 1.1 / 0.92])


def test_without_v_1_there_is_no_speed_up(runs: dict[int, Run]) -> None:
    write_run(runs[2], updates=22, row=seconds)
    addendum = addendum_of(collated("rg-throughput"))
    assert addendum is not None
    assert addendum.grid.rows[1][-4:-2] == ("v = 1: not run", "v = 1: not run")
    # It ends before the others' warm-up does: finished, and without a value.
    write_run(runs[1], updates=20, row=seconds)
    addendum = addendum_of(collated("rg-throughput"))
    assert addendum is not None
    assert set(addendum.grid.rows[0]) == {"1", NO_VALUE, "tiny"}
    assert addendum.grid.rows[1][-4:-2] == ("v = 1: no value", "v = 1: no value")


def test_a_slow_start_weighs_on_no_delay(runs: dict[int, Run]) -> None:
    """Updates 1 to 20 take a second more: v = 1, which would count 19 of them, is not the slower for it."""

    def slow_start(run: Run, update: int) -> Mapping[str, Any]:
        found = dict(seconds(run, update))
        return found | {"time": found["time"] | {"other": 1.1 if update <= 20 else 0.1}}

    for v in (1, 20):
        write_run(runs[v], updates=60, row=slow_start)
    table = collated("rg-throughput")
    assert table.reader.frame.warm_up == 20
    first, last = (groups_of(table, {"schedule.v": v})[0].entries[Slot("iterations/s")].mean for v in (1, 20))
    assert first == pytest.approx(1 / 1.1)
    assert last == pytest.approx(1 / 0.91)


def test_runs_side_by_side_are_warned_of(runs: dict[int, Run]) -> None:
    """Each of the hand-made runs takes an hour."""
    for v, started in (
        (1, "2026-01-01T10:00:00+00:00"),
        (2, "2026-01-01T11:00:01+00:00"),
        (5, "2026-01-01T11:30:00+00:00"),
    ):
        write_run(runs[v], updates=20, row=seconds)
        write_provenance(runs[v].folder, started)
    quiet, *_ = notes = hardware_notes([read_run(runs[1].folder)])
    assert quiet == "Hardware: node1, Linux, 2 CPUs, threads a rank 1."
    assert not [note for note in notes if note.startswith("Warning")]
    (warning,) = [note for note in hardware_notes([read_run(runs[2].folder)]) if note.startswith("Warning")]
    assert runs[2].folder.name in warning
    assert runs[5].folder.name in warning
    # Elsewhere at the same time is no matter.
    write_provenance(runs[5].folder, "2026-01-01T11:30:00+00:00", host="node2")
    assert not [note for note in hardware_notes([read_run(runs[2].folder)]) if note.startswith("Warning")]
    both = hardware_notes([read_run(runs[2].folder), read_run(runs[5].folder)])
    assert [note for note in both if "not all made on one machine" in note]


def test_hardware_that_is_not_recorded_and_a_file_that_is_broken(runs: dict[int, Run]) -> None:
    write_run(runs[1], updates=4, row=seconds)
    assert hardware_notes([read_run(runs[1].folder)])[0] == "Hardware: not recorded."
    run = read_run(runs[1].folder)
    (runs[1].folder / "provenance.json").write_text(json.dumps({"session": []}))
    with pytest.raises(ConfigError, match=r"provenance\.json cannot be read"):
        hardware_notes([run])
