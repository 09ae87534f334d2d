"""The report of one target: a page, its numbers as CSV, its tables as LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.atomic import write_atomically
from grpo_lab.report import layout
from grpo_lab.report.addenda import SUFFIXES, Addendum, addendum_of
from grpo_lab.report.collate import Collated
from grpo_lab.report.measures import KINDS, Accuracy, Training, score_counts, splits
from grpo_lab.report.naming import measure_meaning, measure_name
from grpo_lab.report.orderings import Judged, claim, judge
from grpo_lab.report.placing import PlacedRun
from grpo_lab.report.render import Grid, csv_text, latex, markdown
from grpo_lab.report.stored import StoredRun, UnreadableRun
from grpo_lab.report.verdicts import LEGEND, tally, verdict_grid
from grpo_lab.tables.definition import Definition

# Draws a table's figures into a folder and names their files; none where it has none.
Draw = Callable[[Collated, Path], Sequence[Path]]
NO_DIFFERENCE = {
    "tiny": "No difference to the published numbers is given at this scale: another model, task and budget. Comparable "
    "are the orderings below, within the scale.",
    "paper": "No difference to the published numbers is given: the runs have other settings than the paper's.",
}
ON_SUMS = "Every accuracy that is ours is of a tiny model on held-out sums, whatever task the paper's title names."


@dataclass(frozen=True, slots=True)
class Written:
    """What an index says of a target. `name`: of its files. `claims`: verdicts, each with what tells its ordering from
    others. `used`: the runs that its numbers are of. `error`: why there is no report."""

    target: str
    name: str
    title: str
    state: str
    orderings: str
    page: str
    claims: tuple[tuple[Hashable, str], ...] = ()
    used: tuple[StoredRun, ...] = ()
    error: str | None = None


def write_report(collated: Collated, folder: Path, draw: Draw | None = None) -> Written:
    """Write <name>.md, .csv and .tex into a folder, each whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name, judged = collated.name, judge(collated)
    figures = draw(collated, folder) if draw is not None else ()
    addendum = addendum_of(collated)
    page = make_page(collated, judged, [path.name for path in figures if path.suffix == ".png"], addendum)
    write_atomically(folder / f"{name}.md", page.encode())
    write_atomically(folder / f"{name}.csv", csv_text(layout.numbers(collated)).encode())
    write_atomically(folder / f"{name}.tex", make_latex(collated, addendum).encode())
    if addendum is not None:
        write_atomically(
            folder / f"{name}-{SUFFIXES[collated.definition.target]}.csv", csv_text(addendum.grid).encode()
        )
    used = tuple(each.run for each in collated.placed if each.run is not None)
    claims = tuple((claim(collated, each), each.said) for each in judged)
    title, orderings = title_of(collated.definition), tally([said for _, said in claims])
    return Written(collated.definition.target, name, title, state(collated), orderings, page, claims, used)


def write_failure(definition: Definition, name: str, error: UnreadableRun, folder: Path) -> Written:
    """In place of a report, a page that says why there is none; what is left of an older one goes.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    title, said = title_of(definition), str(error)
    page = f"# {title}\n\nNo report: {said}\n"
    further = [f"-{SUFFIXES[definition.target]}.csv"] if definition.target in SUFFIXES else []
    for end in (".csv", ".tex", ".png", ".svg", *further):
        (folder / f"{name}{end}").unlink(missing_ok=True)
    write_atomically(folder / f"{name}.md", page.encode())
    return Written(definition.target, name, title, "no report", "no report", page, error=said)


def make_page(
    collated: Collated, judged: Sequence[Judged], figures: Sequence[str] = (), addendum: Addendum | None = None
) -> str:
    """The whole report as Markdown."""
    definition = collated.definition
    parts = [f"# {title_of(collated.definition)}", f"`scale={collated.scale}`: {state(collated)}."]
    if collated.words:
        parts.append(f"Runs with `{' '.join(collated.words)}`.")
    if collated.scale == "tiny" and any(isinstance(KINDS[each], Accuracy) for each in definition.measures):
        parts.append(ON_SUMS)
    parts += [f"![{definition.label}]({name})" for name in figures]
    if collated.groups:
        parts += ["## Beside the paper", markdown(layout.comparison(collated)).rstrip()]
        if not collated.comparable:
            parts.append(NO_DIFFERENCE[collated.scale])
        for title, grid in _laid_out(collated):
            parts += [f"## {title}", markdown(grid).rstrip()]
        parts += ["Measures:", "\n".join(_measures(collated))]
    if addendum is not None:
        parts += [f"## {addendum.title}", markdown(addendum.grid).rstrip()]
        parts.append("\n".join(f"- {each}" for each in addendum.notes))
    if judged:
        parts += [
            "## Orderings",
            f"{tally([each.said for each in judged])}.",
            markdown(verdict_grid(collated, judged)).rstrip(),
            LEGEND,
        ]
    if definition.remarks:
        parts += ["## Remarks", "\n".join(f"- {each}" for each in definition.remarks)]
    if collated.placed:
        parts += ["## Runs", markdown(layout.runs(collated)).rstrip()]
        if notes := run_notes(collated):
            parts.append("\n".join(f"- {each}" for each in notes))
        parts += ["## To reproduce", f"```\n{command(collated)}\n```"]
    return "\n\n".join(parts) + "\n"


def make_latex(collated: Collated, addendum: Addendum | None = None) -> str:
    """The tables of numbers, for a document with \\usepackage{booktabs}."""
    target, title = collated.definition.target, title_of(collated.definition)
    added = (
        [] if addendum is None else [latex(addendum.grid, f"{title}. {addendum.title}", f"{target}-{SUFFIXES[target]}")]
    )
    if not collated.groups:
        return "\n".join([f"% {title}: no runs\n", *added])
    tables = [latex(layout.comparison(collated), f"{title}; scale {collated.scale}", target), *added]
    for number, (name, grid) in enumerate(_laid_out(collated), start=1):
        tables.append(latex(grid, f"{title}. {name}", f"{target}-{number}"))
    return "% \\usepackage{booktabs}\n" + "\n".join(tables)


def state(collated: Collated) -> str:
    """How many runs are finished, and where the others stand."""
    placed = collated.placed
    if not placed:
        return "no runs"
    others = [each.state for each in placed if each.run is None]
    said = f"{len(placed) - len(others)} of {len(placed)} runs finished"
    kinds = [f"{others.count(kind)} {kind}" for kind in dict.fromkeys(others)]
    return ", ".join([said, *kinds]) + (" (not used)" if any(kind != "missing" for kind in others) else "")


def command(collated: Collated) -> str:
    """What makes the runs and this report."""
    arguments = f' ARGS="{" ".join(collated.words)}"' if collated.words else ""
    lines = [f"make {collated.definition.target} SCALE={collated.scale}{arguments}"]
    if commands := collated.definition.evaluate.get(collated.scale):
        lines += [f"python -m grpo_lab.evaluate run=<each run's folder> {words}" for words in commands]
        lines.append(f"make tables SCALE={collated.scale}")
    return "\n".join(lines)


def run_notes(collated: Collated) -> list[str]:
    """What was left out, and why."""
    notes = [each for group in collated.groups for each in group.notes]
    for found in collated.mixed.values():
        notes += [f"{each}: orderings are not compared; evaluate all alike" for each in found]
    for each in collated.placed:
        if each.run is None and each.state != "missing":
            notes.append(f"{each.folder}: {each.said}; not used")
        elif each.run is not None:
            notes += _oddities(each)
    return list(dict.fromkeys(notes))


def _oddities(placed: PlacedRun) -> list[str]:
    run = placed.run
    assert run is not None
    odd = [f"{placed.folder}: {count} values of {name} are not finite" for name, count in run.damaged.items()]
    if run.skipped:
        odd.append(f"{placed.folder}: the last line of metrics.jsonl is half written, and left out")
    return odd


def title_of(definition: Definition) -> str:
    """A target's heading."""
    paper = "" if definition.paper == "own" else f"{definition.paper.upper()} "
    return f"{paper}{definition.label}: {definition.title}"


def _laid_out(collated: Collated) -> list[tuple[str, Grid]]:
    """The paper's rows and columns: with our numbers, and with those that its text states."""
    ours = layout.in_layout(collated, layout.ours_text, collated.scale)
    found = [(f"Ours, as the paper lays it out, scale {collated.scale}{_of(name)}", grid) for name, grid in ours]
    if not any(entry.published for group in collated.groups for entry in group.entries.values()):
        return found
    published = layout.in_layout(
        collated,
        lambda group, entry, slot: layout.published_text(entry.published, slot) if group.of_paper else "",
        "paper",
    )
    return found + [(f"Published{_of(name)}", grid) for name, grid in published]


def _of(name: str) -> str:
    return f": {name}" if name else ""


def _measures(collated: Collated) -> list[str]:
    window = collated.reader.window
    scale = collated.scale
    shown = dict.fromkeys(slot.measure for slot in collated.slots)
    lines = [f"- {measure_name(name, scale)}: {measure_meaning(name, scale)}." for name in shown]
    lines += [_split(collated, name) for name in shown if splits(name)]
    if any(isinstance(KINDS[slot.measure], Training) for slot in collated.slots):
        last = "tenth of the updates" if window is None else f"{window} updates"
        lines.append(f"- Measures of training are means over the last {last}.")
    if asked := dict.fromkeys(_asked(run) for each in collated.placed if (run := each.run) is not None):
        lines.append(f"- Held-out problems while training: {' or '.join(asked)}.")
    if any(slot.statistic for slot in collated.slots):
        lines.append("- Over checkpoints: over all evaluations of a run after the untrained model's.")
    return lines


def _split(collated: Collated, name: str) -> str:
    frame = collated.reader.frame
    found = None if frame.split is None else score_counts(name, frame.split, frame.split)
    count = 0 if found is None or found.problems is None else len(found.problems)
    by = "no run was evaluated at update 0" if frame.split_run is None else f"at update 0 of {frame.split_run.folder}"
    return f"- Problems that count for {name}, of all runs alike: {count}, {by}."


def _asked(run: StoredRun) -> str:
    counts = next(iter(run.evaluations.values()), None)
    return "none" if counts is None else f"{len(counts)}, {counts.n} responses each"
