"""What one writes in an interview: each piece of a Transformer as short as it can be and right.

No argument checks, no options, no type hints: a shape comment stands wherever the shape changes.
Each piece equals its counterpart in transformer_block.py on the same weights; that file is what
one trusts, this one is what one writes. `python3 code/practice.py answer NAME` prints one with
all it needs, and `try` judges yours. float16 and bfloat16 work in every piece, rounded after each
step; where more is promised, or what would overflow is kept small, the piece says so.

B batch, T length of the stream, S keys, d d_model, H query heads, G KV heads, d_h head width,
E experts, N = B*T tokens, V vocabulary. Masks are bool, True = may attend.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

# =============================================================================================
# Level 1: functions
# =============================================================================================


def rms_norm(x, weight, eps=1e-6):
    """x [..., d] over its root mean square, times weight [d]; half precision runs in float32."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def layer_norm(x, weight, bias, eps=1e-5):
    """x [..., d] less its mean, over its standard deviation, times weight [d] plus bias [d]."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    centred = wide - wide.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight + bias).to(x.dtype)


def causal_mask(T, S, window=None):
    """bool [T, S], the last query beside the last key; a window counts the query's own key."""
    age = torch.arange(S - T, S)[:, None] - torch.arange(S)  # (T, S), from the query back
    return (age >= 0) & (age < (S if window is None else window))


def rotate(x, positions, base=10000.0):
    """RoPE, half-split: x [B, n, T, d_h] turned to positions [T]."""
    half = x.shape[-1] // 2
    turn = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)  # (d_h/2)
    angle = positions[:, None] * turn  # (T, d_h/2), never in half precision
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)  # (B, n, T, d_h)


def attention(q, k, v, mask=None):
    """q [B, H, T, d_h], k [B, G, S, d_h], v [B, G, S, d_v] give [B, H, T, d_v].

    In half precision q is scaled before the product, where q @ k alone could overflow.
    """
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))  # H heads
    scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, H, T, S)
    mask = q.new_ones((), dtype=torch.bool) if mask is None else mask
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights * mask @ v  # (B, H, T, d_v); a query without keys gets zeros


def online_softmax(q, k, v, block):
    """Attention of one head, q [T, d_h], k [S, d_h], v [S, d_v], without a [T, S] table.

    Half precision as in attention; the sums are kept in it too.
    """
    largest = q.new_full((len(q), 1), -torch.inf)  # (T, 1), of the scores so far
    total = q.new_zeros(len(q), 1)  # (T, 1), of exp(score - largest)
    out = q.new_zeros(len(q), v.shape[1])  # (T, d_v), the same sum with values
    for k_block, v_block in zip(k.split(block), v.split(block)):
        scores = (q * q.shape[1] ** -0.5) @ k_block.mT  # (T, block)
        new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        shrink = torch.exp(largest - new_largest)  # what was summed before, in the new unit
        weights = torch.exp(scores - new_largest)  # (T, block)
        total = total * shrink + weights.sum(dim=1, keepdim=True)
        out = out * shrink + weights @ v_block  # (T, d_v)
        largest = new_largest
    return out / total


def swiglu(x, w_gate, w_up, w_down):
    """x [..., d], w_gate and w_up [h, d], w_down [d, h] as in nn.Linear."""
    hidden = F.silu(x @ w_gate.T) * (x @ w_up.T)  # (..., h)
    return hidden @ w_down.T  # (..., d)


def block_parameters(d_model, n_q_heads, n_kv_heads, d_ff):
    """Weights of a ModernBlock, its two norms included."""
    kv_width = n_kv_heads * (d_model // n_q_heads)
    attn = 2 * d_model * d_model + 2 * d_model * kv_width  # q and o, k and v
    return attn + 3 * d_model * d_ff + 2 * d_model


def kv_cache_bytes(n_layers, n_kv_heads, head_dim, length, batch=1, bytes_per_element=2):
    """A key and a value for each KV head, token and layer."""
    return 2 * n_kv_heads * head_dim * n_layers * length * batch * bytes_per_element


# =============================================================================================
# Level 2: attention and blocks
# =============================================================================================


class SelfAttention(nn.Module):
    """Causal grouped-query attention with RoPE; the cache is (k, v), keys turned, G heads."""

    def __init__(self, d_model, n_q_heads, n_kv_heads):
        super().__init__()
        self.head_dim = d_model // n_q_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, cache=None):
        start, T = 0 if cache is None else cache[0].shape[2], x.shape[1]
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))  # (B, T, n*d_h) each
        q, k, v = (p.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in projected)
        positions = torch.arange(start, start + T, device=x.device)
        q, k = rotate(q, positions), rotate(k, positions)  # (B, H, T, d_h), (B, G, T, d_h)
        if cache is not None:  # S = start + T from here on
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        out = attention(q, k, v, causal_mask(T, start + T).to(x.device))  # (B, H, T, d_h)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)  # (B, T, d)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))  # (..., h) inside


class ModernBlock(nn.Module):
    """Llama's block: pre-RMSNorm, rotated grouped attention, SwiGLU, no biases."""

    def __init__(self, d_model, n_q_heads, n_kv_heads, d_ff):
        super().__init__()
        self.norm1 = nn.Parameter(torch.ones(d_model))
        self.attn = SelfAttention(d_model, n_q_heads, n_kv_heads)
        self.norm2 = nn.Parameter(torch.ones(d_model))
        self.ffn = SwiGLU(d_model, d_ff)

    def forward(self, x, cache=None):
        attended, cache = self.attn(rms_norm(x, self.norm1), cache)
        x = x + attended
        return x + self.ffn(rms_norm(x, self.norm2)), cache


class MultiHeadAttention(nn.Module):
    """Attention of 2017 with biases: queries from x [B, T, d], keys from source [B, S, d]."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x, source, mask=None):
        projected = (self.q_proj(x), self.k_proj(source), self.v_proj(source))
        q, k, v = (p.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for p in projected)
        out = attention(q, k, v, mask)  # (B, H, T, d_h)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, d)


class EncoderLayer(nn.Module):
    """2017's encoder layer: Post-LN, each norm on the sum of stream and branch."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.attn = MultiHeadAttention(d_model, n_heads)
        self.ln1 = nn.LayerNorm(d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.ln2 = nn.LayerNorm(d_model)

    def forward(self, x, key_padding_mask=None):
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None]
        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)
        return self.ln2(x + self.ffn(x))


class CrossDecoderLayer(nn.Module):
    """2017's decoder layer: causal self-attention, attention to memory, FFN, all Post-LN."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, n_heads)
        self.ln1 = nn.LayerNorm(d_model)
        self.cross_attn = MultiHeadAttention(d_model, n_heads)
        self.ln2 = nn.LayerNorm(d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.ln3 = nn.LayerNorm(d_model)

    def forward(self, x, memory):
        causal = causal_mask(x.shape[1], x.shape[1]).to(x.device)  # (T, T)
        x = self.ln1(x + self.self_attn(x, x, causal))
        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)
        return self.ln3(x + self.ffn(x))


class GPT2Block(nn.Module):
    """GPT-2: the norms stand inside the branches, nothing touches the stream but adding."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attn = MultiHeadAttention(d_model, n_heads)
        self.ln2 = nn.LayerNorm(d_model)
        gelu = nn.GELU(approximate="tanh")
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), gelu, nn.Linear(d_ff, d_model))

    def forward(self, x):
        causal = causal_mask(x.shape[1], x.shape[1]).to(x.device)  # (T, T)
        normed = self.ln1(x)
        x = x + self.attn(normed, normed, causal)
        return x + self.ffn(self.ln2(x))


class ParallelBlock(nn.Module):
    """GPT-J: attention and FFN read the same normed input, and the stream gets both."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attn = SelfAttention(d_model, n_heads, n_heads)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        ffn = self.down(F.gelu(self.up(normed), approximate="tanh"))
        return x + self.attn(normed)[0] + ffn


# =============================================================================================
# Level 3: latent attention, experts, adapters, the loop around the model
# =============================================================================================


class LatentAttention(nn.Module):
    """DeepSeek's MLA: what is cached is a latent [B, S, r] and one turned key [B, S, rope]."""

    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.n_heads, self.dims = n_heads, (nope_dim, rope_dim, v_dim)
        self.q_proj = nn.Linear(d_model, n_heads * (nope_dim + rope_dim), bias=False)
        self.latent_down = nn.Linear(d_model, kv_rank, bias=False)
        self.latent_norm = nn.Parameter(torch.ones(kv_rank))
        self.k_rope_proj = nn.Linear(d_model, rope_dim, bias=False)
        self.kv_up = nn.Linear(kv_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def forward(self, x, cache=None):
        nope_dim, rope_dim, v_dim = self.dims
        start, T = 0 if cache is None else cache[0].shape[1], x.shape[1]
        positions = torch.arange(start, start + T, device=x.device)
        q = self.q_proj(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2)  # (B, H, T, nope+rope)
        q_nope, q_rope = q.split((nope_dim, rope_dim), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, positions)), dim=-1)
        latent = rms_norm(self.latent_down(x), self.latent_norm)  # (B, T, r)
        k_rope = rotate(self.k_rope_proj(x)[:, None], positions)[:, 0]  # (B, T, rope)
        if cache is not None:  # S = start + T from here on
            latent = torch.cat((cache[0], latent), dim=1)  # (B, S, r)
            k_rope = torch.cat((cache[1], k_rope), dim=1)  # (B, S, rope)
        kv = self.kv_up(latent).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((nope_dim, v_dim), dim=-1)  # (B, H, S, nope), (B, H, S, v_dim)
        shared = k_rope[:, None].expand(-1, self.n_heads, -1, -1)  # one key for all heads
        k = torch.cat((k_nope, shared), dim=-1)  # (B, H, S, nope+rope)
        out = attention(q, k, v, causal_mask(T, start + T).to(x.device))  # (B, H, T, v_dim)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (latent, k_rope)


class SwitchFFN(nn.Module):
    """Each token goes to its likeliest expert; the probability stays on, so the router learns."""

    def __init__(self, d_model, d_ff, n_experts):
        super().__init__()
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(d_model, d_ff) for _ in range(n_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)  # (N, d)
        probs = self.router(tokens).softmax(dim=-1)  # (N, E)
        weight, chosen = probs.max(dim=-1)  # (N)
        out = torch.zeros_like(tokens)  # (N, d)
        for e, expert in enumerate(self.experts):
            rows = (chosen == e).nonzero()[:, 0]  # the tokens of this expert
            out = out.index_add(0, rows, weight[rows, None] * expert(tokens[rows]))
        share = F.one_hot(chosen, len(self.experts)).to(probs).mean(dim=0)  # (E), f
        balance_loss = len(self.experts) * (share * probs.mean(dim=0)).sum()
        return out.view_as(x), balance_loss


class MixtralFFN(nn.Module):
    """Each token goes to its top_k experts, weighted by their probabilities over their sum."""

    def __init__(self, d_model, d_ff, n_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(d_model, d_ff) for _ in range(n_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)  # (N, d)
        probs = self.router(tokens).softmax(dim=-1)  # (N, E)
        weights, chosen = probs.topk(self.top_k, dim=-1)  # (N, k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens)  # (N, d)
        for e, expert in enumerate(self.experts):
            rows, place = (chosen == e).nonzero(as_tuple=True)  # the tokens of this expert
            out = out.index_add(0, rows, weights[rows, place, None] * expert(tokens[rows]))
        return out.view_as(x)


class LoRALinear(nn.Module):
    """The frozen linear plus alpha / rank * B A; B starts at zero, so it starts as the linear."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        a = linear.weight.new_empty(rank, linear.in_features)  # (r, in), of its dtype and device
        self.a = nn.Parameter(a.normal_(std=rank**-0.5))
        self.b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))  # (out, r)
        self.scale = alpha / rank

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)

    def merged(self):
        linear = copy.deepcopy(self.linear)
        linear.weight.data += self.scale * (self.b @ self.a).detach()  # (out, in)
        return linear


def next_token_loss(logits, ids, mask=None):
    """logits [B, T, V] at t against ids [B, T] at t + 1, where both are real (mask [B, T]).

    0 without a pair; half precision runs in float32.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    losses = F.cross_entropy(wide[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)
    pairs = mask[:, :-1] & mask[:, 1:]
    return losses[pairs].sum() / pairs.sum().clamp(min=1)


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Token ids [B, 1] from logits [B, V]; top-k first, top-p over what is left.

    Half precision runs in float32.
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    ranked, tokens = wide.sort(dim=-1, descending=True)  # (B, V)
    ranked = ranked - ranked[:, :1]  # the best is 0, which no temperature can make infinite
    if top_k is not None:
        ranked[:, top_k:] = -torch.inf
    temperature = max(temperature, torch.finfo(torch.float32).tiny)  # 1 / it stays finite
    probs = (ranked / temperature).softmax(dim=-1)
    if top_p is not None and top_p < 1:  # a rounded sum may reach 1 before the last token
        before = probs.cumsum(dim=-1) - probs  # what the likelier tokens reach together
        probs = probs.masked_fill(before >= top_p, 0)
    return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))


@torch.no_grad()
def generate(model, ids, max_new_tokens, eos_id=None):
    """ids [B, T] and what follows greedily; model(ids, cache) returns (logits, cache)."""
    step, cache = ids, None
    done = torch.zeros_like(ids[:, :1], dtype=torch.bool)  # (B, 1)
    for _ in range(max_new_tokens):
        logits, cache = model(step, cache)  # the prompt once, then one token a step
        step = logits[:, -1].argmax(dim=-1, keepdim=True)  # (B, 1)
        if eos_id is not None:
            step = step.masked_fill(done, eos_id)
            done = done | (step == eos_id)
        ids = torch.cat((ids, step), dim=1)
        if done.all():
            break
    return ids


@torch.no_grad()
def speculate(target, draft, ids, n_draft):
    """The ids [1, accepted + 1] that one call of target confirms of n_draft drafted ones."""
    T, drafted = ids.shape[1], ids
    for _ in range(n_draft):
        drafted = torch.cat((drafted, draft(drafted)[:, -1:].argmax(dim=-1)), dim=1)
    greedy = target(drafted)[:, T - 1 :].argmax(dim=-1)  # (1, n_draft+1), the target's own choice
    agrees = drafted[:, T:] == greedy[:, :-1]  # (1, n_draft)
    accepted = agrees.long().cumprod(dim=1).sum()  # up to the first disagreement
    return greedy[:, : accepted + 1]  # the last one costs nothing: target has computed it
