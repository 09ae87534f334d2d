"""lighteval itself, in its own environment, on small local files: what it poses, its scores, and the whole command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tiny import save_model, tiny_model

from grpo_lab.config import ConfigError
from grpo_lab.evaluation.agreement import Answered, JudgeError
from grpo_lab.evaluation.lighteval import Document, own_tasks, second_verdicts
from grpo_lab.evaluation.lighteval_process import Room, find_python
from grpo_lab.prompts.split import problem_id
from grpo_lab.rewards import Verifier, judge_math
from grpo_lab.types import Problem

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.13.0"
QUESTIONS = {
    "What is 6 times 7?": "42",
    "What is a third of two?": r"\frac{2}{3}",
    "Which pairs?": "(1,2)",
}


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return find_python(None)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def room(python: Path, tmp_path: Path) -> Iterator[Room]:
    with Room(python, tmp_path) as room:
        yield room


def make_problem(question: str, gold: str) -> Problem:
    return Problem(id=problem_id(question), question=question, gold=gold)


PROBLEMS = [make_problem(question, gold) for question, gold in QUESTIONS.items()]


def boxed(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


def answered(problem: Problem, *responses: str) -> Answered:
    return Answered(
        problem=problem,
        prompt=problem.question,
        responses=responses,
        judgements=tuple(judge_math(problem.gold, response) for response in responses),
    )


def test_it_scores_our_responses_with_its_own_metrics(room: Room) -> None:
    """c of 4 correct for 3, 1 and 0: pass@2 is 1 - C(4 - c, 2) / C(4, 2)."""
    right = [boxed(problem.gold) for problem in PROBLEMS]
    wrong = boxed("9")
    (agreement,) = second_verdicts(
        room,
        {
            "math500": [
                answered(PROBLEMS[0], right[0], right[0], wrong, boxed(r"\frac{84}{2}")),
                answered(PROBLEMS[1], wrong, boxed("0.6666667"), wrong, "I do not know."),
                answered(PROBLEMS[2], boxed("(2,1)"), wrong, wrong, boxed("(1,3)")),
            ]
        },
        [1, 2, 8],
    )
    assert agreement.verdicts.version == VERSION
    verdicts = {document: list(row) for document, row in agreement.verdicts.verdicts.items()}
    assert verdicts == {"0": [1, 1, 0, 1], "1": [0, 1, 0, 0], "2": [0, 0, 0, 0]}
    scores = agreement.verdicts.scores
    assert scores["avg@4"] == scores["pass@1"] == pytest.approx(4 / 12)
    assert scores["pass@2"] == pytest.approx((1 + (1 - 3 / 6) + 0) / 3)
    assert "pass@8" not in scores
    assert agreement.disagreements == ()
    assert (agreement.n, agreement.problems) == (4, 3)


def test_the_judges_differ_where_a_box_is_missing(room: Room) -> None:
    (agreement,) = second_verdicts(
        room, {"math500": [answered(PROBLEMS[0], "ANSWER: 42"), answered(PROBLEMS[1], boxed(r"\frac23"))]}, [1]
    )
    (one,) = agreement.disagreements
    assert (one.problem, one.ours, one.lighteval, one.lighteval_answer) == (PROBLEMS[0].id, "unparsed", True, "42")


def write_files(folder: Path) -> dict[str, str | None]:
    rows = {
        "math500": [
            {"problem": question, "solution": f"Indeed ${boxed(gold)}$", "answer": gold}
            for question, gold in QUESTIONS.items()
        ],
        "gsm8k": [{"question": "What is 6 times 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}],
        "aime24": [{"problem": "What is 6 times 7?", "answer": "042"}],
        "aime25": [{"problem": "What is 6 times 7?", "answer": 42}],
    }
    paths: dict[str, str | None] = {}
    for name, some in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in some))
        paths[name] = str(path)
    return paths


def test_it_poses_its_own_tasks(room: Room, tmp_path: Path) -> None:
    posed: dict[str, list[Document]] = {}

    def generate(documents: Sequence[Document]) -> list[list[str]]:
        for document in documents:
            posed.setdefault(document.benchmark, []).append(document)
        golds = [document.problem.gold for document in documents if document.problem is not None]
        assert len(golds) == len(documents)
        return [[boxed(gold), "No idea."][: document.n] for document, gold in zip(documents, golds, strict=True)]

    asked = {"math500": PROBLEMS, "minerva": PROBLEMS, **dict.fromkeys(("gsm8k", "aime24", "aime25"), PROBLEMS[:1])}
    with Verifier("math", workers=1, timeout=5.0) as verifier:
        agreements = own_tasks(room, asked, write_files(tmp_path), n=2, generate=generate, verifier=verifier)
    found = {agreement.verdicts.task: agreement for agreement in agreements}
    assert list(found) == ["math_500", "gsm8k", "aime24", "aime25"]
    # MATH-500 is asked for another mark than in training, AIME for a box as well; GSM8K takes one response.
    assert {name: len(some) for name, some in posed.items()} == {"math500": 3, "gsm8k": 1, "aime24": 1, "aime25": 1}
    assert '"ANSWER: $ANSWER"' in posed["math500"][0].text
    assert r"\boxed{ANSWER}" in posed["aime24"][0].text
    assert posed["gsm8k"][0].text == "Question: What is 6 times 7?\nAnswer:"
    assert (posed["gsm8k"][0].stop, posed["gsm8k"][0].max_tokens) == (("Question:",), 256)
    assert [posed[name][0].n for name in ("math500", "gsm8k", "aime24")] == [2, 1, 2]
    assert found["math_500"].prompt.endswith("{question}")
    assert found["math_500"].verdicts.prompt_function == "lighteval.tasks.tasks.math_500.math_500_prompt"
    for agreement in agreements:
        assert agreement.disagreements == ()
        assert agreement.theirs == 1 / agreement.n
    assert found["math_500"].verdicts.scores["pass@1"] == 0.5
    assert found["aime24"].verdicts.scores["avg@2"] == 0.5
    assert found["gsm8k"].verdicts.scores["extractive_match"] == 1.0


def test_its_own_complaint_comes_through(room: Room) -> None:
    task = {"name": "no_such_task", "n": 1, "ks": [], "rows": "/nowhere", "limit": None, "ours": False}
    with pytest.raises(JudgeError, match=f"lighteval {VERSION} has no task no_such_task"):
        room.ask("pose", [task])


def test_the_command_joins_both_judges(python: Path, tmp_path: Path) -> None:
    """As if a launcher had started it, whose variables lighteval must not see."""
    model = save_model(tiny_model("qwen3"), tmp_path / "tiny")
    paths = write_files(tmp_path)
    command = [
        *(
            sys.executable,
            "-m",
            "grpo_lab.evaluate",
            f"checkpoint={model}",
            f"out={tmp_path / 'out'}",
            "lighteval=true",
        ),
        *("evaluation.benchmarks=[math500,gsm8k]", "evaluation.n=2", "evaluation.k=[1,2]", "evaluation.max_tokens=4"),
        *(f"evaluation.paths.{name}={paths[name]}" for name in ("math500", "gsm8k")),
        f"evaluation.lighteval_python={python.absolute()}",
    ]
    environment = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "tiny" / "lighteval.json").read_text())
    assert [(row["task"], row["n"], row["problems"]) for row in rows] == [
        ("grpo_lab_math500", 2, 3),
        ("grpo_lab_gsm8k", 2, 1),
        ("math_500", 2, 3),
        ("gsm8k", 1, 1),
    ]
    assert {row["lighteval"] for row in rows} == {VERSION}
    assert "math_500 (lighteval 0.13.0, 3 problems, n=2)" in done.stderr
    # Both prompts are told: training's box, and lighteval's line.
    assert "output the final answer within" in done.stderr
    assert "ANSWER: $ANSWER" in done.stderr
    kept = tmp_path / "out" / "tiny" / "math500"
    assert json.loads((kept / "lighteval.json").read_text())["target"] == "tiny"
    before = (kept / "lighteval" / "responses.jsonl").read_bytes()
    again = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False, timeout=240)
    assert again.returncode == 0, again.stderr
    assert (kept / "lighteval" / "responses.jsonl").read_bytes() == before
