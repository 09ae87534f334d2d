"""Reports: `python -m grpo_lab.report <target ... | all | run folders | sweep folder> [scale=tiny|paper]
[out=outputs/reports] [group=option] [key=value]`. docs/reports.md explains the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.atomic import write_atomically
from grpo_lab.command import errors_on_one_line
from grpo_lab.config import ConfigError
from grpo_lab.ledger import short_hash
from grpo_lab.report.addenda import draw_figures
from grpo_lab.report.collate import collate
from grpo_lab.report.document import Written, write_failure, write_report
from grpo_lab.report.index import index_page
from grpo_lab.report.placing import choose
from grpo_lab.report.render import csv_text, latex
from grpo_lab.report.several import make_runs_page, run_folders
from grpo_lab.report.stored import Shelf, UnreadableRun
from grpo_lab.tables.definition import load_definition, targets
from grpo_lab.tables.fields import SCALES

OUT = "outputs/reports"
ALL = "all"
# The exit code of a command that could not do all that it was asked.
FAILED = 2
USAGE = (
    "usage: python -m grpo_lab.report <target ... | all | run folders | sweep folder> [scale=tiny|paper] "
    f"[out={OUT}] [group=option] [key=value]"
)


@dataclass(frozen=True, slots=True)
class Request:
    """`targets` or `folders`: one of them is empty. `words`: of the runs that targets ask for."""

    targets: tuple[str, ...]
    folders: tuple[Path, ...]
    scale: str
    out: Path
    words: tuple[str, ...]


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    with errors_on_one_line():
        words = sys.argv[1:]
        if words in (["--help"], ["-h"]):
            print(f"{USAGE}\ndocs/reports.md explains the rest.")
            return
        request = read_request(words)
        if request.folders:
            print(report_on_runs(request), end="")
            return
        written = report_on_targets(request)
        page = written[0].page if len(written) == 1 else index_page(request.scale, written, request.words)
        print(page, end="")
        print(f"\nwritten to {request.out / request.scale}", file=sys.stderr)
        errors = [f"{each.target}: {each.error}" for each in written if each.error is not None]
        for each in errors:
            print(f"error: {each}", file=sys.stderr)
        if errors:
            sys.exit(FAILED)


def read_request(words: Sequence[str]) -> Request:
    """Read the command line.

    Raises:
        ConfigError: it names nothing, both targets and folders, or a scale that there is not.
    """
    names = [word for word in words if "=" not in word]
    keyed = [word.partition("=") for word in words if "=" in word]
    # Words of a sweep, which `make <target>` hands to both commands.
    own = {key: value for key, _, value in keyed if key in ("scale", "out", "dry")}
    rest = [f"{key}={value}" for key, _, value in keyed if key not in own and not key.lstrip("+").startswith("hydra")]
    if not names or any(name.startswith("-") for name in names):
        raise ConfigError(f"a report of what? {USAGE}. Targets: {', '.join(targets())}")
    scale = own.get("scale", "tiny")
    if scale not in SCALES:
        raise ConfigError(f"scale={scale}: choose {' or '.join(SCALES)}")
    known = {*targets(), ALL}
    chosen = [name for name in names if name in known]
    folders = [Path(name) for name in names if name not in known]
    if chosen and folders:
        raise ConfigError(f"{folders[0]} is no table or figure: name targets or folders of runs, not both")
    if folders and rest:
        raise ConfigError(f"{rest[0]} is of the runs that targets ask for: leave it out beside folders")
    picked = targets() if ALL in chosen else chosen
    return Request(tuple(dict.fromkeys(picked)), tuple(folders), scale, Path(own.get("out", OUT)), tuple(rest))


def report_on_targets(request: Request) -> list[Written]:
    """Write the reports of targets, and of all of them an index. Each run is read once; a target with a run that cannot
    be read has a page that says so.

    Raises:
        ConfigError: a word that is not of the targets' runs.
    """
    shelf, folder = Shelf(), request.out / request.scale
    written = [_report_on(target, request, shelf, folder) for target in request.targets]
    if len(written) == len(targets()):
        # Runs with other settings are none of the canonical index.
        mark = f"-{short_hash({'words': list(request.words)})}" if any(w.name != w.target for w in written) else ""
        write_atomically(folder / f"index{mark}.md", index_page(request.scale, written, request.words).encode())
    return written


def _report_on(target: str, request: Request, shelf: Shelf, folder: Path) -> Written:
    definition = load_definition(target)
    try:
        return write_report(collate(definition, request.scale, shelf, request.words), folder, draw_figures)
    except UnreadableRun as error:
        return write_failure(definition, choose(definition, request.scale, request.words).name, error, folder)


def report_on_runs(request: Request) -> str:
    """Write the table of runs by their folders, and return its page."""
    found = list({each.resolve(): each for folder in request.folders for each in run_folders(folder)}.values())
    name = request.folders[0].resolve().name if len(request.folders) == 1 else "runs"
    page, grid = make_runs_page(f"Runs: {name}", found, Shelf())
    request.out.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".md", page), (".csv", csv_text(grid)), (".tex", latex(grid, f"Runs: {name}", name))):
        write_atomically(request.out / f"{name}{suffix}", text.encode())
    return page


if __name__ == "__main__":
    main()
