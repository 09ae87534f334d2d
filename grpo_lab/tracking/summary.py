"""summary.json: a run in a few numbers, rewritten at each evaluation and at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.atomic import write_atomically
from grpo_lab.evaluation.estimators import Spread, over_checkpoints
from grpo_lab.tracking.jsonl import plain_numbers

Scores = dict[str, int | float | None]


def held_out_score(row: Mapping[str, Any]) -> float | None:
    """The number by which evaluations are ranked: pass@1; without it mean@n, which is equal to it."""
    if "pass@1" in row:
        return row["pass@1"]
    return next((value for name, value in row.items() if re.fullmatch(r"mean@\d+", name)), None)


def _is_score(name: str) -> bool:
    """Whether a metric of an evaluated checkpoint is the share of responses or problems that are correct."""
    return "/lighteval/" in name or bool(re.search(r"(^|/)(mean|pass)@\d+$", name))


@dataclass
class Summary:
    """What is remembered of a run from its first update on, resumes included."""

    config_hash: str
    first: Scores | None = None
    last: Scores | None = None
    best: Scores | None = None
    updates: int = 0
    tokens: int = 0
    responses: int = 0
    # Scores of evaluated checkpoints by update: rows of metrics.jsonl, which a resumed session reads anew.
    checkpoints: dict[int, Scores] = field(default_factory=dict)

    def evaluated_checkpoint(self, update: int, row: Mapping[str, Any]) -> None:
        self.checkpoints[update] = plain_numbers(row)[0]

    def over_checkpoints(self) -> dict[str, Spread]:
        """Of each score that all evaluated checkpoints have: min, max, median and mean (RG tables 2 and 3)."""
        rows = [self.checkpoints[update] for update in sorted(self.checkpoints)]
        shares = {name: [row.get(name) for row in rows] for name in (rows[0] if rows else ()) if _is_score(name)}
        return {
            name: over_checkpoints([value for value in values if value is not None])
            for name, values in shares.items()
            if None not in values
        }

    def evaluated(self, update: int, row: Mapping[str, float]) -> None:
        """Take in one evaluation. Best is the largest score, the earliest of equals; non-finite scores never win."""
        scores: Scores = {"update": update, **plain_numbers(row)[0]}
        self.first = self.first or scores
        self.last = scores
        score = held_out_score(scores)
        best = held_out_score(self.best) if self.best else None
        if score is not None and (best is None or score > best):
            self.best = scores

    def updated(self, update: int, row: Mapping[str, float]) -> None:
        self.updates = update
        self.tokens = int(row.get("total/tokens", self.tokens))
        self.responses = int(row.get("total/responses", self.responses))

    def state(self) -> dict[str, Any]:
        names = ("first", "last", "best", "updates", "tokens", "responses")
        return {name: deepcopy(getattr(self, name)) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.state():
            setattr(self, name, deepcopy(state[name]))

    def write(self, path: Path, *, status: str, seconds: Mapping[str, float]) -> None:
        """Write summary.json atomically. Seconds are over all sessions of the run."""
        document = {
            "status": status,
            **self.state(),
            "seconds": dict(seconds),
            "seconds_total": sum(seconds.values()),
            "config_hash": self.config_hash,
        }
        if self.checkpoints:
            over = {name: asdict(spread) for name, spread in self.over_checkpoints().items()}
            document["checkpoints"] = {"updates": sorted(self.checkpoints), "over": over}
        write_atomically(path, json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")
