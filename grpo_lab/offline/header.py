"""pool.json: what a pool is and how it came about, and what a run must have in common with it. Loads nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError, TrainConfig

HEADER = "pool.json"
FORMAT = 1


class PoolError(ConfigError):
    """A pool that cannot be trained on; every rank of a run raises it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Whose responses these are.

    model: folder or hub id, for people. weights: the fingerprint (float32) of the weights that the behaviour log-probs
    are of; None where it is not known. version: updates behind those weights. engine: what sampled. logprobs:
    `recorded` while sampling, `scored` afterwards by `model`, or `given` in an imported file. tolerance: nats; the mean
    |log-prob difference| that rounding alone may cause between the engine and a learner.
    """

    model: str
    weights: str | None
    version: int
    engine: str
    logprobs: str
    tolerance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Lengths in tokens.

    content: hash of every group in order. parts: SHA-256 of each file, by name, in order. mixed: groups of unequal
    rewards. order: `sampled` or `file`. tokenizer, template: hashes; template is None where prompts were imported as
    text. drawn: groups, responses and tokens sampled for the pool, dropped ones included; None for an imported one.
    """

    format: int
    content: str
    parts: dict[str, str]
    order: str
    groups: int
    mixed: int
    group_size: int
    responses: int
    tokens: int
    longest_prompt: int
    longest_response: int
    temperature: float
    seed: int
    dataset: str
    verifier: str
    tokenizer: str
    template: str | None
    sampler: Sampler
    drawn: dict[str, int] | None
    made_by: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def read_header(folder: Path) -> Header:
    """The header of a pool.

    Raises:
        PoolError: there is none, or it is of another version.
    """
    path = folder / HEADER
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
        if raw.get("format") != FORMAT:
            raise PoolError(f"{path} has format {raw.get('format')}, and this version reads {FORMAT}: make it again")
        return Header(**{**raw, "sampler": Sampler(**raw["sampler"])})
    except FileNotFoundError as error:
        raise PoolError(
            f"pool.path={folder} is no pool, it holds no {HEADER}: make one with python -m grpo_lab.pool out={folder}"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, PoolError):
            raise
        raise PoolError(f"{path} cannot be read ({error}): make the pool again") from error


def check_settings(config: TrainConfig) -> None:
    """Whether a run fits its pool, as far as pool.json tells.

    Raises:
        PoolError: a line for each setting that does not.
    """
    assert config.pool.path is not None, "validated"
    if problems := list(_problems(config, read_header(Path(config.pool.path)))):
        raise PoolError("\n".join(problems))


def _problems(config: TrainConfig, pool: Header) -> Iterator[str]:
    where = f"the pool in {config.pool.path}"
    rollout, objective = config.rollout, config.objective
    if config.group_size != pool.group_size:
        yield f"group_size={config.group_size}, and the groups of {where} have {pool.group_size}: set that"
    if rollout.temperature != pool.temperature:
        yield (
            f"rollout.temperature={rollout.temperature}, and the log-probs of {where} are of temperature "
            f"{pool.temperature}: set that"
        )
    if rollout.max_prompt_tokens < pool.longest_prompt:
        yield (
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}, and the longest prompt of {where} has "
            f"{pool.longest_prompt} tokens: raise it"
        )
    if rollout.max_response_tokens < pool.longest_response:
        yield (
            f"rollout.max_response_tokens={rollout.max_response_tokens}, and the longest response of {where} has "
            f"{pool.longest_response} tokens: raise it"
        )
    if objective.zero_variance == "filter" and pool.mixed < pool.groups:
        yield (
            f"objective.zero_variance=filter trains on mixed groups alone, and {pool.groups - pool.mixed} of the "
            f"{pool.groups} groups of {where} have equal rewards: make it with objective.zero_variance=filter, or "
            "train with mask or keep"
        )
    yield from _budget_problems(config, pool, where)


def _budget_problems(config: TrainConfig, pool: Header, where: str) -> Iterator[str]:
    schedule, size = config.schedule, config.groups_per_minibatch
    assert schedule.updates is not None, "validated"
    wanted, held = -(-schedule.updates // schedule.i), pool.groups // size
    if wanted > held:
        most = f"schedule.updates={held * schedule.i}" if held else f"groups_per_minibatch={pool.groups} or less"
        yield (
            f"schedule.updates={schedule.updates} with schedule.i={schedule.i} takes {wanted} minibatches of "
            f"groups_per_minibatch={size} groups, each once, and {where} has {pool.groups} groups, which are {held} "
            f"minibatches: set {most}, or make a pool of groups={wanted * size}"
        )
