"""A copy of the run on Weights & Biases. Whatever goes wrong there costs one warning and never the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from grpo_lab.config import TrainConfig

if TYPE_CHECKING:
    from wandb import Run

# Seconds until an online start gives up and the run goes on offline.
START_TIMEOUT = 30.0
# Seconds that the end of a run waits for uploads; what is left stays on disk for `wandb sync`.
FINISH_TIMEOUT = 60.0


class WandbMirror:
    """One W&B run for one training run, under an id that a resume keeps.

    wandb's step counter restarts when an offline run is resumed, so it is never used: `update` is logged as a metric
    and is the step of all others. wandb is imported at `start`, and not at all when it is disabled.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, name: str, warn: Callable[[str], None]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._name = name
        self._warn = warn
        self._started = False
        self._run: Run | None = None
        self._broken = False
        self.run_id: str | None = None

    def start(self, run_id: str | None) -> None:
        """Begin the W&B run, a new one or one more part of `run_id`. Until then nothing may be logged."""
        self._started = True
        self.run_id = run_id
        if self._config.tracking.wandb == "disabled":
            return
        # wandb raises its own errors, its service's, the network's and the file system's: none may stop a run.
        try:
            self._run = self._init(self._mode())
        except Exception as error:
            self._warn(f"W&B did not start ({_first_line(error)}): the run goes on without it")
            return
        self.run_id = self._run.id

    def log(self, update: int, values: Mapping[str, Any]) -> None:
        """Mirror one row. The first failure warns and ends the mirroring."""
        assert self._started, "a resumed run calls load_state or start_afresh before it logs"
        if self._run is None or self._broken:
            return
        try:
            self._run.log({"update": update, **values})
        except Exception as error:
            self._fail(error)

    def finish(self, *, exit_code: int) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._fail(error)
        self._run = None

    def _fail(self, error: Exception) -> None:
        if not self._broken:
            self._warn(f"W&B failed ({_first_line(error)}): mirroring stops here, metrics.jsonl has every row")
        self._broken = True

    def _mode(self) -> str:
        """`online` only where a key is set up, so that wandb never asks for one."""
        wanted = self._config.tracking.wandb
        if wanted == "offline":
            return "offline"
        environment = os.environ.get("WANDB_MODE")
        if wanted == "auto" and environment in ("offline", "disabled"):
            return environment
        import wandb

        # Before login, which would announce itself on the terminal.
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            has_key = wandb.login(prompt=False, verify=False)
        except Exception as error:
            self._warn_offline(_first_line(error))
            return "offline"
        if not has_key and wanted == "online":
            self._warn_offline("no API key is set up: `wandb login`, or WANDB_API_KEY")
        return "online" if has_key else "offline"

    def _warn_offline(self, reason: str) -> None:
        self._warn(f"W&B cannot go online ({reason}): offline instead, upload later with `wandb sync`")

    def _init(self, mode: str) -> Run:
        try:
            return self._init_once(mode)
        except Exception as error:
            if mode != "online":
                raise
            self._warn_offline(_first_line(error))
            return self._init_once("offline")

    def _init_once(self, mode: str) -> Run:
        import wandb

        tracking = self._config.tracking
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=self._run_dir,
            id=self.run_id,
            resume="allow",
            reinit="finish_previous",
            project=tracking.project,
            group=tracking.group,
            name=self._name,
            tags=tracking.tags,
            job_type="train",
            config=OmegaConf.to_container(OmegaConf.structured(self._config), resolve=True),  # type: ignore[arg-type]
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=START_TIMEOUT, finish_timeout=FINISH_TIMEOUT
            ),
        )
        run.define_metric("*", step_metric="update")
        return run


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
