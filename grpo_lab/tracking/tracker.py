"""The one object that the training loop tells things to: metrics, evaluations, rollouts, phases and messages.

Files in the run folder are the truth; the terminal and W&B are views of them.

    metrics.jsonl           every training row, evaluation and evaluated checkpoint
    summary.json            first, best and last evaluation, scores over checkpoints, counts, where the time went
    provenance.json         versions, commit, machine, one entry a session
    run.log                 messages and warnings
    rollouts/update_*.txt   samples to read
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from grpo_lab.composition import config_hash
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.tracking.board import Board, replayed, run_title
from grpo_lab.tracking.clock import PhaseClock
from grpo_lab.tracking.jsonl import AppendFile, encode_row, plain_numbers, restore_rows, without_reserved
from grpo_lab.tracking.panel import closing_table
from grpo_lab.tracking.provenance import record_session
from grpo_lab.tracking.quiet import QuietTracker
from grpo_lab.tracking.rollouts import Decode, drop_later, write_rollouts
from grpo_lab.tracking.summary import Summary
from grpo_lab.tracking.view import QuietView, build_view
from grpo_lab.tracking.wandb_mirror import WandbMirror
from grpo_lab.types import Group

PACKAGE = __name__.partition(".")[0]


class Tracker:
    """Made by `open`, by rank 0 alone. One thread calls it; warnings may come from any."""

    def __init__(
        self, run_dir: Path, clock: PhaseClock, board: Board, view: QuietView, summary: Summary, config: TrainConfig
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._board = board
        self._view = view
        self._summary = summary
        self._metrics = AppendFile(run_dir / "metrics.jsonl")
        self._log = AppendFile(run_dir / "run.log")
        self._mirror = WandbMirror(config, run_dir, board.title, self.warning)
        self._row_seconds = clock.seconds()
        self._beside: float | None = 0.0
        self._finished = False

    @classmethod
    def open(cls, run_dir: Path, config: TrainConfig, *, total_updates: int | None, resume_from: int | None) -> Tracker:
        """Begin to track a session of a run.

        Args:
            run_dir: the run's folder; made if it is missing.
            total_updates: the whole budget, for the progress bar; None where it is not known.
            resume_from: the update counter of the restored checkpoint: rows past it are dropped, and `load_state`
                comes next. -1 starts over in a folder that holds no checkpoint yet: `start_afresh` comes next.
                None begins a new run.

        Raises:
            ConfigError: a new run in a folder that holds the metrics of another, or an earlier session's file that
                cannot be read.
            OSError: the folder cannot be written.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        metrics = run_dir / "metrics.jsonl"
        if resume_from is None and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(f"run_dir={run_dir} holds a run already: continue it with resume=, or name a new folder")
        rows, dropped = restore_rows(metrics, resume_from) if resume_from is not None else ([], 0)
        record_session(run_dir / "provenance.json", config, resume_from=resume_from)
        clock = PhaseClock()
        board = replayed(Board(title=run_title(config), total=total_updates), rows)
        view = build_view(config.tracking.view, Console(), clock, board)
        # A run is the same run wherever its folder is, and whether or not it was resumed.
        settings = config_hash(replace(config, run_dir=None, resume=None))
        summary = Summary(settings)
        for row in rows:
            if row["kind"] == "checkpoint":
                summary.evaluated_checkpoint(row["update"], without_reserved(row))
        tracker = cls(run_dir, clock, board, view, summary, config)
        view.start()
        if resume_from is None:
            tracker._mirror.start(None)
        else:
            tracker._report_restored(resume_from, dropped)
        return tracker

    def log_update(self, update: int, row: Mapping[str, float]) -> None:
        """Write one training row.

        Args:
            update: counted from 1 after the first optimizer step.
            row: metrics by name, as in docs/metrics.md; the seconds by phase since the row before are added here.

        Raises:
            OSError: metrics.jsonl cannot be written.
        """
        now = self._clock.seconds()
        phases = {name: value - self._row_seconds[name] for name, value in now.items()}
        self._row_seconds = now
        tokens = int(row.get("total/tokens", self._summary.tokens)) - self._summary.tokens
        beside, self._beside = self._beside, 0.0
        sampling = phases["collect"] if beside == 0.0 else beside
        speed = tokens / sampling if tokens > 0 and sampling else None
        time = {
            **phases,
            **({"sampled_beside": beside} if beside else {}),
            **({} if speed is None else {"tokens_per_second": speed}),
            **self._moment(now),
        }
        self._metrics.write_line(encode_row("update", update, row, time))
        self._summary.updated(update, row)
        self._board = self._board.with_update(update, plain_numbers(row)[0], speed)
        self._view.show(self._board, evaluated=False)
        self._mirror.log(update, {**row, **{f"time/{name}": value for name, value in time.items() if name != "at"}})

    def log_evaluation(self, update: int, row: Mapping[str, float]) -> None:
        """Write one held-out evaluation and rewrite summary.json.

        Args:
            update: the update counter of the weights that were evaluated; 0 is the initial policy.
            row: scores by name: pass@1, pass@8, mean@8, ...

        Raises:
            OSError: metrics.jsonl or summary.json cannot be written.
        """
        self._metrics.write_line(encode_row("evaluation", update, row, self._moment(self._clock.seconds())))
        self._summary.evaluated(update, row)
        self._write_summary("running")
        self._board = self._board.with_evaluation(update, plain_numbers(row)[0])
        self._view.show(self._board, evaluated=True)
        self._mirror.log(update, {f"evaluation/{name}": value for name, value in row.items()})

    @property
    def checkpoints(self) -> Collection[int]:
        """Updates of the checkpoints whose scores are in metrics.jsonl."""
        return self._summary.checkpoints.keys()

    def log_checkpoint(self, update: int, row: Mapping[str, float]) -> None:
        """Write the scores of an evaluated checkpoint, flushed to disk, and rewrite summary.json.

        Args:
            update: the checkpoint's, which may lie before the present one.
            row: scores by benchmark and name: math500/mean@32, average/pass@8, ...

        Raises:
            OSError: metrics.jsonl or summary.json cannot be written.
        """
        self._metrics.write_line(encode_row("checkpoint", update, row, self._moment(self._clock.seconds())))
        self.sync()
        self._summary.evaluated_checkpoint(update, row)
        self._write_summary("running")
        # `update` is a metric of the row and no step of W&B's own, which could not go back.
        self._mirror.log(update, {f"checkpoint/{name}": value for name, value in row.items()})

    def log_rollouts(
        self, update: int, groups: Sequence[Group], logprobs: Sequence[Sequence[np.ndarray]], decode: Decode
    ) -> None:
        """Write a sample of groups as text to rollouts/update_*.txt; see `write_rollouts`."""
        write_rollouts(self._run_dir / "rollouts" / f"update_{update:06d}.txt", update, groups, logprobs, decode)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside as collect, sync, learn, evaluate, save or other; a phase inside another stops it."""
        self._board = self._board.since(self._board.update, sum(self._clock.seconds().values()))
        return self._clock.phase(name)

    def sampled_beside(self, seconds: float | None) -> None:
        """Sampling of the next row's collection took so long, beside other phases: of them, `collect` is what was
        waited for."""
        self._beside = seconds

    def note(self, text: str) -> None:
        """A line in run.log alone."""
        self._log.write_line(f"{_now()} {text}")

    def message(self, text: str) -> None:
        """A line for the user, above the live view and in run.log."""
        self._log.write_line(f"{_now()} {text}")
        self._view.message(text)

    def warning(self, text: str) -> None:
        """A line that is shown whatever `tracking.view` says, and in run.log."""
        self._log.write_line(f"{_now()} WARNING {text}")
        self._view.warning(text)

    def sync(self) -> None:
        """Wait until the rows written so far would survive a power cut."""
        self._metrics.sync()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: W&B run id, seconds by phase, evaluations and counts. Syncs metrics.jsonl first,
        so that no checkpoint is newer than the rows before it."""
        self.sync()
        return {"wandb_id": self._mirror.run_id, "seconds": self._clock.seconds(), "summary": self._summary.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: to be called before anything is logged."""
        self._clock.load(state["seconds"])
        self._row_seconds = self._clock.seconds()
        self._summary.load_state(state["summary"])
        self._mirror.start(state["wandb_id"])

    def start_afresh(self) -> None:
        """In place of `load_state`, where there was no checkpoint to resume from."""
        self._mirror.start(None)

    def finish(self, *, status: str, next_command: str | None) -> None:
        """End the session: summary.json, the closing table, the next command to try, W&B. A second call does nothing.

        Args:
            status: "finished", "interrupted" or "failed"; W&B marks all but the first as failed.
            next_command: what the user may want to type next.
        """
        if self._finished:
            return
        self._finished = True
        closing = [closing_table(self._summary, self._clock.seconds(), status)]
        if next_command is not None:
            closing.append(f"next: {next_command}")
        # Run in reverse order, each whatever the others and the summary do.
        with ExitStack() as stack:
            stack.callback(self._log.close)
            stack.callback(self._metrics.close)
            stack.callback(self._mirror.finish, exit_code=0 if status == "finished" else 1)
            stack.callback(self._view.close, *closing)
            self._write_summary(status)

    def _write_summary(self, status: str) -> None:
        self._summary.write(self._run_dir / "summary.json", status=status, seconds=self._clock.seconds())

    def _moment(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        return {"elapsed": sum(seconds.values()), "at": _now()}

    def _report_restored(self, resume_from: int, dropped: int) -> None:
        files = sum(drop_later(self._run_dir / each, resume_from) for each in ("rollouts", "evaluations"))
        if dropped or files:
            self.message(
                f"resume at update {max(resume_from, 0)}: {dropped} later rows of metrics.jsonl and {files} later "
                "files of rollouts and evaluations dropped"
            )
        if self._board.update < resume_from:
            self.warning(
                f"metrics.jsonl ends at update {self._board.update}, before the checkpoint's {resume_from}: "
                "the rows between are lost"
            )


class _ForwardingHandler(logging.Handler):
    """Log records of the package's other modules, as warnings of the run."""

    def __init__(self, tracker: Tracker | QuietTracker) -> None:
        super().__init__(logging.WARNING)
        self._tracker = tracker

    def emit(self, record: logging.LogRecord) -> None:
        self._tracker.warning(self.format(record))

    def close(self) -> None:
        logging.getLogger(PACKAGE).removeHandler(self)
        super().close()


def forward_warnings(tracker: Tracker | QuietTracker) -> logging.Handler:
    """Let what the package warns of through `logging` (the verifier's workers do) reach run.log and the terminal,
    until the handler is closed."""
    handler = _ForwardingHandler(tracker)
    logging.getLogger(PACKAGE).addHandler(handler)
    return handler


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
