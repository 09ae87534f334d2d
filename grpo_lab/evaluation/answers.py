"""The responses file of one model on one benchmark: appended as responses are judged, and gone on with after a stop.

The first line says what the responses are of (`Identity`): they are never taken for those of other weights, prompts or
settings. Then one line a problem. A line that a killed process left half written is dropped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from grpo_lab.collect import Answer, judged_parts
from grpo_lab.config import ConfigError
from grpo_lab.evaluation.scoring import Tally, problem_seeds, tally
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine
from grpo_lab.types import Prompt, Rollout, Sampling

FILE = "responses.jsonl"
# Responses asked for at once of an engine that arranges them itself: many enough to keep it busy, few enough that a
# stop loses little.
PART_RESPONSES = 4096


class MissingPredictions(ConfigError):
    """Not every problem has its n responses: there is no score."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides responses and verdicts: `model` of the weights and the tokenizer, `settings` all the rest."""

    model: str
    settings: Mapping[str, Any]

    @property
    def short(self) -> str:
        return hashlib.sha256(self.line).hexdigest()[:8]

    @property
    def line(self) -> bytes:
        """The first line of the file, without its end."""
        return _encode({"model": self.model, "settings": self.settings})


@dataclass(kw_only=True)
class Seconds:
    """Wall time of a session: `sampling` inside the engine, of `total`. Problems that were answered in it."""

    sampling: float = 0.0
    total: float = 0.0
    problems: int = 0


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """A hash of what the model is shown, as text and as tokens, and of the gold answers it is judged against."""
    hasher = hashlib.sha256()
    for prompt in prompts:
        hasher.update(
            _encode([prompt.id, prompt.text, prompt.token_ids, prompt.problem.gold, prompt.problem.tolerance])
        )
    return hasher.hexdigest()[:16]


def choose_folder(parent: Path, name: str, identity: Identity) -> Path:
    """`parent/name`; `parent/name-<hash>` where the first holds the responses of something else, which stay."""
    folder = parent / name
    head = _head(folder / FILE)
    return folder if head in (None, identity.line) else parent / f"{name}-{identity.short}"


def answer(
    make_engine: Callable[[], RolloutEngine],
    verifier: Verifier,
    prompts: Sequence[Prompt],
    path: Path,
    identity: Identity,
    *,
    n: int,
    sampling: Sampling,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[dict[str, Any]], Seconds]:
    """n judged responses to every prompt, in `path`; those that are there are not sampled again.

    `make_engine` gives the engine, with the right weights, and is called only if a prompt has no responses yet.
    `progress` is told how many prompts have theirs. Returns the lines in the order of the prompts.

    Raises:
        MissingPredictions: a line has not n responses.
        ConfigError: the file belongs to another identity, is damaged, or is being written by another process.
    """
    seconds = Seconds()
    with _opened(path, identity) as (stream, lines):
        open_prompts = [prompt for prompt in prompts if prompt.id not in lines]
        if open_prompts:
            engine, began = make_engine(), time.perf_counter()
            size = max((engine.rows_at_once or PART_RESPONSES) // n, 1)
            # On one grid, so that a session that goes on samples its rows beside the same others as far as it can.
            grid = [prompts[start : start + size] for start in range(0, len(prompts), size)]
            left = [[prompt for prompt in part if prompt.id not in lines] for part in grid]
            parts = [(part, problem_seeds(part, seed)) for part in left if part]
            generate = partial(_timed, engine, seconds, n, sampling)
            for judged in judged_parts(generate, verifier, parts):
                new = [_line(each) for each in judged]
                stream.write(b"".join(_encode(line) + b"\n" for line in new))
                stream.flush()
                lines |= {line["id"]: line for line in new}
                progress(len(lines))
            os.fsync(stream.fileno())
            seconds.total, seconds.problems = time.perf_counter() - began, len(open_prompts)
    return complete([lines[prompt.id] for prompt in prompts], prompts, n, path), seconds


def complete(lines: Sequence[dict[str, Any]], prompts: Sequence[Prompt], n: int, path: Path) -> list[dict[str, Any]]:
    """`lines` themselves.

    Raises:
        MissingPredictions: a prompt has no line, or a line not n responses.
    """
    counts = {line["id"]: len(line["responses"]) for line in lines}
    short = [prompt.id for prompt in prompts if counts.get(prompt.id, 0) != n]
    if short:
        raise MissingPredictions(
            f"{path}: {len(short)} of {len(prompts)} problems do not have the evaluation.n={n} responses, the first is "
            f"{short[0]} with {counts.get(short[0], 0)}: no score; remove its line and run the command again"
        )
    return list(lines)


def tally_of(line: Mapping[str, Any]) -> Tally:
    """The counts of a line."""
    responses = line["responses"]
    return tally(
        line["id"],
        [each["tokens"] for each in responses],
        [each["finish_reason"] for each in responses],
        [each["verdict"] for each in responses],
    )


# --- the file ---


@contextmanager
def _opened(path: Path, identity: Identity) -> Iterator[tuple[BinaryIO, dict[str, dict[str, Any]]]]:
    """The file, to append to, and its lines by problem; begun if it is not there, cut after its last whole line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{path} is being written by another process: wait for it, or choose out=") from error
        stream.seek(0)
        data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        stream.truncate(len(whole))
        if not whole:
            stream.write(identity.line + b"\n")
            stream.flush()
        elif whole.partition(b"\n")[0] != identity.line:
            raise ConfigError(f"{path} holds responses of other weights or settings: choose another folder with out=")
        yield stream, _parse(whole, path)


def _parse(data: bytes, path: Path) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for number, raw in enumerate(data[: data.rfind(b"\n") + 1].splitlines()[1:], 2):
        try:
            line = json.loads(raw)
            name = line["id"]
            assert isinstance(line["responses"], list)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ConfigError(f"{path} line {number} is damaged: remove that line and run the command again") from error
        if name in lines:
            raise ConfigError(f"{path} line {number} answers problem {name} a second time: remove one of the two")
        lines[name] = line
    return lines


def _head(path: Path) -> bytes | None:
    """The first line, without its end; None where none was finished."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        line = stream.readline()
    return line[:-1] if line.endswith(b"\n") else None


def _line(answer: Answer) -> dict[str, Any]:
    responses = [
        {
            "text": rollout.text,
            "tokens": len(rollout.token_ids),
            "finish_reason": rollout.finish_reason,
            "verdict": judgement.verdict,
            "extracted": judgement.extracted,
        }
        for rollout, judgement in zip(answer.rollouts, answer.judgements, strict=True)
    ]
    prompt = answer.prompt
    return {"id": prompt.id, "prompt": prompt.text, "gold": prompt.problem.gold, "responses": responses}


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _timed(
    engine: RolloutEngine,
    seconds: Seconds,
    n: int,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    /,
    *,
    seeds: Sequence[int],
) -> list[list[Rollout]]:
    began = time.perf_counter()
    rollouts = engine.generate(prompts, group_size=n, sampling=sampling, seeds=seeds)
    seconds.sampling += time.perf_counter() - began
    return rollouts
