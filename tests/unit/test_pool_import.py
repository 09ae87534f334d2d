"""Responses made elsewhere: what becomes of a row, and which line says what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_config import run_config
from tiny import EOS, char_tokenizer, plain_logprobs, save_model, tiny_model

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.offline.header import Header
from grpo_lab.offline.source import load_pool
from grpo_lab.pool.importing import import_pool
from grpo_lab.pool.rows import read_rows
from grpo_lab.types import Group


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")


def _config(folder: Path, *overrides: str) -> TrainConfig:
    return run_config(
        "dataset=arithmetic_plain",
        f"model.path={folder}",
        "group_size=2",
        "evaluation.every=null",
        "rollout.max_prompt_tokens=5",
        "rollout.max_response_tokens=6",
        "verifier.workers=1",
        *overrides,
    )


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _import(
    folder: Path, tmp_path: Path, rows: Sequence[Mapping[str, Any]], *overrides: str
) -> tuple[Header, tuple[Group, ...], list[str]]:
    told, file = Told(), _write(tmp_path / "rows.jsonl", rows)
    header = import_pool(_config(folder, *overrides), file, tmp_path / "pool", version=0, tell=told)
    pool = load_pool(tmp_path / "pool")
    assert pool.header == header
    return header, pool.groups, told.lines


def _ids(text: str) -> list[int]:
    ids: list[int] = char_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def test_questions_and_texts_are_rendered_tokenised_judged_and_scored(model_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"question": "1+2", "responses": ["#3", "#33"], "gold": "3"},
        {"question": "4+4", "responses": ["#8", "8"], "gold": 8},
    ]
    header, groups, told = _import(model_folder, tmp_path, rows)
    assert told == []
    assert (header.groups, header.order, header.drawn) == (2, "file", None)
    assert (header.sampler.logprobs, header.sampler.model) == ("scored", str(model_folder))
    assert header.sampler.weights is not None
    assert header.template is not None
    first, second = groups
    assert list(first.prompt.token_ids) == _ids("1+2=")
    assert [each.token_ids.tolist() for each in first.rollouts] == [[*_ids("#3"), EOS], [*_ids("#33"), EOS]]
    assert (first.rewards, first.verdicts) == ((1.0, 0.0), ("correct", "wrong"))
    assert (second.rewards, second.verdicts) == ((1.0, 0.0), ("correct", "unparsed"))
    assert {each.finish_reason for group in groups for each in group.rollouts} == {"stop"}
    model = tiny_model("qwen3")
    for group in groups:
        expected = plain_logprobs(model, group, 1.0)
        for rollout, row in zip(group.rollouts, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(rollout.behaviour_logprobs), row.float(), atol=1e-5, rtol=0)


def test_prompts_token_ids_log_probs_and_rewards_are_taken_as_given(model_folder: Path, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": _ids("12+"),
            "responses": [[*_ids("4"), EOS], _ids("56")],
            "logprobs": [[-0.5, -1], [-0.25, -2.5]],
            "rewards": [0.5, -1],
        },
        {
            "prompt": "7+",
            "responses": [_ids("9"), _ids("8")],
            "logprobs": [[-3.0], [0.0]],
            "rewards": [0, 1],
            "gold": "15",
        },
    ]
    header, groups, _ = _import(model_folder, tmp_path, rows)
    assert (header.sampler.logprobs, header.sampler.weights, header.template) == ("given", None, None)
    assert [list(group.prompt.token_ids) for group in groups] == [_ids("12+"), _ids("7+")]
    assert [group.prompt.text for group in groups] == ["12+", "7+"]
    assert [group.rewards for group in groups] == [(0.5, -1.0), (0.0, 1.0)]
    assert [each.finish_reason for each in groups[0].rollouts] == ["stop", "length"]
    np.testing.assert_array_equal(groups[0].rollouts[1].behaviour_logprobs, np.float32([-0.25, -2.5]))
    assert [each.text for each in groups[0].rollouts] == ["4", "56"]
    assert groups[1].prompt.problem.gold == "15"


def test_a_response_cut_at_its_limit_has_no_end_token(model_folder: Path, tmp_path: Path) -> None:
    row = {"question": "1+1", "responses": ["#2", "#1"], "gold": "2", "finish_reasons": ["length", "stop"]}
    _, (group,), _ = _import(model_folder, tmp_path, [row])
    assert [each.token_ids.tolist() for each in group.rollouts] == [_ids("#2"), [*_ids("#1"), EOS]]
    assert [each.finish_reason for each in group.rollouts] == ["length", "stop"]


def test_groups_of_equal_rewards_go_by_the_objective(model_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"question": "1+1", "responses": ["#2", "#2"], "gold": "2"},
        {"question": "1+2", "responses": ["#2", "#3"], "gold": "3"},
    ]
    (tmp_path / "filter").mkdir()
    header, _, told = _import(model_folder, tmp_path / "filter", rows)
    assert (header.groups, told) == (1, ["1 of 2 groups have equal rewards: dropped"])
    (tmp_path / "mask").mkdir()
    header, _, _ = _import(model_folder, tmp_path / "mask", rows, "objective.zero_variance=mask")
    assert (header.groups, header.mixed) == (2, 1)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="none of the 1 groups has unequal rewards"):
        _import(model_folder, tmp_path / "none", rows[:1])
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["rows.jsonl"]


GOOD = {"question": "1+2", "responses": ["#3", "#4"], "gold": "3"}
SCORED = {**GOOD, "logprobs": [[-1, -1, -1], [-1, -1, -1]]}
FAULTS: list[tuple[str, str]] = [
    ("{", "not JSON ("),
    ("[1]", "not a JSON object; write {'question': ..., 'responses': [...]}"),
    (json.dumps({**GOOD, "reward": [1, 0]}), "'reward' is not known; the keys are question, prompt, responses"),
    (json.dumps({"responses": ["#3", "#4"], "gold": "3"}), "give either question, which the run's template frames, or"),
    (json.dumps({**GOOD, "prompt": "1"}), "give either question, which the run's template frames, or prompt, as the"),
    (json.dumps({**GOOD, "question": " "}), 'question is " "; make it a text that is not empty'),
    (json.dumps({**GOOD, "responses": ["#3"]}), "1 responses, and group_size=2; give as many, or set group_size"),
    (json.dumps({**GOOD, "responses": "#3"}), "no list of responses, and group_size=2"),
    (json.dumps({**GOOD, "responses": ["#3", [5]]}), "responses must all be texts, or all lists of token ids of one"),
    (json.dumps({**GOOD, "responses": [[5], []]}), "responses must all be texts, or all lists of token ids of one"),
    (json.dumps({**GOOD, "gold": None}), "neither rewards nor gold; give one of them"),
    (json.dumps({**GOOD, "gold": [3]}), "gold is [3]; make it a text that is not empty"),
    (json.dumps({**GOOD, "rewards": [1]}), "rewards must be 2 numbers, one a response"),
    (json.dumps({**GOOD, "rewards": [1, None]}), "rewards holds null; give numbers"),
    (json.dumps({**GOOD, "rewards": [1, float("nan")]}), "rewards holds NaN; give numbers"),
    (json.dumps({**GOOD, "tolerance": "1"}), 'tolerance holds "1"; give numbers'),
    (json.dumps({**GOOD, "finish_reasons": ["stop"]}), 'finish_reasons is ["stop"]; give stop or length for each of 2'),
    (json.dumps({**GOOD, "finish_reasons": ["stop", "eos"]}), 'finish_reasons is ["stop", "eos"]; give stop or length'),
    (
        json.dumps({**GOOD, "responses": [[5], [6]], "finish_reasons": ["stop", "stop"]}),
        "finish_reasons are for responses as text; token ids tell by their end token",
    ),
    (json.dumps({**GOOD, "logprobs": [[-1]]}), "logprobs must be 2 lists, one a response, of a number a token"),
    (
        json.dumps({**SCORED, "logprobs": [[-1, -1, -1], [-1, 0.5, -1]]}),
        "logprobs[1] holds 0.5; give natural logarithms",
    ),
    (json.dumps({**SCORED, "logprobs": [[-1, "x", -1], [-1, -1, -1]]}), 'logprobs[0] holds "x"; give numbers'),
]


@pytest.mark.parametrize(("line", "said"), FAULTS, ids=[said[:40] for _, said in FAULTS])
def test_a_bad_row_is_named_with_the_fix(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = SCORED if "logprobs" in line else GOOD
    file.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_rows(file, group_size=2)
    (told,) = str(caught.value).splitlines()
    assert told.startswith(f"{file}:3: {said}")


def test_every_bad_row_is_named_at_once(tmp_path: Path) -> None:
    file = _write(tmp_path / "rows.jsonl", [GOOD, *({**GOOD, "responses": []} for _ in range(25))])
    with pytest.raises(ConfigError) as caught:
        read_rows(file, group_size=2)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:-1]] == [f"{file}:{number}" for number in range(2, 22)]
    assert lines[-1] == "and 5 more rows"
    with pytest.raises(ConfigError, match="holds no rows: write one JSON object a line"):
        read_rows(_write(tmp_path / "empty.jsonl", []), group_size=2)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (SCORED, "it has logprobs, unlike"),
        ({**GOOD, "rewards": [1, 0]}, "it has rewards, unlike"),
        ({"prompt": "1+2=", "responses": ["#3", "#4"], "gold": "3"}, "it lacks question, unlike"),
    ],
)
def test_rows_are_of_one_kind(second: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = _write(tmp_path / "rows.jsonl", [GOOD, GOOD, second])
    with pytest.raises(ConfigError) as caught:
        read_rows(file, group_size=2)
    assert str(caught.value).startswith(f"{file}:3: {said} {file}:1: give it in every row or in none")


TOKEN_FAULTS: list[tuple[dict[str, Any], str]] = [
    (
        {**GOOD, "question": "11+12"},
        "the prompt has 6 tokens, over rollout.max_prompt_tokens=5; raise it, or drop the",
    ),
    ({**GOOD, "responses": ["#3", "#123456"]}, "responses[1] has 8 tokens, over rollout.max_response_tokens=6; raise"),
    (
        {**GOOD, "responses": ["#3", ""], "finish_reasons": ["stop", "length"]},
        "responses[1] has no tokens; drop the row, or let it stop (finish_reasons)",
    ),
    ({**GOOD, "responses": [[5, 99], [6]]}, "responses[0] has token id 99, and this run's tokenizer has 15 tokens"),
    (
        {**GOOD, "responses": [[5], [5, EOS, 6]]},
        "responses[1] goes on behind its end token at position 1; cut it there",
    ),
]


@pytest.mark.parametrize(("row", "said"), TOKEN_FAULTS, ids=[said[:40] for _, said in TOKEN_FAULTS])
def test_what_only_tokens_tell_is_named_and_nothing_is_written(
    row: dict[str, Any], said: str, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        _import(model_folder, tmp_path, [GOOD, row])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path / 'rows.jsonl'}:2: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_prompts_token_ids_must_be_the_tokenizers(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "responses": ["#3", "#4"], "rewards": [1, 0]} for prompt in ([5, 6], [5, 99])]
    with pytest.raises(ConfigError, match=r":2: the prompt has token id 99, and this run's tokenizer has 15 tokens"):
        _import(model_folder, tmp_path, rows)


def test_log_probs_must_be_as_many_as_tokens(model_folder: Path, tmp_path: Path) -> None:
    short = {**SCORED, "logprobs": [[-1, -1, -1], [-1, -1]]}
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:2: responses\[1\] has 3 tokens by this run's tokenizer, the end"
    ):
        _import(model_folder, tmp_path, [SCORED, short])


def test_a_second_end_token_of_the_model_ends_a_response(tmp_path: Path) -> None:
    """Chat models name several in their generation config."""
    model = tiny_model("qwen3")
    model.generation_config.eos_token_id = [EOS, 14]
    folder = save_model(model, tmp_path / "model")
    row = {**GOOD, "responses": [[5, 14], [5, 6]], "rewards": [1, 0]}
    _, (group,), _ = _import(folder, tmp_path, [row])
    assert [each.finish_reason for each in group.rollouts] == ["stop", "length"]
