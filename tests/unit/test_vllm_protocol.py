"""The vLLM adapter and a server: what it asks, in which order, and what it makes of the replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeServer
from tiny import EOS, char_tokenizer, make_prompt
from torch import Tensor

from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.engine import VllmEngine
from grpo_lab.rollout.vllm.folder import read_buckets
from grpo_lab.rollout.vllm.host import Batch, HostLost, sampling_arguments
from grpo_lab.rollout.vllm.http import ServerApi
from grpo_lab.rollout.vllm.server import PROBE, FolderSender, Sender, ServerHost, ServerSettings
from grpo_lab.rollout.vllm.transfer import Client, Meeting, MethodSource, NcclSender, PropertySource
from grpo_lab.types import Sampling
from grpo_lab.weights import digest, fingerprint

SAMPLING = Sampling(temperature=1.0, max_tokens=4)
PROMPTS = [make_prompt("a", [3, 12]), make_prompt("b", [4])]


def some_weights() -> dict[str, Tensor]:
    table, few = torch.arange(40.0).reshape(10, 4), torch.ones(3, dtype=torch.bfloat16)
    return {"embed": table, "b": few, "c": table.T, "head": table, "s": torch.tensor(2.0)}


def draw(engine: VllmEngine) -> list[list[int]]:
    answers = engine.generate(PROMPTS, group_size=2, sampling=SAMPLING, seeds=[10, 20])
    return [rollout.token_ids.tolist() for group in answers for rollout in group]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def api(fake: FakeServer) -> Iterator[ServerApi]:
    api = ServerApi(fake.url)
    yield api
    api.close()


BATCH = Batch(prompts=((3, 12), (4,), (5,)), seeds=(10, 20, 30), n=2, sampling=SAMPLING, end_tokens=(EOS,))


def test_completions(fake: FakeServer, api: ServerApi) -> None:
    fake.version_label = "v7"
    answers = api.complete("m", BATCH, timeout=10)
    assert [[answer.token_ids.tolist() for answer in group] for group in answers] == [
        [[10, EOS], [11, EOS]],
        [[20, EOS], [21, EOS]],
        [[30, EOS], [31, EOS]],
    ]
    assert answers[0][0].logprobs.dtype == np.float32
    assert answers[0][0].logprobs[1] == np.float32(-0.3)
    assert {answer.label for group in answers for answer in group} == {"v7"}
    body = next(body for path, body in fake.calls if path == "/v1/completions" and body["seed"] == 20)
    assert body == {"model": "m", "prompt": [4], "return_token_ids": True, **sampling_arguments(BATCH, 20)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda fake: fake.refuses.add("/v1/completions"),
            "/v1/completions was answered with status 500: .*worker failed",
        ),
        (lambda fake: fake.silent.add("/v1/completions"), "it did not answer within 1 seconds"),
        (lambda fake: fake.silent.add("/weight_info"), "/weight_info was not answered within 1 seconds"),
    ],
)
def test_a_server_that_fails_is_noticed(
    fake: FakeServer, api: ServerApi, change: Callable[[FakeServer], None], told: str
) -> None:
    change(fake)
    with pytest.raises(HostLost, match=told):
        api.complete("m", BATCH, timeout=1)


def test_a_server_that_is_gone(fake: FakeServer, api: ServerApi) -> None:
    fake.close()
    with pytest.raises(HostLost, match="/weight_info was not answered: ConnectError"):
        api.complete("m", BATCH, timeout=1)


ARGUMENTS = {
    "model": "some/model",
    "dtype": "float32",
    "max_model_len": 64,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "worker_extension_cls": "pkg.Reader",
    "enforce_eager": True,
    "seed": 0,
    "compilation_config": {"mode": 0},
}


def fitting(fake: FakeServer) -> dict[str, Any]:
    """Make the server one that fits; the values that it tells may then be changed."""
    model = {name: ARGUMENTS[name] for name in ("model", "max_model_len", "logprobs_mode", "generation_config")}
    info = {
        "model_config": {**model, "dtype": "torch.float32"},
        "parallel_config": {"worker_extension_cls": "pkg.Reader"},
    }
    fake.replies |= {
        "/version": {"version": "0.33.0"},
        "/v1/models": {"data": [{"id": "served"}]},
        "/server_info": {"vllm_config": info},
        "/tokenize": {"tokens": char_tokenizer()(PROBE, add_special_tokens=False)["input_ids"]},
    }
    return info


def make_host(
    fake: FakeServer, tmp_path: Path, sender: Sender | None = None, *, model: str = "some/model"
) -> ServerHost:
    settings = ServerSettings(
        url=fake.url,
        arguments={**ARGUMENTS, "model": model},
        environment={},
        log=tmp_path / "vllm.log",
        start_timeout=1.0,
        generate_timeout=1.0,
        sync_timeout=1.0,
    )
    return ServerHost(settings, char_tokenizer(), sender or FolderSender(tmp_path / "weights", timeout=1.0))


COMMAND = (
    "start it with: VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model some/model "
    "--dtype float32 --max-model-len 64 --logprobs-mode "
    "processed_logprobs --generation-config vllm --worker-extension-cls pkg.Reader --enforce-eager --seed 0 "
    "--compilation-config '{\"mode\": 0}'"
)


@pytest.mark.parametrize(
    ("part", "name", "value", "told"),
    [
        ("model_config", "model", "other/model", "has model=other/model, the run needs some/model"),
        (
            "model_config",
            "logprobs_mode",
            "raw_logprobs",
            "has logprobs_mode=raw_logprobs, the run needs processed_log",
        ),
        ("model_config", "dtype", "torch.bfloat16", "has dtype=bfloat16, the run needs float32"),
        ("model_config", "generation_config", "auto", "has generation_config=auto, the run needs vllm"),
        ("model_config", "max_model_len", 63, "has max_model_len=63, the run needs 64"),
        ("parallel_config", "worker_extension_cls", "", "has worker_extension_cls=, the run needs pkg.Reader"),
    ],
)
def test_a_server_that_does_not_fit(
    fake: FakeServer, tmp_path: Path, part: str, name: str, value: Any, told: str
) -> None:
    fitting(fake)[part][name] = value
    with pytest.raises(EngineError) as caught:
        make_host(fake, tmp_path).start()
    message = str(caught.value)
    assert told in message
    assert message.endswith(COMMAND)
    assert "\n" not in message


def test_a_server_that_is_offline_names_a_folder_of_the_hub(fake: FakeServer, tmp_path: Path) -> None:
    info = fitting(fake)
    info["model_config"]["model"] = "/cache/hub/models--some--model/snapshots/0a1b"
    make_host(fake, tmp_path).start()
    with pytest.raises(EngineError, match="the run needs some/mode;"):
        make_host(fake, tmp_path, model="some/mode").start()


def test_a_server_with_another_tokenizer_or_version(fake: FakeServer, tmp_path: Path) -> None:
    fitting(fake)
    fake.replies["/tokenize"] = {"tokens": [1, 2, 3]}
    with pytest.raises(EngineError, match="has another tokenizer than the model of the run; start it with"):
        make_host(fake, tmp_path).start()
    fake.replies["/version"] = {"version": "0.30.1"}
    with pytest.raises(EngineError, match=r"vLLM 0.30.1 is outside the tested range"):
        make_host(fake, tmp_path).start()
    fake.refuses.add("/server_info")
    fake.replies["/version"] = {"version": "0.32.0"}
    with pytest.raises(EngineError, match=r"does not answer as it should: /server_info .*start it with"):
        make_host(fake, tmp_path).start()


def test_a_server_that_is_no_vllm(fake: FakeServer, tmp_path: Path) -> None:
    fitting(fake)
    fake.replies["/server_info"] = {"name": "another program"}
    with pytest.raises(EngineError, match=r"does not answer as vLLM does \(KeyError\('vllm_config'\)\); start it with"):
        make_host(fake, tmp_path).start()
    fake.replies["/version"] = "<html>"
    fake.pages.add("/version")
    with pytest.raises(EngineError, match=r"/version was answered with something else than JSON"):
        make_host(fake, tmp_path).start()


def test_a_server_that_its_keeper_restarted_gets_its_weights_again(fake: FakeServer, tmp_path: Path) -> None:
    fitting(fake)
    engine = VllmEngine(
        make_host(fake, tmp_path),
        char_tokenizer(),
        end_tokens=frozenset({EOS}),
        dtype=torch.float32,
        max_length=16,
        restarts=1,
    )
    engine.start()
    weights = some_weights()
    fake.replies["/collective_rpc"] = {"results": [{name: digest(name, tensor) for name, tensor in weights.items()}]}
    fake.calls.clear()
    engine.load_weights(weights.items(), version=1)
    # The cache goes after the weights came, and only then are they called the new version.
    assert fake.paths() == ["/health", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
    first = draw(engine)

    fake.version_label = "default"
    fake.calls.clear()
    assert draw(engine) == first
    assert engine.restarted == 1
    paths = fake.paths()
    assert paths.count("/collective_rpc") == 1
    assert paths.index("/collective_rpc") < paths.index("/v1/completions")
    (folder,) = next(body for path, body in fake.calls if path == "/collective_rpc")["args"]
    assert fingerprint(read_buckets(Path(folder))) == fingerprint(weights.items())
    engine.close()


# --- vLLM's own weight transfer ---------------------------------------------------------------------------------


class FakeTrainer:
    """Sends as vLLM's trainer side does: the update is asked for on a thread while the bytes are broadcast."""

    def __init__(self, meeting: Meeting, client: Client, source: Any) -> None:
        self.meeting, self.client, self.source = meeting, client, source
        self.sent: list[tuple[str, Tensor]] = []
        self.broadcast_hangs = False
        self.closed = False
        client.init_weight_transfer_engine({"port": meeting.port})

    def send_weights(self) -> None:
        new = isinstance(self.source, PropertySource)
        metadata = self.source.metadata if new else self.source.metadata()
        self.client.start_weight_update()
        names = [meta.name for meta in metadata]
        update = threading.Thread(target=self._update, args=(names,), daemon=True)
        update.start()
        if self.broadcast_hangs:
            time.sleep(60)
        for meta, (name, tensor) in zip(metadata, self.source.iter_full() if new else self.source, strict=True):
            assert (meta.name, meta.dtype, meta.shape) == (name, tensor.dtype, tuple(tensor.shape))
            self.sent.append((name, tensor.clone()))
        update.join()
        self.client.finish_weight_update()

    def _update(self, names: list[str]) -> None:
        try:
            self.client.update_weights({"names": names})
        except HostLost:
            """The client has told whom it concerns."""

    def shutdown(self) -> None:
        self.closed = True


def make_sender(api: ServerApi, *, version: str = "0.32.0", timeout: float = 5.0) -> tuple[NcclSender, FakeTrainer]:
    trainers: list[FakeTrainer] = []

    def open_trainer(meeting: Meeting, client: Client, source: Any) -> FakeTrainer:
        trainers.append(FakeTrainer(meeting, client, source))
        return trainers[-1]

    sender = NcclSender(device="cpu", version=version, timeout=timeout, open_trainer=open_trainer, bucket_bytes=200)
    sender.connect(api)
    return sender, trainers[0]


@pytest.mark.parametrize(("version", "source"), [("0.32.0", MethodSource), ("0.33.0", PropertySource)])
def test_the_order_of_a_transfer(fake: FakeServer, api: ServerApi, version: str, source: type) -> None:
    sender, trainer = make_sender(api, version=version)
    assert trainer.meeting.address == "127.0.0.1"
    # Two workers of the server, and the trainer.
    assert trainer.meeting.size == 3
    assert fake.paths() == ["/get_world_size", "/init_weight_transfer_engine"]
    fake.calls.clear()
    weights = some_weights()
    assert sender.send(weights.items(), "run.5") is None
    assert fake.paths() == [
        "/pause?mode=keep",
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    updates = [body["update_info"]["names"] for path, body in fake.calls if path == "/update_weights"]
    assert updates == [["embed", "b"], ["c"], ["head", "s"]]
    assert next(body for path, body in fake.calls if path == "/finish_weight_update") == {"weight_version": "run.5"}
    assert fingerprint(trainer.sent) == fingerprint(weights.items())
    assert isinstance(trainer.source, source)
    sender.close()
    assert trainer.closed
    assert fake.paths()[-1] == "/shutdown_weight_transfer_engine"


def test_the_end_of_a_run_that_sent_over_nccl(fake: FakeServer, tmp_path: Path) -> None:
    """The group is taken down while the server is still spoken to; of one that is gone nothing more is asked."""
    fitting(fake)
    trainers: list[FakeTrainer] = []

    def open_trainer(meeting: Meeting, client: Client, source: Any) -> FakeTrainer:
        trainers.append(FakeTrainer(meeting, client, source))
        return trainers[-1]

    def started() -> ServerHost:
        sender = NcclSender(device="cpu", version="0.32.0", timeout=5.0, open_trainer=open_trainer)
        host = make_host(fake, tmp_path, sender)
        host.start()
        return host

    started().close()
    assert fake.paths()[-1] == "/shutdown_weight_transfer_engine"
    lost = started()
    lost.kill()
    fake.calls.clear()
    lost.close()
    assert fake.paths() == []
    assert [each.closed for each in trainers] == [True, True]


def test_a_transfer_takes_each_tensor_before_the_next(api: ServerApi) -> None:
    sender, trainer = make_sender(api)

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in some_weights().items():
            gathered = tensor.clone(memory_format=torch.preserve_format)
            yield name, gathered
            gathered.fill_(-1)

    sender.send(passing(), "v")
    assert fingerprint(trainer.sent) == fingerprint(some_weights().items())


@pytest.mark.parametrize(
    "path",
    ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"],
)
def test_every_reply_of_a_transfer_is_looked_at(fake: FakeServer, api: ServerApi, path: str) -> None:
    sender, _ = make_sender(api)
    fake.refuses.add(path)
    with pytest.raises(HostLost, match=f"{path} was answered with status 500: .*worker failed"):
        sender.send(some_weights().items(), "v")
    # Nothing after it: no half-updated engine is put to work again.
    assert fake.paths()[-1].partition("?")[0] == path


def test_a_cache_that_is_not_reset_is_an_error(fake: FakeServer, api: ServerApi) -> None:
    sender, _ = make_sender(api)
    fake.replies["/reset_prefix_cache"] = {"success": False}
    with pytest.raises(HostLost, match="did not reset its prefix cache"):
        sender.send(some_weights().items(), "v")
    assert "/resume" not in fake.paths()


def test_an_update_that_fails_does_not_wait_for_its_broadcast(fake: FakeServer, api: ServerApi) -> None:
    sender, trainer = make_sender(api, timeout=30.0)
    trainer.broadcast_hangs = True
    fake.refuses.add("/update_weights")
    began = time.monotonic()
    with pytest.raises(HostLost, match="the transfer failed: /update_weights was answered with status 500"):
        sender.send(some_weights().items(), "v")
    assert time.monotonic() - began < 5


def test_a_transfer_that_hangs_ends_in_time(api: ServerApi) -> None:
    sender, trainer = make_sender(api, timeout=0.5)
    trainer.broadcast_hangs = True
    with pytest.raises(HostLost, match=r"did not end within rollout.vllm.sync_timeout=0.5 s"):
        sender.send(some_weights().items(), "v")


def test_weights_sent_over_nccl_are_not_kept(fake: FakeServer, api: ServerApi) -> None:
    sender, _ = make_sender(api)
    sender.send_again("first")
    assert fake.version_label == "first"
    sender.send(some_weights().items(), "second")
    with pytest.raises(EngineError, match=r"restart the run from its last checkpoint \(resume=\)"):
        sender.send_again("second")
