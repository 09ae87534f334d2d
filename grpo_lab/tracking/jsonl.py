"""metrics.jsonl, the truth about a run: strict JSON, one row a line, each on the disk's side of the process at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from grpo_lab.atomic import write_atomically
from grpo_lab.config import ConfigError

Kind = Literal["update", "evaluation", "checkpoint"]
RESERVED = frozenset({"kind", "update", "time", "non_finite"})


class AppendFile:
    """A file that only grows. Unbuffered, so that nothing waits in this process when it is killed, and so that a
    full disk raises at the write that failed and not at some later close."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("ab", buffering=0)

    def write_line(self, line: str) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full, or the file cannot be written.
        """
        rest = memoryview(line.encode() + b"\n")
        # A raw write may take only part of the bytes; what is left of a full disk's last block is such a case.
        while rest:
            rest = rest[self._raw.write(rest) :]

    def sync(self) -> None:
        """Wait until everything written so far would survive a power cut."""
        os.fsync(self._raw.fileno())

    def close(self) -> None:
        self._raw.close()


def plain_numbers(row: Mapping[str, Any]) -> tuple[dict[str, int | float | None], dict[str, str]]:
    """Numbers as strict JSON takes them, sorted by name, and the non-finite ones by name as text.

    A NaN or an infinity is None in the first and "nan", "inf" or "-inf" in the second.
    """
    numbers: dict[str, int | float | None] = {}
    non_finite: dict[str, str] = {}
    for name in sorted(row):
        value = row[name]
        number = int(value) if isinstance(value, Integral) else float(value)
        if math.isfinite(number):
            numbers[name] = number
        else:
            numbers[name], non_finite[name] = None, str(number)
    return numbers, non_finite


def encode_row(kind: Kind, update: int, row: Mapping[str, Any], time: Mapping[str, Any]) -> str:
    """One line of metrics.jsonl: kind, update, the metrics by name, then `non_finite` if any, then `time`.

    Everything that depends on the clock is under `time`: two runs of the same settings agree in all the rest.

    Raises:
        ValueError: a metric has the name of one of the line's own keys.
    """
    if clash := RESERVED & row.keys():
        raise ValueError(f"a metric cannot be called {', '.join(sorted(clash))}: metrics.jsonl uses these names itself")
    numbers, non_finite = plain_numbers(row)
    line: dict[str, Any] = {"kind": kind, "update": update, **numbers}
    if non_finite:
        line["non_finite"] = non_finite
    line["time"] = dict(time)
    return json.dumps(line, allow_nan=False)


def without_reserved(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a row that was read, by name."""
    return {name: value for name, value in row.items() if name not in RESERVED}


def restore_rows(path: Path, resume_from: int) -> tuple[list[dict[str, Any]], int]:
    """Cut metrics.jsonl back to the rows with update <= `resume_from`, in one atomic step.

    A last line that was torn by the kill goes too. Returns the rows kept and the number of lines dropped.

    Raises:
        ConfigError: a line before the last is not a row.
    """
    lines = [line for line in path.read_bytes().split(b"\n") if line] if path.exists() else []
    rows: list[dict[str, Any]] = []
    kept: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is None and number < len(lines):
            raise ConfigError(f"{path}, line {number} is not a row of metrics: repair or delete that line, then resume")
        if row is not None and row["update"] <= resume_from:
            rows.append(row)
            kept.append(line + b"\n")
    if path.exists() and path.stat().st_size != sum(map(len, kept)):
        write_atomically(path, b"".join(kept))
    return rows, len(lines) - len(kept)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("update"), int) else None
