"""Each model family from the classes of the script, against transformers with the same weights.

A row names the family's configuration in transformers, how our model is composed, and where each
of our weights comes from. Both models run in float64 on the same tokens, at once and with a cache
(prefill, then token by token); ours also with padding, against theirs on each row alone.

Where transformers computes norms, softmax, rotation or router in float32, the row says so and the
outputs may differ by 5e-6; elsewhere by 1e-10.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
import transformers
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartDecoderLayer
from transformers.models.switch_transformers import modeling_switch_transformers as switch

# WIDE is a head width that is not D / H, R the rotated channels of a partial rotation, W a window.
# EPS is no class's default, so that an eps that is not passed on shows.
V, D, H, G, D_H, D_FF, LAYERS = 61, 48, 4, 2, 12, 56, 2
WIDE, R, W, MAX_LEN, EPS = 16, 6, 4, 40, 1e-4
KV_RANK, NOPE = 20, 10
B, T, PREFILL = 3, 13, 5
# What their models call the cache they take; Python 3.10 gets a version before 5.24.
RENAMED = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
CACHE = "cache" if RENAMED else "past_key_values"

SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": D_FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rms_norm_eps": EPS,
    "layer_norm_eps": EPS,
    "layer_norm_epsilon": EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
PARTIAL = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": R / D_H}}
tanh_gelu = partial(F.gelu, approximate="tanh")

Weight = str | tuple  # a name in transformers, or names and a function of their tensors
Names = dict[str, Weight]


class Family(NamedTuple):
    """One row: transformers' model type and configuration, our model, our names -> theirs."""

    model_type: str
    config: dict[str, object]
    ours: Callable[[], nn.Module]
    names: Names
    float32: str  # what transformers computes in float32; "" where nothing
    encoder: bool = False


# =============================================================================================
# Composing our models
# =============================================================================================


def lm(make_block: Callable[[int], nn.Module], **options) -> tb.DecoderOnlyLM:
    options = {"max_len": MAX_LEN, "rope_dim": D_H, "tie_embeddings": False, "eps": EPS} | options
    return tb.DecoderOnlyLM(V, D, LAYERS, H, G, D_FF, make_block=make_block, **options)


def layer_norm_lm(
    make_block: Callable[[int], nn.Module], *, bias: bool = True, head_bias: bool = False, **options
) -> nn.Module:
    """The shell with LayerNorm as the final norm, and a bias in the head where asked for."""
    model = with_parts(lm(make_block, **options), final_norm=layer_norm(bias))
    return with_parts(model, lm_head=nn.Linear(D, V)) if head_bias else model


class LearnedPositions(nn.Module):
    """Embedding plus learned positions, then our blocks: the shell of GPT-2 and BERT."""

    def __init__(self, make_block: Callable[[], nn.Module], *, encoder: bool = False):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(V, D), nn.Embedding(MAX_LEN, D)
        self.embedding_norm = nn.LayerNorm(D, EPS) if encoder else nn.Identity()
        self.blocks = nn.ModuleList(make_block() for _ in range(LAYERS))
        self.final_norm = nn.Identity() if encoder else nn.LayerNorm(D, EPS)
        self.lm_head = nn.Identity() if encoder else nn.Linear(D, V, bias=False)

    def forward(
        self,
        ids: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        kv_caches: list[tb.KVCache] | None = None,
    ) -> Tensor:
        start = 0 if kv_caches is None else kv_caches[0].next_pos
        x = self.embedding(ids) + self.positions.weight[start : start + ids.shape[1]]
        x = self.embedding_norm(x)
        for layer, block in enumerate(self.blocks):
            cache = {} if kv_caches is None else {"kv_cache": kv_caches[layer]}
            x = block(x, key_padding_mask=key_padding_mask, **cache)
        return self.lm_head(self.final_norm(x))


def with_parts(module: nn.Module, **parts: nn.Module) -> nn.Module:
    """The module with these submodules replaced."""
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def with_tables(block: nn.Module, cos: Tensor, sin: Tensor) -> nn.Module:
    """The block, called with its own rotation tables instead of the shell's."""

    def own_tables(_block: nn.Module, args: tuple, options: dict) -> tuple[tuple, dict]:
        return args, options | {"cos": cos, "sin": sin}

    block.register_forward_pre_hook(own_tables, with_kwargs=True)
    return block


def stretched_tables(
    width: int, base: float, factor: float, kept: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Rotation for a context longer by factor: kept(frequencies) is the share left unstretched."""
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    share = kept(frequencies)
    frequencies = frequencies * (share + (1 - share) / factor)
    angles = torch.outer(torch.arange(MAX_LEN, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def llama31_share(frequencies: Tensor) -> Tensor:
    """All from 4 turns within the old context of 32 on, none up to half a turn."""
    turns = 32 * frequencies / (2 * math.pi)
    return ((turns - 0.5) / (4.0 - 0.5)).clamp(0, 1)


def yarn_share(frequencies: Tensor) -> Tensor:
    """All from 3 turns within the old context of 32 on, none up to 1, by index between."""

    def index(turns: float) -> float:
        return R * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(100))

    low, high = max(math.floor(index(3)), 0), min(math.ceil(index(1)), R - 1)
    return 1 - ((torch.arange(R // 2) - low) / (high - low)).clamp(0, 1)


def mha(n_kv_heads: int = G, **options) -> tb.MultiHeadAttention:
    options = {"rope": True, "norm_eps": EPS} | options
    return tb.MultiHeadAttention(D, H, n_kv_heads, **options)


def modern(_layer: int = 0, **options) -> tb.ModernDecoderBlock:
    return tb.ModernDecoderBlock(D, H, G, D_FF, eps=EPS, **options)


def branch(_layer: int = 0, **options) -> tb.BranchNormDecoderBlock:
    return tb.BranchNormDecoderBlock(D, H, G, D_FF, eps=EPS, **options)


def parallel(_layer: int = 0, **options) -> tb.ParallelDecoderBlock:
    return tb.ParallelDecoderBlock(D, H, G, D_FF, eps=EPS, **options)


def layer_norm(bias: bool = True) -> nn.LayerNorm:
    return nn.LayerNorm(D, EPS, bias=bias)


def cohere(rope: bool) -> nn.Module:
    block = parallel(attn=mha(rope=rope), ffn=tb.GatedFFN(D, D_FF))
    return with_parts(block, norm=layer_norm(bias=False))


def gemma_ffn() -> tb.GatedFFN:
    return tb.GatedFFN(D, D_FF, act=tanh_gelu)


def gemma3(layer: int) -> nn.Module:
    """Local layers take the shell's tables, global ones their own with a larger base."""
    block = branch(attn=mha(head_dim=WIDE, qk_norm=True, scale=0.2), ffn=gemma_ffn())
    return block if layer == 0 else with_tables(block, *tb.build_rope_cache(MAX_LEN, WIDE, 1e6))


def olmo2(_layer: int) -> nn.Module:
    """Output norms only, and q and k normed over all heads together, before they are split."""
    attn = mha()
    for name, width in (("q_proj", H * D_H), ("k_proj", G * D_H)):
        normed = nn.Sequential(getattr(attn, name), tb.RMSNorm(width, EPS))
        with_parts(attn, **{name: normed})
    return with_parts(branch(attn=attn), attn_pre_norm=nn.Identity(), ffn_pre_norm=nn.Identity())


def deepseek(q_rank: int | None) -> nn.Module:
    widths = {"kv_rank": KV_RANK, "rope_dim": R, "nope_dim": NOPE, "v_dim": 14, "q_rank": q_rank}
    return modern(attn=tb.MultiHeadLatentAttention(D, H, **widths))


# =============================================================================================
# Names in transformers, and how its tensors become ours
# =============================================================================================


def one_plus(weight: Tensor) -> Tensor:
    """Gemma stores a norm's weight as its difference from 1."""
    return 1 + weight


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """A constant of the model that goes into the weight before or after it."""
    return lambda weight: factor * weight


def rows(start: int, stop: int | None = None) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight[start:stop]


def conv1d(start: int = 0, stop: int | None = None) -> Callable[[Tensor], Tensor]:
    """GPT-2 stores [in, out]."""
    return lambda weight: weight.t()[start:stop]


def half_split(head_dim: int, start: int, stop: int) -> Callable[[Tensor], Tensor]:
    """Rows start … stop of each head from pairs (2i, 2i+1) to halves (i, i + r/2)."""
    order = [*range(start), *range(start, stop, 2), *range(start + 1, stop, 2)]
    order += range(stop, head_dim)
    return lambda weight: weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def grouped_heads(heads: slice, n_groups: int) -> Callable[[Tensor], Tensor]:
    """Heads of a matrix that holds, for each KV head, its query heads, its key, its value."""
    return lambda weight: weight.unflatten(0, (n_groups, -1, D_H))[:, heads].flatten(0, 2)


def packed_by_group(path: str, n_groups: int) -> Names:
    return {
        "attn.q_proj": (path, grouped_heads(slice(-2), n_groups)),
        "attn.k_proj": (path, grouped_heads(slice(-2, -1), n_groups)),
        "attn.v_proj": (path, grouped_heads(slice(-1, None), n_groups)),
    }


def packed(path: str, n_kv_heads: int, part: Callable[..., Callable] = rows) -> Names:
    """One matrix that holds all of q, then all of k, then all of v."""
    q, k = H * D_H, (H + n_kv_heads) * D_H
    return {
        "attn.q_proj": (path, part(0, q)),
        "attn.k_proj": (path, part(q, k)),
        "attn.v_proj": (path, part(k)),
    }


def expert_names(n_experts: int) -> Names:
    """The experts of a layer are slices of two tensors."""
    names = {"ffn.router": "mlp.gate"}
    for e in range(n_experts):
        gate, up = (lambda w, e=e: w[e, :D_FF]), (lambda w, e=e: w[e, D_FF:])
        names[f"ffn.experts.{e}.gate"] = ("mlp.experts.gate_up_proj", gate)
        names[f"ffn.experts.{e}.up"] = ("mlp.experts.gate_up_proj", up)
        names[f"ffn.experts.{e}.down"] = ("mlp.experts.down_proj", lambda w, e=e: w[e])
    return names


def model_names(layers: str, block: Names, **outer: Weight) -> Names:
    """Our names -> theirs; * stands for the layer."""
    names = dict(outer)
    for ours, theirs in block.items():
        path, function = (theirs, Tensor.clone) if isinstance(theirs, str) else theirs
        names[f"blocks.*.{ours}"] = (f"{layers}.*.{path}", function)
    return names


QKVO = {f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"}
GATED = {f"ffn.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
QK_NORM = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "attn_pre_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_pre_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
INTERLEAVED = {
    f"attn.{name}_proj": (f"self_attn.{name}_proj", half_split(D_H, 0, D_H)) for name in "qk"
}
GPT2_FFN = {"ffn.up": ("mlp.c_fc", conv1d()), "ffn.down": ("mlp.c_proj", conv1d())}


def plus_one(names: Names) -> Names:
    return {ours: (theirs, one_plus) for ours, theirs in names.items()}


def llama_names(block: Names, **outer: Weight) -> Names:
    common = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    return model_names("model.layers", block, **common | outer)


def gpt2_names(block: Names, **outer: Weight) -> Names:
    common = {"embedding": "transformer.wte", "final_norm": "transformer.ln_f"}
    return model_names("transformer.h", block, lm_head="lm_head", **common | outer)


LLAMA = QKVO | GATED | NORMS
GPT2 = {"norm1": "ln_1", "norm2": "ln_2", "attn.o_proj": ("attn.c_proj", conv1d())} | GPT2_FFN
GPT2 |= packed("attn.c_attn", H, conv1d)
MLA = GATED | NORMS
MLA |= {
    "attn.kv_down": ("self_attn.kv_a_proj_with_mqa", half_split(KV_RANK + R, KV_RANK, KV_RANK + R)),
    "attn.kv_norm": "self_attn.kv_a_layernorm",
    "attn.kv_up": "self_attn.kv_b_proj",
    "attn.o_proj": "self_attn.o_proj",
}
MLA_Q = half_split(NOPE + R, NOPE, NOPE + R)
MLA_CONFIG = {
    "kv_lora_rank": KV_RANK,
    "qk_rope_head_dim": R,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": 14,
    "num_key_value_heads": H,
    "first_k_dense_replace": LAYERS,  # no expert layers
}
STRETCHED = {"factor": 8.0, "original_max_position_embeddings": 32}
LLAMA31 = {"rope_type": "llama3", "rope_theta": 5e4, "low_freq_factor": 0.5} | STRETCHED
LLAMA31 |= {"high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "beta_fast": 3, "beta_slow": 1} | STRETCHED
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
LOCAL_GLOBAL = {"sliding_window": W, "layer_types": ["sliding_attention", "full_attention"]}
WIDE_ROWS = {"rope_dim": WIDE, "tie_embeddings": True, "embedding_scale": math.sqrt(D)}
ALL_THREE = "norm, softmax, rotation"

# =============================================================================================
# The families
# =============================================================================================

FAMILIES = {
    # --- learned positions, LayerNorm ---
    "BERT": Family(
        "bert",
        {},
        lambda: LearnedPositions(
            lambda: tb.VanillaEncoderLayer2017(D, H, D_FF, act=F.gelu, eps=EPS), encoder=True
        ),
        model_names(
            "encoder.layer",
            {
                "attn.q_proj": "attention.self.query",
                "attn.k_proj": "attention.self.key",
                "attn.v_proj": "attention.self.value",
                "attn.o_proj": "attention.output.dense",
                "ln1": "attention.output.LayerNorm",
                "ffn.up": "intermediate.dense",
                "ffn.down": "output.dense",
                "ln2": "output.LayerNorm",
            },
            embedding="embeddings.word_embeddings",
            embedding_norm="embeddings.LayerNorm",
            positions=(  # every token is of segment 0
                "embeddings.position_embeddings",
                "embeddings.token_type_embeddings",
                lambda position, segment: position + segment[0],
            ),
        ),
        float32="",
        encoder=True,
    ),
    "GPT-2": Family(
        "gpt2",
        {"n_inner": D_FF},
        lambda: LearnedPositions(
            lambda: tb.GPT2StyleDecoderLayer(D, H, D_FF, act=tanh_gelu, eps=EPS)
        ),
        gpt2_names(GPT2, positions="transformer.wpe"),
        float32="",
    ),
    # --- parallel branches ---
    "GPT-J": Family(
        "gptj",
        {"n_inner": D_FF, "rotary_dim": R},
        lambda: layer_norm_lm(
            lambda _: parallel(attn=mha(H), ffn=tb.DenseFFN(D, D_FF, tanh_gelu, bias=True)),
            head_bias=True,
            rope_dim=R,
        ),
        gpt2_names(
            {
                "norm": "ln_1",
                "attn.q_proj": ("attn.q_proj", half_split(D_H, 0, R)),
                "attn.k_proj": ("attn.k_proj", half_split(D_H, 0, R)),
                "attn.v_proj": "attn.v_proj",
                "attn.o_proj": "attn.out_proj",
                "ffn.up": "mlp.fc_in",
                "ffn.down": "mlp.fc_out",
            }
        ),
        float32="scores, softmax, rotation",
    ),
    "GPT-NeoX": Family(
        "gpt_neox",
        PARTIAL,
        lambda: layer_norm_lm(
            lambda _: parallel(
                attn=mha(H, bias=True), ffn=tb.DenseFFN(D, D_FF, bias=True), shared_norm=False
            ),
            rope_dim=R,
        ),
        model_names(
            "gpt_neox.layers",
            {
                "norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "attn.o_proj": "attention.dense",
                "ffn.up": "mlp.dense_h_to_4h",
                "ffn.down": "mlp.dense_4h_to_h",
            }
            | packed_by_group("attention.query_key_value", H),
            embedding="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            lm_head="lm_head",
        ),
        float32="softmax, rotation",
    ),
    "Phi": Family(
        "phi",
        PARTIAL,
        lambda: layer_norm_lm(
            lambda _: parallel(attn=mha(bias=True), ffn=tb.DenseFFN(D, D_FF, tanh_gelu, bias=True)),
            head_bias=True,
            rope_dim=R,
        ),
        llama_names(
            QKVO
            | {"attn.o_proj": "self_attn.dense", "norm": "input_layernorm"}
            | {"ffn.up": "mlp.fc1", "ffn.down": "mlp.fc2"},
            final_norm="model.final_layernorm",
        ),
        float32="softmax, rotation",
    ),
    "Falcon-7B": Family(
        "falcon",
        {"ffn_hidden_size": D_FF},
        lambda: layer_norm_lm(lambda _: parallel(attn=mha(1)), tie_embeddings=True),
        gpt2_names(
            {"norm": "input_layernorm", "attn.o_proj": "self_attention.dense"}
            | {"ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"}
            | packed_by_group("self_attention.query_key_value", 1),
            embedding="transformer.word_embeddings",
        ),
        float32="rotation",
    ),
    "Falcon-40B": Family(
        "falcon",
        {"ffn_hidden_size": D_FF, "new_decoder_architecture": True, "num_kv_heads": G},
        lambda: layer_norm_lm(
            lambda _: parallel(attn=mha(), shared_norm=False), tie_embeddings=True
        ),
        gpt2_names(
            {"norm": "ln_attn", "ffn_norm": "ln_mlp", "attn.o_proj": "self_attention.dense"}
            | {"ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"}
            | packed_by_group("self_attention.query_key_value", G),
            embedding="transformer.word_embeddings",
        ),
        float32="rotation",
    ),
    "Cohere Command-R": Family(
        "cohere",
        {"logit_scale": 0.3},
        lambda: layer_norm_lm(lambda _: cohere(rope=True), bias=False, tie_embeddings=True),
        llama_names(
            QKVO | GATED | INTERLEAVED | {"norm": "input_layernorm"},
            final_norm=("model.norm", times(0.3)),
        ),
        float32=ALL_THREE,
    ),
    "Cohere Command-R7B": Family(  # local layers rotate, global ones have no positions
        "cohere2",
        {"logit_scale": 0.3} | LOCAL_GLOBAL,
        lambda: layer_norm_lm(
            lambda layer: cohere(rope=layer == 0),
            bias=False,
            tie_embeddings=True,
            windows=[W, None],
        ),
        llama_names(
            QKVO | GATED | INTERLEAVED | {"norm": "input_layernorm"},
            final_norm=("model.norm", times(0.3)),
        ),
        float32=ALL_THREE,
    ),
    # --- pre-norm, serial ---
    "Llama": Family("llama", {}, lambda: lm(modern), llama_names(LLAMA), ALL_THREE),
    "Llama 3.1": Family(
        "llama",
        {"rope_parameters": LLAMA31},
        lambda: lm(lambda _: with_tables(modern(), *stretched_tables(D_H, 5e4, 8, llama31_share))),
        llama_names(LLAMA),
        float32=ALL_THREE,
    ),
    "Mistral": Family(
        "mistral",
        {"sliding_window": W},
        lambda: lm(modern, windows=[W] * LAYERS),
        llama_names(LLAMA),
        float32=ALL_THREE,
    ),
    "Qwen2": Family(
        "qwen2",
        {},
        lambda: lm(lambda _: modern(attn=mha(qkv_bias=True))),
        llama_names(LLAMA),
        float32=ALL_THREE,
    ),
    "Qwen3": Family(
        "qwen3",
        {"head_dim": WIDE},
        lambda: lm(lambda _: modern(attn=mha(head_dim=WIDE, qk_norm=True)), rope_dim=WIDE),
        llama_names(LLAMA | QK_NORM),
        float32=ALL_THREE,
    ),
    "Gemma": Family(
        "gemma",
        {"head_dim": WIDE},
        lambda: lm(lambda _: modern(attn=mha(head_dim=WIDE), ffn=gemma_ffn()), **WIDE_ROWS),
        llama_names(LLAMA | plus_one(NORMS), final_norm=("model.norm", one_plus)),
        float32=ALL_THREE,
    ),
    "Phi-3": Family(
        "phi3",
        {"sliding_window": W},
        lambda: lm(modern, windows=[W] * LAYERS),
        llama_names(
            LLAMA
            | packed("self_attn.qkv_proj", G)
            | {"ffn.gate": ("mlp.gate_up_proj", rows(0, D_FF))}
            | {"ffn.up": ("mlp.gate_up_proj", rows(D_FF))}
        ),
        float32=ALL_THREE,
    ),
    "SmolLM3": Family(  # every fourth layer without positions, here the second
        "smollm3",
        {"no_rope_layers": [1, 0]},
        lambda: lm(lambda layer: modern(attn=mha(rope=layer == 0)), tie_embeddings=True),
        llama_names(LLAMA),
        float32=ALL_THREE,
    ),
    "Granite": Family(  # four constants: three go into weights, one is the scale
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        lambda: lm(lambda _: modern(attn=mha(scale=0.2)), embedding_scale=3.0),
        llama_names(
            LLAMA
            | {"attn.o_proj": ("self_attn.o_proj", times(0.4))}
            | {"ffn.down": ("mlp.down_proj", times(0.4))},
            final_norm=("model.norm", times(1 / 2)),
        ),
        float32=ALL_THREE,
    ),
    "StableLM": Family(
        "stablelm",
        PARTIAL,
        lambda: layer_norm_lm(
            lambda _: with_parts(modern(), norm1=layer_norm(), norm2=layer_norm()), rope_dim=R
        ),
        llama_names(LLAMA),
        float32="softmax, rotation",
    ),
    "DeepSeek-V3": Family(  # the softmax scale grows with the stretch: it goes into the queries
        "deepseek_v3",
        MLA_CONFIG | {"q_lora_rank": 18, "rope_parameters": YARN},
        lambda: lm(
            lambda _: with_tables(deepseek(18), *stretched_tables(R, 100, 8, yarn_share)),
            rope_dim=R,
        ),
        llama_names(
            MLA
            | {
                "attn.q_down": "self_attn.q_a_proj",
                "attn.q_norm": "self_attn.q_a_layernorm",
                "attn.q_up": (
                    "self_attn.q_b_proj",
                    lambda weight: MLA_Q(weight) * (0.1 * math.log(8) + 1) ** 2,
                ),
            }
        ),
        float32=ALL_THREE,
    ),
    "DeepSeek-V3 without q_rank": Family(
        "deepseek_v3",
        MLA_CONFIG | {"q_lora_rank": None},
        lambda: lm(lambda _: deepseek(None), rope_dim=R),
        llama_names(MLA | {"attn.q_proj": ("self_attn.q_proj", MLA_Q)}),
        float32=ALL_THREE,
    ),
    "DeepSeek-V2-Lite": Family(
        "deepseek_v2",
        MLA_CONFIG | {"q_lora_rank": None},
        lambda: lm(lambda _: deepseek(None), rope_dim=R),
        llama_names(MLA | {"attn.q_proj": ("self_attn.q_proj", MLA_Q)}),
        float32=ALL_THREE,
    ),
    # --- experts ---
    "Mixtral with one expert": Family(
        "mixtral",
        {"num_local_experts": 1, "num_experts_per_tok": 1},
        lambda: lm(lambda _: modern(ffn=tb.MoEFFN(D, D_FF, 1))),
        llama_names(QKVO | NORMS | expert_names(1)),
        float32=ALL_THREE + ", router",
    ),
    "Qwen3-MoE, top-1": Family(
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": D_FF},
        lambda: lm(lambda _: modern(attn=mha(qk_norm=True), ffn=tb.MoEFFN(D, D_FF, 3))),
        llama_names(QKVO | NORMS | QK_NORM | expert_names(3)),
        float32=ALL_THREE + ", router",
    ),
    # --- norms on the way out of a branch ---
    "Gemma-2": Family(
        "gemma2",
        {
            "head_dim": WIDE,
            "query_pre_attn_scalar": 25,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        }
        | LOCAL_GLOBAL,
        lambda: lm(
            lambda _: branch(
                attn=mha(head_dim=WIDE, scale=0.2, logit_softcap=2.0), ffn=gemma_ffn()
            ),
            windows=[W, None],
            logit_softcap=1.5,
            **WIDE_ROWS,
        ),
        llama_names(QKVO | GATED | plus_one(FOUR_NORMS), final_norm=("model.norm", one_plus)),
        float32=ALL_THREE,
    ),
    "Gemma-3": Family(
        "gemma3_text",
        {"head_dim": WIDE, "query_pre_attn_scalar": 25} | LOCAL_GLOBAL,
        lambda: lm(gemma3, windows=[W, None], **WIDE_ROWS),
        llama_names(
            QKVO | GATED | plus_one(FOUR_NORMS | QK_NORM), final_norm=("model.norm", one_plus)
        ),
        float32=ALL_THREE,
    ),
    "GLM-4": Family(
        "glm4",
        PARTIAL | {"head_dim": D_H},
        lambda: lm(lambda _: branch(attn=mha(qkv_bias=True)), rope_dim=R),
        llama_names(
            QKVO
            | {f"attn.{n}_proj": (f"self_attn.{n}_proj", half_split(D_H, 0, R)) for n in "qk"}
            | {
                "attn_pre_norm": "input_layernorm",
                "attn_post_norm": "post_self_attn_layernorm",
                "ffn_pre_norm": "post_attention_layernorm",
                "ffn_post_norm": "post_mlp_layernorm",
                "ffn.gate": ("mlp.gate_up_proj", rows(0, D_FF)),
                "ffn.up": ("mlp.gate_up_proj", rows(D_FF)),
                "ffn.down": "mlp.down_proj",
            }
        ),
        float32=ALL_THREE,
    ),
    "OLMo-2": Family(
        "olmo2",
        {},
        lambda: lm(olmo2),
        llama_names(
            {
                "attn.q_proj.0": "self_attn.q_proj",
                "attn.q_proj.1": "self_attn.q_norm",
                "attn.k_proj.0": "self_attn.k_proj",
                "attn.k_proj.1": "self_attn.k_norm",
                "attn.v_proj": "self_attn.v_proj",
                "attn.o_proj": "self_attn.o_proj",
                "attn_post_norm": "post_attention_layernorm",
                "ffn_post_norm": "post_feedforward_layernorm",
            }
            | GATED
        ),
        float32=ALL_THREE,
    ),
}

# =============================================================================================
# The comparison
# =============================================================================================


def randomise(module: nn.Module) -> nn.Module:
    """Float64, and random weights throughout, those of norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return module


def load(ours: nn.Module, theirs: nn.Module, names: Names) -> nn.Module:
    """Our module in float64 with their weights, each of which has to be used."""
    weights, loaded, used = theirs.state_dict(), {}, set()
    for key in ours.state_dict():
        module, leaf = key.rsplit(".", 1)
        number = re.search(r"\b\d+\b", module)
        source = names[re.sub(r"\b\d+\b", "*", module, count=1)]
        *paths, function = (source, Tensor.clone) if isinstance(source, str) else source
        paths = [path.replace("*", number[0] if number else "") for path in paths]
        paths = [path if path in weights else f"{path}.{leaf}" for path in paths]
        loaded[key] = function(*(weights[path] for path in paths))
        used.update(paths)
    parameters = {parameter.data_ptr() for parameter in theirs.parameters()}  # a tied one once
    assert {weights[name].data_ptr() for name in used} == parameters
    ours.double().eval().load_state_dict(loaded)
    return ours


def assert_near(ours: Tensor, theirs: Tensor, float32: str) -> None:
    assert theirs.std() > 0.1  # of order 1, so that the tolerance means something
    assert (ours - theirs).abs().max() < (5e-6 if float32 else 1e-10)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small wait longer for a second thread than it saves them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Family, nn.Module, nn.Module]:
    family = FAMILIES[request.param]
    config = transformers.AutoConfig.for_model(family.model_type, **SIZES | family.config)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    make = transformers.AutoModelForCausalLM
    if family.encoder:
        make, options = transformers.AutoModel, options | {"add_pooling_layer": False}
    theirs = randomise(make.from_config(config, **options))
    return family, load(family.ours(), theirs, family.names), theirs


def token_ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def our_cached_pass(ours: nn.Module, ids: Tensor, keep: Tensor | None = None) -> Tensor:
    """Prefill, then token by token."""
    caches, outputs = [tb.KVCache() for _ in ours.blocks], []
    for piece in ids.split((PREFILL, *[1] * (T - PREFILL)), dim=1):
        seen = None if keep is None else keep[:, : caches[0].next_pos + piece.shape[1]]
        outputs.append(ours(piece, kv_caches=caches, key_padding_mask=seen))
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def test_full_pass(pair):
    family, ours, theirs = pair
    ids = token_ids()
    assert_near(ours(ids), theirs(ids)[0], family.float32)


@torch.no_grad()
def test_cached_decoding(pair):
    family, ours, theirs = pair
    if family.encoder:
        pytest.skip("an encoder has no cache")
    ids = token_ids()
    cache, outputs = transformers.DynamicCache(config=theirs.config), []
    for piece in ids.split((PREFILL, *[1] * (T - PREFILL)), dim=1):
        outputs.append(theirs(piece, use_cache=True, **{CACHE: cache})[0])
    assert_near(our_cached_pass(ours, ids), torch.cat(outputs, dim=1), family.float32)


@torch.no_grad()
def test_padding(pair):
    """Ours with padding on the left and on the right, theirs on the real tokens of each row."""
    family, ours, theirs = pair
    ids, keep = token_ids(), torch.ones(B, T, dtype=torch.bool)
    keep[0, :3] = keep[2, -2:] = False
    alone = [
        theirs(row[real][None], position_ids=real.nonzero().T)[0][0] for row, real in zip(ids, keep)
    ]
    assert_near(ours(ids, key_padding_mask=keep)[keep], torch.cat(alone), family.float32)
    if not family.encoder:
        assert_near(our_cached_pass(ours, ids, keep)[keep], torch.cat(alone), family.float32)


@torch.no_grad()
def test_padding_mask(pair):
    """Both with the same mask. Every query keeps a key: else their float32 softmax gives NaN."""
    family, ours, theirs = pair
    ids, keep = token_ids(), torch.ones(B, T, dtype=torch.bool)
    keep[0, -3:] = keep[2, 2:4] = False
    expected = theirs(ids, attention_mask=keep.long(), position_ids=torch.arange(T)[None])[0]
    assert_near(ours(ids, key_padding_mask=keep)[keep], expected[keep], family.float32)


# =============================================================================================
# Parts
# =============================================================================================


@torch.no_grad()
def test_bart_decoder_layer():
    """The decoder layer of 2017, with padding in both sequences."""
    config = transformers.BartConfig(
        d_model=D, decoder_attention_heads=H, decoder_ffn_dim=D_FF, attn_implementation="eager"
    )
    theirs = randomise(BartDecoderLayer(config))
    names = {"ffn.up": "fc1", "ffn.down": "fc2", "ln1": "self_attn_layer_norm"}
    names |= {"ln2": "encoder_attn_layer_norm", "ln3": "final_layer_norm"}
    for ours_attn, theirs_attn in (("self_attn", "self_attn"), ("cross_attn", "encoder_attn")):
        for ours_name, theirs_name in zip("qkvo", ("q", "k", "v", "out")):
            names[f"{ours_attn}.{ours_name}_proj"] = f"{theirs_attn}.{theirs_name}_proj"
    ours = load(tb.VanillaSeq2SeqDecoderLayer2017(D, H, D_FF, act=F.gelu), theirs, names)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    memory = torch.randn(B, 7, D, generator=generator, dtype=torch.float64)
    keep, memory_keep = torch.ones(B, T).bool(), torch.ones(B, 7).bool()
    keep[1, -3:] = memory_keep[0, -2:] = False

    def additive(allowed: Tensor) -> Tensor:
        return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -math.inf)

    expected = theirs(
        x,
        attention_mask=additive(keep[:, None, None] & torch.ones(T, T).tril().bool()),
        encoder_hidden_states=memory,
        encoder_attention_mask=additive(memory_keep[:, None, None]),
    )
    padding = {"key_padding_mask": keep, "memory_key_padding_mask": memory_keep}
    assert_near(ours(x, memory, **padding), expected, float32="")


@torch.no_grad()
def test_switch_router_and_experts():
    """Top-1 with room for every token; the balance loss is theirs over the batch as one group."""
    config = transformers.SwitchTransformersConfig(
        d_model=D, d_ff=D_FF, num_experts=3, expert_capacity=T
    )
    theirs = randomise(switch.SwitchTransformersSparseMLP(config))
    theirs.router.dtype = torch.float64
    ours = tb.MoEFFN(D, D_FF, n_experts=3)
    ours.experts = nn.ModuleList(tb.DenseFFN(D, D_FF, act=F.relu) for _ in range(3))
    experts = {"experts.*.up": "experts.expert_*.wi", "experts.*.down": "experts.expert_*.wo"}
    load(ours, theirs, {"router": "router.classifier"} | experts)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_near(ours(x), theirs(x), float32="")
    chosen, _, logits = theirs.router(x)
    assert ours.tokens_per_expert == chosen.sum((0, 1)).tolist()
    assert min(ours.tokens_per_expert) > 0
    loss = switch.load_balancing_loss_func(
        logits.softmax(-1).reshape(1, B * T, 3), chosen.argmax(-1).reshape(1, B * T)
    )
    torch.testing.assert_close(ours.aux_loss.double(), loss.double(), atol=1e-6, rtol=0)


# =============================================================================================
# What the classes cannot express
# =============================================================================================

NOT_EXPRESSIBLE = {
    "T5": "a learned bias on the scores, by distance; masks are bool",
    "BLOOM": "ALiBi, a linear bias on the scores; masks are bool",
    "gpt-oss": "a learned sink in the softmax of each head; biases in the experts, four a token",
    "Mixtral": "two experts a token, their weights renormalised",
    "Qwen3-MoE": "eight experts a token, their weights renormalised",
    "DeepSeek-V3, expert layers": "sigmoid scores, groups of experts, a shared expert",
    "Llama 4": "q and k normed after the rotation, a shared expert",
    "Command-R+": "a q/k norm with weights of its own for each head",
    "Qwen3-Next": "a gate on the attention's output, layers of linear attention",
}


@pytest.mark.parametrize(
    ("family", "error", "message", "attempt"),
    [
        (
            "T5",
            TypeError,
            "keep",
            lambda: tb.attend(*torch.ones(3, 1, H, T, D_H), torch.ones(T, T)),
        ),
        ("Mixtral", NotImplementedError, "top_k", lambda: tb.MoEFFN(D, D_FF, 4, top_k=2)),
        (
            "Command-R+",
            RuntimeError,
            "size mismatch",
            lambda: mha(qk_norm=True).q_norm.load_state_dict({"weight": torch.ones(H, D_H)}),
        ),
    ],
)
def test_not_expressible(family, error, message, attempt):
    assert family in NOT_EXPRESSIBLE
    with pytest.raises(error, match=message):
        attempt()
