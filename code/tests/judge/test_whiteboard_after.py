"""The losses after pre-training against loops over single numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb

from whiteboard import after as wb


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_token_log_probs(scale: float) -> None:
    logits, ids = (scale * torch.randn(3, 5, 7)).requires_grad_(), torch.randint(7, (3, 5))
    found = wb.token_log_probs(logits, ids)
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert (slope + torch.autograd.grad(losses, logits)[0]).abs().max() < 1e-12
    assert found.shape == (3, 4) and found.isfinite().all()
    for b in range(3):
        for t in range(4):
            want = -F.cross_entropy(logits[b, t], ids[b, t + 1])
            assert abs(found[b, t] - want) < 1e-9
    assert abs(-found.mean() - tb.next_token_loss(logits, ids)) < 1e-9
    assert wb.token_log_probs(logits[:, :1], ids[:, :1]).shape == (3, 0)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_loss(beta: float, scale: float) -> None:
    given = [(scale * torch.randn(5)).requires_grad_() for _ in range(4)]
    found = wb.dpo_loss(*given, beta)
    total = 0.0
    for chosen, rejected, ref_chosen, ref_rejected in zip(*(x.tolist() for x in given)):
        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        total += math.log1p(math.exp(-margin)) if margin > -700 else -margin
    assert math.isclose(found.item(), total / 5, rel_tol=1e-12)
    chosen, rejected = torch.autograd.grad(found, given[:2])
    margins = beta * ((given[0] - given[2]) - (given[1] - given[3])).detach()
    slope = -beta * torch.sigmoid(-margins) / 5
    assert (chosen - slope).abs().max() < 1e-12 and (rejected + slope).abs().max() < 1e-12


@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
@pytest.mark.parametrize("options", [{}, {"clip": 0.05, "beta": 0.3}, {"beta": 0.0}])
def test_grpo_loss(options: dict, spread: float) -> None:
    G, T = 4, 6
    log_probs, old, ref = (-2 * torch.rand(G, T) for _ in range(3))
    old, ref = log_probs + 0.3 * torch.randn(G, T), log_probs + 0.4 * torch.randn(G, T)
    rewards = 0.5 + spread * torch.tensor([0.0, 1, 1, 3])
    mask = torch.tensor(
        [[1] * 6, [0, 0, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    ).bool()
    leaves = [x.clone().requires_grad_() for x in (log_probs, old, ref, rewards)]
    found = wb.grpo_loss(*leaves, mask, **options)
    clip, beta = options.get("clip", 0.2), options.get("beta", 0.04)
    mean = rewards.sum() / G
    std = ((rewards - mean) ** 2).sum().div(G - 1).sqrt()
    leaf = log_probs.clone().requires_grad_()
    rows = []
    for i in range(G):
        advantage = ((rewards[i] - mean) / (std + 1e-4)).item()
        tokens = []
        for t in range(T):
            if mask[i, t]:
                ratio = torch.exp(leaf[i, t] - old[i, t])
                bounded = max(min(ratio, torch.tensor(1 + clip)), torch.tensor(1 - clip))
                gap = ref[i, t] - leaf[i, t]
                k3 = torch.exp(gap) - gap - 1
                tokens.append(min(ratio * advantage, bounded * advantage) - beta * k3)
        rows.append(sum(tokens) / len(tokens))
    want = -sum(rows) / G
    assert abs(found - want) < 1e-9
    gradients = torch.autograd.grad(found, leaves, allow_unused=True)
    (slope,) = torch.autograd.grad(want, leaf)
    assert (gradients[0] - slope).abs().max() < 1e-9
    assert all(g is None or not g.any() for g in gradients[1:])


def test_grpo_loss_of_huge_numbers_on_padding() -> None:
    log_probs = torch.full((2, 3), -1.0).requires_grad_()
    old = torch.tensor([[-1.0, -1, -1e4], [-1, 1e4, -1e4]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    loss = wb.grpo_loss(log_probs, old, old, torch.tensor([0.0, 1]), mask)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()
    assert not log_probs.grad[~mask].any()


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 1.0), (0.5, 0.0), (0.97, 1.0)])
def test_gae(gamma: float, lam: float) -> None:
    T = 7
    rewards, values = torch.randn(T), torch.randn(T + 1)
    found = wb.gae(rewards, values, gamma, lam)
    assert found.shape == (T,)
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(T)]
    for t in range(T):
        want = sum((gamma * lam) ** k * deltas[t + k] for k in range(T - t))
        assert abs(found[t] - want) < 1e-9
