"""How fast a run is: rates that are stated, or taken from the folder of a run that was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.composition import load_config
from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.plan.options import Options
from grpo_lab.plan.sampler import sampling_devices
from grpo_lab.plan.shape import shape_of
from grpo_lab.plan.timeline import timeline
from grpo_lab.plan.traffic import checkpoint_disk, sync_traffic
from grpo_lab.runs import CONFIG_FILE
from grpo_lab.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """sample: generated tokens/s a device that samples. learn: response tokens/s a rank, of which each pass over a
    minibatch counts. sync, save: bytes/s; None where it is not known and takes no time here. evaluate: seconds of one
    evaluation, None where it is reckoned from `sample`."""

    sample: float
    learn: float
    sync: float | None
    save: float | None
    evaluate: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's rates, with the mean response length and the share of mixed groups that they belong to."""

    rates: Rates
    response_tokens: float
    mixed: float
    model: str


def stated(options: Options) -> Rates | None:
    """The rates on the command line; None where there are none."""
    if options.sample is None or options.learn is None:
        return None
    return Rates(
        sample=options.sample,
        learn=options.learn,
        sync=None if options.sync is None else options.sync * 1e9,
        save=None,
        evaluate=None,
        source="stated",
    )


def measured(run_dir: Path) -> Measured:
    """What a run folder tells.

    Raises:
        ConfigError: it is none, it ran with overlapping phases, or it logged too little.
    """
    config = load_config(run_dir / CONFIG_FILE)
    if config.schedule.overlap:
        raise ConfigError(
            f"from_run={run_dir} sampled while it learned (schedule.overlap=true): its phases cannot be told apart; "
            "take a run without"
        )
    rows, seconds = _rows(run_dir), _summary(run_dir)
    collects = [row for row in rows if "collect/drawn" in row]
    if not collects:
        raise ConfigError(f"from_run={run_dir} has logged no collection: let a run make a few updates first")
    # The first collection and update warm up what the later ones find warm.
    warm = collects[1:] or collects
    learned = rows[1:] or rows
    drawn = _drawn_tokens(rows)
    tokens = sum(drawn[row["update"]] for row in warm)
    used = config.groups_per_minibatch * config.group_size
    syncs = [row for row in warm if row["time"]["sync"] > 0] or warm
    shape = shape_of(config)
    sync_seconds = sum(row["time"]["sync"] for row in syncs)
    groups = sum(row["collect/drawn"] for row in collects)
    return Measured(
        rates=Rates(
            sample=tokens / sum(row["time"]["collect"] for row in warm) / sampling_devices(config),
            learn=sum(used * row["response/length"] for row in learned)
            / sum(row["time"]["learn"] for row in learned)
            / config.hardware.ranks,
            sync=sync_traffic(shape, config).stream * len(syncs) / sync_seconds if sync_seconds else None,
            source=str(run_dir),
            **_around(config, rows[-1]["update"], seconds),
        ),
        response_tokens=_mean([row["response/length"] for row in rows]),
        mixed=sum(row["collect/mixed_fraction"] * row["collect/drawn"] for row in collects) / groups,
        model=config.model.name,
    )


def _around(config: TrainConfig, updates: int, seconds: dict[str, float]) -> dict[str, float | None]:
    """The rates of saving and evaluating, whose seconds are known over a run alone."""
    events = timeline(Schedule.from_config(config), updates=updates, completes_epoch=lambda _: False).counts
    saved, evaluated = seconds["save"], seconds["evaluate"]
    size = checkpoint_disk(shape_of(config), config).one
    return {
        "save": size * events["save"] / saved if saved > 0 and events["save"] else None,
        "evaluate": evaluated / events["evaluate"] if evaluated > 0 and events["evaluate"] else None,
    }


def _drawn_tokens(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Tokens generated for each update, by the running total."""
    before = [0.0, *(row["total/tokens"] for row in rows)]
    return {row["update"]: row["total/tokens"] - then for row, then in zip(rows, before, strict=False)}


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"from_run={run_dir}: {path} cannot be read ({error})") from error
    return [row for row in rows if row["kind"] == "update"]


def _summary(run_dir: Path) -> dict[str, float]:
    path = run_dir / "summary.json"
    try:
        seconds: dict[str, float] = json.loads(path.read_text())["seconds"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"from_run={run_dir}: {path} cannot be read ({error!r})") from error
    return seconds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
