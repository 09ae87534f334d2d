r"""The verifier's processes: order, hard limits, recovery, and what is left behind; and the command."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_lab.config import ConfigError
from grpo_lab.rewards import Verifier
from grpo_lab.rewards.__main__ import ROWS_AT_ONCE, main
from grpo_lab.rewards.workers import judge_item
from grpo_lab.types import Problem

ROOT = Path(__file__).resolve().parents[2]

# Each of these takes hours or gigabytes to work out.
TOWERS = ["9^{9^{9^9}}", "10^{10^{10}}", "(10^9)!", r"\binom{10^{9}}{5\cdot 10^{8}}"]
NOISE = ["{" * 5_000 + "1" + "}" * 5_000, "x" * 100_000, r"\frac{1}{" * 30 + "2" + "}" * 30, "^" * 500, "-" * 100_000]


def problem(gold: str, **fields: object) -> Problem:
    return Problem(**{"id": "p", "question": "", "gold": gold, **fields})  # type: ignore[arg-type]


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier("math", workers=1, timeout=1.0) as shared:
        yield shared


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


# --- judging ------------------------------------------------------------------------------------------------------


def test_judgements_come_in_the_order_of_the_pairs(verifier: Verifier) -> None:
    pairs = [(problem(f"{k}/7"), boxed(rf"\frac{{{k + k % 2}}}{{7}}") if k % 3 else "no answer") for k in range(1, 13)]
    judgements = verifier.judge(pairs)
    expected = ["unparsed" if k % 3 == 0 else "wrong" if k % 2 else "correct" for k in range(1, 13)]
    assert [judgement.verdict for judgement in judgements] == expected
    assert judgements[0].extracted == r"\frac{2}{7}"


def test_submitted_pairs_are_counted_when_their_result_is_taken_and_once(verifier: Verifier) -> None:
    before = verifier.counts
    pending = verifier.submit([(problem("x+1"), boxed("1+x")), (problem("5"), "#### 5")])
    assert verifier.counts == before
    assert [judgement.verdict for judgement in pending.result()] == ["correct", "correct"]
    assert pending.result() is pending.result()
    assert verifier.counts["correct"] == before["correct"] + 2


def test_tolerance_of_the_problem_is_used(verifier: Verifier) -> None:
    pairs = [(problem("4.2", tolerance=0.1), boxed(answer)) for answer in ("4.3", r"\frac{17}{4}", r"\frac{9}{2}")]
    assert [judgement.verdict for judgement in verifier.judge(pairs)] == ["correct", "correct", "wrong"]


def test_hostile_answers_neither_hang_nor_break_the_workers() -> None:
    # Time enough for a simple answer on a machine that is busy.
    with Verifier("math", workers=2, timeout=3.0) as verifier:
        started = time.monotonic()
        pairs = [(problem("x+5"), boxed(answer)) for answer in [*TOWERS, *NOISE, "5+x"]]
        verdicts = [judgement.verdict for judgement in verifier.judge(pairs)]
        # Two workers, four answers of three seconds each, and new workers after each.
        assert time.monotonic() - started < 30
        assert verdicts[:4] == ["timeout"] * 4
        assert set(verdicts[4:-1]) <= {"unparsed", "wrong", "timeout"}
        assert verdicts[-1] == "correct"
        assert verifier.counts["timeout"] >= 4
        assert verifier.counts["error"] == 0


def test_nothing_in_a_completion_is_executed(verifier: Verifier, tmp_path: Path) -> None:
    target = tmp_path / "made"
    attacks = [
        f"__import__('os').system('touch {target}')",
        rf"\text{{open('{target}','w')}}",
        f"open('{target}','w').write('x')",
        f"\\input{{|touch {target}}}",
    ]
    for judgement in verifier.judge([(problem("x+5"), boxed(attack)) for attack in attacks]):
        assert judgement.verdict != "correct"
    assert not target.exists()


def test_gold_that_cannot_be_parsed_is_an_error_logged_once(
    verifier: Verifier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first = verifier.judge(
            [(problem(r"\sqrt", id="bad"), boxed("1/2")), (problem(r"\sqrt", id="bad"), boxed("1/3"))]
        )
        second = verifier.judge([(problem(r"\sqrt", id="bad"), boxed("1/4")), (problem(" "), boxed("4"))])
    assert [judgement.verdict for judgement in first + second] == ["error"] * 4
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        r"problem bad, gold answer '\\sqrt': the gold answer cannot be parsed; correct it or drop the problem",
        "problem p, gold answer ' ': the gold answer is empty; correct it or drop the problem",
    ]


def test_exact_kind_starts_no_worker() -> None:
    with Verifier("exact", workers=2, timeout=1.0) as verifier:
        pairs = [(problem("42"), "40+2=#42"), (problem("42"), "#41"), (problem("42"), "42"), (problem(""), "#")]
        assert [judgement.verdict for judgement in verifier.judge(pairs)] == ["correct", "wrong", "unparsed", "error"]
        assert not verifier.is_started


def test_workers_start_with_the_first_answer_that_needs_one() -> None:
    with Verifier("math", workers=1, timeout=5.0) as verifier:
        plain = [(problem("42"), boxed("42.0")), (problem("42"), "#### 41"), (problem("x+1"), boxed("x+1"))]
        assert [judgement.verdict for judgement in verifier.judge(plain)] == ["correct", "wrong", "correct"]
        assert not verifier.is_started
        verifier.judge([(problem("x+1"), boxed("1+x"))])
        assert verifier.is_started


def test_counts_survive_a_checkpoint() -> None:
    first = Verifier("math", workers=1, timeout=1.0)
    first.judge([(problem("1"), boxed("1")), (problem("1"), boxed("2")), (problem("1"), "")])
    state = json.loads(json.dumps(first.state()))
    second = Verifier("math", workers=1, timeout=1.0)
    second.load_state(state)
    second.judge([(problem("1"), boxed("1"))])
    assert second.counts == {"correct": 2, "wrong": 1, "unparsed": 1, "timeout": 0, "error": 0}
    with pytest.raises(ConfigError, match="verifier counts"):
        second.load_state({"right": 1})


@pytest.mark.parametrize(
    ("kind", "workers", "timeout", "key"),
    [
        ("maths", 1, 1.0, r"dataset\.verifier"),
        ("math", 0, 1.0, r"verifier\.workers"),
        ("math", 1, 0.0, r"verifier\.timeout"),
        ("math", 1, float("nan"), r"verifier\.timeout"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: str, workers: int, timeout: float, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Verifier(kind, workers=workers, timeout=timeout)


# --- workers that die ---------------------------------------------------------------------------------------------


def worker_pids() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["before it is noticed", "after"])
def test_a_worker_killed_from_outside_is_replaced(seconds: float) -> None:
    with Verifier("math", workers=1, timeout=20.0) as verifier:
        verifier.judge([(problem("x+1"), boxed("1+x"))])
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        time.sleep(seconds)
        assert verifier.judge([(problem("x+2"), boxed("2+x"))])[0].verdict == "correct"


def test_a_worker_that_dies_over_an_answer_costs_that_answer_only(caplog: pytest.LogCaptureFixture) -> None:
    with Verifier("math", workers=1, timeout=20.0) as verifier, caplog.at_level(logging.WARNING):
        verifier.judge([(problem("x+1"), boxed("1+x"))])
        pending = verifier.submit([(problem("x+2"), boxed(TOWERS[0])), (problem("x+2"), boxed("2+x"))])
        time.sleep(0.5)
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        assert [judgement.verdict for judgement in pending.result()] == ["error", "correct"]
        assert ["its worker died with code -9" in record.getMessage() for record in caplog.records] == [True]


def test_closing_is_quick_whatever_the_workers_do_and_can_be_repeated() -> None:
    before = set(worker_pids())
    verifier = Verifier("math", workers=2, timeout=60.0)
    verifier.close()
    verifier = Verifier("math", workers=2, timeout=60.0)
    pending = verifier.submit([(problem("x"), boxed(tower)) for tower in TOWERS])
    time.sleep(1.0)
    started = time.monotonic()
    verifier.close()
    verifier.close()
    assert time.monotonic() - started < 2
    assert set(worker_pids()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        pending.result()
    with pytest.raises(RuntimeError, match="closed"):
        verifier.submit([(problem("x"), boxed("y+1"))])
    assert verifier.judge([(problem("1"), boxed("1"))])[0].verdict == "correct"


PARENT = """
    import multiprocessing, sys, time
    print("main imported", flush=True)
    if __name__ == "__main__":
        import torch
        from multiprocessing import forkserver
        from grpo_lab.rewards import Verifier
        from grpo_lab.types import Problem
        verifier = Verifier("math", workers=2, timeout=2.0)
        first = Problem(id="1", question="", gold="x+1")
        verifier.judge([(first, r"\\boxed{1+x}")])
        verifier.submit([(first, r"\\boxed{9^{9^{9^9}}}")])
        time.sleep(0.5)
        pids = [process.pid for process in multiprocessing.active_children()]
        print(*pids, forkserver._forkserver._forkserver_pid, flush=True)
        time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_parent_leaves_no_process_and_workers_load_nothing_of_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "main imported\n"
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        assert has_torch(parent.pid)
        assert not any(map(has_torch, pids))
        parent.kill()
        # Two seconds of limit and two of grace for the one that is inside a power.
        assert eventually(lambda: not any(map(is_running, pids)), seconds=10)
        assert parent.stdout.read() == ""


def test_processor_limit_is_lifted_after_each_item() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_CPU)
    assert judge_item("1/2", "0.5", None, 1.0).verdict == "correct"
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


# --- the command --------------------------------------------------------------------------------------------------


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_command_prints_one_verdict_a_row_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = write_rows(
        tmp_path / "pairs.jsonl",
        {"gold": "1/2", "completion": boxed("0.5"), "id": "a", "other": [1]},
        {"gold": 18, "completion": "#### 18", "id": 7},
        "\n",
        {"gold": 14.0, "completion": "#### 14"},
        {"gold": ["2", "5"], "completion": boxed("5, 2")},
        {"gold": [2, 5], "completion": boxed("5")},
        {"gold": "4.2", "completion": boxed("4.25"), "tolerance": 0.1},
        {"gold": "x", "completion": boxed(TOWERS[0]), "tolerance": None},
        {"gold": "x", "completion": "none"},
    )
    assert main([str(pairs), "--timeout", "1", "--workers", "1"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"id": "a", "verdict": "correct", "extracted": "0.5"},
        {"id": 7, "verdict": "correct", "extracted": "18"},
        {"verdict": "correct", "extracted": "14"},
        {"verdict": "correct", "extracted": "5, 2"},
        {"verdict": "wrong", "extracted": "5"},
        {"verdict": "correct", "extracted": "4.25"},
        {"verdict": "timeout", "extracted": TOWERS[0]},
        {"verdict": "unparsed", "extracted": None},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{oops\n", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"gold": ' + "[" * 100_000 + "\n", "not JSON (maximum recursion depth"),
        ('{"gold": ' + "1" * 5_000 + ', "completion": ""}\n', "not JSON (Exceeds the limit"),
        ({"gold": "1"}, "no completion; add it"),
        ({"completion": "1"}, "no gold; add it"),
        ({"gold": None, "completion": ""}, "gold is null; make it a string, a number, or a list of these"),
        ({"gold": [], "completion": ""}, "gold is []"),
        ({"gold": [["1"]], "completion": ""}, "gold is"),
        ({"gold": True, "completion": ""}, "gold is true"),
        ('{"gold": NaN, "completion": ""}\n', "gold is NaN"),
        ({"gold": "1", "completion": 5}, "completion is 5; make it a string"),
        ({"gold": "1", "completion": "", "tolerance": "big"}, "tolerance is"),
        ({"gold": "1", "completion": "", "tolerance": -1}, "tolerance is -1"),
    ],
)
def test_command_names_the_bad_row_and_keeps_the_good_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: object, message: str
) -> None:
    good = {"gold": "1", "completion": boxed("1")}
    pairs = write_rows(tmp_path / "pairs.jsonl", good, row, good)
    assert main([str(pairs)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert f"{pairs}, line 2: " in printed.err
    assert message in printed.err
    assert len(printed.out.splitlines()) == 1


def test_command_names_a_row_that_is_not_utf8_and_reads_numbers_of_any_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = 10**400
    pairs = write_rows(tmp_path / "pairs.jsonl", {"gold": large, "completion": boxed(str(large))})
    with pairs.open("ab") as stream:
        stream.write(b'{"gold": "\xe9", "completion": ""}\n')
    assert main([str(pairs)]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "correct"
    assert f"{pairs}, line 2: not JSON ('utf-8' codec can't decode" in printed.err


def test_command_reads_more_rows_than_it_holds_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"gold": k, "completion": f"#### {k + k % 2}", "id": k} for k in range(2 * ROWS_AT_ONCE)]
    assert main([str(write_rows(tmp_path / "pairs.jsonl", *rows))]) == 0
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["id"], row["verdict"]) for row in verdicts] == [
        (k, "wrong" if k % 2 else "correct") for k in range(2 * ROWS_AT_ONCE)
    ]


def test_command_runs_as_a_module_and_fails_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_lab.rewards"]
    pairs = write_rows(tmp_path / "pairs.jsonl", {"gold": "x+1", "completion": boxed("1+x")})
    good = subprocess.run([*command, pairs], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (good.returncode, json.loads(good.stdout)["verdict"], good.stderr) == (0, "correct", "")
    missing = subprocess.run([*command, tmp_path / "none.jsonl"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert "none.jsonl" in missing.stderr
    bad = subprocess.run([*command, pairs, "--workers", "0"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (bad.returncode, "verifier.workers=0" in bad.stderr) == (2, True)
