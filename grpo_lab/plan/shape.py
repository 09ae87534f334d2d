"""The size of the model: its shape, and the parameters and arithmetic that follow from it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config import ArithmeticConfig, ConfigError, RecipeConfig, TrainConfig
from grpo_lab.prompts.arithmetic import VOCABULARY

# Decoders of one kind (RMSNorm, rotary positions, gated MLP), and how they differ: biases of query, key and value;
# norms of query and key; the head size where a config names none (None: hidden / heads).
FAMILY: dict[str, tuple[bool, bool, int | None]] = {
    "llama": (False, False, None),
    "qwen2": (True, False, None),
    "qwen3": (False, True, 128),
}
# <pad> and <eos> of a model made here.
SPECIAL_TOKENS = 2
SET_SHAPE = "set model.shape.hidden= and the other keys of model.shape (as in conf/model/qwen2_5_7b.yaml)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder: RMSNorm, rotary positions, gated MLP. Sizes as `config.ShapeConfig` names them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False


def shape_of(config: TrainConfig) -> Shape:
    """The shape of the model that a run would load: from the folder, else from `model.shape`, else from the recipe.

    Raises:
        ConfigError: none of them says what it is.
    """
    model = config.model
    if model.path is not None and (Path(model.path) / "config.json").is_file():
        found = _from_folder(Path(model.path) / "config.json")
        if found is not None:
            return found
    told = asdict(model.shape)
    missing = [key for key, value in told.items() if value is None]
    if not missing:
        return Shape(**told)
    if len(missing) < len([key for key in told if not key.startswith("qk")]):
        raise ConfigError(f"model.shape lacks {', '.join(missing)}")
    if model.path is None and model.id is None and model.recipe is not None:
        return _from_recipe(model.recipe, config)
    source = f"model.path={model.path}" if model.path is not None else f"model={model.name}"
    raise ConfigError(f"the shape of {source} is not known: {SET_SHAPE}")


def _from_recipe(recipe: RecipeConfig, config: TrainConfig) -> Shape:
    """As `models.make_model` makes it: one token a character of the task."""
    if not isinstance(config.dataset, ArithmeticConfig):
        raise ConfigError(
            f"model={config.model.name} knows only the characters of the made task, not "
            f"dataset={config.dataset.name}: choose dataset=arithmetic, or a model such as model=smollm2_135m"
        )
    if recipe.architecture not in FAMILY:
        raise ConfigError(f"model.recipe.architecture={recipe.architecture} has no shape that is known: {SET_SHAPE}")
    bias, norm, _ = FAMILY[recipe.architecture]
    characters = {*VOCABULARY, *config.dataset.template.replace("{question}", "")}
    return Shape(
        hidden=recipe.hidden,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.heads,
        head_dim=recipe.head_dim,
        intermediate=recipe.intermediate,
        vocab=SPECIAL_TOKENS + len(characters),
        tied=True,
        qkv_bias=bias,
        qk_norm=norm,
    )


def _from_folder(path: Path) -> Shape | None:
    """The shape that a Hugging Face config.json tells; None where it is of a kind that is not reckoned here.

    Raises:
        ConfigError: it cannot be read, or lacks a number.
    """
    try:
        told: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is no JSON ({error})") from error
    kind = told.get("model_type")
    if kind not in FAMILY or told.get("attention_bias") or told.get("mlp_bias"):
        return None
    bias, norm, head_dim = FAMILY[kind]
    try:
        hidden, heads = told["hidden_size"], told["num_attention_heads"]
        return Shape(
            hidden=hidden,
            layers=told["num_hidden_layers"],
            heads=heads,
            kv_heads=told.get("num_key_value_heads") or heads,
            head_dim=told.get("head_dim") or head_dim or hidden // heads,
            intermediate=told["intermediate_size"],
            vocab=told["vocab_size"],
            tied=bool(told.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            qk_norm=norm,
        )
    except KeyError as missing:
        raise ConfigError(f"model.path: {path} has no {missing}: {SET_SHAPE}") from missing


def embedding_parameters(shape: Shape) -> int:
    """Of the input matrix, which is as large as the output matrix."""
    return shape.vocab * shape.hidden


def layer_matrices(shape: Shape) -> int:
    """Parameters of one layer that are matrices."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden * (2 * query + 2 * key) + 3 * shape.hidden * shape.intermediate


def layer_parameters(shape: Shape) -> int:
    """All parameters of one layer."""
    biases = (shape.heads + 2 * shape.kv_heads) * shape.head_dim if shape.qkv_bias else 0
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)
    return layer_matrices(shape) + biases + norms


def parameters(shape: Shape) -> int:
    """All parameters, tied ones once."""
    matrices = embedding_parameters(shape) * (1 if shape.tied else 2)
    return matrices + shape.layers * layer_parameters(shape) + shape.hidden


def named_parameters(shape: Shape) -> int:
    """Parameters under all their names: what a sync sends, tied ones twice."""
    return parameters(shape) + (embedding_parameters(shape) if shape.tied else 0)


def forward_flop(shape: Shape, context: float) -> float:
    """Floating point operations of one forward pass over one token that sees `context` tokens, itself included.

    Two a parameter of a matrix it is multiplied by, and four a head channel and token seen (scores and their sum).
    """
    multiplied = shape.layers * layer_matrices(shape) + embedding_parameters(shape)
    return 2 * multiplied + 4 * shape.layers * shape.heads * shape.head_dim * context


def kv_bytes_per_token(shape: Shape, width: int) -> int:
    """Bytes of keys and values of one token, `width` bytes a number."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * width
