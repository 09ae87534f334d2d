from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from grpo_lab.atomic import write_atomically
from grpo_lab.config import ConfigError
from grpo_lab.tracking.clock import PhaseClock
from grpo_lab.tracking.jsonl import AppendFile, encode_row, restore_rows
from grpo_lab.tracking.provenance import git_state, installed_versions
from grpo_lab.tracking.rollouts import drop_later, largest_log_ratios, marked_text, write_rollouts
from grpo_lab.tracking.summary import Summary
from grpo_lab.types import Group, Problem, Prompt, Rollout


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# --- atomic files -----------------------------------------------------------------------------------------------


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_failed_atomic_write_raises_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    with pytest.raises(OSError, match="taken"):
        write_atomically(target, b"new")
    assert os.listdir(tmp_path) == ["taken"]


# --- metrics.jsonl ----------------------------------------------------------------------------------------------


def test_a_row_is_strict_json_with_non_finite_numbers_listed() -> None:
    row = {"loss": float("nan"), "lr": np.float32(0.5), "b": float("-inf"), "collect/kept": np.int64(3)}
    line = encode_row("update", 7, row, {"learn": 1.5})
    assert line == (
        '{"kind": "update", "update": 7, "b": null, "collect/kept": 3, "loss": null, "lr": 0.5, '
        '"non_finite": {"b": "-inf", "loss": "nan"}, "time": {"learn": 1.5}}'
    )


def test_floats_come_back_bit_for_bit() -> None:
    value = 0.1 + 0.2
    assert json.loads(encode_row("update", 1, {"x": value}, {}))["x"] == value


def test_a_metric_cannot_take_the_name_of_a_key_of_the_line() -> None:
    with pytest.raises(ValueError, match="cannot be called time"):
        encode_row("update", 1, {"time": 1.0}, {})


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "metrics.jsonl")
    file.write_line("one")
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"
    file.write_line("två")
    file.sync()
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == "one\ntvå\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_raises_at_the_row_that_did_not_fit() -> None:
    file = AppendFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.write_line("row")
    file.close()


def write_rows(path: Path, updates: list[int], tail: bytes = b"") -> None:
    path.write_bytes(b"".join(encode_row("update", u, {"x": u}, {}).encode() + b"\n" for u in updates) + tail)


def test_rows_past_the_checkpoint_and_a_torn_last_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [1, 2, 3, 4], b'{"kind": "update", "upd')
    rows, dropped = restore_rows(path, 2)
    assert [row["x"] for row in rows] == [1, 2]
    assert dropped == 3
    expected = tmp_path / "expected.jsonl"
    write_rows(expected, [1, 2])
    assert path.read_bytes() == expected.read_bytes()


def test_a_whole_last_row_without_its_line_break_is_kept_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert restore_rows(path, 2)[1] == 0
    assert path.read_bytes() == whole


def test_a_file_with_nothing_to_drop_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [1, 2])
    inode = path.stat().st_ino
    restore_rows(path, 2)
    assert path.stat().st_ino == inode


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert restore_rows(tmp_path / "metrics.jsonl", 5) == ([], 0)


@pytest.mark.parametrize("bad", [b"garbage\n", b"[1]\n", b'{"kind": "update"}\n'])
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, [1], bad + encode_row("update", 2, {}, {}).encode() + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 is not a row"):
        restore_rows(path, 2)


# --- the clock --------------------------------------------------------------------------------------------------


def test_inner_time_is_not_counted_twice_and_nothing_is_lost() -> None:
    time = FakeTime()
    clock = PhaseClock(time)
    time.now = 1.0
    with clock.phase("collect"):
        time.now = 3.0
        with clock.phase("sync"):
            assert clock.current == "sync"
            time.now = 3.5
        time.now = 7.5
        assert clock.seconds()["collect"] == 6.0
    time.now = 8.0
    seconds = clock.seconds()
    assert seconds == {"collect": 6.0, "sync": 0.5, "learn": 0.0, "evaluate": 0.0, "save": 0.0, "other": 1.5}
    assert sum(seconds.values()) == 8.0


def test_a_phase_ends_when_its_body_raises() -> None:
    time = FakeTime()
    clock = PhaseClock(time)

    def fail_after(seconds: float) -> None:
        time.now += seconds
        raise RuntimeError

    with pytest.raises(RuntimeError), clock.phase("learn"):
        fail_after(2.0)
    time.now = 5.0
    assert clock.current == "other"
    assert clock.seconds()["learn"] == 2.0


def test_earlier_seconds_add_up_and_unknown_phases_are_refused() -> None:
    time = FakeTime()
    clock = PhaseClock(time)
    clock.load({"learn": 10.0})
    with clock.phase("learn"):
        time.now = 1.0
    assert clock.seconds()["learn"] == 11.0
    with pytest.raises(ValueError, match="no phase is called train"), clock.phase("train"):
        pass


# --- summary ----------------------------------------------------------------------------------------------------


def test_best_is_the_largest_pass_at_1_and_the_earliest_of_equals(tmp_path: Path) -> None:
    summary = Summary("abc")
    for update, score in [(0, 0.25), (8, 0.5), (16, 0.5), (24, float("nan")), (32, 0.375)]:
        summary.evaluated(update, {"pass@8": 1.0 - score, "pass@1": score})
    summary.updated(32, {"total/tokens": 1000.0, "total/responses": 20.0})
    summary.updated(33, {})
    summary.write(tmp_path / "summary.json", status="finished", seconds={"learn": 2.0, "other": 1.0})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "status": "finished",
        "first": {"update": 0, "pass@1": 0.25, "pass@8": 0.75},
        "last": {"update": 32, "pass@1": 0.375, "pass@8": 0.625},
        "best": {"update": 8, "pass@1": 0.5, "pass@8": 0.5},
        "updates": 33,
        "tokens": 1000,
        "responses": 20,
        "seconds": {"learn": 2.0, "other": 1.0},
        "seconds_total": 3.0,
        "config_hash": "abc",
    }


def test_mean_at_n_ranks_where_pass_at_1_is_not_asked_for() -> None:
    summary = Summary("abc")
    for update, score in [(0, 0.25), (8, 0.5), (16, 0.375)]:
        summary.evaluated(update, {"mean@4": score, "mean@4/easy": 1.0 - score, "pass@4": 1.0})
    assert summary.best is not None
    assert summary.best["update"] == 8


def test_the_spread_is_of_the_scores_that_every_checkpoint_has(tmp_path: Path) -> None:
    summary = Summary("abc")
    scores = {"a/mean@2": 0.75, "a/lighteval/a/avg@2": 0.5, "split/easy/pass@2": 1.0, "a/verdict/error": 0.25, "b/x": 1}
    summary.evaluated_checkpoint(4, scores)
    summary.evaluated_checkpoint(2, {"a/mean@2": 0.25, "a/lighteval/a/avg@2": 0.5, "a/verdict/error": 0.25})
    summary.write(tmp_path / "summary.json", status="running", seconds={})
    flat = {"min": 0.5, "max": 0.5, "median": 0.5, "mean": 0.5}
    assert json.loads((tmp_path / "summary.json").read_text())["checkpoints"] == {
        "updates": [2, 4],
        "over": {"a/mean@2": {"min": 0.25, "max": 0.75, "median": 0.5, "mean": 0.5}, "a/lighteval/a/avg@2": flat},
    }


def test_a_summary_comes_back_from_its_state() -> None:
    summary = Summary("abc")
    summary.evaluated(0, {"pass@1": 0.25})
    summary.updated(3, {"total/tokens": 30, "total/responses": 6})
    other = Summary("abc")
    other.load_state(json.loads(json.dumps(summary.state())))
    assert other == summary
    other.evaluated(3, {"pass@1": 0.75})
    assert summary.best == {"update": 0, "pass@1": 0.25}


# --- provenance -------------------------------------------------------------------------------------------------


def test_versions_are_those_installed() -> None:
    versions = installed_versions()
    assert versions["numpy"] == metadata.version("numpy")
    assert "deepspeed" in versions or not any(d.name == "deepspeed" for d in metadata.distributions())


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_git_state_is_the_commit_that_tracks_the_source_and_whether_it_is_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    source = tmp_path / "package.py"
    source.write_text("x = 1\n")
    git("init")
    assert git_state(source) is None, "not tracked: the checkout around it is not its own"
    git("add", "package.py")
    git("commit", "-m", "one")
    assert git_state(source) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    source.write_text("x = 2\n")
    assert git_state(source) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_without_git_there_is_no_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path(__file__)) is None


# --- rollouts ---------------------------------------------------------------------------------------------------

WORDS = [" two", " plus", " is", " four", "\x1b[2J", "<eos>"]


def decode(ids: list[int]) -> str:
    # As many tokenizers do: the leading blank of a text is dropped, so a token alone reads differently.
    return "".join(WORDS[i] for i in ids).removeprefix(" ")


def response(ids: list[int], behaviour: list[float]) -> Rollout:
    return Rollout(
        token_ids=np.array(ids, dtype=np.int32),
        behaviour_logprobs=np.array(behaviour, dtype=np.float32),
        finish_reason="stop" if ids[-1] == 5 else "length",
        policy_version=16,
        text=decode(ids),
    )


def test_the_largest_log_ratios_are_marked_and_rounding_is_not() -> None:
    assert largest_log_ratios(np.array([0.5, -2.0, 0.009, 0.0])) == [0, 1]
    assert largest_log_ratios(np.array([0.1, 0.7, 0.2, 0.3, -0.4, np.nan, 0.5])) == [1, 3, 4, 5, 6]
    assert largest_log_ratios(np.array([])) == []


def test_marks_sit_on_the_token_as_it_reads_in_the_text() -> None:
    text, tokens = marked_text(np.array([0, 1, 0, 2, 3, 5]), [0, 3], decode)
    assert text == "⟦two⟧ plus two⟦ is⟧ four<eos>"
    assert tokens == ["two", " is"]


def test_a_group_reads_as_text(tmp_path: Path) -> None:
    problem = Problem(id="p1", question="two plus two", gold="four")
    group = Group(
        prompt=Prompt(problem=problem, text="Q: two plus two\nA:", token_ids=(0, 1, 0)),
        rollouts=(response([2, 3, 5], [-1.0, -0.5, -0.25]), response([2, 4], [-1.0, -3.0])),
        rewards=(1.0, 0.0),
        verdicts=("correct", "unparsed"),
        sequence=37,
    )
    logprobs = [[np.array([-1.0, -0.25, -0.25]), np.array([-1.0, -5.0])]]
    path = tmp_path / "rollouts" / "update_000160.txt"
    write_rollouts(path, 160, [group], logprobs, decode)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "update 160: 1 groups"
    assert lines[3:] == [
        "=== group 1 of 1 | problem p1 | drawn as 37 | mean reward 0.500 of 2 | gold four",
        "Q: two plus two",
        "A:",
        "",
        "--- response 1 | reward 1 | correct | version 16 | stop | 3 tokens | sum of log ratios +0.2500",
        "is⟦ four⟧<eos>",
        "    +0.2500  token 1  ' four'",
        "",
        "--- response 2 | reward 0 | unparsed | version 16 | length | 2 tokens | sum of log ratios -2.0000",
        "is⟦\\x1b[2J⟧",
        "    -2.0000  token 1  '\\x1b[2J'",
    ]


def test_samples_past_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    for update in (8, 16, 24):
        (tmp_path / f"update_{update:06d}.txt").write_text("")
        (tmp_path / f"update_{update:06d}.json").write_text("")
    (tmp_path / "update_notes.txt").write_text("")
    assert drop_later(tmp_path, 8) == 4
    assert sorted(os.listdir(tmp_path)) == ["update_000008.json", "update_000008.txt", "update_notes.txt"]
    assert drop_later(tmp_path / "none", 8) == 0
