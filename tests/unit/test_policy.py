"""Packed scoring against its definition: each response alone behind its prompt, softmax over all logits."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    EOS,
    UNEVEN,
    VOCABULARY,
    char_tokenizer,
    make_group,
    make_policy,
    minibatch_of,
    packed_logprobs,
    plain_logprobs,
    random_groups,
    save_model,
    tiny_model,
)
from torch import Tensor

from grpo_lab.config import ConfigError
from grpo_lab.minibatches import Minibatch, pack, plan_rows
from grpo_lab.policy import end_tokens, load_model, load_tokenizer, takes_groups

# Whole groups in one micro-batch; whole groups one by one (their lengths are 20, 21, 15); two of them cut into rows.
BUDGETS = (1000, 21, 17)


def cotangents(minibatch: Minibatch, dtype: torch.dtype) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(len(rollout.token_ids), dtype=dtype, generator=generator) for rollout in group.rollouts]
        for group in minibatch.groups
    ]


def gradients(model: Any, scores: list[list[Tensor]], weights: list[list[Tensor]]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    sums = [
        (score * weight).sum()
        for row, column in zip(scores, weights, strict=True)
        for score, weight in zip(row, column, strict=True)
    ]
    torch.stack(sums).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def farthest(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    differences = [
        (a - b).detach().abs().max()
        for row, column in zip(ours, theirs, strict=True)
        for a, b in zip(row, column, strict=True)
    ]
    return float(torch.stack(differences).max())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
def test_equals_the_plain_form_in_value_and_gradient(architecture: str, budget: int) -> None:
    model, minibatch = tiny_model(architecture), minibatch_of(random_groups(UNEVEN))
    policy = make_policy(model, temperature=0.7)
    assert policy.whole_groups
    packed = packed_logprobs(policy, minibatch, budget=budget)
    plain = [plain_logprobs(model, group, 0.7) for group in minibatch.groups]
    assert farthest(packed, plain) < 1e-5
    weights = cotangents(minibatch, torch.float32)
    ours, theirs = gradients(model, packed, weights), gradients(model, plain, weights)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_equals_the_plain_form_to_the_last_digits_in_float64() -> None:
    # GPT-2 computes throughout in the type of its weights; the norms of Qwen3 and Llama fall back to float32.
    model, minibatch = tiny_model("gpt2").double(), minibatch_of(random_groups(UNEVEN))
    packed = packed_logprobs(make_policy(model, temperature=0.7), minibatch, budget=14)
    plain = [plain_logprobs(model, group, 0.7) for group in minibatch.groups]
    assert packed[0][0].dtype == torch.float64
    assert farthest(packed, plain) < 1e-12
    weights = cotangents(minibatch, torch.float64)
    ours, theirs = gradients(model, packed, weights), gradients(model, plain, weights)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-12


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_values_in_float64_where_only_norms_are_float32(architecture: str) -> None:
    model, minibatch = tiny_model(architecture).double(), minibatch_of(random_groups(UNEVEN))
    packed = packed_logprobs(make_policy(model, temperature=0.7), minibatch, budget=21)
    assert farthest(packed, [plain_logprobs(model, group, 0.7) for group in minibatch.groups]) < 1e-12


def test_a_row_may_be_longer_than_the_models_positions() -> None:
    # Positions restart at each response: only prompt + response has to fit.
    model = tiny_model("gpt2", n_positions=16)
    minibatch = minibatch_of(random_groups([(4, (12, 12, 12, 12))]))
    assert plan_rows(minibatch, budget=1000)[0].length == 48
    packed = packed_logprobs(make_policy(model), minibatch, budget=1000)
    assert farthest(packed, [plain_logprobs(model, minibatch.groups[0], 1.0)]) < 1e-5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_entropies_equal_the_plain_form(temperature: float) -> None:
    model, minibatch = tiny_model("qwen3"), minibatch_of(random_groups(UNEVEN[:1]))
    batch = pack(minibatch, plan_rows(minibatch, budget=1000))
    logprobs, entropies = make_policy(model, temperature=temperature).logprobs(batch)
    assert logprobs.requires_grad
    assert not entropies.requires_grad
    group = minibatch.groups[0]
    for j, rollout in enumerate(group.rollouts):
        ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids.tolist()]])
        logits = model(input_ids=ids).logits[0, len(group.prompt.token_ids) - 1 : -1] / temperature
        expected = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(entropies[j][batch.loss_mask[j]], expected, rtol=0, atol=1e-5)
    assert not entropies[~batch.loss_mask].any()
    assert not logprobs[~batch.loss_mask].any()


# --- models whose attention takes no group mask -----------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_sliding_windows_are_recognised_and_scored_in_rows_of_one(architecture: str) -> None:
    model, minibatch = tiny_model(architecture), minibatch_of(random_groups(UNEVEN))
    policy = make_policy(model, temperature=0.7)
    assert not policy.whole_groups
    # The window of 4 is shorter than the texts, so that it matters.
    packed = packed_logprobs(policy, minibatch, budget=60)
    plain = [plain_logprobs(model, group, 0.7) for group in minibatch.groups]
    assert farthest(packed, plain) < 1e-5
    weights = cotangents(minibatch, torch.float32)
    ours, theirs = gradients(model, packed, weights), gradients(model, plain, weights)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_a_window_switched_off_is_full_attention() -> None:
    assert takes_groups(tiny_model("mistral", sliding_window=None))


def test_eager_attention_gets_rows_of_one() -> None:
    # It adds masks to scores, where True is 1: a boolean group mask would hide nothing.
    model, minibatch = tiny_model("qwen3", attention="eager"), minibatch_of(random_groups(UNEVEN))
    policy = make_policy(model)
    assert not policy.whole_groups
    packed = packed_logprobs(policy, minibatch, budget=60)
    assert farthest(packed, [plain_logprobs(model, group, 1.0) for group in minibatch.groups]) < 1e-5


def test_softcapped_logits_are_refused() -> None:
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        make_policy(tiny_model("gemma2", final_logit_softcapping=30.0))


# --- invariance and precision -----------------------------------------------------------------------------------


def test_one_row_or_eight_side_by_side() -> None:
    shapes = [(3 + k, (1 + k, 2 * k + 1, 9 - k)) for k in range(8)]
    minibatch, policy = minibatch_of(random_groups(shapes)), make_policy(tiny_model("qwen3"))
    rows = plan_rows(minibatch, budget=1000)
    together = pack(minibatch, rows)
    with torch.no_grad():
        side_by_side, _ = policy.logprobs(together)
        for g, row in enumerate(rows):
            alone = pack(minibatch, [row])
            scores, _ = policy.logprobs(alone)
            for k in range(3):
                torch.testing.assert_close(
                    scores[k][alone.loss_mask[k]],
                    side_by_side[3 * g + k][together.loss_mask[3 * g + k]],
                    rtol=0,
                    atol=1e-5,
                )


def test_the_padding_token_does_not_matter() -> None:
    minibatch, policy = minibatch_of(random_groups(UNEVEN)), make_policy(tiny_model("qwen3"))
    rows = plan_rows(minibatch, budget=1000)
    with torch.no_grad():
        scores = [policy.logprobs(pack(minibatch, rows, pad_id=pad_id))[0] for pad_id in (0, EOS, VOCABULARY - 1)]
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_bf16_autocast_is_near_float32() -> None:
    # Weights of the usual size: with those of the other tests the logits are so large that bfloat16, with its 8 bits,
    # is off by whole nats.
    model, minibatch = tiny_model("qwen3", initializer_range=0.05), minibatch_of(random_groups(UNEVEN))
    exact = packed_logprobs(make_policy(model), minibatch, budget=1000)
    rough = packed_logprobs(make_policy(model, autocast=torch.bfloat16), minibatch, budget=1000)
    assert rough[0][0].dtype == torch.float32
    assert 1e-6 < farthest(rough, exact) < 0.02
    weights = cotangents(minibatch, torch.float32)
    ours, theirs = gradients(model, rough, weights), gradients(model, exact, weights)
    assert all(gradient.dtype == torch.float32 for gradient in ours)
    norm = torch.cat([b.flatten() for b in theirs]).norm()
    assert float(torch.cat([(a - b).flatten() for a, b in zip(ours, theirs, strict=True)]).norm() / norm) < 0.03


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "expected"), [(None, {EOS}), (EOS, {EOS}), (7, {EOS, 7}), ([EOS, 7, 9], {EOS, 7, 9}), ([7], {EOS, 7})]
)
def test_end_tokens_are_the_tokenizers_and_the_generation_configs(named: Any, expected: set[int]) -> None:
    model = tiny_model("qwen3")
    model.generation_config.eos_token_id = named
    assert end_tokens(model, char_tokenizer()) == expected


def test_no_end_token_is_an_error() -> None:
    model, tokenizer = tiny_model("qwen3"), char_tokenizer()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        end_tokens(model, tokenizer)


def test_load_model_is_float32_without_dropout(tmp_path: Path) -> None:
    folder = save_model(tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).to(torch.bfloat16), tmp_path)
    model = load_model(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert not model.training


def test_load_tokenizer(model_folder: Path) -> None:
    assert load_tokenizer(model_folder)("1+2=")["input_ids"] == [3, 12, 4, 13]


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.parametrize("place", ["missing folder", "empty folder", "unknown hub id"])
def test_what_cannot_be_loaded_is_one_line_that_names_it(load: Any, place: str, tmp_path: Path) -> None:
    where = {"missing folder": str(tmp_path / "none"), "empty folder": str(tmp_path), "unknown hub id": "no/where"}
    with pytest.raises(ConfigError) as caught:
        load(where[place])
    message = str(caught.value)
    assert message.startswith(f"model.id or model.path={where[place]} ")
    assert "\n" not in message


def test_a_missing_model_says_what_to_do_offline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"point model\.path= at a local folder"):
        load_model(tmp_path / "none")


def test_a_weight_file_that_was_cut_is_named(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.path=.*cut has a damaged weight file .*: copy it again"):
        load_model(tmp_path / "cut")


def test_the_temperature_divides_the_logits_by_hand() -> None:
    # Over two equal logits and one ln 4 above them: 4/6 at temperature 1, 2/4 at temperature 2.
    model = tiny_model("gpt2")
    with torch.no_grad():
        # The hidden state is (1, 0, 0, ...) everywhere, so that the logits are the head's first column.
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.eye(32)[0])
        model.lm_head.weight[:, 0] = -1000.0
        model.lm_head.weight[2:4, 0] = 0.0
        model.lm_head.weight[4, 0] = math.log(4)
    minibatch = minibatch_of([make_group("a", [2], [[4]])])
    for temperature, probability in ((1.0, 4 / 6), (2.0, 2 / 4)):
        (((score,),),) = packed_logprobs(make_policy(model, temperature=temperature), minibatch, budget=10)
        assert score.exp().item() == pytest.approx(probability, rel=1e-6)
