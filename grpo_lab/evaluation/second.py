"""What `evaluation.lighteval` adds to one model's evaluation: lighteval's scores beside ours, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.config import TableConfig
from grpo_lab.evaluation import answers
from grpo_lab.evaluation.agreement import Answered, report_lines, summary, write_report
from grpo_lab.evaluation.benchmarks import NO_LIMIT, Benchmark
from grpo_lab.evaluation.lighteval import OWN_TASKS, Document, own_tasks, second_verdicts
from grpo_lab.evaluation.lighteval_process import Room
from grpo_lab.prompts import render
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine
from grpo_lab.types import Judgement, Problem, Prompt, Sampling

# Tokens that lighteval's instructions may be longer than ours.
OWN_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A benchmark that our verifier has judged: the lines of its responses, and the folder that they are in."""

    benchmark: Benchmark
    identity: answers.Identity
    folder: Path
    lines: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SecondJudge:
    """lighteval for one model. `tokenizer` and `make_engine` are the model's."""

    python: Path
    tokenizer: Any
    make_engine: Callable[[], RolloutEngine]
    verifier: Verifier
    sampling: Sampling
    n: int
    ks: Sequence[int]
    seed: int
    say: Callable[[str], None]

    def judge(self, scored: Sequence[Scored], folder: Path, about: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Have lighteval score the responses that we have, then pose its own tasks.

        Writes lighteval.json and disagreements.jsonl into each benchmark's folder, each with `about` in it, and
        lighteval's log into `folder`. Returns a row a task.

        Raises:
            JudgeError: lighteval failed, or predictions are missing.
            ConfigError: lighteval's task cannot be posed on a local file.
        """
        for one in scored:
            if one.benchmark.dataset.verifier != "math":
                self.say(f"warning: {one.benchmark.name} has answers that lighteval does not read; it is left out")
        held = {one.benchmark.name: one for one in scored if one.benchmark.dataset.verifier == "math"}
        if not held:
            return []
        paths = {name: _local_file(one.benchmark) for name, one in held.items()}
        problems = {name: [prompt.problem for prompt in one.benchmark.prompts] for name, one in held.items()}
        with Room(self.python, folder) as room:
            agreements = second_verdicts(room, {name: _answered(one) for name, one in held.items()}, self.ks)
            agreements += own_tasks(
                room,
                problems,
                paths,
                n=self.n,
                generate=lambda posed: self._generate(posed, held),
                verifier=self.verifier,
            )
        for name, one in held.items():
            write_report(one.folder, [each for each in agreements if each.benchmark == name], about)
        for line in report_lines(agreements):
            self.say(line)
        return [{**about, **summary(each)} for each in agreements]

    def _generate(self, documents: Sequence[Document], held: Mapping[str, Scored]) -> list[list[str]]:
        """The responses to lighteval's prompts, kept beside those to ours, and like them never sampled twice."""
        texts: dict[tuple[str, str], list[str]] = {}
        for name, one in held.items():
            posed = [document for document in documents if document.benchmark == name]
            if posed:
                lines = self._answer(posed, one)
                texts |= {
                    (name, document.id): [each["text"] for each in line["responses"]]
                    for document, line in zip(posed, lines, strict=True)
                }
        return [texts[document.benchmark, document.id] for document in documents]

    def _answer(self, posed: Sequence[Document], one: Scored) -> list[dict[str, Any]]:
        limit, n = posed[0].max_tokens or math.inf, posed[0].n
        sampling = replace(self.sampling, max_tokens=int(min(self.sampling.max_tokens, limit)))
        prompts = self._prompts(posed, one.benchmark)
        task = OWN_TASKS[one.benchmark.name].name
        self.say(
            f"{task}, as lighteval poses it: {len(posed)} problems, n={n}, up to {sampling.max_tokens} tokens "
            f"(lighteval's limit: {posed[0].max_tokens or 'none'})"
        )
        settings = {
            **one.identity.settings,
            "benchmark": f"lighteval {task}",
            "prompts": answers.prompts_digest(prompts),
            "n": n,
            "sampling": asdict(sampling),
        }
        identity = answers.Identity(one.identity.model, settings)
        folder = answers.choose_folder(one.folder, "lighteval", identity)
        lines, _ = answers.answer(
            self.make_engine,
            self.verifier,
            prompts,
            folder / answers.FILE,
            identity,
            n=n,
            sampling=sampling,
            seed=self.seed,
        )
        return lines

    def _prompts(self, posed: Sequence[Document], benchmark: Benchmark) -> list[Prompt]:
        """lighteval's text as the user's message, in the model's chat template; no system prompt of ours."""
        dataset = replace(benchmark.dataset, template="{question}", system_prompt=None)
        # A document that is none of our problems is scored by lighteval alone: its gold answer here decides nothing.
        problems = [
            Problem(
                id=document.problem.id if document.problem else f"document {document.id}",
                question=document.text,
                gold=document.problem.gold if document.problem else "0",
                tolerance=document.problem.tolerance if document.problem else None,
            )
            for document in posed
        ]
        return render(problems, dataset, self.tokenizer, max_prompt_tokens=NO_LIMIT).prompts


def _answered(one: Scored) -> list[Answered]:
    return [
        Answered(
            problem=prompt.problem,
            prompt=line["prompt"],
            responses=tuple(each["text"] for each in line["responses"]),
            judgements=tuple(
                Judgement(verdict=each["verdict"], extracted=each["extracted"]) for each in line["responses"]
            ),
        )
        for prompt, line in zip(one.benchmark.prompts, one.lines, strict=True)
    ]


def _local_file(benchmark: Benchmark) -> str | None:
    return benchmark.dataset.path if isinstance(benchmark.dataset, TableConfig) else None
