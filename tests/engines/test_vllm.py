"""vLLM as a sampler: the same records, seeds and log-probs as the embedded one, in each of its three places."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import EOS, make_prompt, minibatch_of, sample_groups
from vllm_cases import BuildEngine, perturbed_learner, same

from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.logprobs import log_softmax
from grpo_lab.rollout import EngineError
from grpo_lab.rollout.hf import restrict
from grpo_lab.rollout.vllm.engine import VllmEngine
from grpo_lab.sync import hand_over, prove_by_scoring
from grpo_lab.types import Group, Rollout, Sampling
from grpo_lab.weights import digest

PROMPTS = [make_prompt("a", [3, 12, 4, 13]), make_prompt("b", [9, 13]), make_prompt("c", list(range(2, 14)) * 3)]
PLAIN = Sampling(temperature=1.0, max_tokens=16)


def largest_difference(learner: TorchLearner, groups: Sequence[Group]) -> float:
    scores = learner.logprobs(minibatch_of(groups))
    return max(
        float(np.abs(row - rollout.behaviour_logprobs).max())
        for group, rows in zip(groups, scores, strict=True)
        for rollout, row in zip(group.rollouts, rows, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_learners(worker: VllmEngine, temperature: float) -> None:
    learner = perturbed_learner(temperature)
    hand_over(worker, learner.weights(), version=3)
    groups = sample_groups(worker, PROMPTS, group_size=8, sampling=Sampling(temperature=temperature, max_tokens=24))
    assert largest_difference(learner, groups) < 1e-5


def test_records(worker: VllmEngine) -> None:
    hand_over(worker, perturbed_learner().weights(), version=7)
    rollouts = [r for g in sample_groups(worker, PROMPTS, group_size=16, sampling=PLAIN) for r in g.rollouts]
    for rollout in rollouts:
        assert rollout.token_ids.dtype == np.int32
        assert rollout.behaviour_logprobs.dtype == np.float32
        assert rollout.token_ids.shape == rollout.behaviour_logprobs.shape
        assert rollout.policy_version == 7
        ends = np.flatnonzero(rollout.token_ids == EOS)
        if rollout.finish_reason == "stop":
            assert ends.tolist() == [len(rollout.token_ids) - 1]
        else:
            assert len(rollout.token_ids) == 16
            assert len(ends) == 0
        assert rollout.text == worker.tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)
        assert "<eos>" not in rollout.text
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}


def test_a_response_draws_from_its_own_seed(worker: VllmEngine) -> None:
    def draw(seeds: list[int], size: int, chosen: Sequence[int] = (0, 1, 2)) -> list[list[Rollout]]:
        prompts = [PROMPTS[index] for index in chosen]
        return worker.generate(prompts, group_size=size, sampling=PLAIN, seeds=seeds)

    far = 2**62 - 10
    first = draw([5, 1000, far], 4)
    assert all(same(one, other) for one, other in zip(first, draw([5, 1000, far], 4), strict=True))
    assert not any(same(one, other) for one, other in zip(first, draw([6000, 7000, 8000], 4), strict=True))
    # Member j is the only response to a request with seed s + j, alone in its batch.
    for member in range(4):
        assert same(draw([far + member], 1, [2])[0], [first[2][member]])
    assert worker.generate([], group_size=4, sampling=PLAIN, seeds=[]) == []


def logits_along(model: Any, group: Group, rollout: Rollout) -> torch.Tensor:
    """Logits [T, V] before each token of a response."""
    ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids.tolist()]])
    return model(input_ids=ids, use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1].detach()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, max_tokens=12, top_k=3),
        Sampling(temperature=1.2, max_tokens=12, top_p=0.6),
        Sampling(temperature=1.0, max_tokens=12, top_p=0.8, top_k=5),
    ],
)
def test_evaluation_may_cut_the_distribution(worker: VllmEngine, sampling: Sampling) -> None:
    learner = perturbed_learner()
    hand_over(worker, learner.weights(), version=1)
    cut = 0
    for group in sample_groups(worker, PROMPTS, group_size=8, sampling=sampling):
        for rollout in group.rollouts:
            whole = log_softmax(logits_along(learner.policy.model, group, rollout), sampling.temperature)
            kept = restrict(whole, sampling)
            cut += int((kept == -torch.inf).sum())
            wanted = kept.gather(-1, torch.tensor(rollout.token_ids.tolist())[:, None])[:, 0]
            torch.testing.assert_close(torch.from_numpy(rollout.behaviour_logprobs), wanted, atol=2e-5, rtol=0)
    assert cut > 100


def test_more_prompts_than_a_step_prefills(worker: VllmEngine) -> None:
    """Twelve prompts of 40 tokens, of which a step takes 256: the seventh would be cut in two."""
    prompts = [make_prompt(str(n), [2 + (n + k * k) % 9 for k in range(40)]) for n in range(12)]
    sampling, seeds = Sampling(temperature=1.0, max_tokens=4), [10 * n for n in range(12)]
    together = worker.generate(prompts, group_size=2, sampling=sampling, seeds=seeds)
    alone = [worker.generate([prompts[n]], group_size=2, sampling=sampling, seeds=[seeds[n]])[0] for n in range(12)]
    assert all(same(one, other) for one, other in zip(together, alone, strict=True))
    assert worker.restarted == 0


def test_greedy(worker: VllmEngine) -> None:
    learner = perturbed_learner()
    hand_over(worker, learner.weights(), version=1)
    for group in sample_groups(worker, PROMPTS, group_size=3, sampling=Sampling(temperature=0.0, max_tokens=12)):
        assert len(group.rollouts) == 3
        assert same(group.rollouts, [group.rollouts[0]] * 3)
        whole = log_softmax(logits_along(learner.policy.model, group, group.rollouts[0]), 1.0)
        best, tokens = whole.max(-1)
        assert tokens.tolist() == group.rollouts[0].token_ids.tolist()
        torch.testing.assert_close(torch.from_numpy(group.rollouts[0].behaviour_logprobs), best, atol=2e-5, rtol=0)


def test_what_does_not_fit_is_refused(worker: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"together 65 tokens do not fit vLLM's 64: raise rollout.vllm.max_model_len"):
        worker.generate(
            [make_prompt("long", [3] * 40)],
            group_size=1,
            sampling=Sampling(temperature=1.0, max_tokens=25),
            seeds=[0],
        )
    with pytest.raises(EngineError, match="too low for vLLM, which would sample at"):
        worker.generate(PROMPTS, group_size=1, sampling=Sampling(temperature=1e-3, max_tokens=4), seeds=[0, 1, 2])


# --- the other two places ---------------------------------------------------------------------------------------


def test_a_server_answers_as_a_worker_does(server: VllmEngine, worker: VllmEngine) -> None:
    learner = perturbed_learner()
    for engine in (server, worker):
        hand_over(engine, learner.weights(), version=4)
    served = sample_groups(server, PROMPTS, group_size=8, sampling=PLAIN)
    assert largest_difference(learner, served) < 1e-5
    assert prove_by_scoring(learner, server, served) < 1e-5
    for one, other in zip(served, sample_groups(worker, PROMPTS, group_size=8, sampling=PLAIN), strict=True):
        assert [a.token_ids.tolist() for a in one.rollouts] == [b.token_ids.tolist() for b in other.rollouts]
        assert [a.finish_reason for a in one.rollouts] == [b.finish_reason for b in other.rollouts]
    assert server.digests() == {name: digest(name, tensor) for name, tensor in learner.weights()}
    greedy = sample_groups(server, PROMPTS, group_size=2, sampling=Sampling(temperature=0.0, max_tokens=8))
    assert all(same(group.rollouts, [group.rollouts[0]] * 2) for group in greedy)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_in_process_leaves_the_process_as_it_was(
    build: BuildEngine, worker: VllmEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "0")
    before, threads = dict(os.environ), torch.set_num_threads
    torch.manual_seed(3)
    state, drawn = torch.get_rng_state(), random.getstate()
    engine = build("rollout.vllm.mode=in_process")
    assert dict(os.environ) == before
    assert torch.set_num_threads is threads
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == drawn

    learner = perturbed_learner()
    for each in (engine, worker):
        hand_over(each, learner.weights(), version=2)
    assert engine.digests() is None
    groups = sample_groups(engine, PROMPTS, group_size=4, sampling=PLAIN)
    assert prove_by_scoring(learner, engine, groups) < 1e-5
    for one, other in zip(groups, sample_groups(worker, PROMPTS, group_size=4, sampling=PLAIN), strict=True):
        assert same(one.rollouts, other.rollouts)
    assert (tmp_path / "vllm.log").stat().st_size > 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_in_process_a_tensor_is_used_before_the_next_is_asked_for(build: BuildEngine) -> None:
    """vLLM holds on to the parts of a fused weight; a learner that gathers lets each go at once."""
    engine = build("rollout.vllm.mode=in_process")
    learner = perturbed_learner()

    def passing() -> Any:
        for name, tensor in learner.weights():
            gathered = tensor.clone()
            yield name, gathered
            gathered.fill_(float("nan"))

    hand_over(engine, passing(), version=1)
    assert prove_by_scoring(learner, engine, sample_groups(engine, PROMPTS, group_size=2, sampling=PLAIN)) < 1e-5
