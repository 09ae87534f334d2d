"""One thread, no network, and the parts that most tests of models share."""

from __future__ import annotations

import os

# Before torch and transformers are imported, here or in a child process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import compose_small
from tiny import char_tokenizer, save_model, tiny_model

from grpo_lab.config import TrainConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return char_tokenizer()


@pytest.fixture
def model() -> Any:
    """A fresh tiny Qwen3; always the same weights."""
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same Qwen3 with its tokenizer, as a Hugging Face folder. Tests must not write there."""
    return save_model(tiny_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small run's model is made once a session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def small(model_cache: Path) -> Callable[..., TrainConfig]:
    """A configuration of the small run, with overrides."""

    def make(*overrides: str) -> TrainConfig:
        return compose_small([f"model.cache_dir={model_cache}", *overrides])

    return make
