"""The responses file: what is gone on with, what is never reused, and what gives no score."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.config import ConfigError
from grpo_lab.evaluation.answers import (
    FILE,
    Identity,
    MissingPredictions,
    answer,
    choose_folder,
    prompts_digest,
    tally_of,
)
from grpo_lab.evaluation.scoring import evaluate, per_problem
from grpo_lab.rewards import Verifier
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.types import Problem, Prompt, Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=6)
IDENTITY = Identity("weights", {"n": 3})


class Interrupting(HfEngine):
    """The embedded sampler, stopped when it is asked for the `after`-th time."""

    def stop_after(self, after: int) -> Interrupting:
        self.left = after
        return self

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().generate(prompts, **settings)


@pytest.fixture
def engine(model: Any, tokenizer: Any) -> Interrupting:
    # Two problems at a time.
    return Interrupting(model, tokenizer, max_rows=6).stop_after(-1)


@pytest.fixture
def prompts(tokenizer: Any) -> list[Prompt]:
    return [
        Prompt(
            problem=Problem(id=f"p{k}", question=f"{k}+{k}", gold=str(2 * k)),
            text=f"{k}+{k}=",
            token_ids=tuple(tokenizer(f"{k}+{k}=")["input_ids"]),
        )
        for k in range(9)
    ]


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    with Verifier("exact", workers=1, timeout=1.0) as each:
        yield each


def _answer(engine: HfEngine, verifier: Verifier, prompts: Sequence[Prompt], path: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"identity": IDENTITY, "n": 3, "sampling": SAMPLING, "seed": 1} | changes
    identity = settings.pop("identity")
    return answer(lambda: engine, verifier, prompts, path, identity, **settings)


def test_what_is_written_is_what_the_loop_would_score(
    engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    told: list[int] = []
    lines, seconds = _answer(engine, verifier, prompts, tmp_path / FILE, progress=told.append)
    groups = evaluate(engine, verifier, prompts, n=3, sampling=SAMPLING, seed=1)
    assert [line["id"] for line in lines] == [prompt.id for prompt in prompts]
    for line, group in zip(lines, groups, strict=True):
        assert line["prompt"] == group.prompt.text
        assert [each["text"] for each in line["responses"]] == [rollout.text for rollout in group.rollouts]
        assert [each["tokens"] for each in line["responses"]] == [len(each.token_ids) for each in group.rollouts]
        assert [each["finish_reason"] for each in line["responses"]] == [e.finish_reason for e in group.rollouts]
        assert [each["verdict"] for each in line["responses"]] == list(group.verdicts)
    tallies = [tally_of(line) for line in lines]
    assert [{"id": each.id, "correct": each.correct, "n": each.n} for each in tallies] == per_problem(groups)
    # Some of both: else the sums would see nothing.
    assert 0 < sum(each.truncated for each in tallies) < 27
    assert told == [2, 4, 6, 8, 9]
    assert seconds.problems == 9
    assert 0 < seconds.sampling <= seconds.total
    assert [json.loads(each) for each in (tmp_path / FILE).read_text().splitlines()[1:]] == lines


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("torn", [False, True])
def test_interrupted_and_gone_on_with_equals_uninterrupted(
    after: int, torn: bool, engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole" / FILE, tmp_path / "stopped" / FILE
    lines, _ = _answer(engine, verifier, prompts, whole)
    with pytest.raises(KeyboardInterrupt):
        _answer(engine.stop_after(after), verifier, prompts, path)
    assert len(path.read_bytes().splitlines()) == 1 + 2 * after
    if torn:
        # Killed while a line was being written: of the next one, or the last one there.
        path.write_bytes(path.read_bytes()[:-9] if after else IDENTITY.line[:5])
    again, seconds = _answer(engine.stop_after(-1), verifier, prompts, path)
    assert again == lines
    assert seconds.problems == 9 - 2 * after + (torn and after > 0)
    assert path.read_bytes() == whole.read_bytes()


def test_nothing_is_sampled_twice(
    engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    lines, _ = _answer(engine, verifier, prompts, tmp_path / FILE)
    again, seconds = _answer(engine.stop_after(0), verifier, prompts, tmp_path / FILE)
    assert again == lines
    assert (seconds.problems, seconds.sampling) == (0, 0.0)


@pytest.mark.parametrize("other", [Identity("other weights", {"n": 3}), Identity("weights", {"n": 4})])
def test_other_weights_or_settings_get_another_folder(
    other: Identity, engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    folder = choose_folder(tmp_path, "sums", IDENTITY)
    assert folder == tmp_path / "sums"
    _answer(engine, verifier, prompts, folder / FILE)
    before = (folder / FILE).read_bytes()
    with pytest.raises(ConfigError, match="holds responses of other weights or settings"):
        _answer(engine, verifier, prompts, folder / FILE, identity=other)
    elsewhere = choose_folder(tmp_path, "sums", other)
    assert elsewhere == tmp_path / f"sums-{other.short}"
    _answer(engine, verifier, prompts, elsewhere / FILE, identity=other)
    assert choose_folder(tmp_path, "sums", IDENTITY) == folder
    assert choose_folder(tmp_path, "sums", other) == elsewhere
    assert (folder / FILE).read_bytes() == before


def test_missing_predictions_give_no_score(
    engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    path = tmp_path / FILE
    _answer(engine, verifier, prompts, path)
    first, *rest = path.read_text().splitlines()
    line = json.loads(rest[4])
    del line["responses"][2]
    path.write_text("\n".join([first, *rest[:4], json.dumps(line), *rest[5:]]) + "\n")
    message = "1 of 9 problems do not have the evaluation.n=3 responses, the first is p4 with 2: no score"
    with pytest.raises(MissingPredictions, match=message):
        _answer(engine, verifier, prompts, path)
    # What the message asks for.
    path.write_text("\n".join([first, *rest[:4], *rest[5:]]) + "\n")
    lines, seconds = _answer(engine, verifier, prompts, path)
    assert [json.dumps(each, separators=(",", ":")) for each in lines] == rest
    assert seconds.problems == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rest: [rest[0], "{}", *rest[1:]], "line 3 is damaged"),
        (lambda rest: [rest[0][:20], *rest[1:]], "line 2 is damaged"),
        (lambda rest: [*rest, rest[0]], "line 11 answers problem p0 a second time"),
    ],
)
def test_a_damaged_file_is_named(
    spoil: Any, said: str, engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    path = tmp_path / FILE
    _answer(engine, verifier, prompts, path)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, *spoil(rest)]) + "\n")
    with pytest.raises(ConfigError, match=said):
        _answer(engine, verifier, prompts, path)


def test_two_at_once_do_not_mix(
    engine: Interrupting, verifier: Verifier, prompts: list[Prompt], tmp_path: Path
) -> None:
    def another() -> HfEngine:
        with pytest.raises(ConfigError, match="is being written by another process"):
            _answer(engine, verifier, prompts, tmp_path / FILE)
        return engine

    answer(another, verifier, prompts, tmp_path / FILE, IDENTITY, n=3, sampling=SAMPLING, seed=1)


def test_a_prompts_digest_sees_text_tokens_and_gold(prompts: list[Prompt]) -> None:
    digests = {
        prompts_digest(prompts),
        prompts_digest(prompts[:-1]),
        prompts_digest([replace(prompts[0], text="x"), *prompts[1:]]),
        prompts_digest([replace(prompts[0], token_ids=(1, 2)), *prompts[1:]]),
        prompts_digest([replace(prompts[0], problem=replace(prompts[0].problem, gold="9")), *prompts[1:]]),
    }
    assert len(digests) == 5
