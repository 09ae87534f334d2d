"""Verdicts on orderings, those that must not hold among them; runs are made in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_lab.ledger import Standing
from grpo_lab.report.collate import Collated, Group
from grpo_lab.report.inference import Interval
from grpo_lab.report.orderings import Judged, judge
from grpo_lab.report.placing import PlacedRun
from grpo_lab.report.readings import Reader
from grpo_lab.report.rules import Verdict, together, verdict_of
from grpo_lab.report.stored import COLUMNS, Counts, Provenance, Series, StoredRun
from grpo_lab.report.verdicts import tally, verdict_grid
from grpo_lab.tables.definition import Definition, read_definition
from grpo_lab.tables.when import PHRASES, When

UPDATES = 40
PROBLEMS = 40


def a_run(correct: Mapping[int, Sequence[int]], k3: Sequence[float] = (1.0,) * UPDATES, n: int = 10) -> StoredRun:
    """A finished run of UPDATES updates: right responses of n by problem, by update, and K3 by update."""
    columns = {name: Series.of([]) for name in COLUMNS}
    columns["mismatch/k3"] = Series.of([(u + 1, value) for u, value in enumerate(k3)])
    ids = tuple(f"p{k}" for k in range(PROBLEMS))
    return StoredRun(
        folder=Path("run"),
        standing=Standing("finished", UPDATES),
        updates=UPDATES,
        columns=columns,
        evaluations={u: Counts(ids, np.array(each), n) for u, each in correct.items()},
        hours=1.0,
        provenance=Provenance(),
    )


def level(right: int, spread: int = 0) -> list[int]:
    """The same count for every problem, or `spread` more and less by turns."""
    return [right + spread * (-1) ** k for k in range(PROBLEMS)]


def group(runs: Mapping[int, StoredRun | None], of_paper: bool = True, **labels: Any) -> Group:
    placed = [
        PlacedRun(seed, Path("run"), Standing("finished" if run else "half done", UPDATES), run)
        for seed, run in runs.items()
    ]
    return Group({key.replace("__", "."): each for key, each in labels.items()}, {}, of_paper, tuple(placed), {})


def define(tmp_path: Path, ordering: str, cells: str = "{objective: [grpo, agro, ggpo], seed: 1}") -> Definition:
    path = tmp_path / "t.yaml"
    path.write_text(
        f"paper: gg\nlabel: t\ntitle: t\nmeasures: [mean, best, k3]\nrows: [objective]\ncells: [{cells}]\n"
        f"also: [base]\norderings:\n  - {{{ordering}, source: GG 1}}\n"
    )
    return read_definition(path)


def collated(definition: Definition, *groups: Group) -> Collated:
    return Collated(definition, "tiny", (), Reader(), ("objective",), (), groups, True, "t", {})


def judged(definition: Definition, *groups: Group) -> list[Judged]:
    return judge(collated(definition, *groups))


def verdict(definition: Definition, *groups: Group) -> Verdict:
    (found,) = judged(definition, *groups)
    return found.verdict


GREATER = "left: {objective: ggpo}, relation: '>', right: {objective: grpo}, measure: mean"


@pytest.mark.parametrize(
    ("relation", "low", "high", "said"),
    [
        (">", 0.1, 2.0, "holds"),
        (">", -0.1, 2.0, "not distinguishable"),
        (">", -2.0, -0.1, "reversed"),
        ("<", -2.0, -0.1, "holds"),
        ("<", 0.1, 2.0, "reversed"),
        ("rises", 0.1, 2.0, "holds"),
        ("falls", 0.1, 2.0, "reversed"),
        ("~", -0.9, 0.9, "holds"),
        # Within the margin, though not 0.
        ("~", 0.1, 0.9, "holds"),
        ("~", 0.1, 1.1, "differs"),
        ("flat", -1.1, 0.5, "not distinguishable"),
    ],
)
def test_what_an_interval_says(relation: str, low: float, high: float, said: str) -> None:
    assert verdict_of(relation, Interval(low, high, ""), margin=1.0) == said


def test_what_several_parts_say_together() -> None:
    assert together(["holds", "not tested", "not distinguishable"]) == "not distinguishable"
    assert together(["holds", "not compared", "not run"]) == "not run"
    assert together([]) == "not run"
    # A failure of every part, and of some.
    assert together(["reversed", "reversed"]) == "reversed"
    assert together(["differs"]) == "differs"
    for other in ("holds", "not distinguishable", "not run", "fails in part"):
        assert together(["reversed", other]) == "fails in part"


def test_one_seed_is_tested_over_problems(tmp_path: Path) -> None:
    definition = define(tmp_path, GREATER)
    better, worse = a_run({UPDATES: level(6, 1)}), a_run({UPDATES: level(5)})
    (found,) = judged(definition, group({1: better}, objective="ggpo"), group({1: worse}, objective="grpo"))
    (pair,) = found.comparisons
    assert (found.verdict, pair.left, pair.right, pair.seeds) == ("holds", 60.0, 50.0, (1,))
    assert pair.difference == pytest.approx(10.0)
    (interval,) = pair.intervals
    assert "40 problems" in interval.method
    # Differences of 20 and 0 by turns: standard error 10 / sqrt(40).
    assert (interval.low, interval.high) == pytest.approx((10 - 1.96 * 1.58, 10 + 1.96 * 1.58), abs=0.3)


def test_an_ordering_that_must_not_hold(tmp_path: Path) -> None:
    definition = define(tmp_path, GREATER)
    better, worse = a_run({UPDATES: level(6, 1)}), a_run({UPDATES: level(5)})
    assert verdict(definition, group({1: worse}, objective="ggpo"), group({1: better}, objective="grpo")) == "reversed"
    noise = a_run({UPDATES: level(5, 4)})
    same = verdict(definition, group({1: noise}, objective="ggpo"), group({1: worse}, objective="grpo"))
    assert same == "not distinguishable"


def test_seeds_that_disagree_keep_an_ordering_from_holding(tmp_path: Path) -> None:
    """Over problems the mean of three seeds is surely above; over seeds, +30, +5 and -5 are not."""
    definition = define(tmp_path, GREATER)
    right = {seed: a_run({UPDATES: level(5)}) for seed in (1, 2, 3)}
    steady = {seed: a_run({UPDATES: level(6 + (seed == 2), 1)}) for seed in (1, 2, 3)}
    wild = {seed: a_run({UPDATES: [count] * PROBLEMS}) for seed, count in ((1, 8), (2, 6), (3, 5))}
    baseline = group(right, objective="grpo")
    (found,) = judged(definition, group(steady, objective="ggpo"), baseline)
    (pair,) = found.comparisons
    assert pair.seeds == (1, 2, 3)
    # 10, 20, 10: mean 13.3, deviation 5.77, half 4.303 x 5.77 / sqrt(3) = 14.3.
    assert (pair.intervals[0].low, pair.intervals[0].high) == pytest.approx((-1.01, 27.68), abs=0.01)
    assert found.verdict == "not distinguishable"
    (found,) = judged(definition, group(wild, objective="ggpo"), baseline)
    assert found.comparisons[0].intervals[1].low > 0
    assert found.verdict == "not distinguishable"
    sure = {seed: a_run({UPDATES: level(7, 1)}) for seed in (1, 2, 3)}
    assert verdict(definition, group(sure, objective="ggpo"), baseline) == "holds"


def test_problems_that_disagree_keep_an_ordering_from_holding(tmp_path: Path) -> None:
    """Two points in each of three seeds, which problems between 40 points up and 40 down do not bear out."""
    definition = define(tmp_path, GREATER)
    uneven = [9, 9, *level(5, 4)[2:]]
    left = group({seed: a_run({UPDATES: uneven}) for seed in (1, 2, 3)}, objective="ggpo")
    right = group({seed: a_run({UPDATES: level(5)}) for seed in (1, 2, 3)}, objective="grpo")
    (found,) = judged(definition, left, right)
    over_seeds, over_problems = found.comparisons[0].intervals
    assert over_seeds.low > 1.9
    assert over_problems.low < 0 < over_problems.high
    assert found.verdict == "not distinguishable"


def test_only_seeds_that_both_have_finished(tmp_path: Path) -> None:
    definition = define(tmp_path, GREATER)
    run = a_run({UPDATES: level(6, 1)})
    left = group({1: run, 2: None}, objective="ggpo")
    (found,) = judged(definition, left, group({2: run}, objective="grpo"))
    assert (found.verdict, found.comparisons[0].why) == ("not run", "no seed is finished on both sides")
    (found,) = judged(definition, left, group({1: None}, objective="grpo"))
    assert found.verdict == "not run"
    other = group({1: a_run({UPDATES: level(5)}), 2: run}, objective="grpo")
    (found,) = judged(definition, left, other)
    assert (found.verdict, found.comparisons[0].seeds) == ("holds", (1,))


def test_training_with_one_seed_is_not_tested(tmp_path: Path) -> None:
    ordering = "left: {objective: ggpo}, relation: '>', right: {objective: grpo}, measure: k3"
    definition = define(tmp_path, ordering)
    high, low = a_run({}, [2.0] * UPDATES), a_run({}, [1.0] * UPDATES)
    (found,) = judged(definition, group({1: high}, objective="ggpo"), group({1: low}, objective="grpo"))
    assert (found.verdict, found.comparisons[0].difference) == ("not tested", 1.0)
    assert found.comparisons[0].intervals == ()
    highs, lows = {1: high, 2: a_run({}, [2.1] * UPDATES)}, {1: low, 2: low}
    assert verdict(definition, group(highs, objective="ggpo"), group(lows, objective="grpo")) == "holds"
    odd = {1: high, 2: a_run({}, [np.inf] * UPDATES)}
    assert verdict(definition, group(odd, objective="ggpo"), group(lows, objective="grpo")) == "not tested"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(-5.0, -2.0, "holds"), (-1.0, 0.9, "holds"), (-1.0, 1.1, "not distinguishable"), (0.1, 3.0, "reversed")],
)
def test_not_above_is_also_far_below(low: float, high: float, said: str) -> None:
    assert verdict_of("<=", Interval(low, high, "by hand"), 1.0) == said


def test_equality_needs_an_interval_within_the_margin(tmp_path: Path) -> None:
    definition = define(tmp_path, "left: {objective: ggpo}, relation: '~', right: {objective: grpo}, measure: mean")
    base = group({1: a_run({UPDATES: level(500)}, n=1000)}, objective="grpo")
    # Half a point more for each, and two points for each.
    for count, said in ((505, "holds"), (520, "differs")):
        left = group({1: a_run({UPDATES: [count] * PROBLEMS}, n=1000)}, objective="ggpo")
        assert verdict(definition, left, base) == said
    noise = group({1: a_run({UPDATES: level(500, 100)}, n=1000)}, objective="ggpo")
    (found,) = judged(definition, noise, base)
    assert (found.verdict, found.comparisons[0].margin) == ("not distinguishable", 1.0)


def test_a_list_means_each_of_them(tmp_path: Path) -> None:
    definition = define(tmp_path, GREATER.replace("objective: grpo", "objective: [grpo, agro]"))
    best, middle, last = (a_run({UPDATES: level(each, 1)}) for each in (8, 6, 4))
    groups = {"ggpo": middle, "grpo": last, "agro": best}
    (found,) = judged(definition, *(group({1: run}, objective=name) for name, run in groups.items()))
    assert [each.verdict for each in found.comparisons] == ["holds", "reversed"]
    assert (found.verdict, found.said) == ("fails in part", "fails in part (one seed)")
    groups["ggpo"] = a_run({UPDATES: level(2, 1)})
    assert verdict(definition, *(group({1: run}, objective=name) for name, run in groups.items())) == "reversed"


def test_early_and_late(tmp_path: Path) -> None:
    """GGPO is behind in the first quarter (updates 1 to 10) and ahead in the last (31 to 40)."""
    crossing = a_run({0: level(1, 1), 10: level(2, 1), 20: level(9, 1), 40: level(8, 1)})
    steady = a_run({0: level(1, 1), 10: level(5), 20: level(5), 40: level(5)})
    groups = group({1: crossing}, objective="ggpo"), group({1: steady}, objective="grpo")
    assert verdict(define(tmp_path, GREATER + ", when: late"), *groups) == "holds"
    assert verdict(define(tmp_path, GREATER + ", when: early"), *groups) == "reversed"
    assert verdict(define(tmp_path, GREATER + ", when: from update 20 on"), *groups) == "holds"
    assert verdict(define(tmp_path, GREATER + ", when: from update 10 on"), *groups) == "fails in part"
    assert verdict(define(tmp_path, GREATER + ", when: at update 10"), *groups) == "reversed"
    # No evaluation at all in its third quarter.
    assert verdict(define(tmp_path, GREATER + ", when: throughout"), *groups) == "not run"


def test_trends(tmp_path: Path) -> None:
    rises = define(tmp_path, "left: {objective: ggpo}, relation: rises, measure: mean, when: late")
    # The evaluation at update 30, where the last quarter begins, counts.
    rising = group({1: a_run({0: level(9), 30: level(4, 1), 40: level(6, 1)})}, objective="ggpo")
    (found,) = judged(rises, rising)
    assert (found.verdict, found.comparisons[0].difference) == ("holds", pytest.approx(20.0))
    falling = group({1: a_run({0: level(1), 30: level(6, 1), 40: level(4)})}, objective="ggpo")
    assert verdict(rises, falling) == "reversed"
    flat = define(tmp_path, "left: {objective: ggpo}, relation: flat, measure: mean, when: late")
    assert verdict(flat, falling) == "differs"
    assert verdict(flat, group({1: a_run({30: level(5), 40: level(5)})}, objective="ggpo")) == "holds"
    assert verdict(rises, group({1: a_run({40: level(5)})}, objective="ggpo")) == "not run"


def test_a_trend_of_training(tmp_path: Path) -> None:
    falls = define(tmp_path, "left: {objective: ggpo}, relation: falls, measure: k3, when: throughout")
    line = [2.0 - 0.01 * u for u in range(UPDATES)]
    (found,) = judged(falls, group({1: a_run({}, line)}, objective="ggpo"))
    # However straight the line of one seed is.
    assert (found.verdict, found.said, found.comparisons[0].intervals) == ("not tested", "not tested", ())
    assert found.comparisons[0].why == "one seed"
    assert found.comparisons[0].difference == pytest.approx(-0.39)
    pair = {1: a_run({}, line), 2: a_run({}, [0.01 + 0.99 * each for each in line])}
    (found,) = judged(falls, group(pair, objective="ggpo"))
    assert (found.verdict, found.said) == ("holds", "holds")
    # Changes of -0.39 and -0.3861; mean -0.38805, half 12.706 x 0.00276 / sqrt(2).
    (interval,) = found.comparisons[0].intervals
    assert (interval.low, interval.high) == pytest.approx((-0.4128, -0.3633), abs=1e-4)
    rising = {seed: a_run({}, list(reversed([each * (1 + seed / 100) for each in line]))) for seed in (1, 2)}
    assert verdict(falls, group(rising, objective="ggpo")) == "reversed"


def test_each_stretch_is_printed_with_its_interval(tmp_path: Path) -> None:
    crossing = a_run({0: level(1, 1), 10: level(2, 1), 20: level(9, 1), 40: level(8, 1)})
    steady = a_run({0: level(1, 1), 10: level(5), 20: level(5), 40: level(5)})
    groups = group({1: crossing}, objective="ggpo"), group({1: steady}, objective="grpo")
    table = collated(define(tmp_path, GREATER + ", when: from update 10 on"), *groups)
    (row,) = verdict_grid(table, judge(table)).rows
    assert row[2] == "fails in part (one seed)"
    first, second, third = row[5].split("resamples), ")
    # Right counts of 2, 9 and 8 of 10 against 5.
    assert first.startswith("update 10: -30.00 reversed ([-3")
    assert second.startswith("update 20: +40.00 holds ([+3")
    assert third.startswith("update 40: +30.00 holds ([+2")


def test_verdicts_that_rest_on_one_seed_are_counted_apart(tmp_path: Path) -> None:
    definition = define(tmp_path, GREATER)
    high, low = a_run({UPDATES: level(7, 1)}), a_run({UPDATES: level(5)})
    one = judged(definition, group({1: high}, objective="ggpo"), group({1: low}, objective="grpo"))
    pair = dict.fromkeys((1, 2), high), dict.fromkeys((1, 2), low)
    two = judged(definition, group(pair[0], objective="ggpo"), group(pair[1], objective="grpo"))
    said = [each.said for each in one + two]
    assert said == ["holds (one seed)", "holds"]
    assert tally(said) == "1 holds, 1 holds (one seed)"


def test_sides_that_were_evaluated_at_other_updates_are_not_compared(tmp_path: Path) -> None:
    left = group({1: a_run({20: level(5), 35: level(9), 40: level(5)})}, objective="ggpo")
    right = group({1: a_run({20: level(5), 40: level(5)})}, objective="grpo")
    (found,) = judged(define(tmp_path, GREATER + ", when: late"), left, right)
    assert found.said == "not compared"
    assert found.comparisons[0].why == (
        "seed 1 has 2 against 1 evaluations in updates 31 to 40, not of the same updates (35 on one side alone)"
    )
    # At the end both have one.
    assert judged(define(tmp_path, GREATER), left, right)[0].said == "not distinguishable (one seed)"


def test_nothing_from_an_update_on_is_not_run(tmp_path: Path) -> None:
    run = a_run({0: level(3), 20: level(9)})
    ours, base = group({1: run}, objective="ggpo"), group({1: run}, objective="base")
    when = ", when: from update 30 on"
    for left, right in (("ggpo", "base"), ("base", "ggpo")):
        relation = f"left: {{objective: {left}}}, relation: '>', right: {{objective: {right}}}, measure: mean"
        (found,) = judged(define(tmp_path, relation + when), ours, base)
        assert (found.verdict, found.comparisons[0].why) == ("not run", "no mean from update 30 on on both sides")
    rises = "left: {objective: ggpo}, relation: rises, measure: mean, when: from update 30 on"
    assert verdict(define(tmp_path, rises), ours) == "not run"


def test_a_trend_pairs_problems_by_their_id(tmp_path: Path) -> None:
    """Two seeds with the same problems in other orders: every problem's changes of +40 and -40 cancel."""
    counts = {10: [3, 7] * 20, 40: [7, 3] * 20}
    forth = a_run(counts)
    ids = forth.evaluations[10].ids
    back = a_run({})
    turned = {u: Counts(ids[1:] + ids[:1], np.array(each), 10) for u, each in counts.items()}
    runs = {1: forth, 2: replace(back, evaluations=turned)}
    flat = define(tmp_path, "left: {objective: ggpo}, relation: flat, measure: mean, when: throughout")
    (found,) = judged(flat, group(runs, objective="ggpo"))
    _, over_problems = found.comparisons[0].intervals
    assert (over_problems.low, over_problems.high) == pytest.approx((0.0, 0.0))


def test_flat_needs_each_quarter_near_the_whole(tmp_path: Path) -> None:
    """It comes back to where it began, two points above in between."""
    flat = define(tmp_path, "left: {objective: ggpo}, relation: flat, measure: mean, when: throughout")
    hill = a_run({u: level(right) for u, right in ((0, 500), (10, 500), (20, 540), (30, 500), (40, 500))}, n=1000)
    (found,) = judged(flat, group({1: hill}, objective="ggpo"))
    (part,) = found.comparisons
    assert part.difference == pytest.approx(0.0)
    # Two points, then one each.
    assert part.quarters == pytest.approx((50.0, 54.0, 50.0, 50.0))
    assert found.verdict == "not distinguishable"
    plain = a_run({u: level(500) for u in (0, 10, 20, 30, 40)}, n=1000)
    assert verdict(flat, group({1: plain}, objective="ggpo")) == "holds"


def test_throughout_needs_quarters_in_order(tmp_path: Path) -> None:
    rises = define(tmp_path, "left: {objective: ggpo}, relation: rises, measure: mean, when: throughout")

    def of(*right: int) -> Verdict:
        run = a_run({10 * (k + 1): level(each, 1) for k, each in enumerate(right)})
        return verdict(rises, group({1: run}, objective="ggpo"))

    assert of(2, 4, 6, 8) == "holds"
    assert of(2, 6, 4, 8) == "not distinguishable"
    assert of(8, 6, 4, 2) == "reversed"
    assert of(8, 4, 6, 2) == "fails in part"
    late = define(tmp_path, "left: {objective: ggpo}, relation: rises, measure: mean, when: after update 5")
    run = a_run({10: level(2, 1), 20: level(6, 1), 30: level(4, 1), 40: level(8, 1)})
    assert verdict(late, group({1: run}, objective="ggpo")) == "holds"


def test_the_untrained_model_is_any_runs_first_evaluation(tmp_path: Path) -> None:
    definition = define(tmp_path, "left: {objective: ggpo}, relation: '>', right: {objective: base}, measure: mean")
    run = a_run({0: level(3, 1), UPDATES: level(6)})
    (found,) = judged(definition, group({1: run}, objective="ggpo"), group({1: run}, objective="base"))
    assert (found.verdict, found.comparisons[0].right) == ("holds", 30.0)


def test_cells_of_this_scale_alone_are_judged_beside_the_papers(tmp_path: Path) -> None:
    cells = "{objective: [grpo, agro, ggpo], seed: 1}, {only: tiny, objective: ggpo, schedule.t_ref: 128, seed: 1}"
    definition = define(tmp_path, GREATER, cells)
    strong, weak = a_run({UPDATES: level(8, 1)}), a_run({UPDATES: level(4, 1)})
    found = judged(
        definition,
        group({1: weak}, objective="ggpo"),
        group({1: strong}, of_paper=False, objective="ggpo", schedule__t_ref=128),
        group({1: a_run({UPDATES: level(6)})}, objective="grpo"),
    )
    assert [(each.variant, each.verdict) for each in found] == [
        ({}, "reversed"),
        ({"schedule.t_ref": 128}, "holds"),
    ]


# --- when ---


GAINS = "left: {objective: ggpo, schedule.v: 8}, less: {schedule.v: 128}, right: {objective: agro, schedule.v: 8}"
FOUR = "{objective: [agro, ggpo], schedule.v: [8, 128], seed: 1}"


def test_gains_are_compared_problem_by_problem_and_seed_by_seed(tmp_path: Path) -> None:
    """GGPO gains 20 points on each problem; AGRO on every other one 20, on the rest none."""
    definition = define(tmp_path, f"{GAINS}, relation: '>', measure: mean", FOUR)
    rows = {("ggpo", 8): level(8), ("ggpo", 128): level(6), ("agro", 8): level(6, 1), ("agro", 128): level(5)}
    groups = [group({1: a_run({UPDATES: each})}, objective=o, schedule__v=v) for (o, v), each in rows.items()]
    (found,) = judged(definition, *groups)
    (pair,) = found.comparisons
    assert (found.said, pair.left, pair.right) == ("holds (one seed)", 20.0, 10.0)
    assert pair.difference == pytest.approx(10.0)
    (interval,) = pair.intervals
    assert (interval.low, interval.high) == pytest.approx((10 - 1.96 * 1.58, 10 + 1.96 * 1.58), abs=0.3)
    ((said, _, _, ours, *_),) = verdict_grid(
        replace(collated(definition, *groups), keys=("objective", "schedule.v")), [found]
    ).rows
    assert said == "mean (%): GGPO, N 8 less GGPO, N 128 > AGRO, N 8 less AGRO, N 128"
    assert ours == "+20.00 against +10.00: +10.00 (1 seed)"
    worse = define(tmp_path, f"{GAINS}, relation: '<', measure: mean", FOUR)
    assert verdict(worse, *groups) == "reversed"


def test_a_gain_needs_all_four_runs_of_a_seed(tmp_path: Path) -> None:
    definition = define(tmp_path, f"{GAINS}, relation: '>', measure: mean", FOUR)
    run, better = a_run({UPDATES: level(5)}), a_run({UPDATES: level(6)})
    groups = [
        group({1: better if o == "ggpo" and v == 8 else run, 2: run if v == 8 else None}, objective=o, schedule__v=v)
        for o in ("agro", "ggpo")
        for v in (8, 128)
    ]
    (found,) = judged(definition, *groups)
    assert (found.verdict, found.comparisons[0].seeds) == ("holds", (1,))
    without = [*groups[:-1], group({2: run}, objective="ggpo", schedule__v=128)]
    (found,) = judged(definition, *without)
    assert (found.verdict, found.comparisons[0].why) == ("not run", "no seed is finished on both sides")


def test_a_lead_that_another_measure_shrinks(tmp_path: Path) -> None:
    """Over each baseline: by 50 points of the mean, and by none of best@32."""
    ordering = "left: {objective: ggpo}, less: {objective: [grpo, agro]}, right: {objective: ggpo}, measure: best"
    definition = define(tmp_path, f"{ordering}, relation: '<', than: mean")
    n = 32
    ahead, behind = (a_run({UPDATES: level(right)}, n=n) for right in (24, 8))
    groups = [group({1: ahead if o == "ggpo" else behind}, objective=o) for o in ("grpo", "agro", "ggpo")]
    (found,) = judged(definition, *groups)
    assert [(each.left, each.right) for each in found.comparisons] == [(0.0, 50.0), (0.0, 50.0)]
    assert found.verdict == "holds"
    ((said, _, _, ours, *_),) = verdict_grid(collated(definition, *groups), [found]).rows
    assert said == "best (%): GGPO less GRPO and GGPO less AGRO < mean (%): GGPO less GRPO and GGPO less AGRO"
    assert ours.startswith(
        "GGPO less GRPO +0.00 of best against +50.00 of mean: -50.00, holds (1 seed); GGPO less AGRO "
    )


def test_one_answer_against_the_best_of_several(tmp_path: Path) -> None:
    """Six answers in ten on every problem, against problems of which the other solves half."""
    ordering = "left: {objective: ggpo}, relation: '>', right: {objective: grpo}, measure: mean, than: best"
    definition = define(tmp_path, ordering)
    half = [32 * (k % 2) for k in range(PROBLEMS)]
    sides = [
        group({1: a_run({UPDATES: each}, n=32)}, objective=name) for name, each in (("ggpo", level(20)), ("grpo", half))
    ]
    (found,) = judged(definition, *sides)
    (pair,) = found.comparisons
    assert (pair.left, pair.right) == (62.5, 50.0)
    # 62.5 on each against 100 and 0 by turns: the problems' spread of 50 leaves 12.5 open.
    assert found.said == "not distinguishable (one seed)"
    ((said, *_),) = verdict_grid(collated(definition, *sides), [found]).rows
    assert said == "mean (%): GGPO > best (%): GRPO"


def test_stretches_of_each_phrase() -> None:
    def spans(text: str) -> list[tuple[int, int]]:
        return When.read(text).spans(100, [0, 40, 80, 100])

    assert spans("end") == []
    assert spans("early") == [(0, 25)]
    assert spans("late") == [(75, 100)]
    assert spans("throughout") == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert spans("at equal updates") == spans("over checkpoints") == [(0, 100)]
    assert spans("at update 40") == [(39, 40)]
    assert spans("from update 80 on") == [(79, 80), (99, 100)]
    assert spans("after update 40") == [(40, 100)]
    for phrase in PHRASES:
        text = phrase.replace("N", "40")
        assert str(When.read(text)) == text
    for text in ("soon", "at update N", "at update", "late 3", "at update 40 or so"):
        with pytest.raises(ValueError, match="choose end, early, late"):
            When.read(text)
