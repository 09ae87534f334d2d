"""The words in figures: what tells curves apart, and the notes under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.report.collate import Collated, Group
from grpo_lab.report.naming import METHODS, key_name
from grpo_lab.tables.definition import Labels

DELAY = "schedule.v"
# How long a run is does not name a curve: its x axis says it.
UNNAMED = ("objective", "schedule.updates")
SCALES = {
    "paper": "Dashed: numbers that the paper's text states.",
    "tiny": "A tiny model on made sums, not the paper's model and data: no number of the paper is shown.",
}
OTHER_SETTINGS = "Runs with other settings than the paper's: no number of the paper is shown."
# Runs left out that a note names one by one.
NAMED_RUNS = 4


def objective_of(labels: Labels) -> str:
    """The objective of a group; RG's tables have one alone, and do not label it."""
    return str(labels.get("objective", "grpo_rg"))


def identity(labels: Labels, *, ladder: bool) -> dict[str, Any]:
    """Labels that make a curve: on a ladder, all but N."""
    return {key: value for key, value in labels.items() if not (ladder and key == DELAY)}


def curve_label(collated: Collated, group: Group, *, ladder: bool) -> str:
    """A curve's name: its objective where the figure has several, and what else its curves differ in. A value that
    this scale sets otherwise than the paper stands before the paper's."""
    curves = [identity(each.labels, ladder=ladder) for each in collated.groups if not each.is_base]
    differing = [
        key
        for key in collated.keys
        if key not in (*UNNAMED, *([DELAY] if ladder else [])) and len({repr(each.get(key, "")) for each in curves}) > 1
    ]
    parts = [_part(collated, group, key) for key in differing if key in group.labels]
    parts = [each for each in parts if each]
    if not parts or len({objective_of(each) for each in curves}) > 1:
        parts.insert(0, METHODS[objective_of(group.labels)])
    return ", ".join(parts)


def _part(collated: Collated, group: Group, key: str) -> str:
    label = group.labels[key]
    if key == "objective.zero_variance":
        return "masked" if label == "mask" else ""
    if key == "schedule.t_ref" and label is None:
        return "fixed reference"
    name = key_name(key, collated.definition.paper)
    return f"{name} = {group.set_here[key]} (the paper's {label})" if key in group.set_here else f"{name} = {label}"


def seeds_of_rungs(seeds: Mapping[int, int]) -> str:
    """Numbers of seeds by N, as a legend says them: `n = 3 at N = 8, 128; else 1`."""
    counts = sorted(set(seeds.values()), reverse=True)
    if len(counts) == 1:
        return f"n = {counts[0]}"
    parts = [f"{each} at N = {', '.join(str(n) for n in seeds if seeds[n] == each)}" for each in counts[:-1]]
    return f"n = {'; '.join(parts)}; else {counts[-1]}"


def footnotes(collated: Collated, notes: Sequence[str]) -> list[str]:
    """Scale, runs and spread, `notes` on how it is shown, and what was left out."""
    with_words = "" if collated.canonical else f", with {' '.join(collated.words)}"
    about = SCALES[collated.scale] if collated.canonical or collated.scale != "paper" else OTHER_SETTINGS
    return [f"scale={collated.scale}{with_words}. {about}", _runs(collated), *notes, *_left_out(collated)]


def _runs(collated: Collated) -> str:
    finished = [each.run for each in collated.placed if each.run is not None]
    seeds = {each.seed for each in collated.placed if each.run is not None}
    updates = " or ".join(f"{each:,}" for each in sorted({run.updates for run in finished}))
    named = f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(str(each) for each in sorted(seeds))}"
    said = f"{len(finished)} finished runs of {updates} updates; {named}. "
    if all(len(group.finished) <= 1 for group in collated.groups if not group.is_base):
        return said + "One seed a curve: its spread over seeds is not known."
    return said + "Mean over n seeds; band or bar: one sample deviation, where n > 1."


def _left_out(collated: Collated) -> list[str]:
    unfinished = [each for each in collated.placed if each.run is None]
    if not unfinished:
        return []
    named = "; ".join(f"{each.folder.name} ({each.said})" for each in unfinished[:NAMED_RUNS])
    more = f"; and {len(unfinished) - NAMED_RUNS} more" if len(unfinished) > NAMED_RUNS else ""
    return [f"Left out: {len(unfinished)} of {len(collated.placed)} runs: {named}{more}."]
