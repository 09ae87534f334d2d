"""Tables: `python -m grpo_lab.tables gg-table4 [scale=tiny] [group=option] [key=value]` runs what a table of the papers
still lacks, by Hydra's own sweep; `... list` names all. Its own words: `scale=tiny|paper` and `dry=true`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.command import errors_on_one_line
from grpo_lab.composition import save_config
from grpo_lab.config import ConfigError
from grpo_lab.launch import run_child
from grpo_lab.ledger import standing
from grpo_lab.runs import CONFIG_FILE, holds_a_run
from grpo_lab.tables.cells import OUTPUTS, Run, runs_of
from grpo_lab.tables.definition import load_definition, targets
from grpo_lab.tables.fields import SCALES
from grpo_lab.tables.pools import missing_pools, record

# Words for a sweep whose runs are not this machine's.
CLUSTER = ("hardware=slurm", "hydra/launcher=submitit_slurm")
USAGE = "usage: python -m grpo_lab.tables <target> [scale=tiny|paper] [dry=true] [group=option] [key=value], or list"


@dataclass(frozen=True, slots=True)
class Request:
    """`extra`: words for the runs. `launch`: words for the sweep that starts them."""

    target: str
    scale: str
    dry: bool
    extra: tuple[str, ...]
    launch: tuple[str, ...]


def main() -> None:
    """The command: exit code 0, 1 where a run did not finish, 2 after an error that names what to mend, 130 after an
    interruption."""
    with errors_on_one_line():
        words = sys.argv[1:]
        if words in (["--help"], ["-h"]):
            print(f"{USAGE}\ndocs/papers.md explains the rest.")
            return
        if words == ["list"]:
            from grpo_lab.tables.render import open_console, show_targets

            show_targets(open_console())
            return
        sys.exit(_run(read_request(words)))


def read_request(words: Sequence[str]) -> Request:
    """Read the command line.

    Raises:
        ConfigError: it names no target, or a word that it does not know.
    """
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(f"which table? {USAGE}. Targets: {', '.join(targets())}")
    scale, dry, extra, launch = "tiny", "false", [], []
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no key=value: {USAGE}")
        if key == "scale":
            scale = value
        elif key == "dry":
            dry = value
        elif key.lstrip("+").startswith("hydra"):
            launch.append(word)
        else:
            extra.append(word)
            if key == "hardware":
                # A preset may bring the launcher that fits it.
                launch.append(word)
    if scale not in SCALES or dry not in ("true", "false"):
        raise ConfigError(f"scale={scale} dry={dry}: scale is {' or '.join(SCALES)}, dry true or false")
    return Request(words[0], scale, dry == "true", tuple(extra), tuple(launch))


def _run(request: Request) -> int:
    definition = load_definition(request.target)
    if any("," in word and not any(c in word for c in "[{(") for word in request.extra):
        raise ConfigError(f"the cells of {request.target} are its sweep: give one value a key, not {request.extra}")
    runs = runs_of(definition, request.scale, request.extra)
    # Only now: rich takes a while to load.
    from grpo_lab.tables.render import open_console, show_failures, show_runs

    console = open_console()
    found = [standing(run.folder) for run in runs]
    show_runs(console, definition, runs, found)
    todo = [run for run, each in zip(runs, found, strict=True) if each.state not in ("finished", "running")]
    if request.dry or not todo:
        return 0
    pools = missing_pools([run.pool for run in todo if run.pool is not None])
    if pools and any(word in CLUSTER for word in request.launch):
        raise ConfigError(
            f"{request.target} learns from pools that are not there, and its work goes to a cluster: submit "
            f"this first: {'; '.join(' '.join(pool.command) for pool in pools)}"
        )
    record(pools)
    _sweep(todo, request)
    after = [(run, each) for run in todo if (each := standing(run.folder)).state not in ("finished", "running")]
    if after:
        show_failures(console, *zip(*after, strict=True))
    print(f"{request.target}: {len(runs) - len(after)} of {len(runs)} runs are finished or under way")
    return 1 if after else 0


def _sweep(runs: Sequence[Run], request: Request) -> None:
    """Start the runs as one sweep, and wait for it. Each goes on where it stands; what went wrong is in its folder."""
    for run in runs:
        # Where something was logged already, its settings stay as they were: all that decide results are equal.
        if not holds_a_run(run.folder):
            run.folder.mkdir(parents=True, exist_ok=True)
            save_config(run.config, run.folder / CONFIG_FILE)
    place = OUTPUTS / request.scale / "sweep"
    words = [
        f"resume={','.join(str(run.folder) for run in runs)}",
        f"hydra.sweep.dir={place}",
        "hydra.sweep.subdir=.",
        *request.launch,
    ]
    run_child([sys.executable, "-m", "grpo_lab.train", "-m", *words], {})


if __name__ == "__main__":
    main()
