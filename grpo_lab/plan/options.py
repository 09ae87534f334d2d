"""What a plan is told besides the run's own keys: `key=value` words like the others, taken off before Hydra reads the
rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lab.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `OWN` for the words. Rates are None where they are not stated, lengths where the run's limits stand in."""

    probe: bool = False
    from_run: str | None = None
    sample: float | None = None
    learn: float | None = None
    sync: float | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    mixed: float | None = None
    gpu_gib: float | None = None
    json: bool = False


# Word to field.
OWN = {
    "probe": "probe",
    "from_run": "from_run",
    "rates.sample": "sample",
    "rates.learn": "learn",
    "rates.sync": "sync",
    "lengths.prompt": "prompt_tokens",
    "lengths.response": "response_tokens",
    "mixed": "mixed",
    "gpu_gib": "gpu_gib",
    "json": "json",
}
SWITCHES = ("probe", "json")
WORDS = {"true": True, "false": False}


def take_options(words: Sequence[str]) -> tuple[Options, list[str]]:
    """The plan's own words read, and the rest, which are the run's.

    Raises:
        ConfigError: a value that does not fit, or two sources of rates.
    """
    given: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in OWN:
            given[OWN[key]] = _read(key, value)
        else:
            rest.append(word)
    options = Options(**given)
    stated = any(rate is not None for rate in (options.sample, options.learn, options.sync))
    if sum((options.probe, options.from_run is not None, stated)) > 1:
        raise ConfigError("probe=, from_run= and rates.*= each say how fast a run is: give one of them")
    if options.sync is not None and (options.sample is None or options.learn is None):
        raise ConfigError("rates.sync= needs rates.sample= and rates.learn= as well")
    if (options.sample is None) != (options.learn is None):
        raise ConfigError("rates.sample= and rates.learn= go together: hours need both")
    return options, rest


def _read(key: str, value: str) -> Any:
    if key == "from_run":
        return value
    if key in SWITCHES:
        if value.lower() not in WORDS:
            raise ConfigError(f"{key}={value} must be true or false")
        return WORDS[value.lower()]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{key}={value} must be a number above 0")
    if key == "mixed" and number > 1:
        raise ConfigError(f"mixed={value} must lie in (0, 1]: the share of drawn groups that are kept")
    return number
