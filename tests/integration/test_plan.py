"""The plan as a command, and its estimate of memory against runs of a known size."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL
from tiny import save_model, tiny_model

MIB = 2**20


def command(
    *arguments: str, cwd: Path, module: str = "grpo_lab.plan", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        text=True,
        capture_output=True,
        check=False,
        timeout=200,
    )


def planned(*arguments: str, cwd: Path) -> dict[str, Any]:
    done = command(*arguments, "json=true", cwd=cwd)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_plan_for_reading(tmp_path: Path) -> None:
    settings = ["scale=paper", "hardware=8gpu_server", "objective=ggpo", "schedule.v=10"]
    done = command(*settings, "rates.sample=2000", "rates.learn=4000", "rates.sync=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for said in (
        "qwen3_1_7b_base on alp_math, ggpo, v=10 i=1, hardware=8gpu_server (7 ranks, 1 nodes)",
        "1,720,574,976 parameters",
        "updates 1 to 9: step",
        "a response is at most 9 updates old",
        "2 (this run)",
        "fits in 80 GiB",
        "a sync hands over 3.78 GiB (NCCL)",
        "is not in this number",
    ):
        assert said in done.stdout
    # Planning makes nothing.
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_programs(tmp_path: Path) -> None:
    told = planned("schedule.updates=16", "schedule.v=8", cwd=tmp_path)
    assert told["parameters"] == 428_672
    assert told["timeline"]["counts"]["sync"] == 2
    assert told["hours"] is None
    assert told["fits"] is True
    assert told["memory"]["peak"] == sum(told["memory"]["phases"][told["memory"]["peak_phase"]].values())


def test_a_configuration_is_printed_as_by_training(tmp_path: Path) -> None:
    shown = command("schedule.v=4", "probe=true", "--cfg", "job", cwd=tmp_path)
    assert "  v: 4\n" in shown.stdout
    assert "Timeline" not in shown.stdout


def test_without_rates_it_says_what_to_give(tmp_path: Path) -> None:
    assert "no hours: give probe=true" in command(cwd=tmp_path).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["schedule.v=4", "-h"]])
def test_help_is_the_plans_own(arguments: list[str], tmp_path: Path) -> None:
    shown = command(*arguments, cwd=tmp_path).stdout
    assert "probe=true  from_run=<run folder>" in shown
    assert "objective: agro, ggpo" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["schedule.vv=3"], "Key 'vv' not in 'ScheduleConfig'"),
        (["rates.sampled=3"], "rates"),
        (["rates.sample=3"], "rates.sample= and rates.learn= go together"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9"),
        (["dataset=gsm8k"], "model=tiny knows only the characters of the made task"),
        (["from_run=nowhere"], "nowhere/config.yaml is missing"),
        (["resume=nowhere"], "resume= goes on with a run"),
        (["-m", "schedule.v=1,2"], "a plan is of one run: leave out -m"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    assert said in line
    assert "Traceback" not in done.stderr


def test_hours_from_a_run_and_from_a_probe(model_cache: Path, tmp_path: Path) -> None:
    settings = [*SMALL, f"model.cache_dir={model_cache}", "schedule.v=2", "schedule.updates=40"]
    run = command(*settings, "schedule.updates=4", "run_dir=run", cwd=tmp_path, module="grpo_lab.train")
    assert run.returncode == 0, run.stderr
    told = planned(*settings, "from_run=run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    # Forty updates as four, if not as slow as the first two; hours from seconds of whole phases.
    assert 2 <= told["hours"]["phases"]["learn"] * 3600 / summary["seconds"]["learn"] <= 15
    assert told["rates"]["source"] == "run"
    assert 1 <= told["lengths"]["response"] <= 6

    probes = tmp_path / "probes"
    probes.mkdir()
    done = command(*settings, "probe=true", "json=true", cwd=tmp_path, environment={"TMPDIR": str(probes)})
    assert done.returncode == 0, done.stderr
    probed = json.loads(done.stdout)
    assert probed["hours"]["total"] > 0
    assert 0 < probed["mixed"] <= 1
    assert list(probes.iterdir()) == []


def test_a_probe_that_fails_says_why(tmp_path: Path) -> None:
    done = command("model=smollm2_135m", "model.path=.", "dataset=gsm8k", "probe=true", cwd=tmp_path)
    assert done.returncode == 2
    assert "model.path=. holds no config.json" in done.stderr
    assert "the probe ended with exit code 2" in done.stderr


# --- memory -----------------------------------------------------------------------------------------------------

# Runs a rank of a training, and tells the memory of its process (bytes): before the learner is built, when everything
# else is loaded, and the peak from then on.
WATCHED = """
import json, sys
from grpo_lab import build
from grpo_lab.train import main

def told(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

def watching(*arguments, **settings):
    memory["before"] = told("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return building(*arguments, **settings)

memory, building = {}, build.build_learner
build.build_learner = watching
out = sys.argv.pop(1)
main()
with open(out, "w") as file:
    json.dump(memory | {"peak": told("VmHWM")}, file)
"""
SIZES = {
    "small": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 384},
    "middle": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1536},
}
TRAIN = [
    "objective.zero_variance=keep",
    "schedule.v=1",
    "schedule.updates=3",
    "evaluation.every=null",
    "checkpoint.every=null",
    "tracking.wandb=disabled",
    "tracking.view=off",
    "hardware.threads=1",
    "verifier.workers=1",
]


def model_folder_of(size: str, folder: Path) -> Path:
    """A Qwen3 with random weights and 4096 tokens, so that it all but never ends a response of its own accord."""
    shape = SIZES[size]
    heads = shape["num_attention_heads"]
    model = tiny_model(
        "qwen3",
        **shape,
        num_key_value_heads=heads // 2,
        head_dim=64,
        vocab_size=4096,
        initializer_range=0.02,
        max_position_embeddings=512,
    )
    return save_model(model, folder)


def measure(settings: Sequence[str], folder: Path, *, ranks: int = 1) -> list[dict[str, int]]:
    """What `WATCHED` tells of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # Freed memory goes back at once: what counts is what is live.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
        environment |= {name: str(value) for name, value in place.items()} if ranks > 1 else {}
        arguments = [str(folder / f"memory{rank}.json"), *settings, f"run_dir={folder / 'run'}"]
        processes.append(subprocess.Popen([sys.executable, "-c", WATCHED, *arguments], cwd=folder, env=environment))
    assert [process.wait(timeout=250) for process in processes] == [0] * ranks
    return [json.loads((folder / f"memory{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the memory of processes as Linux tells it"
)
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        ("small", ["rollout.max_rows=128"]),
        ("middle", ["groups_per_minibatch=8", "rollout.max_rows=64", "learner.micro_batch_tokens=1600"]),
    ],
)
def test_the_estimate_of_memory_is_near_what_a_run_takes(size: str, settings: list[str], tmp_path: Path) -> None:
    """Within 15 % of what a process takes beyond interpreter and libraries."""
    settings = [*TRAIN, f"model.path={model_folder_of(size, tmp_path / 'model')}", *settings]
    (took,) = measure(settings, tmp_path)
    memory = planned(*settings, "lengths.prompt=8", "from_run=run", cwd=tmp_path)["memory"]
    estimate = memory["peak"] - memory["phases"][memory["peak_phase"]]["libraries"]
    print(f"{size}: measured {(took['peak'] - took['before']) / MIB:.0f} MiB, estimate {estimate / MIB:.0f} MiB")
    assert estimate == pytest.approx(took["peak"] - took["before"], rel=0.15)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the memory of processes as Linux tells it"
)
def test_the_estimate_of_memory_covers_what_two_ranks_take(tmp_path: Path) -> None:
    """As above, ZeRO-2, where the plan is on the safe side: buckets and gradients are not all there at the same moment.
    The second rank loads its libraries late, so that the first one's size without a learner counts for both."""
    pytest.importorskip("deepspeed")
    folder = model_folder_of("middle", tmp_path / "model")
    settings = [*TRAIN, "hardware=cpu_2rank", f"model.path={folder}", "groups_per_minibatch=8", "rollout.max_rows=64"]
    took = measure([*settings, "learner.micro_batch_tokens=1600"], tmp_path, ranks=2)
    memory = planned(*settings, "learner.micro_batch_tokens=1600", "lengths.prompt=8", "from_run=run", cwd=tmp_path)[
        "memory"
    ]
    estimate = memory["peak"] - memory["phases"][memory["peak_phase"]]["libraries"]
    for rank in took:
        measured = rank["peak"] - took[0]["before"]
        print(f"measured {measured / MIB:.0f} MiB, estimate {estimate / MIB:.0f} MiB")
        assert measured <= estimate <= 1.3 * measured
