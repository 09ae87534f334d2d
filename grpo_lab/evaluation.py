"""Scores of a policy on held-out problems: mean@n and the unbiased pass@K (GG C.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from grpo_lab.collect import judged_groups
from grpo_lab.config import TrainConfig
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine
from grpo_lab.seeds import derive
from grpo_lab.types import Group, Prompt, Sampling


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the mean, over all k-subsets of n responses, of whether one is correct.

    best@K for binary rewards. K = 1 gives c / n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n, and n is {n}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


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
    seeds = [derive(seed, "evaluation", prompt.id) for prompt in prompts]
    return judged_groups(engine, verifier, prompts, group_size=n, sampling=sampling, seeds=seeds, first=0)


def scores(groups: Sequence[Group], ks: Sequence[int]) -> dict[str, float]:
    """mean@n, pass@K averaged over problems, and what became of the responses.

    A response that timed out or could not be judged counts as wrong; the shares are reported.
    """
    n = len(groups[0].rollouts)
    correct = [sum(verdict == "correct" for verdict in group.verdicts) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    row = {f"mean@{n}": float(np.mean(correct)) / n}
    row |= {f"pass@{k}": float(np.mean([pass_at_k(n, c, k) for c in correct])) for k in ks}
    row["problems"] = len(groups)
    row["response/length"] = float(np.mean([len(rollout.token_ids) for rollout in rollouts]))
    row["response/truncated"] = float(np.mean([rollout.finish_reason == "length" for rollout in rollouts]))
    for verdict in ("unparsed", "timeout", "error"):
        row[f"verdict/{verdict}"] = float(np.mean([each == verdict for each in verdicts]))
    return row


def per_problem(groups: Sequence[Group]) -> list[dict[str, int | str]]:
    """How many of the responses to each problem were correct: what any later statistic is made of."""
    return [
        {
            "id": group.prompt.id,
            "correct": sum(verdict == "correct" for verdict in group.verdicts),
            "n": len(group.verdicts),
        }
        for group in groups
    ]
