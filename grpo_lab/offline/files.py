"""The groups of a pool in parquet files, a row a group, written through `datasets`; and the hash of their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.offline.header import PoolError
from grpo_lab.types import Group, Problem, Prompt, Rollout

# Groups that are decoded at a time.
ROWS_AT_ONCE = 256


def part_name(index: int) -> str:
    return f"groups-{index:05d}.parquet"


def write_part(path: Path, groups: Sequence[Group]) -> None:
    """Write groups as one file, which is whole or absent."""
    import datasets

    datasets.disable_progress_bars()
    temporary = path.with_name(f".{path.name}.tmp")
    rows = [_to_row(group) for group in groups]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    datasets.Dataset.from_dict(columns, features=_features()).to_parquet(temporary)
    os.replace(temporary, path)


def _features() -> Any:
    from datasets import Features, List, Value

    text, whole, real = Value("string"), Value("int32"), Value("float32")
    return Features(
        {
            "id": text,
            "question": text,
            "gold": text,
            "tolerance": Value("float64"),
            "solution": text,
            "tags": text,
            "prompt": text,
            "prompt_tokens": List(whole),
            "responses": List(text),
            "tokens": List(List(whole)),
            "behaviour_logprobs": List(List(real)),
            "finish_reasons": List(text),
            "rewards": List(Value("float64")),
            "verdicts": List(text),
            "sequence": Value("int64"),
        }
    )


def _to_row(group: Group) -> dict[str, Any]:
    problem = group.prompt.problem
    return {
        "id": problem.id,
        "question": problem.question,
        "gold": problem.gold,
        "tolerance": problem.tolerance,
        "solution": problem.solution,
        "tags": json.dumps(dict(problem.tags), sort_keys=True),
        "prompt": group.prompt.text,
        "prompt_tokens": list(group.prompt.token_ids),
        "responses": [rollout.text for rollout in group.rollouts],
        "tokens": [rollout.token_ids for rollout in group.rollouts],
        "behaviour_logprobs": [rollout.behaviour_logprobs for rollout in group.rollouts],
        "finish_reasons": [rollout.finish_reason for rollout in group.rollouts],
        "rewards": list(group.rewards),
        "verdicts": list(group.verdicts),
        "sequence": group.sequence,
    }


def read_part(path: Path) -> Iterator[Group]:
    """The groups of one file, in order. Their responses are of version 0: the weights that the run begins with stand
    for those that sampled.

    Raises:
        PoolError: it cannot be read.
    """
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                yield from _to_groups(batch)
    except (ArrowException, OSError, KeyError, ValueError) as error:
        raise PoolError(f"{path} is no readable part of a pool ({error}): make the pool again") from error


def _to_groups(batch: Any) -> Iterator[Group]:
    arrays = ("tokens", "behaviour_logprobs")
    plain = batch.drop_columns(list(arrays)).to_pylist()
    nested = {name: batch.column(name) for name in arrays}
    for index, row in enumerate(plain):
        tokens, logprobs = ([each.values.to_numpy() for each in nested[name][index].values] for name in arrays)
        yield Group(
            prompt=Prompt(
                problem=Problem(
                    id=row["id"],
                    question=row["question"],
                    gold=row["gold"],
                    tolerance=row["tolerance"],
                    solution=row["solution"],
                    tags=json.loads(row["tags"]),
                ),
                text=row["prompt"],
                token_ids=tuple(row["prompt_tokens"]),
            ),
            rollouts=tuple(
                Rollout(
                    token_ids=np.array(tokens[j], dtype=np.int32),
                    behaviour_logprobs=np.array(logprobs[j], dtype=np.float32),
                    finish_reason=row["finish_reasons"][j],
                    policy_version=0,
                    text=text,
                )
                for j, text in enumerate(row["responses"])
            ),
            rewards=tuple(row["rewards"]),
            verdicts=tuple(row["verdicts"]),
            sequence=row["sequence"],
        )


def content_hash(groups: Iterable[Group]) -> str:
    """A SHA-256 of all that the groups hold and of their order, whatever files they are in."""
    hasher = hashlib.sha256()
    for group in groups:
        row = _to_row(group)
        tokens, logprobs = row.pop("tokens"), row.pop("behaviour_logprobs")
        row["lengths"] = [len(each) for each in tokens]
        hasher.update(json.dumps(row, sort_keys=True).encode() + b"\n")
        for each in tokens:
            hasher.update(each.astype("<i4").tobytes())
        for each in logprobs:
            hasher.update(each.astype("<f4").tobytes())
    return hasher.hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
