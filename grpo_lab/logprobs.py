"""Logits to log-probabilities at a temperature, entropy, and masked sums. The one place that does each.

The learner, the reference, the embedded sampler and the check of a foreign sampler all come through `log_softmax`, so
that the ratio of two of them is a ratio of the same quantity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities in nats of the distribution sampled from at `temperature` > 0; float32 or wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperature, dim=-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Exact entropy in nats over the last dimension; an entry of probability 0 adds 0."""
    return -torch.where(log_probs.isfinite(), log_probs.exp() * log_probs, 0.0).sum(-1)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with what the mask hides replaced by 0, so that NaN behind it stays there (NaN * 0 is NaN)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the tokens of each response: [B, T] to [B]."""
    return masked(values, mask).sum(-1)


def _cast_head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class _SelectedLogprobs(torch.autograd.Function):
    """Log-probs of chosen tokens, a chunk of rows at a time in both directions: [chunk, V] is all that is ever held."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.temperature, ctx.chunk = temperature, chunk
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        selected = torch.empty(len(tokens), dtype=wide, device=hidden.device)
        entropies = torch.empty_like(selected)
        head = _cast_head(weight, bias, hidden.dtype)
        for start in range(0, len(tokens), chunk):
            rows = slice(start, start + chunk)
            log_probs = log_softmax(torch.nn.functional.linear(hidden[rows], *head), temperature)
            selected[rows] = log_probs.gather(-1, tokens[rows, None]).squeeze(-1)
            entropies[rows] = entropy(log_probs)
        ctx.mark_non_differentiable(entropies)
        return selected, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens = ctx.saved_tensors
        grad_selected = gradients[0]
        assert grad_selected is not None
        head = _cast_head(weight, bias, hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks are wide: a BF16 sum would swallow small chunks.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for start in range(0, len(tokens), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_probs = log_softmax(torch.nn.functional.linear(hidden[rows], *head), ctx.temperature)
            # d log p_k / d logits = (onehot_k - p) / temperature
            scale = grad_selected[rows, None] / ctx.temperature
            grad_logits = log_probs.exp_().mul_(-scale)
            grad_logits.scatter_add_(-1, tokens[rows, None], scale)
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = narrow @ head[0]
            grad_weight += narrow.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        narrow_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), narrow_bias, None, None, None


def selected_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of `tokens` and the entropy of each distribution, both [N], from hidden states [N, H].

    `weight` [V, H] and `bias` [V] are the output head. Exact in value and gradient; logits exist for `chunk` rows at a
    time, forward and backward. The entropy carries no gradient.
    """
    selected, entropies = _SelectedLogprobs.apply(hidden, weight, bias, tokens, temperature, chunk)
    return selected, entropies
