"""Two judges on the same responses: how often they agree, and every response on which they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.atomic import write_atomically
from grpo_lab.types import Judgement, Problem

SUMMARY = "lighteval.json"
DISAGREEMENTS = "disagreements.jsonl"
# Of a response that is listed, its last characters: the answer stands there.
TAIL_CHARACTERS = 300
# Rows of the terminal's list.
SHOWN = 10


class JudgeError(RuntimeError):
    """The second judge gave no usable answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A problem as it was posed, our responses, and what our verifier says of each."""

    problem: Problem
    prompt: str
    responses: tuple[str, ...]
    judgements: tuple[Judgement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondVerdicts:
    """What lighteval says of one task. `verdicts` and `extracted` hold, for each document, an entry a response."""

    version: str
    task: str
    prompt_function: str
    scores: Mapping[str, float]
    verdicts: Mapping[str, Sequence[float]]
    extracted: Mapping[str, Sequence[str | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One response that the judges see differently; `lighteval` is its verdict, `ours` that of the verifier."""

    task: str
    problem: str
    sample: int
    gold: str
    ours: str
    our_answer: str | None
    lighteval: bool
    lighteval_answer: str | None
    response_end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Both judges on one task: n responses to each of `problems`, and of all responses how many each calls correct.

    `unjoined` counts documents of lighteval's that are none of our problems: it scored them, we did not.
    """

    benchmark: str
    verdicts: SecondVerdicts
    prompt: str
    n: int
    problems: int
    unjoined: int
    both_correct: int
    only_ours: int
    only_lighteval: int
    neither: int
    disagreements: tuple[Disagreement, ...]

    @property
    def responses(self) -> int:
        return self.both_correct + self.only_ours + self.only_lighteval + self.neither

    @property
    def ours(self) -> float:
        """mean@n by our verifier."""
        return (self.both_correct + self.only_ours) / self.responses

    @property
    def theirs(self) -> float:
        """mean@n by lighteval, over the same responses."""
        return (self.both_correct + self.only_lighteval) / self.responses


def compare(benchmark: str, second: SecondVerdicts, answered: Mapping[str, Answered]) -> Agreement:
    """Join both judges' verdicts by document and sample. `answered` is keyed by lighteval's document ids.

    Raises:
        JudgeError: a document without verdicts, or with another number of them than it has responses.
    """
    if not answered:
        raise JudgeError(f"lighteval's {second.task} holds none of the problems of {benchmark}")
    counts = {(ours, theirs): 0 for ours in (True, False) for theirs in (True, False)}
    disagreements: list[Disagreement] = []
    for document, answer in answered.items():
        verdicts = second.verdicts.get(document, ())
        if len(verdicts) != len(answer.responses) or len(answer.judgements) != len(answer.responses):
            raise JudgeError(
                f"lighteval's {second.task}, problem {answer.problem.id}: {len(answer.responses)} responses, "
                f"{len(answer.judgements)} verdicts of ours, {len(verdicts)} of lighteval's"
            )
        for sample, (judgement, verdict) in enumerate(zip(answer.judgements, verdicts, strict=True)):
            ours, theirs = judgement.verdict == "correct", verdict == 1.0
            counts[ours, theirs] += 1
            if ours != theirs:
                disagreements.append(_disagreement(second, document, sample, answer))
    sizes = {len(answer.responses) for answer in answered.values()}
    if len(sizes) > 1:
        raise JudgeError(f"lighteval's {second.task}: problems with different numbers of responses, {sorted(sizes)}")
    first = next(iter(answered.values()))
    return Agreement(
        benchmark=benchmark,
        verdicts=second,
        prompt=first.prompt.replace(first.problem.question, "{question}"),
        n=sizes.pop(),
        problems=len(answered),
        unjoined=len(set(second.verdicts) - set(answered)),
        both_correct=counts[True, True],
        only_ours=counts[True, False],
        only_lighteval=counts[False, True],
        neither=counts[False, False],
        disagreements=tuple(disagreements),
    )


def summary(one: Agreement) -> dict[str, Any]:
    """A task's row of lighteval.json."""
    return {
        "benchmark": one.benchmark,
        "task": one.verdicts.task,
        "lighteval": one.verdicts.version,
        "prompt_function": one.verdicts.prompt_function,
        "prompt": one.prompt,
        "n": one.n,
        "problems": one.problems,
        "unjoined": one.unjoined,
        "scores": dict(one.verdicts.scores),
        f"ours/mean@{one.n}": one.ours,
        f"lighteval/mean@{one.n}": one.theirs,
        "both_correct": one.both_correct,
        "only_ours": one.only_ours,
        "only_lighteval": one.only_lighteval,
        "neither": one.neither,
    }


def write_report(folder: Path, agreements: Sequence[Agreement], provenance: Mapping[str, Any]) -> None:
    """`lighteval.json` with a row a task, beside `disagreements.jsonl` with a row a response, `provenance` in both."""
    rows = [
        json.dumps({**provenance, **asdict(one)}, ensure_ascii=False)
        for agreement in agreements
        for one in agreement.disagreements
    ]
    write_atomically(folder / DISAGREEMENTS, "".join(f"{row}\n" for row in rows).encode())
    document = {**provenance, "tasks": [summary(agreement) for agreement in agreements]}
    write_atomically(folder / SUMMARY, f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode())


def report_lines(agreements: Sequence[Agreement]) -> list[str]:
    """For the terminal: a line a task with both scores, its prompt, and the first disagreements."""
    lines = []
    for one in agreements:
        scores = ", ".join(
            f"{name} {value:.4f}" for name, value in one.verdicts.scores.items() if not name.endswith("_stderr")
        )
        lines += [
            f"{one.verdicts.task} (lighteval {one.verdicts.version}, {one.problems} problems, n={one.n}): {scores}; "
            f"mean@{one.n} of the joined responses {one.theirs:.4f} by lighteval, {one.ours:.4f} by our verifier; of "
            f"{one.responses} responses {one.only_lighteval} correct to lighteval alone, {one.only_ours} to ours alone",
            f"  prompt ({one.verdicts.prompt_function}): {one.prompt.strip()!r}",
        ]
        if one.unjoined:
            lines.append(
                f"  {one.unjoined} of its documents are none of our problems, and are in lighteval's score only"
            )
        lines += [_line(disagreement) for disagreement in one.disagreements[:SHOWN]]
        if (more := len(one.disagreements) - SHOWN) > 0:
            lines.append(f"  and {more} more in {DISAGREEMENTS}")
    return lines


def _disagreement(second: SecondVerdicts, document: str, sample: int, answer: Answered) -> Disagreement:
    judgement = answer.judgements[sample]
    return Disagreement(
        task=second.task,
        problem=answer.problem.id,
        sample=sample,
        gold=answer.problem.gold,
        ours=judgement.verdict,
        our_answer=judgement.extracted,
        lighteval=second.verdicts[document][sample] == 1.0,
        lighteval_answer=second.extracted[document][sample],
        response_end=answer.responses[sample][-TAIL_CHARACTERS:],
    )


def _line(one: Disagreement) -> str:
    theirs = "correct" if one.lighteval else "wrong"
    return (
        f"  {one.problem} #{one.sample}: gold {one.gold!r}; ours {one.ours} ({one.our_answer!r}), "
        f"lighteval {theirs} ({one.lighteval_answer!r})"
    )
