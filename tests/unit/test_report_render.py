"""Grids as Markdown, CSV and LaTeX; a whole page; the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_config import run_config
from stored_runs import leave_cells, leave_run

from grpo_lab.config import ConfigError
from grpo_lab.report.__main__ import main, read_request, report_on_targets
from grpo_lab.report.index import index_page
from grpo_lab.report.naming import number_text
from grpo_lab.report.render import Grid, csv_text, escaped, latex, markdown
from grpo_lab.report.several import run_folders, runs_grid
from grpo_lab.report.stored import read_run
from grpo_lab.tables.definition import load_definition

GRID = Grid(("method", "T_ref", "ours"), (("GRPO+TIS", "fixed", "46.50 ± 1.25"), ("a|b", "", "5 % & more")))


def test_markdown() -> None:
    assert markdown(GRID) == (
        "| method   | T_ref | ours         |\n"
        "|----------|-------|--------------|\n"
        "| GRPO+TIS | fixed | 46.50 ± 1.25 |\n"
        "| a\\|b     |       | 5 % & more   |\n"
    )


def test_csv() -> None:
    grid = Grid(("a", "b"), (("x, y", 'say "z"'), ("", "1")))
    assert csv_text(grid) == 'a,b\n"x, y","say ""z"""\n,1\n'


def test_latex() -> None:
    assert latex(GRID, "A & B, 5 %", "t-1") == "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            r"\caption{A \& B, 5 \%}",
            r"\label{tab:t-1}",
            r"\begin{tabular}{lll}",
            r"\toprule",
            r"method & T\_ref & ours \\",
            r"\midrule",
            r"GRPO+TIS & fixed & 46.50 $\pm$ 1.25 \\",
            r"a|b &  & 5 \% \& more \\",
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )
    assert escaped(r"~ ^ \ {x} #1 $2 < 3") == (
        r"\textasciitilde{} \textasciicircum{} \textbackslash{} \{x\} \#1 \$2 $<$ 3"
    )


@pytest.mark.parametrize(
    ("measure", "value", "said"),
    [
        ("average", 46.578, "46.58"),
        ("aime24", 0.30214, "0.3021"),
        ("pass@1 of 50", 45.04, "45.0"),
        ("k3", 0.00123456, "0.00123"),
        ("responses", 262144.0, "262,144"),
        ("iterations/s", 0.038284, "0.03828"),
        ("ess", float("nan"), "not finite"),
    ],
)
def test_numbers_as_the_papers_print_them(measure: str, value: float, said: str) -> None:
    assert number_text(measure, value) == said


def test_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    table = load_definition("gg-fig10")
    columns = {"reward/retained": [0.25] * 4 + [0.5] * 16}
    (clipped,) = leave_cells(table, {"objective": "ggpo_clip"}, {0: [1], 20: [2]}, columns=columns, dirty=True)
    leave_cells(table, {"objective": "ggpo"}, {0: [1], 20: [2]}, columns={"reward/retained": [0.125] * 20})
    monkeypatch.setattr("sys.argv", ["report", "gg-fig10", "hydra.launcher.n_jobs=2", "dry=false"])
    main()
    page = capsys.readouterr().out
    assert page == (tmp_path / "outputs/reports/tiny/gg-fig10.md").read_text()
    assert page.startswith(
        "# GG figure 10: token clipping at 0.05, training reward, seed 42\n\n`scale=tiny`: 2 of 2 runs finished.\n"
    )
    assert (
        "| method               | measure | published       | ours  | difference | seeds | scale |\n"
        "|----------------------|---------|-----------------|-------|------------|-------|-------|\n"
        "| GGPO                 | reward  | not in the text | 0.125 |            | 1: 42 | tiny  |\n"
        "| GGPO, token clipping | reward  | not in the text | 0.5   |            | 1: 42 | tiny  |\n"
    ) in page
    # Early: four updates of the first five at 0.25, one at 0.5.
    assert "| reward: GGPO, token clipping > GGPO | early | not tested | 0.3 against 0.125: +0.175 (1 seed) |" in page
    assert "No difference to the published numbers is given at this scale" in page
    assert f"0123456789ab, changed | here | {clipped} |" in page
    assert "make gg-fig10 SCALE=tiny" in page
    csv = (tmp_path / "outputs/reports/tiny/gg-fig10.csv").read_text().splitlines()
    assert csv[0] == (
        "method,measure,statistic,when,published,published as,source,ours,deviation,difference,by seed,"
        "failed,checkpoints,scale"
    )
    assert csv[1] == "GGPO,reward,,end,not in the text,,,0.125,,,42:0.125,,,tiny"
    assert (
        r"GGPO & reward & not in the text & 0.125 &  & 1: 42 & tiny \\"
        in (tmp_path / "outputs/reports/tiny/gg-fig10.tex").read_text()
    )


def test_an_index_counts_shared_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # GGPO's default run is of both targets, the clipped one of figure 10 alone.
    leave_cells(load_definition("gg-fig10"), {}, {0: [1], 20: [2]}, columns={"reward/retained": [0.5] * 20})
    written = report_on_targets(read_request(["gg-fig10", "gg-table8", "out=there"]))
    assert [len(each.used) for each in written] == [2, 1]
    page = index_page("tiny", written)
    # Half an hour each.
    assert "2 finished runs in all, 1.0 hours one after the other" in page
    assert "at 0123456789ab." in page
    assert "| [gg-table8](gg-table8.md) | " in page


def test_an_index_counts_an_ordering_of_two_targets_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At tiny RG's tables 2 and 3 ask the same of the same runs; table 3 of GG has orderings of its own."""
    monkeypatch.chdir(tmp_path)
    written = report_on_targets(read_request(["rg-table2", "rg-table3", "gg-table3", "out=there"]))
    assert [len(each.claims) for each in written] == [2, 2, 15]
    page = index_page("tiny", written)
    assert (
        "Orderings in all, 2 that a target states once more, with the same cells and measure, not counted: 17 not run."
    ) in page
    paper = report_on_targets(read_request(["rg-table2", "rg-table3", "scale=paper", "out=there"]))
    assert "Orderings in all: 4 not run." in index_page("paper", paper)


def test_nothing_is_run_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    none, closed = report_on_targets(read_request(["gg-table3", "gg-fig6", "out=there"]))
    assert (none.state, none.orderings) == ("0 of 3 runs finished, 3 missing", "15 not run")
    assert "| GGPO       | pass@32 (%) | 73.90           | not run |" in none.page
    assert (closed.state, closed.orderings) == ("no runs", "no orderings")
    # Figure 6 is of no runs.
    assert {path.name for path in (tmp_path / "there" / "tiny").iterdir()} == {
        *(f"{target}.{kind}" for target in ("gg-fig6", "gg-table3") for kind in ("csv", "md", "tex")),
        *("gg-fig6-coefficients.csv", "gg-fig6.png", "gg-fig6.svg"),
    }


def test_words_of_the_command() -> None:
    request = read_request(["gg-table4", "scale=paper", "out=x", "schedule.updates=8", "hydra/launcher=joblib"])
    assert (request.targets, request.scale, request.out) == (("gg-table4",), "paper", Path("x"))
    assert request.words == ("schedule.updates=8",)
    assert len(read_request(["all"]).targets) > 20
    for words, said in [
        ([], "a report of what"),
        (["scale=tiny"], "a report of what"),
        (["gg-table4", "scale=big"], "scale=big: choose paper or tiny"),
        (["gg-table4", "some/folder"], "some/folder is no table or figure"),
        (["some/folder", "seed=1"], "seed=1 is of the runs that targets ask for"),
    ]:
        with pytest.raises(ConfigError, match=said):
            read_request(words)


def test_any_runs_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What differs are the rate and the seed: seeds are one row. One run is unfinished."""
    sweep = tmp_path / "sweep"
    for name, seed, lr, right in [("a", 1, 1e-4, 2), ("b", 2, 1e-4, 4), ("c", 1, 5e-5, 1)]:
        config = run_config("objective=ggpo", f"seed={seed}", f"learner.lr={lr}", f"tracking.project={name}")
        leave_run(sweep / name, config, {"entropy": [0.5, 0.25]}, {2: [right]}, hours=1.0)
    leave_run(sweep / "d", run_config("seed=3"), {"entropy": [1.0]}, {}, status="running")
    again = run_config("objective=ggpo", "seed=1", "learner.lr=1e-4", "hardware.threads=1")
    leave_run(sweep / "e", again, {"entropy": [0.5, 0.25]}, {2: [3]}, hours=1.0)
    (sweep / "multirun.yaml").write_text("hydra: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["report", "sweep"])
    main()
    page = capsys.readouterr().out
    assert page == (tmp_path / "outputs/reports/sweep.md").read_text()
    assert "3 of 5 runs are used." in page
    # A seed that was run twice is no second seed, and a folder named twice no second run.
    assert "- sweep/e: the settings and the seed of sweep/a; not used" in page
    monkeypatch.setattr("sys.argv", ["report", "sweep/b", "sweep/b", "sweep/../sweep/b"])
    main()
    assert "1 of 1 runs are used." in capsys.readouterr().out
    assert "- sweep/d: half done, at update 1; not used" in page
    grid = runs_grid([read_run(sweep / name) for name in "abc"])
    assert grid.header[:3] == ("learner.lr", "updates", "held-out score (%)")
    rows = [dict(zip(grid.header, row, strict=True)) for row in grid.rows]
    assert [(row["learner.lr"], row["held-out score (%)"], row["seeds"], row["hours"]) for row in rows] == [
        ("0.0001", "75.00 ± 35.36", "2: 1, 2", "2.00"),
        ("5e-05", "25.00", "1: 1", "1.00"),
    ]
    assert {row["K3"] for row in rows} == {"not logged"}
    assert rows[0]["entropy"] == "0.25 ± 0"


def test_a_measure_that_one_seed_lacks(tmp_path: Path) -> None:
    for seed, columns in ((1, {"entropy": [0.5]}), (2, {"entropy": [0.25]}), (3, {"loss": [1.0]})):
        leave_run(tmp_path / str(seed), run_config(f"seed={seed}"), columns, {1: [2]})
    grid = runs_grid([read_run(tmp_path / str(seed)) for seed in (1, 2, 3)])
    (row,) = [dict(zip(grid.header, each, strict=True)) for each in grid.rows]
    assert (row["entropy"], row["drift"]) == ("0.375 ± 0.177 (2 of 3 seeds)", "not logged")


def test_pools_of_seeds_do_not_keep_runs_apart_and_two_of_one_seed_do(tmp_path: Path) -> None:
    runs = []
    for seed, pool in ((1, "a"), (2, "b"), (1, "c")):
        config = run_config(f"seed={seed}", "source=pool", f"pool.path={pool}")
        runs.append(read_run(leave_run(tmp_path / pool, config, {"entropy": [0.5]}, {1: [2]})))
    seeds = runs_grid(runs[:2])
    assert ("pool.path" in seeds.header, len(seeds.rows)) == (False, 1)
    pools = runs_grid(runs)
    assert pools.header[0] == "pool.path"
    assert [row[0] for row in pools.rows] == ["a", "b", "c"]


def test_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gg-table9 is no folder, and no table or figure of this name is known"):
        run_folders(tmp_path / "gg-table9")
    with pytest.raises(ConfigError, match="is no run folder and holds none"):
        run_folders(tmp_path)
