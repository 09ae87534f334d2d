"""How far the learner is from the policy that sampled: K3, drift, ESS, and RG's improvement bound.

All from lambda = logprobs - behaviour_logprobs on the retained minibatch, before any clamp, in float64. Everything is
a sum with a count, a maximum, or a histogram over fixed edges, so that parts merge (GG C.1; RG Theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from grpo_lab.learner import Scores
from grpo_lab.metrics import Histogram, Max, Mean, Metric
from grpo_lab.minibatches import Minibatch
from grpo_lab.objectives import RG_VAR_EPS

# Edges of the log-ratio histogram: fine near 0, where an on-policy run lives, and out to +-20 nats.
_POSITIVE_EDGES = tuple(float(edge) for edge in np.geomspace(1e-7, 20.0, 84))
LOG_RATIO_EDGES = (*(-edge for edge in reversed(_POSITIVE_EDGES)), 0.0, *_POSITIVE_EDGES)


def log_ratios(minibatch: Minibatch, logprobs: Scores) -> list[np.ndarray]:
    """lambda of each response, [T] float64 arrays in the order of groups and members."""
    return [
        values.astype(np.float64) - rollout.behaviour_logprobs.astype(np.float64)
        for group, scores in zip(minibatch.groups, logprobs, strict=True)
        for rollout, values in zip(group.rollouts, scores, strict=True)
    ]


# A ratio or a sum beyond the floats is infinity, which is what is logged: no warning.
_overflow_is_infinity = np.errstate(over="ignore")


@_overflow_is_infinity
def k3(ratios: np.ndarray) -> np.ndarray:
    """exp(lambda) - lambda - 1 per token: non-negative, and at the behaviour policy's tokens an unbiased estimate of
    KL(behaviour || learner)."""
    return np.expm1(ratios) - ratios


@_overflow_is_infinity
def mismatch(ratios: list[np.ndarray]) -> dict[str, Metric]:
    """Token-level mismatch of one update."""
    tokens = np.concatenate(ratios)
    counts = np.bincount(np.searchsorted(LOG_RATIO_EDGES, tokens, side="right"), minlength=len(LOG_RATIO_EDGES) + 1)
    return {
        "mismatch/k3": Mean(float(k3(tokens).sum()), len(tokens)),
        "mismatch/drift": Mean(float(np.abs(tokens).sum()), len(tokens)),
        "mismatch/log_ratio_max": Max(float(np.abs(tokens).max())),
        "mismatch/log_ratio": Histogram(LOG_RATIO_EDGES, tuple(int(count) for count in counts)),
    }


@dataclass(frozen=True, slots=True)
class EssSums:
    """log sum w, log sum w^2 and the number of weights w, which merge over updates and ranks."""

    log_sum: float = -np.inf
    log_sum_squares: float = -np.inf
    count: int = 0

    @classmethod
    def of(cls, log_weights: np.ndarray) -> EssSums:
        return cls(
            float(np.logaddexp.reduce(log_weights)), float(np.logaddexp.reduce(2 * log_weights)), len(log_weights)
        )

    def merge(self, other: EssSums) -> EssSums:
        return EssSums(
            float(np.logaddexp(self.log_sum, other.log_sum)),
            float(np.logaddexp(self.log_sum_squares, other.log_sum_squares)),
            self.count + other.count,
        )

    def value(self) -> float:
        """(sum w)^2 / (B sum w^2), in [1/B, 1]."""
        assert self.count, "an ESS needs at least one weight"
        share = float(np.exp(2 * self.log_sum - self.log_sum_squares) / self.count)
        # The difference of two large logarithms rounds, and may step over a bound.
        return min(max(share, 1 / self.count), 1.0)


def sequence_ess(ratios: list[np.ndarray]) -> EssSums:
    """Sums of w = exp(sum_t lambda), one weight a response."""
    return EssSums.of(np.array([ratio.sum() for ratio in ratios]))


def token_ess(ratios: list[np.ndarray]) -> EssSums:
    """The same with one weight exp(lambda) a token."""
    return EssSums.of(np.concatenate(ratios))


@_overflow_is_infinity
def bound_parts(minibatch: Minibatch, first: list[np.ndarray], last: list[np.ndarray]) -> dict[str, Metric]:
    """The terms of RG's Theorem 1, with alpha the behaviour policy, pi_k the learner at the minibatch's first pass and
    pi at its last, as means over prompts of sample estimates with sequence weights.

    `bound/tv_pi_square` and `bound/inverse_square` are means of squares, for `bound_values`.
    """
    m = minibatch.group_size
    rewards = np.array([group.rewards for group in minibatch.groups])
    s = np.sqrt(rewards.var(-1) + RG_VAR_EPS)
    advantages = (rewards - rewards.mean(-1, keepdims=True)) / s[:, None]
    log_pi_k = np.array([ratio.sum() for ratio in first]).reshape(-1, m)
    log_pi = np.array([ratio.sum() for ratio in last]).reshape(-1, m)
    tv_pi_k, tv_pi = (0.5 * np.abs(np.exp(log) - 1).mean(-1) for log in (log_pi_k, log_pi))
    inverse = (1 - s) / s
    values = {
        "bound/s": s,
        "bound/one_minus_s_over_s": inverse,
        "bound/inverse_square": inverse**2,
        "bound/tv_pi": tv_pi,
        "bound/tv_pi_square": tv_pi**2,
        "bound/tv_pi_k": tv_pi_k,
        # k3: w - 1 - log w of a small log ratio, whose own rounding may be negative.
        "bound/pinsker": np.sqrt(0.5 * k3(log_pi).mean(-1)),
        "bound/surrogate": _weighted_mean(log_pi, advantages),
    }
    parts: dict[str, Metric] = {name: Mean(float(each.sum()), len(each)) for name, each in values.items()}
    return parts | {"bound/reward_max": Max(float(np.abs(rewards).max()))}


def _weighted_mean(log_weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """mean(w v) over the last axis, in the log domain: weights that overflow give infinity, not the NaN of a difference
    of two."""
    top = log_weights.max(-1)
    scaled = (np.exp(log_weights - top[..., None]) * values).mean(-1)
    with np.errstate(over="ignore", divide="ignore"):
        return np.sign(scaled) * np.exp(top + np.log(np.abs(scaled)))


def bound_values(merged: Mapping[str, Metric]) -> dict[str, float]:
    """The bound's terms and its value, from merged parts:
    mean L - 2 |r| sqrt(mean ((1-s)/s)^2) sqrt(mean TV(pi, alpha)^2) - 2 |r| mean TV(pi_k, alpha).

    Terms that overflow leave no bound: -inf.
    """
    value = {name: metric.value() or 0.0 for name, metric in merged.items() if name.startswith("bound/")}
    r = value.pop("bound/reward_max")
    squares = math.sqrt(value.pop("bound/inverse_square")) * math.sqrt(value.pop("bound/tv_pi_square"))
    lower = value["bound/surrogate"] - 2 * r * squares - 2 * r * value["bound/tv_pi_k"]
    value["bound/lower"] = -math.inf if math.isnan(lower) else lower
    return value
