"""What timings were made on, and what else is known to have run there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from grpo_lab.report.stored import PROVENANCE, SUMMARY, StoredRun, read_json, read_sessions


def hardware_notes(runs: Sequence[StoredRun]) -> list[str]:
    """What timings were made on, and what is known to speak against comparing them.

    Raises:
        UnreadableRun: a run's provenance cannot be read.
    """
    machines = dict.fromkeys(machine for run in runs for machine in _machines(run.folder))
    notes = [f"Hardware: {'; '.join(machines) or 'not recorded'}."]
    if len(machines) > 1:
        notes.append("Warning: the runs were not all made on one machine with one number of threads.")
    for run in runs:
        if beside := _beside(run.folder):
            notes.append(
                f"Warning: {run.folder.name} trained while {', '.join(beside)} did, on the same machine: its timing is "
                "not of a quiet one."
            )
    return [*notes, "Whether other programs were at work on the machine is not recorded."]


def _machines(folder: Path) -> list[str]:
    return [
        f"{each['host']}, {each['platform']}, {each['cpus']} CPUs, threads a rank {each['threads']['hardware.threads']}"
        for each in read_sessions(folder)
    ]


def _beside(folder: Path) -> list[str]:
    """Runs in the same folder of runs that were under way on one host at one time with this one."""
    own = _span(folder)
    if own is None:
        return []
    others = {path.parent.name: _span(path.parent) for path in sorted(folder.parent.glob(f"*/{PROVENANCE}"))}
    return [
        name
        for name, other in others.items()
        if name != folder.name and other and other[0] == own[0] and own[1] < other[2] and other[1] < own[2]
    ]


def _span(folder: Path) -> tuple[str, datetime, datetime] | None:
    """A run's host, start and end; None of a run in several sessions, whose breaks are not recorded."""
    sessions = read_sessions(folder)
    summary = folder / SUMMARY
    if len(sessions) != 1 or not summary.is_file():
        return None
    began = datetime.fromisoformat(sessions[0]["started"])
    return sessions[0]["host"], began, began + timedelta(seconds=read_json(summary)["seconds_total"])
