"""The learner alone: its speed against the machine's matrix products, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from scripts.bench.flops import update_flops
from scripts.bench.measure import child, memory, reset_peak
from scripts.bench.report import Row, Target, at_least, at_most
from scripts.bench.runs import Bench
from scripts.bench.shapes import REAL, SHORT, TINY, Shape

MIB = 2**20
# Updates timed of each model.
STEPS = {SHORT.model.name: 5, REAL.model.name: 3}
# The embedded default's budgets. REAL's own save memory at a price: products of half the rows, and gradients as large
# as the model that are added up twice.
WHOLE_TOKENS, WHOLE_CHUNK = 4096, 512
# Rows, inner dimension and columns of matrix products: square ones, and those of a layer of the larger model.
PRODUCTS = ((1024, 1024, 1024), (2048, 2048, 2048), (2048, 576, 1536), (2048, 1536, 576))
# Several micro-batches, and chunks that are full.
SMALL = replace(SHORT, groups=8, micro_batch_tokens=512, logit_chunk=128)
# What is not activations or logits adds a little.
FLAT = at_most(1.1)


def measure(bench: Bench) -> list[Row]:
    whole = replace(
        REAL, name=f"{REAL.name}, whole minibatches", micro_batch_tokens=WHOLE_TOKENS, logit_chunk=WHOLE_CHUNK
    )
    return [*speed(SHORT, None), *speed(REAL, None), *speed(whole, 0.6), *memory_rows()]


# --- speed ------------------------------------------------------------------------------------------------------


def speed(shape: Shape, share: float | None) -> list[Row]:
    taken, before, after = child(steps, shape, STEPS[shape.model.name])
    middle = median(taken)
    achieved = update_flops(shape) / middle
    details: dict[str, float | str] = {
        "GFLOP/s": achieved / 1e9,
        "matmul before": before / 1e9,
        "matmul after": after / 1e9,
        "seconds": middle,
    }
    target = None if share is None else at_least(share)
    return [
        Row(f"{shape.name}: response tokens", shape.tokens / middle, "/s"),
        # The machine drifts: the faster of the two is what it could have done.
        Row(f"{shape.name}: of the matmul rate", achieved / max(before, after), "", target, details),
    ]


def steps(shape: Shape, times: int) -> tuple[list[float], float, float]:
    """Seconds of each update, and the rate of matrix products before and after them."""
    from scripts.bench.work import minibatch, seconds, shaped_learner

    _, update = shaped_learner(shape)
    batch = minibatch(shape)
    update(minibatch(replace(shape, groups=1)))
    before = matmul_rate()
    taken = seconds(lambda: update(batch), times=times)
    return taken, before, matmul_rate()


def matmul_rate() -> float:
    """Operations a second of the best product of PRODUCTS, in float32."""
    import torch

    from scripts.bench.work import seconds

    best = 0.0
    for rows, inner, columns in PRODUCTS:
        left, right, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
        taken = seconds(lambda left=left, right=right, out=out: torch.mm(left, right, out=out), times=10)  # type: ignore[misc]
        best = max(best, 2 * rows * inner * columns / min(taken))
    return best


# --- memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The most bytes that an update holds at once: tensors that it makes, those as wide as the vocabulary, and what the
    process grows by."""

    tensors: int
    logits: int
    resident: int


def held(shape: Shape) -> Held:
    from scripts.bench.live import LiveTensors
    from scripts.bench.work import minibatch, shaped_learner

    learner, update = shaped_learner(shape)
    batch = minibatch(shape)
    reset_peak()
    now = memory().now
    update(batch)
    resident = memory().peak - now
    states = [value for state in learner.optimizer.state.values() for value in state.values()]
    before = [*learner.policy.model.parameters(), *states]
    with LiveTensors(before=before) as tensors, LiveTensors(before=before, width=shape.model.vocab) as logits:
        update(batch)
    return Held(tensors.peak, logits.peak, resident)


def growth_row(what: str, found: dict[int, int], target: Target | None = None) -> Row:
    values = list(found.values())
    details: dict[str, float | str] = {f"x{factor}": f"{value / MIB:.1f} MiB" for factor, value in found.items()}
    return Row(f"{what}, x{max(found)} over x1", values[-1] / values[0], "", target, details)


def memory_rows() -> list[Row]:
    base = {1: child(held, SMALL)}
    lengths = base | {n: child(held, replace(SMALL, response=SMALL.response * n)) for n in (2, 4, 8)}
    shared = base | {n: child(held, wider(n, SMALL.logit_chunk // n)) for n in (4, 16)}
    fixed = base | {16: child(held, wider(16, SMALL.logit_chunk))}
    minibatches = base | {n: child(held, replace(SMALL, groups=SMALL.groups * n)) for n in (2, 4, 8)}
    largest = replace(SMALL, groups=SMALL.groups * 8)
    budgets = {1: minibatches[8]}
    budgets |= {n: child(held, replace(largest, micro_batch_tokens=SMALL.micro_batch_tokens * n)) for n in (2, 8)}

    def logits(found: dict[int, Held]) -> dict[int, int]:
        return {n: each.logits for n, each in found.items()}

    def tensors(found: dict[int, Held]) -> dict[int, int]:
        return {n: each.tensors for n, each in found.items()}

    return [
        growth_row("logits by response length", logits(lengths), FLAT),
        growth_row("logits by vocabulary, a chunk of as many logits", logits(shared), FLAT),
        growth_row("logits by vocabulary, a chunk of as many tokens", logits(fixed)),
        growth_row("tensors of an update by minibatch", tensors(minibatches), FLAT),
        growth_row("the process by minibatch", {n: each.resident for n, each in minibatches.items()}),
        growth_row("tensors of an update by response length", tensors(lengths)),
        growth_row("tensors of an update by micro_batch_tokens", tensors(budgets)),
    ]


def wider(factor: int, chunk: int) -> Shape:
    """A vocabulary `factor` times as large."""
    return replace(SMALL, model=replace(TINY, vocab=TINY.vocab * factor), logit_chunk=chunk)
