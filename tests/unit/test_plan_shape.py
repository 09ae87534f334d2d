"""The shape of a model and what follows from it, against transformers' own models without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_config import run_config
from tiny import save_model, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_lab.config import ConfigError
from grpo_lab.models import make_model, make_tokenizer
from grpo_lab.plan.shape import (
    Shape,
    forward_flop,
    kv_bytes_per_token,
    layer_matrices,
    named_parameters,
    parameters,
    shape_of,
)

# Preset, architecture, and the number of parameters that its publisher's weights have.
PUBLISHED = [
    ("qwen3_1_7b_base", "qwen3", 1_720_574_976),
    ("qwen3_4b_base", "qwen3", 4_022_468_096),
    ("qwen2_5_0_5b_instruct", "qwen2", 494_032_768),
    ("qwen2_5_7b", "qwen2", 7_615_616_512),
    ("r1_distill_qwen_1_5b", "qwen2", 1_777_088_000),
    ("smollm2_135m", "llama", 134_515_008),
]
SMALL = Shape(hidden=4, layers=3, heads=2, kv_heads=1, head_dim=5, intermediate=7, vocab=11, tied=True, qkv_bias=True)


def model_of(shape: Shape, architecture: str) -> Any:
    config = AutoConfig.for_model(
        architecture,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("preset", "architecture", "count"), PUBLISHED)
def test_the_presets_have_the_parameters_of_the_published_models(preset: str, architecture: str, count: int) -> None:
    shape = shape_of(run_config(f"model={preset}", "dataset=gsm8k"))
    model = model_of(shape, architecture)
    model.tie_weights()
    assert parameters(shape) == count == sum(each.numel() for each in model.parameters())
    named = sum(each.numel() for _, each in model.named_parameters(remove_duplicate=False))
    assert named_parameters(shape) == named


@pytest.mark.parametrize("dataset", ["arithmetic", "arithmetic_hard"])
def test_a_model_made_here_is_known_by_its_recipe(dataset: str) -> None:
    config = run_config(f"dataset={dataset}", "dataset.template='What is {question}?'")
    assert config.model.recipe is not None
    made = make_model(config.model.recipe, make_tokenizer(config.dataset.template))
    shape = shape_of(config)
    assert shape.vocab == made.config.vocab_size
    assert parameters(shape) == sum(each.numel() for each in made.parameters())


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_local_folder_is_read_from_its_config(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    save_model(model, tmp_path)
    # The folder is what a run would load, whatever the preset says.
    shape = shape_of(run_config("model=qwen2_5_7b", "dataset=gsm8k", f"model.path={tmp_path}"))
    assert parameters(shape) == sum(each.numel() for each in model.parameters())
    assert shape.tied == (architecture == "qwen3")


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    told = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    shape = shape_of(run_config("model=smollm2_135m", "dataset=gsm8k", f"model.path={tmp_path}"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert shape.head_dim == 128
    assert parameters(shape) == sum(each.numel() for each in model.parameters())


def test_a_model_of_another_kind_needs_its_shape_on_the_command_line(tmp_path: Path) -> None:
    save_model(tiny_model("gemma2"), tmp_path)
    source = ["model=tiny", "dataset=gsm8k", f"model.path={tmp_path}"]
    with pytest.raises(ConfigError, match=r"the shape of model\.path=.* is not known: set model\.shape\.hidden="):
        shape_of(run_config(*source))
    sizes = {"hidden": 4, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 5, "intermediate": 7, "vocab": 11}
    given = [f"model.shape.{key}={value}" for key, value in sizes.items()]
    with pytest.raises(ConfigError, match=r"^model\.shape lacks tied$"):
        shape_of(run_config(*source, *given))
    assert shape_of(run_config(*source, *given, "model.shape.tied=true")) == replace(SMALL, qkv_bias=False)


@pytest.mark.parametrize(
    ("written", "said"),
    [("{", "is no JSON"), ('{"model_type": "llama", "num_attention_heads": 2}', "has no 'hidden_size'")],
)
def test_a_config_that_cannot_be_used_is_named(written: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ConfigError, match=said) as raised:
        shape_of(run_config("dataset=gsm8k", f"model.path={tmp_path}"))
    assert "\n" not in str(raised.value)


def test_a_made_model_takes_no_other_task() -> None:
    with pytest.raises(ConfigError, match="model=tiny knows only the characters of the made task"):
        shape_of(run_config("dataset=gsm8k"))


def test_numbers_by_hand() -> None:
    # Queries are 10 wide, keys and values 5: 4 (10 + 5 + 5 + 10) + 3 x 4 x 7.
    assert layer_matrices(SMALL) == 204
    # Biases 10 + 5 + 5, two norms of 4; the input matrix 44 and the last norm.
    assert parameters(SMALL) == 44 + 3 * (204 + 20 + 8) + 4
    assert named_parameters(SMALL) == parameters(SMALL) + 44
    assert kv_bytes_per_token(SMALL, 2) == 2 * 3 * 5 * 2
    # 2 x (3 x 204 + 44), and 4 x 3 layers x 10 channels x 6 tokens seen.
    assert forward_flop(SMALL, 6) == 2 * 656 + 720
