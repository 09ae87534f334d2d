"""Weights to a vLLM server on GPUs, over vLLM's own transfer (NCCL).

Written against the sources of vLLM 0.32 and 0.33, whose trainer sides differ in what they call a source of weights; the
order of calls, the status of every reply and every time limit are tested against a server of that protocol on a CPU.
It has not run on a GPU yet.

One sync: pause (keep what is under way), start, one update per bucket while its bytes are broadcast, finish with the
new version, reset the prefix cache, resume. An update that fails leaves the other side of a broadcast waiting for ever:
every one runs on a thread of its own, and the first of its end, the server's error and the time limit counts.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.folder import BUCKET_BYTES
from grpo_lab.rollout.vllm.host import HostLost
from grpo_lab.rollout.vllm.http import ServerApi
from grpo_lab.weights import Weights

# Seconds for a server to take its part of the group down, at the end of a run that no longer needs it.
GOODBYE = 30.0

Bucket = list[tuple[str, Tensor]]
Report = Callable[[BaseException | None], None]


class Trainer(Protocol):
    """The part of vLLM's trainer-side engine that is used. It sends what its `source` holds."""

    source: Any

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where trainer and server form their group, and of how many."""

    address: str
    port: int
    size: int


class Client:
    """What vLLM's trainer side says to the server. Start and finish are the sync's, not each bucket's."""

    def __init__(self, api: ServerApi, *, timeout: float) -> None:
        self._api = api
        self._timeout = timeout
        self.report: Report = lambda error: None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._tell("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """The sync has started one."""

    def update_weights(self, update_info: Any) -> None:
        self._tell("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The sync finishes after its last bucket."""

    def _tell(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._api.post(path, body, timeout=self._timeout)
        except HostLost as lost:
            # At once: the thread that broadcasts may never hear of it.
            self.report(lost)
            raise


class NcclSender:
    """A `Sender` (see server.py). `device` is the GPU of the rank that sends, `version` the vLLM installed here."""

    reads_back = False

    def __init__(
        self,
        *,
        device: str,
        version: str,
        timeout: float,
        open_trainer: Callable[[Meeting, Client, Any], Trainer] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._device = torch.device(device)
        self._version = version
        self._timeout = timeout
        self._open = open_trainer or open_nccl
        self._bucket_bytes = bucket_bytes
        self._api: ServerApi | None = None
        self._client: Client | None = None
        self._trainer: Trainer | None = None
        self._sent = False

    @property
    def flags(self) -> dict[str, Any]:
        return {"weight_transfer_config": {"backend": "nccl"}}

    def connect(self, api: ServerApi) -> None:
        """Form the group. Every start of the server needs a new one."""
        self._api = api
        self._client = client = Client(api, timeout=self._timeout)
        size = 1 + int(api.get("/get_world_size", timeout=self._timeout)["world_size"])
        meeting = Meeting(*_own_address(api.url), size)
        opened: list[Trainer] = []
        deadline = time.monotonic() + self._timeout
        self._bounded(lambda: opened.append(self._open(meeting, client, self._source([]))), deadline)
        self._trainer = opened[0]

    def send(self, weights: Weights, label: str) -> None:
        """No digests: vLLM does not tell what arrived. Scoring what it samples does."""
        assert self._api is not None
        assert self._trainer is not None
        api, trainer, deadline = self._api, self._trainer, time.monotonic() + self._timeout
        api.post("/pause", timeout=self._timeout, mode="keep")
        api.post("/start_weight_update", timeout=self._timeout)
        for bucket in self._buckets(weights):
            trainer.source = self._source(bucket)
            self._bounded(trainer.send_weights, deadline)
        api.post("/finish_weight_update", {"weight_version": label}, timeout=self._timeout)
        api.reset_prefix_cache(timeout=self._timeout)
        api.post("/resume", timeout=self._timeout)
        self._sent = True

    def send_again(self, label: str) -> None:
        assert self._api is not None
        if self._sent:
            raise EngineError(
                "the vLLM server lost its weights, and of those sent over NCCL no copy is kept: restart the run from "
                "its last checkpoint (resume=)"
            )
        self._api.mark(label, timeout=self._timeout)

    def close(self) -> None:
        if self._trainer is not None and self._api is not None:
            with suppress(HostLost):
                self._api.post("/shutdown_weight_transfer_engine", timeout=min(self._timeout, GOODBYE))
            self._trainer.shutdown()
        self._trainer = self._api = None

    def _buckets(self, weights: Weights) -> Iterator[Bucket]:
        """The stream in parts, each copied: a tensor is valid only until the next is asked for."""
        bucket: Bucket = []
        held = 0
        for name, tensor in weights:
            if bucket and held + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append((name, tensor.detach().to(self._device, copy=True).contiguous()))
            held += tensor.nbytes
        if bucket:
            yield bucket

    def _source(self, bucket: Bucket) -> Any:
        return MethodSource(bucket) if self._version.startswith("0.32.") else PropertySource(bucket)

    def _bounded(self, work: Callable[[], None], deadline: float) -> None:
        """`work()` on a thread that is left behind where it does not end.

        Raises:
            HostLost: it failed, the server said that it did, or the time is over.
        """
        assert self._client is not None
        ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._client.report = ends.put

        def run() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                work()
            except BaseException as error:
                ends.put(error)
            else:
                ends.put(None)

        if self._device.type == "cuda":
            # The copies are to be whole before another thread, on another stream, sends them.
            torch.cuda.synchronize(self._device)
        threading.Thread(target=run, daemon=True, name="weight transfer").start()
        try:
            error = ends.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise HostLost(f"the transfer did not end within rollout.vllm.sync_timeout={self._timeout:g} s") from None
        if error is not None:
            raise HostLost(f"the transfer failed: {error}") from error


@dataclass(frozen=True, slots=True)
class Meta:
    """A weight, declared before it is sent: what vLLM reads of its own `ParamMeta`. No `owners` means every rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: None = None


def _metadata(bucket: Bucket) -> list[Meta]:
    return [Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket]


class MethodSource:
    """One bucket as vLLM 0.32 asks for it: metadata by a call, tensors by iteration."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def metadata(self) -> list[Meta]:
        return _metadata(self._bucket)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._bucket)


class PropertySource:
    """One bucket as vLLM 0.33 asks for it: metadata as an attribute, tensors by `iter_full`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.metadata = _metadata(bucket)

    def implements_iter_full(self) -> bool:
        return True

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._bucket)


def open_nccl(meeting: Meeting, client: Client, source: Any) -> Trainer:
    """vLLM's trainer side, in a group with all workers of the server."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = NCCLTrainerInitInfo(
        master_address=meeting.address,
        master_port=meeting.port,
        world_size=meeting.size,
        packed_buffer_size_bytes=BUCKET_BYTES,
        rank=0,
    )
    trainer: Trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return trainer


def _own_address(url: str) -> tuple[str, int]:
    """This host as the server sees it, and a port that is free here."""
    server = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as facing:
        # Sends nothing: it makes the system choose the address that faces the server.
        facing.connect((server.hostname or "127.0.0.1", server.port or 80))
        address: str = facing.getsockname()[0]
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return address, port
