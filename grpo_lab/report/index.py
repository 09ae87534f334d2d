"""The page that says where every target stands."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lab.report.document import Written
from grpo_lab.report.layout import commits_text
from grpo_lab.report.naming import NONE
from grpo_lab.report.render import Grid, markdown
from grpo_lab.report.stored import StoredRun
from grpo_lab.report.verdicts import tally


def index_page(scale: str, written: Sequence[Written], words: Sequence[str] = ()) -> str:
    """Where every target stands, and what all their runs and orderings, which targets share, come to together."""
    rows = tuple(
        (f"[{each.target}]({each.name}.md)", each.title, each.state, _hours_text(each.used), each.orderings)
        for each in written
    )
    grid = Grid(("target", "what", "runs", "hours", "orderings"), rows)
    parts = [f"# Reports, scale={scale}"]
    if words:
        parts.append(f"Runs with `{' '.join(words)}`.")
    parts += [markdown(grid).rstrip(), _orderings(written)]
    runs = list({run.folder: run for each in written for run in each.used}.values())
    if runs:
        commits = dict.fromkeys(commit for run in runs for commit in run.provenance.commits)
        changed = any(run.provenance.dirty for run in runs)
        parts.append(
            f"{len(runs)} finished runs in all, {_hours_text(runs)} hours one after the other, at "
            f"{commits_text(tuple(commits), changed)}. Each is of `make <target> SCALE={scale}`; these pages, of "
            f"`make tables SCALE={scale}`."
        )
    if errors := [each for each in written if each.error is not None]:
        parts.append("\n".join(f"- {each.target} has no report: {each.error}" for each in errors))
    return "\n\n".join(parts) + "\n"


def _orderings(written: Sequence[Written]) -> str:
    """All verdicts, those that several targets state of the same cells and measure once."""
    stated = [each for one in written for each in one.claims]
    verdicts = list(dict(stated).values())
    again = len(stated) - len(verdicts)
    said = f"{again} that a target states once more, with the same cells and measure, not counted"
    return f"Orderings in all, {said}: {tally(verdicts)}." if again else f"Orderings in all: {tally(verdicts)}."


def _hours_text(runs: Sequence[StoredRun]) -> str:
    """Hours of runs, as far as they are recorded."""
    hours = [run.hours for run in runs if run.hours is not None]
    return f"{sum(hours):.1f}" if hours else NONE
