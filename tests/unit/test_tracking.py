from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wandb

from grpo_lab.config import ArithmeticConfig, ConfigError, GgpoConfig, TrackingConfig, TrainConfig
from grpo_lab.tracking import Tracker
from grpo_lab.tracking.jsonl import AppendFile
from grpo_lab.types import Group, Problem, Prompt, Rollout


def make_config(*, mode: str = "disabled", view: str = "off") -> TrainConfig:
    config = TrainConfig(
        seed=42,
        group_size=8,
        groups_per_minibatch=4,
        dataset=ArithmeticConfig(kind="arithmetic", name="sums"),
        objective=GgpoConfig(family="ggpo", name="ggpo"),
        tracking=TrackingConfig(
            wandb=mode, project="tracking_test", group="g", tags=["t"], view=view, rollouts_every=None, block=8
        ),
    )
    config.schedule.v, config.schedule.i, config.hardware.threads = 8, 1, 1
    return config


def train(tracker: Tracker, updates: range) -> None:
    """Rows that depend on the update alone, an evaluation at every third."""
    for update in updates:
        with tracker.phase("learn"):
            tracker.log_update(update, {"loss": 1.0 / update, "total/tokens": 100 * update})
        if update % 3 == 0:
            tracker.log_evaluation(update, {"pass@1": update / 10, "pass@8": 0.9})


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def document(run_dir: Path, name: str) -> dict[str, Any]:
    return json.loads((run_dir / name).read_text())


# --- rows -------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path / "run", make_config(), total_updates=3, resume_from=None)
    tracker.log_evaluation(0, {"pass@1": 0.25, "pass@8": 0.5})
    train(tracker, range(1, 4))
    tracker.message("hello")
    tracker.finish(status="finished", next_command="python -m grpo_lab.report run")
    assert rows(tmp_path / "run") == [
        {"kind": "evaluation", "update": 0, "pass@1": 0.25, "pass@8": 0.5},
        {"kind": "update", "update": 1, "loss": 1.0, "total/tokens": 100},
        {"kind": "update", "update": 2, "loss": 0.5, "total/tokens": 200},
        {"kind": "update", "update": 3, "loss": 1.0 / 3.0, "total/tokens": 300},
        {"kind": "evaluation", "update": 3, "pass@1": 0.3, "pass@8": 0.9},
    ]
    summary = document(tmp_path / "run", "summary.json")
    assert summary["status"] == "finished"
    assert summary["first"] == {"update": 0, "pass@1": 0.25, "pass@8": 0.5}
    assert summary["best"] == summary["last"] == {"update": 3, "pass@1": 0.3, "pass@8": 0.9}
    assert (summary["updates"], summary["tokens"]) == (3, 300)
    assert math.isclose(summary["seconds_total"], sum(summary["seconds"].values()))
    assert (tmp_path / "run" / "run.log").read_text().endswith(" hello\n")


def test_scores_of_checkpoints_go_under_their_update_and_come_back(tmp_path: Path) -> None:
    config = make_config()
    tracker = Tracker.open(tmp_path / "run", config, total_updates=6, resume_from=None)
    train(tracker, range(1, 5))
    tracker.log_checkpoint(2, {"sums/mean@2": 0.5})
    tracker.log_checkpoint(4, {"sums/mean@2": 0.25})
    state = tracker.state()
    tracker.finish(status="interrupted", next_command=None)
    assert rows(tmp_path / "run")[-2:] == [
        {"kind": "checkpoint", "update": 2, "sums/mean@2": 0.5},
        {"kind": "checkpoint", "update": 4, "sums/mean@2": 0.25},
    ]
    # Resumed from 3: what is known of later checkpoints goes with their rows.
    tracker = Tracker.open(tmp_path / "run", config, total_updates=6, resume_from=3)
    tracker.load_state(state)
    assert list(tracker.checkpoints) == [2]
    tracker.finish(status="finished", next_command=None)
    spread = {"min": 0.5, "max": 0.5, "median": 0.5, "mean": 0.5}
    checkpoints = document(tmp_path / "run", "summary.json")["checkpoints"]
    assert checkpoints == {"updates": [2], "over": {"sums/mean@2": spread}}


def test_the_time_of_a_row_is_what_passed_since_the_row_before(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path, make_config(), total_updates=None, resume_from=None)
    with tracker.phase("collect"):
        pass
    tracker.log_update(1, {"total/tokens": 500})
    tracker.log_update(2, {"total/tokens": 500})
    tracker.finish(status="finished", next_command=None)
    first, second = (json.loads(line)["time"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert set(first) - set(second) == {"tokens_per_second"}
    assert first["tokens_per_second"] == 500 / first["collect"]
    assert first["collect"] > 0.0 == second["collect"]
    assert math.isclose(first["elapsed"] + second["other"], second["elapsed"])


def test_the_speed_of_what_was_sampled_before_a_resume_is_not_known(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path / "run", make_config(), total_updates=4, resume_from=None)
    for update, seconds in ((1, 2.0), (2, None)):
        with tracker.phase("collect"):
            tracker.sampled_beside(seconds)
        tracker.log_update(update, {"total/tokens": 500 * update})
    tracker.finish(status="finished", next_command=None)
    times = [json.loads(line)["time"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert times[0]["tokens_per_second"] == 250
    assert "tokens_per_second" not in times[1]


def test_summary_json_is_rewritten_at_each_evaluation(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path, make_config(), total_updates=9, resume_from=None)
    train(tracker, range(1, 4))
    assert document(tmp_path, "summary.json")["status"] == "running"
    train(tracker, range(4, 7))
    assert document(tmp_path, "summary.json")["last"]["update"] == 6
    tracker.finish(status="failed", next_command=None)
    tracker.finish(status="finished", next_command=None)
    assert document(tmp_path, "summary.json")["status"] == "failed", "only the first finish counts"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_stops_the_run_at_the_row(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    tracker = Tracker.open(tmp_path, make_config(), total_updates=9, resume_from=None)
    with pytest.raises(OSError, match="No space left"):
        tracker.log_update(1, {"loss": 1.0})
    tracker.finish(status="failed", next_command=None)
    assert document(tmp_path, "summary.json")["updates"] == 0


def test_a_summary_that_cannot_be_written_raises_and_the_rest_is_still_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker.open(tmp_path, make_config(view="plain"), total_updates=9, resume_from=None)
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(OSError, match=r"summary\.json"):
        tracker.finish(status="finished", next_command=None)
    assert "finished: 0 updates" in capsys.readouterr().out
    with pytest.raises(ValueError, match="closed file"):
        tracker.log_update(1, {})


# --- resume -----------------------------------------------------------------------------------------------------


def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tracker = Tracker.open(whole, make_config(), total_updates=6, resume_from=None)
    train(tracker, range(1, 7))
    tracker.finish(status="finished", next_command=None)

    tracker = Tracker.open(killed, make_config(), total_updates=6, resume_from=None)
    train(tracker, range(1, 4))
    state = json.loads(json.dumps(tracker.state()))
    train(tracker, range(4, 6))
    with (killed / "metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "update", "update": 6, "lo')

    resumed = Tracker.open(killed, replace(make_config(), resume=str(killed)), total_updates=6, resume_from=3)
    resumed.load_state(state)
    assert [row["update"] for row in rows(killed)] == [1, 2, 3, 3]
    train(resumed, range(4, 7))
    resumed.finish(status="finished", next_command=None)

    assert rows(killed) == rows(whole)
    summaries = [document(folder, "summary.json") for folder in (whole, killed)]
    for summary in summaries:
        del summary["seconds"], summary["seconds_total"]
    assert summaries[0] == summaries[1]
    assert "resume at update 3: 3 later rows of metrics.jsonl and 0 later files" in (killed / "run.log").read_text()


def test_seconds_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path, make_config(), total_updates=6, resume_from=None)
    train(tracker, range(1, 3))
    state = tracker.state()
    state["seconds"]["learn"] = 1000.0
    tracker = Tracker.open(tmp_path, make_config(), total_updates=6, resume_from=2)
    tracker.load_state(state)
    train(tracker, range(3, 4))
    tracker.finish(status="finished", next_command=None)
    assert 1000.0 < document(tmp_path, "summary.json")["seconds"]["learn"] < 1001.0
    last_update = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-2])
    assert last_update["time"]["learn"] < 1.0, "a row's own time does not hold the earlier sessions'"


def test_provenance_keeps_every_session(tmp_path: Path) -> None:
    for resume_from in (None, 0):
        Tracker.open(tmp_path, make_config(), total_updates=1, resume_from=resume_from).finish(
            status="interrupted", next_command=None
        )
    sessions = document(tmp_path, "provenance.json")["sessions"]
    assert [session["resume_from"] for session in sessions] == [None, 0]
    assert sessions[0]["python"] == sys.version.split()[0]
    assert sessions[0]["threads"]["hardware.threads"] == 1
    assert sessions[0]["command"] == [sys.executable, *sys.argv]


def test_a_broken_provenance_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text("{")
    with pytest.raises(ConfigError, match=r"provenance\.json cannot be read"):
        Tracker.open(tmp_path, make_config(), total_updates=1, resume_from=0)


def test_a_new_run_does_not_write_into_another(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path, make_config(), total_updates=1, resume_from=None)
    train(tracker, range(1, 2))
    with pytest.raises(ConfigError, match="holds a run already"):
        Tracker.open(tmp_path, make_config(), total_updates=1, resume_from=None)
    again = Tracker.open(tmp_path, make_config(), total_updates=1, resume_from=-1)
    assert rows(tmp_path) == []
    again.start_afresh()
    train(again, range(1, 2))
    again.finish(status="finished", next_command=None)
    assert len(rows(tmp_path)) == 1


def test_rows_that_the_checkpoint_knows_of_and_the_file_does_not_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Tracker.open(tmp_path, make_config(), total_updates=9, resume_from=5)
    expected = "metrics.jsonl ends at update 0, before the checkpoint's 5: the rows between are lost\n"
    assert capsys.readouterr().err == f"warning: {expected}"
    assert (tmp_path / "run.log").read_text().endswith(f"WARNING {expected}")


def test_a_state_is_on_the_disk_before_it_is_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[AppendFile] = []
    monkeypatch.setattr(AppendFile, "sync", lambda self: synced.append(self))
    tracker = Tracker.open(tmp_path, make_config(), total_updates=9, resume_from=None)
    tracker.log_update(1, {})
    assert synced == [], "a row alone costs no fsync"
    tracker.state()
    assert len(synced) == 1
    tracker.finish(status="finished", next_command=None)


# --- what is shown ----------------------------------------------------------------------------------------------


def test_plain_lines_messages_the_table_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    tracker = Tracker.open(tmp_path, make_config(view="auto"), total_updates=3, resume_from=None)
    tracker.message("collected [3]")
    train(tracker, range(1, 4))
    tracker.finish(status="finished", next_command="python -m grpo_lab.report [run]")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "collected [3]"
    assert lines[1].startswith("update 1/3 | 0:00:0")
    assert lines[2].startswith("update 3/3 | held-out 0.3000 @3 (best 0.3000 @3)")
    assert lines[-1] == "next: python -m grpo_lab.report [run]"


def test_off_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker.open(tmp_path, make_config(view="off"), total_updates=3, resume_from=None)
    tracker.message("hello")
    train(tracker, range(1, 4))
    tracker.finish(status="finished", next_command="next")
    assert capsys.readouterr() == ("", "")


def test_rollouts_are_written_and_dropped_on_resume(tmp_path: Path) -> None:
    tracker = Tracker.open(tmp_path, make_config(), total_updates=9, resume_from=None)
    rollout = Rollout(
        token_ids=np.array([0, 1], dtype=np.int32),
        behaviour_logprobs=np.array([-1.0, -1.0], dtype=np.float32),
        finish_reason="stop",
        policy_version=0,
        text="ab",
    )
    prompt = Prompt(problem=Problem(id="p", question="q", gold="g"), text="q", token_ids=(0,))
    group = Group(prompt=prompt, rollouts=(rollout,), rewards=(1.0,), verdicts=("correct",), sequence=0)
    tracker.log_rollouts(160, [group], [[np.array([-1.0, -2.0])]], lambda ids: "".join("ab"[i] for i in ids))
    path = tmp_path / "rollouts" / "update_000160.txt"
    assert "\na⟦b⟧\n" in path.read_text(encoding="utf-8")
    Tracker.open(tmp_path, make_config(), total_updates=9, resume_from=0)
    assert not path.exists()


# --- W&B --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key of the machine's, no settings of the user's, and no service left behind."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    yield
    wandb.teardown()


def fake_run(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> list[dict[str, Any]]:
    """Replace wandb's own entry point; returns the arguments of each init."""
    calls: list[dict[str, Any]] = []

    def init(**arguments: Any) -> Any:
        calls.append(arguments)
        if (error := methods.get(arguments["mode"])) is not None:
            raise error
        run = {"log": lambda values: None, "finish": lambda exit_code: None, "define_metric": lambda *a, **k: None}
        return SimpleNamespace(**{"id": arguments["id"] or "new", **run, **methods})

    monkeypatch.setattr(wandb, "init", init)
    return calls


@pytest.mark.usefixtures("clean_wandb")
def test_an_offline_run_is_written_and_resumed_under_its_id(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker.open(tmp_path, make_config(mode="auto"), total_updates=3, resume_from=None)
    tracker.log_evaluation(0, {"pass@1": 0.125})
    tracker.log_update(1, {"mismatch/k3": 0.0625})
    state = tracker.state()
    tracker.finish(status="finished", next_command=None)
    tracker = Tracker.open(tmp_path, make_config(mode="auto"), total_updates=3, resume_from=1)
    tracker.load_state(state)
    tracker.log_update(2, {"mismatch/k3": 0.03125})
    assert tracker.state()["wandb_id"] == state["wandb_id"]
    tracker.finish(status="finished", next_command=None)

    # W&B's service writes the last block of a file when it ends.
    wandb.teardown()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{state['wandb_id']}.wandb"))
    content = b"".join(file.read_bytes() for file in files)
    for expected in (b"evaluation/pass@1", b"0.125", b"mismatch/k3", b"0.0625", b"0.03125", b"tracking_test"):
        assert expected in content
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("clean_wandb")
def test_what_wandb_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    metrics: list[Any] = []
    codes: list[int] = []
    calls = fake_run(
        monkeypatch,
        log=logged.append,
        finish=lambda exit_code: codes.append(exit_code),
        define_metric=lambda name, step_metric: metrics.append((name, step_metric)),
    )
    tracker = Tracker.open(tmp_path, make_config(mode="offline"), total_updates=3, resume_from=None)
    tracker.log_update(1, {"loss": 0.5})
    tracker.log_evaluation(1, {"pass@1": 0.25})
    tracker.log_update(2, {"loss": 0.25})
    tracker.log_checkpoint(1, {"sums/mean@2": 0.125})
    tracker.finish(status="failed", next_command=None)
    assert len(calls) == 1
    told = calls[0]
    assert (told["mode"], told["project"], told["group"], told["tags"]) == ("offline", "tracking_test", "g", ["t"])
    assert told["config"]["schedule"]["v"] == 8
    assert told["dir"] == tmp_path
    assert metrics == [("*", "update")]
    assert logged[0]["update"] == 1
    assert logged[0]["loss"] == 0.5
    assert "time/learn" in logged[0]
    assert logged[1] == {"update": 1, "evaluation/pass@1": 0.25}
    assert logged[3] == {"update": 1, "checkpoint/sums/mean@2": 0.125}
    assert codes == [1]


@pytest.mark.usefixtures("clean_wandb")
@pytest.mark.parametrize(
    ("mode", "environment", "expected", "warnings"),
    [
        ("offline", {"WANDB_API_KEY": "a" * 40}, "offline", 0),
        ("auto", {}, "offline", 0),
        ("auto", {"WANDB_API_KEY": "a" * 40}, "online", 0),
        ("auto", {"WANDB_API_KEY": "a" * 40, "WANDB_MODE": "offline"}, "offline", 0),
        ("auto", {"WANDB_API_KEY": "short"}, "offline", 1),
        ("online", {"WANDB_API_KEY": "a" * 40}, "online", 0),
        ("online", {}, "offline", 1),
    ],
)
def test_online_is_only_where_a_key_is_set_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    mode: str,
    environment: dict[str, str],
    expected: str,
    warnings: int,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls = fake_run(monkeypatch)
    tracker = Tracker.open(tmp_path, make_config(mode=mode), total_updates=3, resume_from=None)
    tracker.finish(status="finished", next_command=None)
    assert [call["mode"] for call in calls] == [expected]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == captured.err.count("warning: W&B cannot go online") == warnings


@pytest.mark.usefixtures("clean_wandb")
def test_an_online_start_that_fails_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    calls = fake_run(monkeypatch, online=wandb.errors.CommError("no such host\nmore"))
    tracker = Tracker.open(tmp_path, make_config(mode="online"), total_updates=3, resume_from=None)
    tracker.log_update(1, {"loss": 0.5})
    tracker.finish(status="finished", next_command=None)
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert capsys.readouterr().err == (
        "warning: W&B cannot go online (no such host): offline instead, upload later with `wandb sync`\n"
    )


@pytest.mark.usefixtures("clean_wandb")
def test_a_run_goes_on_without_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_run(monkeypatch, offline=RuntimeError())
    tracker = Tracker.open(tmp_path, make_config(mode="offline"), total_updates=3, resume_from=None)
    train(tracker, range(1, 4))
    tracker.finish(status="finished", next_command=None)
    assert len(calls) == 1
    assert capsys.readouterr().err == "warning: W&B did not start (RuntimeError): the run goes on without it\n"
    assert len(rows(tmp_path)) == 4


@pytest.mark.usefixtures("clean_wandb")
def test_a_failure_while_logging_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BrokenPipeError("service gone")

    fake_run(monkeypatch, log=fail, finish=fail)
    tracker = Tracker.open(tmp_path, make_config(mode="offline"), total_updates=3, resume_from=None)
    train(tracker, range(1, 4))
    tracker.finish(status="finished", next_command=None)
    assert capsys.readouterr().err == (
        "warning: W&B failed (service gone): mirroring stops here, metrics.jsonl has every row\n"
    )
    assert len(rows(tmp_path)) == 4
