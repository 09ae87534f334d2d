"""The hand-off: checkpoints are evaluated when they are saved, and their scores become rows of the run.

Whatever `evaluation.hand_off` says, an evaluation is the same command in a process of its own, so that it shares no
state, no random numbers and no engine with training:

    python -m grpo_lab.evaluate run=<run> checkpoint=160 row=<run>/evaluation/update_000160/row.json

Its scores count when `row.json` is there and tells the digest of the checkpoint's own model. What has none is handed
over again when the run is resumed, and goes on where it stopped, problem by problem.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_lab import checkpoint
from grpo_lab.atomic import write_atomically
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.evaluation.benchmarks import load_benchmarks
from grpo_lab.evaluation.lighteval_process import find_python
from grpo_lab.evaluation.targets import digest_as_saved
from grpo_lab.guarded import GuardedProcess, last_lines
from grpo_lab.launch import visible_gpus, without_launcher
from grpo_lab.policy import load_tokenizer
from grpo_lab.tracking import Tracker

logger = logging.getLogger(__name__)

RESULTS, ROW, LOG, JOB, EXIT = "evaluation", "row.json", "log.txt", "slurm_job.json", "slurm_exit.txt"
# Seconds between two looks: at a process that is waited for, and at the files of Slurm's jobs.
LOOK_EVERY, LOOK_AT_JOBS_EVERY = 0.1, 20.0
# Seconds that Slurm's own commands may take.
SLURM_TIMEOUT = 60.0


class HandOffError(RuntimeError):
    """An evaluation could not be begun."""


def check_hand_off(config: TrainConfig, run_dir: Path, model_folder: str) -> None:
    """Whether evaluations will find what they need, before hours of training.

    Raises:
        ConfigError: a program, GPU or benchmark that is not there, or a folder whose name the command cannot take.
    """
    evaluation = config.evaluation
    # Asks for the GPU by the name that it has here.
    list(placement(config))
    if evaluation.hand_off == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError(
            "evaluation.hand_off=slurm needs `sbatch`, which is not on PATH here: start training where Slurm takes "
            "jobs, or set evaluation.hand_off=inline or background"
        )
    if evaluation.lighteval:
        find_python(evaluation.lighteval_python)
    if re.search(r"[,\[\]'\"]", str(run_dir)):
        raise ConfigError(f"run_dir={run_dir}: evaluation.checkpoints=true takes no comma, bracket or quote in it")
    load_benchmarks(config, load_tokenizer(model_folder, revision=config.model.revision), limit_all=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One checkpoint to evaluate. `digest`: of its model; `words`: the command, after `python`; `folder`: of its
    results."""

    update: int
    digest: str
    folder: Path
    words: tuple[str, ...]

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def command(self) -> str:
        """As a user may type it."""
        return shlex.join(["python", *self.words])

    def scores(self) -> dict[str, float] | None:
        """What the evaluation found, once it is there; None where it is of other weights, too."""
        try:
            row: dict[str, Any] = json.loads((self.folder / ROW).read_bytes())
        except FileNotFoundError:
            return None
        return row["scores"] if row["model"] == self.digest else None


class Way(Protocol):
    """Where and when tasks are done. `waits`: whether the end of a run waits for them."""

    waits: bool

    def begin(self, task: Task) -> str:
        """Take a task; do it now or later. Returns what became of it, for the user.

        Raises:
            HandOffError: it cannot be begun.
        """
        ...

    def ended(self, *, look: bool) -> list[Task]:
        """Tasks that ended since the last call, well or not; `look`: even if the last look was a moment ago."""
        ...

    def about(self, task: Task) -> str:
        """Where a task that is open stands, in a few words."""
        ...

    def close(self) -> None: ...


class LocalWay:
    """A process at a time, in the order in which they were asked for; none outlives this process."""

    waits = True

    def __init__(self) -> None:
        self._queue: deque[Task] = deque()
        self._process: GuardedProcess | None = None

    def begin(self, task: Task) -> str:
        self._queue.append(task)
        if len(self._queue) > 1:
            return f"waits for {len(self._queue) - 1} before it"
        self._start()
        return "begins"

    def ended(self, *, look: bool) -> list[Task]:
        if not self._queue or (self._process is not None and self._process.ended() is None):
            return []
        done, self._process = self._queue.popleft(), None
        if self._queue:
            self._start()
        return [done]

    def about(self, task: Task) -> str:
        return "running" if task == self._queue[0] else "waiting"

    def close(self) -> None:
        if self._process is not None:
            self._process.stop()
        self._queue.clear()
        self._process = None

    def _start(self) -> None:
        """Begin with the first of the queue. Where that fails it has ended."""
        task = self._queue[0]
        command = [sys.executable, *task.words]
        try:
            self._process = GuardedProcess(command, environment=without_launcher(os.environ), log=task.log)
        except OSError as error:
            logger.warning("the evaluation of checkpoint %d does not start: %s", task.update, error)


class SlurmWay:
    """A job for each task. Jobs outlive the run: their ids stay beside the results, and a resumed run asks Slurm for
    them before it submits again."""

    waits = False

    def __init__(self, words: Collection[str]) -> None:
        self._words = list(words)
        self._jobs: dict[Task, str] = {}
        self._looked = -float("inf")

    def begin(self, task: Task) -> str:
        file = task.folder / JOB
        known = json.loads(file.read_bytes()) if file.is_file() else {}
        if known.get("model") == task.digest and _is_with_slurm(known["job"]):
            self._jobs[task] = known["job"]
            return f"is still with Slurm as job {known['job']}"
        (task.folder / EXIT).unlink(missing_ok=True)
        self._jobs[task] = job = self._submit(task)
        write_atomically(file, json.dumps({"job": job, "model": task.digest}).encode())
        return f"is Slurm's job {job}"

    def _submit(self, task: Task) -> str:
        # The exit file tells a failure without a question to Slurm.
        wrapped = f"{shlex.join([sys.executable, *task.words])}; echo $? > {shlex.quote(str(task.folder / EXIT))}"
        name, log = f"evaluate_{task.update:06d}", str(task.log)
        command = ["sbatch", "--parsable", f"--job-name={name}", f"--output={log}", "--open-mode=append", *self._words]
        environment = without_launcher(os.environ)
        # Of this machine's GPUs; the job has its own.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        done = _run_slurm([*command, "--wrap", wrapped], environment)
        if done.returncode != 0:
            raise HandOffError(f"sbatch: {' '.join(done.stderr.split()) or f'exit status {done.returncode}'}")
        # The cluster's name may follow.
        return done.stdout.strip().partition(";")[0]

    def ended(self, *, look: bool) -> list[Task]:
        if not look and time.monotonic() - self._looked < LOOK_AT_JOBS_EVERY:
            return []
        self._looked = time.monotonic()
        done = [task for task in self._jobs if task.scores() is not None or (task.folder / EXIT).exists()]
        for task in done:
            del self._jobs[task]
        return done

    def about(self, task: Task) -> str:
        return f"job {self._jobs[task]}"

    def close(self) -> None: ...


def _run_slurm(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SLURM_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HandOffError(f"{command[0]}: {error}") from error


def _is_with_slurm(job: str) -> bool:
    """Whether a job is queued or running. Slurm forgets those that ended, and then answers an error."""
    with suppress(HandOffError):
        done = _run_slurm(["squeue", "--noheader", f"--jobs={job}"], without_launcher(os.environ))
        return done.returncode == 0 and bool(done.stdout.strip())
    return False


class HandOff:
    """The leading rank's. Nothing that goes wrong with an evaluation stops the run: it is a warning with the log and
    the command."""

    def __init__(self, config: TrainConfig, run_dir: Path, tracker: Tracker) -> None:
        self._config = config
        self._run_dir = run_dir
        self._tracker = tracker
        self._way: Way = SlurmWay(config.evaluation.sbatch) if config.evaluation.hand_off == "slurm" else LocalWay()
        self._open: dict[int, Task] = {}
        self._failed: set[int] = set()
        # Update of the newest whole checkpoint.
        self._newest = 0

    @property
    def needed(self) -> Collection[int]:
        """Updates of the checkpoints that have to stay: not evaluated yet, or without success."""
        return self._open.keys() | self._failed

    def resume(self, update: int) -> None:
        """Hand over what earlier sessions saved, up to their checkpoint at `update`, and did not see evaluated."""
        self._newest = update
        for saved in checkpoint.saved(self._run_dir):
            if saved <= update:
                self.hand_over(saved)
        self._prune()

    def hand_over(self, update: int) -> None:
        """See to it that a saved checkpoint is evaluated; inline, until it is."""
        self._newest = max(update, self._newest)
        if update in self._tracker.checkpoints:
            return
        digest = digest_as_saved(checkpoint.folder_of(self._run_dir, update))
        if digest is None:
            self._tracker.warning(f"checkpoint {update} is damaged and is not evaluated")
            return
        task = self._task(update, digest)
        self._failed.discard(update)
        if (scores := task.scores()) is not None:
            self._log(task, scores)
            return
        task.folder.mkdir(parents=True, exist_ok=True)
        try:
            said = self._way.begin(task)
        except HandOffError as error:
            self._fail(task, str(error))
            return
        self._open[update] = task
        self._tracker.message(f"checkpoint {update}: its evaluation {said}; log: {task.log}")
        if self._config.evaluation.hand_off == "inline":
            self._wait()

    def take(self, *, look: bool = False) -> None:
        """Log the scores that have arrived. `look`: at the files of Slurm's jobs too, however short a time ago."""
        for task in self._way.ended(look=look):
            del self._open[task.update]
            if (scores := task.scores()) is None:
                self._fail(task, last_lines(task.log))
            else:
                self._log(task, scores)
                self._prune()

    def finish(self) -> None:
        """At the end of training: wait for what is done on this machine, and say what Slurm still has."""
        self.take(look=True)
        if not self._open:
            return
        which = ", ".join(f"{update} ({self._way.about(task)})" for update, task in self._open.items())
        later = f"`python -m grpo_lab.train resume={self._run_dir}`"
        if self._way.waits:
            self._tracker.message(f"waiting for the evaluation of checkpoints {which}; after Ctrl-C {later} goes on")
            self._wait()
        else:
            self._tracker.message(
                f"evaluations still with Slurm: checkpoints {which}. {later} logs what has arrived by then, and "
                f"`python -m grpo_lab.evaluate run={self._run_dir}` evaluates here what has not"
            )

    def close(self) -> None:
        """End what runs on this machine; it goes on when the run is resumed."""
        self._way.close()

    def _task(self, update: int, digest: str) -> Task:
        folder = self._run_dir / RESULTS / checkpoint.folder_of(self._run_dir, update).name
        words = ("-m", "grpo_lab.evaluate", f"run={self._run_dir}", f"checkpoint={update}", f"row={folder / ROW}")
        return Task(update=update, digest=digest, folder=folder, words=(*words, *placement(self._config)))

    def _wait(self) -> None:
        with self._tracker.phase("evaluate"):
            while self._open:
                time.sleep(LOOK_EVERY)
                self.take()

    def _log(self, task: Task, scores: Mapping[str, float]) -> None:
        self._tracker.log_checkpoint(task.update, scores)
        told = ", ".join(f"{name} {100 * value:.1f} %" for name, value in scores.items() if "/mean@" in name)
        self._tracker.message(f"checkpoint {task.update}: {told}")

    def _fail(self, task: Task, reason: str) -> None:
        self._failed.add(task.update)
        self._tracker.warning(
            f"checkpoint {task.update} was not evaluated ({reason}); it stays, and so can be evaluated again: "
            f"{task.command}"
        )

    def _prune(self) -> None:
        checkpoint.prune(self._run_dir, self._config.checkpoint.keep, at=self._newest, spare=self.needed)


def placement(config: TrainConfig) -> Iterator[str]:
    """The keys that say where an evaluation takes place, and keep it off the engine that training uses."""
    evaluation, slurm = config.evaluation, config.evaluation.hand_off == "slurm"
    device = evaluation.device
    if slurm and device is None and config.hardware.device != "cpu":
        # The first of those that the job sees.
        device = "cuda:0"
    if device is not None:
        yield f"hardware.device={device}"
    if config.rollout.engine != "vllm":
        return
    yield from ("rollout.url=null", "rollout.vllm.mode=worker", "rollout.vllm.sleep=false")
    if slurm:
        yield "rollout.vllm.devices=null"
    elif evaluation.device is not None and evaluation.device != "cpu":
        yield from (f"rollout.vllm.devices={_gpu(evaluation.device)}", "rollout.vllm.tensor_parallel=1")


def _gpu(device: str) -> int:
    """Its place among the GPUs of this process."""
    index, names = int(device.removeprefix("cuda:")), visible_gpus()
    if names and index >= len(names):
        raise ConfigError(f"evaluation.device={device}: CUDA_VISIBLE_DEVICES={','.join(names)} has no such GPU")
    return index
