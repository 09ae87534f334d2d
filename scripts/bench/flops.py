"""The useful work of an update, counted: what a learner without any waste would have to do.

    6 x matrices x positions + 6 x head x response tokens + 12 x layers x heads x head size x query-key pairs

A multiplication and an addition count as two; forward is a third of it, backward two thirds. `matrices` are the
parameters of the layers without their norms, `head` those of the output matrix. A prompt is counted once for its group,
and so are its pairs; the last token of a response is predicted and predicts nothing. What is computed again in the
backward pass, norms, softmax and the optimizer do not count.
"""

from __future__ import annotations

from scripts.bench.shapes import Model, Shape


def matrices(model: Model) -> int:
    """Parameters of the layers' matrices: query, key, value, output; gate, up, down."""
    kv = model.kv_heads * model.head_dim
    return model.layers * model.hidden * (2 * model.hidden + 2 * kv + 3 * model.intermediate)


def head(model: Model) -> int:
    return model.vocab * model.hidden


def parameters(model: Model) -> int:
    """All of them: the embedding is the output matrix, and there are two norms a layer and one behind."""
    return head(model) + matrices(model) + (2 * model.layers + 1) * model.hidden


def positions(shape: Shape) -> int:
    return shape.groups * (shape.prompt + shape.group_size * (shape.response - 1))


def pairs(shape: Shape) -> int:
    """Query-key pairs under a causal mask."""
    inputs = shape.response - 1
    prompt = shape.prompt * (shape.prompt + 1) // 2
    response = inputs * shape.prompt + inputs * (inputs + 1) // 2
    return shape.groups * (prompt + shape.group_size * response)


def update_flops(shape: Shape) -> int:
    """Useful operations of one update of the learner."""
    model = shape.model
    attention = 12 * model.layers * model.heads * model.head_dim * pairs(shape)
    return 6 * matrices(model) * positions(shape) + 6 * head(model) * shape.tokens + attention
