"""Right answers: one c_attn, a dataclass or a tensor as cache, torch's layers where it has one."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


def rms_norm(x, weight, eps=1e-6):
    dtype = x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    return (x * weight * (x.square().mean(dim=-1, keepdim=True) + eps).pow(-0.5)).to(dtype)


def layer_norm(x, weight, bias, eps=1e-5):
    return torch.layer_norm(x, list(weight.shape), weight, bias, eps)


def causal_mask(T, S, window=None):
    mask = torch.zeros(T, S, dtype=torch.bool)
    for t in range(T):
        last = S - T + t
        first = 0 if window is None else max(0, last - window + 1)
        mask[t, first : last + 1] = True
    return mask


def rotate(x, positions, base=10000.0):
    B, n, T, d = x.shape
    pair = torch.arange(d // 2, device=x.device)
    freq = torch.exp(-math.log(base) * 2 * pair / d)
    theta = torch.outer(positions.to(freq), freq)
    cos = torch.cos(theta).type_as(x).view(1, 1, T, d // 2)
    sin = torch.sin(theta).type_as(x).view(1, 1, T, d // 2)
    a, b = x.reshape(B, n, T, 2, d // 2).unbind(dim=3)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=3).reshape(B, n, T, d)


def attention(q, k, v, mask=None):
    B, H, T, d = q.shape
    G, S = k.shape[1], k.shape[2]
    q = q.view(B, G, H // G, T, d)
    att = (q @ k.unsqueeze(2).transpose(-2, -1)) * (1.0 / math.sqrt(d))
    if mask is not None:
        mask = torch.broadcast_to(
            mask, (B, H if mask.dim() > 2 and mask.shape[-3] == H else 1, T, S)
        )
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.view(B, G, H // G, T, S)
        att = att.masked_fill(mask.logical_not(), float("-inf"))
        nothing = mask.any(dim=-1, keepdim=True).logical_not()
        att = att.masked_fill(nothing, 0.0)
    att = F.softmax(att, dim=-1)
    y = att @ v.unsqueeze(2)
    if mask is not None:
        y = torch.where(nothing, torch.zeros_like(y), y)
    return y.reshape(B, H, T, v.shape[-1])


def online_softmax(q, k, v, block):
    T, S = q.size(0), k.size(0)
    rows = []
    for t in range(T):
        best = torch.tensor(float("-inf"), dtype=q.dtype)
        total = torch.zeros((), dtype=q.dtype)
        mix = torch.zeros(v.size(1), dtype=q.dtype)
        for s in range(0, S, block):
            score = k[s : s + block] @ q[t] / math.sqrt(q.size(1))
            top = torch.maximum(best, score.max())
            w = torch.exp(score - top)
            rescale = torch.exp(best - top)
            total = total * rescale + w.sum()
            mix = mix * rescale + w @ v[s : s + block]
            best = top
        rows.append(mix / total)
    return torch.stack(rows)


def swiglu(x, w_gate, w_up, w_down):
    return (F.silu(x @ w_gate.t()) * (x @ w_up.t())) @ w_down.t()


@dataclass
class KV:
    k: torch.Tensor
    v: torch.Tensor


class SelfAttention(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        self.n_head, self.n_kv_head = n_q_heads, n_kv_heads
        self.d_head = d_model // n_q_heads
        self.c_q = nn.Linear(d_model, n_q_heads * self.d_head, bias=False)
        self.c_kv = nn.Linear(d_model, 2 * n_kv_heads * self.d_head, bias=False)
        self.c_proj = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, cache=None):
        B, T, C = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.d_head).transpose(1, 2)
        k, v = self.c_kv(x).split(self.n_kv_head * self.d_head, dim=2)
        k = k.view(B, T, self.n_kv_head, self.d_head).transpose(1, 2)
        v = v.view(B, T, self.n_kv_head, self.d_head).transpose(1, 2)
        start = cache.k.size(2) if cache is not None else 0
        pos = torch.arange(start, start + T, device=x.device)
        q, k = rotate(q, pos), rotate(k, pos)
        if cache is not None:
            k = torch.cat((cache.k, k), dim=2)
            v = torch.cat((cache.v, v), dim=2)
        y = attention(q, k, v, causal_mask(T, start + T))
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.dropout(self.c_proj(y)), KV(k, v)


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.ln1 = nn.LayerNorm(d_model)
        self.ln2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x, key_padding_mask=None):
        ignore = None if key_padding_mask is None else ~key_padding_mask
        a, _ = self.attn(x, x, x, key_padding_mask=ignore, need_weights=False)
        x = self.ln1(x + a)
        return self.ln2(x + self.mlp(x))


class CrossDecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.cross = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, memory):
        T = x.size(1)
        hidden = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
        x = self.norms[0](x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0])
        x = self.norms[1](x + self.cross(x, memory, memory, need_weights=False)[0])
        return self.norms[2](x + self.mlp(x))


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd
        bias = torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64)
        self.register_buffer("bias", bias)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class GPT2Block(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model)
        self.attn = CausalSelfAttention(d_model, n_heads)
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(d_model, d_ff),
                "c_proj": nn.Linear(d_ff, d_model),
                "act": nn.GELU(approximate="tanh"),
            }
        )

    def forward(self, x):
        m = self.mlp
        x = x + self.attn(self.ln_1(x))
        x = x + m["c_proj"](m["act"](m["c_fc"](self.ln_2(x))))
        return x


class ModernBlock(nn.Module):
    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.n_1 = nn.RMSNorm(d_model, eps=1e-6)
        self.attn = SelfAttention(d_model, n_q_heads, n_kv_heads)
        self.n_2 = nn.RMSNorm(d_model, eps=1e-6)
        self.w1 = nn.Linear(d_model, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)
        self.w3 = nn.Linear(d_model, d_ff, bias=False)

    def forward(self, x, cache=None):
        a, cache = self.attn(self.n_1(x), cache)
        x = x + a
        h = self.n_2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), cache


class ParallelBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.n_head = n_heads
        self.ln = nn.LayerNorm(d_model)
        self.c_attn = nn.Linear(d_model, 3 * d_model, bias=False)
        self.c_proj = nn.Linear(d_model, d_model, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, d_ff, bias=False),
            nn.GELU("tanh"),
            nn.Linear(d_ff, d_model, bias=False),
        )

    def forward(self, x):
        B, T, C = x.shape
        h = self.ln(x)
        qkv = self.c_attn(h).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        pos = torch.arange(T)
        y = F.scaled_dot_product_attention(rotate(q, pos), rotate(k, pos), v, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).reshape(B, T, C)) + self.mlp(h)


class LatentAttention(nn.Module):
    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.h, self.nope, self.rope, self.vd = n_heads, nope_dim, rope_dim, v_dim
        self.q_nope = nn.Linear(d_model, n_heads * nope_dim, bias=False)
        self.q_rope = nn.Linear(d_model, n_heads * rope_dim, bias=False)
        self.down = nn.Linear(d_model, kv_rank, bias=False)
        self.k_rope = nn.Linear(d_model, rope_dim, bias=False)
        self.norm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.up_k = nn.Linear(kv_rank, n_heads * nope_dim, bias=False)
        self.up_v = nn.Linear(kv_rank, n_heads * v_dim, bias=False)
        self.proj = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def heads(self, x, width):
        return x.view(x.size(0), x.size(1), self.h, width).transpose(1, 2)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        start = 0 if cache is None else cache.size(1)
        pos = torch.arange(start, start + T)
        c, k_r = self.norm(self.down(x)), rotate(self.k_rope(x).unsqueeze(1), pos).squeeze(1)
        row = torch.cat((c, k_r), dim=-1)
        cache = row if cache is None else torch.cat((cache, row), dim=1)
        c, k_r = cache[..., : c.size(-1)], cache[..., c.size(-1) :]
        q = torch.cat(
            (
                self.heads(self.q_nope(x), self.nope),
                rotate(self.heads(self.q_rope(x), self.rope), pos),
            ),
            dim=-1,
        )
        k = torch.cat(
            (self.heads(self.up_k(c), self.nope), k_r.unsqueeze(1).expand(B, self.h, -1, -1)),
            dim=-1,
        )
        y = attention(q, k, self.heads(self.up_v(c), self.vd), causal_mask(T, start + T))
        return self.proj(y.transpose(1, 2).flatten(2)), cache


class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w1 = nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)
        self.w3 = nn.Linear(d, f, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SwitchFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.experts = nn.ModuleList(Expert(d_model, d_ff) for _ in range(n_experts))
        self.router = nn.Linear(d_model, n_experts, bias=False)

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        prob = self.router(flat).softmax(dim=-1)
        weight, index = prob.max(dim=-1)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            mine = index == e
            if mine.any():
                out[mine] = weight[mine].unsqueeze(1) * expert(flat[mine])
        count = torch.bincount(index, minlength=len(self.experts))
        f = count / index.numel()
        return out.view_as(x), len(self.experts) * (f * prob.mean(0)).sum()


class MixtralFFN(nn.Module):
    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.experts = nn.ModuleList([Expert(d_model, d_ff) for _ in range(n_experts)])
        self.gate = nn.Linear(d_model, n_experts, bias=False)
        self.top_k = top_k

    def forward(self, x):
        score, chosen = self.gate(x).topk(self.top_k, dim=-1)
        score = score.softmax(dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, t, slot = (chosen == e).nonzero(as_tuple=True)
            y = y.index_put((b, t), score[b, t, slot, None] * expert(x[b, t]), accumulate=True)
        return y


class LoRALinear(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features).normal_(std=0.02))
        self.B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        self.alpha, self.rank = alpha, rank

    def delta(self):
        return (self.alpha / self.rank) * (self.B @ self.A)

    def forward(self, x):
        return F.linear(x, self.linear.weight + self.delta(), self.linear.bias)

    def merged(self):
        new = copy.deepcopy(self.linear)
        with torch.no_grad():
            new.weight += self.delta()
        return new


def next_token_loss(logits, ids, mask=None):
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    if mask is not None:
        loss = loss[mask[:, :-1] & mask[:, 1:]]
    return loss.mean()


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0.0:
        return torch.topk(logits, 1, dim=-1).indices
    probs = F.softmax(logits / temperature, dim=-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k is not None:
        kth = probs.topk(min(top_k, probs.size(-1)), dim=-1).values[:, -1:]
        keep = probs >= kth
    if top_p is not None:
        for b in range(probs.size(0)):
            left = probs[b] * keep[b]
            left = left / left.sum()
            total = 0.0
            for token in left.argsort(descending=True):
                if total >= top_p:
                    keep[b, token] = False
                total += left[token].item()
    return torch.multinomial(probs * keep, 1, generator=generator)


@torch.inference_mode()
def generate(model, ids, max_new_tokens, eos_id=None):
    cache, done = None, [False] * ids.size(0)
    x = ids
    for _ in range(max_new_tokens):
        logits, cache = model(x, cache)
        nxt = logits[:, -1, :].argmax(-1).tolist()
        nxt = [eos_id if d else n for n, d in zip(nxt, done)]
        done = [d or n == eos_id for n, d in zip(nxt, done)]
        x = torch.tensor(nxt).unsqueeze(1)
        ids = torch.cat((ids, x), dim=1)
        if all(done):
            break
    return ids


def speculate(target, draft, ids, n_draft):
    x = ids.clone()
    for _ in range(n_draft):
        x = torch.cat((x, draft(x)[:, -1, :].argmax(-1, keepdim=True)), dim=1)
    logits = target(x)
    out = []
    for i in range(n_draft + 1):
        at = ids.size(1) + i
        token = logits[0, at - 1].argmax().item()
        out.append(token)
        if i == n_draft or x[0, at].item() != token:
            break
    return torch.tensor([out])


def block_parameters(d_model, n_q_heads, n_kv_heads, d_ff):
    d_head = d_model // n_q_heads
    shapes = [
        (d_model,),
        (n_q_heads * d_head, d_model),
        (n_kv_heads * d_head, d_model),
        (n_kv_heads * d_head, d_model),
        (d_model, n_q_heads * d_head),
        (d_model,),
        (d_ff, d_model),
        (d_ff, d_model),
        (d_model, d_ff),
    ]
    return sum(math.prod(shape) for shape in shapes)


def kv_cache_bytes(n_layers, n_kv_heads, head_dim, length, batch=1, bytes_per_element=2):
    per_token = 2 * n_kv_heads * head_dim
    return n_layers * batch * length * per_token * bytes_per_element
