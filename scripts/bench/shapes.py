"""What is measured on: models of random weights, and prompts and responses of exact lengths."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPTS = 4096


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama with untrained weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            # One past the last token that the model can emit, so that every response has its full length.
            eos_token_id=self.vocab,
        )

    def make(self) -> Any:
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(self.config()).eval()


TINY = Model(name="tiny", hidden=256, layers=4, heads=8, kv_heads=8, intermediate=512, vocab=2176)
SMOLLM2 = Model(name="smollm2_135m", hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One update: `groups` prompts of `prompt` tokens, `group_size` responses of `response` tokens to each."""

    name: str
    model: Model
    groups: int
    group_size: int
    prompt: int
    response: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="short", model=TINY, groups=32, group_size=8, prompt=8, response=24),
        Shape(name="long", model=TINY, groups=32, group_size=8, prompt=128, response=64),
        Shape(name="smollm2_135m", model=SMOLLM2, groups=4, group_size=8, prompt=64, response=32),
    )
}


def tokenizer(vocab: int) -> Any:
    """One token a word: w0, w1, ... as many as the model can emit, and an end token that it cannot."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocab)} | {"<eos>": vocab}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="<eos>")


def write_model(model: Model, folder: Path) -> Path:
    """The model and its tokenizer as a Hugging Face folder, once."""
    if not (folder / "config.json").is_file():
        made = model.make()
        made.generation_config.eos_token_id = model.vocab
        made.save_pretrained(folder)
        tokenizer(model.vocab).save_pretrained(folder)
    return folder


def write_prompts(shape: Shape, path: Path) -> Path:
    """Questions of exactly `shape.prompt` tokens, as JSON lines."""
    draw = np.random.default_rng(0)
    words = draw.integers(1, shape.model.vocab, size=(PROMPTS, shape.prompt))
    lines = [json.dumps({"question": " ".join(f"w{word}" for word in row), "answer": "w1"}) for row in words]
    path.write_text("\n".join(lines) + "\n")
    return path
