"""What a comparison found. Apart, so that the verifier can name it without loading the parser."""

from __future__ import annotations

from typing import NamedTuple

from grpo_lab.types import Verdict


class Finding(NamedTuple):
    """A verdict; with "error", why."""

    verdict: Verdict
    reason: str | None = None
