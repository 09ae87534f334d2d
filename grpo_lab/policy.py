"""A causal language model as a scorer of packed micro-batches: what the learner and its reference have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lab.attention import IMPLEMENTATION, install, packed_attention
from grpo_lab.config import ConfigError, first_line
from grpo_lab.logprobs import selected_logprobs
from grpo_lab.minibatches import PackedBatch

# Attention layers that see all that a mask lets them see. Others (sliding windows, recurrences) get plain rows.
FULL_ATTENTION = "full_attention"
# Heads that change the logits after the output matrix, which `selected_logprobs` does not do.
LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}


def load_model(folder: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A Hugging Face causal LM with parameters in `dtype`, without dropout.

    Raises:
        ConfigError: nothing that transformers can read is there.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, revision=revision, dtype=dtype)
    except SafetensorError as error:
        raise ConfigError(f"model.path={folder} has a damaged weight file ({error}): copy it again") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.id or model.path={folder} cannot be loaded: {first_line(error)} (offline? point model.path= at a "
            "local folder)"
        ) from error
    # The run's own settings say how to sample. Of the folder's, only the token ids stay: some sampling values that
    # transformers reads (a temperature without do_sample) it refuses to write, which would stop the first checkpoint.
    named = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=named.bos_token_id, eos_token_id=named.eos_token_id, pad_token_id=named.pad_token_id
    )
    # Dropout would make the learner another policy than the sampler; reinforcement learning here has none.
    return model.eval()


def load_tokenizer(folder: str | Path, *, revision: str | None = None) -> Any:
    """The tokenizer beside a model.

    Raises:
        ConfigError: none is there.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, revision=revision)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.id or model.path={folder} has no tokenizer that loads: {first_line(error)}"
        ) from error


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """All token ids that end a response: the tokenizer's and every one that the model's generation config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {tokenizer.eos_token_id} | set(named if isinstance(named, list) else [named])
    ids.discard(None)
    if not ids:
        raise ConfigError("the model's tokenizer has no end-of-sequence token: responses could never stop")
    return frozenset(ids)


def takes_groups(model: Any) -> bool:
    """Whether every layer is full attention that can be replaced, so that a row may hold a whole group."""
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION) or not model._supports_attention_backend:
        return False
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        return all(layer == FULL_ATTENTION for layer in layers)
    return getattr(config, "sliding_window", None) is None and hasattr(config, "num_attention_heads")


def compute_precision(autocast: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward pass runs in: autocast to `autocast`, or the parameters' own type."""
    return nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)


def checkpoint_activations(model: Any) -> None:
    """Have the model's layers compute their activations again in the backward pass instead of keeping them.

    Raises:
        ConfigError: the model has no layers that can.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} cannot compute activations again: set learner.activation_checkpointing=false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        # They do so in training mode only, which here is theirs alone: whatever has dropout stays in evaluation mode.
        layer.training = True
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


class _Head(nn.Module):
    """The output matrix at work, as a module without parameters of its own.

    An engine that shards parameters gathers them around the forward and backward pass of the module that uses them,
    and here that is not the matrix's own layer: all logits at once are what `selected_logprobs` avoids.
    """

    def __init__(self, matrix: Any, *, temperature: float, chunk: int) -> None:
        super().__init__()
        # In a tuple, since a module held directly would list its parameters a second time.
        self._matrix = (matrix,)
        self.temperature = temperature
        self.chunk = chunk

    def forward(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        (matrix,) = self._matrix
        return selected_logprobs(
            hidden, matrix.weight, matrix.bias, tokens, temperature=self.temperature, chunk=self.chunk
        )


class Policy(nn.Module):
    """Scores responses under a model at one temperature."""

    def __init__(self, model: Any, *, temperature: float, logit_chunk: int, autocast: torch.dtype | None) -> None:
        super().__init__()
        for name in LOGIT_CHANGES:
            if getattr(model.config.get_text_config(), name, None):
                raise ConfigError(
                    f"this model's {name} changes its logits, which is not supported: choose another model"
                )
        self.model = model
        self.head = _Head(model.get_output_embeddings(), temperature=temperature, chunk=logit_chunk)
        self.autocast = autocast
        self.whole_groups = takes_groups(model)
        if self.whole_groups:
            install(model)

    def logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [B, T] (nats, with gradient where enabled) and entropies [B, T] (without); 0 behind the mask."""
        result: tuple[Tensor, Tensor] = self(batch=batch)
        return result

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """As `logprobs`."""
        device = next(self.model.parameters()).device
        with compute_precision(self.autocast, device):
            hidden = self._hidden(batch, device).flatten(0, 1)[batch.predictors.to(device)]
        if self.autocast is not None:
            # The last norm gives float32 under autocast; the output matrix is to run in the compute type as well.
            hidden = hidden.to(self.autocast)
        selected, entropies = self.head(hidden, batch.tokens.to(device))
        mask = batch.loss_mask.to(device)
        zeros = torch.zeros(mask.shape, dtype=selected.dtype, device=device)
        return zeros.masked_scatter(mask, selected), zeros.masked_scatter(mask, entropies)

    def _hidden(self, batch: PackedBatch, device: torch.device) -> Tensor:
        if self.whole_groups:
            attention = packed_attention(batch, device)
        else:
            attention = {"attention_mask": (batch.segments >= 0).long().to(device)}
        return self.model.base_model(
            input_ids=batch.input_ids.to(device),
            position_ids=batch.position_ids.to(device),
            use_cache=False,
            **attention,
        ).last_hidden_state
