"""vLLM in this process: its `LLM` behind the few calls that the adapter makes. A worker process holds one, and so does
the learner's own process where `rollout.vllm.mode=in_process`."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.host import Answer, Batch, HostLost, agreed, sampling_arguments
from grpo_lab.rollout.vllm.settings import start_failure
from grpo_lab.weights import Weights

VLLM_LOGGER = logging.getLogger("vllm")


class LocalLLM:
    """See the module. `sleep`: between calls the GPU's memory is the learner's."""

    def __init__(self, arguments: Mapping[str, Any], *, sleep: bool) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments, enable_sleep_mode=sleep)
        self._sleep = sleep
        self._asleep: set[str] = set()
        self._rest()

    def sample(self, batch: Batch) -> list[list[Answer]]:
        from vllm import SamplingParams

        self._wake("weights", "kv_cache")
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in batch.prompts],
            [
                SamplingParams(**sampling_arguments(batch, seed), flat_logprobs=True, detokenize=False)
                for seed in batch.seeds
            ],
            use_tqdm=False,
        )
        answers = [[_answer(output) for output in request.outputs] for request in outputs]
        self._rest()
        return answers

    def load_folder(self, folder: str) -> dict[str, str]:
        self._wake("weights")
        return agreed(self._llm.collective_rpc("load_weight_folder", args=(folder,)))

    def load_stream(self, weights: Weights) -> None:
        self._wake("weights")
        # Copies: vLLM holds on to the parts of a fused weight until it has them all, and a streamed tensor is valid
        # only until the next is asked for. They live no longer than that.
        copied = ((name, tensor.detach().clone()) for name, tensor in weights)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copied})

    def reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def mark(self, label: str) -> None:
        """Name the weights: every answer says which made it."""
        self._llm.update_weight_version(label)

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()

    def _rest(self) -> None:
        """Give the memory to whoever else is on the device."""
        if self._sleep:
            # Level 1 keeps the weights in CPU memory: the same ones may have to sample again before the next sync.
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                self._llm.wake_up(tags=[part])
                self._asleep.discard(part)


def _answer(output: Any) -> Answer:
    versions = sorted({span.version for span in output.weight_versions or ()})
    return Answer(
        token_ids=np.array(output.token_ids, dtype=np.int32),
        logprobs=np.array(output.logprobs.logprobs, dtype=np.float32),
        finish_reason=str(output.finish_reason),
        label="+".join(versions),
    )


class InProcessHost:
    """vLLM in the learner's process, on its device. It cannot be started again: what kills it kills the run, and what
    hangs it hangs the run, as nobody else is there to keep the time.

    No digests: nothing lies between the stream and vLLM that could change it. That all of it was read is checked; what
    became of it, scoring sees.
    """

    name = "vLLM (in process)"
    reads_back = False

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path, *, sleep: bool) -> None:
        self._arguments = arguments
        # Its log is set up here, not by vLLM.
        ours = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CONFIGURE_LOGGING": "0"}
        self._environment = {**environment, **ours}
        self._log = log
        self._sleep = sleep
        self._llm: LocalLLM | None = None
        self._handler: logging.Handler | None = None

    @property
    def running(self) -> bool:
        return self._llm is not None

    def start(self) -> None:
        self._handler = logging.FileHandler(self._log)
        VLLM_LOGGER.addHandler(self._handler)
        VLLM_LOGGER.setLevel(self._environment["VLLM_LOGGING_LEVEL"])
        VLLM_LOGGER.propagate = False
        with _visiting(self._environment):
            try:
                self._llm = LocalLLM(self._arguments, sleep=self._sleep)
            except Exception as error:
                raise EngineError(start_failure(self.name, f"{type(error).__name__}: {error}", self._log)) from error

    def check(self) -> None:
        """It runs as long as this process does."""

    def sample(self, batch: Batch) -> list[list[Answer]]:
        assert self._llm is not None
        with _lost_on_error():
            return self._llm.sample(batch)

    def load(self, weights: Weights, label: str) -> None:
        assert self._llm is not None
        stream = iter(weights)
        with _lost_on_error():
            self._llm.load_stream(stream)
            left = sum(1 for _ in stream)
            if left:
                raise RuntimeError(f"vLLM left {left} of the weights unread")
        self.reset_prefix_cache()
        with _lost_on_error():
            self._llm.mark(label)

    def reset_prefix_cache(self) -> None:
        assert self._llm is not None
        with _lost_on_error():
            self._llm.reset_prefix_cache()

    def reload(self, label: str) -> None:
        assert self._llm is not None
        with _lost_on_error():
            self._llm.mark(label)

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            llm.close()
        if self._handler is not None:
            VLLM_LOGGER.removeHandler(self._handler)
            self._handler.close()
            self._handler = None


@contextmanager
def _lost_on_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise HostLost(f"{type(error).__name__}: {error}") from error


@contextmanager
def _visiting(environment: Mapping[str, str]) -> Iterator[None]:
    """A place for vLLM to start in, which leaves the process as it was: vLLM sets environment variables that children
    would inherit, seeds every random generator, and takes `torch.set_num_threads` away."""
    held = dict(os.environ)
    threads, states = torch.set_num_threads, (random.getstate(), np.random.get_state())
    os.environ.clear()
    os.environ |= environment
    try:
        with torch.random.fork_rng():
            yield
    finally:
        os.environ.clear()
        os.environ |= held
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
