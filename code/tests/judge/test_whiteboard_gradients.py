"""The gradients written by hand equal torch.autograd's, on shapes where no two sizes agree."""

import math
import operator
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
from torch import Tensor

from whiteboard import gradients as wb

draws = pytest.mark.parametrize("seed", range(6))


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def sizes(count: int, seed: int, low: int = 2) -> list[int]:
    """So many sizes, no two alike."""
    torch.manual_seed(seed)
    return random.Random(seed).sample(range(low, 14), count)


def leading(count: int, seed: int) -> list[int]:
    """One axis, two or three in front of the channels."""
    return sizes(count + 3, seed)[: 1 + seed % 3]


def autograd(function: Callable, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dy)


def same(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """As many, of the same shapes, to 1e-9 of the largest value."""
    assert [f.shape for f in found] == [w.shape for w in want]
    return all(
        bool((f - w).abs().max() <= 1e-9 * w.abs().max().clamp(min=1)) for f, w in zip(found, want)
    )


@pytest.mark.parametrize("scale", [1.0, 1e4])
@draws
def test_softmax_cross_entropy(seed: int, scale: float) -> None:
    N, V = sizes(2, seed)
    logits, targets = scale * torch.randn(N, V), torch.randint(V, (N,))
    loss, dlogits = wb.softmax_cross_entropy(logits, targets)
    leaf = logits.clone().requires_grad_()
    want = F.cross_entropy(leaf, targets)
    assert same((loss, dlogits), (want.detach(), *torch.autograd.grad(want, leaf)))


@draws
def test_linear_backward(seed: int) -> None:
    *axes, n_in, n_out = (*leading(2, seed), *sizes(5, seed)[3:])
    x, w, b = torch.randn(*axes, n_in), torch.randn(n_out, n_in), torch.randn(n_out)
    dy = torch.randn(*axes, n_out)
    assert same(wb.linear_backward(x, w, dy), autograd(F.linear, dy, x, w, b))


@pytest.mark.parametrize("scale", [1.0, 3e-3])
@draws
def test_layer_norm_backward(seed: int, scale: float) -> None:
    *axes, d = (*leading(1, seed), sizes(4, seed)[3])
    x, weight, bias = scale * torch.randn(*axes, d), torch.randn(d), torch.randn(d)
    dy = torch.randn(*axes, d)
    want = autograd(lambda x, w, b: F.layer_norm(x, (d,), w, b), dy, x, weight, bias)
    assert same(wb.layer_norm_backward(x, weight, dy), want)
    want = autograd(lambda x, w, b: F.layer_norm(x, (d,), w, b, 1e-2), dy, x, weight, bias)
    assert same(wb.layer_norm_backward(x, weight, dy, 1e-2), want)


@pytest.mark.parametrize("scale", [1.0, 3e-3])
@draws
def test_rms_norm_backward(seed: int, scale: float) -> None:
    *axes, d = (*leading(1, seed), sizes(4, seed)[3])
    x, weight, dy = scale * torch.randn(*axes, d), torch.randn(d), torch.randn(*axes, d)
    want = autograd(lambda x, w: F.rms_norm(x, (d,), w, 1e-6), dy, x, weight)
    assert same(wb.rms_norm_backward(x, weight, dy), want)
    want = autograd(lambda x, w: F.rms_norm(x, (d,), w, 1e-2), dy, x, weight)
    assert same(wb.rms_norm_backward(x, weight, dy, 1e-2), want)


@draws
def test_swiglu_backward(seed: int) -> None:
    *axes, d, h = (*leading(2, seed), *sizes(5, seed)[3:])
    x, dy = torch.randn(*axes, d), torch.randn(*axes, d)
    weights = torch.randn(h, d), torch.randn(h, d), torch.randn(d, h)

    def forward(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    assert same(wb.swiglu_backward(x, *weights, dy), autograd(forward, dy, x, *weights))


@pytest.mark.parametrize("masked", ["none", "causal", "rows", "dead"])
@pytest.mark.parametrize("groups", [(4, 2), (6, 2), (3, 1), (3, 3)])
@pytest.mark.parametrize("scale", [1.0, 1e2])
def test_attention_backward(groups: tuple[int, int], masked: str, scale: float) -> None:
    (H, G), (B, T, S, d_h, d_v) = groups, (2, 5, 7, 8, 9)
    torch.manual_seed(H)
    q, k, v = scale * torch.randn(B, H, T, d_h), scale * torch.randn(B, G, S, d_h), None
    v, dout = torch.randn(B, G, S, d_v), torch.randn(B, H, T, d_v)
    mask = {
        "none": None,
        "causal": torch.ones(T, S).bool().tril(S - T),
        "rows": torch.rand(B, 1, 1, S) < 0.6,
        "dead": torch.ones(T, S).bool().tril(S - T - 4),  # the first queries see nothing
    }[masked]
    want = autograd(lambda q, k, v: tb.attend(q, k, v, mask), dout, q, k, v)
    assert same(wb.attention_backward(q, k, v, dout, mask), want)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 20])
@draws
def test_flash_backward(seed: int, block: int) -> None:
    T, S, d_h, d_v = sizes(4, seed)
    q, k, v, dout = (torch.randn(n, d) for n, d in ((T, d_h), (S, d_h), (S, d_v), (T, d_v)))
    q = 8 * q

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(d_h)).softmax(dim=-1) @ v

    lse = (q @ k.mT / math.sqrt(d_h)).logsumexp(dim=-1)
    found = wb.flash_backward(q, k, v, forward(q, k, v), lse, dout, block)
    assert same(found, autograd(forward, dout, q, k, v))


def test_flash_backward_makes_no_table() -> None:
    T, S, block = 60, 70, 4
    q, k, v, dout = torch.randn(T, 5), torch.randn(S, 5), torch.randn(S, 6), torch.randn(T, 6)
    scores = q @ k.mT / math.sqrt(5)
    out, lse = scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            largest.append(max(t.numel() for t in (result, q) if isinstance(t, Tensor)))
            return result

    with Sizes():
        wb.flash_backward(q, k, v, out, lse, dout, block)
    assert max(largest) <= S * 6  # a gradient itself, or block * T
    with Sizes():
        wb.flash_backward(q, k, v, out, lse, dout, S)
    assert max(largest) == T * S


# ── Value ────────────────────────────────────────────────────────────────────────────────────

UNARY = [operator.neg, *(operator.methodcaller(n) for n in ("exp", "log", "tanh", "relu"))]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv]


@pytest.mark.parametrize("seed", range(40))
def test_value_on_drawn_expressions(seed: int) -> None:
    """Every operator, numbers on either side, nodes used more than once; torch beside it."""
    rng = random.Random(seed)
    data = [rng.uniform(0.3, 2.0) for _ in range(4)]
    leaves, torch_leaves = [wb.Value(x) for x in data], [torch.tensor(x) for x in data]
    ours, theirs = list(leaves), [x.requires_grad_() for x in torch_leaves]
    for _ in range(25):
        i, j, number = rng.randrange(len(ours)), rng.randrange(len(ours)), rng.uniform(0.5, 2)
        kind, function = rng.randrange(5), rng.choice(BINARY)
        if kind == 0:
            function, power = rng.choice(UNARY), None
            steps = [(function, (x[i],)) for x in (ours, theirs)]
        elif kind == 1:
            power = rng.choice((2, 3, -1, 0.5, -1.5, 1, 2.0))
            steps = [(operator.pow, (x[i], power)) for x in (ours, theirs)]
        elif kind == 2:
            steps = [(function, (x[i], x[j])) for x in (ours, theirs)]
        else:
            number = rng.choice((number, 2, -3))
            steps = [
                (function, (x[i], number) if kind == 3 else (number, x[i])) for x in (ours, theirs)
            ]
        value = steps[1][0](*steps[1][1])
        if 1e-3 < value.abs() < 50 and (value > 0 or rng.random() < 0.2):
            allowed = not (kind == 1 and theirs[i] < 0)
            allowed = allowed and not (kind == 0 and theirs[i] < 0 and value.isnan())
            if allowed:
                ours.append(steps[0][0](*steps[0][1]))
                theirs.append(value)
    total, want = ours[0] * 0, theirs[0] * 0
    for ours_one, theirs_one in zip(ours[4:], theirs[4:]):
        total, want = total + ours_one, want + theirs_one
    total.backward()
    want.backward()
    assert math.isclose(total.data, want.item(), rel_tol=1e-9)
    for leaf, beside in zip(leaves, torch_leaves):
        grad = 0.0 if beside.grad is None else beside.grad.item()
        assert math.isclose(leaf.grad, grad, rel_tol=1e-9, abs_tol=1e-9)
    assert len(ours) > 8


def test_value_adds_up_over_graphs() -> None:
    x = wb.Value(1.5)
    assert x.grad == 0
    (x * x).backward()
    assert math.isclose(x.grad, 3.0)
    (2 / x).backward()
    assert math.isclose(x.grad, 3.0 - 2 / 1.5**2)


@pytest.mark.parametrize("function", UNARY[1:])
@pytest.mark.parametrize("start", [-0.8, -0.1, 0.3, 2.5])
def test_value_of_one_function(function: Callable, start: float) -> None:
    beside = torch.tensor(start, requires_grad=True)
    want = function(beside)
    if want.isnan():  # a logarithm below 0
        return
    want.backward()
    x = wb.Value(start)
    y = function(x)
    y.backward()
    assert math.isclose(y.data, want.item(), rel_tol=1e-12, abs_tol=1e-12)
    assert math.isclose(x.grad, beside.grad.item(), rel_tol=1e-12, abs_tol=1e-12)


def test_value_in_a_long_chain_visits_a_node_once() -> None:
    """Each step uses the one before twice: 2^10,000 paths, 20,000 nodes, no recursion."""
    x = wb.Value(0.7)
    y = x
    for _ in range(10_000):
        y = (y + y) * 0.5
    y.backward()
    assert math.isclose(y.data, 0.7)
    assert math.isclose(x.grad, 1.0)
