"""The losses: GRPO (with TIS), AGRO and GGPO as pure functions of tensors, and the table that says what each needs.

A loss sums over its micro-batch and divides by counts given from outside (`LossInputs.counts`), so that any split over
micro-batches or ranks has the same gradient. All three have one coefficient per response that depends on its whole
group. Where the rows are whole groups the loss works it out; where a group had to be split, `response_weights` is
worked out from a pass without gradient and given to the loss, with the same gradient.

What is not differentiated: rewards, behaviour, old and reference log-probs, advantages, and in AGRO the whole
advantage, the current policy's log ratio included. GGPO's loss is differentiated itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from grpo_lab.config import AgroConfig, GgpoConfig, GrpoConfig, ObjectiveConfig
from grpo_lab.logprobs import masked, masked_sum
from grpo_lab.metrics import Histogram, Mean, Metric
from grpo_lab.types import LossInputs, LossOutput

GG_STD_EPS = 1e-6
# RG states no value for the epsilon of its Eq. 2; ours.
RG_VAR_EPS = 1e-4
VERL_MAX_LOG_RATIO = 20.0
VERL_MAX_K3 = 10.0
# Of a logged distribution over groups.
BINS = 64

GroupFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss and what the pipeline must provide for it. The pipeline reads these fields and never the name.

    loss              whole groups, or rows with `response_weights`, to a scalar
    response_weights  (rewards [G, m], log_ratio [G, m]) to detached weights [G, m]; `log_ratio` as `log_ratio` gives it
    log_ratio         (logprobs, ref_logprobs, mask) to [B]; None where the weights depend on rewards alone
    group_metrics     (rewards [G, m], log_ratio [G, m]) to metrics of the group weights; None where there are none
    needs_reference   whether `ref_logprobs` is read
    old_policy        which earlier scores the loss divides by: none, those at the minibatch's first pass, or those at
                      the start of a block of `block` updates
    """

    name: str
    loss: Callable[[LossInputs], LossOutput]
    response_weights: GroupFunction
    log_ratio: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    group_metrics: Callable[[Tensor, Tensor], dict[str, Metric]] | None = None
    needs_reference: bool
    old_policy: Literal["none", "minibatch", "block"] = "none"
    block: int | None = None


# --- GRPO -------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, rule: str) -> Tensor:
    """Group-relative advantages [G, m] of rewards [G, m], without gradient.

    `gg` (GG C.2): (r - mean) / (std_{ddof=1} + 1e-6). `rg` (RG Eq. 2): (r - mean) / sqrt(var_{ddof=0} + 1e-4).
    `centred`: r - mean. A group of equal rewards has advantage exactly 0.
    """
    centred = rewards - rewards.mean(-1, keepdim=True)
    # The mean of equal numbers may differ from them in the last bit, and a tiny spread would be blown up to 1.
    centred = torch.where((rewards == rewards[:, :1]).all(-1, keepdim=True), torch.zeros_like(centred), centred)
    if rule == "gg":
        return centred / (rewards.std(-1, correction=1, keepdim=True) + GG_STD_EPS)
    if rule == "rg":
        return centred / (rewards.var(-1, correction=0, keepdim=True) + RG_VAR_EPS).sqrt()
    assert rule == "centred", rule
    return centred


def grpo_loss(
    inputs: LossInputs,
    *,
    advantage: str,
    clip_center: str,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
    beta: float,
    kl_clamp: str,
    aggregation: str,
    max_response_tokens: int,
    tis_cap: float | None,
) -> LossOutput:
    """GRPO: minus the clipped surrogate, plus beta times K3 to the reference (RG Eqs. 2-8; GG C.2; TIS: GG Eq. 61).

    rho_t = exp(logprobs - denominator), where the denominator is the behaviour policy, or pi_old under TIS.
    Surrogate: min(rho A, clip(rho, max(rho' - eps_low, 0), rho' + eps_high) A), with rho' = 1 (`clip_center=one`) or
    pi_k / behaviour (`pi_k`, RG Eq. 6); for A < 0 at least `dual_clip` * A. Under TIS each token's surrogate is
    multiplied by min(pi_old / behaviour, tis_cap).
    Aggregation: `token_mean` over T_tok, `sequence_mean` over responses of the per-response token mean,
    `constant_length` over responses x max_response_tokens. The KL term uses the same.
    """
    mask = inputs.loss_mask
    weights = _weights(inputs, partial(_advantages_of_rewards, rule=advantage))
    a = weights[:, None].expand_as(inputs.logprobs)
    denominator, center, tis = _ratio_parts(inputs, clip_center=clip_center, tis_cap=tis_cap)
    log_rho = masked(inputs.logprobs - denominator, mask)
    surrogate, clipped = _clipped_surrogate(log_rho, a, center, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)
    metrics: dict[str, Metric] = {f"clip/{side}": _token_share(hit, mask) for side, hit in clipped.items()}
    per_token = -surrogate
    if tis is not None:
        per_token = per_token * tis
        assert tis_cap is not None
        metrics["tis/weight"] = _token_mean(tis, mask)
        metrics["tis/capped"] = _token_share(tis >= tis_cap, mask)
    if beta:
        assert inputs.ref_logprobs is not None, "the KL term needs reference log-probs"
        k3, clamped = _k3_to_reference(masked(inputs.ref_logprobs - inputs.logprobs, mask), kl_clamp)
        per_token = per_token + beta * k3
        metrics["kl/reference"] = _token_mean(k3.detach(), mask)
        metrics["kl/clamped"] = _token_share(clamped, mask)
    per_token = per_token * inputs.group_weights[:, None]
    return LossOutput(loss=_aggregate(per_token, inputs, aggregation, max_response_tokens), metrics=metrics)


def _advantages_of_rewards(rewards: Tensor, _log_ratio: Tensor, *, rule: str) -> Tensor:
    return group_advantages(rewards, rule)


def _ratio_parts(
    inputs: LossInputs, *, clip_center: str, tis_cap: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The ratio's denominator [B, T], the clip's centre rho' [B, T], and the TIS weights [B, T] or None."""
    behaviour, mask = inputs.behaviour_logprobs, inputs.loss_mask
    one = torch.ones_like(behaviour)
    if tis_cap is not None:
        assert inputs.old_logprobs is not None, "TIS needs the scores of the policy at the start of the block"
        # Capped after the exponential: exp(log(cap)) may fall short of the cap, which would then count as not reached.
        weight = masked(inputs.old_logprobs - behaviour, mask).exp().clamp(max=tis_cap)
        return inputs.old_logprobs, one, weight
    if clip_center == "pi_k":
        assert inputs.old_logprobs is not None, "clip_center=pi_k needs the scores at the minibatch's first pass"
        return behaviour, masked(inputs.old_logprobs - behaviour, mask).exp(), None
    return behaviour, one, None


def _clipped_surrogate(
    log_rho: Tensor, a: Tensor, center: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate [B, T] and which tokens have no gradient, by side."""
    low, high = (center - eps_low).clamp(min=0), center + eps_high
    rho = log_rho.detach().exp()
    hits = {
        "low": (a < 0) & (rho < low),
        "high": (a > 0) & (rho > high),
        "dual": (a < 0) & (rho > dual_clip) if dual_clip is not None else torch.zeros_like(a, dtype=torch.bool),
    }
    # A token of advantage 0 is flat as well, however large its ratio; a ratio that is NaN is not covered up.
    flat = hits["low"] | hits["high"] | hits["dual"] | ((a == 0) & ~rho.isnan())
    bound = torch.where(hits["low"], low, torch.where(hits["high"], high, dual_clip or 1.0))
    # The exponential is taken only where it has a gradient: elsewhere it may overflow, and 0 * inf is NaN backward.
    live = torch.where(flat, torch.zeros_like(log_rho), log_rho).exp()
    return torch.where(flat, bound, live) * a, hits


def _k3_to_reference(d: Tensor, clamp: str) -> tuple[Tensor, Tensor]:
    """K3 = exp(d) - d - 1 with d = ref - current, and where a clamp acted (verl: d to +-20, K3 to +-10)."""
    if clamp == "none":
        return torch.expm1(d) - d, torch.zeros_like(d, dtype=torch.bool)
    bounded = d.clamp(-VERL_MAX_LOG_RATIO, VERL_MAX_LOG_RATIO)
    k3 = torch.expm1(bounded) - bounded
    return k3.clamp(max=VERL_MAX_K3), (d != bounded) | (k3.detach() > VERL_MAX_K3)


def _aggregate(per_token: Tensor, inputs: LossInputs, aggregation: str, max_response_tokens: int) -> Tensor:
    per_response = masked_sum(per_token, inputs.loss_mask)
    if aggregation == "token_mean":
        return per_response.sum() / max(inputs.counts.tokens, 1)
    if aggregation == "sequence_mean":
        lengths = inputs.loss_mask.sum(-1).clamp(min=1)
        return (per_response / lengths).sum() / max(inputs.counts.responses, 1)
    assert aggregation == "constant_length", aggregation
    return per_response.sum() / max(inputs.counts.responses * max_response_tokens, 1)


# --- AGRO and GGPO ----------------------------------------------------------------------------------------------


def sequence_log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """s - s_ref: [B, T] to [B] nats, summed in float64 (beta divides it, which enlarges its rounding)."""
    return masked_sum(logprobs.double() - ref_logprobs.double(), mask)


def clipped_sequence_log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, token_clip: float) -> Tensor:
    """The same with every token's log ratio clipped to +-token_clip first (GG Eq. 12)."""
    ratio = logprobs.double() - ref_logprobs.double()
    return masked_sum(ratio.clamp(-token_clip, token_clip), mask)


def _no_log_ratio(logprobs: Tensor, _ref_logprobs: Tensor, _mask: Tensor) -> Tensor:
    return torch.zeros(len(logprobs), dtype=torch.float64, device=logprobs.device)


def agro_advantages(rewards: Tensor, log_ratio: Tensor, *, beta: float) -> Tensor:
    """Leave-one-out centred adjusted rewards [G, m]: a_i = m/(m-1) (z_i - mean z), z = r - beta (s - s_ref)."""
    z = rewards.double() - beta * log_ratio
    m = z.shape[-1]
    return (z - z.mean(-1, keepdim=True)) * (m / (m - 1))


def agro_loss(inputs: LossInputs, *, beta: float) -> LossOutput:
    """AGRO (GG Eq. 62): -1/T_tok sum_i sg(a_i) s_i. The stop-gradient covers the log ratio in a_i.

    Its gradient is exactly that of mean_g[Var_{ddof=1}(R)/2] / (beta l_bar).
    """
    return _weighted_score_loss(inputs, partial(agro_advantages, beta=beta), sequence_log_ratio)


def adjusted_rewards(rewards: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """R / beta of each response, centred within its group: [G, m], float64.

    Centred, since the loss and q depend on differences alone and R / beta grows with length.
    """
    scaled = rewards.double() / beta - log_ratio
    return scaled - scaled.mean(-1, keepdim=True)


def gibbs_gap(rewards: Tensor, log_ratio: Tensor, beta: float) -> Tensor:
    """J_g / beta = log(mean_i exp(R_i / beta)) - mean_i R_i / beta, [G] (GG Eq. 6). At least 0; 0 iff all R agree."""
    return torch.logsumexp(adjusted_rewards(rewards, log_ratio, beta), -1) - math.log(rewards.shape[-1])


def ggpo_coefficients(rewards: Tensor, log_ratio: Tensor, *, beta: float) -> Tensor:
    """c_i = m (q_i - 1/m) / sqrt(m - 1) with q = softmax(R / beta), detached: [G, m] (GG Eq. 29)."""
    m = rewards.shape[-1]
    q = torch.softmax(adjusted_rewards(rewards, log_ratio, beta).detach(), -1)
    return (m * q - 1) / math.sqrt(m - 1)


def ggpo_loss(inputs: LossInputs, *, beta: float) -> LossOutput:
    """GGPO (GG Eq. 11): mean_g J_g / (beta l_bar sqrt(m - 1)), differentiated through the log-mean-exp itself.

    With `response_weights` (a split group): -1/T_tok sum_i sg(c_i) s_i, which has the same gradient (Eq. 29); the
    value is then not the gap, which `loss/raw` reports in either case.
    """
    if inputs.response_weights is not None:
        return _weighted_score_loss(inputs, partial(ggpo_coefficients, beta=beta), sequence_log_ratio)
    assert inputs.ref_logprobs is not None, "GGPO needs reference log-probs"
    log_ratio = sequence_log_ratio(inputs.logprobs, inputs.ref_logprobs, inputs.loss_mask)
    gaps = gibbs_gap(_by_group(inputs.rewards, inputs.group_size), _by_group(log_ratio, inputs.group_size), beta)
    kept = _by_group(inputs.group_weights, inputs.group_size)[:, 0]
    # counts.groups * l_bar = T_tok / m
    divisor = max(inputs.counts.tokens, 1) / inputs.group_size * math.sqrt(inputs.group_size - 1)
    return LossOutput(loss=(gaps * kept).sum() / divisor, metrics={})


def ggpo_clip_loss(inputs: LossInputs, *, beta: float, token_clip: float) -> LossOutput:
    """GGPO with token clipping (GG Eqs. 63-65): coefficients from clipped log ratios, detached; the score of a
    saturated token keeps its gradient. Without saturation the gradient is GGPO's."""
    output = _weighted_score_loss(
        inputs, partial(ggpo_coefficients, beta=beta), partial(clipped_sequence_log_ratio, token_clip=token_clip)
    )
    assert inputs.ref_logprobs is not None
    saturated = (inputs.logprobs - inputs.ref_logprobs).detach().abs() > token_clip
    return LossOutput(loss=output.loss, metrics={"clip/token": _token_share(saturated, inputs.loss_mask)})


def ggpo_reward_only_loss(inputs: LossInputs, *, beta: float) -> LossOutput:
    """GGPO's coefficients from q = softmax(r / beta) (GG D.6): no reference."""
    return _weighted_score_loss(inputs, partial(ggpo_coefficients, beta=beta), None)


def ggpo_group_metrics(rewards: Tensor, log_ratio: Tensor, *, beta: float) -> dict[str, Metric]:
    """Group-weight ESS 1/sum q^2, within-success ESS [k sum q~^2]^-1 over groups with k >= 2, their share, and J."""
    m = rewards.shape[-1]
    q = torch.softmax(adjusted_rewards(rewards, log_ratio, beta), -1)
    gaps = beta * gibbs_gap(rewards, log_ratio, beta)
    # Success is the group's best reward, which for binary rewards is 1; a group of zeros has none.
    best = rewards.max(-1, keepdim=True).values
    success = (rewards == best) & (best > 0)
    k = success.sum(-1)
    inside = torch.where(success, q, torch.zeros_like(q))
    inside = inside / inside.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    within = 1 / (k * inside.square().sum(-1)).clamp(min=torch.finfo(q.dtype).tiny)
    at_least_two = k >= 2
    return {
        "group/weight_ess": _histogram((1 / q.square().sum(-1)).tolist(), 1.0, float(m)),
        "group/within_success_ess": _histogram(within[at_least_two].tolist(), 0.0, 1.0),
        "group/within_success_ess_mean": Mean(float(within[at_least_two].sum()), int(at_least_two.sum())),
        "group/share_k2": Mean(float(at_least_two.sum()), len(k)),
        "loss/raw": Mean(float(gaps.sum()), len(gaps)),
    }


def _histogram(values: list[float], low: float, high: float) -> Histogram:
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64)
    # The upper end belongs to the last inner bin: an ESS of exactly m is no overflow.
    index = torch.bucketize(torch.tensor(values, dtype=torch.float64).clamp(max=high - 1e-12), edges, right=True)
    return Histogram(tuple(edges.tolist()), tuple(torch.bincount(index, minlength=BINS + 2).tolist()))


def _weighted_score_loss(
    inputs: LossInputs, weights_of: GroupFunction, log_ratio_of: Callable[[Tensor, Tensor, Tensor], Tensor] | None
) -> LossOutput:
    """-1/T_tok sum_i sg(w_i) s_i: the score-function form that AGRO and GGPO's variants share."""
    if inputs.response_weights is None:
        detached = inputs.logprobs.detach()
        if log_ratio_of is None:
            log_ratio = _no_log_ratio(detached, detached, inputs.loss_mask)
        else:
            assert inputs.ref_logprobs is not None, "this objective needs reference log-probs"
            log_ratio = log_ratio_of(detached, inputs.ref_logprobs, inputs.loss_mask)
        grouped = weights_of(_by_group(inputs.rewards, inputs.group_size), _by_group(log_ratio, inputs.group_size))
        weights = grouped.reshape(-1)
    else:
        weights = inputs.response_weights
    scores = masked_sum(inputs.logprobs, inputs.loss_mask)
    weights = (weights * inputs.group_weights).to(scores.dtype)
    return LossOutput(loss=-(weights * scores).sum() / max(inputs.counts.tokens, 1), metrics={})


# --- shared -----------------------------------------------------------------------------------------------------


def _by_group(values: Tensor, group_size: int) -> Tensor:
    return values.reshape(-1, group_size)


def _weights(inputs: LossInputs, weights_of: GroupFunction) -> Tensor:
    """[B] per-response weights in the log-probs' dtype: those given, or worked out from whole groups' rewards."""
    if inputs.response_weights is not None:
        return inputs.response_weights.to(inputs.logprobs.dtype)
    rewards = _by_group(inputs.rewards.to(inputs.logprobs.dtype), inputs.group_size)
    return weights_of(rewards, torch.zeros_like(rewards)).reshape(-1)


def _token_share(hit: Tensor, mask: Tensor) -> Mean:
    return Mean(float((hit & mask).sum()), float(mask.sum()))


def _token_mean(values: Tensor, mask: Tensor) -> Mean:
    return Mean(float(masked_sum(values.double(), mask).sum()), float(mask.sum()))


def build_objective(config: ObjectiveConfig, *, max_response_tokens: int) -> Objective:
    """Bind an objective's numbers once; nothing downstream reads its configuration again."""
    if isinstance(config, GrpoConfig):
        return _build_grpo(config, max_response_tokens)
    if isinstance(config, AgroConfig):
        return Objective(
            name=config.name,
            loss=partial(agro_loss, beta=config.beta),
            response_weights=partial(agro_advantages, beta=config.beta),
            log_ratio=sequence_log_ratio,
            needs_reference=config.reads_reference,
        )
    assert isinstance(config, GgpoConfig), config
    return _build_ggpo(config)


def _build_grpo(config: GrpoConfig, max_response_tokens: int) -> Objective:
    old_policy: Literal["none", "minibatch", "block"] = "none"
    if config.tis_block is not None:
        old_policy = "block"
    elif config.clip_center == "pi_k":
        old_policy = "minibatch"
    return Objective(
        name=config.name,
        loss=partial(
            grpo_loss,
            advantage=config.advantage,
            clip_center=config.clip_center,
            eps_low=config.eps_low,
            eps_high=config.eps_high,
            dual_clip=config.dual_clip,
            beta=config.beta,
            kl_clamp=config.kl_clamp,
            aggregation=config.aggregation,
            max_response_tokens=max_response_tokens,
            tis_cap=config.tis_cap,
        ),
        response_weights=partial(_advantages_of_rewards, rule=config.advantage),
        needs_reference=config.reads_reference,
        old_policy=old_policy,
        block=config.tis_block,
    )


def _build_ggpo(config: GgpoConfig) -> Objective:
    beta = config.beta
    coefficients, metrics = partial(ggpo_coefficients, beta=beta), partial(ggpo_group_metrics, beta=beta)
    if config.reward_only:
        return Objective(
            name=config.name,
            loss=partial(ggpo_reward_only_loss, beta=beta),
            response_weights=coefficients,
            group_metrics=metrics,
            needs_reference=config.reads_reference,
        )
    clip = config.token_clip
    return Objective(
        name=config.name,
        loss=partial(ggpo_loss, beta=beta) if clip is None else partial(ggpo_clip_loss, beta=beta, token_clip=clip),
        response_weights=coefficients,
        log_ratio=sequence_log_ratio if clip is None else partial(clipped_sequence_log_ratio, token_clip=clip),
        group_metrics=metrics,
        needs_reference=config.reads_reference,
    )
