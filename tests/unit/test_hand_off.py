"""The hand-off with real processes: who is evaluated when, what is kept, what is logged, and what a resume does.

What the evaluation itself would do is played by a script in its place (tests/integration/test_hand_off_runs.py has the
real one), and Slurm by two more.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_config import run_config
from tiny import char_tokenizer

from grpo_lab import checkpoint
from grpo_lab.composition import save_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.distributed import World
from grpo_lab.evaluation.settings import Request, check_request, run_settings
from grpo_lab.evaluation.targets import digest_as_saved, digest_of
from grpo_lab.hand_off import HandOff, check_hand_off, placement
from grpo_lab.tracking import Tracker

# Waits while <run>/hold is there, fails where <run>/fail is, else scores update / 10.
EVALUATE = """
import json, os, pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
run, update = pathlib.Path(words["run"]), int(words["checkpoint"])
with open(run / "begun", "a") as stream:
    stream.write(f"{update} {os.getpid()}\\n")
while (run / "hold").exists():
    time.sleep(0.01)
if (run / "fail").exists():
    sys.exit("error: no memory for it")
weights = run / f"checkpoints/update_{update:06d}/model/model.safetensors"
assert weights.exists(), "the checkpoint is gone"
row = {"update": update, "model": (run / f"digest_{update}").read_text(), "scores": {"sums/mean@2": update / 10}}
# In one step, as the command does: who waits for it may look at any moment.
place = pathlib.Path(words["row"])
place.with_suffix(".tmp").write_text(json.dumps(row))
os.replace(place.with_suffix(".tmp"), place)
"""
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/sbatch_words
env > {folder}/sbatch_environment
[ -e {folder}/refuse ] && {{ echo 'sbatch: error: invalid partition' >&2; exit 1; }}
for word in "$@"; do command="$word"; done
sh -c "$command" > {folder}/job_log 2>&1 &
echo "$$ job" >> {folder}/jobs
echo "42;cluster"
"""
SQUEUE = """#!/bin/sh
[ -e {folder}/queued ] && {{ echo "42 gpu evaluate"; exit 0; }}
echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1
"""


class Run:
    """A run folder, and the parts of a session that the hand-off meets."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.config: TrainConfig = run_config(
            "evaluation.checkpoints=true",
            "checkpoint.every=2",
            "checkpoint.keep=1",
            "tracking.view=off",
            "tracking.wandb=disabled",
            *overrides,
        )
        self.open(None)

    def open(self, resume_from: int | None) -> None:
        """A new session."""
        self.tracker = Tracker.open(self.folder, self.config, total_updates=8, resume_from=resume_from)
        if resume_from is not None:
            self.tracker.start_afresh()
        self.hand_off = HandOff(self.config, self.folder, self.tracker)

    def save(self, update: int, weights: bytes = b"") -> None:
        """As the loop does."""

        def write(folder: Path) -> None:
            (folder / "model").mkdir()
            (folder / "model/config.json").write_text("{}")
            (folder / "model/model.safetensors").write_bytes(weights or str(update).encode())

        folder = checkpoint.save(self.folder, update, dict, write, World())
        (self.folder / f"digest_{update}").write_text(digest_of(folder / "model"))
        checkpoint.prune(self.folder, 1, at=update, spare=self.hand_off.needed)
        self.hand_off.hand_over(update)

    def take_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not done():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
            self.hand_off.take(look=True)

    def begun(self) -> list[int]:
        path = self.folder / "begun"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def rows(self) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["update"], line["sums/mean@2"]) for line in lines if line["kind"] == "checkpoint"]

    @property
    def log(self) -> str:
        return (self.folder / "run.log").read_text()

    @property
    def saved(self) -> list[int]:
        return list(checkpoint.saved(self.folder))

    def row_file(self, update: int) -> Path:
        return self.folder / f"evaluation/update_{update:06d}/row.json"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    (tmp_path / "grpo_lab").mkdir()
    (tmp_path / "grpo_lab/__init__.py").touch()
    (tmp_path / "grpo_lab/evaluate.py").write_text(EVALUATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runs: list[Run] = []

    def build(*overrides: str) -> Run:
        runs.append(Run(Path("run"), *overrides))
        return runs[-1]

    yield build
    for run in runs:
        run.hand_off.close()
        run.tracker.finish(status="finished", next_command=None)


# --- on this machine ---


def test_in_the_background_one_at_a_time_in_order_and_nothing_is_removed_before(make: Callable[..., Run]) -> None:
    run = make("evaluation.hand_off=background")
    (run.folder / "hold").touch()
    for update in (2, 4, 6):
        run.save(update)
    run.take_until(lambda: run.begun() == [2])
    run.hand_off.take()
    assert run.saved == [2, 4, 6]
    assert run.rows == []
    (run.folder / "hold").unlink()
    run.take_until(lambda: not run.hand_off.needed)
    assert run.begun() == [2, 4, 6]
    assert run.rows == [(2, 0.2), (4, 0.4), (6, 0.6)]
    assert run.saved == [6]
    assert "checkpoint 4: its evaluation waits for 1 before it" in run.log
    assert "checkpoint 6: sums/mean@2 60.0 %" in run.log
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["checkpoints"] == {
        "updates": [2, 4, 6],
        "over": {"sums/mean@2": {"min": 0.2, "max": 0.6, "median": 0.4, "mean": pytest.approx(0.4)}},
    }


def test_inline_has_the_scores_when_it_returns(make: Callable[..., Run]) -> None:
    run = make()
    run.save(2)
    assert run.rows == [(2, 0.2)]
    run.save(4)
    assert run.rows == [(2, 0.2), (4, 0.4)]
    assert run.saved == [4]


def test_the_end_waits_and_says_how_to_leave(make: Callable[..., Run]) -> None:
    run = make("evaluation.hand_off=background")
    run.save(2)
    run.save(4)
    run.hand_off.finish()
    assert run.rows == [(2, 0.2), (4, 0.4)]
    assert "waiting for the evaluation of checkpoints 2 (running), 4 (waiting); after Ctrl-C" in run.log
    assert "`python -m grpo_lab.train resume=run` goes on" in run.log


def test_a_failure_is_a_warning_and_a_resume_tries_again(make: Callable[..., Run]) -> None:
    run = make()
    (run.folder / "fail").touch()
    run.save(2)
    run.save(4)
    assert run.rows == []
    assert run.saved == [2, 4]
    (warning,) = [line for line in run.log.splitlines() if "WARNING checkpoint 2" in line]
    assert "run/evaluation/update_000002/log.txt: error: no memory for it" in warning
    assert warning.endswith(
        "python -m grpo_lab.evaluate run=run checkpoint=2 row=run/evaluation/update_000002/row.json"
    )
    run.hand_off.finish()
    (run.folder / "fail").unlink()
    run.open(4)
    run.hand_off.resume(4)
    assert run.rows == [(2, 0.2), (4, 0.4)]
    assert run.saved == [4]


def test_what_was_open_is_ended_and_handed_over_again(make: Callable[..., Run]) -> None:
    run = make("evaluation.hand_off=background")
    (run.folder / "hold").touch()
    run.save(2)
    run.save(4)
    run.take_until(lambda: run.begun() == [2])
    process = int((run.folder / "begun").read_text().split()[1])
    run.hand_off.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    (run.folder / "hold").unlink()
    run.open(4)
    run.hand_off.resume(4)
    run.hand_off.finish()
    assert run.begun() == [2, 2, 4]
    assert run.rows == [(2, 0.2), (4, 0.4)]


def test_a_resume_logs_nothing_twice_and_takes_no_other_weights_scores(make: Callable[..., Run]) -> None:
    run = make()
    run.save(2)
    run.save(4)
    run.open(4)
    run.hand_off.resume(4)
    assert run.saved == [4]
    assert run.rows == [(2, 0.2), (4, 0.4)]
    # Killed, and resumed from 2: what was logged of 4 is cut.
    run.open(2)
    assert run.rows == [(2, 0.2)]
    run.hand_off.resume(2)
    assert run.rows == [(2, 0.2)]
    # The same weights again: the scores are there.
    run.save(4)
    assert run.rows == [(2, 0.2), (4, 0.4)]
    assert run.begun() == [2, 4]
    # Other weights at the same update: they are not these.
    run.open(2)
    run.save(4, weights=b"other")
    assert run.begun() == [2, 4, 4]
    assert run.rows == [(2, 0.2), (4, 0.4)]
    assert json.loads(run.row_file(4).read_text())["model"] == (run.folder / "digest_4").read_text()


def test_scores_that_came_while_nobody_looked_are_logged(make: Callable[..., Run]) -> None:
    run = make()
    (run.folder / "fail").touch()
    run.save(2)
    row = {"update": 2, "model": (run.folder / "digest_2").read_text(), "scores": {"sums/mean@2": 0.75}}
    run.row_file(2).write_text(json.dumps(row))
    run.open(2)
    run.hand_off.resume(2)
    assert run.rows == [(2, 0.75)]
    assert run.begun() == [2]


def test_a_damaged_checkpoint_is_left_out(make: Callable[..., Run]) -> None:
    run = make()
    (run.folder / "fail").touch()
    run.save(2)
    run.save(4)
    (checkpoint.folder_of(run.folder, 2) / "manifest.json").write_text("{}")
    (run.folder / "fail").unlink()
    run.open(4)
    run.hand_off.resume(4)
    assert run.rows == [(4, 0.4)]
    assert "WARNING checkpoint 2 is damaged and is not evaluated" in run.log


def test_the_digest_is_that_of_the_files(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "model/deeper").mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "tokenizer.json", "notes.md", "deeper/config.json"):
            (folder / "model" / name).write_text(name)
        (folder / "config.json").write_text("the learner's")

    folder = checkpoint.save(tmp_path, 2, dict, write, World())
    assert digest_as_saved(folder) == digest_of(folder / "model")
    (folder / "manifest.json").write_text("[")
    assert digest_as_saved(folder) is None


# --- Slurm ---


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files say what was submitted, and what Slurm answers."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (folder / name).write_text(script.format(folder=shlex.quote(str(folder))))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def _jobs(slurm: Path) -> int:
    return len((slurm / "jobs").read_text().splitlines())


SLURM = ("evaluation.hand_off=slurm", 'evaluation.sbatch=["--partition=gpu","--gres=gpu:1"]')


def test_a_job_each_and_scores_arrive_by_their_files(
    make: Callable[..., Run], slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    run = make(*SLURM)
    run.save(2)
    run.save(4)
    words = (slurm / "sbatch_words").read_text().splitlines()
    assert words[:4] == [
        "--parsable",
        "--job-name=evaluate_000004",
        "--output=run/evaluation/update_000004/log.txt",
        "--open-mode=append",
    ]
    assert words[4:7] == ["--partition=gpu", "--gres=gpu:1", "--wrap"]
    names = {line.partition("=")[0] for line in (slurm / "sbatch_environment").read_text().splitlines()}
    assert not names & {"CUDA_VISIBLE_DEVICES", "SLURM_NTASKS"}
    assert "checkpoint 4: its evaluation is Slurm's job 42" in run.log
    run.take_until(lambda: not run.hand_off.needed)
    assert sorted(run.rows) == [(2, 0.2), (4, 0.4)]
    assert run.saved == [4]


def test_the_file_system_is_asked_rarely(make: Callable[..., Run], slurm: Path) -> None:
    run = make(*SLURM)
    run.hand_off.take()
    run.save(2)
    deadline = time.monotonic() + 30
    while not run.row_file(2).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    run.hand_off.take()
    assert run.rows == []
    run.hand_off.take(look=True)
    assert run.rows == [(2, 0.2)]


def test_the_end_does_not_wait_for_slurm_and_a_resume_knows_its_jobs(make: Callable[..., Run], slurm: Path) -> None:
    run = make(*SLURM)
    (run.folder / "hold").touch()
    run.save(2)
    run.hand_off.finish()
    assert "evaluations still with Slurm: checkpoints 2 (job 42). `python -m grpo_lab.train resume=run`" in run.log
    # Still there: nothing is submitted a second time.
    (slurm / "queued").touch()
    run.open(2)
    run.hand_off.resume(2)
    assert _jobs(slurm) == 1
    assert "checkpoint 2: its evaluation is still with Slurm as job 42" in run.log
    (run.folder / "hold").unlink()
    run.take_until(lambda: not run.hand_off.needed)
    assert run.rows == [(2, 0.2)]


def test_jobs_that_slurm_lost_are_submitted_again(make: Callable[..., Run], slurm: Path) -> None:
    run = make(*SLURM)
    (run.folder / "fail").touch()
    run.save(2)
    run.take_until(lambda: "WARNING checkpoint 2 was not evaluated" in run.log)
    assert (run.folder / "evaluation/update_000002/slurm_exit.txt").read_text() == "1\n"
    assert run.saved == [2]
    (run.folder / "fail").unlink()
    run.open(2)
    run.hand_off.resume(2)
    assert _jobs(slurm) == 2
    run.take_until(lambda: not run.hand_off.needed)
    assert run.rows == [(2, 0.2)]


def test_what_slurm_refuses_is_a_warning(make: Callable[..., Run], slurm: Path) -> None:
    run = make(*SLURM)
    (slurm / "refuse").touch()
    run.save(2)
    assert "WARNING checkpoint 2 was not evaluated (sbatch: sbatch: error: invalid partition); it stays" in run.log
    assert set(run.hand_off.needed) == {2}


# --- before it begins ---


def _model(folder: Path, *overrides: str) -> tuple[TrainConfig, str]:
    """A configuration whose tokenizer is here."""
    char_tokenizer().save_pretrained(folder)
    settings = ("dataset.train_problems=20", "dataset.test_problems=4", "evaluation.checkpoints=true")
    return run_config(*settings, *overrides), str(folder)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.hand_off=slurm"], "evaluation.hand_off=slurm needs `sbatch`, which is not on PATH"),
        (
            ["evaluation.lighteval=true", "evaluation.lighteval_python=nowhere"],
            "evaluation.lighteval_python=nowhere does not exist",
        ),
        (["evaluation.benchmarks=[math500]"], "knows only the characters of the made task"),
        (["model.id=a/b", "evaluation.benchmarks=[math500]", "evaluation.paths.math500=gone.jsonl"], "gone.jsonl"),
    ],
)
def test_what_is_missing_is_said_at_the_start(
    overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    config, folder = _model(tmp_path, *overrides)
    config.model.revision = None
    with pytest.raises(ConfigError) as caught:
        check_hand_off(config, tmp_path / "run", folder)
    assert said in str(caught.value)


def test_a_gpu_that_is_not_there_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at the first checkpoint, where it would end the run."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    config, folder = _model(tmp_path, "hardware=8gpu_server", "evaluation.device=cuda:7")
    with pytest.raises(ConfigError, match=r"evaluation\.device=cuda:7: CUDA_VISIBLE_DEVICES=4,6 has no such GPU"):
        check_hand_off(config, tmp_path / "run", folder)


def test_a_folder_that_the_command_would_read_as_two_is_refused(tmp_path: Path) -> None:
    config, folder = _model(tmp_path)
    check_hand_off(config, tmp_path / "run", folder)
    with pytest.raises(ConfigError, match=r"takes no comma, bracket or quote"):
        check_hand_off(config, tmp_path / "v=8,i=1", folder)


PLACES: list[tuple[list[str], dict[str, str], list[str]]] = [
    ([], {}, []),
    (["evaluation.device=cuda:1"], {}, ["hardware.device=cuda:1"]),
    (["hardware=1gpu", "rollout.engine=hf", "evaluation.device=cpu"], {}, ["hardware.device=cpu"]),
    (["hardware=1gpu", "rollout.engine=hf", "evaluation.hand_off=slurm"], {}, ["hardware.device=cuda:0"]),
    (
        ["hardware=8gpu_server", "evaluation.device=cuda:7"],
        {},
        [
            "hardware.device=cuda:7",
            "rollout.url=null",
            "rollout.vllm.mode=worker",
            "rollout.vllm.sleep=false",
            "rollout.vllm.devices=7",
            "rollout.vllm.tensor_parallel=1",
        ],
    ),
    (
        ["hardware=8gpu_server", "evaluation.device=cuda:1"],
        {"CUDA_VISIBLE_DEVICES": "4, 6"},
        [
            "hardware.device=cuda:1",
            "rollout.url=null",
            "rollout.vllm.mode=worker",
            "rollout.vllm.sleep=false",
            "rollout.vllm.devices=1",
            "rollout.vllm.tensor_parallel=1",
        ],
    ),
    (
        ["hardware=8gpu_server", "evaluation.hand_off=slurm"],
        {},
        [
            "hardware.device=cuda:0",
            "rollout.url=null",
            "rollout.vllm.mode=worker",
            "rollout.vllm.sleep=false",
            "rollout.vllm.devices=null",
        ],
    ),
]


@pytest.mark.parametrize(("overrides", "environment", "words"), PLACES)
def test_where_it_takes_place(
    overrides: list[str], environment: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert list(placement(run_config(*overrides))) == words


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(ConfigError, match=r"evaluation\.device=cuda:7: CUDA_VISIBLE_DEVICES=4,6 has no such GPU"):
        list(placement(run_config("hardware=8gpu_server", "evaluation.device=cuda:7")))


@pytest.mark.parametrize(("overrides", "environment", "words"), PLACES)
def test_the_command_takes_these_words(
    overrides: list[str], environment: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    """The run's evaluation may be given what the hand-off types, and is then valid on one process."""
    save_config(run_config(*overrides), tmp_path / "config.yaml")
    check_request(Request(runs=(str(tmp_path),), checkpoints=("2",), row="row.json"), words)
    config = run_settings(tmp_path, run_config(*words), words)
    assert config.rollout.engine == "hf" or (config.rollout.vllm.mode, config.rollout.url) == ("worker", None)
    named = [word.partition("=")[2] for word in words if word.startswith("hardware.device=")]
    assert [config.hardware.device] == (named or ["cpu"])
    devices = [word.partition("=")[2] for word in words if word.startswith("rollout.vllm.devices=")]
    assert config.rollout.vllm.devices == (devices[0] if devices and devices != ["null"] else None)
