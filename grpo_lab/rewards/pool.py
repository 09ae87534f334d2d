"""The verifier of a run: many responses at once, hard time limits, counted verdicts."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self, get_args

from pebble import ProcessExpired, ProcessPool

from grpo_lab.config import ConfigError
from grpo_lab.rewards.extract import final_answer
from grpo_lab.rewards.finding import Finding
from grpo_lab.rewards.judge import judge_exact, quick_verdict
from grpo_lab.rewards.workers import judge_item, prepare, worker_context
from grpo_lab.types import Judgement, Problem, Verdict

logger = logging.getLogger(__name__)

KINDS = ("math", "exact")

# What a worker is asked: gold, extracted answer, tolerance.
Question = tuple[str, str, float | None]


class Verifier:
    """Judges responses against gold answers; a context manager.

    kind      "math": mathematical equality of the final answer; "exact": the text after the last `#`
    workers   processes; none is started before the first answer that needs one, and never for "exact"
    timeout   seconds that one answer may take before its worker is killed and replaced

    Verdicts come back in the order of the pairs, whatever the order in which workers finish. Use it from one thread.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(self, kind: str, *, workers: int, timeout: float) -> None:
        if kind not in KINDS:
            raise ConfigError(f"dataset.verifier={kind} is no verifier; use one of {', '.join(KINDS)}")
        if workers < 1:
            raise ConfigError(f"verifier.workers={workers} must be at least 1")
        if not 0 < timeout < math.inf:
            raise ConfigError(f"verifier.timeout={timeout} must be a number of seconds above 0")
        self.kind = kind
        self.workers = workers
        self.timeout = timeout
        self._counts: dict[Verdict, int] = dict.fromkeys(get_args(Verdict), 0)
        self._pool: ProcessPool | None = None
        self._is_closed = False
        self._open: set[Future[Finding]] = set()
        self._reported: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counts(self) -> dict[Verdict, int]:
        """Verdicts so far, by kind: of every `judge`, and of every `submit` whose result was taken."""
        return dict(self._counts)

    @property
    def is_started(self) -> bool:
        """Whether there are worker processes."""
        return self._pool is not None

    def judge(self, pairs: Sequence[tuple[Problem, str]]) -> list[Judgement]:
        """One judgement for each (problem, completion), in order."""
        return self.submit(pairs).result()

    def submit(self, pairs: Sequence[tuple[Problem, str]]) -> Pending:
        """Start judging and return at once; `result()` waits. What needs no parser is decided here and now.

        Raises:
            RuntimeError: the verifier is closed and an answer needs a worker.
        """
        decided: list[Judgement | None] = []
        questions: list[Question | None] = []
        for problem, completion in pairs:
            judgement, question = self._triage(problem, completion)
            decided.append(judgement)
            questions.append(question)
        # The same answer to the same problem is judged once.
        futures = {question: self._schedule(question) for question in dict.fromkeys(questions) if question is not None}
        return Pending(self, [problem for problem, _ in pairs], decided, questions, futures)

    def state(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {str(verdict): count for verdict, count in self._counts.items()}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from the counts that `state` gave.

        Raises:
            ConfigError: the names are not the verdicts.
        """
        if set(state) != set(self._counts):
            raise ConfigError(f"verifier counts name {sorted(state)}, not {sorted(self._counts)}: an older checkpoint")
        self._counts = {verdict: int(state[verdict]) for verdict in self._counts}

    def close(self) -> None:
        """End the workers, at once and whatever they are doing. Further calls do nothing."""
        self._is_closed = True
        self._stop_workers()

    def _stop_workers(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()
        # A stopped pool forgets what it was asked; nobody may wait for that.
        for future in list(self._open):
            future.cancel()

    def _triage(self, problem: Problem, completion: str) -> tuple[Judgement | None, Question | None]:
        """The judgement where it is plain, else the question for a worker."""
        if not problem.gold.strip():
            self._report(problem, "the gold answer is empty; correct it or drop the problem")
            return Judgement(verdict="error"), None
        if self.kind == "exact":
            return judge_exact(problem.gold, completion), None
        answer = final_answer(completion)
        if answer is None:
            return Judgement(verdict="unparsed"), None
        verdict = quick_verdict(problem.gold, answer, problem.tolerance)
        if verdict is not None:
            return Judgement(verdict=verdict, extracted=answer), None
        return None, (problem.gold, answer, problem.tolerance)

    def _schedule(self, question: Question) -> Future[Finding]:
        if self._is_closed:
            raise RuntimeError("the verifier is closed")
        if self._pool is not None and not self._pool.active:
            self._stop_workers()
        if self._pool is None:
            self._pool = ProcessPool(max_workers=self.workers, initializer=prepare, context=worker_context())
        future = self._pool.schedule(judge_item, args=(*question, self.timeout), timeout=self.timeout)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def _answer(self, question: Question, future: Future[Finding]) -> Finding:
        """What a worker found; a second try where the pool broke down under it."""
        try:
            return self._outcome(future)
        except (BrokenProcessPool, CancelledError):
            logger.warning("the verifier's workers broke down; starting new ones")
        try:
            return self._outcome(self._schedule(question))
        except (BrokenProcessPool, CancelledError):
            return Finding("error", "the verifier's workers broke down twice")

    def _outcome(self, future: Future[Finding]) -> Finding:
        while not future.done():
            wait([future], timeout=1.0)
            if self._pool is not None and not self._pool.active:
                self._stop_workers()
        try:
            return future.result()
        except TimeoutError:
            return Finding("timeout")
        except ProcessExpired as expired:
            if expired.exitcode == -signal.SIGXCPU:
                return Finding("timeout")
            return Finding("error", f"its worker died with code {expired.exitcode}")

    def _count(self, judgements: Sequence[Judgement]) -> None:
        for judgement in judgements:
            self._counts[judgement.verdict] += 1

    def _report(self, problem: Problem, reason: str) -> None:
        """One line for each gold answer that makes trouble, once."""
        if problem.gold not in self._reported:
            self._reported.add(problem.gold)
            logger.warning("problem %s, gold answer %.80r: %s", problem.id, problem.gold, reason)


class Pending:
    """Responses that are being judged."""

    def __init__(
        self,
        verifier: Verifier,
        problems: list[Problem],
        decided: list[Judgement | None],
        questions: list[Question | None],
        futures: Mapping[Question, Future[Finding]],
    ) -> None:
        self._verifier = verifier
        self._problems = problems
        self._decided = decided
        self._questions = questions
        self._futures = futures
        self._result: list[Judgement] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        return self._result is not None or all(future.done() for future in self._futures.values())

    def result(self) -> list[Judgement]:
        """Wait for all of them. Counted the first time; the same list ever after."""
        if self._result is None:
            found = {question: self._verifier._answer(question, future) for question, future in self._futures.items()}
            self._result = [self._judgement(index, found) for index in range(len(self._problems))]
            self._verifier._count(self._result)
        return self._result

    def _judgement(self, index: int, found: Mapping[Question, Finding]) -> Judgement:
        decided, question = self._decided[index], self._questions[index]
        if decided is not None:
            return decided
        assert question is not None
        verdict, reason = found[question]
        if reason is not None:
            self._verifier._report(self._problems[index], reason)
        return Judgement(verdict=verdict, extracted=question[1])
