"""The initial policy: a hub id, a local folder, or a small model made and warm-started here, then cached.

The made model learns the made task from worked answers until its sampled accuracy reaches a target: low enough that
reinforcement learning has something to do, high enough that most groups hold a correct answer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_lab.composition import config_hash
from grpo_lab.config import ArithmeticConfig, ConfigError, RecipeConfig, TrainConfig
from grpo_lab.evaluation.scoring import evaluate, scores
from grpo_lab.minibatches import Minibatch, make_minibatch, micro_batches, pack, plan_rows
from grpo_lab.policy import Policy
from grpo_lab.prompts import load_problems, render
from grpo_lab.prompts.arithmetic import VOCABULARY
from grpo_lab.rewards import Verifier
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.types import Group, Prompt, Rollout, Sampling

PAD, EOS = "<pad>", "<eos>"
# Bump when code changes what a recipe makes, so that no cached model of the old code is taken for one of the new.
RECIPE_VERSION = 1
CHECK_PROBLEMS = 256
# Problems that the warm start may train on: its own draw, so that few training problems (one in forty) were taught.
WARM_PROBLEMS = 20_000
WARM_DATA_SEED = 1_000_003


def prepare_model(config: TrainConfig, say: Callable[[str], None]) -> str:
    """A folder or hub id that `from_pretrained` loads.

    Raises:
        ConfigError: the model config names no source, or a recipe for another task than the made one.
    """
    model = config.model
    if model.path is not None:
        if not (Path(model.path) / "config.json").is_file():
            raise ConfigError(f"model.path={model.path} holds no config.json: it must be a Hugging Face model folder")
        return model.path
    if model.id is not None:
        return model.id
    if model.recipe is None:
        raise ConfigError(f"model={model.name} names no source: set model.path or model.id")
    if not isinstance(config.dataset, ArithmeticConfig):
        raise ConfigError(
            f"model={model.name} knows only the characters of the made task, not dataset={config.dataset.name}: choose "
            "dataset=arithmetic, or a model such as model=smollm2_135m"
        )
    task = warm_task(config.dataset)
    folder = Path(model.cache_dir).expanduser() / f"{model.name}-{recipe_key(model.recipe, task)}"
    if not (folder / "config.json").is_file():
        say(f"making the model {model.name} with a supervised warm start; later runs find it in {folder}")
        _make_into(folder, model.recipe, task, say)
    return str(folder)


def warm_task(dataset: ArithmeticConfig) -> ArithmeticConfig:
    """The made task as the warm start draws it: other problems, the same held-out ones left out."""
    available = min(WARM_PROBLEMS, dataset.train_problems)
    return replace(dataset, train_problems=available, test_problems=0, data_seed=WARM_DATA_SEED)


def recipe_key(recipe: RecipeConfig, task: ArithmeticConfig) -> str:
    return f"{config_hash(recipe)}-{config_hash(task)}-{RECIPE_VERSION}"


def make_tokenizer(template: str) -> Any:
    """One token a character, plus <pad> and <eos>; a real `PreTrainedTokenizerFast`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys([*VOCABULARY, *template.replace("{question}", "")])
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(recipe: RecipeConfig, tokenizer: Any) -> Any:
    """An untrained decoder of the recipe's shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        recipe.architecture,
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _make_into(folder: Path, recipe: RecipeConfig, task: ArithmeticConfig, say: Callable[[str], None]) -> None:
    """Make a model and move it into place whole, so that a killed run leaves no half model behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".making_", dir=folder.parent))
    try:
        model, tokenizer = warm_start(recipe, task, say)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        try:
            os.replace(temporary, folder)
        except OSError:
            # Another run made the same model meanwhile; both are equal.
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def warm_start(recipe: RecipeConfig, task: ArithmeticConfig, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Supervised training on worked answers, stopped where sampled accuracy reaches `recipe.warm_target`."""
    tokenizer = make_tokenizer(task.template)
    model = make_model(recipe, tokenizer)
    policy = Policy(model, temperature=1.0, logit_chunk=65536, autocast=None)
    prompts = render(load_problems(task).train, task, tokenizer, max_prompt_tokens=256).prompts
    checks = prompts[:CHECK_PROBLEMS]
    # A task of few problems has none to spare: it is then checked on what it was taught, which only decides the stop.
    lessons = prompts[CHECK_PROBLEMS:] if len(prompts) > 2 * CHECK_PROBLEMS else prompts
    answers = [
        np.array([*tokenizer(p.problem.solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
        for p in lessons
    ]
    engine = HfEngine(model, tokenizer, max_rows=CHECK_PROBLEMS)
    sampling = Sampling(temperature=1.0, max_tokens=max(len(answer) for answer in answers) + 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.warm_lr, weight_decay=0.0)
    order = np.random.Generator(np.random.Philox(key=[recipe.seed, WARM_DATA_SEED]))
    with Verifier(task.verifier, workers=1, timeout=5.0) as verifier:
        for step in range(1, recipe.warm_max_steps + 1):
            picked = order.integers(len(lessons), size=recipe.warm_batch)
            lesson = _lesson([lessons[k] for k in picked], [answers[k] for k in picked])
            _teach(policy, optimizer, lesson)
            if step % recipe.warm_check_every == 0:
                row = scores(evaluate(engine, verifier, checks, n=1, sampling=sampling, seed=recipe.seed), ks=(1,))
                say(f"warm start: step {step}, pass@1 {row['pass@1']:.3f} (stops at {recipe.warm_target:.2f})")
                if row["pass@1"] >= recipe.warm_target:
                    return model, tokenizer
    raise ConfigError(
        f"the warm start did not reach model.recipe.warm_target={recipe.warm_target} in "
        f"model.recipe.warm_max_steps={recipe.warm_max_steps} steps: raise the steps, or make the task easier "
        f"({asdict(task)['max_digits']} digits)"
    )


def _lesson(prompts: list[Prompt], answers: list[np.ndarray]) -> Minibatch:
    """Worked answers as groups of one response, so that they are packed and scored as rollouts are."""
    groups = [
        Group(
            prompt=prompt,
            rollouts=(
                Rollout(
                    token_ids=answer,
                    behaviour_logprobs=np.zeros(len(answer), dtype=np.float32),
                    finish_reason="stop",
                    policy_version=0,
                    text="",
                ),
            ),
            rewards=(1.0,),
            verdicts=("correct",),
            sequence=0,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return make_minibatch(0, groups, mask_zero_variance=False, mask_divisor="all")


def _teach(policy: Policy, optimizer: torch.optim.Optimizer, lesson: Minibatch) -> None:
    optimizer.zero_grad(set_to_none=True)
    for rows in micro_batches(plan_rows(lesson, budget=16384), budget=16384):
        logprobs, _ = policy.logprobs(pack(lesson, rows))
        (-logprobs.sum() / lesson.counts.tokens).backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
