"""Right answers in rarer layouts: packed by head or group, flat experts, keys cached unturned."""

import math
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

State = namedtuple("State", "keys values")


def rope(x, positions):
    """x [B, T, n, d_h]."""
    d = x.size(-1)
    inverse = 10000.0 ** -(torch.arange(0, d, 2, device=x.device).double() / d)
    angle = (positions[:, None].double() * inverse)[None, :, None]
    c, s = angle.cos().to(x), angle.sin().to(x)
    x1, x2 = x.split(d // 2, dim=-1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)


class SelfAttention(nn.Module):
    """Falcon's packing, [G, H/G queries + key + value, d_h]; keys are turned when they are read."""

    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        self.G, self.per_group = n_kv_heads, n_q_heads // n_kv_heads
        self.d_h = d_model // n_q_heads
        self.query_key_value = nn.Linear(
            d_model, n_kv_heads * (self.per_group + 2) * self.d_h, bias=False
        )
        self.dense = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        packed = self.query_key_value(x).view(B, T, self.G, self.per_group + 2, self.d_h)
        q, k, v = packed[..., :-2, :], packed[..., -2, :], packed[..., -1, :]
        if cache is not None:
            k, v = torch.cat((cache.keys, k), 1), torch.cat((cache.values, v), 1)
        S = k.size(1)
        at = torch.arange(S)
        q = rope(q.reshape(B, T, -1, self.d_h), at[S - T :]).view(B, T, self.G, -1, self.d_h)
        scores = torch.einsum("btgrd,bsgd->bgrts", q, rope(k, at)) / math.sqrt(self.d_h)
        scores = scores.masked_fill(at[S - T :, None] < at, -1e9)
        out = torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).reshape(B, T, -1)
        return self.dense(out), State(k, v)


class Packed2017(nn.Module):
    """in_proj [3 d, d] as nn.MultiheadAttention keeps it, but by hand."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.in_proj_weight = nn.Parameter(torch.randn(3 * d, d) * 0.02)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d))
        self.out_proj = nn.Linear(d, d)

    def forward(self, x, memory=None, keep=None):
        wq, wk, wv = self.in_proj_weight.chunk(3)
        bq, bk, bv = self.in_proj_bias.chunk(3)
        source = x if memory is None else memory
        q = F.linear(x, wq, bq).unflatten(-1, (self.h, -1))
        k = F.linear(source, wk, bk).unflatten(-1, (self.h, -1))
        v = F.linear(source, wv, bv).unflatten(-1, (self.h, -1))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.size(-1) ** -0.5
        if keep is not None:
            scores = torch.where(keep, scores, torch.tensor(-1e9, dtype=scores.dtype))
        return self.out_proj(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))


class GammaBeta(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(features))
        self.beta = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.mha = Packed2017(d_model, n_heads)
        self.layernorm1, self.layernorm2 = GammaBeta(d_model), GammaBeta(d_model)
        self.dense1, self.dense2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, key_padding_mask=None):
        keep = None if key_padding_mask is None else key_padding_mask.view(len(x), 1, 1, -1)
        out1 = self.layernorm1(x + self.mha(x, keep=keep))
        return self.layernorm2(out1 + self.dense2(torch.relu(self.dense1(out1))))


class CrossDecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.mha1, self.mha2 = Packed2017(d_model, n_heads), Packed2017(d_model, n_heads)
        self.layernorm = nn.ModuleList([GammaBeta(d_model) for _ in range(3)])
        self.dense1, self.dense2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, memory):
        look_ahead = torch.ones(x.size(1), x.size(1)).tril().bool()
        x = self.layernorm[0](x + self.mha1(x, keep=look_ahead))
        x = self.layernorm[1](x + self.mha2(x, memory))
        return self.layernorm[2](x + self.dense2(torch.relu(self.dense1(x))))


class GPT2Block(nn.Module):
    """NeoX's packing, [H, 3, d_h]."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.h = n_heads
        self.input_layernorm = nn.LayerNorm(d_model)
        self.post_attention_layernorm = nn.LayerNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.dense = nn.Linear(d_model, d_model)
        self.dense_h_to_4h = nn.Linear(d_model, d_ff)
        self.dense_4h_to_h = nn.Linear(d_ff, d_model)

    def forward(self, x):
        B, T, _ = x.shape
        qkv = self.query_key_value(self.input_layernorm(x)).view(B, T, self.h, -1)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
        a = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(B, T, -1)
        )
        x = x + self.dense(a)
        inner = self.dense_h_to_4h(self.post_attention_layernorm(x))
        return x + self.dense_4h_to_h(F.gelu(inner, approximate="tanh"))


class ModernBlock(nn.Module):
    """Everything in one dictionary, and k and v in one tensor of the cache."""

    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.H, self.G, self.d_h = n_q_heads, n_kv_heads, d_model // n_q_heads
        self.p = nn.ParameterDict(
            {
                "attn_norm": torch.ones(d_model),
                "wq": torch.randn(d_model, n_q_heads * self.d_h) * 0.02,
                "wkv": torch.randn(d_model, 2 * n_kv_heads * self.d_h) * 0.02,
                "wo": torch.randn(n_q_heads * self.d_h, d_model) * 0.02,
                "ffn_norm": torch.ones(d_model),
                "w12": torch.randn(d_model, 2 * d_ff) * 0.02,
                "w3": torch.randn(d_ff, d_model) * 0.02,
            }
        )

    def forward(self, x, cache=None):
        p, (B, T, _) = self.p, x.shape
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * p["attn_norm"]
        start = 0 if cache is None else cache.shape[2]
        at = torch.arange(start, start + T)
        q = rope((h @ p["wq"]).view(B, T, self.H, self.d_h), at)
        k, v = (h @ p["wkv"]).view(B, T, 2, self.G, self.d_h).unbind(2)
        new = torch.stack((rope(k, at), v))
        cache = new if cache is None else torch.cat((cache, new), dim=2)
        k, v = cache.transpose(2, 3).repeat_interleave(self.H // self.G, dim=2)
        keep = torch.arange(start + T) <= at[:, None]
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=keep)
        x = x + a.transpose(1, 2).reshape(B, T, -1) @ p["wo"]
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * p["ffn_norm"]
        a, b = (h @ p["w12"]).chunk(2, -1)
        return x + (F.silu(a) * b) @ p["w3"], cache


class ParallelBlock(nn.Module):
    """One map in for q, k, v and the FFN, one LayerNorm."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.h = n_heads
        self.norm = nn.LayerNorm(d_model)
        self.fused = nn.Linear(d_model, 3 * d_model + d_ff, bias=False)
        self.attn_out = nn.Linear(d_model, d_model, bias=False)
        self.ff_out = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        B, T, d = x.shape
        q, k, v, up = self.fused(self.norm(x)).split([d, d, d, self.ff_out.in_features], dim=-1)
        q, k, v = (t.view(B, T, self.h, -1) for t in (q, k, v))
        at = torch.arange(T)
        q, k, v = (t.transpose(1, 2) for t in (rope(q, at), rope(k, at), v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, d)
        return x + self.attn_out(a) + self.ff_out(F.gelu(up, approximate="tanh"))


class LatentAttention(nn.Module):
    """The whole of DeepSeek's inference code in small: buffers of the module's own."""

    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.h, self.rank, self.rd, self.nd, self.vd = n_heads, kv_rank, rope_dim, nope_dim, v_dim
        self.wq = nn.Linear(d_model, n_heads * (nope_dim + rope_dim), bias=False)
        self.wkv_a = nn.Linear(d_model, kv_rank + rope_dim, bias=False)
        self.kv_norm = nn.Parameter(torch.ones(kv_rank))
        self.wkv_b = nn.Linear(kv_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        cache = (
            {"kv": x.new_empty(B, 0, self.rank), "pe": x.new_empty(B, 0, self.rd)}
            if cache is None
            else cache
        )
        start = cache["kv"].size(1)
        at = torch.arange(start, start + T)
        q_nope, q_pe = self.wq(x).view(B, T, self.h, -1).split([self.nd, self.rd], dim=-1)
        kv, k_pe = self.wkv_a(x).split([self.rank, self.rd], dim=-1)
        cache["kv"] = torch.cat((cache["kv"], kv), dim=1)  # normed when it is read
        cache["pe"] = torch.cat((cache["pe"], rope(k_pe.unsqueeze(2), at).squeeze(2)), dim=1)
        kv = F.rms_norm(cache["kv"], (self.rank,), self.kv_norm, 1e-6)
        wkv_b = self.wkv_b.weight.view(self.h, -1, self.rank)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.nd])
        scores = torch.einsum("bshc,btc->bsht", q_nope, kv)
        scores = scores + torch.einsum("bshr,btr->bsht", rope(q_pe, at), cache["pe"])
        scores = scores * (self.nd + self.rd) ** -0.5
        mask = torch.full((T, start + T), float("-inf")).triu_(start + 1)
        weights = (scores + mask.unsqueeze(1)).softmax(dim=-1)
        x = torch.einsum("bsht,btc->bshc", weights, kv)
        x = torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -self.vd :])
        return self.wo(x.flatten(2)), cache


class SwitchFFN(nn.Module):
    """All experts in three flat matrices [E d_ff, d]."""

    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.E, self.f = n_experts, d_ff
        self.router_w = nn.Parameter(torch.randn(n_experts, d_model) * 0.02)
        self.w1 = nn.Parameter(torch.randn(n_experts * d_ff, d_model) * 0.02)
        self.w2 = nn.Parameter(torch.randn(n_experts * d_ff, d_model) * 0.02)
        self.v1 = nn.Parameter(torch.randn(n_experts * d_ff, d_model) * 0.02)

    def forward(self, x):
        p = F.linear(x, self.router_w).softmax(-1)
        best, which = p.max(-1)
        one_hot = F.one_hot(which, self.E).to(p.dtype)
        h = (F.silu(x @ self.w1.T) * (x @ self.v1.T)).unflatten(-1, (self.E, self.f))
        y = (h * (one_hot * best.unsqueeze(-1)).unsqueeze(-1)).flatten(-2) @ self.w2
        density, proxy = one_hot.mean((0, 1)), p.mean((0, 1))
        return y, (density * proxy).mean() * self.E**2


class MixtralFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.k = top_k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        make = lambda a, b: nn.ParameterList([torch.randn(a, b) * 0.02 for _ in range(n_experts)])  # noqa: E731
        self.gate, self.up, self.down = (
            make(d_model, d_ff),
            make(d_model, d_ff),
            make(d_ff, d_model),
        )

    def forward(self, x):
        logits = self.router(x)
        top, index = logits.topk(self.k)
        weights = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
        y = 0
        for e, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down)):
            y = y + weights[..., e : e + 1] * ((F.silu(x @ gate) * (x @ up)) @ down)
        return y
