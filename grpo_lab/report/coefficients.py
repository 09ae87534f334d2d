"""GG figure 6: how strongly a method pushes up the right responses of a group, by how many of them are right.

The coefficient c_i of a response is what its score is multiplied by: -1/T_tok sum_i c_i s_i has the loss's gradient.
The sum over the right responses is known in closed form where all log ratios to the reference are equal; the same sum
is taken here from the losses that train, by differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo_lab.composition import compose_run
from grpo_lab.config import ObjectiveConfig
from grpo_lab.objectives import Objective, build_objective
from grpo_lab.types import Counts, LossInputs

GROUP_SIZE = 8
# Curves are relative to the sum over this number of right responses (GG, caption of figure 6).
NORMALISED_AT = 7

# Sums over the right responses, (k, m), of a mixed group: 0 < k < m (GG A.4).
CLOSED_FORMS: Mapping[str, Callable[[int, int], float]] = {
    # Without the 1e-6 beside the deviation.
    "grpo": lambda k, m: math.sqrt(k * (m - k) * (m - 1) / m),
    # Equal log ratios to the reference.
    "agro": lambda k, m: k * (m - k) / (m - 1),
    # The limit of small beta.
    "ggpo": lambda k, m: (m - k) / math.sqrt(m - 1),
}


@dataclass(frozen=True, slots=True)
class Sums:
    """One objective's sums for k = 0 .. m right responses; `implemented` is of its loss at `beta`."""

    objective: str
    beta: float
    closed_form: tuple[float, ...]
    implemented: tuple[float, ...]


def normalised(sums: Sequence[float]) -> list[float]:
    """Sums for k = 0 .. m relative to that for k = 7, as the figure shows them."""
    return [each / sums[NORMALISED_AT] for each in sums]


def coefficient_sums(scale: str) -> list[Sums]:
    """Both sums of every objective of the figure, with the betas of GG's default setting at a scale."""
    return [_sums_of(_objective_config(name, scale), GROUP_SIZE) for name in CLOSED_FORMS]


def closed_form(objective: str, k: int, m: int) -> float:
    """The sum over k right responses of m. In a group of equal rewards, k = 0 or m, no response is pushed."""
    return CLOSED_FORMS[objective](k, m) if 0 < k < m else 0.0


def implemented(objective: Objective, k: int, m: int) -> float:
    """The same from the loss: -T_tok dL/ds_i summed over the k right responses, at learner = behaviour = reference.

    Each response is one token, so that s_i is its log-prob and T_tok = m; float64.
    """
    logprobs = torch.full((m, 1), math.log(0.5), dtype=torch.float64, requires_grad=True)
    same = logprobs.detach().clone()
    rewards = torch.zeros(m, dtype=torch.float64)
    rewards[:k] = 1.0
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=same,
        ref_logprobs=same,
        old_logprobs=same,
        loss_mask=torch.ones((m, 1), dtype=torch.bool),
        rewards=rewards,
        group_weights=torch.ones(m, dtype=torch.float64),
        response_weights=None,
        group_size=m,
        counts=Counts(tokens=m, responses=m, groups=1),
    )
    (gradient,) = torch.autograd.grad(objective.loss(inputs).loss, logprobs)
    # Adding 0 turns the -0.0 of an empty sum into 0.0.
    return float(-m * gradient[:k].sum()) + 0.0


def _objective_config(name: str, scale: str) -> ObjectiveConfig:
    return compose_run(["experiment=gg/default", f"scale={scale}", f"objective={name}"], {}).objective


def _sums_of(config: ObjectiveConfig, m: int) -> Sums:
    objective = build_objective(config, max_response_tokens=1)
    return Sums(
        objective=config.name,
        beta=vars(config)["beta"],
        closed_form=tuple(closed_form(config.name, k, m) for k in range(m + 1)),
        implemented=tuple(implemented(objective, k, m) for k in range(m + 1)),
    )
