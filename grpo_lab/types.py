"""The records that pass between stages. Nothing here computes; nothing here imports torch.

Suffixes used throughout the package for nesting and shape: B responses of a (micro-)batch, G groups, m members of
a group, T response tokens, L tokens of a packed row, V vocabulary. `B = G * m` where groups are whole, rows of one
group side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from grpo_lab.metrics import Metric

FinishReason = Literal["stop", "length"]
Verdict = Literal["correct", "wrong", "unparsed", "timeout", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row of a data set, before a tokenizer has seen it.

    `id` is stable across runs and machines (a hash of the question), `gold` the reference answer as text,
    `tolerance` an absolute error bound where the data set states one, `solution` a worked answer where there is one
    (the made task's scratchpad; used for supervised warm starts only).
    """

    id: str
    question: str
    gold: str
    tolerance: float | None = None
    solution: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A problem as the model sees it: `text` after the template, `token_ids` of exactly that text."""

    problem: Problem
    text: str
    token_ids: tuple[int, ...]

    @property
    def id(self) -> str:
        return self.problem.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` are off."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sampled response.

    `token_ids` [T] int32 and `behaviour_logprobs` [T] float32 (nats, of the distribution sampled from) have the same
    length; the first EOS is the last token if `finish_reason` is "stop", and there is no EOS if it is "length".
    `policy_version` is the update counter of the weights that sampled it.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the verifier says of one response, and the answer it read in it (None where it found none)."""

    verdict: Verdict
    extracted: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The m responses to one prompt with their rewards. `sequence` counts groups in the order they were drawn."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float, ...]
    verdicts: tuple[Verdict, ...]
    sequence: int

    @property
    def is_mixed(self) -> bool:
        """Whether the rewards differ: decided on the rewards themselves, never on a rounded spread."""
        return max(self.rewards) > min(self.rewards)

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The divisors of one optimizer update: over the whole minibatch, all micro-batches and all ranks.

    `tokens` is T_tok = G m l_bar, `responses` is G m, `groups` is G. With `mask_divisor=kept` the zero-variance
    groups are left out of all three.
    """

    tokens: int
    responses: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch, as an objective sees it.

    logprobs            [B, T] nats, policy being trained; the only field that carries a gradient
    behaviour_logprobs  [B, T] nats, recorded when the response was sampled
    ref_logprobs        [B, T] nats, active reference; None where the objective needs none
    old_logprobs        [B, T] nats, the learner at the start of the block (GRPO+TIS) or of the minibatch
                        (clip_center=pi_k); None otherwise
    loss_mask           [B, T] bool, True on generated tokens through the first EOS
    rewards             [B]
    group_weights       [B] 1, or 0 for the responses of a masked zero-variance group
    response_weights    [B] detached per-response weights worked out beforehand, or None: then rows come in whole
                        groups of `group_size`, side by side, and the objective works them out itself
    counts              divisors over the whole minibatch

    Values behind the mask may be anything, NaN included.
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    ref_logprobs: Tensor | None
    old_logprobs: Tensor | None
    loss_mask: Tensor
    rewards: Tensor
    group_weights: Tensor
    response_weights: Tensor | None
    group_size: int
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """`loss` adds up over micro-batches to the minibatch's loss; `metrics` merge to the minibatch's metrics."""

    loss: Tensor
    metrics: dict[str, Metric]
