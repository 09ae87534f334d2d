"""What one forward and backward pass of the learner holds, in bytes of its device.

Counted over the tensors that autograd keeps for the backward pass in transformers' decoders (Qwen3, Qwen2, Llama) with
attention.py and a fused kernel, as a test counts them on a real model. Per position and layer, H the hidden size, Q the
width of all query heads, K of all key heads, I of the MLP:

    two norms            input, normalised and scaled values: 24 H in FP32, 26 H under BF16 autocast, 16 H in BF16
    norms of q and k     8 (Q + K) in FP32, 6 (Q + K) otherwise
    attention            queries, outputs, and outputs in their places: 3 Q numbers; keys and values: 2 K numbers for
                         each key that a segment sees, its prompt's taken out for every response
    MLP                  4 I numbers
    mask                 one number for each pair of a response's query and key
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_lab.config import LearnerConfig, TrainConfig
from grpo_lab.plan.shape import Shape, embedding_parameters, layer_matrices
from grpo_lab.plan.states import parameter_width
from grpo_lab.plan.volume import Lengths

# Bytes a position, by precision: (both norms, their part that is no output, a number of q/k norms, a number).
FP32, AUTOCAST, BF16 = "fp32", "autocast", "bf16"
NORMS = {FP32: 24, AUTOCAST: 26, BF16: 16}
LAST_NORM = {FP32: 8, AUTOCAST: 8, BF16: 6}
HEAD_NORMS = {FP32: 8, AUTOCAST: 6, BF16: 6}
WIDTH = {FP32: 4, AUTOCAST: 2, BF16: 2}
RESIDUAL = {FP32: 4, AUTOCAST: 4, BF16: 2}
# Bytes of a logit at the peak of `selected_logprobs`: the logits (and widened, where they are BF16), less their
# maximum, and exp of that; the temperature's quotient where it is not 1; what is left of the chunk before.
LOGIT = {FP32: 12, AUTOCAST: 14, BF16: 14}
TEMPERED = 4
CHUNK_BEFORE = {FP32: 8, AUTOCAST: 10, BF16: 10}
# The same while the backward pass multiplies by the output matrix, and bytes of a number of that product: FP32 is added
# in place.
LOGIT_GRADIENT = 12
PRODUCT = {FP32: 0, AUTOCAST: 2, BF16: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The largest micro-batch of an update: `rows` rows of a prompt and `members` responses, which predict `tokens`
    tokens. prompt, response: positions of each; the last token of a response has none. A rank runs `passes` such
    micro-batches an update; `busy` ranks have any."""

    rows: int
    members: int
    prompt: float
    response: float
    tokens: int
    passes: int
    busy: int

    @property
    def length(self) -> int:
        """Positions of a row."""
        return math.ceil(self.prompt + self.members * self.response)

    @property
    def positions(self) -> int:
        return self.rows * self.length

    @property
    def keys(self) -> int:
        """Keys taken out for the segments: a prompt sees itself, a response its prompt and itself."""
        return round(self.rows * (self.prompt + self.members * (self.prompt + self.response)))

    @property
    def pairs(self) -> int:
        """Queries times keys of the responses, a mask's entries."""
        return round(self.rows * self.members * self.response * (self.prompt + self.response))


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes. saved: kept from forward to backward. layer: temporaries of one layer's backward pass. logits: temporaries
    of the output matrix, whose gradient is among them."""

    saved: int
    layer: int
    logits: int

    @property
    def peak(self) -> int:
        """When the backward pass begins: all is saved, and the output matrix or the last layer is at work."""
        return self.saved + max(self.layer, self.logits)


def micro_batch(config: TrainConfig, lengths: Lengths) -> MicroBatch:
    """What `minibatches.plan_rows` and `micro_batches` make of a minibatch of responses of mean length."""
    budget, m = config.learner.micro_batch_tokens, config.group_size
    response = max(lengths.response, 1.0)
    extra = response - 1
    members = m if extra == 0 else max(1, min(m, math.floor((budget - lengths.prompt) / extra + 1e-9)))
    rows_per_group = -(-m // members)
    length = math.ceil(lengths.prompt + members * extra)
    total = config.groups_per_minibatch * rows_per_group
    own = -(-total // config.hardware.ranks)
    rows = min(max(budget // length, 1), own)
    return MicroBatch(
        rows=rows,
        members=members,
        prompt=lengths.prompt,
        response=extra,
        tokens=round(rows * members * response),
        passes=-(-own // rows),
        busy=min(total, config.hardware.ranks),
    )


def arithmetic_of(learner: LearnerConfig, stage: int) -> str:
    """FP32; BF16 autocast over FP32 parameters; or BF16 parameters."""
    if learner.precision == "fp32":
        return FP32
    return BF16 if parameter_width(learner, stage) == 2 else AUTOCAST


def activations(
    shape: Shape, learner: LearnerConfig, batch: MicroBatch, *, stage: int, temperature: float
) -> Activations:
    """Of one micro-batch."""
    kind = arithmetic_of(learner, stage)
    width, positions = WIDTH[kind], batch.positions
    key_width = shape.kv_heads * shape.head_dim
    # Each layer turns the boolean mask into numbers of its own, and keeps them.
    layer = positions * layer_bytes(shape, kind) + (2 * key_width * batch.keys + batch.pairs) * width
    if learner.activation_checkpointing:
        saved = shape.layers * positions * shape.hidden * RESIDUAL[kind] + layer
    else:
        saved = shape.layers * layer
    saved += _around(shape, batch, kind)
    if kind == AUTOCAST:
        # The matrices as autocast has cast them.
        saved += 2 * shape.layers * layer_matrices(shape)
    return Activations(
        saved=saved,
        # Gradients of the MLP's three wide tensors, and of its input and output.
        layer=positions * (3 * shape.intermediate + 2 * shape.hidden) * width,
        logits=_logit_bytes(shape, learner, batch, kind, temperature),
    )


def _logit_bytes(shape: Shape, learner: LearnerConfig, batch: MicroBatch, kind: str, temperature: float) -> int:
    """Temporaries of the output matrix: logits of a chunk, and the matrix's own gradient in FP32."""
    chunk = min(learner.logit_chunk, batch.tokens) * shape.vocab
    matrix = embedding_parameters(shape)
    each = LOGIT[kind] + (TEMPERED if temperature != 1 else 0)
    if batch.tokens > learner.logit_chunk:
        each += CHUNK_BEFORE[kind]
    return 4 * matrix + max(each * chunk, LOGIT_GRADIENT * chunk + PRODUCT[kind] * matrix)


def layer_bytes(shape: Shape, kind: str) -> int:
    """Saved bytes of one position in one layer, without the keys that it sees and the mask."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # The scale of each norm, and the normaliser of each head's softmax.
    scales = 4 * 2 + 4 * shape.heads
    total = NORMS[kind] * shape.hidden + scales + (3 * query + 4 * shape.intermediate) * WIDTH[kind]
    if shape.qk_norm:
        total += HEAD_NORMS[kind] * (query + key) + 4 * (shape.heads + shape.kv_heads)
    return total


def _around(shape: Shape, batch: MicroBatch, kind: str) -> int:
    """Saved before the first layer and behind the last, and the places and mask that all layers read."""
    # Token ids and the places of queries and outputs; sine and cosine; the last norm.
    positions = 3 * 8 + 2 * shape.head_dim * RESIDUAL[kind] + LAST_NORM[kind] * shape.hidden + 4
    # Hidden states that predict, their places, and the tokens.
    tokens = shape.hidden * WIDTH[kind] + 16 + 1
    return batch.positions * positions + 8 * batch.keys + batch.pairs + batch.tokens * tokens
