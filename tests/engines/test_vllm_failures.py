"""vLLM dies, hangs, does not start or does not fit: a restart that changes nothing, or one line that says why."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import make_prompt, sample_groups, save_model, tiny_model
from torch import Tensor
from vllm_cases import BuildEngine, members, perturbed_learner, same, vllm_config

from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.engine import VllmEngine, build_vllm_engine
from grpo_lab.rollout.vllm.server import ServerHost
from grpo_lab.rollout.vllm.worker import WorkerHost
from grpo_lab.sync import hand_over, prove_by_scoring
from grpo_lab.types import Rollout, Sampling
from grpo_lab.weights import Weights

PROMPTS = [make_prompt("a", [3, 12, 4, 13]), make_prompt("b", [9, 13])]
SAMPLING = Sampling(temperature=1.0, max_tokens=16)


def draw(engine: VllmEngine) -> list[Rollout]:
    return [r for g in sample_groups(engine, PROMPTS, group_size=4, sampling=SAMPLING) for r in g.rollouts]


def wait_until(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return what()


@contextmanager
def stopped(pid: int, *, then: signal.Signals | None = None) -> Iterator[None]:
    """The process stands still, so that it is at work whenever it is looked at, and gets the signal a little later."""
    os.kill(pid, signal.SIGSTOP)
    later = threading.Timer(0.5, lambda: os.kill(pid, then) if then else None)
    later.start()
    try:
        yield
    finally:
        later.join()


def drift(learner: TorchLearner, engine: VllmEngine) -> float:
    return prove_by_scoring(learner, engine, sample_groups(engine, PROMPTS, group_size=4, sampling=SAMPLING))


def worker_of(engine: VllmEngine) -> WorkerHost:
    assert isinstance(engine.host, WorkerHost)
    return engine.host


def test_a_lost_worker_is_started_again_as_often_as_allowed(
    build: BuildEngine, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    engine = build("rollout.vllm.generate_timeout=3", "rollout.vllm.restarts=2")
    learner = perturbed_learner()
    hand_over(engine, learner.weights(), version=5)
    before = draw(engine)
    digests = engine.digests()

    with caplog.at_level(logging.WARNING), stopped(worker_of(engine).pid or 0, then=signal.SIGKILL):
        after = draw(engine)
    assert same(after, before)
    assert {rollout.policy_version for rollout in after} == {5}
    assert engine.digests() == digests
    assert "died (signal 9)" in caplog.text
    assert "starting it again (1 of rollout.vllm.restarts=2)" in caplog.text

    # It hangs: noticed within the time limit.
    group = worker_of(engine)._process.group  # type: ignore[union-attr]
    with stopped(worker_of(engine).pid or 0):
        after = draw(engine)
    assert same(after, before)
    assert members(group) == []
    assert "did not answer within 3 seconds" in caplog.text
    assert drift(learner, engine) < 1e-5

    with stopped(worker_of(engine).pid or 0, then=signal.SIGKILL), pytest.raises(EngineError) as caught:
        draw(engine)
    message = str(caught.value)
    assert "restarts used: 2 of rollout.vllm.restarts=2" in message
    assert str(tmp_path / "vllm.log") in message
    assert "\n" not in message
    with pytest.raises(EngineError, match="restarts used: 2"):
        draw(engine)


def wrong_shape(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        yield name, tensor[:-1] if name.endswith("q_proj.weight") else tensor


def test_a_worker_takes_the_next_sync_or_is_lost(build: BuildEngine) -> None:
    engine = build("rollout.vllm.restarts=1")
    # It died while nobody asked for anything.
    process = worker_of(engine)._process
    assert process is not None
    os.kill(worker_of(engine).pid or 0, signal.SIGKILL)
    assert wait_until(lambda: process.ended() is not None)
    learner = perturbed_learner()
    hand_over(engine, learner.weights(), version=7)
    assert engine.restarted == 1
    assert drift(learner, engine) < 1e-5

    with pytest.raises(EngineError, match="did not take the weights of version 8: ") as caught:
        hand_over(engine, wrong_shape(learner.weights()), version=8)
    assert "\n" not in str(caught.value)
    with pytest.raises(EngineError, match="did not take the weights of version 8"):
        draw(engine)


def test_nothing_outlives_a_killed_run(vllm_model: Path, tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from vllm_cases import vllm_config
        from grpo_lab.rollout.vllm.engine import build_vllm_engine
        engine = build_vllm_engine(vllm_config(), {str(vllm_model)!r}, Path({str(tmp_path)!r}))
        print(engine.host._process.group, flush=True)
        time.sleep(600)
        """
    )
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert run.stdout is not None
        line = ""
        while not line.strip().isdigit():
            line = run.stdout.readline()
            assert line, "the run ended"
        assert len(members(int(line))) >= 2
    finally:
        run.kill()
        run.communicate()
    assert wait_until(lambda: members(int(line)) == [])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.vllm.kv_cache_gb=4000"], r"did not start: .*[Kk][Vv].*\(set rollout.vllm.kv_cache_gb, "),
        (
            ["rollout.vllm.max_model_len=100"],
            r"did not start: .*\(set rollout.vllm.max_model_len, or rollout.max_prompt",
        ),
        (["+rollout.vllm.extra.blok_size=1"], "rollout.vllm.extra.blok_size is no engine argument"),
        (["rollout.vllm.start_timeout=0.5"], "did not start: it did not answer within 0.5 seconds"),
    ],
    ids=["memory", "length", "unknown", "slow"],
)
def test_a_worker_that_does_not_start(build: BuildEngine, overrides: list[str], told: str) -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=told) as caught:
        build(*overrides)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 60


# --- servers ----------------------------------------------------------------------------------------------------


def url_of(engine: VllmEngine) -> str:
    assert isinstance(engine.host, ServerHost)
    assert engine.host._api is not None
    return engine.host._api.url


def connect(engine: VllmEngine, folder: Path, tmp_path: Path, *overrides: str) -> VllmEngine:
    config = vllm_config("rollout.vllm.mode=server", f"rollout.url={url_of(engine)}", *overrides)
    return build_vllm_engine(config, str(folder), tmp_path)


def test_a_server_that_two_runs_use(server: VllmEngine, vllm_model: Path, tmp_path: Path) -> None:
    learner = perturbed_learner()
    other = connect(server, vllm_model, tmp_path)
    try:
        hand_over(other, learner.weights(), version=3)
        assert drift(learner, other) < 1e-5
        hand_over(server, learner.weights(), version=3)
        # Even of one version and with equal weights: they were not this run's.
        with pytest.raises(EngineError, match="does another run use it"):
            draw(other)
    finally:
        other.close()
    assert len(draw(server)) == 8


def test_a_server_that_does_not_fit(server: VllmEngine, vllm_model: Path, tmp_path: Path) -> None:
    elsewhere = save_model(tiny_model("llama", head_dim=32), tmp_path / "llama")
    with pytest.raises(
        EngineError, match=r"has model=.*, the run needs .*llama; start it with: VLLM_SERVER_DEV_MODE=1 python -m vllm"
    ):
        connect(server, elsewhere, tmp_path)
    with pytest.raises(EngineError, match="has max_model_len=64, the run needs 104"):
        connect(server, vllm_model, tmp_path, "rollout.max_response_tokens=64")
    with pytest.raises(EngineError, match="has dtype=float32, the run needs bfloat16"):
        connect(server, vllm_model, tmp_path, "rollout.vllm.dtype=bf16")


def test_no_server_at_the_url(vllm_model: Path, tmp_path: Path) -> None:
    config = vllm_config("rollout.vllm.mode=server", "rollout.url=http://127.0.0.1:9", "rollout.vllm.start_timeout=1")
    with pytest.raises(EngineError, match=r"not up within rollout.vllm.start_timeout=1 seconds: .*start it with: "):
        build_vllm_engine(config, str(vllm_model), tmp_path)


def test_a_server_that_dies(
    server: VllmEngine, vllm_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that owns it starts it again, the run that was given its address waits for it in vain."""
    guest = connect(server, vllm_model, tmp_path, "rollout.vllm.start_timeout=1")
    learner = perturbed_learner()
    hand_over(server, learner.weights(), version=6)
    before = draw(server)
    assert isinstance(server.host, ServerHost)
    process = server.host._process
    assert process is not None
    # Whatever of the group does the work, the youngest of it, while it is asked.
    with caplog.at_level(logging.WARNING), stopped(max(members(process.group)), then=signal.SIGKILL):
        after = draw(server)
    assert [r.token_ids.tolist() for r in after] == [r.token_ids.tolist() for r in before]
    assert server.restarted == 1
    assert "the vLLM server was lost while sampling" in caplog.text
    assert members(process.group) == []
    assert drift(learner, server) < 1e-5

    began = time.monotonic()
    with pytest.raises(EngineError, match=r"not up within rollout.vllm.start_timeout=1 seconds.*start it with: "):
        draw(guest)
    assert time.monotonic() - began < 30
    guest.close()
