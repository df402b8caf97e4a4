"""What changed in the Transformer block in 2025 and 2026: four operators, small and proved.

    python3 code/after_2025.py                   run the five proofs
    python3 code/after_2025.py A02               only those
    python3 code/after_2025.py --list            what each proves
    python3 code/after_2025.py --show NAME       print a definition with all it needs

Letters and masks are those of transformer_block.py, whose parts these classes stand on: B batch,
T length, S cached and new keys, d d_model, H heads, d_h head_dim; masks are bool and True means
"may attend". What is passed as attn= to a block of the script takes what the block hands on.
"""

import argparse
import ast
import copy
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformer_block as tb
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformer_block import (
    GatedFFN,
    KVCache,
    ModernDecoderBlock,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    RMSNorm,
    apply_rope,
    at_least_float32,
    build_causal_mask,
    combined_mask,
    require_forward_pass,
    require_tensor,
    require_value,
    split_heads,
    start_position,
    table_rows,
)

# =============================================================================================
# Output-gated attention (Qwen3-Next)
# =============================================================================================


class OutputGatedAttention(nn.Module):
    """o_proj(heads * sigmoid(gate_proj(x))): each head channel is scaled by a gate read from x.

    Gated Attention, arXiv:2505.06708; full layers of Qwen3-Next (on MultiHeadAttention with
    rope=True and qk_norm=True, a quarter of each head turned) and of Hy4 (on latent attention).
    Versus the attention that is passed in: a gate between the sum over the values and o_proj, which
    moves here. A head that has nothing to say can close, so none needs a first token to look at.
    x is the block's normed input, the one that q, k and v are made of. Nothing more is cached.

    forward takes what that attention takes, and returns (out [B, T, d], what it stores).
    """

    def __init__(self, attn: nn.Module):
        super().__init__()
        if not isinstance(getattr(attn, "o_proj", None), nn.Linear):
            raise TypeError(f"attn must be an attention with o_proj, got {type(attn).__name__}")
        self.attn, self.o_proj = attn, attn.o_proj
        self.attn.o_proj = nn.Identity()  # what it returns now is the heads, side by side
        self.gate_proj = nn.Linear(attn.d_model, self.o_proj.in_features, bias=False)

    def forward(self, x: Tensor, **options: object) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        heads, stored = self.attn(x, **options)  # (B, T, H*d_h)
        return self.o_proj(heads * torch.sigmoid(self.gate_proj(x))), stored


# =============================================================================================
# Gated DeltaNet (Qwen3-Next)
# =============================================================================================


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token: (out [B, H, T, d_v], the state after the last).

    state S [B, H, d_k, d_v] is a memory that says S^T k when asked for k. Each token lets it fade,
    S <- alpha S, and then moves what it says for k towards v, S <- S + k (beta (v - S^T k))^T; out
    is S^T q. q, k [B, H, T, d_k], v [B, H, T, d_v], log_decay (ln alpha <= 0) and beta [B, H, T].
    """
    out = []
    for t in range(v.shape[2]):
        state = log_decay[:, :, t, None, None].exp() * state
        recalled = (k[:, :, t, None] @ state)[:, :, 0]  # (B, H, d_v)
        written = beta[:, :, t, None] * (v[:, :, t] - recalled)
        state = state + k[:, :, t, :, None] * written[:, :, None]
        out.append(q[:, :, t, None] @ state)  # (B, H, 1, d_v)
    return torch.cat(out, dim=2) if out else v, state


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same chunk by chunk: matrix products inside a chunk, a step of the state between chunks.

    With a_ij the product of the alphas behind j up to i, a_i that of all up to i, and the state S
    before the chunk, token i writes
    u_i = beta_i (v_i - a_i S^T k_i - sum_{j<i} a_ij (k_i k_j) u_j), a triangular system in u. Then
    out_i = a_i S^T q_i + sum_{j<=i} a_ij (q_i k_j) u_j (arXiv:2412.06464). An alpha of 0
    (log_decay -inf) forgets all that came before.
    """
    if not v.shape[2]:
        return v, state
    out = []
    for parts in zip(*(t.split(chunk, dim=2) for t in (q, k, v, log_decay, beta))):
        q, k, v, steps, beta = parts
        beta = beta[..., None]  # (B, H, C, 1)
        # Sums of the steps behind j up to i, not differences of two sums: -inf - -inf is NaN.
        behind = steps[..., None].expand(*steps.shape, steps.shape[2]).tril(-1).cumsum(dim=2)
        between = behind.exp().tril()  # (B, H, C, C)
        since = steps.cumsum(dim=2).exp()[..., None]  # (B, H, C, 1)
        # The solver takes the diagonal as ones and does not read above it.
        system, right = beta * between * (k @ k.mT), beta * (v - since * (k @ state))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        out.append(since * (q @ state) + (between * (q @ k.mT)) @ u)  # (B, H, C, d_v)
        left = between[:, :, -1, :, None]  # what of each write is left at the end of the chunk
        state = since[:, :, -1:] * state + (left * k).mT @ u
    return torch.cat(out, dim=2), state


class CausalConvolution(nn.Module):
    """Each channel becomes a weighted sum of its own last width values: depthwise, no bias.

    forward takes x [B, T, channels] and before [B, width - 1, channels], what came ahead of x
    (zeros at the start), and returns ([B, T, channels], the last width - 1 to go on from). With
    packing, no token reads another document, and what follows a row's real tokens is not kept.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        require_value(int, channels=channels, width=width)
        self.weight = nn.Parameter(torch.empty(width, channels))  # row 0 weighs the oldest value
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(
        self, x: Tensor, before: Tensor, packing: "DocumentPacking | None" = None
    ) -> tuple[Tensor, Tensor]:
        T, columns = x.shape[1], torch.cat((before, x), dim=1)  # (B, width-1+T, channels)
        width, out = before.shape[1] + 1, torch.zeros_like(x)
        for lag, row in enumerate(self.weight):
            read = columns[:, lag : lag + T]  # (B, T, channels)
            if packing is not None:
                read = read.masked_fill(packing.strangers(width - 1 - lag)[..., None], 0)
            out = out + row * read
        if packing is not None:
            return out, packing.last_columns(columns, width)
        return out, columns[:, T:].clone()  # a view would keep all of columns alive


class DocumentPacking:
    """Rows of T tokens with their real ones in front, and the document that each belongs to.

    real [B, T] bool, and document [B, T], how many documents have begun in the row up to a token.
    The padding moves behind the real tokens: nothing that these leave behind has read it.
    """

    def __init__(self, real: Tensor, document: Tensor):
        self.order = (~real).long().argsort(dim=1, stable=True)  # (B, T)
        self.real = real.gather(1, self.order)
        last = document[:, -1:].expand_as(document)  # padding ends in the document of its row
        self.document = document.gather(1, self.order).where(self.real, last)

    def front(self, x: Tensor) -> Tensor:
        """x [B, T, d] in this order, padding set to zero."""
        x = x.gather(1, self.order[..., None].expand_as(x))
        return x.masked_fill(~self.real[..., None], 0)

    def back(self, out: Tensor) -> Tensor:
        """out [B, T, d] in the order of the call."""
        return torch.zeros_like(out).scatter(1, self.order[..., None].expand_as(out), out)

    def gates(self, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Both [B, H, T]: padding neither fades nor writes, a new document forgets all."""
        padding = ~self.real[:, None]  # (B, 1, T)
        log_decay = log_decay.masked_fill(padding, 0)
        begins = self.strangers(1)[:, None]  # (B, 1, T)
        return log_decay.masked_fill(begins, -math.inf), beta.masked_fill(padding, 0)

    def strangers(self, distance: int) -> Tensor:
        """bool [B, T]: the token that far ahead is of another document than this one."""
        ahead = F.pad(self.document, (distance, 0))[:, : self.document.shape[1]]
        return ahead != self.document

    def last_columns(self, columns: Tensor, width: int) -> Tensor:
        """The last width - 1 real ones of columns [B, width-1+T, …], zero where of another
        document."""
        place = torch.arange(width - 1, device=columns.device) + self.real.sum(1, keepdim=True)
        owner = F.pad(self.document, (width - 1, 0)).gather(1, place)  # (B, width-1)
        kept = columns.gather(1, place[..., None].expand(-1, -1, columns.shape[2]))
        return kept.masked_fill((owner != self.document[:, -1:])[..., None], 0)


class StateCache:
    """What a layer keeps where no single tokens can be cut out of it: the tensors named in parts.

    next_pos, reset and truncate are as in KVCache, but truncate goes back to where the last forward
    began (that is kept too) or to 0 (ValueError for another length). No tensor is written to.
    """

    parts: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.next_pos, self._before = 0, None
        for name in self.parts:
            setattr(self, name, None)

    def update(self, length: int, **parts: Tensor | None) -> None:
        """Hold what is there length tokens later."""
        self._before = self.next_pos, {name: getattr(self, name) for name in self.parts}
        self.next_pos += length
        for name in self.parts:
            setattr(self, name, parts.get(name))

    def truncate(self, length: int) -> None:
        """Go back to where the last forward began, or to 0; next_pos changes nothing."""
        require_value(int, above=-1, length=length)
        before = self.next_pos if self._before is None else self._before[0]
        if length not in (self.next_pos, before, 0):
            raise ValueError(
                f"length must be next_pos={self.next_pos}, {before} where the last forward began, "
                f"or 0, got {length}: a recurrent state holds no single tokens to cut off"
            )
        if length == 0:
            self.reset()
        elif length != self.next_pos:
            self.next_pos, parts = self._before
            vars(self).update(parts, _before=None)

    def require_part(self, name: str, shape: tuple, dtype: torch.dtype, device: object) -> Tensor:
        """The part; ValueError where it has another shape, TypeError for dtype or device."""
        tensor = getattr(self, name)
        if tensor.shape != shape:
            came = f"got {list(tensor.shape)}"
            raise ValueError(f"kv_cache must hold {name} {list(shape)}, {came}")
        if tensor.dtype != dtype or tensor.device != device:
            came = f"got {tensor.dtype} on {tensor.device}"
            raise TypeError(f"kv_cache must hold {name} in {dtype} on {device}, {came}")
        return tensor

    def __deepcopy__(self, memo: dict) -> "StateCache":
        """One of its own, also after a forward with gradients: deepcopy takes no graph."""
        twin = memo[id(self)] = object.__new__(type(self))

        def own(value: object) -> object:
            if isinstance(value, dict):
                return {name: own(part) for name, part in value.items()}
            if isinstance(value, tuple):
                return tuple(map(own, value))
            return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value, memo)

        vars(twin).update(own(vars(self)))
        return twin


class DeltaNetState(StateCache):
    """What a GatedDeltaNet keeps in place of keys and values: no larger after 10^6 tokens.

    state [B, H, k_dim, v_dim] and columns [B, conv_width - 1, channels], what the convolution still
    reads; None when empty. real [B, next_pos] is what key_padding_mask has said, begin [B] where
    the document in hand begins; None without.
    """

    parts = "state", "columns", "real", "begin"

    def read(self, x: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """state and columns of these shapes to go on from with tokens x: zeros when empty.

        Raises ValueError where other shapes are held, TypeError for another dtype or device.
        """
        wide = at_least_float32(x[:0]).dtype
        if self.state is None:
            return x.new_zeros(shapes[0], dtype=wide), x.new_zeros(shapes[1])
        state = self.require_part("state", shapes[0], wide, x.device)
        return state, self.require_part("columns", shapes[1], x.dtype, x.device)


class GatedDeltaNet(nn.Module):
    """Linear attention that corrects its memory: a state of fixed size in place of a KV cache.

    Gated Delta Networks, arXiv:2412.06464; three layers of four in Qwen3-Next. Replaces attention
    in a block. Versus attention: no softmax and no rotation (cos and sin stay unread), order comes
    from the recurrence and a short convolution on q, k and v; a token costs the same at any length;
    at most k_dim keys a head are told apart. q and k have length 1. A head's output is normed, then
    gated by SiLU(gate_proj(x)). Value head i reads key head i // (H / n_k_heads).

    forward takes x [B, T, d] and returns (out [B, T, d], (state, columns)). It is causal. Padding
    (key_padding_mask [B, cached + T]) leaves no trace wherever it stands. mask [(B,) T, cached + T]
    may only tell documents apart, each of which starts anew (ValueError otherwise). kv_cache is a
    DeltaNetState. chunk tokens at a time are matrix products.
    """

    def __init__(self, d_model: int, n_k_heads: int, n_v_heads: int, *, k_dim: int, v_dim: int,
                 conv_width: int = 4, chunk: int = 64, norm_eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, n_k_heads=n_k_heads, n_v_heads=n_v_heads)
        require_value(int, k_dim=k_dim, v_dim=v_dim, conv_width=conv_width, chunk=chunk)
        require_value(float, norm_eps=norm_eps)
        if n_v_heads % n_k_heads:
            raise ValueError(f"n_k_heads={n_k_heads} must divide n_v_heads={n_v_heads}")
        self.d_model, self.n_v_heads, self.chunk = d_model, n_v_heads, chunk
        self.k_dim, self.v_dim, self.conv_width = k_dim, v_dim, conv_width
        self.q_proj = nn.Linear(d_model, n_k_heads * k_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_k_heads * k_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_v_heads * v_dim, bias=False)
        self.conv = CausalConvolution(2 * n_k_heads * k_dim + n_v_heads * v_dim, conv_width)
        self.beta_proj = nn.Linear(d_model, n_v_heads, bias=False)
        self.decay_proj = nn.Linear(d_model, n_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(n_v_heads).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(n_v_heads))
        self.norm = RMSNorm(v_dim, norm_eps)
        self.gate_proj = nn.Linear(d_model, n_v_heads * v_dim, bias=False)
        self.o_proj = nn.Linear(n_v_heads * v_dim, d_model, bias=False)
        self.new_cache = DeltaNetState  # what DecoderOnlyLM gives such a layer

    def forward(self, x: Tensor, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = True,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "DeltaNetState | None" = None,
                start_pos: int | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        require_recurrent(self, x, mask, key_padding_mask, causal, kv_cache, start_pos)
        (B, T, _), cache = x.shape, DeltaNetState() if kv_cache is None else kv_cache
        packing, real, begin = read_documents(x, mask, key_padding_mask, cache)
        x = x if packing is None else packing.front(x)
        mixed = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        widths = [part.shape[-1] for part in mixed]
        before = B, self.conv_width - 1, sum(widths)
        state, columns = cache.read(x, (B, self.n_v_heads, self.k_dim, self.v_dim), before)
        mixed, columns = self.conv(torch.cat(mixed, dim=-1), columns, packing)
        mixed = F.silu(mixed).to(state.dtype).split(widths, dim=-1)
        sizes = self.k_dim, self.k_dim, self.v_dim  # below: (B, heads, T, k_dim or v_dim)
        q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t, size in zip(mixed, sizes))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = (t.repeat_interleave(v.shape[1] // t.shape[1], dim=1) for t in (q, k))
        beta = self.beta_proj(x).to(v).sigmoid().mT  # (B, H, T)
        rate = self.A_log.to(v).clamp(max=80).exp()  # at inf, inf * 0 would be NaN
        log_decay = (-rate * F.softplus(self.decay_proj(x).to(v) + self.dt_bias)).mT  # (B, H, T)
        if packing is not None:
            log_decay, beta = packing.gates(log_decay, beta)
        rule = delta_rule_recurrent if T == 1 else partial(delta_rule_chunked, chunk=self.chunk)
        out, state = rule(q * self.k_dim**-0.5, k, v, log_decay, beta, state)  # (B, H, T, v_dim)
        gate = F.silu(self.gate_proj(x).to(v)).unflatten(-1, (-1, self.v_dim))
        out = (self.norm(out.transpose(1, 2)) * gate).to(x.dtype)  # (B, T, H, v_dim)
        out = self.o_proj(out.flatten(2))
        cache.update(T, state=state, columns=columns, real=real, begin=begin)
        return (out if packing is None else packing.back(out)), (state, columns)


# =============================================================================================
# Indexed sparse attention (DeepSeek-V3.2)
# =============================================================================================


class IndexedCache:
    """A KVCache of latents and one of index keys, which are as long. See IndexedSparseAttention."""

    def __init__(self, max_len: int | None = None):
        self.latent, self.index = KVCache(max_len), KVCache(max_len)

    @property
    def next_pos(self) -> int:
        return self.latent.next_pos

    def append(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        """As KVCache.append: the latents of the layer's attention."""
        return self.latent.append(k_new, v_new)

    def append_index(self, keys: Tensor) -> Tensor:
        """Put index keys [B, 1, T, index_dim] behind those of next_pos tokens; returns all."""
        self.index.truncate(self.next_pos)  # what a forward that failed has left
        return self.index.append(keys, keys[..., :0])[0]

    def truncate(self, length: int) -> None:
        """Keep the first length positions of both."""
        self.latent.truncate(length)
        self.index.truncate(length)

    def reset(self) -> None:
        """Forget everything; with max_len the memory is kept."""
        self.latent.reset()
        self.index.reset()

    def __copy__(self) -> "IndexedCache":
        return copy.deepcopy(self)  # two caches must not write into one buffer


class ChosenRows:
    """A cache to one query: it takes what is appended, and gives back the rows [B, k] only."""

    def __init__(self, cache: "IndexedCache", rows: Tensor):
        self.cache, self.rows, self.next_pos = cache, rows, cache.next_pos

    def append(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        stored = self.cache.append(k_new, v_new)  # (B, 1, S, width) each
        batch = torch.arange(len(k_new), device=k_new.device)[:, None]  # (B, 1)
        k, v = (t[batch, 0, self.rows][:, None] for t in stored)  # (B, 1, k, width)
        return k, v

    def truncate(self, length: int) -> None:
        """As IndexedCache.truncate: an attention that fails takes back what it has stored."""
        self.cache.truncate(length)


class IndexedSparseAttention(nn.Module):
    """DeepSeek Sparse Attention: an indexer chooses top_k keys a query, and attn reads only those.

    Lightning indexer of DeepSeek-V3.2 (arXiv:2512.02556), score of token s for query t
    I_ts = sum_j w_tj ReLU(q_tj k_s): small heads q from the query latent, one key k a token and
    weights w from x, signed and not normed. All heads of attn, a MultiHeadLatentAttention with a
    query latent, share what is chosen. Versus attn alone: fewer rows are read, but index_dim more
    numbers are cached a token, and the indexer still sees every key. Up to top_k tokens it is attn.

    forward is attn's; kv_cache is an IndexedCache. The choice has no gradient: the indexer learns
    from a loss on index_scores, which moves nothing else (§2.1 of the report: its input is
    detached). One token without masks reads the chosen rows, otherwise a mask hides the others.
    """

    def __init__(self, attn: nn.Module, *, n_index_heads: int, index_dim: int, top_k: int):
        super().__init__()
        require_value(int, n_index_heads=n_index_heads, top_k=top_k)
        if getattr(attn, "q_rank", None) is None:
            raise TypeError(f"attn must be latent attention with q_rank, got {type(attn).__name__}")
        require_value(int, above=attn.rope_dim - 1, index_dim=index_dim)
        self.attn, self.top_k, self.index_dim = attn, top_k, index_dim
        self.index_q = nn.Linear(attn.q_rank, n_index_heads * index_dim, bias=False)
        self.index_k = nn.Linear(attn.d_model, index_dim, bias=False)
        self.index_norm = nn.LayerNorm(index_dim, eps=1e-6)
        self.index_weight = nn.Linear(attn.d_model, n_index_heads, bias=False)
        self.new_cache = IndexedCache  # what DecoderOnlyLM gives such a layer

    def index_keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, d] and table rows [T, r] to keys [B, 1, T, index_dim], first channels turned."""
        return apply_rope(self.index_norm(self.index_k(x.detach()))[:, None], cos, sin)

    def index_scores(self, x: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, S], in at least float32: what each key is worth to each query."""
        x, latent = x.detach(), self.attn.q_norm(self.attn.q_down(x)).detach()
        q = self.index_q(latent)
        q = apply_rope(split_heads(q, self.index_dim), cos, sin)
        rows = at_least_float32(q.flatten(1, 2))  # (B, H_I*T, index_dim): no keys copied to heads
        hits = F.relu(at_least_float32(keys[:, 0]) @ rows.mT).mT  # (B, H_I*T, S)
        hits = hits.unflatten(1, q.shape[1:3])  # (B, H_I, T, S)
        weight = at_least_float32(self.index_weight(x)).mT * (q.shape[1] * self.index_dim) ** -0.5
        return (weight[..., None] * hits).sum(dim=1)

    def forward(self, x: Tensor, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = False,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "IndexedCache | None" = None, start_pos: int | None = None,
                choice: list | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """choice, an empty list, gets what was chosen: [B, T, top_k], or None where that is all."""
        keep, rows = require_indexed(self, x, mask, key_padding_mask, causal, cos, sin, kv_cache,
                                     start_pos)  # fmt: skip
        keys = self.index_keys(x, *rows)  # (B, 1, T, index_dim)
        keys = keys if kv_cache is None else kv_cache.append_index(keys)  # (B, 1, S, index_dim)
        chosen = None
        if keys.shape[2] > self.top_k:
            scores = self.index_scores(x, keys, *rows)  # (B, T, S)
            if keep is not None:
                scores = scores.masked_fill(~keep, -math.inf)
            chosen = scores.topk(self.top_k, dim=-1).indices  # (B, T, top_k)
        if choice is not None:
            choice.append(chosen)
        options = {"cos": cos, "sin": sin, "start_pos": start_pos}
        return attend_chosen(self.attn, x, chosen, keep, kv_cache, keys.shape[2], options)


def attend_chosen(
    attn: nn.Module, x: Tensor, chosen: Tensor | None, keep: Tensor | None,
    kv_cache: object, S: int, options: dict,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """attn(x) over the chosen [B, T, top_k] of S keys, all for None, that keep [B, T, S] allows."""
    if chosen is None:
        return attn(x, mask=keep, kv_cache=kv_cache, **options)
    if x.shape[1] == 1 and keep is None:
        return attn(x, kv_cache=ChosenRows(kv_cache, chosen[:, 0]), **options)
    allowed = torch.zeros(*chosen.shape[:2], S, dtype=torch.bool, device=x.device)
    allowed = allowed.scatter(-1, chosen, True)
    allowed = allowed if keep is None else allowed & keep  # a query may have fewer than top_k
    return attn(x, mask=allowed, kv_cache=kv_cache, **options)


# =============================================================================================
# Hyper-connections (DeepSeek-V4)
# =============================================================================================


def sinkhorn(logits: Tensor, n_rounds: int = 20, eps: float = 1e-6) -> Tensor:
    """Logits [..., n, n] to nearly doubly stochastic matrices: rows and columns sum to 1.

    A softmax over rows, then columns and rows are divided by their sums in turn (Sinkhorn-Knopp).
    It ends on columns, which are exact up to eps; rows come close with the rounds.
    """
    matrix = logits.softmax(dim=-1) + eps
    for i in range(n_rounds):
        if i > 0:
            matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


class HyperConnection(nn.Module):
    """Several residual streams a token in place of one: X'_k = post_k f(h) + sum_j mix_jk X_j.

    h = sum_i pre_i X_i. Manifold-constrained hyper-connections of DeepSeek-V4 (mHC,
    arXiv:2512.24880), unconstrained before that in arXiv:2409.19606. Replaces the x + f(x) of one
    sublayer, so twice in a block. pre in (0, 1), post in (0, 2) and mix are read from the normed
    streams. mix is doubly stochastic (sinkhorn): a product of such matrices over any depth is one
    too, and neither blows the streams up nor loses their mean. Sublayers stay d wide, and nothing
    more is cached.

    forward takes streams [B, T, n, d] and f, which maps [B, T, d] to as much: masks and caches are
    f's own business. With scale 0 and equal streams each stream is the plain residual.
    """

    def __init__(self, d_model: int, n_streams: int = 4, *, n_rounds: int = 20, eps: float = 1e-6,
                 norm_eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, n_rounds=n_rounds)
        require_value(int, above=1, n_streams=n_streams)
        require_value(float, eps=eps, norm_eps=norm_eps)
        self.d_model, self.n_streams, self.n_rounds = d_model, n_streams, n_rounds
        self.eps, self.norm_eps = eps, norm_eps
        self.widths = n_streams, n_streams, n_streams**2  # of pre, post and mix
        self.proj = nn.Linear(n_streams * d_model, sum(self.widths), bias=False)
        self.scale = nn.Parameter(torch.full((3,), 0.01))  # how far the streams have a say
        pre, post = torch.full((n_streams,), -math.log(n_streams - 1)), torch.zeros(n_streams)
        mix = 4 * torch.eye(n_streams).flatten()  # 1/n of each stream in, 1 out, and few mixed
        self.bias = nn.Parameter(torch.cat((pre, post, mix)))

    def forward(self, streams: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        shape = "B", "T", self.n_streams, self.d_model
        B, T, _, _ = require_tensor("streams", streams, *shape, layer=self.proj)
        pre, post, mix = self.weights(streams)
        h = (pre[..., None] * streams).sum(dim=2).to(streams.dtype)  # (B, T, d)
        out = f(h)
        require_tensor("f(h)", out, B, T, self.d_model)
        streams = mix.mT @ streams.to(mix) + post[..., None] * out[:, :, None]
        return streams.to(out.dtype)  # (B, T, n, d)

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [B, T, n], post [B, T, n] and mix [B, T, n, n] (from, to), in at least float32."""
        wide = at_least_float32(streams.flatten(2))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=self.norm_eps)  # (B, T, n*d)
        parts = self.proj(normed.to(streams.dtype)).to(wide).split(self.widths, dim=-1)
        biases = self.bias.split(self.widths)
        pre, post, mix = (a * part + b for a, part, b in zip(self.scale, parts, biases))
        mix = sinkhorn(mix.unflatten(-1, (self.n_streams, -1)), self.n_rounds, self.eps)
        return pre.sigmoid() + self.eps, 2 * post.sigmoid(), mix


class StreamCollapse(nn.Module):
    """sum_i pre_i X_i, [B, T, n, d] to [B, T, d]: DeepSeek-V4's last step before the final norm."""

    def __init__(self, d_model: int, n_streams: int = 4, *, eps: float = 1e-6,
                 norm_eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model)
        require_value(int, above=1, n_streams=n_streams)
        require_value(float, eps=eps, norm_eps=norm_eps)
        self.d_model, self.n_streams, self.eps, self.norm_eps = d_model, n_streams, eps, norm_eps
        self.proj = nn.Linear(n_streams * d_model, n_streams, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 0.01))
        self.bias = nn.Parameter(torch.full((n_streams,), -math.log(n_streams - 1)))

    def forward(self, streams: Tensor) -> Tensor:
        shape = "B", "T", self.n_streams, self.d_model
        require_tensor("streams", streams, *shape, layer=self.proj)
        wide = at_least_float32(streams.flatten(2))
        normed = F.rms_norm(wide, wide.shape[-1:], eps=self.norm_eps)  # (B, T, n*d)
        logits = self.scale * self.proj(normed.to(streams.dtype)).to(wide) + self.bias
        pre = logits.sigmoid() + self.eps  # (B, T, n)
        return (pre[..., None] * streams).sum(dim=2).to(streams.dtype)


class HyperConnectedBlock(nn.Module):
    """ModernDecoderBlock on several streams: its two residual additions are HyperConnections.

    forward takes and returns streams [B, T, n, d]; x [B, T, d], in the first block of a stack, is
    copied to all of them. attn_streams and ffn_streams replace the connections. choice goes to
    attn where given, ids [B, T] to an ffn that has takes_ids. In DecoderOnlyLM, final_norm becomes
    nn.Sequential(StreamCollapse(d, n), final_norm).
    """

    def __init__(self, d_model: int = 96, n_q_heads: int = 8, n_kv_heads: int = 2,
                 d_ff: int = 256, *, n_streams: int = 4, attn: nn.Module | None = None,
                 ffn: nn.Module | None = None, attn_streams: nn.Module | None = None,
                 ffn_streams: nn.Module | None = None, eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, optional=True, attn=attn, ffn=ffn)
        require_value(int, above=1, n_streams=n_streams)
        if attn is None:
            attn = MultiHeadAttention(d_model, n_q_heads, n_kv_heads, rope=True)
        self.attn, self.ffn = attn, GatedFFN(d_model, d_ff) if ffn is None else ffn
        self.d_model, self.n_streams = d_model, n_streams
        self.norm1, self.norm2 = RMSNorm(d_model, eps), RMSNorm(d_model, eps)
        if attn_streams is None:
            attn_streams = HyperConnection(d_model, n_streams)
        if ffn_streams is None:
            ffn_streams = HyperConnection(d_model, n_streams)
        self.attn_streams, self.ffn_streams = attn_streams, ffn_streams

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, *,
                key_padding_mask: Tensor | None = None, kv_cache: "KVCache | None" = None,
                start_pos: int | None = None, choice: list | None = None,
                ids: Tensor | None = None) -> Tensor:  # fmt: skip
        masks = {"mask": mask, "causal": mask is None, "key_padding_mask": key_padding_mask}
        position = {"cos": cos, "sin": sin, "kv_cache": kv_cache, "start_pos": start_pos}
        shared = {} if choice is None else {"choice": choice}
        tokens = {"ids": ids} if getattr(self.ffn, "takes_ids", False) else {}
        if isinstance(x, Tensor) and x.dim() == 3:
            x = x[:, :, None].expand(-1, -1, self.n_streams, -1)  # (B, T, n, d)
        x = self.attn_streams(
            x, lambda h: self.attn(self.norm1(h), **masks, **position, **shared)[0]
        )
        return self.ffn_streams(x, lambda h: self.ffn(self.norm2(h), **tokens))


# =============================================================================================
# Argument checks
# =============================================================================================


def require_recurrent(
    layer: "GatedDeltaNet",
    x: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    kv_cache: "DeltaNetState | None",
    start_pos: int | None,
) -> None:
    """Refuse what a recurrence cannot take."""
    B, T, _ = require_tensor("x", x, "B", "T", layer.d_model, layer=layer.q_proj)
    if mask is None and not causal:
        raise ValueError(f"causal must be True for a recurrence, got {causal}")
    if kv_cache is not None and not isinstance(kv_cache, DeltaNetState):
        raise TypeError(f"kv_cache must be a DeltaNetState, got {type(kv_cache).__name__}")
    if kv_cache is not None:
        require_forward_pass()
    cached = 0 if kv_cache is None else kv_cache.next_pos
    if start_pos is not None:
        require_value(int, above=-1, start_pos=start_pos)
        if kv_cache is not None and start_pos != cached:
            raise ValueError(f"start_pos must be next_pos={cached}, got {start_pos}")
    combined_mask(mask, key_padding_mask, B, T, cached + T)


def read_documents(
    x: Tensor, mask: Tensor | None, key_padding_mask: Tensor | None, cache: "DeltaNetState"
) -> tuple["DocumentPacking | None", Tensor | None, Tensor | None]:
    """How the rows of x are packed, or None; and what the cache has to know of it afterwards.

    Raises ValueError for a mask that is not causal within documents, or that hides cached tokens
    which the state has read.
    """
    (B, T, _), start = x.shape, cache.next_pos
    real, begin = key_padding_mask, cache.begin
    if real is not None or cache.real is not None:
        told = x.new_ones(B, start, dtype=torch.bool) if cache.real is None else cache.real
        real = F.pad(told, (0, T), value=True) if real is None else real
        if not torch.equal(real[:, :start], told):
            raise ValueError("key_padding_mask must hide of the cached tokens what it has hidden")
    document = torch.zeros(B, T, dtype=torch.long, device=x.device)
    if mask is None and begin is not None and begin.any():
        raise ValueError("mask must tell apart the documents that kv_cache has read, got None")
    if mask is not None:
        ahead = mask.diagonal(start - 1, -2, -1)  # does a token see the one ahead of it?
        begins = ~F.pad(ahead, (T - ahead.shape[-1], 0), value=True).expand(B, T)
        keys = torch.arange(start + T, device=x.device)  # (S)
        since = (keys[start:] * begins).cummax(dim=1).values  # (B, T)
        since = since if begin is None else torch.maximum(since, begin[:, None])
        seen = (keys >= since[..., None]) & (keys <= keys[start:, None])  # (B, T, S)
        if not torch.equal(mask.expand_as(seen), seen):
            raise ValueError("mask must be causal within documents for a recurrence, got another")
        document, begin = begins.cumsum(dim=1), since[:, -1] if T else begin
    if T == 0 or (mask is None and real is None):
        return None, real, begin
    new = torch.ones_like(document, dtype=torch.bool) if real is None else real[:, start:]
    return DocumentPacking(new, document), real, begin


def require_indexed(
    layer: "IndexedSparseAttention",
    x: Tensor,
    mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    kv_cache: "IndexedCache | None",
    start_pos: int | None,
) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
    """Refuse what does not fit, before the cache changes; returns what all masks allow, bool
    [B, T, S] or None, and the table rows of x."""
    B, T, _ = require_tensor("x", x, "B", "T", layer.attn.d_model, layer=layer.attn.kv_down)
    wanted = getattr(layer, "new_cache", KVCache)
    if kv_cache is not None and not isinstance(kv_cache, wanted):
        came = type(kv_cache).__name__
        raise TypeError(f"kv_cache must be of type {wanted.__name__}, got {came}")
    start = start_position(start_pos, kv_cache)
    S = T if kv_cache is None else start + T
    rows = table_rows(cos, sin, start, T)
    require_tensor("cos", rows[0], T, layer.attn.rope_dim)
    keep = combined_mask(mask, key_padding_mask, B, T, S)
    if causal and T > 1:  # a single query comes last and sees all
        positions = torch.arange(S, device=x.device)
        past = build_causal_mask(positions[S - T :], positions)  # (T, S)
        keep = past if keep is None else keep & past
    return None if keep is None else keep.expand(B, 1, T, S)[:, 0], rows


# =============================================================================================
# What the proofs compare with: formulas in float64, one token and one head at a time
# =============================================================================================


def reference_sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def reference_silu(x: Tensor) -> Tensor:
    return x * reference_sigmoid(x)


def reference_gated(layer: OutputGatedAttention, x: Tensor, keep: Tensor, r: int) -> Tensor:
    """Output-gated MultiHeadAttention that turns r channels, each head through its own columns."""
    attn = layer.attn
    q = tb.reference_norm(attn.q_norm, tb.reference_heads(x, attn.q_proj, attn.head_dim))
    k = tb.reference_norm(attn.k_norm, tb.reference_heads(x, attn.k_proj, attn.head_dim))
    v = tb.reference_heads(x, attn.v_proj, attn.head_dim)
    heads = tb.reference_attention(tb.reference_turn(q, r), tb.reference_turn(k, r), v, keep)
    gates = reference_sigmoid(tb.reference_heads(x, layer.gate_proj, attn.head_dim))
    return tb.reference_output(heads * gates, layer.o_proj)


def reference_delta_net(layer: GatedDeltaNet, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One sample [T, d], and the state of each head: S = alpha (I - beta k k^T) S + beta k v^T."""
    T, width, rows = len(x), len(layer.conv.weight), []
    raw = torch.cat([x @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj)], dim=-1)
    ahead = torch.cat((raw.new_zeros(width - 1, raw.shape[1]), raw))
    mixed = [sum(layer.conv.weight[i] * ahead[t + i] for i in range(width)) for t in range(T)]
    H, d_k, d_v = layer.n_v_heads, layer.k_dim, layer.v_dim
    n_k = layer.q_proj.out_features // d_k
    states = [x.new_zeros(d_k, d_v) for _ in range(H)]
    for t in range(T):
        q, k, v = reference_silu(mixed[t]).split((n_k * d_k, n_k * d_k, H * d_v))
        gate, out = x[t] @ layer.gate_proj.weight.T, []
        for h in range(H):
            key = slice(h // (H // n_k) * d_k, h // (H // n_k) * d_k + d_k)
            value = slice(h * d_v, h * d_v + d_v)
            q_h, k_h = (part[key] / (part[key] @ part[key] + 1e-6) ** 0.5 for part in (q, k))
            beta = reference_sigmoid(layer.beta_proj.weight[h] @ x[t])
            step = layer.decay_proj.weight[h] @ x[t] + layer.dt_bias[h]
            alpha = torch.exp(-torch.exp(layer.A_log[h]) * torch.log(1 + torch.exp(step)))
            erase = torch.eye(d_k).to(x) - beta * torch.outer(k_h, k_h)
            states[h] = alpha * erase @ states[h] + beta * torch.outer(k_h, v[value])
            read = states[h].T @ q_h / d_k**0.5
            out.append(tb.reference_norm(layer.norm, read) * reference_silu(gate[value]))
        rows.append(torch.cat(out) @ layer.o_proj.weight.T)
    return torch.stack(rows), states


def reference_chosen(layer: IndexedSparseAttention, x: Tensor, keep: Tensor) -> Tensor:
    """bool [B, T, S]: for each query the top_k allowed keys by a score summed head by head."""
    attn, r = layer.attn, layer.attn.rope_dim
    latent = tb.reference_norm(attn.q_norm, x @ attn.q_down.weight.T)
    q = tb.reference_turn(tb.reference_heads(latent, layer.index_q, layer.index_dim), r)
    k = tb.reference_norm(layer.index_norm, x @ layer.index_k.weight.T)
    k, weight = tb.reference_turn(k, r), x @ layer.index_weight.weight.T
    chosen = torch.zeros(keep.shape, dtype=torch.bool)
    for b, t in itertools.product(*map(range, keep.shape[:2])):
        scores = {
            s: sum(weight[b, t, j] * max(q[b, j, t] @ k[b, s], 0) for j in range(q.shape[1])).item()
            for s in range(keep.shape[2])
            if keep[b, t, s]
        }
        for s in sorted(scores, key=scores.get, reverse=True)[: layer.top_k]:
            chosen[b, t, s] = True
    return chosen


def reference_streams(layer: HyperConnection, streams: Tensor, f: Callable) -> Tensor:
    """A HyperConnection token by token and stream by stream, from the raw weights."""
    n, out = layer.n_streams, torch.empty_like(streams)
    h, given = torch.empty_like(streams[:, :, 0]), {}
    for b, t in itertools.product(*map(range, streams.shape[:2])):
        z = streams[b, t].flatten()
        z = layer.proj.weight.detach() @ z / ((z @ z) / len(z) + layer.norm_eps) ** 0.5
        a, c = layer.scale.tolist(), layer.bias.detach()
        pre = [reference_sigmoid(a[0] * z[i] + c[i]) + layer.eps for i in range(n)]
        post = [2 * reference_sigmoid(a[1] * z[n + i] + c[n + i]) for i in range(n)]
        cells = range(2 * n, 2 * n + n * n)
        odds = [[math.exp(a[2] * z[i] + c[i]) for i in cells[j * n : j * n + n]] for j in range(n)]
        mix = [[odd / sum(row) + layer.eps for odd in row] for row in odds]
        for number in range(2 * layer.n_rounds - 1):  # columns, rows, columns, ...
            lines = mix if number % 2 else [list(column) for column in zip(*mix)]
            lines = [[cell / (sum(line) + layer.eps) for cell in line] for line in lines]
            mix = lines if number % 2 else [list(row) for row in zip(*lines)]
        h[b, t] = sum(pre[i] * streams[b, t, i] for i in range(n))
        given[b, t] = post, mix
    y = f(h)
    for (b, t), (post, mix) in given.items():
        for k in range(n):
            mixed = sum(mix[j][k] * streams[b, t, j] for j in range(n))
            out[b, t, k] = post[k] * y[b, t] + mixed
    return out


def check_chunks(layer: Callable, x: Tensor, cache: object, *splits: tuple[int, ...]) -> float:
    """The largest difference between one pass over x [B, T, ...] and passes over parts of it."""
    full, gaps = layer(x), []
    for split in splits:
        with torch.no_grad():
            parts = [layer(part, kv_cache=cache) for part in x.split(split, dim=1)]
        gaps.append(tb.check_gap(torch.cat(parts, dim=1), full))
        cache.reset()
    return max(gaps)


def check_gradients(module: nn.Module, run: Callable, x: Tensor, *idle: str) -> bool:
    """Gradients of run(x) against differences, for x and every parameter; all but idle get some."""
    names, weights = zip(*module.named_parameters())
    for weight in weights:
        weight.grad = None

    def call(x: Tensor, *_weights: Tensor) -> Tensor:
        return run(x)  # gradcheck moves the weights in place

    run(x).square().sum().backward()
    alive = {name for name, w in zip(names, weights) if w.grad is not None and w.grad.any()}
    still = {name for name in names if name.startswith(idle)}
    x = x.detach().requires_grad_()
    options = {"fast_mode": True, "atol": 1e-9, "rtol": 1e-6, "raise_exception": False}
    right = torch.autograd.gradcheck(call, (x, *weights), **options)
    return right and alive == set(names) - still


def check_refusals(*rows: tuple) -> bool:
    """Each row: the error, the call, and words of its message."""
    return all(tb.check_raises(error, call, *words) for error, call, *words in rows)


# =============================================================================================
# Proofs
# =============================================================================================


@tb.check_seeded(1)
def demo_A01(_device: str = "cpu") -> tuple[bool, str]:
    """Output-gated attention is its formula, drops into a block and decodes with a KVCache."""
    cos, sin = tb.build_rope_cache(8, 4)
    layer = OutputGatedAttention(MultiHeadAttention(12, 4, 2, head_dim=6, rope=True, qk_norm=True))
    tb.check_randomized(layer)
    x, padding = tb.check_draw(2, 5, 12), torch.ones(2, 5, dtype=torch.bool)
    padding[1, :2] = False
    keep = (tb.reference_causal(5) & padding[:, None])[:, None]
    given = {"key_padding_mask": padding, "causal": True, "cos": cos, "sin": sin}
    gap = tb.check_gap(layer(x, **given)[0], reference_gated(layer, x, keep, 4))
    hand = OutputGatedAttention(MultiHeadAttention(2, 1)).double()
    for part, rows in (
        (hand.attn.v_proj, [[1.0, 0.0], [0.0, 1.0]]),
        (hand.o_proj, [[1.0, 0.0], [0.0, 1.0]]),
        (hand.gate_proj, [[0.0, 0.0], [0.0, -math.log(3)]]),
    ):
        part.weight.data = torch.tensor(rows, dtype=torch.float64)
    gated = hand(torch.tensor([[[2.0, -1.0]]], dtype=torch.float64))[0].flatten().tolist()
    block = tb.check_randomized(ModernDecoderBlock(12, d_ff=8, attn=layer))
    cache = KVCache()
    chunks = check_chunks(partial(block, cos=cos, sin=sin), x, cache, (2, 2, 1), (1,) * 5, (5,))
    sizes = {"kv_rank": 6, "rope_dim": 4, "nope_dim": 3, "v_dim": 5}
    latent = OutputGatedAttention(MultiHeadLatentAttention(12, 2, **sizes)).double()
    tokens = partial(latent, causal=True, cos=cos, sin=sin)
    loose = check_chunks(lambda x, **at: tokens(x, **at)[0], x, cache, (3, 1, 1))
    block(x, cos, sin, kv_cache=cache)
    return tb.check_claims(
        f"gated attention vs its formula, GQA with padding, 4 of 6 channels turned: max|Δ|="
        f"{gap:.2e}; by hand (2, -1) gated by σ(0, ln 3): ({gated[0]:.4f}, {gated[1]:.4f}) "
        f"(expect 1.0, -0.75); in ModernDecoderBlock chunks vs one pass: max|Δ|={chunks:.2e}, "
        f"around latent attention {loose:.2e}; cache holds {cache.k.shape[1]} heads of "
        f"{cache.k.shape[3]} and nothing else",
        formula=gap < 1e-11,
        by_hand=abs(gated[0] - 1) + abs(gated[1] + 0.75) < 1e-12,
        chunks=max(chunks, loose) < 1e-11,
        cache=cache.k.shape == cache.v.shape == (2, 2, 5, 6),
        gradients=check_gradients(layer, lambda x: layer(x, **given)[0], x),
        empty=[
            layer(x[:B, :T], causal=True, cos=cos, sin=sin)[0].shape for B, T in ((0, 5), (2, 0))
        ]
        == [(0, 5, 12), (2, 0, 12)],
        refusals=check_refusals(
            (TypeError, lambda: OutputGatedAttention(nn.Linear(2, 2)), "attn", "Linear"),
            (TypeError, lambda: OutputGatedAttention(layer.attn), "attn", "o_proj"),
            (ValueError, lambda: layer(x[..., :6], cos=cos, sin=sin), "x", 12),
            (TypeError, lambda: layer(x.float(), cos=cos, sin=sin), "x", "float64", "float32"),
            (ValueError, lambda: layer(x), "cos", None),
        ),
    )


def check_delta_layer() -> GatedDeltaNet:
    """Two key heads for four value heads, widths that all differ, and decays that are felt."""
    layer = GatedDeltaNet(12, 2, 4, k_dim=3, v_dim=5, conv_width=3, chunk=4, norm_eps=1e-3)
    return tb.check_randomized(layer)


@tb.check_seeded(2)
def demo_A02(_device: str = "cpu") -> tuple[bool, str]:
    """Gated DeltaNet: recurrence, chunks and formula agree; a state of fixed size decodes."""
    rows = [(1, 0, 4, 1, 1), (1, 0, 2, 0.5, 0.5), (0.6, 0.8, 1, 0.5, 1)]  # k, v, alpha, beta
    told = torch.tensor(rows, dtype=torch.float64)[None, None]  # (1, 1, 3, 5)
    k, v, decay, beta = told[..., :2], told[..., 2:3], told[..., 3].log(), told[..., 4]
    zero = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    read, state = delta_rule_recurrent(k, k, v, decay, beta, zero)
    by_hand = [*state.flatten().tolist(), read[0, 0, 2, 0].item()]
    inputs = (
        tb.check_draw(2, 3, 11, 4),  # q
        F.normalize(tb.check_draw(2, 3, 11, 4), dim=-1),  # k
        tb.check_draw(2, 3, 11, 5),  # v
        -tb.check_draw(2, 3, 11).exp(),  # log_decay
        tb.check_draw(2, 3, 11).sigmoid(),  # beta
        tb.check_draw(2, 3, 4, 5),  # state
    )
    slow = delta_rule_recurrent(*inputs)
    forms = [delta_rule_chunked(*inputs, chunk) for chunk in (1, 4, 64)]
    gap = max(tb.check_gap(a, b) for form in forms for a, b in zip(form, slow))
    log_decay = torch.full((1, 1, 200), -20.0).double()
    log_decay[0, 0, [0, 70, 71, 128]] = -math.inf
    log_decay.requires_grad_()
    long = (
        tb.check_draw(1, 1, 200, 2),
        F.normalize(tb.check_draw(1, 1, 200, 2), dim=-1),
        tb.check_draw(1, 1, 200, 3),
        log_decay,
        torch.ones(1, 1, 200).double(),
        torch.zeros(1, 1, 2, 3).double(),
    )
    fast = delta_rule_chunked(*long)[0]  # e^-20 a step, and 0 at four of them
    fast.sum().backward()

    layer, x = check_delta_layer(), tb.check_draw(2, 9, 12)
    expected, states = zip(*(reference_delta_net(layer, row) for row in x))
    out, (state, _) = layer(x)
    formula = tb.check_gap(out, torch.stack(expected))
    kept = tb.check_gap(state, torch.stack([torch.stack(heads) for heads in states]))
    cache = layer.new_cache()
    splits = (1,) * 9, (4, 1, 4), (2, 7), (3, 1, 1, 4)
    chunks = check_chunks(lambda x, **at: layer(x, **at)[0], x, cache, *splits)
    padded = torch.cat((torch.full((2, 3, 12), math.nan).to(x), x), dim=1)
    real = torch.arange(12).expand(2, -1) >= 3
    with torch.no_grad():
        parts = [
            layer(part, kv_cache=cache, key_padding_mask=real[:, :end])[0]
            for part, end in zip(padded.split((2, 9, 1), dim=1), (2, 11, 12))
        ]
    left = tb.check_gap(torch.cat(parts, dim=1)[:, 3:], out)
    sizes = []
    cache.reset()
    for _ in range(2):
        layer(x, kv_cache=cache)
        tensors = [cache.state, cache.columns]
        sizes.append(sum(t.untyped_storage().nbytes() for t in tensors))
    blank = tb.check_draw(2, 0, 12)
    claims = check_delta_state(layer, x) | check_delta_packing(layer, x)
    half = check_delta_layer().bfloat16()
    return tb.check_claims(
        f"delta rule by hand: state ({by_hand[0]:.2f}, {by_hand[1]:.2f}) (expect 1.24, 0.32), read "
        f"{by_hand[2]:.2f} (expect 1.00); chunked vs recurrent: max|Δ|={gap:.2e}; layer vs its "
        f"formula: max|Δ|={formula:.2e}; in any chunks vs one pass: max|Δ|={chunks:.2e}; left "
        f"padding of NaN leaves {left:.2e}; state {sizes[0]} bytes after 9 tokens, {sizes[1]} "
        f"after 18",
        by_hand=max(abs(a - b) for a, b in zip(by_hand, (1.24, 0.32, 1.0))) < 1e-12,
        forms=gap < 1e-11,
        fading=tb.check_close(fast, delta_rule_recurrent(*long)[0])
        and bool(log_decay.grad.isfinite().all()),
        formula=max(formula, kept) < 1e-11,
        chunks=chunks < 1e-11,
        padding=left < 1e-11,
        fixed_size=sizes == [2 * (4 * 3 * 5 + 2 * 32) * 8] * 2,
        gradients=check_gradients(layer, lambda x: layer(x)[0], x),
        empty=layer(x[:0])[0].shape == (0, 9, 12)
        and layer(blank)[0].shape == (2, 0, 12)
        and not layer(blank)[1][0].any(),
        half=half(x.bfloat16())[1][0].dtype == torch.float32,
        start=bool((check_delta_layer().A_log.exp() > 0).all())
        and 0.01 <= GatedDeltaNet(4, 2, 400, k_dim=1, v_dim=1).A_log.exp().min() < 0.5
        and 15 < GatedDeltaNet(4, 2, 400, k_dim=1, v_dim=1).A_log.exp().max() <= 16,
        **claims,
    )


def check_delta_state(layer: GatedDeltaNet, x: Tensor) -> dict[str, bool]:
    """truncate of a state, and what the layer refuses, after which the state is what it was."""
    cache, other = layer.new_cache(), layer.new_cache()
    with torch.no_grad():
        layer(x[:, :4], kv_cache=cache)
        first = cache.state
        layer(x[:, 4:6], kv_cache=cache)
        cache.truncate(6)
        middle = tb.check_raises(ValueError, lambda: cache.truncate(5), "length", 6, 4, 5)
        held = cache.next_pos, cache.state
        cache.truncate(4)
        back = cache.next_pos == 4 and cache.state is first
        again = layer(x[:, 4:], kv_cache=cache)[0]
        cache.truncate(4)
        once = tb.check_raises(ValueError, lambda: cache.truncate(2), "length", 2)
        cache.truncate(0)
    padding = torch.ones(2, 9, dtype=torch.bool)
    mask = torch.ones(9, 9, dtype=torch.bool)
    layer(x, kv_cache=other)
    refused = check_refusals(
        (ValueError, lambda: layer(x, mask=mask, kv_cache=other), "mask", "[9, 9]"),
        (ValueError, lambda: layer(x, mask=mask), "mask", "causal"),
        (ValueError, lambda: layer(x, causal=False, kv_cache=other), "causal", False),
        (TypeError, lambda: layer(x, kv_cache=KVCache()), "kv_cache", "DeltaNetState", "KVCache"),
        (ValueError, lambda: layer(x[:1], kv_cache=other), "kv_cache", "[1, 4, 3, 5]"),
        (TypeError, lambda: check_delta_layer().float()(x.float(), kv_cache=other), "float64"),
        (ValueError, lambda: layer(x, kv_cache=other, start_pos=3), "start_pos", 9, 3),
        (ValueError, lambda: layer(x, key_padding_mask=padding, kv_cache=other), "[2, 9]", 18),
        (TypeError, lambda: layer(x, key_padding_mask=padding.long()), "key_padding_mask", "int64"),
        (ValueError, lambda: layer(x[..., :7]), "x", 12, 7),
        (TypeError, lambda: layer(x.float()), "x", "float64", "float32"),
        (ValueError, lambda: GatedDeltaNet(12, 3, 4, k_dim=3, v_dim=5), "n_k_heads", 3, 4),
        (ValueError, lambda: GatedDeltaNet(12, 2, 4, k_dim=0, v_dim=5), "k_dim", 0),
        (TypeError, lambda: GatedDeltaNet(12, 2, 4, k_dim=3, v_dim=5.0), "v_dim", 5.0),
        (ValueError, lambda: GatedDeltaNet(12, 2, 4, k_dim=3, v_dim=5, chunk=0), "chunk", 0),
        (ValueError, lambda: other.truncate(-1), "length", -1),
    )
    return {
        "truncate": middle and once and held[0] == 6 and held[1] is not first and back,
        "truncate to 0": (cache.next_pos, cache.state, cache.columns) == (0, None, None),
        "goes on from there": tb.check_close(again, layer(x)[0][:, 4:]),
        "refusals": refused and other.next_pos == 9,
    }


def check_delta_packing(layer: GatedDeltaNet, x: Tensor) -> dict[str, bool]:
    """Padding anywhere and several documents in a row: each part as it is alone."""
    real = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 1, 1], [1, 1, 0, 1, 1, 1, 1, 0, 0]]).bool()
    number = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 2, 2, 2]])
    documents = (number[:, :, None] == number[:, None]) & tb.reference_causal(9)
    holes = documents[:1].clone()
    holes[0, 8, 6] = False
    alone = torch.zeros_like(x)
    for b, n in itertools.product(range(2), range(3)):
        own = real[b] & (number[b] == n)
        alone[b, own] = layer(x[b, own][None])[0][0]
    given, gaps, after = x.masked_fill(~real[..., None], math.nan), [], []
    for split in ((9,), (4, 5), (3, 1, 2, 3), (1,) * 9):
        cache, parts, end = layer.new_cache(), [], 0
        with torch.no_grad():
            for part in given.split(split, dim=1):
                start, end = end, end + part.shape[1]
                options = {"mask": documents[:, start:end, :end], "kv_cache": cache}
                parts.append(layer(part, key_padding_mask=real[:, :end], **options)[0])
        gaps.append(tb.check_gap(torch.cat(parts, dim=1)[real], alone[real]))
        after.append(torch.cat((cache.state[1].flatten(), cache.columns[1].flatten())))
    with torch.no_grad():
        last = layer(x[1:, 6:7])[1]
    last = torch.cat([part.flatten() for part in last])
    hidden = real.clone()
    hidden[0, 0] = False
    more, mask = torch.ones(2, 10, dtype=torch.bool), F.pad(documents[:, -1:], (0, 1), value=True)
    more[:, :9] = real

    def step(**options: Tensor) -> Callable:
        return lambda: layer(x[:, :1], kv_cache=cache, **options)

    copied = layer.new_cache()
    layer(x, kv_cache=copied)  # with a graph behind it
    twin = copy.deepcopy(copied)
    own = twin.state.data_ptr() != copied.state.data_ptr() and twin.next_pos == 9
    drawn = tb.check_draw(2, 3, 12).requires_grad_()
    run = partial(layer, kv_cache=layer.new_cache())
    again = checkpoint(lambda x: run(x)[0], drawn, use_reentrant=False)
    fixed = check_delta_layer()
    nn.init.constant_(fixed.A_log, 1000.0)
    fixed(x)[0].sum().backward()
    return {
        "packing": max(gaps) < 1e-11 and all(tb.check_close(state, last) for state in after),
        "refused packing": check_refusals(
            (ValueError, lambda: layer(x[:1], mask=holes), "mask", "causal"),
            (ValueError, lambda: layer(x, key_padding_mask=real[:, :4]), "[2, 4]", 9),
            (ValueError, step(mask=mask, key_padding_mask=F.pad(hidden, (0, 1))), "padding_mask"),
            (ValueError, step(mask=tb.reference_causal(10)[9:], key_padding_mask=more), "mask"),
            (ValueError, step(key_padding_mask=more), "mask", None),
        ),
        "goes on packed": step(mask=mask, key_padding_mask=more)()[0].shape == (2, 1, 12),
        "copied": own and tb.check_close(twin.state, copied.state),
        "recomputed": tb.check_raises(RuntimeError, again.sum().backward, "backward"),
        "forgets at once": all(bool(p.grad.isfinite().all()) for p in fixed.parameters()),
    }


def check_indexed_layer(top_k: int) -> IndexedSparseAttention:
    sizes = {"kv_rank": 6, "rope_dim": 4, "nope_dim": 3, "v_dim": 5, "q_rank": 7}
    attn = MultiHeadLatentAttention(12, 2, **sizes)
    layer = IndexedSparseAttention(attn, n_index_heads=8, index_dim=6, top_k=top_k)
    return tb.check_randomized(layer)


@tb.check_seeded(3)
def demo_A03(_device: str = "cpu") -> tuple[bool, str]:
    """Indexed sparse attention reads the chosen keys only; with top_k >= length it is dense."""
    cos, sin = tb.build_rope_cache(16, 4)
    at, rows = {"cos": cos, "sin": sin}, (cos[:9], sin[:9])
    layer, x = check_indexed_layer(top_k=3), tb.check_draw(2, 9, 12)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :4] = False
    past = tb.reference_causal(9).expand(2, -1, -1)
    chosen = reference_chosen(layer, x, past)
    gap = tb.check_gap(
        layer(x, causal=True, **at)[0], tb.reference_layer(layer.attn, x, chosen[:, None])[0]
    )
    padded = reference_chosen(layer, x, past & real[:, None])
    expected = tb.reference_layer(layer.attn, x, padded[:, None])[0]
    seen = {"causal": True, "key_padding_mask": real, **at}
    left = tb.check_gap(layer(x, **seen)[0], expected)
    masked = layer(x, mask=past & real[:, None], **at)[0]
    around = reference_chosen(layer, x, torch.ones_like(past))
    both_ways = tb.reference_layer(layer.attn, x, around[:, None])[0]
    cache = layer.new_cache()
    splits = (1,) * 9, (4, 1, 4), (2, 7), (6, 1, 1, 1)
    run = partial(layer, causal=True, **at)
    chunks = check_chunks(lambda x, **more: run(x, **more)[0], x, cache, *splits)
    with torch.no_grad():
        steps = []
        for end in range(1, 10):
            part = x[:, end - 1 : end]
            steps.append(run(part, kv_cache=cache, key_padding_mask=real[:, :end])[0])
        padded_steps = tb.check_gap(torch.cat(steps, dim=1), expected)
        layer(x[:, :1], kv_cache=cache, **at)
        one = layer(x[:, 1:2], kv_cache=cache, **at)[1][0].shape
    wide = check_indexed_layer(top_k=9)
    dense = tb.check_gap(wide(x, **seen)[0], wide.attn(x, **seen)[0])
    q, weight = torch.eye(2, dtype=torch.float64), (1.0, 0.5)
    keys = torch.tensor([[1, 1], [2, -3], [-1, 4], [0.5, 0]], dtype=torch.float64)
    worth = check_index_by_hand(q, weight, keys)
    per_token = sum(part.k.shape[3] + part.v.shape[3] for part in (cache.latent, cache.index))
    idle = "index_q", "index_k", "index_norm", "index_weight"
    return tb.check_claims(
        f"index scores by hand: {worth} (expect 1.5, 2.0, 2.0, 0.5); 3 of 9 keys a query vs a loop:"
        f" max|Δ|={gap:.2e}, with padding {left:.2e}; in any chunks vs one pass: max|Δ|="
        f"{chunks:.2e}; top_k=9 vs dense latent attention: max|Δ|={dense:.2e}; a token reads "
        f"{one[2]} rows of {cache.next_pos}; cached a token: {per_token} numbers (latent 6, shared "
        f"key 4, index key 6)",
        by_hand=worth == [1.5, 2.0, 2.0, 0.5],
        formula=max(gap, left, tb.check_gap(masked, expected)) < 1e-11,
        both_ways=tb.check_close(layer(x, **at)[0], both_ways),
        sparse=tb.check_gap(layer(x, causal=True, **at)[0], layer.attn(x, causal=True, **at)[0])
        > 1e-3,
        chunks=max(chunks, padded_steps) < 1e-11,
        dense=dense == 0 and tb.check_gap(layer(x, **seen)[0], layer.attn(x, **seen)[0]) > 1e-3,
        rows=one[2] == 3 and per_token == 16,
        gradients=check_gradients(layer, lambda x: layer(x, **seen)[0], x, *idle),
        index_learns=check_index_learns(layer, x, rows),
        empty=[layer(x[:B, :T], **at)[0].shape for B, T in ((0, 9), (2, 0))]
        == [(0, 9, 12), (2, 0, 12)],
        **check_indexed_cache(layer, x, cos, sin),
    )


def check_index_learns(
    layer: IndexedSparseAttention, x: Tensor, rows: tuple[Tensor, Tensor]
) -> bool:
    """A loss on the index scores has right gradients for the indexer, and none for the rest."""
    indexer = [layer.index_q, layer.index_k, layer.index_norm, layer.index_weight]

    def scores(x: Tensor) -> Tensor:
        return layer.index_scores(x, layer.index_keys(x, *rows), *rows)

    given = x.clone().requires_grad_()  # gradcheck moves x itself in place
    right = check_gradients(nn.ModuleList(indexer), lambda _: scores(given), x)
    layer.zero_grad()
    scores(given).sum().backward()
    return right and given.grad is None and all(p.grad is None for p in layer.attn.parameters())


def check_index_by_hand(q: Tensor, weight: tuple[float, float], keys: Tensor) -> list[float]:
    """Scores of four keys [4, 2] for one query of two index heads q [2, 2], without constants."""
    attn = MultiHeadLatentAttention(2, 1, kv_rank=1, rope_dim=2, nope_dim=1, v_dim=1, q_rank=2)
    layer = IndexedSparseAttention(attn, n_index_heads=2, index_dim=2, top_k=2).double()
    attn.q_down, attn.q_norm = nn.Identity(), nn.Identity()
    layer.index_q.weight.data = torch.stack((q.flatten(), torch.zeros(4).to(q)), dim=1)
    layer.index_weight.weight.data = torch.tensor([[w, 0.0] for w in weight]).to(q)
    x, still = torch.tensor([[[1.0, 0.0]]]).to(q), (torch.ones(1, 2), torch.zeros(1, 2))
    scores = layer.index_scores(x, keys[None, None], *still)[0, 0] * (2 * 2) ** 0.5
    return [round(score, 12) for score in scores.tolist()]


def check_indexed_cache(
    layer: IndexedSparseAttention, x: Tensor, cos: Tensor, sin: Tensor
) -> dict[str, bool]:
    """The two caches stay one length through truncate, copies, failures and refusals."""
    at, cache = {"cos": cos, "sin": sin, "causal": True}, layer.new_cache()
    full, padding = layer(x, **at)[0], torch.ones(2, 9, dtype=torch.bool)
    with torch.no_grad():
        layer(x[:, :6], kv_cache=cache, **at)
        cache.truncate(4)
        again = layer(x[:, 4:], kv_cache=cache, **at)[0]
        cache.truncate(4)
        both = cache.latent.next_pos == cache.index.next_pos == 4
        twin = copy.copy(cache)
        layer(x[:, 5:], kv_cache=twin, **at)
        copied = (twin.next_pos, cache.next_pos) == (8, 4)
        broken = []
        for name in ("q_up", "o_proj"):  # ahead of what attn caches, and behind it
            part = getattr(layer.attn, name)
            setattr(layer.attn, name, None)
            broken += [tb.check_raises(TypeError, lambda: layer(x[:, 5:6], kv_cache=cache, **at))]
            setattr(layer.attn, name, part)
            if cache.next_pos != 4:  # where latents were not appended, the next call cleans up
                cache.truncate(4)
        after = layer(x[:, 4:], kv_cache=cache, **at)[0]
    drawn, fresh = tb.check_draw(2, 3, 12).requires_grad_(), layer.new_cache()
    replayed = checkpoint(lambda x: layer(x, kv_cache=fresh, **at)[0], drawn, use_reentrant=False)
    recomputed = tb.check_raises(RuntimeError, replayed.sum().backward, "backward")
    refused = check_refusals(
        (TypeError, lambda: layer(x, kv_cache=KVCache(), **at), "kv_cache", "IndexedCache"),
        (ValueError, lambda: layer(x, kv_cache=cache, start_pos=3, **at), "start_pos", 9, 3),
        (ValueError, lambda: layer(x, mask=padding, **at), "mask", "[2, 9]"),
        (ValueError, lambda: layer(x, key_padding_mask=padding, kv_cache=cache, **at), "cos", 16),
        (ValueError, lambda: layer(x[:, :2], key_padding_mask=padding, kv_cache=cache, **at), 11),
        (ValueError, lambda: layer(x, cos=cos[:, :2], sin=sin[:, :2]), "cos", 4, 2),
        (ValueError, lambda: layer(x), "cos", None),
        (ValueError, lambda: layer(x[..., :7], **at), "x", 12, 7),
        (TypeError, lambda: layer(x.float(), **at), "x", "float64", "float32"),
        (
            TypeError,
            lambda: IndexedSparseAttention(
                MultiHeadAttention(4, 2), n_index_heads=2, index_dim=2, top_k=2
            ),
            *("attn", "q_rank", "MultiHeadAttention"),
        ),
        (
            ValueError,
            lambda: IndexedSparseAttention(layer.attn, n_index_heads=2, index_dim=3, top_k=2),
            *("index_dim", 3),
        ),
        (
            ValueError,
            lambda: IndexedSparseAttention(layer.attn, n_index_heads=2, index_dim=4, top_k=0),
            *("top_k", 0),
        ),
    )
    return {
        "truncate": tb.check_close(again, full[:, 4:]),
        "copies": copied,
        "after a failure": all(broken) and tb.check_close(after, full[:, 4:]),
        "both parts": both and recomputed,
        "refusals": refused and cache.next_pos == cache.index.next_pos == 9,
    }


@tb.check_seeded(4)
def demo_A04(_device: str = "cpu") -> tuple[bool, str]:
    """Hyper-connections mix streams doubly stochastically; in the neutral setting: x + f(x)."""
    odds = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
    once, limit = sinkhorn(odds, 1, 1e-12), sinkhorn(odds, 50, 1e-12)
    wild = sinkhorn(tb.check_draw(50, 4, 4))
    columns, rows = (tb.check_gap(wild.sum(dim), torch.ones(50, 4)) for dim in (-2, -1))
    layer = tb.check_randomized(HyperConnection(6, 3, n_rounds=3, eps=0.01, norm_eps=0.1))
    streams = tb.check_draw(2, 4, 3, 6)
    gap = tb.check_gap(layer(streams, torch.cos), reference_streams(layer, streams, torch.cos))

    cos, sin = tb.build_rope_cache(8, 4)
    plain = tb.check_randomized(ModernDecoderBlock(8, 2, 1, 12))
    block = HyperConnectedBlock(8, 2, 1, 12, attn=plain.attn, ffn=plain.ffn).double()
    block.norm1, block.norm2 = plain.norm1, plain.norm2
    connections = block.attn_streams, block.ffn_streams
    x = tb.check_draw(2, 5, 8)
    started = tb.check_gap(block(x, cos, sin).mean(2), plain(x, cos, sin))
    for connection in connections:
        connection.eps = 1e-14
        nn.init.zeros_(connection.scale)
    expected = plain(x, cos, sin)[:, :, None].expand(-1, -1, 4, -1)
    neutral = tb.check_gap(block(x, cos, sin), expected)
    collapse = StreamCollapse(8, 4, eps=1e-14).double()
    nn.init.zeros_(collapse.scale)
    collapsed = tb.check_gap(collapse(block(x, cos, sin)), plain(x, cos, sin))

    for connection in connections:
        nn.init.normal_(connection.scale)
        nn.init.normal_(connection.bias)
    streams_8 = tb.check_draw(2, 5, 4, 8)
    run = partial(block, cos=cos, sin=sin)
    chunks = check_chunks(run, streams_8, KVCache(), (2, 2, 1), (1,) * 5, (5,))
    real = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])
    alone = run(streams_8[1:, 2:], start_pos=2)
    padded = tb.check_gap(run(streams_8, key_padding_mask=real)[1:, 2:], alone)
    head = tb.check_randomized(StreamCollapse(6, 3, eps=0.01, norm_eps=0.1))
    z = streams.flatten(2)
    z = z / (z.square().mean(-1, keepdim=True) + 0.1).sqrt() @ head.proj.weight.T
    pre = reference_sigmoid(head.scale * z + head.bias) + 0.01
    summed = sum(pre[..., i, None] * streams[:, :, i] for i in range(3))
    return tb.check_claims(
        f"Sinkhorn of [[.75, .25], [.5, .5]]: first {once[0, 0]:.4f}, {once[0, 1]:.4f} (expect "
        f"0.6000, 0.3333), in the end {limit[0, 0]:.4f} (expect 0.6340); 50 random 4x4: columns "
        f"off by {columns:.1e}, rows by {rows:.1e}; connection vs its formula: max|Δ|={gap:.2e}; "
        f"neutral block vs ModernDecoderBlock: max|Δ|={neutral:.2e} (as started {started:.2e}); "
        f"random block in chunks vs one pass: max|Δ|={chunks:.2e}",
        sinkhorn=abs(once[0, 0] - 0.6) + abs(once[0, 1] - 1 / 3) < 1e-9
        and abs(limit[0, 0] - 3**0.5 / (1 + 3**0.5)) < 1e-6,
        doubly_stochastic=columns < 1e-5 and rows < 1e-2 and bool((wild > 0).all()),
        formula=gap < 1e-11,
        neutral=neutral < 1e-11 and collapsed < 1e-7 and started < 0.1,
        collapse=tb.check_close(head(streams), summed),
        chunks=chunks < 1e-11 and padded < 1e-11,
        gradients=check_gradients(layer, lambda x: layer(x, torch.cos), streams)
        and check_gradients(head, head, streams)
        and check_gradients(block, run, streams_8),
        empty=[layer(streams[:B, :T], torch.cos).shape for B, T in ((0, 4), (2, 0))]
        == [(0, 4, 3, 6), (2, 0, 3, 6)],
        half=HyperConnection(6, 3).bfloat16()(streams.bfloat16(), torch.cos).dtype
        == torch.bfloat16,
        refusals=check_refusals(
            (ValueError, lambda: layer(streams[:, :, :2], torch.cos), "streams", 3, "[2, 4, 2, 6]"),
            (TypeError, lambda: layer(streams.float(), torch.cos), "streams", "float64"),
            (ValueError, lambda: layer(streams, lambda h: h[:1]), "f(h)", "[1, 4, 6]"),
            (TypeError, lambda: layer(streams, lambda h: (h, None)), "f(h)", "tuple"),
            (ValueError, lambda: HyperConnection(6, 1), "n_streams", 1),
            (TypeError, lambda: HyperConnection(6, 2.0), "n_streams", 2.0),
            (ValueError, lambda: HyperConnection(6, n_rounds=0), "n_rounds", 0),
            (ValueError, lambda: HyperConnection(6, eps=0.0), "eps", 0.0),
            (ValueError, lambda: StreamCollapse(6, 1), "n_streams", 1),
            (ValueError, lambda: head(streams[..., :5]), "streams", 6, 5),
            (ValueError, lambda: block(streams, cos, sin), "streams", "[2, 4, 3, 6]"),
            (ValueError, lambda: HyperConnectedBlock(8, 2, n_streams=1), "n_streams", 1),
        ),
    )


@tb.check_seeded(5)
def demo_A05(_device: str = "cpu") -> tuple[bool, str]:
    """Three DeltaNet layers and one attention layer generate through DecoderOnlyLM."""

    def make_block(layer: int) -> nn.Module:
        if layer % 4 == 3:
            attn = MultiHeadAttention(16, 4, 2, head_dim=8, rope=True, qk_norm=True)
            return ModernDecoderBlock(16, d_ff=12, attn=OutputGatedAttention(attn))
        delta = GatedDeltaNet(16, 2, 4, k_dim=4, v_dim=4, chunk=4)
        return ModernDecoderBlock(16, d_ff=12, attn=delta)

    lm = tb.DecoderOnlyLM(13, 16, 4, rope_dim=4, make_block=make_block, max_len=32).double()
    prompts = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 6, 9, 2]])
    tokens = lm.generate(prompts, 8, key_padding_mask=prompts > 0)
    said = []
    for row, start in ((tokens[:1], 0), (tokens[1:, 4:], 4)):
        logits = lm(row[:, :-1])  # one pass, without a cache and without what stands in front
        said.append(logits[:, 6 - start :].argmax(-1))
    same = torch.equal(torch.cat(said), tokens[:, 7:])
    caches = lm.new_caches()
    kinds = [type(cache).__name__ for cache in caches]
    with torch.no_grad():
        full, start = lm(tokens[:1]), lm(tokens[:1, :9], kv_caches=caches)
        ffn, lm.blocks[3].ffn = lm.blocks[3].ffn, None  # the last layer fails behind its attention
        failed = tb.check_raises(TypeError, lambda: lm(tokens[:1, 9:], kv_caches=caches))
        lm.blocks[3].ffn = ffn
        taken_back = [cache.next_pos for cache in caches] == [9] * 4
        rest = lm(tokens[:1, 9:], kv_caches=caches)
    gap = tb.check_gap(torch.cat((start, rest), dim=1), full)

    streams = tb.DecoderOnlyLM(
        *(13, 16, 2, 2, 1, 12), make_block=lambda _: HyperConnectedBlock(16, 2, 1, 12)
    ).double()
    streams.final_norm = nn.Sequential(StreamCollapse(16).double(), streams.final_norm)
    wide = streams.generate(prompts[:1], 4)
    wide_same = torch.equal(streams(wide[:, :-1])[:, 6:].argmax(-1), wide[:, 7:])
    return tb.check_claims(
        f"hybrid of {kinds.count('DeltaNetState')} DeltaNet layers and {kinds.count('KVCache')} "
        f"gated attention: 8 greedy tokens, a left-padded row among them, equal recomputation "
        f"without cache and padding: {same}; after a failed forward all layers go on from where "
        f"they were: {taken_back}, max|Δ|={gap:.2e}; a stack on four streams generates too: "
        f"{wide_same}",
        generates=same and len(set(tokens[:, 7:].flatten().tolist())) > 2,
        kinds=kinds == ["DeltaNetState"] * 3 + ["KVCache"],
        failure=failed and taken_back and gap < 1e-11,
        streams=wide_same,
    )


# =============================================================================================
# Command line
# =============================================================================================


def main_answer(
    parser: argparse.ArgumentParser,
    demos: list[Callable],
    texts: list[str],
    closing: str,
    options: argparse.Namespace,
) -> int:
    """Do what the options ask for; the exit status. texts are modules, that of the demos last."""
    own = tb.main_definitions(texts[-1])[0]
    demos = {demo.__name__[5:]: demo for demo in demos}
    ids = [name.upper() for name in options.ids]
    for name in ids:
        if name not in demos:
            tb.main_unknown(parser, "proof", name, demos)
    asked = {"--list": options.list, "--show": options.show, "proof ids": ids}
    asked = [name for name, value in asked.items() if value]
    if len(asked) > 1:
        parser.error(f"{' and '.join(asked)} exclude each other: give one of them")
    if options.list:
        for name, demo in demos.items():  # under -OO they have no docstrings
            print(f"{name}  {ast.get_docstring(own[demo.__name__][1])}")
        return 0
    if options.show:
        known = [name for name in own if not name.lower().startswith(tb.MAIN_TOOLS)]
        known = {name.lower(): name for name in known}
        for name in options.show:
            if name.lower() not in known:
                tb.main_unknown(parser, "name", name, known.values())
        print(tb.main_source([known[name.lower()] for name in options.show], *texts), end="")
        return 0
    return tb.main_run({name: demos[name] for name in ids or demos}, "cpu", "" if ids else closing)


def main_parser(file: str, about: str) -> argparse.ArgumentParser:
    """What the files of operators take on their command lines."""
    parser = argparse.ArgumentParser(prog=Path(file).name, description=about)
    parser.add_argument("ids", nargs="*", metavar="ID", help="proofs to run (default: all)")
    parser.add_argument("--list", action="store_true", help="a line for each proof")
    parser.add_argument("--show", nargs="+", metavar="NAME", help="source with all that it needs")
    return parser


def main_text() -> str:
    """The text of this file."""
    return tb.main_text(__file__, globals().get("__spec__"))


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    demos = [demo_A01, demo_A02, demo_A03, demo_A04, demo_A05]
    texts = [tb.main_text(tb.__file__, tb.__spec__), main_text()]
    parser = main_parser(__file__, "The operators of 2025 and 2026, small and proved.")
    closing = "all operators of 2025 and 2026 proved ✓"
    return tb.main_program(parser, argv, partial(main_answer, parser, demos, texts, closing))


if __name__ == "__main__":
    sys.exit(main())
