"""Handing the learner's weights to the rollout engine, and the proof that they arrived.

Two checks. (1) A hash of names, shapes, types and bytes on both sides, where the engine can read its weights back: it
sees any weight that differs, but not what the engine computes with them (a stale packed copy, a stale prefix cache).
(2) A few responses just sampled are scored by the learner: it sees what the engine computes, but only as far as
rounding lets it, so that in low precision a small step can hide below the tolerance.
"""

from __future__ import annotations

import numpy as np

from grpo_lab.diagnostics import log_ratios
from grpo_lab.learner import Learner
from grpo_lab.minibatches import Minibatch
from grpo_lab.rollout import RolloutEngine, Weights
from grpo_lab.weights import fingerprint


class SyncError(RuntimeError):
    """The engine does not hold, or does not compute with, the weights it was given."""


def hand_over(engine: RolloutEngine, weights: Weights, *, version: int) -> str:
    """Give the engine these weights and compare hashes. Returns the hash.

    Raises:
        SyncError: the engine's weights are other than those handed over.
    """
    given = dict(weights)
    engine.load_weights(given.items(), version=version)
    expected, held = fingerprint(given.items()), engine.fingerprint()
    if held is not None and held != expected:
        raise SyncError(
            f"weights of version {version} did not arrive: the learner's hash is {expected}, the engine's {held}; "
            "restart the run from its last checkpoint (resume=)"
        )
    return expected


def prove_by_scoring(learner: Learner, engine: RolloutEngine, sample: Minibatch) -> float:
    """Mean |learner - behaviour log-prob| in nats per token of responses sampled since the sync, by equal weights.

    Raises:
        SyncError: it is over the engine's tolerance.
    """
    tokens = np.concatenate(log_ratios(sample, learner.logprobs(sample)))
    drift = float(np.abs(tokens).mean())
    if not drift <= engine.drift_tolerance:
        raise SyncError(
            f"the engine does not sample from version {engine.policy_version}: scored by the learner, its own "
            f"responses differ by {drift:.3g} nats a token (tolerance {engine.drift_tolerance:.3g}); restart the run "
            "from its last checkpoint (resume=), and check that both sides use one precision and temperature"
        )
    return drift
