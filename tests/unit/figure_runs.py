"""Run folders made by hand, where a table's cells are looked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.composition import save_config
from grpo_lab.report.collate import Collated, collate
from grpo_lab.report.stored import Shelf
from grpo_lab.runs import CONFIG_FILE
from grpo_lab.tables.cells import Run, runs_of
from grpo_lab.tables.definition import load_definition

# Values of one training row of a run at an update.
Row = Callable[[Run, int], Mapping[str, Any]]
# Right responses of each held-out problem of a run at an update.
Correct = Callable[[Run, int], Sequence[int]]


def write_run(
    run: Run, *, updates: int, row: Row, every: int = 0, correct: Correct | None = None, status: str = "finished"
) -> None:
    """A run of `updates` updates in its folder, under the working directory; n is 4 responses a problem."""
    (run.folder / "evaluations").mkdir(parents=True)
    save_config(run.config, run.folder / CONFIG_FILE)
    lines = [json.dumps({"kind": "update", "update": u, **row(run, u)}) for u in range(1, updates + 1)]
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = {"status": status, "seconds_total": 3600.0}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    for update in range(0, updates + 1, every) if every and correct else ():
        assert correct is not None
        problems = [{"id": f"p{k}", "correct": c, "n": 4} for k, c in enumerate(correct(run, update))]
        document = {"update": update, "problems": problems}
        (run.folder / "evaluations" / f"update_{update:06d}.json").write_text(json.dumps(document))


def write_provenance(folder: Path, started: str, **changes: Any) -> None:
    session = {
        "started": started,
        "command": ["train"],
        "git": {"commit": "0" * 40, "dirty": False},
        "host": "node1",
        "platform": "Linux",
        "cpus": 2,
        "threads": {"hardware.threads": 1},
        **changes,
    }
    (folder / "provenance.json").write_text(json.dumps({"sessions": [session]}))


def cells_of(target: str, scale: str = "tiny") -> list[Run]:
    return runs_of(load_definition(target), scale, [])


def collated(target: str, scale: str = "tiny") -> Collated:
    return collate(load_definition(target), scale, Shelf())
