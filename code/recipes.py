"""The recipe table of the notes as code: each model composed of the script's classes.

    python3 code/recipes.py                  layers, width, parameters, active, cache of a token
    python3 code/recipes.py "Mixtral 8x7B"   how it is composed, what each part holds and costs
    python3 code/recipes.py --markdown       the recipe tables of the notes (§8.1)

RECIPES["Mixtral 8x7B"].build() is the model at its real size; under torch.device("meta") it takes
no memory. These are the functions, not the files: released weights load after a conversion. Gemma
stores a norm's weight as its difference from 1, and where the table says adjacent, the rows of
the rotated channels are permuted to halves.
"""

import argparse
import collections
import dataclasses
import difflib
import math
import operator
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial

import transformer_block as tb  # isort: skip (first: without torch it says how to install it)
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from after_2025 import (
    GatedDeltaNet,
    HyperConnectedBlock,
    HyperConnection,
    IndexedSparseAttention,
    OutputGatedAttention,
    StreamCollapse,
)
from after_2026 import (
    CompressedAttention,
    EntryIndex,
    EntryPooling,
    GatedLatentAttention,
    GatedSharedExpert,
    HashMixtureFFN,
    HashRouter,
    IndependentConnection,
    IndexGroup,
    LimitedGatedFFN,
    NarrowValueAttention,
    SharedIndexAttention,
    SqrtSoftplusRouter,
    TokenRoutedLM,
)

Tables = tuple[Tensor, Tensor]
tanh_gelu = partial(F.gelu, approximate="tanh")


def all_alike(_layer: int) -> int:
    """The kind of a layer in a model whose layers hold the same parts."""
    return 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a checkpoint: what every composition needs.

    d_ff is that of the dense layers, eps that of the norms, base the theta of the rotation, max_len
    the number of positions that its tables have. With shared, layers of one kind (shared(layer)
    is equal) are one and the same block: an outline to count and describe, not a model to run.
    """

    n_layers: int
    d_model: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    eps: float = 1e-5
    base: float = 10000.0
    tied: bool = False
    max_len: int = 4096
    shared: Callable[[int], object] | None = None

    @property
    def table_rows(self) -> int:
        """Rows of the rotation tables: an outline, which is not run, needs no more than one."""
        return self.max_len if self.shared is None else 1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A row: compose(sizes, **parts) is the model; stated are cells that no composition shows.

    published are the total and active parameters that source prints, both with all tables. kinds
    gives layers that are composed alike one value.
    """

    compose: Callable[..., nn.Module]
    sizes: Sizes
    parts: dict[str, object]
    published: tuple[float, float | None]
    source: str
    stated: dict[str, str] = dataclasses.field(default_factory=dict)
    kinds: Callable[[int], object] = all_alike

    def build(self) -> nn.Module:
        """The model at its real size, on the default device."""
        return self.compose(self.sizes, **self.parts)

    def outline(self) -> nn.Module:
        """The same with one block for all layers of a kind."""
        return self.compose(dataclasses.replace(self.sizes, shared=self.kinds), **self.parts)


# =============================================================================================
# Parts that the script does not have
# =============================================================================================


class LearnedPositionLM(tb.DecoderOnlyLM):
    """The shell of GPT-2: a learned vector for each position is added to the embedding.

    Versus DecoderOnlyLM: nothing rotates, and the final norm is a LayerNorm. A real token's
    position is the number of real tokens ahead of it in its row: padding takes none.
    """

    def __init__(self, s: Sizes, make_block: Callable[[int], nn.Module]):
        super().__init__(
            s.vocab_size, s.d_model, s.n_layers, make_block=make_block, max_len=s.max_len, eps=s.eps
        )
        self.positions = nn.Embedding(s.max_len, s.d_model)
        self.final_norm = nn.LayerNorm(s.d_model, s.eps)

    def _logits(self, ids: Tensor, masks: dict[int | None, Tensor | None], kv_caches: list,
                last_only: bool, options: dict) -> Tensor:  # fmt: skip
        start = 0 if kv_caches[0] is None else kv_caches[0].next_pos
        real = options["key_padding_mask"]
        if real is None:
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)  # (T)
        else:
            positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, start:]  # (B, T)
        try:
            x = self.embedding(ids.long()) + self.positions(positions)  # (B, T, d)
        except IndexError as error:
            span = f"{ids.min().item()} … {ids.max().item()}"
            raise ValueError(f"ids must be in the embedding, got {span}") from error
        for block, window, kv_cache in zip(self.blocks, self.windows, kv_caches):
            x = block(x, mask=masks[window], key_padding_mask=real, kv_cache=kv_cache)
        return self._head(self.final_norm(x[:, -1:] if last_only else x))


class ScaledLayerNorm(nn.LayerNorm):
    """A final LayerNorm without bias times a constant, which so multiplies the logits."""

    def __init__(self, d_model: int, eps: float, factor: float):
        super().__init__(d_model, eps, bias=False)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def key_positions(k: Tensor, keep: Tensor | None) -> Tensor:
    """Positions [S], or [B, 1, S] where rows differ, counted from the end of left padding: the
    first key that any query may attend to is at 0."""
    at = torch.arange(k.shape[2], device=k.device)
    if keep is None:
        return at
    padding = keep.any(dim=-2).cumsum(dim=-1) == 0
    return at - padding.sum(dim=-1, keepdim=True)


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, *,
                     chunk: int, **options) -> Tensor:  # fmt: skip
    """attend to keys of the query's own chunk only (Llama-4): blocks, not a sliding window."""
    number = key_positions(k, keep).div(chunk, rounding_mode="floor")
    same = number[..., k.shape[2] - q.shape[2] :, None] == number[..., None, :]  # (…, T, S)
    return tb.attend(q, k, v, same if keep is None else keep & same, **options)


def attend_tempered(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, *,
                    floor_scale: int, rate: float = 0.1, **options) -> Tensor:  # fmt: skip
    """attend with queries that grow as 1 + rate * ln(1 + floor((position + 1) / floor_scale)):
    Llama-4's layers without positions, whose softmax would flatten over long contexts."""
    at = key_positions(k, keep)[..., k.shape[2] - q.shape[2] :, None]  # (…, T, 1)
    steps = (at + 1).clamp(min=0).div(floor_scale, rounding_mode="floor")
    return tb.attend(q * (1 + rate * steps.double().log1p()).to(q.dtype), k, v, keep, **options)


class OwnTables:
    """A forward pre-hook that hands an attention tables of its own instead of the shell's."""

    def __init__(self, cos: Tensor, sin: Tensor):
        self.cos, self.sin = cos, sin

    def __call__(self, _attn: nn.Module, args: tuple, options: dict) -> tuple[tuple, dict]:
        return args, options | {"cos": self.cos, "sin": self.sin}


@lru_cache(maxsize=16)  # the layers of a model share them
def own_tables(tables: Callable[..., Tables], max_len: int, width: int, base: float) -> OwnTables:
    """The hook of tables(max_len, width, base)."""
    with torch.inference_mode(False):  # autograd refuses tensors made there
        return OwnTables(*tables(max_len, width, base))


def with_tables(
    attn: nn.Module, tables: Callable[..., Tables], s: Sizes, width: int, base: float | None = None
) -> nn.Module:
    """The attention, turning by tables(max_len, width, base) of its own."""
    hook = own_tables(tables, s.table_rows, width, s.base if base is None else base)
    attn.register_forward_pre_hook(hook, with_kwargs=True)
    return attn


def rope_tables(frequencies: Tensor, max_len: int, gain: float = 1.0) -> Tables:
    """(cos, sin), [max_len, r] float32, of r/2 frequencies in radians a position."""
    angles = torch.outer(torch.arange(max_len, device="cpu"), frequencies).repeat(1, 2)
    return (gain * angles.cos()).float(), (gain * angles.sin()).float()


def rope_frequencies(width: int, base: float) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return base**-exponents


def linear_tables(max_len: int, width: int, base: float, *, factor: float = 1.0) -> Tables:
    """Positions divided by factor (position interpolation)."""
    return rope_tables(rope_frequencies(width, base) / factor, max_len)


def llama3_tables(max_len: int, width: int, base: float, *, factor: float, old_len: int = 8192,
                  low: float = 1.0, high: float = 4.0) -> Tables:  # fmt: skip
    """Llama-3.1: channels that turn less than low times in old_len are slowed by factor, those
    that turn more than high times are not, between them linearly in the number of turns. low and
    high may be one number."""
    frequencies = rope_frequencies(width, base)
    turns = old_len * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low or 1e-3)).clamp(0, 1)
    return rope_tables(frequencies * (kept + (1 - kept) / factor), max_len)


def yarn_tables(max_len: int, width: int, base: float, *, factor: float, old_len: int = 4096,
                fast: float = 32.0, slow: float = 1.0, rounded: bool = True,
                gain: float = 1.0) -> Tables:  # fmt: skip
    """YaRN (arXiv:2309.00071 §3) as released: linear in the pair's index between those that turn
    fast and slow times in old_len, their indices rounded outwards or not; tables times gain."""

    def index(turns: float) -> float:
        return width * math.log(old_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index(fast), index(slow)
    if rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high if high > low else low + 0.001  # as transformers: a ramp has some width
    pairs = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    slowed = ((pairs - low) / (high - low)).clamp(0, 1)
    return rope_tables(
        rope_frequencies(width, base) * (1 - slowed + slowed / factor), max_len, gain
    )


def yarn_gain(factor: float) -> float:
    return 0.1 * math.log(factor) + 1


# =============================================================================================
# Attentions and FFNs of a layer: part(sizes, layer)
# =============================================================================================


def attention(s: Sizes, _layer: int, **options) -> tb.MultiHeadAttention:
    options = {"head_dim": s.head_dim, "rope": True, "norm_eps": s.eps} | options
    return tb.MultiHeadAttention(s.d_model, s.n_q_heads, s.n_kv_heads, **options)


def stretched(s: Sizes, layer: int, *, tables: Callable, attn: Callable = attention) -> nn.Module:
    """An attention whose tables are made for a longer context."""
    return with_tables(attn(s, layer), tables, s, s.head_dim)


def gemma2_attention(s: Sizes, layer: int, *, scale: float,
                     logit_softcap: float = 50.0) -> nn.Module:  # fmt: skip
    """Soft-capped scores. Set afterwards: to try it out without memory takes torch's compiler."""
    attn = attention(s, layer, scale=scale)
    attn.logit_softcap = logit_softcap
    return attn


def gemma3_attention(s: Sizes, layer: int, *, scale: float, full_every: int, full_base: float,
                     factor: float = 1.0) -> nn.Module:  # fmt: skip
    """Full layers turn by a larger base, and with the positions divided by factor."""
    attn = attention(s, layer, qk_norm=True, scale=scale)
    if (layer + 1) % full_every:
        return attn
    return with_tables(attn, partial(linear_tables, factor=factor), s, s.head_dim, full_base)


def whole_norm_attention(s: Sizes, layer: int) -> nn.Module:
    """q and k are normed over all heads together, before they are split: OLMo-2, MiniMax-M2."""
    attn = attention(s, layer)
    for name, heads in (("q_proj", s.n_q_heads), ("k_proj", s.n_kv_heads)):
        norm = tb.RMSNorm(heads * s.head_dim, s.eps)
        setattr(attn, name, nn.Sequential(getattr(attn, name), norm))
    return attn


def llama4_attention(s: Sizes, layer: int, *, normed: bool, tables: Callable, chunk: int = 8192,
                     floor_scale: int = 8192) -> nn.Module:  # fmt: skip
    """Three layers rotate and see their chunk, the fourth has no positions and sees everything.

    Scout norms q and k without a weight, after the rotation; a rotation keeps the length, so that
    norming before it is the same function.
    """
    if (layer + 1) % 4 == 0:
        tempered = partial(attend_tempered, floor_scale=floor_scale)
        return attention(s, layer, rope=False, attend=tempered)
    attn = attention(s, layer, attend=partial(attend_in_chunks, chunk=chunk))
    if normed:
        for name in ("q_norm", "k_norm"):
            setattr(attn, name, nn.RMSNorm(s.head_dim, s.eps, elementwise_affine=False))
    return with_tables(attn, tables, s, s.head_dim)


def gpt_oss_attention(s: Sizes, layer: int, *, tables: Callable) -> nn.Module:
    """Biases, and sinks. Set afterwards: to try them out without memory takes torch's compiler."""
    attn = with_parts(attention(s, layer, bias=True), attend=tb.SinkAttention(s.n_q_heads))
    return with_tables(attn, tables, s, s.head_dim)


def latent_attention(s: Sizes, _layer: int, *, kv_rank: int, q_rank: int | None, nope_dim: int,
                     rope_dim: int, v_dim: int, tables: Callable,
                     score_gain: float = 1.0) -> nn.Module:  # fmt: skip
    """Scores are multiplied by score_gain, which a stretch by YaRN asks for."""
    attn = tb.MultiHeadLatentAttention(
        s.d_model, s.n_q_heads, kv_rank=kv_rank, rope_dim=rope_dim, nope_dim=nope_dim,
        v_dim=v_dim, q_rank=q_rank,
    )  # fmt: skip
    attn.scale *= score_gain
    return with_tables(attn, tables, s, rope_dim)


def indexed_attention(s: Sizes, layer: int, *, n_index_heads: int, index_dim: int, top_k: int,
                      **latent) -> nn.Module:  # fmt: skip
    """Latent attention that reads the keys an indexer chooses: DeepSeek-V3.2, GLM-5."""
    attn = IndexedSparseAttention(
        latent_attention(s, layer, **latent),
        n_index_heads=n_index_heads, index_dim=index_dim, top_k=top_k,
    )  # fmt: skip
    return with_tables(attn, latent["tables"], s, latent["rope_dim"])


def unrotated_every_4th(s: Sizes, layer: int) -> nn.Module:
    """SmolLM3: no positions in layers 3, 7, …"""
    return attention(s, layer, rope=(layer + 1) % 4 != 0)


def olmo3_attention(s: Sizes, layer: int, *, tables: Callable) -> nn.Module:
    """Full layers, every fourth, turn by stretched tables, those with a window by plain ones."""
    attn = whole_norm_attention(s, layer)
    return attn if (layer + 1) % 4 else with_tables(attn, tables, s, s.head_dim)


def qwen3_next_mixer(s: Sizes, layer: int, *, n_k_heads: int, n_v_heads: int,
                     width: int) -> nn.Module:  # fmt: skip
    """Three layers of Gated DeltaNet, then one of output-gated attention."""
    if (layer + 1) % 4:
        sizes = {"k_dim": width, "v_dim": width, "norm_eps": s.eps}
        return GatedDeltaNet(s.d_model, n_k_heads, n_v_heads, **sizes)
    return OutputGatedAttention(attention(s, layer, qk_norm=True))


def mimo_attention(s: Sizes, layer: int, *, full: Callable[[int], bool], v_dim: int,
                   value_scale: float, local_heads: int, rope_dim: int,
                   local_base: float) -> nn.Module:  # fmt: skip
    """Full layers as they are; those with a window have sinks, own KV heads and an own theta."""
    sizes = {"head_dim": s.head_dim, "v_dim": v_dim, "value_scale": value_scale}
    if full(layer):
        return NarrowValueAttention(s.d_model, s.n_q_heads, s.n_kv_heads, **sizes)
    sinks = tb.SinkAttention(s.n_q_heads)
    attn = NarrowValueAttention(s.d_model, s.n_q_heads, local_heads, attend=sinks, **sizes)
    return with_tables(attn, linear_tables, s, rope_dim, local_base)


def compressed_attention(s: Sizes, layer: int, *, rope_dim: int, q_rank: int, window: int,
                         n_groups: int, group_rank: int, rates: Callable[[int], int],
                         index: dict[str, int], tables: Callable,
                         local_base: float) -> nn.Module:  # fmt: skip
    """DeepSeek-V4: rate 0 is a window alone, the lowest other one has an index and overlaps."""
    rate, sizes = rates(layer), {"norm_eps": s.eps}
    parts = {}
    if rate:
        overlap = rate == min(rates(number) for number in range(s.n_layers) if rates(number))
        pooling = EntryPooling(s.d_model, s.head_dim, rate, overlap=overlap, **sizes)
        parts["pooling"] = pooling
        if overlap:
            parts["index"] = EntryIndex(s.d_model, q_rank, rate=rate, **index, **sizes)
    attn = CompressedAttention(
        s.d_model, s.n_q_heads, head_dim=s.head_dim, rope_dim=rope_dim, q_rank=q_rank,
        window=window, n_groups=n_groups, group_rank=group_rank, **parts, **sizes,
    )  # fmt: skip
    if rate:
        return with_tables(attn, tables, s, rope_dim)
    return with_tables(attn, linear_tables, s, rope_dim, local_base)


def swiglu(s: Sizes, _layer: int) -> nn.Module:
    return tb.GatedFFN(s.d_model, s.d_ff)


def geglu(s: Sizes, _layer: int) -> nn.Module:
    return tb.GatedFFN(s.d_model, s.d_ff, tanh_gelu)


def some_experts(s: Sizes, layer: int, *, sparse: Callable[[int], bool],
                 experts: Callable) -> nn.Module:  # fmt: skip
    """Experts in the layers that are sparse, a dense SwiGLU in the others."""
    return (experts if sparse(layer) else swiglu)(s, layer)


def softmax_experts(s: Sizes, _layer: int, *, n_experts: int, top_k: int, width: int,
                    n_shared: int = 0, **routing) -> nn.Module:  # fmt: skip
    """Mixtral, Qwen3, DeepSeek-V2; n_shared experts are one FFN of n_shared times the width."""
    shared = tb.GatedFFN(s.d_model, n_shared * width) if n_shared else None
    experts = (tb.GatedFFN(s.d_model, width) for _ in range(n_experts))
    router = tb.SoftmaxRouter(s.d_model, n_experts, top_k, **routing)
    return tb.MixtureFFN(router, experts, shared)


def sigmoid_experts(s: Sizes, _layer: int, *, n_experts: int, top_k: int, width: int,
                    n_shared: int = 1, **routing) -> nn.Module:  # fmt: skip
    """DeepSeek-V3, and with no shared expert MiniMax-M2 and MiMo."""
    experts = (tb.GatedFFN(s.d_model, width) for _ in range(n_experts))
    router = tb.SigmoidRouter(s.d_model, n_experts, top_k, **routing)
    shared = tb.GatedFFN(s.d_model, n_shared * width) if n_shared else None
    return tb.MixtureFFN(router, experts, shared)


def qwen3_next_experts(s: Sizes, _layer: int, *, n_experts: int, top_k: int,
                       width: int) -> nn.Module:  # fmt: skip
    """Softmax over all, and a shared expert whose share is read from the token."""
    experts = (tb.GatedFFN(s.d_model, width) for _ in range(n_experts))
    router = tb.SoftmaxRouter(s.d_model, n_experts, top_k)
    shared = GatedSharedExpert(s.d_model, tb.GatedFFN(s.d_model, width))
    return tb.MixtureFFN(router, experts, shared)


def llama4_experts(s: Sizes, _layer: int, *, n_experts: int, width: int) -> nn.Module:
    experts = (tb.GatedFFN(s.d_model, width) for _ in range(n_experts))
    options = {"renormalise": False, "selection_bias": False}
    router = tb.SigmoidRouter(s.d_model, n_experts, 1, **options)
    return tb.MixtureFFN(router, experts, tb.GatedFFN(s.d_model, width), weigh_input=True)


def gpt_oss_experts(s: Sizes, _layer: int, *, n_experts: int, top_k: int,
                    limit: float = 7.0) -> nn.Module:  # fmt: skip
    experts = (tb.ClampedGatedFFN(s.d_model, s.d_ff, limit=limit) for _ in range(n_experts))
    return tb.MixtureFFN(tb.SoftmaxRouter(s.d_model, n_experts, top_k, bias=True), experts)


# =============================================================================================
# Models: compose(sizes, **parts)
# =============================================================================================


def make_blocks(s: Sizes, make_block: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """make_block, or with s.shared the first block of a kind for all layers of that kind."""
    if s.shared is None:
        return make_block
    made = {}

    def first_of_its_kind(layer: int) -> nn.Module:
        kind = s.shared(layer)
        if kind not in made:
            made[kind] = make_block(layer)
        return made[kind]

    return first_of_its_kind


def stack(s: Sizes, make_block: Callable[[int], nn.Module],
          shell: type[tb.DecoderOnlyLM] = tb.DecoderOnlyLM, **options) -> nn.Module:  # fmt: skip
    """The shell around these blocks: tables, final RMSNorm, head."""
    options = {"tie_embeddings": s.tied, "max_len": s.table_rows, "rope_base": s.base} | options
    heads = s.n_q_heads, s.n_kv_heads, s.d_ff
    options |= {"make_block": make_blocks(s, make_block), "eps": s.eps}
    return shell(s.vocab_size, s.d_model, s.n_layers, *heads, **options)


def with_parts(module: nn.Module, **parts: nn.Module) -> nn.Module:
    """The module with these submodules in place of its own."""
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def serial(s: Sizes, *, attn: Callable = attention, ffn: Callable = swiglu,
           **shell) -> nn.Module:  # fmt: skip
    """Pre-norm: Llama and most after it."""
    return stack(
        s,
        lambda layer: tb.ModernDecoderBlock(
            s.d_model, attn=attn(s, layer), ffn=ffn(s, layer), eps=s.eps
        ),
        **shell,
    )


def local_global(s: Sizes, window: int, full_every: int) -> list[int | None]:
    """Every full_every-th layer sees everything, the others a window."""
    return [window if (layer + 1) % full_every else None for layer in range(s.n_layers)]


def gpt2(s: Sizes) -> nn.Module:
    """Learned positions, LayerNorm, biases, tanh GELU."""

    def block(_layer: int) -> nn.Module:
        sizes = s.d_model, s.n_q_heads, s.d_ff
        return tb.GPT2StyleDecoderLayer(*sizes, act=tanh_gelu, eps=s.eps)

    return LearnedPositionLM(s, make_blocks(s, block))


def parallel(s: Sizes, *, attn: Callable, ffn: Callable, shared_norm: bool, rope_dim: int,
             head_bias: bool = False) -> nn.Module:  # fmt: skip
    """Both branches read the stream: GPT-J, GPT-NeoX, Phi-2, Falcon."""
    model = stack(
        s,
        lambda layer: tb.ParallelDecoderBlock(
            s.d_model, attn=attn(s, layer), ffn=ffn(s, layer), shared_norm=shared_norm, eps=s.eps
        ),
        rope_dim=rope_dim,
    )
    model = with_parts(model, final_norm=nn.LayerNorm(s.d_model, s.eps))
    return with_parts(model, lm_head=nn.Linear(s.d_model, s.vocab_size)) if head_bias else model


def dense(s: Sizes, _layer: int, *, act: Callable, bias: bool) -> nn.Module:
    return tb.DenseFFN(s.d_model, s.d_ff, act, bias)


def parallel_gated(s: Sizes, *, logit_scale: float) -> nn.Module:
    """Parallel with SwiGLU and LayerNorms without bias: PaLM, Command-R."""

    def block(layer: int) -> nn.Module:
        made = tb.ParallelDecoderBlock(s.d_model, attn=attention(s, layer), ffn=swiglu(s, layer))
        return with_parts(made, norm=nn.LayerNorm(s.d_model, s.eps, bias=False))

    return with_parts(stack(s, block), final_norm=ScaledLayerNorm(s.d_model, s.eps, logit_scale))


def gemma1(s: Sizes) -> nn.Module:
    return serial(s, ffn=geglu, embedding_scale=math.sqrt(s.d_model))


def gemma(s: Sizes, *, attn: Callable, window: int, full_every: int,
          logit_softcap: float | None = None) -> nn.Module:  # fmt: skip
    """Gemma-2 and Gemma-3: a norm on each side of a branch, local layers first."""

    def block(layer: int) -> nn.Module:
        parts = {"attn": attn(s, layer), "ffn": geglu(s, layer)}
        return tb.BranchNormDecoderBlock(s.d_model, **parts, eps=s.eps)

    windows = local_global(s, window, full_every)
    shell = {"windows": windows, "logit_softcap": logit_softcap}
    return stack(s, block, embedding_scale=math.sqrt(s.d_model), **shell)


def output_norm(s: Sizes, *, attn: Callable = whole_norm_attention, **shell) -> nn.Module:
    """Branches are normed on their way out only: OLMo-2, OLMo-3."""

    def block(layer: int) -> nn.Module:
        parts = {"attn": attn(s, layer), "ffn": swiglu(s, layer)}
        made = tb.BranchNormDecoderBlock(s.d_model, **parts, eps=s.eps)
        return with_parts(made, attn_pre_norm=nn.Identity(), ffn_pre_norm=nn.Identity())

    return stack(s, block, **shell)


def windowed(s: Sizes, *, window: int, full_every: int, **parts) -> nn.Module:
    """serial with a window: in every layer where full_every is above their number."""
    return serial(s, windows=local_global(s, window, full_every), **parts)


def deepseek_v4_experts(s: Sizes, layer: int, *, n_experts: int, top_k: int, scale: float,
                        n_hashed: int, limit: float = 10.0) -> nn.Module:  # fmt: skip
    """The first n_hashed layers choose by the token's id; the shared expert is limited too."""
    experts = (LimitedGatedFFN(s.d_model, s.d_ff, limit) for _ in range(n_experts))
    shared, routing = LimitedGatedFFN(s.d_model, s.d_ff, limit), (s.d_model, n_experts, top_k)
    if layer < n_hashed:
        router = HashRouter(*routing, s.vocab_size, scale=scale)
        return HashMixtureFFN(router, experts, shared)
    return tb.MixtureFFN(SqrtSoftplusRouter(*routing, scale=scale), experts, shared)


def on_streams(s: Sizes, make_block: Callable[[int], nn.Module], **options) -> nn.Module:
    """A stack of blocks that hand on n_streams: they are collapsed before the final norm."""
    model = stack(s, make_block, **options)
    collapse = StreamCollapse(s.d_model, norm_eps=s.eps)
    return with_parts(model, final_norm=nn.Sequential(collapse, model.final_norm))


def deepseek_v4(s: Sizes, *, attn: Callable, ffn: Callable, rope_dim: int) -> nn.Module:
    """Four mixed streams, compressed attention, experts in every layer."""

    def block(layer: int) -> nn.Module:
        streams = (HyperConnection(s.d_model, norm_eps=s.eps) for _ in range(2))
        parts = dict(zip(("attn_streams", "ffn_streams"), streams))
        parts |= {"attn": attn(s, layer), "ffn": ffn(s, layer)}
        return HyperConnectedBlock(s.d_model, eps=s.eps, **parts)

    return on_streams(s, block, shell=TokenRoutedLM, rope_dim=rope_dim)


def index_groups(n_layers: int) -> list[range]:
    """Hy4's layers that share an index: 0 alone, then four by four from each that chooses."""
    return [range(1), *(range(n, min(n + 4, n_layers)) for n in range(1, n_layers, 4))]


def hy4(s: Sizes, *, index: dict[str, int], latent: dict[str, int], n_experts: int, top_k: int,
        width: int, scale: float, limit: float = 10.0) -> nn.Module:  # fmt: skip
    """Four streams that are not mixed; gated latent attention with sinks; one index for several
    layers; routed experts limited, the shared one not; layer 0 dense."""
    groups = index_groups(s.n_layers)

    def ffn(layer: int) -> nn.Module:
        if layer == 0:
            return swiglu(s, layer)
        router = tb.SigmoidRouter(s.d_model, n_experts, top_k, scale=scale)
        experts = (LimitedGatedFFN(s.d_model, width, limit) for _ in range(n_experts))
        return tb.MixtureFFN(router, experts, tb.GatedFFN(s.d_model, width))

    def layer(number: int, chooses: bool) -> nn.Module:
        attn = GatedLatentAttention(s.d_model, s.n_q_heads, **latent)
        if chooses:
            attn = IndexedSparseAttention(attn, **index)
            attn.index_norm.eps = s.eps
        else:
            attn = SharedIndexAttention(attn)
        streams = (IndependentConnection(s.d_model, norm_eps=s.eps) for _ in range(2))
        parts = dict(zip(("attn_streams", "ffn_streams"), streams))
        return HyperConnectedBlock(s.d_model, attn=attn, ffn=ffn(number), eps=s.eps, **parts)

    def group(number: int) -> nn.Module:
        return IndexGroup(layer(n, chooses=n == groups[number][0]) for n in groups[number])

    blocks = dataclasses.replace(s, n_layers=len(groups))
    return on_streams(blocks, group, rope_dim=latent["rope_dim"])


def scheduled(s: Sizes, *, window: int, full: Callable[[int], bool], **parts) -> nn.Module:
    """serial with a window in the layers that are not full."""
    windows = [None if full(layer) else window for layer in range(s.n_layers)]
    return serial(s, windows=windows, **parts)


# =============================================================================================
# The rows
# =============================================================================================

WHOLE = {"full_every": 10**9}  # no layer sees more than the window
ADJACENT = {"Pairs": "adjacent"}
PORTED = {"Pairs": "adjacent*"}
UNSCALED = linear_tables
GPT3 = {
    "Norm": "as GPT-2",
    "eps": "n/s",
    "Biases": "n/s",
    "Position": "as GPT-2",
    "FFN": "as GPT-2",
    "Window": "banded sparse, alternating",
    "Extras": "none stated",
    "Vocabulary": "n/s",
    "Tied": "n/s",
}
PALM = {"Topology": "parallel", "eps": "n/s", "Position": "RoPE", "Pairs": "n/s", "Theta": "n/s"}
PALM |= {"Extras": "logits scaled", "Vocabulary": "256k"}
PLUS_ONE = {"Norm": "RMSNorm, 1+w"}
NOT_CONFIRMED = {"Tied": "n/c"}
LLAMA3 = {"vocab_size": 128256, "base": 500000.0}
LLAMA4 = {"vocab_size": 202048, "base": 500000.0}
GEMMA = {"vocab_size": 256000, "eps": 1e-6, "tied": True}
GEMMA3 = {"vocab_size": 262144, "eps": 1e-6, "tied": True}
QWEN = {"eps": 1e-6, "base": 1e6}
MLA = {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
MLA |= {"tables": partial(yarn_tables, factor=40), "score_gain": yarn_gain(40) ** 2}
DEEPSEEK_V2_EXPERTS = partial(
    softmax_experts, n_experts=160, top_k=6, width=1536, n_shared=2, renormalise=False, scale=16.0,
    n_groups=8, top_groups=3,
)  # fmt: skip
DEEPSEEK_V3_EXPERTS = partial(
    sigmoid_experts, n_experts=256, top_k=8, width=2048, scale=2.5, n_groups=8, top_groups=4
)
OSS = {"tables": partial(yarn_tables, factor=32, rounded=False, gain=yarn_gain(32))}
OSS_SIZES = {"vocab_size": 201088, "base": 150000.0}
OSS_WINDOWS = {"window": 128, "full_every": 2, "attn": partial(gpt_oss_attention, **OSS)}
BIASED = partial(attention, bias=True)
BIASED_GELU = partial(dense, act=tanh_gelu, bias=True)
PLAIN_GELU = partial(dense, act=F.gelu, bias=False)


RECIPES = {
    "GPT-2 XL": Recipe(
        gpt2,
        Sizes(48, 1600, 25, 25, 64, 6400, 50257, tied=True, max_len=1024),
        {},
        (1.558e9, None),
        "openai/gpt-2 README, src/model.py",
    ),
    "GPT-3 175B": Recipe(  # the band's width is unpublished: composed with every layer full
        gpt2,
        Sizes(96, 12288, 96, 96, 128, 49152, 50257, tied=True, max_len=2048),
        {},
        (175.0e9, None),
        "arXiv:2005.14165 Table 2.1",
        GPT3,
    ),
    "GPT-J 6B": Recipe(
        parallel,
        Sizes(28, 4096, 16, 16, 256, 16384, 50400),
        {"attn": attention, "ffn": BIASED_GELU, "shared_norm": True, "rope_dim": 64}
        | {"head_bias": True},
        (6.053e9, None),
        "kingoflolz/mesh-transformer-jax README",
        ADJACENT,
    ),
    "GPT-NeoX 20B": Recipe(
        parallel,
        Sizes(44, 6144, 64, 64, 96, 24576, 50432),
        {"attn": BIASED, "ffn": BIASED_GELU, "shared_norm": False, "rope_dim": 24},
        (20.6e9, None),
        "arXiv:2204.06745; EleutherAI/gpt-neox configs/20B.yml",
    ),
    "PaLM 540B": Recipe(  # one norm or two is not stated: composed with one
        parallel_gated,
        Sizes(118, 18432, 48, 1, 256, 73728, 256000, tied=True),
        {"logit_scale": 18432**-0.5},
        (540.35e9, None),
        "arXiv:2204.02311 Table 1",
        PALM,
    ),
    "Llama-1 7B": Recipe(
        serial,
        Sizes(32, 4096, 32, 32, 128, 11008, 32000, 1e-6),
        {},
        (6.7e9, None),
        "arXiv:2302.13971 Table 2",
        PORTED,
    ),
    "Llama-2 7B": Recipe(
        serial,
        Sizes(32, 4096, 32, 32, 128, 11008, 32000),
        {},
        (6.7e9, None),
        "arXiv:2307.09288",
        PORTED,
    ),
    "Llama-2 70B": Recipe(
        serial,
        Sizes(80, 8192, 64, 8, 128, 28672, 32000),
        {},
        (69e9, None),
        "arXiv:2307.09288",
        PORTED,
    ),
    "Llama-3 8B": Recipe(
        serial,
        Sizes(32, 4096, 32, 8, 128, 14336, **LLAMA3),
        {},
        (8.03e9, None),
        "meta-llama/llama3",
        PORTED,
    ),
    "Llama-3 70B": Recipe(
        serial,
        Sizes(80, 8192, 64, 8, 128, 28672, **LLAMA3),
        {},
        (70.6e9, None),
        "meta-llama/llama3",
        PORTED,
    ),
    "Llama-3.1 405B": Recipe(
        serial,
        Sizes(126, 16384, 128, 8, 128, 53248, **LLAMA3),
        {"attn": partial(stretched, tables=partial(llama3_tables, factor=8))},
        (405e9, None),
        "arXiv:2407.21783",
        PORTED,
    ),
    "Llama-3.2 1B": Recipe(
        serial,
        Sizes(16, 2048, 32, 8, 64, 8192, tied=True, **LLAMA3),
        {"attn": partial(stretched, tables=partial(llama3_tables, factor=32))},
        (1.23e9, None),
        "meta-llama/llama-models",
        PORTED,
    ),
    "Llama-4 Scout": Recipe(
        serial,
        Sizes(48, 5120, 40, 8, 128, 16384, **LLAMA4),
        {
            "attn": partial(
                llama4_attention, normed=True, tables=partial(llama3_tables, factor=16)
            ),
            "ffn": partial(llama4_experts, n_experts=16, width=8192),
        },
        (109e9, 17e9),
        "meta-llama/llama-models model card; 109B counts the vision part",
        ADJACENT,
        kinds=lambda layer: layer % 4 == 3,
    ),
    "Llama-4 Maverick": Recipe(
        serial,
        Sizes(48, 5120, 40, 8, 128, 16384, **LLAMA4),
        {
            "attn": partial(llama4_attention, normed=False, tables=UNSCALED),
            "ffn": partial(
                some_experts,
                sparse=lambda layer: layer % 2 == 1,
                experts=partial(llama4_experts, n_experts=128, width=8192),
            ),
        },
        (400e9, 17e9),
        "meta-llama/llama-models model card",
        ADJACENT,
        kinds=lambda layer: layer % 4,
    ),
    "Mistral 7B v0.1": Recipe(
        windowed,
        Sizes(32, 4096, 32, 8, 128, 14336, 32000),
        {"window": 4096, **WHOLE},
        (7.24e9, None),
        "arXiv:2310.06825",
        PORTED,
    ),
    "Mixtral 8x7B": Recipe(
        serial,
        Sizes(32, 4096, 32, 8, 128, 14336, 32000, base=1e6),
        {"ffn": partial(softmax_experts, n_experts=8, top_k=2, width=14336)},
        (47e9, 13e9),
        "arXiv:2401.04088",
        PORTED,
    ),
    "Qwen2/2.5 7B": Recipe(
        serial,
        Sizes(28, 3584, 28, 4, 128, 18944, 152064, **QWEN),
        {"attn": partial(attention, qkv_bias=True)},
        (7.6e9, None),
        "arXiv:2407.10671, arXiv:2412.15115",
    ),
    "Qwen3 8B": Recipe(
        serial,
        Sizes(36, 4096, 32, 8, 128, 12288, 151936, **QWEN),
        {"attn": partial(attention, qk_norm=True)},
        (8.2e9, None),
        "arXiv:2505.09388",
    ),
    "Qwen3 30B-A3B": Recipe(
        serial,
        Sizes(48, 2048, 32, 4, 128, 6144, 151936, **QWEN),
        {
            "attn": partial(attention, qk_norm=True),
            "ffn": partial(softmax_experts, n_experts=128, top_k=8, width=768),
        },
        (30.5e9, 3.3e9),
        "arXiv:2505.09388",
    ),
    "Gemma-1 2B": Recipe(
        gemma1,
        Sizes(18, 2048, 8, 1, 256, 16384, **GEMMA),
        {},
        (2.5e9, None),
        "google/gemma_pytorch; arXiv:2403.08295",
        PLUS_ONE,
    ),
    "Gemma-1 7B": Recipe(
        gemma1,
        Sizes(28, 3072, 16, 16, 256, 24576, **GEMMA),
        {},
        (8.5e9, None),
        "google/gemma_pytorch; arXiv:2403.08295",
        PLUS_ONE,
    ),
    "Gemma-2 9B": Recipe(
        gemma,
        Sizes(42, 3584, 16, 8, 256, 14336, **GEMMA),
        {"attn": partial(gemma2_attention, scale=256**-0.5), "window": 4096, "full_every": 2}
        | {"logit_softcap": 30.0},
        (9.24e9, None),
        "arXiv:2408.00118 Table 2",
        PLUS_ONE,
    ),
    "Gemma-2 27B": Recipe(
        gemma,
        Sizes(46, 4608, 32, 16, 128, 36864, **GEMMA),
        {"attn": partial(gemma2_attention, scale=144**-0.5), "window": 4096, "full_every": 2}
        | {"logit_softcap": 30.0},
        (27.2e9, None),
        "arXiv:2408.00118 Table 2",
        PLUS_ONE,
    ),
    "Gemma-3 1B": Recipe(
        gemma,
        Sizes(26, 1152, 4, 1, 256, 6912, **GEMMA3),
        {
            "attn": partial(gemma3_attention, scale=256**-0.5, full_every=6, full_base=1e6),
            **{"window": 512, "full_every": 6},
        },
        (1.0e9, None),
        "arXiv:2503.19786 Table 1",
        PLUS_ONE | {"Theta": "1,000,000; local 10,000"},
        kinds=lambda layer: layer % 6 == 5,
    ),
    "Gemma-3 27B": Recipe(
        gemma,
        Sizes(62, 5376, 32, 16, 128, 21504, **GEMMA3),
        {
            "attn": partial(
                gemma3_attention, scale=168**-0.5, full_every=6, full_base=1e6, factor=8.0
            ),
            **{"window": 1024, "full_every": 6},
        },
        (27.0e9, None),
        "arXiv:2503.19786 Table 1",
        PLUS_ONE | {"Theta": "1,000,000; local 10,000"},
        kinds=lambda layer: layer % 6 == 5,
    ),
    "DeepSeek-V2": Recipe(
        serial,
        Sizes(60, 5120, 128, 128, 192, 12288, 102400, 1e-6),
        {
            "attn": partial(latent_attention, **MLA),
            "ffn": partial(
                some_experts, sparse=lambda layer: layer >= 1, experts=DEEPSEEK_V2_EXPERTS
            ),
        },
        (236e9, 21e9),
        "arXiv:2405.04434",
        ADJACENT,
        kinds=lambda layer: layer >= 1,
    ),
    "DeepSeek-V3": Recipe(
        serial,
        Sizes(61, 7168, 128, 128, 192, 18432, 129280, 1e-6),
        {
            "attn": partial(latent_attention, **MLA),
            "ffn": partial(
                some_experts, sparse=lambda layer: layer >= 3, experts=DEEPSEEK_V3_EXPERTS
            ),
        },
        (671e9, 37e9),
        "arXiv:2412.19437",
        ADJACENT,
        kinds=lambda layer: layer >= 3,
    ),
    "OLMo-2 7B": Recipe(
        output_norm,
        Sizes(32, 4096, 32, 32, 128, 11008, 100352, 1e-6, 500000.0),
        {},
        (7.3e9, None),
        "allenai/OLMo",
    ),
    "Phi-2": Recipe(
        parallel,
        Sizes(32, 2560, 32, 32, 80, 10240, 51200),
        {"attn": BIASED, "ffn": BIASED_GELU, "shared_norm": True, "rope_dim": 32}
        | {"head_bias": True},
        (2.7e9, None),
        "Lightning-AI/litgpt config.py",
    ),
    "Falcon 7B": Recipe(
        parallel,
        Sizes(32, 4544, 71, 1, 64, 18176, 65024, tied=True),
        {"attn": attention, "ffn": PLAIN_GELU, "shared_norm": True, "rope_dim": 64},
        (7e9, None),
        "Lightning-AI/litgpt config.py",
        NOT_CONFIRMED,
    ),
    "Falcon 40B": Recipe(
        parallel,
        Sizes(60, 8192, 128, 8, 64, 32768, 65024, tied=True),
        {"attn": attention, "ffn": PLAIN_GELU, "shared_norm": False, "rope_dim": 64},
        (41e9, None),
        "Lightning-AI/litgpt config.py",
        NOT_CONFIRMED,
    ),
    "Command-R 35B": Recipe(
        parallel_gated,
        Sizes(40, 8192, 64, 64, 128, 22528, 256000, tied=True),
        {"logit_scale": 0.0625},
        (35e9, None),
        "CohereForAI/c4ai-command-r-v01 model card",
        ADJACENT | {"Theta": "n/c"},
    ),
    "gpt-oss 20b": Recipe(
        windowed,
        Sizes(24, 2880, 64, 8, 64, 2880, **OSS_SIZES),
        {**OSS_WINDOWS, "ffn": partial(gpt_oss_experts, n_experts=32, top_k=4)},
        (20.9e9, 3.6e9),
        "openai/gpt-oss model card; 3.6B leaves the input table out",
    ),
    "gpt-oss 120b": Recipe(
        windowed,
        Sizes(36, 2880, 64, 8, 64, 2880, **OSS_SIZES),
        {**OSS_WINDOWS, "ffn": partial(gpt_oss_experts, n_experts=128, top_k=4)},
        (116.8e9, 5.1e9),
        "openai/gpt-oss model card; 5.1B leaves the input table out",
    ),
}

# =============================================================================================
# The rows of 2025 and 2026
# =============================================================================================


def every_4th(layer: int) -> bool:
    return layer % 4 == 3


def mimo_flash_full(layer: int) -> bool:
    return layer == 0 or layer % 6 == 5


def mimo_pro_full(layer: int) -> bool:
    return layer in (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)


def v4_flash_rate(layer: int) -> int:
    """Tokens an entry of the layer pools: 0, 0, then 4 (CSA) and 128 (HCA) in turn."""
    return 0 if layer < 2 else 128 if layer % 2 else 4


SECOND_HAND = "Second-hand cells"  # those that only copies of a configuration bear out
ALL_COPIES = {SECOND_HAND: "all"}
K2_EXPERTS = partial(sigmoid_experts, n_experts=384, top_k=8, width=2048, scale=2.827)
GLM_LATENT = {"kv_rank": 512, "q_rank": 2048, "nope_dim": 192, "rope_dim": 64, "v_dim": 256}
MIMO_EXPERTS = partial(sigmoid_experts, top_k=8, width=2048, n_shared=0)


def behind(n_dense: int, experts: Callable) -> Callable:
    """Experts in all layers but the first n_dense."""
    return partial(some_experts, sparse=partial(operator.le, n_dense), experts=experts)


RECIPES_2026 = {
    "Kimi K2": Recipe(
        serial,
        Sizes(61, 7168, 64, 64, 192, 18432, 163840, 1e-6, 50000.0),
        {
            "attn": partial(
                latent_attention,
                **MLA
                | {"tables": partial(yarn_tables, factor=32, fast=1.0)}
                | {"score_gain": yarn_gain(32) ** 2},
            ),
            "ffn": behind(1, K2_EXPERTS),
        },
        (1e12, 32e9),
        "MoonshotAI/Kimi-K2 README; 32B leaves the input table out",
        ADJACENT | {SECOND_HAND: "latents, widths, gates, eps, positions, Tied"},
        kinds=partial(operator.le, 1),
    ),
    "SmolLM3 3B": Recipe(
        serial,
        Sizes(36, 2048, 16, 4, 128, 11008, 128256, 1e-6, 5e6, tied=True),
        {"attn": unrotated_every_4th},
        (3.075e9, None),
        "huggingface/smollm text/pretraining/smollm3; count of the hub (copy)",
        kinds=every_4th,
    ),
    "OLMo-3 7B": Recipe(
        output_norm,
        Sizes(32, 4096, 32, 32, 128, 11008, 100278, 1e-6, 500000.0),
        {
            "attn": partial(
                olmo3_attention,
                tables=partial(yarn_tables, factor=8, old_len=8192, gain=yarn_gain(8)),
            ),
            "windows": [4096, 4096, 4096, None] * 8,
        },
        (7.298e9, None),
        "allenai/OLMo-core src/olmo_core/nn/transformer/config.py; count of the hub (copy)",
        kinds=every_4th,
    ),
    "MiniMax-M2": Recipe(
        serial,
        Sizes(62, 3072, 48, 8, 128, 1536, 200064, 1e-6, 5e6),
        {
            "attn": whole_norm_attention,
            "ffn": partial(sigmoid_experts, n_experts=256, top_k=8, width=1536, n_shared=0),
            "rope_dim": 64,
        },
        (230e9, 10e9),
        "MiniMax-AI/MiniMax-M2 README",
        ALL_COPIES,
    ),
    "Qwen3-Next 80B-A3B": Recipe(
        serial,
        Sizes(48, 2048, 16, 2, 256, 512, 151936, 1e-6, 1e7),
        {
            "attn": partial(qwen3_next_mixer, n_k_heads=16, n_v_heads=32, width=128),
            "ffn": partial(qwen3_next_experts, n_experts=512, top_k=10, width=512),
            "rope_dim": 64,
        },
        (80e9, 3e9),
        "model card (copies); 3B leaves both tables out",
        PLUS_ONE | ALL_COPIES,
        kinds=every_4th,
    ),
    "DeepSeek-V3.2": Recipe(
        serial,
        Sizes(61, 7168, 128, 128, 192, 18432, 129280, 1e-6),
        {
            "attn": partial(
                indexed_attention, n_index_heads=64, index_dim=128, top_k=2048, **MLA
            ),
            "ffn": behind(3, DEEPSEEK_V3_EXPERTS),
        },
        (671e9, 37e9),
        "deepseek-ai/DeepSeek-V3.2-Exp inference/config_671B_v3.2.json; counts of V3, which has no "
        "indexer",
        ADJACENT,
        kinds=partial(operator.le, 3),
    ),
    "MiMo-V2-Flash": Recipe(
        scheduled,
        Sizes(48, 4096, 64, 4, 192, 16384, 152576, 1e-5, 5e6),
        {
            "attn": partial(
                mimo_attention, full=mimo_flash_full, v_dim=128, value_scale=0.707, local_heads=8,
                rope_dim=64, local_base=1e4,
            ),
            "ffn": behind(1, partial(MIMO_EXPERTS, n_experts=256)),
            **{"window": 129, "full": mimo_flash_full, "rope_dim": 64},
        },
        (309e9, 15e9),
        "XiaomiMiMo/MiMo-V2-Flash README and paper, Table 1",
        {SECOND_HAND: "d_ff, eps, gates, Tied"},
        kinds=lambda layer: (mimo_flash_full(layer), layer == 0),
    ),
    "GLM-5": Recipe(
        serial,
        Sizes(78, 6144, 64, 64, 256, 12288, 154880, 1e-5, 1e6),
        {
            "attn": partial(
                indexed_attention, n_index_heads=32, index_dim=128, top_k=2048, tables=UNSCALED,
                **GLM_LATENT,
            ),
            "ffn": behind(
                3, partial(sigmoid_experts, n_experts=256, top_k=8, width=2048, scale=2.5)
            ),
        },
        (744e9, 40e9),
        "zai-org/GLM-5 README; 40B leaves both tables out",
        ADJACENT | ALL_COPIES,
        kinds=partial(operator.le, 3),
    ),
    "MiMo-V2.6-Pro": Recipe(  # its class doubles the KV heads of window layers: not this checkpoint
        scheduled,
        Sizes(70, 6144, 128, 8, 192, 16384, 152576, 1e-5, 1e7),
        {
            "attn": partial(
                mimo_attention, full=mimo_pro_full, v_dim=128, value_scale=0.612, local_heads=8,
                rope_dim=64, local_base=1e4,
            ),
            "ffn": behind(1, partial(MIMO_EXPERTS, n_experts=384)),
            **{"window": 129, "full": mimo_pro_full, "rope_dim": 64},
        },
        (1.02e12, 42e9),
        "copies of the configuration; 42B counts both tables",
        ALL_COPIES,
        kinds=lambda layer: (mimo_pro_full(layer), layer == 0),
    ),
    "DeepSeek-V4-Flash": Recipe(
        deepseek_v4,
        Sizes(43, 4096, 64, 1, 512, 2048, 129280, 1e-6, 1.6e5),
        {
            "attn": partial(
                compressed_attention, rope_dim=64, q_rank=1024, window=128, n_groups=8,
                group_rank=1024, rates=v4_flash_rate, local_base=1e4,
                index={"n_heads": 64, "width": 128, "top_k": 512},
                tables=partial(yarn_tables, factor=16, old_len=65536),
            ),
            "ffn": partial(deepseek_v4_experts, n_experts=256, top_k=6, scale=1.5, n_hashed=3),
            "rope_dim": 64,
        },
        (284e9, 13e9),
        "DeepSeek-V4 report §4.2.1 (copy); 13B leaves the input table out",
        ADJACENT | {SECOND_HAND: "eps, positions, limit, vocabulary, Tied"},
        kinds=lambda layer: (layer < 3, v4_flash_rate(layer)),
    ),
    "Hy4-preview": Recipe(
        hy4,
        Sizes(78, 6144, 64, 64, 256, 18432, 120832, 1e-5, 1e7),
        {
            "index": {"n_index_heads": 32, "index_dim": 128, "top_k": 2048},
            "latent": GLM_LATENT,
            **{"n_experts": 256, "top_k": 8, "width": 2048, "scale": 2.827},
        },
        (770e9, 49e9),
        "Tencent-Hunyuan/Hy4-preview README; 49B counts both tables, MTP is in neither",
        {SECOND_HAND: "eps, positions, gates, which layers choose, Tied"},
        kinds=lambda group: (group == 0, group == 20),
    ),
}  # fmt: skip
ROWS = RECIPES | RECIPES_2026

# =============================================================================================
# What a composed model shows
# =============================================================================================


class Unfilled(TorchFunctionMode):
    """Parameters are made but not filled, which without memory takes longer than all the rest."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@lru_cache(maxsize=1)  # kept models would slow down the making of the next
def built(name: str) -> nn.Module:
    """The model at its real size on the meta device: shapes without memory."""
    with torch.device("meta"), Unfilled():
        return ROWS[name].build()


@cache
def outlined(name: str) -> nn.Module:
    """The same with one block for all layers of a kind, which takes a fraction of the time."""
    with torch.device("meta"), Unfilled():
        return ROWS[name].outline()


def count(*modules: nn.Module | None) -> int:
    """Parameters of these modules; one that is given twice counts twice."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers one by one, those of a group too."""
    return [layer for block in model.blocks for layer in getattr(block, "layers", [block])]


def all_parameters(model: nn.Module) -> int:
    """Of the shell once, and of the blocks layer by layer: an outline counts as the whole."""
    layers = collections.Counter(layers_of(model))
    more = sum((n - 1) * count(layer) for layer, n in layers.items())
    return count(model) + more


def idle_parameters(model: nn.Module) -> int:
    """Parameters of the experts that a token does not use."""
    idle = 0
    for ffn, layers in collections.Counter(layer.ffn for layer in layers_of(model)).items():
        if isinstance(ffn, tb.MixtureFFN):
            share = count(ffn.experts) // len(ffn.experts)
            idle += layers * share * (len(ffn.experts) - ffn.router.top_k)
    return idle


def cache_elements(attn: nn.Module) -> int:
    """Numbers that one token leaves in the cache of a layer."""
    if isinstance(attn, tb.MultiHeadLatentAttention):
        return attn.kv_rank + attn.rope_dim
    return tb.kv_cache_elements(kv_heads(attn), attn.head_dim)


def linear(module: nn.Module) -> nn.Linear:
    """The Linear of a projection that also norms."""
    return module[0] if isinstance(module, nn.Sequential) else module


def q_heads(attn: nn.Module) -> int:
    if isinstance(attn, tb.MultiHeadLatentAttention):
        return attn.o_proj.in_features // attn.v_dim
    return linear(attn.q_proj).out_features // attn.head_dim


def kv_heads(attn: nn.Module) -> int:
    return linear(attn.k_proj).out_features // attn.head_dim


def reach(model: nn.Module, layer: int) -> int | None:
    """How many positions a layer sees at most, None for all."""
    attend = getattr(model.blocks[layer].attn, "attend", None)
    return getattr(attend, "keywords", {}).get("chunk") or model.windows[layer]


def topology(block: nn.Module) -> str:
    if isinstance(block, tb.ParallelDecoderBlock):
        return "parallel, " + ("one norm" if block.ffn_norm is None else "two norms")
    if isinstance(block, tb.BranchNormDecoderBlock):
        return "output norm" if isinstance(block.attn_pre_norm, nn.Identity) else "pre+post"
    return "Pre-LN"


def first_norm(block: nn.Module) -> nn.Module:
    return next(part for part in block.children() if isinstance(part, (nn.LayerNorm, tb.RMSNorm)))


def norm_name(norm: nn.Module) -> str:
    if isinstance(norm, nn.LayerNorm):
        return "LayerNorm" + ("" if norm.bias is not None else ", no bias")
    return "RMSNorm"


def bias_place(name: str) -> str:
    """Where a bias stands, from the name of the parameter."""
    owner = name.split(".")[-2]
    if "norm" in owner:
        return "norms"
    if owner in ("lm_head", "router"):
        return owner.removeprefix("lm_")
    if "experts" in name:
        return "experts"
    if owner == "o_proj":
        return "o"
    return "qkv" if ".attn." in name else "FFN"


def biases(model: nn.Module) -> str:
    """Which parts have a bias, in words."""
    names = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    words = {
        "": "none",
        "qkv": "q, k, v",
        "FFN norms o qkv": "all",
        "FFN head norms o qkv": "all, head",
        "FFN head norms": "FFN, norms, head",
        "experts o qkv router": "attention, experts, router",
    }
    found = " ".join(sorted(set(map(bias_place, names))))
    return words.get(found, found)


def attn_width(attn: nn.Module) -> int:
    """Channels of a query head."""
    latent = isinstance(attn, tb.MultiHeadLatentAttention)
    return attn.nope_dim + attn.rope_dim if latent else attn.head_dim


def position(recipe: Recipe, model: nn.Module) -> str:
    if isinstance(model, LearnedPositionLM):
        return "learned"
    turns = [block.attn.rope_dim > 0 for block in model.blocks]
    if not all(turns):
        return f"RoPE, {sum(turns[:4])} of 4 layers"
    attn = model.blocks[0].attn
    turned = recipe.parts.get("rope_dim", attn.rope_dim)
    return "RoPE, full" if turned == attn_width(attn) else f"RoPE, {turned} of {attn_width(attn)}"


def theta(recipe: Recipe, model: nn.Module) -> str:
    if isinstance(model, LearnedPositionLM):
        return "-"
    tables = getattr(recipe.parts.get("attn"), "keywords", {}).get("tables")
    kind = {llama3_tables: ", scaled", yarn_tables: ", YaRN"}.get(getattr(tables, "func", None))
    return f"{recipe.sizes.base:,.0f}{kind or ''}"


def window(model: nn.Module) -> str:
    reaches = [reach(model, layer) for layer in range(len(model.blocks))]
    local = reaches[0]
    if local is None:
        return "none"
    if None not in reaches:
        return f"{local:,}, every layer"
    ratio = f"{reaches.index(None)}:1"
    chunked = model.windows[0] is None
    return f"chunks of {local:,}, {ratio}" if chunked else f"{local:,}, {ratio}, local first"


def sharing(attn: nn.Module) -> str:
    if isinstance(attn, tb.MultiHeadLatentAttention):
        return f"MLA, {cache_elements(attn)} cached"
    return {q_heads(attn): "MHA", 1: "MQA"}.get(kv_heads(attn), "GQA")


def extras(model: nn.Module) -> str:
    attn, found = model.blocks[0].attn, []
    if getattr(attn, "q_rank", None):
        found.append("norm on latents")
    if isinstance(getattr(attn, "q_proj", None), nn.Sequential):
        found.append("QK-norm, whole q and k")
    elif not hasattr(attn, "q_rank") and attn.q_norm is not None:
        per_head = isinstance(attn.q_norm, tb.RMSNorm)
        found.append("QK-norm per head" if per_head else "QK-norm after RoPE")
    if getattr(attn, "logit_softcap", None):
        found.append(f"caps {attn.logit_softcap:g}, {model.logit_softcap:g}")
    if isinstance(getattr(attn, "attend", None), tb.SinkAttention):
        found.append("sinks")
    if isinstance(model.final_norm, ScaledLayerNorm):
        found.append(f"logits x {model.final_norm.factor:g}")
    return ", ".join(found) or "none"


def ffn_name(ffn: nn.Module) -> str:
    ffn = ffn.experts[0] if isinstance(ffn, tb.MixtureFFN) else ffn
    if isinstance(ffn, tb.ClampedGatedFFN):
        return "SwiGLU, clamped"
    gated = isinstance(ffn, tb.GatedFFN)
    names = {F.silu: "SwiGLU", tanh_gelu: "GeGLU"} if gated else {tanh_gelu: "tanh GELU"}
    return names.get(ffn.act, "GELU")


def ffn_widths(model: nn.Module) -> tuple[int, int | None]:
    """d_ff of an expert, or of every layer, and that of a mixture's dense layers."""
    ffns = [block.ffn for block in model.blocks]
    routed = [ffn.experts[0].up.out_features for ffn in ffns if isinstance(ffn, tb.MixtureFFN)]
    plain = [ffn.up.out_features for ffn in ffns if not isinstance(ffn, tb.MixtureFFN)]
    return (routed[0], plain[0] if plain else None) if routed else (plain[0], None)


def experts(model: nn.Module) -> str:
    mixed = [isinstance(block.ffn, tb.MixtureFFN) for block in model.blocks]
    if not any(mixed):
        return "-"
    first = mixed.index(True)
    mixture = model.blocks[first].ffn
    shared = mixture.shared.up.out_features // ffn_widths(model)[0] if mixture.shared else 0
    text = f"{len(mixture.experts)}{f' + {shared}' if shared else ''}, top-{mixture.router.top_k}"
    if all(mixed):
        return text
    return text + (f", first {first} dense" if all(mixed[first:]) else ", every 2nd layer")


def billions(number: float) -> str:
    """Three digits behind the point below 10, one below 1,000."""
    number /= 1e9
    return f"{number:.2f} B" if number < 10 else f"{number:.1f} B"


@cache
def cells(name: str) -> dict[str, str]:
    """Every cell of a row, by column: from the composed model, or as stated by the authors."""
    recipe, model = RECIPES[name], outlined(name)
    attn, (width, plain) = model.blocks[0].attn, ffn_widths(model)
    latent = isinstance(attn, tb.MultiHeadLatentAttention)
    total, cached = all_parameters(model), sum(cache_elements(block.attn) for block in model.blocks)
    learned = isinstance(model, LearnedPositionLM)
    shown = {
        "Topology": topology(model.blocks[0]),
        "Norm": norm_name(first_norm(model.blocks[0])),
        "eps": f"{first_norm(model.blocks[0]).eps:.0e}".replace("e-0", "e-"),
        "Biases": biases(model),
        "Position": position(recipe, model),
        "Pairs": "-" if learned else "half-split",
        "Theta": theta(recipe, model),
        "Window": window(model),
        "Sharing": sharing(attn),
        "Heads q / kv": f"{q_heads(attn)} / {'-' if latent else kv_heads(attn)}",
        "head_dim": f"{attn_width(attn)}" + (f"; v {attn.v_dim}" if latent else ""),
        "Extras": extras(model),
        "FFN": ffn_name(model.blocks[-1].ffn),
        "d_ff": f"{width:,}" + (f"; dense {plain:,}" if plain else ""),
        "d_ff / d_model": f"{width / recipe.sizes.d_model:.2f}",
        "Experts": experts(model),
        "Layers": f"{len(model.blocks)}",
        "d_model": f"{recipe.sizes.d_model:,}",
        "Vocabulary": f"{recipe.sizes.vocab_size:,}",
        "Tied": "yes" if model.lm_head is None else "no",
        "Parameters": billions(total),
        "Active": billions(total - idle_parameters(model)),
        "KiB a token": f"{2 * cached / 1024:,.1f}".removesuffix(".0"),
    }
    shown |= recipe.stated
    heads = shown["Heads q / kv"].replace(" ", "")
    return shown | {"q/kv": heads, "Ratio": shown["d_ff / d_model"]}


FRONT = {  # the table in front: these columns of these models
    "Topology": ":--",
    "Norm": ":--",
    "Position": ":--",
    "q/kv": "--:",
    "FFN": ":--",
    "Ratio": "--:",
    "Extras": ":--",
}
FRONT_MODELS = [
    "GPT-2 XL",
    "GPT-NeoX 20B",
    "PaLM 540B",
    "Command-R 35B",
    "Llama-2 70B",
    "Llama-3 8B",
    "Mixtral 8x7B",
    "Qwen3 8B",
    "Gemma-3 27B",
    "OLMo-2 7B",
    "DeepSeek-V3",
    "gpt-oss 120b",
]
TABLES = {  # title: column: alignment, as the notes have them
    "norms and biases": {"Topology": "---", "Norm": "---", "eps": "--:", "Biases": "---"},
    "positions and windows": dict.fromkeys(("Position", "Pairs", "Theta", "Window"), "---"),
    "attention": {"Sharing": "---", "Heads q / kv": "--:", "head_dim": "--:", "Extras": "---"},
    "FFN and experts": {"FFN": "---", "d_ff": "---", "d_ff / d_model": "--:", "Experts": "---"},
    "shell": {"Layers": "--:", "d_model": "--:", "Vocabulary": "--:", "Tied": "---"},
}


def markdown_table(columns: dict[str, str], names: list[str] | None = None) -> str:
    """A table of the notes: these columns of these models, of all by default."""
    first = ":--" if ":--" in columns.values() else "---"
    rows = [["Model", *columns], [first, *columns.values()]]
    rows += [[name, *(cells(name)[column] for column in columns)] for name in names or RECIPES]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = lines[1].replace(" ", "")
    return "\n".join(lines)


# =============================================================================================
# Command line
# =============================================================================================


def overview() -> str:
    columns = ["Layers", "d_model", "Parameters", "Active", "KiB a token"]
    rows = [["Model", *columns], *([n, *(cells(n)[c] for c in columns)] for n in RECIPES)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    note = "cache at 16 bit, every layer counted as full; parameters with embedding and head"
    return "\n".join([*lines, "", note])


def described(module: nn.Module) -> str:
    """A part in a line: its class and what it was composed of."""
    name = type(module).__name__
    if module is None:
        return "none"
    if isinstance(module, tb.MixtureFFN):
        router, shared = module.router, module.shared
        parts = [f"{type(router).__name__}, top-{router.top_k} of {len(module.experts)}"]
        if router.n_groups > 1:
            parts.append(f"groups: best {router.top_groups} of {router.n_groups}")
        if not router.renormalise:
            parts.append("not renormalised")
        if router.scale != 1:
            parts.append(f"times {router.scale:g}")
        if module.weigh_input:
            parts.append("weight on the input")
        parts += [f"experts {described(module.experts[0])}", f"shared {described(shared)}"]
        return f"{name}({'; '.join(parts)})"
    if isinstance(module, (tb.DenseFFN, tb.GatedFFN, tb.ClampedGatedFFN)):
        return f"{name}({module.d_model} -> {module.up.out_features}, {ffn_name(module)})"
    if isinstance(module, tb.MultiHeadLatentAttention):
        ranks = f"q_rank {module.q_rank}, kv_rank {module.kv_rank}, "
        widths = f"nope {module.nope_dim} + rope {module.rope_dim}, v {module.v_dim}"
        return f"{name}({q_heads(module)} heads, {ranks}{widths})"
    attend = getattr(module.attend, "func", module.attend)
    attend = getattr(attend, "__name__", type(attend).__name__)
    turned = "RoPE" if module.rope else "no rotation"
    heads = f"{q_heads(module)} / {kv_heads(module)} heads of {module.head_dim}"
    return f"{name}({heads}, {turned}, {attend})"


def layer_groups(model: nn.Module) -> dict[tuple, list[int]]:
    """Layers that are composed alike: block, attention, FFN, reach -> their numbers."""
    groups = collections.defaultdict(list)
    for layer, block in enumerate(model.blocks):
        parts = type(block).__name__, described(block.attn), described(block.ffn)
        groups[(*parts, reach(model, layer))].append(layer)
    return groups


def numbers(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:6]))
    return f"{len(layers)} layers: {shown}{', ...' if len(layers) > 6 else ''}"


def details(name: str) -> str:
    """How a model is composed, what each part holds and what a token costs."""
    recipe, model = RECIPES[name], outlined(name)
    lines = [
        name,
        "",
        f"composed as {type(model).__name__}, final norm {norm_name(model.final_norm)}",
    ]
    for (block, attn, ffn, seen), layers in layer_groups(model).items():
        first = model.blocks[layers[0]]
        lines += [
            f"  {numbers(layers)}",
            f"    {block}: {topology(first)}, {norm_name(first_norm(first))}",
            f"    attn  {attn}" + (f", sees {seen:,} positions" if seen else ""),
            f"    ffn   {ffn}",
        ]
    total, idle = all_parameters(model), idle_parameters(model)
    blocks, head = list(model.blocks), count(model.lm_head)
    tables = count(model.embedding, getattr(model, "positions", None))
    held = {
        "embedding": tables,
        "attention": count(*(block.attn for block in blocks)),
        "FFN": count(*(block.ffn for block in blocks)),
        "norms": sum(count(block) - count(block.attn, block.ffn) for block in blocks),
        "final norm": count(model.final_norm),
        "head": head,
        "total": total,
        "active": total - idle,
    }
    lines += ["", "parameters"]
    lines += [f"  {part:<10}  {number:>19,}" for part, number in held.items()]
    lines += [
        f"  published   {recipe.published[0]:>19,.0f}  ({recipe.source})",
        "",
        "a token costs",
    ]
    # A matrix of n numbers takes n multiplications and n additions; the input table is looked up.
    matrices = total - idle - (0 if model.lm_head is None else tables)
    reads = sum(2 * q_heads(b.attn) * value_and_key(b.attn) for b in blocks)
    cached = sum(cache_elements(block.attn) for block in blocks)
    lines += [
        f"  {2 * matrices / 1e9:,.1f} GFLOP in the matrices",
        f"  {reads:,} FLOP in the attentions for each position seen",
        f"  {2 * cached:,} bytes of cache at 16 bit, {2 * cached // len(blocks):,} a layer",
    ]
    short = [layer for layer in range(len(blocks)) if reach(model, layer)]
    if short:
        most = f"keep {reach(model, short[0]):,} positions at most"
        lines.append(f"  {len(short)} of {len(blocks)} layers {most}")
    return "\n".join(lines)


def value_and_key(attn: nn.Module) -> int:
    """Numbers that one query head multiplies for each position: with a key, then a value."""
    if isinstance(attn, tb.MultiHeadLatentAttention):  # in decoding, where nothing is expanded
        return 2 * attn.kv_rank + attn.rope_dim
    return 2 * attn.head_dim


def nearest(name: str) -> str:
    """The names that a wrong one may have meant, or all."""
    folded = {known.casefold(): known for known in RECIPES}
    close = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.5)
    close = close or [known for known in folded if name.casefold() in known]
    return ", ".join(folded[known] for known in close) or ", ".join(RECIPES)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog='names: "Llama-3 8B", "gpt-oss 20b", ... in any case; without one, all are listed',
    )
    parser.add_argument("name", nargs="*", help="a model of the table")
    parser.add_argument("--markdown", action="store_true", help="the recipe tables of the notes")
    options = parser.parse_args(argv)
    wanted = " ".join(options.name)
    known = {name.casefold(): name for name in RECIPES}
    if options.markdown and wanted:
        parser.error("--markdown prints all models and takes no name")
    if wanted and wanted.casefold() not in known:
        parser.error(f"no model {wanted!r}; nearest: {nearest(wanted)}")
    if options.markdown:
        tables = [f"Recipe: {title}\n\n{markdown_table(c)}" for title, c in TABLES.items()]
        text = "\n\n".join([markdown_table(FRONT, FRONT_MODELS), *tables])
    else:
        text = details(known[wanted.casefold()]) if wanted else overview()
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
