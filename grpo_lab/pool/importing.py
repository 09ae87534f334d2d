"""A pool of responses made elsewhere: tokenised, judged and scored where the file does not say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.build import Teller, build_verifier
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.learner import Learner
from grpo_lab.minibatches import make_minibatch
from grpo_lab.offline.header import Header, Sampler
from grpo_lab.offline.identity import template_hash, tokenizer_hash
from grpo_lab.offline.proof import weights_hash
from grpo_lab.pool.draft import Draft
from grpo_lab.pool.record import Parts, build_parts
from grpo_lab.pool.rows import Answers, Fault, raise_faults, read_rows
from grpo_lab.prompts import render
from grpo_lab.prompts.split import problem_id
from grpo_lab.rewards import reward
from grpo_lab.types import FinishReason, Group, Problem, Prompt, Rollout

# Groups of a file of the pool, scored at a time.
PART = 256


def import_pool(config: TrainConfig, file: Path, out: Path, *, version: int, tell: Teller) -> Header:
    """Make a pool of the rows of `file`; nothing is written unless all of them can be used.

    Behaviour log-probs that are not given are those of the run's initial model, which then counts as the sampler.

    Raises:
        ConfigError: a line for each row that cannot be used, or no group is left.
    """
    rows = read_rows(file, group_size=config.group_size)
    parts = build_parts(config, tell)
    groups = _judged(config, rows, _to_groups(config, rows, parts))
    kept = [group for group in groups if group.is_mixed or config.objective.zero_variance != "filter"]
    if not kept:
        raise ConfigError(
            f"import={file}: none of the {len(groups)} groups has unequal rewards, and objective.zero_variance=filter "
            "trains on those alone: set objective.zero_variance=mask, or import other responses"
        )
    if len(kept) < len(groups):
        tell.message(f"{len(groups) - len(kept)} of {len(groups)} groups have equal rewards: dropped")
    given = rows[0].logprobs is not None
    with Draft.opened(out, settings=f"import of {file}") as draft:
        draft.start_over()
        for start in range(0, len(kept), PART):
            part = kept[start : start + PART]
            draft.add(part if given else _scored(part, parts.learner))
        return draft.finish(
            config,
            Sampler(
                model="not known" if given else parts.folder,
                weights=None if given else weights_hash(parts.learner),
                version=version,
                engine="not known",
                logprobs="given" if given else "scored",
                tolerance=0.0,
            ),
            order="file",
            tokenizer=tokenizer_hash(parts.tokenizer),
            template=None if rows[0].question is None else template_hash(config.dataset, parts.tokenizer),
            drawn=None,
        )


def _to_groups(config: TrainConfig, rows: Sequence[Answers], parts: Parts) -> list[Group]:
    """Tokenised, without rewards where none are given, and with log-probs of 0 where none are."""
    prompts = _prompts(config, rows, parts.tokenizer)
    groups: list[Group] = []
    faults: list[str] = []
    for sequence, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        try:
            if len(prompt.token_ids) > config.rollout.max_prompt_tokens:
                raise Fault(
                    f"the prompt has {len(prompt.token_ids)} tokens, over rollout.max_prompt_tokens="
                    f"{config.rollout.max_prompt_tokens}; raise it, or drop the row"
                )
            _check_vocabulary("the prompt", prompt.token_ids, len(parts.tokenizer))
            rollouts = tuple(_rollout(config, row, j, parts) for j in range(config.group_size))
        except Fault as fault:
            faults.append(f"{row.place}: {fault}")
            continue
        rewards = tuple(row.rewards or [0.0] * config.group_size)
        groups.append(
            Group(
                prompt=prompt,
                rollouts=rollouts,
                rewards=rewards,
                verdicts=tuple("correct" if each > 0 else "wrong" for each in rewards),
                sequence=sequence,
            )
        )
    raise_faults(faults)
    return groups


def _prompts(config: TrainConfig, rows: Sequence[Answers], tokenizer: Any) -> list[Prompt]:
    """A prompt for each row: the question in the run's template, or what the model saw, token by token."""
    problems = [
        Problem(id=problem_id(text), question=text, gold=row.gold, tolerance=row.tolerance)
        for row in rows
        for text in [_question(row, tokenizer)]
    ]
    if rows[0].question is not None:
        # Of any length: one that is too long is a fault of its row.
        return render(problems, config.dataset, tokenizer, max_prompt_tokens=2**31).prompts
    return [
        Prompt(problem=problem, text=problem.question, token_ids=tuple(_ids(row.prompt, tokenizer)))
        for row, problem in zip(rows, problems, strict=True)
    ]


def _question(row: Answers, tokenizer: Any) -> str:
    if row.question is not None:
        return row.question
    text: str = row.prompt if isinstance(row.prompt, str) else tokenizer.decode(row.prompt)
    return text


def _ids(text: str | list[int] | None, tokenizer: Any) -> list[int]:
    if isinstance(text, list):
        return text
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _rollout(config: TrainConfig, row: Answers, j: int, parts: Parts) -> Rollout:
    response, tokenizer = row.responses[j], parts.tokenizer
    ids = _ids(response, tokenizer)
    if isinstance(response, str) and (row.finish_reasons is None or row.finish_reasons[j] == "stop"):
        ids = [*ids, tokenizer.eos_token_id]
    _check_ids(ids, j, config, vocabulary=len(tokenizer), ends=parts.ends)
    logprobs = None if row.logprobs is None else row.logprobs[j]
    if logprobs is not None and len(logprobs) != len(ids):
        raise Fault(
            f"responses[{j}] has {len(ids)} tokens by this run's tokenizer, the end token included, and logprobs[{j}] "
            f"{len(logprobs)} numbers; give token ids in place of text, and a number for each"
        )
    reason: FinishReason = "stop" if ids[-1] in parts.ends else "length"
    return Rollout(
        token_ids=np.array(ids, dtype=np.int32),
        behaviour_logprobs=np.array(logprobs or [0.0] * len(ids), dtype=np.float32),
        finish_reason=reason,
        policy_version=0,
        text=response if isinstance(response, str) else tokenizer.decode(ids, skip_special_tokens=True),
    )


def _check_ids(ids: list[int], j: int, config: TrainConfig, *, vocabulary: int, ends: frozenset[int]) -> None:
    limit = config.rollout.max_response_tokens
    if not ids:
        raise Fault(f"responses[{j}] has no tokens; drop the row, or let it stop (finish_reasons)")
    if len(ids) > limit:
        raise Fault(
            f"responses[{j}] has {len(ids)} tokens, over rollout.max_response_tokens={limit}; raise it, or drop the row"
        )
    _check_vocabulary(f"responses[{j}]", ids, vocabulary)
    if early := [place for place, each in enumerate(ids[:-1]) if each in ends]:
        raise Fault(f"responses[{j}] goes on behind its end token at position {early[0]}; cut it there")


def _check_vocabulary(what: str, ids: Sequence[int], vocabulary: int) -> None:
    if max(ids, default=0) >= vocabulary:
        raise Fault(f"{what} has token id {max(ids)}, and this run's tokenizer has {vocabulary} tokens")


def _judged(config: TrainConfig, rows: Sequence[Answers], groups: list[Group]) -> list[Group]:
    """With rewards: those given, else the verifier's."""
    if rows[0].rewards is not None:
        return groups
    with build_verifier(config) as verifier:
        judgements = verifier.judge(
            [(group.prompt.problem, rollout.text) for group in groups for rollout in group.rollouts]
        )
    size = config.group_size
    return [
        replace(
            group,
            rewards=tuple(reward(each) for each in judgements[start : start + size]),
            verdicts=tuple(each.verdict for each in judgements[start : start + size]),
        )
        for group, start in zip(groups, range(0, len(judgements), size), strict=True)
    ]


def _scored(groups: Sequence[Group], learner: Learner) -> list[Group]:
    """With the learner's log-probs as those of the behaviour policy."""
    scores = learner.logprobs(make_minibatch(0, groups, mask_zero_variance=False, mask_divisor="all"))
    return [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, behaviour_logprobs=values.astype(np.float32))
                for rollout, values in zip(group.rollouts, each, strict=True)
            ),
        )
        for group, each in zip(groups, scores, strict=True)
    ]
