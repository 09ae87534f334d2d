"""The second judge without lighteval: joining verdicts, what is posed, its process, and what goes wrong."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_lab.config import ConfigError
from grpo_lab.evaluation.agreement import (
    DISAGREEMENTS,
    SUMMARY,
    Answered,
    JudgeError,
    SecondVerdicts,
    compare,
    report_lines,
    write_report,
)
from grpo_lab.evaluation.lighteval import (
    Document,
    own_rows,
    own_tasks,
    second_verdicts,
    until_stop,
    without_dollars,
)
from grpo_lab.evaluation.lighteval_process import LOG, PYTHON_VARIABLE, SCRATCH, Room, find_python, room_environment
from grpo_lab.evaluation.report import earlier_opinions, flat_row
from grpo_lab.evaluation.settings import take_request
from grpo_lab.prompts.split import problem_id
from grpo_lab.rewards import Verifier
from grpo_lab.types import Judgement, Problem, Verdict

QUESTION = "What is 6 times 7?"


def problem(question: str = QUESTION, gold: str = "42") -> Problem:
    return Problem(id=problem_id(question), question=question, gold=gold)


def answered(verdicts: Sequence[Verdict], question: str = QUESTION) -> Answered:
    return Answered(
        problem=problem(question),
        prompt=f"{question} Put it in a box.",
        responses=tuple(f"response {index}" for index in range(len(verdicts))),
        judgements=tuple(Judgement(verdict=verdict, extracted=verdict[0]) for verdict in verdicts),
    )


def second(**verdicts: list[float]) -> SecondVerdicts:
    return SecondVerdicts(
        version="0.13.0",
        task="math_500",
        prompt_function="lighteval.math_500_prompt",
        scores={"pass@1": 0.5, "pass@1_stderr": 0.25},
        verdicts=verdicts,
        extracted={name: ["7"] * len(row) for name, row in verdicts.items()},
    )


# --- the join ---------------------------------------------------------------------------------------------------


def test_every_response_is_counted_once_and_every_difference_is_listed() -> None:
    agreement = compare(
        "math500",
        second(a=[1.0, 0.0, 1.0], b=[0.0, 0.0, 1.0]),
        {
            "a": answered(["correct", "correct", "unparsed"]),
            "b": answered(["wrong", "timeout", "correct"], "What is 40 + 2?"),
        },
    )
    counts = (agreement.both_correct, agreement.only_ours, agreement.only_lighteval, agreement.neither)
    assert counts == (2, 1, 1, 2)
    assert (agreement.n, agreement.problems, agreement.responses) == (3, 2, 6)
    assert agreement.ours == 3 / 6
    assert agreement.theirs == 3 / 6
    assert agreement.prompt == "{question} Put it in a box."
    found = [(one.problem, one.sample, one.ours, one.lighteval) for one in agreement.disagreements]
    assert found == [(problem().id, 1, "correct", False), (problem().id, 2, "unparsed", True)]
    assert agreement.disagreements[0].response_end == "response 1"


@pytest.mark.parametrize("verdicts", [{"a": [1.0]}, {"a": [1.0, 1.0, 0.0]}, {"b": [1.0, 0.0]}])
def test_missing_predictions_are_no_score(verdicts: dict[str, list[float]]) -> None:
    with pytest.raises(JudgeError, match=r"2 responses, 2 verdicts of ours, [013] of lighteval's"):
        compare("math500", second(**verdicts), {"a": answered(["correct", "wrong"])})


def test_problems_with_different_numbers_of_responses_are_no_score() -> None:
    both = {"a": answered(["correct"]), "b": answered(["correct", "wrong"], "Other?")}
    with pytest.raises(JudgeError, match=r"different numbers of responses, \[1, 2\]"):
        compare("math500", second(a=[1.0], b=[1.0, 0.0]), both)


def test_documents_that_are_not_ours_are_told() -> None:
    agreement = compare("math500", second(a=[1.0], z=[0.0], y=[0.0]), {"a": answered(["correct"])})
    assert agreement.unjoined == 2
    assert any("2 of its documents are none of our problems" in line for line in report_lines([agreement]))
    with pytest.raises(JudgeError, match="holds none of the problems of math500"):
        compare("math500", second(z=[0.0]), {})


def test_the_report_states_version_n_prompt_and_both_scores(tmp_path: Path) -> None:
    agreement = compare("math500", second(a=[1.0, 1.0]), {"a": answered(["correct", "unparsed"])})
    head, prompt, difference = report_lines([agreement])
    assert head.startswith("math_500 (lighteval 0.13.0, 1 problems, n=2): pass@1 0.5000; ")
    assert "1.0000 by lighteval, 0.5000 by our verifier" in head
    assert prompt == "  prompt (lighteval.math_500_prompt): '{question} Put it in a box.'"
    assert difference == f"  {problem().id} #1: gold '42'; ours unparsed ('u'), lighteval correct ('7')"
    write_report(tmp_path, [agreement], {"update": 160})
    (row,) = [json.loads(line) for line in (tmp_path / DISAGREEMENTS).read_text().splitlines()]
    assert row["update"] == 160
    assert (row["gold"], row["ours"], row["lighteval"], row["lighteval_answer"]) == ("42", "unparsed", True, "7")
    written = json.loads((tmp_path / SUMMARY).read_text())
    assert written["update"] == 160
    (task,) = written["tasks"]
    assert task["scores"] == {"pass@1": 0.5, "pass@1_stderr": 0.25}
    assert (task["ours/mean@2"], task["lighteval/mean@2"], task["only_lighteval"]) == (0.5, 1.0, 1)


def test_opinions_of_earlier_commands_stay_and_join_the_scores(tmp_path: Path) -> None:
    """Each checkpoint is judged by a command of its own; only those with the same answers' settings belong together."""
    agreement = compare("math500", second(a=[1.0, 1.0]), {"a": answered(["correct", "unparsed"])})
    results = []
    for update, short in ((2, "same"), (4, "same"), (6, "other")):
        folder = tmp_path / f"update_{update:06d}/math500"
        folder.mkdir(parents=True)
        result = {"target": folder.parent.name, "benchmark": "math500", "identity": {"short": short}}
        write_report(folder, [agreement], {"target": folder.parent.name, "update": update})
        (folder / "scores.json").write_text(json.dumps(result))
        results.append(result)
    results[2]["identity"] = {"short": "same"}
    rows = earlier_opinions(tmp_path, results)
    assert [(row["update"], row["task"]) for row in rows] == [(2, "math_500"), (4, "math_500")]
    scores = {"mean@2": 0.5, "response/truncated": 0.0}
    row = {"benchmarks": {"math500": {"scores": scores}}, "average": {}, "split": {"easy": {"scores": {"mean@2": 1.0}}}}
    assert flat_row(row, rows[:1]) == {
        "math500/mean@2": 0.5,
        "math500/response/truncated": 0.0,
        "math500/lighteval/math_500/pass@1": 0.5,
        "split/easy/mean@2": 1.0,
    }


# --- what is posed ----------------------------------------------------------------------------------------------


def test_a_response_counts_up_to_its_first_stop_string() -> None:
    assert until_stop("18. Question: why? stop", ["stop", "Question:"]) == "18. "
    assert until_stop("18.", ["Question:"]) == "18."
    assert until_stop("Question: 18.", []) == "Question: 18."


def test_a_gold_answer_loses_its_dollars_and_keeps_its_amounts() -> None:
    assert without_dollars(r"$2,-\log _{10} 250$") == r"2,-\log _{10} 250"
    assert without_dollars(r"\$18") == r"\$18"


def rows_file(folder: Path, *rows: dict[str, object]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_own_rows_hold_what_the_prompt_reads_for_the_problems_given(tmp_path: Path) -> None:
    rows = [
        {"problem": f" {QUESTION} ", "solution": r"It is $\boxed{42}$.", "answer": "42"},
        {"problem": QUESTION, "solution": "again", "answer": "42"},
        {"problem": "Not asked?", "solution": "x", "answer": "1"},
    ]
    found = own_rows("math500", rows_file(tmp_path, *rows), [problem()])
    assert found == [{"problem": QUESTION, "solution": r"It is $\boxed{42}$."}]
    # The answer of AIME is our gold one, wherever the copy has it.
    boxed = rows_file(tmp_path, {"problem": QUESTION, "solution": r"\boxed{042}"})
    assert own_rows("aime24", boxed, [problem(gold="042")]) == [{"problem": QUESTION, "answer": "042"}]
    worked = rows_file(tmp_path, {"question": QUESTION, "answer": "6 * 7 = 42\n#### 42"})
    assert own_rows("gsm8k", worked, [problem()]) == [{"question": QUESTION, "answer": "6 * 7 = 42\n#### 42"}]


def test_own_rows_name_what_is_missing(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"problem": QUESTION, "answer": "42"})
    with pytest.raises(ConfigError, match=r"line 1: no column solution, which lighteval's math_500 reads"):
        own_rows("math500", path, [problem()])
    with pytest.raises(ConfigError, match=r"evaluation\.paths\.math500=.* holds none of the problems"):
        own_rows("math500", path, [problem("Another?")])


# --- the process ------------------------------------------------------------------------------------------------


def test_the_process_is_no_rank_and_has_no_hub(tmp_path: Path) -> None:
    names = (
        "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID SLURM_PROCID SLURM_JOB_ID "
        "OMPI_COMM_WORLD_RANK PYTHONPATH PYTHONHOME ACCELERATE_USE_CPU"
    )
    launched = dict.fromkeys(names.split(), "1")
    environment = room_environment({**launched, "PATH": "/bin", "HOME": "/root"}, tmp_path, offline=True)
    assert not set(launched) & set(environment)
    assert (environment["PATH"], environment["HOME"]) == ("/bin", "/root")
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["HF_HUB_OFFLINE"] == environment["HF_DATASETS_OFFLINE"] == "1"
    assert Path(environment["HF_HOME"]).is_relative_to(tmp_path)
    online = room_environment({"HF_HOME": "/models"}, tmp_path, offline=False)
    assert online["HF_HOME"] == "/models"
    assert "HF_HUB_OFFLINE" not in online


def test_a_missing_environment_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    assert find_python(None) == Path(sys.executable)
    with pytest.raises(ConfigError, match=r"evaluation\.lighteval_python=/nowhere does not exist: run `make eval-env`"):
        find_python("/nowhere")
    monkeypatch.delenv(PYTHON_VARIABLE)
    monkeypatch.setattr("grpo_lab.evaluation.lighteval_process.PYTHON", Path("none/bin/python"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run `make eval-env`"):
        find_python(None)


def test_lighteval_is_a_word_of_the_command() -> None:
    request, rest = take_request(["run=outputs/x", "lighteval=true"])
    assert request.runs == ("outputs/x",)
    assert rest == ["evaluation.lighteval=true"]


STAND_IN = """#!{python}
import json, sys
_, isolated, room, request, answer = sys.argv
assert isolated == "-I" and room.endswith("lighteval_room.py"), sys.argv
asked = json.load(open(request))
{body}
"""


def stand_in(folder: Path, body: str) -> Path:
    """A program in place of lighteval's Python."""
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


ONE_DOCUMENT = """
document = {"id": "0", "text": "ANSWER it", "question": "What is 6 times 7?", "n": 2, "max_tokens": 9, "stop": ["Q:"]}
scored = {"prompt_function": "f", "scores": {}, "verdicts": {"0": [1.0, 0.0]}, "extracted": {"0": ["42", None]}}
tasks = {"math_500": {"documents": [document]} if asked["action"] == "pose" else scored}
if asked["action"] == "score":
    assert asked["responses"] == {"math_500": {"0": ["ANSWER: 42", "ANSWER: 7"]}}, asked["responses"]
json.dump({"lighteval": "0.13.0", "tasks": tasks}, open(answer, "w"))
"""


def test_own_tasks_are_posed_answered_and_judged_twice(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"problem": QUESTION, "solution": r"$\boxed{42}$"})
    asked: list[Document] = []

    def generate(documents: Sequence[Document]) -> list[list[str]]:
        asked.extend(documents)
        return [["ANSWER: 42", "ANSWER: 7Q: more"]]

    python = stand_in(tmp_path, ONE_DOCUMENT)
    with Room(python, tmp_path) as room, Verifier("math", workers=1, timeout=5.0) as verifier:
        (agreement,) = own_tasks(
            room, {"math500": [problem()]}, {"math500": path}, n=2, generate=generate, verifier=verifier
        )
    (document,) = asked
    assert (document.text, document.n, document.max_tokens, document.problem) == ("ANSWER it", 2, 9, problem())
    assert agreement.verdicts.task == "math_500"
    # Without a box our verifier reads no answer.
    assert [one.ours for one in agreement.disagreements] == ["unparsed"]
    assert agreement.neither == 1
    assert not (tmp_path / SCRATCH).exists()


def test_generated_responses_that_are_missing_are_told(tmp_path: Path) -> None:
    path = rows_file(tmp_path, {"problem": QUESTION, "solution": r"$\boxed{42}$"})
    python = stand_in(tmp_path, ONE_DOCUMENT)
    for texts, told in (([["one"]], "document 0 of math500 needs 2 responses, and 1 came"), ([], "0 were answered")):
        with (
            Verifier("math", workers=1, timeout=5.0) as verifier,
            pytest.raises(JudgeError, match=told),
            Room(python, tmp_path) as room,
        ):
            own_tasks(
                room,
                {"math500": [problem()]},
                {"math500": path},
                n=2,
                generate=lambda _documents, texts=texts: texts,
                verifier=verifier,
            )


def test_a_failure_is_one_line_with_the_log(tmp_path: Path) -> None:
    python = stand_in(tmp_path, "print('loading', flush=True); sys.exit('ValueError: no such metric')")
    with (
        pytest.raises(JudgeError, match=r"^lighteval failed: ValueError: no such metric \(log: .*lighteval\.log\)$"),
        Room(python, tmp_path) as room,
    ):
        second_verdicts(room, {"math500": [answered(["correct"])]}, [1])
    assert "loading" in (tmp_path / LOG).read_text()
    # What was asked stays, to be looked into.
    assert (tmp_path / SCRATCH / "request.json").is_file()


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lab.evaluation.lighteval_process.START_SECONDS", 0.2)
    monkeypatch.setattr("grpo_lab.evaluation.lighteval_process.RESPONSE_SECONDS", 0.0)
    python = stand_in(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(JudgeError, match="lighteval took more than"), Room(python, tmp_path) as room:
        second_verdicts(room, {"math500": [answered(["correct"])]}, [1])
