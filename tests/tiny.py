"""Tiny models, prompts, groups and minibatches for tests. Token 0 is <pad>, 1 is <eos>, 2 to 14 are `0123456789+=#`.

Weights are drawn wide (a standard deviation of 0.2), so that attention looks at something: with the usual 0.02 a model
answers almost evenly whatever it sees, and a wrong mask or position would hide below every tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from grpo_lab.composition import compose_run
from grpo_lab.config import LearnerConfig, TrainConfig
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.minibatches import Minibatch, make_minibatch, micro_batches, pack, plan_rows
from grpo_lab.objectives import Objective, build_objective
from grpo_lab.policy import Policy
from grpo_lab.rollout import RolloutEngine
from grpo_lab.types import Group, Problem, Prompt, Rollout, Sampling

PAD, EOS = 0, 1
CHARACTERS = "0123456789+=#"
VOCABULARY = 2 + len(CHARACTERS)
POSITIONS = 64
PRESETS = ("grpo", "grpo_rg", "grpo_tis", "agro", "ggpo", "ggpo_clip", "ggpo_reward_only")

_LLAMA_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {**_LLAMA_LIKE, "tie_word_embeddings": True},
    "llama": {**_LLAMA_LIKE, "tie_word_embeddings": False},
    "mistral": {**_LLAMA_LIKE, "sliding_window": 4},
    "gemma2": _LLAMA_LIKE,
    "gemma3_text": {
        **_LLAMA_LIKE,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS},
}


def char_tokenizer() -> Any:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def tiny_model(architecture: str, *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> Any:
    """Two layers, hidden size 32, random weights that depend on `seed` alone, float32, no dropout."""
    settings = {
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        **_SHAPES[architecture],
        **changes,
    }
    config = AutoConfig.for_model(architecture, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def save_model(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def make_prompt(name: str, token_ids: Sequence[int]) -> Prompt:
    problem = Problem(id=name, question=name, gold="0")
    return Prompt(problem=problem, text="", token_ids=tuple(token_ids))


def make_group(
    name: str,
    prompt: Sequence[int],
    responses: Sequence[Sequence[int]],
    *,
    rewards: Sequence[float] | None = None,
    behaviour: Sequence[Sequence[float]] | None = None,
) -> Group:
    """A group written by hand. Rewards are 1, 0, 1, 0, ... and behaviour log-probs -1 where none are given."""
    behaviour = behaviour or [[-1.0] * len(response) for response in responses]
    return Group(
        prompt=make_prompt(name, prompt),
        rollouts=tuple(
            Rollout(
                token_ids=np.array(response, dtype=np.int32),
                behaviour_logprobs=np.array(logprobs, dtype=np.float32),
                finish_reason="stop" if response[-1] == EOS else "length",
                policy_version=0,
                text="",
            )
            for response, logprobs in zip(responses, behaviour, strict=True)
        ),
        rewards=tuple(rewards or [float(j % 2 == 0) for j in range(len(responses))]),
        verdicts=tuple("wrong" for _ in responses),
        sequence=0,
    )


def random_groups(shapes: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0) -> list[Group]:
    """Groups p0, p1, ... of random tokens. A shape is the length of a prompt and of each of its responses."""
    rng = np.random.default_rng(seed)
    return [
        make_group(
            f"p{index}",
            rng.integers(2, VOCABULARY, prompt).tolist(),
            [rng.integers(2, VOCABULARY, length).tolist() for length in lengths],
            behaviour=[(-4 * rng.random(length)).tolist() for length in lengths],
        )
        for index, (prompt, lengths) in enumerate(shapes)
    ]


# Prompts and responses of very different lengths, responses of a single token among them.
UNEVEN = ((5, (3, 9, 1, 6)), (2, (7, 2, 2, 12)), (8, (1, 1, 5, 4)))


def minibatch_of(groups: Sequence[Group], *, index: int = 0, mask: bool = False) -> Minibatch:
    return make_minibatch(index, groups, mask_zero_variance=mask, mask_divisor="all")


def sample_groups(
    engine: RolloutEngine, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int = 0
) -> list[Group]:
    """Groups that the engine sampled, with rewards 1, 0, 1, 0, ..."""
    seeds = [seed + 1000 * index for index in range(len(prompts))]
    answers = engine.generate(prompts, group_size=group_size, sampling=sampling, seeds=seeds)
    return [
        Group(
            prompt=prompt,
            rollouts=tuple(rollouts),
            rewards=tuple(float(j % 2 == 0) for j in range(group_size)),
            verdicts=tuple("wrong" for _ in rollouts),
            sequence=index,
        )
        for index, (prompt, rollouts) in enumerate(zip(prompts, answers, strict=True))
    ]


def plain_logprobs(model: Any, group: Group, temperature: float) -> list[Tensor]:
    """The definition: each response alone behind its prompt, no padding, softmax over all logits / temperature."""
    scores = []
    for rollout in group.rollouts:
        prompt = len(group.prompt.token_ids)
        ids = torch.tensor([[*group.prompt.token_ids, *rollout.token_ids.tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
        scores.append(torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, prompt:, None])[:, 0])
    return scores


def make_policy(model: Any, *, temperature: float = 1.0, autocast: torch.dtype | None = None) -> Policy:
    # A chunk smaller than any minibatch here, so that chunks are always put together.
    return Policy(model, temperature=temperature, logit_chunk=7, autocast=autocast)


def packed_logprobs(policy: Policy, minibatch: Minibatch, *, budget: int) -> list[list[Tensor]]:
    """[G][m] log-probs [T] by the policy, through rows and micro-batches of `budget` positions."""
    scores: dict[tuple[int, int], Tensor] = {}
    for rows in micro_batches(plan_rows(minibatch, budget=budget, whole_groups=policy.whole_groups), budget=budget):
        batch = pack(minibatch, rows)
        logprobs, _ = policy.logprobs(batch)
        for row, response in enumerate(batch.responses):
            scores[response] = logprobs[row][batch.loss_mask[row]]
    return [[scores[g, j] for j in range(minibatch.group_size)] for g in range(len(minibatch.groups))]


def composed(*words: str) -> TrainConfig:
    """The configuration of a run with these words on its command line."""
    return compose_run(words)


def preset(name: str) -> Objective:
    config = composed(f"objective={name}")
    return build_objective(config.objective, max_response_tokens=config.rollout.max_response_tokens)


def learner_settings(**changes: Any) -> LearnerConfig:
    settings = {
        "engine": "torch_local",
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "weight_decay": 0.01,
        "grad_clip": 1.0,
        "lr_schedule": "constant",
        "warmup_updates": 0,
        "precision": "fp32",
        "micro_batch_tokens": 1000,
        "logit_chunk": 7,
        "zero_stage": 0,
        "offload_optimizer": False,
        "offload_parameters": False,
        "activation_checkpointing": False,
    }
    return LearnerConfig(**(settings | changes))


def make_learner(
    model: Any,
    *,
    temperature: float = 1.0,
    needs_reference: bool = True,
    updates: int | None = None,
    **settings: Any,
) -> TorchLearner:
    return TorchLearner(
        model,
        char_tokenizer(),
        settings=learner_settings(**settings),
        temperature=temperature,
        needs_reference=needs_reference,
        updates=updates,
    )
