"""What the models of 2026 add to the operators of after_2025.py, small and proved.

    python3 code/after_2026.py                   run the proofs
    python3 code/after_2026.py B02               only those
    python3 code/after_2026.py --list            what each proves
    python3 code/after_2026.py --show NAME       print a definition with all it needs

Letters and masks are those of transformer_block.py. Rotated channels stand first and turn as halves
(i, i + r/2); released weights of DeepSeek-V4 and Hy4 load with their rows permuted so.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
import transformer_block as tb
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformer_block import (
    DecoderOnlyLM,
    KVCache,
    MixtureFFN,
    MultiHeadLatentAttention,
    RMSNorm,
    SigmoidRouter,
    SinkAttention,
    apply_rope,
    at_least_float32,
    attend,
    build_causal_mask,
    combined_mask,
    require_forward_pass,
    require_routing,
    require_tensor,
    require_value,
    split_heads,
    start_position,
    table_rows,
)

import after_2025
from after_2025 import (
    HyperConnectedBlock,
    HyperConnection,
    IndexedSparseAttention,
    StateCache,
    StreamCollapse,
    attend_chosen,
    check_gradients,
    check_refusals,
    reference_sigmoid,
    reference_silu,
    require_indexed,
)

# =============================================================================================
# Values of another width than keys (MiMo-V2)
# =============================================================================================


class NarrowValueAttention(nn.Module):
    """Grouped attention whose values are narrower than its keys, and scaled (MiMo-V2-Flash).

    Versus MultiHeadAttention: v has v_dim channels a head and is multiplied by value_scale before
    it is cached (0.707 = sqrt(d / (H v_dim)) in MiMo-V2-Flash), so a token caches
    G (head_dim + v_dim) numbers. The scale of the scores is head_dim^-0.5. Sinks come by
    attend=SinkAttention(H), windows by the mask.

    forward takes x [B, T, d] and what MultiHeadAttention takes but memory; returns (out [B, T, d],
    (k [B, G, S, head_dim], v [B, G, S, v_dim])).
    """

    def __init__(self, d_model: int, n_q_heads: int, n_kv_heads: int, *, head_dim: int, v_dim: int,
                 value_scale: float = 1.0, attend: Callable[..., Tensor] = attend):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, n_q_heads=n_q_heads, n_kv_heads=n_kv_heads)
        require_value(int, head_dim=head_dim, v_dim=v_dim)
        require_value(float, value_scale=value_scale)
        require_value(Callable, attend=attend)
        if n_q_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads} must divide n_q_heads={n_q_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even to rotate channel pairs, got {head_dim}")
        self.d_model, self.head_dim, self.v_dim, self.rope_dim = d_model, head_dim, v_dim, head_dim
        self.value_scale, self.attend = value_scale, attend
        self.q_proj = nn.Linear(d_model, n_q_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * v_dim, bias=False)
        self.o_proj = nn.Linear(n_q_heads * v_dim, d_model, bias=False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = False,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "KVCache | None" = None,
                start_pos: int | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        B, T, _ = require_tensor("x", x, "B", "T", self.d_model, layer=self.q_proj)
        start = start_position(start_pos, kv_cache)
        cached = 0 if kv_cache is None else start
        keep = combined_mask(mask, key_padding_mask, B, T, cached + T)
        rows = table_rows(cos, sin, start, T)
        q = apply_rope(split_heads(self.q_proj(x), self.head_dim), *rows)  # (B, H, T, head_dim)
        k = apply_rope(split_heads(self.k_proj(x), self.head_dim), *rows)  # (B, G, T, head_dim)
        v = self.value_scale * split_heads(self.v_proj(x), self.v_dim)  # (B, G, T, v_dim)
        if kv_cache is not None:
            k, v = kv_cache.append(k, v)
        try:
            out = self.attend(q, k, v, keep, causal=causal)  # (B, H, T, v_dim)
        except BaseException:  # a call that fails here leaves nothing in the cache
            if kv_cache is not None:
                kv_cache.truncate(start)
            raise
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


# =============================================================================================
# Experts and routers (Qwen3-Next, DeepSeek-V4, Hy4)
# =============================================================================================


class GatedSharedExpert(nn.Module):
    """sigmoid(gate(x)) * expert(x), [..., d] -> [..., d]: Qwen3-Next's shared expert.

    For shared= of MixtureFFN: how much the shared expert says is read from the token, one number.
    """

    def __init__(self, d_model: int, expert: nn.Module):
        super().__init__()
        require_value(int, d_model=d_model)
        require_value(Callable, expert=expert)
        self.d_model, self.expert = d_model, expert
        self.gate = nn.Linear(d_model, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.d_model, layer=self.gate)
        return torch.sigmoid(self.gate(x)) * self.expert(x)


class LimitedGatedFFN(nn.Module):
    """down(silu(min(gate, limit)) * clamp(up, ±limit)), [..., d] -> [..., d]: DeepSeek-V4, Hy4.

    Versus gpt-oss's ClampedGatedFFN: plain SiLU, nothing is added to up, and no biases. DeepSeek-V4
    limits its shared expert too, Hy4 the routed ones alone.
    """

    def __init__(self, d_model: int, d_ff: int, limit: float = 10.0):
        super().__init__()
        require_value(int, d_model=d_model, d_ff=d_ff)
        require_value(float, limit=limit)
        self.d_model, self.limit = d_model, limit
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.d_model, layer=self.up)
        gate = self.gate(x).clamp(max=self.limit)
        return self.down(F.silu(gate) * self.up(x).clamp(-self.limit, self.limit))


class SqrtSoftplusRouter(SigmoidRouter):
    """SigmoidRouter with scores sqrt(ln(1 + e^logit)), which have no upper end (DeepSeek-V4).

    Chosen by score + selection_bias, weighted by the scores without it, renormalised, times scale.
    """

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softplus(logits).sqrt()
        ranked = scores if self.selection_bias is None else scores + self.selection_bias
        return scores, self.best_experts(ranked, group_best=2)


class HashRouter(nn.Module):
    """Experts by a fixed table of token ids, weights by a learned gate (DeepSeek-V4, layers 0-2).

    forward takes tokens [N, d] and ids [N]; returns weights [N, k], those of SqrtSoftplusRouter,
    and experts [N, k], row ids of the buffer table [V, k]: no gradient moves the choice. Raises
    ValueError for ids outside the table.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, vocab_size: int, *,
                 scale: float = 1.0):  # fmt: skip
        super().__init__()
        require_routing(d_model, n_experts, top_k, scale, 1, 1)
        require_value(int, vocab_size=vocab_size)
        self.d_model, self.top_k, self.scale = d_model, top_k, scale
        self.n_groups = self.top_groups = 1
        self.renormalise = True
        self.router = nn.Linear(d_model, n_experts, bias=False)
        tokens, choices = (torch.arange(n, device="cpu") for n in (vocab_size, top_k))
        table = (tokens[:, None] + choices) % n_experts  # a checkpoint brings its own
        self.register_buffer("table", table.to(torch.tensor(()).device))  # the default one

    @property
    def n_experts(self) -> int:
        return self.router.out_features

    def forward(self, tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        N, _ = require_tensor("tokens", tokens, "N", self.d_model, layer=self.router)
        require_tensor("ids", ids, N, kind="integer")
        try:
            experts = F.embedding(ids.long(), self.table)  # (N, k)
        except IndexError as error:
            raise ValueError(f"ids must lie in 0 … {len(self.table) - 1}, got others") from error
        scores = F.softplus(at_least_float32(self.router(tokens))).sqrt()
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return (self.scale * weights).to(tokens.dtype), experts


class HashMixtureFFN(MixtureFFN):
    """MixtureFFN whose router is a HashRouter: forward takes x [B, T, d] and ids [B, T]."""

    takes_ids = True  # HyperConnectedBlock hands them on

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        B, T, d = require_tensor("x", x, "B", "T", self.router.d_model, layer=self.router.router)
        require_tensor("ids", ids, B, T, kind="integer")
        tokens = x.reshape(-1, d)  # (N, d)
        weights, chosen = self.router(tokens, ids.flatten())  # (N, k)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            given = weights[row, place, None] * expert(tokens.index_select(0, row))
            out = out.index_add(0, row, given.to(x.dtype))
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x)


class TokenRoutedLM(DecoderOnlyLM):
    """DecoderOnlyLM whose blocks are told the token ids, as HyperConnectedBlock takes them."""

    def _logits(self, ids: Tensor, masks: dict, kv_caches: list, last_only: bool,
                options: dict) -> Tensor:  # fmt: skip
        return super()._logits(ids, masks, kv_caches, last_only, options | {"ids": ids})


# =============================================================================================
# Compressed attention (DeepSeek-V4)
# =============================================================================================


class GroupedLinear(nn.Module):
    """n_groups maps side by side, [..., n_groups * width_in] -> [..., n_groups * width_out]."""

    def __init__(self, n_groups: int, width_in: int, width_out: int):
        super().__init__()
        require_value(int, n_groups=n_groups, width_in=width_in, width_out=width_out)
        self.weight = nn.Parameter(torch.empty(n_groups, width_in, width_out))
        nn.init.uniform_(self.weight, -(width_in**-0.5), width_in**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        n_groups, width_in, _ = self.weight.shape
        require_tensor("x", x, ..., n_groups * width_in)
        parts = x.unflatten(-1, (n_groups, 1, width_in))  # (..., n_groups, 1, width_in)
        return (parts @ self.weight).flatten(-3)


class EntryPooling(nn.Module):
    """rate tokens become one entry: a sum weighted by a softmax over them, channel by channel.

    Entry e is norm(sum_j softmax_j(gate_j + slot_bias_j) * kv_j) over the tokens e * rate … of its
    own, turned at the first of them. With overlap (DeepSeek-V4's CSA, rate 4; without it HCA, rate
    128) there are two series: the sum runs over the first series of the rate tokens before these
    and the second series of these. Tokens short of an entry wait in pending.

    forward takes x [B, T, d] at positions start …, pending [B, P, 2 * series * width] or None, and
    the tables cos and sin [max_len, r]; returns the new entries [B, 1, n, width] and pending.
    """

    def __init__(self, d_model: int, width: int, rate: int, *, overlap: bool,
                 norm_eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, width=width, rate=rate)
        self.d_model, self.width, self.rate, self.overlap = d_model, width, rate, overlap
        series = 2 if overlap else 1
        self.kv_proj = nn.Linear(d_model, series * width, bias=False)
        self.gate_proj = nn.Linear(d_model, series * width, bias=False)
        self.slot_bias = nn.Parameter(torch.zeros(rate, series * width))
        self.norm = RMSNorm(width, norm_eps)

    def forward(self, x: Tensor, pending: Tensor | None, start: int, cos: Tensor,
                sin: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        require_tensor("x", x, "B", "T", self.d_model, layer=self.kv_proj)
        both = torch.cat((self.kv_proj(x), self.gate_proj(x)), dim=-1)  # (B, T, 2*series*width)
        both = both if pending is None else torch.cat((pending, both), dim=1)
        behind = self.rate if self.overlap and start >= self.rate else 0  # of the entry before
        n = (start % self.rate + x.shape[1]) // self.rate
        windows = both[:, : behind + n * self.rate].unflatten(1, (-1, self.rate))
        kv, gate = windows.chunk(2, dim=-1)  # (B, windows, rate, series*width)
        gate = gate + self.slot_bias
        if self.overlap:
            if not behind:  # nothing stands before the first entry
                kv, gate = (
                    F.pad(kv, (0, 0, 0, 0, 1, 0)),
                    F.pad(gate, (0, 0, 0, 0, 1, 0), value=-math.inf),
                )
            (kv_a, kv_b), (gate_a, gate_b) = kv.chunk(2, dim=-1), gate.chunk(2, dim=-1)
            kv = torch.cat((kv_a[:, :-1], kv_b[:, 1:]), dim=2)  # (B, n, 2*rate, width)
            gate = torch.cat((gate_a[:, :-1], gate_b[:, 1:]), dim=2)
        weights = at_least_float32(gate).softmax(dim=2).to(kv)
        entries = self.norm((weights * kv).sum(dim=2))[:, None]  # (B, 1, n, width)
        first = self.rate * torch.arange(start // self.rate, start // self.rate + n)
        entries = apply_rope(entries, cos[first.to(cos.device)], sin[first.to(sin.device)])
        done = behind + n * self.rate
        return entries, both[:, done - (self.rate if self.overlap and done else 0) :].clone()


class EntryIndex(nn.Module):
    """What each entry is worth to each query: IndexedSparseAttention's scores over pooled keys.

    I_te = sum_j w_tj ReLU(q_tj k_e), q from the query latent, w from x. forward takes x [B, T, d],
    latent [B, T, q_rank], keys [B, 1, N, width], and table rows [T, r]; returns [B, T, N]. Its
    inputs are detached: a loss on the scores moves nothing else.
    """

    def __init__(self, d_model: int, q_rank: int, *, n_heads: int, width: int, rate: int,
                 top_k: int, norm_eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, q_rank=q_rank, n_heads=n_heads, top_k=top_k)
        self.width, self.top_k = width, top_k
        self.pooling = EntryPooling(d_model, width, rate, overlap=True, norm_eps=norm_eps)
        self.q_proj = nn.Linear(q_rank, n_heads * width, bias=False)
        self.weight_proj = nn.Linear(d_model, n_heads, bias=False)

    def forward(self, x: Tensor, latent: Tensor, keys: Tensor, cos: Tensor,
                sin: Tensor) -> Tensor:  # fmt: skip
        q = apply_rope(split_heads(self.q_proj(latent.detach()), self.width), cos, sin)
        rows = at_least_float32(q.flatten(1, 2))  # (B, H_I*T, width)
        hits = F.relu(at_least_float32(keys[:, 0]) @ rows.mT).mT  # (B, H_I*T, N)
        hits = hits.unflatten(1, q.shape[1:3])  # (B, H_I, T, N)
        weight = at_least_float32(self.weight_proj(x.detach())).mT  # (B, H_I, T)
        return (weight[..., None] * hits).sum(dim=1) * (q.shape[1] * self.width) ** -0.5


class CompressedCache(StateCache):
    """What a CompressedAttention keeps: its window, entries, and tokens short of an entry.

    keys [B, 1, window - 1 at most, head_dim], entries and index_entries [B, 1, n, width]; pending
    and index_pending [B, P, …] wait for their entry. See StateCache for truncate.
    """

    parts = "keys", "pending", "entries", "index_pending", "index_entries"


class CompressedAttention(nn.Module):
    """DeepSeek-V4's attention (arXiv:2606.19348): one vector a token is key and value of all heads.

    Versus MultiHeadLatentAttention: nothing is expanded; k = v = norm(kv_proj(x)), head_dim wide,
    its first channels turned, so that the heads' outputs carry a rotation, which is turned back by
    the query's angle. A query sees the last window tokens (itself included) and, with pooling, the
    entries of tokens before it, all of them (HCA) or the top_k of index (CSA), under one softmax
    with a sink a head. q comes from a latent and is normed by head without a weight. The output
    goes through n_groups small maps to group_rank each, then to d.

    forward takes x [B, T, d], causal, without mask and padding (ValueError); kv_cache is a
    CompressedCache. Returns (out [B, T, d], (what was attended over, the same)).
    """

    def __init__(self, d_model: int, n_heads: int, *, head_dim: int, rope_dim: int, q_rank: int,
                 window: int, n_groups: int, group_rank: int, pooling: EntryPooling | None = None,
                 index: EntryIndex | None = None, norm_eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, n_heads=n_heads, head_dim=head_dim, q_rank=q_rank)
        require_value(int, rope_dim=rope_dim, window=window, n_groups=n_groups)
        if n_heads % n_groups:
            raise ValueError(f"n_groups={n_groups} must divide n_heads={n_heads}")
        self.d_model, self.head_dim, self.rope_dim = d_model, head_dim, rope_dim
        self.window, self.norm_eps, self.pooling, self.index = window, norm_eps, pooling, index
        self.q_down = nn.Linear(d_model, q_rank, bias=False)
        self.q_norm = RMSNorm(q_rank, norm_eps)
        self.q_up = nn.Linear(q_rank, n_heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(d_model, head_dim, bias=False)
        self.kv_norm = RMSNorm(head_dim, norm_eps)
        self.attend = SinkAttention(n_heads)
        self.o_groups = GroupedLinear(n_groups, n_heads // n_groups * head_dim, group_rank)
        self.o_proj = nn.Linear(n_groups * group_rank, d_model, bias=False)
        self.new_cache = CompressedCache  # what DecoderOnlyLM gives such a layer

    def forward(self, x: Tensor, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = True,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "CompressedCache | None" = None,
                start_pos: int | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        rows = require_compressed(self, x, mask, key_padding_mask, causal, cos, sin, kv_cache,
                                  start_pos)  # fmt: skip
        cache = CompressedCache() if kv_cache is None else kv_cache
        start, T = cache.next_pos, x.shape[1]
        latent = self.q_norm(self.q_down(x))
        q = split_heads(self.q_up(latent), self.head_dim)  # (B, H, T, head_dim)
        q = apply_rope(F.rms_norm(q, q.shape[-1:], eps=self.norm_eps), *rows)
        k = apply_rope(self.kv_norm(self.kv_proj(x))[:, None], *rows)  # (B, 1, T, head_dim)
        k = k if cache.keys is None else torch.cat((cache.keys, k), dim=2)
        positions = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        keep = build_causal_mask(positions[k.shape[2] - T :], positions, self.window)  # (T, S)
        parts = {"keys": k[:, :, max(k.shape[2] - self.window + 1, 0) :].clone()}
        if self.pooling is not None:
            entries, seen, more = pooled_entries(self, x, latent, cache, cos, sin, rows)
            k, parts = torch.cat((k, entries), dim=2), parts | more
            keep = torch.cat((keep.expand(len(x), -1, -1), seen), dim=2)[:, None]  # (B, 1, T, S+N)
        out = self.attend(q, k, k, keep)  # (B, H, T, head_dim)
        out = apply_rope(out, rows[0], -rows[1])
        out = self.o_proj(self.o_groups(out.transpose(1, 2).flatten(2)))
        cache.update(T, **parts)
        return out, (k, k)


def pooled_entries(
    layer: "CompressedAttention", x: Tensor, latent: Tensor, cache: "CompressedCache",
    cos: Tensor, sin: Tensor, rows: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, dict]:  # fmt: skip
    """All entries [B, 1, N, head_dim], which of them each token sees [B, T, N], new parts."""
    start, rate, index = cache.next_pos, layer.pooling.rate, layer.index
    entries, pending = layer.pooling(x, cache.pending, start, cos, sin)
    if cache.entries is not None:
        entries = torch.cat((cache.entries, entries), dim=2)
    after = torch.arange(start + 1, start + 1 + x.shape[1], device=x.device)  # tokens so far
    seen = torch.arange(entries.shape[2], device=x.device) < after[:, None] // rate  # (T, N)
    seen, parts = seen.expand(len(x), -1, -1), {"entries": entries, "pending": pending}
    if index is not None:
        keys, wait = index.pooling(x.detach(), cache.index_pending, start, cos, sin)
        if cache.index_entries is not None:
            keys = torch.cat((cache.index_entries, keys), dim=2)
        parts |= {"index_entries": keys, "index_pending": wait}
        scores = index(x, latent, keys, *rows).masked_fill(~seen, -math.inf)
        best = scores.topk(min(index.top_k, keys.shape[2]), dim=-1).indices
        seen = seen & torch.zeros_like(seen).scatter(-1, best, True)
    return entries, seen, parts


# =============================================================================================
# Streams without mixing, and an index that layers share (Hy4)
# =============================================================================================


class IndependentConnection(HyperConnection):
    """HyperConnection whose streams are never mixed: X'_k = X_k + post_k f(h) (Hy4's iHC).

    Versus HyperConnection: mix is the identity, so two vectors are read from the streams, not two
    and a matrix; post = magnitude * sigmoid(…) + eps. h, streams and f as there.
    """

    def __init__(self, d_model: int, n_streams: int = 4, *, magnitude: float = 2.0,
                 eps: float = 1e-6, norm_eps: float = 1e-6):  # fmt: skip
        super().__init__(d_model, n_streams, n_rounds=1, eps=eps, norm_eps=norm_eps)
        require_value(float, magnitude=magnitude)
        self.magnitude, self.widths = magnitude, (n_streams, n_streams)
        self.proj = nn.Linear(n_streams * d_model, 2 * n_streams, bias=False)
        self.scale = nn.Parameter(torch.full((2,), 0.01))
        pre, post = torch.full((n_streams,), -math.log(n_streams - 1)), torch.zeros(n_streams)
        self.bias = nn.Parameter(torch.cat((pre, post)))

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [B, T, n], post [B, T, n] and the identity [n, n], in at least float32."""
        wide = at_least_float32(streams.flatten(2))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=self.norm_eps)  # (B, T, n*d)
        pre, post = self.proj(normed.to(streams.dtype)).to(wide).split(self.widths, dim=-1)
        pre_bias, post_bias = self.bias.split(self.widths)
        pre = torch.sigmoid(self.scale[0] * pre + pre_bias) + self.eps
        post = self.magnitude * torch.sigmoid(self.scale[1] * post + post_bias) + self.eps
        return pre, post, torch.eye(self.n_streams).to(wide)


class SinkLatentAttention(MultiHeadLatentAttention):
    """MultiHeadLatentAttention with a sink a head in its softmax (Hy4): arguments as there."""

    def __init__(self, d_model: int, n_heads: int, **sizes: int | None):
        super().__init__(d_model, n_heads, **sizes)
        self.attend = SinkAttention(n_heads)

    def expanded(self, q_nope: Tensor, q_rope: Tensor, k: Tensor, keep: Tensor | None,
                 causal: bool) -> Tensor:  # fmt: skip
        """As there."""
        latent, k_rope = k.split((self.kv_rank, self.rope_dim), dim=-1)
        up = split_heads(self.kv_up(latent[:, 0]), self.nope_dim + self.v_dim)
        k_nope, v = up.split((self.nope_dim, self.v_dim), dim=-1)  # (B, H, S, nope or v_dim)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)  # (B, H, T, nope_dim+rope_dim)
        return self.attend(q, k, v, keep, causal=causal, scale=1.0)

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, k: Tensor, keep: Tensor | None,
                 causal: bool) -> Tensor:  # fmt: skip
        """As there: scores are the same numbers, so the sinks are."""
        up = self.kv_up.weight.unflatten(0, (-1, self.nope_dim + self.v_dim))
        k_up, v_up = up.split((self.nope_dim, self.v_dim), dim=1)  # (H, nope or v_dim, kv_rank)
        q = torch.cat((q_nope @ k_up, q_rope), dim=-1)  # (B, H, T, kv_rank+rope_dim)
        out = self.attend(q, k, k[..., : self.kv_rank], keep, causal=causal, scale=1.0)
        return out @ v_up.mT  # (B, H, T, v_dim)


class GatedLatentAttention(SinkLatentAttention):
    """SinkLatentAttention with OutputGatedAttention's gate before the output projection (Hy4).

    out_proj(heads * sigmoid(gate_proj(x))); forward is MultiHeadLatentAttention's.
    """

    def __init__(self, d_model: int, n_heads: int, **sizes: int | None):
        super().__init__(d_model, n_heads, **sizes)
        self.out_proj, self.o_proj = self.o_proj, nn.Identity()  # heads come out, joined
        self.gate_proj = nn.Linear(d_model, n_heads * self.v_dim, bias=False)

    def forward(self, x: Tensor, **options: object) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        heads, stored = super().forward(x, **options)  # (B, T, H*v_dim)
        return self.out_proj(heads * torch.sigmoid(self.gate_proj(x))), stored


class SharedIndexAttention(nn.Module):
    """Reads what the last IndexedSparseAttention below it has chosen; has no indexer, no index key.

    Cross-layer sharing of Hy4 (57 of its 78 layers) and GLM-5.2 (arXiv:2603.12201). forward takes
    choice, a list whose last entry is that layer's [B, T, top_k] or None for all (ValueError
    without one), and what attn takes; kv_cache is attn's. Returns what attn does.
    """

    def __init__(self, attn: nn.Module):
        super().__init__()
        if getattr(attn, "q_rank", None) is None:
            raise TypeError(f"attn must be latent attention with q_rank, got {type(attn).__name__}")
        self.attn = attn

    def forward(self, x: Tensor, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = False,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "KVCache | None" = None, start_pos: int | None = None,
                choice: list | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        if not choice:
            raise ValueError(f"choice must hold what a layer below has chosen, got {choice}")
        keep, _ = require_indexed(self, x, mask, key_padding_mask, causal, cos, sin, kv_cache,
                                  start_pos)  # fmt: skip
        S = x.shape[1] + (0 if kv_cache is None else kv_cache.next_pos)
        options = {"cos": cos, "sin": sin, "start_pos": start_pos}
        return attend_chosen(self.attn, x, choice[-1], keep, kv_cache, S, options)


class GroupCache:
    """The caches of the layers of an IndexGroup, which are equally long."""

    def __init__(self, caches: Iterable[object]):
        self.caches = list(caches)

    @property
    def next_pos(self) -> int:
        return self.caches[0].next_pos

    def truncate(self, length: int) -> None:
        """As KVCache.truncate, for all; a layer that a failed forward did not reach is shorter."""
        for cache in self.caches:
            cache.truncate(length)

    def reset(self) -> None:
        """Forget everything."""
        for cache in self.caches:
            cache.reset()


class IndexGroup(nn.Module):
    """A block of several layers, whose first one chooses the keys for all of them (Hy4).

    forward is that of its layers, which run one after the other; what the first one chose is handed
    on by the call itself, so that calls in several threads do not meet.
    """

    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        require_value(int, layers=len(self.layers))
        for number, layer in enumerate(self.layers):
            wanted = SharedIndexAttention if number else IndexedSparseAttention
            if not isinstance(layer.attn, wanted):
                came = type(layer.attn).__name__
                raise TypeError(f"layers[{number}].attn must be {wanted.__name__}, got {came}")

    def new_cache(self) -> GroupCache:
        """An empty cache for each layer."""
        return GroupCache(getattr(layer.attn, "new_cache", KVCache)() for layer in self.layers)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, *,
                kv_cache: "GroupCache | None" = None, **options: object) -> Tensor:  # fmt: skip
        choice, caches = [], [None] * len(self.layers)
        if kv_cache is not None:
            if len(getattr(kv_cache, "caches", ())) != len(self.layers):
                raise TypeError(f"kv_cache must be a GroupCache of {len(self.layers)}")
            caches = kv_cache.caches
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cos, sin, mask, kv_cache=cache, choice=choice, **options)
        return x


# =============================================================================================
# Argument checks
# =============================================================================================


def require_compressed(
    layer: "CompressedAttention",
    x: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    kv_cache: "CompressedCache | None",
    start_pos: int | None,
) -> tuple[Tensor, Tensor]:
    """Refuse what entries cannot tell apart, and another cache; returns the table rows of x."""
    B, T, _ = require_tensor("x", x, "B", "T", layer.d_model, layer=layer.q_down)
    if mask is not None or not causal:
        came = f"causal={causal}" if mask is None else f"mask {getattr(mask, 'shape', mask)}"
        raise ValueError(f"mask must be None and causal True where tokens are pooled, got {came}")
    if kv_cache is not None and not isinstance(kv_cache, CompressedCache):
        raise TypeError(f"kv_cache must be a CompressedCache, got {type(kv_cache).__name__}")
    start = start_position(start_pos, kv_cache)
    if kv_cache is None and start:
        raise ValueError(f"start_pos must be 0 without kv_cache, got {start}")
    combined_mask(None, key_padding_mask, B, T, start + T)
    if key_padding_mask is not None and not key_padding_mask.all():
        raise ValueError("key_padding_mask must hide nothing where tokens are pooled by position")
    rows = table_rows(cos, sin, start, T)
    require_tensor("cos", rows[0], T, layer.rope_dim)
    if kv_cache is not None:
        require_forward_pass()
        if start:
            shape = B, 1, min(start, layer.window - 1), layer.head_dim
            kv_cache.require_part("keys", shape, x.dtype, x.device)
    return rows


# =============================================================================================
# What the proofs compare with: formulas in float64, one token and one head at a time
# =============================================================================================


def reference_rotated(v: Tensor, position: int, r: int) -> Tensor:
    """The first r channels of v [d] turned to a position, pairs (i, i + r/2), base 10000."""
    out = v.clone()
    for i in range(r // 2):
        angle = torch.tensor(position * 10000 ** (-2 * i / r), dtype=torch.float64)
        cos, sin = (part.float().double() for part in (angle.cos(), angle.sin()))  # as the tables
        a, b = v[i], v[i + r // 2]
        out[i] = a * cos - b * sin
        out[i + r // 2] = a * sin + b * cos
    return out


def reference_entries(pool: EntryPooling, x: Tensor, r: int) -> list[Tensor]:
    """All complete entries of x [T, d], channel by channel."""
    kv, gate = x @ pool.kv_proj.weight.T, x @ pool.gate_proj.weight.T
    entries, rate, width = [], pool.rate, pool.width
    for e in range(len(x) // rate):
        slots = [(e * rate + j, j, kv.shape[1] - width) for j in range(rate)]
        if pool.overlap and e:
            slots += [((e - 1) * rate + j, j, 0) for j in range(rate)]
        entry = torch.zeros(width).to(x)
        for c in range(width):
            odds = [torch.exp(gate[t, o + c] + pool.slot_bias[j, o + c]) for t, j, o in slots]
            values = [kv[t, o + c] for t, _, o in slots]
            entry[c] = sum(p * v for p, v in zip(odds, values)) / sum(odds)
        entries.append(reference_rotated(tb.reference_norm(pool.norm, entry), e * rate, r))
    return entries


def reference_compressed(layer: CompressedAttention, x: Tensor) -> Tensor:
    """A CompressedAttention over one sample [T, d], query by query and head by head."""
    r, width, out = layer.rope_dim, layer.head_dim, []
    H = layer.q_up.out_features // width
    latent = tb.reference_norm(layer.q_norm, x @ layer.q_down.weight.T)
    keys = tb.reference_norm(layer.kv_norm, x @ layer.kv_proj.weight.T)
    keys = [reference_rotated(key, s, r) for s, key in enumerate(keys)]
    entries = [] if layer.pooling is None else reference_entries(layer.pooling, x, r)
    index = layer.index
    pooled = [] if index is None else reference_entries(index.pooling, x, r)
    for t in range(len(x)):
        ready = range((t + 1) // layer.pooling.rate if layer.pooling else 0)
        if index is not None:
            q = (latent[t] @ index.q_proj.weight.T).unflatten(0, (-1, index.width))
            q, w = [reference_rotated(row, t, r) for row in q], x[t] @ index.weight_proj.weight.T
            worth = {e: sum(w[j] * max(q[j] @ pooled[e], 0) for j in range(len(q))) for e in ready}
            ready = sorted(worth, key=worth.get, reverse=True)[: index.top_k]
        seen = keys[max(0, t - layer.window + 1) : t + 1] + [entries[e] for e in ready]
        heads = []
        for h in range(H):
            q = (latent[t] @ layer.q_up.weight.T)[h * width : (h + 1) * width]
            q = reference_rotated(q / ((q @ q) / width + layer.norm_eps) ** 0.5, t, r)
            odds = [torch.exp(q @ c / width**0.5) for c in seen]
            total = sum(odds) + torch.exp(layer.attend.sinks[h])
            head = sum(p / total * c for p, c in zip(odds, seen))
            heads.append(reference_rotated(head, -t, r))
        groups = torch.cat(heads).unflatten(0, (len(layer.o_groups.weight), -1))
        small = [group @ weight for group, weight in zip(groups, layer.o_groups.weight)]
        out.append(torch.cat(small) @ layer.o_proj.weight.T)
    return torch.stack(out)


def reference_independent(layer: IndependentConnection, streams: Tensor, f: Callable) -> Tensor:
    """An IndependentConnection token by token and stream by stream, from the raw weights."""
    n, out = layer.n_streams, torch.empty_like(streams)
    a, c = layer.scale.tolist(), layer.bias.detach()
    post, h = {}, torch.empty_like(streams[:, :, 0])
    for b, t in itertools.product(*map(range, streams.shape[:2])):
        z = streams[b, t].flatten()
        z = layer.proj.weight.detach() @ z / ((z @ z) / len(z) + layer.norm_eps) ** 0.5
        pre = [reference_sigmoid(a[0] * z[i] + c[i]) + layer.eps for i in range(n)]
        gates = [reference_sigmoid(a[1] * z[n + i] + c[n + i]) for i in range(n)]
        post[b, t] = [layer.magnitude * gate + layer.eps for gate in gates]
        h[b, t] = sum(pre[i] * streams[b, t, i] for i in range(n))
    y = f(h)
    for (b, t), gates in post.items():
        for k in range(n):
            out[b, t, k] = streams[b, t, k] + gates[k] * y[b, t]
    return out


def check_pieces(run: Callable, x: Tensor, cache: object, *splits: tuple[int, ...]) -> float:
    """The largest difference between one pass over x [B, T, ...] and passes over its pieces."""
    full, gaps = run(x), []
    for split in splits:
        cache.reset()
        with torch.no_grad():
            parts = [run(part, kv_cache=cache) for part in x.split(split, dim=1)]
        gaps.append(tb.check_gap(torch.cat(parts, dim=1), full))
    return max(gaps)


# =============================================================================================
# Proofs
# =============================================================================================


@tb.check_seeded(1)
def demo_B01(_device: str = "cpu") -> tuple[bool, str]:
    """Values narrower than keys, and scaled: the formula, pieces, and what a token caches."""
    cos, sin = tb.build_rope_cache(9, 4)
    sinks = SinkAttention(4)
    layer = NarrowValueAttention(12, 4, 2, head_dim=6, v_dim=5, value_scale=0.7, attend=sinks)
    tb.check_randomized(layer)
    x, at = tb.check_draw(2, 7, 12), {"causal": True, "cos": cos, "sin": sin}
    q = tb.reference_turn(tb.reference_heads(x, layer.q_proj, 6), 4)
    k = tb.reference_turn(tb.reference_heads(x, layer.k_proj, 6), 4)
    v, out = tb.reference_heads(x, layer.v_proj, 5), torch.zeros(2, 4, 7, 5).double()
    for b, h, t in itertools.product(range(2), range(4), range(7)):
        odds = [torch.exp(q[b, h, t] @ k[b, h // 2, s] / 6**0.5) for s in range(t + 1)]
        total = sum(odds) + torch.exp(sinks.sinks[h])
        out[b, h, t] = sum(p / total * 0.7 * v[b, h // 2, s] for s, p in enumerate(odds))
    gap = tb.check_gap(layer(x, **at)[0], tb.reference_output(out, layer.o_proj))
    cache = KVCache()
    run = lambda x, **more: layer(x, **at, **more)[0]  # noqa: E731
    pieces = check_pieces(run, x, cache, (3, 1, 3), (1,) * 7, (7,))
    each = cache.k[0, :, 0].numel() + cache.v[0, :, 0].numel()
    return tb.check_claims(
        f"narrow values vs a loop over heads and queries: max|Δ|={gap:.2e}; pieces vs one pass: "
        f"max|Δ|={pieces:.2e}; a token caches {each} numbers (expect 2 (6 + 5) = 22)",
        formula=gap < 1e-11,
        pieces=pieces < 1e-11,
        cache=each == 22 and tb.check_close(cache.v, (0.7 * v)),
        gradients=check_gradients(layer, run, x),
        refusals=check_refusals(
            (ValueError, lambda: layer(x), "cos", None),
            (ValueError, lambda: layer(x[..., :5], **at), "x", 12, 5),
            (TypeError, lambda: layer(x.float(), **at), "x", "float64"),
            (ValueError, lambda: NarrowValueAttention(4, 3, 2, head_dim=2, v_dim=2), "n_kv", 3),
            (ValueError, lambda: NarrowValueAttention(4, 2, 2, head_dim=3, v_dim=2), "head_dim"),
            (ValueError, lambda: NarrowValueAttention(4, 2, 2, head_dim=2, v_dim=0), "v_dim", 0),
        ),
    )


@tb.check_seeded(2)
def demo_B02(_device: str = "cpu") -> tuple[bool, str]:
    """Routers of DeepSeek-V4, limited experts and a gated shared expert are their formulas."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).double()
    router = SqrtSoftplusRouter(4, 4, 2, scale=1.5).double()
    nn.init.eye_(router.router.weight)
    weights, chosen = router(logits)
    router.selection_bias[3] = 9.0
    biased, moved = router(logits)
    scores = [math.log(1 + math.exp(z)) ** 0.5 for z in (2, 1, 0, -1)]
    expected = torch.tensor([[scores[0], scores[1]]]).double() * 1.5 / (scores[0] + scores[1])
    third = torch.tensor([[scores[3], scores[0]]]).double() * 1.5 / (scores[3] + scores[0])

    hashed, ids = HashRouter(4, 4, 2, 5, scale=1.5).double(), torch.tensor([[3, 1, 4]])
    hashed.table = torch.tensor([[0, 1], [2, 0], [1, 3], [3, 2], [0, 3]])
    nn.init.eye_(hashed.router.weight)
    shared = GatedSharedExpert(4, LimitedGatedFFN(4, 3, 0.5))
    mixture = HashMixtureFFN(hashed, [LimitedGatedFFN(4, 3, 0.5) for _ in range(4)], shared)
    tb.check_randomized(mixture)
    x, out = 3 * tb.check_draw(1, 3, 4), torch.zeros(1, 3, 4).double()

    def limited(ffn: nn.Module, token: Tensor) -> Tensor:
        gate = [min(row @ token, torch.tensor(0.5).double()) for row in ffn.gate.weight]
        up = [max(min(row @ token, 0.5), -0.5) for row in ffn.up.weight]
        return ffn.down.weight @ torch.stack([reference_silu(g) * u for g, u in zip(gate, up)])

    for t, token in enumerate(x[0]):
        experts = hashed.table[ids[0, t]].tolist()
        worth = [torch.log(1 + torch.exp(hashed.router.weight[e] @ token)) ** 0.5 for e in experts]
        for e, s in zip(experts, worth):
            out[0, t] += 1.5 * s / sum(worth) * limited(mixture.experts[e], token)
        gate = reference_sigmoid(shared.gate.weight[0] @ token)
        out[0, t] += gate * limited(shared.expert, token)
    gap = tb.check_gap(mixture(x, ids), out)
    return tb.check_claims(
        f"logits 2, 1, 0, -1 by sqrt-softplus, top-2 times 1.5: {weights[0, 0]:.4f}, "
        f"{weights[0, 1]:.4f} (expect 0.8400, 0.6600), with a bias of 9 on the last one experts "
        f"{moved[0].tolist()}; experts by token id, limited, with a gated shared one, vs a loop: "
        f"max|Δ|={gap:.2e}",
        scores=chosen[0].tolist() == [0, 1] and tb.check_close(weights, expected, 1e-7),
        bias=moved[0].tolist() == [3, 0] and tb.check_close(biased, third, 1e-7),
        formula=gap < 1e-11,
        gradients=check_gradients(mixture, lambda x: mixture(x, ids), x, "experts.1."),
        refusals=check_refusals(
            (ValueError, lambda: mixture(x, ids + 1), "ids", 4),
            (ValueError, lambda: mixture(x, ids[:, :2]), "ids", 3, 2),
            (TypeError, lambda: mixture(x, ids.float()), "ids", "float"),
            (ValueError, lambda: mixture(x[..., :3], ids), "x", 4, 3),
            (ValueError, lambda: HashRouter(4, 4, 5, 5), "top_k", 5),
            (ValueError, lambda: LimitedGatedFFN(4, 3, 0.0), "limit", 0.0),
        ),
    )


def check_compressed_layer(kind: str) -> CompressedAttention:
    """A window alone, entries of 2 of which 2 are chosen (CSA), or entries of 3 (HCA)."""
    parts = {}
    if kind == "csa":
        parts["pooling"] = EntryPooling(10, 6, 2, overlap=True, norm_eps=1e-3)
        parts["index"] = EntryIndex(10, 7, n_heads=8, width=5, rate=2, top_k=2, norm_eps=1e-3)
    elif kind == "hca":
        parts["pooling"] = EntryPooling(10, 6, 3, overlap=False, norm_eps=1e-3)
    sizes = {"head_dim": 6, "rope_dim": 4, "q_rank": 7, "window": 3, "n_groups": 2}
    layer = CompressedAttention(10, 4, **sizes, group_rank=3, norm_eps=1e-3, **parts)
    return tb.check_randomized(layer)


@tb.check_seeded(3)
def demo_B03(_device: str = "cpu") -> tuple[bool, str]:
    """Compressed attention is its formula, in any pieces, and its window does not grow."""
    cos, sin = tb.build_rope_cache(20, 4)
    at, x, gaps, pieces, held = {"cos": cos, "sin": sin}, tb.check_draw(2, 9, 10), {}, [], {}
    claims = {}
    for kind in ("window", "csa", "hca"):
        layer = check_compressed_layer(kind)
        run = lambda x, layer=layer, **more: layer(x, **at, **more)[0]  # noqa: E731
        expected = torch.stack([reference_compressed(layer, row) for row in x])
        gaps[kind] = tb.check_gap(run(x), expected)
        cache = layer.new_cache()
        splits = (1,) * 9, (4, 1, 4), (2, 7), (3, 3, 3), (5, 1, 1, 2)
        pieces.append(check_pieces(run, x, cache, *splits))
        held[kind] = [cache.keys.shape[2], 0 if cache.entries is None else cache.entries.shape[2]]
        idle = ("index",) if kind == "csa" else ()
        claims[f"gradients {kind}"] = check_gradients(layer, run, x, *idle)
        claims |= check_compressed_cache(kind, layer, run, x)
    csa = check_compressed_layer("csa")
    both = csa.pooling(x, None, 0, cos, sin)[0]
    rows, given = (cos[:9], sin[:9]), x.clone().requires_grad_()
    keys = csa.index.pooling(given.detach(), None, 0, cos, sin)[0]
    csa.index(given, csa.q_norm(csa.q_down(given)), keys, *rows).sum().backward()
    worth = check_index_worth(csa, x)
    indexed = tb.check_gap(csa.index(x, csa.q_norm(csa.q_down(x)), keys, *rows), worth)
    moved = {name.partition(".")[0] for name, p in csa.named_parameters() if p.grad is not None}
    return tb.check_claims(
        f"compressed attention vs a loop over queries and heads: window max|Δ|="
        f"{gaps['window']:.2e}, CSA {gaps['csa']:.2e}, HCA {gaps['hca']:.2e}; in any pieces vs one "
        f"pass: max|Δ|={max(pieces):.2e}; after 9 tokens [keys, entries] are held: {held}",
        formula=max(gaps.values()) < 1e-11,
        pieces=max(pieces) < 1e-11,
        held=held == {"window": [2, 0], "csa": [2, 4], "hca": [2, 3]} and both.shape[2] == 4,
        index=indexed < 1e-11,
        index_alone=moved == {"index"} and given.grad is None,
        **claims,
        refusals=check_refusals(
            (ValueError, lambda: csa(x, mask=torch.ones(9, 9).bool(), **at), "mask"),
            (ValueError, lambda: csa(x, causal=False, **at), "causal", False),
            (ValueError, lambda: csa(x, start_pos=2, **at), "start_pos", 2),
            (TypeError, lambda: csa(x, kv_cache=KVCache(), **at), "CompressedCache", "KVCache"),
            (ValueError, lambda: csa(x, cos=cos[:, :2], sin=sin[:, :2]), "cos", 4, 2),
            (ValueError, lambda: csa(x[..., :4], **at), "x", 10, 4),
            (TypeError, lambda: csa(x.float(), **at), "x", "float64"),
            (
                ValueError,
                lambda: csa(x, key_padding_mask=torch.zeros(2, 9).bool(), **at),
                "key_padding_mask",
            ),
            (ValueError, lambda: GroupedLinear(2, 3, 4)(x), 6, 10),
        ),
    )


def check_index_worth(layer: CompressedAttention, x: Tensor) -> Tensor:
    """What each entry is worth to each query [B, T, N], summed index head by index head."""
    index, r = layer.index, layer.rope_dim
    latent = tb.reference_norm(layer.q_norm, x @ layer.q_down.weight.T)
    pooled = [reference_entries(index.pooling, row, r) for row in x]
    worth = torch.zeros(*x.shape[:2], len(pooled[0])).to(x)
    for b, t, e in itertools.product(*map(range, worth.shape)):
        q = (latent[b, t] @ index.q_proj.weight.T).unflatten(0, (-1, index.width))
        w = x[b, t] @ index.weight_proj.weight.T
        hits = [max(reference_rotated(row, t, r) @ pooled[b][e], 0) for row in q]
        worth[b, t, e] = sum(w[j] * hit for j, hit in enumerate(hits)) / (len(q) * len(q[0])) ** 0.5
    return worth


def check_compressed_cache(
    kind: str, layer: nn.Module, run: Callable, x: Tensor
) -> dict[str, bool]:
    """truncate to where the last forward began, copies, other caches, a recomputed forward."""
    cache, full = layer.new_cache(), run(x)
    with torch.no_grad():
        run(x[:, :4], kv_cache=cache)
        run(x[:, 4:6], kv_cache=cache)
        cache.truncate(4)
        twin = copy.deepcopy(cache)
        again = run(x[:, 4:], kv_cache=cache)
        other = run(x[:, 4:], kv_cache=twin)
    wrong = check_refusals(
        (ValueError, lambda: run(x[:1], kv_cache=cache), "keys", "[1, 1, 2, 6]"),
        (ValueError, lambda: cache.truncate(2), "length", 2),
    )
    drawn, fresh = x.clone().requires_grad_(), layer.new_cache()
    replayed = checkpoint(lambda x: run(x, kv_cache=fresh), drawn, use_reentrant=False).sum()
    return {
        f"cache {kind}": tb.check_close(again, full[:, 4:]) and tb.check_close(other, again),
        f"refused {kind}": wrong and cache.next_pos == 9,
        f"recomputed {kind}": tb.check_raises(RuntimeError, replayed.backward, "backward"),
    }


def check_group(n: int) -> IndexGroup:
    """n layers on two streams that are not mixed; the first one chooses 3 keys."""
    sizes = {"kv_rank": 6, "rope_dim": 4, "nope_dim": 3, "v_dim": 5, "q_rank": 7}
    layers = []
    for number in range(n):
        attn = GatedLatentAttention(12, 2, **sizes)
        if number == 0:
            attn = IndexedSparseAttention(attn, n_index_heads=8, index_dim=6, top_k=3)
        else:
            attn = SharedIndexAttention(attn)
        streams = [IndependentConnection(12, 2, eps=0.01, norm_eps=0.1) for _ in range(2)]
        parts = {"attn_streams": streams[0], "ffn_streams": streams[1]}
        layers.append(HyperConnectedBlock(12, d_ff=8, n_streams=2, attn=attn, **parts))
    return tb.check_randomized(IndexGroup(layers))


@tb.check_seeded(4)
def demo_B04(_device: str = "cpu") -> tuple[bool, str]:
    """Streams that are not mixed, and layers that read what one of them has chosen."""
    layer = tb.check_randomized(IndependentConnection(6, 3, magnitude=1.5, eps=0.01, norm_eps=0.1))
    streams = tb.check_draw(2, 4, 3, 6)
    gap = tb.check_gap(layer(streams, torch.cos), reference_independent(layer, streams, torch.cos))
    started, equal = IndependentConnection(6, eps=1e-14).double(), streams[:, :, :1]
    mean = started(equal.expand(-1, -1, 4, -1), torch.cos).mean(2)
    plain = tb.check_gap(mean, equal[:, :, 0] + torch.cos(equal[:, :, 0]))

    cos, sin = tb.build_rope_cache(9, 4)
    group, x = check_group(3), tb.check_draw(2, 9, 2, 12)
    first, second = group.layers[:2]
    h = second.norm1((second.attn_streams.weights(x)[0][..., None] * x).sum(2))
    choice, at = [], {"cos": cos, "sin": sin, "causal": True}
    first.attn(first.norm1(x[:, :, 0]), choice=choice, **at)
    allowed = torch.zeros(2, 9, 9).bool().scatter(-1, choice[0], True) & tb.reference_causal(9)
    reads = lambda h: second.attn(h, choice=choice, **at)[0]  # noqa: E731
    shared = reads(h)
    inner = second.attn.attn
    gate, o_proj = torch.sigmoid(inner.gate_proj(h)), inner.out_proj
    latent = MultiHeadLatentAttention.forward(inner, h, mask=allowed, cos=cos, sin=sin)[0]
    masked = tb.check_gap(shared, o_proj(latent * gate))
    bare = copy.deepcopy(inner)
    del bare.attend
    bare.attend = attend  # without a sink: by the log-sum-exp of the scores it is a gate
    scores = check_latent_scores(inner, h).masked_fill(~allowed[:, None], -math.inf)
    open_ = torch.sigmoid(scores.logsumexp(-1) - inner.attend.sinks[:, None])  # (B, H, T)
    heads = MultiHeadLatentAttention.forward(bare, h, mask=allowed, cos=cos, sin=sin)[0]
    sunk = (heads.unflatten(-1, (2, 5)) * open_.transpose(1, 2)[..., None]).flatten(-2)
    sink = tb.check_gap(latent, sunk)
    run, handed, by_hand = partial(group, cos=cos, sin=sin), [], x
    for part in group.layers:
        by_hand = part(by_hand, cos, sin, choice=handed)
    cache = group.new_cache()
    pieces = check_pieces(run, x, cache, (1,) * 9, (4, 1, 4), (2, 7))
    real = torch.arange(9) >= torch.tensor([[0], [4]])
    alone = run(x[1:, 4:], start_pos=0)
    padded = tb.check_gap(run(x, key_padding_mask=real)[1:, 4:], alone)
    kinds = [type(part).__name__ for part in cache.caches]
    with torch.no_grad():
        cache.truncate(6)
        again = tb.check_gap(run(x[:, 6:], kv_cache=cache), run(x)[:, 6:])
    return tb.check_claims(
        f"streams that are not mixed vs a loop: max|Δ|={gap:.2e}, as started vs x + f(x): "
        f"{plain:.1e}; a layer without an indexer vs latent attention under the mask of what was "
        f"chosen: max|Δ|={masked:.2e}; its sink vs a gate by the log-sum-exp: {sink:.2e}; a group "
        f"of three in pieces vs one pass: max|Δ|={pieces:.2e}; caches {kinds}",
        formula=gap < 1e-11,
        plain=plain < 0.1,
        masked=masked < 1e-11,
        handed_on=len(handed) == 1 and tb.check_close(run(x), by_hand),
        sink=sink < 1e-11,
        pieces=pieces < 1e-11 and again < 1e-11 and padded < 1e-6,
        kinds=kinds == ["IndexedCache", "KVCache", "KVCache"],
        gradients=check_gradients(layer, lambda x: layer(x, torch.cos), streams)
        and check_gradients(second.attn, reads, h.detach()),
        refusals=check_refusals(
            (ValueError, lambda: second.attn(h, **at), "choice", None),
            (TypeError, lambda: SharedIndexAttention(nn.Linear(2, 2)), "attn", "Linear"),
            (TypeError, lambda: IndexGroup([second]), "layers[0]", "IndexedSparse"),
            (TypeError, lambda: IndexGroup([first, first]), "layers[1]", "SharedIndex"),
            (TypeError, lambda: group(x, cos, sin, kv_cache=KVCache()), "GroupCache", 3),
            (ValueError, lambda: IndexGroup([]), "layers", 0),
            (ValueError, lambda: IndependentConnection(6, 3, magnitude=0.0), "magnitude", 0.0),
        ),
    )


def check_latent_scores(attn: MultiHeadLatentAttention, x: Tensor) -> Tensor:
    """Scaled scores [B, H, T, T] of latent attention, keys of every head written out."""
    (B, T, _), r = x.shape, attn.rope_dim
    q = attn.q_up(attn.q_norm(attn.q_down(x))).unflatten(-1, (-1, attn.nope_dim + r))
    latent, shared = attn.kv_down(x).split((attn.kv_rank, r), dim=-1)
    up = attn.kv_up(attn.kv_norm(latent)).unflatten(-1, (q.shape[2], -1))
    scores = torch.empty(B, q.shape[2], T, T).to(x)
    for b, h, t, s in itertools.product(*map(range, scores.shape)):
        turned = reference_rotated(q[b, t, h, attn.nope_dim :], t, r)
        key = reference_rotated(shared[b, s], s, r)
        plain = q[b, t, h, : attn.nope_dim] @ up[b, s, h, : attn.nope_dim]
        scores[b, h, t, s] = (plain + turned @ key) * attn.scale
    return scores


@tb.check_seeded(5)
def demo_B05(_device: str = "cpu") -> tuple[bool, str]:
    """Stacks as in DeepSeek-V4 and Hy4 generate through DecoderOnlyLM."""

    def v4_block(layer: int) -> nn.Module:
        kind, experts = ("window", "csa", "hca")[layer], (LimitedGatedFFN(10, 6) for _ in range(4))
        if layer == 0:
            ffn = HashMixtureFFN(HashRouter(10, 4, 2, 13), experts)
        else:
            ffn = MixtureFFN(SqrtSoftplusRouter(10, 4, 2), experts)
        return HyperConnectedBlock(10, n_streams=2, attn=check_compressed_layer(kind), ffn=ffn)

    v4 = TokenRoutedLM(13, 10, 3, rope_dim=4, make_block=v4_block, max_len=32)
    hy4 = DecoderOnlyLM(13, 12, 2, rope_dim=4, make_block=lambda _: check_group(2), max_len=32)
    said, prompt, same = {}, torch.tensor([[1, 2, 3, 4, 5]]), True
    cos, sin = tb.build_rope_cache(32, 4)
    for name, lm, width in (("V4", v4, 10), ("Hy4", hy4, 12)):
        lm.final_norm = nn.Sequential(StreamCollapse(width, 2), lm.final_norm)
        tb.check_randomized(lm)
        tokens = lm.generate(prompt, 8)
        said[name] = tokens[0, 5:].tolist()
        same &= torch.equal(lm(tokens[:, :-1])[:, 4:].argmax(-1), tokens[:, 5:])
        caches = lm.new_caches()
        with torch.no_grad():
            lm(tokens[:, :6], kv_caches=caches)
            norm, lm.final_norm = lm.final_norm, None
            failed = tb.check_raises(TypeError, lambda: lm(tokens[:, 6:], kv_caches=caches))
            lm.final_norm = norm
            rest = lm(tokens[:, 6:], kv_caches=caches)
        same &= failed and tb.check_close(rest, lm(tokens)[:, 6:], 1e-10)
    by_hand = v4.embedding(prompt)
    for block in v4.blocks:
        by_hand = block(by_hand, cos, sin, ids=prompt)
    return tb.check_claims(
        f"8 greedy tokens equal recomputation without a cache, and after a failed forward all "
        f"layers go on: {same}",
        same=same,
        token_ids=tb.check_close(v4(prompt), v4.embedding(v4.final_norm(by_hand)), 1e-10),
        alive=all(len(set(tokens)) > 1 for tokens in said.values()),
    )


# =============================================================================================
# Command line
# =============================================================================================


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    demos = [demo_B01, demo_B02, demo_B03, demo_B04, demo_B05]
    own = tb.main_text(__file__, globals().get("__spec__"))
    texts = [tb.main_text(tb.__file__, tb.__spec__), after_2025.main_text(), own]
    parser = after_2025.main_parser(__file__, "The operators of 2026, small and proved.")
    closing = "all operators of 2026 proved ✓"
    answer = partial(after_2025.main_answer, parser, demos, texts, closing)
    return tb.main_program(parser, argv, answer)


if __name__ == "__main__":
    sys.exit(main())
