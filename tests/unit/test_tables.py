"""Definitions of tables and figures: cells, published numbers, and errors that name the file and the key."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from grpo_lab.config import ConfigError
from grpo_lab.tables.__main__ import read_request
from grpo_lab.tables.cells import Run, runs_of
from grpo_lab.tables.definition import load_definition, matches, read_definition, targets

# Runs at paper and at tiny, counted by hand from the papers.
RUNS = {
    "rg-fig2": (4, 4),
    "rg-table2": (2, 2),
    "rg-table3": (2, 2),
    "rg-fig3": (2, 2),
    "rg-throughput": (5, 5),
    # Three methods and three seeds, and three methods of the larger model.
    "gg-table1": (12, 12),
    "gg-fig1": (9, 9),
    "gg-fig2": (9, 9),
    "gg-fig5": (3, 3),
    "gg-fig6": (0, 0),
    "gg-table3": (3, 3),
    # Nine conditions, three of them twice more.
    "gg-table2": (15, 15),
    # Eleven conditions, three of them twice more.
    "gg-table6": (17, 17),
    "gg-table7": (11, 11),
    "gg-fig8": (5, 5),
    "gg-fig9": (2, 2),
    # Three methods by five delays; TIS at three seeds; three methods at both ends and two more seeds. Tiny has T_ref
    # 128 beside: two methods at two delays, and two more seeds at the larger.
    "gg-table4": (15 + 3 + 12, 15 + 3 + 12 + 4 + 4),
    "gg-fig3": (30, 38),
    "gg-fig7": (15, 19),
    "gg-table5": (12, 12),
    "gg-fig4": (12, 12),
    "gg-beta": (8, 8),
    "gg-reward-only": (4, 4),
    "gg-table8": (3, 3),
    "gg-fig10": (2, 2),
}


@cache
def composed(target: str, scale: str) -> list[Run]:
    """The runs of a target as they are: composing them takes a while, and several tests look at the same."""
    return runs_of(load_definition(target), scale, [])


def test_every_target_has_its_cells() -> None:
    found = {}
    for target in targets():
        definition = load_definition(target)
        if definition.paper != "own":
            found[target] = tuple(len(definition.cells(scale)) for scale in ("paper", "tiny"))
    assert found == RUNS


@pytest.mark.parametrize("target", RUNS)
def test_every_cell_composes_at_both_scales_and_is_a_run_of_its_own(target: str) -> None:
    definition = load_definition(target)
    for scale in ("paper", "tiny"):
        runs = composed(target, scale)
        assert len({run.folder for run in runs}) == len(runs) == len(definition.cells(scale))
        for run in runs:
            assert run.folder.parent == Path("outputs/papers") / scale
            assert run.config.run_dir == str(run.folder)


def test_rules_of_the_tiny_scale_share_the_papers_cells() -> None:
    """Four betas of two objectives, two forms of the refresh, and fifteen rates, these on a seed of their own."""
    assert load_definition("tiny-rules").cells("paper") == []
    runs = composed("tiny-rules", "tiny")
    assert len(runs) == 8 + 8 + 15
    assert len({run.folder for run in runs}) == len(runs)
    aligned = folders("gg-table4", schedule__t_ref=128, seed=42)
    assert len(aligned) == 4
    assert aligned < {run.folder for run in runs}


def folders(target: str, **labels: object) -> set[Path]:
    runs = composed(target, "tiny")
    wanted = {key.replace("__", "."): value for key, value in labels.items()}
    return {run.folder for run in runs if matches(run.cell.labels, wanted)}


def test_equal_cells_of_several_tables_are_one_run() -> None:
    (default,) = folders("gg-table1", objective="ggpo", seed=42, model="qwen3_1_7b_base")
    assert folders("gg-table4", objective="ggpo", seed=42, schedule__v=8) == {default}
    assert folders("gg-table2", objective="ggpo", seed=42, schedule__t_ref=160) == {default}
    assert folders("gg-table6", objective="ggpo", seed=42, schedule__t_ref=160, objective__beta=0.01) == {default}
    assert folders("gg-beta", objective="ggpo", seed=42, objective__beta=0.01) == {default}
    assert folders("gg-table8", group_size=8) == {default}
    assert folders("gg-fig10", objective="ggpo") == {default}
    assert folders("gg-reward-only", objective="ggpo", seed=42) == {default}
    (fixed,) = folders("gg-table2", objective="grpo", seed=42, schedule__t_ref=None)
    assert folders("gg-table4", objective="grpo", seed=42, schedule__v=8) == {fixed}


def test_settings_of_a_cell_and_its_scale() -> None:
    for scale, beta in (("paper", 0.1), ("tiny", 3.2)):
        (run,) = [r for r in composed("gg-fig9", scale) if r.cell.labels["schedule.t_ref"] is None]
        assert run.cell.labels["objective.beta"] == 0.1
        assert vars(run.config.objective)["beta"] == beta
        assert run.config.schedule.t_ref is None
    (reuse,) = [r for r in composed("rg-fig2", "paper") if r.cell.labels["schedule.i"] == 10]
    assert (reuse.config.schedule.updates, reuse.config.schedule.t_ref) == (2660, None)
    large = [r for r in composed("gg-table1", "tiny") if r.config.model.name == "tiny_large"]
    assert {r.cell.labels["model"] for r in large} == {"qwen3_4b_base"}


def test_offline_runs_that_sample_alike_share_a_pool() -> None:
    """One for each seed, whatever the objective that learns from it; other problems are another pool."""
    definition = load_definition("gg-table5")
    runs = composed("gg-table5", "tiny")
    pools: dict[int, set[Path]] = {}
    for run in runs:
        assert run.pool is not None
        assert run.config.pool.path == str(run.pool.folder)
        pools.setdefault(run.config.seed, set()).add(run.pool.folder)
    assert {seed: len(folders) for seed, folders in pools.items()} == {42: 1, 1234: 1, 2027: 1}
    assert len(set.union(*pools.values())) == 3
    rate, problems, precision = (
        runs_of(definition, "tiny", [word])
        for word in ("learner.lr=1e-3", "dataset.data_seed=5", "learner.precision=bf16")
    )
    assert [run.pool for run in rate] != [run.pool for run in runs]
    assert [run.config.pool.path for run in rate] == [run.config.pool.path for run in runs]
    for others in (problems, precision):
        assert not {run.config.pool.path for run in others} & {run.config.pool.path for run in runs}
    (own, *_) = runs_of(definition, "tiny", ["pool.path=mine"])
    assert (own.config.pool.path, own.pool) == ("mine", None)
    assert all(run.pool is None for run in composed("gg-fig10", "tiny"))


@pytest.mark.parametrize("target", targets())
def test_published_numbers_have_a_source_and_targets_a_paper(target: str) -> None:
    definition = load_definition(target)
    said = [each.source for each in (*definition.published, *definition.orderings)]
    assert all(source.startswith(definition.paper.upper()) for source in said)
    if definition.paper != "own" and definition.experiment is not None:
        assert definition.experiment == target.replace("-", "/", 1).replace("-", "_")


def test_published_numbers_by_hand() -> None:
    """Some of each paper, as its text has them."""
    numbers = {
        (target, each.measure, each.value, tuple(each.at.items()))
        for target in targets()
        for each in load_definition(target).published
    }
    for known in [
        ("gg-table4", "average", 39.02, (("objective", "grpo"), ("schedule.v", 128))),
        ("gg-table4", "average", 40.69, (("objective", "grpo_tis"), ("schedule.v", 128))),
        ("gg-table2", "average", 32.96, (("objective", "ggpo"), ("schedule.t_ref", None))),
        ("gg-table3", "pass@32", 62.68, (("objective", "base"),)),
        ("gg-fig9", "within-success ESS", 0.69, (("schedule.t_ref", 160),)),
        ("rg-table2", "aime24", 0.3049, (("schedule.v", 10),)),
        ("rg-table3", "math500", 0.8519, (("schedule.v", 1),)),
        ("rg-throughput", "iterations/s", 0.03828, (("schedule.v", 10),)),
    ]:
        assert known in numbers


def test_a_users_words_and_the_cells() -> None:
    definition = load_definition("gg-fig10")
    plain, shorter = composed("gg-fig10", "tiny"), runs_of(definition, "tiny", ["schedule.updates=8"])
    assert {run.config.schedule.updates for run in shorter} == {8}
    assert not {run.folder for run in plain} & {run.folder for run in shorter}
    with pytest.raises(ConfigError, match="objective= is set by the cells of gg-fig10: leave it out"):
        runs_of(definition, "tiny", ["objective=grpo"])


def test_words_for_the_runs_and_words_for_their_sweep() -> None:
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    request = read_request(["gg-fig10", "scale=paper", "seed=1", *launcher, "dry=true"])
    assert (request.target, request.scale, request.dry) == ("gg-fig10", "paper", True)
    assert request.extra == ("seed=1",)
    assert request.launch == tuple(launcher)
    # A preset of hardware is a setting of the runs, and may bring the launcher of their sweep.
    request = read_request(["gg-fig10", "hardware=slurm", "hardware.threads=4"])
    assert request.extra == ("hardware=slurm", "hardware.threads=4")
    assert request.launch == ("hardware=slurm",)
    assert (request.scale, request.dry) == ("tiny", False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "which table"),
        (["seed=1"], "which table"),
        (["gg-fig10", "paper"], "'paper' is no key=value"),
        (["gg-fig10", "scale=big"], "scale is paper or tiny"),
    ],
)
def test_a_command_line_that_says_too_little(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_request(words)


GOOD = """
paper: gg
label: table 0
title: a table
experiment: gg/table1
measures: [average]
cells:
  - {objective: [grpo, ggpo], seed: 42}
"""
PAIR = "left: {objective: ggpo}, right: {objective: grpo}, measure: average, source: GG 1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense: 1", "t.yaml: nonsense is not known"),
        ("hours: long", "t.yaml: hours must be float or int, not 'long'"),
        ("at_updates: [soon]", "t.yaml: at_updates holds 'soon': it takes whole numbers"),
        ("columns: [colour]", "t.yaml: columns holds 'colour': choose from "),
        ("window: {tiny: many}", "t.yaml: window.tiny must be int, not 'many'"),
        ("window: {small: 3}", "t.yaml: window.small is not known"),
        ("published: [{at: {objective: ggpo}, measure: average, value: 1}]", "t.yaml: published[0].source is missing"),
        (
            "published: [{at: {objective: agro}, measure: average, value: 1, source: GG 1}]",
            "t.yaml: published[0].at names no cell: {'objective': 'agro'}",
        ),
        (
            "published: [{at: {objective: ggpo}, measure: k3, value: 1, source: GG 1}]",
            "t.yaml: published[0].at is of 'k3', which measures does not name",
        ),
        (
            "orderings: [{left: {objective: ggpo}, relation: beats, measure: average, source: GG 1}]",
            "t.yaml: orderings[0].relation is 'beats': choose >, <",
        ),
        (
            "orderings: [{left: {objective: ggpo}, relation: '>', measure: average, source: GG 1}]",
            "t.yaml: orderings[0].right does not go with relation '>'",
        ),
        (
            f"orderings: [{{{PAIR}, less: {{objective: agro}}, relation: '>'}}]",
            "t.yaml: orderings[0].less, left names no cell: {'objective': 'agro'}",
        ),
        (
            f"orderings: [{{{PAIR}, less: {{objective: grpo}}, relation: '~'}}]",
            "t.yaml: orderings[0].less goes with relations > and <, not '~'",
        ),
        (
            f"orderings: [{{{PAIR}, than: pass@32, when: early, relation: '>'}}]",
            "t.yaml: orderings[0].than goes with a right side, at the end of runs",
        ),
        (
            f"orderings: [{{{PAIR}, than: pass@32, relation: '>'}}]",
            "t.yaml: orderings[0].right is of 'pass@32', which measures does not name",
        ),
        (
            f"orderings: [{{{PAIR}, less: {{objective: grpo}}, than: pass@32, relation: '>'}}]",
            "t.yaml: orderings[0].right is of 'pass@32', which measures does not name",
        ),
        ("paper: xx", "t.yaml: paper is 'xx': choose rg, gg, own"),
        ("cells: [{colour: 3}]", "t.yaml: cells[0].colour is no key of a cell"),
        ("cells: [{seed: {paper: 3}}]", "t.yaml: cells[0].seed must give a value for each of paper, tiny"),
        ("cells: gg-table9", "t.yaml: cells is 'gg-table9', which is no other target"),
        ("cells: [", "t.yaml: while parsing"),
    ],
)
def test_a_mistake_is_one_line_with_file_and_key(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(GOOD)
    assert len(read_definition(path).cells("paper")) == 2
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_definition(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_target_lists_those_that_are() -> None:
    with pytest.raises(ConfigError, match="there is no table or figure 'gg-table9': choose gg-beta, "):
        load_definition("gg-table9")
