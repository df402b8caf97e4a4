"""Right answers: raw parameters and einsum, -1e9 for a masked score, repeat_interleave."""

import math

import torch
from torch import einsum, nn
from torch.nn import Parameter


def rms_norm(x, weight, eps=1e-6):
    y = x.double() if x.dtype == torch.float64 else x.float()
    y = y / torch.sqrt((y * y).sum(-1, keepdim=True) / y.shape[-1] + eps)
    return (y * weight).to(x.dtype)


def layer_norm(x, weight, bias, eps=1e-5):
    y = x if x.dtype == torch.float64 else x.float()
    mean = y.mean(-1, keepdim=True)
    var = ((y - mean) ** 2).mean(-1, keepdim=True)
    return ((y - mean) / (var + eps) ** 0.5 * weight + bias).to(x.dtype)


def causal_mask(T, S, window=None):
    i = torch.arange(T).unsqueeze(1) + (S - T)
    j = torch.arange(S).unsqueeze(0)
    ok = j <= i
    return ok if window is None else ok & (i - j < window)


def rotate(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = einsum("t,f->tf", positions.double(), theta)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def attention(q, k, v, mask=None):
    rep = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(rep, dim=1)
    v = v.repeat_interleave(rep, dim=1)
    scores = einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
    if mask is None:
        return einsum("bhts,bhse->bhte", scores.softmax(-1), v)
    weights = scores.masked_fill(~mask, -1e9).softmax(-1) * mask
    return einsum("bhts,bhse->bhte", weights, v)


def online_softmax(q, k, v, block):
    q = q * q.shape[-1] ** -0.5
    m = q.new_full((len(q),), -1e30)
    z = q.new_zeros(len(q))
    o = q.new_zeros(len(q), v.shape[1])
    for kb, vb in zip(k.split(block), v.split(block)):
        s = einsum("td,sd->ts", q, kb)
        m_new = torch.maximum(m, s.max(dim=1).values)
        shrink = (m - m_new).exp()
        e = (s - m_new[:, None]).exp()
        z = z * shrink + e.sum(1)
        o = o * shrink[:, None] + einsum("ts,sd->td", e, vb)
        m = m_new
    return o / z[:, None]


def silu(x):
    return x * torch.sigmoid(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(x, w_gate, w_up, w_down):
    gate = einsum("...d,fd->...f", x, w_gate)
    up = einsum("...d,fd->...f", x, w_up)
    return einsum("...f,df->...d", silu(gate) * up, w_down)


def weight(*shape):
    return Parameter(torch.randn(*shape) * 0.02)


class SelfAttention(nn.Module):
    """W_q [H, d, d_h], W_k and W_v [G, d, d_h], W_o [H, d_h, d]."""

    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        d_h = d_model // n_q_heads
        self.W_o = weight(n_q_heads, d_h, d_model)
        self.W_v = weight(n_kv_heads, d_model, d_h)
        self.W_k = weight(n_kv_heads, d_model, d_h)
        self.W_q = weight(n_q_heads, d_model, d_h)

    def forward(self, x, cache=None):
        cache = {"k": None, "v": None, "n": 0} if cache is None else cache
        n, T = cache["n"], x.shape[1]
        pos = torch.arange(n, n + T)
        q = rotate(einsum("btd,hde->bhte", x, self.W_q), pos)
        k = rotate(einsum("btd,gde->bgte", x, self.W_k), pos)
        v = einsum("btd,gde->bgte", x, self.W_v)
        if n:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"], cache["n"] = k, v, n + T
        z = attention(q, k, v, causal_mask(T, n + T))
        return einsum("bhte,hed->btd", z, self.W_o), cache


class BiasedAttention(nn.Module):
    """x @ W + b, with W [d, d]."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.Wq, self.bq = weight(d, d), Parameter(torch.zeros(d))
        self.Wk, self.bk = weight(d, d), Parameter(torch.zeros(d))
        self.Wv, self.bv = weight(d, d), Parameter(torch.zeros(d))
        self.Wo, self.bo = weight(d, d), Parameter(torch.zeros(d))

    def split(self, x):
        b, t, d = x.shape
        return x.reshape(b, t, self.h, d // self.h).permute(0, 2, 1, 3)

    def forward(self, x, y, mask=None):
        q = self.split(x @ self.Wq + self.bq)
        k = self.split(y @ self.Wk + self.bk)
        v = self.split(y @ self.Wv + self.bv)
        z = attention(q, k, v, mask).permute(0, 2, 1, 3)
        return z.reshape(x.shape) @ self.Wo + self.bo


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.b, self.g = Parameter(torch.zeros(d)), Parameter(torch.ones(d))

    def forward(self, x):
        return layer_norm(x, self.g, self.b)


class MLP(nn.Module):
    def __init__(self, d, f, act, bias=True):
        super().__init__()
        self.act = act
        self.W1, self.W2 = weight(d, f), weight(f, d)
        self.b1 = Parameter(torch.zeros(f)) if bias else 0
        self.b2 = Parameter(torch.zeros(d)) if bias else 0

    def forward(self, x):
        return self.act(x @ self.W1 + self.b1) @ self.W2 + self.b2


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.mlp = MLP(d_model, d_ff, torch.relu)
        self.attn = BiasedAttention(d_model, n_heads)
        self.after_mlp = Norm(d_model)
        self.after_attn = Norm(d_model)

    def forward(self, x, key_padding_mask=None):
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask.reshape(x.shape[0], 1, 1, x.shape[1])
        x = self.after_attn(x + self.attn(x, x, mask))
        return self.after_mlp(x + self.mlp(x))


class CrossDecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.mlp = MLP(d_model, d_ff, torch.relu)
        self.cross = BiasedAttention(d_model, n_heads)
        self.self_attn = BiasedAttention(d_model, n_heads)
        self.n1, self.n2, self.n3 = Norm(d_model), Norm(d_model), Norm(d_model)

    def forward(self, x, memory):
        x = self.n1(x + self.self_attn(x, x, causal_mask(x.shape[1], x.shape[1])))
        x = self.n2(x + self.cross(x, memory))
        return self.n3(x + self.mlp(x))


class GPT2Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn = BiasedAttention(d_model, n_heads)
        self.mlp = MLP(d_model, d_ff, gelu_tanh)
        self.pre_attn, self.pre_mlp = Norm(d_model), Norm(d_model)

    def forward(self, x):
        h = self.pre_attn(x)
        x = x + self.attn(h, h, causal_mask(x.shape[1], x.shape[1]))
        return x + self.mlp(self.pre_mlp(x))


class ModernBlock(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.g_attn = Parameter(torch.ones(d_model))
        self.g_ffn = Parameter(torch.ones(d_model))
        self.W_down = weight(d_ff, d_model)
        self.W_up, self.W_gate = weight(d_model, d_ff), weight(d_model, d_ff)
        self.attn = SelfAttention(d_model, n_q_heads, n_kv_heads)

    def forward(self, x, cache=None):
        a, cache = self.attn(rms_norm(x, self.g_attn), cache)
        x = x + a
        h = rms_norm(x, self.g_ffn)
        return x + (silu(h @ self.W_gate) * (h @ self.W_up)) @ self.W_down, cache


class ParallelBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.mlp = MLP(d_model, d_ff, gelu_tanh, bias=False)
        self.attn = SelfAttention(d_model, n_heads, n_heads)
        self.norm = Norm(d_model)

    def forward(self, x):
        h = self.norm(x)
        return x + self.mlp(h) + self.attn(h)[0]


class LatentAttention(nn.Module):
    """All maps apart, and absorbed: no key or value of a head is ever made."""

    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.W_dkv = weight(d_model, kv_rank)
        self.W_kr = weight(d_model, rope_dim)
        self.W_qc = weight(n_heads, d_model, nope_dim)
        self.W_qr = weight(n_heads, d_model, rope_dim)
        self.W_uk = weight(n_heads, kv_rank, nope_dim)
        self.W_uv = weight(n_heads, kv_rank, v_dim)
        self.W_o = weight(n_heads, v_dim, d_model)
        self.g = Parameter(torch.ones(kv_rank))
        self.scale = 1 / math.sqrt(rope_dim + nope_dim)

    def forward(self, x, cache=None):
        n, T = 0 if cache is None else cache[0].shape[1], x.shape[1]
        pos = torch.arange(n, n + T)
        c = rms_norm(x @ self.W_dkv, self.g)
        r = rotate((x @ self.W_kr)[:, None], pos)[:, 0]
        if cache is not None:
            c, r = torch.cat((cache[0], c), 1), torch.cat((cache[1], r), 1)
        q_c = einsum("btd,hdn,hcn->bhtc", x, self.W_qc, self.W_uk)
        q_r = rotate(einsum("btd,hdr->bhtr", x, self.W_qr), pos)
        s = einsum("bhtc,bsc->bhts", q_c, c) + einsum("bhtr,bsr->bhts", q_r, r)
        p = (s * self.scale).masked_fill(~causal_mask(T, n + T), -1e9).softmax(-1)
        z = einsum("bhts,bsc->bhtc", p, c)
        return einsum("bhtc,hcv,hvd->btd", z, self.W_uv, self.W_o), (c, r)


class Experts(nn.Module):
    """Every expert computes every token; what is not chosen has weight 0."""

    def __init__(self, d, f, n):
        super().__init__()
        self.w_down = weight(n, f, d)
        self.w_up = weight(n, d, f)
        self.w_gate = weight(n, d, f)

    def forward(self, x, share):
        h = silu(einsum("btd,edf->btef", x, self.w_gate)) * einsum("btd,edf->btef", x, self.w_up)
        return einsum("bte,btef,efd->btd", share, h, self.w_down)


class SwitchFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.router = weight(d_model, n_experts)
        self.experts = Experts(d_model, d_ff, n_experts)

    def forward(self, x):
        p = (x @ self.router).softmax(-1)
        chosen = (p == p.max(-1, keepdim=True).values).to(p.dtype)
        f, P = chosen.mean((0, 1)), p.mean((0, 1))
        return self.experts(x, p * chosen), len(f) * torch.dot(f, P)


class MixtralFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.k = top_k
        self.router = weight(d_model, n_experts)
        self.experts = Experts(d_model, d_ff, n_experts)

    def forward(self, x):
        logits = x @ self.router
        kth = logits.topk(self.k, dim=-1).values[..., -1:]
        return self.experts(x, logits.masked_fill(logits < kth, -1e9).softmax(-1))


class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        d_out, d_in = linear.weight.shape
        self.register_buffer("W", linear.weight.detach().clone())
        self.register_buffer("b", None if linear.bias is None else linear.bias.detach().clone())
        self.down = Parameter(torch.randn(d_in, rank, dtype=self.W.dtype) / rank)
        self.up = Parameter(torch.zeros(rank, d_out, dtype=self.W.dtype))
        self.s = alpha / rank

    def forward(self, x):
        y = x @ self.W.T + self.s * (x @ self.down @ self.up)
        return y if self.b is None else y + self.b

    def merged(self):
        new = nn.Linear(self.W.shape[1], self.W.shape[0], self.b is not None, dtype=self.W.dtype)
        new.weight.data = self.W + self.s * (self.down @ self.up).detach().T
        if self.b is not None:
            new.bias.data = self.b.clone()
        return new


def next_token_loss(logits, ids, mask=None):
    logp = logits[:, :-1].log_softmax(-1)
    nll = -logp.gather(-1, ids[:, 1:, None])[..., 0]
    if mask is None:
        return nll.mean()
    w = (mask[:, :-1] & mask[:, 1:]).to(nll.dtype)
    return (nll * w).sum() / w.sum()


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(1)[:, None]
    p, order = (logits / temperature).softmax(1).sort(1, descending=True)
    if top_k is not None:
        p = torch.cat([p[:, :top_k], torch.zeros_like(p[:, top_k:])], 1)
        p = p / p.sum(1, keepdim=True)
    if top_p is not None:
        before = p.cumsum(1) - p
        p = p * (before < top_p)
        p = p / p.sum(1, keepdim=True)
    cdf = p.cumsum(1)
    u = torch.rand(len(p), 1, generator=generator, dtype=p.dtype) * cdf[:, -1:]
    return order.gather(1, (cdf <= u).sum(1, keepdim=True).clamp(max=p.shape[1] - 1))


def generate(model, ids, max_new_tokens, eos_id=None):
    new, cache, feed = [], None, ids
    over = torch.zeros(len(ids), dtype=torch.bool)
    while len(new) < max_new_tokens and not over.all():
        logits, cache = model(feed, cache)
        token = logits[:, -1].max(-1).indices
        if eos_id is not None:
            token = torch.where(over, torch.full_like(token, eos_id), token)
            over = over | (token == eos_id)
        new.append(token)
        feed = token[:, None]
    return torch.cat([ids, torch.stack(new, 1)], 1) if new else ids.clone()


def speculate(target, draft, ids, n_draft):
    guess = ids
    for _ in range(n_draft):
        guess = torch.cat([guess, draft(guess)[:, -1:].argmax(-1)], 1)
    best = target(guess).argmax(-1)[0]
    T = ids.shape[1]
    n = 0
    while n < n_draft and guess[0, T + n] == best[T - 1 + n]:
        n += 1
    return best[T - 1 : T + n][None]


def block_parameters(d_model, n_q_heads, n_kv_heads, d_ff):
    q = o = d_model * d_model
    k = v = d_model * d_model * n_kv_heads // n_q_heads
    gate = up = down = d_model * d_ff
    norms = 2 * d_model
    return q + k + v + o + gate + up + down + norms


def kv_cache_bytes(n_layers, n_kv_heads, head_dim, length, batch=1, bytes_per_element=2):
    keys = batch * n_layers * n_kv_heads * length * head_dim
    return (keys + keys) * bytes_per_element
