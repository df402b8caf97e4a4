"""Each model family from the classes of the script, against transformers with the same weights.

A row names the family's configuration in transformers, how our model is composed, and where each
of our weights comes from. Models of the recipe table are composed by recipes.py, shrunk. Both
models run in float64 on the same tokens, at once and with a cache (prefill, then token by token);
ours also with padding, against theirs on each row alone.

Where transformers computes norms, softmax, rotation or router in float32, the row says so and the
outputs may differ by 5e-6; elsewhere by 1e-10.
"""

import copy
import dataclasses
import io
import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
import transformers
from recipe_parts import (
    LearnedPositionLM,
    index_groups,
    linear_tables,
    llama3_tables,
    yarn_gain,
    yarn_tables,
)
from recipes import ROWS as RECIPES
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartDecoderLayer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers import modeling_switch_transformers as switch
from transformers.models.t5.modeling_t5 import T5Attention

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
# The recipe table: recipes.py's own compositions with small sizes
# =============================================================================================

N_EXPERTS, WIDTH = 8, 24  # experts and the d_ff of one


def expert_slices(router: str, *, transposed: bool = False) -> Names:
    """The router, and experts that are slices of two tensors, [out, in] or transposed [in, out]."""
    names: Names = {"ffn.router.router": router}
    for e in range(N_EXPERTS):

        def part(start: int, stop: int | None, e: int = e) -> Callable[[Tensor], Tensor]:
            return lambda w: (w[e].T if transposed else w[e])[start:stop]

        packed = {"gate": (0, WIDTH), "up": (WIDTH, None)}
        for ours, (start, stop) in packed.items():
            path = f"{router.rpartition('.')[0]}.experts.gate_up_proj"
            names[f"ffn.experts.{e}.{ours}"] = (path, part(start, stop))
        path = f"{router.rpartition('.')[0]}.experts.down_proj"
        names[f"ffn.experts.{e}.down"] = (path, part(0, None))
    return names


def gpt_oss_experts() -> Names:
    """Gate and up alternate in one tensor, [in, out]; each has a bias."""
    names: Names = {"ffn.router.router": "mlp.router"}
    for e in range(N_EXPERTS):
        for ours, start in (("gate", 0), ("up", 1)):
            weight, bias = (
                lambda w, e=e, start=start: w[e, :, start::2].T,
                lambda b, e=e, start=start: b[e, start::2],
            )
            names[f"ffn.experts.{e}.{ours}.weight"] = ("mlp.experts.gate_up_proj", weight)
            names[f"ffn.experts.{e}.{ours}.bias"] = ("mlp.experts.gate_up_proj_bias", bias)
        down = {"weight": ("down_proj", lambda w, e=e: w[e].T)}
        down["bias"] = ("down_proj_bias", lambda b, e=e: b[e])
        for leaf, (path, function) in down.items():
            names[f"ffn.experts.{e}.down.{leaf}"] = (f"mlp.experts.{path}", function)
    return names


def row(
    name: str,
    like: str | tuple[str, Names],
    config: dict[str, object] | None = None,
    parts: dict[str, object] | None = None,
    float32: str = ALL_THREE,
    **sizes: object,
) -> Family:
    """A model of the recipe table: like a family above, or a model type and our names."""
    recipe, given = RECIPES[name], RECIPES[name].sizes
    wide = given.n_q_heads * given.head_dim != given.d_model
    small = dataclasses.replace(
        given,
        **{"n_layers": LAYERS, "d_model": D, "n_q_heads": H, "d_ff": D_FF, "vocab_size": V},
        **{"n_kv_heads": {given.n_q_heads: H, 1: 1}.get(given.n_kv_heads, G)},
        **{"head_dim": WIDE if wide else D_H, "eps": EPS, "max_len": MAX_LEN},
    )
    small = dataclasses.replace(small, **sizes)
    ours = dataclasses.replace(recipe, sizes=small, parts=recipe.parts | (parts or {})).build
    shared = {"num_key_value_heads": small.n_kv_heads, "num_hidden_layers": small.n_layers}
    shared |= {"tie_word_embeddings": small.tied} | ({"head_dim": WIDE} if wide else {})
    shared |= {"rope_parameters": {"rope_type": "default", "rope_theta": small.base}}
    if isinstance(like, str):
        family = FAMILIES[like]
        config = {**family.config, **shared, **(config or {})}
        return Family(family.model_type, config, ours, dict(family.names), family.float32)
    return Family(like[0], shared | (config or {}), ours, like[1], float32)


def retuned(name: str, part: str, **options: object) -> dict[str, object]:
    """The part of a row with other numbers."""
    return {part: partial(RECIPES[name].parts[part], **options)}


def rescaled(name: str, like: str = "Llama 3.1") -> Family:
    """Llama-3.1 and 3.2: a context that was 32 positions long, stretched by 8."""
    tables = partial(llama3_tables, factor=8, old_len=32, low=0.5, high=4.0)
    config = {"rope_parameters": LLAMA31}
    return row(name, like, config, retuned(name, "attn", tables=tables), base=5e4)


def gemma_row(name: str, like: str, **attn: object) -> Family:
    """Every second layer is full, as in the family above."""
    parts = retuned(name, "attn", scale=0.2, **attn) | {"window": W, "full_every": 2}
    if like == "Gemma-2":
        parts["logit_softcap"] = 1.5
        return row(name, like, {"head_dim": WIDE}, parts, head_dim=WIDE)
    full = {"rope_type": "default", "rope_theta": 1e6}
    if "factor" in RECIPES[name].parts["attn"].keywords:
        full |= {"rope_type": "linear", "factor": 8.0}
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = {"head_dim": WIDE, "rope_parameters": rope | {"full_attention": full}}
    return row(name, like, config, parts, head_dim=WIDE)


def llama4_row(name: str, every: int) -> Family:
    """Chunks of 5 and a temperature that rises every 3 positions, over 4 layers."""
    config = {"intermediate_size": WIDTH, "intermediate_size_mlp": D_FF, "floor_scale": 3}
    config |= {"num_local_experts": N_EXPERTS, "interleave_moe_layer_step": every}
    config |= {"attention_chunk_size": 5, "use_qk_norm": every == 1, "head_dim": D_H}
    tables = linear_tables
    if every == 1:
        config["rope_parameters"] = LLAMA31
        tables = partial(llama3_tables, factor=8, old_len=32, low=0.5, high=4.0)
    parts = retuned(name, "attn", chunk=5, floor_scale=3, tables=tables)
    experts = RECIPES[name].parts["ffn"]
    experts = partial(experts.keywords.get("experts", experts), n_experts=N_EXPERTS, width=WIDTH)
    parts["ffn"] = experts if every == 1 else partial(RECIPES[name].parts["ffn"], experts=experts)
    dense = {f"ffn.{n}": f"feed_forward.{n}_proj" for n in ("gate", "up", "down")}
    shared = {
        f"ffn.shared.{n}": f"feed_forward.shared_expert.{n}_proj" for n in ("gate", "up", "down")
    }
    names = QKVO | INTERLEAVED | NORMS | dense | shared
    names |= expert_slices("feed_forward.router", transposed=True)
    return row(
        name,
        ("llama4_text", llama_names(names)),
        config,
        parts,
        "norm, rotation, router, temperature",
        n_layers=4,
        **{"base": 5e4} if every == 1 else {},
    )


def deepseek_row(
    name: str,
    model_type: str,
    attn: dict[str, object] | None = None,
    more: Names | None = None,
    groups: int = 4,
    fast: float | None = 3,
    **config: object,
) -> Family:
    """A dense layer, then one with experts; the context was 32 positions long, or without fast
    nothing is stretched. attn and more are sizes and names of an indexer."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    tables, gain = linear_tables, 1.0
    if fast is not None:
        rope, gain = YARN | {"beta_fast": fast}, yarn_gain(8) ** 2
        tables = partial(yarn_tables, factor=8, old_len=32, fast=fast, slow=1)
    config |= MLA_CONFIG | {"first_k_dense_replace": 1, "q_lora_rank": 18, "rope_parameters": rope}
    config |= {"n_routed_experts": N_EXPERTS, "num_experts_per_tok": 3, "n_group": groups}
    config |= {"topk_group": max(groups // 2, 1), "moe_intermediate_size": WIDTH, "head_dim": R}
    widths = {"kv_rank": KV_RANK, "rope_dim": R, "nope_dim": NOPE, "v_dim": 14, "q_rank": 18}
    parts = retuned(name, "attn", **widths, **attn or {}, tables=tables, score_gain=gain)
    routing = {"n_experts": N_EXPERTS, "top_k": 3, "width": WIDTH, "n_groups": groups}
    routing["top_groups"] = max(groups // 2, 1)
    experts = partial(RECIPES[name].parts["ffn"].keywords["experts"], **routing)
    parts |= retuned(name, "ffn", sparse=lambda layer: layer == 1, experts=experts)
    shared = {f"ffn.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
    names = MLA | shared | expert_slices("mlp.gate")
    names |= {"attn.q_down": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm"}
    names |= {"attn.q_up": ("self_attn.q_b_proj", MLA_Q)}
    names |= {"ffn.router.selection_bias": "mlp.gate.e_score_correction_bias"}
    if more is not None:  # the attention stands inside the indexed one
        names = {re.sub("^attn", "attn.attn", ours): theirs for ours, theirs in names.items()}
    kind = model_type, llama_names(names | (more or {}))
    return row(name, kind, config, parts, ALL_THREE + ", router", base=100.0)


def indexed_row(name: str, model_type: str, interleaved: bool, **options: object) -> Family:
    """5 keys of 8 index heads, 14 channels wide, of which R turn, as halves or as pairs."""
    attn = {"n_index_heads": 8, "index_dim": 14, "top_k": 5}
    config = {"index_n_heads": 8, "index_head_dim": 14, "index_topk": 5}
    config["mlp_layer_types"] = ["dense", "sparse"]
    turn = half_split(14, 0, R) if interleaved else Tensor.clone
    more: Names = {
        "attn.index_q": ("self_attn.indexer.wq_b", turn),
        "attn.index_k": ("self_attn.indexer.wk", turn),
        "attn.index_norm": ("self_attn.indexer.k_norm", turn),
        "attn.index_weight": "self_attn.indexer.weights_proj",
    }
    options |= {"routed_scaling_factor": 2.5, "n_shared_experts": 1}
    return deepseek_row(name, model_type, attn, more, **config, **options)


def qwen3_next_row(name: str) -> Family:
    """Three DeltaNet layers of 2 key and 4 value heads, then gated attention; R channels turn."""
    mixer = {"n_k_heads": 2, "n_v_heads": 4, "width": 10}
    parts = retuned(name, "attn", **mixer) | {"rope_dim": R}
    parts |= retuned(name, "ffn", n_experts=N_EXPERTS, top_k=3, width=WIDTH)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": R / WIDE}
    config = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "rope_parameters": rope}
    config |= {"linear_key_head_dim": 10, "linear_value_head_dim": 10}
    config |= {"num_experts": N_EXPERTS, "num_experts_per_tok": 3, "head_dim": WIDE}
    config |= {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}

    def packed(path: str, n_parts: int, start: int, stop: int | None) -> Weight:
        """Of each key head: q, k, and of its two value heads v, then the gate; or beta, decay."""
        rows = slice(start * 10, None if stop is None else stop * 10)
        rows = slice(start, stop) if n_parts == 4 else rows
        return path, lambda w: w.unflatten(0, (2, -1))[:, rows].flatten(0, 1)

    qkvz, ba = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
    delta: Names = {
        "attn.q_proj": packed(qkvz, 6, 0, 1),
        "attn.k_proj": packed(qkvz, 6, 1, 2),
        "attn.v_proj": packed(qkvz, 6, 2, 4),
        "attn.gate_proj": packed(qkvz, 6, 4, None),
        "attn.beta_proj": packed(ba, 4, 0, 2),
        "attn.decay_proj": packed(ba, 4, 2, None),
        "attn.conv.weight": ("linear_attn.conv1d.weight", lambda w: w[:, 0].T),
        "attn.A_log": "linear_attn.A_log",
        "attn.dt_bias": "linear_attn.dt_bias",
        "attn.norm": "linear_attn.norm",
        "attn.o_proj": "linear_attn.out_proj",
    }
    gated = {f"attn.attn.{n}_proj": f"self_attn.{n}_proj" for n in "kv"}
    gated |= {f"attn.attn.{n}_norm": (f"self_attn.{n}_norm", one_plus) for n in "qk"}
    q = "self_attn.q_proj"
    gated["attn.attn.q_proj"] = q, lambda w: w.unflatten(0, (H, 2, WIDE))[:, 0].flatten(0, 1)
    shared = {f"ffn.shared.expert.{n}": f"mlp.shared_expert.{n}_proj" for n in GATED_PARTS}
    shared["ffn.shared.gate"] = "mlp.shared_expert_gate"
    block = delta | gated | plus_one(NORMS) | shared | expert_slices("mlp.gate")
    names = llama_names(block, final_norm=("model.norm", one_plus))
    names["blocks.3.attn.o_proj"] = "model.layers.3.self_attn.o_proj"
    gate = f"model.layers.3.{q}", lambda w: w.unflatten(0, (H, 2, WIDE))[:, 1].flatten(0, 1)
    names["blocks.3.attn.gate_proj"] = gate
    sizes = {"n_layers": 4, "base": 1e4, "head_dim": WIDE}
    return row(name, ("qwen3_next", names), config, parts, ALL_THREE + ", delta rule", **sizes)


def minimax_row(name: str) -> Family:
    """q and k normed over all heads, R of 16 channels turn."""
    names = QKVO | NORMS | expert_slices("mlp.gate")
    for n in "qk":
        del names[f"attn.{n}_proj"]
        names[f"attn.{n}_proj.0"] = f"self_attn.{n}_proj"
        names[f"attn.{n}_proj.1"] = f"self_attn.{n}_norm"
    names["ffn.router.selection_bias"] = "mlp.e_score_correction_bias"
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": R / WIDE}
    config = {"num_local_experts": N_EXPERTS, "num_experts_per_tok": 3, "rope_parameters": rope}
    config["intermediate_size"] = WIDTH
    parts = retuned(name, "ffn", n_experts=N_EXPERTS, top_k=3, width=WIDTH) | {"rope_dim": R}
    kind = "minimax_m2", llama_names(names)
    return row(name, kind, config, parts, ALL_THREE + ", router", base=1e4)


def olmo3_row(name: str) -> Family:
    """Three layers with a window of W, then a full one, whose context was 32 positions long."""
    plain = {"rope_type": "default", "rope_theta": 100.0}
    stretched = {name: value for name, value in YARN.items() if "mscale" not in name}
    config = {"rope_parameters": {"sliding_attention": plain, "full_attention": stretched}}
    config["sliding_window"] = W
    tables = partial(yarn_tables, factor=8, old_len=32, fast=3, slow=1, gain=yarn_gain(8))
    parts = retuned(name, "attn", tables=tables) | {"windows": [W, W, W, None]}
    kind = "olmo3", dict(FAMILIES["OLMo-2"].names)
    return row(name, kind, config, parts, n_layers=4, base=100.0)


def mimo_row(name: str) -> Family:
    """A full layer, four with a window of W and twice the KV heads, a full one."""
    rope = {"rope_type": "default", "partial_rotary_factor": R / WIDE}
    kinds = {"full_attention": rope | {"rope_theta": 1e4}}
    kinds["sliding_attention"] = rope | {"rope_theta": 100.0}
    config = {"rope_parameters": kinds, "v_head_dim": 10, "sliding_window": W, "head_dim": WIDE}
    config |= {"n_routed_experts": N_EXPERTS, "num_experts_per_tok": 3, "n_group": 1}
    config |= {"moe_intermediate_size": WIDTH, "attention_value_scale": 0.707}
    attn = {"v_dim": 10, "local_heads": 4, "rope_dim": R, "local_base": 100.0}
    parts = retuned(name, "attn", **attn) | {"window": W, "rope_dim": R}
    routing = {"n_experts": N_EXPERTS, "top_k": 3, "width": WIDTH}
    experts = partial(RECIPES[name].parts["ffn"].keywords["experts"], **routing)
    parts |= retuned(name, "ffn", experts=experts)
    names = QKVO | GATED | NORMS | {"attn.attend.sinks": "self_attn.sinks"}
    names |= expert_slices("mlp.gate")
    names["ffn.router.selection_bias"] = "mlp.gate.e_score_correction_bias"
    kind = "mimo_v2_flash", llama_names(names)
    return row(name, kind, config, parts, ALL_THREE + ", router", n_layers=6, base=1e4)


def gpt_oss_row(name: str) -> Family:
    """A window of W in the first layer; a limit that clamps a good part of the gates."""
    rope = YARN | {"truncate": False, "mscale": None, "mscale_all_dim": None}
    config = {"num_local_experts": N_EXPERTS, "num_experts_per_tok": 3, "swiglu_limit": 0.5}
    config |= {"rope_parameters": rope} | LOCAL_GLOBAL
    tables = partial(
        yarn_tables, factor=8, old_len=32, fast=3, slow=1, rounded=False, gain=yarn_gain(8)
    )
    parts = retuned(name, "attn", tables=tables) | {"window": W}
    parts |= retuned(name, "ffn", n_experts=N_EXPERTS, top_k=3, limit=0.5)
    names = QKVO | NORMS | {"attn.attend.sinks": "self_attn.sinks"} | gpt_oss_experts()
    kind = "gpt_oss", llama_names(names)
    return row(name, kind, config, parts, "norm, rotation", base=100.0)


GATED_PARTS = "gate", "up", "down"


def turned_first(width: int) -> list[int]:
    """Channels of a head whose last R turn as pairs (2i, 2i+1): ours turn first, as halves."""
    start = width - R
    return [*range(start, width, 2), *range(start + 1, width, 2), *range(start)]


def v4_rate(layer: int) -> int:
    return 0 if layer < 2 else 5 if layer == 3 else 2


def deepseek_v4_row(name: str) -> Family:
    """Two window layers, CSA at rate 2, HCA at rate 5, CSA; the first layer routes by token id."""
    compressed, index_dim = "compressed_sparse_attention", 14
    kinds = ["sliding_attention"] * 2 + [compressed, "heavily_compressed_attention", compressed]
    main = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": R / WIDE}
    stretched = {name: value for name, value in YARN.items() if "mscale" not in name}
    compress = main | stretched | {"attention_factor": 1.0}
    config = {"layer_types": kinds, "rope_parameters": {"main": main, "compress": compress}}
    config["compress_rates"] = {kinds[2]: 2, kinds[3]: 5}
    config["mlp_layer_types"] = ["hash_moe"] + ["moe"] * 4
    config |= {"head_dim": WIDE, "partial_rotary_factor": R / WIDE, "q_lora_rank": 18}
    config |= {"sliding_window": W, "o_groups": 2, "o_lora_rank": 9, "index_topk": 2}
    config |= {"index_n_heads": 8, "index_head_dim": index_dim, "moe_intermediate_size": WIDTH}
    config["intermediate_size"] = WIDTH
    config |= {"n_routed_experts": N_EXPERTS, "num_experts_per_tok": 3, "swiglu_limit": 0.5}
    index = {"n_heads": 8, "width": index_dim, "top_k": 2}
    tables = partial(yarn_tables, factor=8, old_len=32, fast=3, slow=1)
    attn = {"rope_dim": R, "q_rank": 18, "window": W, "n_groups": 2, "group_rank": 9}
    attn |= {"rates": v4_rate, "index": index, "tables": tables, "local_base": 50.0}
    parts = retuned(name, "attn", **attn) | {"rope_dim": R}
    experts = {"n_experts": N_EXPERTS, "top_k": 3, "n_hashed": 1, "limit": 0.5}
    parts |= retuned(name, "ffn", **experts)

    def by_head(width: int) -> Callable[[Tensor], Tensor]:
        order = turned_first(width)
        return lambda w: w.unflatten(0, (-1, width))[:, order].flatten(0, 1)

    def by_column(width: int) -> Callable[[Tensor], Tensor]:
        order = turned_first(width)
        return lambda w: w.unflatten(1, (-1, width))[:, :, order].flatten(1, 2)

    def pooling(ours: str, theirs: str, width: int) -> Names:
        return {
            f"{ours}.kv_proj": (f"{theirs}.kv_proj", by_head(width)),
            f"{ours}.gate_proj": (f"{theirs}.gate_proj", by_head(width)),
            f"{ours}.slot_bias": (f"{theirs}.position_bias", by_column(width)),
            f"{ours}.norm": (f"{theirs}.kv_norm", by_head(width)),
        }

    def grouped(w: Tensor) -> Tensor:
        """[groups * rank, heads * WIDE] to [groups, heads * WIDE, rank]."""
        return by_column(WIDE)(w).unflatten(0, (2, -1)).mT.contiguous()

    indexer = "self_attn.compressor.indexer"
    names = NORMS | expert_slices("mlp.gate") | {
        "attn.q_down": "self_attn.q_a_proj",
        "attn.q_norm": "self_attn.q_a_norm",
        "attn.q_up": ("self_attn.q_b_proj", by_head(WIDE)),
        "attn.kv_proj": ("self_attn.kv_proj", by_head(WIDE)),
        "attn.kv_norm": ("self_attn.kv_norm", by_head(WIDE)),
        "attn.attend.sinks": "self_attn.sinks",
        "attn.o_groups.weight": ("self_attn.o_a_proj.weight", grouped),
        "attn.o_proj": "self_attn.o_b_proj",
        "attn.index.q_proj": (f"{indexer}.q_b_proj", by_head(index_dim)),
        "attn.index.weight_proj": f"{indexer}.scorer.weights_proj",
        "ffn.router.selection_bias": "mlp.gate.e_score_correction_bias",
        "ffn.router.table": "mlp.gate.tid2eid",
    }  # fmt: skip
    names |= pooling("attn.pooling", "self_attn.compressor", WIDE)
    names |= pooling("attn.index.pooling", indexer, index_dim)
    for n in GATED_PARTS:
        names[f"ffn.shared.{n}"] = f"mlp.shared_experts.{n}_proj"
    names = llama_names(names | stream_names())
    names |= COLLAPSE
    sizes = {"n_layers": 5, "head_dim": WIDE, "d_ff": WIDTH, "base": 100.0}
    return row(name, ("deepseek_v4", names), config, parts, ALL_THREE + ", streams", **sizes)


def stream_names() -> Names:
    parts = (("attn_streams", "attn_hc"), ("ffn_streams", "ffn_hc"))
    leaves = {"proj": "fn", "bias": "base", "scale": "scale"}
    return {f"{a}.{c}": f"{b}.{d}" for a, b in parts for c, d in leaves.items()}


COLLAPSE: Names = {
    "final_norm.0.proj": "model.hc_head.hc_fn",
    "final_norm.0.bias": "model.hc_head.hc_base",
    "final_norm.0.scale": "model.hc_head.hc_scale",
    "final_norm.1": "model.norm",
}


def hy4_row(name: str) -> Family:
    """Six layers in groups of 1, 4, 1: the first of each chooses 5 keys for all of it."""
    index = {"n_index_heads": 8, "index_dim": 14, "top_k": 5}
    latent = {"kv_rank": KV_RANK, "rope_dim": R, "nope_dim": NOPE, "v_dim": 14, "q_rank": 18}
    parts = {"index": index, "latent": latent, "width": WIDTH, "limit": 0.5}
    parts |= {"n_experts": N_EXPERTS, "top_k": 3}
    config = MLA_CONFIG | {"q_lora_rank": 18, "index_topk": 5, "index_n_heads": 8}
    config |= {"index_head_dim": 14, "moe_intermediate_size": WIDTH, "swiglu_limit": 0.5}
    config |= {"n_routed_experts": N_EXPERTS, "num_experts_per_tok": 3, "hc_eps": 1e-6}
    last = [*range(14 - R, 14), *range(14 - R)]  # their index turns the last channels
    turn = lambda w: w.unflatten(0, (-1, 14))[:, last].flatten(0, 1)  # noqa: E731
    own = {
        "q_down": "q_a_proj",
        "q_norm": "q_a_layernorm",
        "q_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "out_proj": "o_proj",
        "gate_proj": "gate_proj",
        "attend.sinks": "sinks",
    }
    block = {f"attn.attn.{ours}": f"self_attn.{theirs}" for ours, theirs in own.items()}
    block |= {
        "attn.index_q": ("self_attn.indexer.wq_b", turn),
        "attn.index_k": ("self_attn.indexer.wk", turn),
        "attn.index_norm": ("self_attn.indexer.k_norm", turn),
        "attn.index_weight": "self_attn.indexer.weights_proj",
        "ffn.router.selection_bias": "mlp.gate.e_score_correction_bias",
    }
    block |= {f"ffn.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in GATED_PARTS}
    block |= NORMS | GATED | stream_names() | expert_slices("mlp.gate")
    names = llama_names({}) | COLLAPSE
    for group, layers in enumerate(index_groups(6)):
        for place, layer in enumerate(layers):
            for ours, theirs in block.items():
                path, function = (theirs, Tensor.clone) if isinstance(theirs, str) else theirs
                path = f"model.layers.{layer}.{path}"
                names[f"blocks.{group}.layers.{place}.{ours}"] = path, function
    sizes = {"n_layers": 6, "base": 100.0}
    return row(name, ("hy_v4", names), config, parts, ALL_THREE + ", streams", **sizes)


def mixture_row(name: str, model_type: str, names: Names, **config: object) -> Family:
    parts = retuned(name, "ffn", n_experts=N_EXPERTS, top_k=3, width=WIDTH)
    kind = model_type, llama_names(QKVO | NORMS | names | expert_slices("mlp.gate"))
    config = {"num_experts_per_tok": 3} | config
    return row(name, kind, config, parts, ALL_THREE + ", router")


ROWS = {
    "GPT-2 XL": row("GPT-2 XL", "GPT-2"),
    "GPT-J 6B": row("GPT-J 6B", "GPT-J", parts={"rope_dim": R}),
    "GPT-NeoX 20B": row(
        "GPT-NeoX 20B",
        "GPT-NeoX",
        {
            "rope_parameters": PARTIAL["rope_parameters"] | {"rope_type": "default"},
            "hidden_act": "gelu_new",
        },
        {"rope_dim": R},
    ),
    **{
        name: row(name, "Llama")
        for name in ("Llama-1 7B", "Llama-2 7B", "Llama-2 70B", "Llama-3 8B", "Llama-3 70B")
    },
    "Llama-3.1 405B": rescaled("Llama-3.1 405B"),
    "Llama-3.2 1B": rescaled("Llama-3.2 1B"),
    "Llama-4 Scout": llama4_row("Llama-4 Scout", 1),
    "Llama-4 Maverick": llama4_row("Llama-4 Maverick", 2),
    "Mistral 7B v0.1": row("Mistral 7B v0.1", "Mistral", parts={"window": W}),
    "Mixtral 8x7B": mixture_row(
        "Mixtral 8x7B", "mixtral", {}, num_local_experts=N_EXPERTS, intermediate_size=WIDTH
    ),
    "Qwen2/2.5 7B": row("Qwen2/2.5 7B", "Qwen2"),
    "Qwen3 8B": row("Qwen3 8B", "Qwen3", {"head_dim": D_H}),
    "Qwen3 30B-A3B": mixture_row(
        "Qwen3 30B-A3B",
        "qwen3_moe",
        QK_NORM,
        **{"num_experts": N_EXPERTS, "moe_intermediate_size": WIDTH, "norm_topk_prob": True},
    ),
    "Gemma-1 2B": row("Gemma-1 2B", "Gemma", {"head_dim": D_H}),
    "Gemma-1 7B": row("Gemma-1 7B", "Gemma"),
    "Gemma-2 9B": gemma_row("Gemma-2 9B", "Gemma-2", logit_softcap=2.0),
    "Gemma-2 27B": gemma_row("Gemma-2 27B", "Gemma-2", logit_softcap=2.0),
    "Gemma-3 1B": gemma_row("Gemma-3 1B", "Gemma-3", full_every=2),
    "Gemma-3 27B": gemma_row("Gemma-3 27B", "Gemma-3", full_every=2),
    "DeepSeek-V2": deepseek_row(
        "DeepSeek-V2",
        "deepseek_v2",
        **{"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        n_shared_experts=2,
    ),
    "DeepSeek-V3": deepseek_row(
        "DeepSeek-V3", "deepseek_v3", routed_scaling_factor=2.5, n_shared_experts=1
    ),
    "OLMo-2 7B": row("OLMo-2 7B", "OLMo-2"),
    "Phi-2": row(
        "Phi-2",
        "Phi",
        {"rope_parameters": PARTIAL["rope_parameters"] | {"rope_type": "default"}},
        {"rope_dim": R},
    ),
    "Falcon 7B": row("Falcon 7B", "Falcon-7B", parts={"rope_dim": D_H}),
    "Falcon 40B": row("Falcon 40B", "Falcon-40B", parts={"rope_dim": D_H}),
    "Command-R 35B": row("Command-R 35B", "Cohere Command-R", parts={"logit_scale": 0.3}),
    "gpt-oss 20b": gpt_oss_row("gpt-oss 20b"),
    "gpt-oss 120b": gpt_oss_row("gpt-oss 120b"),
    "Kimi K2": deepseek_row(
        "Kimi K2",
        "deepseek_v3",
        groups=1,
        fast=1,
        **{"routed_scaling_factor": 2.827, "n_shared_experts": 1},
    ),
    "SmolLM3 3B": row("SmolLM3 3B", "SmolLM3", {"no_rope_layers": [1, 1, 1, 0]}, n_layers=4),
    "OLMo-3 7B": olmo3_row("OLMo-3 7B"),
    "MiniMax-M2": minimax_row("MiniMax-M2"),
    "Qwen3-Next 80B-A3B": qwen3_next_row("Qwen3-Next 80B-A3B"),
    "DeepSeek-V3.2": indexed_row("DeepSeek-V3.2", "deepseek_v32", interleaved=False),
    "MiMo-V2-Flash": mimo_row("MiMo-V2-Flash"),
    "GLM-5": indexed_row("GLM-5", "glm_moe_dsa", interleaved=True, groups=1, fast=None),
    "DeepSeek-V4-Flash": deepseek_v4_row("DeepSeek-V4-Flash"),
    "Hy4-preview": hy4_row("Hy4-preview"),
}
COMMAND_R = ROWS["Command-R 35B"]  # ours has the logits' scale in its final norm
ROWS["Command-R 35B"] = COMMAND_R._replace(names=COMMAND_R.names | {"final_norm": "model.norm"})
NO_CLASS = {  # rows of the table that transformers has no class for, and no one released
    "GPT-3 175B": "composed as GPT-2, which is compared; its sparse bands were not published",
    "PaLM 540B": "parallel, SwiGLU, LayerNorms without bias: as Command-R, which is compared",
    "MiMo-V2.6-Pro": "mimo_v2_flash doubles the KV heads of window layers; as MiMo-V2-Flash else",
}
FAMILIES |= {f"row {name}": family for name, family in ROWS.items()}

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
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros until training moves them
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("tid2eid"):  # of a token: its experts, all different
                drawn = torch.rand(len(buffer), N_EXPERTS, generator=generator)
                buffer.copy_(drawn.argsort(dim=1)[:, : buffer.shape[1]])
    return module


def load(ours: nn.Module, theirs: nn.Module, names: Names) -> nn.Module:
    """Our module in float64 with their weights, each of which has to be used."""
    weights, loaded, used = theirs.state_dict(), {}, set()
    for key in ours.state_dict():
        module, leaf = key.rsplit(".", 1)
        number = re.search(r"\b\d+\b", module)
        one = re.sub(r"\b\d+\b", "*", key, count=1)  # a name of its own, or its module's
        known = (name for name in (key, module, one, one.rpartition(".")[0]) if name in names)
        source = names[next(known)]
        *paths, function = (source, Tensor.clone) if isinstance(source, str) else source
        paths = [path.replace("*", number[0] if number else "") for path in paths]
        paths = [path if path in weights else f"{path}.{leaf}" for path in paths]
        loaded[key] = function(*(weights[path] for path in paths))
        used.update(paths)
    parameters = {parameter.data_ptr() for parameter in theirs.parameters()}  # a tied one once
    assert {weights[name].data_ptr() for name in used} >= parameters
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


class WideTorch:
    """torch to a module that asks for float32: it gets float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


WIDENED = {"qwen3_next"}  # rounding in float32 adds up over a recurrence: theirs runs in float64


def official_model(family: Family) -> nn.Module:
    """The family's small model in transformers, with random weights in float64."""
    config = transformers.AutoConfig.for_model(family.model_type, **SIZES | family.config)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    make = transformers.AutoModelForCausalLM
    if family.encoder:
        make, options = transformers.AutoModel, options | {"add_pooling_layer": False}
    return randomise(make.from_config(config, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Family, nn.Module, nn.Module]]:
    family = FAMILIES[request.param]
    theirs = official_model(family)
    with pytest.MonkeyPatch.context() as patch:
        if family.model_type in WIDENED:
            patch.setattr(Tensor, "float", Tensor.double)
            patch.setattr(sys.modules[type(theirs).__module__], "torch", WideTorch())
        yield family, load(family.ours(), theirs, family.names), theirs


def token_ids() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


def our_cached_pass(ours: nn.Module, ids: Tensor, keep: Tensor | None = None) -> Tensor:
    """Prefill, then token by token."""
    caches = [tb.KVCache() for _ in ours.blocks]
    caches = ours.new_caches() if hasattr(ours, "new_caches") else caches
    outputs = []
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
    if family.model_type == "deepseek_v4":
        with pytest.raises(ValueError, match="key_padding_mask"):
            ours(token_ids(), key_padding_mask=torch.zeros(B, T, dtype=torch.bool))
        pytest.skip("refused: entries pool tokens by position")
    ids, keep = token_ids(), torch.ones(B, T, dtype=torch.bool)
    keep[0, :3] = keep[2, -2:] = False
    alone = []
    for row, real in zip(ids, keep):
        positions = real.nonzero().T  # a rotation sees differences only
        if isinstance(ours, LearnedPositionLM):  # padding takes no position
            positions = torch.arange(int(real.sum()))[None]
        alone.append(theirs(row[real][None], position_ids=positions)[0][0])
    assert_near(ours(ids, key_padding_mask=keep)[keep], torch.cat(alone), family.float32)
    if not family.encoder:
        assert_near(our_cached_pass(ours, ids, keep)[keep], torch.cat(alone), family.float32)


@torch.no_grad()
def test_a_composed_model_can_be_saved_pickled_and_copied(pair, request):
    _, ours, _ = pair
    if not request.node.callspec.params["pair"].startswith("row "):
        pytest.skip("composed here, with hooks of the test")
    ids, file = token_ids()[:1], io.BytesIO()
    expected = ours(ids)
    torch.save(ours, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for twin in (saved, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert torch.equal(twin(ids), expected)


@torch.no_grad()
def test_padding_mask(pair):
    """Both with the same mask. Every query keeps a key: else their float32 softmax gives NaN."""
    family, ours, theirs = pair
    if family.model_type in ("qwen3_next", "deepseek_v4"):
        pytest.skip("theirs runs padding through decay and convolution; ours leaves no trace")
    ids, keep = token_ids(), torch.ones(B, T, dtype=torch.bool)
    keep[0, -3:] = keep[2, 2:4] = False
    positions = torch.arange(T)[None]
    if isinstance(ours, LearnedPositionLM):
        positions = (keep.cumsum(1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=keep.long(), position_ids=positions)[0]
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


@torch.no_grad()
@pytest.mark.parametrize("heads", [4, 6])
def test_bloom_alibi(heads):
    """ALiBi through attend=: one more channel, in which a head's slope meets a key's position.

    attend() adds slope * j to the score of key j; ALiBi adds slope * (j - i), which is the same
    under a softmax.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * (heads - power), 2)]

    def alibi(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, **options) -> Tensor:
        slope = torch.tensor(slopes, dtype=q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        at = torch.arange(k.shape[2], dtype=k.dtype)[:, None].expand(*k.shape[:3], 1)
        q = torch.cat((q * q.shape[3] ** -0.5, slope), dim=3)
        return tb.attend(q, torch.cat((k, at), dim=3), v, keep, **options | {"scale": 1.0})

    def block(_layer: int) -> nn.Module:
        attn = tb.MultiHeadAttention(D, heads, bias=True, attend=alibi)
        made = modern(attn=attn, ffn=tb.DenseFFN(D, 4 * D, tanh_gelu, bias=True))
        return with_parts(made, norm1=layer_norm(), norm2=layer_norm())

    model = layer_norm_lm(block, rope_dim=2)
    parts = {"table": model.embedding, "norm": layer_norm()}
    model.embedding = nn.Sequential(OrderedDict(parts))
    width = D // heads

    def part(start: int) -> tuple:
        """Query, key and value of each head stand together."""
        path = "self_attention.query_key_value"
        return path, lambda w: w.unflatten(0, (heads, 3, width))[:, start].flatten(0, 1)

    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    names |= {f"attn.{n}_proj": part(i) for i, n in enumerate("qkv")}
    names |= {"attn.o_proj": "self_attention.dense"}
    names |= {"ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"}
    names = gpt2_names(names)
    names |= {"embedding.table": "transformer.word_embeddings"}
    names |= {"embedding.norm": "transformer.word_embeddings_layernorm"}
    config = transformers.BloomConfig(
        vocab_size=V, hidden_size=D, n_layer=LAYERS, n_head=heads, layer_norm_epsilon=EPS
    )
    theirs = randomise(
        transformers.BloomForCausalLM._from_config(config, attn_implementation="eager")
    )
    ours, ids = load(model, theirs, names), token_ids()
    assert_near(ours(ids), theirs(ids)[0], float32="softmax")
    assert_near(our_cached_pass(ours, ids), theirs(ids)[0], float32="softmax")
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[0, :3] = False
    alone = torch.cat([theirs(row[real][None])[0][0] for row, real in zip(ids, keep)])
    assert_near(ours(ids, key_padding_mask=keep)[keep], alone, float32="softmax")
    assert_near(our_cached_pass(ours, ids, keep)[keep], alone, float32="softmax")


class RelativeBias(nn.Module):
    """T5's learned bias for attend=: a number for each head and range of distances."""

    def __init__(self, buckets: int, farthest: int, bidirectional: bool):
        super().__init__()
        self.table = nn.Embedding(buckets, H)
        self.buckets, self.farthest, self.bidirectional = buckets, farthest, bidirectional

    def bucket(self, distance: int) -> int:
        """Of a key that stands distance positions before the query: exact first, then by ratio."""
        buckets, offset = self.buckets, 0
        if self.bidirectional:
            buckets //= 2
            distance, offset = abs(distance), buckets if distance < 0 else 0
        distance, exact = max(distance, 0), buckets // 2
        if distance >= exact:
            ratio = math.log(distance / exact) / math.log(self.farthest / exact)
            distance = min(exact + int(ratio * (buckets - exact)), buckets - 1)
        return offset + distance

    def forward(self, q, k, v, keep=None, *, causal=False, scale=None, logit_softcap=None):
        (T, S), scores = (q.shape[2], k.shape[2]), scale * q @ k.mT if scale else q @ k.mT
        rows = [[self.bucket(i - j) for j in range(S)] for i in range(S - T, S)]
        scores = scores + self.table(torch.tensor(rows)).movedim(2, 0)  # (B, H, T, S)
        seen = torch.ones(T, S, dtype=torch.bool)
        seen = seen.tril(S - T) if causal else seen
        seen = seen if keep is None else seen & keep
        return scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ v


@torch.no_grad()
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_t5_bias(decoder):
    """Scores are not scaled; both kinds of buckets, exact and logarithmic, and the last one."""
    config = transformers.T5Config(
        d_model=D, d_kv=WIDE, num_heads=H, is_decoder=decoder, relative_attention_num_buckets=8,
        relative_attention_max_distance=10, attn_implementation="eager",
    )  # fmt: skip
    theirs = randomise(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    bias = RelativeBias(8, 10, bidirectional=not decoder)
    ours = tb.MultiHeadAttention(D, H, head_dim=WIDE, scale=1.0, attend=bias)
    names = {f"{name}_proj": name for name in "qkvo"}
    load(ours, theirs, names | {"attend.table": "relative_attention_bias"})
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    keep = torch.ones(B, T, dtype=torch.bool)
    keep[1, -4:] = False
    seen = keep[:, None, None] & torch.ones(T, T).tril().bool() if decoder else keep[:, None, None]
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
    expected = theirs(x, mask=mask)[0]
    assert_near(ours(x, causal=decoder, key_padding_mask=keep)[0], expected, float32="")
    if decoder:
        cache, steps = tb.KVCache(), []
        for piece in x[:1].split((PREFILL, *[1] * (T - PREFILL)), dim=1):
            steps.append(ours(piece, causal=True, kv_cache=cache)[0])
        assert_near(torch.cat(steps, dim=1), expected[:1], float32="")


@torch.no_grad()
def test_balance_loss_is_k_times_theirs():
    """transformers sums f over the k choices of a token, so that balance gives k; ours gives 1.

    Theirs pools the tokens of all layers first, which hides a collapsed layer behind an even one;
    ours is a loss of each layer, to be averaged.
    """
    generator, k, losses, logits = torch.Generator().manual_seed(2), 3, [], []
    for layer in range(2):
        router = tb.SoftmaxRouter(D, N_EXPERTS, k).double()
        nn.init.normal_(router.router.weight, std=0.1 + layer, generator=generator)
        tokens = torch.randn(B * T, D, generator=generator, dtype=torch.float64)
        router(tokens)
        losses.append(router.aux_loss.item())
        logits.append(router.router(tokens))
        theirs = load_balancing_loss_func((logits[-1],), N_EXPERTS, k).item()
        assert abs(theirs - k * losses[-1]) < 1e-5
    pooled = load_balancing_loss_func(tuple(logits), N_EXPERTS, k).item()
    assert abs(pooled - k * sum(losses) / 2) > 1e-3
    even = torch.zeros(4, 4).fill_diagonal_(1e-3)  # each token at another expert, P nearly even
    collapsed = torch.tensor([50.0, 0.0, 0.0, 0.0]).repeat(4, 1)
    both = [load_balancing_loss_func((layer,), 4, 1).item() for layer in (even, collapsed)]
    assert both == pytest.approx([1, 4], abs=1e-3)
    pooled = load_balancing_loss_func((even, collapsed), 4, 1).item()
    assert pooled == pytest.approx(1.75, abs=1e-3)  # the mean of the layers is 2.5


# =============================================================================================
# What the classes cannot express
# =============================================================================================

NOT_EXPRESSIBLE = {  # no row of the recipe table
    "Command-R+": "a q/k norm with weights of its own for each head",
    "T5": "its encoder and decoder as whole models; the bias on its scores is compared above",
}


def test_every_recipe_is_compared():
    assert {*ROWS, *NO_CLASS} == set(RECIPES)
    assert not set(RECIPES) & set(NOT_EXPRESSIBLE)


def test_not_expressible():
    """A norm with weights of its own for each head does not load."""
    weight = {"weight": torch.ones(H, D_H)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        mha(qk_norm=True).q_norm.load_state_dict(weight)
