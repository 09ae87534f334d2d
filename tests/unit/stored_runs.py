"""Run folders made by hand, as a run leaves them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.composition import save_config
from grpo_lab.config import TrainConfig
from grpo_lab.report.collate import Collated, Group
from grpo_lab.tables.cells import runs_of
from grpo_lab.tables.definition import Definition, matches

# Values of a column at updates 1, 2, ...; None: not logged there.
Columns = Mapping[str, Sequence[float | None]]


def leave_run(
    folder: Path,
    config: TrainConfig,
    columns: Columns,
    evaluations: Mapping[int, Sequence[int]],
    *,
    n: int = 4,
    status: str = "finished",
    hours: float = 0.5,
    dirty: bool = False,
) -> Path:
    """`evaluations`: right responses of n to each problem, by update."""
    folder.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    rows = [
        {"kind": "update", "update": u + 1} | {k: each[u] for k, each in columns.items() if each[u] is not None}
        for u in range(max(len(each) for each in columns.values()))
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "evaluations").mkdir()
    for update, correct in evaluations.items():
        problems = [{"id": f"p{k}", "correct": c, "n": n} for k, c in enumerate(correct)]
        path = folder / "evaluations" / f"update_{update:06d}.json"
        path.write_text(json.dumps({"update": update, "problems": problems}))
    (folder / "summary.json").write_text(json.dumps({"status": status, "seconds_total": 3600 * hours}))
    session = {
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["python", "-m", "grpo_lab.train"],
        "git": {"commit": "0123456789abcdef", "dirty": dirty},
        "host": "here",
    }
    (folder / "provenance.json").write_text(json.dumps({"sessions": [session]}))
    return folder


def leave_cells(
    definition: Definition,
    labels: Mapping[str, Any],
    evaluations: Mapping[int, Sequence[int]],
    *,
    scale: str = "tiny",
    columns: Columns | None = None,
    **more: Any,
) -> list[Path]:
    """The runs of a table's cells that have these labels, in the folders where the table looks for them."""
    logged = columns or {"entropy": [0.5] * max(evaluations)}
    return [
        leave_run(run.folder, run.config, logged, evaluations, **more)
        for run in runs_of(definition, scale, [])
        if matches(run.cell.labels, labels)
    ]


def groups_of(collated: Collated, labels: Mapping[str, Any]) -> list[Group]:
    """The groups of a collated table that have these labels."""
    return [group for group in collated.groups if matches(group.labels, labels)]
