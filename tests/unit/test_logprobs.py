"""Log-probs of chosen tokens: the naive full-logit form's values and gradients, without its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lab.logprobs import log_softmax, masked, masked_sum, selected_logprobs

N, H, V = 13, 5, 11
WORKED = [(0.5, -0.018150), (1.0, -0.126928), (1.3, -0.194506)]


def head(
    dtype: torch.dtype = torch.float64, *, bias: bool = True, rows: int = N, vocabulary: int = V
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states [N, H], weight [V, H], bias [V] or None, as leaves; and tokens [N]."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    return leaf(rows, H), leaf(vocabulary, H), leaf(vocabulary) if bias else None, tokens


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_probs = logits / temperature - torch.logsumexp(logits / temperature, -1, keepdim=True)
    return log_probs.gather(-1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def backward(selected: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a weighted sum, whose weights differ by row."""
    weights = torch.linspace(-1.0, 2.0, len(selected), dtype=selected.dtype)
    return torch.autograd.grad((selected * weights).sum(), leaves)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, N - 1, N, 1000])
def test_equals_the_naive_form_in_float64(chunk: int, temperature: float, bias: bool) -> None:
    hidden, weight, bias_leaf, tokens = head(bias=bias)
    leaves = [leaf for leaf in (hidden, weight, bias_leaf) if leaf is not None]
    expected, spread = naive(hidden, weight, bias_leaf, tokens, temperature)
    got, entropies = selected_logprobs(hidden, weight, bias_leaf, tokens, temperature=temperature, chunk=chunk)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, spread, rtol=0, atol=1e-12)
    assert not entropies.requires_grad
    for left, right in zip(backward(got, leaves), backward(expected, leaves), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_float32_stays_close_to_float64(chunk: int) -> None:
    narrow, wide = head(torch.float32), head(torch.float64)
    got, entropies = selected_logprobs(*narrow, temperature=0.8, chunk=chunk)
    expected, spread = naive(*wide, 0.8)
    assert got.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), spread, rtol=1e-5, atol=1e-5)
    for left, right in zip(backward(got, list(narrow[:3])), backward(expected, list(wide[:3])), strict=True):  # type: ignore[arg-type]
        assert left.dtype == torch.float32
        torch.testing.assert_close(left.double(), right, rtol=1e-4, atol=1e-5)


def test_gradcheck() -> None:
    hidden, weight, bias, tokens = head()

    def selected(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return selected_logprobs(hidden, weight, bias, tokens, temperature=0.7, chunk=4)[0]

    assert torch.autograd.gradcheck(selected, (hidden, weight, bias))


def test_bf16_hidden_states_under_float32_weights() -> None:
    """As under autocast: logits in bf16, the softmax in float32, each gradient in the dtype of its leaf."""
    hidden, weight, bias, tokens = head(torch.float32)
    assert bias is not None
    short = hidden.detach().bfloat16().requires_grad_()
    got, entropies = selected_logprobs(short, weight, bias, tokens, temperature=1.3, chunk=4)
    assert got.dtype == entropies.dtype == torch.float32
    logits = torch.nn.functional.linear(short, weight.bfloat16(), bias.bfloat16())
    expected = torch.log_softmax(logits.float() / 1.3, -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    slopes = backward(got, [short, weight, bias])
    assert [slope.dtype for slope in slopes] == [torch.bfloat16, torch.float32, torch.float32]
    exact = backward(naive(hidden, weight, bias, tokens, 1.3)[0], [hidden, weight, bias])
    for left, right in zip(slopes, exact, strict=True):
        assert (left.float() - right).abs().max() < 0.03 * right.abs().max()


@pytest.mark.parametrize(("temperature", "expected"), WORKED)
def test_the_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    """Logits 2, 0, token 0: -ln(1 + exp(-2 / temperature)). Temperature 1 against 0.5 would be a ratio of 0.8969."""
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    assert log_softmax(logits, temperature)[0, 0].item() == pytest.approx(expected, abs=5e-7)
    # The same through a head: hidden 1, weights 2 and 0.
    one, weight = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    got, _ = selected_logprobs(one, weight, None, torch.tensor([0]), temperature=temperature, chunk=8)
    assert got.item() == pytest.approx(expected, abs=5e-7)
    assert math.exp(WORKED[1][1] - WORKED[0][1]) == pytest.approx(0.896929, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_softmax_is_at_least_float32(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 1.0, -2.0]]).to(dtype)
    got = log_softmax(logits, 0.5)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.log_softmax(logits.float() * 2, -1), rtol=0, atol=1e-6)
    assert log_softmax(logits.double(), 0.5).dtype == torch.float64


# --- entropy ----------------------------------------------------------------------------------------------------


def entropies_of(logits: list[list[float]], temperature: float) -> list[float]:
    """Of the rows of `logits`, through a head: row k is the hidden state e_k, and the weights are the logits."""
    weight = torch.tensor(logits, dtype=torch.float64).T
    hidden = torch.eye(len(logits), dtype=torch.float64)
    tokens = torch.zeros(len(logits), dtype=torch.long)
    return selected_logprobs(hidden, weight, None, tokens, temperature=temperature, chunk=8)[1].tolist()


def test_entropy_is_exact() -> None:
    # ln 2, and -(0.8 ln 0.8 + 0.2 ln 0.2), not the sampled token's 0.223144; the third token is impossible.
    rows = [[0.0, 0.0, -2000.0], [math.log(4), 0.0, -2000.0]]
    assert entropies_of(rows, 1.0) == pytest.approx([0.693147, 0.500402], abs=5e-7)
    assert entropies_of([[0.0, -2000.0]], 1.0) == [0.0]


def test_entropy_follows_the_temperature() -> None:
    """Hot tends to ln V; logits (2, 0) at 0.5 are p = sigmoid(4) = 0.982014."""
    assert entropies_of([[2.0, 0.0]], 0.5) == pytest.approx([0.090095], abs=5e-7)
    assert entropies_of([[2.0, 0.0]], 1e6) == pytest.approx([math.log(2)], abs=1e-9)


def test_impossible_tokens_under_a_head() -> None:
    """A bias of -inf forbids a token: others keep finite log-probs, entropies and gradients."""
    hidden, weight, _, tokens = head()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[4] = -math.inf
    bias.requires_grad_()
    tokens = torch.where(tokens == 4, 0, tokens)
    got, entropies = selected_logprobs(hidden, weight, bias, tokens, temperature=0.9, chunk=4)
    keep = [k for k in range(V) if k != 4]
    renamed = torch.tensor([keep.index(int(token)) for token in tokens])
    expected, spread = naive(hidden, weight[keep], None, renamed, 0.9)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, spread, rtol=0, atol=1e-12)
    slopes = backward(got, [hidden, weight, bias])
    assert all(torch.isfinite(slope).all() for slope in slopes)
    assert (slopes[1][4] == 0).all()


def test_a_second_backward_pass_finds_what_the_first_found() -> None:
    """The first one uses up what the forward pass kept."""
    hidden, weight, bias, tokens = head()
    leaves = [hidden, weight, bias]
    got, _ = selected_logprobs(hidden, weight, bias, tokens, temperature=0.9, chunk=4)
    first = torch.autograd.grad(got.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(got.sum(), leaves)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        assert one.abs().sum() > 0


# --- masks ------------------------------------------------------------------------------------------------------


def test_masked_values_are_replaced_before_any_arithmetic() -> None:
    values = torch.tensor([[1.0, math.nan, math.inf], [2.0, 3.0, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, True, False]])
    assert masked(values, mask).tolist() == [[1.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    sums = masked_sum(values, mask)
    assert sums.tolist() == [1.0, 5.0]
    (slope,) = torch.autograd.grad(sums.sum(), values)
    assert slope.tolist() == mask.float().tolist()
    assert math.isnan(masked_sum(values, torch.ones_like(mask)).sum().item())


# --- memory -----------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def largest(run: Callable[[], object]) -> int:
    with Largest() as mode:
        run()
    return mode.elements


@pytest.mark.parametrize("chunk", [8, 64])
def test_no_more_than_a_chunk_of_logits_is_ever_made(chunk: int) -> None:
    rows, vocabulary = 400, 300
    hidden, weight, bias, tokens = head(rows=rows, vocabulary=vocabulary)
    assert bias is not None

    def ours() -> Tensor:
        return selected_logprobs(hidden, weight, bias, tokens, temperature=1.0, chunk=chunk)[0]

    # The hidden states and the head, which are held anyway, are smaller here.
    assert max(rows * H, vocabulary * H) < chunk * vocabulary
    assert largest(ours) == chunk * vocabulary
    selected = ours()
    assert largest(lambda: backward(selected, [hidden, weight, bias])) == chunk * vocabulary
    # The measure sees what it should: the naive form makes [N, V], forward and backward.
    assert largest(lambda: naive(hidden, weight, bias, tokens, 1.0)) == rows * vocabulary
    plain = naive(hidden, weight, bias, tokens, 1.0)[0]
    assert largest(lambda: backward(plain, [hidden, weight, bias])) == rows * vocabulary


def test_nothing_the_size_of_the_logits_is_saved_for_the_backward_pass() -> None:
    hidden, weight, bias, tokens = head(rows=64, vocabulary=300)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selected_logprobs(hidden, weight, bias, tokens, temperature=1.0, chunk=8)
    assert sorted(saved) == sorted([64 * H, 300 * H, 300, 64])


def test_a_narrow_matrix_gets_the_sum_over_many_chunks() -> None:
    """2,048 chunks that each add little: a BF16 sum of them stops growing at a few hundred."""
    hidden = torch.ones(2048, 1, dtype=torch.bfloat16)
    tokens = torch.zeros(2048, dtype=torch.long)
    gradients = []
    for chunk in (1, 2048):
        weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        selected, _ = selected_logprobs(hidden, weight, None, tokens, temperature=1.0, chunk=chunk)
        selected.sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad.flatten().tolist())
    # d log softmax(0, 0)_0 is (1/2, -1/2) at each of the 2,048 positions.
    assert gradients == [[1024.0, -1024.0]] * 2
