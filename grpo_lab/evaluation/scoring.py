"""Scores of an engine's present weights on prompts: mean@n and the unbiased pass@K (GG C.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_lab.collect import judged_groups
from grpo_lab.config import TrainConfig
from grpo_lab.evaluation.estimators import pass_at_k
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine
from grpo_lab.seeds import derive
from grpo_lab.types import Group, Prompt, Sampling


def training_sampling(config: TrainConfig) -> Sampling:
    """How the responses that a run trains on are sampled."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def evaluation_sampling(config: TrainConfig) -> Sampling:
    """Training's settings, but for those that `evaluation.*` names."""
    e, r = config.evaluation, config.rollout
    return Sampling(
        temperature=r.temperature if e.temperature is None else e.temperature,
        max_tokens=r.max_response_tokens if e.max_tokens is None else e.max_tokens,
        top_p=r.top_p if e.top_p is None else e.top_p,
        top_k=r.top_k if e.top_k is None else e.top_k,
    )


def evaluate(
    engine: RolloutEngine,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    *,
    n: int,
    sampling: Sampling,
    seed: int,
) -> list[Group]:
    """n responses to each prompt by the engine's present weights, judged; `scores` sums them up.

    Every evaluation with one `seed` uses the same random numbers, so that two checkpoints differ by their weights.
    """
    seeds = problem_seeds(prompts, seed)
    return judged_groups(engine, verifier, prompts, group_size=n, sampling=sampling, seeds=seeds, first=0)


def problem_seeds(prompts: Sequence[Prompt], seed: int) -> list[int]:
    """By the problems' ids, so that what is drawn for one does not depend on which others are evaluated."""
    return [derive(seed, "evaluation", prompt.id) for prompt in prompts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of the n responses to one problem."""

    id: str
    n: int
    correct: int
    truncated: int
    unparsed: int
    timeout: int
    error: int
    tokens: int


def tally(prompt_id: str, lengths: Sequence[int], reasons: Sequence[str], verdicts: Sequence[str]) -> Tally:
    """Count the responses to one problem, given by their lengths in tokens, finish reasons and verdicts."""
    counts = Counter(verdicts)
    return Tally(
        id=prompt_id,
        n=len(verdicts),
        correct=counts["correct"],
        truncated=Counter(reasons)["length"],
        unparsed=counts["unparsed"],
        timeout=counts["timeout"],
        error=counts["error"],
        tokens=sum(lengths),
    )


def scores(groups: Sequence[Group], ks: Sequence[int]) -> dict[str, float]:
    """`summed` of groups."""
    return summed([_tally_of(group) for group in groups], ks)


def summed(tallies: Sequence[Tally], ks: Sequence[int]) -> dict[str, float]:
    """mean@n, pass@K averaged over problems, and what became of the responses.

    A response that timed out or could not be judged counts as wrong; the shares are reported.
    """
    n = tallies[0].n
    responses = n * len(tallies)
    row = {f"mean@{n}": float(np.mean([each.correct for each in tallies])) / n}
    row |= {f"pass@{k}": float(np.mean([pass_at_k(n, each.correct, k) for each in tallies])) for k in ks}
    row["problems"] = len(tallies)
    row["response/length"] = sum(each.tokens for each in tallies) / responses
    row["response/truncated"] = sum(each.truncated for each in tallies) / responses
    row["verdict/unparsed"] = sum(each.unparsed for each in tallies) / responses
    row["verdict/timeout"] = sum(each.timeout for each in tallies) / responses
    row["verdict/error"] = sum(each.error for each in tallies) / responses
    return row


def per_problem(groups: Sequence[Group]) -> list[dict[str, int | str]]:
    """How many of the responses to each problem were correct: what any later statistic is made of."""
    tallies = [_tally_of(group) for group in groups]
    return [{"id": each.id, "correct": each.correct, "n": each.n} for each in tallies]


def _tally_of(group: Group) -> Tally:
    return tally(
        group.prompt.id,
        [len(rollout.token_ids) for rollout in group.rollouts],
        [rollout.finish_reason for rollout in group.rollouts],
        group.verdicts,
    )
