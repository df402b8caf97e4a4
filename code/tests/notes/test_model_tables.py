"""The recipe tables of the notes against the library's own model definitions.

Every row is built twice with the checkpoint's sizes as far as they are known: at full size on the meta device (shapes, counts,
switches) and shrunk on the CPU (what is added to what, which channels a rotation pairs, what a norm subtracts). A cell is compared
with what those two models show. What no model definition can tell is compared with FACTS, each with its source.
Class defaults of the library are often not the checkpoint's values: every size that differs is given in CHECKPOINTS.
"""

import importlib
import inspect
import re
import sys
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
import transformers

from judge.notes import section_of
from notes import build

NOTES = build.NOTES.read_text(encoding="utf-8")


def rope(theta, **more):
    return {"rope_type": "default", "rope_theta": theta, **more}


def llama(d, h, layers, q, kv, vocab, theta, eps=1e-5, tied=False, **more):
    return dict(
        hidden_size=d,
        intermediate_size=h,
        num_hidden_layers=layers,
        num_attention_heads=q,
        num_key_value_heads=kv,
        vocab_size=vocab,
        rms_norm_eps=eps,
        rope_parameters=rope(theta),
        tie_word_embeddings=tied,
        **more,
    )


def llama3_scaling(factor):
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


GEMMA3_ROPE = {"sliding_attention": rope(10000.0), "full_attention": rope(1000000.0)}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# name: (configuration class, what differs from its defaults, parameters counted on the meta device, what the authors print, source)
CHECKPOINTS = {
    "GPT-2 XL": (
        "GPT2Config",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25},
        1_557_611_200,
        1.5e9,
        "openai/gpt-2 src/model.py; 1558M in its README",
    ),
    "GPT-J 6B": (
        "GPTJConfig",
        {},
        6_050_882_784,
        6.053e9,
        "kingoflolz/mesh-transformer-jax configs/6B_roto_256.json, README",
    ),
    "GPT-NeoX 20B": (
        "GPTNeoXConfig",
        {"hidden_act": "gelu_new"},
        20_554_567_680,
        20.6e9,
        "EleutherAI/gpt-neox configs/20B.yml (bias_gelu_fusion is the tanh form)",
    ),
    "Llama-1 7B": (
        "LlamaConfig",
        llama(4096, 11008, 32, 32, 32, 32000, 10000.0, eps=1e-6),
        6_738_415_616,
        6.7e9,
        "arXiv:2302.13971",
    ),
    "Llama-2 7B": (
        "LlamaConfig",
        llama(4096, 11008, 32, 32, 32, 32000, 10000.0),
        6_738_415_616,
        6.7e9,
        "arXiv:2307.09288",
    ),
    "Llama-2 70B": (
        "LlamaConfig",
        llama(8192, 28672, 80, 64, 8, 32000, 10000.0),
        68_976_648_192,
        69e9,
        "arXiv:2307.09288",
    ),
    "Llama-3 8B": (
        "LlamaConfig",
        llama(4096, 14336, 32, 32, 8, 128256, 500000.0),
        8_030_261_248,
        8e9,
        "meta-llama/llama3",
    ),
    "Llama-3 70B": (
        "LlamaConfig",
        llama(8192, 28672, 80, 64, 8, 128256, 500000.0),
        70_553_706_496,
        70.6e9,
        "meta-llama/llama3",
    ),
    "Llama-3.1 405B": (
        "LlamaConfig",
        {
            **llama(16384, 53248, 126, 128, 8, 128256, 500000.0),
            "rope_parameters": llama3_scaling(8.0),
        },
        405_853_388_800,
        405e9,
        "arXiv:2407.21783",
    ),
    "Llama-3.2 1B": (
        "LlamaConfig",
        {
            **llama(2048, 8192, 16, 32, 8, 128256, 500000.0, tied=True),
            "head_dim": 64,
            "rope_parameters": llama3_scaling(32.0),
        },
        1_235_814_400,
        1.23e9,
        "meta-llama/llama-models",
    ),
    "Llama-4 Scout": (
        "Llama4TextConfig",
        {
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "rope_parameters": llama3_scaling(16.0),
        },
        107_769_861_120,
        109e9,
        "meta-llama/llama-models (109B counts the vision part)",
    ),
    "Llama-4 Maverick": (
        "Llama4TextConfig",
        {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        400_711_848_960,
        400e9,
        "meta-llama/llama-models",
    ),
    "Mistral 7B v0.1": (
        "MistralConfig",
        {"rms_norm_eps": 1e-5, "rope_parameters": rope(10000.0), "sliding_window": 4096},
        7_241_732_096,
        7.2e9,
        "arXiv:2310.06825; Lightning-AI/litgpt config.py",
    ),
    "Mixtral 8x7B": (
        "MixtralConfig",
        {"rope_parameters": rope(1000000.0)},
        46_702_792_704,
        47e9,
        "arXiv:2401.04088",
    ),
    "Qwen2/2.5 7B": (
        "Qwen2Config",
        llama(3584, 18944, 28, 28, 4, 152064, 1000000.0, eps=1e-6),
        7_615_616_512,
        7.6e9,
        "arXiv:2407.10671, arXiv:2412.15115",
    ),
    "Qwen3 8B": (
        "Qwen3Config",
        llama(4096, 12288, 36, 32, 8, 151936, 1000000.0, eps=1e-6, head_dim=128),
        8_190_735_360,
        8.2e9,
        "arXiv:2505.09388; meta-pytorch/torchtune",
    ),
    "Qwen3 30B-A3B": (
        "Qwen3MoeConfig",
        dict(
            llama(2048, 6144, 48, 32, 4, 151936, 1000000.0, eps=1e-6, head_dim=128),
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
        30_532_122_624,
        30.5e9,
        "arXiv:2505.09388",
    ),
    "Gemma-1 2B": (
        "GemmaConfig",
        {
            "vocab_size": 256000,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
        2_506_172_416,
        2.5e9,
        "google/gemma_pytorch config.py",
    ),
    "Gemma-1 7B": (
        "GemmaConfig",
        {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
        },
        8_537_680_896,
        8.5e9,
        "google/gemma_pytorch config.py",
    ),
    "Gemma-2 9B": (
        "Gemma2Config",
        {
            "vocab_size": 256000,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
        },
        9_241_705_984,
        9.24e9,
        "arXiv:2408.00118 Table 2",
    ),
    "Gemma-2 27B": (
        "Gemma2Config",
        {
            "vocab_size": 256000,
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_hidden_layers": 46,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 144,
        },
        27_227_128_320,
        27.2e9,
        "arXiv:2408.00118 Table 2",
    ),
    "Gemma-3 1B": (
        "Gemma3TextConfig",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "rope_parameters": GEMMA3_ROPE,
        },
        999_885_952,
        1.0e9,
        "arXiv:2503.19786 Table 1; google/gemma_pytorch config.py",
    ),
    "Gemma-3 27B": (
        "Gemma3TextConfig",
        {
            "vocab_size": 262144,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "rope_parameters": {
                **GEMMA3_ROPE,
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        },
        27_009_002_240,
        27.0e9,
        "arXiv:2503.19786 Table 1; google/gemma_pytorch config.py",
    ),
    "DeepSeek-V2": (
        "DeepseekV2Config",
        {
            "vocab_size": 102400,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_parameters": YARN,
        },
        235_741_434_880,
        236e9,
        "deepseek-ai/DeepSeek-V3 inference/configs/config_236B.json; arXiv:2405.04434",
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {"rope_parameters": YARN},
        671_026_404_352,
        671e9,
        "deepseek-ai/DeepSeek-V3 inference/configs/config_671B.json; arXiv:2412.19437",
    ),
    "OLMo-2 7B": (
        "Olmo2Config",
        {
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope(500000.0),
        },
        7_298_617_344,
        7.3e9,
        "allenai/OLMo configs",
    ),
    "Phi-2": (
        "PhiConfig",
        {
            "vocab_size": 51200,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "rope_parameters": rope(10000.0, partial_rotary_factor=0.4),
        },
        2_779_683_840,
        2.7e9,
        "Lightning-AI/litgpt config.py",
    ),
    "Falcon 7B": ("FalconConfig", {}, 6_921_720_704, 7e9, "Lightning-AI/litgpt config.py"),
    "Falcon 40B": (
        "FalconConfig",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        41_303_293_952,
        41e9,
        "Lightning-AI/litgpt config.py",
    ),
    "Command-R 35B": (
        "CohereConfig",
        {},
        34_980_831_232,
        35e9,
        "class defaults; public copies of the v01 configuration",
    ),
    "gpt-oss 20b": (
        "GptOssConfig",
        {"num_hidden_layers": 24, "num_local_experts": 32},
        20_914_757_184,
        20.9e9,
        "openai/gpt-oss model card",
    ),
    "gpt-oss 120b": (
        "GptOssConfig",
        {"num_hidden_layers": 36, "num_local_experts": 128},
        116_829_156_672,
        116.8e9,
        "openai/gpt-oss model card",
    ),
}

# (name, column): (value, source) for what no model definition tells. "n/s": the authors do not state it; "n/c": no primary source.
ADJACENT = (
    "adjacent*",
    "released code rotates adjacent pairs (meta-llama/llama llama/model.py apply_rotary_emb); the port is half-split",
)
MISTRAL = (
    "adjacent*",
    "mistralai/mistral-inference rope.py views adjacent pairs as complex; the port is half-split",
)
GPT3 = "arXiv:2005.14165 section 2.1 and Table 2.1"
PALM = "arXiv:2204.02311 sections 2 and 5, Table 1"
FACTS = {
    **{
        (m, "Pairs"): ADJACENT
        for m in (
            "Llama-1 7B",
            "Llama-2 7B",
            "Llama-2 70B",
            "Llama-3 8B",
            "Llama-3 70B",
            "Llama-3.1 405B",
            "Llama-3.2 1B",
        )
    },
    ("Mistral 7B v0.1", "Pairs"): MISTRAL,
    ("Mixtral 8x7B", "Pairs"): MISTRAL,
    ("Command-R 35B", "Theta"): (
        "n/c",
        "public copies of the configuration and the class default disagree",
    ),
    ("Falcon 7B", "Tied"): (
        "n/c",
        "class default ties; Lightning-AI/litgpt loads a separate lm_head.weight",
    ),
    ("Falcon 40B", "Tied"): (
        "n/c",
        "class default ties; Lightning-AI/litgpt loads a separate lm_head.weight",
    ),
    **{
        ("GPT-3 175B", c): (v, GPT3)
        for c, v in {
            "Topology": "Pre-LN",
            "Norm": "as GPT-2",
            "eps": "n/s",
            "Biases": "n/s",
            "Position": "as GPT-2",
            "Pairs": "-",
            "Theta": "-",
            "Window": "banded sparse, alternating",
            "Sharing": "MHA",
            "Heads q / kv": "96 / 96",
            "head_dim": "128",
            "Extras": "none stated",
            "FFN": "as GPT-2",
            "d_ff": "49,152",
            "d_ff / d_model": "4.00",
            "Experts": "-",
            "Layers": "96",
            "d_model": "12,288",
            "Vocabulary": "n/s",
            "Tied": "n/s",
        }.items()
    },
    **{
        ("PaLM 540B", c): (v, PALM)
        for c, v in {
            "Topology": "parallel",
            "Norm": "LayerNorm, no bias",
            "eps": "n/s",
            "Biases": "none",
            "Position": "RoPE",
            "Pairs": "n/s",
            "Theta": "n/s",
            "Window": "none",
            "Sharing": "MQA",
            "Heads q / kv": "48 / 1",
            "head_dim": "256",
            "Extras": "logits scaled",
            "FFN": "SwiGLU",
            "d_ff": "73,728",
            "d_ff / d_model": "4.00",
            "Experts": "-",
            "Layers": "118",
            "d_model": "18,432",
            "Vocabulary": "256k",
            "Tied": "yes",
        }.items()
    },
}
NAMES = [
    *list(CHECKPOINTS)[:1],
    "GPT-3 175B",
    *list(CHECKPOINTS)[1:3],
    "PaLM 540B",
    *list(CHECKPOINTS)[3:],
]


# ---------------------------------------------------------------- the models


@lru_cache(None)
def full(name):
    cls, kwargs, *_ = CHECKPOINTS[name]
    config = getattr(transformers, cls)(**kwargs)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


@lru_cache(None)
def small(name):
    """The same class and switches, shrunk to run on the CPU, with random norm weights and biases."""
    cls, kwargs, *_ = CHECKPOINTS[name]
    big = getattr(transformers, cls)(**kwargs)
    q, kv = q_kv_heads(full(name))
    kv = {q: 4, 1: 1}.get(kv, 2)
    cut = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 16,
        "num_experts": 8,
        "num_local_experts": 8,
        "num_kv_heads": kv,
        "first_k_dense_replace": 1,
        "ffn_hidden_size": 64,
    }
    if big.model_type in ("gptj", "gpt2"):
        cut = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 64}
    given = {
        **kwargs,
        **{k: v for k, v in cut.items() if hasattr(big, k)},
        "attn_implementation": "eager",
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    if hasattr(big, "kv_lora_rank"):
        given.update(head_dim=8, n_group=2, topk_group=1, num_experts_per_tok=2)
    if big.model_type == "falcon":
        given.pop("head_dim")
    if big.model_type == "phi":
        given["rope_parameters"] = rope(10000.0, partial_rotary_factor=0.5)
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, cls)(**given))
        .float()
        .eval()
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def layers(model):
    return next(
        m
        for n, m in model.named_modules()
        if n.split(".")[-1] in ("layers", "h") and isinstance(m, torch.nn.ModuleList)
    )


def part(layer, *names):
    return next(getattr(layer, n) for n in names if hasattr(layer, n))


def attention(layer):
    found = part(layer, "self_attn", "attn", "attention", "self_attention")
    return getattr(found, "attention", found)


def ffn(layer):
    return part(layer, "mlp", "feed_forward", "block_sparse_moe")


def norms(layer):
    return {n: m for n, m in layer.named_children() if "norm" in n or n.startswith("ln_")}


def embedding(model):
    return model.get_input_embeddings().weight


def modeling(model):
    return sys.modules[type(model).__module__]


def q_kv_heads(model):
    c = model.config.get_text_config()
    q = c.num_attention_heads
    if c.model_type == "falcon":
        return q, (c.num_kv_heads if c.new_decoder_architecture else 1 if c.multi_query else q)
    return q, getattr(c, "num_key_value_heads", None) or q


# ---------------------------------------------------------------- what a model shows


def topology(name):
    """Run the small model and see which tensor each sublayer and each norm of its first layer reads."""
    model, seen = small(name), {}
    layer = layers(model)[0]

    def watch(key):
        def hook(module, args, kwargs, output):
            first = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
            out = output[0] if isinstance(output, tuple) else output
            seen[key] = (first.detach().clone(), out.detach().clone().reshape(first.shape))

        return hook

    watched = {
        "layer": layer,
        "attn": part(layer, "self_attn", "attn", "attention", "self_attention"),
        "ffn": ffn(layer),
        **{f"norm {n}": m for n, m in norms(layer).items()},
    }
    handles = [m.register_forward_hook(watch(k), with_kwargs=True) for k, m in watched.items()]
    with torch.no_grad():
        model(
            torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(1)), use_cache=False
        )
    for handle in handles:
        handle.remove()

    def same(a, b):
        return a.shape == b.shape and torch.allclose(a, b, atol=1e-5)

    (x, y), (a_in, a_out), (f_in, f_out) = seen["layer"], seen["attn"], seen["ffn"]

    def read_by(t):
        return [k for k, (i, _) in seen.items() if k.startswith("norm") and same(i, t)]

    def gives(t):
        return [k for k, (_, o) in seen.items() if k.startswith("norm") and same(o, t)]

    plain = same(y, x + a_out + f_out)
    before = [k for k in gives(a_in) if same(seen[k][0], x)]
    if plain and before and any(same(seen[k][0], x + a_out) for k in gives(f_in)):
        return "Pre-LN"
    if plain and before and same(a_in, f_in):
        return "parallel, one norm"
    if plain and before and any(same(seen[k][0], x) and k not in before for k in gives(f_in)):
        return "parallel, two norms"
    after_a, after_f = read_by(a_out), read_by(f_out)
    if after_a and after_f:
        middle = x + seen[after_a[0]][1]
        if same(y, middle + seen[after_f[0]][1]):
            if before and any(same(seen[k][0], middle) for k in gives(f_in)):
                return "pre+post"
            if same(a_in, x) and same(f_in, middle):
                return "output norm"
    return "Post-LN" if read_by(x + a_out) else "unknown"


def norm_of(name):
    """What the layer norm does to a shift of its input, and which weight makes it the plain norm."""
    norm = next(iter(norms(layers(small(name))[0]).values()))
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        bias = getattr(norm, "bias", None)
        shift_free = torch.allclose(norm(x), norm(x + 5.0), atol=1e-4)
        saved = norm.weight.clone()
        norm.weight.zero_()
        zero = norm(x) - (bias if bias is not None else 0.0)
        norm.weight.copy_(saved)
    plus_one = not torch.allclose(zero, torch.zeros_like(zero), atol=1e-6)
    return (
        ("LayerNorm" + ("" if bias is not None else ", no bias"))
        if shift_free
        else "RMSNorm" + (", 1+w" if plus_one else "")
    )


def eps_of(name):
    norm = next(iter(norms(layers(full(name))[0]).values()))
    value = next(getattr(norm, n) for n in ("variance_epsilon", "eps") if hasattr(norm, n))
    return f"{value:.0e}".replace("e-0", "e-")


def biases(name):
    groups = set()
    for parameter, _ in full(name).named_parameters():
        if not parameter.endswith("bias") and not parameter.endswith("_bias"):
            continue
        owner = ".".join(parameter.split(".")[:-1])
        leaf = owner.split(".")[-1]
        if "lm_head" in owner:
            groups.add("head")
        elif "norm" in leaf or leaf.startswith("ln_"):
            groups.add("norms")
        elif "experts" in owner:
            groups.add("experts")
        elif "router" in owner:
            groups.add("router")
        elif any(k in parameter for k in ("attn", "attention")):
            groups.add(
                "o" if leaf in ("o_proj", "c_proj", "out_proj") or leaf == "dense" else "qkv"
            )
        else:
            groups.add("FFN")
    words = {
        frozenset(): "none",
        frozenset({"qkv"}): "q, k, v",
        frozenset({"norms"}): "norms",
        frozenset({"qkv", "o", "FFN", "norms"}): "all",
        frozenset({"qkv", "o", "FFN", "norms", "head"}): "all, head",
        frozenset({"FFN", "norms", "head"}): "FFN, norms, head",
        frozenset({"qkv", "o", "experts", "router"}): "attention, experts, router",
    }
    return words.get(frozenset(groups), str(sorted(groups)))


def head_dims(name):
    c = full(name).config.get_text_config()
    if hasattr(c, "kv_lora_rank"):
        return c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    a = attention(layers(full(name))[0])
    d = a.head_dim if hasattr(a, "head_dim") else a.head_size
    return d, d


def position(name):
    model = full(name)
    c = model.config.get_text_config()
    if any(n.endswith("wpe") for n, _ in model.named_modules()):
        return "learned"
    width = head_dims(name)[0]
    if c.model_type == "gptj":
        turned = attention(layers(model)[0]).rotary_dim
    else:
        turned = 2 * next(b.shape[-1] for n, b in model.named_buffers() if n.endswith("inv_freq"))
    if hasattr(c, "no_rope_layers"):
        used = [bool(attention(l).use_rope) for l in layers(model)]
        assert turned == width and used == [(i + 1) % 4 != 0 for i in range(len(used))]
        return "RoPE, 3 of 4 layers"
    return "RoPE, full" if turned == width else f"RoPE, {turned} of {width}"


def pairs(name):
    """Rotate the first unit vector and see which other channel it leaks into."""
    model = full(name)
    module, c = modeling(model), model.config.get_text_config()
    source = inspect.getsource(type(attention(layers(model)[0])).forward)
    x = torch.zeros(1, 1, 1, 8)
    x[..., 0] = 1.0
    angle = torch.tensor([0.3, 0.5, 0.7, 0.9])
    if c.model_type == "gpt2":
        return "-"
    if c.model_type == "gptj":
        assert "apply_rotary_pos_emb" in source
        out = module.apply_rotary_pos_emb(x, angle.sin().view(1, 1, 4), angle.cos().view(1, 1, 4))
    elif "apply_rotary_emb(" in source and "apply_rotary_pos_emb" not in source:
        turn = torch.polar(torch.ones(4), angle).view(1, 1, 4)
        out = module.apply_rotary_emb(x, x, turn)[0]
    elif "apply_rotary_pos_emb_interleave" in source:
        assert c.rope_interleave, name
        both = torch.cat([angle, angle]).view(1, 1, 8)
        out = module.apply_rotary_pos_emb_interleave(x, x, both.cos(), both.sin())[0]
        # the port moves even channels to the front before it turns halves: undo that to see which channels it pairs
        out = out.view(2, 4).t().reshape(1, 1, 1, 8)
    else:
        assert "apply_rotary_pos_emb(" in source
        both = torch.cat([angle, angle]).view(1, 1, 8)
        if c.model_type == "gpt_oss":
            both = angle.view(1, 1, 4)
        if c.model_type == "cohere":
            both = angle.repeat_interleave(2).view(1, 1, 8)
        out = module.apply_rotary_pos_emb(x, x, both.cos(), both.sin())[0]
    return {1: "adjacent", 4: "half-split"}[int(out.flatten()[1:].abs().argmax()) + 1]


def theta(name):
    c = full(name).config.get_text_config()
    if c.model_type == "gpt2":
        return "-"
    if c.model_type == "gptj":
        return f"{int(re.search(r'10000', inspect.getsource(modeling(full(name)).create_sinusoidal_positions)).group()):,}"
    r = c.rope_parameters
    if "full_attention" in r:
        return f"{r['full_attention']['rope_theta']:,.0f}; local {r['sliding_attention']['rope_theta']:,.0f}"
    scaled = {"default": "", "llama3": ", scaled", "yarn": ", YaRN", "linear": ", linear"}[
        r["rope_type"]
    ]
    return f"{r['rope_theta']:,.0f}{scaled}"


def window(name):
    c = full(name).config.get_text_config()
    kinds = getattr(c, "layer_types", None)
    if getattr(c, "attention_chunk_size", None) and kinds:
        assert kinds == [
            "full_attention" if (i + 1) % 4 == 0 else "chunked_attention" for i in range(len(kinds))
        ]
        return f"chunks of {c.attention_chunk_size:,}, 3:1"
    if kinds and "sliding_attention" in kinds:
        n = kinds.index("full_attention")
        assert kinds == [
            "full_attention" if (i + 1) % (n + 1) == 0 else "sliding_attention"
            for i in range(len(kinds))
        ]
        return f"{c.sliding_window:,}, {n}:1, local first"
    if getattr(c, "sliding_window", None) and getattr(c, "use_sliding_window", True):
        return f"{c.sliding_window:,}, every layer"
    return "none"


def sharing(name):
    c = full(name).config.get_text_config()
    if hasattr(c, "kv_lora_rank"):
        down = attention(layers(full(name))[0]).kv_a_proj_with_mqa.weight.shape[0]
        assert down == c.kv_lora_rank + c.qk_rope_head_dim
        return f"MLA, {down} cached"
    q, kv = q_kv_heads(full(name))
    a, (d, _) = attention(layers(full(name))[0]), head_dims(name)
    if hasattr(a, "k_proj"):
        assert (
            a.q_proj.weight.shape[0] == q * d
            and a.k_proj.weight.shape[0] == a.v_proj.weight.shape[0] == kv * d
        )
    else:
        packed = part(a, "c_attn", "query_key_value").weight.shape
        assert (q + 2 * kv) * d in packed, (name, packed)
    return {q: "MHA", 1: "MQA"}.get(kv, "GQA")


def extras(name):
    c, a = full(name).config.get_text_config(), attention(layers(full(name))[0])
    source, found = inspect.getsource(type(a).forward), []
    if hasattr(a, "kv_lora_rank"):
        assert {"q_a_layernorm", "kv_a_layernorm"} <= {n for n, _ in a.named_children()}
        found.append("norm on latents")
    norm = getattr(a, "q_norm", None) or getattr(a, "qk_norm", None)
    if norm is not None and getattr(c, "use_qk_norm", True):
        turn = max(source.find("apply_rotary_pos_emb("), source.find("apply_rotary_emb("))
        before = min(i for i in (source.find("q_norm("), source.find("qk_norm(")) if i >= 0) < turn
        width = norm.weight.shape[0] if getattr(norm, "weight", None) is not None else None
        if width == head_dims(name)[0]:
            assert before, name
            found.append("QK-norm per head")
        elif width == q_kv_heads(full(name))[0] * head_dims(name)[0]:
            assert before, name
            found.append("QK-norm, whole q and k")
        else:
            assert width is None and not before, name
            found.append("QK-norm after RoPE")
    attn_cap, final = (
        getattr(c, "attn_logit_softcapping", None),
        getattr(c, "final_logit_softcapping", None),
    )
    if attn_cap:
        assert "softcap" in source and "final_logit_softcapping" in inspect.getsource(
            type(full(name)).forward
        )
        found.append(f"caps {attn_cap:g}, {final:g}")
    if getattr(a, "sinks", None) is not None:
        found.append("sinks")
    if getattr(c, "logit_scale", None):
        assert "logit_scale" in inspect.getsource(type(full(name)).forward)
        found.append(f"logits x {c.logit_scale:g}")
    return ", ".join(found) or "none"


def experts_of(layer):
    m = ffn(layer)
    return getattr(m, "experts", None)


def ffn_kind(name):
    model = small(name)
    c = model.config.get_text_config()
    layer = layers(model)[-1]
    m = experts_of(layer) or ffn(layer)
    own = {
        n.split(".")[-1] if not n.endswith(".weight") else n.split(".")[-2]
        for n, _ in m.named_parameters()
    }
    gated = any("gate" in n for n in own)
    if c.model_type == "gpt_oss":
        source = inspect.getsource(type(m))
        assert (
            gated
            and m.alpha == 1.702
            and m.limit == 7.0
            and "clamp" in source
            and "(up + 1)" in source
        )
        return "SwiGLU, clamped"
    act = next(getattr(m, n) for n in ("act_fn", "act", "activation_fn") if hasattr(m, n))
    x = torch.linspace(-4, 4, 41)
    fits = {"SiLU": F.silu(x), "GELU": F.gelu(x), "tanh GELU": F.gelu(x, approximate="tanh")}
    kind = next(k for k, v in fits.items() if torch.allclose(act(x), v, atol=1e-6))
    return {"SiLU": "SwiGLU", "tanh GELU": "GeGLU"}[kind] if gated else kind


def widths(name):
    """(expert or only d_ff, d_ff of the dense layers of a mixture or None), from weight shapes."""
    d = full(name).config.get_text_config().hidden_size

    def width(module):
        if hasattr(module, "down_proj") and not isinstance(module.down_proj, torch.nn.Module):
            shape = module.down_proj.shape[1:]
        else:
            last = part(module, "down_proj", "c_proj", "fc_out", "fc2", "dense_4h_to_h")
            shape = last.weight.shape
        return int(shape.numel() // d)

    found = {"moe": None, "dense": None}
    for layer in layers(full(name)):
        e = experts_of(layer)
        found["moe" if e is not None else "dense"] = width(e if e is not None else ffn(layer))
    return (found["moe"], found["dense"]) if found["moe"] else (found["dense"], None)


def d_ff(name):
    own, dense = widths(name)
    return f"{own:,}" + (f"; dense {dense:,}" if dense else "")


def experts(name):
    model = full(name)
    c, kinds = model.config.get_text_config(), [experts_of(l) is not None for l in layers(model)]
    if not any(kinds):
        return "-"
    layer = next(l for l in layers(model) if experts_of(l) is not None)
    routed = next(iter(experts_of(layer).parameters())).shape[0]
    shared = getattr(ffn(layer), "shared_experts", None) or getattr(
        ffn(layer), "shared_expert", None
    )
    n = 0
    if shared is not None:
        n = round(shared.down_proj.weight.shape[1] / widths(name)[0])
    text = f"{routed}" + (f" + {n}" if n else "") + f", top-{c.num_experts_per_tok}"
    if all(kinds):
        return text
    first = kinds.index(True)
    if all(kinds[first:]):
        return text + f", first {first} dense"
    assert kinds == [i % 2 == 1 for i in range(len(kinds))]
    return text + ", every 2nd layer"


def derived(name):
    c = full(name).config.get_text_config()
    q, kv = q_kv_heads(full(name))
    qk, v = head_dims(name)
    mla = hasattr(c, "kv_lora_rank")
    return {
        "Topology": topology(name),
        "Norm": norm_of(name),
        "eps": eps_of(name),
        "Biases": biases(name),
        "Position": position(name),
        "Pairs": pairs(name),
        "Theta": theta(name),
        "Window": window(name),
        "Sharing": sharing(name),
        "Heads q / kv": f"{q} / -" if mla else f"{q} / {kv}",
        "head_dim": f"{qk}; v {v}" if mla else f"{qk}",
        "Extras": extras(name),
        "FFN": ffn_kind(name),
        "d_ff": d_ff(name),
        "d_ff / d_model": f"{widths(name)[0] / embedding(full(name)).shape[1]:.2f}",
        "Experts": experts(name),
        "Layers": f"{len(layers(full(name)))}",
        "d_model": f"{embedding(full(name)).shape[1]:,}",
        "Vocabulary": f"{embedding(full(name)).shape[0]:,}",
        "Tied": "yes"
        if full(name).get_output_embeddings().weight is embedding(full(name))
        else "no",
    }


# ---------------------------------------------------------------- tests


def test_models_in_one_order():
    assert list(build.recipe_cells(NOTES)) == NAMES
    for title, rows in build.recipe_tables(NOTES).items():
        if title != "front" and not title.endswith("2025 and 2026"):
            assert list(rows) == NAMES, f"table {title}"


@pytest.mark.parametrize("name", NAMES)
def test_row(name):
    cells = build.recipe_cells(NOTES)[name]
    want = derived(name) if name in CHECKPOINTS else {}
    want.update({c: v for (n, c), (v, _) in FACTS.items() if n == name})
    assert set(want) == set(cells)
    wrong = {c: (cells[c], want[c]) for c in cells if cells[c] != want[c]}
    assert not wrong, f"{name}: (cell, what the model shows) = {wrong}"


@pytest.mark.parametrize("name", list(CHECKPOINTS))
def test_sizes_give_published_counts(name):
    *_, counted, printed, source = CHECKPOINTS[name]
    assert sum(p.numel() for p in full(name).parameters()) == counted
    assert abs(counted - printed) <= 0.04 * printed, source


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if (n, "Pairs") in FACTS])
def test_ports_turn_halves(name):
    assert pairs(name) == "half-split"


@pytest.mark.parametrize("key", sorted(FACTS))
def test_facts_have_a_source(key):
    value, source = FACTS[key]
    assert value and len(source) > 10


def test_scales_of_gemma_and_queries():
    for name, scalar in {"Gemma-2 27B": 144, "Gemma-3 27B": 168}.items():
        c = full(name).config
        assert (
            c.query_pre_attn_scalar
            == scalar
            == c.hidden_size // c.num_attention_heads
            != c.head_dim
        )
        assert attention(layers(full(name))[0]).scaling == scalar**-0.5
    for name in [n for n in CHECKPOINTS if n.startswith("Gemma")]:
        source = inspect.getsource(modeling(full(name)))
        assert "hidden_size**0.5" in source or "hidden_size ** 0.5" in source, name


def test_a_wrong_cell_is_seen():
    row = next(
        l for l in NOTES.split("\n") if l.startswith("| OLMo-2 7B | output norm | RMSNorm | 1e-6 |")
    )
    broken = build.recipe_cells(NOTES.replace(row, row.replace("output norm", "Pre-LN")))
    assert broken["OLMo-2 7B"]["Topology"] != topology("OLMo-2 7B")


def test_classes_named_after_2025():
    part = section_of(NOTES, "7.6")
    named = {
        name for name in re.findall(r"`([a-z0-9_]+)`", part) if hasattr(transformers.models, name)
    }
    assert named == {
        *("qwen3_next", "kimi_linear", "deepseek_v32", "deepseek_v4"),
        *("gpt_oss", "gemma3n", "minimax", "hy_v4"),
    }
    layers = importlib.import_module("transformers.modeling_layers")
    assert "`MtpLayer`" in part and layers.MtpLayer
    gate = inspect.getsource(transformers.models.qwen3_next.modeling_qwen3_next)
    assert re.search(r"attn_output \* torch\.sigmoid\(gate\)", gate)
    index = inspect.getsource(transformers.models.deepseek_v32.modeling_deepseek_v32)
    assert "relu(" in index and "topk(" in index
    assert "inkhorn" in inspect.getsource(transformers.models.deepseek_v4.modeling_deepseek_v4)
    plain = inspect.getsource(transformers.models.hy_v4.modeling_hy_v4)
    assert "skips the sinkhorn part" in plain and "sinkhorn_iter" not in plain


GATES = {  # a name in the table of section 6: (scores, weight, shared experts, source)
    "Switch": ("softmax over all", "that probability, top-1", "0", "arXiv:2101.03961"),
    "Mixtral 8x7B": (
        "softmax over all",
        "renormalised over the chosen 2, 8",
        "0",
        "MixtralTopKRouter",
    ),
    "Qwen3 30B-A3B": (
        "softmax over all",
        "renormalised over the chosen 2, 8",
        "0",
        "checkpoint norm_topk_prob=true; class default false",
    ),
    "gpt-oss": ("softmax over the chosen 4", "that softmax", "0", "GptOssTopKRouter"),
    "DeepSeek-V2": (
        "softmax over all",
        "not renormalised, times 16",
        "2",
        "deepseek-ai/DeepSeek-V3 inference config_236B.json",
    ),
    "DeepSeek-V3": ("sigmoid", "renormalised over the 8, times 2.5", "1", "DeepseekV3Config"),
    "Llama-4": ("sigmoid, top-1", "multiplies the expert's **input**", "1", "Llama4TextMoe"),
}


def test_gate_table():
    text = NOTES
    rows = [line.strip("|").split("|") for line in text.split("\n") if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 5]
    for model, (*cells, _) in GATES.items():
        (found,) = (row for row in rows if model in row[0].split(", ") and row[1] == cells[0])
        assert [*found[1:3], found[4]] == cells, model

    def source(name, kind):
        return "".join(
            inspect.getsource(o)
            for n, o in vars(modeling(full(name))).items()
            if inspect.isclass(o)
            and o.__module__ == modeling(full(name)).__name__
            and re.search(kind, n)
        )

    v3 = full("DeepSeek-V3").config
    assert (
        v3.routed_scaling_factor == 2.5
        and v3.norm_topk_prob
        and ".sigmoid()" in source("DeepSeek-V3", "Router|MoE|Moe")
    )
    mixtral = source("Mixtral 8x7B", "Router|Sparse")
    assert (
        mixtral.index("softmax(") < mixtral.index("torch.topk(")
        and ".sum(dim=-1, keepdim=True)" in mixtral
    )
    oss = source("gpt-oss 20b", "Router")
    assert oss.index("torch.topk(") < oss.index("softmax(")
    llama4 = source("Llama-4 Scout", "Router|Moe")
    assert "sigmoid(" in llama4 and re.search(r"routed_in = routed_in \* router_scores", llama4)
    assert (
        full("Qwen3 30B-A3B").config.norm_topk_prob
        and not transformers.Qwen3MoeConfig().norm_topk_prob
    )
