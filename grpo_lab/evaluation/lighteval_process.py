"""lighteval's process: `lighteval_room.py`, run by the Python of its own environment (`make eval-env`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpo_lab.config import ConfigError
from grpo_lab.evaluation import lighteval_room
from grpo_lab.evaluation.agreement import JudgeError
from grpo_lab.launch import without_launcher

PYTHON_VARIABLE = "GRPO_LAB_LIGHTEVAL_PYTHON"
PYTHON = Path(".venv-eval/bin/python")
LOG = "lighteval.log"
SCRATCH = "lighteval_scratch"
# Seconds that the process may take: to start, and for each response (about 0.03, and 5 more where an answer is hard).
START_SECONDS = 300
RESPONSE_SECONDS = 1.0

# A task as `lighteval_room` takes it; responses by task and document.
Task = Mapping[str, Any]
Responses = Mapping[str, Mapping[str, Sequence[str]]]


def find_python(setting: str | None) -> Path:
    """The Python of lighteval's environment: `evaluation.lighteval_python`, else the environment variable, else
    .venv-eval in the working directory or beside this package.

    Raises:
        ConfigError: there is none.
    """
    if named := setting or os.environ.get(PYTHON_VARIABLE):
        if Path(named).is_file():
            return Path(named)
        raise ConfigError(f"evaluation.lighteval_python={named} does not exist: run `make eval-env`, or name another")
    for folder in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (folder / PYTHON).is_file():
            return folder / PYTHON
    raise ConfigError("evaluation.lighteval=true needs lighteval's own environment: run `make eval-env`")


def room_environment(inherited: Mapping[str, str], scratch: Path, *, offline: bool) -> dict[str, str]:
    """What lighteval's process sees: no launcher, no GPU, no caches but its own, no hub where `offline`."""
    environment = without_launcher(inherited)
    for name in [name for name in environment if name.startswith(("PYTHON", "COV", "ACCELERATE_"))]:
        del environment[name]
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DATASETS_CACHE": str(scratch / "datasets"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(scratch / "home")}
    return environment


class Room:
    """lighteval's process, started anew for each question; a context manager.

    `folder` takes its log, and its scratch files, which stay only after a failure.
    """

    def __init__(self, python: Path, folder: Path) -> None:
        # Not resolved: an environment's python is a link, and finds its packages by where the link is.
        self._python = python.absolute()
        self.log = folder.absolute() / LOG
        self._scratch = folder.absolute() / SCRATCH

    def __enter__(self) -> Self:
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            shutil.rmtree(self._scratch)

    def lay_out(self, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        """A folder that lighteval takes for a data set with these rows, in this order."""
        folder = self._scratch / "rows" / name
        folder.mkdir(parents=True)
        (folder / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return str(folder)

    def ask(self, action: str, tasks: Sequence[Task], responses: Responses | None = None) -> dict[str, Any]:
        """lighteval's answer to a request (see `lighteval_room`).

        Raises:
            JudgeError: it failed, with the last line that it wrote; or it took too long.
        """
        request, answer = self._scratch / "request.json", self._scratch / "answer.json"
        answer.unlink(missing_ok=True)
        responses = responses or {}
        asked = {"action": action, "scratch": str(self._scratch), "tasks": list(tasks), "responses": responses}
        request.write_text(json.dumps(asked), encoding="utf-8")
        count = sum(len(texts) for documents in responses.values() for texts in documents.values())
        offline = all(task["rows"] is not None for task in tasks)
        self._run([str(request), str(answer)], START_SECONDS + RESPONSE_SECONDS * count, offline)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found

    def _run(self, arguments: Sequence[str], seconds: float, offline: bool) -> None:
        with self.log.open("wb") as output:
            try:
                status = subprocess.run(
                    [str(self._python), "-I", lighteval_room.__file__, *arguments],
                    env=room_environment(os.environ, self._scratch, offline=offline),
                    # Libraries write to the working directory.
                    cwd=self._scratch,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise JudgeError(f"lighteval took more than {seconds:.0f} s (log: {self.log})") from None
        if status != 0:
            written = self.log.read_text(errors="replace").splitlines()
            last = next((line.strip() for line in reversed(written) if line.strip()), f"exit status {status}")
            hint = "" if offline else "; name local copies of the data with evaluation.paths"
            raise JudgeError(f"lighteval failed: {last} (log: {self.log}){hint}")
