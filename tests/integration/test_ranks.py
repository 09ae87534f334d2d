"""What ranks tell each other, with two real processes over gloo."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import char_tokenizer, make_prompt, tiny_model

from grpo_lab import distributed
from grpo_lab.distributed import LeaderFailed, RankLost, World
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.rollout.spread import SpreadEngine
from grpo_lab.types import Sampling

SIZE = 2
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["grpo_lab.build", "grpo_lab.train"])


def _rank(rank: int, port: int, work: Callable[[World], Any], answers: Any) -> None:
    import os

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    world = distributed.join(rank=rank, size=SIZE, local_rank=rank)
    try:
        answers.put((rank, work(world)))
    except Exception as error:
        answers.put((rank, error))
    distributed.leave()


def on_ranks(work: Callable[[World], Any]) -> list[Any]:
    """What `work` returns or raises on each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = _PROCESSES.Queue()
    processes = [_PROCESSES.Process(target=_rank, args=(rank, port, work, answers)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    told = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    return [told[rank] for rank in range(SIZE)]


def _tell(world: World) -> list[Any]:
    return [
        world.lead(lambda: f"from {world.rank}"),
        world.lead_alone(lambda: f"kept by {world.rank}"),
        world.gather(world.rank * 10),
        world.gather_to_leader(world.rank * 10),
        world.sum(np.array([world.rank, 1 - world.rank, 0.1 * world.rank], dtype=np.float32)).tolist(),
    ]


def test_what_ranks_tell_each_other() -> None:
    tenth = float(np.float32(0.1))
    assert on_ranks(_tell) == [
        ["from 0", "kept by 0", [0, 10], [0, 10], [1, 1, tenth]],
        ["from 0", None, [0, 10], None, [1, 1, tenth]],
    ]


def _share(world: World) -> list[tuple[str, int]]:
    return list(world.share([("a", 1), ("b", 2)] if world.is_leader else []))


def test_the_leaders_items_reach_all() -> None:
    assert on_ranks(_share) == [[("a", 1), ("b", 2)]] * 2
    assert list(World().share([3, 4])) == [3, 4]


def _fail(world: World) -> None:
    def work() -> None:
        raise ValueError("no such file")

    world.lead(work)


def test_a_leader_that_fails_says_so_to_all() -> None:
    leader, other = on_ranks(_fail)
    assert isinstance(leader, ValueError)
    assert isinstance(other, LeaderFailed)
    assert str(other) == "ValueError: no such file"


def _vanish(world: World) -> Any:
    if world.rank == 1:
        return "gone"
    return world.gather(0)


def test_a_rank_that_is_gone_is_noticed() -> None:
    leader, other = on_ranks(_vanish)
    assert other == "gone"
    assert isinstance(leader, RankLost)


# --- one engine over the ranks ----------------------------------------------------------------------------------

PROMPTS = [make_prompt(str(length), [2 + length % 9] * length) for length in (4, 1, 7, 2, 3)]
SAMPLING = Sampling(temperature=1.0, max_tokens=12)


def _sample(engine: Any, count: int) -> list[list[list[int]]]:
    prompts = PROMPTS[:count]
    answers = engine.generate(prompts, group_size=3, sampling=SAMPLING, seeds=[100 * n for n in range(len(prompts))])
    return [[rollout.token_ids.tolist() for rollout in group] for group in answers]


def _hf(changed: bool = False) -> HfEngine:
    return HfEngine(tiny_model("qwen3", seed=int(changed)), char_tokenizer(), max_rows=64)


def _sample_together(world: World) -> Any:
    engine = SpreadEngine(_hf(), world)
    first = engine.lead(lambda: [_sample(engine, 5), _sample(engine, 1)])
    engine.load_weights(tiny_model("qwen3", seed=1).named_parameters(remove_duplicate=False), version=7)
    second = engine.lead(lambda: _sample(engine, 5))
    return first, second, engine.policy_version


def test_prompts_dealt_out_to_ranks_get_the_answers_of_one_engine() -> None:
    expected = [_sample(_hf(), 5), _sample(_hf(), 1)], _sample(_hf(changed=True), 5), 7
    assert expected[0][0] != expected[1]
    assert on_ranks(_sample_together) == [expected, expected]


def _fail_between(world: World) -> Any:
    engine = SpreadEngine(_hf(), world)

    def work() -> None:
        _sample(engine, 2)
        raise KeyError("judge")

    return engine.lead(work)


def test_a_failure_between_samples_lets_the_others_go() -> None:
    leader, other = on_ranks(_fail_between)
    assert isinstance(leader, KeyError)
    assert isinstance(other, LeaderFailed)


def test_one_rank_needs_no_process_group(tmp_path: Path) -> None:
    world = World()
    assert world.lead(lambda: 3) == 3
    assert world.lead_alone(lambda: 3) == 3
    assert world.gather("x") == world.gather_to_leader("x") == ["x"]
    assert world.sum(np.ones(2)).tolist() == [1, 1]
    with pytest.raises(ZeroDivisionError):
        world.lead(lambda: 1 // 0)
