"""Minibatches for the tests of the losses, and the losses once more in plain Python, read off the papers' formulas.

A case is ragged lists of per-token log-probs; `tensors` pads it with NaN, so that every test also tests the mask. The
plain losses take `at`, the current log-probs that a stop-gradient holds fixed, apart from `current`: central
differences over `current` alone are then the gradient of the loss as the papers define it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from grpo_lab.composition import conf_dir, register
from grpo_lab.config import ObjectiveConfig
from grpo_lab.objectives import Objective, build_objective
from grpo_lab.types import Counts, LossInputs, LossOutput

PRESETS = ("grpo", "grpo_rg", "grpo_tis", "agro", "ggpo", "ggpo_clip", "ggpo_reward_only")
Ragged = list[list[float]]


@cache
def preset(name: str) -> ObjectiveConfig:
    """What conf/objective/<name>.yaml says, without any scale's changes."""
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = OmegaConf.to_object(compose(f"objective/{name}").objective)
    assert isinstance(config, ObjectiveConfig)
    return config


def objective(name: str, *, max_response_tokens: int = 8, **changes: Any) -> Objective:
    return build_objective(replace(preset(name), **changes), max_response_tokens=max_response_tokens)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Log-probs of G m responses, rows of a group side by side, and their rewards."""

    m: int
    rewards: list[float]
    current: Ragged
    behaviour: Ragged
    ref: Ragged
    old: Ragged

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.current)

    @property
    def counts(self) -> Counts:
        return Counts(tokens=self.tokens, responses=len(self.rewards), groups=len(self.rewards) // self.m)

    def groups(self) -> list[range]:
        return [range(start, start + self.m) for start in range(0, len(self.rewards), self.m)]


def random_case(seed: int, *, groups: int, m: int, longest: int = 5, spread: float = 0.3) -> Case:
    """A case whose groups are mixed; `spread` is the size of the log ratios per token."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(groups * m)]
    rewards: list[float] = []
    for _ in range(groups):
        correct = rng.randint(1, m - 1)
        rewards += rng.sample([1.0] * correct + [0.0] * (m - correct), m)

    def near(rows: Ragged) -> Ragged:
        return [[value + rng.uniform(-spread, spread) for value in row] for row in rows]

    behaviour = [[rng.uniform(-2.5, -0.05) for _ in range(length)] for length in lengths]
    old = near(behaviour)
    return Case(m=m, rewards=rewards, behaviour=behaviour, old=old, current=near(old), ref=near(behaviour))


def padded(rows: Ragged, fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def tensors(case: Case, *, fill: float = math.nan, dtype: torch.dtype = torch.float64, **changes: Any) -> LossInputs:
    """The loss's inputs, `fill` behind the mask; `logprobs` is a leaf that wants a gradient."""
    logprobs = padded(case.current, fill, dtype).requires_grad_()
    lengths = torch.tensor([len(row) for row in case.current])
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=padded(case.behaviour, fill, dtype),
        ref_logprobs=padded(case.ref, fill, dtype),
        old_logprobs=padded(case.old, fill, dtype),
        loss_mask=torch.arange(logprobs.shape[1])[None, :] < lengths[:, None],
        rewards=torch.tensor(case.rewards, dtype=dtype),
        group_weights=torch.ones(len(case.rewards), dtype=dtype),
        response_weights=None,
        group_size=case.m,
        counts=case.counts,
    )
    return replace(inputs, **changes)


def select(inputs: LossInputs, rows: Sequence[int], **changes: Any) -> LossInputs:
    """Some rows of a minibatch as a micro-batch of it."""
    at = torch.tensor(rows)
    fields = ("logprobs", "behaviour_logprobs", "ref_logprobs", "old_logprobs", "loss_mask", "rewards", "group_weights")
    return replace(inputs, **{name: getattr(inputs, name)[at] for name in fields}, **changes)


def gradient(output: LossOutput, inputs: LossInputs) -> Tensor:
    """d loss / d logprobs [B, T]."""
    (result,) = torch.autograd.grad(output.loss, inputs.logprobs)
    return result


def response_weights(chosen: Objective, inputs: LossInputs) -> Tensor:
    """[B] weights from a pass without gradient, as a learner works them out where it has to split groups."""
    rewards = inputs.rewards.reshape(-1, inputs.group_size)
    log_ratio = torch.zeros_like(rewards)
    if chosen.log_ratio is not None:
        assert inputs.ref_logprobs is not None
        log_ratio = chosen.log_ratio(inputs.logprobs.detach(), inputs.ref_logprobs, inputs.loss_mask)
    return chosen.response_weights(rewards, log_ratio.reshape(rewards.shape)).reshape(-1)


# --- the losses in plain Python ---------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: Sequence[float], ddof: int) -> float:
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - ddof)


def softmax(values: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def gg_advantage(rewards: Sequence[float]) -> list[float]:
    return [(r - mean(rewards)) / (math.sqrt(variance(rewards, 1)) + 1e-6) for r in rewards]


def rg_advantage(rewards: Sequence[float]) -> list[float]:
    return [(r - mean(rewards)) / math.sqrt(variance(rewards, 0) + 1e-4) for r in rewards]


def grpo_token(rho: float, a: float, *, center: float = 1.0, dual: float | None = None, eps: float = 0.2) -> float:
    """RG's f_eps, and GG's dual clip for A < 0."""
    clipped = min(max(rho, max(center - eps, 0.0)), center + eps)
    surrogate = min(rho * a, clipped * a)
    return max(surrogate, dual * a) if dual is not None and a < 0 else surrogate


def plain_grpo(
    current: Ragged, case: Case, advantage: Any, *, dual: float | None, beta: float, cap: float | None
) -> float:
    terms = []
    for group in case.groups():
        advantages = advantage([case.rewards[i] for i in group])
        for i, a in zip(group, advantages, strict=True):
            for t, now in enumerate(current[i]):
                below = case.behaviour[i][t] if cap is None else case.old[i][t]
                weight = 1.0 if cap is None else min(math.exp(case.old[i][t] - case.behaviour[i][t]), cap)
                d = case.ref[i][t] - now
                surrogate = grpo_token(math.exp(now - below), a, dual=dual)
                terms.append(-weight * surrogate + beta * (math.exp(d) - d - 1))
    return math.fsum(terms) / case.tokens


def log_ratios(current: Ragged, case: Case, clip: float = math.inf) -> list[float]:
    """s - s_ref of each response, every token's part clipped first."""
    return [
        math.fsum(min(max(now - ref, -clip), clip) for now, ref in zip(current[i], case.ref[i], strict=True))
        for i in range(len(current))
    ]


def plain_agro(current: Ragged, at: Ragged, case: Case, beta: float) -> float:
    delta, terms = log_ratios(at, case), []
    for group in case.groups():
        z = [case.rewards[i] - beta * delta[i] for i in group]
        for i, value in zip(group, z, strict=True):
            others = (math.fsum(z) - value) / (case.m - 1)
            terms.append((value - others) * math.fsum(current[i]))
    return -math.fsum(terms) / case.tokens


def group_gap(adjusted: Sequence[float], beta: float) -> float:
    """J of one group of adjusted rewards (GG Eq. 6)."""
    top = max(adjusted)
    exponentials = [math.exp((value - top) / beta) for value in adjusted]
    return top + beta * math.log(mean(exponentials)) - mean(adjusted)


def plain_ggpo(current: Ragged, case: Case, beta: float) -> float:
    delta = log_ratios(current, case)
    gaps = [group_gap([case.rewards[i] - beta * delta[i] for i in group], beta) for group in case.groups()]
    return mean(gaps) / (beta * (case.tokens / len(current)) * math.sqrt(case.m - 1))


def plain_weighted(current: Ragged, at: Ragged, case: Case, beta: float, *, clip: float | None) -> float:
    """GG Eq. 65 with q from clipped log ratios, or (`clip` None) from the rewards alone (D.6)."""
    delta = [0.0] * len(at) if clip is None else log_ratios(at, case, clip)
    terms = []
    for group in case.groups():
        q = softmax([case.rewards[i] / beta - delta[i] for i in group])
        terms += [(case.m * weight - 1) * math.fsum(current[i]) for i, weight in zip(group, q, strict=True)]
    return -math.fsum(terms) / math.sqrt(case.m - 1) / case.tokens


# name -> (current, at, case) -> loss, with the presets' numbers.
PLAIN: dict[str, Callable[[Ragged, Ragged, Case], float]] = {
    "grpo": lambda now, at, case: plain_grpo(now, case, gg_advantage, dual=10.0, beta=0.01, cap=None),
    "grpo_rg": lambda now, at, case: plain_grpo(now, case, rg_advantage, dual=None, beta=0.1, cap=None),
    "grpo_tis": lambda now, at, case: plain_grpo(now, case, gg_advantage, dual=10.0, beta=0.01, cap=2.0),
    "agro": lambda now, at, case: plain_agro(now, at, case, 0.01),
    "ggpo": lambda now, at, case: plain_ggpo(now, case, 0.01),
    "ggpo_clip": lambda now, at, case: plain_weighted(now, at, case, 0.01, clip=0.05),
    "ggpo_reward_only": lambda now, at, case: plain_weighted(now, at, case, 0.01, clip=None),
}


def central_differences(loss: Callable[[Ragged], float], current: Ragged, step: float = 1e-6) -> Ragged:
    """d loss / d current, one token at a time."""
    result = []
    for i, row in enumerate(current):
        slopes = []
        for t in range(len(row)):
            moved = []
            for sign in (step, -step):
                rows = [list(other) for other in current]
                rows[i][t] += sign
                moved.append(loss(rows))
            slopes.append((moved[0] - moved[1]) / (2 * step))
        result.append(slopes)
    return result
