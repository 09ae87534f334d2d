"""Pools on disk: what is written comes back, what was changed is found, and what a run must share with one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_config import run_config
from tiny import make_learner, random_groups

from grpo_lab import ledger
from grpo_lab.collect import Collection, Exhausted
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.ledger import BusyError
from grpo_lab.offline.files import content_hash, part_name, read_part, write_part
from grpo_lab.offline.header import PoolError, Sampler, check_settings, read_header
from grpo_lab.offline.proof import prove_pool, weights_hash
from grpo_lab.offline.source import Pool, PoolSource, load_pool
from grpo_lab.pool.draft import Draft
from grpo_lab.types import Group

UNEVEN = [(3, (2, 5)), (1, (1, 1)), (4, (6, 3)), (2, (2, 2)), (5, (4, 1))]


def _config(*overrides: str) -> TrainConfig:
    return run_config(
        "source=pool", "pool.path=pool", "group_size=2", "groups_per_minibatch=2", "schedule.updates=2", *overrides
    )


def _groups(count: int = 5) -> list[Group]:
    """Groups whose every field differs from that of the others."""
    groups = random_groups(UNEVEN[:count], seed=3)
    return [
        replace(
            group,
            sequence=10 + k,
            rewards=(1.0, 0.1 * k),
            verdicts=("correct", "timeout"),
            prompt=replace(
                group.prompt,
                text=f"prompt {k}: √2 ²",
                problem=replace(
                    group.prompt.problem,
                    gold=f"\\frac{{{k}}}{{2}}",
                    tolerance=float(k) or None,
                    tags={"source": f"s{k}"},
                ),
            ),
            rollouts=tuple(replace(rollout, text=f"response {k} \n ✓") for rollout in group.rollouts),
        )
        for k, group in enumerate(groups)
    ]


def _sampler(**changes: Any) -> Sampler:
    fields = {
        "model": "m",
        "weights": None,
        "version": 0,
        "engine": "hf",
        "logprobs": "recorded",
        "tolerance": 1e-4,
    }
    return Sampler(**(fields | changes))


def _make(out: Path, groups: Sequence[Group], sampler: Sampler | None = None, part: int = 2) -> Pool:
    with Draft.opened(out, settings="s") as draft:
        for start in range(0, len(groups), part):
            draft.add(groups[start : start + part])
        draft.finish(_config(), sampler or _sampler(), order="sampled", tokenizer="t", template="p", drawn=None)
    return load_pool(out)


def _assert_same(one: Group, other: Group) -> None:
    assert (one.prompt, one.rewards, one.verdicts, one.sequence) == (
        other.prompt,
        other.rewards,
        other.verdicts,
        other.sequence,
    )
    for left, right in zip(one.rollouts, other.rollouts, strict=True):
        np.testing.assert_array_equal(left.token_ids, right.token_ids)
        np.testing.assert_array_equal(left.behaviour_logprobs, right.behaviour_logprobs)
        assert (left.token_ids.dtype, left.behaviour_logprobs.dtype) == (np.int32, np.float32)
        assert (left.text, left.finish_reason) == (right.text, right.finish_reason)


def test_what_is_written_comes_back_in_order(tmp_path: Path) -> None:
    groups = _groups()
    pool = _make(tmp_path / "pool", groups)
    for written, read in zip(groups, pool.groups, strict=True):
        _assert_same(written, read)
    header = pool.header
    assert list(header.parts) == ["groups-00000.parquet", "groups-00001.parquet", "groups-00002.parquet"]
    assert (header.groups, header.mixed, header.group_size, header.responses) == (5, 5, 2, 10)
    assert (header.tokens, header.longest_prompt, header.longest_response) == (27, 5, 6)
    assert header.content == content_hash(groups)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool"]


def test_the_files_are_read_by_datasets(tmp_path: Path) -> None:
    from datasets import load_dataset

    _make(tmp_path / "pool", _groups())
    files = str(tmp_path / "pool/*.parquet")
    table = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert table[4]["prompt"] == "prompt 4: √2 ²"
    assert table[2]["rewards"] == [1.0, 0.2]
    assert [len(each) for each in table[0]["tokens"]] == [2, 5]


def test_the_hash_is_of_the_content_and_the_order_and_not_of_the_files(tmp_path: Path) -> None:
    groups = _groups()
    assert _make(tmp_path / "a", groups, part=5).header.content == _make(tmp_path / "b", groups).header.content
    others = [
        [groups[1], groups[0], *groups[2:]],
        groups[:4],
        [replace(groups[0], rewards=(1.0, 0.5)), *groups[1:]],
        [replace(groups[0], rollouts=groups[0].rollouts[::-1]), *groups[1:]],
    ]
    nudged = groups[0].rollouts[0].behaviour_logprobs.copy()
    nudged[0] = np.nextafter(nudged[0], np.float32(0))
    first = replace(groups[0].rollouts[0], behaviour_logprobs=nudged)
    others.append([replace(groups[0], rollouts=(first, groups[0].rollouts[1])), *groups[1:]])
    assert len({content_hash(each) for each in [groups, *others]}) == 1 + len(others)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.999])
def test_one_changed_byte_is_found(share: float, tmp_path: Path) -> None:
    _make(tmp_path / "pool", _groups())
    path = tmp_path / "pool" / part_name(1)
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(PoolError, match=r"groups-00001\.parquet is not as it was written"):
        load_pool(tmp_path / "pool")


def test_other_groups_under_the_same_header_are_found(tmp_path: Path) -> None:
    _make(tmp_path / "pool", _groups())
    header = json.loads((tmp_path / "pool/pool.json").read_text())
    header["parts"] = dict(reversed(header["parts"].items()))
    (tmp_path / "pool/pool.json").write_text(json.dumps(header))
    with pytest.raises(PoolError, match=r"the groups are not those that pool\.json is of"):
        load_pool(tmp_path / "pool")


def test_what_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"is no pool, it holds no pool\.json: make one with python -m grpo_lab\.pool"):
        read_header(tmp_path)
    _make(tmp_path / "pool", _groups())
    (tmp_path / "pool" / part_name(2)).unlink()
    with pytest.raises(PoolError, match=r"groups-00002\.parquet is missing"):
        load_pool(tmp_path / "pool")
    header = tmp_path / "pool/pool.json"
    header.write_text(header.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(PoolError, match="has format 9, and this version reads 1"):
        read_header(tmp_path / "pool")
    header.write_text("[1")
    with pytest.raises(PoolError, match=r"pool\.json cannot be read"):
        read_header(tmp_path / "pool")
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(PoolError, match="is no readable part of a pool"):
        list(read_part(tmp_path / "x.parquet"))


def test_a_draft_goes_on_behind_its_last_whole_part(tmp_path: Path) -> None:
    groups, out = _groups(), tmp_path / "pool"
    with Draft.opened(out, settings="s") as draft:
        draft.add(groups[:2], {"cursor": 2})
        # Killed after the file and before the state: the part is made again.
        write_part(draft.folder / part_name(1), groups[3:4])
    assert not out.exists()
    with (
        pytest.raises(ConfigError, match="holds a pool half made with other settings"),
        Draft.opened(out, settings="other"),
    ):
        pass
    with Draft.opened(out, settings="s") as again:
        assert (again.groups, again.state) == (2, {"cursor": 2})
        again.add(groups[2:], {"cursor": 5})
        again.finish(_config(), _sampler(), order="sampled", tokenizer="t", template="p", drawn=None)
    assert load_pool(out).header.content == content_hash(groups)


def test_one_process_makes_a_draft_and_what_engines_leave_there_is_no_part_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "CLAIM_SECONDS", 0.05)
    out = tmp_path / "pool"
    with Draft.opened(out, settings="s") as draft:
        draft.add(_groups()[:2], {"cursor": 2})
        with pytest.raises(BusyError, match="is in use by another process"), Draft.opened(out, settings="s"):
            pass
        draft.start_over()
        with pytest.raises(BusyError), Draft.opened(out, settings="s"):
            pass
        draft.add(_groups())
        (draft.folder / "vllm.log").write_text("started")
        (draft.folder / "weights_in_transit").mkdir()
        draft.finish(_config(), _sampler(), order="sampled", tokenizer="t", template="p", drawn=None)
    assert sorted(path.name for path in out.iterdir()) == ["groups-00000.parquet", "pool.json"]


def test_the_source_gives_each_group_once_and_whole_minibatches_at_the_end(tmp_path: Path) -> None:
    pool = _make(tmp_path / "pool", _groups())
    source = PoolSource(pool, groups_per_minibatch=2)
    given: list[int] = []
    for _ in range(2):
        gathered = source.collect(2)
        assert isinstance(gathered, Collection)
        given += [group.sequence for group in gathered.groups]
    assert given == [10, 11, 12, 13]
    assert source.collect(2) == Exhausted(drawn=1, kept=1)
    short = PoolSource(pool, groups_per_minibatch=2)
    gathered = short.collect(16)
    assert isinstance(gathered, Collection)
    assert len(gathered.groups) == 4
    assert gathered.accounting == {"pool/taken": 4, "pool/left": 1}
    assert gathered.totals == {"total/responses": 0, "total/tokens": 0}


def test_the_source_goes_on_where_its_state_was_taken_and_in_the_same_pool_alone(tmp_path: Path) -> None:
    pool = _make(tmp_path / "pool", _groups())
    source = PoolSource(pool, groups_per_minibatch=1)
    source.collect(3)
    resumed = PoolSource(pool, groups_per_minibatch=1)
    resumed.load_state(json.loads(json.dumps(source.state())))
    gathered = resumed.collect(1)
    assert isinstance(gathered, Collection)
    assert gathered.groups[0].sequence == 13
    other = PoolSource(_make(tmp_path / "other", _groups(4)), groups_per_minibatch=1)
    with pytest.raises(ConfigError, match="holds another pool than the run began with"):
        other.load_state(source.state())


FITS = [
    (["group_size=4", "rollout.max_rows=64"], "group_size=4, and the groups of the pool in {} have 2: set that"),
    (
        ["rollout.temperature=0.5"],
        "rollout.temperature=0.5, and the log-probs of the pool in {} are of temperature 1.0",
    ),
    (["rollout.max_prompt_tokens=4"], "rollout.max_prompt_tokens=4, and the longest prompt of the pool in {} has 5"),
    (
        ["rollout.max_response_tokens=5"],
        "rollout.max_response_tokens=5, and the longest response of the pool in {} has",
    ),
    (
        ["schedule.updates=5", "schedule.i=2"],
        "schedule.updates=5 with schedule.i=2 takes 3 minibatches of groups_per_minibatch=2 groups, each once, and the "
        "pool in {} has 5 groups, which are 2 minibatches: set schedule.updates=4, or make a pool of groups=6",
    ),
    (
        ["schedule.updates=1", "groups_per_minibatch=6"],
        "schedule.updates=1 with schedule.i=1 takes 1 minibatches of groups_per_minibatch=6 groups, each once, and the "
        "pool in {} has 5 groups, which are 0 minibatches: set groups_per_minibatch=5 or less",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), FITS, ids=[" ".join(overrides) for overrides, _ in FITS])
def test_a_run_that_does_not_fit_its_pool_is_told_which_key(overrides: list[str], said: str, tmp_path: Path) -> None:
    _make(tmp_path / "pool", _groups())
    config = _config(*overrides)
    config.pool.path = str(tmp_path / "pool")
    with pytest.raises(PoolError) as caught:
        check_settings(config)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(said.format(tmp_path / "pool"))


def test_groups_of_equal_rewards_are_for_objectives_that_take_them(tmp_path: Path) -> None:
    groups = _groups()
    _make(tmp_path / "pool", [replace(groups[0], rewards=(1.0, 1.0)), *groups[1:]])
    config = _config("schedule.updates=1")
    config.pool.path = str(tmp_path / "pool")
    with pytest.raises(PoolError, match=r"1 of the 5 groups of the pool in .* have equal rewards"):
        check_settings(config)
    config.objective.zero_variance = "mask"
    check_settings(config)


# --- the spot check ---------------------------------------------------------------------------------------------


def _scored(learner: TorchLearner, groups: Sequence[Group]) -> list[Group]:
    from grpo_lab.pool.importing import _scored as scored

    return scored(groups, learner)


def _prove(learner: TorchLearner, pool: Pool) -> tuple[list[str], list[str]]:
    said: list[str] = []
    warned: list[str] = []
    prove_pool(learner, pool.header, pool.sample, tolerance=1e-4, say=said.append, warn=warned.append)
    return said, warned


def test_log_probs_of_equal_weights_must_be_equal(model: Any, tmp_path: Path) -> None:
    learner = make_learner(model)
    groups = _scored(learner, _groups())
    sampler = _sampler(weights=weights_hash(learner))
    said, warned = _prove(learner, _make(tmp_path / "right", groups, sampler))
    assert warned == []
    assert "the pool is of this run's initial weights" in said[0]
    # One response of one group is off by 0.2 nats a token; the first responses hold 15 tokens, 4 of them its.
    wrong = replace(
        groups[4].rollouts[0], behaviour_logprobs=groups[4].rollouts[0].behaviour_logprobs - np.float32(0.2)
    )
    groups[4] = replace(groups[4], rollouts=(wrong, groups[4].rollouts[1]))
    with pytest.raises(PoolError, match=r"15 tokens differ by 0\.0533 nats each \(tolerance 0\.0001\)"):
        _prove(learner, _make(tmp_path / "wrong", groups, sampler))


@pytest.mark.parametrize(
    ("weights", "words"), [("f" * 32, "by other weights than this run"), (None, "it does not name")]
)
def test_log_probs_of_other_weights_are_reported(weights: str | None, words: str, model: Any, tmp_path: Path) -> None:
    learner = make_learner(model)
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, behaviour_logprobs=rollout.behaviour_logprobs - np.float32(np.log(2)))
                for rollout in group.rollouts
            ),
        )
        for group in _scored(learner, _groups())
    ]
    said, (line,) = _prove(learner, _make(tmp_path / "pool", groups, _sampler(weights=weights)))
    assert said == []
    assert words in line
    # lambda = log 2 at every token: K3 = 2 - 1 - log 2.
    assert "K3 is 0.307 nats a token before the first update, on 15 tokens" in line
