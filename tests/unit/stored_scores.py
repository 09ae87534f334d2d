"""Files of scores made by hand, as `python -m grpo_lab.evaluate` leaves them beside a run's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def leave_scores(run: Path, model: str, place: str, correct: Sequence[int], n: int = 4, **settings: Any) -> Path:
    """Right responses of n to each problem. `place`: the benchmark's folder, `math500` or `math500-0badcafe`."""
    folder = run / "evaluation" / model / place
    folder.mkdir(parents=True)
    problems = [{"id": f"q{k}", "n": n, "correct": c} for k, c in enumerate(correct)]
    identity = {"model": "0123", "settings": {"n": n, "seed": 1, **settings}, "short": "0badcafe"}
    document = {"benchmark": place.partition("-")[0], "n": n, "problems": problems, "identity": identity}
    (folder / "scores.json").write_text(json.dumps(document))
    return folder


def leave_opinion(
    run: Path, model: str, update: int, place: str, scores: Mapping[str, float], n: int, **settings: Any
) -> Path:
    """lighteval's scores by task, beside ours of one problem."""
    folder = leave_scores(run, model, place, [0], n, **settings)
    tasks = [
        {"task": task, "n": n, "scores": {f"avg@{n}" if n > 1 else "pass@1": score}} for task, score in scores.items()
    ]
    (folder / "lighteval.json").write_text(json.dumps({"target": model, "update": update, "tasks": tasks}))
    return folder
