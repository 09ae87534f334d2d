"""A collated table as grids of words: beside the published numbers, as the paper lays it out, and its runs.

A published number and a measured one never share a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_lab.report.collate import Collated, Entry, Group, Slot
from grpo_lab.report.measures import KINDS, Accuracy
from grpo_lab.report.naming import (
    NONE,
    entry_seeds_text,
    group_name,
    key_name,
    label_text,
    measure_name,
    number_text,
    slot_name,
)
from grpo_lab.report.render import Grid
from grpo_lab.tables.definition import CELL_KEYS, Published

NOT_RUN, NO_VALUE, FAILED, NOT_IN_TEXT = "not run", "no value", "failed", "not in the text"


def comparison(collated: Collated) -> Grid:
    """A row an entry: published, ours, difference, seeds, scale."""
    keys, statistics = _keys(collated), any(slot.statistic for slot in collated.slots)
    header = (*keys, "measure", *(["over checkpoints"] if statistics else []))
    rows = [
        (
            *(label_text(group, key, collated.keys) for key in collated.keys),
            slot_name(slot, collated.scale),
            *([slot.statistic or NONE] if statistics else []),
            published_text(entry.published, slot),
            ours_text(group, entry, slot),
            NONE if entry.difference is None else number_text(slot.measure, entry.difference, signed=True),
            entry_seeds_text(group, entry),
            collated.scale,
        )
        for group in ordered(collated)
        for slot, entry in group.entries.items()
    ]
    return Grid((*header, "published", "ours", "difference", "seeds", "scale"), tuple(rows))


def numbers(collated: Collated) -> Grid:
    """The same for programs: every digit, deviation, source and each seed's value on its own."""
    header = (*_keys(collated), "measure", "statistic", "when", "published", "published as", "source")
    rows = [
        (
            *(label_text(group, key, collated.keys) for key in collated.keys),
            measure_name(slot.measure, collated.scale),
            slot.statistic or NONE,
            str(slot.when),
            NOT_IN_TEXT if entry.published is None else repr(entry.published.value),
            NONE if entry.published is None else entry.published.form,
            NONE if entry.published is None else entry.published.source,
            _absent(group) if entry.mean is None else repr(entry.mean),
            NONE if entry.deviation is None else repr(entry.deviation),
            NONE if entry.difference is None else repr(entry.difference),
            " ".join(f"{seed}:{value!r}" for seed, value in sorted(entry.values.items())),
            NONE if group.is_base else " ".join(f"{seed}:{update}" for seed, update in sorted(group.failed.items())),
            " ".join(f"{seed}:{count}" for seed, count in sorted(entry.checkpoints.items())),
            collated.scale,
        )
        for group in ordered(collated)
        for slot, entry in group.entries.items()
    ]
    return Grid((*header, "ours", "deviation", "difference", "by seed", "failed", "checkpoints", "scale"), tuple(rows))


def in_layout(collated: Collated, text: Callable[[Group, Entry, Slot], str], scale: str) -> list[tuple[str, Grid]]:
    """The paper's rows and columns, each cell by `text`, with the name of what is shown: one grid, or, where columns
    are settings, one a measure. None where there would be a single column, or curves. `scale`: names measures."""
    if "update" in collated.definition.columns:
        return []
    named = [each for each in collated.definition.columns if each in KINDS]
    slots = [slot for slot in _all_slots(collated) if not named or slot.measure in named]
    if named:
        grids = [("", _laid_out(collated, slots, text, scale))]
    else:
        grids = [(slot_name(slot, scale), _laid_out(collated, [slot], text, scale)) for slot in slots]
    return [(name, grid) for name, grid in grids if grid is not None]


def _laid_out(
    collated: Collated, slots: Sequence[Slot], text: Callable[[Group, Entry, Slot], str], scale: str
) -> Grid | None:
    across = [key for key in collated.definition.columns if key in CELL_KEYS]
    down = [key for key in collated.keys if key not in across]
    found: dict[tuple[str, ...], dict[tuple[tuple[str, ...], Slot], str]] = {}
    for group in ordered(collated):
        words = {key: label_text(group, key, collated.keys) for key in collated.keys}
        row = found.setdefault(tuple(words[key] for key in down), {})
        top = tuple(words[key] for key in across)
        row |= {(top, slot): text(group, entry, slot) for slot, entry in group.entries.items() if slot in slots}
    # By the order of the settings, and of the measures within one.
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    tops = list(dict.fromkeys(top for top, _ in columns))
    columns.sort(key=lambda column: (tops.index(column[0]), slots.index(column[1])))
    if len(columns) < 2:
        return None
    paper = collated.definition.paper
    heads = []
    for top, slot in columns:
        settings = [
            word if key == "objective" else f"{key_name(key, paper)} {word}"
            for key, word in zip(across, top, strict=True)
        ]
        heads.append(", ".join(settings) or _slot_head(slot, slots, scale))
    rows = tuple((*left, *(row.get(column, NONE) for column in columns)) for left, row in found.items())
    return Grid((*(key_name(key, paper) for key in down), *heads), rows)


def runs(collated: Collated) -> Grid:
    """Where each number comes from."""
    header = ("run", "cell", "seed", "state", "updates", "hours", "commit", "host", "folder")
    rows: list[tuple[str, ...]] = []
    for group in ordered(collated):
        for each in () if group.is_base else group.placed:
            run = each.run
            rows.append(
                (
                    str(len(rows) + 1),
                    group_name(collated, group),
                    str(each.seed),
                    each.said,
                    NONE if run is None else str(run.updates),
                    NONE if run is None or run.hours is None else f"{run.hours:.2f}",
                    NONE if run is None else commits_text(run.provenance.commits, run.provenance.dirty),
                    NONE if run is None else ", ".join(run.provenance.hosts),
                    str(each.folder),
                )
            )
    return Grid(header, tuple(rows))


def ours_text(group: Group, entry: Entry, slot: Slot) -> str:
    """Mean over seeds, the sample deviation of two or more, and of a statistic over how many checkpoints it is."""
    if entry.mean is None:
        return _absent(group)
    spread = NONE if entry.deviation is None else f" ± {number_text(slot.measure, entry.deviation)}"
    counts = " or ".join(str(each) for each in sorted(set(entry.checkpoints.values())))
    over = f", over {counts} checkpoints" if counts else NONE
    return number_text(slot.measure, entry.mean) + spread + over


def published_text(published: Published | None, slot: Slot) -> str:
    """As the paper's text states it."""
    if published is None:
        return NOT_IN_TEXT
    measure = KINDS[slot.measure]
    exact = isinstance(measure, Accuracy) and measure.unit != 1.0
    value = number_text(slot.measure, published.value) if exact else f"{published.value:g}"
    said = {"exact": value, "order": f"order of {value}", "below": f"below {value}"}[published.form]
    return said if published.note is None else f"{said} ({published.note})"


def commits_text(commits: Sequence[str], dirty: bool) -> str:
    return (", ".join(commits) or "unknown") + (", changed" if dirty else "")


def ordered(collated: Collated) -> list[Group]:
    """Groups as the paper's rows go: by each label in the order in which its values come up; the base model first."""
    seen = {key: list(dict.fromkeys(repr(group.labels.get(key)) for group in collated.groups)) for key in collated.keys}
    return sorted(
        collated.groups,
        key=lambda group: (
            not group.is_base,
            [seen[key].index(repr(group.labels.get(key))) for key in collated.keys],
        ),
    )


def _keys(collated: Collated) -> list[str]:
    return [key_name(key, collated.definition.paper) for key in collated.keys]


def _all_slots(collated: Collated) -> list[Slot]:
    """Those of runs, and what only the untrained model has."""
    return list(dict.fromkeys(slot for group in ordered(collated) for slot in group.entries))


def _slot_head(slot: Slot, slots: Sequence[Slot], scale: str) -> str:
    """A column's name; beside statistics over checkpoints, what has no such thing is one model."""
    if slot.statistic is not None:
        return slot.statistic
    return "one model" if any(each.statistic for each in slots) else slot_name(slot, scale)


def _absent(group: Group) -> str:
    if group.finished:
        return NO_VALUE
    return FAILED if group.failed and not group.is_base else NOT_RUN
