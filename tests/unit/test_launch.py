"""What a launcher's environment says of a process, and how a child that it starts is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from run_config import run_config

from grpo_lab.config import ConfigError
from grpo_lab.distributed import World, device_of
from grpo_lab.launch import Place, check_place, place_from_environment, run_child, start_ranks, typed_command

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_NTASKS"),
)
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu07,gpu12",
    "SLURM_JOB_ID": "1234567",
    "SLURM_NTASKS": "16",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set before they are removed, so that what the code itself sets is undone as well.
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Place | None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return place_from_environment()


def test_without_a_launcher_there_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_from_environment() is None
    # A batch script's own process, and a step of one task, have yet to start their ranks.
    assert given(monkeypatch, {"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None
    assert given(monkeypatch, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch, TORCHRUN) == Place(rank=5, size=16, local_rank=1)


def test_srun_completes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    assert given(monkeypatch, SRUN) == Place(rank=9, size=16, local_rank=1)
    assert os.environ["MASTER_ADDR"] == "gpu07"
    # The same on every node, and another for another job.
    assert os.environ["MASTER_PORT"] == str(20_000 + 14_567)


def test_steps_of_one_job_meet_at_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ports = []
    for step in ("0", "1"):
        given(monkeypatch, SRUN | {"SLURM_STEP_ID": step})
        ports.append(os.environ.pop("MASTER_PORT"))
    assert len(set(ports)) == 2


def test_an_address_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    given(monkeypatch, SRUN | {"MASTER_ADDR": "ib0"})
    assert os.environ["MASTER_ADDR"] == "ib0"


def test_what_a_run_starts_knows_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_LAB_COMMAND", raising=False)
    monkeypatch.setattr("sys.argv", ["train.py", "seed=1"])
    assert typed_command()[1:] == ["train.py", "seed=1"]
    monkeypatch.setenv("GRPO_LAB_COMMAND", "python train.py 'a b' seed=2")
    assert typed_command() == ["python", "train.py", "a b", "seed=2"]


# A shell that starts a command in the background has it ignore Ctrl-C, and so would all that it starts.
PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from grpo_lab import launch
launch.GRACE = 0.5
launch.run_child([sys.executable, "-c", sys.argv[1]], {})
"""
CHILD = """
import signal, sys, time
def end(*_):
    print("tidy", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_the_parent_alone_ends_the_child_tidily(number: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    parent.send_signal(number)
    rest, error = parent.communicate(timeout=30)
    assert rest == b"tidy\n"
    assert parent.returncode != 0
    assert b"KeyboardInterrupt" in error


def test_a_schedulers_notice_ends_the_child_tidily() -> None:
    """Raised as submitit does at a time limit, of which the child hears nothing."""
    notice = "import signal\ndef late(*_): raise RuntimeError('timed out')\nsignal.signal(signal.SIGUSR2, late)\n"
    parent = subprocess.Popen(
        [sys.executable, "-c", notice + PARENT, CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    parent.send_signal(signal.SIGUSR2)
    rest, error = parent.communicate(timeout=30)
    assert rest == b"tidy\n"
    assert b"RuntimeError: timed out" in error


def test_a_childs_exit_code_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    program = "import os, sys; print(os.environ['MORE']); sys.exit(3)"
    assert run_child([sys.executable, "-c", program], {"MORE": "here"}, stdout=sys.__stderr__) == 3
    assert capfd.readouterr() == ("", "here\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_as_many_ranks_as_configured() -> None:
    hardware = run_config("hardware=cpu_2rank").hardware
    check_place(Place(0, 2, 0), hardware)
    with pytest.raises(ConfigError, match=r"started 4 ranks and hardware\.ranks=2: set hardware\.ranks=4"):
        check_place(Place(0, 4, 0), hardware)


def test_several_nodes_need_a_launcher() -> None:
    with pytest.raises(ConfigError, match=r"torchrun --nnodes=2 --nproc-per-node=8"):
        start_ranks(run_config("hardware=2node").hardware, ["-c", "pass"])


@pytest.mark.parametrize(
    ("choice", "local_rank", "device"),
    [
        ("hardware=cpu_2rank", 1, "cpu"),
        ("hardware=8gpu_server", 0, "cuda:1"),
        ("hardware=8gpu_server", 6, "cuda:7"),
        ("hardware=8gpu_colocate_tp4", 3, "cuda:3"),
        ("hardware.device=cuda:2", 0, "cuda:2"),
    ],
)
def test_each_rank_has_a_device(choice: str, local_rank: int, device: str) -> None:
    assert device_of(run_config(choice).hardware, World(rank=local_rank, size=8, local_rank=local_rank)) == device
