"""What is measured on: models of random weights, and prompts and responses of exact lengths."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

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
        import torch
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(self.config()).eval()


TINY = Model(name="tiny", hidden=256, layers=4, heads=8, kv_heads=8, intermediate=512, vocab=2176)
SMOLLM2 = Model(name="smollm2_135m", hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One update: `groups` prompts of `prompt` tokens, `group_size` responses of `response` tokens to each.

    `micro_batch_tokens` and `logit_chunk` are the learner's budgets of memory at this shape.
    """

    name: str
    model: Model
    groups: int
    group_size: int
    prompt: int
    response: int
    micro_batch_tokens: int
    logit_chunk: int

    @property
    def responses(self) -> int:
        return self.groups * self.group_size

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return self.responses * self.response


SHORT = Shape(
    name="short",
    model=TINY,
    groups=32,
    group_size=8,
    prompt=8,
    response=24,
    micro_batch_tokens=2048,
    logit_chunk=2048,
)
LONG = Shape(
    name="long",
    model=TINY,
    groups=32,
    group_size=8,
    prompt=128,
    response=64,
    micro_batch_tokens=2048,
    logit_chunk=2048,
)
REAL = Shape(
    name="smollm2_135m",
    model=SMOLLM2,
    groups=4,
    group_size=8,
    prompt=64,
    response=32,
    micro_batch_tokens=640,
    logit_chunk=256,
)


def word(index: int) -> str:
    """A token's text: an answer by itself, so that the last one of a response is its final answer."""
    return rf"\boxed{{{index}}}"


def tokenizer(vocab: int) -> Any:
    """One token a word, as many as the model can emit, and an end token that it cannot."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word(index): index for index in range(vocab)} | {"<eos>": vocab}
    inner = Tokenizer(models.WordLevel(words, unk_token=word(0)))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=word(0), eos_token="<eos>")


def write_model(model: Model, folder: Path) -> None:
    """The model and its tokenizer as a Hugging Face folder."""
    made = model.make()
    made.generation_config.eos_token_id = model.vocab
    made.save_pretrained(folder)
    tokenizer(model.vocab).save_pretrained(folder)


def write_prompts(shape: Shape, path: Path) -> None:
    """Questions of exactly `shape.prompt` tokens, as JSON lines. Numbers up to half the vocabulary are right answers:
    an untrained model is right half of the time, so that there is something to learn from in every group."""
    draw = random.Random(0)
    words = [[word(draw.randrange(1, shape.model.vocab)) for _ in range(shape.prompt)] for _ in range(PROMPTS)]
    lines = [
        json.dumps({"question": " ".join(row), "answer": "0", "tolerance": shape.model.vocab // 2}) for row in words
    ]
    path.write_text("\n".join(lines) + "\n")
