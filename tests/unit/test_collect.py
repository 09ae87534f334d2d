"""Filter, refill and accounting, with an engine that answers what it is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from grpo_lab.ahead import Ahead
from grpo_lab.collect import Collection, CollectionError, Collector, Exhausted, judged_groups, probe, retained_metrics
from grpo_lab.metrics import scalars
from grpo_lab.prompts import PromptStream
from grpo_lab.rewards import Verifier
from grpo_lab.types import Problem, Prompt, Rollout, Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=8)


class ScriptedEngine:
    """Gives prompt number k `correct[k]` right answers out of the group, wherever k comes up."""

    policy_version = 5
    drift_tolerance = 0.0

    def __init__(self, correct: dict[str, int], rows_at_once: int | None = None) -> None:
        self.correct = correct
        self.rows_at_once = rows_at_once
        self.seeds: list[int] = []
        self.asked: list[int] = []
        self.limits: list[int] = []

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        self.seeds += seeds
        self.asked.append(len(prompts))
        self.limits.append(sampling.max_tokens)
        return [[self._answer(prompt, j) for j in range(group_size)] for prompt in prompts]

    def _answer(self, prompt: Prompt, j: int) -> Rollout:
        right = j < self.correct[prompt.id]
        return Rollout(
            token_ids=np.arange(3 + j, dtype=np.int32),
            behaviour_logprobs=np.zeros(3 + j, dtype=np.float32),
            finish_reason="length" if j == 3 else "stop",
            policy_version=self.policy_version,
            text="#1" if right else "2" if j == 3 else "#2",
        )

    def load_weights(self, weights: Any, *, version: int) -> None:
        raise AssertionError("not part of collecting")

    def digests(self) -> dict[str, str] | None:
        return None

    def close(self) -> None:
        pass


def _prompts(count: int) -> list[Prompt]:
    return [
        Prompt(problem=Problem(id=f"p{k}", question=str(k), gold="1"), text=str(k), token_ids=(k,))
        for k in range(count)
    ]


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    with Verifier("exact", workers=1, timeout=1.0) as each:
        yield each


def _collector(verifier: Verifier, correct: list[int], **settings: Any) -> Collector:
    prompts = _prompts(len(correct))
    engine = ScriptedEngine({prompt.id: k for prompt, k in zip(prompts, correct, strict=True)})
    defaults: dict[str, Any] = {
        "group_size": 4,
        "sampling": SAMPLING,
        "batch": 4,
        "max_batches": 3,
        "filter_mixed": True,
        "epochs": None,
        "seed": 1,
    }
    return Collector(PromptStream(prompts, seed=0), engine, verifier, **(defaults | settings))


def test_mixed_groups_are_kept_first_come_and_the_surplus_is_spent(verifier: Verifier) -> None:
    # Twelve prompts: even ones are mixed, the others all right or all wrong.
    correct = [2 if k % 2 == 0 else 4 * (k % 4 == 1) for k in range(12)]
    collector = _collector(verifier, correct)
    order = [prompt.id for prompt in PromptStream(_prompts(12), seed=0).take(12)]
    mixed = [name for name in order if int(name[1:]) % 2 == 0]

    gathered = collector.collect(3)
    assert isinstance(gathered, Collection)
    drawn = 4 * -(-(order.index(mixed[2]) + 1) // 4)
    assert [group.prompt.id for group in gathered.groups] == mixed[:3]
    assert [order[group.sequence] for group in gathered.groups] == mixed[:3]
    row = gathered.accounting | gathered.totals
    inside = order[:drawn]
    assert row["collect/drawn"] == drawn
    assert row["collect/kept"] == 3
    assert row["collect/surplus"] == sum(int(name[1:]) % 2 == 0 for name in inside) - 3
    assert row["collect/all_correct"] == sum(int(name[1:]) % 4 == 1 for name in inside)
    assert row["collect/all_wrong"] == sum(int(name[1:]) % 4 == 3 for name in inside)
    assert row["reward/drawn"] == pytest.approx(sum(correct[int(name[1:])] for name in inside) / (4 * drawn))
    assert row["total/responses"] == 4 * drawn
    assert row["total/tokens"] == drawn * (3 + 4 + 5 + 6)

    # No rewind: the next collection starts where the last batch ended, and no response comes twice.
    again = collector.collect(1)
    assert isinstance(again, Collection)
    assert again.groups[0].sequence >= drawn
    verdicts = ("correct", "wrong", "unparsed", "timeout", "error")
    assert sum(row[f"verdict/{verdict}"] for verdict in verdicts) == 4 * drawn
    # The last of four answers where not all are right.
    assert row["verdict/unparsed"] == sum(correct[int(name[1:])] < 4 for name in inside)


def test_every_response_has_a_seed_of_its_own(verifier: Verifier) -> None:
    collector = _collector(verifier, [2] * 12)
    for _ in range(3):
        collector.collect(4)
    seeds = collector.engine.seeds  # type: ignore[attr-defined]
    assert len(seeds) == 12
    spread = {seed + j for seed in seeds for j in range(4)}
    assert len(spread) == 48
    other = _collector(verifier, [2] * 12, seed=2)
    other.collect(4)
    assert not set(seeds) & set(other.engine.seeds)  # type: ignore[attr-defined]


def test_equal_rewards_stay_where_nothing_is_filtered(verifier: Verifier) -> None:
    gathered = _collector(verifier, [0, 4, 2, 0], filter_mixed=False).collect(4)
    assert isinstance(gathered, Collection)
    assert sorted(sum(group.rewards) for group in gathered.groups) == [0, 0, 2, 4]
    assert gathered.epoch_completed


def test_a_collection_that_cannot_be_filled_says_what_was_drawn(verifier: Verifier) -> None:
    collector = _collector(verifier, [0, 4, 4, 2, 0, 4, 4, 0], max_batches=2)
    with pytest.raises(CollectionError) as caught:
        collector.collect(2)
    text = str(caught.value)
    assert "collection.max_batches=2 batches of 4 prompts held 1 groups of mixed rewards where 2 are needed" in text
    assert "groups by correct responses: 0/4: 3, 2/4: 1, 4/4: 4" in text
    assert "\n" not in text


def test_a_budget_in_epochs_counts_whole_batches(verifier: Verifier) -> None:
    collector = _collector(verifier, [2] * 10, epochs=2)
    ends = []
    while isinstance(gathered := collector.collect(4), Collection):
        ends.append(gathered.epoch_completed)
    assert gathered == Exhausted(0, 0)
    # Two batches of 4 a pass; the last two prompts of each are dropped.
    assert ends == [False, True, False, True]
    assert collector.total_responses == 4 * 16


def test_passes_of_whole_batches_lose_no_prompt(verifier: Verifier) -> None:
    collector = _collector(verifier, [2] * 8, epochs=1)
    found = [collector.collect(4), collector.collect(4), collector.collect(4)]
    assert [each.epoch_completed for each in found if isinstance(each, Collection)] == [False, True]
    assert [each.totals["epoch"] for each in found if isinstance(each, Collection)] == [0, 1]
    assert collector.total_responses == 4 * 8


def test_prompts_that_run_out_inside_a_collection_are_counted(verifier: Verifier) -> None:
    collector = _collector(verifier, [0, 2, 0, 2, 0, 2, 0, 0], epochs=1, max_batches=9)
    assert collector.collect(8) == Exhausted(drawn=8, kept=3)


def test_state_is_all_that_a_collector_remembers(verifier: Verifier) -> None:
    whole = _collector(verifier, [2] * 10)
    half = _collector(verifier, [2] * 10)
    for _ in range(2):
        whole.collect(3)
        half.collect(3)
    resumed = _collector(verifier, [2] * 10)
    resumed.load_state(half.state())
    one, other = whole.collect(3), resumed.collect(3)
    assert isinstance(one, Collection)
    assert isinstance(other, Collection)
    assert [group.sequence for group in one.groups] == [group.sequence for group in other.groups]
    assert [group.prompt.id for group in one.groups] == [group.prompt.id for group in other.groups]
    assert (one.accounting, one.totals) == (other.accounting, other.totals)


def test_what_a_minibatch_trains_on(verifier: Verifier) -> None:
    gathered = _collector(verifier, [1, 2, 3, 2], filter_mixed=True).collect(4)
    assert isinstance(gathered, Collection)
    row = scalars(retained_metrics(gathered.groups))
    assert row == {"reward/retained": 8 / 16, "response/length": 4.5, "response/truncated": 4 / 16}


# --- in parts, and ahead ----------------------------------------------------------------------------------------


def test_an_engine_of_few_rows_is_asked_in_parts_and_each_is_judged_meanwhile(verifier: Verifier) -> None:
    correct = [k % 5 for k in range(7)]
    prompts = _prompts(7)
    judged_when_asked: list[int] = []

    class Watching(ScriptedEngine):
        def generate(self, *arguments: Any, **settings: Any) -> list[list[Rollout]]:
            judged_when_asked.append(len(submitted))
            return super().generate(*arguments, **settings)

    submitted: list[int] = []
    submit = verifier.submit
    verifier.submit = lambda pairs: (submitted.append(len(pairs)), submit(pairs))[1]  # type: ignore[assignment, method-assign]
    results = {}
    for rows in (None, 9, 3):
        submitted.clear()
        judged_when_asked.clear()
        engine = Watching(dict(zip([prompt.id for prompt in prompts], correct, strict=True)), rows)
        results[rows] = judged_groups(
            engine, verifier, prompts, group_size=4, sampling=SAMPLING, seeds=list(range(0, 70, 10)), first=3
        )
        if rows == 9:
            # Nine rows hold two groups of four.
            assert engine.asked == [2, 2, 2, 1]
            assert judged_when_asked == [0, 1, 2, 3]
            assert submitted == [8, 8, 8, 4]
        if rows == 3:
            assert engine.asked == [1] * 7
        assert engine.seeds == list(range(0, 70, 10))
    whole = results[None]
    assert [sum(value > 0 for value in group.rewards) for group in whole] == correct
    assert [group.sequence for group in whole] == list(range(3, 10))
    for rows in (9, 3):
        assert [(group.rewards, group.verdicts, group.sequence) for group in results[rows]] == [
            (group.rewards, group.verdicts, group.sequence) for group in whole
        ]


def test_a_collection_ahead_is_the_one_that_would_have_come_next(verifier: Verifier) -> None:
    correct = [k % 4 for k in range(12)]
    plain, ahead = _collector(verifier, correct), Ahead(collector := _collector(verifier, correct))
    assert ahead.take() is None
    assert ahead.result() is None
    for _ in range(2):
        ahead.start(2)
        ahead.settle()
        state = collector.state()
        held = ahead.result()
        taken = ahead.take()
        assert taken is not None
        assert taken.result is held
        assert taken.seconds > 0
        assert ahead.take() is None
        expected = plain.collect(2)
        assert isinstance(expected, Collection)
        assert isinstance(held, Collection)
        assert [group.sequence for group in held.groups] == [group.sequence for group in expected.groups]
        assert (held.accounting, held.totals) == (expected.accounting, expected.totals)
        assert state["stream"] == plain.state()["stream"]
    ahead.restore(Exhausted(3, 1))
    assert ahead.result() == Exhausted(3, 1)
    ahead.close()


def test_what_goes_wrong_ahead_is_raised_where_it_is_taken(verifier: Verifier) -> None:
    ahead = Ahead(_collector(verifier, [0] * 12))
    ahead.start(2)
    ahead.settle()
    with pytest.raises(CollectionError, match="held 0 groups"):
        ahead.result()
    with pytest.raises(CollectionError, match="held 0 groups"):
        ahead.take()
    ahead.close()


def test_a_probe_counts_for_nothing(verifier: Verifier) -> None:
    collector = _collector(verifier, [1, 2, 3, 2])
    before = collector.state()
    prompts = _prompts(3)
    probes = probe(collector.engine, prompts, sampling=SAMPLING, seed=1, update=8)
    assert [group.prompt for group in probes] == prompts
    assert [len(group.rollouts) for group in probes] == [1, 1, 1]
    assert collector.state() == before
    engine = ScriptedEngine({prompt.id: 1 for prompt in prompts})
    for update in (8, 16):
        probe(engine, prompts, sampling=Sampling(temperature=1.0, max_tokens=4096), seed=1, update=update)
    assert len(set(engine.seeds)) == 6
    assert engine.limits == [64, 64]
