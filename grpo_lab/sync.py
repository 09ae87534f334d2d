"""Handing the learner's weights to the rollout engine, and the proof that they arrived.

Two checks. (1) A hash of each weight's name, shape, type and bytes on both sides, as the engine holds it or as it
arrived there: it sees any weight that differs, but not what the engine computes with it (a stale packed copy, a stale
prefix cache).
(2) A few responses just sampled are scored by the learner: it sees what the engine computes, but only as far as
rounding lets it, so that in low precision a small step can hide below the tolerance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_lab.diagnostics import log_ratios
from grpo_lab.learner import Learner
from grpo_lab.minibatches import make_minibatch
from grpo_lab.rollout import RolloutEngine
from grpo_lab.types import Group
from grpo_lab.weights import Weights, cast, combine, hashed

# Enough for a mean, of several problems, and little beside the tokens of a collection.
PROOF_TOKENS = 64
PROOF_RESPONSES = 8


class SyncError(RuntimeError):
    """The engine does not hold, or does not compute with, the weights it was given."""


def hand_over(engine: RolloutEngine, weights: Weights, *, version: int) -> str | None:
    """Give the engine these weights, as a stream, and compare digests weight by weight where it reads them back.

    Returns the hash of all, or None where there was nothing to compare.

    Raises:
        SyncError: the engine's weights are other than those handed over.
    """
    stream, given = cast(weights, engine.dtype), dict[str, str]()
    if engine.reads_back:
        stream = hashed(stream, given)
    engine.load_weights(stream, version=version)
    # An engine that stopped early: what it left out counts as given, and other ranks wait for the stream's end.
    deque(stream, maxlen=0)
    held = engine.digests()
    if held is None:
        return None
    if held != given:
        wrong = sorted(name for name in given.keys() | held.keys() if given.get(name) != held.get(name))
        raise SyncError(
            f"weights of version {version} did not arrive: {len(wrong)} of {len(given)} differ in the engine, the "
            f"first is {wrong[0]}; restart the run from its last checkpoint (resume=)"
        )
    return combine(given)


def prove_by_scoring(learner: Learner, engine: RolloutEngine, groups: Sequence[Group]) -> float:
    """Mean |learner - behaviour log-prob| in nats per token of groups sampled since the sync, by equal weights.

    As many groups as it takes for PROOF_RESPONSES responses of PROOF_TOKENS tokens are scored.

    Raises:
        SyncError: it is over the engine's tolerance.
    """
    tokens = np.cumsum([len(group.rollouts[0].token_ids) for group in groups])
    enough = groups[: max(int(np.searchsorted(tokens, PROOF_TOKENS)) + 1, PROOF_RESPONSES)]
    drift = float(np.abs(first_log_ratios(learner, enough)).mean())
    if not drift <= engine.drift_tolerance:
        raise SyncError(
            f"the engine does not sample from version {engine.policy_version}: scored by the learner, its own "
            f"responses differ by {drift:.3g} nats a token (tolerance {engine.drift_tolerance:.3g}); restart the run "
            "from its last checkpoint (resume=), and check that both sides use one precision and temperature"
        )
    return drift


def first_log_ratios(learner: Learner, groups: Sequence[Group]) -> np.ndarray:
    """lambda of every token of the first response of each group, [T] float64: a prompt's keys are the same for all of
    its responses."""
    firsts = [
        replace(group, rollouts=group.rollouts[:1], rewards=group.rewards[:1], verdicts=group.verdicts[:1])
        for group in groups
    ]
    sample = make_minibatch(0, firsts, mask_zero_variance=False, mask_divisor="all")
    return np.concatenate(log_ratios(sample, learner.logprobs(sample)))
