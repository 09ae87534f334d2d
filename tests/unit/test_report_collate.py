"""Tables collated from run folders: means, deviations, what is missing, and where paper-scale scores come from."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from stored_runs import groups_of, leave_cells
from stored_scores import leave_opinion, leave_scores

from grpo_lab.config import ConfigError
from grpo_lab.report import layout
from grpo_lab.report.collate import Collated, Slot, collate
from grpo_lab.report.document import make_page, state
from grpo_lab.report.orderings import judge
from grpo_lab.report.readings import Reader
from grpo_lab.report.stored import Shelf
from grpo_lab.tables.definition import Definition, read_definition
from grpo_lab.tables.when import When

TABLE = """
paper: gg
label: table 0
title: a table
experiment: gg/table1
measures: [average, k3]
rows: [objective]
columns: [average]
cells:
  - {objective: [grpo, ggpo], seed: [1, 2]}
  - {only: tiny, objective: ggpo, schedule.t_ref: 128, seed: 1}
also: [base]
evaluate:
  paper: evaluation.benchmarks=[math500,aime24] evaluation.n=4
window: {paper: 2, tiny: 2}
published:
  - {at: {objective: ggpo}, measure: average, value: 46.5, source: GG 1}
  - {at: {objective: base}, measure: average, value: 30, source: GG 2}
  - {at: {objective: grpo}, measure: k3, value: 0.001, form: order, source: GG 3}
orderings:
  - {left: {objective: ggpo}, relation: ">", right: {objective: grpo}, margin: 3.9, measure: average, source: GG 4}
remarks: [a remark]
"""
AVERAGE, K3 = Slot("average"), Slot("k3")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Definition:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "t.yaml"
    path.write_text(TABLE)
    return read_definition(path)


def entries(collated: Collated, objective: str) -> tuple[float | None, float | None, dict[int, float]]:
    entry = groups_of(collated, {"objective": objective})[0].entries[AVERAGE]
    return entry.mean, entry.deviation, dict(entry.values)


def test_means_and_deviations_over_seeds_by_hand(table: Definition) -> None:
    k3 = {"mismatch/k3": [9.0, 0.25, 0.75]}
    leave_cells(table, {"objective": "grpo", "seed": 1}, {0: [1, 0], 3: [2, 2]}, columns=k3)
    leave_cells(table, {"objective": "grpo", "seed": 2}, {0: [2, 0], 3: [4, 2]}, columns=k3)
    collated = collate(table, "tiny", Shelf())
    # 4 of 8 and 6 of 8 right: 50 and 75 per cent.
    assert entries(collated, "grpo") == (62.5, pytest.approx(25 / 2**0.5), {1: 50.0, 2: 75.0})
    assert entries(collated, "ggpo") == (None, None, {})
    # 1 and 2 of 8 before training.
    assert entries(collated, "base") == (18.75, pytest.approx(12.5 / 2**0.5), {1: 12.5, 2: 25.0})
    grpo = groups_of(collated, {"objective": "grpo"})[0]
    # The last two updates.
    assert grpo.entries[K3].values == {1: 0.5, 2: 0.5}
    assert grpo.entries[K3].published is not None
    assert K3 not in groups_of(collated, {"objective": "base"})[0].entries
    assert state(collated) == "2 of 5 runs finished, 3 missing"


def test_no_difference_at_tiny_and_no_published_number_for_its_own_cells(table: Definition) -> None:
    leave_cells(table, {"objective": "ggpo"}, {0: [1, 0], 3: [2, 2]})
    plain, aligned = groups_of(collate(table, "tiny", Shelf()), {"objective": "ggpo"})
    assert (plain.of_paper, aligned.of_paper) == (True, False)
    assert plain.entries[AVERAGE].published is not None
    assert aligned.entries[AVERAGE].published is None
    assert plain.entries[AVERAGE].difference is aligned.entries[AVERAGE].difference is None


def test_unfinished_runs_are_named_and_not_used(table: Definition) -> None:
    (first,) = leave_cells(table, {"objective": "grpo", "seed": 1}, {0: [1, 0], 3: [2, 2]}, status="interrupted")
    (second,) = leave_cells(table, {"objective": "grpo", "seed": 2}, {0: [1, 0], 3: [4, 4]})
    collated = collate(table, "tiny", Shelf())
    assert entries(collated, "grpo") == (100.0, None, {2: 100.0})
    page = make_page(collated, judge(collated))
    assert f"- {first}: half done, at update 3; not used" in page
    assert "1 of 5 runs finished, 1 half done, 3 missing (not used)" in page
    assert f"- {second}: k3 is not logged" in page


def test_paper_scale_pools_the_problems_of_all_benchmarks(table: Definition) -> None:
    (run,) = leave_cells(table, {"objective": "ggpo", "seed": 1}, {0: [1, 0], 3: [4, 4]}, scale="paper")
    # Three problems of one and one of the other: 7 of 16, and not the mean of 4/12 and 3/4.
    leave_scores(run, "update_000003", "math500", [4, 0, 0])
    missing = collate(table, "paper", Shelf())
    assert entries(missing, "ggpo")[0] is None
    (note,) = [
        each
        for each in groups_of(missing, {"objective": "ggpo"})[0].notes
        if "average" not in each and "k3" not in each
    ]
    assert note == (
        f"{run}: not evaluated yet: python -m grpo_lab.evaluate run={run} "
        "evaluation.benchmarks=[math500,aime24] evaluation.n=4"
    )
    leave_scores(run, "update_000003", "aime24", [3])
    leave_scores(run, "base", "math500", [0, 0, 0])
    leave_scores(run, "base", "aime24", [4])
    collated = collate(table, "paper", Shelf())
    assert entries(collated, "ggpo") == (43.75, None, {1: 43.75})
    assert groups_of(collated, {"objective": "ggpo"})[0].entries[AVERAGE].difference == 43.75 - 46.5
    assert groups_of(collated, {"objective": "base"})[0].entries[AVERAGE].difference == 25.0 - 30
    # Cells of the tiny scale alone are not asked for.
    assert len(collated.placed) == 4


def test_an_order_of_magnitude_has_no_difference(table: Definition) -> None:
    columns = {"mismatch/k3": [0.002, 0.002]}
    leave_cells(table, {"objective": "grpo", "seed": 1}, {0: [1, 0]}, scale="paper", columns=columns)
    entry = groups_of(collate(table, "paper", Shelf()), {"objective": "grpo"})[0].entries[K3]
    assert (entry.mean, entry.difference) == (0.002, None)
    assert layout.published_text(entry.published, K3) == "order of 0.001"


CHECKPOINTS = """
paper: rg
label: table 0
title: over checkpoints
experiment: rg/table2
measures: [aime24]
rows: [schedule.v]
columns: [aime24]
also: [base]
cells: [{schedule.v: [1, 10]}]
evaluate: {paper: "evaluation.benchmarks=[aime24] evaluation.n=32 lighteval=true"}
published:
  - {at: {schedule.v: 1}, measure: aime24, value: 0.3, statistic: minimum, source: RG 1}
  - {at: {schedule.v: 1}, measure: aime24, value: 0.5, statistic: mean, source: RG 1}
  - {at: {objective: base}, measure: aime24, value: 0.25, source: RG 1}
orderings:
  - left: {schedule.v: 10}
    relation: "~"
    right: {schedule.v: 1}
    measure: aime24
    when: over checkpoints
    source: RG 1
"""


def test_statistics_over_checkpoints_are_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(CHECKPOINTS)
    table = read_definition(tmp_path / "t.yaml")
    leave_cells(table, {"schedule.v": 1}, {0: [0, 1], 2: [2, 2], 4: [1, 2], 6: [4, 4]})
    collated = collate(table, "tiny", Shelf())
    ((name, grid),) = layout.in_layout(collated, layout.ours_text, "tiny")
    assert name == ""
    assert grid.header == ("v", "one model", "minimum", "mean")
    # 0.5, 0.375 and 1 after the untrained model's 0.125.
    assert grid.rows == (
        ("base model", "0.1250", "", ""),
        ("1", "", "0.3750, over 3 checkpoints", "0.6250, over 3 checkpoints"),
        ("10", "", "not run", "not run"),
    )


def test_at_paper_scale_they_are_lightevals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(CHECKPOINTS)
    table = read_definition(tmp_path / "t.yaml")
    for v, scores in ((1, (0.25, 0.5, 0.75)), (10, (0.25, 0.5, 0.25))):
        (run,) = leave_cells(table, {"schedule.v": v}, {}, scale="paper", columns={"entropy": [1.0, 1.0]})
        for model, update, score in zip(("base", "update_000001", "update_000002"), (0, 1, 2), scores, strict=True):
            leave_opinion(run, model, update, "aime24", {"aime24": score}, n=32)
    collated = collate(table, "paper", Shelf())
    first = groups_of(collated, {"schedule.v": 1})[0]
    assert first.entries[Slot("aime24", "minimum")].difference == pytest.approx(0.5 - 0.3)
    assert first.entries[Slot("aime24", "mean")].difference == pytest.approx(0.625 - 0.5)
    assert collated.groups[0].entries[Slot("aime24")].difference == 0.0
    (judged,) = judge(collated)
    # One seed, and lighteval tells no problems.
    assert (judged.verdict, judged.comparisons[0].difference) == ("not tested", 0.375 - 0.625)
    assert judged.comparisons[0].checkpoints == 2


def test_other_checkpoints_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(CHECKPOINTS)
    table = read_definition(tmp_path / "t.yaml")
    leave_cells(table, {"schedule.v": 1}, {0: [0] * 20, 2: [2] * 20, 4: [2] * 20})
    leave_cells(table, {"schedule.v": 10}, {0: [0] * 20, 4: [2] * 20})
    (judged,) = judge(collate(table, "tiny", Shelf()))
    assert (judged.verdict, judged.comparisons[0].why) == (
        "not compared",
        "seed 42 has 1 against 2 evaluations in updates 1 to 4, not of the same updates (2 on one side alone)",
    )


def test_held_out_sums_have_no_benchmarks_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(CHECKPOINTS.replace("title: over checkpoints", "title: a title"))
    table = read_definition(tmp_path / "t.yaml")
    leave_cells(table, {}, {0: [0, 1], 2: [2, 2], 4: [1, 2]})
    collated = collate(table, "tiny", Shelf())
    page = make_page(collated, judge(collated))
    ours = page.replace("held-out sums, in place of AIME 2024", "SUMS")
    assert "SUMS: v 10 ~ v 1" in ours
    assert "- SUMS: share of right answers to the run's own held-out sums" in ours
    assert "AIME 2024 and MATH-500 are one series here, which rg-table2, rg-table3 and rg-fig3 all show" in ours
    assert "aime24" not in ours.partition("## To reproduce")[0]
    assert "lighteval" not in ours
    assert "Every accuracy that is ours is of a tiny model on held-out sums" in ours
    numbers = layout.numbers(collated)
    assert {row[1] for row in numbers.rows} == {"held-out sums, in place of AIME 2024"}
    # At the papers' scale it is what it is.
    paper = collate(table, "paper", Shelf())
    assert "- aime24: AIME 2024, pass@1, lighteval, each checkpoint." in make_page(paper, judge(paper))


def test_a_number_at_an_update_is_a_column_of_its_own(table: Definition, tmp_path: Path) -> None:
    text = TABLE.replace(
        "at: {objective: ggpo}, measure: average, value: 46.5",
        "at: {objective: ggpo}, when: at update 2, measure: average, value: 46.5",
    )
    (tmp_path / "t.yaml").write_text(text)
    changed = read_definition(tmp_path / "t.yaml")
    leave_cells(changed, {"objective": "ggpo", "seed": 1}, {0: [0, 0], 2: [1, 1], 3: [4, 4]})
    group = groups_of(collate(changed, "tiny", Shelf()), {"objective": "ggpo"})[0]
    assert group.entries[Slot("average", None, When.read("at update 2"))].values == {1: 25.0}
    assert group.entries[AVERAGE].values == {1: 100.0}


def test_words_that_a_definition_gets_wrong(table: Definition, tmp_path: Path) -> None:
    for old, new, said in [
        ("form: order", "form: roughly", r"published\[2\].form is 'roughly': choose exact, order, below"),
        ("form: order", "statistic: mode", r"published\[2\].statistic is 'mode': choose minimum"),
        ("form: order", "when: late", r"published\[2\].when must be end or at update N for a number, not late"),
        ("margin: 3.9", "when: soon", r"orderings\[0\].when is 'soon': choose end, early"),
    ]:
        (tmp_path / "u.yaml").write_text(TABLE.replace(old, new))
        with pytest.raises(ConfigError, match=f"u.yaml: {said}"):
            read_definition(tmp_path / "u.yaml")
    rising = TABLE.replace('relation: ">", right: {objective: grpo}', "relation: rises")
    (tmp_path / "u.yaml").write_text(rising)
    with pytest.raises(ConfigError, match=r"orderings\[0\].when must be a stretch of updates for relation 'rises'"):
        read_definition(tmp_path / "u.yaml")
    (tmp_path / "u.yaml").write_text(TABLE.replace(" evaluation.n=4", ""))
    with pytest.raises(
        ConfigError, match=r"u.yaml: evaluate.paper must say evaluation.benchmarks=\[...\] evaluation.n="
    ):
        Reader.of(read_definition(tmp_path / "u.yaml"), "paper")


def test_benchmarks_that_are_pooled_have_as_many_responses(table: Definition) -> None:
    commands = tuple(f"evaluation.benchmarks=[{name}] evaluation.n={n}" for name, n in (("math500", 1), ("aime24", 32)))
    with pytest.raises(ConfigError, match=r"evaluate.paper must say one evaluation.n= for all"):
        Reader.of(replace(table, evaluate={"paper": commands}), "paper")
    judged = tuple(f"{each} lighteval=true" for each in commands)
    reader = Reader.of(replace(table, evaluate={"paper": judged}), "paper")
    assert reader.benchmarks == {"math500": 1, "aime24": 32}


def test_the_same_run_of_two_tables_is_read_once(table: Definition) -> None:
    (folder,) = leave_cells(table, {"objective": "grpo", "seed": 1}, {0: [1, 0], 3: [2, 2]})
    shelf = Shelf()
    before = collate(table, "tiny", shelf)
    shutil.rmtree(folder / "evaluations")
    assert entries(collate(table, "tiny", shelf), "grpo") == entries(before, "grpo")
