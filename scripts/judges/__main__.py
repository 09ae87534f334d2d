"""Our verifier against lighteval's: python -m scripts.judges DATA [--problems 32] [--responses FILE ...] [--out FOLDER]

DATA is a folder with math500.jsonl, gsm8k_test.jsonl, aime24.jsonl, minerva_math.jsonl and olympiadbench.jsonl. Each
problem's gold answer is put in every dress that suits it (see dresses.py) and both judge the response. `--responses`
adds a model's: JSON lines {"benchmark", "id", "response"}. Needs `make eval-env`. Prints a line for each dress on which
they differ, and writes counts.json and differences.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from grpo_lab.composition import dataset_config
from grpo_lab.evaluation.agreement import Agreement, Answered
from grpo_lab.evaluation.benchmarks import held_out_source, some_of
from grpo_lab.evaluation.lighteval import second_verdicts, without_dollars
from grpo_lab.evaluation.lighteval_process import Room, find_python
from grpo_lab.prompts import load_problems
from grpo_lab.rewards import Verifier
from grpo_lab.types import Problem
from scripts.judges.dresses import DRESSES, Truth

FILES = {
    "math500": "math500.jsonl",
    "gsm8k": "gsm8k_test.jsonl",
    "aime24": "aime24.jsonl",
    "minerva": "minerva_math.jsonl",
    "olympiadbench": "olympiadbench.jsonl",
}


class Key(NamedTuple):
    benchmark: str
    dress: str
    truth: Truth

    @property
    def task(self) -> str:
        return f"{self.benchmark}_{self.dress}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--problems", type=int, help="of each benchmark; without: all")
    parser.add_argument("--benchmarks", nargs="+", default=list(FILES), choices=FILES)
    parser.add_argument("--dresses", nargs="*", default=[dress.name for dress in DRESSES])
    parser.add_argument("--responses", type=Path, nargs="*", default=[])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("outputs/judges"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    problems = {name: read_problems(name, arguments.data, arguments.problems) for name in arguments.benchmarks}
    posed = {**dressed(problems, set(arguments.dresses)), **recorded(problems, arguments.responses)}
    with Verifier("math", workers=arguments.workers, timeout=5.0) as verifier:
        answered = judged(posed, verifier)
    with Room(find_python(None), arguments.out) as room:
        agreements = second_verdicts(room, {key.task: answers for key, answers in answered.items()}, [1])
    report(dict(zip(answered, agreements, strict=True)), arguments.out)


def read_problems(name: str, data: Path, limit: int | None) -> list[Problem]:
    split = load_problems(held_out_source(dataset_config(name), str(data / FILES[name])))
    return some_of(split.test, limit)


def dressed(problems: dict[str, list[Problem]], names: set[str]) -> dict[Key, list[tuple[Problem, str]]]:
    return {
        Key(benchmark, dress.name, dress.truth): responses
        for benchmark, some in problems.items()
        for dress in DRESSES
        if dress.name in names
        if (
            responses := [
                (problem, text) for problem in some if (text := dress.make(without_dollars(problem.gold))) is not None
            ]
        )
    }


def recorded(problems: dict[str, list[Problem]], files: Iterable[Path]) -> dict[Key, list[tuple[Problem, str]]]:
    by_id = {(benchmark, problem.id): problem for benchmark, some in problems.items() for problem in some}
    found: dict[Key, list[tuple[Problem, str]]] = defaultdict(list)
    for file in files:
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            if (problem := by_id.get((row["benchmark"], row["id"]))) is not None:
                found[Key(row["benchmark"], "model", "policy")].append((problem, row["response"]))
    return found


def judged(posed: dict[Key, list[tuple[Problem, str]]], verifier: Verifier) -> dict[Key, list[Answered]]:
    return {
        key: [
            Answered(problem=problem, prompt=problem.question, responses=(text,), judgements=(judgement,))
            for (problem, text), judgement in zip(pairs, verifier.judge(pairs), strict=True)
        ]
        for key, pairs in posed.items()
    }


def report(agreements: dict[Key, Agreement], out: Path) -> None:
    """Counts by dress over all benchmarks on the terminal; by benchmark, and every difference, in files."""
    counts: dict[tuple[str, Truth], Counter[str]] = defaultdict(Counter)
    for key, one in agreements.items():
        counts[key.dress, key.truth] += Counter(counted(one))
    print(f"lighteval {next(iter(agreements.values())).verdicts.version}")
    print(f"{'dress':22}{'truth':8}{'responses':>10}{'both':>7}{'ours':>7}{'theirs':>7}{'neither':>8}")
    for (dress, truth), count in counts.items():
        print(
            f"{dress:22}{truth:8}{count['responses']:10}{count['both_correct']:7}{count['only_ours']:7}"
            f"{count['only_lighteval']:7}{count['neither']:8}"
        )
    rows = [{**key._asdict(), **counted(one)} for key, one in agreements.items()]
    (out / "counts.json").write_text(json.dumps(rows, indent=1))
    with (out / "differences.jsonl").open("w", encoding="utf-8") as lines:
        for key, one in agreements.items():
            for difference in one.disagreements:
                row = {"truth": key.truth, "dress": key.dress, **dataclasses.asdict(difference)}
                lines.write(f"{json.dumps(row, ensure_ascii=False)}\n")


def counted(one: Agreement) -> dict[str, int]:
    names = ("responses", "both_correct", "only_ours", "only_lighteval", "neither")
    return {name: getattr(one, name) for name in names}


if __name__ == "__main__":
    main()
