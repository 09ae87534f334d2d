"""Whether two tokenizers, and two templates of prompts, are the same: by hashes that a pool carries."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from grpo_lab.config import DatasetConfig


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of what every token id stands for, and of which id ends a text."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return _hash([vocabulary, tokenizer.eos_token_id])


def template_hash(config: DatasetConfig, tokenizer: Any) -> str:
    """A hash of what turns a question into a prompt."""
    chat = tokenizer.chat_template if config.chat else None
    return _hash([config.template, config.system_prompt, chat])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
