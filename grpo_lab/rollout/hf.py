"""The embedded sampler: a transformers model, batched, with a key-value cache.

A prompt is prefilled once for its whole group. Rows that have finished leave the batch. Every response draws from a
random stream of its own, keyed by its seed and read by position, so what it draws does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_lab.logprobs import log_softmax, powers
from grpo_lab.policy import compute_precision, end_tokens, load_model, load_tokenizer
from grpo_lab.rollout import DRIFT_TOLERANCE, EngineError
from grpo_lab.rollout.decoding import make_decoder
from grpo_lab.types import FinishReason, Prompt, Rollout, Sampling
from grpo_lab.weights import Weights, digest

# Finished rows are cut out of the cache once they are this share of the batch: each cut copies the cache.
COMPACT_SHARE = 0.125
# Uniform numbers are drawn for this many positions at a time.
UNIFORM_BLOCK = 64
VOCABULARY_BLOCK = 128


@dataclass
class _Streams:
    """One uniform stream per response: block b of stream s is Philox(key=[s, b])."""

    seeds: np.ndarray
    blocks: dict[int, np.ndarray] = field(default_factory=dict)

    def at(self, step: int, rows: np.ndarray) -> np.ndarray:
        block, offset = divmod(step, UNIFORM_BLOCK)
        if block not in self.blocks:
            self.blocks = {block: np.stack([self._block(int(seed), block) for seed in self.seeds])}
        return self.blocks[block][rows, offset]

    @staticmethod
    def _block(seed: int, block: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[seed, block])).random(UNIFORM_BLOCK)


@dataclass
class _Batch:
    """The rows being sampled side by side: what is fixed, and what has been drawn so far."""

    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray


class HfEngine:
    """See the module. `max_rows` bounds the rows sampled side by side.

    `borrows`: tensors that are handed over are sampled from as they are, without a copy. Whoever gives them changes
    them only once nothing more is to be sampled before the next ones come.
    """

    reads_back = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_rows: int,
        autocast: torch.dtype | None = None,
        borrows: bool = False,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.borrows = borrows
        self.autocast = autocast
        self.drift_tolerance = DRIFT_TOLERANCE["fp32" if autocast is None else "bf16"]
        self.policy_version = 0
        self._closed = False
        # Under autocast as well: parameters stay wide.
        self.dtype = torch.float32
        self.end_tokens = end_tokens(model, tokenizer)
        self.device = next(model.parameters()).device

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        max_rows: int,
        revision: str | None = None,
        device: str = "cpu",
        autocast: torch.dtype | None = None,
        borrows: bool = False,
    ) -> HfEngine:
        model = load_model(folder, revision=revision).to(device)
        tokenizer = load_tokenizer(folder, revision=revision)
        return cls(model, tokenizer, max_rows=max_rows, autocast=autocast, borrows=borrows)

    def load_weights(self, weights: Weights, *, version: int) -> None:
        held = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(held)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in held:
                    raise ValueError(f"weights of version {version} do not fit the sampler: it has no {name}")
                if tensor.shape != held[name].shape:
                    raise ValueError(
                        f"weights of version {version} do not fit the sampler: {name} has shape "
                        f"{tuple(tensor.shape)}, the sampler's has {tuple(held[name].shape)}"
                    )
                if self.borrows:
                    held[name].data = tensor
                else:
                    held[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise ValueError(f"weights of version {version} do not fit the sampler: {min(missing)} did not come")
        self.policy_version = version

    def digests(self) -> dict[str, str]:
        held = self.model.named_parameters(remove_duplicate=False)
        return {name: digest(name, parameter) for name, parameter in held}

    @property
    def rows_at_once(self) -> int:
        return self.max_rows

    def close(self) -> None:
        """Have a thread that still samples end with an error at its next token."""
        self._closed = True

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        assert len(prompts) == len(seeds), "one seed a prompt"
        per_batch = max(self.max_rows // group_size, 1)
        groups: list[list[Rollout]] = []
        for start in range(0, len(prompts), per_batch):
            part = slice(start, start + per_batch)
            groups.extend(self._generate_batch(prompts[part], group_size, sampling, seeds[part]))
        return groups

    def _generate_batch(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        # One context for the whole batch: it keeps the weights that it has cast.
        with compute_precision(self.autocast, self.device):
            batch = self._sample(prompts, group_size, sampling, seeds)
        texts = self.tokenizer.batch_decode(
            [row[:length] for row, length in zip(batch.tokens, batch.lengths, strict=True)], skip_special_tokens=True
        )
        reasons: list[FinishReason] = ["stop" if stopped else "length" for stopped in batch.stopped]
        rollouts = [
            Rollout(
                token_ids=batch.tokens[row, :length].copy(),
                behaviour_logprobs=batch.logprobs[row, :length].copy(),
                finish_reason=reasons[row],
                policy_version=self.policy_version,
                text=texts[row],
            )
            for row, length in enumerate(batch.lengths)
        ]
        return [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]

    @torch.inference_mode()
    def _sample(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]) -> _Batch:
        count = len(prompts) * group_size
        batch = _Batch(
            tokens=np.zeros((count, sampling.max_tokens), dtype=np.int32),
            logprobs=np.zeros((count, sampling.max_tokens), dtype=np.float32),
            lengths=np.zeros(count, dtype=np.int64),
            stopped=np.zeros(count, dtype=bool),
        )
        streams = _Streams(np.array([seed + j for seed in seeds for j in range(group_size)], dtype=np.uint64))
        ends = torch.tensor(sorted(self.end_tokens), device=self.device)
        decoder = make_decoder(self.model)
        logits = decoder.prefill(prompts, group_size)
        rows = np.arange(count)
        live = torch.ones(count, dtype=torch.bool, device=self.device)
        for step in range(sampling.max_tokens):
            if self._closed:
                raise EngineError("the sampler is closed")
            uniforms = torch.from_numpy(streams.at(step, rows)).to(self.device)
            drawn, drawn_logprobs = draw(logits, uniforms, sampling)
            running = live.cpu().numpy()
            batch.tokens[rows[running], step] = drawn.cpu().numpy()[running]
            batch.logprobs[rows[running], step] = drawn_logprobs.cpu().numpy()[running]
            batch.lengths[rows[running]] += 1
            ended = torch.isin(drawn, ends) & live
            batch.stopped[rows[ended.cpu().numpy()]] = True
            live &= ~ended
            alive = int(live.sum())
            if alive == 0 or step + 1 == sampling.max_tokens:
                break
            if alive <= len(live) * (1 - COMPACT_SHARE):
                keep = live.nonzero().squeeze(-1)
                decoder.keep(keep)
                rows, live, drawn = rows[keep.cpu().numpy()], live[keep], drawn[keep]
            logits = decoder.step(drawn)
        return batch


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row by inverting its cumulative distribution at `uniforms` [B], with its log-prob.

    Greedy at temperature 0, where the log-prob is that of temperature 1. The log-prob is of the distribution drawn
    from: with top_k or top_p, of the renormalised rest.
    """
    if sampling.temperature == 0:
        log_probs = log_softmax(logits, 1.0)
        tokens = log_probs.argmax(-1)
        return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)
    shifted, exponentials, total = powers(logits, sampling.temperature)
    if sampling.top_k or sampling.top_p < 1:
        shifted, exponentials, total = powers(restrict(shifted - total.log(), sampling), 1.0)
    tokens = invert(exponentials, uniforms)
    return tokens, (shifted.gather(-1, tokens[:, None]) - total.log()).squeeze(-1)


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token [B] at which the running sum of `weights` [B, V] passes `uniforms` [B] of the whole.

    In two steps, first to a block of the vocabulary and then inside it, since only the sums are needed of most of it.
    In float64: a float32 running sum over a large vocabulary loses the small probabilities at its end.
    """
    rows, vocabulary = weights.shape
    short = -vocabulary % VOCABULARY_BLOCK
    if short:
        weights = torch.nn.functional.pad(weights, (0, short))
    blocks = weights.view(rows, -1, VOCABULARY_BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted = (uniforms * ends[:, -1])[:, None]
    block = _first_past(ends, wanted)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, VOCABULARY_BLOCK)).squeeze(1).double().cumsum(-1)
    return (block * VOCABULARY_BLOCK + _first_past(inside, wanted - before)).squeeze(-1)


def _first_past(running: Tensor, wanted: Tensor) -> Tensor:
    """Where a running sum [B, N] first passes `wanted` [B, 1]; if rounding has it never do so, where it last rose."""
    last_rise = (running < running[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(running, wanted, right=True), last_rise)


def restrict(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Keep the `top_k` likeliest, then the smallest set that holds `top_p`, and renormalise."""
    if sampling.top_k:
        least = log_probs.topk(min(sampling.top_k, log_probs.shape[-1]), dim=-1).values[:, -1:]
        log_probs = torch.where(log_probs < least, -torch.inf, log_probs).log_softmax(-1)
    if sampling.top_p < 1:
        ordered, order = log_probs.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p)
        log_probs = torch.where(dropped, -torch.inf, log_probs).log_softmax(-1)
    return log_probs
