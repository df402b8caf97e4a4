"""Right answers in the style of public repositories, and mistakes in them by old and new text.

Each row: the exercise, what is replaced by what (all places), and words that the named mistake must
hold. They were written from what public code does, not from the judge's own texts.
"""

LLAMA = """
import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x) * self.weight


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(x, pos):
    d = x.shape[-1]
    inv = 1.0 / (10000.0 ** (torch.arange(0, d, 2, dtype=torch.float64) / d))
    emb = torch.outer(pos.double(), inv)
    emb = torch.cat((emb, emb), dim=-1)
    return x * emb.cos().to(x.dtype) + rotate_half(x) * emb.sin().to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        self.h, self.g, self.hd = n_q_heads, n_kv_heads, d_model // n_q_heads
        self.wq = nn.Linear(d_model, self.h * self.hd, bias=False)
        self.wk = nn.Linear(d_model, self.g * self.hd, bias=False)
        self.wv = nn.Linear(d_model, self.g * self.hd, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, cache=None):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, self.hd).transpose(1, 2)
        k = self.wk(x).view(b, t, self.g, self.hd).transpose(1, 2)
        v = self.wv(x).view(b, t, self.g, self.hd).transpose(1, 2)
        start = 0 if cache is None else cache[0].size(2)
        pos = torch.arange(start, start + t)
        q, k = apply_rotary(q, pos), apply_rotary(k, pos)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        kept = (k, v)
        k = k.repeat_interleave(self.h // self.g, dim=1)
        v = v.repeat_interleave(self.h // self.g, dim=1)
        att = q @ k.transpose(-2, -1) / math.sqrt(self.hd)
        hidden = torch.ones(t, start + t, dtype=torch.bool).triu(start + 1)
        att = att.masked_fill(hidden, float("-inf")).softmax(-1)
        out = (att @ v).transpose(1, 2).reshape(b, t, -1)
        return self.wo(out), kept


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ModernBlock(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.attention = SelfAttention(d_model, n_q_heads, n_kv_heads)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.attention_norm = RMSNorm(d_model)
        self.ffn_norm = RMSNorm(d_model)

    def forward(self, x, cache=None):
        h, cache = self.attention(self.attention_norm(x), cache)
        h = x + h
        return h + self.feed_forward(self.ffn_norm(h)), cache
"""

INTERLEAVED = (
    "    return x * emb.cos()",
    "    x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)\n    y = x * emb.cos()",
)
CAUSAL = 'att.masked_fill(hidden, float("-inf")).softmax(-1)'

BLOCK_MISTAKES = [
    # (replacements, words)
    ([('float("-inf")', "-30.0")], "-30"),
    ([('float("-inf")', "-100.0")], "-100"),
    ([(CAUSAL, "(att - 30.0 * hidden).softmax(-1)")], "-30"),
    (
        [
            (
                ".triu(start + 1)",
                ".triu(start + 1) | torch.ones(t, start + t, dtype=torch.bool).tril(start - 64)",
            )
        ],
        "64",
    ),
    ([("torch.arange(start, start + t)", "torch.arange(t)")], "positions restart"),
    ([("F.silu(self.w1(x))", "F.gelu(self.w1(x))")], "GELU"),
    ([("self.ffn_norm(h)", "self.ffn_norm(h - x)")], "normed output of attention"),
    ([("return h + self.feed", "return x + self.feed")], "lost from the stream"),
    (
        [
            (
                "        h, cache = self.attention(self.attention_norm(x), cache)\n        h = x + h\n        return h + self.feed_forward(self.ffn_norm(h)), cache",
                "        x = x + self.feed_forward(self.ffn_norm(x))\n        h, cache = self.attention(self.attention_norm(x), cache)\n        return x + h, cache",
            )
        ],
        "FFN comes first",
    ),
    (
        [
            (
                "self.wq = nn.Linear(d_model, self.h * self.hd, bias=False)",
                "self.wq = nn.Linear(d_model, self.h * self.hd)",
            )
        ],
        "attention.wq has a bias; none was asked",
    ),
    ([(", bias=False", "")], "have biases; none were asked"),
    ([("RMSNorm(d_model)", "nn.LayerNorm(d_model)")], "nn.LayerNorm"),
    (
        [
            ("self.g * self.hd, bias", "self.h * self.hd, bias"),
            ("t, self.g, self.hd", "t, self.h, self.hd"),
            ("dim=1)", "dim=1)[:, : self.h]"),
            ("self.h // self.g", "1"),
        ],
        "have H heads; G are asked",
    ),
    (
        [
            (
                "self.wo = nn",
                "self.qn, self.kn = RMSNorm(self.hd), RMSNorm(self.hd)\n        self.wo = nn",
            ),
            ("q, k = apply", "q, k = self.qn(q), self.kn(k)\n        q, k = apply"),
        ],
        "QK-norm",
    ),
    (
        [
            (
                "self.ffn_norm = RMSNorm(d_model)",
                "self.ffn_norm, self.p1, self.p2 = RMSNorm(d_model), RMSNorm(d_model), RMSNorm(d_model)",
            ),
            ("h = x + h", "h = x + self.p1(h)"),
            (
                "h + self.feed_forward(self.ffn_norm(h))",
                "h + self.p2(self.feed_forward(self.ffn_norm(h)))",
            ),
        ],
        "second norm",
    ),
    ([(CAUSAL, "att.softmax(-1)")], "it is not causal"),
    (
        [("self.weight = nn.Parameter(torch.ones(dim))", "self.weight = torch.ones(dim)")],
        "no nn.Parameter",
    ),
    ([("torch.ones(dim)", "torch.zeros(dim)")], "start at 0"),
    ([("x.pow(2).mean(-1, keepdim=True)", "x.var(-1, keepdim=True)")], "variance"),
    (
        [
            (
                "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
                "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)",
            )
        ],
        "standard deviation",
    ),
    ([("ffn_norm(h)), cache", "ffn_norm(h)), None")], "not returned"),
    # two at once
    (
        [
            INTERLEAVED,
            (" + rotate_half(x)", "\n    y = y + rotate_half(x)"),
            (
                "emb.sin().to(x.dtype)",
                "emb.sin().to(x.dtype)\n    return torch.stack(y.chunk(2, -1), -1).flatten(-2)",
            ),
            ("eps=1e-6", "eps=1e-5"),
        ],
        "interleaved",
    ),
    ([(CAUSAL, "att.softmax(-1)"), ("F.silu(self.w1(x))", "F.gelu(self.w1(x))")], "GELU"),
    (
        [("torch.arange(start, start + t)", "torch.arange(t)"), (" / math.sqrt(self.hd)", "")],
        "not scaled",
    ),
    ([("eps=1e-6", "eps=1e-5"), ("F.silu(self.w1(x))", "F.relu(self.w1(x))")], "ReLU"),
]

EXPERTS = """
import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(h, d) * 0.1)
        self.w2 = nn.Parameter(torch.randn(d, h) * 0.1)
        self.w3 = nn.Parameter(torch.randn(h, d) * 0.1)

    def forward(self, x):
        return (F.silu(x @ self.w1.t()) * (x @ self.w3.t())) @ self.w2.t()


class MixtralFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.k = top_k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(n_experts)])

    def forward(self, x):
        w, idx = self.router(x).softmax(-1).topk(self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + ((idx == i) * w).sum(-1, keepdim=True) * expert(x)
        return out


class SwitchFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.n = n_experts
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(n_experts)])

    def forward(self, x):
        p = self.router(x).softmax(-1)
        w, idx = p.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + ((idx == i) * w)[..., None] * expert(x)
        f = F.one_hot(idx, self.n).to(p).mean((0, 1))
        return out, self.n * (f * p.mean((0, 1))).sum()
"""
