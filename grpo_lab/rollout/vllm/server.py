"""vLLM as a server of its own, spoken to over HTTP: one that the run starts, or the one at `rollout.url`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_lab.config import ConfigError
from grpo_lab.guarded import GuardedProcess
from grpo_lab.launch import free_port
from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.folder import WeightFolder
from grpo_lab.rollout.vllm.host import Answer, Batch, HostLost, agreed
from grpo_lab.rollout.vllm.http import ServerApi
from grpo_lab.rollout.vllm.settings import check_version, start_failure
from grpo_lab.weights import Weights

# Seconds for a small question, and between two questions whether it is up.
SHORT = 10.0
ASK_EVERY = 0.5
# The module behind `vllm serve`, a script that the CPU build of vLLM 0.32 cannot start.
SERVE = ["python", "-m", "vllm.entrypoints.openai.api_server"]
# The name of the weights that a server starts with.
FRESH = "default"
# Opens the routes that weights and caches are changed through.
DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
# A text that tokenizers of different models split differently.
PROBE = "12+34=46 The quick brown fox \\boxed{7} ÷ 3.5 naïve"


class Sender(Protocol):
    """A way to bring weights to a server."""

    @property
    def reads_back(self) -> bool: ...

    @property
    def flags(self) -> Mapping[str, Any]:
        """What the server's command must say for it, beside the engine arguments."""
        ...

    def connect(self, api: ServerApi) -> None:
        """Once after every start of the server."""
        ...

    def send(self, weights: Weights, label: str) -> dict[str, str] | None:
        """As `Host.load`."""
        ...

    def send_again(self, label: str) -> dict[str, str] | None:
        """As `Host.reload`.

        Raises:
            EngineError: what was sent is not kept.
        """
        ...

    def close(self) -> None: ...


class FolderSender:
    """Through a folder that both sides see: works everywhere, and what arrived is hashed there."""

    reads_back = True

    def __init__(self, weights_dir: Path, *, timeout: float) -> None:
        self._folder = WeightFolder(weights_dir)
        self._timeout = timeout
        self._api: ServerApi | None = None

    @property
    def flags(self) -> Mapping[str, Any]:
        return {}

    def connect(self, api: ServerApi) -> None:
        self._api = api

    def send(self, weights: Weights, label: str) -> dict[str, str]:
        folder = self._folder.write(weights)
        digests = self._load(folder, label)
        self._folder.keep(folder)
        return digests

    def send_again(self, label: str) -> dict[str, str] | None:
        if self._folder.latest is not None:
            return self._load(self._folder.latest, label)
        assert self._api is not None
        self._api.mark(label, timeout=self._timeout)
        return None

    def _load(self, folder: Path, label: str) -> dict[str, str]:
        assert self._api is not None
        body = {"method": "load_weight_folder", "args": [str(folder.resolve())]}
        digests = agreed(self._api.post("/collective_rpc", body, timeout=self._timeout)["results"])
        self._api.reset_prefix_cache(timeout=self._timeout)
        self._api.mark(label, timeout=self._timeout)
        return digests

    def close(self) -> None:
        self._folder.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """`arguments` are vLLM's engine arguments; times are limits in seconds. `url` is None where the run starts it."""

    url: str | None
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    log: Path
    start_timeout: float
    generate_timeout: float
    sync_timeout: float


class ServerHost:
    """See the module. A lost server of the run's own is started again; another's is waited for."""

    def __init__(self, settings: ServerSettings, tokenizer: Any, sender: Sender) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._sender = sender
        self._process: GuardedProcess | None = None
        self._api: ServerApi | None = None
        self._model = ""
        self.name = "the vLLM server" + (f" at {settings.url}" if settings.url else "")

    @property
    def running(self) -> bool:
        return self._api is not None

    @property
    def reads_back(self) -> bool:
        return self._sender.reads_back

    def start(self) -> None:
        url = self._settings.url or self._launch()
        self._api = ServerApi(url)
        try:
            self._wait()
            self._check_fits()
            self._sender.connect(self._api)
        except HostLost as lost:
            self.kill()
            raise EngineError(f"{self.name} does not answer as it should: {lost}; {self._how()}") from lost
        except BaseException:
            self.kill()
            raise

    def _launch(self) -> str:
        port = free_port()
        settings = self._settings
        flags = {**settings.arguments, **self._sender.flags, "host": "127.0.0.1", "port": port}
        command = [sys.executable, *SERVE[1:], *_flags(flags)]
        environment = {**settings.environment, DEVELOPMENT: "1"}
        self._process = GuardedProcess(command, environment=environment, log=settings.log)
        return f"http://127.0.0.1:{port}"

    def _wait(self) -> None:
        """Until it is up.

        Raises:
            EngineError: it ended, or the time is over.
        """
        assert self._api is not None
        limit = self._settings.start_timeout
        deadline = time.monotonic() + limit
        while True:
            try:
                self._api.get("/health", timeout=SHORT)
                return
            except HostLost as lost:
                end = None if self._process is None else self._process.ended()
                if end is not None:
                    assert self._process is not None
                    reason = self._process.complaint() or f"it ended ({end})"
                    raise EngineError(start_failure(self.name, reason, self._settings.log)) from lost
                if time.monotonic() > deadline:
                    reason = f"it was not up within rollout.vllm.start_timeout={limit:g} seconds"
                    if self._process is None:
                        raise EngineError(f"{self.name}: {reason}: {lost}; {self._how()}") from lost
                    raise EngineError(start_failure(self.name, reason, self._settings.log)) from lost
            time.sleep(ASK_EVERY)

    def _check_fits(self) -> None:
        """Raises:
        EngineError: it serves something else than the run needs, or is no vLLM.
        """
        try:
            self._compare_settings()
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.name} does not answer as vLLM does ({error!r}); {self._how()}") from error

    def _compare_settings(self) -> None:
        assert self._api is not None
        try:
            check_version(self._api.get("/version", timeout=SHORT)["version"])
        except ConfigError as error:
            raise EngineError(f"{self.name}: {error}") from error
        # It also lists the machine's packages and GPUs, which can take minutes on a cluster's file system.
        limit = self._settings.start_timeout
        info = self._api.get("/server_info", timeout=limit, config_format="json")["vllm_config"]
        wanted, held = self._settings.arguments, info["model_config"]
        self._model = self._api.get("/v1/models", timeout=SHORT)["data"][0]["id"]
        found = {
            "model": held["model"],
            "dtype": held["dtype"].removeprefix("torch."),
            "logprobs_mode": held["logprobs_mode"],
            "generation_config": held["generation_config"],
            "worker_extension_cls": info["parallel_config"]["worker_extension_cls"],
        }
        for name, value in found.items():
            if value != wanted[name] and not (name == "model" and _same_model(value, wanted[name])):
                raise EngineError(f"{self.name} has {name}={value}, the run needs {wanted[name]}; {self._how()}")
        if held["max_model_len"] < wanted["max_model_len"]:
            raise EngineError(
                f"{self.name} has max_model_len={held['max_model_len']}, the run needs {wanted['max_model_len']}; "
                f"{self._how()}"
            )
        ours = self._tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        body = {"model": self._model, "prompt": PROBE, "add_special_tokens": False}
        if self._api.post("/tokenize", body, timeout=SHORT)["tokens"] != ours:
            raise EngineError(f"{self.name} has another tokenizer than the model of the run; {self._how()}")

    def _how(self) -> str:
        """How to start a server that fits."""
        if self._settings.url is None:
            return f"its log is {self._settings.log}"
        arguments = {**self._settings.arguments, **self._sender.flags}
        return f"start it with: {DEVELOPMENT}=1 {shlex.join([*SERVE, *_flags(arguments)])}"

    def check(self) -> None:
        assert self._api is not None
        self._api.get("/health", timeout=SHORT)

    def sample(self, batch: Batch) -> list[list[Answer]]:
        assert self._api is not None
        if self._api.label(timeout=SHORT) == FRESH:
            # By its keeper, since `reload` or `load` named them. It is connected to and given its weights anew.
            raise HostLost("it was started again meanwhile, with other weights")
        return self._api.complete(self._model, batch, timeout=self._settings.generate_timeout)

    def load(self, weights: Weights, label: str) -> dict[str, str] | None:
        return self._sender.send(weights, label)

    def reload(self, label: str) -> dict[str, str] | None:
        return self._sender.send_again(label)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._disconnect()

    def close(self) -> None:
        # First, while there is a server to say good-bye to.
        self._sender.close()
        if self._process is not None:
            self._process.stop()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._api is not None:
            self._api.close()
        self._process = self._api = None


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` takes them."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | dict):
            words += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def _same_model(held: str, wanted: str) -> bool:
    """Whether both name one folder; or `held` is where the hub's cache keeps the model `wanted`, as vLLM says where it
    is offline."""
    if Path(held).is_dir() and Path(wanted).is_dir():
        return Path(held).samefile(wanted)
    return f"models--{wanted.replace('/', '--')}" in Path(held).parts
