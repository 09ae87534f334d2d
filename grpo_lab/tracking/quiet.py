"""The tracker of a rank that does not lead: what the loop tells it, the leading rank's has been told as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grpo_lab.tracking.rollouts import Decode
from grpo_lab.types import Group


class QuietTracker:
    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def log_update(self, update: int, row: Mapping[str, float]) -> None: ...

    def log_evaluation(self, update: int, row: Mapping[str, float]) -> None: ...

    def log_rollouts(self, update: int, groups: Sequence[Group], scores: Any, decode: Decode) -> None: ...

    def message(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...

    def sampled_beside(self, seconds: float | None) -> None: ...

    def note(self, text: str) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def finish(self, *, status: str, next_command: str | None) -> None: ...
