"""Judge recorded responses: python -m grpo_lab.rewards pairs.jsonl [--timeout S] [--workers N]

Each row of the file holds `gold` (text, a number, or a list whose members all belong to the answer) and `completion`;
optionally `tolerance` and `id`. One JSON row each comes out, in order: {"id", "verdict", "extracted"}. A row that
cannot be used ends the run with exit code 2, after the verdicts on the rows before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lab.config import ConfigError
from grpo_lab.rewards.pool import Verifier
from grpo_lab.types import Problem

ROWS_AT_ONCE = 256


class Row(NamedTuple):
    """A row of the file, and the id to repeat, where it has one."""

    problem: Problem
    completion: str
    echo: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lab.rewards", description="Judge recorded responses against their gold answers."
    )
    parser.add_argument("pairs", type=Path, help="JSON lines with gold and completion; optionally tolerance and id")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds that one answer may take (default 5)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        with Verifier("math", workers=arguments.workers, timeout=arguments.timeout) as verifier:
            _judge_file(arguments.pairs, verifier)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _judge_file(path: Path, verifier: Verifier) -> None:
    rows = _read_rows(path)
    failure: ConfigError | None = None
    while failure is None:
        batch: list[Row] = []
        try:
            for row in itertools.islice(rows, ROWS_AT_ONCE):
                batch.append(row)
        except ConfigError as error:
            failure = error
        for row, judgement in zip(batch, verifier.judge([row[:2] for row in batch]), strict=True):
            print(json.dumps({**row.echo, "verdict": judgement.verdict, "extracted": judgement.extracted}), flush=True)
        if failure is None and not batch:
            return
    raise failure


def _read_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _read_row(line, f"{path}, line {number}", str(number))


def _read_row(line: bytes, place: str, default_id: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Not JSON, not UTF-8, a number of more digits than Python reads, or brackets too deep.
        raise ConfigError(f"{place}: not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: not a JSON object; write {{'gold': ..., 'completion': ...}}")
    for key in ("gold", "completion"):
        if key not in row:
            raise ConfigError(f"{place}: no {key}; add it")
    if not isinstance(row["completion"], str):
        raise ConfigError(f"{place}: completion is {_kind(row['completion'])}; make it a string")
    tolerance = row.get("tolerance")
    if tolerance is not None and not (_is_number(tolerance) and tolerance >= 0):
        raise ConfigError(f"{place}: tolerance is {json.dumps(tolerance)}; make it a number from 0, or leave it out")
    problem = Problem(
        id=str(row.get("id", default_id)),
        question="",
        gold=_gold_text(row["gold"], place),
        tolerance=None if tolerance is None else float(tolerance),
    )
    return Row(problem, row["completion"], {"id": row["id"]} if "id" in row else {})


def _gold_text(gold: Any, place: str) -> str:
    """The gold answer as text. A list stands for an answer with all its members."""
    if isinstance(gold, str):
        return gold
    if _is_number(gold):
        return repr(gold)
    if isinstance(gold, list) and gold and all(isinstance(member, str) or _is_number(member) for member in gold):
        return ", ".join(member if isinstance(member, str) else repr(member) for member in gold)
    raise ConfigError(f"{place}: gold is {_kind(gold)}; make it a string, a number, or a list of these")


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "null" if value is None else f"{json.dumps(value)[:40]}"


if __name__ == "__main__":
    sys.exit(main())
