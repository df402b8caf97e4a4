"""Right answers that lean on torch: its losses, norms, matrices and ready functions."""

import collections
import heapq
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def softmax_cross_entropy(logits, targets):
    log_p = F.log_softmax(logits, dim=-1)
    loss = F.nll_loss(log_p, targets)
    return loss, (log_p.exp() - F.one_hot(targets, logits.shape[1])) / logits.shape[0]


def linear_backward(x, w, dy):
    dx = F.linear(dy, w.t())
    dw = torch.tensordot(dy, x, dims=(list(range(dy.ndim - 1)),) * 2)
    return dx, dw, dy.reshape(-1, dy.size(-1)).sum(0)


def layer_norm_backward(x, weight, dy, eps=1e-5):
    d = (x.shape[-1],)
    hat = F.layer_norm(x, d, eps=eps)
    std = (x.var(-1, correction=0, keepdim=True) + eps).sqrt()
    g = dy * weight
    dx = (g - g.mean(-1, True) - hat * (g * hat).mean(-1, True)) / std
    axes = tuple(range(x.dim() - 1))
    return dx, (dy * hat).sum(axes), dy.sum(axes)


def rms_norm_backward(x, weight, dy, eps=1e-6):
    hat = F.rms_norm(x, (x.shape[-1],), eps=eps)
    rms = torch.sqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / x.shape[-1] + eps)
    g = dy * weight
    dx = torch.addcmul(g, hat, (g * hat).mean(-1, keepdim=True), value=-1) / rms
    return dx, (dy * hat).sum(tuple(range(x.dim() - 1)))


def swiglu_backward(x, w_gate, w_up, w_down, dy):
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    act, s = F.silu(gate), torch.sigmoid(gate)
    dhidden = dy.matmul(w_down)
    dgate, dup = dhidden * up * torch.lerp(act, torch.ones_like(act), s), dhidden * act
    flat = [t.flatten(end_dim=-2) for t in (x, dy, dgate, dup, act * up)]
    dx = dgate.matmul(w_gate) + dup.matmul(w_up)
    return dx, flat[2].t() @ flat[0], flat[3].t() @ flat[0], flat[1].t() @ flat[4]


def attention_backward(q, k, v, dout, mask=None):
    (B, H, T, d), G = q.shape, k.size(1)
    q, dout = (t.reshape(B, G, H // G * T, t.size(-1)) for t in (q, dout))
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1.0 / math.sqrt(d))
    if mask is not None:
        keep = mask.expand(B, H, T, k.size(2)).reshape(scores.shape)
        scores = scores.masked_fill(~keep, float("-inf"))
    p = torch.nan_to_num(F.softmax(scores, dim=-1))
    dv = p.transpose(-2, -1) @ dout
    dp = dout @ v.transpose(-2, -1)
    ds = torch.addcmul(p * dp, p, (p * dp).sum(-1, keepdim=True), value=-1) / math.sqrt(d)
    return (ds @ k).view(B, H, T, d), ds.transpose(-2, -1) @ q, dv


def flash_backward(q, k, v, out, lse, dout, block):
    """Tiles of queries as well."""
    scale = 1 / math.sqrt(q.size(-1))
    delta = torch.linalg.vecdot(out, dout)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for j in range(0, k.size(0), block):
        cols = slice(j, j + block)
        for i in range(0, q.size(0), block):
            rows = slice(i, i + block)
            p = (torch.mm(q[rows], k[cols].t()) * scale - lse[rows].unsqueeze(1)).exp()
            dv[cols].addmm_(p.t(), dout[rows])
            ds = p * (torch.mm(dout[rows], v[cols].t()) - delta[rows].unsqueeze(1)) * scale
            dq[rows].addmm_(ds, k[cols])
            dk[cols].addmm_(ds.t(), q[rows])
    return dq, dk, dv


class Value:
    """Nodes are numbered as they are made; backward takes the latest first from a heap."""

    count = 0

    def __init__(self, data, parents=(), slopes=()):
        self.data, self.grad = data, 0
        self.parents, self.slopes = parents, slopes
        Value.count += 1
        self.number = Value.count

    def __add__(self, other):
        if not isinstance(other, Value):
            return Value(self.data + other, (self,), (1,))
        return Value(self.data + other.data, (self, other), (1, 1))

    def __mul__(self, other):
        if not isinstance(other, Value):
            return Value(self.data * other, (self,), (other,))
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __pow__(self, n):
        return Value(self.data**n, (self,), (n * self.data ** (n - 1),))

    def exp(self):
        out = math.exp(self.data)
        return Value(out, (self,), (out,))

    def log(self):
        return Value(math.log(self.data), (self,), (1 / self.data,))

    def tanh(self):
        return Value(math.tanh(self.data), (self,), (1 / math.cosh(self.data) ** 2,))

    def relu(self):
        return Value(self.data if self.data > 0 else 0, (self,), (int(self.data > 0),))

    def __neg__(self):
        return -1 * self

    def __sub__(self, other):
        return self + (-other)

    def __truediv__(self, other):
        return self * other**-1

    def __radd__(self, other):
        return self + other

    def __rmul__(self, other):
        return self * other

    def __rsub__(self, other):
        return (-self) + other

    def __rtruediv__(self, other):
        return other * self**-1

    def backward(self):
        flow, heap = {self.number: 1.0}, [(-self.number, self)]
        while heap:
            number, node = heapq.heappop(heap)
            grad = flow.pop(-number)
            node.grad += grad
            for parent, slope in zip(node.parents, node.slopes):
                if parent.number not in flow:
                    flow[parent.number] = 0.0
                    heapq.heappush(heap, (-parent.number, parent))
                flow[parent.number] += slope * grad


class AdamW:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.p = list(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.m = {p: torch.zeros_like(p, requires_grad=False) for p in self.p}
        self.v = {p: torch.zeros_like(p, requires_grad=False) for p in self.p}
        self.t = dict.fromkeys(self.p, 0)

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for p in filter(lambda p: p.grad is not None, self.p):
            self.t[p] += 1
            self.m[p].lerp_(p.grad, 1 - b1)
            self.v[p].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            step_size = self.lr / (1 - b1 ** self.t[p])
            root = self.v[p].sqrt() / math.sqrt(1 - b2 ** self.t[p])
            p.sub_(self.lr * self.weight_decay * p)
            p.addcdiv_(self.m[p], root.add_(self.eps), value=-step_size)

    def zero_grad(self):
        for p in self.p:
            p.grad = None


def clip_grad_norm(parameters, max_norm):
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
    factor = torch.clamp(max_norm / norm, max=1.0)
    for g in gradients:
        g.mul_(factor)
    return norm


def learning_rate(step, max_lr, min_lr, warmup, total):
    if warmup and step < warmup:
        return torch.lerp(torch.tensor(0.0), torch.tensor(float(max_lr)), step / warmup).item()
    t = torch.tensor((step - warmup) / (total - warmup)).clamp(0, 1)
    return min_lr + (max_lr - min_lr) * torch.cos(t * math.pi / 2) ** 2


def accumulate(model, batches):
    model.zero_grad(set_to_none=False)
    targets = [ids[:, 1:].masked_fill(~(m[:, 1:] & m[:, :-1]), -100) for ids, m in batches]
    n = sum(int((t != -100).sum()) for t in targets)
    losses = []
    for (ids, _), target in zip(batches, targets):
        logits = model(ids)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / n
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def dropout(x, p, training, generator=None):
    if not training or p == 0.0:
        return x
    dropped = torch.rand(x.shape, generator=generator, dtype=torch.float64) < p
    return x.masked_fill(dropped, 0.0) * (1 / (1 - p) if p < 1 else 0.0)


def contrastive_loss(a, b, temperature):
    similarity = F.cosine_similarity(a[:, None], b[None], dim=-1).div(temperature)
    own = torch.arange(a.size(0))
    both = torch.stack((similarity, similarity.t())).flatten(0, 1)
    return F.cross_entropy(both, own.repeat(2))


def quantize_int8(w):
    largest = torch.linalg.vector_norm(w, ord=math.inf, dim=1)
    scale = largest.div(127).clamp_min(torch.finfo(w.dtype).tiny)
    return torch.round(w / scale.unsqueeze(1)).to(dtype=torch.int8), scale


def _join(symbols, pair, new):
    out = []
    symbols = collections.deque(symbols)
    while symbols:
        first = symbols.popleft()
        if symbols and (first, symbols[0]) == pair:
            symbols.popleft()
            out.append(new)
        else:
            out.append(first)
    return out


def bpe_train(text, n_merges):
    """On ids, with a table of what they spell."""
    ids, spelt, merges = list(text.encode()), [bytes([i]) for i in range(256)], []
    while len(merges) < n_merges and len(ids) > 1:
        counts = collections.Counter(pairwise(ids))
        top = max(counts.values())
        pair = max(
            (p for p, c in counts.items() if c == top), key=lambda p: (spelt[p[0]], spelt[p[1]])
        )
        merges.append((spelt[pair[0]], spelt[pair[1]]))
        spelt.append(spelt[pair[0]] + spelt[pair[1]])
        ids = _join(ids, pair, len(spelt) - 1)
    return merges


def bpe_encode(text, merges):
    table = {bytes([i]): i for i in range(256)}
    ids = list(bytes(text, "utf-8"))
    for i, (a, b) in enumerate(merges):
        table[a + b] = 256 + i
        ids = _join(ids, (table[a], table[b]), 256 + i)
    return ids


def bpe_decode(ids, merges):
    spelt = {**{i: bytes((i,)) for i in range(256)}}
    spelt.update((256 + i, b"".join(pair)) for i, pair in enumerate(merges))
    return str(b"".join(map(spelt.__getitem__, ids)), "utf-8", "replace")


def left_pad(prompts, pad_id):
    sequences = [torch.tensor(p, dtype=torch.long) for p in prompts]
    longest = max(len(s) for s in sequences)
    ids = torch.stack([F.pad(s, (longest - len(s), 0), value=pad_id) for s in sequences])
    ones = [torch.ones(len(s), dtype=torch.bool) for s in sequences]
    mask = torch.stack([F.pad(o, (longest - len(o), 0), value=False) for o in ones])
    positions = (mask.cumsum(1) - 1).masked_fill(~mask, 0)
    return ids, mask, positions


@torch.no_grad()
def beam_search(model, ids, n_beams, max_new_tokens, eos_id=None):
    """Tensors: an ended beam gets one candidate, its eos again, at no cost; cut at the end."""
    T, V = ids.shape[1], None
    sums, ended = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    lengths = torch.zeros(1)
    for _ in range(max_new_tokens):
        if ended.all():
            break
        log_probs = F.log_softmax(model(ids)[:, -1], dim=-1)
        V = log_probs.shape[1]
        if eos_id is not None:
            stay = torch.full((V,), -math.inf, dtype=log_probs.dtype)
            stay[eos_id] = 0.0
            log_probs = torch.where(ended[:, None], stay, log_probs)
        table = (sums[:, None] + log_probs).flatten()
        finite = int(table.isfinite().sum())
        sums, places = table.topk(min(n_beams, finite))
        beams, tokens = places // V, places % V
        lengths = lengths[beams] + (~ended[beams]).to(lengths)
        ids = torch.cat((ids[beams], tokens[:, None]), dim=1)
        ended = ended[beams]
        if eos_id is not None:
            ended = ended | (tokens == eos_id)
    best = (sums / lengths.clamp(min=1)).argmax()
    return ids[best, None, : T + int(lengths[best])]


class WindowAttention(nn.Module):
    """q, k, v in one matrix, torch's own attention, a ring of slots for the last keys."""

    def __init__(self, d_model, n_q_heads, n_kv_heads, window):
        super().__init__()
        self.n_q, self.n_kv, self.window = n_q_heads, n_kv_heads, window
        self.head = d_model // n_q_heads
        self.qkv = nn.Linear(d_model, (n_q_heads + 2 * n_kv_heads) * self.head, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def rope(self, x, pos):
        half = self.head // 2
        inv = 1.0 / 10000.0 ** (torch.arange(0, self.head, 2).double() / self.head)
        angle = (pos[:, None].double() * inv).to(x.dtype)
        z1, z2 = x.split(half, dim=-1)
        return torch.cat(
            (z1 * angle.cos() - z2 * angle.sin(), z2 * angle.cos() + z1 * angle.sin()), -1
        )

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        widths = (self.n_q * self.head, self.n_kv * self.head, self.n_kv * self.head)
        q, k, v = (
            p.view(B, T, -1, self.head).transpose(1, 2) for p in self.qkv(x).split(widths, -1)
        )
        start = cache["seen"] if cache else 0
        pos = torch.arange(start, start + T)
        q, k = self.rope(q, pos), self.rope(k, pos)
        old = cache["pos"] if cache else pos[:0]
        keys = torch.cat((cache["k"], k), 2) if cache else k
        values = torch.cat((cache["v"], v), 2) if cache else v
        at = torch.cat((old, pos))
        age = pos[:, None] - at[None]
        keep = (age >= 0) & (age < self.window)
        y = F.scaled_dot_product_attention(q, keys, values, keep, enable_gqa=self.n_q != self.n_kv)
        slots = {int(p) % self.window: i for i, p in enumerate(at.tolist())}
        order = torch.tensor([slots[s] for s in sorted(slots)])
        new = {
            "k": keys[:, :, order],
            "v": values[:, :, order],
            "pos": at[order],
            "seen": start + T,
        }
        return self.out(y.transpose(1, 2).reshape(B, T, -1)), new


def alibi(n_heads, T, S):
    first = 2.0 ** (-8.0 / n_heads)
    slopes = torch.cumprod(torch.full((n_heads,), first, dtype=torch.float64), dim=0)
    keys, queries = torch.arange(S), torch.arange(T) + S - T
    bias = slopes.view(-1, 1, 1) * (keys.view(1, -1) - queries.view(-1, 1))
    return bias.masked_fill(keys.view(1, -1) > queries.view(-1, 1), -math.inf)


def token_log_probs(logits, ids):
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.neg()


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    margin = beta * (chosen - ref_chosen - rejected + ref_rejected)
    return F.softplus(-margin).mean()


def grpo_loss(log_probs, old_log_probs, ref_log_probs, rewards, mask, clip=0.2, beta=0.04):
    rewards = rewards.detach()
    std, mean = torch.std_mean(rewards)
    advantage = rewards.sub(mean).div(std + 1e-4).unsqueeze(1)
    log_ratio = log_probs - old_log_probs.detach()
    policy = torch.max(
        -advantage * log_ratio.exp(), -advantage * log_ratio.exp().clip(1 - clip, 1 + clip)
    )
    gap = ref_log_probs.detach() - log_probs
    kl = torch.expm1(gap) - gap
    weights = mask / mask.sum(1, keepdim=True) / len(rewards)
    return ((policy + beta * kl) * weights).sum()


def gae(rewards, values, gamma, lam):
    """As a triangular matrix."""
    T = len(rewards)
    power = torch.arange(T)[None] - torch.arange(T)[:, None]
    table = torch.triu(torch.as_tensor(gamma * lam, dtype=rewards.dtype) ** power.clamp(min=0))
    return table @ (rewards + gamma * values[1:] - values[:-1])
