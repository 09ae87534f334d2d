"""Which runs a table takes for its cells: changed ones, failed ones, runs with words of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from figure_runs import cells_of, write_run
from stored_runs import groups_of, leave_cells, leave_run

from grpo_lab.composition import load_config, save_config
from grpo_lab.config import ConfigError
from grpo_lab.report.__main__ import main, read_request, report_on_targets
from grpo_lab.report.addenda import whole_plate
from grpo_lab.report.collate import Slot, collate
from grpo_lab.report.document import make_page, state
from grpo_lab.report.layout import comparison
from grpo_lab.report.orderings import judge
from grpo_lab.report.stored import Shelf, UnreadableRun, read_run
from grpo_lab.tables.cells import runs_of
from grpo_lab.tables.definition import Definition, load_definition, read_definition

TABLE = """
paper: gg
label: table 0
title: a table
experiment: gg/table1
measures: [average, solvable]
rows: [objective]
columns: [average, solvable]
cells: [{objective: [grpo, ggpo], seed: [1, 2, 42]}]
published: [{at: {objective: ggpo}, measure: average, value: 46.5, source: GG 1}]
orderings: [{left: {objective: ggpo}, relation: ">", right: {objective: grpo}, measure: average, source: GG 1}]
"""
AVERAGE = Slot("average")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Definition:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(TABLE)
    return read_definition(tmp_path / "t.yaml")


def test_a_run_that_was_lengthened_in_its_folder_is_not_the_cell(table: Definition) -> None:
    folder, other, _ = leave_cells(table, {"objective": "ggpo"}, {0: [1], 3: [4]})
    config = load_config(folder / "config.yaml")
    config.schedule.updates = 4096
    save_config(config, folder / "config.yaml")
    # What decides no result may be another, and a word may stand for the number that it means.
    same = load_config(other / "config.yaml")
    same.schedule.t_ref, same.tracking.group, same.run_dir = 160, "mine", "elsewhere"
    save_config(same, other / "config.yaml")
    collated = collate(table, "tiny", Shelf())
    assert groups_of(collated, {"objective": "ggpo"})[0].entries[AVERAGE].values == {2: 100.0, 42: 100.0}
    assert state(collated) == "2 of 6 runs finished, 3 missing, 1 changed (not used)"
    page = make_page(collated, judge(collated))
    assert f"- {folder}: its settings were changed: schedule.updates; not used" in page


def fail(folder: Path, update: int) -> None:
    lines = [json.dumps({"kind": "update", "update": u + 1}) for u in range(update)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text(json.dumps({"status": "running", "seconds_total": 1.0}))
    (folder / "failure.txt").write_text("the loss is not finite\n")


def test_a_seed_that_failed_is_told(table: Definition) -> None:
    leave_cells(table, {"objective": "ggpo"}, {0: [1] * 20, 3: [4] * 20})
    first, *others = leave_cells(table, {"objective": "grpo"}, {0: [1] * 20, 3: [2] * 20})
    fail(first, 2)
    collated = collate(table, "tiny", Shelf())
    page = make_page(collated, judge(collated))
    (row,) = [row for row in comparison(collated).rows if row[:2] == ("GRPO", "average (%)")]
    assert row[3:6] == ("50.00 ± 0.00", "", "2 of 3: 2, 42; 1 failed: 1")
    assert "100.00 against 50.00: +50.00 (2 seeds; seed 1 of GRPO failed at update 2)" in page
    for folder in others:
        fail(folder, 3)
    collated = collate(table, "tiny", Shelf())
    (row,) = [row for row in comparison(collated).rows if row[:2] == ("GRPO", "average (%)")]
    assert row[3:6] == ("failed", "", "0 of 3; 3 failed: 1, 2, 42")
    assert "no seed is finished on both sides; seed 1 of GRPO failed at update 2" in make_page(
        collated, judge(collated)
    )


def test_problems_are_split_once_by_the_first_run_of_seed_42(table: Definition) -> None:
    """GRPO's run of seed 42 had p0 = 1/4, 0, 1; the others, sampled anew, differ in which problem is solvable."""
    leave_cells(table, {"objective": "grpo", "seed": 1}, {0: [0, 2, 4], 3: [4, 4, 4]})
    (first,) = leave_cells(table, {"objective": "grpo", "seed": 42}, {0: [1, 0, 4], 3: [2, 4, 4]})
    leave_cells(table, {"objective": "ggpo", "seed": 42}, {0: [0, 1, 4], 3: [3, 1, 4]})
    collated = collate(table, "tiny", Shelf())
    grpo, ggpo = (groups_of(collated, {"objective": name})[0].entries[Slot("solvable")] for name in ("grpo", "ggpo"))
    assert grpo.values == {1: 100.0, 42: 50.0}
    assert ggpo.values == {42: 75.0}
    page = make_page(collated, judge(collated))
    assert f"- Problems that count for solvable, of all runs alike: 1, at update 0 of {first}." in page


def test_words_that_decide_results_give_other_files_and_no_differences(table: Definition, tmp_path: Path) -> None:
    words = ["learner.lr=3e-6"]
    for run in runs_of(table, "paper", words):
        leave_run(run.folder, run.config, {"entropy": [0.5] * 3}, {0: [1], 3: [4]})
    changed = collate(table, "paper", Shelf(), words)
    entry = groups_of(changed, {"objective": "ggpo"})[0].entries[AVERAGE]
    assert (entry.mean, entry.difference, changed.comparable) == (100.0, None, False)
    assert changed.name.startswith("t-")
    assert len(changed.name) == len("t-") + 12
    assert "the runs have other settings than the paper's" in make_page(changed, [])
    leave_cells(table, {}, {0: [1], 3: [4]}, scale="paper")
    # Where it runs decides nothing.
    for plain in ([], ["tracking.project=x"]):
        collated = collate(table, "paper", Shelf(), plain)
        assert (collated.name, collated.comparable) == ("t", True)
        assert groups_of(collated, {"objective": "ggpo"})[0].entries[AVERAGE].difference == 53.5
    other = collate(table, "paper", Shelf(), ["learner.lr=2e-6"])
    assert other.name not in (changed.name, "t")


def test_files_of_other_settings_stand_beside_the_canonical_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target = load_definition("gg-fig9")
    word = "learner.weight_decay=0.125"
    for run in [*cells_of("gg-fig9", "paper"), *runs_of(target, "paper", [word])]:
        write_run(run, updates=400, row=lambda run, update: {"loss/raw": 0.5})
    report_on_targets(read_request(["gg-fig9", "scale=paper", "out=there"]))
    page = (tmp_path / "there/paper/gg-fig9.md").read_bytes()
    (written,) = report_on_targets(read_request(["gg-fig9", "scale=paper", "out=there", word]))
    assert (tmp_path / "there/paper/gg-fig9.md").read_bytes() == page
    names = {path.name for path in (tmp_path / "there/paper").iterdir()}
    assert names == {
        f"{name}.{kind}" for name in ("gg-fig9", written.name) for kind in ("md", "csv", "tex", "png", "svg")
    }
    assert f"![figure 9]({written.name}.png)" in written.page
    plates = [whole_plate(collate(target, "paper", Shelf(), words)) for words in ([], [word])]
    levels = [[level for panel in each.panels for level in panel.levels] for each in plates if each is not None]
    assert (len(levels[0]) > 0, levels[1]) == (True, [])
    assert plates[1] is not None
    assert f"scale=paper, with {word}. Runs with other settings" in plates[1].footnotes[0]


def test_a_run_that_cannot_be_read_fails_its_own_target_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    broken, *_ = leave_cells(load_definition("gg-fig10"), {"objective": "ggpo_clip"}, {0: [1], 20: [2]})
    (broken / "evaluations" / "update_000020.json").write_text('{"upd')
    folder = tmp_path / "there" / "tiny"
    folder.mkdir(parents=True)
    (folder / "gg-fig10.csv").write_text("old")
    monkeypatch.setattr("sys.argv", ["report", "gg-fig10", "gg-table8", "out=there"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "error: gg-fig10: " in printed.err
    assert "- gg-fig10 has no report: " in printed.out
    page = (folder / "gg-fig10.md").read_text()
    assert page.startswith("# GG figure 10: token clipping at 0.05, training reward, seed 42\n\nNo report: ")
    assert "update_000020.json is not JSON" in page
    assert not (folder / "gg-fig10.csv").exists()
    assert (folder / "gg-table8.csv").is_file()


def test_a_word_that_is_not_of_the_runs_is_the_users_error_and_leaves_pages_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="group_size= is set by the cells of gg-table8"):
        report_on_targets(read_request(["gg-table8", "group_size=2", "out=there"]))
    assert not (tmp_path / "there").exists()


def test_folders_that_cannot_be_read(table: Definition) -> None:
    first, second, third = leave_cells(table, {"objective": "ggpo"}, {0: [1], 3: [4]})
    (third / "config.yaml").write_text("seed: [1]\n")
    with pytest.raises(UnreadableRun, match=r"config\.yaml does not fit this version"):
        collate(table, "tiny", Shelf())
    (second / "metrics.jsonl").unlink()
    (second / "metrics.jsonl").mkdir()
    with pytest.raises(UnreadableRun, match=f"{second.name} cannot be read"):
        collate(table, "tiny", Shelf())
    (first / "provenance.json").unlink()
    (first / "provenance.json").mkdir()
    with pytest.raises(UnreadableRun, match=r"provenance\.json cannot be read"):
        read_run(first)
