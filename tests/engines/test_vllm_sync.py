"""A sync to real vLLM is proved, or the run stops: faults planted where a sync can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeServer
from tiny import make_prompt, sample_groups
from torch import Tensor
from vllm_cases import perturbed_learner

from grpo_lab.learner.torch_local import TorchLearner
from grpo_lab.rollout.vllm.engine import VllmEngine
from grpo_lab.rollout.vllm.http import ServerApi
from grpo_lab.rollout.vllm.settings import installed_version
from grpo_lab.rollout.vllm.transfer import NcclSender
from grpo_lab.rollout.vllm.worker import WorkerHost
from grpo_lab.sync import SyncError, hand_over, prove_by_scoring
from grpo_lab.types import Sampling
from grpo_lab.weights import Weights, combine, fingerprint

# The longer one fills a block of the prefix cache.
PROMPTS = [make_prompt("short", [3, 12, 4, 13]), make_prompt("long", [5, 12, 6, 13] * 10)]
SAMPLING = Sampling(temperature=1.0, max_tokens=24)


def drift(learner: TorchLearner, engine: VllmEngine) -> float:
    return prove_by_scoring(learner, engine, sample_groups(engine, PROMPTS, group_size=8, sampling=SAMPLING))


def test_a_right_sync_passes_both_checks(worker: VllmEngine) -> None:
    for version, seed in enumerate((11, 12, 13), start=1):
        learner = perturbed_learner(seed=seed)
        hashed = hand_over(worker, learner.weights(), version=version)
        held = worker.digests()
        assert held is not None
        assert hashed == combine(held) == fingerprint(learner.weights())
        assert worker.policy_version == version
        assert drift(learner, worker) < 1e-5


def test_a_tied_matrix_that_is_not_sent_is_found_by_scoring(worker: VllmEngine) -> None:
    """On a CPU vLLM packs the output matrix, and does so anew only when it comes under its own name."""
    learner = perturbed_learner(seed=21)
    sent = ((name, tensor) for name, tensor in learner.weights() if name != "lm_head.weight")
    hand_over(worker, sent, version=21)
    with pytest.raises(SyncError) as caught:
        drift(learner, worker)
    message = str(caught.value)
    assert "does not sample from version 21" in message
    assert "tolerance 0.0001" in message
    assert "resume=" in message
    found = float(message.split("differ by ")[1].split(" nats")[0])
    assert found > 1e-2
    hand_over(worker, learner.weights(), version=22)
    assert drift(learner, worker) < 1e-5


def plant(monkeypatch: pytest.MonkeyPatch, engine: VllmEngine, sent: Sequence[tuple[str, Tensor]]) -> None:
    """These weights go to vLLM, whatever is handed over."""
    load = engine.host.load

    def instead(weights: Weights, label: str) -> dict[str, str] | None:
        for _ in weights:
            pass
        return load(sent, label)

    monkeypatch.setattr(engine.host, "load", instead)


def test_old_weights_are_found(worker: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = perturbed_learner(seed=31), perturbed_learner(seed=32)
    hand_over(worker, old.weights(), version=31)
    plant(monkeypatch, worker, list(old.weights()))
    with pytest.raises(SyncError, match=r"weights of version 32 did not arrive: 25 of 25 differ .*resume="):
        hand_over(worker, new.weights(), version=32)
    # A hash that saw nothing, too.
    monkeypatch.setattr(worker, "digests", lambda: None)
    hand_over(worker, new.weights(), version=33)
    with pytest.raises(SyncError, match="does not sample from version 33"):
        drift(new, worker)


def test_half_of_the_weights_is_found(worker: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = perturbed_learner(seed=41), perturbed_learner(seed=42)
    hand_over(worker, old.weights(), version=41)
    weights = list(new.weights())
    # Whole layers: those that are not sent stay old.
    half = [(name, tensor) for name, tensor in weights if "layers.1" not in name]
    plant(monkeypatch, worker, half)
    with pytest.raises(
        SyncError, match=rf"did not arrive: {len(weights) - len(half)} of 25 differ.*the first is model\.layers\.1"
    ):
        hand_over(worker, new.weights(), version=42)
    monkeypatch.setattr(worker, "digests", lambda: None)
    hand_over(worker, new.weights(), version=43)
    with pytest.raises(SyncError, match="does not sample from version 43"):
        drift(new, worker)


def test_a_prefix_cache_that_is_kept_is_found(worker: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = perturbed_learner(seed=51), perturbed_learner(seed=52)
    hand_over(worker, old.weights(), version=51)
    assert drift(old, worker) < 1e-5
    assert isinstance(worker.host, WorkerHost)
    with monkeypatch.context() as planted:
        planted.setattr(worker.host, "reset_prefix_cache", lambda: None)
        hand_over(worker, new.weights(), version=52)
        with pytest.raises(SyncError, match="does not sample from version 52"):
            drift(new, worker)
    hand_over(worker, new.weights(), version=53)
    assert drift(new, worker) < 1e-5


def test_the_server_forgets_its_prefixes(server: VllmEngine) -> None:
    for seed in (61, 62):
        learner = perturbed_learner(seed=seed)
        hand_over(server, learner.weights(), version=seed)
        assert drift(learner, server) < 1e-5


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_vllms_own_transfer_takes_what_is_sent(vllm_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer side as it is installed, but for the broadcast itself, which needs GPUs."""
    from vllm.distributed.weight_transfer import nccl_engine

    broadcast: list[tuple[str, Tensor]] = []

    def without_gpus(self: Any, source: Any, metadata: list[Any]) -> None:
        broadcast.extend((name, tensor.clone()) for name, tensor in self._checked_iter(source, metadata))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: None)
    monkeypatch.setattr(nccl_engine.NCCLTrainerWeightTransferEngine, "_broadcast", without_gpus)
    fake = FakeServer()
    api = ServerApi(fake.url)
    sender = NcclSender(device="cpu", version=installed_version("cpu"), timeout=10.0, bucket_bytes=20_000)
    sender.connect(api)
    init = next(body for path, body in fake.calls if path == "/init_weight_transfer_engine")["init_info"]
    assert (init["rank_offset"], init["world_size"], init["packed"]) == (1, 3, True)
    for seed in (71, 72):
        broadcast.clear()
        fake.calls.clear()
        learner = perturbed_learner(seed=seed)
        sender.send(learner.weights(), f"run.{seed}")
        assert fingerprint(broadcast) == fingerprint(learner.weights())
        updates = [body["update_info"] for path, body in fake.calls if path == "/update_weights"]
        assert len(updates) > 1
        assert [name for update in updates for name in update["names"]] == [name for name, _ in learner.weights()]
        assert {each for update in updates for each in update["dtype_names"]} == {"float32"}
        assert fake.paths().count("/start_weight_update") == fake.paths().count("/finish_weight_update") == 1
    sender.close()
    api.close()
    fake.close()
