"""What the vLLM adapter asks of vLLM, wherever that runs: the records and the protocol that its three hosts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from grpo_lab.types import Sampling

if TYPE_CHECKING:
    import numpy as np

    from grpo_lab.weights import Weights


class HostLost(RuntimeError):
    """vLLM died, hung, or answered with an error: what it was doing is undone, and it may be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts to be answered `n` times each. Answer j to a prompt with seed s draws from seed s + j."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    n: int
    sampling: Sampling
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """`token_ids` [T] int32, `logprobs` [T] float32 (nats, of the distribution drawn from). `label` names the weights
    that vLLM says it drew them with."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    label: str


class Host(Protocol):
    """A place where vLLM runs. `name` is how messages call it.

    Raises:
        HostLost: by every method but `start`, `kill` and `close`.
    """

    @property
    def name(self) -> str: ...

    @property
    def running(self) -> bool: ...

    @property
    def reads_back(self) -> bool:
        """Whether `load` returns digests."""
        ...

    def start(self) -> None:
        """Start vLLM, or connect to it, with the initial weights.

        Raises:
            EngineError: it does not start, or does not fit the run.
        """
        ...

    def check(self) -> None:
        """Notice whether it still runs."""
        ...

    def sample(self, batch: Batch) -> list[list[Answer]]:
        """`n` answers to each prompt, in order."""
        ...

    def load(self, weights: Weights, label: str) -> dict[str, str] | None:
        """Replace all weights, forget cached prefixes, and note the label. Returns the digest of each weight as it
        arrived there, or None where that was not looked at."""
        ...

    def reload(self, label: str) -> dict[str, str] | None:
        """After a new start: the weights of the last `load`, where there was one, under their label. Returns what
        `load` did."""
        ...

    def kill(self) -> None:
        """Stop at once what may not answer any more."""
        ...

    def close(self) -> None: ...


def sampling_arguments(batch: Batch, seed: int) -> dict[str, Any]:
    """vLLM's sampling parameters, by the names that its library and its server share.

    The end tokens are stop tokens and vLLM's own are ignored, so that both sides end responses alike.
    """
    sampling = batch.sampling
    return {
        "n": batch.n,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "logprobs": 0,
        "stop_token_ids": list(batch.end_tokens),
        "ignore_eos": True,
    }


def agreed(digests: list[dict[str, str]]) -> dict[str, str]:
    """What all of vLLM's workers say arrived.

    Raises:
        HostLost: they do not say the same.
    """
    if any(other != digests[0] for other in digests[1:]):
        raise HostLost("its workers read different weights")
    return digests[0]
