"""The embedded sampler against `model.generate` of transformers, and against vLLM where it is installed.

The same prompts, group size and lengths, from the same weights at temperature 1 over the whole vocabulary.
`model.generate` returns tokens alone; the others return the log-prob of each as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from statistics import median

from scripts.bench.measure import child
from scripts.bench.report import Row, at_least, ratio
from scripts.bench.runs import Bench
from scripts.bench.shapes import LONG, REAL, SHORT, Shape

TURNS = {SHORT.name: 5, LONG.name: 2, REAL.name: 1}


def measure(bench: Bench) -> list[Row]:
    rows = []
    for shape in (SHORT, LONG, REAL):
        ours, theirs = child(in_turn, shape, TURNS[shape.name])
        speed, least, largest = ratio(theirs, ours)
        details: dict[str, float | str] = {
            "ours, tokens/s": shape.tokens / median(ours),
            "other, tokens/s": shape.tokens / median(theirs),
            "pairs": f"{least:.2f}..{largest:.2f}",
        }
        target = at_least(1.5) if shape is SHORT else None
        raw = {"ours": ours, "other": theirs}
        rows.append(Row(f"{shape.name}: tokens/s over model.generate's", speed, "x", target, details, raw))
        if shape is SHORT and importlib.util.find_spec("vllm") is not None:
            vllm = child(vllm_seconds, shape, bench.model(shape.model), bench.folder)
            speed, least, largest = ratio(vllm, ours)
            details = details | {
                "other, tokens/s": shape.tokens / median(vllm),
                "pairs": f"{least:.2f}..{largest:.2f}",
            }
            rows.append(
                Row(
                    f"{shape.name}: tokens/s over vLLM's worker's",
                    speed,
                    "x",
                    None,
                    details,
                    {"ours": ours, "other": vllm},
                )
            )
    return rows


def in_turn(shape: Shape, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn of the embedded sampler and of `model.generate`, after one of each."""
    from scripts.bench.work import sample, sampler, seconds

    engine, generate = sampler(shape.model), generator(shape)
    sample(shape, engine)
    generate()
    ours, theirs = [], []
    for _ in range(turns):
        theirs += seconds(generate)
        ours += seconds(lambda: sample(shape, engine))
    return ours, theirs


def generator(shape: Shape) -> Callable[[], object]:
    """`model.generate` on the shape's prompts, as its users call it."""
    import torch

    from scripts.bench.work import prompts

    model = shape.model.make()
    ids = torch.tensor([prompt.token_ids for prompt in prompts(shape)])
    width = shape.prompt + shape.response

    def generate() -> object:
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=shape.group_size,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=shape.response,
            use_cache=True,
            pad_token_id=0,
        )
        assert made.shape == (shape.responses, width)
        return made

    return generate


def vllm_seconds(shape: Shape, model: Path, folder: Path) -> list[float]:
    from grpo_lab.rollout.vllm.engine import build_vllm_engine
    from scripts.bench.work import config, sample, seconds

    settings = config(
        "hardware=cpu_vllm",
        f"model.path={model}",
        f"group_size={shape.group_size}",
        f"rollout.max_prompt_tokens={shape.prompt}",
        f"rollout.max_response_tokens={shape.response}",
    )
    engine = build_vllm_engine(settings, str(model), folder)
    # The model's own lies outside its vocabulary, which vLLM takes for a mistake.
    engine.end_tokens = frozenset()
    try:
        sample(shape, engine)
        return seconds(lambda: sample(shape, engine), times=TURNS[shape.name])
    finally:
        engine.close()
