"""Make a pool: `python -m grpo_lab.pool out=<folder> [groups=N] [group=option] [key=value]`, or `import=<file>`:
docs/pools.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lab.command import composed_for_one, errors_on_one_line
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import place_from_environment
from grpo_lab.ledger import sampling_settings, short_hash
from grpo_lab.pool.options import Request, check_request, groups_wanted, settings, take_request
from grpo_lab.process import set_threads, set_up_process

NO_SWEEP = "-m makes sweeps, which are of training: make one pool at a time"


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    with errors_on_one_line():
        request, rest = take_request(sys.argv[1:])
        for config, overrides in composed_for_one(rest, help_file="grpo_lab_pool", no_sweep=NO_SWEEP):
            _make(request, config, overrides)


def _make(request: Request, config: TrainConfig, overrides: Sequence[str]) -> None:
    if place_from_environment() is not None:
        raise ConfigError("a pool is made by one process: start it without torchrun or srun")
    out = check_request(request, overrides)
    config, version = settings(request, config)
    wanted = groups_wanted(request, config) if request.file is None else 0
    set_threads(config)
    # Only now the heavy libraries: a wrong setting has failed by here.
    from grpo_lab.distributed import World
    from grpo_lab.pool.draft import Draft
    from grpo_lab.pool.importing import import_pool
    from grpo_lab.pool.record import record

    set_up_process(config, World())
    try:
        if request.file is not None:
            header = import_pool(config, Path(request.file), out, version=version, tell=_Terminal())
        else:
            # The epochs of a budget bound what the prompts give.
            named = f"{short_hash(sampling_settings(config))} {wanted} {version} {config.schedule.epochs}"
            with Draft.opened(out, settings=named) as draft:
                header = record(config, draft, wanted=wanted, version=version, tell=_Terminal())
    except KeyboardInterrupt:
        _say("interrupted: the same command " + ("begins again" if request.file else "goes on where it stopped"))
        raise
    _say(
        f"{out}: {header.groups} groups of {header.group_size} ({header.mixed} mixed), {header.tokens} tokens, content "
        f"{header.content[:12]}"
    )
    print(f"python -m grpo_lab.train source=pool pool.path={out}", flush=True)


class _Terminal:
    def message(self, text: str) -> None:
        _say(text)

    def warning(self, text: str) -> None:
        _say(f"warning: {text}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
