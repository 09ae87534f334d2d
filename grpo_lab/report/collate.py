"""From a definition and stored runs to a table's entries: ours by seed, and the paper's number beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo_lab.evaluation.estimators import over_seeds
from grpo_lab.report.measures import KINDS, Accuracy
from grpo_lab.report.placing import PlacedRun, choose, frame_of, mixed_evaluations, place
from grpo_lab.report.readings import BASE, Reader
from grpo_lab.report.stored import Shelf, StoredRun
from grpo_lab.tables.cells import Run
from grpo_lab.tables.definition import CELL_KEYS, STATISTICS, Definition, Labels, Published, matches
from grpo_lab.tables.when import END, When

SEED = "seed"


@dataclass(frozen=True, slots=True)
class Slot:
    """What an entry is of: a measure at the end or at an update, or a statistic over checkpoints."""

    measure: str
    statistic: str | None = None
    when: When = END


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of a table. `values`: ours by seed, in the measure's unit; empty: no run gave one. `published`: the
    paper's, where its text has one. `difference`: ours - published, at the papers' scale alone. `checkpoints`: of a
    statistic over them, how many each seed has."""

    values: Mapping[int, float]
    published: Published | None = None
    difference: float | None = None
    checkpoints: Mapping[int, int] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        return over_seeds(list(self.values.values()))[0] if self.values else None

    @property
    def deviation(self) -> float | None:
        """Sample deviation over seeds; None from fewer than two."""
        return over_seeds(list(self.values.values()))[1] if self.values else None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Runs that differ in their seed alone. `labels`: without it. `of_paper`: the paper has it, and not only this
    scale. `set_here`: labels that this scale gives another value. The untrained model is a group with no label but
    objective: base, and the runs that began with it."""

    labels: Labels
    set_here: Labels
    of_paper: bool
    placed: tuple[PlacedRun, ...]
    entries: Mapping[Slot, Entry]
    notes: tuple[str, ...] = ()

    @property
    def is_base(self) -> bool:
        return self.labels.get("objective") == BASE

    @property
    def finished(self) -> dict[int, StoredRun]:
        """Its finished runs by seed."""
        return {each.seed: each.run for each in self.placed if each.run is not None}

    @property
    def failed(self) -> dict[int, int]:
        """Its failed runs: the last update, by seed."""
        return {each.seed: each.standing.update for each in self.placed if each.state == "failed"}


@dataclass(frozen=True, slots=True, eq=False)
class Collated:
    """A table at a scale. `keys`: labels that tell its groups apart, those of the paper's rows and columns first.
    `slots`: what is shown of each group. `words`: of the user's, for its runs; `canonical`, `name`: as of `Choice`.
    `mixed`: measures whose evaluations are not alike, and why."""

    definition: Definition
    scale: str
    words: tuple[str, ...]
    reader: Reader
    keys: tuple[str, ...]
    slots: tuple[Slot, ...]
    groups: tuple[Group, ...]
    canonical: bool
    name: str
    mixed: Mapping[str, Sequence[str]]

    @property
    def comparable(self) -> bool:
        """Whether a published number may be set against ours: at the papers' scale, with their settings."""
        return is_comparable(self.scale, canonical=self.canonical)

    @property
    def placed(self) -> list[PlacedRun]:
        """All runs that it asks for, each once."""
        return [each for group in self.groups if not group.is_base for each in group.placed]


def collate(definition: Definition, scale: str, shelf: Shelf, words: Sequence[str] = ()) -> Collated:
    """Read the runs of a table and lay their measures beside the published numbers.

    Raises:
        ConfigError: a word that is not of the runs.
        UnreadableRun: a run folder that cannot be read.
    """
    choice, slots = choose(definition, scale, words), _slots(definition)
    placed = [place(run, shelf) for run in choice.runs]
    reader = replace(Reader.of(definition, scale), frame=frame_of(choice.runs, placed))
    comparable = is_comparable(scale, canonical=choice.canonical)
    families: dict[tuple[tuple[str, object], ...], list[tuple[Run, PlacedRun]]] = {}
    for run, found in zip(choice.runs, placed, strict=True):
        families.setdefault(tuple(_without_seed(run.cell.labels).items()), []).append((run, found))
    paper = [_without_seed(cell.labels) for cell in definition.cells("paper")]
    groups = []
    for family in families.values():
        cell, runs = family[0][0].cell, [each for _, each in family]
        labels, here = _without_seed(cell.labels), _without_seed(cell.words)
        entries, notes = _entries(definition, scale, reader, slots, labels, runs)
        if comparable:
            entries = {slot: _with_difference(entry) for slot, entry in entries.items()}
        of_paper = not paper or labels in paper
        if not of_paper:
            entries = {slot: replace(each, published=None, difference=None) for slot, each in entries.items()}
        set_here = {key: value for key, value in here.items() if value != labels[key]}
        groups.append(Group(labels, set_here, of_paper, tuple(runs), entries, notes))
    # What the definition calls `also` is the untrained model: before all that came of it.
    groups = [_base(definition, reader, slots, placed, comparable=comparable) for _ in definition.also] + groups
    keys = _keys(definition, [each.labels for each in groups])
    mixed = mixed_evaluations(reader, definition.measures, placed)
    return Collated(
        definition, scale, tuple(words), reader, keys, slots, tuple(groups), choice.canonical, choice.name, mixed
    )


def is_comparable(scale: str, *, canonical: bool) -> bool:
    """As of `Collated`."""
    return scale == "paper" and canonical


def _without_seed(labels: Labels) -> dict[str, object]:
    return {key: value for key, value in labels.items() if key != SEED}


def _slots(definition: Definition) -> tuple[Slot, ...]:
    """Of each measure the end, and what else numbers are published of; without the end where all of them are
    statistics. Where the paper's columns are measures, others are there for the orderings, unless a number is
    published."""
    named = [each for each in definition.columns if each in KINDS]
    slots: list[Slot] = []
    for measure in definition.measures:
        published = [each for each in definition.published if each.measure == measure]
        if named and measure not in named and not published:
            continue
        of_runs = [each for each in published if each.at.get("objective") != BASE]
        statistics = [each for each in STATISTICS if any(p.statistic == each for p in of_runs)]
        if not of_runs or any(p.statistic is None for p in of_runs):
            slots.append(Slot(measure))
        slots += [Slot(measure, each) for each in statistics]
        places = [p.when for p in of_runs if p.when != END]
        if isinstance(KINDS[measure], Accuracy):
            places += [When("at update N", update) for update in definition.at_updates]
        slots += [
            Slot(measure, None, when) for when in dict.fromkeys(sorted(places, key=lambda each: each.update or 0))
        ]
    return tuple(slots)


def _entries(
    definition: Definition,
    scale: str,
    reader: Reader,
    slots: Sequence[Slot],
    labels: Labels,
    placed: Sequence[PlacedRun],
) -> tuple[dict[Slot, Entry], tuple[str, ...]]:
    """A group's entries, and why finished runs do not give one."""
    entries, notes = {}, []
    for slot in slots:
        values, checkpoints = {}, {}
        for each in placed:
            if each.run is None:
                continue
            value = _value(reader, each.run, slot)
            if value is None:
                notes.append(f"{each.folder}: {_why_none(definition, scale, reader, each.run, slot)}")
            else:
                values[each.seed] = value
                if slot.statistic is not None:
                    checkpoints[each.seed] = len(reader.checkpoints(each.run, slot.measure))
        entries[slot] = Entry(values, _published(definition, labels, slot), checkpoints=checkpoints)
    return entries, tuple(dict.fromkeys(notes))


def _base(
    definition: Definition, reader: Reader, slots: Sequence[Slot], placed: Sequence[PlacedRun], *, comparable: bool
) -> Group:
    """The untrained model, by the first run of each seed that has scores of it."""
    labels = {"objective": BASE}
    entries = {}
    for measure in dict.fromkeys(slot.measure for slot in slots):
        if not isinstance(KINDS[measure], Accuracy):
            continue
        values: dict[int, float] = {}
        for each in placed:
            if each.run is not None and each.seed not in values and (found := reader.base(each.run, measure)):
                values[each.seed] = found.value
        slot = Slot(measure)
        entry = Entry(values, _published(definition, labels, slot))
        entries[slot] = _with_difference(entry) if comparable else entry
    return Group(labels, {}, True, tuple(placed), entries)


def _value(reader: Reader, run: StoredRun, slot: Slot) -> float | None:
    if slot.statistic is not None:
        return reader.statistic(run, slot.measure, slot.statistic)
    found = reader.at(run, slot.measure, slot.when)
    return None if found is None else found.value


def _why_none(definition: Definition, scale: str, reader: Reader, run: StoredRun, slot: Slot) -> str:
    measure = KINDS[slot.measure]
    if not isinstance(measure, Accuracy):
        return f"{slot.measure} is not logged"
    if (measure.after_training and reader.benchmarks) or (measure.task is not None and reader.lighteval):
        words = next(each for each in definition.evaluate[scale] if measure.task is None or slot.measure in each)
        return f"not evaluated yet: python -m grpo_lab.evaluate run={run.folder} {words}"
    return f"no evaluation gives {slot.measure}" + ("" if slot.when == END else f" {slot.when}")


def _published(definition: Definition, labels: Labels, slot: Slot) -> Published | None:
    for each in definition.published:
        if matches(labels, each.at) and Slot(each.measure, each.statistic, each.when) == slot:
            return each
    return None


def _with_difference(entry: Entry) -> Entry:
    """With ours - published, where both are there and the text states the number as it is."""
    if entry.published is None or entry.published.form != "exact" or entry.mean is None:
        return entry
    return replace(entry, difference=entry.mean - entry.published.value)


def _keys(definition: Definition, labels: Sequence[Labels]) -> tuple[str, ...]:
    """Labels to show: those of rows and columns, and any other that groups differ in."""
    shown = [key for key in (*definition.rows, *definition.columns) if key in CELL_KEYS and key != SEED]
    runs = [each for each in labels if each.get("objective") != BASE]
    others = dict.fromkeys(key for each in runs for key in each)
    more = [key for key in others if key not in shown and len({repr(each.get(key, "")) for each in runs}) > 1]
    return (*shown, *more)
