"""Evaluate: `python -m grpo_lab.evaluate run=<run folder>`, or `checkpoint=<folder or hub id>`: docs/evaluation.md.

A run is evaluated with its own sampler and settings, but for the keys that are typed. Every answer is kept, and none
that is there is sampled again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_lab.command import composed_for_one, errors_on_one_line
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.evaluation.settings import Request, check_request, run_settings, single_process, take_request
from grpo_lab.launch import place_from_environment
from grpo_lab.process import set_threads, set_up_process

# Where results go: in a run's folder, and those of other models.
RESULTS = "evaluation"
OUTPUTS = Path("outputs") / RESULTS

NO_SWEEP = "-m makes sweeps, which are of training: name several runs as run=A,B"


def main() -> None:
    """The command: exit code 0, 2 after an error that names what to mend, 130 after an interruption."""
    with errors_on_one_line():
        request, rest = take_request(sys.argv[1:])
        for config, overrides in composed_for_one(rest, help_file="grpo_lab_evaluate", no_sweep=NO_SWEEP):
            check_request(request, overrides)
            _evaluate(request, config, overrides)


def _evaluate(request: Request, config: TrainConfig, overrides: Sequence[str]) -> None:
    if place_from_environment() is not None:
        raise ConfigError("an evaluation is one process: start it without torchrun or srun")
    if not request.runs:
        _show(_evaluate_one(request, None, single_process(config), overrides))
        return
    # All of them are checked before the first begins.
    configs = {Path(run): run_settings(Path(run), config, overrides) for run in request.runs}
    summaries: dict[str, dict[str, Any]] = {}
    for run_dir, settings in configs.items():
        summaries |= _evaluate_one(request, run_dir, settings, overrides)
    _show(summaries)


def _evaluate_one(
    request: Request, run_dir: Path | None, config: TrainConfig, overrides: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The summary of a run, or of models by themselves, under its title."""
    set_threads(config)
    # Only now the heavy libraries: a wrong setting has failed by here.
    from grpo_lab.distributed import World
    from grpo_lab.evaluation.stage import Job, evaluate_models
    from grpo_lab.models import prepare_model

    def base() -> str:
        source = prepare_model(config, _say)
        return f"{source}@{config.model.revision}" if source == config.model.id and config.model.revision else source

    set_up_process(config, World())
    root = Path(request.out) if request.out is not None else OUTPUTS if run_dir is None else run_dir / RESULTS
    job = Job(
        config=config,
        run_dir=run_dir,
        wanted=request.checkpoints,
        root=root,
        limit_all=any(override.startswith("evaluation.problems=") for override in overrides),
        base=base,
        row=Path(request.row) if request.row is not None else None,
    )
    try:
        return {str(run_dir or root): evaluate_models(job, _say)}
    except KeyboardInterrupt:
        _say("interrupted: the same command goes on where it stopped")
        raise


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(summaries: dict[str, dict[str, Any]]) -> None:
    from grpo_lab.evaluation.render import of_run, of_runs, show
    from grpo_lab.evaluation.report import SUMMARY, summarise_runs, write_json

    for title, summary in summaries.items():
        show(of_run(title, summary))
    if len(summaries) > 1:
        over = summarise_runs(summaries)
        show(of_runs(over))
        names = "_".join(Path(run).name for run in summaries)
        path = OUTPUTS / names[:150] / SUMMARY
        write_json(path, over)
        _say(f"over runs: {path}")


if __name__ == "__main__":
    main()
