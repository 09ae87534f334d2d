"""What the terminal shows, as data: the latest value of each metric, and the histories behind the sparklines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_lab.config import TrainConfig
from grpo_lab.tracking.jsonl import without_reserved
from grpo_lab.tracking.summary import held_out_score


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Immutable, so that the view's thread always draws one moment of the run.

    `started` and `started_seconds` are the update and the clock at the session's first phase: what came before them
    (sessions before a resume, the loading of the model) says nothing about how long the rest will take.
    """

    title: str
    total: int | None
    update: int = 0
    latest: Mapping[str, Any] = field(default_factory=dict)
    evaluations: tuple[tuple[int, float], ...] = ()
    rewards: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    started: int | None = None
    started_seconds: float = 0.0

    def with_update(self, update: int, row: Mapping[str, Any], tokens_per_second: float | None) -> Board:
        """The board after a training row. Metrics that this row leaves out keep their last value."""
        reward = row.get("reward/retained")
        return replace(
            self,
            update=update,
            latest={**self.latest, **row},
            rewards=self.rewards if reward is None else (*self.rewards, reward),
            tokens_per_second=self.tokens_per_second if tokens_per_second is None else tokens_per_second,
        )

    def with_evaluation(self, update: int, row: Mapping[str, Any]) -> Board:
        score = held_out_score(row)
        history = self.evaluations if score is None else (*self.evaluations, (update, score))
        return replace(self, update=max(update, self.update), evaluations=history)

    def since(self, update: int, seconds: float) -> Board:
        """The board with the start of the session's pace, unless it has one."""
        return self if self.started is not None else replace(self, started=update, started_seconds=seconds)

    @property
    def best(self) -> tuple[int, float] | None:
        """The update and score of the best evaluation, the earliest of equals."""
        return max(self.evaluations, key=lambda evaluation: evaluation[1], default=None)

    def seconds_left(self, seconds: float) -> float | None:
        """How long the rest takes at this session's pace; None before there is one or where the end is not known."""
        if self.total is None or self.started is None or self.update <= self.started:
            return None
        pace = (seconds - self.started_seconds) / (self.update - self.started)
        return pace * (self.total - self.update)


def replayed(board: Board, rows: list[dict[str, Any]]) -> Board:
    """The board after the rows of metrics.jsonl, so that a resumed run's histories begin where the run began."""
    for row in rows:
        metrics = without_reserved(row)
        if row["kind"] == "evaluation":
            board = board.with_evaluation(row["update"], metrics)
        elif row["kind"] == "update":
            board = board.with_update(row["update"], metrics, row["time"].get("tokens_per_second"))
    return board


def run_title(config: TrainConfig) -> str:
    """A run's name for people: objective, data set, knobs and seed."""
    schedule = config.schedule
    stale = "pool" if config.source == "pool" else f"v={schedule.v}"
    return f"{config.objective.name} {config.dataset.name} {stale} i={schedule.i} seed={config.seed}"
