"""Right answers written out: einsum, loops, Jacobians, closures, no helper of torch's losses."""

import math
from itertools import pairwise

import torch
from torch import nn


def softmax_cross_entropy(logits, targets):
    N, V = logits.shape
    lse = torch.logsumexp(logits, dim=1)
    picked = torch.stack([logits[i, targets[i]] for i in range(N)])
    loss = (lse - picked).mean()
    dlogits = torch.exp(logits - lse.unsqueeze(1)) - torch.eye(V, dtype=logits.dtype)[targets]
    return loss.item(), dlogits * (1 / N)


def linear_backward(x, w, dy):
    dx = torch.einsum("...o,oi->...i", dy, w)
    dw = torch.einsum("no,ni->oi", dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
    db = dy.sum(dim=tuple(range(dy.ndim - 1)))
    return dx, dw, db


def layer_norm_backward(x, weight, dy, eps=1e-5):
    """By the Jacobian of each row."""
    d = x.shape[-1]
    rows, grads = x.reshape(-1, d), dy.reshape(-1, d)
    dx, dw, db = torch.zeros_like(rows), torch.zeros_like(weight), torch.zeros_like(weight)
    for i in range(len(rows)):
        c = rows[i] - rows[i].mean()
        std = math.sqrt(float((c * c).mean()) + eps)
        hat = c / std
        jacobian = (torch.eye(d, dtype=x.dtype) - 1 / d - torch.outer(hat, hat) / d) / std
        dx[i] = jacobian @ (weight * grads[i])
        dw += grads[i] * hat
        db += grads[i]
    return dx.reshape(x.shape), dw, db


def rms_norm_backward(x, weight, dy, eps=1e-6):
    d = x.shape[-1]
    rows, grads = x.reshape(-1, d), dy.reshape(-1, d)
    dx, dw = torch.empty_like(rows), torch.zeros_like(weight)
    for i, (row, grad) in enumerate(zip(rows, grads)):
        rms = math.sqrt(float(row @ row) / d + eps)
        jacobian = torch.eye(d, dtype=x.dtype) / rms - torch.outer(row, row) / (d * rms**3)
        dx[i] = jacobian @ (weight * grad)
        dw = dw + grad * row / rms
    return dx.view(x.shape), dw


def swiglu_backward(x, w_gate, w_up, w_down, dy):
    g = torch.einsum("...d,hd->...h", x, w_gate)
    u = torch.einsum("...d,hd->...h", x, w_up)
    s = 1 / (1 + torch.exp(-g))
    a = g * s
    dh = torch.einsum("...d,dh->...h", dy, w_down)
    da, du = dh * u, dh * a
    dg = da * (a + s * (1 - a))

    def weight(left, right):
        return torch.einsum("na,nb->ab", left.flatten(0, -2), right.flatten(0, -2))

    dx = torch.einsum("...h,hd->...d", dg, w_gate) + torch.einsum("...h,hd->...d", du, w_up)
    return dx, weight(dg, x), weight(du, x), weight(dy, a * u)


def attention_backward(q, k, v, dout, mask=None):
    """Head by head, query by query."""
    B, H, T, d = q.shape
    G, S = k.shape[1], k.shape[2]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keep = torch.ones(B, H, T, S, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                seen = keep[b, h, t].nonzero()[:, 0]
                if len(seen) == 0:
                    continue
                p = torch.softmax(k[b, g, seen] @ q[b, h, t] / d**0.5, dim=0)
                dp = v[b, g, seen] @ dout[b, h, t]
                ds = (torch.diag(p) - torch.outer(p, p)) @ dp / d**0.5
                dq[b, h, t] = ds @ k[b, g, seen]
                dk[b, g, seen] += torch.outer(ds, q[b, h, t])
                dv[b, g, seen] += torch.outer(p, dout[b, h, t])
    return dq, dk, dv


def flash_backward(q, k, v, out, lse, dout, block):
    """Queries in the outer loop, one at a time."""
    d = q.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for t in range(q.shape[0]):
        D = (out[t] * dout[t]).sum()
        for start in range(0, k.shape[0], block):
            stop = min(start + block, k.shape[0])
            p = torch.exp(k[start:stop] @ q[t] / math.sqrt(d) - lse[t])
            ds = p * (v[start:stop] @ dout[t] - D) / math.sqrt(d)
            dq[t] += ds @ k[start:stop]
            dk[start:stop] += ds[:, None] * q[t]
            dv[start:stop] += p[:, None] * dout[t]
    return dq, dk, dv


class Value:
    """micrograd's form: a closure for each operation, the order from a walk with a stack."""

    def __init__(self, data, children=()):
        self.data = float(data)
        self.grad = 0.0
        self._prev = children
        self._push = lambda: None

    @staticmethod
    def of(x):
        return x if isinstance(x, Value) else Value(x)

    def _make(self, data, children, slopes):
        out = Value(data, children)

        def push():
            for child, slope in zip(children, slopes):
                child.grad += slope * out.grad

        out._push = push
        return out

    def __add__(self, other):
        other = Value.of(other)
        return self._make(self.data + other.data, (self, other), (1.0, 1.0))

    def __radd__(self, other):
        return self + other

    def __mul__(self, other):
        other = Value.of(other)
        return self._make(self.data * other.data, (self, other), (other.data, self.data))

    def __rmul__(self, other):
        return self * other

    def __neg__(self):
        return self._make(-self.data, (self,), (-1.0,))

    def __sub__(self, other):
        other = Value.of(other)
        return self._make(self.data - other.data, (self, other), (1.0, -1.0))

    def __rsub__(self, other):
        return Value(other) - self

    def __truediv__(self, other):
        other = Value.of(other)
        slopes = (1 / other.data, -self.data / other.data**2)
        return self._make(self.data / other.data, (self, other), slopes)

    def __rtruediv__(self, other):
        return Value(other) / self

    def __pow__(self, n):
        return self._make(self.data**n, (self,), (n * self.data ** (n - 1),))

    def exp(self):
        e = math.exp(self.data)
        return self._make(e, (self,), (e,))

    def log(self):
        return self._make(math.log(self.data), (self,), (1 / self.data,))

    def tanh(self):
        t = math.tanh(self.data)
        return self._make(t, (self,), (1 - t * t,))

    def relu(self):
        return self._make(max(0.0, self.data), (self,), (1.0 if self.data > 0 else 0.0,))

    def backward(self):
        order, seen, stack = [], {id(self)}, [(self, iter(self._prev))]
        while stack:
            node, children = stack[-1]
            for child in children:
                if id(child) not in seen:
                    seen.add(id(child))
                    stack.append((child, iter(child._prev)))
                    break
            else:
                order.append(node)
                stack.pop()
        self.grad = 1.0
        for node in reversed(order):
            node._push()


class AdamW:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.params = list(parameters)
        self.lr = lr
        self.beta1, self.beta2 = betas
        self.eps = eps
        self.wd = weight_decay
        self.t = 0
        self.state = {}

    def step(self):
        self.t += 1
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            g = p.grad.detach()
            m, v = self.state.get(i, (torch.zeros_like(g), torch.zeros_like(g)))
            m = self.beta1 * m + (1 - self.beta1) * g
            v = self.beta2 * v + (1 - self.beta2) * g**2
            self.state[i] = (m, v)
            m_hat = m / (1 - self.beta1**self.t)
            v_hat = v / (1 - self.beta2**self.t)
            update = m_hat / (v_hat.sqrt() + self.eps) + self.wd * p.detach()
            p.data = p.data - self.lr * update

    def zero_grad(self):
        for p in self.params:
            if p.grad is not None:
                p.grad = torch.zeros_like(p.grad)


def clip_grad_norm(parameters, max_norm):
    params = [p for p in parameters if p.grad is not None]
    total = 0.0
    for p in params:
        total += float((p.grad**2).sum())
    norm = math.sqrt(total)
    scale = min(1.0, max_norm / (norm + 1e-6))
    for p in params:
        p.grad = p.grad * scale
    return norm


def learning_rate(step, max_lr, min_lr, warmup, total):
    if step < warmup:
        return max_lr * (step / warmup)
    if step >= total:
        return min_lr
    angle = math.pi * (step - warmup) / (total - warmup)
    return 0.5 * (max_lr + min_lr) + 0.5 * (max_lr - min_lr) * math.cos(angle)


def accumulate(model, batches):
    for p in model.parameters():
        p.grad = None
    n = 0
    for _, mask in batches:
        n += int((mask[:, 1:] & mask[:, :-1]).sum())
    total = 0.0
    for ids, mask in batches:
        pairs = mask[:, 1:] & mask[:, :-1]
        log_probs = torch.log_softmax(model(ids)[:, :-1], dim=-1)
        picked = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(picked * pairs).sum() / n
        loss.backward()
        total = total + loss.item()
    return total


def dropout(x, p, training, generator=None):
    if not training:
        return x.clone()
    if p == 1:
        return torch.zeros_like(x)
    keep = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return x * keep / (1 - p)


def contrastive_loss(a, b, temperature):
    a = a / a.norm(dim=1, keepdim=True)
    b = b / b.norm(dim=1, keepdim=True)
    s = torch.einsum("id,jd->ij", a, b) / temperature
    own = s.diagonal()
    rows = torch.logsumexp(s, dim=1) - own
    columns = torch.logsumexp(s, dim=0) - own
    return 0.5 * rows.mean() + 0.5 * columns.mean()


def quantize_int8(w):
    q = torch.zeros(w.shape, dtype=torch.int8)
    scale = torch.ones(w.shape[0], dtype=w.dtype)
    for i, row in enumerate(w):
        largest = row.abs().max()
        if largest > 0:
            scale[i] = largest / 127
            q[i] = torch.round(row / scale[i]).clamp(-127, 127).to(torch.int8)
    return q, scale


def bpe_train(text, n_merges):
    tokens = [bytes([b]) for b in text.encode("utf-8")]
    merges = []
    while len(merges) < n_merges and len(tokens) >= 2:
        counts = {}
        for pair in pairwise(tokens):
            counts[pair] = counts.get(pair, 0) + 1
        most = max(counts.values())
        best = sorted(pair for pair in counts if counts[pair] == most)[-1]
        merges.append(best)
        out = []
        for token in tokens:
            if out and out[-1] is not None and (out[-1], token) == best:
                out[-1] = best[0] + best[1]
                out.append(None)  # what was just joined takes no part
            else:
                out.append(token)
            if len(out) >= 2 and out[-2] is None:
                del out[-2]
        tokens = [token for token in out if token is not None]
    return merges


def bpe_encode(text, merges):
    """The merge that was learned first is applied at its first place, again and again."""
    ids = list(text.encode("utf-8"))
    known = {bytes([i]): i for i in range(256)}
    for i, (a, b) in enumerate(merges):
        known.setdefault(a + b, 256 + i)
    rank = {(known[a], known[b]): i for i, (a, b) in enumerate(merges)}
    while True:
        pairs = [(rank[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in rank]
        if not pairs:
            return ids
        best, i = min(pairs)
        ids[i : i + 2] = [256 + best]


def bpe_decode(ids, merges):
    table = {i: bytes([i]) for i in range(256)}
    for i, (a, b) in enumerate(merges):
        table[256 + i] = a + b
    data = b""
    for i in ids:
        data += table[i]
    return data.decode("utf-8", "replace")


def left_pad(prompts, pad_id):
    longest = max(map(len, prompts))
    ids, mask, positions = [], [], []
    for prompt in prompts:
        gap = longest - len(prompt)
        ids.append([pad_id] * gap + list(prompt))
        mask.append([0] * gap + [1] * len(prompt))
        positions.append([0] * gap + list(range(len(prompt))))
    return tuple(torch.tensor(x) for x in (ids, mask, positions))


def beam_search(model, ids, n_beams, max_new_tokens, eos_id=None):
    """One call a beam; beams are dictionaries."""
    beams = [{"ids": ids, "sum": 0.0, "new": 0, "done": False}]
    with torch.no_grad():
        for _ in range(max_new_tokens):
            if all(beam["done"] for beam in beams):
                break
            candidates = []
            for beam in beams:
                if beam["done"]:
                    candidates.append(beam)
                    continue
                log_probs = torch.log_softmax(model(beam["ids"])[0, -1], dim=-1)
                for token, value in enumerate(log_probs.tolist()):
                    candidates.append(
                        {
                            "ids": torch.cat((beam["ids"], torch.tensor([[token]])), dim=1),
                            "sum": beam["sum"] + value,
                            "new": beam["new"] + 1,
                            "done": eos_id is not None and token == eos_id,
                        }
                    )
            candidates.sort(key=lambda beam: -beam["sum"])
            beams = candidates[:n_beams]
    return max(beams, key=lambda beam: beam["sum"] / (beam["new"] or 1))["ids"]


class WindowAttention(nn.Module):
    """Interleaves nothing: a token at a time, the cache a list of the last keys, unturned."""

    def __init__(self, d_model, n_q_heads, n_kv_heads, window):
        super().__init__()
        self.H, self.G, self.w, self.d = n_q_heads, n_kv_heads, window, d_model // n_q_heads
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, self.G * self.d, bias=False)
        self.wv = nn.Linear(d_model, self.G * self.d, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)

    def turn(self, x, start):
        half = self.d // 2
        freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(start, start + x.shape[1]).double(), freq)
        cos, sin = angle.cos()[None, :, None].to(x.dtype), angle.sin()[None, :, None].to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        k_new, v_new = self.wk(x).view(B, T, self.G, -1), self.wv(x).view(B, T, self.G, -1)
        keys, values = (k_new, v_new) if cache is None else cache
        if cache is not None:
            keys, values = torch.cat([keys, k_new], 1), torch.cat([values, v_new], 1)
        S = keys.shape[1]
        q = self.turn(self.wq(x).view(B, T, self.H, -1), S - T)  # positions restart with the cache
        k = self.turn(keys, 0).repeat_interleave(self.H // self.G, dim=2)
        v = values.repeat_interleave(self.H // self.G, dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d)
        age = torch.arange(S - T, S)[:, None] - torch.arange(S)[None]
        scores = scores.masked_fill((age < 0) | (age >= self.w), float("-inf"))
        y = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(B, T, -1)
        last = max(self.w - 1, 0)  # the next query brings its own key
        return self.wo(y), (keys[:, S - min(S, last) :], values[:, S - min(S, last) :])


def alibi(n_heads, T, S):
    bias = torch.zeros(n_heads, T, S)
    for h in range(n_heads):
        for t in range(T):
            for s in range(S):
                distance = s - (S - T + t)
                bias[h, t, s] = distance * 2 ** (-8 * (h + 1) / n_heads)
    return bias


def token_log_probs(logits, ids):
    log_probs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    return torch.take_along_dim(log_probs[:, :-1], ids[:, 1:].unsqueeze(-1), dim=-1).squeeze(-1)


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    logits = beta * (chosen - rejected) - beta * (ref_chosen - ref_rejected)
    return torch.logaddexp(torch.zeros_like(logits), -logits).sum() / len(logits)


def grpo_loss(log_probs, old_log_probs, ref_log_probs, rewards, mask, clip=0.2, beta=0.04):
    with torch.no_grad():
        mean = rewards.mean()
        std = ((rewards - mean) ** 2).sum().div(len(rewards) - 1).sqrt()
        A = (rewards - mean) / (std + 1e-4)
    losses = []
    for i in range(len(rewards)):
        lp = log_probs[i][mask[i]]
        ratio = (lp - old_log_probs[i][mask[i]].detach()).exp()
        low, high = ratio * A[i], ratio.clamp(1 - clip, 1 + clip) * A[i]
        diff = ref_log_probs[i][mask[i]].detach() - lp
        losses.append(-(torch.where(low < high, low, high) - beta * (diff.exp() - diff - 1)).mean())
    return sum(losses) / len(losses)


def gae(rewards, values, gamma, lam):
    T = len(rewards)
    out = []
    for t in range(T):
        total = 0.0
        for k in range(t, T):
            delta = rewards[k] + gamma * values[k + 1] - values[k]
            total = total + (gamma * lam) ** (k - t) * delta
        out.append(total)
    return torch.stack(out)
