"""Plan: `python -m grpo_lab.plan [group=option] [key=value]`, with the words of the run that is planned. No model is
loaded. Its own words are in options.py and docs/plan.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lab.command import composed, errors_on_one_line
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.plan.options import take_options
from grpo_lab.plan.report import make_plan

# What makes --help describe this command.
HELP, HELP_FLAGS = "hydra/help=grpo_lab_plan", ("--help", "-h")


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    with errors_on_one_line():
        options, rest = take_options(sys.argv[1:])
        if any(word in HELP_FLAGS for word in rest):
            rest = [*(word for word in rest if word not in HELP_FLAGS), HELP, HELP_FLAGS[0]]
        sys.argv[1:] = rest
        for config, overrides in composed(_refuse):
            plan = make_plan(config, overrides, options)
            if options.json:
                print(json.dumps(plan.as_json(), indent=2))
            else:
                # Only now: rich takes a while to load.
                from grpo_lab.plan.render import show

                show(plan)


def _refuse(_config: TrainConfig, _folder: Path, _words: Sequence[str]) -> None:
    raise ConfigError("a plan is of one run: leave out -m")


if __name__ == "__main__":
    main()
