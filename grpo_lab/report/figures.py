"""Which panels each figure of the papers has, and what they show of a collated table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from grpo_lab.report.captions import footnotes
from grpo_lab.report.collate import Collated, Group
from grpo_lab.report.curves import Shown, Smoothing, courses, ladders, levels
from grpo_lab.report.measures import score_counts
from grpo_lab.report.plates import Panel, Plate
from grpo_lab.report.readings import ONE_SEED

BLOCK = 8  # updates of one point (GG, captions of figures 1 and 10)
REFRESH = 160  # updates between two refreshes in GG's default setting, the windows of figure 9
FIGURE_1 = Smoothing(BLOCK, 9)
FIGURE_10 = Smoothing(BLOCK, REFRESH // BLOCK, trailing=True)
POINTS = Smoothing(BLOCK)
WINDOWS = Smoothing(REFRESH)

FIGURES: Mapping[str, Sequence[Shown]] = {
    "gg-fig1": (
        Shown(measure="k3", smoothing=FIGURE_1),
        Shown(measure="entropy", smoothing=FIGURE_1),
        Shown(measure="best"),
        Shown(measure="mean"),
    ),
    "gg-fig2": (Shown(measure="responses"), Shown(measure="mean", against="responses")),
    "gg-fig3": (Shown(measure="average", against="N"),),
    # Ours: the ladder again, with staleness measured by what it does.
    "gg-table4": (Shown(measure="average", against="K3"),),
    "gg-fig4": (
        Shown(measure="mean"),
        Shown(measure="drift", log_y=True, one_seed=True),
        Shown(measure="ess", log_y=True, one_seed=True),
        Shown(measure="gradient norm", one_seed=True),
    ),
    "gg-fig5": (Shown(measure="solvable"), Shown(measure="unsolved")),
    "gg-fig7": (
        Shown(measure="k3", against="N", log_y=True),
        Shown(measure="ess", against="N", log_y=True),
        Shown(measure="entropy", against="N"),
        Shown(measure="length", against="N"),
    ),
    "gg-fig8": (Shown(measure="mean"),),
    "gg-fig9": (
        Shown(measure="within-success ESS", smoothing=WINDOWS),
        Shown(measure="groups with two right", smoothing=WINDOWS),
        Shown(measure="raw loss", smoothing=WINDOWS),
    ),
    "gg-fig10": (Shown(measure="reward", smoothing=FIGURE_10),),
    "rg-fig2": (Shown(measure="pass@1 of 50"),),
    "rg-fig3": (Shown(measure="aime24"), Shown(measure="math500")),
    "rg-throughput": (Shown(measure="reward", smoothing=POINTS), Shown(measure="reference KL")),
}
X_LABELS = {
    "updates": "optimizer updates",
    "responses": "generated responses",
    "N": "updates between syncs, N",
    "K3": "token K3, nats",
}
# Where a curve joins the rungs of a ladder.
LADDERS: Mapping[str, Literal["ladder", "log"]] = {"N": "ladder", "K3": "log"}
Y_LABELS = {
    "k3": "token K3, nats",
    "ess": "normalised sequence ESS",
    "drift": "mean |log ratio to behaviour|, nats",
    "gradient norm": "gradient norm",
    "entropy": "policy entropy, nats",
    "length": "response length, tokens",
    "responses": "generated responses",
    "reward": "reward, retained responses",
    "reference KL": "K3 to the reference, nats",
    "within-success ESS": "within-success ESS (mean of groups)",
    "groups with two right": "share of groups with two right",
    "raw loss": "raw group loss",
}
ACCURACIES = {
    "average": "mean@32, %",
    "mean": "mean@32, %",
    "best": "best@32, %",
    "solvable": "mean@32, 0 < p0 <= 0.75, %",
    "unsolved": "p0 = 0, solved within 32, %",
    "pass@1 of 50": "pass@1 of 50, %",
    "aime24": "pass@1",
    "math500": "pass@1",
}
# What accuracies are of at the papers' scale, where it is not MATH-500; at tiny it is one set for all.
PAPER_TASKS = {"average": "five benchmarks", "pass@1 of 50": "GSM8K", "aime24": "AIME 2024"}
SPLITS = {"solvable": "0 < p0 <= 0.75", "unsolved": "p0 = 0"}
TINY_TASK = "held-out sums"


def plate_of(collated: Collated) -> Plate | None:
    """The figure of a table at its scale; None where it has none, or no run of it is finished."""
    shown = _distinct(FIGURES.get(collated.definition.target, ()), collated.scale)
    groups = [group for group in collated.groups if not group.is_base and group.finished]
    if not shown or not groups:
        return None
    definition = collated.definition
    return Plate(
        name=collated.name,
        title=f"{definition.paper.upper()} {definition.label}: {definition.title} (scale={collated.scale})",
        panels=[_panel(collated, groups, each) for each in shown],
        footnotes=footnotes(collated, _notes(collated, shown)),
    )


def _distinct(shown: Sequence[Shown], scale: str) -> list[Shown]:
    """Without panels that would repeat another: RG's two benchmarks are one set of problems at tiny."""
    if scale == "paper":
        return list(shown)
    return [each for each in shown if each.measure != "math500"]


def _panel(collated: Collated, groups: Sequence[Group], shown: Shown) -> Panel:
    return Panel(
        x_label=X_LABELS[shown.against],
        y_label=y_label(shown.measure, collated.scale),
        curves=(ladders if shown.against in LADDERS else courses)(collated, groups, shown),
        levels=levels(collated, groups, shown),
        x_scale=LADDERS.get(shown.against, "linear"),
        log_y=shown.log_y,
    )


def _notes(collated: Collated, shown: Sequence[Shown]) -> list[str]:
    """How the panels show what they show."""
    notes = list(dict.fromkeys(str(each.smoothing) for each in shown if each.smoothing))
    window = collated.reader.window
    if window is not None and any(each.against in LADDERS for each in shown):
        notes.append(f"Means over the last {window} updates at scale={collated.scale}.")
    if alone := [each.measure for each in shown if each.one_seed]:
        notes.append(f"Seed {ONE_SEED} alone: {', '.join(alone)}.")
    if "within-success ESS" in {each.measure for each in shown}:
        notes.append("Within-success ESS: the mean over the groups of an update, averaged over updates.")
    for each in shown:
        if each.measure in SPLITS:
            split, run = collated.reader.frame.split, collated.reader.frame.split_run
            found = None if split is None else score_counts(each.measure, split, split)
            problems = 0 if found is None or found.problems is None else len(found.problems)
            of = "any run: none was evaluated then" if run is None else f"{run.folder.name}, for all runs: {problems}"
            notes.append(f"Problems with {SPLITS[each.measure]} at update 0 of {of}.")
    return notes


def y_label(measure: str, scale: str) -> str:
    """The words on a measure's axis, the task among them where it is an accuracy."""
    if measure not in ACCURACIES:
        return Y_LABELS[measure]
    task = PAPER_TASKS.get(measure, "MATH-500") if scale == "paper" else TINY_TASK
    return f"{task}: {ACCURACIES[measure]}"
