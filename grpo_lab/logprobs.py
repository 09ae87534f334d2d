"""Logits to log-probabilities at a temperature, entropy, and masked sums. The one place that does each.

The learner, the reference, the embedded sampler and the check of a foreign sampler all come through `powers`, so that
the ratio of two of them is a ratio of the same quantity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def powers(logits: Tensor, temperature: float, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The distribution [..., V] sampled from at `temperature` > 0, before it is normalised; float32 or wider.

    Returns the logits over the temperature less their maximum, `shifted` [..., V]; exp of it [..., V]; and the sum of
    that [..., 1]. A log-prob in nats is `shifted - log(sum)`. `overwrite`: `shifted` may take the place of `logits`,
    which nobody else reads; there is no gradient then.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    place = wide if overwrite else None
    if temperature != 1:
        wide = torch.div(wide, temperature, out=place)
    shifted = torch.sub(wide, wide.amax(-1, keepdim=True), out=place)
    exponentials = shifted.exp()
    return shifted, exponentials, exponentials.sum(-1, keepdim=True)


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """All log-probabilities in nats of the distribution sampled from at `temperature` > 0; float32 or wider."""
    shifted, _, total = powers(logits, temperature)
    return shifted - total.log()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with what the mask hides replaced by 0, so that NaN behind it stays there (NaN * 0 is NaN)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the tokens of each response: [B, T] to [B]."""
    return masked(values, mask).sum(-1)


def _cast_head(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class _SelectedLogprobs(torch.autograd.Function):
    """Log-probs of chosen tokens, a chunk of rows at a time in both directions: [chunk, V] is all that is ever held.

    What the last chunk came to is kept for the backward pass, which begins right after the forward pass, with it; the
    others are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        selected = torch.empty(len(tokens), dtype=wide, device=hidden.device)
        entropies = torch.empty_like(selected)
        head = _cast_head(weight, bias, hidden.dtype)
        ctx.kept = None
        for start in range(0, len(tokens), chunk):
            # Before this chunk's are made.
            ctx.kept = None
            rows = slice(start, start + chunk)
            shifted, exponentials, total = powers(
                torch.nn.functional.linear(hidden[rows], *head), temperature, overwrite=True
            )
            log_total = total.log().squeeze(-1)
            selected[rows] = shifted.gather(-1, tokens[rows, None]).squeeze(-1) - log_total
            # -sum p log p; an entry of probability 0 is 0 times minus infinity, and adds 0.
            entropies[rows] = log_total - shifted.mul_(exponentials).nansum(-1) / total.squeeze(-1)
            ctx.kept = exponentials, total
            del shifted, exponentials
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.temperature, ctx.chunk = temperature, chunk
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
        for start in reversed(range(0, len(tokens), ctx.chunk)):
            rows = slice(start, start + ctx.chunk)
            # Used up below: a second backward pass computes them again.
            kept, ctx.kept = ctx.kept, None
            if kept is None:
                logits = torch.nn.functional.linear(hidden[rows], *head)
                kept = powers(logits, ctx.temperature, overwrite=True)[1:]
                del logits
            exponentials, total = kept
            # d log p_k / d logits = (onehot_k - p) / temperature
            scale = grad_selected[rows, None] / ctx.temperature
            grad_logits = exponentials.mul_(-scale / total)
            grad_logits.scatter_add_(-1, tokens[rows, None], scale)
            narrow = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = narrow @ head[0]
            if narrow.dtype == wide:
                grad_weight.addmm_(narrow.T, hidden[rows])
            else:
                grad_weight += narrow.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            del kept, exponentials, grad_logits, narrow
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
