"""Rows of a file of responses made elsewhere: what they may hold, checked without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError

KEYS = ("question", "prompt", "responses", "logprobs", "rewards", "gold", "tolerance", "finish_reasons")
# What rounding may lift the log of a probability above 0.
ROUNDING = 1e-3
FAULTS_SHOWN = 20


class Fault(Exception):
    """What is wrong with a row, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One row: a question to be rendered, or a prompt as the model saw it; m responses as text or token ids; and per
    response its finish reason, log-probs and reward, where they are given."""

    place: str
    question: str | None
    prompt: str | list[int] | None
    responses: list[str] | list[list[int]]
    finish_reasons: list[str] | None
    logprobs: list[list[float]] | None
    rewards: list[float] | None
    gold: str
    tolerance: float | None


def read_rows(path: Path, *, group_size: int) -> list[Answers]:
    """Every row of a file.

    Raises:
        ConfigError: a line for each row that cannot be used.
    """
    rows: list[Answers] = []
    faults: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                rows.append(_read(line, place, group_size))
            except Fault as fault:
                faults.append(f"{place}: {fault}")
    faults += _differences(rows)
    raise_faults(faults)
    if not rows:
        raise ConfigError(f"{path} holds no rows: write one JSON object a line, with question and responses")
    return rows


def raise_faults(faults: list[str]) -> None:
    """One error of all, where there are any."""
    if faults:
        more = [f"and {len(faults) - FAULTS_SHOWN} more rows"] if len(faults) > FAULTS_SHOWN else []
        raise ConfigError("\n".join([*faults[:FAULTS_SHOWN], *more]))


def _differences(rows: list[Answers]) -> Iterator[str]:
    """What the first row has and another lacks, or the other way round."""
    for name in ("question", "logprobs", "rewards"):
        for row in rows:
            if (getattr(row, name) is None) != (getattr(rows[0], name) is None):
                has = "lacks" if getattr(row, name) is None else "has"
                yield f"{row.place}: it {has} {name}, unlike {rows[0].place}: give it in every row or in none"
                break


def _read(line: bytes, place: str, group_size: int) -> Answers:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Fault(f"not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise Fault("not a JSON object; write {'question': ..., 'responses': [...]}")
    if unknown := [key for key in row if key not in KEYS]:
        raise Fault(f"{unknown[0]!r} is not known; the keys are {', '.join(KEYS)}")
    if ("question" in row) == ("prompt" in row):
        raise Fault("give either question, which the run's template frames, or prompt, as the model saw it")
    responses = _responses(row, group_size)
    return Answers(
        place=place,
        question=_text(row, "question") if "question" in row else None,
        prompt=_prompt(row) if "prompt" in row else None,
        responses=responses,
        finish_reasons=_finish_reasons(row, responses),
        logprobs=_logprobs(row, len(responses)),
        rewards=_rewards(row, len(responses)),
        gold=_gold(row),
        tolerance=_number(row["tolerance"], "tolerance") if row.get("tolerance") is not None else None,
    )


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise Fault(f"{key} is {_shown(value)}; make it a text that is not empty")
    return value


def _prompt(row: Mapping[str, Any]) -> str | list[int]:
    return row["prompt"] if _is_ids(row["prompt"]) else _text(row, "prompt")


def _responses(row: Mapping[str, Any], group_size: int) -> list[Any]:
    responses = row.get("responses")
    if not isinstance(responses, list) or len(responses) != group_size:
        count = len(responses) if isinstance(responses, list) else "no list of"
        raise Fault(f"{count} responses, and group_size={group_size}; give as many, or set group_size")
    if not (all(isinstance(each, str) for each in responses) or all(_is_ids(each) for each in responses)):
        raise Fault("responses must all be texts, or all lists of token ids of one token or more")
    return responses


def _finish_reasons(row: Mapping[str, Any], responses: list[Any]) -> list[str] | None:
    reasons = row.get("finish_reasons")
    if reasons is None:
        return None
    if not isinstance(responses[0], str):
        raise Fault("finish_reasons are for responses as text; token ids tell by their end token")
    if not isinstance(reasons, list) or len(reasons) != len(responses) or not set(reasons) <= {"stop", "length"}:
        raise Fault(f"finish_reasons is {_shown(reasons)}; give stop or length for each of {len(responses)} responses")
    return reasons


def _logprobs(row: Mapping[str, Any], count: int) -> list[list[float]] | None:
    values = row.get("logprobs")
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count or not all(isinstance(each, list) for each in values):
        raise Fault(f"logprobs must be {count} lists, one a response, of a number a token")
    for index, each in enumerate(values):
        for value in each:
            if _number(value, f"logprobs[{index}]") > ROUNDING:
                raise Fault(f"logprobs[{index}] holds {value:g}; give natural logarithms of probabilities, at most 0")
    return [[float(value) for value in each] for each in values]


def _rewards(row: Mapping[str, Any], count: int) -> list[float] | None:
    values = row.get("rewards")
    if values is None:
        if row.get("gold") is None:
            raise Fault("neither rewards nor gold; give one of them")
        return None
    if not isinstance(values, list) or len(values) != count:
        raise Fault(f"rewards must be {count} numbers, one a response")
    return [_number(value, "rewards") for value in values]


def _gold(row: Mapping[str, Any]) -> str:
    gold = row.get("gold")
    if gold is None:
        return ""
    if isinstance(gold, int | float) and not isinstance(gold, bool) and math.isfinite(gold):
        return repr(gold)
    return _text(row, "gold")


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Fault(f"{key} holds {_shown(value)}; give numbers")
    return float(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:40]}"
