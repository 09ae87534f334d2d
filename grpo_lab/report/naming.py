"""The words of a report: settings and values by the names that the papers give them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_lab.report.collate import Collated, Entry, Group, Slot
from grpo_lab.report.measures import KINDS, PERCENT, Accuracy
from grpo_lab.report.readings import BASE
from grpo_lab.tables.definition import MEASURES

METHODS = {
    "grpo": "GRPO",
    "grpo_rg": "GRPO",
    "grpo_tis": "GRPO+TIS",
    "agro": "AGRO",
    "ggpo": "GGPO",
    "ggpo_clip": "GGPO, token clipping",
    "ggpo_reward_only": "GGPO, reward only",
    BASE: "base model",
}
KEYS = {
    "objective": "method",
    "model": "model",
    "group_size": "m",
    "objective.beta": "beta",
    "objective.zero_variance": "equal rewards",
    "schedule.v": "N",
    "schedule.i": "i",
    "schedule.t_ref": "T_ref",
    "schedule.updates": "updates",
    "learner.lr": "rate",
}
SUMS = "the run's own held-out sums"
STAND_IN = (
    f"share of right answers to {SUMS}, at each evaluation while training; AIME 2024 and MATH-500 are one series here, "
    "which rg-table2, rg-table3 and rg-fig3 all show"
)
# At tiny, measures that the paper has on tasks of its own: names, and what they are here.
TINY_NAMES = {
    "aime24": "held-out sums, in place of AIME 2024",
    "math500": "held-out sums, in place of MATH-500",
    "pass@1 of 50": "pass@1",
}
TINY_MEANINGS = {
    "average": f"share of right answers at the last evaluation, over {SUMS}",
    **{f"pass@{k}": f"pass@{k} at the last evaluation, over {SUMS}" for k in (1, 4, 8, 16, 32)},
    "pass@1 of 50": f"share of right answers to {SUMS}, at each evaluation while training",
    "aime24": STAND_IN,
    "math500": STAND_IN,
}
# A cell of a table without a value.
NONE = ""
THOUSAND = 1000


def key_name(key: str, paper: str) -> str:
    """GG calls v N."""
    return "v" if key == "schedule.v" and paper == "rg" else KEYS.get(key, key)


def label_text(group: Group, key: str, keys: Sequence[str]) -> str:
    """A group's setting as the paper names it, and what this scale sets in its place. `keys`: of all columns."""
    if group.is_base:
        return METHODS[BASE] if key == place_of_base(keys) else NONE
    if key not in group.labels:
        return "default"
    said = _value_text(key, group.labels[key])
    return said if key not in group.set_here else f"{said} ({_value_text(key, group.set_here[key])} here)"


def place_of_base(keys: Sequence[str]) -> str:
    """The column that names the untrained model: the method's, else the first."""
    return "objective" if "objective" in keys else keys[0]


def group_name(collated: Collated, group: Group) -> str:
    """A group by the settings that tell it apart: `GGPO, N 128`."""
    if group.is_base:
        return METHODS[BASE]
    parts = []
    for key in sorted((key for key in collated.keys if key in group.labels), key=lambda key: key != "objective"):
        text = label_text(group, key, collated.keys)
        parts.append(text if key in ("objective", "model") else f"{key_name(key, collated.definition.paper)} {text}")
    return ", ".join(parts) or "all"


def measure_name(measure: str, scale: str) -> str:
    """A measure by what it is of at a scale: tiny has none of the papers' tasks."""
    return TINY_NAMES.get(measure, measure) if scale == "tiny" else measure


def measure_meaning(measure: str, scale: str) -> str:
    """What a measure is, at a scale."""
    return TINY_MEANINGS.get(measure, MEASURES[measure]) if scale == "tiny" else MEASURES[measure]


def slot_name(slot: Slot, scale: str) -> str:
    """A measure with its unit, and where in a run it is taken."""
    measure = KINDS[slot.measure]
    percent = isinstance(measure, Accuracy) and measure.unit == PERCENT
    return (
        measure_name(slot.measure, scale)
        + (" (%)" if percent else "")
        + ("" if slot.when.phrase == "end" else f" {slot.when}")
    )


def number_text(measure: str, value: float, *, signed: bool = False) -> str:
    """A value as the papers print that measure."""
    if not math.isfinite(value):
        return "not finite"
    kind = KINDS[measure]
    sign = "+" if signed else ""
    if isinstance(kind, Accuracy):
        return f"{value:{sign}.{kind.digits}f}"
    if abs(value) >= THOUSAND:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.{kind.digits}g}"


def seeds_text(seeds: Sequence[int]) -> str:
    return f"{len(seeds)}: {', '.join(map(str, sorted(seeds)))}" if seeds else NONE


def entry_seeds_text(group: Group, entry: Entry) -> str:
    """The seeds that an entry is of, of how many, and those that failed."""
    if group.is_base or not (entry.values or group.failed):
        return seeds_text(tuple(entry.values))
    asked, failed = len({each.seed for each in group.placed}), sorted(group.failed)
    count = f"{len(entry.values)} of {asked}" if len(entry.values) < asked else str(asked)
    said = f"{count}: {', '.join(map(str, sorted(entry.values)))}" if entry.values else count
    return f"{said}; {len(failed)} failed: {', '.join(map(str, failed))}" if failed else said


def failures_text(collated: Collated, groups: Sequence[Group]) -> list[str]:
    """The seeds of groups that failed, and when; the groups by name where there are several."""
    return [
        f"seed {seed}{f' of {group_name(collated, group)}' if len(groups) > 1 else ''} failed at update {update}"
        for group in groups
        if not group.is_base
        for seed, update in sorted(group.failed.items())
    ]


def _value_text(key: str, value: object) -> str:
    if key == "objective":
        return METHODS.get(str(value), str(value))
    if key == "schedule.t_ref":
        return "fixed" if value is None else str(value)
    return str(value)
