"""Stored evaluations: which files are read, and when they cannot be compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stored_runs import groups_of, leave_cells
from stored_scores import leave_opinion, leave_scores

from grpo_lab.evaluation import agreement, report
from grpo_lab.report.collate import Collated, Slot, collate
from grpo_lab.report.document import make_page, run_notes
from grpo_lab.report.evaluated import LIGHTEVAL, SCORES, evaluated_on, lighteval_opinions
from grpo_lab.report.orderings import judge
from grpo_lab.report.stored import Shelf, UnreadableRun
from grpo_lab.tables.definition import Definition, read_definition

MODEL = "update_000008"


def test_files_have_the_names_that_the_evaluation_gives_them() -> None:
    assert (SCORES, LIGHTEVAL) == (report.SCORES, agreement.SUMMARY)


def test_scores_by_benchmark_and_responses(tmp_path: Path) -> None:
    leave_scores(tmp_path, MODEL, "math500", [1, 2])
    leave_scores(tmp_path, MODEL, "math500-0badcafe", [32, 0, 16], n=32, engine="hf")
    found = evaluated_on(tmp_path, MODEL, "math500", 32)
    assert found is not None
    assert (found.counts.correct.tolist(), found.counts.n) == ([32, 0, 16], 32)
    # Without the seed, which is each run's own.
    assert found.settings == {"n": 32, "engine": "hf"}
    assert evaluated_on(tmp_path, MODEL, "math500", 8) is None
    assert evaluated_on(tmp_path, "base", "math500", 4) is None


def test_scores_without_settings_cannot_be_used(tmp_path: Path) -> None:
    path = leave_scores(tmp_path, MODEL, "math500", [1]) / "scores.json"
    path.write_text(path.read_text().replace('"identity"', '"who"'))
    with pytest.raises(UnreadableRun, match=r"scores\.json has no 'identity': evaluate again"):
        evaluated_on(tmp_path, MODEL, "math500", 4)


def test_lightevals_own_task_and_not_ours_of_two_evaluations(tmp_path: Path) -> None:
    """The second evaluation, of MATH-500, leaves the first one's scores as they are; each asks for its own n."""
    assert lighteval_opinions(tmp_path, "aime24", 2) == {}
    leave_opinion(tmp_path, "base", 0, "aime24", {"aime24": 0.25}, n=2)
    leave_opinion(tmp_path, MODEL, 8, "aime24", {"grpo_lab_aime24": 0.75, "aime24": 0.5}, n=2)
    leave_opinion(tmp_path, MODEL, 8, "math500", {"math_500": 0.875}, n=1)
    found = lighteval_opinions(tmp_path, "aime24", 2)
    assert {model: (each.update, each.score) for model, each in found.items()} == {
        "base": (0, 0.25),
        MODEL: (8, 0.5),
    }
    assert {model: each.score for model, each in lighteval_opinions(tmp_path, "math_500", 1).items()} == {MODEL: 0.875}
    assert lighteval_opinions(tmp_path, "aime24", 32) == {}


def test_the_newest_opinion_of_a_model(tmp_path: Path) -> None:
    old = leave_opinion(tmp_path, MODEL, 8, "aime24", {"aime24": 0.25}, n=2)
    leave_opinion(tmp_path, MODEL, 8, "aime24-0badcafe", {"aime24": 0.5}, n=2)
    os.utime(old / "lighteval.json", (1, 1))
    assert lighteval_opinions(tmp_path, "aime24", 2)[MODEL].score == 0.5
    (old.parent / "aime24-0badcafe" / "scores.json").unlink()
    with pytest.raises(UnreadableRun, match=r"scores\.json is missing"):
        lighteval_opinions(tmp_path, "aime24", 2)


TABLE = """
paper: gg
label: table 0
title: a table
experiment: gg/table1
measures: [average]
rows: [objective]
columns: [average]
cells: [{objective: [grpo, ggpo], seed: 1}]
evaluate: {paper: "evaluation.benchmarks=[math500] evaluation.n=4"}
published: [{at: {objective: ggpo}, measure: average, value: 46.5, source: GG 1}]
orderings: [{left: {objective: ggpo}, relation: ">", right: {objective: grpo}, measure: average, source: GG 1}]
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Definition:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text(TABLE)
    return read_definition(tmp_path / "t.yaml")


def evaluated(table: Definition, **engines: str) -> Collated:
    """GGPO solves all of twenty problems, GRPO none; each by an engine."""
    for objective, engine in engines.items():
        (run,) = leave_cells(table, {"objective": objective}, {3: [1]}, scale="paper")
        leave_scores(run, "update_000003", "math500", [4 * (objective == "ggpo")] * 20, engine=engine)
    return collate(table, "paper", Shelf())


def test_evaluations_with_one_setting_are_compared(table: Definition) -> None:
    collated = evaluated(table, grpo="hf", ggpo="hf")
    assert [each.said for each in judge(collated)] == ["holds (one seed)"]
    assert run_notes(collated) == []


def test_evaluations_with_other_settings_are_not(table: Definition) -> None:
    collated = evaluated(table, grpo="hf", ggpo="vllm")
    (judged,) = judge(collated)
    assert (judged.verdict, judged.comparisons[0].left) == ("not compared", None)
    page = make_page(collated, [judged])
    folders = {group.labels["objective"]: group.placed[0].folder for group in collated.groups}
    assert (
        f"- average: math500 was evaluated with another engine of {folders['ggpo']}, update_000003, than of "
        f"{folders['grpo']}, update_000003: orderings are not compared; evaluate all alike"
    ) in page
    assert groups_of(collated, {"objective": "ggpo"})[0].entries[Slot("average")].mean == 100.0


def test_each_benchmark_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GGPO is above GRPO over all problems and on the first benchmark, and below it on the second."""
    monkeypatch.chdir(tmp_path)
    text = TABLE.replace("[math500]", "[math500,aime24]")
    text = text.replace("measure: average, source", "measure: average, each_benchmark: true, source")
    (tmp_path / "t.yaml").write_text(text)
    table = read_definition(tmp_path / "t.yaml")
    for objective, math500, aime24 in (("grpo", 1, 3), ("ggpo", 3, 2)):
        (folder,) = leave_cells(table, {"objective": objective}, {8: [1]}, scale="paper")
        leave_scores(folder, MODEL, "math500", [math500] * 20)
        leave_scores(folder, MODEL, "aime24", [aime24] * 12)
    (found,) = judge(collate(table, "paper", Shelf()))
    assert [(each.benchmark, each.left, each.right, each.verdict) for each in found.comparisons] == [
        ("math500", 75.0, 25.0, "holds"),
        ("aime24", 50.0, 75.0, "reversed"),
    ]
    assert found.verdict == "fails in part"
    (tiny,) = judge(collate(table, "tiny", Shelf()))
    assert (tiny.verdict, tiny.comparisons[0].why) == ("not compared", "scale tiny has no benchmarks")
