"""A vLLM server's routes, as far as the adapter uses them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import numpy as np

from grpo_lab.rollout.vllm.host import Answer, Batch, HostLost, sampling_arguments

# Requests under way at once, one a prompt: vLLM batches what it has, so it must have more than fits.
CONNECTIONS = 512


class ServerApi:
    """The server at `url`. Every reply's status is looked at, and every wait ends.

    Raises:
        HostLost: by every method: it does not answer, not in time, or with an error.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No proxy stands between a run and its server.
        self._client = httpx.Client(base_url=self.url, headers=self._headers, trust_env=False)

    def get(self, path: str, *, timeout: float, **query: Any) -> Any:
        return self._call("GET", path, timeout, params=query)

    def post(self, path: str, body: Any = None, *, timeout: float, **query: Any) -> Any:
        return self._call("POST", path, timeout, json=body, params=query)

    def _call(self, method: str, path: str, timeout: float, **options: Any) -> Any:
        if self._client.is_closed:
            raise HostLost(f"{path} was not asked: the connection is closed")
        try:
            reply = self._client.request(method, path, timeout=timeout, **options)
        except httpx.TimeoutException as error:
            raise HostLost(f"{path} was not answered within {timeout:g} seconds") from error
        except httpx.HTTPError as error:
            raise HostLost(f"{path} was not answered: {_said(error)}") from error
        return _content(path, reply)

    def reset_prefix_cache(self, *, timeout: float) -> None:
        if not self.post("/reset_prefix_cache", timeout=timeout).get("success"):
            raise HostLost("it did not reset its prefix cache")

    def mark(self, label: str, *, timeout: float) -> None:
        """Name the weights it holds."""
        self.post("/update_weight_version", {"new_version": label}, timeout=timeout)

    def label(self, *, timeout: float) -> str:
        """The name of the weights it holds."""
        return str(self.get("/weight_info", timeout=timeout)["weight_version"])

    def complete(self, model: str, batch: Batch, *, timeout: float) -> list[list[Answer]]:
        """Answers to all prompts, in order; `timeout` is for them together. Their label is what the server held
        before and after, which the replies do not say."""
        before = self.label(timeout=timeout)
        answers = asyncio.run(self._complete(model, batch, before, timeout))
        after = self.label(timeout=timeout)
        if after != before:
            raise HostLost(f"its weights changed from {before!r} to {after!r} while it sampled")
        return answers

    async def _complete(self, model: str, batch: Batch, label: str, timeout: float) -> list[list[Answer]]:
        limits = httpx.Limits(max_connections=CONNECTIONS)
        async with httpx.AsyncClient(
            base_url=self.url, headers=self._headers, trust_env=False, timeout=None, limits=limits
        ) as client:
            requests = [
                asyncio.create_task(_complete_one(client, model, prompt, seed, batch, label))
                for prompt, seed in zip(batch.prompts, batch.seeds, strict=True)
            ]
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.gather(*requests)
            except TimeoutError as error:
                raise HostLost(f"it did not answer within {timeout:g} seconds") from error
            except httpx.HTTPError as error:
                raise HostLost(f"a request broke off: {_said(error)}") from error
            finally:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    def close(self) -> None:
        self._client.close()


async def _complete_one(
    client: httpx.AsyncClient, model: str, prompt: tuple[int, ...], seed: int, batch: Batch, label: str
) -> list[Answer]:
    body = {"model": model, "prompt": list(prompt), "return_token_ids": True, **sampling_arguments(batch, seed)}
    reply = _content("/v1/completions", await client.post("/v1/completions", json=body))
    choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
    return [
        Answer(
            token_ids=np.array(choice["token_ids"], dtype=np.int32),
            logprobs=np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32),
            finish_reason=str(choice["finish_reason"]),
            label=label,
        )
        for choice in choices
    ]


def _content(path: str, reply: httpx.Response) -> Any:
    if reply.is_success:
        try:
            return reply.json() if reply.content else None
        except ValueError as error:
            raise HostLost(f"{path} was answered with something else than JSON") from error
    raise HostLost(f"{path} was answered with status {reply.status_code}: {' '.join(reply.text.split())[:300]}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
