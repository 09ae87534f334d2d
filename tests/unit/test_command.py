"""Errors of a command: one line where a user can mend them, a traceback where not."""

from __future__ import annotations

import errno

import pytest

from grpo_lab.command import composed, errors_on_one_line
from grpo_lab.config import ConfigError


def fail(error: Exception) -> None:
    with errors_on_one_line():
        raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("seed=-1 must be more"), "error: seed=-1 must be more\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/outputs"),
            "error: /x/outputs cannot be used: Permission denied; name another place (run_dir=, out=), or make room\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl"),
            "error: run/metrics.jsonl cannot be used: No space left on device; name another place (run_dir=, out=), or "
            "make room\n",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail(error)
    assert (ended.value.code, capsys.readouterr().err) == (2, said)


@pytest.mark.parametrize(
    "error", [KeyError("x"), OSError(errno.EIO, "broken", "disk"), OSError(errno.ENOSPC, "nothing is named")]
)
def test_what_is_a_fault_of_ours_or_of_the_machine_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        fail(error)


def test_what_hydra_says_of_its_own_options_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "--cfg", "job"])
    with pytest.raises(SystemExit) as ended, errors_on_one_line():
        composed(lambda *_: None)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: Only one of --run, --multirun, --cfg")
    # The same kind of error of ours is a fault.
    with pytest.raises(ValueError, match="ours"):
        fail(ValueError("ours"))
