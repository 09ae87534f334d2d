"""The learner and the embedded sampler on a GPU, in BF16: `python -m scripts.bench.gpu`, as JSON lines.

Random weights in the shapes of Qwen2.5-0.5B and Qwen3-1.7B; one update of 8 groups at micro-batches of 4k, 8k and 16k
tokens. Useful work is counted (scripts/bench/flops.py), over the card's nominal BF16 rate where it is known and over
the best matrix product measured in the same run. `--device cpu` runs the smallest model, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from scripts.bench.flops import update_flops
from scripts.bench.shapes import LONG, Model, Shape
from scripts.bench.work import config, learner, minibatch, sample, sampler, seconds

MODELS = (
    Model(name="0.5b", hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864, vocab=151936),
    Model(name="1.7b", hidden=2048, layers=28, heads=16, kv_heads=8, intermediate=6144, vocab=151936),
)
BUDGETS = (4096, 8192, 16384)
# Dense BF16 operations a second, as the makers state them.
NOMINAL = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
TIMES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    for row in rows(device):
        print(json.dumps(row), flush=True)


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    if device.type == "cpu":
        yield from of_shape(replace(LONG, groups=2), (2048,), device)
        return
    for model in MODELS:
        shape = Shape(
            name=model.name,
            model=model,
            groups=8,
            group_size=8,
            prompt=256,
            response=512,
            micro_batch_tokens=BUDGETS[0],
            logit_chunk=2048,
        )
        yield from of_shape(shape, BUDGETS, device)


def of_shape(shape: Shape, budgets: tuple[int, ...], device: torch.device) -> Iterator[dict[str, Any]]:
    rate = matmul_rate(device)
    for budget in budgets:
        yield learning(replace(shape, micro_batch_tokens=budget), device, rate)
    engine = sampler(shape.model, device=device, autocast=torch.bfloat16)
    taken = timed(lambda: sample(shape, engine), device)
    yield {"what": "sampler", "model": shape.model.name, "tokens/s": shape.tokens / taken}


def learning(shape: Shape, device: torch.device, rate: float) -> dict[str, Any]:
    whole = config("learner.precision=bf16", f"learner.logit_chunk={shape.logit_chunk}")
    settings = replace(whole.learner, micro_batch_tokens=shape.micro_batch_tokens)
    made, update = learner(shape.model, settings, device=device)
    batch = minibatch(shape)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = timed(lambda: update(batch), device)
    achieved = update_flops(shape) / taken
    row: dict[str, Any] = {
        "what": "learner",
        "model": shape.model.name,
        "parameters": sum(parameter.numel() for parameter in made.policy.model.parameters()),
        "micro_batch_tokens": shape.micro_batch_tokens,
        "response tokens/s": shape.tokens / taken,
        "of the matmul rate": achieved / rate,
    }
    if device.type == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        nominal = [value for name, value in NOMINAL.items() if name in torch.cuda.get_device_name()]
        row |= {"MFU": achieved / nominal[0]} if nominal else {}
    return row


def matmul_rate(device: torch.device) -> float:
    """Operations a second of a large product in BF16."""
    size = 8192 if device.type == "cuda" else 1024
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / timed(lambda: left @ left, device, times=20)


def timed(work: Callable[[], object], device: torch.device, *, times: int = TIMES) -> float:
    """Median seconds of `work`, done, after a first run that warms up."""

    def done() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()

    done()
    return median(seconds(done, times=times))


if __name__ == "__main__":
    main()
