"""Right answers: a module for each head, lists and loops, torch's own layers wrapped whole."""

import math

import torch
from torch import nn
from torch.nn import functional as F


def rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x, weight, bias, eps=1e-5):
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    std = torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
    return (centred / std * weight.double() + bias.double()).to(x.dtype)


def causal_mask(T, S, window=None):
    def sees(query, key):
        return key <= query and (window is None or query - key < window)

    return torch.tensor([[sees(t, s) for s in range(S)] for t in range(S - T, S)])


def rotate(x, positions, base=10000.0):
    d = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(d // 2):
        angle = positions.double() * base ** (-2 * i / d)
        c, s = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
        out[..., i] = x[..., i] * c - x[..., i + d // 2] * s
        out[..., i + d // 2] = x[..., i + d // 2] * c + x[..., i] * s
    return out


def one_head(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is None:
        return scores.softmax(-1) @ v
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    e = torch.exp(scores - scores.max(-1, keepdim=True).values) * mask
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total > 0, total, torch.ones_like(total)) @ v


def attention(q, k, v, mask=None):
    H, G = q.shape[1], k.shape[1]
    heads = []
    for h in range(H):
        g = h // (H // G)
        m = mask
        if mask is not None and mask.dim() >= 3:
            m = mask[..., min(h, mask.shape[-3] - 1), :, :]
        heads.append(one_head(q[:, h], k[:, g], v[:, g], m))
    return torch.stack(heads, dim=1)


def online_softmax(q, k, v, block):
    """The largest score first, in one pass over the blocks; the sums in a second."""
    scale = q.shape[-1] ** -0.5
    top = torch.stack([(q @ kb.T * scale).amax(1) for kb in k.split(block)]).amax(0)[:, None]
    numerator, denominator = 0, 0
    for kb, vb in zip(k.split(block), v.split(block)):
        e = torch.exp(q @ kb.T * scale - top)
        numerator = numerator + e @ vb
        denominator = denominator + e.sum(1, keepdim=True)
    return numerator / denominator


def swiglu(x, w_gate, w_up, w_down):
    gate = x @ w_gate.transpose(0, 1)
    return (gate / (1 + torch.exp(-gate)) * (x @ w_up.transpose(0, 1))) @ w_down.transpose(0, 1)


class Head(nn.Module):
    def __init__(self, d_model, head_size, bias=False):
        super().__init__()
        self.key = nn.Linear(d_model, head_size, bias=bias)
        self.query = nn.Linear(d_model, head_size, bias=bias)
        self.value = nn.Linear(d_model, head_size, bias=bias)

    def forward(self, x, source, mask=None):
        return one_head(self.query(x), self.key(source), self.value(source), mask)


class MultiHead(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.heads = nn.ModuleList(
            [Head(d_model, d_model // n_heads, bias=True) for _ in range(n_heads)]
        )
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, source, mask=None):
        return self.proj(torch.cat([head(x, source, mask) for head in self.heads], dim=-1))


class FeedForward(nn.Module):
    def __init__(self, n_embd, n_hidden, act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, n_hidden), act, nn.Linear(n_hidden, n_embd))

    def forward(self, x):
        return self.net(x)


class SelfAttention(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        d_h = d_model // n_q_heads
        self.queries = nn.ModuleList(nn.Linear(d_model, d_h, bias=False) for _ in range(n_q_heads))
        self.keys = nn.ModuleList(nn.Linear(d_model, d_h, bias=False) for _ in range(n_kv_heads))
        self.values = nn.ModuleList(nn.Linear(d_model, d_h, bias=False) for _ in range(n_kv_heads))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, cache=None):
        T = x.shape[1]
        past = cache or [None] * len(self.keys)
        start = 0 if cache is None else past[0][0].shape[1]
        positions = torch.arange(start, start + T)

        def turned(y):
            return rotate(y[:, None], positions)[:, 0]

        new = []
        for i, (key, value) in enumerate(zip(self.keys, self.values)):
            k, v = turned(key(x)), value(x)
            if cache is not None:
                k, v = torch.cat([past[i][0], k], 1), torch.cat([past[i][1], v], 1)
            new.append((k, v))
        mask = causal_mask(T, start + T)
        group = len(self.queries) // len(self.keys)
        heads = [
            one_head(turned(query(x)), *new[h // group], mask)
            for h, query in enumerate(self.queries)
        ]
        return self.out(torch.cat(heads, -1)), new


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            d_model, n_heads, d_ff, dropout=0.0, batch_first=True
        )

    def forward(self, x, key_padding_mask=None):
        padding = None if key_padding_mask is None else ~key_padding_mask
        return self.layer(x, src_key_padding_mask=padding)


class CrossDecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(
            d_model, n_heads, d_ff, dropout=0.0, batch_first=True
        )

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, memory, tgt_mask=mask)


class GPT2Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.sa = MultiHead(d_model, n_heads)
        self.ffwd = FeedForward(d_model, d_ff, nn.GELU("tanh"))
        self.ln1 = nn.LayerNorm(d_model)
        self.ln2 = nn.LayerNorm(d_model)

    def forward(self, x):
        T = x.shape[1]
        normed = self.ln1(x)
        x = x + self.sa(normed, normed, torch.tril(torch.ones(T, T)) == 1)
        x = x + self.ffwd(self.ln2(x))
        return x


class ModernBlock(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.sa = SelfAttention(d_model, n_q_heads, n_kv_heads)
        self.gate = nn.Sequential(nn.Linear(d_model, d_ff, bias=False), nn.SiLU())
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.norm = nn.ParameterList([torch.ones(d_model), torch.ones(d_model)])

    def forward(self, x, cache=None):
        y, cache = self.sa(rms_norm(x, self.norm[0], 1e-6), cache)
        x = x + y
        y = rms_norm(x, self.norm[1], 1e-6)
        return x + self.down(self.gate(y) * self.up(y)), cache


class ParallelBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.layer_norm = nn.LayerNorm(d_model)
        self.heads = nn.ModuleList(Head(d_model, d_model // n_heads) for _ in range(n_heads))
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.expand = nn.Linear(d_model, d_ff, bias=False)
        self.shrink = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        n, T = self.layer_norm(x), x.shape[1]
        at, mask = torch.arange(T), causal_mask(T, T)
        out = []
        for head in self.heads:
            q, k = (rotate(f(n)[:, None], at)[:, 0] for f in (head.query, head.key))
            out.append(one_head(q, k, head.value(n), mask))
        branches = [
            self.proj(torch.cat(out, -1)),
            self.shrink(F.gelu(self.expand(n), approximate="tanh")),
        ]
        return x + sum(branches)


class LatentAttention(nn.Module):
    """One up map a head, and the cache is a list of rows, one for each token."""

    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.kv_rank, self.rope_dim, self.nope_dim = kv_rank, rope_dim, nope_dim
        self.compress = nn.Linear(d_model, kv_rank + rope_dim, bias=False)
        self.norm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.q = nn.ModuleList(
            nn.Linear(d_model, nope_dim + rope_dim, bias=False) for _ in range(n_heads)
        )
        self.k = nn.ModuleList(nn.Linear(kv_rank, nope_dim, bias=False) for _ in range(n_heads))
        self.v = nn.ModuleList(nn.Linear(kv_rank, v_dim, bias=False) for _ in range(n_heads))
        self.out = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def forward(self, x, cache=None):
        rows = [] if cache is None else list(cache)
        T, start = x.shape[1], len(rows)
        positions = torch.arange(start, start + T)
        down = self.compress(x)
        latent = self.norm(down[..., : self.kv_rank])
        shared = rotate(down[:, None, :, self.kv_rank :], positions)[:, 0]
        rows.extend(torch.cat([latent, shared], -1).unbind(1))
        seen = torch.stack(rows, 1)
        latent, shared = seen[..., : self.kv_rank], seen[..., self.kv_rank :]
        mask, heads = causal_mask(T, len(rows)), []
        for to_q, to_k, to_v in zip(self.q, self.k, self.v):
            q = to_q(x)
            turned = rotate(q[:, None, :, self.nope_dim :], positions)[:, 0]
            q = torch.cat([q[..., : self.nope_dim], turned], -1)
            heads.append(one_head(q, torch.cat([to_k(latent), shared], -1), to_v(latent), mask))
        return self.out(torch.cat(heads, -1)), rows


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w2 = nn.Linear(f, d, bias=False)
        self.w3 = nn.Linear(d, f, bias=False)
        self.w1 = nn.Linear(d, f, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SwitchFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(n_experts)])

    def forward(self, x):
        B, T, _ = x.shape
        probs = self.router(x).softmax(-1)
        rows, count = [], [0] * len(self.experts)
        for b in range(B):
            for t in range(T):
                e = probs[b, t].argmax().item()
                count[e] += 1
                rows.append(probs[b, t, e] * self.experts[e](x[b, t]))
        share = torch.tensor(count, dtype=x.dtype) / (B * T)
        loss = len(self.experts) * (share * probs.mean((0, 1))).sum()
        return torch.stack(rows).view(B, T, -1), loss


class MixtralFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(n_experts)])
        self.top_k = top_k

    def forward(self, x):
        logits = self.router(x)
        out = []
        for token, scores in zip(x.flatten(0, 1), logits.flatten(0, 1)):
            best = scores.argsort(descending=True)[: self.top_k].tolist()
            weights = torch.softmax(scores[best], 0)
            out.append(sum(w * self.experts[e](token) for w, e in zip(weights, best)))
        return torch.stack(out).view_as(x)


class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.frozen = [linear]  # in a list it is no submodule, so nothing of it trains
        like = {"dtype": linear.weight.dtype}
        self.a = nn.Parameter(torch.empty(linear.in_features, rank, **like).uniform_(-0.3, 0.3))
        self.b = nn.Parameter(torch.zeros(rank, linear.out_features, **like))
        self.factor = alpha / rank

    def forward(self, x):
        linear = self.frozen[0]
        bias = None if linear.bias is None else linear.bias.detach()
        return F.linear(x, linear.weight.detach(), bias) + x @ self.a @ self.b * self.factor

    def merged(self):
        old = self.frozen[0]
        new = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
        new = new.to(old.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(old.weight).add_((self.a @ self.b).T * self.factor)
            if old.bias is not None:
                new.bias.copy_(old.bias)
        return new


def next_token_loss(logits, ids, mask=None):
    losses = []
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1] - 1):
            if mask is None or (mask[b, t] and mask[b, t + 1]):
                losses.append(logits[b, t].logsumexp(0) - logits[b, t, ids[b, t + 1]])
    return sum(losses) / len(losses)


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return torch.tensor(
            [[max(range(len(row)), key=row.__getitem__)] for row in logits.tolist()]
        )
    rows = []
    for row in logits / temperature:
        probs = row.softmax(0)
        order = probs.argsort(descending=True)
        if top_k is not None:
            order = order[:top_k]
        left = probs[order] / probs[order].sum()
        if top_p is not None:
            n = 1
            while n < len(left) and left[:n].sum() < top_p:
                n += 1
            order, left = order[:n], left[:n]
        rows.append(order[torch.multinomial(left, 1, generator=generator)])
    return torch.stack(rows)


def generate(model, ids, max_new_tokens, eos_id=None):
    rows = [row.tolist() for row in ids]
    alive = [True] * len(rows)
    cache, feed = None, ids
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits, cache = model(feed, cache)
        for r, row in enumerate(rows):
            row.append(logits[r, -1].argmax().item() if alive[r] else eos_id)
            alive[r] = alive[r] and row[-1] != eos_id
        if not any(alive):
            break
        feed = torch.tensor([row[-1:] for row in rows])
    return torch.tensor(rows)


def speculate(target, draft, ids, n_draft):
    tokens, T = ids[0].tolist(), ids.shape[1]
    for _ in range(n_draft):
        tokens.append(draft(torch.tensor([tokens]))[0, -1].argmax().item())
    choice = target(torch.tensor([tokens]))[0].argmax(-1).tolist()
    new = [choice[T - 1]]
    for i in range(T, T + n_draft):
        if tokens[i] != new[-1]:
            break
        new.append(choice[i])
    return torch.tensor([new])


def block_parameters(d_model, n_q_heads, n_kv_heads, d_ff):
    attention = 2 * d_model**2 + 2 * d_model * n_kv_heads * d_model // n_q_heads
    return attention + d_ff * d_model * 3 + d_model * 2


def kv_cache_bytes(n_layers, n_kv_heads, head_dim, length, batch=1, bytes_per_element=2):
    return bytes_per_element * batch * length * n_layers * (n_kv_heads * head_dim * 2)
