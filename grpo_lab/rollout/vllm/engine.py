"""The vLLM sampler: prompts to requests, answers to rollouts, and what to do when vLLM fails.

Where vLLM runs (this process, a worker, a server) is its host's business. The engine owns the version of the weights,
checks that every answer was made by them, and starts a lost host again a bounded number of times: with the weights of
the last sync, and the same requests with the same seeds, so that no group is lost and none comes twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.policy import end_tokens, load_tokenizer
from grpo_lab.rollout import DRIFT_TOLERANCE, EngineError
from grpo_lab.rollout.vllm.host import Answer, Batch, Host, HostLost
from grpo_lab.rollout.vllm.settings import (
    LEAST_TEMPERATURE,
    engine_arguments,
    engine_environment,
    installed_version,
    model_length,
)
from grpo_lab.types import FinishReason, Prompt, Rollout, Sampling
from grpo_lab.weights import Weights

if TYPE_CHECKING:
    from grpo_lab.rollout.vllm.server import Sender

T = TypeVar("T")

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
LOG = "vllm.log"


class VllmEngine:
    """See the module. `end_tokens` end a response, `max_length` bounds prompt + response, `restarts` are left."""

    def __init__(
        self,
        host: Host,
        tokenizer: Any,
        *,
        end_tokens: frozenset[int],
        dtype: torch.dtype,
        max_length: int,
        restarts: int,
    ) -> None:
        self.host = host
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.dtype = dtype
        self.drift_tolerance = DRIFT_TOLERANCE["fp32" if dtype == torch.float32 else "bf16"]
        self.max_length = max_length
        self.restarts = restarts
        self.restarted = 0
        self.policy_version = 0
        # Names this run and sync, so that answers by other weights, even another run's, are told apart.
        self._run = uuid.uuid4().hex[:8]
        self._syncs = 0
        self._digests: dict[str, str] | None = None
        self._lost: str | None = None

    rows_at_once = None

    @property
    def reads_back(self) -> bool:
        return self.host.reads_back

    def start(self) -> None:
        """Start vLLM with the initial weights.

        Raises:
            EngineError: it does not start.
        """
        try:
            self._begin()
        except HostLost as lost:
            self._give_up(f"{self.host.name} did not start: {lost}", lost)

    def _begin(self) -> None:
        self.host.start()
        held = self.host.reload(self._label)
        if held != self._digests:
            raise HostLost(f"it read back other weights than those of version {self.policy_version}")

    @property
    def _label(self) -> str:
        return f"{self._run}.{self._syncs}.{self.policy_version}"

    # --- sampling ---

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[list[Rollout]]:
        assert len(prompts) == len(seeds), "one seed a prompt"
        if not prompts:
            return []
        self._check_fits(prompts, sampling)
        greedy = sampling.temperature == 0
        batch = Batch(
            prompts=tuple(prompt.token_ids for prompt in prompts),
            seeds=tuple(seeds),
            # vLLM refuses to decide the same thing several times.
            n=1 if greedy else group_size,
            sampling=sampling,
            end_tokens=tuple(sorted(self.end_tokens)),
        )
        answers = self._insist("sampling", lambda: self.host.sample(batch))
        if [len(group) for group in answers] != [batch.n] * len(prompts):
            self._give_up(f"{self.host.name} answered {sum(map(len, answers))} times, not {len(prompts)} x {batch.n}")
        if greedy:
            answers = [group * group_size for group in answers]
        return [[self._rollout(answer) for answer in group] for group in answers]

    def _check_fits(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        longest = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_tokens
        if longest > self.max_length:
            raise EngineError(
                f"a prompt and a response of together {longest} tokens do not fit vLLM's {self.max_length}: raise "
                "rollout.vllm.max_model_len"
            )
        if 0 < sampling.temperature < LEAST_TEMPERATURE:
            raise EngineError(
                f"a temperature of {sampling.temperature:g} is too low for vLLM, which would sample at "
                f"{LEAST_TEMPERATURE:g}: use 0 (greedy), or at least {LEAST_TEMPERATURE:g}"
            )

    def _rollout(self, answer: Answer) -> Rollout:
        if answer.label != self._label:
            self._give_up(
                f"{self.host.name} sampled with weights {answer.label!r}, not with {self._label!r} of version "
                f"{self.policy_version}: does another run use it?"
            )
        if answer.finish_reason not in REASONS or len(answer.token_ids) != len(answer.logprobs):
            self._give_up(f"{self.host.name} broke off a response ({answer.finish_reason})")
        return Rollout(
            token_ids=answer.token_ids,
            behaviour_logprobs=answer.logprobs,
            finish_reason=REASONS[answer.finish_reason],
            policy_version=self.policy_version,
            text=self.tokenizer.decode(answer.token_ids.tolist(), skip_special_tokens=True),
        )

    # --- weights ---

    def load_weights(self, weights: Weights, *, version: int) -> None:
        self._insist("waiting", self.host.check)
        self.policy_version = version
        self._syncs += 1
        self._digests = None
        try:
            self._digests = self.host.load(weights, self._label)
        except (HostLost, OSError) as error:
            # Half of them may be in place: nothing may be sampled with that.
            self._give_up(f"{self.host.name} did not take the weights of version {version}: {error}", error)
        except BaseException:
            self._lost = f"the weights of version {version} did not all come"
            raise

    def digests(self) -> dict[str, str] | None:
        return self._digests

    # --- failures ---

    def close(self) -> None:
        # Another thread may be waiting for answers: it is not to start the engine again.
        self._lost = "the engine is closed"
        self.host.close()

    def _insist(self, what: str, work: Callable[[], T]) -> T:
        """`work()`, with the host started again where it was lost, as long as restarts are left."""
        while True:
            if self._lost is not None:
                raise EngineError(self._lost)
            try:
                if not self.host.running:
                    self._begin()
                return work()
            except HostLost as lost:
                self.host.kill()
                if self.restarted == self.restarts:
                    self._give_up(
                        f"{self.host.name} was lost while {what}: {lost} (restarts used: {self.restarted} of "
                        f"rollout.vllm.restarts={self.restarts})",
                        lost,
                    )
                self.restarted += 1
                logger.warning(
                    "%s was lost while %s: %s; starting it again (%d of rollout.vllm.restarts=%d)",
                    self.host.name,
                    what,
                    lost,
                    self.restarted,
                    self.restarts,
                )

    def _give_up(self, message: str, cause: BaseException | None = None) -> NoReturn:
        # What vLLM says may have many lines.
        self._lost = " ".join(message.split())
        self.host.kill()
        raise EngineError(self._lost) from cause


def build_vllm_engine(config: TrainConfig, model_folder: str, run_dir: Path) -> VllmEngine:
    """The engine of `rollout.vllm`, started. Its log is vllm.log in `run_dir`.

    Raises:
        ConfigError: vLLM is not installed, not of a tested version, or a setting does not fit it.
        EngineError: it does not start.
    """
    if config.rollout.temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g} is too low for vLLM: at least {LEAST_TEMPERATURE:g}"
        )
    vllm, revision = config.rollout.vllm, config.model.revision
    tokenizer = load_tokenizer(model_folder, revision=revision)
    ends = _end_tokens(model_folder, revision, tokenizer)
    engine = VllmEngine(
        _host(config, model_folder, run_dir, tokenizer),
        tokenizer,
        end_tokens=ends,
        dtype=DTYPES[vllm.dtype],
        max_length=model_length(config),
        restarts=0 if vllm.mode == "in_process" else vllm.restarts,
    )
    try:
        engine.start()
    except BaseException:
        engine.close()
        raise
    return engine


def _host(config: TrainConfig, model_folder: str, run_dir: Path, tokenizer: Any) -> Host:
    vllm, log = config.rollout.vllm, run_dir / LOG
    version = installed_version(config.hardware.device)
    environment = engine_environment(config, os.environ)
    arguments = engine_arguments(config, model_folder)
    if vllm.mode == "in_process":
        from grpo_lab.rollout.vllm.local import InProcessHost

        return InProcessHost(arguments, environment, log, sleep=vllm.sleep)
    if vllm.mode == "server":
        from grpo_lab.rollout.vllm.server import ServerHost, ServerSettings

        settings = ServerSettings(
            url=config.rollout.url,
            arguments=arguments,
            environment=environment,
            log=log,
            start_timeout=vllm.start_timeout,
            generate_timeout=vllm.generate_timeout,
            sync_timeout=vllm.sync_timeout,
        )
        return ServerHost(settings, tokenizer, _sender(config, run_dir, version))
    from grpo_lab.rollout.vllm.worker import WorkerHost

    return WorkerHost(
        arguments,
        environment,
        log,
        weights_dir=weights_place(vllm.weights_dir, run_dir),
        start_timeout=vllm.start_timeout,
        generate_timeout=vllm.generate_timeout,
        sync_timeout=vllm.sync_timeout,
    )


def weights_place(weights_dir: str | None, run_dir: Path) -> Path:
    """Where weights are laid for another process: always the same place for a run, so that a resumed run finds what it
    left when it was killed, and no other run's."""
    if weights_dir is None:
        return run_dir / "weights_in_transit"
    place = run_dir.resolve()
    return Path(weights_dir) / f"{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


def _sender(config: TrainConfig, run_dir: Path, version: str) -> Sender:
    from grpo_lab.rollout.vllm.server import FolderSender
    from grpo_lab.rollout.vllm.transfer import NcclSender

    vllm, hardware = config.rollout.vllm, config.hardware
    if hardware.device == "cpu":
        return FolderSender(weights_place(vllm.weights_dir, run_dir), timeout=vllm.sync_timeout)
    device = f"cuda:{hardware.first_gpu}" if hardware.device == "cuda" else hardware.device
    return NcclSender(device=device, version=version, timeout=vllm.sync_timeout)


def _end_tokens(folder: str, revision: str | None, tokenizer: Any) -> frozenset[int]:
    """As the learner's model names them, without loading it."""
    from transformers import AutoConfig, GenerationConfig

    try:
        named = GenerationConfig.from_pretrained(folder, revision=revision)
    except OSError:
        # There is no such file: transformers then takes them from the model's own.
        named = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder, revision=revision))
    return end_tokens(SimpleNamespace(generation_config=named), tokenizer)
