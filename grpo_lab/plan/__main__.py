"""Plan: `python -m grpo_lab.plan [group=option] [key=value]`, with the words of the run that is planned. No model is
loaded. Its own words are in options.py and docs/plan.md."""

from __future__ import annotations

import json
import sys

from grpo_lab.command import composed_for_one, errors_on_one_line
from grpo_lab.plan.options import take_options
from grpo_lab.plan.report import make_plan

NO_SWEEP = "a plan is of one run: leave out -m"


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    with errors_on_one_line():
        options, rest = take_options(sys.argv[1:])
        for config, overrides in composed_for_one(rest, help_file="grpo_lab_plan", no_sweep=NO_SWEEP):
            plan = make_plan(config, overrides, options)
            if options.json:
                print(json.dumps(plan.as_json(), indent=2))
            else:
                # Only now: rich takes a while to load.
                from grpo_lab.plan.render import show

                show(plan)


if __name__ == "__main__":
    main()
