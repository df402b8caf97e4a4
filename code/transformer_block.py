"""Transformer blocks from 2017 to today: every part written out, and proved by fifteen demos.

    python3 code/transformer_block.py                  run the fifteen demos
    python3 code/transformer_block.py D04 D08          only those
    python3 code/transformer_block.py --list           what each demo proves
    python3 code/transformer_block.py --show NAME      print a definition with all it needs

Letters: B batch, T length of the stream, S length of what is attended to (memory, or cached and
new keys), d d_model, H n_q_heads, G n_kv_heads, d_h head_dim, h d_ff, V vocab_size.

Masks are bool and True means "may attend", as in torch.nn.functional.scaled_dot_product_attention
and the opposite of key_padding_mask in torch.nn.MultiheadAttention. Rotation pairs channel i with
channel i + r/2 (half-split); the other layout pairs 2i with 2i + 1.
"""

import argparse
import ast
import atexit
import contextlib
import copy
import difflib
import functools
import gc
import importlib.util
import inspect
import itertools
import math
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    gc.disable()  # a collection would walk the half million objects that importing torch makes
    if importlib.util.find_spec("torch") is None:
        sys.exit("transformer_block.py needs torch; to install it: python3 -m pip install torch")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)  # none is needed

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# === Positions, masks, rotation (notes §2, §4, §7.3) =========================================


def at_least_float32(x: Tensor) -> Tensor:
    """x, half precision widened: what sums, exponentials and rotations are computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def build_causal_mask(
    q_positions: Tensor, k_positions: Tensor, window: int | None = None
) -> Tensor:
    """Which key positions each query position may attend to: bool [Tq, Tk], True = may attend.

    Positions [Tq] and [Tk] are absolute integers: with a cache the queries start where it ends
    (arXiv:1706.03762 §3.2.3). window=W keeps the last W positions, the query's own included
    (arXiv:2310.06825). ValueError for another shape or W < 1, TypeError for another dtype.
    """
    require_tensor("q_positions", q_positions, "Tq", kind="integer")
    require_tensor("k_positions", k_positions, "Tk", kind="integer")
    distance = q_positions.long()[:, None] - k_positions.long()  # (Tq, Tk)
    if window is None:
        return distance >= 0
    require_value(int, window=window)
    return (distance >= 0) & (distance < window)


def combined_mask(mask: Tensor | None, key_padding_mask: Tensor | None,
                  B: int, T: int, S: int) -> Tensor | None:  # fmt: skip
    """What mask [T, S] or [B, T, S] and key_padding_mask [B, S] both allow, None for everything.

    It broadcasts to [B, 1, T, S]. ValueError for another shape, TypeError for another dtype.
    """
    if mask is not None:
        batch = (B,) if getattr(mask, "ndim", None) == 3 else ()
        require_tensor("mask", mask, *batch, T, S, kind="bool")
        mask = mask[:, None] if batch else mask
    if key_padding_mask is None:
        return mask
    require_tensor("key_padding_mask", key_padding_mask, B, S, kind="bool")
    padding = key_padding_mask[:, None, None]  # (B, 1, 1, S)
    return padding if mask is None else mask & padding


def build_rope_cache(max_len: int, head_dim: int, base: float = 10000.0, *,
                     device: torch.device | str | None = None,
                     dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tables (cos, sin) of rotary positions, each [max_len, head_dim], half-split layout.

    Channel i and channel i + head_dim/2 turn by position * base^(-2i/head_dim) radians (RoFormer,
    arXiv:2104.09864 §3.2.2, whose pairs are 2i and 2i + 1). Angles are float64, and the tables
    are rounded to float32 once, so that every dtype sees the same table: angles built in bfloat16
    are wrong from position 257 on. ValueError for an odd head_dim or a size or base not above 0.
    """
    require_value(int, max_len=max_len, head_dim=head_dim)
    require_value(float, base=base)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even to rotate channel pairs, got {head_dim}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating, got {dtype}")
    device = torch.tensor(()).device if device is None else device  # the default one
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    positions = torch.arange(max_len, device="cpu")
    angles = torch.outer(positions, base**-exponents).repeat(1, 2)  # (max_len, head_dim)
    return angles.cos().float().to(device, dtype), angles.sin().float().to(device, dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r channels of x [B, n, T, head_dim] by tables cos and sin [T, r], r even.

    Channels from r on pass through (partial rotation, GPT-J and GPT-NeoX). Computed in at least
    float32, returned in x's dtype (arXiv:2104.09864). ValueError for other shapes.
    """
    _, _, T, head_dim = require_tensor("x", x, "B", "n", "T", "head_dim")
    _, r = require_tensor("cos", cos, T, "r")
    require_tensor("sin", sin, T, r)
    if r % 2 or r > head_dim:
        raise ValueError(f"cos must have an even width of at most {head_dim}, got {r}")
    turning = at_least_float32(x[..., :r])
    cos, sin = cos.to(turning), sin.to(turning)
    first, second = turning.chunk(2, dim=-1)  # of [a b c d] a turns with c, b with d
    turned = (turning * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)  # (B, n, T, r)
    return turned if r == head_dim else torch.cat((turned, x[..., r:]), dim=-1)


def table_rows(cos: Tensor | None, sin: Tensor | None, start: int,
               T: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows start … start + T, [T, r], of both tables [max_len, r]; ValueError if they lack some."""
    if cos is None or sin is None:
        raise ValueError("cos and sin must be tables to rotate by, got None")
    rows, r = require_tensor("cos", cos, "max_len", "r")
    require_tensor("sin", sin, rows, r)
    if start + T > rows:
        raise ValueError(f"cos has {rows} rows, and {start + T} positions were asked for")
    return cos[start : start + T], sin[start : start + T]  # (T, r)


def sinusoidal_positions(max_len: int, d_model: int) -> Tensor:
    """The fixed table of 2017, [max_len, d_model] float32: sines on even channels, cosines on odd.

    Added to the embeddings, outside every block (arXiv:1706.03762 §3.5). ValueError for sizes < 1.
    """
    require_value(int, max_len=max_len, d_model=d_model)
    positions = torch.arange(max_len, device="cpu")
    channels = torch.arange(d_model, device="cpu")
    frequencies = 10000.0 ** (-(channels - channels % 2).double() / d_model)
    angles = torch.outer(positions, frequencies)  # (max_len, d_model)
    table = torch.where(channels % 2 == 0, angles.sin(), angles.cos())  # (max_len, d_model)
    return table.to(torch.tensor(()).device, torch.float32)


# === KV cache (notes §5) =====================================================================


class KVCache:
    """Keys and values of one attention layer: decoding projects each token once (arXiv:1911.02150).

    k [B, G, next_pos, width_k] and v [B, G, next_pos, width_v] are views of what is stored, None
    when it is empty. With grad mode off, append writes into a buffer that doubles when it is full
    (with max_len it has that length from the start): views of positions cut off by truncate or
    reset may be written over. With grad mode on it concatenates, because a tensor that autograd
    has saved must not be written to. A refused append changes nothing: ValueError or TypeError for
    what does not continue it, RuntimeError within a backward pass, which would append again.
    """

    def __init__(self, max_len: int | None = None):
        require_value(int, optional=True, max_len=max_len)
        self.max_len = max_len
        self.next_pos = 0  # the position the next token takes
        # Buffers [B, G, room, width], and whether their room behind next_pos may be written to.
        self._k = self._v = self._writable = None

    @property
    def k(self) -> Tensor | None:
        return self._k[:, :, : self.next_pos] if self.next_pos else None

    @property
    def v(self) -> Tensor | None:
        return self._v[:, :, : self.next_pos] if self.next_pos else None

    def append(self, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor]:
        """Put [B, G, T, width] keys and values behind what is stored; returns all that is stored.

        Raises ValueError for a shape that does not continue it or more than max_len positions,
        TypeError for another dtype or device.
        """
        B, G, _, width = self._k.shape if self.next_pos else ("B", "G", "T", "width")
        B, G, T, _ = require_tensor("k_new", k_new, B, G, "T", width)
        require_tensor("v_new", v_new, B, G, T, self._v.shape[3] if self.next_pos else "width")
        like = self._k if self.next_pos else k_new
        for name, new in (("k_new", k_new), ("v_new", v_new)):
            if new.dtype != like.dtype or new.device != like.device:
                came, wanted = (f"{t.dtype} on {t.device}" for t in (new, like))
                raise TypeError(f"{name} must be {wanted}, got {came}")
        require_forward_pass()
        start, end = self.next_pos, self.next_pos + T
        if self.max_len is not None and end > self.max_len:
            raise ValueError(f"max_len={self.max_len} positions cannot hold {end}")
        if torch.is_grad_enabled():
            k, v = ((self.k,), (self.v,)) if start else ((), ())
            self._k, self._v = torch.cat((*k, k_new), dim=2), torch.cat((*v, v_new), dim=2)
        else:
            if not start or not self._writable or end > self._k.shape[2]:
                self._k, self._v = self._room(self._k, k_new, end), self._room(self._v, v_new, end)
            # Clones: after truncate the new ones may be views of the very memory that is written.
            self._k[:, :, start:end] = k_new.clone()
            self._v[:, :, start:end] = v_new.clone()
        self._writable = not torch.is_grad_enabled()
        self.next_pos = end
        return self._k[:, :, :end], self._v[:, :, :end]

    def _room(self, buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
        """A buffer for end positions like new with what is stored, or the one that reset kept."""
        start = self.next_pos
        like = (*new.shape[:2], self.max_len or start + end, new.shape[3]), new.dtype, new.device
        if self._writable and not start and like == (buffer.shape, buffer.dtype, buffer.device):
            return buffer
        with torch.inference_mode(False):  # a tensor made there takes no writes outside
            grown = new.new_empty(like[0])
        if start:
            grown[:, :, :start] = buffer[:, :, :start]
        return grown

    def reset(self) -> None:
        """Forget everything; with max_len the memory is kept."""
        self.next_pos = 0
        if self.max_len is None:
            self._k = self._v = self._writable = None

    def truncate(self, length: int) -> None:
        """Keep the first length positions, ValueError if there are fewer: speculative decoding."""
        require_value(int, above=-1, length=length)
        if length > self.next_pos:
            raise ValueError(f"length must be at most next_pos={self.next_pos}, got {length}")
        self.next_pos = length

    def __getstate__(self) -> dict:
        """For copy and pickle: memory of its own, since two must not write into one buffer."""
        k, v = (self.k.clone(), self.v.clone()) if self.next_pos else (None, None)
        return {**vars(self), "_k": k, "_v": v, "_writable": None}

    def __deepcopy__(self, memo: dict) -> "KVCache":
        twin = memo[id(self)] = copy.copy(self)  # deepcopy takes no tensor with a graph behind it
        rest = {name: value for name, value in vars(twin).items() if name not in ("_k", "_v")}
        vars(twin).update(copy.deepcopy(rest, memo))
        return twin


def start_position(start_pos: int | None, kv_cache: "KVCache | None") -> int:
    """The first token's position: the cache's next one, which start_pos must equal (ValueError)."""
    if kv_cache is not None and not hasattr(kv_cache, "next_pos"):
        raise TypeError(f"kv_cache must be a KVCache, got {type(kv_cache).__name__}")
    require_value(int, above=-1, optional=True, start_pos=start_pos)
    if kv_cache is None:
        return start_pos or 0
    if start_pos is not None and start_pos != kv_cache.next_pos:
        raise ValueError(f"start_pos must be next_pos={kv_cache.next_pos}, got {start_pos}")
    return kv_cache.next_pos


# === Norm and attention (notes §1, §4, §5, §7.2) =============================================


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467 §4).

    Versus LayerNorm: no mean is subtracted and no bias added. Computed in at least float32, where
    a float16 value over 255 cannot overflow when squared. [..., d] in x's dtype, else ValueError.
    """

    def __init__(self, d_model: int, eps: float = 1e-6):
        super().__init__()
        require_value(int, d_model=d_model)
        require_value(float, eps=eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.weight.shape[0])
        wide = at_least_float32(x)
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)  # Llama rounds before the weight, Gemma here


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, *, causal: bool = False,
           scale: float | None = None, logit_softcap: float | None = None) -> Tensor:  # fmt: skip
    """softmax(scale * q k^T) v, written out (arXiv:1706.03762 §3.2.1; groups arXiv:2305.13245).

    q [B, H, T, d_h], k [B, G, S, d_h], v [B, G, S, d_v], keep bool (True = may attend) that
    broadcasts to [B, 1, T, S]; returns [B, H, T, d_v]. Query head i reads KV head i // (H / G).
    causal hides later keys, the last query standing beside the last key. scale is d_h^-0.5 by
    default. logit_softcap=c replaces a score s by c * tanh(s / c) before the mask. A query that
    may attend to nothing gets zeros. ValueError for other shapes, TypeError for mixed dtypes.
    """
    keep = require_attention_inputs(q, k, v, keep, scale=scale, logit_softcap=logit_softcap)
    (B, H, T, head_dim), (G, S) = q.shape, k.shape[1:3]
    if causal and T > 1:  # a single query stands beside the last key and sees them all
        past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
        keep = past if keep is None else keep & past
    scale = head_dim**-0.5 if scale is None else scale
    # The query heads of a KV head ([0 0 1 1] with H = 4 and G = 2) become further rows of one
    # product, so K and V are never copied out. For one token k q^T is faster, having few columns.
    # Scaled before the product: in half precision an unscaled score overflows.
    q = (q * scale).reshape(B, G, H // G * T, head_dim)  # (B, G, H/G*T, head_dim)
    scores = at_least_float32(q @ k.mT if T > 1 else (k @ q.mT).mT.contiguous())  # (B, G, H/G*T, S)
    if logit_softcap is not None:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    if keep is not None:
        # A row without keys stays open, as a softmax of -inf alone is NaN, and gets zeros below.
        alive = keep.any(dim=-1, keepdim=True)
        scores = scores.view(B, H, T, S).masked_fill(alive & ~keep, -math.inf).view_as(scores)
    out = scores.softmax(dim=-1).to(v.dtype) @ v  # (B, G, H/G*T, d_v)
    out = out.view(B, H, T, v.shape[-1])  # (B, H, T, d_v)
    return out if keep is None else out.masked_fill(~alive, 0)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, *,
                 causal: bool = False, scale: float | None = None,
                 logit_softcap: float | None = None) -> Tensor:  # fmt: skip
    """The result of attend through torch's fused kernel, which keeps no T x S scores.

    Shapes [B, H or G, T or S, width] and errors as there (FlashAttention, arXiv:2205.14135). It has
    no soft cap (ValueError). The two differ on NaN (without a mask, torch 2.13 on a CPU turns a
    query row of NaN into numbers; with one, a NaN key that is masked out spreads) and on float16
    scores over 65504, which overflow in attend.
    """
    keep = require_attention_inputs(q, k, v, keep, scale=scale)
    if logit_softcap is not None:
        raise ValueError(f"logit_softcap must be None here, got {logit_softcap}: use attend")
    (B, H, T, head_dim), (G, S) = q.shape, k.shape[1:3]
    is_causal = False
    if T == 1:  # as rows of one head a group's queries read each key once, not H/G times
        q = q.reshape(B, G, H // G, head_dim)  # (B, G, H/G, head_dim)
    elif causal and keep is None and T == S:
        is_causal = True  # the kernel sets the first query beside the first key
    elif causal:
        past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
        keep = past if keep is None else keep & past
    out = F.scaled_dot_product_attention(
        q, k, v, keep, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != G
    )
    return out.reshape(B, H, T, v.shape[-1])  # (B, H, T, d_v)


class SinkAttention(nn.Module):
    """attend with one more logit a head in its softmax, learned and then dropped (gpt-oss).

    For attend= of MultiHeadAttention, arguments and result as there. sinks [H] join the scores
    after scale, cap and mask, so the weights of a query sum to less than 1: to
    sigmoid(logsumexp(scores) - sink). It is no token: no key, no value, nothing cached
    (arXiv:2508.10925). ValueError for another number of query heads.
    """

    def __init__(self, n_q_heads: int):
        super().__init__()
        require_value(int, n_q_heads=n_q_heads)
        self.sinks = nn.Parameter(torch.zeros(n_q_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, *,
                causal: bool = False, scale: float | None = None,
                logit_softcap: float | None = None) -> Tensor:  # fmt: skip
        keep = require_attention_inputs(q, k, v, keep, scale=scale, logit_softcap=logit_softcap)
        (B, H, T, head_dim), (G, S) = q.shape, k.shape[1:3]
        if len(self.sinks) != H:
            raise ValueError(f"n_q_heads={len(self.sinks)} sinks need as many query heads, got {H}")
        if causal:
            past = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
            keep = past if keep is None else keep & past
        q = q * (head_dim**-0.5 if scale is None else scale)
        scores = q.reshape(B, G, H // G * T, head_dim) @ k.mT  # (B, G, H/G*T, S)
        scores = at_least_float32(scores)
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        scores = scores.view(B, H, T, S)
        if keep is not None:  # a row without keys stays open, as in attend: a sink may be -inf
            alive = keep.any(dim=-1, keepdim=True)
            scores = scores.masked_fill(alive & ~keep, -math.inf)
        sinks = self.sinks[:, None, None].expand(B, H, T, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :S]  # (B, H, T, S)
        out = weights.to(v.dtype).reshape(B, G, H // G * T, S) @ v  # (B, G, H/G*T, d_v)
        out = out.view(B, H, T, v.shape[-1])  # (B, H, T, d_v)
        return out if keep is None else out.masked_fill(~alive, 0)


def split_heads(projected: Tensor, head_dim: int) -> Tensor:
    """[B, T, n*head_dim] -> [B, n, T, head_dim], else ValueError; n may be that of a shard."""
    if projected.shape[-1] % head_dim:
        raise ValueError(f"a projection of width {projected.shape[-1]} holds no whole heads of "
                         f"head_dim={head_dim}: the ranks must divide n_kv_heads")  # fmt: skip
    return torch.unflatten(projected, -1, (-1, head_dim)).transpose(1, 2)


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with H query heads and G KV heads: MHA G = H, GQA, MQA G = 1.

    arXiv:1706.03762 §3.2.2, arXiv:1911.02150, arXiv:2305.13245 §2. ValueError for other shapes,
    sizes that do not divide, memory with a cache or rotation, and rotation without tables.
    forward takes x [B, T, d] and gives (out [B, T, d], (k, v)), all keys and values [B, G, S, d_h]
    attended to. Masks are bool, mask [T, S] or [B, T, S], key_padding_mask [B, S]; causal=True
    hides later keys. memory [B, S, d] makes it cross-attention. rope=True turns q and k by rows
    start_pos … of the tables cos and sin; qk_norm norms each of their heads before.
    """

    def __init__(self, d_model: int, n_q_heads: int, n_kv_heads: int | None = None, *,
                 head_dim: int | None = None, bias: bool = False, qkv_bias: bool | None = None,
                 rope: bool = False, qk_norm: bool = False, scale: float | None = None,
                 logit_softcap: float | None = None, norm_eps: float = 1e-6,
                 attend: Callable[..., Tensor] = attend):  # fmt: skip
        super().__init__()
        n_kv_heads = n_q_heads if n_kv_heads is None else n_kv_heads
        require_value(int, d_model=d_model, n_q_heads=n_q_heads, n_kv_heads=n_kv_heads)
        if head_dim is None and d_model % n_q_heads:
            raise ValueError(f"n_q_heads={n_q_heads} must divide d_model={d_model}")
        head_dim = d_model // n_q_heads if head_dim is None else head_dim
        require_value(int, head_dim=head_dim)
        if n_q_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads} must divide n_q_heads={n_q_heads}")
        if rope and head_dim % 2:
            raise ValueError(f"head_dim must be even with rope=True, got {head_dim}")
        require_value(float, optional=True, scale=scale)
        require_value(float, norm_eps=norm_eps)
        require_value(Callable, attend=attend)
        if logit_softcap is not None or isinstance(attend, nn.Module):  # it may refuse these
            parameters = attend.parameters() if isinstance(attend, nn.Module) else iter(())
            like = next(parameters, torch.tensor(()))
            with torch.no_grad():
                q, k = (like.new_zeros(1, n, 1, head_dim) for n in (n_q_heads, n_kv_heads))
                attend(q, k, k, logit_softcap=logit_softcap)
        self.d_model, self.head_dim, self.rope_dim = d_model, head_dim, head_dim if rope else 0
        self.rope, self.scale, self.logit_softcap, self.attend = rope, scale, logit_softcap, attend
        qkv_bias = bias if qkv_bias is None else qkv_bias
        self.q_proj = nn.Linear(d_model, n_q_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(n_q_heads * head_dim, d_model, bias=bias)
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None

    def forward(self, x: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = False,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "KVCache | None" = None,
                start_pos: int | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        B, T, _ = require_tensor("x", x, "B", "T", self.d_model, layer=self.q_proj)
        start = start_position(start_pos, kv_cache)
        source, cached = x, 0 if kv_cache is None else start
        if memory is not None:
            if self.rope or kv_cache is not None:
                raise ValueError("memory (cross-attention) goes without rope=True and kv_cache")
            require_tensor("memory", memory, B, "S", self.d_model, layer=self.k_proj)
            source = memory
        keep = combined_mask(mask, key_padding_mask, B, T, cached + source.shape[1])
        # 1) Project: queries of the stream, keys and values of the source, split into heads.
        q = split_heads(self.q_proj(x), self.head_dim)  # (B, H, T, head_dim)
        k = split_heads(self.k_proj(source), self.head_dim)  # (B, G, S, head_dim)
        v = split_heads(self.v_proj(source), self.head_dim)  # (B, G, S, head_dim)
        # 2) Norm and turn queries and keys, never values.
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if self.rope:
            cos, sin = table_rows(cos, sin, start, T)
            turned = apply_rope(torch.cat((q, k), dim=1), cos, sin)  # (B, H+G, T, head_dim)
            q, k = turned.split((q.shape[1], k.shape[1]), dim=1)
        # 3) Keys and values of earlier tokens come from the cache, turned when they were new.
        if kv_cache is not None:
            k, v = kv_cache.append(k, v)
        # 4) Attend; a call that fails here leaves nothing in the cache.
        options = {"causal": causal, "scale": self.scale, "logit_softcap": self.logit_softcap}
        try:
            out = self.attend(q, k, v, keep, **options)  # (B, H, T, head_dim)
        except BaseException:
            if kv_cache is not None:
                kv_cache.truncate(start)
            raise
        # 5) Join the heads and project back.
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class MultiHeadLatentAttention(nn.Module):
    """DeepSeek's latent attention (MLA, arXiv:2405.04434 §2.1): the cache holds no heads.

    Versus MultiHeadAttention: K and V of all heads are one linear map (kv_up) of a normed latent
    of width kv_rank, and position enters through one rotated key of width rope_dim that all heads
    share. forward is the same, without memory. The k it returns and caches is [latent | shared
    key], [B, 1, S, kv_rank + rope_dim]; v is empty (width 0). Rotation is half-split, DeepSeek's
    own pairs channels 2i and 2i + 1: its weights load with those rows permuted. Errors as there.
    """

    def __init__(self, d_model: int, n_heads: int, *, kv_rank: int, rope_dim: int,
                 nope_dim: int, v_dim: int, q_rank: int | None = None):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, n_heads=n_heads, kv_rank=kv_rank, v_dim=v_dim)
        require_value(int, rope_dim=rope_dim, nope_dim=nope_dim)
        if rope_dim % 2:
            raise ValueError(f"rope_dim must be even, got {rope_dim}")
        self.d_model, self.kv_rank, self.rope_dim = d_model, kv_rank, rope_dim
        self.nope_dim, self.v_dim, self.q_rank = nope_dim, v_dim, q_rank
        self.scale = (nope_dim + rope_dim) ** -0.5
        q_width = n_heads * (nope_dim + rope_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(d_model, q_width, bias=False)
        else:
            require_value(int, q_rank=q_rank)
            self.q_down = nn.Linear(d_model, q_rank, bias=False)
            self.q_norm = RMSNorm(q_rank)
            self.q_up = nn.Linear(q_rank, q_width, bias=False)
        self.kv_down = nn.Linear(d_model, kv_rank + rope_dim, bias=False)
        self.kv_norm = RMSNorm(kv_rank)
        self.kv_up = nn.Linear(kv_rank, n_heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(n_heads * v_dim, d_model, bias=False)

    def forward(self, x: Tensor, *, mask: Tensor | None = None,
                key_padding_mask: Tensor | None = None, causal: bool = False,
                cos: Tensor | None = None, sin: Tensor | None = None,
                kv_cache: "KVCache | None" = None,
                start_pos: int | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        B, T, _ = require_tensor("x", x, "B", "T", self.d_model, layer=self.kv_down)
        start = start_position(start_pos, kv_cache)
        cached = 0 if kv_cache is None else start
        keep = combined_mask(mask, key_padding_mask, B, T, cached + T)
        cos, sin = table_rows(cos, sin, start, T)
        require_tensor("cos", cos, T, self.rope_dim)  # a narrower one would turn a part only
        q = self.q_proj(x) if self.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q = split_heads(q, self.nope_dim + self.rope_dim) * self.scale
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), dim=-1)
        q_rope = apply_rope(q_rope, cos, sin)  # (B, H, T, rope_dim)
        latent, k_rope = self.kv_down(x)[:, None].split((self.kv_rank, self.rope_dim), dim=-1)
        k_rope = apply_rope(k_rope, cos, sin)  # (B, 1, T, rope_dim)
        k = torch.cat((self.kv_norm(latent), k_rope), dim=-1)  # (B, 1, T, kv_rank+rope_dim)
        v = k[..., :0]
        if kv_cache is not None:
            k, v = kv_cache.append(k, v)
        attention = self.absorbed if cached and self.absorbs else self.expanded
        try:
            out = attention(q_nope, q_rope, k, keep, causal)  # (B, H, T, v_dim)
        except BaseException:  # a call that fails here leaves nothing in the cache
            if kv_cache is not None:
                kv_cache.truncate(start)
            raise
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)

    @property
    def absorbs(self) -> bool:
        """Whether kv_up is a bare matrix: a wrapper, bias, hook, shard or int8 must be called."""
        up = self.kv_up
        hooks = up._forward_hooks, up._forward_pre_hooks, up._backward_hooks, up._backward_pre_hooks
        bare = type(up) is nn.Linear and "forward" not in vars(up) and not any(hooks)
        return bare and up.bias is None and type(up.weight) in (nn.Parameter, Tensor)

    def expanded(self, q_nope: Tensor, q_rope: Tensor, k: Tensor, keep: Tensor | None,
                 causal: bool) -> Tensor:  # fmt: skip
        """Keys and values of every head are computed from the latent: cheaper for many queries."""
        latent, k_rope = k.split((self.kv_rank, self.rope_dim), dim=-1)
        up = split_heads(self.kv_up(latent[:, 0]), self.nope_dim + self.v_dim)
        k_nope, v = up.split((self.nope_dim, self.v_dim), dim=-1)  # (B, H, S, nope or v_dim)
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)  # (B, H, T, nope_dim+rope_dim)
        return attend(q, k, v, keep, causal=causal, scale=1.0)

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, k: Tensor, keep: Tensor | None,
                 causal: bool) -> Tensor:  # fmt: skip
        """Queries go down to the latent, which serves all heads as one key: q (W c) = (q W) c."""
        up = self.kv_up.weight.unflatten(0, (-1, self.nope_dim + self.v_dim))
        k_up, v_up = up.split((self.nope_dim, self.v_dim), dim=1)  # (H, nope or v_dim, kv_rank)
        q = torch.cat((q_nope @ k_up, q_rope), dim=-1)  # (B, H, T, kv_rank+rope_dim)
        latent = k[..., : self.kv_rank]
        return attend(q, k, latent, keep, causal=causal, scale=1.0) @ v_up.mT  # (B, H, T, v_dim)


# === Feed-forward networks (notes §1, §4, §6) ================================================


class DenseFFN(nn.Module):
    """down(act(up(x))), [..., d] -> [..., d], else ValueError (arXiv:1706.03762 §3.3)."""

    def __init__(self, d_model: int, d_ff: int, act: Callable[[Tensor], Tensor] = F.gelu,
                 bias: bool = False):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, d_ff=d_ff)
        require_value(Callable, act=act)
        self.d_model, self.act = d_model, act
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.d_model, layer=self.up)
        return self.down(self.act(self.up(x)))


class GatedFFN(nn.Module):
    """down(act(gate(x)) * up(x)), [..., d] -> [..., d]: SwiGLU with silu (arXiv:2002.05202 §2).

    Versus DenseFFN: a third matrix, and the activation scales a linear branch. Errors as there.
    """

    def __init__(self, d_model: int, d_ff: int, act: Callable[[Tensor], Tensor] = F.silu,
                 bias: bool = False):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model, d_ff=d_ff)
        require_value(Callable, act=act)
        self.d_model, self.act = d_model, act
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.d_model, layer=self.up)
        return self.down(self.act(self.gate(x)) * self.up(x))


class ClampedGatedFFN(nn.Module):
    """gpt-oss's expert: down((up + 1) * gate * sigmoid(alpha * gate)), [..., d] -> [..., d].

    Versus GatedFFN: biases; gate is clamped above, up on both sides; up = 0 lets the gate through
    (arXiv:2508.10925). ValueError for another width or a limit or alpha not above 0.
    """

    def __init__(self, d_model: int, d_ff: int, *, alpha: float = 1.702, limit: float = 7.0):
        super().__init__()
        require_value(int, d_model=d_model, d_ff=d_ff)
        require_value(float, alpha=alpha, limit=limit)
        self.d_model, self.alpha, self.limit = d_model, alpha, limit
        self.gate = nn.Linear(d_model, d_ff)
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.d_model, layer=self.up)
        gate = self.gate(x).clamp(max=self.limit)
        up = self.up(x).clamp(-self.limit, self.limit)
        return self.down((up + 1) * gate * torch.sigmoid(self.alpha * gate))


def count_choices(experts: Tensor, n_experts: int) -> Tensor:
    """How often each of [N, k] names an expert, [E]; bincount would wait for the device."""
    chosen = experts.flatten()
    return chosen.new_zeros(n_experts).scatter_add(0, chosen, torch.ones_like(chosen))


def balance_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """Switch's balance loss without its coefficient, E * sum(f P) (arXiv:2101.03961 §2.2).

    f is the share of the choices that counts [E] gives an expert, P the mean over the tokens of its
    share of their scores [N, E]. 1 where both are even, at most E; 0 for no tokens. Padding counts.
    """
    mean = (scores / (scores.sum(dim=1, keepdim=True) + 1e-20)).sum(dim=0) / max(len(scores), 1)
    return len(counts) * (mean * counts / counts.sum().clamp(min=1)).sum()


class MoEFFN(nn.Module):
    """Each token goes to its likeliest expert, [..., d] -> [..., d] (Switch, arXiv:2101.03961 §2).

    The output is that expert's times its router probability, which is not renormalised: over one
    expert it would be 1, and the router would never learn. After a forward, tokens_per_expert
    counts the tokens, and aux_loss is their balance_loss. An expert without tokens is called on no
    rows: its gradients are zeros, and all ranks run the same collectives. ValueError for another
    width, NotImplementedError for another top_k.
    """

    def __init__(self, d_model: int, d_ff: int, n_experts: int = 4, top_k: int = 1):
        super().__init__()
        require_value(int, n_experts=n_experts)
        if top_k != 1:
            raise NotImplementedError(f"top_k must be 1, got {top_k!r}: see MixtureFFN")
        self.d_model = d_model
        self.experts = nn.ModuleList(GatedFFN(d_model, d_ff) for _ in range(n_experts))
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.tokens_per_expert: list[int] | None = None
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        require_tensor("x", x, ..., self.d_model, layer=self.router)
        tokens = x.reshape(-1, self.d_model)  # (N, d)
        logits = at_least_float32(self.router(tokens))  # (N, E)
        require_tensor("router(x)", logits, len(tokens), len(self.experts))
        probs = logits.softmax(dim=1)  # (N, E)
        weight, expert = probs.max(dim=1)  # (N)
        counts = count_choices(expert, len(self.experts))  # (E)
        sizes = counts.tolist()  # the one synchronisation with the host
        self.tokens_per_expert, self.aux_loss = sizes, balance_loss(probs, counts)
        order = expert.argsort()  # the first expert's tokens, then the second's, …
        pieces = tokens.index_select(0, order).split(sizes)
        out = torch.cat([ffn(piece) for ffn, piece in zip(self.experts, pieces)])  # (N, d)
        out = (weight[order, None] * out).to(x.dtype)
        return torch.empty_like(out).index_copy(0, order, out).view_as(x)

    def __getstate__(self) -> dict:
        """For copy and pickle, which take no tensor with a graph behind it."""
        aux_loss = None if self.aux_loss is None else self.aux_loss.detach()
        return {**self.__dict__, "aux_loss": aux_loss}


class SoftmaxRouter(nn.Module):
    """tokens [N, d] -> weights [N, k] and experts [N, k] (int64, best first): Mixtral, Qwen3.

    The top_k of a softmax over all experts, renormalised over the chosen or not, times scale. With
    groups only from the top_groups groups that hold the best single experts (DeepSeek-V2,
    arXiv:2405.04434 §2.2.2). gpt-oss has a bias; its softmax over the chosen logits is the same.
    Leaves tokens_per_expert (a list) and aux_loss, the balance_loss. ValueError for bad sizes.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, *, renormalise: bool = True,
                 scale: float = 1.0, n_groups: int = 1, top_groups: int = 1,
                 bias: bool = False):  # fmt: skip
        super().__init__()
        require_routing(d_model, n_experts, top_k, scale, n_groups, top_groups)
        self.d_model, self.top_k, self.scale = d_model, top_k, scale
        self.renormalise, self.n_groups, self.top_groups = renormalise, n_groups, top_groups
        self.router = nn.Linear(d_model, n_experts, bias=bias)
        self.counts: Tensor | None = None  # choices that fell on each expert, [E]
        self.aux_loss: Tensor | None = None

    @property
    def tokens_per_expert(self) -> list[int] | None:
        return None if self.counts is None else self.counts.tolist()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        require_tensor("tokens", tokens, "N", self.d_model, layer=self.router)
        logits = at_least_float32(self.router(tokens))  # (N, E)
        scores, experts = self.choose(logits)  # (N, E), (N, k)
        weights = scores.gather(1, experts)  # (N, k)
        if self.renormalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        counts = count_choices(experts, scores.shape[1])
        self.counts, self.aux_loss = counts, balance_loss(scores, counts)
        return (self.scale * weights).to(tokens.dtype), experts

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probs = logits.softmax(dim=1)
        return probs, self.best_experts(probs, group_best=1)

    def best_experts(self, scores: Tensor, group_best: int) -> Tensor:
        """The top_k of scores in the groups whose group_best best sum highest: int64 [N, k]."""
        groups = scores.unflatten(1, (self.n_groups, -1))  # (N, n_groups, E/n_groups)
        best = groups.topk(min(group_best, groups.shape[2])).values.sum(dim=2)  # (N, n_groups)
        kept = best.topk(self.top_groups).indices  # (N, top_groups)
        shut = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)  # (N, n_groups)
        scores = groups.masked_fill(shut[:, :, None], -math.inf).flatten(1)  # (N, E)
        return scores.topk(self.top_k).indices

    def __getstate__(self) -> dict:
        """For copy and pickle, which take no tensor with a graph behind it."""
        aux_loss = None if self.aux_loss is None else self.aux_loss.detach()
        return {**self.__dict__, "aux_loss": aux_loss}


class SigmoidRouter(SoftmaxRouter):
    """SoftmaxRouter with a sigmoid for each expert (DeepSeek-V3, arXiv:2412.19437 §2.1.2).

    selection_bias [E], a buffer updated by a rule outside the gradient, is added for the choice
    only; the weights come from the scores without it. A group scores as the sum of its two best
    experts. Llama-4: no selection_bias, no renormalising, top-1. Shapes and errors as there.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, *, renormalise: bool = True,
                 scale: float = 1.0, n_groups: int = 1, top_groups: int = 1,
                 selection_bias: bool = True):  # fmt: skip
        super().__init__(d_model, n_experts, top_k, renormalise=renormalise, scale=scale,
                         n_groups=n_groups, top_groups=top_groups)  # fmt: skip
        self.register_buffer("selection_bias", torch.zeros(n_experts) if selection_bias else None)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ranked = scores if self.selection_bias is None else scores + self.selection_bias
        return scores, self.best_experts(ranked, group_best=2)


class MixtureFFN(nn.Module):
    """Several experts a token, [..., d] -> [..., d]: sum of weight * expert(x), plus shared(x).

    Mixtral (arXiv:2401.04088 §2.1), shared experts (arXiv:2401.06066). router gives tokens
    [N, d] weights and experts [N, k] and keeps its counts and aux_loss. weigh_input puts the weight
    on the expert's input (Llama-4). The work grows with N * k; an idle expert is called on no rows.
    No mask comes here: padding is routed and counted too. ValueError for experts that are not the
    router's, or choices and weights that do not fit.
    """

    def __init__(self, router: nn.Module, experts: Iterable[nn.Module],
                 shared: nn.Module | None = None, *, weigh_input: bool = False):  # fmt: skip
        super().__init__()
        experts = require_mixture(router, experts, shared)
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared
        self.weigh_input = weigh_input

    def forward(self, x: Tensor) -> Tensor:
        width, layer = getattr(self.router, "d_model", "d"), getattr(self.router, "router", None)
        require_tensor("x", x, ..., width, layer=layer)
        tokens = x.reshape(-1, x.shape[-1])  # (N, d)
        weights, chosen = self.router(tokens)  # (N, k)
        N, k = require_tensor("router(x)[1]", chosen, len(tokens), "k", kind="integer")
        require_tensor("router(x)[0]", weights, N, k)
        order = chosen.flatten().argsort()  # the choices of the first expert, of the second, …
        # Counted with a bin below the experts and one above, so that one wait for the device tells
        # both how many rows each expert gets and whether all choices are experts.
        E = len(self.experts)
        below, *sizes, above = count_choices(chosen.long().clamp(-1, E) + 1, E + 2).tolist()
        if below or above:
            raise ValueError(f"router(x)[1] must be 0 … {E - 1}, got {below + above} other ids")
        rows = (order // k).split(sizes)  # of each expert's tokens
        shares = weights.flatten()[order, None].split(sizes)
        out = torch.zeros_like(tokens)
        for ffn, row, share in zip(self.experts, rows, shares):
            given = tokens.index_select(0, row)
            given = ffn(share * given) if self.weigh_input else share * ffn(given)
            out.index_add_(0, row, given.to(x.dtype))
        out = out.view_as(x)
        return out if self.shared is None else out + self.shared(x)


# === Blocks: one class per topology (notes §1, §2, §3, §7.1) =================================


class VanillaEncoderLayer2017(nn.Module):
    """Post-LN encoder layer of 2017 and of BERT (arXiv:1706.03762 §3.1): each add is normed.

    x ─┬─ attn ─ + ─ ln1 ─┬─ ffn ─ + ─ ln2 ─
       └─────────┘        └────────┘
    Every position of x [B, T, d] sees every other; key_padding_mask [B, T] leaves padding out.
    ValueError for other shapes.
    """

    def __init__(self, d_model: int = 96, n_heads: int = 8, d_ff: int = 384, *,
                 act: Callable[[Tensor], Tensor] = F.relu, eps: float = 1e-5):  # fmt: skip
        super().__init__()
        require_value(int, n_heads=n_heads, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, act=act)
        self.attn = MultiHeadAttention(d_model, n_heads, bias=True)
        self.ffn = DenseFFN(d_model, d_ff, act, bias=True)
        self.ln1 = nn.LayerNorm(d_model, eps)
        self.ln2 = nn.LayerNorm(d_model, eps)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        attended, _ = self.attn(x, key_padding_mask=key_padding_mask)
        x = self.ln1(x + attended)
        return self.ln2(x + self.ffn(x))


class VanillaSeq2SeqDecoderLayer2017(nn.Module):
    """Post-LN decoder layer (arXiv:1706.03762 §3.1): causal self-attention, then cross-attention.

    x ─┬─ self_attn ─ + ─ ln1 ─┬─ cross_attn(memory) ─ + ─ ln2 ─┬─ ffn ─ + ─ ln3 ─
       └──────────────┘        └───────────────────────┘        └────────┘
    Versus VanillaEncoderLayer2017: a third sublayer, and a causal mask in the first. memory
    [B, S, d] is the encoder's output; x [B, T, d] and memory have a padding mask each, [B, T] and
    [B, S]. ValueError for other shapes.
    """

    def __init__(self, d_model: int = 96, n_heads: int = 8, d_ff: int = 384, *,
                 act: Callable[[Tensor], Tensor] = F.relu, eps: float = 1e-5):  # fmt: skip
        super().__init__()
        require_value(int, n_heads=n_heads, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, act=act)
        self.d_model = d_model
        self.self_attn = MultiHeadAttention(d_model, n_heads, bias=True)
        self.cross_attn = MultiHeadAttention(d_model, n_heads, bias=True)
        self.ffn = DenseFFN(d_model, d_ff, act, bias=True)
        self.ln1 = nn.LayerNorm(d_model, eps)
        self.ln2 = nn.LayerNorm(d_model, eps)
        self.ln3 = nn.LayerNorm(d_model, eps)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, *,
                key_padding_mask: Tensor | None = None,
                memory_key_padding_mask: Tensor | None = None) -> Tensor:  # fmt: skip
        B, _, _ = require_tensor("x", x, "B", "T", self.d_model)
        _, S, _ = require_tensor("memory", memory, B, "S", self.d_model)
        if memory_key_padding_mask is not None:
            require_tensor("memory_key_padding_mask", memory_key_padding_mask, B, S, kind="bool")
        masks = {"mask": mask, "causal": mask is None, "key_padding_mask": key_padding_mask}
        attended, _ = self.self_attn(x, **masks)
        x = self.ln1(x + attended)
        attended, _ = self.cross_attn(x, memory, key_padding_mask=memory_key_padding_mask)
        x = self.ln2(x + attended)
        return self.ln3(x + self.ffn(x))


class GPT2StyleDecoderLayer(nn.Module):
    """Pre-LN decoder block of GPT-2 (arXiv:2002.04745): norms inside the branches only.

    x ─┬─ norm1 ─ attn ─ + ─┬─ norm2 ─ ffn ─ + ─
       └─────────────────┘  └────────────────┘
    Versus the layers of 2017: Pre-LN, no cross-attention, GELU; the stack ends in a final norm.
    Positions are added to the embeddings, outside. GPT-2 itself uses the tanh form of GELU. x is
    [B, T, d], mask [T, S] or [B, T, S] and causal by default; ValueError for other shapes.
    """

    def __init__(self, d_model: int = 96, n_heads: int = 8, d_ff: int = 384, *,
                 act: Callable[[Tensor], Tensor] = F.gelu, eps: float = 1e-5):  # fmt: skip
        super().__init__()
        require_value(int, n_heads=n_heads, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, act=act)
        self.d_model = d_model
        self.attn = MultiHeadAttention(d_model, n_heads, bias=True)
        self.ffn = DenseFFN(d_model, d_ff, act, bias=True)
        self.norm1 = nn.LayerNorm(d_model, eps)
        self.norm2 = nn.LayerNorm(d_model, eps)

    def forward(self, x: Tensor, mask: Tensor | None = None, *,
                key_padding_mask: Tensor | None = None,
                kv_cache: "KVCache | None" = None) -> Tensor:  # fmt: skip
        require_tensor("x", x, "B", "T", self.d_model, layer=self.norm1)
        masks = {"mask": mask, "causal": mask is None, "key_padding_mask": key_padding_mask}
        attended, _ = self.attn(self.norm1(x), kv_cache=kv_cache, **masks)
        x = x + attended
        return x + self.ffn(self.norm2(x))


class ModernDecoderBlock(nn.Module):
    """Pre-RMSNorm decoder block of Llama (arXiv:2302.13971 §2.2), Mistral, Qwen: RoPE, GQA, SwiGLU.

    x ─┬─ norm1 ─ attn ─ + ─┬─ norm2 ─ ffn ─ + ─
       └─────────────────┘  └────────────────┘
    Versus GPT2StyleDecoderLayer: RMSNorm, rotation inside attention, GQA, a gated FFN, no biases.
    attn and ffn replace the default sublayers, e.g. MultiHeadLatentAttention or MoEFFN. x is
    [B, T, d], cos and sin [max_len, head_dim], masks as in attn; ValueError for other shapes.
    """

    def __init__(self, d_model: int = 96, n_q_heads: int = 8, n_kv_heads: int = 2,
                 d_ff: int = 256, *, attn: nn.Module | None = None,
                 ffn: nn.Module | None = None, eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, optional=True, attn=attn, ffn=ffn)
        if attn is None:
            attn = MultiHeadAttention(d_model, n_q_heads, n_kv_heads, rope=True)
        ffn = GatedFFN(d_model, d_ff) if ffn is None else ffn
        self.d_model, self.attn, self.ffn = d_model, attn, ffn
        self.norm1 = RMSNorm(d_model, eps)
        self.norm2 = RMSNorm(d_model, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, *,
                key_padding_mask: Tensor | None = None, kv_cache: "KVCache | None" = None,
                start_pos: int | None = None) -> Tensor:  # fmt: skip
        masks = {"mask": mask, "causal": mask is None, "key_padding_mask": key_padding_mask}
        position = {"cos": cos, "sin": sin, "kv_cache": kv_cache, "start_pos": start_pos}
        attended, _ = self.attn(self.norm1(x), **masks, **position)
        x = x + attended
        return x + self.ffn(self.norm2(x))


class ParallelDecoderBlock(nn.Module):
    """Parallel block of GPT-J (one norm), GPT-NeoX (two, arXiv:2204.06745): both branches read x.

       ┌─ norm ─┬─ attn ─┐              ┌─ norm ───── attn ─┐
    x ─┤        └─ ffn ──┤           x ─┼─ ffn_norm ─ ffn ──┤       (shared_norm=False)
       └──────────────── + ─            └────────────────── + ─
    Versus GPT2StyleDecoderLayer: the FFN does not see what attention wrote, and no biases. A
    norm of its own for the FFN does not make the block serial. The default attention does not
    rotate, and leaves the tables unread; attn=MultiHeadAttention(…, rope=True) is GPT-J's. Shapes
    and errors as in ModernDecoderBlock: x [B, T, d], ValueError.
    """

    def __init__(self, d_model: int = 96, n_q_heads: int = 8, n_kv_heads: int | None = None,
                 d_ff: int = 384, *, attn: nn.Module | None = None, ffn: nn.Module | None = None,
                 shared_norm: bool = True, eps: float = 1e-5):  # fmt: skip
        super().__init__()
        require_value(int, d_model=d_model)
        require_value(int, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, optional=True, attn=attn, ffn=ffn)
        attn = MultiHeadAttention(d_model, n_q_heads, n_kv_heads) if attn is None else attn
        ffn = DenseFFN(d_model, d_ff) if ffn is None else ffn
        self.d_model, self.attn, self.ffn = d_model, attn, ffn
        self.norm = nn.LayerNorm(d_model, eps)
        self.ffn_norm = None if shared_norm else nn.LayerNorm(d_model, eps)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, cos: Tensor | None = None,
                sin: Tensor | None = None, key_padding_mask: Tensor | None = None,
                kv_cache: "KVCache | None" = None,
                start_pos: int | None = None) -> Tensor:  # fmt: skip
        require_tensor("x", x, "B", "T", self.d_model, layer=self.norm)
        masks = {"mask": mask, "causal": mask is None, "key_padding_mask": key_padding_mask}
        position = {"cos": cos, "sin": sin, "kv_cache": kv_cache, "start_pos": start_pos}
        h = self.norm(x)
        h_ffn = h if self.ffn_norm is None else self.ffn_norm(x)
        attended, _ = self.attn(h, **masks, **position)
        return x + attended + self.ffn(h_ffn)


class BranchNormDecoderBlock(nn.Module):
    """Decoder block of Gemma-2 (arXiv:2408.00118 §2) and 3: branches are normed going in and out.

    x ─┬─ attn_pre_norm ─ attn ─ attn_post_norm ─ + ─┬─ ffn_pre_norm ─ ffn ─ ffn_post_norm ─ + ─
       └──────────────────────────────────────────┘  └───────────────────────────────────────┘
    Versus ModernDecoderBlock: the two post norms, on the branch and before the add, so the stream
    stays unnormed (it is not Post-LN). Shapes and errors as there: x [B, T, d], ValueError.
    """

    def __init__(self, d_model: int = 96, n_q_heads: int = 8, n_kv_heads: int = 2,
                 d_ff: int = 256, *, attn: nn.Module | None = None,
                 ffn: nn.Module | None = None, eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, d_ff=d_ff)
        require_value(float, eps=eps)
        require_value(Callable, optional=True, attn=attn, ffn=ffn)
        if attn is None:
            attn = MultiHeadAttention(d_model, n_q_heads, n_kv_heads, rope=True)
        ffn = GatedFFN(d_model, d_ff) if ffn is None else ffn
        self.d_model, self.attn, self.ffn = d_model, attn, ffn
        self.attn_pre_norm = RMSNorm(d_model, eps)
        self.attn_post_norm = RMSNorm(d_model, eps)
        self.ffn_pre_norm = RMSNorm(d_model, eps)
        self.ffn_post_norm = RMSNorm(d_model, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, *,
                key_padding_mask: Tensor | None = None, kv_cache: "KVCache | None" = None,
                start_pos: int | None = None) -> Tensor:  # fmt: skip
        masks = {"mask": mask, "causal": mask is None, "key_padding_mask": key_padding_mask}
        position = {"cos": cos, "sin": sin, "kv_cache": kv_cache, "start_pos": start_pos}
        attended, _ = self.attn(self.attn_pre_norm(x), **masks, **position)
        x = x + self.attn_post_norm(attended)
        return x + self.ffn_post_norm(self.ffn(self.ffn_pre_norm(x)))


# === Stack and shell (notes §10) =============================================================


def pick_next_token(logits: Tensor, temperature: float = 0.0, top_k: int | None = None,
                    top_p: float | None = None,
                    generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
    """Token ids [B, 1] from logits [B, V]: the likeliest at temperature 0, else one drawn.

    top_k keeps the k likeliest; top_p then keeps the fewest whose probabilities reach top_p
    (arXiv:1904.09751). ValueError for a NaN, or for no token that could be picked.
    """
    if 0 in require_tensor("logits", logits, "B", "V")[1:]:
        raise ValueError(f"logits must have a token to pick, got shape {list(logits.shape)}")
    require_sampling(temperature, top_k, top_p, generator)
    best, likeliest = logits.max(dim=1, keepdim=True)  # (B, 1)
    if not best.isfinite().all():  # max passes a NaN on
        came = best.flatten().tolist()
        raise ValueError(f"logits must have a finite best one in each row, got {came}")
    if temperature == 0:
        return likeliest
    wide = at_least_float32(logits)
    ranked, tokens = wide.sort(descending=True)  # (B, V)
    # The best logit becomes 0 before the division, so that a tiny temperature cannot give inf/inf.
    tiny = torch.finfo(torch.float32).tiny  # what is smaller would be 0 as a float32
    temperature = max(temperature, tiny)
    probs = ((ranked - ranked[:, :1]) / temperature).softmax(dim=1)  # (B, V)
    if top_k is not None:
        probs[:, top_k:] = 0
        probs /= probs.sum(dim=1, keepdim=True)
    if top_p is not None and top_p < 1:  # a running sum may reach 1 before the last token
        before = probs.cumsum(dim=1) - probs
        probs[before >= max(top_p, tiny)] = 0  # what stands before reaches it already
    return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))


class TiedEmbedding(nn.Embedding):
    """Token ids [B, T] to vectors [B, T, d], and vectors [..., d] to logits [..., V].

    One table [V, d] for both (arXiv:1608.05859): a logit is a vector's product with the token's
    row. Both uses go through the module's call, where hooks, offloading and shards act.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class DecoderOnlyLM(nn.Module):
    """Token ids to logits: embedding, blocks, final norm, head.

    make_block(layer) builds each block, ModernDecoderBlock by default: which layers have experts
    is decided there. windows holds each layer's attention window or None. Tied (arXiv:1608.05859),
    lm_head is None, and the embedding is called with vectors. Vectors are multiplied by
    embedding_scale, logits capped to logit_softcap * tanh(logits / logit_softcap). The rotation
    tables [max_len, rope_dim] with base rope_base are as wide as what the blocks turn, and no
    state: they stay float32 on the CPU, and the rows that a forward needs are moved. eps is the
    norms'. A part with new_cache() says what cache its block takes. ValueError for sizes that do
    not fit each other; a constructor that refuses has drawn nothing.
    """

    def __init__(self, vocab_size: int, d_model: int = 96, n_layers: int = 2, n_q_heads: int = 8,
                 n_kv_heads: int = 2, d_ff: int = 256, *, max_len: int = 2048,
                 rope_base: float = 10000.0, rope_dim: int | None = None,
                 make_block: Callable[[int], nn.Module] | None = None,
                 windows: list[int | None] | None = None, tie_embeddings: bool = True,
                 embedding_scale: float = 1.0, logit_softcap: float | None = None,
                 eps: float = 1e-6):  # fmt: skip
        super().__init__()
        require_value(int, vocab_size=vocab_size, d_model=d_model, n_layers=n_layers)
        require_value(int, n_q_heads=n_q_heads, max_len=max_len)
        require_value(float, embedding_scale=embedding_scale, rope_base=rope_base, eps=eps)
        require_value(float, optional=True, logit_softcap=logit_softcap)
        windows = [None] * n_layers if windows is None else windows
        require_windows(windows, n_layers)
        if make_block is None:

            def make_block(_layer: int) -> nn.Module:
                return ModernDecoderBlock(d_model, n_q_heads, n_kv_heads, d_ff, eps=eps)

        require_value(Callable, make_block=make_block)
        require_rope_dim(rope_dim, set())
        state = torch.get_rng_state()
        try:
            self.blocks = nn.ModuleList(make_block(layer) for layer in range(n_layers))
            widths = {getattr(part, "rope_dim", 0) for part in self.blocks.modules()} - {0}
            require_rope_dim(rope_dim, widths)
        except BaseException:
            torch.set_rng_state(state)  # make_block may have drawn before it failed
            raise
        self.max_len, self.rope_dim, self.windows = max_len, rope_dim, list(windows)
        self.embedding_scale, self.logit_softcap = embedding_scale, logit_softcap
        table = TiedEmbedding if tie_embeddings else nn.Embedding
        self.embedding = table(vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.final_norm = RMSNorm(d_model, eps)
        self.lm_head = None if tie_embeddings else nn.Linear(d_model, vocab_size, bias=False)
        if rope_dim is None:
            rope_dim = max(widths or {2, d_model // n_q_heads // 2 * 2})
        with torch.inference_mode(False):  # autograd refuses tensors made there
            self._rope_tables = build_rope_cache(max_len, rope_dim, rope_base, device="cpu")

    def new_caches(self) -> list["KVCache"]:
        """An empty cache for each block: of its attention's own kind (new_cache), else KVCache."""
        caches = []
        for block in self.blocks:
            makers = [part.new_cache for part in block.modules() if hasattr(part, "new_cache")]
            caches.append(makers[0]() if makers else KVCache())
        return caches

    def forward(self, ids: Tensor, *, kv_caches: list["KVCache"] | None = None,
                key_padding_mask: Tensor | None = None, mask: Tensor | None = None,
                last_only: bool = False) -> Tensor:  # fmt: skip
        """Token ids [B, T] to logits [B, T, V], with last_only [B, 1, V] of the last position.

        key_padding_mask is [B, cached + T]; mask, [T, cached + T] or [B, T, cached + T], is joined
        with each layer's causal window (packed documents). A forward that fails in any part leaves
        all caches as they were. ValueError for ids that are no tokens or go past max_len.
        """
        B, T = require_tensor("ids", ids, "B", "T", kind="integer")
        require_windows(self.windows, len(self.blocks))
        if self.rope_dim is None:  # else a table for a part of the channels was asked for
            require_turned(self.blocks, self._rope_tables[0].shape[1])
        start = require_caches(kv_caches, len(self.blocks))
        end = start + T
        if end > self.max_len:
            raise ValueError(f"ids would reach position {end}, past max_len={self.max_len}")
        combined_mask(mask, key_padding_mask, B, T, end)
        positions = torch.arange(end, device=ids.device)
        masks = {None: mask}  # of each window; without any, the blocks are causal by themselves
        for window in set(self.windows):
            if window is not None or mask is not None:
                seen = build_causal_mask(positions[start:], positions, window)  # (T, end)
                masks[window] = seen if mask is None else seen & mask
        cos, sin = (table[:end].to(ids.device) for table in self._rope_tables)
        options = {"cos": cos, "sin": sin, "key_padding_mask": key_padding_mask}
        if kv_caches is None:
            return self._logits(ids, masks, [None] * len(self.blocks), last_only, options)
        try:
            return self._logits(ids, masks, kv_caches, last_only, options)
        except BaseException:
            for cache in kv_caches:
                cache.truncate(start)
            raise

    def _logits(self, ids: Tensor, masks: dict[int | None, Tensor | None], kv_caches: list,
                last_only: bool, options: dict) -> Tensor:  # fmt: skip
        try:
            x = self.embedding(ids.long()) * self.embedding_scale  # (B, T, d)
        except IndexError as error:
            span = f"{ids.min().item()} … {ids.max().item()}"
            last = getattr(self.embedding, "num_embeddings", 0) - 1
            raise ValueError(f"ids must lie in 0 … {last}, got {span}") from error
        for block, window, cache in zip(self.blocks, self.windows, kv_caches):
            x = block(x, mask=masks[window], kv_cache=cache, **options)
        x = self.final_norm(x[:, -1:] if last_only else x)  # (B, T or 1, d)
        logits = self._head(x)
        if self.logit_softcap is None:
            return logits
        wide = at_least_float32(logits)
        return (self.logit_softcap * torch.tanh(wide / self.logit_softcap)).to(logits.dtype)

    def _head(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., V], whatever stands in lm_head or, with None there, in embedding."""
        if self.lm_head is not None:
            return self.lm_head(x)
        table = self.embedding
        if isinstance(table, TiedEmbedding) or not isinstance(table, nn.Embedding):
            return table(x)
        rows = table(torch.arange(table.num_embeddings, device=x.device))  # it takes ids only
        return F.linear(x, rows)

    def _vocab_size(self, ids: Tensor) -> float:
        """How many logits the head gives now, since any part may have been replaced."""
        if self.lm_head is not None:
            return getattr(self.lm_head, "out_features", math.inf)
        with torch.no_grad():
            return self._head(self.embedding(ids[:, :0].long())).shape[-1]  # of no tokens

    def stream(self, ids: Tensor, max_new_tokens: int, *, key_padding_mask: Tensor | None = None,
               temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
               eos_id: int | Iterable[int] | None = None,
               generator: torch.Generator | None = None) -> Iterator[Tensor]:  # fmt: skip
        """The tokens that follow prompts [B, T], int64 [B, 1] a step: one prefill, then one each.

        Prompts of different lengths are padded on the left. temperature 0 takes the likeliest
        token and draws nothing. A row that has produced an eos_id goes on with it, and the stream
        ends when all rows have. Raises ValueError at once for an empty prompt or more than max_len
        tokens. No gradients; the training flag stays as it is, dropout included.
        """
        B, T = require_tensor("ids", ids, "B", "T", kind="integer")
        require_value(int, above=-1, max_new_tokens=max_new_tokens)
        if T == 0:
            raise ValueError("ids must hold at least one token a row, got none")
        if T + max_new_tokens > self.max_len:
            raise ValueError(f"max_len={self.max_len} < {T} ids + max_new_tokens={max_new_tokens}")
        require_left_padding(key_padding_mask, B, T)
        require_sampling(temperature, top_k, top_p, generator)
        ends = [] if eos_id is None else require_token_ids(eos_id, self._vocab_size(ids))
        sampling = temperature, top_k, top_p, generator
        return self._steps(ids.long(), max_new_tokens, key_padding_mask, ends, sampling)

    def _steps(self, ids: Tensor, max_new_tokens: int, key_padding_mask: Tensor | None,
               ends: list[int], sampling: tuple) -> Iterator[Tensor]:  # fmt: skip
        caches = self.new_caches()
        done = torch.zeros(len(ids), 1, dtype=torch.bool, device=ids.device)  # (B, 1)
        for _ in range(max_new_tokens):
            given = {"kv_caches": caches, "key_padding_mask": key_padding_mask, "last_only": True}
            with torch.no_grad():
                logits = self(ids, **given)[:, 0]  # (B, V)
                drawn = pick_next_token(logits, *sampling)  # (B, 1)
            ids = torch.where(done, ids[:, -1:], drawn)  # (B, 1): all that the next step reads
            for token in ends:
                done = done | (ids == token)
            yield ids.clone()  # what the caller does with it must not reach the next step
            if ends and done.all():
                return
            if key_padding_mask is not None:
                key_padding_mask = F.pad(key_padding_mask, (0, 1), value=True)

    def generate(self, ids: Tensor, max_new_tokens: int, *,
                 key_padding_mask: Tensor | None = None, temperature: float = 0.0,
                 top_k: int | None = None, top_p: float | None = None,
                 eos_id: int | Iterable[int] | None = None,
                 generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
        """Prompts [B, T] and what follows, int64 [B, T + n], a tensor of its own: see stream."""
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        steps = self.stream(ids, max_new_tokens, key_padding_mask=key_padding_mask, eos_id=eos_id,
                            generator=generator, **sampling)  # fmt: skip
        return torch.cat((ids.long(), *steps), dim=1)


def next_token_loss(logits: Tensor, ids: Tensor, key_padding_mask: Tensor | None = None, *,
                    predict: Tensor | None = None) -> Tensor:  # fmt: skip
    """Mean cross entropy of logits [B, T, V] at t against ids [B, T] at t + 1, in float32 or wider.

    A pair counts where both tokens are real (key_padding_mask [B, T], True = real) and the second
    is to be predicted (predict [B, T]: the answer, not the prompt); 0 without any. ValueError for
    other shapes or ids that are no tokens.
    """
    B, T, V = require_tensor("logits", logits, "B", "T", "V")
    require_tensor("ids", ids, B, T, kind="integer")
    targets = ids[:, 1:].long()  # (B, T-1)
    pairs = torch.ones_like(targets, dtype=torch.bool)  # (B, T-1)
    if key_padding_mask is not None:
        require_tensor("key_padding_mask", key_padding_mask, B, T, kind="bool")
        pairs = key_padding_mask[:, :-1] & key_padding_mask[:, 1:]
    if predict is not None:
        require_tensor("predict", predict, B, T, kind="bool")
        pairs = pairs & predict[:, 1:]
    wide = at_least_float32(logits)
    log_probs = wide[:, :-1].log_softmax(dim=-1)  # (B, T-1, V)
    try:
        losses = -log_probs.gather(-1, targets[..., None])[..., 0]  # (B, T-1)
    except (IndexError, RuntimeError) as error:
        span = f"{ids.min().item()} … {ids.max().item()}"
        raise ValueError(f"ids must lie in 0 … {V - 1}, got {span}") from error
    return losses.masked_fill(~pairs, 0).sum() / pairs.sum().clamp(min=1)


# === Counting (notes §1.3, §5) ===============================================================


def attention_parameters(d_model: int, n_q_heads: int, n_kv_heads: int | None = None) -> int:
    """2 d^2 (1 + G / H): q and o are d x d, k and v d x G d_h, with d = H d_h and no biases.

    Grouped heads are those of arXiv:2305.13245 §2. ValueError for sizes that do not divide.
    """
    n_kv_heads = n_q_heads if n_kv_heads is None else n_kv_heads
    require_value(int, d_model=d_model, n_q_heads=n_q_heads, n_kv_heads=n_kv_heads)
    if d_model % n_q_heads or n_q_heads % n_kv_heads:
        raise ValueError(f"n_q_heads={n_q_heads} must divide d_model={d_model}"
                         f" and be a multiple of n_kv_heads={n_kv_heads}")  # fmt: skip
    return 2 * d_model * (d_model + n_kv_heads * d_model // n_q_heads)


def ffn_parameters(d_model: int, d_ff: int, gated: bool) -> int:
    """3 d h with a gate (arXiv:2002.05202 §2), else 2 d h, no biases. ValueError for sizes < 1."""
    require_value(int, d_model=d_model, d_ff=d_ff)
    return (3 if gated else 2) * d_model * d_ff


def kv_cache_elements(n_kv_heads: int, head_dim: int) -> int:
    """Numbers cached for one token in one layer: a key and a value for each KV head.

    It is what arXiv:1911.02150 makes small. ValueError for a number below 1.
    """
    require_value(int, n_kv_heads=n_kv_heads, head_dim=head_dim)
    return 2 * n_kv_heads * head_dim


def kv_cache_bytes(n_layers: int, n_kv_heads: int, head_dim: int, length: int, batch: int = 1,
                   bytes_per_element: int = 2) -> int:  # fmt: skip
    """Bytes of the cache for batch sequences of length tokens; ValueError for a number below 1."""
    require_value(int, n_layers=n_layers, length=length, batch=batch)
    require_value(int, bytes_per_element=bytes_per_element)
    elements = kv_cache_elements(n_kv_heads=n_kv_heads, head_dim=head_dim)
    return elements * n_layers * length * batch * bytes_per_element


def gated_hidden_size(d_model: int, multiple_of: int = 1, multiplier: float = 1.0) -> int:
    """Llama's d_ff: two thirds of 4 d, times multiplier, rounded up to multiple_of.

    Two thirds, because three matrices then hold what two of width 4 d do (arXiv:2302.13971 §2.2).
    ValueError for a number not above 0.
    """
    require_value(int, d_model=d_model, multiple_of=multiple_of)
    require_value(float, multiplier=multiplier)
    d_ff = int(multiplier * (8 * d_model // 3))
    return -(-d_ff // multiple_of) * multiple_of


# === Demos: each proves one claim and computes what it prints (notes §1.4) ===================


DEMO_PROOFS: dict[str, list[Callable]] = {}  # what each demo proves besides: found below


@contextlib.contextmanager
def check_seeded(seed: int) -> Iterator[None]:
    """Decorator of a demo: it draws from the CPU generator with this seed and puts it back."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        yield


def check_claims(text: str, **claims: object) -> tuple[bool, str]:
    """(ok, text) of a demo, in which nothing is False; the text names what else does not hold."""
    failed = [claim for claim, holds in claims.items() if not holds]
    if "False" in text:
        failed.insert(0, "False")
    return not failed, text + (f"  (not so: {', '.join(failed)})" if failed else "")


def check_proofs(demo_id: str, device: str) -> dict[str, bool]:
    """The claims of a demo's further proofs; one that raises is a claim that does not hold.

    A proof takes the device, or exact, the nearest one that has float64, or nothing.
    """
    claims, given = {}, {"device": device, "exact": check_exact_device(device)}
    for proof in DEMO_PROOFS.get(demo_id, []):
        name, takes = proof.__name__, inspect.signature(proof).parameters
        try:
            for claim, holds in proof(**{key: given[key] for key in given if key in takes}):
                claims[f"{name}: {claim}"] = holds and claims.get(f"{name}: {claim}", True)
        except Exception as error:
            claims[f"{name}: {check_place(error)}"] = False
    return claims


def check_place(error: Exception) -> str:
    """What was raised and where, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    first_line = str(error).partition("\n")[0]
    where = f"{place.name}, {Path(place.filename).name}:{place.lineno}"
    return f"raised {type(error).__name__}: {first_line} ({where})"


def check_gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of one shape; infinite for two shapes."""
    if a.shape != b.shape:
        return math.inf
    a, b = (t.detach().cpu().double() for t in (a, b))
    return (a - b).abs().max().item() if a.numel() else 0.0


@check_seeded(1)
def demo_D01(device: str = "cpu") -> tuple[bool, str]:
    """Every block keeps [B, T, d]; cross-attention reads a memory of another length."""
    x, memory = torch.randn(2, 7, 96).to(device), torch.randn(2, 5, 96).to(device)
    cos, sin = build_rope_cache(7, 12, device=device)
    encoder = VanillaEncoderLayer2017().to(device)
    decoder = VanillaSeq2SeqDecoderLayer2017().to(device)
    gpt2, modern = GPT2StyleDecoderLayer().to(device), ModernDecoderBlock().to(device)
    crossed = decoder(x, memory)
    shapes = [encoder(x).shape, crossed.shape, gpt2(x).shape, modern(x, cos, sin).shape]
    reads = check_gap(crossed, decoder(x, memory.roll(1, dims=2))) > 1e-3
    return check_claims(
        f"shapes (enc/dec2017/gpt2/modern) = {shapes} (expect 4x (2,7,96)); cross-attn ran with "
        f"Tq={crossed.shape[1]} != S={memory.shape[1]}; changing memory changes cross-attn output "
        f"(memory is actually read, not ignored) = {reads}",
        shapes=shapes == [(2, 7, 96)] * 4,
        **check_proofs("D01", device),
    )


@check_seeded(2)
def demo_D02(device: str = "cpu") -> tuple[bool, str]:
    """With sublayers that give zero, Pre-LN blocks are the identity, Post-LN ones ln2(ln1(x))."""
    x, norm = torch.randn(2, 5, 96).to(device), nn.LayerNorm(96).to(device)
    cos, sin = build_rope_cache(5, 12, device=device)
    zero = torch.zeros_like
    pre = torch.equal(x + zero(norm(x)), x)
    post = torch.equal(norm(x + zero(x)), norm(x))
    post_moves = not torch.allclose(norm(x + zero(x)), x)
    modern, encoder = ModernDecoderBlock().to(device), VanillaEncoderLayer2017().to(device)
    trained = check_gap(modern(x, cos, sin), x)
    check_zeroed(modern.attn.o_proj, modern.ffn.down, encoder.attn.o_proj, encoder.ffn.down)
    identity, encoded = torch.equal(modern(x, cos, sin), x), encoder(x)
    encoder_moves = not torch.allclose(encoded, x)
    encoder_norms = torch.equal(encoded, encoder.ln2(encoder.ln1(x)))
    return check_claims(
        f"formula-level: Pre-LN(F=0)==x: {pre}; Post-LN(F=0)==N(x): {post} (and != x: "
        f"{post_moves}); class-level: zeroed ModernDecoderBlock==x: {identity}, zeroed Post-LN "
        f"encoder layer != x: {encoder_moves}, == ln2(ln1(x)) exactly: {encoder_norms}",
        trained_block_moves=trained > 0.1,
        **check_proofs("D02", device),
    )


@check_seeded(3)
def demo_D03(device: str = "cpu") -> tuple[bool, str]:
    """No position sees the future, and every position sees the past through attention."""
    x = torch.randn(6, 96).to(device)
    cos, sin = build_rope_cache(6, 12, device=device)
    batch = x.repeat(3, 1, 1)  # as it is, changed after t=3, changed at 0
    for changed, place in zip(batch[1:], (slice(4, 6), slice(0, 1))):
        changed[place] = changed[place].roll(1, dims=-1)  # a norm would undo a shift or a factor
    out = ModernDecoderBlock().to(device)(batch, cos, sin)
    after_3, at_0 = ((out[1:] - out[0]).abs().amax(dim=-1) > 1e-6).tolist()
    held, felt = not any(after_3[:4]), all(after_3[4:])
    mixes, seven = all(at_0[1:]), torch.arange(7, device=device)
    masks = {  # 0 <= distance < window, one pair at a time
        "causal": (build_causal_mask(seven, seven), reference_causal(7)),
        "cached": (build_causal_mask(seven[4:], seven), reference_causal(3, 7)),
        "window": (build_causal_mask(seven, seven, 3), reference_causal(7, window=3)),
        "uint8": (build_causal_mask(seven.byte(), seven.byte(), 1), torch.eye(7) > 0),
    }
    return check_claims(
        f"perturbing tokens after t=3: positions 0..3 unchanged = {held}, positions 4..5 changed = "
        f"{felt}; perturbing position 0 changes positions 1..5 (attention actually mixes forward, "
        f"not a dead branch) = {mixes}",
        **{name: torch.equal(mask.cpu(), keep) for name, (mask, keep) in masks.items()},
        **check_proofs("D03", device),
    )


@check_seeded(4)
def demo_D04(device: str = "cpu") -> tuple[bool, str]:
    """One full pass equals decoding with a cache, in any split; the cache holds G heads."""
    x = torch.randn(1, 6, 96).to(device)
    cos, sin = build_rope_cache(16, 12, device=device)
    block, cache = ModernDecoderBlock().to(device), KVCache()
    full = block(x, cos, sin)
    steps = [block(x[:, t : t + 1], cos, sin, kv_cache=cache) for t in range(6)]
    gap = check_gap(full, torch.cat(steps, dim=1))
    # The contents from the weights alone: a slice a head, and a turn by position * frequency.
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    k = reference_heads(normed, block.attn.k_proj, 12).detach().cpu().double()
    gap_k = check_gap(cache.k, reference_turn(k, 12))
    gap_v = check_gap(cache.v, reference_heads(normed, block.attn.v_proj, 12))
    _, heads, length, _ = cache.k.shape
    return check_claims(
        f"full-forward vs token-by-token cached decode: max|Δ| = {gap:.2e} (tol 1e-04, numerically "
        f"equivalent, NOT bit-identical); cache CONTENT vs independently projected+rotated K/V: "
        f"max|ΔK|={gap_k:.2e}, max|ΔV|={gap_v:.2e}; final cache shape head_dim={heads} (expect 2) "
        f"len={length} (expect 6)",
        decode=gap < 5e-6,
        contents=max(gap_k, gap_v) < 5e-6,
        shape=(heads, length) == (2, 6),
        unturned_keys_differ=check_gap(cache.k, k) > 0.1,
        **check_proofs("D04", device),
    )


@check_seeded(5)
def demo_D05(device: str = "cpu") -> tuple[bool, str]:
    """G = H is MHA; G < H and G = 1 equal a reference that copies K and V out to all heads."""
    x = torch.randn(2, 5, 96).to(device)
    gaps, keep, cache = [], reference_causal(5).to(device), KVCache()
    for n_kv_heads in (8, 2, 1):
        attn = MultiHeadAttention(96, 8, n_kv_heads).to(device)
        out, _ = attn(x, mask=keep, kv_cache=cache if n_kv_heads == 1 else None)
        q, k, v = (reference_heads(x, part, 12) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
        heads = reference_attention(q, k, v, keep)  # query heads [0 1 2 3 | 4 … 7] for two KV heads
        gaps.append(check_gap(out, reference_output(heads, attn.o_proj)))
    distinct = all(check_gap(a, b) > 1e-3 for a, b in itertools.combinations(heads.unbind(1), 2))
    return check_claims(
        f"GQA(n_kv=n_q) == independent reference MHA: max|Δ|={gaps[0]:.2e}; GQA(n_kv=2, group=4) "
        f"== independent repeat_interleave reference: max|Δ|={gaps[1]:.2e}; MQA == same reference "
        f"(n_kv=1): max|Δ|={gaps[2]:.2e}, cache head_dim={cache.k.shape[1]} (expect 1), output "
        f"shape={tuple(out.shape)}, per-query-head outputs distinct (not collapsed) = {distinct}",
        references=max(gaps) < 5e-6,
        shapes=cache.k.shape[1] == 1 and out.shape == (2, 5, 96),
        **check_proofs("D05", device),
    )


@check_seeded(6)
def demo_D06(device: str = "cpu") -> tuple[bool, str]:
    """The parameter formulas give what the modules hold."""
    dense, gated = demo_count(DenseFFN(96, 384)), demo_count(GatedFFN(96, gated_hidden_size(96)))
    gqa, mha = demo_count(MultiHeadAttention(96, 8, 2)), demo_count(MultiHeadAttention(96, 8))
    ffns = [ffn_parameters(96, 384, gated=False), ffn_parameters(96, 256, gated=True)]
    attentions = [attention_parameters(96, 8, 2), attention_parameters(96, 8)]
    return check_claims(
        f"FFN params: dense(4d)={dense}, gated(8d/3)={gated} (both expect 73728); attn params: "
        f"GQA={gqa} (formula 2d^2(1+n_kv/n_q)={attentions[0]}), MHA={mha} (formula "
        f"4d^2={attentions[1]})",
        formulas=(dense, gated, gqa, mha) == (*ffns, *attentions) == (73728, 73728, 23040, 36864),
        **check_proofs("D06", device),
    )


@check_seeded(7)
def demo_D07(device: str = "cpu") -> tuple[bool, str]:
    """Packed projections equal separate ones, through all of attention and all of the gated FFN."""
    x, keep = torch.randn(2, 5, 96).to(device), reference_causal(5).to(device)
    attn, ffn = MultiHeadAttention(96, 8, 2).to(device), GatedFFN(96, 256).to(device)
    qkv = torch.cat([p.weight for p in (attn.q_proj, attn.k_proj, attn.v_proj)])  # (q+2kv, d)
    parts = F.linear(x, qkv).split((96, 24, 24), dim=-1)
    q, k, v = (part.unflatten(-1, (-1, 12)).transpose(1, 2) for part in parts)
    packed = attn.o_proj(attend(q, k, v, keep).transpose(1, 2).flatten(2))
    gap_qkv = check_gap(packed, attn(x, mask=keep)[0])
    gate, up = F.linear(x, torch.cat((ffn.gate.weight, ffn.up.weight))).chunk(2, dim=-1)
    gap_ffn = check_gap(ffn.down(F.silu(gate) * up), ffn(x))
    swapped = check_gap(ffn.down(F.silu(up) * gate), ffn(x))
    wrong = check_gap(attn.o_proj(attend(q, v, k, keep).transpose(1, 2).flatten(2)), packed)
    return check_claims(
        f"packed QKV vs separate: max|Δ|={gap_qkv:.2e}; packed gate+up vs separate: "
        f"max|Δ|={gap_ffn:.2e}",
        packed=max(gap_qkv, gap_ffn) < 5e-6,
        order_matters=min(swapped, wrong) > 1e-3,
        **check_proofs("D07", device),
    )


@check_seeded(8)
def demo_D08(device: str = "cpu") -> tuple[bool, str]:
    """Serial: the FFN reads the updated stream. Parallel: both branches read the same tensor."""
    x = torch.randn(2, 5, 96).to(device)
    cos, sin = build_rope_cache(5, 12, device=device)

    def seen(block: nn.Module, *args: Tensor) -> list[Tensor]:
        """What attn and ffn are given in a real forward, and what attn adds."""
        caught = []
        block.attn.register_forward_hook(lambda _, args, out: caught.extend((args[0], out[0])))
        block.ffn.register_forward_hook(lambda _, args, out: caught.insert(1, args[0]))
        block(x, *args)
        return caught

    serial, parallel = ModernDecoderBlock().to(device), ParallelDecoderBlock().to(device)
    attn_in, ffn_in, attn_out = seen(serial, cos, sin)
    reads_norm1 = torch.equal(attn_in, serial.norm1(x))
    updated = torch.equal(ffn_in, serial.norm2(x + attn_out))
    not_stale = not torch.allclose(ffn_in, serial.norm2(x))
    attn_same, ffn_same, _ = seen(parallel)
    both = [torch.equal(given, parallel.norm(x)) for given in (attn_same, ffn_same)]
    two_norms = ParallelDecoderBlock(shared_norm=False).to(device)
    attn_own, ffn_own, _ = seen(two_norms)
    return check_claims(
        f"sequential: attn input == norm1(x): {reads_norm1}, FFN input == norm2(x+attn_out) "
        f"(updated stream): {updated} (and != norm2(x) alone: {not_stale}); parallel: attn input "
        f"== norm(x): {both[0]}, FFN input == norm(x): {both[1]}, attn and FFN inputs are the "
        f"literal SAME tensor: {attn_same is ffn_same}",
        two_norms=attn_own is not ffn_own and torch.equal(ffn_own, two_norms.ffn_norm(x)),
        **check_proofs("D08", device),
    )


@check_seeded(7)  # three tokens then go to experts 0, 2 and 2
def demo_D09(device: str = "cpu") -> tuple[bool, str]:
    """Every parameter gets a finite gradient that is not zero; idle experts get zeros."""
    cos, sin = build_rope_cache(3, 12, device=device)
    x = torch.randn(1, 3, 96).to(device)
    dense = ModernDecoderBlock().to(device)
    sparse = ModernDecoderBlock(ffn=MoEFFN(96, 256)).to(device)
    for block in (dense, sparse):
        block(x, cos, sin).square().sum().backward()
    finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in dense.parameters())
    nonzero = all(p.grad is not None and bool(p.grad.any()) for p in dense.parameters())
    moe, grads = sparse.ffn, {name: p.grad for name, p in sparse.named_parameters()}
    sound = all(g is not None and bool(g.isfinite().all()) for g in grads.values())
    alive = {name: g is not None and bool(g.any()) for name, g in grads.items()}
    used = [n > 0 for n in moe.tokens_per_expert]
    each = [[on for name, on in alive.items() if f".experts.{e}." in name] for e in range(4)]
    experts = sound and each == [[n] * 3 for n in used]
    router = sound and alive["ffn.router.weight"]
    rest = sound and all(on for name, on in alive.items() if not name.startswith("ffn."))
    return check_claims(
        f"dense block: all grads finite = {finite}, all non-zero = {nonzero}; MoE "
        f"tokens_per_expert={moe.tokens_per_expert} (<4 tokens, so >=1 expert unused by pigeonhole)"
        f"; touched experts non-zero+finite grad, untouched experts no/zero grad: {experts}; "
        f"router gate non-zero+finite grad: {router}; rest-of-block (attn+norms) non-zero+finite "
        f"grad: {rest}",
        routed=sum(moe.tokens_per_expert) == 3,
        **check_proofs("D09", device),
    )


@check_seeded(10)
def demo_D10(device: str = "cpu") -> tuple[bool, str]:
    """Illegal configurations fail at construction, and name the argument and its value."""
    d_model = check_raises(ValueError, lambda: MultiHeadAttention(10, 4), "n_q_heads=4", 10)
    heads = check_raises(ValueError, lambda: MultiHeadAttention(12, 6, 4), "n_kv_heads=4", 6)
    odd = check_raises(ValueError, lambda: MultiHeadAttention(12, 4, rope=True), "head_dim", 3)
    top_k = check_raises(NotImplementedError, lambda: MoEFFN(8, 8, top_k=2), "top_k", 2)
    return check_claims(
        f"d_model % n_q_heads != 0 raises ValueError: {d_model}; n_q_heads % n_kv_heads != 0 "
        f"raises ValueError: {heads}; RoPE + odd head_dim raises ValueError: {odd}; "
        f"MoEFFN(top_k=2) raises NotImplementedError (no silent top-1 downgrade): {top_k}",
        **check_proofs("D10", device),
    )


@check_seeded(11)
def demo_D11(device: str = "cpu") -> tuple[bool, str]:
    """The cache refuses what does not continue it, and survives the refusal unchanged."""
    attn, cache = MultiHeadAttention(96, 8, 2, rope=True).to(device), KVCache()
    x, k = torch.randn(2, 6, 96).to(device), torch.randn(2, 2, 1, 12).to(device)
    cos, sin = build_rope_cache(6, 12, device=device)
    step = functools.partial(attn, x[:, 4:5], cos=cos, sin=sin, kv_cache=cache)
    attn(x[:, :4], cos=cos, sin=sin, kv_cache=cache)
    stored = cache.k.clone()
    row = (ValueError, lambda: step(start_pos=3), "start_pos", "next_pos=4", 3)
    inconsistent = all(holds for _, holds in check_refused(row, kept=[cache]))
    step(start_pos=4)
    consistent = cache.next_pos == 5 and torch.equal(cache.k[:, :, :4], stored)
    refused = check_refused(
        (ValueError, lambda: cache.append(k[:1], k[:1]), "k_new"),
        (ValueError, lambda: cache.append(k, k[..., :6]), "v_new"),
        (ValueError, lambda: cache.append(k, k[:1]), "v_new"),
        kept=[cache],
    )
    mismatched = all(holds for _, holds in refused)
    cache.reset()
    cleared = (cache.k, cache.v, cache.next_pos) == (None, None, 0)
    return check_claims(
        f"inconsistent start_pos vs non-empty cache raises ValueError: {inconsistent}; consistent "
        f"start_pos does not raise: {consistent}; cache.reset() clears state: {cleared}; append() "
        f"with mismatched batch/shape raises ValueError: {mismatched}",
        **check_proofs("D11", device),
    )


@check_seeded(12)
def demo_D12(device: str = "cpu") -> tuple[bool, str]:
    """Cross-attention refuses rotation and caches, and works without them."""
    x, memory = torch.randn(2, 4, 32).to(device), torch.randn(2, 6, 32).to(device)
    rotated = MultiHeadAttention(32, 4, rope=True).to(device)
    plain, cache = MultiHeadAttention(32, 4).to(device), KVCache()
    cos, sin = build_rope_cache(6, 8, device=device)
    words = ("memory", "rope=True", "kv_cache")
    rope = check_raises(ValueError, lambda: rotated(x, memory, cos=cos, sin=sin), *words)
    cached = check_raises(ValueError, lambda: plain(x, memory, kv_cache=cache), *words)
    out, (k, v) = plain(x[:1], memory[:1])
    works = out.shape == (1, 4, 32) and bool(out.isfinite().all())
    return check_claims(
        f"cross-attention + RoPE raises ValueError: {rope}; cross-attention + KV cache raises "
        f"ValueError: {cached}; plain cross-attention (no RoPE/cache) still works, "
        f"shape={tuple(out.shape)}: {works}",
        cache=cache.next_pos == 0 and k.shape == v.shape == (1, 4, 6, 8),
        **check_proofs("D12", device),
    )


@check_seeded(13)
def demo_D13(device: str = "cpu") -> tuple[bool, str]:
    """Rows without a key give zeros; padding is per sample, also when B equals G or T."""
    attn = MultiHeadAttention(96, 8, 2).to(device)
    x = torch.randn(2, 5, 96).to(device)
    keep = reference_causal(5).to(device)
    keep[2] = False
    out, _ = attn(x, mask=keep)
    finite = bool(out.isfinite().all()) and not out[:, 2].any() and bool(out[:, 3].all())

    def isolated(T: int, *lengths: int) -> float:
        """One padded batch against every sample alone and cut to its length."""
        x = torch.randn(len(lengths), T, 96).to(device)
        padding = torch.arange(T, device=device) < torch.tensor(lengths, device=device)[:, None]
        together, cut = attn(x, key_padding_mask=padding)[0], zip(x, lengths)
        alone = [attn(row[None, :n])[0][0] for row, n in cut]
        return max(check_gap(out[: len(row)], row) for out, row in zip(together, alone))

    as_groups, as_tokens = isolated(5, 3, 5), isolated(3, 1, 3, 2)
    per_group, per_token = as_groups < 5e-6, as_tokens < 5e-6
    return check_claims(
        f"fully-masked query row produces finite output (no NaN): {finite}; key_padding_mask "
        f"correctly isolated per-batch-sample when B==n_kv_heads (2): max|Δ| vs per-sample "
        f"reference={as_groups:.2e} -> {per_group}; same check when B==Tq (3): max|Δ|="
        f"{as_tokens:.2e} -> {per_token}",
        **check_proofs("D13", device),
    )


@check_seeded(14)
def demo_D14(device: str = "cpu") -> tuple[bool, str]:
    """Leaving the mask out is causal, also behind a cache."""
    x = torch.randn(2, 6, 96).to(device)
    cos, sin = build_rope_cache(6, 12, device=device)
    positions = torch.arange(6, device=device)
    explicit = build_causal_mask(positions, positions)
    gpt2, modern = GPT2StyleDecoderLayer().to(device), ModernDecoderBlock().to(device)
    out = gpt2(x)
    same_gpt2 = torch.equal(out, gpt2(x, explicit)) and not torch.equal(out, gpt2(x, explicit.T))
    x_changed = torch.cat((x[:, :4], x[:, 4:] + 1), dim=1)
    causal = check_gap(out[:, :4], gpt2(x_changed)[:, :4]) < 1e-6
    causal = causal and check_gap(out[:, 4:], gpt2(x_changed)[:, 4:]) > 1e-3
    same_modern = torch.equal(modern(x, cos, sin), modern(x, cos, sin, explicit))
    return check_claims(
        f"GPT2StyleDecoderLayer: omitted causal_mask == explicit causal_mask: {same_gpt2}, default "
        f"is genuinely causal (no future->past leakage): {causal}; ModernDecoderBlock: omitted "
        f"causal_mask == explicit causal_mask: {same_modern}",
        **check_proofs("D14", device),
    )


@check_seeded(15)
def demo_D15(device: str = "cpu") -> tuple[bool, str]:
    """Rotation tables keep dtype and device, and hold the angles that the formula gives."""
    exact = check_exact_device(device)
    wide = build_rope_cache(8, 4, device=exact, dtype=torch.float64)
    narrow = build_rope_cache(8, 4, device=exact)
    x = check_draw(2, 3, 8, 4, device=exact)
    is_wide = all(table.dtype == torch.float64 for table in wide)
    turned = apply_rope(x, *narrow)
    casts = turned.dtype == torch.float64 and all(t.dtype == torch.float32 for t in narrow)
    gap = check_gap(turned, apply_rope(x, *wide))
    return check_claims(
        f"build_rope_cache(dtype=float64) produces float64 cos/sin: {is_wide}; apply_rope "
        f"auto-casts a mismatched (float32) cache to a float64 input's dtype (no crash, correct "
        f"output dtype): {casts}; matches a natively-float64-built cache: {gap == 0} "
        f"(max|Δ|={gap:.2e})",
        **check_proofs("D15", device),
    )


# === Argument checks: they raise before anything is changed, and also under python -O ========


def require_value(kind: type, above: int = 0, optional: bool = False, **values: object) -> None:
    """Refuse values of another kind: int or float (ints too) above a bound, Callable, or None."""
    for name, value in values.items():
        if optional and value is None:
            continue
        kinds = (int, float) if kind is float else kind
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name} must be {kind.__name__}, got {value!r}")
        end = 2**63 if isinstance(value, int) else math.inf  # an int64, or any finite float
        if kind is not Callable and not above < value < end:
            raise ValueError(f"{name} must be above {above} and below {end}, got {value}")


def require_tensor(name: str, tensor: Tensor, *shape: object, kind: str = "floating",
                   layer: nn.Module | None = None) -> torch.Size:  # fmt: skip
    """Refuse a tensor of another shape or kind of dtype ("floating", "bool", "integer").

    In shape a str names an axis of any size and a leading ... stands for any number of axes.
    With a layer, the dtype must be its weight's, but for autocast and hooks. Returns the shape.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    dtype, sizes = tensor.dtype, tensor.shape
    came = "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"
    if came != kind or dtype.is_complex:
        raise TypeError(f"{name} must have a {kind} dtype, got {dtype}")
    known = type(layer) in (nn.Linear, nn.LayerNorm) and not layer._forward_pre_hooks
    if known and layer.weight.dtype != dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise TypeError(f"{name} must be {layer.weight.dtype} as the weights are, got {dtype}")
    if shape[0] is ...:  # as many axes as there are more, of any size
        shape = ("…",) * (len(sizes) - len(shape) + 1) + shape[1:]
    fits = len(shape) == len(sizes)
    for want, have in zip(shape, sizes):  # a loop: this runs 14 times a layer and token
        fits = fits and (want == have or isinstance(want, str))
    if not fits:
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}], got {list(sizes)}")
    return sizes


def require_attention_inputs(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None,
                             **options: float | None) -> Tensor | None:  # fmt: skip
    """Refuse what attend and attend_fused cannot combine; returns keep with four axes."""
    B, H, T, head_dim = require_tensor("q", q, "B", "H", "T", "head_dim")
    _, G, S, _ = require_tensor("k", k, B, "G", "S", head_dim)
    require_tensor("v", v, B, G, S, "d_v")
    if not head_dim or not G or H % G:
        raise ValueError(f"q needs a head_dim and a multiple of {G} heads, got {list(q.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    require_value(float, optional=True, **options)
    if keep is not None:
        require_tensor("keep", keep, ..., kind="bool")
        keep = keep[(None,) * (4 - keep.dim())]
        if keep.dim() > 4 or any(n not in (1, m) for n, m in zip(keep.shape, (B, 1, T, S))):
            raise ValueError(f"keep must broadcast to [{B}, 1, {T}, {S}], got {list(keep.shape)}")
    return keep


def require_routing(d_model: int, n_experts: int, top_k: int, scale: float, n_groups: int,
                    top_groups: int) -> None:  # fmt: skip
    """Refuse experts that the groups do not divide, or fewer open ones than are to be chosen."""
    require_value(int, d_model=d_model, n_experts=n_experts, top_k=top_k)
    require_value(int, n_groups=n_groups, top_groups=top_groups)
    require_value(float, scale=scale)
    if n_experts % n_groups:
        raise ValueError(f"n_groups={n_groups} must divide n_experts={n_experts}")
    if top_groups > n_groups:
        raise ValueError(f"top_groups must be at most n_groups={n_groups}, got {top_groups}")
    if top_k > n_experts // n_groups * top_groups:
        raise ValueError(f"top_k must be at most the {n_experts // n_groups * top_groups} experts "
                         f"of top_groups={top_groups} groups, got {top_k}")  # fmt: skip


def require_mixture(router: object, experts: object, shared: object) -> list[nn.Module]:
    """The experts as a list; refuses what is no module, and another number than the router's."""
    experts = list(experts) if isinstance(experts, Iterable) else [experts]
    shared = [] if shared is None else [shared]
    for name, parts in (("router", [router]), ("experts", experts), ("shared", shared)):
        if not all(isinstance(part, nn.Module) for part in parts):
            raise TypeError(f"{name} must be of torch modules, got {parts}")
    wanted = getattr(getattr(router, "router", None), "out_features", max(len(experts), 1))
    if len(experts) != wanted:
        raise ValueError(f"experts must be the router's {wanted}, got {len(experts)}")
    return experts


def require_windows(windows: object, n_layers: int) -> None:
    """Refuse windows that are not one for each of the blocks, or not above 0."""
    if not isinstance(windows, (list, tuple)):
        raise TypeError(f"windows must be a list, got {windows!r}")
    if len(windows) != n_layers:
        raise ValueError(f"windows must have an entry for each of {n_layers} blocks, got {windows}")
    for window in windows:
        require_value(int, optional=True, windows=window)


def require_rope_dim(rope_dim: int | None, widths: set[int]) -> None:
    """Refuse a table that the attentions, which turn these widths, cannot use."""
    if rope_dim is None:
        if len(widths) > 1:
            raise ValueError(f"rope_dim must be given: the blocks turn {sorted(widths)} channels")
        return
    require_value(int, rope_dim=rope_dim)
    if rope_dim % 2:
        raise ValueError(f"rope_dim must be even, got {rope_dim}")
    if widths and rope_dim > min(widths):
        raise ValueError(f"rope_dim must be at most the {min(widths)} turned, got {rope_dim}")


def require_turned(blocks: Iterable[nn.Module], width: int) -> None:
    """Refuse a block, put in later, that would turn only a part of its channels."""
    for block in blocks:
        turned = getattr(getattr(block, "attn", None), "rope_dim", 0)
        if turned > width:
            raise ValueError(f"rope_dim is {width} by the first blocks, and one turns {turned}")


def require_caches(kv_caches: object, n_layers: int) -> int:
    """Refuse what is not one cache for each block, all equally long; returns that length."""
    if kv_caches is None:
        return 0
    if not isinstance(kv_caches, (list, tuple)):
        raise TypeError(f"kv_caches must be a list, got {type(kv_caches).__name__}")
    if len(kv_caches) != n_layers:
        raise ValueError(f"kv_caches must have {n_layers} entries, got {len(kv_caches)}")
    if len(set(map(id, kv_caches))) != n_layers:
        raise ValueError(f"kv_caches must be {n_layers} different caches, got one twice")
    lengths = [start_position(None, cache) for cache in kv_caches]
    start = lengths[0] if lengths else 0
    if any(length != start for length in lengths):  # compared one by one: a set is no graph
        came = sorted(set(lengths))
        raise ValueError(f"kv_caches must hold equally many positions, got {came}")
    return start


def require_forward_pass() -> None:
    """Refuse an append within a backward pass: a recomputed forward would store its keys again."""
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError("kv_cache must not be appended to in a backward pass: a forward that is"
                           " recomputed there (activation checkpointing) must go without a cache"
                           )  # fmt: skip


def require_left_padding(key_padding_mask: Tensor | None, B: int, T: int) -> None:
    """Refuse a mask of prompts that hides a token behind a real one, or all of a row."""
    if key_padding_mask is not None:
        require_tensor("key_padding_mask", key_padding_mask, B, T, kind="bool")
        real, after = key_padding_mask[:, :-1], key_padding_mask[:, 1:]
        if (real & ~after).any() or not key_padding_mask[:, -1].all():
            raise ValueError("key_padding_mask must pad on the left and end in a real token")


def require_token_ids(eos_id: object, vocab_size: float) -> list[int]:
    """The one or several ids as a list; refuses what is no token."""
    several = isinstance(eos_id, Iterable) and not isinstance(eos_id, (str, Tensor))
    ends = list(eos_id) if several else [eos_id]
    for token in ends:
        require_value(int, above=-1, eos_id=token)
        if token >= vocab_size:
            raise ValueError(f"eos_id must be below {vocab_size}, got {token}")
    return ends


def require_sampling(temperature: float, top_k: int | None, top_p: float | None,
                     generator: torch.Generator | None) -> None:  # fmt: skip
    """Refuse what generate cannot sample with."""
    if temperature != 0:
        require_value(float, temperature=temperature)
    require_value(int, optional=True, top_k=top_k)
    require_value(float, optional=True, top_p=top_p)
    if top_p is not None and top_p > 1:
        raise ValueError(f"top_p must be at most 1, got {top_p}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {generator!r}")


# === What demos and proofs compare with: formulas in float64, one query, one token at a time =


def reference_causal(T: int, S: int | None = None, window: int | None = None) -> Tensor:
    """bool [T, S]: the last T of S positions against all S."""
    S = T if S is None else S
    window = S if window is None else window
    rows = [[s <= t < s + window for s in range(S)] for t in range(S - T, S)]
    return torch.tensor(rows, dtype=torch.bool)


def reference_norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    """torch's own norms; another than RMSNorm is called as it is, and without one x stays."""
    if isinstance(norm, RMSNorm):
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    return x if norm is None else norm(x)


def reference_turn(x: Tensor, r: int, base: float = 10000.0, start: int = 0) -> Tensor:
    """Rotation as multiplication by cos + i sin, in the precision of the float32 tables."""
    frequencies = base ** (-2 * torch.arange(r // 2, dtype=torch.float64) / r)
    positions = start + torch.arange(x.shape[-2], dtype=torch.float64)
    angle = positions[:, None] * frequencies
    unit = torch.complex(angle.cos().float().double(), angle.sin().float().double())
    turned = torch.complex(x[..., : r // 2], x[..., r // 2 : r]) * unit.to(x.device)
    return torch.cat((turned.real, turned.imag, x[..., r:]), dim=-1)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None,
                        scale: float | None = None, softcap: float | None = None,
                        sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """Softmax over the open keys and a sink, with K and V copied out to every query head."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("bhtc,bhsc->bhts", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp() if keep is None else scores.exp() * keep
    total = weights.sum(dim=-1, keepdim=True).clamp(min=1e-300)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("bhts,bhsc->bhtc", weights / total, v)


def reference_heads(x: Tensor, linear: nn.Linear, width: int) -> Tensor:
    """The projection cut into heads: [B, T, d] -> [B, n, T, width]."""
    return torch.stack(linear(x).split(width, dim=-1), dim=1)


def reference_output(heads: Tensor, linear: nn.Linear) -> Tensor:
    """The heads joined and projected: [B, n, T, width] -> [B, T, d]."""
    return linear(torch.cat(heads.unbind(1), dim=-1))


def reference_layer(attn: nn.Module, x: Tensor, keep: Tensor | None, memory: Tensor | None = None,
                    start: int = 0, base: float = 10000.0) -> tuple[Tensor, ...]:  # fmt: skip
    """(out, k, v) of MultiHeadAttention or MultiHeadLatentAttention from their weights."""
    if isinstance(attn, MultiHeadLatentAttention):
        return reference_latent(attn, x, keep, start, base)
    source = x if memory is None else memory
    q = reference_norm(attn.q_norm, reference_heads(x, attn.q_proj, attn.head_dim))
    k = reference_norm(attn.k_norm, reference_heads(source, attn.k_proj, attn.head_dim))
    v = reference_heads(source, attn.v_proj, attn.head_dim)
    if attn.rope:
        q, k = (reference_turn(t, attn.head_dim, base, start) for t in (q, k))
    out = reference_attention(q, k, v, keep, attn.scale, attn.logit_softcap)
    return reference_output(out, attn.o_proj), k, v


def reference_latent(attn: nn.Module, x: Tensor, keep: Tensor | None, start: int,
                     base: float) -> tuple[Tensor, ...]:  # fmt: skip
    """(out, k, v) of MultiHeadLatentAttention: every head gets its own keys and values."""
    nope, r, rank = attn.nope_dim, attn.rope_dim, attn.kv_rank
    if attn.q_rank is None:
        q = reference_heads(x, attn.q_proj, nope + r)
    else:
        low = reference_norm(attn.q_norm, x @ attn.q_down.weight.T)
        q = reference_heads(low, attn.q_up, nope + r)
    q = torch.cat((q[..., :nope], reference_turn(q[..., nope:], r, base, start)), dim=-1)
    down = x @ attn.kv_down.weight.T
    latent = reference_norm(attn.kv_norm, down[..., :rank])
    shared = reference_turn(down[:, None, :, rank:], r, base, start)
    up = reference_heads(latent, attn.kv_up, nope + attn.v_dim)
    k = torch.cat((up[..., :nope], shared.expand(-1, up.shape[1], -1, -1)), dim=-1)
    out = reference_attention(q, k, up[..., nope:], keep)
    stored = torch.cat((latent[:, None], shared), dim=-1)
    return reference_output(out, attn.o_proj), stored, stored[..., :0]


def reference_scores(router: nn.Module, token: Tensor) -> list[float]:
    """What the experts score for one token, in plain Python."""
    bias = 0.0 if router.router.bias is None else router.router.bias
    odds = [math.exp(logit) for logit in (router.router.weight @ token + bias).tolist()]
    sigmoid = isinstance(router, SigmoidRouter)
    return [o / (1 + o) if sigmoid else o / sum(odds) for o in odds]


def reference_route(router: nn.Module, token: Tensor) -> dict[int, float]:
    """The experts of one token and their weights, best first, by sorting."""
    scores = reference_scores(router, token)
    if isinstance(router, MoEFFN):
        return {scores.index(max(scores)): max(scores)}
    shift = getattr(router, "selection_bias", None)
    shift = [0.0] * len(scores) if shift is None else shift.tolist()
    rank = [score + more for score, more in zip(scores, shift)]
    size, n = len(rank) // router.n_groups, 2 if isinstance(router, SigmoidRouter) else 1
    groups = [range(g * size, (g + 1) * size) for g in range(router.n_groups)]
    groups.sort(key=lambda group: sum(sorted(rank[e] for e in group)[-n:]), reverse=True)
    kept = sorted(itertools.chain(*groups[: router.top_groups]), key=lambda e: -rank[e])
    weights = {e: scores[e] for e in kept[: router.top_k]}
    total = sum(weights.values()) if router.renormalise else 1.0
    return {e: router.scale * weight / total for e, weight in weights.items()}


def reference_ffn(ffn: nn.Module, x: Tensor) -> Tensor:
    """DenseFFN, GatedFFN and ClampedGatedFFN from their weights; mixtures by token."""
    if isinstance(ffn, (MoEFFN, MixtureFFN)):
        return reference_mixture(ffn, x)
    up = ffn.up(x)
    if isinstance(ffn, DenseFFN):
        return ffn.down(ffn.act(up))
    gate = ffn.gate(x)
    if isinstance(ffn, ClampedGatedFFN):
        gate, up = gate.clamp(max=ffn.limit), up.clamp(-ffn.limit, ffn.limit) + 1
        return ffn.down(up * gate / (1 + torch.exp(-ffn.alpha * gate)))
    return ffn.down(ffn.act(gate) * up)


def reference_mixture(ffn: nn.Module, x: Tensor) -> Tensor:
    """MoEFFN and MixtureFFN, one token and one expert at a time."""
    router, shared = (ffn, None) if isinstance(ffn, MoEFFN) else (ffn.router, ffn.shared)
    out = torch.zeros_like(x) if shared is None else reference_ffn(shared, x)
    for place in itertools.product(*map(range, x.shape[:-1])):
        for expert, weight in reference_route(router, x[place]).items():
            if getattr(ffn, "weigh_input", False):
                out[place] += reference_ffn(ffn.experts[expert], weight * x[place])
            else:
                out[place] += weight * reference_ffn(ffn.experts[expert], x[place])
    return out


def reference_block(block: nn.Module, x: Tensor, keep: Tensor, memory: Tensor | None = None,
                    base: float = 10000.0) -> Tensor:  # fmt: skip
    """Every topology as its formula, from the block's own weights."""
    norm, ffn = reference_norm, functools.partial(reference_ffn, block.ffn)

    def attn(y: Tensor) -> Tensor:
        return reference_layer(block.attn, y, keep, base=base)[0]

    if isinstance(block, VanillaEncoderLayer2017):
        x = norm(block.ln1, x + attn(x))
        return norm(block.ln2, x + ffn(x))
    if isinstance(block, VanillaSeq2SeqDecoderLayer2017):
        x = norm(block.ln1, x + reference_layer(block.self_attn, x, keep)[0])
        x = norm(block.ln2, x + reference_layer(block.cross_attn, x, None, memory)[0])
        return norm(block.ln3, x + ffn(x))
    if isinstance(block, ParallelDecoderBlock):
        return x + attn(norm(block.norm, x)) + ffn(norm(block.ffn_norm or block.norm, x))
    if isinstance(block, BranchNormDecoderBlock):
        x = x + norm(block.attn_post_norm, attn(norm(block.attn_pre_norm, x)))
        return x + norm(block.ffn_post_norm, ffn(norm(block.ffn_pre_norm, x)))
    x = x + attn(norm(block.norm1, x))  # GPT2StyleDecoderLayer and ModernDecoderBlock
    return x + ffn(norm(block.norm2, x))


# === Tools of the proofs =====================================================================


CHECK_PATHS = (attend, attend_fused)

# A good value of each argument of the constructors and counting functions.
# fmt: off
CHECK_GOOD = {
    "d_model": 4, "n_heads": 2, "n_q_heads": 2, "n_kv_heads": 1, "head_dim": 2, "d_ff": 4,
    "eps": 0.1, "norm_eps": 0.1, "scale": 0.5, "logit_softcap": 1.0, "embedding_scale": 2.0,
    "act": F.relu, "attend": attend, "alpha": 0.5, "limit": 0.5,
    "n_experts": 4, "top_k": 2, "n_groups": 2, "top_groups": 1,
    "kv_rank": 4, "q_rank": 2, "rope_dim": 2, "nope_dim": 2, "v_dim": 2,
    "max_len": 3, "base": 9.0, "rope_base": 9.0, "n_layers": 1, "vocab_size": 3,
    "length": 1, "batch": 1, "bytes_per_element": 1, "multiple_of": 2, "multiplier": 1.5,
}
# fmt: on


def check_close(a: Tensor, b: Tensor, limit: float = 1e-11) -> bool:
    return check_gap(a, b) <= limit  # False for NaN


def check_exact_device(device: str) -> str:
    """Where float64 can be computed: Apple's GPUs have no float64."""
    return "cpu" if torch.device(device).type == "mps" else device


def check_draw(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cpu").to(device)


def check_randomized(module: nn.Module, device: str = "cpu") -> nn.Module:
    """The module in float64 with drawn norms and biases: ones and zeros hide faults."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return module.to(device, torch.float64)


def check_zeroed(*layers: nn.Linear) -> None:
    for parameter in nn.ModuleList(layers).parameters():
        nn.init.zeros_(parameter)


def demo_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def demo_blocks(device: str, *names: str, batch: int = 2) -> dict[str, tuple[nn.Module, dict]]:
    """Blocks of every class in float64, and what their forward takes besides x [batch, T, 16]."""
    d, H, d_ff = 16, 4, 12
    tables = dict(zip(("cos", "sin"), build_rope_cache(16, 4)))
    memory = {"memory": check_draw(1, 3, d, device=device).expand(batch, -1, -1)}
    rich = {"head_dim": 4, "qkv_bias": True, "qk_norm": True, "logit_softcap": 2.0, "scale": 0.4}
    attention = functools.partial(MultiHeadAttention, d, H, 2, rope=True)
    latent = functools.partial(MultiHeadLatentAttention, d, H, kv_rank=6, rope_dim=4, nope_dim=3)
    parallel = functools.partial(ParallelDecoderBlock, d, d_ff=d_ff)
    makers = {
        "encoder": lambda: VanillaEncoderLayer2017(d, H, d_ff),
        "seq2seq": lambda: VanillaSeq2SeqDecoderLayer2017(d, H, d_ff),
        "gpt2": lambda: GPT2StyleDecoderLayer(d, H, d_ff),
        "modern": lambda: ModernDecoderBlock(d, H, 2, ffn=MoEFFN(d, d_ff)),
        "parallel": lambda: parallel(attn=attention(attend=attend_fused)),
        "latent": lambda: parallel(attn=latent(v_dim=5, q_rank=7), shared_norm=False),
        "branch": lambda: BranchNormDecoderBlock(d, attn=attention(**rich), ffn=DenseFFN(d, d_ff)),
    }
    given = {"encoder": {}, "seq2seq": memory, "gpt2": {}}
    made = {name: check_randomized(makers[name](), device) for name in names or makers}
    return {name: (block, given.get(name, tables)) for name, block in made.items()}


def check_mixtures(device: str) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name, mixture, its router) of every kind, width 6, in float64 with weights that tell apart.

    All but the first choose 3 of the same 8 experts.
    """
    experts = [ClampedGatedFFN(6, 5, alpha=1.3, limit=0.4) for _ in range(8)]
    groups, shared = {"n_groups": 2, "top_groups": 1}, DenseFFN(6, 5)
    deepseek_v2 = SoftmaxRouter(6, 8, 3, renormalise=False, scale=16.0, **groups)
    groups_of_one = SigmoidRouter(6, 8, 3, renormalise=False, n_groups=8, top_groups=5)
    unbiased = SigmoidRouter(6, 8, 3, selection_bias=False)
    mixtures = {
        "Switch": MoEFFN(6, 5, n_experts=8),
        "gpt-oss": MixtureFFN(SoftmaxRouter(6, 8, 3, bias=True), experts),
        "DeepSeek-V2": MixtureFFN(deepseek_v2, experts, shared),
        "DeepSeek-V3": MixtureFFN(SigmoidRouter(6, 8, 3, scale=2.5, **groups), experts, shared),
        "groups of one": MixtureFFN(groups_of_one, experts, shared),
        "Llama-4": MixtureFFN(unbiased, experts, shared, weigh_input=True),
    }
    for name, mixture in mixtures.items():
        router = mixture if name == "Switch" else mixture.router
        check_randomized(mixture, device)
        router.router.weight.data.mul_(3)
        if getattr(router, "selection_bias", None) is not None:
            router.selection_bias.uniform_(-1.5, -0.5)
        yield name, mixture, router


def check_chunks(layer: nn.Module, x: Tensor, padding: Tensor, cache: KVCache,
                 sizes: tuple[int, ...], **given: object) -> Tensor:  # fmt: skip
    """layer(x) in chunks of these sizes, through the cache."""
    parts = []
    for part in x.split(sizes, dim=1):
        seen = padding[:, : cache.next_pos + part.shape[1]]
        out = layer(part, kv_cache=cache, key_padding_mask=seen, **given)
        parts.append(out[0] if isinstance(out, tuple) else out)
    return torch.cat(parts, dim=1)


def check_drawn_from(*given: object, **options: object) -> tuple[Tensor, list[Tensor]]:
    """What pick_next_token gives, and the probabilities that it gave to torch.multinomial."""
    drawn_from = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, _types, args=(), options=None):
            if function is torch.multinomial:
                drawn_from.append(args[0])
            return function(*args, **(options or {}))

    with Watch():
        return pick_next_token(*given, **options), drawn_from


def check_raised(call: Callable) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def check_raises(error: type[Exception], call: Callable, *words: object) -> bool:
    """Whether the call raises exactly this error, with these words in its message."""
    raised = check_raised(call)
    return type(raised) is error and all(str(word) in str(raised) for word in words)


def check_state(caches: Iterable[KVCache]) -> list[Tensor]:
    """What a refusal must not change: the global generator, and what the caches hold."""
    return [torch.get_rng_state(), *(t.clone() for c in caches for t in (c.k, c.v))]


def check_refused(*rows: tuple, kept: Iterable[KVCache] = ()) -> Iterator[tuple[str, bool]]:
    """Rows (error, call, word, …): it must raise just that, say the words and change nothing."""
    state = check_state(kept)
    for number, (error, call, *words) in enumerate(rows, 1):
        raised = check_raises(error, call, *words)
        unchanged = all(map(torch.equal, state, check_state(kept)))
        yield f"refusal {number}, {error.__name__} with {words}", raised and unchanged


def check_wrong(value: object, allowed: set) -> Iterator[tuple]:
    """Wrong values beside a good one, with the error they must raise and a word of its message."""
    if isinstance(value, Tensor):  # of another dtype, rank or size
        kinds = {torch.bool, torch.int64, torch.float16, torch.complex64} - {value.dtype}
        kinds -= {torch.float16} if "half" in allowed else set()
        yield from ((TypeError, value.to(kind), kind) for kind in kinds)
        wrong = [] if "rank" in allowed else [value[None], *value[:1].unbind()]
        for axis in {*range(value.dim())} - allowed:
            wrong += [value.narrow(axis, 0, value.shape[axis] - 1), torch.cat((value, value), axis)]
        yield from ((ValueError, other, list(other.shape)) for other in wrong)
        yield TypeError, [1.0], "list"
    elif isinstance(value, (int, float)):  # out of range, or of another kind
        whole = isinstance(value, int)
        beyond = [-1] if "zero" in allowed else [-1, 0]
        beyond += [2**63] if whole else [math.inf, math.nan]
        yield from ((ValueError, other, other) for other in beyond)
        kinds = [True, "1", 1.0] if whole else [True, "1"]
        yield from ((TypeError, other, repr(other)) for other in kinds)
    elif isinstance(value, KVCache):
        yield TypeError, [value], "list"
    else:
        yield from ((TypeError, other, other) for other in (3, "gelu", []))


def check_refuses(call: Callable, allowed: dict[str, set] | None = None,
                  kept: Iterable[KVCache] = (), **good: object) -> Iterator[tuple]:  # fmt: skip
    """Whether call takes its good arguments, and refuses every wrong one and changes nothing.

    Wrong are another rank, size, dtype, kind and sign, and None where it is no default. allowed is
    what an argument may be all the same: axes of any size (0, 1, …), "rank", "half" precision,
    "zero", "None". A size may also be refused in the name of the argument that it does not fit.
    The kept caches keep what they hold.
    """
    target = getattr(call, "func", call)
    target = target.forward if isinstance(target, nn.Module) else target
    lengths = [cache.next_pos for cache in kept]
    call(**good)
    for cache, length in zip(kept, lengths):
        cache.truncate(length)
    parameters, state, missed = inspect.signature(target).parameters, check_state(kept), []
    for name, value in good.items():
        free = (allowed or {}).get(name, set())
        rows = [*check_wrong(value, free)]
        if parameters[name].default is not None and "None" not in free:
            rows.append(((ValueError, TypeError), None, "None"))
        for error, wrong, word in rows:
            raised = check_raised(functools.partial(call, **{**good, name: wrong}))
            if isinstance(wrong, Tensor) and error is ValueError:
                told = any(argument in str(raised) for argument in good)
            else:
                told = name in str(raised) and str(word) in str(raised)
            unchanged = all(map(torch.equal, state, check_state(kept)))
            if not (isinstance(raised, error) and told and unchanged):
                missed.append(f"{name}={word}: {raised!r}")
    yield f"{target.__qualname__} refuses {missed or 'every wrong argument'}", not missed


# === Proofs: what else the demos prove, in their order =======================================


def prove_D01_formulas(exact: str) -> Iterator[tuple[str, bool]]:
    """Every block equals its formula without a mask, with one, with one a sample, and padding."""
    x = check_draw(3, 3, 16, device=exact)
    padding = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0]], device=exact) > 0  # B = T
    own = padding[[2, 1, 0]]
    each = torch.stack((own, own.T, own.flip(0)))
    masks = {  # what is given, and what each query then sees
        "without a mask": (None, reference_causal(3).to(exact)),
        "with a mask": (own, own),
        "with a mask a sample": (each, each[:, None]),
    }
    for name, (block, given) in demo_blocks(exact, batch=3).items():
        for case, (mask, sees) in masks.items():
            seen = torch.ones_like(sees) if name == "encoder" else sees  # it takes no mask
            options = given if name == "encoder" else {**given, "mask": mask}
            expected = reference_block(block, x, padding[:, None, None] & seen, given.get("memory"))
            out = block(x, key_padding_mask=padding, **options)
            yield f"{name} equals its formula {case}", check_close(out, expected)
        for empty in (x[:0], x[:, :0]):
            few = {key: t[: len(empty)] if key == "memory" else t for key, t in given.items()}
            yield f"{name} takes {list(empty.shape)}", block(empty, **few).shape == empty.shape


def prove_D01_logits(exact: str) -> Iterator[tuple[str, bool]]:
    """DecoderOnlyLM equals its formula: windows, a mask, scaled embeddings, a soft cap, eps."""
    ids = torch.tensor([[1, 5, 0, 10]], device=exact)
    options = {"windows": [2, None], "embedding_scale": 3.0, "logit_softcap": 0.5, "eps": 0.1}
    lm = DecoderOnlyLM(11, 16, 2, 4, 2, 12, rope_base=50.0, **options)
    check_randomized(lm, exact)
    documents = (ids[0] < 5)[:, None] == (ids[0] < 5)  # the first and third token, the other two
    eps = [norm.eps for norm in lm.modules() if isinstance(norm, RMSNorm)]
    yield "windows are kept", lm.windows == [2, None]
    yield "a tied model saves one table", len(lm.state_dict()) == 2 + 2 * 9
    yield "eps reaches every norm", eps == [0.1] * 5
    for windows, mask in (([2, None], None), ([None, 3], documents)):
        lm.windows = windows
        h = lm.embedding.weight[ids] * 3.0
        for block, window in zip(lm.blocks, windows):
            keep = reference_causal(4, window=window).to(exact)
            keep = keep if mask is None else keep & mask
            h = reference_block(block, h, keep, base=50.0)
        h = reference_norm(lm.final_norm, h) @ lm.embedding.weight.T
        logits = 0.5 * torch.tanh(h / 0.5)
        yield f"logits with windows {windows}", check_close(lm(ids, mask=mask), logits)
    last = lm(ids, mask=documents[None], last_only=True)
    yield "last_only gives the last position", check_close(last, logits[:, -1:])
    rows = []
    lm.final_norm.register_forward_pre_hook(lambda _norm, args: rows.append(args[0].shape[1]))
    lm.generate(ids, 2)
    yield "generate computes one row of logits a step", rows == [1, 1]
    lm.logit_softcap, lm.lm_head = None, nn.Linear(16, 2).to(exact, torch.float64)
    yield "a head put in is called", lm(ids).shape == (1, 4, 2)


def prove_D01_loss(exact: str) -> Iterator[tuple[str, bool]]:
    """next_token_loss is torch's cross entropy over the pairs that count; what it refuses."""
    ids = torch.tensor([[1, 5, 0, 10]], device=exact)
    logits = check_draw(1, 4, 11, device=exact)
    cases = {  # the positions whose next token counts
        "all pairs": ({}, [0, 1, 2]),
        "what is to be predicted": ({"predict": ids < 1}, [1]),
        "real tokens": ({"key_padding_mask": ids != 1}, [1, 2]),  # padding neither asks nor answers
    }
    for name, (options, rows) in cases.items():
        loss = next_token_loss(logits, ids.byte(), **options)
        expected = F.cross_entropy(logits[0, rows], ids[0, 1:][rows])
        yield f"loss over {name}", check_close(loss, expected)
    yield "no pairs give 0", next_token_loss(logits[:, :1], ids[:, :1]).item() == 0.0
    for low in (logits.half(), logits.bfloat16()):
        yield f"float32 loss of {low.dtype}", next_token_loss(low, ids).dtype == torch.float32
    even = next_token_loss(torch.zeros(1, 4, 300, device=exact), ids.byte() + 240)
    yield "uint8 ids under 300 tokens", abs(even.item() - math.log(300)) < 1e-5
    logits, ids = logits.expand(2, -1, -1), ids.expand(2, -1)
    good = {"logits": logits, "ids": ids, "key_padding_mask": ids > 0, "predict": ids > 0}
    yield from check_refuses(next_token_loss, {"logits": {2, "half"}}, **good)
    yield from check_refused(
        (ValueError, lambda: next_token_loss(logits, ids + 4), "ids", 14),
        (ValueError, lambda: next_token_loss(logits, ids - 4), "ids", -4),
    )


def prove_D01_model_parts(device: str) -> Iterator[tuple[str, bool]]:
    """What DecoderOnlyLM is made of: embedding, head, caches, and tables that are no state."""
    untied = DecoderOnlyLM(11, 16, 1, 4, 2, 12, tie_embeddings=False)
    # A head width of 5 has no pairs: the table is for blocks that turn 4 of it, or nothing.
    tied = DecoderOnlyLM(300, 10, 3, 2, make_block=lambda _: ParallelDecoderBlock(10, 2))
    with torch.inference_mode():
        narrow = DecoderOnlyLM(11, 4, 1, 4, make_block=lambda _: ParallelDecoderBlock(4, 4))
    logits = untied.to(device)(torch.tensor([[1, 5, 0, 10]], device=device))
    tables = [model._rope_tables[0] for model in (untied, tied, narrow)]
    yield "the embedding starts as N(0, 0.02²)", 0.018 < tied.embedding.weight.std() < 0.022
    yield "a head of its own has no bias", untied.lm_head.bias is None
    yield "and gives the logits", logits.shape == (1, 4, 11)
    yield "each layer gets a cache", len(set(map(id, tied.new_caches()))) == 3
    tied.blocks[1].attn.new_cache = lambda: "its own"
    yield "an attention makes its own", tied.new_caches()[1] == "its own"
    yield "no layer has a window", tied.windows == [None] * 3
    yield "tables are as wide as what turns", [t.shape[1] for t in tables] == [4, 4, 2]
    yield "tables made in inference mode train", not tables[2].is_inference()
    moved = narrow.to("meta", torch.half)._rope_tables[0]
    yield "tables stay float32", moved.dtype == torch.float32


def prove_D01_tied(exact: str) -> Iterator[tuple[str, bool]]:
    """A tied head is the embedding's own call; any table or head may be put in its place."""
    ids, taken = torch.tensor([[1, 5, 0, 10]], device=exact), []
    lm = check_randomized(DecoderOnlyLM(11, 16, 1, 4, 2, 12, max_len=6), exact)
    logits, rows = lm(ids), lm.embedding.weight.detach()
    lm.embedding.register_forward_hook(lambda _table, args, _out: taken.append(args[0].dtype))
    lm(ids)
    yield "both uses are calls", taken == [torch.int64, torch.float64]
    for name, table in {
        "a plain embedding": nn.Embedding.from_pretrained(rows),
        "a wrapped table": nn.Sequential(lm.embedding),
        "more rows": nn.Embedding.from_pretrained(torch.cat((rows, rows[:2] * 0.5))),
    }.items():
        lm.embedding = table
        yield f"{name}: the same logits", check_close(lm(ids)[..., :11], logits)
    yield "an eos_id of the new rows", lm.generate(ids, 1, eos_id=12).shape == (1, 5)
    yield from check_refused((ValueError, lambda: lm.generate(ids, 1, eos_id=13), "eos_id", 13))
    lm.lm_head = nn.Linear(16, 20).to(exact, torch.float64)
    yield "an eos_id of a new head", lm.generate(ids, 1, eos_id=19).shape == (1, 5)
    yield from check_refused((ValueError, lambda: lm.generate(ids, 1, eos_id=20), "eos_id", 20))
    lm.lm_head = nn.Sequential(lm.lm_head)
    yield "of a head that does not tell", lm.generate(ids, 1, eos_id=20).shape == (1, 5)


def prove_D02_norms(exact: str) -> Iterator[tuple[str, bool]]:
    """Zeroed branches leave the Pre-LN blocks the identity; RMSNorm equals its formula."""
    x, norm = check_draw(2, 3, 16, device=exact), check_randomized(RMSNorm(16, eps=0.01), exact)
    yield "RMSNorm is torch's", check_close(norm(0.1 * x), reference_norm(norm, 0.1 * x))
    for name, (block, given) in demo_blocks(exact, "gpt2", "parallel", "branch").items():
        check_zeroed(block.attn.o_proj, block.ffn.down)
        yield f"{name} with zeroed branches is x", torch.equal(block(x, **given), x)
    for low in (300 * x.half(), x.bfloat16()):  # float16 squares overflow
        norm = RMSNorm(16).to(low)
        wide = RMSNorm(16)(low.float()).to(low.dtype)
        yield f"RMSNorm of {low.dtype} is rounded once", torch.equal(norm(low), wide)


def prove_D04_decoding(exact: str) -> Iterator[tuple[str, bool]]:
    """Every block in chunks, with padding; what its cache holds; start_pos without a cache."""
    x = check_draw(2, 5, 16, device=exact)
    padding = torch.tensor([[True] * 5, [False] * 2 + [True] * 3], device=exact)
    for name, (block, given) in demo_blocks(exact, "gpt2", "modern", "branch", "latent").items():
        cache, full = KVCache(), block(x, key_padding_mask=padding, **given)
        with torch.no_grad():
            parts = check_chunks(block, x, padding, cache, (2, 1, 2), **given)
        yield f"{name} in chunks equals one pass", check_close(parts, full)
        norm = next(norm for name, norm in block.named_children() if "norm" in name)
        k, v = reference_layer(block.attn, reference_norm(norm, x), reference_causal(5))[1:]
        yield f"{name} caches its keys", check_close(cache.k, k)
        yield f"{name} caches its values", check_close(cache.v, v)
        if "cos" in given:  # attention sees only distances: the keys show where they start
            late = {table: rows[2:] for table, rows in given.items()}
            keys = [block.attn(x, start_pos=2, **given)[1][0], block.attn(x, **late)[1][0]]
            yield f"{name} turns from start_pos on", check_close(*keys)
            past = functools.partial(block, x, start_pos=12, **given)
            yield f"{name} needs tables to the end", check_raises(ValueError, past, "cos", 17)


def prove_D04_latent(exact: str) -> Iterator[tuple[str, bool]]:
    """Latent attention decodes absorbed, but calls what stands for kv_up or hooks it."""
    x, tables = check_draw(2, 5, 16, device=exact), build_rope_cache(16, 4, device=exact)
    given, cache = dict(zip(("cos", "sin"), tables)), KVCache()
    sizes = {"kv_rank": 6, "rope_dim": 4, "nope_dim": 3, "v_dim": 5}
    mla, low = (MultiHeadLatentAttention(16, 4, **sizes, q_rank=rank) for rank in (None, 7))
    out, (k, v) = check_randomized(mla, exact)(x, **given)
    expected = reference_layer(mla, x, None)
    mla.expanded = None  # decoding must not go through the keys and values of all heads
    cache.append(k[:, :, :4], v[:, :, :4])
    absorbed, _ = mla(x[:, 4:], kv_cache=cache, **given)
    del mla.expanded
    yield "without q_rank it is its formula", all(map(check_close, (out, k, v), expected))
    yield "it has no biases", "bias" not in str([*mla.state_dict(), *low.state_dict()])
    yield "decoding is absorbed", check_close(absorbed, out[:, 4:])
    names = ("bias", "hook", "pre-hook", "patch", "subclass")
    ups = {name: nn.Linear(6, 32, bias=name == "bias") for name in names}
    ups["hook"].register_forward_hook(lambda _layer, _args, out: 2 * out)
    ups["pre-hook"].register_forward_pre_hook(lambda _layer, args: (3 * args[0],))
    ups["patch"].forward = lambda latent: nn.Linear.forward(ups["patch"], latent).relu()
    ups["subclass"].weight = type("Shard", (nn.Parameter,), {})(ups["subclass"].weight.to(x))
    ups["wrapper"] = nn.Sequential(nn.Linear(6, 32, bias=False))
    padding = torch.tensor([[True] * 5, [False] * 2 + [True] * 3], device=exact)
    mla.absorbed = None  # nor may decoding read the weight of what is put in
    for name, up in ups.items():
        mla.kv_up = up.to(x)
        full, _ = mla(x, key_padding_mask=padding, causal=True, **given)
        parts = check_chunks(mla, x, padding, KVCache(), (4, 1), causal=True, **given)
        yield f"decoding through kv_up with a {name}", check_close(parts, full)


def check_holds(cache: KVCache, k: Tensor, v: Tensor, *ends: int, room: int | None = None) -> bool:
    """Whether the cache, appended to up to each end, holds k and v up to there, in that room."""
    for end in ends:
        new = slice(cache.next_pos, end)
        stored = cache.append(k[:, :, new], v[:, :, new])
        expected = (k[:, :, :end], v[:, :, :end]) * 2
        same = all(map(torch.equal, (cache.k, cache.v, *stored), expected))
        fits = room in (None, cache.k.untyped_storage().nbytes() // k[:, :, 0].nbytes)
        if not (same and fits and cache.next_pos == end):
            return False
    return True


def prove_D04_cache_room(device: str) -> Iterator[tuple[str, bool]]:
    """KVCache holds what was appended; its room doubles, or is max_len from the start."""
    k, v = torch.randn(2, 3, 9, 4).to(device), torch.randn(2, 3, 9, 2).to(device)
    grown, fixed, mixed = KVCache(), KVCache(max_len=7), KVCache()
    with torch.no_grad():
        for room, ends in ((1, (1,)), (3, (2, 3)), (7, (4, 5, 6, 7)), (15, (8, 9))):
            yield f"room for {room}", check_holds(grown, k, v, *ends, room=room)
        grown.truncate(3)
        yield "truncate keeps the room", check_holds(grown, k, v, 3, 5, room=15)
        grown.reset()
        emptied = (grown.k, grown.v, grown.next_pos, grown._k)
        yield "reset forgets", emptied == (None, None, 0, None)
        yield "after reset it is filled anew", check_holds(grown, k, v, 1)
        yield "max_len is the room", check_holds(fixed, k, v, 2, 7, room=7)
        place = fixed.k.data_ptr()
        fixed.reset()
        yield "an empty copy has max_len", check_holds(copy.deepcopy(fixed), k, v, 1, room=7)
        filled = check_holds(fixed, k, v, 1)
        yield "max_len takes memory once", filled and fixed.k.data_ptr() == place
        fixed.truncate(0)
        fixed.append(k[:1, :, :7], v[:1, :, :7])
        yield "another batch after truncate", torch.equal(fixed.k, k[:1, :, :7])
        yield "it takes no tokens", KVCache().append(k[:, :, :0], v[:, :, :0])[0].shape[2] == 0
    with torch.inference_mode():
        yield "inference mode", check_holds(mixed, k, v, 1, 2) and mixed._k.shape[2] == 3
    with torch.no_grad():
        yield "no_grad goes on in the same room", check_holds(mixed, k, v, 3, room=3)
    yield "grad mode goes on", check_holds(mixed, k, v, 4, room=4)


def prove_D04_cache_views(device: str) -> Iterator[tuple[str, bool]]:
    """What is appended may be views of the cache's own memory, and never within a backward pass."""
    k, v = torch.randn(1, 1, 5, 4).to(device), torch.randn(1, 1, 5, 2).to(device)
    own, loaded = KVCache(max_len=8), KVCache()
    with torch.no_grad():
        check_holds(own, k, v, 5)
        k_own, v_own = own.k, own.v
        own.truncate(2)
        own.append(k_own[:, :, 1:], v_own[:, :, 1:])
        check_holds(loaded, k, v, 3)
    with torch.inference_mode():
        loaded = copy.copy(loaded)
    with torch.no_grad():
        yield "a copy made in inference mode goes on", check_holds(loaded, k, v, 4, 5)
    for name, stored, new in (("keys", own.k, k), ("values", own.v, v)):
        expected = torch.cat((new[:, :, :2], new[:, :, 1:]), dim=2)
        yield f"views of its own {name}", torch.equal(stored, expected)
    x = k.clone().requires_grad_()
    x.register_hook(lambda _gradient: own.append(k[:, :, :1], v[:, :, :1]) and None)
    again = (RuntimeError, lambda: x.sum().backward(), "kv_cache", "backward")
    yield from check_refused(again, kept=[own])


def prove_D04_cache_copies(device: str) -> Iterator[tuple[str, bool]]:
    """A copied cache has memory of its own; what autograd has saved is never written to."""
    k, v = torch.randn(2, 3, 9, 4).to(device), torch.randn(2, 3, 9, 2).to(device)
    cache, saved = KVCache(), KVCache()
    with torch.no_grad():
        check_holds(cache, k, v, 4, 5)
        cache.notes = ["mine"]
        twin, (deep, again) = copy.copy(cache), copy.deepcopy([cache, cache])
        yield "a copy goes on", check_holds(twin, k, v, 5, 7)
        cache.truncate(3)
        cache.append(k[:, :, :2], v[:, :, :2])
        yield "a copy does not see what the first appends", check_holds(twin, k, v, 7)
        yield "nor does a deep one", check_holds(deep, k, v, 5)
    yield "deepcopy copies a cache once", deep is again
    yield "copy shares other attributes", twin.notes is cache.notes
    yield "deepcopy copies other attributes", deep.notes is not cache.notes
    k_grad = k.clone().requires_grad_()
    saved.append(k_grad[:, :, :1], v[:, :, :1])
    loss = saved.append(k_grad[:, :, 1:3], v[:, :, 1:3])[0].square().sum()
    saved.truncate(1)
    with torch.no_grad():  # behind what the square has saved, not into it
        yield "no_grad writes behind what was saved", check_holds(saved, k, v, 2)
    loss.backward()
    yield "the gradient is right", torch.equal(k_grad.grad[:, :, :3], 2 * k[:, :, :3])


def prove_D04_generation(exact: str) -> Iterator[tuple[str, bool]]:
    """generate gives each row what full passes give it alone, and leaves the model as it was."""
    lm = check_randomized(DecoderOnlyLM(13, 16, 1, 4, 2, 12, max_len=8, windows=[3]), exact)
    nn.init.normal_(lm.blocks[0].attn.o_proj.weight)  # what attention sees then changes the text
    prompts = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 5]], device=exact)
    padding, during = prompts > 0, set()
    lm.blocks[0].ffn.train(False)
    lm.blocks[0].register_forward_hook(lambda block, *_: during.add(block.training))
    state = torch.get_rng_state()
    both = lm.generate(prompts.byte(), 4, key_padding_mask=padding)
    lm.generate(prompts, 1, temperature=1.0, generator=torch.Generator(exact))
    untouched, none = torch.equal(state, torch.get_rng_state()), lm.generate(prompts, 0)
    modes = [*during, lm.training, lm.blocks[0].training, lm.blocks[0].ffn.training]
    alone = [lm(both[:1, :-1]), lm(both[1:, 3:-1])]  # what each row says next without the other
    alone = torch.cat([logits[:, -4:].argmax(-1) for logits in alone])
    padded, cut = lm(prompts, key_padding_mask=padding)[1:, 3:], lm(prompts[1:, 3:])
    sampled = lm.generate(prompts, 4, temperature=9.0)
    yield "left padding: logits as without", check_close(padded, cut)
    yield "left padding: each row as alone", torch.equal(both, torch.cat((prompts, alone), 1))
    yield "greedy and a generator leave the global one", untouched
    yield "training flags are as before", modes == [True, True, True, False]
    yield "no new tokens", torch.equal(none, prompts) and none.data_ptr() != prompts.data_ptr()
    yield "temperature draws", sampled.shape == (2, 8) and not torch.equal(sampled, both)


def prove_D04_end_of_text(device: str) -> Iterator[tuple[str, bool]]:
    """A row that has produced an eos_id is filled up with it; the stream ends with the last row."""
    counts = DecoderOnlyLM(13, 16, 1, 4, 2, 12, max_len=8, tie_embeddings=False).to(device)
    # Whatever comes, the next token is this one plus 1: the rows end at steps 3 and 1.
    check_zeroed(counts.blocks[0].attn.o_proj, counts.blocks[0].ffn.down)
    nn.init.eye_(counts.embedding.weight)
    counts.lm_head.weight.data = counts.embedding.weight.data.roll(1, dims=0)
    prompts = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 6]], device=device)

    def continued(rows: int, eos_id: object) -> list[list[int]]:
        padding = prompts[:rows] > 0
        ids = counts.generate(prompts[:rows], 4, key_padding_mask=padding, eos_id=eos_id)
        return ids[:, 4:].tolist()

    streamed = []
    for tokens in counts.stream(prompts[:1], 2):
        streamed.append(tokens.tolist())
        tokens.zero_()  # what the caller does with a step must not reach the next
    yield "one id ends", continued(2, 7) == [[5, 6, 7], [7, 7, 7]]
    yield "an id that does not come", continued(1, 0) == [[5, 6, 7, 8]]
    yield "several ids end", continued(2, (7, 6)) == [[5, 6], [7, 7]]
    yield "stream does not read its tokens back", streamed == [[[5]], [[6]]]


def prove_D04_sampling(exact: str) -> Iterator[tuple[str, bool]]:
    """What pick_next_token draws from, against softmax, top-k and top-p one token at a time."""
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 1.5], [0.0, 0.1, 0.2, 0.3, 0.4]]).to(exact)
    # The two likeliest of the first row hold 0.46 and 0.28 of all: the third reaches 0.75.
    cases = itertools.product((1.0, 0.5, 1e30), (1, 3, 9, None), (0.75, 0.2, None))
    for temperature, k, p in cases:
        tokens, (drawn_from,) = check_drawn_from(logits, temperature, k, p)
        for row, probs in zip(logits.tolist(), drawn_from):
            odds = sorted((math.exp((z - max(row)) / temperature) for z in row), reverse=True)[:k]
            before = itertools.accumulate(odds, initial=0.0)
            odds = [o for o, sum_before in zip(odds, before) if sum_before < (p or 1) * sum(odds)]
            expected = F.pad(torch.tensor(odds), (0, 5 - len(odds))) / sum(odds)
            claim = f"temperature {temperature}, top_k {k}, top_p {p} of {row}"
            yield claim, check_close(probs / probs.sum(), expected, 1e-6)
        yield "a token a row", tokens.shape == (2, 1)
    dice = [torch.Generator(exact).manual_seed(1) for _ in range(2)]
    drawn = [pick_next_token(logits[:1].expand(99, -1), 1.0, generator=die) for die in dice]
    even = pick_next_token(torch.zeros(9, 5, device=exact), 1.0, top_p=0.2)
    yield "no rows", pick_next_token(logits[:0]).shape == (0, 1)
    yield "equal generators draw alike", torch.equal(*drawn)
    yield "and not one token only", len(drawn[0].unique()) > 1
    yield "top_p that the first token reaches", len(even.unique()) == 1
    yield "a tiny top_p", pick_next_token(logits, 1.0, top_p=1e-46).tolist() == [[1], [4]]
    yield "a tiny temperature", pick_next_token(logits, 1e-320).tolist() == [[1], [4]]
    noise = torch.randn(50, 8).to(exact)
    for low in (noise.half(), noise.bfloat16()):
        probs = [check_drawn_from(given, 0.5, top_p=1.0)[1][0] for given in (low, low.float())]
        yield f"{low.dtype} is drawn from in float32", torch.equal(*probs)
    _, (drawn_from,) = check_drawn_from(torch.tensor([[20.0, 0.0]]).to(exact), 1.0, top_p=1.0)
    yield "top_p of 1 keeps what rounding would drop", drawn_from.gt(0).all()


def prove_D05_paths(exact: str) -> Iterator[tuple[str, bool]]:
    """Both attention paths equal the formula: a mask of every rank, fewer to more queries."""
    q, k = check_draw(2, 4, 4, 6, device=exact), check_draw(2, 2, 3, 6, device=exact)
    v = check_draw(2, 2, 3, 7, device=exact)
    keep = torch.tensor([[[1, 0, 1], [1, 1, 0]], [[0, 0, 0], [1, 1, 1]]], device=exact) > 0
    keep = keep[:, None]  # (B, 1, T, S); the second sample's first query may attend to nothing
    rows, keys = keep[:1, 0, :1], keep[0, 0, 0, 0]
    # How many queries meet the three keys, keep, causal, scale.
    cases = [(2, keep, False, None), (2, rows, False, 2), (2, keys, False, None)]
    cases += [(2, keep, True, None), (1, keep[:, :, :1], True, None)]
    cases += [(T, mask, True, None) for T in (2, 3, 4) for mask in (None, rows)]
    for T, mask, causal, scale in cases:
        seen = (reference_causal(T, 3) if causal else torch.ones(T, 3) > 0).to(exact)
        seen = seen if mask is None else seen & mask
        expected = reference_attention(q[:, :, :T], k, v, seen, scale)
        shape = mask if mask is None else list(mask.shape)
        for path in CHECK_PATHS:
            out = path(q[:, :, :T], k, v, mask, causal=causal, scale=scale)
            name = f"{path.__name__} of {T} queries, keep {shape}, causal {causal}, scale {scale}"
            yield name, check_close(out, expected)
    capped = attend(q[:, :, :2], k, v, keep, logit_softcap=0.7)
    expected = reference_attention(q[:, :, :2], k, v, keep, softcap=0.7)
    yield "attend with a soft cap", check_close(capped, expected)


def prove_D05_precision(exact: str) -> Iterator[tuple[str, bool]]:
    """The scores of half precision are capped in float32 and do not overflow; a NaN stays one."""
    for dtype in (torch.float16, torch.bfloat16):
        low = check_draw(1, 1, 16, 6, device=exact).to(dtype)
        scores = ((low * 6**-0.5) @ low.mT).float()
        expected = (2 * torch.tanh(scores / 2)).softmax(-1).to(dtype) @ low
        capped = attend(low, low, low, logit_softcap=2.0)
        yield f"{dtype} is capped in float32", torch.equal(capped, expected)
    big = torch.full((1, 1, 1, 64), 60.0, dtype=torch.float16, device=exact)
    # 64 * 60 * 60 is over float16's 65504, an eighth of it is not.
    yield "float16 scores do not overflow", attend(big, big, big).isfinite().all()
    q, k = check_draw(2, 4, 2, 6, device=exact), check_draw(2, 2, 3, 6, device=exact)
    q[0, 0, 0, 0] = math.nan
    lost = attend(q, k, check_draw(2, 2, 3, 7, device=exact)).isnan()
    yield "a NaN makes its query's row NaN", lost[0, 0, 0].all()
    yield "and no other", lost.sum() == 7


def prove_D05_options() -> Iterator[tuple[str, bool]]:
    """Which projections have a bias, and which eps the norms of the heads, by the options."""
    cases = [  # options, biases of q, k, v and o, eps of the two norms
        ({"bias": True}, [True, True, True, True], [None, None]),
        ({"bias": True, "qkv_bias": False}, [False, False, False, True], [None, None]),
        ({"qkv_bias": True}, [True, True, True, False], [None, None]),
        ({"qk_norm": True, "norm_eps": 0.1}, [False, False, False, False], [0.1, 0.1]),
    ]
    for options, biases, eps in cases:
        layer = MultiHeadAttention(16, 4, 2, head_dim=6, **options)
        layer(torch.zeros(1, 2, 16, device="cpu"))  # 16 is not 4 * 6: no width may be another's
        linears = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        yield f"biases with {options}", [part.bias is not None for part in linears] == biases
        norms = [getattr(norm, "eps", None) for norm in (layer.q_norm, layer.k_norm)]
        yield f"norms with {options}", norms == eps


def prove_D06_sizes(device: str) -> Iterator[tuple[str, bool]]:
    """Cache sizes against a real cache, hidden sizes against released models."""
    cache, x = KVCache(), torch.zeros(2, 7, 96, device=device)
    MultiHeadAttention(96, 8, 2).to(device)(x, kv_cache=cache)
    stored = cache.k.nbytes + cache.v.nbytes
    yield "a real cache", kv_cache_bytes(1, 2, 12, 7, batch=2, bytes_per_element=4) == stored
    yield "numbers a token", kv_cache_elements(2, 12) == stored // (2 * 7 * 4)
    yield "Llama-3-70B caches 1.25 GiB", kv_cache_bytes(80, 8, 128, 4096) == 10 * 2**30 // 8
    yield "d_ff of Llama-2-7B", gated_hidden_size(4096, 256) == 11008
    yield "d_ff of Llama-3-8B", gated_hidden_size(4096, 1024, 1.3) == 14336
    yield "d_ff of Llama-3-70B", gated_hidden_size(8192, 4096, 1.3) == 28672


def prove_D06_defaults() -> Iterator[tuple[str, bool]]:
    """Every default of every class and function, in the order of its arguments."""
    attention = (None, None, False, None, False, False, None, None, 1e-6, attend)
    model = (96, 2, 8, 2, 256, 2048, 10000.0, None, None, None, True, 1.0, None, 1e-6)
    defaults = {  # of these, in the order of their arguments
        (VanillaEncoderLayer2017, VanillaSeq2SeqDecoderLayer2017): (96, 8, 384, F.relu, 1e-5),
        (GPT2StyleDecoderLayer,): (96, 8, 384, F.gelu, 1e-5),
        (ModernDecoderBlock, BranchNormDecoderBlock): (96, 8, 2, 256, None, None, 1e-6),
        (ParallelDecoderBlock,): (96, 8, None, 384, None, None, True, 1e-5),
        (DecoderOnlyLM,): model,
        (DecoderOnlyLM.stream, DecoderOnlyLM.generate): (None, 0.0, None, None, None, None),
        (pick_next_token,): (0.0, None, None, None),
        (MultiHeadAttention,): attention,
        (attend, attend_fused, SinkAttention.forward): (None, False, None, None),
        (MultiHeadLatentAttention, KVCache): (None,),
        (SinkAttention,): (),
        (RMSNorm,): (1e-6,),
        (DenseFFN,): (F.gelu, False),
        (GatedFFN,): (F.silu, False),
        (ClampedGatedFFN,): (1.702, 7.0),
        (MoEFFN,): (4, 1),
        (SoftmaxRouter,): (True, 1.0, 1, 1, False),
        (SigmoidRouter,): (True, 1.0, 1, 1, True),
        (MixtureFFN,): (None, False),
        (build_rope_cache,): (10000.0, None, torch.float32),
        (kv_cache_bytes,): (1, 2),
        (gated_hidden_size,): (1, 1.0),
    }
    for owner, expected in [(owner, d) for owners, d in defaults.items() for owner in owners]:
        parameters = inspect.signature(owner).parameters.values()
        written = tuple(p.default for p in parameters if p.default is not p.empty)
        yield f"defaults of {owner.__qualname__}", written == expected


def prove_D06_blocks(device: str) -> Iterator[tuple[str, bool]]:
    """What a block without options is made of: parameters, activation, norms, rotation."""
    attention, dense, norm = 4 * 96 * 97, 73728 + 384 + 96, 2 * 96  # with biases
    x, tables = torch.zeros(1, 2, 96), dict(zip(("cos", "sin"), build_rope_cache(2, 12)))
    decoder = VanillaSeq2SeqDecoderLayer2017(eps=0.1)
    two_norms = ParallelDecoderBlock(shared_norm=False, eps=0.1)
    cases = [  # parameters, activation, number of norms, what forward takes besides x
        (VanillaEncoderLayer2017(eps=0.1), attention + dense + 2 * norm, F.relu, 2, {}),
        (decoder, 2 * attention + dense + 3 * norm, F.relu, 3, {"memory": x}),
        (GPT2StyleDecoderLayer(eps=0.1), attention + dense + 2 * norm, F.gelu, 2, {}),
        (ModernDecoderBlock(eps=0.1), 23040 + 73728 + 2 * 96, F.silu, 2, tables),
        (ParallelDecoderBlock(eps=0.1), 36864 + 73728 + norm, F.gelu, 1, {}),
        (two_norms, 36864 + 73728 + 2 * norm, F.gelu, 2, {}),
        (BranchNormDecoderBlock(eps=0.1), 23040 + 73728 + 4 * 96, F.silu, 4, tables),
    ]
    for block, size, act, norms, given in cases:
        name = f"{type(block).__name__} with {norms} norms"
        eps = [part.eps for part in block.modules() if hasattr(part, "eps")]
        turned = getattr(getattr(block, "attn", None), "rope", False)
        yield f"{name}: parameters and eps", (demo_count(block), eps) == (size, [0.1] * norms)
        yield f"{name}: activation", block.ffn.act is act
        yield f"{name}: rotation", turned == ("cos" in given)
        yield f"{name}: shape", block.to(device)(x.to(device), **given).shape == x.shape


def prove_D09_dead_rows(exact: str) -> Iterator[tuple[str, bool]]:
    """Rows without keys leave the gradients of both paths finite, where 0 / 0 gives NaN."""
    q, k = check_draw(1, 2, 3, 4, device=exact), check_draw(1, 1, 3, 4, device=exact)
    keep = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 1]], device=exact) > 0
    for path in CHECK_PATHS:
        inputs = [t.clone().requires_grad_() for t in (q, k, k)]
        path(*inputs, keep).square().sum().backward()
        finite = all(t.grad.isfinite().all() and t.grad.any() for t in inputs)
        yield f"gradients of {path.__name__} are finite and not zero", finite


def prove_D09_new_mixtures() -> Iterator[tuple[str, bool]]:
    """What routers and mixtures are before their first forward, and what they keep of options."""
    options = {"renormalise": False, "scale": 2.5, "n_groups": 4, "top_groups": 2}
    switch, softmax = MoEFFN(6, 5), SoftmaxRouter(6, 8, 3, **options)
    sigmoid = SigmoidRouter(6, 8, 3, **options)
    for router in (switch, softmax, sigmoid):
        name, new = type(router).__name__, (router.tokens_per_expert, copy.copy(router).aux_loss)
        yield f"a new {name} has counted nothing", new == (None, None)
        yield f"{name}'s scores have no bias", router.router.bias is None
    for router in (softmax, sigmoid):
        kept = {name: getattr(router, name) for name in options}
        yield f"{type(router).__name__} keeps its options", kept == options
    mixture = functools.partial(MixtureFFN, softmax, [GatedFFN(6, 5)] * 8)
    unbiased = SigmoidRouter(6, 8, 3, selection_bias=False)
    yield "bias", SoftmaxRouter(6, 8, 3, bias=True).router.bias is not None
    yield "the choice starts unbiased", not sigmoid.state_dict()["selection_bias"].any()
    yield "or has no bias", "selection_bias" not in unbiased.state_dict()
    yield "weigh_input", mixture(weigh_input=True).weigh_input and not mixture().weigh_input


def prove_D09_mixture_refusals() -> Iterator[tuple[str, bool]]:
    """What routers and mixtures cannot be made of, or take."""
    layer, router, x = GatedFFN(4, 4), SigmoidRouter(4, 4, 2), torch.zeros(2, 4)
    route, mix = functools.partial(SoftmaxRouter, 4), functools.partial(MixtureFFN, router)
    mixed = functools.partial(MixtureFFN, experts=[layer] * 4)
    yield from check_refuses(mixed, router=router, shared=layer)
    yield from check_refuses(router, {"tokens": {0}}, tokens=x)
    yield from check_refuses(ClampedGatedFFN(4, 4), {"x": {0, "rank"}}, x=x)
    yield from check_refuses(mixed(router), {"x": {0, "rank"}}, x=x)
    yield from check_refused(
        (ValueError, lambda: route(4, 5), "top_k", 4, 5),
        (ValueError, lambda: route(4, 3, n_groups=2), "top_k", 2, 3),
        (ValueError, lambda: route(4, 1, n_groups=3), "n_groups=3", "n_experts=4"),
        (ValueError, lambda: route(4, 1, n_groups=2, top_groups=3), "top_groups", 2, 3),
        (ValueError, lambda: mix([layer]), "experts", 4, 1),
        (ValueError, lambda: MixtureFFN(nn.Identity(), []), "experts", 1, 0),
        (TypeError, lambda: mix([layer, 3]), "experts", "[", 3),
        (TypeError, lambda: mix(3), "experts", 3),
    )


def prove_D09_routes(exact: str) -> Iterator[tuple[str, bool]]:
    """Routers and mixtures against one token at a time; what is counted."""
    x, tokens = check_draw(2, 3, 6, device=exact), check_draw(60, 6, device=exact) / 2
    for name, mixture, router in check_mixtures(exact):
        routes = [reference_route(router, token) for token in tokens]
        routed = router(tokens)
        counts = [sum(expert in route for route in routes) for expert in range(8)]
        yield f"{name} counts its choices", router.tokens_per_expert == counts
        if isinstance(routed, tuple):
            weights = torch.tensor([[*route.values()] for route in routes], dtype=torch.float64)
            yield f"{name}'s weights", check_close(routed[0], weights)
            yield f"{name}'s experts, best first", routed[1].tolist() == [[*r] for r in routes]
        yield f"{name} is its formula", check_close(mixture(x), reference_mixture(mixture, x))
        yield f"{name} takes no tokens", mixture(x[:0]).shape == (0, 3, 6)
        yield f"{name} without tokens has no loss", router.aux_loss.item() == 0
    wrapped = nn.Sequential(router)
    wrapped = MixtureFFN(wrapped, mixture.experts, mixture.shared, weigh_input=True)
    yield "a wrapped router is called", torch.equal(wrapped(x), mixture(x))
    router.router.weight.data.fill_(-1e4)
    weights, _ = router(tokens.abs())  # scores that round to zero
    yield "scores of zero leave no weight, and no NaN", not weights.any()
    yield "scores of zero leave no loss", router.aux_loss.item() == 0


def prove_D09_balance(exact: str) -> Iterator[tuple[str, bool]]:
    """aux_loss is E sum(f P) with a gradient; used experts and the router learn, idle ones not."""
    x = check_draw(4, 6, device=exact)
    for name, mixture, router in check_mixtures(exact):
        mixture.zero_grad()  # the experts are those of the mixture before
        mixture(x[:1].expand(2, -1)).sum().backward()
        used, twice = [n > 0 for n in router.tokens_per_expert], router.aux_loss
        taught = [any(p.grad.any() for p in expert.parameters()) for expert in mixture.experts]
        yield f"{name}'s idle experts get zeros, the others gradients", taught == used
        yield f"{name}'s router learns", router.router.weight.grad.any()
        router(x[:1])
        yield f"{name}'s loss is that of a token once", check_close(router.aux_loss, twice)
        router(x)
        balancing = torch.autograd.grad(router.aux_loss, router.router.weight)
        yield f"{name}'s loss teaches the router", balancing[0].any()
        yield f"{name}'s copies have no graph", not copy.copy(router).aux_loss.requires_grad
        counts, scores = router.tokens_per_expert, [reference_scores(router, row) for row in x]
        shares = [sum(row[e] / sum(row) for row in scores) / len(x) for e in range(8)]
        loss = 8 * sum(n / sum(counts) * share for n, share in zip(counts, shares))
        yield f"{name}'s loss is its formula", abs(router.aux_loss.item() - loss) < 1e-12
        yield f"{name} chooses for each token", sum(counts) == (4 if name == "Switch" else 4 * 3)


def prove_D09_mixture_precision(exact: str) -> Iterator[tuple[str, bool]]:
    """Half precision comes back as it was, with scores, losses and the choice's bias in float32."""
    x = check_draw(2, 7, 6, device=exact)
    for dtype in (torch.float16, torch.bfloat16):
        mixture = MixtureFFN(SigmoidRouter(6, 2, 1), [GatedFFN(6, 5)] * 2).to(exact, dtype)
        switch, low = MoEFFN(6, 5).to(exact, dtype), x.to(dtype)
        made = [mixture(low), mixture.router(low[0])[0], switch(low[0, :1])]
        losses = [mixture.router.aux_loss, switch.aux_loss]
        yield f"{dtype} stays", all(t.dtype == dtype for t in made)
        yield f"{dtype} has float32 losses", all(t.dtype == torch.float32 for t in losses)
        yield f"{dtype}: a single token is no balance", switch.aux_loss > 1
    mixture.router.selection_bias = torch.tensor([0.0, 1e-4], device=exact)
    mixture.router.router.weight.data.zero_()  # both score 0.5, and 0.5001 is no bfloat16
    mixture(low)
    yield "the bias stays float32", mixture.router.tokens_per_expert == [0, 14]
    *_, (_, mixed, _) = check_mixtures(exact)
    with torch.autocast(x.device.type, torch.bfloat16):
        yield "autocast", mixed.float()(x.float()).dtype == torch.float32


def prove_D09_replaced_routers() -> Iterator[tuple[str, bool]]:
    """A router put in later: what it gives must fit, and is counted as wide as it is."""
    x, switch, soft = torch.randn(2, 4), MoEFFN(4, 4), SoftmaxRouter(4, 4, 2)
    own = nn.Identity()
    mixture = MixtureFFN(own, [nn.Identity()] * 3)
    switch.router, soft.router = nn.Linear(4, 5), nn.Linear(4, 6)
    soft(x)
    halves, chosen = torch.full((2, 2), 0.5), torch.tensor([[0, 2], [1, 2]])

    def routed(weights: Tensor, experts: Tensor) -> Tensor:
        own.forward = lambda _tokens: (weights, experts)
        return mixture(x)

    yield "choices of 32 bits", check_close(routed(halves, chosen.int()), x, 1e-6)
    yield "counts are as many as logits", len(soft.tokens_per_expert) == 6
    yield from check_refused(
        (ValueError, lambda: switch(x), "router(x)", [2, 5]),
        (ValueError, lambda: routed(halves, chosen + 2), "router(x)[1]", "0 … 2", "3 other"),
        (ValueError, lambda: routed(halves, chosen - 2), "router(x)[1]", "0 … 2", "2 other"),
        (ValueError, lambda: routed(halves, chosen[:1]), "router(x)[1]", [1, 2]),
        (ValueError, lambda: routed(halves[:, :1], chosen), "router(x)[0]", [2, 1]),
        (TypeError, lambda: routed(halves, halves), "router(x)[1]", "float32"),
        (TypeError, lambda: routed(chosen, chosen), "router(x)[0]", "int64"),
    )


def prove_D09_sinks(exact: str) -> Iterator[tuple[str, bool]]:
    """A sink is one more term in the softmax's sum, neither scaled nor capped nor masked."""
    q, k = check_draw(3, 4, 2, 5, device=exact), check_draw(3, 2, 4, 5, device=exact)
    v, keep = check_draw(3, 2, 4, 6, device=exact), reference_causal(2, 4, 3).to(exact)
    keep = keep.repeat(3, 1, 1, 1)
    keep[0, 0, 1] = False  # a query without keys
    sink = SinkAttention(4).to(exact)  # float32: may be wider than q
    yield "sinks start at zero", not sink.sinks.any()
    nn.init.uniform_(sink.sinks, -1, 1)
    past = reference_causal(2, 4).to(exact)
    cases = {
        "alone": ({}, torch.ones_like(past)),
        "causal and scaled": ({"causal": True, "scale": 0.3}, past),
        "masked and causal": ({"keep": past.flip(1), "causal": True}, past & past.flip(1)),
        "masked and capped": ({"keep": keep, "logit_softcap": 1.5}, keep),
    }
    for name, (options, seen) in cases.items():
        scale, cap = options.get("scale"), options.get("logit_softcap")
        expected = reference_attention(q, k, v, seen, scale, cap, sink.sinks.double())
        out = sink(q, k, v, **options)
        yield f"sinks {name}", check_close(out, expected)
    nn.init.constant_(sink.sinks, -math.inf)
    none = sink(q, k, v, keep)
    yield "a query without keys gets zeros", not out[0, :, 1].any()
    yield "also beside a sink of -inf", check_close(none, reference_attention(q, k, v, keep))
    yield from check_refused(
        (ValueError, lambda: sink(q[:, :2], k, v), "n_q_heads=4", 2),
        (ValueError, lambda: sink(q, k, v, logit_softcap=0.0), "logit_softcap", 0.0),
        (ValueError, lambda: sink(q, k, v, scale=0.0), "scale", 0.0),
    )


def prove_D09_sink_precision(exact: str) -> Iterator[tuple[str, bool]]:
    """Scores of half precision meet the sinks, and the soft cap, in float32."""
    capped = 2048 * math.tanh(1)  # neither dtype has it, or 2049
    for dtype in (torch.float16, torch.bfloat16):
        score = torch.full((1, 1, 1, 1), 2048.0, dtype=dtype, device=exact)
        one = torch.ones_like(score)
        cases = ((2049.0, None, None, 1.0), (1560.0, dtype, 2048.0, 1560 - capped))
        for logit, sink_dtype, cap, above_score in cases:
            sink = SinkAttention(1).to(exact, sink_dtype)
            nn.init.constant_(sink.sinks, logit)
            share = sink(score, one, one, logit_softcap=cap).item()
            expected = 1 / (1 + math.exp(above_score))
            yield f"a sink of {logit} beside {dtype}", abs(share - expected) < 1e-2


def prove_D10_arguments() -> Iterator[tuple[str, bool]]:
    """Constructors and counting functions refuse what no argument may be, and draw nothing."""
    bare = {"make_block": lambda _: nn.Identity(), "d_model": 4, "n_q_heads": 2, "eps": 0.1}
    yield from check_refuses(functools.partial(DecoderOnlyLM, 3), **bare)
    sublayers = [RMSNorm, DenseFFN, GatedFFN, ClampedGatedFFN, MoEFFN, SoftmaxRouter, SigmoidRouter]
    attentions = [MultiHeadAttention, MultiHeadLatentAttention, SinkAttention, KVCache]
    blocks = [VanillaEncoderLayer2017, VanillaSeq2SeqDecoderLayer2017, GPT2StyleDecoderLayer]
    blocks += [ModernDecoderBlock, ParallelDecoderBlock, BranchNormDecoderBlock, DecoderOnlyLM]
    counts = [attention_parameters, kv_cache_elements, kv_cache_bytes, gated_hidden_size]
    counts += [functools.partial(ffn_parameters, gated=True)]
    for make in (*sublayers, *attentions, *blocks, *counts, build_rope_cache, sinusoidal_positions):
        takes = set(inspect.signature(make).parameters)
        if make is MoEFFN:
            takes.remove("top_k")  # which must be 1: see the demo
        good = {name: value for name, value in CHECK_GOOD.items() if name in takes}
        yield from check_refuses(make, {"n_kv_heads": {"None"}}, **good)
        if "attn" in takes:
            yield from check_refuses(make, d_model=4, attn=nn.Identity(), ffn=nn.Identity())


def prove_D10_combinations() -> Iterator[tuple[str, bool]]:
    """Arguments that are refused for each other's sake."""
    fused = functools.partial(MultiHeadAttention, 4, 2, attend=attend_fused)
    latent = functools.partial(MultiHeadLatentAttention, 4, 2, kv_rank=4, nope_dim=2, v_dim=2)
    small = functools.partial(DecoderOnlyLM, 3, 16)
    wide = functools.partial(MultiHeadAttention, 16, 2, rope=True)
    turns_4, turns_6 = (ModernDecoderBlock(16, attn=wide(head_dim=width)) for width in (4, 6))
    uneven = functools.partial(small, make_block=[turns_4, turns_6].__getitem__)
    fails_late = functools.partial(small, make_block=lambda i: nn.Linear(1, 1 // (1 - i)))
    yield "fused without a soft cap", fused().logit_softcap is None
    yield "rope_dim given", uneven(rope_dim=4).blocks[1] is turns_6
    yield from check_refused(
        (ValueError, lambda: build_rope_cache(4, 5), "head_dim", 5),
        (TypeError, lambda: build_rope_cache(4, 4, dtype=torch.int64), "dtype", "int64"),
        (TypeError, lambda: build_rope_cache(4, 4, dtype="half"), "dtype", "half"),
        (ValueError, lambda: latent(rope_dim=3), "rope_dim", 3),
        (ValueError, lambda: fused(logit_softcap=30.0), "logit_softcap", 30.0),
        (ValueError, lambda: attention_parameters(10, 4), "d_model=10", "n_q_heads=4"),
        (ValueError, lambda: attention_parameters(12, 6, 4), "n_q_heads=6", "n_kv_heads=4"),
        (ValueError, lambda: small(windows=[None]), "windows", 2),
        (ValueError, lambda: small(windows=[None, 0]), "windows", 0),
        (TypeError, lambda: small(windows=3), "windows", 3),
        (ValueError, lambda: small(rope_dim=1), "rope_dim", 1),
        (ValueError, lambda: small(rope_dim=4), "rope_dim", 2, 4),
        (ValueError, uneven, "rope_dim", [4, 6]),
        (ValueError, lambda: uneven(rope_dim=6), "rope_dim", 4, 6),
        (ZeroDivisionError, fails_late),
    )


def prove_D11_cache(device: str) -> Iterator[tuple[str, bool]]:
    """Whatever attention or the cache refuses leaves the cache as it was."""
    x, cache = torch.randn(2, 3, 16).to(device), KVCache(max_len=4)
    cos, sin = build_rope_cache(5, 4, device=device)
    attn = MultiHeadAttention(16, 4, 2, rope=True).to(device)
    attn(x, cos=cos, sin=sin, kv_cache=cache)
    before, k, y = cache.k.clone(), cache.k[:, :, :1] + 1, x[:, :1]
    seen = torch.ones(2, 4, dtype=torch.bool, device=device)
    good = {"x": y, "mask": seen[:1], "key_padding_mask": seen, "start_pos": 3}
    good |= {"cos": cos, "sin": sin, "kv_cache": cache}
    yield from check_refuses(attn, {"cos": {"half"}, "sin": {"half"}}, [cache], **good)
    free = {"k_new": {2}, "v_new": {2}}
    yield from check_refuses(cache.append, free, [cache], k_new=k, v_new=k)
    yield from check_refuses(cache.truncate, {"length": {"zero"}}, [cache], length=3)
    cached = functools.partial(attn, kv_cache=cache)
    turned = functools.partial(cached, cos=cos, sin=sin)
    wide = {"cos": cos.repeat(1, 2), "sin": sin.repeat(1, 2)}
    yield from check_refused(
        (ValueError, lambda: cached(y, cos=cos), "cos and sin", None),
        (ValueError, lambda: cached(y, sin=sin), "cos and sin", None),
        (ValueError, lambda: attn(y, cos=cos, sin=sin, start_pos=-1), "start_pos", "above -1"),
        (ValueError, lambda: turned(x[:, :2]), "max_len=4", 5),
        (ValueError, lambda: turned(x), "cos", 5, 6),
        (ValueError, lambda: cached(y, cos=cos[:, :3], sin=sin[:, :3]), "cos", 3),
        (ValueError, lambda: cached(y, **wide), "cos", 8),
        (ValueError, lambda: turned(y, mask=seen[None, :1]), "mask", [1, 1, 4]),
        (ValueError, lambda: cache.truncate(4), "length", 4, "next_pos=3"),
        (TypeError, lambda: cache.append(k, k.to("meta")), "v_new", "meta"),
        (ValueError, lambda: KVCache().append(k, k[:, :1]), "v_new", [2, 1, 1, 4]),
        kept=[cache],
    )
    turned(y, mask=seen[None, :1].expand(2, -1, -1))
    yield "the cache goes on", cache.next_pos == 4
    yield "what it held stays", torch.equal(cache.k[:, :, :3], before)


def prove_D11_failing(device: str) -> Iterator[tuple[str, bool]]:
    """Attention that fails, alone or behind a cache, leaves nothing in it; what no shard can be."""
    x, (cos, sin) = torch.randn(2, 3, 16).to(device), build_rope_cache(8, 4, device=device)
    heads = MultiHeadAttention(16, 4, 2, rope=True).to(device)
    latent = functools.partial(MultiHeadLatentAttention, 16, 4, kv_rank=6, nope_dim=4, v_dim=4)
    shard, wide = copy.deepcopy(heads), latent(rope_dim=8).to(device)
    shard.k_proj = nn.Linear(16, 6).to(device)  # one and a half heads

    def fails(*_inputs: object, **_options: object) -> Tensor:
        raise KeyError("planted")

    for attn, called in ((heads, "attend"), (latent(rope_dim=4).to(device), "expanded")):
        cache = KVCache()
        attn(x, cos=cos, sin=sin, kv_cache=cache)
        vars(attn).update({called: fails, "absorbed": fails})
        call = functools.partial(attn, x, cos=cos, sin=sin)
        behind = functools.partial(call, kv_cache=cache)
        rows = (KeyError, call, "planted"), (KeyError, behind, "planted")
        yield from check_refused(*rows, kept=[cache])
    yield from check_refused(
        (ValueError, lambda: shard(x, cos=cos, sin=sin), "head_dim=4", "n_kv_heads", "ranks"),
        (ValueError, lambda: wide(x, cos=cos, sin=sin), "cos", 8, [3, 4]),
    )


def prove_D11_model(device: str) -> Iterator[tuple[str, bool]]:
    """DecoderOnlyLM: what is refused, or fails deeper, changes no cache, flag or generator."""
    lm = DecoderOnlyLM(7, 16, 2, 4, 2, 12, max_len=6).to(device)
    ids, caches = torch.tensor([[1, 2, 3], [3, 2, 1]], device=device), lm.new_caches()
    lm(ids, kv_caches=caches)
    uneven, short = [caches[0], KVCache()], [caches[0], KVCache(max_len=4)]
    lm.blocks[1](lm.embedding(ids), *build_rope_cache(3, 4, device=device), kv_cache=short[1])
    broken, longer = copy.deepcopy(lm), copy.deepcopy(lm)
    broken.blocks[1] = nn.Linear(8, 8).to(device)  # takes no mask; fails behind an append
    longer.blocks.append(nn.Identity())
    wide, free = copy.deepcopy(lm), ParallelDecoderBlock(16, 4)
    wide.blocks[1] = ModernDecoderBlock(16, attn=MultiHeadAttention(16, 2, rope=True)).to(device)
    part = DecoderOnlyLM(7, 16, 1, rope_dim=4, make_block=lambda _: wide.blocks[1]).to(device)
    long = ids.repeat(1, 2)
    good = {"ids": ids, "key_padding_mask": long > 0, "mask": (long > 0)[:1].expand(3, -1)}
    yield from check_refuses(functools.partial(lm, kv_caches=caches), None, caches, **good)
    yield from check_refused(
        (ValueError, lambda: lm(long[:, :4], kv_caches=caches), "ids", 7, "max_len=6"),
        (ValueError, lambda: lm(ids, kv_caches=caches[:1]), "kv_caches", 2, 1),
        (ValueError, lambda: lm(ids, kv_caches=uneven), "kv_caches", [0, 3]),
        (ValueError, lambda: lm(ids, kv_caches=short), "max_len=4", 6),
        (ValueError, lambda: lm(ids, kv_caches=caches[:1] * 2), "kv_caches", "twice"),
        (TypeError, lambda: lm(ids, kv_caches=caches[0]), "kv_caches", "KVCache"),
        (ValueError, lambda: lm(ids + 4), "ids", 6, 7),
        (TypeError, lambda: broken(ids, kv_caches=caches), "mask"),
        (TypeError, lambda: broken.generate(ids, 1), "mask"),
        (ValueError, lambda: longer(ids), "windows", 3),
        (ValueError, lambda: wide(ids), "rope_dim", 4, 8),
        kept=caches,
    )
    wide.blocks[1] = free.to(device)
    yield "a block that turns nothing is taken", wide(ids).shape == (2, 3, 7)
    yield "a part may be turned that was asked for", part(ids).shape == (2, 3, 7)
    yield "training flags", all(part.training for part in broken.modules())


def prove_D11_generate(device: str) -> Iterator[tuple[str, bool]]:
    """What generate and pick_next_token refuse, before any work and without a draw."""
    lm = DecoderOnlyLM(7, 16, 2, 4, 2, 12, max_len=6).to(device)
    ids = torch.tensor([[1, 2, 3], [3, 2, 1]], device=device)
    seen, longer = ids > 0, ids.repeat(1, 2)[:, :4]
    hole = torch.tensor([[False, True, False, True]] * 2, device=device)
    nothing = torch.stack((seen[0], ~seen[0]))
    sampling = {"temperature": 1.0, "top_k": 2, "top_p": 0.5}
    good = {"ids": ids, "key_padding_mask": seen, "max_new_tokens": 1, "eos_id": 6, **sampling}
    zeros = {name: {"zero"} for name in ("max_new_tokens", "temperature", "eos_id")}
    sample = functools.partial(lm.generate, generator=torch.Generator(device))
    yield from check_refuses(sample, {"ids": {1}, **zeros}, **good)
    free, logits = {"logits": {0, 1, "half"}, **zeros}, torch.zeros(2, 7, device=device)
    yield from check_refuses(pick_next_token, free, logits=logits, **sampling)
    empty = functools.partial(lm.generate, ids, 0)
    padded = functools.partial(lm.generate, longer, 1)
    yield from check_refused(
        (TypeError, lambda: empty(generator=3), "generator", 3),
        (ValueError, lambda: empty(top_p=1.01), "top_p", 1.01),
        (ValueError, lambda: empty(eos_id=[1, 7]), "eos_id", 7),
        (ValueError, lambda: empty(key_padding_mask=nothing), "key_padding_mask"),
        (ValueError, lambda: padded(key_padding_mask=hole), "key_padding_mask"),
        (ValueError, lambda: lm.generate(ids[:, :0], 1), "ids"),
        (ValueError, lambda: lm.stream(ids, 4), "max_new_tokens=4", "max_len=6"),
        (ValueError, lambda: pick_next_token(logits[:, :0]), "logits", [2, 0]),
        (ValueError, lambda: pick_next_token(logits * math.nan), "logits", "nan"),
        (ValueError, lambda: pick_next_token(logits - math.inf), "logits", "-inf"),
        (ValueError, lambda: pick_next_token(logits + math.inf), "logits", "inf"),
    )


def prove_D12_refusals(device: str) -> Iterator[tuple[str, bool]]:
    """What cross-attention, and the decoder layer around it, cannot take."""
    x, memory = torch.randn(2, 4, 32).to(device), torch.randn(2, 6, 32).to(device)
    attn = MultiHeadAttention(32, 4).to(device)
    layer = VanillaSeq2SeqDecoderLayer2017(32, 4, 32).to(device)
    padding = torch.ones(2, 6, dtype=torch.bool, device=device)
    mask = padding[:1].expand(4, -1)  # (T, S)
    good = {"x": x, "memory": memory}
    yield from check_refuses(attn, mask=mask, key_padding_mask=padding, **good)
    good |= {"key_padding_mask": padding[:, :4], "memory_key_padding_mask": padding}
    yield from check_refuses(layer, mask=mask[:, :4], **good)


def prove_D13_layers(exact: str) -> Iterator[tuple[str, bool]]:
    """Layers refuse an x of another width, rank or dtype; padded memory is not attended to."""
    tables = dict(zip(("cos", "sin"), build_rope_cache(16, 4)))
    latent = MultiHeadLatentAttention(16, 2, kv_rank=4, rope_dim=4, nope_dim=4, v_dim=4)
    x, dense, norm = torch.randn(3, 3, 16), DenseFFN(16, 4), RMSNorm(16)
    of_vectors = [dense, GatedFFN(16, 4), MoEFFN(16, 4), norm]
    for layer in of_vectors:
        free = {0, 1, "rank"} | ({"half"} if layer is norm else set())
        yield from check_refuses(layer, {"x": free}, x=x)
    for attention in (MultiHeadAttention(16, 2), functools.partial(latent, **tables)):
        yield from check_refuses(attention, {"x": {0, 1}}, x=x)
    blocks, wide = demo_blocks(exact, batch=3), x.to(exact, torch.float64)
    for block, given in blocks.values():
        yield from check_refuses(functools.partial(block, **given), {"x": {0, 1}}, x=wide)
    decoder, given = blocks["seq2seq"]
    padding = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 0]], device=exact) > 0
    crossed = decoder(wide, **given, memory_key_padding_mask=padding)
    alone = decoder(wide[1:2], given["memory"][1:2, 1:])
    yield "padded memory is memory cut", check_close(crossed[1:2], alone)
    yield "vectors", all(layer(x[0, 0]).shape == (16,) for layer in of_vectors)
    with torch.autocast("cpu", torch.bfloat16):  # where weights are cast anyway
        yield "autocast takes another dtype", dense(x.bfloat16()).dtype == torch.bfloat16
    dense.up = nn.Sequential(nn.Linear(16, 4).double())  # what is put in place takes its own
    dense.down.double()
    yield "a layer put in takes its own dtype", dense(x.double()).dtype == torch.float64


def prove_D13_operators(exact: str) -> Iterator[tuple[str, bool]]:
    """What attend, attend_fused and build_causal_mask refuse; one query of one head."""
    x = check_draw(3, 3, 16, device=exact)
    q, k = x.view(3, 1, 3, 16), x[:, None, :2]
    four, last = q.expand(3, 4, 3, 16), q[:, :, 2:]
    keep = torch.ones(3, 1, 3, 2, dtype=torch.bool, device=exact)
    good = {"q": q, "k": k, "v": k, "keep": keep, "scale": 0.5}
    free = {"q": {1}, "v": {3}, "keep": {3, "rank"}}
    for path in CHECK_PATHS:
        yield from check_refuses(path, free, **good)
        three, none = four[:, :3, :2], four[:, :0, :2]
        yield from check_refused(
            (ValueError, lambda: path(four, three, three), "q", 4, 3),
            (ValueError, lambda: path(four, none, none), "q", 4, 0),
            (ValueError, lambda: path(q, k, k, keep[..., None]), "keep", [3, 1, 3, 2, 1]),
            (ValueError, lambda: path(q[..., :0], k[..., :0], k), "q", [3, 1, 3, 0]),
            (ValueError, lambda: path(q, k, k, logit_softcap=0), "logit_softcap", 0),
        )
        yield path.__name__, check_close(path(last, k, k), reference_attention(last, k, k))
    good = {"q_positions": torch.arange(3), "k_positions": torch.arange(2), "window": 2}
    free = {"q_positions": {0}, "k_positions": {0}}
    yield from check_refuses(build_causal_mask, free, **good)


def prove_D15_rotation(exact: str) -> Iterator[tuple[str, bool]]:
    """Rotation is complex multiplication, by angles that are exact far out too."""
    x, part = check_draw(2, 3, 300, 8, device=exact), build_rope_cache(300, 4, device=exact)
    cos, sin = build_rope_cache(300, 8, 100.0, device=exact)
    tables = build_rope_cache(300, 8, 100.0), build_rope_cache(300, 8, 100.0, dtype=torch.bfloat16)
    wide = apply_rope(x.float(), cos.double(), sin.double())
    sines, row = sinusoidal_positions(200, 5), [199 / 10000 ** (c // 2 * 2 / 5) for c in range(5)]
    row = torch.tensor([math.cos(a) if c % 2 else math.sin(a) for c, a in enumerate(row)])
    yield "all channels", check_close(apply_rope(x, cos, sin), reference_turn(x, 8, 100.0))
    yield "the first channels", check_close(apply_rope(x, *part), reference_turn(x, 4))
    yield "wide tables are cast", torch.equal(wide, apply_rope(x.float(), cos, sin))
    yield "tables are rounded once", all(torch.equal(a.bfloat16(), b) for a, b in zip(*tables))
    yield "sinusoids", check_close(sines[-1], row, 1e-7) and sines.dtype == torch.float32
    cos, sin = cos[:9], sin[:9]
    for low in (x[:, :, :9].half(), x[:, :, :9].bfloat16()):
        turned, wide = (apply_rope(t, cos, sin) for t in (low, low.float()))
        yield f"{low.dtype} turns in float32", torch.equal(turned, wide.to(low.dtype))
    good = {"x": x[:, :, :9, :7], "cos": part[0][:9], "sin": part[1][:9]}
    free = {"x": {0, 1, 3, "half"}, "cos": {"half"}, "sin": {"half"}}
    yield from check_refuses(apply_rope, free, **good)
    odd = functools.partial(apply_rope, good["x"], cos[:, :3], sin[:, :3])
    yield from check_refused((ValueError, odd, "cos", 3))


def prove_D15_devices(device: str) -> Iterator[tuple[str, bool]]:
    """Nothing is made on the default device by accident: "meta" here, where no value exists."""
    lm = DecoderOnlyLM(7, 16, 1, 4, 2, 12, max_len=8, windows=[2]).to(device)
    decoder = VanillaSeq2SeqDecoderLayer2017(16, 4, 12).to(device)
    gpt2, moe = GPT2StyleDecoderLayer(16, 4, 12).to(device), MoEFFN(16, 12).to(device)
    x, ids = torch.randn(2, 3, 16).to(device), torch.tensor([[1, 2]], device=device)
    q, paths = x[:, None], (attend, attend_fused, SinkAttention(1).to(device))
    plain = copy.deepcopy(lm)
    plain.embedding = nn.Embedding.from_pretrained(lm.embedding.weight.detach())
    with contextlib.ExitStack() as stack, torch.device("meta"):
        for name in ("normal_", "kaiming_uniform_"):  # those for "meta" take long to load
            stack.callback(setattr, nn.init, name, getattr(nn.init, name))
            setattr(nn.init, name, lambda weight, **_: weight)
        grown, logits = lm.generate(ids, 2, key_padding_mask=ids > 0, eos_id=3), lm(ids)
        made = [grown, logits, next_token_loss(logits, ids), decoder(x, x), moe(x)]
        made += [*build_rope_cache(3, 4, device=device), gpt2(x, kv_cache=KVCache())]
        out = [path(q, q[:, :, 1:], q[:, :, 1:], causal=True) for path in paths]
        made += [*out, plain(ids)]
        tables = DecoderOnlyLM(7, 16, 1, 4, 2)._rope_tables
        default = [build_rope_cache(3, 4)[0], sinusoidal_positions(3, 4)]
    yield "stays on the device", {t.device.type for t in made} == {torch.device(device).type}
    yield "both paths agree there", check_close(*out[:2], 1e-5)
    yield "tables of a skeleton", all(t.device.type == "cpu" for t in tables)
    yield "follows the default device", all(t.device.type == "meta" for t in default)
    for dtype in (torch.float16, torch.bfloat16):
        lm.to(dtype).logit_softcap = 0.1
        capped, lm.logit_softcap = lm(ids), None
        expected = (0.1 * torch.tanh(lm(ids).float() / 0.1)).to(dtype)
        yield f"logits of {dtype} are capped in float32", torch.equal(capped, expected)


for _name, _proof in [*globals().items()]:  # prove_D04_… is a proof of D04
    if _name.startswith("prove_"):
        DEMO_PROOFS.setdefault(_name[6:9], []).append(_proof)


# === Command line ============================================================================


MAIN_TOOLS = ("demo_", "check_", "prove_", "reference_", "main")  # they prove, and are no library
MAIN_NEIGHBOURS = {  # files beside this one, and the command that prints what they define
    "whiteboard.py": "practice.py answer",
    "whiteboard/*.py": "practice.py answer",
    "after_2025.py": "after_2025.py --show",
    "after_2026.py": "after_2026.py --show",
}


def main_demos() -> dict[str, Callable]:
    """The demos by id, in order."""
    demos = [demo_D01, demo_D02, demo_D03, demo_D04, demo_D05, demo_D06, demo_D07, demo_D08]
    demos += [demo_D09, demo_D10, demo_D11, demo_D12, demo_D13, demo_D14, demo_D15]
    return {demo.__name__[5:]: demo for demo in demos}


def main_text(file: str, spec: object = None) -> str | None:
    """The text of a module, main_text(module.__file__), or that in the zip its __spec__ names."""
    try:
        path = Path(file)
        return path.read_text("utf-8") if path.is_file() else spec.loader.get_source(spec.name)
    except (AttributeError, ImportError, UnicodeDecodeError):  # from a pipe, or bytecode alone
        return None


def main_definitions(text: str) -> tuple[dict[str, tuple[str, ast.stmt]], list[ast.stmt]]:
    """Source and syntax tree of each definition in a module's text, by name; and its imports.

    Definitions are functions, classes, their methods ("KVCache.append", without indentation) and
    constants, in the order of the file.
    """
    lines, definitions, imports = text.splitlines(keepends=True), {}, []
    for node in ast.parse(text).body:
        named = {}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            named = {part.id: node for part in parts if isinstance(part.ctx, ast.Store)}
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            named |= {f"{node.name}.{method.name}": method for method in methods}
        for name, part in named.items():
            decorators = getattr(part, "decorator_list", [])
            start = min([part.lineno, *(decorator.lineno for decorator in decorators)])
            source = textwrap.dedent("".join(lines[start - 1 : part.end_lineno]))
            definitions[name] = source.rstrip("\n") + "\n", part
    return definitions, imports


def main_header(imports: Iterable[tuple[str, str]]) -> str:
    """Imports (module, name), those of the standard library first, sorted as ruff sorts them."""
    names = {}
    for module, name in sorted(imports):
        names.setdefault(module, []).append(name)
    lines = [f"import {name}" for name in names.pop("", [])]
    for module, parts in names.items():
        line = f"from {module} import {', '.join(parts)}"
        if len(line) > 100:
            line = f"from {module} import ({', '.join(parts)})"
            line = textwrap.fill(line, 100, subsequent_indent=" " * (line.index("(") + 1))
        lines.append(line)
    standard = [n for n in lines if n.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in lines if line not in standard]
    return "\n".join("".join(f"{line}\n" for line in part) for part in (standard, others) if part)


def main_source(names: Iterable[str], *texts: str, imported: Iterable[str] = ()) -> str:
    """Definitions with all that they need and the imports: a text that runs by itself.

    texts are modules of the project (main_text), each behind those it imports from: what one
    imports from another (from transformer_block import RMSNorm) is printed too, and of two
    definitions with one name the later one. A module imported whole (import transformer_block as
    tb) stays an import. Definitions in imported are imported from transformer_block. Methods
    ("KVCache.append") come last and as they stand. Raises KeyError for a name that no text defines.
    """
    definitions, imports = {}, []
    for found, more in map(main_definitions, texts):
        definitions = {n: d for n, d in definitions.items() if n not in found} | found
        imports += more
    names, words, imported = list(names), set(), set(imported)
    needed, queue = set(), {name for name in names if "." not in name}
    while queue:
        tree = definitions[name := queue.pop()][1]
        needed.add(name)
        words |= {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}
        queue |= (words & definitions.keys()) - needed - imported
    lines = {("transformer_block", name) for name in words & imported - needed}
    for start, alias in [(node, alias) for node in imports for alias in node.names]:
        bound = alias.asname or alias.name.partition(".")[0]
        if bound in words and bound not in definitions:
            lines.add((getattr(start, "module", ""), ast.unparse(alias)))
    chosen = [name for name in definitions if name in needed] + [n for n in names if "." in n]
    parts, header = dict.fromkeys(definitions[name][0] for name in chosen), main_header(lines)
    return "\n\n".join([header, *parts] if header else parts)


def main_nearest(word: str, names: Iterable[str]) -> list[str]:
    """Up to five names that a mistyped word may mean, in any case, likeliest first."""
    known, word = {name.lower(): name for name in names}, word.lower()
    near = [name for name in known if len(word) > 2 and word in name]
    near += difflib.get_close_matches(word, known, n=5)
    return [known[name] for name in dict.fromkeys(near)][:5]


def main_unknown(parser: argparse.ArgumentParser, kind: str, word: str,
                 names: Iterable[str]) -> NoReturn:  # fmt: skip
    """One line for an unknown name: the nearest ones, and where none is near, or few are, all."""
    names = list(names)
    near, known = main_nearest(word, names), [name for name in names if "." not in name]
    hints = [f"nearest: {', '.join(near)}"] if near else []
    if not near or len(known) < 20:
        hints.append(f"known: {', '.join(known)}")
    parser.error(f"unknown {kind} {word}; {'; '.join(hints)}")


def main_program(parser: argparse.ArgumentParser, argv: list[str] | None,
                 answer: Callable[[argparse.Namespace], int]) -> int:  # fmt: skip
    """The exit status of a program whose parsed options answer takes; prints no traceback.

    A wrong call (parser.error) is one line and status 2, a reader that has gone (`… | head -1`)
    status 1, and characters that the terminal has not are replaced.
    """
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    errors = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="replace")
    try:
        try:
            status = answer(parser.parse_args(argv))
        except SystemExit as stop:  # --help, and wrong calls
            status = stop.code
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    finally:
        for stream, before in zip(streams, errors):
            stream.reconfigure(errors=before)
    return status


def main_own_text(parser: argparse.ArgumentParser | None = None) -> str:
    """The text of this module; without one an error, or "" without a parser."""
    text = main_text(globals().get("__file__", ""), globals().get("__spec__"))
    if text is None and parser:
        parser.error("this prints from the script's file, and the script was not run from a file")
    return text or ""


def main_demo_id(parser: argparse.ArgumentParser, given: str) -> str:
    """D04 for "d04", "D4" and the like."""
    demos, word = main_demos(), given.upper()
    if word[1:].isdecimal():
        word = f"{word[0]}{int(word[1:]):02}"
    if word in demos:
        return word
    if given.lower() in {name.lower() for name in main_definitions(main_own_text())[0]}:
        parser.error(f"{given} is no demo; to print it: --show {given}")
    main_unknown(parser, "demo", given, demos)


def main_defined(parser: argparse.ArgumentParser, given: str, names: Iterable[str]) -> str:
    """The definition that is meant, in any case; an error says where else it may stand."""
    known, demo = {name.lower(): name for name in names}, given.upper()
    if given.lower() in known:
        return known[given.lower()]
    if demo in main_demos():
        parser.error(f"{demo} is a demo: {demo} alone runs it, --show demo_{demo} prints it")
    folder = Path(globals().get("__file__", "")).resolve().parent
    for pattern, command in MAIN_NEIGHBOURS.items():
        for file in sorted(folder.glob(pattern)):
            theirs = main_definitions(main_text(str(file)) or "")[0]
            theirs = {name.lower(): name for name in theirs if not name.startswith(MAIN_TOOLS)}
            if name := theirs.get(given.lower()):
                here, place = folder.name, pattern.partition("/")[0]
                parser.error(f"{name} stands in {here}/{place}: python3 {here}/{command} {name}")
    hidden = (*MAIN_TOOLS, "require_", "_")
    public = [name for word, name in known.items() if not word.startswith(hidden)]
    main_unknown(parser, "name", given, public)


def main_show(parser: argparse.ArgumentParser, given: list[str]) -> str:
    """What --show prints. A demo, or a tool of theirs, imports the library part."""
    text = main_own_text(parser)
    definitions = main_definitions(text)[0]
    names = [main_defined(parser, name, definitions) for name in given]
    library = [name for name in definitions if not name.lower().startswith(MAIN_TOOLS)]
    return main_source(names, text, imported=() if {*names} & {*library} else library)


def main_list(parser: argparse.ArgumentParser) -> str:
    """A line for each demo: what it proves."""
    claims = {name: demo.__doc__ for name, demo in main_demos().items()}
    if None in claims.values():  # under -OO they stand in the file alone
        definitions = main_definitions(main_own_text(parser))[0]
        claims = {name: ast.get_docstring(definitions[f"demo_{name}"][1]) for name in claims}
    return "".join(f"{name}  {claim}\n" for name, claim in claims.items())


def main_verdict(demo: Callable, device: str) -> tuple[bool, str]:
    """The verdict of a demo; one that raises has failed, with the place in its text."""
    try:
        return demo(device)
    except Exception as error:
        return False, check_place(error)


def main_run(demos: dict[str, Callable], device: str, closing: str) -> int:
    """Run demos and print a line each; the exit status."""
    failed = []
    for name, demo in demos.items():
        ok, text = main_verdict(demo, device)
        print(f"[{name}] {text}  {'PASS' if ok else 'FAIL'}", flush=True)
        if not ok:
            failed.append(name)
    if failed:
        print(f"\n{len(failed)} of {len(demos)} FAILED: {', '.join(failed)}")
    elif closing:
        print(f"\n{closing}")
    return 1 if failed else 0


def main_answer(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Do what the options ask for; the exit status."""
    demos, ids = main_demos(), [main_demo_id(parser, name) for name in options.ids]
    asked = {"--list": options.list, "--show": options.show, "--device": options.device}
    asked = [name for name, value in {**asked, "demo ids": ids}.items() if value]
    if len(asked) > 1 and asked[0] != "--device":
        parser.error(f"{' and '.join(asked)} exclude each other: give one of them")
    if options.show or options.list:
        print(main_show(parser, options.show) if options.show else main_list(parser), end="")
        return 0
    device = options.device or "cpu"
    try:
        torch.ones(1, device=device).item()
    except Exception as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        parser.error(f"no device {device}: {reason}")
    closing = "" if ids else "all transformer block sanity checks passed ✓"
    return main_run({name: demos[name] for name in ids or demos}, device, closing)


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status, 2 for a wrong call."""
    about = "Transformer blocks, proved by fifteen demos."
    parser = argparse.ArgumentParser(prog="transformer_block.py", description=about)
    add = parser.add_argument
    add("ids", nargs="*", metavar="ID", help="demos to run (default: D01 to D15)")
    add("--list", action="store_true", help="a line for each demo: what it proves")
    about = "source of a definition with all that it needs, or of Class.method"
    add("--show", nargs="+", action="extend", default=[], metavar="NAME", help=about)
    add("--device", help="cpu, cuda or mps (default: cpu)")
    return main_program(parser, argv, functools.partial(main_answer, parser))


if __name__ == "__main__":
    atexit.register(gc.freeze)  # nor need the interpreter walk them on its way out
    status = main()
    gc.enable()
    sys.exit(status)
