"""Checkpoints that appear whole or not at all, and the search for the newest whole one.

A checkpoint is a folder `checkpoints/update_000160/`. It is written under a temporary name, its files are listed with
sizes and hashes in `manifest.json`, everything is flushed to disk, and only then renamed. What is read back was
listed; a folder with a file missing or changed is named and skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_lab.distributed import World
from grpo_lab.types import Group, Problem, Prompt, Rollout

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
STATE_FILE = "run.pt"
_PREFIX, _TEMPORARY = "update_", ".saving_"


def folder_of(run_dir: Path, update: int) -> Path:
    return run_dir / FOLDER / f"{_PREFIX}{update:06d}"


def save(
    run_dir: Path,
    update: int,
    state: Callable[[], Mapping[str, Any]],
    write_parts: Callable[[Path], None],
    world: World,
) -> Path:
    """Save the leader's `state()` and whatever `write_parts` writes, on every rank, into the folder it is given.

    Returns the finished folder. A checkpoint of this update that is already there is replaced (a resumed run reaches
    the same update again).
    """
    final = folder_of(run_dir, update)
    temporary = final.with_name(f"{_TEMPORARY}{update:06d}")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    world.lead(begin)
    write_parts(temporary)
    world.lead(lambda: _finish(final, temporary, update, state()))
    return final


def _finish(final: Path, temporary: Path, update: int, state: Mapping[str, Any]) -> None:
    """Add the state and the list of files, flush everything, and give the folder its name."""
    torch.save(dict(state), temporary / STATE_FILE)
    files = {
        str(path.relative_to(temporary)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(temporary.rglob("*"))
        if path.is_file()
    }
    (temporary / MANIFEST).write_text(json.dumps({"update": update, "files": files}, indent=1))
    for path in (*temporary.rglob("*"), temporary):
        _fsync(path)
    if final.exists():
        aside = _set_aside(final)
        temporary.rename(final)
        shutil.rmtree(aside)
    else:
        temporary.rename(final)
    _fsync(final.parent)


def prune(run_dir: Path, keep: int, *, at: int, spare: Collection[int] = ()) -> None:
    """Of the checkpoints up to update `at`, which is whole, remove all but the newest `keep` and those in `spare`.

    Later ones are damaged, as the run went on before them: they will be replaced, and count for nothing.
    """
    updates = [update for update in reversed(saved(run_dir)) if update <= at]
    for update in updates[keep:]:
        if update not in spare:
            shutil.rmtree(_set_aside(folder_of(run_dir, update)))


def tidy(run_dir: Path) -> None:
    """Remove what a killed save or removal left under a temporary name."""
    for leftover in (run_dir / FOLDER).glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)


def _set_aside(folder: Path) -> Path:
    """Take away a folder's final name in one step, so that it never belongs to a half-removed one."""
    aside = folder.with_name(f"{_TEMPORARY}old_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and a line for each newer one that is damaged."""
    warnings: list[str] = []
    for folder in _folders(run_dir):
        if (fault := damage(folder)) is None:
            return folder, warnings
        warnings.append(f"skipping the damaged checkpoint {folder}: {fault}")
    return None, warnings


def saved(run_dir: Path) -> dict[int, Path]:
    """Finished checkpoints, whole or damaged, by update, oldest first."""
    return {_update_of(folder): folder for folder in reversed(_folders(run_dir))}


def damage(folder: Path, part: str = "") -> str | None:
    """What is wrong with a checkpoint, or with those of its files whose path begins with `part`; None if nothing is."""
    try:
        listed = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    for name, entry in listed.items():
        if not name.startswith(part):
            continue
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"] or _sha256(path) != entry["sha256"]:
            return f"{name} is not as it was written"
    return None


def load_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint that `newest` has found whole."""
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True)
    return state


def _folders(run_dir: Path) -> list[Path]:
    """Finished checkpoint folders, newest first."""
    found = (run_dir / FOLDER).glob(f"{_PREFIX}*")
    # A copy that somebody has made beside them, update_000160.bak, is none.
    named = [folder for folder in found if folder.name.removeprefix(_PREFIX).isdecimal()]
    return sorted(named, key=_update_of, reverse=True)


def _update_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- groups as plain tensors and text, so that a checkpoint is read without running code ---


def groups_to_state(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "problem": {
                "id": group.prompt.problem.id,
                "question": group.prompt.problem.question,
                "gold": group.prompt.problem.gold,
                "tolerance": group.prompt.problem.tolerance,
                "solution": group.prompt.problem.solution,
                "tags": dict(group.prompt.problem.tags),
            },
            "text": group.prompt.text,
            "token_ids": list(group.prompt.token_ids),
            "rollouts": [
                {
                    "token_ids": torch.from_numpy(rollout.token_ids),
                    "behaviour_logprobs": torch.from_numpy(rollout.behaviour_logprobs),
                    "finish_reason": rollout.finish_reason,
                    "policy_version": rollout.policy_version,
                    "text": rollout.text,
                }
                for rollout in group.rollouts
            ],
            "rewards": list(group.rewards),
            "verdicts": list(group.verdicts),
            "sequence": group.sequence,
        }
        for group in groups
    ]


def groups_from_state(state: Sequence[Mapping[str, Any]]) -> tuple[Group, ...]:
    return tuple(_group_from_state(entry) for entry in state)


def _group_from_state(entry: Mapping[str, Any]) -> Group:
    return Group(
        prompt=Prompt(problem=Problem(**entry["problem"]), text=entry["text"], token_ids=tuple(entry["token_ids"])),
        rollouts=tuple(
            Rollout(
                token_ids=each["token_ids"].numpy(),
                behaviour_logprobs=each["behaviour_logprobs"].numpy(),
                finish_reason=each["finish_reason"],
                policy_version=each["policy_version"],
                text=each["text"],
            )
            for each in entry["rollouts"]
        ),
        rewards=tuple(entry["rewards"]),
        verdicts=tuple(entry["verdicts"]),
        sequence=entry["sequence"],
    )


def scores_to_state(scores: Mapping[int, list[list[np.ndarray]]]) -> dict[int, list[list[torch.Tensor]]]:
    return {index: [[torch.from_numpy(v) for v in group] for group in each] for index, each in scores.items()}


def scores_from_state(state: Mapping[int, list[list[torch.Tensor]]]) -> dict[int, list[list[np.ndarray]]]:
    return {index: [[v.numpy() for v in group] for group in each] for index, each in state.items()}
