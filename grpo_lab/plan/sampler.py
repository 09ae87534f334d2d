"""What the sampler holds: weights, keys and values, and how many sequences fit; in bytes of its device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_lab.config import TrainConfig
from grpo_lab.plan.shape import Shape, kv_bytes_per_token, named_parameters, parameters
from grpo_lab.plan.volume import Lengths, evaluated_problems
from grpo_lab.schedule import prompts_at_a_time, shares_weights

# As in rollout/cache.py: positions made room for at a time.
ROOM = 64
PAGE = 4096
# Bytes of a logit while a token is drawn: logits, log-probs, and probabilities in float64 with their running sum.
DRAW = 24
WIDTHS = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Bytes a device; `weights` beyond the learner's own. `kv_per_token` of a whole model; `sequences` of the longest
    kind that the cache holds at once (None: as many as are asked for). `where`: beside the learner on every rank
    ("ranks"), on the first rank's device ("first"), on devices of its own ("own"), or with a server that is not the
    run's ("elsewhere").
    """

    where: str
    devices: int
    weights: int
    cache: int
    work: int
    kv_per_token: int
    sequences: int | None
    sleeps: bool

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work


def sampling_devices(config: TrainConfig) -> int:
    """Devices that sample: every rank's where each has an engine or a part of one, else the one engine's."""
    if config.rollout.engine == "hf" or config.rollout.vllm.mode == "in_process":
        return config.hardware.ranks
    return config.rollout.vllm.tensor_parallel


def sampler(shape: Shape, config: TrainConfig, lengths: Lengths, *, device_bytes: int) -> Sampler:
    """The configured sampler on devices of `device_bytes`."""
    if config.rollout.engine == "hf":
        return _embedded(shape, config, lengths)
    return _vllm(shape, config, device_bytes)


# --- embedded ---------------------------------------------------------------------------------------------------


def _embedded(shape: Shape, config: TrainConfig, lengths: Lengths) -> Sampler:
    m, n = config.group_size, config.evaluation.n
    asked = [(_prompts(config, prompts_at_a_time(config), m), m, lengths.response)]
    if held_out := evaluated_problems(config):
        asked.append((_prompts(config, held_out, n), n, lengths.evaluated))
    on_cpu = config.hardware.device == "cpu"
    sizes = [
        (_cache(shape, prompts, each, lengths.prompt, response, on_cpu=on_cpu), prompts * each)
        for prompts, each, response in asked
    ]
    cache, rows = max(sizes)
    return Sampler(
        where="ranks",
        devices=config.hardware.ranks,
        weights=0 if shares_weights(config) else 4 * parameters(shape),
        cache=cache,
        work=rows * (DRAW * shape.vocab + 4 * (3 * shape.intermediate + 2 * shape.hidden)),
        kv_per_token=kv_bytes_per_token(shape, 4),
        sequences=None,
        sleeps=False,
    )


def _prompts(config: TrainConfig, prompts: int, responses: int) -> int:
    """Prompts, of `responses` responses each, sampled side by side on one rank."""
    own = -(-prompts // config.hardware.ranks)
    return min(max(config.rollout.max_rows // responses, 1), own)


def _cache(shape: Shape, prompts: int, responses: int, prompt: float, response: float, *, on_cpu: bool) -> int:
    """Bytes of keys and values: of each prompt once, and of each response with room for more. The copy of one layer's,
    while rows that have finished are cut out, is not counted.

    Of CPU memory only pages that were written count: what is filled, and a page more for each head, whose positions lie
    together.
    """
    head = 4 * shape.head_dim
    # The last token drawn is not computed with.
    filled = max(math.ceil(response) - 1, 1)
    room = ROOM * -(-filled // ROOM) * head
    held = min(room, filled * head + PAGE) if on_cpu else room
    heads = 2 * shape.layers * shape.kv_heads
    return heads * prompts * (math.ceil(prompt) * head + responses * held)


# --- vLLM -------------------------------------------------------------------------------------------------------


def _vllm(shape: Shape, config: TrainConfig, device_bytes: int) -> Sampler:
    vllm = config.rollout.vllm
    width, parts = WIDTHS[vllm.dtype], vllm.tensor_parallel
    # On a CPU vLLM packs the output matrix into one of its own; on a GPU tied matrices are one.
    count = parameters(shape) if config.hardware.device != "cpu" else named_parameters(shape)
    weights = width * -(-count // parts)
    # Fewer key heads than parts: each is held by several.
    heads = max(shape.kv_heads, parts)
    kv_share = kv_bytes_per_token(shape, width) * heads // shape.kv_heads // parts
    if vllm.kv_cache_gb is not None:
        cache = vllm.kv_cache_gb * 2**30
    else:
        cache = max(round(vllm.memory_share * device_bytes) - weights, 0)
    return Sampler(
        where=_where(config),
        devices=sampling_devices(config),
        weights=weights,
        cache=cache,
        work=0,
        kv_per_token=kv_bytes_per_token(shape, width),
        sequences=cache // (kv_share * longest_sequence(config)),
        sleeps=vllm.sleep,
    )


def longest_sequence(config: TrainConfig) -> int:
    """Tokens of the longest prompt and response that vLLM has room for."""
    rollout, evaluation = config.rollout, config.evaluation
    response = max(rollout.max_response_tokens, (evaluation.every and evaluation.max_tokens) or 0)
    return rollout.vllm.max_model_len or rollout.max_prompt_tokens + response


def _where(config: TrainConfig) -> str:
    vllm = config.rollout.vllm
    if config.rollout.url is not None:
        return "elsewhere"
    if vllm.mode == "in_process":
        return "ranks"
    # A process that is told no devices sees the learner's.
    return "own" if vllm.devices is not None or config.hardware.device == "cpu" else "first"
