"""Right answers as short as people write them, to the exercises that NumPy does not fit."""

import math
from itertools import chain, pairwise

import torch
import torch.nn.functional as F
from torch import nn


class Value:
    """Each node keeps a function from its gradient to its children's; Kahn's order."""

    def __init__(self, data, made=()):
        self.data, self.grad, self.made = data, 0.0, list(made)

    def lift(self, x):
        return x if isinstance(x, Value) else Value(x)

    def __add__(self, o, sign=1):
        o = self.lift(o)
        return Value(self.data + sign * o.data, [(self, lambda g: g), (o, lambda g: sign * g)])

    def __mul__(self, o):
        o = self.lift(o)
        return Value(
            self.data * o.data, [(self, lambda g: g * o.data), (o, lambda g: g * self.data)]
        )

    def unary(self, data, slope):
        return Value(data, [(self, lambda g: g * slope)])

    def __pow__(self, n):
        return self.unary(self.data**n, n * self.data ** (n - 1))

    def exp(self):
        return self.unary(math.exp(self.data), math.exp(self.data))

    def log(self):
        return self.unary(math.log(self.data), 1 / self.data)

    def tanh(self):
        return self.unary(math.tanh(self.data), 1 - math.tanh(self.data) ** 2)

    def relu(self):
        return self.unary(max(0, self.data), self.data >= 0)

    def __neg__(self):
        return self.unary(-self.data, -1)

    def __sub__(self, o):
        return self.__add__(o, -1)

    def __rsub__(self, o):
        return self.lift(o) - self

    def __truediv__(self, o):
        return self * self.lift(o) ** -1

    def __rtruediv__(self, o):
        return self.lift(o) / self

    __radd__, __rmul__ = __add__, __mul__

    def backward(self):
        uses, todo, seen = {}, [self], {self}
        while todo:
            for child, _ in todo.pop().made:
                uses[child] = uses.get(child, 0) + 1
                if child not in seen:
                    seen.add(child)
                    todo.append(child)
        self.grad, ready = self.grad + 1, [self]
        while ready:
            node = ready.pop()
            for child, back in node.made:
                child.grad += back(node.grad)
                uses[child] -= 1
                if not uses[child]:
                    ready.append(child)


class AdamW:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.__dict__.update(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, t=0)
        self.slots = [(p, torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in parameters]

    def step(self):
        self.t += 1
        c1, c2 = (1 - b**self.t for b in self.betas)
        for p, m, v in self.slots:
            if p.grad is not None:
                m.add_(p.grad - m, alpha=1 - self.betas[0])
                v.add_(p.grad**2 - v, alpha=1 - self.betas[1])
                decayed = (1 - self.lr * self.weight_decay) * p.data
                p.data.copy_(decayed - self.lr * (m / c1) / ((v / c2) ** 0.5 + self.eps))

    def zero_grad(self):
        for p, _, _ in self.slots:
            if p.grad is not None:
                p.grad.zero_()


def clip_grad_norm(parameters, max_norm):
    with_grad = [p for p in parameters if p.grad is not None]
    norm = math.hypot(*chain.from_iterable(p.grad.flatten().tolist() for p in with_grad))
    if norm > max_norm:
        for p in with_grad:
            p.grad /= norm / max_norm
    return norm


def learning_rate(step, max_lr, min_lr, warmup, total):
    if step < warmup:
        return step * max_lr / warmup
    share = max(0.0, min(1.0, 1 - (step - warmup) / (total - warmup)))
    return min_lr + (max_lr - min_lr) * (1 - math.cos(math.pi * share)) / 2


def accumulate(model, batches):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    weights = [(m[:, :-1] * m[:, 1:]).double() for _, m in batches]
    total = sum(w.sum() for w in weights)

    def one(ids, w):
        nll = F.cross_entropy(model(ids)[:, :-1].permute(0, 2, 1), ids[:, 1:], reduction="none")
        loss = (nll * w).sum() / total
        loss.backward()
        return float(loss)

    return sum(one(ids, w) for (ids, _), w in zip(batches, weights))


def dropout(x, p, training, generator=None):
    if not training or p == 0:
        return x
    keep = torch.bernoulli(torch.full_like(x, 1 - p), generator=generator)
    return x * keep / max(1 - p, 1e-12)


def bpe_train(text, n_merges):
    parts, merges = [bytes([b]) for b in text.encode()], []
    for _ in range(n_merges):
        pairs = list(pairwise(parts))
        if not pairs:
            return merges
        best = max(set(pairs), key=lambda pair: (pairs.count(pair), pair))
        merges.append(best)
        i = 0
        while i < len(parts) - 1:
            if (parts[i], parts[i + 1]) == best:
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            i += 1
    return merges


def bpe_encode(text, merges):
    parts = [bytes([b]) for b in text.encode()]
    for a, b in merges:
        i = 0
        while i + 1 < len(parts):
            if parts[i] == a and parts[i + 1] == b:
                parts[i] = a + parts.pop(i + 1)
            i += 1
    return torch.tensor(
        [p[0] if len(p) == 1 else 256 + [a + b for a, b in merges].index(p) for p in parts]
    )


def bpe_decode(ids, merges):
    pieces = [bytes([i]) if i < 256 else b"".join(merges[i - 256]) for i in ids]
    return b"".join(pieces).decode(errors="replace")


def beam_search(model, ids, n_beams, max_new_tokens, eos_id=None):
    """Tuples in a list, all beams in one call, the ended ones fed along and left out."""
    T = ids.size(1)
    beams = [(0.0, tuple(ids[0].tolist()))]

    def over(beam):
        return len(beam[1]) > T and beam[1][-1] == eos_id

    for step in range(max_new_tokens):
        live = [beam for beam in beams if not over(beam)]
        if live:
            rows = torch.log_softmax(model(torch.tensor([b[1] for b in live]))[:, T + step - 1], -1)
            grown = [
                (total + value, (*path, token))
                for (total, path), row in zip(live, rows.tolist())
                for token, value in enumerate(row)
            ]
            beams = sorted([b for b in beams if over(b)] + grown)[-n_beams:]
    return torch.tensor([max(beams, key=lambda b: b[0] / max(1, len(b[1]) - T))[1]])


class WindowAttention(nn.Module):
    """Weights as plain matrices; the whole window is kept, joined into one tensor."""

    def __init__(self, d_model, n_q_heads, n_kv_heads, window):
        super().__init__()
        self.heads, self.groups, self.window = n_q_heads, n_kv_heads, window
        self.d = d_model // n_q_heads
        width = n_kv_heads * self.d
        self.q = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)
        self.k = nn.Parameter(torch.randn(width, d_model) / d_model**0.5)
        self.v = nn.Parameter(torch.randn(width, d_model) / d_model**0.5)
        self.o = nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5)

    def rotated(self, x, start):
        i = torch.arange(self.d // 2, dtype=torch.float64)
        phase = torch.arange(start, start + x.shape[2])[:, None] / 10000 ** (2 * i / self.d)
        turn = torch.polar(torch.ones_like(phase), phase)
        pairs = torch.complex(*(part.double() for part in x.chunk(2, -1)))
        out = torch.view_as_real(pairs * turn)
        return torch.cat((out[..., 0], out[..., 1]), -1).to(x.dtype)

    def forward(self, x, cache=None):
        kept, start = cache if cache else (None, 0)
        B, T, _ = x.shape
        q, k, v = (
            F.linear(x, w).view(B, T, n, self.d).transpose(1, 2)
            for w, n in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        kv = torch.stack((self.rotated(k, start), v))
        kv = kv if kept is None else torch.cat((kept, kv), dim=3)
        S, r = kv.shape[3], self.heads // self.groups
        q = self.rotated(q, start).view(B, self.groups, r, T, self.d)
        s = q @ kv[0][:, :, None].transpose(-1, -2) / self.d**0.5
        t = torch.arange(T)[:, None] + S - T
        hidden = (torch.arange(S) > t) | (torch.arange(S) <= t - self.window)
        w = torch.where(hidden, -1e30, s).softmax(-1)
        y = (w @ kv[1][:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)
        return y @ self.o.T, (kv[..., -self.window :, :], start + T)
