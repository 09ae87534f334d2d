"""A whole plan: everything that is reckoned, put together once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.plan.hours import Bound, Hours, bound, hours
from grpo_lab.plan.memory import Memory, memory
from grpo_lab.plan.options import Options
from grpo_lab.plan.probe import probe
from grpo_lab.plan.rates import Measured, Rates, measured, stated
from grpo_lab.plan.shape import Shape, forward_flop, parameters, shape_of
from grpo_lab.plan.timeline import Timeline, timeline
from grpo_lab.plan.traffic import Disk, Sync, checkpoint_disk, sync_traffic
from grpo_lab.plan.volume import (
    Collection,
    Lengths,
    Volume,
    collection_of,
    completes_epoch,
    evaluated_problems,
    lengths_of,
    problems_of,
    updates_of,
    volume,
)
from grpo_lab.schedule import Schedule
from grpo_lab.validation import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the modules of the parts. `hours` and `bound` are None where no rate is known. `notes`: what was assumed."""

    title: str
    shape: Shape
    parameters: int
    forward_flop: float
    lengths: Lengths
    mixed: float
    timeline: Timeline
    volume: Volume
    memory: Memory
    sync: Sync
    disk: Disk
    rates: Rates | None
    hours: Hours | None
    bound: Bound | None
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.memory.fits}


def make_plan(config: TrainConfig, overrides: Sequence[str], options: Options) -> Plan:
    """The plan of a run. `overrides`: the words that `config` was composed from, for a probe.

    Raises:
        ConfigError: the run could not start, or lacks what a plan has to know.
        ProbeError: the probe failed.
    """
    if config.resume is not None:
        raise ConfigError("resume= goes on with a run: plan with the settings that it was started with")
    if config.source == "pool":
        raise ConfigError("source=pool samples nothing, and plans are of runs that sample: leave it out")
    warnings = validate(config)
    shape = shape_of(config)
    found = _measured(config, overrides, options)
    mixed = options.mixed or (found.mixed if found is not None else 1.0)
    lengths = lengths_of(
        config,
        prompt=options.prompt_tokens,
        response=options.response_tokens or (found.response_tokens if found is not None else None),
    )
    collection = collection_of(config, mixed=mixed)
    line = _timeline(config, collection)
    drawn = volume(config, collection, lengths, collections=line.counts["collect"], evaluations=line.counts["evaluate"])
    rates = found.rates if found is not None else stated(options)
    held = memory(shape, config, lengths, gpu_gib=options.gpu_gib)
    predicted = None if rates is None else hours(shape, config, rates, drawn, line, learning=held.batch.busy)
    return Plan(
        title=_title(config),
        shape=shape,
        parameters=parameters(shape),
        # In the middle of its response a token sees half of it.
        forward_flop=forward_flop(shape, lengths.prompt + lengths.response / 2),
        lengths=lengths,
        mixed=mixed,
        timeline=line,
        volume=drawn,
        memory=held,
        sync=sync_traffic(shape, config),
        disk=checkpoint_disk(shape, config),
        rates=rates,
        hours=predicted,
        bound=None if predicted is None else bound(config, predicted),
        notes=(*warnings, *_assumptions(config, options, found), *_idle(config, held)),
    )


def _measured(config: TrainConfig, overrides: Sequence[str], options: Options) -> Measured | None:
    if options.probe:
        return probe(config, overrides)
    return None if options.from_run is None else measured(Path(options.from_run))


def _timeline(config: TrainConfig, collection: Collection) -> Timeline:
    return timeline(
        Schedule.from_config(config),
        updates=updates_of(config, collection),
        completes_epoch=lambda done: completes_epoch(config, collection, done),
    )


def _title(config: TrainConfig) -> str:
    schedule, hardware = Schedule.from_config(config), config.hardware
    return (
        f"{config.model.name} on {config.dataset.name}, {config.objective.name}, v={schedule.v} i={schedule.i}, "
        f"hardware={hardware.name} ({hardware.ranks} ranks, {hardware.nodes} nodes)"
    )


def _idle(config: TrainConfig, held: Memory) -> list[str]:
    idle = config.hardware.ranks - held.batch.busy
    if not idle:
        return []
    return [
        f"an update has {held.batch.busy} rows for hardware.ranks={config.hardware.ranks}: {idle} ranks have nothing "
        "to learn from; raise groups_per_minibatch, or take fewer ranks"
    ]


def _assumptions(config: TrainConfig, options: Options, found: Measured | None) -> list[str]:
    notes = []
    if options.prompt_tokens is None:
        notes.append(
            f"prompts are taken to have rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} tokens: "
            "lengths.prompt= gives their mean"
        )
    if options.response_tokens is None and found is None:
        notes.append(
            f"responses are taken to have rollout.max_response_tokens={config.rollout.max_response_tokens} tokens: "
            "lengths.response= gives their mean"
        )
    if config.objective.zero_variance == "filter" and options.mixed is None and found is None:
        notes.append("every group drawn is taken to be kept: mixed= gives the share of those whose rewards differ")
    if evaluated_problems(config) is None:
        notes.append("how many problems are held out is not known: evaluations count for nothing here")
    if config.schedule.t_ref == "epoch" and problems_of(config.dataset) is None:
        notes.append("how many problems there are is not known: refreshes by epoch are not counted")
    if found is not None and found.model != config.model.name:
        notes.append(f"the rates are of model={found.model}, not of model={config.model.name}")
    return notes
