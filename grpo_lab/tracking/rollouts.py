"""Rollouts as people read them: the text, the verdict, and the tokens on which learner and sampler disagree most."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from grpo_lab.types import Group, Rollout, Verdict

Decode = Callable[[Sequence[int]], str]

MARKED_TOKENS = 5
# Nats. Under it, differences are the engines' rounding, and marks would point at nothing.
SMALLEST_MARK = 0.01


def write_rollouts(
    path: Path, update: int, groups: Sequence[Group], logprobs: Sequence[Sequence[np.ndarray]], decode: Decode
) -> None:
    """Write a sample of groups as text.

    Args:
        update: the update whose minibatch the groups are from; counted from 1.
        logprobs: for each response of each group [T] nats, the learner's log-probabilities of its tokens.
        decode: token ids to text.
    """
    parts = [
        f"update {update}: {len(groups)} groups\n"
        f"log ratio = learner - behaviour, nats a token; marked ⟦so⟧ are up to {MARKED_TOKENS} tokens of a response "
        f"with the largest |log ratio| >= {SMALLEST_MARK}\n"
    ]
    for number, (group, group_logprobs) in enumerate(zip(groups, logprobs, strict=True), start=1):
        parts.append(_group_head(group, number, len(groups)))
        members = zip(group.rollouts, group.rewards, group.verdicts, group_logprobs, strict=True)
        for member, (rollout, reward, verdict, learner) in enumerate(members, start=1):
            parts.append(_response(rollout, reward, verdict, learner, decode, member))
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(parts), encoding="utf-8")


def drop_later(folder: Path, resume_from: int) -> int:
    """Delete the files of updates past `resume_from`, which the resumed run makes anew; returns their number."""
    named = [(path, re.fullmatch(r"update_(\d+)\.(txt|json)", path.name)) for path in sorted(folder.glob("update_*"))]
    later = [path for path, name in named if name is not None and int(name[1]) > resume_from]
    for path in later:
        path.unlink()
    return len(later)


def largest_log_ratios(log_ratio: np.ndarray) -> list[int]:
    """Positions of the up to MARKED_TOKENS largest |log ratio|, in order of position. NaN counts as the largest."""
    size = np.nan_to_num(np.abs(log_ratio), nan=np.inf)
    largest = np.argsort(-size, kind="stable")[:MARKED_TOKENS]
    return sorted(int(position) for position in largest if size[position] >= SMALLEST_MARK)


def marked_text(token_ids: np.ndarray, positions: Sequence[int], decode: Decode) -> tuple[str, list[str]]:
    """The response with the tokens at `positions` between ⟦ and ⟧, and the texts of these tokens.

    A token's place is found by decoding what precedes it: a token decoded alone may lose its leading blank or its
    share of a multi-byte character.
    """
    ids = token_ids.tolist()
    text = decode(ids)
    pieces: list[str] = []
    tokens: list[str] = []
    done = 0
    for position in positions:
        start = max(done, len(decode(ids[:position])))
        end = max(start, len(decode(ids[: position + 1])))
        tokens.append(text[start:end])
        pieces += [_printable(text[done:start]), "⟦", _printable(text[start:end]), "⟧"]
        done = end
    pieces.append(_printable(text[done:]))
    return "".join(pieces), tokens


def _group_head(group: Group, number: int, total: int) -> str:
    problem = group.prompt.problem
    mean = sum(group.rewards) / len(group.rewards)
    return (
        f"=== group {number} of {total} | problem {problem.id} | drawn as {group.sequence} | "
        f"mean reward {mean:.3f} of {len(group.rewards)} | gold {_printable(problem.gold)}\n"
        f"{_printable(group.prompt.text)}\n"
    )


def _response(
    rollout: Rollout, reward: float, verdict: Verdict, learner: np.ndarray, decode: Decode, member: int
) -> str:
    log_ratio = learner.astype(np.float64) - rollout.behaviour_logprobs.astype(np.float64)
    positions = largest_log_ratios(log_ratio)
    text, tokens = marked_text(rollout.token_ids, positions, decode)
    head = (
        f"--- response {member} | reward {reward:g} | {verdict} | version {rollout.policy_version} | "
        f"{rollout.finish_reason} | {len(log_ratio)} tokens | sum of log ratios {log_ratio.sum():+.4f}"
    )
    marks = [
        f"    {log_ratio[position]:+.4f}  token {position}  {token!r}"
        for position, token in zip(positions, tokens, strict=True)
    ]
    return "\n".join([head, text, *marks, ""])


def _printable(text: str) -> str:
    """Control characters and lone surrogates as escapes: the file is opened in terminals."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
