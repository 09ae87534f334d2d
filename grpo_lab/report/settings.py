"""Settings of runs and evaluations, key by key: which of them two have in a different way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_lab.config import TrainConfig
from grpo_lab.ledger import result_hash, result_settings

MISSING = object()


def changed_settings(stored: TrainConfig, wanted: TrainConfig) -> tuple[str, ...]:
    """Keys that decide results and that a stored run has otherwise than the cell that it is taken for; none where both
    come to the same results."""
    if result_hash(stored) == result_hash(wanted):
        return ()
    return differing(result_settings(stored), result_settings(wanted))


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted keys that only one of two has, or that they set otherwise. Tuples and lists are alike, as in JSON."""
    first, second = dict(flat(one)), dict(flat(other))
    return tuple(
        key for key in {**first, **second} if _text(first.get(key, MISSING)) != _text(second.get(key, MISSING))
    )


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return "" if value is MISSING else json.dumps(value, sort_keys=True)
