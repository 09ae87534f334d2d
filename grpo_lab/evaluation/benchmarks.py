"""From a benchmark's name to its prompts. What is known of a benchmark is in conf/dataset; here is how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_lab.composition import dataset_config
from grpo_lab.config import ArithmeticConfig, ConfigError, DatasetConfig, MixtureConfig, TableConfig, TrainConfig
from grpo_lab.prompts import Split, load_problems, render
from grpo_lab.seeds import derive
from grpo_lab.types import Problem, Prompt

# More than any prompt has: every problem of a benchmark counts.
NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Problems and their prompts. `found` problems are in the source, of which the prompts may be some; `expected` were
    published. `source`: the file, or the hub id and revision."""

    name: str
    dataset: DatasetConfig
    prompts: list[Prompt]
    source: str
    found: int
    expected: int | None
    warnings: list[str]


def load_benchmarks(config: TrainConfig, tokenizer: Any, *, limit_all: bool) -> list[Benchmark]:
    """What `evaluation.benchmarks` names, or the run's own held-out problems.

    `limit_all`: `evaluation.problems` was asked for here, and is not only the run's choice for its own problems.

    Raises:
        ConfigError: a source that cannot be loaded, or a model that cannot read it.
    """
    names = list(config.evaluation.benchmarks) or [config.dataset.name]
    return [_load(config, name, tokenizer, limit_all) for name in names]


def _load(config: TrainConfig, name: str, tokenizer: Any, limit_all: bool) -> Benchmark:
    own = name == config.dataset.name
    dataset = held_out_source(config.dataset if own else dataset_config(name), config.evaluation.paths.get(name))
    if _knows_only_sums(config) and not isinstance(dataset, ArithmeticConfig):
        raise ConfigError(
            f"model={config.model.name} knows only the characters of the made task, not those of {name}: evaluate "
            "another model, or evaluation.benchmarks=[arithmetic]"
        )
    split = _problems(dataset, name)
    limit = config.evaluation.problems if own or limit_all else None
    problems = some_of(split.test, limit)
    rendered = render(
        problems, dataset, tokenizer, max_prompt_tokens=config.rollout.max_prompt_tokens if own else NO_LIMIT
    )
    warnings = list(split.warnings)
    if repeated := split.report.get("duplicates"):
        warnings.append(f"{name}: {repeated} rows repeat an earlier question word for word and are asked once")
    if rendered.dropped:
        warnings.append(
            f"{name}: {rendered.dropped} prompts are longer than rollout.max_prompt_tokens="
            f"{config.rollout.max_prompt_tokens} and left out, as in training"
        )
    return Benchmark(
        name=name,
        dataset=dataset,
        prompts=rendered.prompts,
        source=str(split.report.get("source", dataset.name)),
        found=len(split.test),
        expected=_expected(dataset),
        warnings=warnings,
    )


def held_out_source(dataset: DatasetConfig, path: str | None) -> DatasetConfig:
    """The data set with its held-out problems alone, where they have a source of their own; `path` is a copy."""
    if isinstance(dataset, MixtureConfig) and dataset.test_set is not None:
        # Without the training problems, which take a while to read; posed as the mixture poses them.
        table = dataset_config(dataset.test_set)
        assert isinstance(table, TableConfig), "a mixture's test set is a table"
        posed = {name: getattr(dataset, name) for name in ("system_prompt", "template", "chat", "verifier", "on_error")}
        return replace(table, path=path or dataset.test_path, **posed)
    if not isinstance(dataset, TableConfig):
        if path is not None:
            raise ConfigError(f"evaluation.paths.{dataset.name} has no effect: {dataset.name} is not read from a file")
        return dataset
    alone = replace(dataset, held_out=1.0, test_path=None, test_split=None)
    if dataset.test_split is not None or dataset.test_path is not None:
        alone = replace(alone, expected_rows=dataset.expected_test_rows)
    if path is not None or dataset.test_path is not None:
        return replace(alone, path=path or dataset.test_path)
    if dataset.test_split is not None and dataset.path is None:
        return replace(alone, split=dataset.test_split)
    return dataset


def some_of(problems: Sequence[Problem], limit: int | None) -> list[Problem]:
    """`limit` of the problems, chosen by their own hashes, so the same ones for every seed; all where it is None."""
    if limit is None or limit >= len(problems):
        return list(problems)
    return sorted(problems, key=lambda problem: derive(0, "held out", problem.id))[:limit]


def _problems(dataset: DatasetConfig, name: str) -> Split:
    try:
        split = load_problems(dataset)
    except ConfigError as error:
        # The source's own keys are the training's; here there is one for each benchmark.
        raise ConfigError(
            f"benchmark {name} cannot be loaded; evaluation.paths.{name}=FILE reads a copy: {error}"
        ) from error
    if not split.test:
        raise ConfigError(
            f"benchmark {name} has no held-out problems: evaluation.paths.{name}=FILE names a file of them"
        )
    return split


def _expected(dataset: DatasetConfig) -> int | None:
    if isinstance(dataset, ArithmeticConfig):
        return dataset.test_problems
    return dataset.expected_rows if isinstance(dataset, TableConfig) and dataset.held_out == 1 else None


def _knows_only_sums(config: TrainConfig) -> bool:
    model = config.model
    return model.path is None and model.id is None and model.recipe is not None
