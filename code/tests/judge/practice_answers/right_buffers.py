"""Right answers: buffers taken beforehand, rotation by complex numbers, experts in one stack."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_LEN = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rms = torch.sqrt(norm**2 / x.size(-1) + eps)
    return ((wide / rms) * weight.to(wide.dtype)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    var, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
    normed = (wide - mean) * torch.rsqrt(var + eps)
    return torch.addcmul(bias.to(wide), normed, weight.to(wide)).to(x.dtype)


def causal_mask(T: int, S: int, window: int | None = None) -> Tensor:
    query = torch.arange(S - T, S)[:, None]
    key = torch.arange(S)[None, :]
    distance = query - key
    far = S if window is None else window
    return (distance >= 0).logical_and(distance < far)


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    half = x.shape[-1] // 2
    freqs = 1.0 / base ** (torch.arange(0, half) / half)
    cis = torch.polar(torch.ones(len(positions), half), torch.outer(positions.float(), freqs))
    cis = cis.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    wide = x if x.dtype == torch.float64 else x.float()
    z = torch.complex(wide[..., :half], wide[..., half:]) * cis
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    groups = q.size(1) // k.size(1)
    k = k[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
    v = v[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
    scores = torch.matmul(q, k.transpose(2, 3)) / q.size(-1) ** 0.5
    if mask is None:
        return torch.matmul(scores.softmax(dim=-1), v)
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    weights = torch.softmax(scores + bias, dim=-1)
    return torch.matmul(weights, v) * mask.any(dim=-1, keepdim=True)


def online_softmax(q: Tensor, k: Tensor, v: Tensor, block: int) -> Tensor:
    """Pieces with their log-sum-exp, merged two by two."""
    out, lse = None, None
    n_blocks = math.ceil(k.size(0) / block)
    for i in range(n_blocks):
        rows = slice(i * block, (i + 1) * block)
        scores = q @ k[rows].mT / math.sqrt(q.size(-1))
        piece_lse = scores.logsumexp(dim=-1, keepdim=True)
        piece = scores.softmax(dim=-1) @ v[rows]
        if out is None:
            out, lse = piece, piece_lse
            continue
        total = torch.logaddexp(lse, piece_lse)
        out = out * (lse - total).exp() + piece * (piece_lse - total).exp()
        lse = total
    return out


def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    g, u = (x @ torch.cat((w_gate, w_up)).mT).tensor_split(2, dim=-1)
    return g.mul(g.sigmoid()).mul(u) @ w_down.mT


class KVCache:
    """Two buffers for MAX_LEN tokens, written in place."""

    def __init__(self, batch, heads, head_dim, like):
        self.k = torch.zeros(batch, heads, MAX_LEN, head_dim, dtype=like.dtype)
        self.v = torch.zeros(batch, heads, MAX_LEN, head_dim, dtype=like.dtype)
        self.length = 0

    def update(self, k, v):
        end = self.length + k.size(2)
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class SelfAttention(nn.Module):
    def __init__(self, d_model: int, n_q_heads: int, n_kv_heads: int):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_q_heads, n_kv_heads
        self.head_dim = d_model // n_q_heads
        self.wo = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.wq = nn.Linear(d_model, n_q_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)

    def forward(self, x: Tensor, cache: KVCache | None = None):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim).transpose(1, 2)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim).transpose(1, 2)
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + seqlen)
        xq, xk = rotate(xq, positions), rotate(xk, positions)
        if cache is None:
            cache = KVCache(bsz, self.n_kv_heads, self.head_dim, x)
        keys, values = cache.update(xk, xv)
        mask = causal_mask(seqlen, start + seqlen)
        out = attention(xq, keys.clone(), values.clone(), mask)
        return self.wo(out.transpose(1, 2).reshape(bsz, seqlen, -1)), cache


class Attention2017(nn.Module):
    """k|v in one map, so that a source of its own is one product."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_kv = nn.Linear(d, 2 * d)
        self.to_q = nn.Linear(d, d)
        self.to_out = nn.Sequential(nn.Linear(d, d), nn.Dropout(0.0))

    def forward(self, x, context=None, mask=None):
        k, v = self.to_kv(x if context is None else context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(2, (self.heads, -1)).movedim(2, 1) for t in (self.to_q(x), k, v))
        out = attention(q, k, v, mask)
        return self.to_out(out.movedim(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        self.fc2 = nn.Linear(d_ff, d_model)
        self.fc1 = nn.Linear(d_model, d_ff)
        self.norm_ff = nn.LayerNorm(d_model)
        self.norm_attn = nn.LayerNorm(d_model)
        self.attn = Attention2017(d_model, n_heads)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None]
        x = self.norm_attn(x.add(self.attn(x, mask=mask)))
        return self.norm_ff(x.add(self.fc2(self.fc1(x).clamp(min=0))))


class CrossDecoderLayer(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        self.read = Attention2017(d_model, n_heads)
        self.look_back = Attention2017(d_model, n_heads)
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm_ff = nn.LayerNorm(d_model)
        self.norm_read = nn.LayerNorm(d_model)
        self.norm_look = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.norm_look(x + self.look_back(x, mask=causal_mask(x.size(1), x.size(1))))
        x = self.norm_read(x + self.read(x, memory))
        return self.norm_ff(x + self.ff(x))


class GPT2Block(nn.Module):
    """GPT-2's own layout: weights [in, out], as its Conv1D keeps them."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        self.n_heads = n_heads
        self.attn_w = nn.Parameter(torch.empty(d_model, 3 * d_model).normal_(std=0.02))
        self.attn_b = nn.Parameter(torch.zeros(3 * d_model))
        self.proj_w = nn.Parameter(torch.empty(d_model, d_model).normal_(std=0.02))
        self.proj_b = nn.Parameter(torch.zeros(d_model))
        self.fc_w = nn.Parameter(torch.empty(d_model, d_ff).normal_(std=0.02))
        self.fc_b = nn.Parameter(torch.zeros(d_ff))
        self.out_w = nn.Parameter(torch.empty(d_ff, d_model).normal_(std=0.02))
        self.out_b = nn.Parameter(torch.zeros(d_model))
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        T = x.size(1)
        qkv = torch.addmm(self.attn_b, self.ln_1(x).flatten(0, 1), self.attn_w)
        q, k, v = qkv.view(*x.shape[:2], 3, self.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = attention(q, k, v, causal_mask(T, T)).transpose(1, 2).flatten(2)
        x = x + y @ self.proj_w + self.proj_b
        h = F.gelu(self.ln_2(x) @ self.fc_w + self.fc_b, approximate="tanh")
        return x + h @ self.out_w + self.out_b


class ModernBlock(nn.Module):
    def __init__(self, d_model: int, n_q_heads: int, n_kv_heads: int, d_ff: int):
        super().__init__()
        self.ffn_norm_weight = nn.Parameter(torch.ones(d_model))
        self.attention_norm_weight = nn.Parameter(torch.ones(d_model))
        self.w13 = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, d_model, bias=False)
        self.attention = SelfAttention(d_model, n_q_heads, n_kv_heads)

    def forward(self, x: Tensor, cache: KVCache | None = None):
        h, cache = self.attention(rms_norm(x, self.attention_norm_weight), cache)
        h = x + h
        gate, up = self.w13(rms_norm(h, self.ffn_norm_weight)).chunk(2, -1)
        return h + self.w2(F.silu(gate) * up), cache


class ParallelBlock(nn.Module):
    """k|v in one map, q in another, joined before the heads are split."""

    def __init__(self, d_model: int, n_heads: int, d_ff: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(d_model)
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wkv = nn.Linear(d_model, 2 * d_model, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        h = self.norm(x)
        q, k, v = torch.cat((self.wq(h), self.wkv(h)), -1).view(B, T, 3, self.n_heads, -1).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        at = torch.arange(T)
        y = attention(rotate(q, at), rotate(k, at), v, causal_mask(T, T))
        ffn = self.down(F.gelu(self.up(h), approximate="tanh"))
        return self.wo(y.transpose(1, 2).reshape(B, T, d)) + ffn + x


class LatentAttention(nn.Module):
    """kv_up holds all keys, then all values; the buffer holds [latent | rotated key]."""

    def __init__(self, d_model, n_heads, kv_rank, rope_dim, nope_dim, v_dim):
        super().__init__()
        self.H, self.rank, self.rope, self.nope, self.vd = (
            n_heads,
            kv_rank,
            rope_dim,
            nope_dim,
            v_dim,
        )
        self.wq = nn.Linear(d_model, n_heads * (nope_dim + rope_dim), bias=False)
        self.w_down = nn.Linear(d_model, kv_rank + rope_dim, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(kv_rank))
        self.w_up = nn.Linear(kv_rank, n_heads * nope_dim + n_heads * v_dim, bias=False)
        self.wo = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def forward(self, x: Tensor, cache=None):
        B, T, _ = x.shape
        if cache is None:
            cache = [torch.zeros(B, MAX_LEN, self.rank + self.rope, dtype=x.dtype), 0]
        buffer, start = cache
        end = start + T
        at = torch.arange(start, end)
        latent, k_rope = torch.tensor_split(self.w_down(x), [self.rank], dim=-1)
        k_rope = rotate(k_rope[:, None], at)[:, 0]
        buffer = buffer.clone()
        buffer[:, start:end] = torch.cat((rms_norm(latent, self.norm_weight), k_rope), -1)
        cache = [buffer, end]
        latent, k_rope = buffer[:, :end, : self.rank], buffer[:, :end, self.rank :]
        q = self.wq(x).view(B, T, self.H, -1).transpose(1, 2)
        q = torch.cat((q[..., : self.nope], rotate(q[..., self.nope :], at)), -1)
        up = self.w_up(latent)
        k = up[..., : self.H * self.nope].view(B, end, self.H, self.nope).transpose(1, 2)
        v = up[..., self.H * self.nope :].view(B, end, self.H, self.vd).transpose(1, 2)
        k = torch.cat((k, k_rope[:, None].repeat(1, self.H, 1, 1)), -1)
        y = attention(q, k, v, causal_mask(T, end))
        return self.wo(y.transpose(1, 2).reshape(B, T, -1)), cache


class ExpertStack(nn.Module):
    """gate|up [E, 2 d_ff, d] and down [E, d, d_ff], as grouped kernels want them."""

    def __init__(self, d, f, n):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(n, 2 * f, d) / math.sqrt(d))
        self.down = nn.Parameter(torch.randn(n, d, f) / math.sqrt(f))

    def forward(self, x, e):
        gate, up = (x @ self.gate_up[e].T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down[e].T


class SwitchFFN(nn.Module):
    def __init__(self, d_model: int, d_ff: int, n_experts: int):
        super().__init__()
        self.n = n_experts
        self.stack = ExpertStack(d_model, d_ff, n_experts)
        self.router = nn.Linear(d_model, n_experts, bias=False)

    def forward(self, x: Tensor):
        tokens = x.flatten(0, 1)
        probs = torch.softmax(self.router(tokens), dim=1)
        expert = probs.argmax(1)
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=self.n)
        pieces = [
            self.stack(part, e) for e, part in enumerate(tokens[order].split(counts.tolist()))
        ]
        out = torch.empty_like(tokens).index_copy(0, order, torch.cat(pieces))
        out = out * probs.gather(1, expert[:, None])
        loss = self.n * torch.dot(counts.to(probs) / len(tokens), probs.mean(0))
        return out.view_as(x), loss


class MixtralFFN(nn.Module):
    def __init__(self, d_model: int, d_ff: int, n_experts: int, top_k: int):
        super().__init__()
        self.n, self.k = n_experts, top_k
        self.stack = ExpertStack(d_model, d_ff, n_experts)
        self.router = nn.Linear(d_model, n_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = torch.softmax(self.router(tokens), dim=1).topk(self.k, dim=1)
        weight = weight / weight.sum(dim=1, keepdim=True)
        every = torch.stack([self.stack(tokens, e) for e in range(self.n)], dim=1)
        picked = every.gather(1, expert[..., None].expand(-1, -1, x.size(-1)))
        return (weight[..., None] * picked).sum(1).view_as(x)


class LoRALinear(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        d_out, d_in = linear.weight.shape
        self.lora_b = nn.Parameter(torch.zeros(d_out, rank, dtype=linear.weight.dtype))
        self.lora_a = nn.Parameter(torch.randn(rank, d_in, dtype=linear.weight.dtype) * 0.01)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.weight, self.bias)
        return base + F.linear(F.linear(x, self.lora_a), self.lora_b).mul(self.scaling)

    def merged(self) -> nn.Linear:
        d_out, d_in = self.weight.shape
        out = nn.Linear(d_in, d_out, bias=self.bias is not None).to(self.weight.dtype)
        state = {"weight": torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scaling)}
        if self.bias is not None:
            state["bias"] = self.bias
        out.load_state_dict(state)
        return out


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    pairs = torch.ones(ids.size(0), ids.size(1) - 1, dtype=torch.bool)
    if mask is not None:
        pairs = mask[:, 1:].logical_and(mask[:, :-1])
    return F.cross_entropy(logits[:, :-1][pairs], ids[:, 1:][pairs])


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """The Gumbel trick over what is kept."""
    if temperature == 0:
        return logits.max(dim=-1, keepdim=True).indices
    values, tokens = (logits / temperature).sort(dim=-1, descending=True)
    rank = torch.arange(values.size(-1)).expand_as(values)
    if top_k is not None:
        values = values.masked_fill(rank >= top_k, -math.inf)
    if top_p is not None:
        cumulative = values.softmax(-1).cumsum(-1)
        needed = (cumulative < top_p).sum(-1, keepdim=True) + 1
        values = values.masked_fill(rank >= needed, -math.inf)
    noise = torch.rand(values.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return tokens.gather(-1, (values - (-noise.log()).log()).argmax(-1, keepdim=True))


def generate(model, ids, max_new_tokens, eos_id=None):
    B, T = ids.shape
    out = torch.empty(B, T + max_new_tokens, dtype=ids.dtype)
    out[:, :T] = ids
    ended = torch.zeros(B, dtype=torch.bool)
    cache, begin, end = None, 0, T
    with torch.no_grad():
        for end in range(T, T + max_new_tokens):
            logits, cache = model(out[:, begin:end], cache)
            token = logits[:, -1].argmax(-1)
            if eos_id is not None:
                token[ended] = eos_id
                ended |= token == eos_id
            out[:, end] = token
            begin = end
            if ended.all():
                return out[:, : end + 1]
    return out


def speculate(target, draft, ids, n_draft):
    proposal = []
    for _ in range(n_draft):
        seen = torch.cat([ids, *proposal], dim=1)
        proposal.append(draft(seen)[:, -1].argmax(-1, keepdim=True))
    whole = torch.cat([ids, *proposal], dim=1)
    truth = target(whole)[:, -n_draft - 1 :].argmax(-1)
    wrong = (whole[0, ids.size(1) :] != truth[0, :-1]).nonzero()
    accepted = n_draft if len(wrong) == 0 else wrong[0].item()
    return truth[:, : accepted + 1]


def block_parameters(d_model: int, n_q_heads: int, n_kv_heads: int, d_ff: int) -> int:
    with torch.device("meta"):
        block = ModernBlock(d_model, n_q_heads, n_kv_heads, d_ff)
    return sum(p.numel() for p in block.parameters())


def kv_cache_bytes(n_layers, n_kv_heads, head_dim, length, batch=1, bytes_per_element=2):
    k_or_v = (batch, n_kv_heads, length, head_dim)
    return 2 * n_layers * math.prod(k_or_v) * bytes_per_element
