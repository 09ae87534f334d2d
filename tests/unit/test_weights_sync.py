"""Fingerprints, and a sync that is proved: by hash, and by scoring what the engine samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    char_tokenizer,
    make_learner,
    make_prompt,
    minibatch_of,
    preset,
    random_groups,
    sample_groups,
    tiny_model,
)
from torch import Tensor

from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.sync import SyncError, hand_over, prove_by_scoring
from grpo_lab.types import Group, Sampling
from grpo_lab.weights import Weights, combine, copied, digest, fingerprint

PROMPTS = [make_prompt("a", [3, 12, 4, 13]), make_prompt("b", [9, 13])]


# --- fingerprints -----------------------------------------------------------------------------------------------


def some_weights() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2.5), "c": torch.zeros(0), "d": torch.ones(4)}


def test_the_order_does_not_matter() -> None:
    weights = some_weights()
    assert fingerprint(weights.items()) == fingerprint(reversed(weights.items()))
    assert fingerprint(weights.items()) == fingerprint(some_weights().items())


def flip_one_bit(weights: dict[str, Tensor]) -> None:
    weights["a"].view(torch.int32)[1, 2] ^= 1


def rename(weights: dict[str, Tensor]) -> None:
    weights["e"] = weights.pop("d")


def swap_names(weights: dict[str, Tensor]) -> None:
    weights["a"], weights["b"] = weights["b"], weights["a"]


def reshape(weights: dict[str, Tensor]) -> None:
    weights["a"] = weights["a"].reshape(3, 2)


def same_bytes_of_another_type(weights: dict[str, Tensor]) -> None:
    weights["d"] = weights["d"].view(torch.int32)


def narrower(weights: dict[str, Tensor]) -> None:
    weights["d"] = weights["d"].to(torch.bfloat16)


def negative_zero(weights: dict[str, Tensor]) -> None:
    weights["a"][0, 0] = -0.0


def drop(weights: dict[str, Tensor]) -> None:
    del weights["c"]


@pytest.mark.parametrize(
    "change",
    [flip_one_bit, rename, swap_names, reshape, same_bytes_of_another_type, narrower, negative_zero, drop],
)
def test_any_difference_shows(change: Callable[[dict[str, Tensor]], None]) -> None:
    changed = some_weights()
    change(changed)
    assert fingerprint(changed.items()) != fingerprint(some_weights().items())


def test_how_a_tensor_lies_in_memory_does_not_matter() -> None:
    weights = some_weights()
    weights["a"] = weights["a"].T.contiguous().T
    assert not weights["a"].is_contiguous()
    assert fingerprint(weights.items()) == fingerprint(some_weights().items())


def test_bfloat16_and_parameters() -> None:
    weights = [("a", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))]
    assert fingerprint(weights) == fingerprint([("a", torch.ones(3, dtype=torch.bfloat16))])


def test_a_copy_made_in_passing_is_left_alone() -> None:
    weights = {"a": torch.nn.Parameter(torch.ones(3))}
    copies: dict[str, Tensor] = {}
    assert [tensor is weights[name] for name, tensor in copied(weights.items(), copies)] == [True]
    with torch.no_grad():
        weights["a"].add_(1)
    assert copies["a"].tolist() == [1, 1, 1]
    assert not copies["a"].requires_grad


# --- engines with a fault ---------------------------------------------------------------------------------------


class KeepsOldWeights(HfEngine):
    def load_weights(self, weights: Weights, *, version: int) -> None:
        self.policy_version = version


class LoadsHalf(HfEngine):
    def load_weights(self, weights: Weights, *, version: int) -> None:
        given = list(weights)
        held = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in given[: len(given) // 2]:
                held[name].copy_(tensor)
        self.policy_version = version


class SaysItHoldsThem(HfEngine):
    """Computes with weights that are 1 % off, and answers with the hash of what it was given."""

    claimed: dict[str, str]

    def load_weights(self, weights: Weights, *, version: int) -> None:
        given = dict(weights)
        self.claimed = {name: digest(name, tensor) for name, tensor in given.items()}
        super().load_weights(((name, tensor * 1.01) for name, tensor in given.items()), version=version)

    def digests(self) -> dict[str, str]:
        return self.claimed


class CannotReadBack(KeepsOldWeights):
    def digests(self) -> None:
        return None


def trained_learner() -> TorchLearner:
    """A learner one update away from the weights that every engine here starts with."""
    learner = make_learner(tiny_model("qwen3"), lr=1e-3)
    engine = make_engine(HfEngine)
    minibatch = minibatch_of(
        sample_groups(engine, PROMPTS, group_size=4, sampling=Sampling(temperature=1.0, max_tokens=8))
    )
    learner.step(minibatch, preset("ggpo_reward_only"), update=0, reference=None, old=None)
    return learner


def make_engine(kind: type[HfEngine]) -> Any:
    return kind(tiny_model("qwen3"), char_tokenizer(), max_rows=64)


def proof(engine: HfEngine, temperature: float = 1.0) -> list[Group]:
    sampling = Sampling(temperature=temperature, max_tokens=16)
    return sample_groups(engine, PROMPTS, group_size=4, sampling=sampling)


def test_a_right_engine_passes_both_checks() -> None:
    learner, engine = trained_learner(), make_engine(HfEngine)
    before = combine(engine.digests())
    hashed = hand_over(engine, learner.weights(), version=1)
    assert hashed == fingerprint(learner.weights()) == combine(engine.digests()) != before
    assert engine.policy_version == 1
    assert prove_by_scoring(learner, engine, proof(engine)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (KeepsOldWeights, "25 of 25 differ in the engine, the first is lm_head.weight"),
        (LoadsHalf, "12 of 25 differ in the engine, the first is model.layers.1"),
    ],
)
def test_weights_that_did_not_arrive_stop_the_run(kind: type[HfEngine], told: str) -> None:
    learner, engine = trained_learner(), make_engine(kind)
    with pytest.raises(SyncError) as caught:
        hand_over(engine, learner.weights(), version=8)
    message = str(caught.value)
    assert "weights of version 8 did not arrive" in message
    assert told in message
    assert "resume=" in message


class LacksOne(HfEngine):
    def digests(self) -> dict[str, str]:
        return {name: each for name, each in super().digests().items() if name != "lm_head.weight"}


def test_a_weight_that_the_engine_lacks_is_named() -> None:
    with pytest.raises(SyncError, match=r"1 of 25 differ in the engine, the first is lm_head.weight"):
        hand_over(make_engine(LacksOne), trained_learner().weights(), version=1)


class TakesBf16(HfEngine):
    """Records what it is given, in its own type."""

    given: dict[str, Tensor]

    def load_weights(self, weights: Weights, *, version: int) -> None:
        self.given = {name: tensor.clone() for name, tensor in weights}

    def digests(self) -> dict[str, str]:
        return {name: digest(name, tensor) for name, tensor in self.given.items()}


def test_an_engine_gets_weights_in_its_own_type() -> None:
    engine = make_engine(TakesBf16)
    engine.dtype = torch.bfloat16
    assert hand_over(engine, trained_learner().weights(), version=1) == combine(engine.digests())
    assert {tensor.dtype for tensor in engine.given.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("tokens", "scored"), [(40, 8), (4, 16)])
def test_a_proof_scores_eight_responses_and_64_tokens(
    tokens: int, scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def spy(_learner: Any, groups: Sequence[Group]) -> np.ndarray:
        asked.append(len(groups))
        return np.zeros(1)

    monkeypatch.setattr("grpo_lab.sync.first_log_ratios", spy)
    prove_by_scoring(trained_learner(), make_engine(HfEngine), random_groups([(3, (tokens, 5))] * 20))
    assert asked == [scored]


def test_a_hash_that_lies_is_found_by_scoring() -> None:
    learner, engine = trained_learner(), make_engine(SaysItHoldsThem)
    hand_over(engine, learner.weights(), version=8)
    sample = proof(engine)
    with pytest.raises(SyncError) as caught:
        prove_by_scoring(learner, engine, sample)
    lambdas = [
        abs(float(score) - float(recorded))
        # The first response of each group.
        for group, scores in zip(sample, learner.logprobs(minibatch_of(sample)), strict=True)
        for score, recorded in zip(scores[0], group.rollouts[0].behaviour_logprobs, strict=True)
    ]
    drift = sum(lambdas) / len(lambdas)
    assert drift > 1e-3
    message = str(caught.value)
    assert "version 8" in message
    assert f"{drift:.3g} nats a token" in message
    assert "tolerance 0.0001" in message
    assert "resume=" in message


def test_an_engine_that_cannot_be_read_back_is_left_to_scoring() -> None:
    learner, engine = trained_learner(), make_engine(CannotReadBack)
    assert hand_over(engine, learner.weights(), version=1) is None
    with pytest.raises(SyncError, match="does not sample from version 1"):
        prove_by_scoring(learner, engine, proof(engine))


def test_another_temperature_is_found_by_scoring() -> None:
    learner, engine = trained_learner(), make_engine(HfEngine)
    hand_over(engine, learner.weights(), version=1)
    with pytest.raises(SyncError, match="temperature"):
        prove_by_scoring(learner, engine, proof(engine, temperature=0.9))


def test_scores_that_are_no_numbers_prove_nothing() -> None:
    learner, engine = trained_learner(), make_engine(HfEngine)
    hand_over(engine, learner.weights(), version=1)
    sample = proof(engine)
    sample[1].rollouts[0].behaviour_logprobs[0] = float("nan")
    with pytest.raises(SyncError, match="differ by nan nats"):
        prove_by_scoring(learner, engine, sample)
