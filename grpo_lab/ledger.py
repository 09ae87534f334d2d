"""Where a run stands, read from its folder alone: so that a sweep runs what is missing and nothing twice.

The ledger has no file of its own. A run's folder is named after the hash of all that decides its results, and holds
how far it came: metrics.jsonl, summary.json, failure.txt, and a lock while a process trains in it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from grpo_lab.atomic import write_atomically
from grpo_lab.config import ConfigError, TrainConfig, first_line
from grpo_lab.runs import holds_a_run, last_update
from grpo_lab.schedule import Schedule

LOCK_FILE, FAILURE_FILE = "run.lock", "failure.txt"
# What a run leaves in its folder besides its settings and checkpoints.
LOGGED = (
    "metrics.jsonl",
    "summary.json",
    "provenance.json",
    "run.log",
    "vllm.log",
    "failed_minibatch.pt",
    "evaluations",
    "rollouts",
    "wandb",
)
# A look at a lock holds it for microseconds: who comes in between tries again.
CLAIM_SECONDS = 1.0

# What leaves a run's results as they are, but for rounding: where it runs, how it is cut into pieces, what is kept and
# shown of it, and what other commands read. Precision, sampler and lengths are not among them.
NO_RESULT = (
    "run_dir",
    "resume",
    "tracking",
    "hardware",
    "checkpoint",
    "scale",
    "model.shape",
    "model.cache_dir",
    "rollout.max_rows",
    "rollout.url",
    "rollout.vllm",
    "learner.engine",
    "learner.zero_stage",
    "learner.offload_optimizer",
    "learner.offload_parameters",
    "learner.activation_checkpointing",
    "learner.micro_batch_tokens",
    "learner.logit_chunk",
    "verifier.workers",
    "evaluation.benchmarks",
    "evaluation.paths",
    "evaluation.lighteval",
    "evaluation.lighteval_python",
    "evaluation.checkpoints",
    "evaluation.hand_off",
    "evaluation.device",
    "evaluation.sbatch",
)

# What decides which groups are sampled, of all that decides a run's results.
SAMPLING = ("model", "dataset", "rollout", "verifier", "collection", "group_size", "groups_per_minibatch", "seed")

State = Literal["missing", "half done", "running", "failed", "finished"]


class BusyError(ConfigError):
    """Another process holds the folder."""


@dataclass(frozen=True, slots=True)
class Standing:
    """`update`: the last one logged. `why`: the first line of what a failed run died of."""

    state: State
    update: int = 0
    why: str | None = None

    def __str__(self) -> str:
        match self.state:
            case "half done" | "running":
                return f"{self.state}, at update {self.update}"
            case "failed":
                return f"failed at update {self.update}: {self.why}"
        return self.state


def result_hash(config: TrainConfig) -> str:
    """A name for everything in a configuration that decides a run's results: equal for `t_ref=auto` and the number
    that it means, and whatever the keys of `NO_RESULT` are."""
    return short_hash(result_settings(config))


def result_settings(config: TrainConfig) -> dict[str, Any]:
    """All that decides a run's results, by key."""
    values = asdict(config)
    for key in NO_RESULT:
        *path, name = key.split(".")
        section = values
        for part in path:
            section = section[part]
        del section[name]
    schedule = Schedule.from_config(config)
    values["schedule"] |= {
        "t_ref": schedule.t_ref,
        "minibatches_per_collection": schedule.minibatches_per_collection,
        "updates": schedule.updates,
    }
    if config.rollout.engine == "vllm":
        values["rollout"]["vllm"] = {"dtype": config.rollout.vllm.dtype, "seed": config.rollout.vllm.seed}
    return values


def sampling_settings(config: TrainConfig) -> dict[str, Any]:
    """All that decides the groups of a pool which a run would learn from, or which is sampled with its settings, by
    key: not how they are learned from."""
    # As the run that samples: its collections are a sync's.
    settings = result_settings(replace(config, source="policy"))
    schedule = settings["schedule"]
    return {
        **{key: settings[key] for key in SAMPLING},
        "zero_variance": settings["objective"]["zero_variance"],
        "minibatches_per_collection": schedule["minibatches_per_collection"],
        # The embedded sampler computes as the learner does.
        "precision": settings["learner"]["precision"],
    }


def short_hash(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits for a folder's name."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def standing(run_dir: Path) -> Standing:
    """Where the run in a folder stands; a folder that is not there, or was only prepared, is missing."""
    if not run_dir.is_dir():
        return Standing("missing")
    update = last_update(run_dir)
    if is_claimed(run_dir):
        return Standing("running", update)
    if _status(run_dir) == "finished":
        return Standing("finished", update)
    failure = run_dir / FAILURE_FILE
    if failure.is_file():
        return Standing("failed", update, failure.read_text().strip())
    return Standing("half done", update) if holds_a_run(run_dir) else Standing("missing")


def _status(run_dir: Path) -> str | None:
    """As the run's last summary says it; "running" stays where a process was killed."""
    try:
        status: Any = json.loads((run_dir / "summary.json").read_text())["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return status if isinstance(status, str) else None


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Hold a run's or a pool's folder while its block runs: no second process may write to it. Freed however the
    process ends.

    Raises:
        BusyError: another process holds it.
    """
    with (run_dir / LOCK_FILE).open("w") as stream:
        until = time.monotonic() + CLAIM_SECONDS
        while not _lock(stream.fileno()):
            if time.monotonic() > until:
                raise BusyError(f"{run_dir} is in use by another process: let it end, or stop it first")
            time.sleep(0.01)
        yield


def is_claimed(run_dir: Path) -> bool:
    """Whether a process trains in a folder now."""
    path = run_dir / LOCK_FILE
    if not path.is_file():
        return False
    with path.open("a") as stream:
        return not _lock(stream.fileno())


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"warning: this file system has no locks ({error.strerror}): do not start a run twice", file=sys.stderr)
    return True


@contextmanager
def failures_recorded(run_dir: Path) -> Iterator[None]:
    """Keep the first line of an error that ends a run, for who asks later; a run that starts anew has none."""
    forget_failure(run_dir)
    try:
        yield
    except Exception as error:
        record_failure(run_dir, first_line(error))
        raise


def record_failure(run_dir: Path, why: str) -> None:
    write_atomically(run_dir / FAILURE_FILE, f"{why}\n".encode())


def forget_failure(run_dir: Path) -> None:
    (run_dir / FAILURE_FILE).unlink(missing_ok=True)


def has_recorded_failure(run_dir: Path) -> bool:
    return (run_dir / FAILURE_FILE).is_file()


def clear(run_dir: Path) -> None:
    """Remove what a run that saves no checkpoints has left there, all but its settings; files of others stay."""
    for name in (*LOGGED, FAILURE_FILE):
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
