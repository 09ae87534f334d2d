"""The embedded sampler: what it records is what it drew from, and every response is its own.

Log-probs are compared with the learner's policy to 1e-5 nats: the two compute the same in another order (a cache and
prompts apart from what follows here, packed rows there), and float32 sums of a few dozen terms near 10 differ by some
1e-6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    EOS,
    VOCABULARY,
    char_tokenizer,
    make_learner,
    make_policy,
    make_prompt,
    minibatch_of,
    packed_logprobs,
    preset,
    sample_groups,
    tiny_model,
)
from torch import Tensor

from grpo_lab.rollout import EngineError, cache
from grpo_lab.rollout.hf import COMPACT_SHARE, UNIFORM_BLOCK, VOCABULARY_BLOCK, HfEngine, draw, invert, restrict
from grpo_lab.types import Rollout, Sampling
from grpo_lab.weights import digest

PROMPTS = [
    make_prompt("a", [3, 12, 4, 13]),
    make_prompt("b", [9]),
    make_prompt("c", [5, 6, 7, 12, 8, 8, 13]),
    make_prompt("d", [2, 13]),
]
TRAINING = Sampling(temperature=1.0, max_tokens=24)


def make_engine(model: Any | None = None, *, max_rows: int = 64) -> HfEngine:
    return HfEngine(model or tiny_model("qwen3"), char_tokenizer(), max_rows=max_rows)


def tokens(rollouts: list[list[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.token_ids.tolist() for rollout in group] for group in rollouts]


def responses(engine: HfEngine, sampling: Sampling = TRAINING, *, group_size: int = 4) -> list[list[Rollout]]:
    return engine.generate(PROMPTS, group_size=group_size, sampling=sampling, seeds=[0, 1000, 2000, 3000])


@contextmanager
def forwards(model: Any) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments of every pass through the model's layers."""
    calls: list[dict[str, Any]] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


# --- log-probs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "mistral"])
def test_recorded_logprobs_are_the_learners(architecture: str, temperature: float) -> None:
    model = tiny_model(architecture)
    sampling = Sampling(temperature=temperature, max_tokens=24)
    minibatch = minibatch_of(sample_groups(make_engine(model), PROMPTS, group_size=4, sampling=sampling))
    with torch.no_grad():
        scores = packed_logprobs(make_policy(model, temperature=temperature), minibatch, budget=1000)
    for group, row in zip(minibatch.groups, scores, strict=True):
        for rollout, score in zip(group.rollouts, row, strict=True):
            assert rollout.behaviour_logprobs.dtype == np.float32
            np.testing.assert_allclose(rollout.behaviour_logprobs, score.numpy(), rtol=0, atol=1e-5)


def positions(engine: HfEngine) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first two passes over a short prompt beside a long one, two responses each."""
    with forwards(engine.model) as calls:
        engine.generate(
            [make_prompt("short", [3, 4, 5]), make_prompt("long", [3, 4, 5, 6, 7])],
            group_size=2,
            sampling=Sampling(temperature=1.0, max_tokens=2),
            seeds=[0, 10],
        )
    prefill, decode = calls
    return prefill, decode


def test_positions_of_prompts_of_unequal_length() -> None:
    prefill, decode = positions(make_engine())
    assert prefill["input_ids"].tolist() == [[3, 4, 5, 0, 0], [3, 4, 5, 6, 7]]
    assert prefill["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert decode["position_ids"].tolist() == [[3], [3], [5], [5]]


def test_positions_where_attention_cannot_be_replaced() -> None:
    prefill, decode = positions(make_engine(tiny_model("mistral")))
    assert prefill["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert prefill["position_ids"][0, 2:].tolist() == [0, 1, 2]
    assert prefill["position_ids"][1].tolist() == [0, 1, 2, 3, 4]
    assert decode["position_ids"].tolist() == [[3], [3], [5], [5]]


@pytest.mark.parametrize("copied", [0, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_prompts_shared_or_copied_give_the_learners_logprobs(
    monkeypatch: pytest.MonkeyPatch, copied: int, kv_heads: int
) -> None:
    """Unequal prompts, rows that finish at different times and whole groups that do, heads that share keys."""
    monkeypatch.setattr(cache, "COPIED_PROMPT", copied)
    monkeypatch.setattr(cache, "ROOM", 3)
    model = tiny_model("qwen3", num_key_value_heads=kv_heads)
    groups = sample_groups(make_engine(model), PROMPTS, group_size=4, sampling=TRAINING)
    lengths = {len(rollout.token_ids) for group in groups for rollout in group.rollouts}
    assert len(lengths) > 4
    with torch.no_grad():
        scores = packed_logprobs(make_policy(model), minibatch_of(groups), budget=1000)
    for group, row in zip(groups, scores, strict=True):
        for rollout, score in zip(group.rollouts, row, strict=True):
            np.testing.assert_allclose(rollout.behaviour_logprobs, score.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 2, VOCABULARY_BLOCK, VOCABULARY_BLOCK + 1, 5 * VOCABULARY_BLOCK + 7])
def test_a_draw_inverts_the_running_sum(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(400, vocabulary, generator=generator).pow(4)
    # Runs of tokens that cannot be drawn, at the ends of blocks and of the vocabulary too.
    weights[:, vocabulary // 2 : -1] *= torch.rand(400, 1, generator=generator) > 0.5
    weights[:200, -1] = 0 if vocabulary > 1 else 1
    weights[weights.sum(-1) == 0, 0] = 1.0
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    drawn = invert(weights, uniforms)
    assert (weights.gather(-1, drawn[:, None]) > 0).all()
    running = weights.double().cumsum(-1)
    wanted = uniforms * running[:, -1]
    above = running.gather(-1, drawn[:, None]).squeeze(-1)
    below = above - weights.gather(-1, drawn[:, None]).squeeze(-1).double()
    rounding = 1e-6 * running[:, -1]
    assert (below <= wanted + rounding).all()
    assert (wanted <= above + rounding).all()


# --- random streams ---------------------------------------------------------------------------------------------


def test_the_same_call_twice_gives_the_same_bits() -> None:
    engine = make_engine()
    first, second = responses(engine), responses(engine)
    assert tokens(first) == tokens(second)
    for group, other in zip(first, second, strict=True):
        for a, b in zip(group, other, strict=True):
            assert a.behaviour_logprobs.tobytes() == b.behaviour_logprobs.tobytes()


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_neighbours_batching_and_padding_change_nothing(architecture: str) -> None:
    model = tiny_model(architecture)
    together = responses(make_engine(model))
    for index, prompt in enumerate(PROMPTS):
        seed = 1000 * index
        alone = make_engine(model, max_rows=4).generate([prompt], group_size=4, sampling=TRAINING, seeds=[seed])
        padded = make_engine(model).generate(
            [make_prompt("long", [4] * 20), prompt], group_size=4, sampling=TRAINING, seeds=[7, seed]
        )
        for other in (alone[0], padded[1]):
            assert tokens([other]) == tokens([together[index]])
            for a, b in zip(other, together[index], strict=True):
                np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, rtol=0, atol=1e-5)


def test_small_batches_in_order() -> None:
    model = tiny_model("qwen3")
    engine = make_engine(model, max_rows=9)
    with forwards(model) as calls:
        answers = responses(engine)
    # Nine rows hold two groups of four at a time.
    assert [len(call["input_ids"]) for call in calls if call["input_ids"].shape[1] > 1] == [2, 2]
    assert tokens(answers) == tokens(responses(make_engine(model)))


def test_members_and_prompts_differ() -> None:
    prompt = make_prompt("a", [3, 12, 4, 13])
    answers = make_engine().generate(
        [prompt, prompt], group_size=8, sampling=Sampling(temperature=1.0, max_tokens=16), seeds=[0, 8]
    )
    drawn = [tuple(rollout.token_ids.tolist()) for group in answers for rollout in group]
    assert len(drawn) == 16
    # A response that ends after a token or two may come twice; sixteen equal ones would show a shared stream.
    assert len(set(drawn)) >= 14


def test_member_j_draws_from_seed_plus_j() -> None:
    engine = make_engine()
    group = engine.generate(PROMPTS[:1], group_size=4, sampling=TRAINING, seeds=[50])[0]
    for j in range(4):
        (alone,) = engine.generate(PROMPTS[:1], group_size=1, sampling=TRAINING, seeds=[50 + j])[0]
        assert alone.token_ids.tolist() == group[j].token_ids.tolist()


def test_streams_go_on_past_a_block_of_uniforms() -> None:
    # A model that sees nothing and never ends: each token is a function of its uniform alone.
    model = tiny_model("qwen3", max_position_embeddings=256)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = make_engine(model)
    engine.end_tokens = frozenset({VOCABULARY})
    length = 2 * UNIFORM_BLOCK + 8
    (rollout,) = engine.generate(
        PROMPTS[:1], group_size=1, sampling=Sampling(temperature=1.0, max_tokens=length), seeds=[5]
    )[0]
    assert len(rollout.token_ids) == length
    blocks = [rollout.token_ids[start : start + UNIFORM_BLOCK].tolist() for start in (0, UNIFORM_BLOCK)]
    assert blocks[0] != blocks[1]
    for block, ids in enumerate(blocks):
        uniforms = np.random.Generator(np.random.Philox(key=[5, block])).random(UNIFORM_BLOCK)
        assert ids == (uniforms * VOCABULARY).astype(int).tolist()


# --- where responses end ----------------------------------------------------------------------------------------


def test_the_end_token_is_kept_once_and_last() -> None:
    rollouts = [rollout for group in responses(make_engine()) for rollout in group]
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons == {"stop", "length"}
    for rollout in rollouts:
        ids = rollout.token_ids.tolist()
        assert len(ids) == len(rollout.behaviour_logprobs) <= 24
        assert rollout.token_ids.dtype == np.int32
        if rollout.finish_reason == "stop":
            assert ids.index(EOS) == len(ids) - 1
        else:
            assert EOS not in ids
            assert len(ids) == 24


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    engine = make_engine()
    # Every token ends a response: each is one token long, at a limit of one.
    engine.end_tokens = frozenset(range(VOCABULARY))
    for group in responses(engine, Sampling(temperature=1.0, max_tokens=1)):
        assert [(len(rollout.token_ids), rollout.finish_reason) for rollout in group] == [(1, "stop")] * 4


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens_is_obeyed_and_a_prefix(limit: int) -> None:
    engine = make_engine()
    for short, long in zip(
        responses(engine, Sampling(temperature=1.0, max_tokens=limit)), responses(engine), strict=True
    ):
        for a, b in zip(short, long, strict=True):
            assert a.token_ids.tolist() == b.token_ids[:limit].tolist()


def test_text_is_the_tokens_without_the_end() -> None:
    for group in responses(make_engine()):
        for rollout in group:
            ids = [token for token in rollout.token_ids.tolist() if token not in (0, EOS)]
            assert rollout.text == "".join("0123456789+=#"[token - 2] for token in ids)


# --- the distribution -------------------------------------------------------------------------------------------


def test_greedy_is_the_argmax_loop() -> None:
    model = tiny_model("qwen3")
    answers = responses(make_engine(model), Sampling(temperature=0.0, max_tokens=12), group_size=2)
    for prompt, group in zip(PROMPTS, answers, strict=True):
        ids, expected, scores = list(prompt.token_ids), [], []
        while len(expected) < 12 and EOS not in expected:
            with torch.no_grad():
                log_probs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            expected.append(int(log_probs.argmax()))
            scores.append(float(log_probs.max()))
            ids.append(expected[-1])
        for rollout in group:
            assert rollout.token_ids.tolist() == expected
            np.testing.assert_allclose(rollout.behaviour_logprobs, scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_first_tokens_have_the_models_distribution(temperature: float) -> None:
    model, count = tiny_model("qwen3"), 8192
    (group,) = make_engine(model, max_rows=count).generate(
        PROMPTS[:1], group_size=count, sampling=Sampling(temperature=temperature, max_tokens=1), seeds=[0]
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0].token_ids])).logits[0, -1].double()
    expected = count * torch.softmax(logits / temperature, -1).numpy()
    seen = np.bincount([int(rollout.token_ids[0]) for rollout in group], minlength=VOCABULARY)
    often = expected >= 5
    chi_square = ((seen[often] - expected[often]) ** 2 / expected[often]).sum()
    # Exceeded by one seed in a thousand at 14 degrees of freedom; the seeds are fixed.
    assert often.sum() >= 8
    assert chi_square < 36.1


def test_draw_has_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.125])
    uniforms = torch.from_numpy(np.random.default_rng(0).random(20_000))
    drawn, log_probs = draw(probabilities.log().expand(20_000, -1), uniforms, Sampling(temperature=1.0, max_tokens=1))
    seen = torch.bincount(drawn, minlength=5)
    assert seen[2] == 0
    expected = 20_000 * probabilities[probabilities > 0]
    # 99.9 % quantile at 3 degrees of freedom.
    assert float(((seen[probabilities > 0] - expected) ** 2 / expected).sum()) < 16.3
    torch.testing.assert_close(log_probs, probabilities.log()[drawn])


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.2501, 3), (0.7499, 3), (0.7501, 4), (1 - 2**-53, 4)]
)
def test_draw_inverts_the_cumulative_distribution(uniform: float, token: int) -> None:
    # Impossible tokens at both ends and between; the smallest and the largest uniform number there are.
    logits = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).log()
    drawn, log_prob = draw(
        logits, torch.tensor([uniform], dtype=torch.float64), Sampling(temperature=1.0, max_tokens=1)
    )
    assert drawn.tolist() == [token]
    assert log_prob.item() == pytest.approx({1: np.log(0.25), 3: np.log(0.5), 4: np.log(0.25)}[token])


def test_draw_divides_by_the_temperature() -> None:
    # Probabilities 1/5 and 4/5; at temperature 2 the odds are sqrt(4): 1/3 and 2/3; at 1/2 they are 16: 1/17, 16/17.
    logits = torch.tensor([[0.2, 0.8]]).log()
    for temperature, first in ((1.0, 1 / 5), (2.0, 1 / 3), (0.5, 1 / 17)):
        for uniform, token in ((first - 1e-6, 0), (first + 1e-6, 1)):
            drawn, log_prob = draw(
                logits,
                torch.tensor([uniform], dtype=torch.float64),
                Sampling(temperature=temperature, max_tokens=1),
            )
            assert drawn.tolist() == [token]
            assert log_prob.exp().item() == pytest.approx((first, 1 - first)[token], rel=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (1, 1.0, [0, 1, 0, 0]),
        (2, 1.0, [0, 4 / 7, 0, 3 / 7]),
        (9, 1.0, [0.1, 0.4, 0.2, 0.3]),
        # The smallest set that holds 0.35 is {0.4}; 0.6 needs 0.3 as well; 0.85 needs three.
        (0, 0.35, [0, 1, 0, 0]),
        (0, 0.6, [0, 4 / 7, 0, 3 / 7]),
        (0, 0.85, [0, 4 / 9, 2 / 9, 3 / 9]),
        # top_p acts on what top_k left: 4/9, 3/9, 2/9, of which 0.7 is held by the first two.
        (3, 0.7, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_restrict_by_hand(top_k: int, top_p: float, expected: list[float]) -> None:
    log_probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.3, 0.2, 0.4, 0.1]]).log()
    sampling = Sampling(temperature=1.0, max_tokens=1, top_k=top_k, top_p=top_p)
    kept = restrict(log_probs, sampling).exp()
    # The second row is the first in reverse order.
    np.testing.assert_allclose(kept.numpy(), [expected, expected[::-1]], rtol=0, atol=1e-6)


def test_top_p_that_is_met_exactly_keeps_no_more() -> None:
    """Powers of two, which sum exactly."""
    log_probs = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    kept = restrict(log_probs, Sampling(temperature=1.0, max_tokens=1, top_p=0.5)).exp()
    assert kept.tolist() == [[1.0, 0.0, 0.0]]


def test_restricted_sampling_records_the_restricted_distribution() -> None:
    model = tiny_model("qwen3")
    sampling = Sampling(temperature=0.8, max_tokens=1, top_k=2)
    (group,) = make_engine(model).generate(PROMPTS[:1], group_size=64, sampling=sampling, seeds=[0])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0].token_ids])).logits[0, -1] / 0.8
    best = torch.topk(logits, 2)
    log_probs = dict(zip(best.indices.tolist(), torch.log_softmax(best.values, -1).tolist(), strict=True))
    assert {int(rollout.token_ids[0]) for rollout in group} == set(log_probs)
    for rollout in group:
        assert rollout.behaviour_logprobs[0] == pytest.approx(log_probs[int(rollout.token_ids[0])], abs=1e-5)


# --- no more work than needed -----------------------------------------------------------------------------------


def test_a_prompt_is_computed_once_for_its_group() -> None:
    engine = make_engine()
    with forwards(engine.model) as calls:
        responses(engine)
    assert calls[0]["input_ids"].shape == (4, 7)
    assert all(call["input_ids"].shape[1] == 1 for call in calls[1:])


def test_finished_rows_leave_the_batch() -> None:
    engine = make_engine()
    with forwards(engine.model) as calls:
        lengths = np.array([len(rollout.token_ids) for group in responses(engine) for rollout in group])
    rows = [len(call["input_ids"]) for call in calls[1:]]
    assert len(rows) == lengths.max() - 1
    # The pass after `step` draws serves the responses that are longer than that.
    running = [int((lengths > step).sum()) for step in range(1, lengths.max())]
    assert min(running) < 16
    for forwarded, alive in zip(rows, running, strict=True):
        assert alive <= forwarded
        assert forwarded * (1 - COMPACT_SHARE) < alive or forwarded == alive
    assert sum(rows) < 16 * len(rows)


# --- weights ----------------------------------------------------------------------------------------------------


def test_the_engine_has_weights_of_its_own(model_folder: Path) -> None:
    engine = HfEngine.from_folder(model_folder, max_rows=64)
    learner = make_learner(tiny_model("qwen3"), lr=0.01)
    before, hashed = responses(engine), engine.digests()
    minibatch = minibatch_of(sample_groups(engine, PROMPTS, group_size=4, sampling=TRAINING))
    for update in range(3):
        learner.step(minibatch, preset("ggpo_reward_only"), update=update, reference=None, old=None)
    after = responses(engine)
    assert engine.digests() == hashed
    assert tokens(after) == tokens(before)
    assert engine.policy_version == 0

    engine.load_weights(learner.weights(), version=3)
    assert engine.digests() != hashed
    assert tokens(responses(engine)) != tokens(before)
    held = engine.digests()
    learner.step(minibatch, preset("ggpo_reward_only"), update=3, reference=None, old=None)
    assert engine.digests() == held
    assert {rollout.policy_version for group in responses(engine) for rollout in group} == {3}


def test_a_borrower_samples_from_the_very_tensors() -> None:
    learner = make_learner(tiny_model("qwen3"), lr=0.01)
    engine = HfEngine(tiny_model("qwen3", seed=5), char_tokenizer(), max_rows=64, borrows=True)
    engine.load_weights(learner.weights(), version=3)
    theirs, held = learner.policy.model.parameters(), engine.model.parameters()
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(theirs, held, strict=True))
    assert engine.digests() == {name: digest(name, tensor) for name, tensor in learner.weights()}


def bad_weights(model: Any, fault: str) -> dict[str, Tensor]:
    weights = {name: parameter.detach() + 1 for name, parameter in model.named_parameters(remove_duplicate=False)}
    # The last of them, so that a sampler that copies as it goes has copied the others.
    name = list(weights)[-1]
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.layers.9.mlp.up_proj.weight"] = weights[name]
    else:
        weights[name] = weights[name][:-1]
    return weights


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"version 5 do not fit the sampler: lm_head\.weight did not come"),
        ("unknown", r"it has no model\.layers\.9\.mlp\.up_proj\.weight"),
        ("shape", r"lm_head\.weight has shape \(14, 32\), the sampler's has \(15, 32\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(fault: str, message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.load_weights(bad_weights(engine.model, fault).items(), version=5)
    assert engine.policy_version == 0


# --- the model folder's generation config -----------------------------------------------------------------------


def folder_with(model_folder: Path, tmp_path: Path, **generation: Any) -> Path:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_sampling_values_of_the_folder_have_no_influence(model_folder: Path, tmp_path: Path) -> None:
    folder = folder_with(
        model_folder, tmp_path, top_k=2, top_p=0.5, repetition_penalty=1.5, temperature=0.1, eos_token_id=EOS
    )
    ours, plain = (HfEngine.from_folder(place, max_rows=64) for place in (folder, model_folder))
    assert tokens(responses(ours)) == tokens(responses(plain))


def test_a_second_end_token_of_the_folder_ends_responses(model_folder: Path, tmp_path: Path) -> None:
    engine = HfEngine.from_folder(folder_with(model_folder, tmp_path, eos_token_id=[EOS, 5]), max_rows=64)
    assert engine.end_tokens == {EOS, 5}
    single = tokens(responses(HfEngine.from_folder(model_folder, max_rows=64), group_size=16))
    both = responses(engine, group_size=16)
    last = {rollout.token_ids[-1] for group in both for rollout in group if rollout.finish_reason == "stop"}
    assert last == {EOS, 5}
    # The same draws, cut after the first token of either kind.
    for group, longer in zip(tokens(both), single, strict=True):
        for ids, whole in zip(group, longer, strict=True):
            ends = [position for position, token in enumerate(whole) if token in (EOS, 5)]
            assert ids == whole[: ends[0] + 1 if ends else None]


@pytest.mark.parametrize("length", [3, cache.COPIED_PROMPT + 1])
def test_attention_over_the_cache_is_float32_under_autocast(length: int) -> None:
    """For prompts that are copied to their rows and for those that are not: the same to the last bit with autocast as
    without, where BF16 products would differ in the third digit."""
    made = torch.Generator().manual_seed(1)
    groups, m, kv, heads, dim = 2, 3, 2, 4, 8

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made).bfloat16()

    held = cache.GroupCache(torch.tensor([length, length - 1]), m)
    held.update(random(groups, kv, length, dim), random(groups, kv, length, dim), 0)
    held.update(random(groups * m, kv, 1, dim), random(groups * m, kv, 1, dim), 0)
    query = random(groups * m, heads, 1, dim).float()

    class Module:
        layer_idx = 0

    plain = held.attend(Module, query, query, query, None)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = held.attend(Module, query, query, query, None)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, plain, rtol=0, atol=0)


def test_a_sampler_that_is_closed_stops_at_its_next_token() -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineError, match="the sampler is closed"):
        engine.generate(
            [make_prompt("a", [3, 4])], group_size=2, sampling=Sampling(temperature=1.0, max_tokens=4), seeds=[1]
        )
