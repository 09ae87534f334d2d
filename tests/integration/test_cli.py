"""The commands as a user types them: composition, errors, sweeps, resuming, and the installed wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from small_runs import SMALL

REPOSITORY = Path(__file__).resolve().parents[2]


def command(*arguments: str, cwd: Path, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    return subprocess.run(
        [sys.executable, "-m", "grpo_lab.train", *arguments],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=200,
    )


def test_help_lists_the_groups(tmp_path: Path) -> None:
    shown = command("--help", cwd=tmp_path).stdout
    for group in (
        "objective: agro, ggpo, ggpo_clip, ggpo_reward_only, grpo, grpo_rg, grpo_tis",
        "hardware: 1gpu, 2node",
    ):
        assert group in shown


def test_every_knob_of_the_papers_by_name(tmp_path: Path) -> None:
    overrides = ["objective=ggpo", "schedule.v=10", "schedule.i=2", "schedule.t_ref=160", "seed=1234"]
    shown = command(*overrides, "--cfg", "job", "--resolve", cwd=tmp_path).stdout
    for line in ("name: ggpo", "  v: 10", "  i: 2", "  t_ref: 160", "seed: 1234"):
        assert line in shown
    # Printing a configuration makes nothing.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p=0.9"),
        (["schedule.v=8", "schedule.minibatches_per_collection=3"], "must divide schedule.v=8"),
        (["schedule.vv=3"], "Key 'vv' not in 'ScheduleConfig'"),
        (["objective=ppo"], "Could not find 'objective/ppo'"),
        (["hydra/launcher=submitit_other"], "pip install 'grpo-lab[slurm]'"),
        (["resume=nowhere"], "nowhere/config.yaml is missing"),
        (["model=smollm2_135m", "model.path=nowhere"], "model.path=nowhere"),
        (["-m", "resume=nowhere"], "nowhere/config.yaml is missing"),
        (["-m", "resume=a,b", "seed=3"], "seed= cannot be combined with resume="),
        (["dataset=gsm8k"], "model=tiny knows only the characters of the made task"),
        (["dataset=math500", "dataset.path=nowhere.jsonl", "model=smollm2_135m", "model.path=m"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    if "model.path=m" in arguments:
        (tmp_path / "m").mkdir()
        (tmp_path / "m/config.json").write_text("{}")
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    if "-m" in arguments:
        # A sweep says it once a job, and Hydra names the job.
        lines = list({line for line in lines if line.startswith("error: ")})
    (line,) = lines
    assert line.startswith("error: ")
    assert said in line


def test_a_sweep_runs_each_job_in_its_own_process_and_a_failed_one_takes_no_other(
    model_cache: Path, tmp_path: Path
) -> None:
    settings = [*SMALL, f"model.cache_dir={model_cache}", "schedule.v=1", "schedule.updates=2", "tracking.view=off"]
    done = command(
        "-m",
        *settings,
        "objective=grpo,ggpo",
        # The first value makes every answer empty, so those two jobs fail.
        "rollout.max_response_tokens=1,6",
        "collection.max_batches=12",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "held 0 groups of mixed rewards" in done.stderr
    summaries = sorted((tmp_path / "sweep").glob("*/summary.json"))
    states = [json.loads(path.read_text())["status"] for path in summaries]
    assert states == ["failed", "failed", "finished", "finished"]
    assert [path.parent.name for path in summaries] == [
        "0_grpo_v1_i1_seed42",
        "1_ggpo_v1_i1_seed42",
        "2_grpo_v1_i1_seed42",
        "3_ggpo_v1_i1_seed42",
    ]


def test_a_run_is_resumed_and_lengthened_by_its_folder(model_cache: Path, tmp_path: Path) -> None:
    settings = [*SMALL, f"model.cache_dir={model_cache}", "schedule.v=2", "checkpoint.every=2"]
    assert command(*settings, "schedule.updates=2", "run_dir=run", cwd=tmp_path).returncode == 0
    again = command(*settings, "schedule.updates=2", "run_dir=run", cwd=tmp_path)
    assert again.returncode == 2
    assert "run_dir=run holds a run already" in again.stderr
    refused = command("resume=run", "seed=3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "seed= cannot be combined with resume=" in refused.stderr
    assert command("resume=run", "schedule.updates=4", cwd=tmp_path).returncode == 0
    updates = [json.loads(line)["update"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert updates == [1, 2, 3, 4]
    assert "  updates: 4\n" in (tmp_path / "run/config.yaml").read_text()


def test_a_start_that_failed_over_a_setting_leaves_its_folder_free(model_cache: Path, tmp_path: Path) -> None:
    settings = [*SMALL, f"model.cache_dir={model_cache}", "schedule.v=1", "schedule.updates=1", "run_dir=run"]
    failed = command(*settings, "rollout.max_prompt_tokens=1", cwd=tmp_path)
    assert failed.returncode == 2
    assert "rollout.max_prompt_tokens=1 drops all" in failed.stderr
    assert command(*settings, cwd=tmp_path).returncode == 0


def test_run_folders_are_named_after_what_was_run(model_cache: Path, tmp_path: Path) -> None:
    settings = [*SMALL, f"model.cache_dir={model_cache}", "schedule.v=1", "schedule.updates=1", "seed=7"]
    assert command(*settings, "objective=agro", cwd=tmp_path).returncode == 0
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert run_dir.name.endswith("_tiny_arithmetic_plain_agro_v1_i1_seed7")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "provenance.json", "run.log"):
        assert (run_dir / name).is_file()


def test_the_wheel_carries_its_configuration(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(REPOSITORY)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shown = command("--cfg", "job", cwd=elsewhere, python_path=site)
    assert shown.returncode == 0, shown.stderr
    assert "groups_per_minibatch: 32" in shown.stdout
    found = subprocess.run(
        [sys.executable, "-c", "import grpo_lab.composition as c; print(c.conf_dir())"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(site)},
        text=True,
        capture_output=True,
        check=True,
    )
    assert found.stdout.strip() == str(site / "grpo_lab/conf")
