"""Checkpoints appear whole or not at all; what is damaged is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import UNEVEN, random_groups

from grpo_lab import checkpoint
from grpo_lab.distributed import World


def _write_part(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/weights.bin").write_bytes(b"x" * 1000)


def _save(run_dir: Path, update: int) -> Path:
    state = {"run": {"update": update}, "t": torch.arange(3)}
    return checkpoint.save(run_dir, update, lambda: state, _write_part, World())


def _remove(folder: Path) -> None:
    (folder / "model/weights.bin").unlink()


def _cut(folder: Path) -> None:
    (folder / "run.pt").write_bytes((folder / "run.pt").read_bytes()[:100])


def _empty(folder: Path) -> None:
    (folder / "manifest.json").write_text("")


def _flip(folder: Path) -> None:
    (folder / "model/weights.bin").write_bytes(b"x" * 999 + b"y")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_remove, "model/weights.bin is missing"),
        (_cut, "run.pt is not as it was written"),
        (_empty, "manifest.json is missing or unreadable"),
        (_flip, "model/weights.bin is not as it was written"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_one_warning(
    harm: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    for update in (2, 4, 6):
        _save(tmp_path, update)
    harm(checkpoint.folder_of(tmp_path, 6))
    found, warnings = checkpoint.newest(tmp_path)
    assert found == checkpoint.folder_of(tmp_path, 4)
    assert len(warnings) == 1
    assert said in warnings[0]


def test_a_folder_under_a_temporary_name_does_not_count(tmp_path: Path) -> None:
    _save(tmp_path, 2)
    whole = _save(tmp_path, 4)
    whole.rename(whole.with_name(".saving_000004"))
    assert checkpoint.newest(tmp_path) == (checkpoint.folder_of(tmp_path, 2), [])
    # What a killed save left behind is no hindrance to the next.
    assert _save(tmp_path, 4) == checkpoint.folder_of(tmp_path, 4)


def test_a_save_that_fails_leaves_the_old_ones_alone(tmp_path: Path) -> None:
    _save(tmp_path, 2)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 4, dict, fail, World())
    assert checkpoint.newest(tmp_path) == (checkpoint.folder_of(tmp_path, 2), [])


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) == (None, [])


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for update in (2, 4, 100, 30):
        _save(tmp_path, update)
    checkpoint.prune(tmp_path, 2, at=100)
    assert list(checkpoint.saved(tmp_path)) == [30, 100]
    assert len(list((tmp_path / checkpoint.FOLDER).iterdir())) == 2


def test_a_copy_beside_them_is_no_checkpoint_and_a_million_comes_last(tmp_path: Path) -> None:
    for update in (999_999, 1_000_000):
        _save(tmp_path, update)
    checkpoint.folder_of(tmp_path, 999_999).with_suffix(".bak").mkdir()
    assert list(checkpoint.saved(tmp_path)) == [999_999, 1_000_000]
    assert checkpoint.newest(tmp_path)[0] == checkpoint.folder_of(tmp_path, 1_000_000)


def test_what_is_needed_is_kept_besides(tmp_path: Path) -> None:
    for update in (2, 4, 6, 8):
        _save(tmp_path, update)
    checkpoint.prune(tmp_path, 1, at=8, spare=[4, 6, 50])
    assert list(checkpoint.saved(tmp_path)) == [4, 6, 8]
    checkpoint.prune(tmp_path, 1, at=8)
    assert list(checkpoint.saved(tmp_path)) == [8]


def test_damaged_ones_ahead_of_a_resumed_run_do_not_count(tmp_path: Path) -> None:
    """Resumed from 4, since 8 is damaged, and now at 6: the next kill must find 6."""
    for update in (2, 4, 6, 8):
        _save(tmp_path, update)
    _cut(checkpoint.folder_of(tmp_path, 8))
    checkpoint.prune(tmp_path, 1, at=6)
    assert list(checkpoint.saved(tmp_path)) == [6, 8]
    assert checkpoint.newest(tmp_path)[0] == checkpoint.folder_of(tmp_path, 6)


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    whole = _save(tmp_path, 2)
    for name in (".saving_000004", ".saving_old_update_000001"):
        (whole.parent / name).mkdir()
    checkpoint.tidy(tmp_path)
    assert [each.name for each in whole.parent.iterdir()] == [whole.name]


def test_groups_and_scores_come_back_as_they_were(tmp_path: Path) -> None:
    groups = [
        replace(
            group,
            sequence=10 + k,
            verdicts=("correct", "timeout")[: len(group.rollouts)],
            prompt=replace(
                group.prompt,
                problem=replace(group.prompt.problem, solution=f"s{k}", tolerance=0.5 + k, tags={"source": f"t{k}"}),
            ),
            rollouts=tuple(
                replace(each, finish_reason=("stop", "length")[k % 2], policy_version=k, text=f"answer {k}")
                for each in group.rollouts
            ),
        )
        for k, group in enumerate(random_groups(UNEVEN))
    ]
    scores = {3: [[rollout.behaviour_logprobs * 2 for rollout in group.rollouts] for group in groups]}
    state = {"groups": checkpoint.groups_to_state(groups), "scores": checkpoint.scores_to_state(scores)}
    folder = checkpoint.save(tmp_path, 1, lambda: state, _write_part, World())
    loaded = checkpoint.load_state(folder)
    for before, after in zip(groups, checkpoint.groups_from_state(loaded["groups"]), strict=True):
        assert after.prompt == before.prompt
        assert (after.rewards, after.verdicts, after.sequence) == (before.rewards, before.verdicts, before.sequence)
        for old, new in zip(before.rollouts, after.rollouts, strict=True):
            assert new.token_ids.dtype == old.token_ids.dtype
            np.testing.assert_array_equal(new.token_ids, old.token_ids)
            np.testing.assert_array_equal(new.behaviour_logprobs, old.behaviour_logprobs)
            assert (new.finish_reason, new.policy_version, new.text) == (
                old.finish_reason,
                old.policy_version,
                old.text,
            )
    for old_group, new_group in zip(scores[3], checkpoint.scores_from_state(loaded["scores"])[3], strict=True):
        for old_values, new_values in zip(old_group, new_group, strict=True):
            np.testing.assert_array_equal(new_values, old_values)
