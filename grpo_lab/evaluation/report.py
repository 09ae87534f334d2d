"""From counts per problem to scores.json of one model on one benchmark, and to the summary of a run and of several."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.atomic import write_atomically
from grpo_lab.evaluation.agreement import SUMMARY as OPINIONS
from grpo_lab.evaluation.answers import Identity
from grpo_lab.evaluation.estimators import (
    bootstrap_means,
    difficulty,
    over_checkpoints,
    over_seeds,
    percentile_interval,
    pooled,
    problem_values,
)
from grpo_lab.evaluation.scoring import Tally, summed
from grpo_lab.seeds import derive

SCORES, SUMMARY = "scores.json", "summary.json"

# scores.json as read.
Result = dict[str, Any]


def make_scores(
    benchmark: str, tallies: Sequence[Tally], ks: Sequence[int], identity: Identity, provenance: Mapping[str, Any]
) -> Result:
    """Everything that scores.json holds. `provenance`: what else is to stand in it."""
    means = _resampled(benchmark, tallies, ks)
    return {
        "benchmark": benchmark,
        **provenance,
        "n": tallies[0].n,
        "scores": summed(tallies, ks),
        "interval_95": _intervals(means, tallies, ks),
        "identity": {"model": identity.model, "settings": dict(identity.settings), "short": identity.short},
        "problems": [asdict(each) for each in tallies],
    }


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")


def earlier_results(root: Path, settings: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """All scores under an evaluation folder that were made with these settings, by benchmark: those of earlier commands
    too. Of several of one model and benchmark (a run that was trained again) the newest."""
    found: dict[tuple[str, str], Result] = {}
    paths = sorted(root.glob(f"*/*/{SCORES}"), key=lambda path: path.stat().st_mtime_ns)
    for path in paths:
        result = json.loads(path.read_bytes())
        if settings.get(result["benchmark"]) == result["identity"]["settings"]:
            found[result["target"], result["benchmark"]] = result
    return list(found.values())


def earlier_opinions(root: Path, results: Iterable[Result]) -> list[dict[str, Any]]:
    """lighteval's rows about the models and benchmarks of `results`, from the files beside their scores."""
    found = []
    known = {(each["target"], each["benchmark"], each["identity"]["short"]) for each in results}
    for path in sorted(root.glob(f"*/*/{OPINIONS}")):
        scores = path.with_name(SCORES)
        if not scores.is_file():
            continue
        of = json.loads(scores.read_bytes())
        if (of["target"], of["benchmark"], of["identity"]["short"]) in known:
            document = json.loads(path.read_bytes())
            about = {name: value for name, value in document.items() if name != "tasks"}
            found += [{**about, **task} for task in document["tasks"]]
    return found


def seconds_in(path: Path) -> dict[str, float] | None:
    """The seconds that a scores.json tells; None where there is none."""
    if not path.is_file():
        return None
    seconds: dict[str, float] | None = json.loads(path.read_bytes())["seconds"]
    return seconds


def summarise(results: Sequence[Result], ks: Sequence[int]) -> dict[str, Any]:
    """The rows of a run, by update, and what they are over its checkpoints; all worked out anew from the counts."""
    base = {each["benchmark"]: each for each in results if each["target"] == "base"}
    rows = [_row(group, base, ks) for group in _by_target(results)]
    rows.sort(key=lambda row: (row["update"] is None, row["update"] or 0, row["target"] != "base", row["target"]))
    checkpoints = [row for row in rows if row["update"] is not None and row["target"] != "base"]
    return {"k": list(ks), "rows": rows, "over_checkpoints": _over_checkpoints(checkpoints)}


def summarise_runs(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and sample deviation over runs, at each update and of each score that all of them have."""
    by_run = [
        {(row["target"], name): value for row in summary["rows"] for name, value in headline(row).items()}
        for summary in summaries.values()
    ]
    common = [key for key in by_run[0] if all(key in each for each in by_run[1:])]
    table: dict[str, dict[str, Any]] = {}
    for target, name in common:
        mean, deviation = over_seeds([each[target, name] for each in by_run])
        table.setdefault(target, {})[name] = {"mean": mean, "sd": deviation}
    return {"runs": list(summaries), "over_runs": table}


def flat_row(row: Mapping[str, Any], opinions: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """A summary's row as the metrics of a run take it, one flat name each: all that `headline` has, what became of the
    responses (`math500/response/truncated`), and lighteval's scores (`math500/lighteval/math_500/avg@32`).

    `opinions`: the rows of lighteval.json about the same model.
    """
    flat = {
        f"{benchmark}/{name}": value
        for benchmark, each in row["benchmarks"].items()
        for name, value in each["scores"].items()
    }
    for each in opinions:
        scores = {name: value for name, value in each["scores"].items() if not name.endswith("_stderr")}
        flat |= {f"{each['benchmark']}/lighteval/{each['task']}/{name}": value for name, value in scores.items()}
    return flat | headline(row)


def headline(row: Mapping[str, Any]) -> dict[str, float]:
    """A row's scores by one flat name each: `math500/mean@32`, `average/mean@32`, `split/unsolved/mean@32`."""
    flat = {
        f"{benchmark}/{name}": value
        for benchmark, each in row["benchmarks"].items()
        for name, value in each["scores"].items()
        if name.startswith(("mean@", "pass@"))
    }
    flat |= {f"average/{name}": each["value"] for name, each in row["average"].items()}
    flat |= {
        f"split/{side}/{name}": value for side, each in row["split"].items() for name, value in each["scores"].items()
    }
    return flat


# --- rows ---


def _by_target(results: Iterable[Result]) -> list[list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["target"], []).append(result)
    return list(groups.values())


def _row(results: Sequence[Result], base: Mapping[str, Result], ks: Sequence[int]) -> dict[str, Any]:
    first = results[0]
    tallies = {each["benchmark"]: [Tally(**one) for one in each["problems"]] for each in results}
    means = {name: _resampled(name, each, ks) for name, each in tallies.items()}
    return {
        "target": first["target"],
        "update": first["update"],
        "benchmarks": {
            name: {"scores": summed(each, ks), "interval_95": _intervals(means[name], each, ks)}
            for name, each in tallies.items()
        },
        "average": _average(tallies, means, ks),
        "split": _split(tallies, base, ks),
    }


def _average(
    tallies: Mapping[str, Sequence[Tally]], means: Mapping[str, np.ndarray], ks: Sequence[int]
) -> dict[str, Any]:
    """Problem-weighted over the benchmarks, where there are several."""
    if len(tallies) == 1:
        return {}
    average = {}
    scores = {name: summed(each, ks) for name, each in tallies.items()}
    for column, key in enumerate(_names(next(iter(tallies.values())), ks)):
        value, interval = pooled(
            [(len(each), scores[name][key], means[name][:, column]) for name, each in tallies.items()]
        )
        average[key] = {"value": value, "interval_95": list(interval)}
    return average


def _split(tallies: Mapping[str, Sequence[Tally]], base: Mapping[str, Result], ks: Sequence[int]) -> dict[str, Any]:
    """Scores by the base model's success on each problem, over all benchmarks that it was evaluated on."""
    sides: dict[str, list[Tally]] = {}
    for benchmark, each in tallies.items():
        if benchmark not in base:
            continue
        here = {one.id: one for one in each}
        rates = {one["id"]: one["correct"] / one["n"] for one in base[benchmark]["problems"]}
        for side, names in difficulty(rates).items():
            # A model with another tokenizer may lack a prompt that became too long.
            sides.setdefault(side, []).extend(here[name] for name in names if name in here)
    return {
        side: {"problems": len(each), "scores": {key: summed(each, ks)[key] for key in _names(each, ks)}}
        for side, each in sides.items()
        if each
    }


def _names(tallies: Sequence[Tally], ks: Sequence[int]) -> list[str]:
    """The scores that have intervals, in the order of `problem_values`."""
    return [f"mean@{tallies[0].n}", *(f"pass@{k}" for k in ks)]


def _resampled(benchmark: str, tallies: Sequence[Tally], ks: Sequence[int]) -> np.ndarray:
    """Resampled means of each score. Seeded by the benchmark: the same draws of its problems for every model, and
    draws that are independent of another benchmark's."""
    values = problem_values([each.correct for each in tallies], tallies[0].n, ks)
    return bootstrap_means(values, derive(0, "bootstrap", benchmark))


def _intervals(means: np.ndarray, tallies: Sequence[Tally], ks: Sequence[int]) -> dict[str, list[float]]:
    return dict(zip(_names(tallies, ks), percentile_interval(means).tolist(), strict=True))


def _over_checkpoints(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each score that every checkpoint has (RG tables 2 and 3)."""
    flat = [headline(row) for row in rows]
    if not flat:
        return {}
    names = [name for name in flat[0] if all(name in each for each in flat)]
    return {name: asdict(over_checkpoints([each[name] for each in flat])) for name in names}
