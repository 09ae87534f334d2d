"""Which models are evaluated: a run's checkpoints, its initial model, any folder, any hub id; and what they hold."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from grpo_lab import checkpoint
from grpo_lab.config import ConfigError, first_line
from grpo_lab.policy import load_model

BASE = "base"
MODEL = "model"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# The files of a model folder that decide what it answers: weights, shape, end tokens, tokenizer and chat template.
DECISIVE = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One model, in a local Hugging Face folder. `update`: of a run's checkpoint, 0 for its initial model, else None.
    `source`: how it was named."""

    name: str
    update: int | None
    folder: Path
    source: str

    @property
    def of_run(self) -> bool:
        """Whether it has the shape and the tokenizer of its run."""
        return self.update is not None


def run_targets(
    run_dir: Path, wanted: Sequence[str], base: Callable[[], str], warn: Callable[[str], None]
) -> list[Target]:
    """The models that `wanted` names, in its order; every saved checkpoint, oldest first, where it names none.

    `base` makes or finds the initial model. Damaged checkpoints are skipped with a warning where all are wanted.

    Raises:
        ConfigError: there is no such model, or it is damaged.
    """
    if wanted:
        return _distinct([_run_target(run_dir, word, base) for word in wanted])
    saved = checkpoint.saved(run_dir)
    if not saved:
        raise ConfigError(f"run={run_dir} has no checkpoint: train with checkpoint.every=, or name checkpoint=base")
    whole = []
    for update, folder in saved.items():
        if (fault := checkpoint.damage(folder, MODEL)) is None:
            whole.append(_saved_target(update, folder))
        else:
            warn(f"skipping the damaged checkpoint {folder}: {fault}")
    if not whole:
        raise ConfigError(f"no checkpoint of run={run_dir} is whole")
    return whole


def other_targets(wanted: Sequence[str], base: Callable[[], str]) -> list[Target]:
    """Models by themselves; `base` is the one that the configuration names.

    Raises:
        ConfigError: there is no such model.
    """
    return _distinct(
        [
            Target(name=BASE, update=0, folder=local_folder(base()), source=base()) if word == BASE else _other(word)
            for word in wanted
        ]
    )


def _distinct(targets: Sequence[Target]) -> list[Target]:
    """Each once; results are kept by name."""
    found: dict[str, Target] = {}
    for target in targets:
        other = found.setdefault(target.name, target)
        if other.folder.resolve() != target.folder.resolve():
            raise ConfigError(
                f"checkpoint={other.source},{target.source}: both would be called {target.name} in results: evaluate "
                "them by two commands with another out=, or rename a folder"
            )
    return list(found.values())


def _run_target(run_dir: Path, word: str, base: Callable[[], str]) -> Target:
    if word == BASE:
        source = base()
        return Target(name=BASE, update=0, folder=local_folder(source), source=source)
    if not word.isdigit():
        return _other(word)
    saved = checkpoint.saved(run_dir)
    folder = saved.get(int(word))
    if folder is None:
        there = ", ".join(map(str, saved)) or "none"
        raise ConfigError(f"checkpoint={word}: run={run_dir} has no checkpoint of that update (there are: {there})")
    if (fault := checkpoint.damage(folder, MODEL)) is not None:
        raise ConfigError(f"checkpoint={word}: {folder} is damaged: {fault}")
    return _saved_target(int(word), folder)


def _saved_target(update: int, folder: Path) -> Target:
    return Target(name=folder.name, update=update, folder=folder / MODEL, source=str(folder))


def _other(word: str) -> Target:
    """A folder (of a model, or of a checkpoint that holds one), or a hub id, `@revision` behind it where wanted."""
    path = Path(word)
    for folder in (path, path / MODEL):
        if (folder / "config.json").is_file():
            return Target(name=_name_of(folder.resolve()), update=None, folder=folder, source=word)
    if path.exists():
        raise ConfigError(f"checkpoint={word} holds no config.json: it must be a Hugging Face model folder")
    if not HUB_ID.fullmatch(word):
        raise ConfigError(f"checkpoint={word} is neither an update, nor a folder that exists, nor a hub id, nor base")
    name = re.sub(r"[^\w.-]", "--", word)
    return Target(name=name, update=None, folder=local_folder(word), source=word)


def _name_of(folder: Path) -> str:
    """The folder's own name; of a checkpoint's model, the run's and the update's."""
    if folder.name != MODEL:
        return folder.name
    owner = folder.parent
    return f"{owner.parent.parent.name}_{owner.name}" if owner.parent.name == checkpoint.FOLDER else owner.name


def local_folder(source: str) -> Path:
    """A model folder as it is, or a hub model's files, downloaded unless the hub's cache holds them.

    Raises:
        ConfigError: the hub does not give them.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(DECISIVE)))
    except Exception as error:
        # A library of many errors: none, an unknown id, no network, no permission.
        reason = first_line(error)
        raise ConfigError(
            f"{source} cannot be had from the hub ({reason}): check the id and the network, or name a local folder"
        ) from error


def digest_of(folder: Path) -> str:
    """A hash of the contents of the files that decide what a model answers, wherever the folder is.

    Raises:
        ConfigError: it holds no weights.
    """
    files = {path.name: path for pattern in DECISIVE for path in folder.glob(pattern) if path.is_file()}
    if not any(name.endswith((".safetensors", ".bin")) for name in files):
        raise ConfigError(f"{folder} holds no weights (*.safetensors or *.bin)")
    hashes: dict[str, str] = {}
    for name, path in files.items():
        with path.open("rb") as stream:
            hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _digest(hashes)


def digest_as_saved(folder: Path) -> str | None:
    """`digest_of` the model in a checkpoint's folder, from the hashes that its manifest lists; None where the manifest
    cannot be read."""
    try:
        listed = json.loads((folder / checkpoint.MANIFEST).read_bytes())["files"]
        inside = {Path(name): entry["sha256"] for name, entry in listed.items()}
        hashes = {
            path.name: found
            for path, found in inside.items()
            if path.parent == Path(MODEL) and any(fnmatchcase(path.name, pattern) for pattern in DECISIVE)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return _digest(hashes)


def _digest(hashes: Mapping[str, str]) -> str:
    """Of files, by name."""
    return hashlib.sha256("".join(f"{name}|{hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()[:32]


def weights_of(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All weights under Hugging Face names, tied ones under each of theirs, as a learner streams them."""
    model = load_model(folder, dtype=dtype)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.detach()
