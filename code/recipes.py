"""The recipe table of the notes as code: each model composed of the script's classes.

    python3 code/recipes.py                  layers, width, parameters, active, cache of a token
    python3 code/recipes.py "Mixtral 8x7B"   how it is composed, what each part holds and costs

RECIPES["Mixtral 8x7B"].build() is the model at its real size; under torch.device("meta") it takes
no memory. These are the functions, not the files: released weights load after a conversion. Gemma
stores a norm's weight as its difference from 1, and where the table says adjacent, the rows of
the rotated channels are permuted to halves.
"""

import argparse
import collections
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import NamedTuple

import transformer_block as tb  # isort: skip (first: without torch it says how to install it)
import torch
import torch.nn.functional as F
from recipe_parts import (
    LearnedPositionLM,
    OwnTables,
    ScaledLayerNorm,
    Sizes,
    all_alike,
    attention,
    compressed_attention,
    deepseek_v4,
    deepseek_v4_experts,
    dense,
    gemma,
    gemma1,
    gemma2_attention,
    gemma3_attention,
    gpt2,
    gpt_oss_attention,
    gpt_oss_experts,
    hy4,
    indexed_attention,
    latent_attention,
    linear_tables,
    llama3_tables,
    llama4_attention,
    llama4_experts,
    mimo_attention,
    olmo3_attention,
    output_norm,
    parallel,
    parallel_gated,
    qwen3_next_experts,
    qwen3_next_mixer,
    scheduled,
    serial,
    sigmoid_experts,
    softmax_experts,
    some_experts,
    stretched,
    tanh_gelu,
    unrotated_every_4th,
    whole_norm_attention,
    windowed,
    yarn_gain,
    yarn_tables,
)
from torch import nn
from torch.overrides import TorchFunctionMode

from after_2025 import (
    GatedDeltaNet,
    HyperConnectedBlock,
    IndexedSparseAttention,
    OutputGatedAttention,
)
from after_2026 import (
    CompressedAttention,
    GatedLatentAttention,
    GatedSharedExpert,
    HashMixtureFFN,
    IndependentConnection,
    LimitedGatedFFN,
    NarrowValueAttention,
    SharedIndexAttention,
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A row: compose(sizes, **parts) is the model; stated are cells that no composition shows.

    published are the total and active parameters that source prints, both with all tables. kinds
    gives layers that are composed alike one value. second_hand names the columns that only copies
    of a configuration bear out.
    """

    compose: Callable[..., nn.Module]
    sizes: Sizes
    parts: dict[str, object]
    published: tuple[float, float | None]
    source: str
    stated: dict[str, str] = dataclasses.field(default_factory=dict)
    kinds: Callable[[int], object] = all_alike
    second_hand: frozenset[str] = frozenset()

    def build(self) -> nn.Module:
        """The model at its real size, on the default device."""
        return self.compose(self.sizes, **self.parts)

    def outline(self) -> nn.Module:
        """The same with one block for all layers of a kind."""
        return self.compose(dataclasses.replace(self.sizes, shared=self.kinds), **self.parts)


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


WHOLE_ROW = frozenset(
    {"Kinds of layers", "Heads", "head_dim", "Theta", "Block", "eps", "Extras", "Experts", "FFN"}
    | {"d_ff", "d_model", "Vocabulary"}
)
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
        ADJACENT,
        second_hand=frozenset({"head_dim", "Theta", "eps", "Extras", "d_ff"}),
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
        second_hand=WHOLE_ROW,
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
        PLUS_ONE,
        second_hand=WHOLE_ROW,
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
        second_hand=frozenset({"d_ff", "eps"}),
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
        ADJACENT,
        second_hand=WHOLE_ROW - {"Kinds of layers"},
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
        second_hand=WHOLE_ROW,
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
        "arXiv:2606.19348 §4.2.1 (copy); 13B leaves the input table out",
        ADJACENT,
        second_hand=frozenset({"Theta", "eps", "FFN", "Vocabulary"}),
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
        second_hand=frozenset({"head_dim", "Theta", "eps", "FFN"}),
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
    """Numbers that one token leaves in the cache of a layer, on average where it pools tokens."""
    if isinstance(attn, IndexedSparseAttention):
        return cache_elements(attn.attn) + attn.index_dim
    if isinstance(attn, (OutputGatedAttention, SharedIndexAttention)):
        return cache_elements(attn.attn)
    if isinstance(attn, GatedDeltaNet):
        return 0
    if isinstance(attn, CompressedAttention):
        pooled = [part for part in (attn.pooling, getattr(attn.index, "pooling", None)) if part]
        return sum(part.width for part in pooled) // pooled[0].rate if pooled else 0
    if isinstance(attn, tb.MultiHeadLatentAttention):
        return attn.kv_rank + attn.rope_dim
    if isinstance(attn, NarrowValueAttention):
        return kv_heads(attn) * (attn.head_dim + attn.v_dim)
    return tb.kv_cache_elements(kv_heads(attn), attn.head_dim)


def fixed_elements(attn: nn.Module) -> int:
    """Numbers that a layer keeps whatever the length: a state, or a window of its own."""
    if isinstance(attn, GatedDeltaNet):
        state = attn.n_v_heads * attn.k_dim * attn.v_dim
        return state + attn.conv.weight.numel() - attn.conv.weight.shape[1]
    if isinstance(attn, CompressedAttention):
        return (attn.window - 1) * attn.head_dim
    return 0


class CacheUse(NamedTuple):
    """Numbers that a kind of layer caches: for each token for ever, and at most besides."""

    layers: int
    grows: int
    fixed: int

    def at(self, length: int) -> int:
        """All layers of the kind, after length tokens (not before the fixed part is full)."""
        return self.layers * (self.grows * length + self.fixed)


def cache_use(model: nn.Module) -> dict[str, CacheUse]:
    """What each kind of layer caches. A window keeps the tokens ahead of the next one."""
    uses: dict[str, CacheUse] = {}
    for number, layer in enumerate(layers_of(model)):
        each, seen = cache_elements(layer.attn), reach(model, number)
        grows, fixed = (each, 0) if seen is None else (0, each * (seen - 1))
        use = CacheUse(1, grows, fixed + fixed_elements(layer.attn))
        kind = kind_of(model, number)
        uses[kind] = use._replace(layers=uses[kind].layers + 1 if kind in uses else 1)
    return uses


def kind_of(model: nn.Module, number: int) -> str:
    """What a layer attends with, in a few words."""
    attn, seen = layers_of(model)[number].attn, reach(model, number)
    if isinstance(attn, GatedDeltaNet):
        return "DeltaNet"
    if isinstance(attn, CompressedAttention):
        if attn.pooling is None:
            return f"window {attn.window}"
        top = f", top {attn.index.top_k}" if attn.index else ""
        return f"window {attn.window} + entries of {attn.pooling.rate}{top}"
    if isinstance(attn, IndexedSparseAttention):
        return f"MLA, index top {attn.top_k:,}"
    if isinstance(attn, SharedIndexAttention):
        return "MLA, shared index"
    if isinstance(attn, tb.MultiHeadLatentAttention):
        return "MLA"
    inner = attn.attn if isinstance(attn, OutputGatedAttention) else attn
    words = [sharing(inner)]
    if inner is not attn:
        words.append("gated")
    if not getattr(inner, "rope", True):
        words.append("unrotated")
    if seen is not None:
        words.append(f"window {seen:,}")
    return " ".join(words)


def linear(module: nn.Module) -> nn.Linear:
    """The Linear of a projection that also norms."""
    return module[0] if isinstance(module, nn.Sequential) else module


def q_heads(attn: nn.Module) -> int:
    if isinstance(attn, tb.MultiHeadLatentAttention):
        return attn.kv_up.out_features // (attn.nope_dim + attn.v_dim)
    return linear(attn.q_proj).out_features // attn.head_dim


def kv_heads(attn: nn.Module) -> int:
    return linear(attn.k_proj).out_features // attn.head_dim


def reach(model: nn.Module, number: int) -> int | None:
    """How many positions a layer sees at most, None for all."""
    attend = getattr(layers_of(model)[number].attn, "attend", None)
    chunk = getattr(attend, "keywords", {}).get("chunk")
    grouped = len(model.windows) != len(layers_of(model))  # no group has a window
    return chunk or (None if grouped else model.windows[number])


def topology(block: nn.Module) -> str:
    if isinstance(block, tb.ParallelDecoderBlock):
        return "parallel, " + ("one norm" if block.ffn_norm is None else "two norms")
    if isinstance(block, HyperConnectedBlock):
        mixed = "not mixed" if isinstance(block.attn_streams, IndependentConnection) else "mixed"
        return f"Pre-LN, {block.n_streams} streams, {mixed}"
    if isinstance(block, tb.BranchNormDecoderBlock):
        return "output norm" if isinstance(block.attn_pre_norm, nn.Identity) else "pre+post"
    return "Pre-LN"


def first_norm(block: nn.Module) -> nn.Module:
    return next(part for part in block.children() if isinstance(part, (nn.LayerNorm, tb.RMSNorm)))


def norm_name(norm: nn.Module) -> str:
    if isinstance(norm, nn.Sequential):
        return f"{norm_name(norm[-1])} of the collapsed streams"
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
    if isinstance(ffn, LimitedGatedFFN):
        return f"SwiGLU, limit {ffn.limit:g}"
    gated = isinstance(ffn, tb.GatedFFN)
    names = {F.silu: "SwiGLU", tanh_gelu: "GeGLU"} if gated else {tanh_gelu: "tanh GELU"}
    return names.get(ffn.act, "GELU")


def ffn_widths(model: nn.Module) -> tuple[int, int | None]:
    """d_ff of an expert, or of every layer, and that of a mixture's dense layers."""
    ffns = [layer.ffn for layer in layers_of(model)]
    routed = [ffn.experts[0].up.out_features for ffn in ffns if isinstance(ffn, tb.MixtureFFN)]
    plain = [ffn.up.out_features for ffn in ffns if not isinstance(ffn, tb.MixtureFFN)]
    return (routed[0], plain[0] if plain else None) if routed else (plain[0], None)


def experts(model: nn.Module) -> str:
    ffns = [layer.ffn for layer in layers_of(model)]
    mixed = [isinstance(ffn, tb.MixtureFFN) for ffn in ffns]
    if not any(mixed):
        return "-"
    first = mixed.index(True)
    mixture = ffns[first]
    expert = getattr(mixture.shared, "expert", mixture.shared)
    shared = expert.up.out_features // ffn_widths(model)[0] if expert else 0
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


def thetas(name: str) -> str:
    """The bases of the rotation, with the layers that turn by each where they are not all."""
    found = collections.Counter()
    for layer in layers_of(outlined(name)):
        parts = [part for part in layer.attn.modules() if getattr(part, "rope_dim", 0)]
        hooks = [hook for part in parts for hook in part._forward_pre_hooks.values()]
        own = next((hook.theta for hook in hooks if isinstance(hook, OwnTables)), None)
        if parts:
            found[own or f"{ROWS[name].sizes.base:,.0f}"] += 1
    alone = found.total() == len(layers_of(outlined(name))) and len(found) == 1
    return "; ".join(theta if alone else f"{theta} ({n})" for theta, n in found.items())


def head_widths(attn: nn.Module) -> tuple[str, str]:
    """Heads of queries and keys, and channels of a head, in words."""
    attn = attn.attn if hasattr(attn, "attn") else attn
    if isinstance(attn, GatedDeltaNet):
        n_k = attn.q_proj.out_features // attn.k_dim
        return f"{n_k} k, {attn.n_v_heads} v", f"{attn.k_dim}"
    if isinstance(attn, CompressedAttention):
        return f"{len(attn.attend.sinks)} / 1", f"{attn.head_dim}"
    if isinstance(attn, tb.MultiHeadLatentAttention):
        heads = attn.kv_up.out_features // (attn.nope_dim + attn.v_dim)
        return f"{heads} / -", f"{attn_width(attn)}; v {attn.v_dim}"
    narrow = f"; v {attn.v_dim}" if isinstance(attn, NarrowValueAttention) else ""
    return f"{q_heads(attn)} / {kv_heads(attn)}", f"{attn.head_dim}{narrow}"


def found_extras(model: nn.Module) -> str:
    """What else the layers have, each with their number where it is not all."""
    layers, found = layers_of(model), collections.Counter()
    for layer in layers:
        parts = list(layer.attn.modules())
        names = {type(part) for part in parts}
        queries = getattr(layer.attn, "q_proj", None)
        scaled = isinstance(layer.attn, NarrowValueAttention)
        holds = {
            "sinks": tb.SinkAttention in names,
            "output gate": bool(names & {OutputGatedAttention, GatedLatentAttention}),
            "QK-norm per head": any(getattr(part, "k_norm", None) is not None for part in parts),
            "QK-norm, whole q and k": isinstance(queries, nn.Sequential),
            "grouped output": isinstance(layer.attn, CompressedAttention),
            f"values x {layer.attn.value_scale if scaled else 1:g}": scaled,
            "experts by token id": isinstance(layer.ffn, HashMixtureFFN),
            "gated shared expert": isinstance(
                getattr(layer.ffn, "shared", None), GatedSharedExpert
            ),
        }
        found.update(name for name, there in holds.items() if there)
    words = [word if n == len(layers) else f"{word} ({n})" for word, n in found.items()]
    words += ["tied"] if model.lm_head is None else []
    return ", ".join(words) or "none"


def active_parameters(model: nn.Module) -> list[int]:
    """Parameters that a token uses: with both vocabulary tables, without the input one (a tied one
    stays: it is the head), without both."""
    both = all_parameters(model) - idle_parameters(model)
    table, head = count(model.embedding), count(model.lm_head)
    return [both, both - table, both - table - head] if head else [both, both, both - table]


ACTIVE = ("Both tables in", "Input table out", "Both out")


@cache
def cells_2026(name: str) -> dict[str, str]:
    """The cells of a later row: from the composed model. What rounds to the published number of
    active parameters is bold; a * marks what only copies of a configuration bear out."""
    recipe, model = ROWS[name], outlined(name)
    layers, uses = layers_of(model), cache_use(model)
    kinds = collections.Counter(kind_of(model, number) for number in range(len(layers)))
    heads = dict.fromkeys(head_widths(layer.attn) for layer in layers)
    width, plain = ffn_widths(model)
    total, published = recipe.published
    active, length = active_parameters(model), 131072
    if published is None:
        published, printed = total, "-"
    else:
        printed = f"{published / 1e9:g} B"
    shown = {
        "Kinds of layers": "; ".join(f"{n} {kind}" for kind, n in kinds.items()),
        "Heads": "; ".join(dict.fromkeys(text for text, _ in heads)),
        "head_dim": ", ".join(dict.fromkeys(text for _, text in heads)),
        "Theta": thetas(name),
        "Block": topology(layers[0]),
        "eps": f"{first_norm(layers[0]).eps:.0e}".replace("e-0", "e-"),
        "Extras": found_extras(model),
        "Experts": experts(model),
        "FFN": ffn_name(layers[-1].ffn),
        "d_ff": f"{width:,}" + (f"; dense {plain:,}" if plain else ""),
        "d_model": f"{recipe.sizes.d_model:,}",
        "Vocabulary": f"{recipe.sizes.vocab_size:,}",
        "Total": f"{all_parameters(model):,}",
        "Published": f"{total / 1e9:,g} B / {printed}",
        "Numbers a token": f"{sum(use.layers * use.grows for use in uses.values()):,}",
        "Fixed numbers": f"{sum(use.layers * use.fixed for use in uses.values()):,}",
        "GiB at 131,072": f"{2 * sum(use.at(length) for use in uses.values()) / 2**30:.2f}",
    }
    for column, number in zip(ACTIVE, active):
        text = billions(number)
        shown[column] = f"**{text}**" if round(number / 1e9) == published / 1e9 else text
    marked = recipe.second_hand
    return {c: text + (" *" if c in marked else "") for c, text in shown.items()}


TABLES_2026 = {  # title: column: alignment
    "attention, 2025 and 2026": {
        "Kinds of layers": "---",
        "Heads": "---",
        "head_dim": "---",
        "Theta": "---",
        "Extras": "---",
    },
    "FFN, experts, width, 2025 and 2026": {
        "Experts": "---",
        "FFN": "---",
        "d_ff": "---",
        "d_model": "--:",
        "Vocabulary": "--:",
    },
    "norms and cache, 2025 and 2026": {
        "Block": "---",
        "eps": "--:",
        "Numbers a token": "--:",
        "Fixed numbers": "--:",
        "GiB at 131,072": "--:",
    },
    "counts, 2025 and 2026": {
        "Total": "--:",
        **dict.fromkeys(ACTIVE, "--:"),
        "Published": "---",
    },
}

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
    "norms, biases, tying": {
        "Topology": "---",
        "Norm": "---",
        "eps": "--:",
        "Biases": "---",
        "Tied": "---",
    },
    "vocabulary, positions, windows": {
        "Vocabulary": "--:",
        **dict.fromkeys(("Position", "Pairs", "Theta", "Window"), "---"),
    },
    "layers and attention": {
        "Layers": "--:",
        "Sharing": "---",
        "Heads q / kv": "--:",
        "head_dim": "--:",
        "Extras": "---",
    },
    "width, FFN, experts": {
        "d_model": "--:",
        "FFN": "---",
        "d_ff": "---",
        "d_ff / d_model": "--:",
        "Experts": "---",
    },
}


def markdown_table(
    columns: dict[str, str],
    names: Iterable[str] = tuple(RECIPES),
    read: Callable[[str], dict[str, str]] = cells,
) -> str:
    """A table of the notes: these columns of these models."""
    first = ":--" if ":--" in columns.values() else "---"
    rows = [["Model", *columns], [first, *columns.values()]]
    rows += [[name, *(read(name)[column] for column in columns)] for name in names]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = lines[1].replace(" ", "")
    return "\n".join(lines)


# =============================================================================================
# Command line
# =============================================================================================


def overview() -> str:
    rows = [["Model", "Layers", "d_model", "Parameters", "Active", "KiB a token"]]
    for name, recipe in ROWS.items():
        model = outlined(name)
        layers, total = layers_of(model), all_parameters(model)
        cached = sum(cache_elements(layer.attn) for layer in layers)
        active = total - idle_parameters(model)
        row = [f"{len(layers)}", f"{recipe.sizes.d_model:,}", billions(total), billions(active)]
        rows.append([name, *row, f"{2 * cached / 1024:,.1f}".removesuffix(".0")])
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
    if isinstance(module, GatedSharedExpert):
        return f"{name}({described(module.expert)})"
    if isinstance(module, (OutputGatedAttention, SharedIndexAttention)):
        return f"{name}({described(module.attn)})"
    if isinstance(module, IndexedSparseAttention):
        heads = module.index_q.out_features // module.index_dim
        index = f"top {module.top_k:,} by {heads} index heads of {module.index_dim}"
        return f"{name}({index}; {described(module.attn)})"
    if isinstance(module, GatedDeltaNet):
        heads, width = head_widths(module)
        return f"{name}({heads} heads of {width}, convolution over {module.conv_width})"
    if isinstance(module, CompressedAttention):
        parts = [f"{head_widths(module)[0]} heads of {module.head_dim}, window {module.window}"]
        if module.pooling is not None:
            overlap = ", overlapping" if module.pooling.overlap else ""
            parts.append(f"entries of {module.pooling.rate} tokens{overlap}")
        if module.index is not None:
            parts.append(f"top {module.index.top_k} of them")
        return f"{name}({'; '.join(parts)})"
    if isinstance(module, NarrowValueAttention):
        heads, _ = head_widths(module)
        attend = getattr(module.attend, "__name__", type(module.attend).__name__)
        values = f"values {module.v_dim} x {module.value_scale:g}"
        return f"{name}({heads} heads of {module.head_dim}, {values}, {attend})"
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
    if isinstance(module, (tb.DenseFFN, tb.GatedFFN, tb.ClampedGatedFFN, LimitedGatedFFN)):
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
    for number, layer in enumerate(layers_of(model)):
        parts = type(layer).__name__, described(layer.attn), described(layer.ffn)
        groups[(*parts, reach(model, number))].append(number)
    return groups


def numbers(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:6]))
    return f"{len(layers)} layers: {shown}{', ...' if len(layers) > 6 else ''}"


def details(name: str) -> str:
    """How a model is composed, what each part holds and what a token costs."""
    recipe, model = ROWS[name], outlined(name)
    lines = [
        name,
        "",
        f"composed as {type(model).__name__}, final norm {norm_name(model.final_norm)}",
    ]
    blocks = layers_of(model)
    for (block, attn, ffn, seen), layers in layer_groups(model).items():
        first = blocks[layers[0]]
        lines += [
            f"  {numbers(layers)}",
            f"    {block}: {topology(first)}, {norm_name(first_norm(first))}",
            f"    attn  {attn}" + (f", sees {seen:,} positions" if seen else ""),
            f"    ffn   {ffn}",
        ]
    total, idle = all_parameters(model), idle_parameters(model)
    head = count(model.lm_head)
    tables = count(model.embedding, getattr(model, "positions", None))
    held = {
        "embedding": tables,
        "attention": count(*(block.attn for block in blocks)),
        "FFN": count(*(block.ffn for block in blocks)),
        "streams": sum(count(*stream_parts(block)) for block in blocks),
        "norms": sum(
            count(block) - count(block.attn, block.ffn, *stream_parts(block)) for block in blocks
        ),
        "final norm": count(model.final_norm),
        "head": head,
        "total": total,
        "active": total - idle,
    }
    lines += ["", "parameters"]
    lines += [f"  {part:<10}  {number:>19,}" for part, number in held.items() if number]
    if name in RECIPES_2026:
        for way, number in zip(ACTIVE[1:], active_parameters(model)[1:]):
            lines.append(f"    {way.lower():<16}{number:>15,}")
    lines += [
        f"  published   {recipe.published[0]:>19,.0f}  ({recipe.source})",
        "",
        "a token costs",
    ]
    # A matrix of n numbers takes n multiplications and n additions; the input table is looked up.
    matrices = total - idle - (0 if model.lm_head is None else tables)
    cached = sum(cache_elements(block.attn) for block in blocks)
    lines.append(f"  {2 * matrices / 1e9:,.1f} GFLOP in the matrices")
    if name in RECIPES:
        reads = sum(2 * q_heads(b.attn) * value_and_key(b.attn) for b in blocks)
        lines.append(f"  {reads:,} FLOP in the attentions for each position seen")
    lines.append(
        f"  {2 * cached:,} bytes of cache at 16 bit, {2 * cached // len(blocks):,} a layer"
    )
    if name in RECIPES_2026:
        lines += ["", "cached by kind of layer, numbers"]
        for kind, use in cache_use(model).items():
            lines.append(f"  {use.layers} x {kind}: {use.grows:,} a token, {use.fixed:,} fixed")
    short = [layer for layer in range(len(blocks)) if reach(model, layer)]
    if short:
        most = f"keep {reach(model, short[0]):,} positions at most"
        lines.append(f"  {len(short)} of {len(blocks)} layers {most}")
    return "\n".join(lines)


def stream_parts(block: nn.Module) -> list[nn.Module]:
    """What a block on several streams has in place of its additions."""
    names = ("attn_streams", "ffn_streams")
    return [getattr(block, name) for name in names if hasattr(block, name)]


def value_and_key(attn: nn.Module) -> int:
    """Numbers that one query head multiplies for each position: with a key, then a value."""
    if isinstance(attn, tb.MultiHeadLatentAttention):  # in decoding, where nothing is expanded
        return 2 * attn.kv_rank + attn.rope_dim
    return 2 * attn.head_dim


def answer(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the model that is asked for, or all; the exit status."""
    wanted = " ".join(options.name)
    known = {name.casefold(): name for name in ROWS}
    if wanted and wanted.casefold() not in known:
        near = tb.main_nearest(wanted, ROWS) or ROWS
        parser.error(f"no model {wanted!r}; nearest: {', '.join(near)}")
    print(details(known[wanted.casefold()]) if wanted else overview())
    return 0


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="recipes.py",
        description=__doc__.partition("\n")[0],
        epilog='names: "Llama-3 8B", "gpt-oss 20b", ... in any case; without one, all are listed',
    )
    parser.add_argument("name", nargs="*", help="a model of the table")
    return tb.main_program(parser, argv, partial(answer, parser))


if __name__ == "__main__":
    sys.exit(main())
