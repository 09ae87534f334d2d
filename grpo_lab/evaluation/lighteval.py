"""lighteval as the second judge: it poses tasks and scores responses; our engine samples, our verifier judges too.

Two ways: `second_verdicts` has it score the responses to our prompts; `own_tasks` has it pose its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError
from grpo_lab.evaluation.agreement import Agreement, Answered, JudgeError, SecondVerdicts, compare
from grpo_lab.evaluation.lighteval_process import Room, Task
from grpo_lab.prompts.rows import read_file
from grpo_lab.prompts.split import problem_id
from grpo_lab.rewards import Verifier
from grpo_lab.types import Problem


@dataclass(frozen=True, slots=True)
class OwnTask:
    """A task that lighteval ships, and the columns that its prompt function reads."""

    name: str
    question: str
    answer: str


OWN_TASKS: Mapping[str, OwnTask] = {
    "aime24": OwnTask("aime24", "problem", "answer"),
    "aime25": OwnTask("aime25", "problem", "answer"),
    "math500": OwnTask("math_500", "problem", "solution"),
    "gsm8k": OwnTask("gsm8k", "question", "answer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One problem as a task of lighteval's poses it: `text` is the user's message, `n` the responses it asks for.

    `max_tokens` is the task's limit (None: it sets none); a response counts up to the first of the `stop` strings.
    `problem` is ours, None where we hold no such question.
    """

    benchmark: str
    id: str
    text: str
    problem: Problem | None
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]


# Documents to responses: for each, in order, as many as it asks for.
Generate = Callable[[Sequence[Document]], Sequence[Sequence[str]]]


def second_verdicts(room: Room, answered: Mapping[str, Sequence[Answered]], ks: Sequence[int]) -> list[Agreement]:
    """Both judges on responses that we have, to our prompts, by benchmark.

    lighteval's tasks are called `grpo_lab_<benchmark>` and scored by its avg@n and pass@k for mathematics.

    Raises:
        JudgeError: lighteval failed, or its verdicts are not as many as the responses.
    """
    tasks: list[Task] = []
    responses: dict[str, dict[str, list[str]]] = {}
    for benchmark, answers in answered.items():
        name, n = f"grpo_lab_{benchmark}", len(answers[0].responses)
        rows = room.lay_out(
            name, [{"prompt": one.prompt, "gold": without_dollars(one.problem.gold)} for one in answers]
        )
        tasks.append({"name": name, "n": n, "ks": [k for k in ks if k <= n], "rows": rows, "ours": True})
        responses[name] = {str(index): list(one.responses) for index, one in enumerate(answers)}
    answer = room.ask("score", tasks, responses)
    return [
        compare(
            benchmark,
            _second(answer, f"grpo_lab_{benchmark}"),
            {str(index): one for index, one in enumerate(answers)},
        )
        for benchmark, answers in answered.items()
    ]


def without_dollars(gold: str) -> str:
    """A gold answer to put in a box. OlympiadBench's have dollars of their own, at which lighteval would cut it."""
    return re.sub(r"(?<!\\)\$", "", gold)


def own_tasks(
    room: Room,
    problems: Mapping[str, Sequence[Problem]],
    paths: Mapping[str, str | None],
    *,
    n: int,
    generate: Generate,
    verifier: Verifier,
) -> list[Agreement]:
    """lighteval's own tasks, with its prompts: it poses them, `generate` answers, both judge.

    Of `problems` (by benchmark), those benchmarks that lighteval has a task for; a local file in `paths` stands in
    for its hub repository, restricted to the problems given. n responses a problem, but for tasks that take one only
    (GSM8K).

    Raises:
        JudgeError: lighteval failed, or the counts of responses do not fit.
        ConfigError: a local file lacks a column that lighteval's prompt reads.
    """
    benchmarks = [benchmark for benchmark in problems if benchmark in OWN_TASKS]
    if not benchmarks:
        return []
    tasks = [_own_task(room, benchmark, problems[benchmark], paths.get(benchmark), n) for benchmark in benchmarks]
    posed = room.ask("pose", tasks)
    documents = [
        document
        for benchmark, task in zip(benchmarks, tasks, strict=True)
        for document in _documents(benchmark, posed["tasks"][task["name"]]["documents"], problems[benchmark])
    ]
    texts = _counted(documents, generate(documents))
    pairs = [
        (document.problem, text)
        for document, own in zip(documents, texts, strict=True)
        if document.problem is not None
        for text in own
    ]
    judgements = iter(verifier.judge(pairs))
    responses: dict[str, dict[str, list[str]]] = {task["name"]: {} for task in tasks}
    answered: dict[str, dict[str, Answered]] = {benchmark: {} for benchmark in benchmarks}
    for document, own in zip(documents, texts, strict=True):
        responses[OWN_TASKS[document.benchmark].name][document.id] = list(own)
        if document.problem is not None:
            answered[document.benchmark][document.id] = Answered(
                problem=document.problem,
                prompt=document.text,
                responses=own,
                judgements=tuple(itertools.islice(judgements, len(own))),
            )
    answer = room.ask("score", tasks, responses)
    return [
        compare(benchmark, _second(answer, OWN_TASKS[benchmark].name), answered[benchmark]) for benchmark in benchmarks
    ]


def _own_task(room: Room, benchmark: str, problems: Sequence[Problem], path: str | None, n: int) -> Task:
    own = OWN_TASKS[benchmark]
    rows = None if path is None else room.lay_out(own.name, own_rows(benchmark, path, problems))
    limit = len(problems) if rows is None else None
    return {"name": own.name, "n": n, "ks": [], "rows": rows, "limit": limit, "ours": False}


def own_rows(benchmark: str, path: str, problems: Sequence[Problem]) -> list[dict[str, str]]:
    """The rows of a local copy that hold the problems, with the columns that lighteval's prompt reads.

    An AIME answer is our gold one: copies have it in different columns. MATH-500 and GSM8K need the worked solution,
    out of which lighteval reads the answer.

    Raises:
        ConfigError: no such file, or no worked solution.
    """
    own, golds = OWN_TASKS[benchmark], {problem.id: problem.gold for problem in problems}
    rows: dict[str, dict[str, str]] = {}
    for row in read_file(Path(path), f"evaluation.paths.{benchmark}"):
        question = str(row.values.get("problem", row.values.get("question", ""))).strip()
        identity = problem_id(question)
        if identity not in golds or identity in rows:
            continue
        answer = golds[identity] if benchmark.startswith("aime") else row.values.get(own.answer)
        if answer is None:
            raise ConfigError(
                f"{row.place}: no column {own.answer}, which lighteval's {own.name} reads; name another copy with "
                f"evaluation.paths.{benchmark}="
            )
        rows[identity] = {own.question: question, own.answer: str(answer)}
    if not rows:
        raise ConfigError(f"evaluation.paths.{benchmark}={path} holds none of the problems of {benchmark}")
    return list(rows.values())


def _documents(benchmark: str, posed: Sequence[Mapping[str, Any]], problems: Sequence[Problem]) -> Iterator[Document]:
    by_id = {problem.id: problem for problem in problems}
    for document in posed:
        yield Document(
            benchmark=benchmark,
            id=document["id"],
            text=document["text"],
            problem=by_id.get(problem_id(document["question"].strip())),
            n=document["n"],
            max_tokens=document["max_tokens"],
            stop=tuple(document["stop"]),
        )


def _counted(documents: Sequence[Document], texts: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The responses up to their stop strings, as many as each document asks for."""
    if len(texts) != len(documents):
        raise JudgeError(f"lighteval posed {len(documents)} documents, and {len(texts)} were answered")
    for document, own in zip(documents, texts, strict=True):
        if len(own) != document.n:
            raise JudgeError(
                f"document {document.id} of {document.benchmark} needs {document.n} responses, and {len(own)} came"
            )
    return [
        tuple(until_stop(text, document.stop) for text in own) for document, own in zip(documents, texts, strict=True)
    ]


def until_stop(text: str, stops: Sequence[str]) -> str:
    """What a sampler that ends at any of `stops` would have written."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _second(answer: Mapping[str, Any], task: str) -> SecondVerdicts:
    found = answer["tasks"][task]
    return SecondVerdicts(
        version=answer["lighteval"],
        task=task,
        prompt_function=found["prompt_function"],
        scores=found["scores"],
        verdicts=found["verdicts"],
        extracted=found["extracted"],
    )
