"""The words of a report: settings and values by the names that the papers give them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_lab.report.collate import Collated, Group, Slot
from grpo_lab.report.measures import MEASURES, PERCENT, Accuracy
from grpo_lab.report.readings import BASE

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


def slot_name(slot: Slot) -> str:
    """A measure with its unit, and where in a run it is taken."""
    measure = MEASURES[slot.measure]
    percent = isinstance(measure, Accuracy) and measure.unit == PERCENT
    return slot.measure + (" (%)" if percent else "") + ("" if slot.when.phrase == "end" else f" {slot.when}")


def number_text(measure: str, value: float, *, signed: bool = False) -> str:
    """A value as the papers print that measure."""
    if not math.isfinite(value):
        return "not finite"
    kind = MEASURES[measure]
    sign = "+" if signed else ""
    if isinstance(kind, Accuracy):
        return f"{value:{sign}.{kind.digits}f}"
    if abs(value) >= THOUSAND:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.{kind.digits}g}"


def seeds_text(seeds: Sequence[int]) -> str:
    return f"{len(seeds)}: {', '.join(map(str, sorted(seeds)))}" if seeds else NONE


def _value_text(key: str, value: object) -> str:
    if key == "objective":
        return METHODS.get(str(value), str(value))
    if key == "schedule.t_ref":
        return "fixed" if value is None else str(value)
    return str(value)
