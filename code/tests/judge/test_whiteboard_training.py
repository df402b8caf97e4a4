"""The loop's pieces equal torch's own: AdamW, clip_grad_norm_, and what they are made of."""

import copy
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
from torch import Tensor, nn

from whiteboard import training as wb


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-9)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.5, 0.7)},
        {
            "lr": 0.3,
            "eps": 1e-2,
            "weight_decay": 0.0,
        },  # where eps stands shows with small gradients
        {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-2, "weight_decay": 0.5},
    ],
)
def test_adamw(options: dict, size: float) -> None:
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (), (2, 6))]
    theirs = [copy.deepcopy(p) for p in ours]
    optimizer, reference = wb.AdamW(iter(ours), **options), torch.optim.AdamW(theirs, **options)
    for step in range(7):
        for i, (a, b) in enumerate(zip(ours, theirs)):
            if i == 1 or (i == 3 and step % 2):  # never, and now and then, without a gradient
                continue
            a.grad = size * torch.randn(a.shape)
            b.grad = a.grad.clone()
        optimizer.lr = reference.param_groups[0]["lr"] = 0.05 * (step + 1)
        optimizer.step()
        reference.step()
        assert all(close(a.data, b.data) for a, b in zip(ours, theirs))
        optimizer.zero_grad()
        reference.zero_grad()
        assert all(p.grad is None or not p.grad.any() for p in ours)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 3.0, 1e3])
def test_clip_grad_norm(max_norm: float) -> None:
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (), (2, 6))]
    for p in ours[:1] + ours[2:]:
        p.grad = torch.randn(p.shape)
    theirs = copy.deepcopy(ours)
    for a, b in zip(ours, theirs):
        b.grad = None if a.grad is None else a.grad.clone()
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert abs(wb.clip_grad_norm(iter(ours), max_norm) - want) < 1e-12
    for a, b in zip(ours, theirs):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:  # torch divides by norm + 1e-6
            assert (a.grad - b.grad).abs().max() <= 1e-6 * b.grad.abs().max().clamp(min=max_norm)
    after = torch.stack([p.grad.norm() for p in ours if p.grad is not None]).norm()
    assert math.isclose(after, min(max_norm, want.item()), rel_tol=1e-12)


def test_clip_grad_norm_without_gradients() -> None:
    assert wb.clip_grad_norm([nn.Parameter(torch.zeros(3))], 1.0) == 0
    assert wb.clip_grad_norm([], 1.0) == 0


@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (3, 11), (10, 100)])
def test_learning_rate(warmup: int, total: int) -> None:
    """torch.optim's own schedules in a row: linear, then cosine."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, warmup, total, min_lr=0.07
    )
    for step in range(total):
        assert math.isclose(
            wb.learning_rate(step, 0.3, 0.07, warmup, total), schedule.get_last_lr()[0],
            rel_tol=1e-12,
        )  # fmt: skip
        optimizer.step()
        schedule.step()
    assert wb.learning_rate(warmup, 0.3, 0.07, warmup, total) == 0.3
    for step in (total, total + 1, 3 * total):
        assert math.isclose(wb.learning_rate(step, 0.3, 0.07, warmup, total), 0.07)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Unequal lengths, padding on both sides, one batch without a pair."""
    masks = [
        [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]],
        [[1, 0], [0, 1], [0, 0]],
        [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1] * 7],
    ]
    masks = [torch.tensor(mask).bool() for mask in masks]
    return [(torch.randint(17, mask.shape), mask) for mask in masks]


def test_accumulate() -> None:
    model = tb.DecoderOnlyLM(17, 24, 1, 4, 2, 20)
    unused = nn.Parameter(torch.zeros(3))
    model.register_parameter("unused", unused)
    given = batches()
    losses = [
        F.cross_entropy(model(ids[i : i + 1, : t + 1])[0, -1:], ids[i, t + 1 : t + 2])
        for ids, mask in given
        for i, t in itertools.product(range(len(ids)), range(ids.shape[1] - 1))
        if mask[i, t] and mask[i, t + 1]
    ]
    want = torch.stack(losses).mean()
    want.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    found = wb.accumulate(model, given)  # on top of nothing, though .grad is full
    assert abs(found - want.item()) < 1e-9
    for name, p in model.named_parameters():
        if name in gradients:
            assert close(p.grad, gradients[name])
        else:
            assert p.grad is None or not p.grad.any()


def test_accumulate_keeps_one_graph() -> None:
    model, alive = tb.DecoderOnlyLM(17, 24, 1, 4, 2, 20), []
    inputs = {p.data_ptr() for p in model.parameters()}

    class Saved:
        """A tensor that is held for backward."""

        def __init__(self, tensor: Tensor):
            self.tensor = tensor
            if tensor.is_floating_point() and tensor.data_ptr() not in inputs:
                held.add(self)

        def __hash__(self) -> int:
            return id(self)

    held = weakref.WeakSet()

    def counted(ids: Tensor) -> Tensor:
        alive.append(len(held))
        return model(ids)

    counted.zero_grad = model.zero_grad
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        wb.accumulate(counted, batches())
        assert alive == [0, 0, 0]
        alive.clear()
        kept = [counted(ids).sum() for ids, _ in batches()]
    assert alive[1] > 0 and len(kept) == 3


@pytest.mark.parametrize("p", [0.0, 0.2, 0.7, 1.0])
def test_dropout(p: float) -> None:
    x = 1 + torch.rand(300, 200)
    x.requires_grad_()
    state = torch.get_rng_state()
    y = wb.dropout(x, p, True, torch.Generator().manual_seed(3))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(y, wb.dropout(x, p, True, torch.Generator().manual_seed(3)))
    other = wb.dropout(x, p, True, torch.Generator().manual_seed(4))
    assert torch.equal(y, other) == (p in (0, 1))
    dropped = y == 0
    assert abs(dropped.double().mean() - p) < 0.01
    for axis in (0, 1):  # every entry its own: no row and no column shares a draw
        assert (dropped.double().mean(dim=axis) - p).abs().max() < 5 * math.sqrt(0.25 / 200)
    scale = 1 / (1 - p) if p < 1 else 0
    assert close(y, torch.where(dropped, 0, scale * x))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert close(gradient, torch.where(dropped, 0.0, scale))
    assert torch.equal(wb.dropout(x, p, False), x)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 5.0])
def test_contrastive_loss(temperature: float) -> None:
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    rows = []
    for one, other in ((a, b), (b, a)):
        for i in range(5):
            cosines = [F.cosine_similarity(one[i], other[j], dim=0) for j in range(5)]
            logits = torch.stack(cosines) / temperature
            rows.append(logits.logsumexp(dim=0) - logits[i])
    want = torch.stack(rows).mean()
    found = wb.contrastive_loss(a, b, temperature)
    assert close(found, want)
    for f, w in zip(torch.autograd.grad(found, (a, b)), torch.autograd.grad(want, (a, b))):
        assert close(f, w)
    low = wb.contrastive_loss(a.float(), b.float(), temperature)
    assert abs(low - want) < 1e-4 * max(1, want)


def test_contrastive_loss_against_clip() -> None:
    clip = pytest.importorskip("transformers.models.clip.modeling_clip")
    a, b = torch.randn(5, 7), torch.randn(5, 7)
    similarity = F.normalize(b, dim=1) @ F.normalize(a, dim=1).T / 0.5
    want = (clip.contrastive_loss(similarity) + clip.contrastive_loss(similarity.T)) / 2
    assert close(wb.contrastive_loss(a, b, 0.5), want)


def test_quantize_int8() -> None:
    w = torch.randn(6, 9) * torch.tensor([1e-4, 1, 0, 300, 1e-2, 7])[:, None]
    q, scale = wb.quantize_int8(w)
    assert q.dtype == torch.int8 and scale.dtype == w.dtype and scale.shape == (6,)
    assert close(scale, w.abs().amax(dim=1) / 127)
    assert not q[2].any() and scale.isfinite().all()
    assert (q.double() * scale[:, None] - w).abs().le(scale[:, None] / 2 + 1e-12).all()
    alive = [0, 1, 3, 4, 5]
    assert (q[alive].abs().amax(dim=1) == 127).all()
    zeros = torch.zeros(5, dtype=torch.int32)
    want = torch.fake_quantize_per_channel_affine(
        w[alive].float(), scale[alive].float(), zeros, 0, -127, 127
    )
    assert (want - q[alive] * scale[alive, None]).abs().max() < 1e-4
