"""What a table or figure of a paper consists of: `conf/tables/<target>.yaml`, typed.

A cell is one run: the words that set it apart within the table's experiment. Its labels are the paper's values, also
where a smaller scale sets others; published numbers and orderings name cells by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from grpo_lab.composition import conf_dir
from grpo_lab.config import ConfigError
from grpo_lab.tables.fields import SCALES, Fields
from grpo_lab.tables.when import END, PLACES, When

# What a row or a point may show. Evaluations while training are of the run's own held-out problems (MATH-500, or the
# made task's); measures of training are means over the definition's `window` of last updates where a table has them.
MEASURES = {
    "average": "mean@32 of the final checkpoint, over all problems of `evaluate`, else over the run's held-out ones",
    **{f"pass@{k}": f"pass@{k} of the final checkpoint, over the same problems" for k in (1, 4, 8, 16, 32)},
    "mean": "mean@n of the evaluations while training",
    "best": "best@32 of the evaluations while training",
    "pass@1 of 50": "share of right answers over 50 samples, test split, while training",
    "instability": "root mean square of how far an evaluation is off the mean of its neighbours, second half of a run",
    "aime24": "AIME 2024, pass@1, lighteval, each checkpoint",
    "math500": "MATH-500, extractive match, lighteval, each checkpoint",
    "solvable": "mean@32 of problems with 0 < p0 <= 0.75",
    "unsolved": "share of problems with p0 = 0 that 32 samples solve",
    "k3": "token-mean K3",
    "ess": "normalised sequence ESS",
    "drift": "token mean of the absolute log ratio to the behaviour policy",
    "gradient norm": "of the actor, in the objective's own scale",
    "entropy": "of the policy, nats",
    "length": "mean response tokens",
    "responses": "generated, whole run, discarded ones included",
    "reward": "mean over retained training responses",
    "iterations/s": "updates a second after the table's longest sync period, evaluations and checkpoints left out",
    "reference KL": "token mean of the value of GRPO's penalty, before beta",
    "log ratio": "mean sequence log ratio to the reference, nats",
    "within-success ESS": "of the weights among right responses, in groups with two or more, their mean",
    "median within-success ESS": "the same, the median of an update's groups",
    "groups with two right": "share of groups with two or more right responses",
    "raw loss": "of a group, before normalisation",
    "q-ESS": "1 / sum q^2 of a group, median",
}
# Over the checkpoints of a run, in the order of RG's tables.
STATISTICS = ("minimum", "maximum", "median", "mean")
# How a text states a number: as it is, by its order of magnitude, or as a bound from above.
FORMS = ("exact", "order", "below")
TRENDS = ("rises", "falls", "flat")
RELATIONS = (">", "<", "~", "<=", *TRENDS)
# Words that a definition's cells may set; each is one of the run's.
CELL_KEYS = (
    "objective",
    "model",
    "seed",
    "group_size",
    "objective.beta",
    "objective.zero_variance",
    "schedule.v",
    "schedule.i",
    "schedule.t_ref",
    "schedule.updates",
    "learner.lr",
    "dataset.data_seed",
)

Labels = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `labels`: as the paper names it; `words`: what sets it apart, at the scale that was asked for."""

    labels: Labels
    words: Labels


@dataclass(frozen=True, slots=True)
class Published:
    """A number that a paper's text states for the cells that have these labels. `statistic`: over a run's checkpoints,
    where it is one. `when`: at the end, unless said. `form`: how the text states it."""

    at: Labels
    measure: str
    value: float
    source: str
    statistic: str | None = None
    when: When = END
    form: str = "exact"
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Ordering:
    """A comparison that a paper states. `relation`: of left to right (`~`: equal, `<=`: not above), or a trend of
    `left` alone. `margin`: by how much, in the measure's unit. `when`: at the end, unless said. `less`: what each side
    is above, itself with these labels: gains are compared. `than`: the right side's measure, where it is another.
    `each_benchmark`: of each by itself, where final scores are of several."""

    left: Labels
    right: Labels | None
    relation: str
    measure: str
    source: str
    margin: float | None = None
    when: When = END
    less: Labels | None = None
    than: str | None = None
    each_benchmark: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A target of `make`. `rows` and `columns`: cell keys, as the paper lays them out (a column may be a measure).
    `also`: rows that are no runs. `evaluate`: by scale, the words of each `python -m grpo_lab.evaluate run=<folder>`
    that final scores come from. `window`: last updates that measures of training are averaged over, by scale.
    `at_updates`: evaluations that it shows, besides the last one. `hours`: of the paper, for one run."""

    target: str
    paper: str
    label: str
    title: str
    experiment: str | None
    measures: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    grids: tuple[Mapping[str, Any], ...]
    published: tuple[Published, ...]
    orderings: tuple[Ordering, ...]
    remarks: tuple[str, ...]
    also: tuple[str, ...]
    at_updates: tuple[int, ...]
    evaluate: Mapping[str, tuple[str, ...]]
    window: Mapping[str, int]
    hardware: str | None
    hours: float | None

    def cells(self, scale: str) -> list[Cell]:
        """The runs at a scale, in order, each once."""
        found: list[Cell] = []
        for grid in self.grids:
            if grid.get("only", scale) == scale:
                found += [cell for cell in _product(grid, scale) if cell not in found]
        return found


def targets() -> list[str]:
    """The names of all definitions."""
    return sorted(path.stem for path in (conf_dir() / "tables").glob("*.yaml"))


def load_definition(target: str) -> Definition:
    """Read and check `conf/tables/<target>.yaml`.

    Raises:
        ConfigError: there is none, or a key is wrong; names the file and the key.
    """
    if target not in targets():
        raise ConfigError(f"there is no table or figure {target!r}: choose {', '.join(targets())}")
    path = conf_dir() / "tables" / f"{target}.yaml"
    return read_definition(path)


def read_definition(path: Path) -> Definition:
    """The same of any file."""
    try:
        raw = safe_load(path.read_text())
    except YAMLError as error:
        raise ConfigError(f"{path.name}: {' '.join(str(error).split())}") from error
    fields = Fields(path.name, "", raw)
    definition = Definition(
        target=path.stem,
        paper=fields.one_of("paper", ("rg", "gg", "own")),
        label=fields.take("label", str),
        title=fields.take("title", str),
        experiment=fields.maybe("experiment", str),
        measures=tuple(fields.each_of("measures", tuple(MEASURES))),
        rows=tuple(fields.each_of("rows", CELL_KEYS)),
        columns=tuple(fields.each_of("columns", (*CELL_KEYS, *MEASURES, "update"))),
        grids=_grids(path, fields),
        published=tuple(_published(each) for each in fields.parts("published")),
        orderings=tuple(_ordering(each) for each in fields.parts("orderings")),
        remarks=tuple(fields.maybe("remarks", list) or ()),
        also=tuple(fields.maybe("also", list) or ()),
        at_updates=tuple(fields.numbers("at_updates")),
        evaluate={
            scale: (words,) if isinstance(words, str) else tuple(words)
            for scale, words in fields.scaled("evaluate", str, list).items()
        },
        window=fields.scaled("window", int),
        hardware=fields.maybe("hardware", str),
        hours=fields.maybe("hours", float, int),
    )
    fields.end()
    _check(path.name, definition)
    return definition


def matches(labels: Labels, at: Labels) -> bool:
    """Whether a cell is among those that `at` names; a list names several."""
    return all(
        key in labels and labels[key] in (each if isinstance(each, list) else [each]) for key, each in at.items()
    )


def _grids(path: Path, fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """The grids of `cells`; another target's name stands for its cells."""
    if not isinstance(name := fields.raw.get("cells"), str):
        return tuple(_grid(each) for each in fields.parts("cells"))
    del fields.raw["cells"]
    other = path.with_name(f"{name}.yaml")
    if not other.is_file():
        raise fields.fail("cells", f"is {name!r}, which is no other target")
    return read_definition(other).grids


def _grid(fields: Fields) -> dict[str, Any]:
    grid: dict[str, Any] = {}
    if fields.raw.get("only") is not None:
        grid["only"] = fields.one_of("only", SCALES)
    for key in list(fields.raw):
        value = fields.raw.pop(key)
        if key not in CELL_KEYS:
            raise fields.fail(str(key), f"is no key of a cell: choose from {', '.join(CELL_KEYS)}")
        values = value if isinstance(value, list) else [value]
        for each in values:
            if isinstance(each, dict) and set(each) != set(SCALES):
                raise fields.fail(key, f"must give a value for each of {', '.join(SCALES)}, not {each!r}")
        grid[key] = values
    return grid


def _product(grid: Mapping[str, Any], scale: str) -> Iterator[Cell]:
    keys = [key for key in grid if key != "only"]
    for values in itertools.product(*(grid[key] for key in keys)):
        pairs = list(zip(keys, values, strict=True))
        yield Cell(
            labels={key: value["paper"] if isinstance(value, dict) else value for key, value in pairs},
            words={key: value[scale] if isinstance(value, dict) else value for key, value in pairs},
        )


def _published(fields: Fields) -> Published:
    found = Published(
        at=fields.take("at", dict),
        measure=fields.one_of("measure", tuple(MEASURES)),
        value=float(fields.take("value", float, int)),
        source=fields.take("source", str),
        statistic=fields.maybe_one_of("statistic", STATISTICS),
        when=fields.when(),
        form=fields.maybe_one_of("form", FORMS) or "exact",
        note=fields.maybe("note", str),
    )
    fields.end()
    if found.when.phrase not in PLACES:
        raise fields.fail("when", f"must be {' or '.join(PLACES)} for a number, not {found.when}")
    return found


def _ordering(fields: Fields) -> Ordering:
    found = Ordering(
        left=fields.take("left", dict),
        right=fields.maybe("right", dict),
        relation=fields.one_of("relation", RELATIONS),
        measure=fields.one_of("measure", tuple(MEASURES)),
        source=fields.take("source", str),
        margin=fields.maybe("margin", float, int),
        when=fields.when(),
        less=fields.maybe("less", dict),
        than=fields.maybe_one_of("than", tuple(MEASURES)),
        each_benchmark=bool(fields.maybe("each_benchmark", bool)),
    )
    fields.end()
    if found.less is not None and found.relation not in (">", "<"):
        raise fields.fail("less", f"goes with relations > and <, not {found.relation!r}")
    if found.than is not None and (found.right is None or found.when != END):
        raise fields.fail("than", "goes with a right side, at the end of runs")
    if found.relation in TRENDS and found.when.phrase in PLACES:
        raise fields.fail("when", f"must be a stretch of updates for relation {found.relation!r}, not {found.when}")
    if (found.right is None) != (found.relation in TRENDS):
        raise fields.fail(
            "right", f"does not go with relation {found.relation!r}: a trend has none, the others have one"
        )
    return found


def _check(file: str, definition: Definition) -> None:
    """Numbers and orderings name cells that are there, by measures that are the table's."""
    cells = [cell.labels for scale in SCALES for cell in definition.cells(scale)]
    cells += [{"objective": each} for each in definition.also]
    named = [(f"published[{k}].at", each.at, each.measure) for k, each in enumerate(definition.published)]
    for k, each in enumerate(definition.orderings):
        named.append((f"orderings[{k}].left", each.left, each.measure))
        if each.right is not None:
            named.append((f"orderings[{k}].right", each.right, each.than or each.measure))
        if each.less is not None and each.right is not None:
            named.append((f"orderings[{k}].less, left", {**each.left, **each.less}, each.measure))
            named.append((f"orderings[{k}].less, right", {**each.right, **each.less}, each.than or each.measure))
    for where, at, measure in named:
        if measure not in definition.measures:
            raise ConfigError(f"{file}: {where} is of {measure!r}, which measures does not name")
        if cells and not any(matches(labels, at) for labels in cells):
            raise ConfigError(f"{file}: {where} names no cell: {at}")
