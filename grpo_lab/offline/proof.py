"""The spot check of a pool's log-probs: a few responses are scored by the weights that a run begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from grpo_lab.diagnostics import k3
from grpo_lab.learner import Learner
from grpo_lab.offline.header import Header, PoolError
from grpo_lab.sync import first_log_ratios
from grpo_lab.types import Group
from grpo_lab.weights import cast, fingerprint


def weights_hash(learner: Learner) -> str:
    """The fingerprint of the learner's weights in float32. On every rank."""
    return fingerprint(cast(learner.weights(), torch.float32))


def prove_pool(
    learner: Learner,
    header: Header,
    sample: Sequence[Group],
    *,
    tolerance: float,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Score the first response of each group of `sample`, on every rank, before any update.

    Weights equal to the sampler's must give its log-probs, up to rounding; `tolerance` is what this run's own sampler
    is granted, in nats a token. With other weights the pool is off-policy from the start, and how far is reported.

    Raises:
        PoolError: equal weights, other log-probs.
    """
    ratios = first_log_ratios(learner, sample)
    drift, tokens = float(np.abs(ratios).mean()), len(ratios)
    if header.sampler.weights != weights_hash(learner):
        known = (
            "by other weights than this run begins with" if header.sampler.weights else "by weights it does not name"
        )
        warn(
            f"the pool was sampled {known}: K3 is {float(k3(ratios).mean()):.3g} nats a token before the first update, "
            f"on {tokens} tokens"
        )
        return
    allowed = max(tolerance, header.sampler.tolerance)
    if not drift <= allowed:
        raise PoolError(
            f"the pool's log-probs are not those of its sampler: scored by the same weights, {tokens} tokens differ by "
            f"{drift:.3g} nats each (tolerance {allowed:.3g}); check learner.precision and rollout.temperature, or "
            "make the pool again"
        )
    say(f"the pool is of this run's initial weights: {tokens} of its tokens, scored again, differ by {drift:.2g} nats")
