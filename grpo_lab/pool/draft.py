"""A pool that is being made: a hidden folder beside its final place, which becomes the pool in one step.

After each part its state is kept, so that the same command goes on behind the last whole part.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from grpo_lab.atomic import write_atomically
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.ledger import LOCK_FILE, claimed
from grpo_lab.offline.files import content_hash, file_hash, part_name, read_part, write_part
from grpo_lab.offline.header import FORMAT, HEADER, Header, Sampler
from grpo_lab.types import Group

STATE = "state.json"


def draft_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.making")


class Draft:
    """`settings` names all that the content depends on. `state` is what the last `add` was given, None at first."""

    def __init__(self, out: Path, *, settings: str) -> None:
        """Begin, or go on with what was begun with equal settings.

        Raises:
            ConfigError: something else was begun there.
        """
        self.out = out
        self.folder = draft_folder(out)
        self.settings = settings
        self.parts = 0
        self.groups = 0
        self.state: dict[str, Any] | None = None
        path = self.folder / STATE
        if path.is_file():
            kept = json.loads(path.read_text())
            if kept["settings"] != settings:
                raise ConfigError(
                    f"{self.folder} holds a pool half made with other settings: finish it with its own command, or "
                    "remove that folder"
                )
            self.parts, self.groups, self.state = kept["parts"], kept["groups"], kept["state"]

    @classmethod
    @contextmanager
    def opened(cls, out: Path, *, settings: str) -> Iterator[Self]:
        """A draft that no other process makes while the block runs.

        Raises:
            ConfigError: something else was begun there, or another process is at it.
        """
        folder = draft_folder(out)
        folder.mkdir(parents=True, exist_ok=True)
        with claimed(folder):
            yield cls(out, settings=settings)

    def add(self, groups: Sequence[Group], state: dict[str, Any] | None = None) -> None:
        """Keep groups behind those that are there."""
        write_part(self.folder / part_name(self.parts), groups)
        self.parts, self.groups, self.state = self.parts + 1, self.groups + len(groups), state
        kept = {"settings": self.settings, "parts": self.parts, "groups": self.groups, "state": state}
        write_atomically(self.folder / STATE, json.dumps(kept).encode())

    def finish(self, config: TrainConfig, sampler: Sampler, **identity: Any) -> Header:
        """Read back what was written, write pool.json, and give the folder its name, without what else its making has
        left there."""
        parts = [self.folder / part_name(index) for index in range(self.parts)]
        header = _header(config, sampler, parts, identity)
        write_atomically(self.folder / HEADER, header.to_json())
        self._remove_all_but({HEADER, *(part.name for part in parts)})
        os.replace(self.folder, self.out)
        return header

    def start_over(self) -> None:
        """Forget what was begun."""
        self._remove_all_but({LOCK_FILE})
        self.parts, self.groups, self.state = 0, 0, None

    def _remove_all_but(self, names: Collection[str]) -> None:
        for path in self.folder.iterdir():
            if path.name in names:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _header(config: TrainConfig, sampler: Sampler, parts: Sequence[Path], identity: dict[str, Any]) -> Header:
    counts: dict[str, Any] = dict.fromkeys(
        ("groups", "mixed", "responses", "tokens", "longest_prompt", "longest_response"), 0
    )

    def counted() -> Iterator[Group]:
        for part in parts:
            for group in read_part(part):
                counts["groups"] += 1
                counts["mixed"] += group.is_mixed
                counts["responses"] += len(group.rollouts)
                counts["tokens"] += group.num_tokens
                counts["longest_prompt"] = max(counts["longest_prompt"], len(group.prompt.token_ids))
                longest = max(len(rollout.token_ids) for rollout in group.rollouts)
                counts["longest_response"] = max(counts["longest_response"], longest)
                yield group

    content = content_hash(counted())
    return Header(
        format=FORMAT,
        content=content,
        parts={part.name: file_hash(part) for part in parts},
        group_size=config.group_size,
        temperature=config.rollout.temperature,
        seed=config.seed,
        dataset=config.dataset.name,
        verifier=config.dataset.verifier,
        sampler=sampler,
        made_by=f"grpo-lab {version('grpo-lab')}",
        **counts,
        **identity,
    )
