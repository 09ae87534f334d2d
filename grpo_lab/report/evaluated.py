"""What `python -m grpo_lab.evaluate` left in a run's folder: scores of its models on benchmarks, by our verifier and by
lighteval, and what the answers behind them depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.report.stored import Counts, UnreadableRun, counts_of, read_json

# As the evaluation writes them; its modules load what learns.
EVALUATION, SCORES, LIGHTEVAL = "evaluation", "scores.json", "lighteval.json"
# A run's answers are sampled by its own seed, as its training is.
OF_THE_RUN = ("seed",)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """A model's counts on a benchmark. `settings`: what its answers depend on besides the model and the run's seed."""

    counts: Counts
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opinion:
    """lighteval's share of right responses for the model at an update (None: none of the run's); `settings` as of
    `Evaluated`."""

    update: int | None
    score: float
    settings: Mapping[str, Any]


def evaluated_on(folder: Path, model: str, benchmark: str, n: int) -> Evaluated | None:
    """A model's counts on a benchmark with n responses a problem; None where it was not evaluated so. Of several (a run
    that was trained again) the newest.

    `folder`: the run's. `model`: `update_000160` or `base`.

    Raises:
        UnreadableRun: a file of scores cannot be read.
    """
    paths = (folder / EVALUATION / model).glob(f"*/{SCORES}")
    for path in _newest_first(paths):
        found = read_json(path)
        try:
            if found["benchmark"] == benchmark and found["n"] == n:
                return Evaluated(counts_of(found["problems"], path), _settings(found))
        except KeyError as error:
            raise UnreadableRun(f"{path} has no {error}: evaluate again, python -m grpo_lab.evaluate") from error
    return None


def lighteval_opinions(folder: Path, task: str, n: int) -> dict[str, Opinion]:
    """lighteval's scores on one of its own tasks with n responses a problem, for each model of a run that it judged, by
    the model's name; of several of one model the newest. Empty where it judged none so.

    They are read from beside the answers of each model and benchmark, where later evaluations of others leave them.

    Raises:
        UnreadableRun: a file cannot be read, or the scores beside it are missing.
    """
    found: dict[str, Opinion] = {}
    for path in _newest_first((folder / EVALUATION).glob(f"*/*/{LIGHTEVAL}")):
        document = read_json(path)
        try:
            rows = [row for row in document["tasks"] if row["task"] == task and row["n"] == n]
            for row in rows:
                scores = row["scores"]
                score = scores[f"avg@{n}"] if f"avg@{n}" in scores else scores["pass@1"]
                settings = _settings(read_json(path.with_name(SCORES)))
                found.setdefault(document["target"], Opinion(document["update"], float(score), settings))
        except (KeyError, TypeError) as error:
            raise UnreadableRun(f"{path} or the {SCORES} beside it has no {error}: evaluate again") from error
    return found


def _settings(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in scores["identity"]["settings"].items() if key not in OF_THE_RUN}


def _newest_first(paths: Iterator[Path]) -> list[Path]:
    return sorted(paths, key=lambda each: (each.stat().st_mtime_ns, each), reverse=True)
