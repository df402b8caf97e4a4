"""The formulas of the chapters on training, decoding and preferences, beside autograd."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from notes import build

TEXT = build.NOTES.read_text(encoding="utf-8")


def stands(number: str, text: str) -> None:
    assert text in build.phrases_of(TEXT, number), f"not in {number}: {text}"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, of)


def test_cross_entropy_gradient():
    z, y = drawn(5, 7).requires_grad_(), torch.tensor([0, 3, 6, 3, 1])
    (dz,) = gradients(F.cross_entropy(z, y), z)
    assert torch.allclose(dz, (z.softmax(1) - F.one_hot(y, 7)) / 5)
    assert dz.sum(1).abs().max() < 1e-15
    stands("12.1", r"dz_i &= \frac{1}{n} (\mathrm{softmax}(z_i) - e_{y_i})")
    stands("12.1", "a row's gradients sum to 0")
    assert math.exp(-800) == 0  # "a logit 800 below the largest gives log 0"


@pytest.mark.parametrize("centred", [False, True])
def test_norm_gradients(centred):
    x, w, dy = drawn(4, 6).requires_grad_(), drawn(6, seed=1), drawn(4, 6, seed=2)
    y = F.layer_norm(x, (6,), w, eps=1e-12) if centred else F.rms_norm(x, (6,), w, eps=1e-12)
    (dx,) = gradients((y * dy).sum(), x)
    shifted = x - x.mean(1, keepdim=True) if centred else x
    size = shifted.square().mean(1, keepdim=True).sqrt()
    normed, g = shifted / size, w * dy
    along = (g * normed).mean(1, keepdim=True)
    mean = g.mean(1, keepdim=True) if centred else 0.0
    assert torch.allclose(dx, (g - mean - normed * along) / size)
    assert (dx * x).sum(1).abs().max() < 1e-9  # "the gradient has no part along x"
    stands("12.2", r"a = \mathrm{mean}(g \odot \hat x)")
    stands("12.2", r"dx = (g - a \hat x) \, / \, \mathrm{rms}")
    stands("12.2", r"dx = (g - \mathrm{mean}(g) - a \hat x) \, / \, \sigma")


def test_attention_gradients():
    q, k, v = (drawn(5, 4, seed=s).requires_grad_() for s in (0, 1, 2))
    p = (q @ k.T / 2).softmax(1)
    out, d_out = p @ v, drawn(5, 4, seed=3)
    d_p = d_out @ v.T
    d_s = p * (d_p - (d_p * p).sum(1, keepdim=True))
    wanted = gradients((out * d_out).sum(), q, k, v)
    for ours, autograd in zip((d_s @ k / 2, d_s.T @ q / 2, p.T @ d_out), wanted):
        assert torch.allclose(ours, autograd)
    assert torch.allclose((d_p * p).sum(1), (d_out * out).sum(1))
    stands("12.3", "The row sum equals rowsum(dO ⊙ O)")
    z = drawn(9).requires_grad_()
    sigma = z.sigmoid()
    (slope,) = gradients(F.silu(z).sum(), z)
    assert torch.allclose(slope, sigma * (1 + z * (1 - sigma)))
    stands("12.3", "has the slope σ(z) (1 + z (1 − σ(z)))")


def test_central_differences_have_ten_digits():
    x, step = 0.7, 1e-5
    difference = (math.exp(x + step) - math.exp(x - step)) / (2 * step)
    assert abs(difference / math.exp(x) - 1) < 1e-9
    stands("12.4", "so ε = 10⁻⁵ leaves about ten digits")


def test_first_step_of_adamw_is_the_rate():
    weight = torch.nn.Parameter(drawn(3, 2))
    before, weight.grad = weight.detach().clone(), 1e3 * drawn(3, 2, seed=1)
    torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0).step()
    assert torch.allclose((weight - before).abs(), torch.full((3, 2), 0.01, dtype=torch.float64))
    stands("12.5", "about η for every weight, whatever the gradient's size")


def test_means_of_means_differ():
    sums, counts = [6.0, 1.0], [3, 1]
    assert sum(sums) / sum(counts) != sum(s / n for s, n in zip(sums, counts)) / 2
    stands("12.6", "divide each sum by the number of pairs in **all** of them")


def test_pairs_of_the_example():
    text = "aaabdaaabac"
    pairs = [text[i : i + 2] for i in range(len(text) - 1)]
    assert max(set(pairs), key=pairs.count) == "aa"
    merged, i = [], 0
    while i < len(text):
        merged.append("aa" if text[i : i + 2] == "aa" else text[i])
        i += len(merged[-1])
    pairs = list(itertools.pairwise(merged))
    assert pairs.count(("aa", "a")) == pairs.count(("a", "b")) == 2
    assert max(map(pairs.count, pairs)) == 2
    stands("13.1", "the second (aa, a) or (a, b), which both stand twice")


def test_preference_losses():
    start = -F.logsigmoid(torch.zeros((), dtype=torch.float64))
    stands("14.1", f"At the start it is ln 2 = {start:.4f}")
    gap = drawn(1000)
    assert (gap.exp() - gap - 1 >= 0).all()  # k3 "is never negative"
    rewards, values, gamma, lam = drawn(4), drawn(5, seed=1), 0.9, 0.8
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(4)]
    advantage = 0.0
    for delta in reversed(deltas):
        advantage = delta + gamma * lam * advantage
    assert advantage == pytest.approx(sum((gamma * lam) ** k * d for k, d in enumerate(deltas)))
    stands("14.3", "sums later surprises with weight (γλ)^k")
