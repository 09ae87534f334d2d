"""The words in figures: what tells curves apart, and the notes under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lab.report.collate import SEED, Collated
from grpo_lab.tables.definition import Labels

DELAY = "schedule.v"
NAMES = {
    "grpo": "GRPO",
    "grpo_rg": "GRPO",
    "grpo_tis": "GRPO+TIS",
    "agro": "AGRO",
    "ggpo": "GGPO",
    "ggpo_clip": "GGPO, token clipping",
    "ggpo_reward_only": "GGPO, reward only",
}
SYMBOLS = {
    "objective.beta": "β",
    "schedule.v": "v",
    "schedule.i": "i",
    "schedule.t_ref": "T_ref",
    "group_size": "m",
    "learner.lr": "rate",
}
# How long a run is does not name a curve: its x axis says it.
UNNAMED = ("objective", "schedule.updates")
SCALES = {
    "paper": "Dashed: numbers that the paper's text states.",
    "tiny": "A tiny model on made sums, not the paper's model and data: no number of the paper is shown.",
}
# Runs left out that a note names one by one.
NAMED_RUNS = 4


def objective_of(labels: Labels) -> str:
    """The objective of a group; RG's tables have one alone, and do not label it."""
    return str(labels.get("objective", "grpo_rg"))


def identity(labels: Labels, *, ladder: bool) -> dict[str, Any]:
    """Labels that make a curve: on a ladder, all but N."""
    return {key: value for key, value in labels.items() if not (ladder and key == DELAY)}


def curve_label(collated: Collated, labels: Labels, *, ladder: bool) -> str:
    """A curve's name: its objective where the figure has several, and what else its curves differ in. A value that
    this scale sets otherwise than the paper stands before the paper's."""
    curves = [identity(each.labels, ladder=ladder) for each in collated.groups if not each.is_base]
    own, words = identity(labels, ladder=ladder), _words(collated, labels)
    parts = [
        _part(key, own[key], words.get(key, own[key]))
        for key in collated.keys
        if key in own and key not in UNNAMED and len({repr(each.get(key, "")) for each in curves}) > 1
    ]
    parts = [each for each in parts if each]
    if not parts or len({objective_of(each) for each in curves}) > 1:
        parts.insert(0, NAMES[objective_of(labels)])
    return ", ".join(parts)


def _words(collated: Collated, labels: Labels) -> Labels:
    """What the cells with these labels set at this scale."""
    for cell in collated.definition.cells(collated.scale):
        if {key: value for key, value in cell.labels.items() if key != SEED} == dict(labels):
            return cell.words
    return {}


def _part(key: str, label: Any, word: Any) -> str:
    if key == "objective.zero_variance":
        return "masked" if label == "mask" else ""
    if key == "schedule.t_ref" and label is None:
        return "fixed reference"
    symbol = SYMBOLS.get(key, key)
    return f"{symbol} = {word}" if word == label else f"{symbol} = {word} (the paper's {label})"


def seeds_of_rungs(seeds: Mapping[int, int]) -> str:
    """Numbers of seeds by N, as a legend says them: `n = 3 at N = 8, 128; else 1`."""
    counts = sorted(set(seeds.values()), reverse=True)
    if len(counts) == 1:
        return f"n = {counts[0]}"
    parts = [f"{each} at N = {', '.join(str(n) for n in seeds if seeds[n] == each)}" for each in counts[:-1]]
    return f"n = {'; '.join(parts)}; else {counts[-1]}"


def footnotes(collated: Collated, notes: Sequence[str]) -> list[str]:
    """Scale, runs and spread, `notes` on how it is shown, and what was left out."""
    return [f"scale={collated.scale}. {SCALES[collated.scale]}", _runs(collated), *notes, *_left_out(collated)]


def _runs(collated: Collated) -> str:
    finished = [each.run for each in collated.placed if each.run is not None]
    seeds = {each.seed for each in collated.placed if each.run is not None}
    updates = " or ".join(f"{each:,}" for each in sorted({run.updates for run in finished}))
    said = (
        f"{len(finished)} finished runs of {updates} updates; seeds {', '.join(str(each) for each in sorted(seeds))}. "
    )
    if all(len(group.finished) <= 1 for group in collated.groups if not group.is_base):
        return said + "One seed a curve: its spread over seeds is not known."
    return said + "Mean over n seeds; band or bar: one sample deviation, where n > 1."


def _left_out(collated: Collated) -> list[str]:
    unfinished = [each for each in collated.placed if each.run is None]
    if not unfinished:
        return []
    named = "; ".join(f"{each.folder.name} ({each.standing})" for each in unfinished[:NAMED_RUNS])
    more = f"; and {len(unfinished) - NAMED_RUNS} more" if len(unfinished) > NAMED_RUNS else ""
    return [f"Left out, not finished: {len(unfinished)} of {len(collated.placed)} runs: {named}{more}."]
