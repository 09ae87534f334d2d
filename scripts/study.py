"""The figures of docs/results/study.md that are in no table: `python -m scripts.study`, from the runs of the tiny
scale in outputs/papers/tiny. A run that is not there is left out and named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.config import ArithmeticConfig, GgpoConfig
from grpo_lab.prompts.arithmetic import make_problems
from grpo_lab.report.inference import interval_over_problems, off_neighbours
from grpo_lab.report.stored import METRICS, Shelf, StoredRun, UnreadableRun
from grpo_lab.schedule import Schedule
from grpo_lab.tables.cells import runs_of
from grpo_lab.tables.definition import load_definition, matches

METHODS = ("grpo", "agro", "ggpo")
# Updates between refreshes of AGRO and GGPO at every N of table 4; GRPO, which has none, is read in the same periods.
REFRESH = 160


def main() -> None:
    """Print its parts as Markdown."""
    shelf = Shelf()
    small: dict[str, Any] = {"model": "qwen3_1_7b_base"}
    near = {name: _finished(shelf, "gg-table1", {**small, "objective": name}) for name in METHODS}
    far = {"grpo": _finished(shelf, "gg-table4", {"objective": "grpo", "schedule.v": 128})}
    aligned = {"schedule.v": 128, "schedule.t_ref": 128}
    far |= {name: _finished(shelf, "gg-table4", {**aligned, "objective": name}) for name in ("agro", "ggpo")}
    refreshed = {
        f"T_ref {each or 'none'}": _finished(
            shelf, "gg-table2", {"objective": "grpo", "schedule.t_ref": each, "seed": 42}
        )
        for each in (None, 160, 320)
    }
    parts = [
        by_digits("N = 8", near),
        by_digits("N = 128, T_ref 128", far),
        by_digits("GRPO at N = 8", refreshed),
        fixed_reference(shelf),
        by_collection(shelf),
    ]
    print("\n\n".join(parts))


def by_digits(title: str, sides: Mapping[str, Sequence[StoredRun]]) -> str:
    """Right answers, and problems solved in 32, by the digits of a problem's numbers, at the end: of the base model and
    of each side, a mean over its seeds. Under each the first side less another, with its interval over problems."""
    lines = [f"## By digits, {title} ({', '.join(f'{name}: {len(runs)}' for name, runs in sides.items())} seeds)", ""]
    if not all(sides.values()):
        return "\n".join([*lines, "Not all of it is run."])
    first, *others = sides
    some = sides[first][0]
    base = some.evaluations[0].correct / some.evaluations[0].n
    right = {"base": base} | {name: np.mean([_rates(run) for run in runs], axis=0) for name, runs in sides.items()}
    solved = {"base": base > 0} | {
        name: np.mean([_rates(run) > 0 for run in runs], axis=0) for name, runs in sides.items()
    }
    digits = _digits(some)
    for measure, values in (("right", right), ("solved in 32", solved)):
        for number in np.unique(digits):
            mine = digits == number
            means = ", ".join(f"{name} {100 * each[mine].mean():.1f}" for name, each in values.items())
            lines.append(f"- {measure}, {number} digits ({mine.sum()} problems), %: {means}")
            for other in others:
                difference = 100 * (values[first] - values[other])[mine]
                found = interval_over_problems(difference)
                said = "too few problems" if found is None else f"[{found.low:+.1f}, {found.high:+.1f}]"
                lines.append(f"  - {first} less {other} {difference.mean():+.1f} {said}")
    return "\n".join(lines)


def _digits(run: StoredRun) -> np.ndarray:
    """Of the numbers of each held-out problem, in the order of evaluations."""
    assert isinstance(run.config.dataset, ArithmeticConfig)
    digits = {each.id: len(each.question.split("+")[0]) for each in make_problems(run.config.dataset).test}
    return np.array([digits[each] for each in run.evaluations[0].ids])


def fixed_reference(shelf: Shelf) -> str:
    """What GG's zero-loss policy gets where the reference stays the base model, beside GGPO's end."""
    lines = ["## What a fixed reference allows", ""]
    for run in _finished(shelf, "gg-fig8", {"objective": "ggpo", "schedule.t_ref": None}):
        objective = run.config.objective
        assert isinstance(objective, GgpoConfig)
        share = run.evaluations[0].correct / run.evaluations[0].n
        bound, end = 100 * zero_loss_rate(share, objective.beta).mean(), 100 * _rates(run).mean()
        lines.append(f"- beta {objective.beta:g}: at most {bound:.1f} %; GGPO ends at {end:.1f} %")
    return "\n".join(lines)


def zero_loss_rate(share: np.ndarray, beta: float) -> np.ndarray:
    """Share of right answers of the policy whose GGPO loss is zero, by the reference's share s: s e^(1/beta) /
    (1 - s + s e^(1/beta))."""
    odds = share * np.exp(1 / beta)
    return np.asarray(odds / (1 - share + odds))


def by_collection(shelf: Shelf) -> str:
    """How the reward of newly drawn answers goes from collection to collection, after the first refresh."""
    lines = ["## From collection to collection", "", "| method | N | T_ref | rate | swing | alternation, by period |"]
    lines.append("|---|---|---|---|---|---|")
    cells: list[tuple[str, dict[str, Any]]] = [("gg-table4", {"schedule.v": each}) for each in (8, 16, 32)]
    cells.append(("tiny-study", {"schedule.v": 16, "learner.lr": 5e-5}))
    for target, at in cells:
        for run in _finished(shelf, target, {**at, "objective": list(METHODS)}):
            lines.append(_swing(run))
    return "\n".join(lines)


def swing(reward: np.ndarray, period: int) -> tuple[float, list[float]]:
    """How a collection's reward stands off the mean of its neighbours', after the first `period` of collections.

    Returns:
        Its root mean square (other problems alone give some: GRPO's); and, of each whole period, the mean taken by
        turns with the sign - and +, above 0 where its second, fourth, ... collection is the higher one.
    """
    off = off_neighbours(reward)
    place = np.arange(1, len(reward) - 1)
    turned = np.where(place % period % 2 == 1, off, -off)
    alternation = [float(turned[place // period == each].mean()) for each in range(1, len(reward) // period)]
    return float(np.sqrt((off[place >= period] ** 2).mean())), alternation


def _swing(run: StoredRun) -> str:
    schedule = Schedule.from_config(run.config)
    reward = np.array([row["reward/drawn"] for row in _rows(run.folder) if (row["update"] - 1) % schedule.v == 0])
    deviation, alternation = swing(reward, REFRESH // schedule.v)
    cells = (
        f"{run.config.objective.name}, seed {run.config.seed}",
        schedule.v,
        "none" if schedule.t_ref is None else schedule.t_ref,
        f"{run.config.learner.lr:g}",
        f"{deviation:.4f}",
        " ".join(f"{each:+.3f}" for each in alternation),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _finished(shelf: Shelf, target: str, at: Mapping[str, Any]) -> list[StoredRun]:
    """The finished runs of a table's cells; of the others a line says so."""
    found = []
    for run in runs_of(load_definition(target), "tiny", []):
        if matches(run.cell.labels, at):
            try:
                stored = shelf.read(run.folder)
            except UnreadableRun as error:
                print(error, file=sys.stderr)
                continue
            if stored.standing.state == "finished":
                found.append(stored)
            else:
                print(f"{run.folder} is not finished: left out", file=sys.stderr)
    return found


def _rates(run: StoredRun) -> np.ndarray:
    """Share of right answers of the last evaluation, [problems]."""
    last = run.evaluations[max(run.evaluations)]
    return last.correct / last.n


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for line in (folder / METRICS).read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "update":
            yield row


if __name__ == "__main__":
    main()
