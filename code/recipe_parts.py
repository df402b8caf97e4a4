"""What the recipes are composed of: tables, attentions, FFNs, and the ways to stack them.

Each part takes the sizes of a checkpoint (Sizes) and, where layers differ, the layer's number;
each composition takes the sizes and its parts and is the model. recipes.py holds the rows.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache, partial

import transformer_block as tb  # isort: skip (first: without torch it says how to install it)
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

    def __init__(self, cos: Tensor, sin: Tensor, theta: str):
        self.cos, self.sin, self.theta = cos, sin, theta

    def __call__(self, _attn: nn.Module, args: tuple, options: dict) -> tuple[tuple, dict]:
        return args, options | {"cos": self.cos, "sin": self.sin}


@lru_cache(maxsize=16)  # the layers of a model share them
def own_tables(tables: Callable[..., Tables], max_len: int, width: int, base: float) -> OwnTables:
    """The hook of tables(max_len, width, base)."""
    stretch = {llama3_tables: ", scaled", yarn_tables: ", YaRN"}
    theta = f"{base:,.0f}{stretch.get(getattr(tables, 'func', tables), '')}"
    with torch.inference_mode(False):  # autograd refuses tensors made there
        return OwnTables(*tables(max_len, width, base), theta)


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
