"""Every argument of every public function, wrong in every way: refused by name, nothing changed.

CALLS lists the public calls with valid arguments and what kind each argument is; the kinds list
the values that are wrong. Wrong combinations of valid arguments stand in COMBINATIONS. A last
test reads the script and fails when one of its raises or checks is hit by none of these.
"""

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformer_block as tb
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

SCRIPT = Path(tb.__file__)
NO_LIBRARY = ("demo_", "check_", "reference_", "main")

# No two axes are alike and none is 1, so that none can stand in for another.
B, T, S, D, H, G, D_FF, V, MAX_LEN = 3, 4, 5, 12, 6, 2, 10, 11, 20
PAST = 2  # positions in a cache before the call


class Wrong(NamedTuple):
    """A wrong value: a label, the error, what the message must quote, and which names may stand."""

    label: str
    value: object
    error: type
    came: str
    names: tuple[str, ...] = ()


# =============================================================================================
# Kinds of arguments
# =============================================================================================


def objects(error, *values):
    return [Wrong(repr(v)[:20], v, error, repr(v)[:20]) for v in values]


def count(least=1, optional=False):
    wrong = objects(ValueError, least - 1, -7) + objects(TypeError, 1.5, "3", True, [2])
    return wrong if optional else wrong + objects(TypeError, None)


def real(optional=False):
    wrong = objects(ValueError, 0, 0.0, -1.5, math.nan, math.inf, -math.inf)
    wrong += objects(TypeError, "1.0", True, 1j)
    wrong.append(Wrong("tensor", torch.tensor(0.5), TypeError, "tensor(0.5"))
    return wrong if optional else wrong + objects(TypeError, None)


def function():
    return objects(TypeError, 3, "gelu", [])


def cache():
    return [
        Wrong(str(c)[:9], c, TypeError, type(c).__name__) for c in (3, [], "cache", (tb.KVCache(),))
    ]


def tensor(value, kind="floating", free=(), names=(), same_dtype=False, optional=True):
    """Another rank, another size of each axis that is not free, another dtype, no tensor."""
    shapes = {"one axis more": value[None], "one axis less": value[0], "no axis": value.sum()}
    for axis in (axis for axis in range(value.dim()) if axis not in free):
        for size in (1, value.shape[axis] + 1):
            shape = list(value.shape)
            shape[axis] = size
            shapes[f"axis {axis} of {size}"] = torch.ones(shape).to(value.dtype)
    wrong = [
        Wrong(label, t.to(value.dtype), ValueError, "[" if names else str(list(t.shape)), names)
        for label, t in shapes.items()
    ]
    others = {"floating": [torch.int64, torch.bool], "bool": [torch.int64, torch.float32]}
    others |= {"integer": [torch.float32, torch.bool]}
    dtypes = [*others[kind], torch.complex64, *([torch.float64] if same_dtype else [])]
    wrong += [Wrong(str(d), value.to(d), TypeError, str(d), names) for d in dtypes]
    wrong.append(Wrong("list", value.tolist(), TypeError, "list"))
    wrong.append(Wrong("text", "x", TypeError, "str"))
    return wrong if optional else [*wrong, Wrong("None", None, TypeError, "None")]


# =============================================================================================
# The public calls
# =============================================================================================


class Call(NamedTuple):
    """make() gives the function and what it must leave as it was; arguments are valid."""

    make: Callable[[], tuple[Callable, list]]
    arguments: dict
    kinds: dict


def plain(function, arguments, kinds):
    return Call(lambda: (function, []), arguments, kinds)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


COS, SIN = tb.build_rope_cache(MAX_LEN, 2)
X, MEMORY, IDS = draw(B, T, D), draw(B, S, D), torch.arange(B * T).view(B, T) % V
Q, K, VALUES, KEEP = draw(B, 4, T, 6), draw(B, 2, S, 6), draw(B, 2, S, 8), bools(B, 1, T, S)
POSITIONS = torch.arange(T)
COUNT, COUNT_OR_NONE, REAL, REAL_OR_NONE = count(), count(optional=True), real(), real(True)
INDEX_OR_NONE = count(least=0, optional=True)
STREAM = tensor(X, free=(0, 1), same_dtype=True, optional=False)
TABLE = [*tensor(COS, names=("cos", "sin")), Wrong("None", None, ValueError, "None")]
TABLES = {"cos": TABLE, "sin": TABLE}
SIZES = {"d_model": D, "n_q_heads": H, "n_kv_heads": G, "d_ff": D_FF}
CACHES = [
    Wrong("number", 3, TypeError, "int"),
    Wrong("text", "caches", TypeError, "str"),
    Wrong("a cache", tb.KVCache(), TypeError, "KVCache"),
    Wrong("none", [], ValueError, "0"),
    Wrong("one", [tb.KVCache()], ValueError, "1"),
    Wrong("numbers", [1, 2], TypeError, "int", ("kv_cache",)),
]


def keep_kind():
    """A size of 1 and fewer axes broadcast, as documented; heads may not be told apart."""
    odd = [(B + 1, 1, T, S), (B, 2, T, S), (B, 1, T + 1, S), (B, 1, T, S + 1), (1, B, 1, T, S)]
    wrong = [Wrong(str(s), bools(*s), ValueError, str(list(s))) for s in odd]
    return wrong + [w for w in tensor(KEEP, "bool") if w.error is TypeError]


ATTEND_KINDS = {
    "q": tensor(Q, free=(2,), names=("q", "k", "v"), same_dtype=True, optional=False),
    "k": tensor(K, names=("q", "k", "v"), same_dtype=True, optional=False),
    "v": tensor(VALUES, free=(3,), names=("q", "k", "v"), same_dtype=True, optional=False),
    "keep": keep_kind(),
    "scale": REAL_OR_NONE,
}


def seen_kinds(mask, padding):
    """The keyword arguments that every attention takes; a mask may do without the batch axis."""
    return {
        "mask": [w for w in tensor(mask, "bool") if w.label != "one axis less"],
        "key_padding_mask": tensor(padding, "bool"),
        "kv_cache": cache(),
    }


def attention_call(build, rotated):
    """A module behind a cache that already holds PAST positions."""
    options = {"cos": COS, "sin": SIN} if rotated else {}

    def make():
        module, filled = build(), tb.KVCache()
        module(X[:, :PAST], kv_cache=filled, **options)

        def call(**arguments):
            if arguments.get("kv_cache", 0) is None:
                arguments["kv_cache"] = filled
            return module(**arguments)

        return call, [module, filled]

    mask, padding = bools(B, T, PAST + T), bools(B, PAST + T)
    arguments = {"x": X, "mask": mask, "key_padding_mask": padding, "kv_cache": None, **options}
    kinds = {"x": STREAM, **seen_kinds(mask, padding)}
    if rotated:
        kinds |= {**TABLES, "start_pos": INDEX_OR_NONE}
    return Call(make, arguments, kinds)


def cross_call():
    def make():
        module = tb.MultiHeadAttention(D, H, G)
        return module, [module]

    mask, padding = bools(B, T, S), bools(B, S)
    arguments = {"x": X, "memory": MEMORY, "mask": mask, "key_padding_mask": padding}
    memory = tensor(MEMORY, free=(1,), same_dtype=True)
    kinds = {"x": STREAM, "memory": memory, **seen_kinds(mask, padding)}
    del kinds["kv_cache"]
    return Call(make, arguments, kinds)


def layer_call(build, arguments, kinds):
    def make():
        module = build()
        return module, [module]

    return Call(make, arguments, kinds)


def latent(**options):
    widths = {"kv_rank": 5, "rope_dim": 2, "nope_dim": 3, "v_dim": 4}
    return tb.MultiHeadLatentAttention(D, H, **widths | options)


def rotated_parallel():
    return tb.ParallelDecoderBlock(D, d_ff=D_FF, attn=tb.MultiHeadAttention(D, H, G, rope=True))


def model():
    return tb.DecoderOnlyLM(V, D, 2, H, G, D_FF, max_len=MAX_LEN)


def model_call(method):
    def make():
        built = model().train()
        built.blocks[0].eval()
        worked = []  # what is refused is refused before any work
        built.blocks[0].register_forward_hook(lambda *_: worked.append("a block"))
        return getattr(built, method), [built, worked]

    padding = tensor(bools(B, T), "bool")
    ids = tensor(IDS, "integer", free=(0, 1), optional=False)
    ids += [
        Wrong("past V", IDS + V, ValueError, str(V)),
        Wrong("negative", IDS - 1, ValueError, "-1"),
    ]
    if method == "forward":
        ids.append(Wrong("long", torch.zeros(1, MAX_LEN + 1).long(), ValueError, str(MAX_LEN)))
        return Call(
            make,
            {"ids": IDS, "kv_caches": None, "key_padding_mask": bools(B, T)},
            {
                "ids": ids,
                "kv_caches": CACHES,
                "key_padding_mask": padding,
                "mask": [w for w in tensor(bools(B, T, T), "bool") if w.label != "one axis less"],
            },
        )
    if method == "stream":  # what lies in ids is seen by the first step
        ids = [w for w in ids if w.label not in ("past V", "negative")]
    ids.append(Wrong("empty", IDS[:, :0], ValueError, "none"))
    right, hole, nothing = bools(3, B, T)
    right[1, -1] = hole[1, 1] = nothing[1] = False
    too_many = Wrong("too many", MAX_LEN, ValueError, f"max_len={MAX_LEN}")
    return Call(
        make,
        {"ids": IDS, "max_new_tokens": 2, "key_padding_mask": bools(B, T), "temperature": 1.0},
        {
            "ids": ids,
            "max_new_tokens": [*count(least=0), too_many],
            "key_padding_mask": [
                *padding,
                Wrong("right", right, ValueError, "left"),
                Wrong("hole", hole, ValueError, "left"),
                Wrong("nothing but padding", nothing, ValueError, "real"),
            ],
            **SAMPLING,
            "eos_id": EOS_IDS,
        },
    )


ROUTERS = (tb.SoftmaxRouter, tb.SigmoidRouter)
ROUTER = {"d_model": D, "n_experts": 6, "top_k": 2, "n_groups": 3, "top_groups": 2}
ROUTER_KINDS = dict.fromkeys(ROUTER, COUNT) | {
    "scale": REAL,
    "n_groups": [*COUNT, Wrong("no divisor", 4, ValueError, "n_groups=4")],
    "top_groups": [*COUNT, Wrong("over n_groups", 4, ValueError, "4")],
    "top_k": [*COUNT, Wrong("over the open experts", 5, ValueError, "5")],
}


def mixture_arguments():
    """Valid arguments, and the wrong ones; no part draws when the mixture refuses."""
    router = tb.SoftmaxRouter(D, 2, 1)
    experts = [tb.GatedFFN(D, D_FF) for _ in range(2)]
    wrong = {
        "router": objects(TypeError, 3, "router", None),
        "experts": [
            *objects(TypeError, 3, ["a", "b"]),
            Wrong("one of two", experts[:1], ValueError, "1"),
            Wrong("none", [], ValueError, "0"),
        ],
        "shared": objects(TypeError, 3, "ffn"),
    }
    return {"router": router, "experts": experts}, wrong


EOS_IDS = [
    *objects(ValueError, -1, V),
    *objects(TypeError, 1.5, "3", True, IDS[0]),
    Wrong("V among them", [2, V], ValueError, str(V)),
    Wrong("negative among them", (0, -1), ValueError, "-1"),
    Wrong("1.5 among them", {1.5: 2}, TypeError, "1.5"),
    Wrong("text among them", ["3"], TypeError, "'3'"),
]
SAMPLING = {
    "temperature": [w for w in REAL if w.value != 0],
    "top_k": COUNT_OR_NONE,
    "top_p": [*REAL_OR_NONE, Wrong("above 1", 1.25, ValueError, "1.25")],
    "generator": objects(TypeError, 3, "seed"),
}
BLOCK_KINDS = dict.fromkeys(SIZES, COUNT) | {
    "n_kv_heads": COUNT_OR_NONE,
    "attn": objects(TypeError, 3, "mha"),
}
BLOCK_KINDS |= {"ffn": objects(TypeError, 3, "ffn"), "eps": REAL}
LAYER_SIZES = {"d_model": D, "n_heads": H, "d_ff": D_FF}
LAYER_KINDS = dict.fromkeys(LAYER_SIZES, COUNT) | {"act": function(), "eps": REAL}
FFN_KINDS = {"d_model": COUNT, "d_ff": COUNT, "act": function()}
WINDOWS = [
    *objects(TypeError, 3, "windows"),
    Wrong("one", [None], ValueError, "2 blocks"),
    Wrong("zero", [None, 0], ValueError, "0"),
    Wrong("negative", [-2, None], ValueError, "-2"),
    Wrong("fraction", [1.5, None], TypeError, "1.5"),
]

CALLS = {
    "build_causal_mask": plain(
        tb.build_causal_mask,
        {"q_positions": POSITIONS, "k_positions": POSITIONS},
        {
            "q_positions": tensor(POSITIONS, "integer", free=(0,), optional=False),
            "k_positions": tensor(POSITIONS, "integer", free=(0,), optional=False),
            "window": COUNT_OR_NONE,
        },
    ),
    "build_rope_cache": plain(
        tb.build_rope_cache,
        {"max_len": 4, "head_dim": 6},
        {
            "max_len": COUNT,
            "head_dim": [*COUNT, Wrong("odd", 5, ValueError, "5")],
            "base": REAL,
            "dtype": objects(TypeError, torch.int64, torch.complex64, 32, None),
        },
    ),
    "sinusoidal_positions": plain(
        tb.sinusoidal_positions, {"max_len": 4, "d_model": 6}, {"max_len": COUNT, "d_model": COUNT}
    ),
    "apply_rope": plain(
        tb.apply_rope,
        {"x": Q, "cos": draw(T, 4), "sin": draw(T, 4)},
        {
            "x": tensor(Q, free=(0, 1, 3), names=("x", "cos"), optional=False),
            "cos": [
                *tensor(draw(T, 4), names=("cos", "sin")),
                Wrong("wide", draw(T, 8), ValueError, "[", ("sin",)),
            ],
            "sin": [*tensor(draw(T, 4), names=("cos", "sin"))],
        },
    ),
    "attend": plain(
        tb.attend,
        {"q": Q, "k": K, "v": VALUES, "keep": KEEP},
        {**ATTEND_KINDS, "logit_softcap": REAL_OR_NONE},
    ),
    "attend_fused": plain(
        tb.attend_fused,
        {"q": Q, "k": K, "v": VALUES, "keep": KEEP},
        {**ATTEND_KINDS, "logit_softcap": objects(ValueError, 5.0)},
    ),
    "SinkAttention": plain(tb.SinkAttention, {"n_q_heads": H}, {"n_q_heads": COUNT}),
    "SinkAttention.forward": layer_call(
        lambda: tb.SinkAttention(4),
        {"q": Q, "k": K, "v": VALUES, "keep": KEEP},
        {**ATTEND_KINDS, "logit_softcap": REAL_OR_NONE},
    ),
    "KVCache": plain(tb.KVCache, {}, {"max_len": COUNT_OR_NONE}),
    "RMSNorm": plain(tb.RMSNorm, {"d_model": D}, {"d_model": COUNT, "eps": REAL}),
    "RMSNorm.forward": layer_call(
        lambda: tb.RMSNorm(D),
        {"x": draw(D)},
        {"x": [w for w in tensor(draw(D), optional=False) if w.label != "one axis more"]},
    ),
    "MultiHeadAttention": plain(
        tb.MultiHeadAttention,
        {"d_model": D, "n_q_heads": H, "n_kv_heads": G, "qk_norm": True},
        {
            "d_model": [*COUNT, Wrong("13", 13, ValueError, "13")],
            "n_q_heads": [*COUNT, Wrong("5", 5, ValueError, "n_q_heads=5")],
            "n_kv_heads": [*COUNT_OR_NONE, Wrong("4", 4, ValueError, "n_kv_heads=4")],
            "head_dim": COUNT_OR_NONE,
            "scale": REAL_OR_NONE,
            "logit_softcap": REAL_OR_NONE,
            "norm_eps": REAL,
            "attend": function(),
        },
    ),
    "MultiHeadAttention.forward": attention_call(
        lambda: tb.MultiHeadAttention(D, H, G, rope=True), rotated=True
    ),
    "MultiHeadAttention.forward memory": cross_call(),
    "MultiHeadLatentAttention": plain(
        latent,
        {},
        {
            "kv_rank": COUNT,
            "rope_dim": [*COUNT, Wrong("odd", 3, ValueError, "3")],
            "nope_dim": COUNT,
            "v_dim": COUNT,
            "q_rank": COUNT_OR_NONE,
        },
    ),
    "MultiHeadLatentAttention sizes": plain(
        lambda d_model, n_heads: tb.MultiHeadLatentAttention(
            d_model, n_heads, kv_rank=5, rope_dim=2, nope_dim=3, v_dim=4
        ),
        {"d_model": D, "n_heads": H},
        {"d_model": COUNT, "n_heads": COUNT},
    ),
    "MultiHeadLatentAttention.forward": attention_call(latent, rotated=True),
    "DenseFFN": plain(tb.DenseFFN, {"d_model": D, "d_ff": D_FF}, FFN_KINDS),
    "GatedFFN": plain(tb.GatedFFN, {"d_model": D, "d_ff": D_FF}, FFN_KINDS),
    "MoEFFN": plain(
        tb.MoEFFN,
        {"d_model": D, "d_ff": D_FF},
        {
            "d_model": COUNT,
            "d_ff": COUNT,
            "n_experts": COUNT,
            "top_k": objects(NotImplementedError, 2, 0, "1", None),
        },
    ),
    **{
        f"{kind.__name__}.forward": layer_call(
            lambda kind=kind: kind(D, D_FF),
            {"x": draw(D)},
            {
                "x": [
                    w
                    for w in tensor(draw(D), same_dtype=True, optional=False)
                    if w.label != "one axis more"
                ]
            },
        )
        for kind in (tb.DenseFFN, tb.GatedFFN, tb.MoEFFN, tb.ClampedGatedFFN)
    },
    "ClampedGatedFFN": plain(
        tb.ClampedGatedFFN,
        {"d_model": D, "d_ff": D_FF},
        {"d_model": COUNT, "d_ff": COUNT, "alpha": REAL, "limit": REAL},
    ),
    **{kind.__name__: plain(kind, ROUTER, ROUTER_KINDS) for kind in ROUTERS},
    **{
        f"{kind.__name__}.forward": layer_call(
            lambda kind=kind: kind(**ROUTER),
            {"tokens": draw(T, D)},
            {"tokens": tensor(draw(T, D), free=(0,), same_dtype=True, optional=False)},
        )
        for kind in ROUTERS
    },
    "MixtureFFN": plain(tb.MixtureFFN, *mixture_arguments()),
    "MixtureFFN.forward": layer_call(
        lambda: tb.MixtureFFN(**mixture_arguments()[0]),
        {"x": draw(D)},
        {
            "x": [
                w
                for w in tensor(draw(D), same_dtype=True, optional=False)
                if w.label != "one axis more"
            ]
        },
    ),
    **{
        kind.__name__: plain(kind, LAYER_SIZES, LAYER_KINDS)
        for kind in (
            tb.VanillaEncoderLayer2017,
            tb.VanillaSeq2SeqDecoderLayer2017,
            tb.GPT2StyleDecoderLayer,
        )
    },
    **{
        kind.__name__: plain(kind, SIZES, BLOCK_KINDS)
        for kind in (tb.ModernDecoderBlock, tb.ParallelDecoderBlock, tb.BranchNormDecoderBlock)
    },
    "VanillaEncoderLayer2017.forward": layer_call(
        lambda: tb.VanillaEncoderLayer2017(**LAYER_SIZES),
        {"x": X, "key_padding_mask": bools(B, T)},
        {"x": STREAM, "key_padding_mask": tensor(bools(B, T), "bool")},
    ),
    "VanillaSeq2SeqDecoderLayer2017.forward": layer_call(
        lambda: tb.VanillaSeq2SeqDecoderLayer2017(**LAYER_SIZES),
        {
            "x": X,
            "memory": MEMORY,
            "mask": bools(T, T),
            "key_padding_mask": bools(B, T),
            "memory_key_padding_mask": bools(B, S),
        },
        {
            "x": STREAM,
            "memory": tensor(MEMORY, free=(1,), same_dtype=True, optional=False),
            "mask": [w for w in tensor(bools(T, T), "bool") if w.label != "one axis more"],
            "key_padding_mask": tensor(bools(B, T), "bool"),
            "memory_key_padding_mask": tensor(bools(B, S), "bool"),
        },
    ),
    "GPT2StyleDecoderLayer.forward": attention_call(
        lambda: tb.GPT2StyleDecoderLayer(**LAYER_SIZES), rotated=False
    ),
    "ModernDecoderBlock.forward": attention_call(
        lambda: tb.ModernDecoderBlock(**SIZES), rotated=True
    ),
    "ModernDecoderBlock.forward latent": attention_call(
        lambda: tb.ModernDecoderBlock(**SIZES, attn=latent()), rotated=True
    ),
    "ParallelDecoderBlock.forward": attention_call(rotated_parallel, rotated=True),
    "BranchNormDecoderBlock.forward": attention_call(
        lambda: tb.BranchNormDecoderBlock(**SIZES), rotated=True
    ),
    "DecoderOnlyLM": plain(
        tb.DecoderOnlyLM,
        {"vocab_size": V, "n_layers": 2, **SIZES},
        {
            **dict.fromkeys(("vocab_size", "n_layers", "max_len", *SIZES), COUNT),
            "n_kv_heads": COUNT_OR_NONE,
            "rope_base": REAL,
            "rope_dim": [*COUNT_OR_NONE, Wrong("odd", 3, ValueError, "3")],
            "make_block": function(),
            "windows": WINDOWS,
            "embedding_scale": REAL,
            "logit_softcap": REAL_OR_NONE,
            "eps": REAL,
        },
    ),
    "DecoderOnlyLM.forward": model_call("forward"),
    "DecoderOnlyLM.generate": model_call("generate"),
    "DecoderOnlyLM.stream": model_call("stream"),
    "pick_next_token": plain(
        tb.pick_next_token,
        {"logits": draw(B, V), "temperature": 1.0},
        {"logits": tensor(draw(B, V), free=(0, 1), optional=False), **SAMPLING},
    ),
    "next_token_loss": plain(
        tb.next_token_loss,
        {"logits": draw(B, T, V), "ids": IDS, "key_padding_mask": bools(B, T)},
        {
            "predict": tensor(bools(B, T), "bool"),
            "logits": tensor(draw(B, T, V), free=(0, 1, 2), optional=False),
            "ids": [
                *tensor(IDS, "integer", optional=False),
                Wrong("past V", IDS + V, ValueError, str(V)),
                Wrong("negative", IDS - 1, ValueError, "-1"),
            ],
            "key_padding_mask": tensor(bools(B, T), "bool"),
        },
    ),
    "attention_parameters": plain(
        tb.attention_parameters,
        {"d_model": D, "n_q_heads": H, "n_kv_heads": G},
        {
            "d_model": [*COUNT, Wrong("13", 13, ValueError, "d_model=13")],
            "n_q_heads": [*COUNT, Wrong("5", 5, ValueError, "n_q_heads=5")],
            "n_kv_heads": [*COUNT_OR_NONE, Wrong("4", 4, ValueError, "n_kv_heads=4")],
        },
    ),
    "ffn_parameters": plain(
        tb.ffn_parameters,
        {"d_model": D, "d_ff": D_FF, "gated": True},
        {"d_model": COUNT, "d_ff": COUNT},
    ),
    "kv_cache_elements": plain(
        tb.kv_cache_elements,
        {"n_kv_heads": G, "head_dim": 2},
        {"n_kv_heads": COUNT, "head_dim": COUNT},
    ),
    "kv_cache_bytes": plain(
        tb.kv_cache_bytes,
        {"n_layers": 2, "n_kv_heads": G, "head_dim": 2, "length": 3},
        dict.fromkeys(
            ("n_layers", "n_kv_heads", "head_dim", "length", "batch", "bytes_per_element"), COUNT
        ),
    ),
    "gated_hidden_size": plain(
        tb.gated_hidden_size,
        {"d_model": D},
        {"d_model": COUNT, "multiple_of": COUNT, "multiplier": REAL},
    ),
}


# =============================================================================================
# Valid arguments that do not go together
# =============================================================================================


def filled_cache(**options):
    filled = tb.KVCache(**options)
    filled.append(draw(B, G, PAST, 2), draw(B, G, PAST, 2))
    return filled


def appended(k, v, **options):
    def make():
        filled = filled_cache(**options)
        return (lambda: filled.append(k, v)), [filled]

    return make


def called(build, *args, **options):
    """The module build() makes, called; watched with the cache among the options."""

    def make():
        module = build()
        return (lambda: module(*args, **options)), [module, *filter(is_cache, options.values())]

    return make


def is_cache(value):
    return isinstance(value, tb.KVCache)


def sharded(**widths):
    """Attention whose projections are those of one rank."""

    def build():
        module = tb.MultiHeadAttention(D, H, G, rope=True)
        for name, width in widths.items():
            setattr(module, name, nn.Linear(D, width))
        return module

    return build


def uneven_caches():
    caches = [tb.KVCache(), tb.KVCache()]
    built = model()
    built(IDS, kv_caches=caches)
    caches[1].truncate(1)
    return (lambda: built(IDS, kv_caches=caches)), [built, *caches]


def doubled_cache():
    cache = filled_cache()
    built = model()
    return (lambda: built(IDS, kv_caches=[cache, cache])), [built, cache]


def uneven_block(layer):
    attn = tb.MultiHeadAttention(D, H, G, head_dim=2 * (layer + 1), rope=True)
    return tb.ModernDecoderBlock(D, d_ff=D_FF, attn=attn)


def appended_block():
    built = model()
    built.blocks.append(tb.ModernDecoderBlock(**SIZES))
    return (lambda: built(IDS)), [built]


def added_caches():
    built = model()
    caches = built.new_caches()
    built.blocks.append(tb.ModernDecoderBlock(**SIZES))
    built.windows.append(None)
    return (lambda: built(IDS, kv_caches=caches)), [built, *caches]


def appended_in_backward():
    """What a recomputed forward does."""
    filled, x = filled_cache(), torch.ones(1, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda _gradient: filled.append(NEW, NEW) and None)
    return y.backward, [filled]


def switch_with(**parts):
    def make():
        ffn = tb.MoEFFN(D, D_FF, n_experts=2)
        for name, part in parts.items():
            setattr(ffn, name, part)
        return (lambda: ffn(X)), [ffn]

    return make


class OwnRouter(nn.Module):
    def __init__(self, *choice):
        super().__init__()
        self.choice = choice

    def forward(self, tokens):
        return self.choice


def mixture_with(*choice):
    def make():
        ffn = tb.MixtureFFN(OwnRouter(*choice), [tb.DenseFFN(D, D_FF) for _ in range(2)])
        return (lambda: ffn(X)), [ffn]

    return make


def truncated(length):
    def make():
        filled = filled_cache()
        return (lambda: filled.truncate(length)), [filled]

    return make


NEW = draw(B, G, 1, 2)
COMBINATIONS = {
    "append past max_len": (
        appended(draw(B, G, 2, 2), draw(B, G, 2, 2), max_len=3),
        ValueError,
        "max_len=3 .*4",
    ),
    "append to another batch": (
        appended(draw(1, G, 1, 2), draw(1, G, 1, 2)),
        ValueError,
        r"k_new .*\[1, 2, 1, 2\]",
    ),
    "append to other heads": (
        appended(draw(B, 1, 1, 2), draw(B, 1, 1, 2)),
        ValueError,
        r"k_new .*\[3, 1, 1, 2\]",
    ),
    "append another width of k": (
        appended(draw(B, G, 1, 1), NEW),
        ValueError,
        r"k_new .*\[3, 2, 1, 1\]",
    ),
    "append another width of v": (
        appended(NEW, draw(B, G, 1, 1)),
        ValueError,
        r"v_new .*\[3, 2, 1, 1\]",
    ),
    "append another length of v": (
        appended(NEW, draw(B, G, 2, 2)),
        ValueError,
        r"v_new .*\[3, 2, 2, 2\]",
    ),
    "append another dtype": (
        appended(NEW.double(), NEW.double()),
        TypeError,
        r"k_new .*float32.*float64",
    ),
    "append v of another dtype": (
        appended(NEW, NEW.half()),
        TypeError,
        r"v_new .*float32.*float16",
    ),
    "append on another device": (
        appended(NEW.to("meta"), NEW.to("meta")),
        TypeError,
        "k_new .*cpu.*meta",
    ),
    "append integers": (appended(NEW.long(), NEW.long()), TypeError, "k_new .*int64"),
    "append three axes": (appended(NEW[0], NEW[0]), ValueError, r"k_new .*\[2, 1, 2\]"),
    "append v of three axes": (appended(NEW, NEW[0]), ValueError, r"v_new .*\[2, 1, 2\]"),
    "append a list": (appended(NEW.tolist(), NEW), TypeError, "k_new .*list"),
    "append None": (appended(NEW, None), TypeError, "v_new .*None"),
    "truncate to more": (truncated(PAST + 1), ValueError, "length .*2.*3"),
    "truncate to -1": (truncated(-1), ValueError, "length .*-1"),
    "truncate to 1.0": (truncated(1.0), TypeError, r"length .*1\.0"),
    "odd width of tables": (
        lambda: ((lambda: tb.apply_rope(Q, draw(T, 3), draw(T, 3))), []),
        ValueError,
        "cos .*6.*3",
    ),
    "tables wider than the head": (
        lambda: ((lambda: tb.apply_rope(Q, draw(T, 8), draw(T, 8))), []),
        ValueError,
        "cos .*6.*8",
    ),
    "no tables": (lambda: ((lambda: tb.apply_rope(Q, None, None)), []), TypeError, "cos .*None"),
    "no channels": (
        lambda: ((lambda: tb.attend(Q[..., :0], K[..., :0], VALUES)), []),
        ValueError,
        r"head_dim.*\[3, 4, 4, 0\]",
    ),
    "no KV heads": (
        lambda: ((lambda: tb.attend(Q, K[:, :0], VALUES[:, :0])), []),
        ValueError,
        r"q .*0 heads.*\[3, 4, 4, 6\]",
    ),
    "odd head_dim with rope": (
        lambda: ((lambda: tb.MultiHeadAttention(D, 4, rope=True)), []),
        ValueError,
        "head_dim .*3",
    ),
    "soft cap with the fused path": (
        lambda: (
            (lambda: tb.MultiHeadAttention(D, H, logit_softcap=5.0, attend=tb.attend_fused)),
            [],
        ),
        ValueError,
        r"logit_softcap .*5\.0",
    ),
    "memory with rope": (
        called(lambda: tb.MultiHeadAttention(D, H, rope=True), X, MEMORY),
        ValueError,
        "memory .*rope",
    ),
    "memory with a cache": (
        called(lambda: tb.MultiHeadAttention(D, H), X, MEMORY, kv_cache=tb.KVCache()),
        ValueError,
        "memory .*kv_cache",
    ),
    "rope without tables": (
        called(lambda: tb.MultiHeadAttention(D, H, rope=True), X),
        ValueError,
        "cos .*None",
    ),
    "latent without tables": (called(latent, X, kv_cache=tb.KVCache()), ValueError, "cos .*None"),
    "table shorter than the positions": (
        called(lambda: tb.ModernDecoderBlock(**SIZES), X, COS[:3], SIN[:3], kv_cache=tb.KVCache()),
        ValueError,
        "cos .*3 .*4",
    ),
    "table shorter than start_pos": (
        called(lambda: tb.ModernDecoderBlock(**SIZES), X, COS, SIN, start_pos=18),
        ValueError,
        "cos .*20 .*22",
    ),
    "start_pos against the cache": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES),
            X,
            COS,
            SIN,
            kv_cache=filled_cache(),
            start_pos=3,
        ),
        ValueError,
        "start_pos .*2.*3",
    ),
    "cache of a latent attention": (
        called(latent, X, cos=COS, sin=SIN, kv_cache=filled_cache()),
        ValueError,
        r"k_new .*\[3, 2, T, 2\].*\[3, 1, 4, 7\]",
    ),
    "cache of another batch": (
        called(lambda: tb.ModernDecoderBlock(**SIZES), X[:1], COS, SIN, kv_cache=filled_cache()),
        ValueError,
        r"k_new .*\[3, 2, T, 2\].*\[1, 2, 4, 2\]",
    ),
    "cache of another dtype": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES).double(),
            X.double(),
            COS,
            SIN,
            kv_cache=filled_cache(),
        ),
        TypeError,
        "k_new .*float32.*float64",
    ),
    "cache too small": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES), X, COS, SIN, kv_cache=filled_cache(max_len=5)
        ),
        ValueError,
        "max_len=5 .*6",
    ),
    "attention of another width": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES, attn=tb.MultiHeadAttention(8, 4, 2, rope=True)),
            X,
            COS,
            SIN,
        ),
        ValueError,
        r"x .*8.*\[3, 4, 12\]",
    ),
    "mask without the cached keys": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES),
            X,
            COS,
            SIN,
            bools(T, T),
            kv_cache=filled_cache(),
        ),
        ValueError,
        r"mask .*\[4, 6\].*\[4, 4\]",
    ),
    "padding without the cached keys": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES),
            X,
            COS,
            SIN,
            key_padding_mask=bools(B, T),
            kv_cache=filled_cache(),
        ),
        ValueError,
        r"key_padding_mask .*\[3, 6\].*\[3, 4\]",
    ),
    "pick of no tokens": (
        lambda: (lambda: tb.pick_next_token(torch.zeros(B, 0)), []),
        ValueError,
        rf"logits .*\[{B}, 0\]",
    ),
    "one cache for two layers": (
        doubled_cache,
        ValueError,
        "kv_caches .*2.*twice",
    ),
    "projection of no whole heads": (
        called(sharded(k_proj=3), X, cos=COS, sin=SIN, kv_cache=filled_cache()),
        ValueError,
        "3.*head_dim=2.*ranks.*n_kv_heads",
    ),
    "sinks of other heads": (
        lambda: ((lambda: tb.SinkAttention(3)(Q, K, VALUES)), []),
        ValueError,
        "n_q_heads=3 .*4",
    ),
    "sinks of other heads, at construction": (
        lambda: ((lambda: tb.MultiHeadAttention(D, H, G, attend=tb.SinkAttention(3))), []),
        ValueError,
        "n_q_heads=3 .*6",
    ),
    "caches of other lengths": (uneven_caches, ValueError, r"kv_caches .*\[1, 4\]"),
    "rope_dim wider than what the blocks turn": (
        lambda: ((lambda: tb.DecoderOnlyLM(V, **SIZES, rope_dim=4)), []),
        ValueError,
        "rope_dim .*2.*4",
    ),
    "blocks that turn different widths without a rope_dim": (
        lambda: ((lambda: tb.DecoderOnlyLM(V, **SIZES, make_block=uneven_block)), []),
        ValueError,
        r"rope_dim .*\[2, 4\]",
    ),
    "latent attention with a narrower table": (
        called(lambda: latent(rope_dim=4), X, cos=COS, sin=SIN, kv_cache=filled_cache()),
        ValueError,
        r"cos .*\[4, 4\].*\[4, 2\]",
    ),
    "query heads that KV heads do not divide": (
        called(sharded(q_proj=6), X, cos=COS, sin=SIN, kv_cache=filled_cache()),
        ValueError,
        r"q .*2 heads.*\[3, 3, 4, 2\]",
    ),
    "append in a backward pass": (appended_in_backward, RuntimeError, "kv_cache .*backward"),
    "no finite logit": (
        lambda: ((lambda: tb.pick_next_token(torch.tensor([[0.0, torch.nan]]))), []),
        ValueError,
        "logits .*nan",
    ),
    "Switch router of another width": (
        switch_with(router=nn.Linear(D, 3)),
        ValueError,
        r"router\(x\) .*\[12, 2\].*\[12, 3\]",
    ),
    "router that gives one weight for two experts": (
        mixture_with(torch.zeros(12, 1), torch.zeros(12, 2).long()),
        ValueError,
        r"router\(x\)\[0\] .*\[12, 2\].*\[12, 1\]",
    ),
    "router that gives no axis of choices": (
        mixture_with(torch.zeros(12, 1), torch.zeros(12).long()),
        ValueError,
        r"router\(x\)\[1\] .*\[12, k\].*\[12\]",
    ),
    "router that chooses an expert that is not there": (
        mixture_with(torch.zeros(12, 1), torch.full((12, 1), 2)),
        ValueError,
        r"router\(x\)\[1\] .*0 … 1.*12",
    ),
    "a block added behind the model's back": (appended_block, ValueError, "windows .*3 blocks"),
    "too few caches for an added block": (
        added_caches,
        ValueError,
        "kv_caches .*3 entries.*2",
    ),
}

# Refused by a part that comes after the append: a block alone keeps the rows, truncate takes them.
BEHIND_THE_APPEND = {
    "FFN of another width": (
        called(
            lambda: tb.ModernDecoderBlock(**SIZES, ffn=tb.DenseFFN(7, 7)),
            X,
            COS,
            SIN,
            kv_cache=filled_cache(),
        ),
        ValueError,
        r"x .*7.*\[3, 4, 12\]",
    ),
}


# =============================================================================================
# The tests
# =============================================================================================


def library():
    """The definitions of the script that are no demos and no command line."""
    for node in ast.parse(SCRIPT.read_text()).body:
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if named and not node.name.startswith(NO_LIBRARY):
            yield node


RAISES = {
    line
    for definition in library()
    for node in ast.walk(definition)
    if isinstance(node, ast.Raise)
    for line in range(node.lineno, node.end_lineno + 1)
}


def lines_in_script(error):
    """Line numbers of the script that the error came through, innermost last."""
    lines, step = [], error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(SCRIPT):
            lines.append(step.tb_lineno)
        step = step.tb_next
    return lines


def innermost_file(error):
    step = error.__traceback__
    while step.tb_next is not None:
        step = step.tb_next
    return step.tb_frame.f_code.co_filename


def state(watched):
    out = []
    for one in watched:
        if isinstance(one, tb.KVCache):
            out.append((one.next_pos, *(None if t is None else t.tolist() for t in (one.k, one.v))))
        elif isinstance(one, list):
            out.append(list(one))
        else:
            out.append([module.training for module in one.modules()])
            out.append({name: w.tolist() for name, w in one.state_dict().items()})
    return out


def refusal(make, arguments):
    """The error of the call; nothing that is watched has changed, nor the global generator."""
    function, watched = make()
    before, generator = state(watched), torch.get_rng_state()
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)) as caught:
        function(**arguments)
    assert state(watched) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert innermost_file(caught.value) == str(SCRIPT)
    assert lines_in_script(caught.value)[-1] in RAISES, f"no message of ours: {caught.value}"
    return caught.value


CASES = [
    (name, argument, wrong)
    for name, call in CALLS.items()
    for argument, kind in call.kinds.items()
    for wrong in kind
]
CONSTRUCTORS = [name for name in CALLS if name[0].isupper() and ".forward" not in name]
CONSTRUCTORS = [name for name in CONSTRUCTORS if "." not in name]


@pytest.mark.parametrize("name", CALLS)
def test_valid_arguments_are_taken(name):
    function, _ = CALLS[name].make()
    function(**CALLS[name].arguments)


@pytest.mark.parametrize(
    ("name", "argument", "wrong"), CASES, ids=[f"{n}-{a}-{w.label}" for n, a, w in CASES]
)
def test_wrong_argument_is_named(name, argument, wrong):
    call = CALLS[name]
    arguments = call.arguments | {argument: wrong.value}
    error = refusal(call.make, arguments)
    assert type(error) is wrong.error
    message = str(error)
    assert any(part in message for part in wrong.names or (argument,)), message
    assert wrong.came in message, message


@pytest.mark.parametrize("case", COMBINATIONS)
def test_wrong_combination_is_named(case):
    make, kind, message = COMBINATIONS[case]
    error = refusal(make, {})
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error


@pytest.mark.parametrize("case", BEHIND_THE_APPEND)
def test_refused_behind_the_append(case):
    make, kind, message = BEHIND_THE_APPEND[case]
    function, (module, filled) = make()
    before = state([module, filled])
    with pytest.raises(kind, match=message) as caught:
        function()
    assert lines_in_script(caught.value)[-1] in RAISES
    assert filled.next_pos == PAST + T
    filled.truncate(PAST)
    assert state([module, filled]) == before


@pytest.mark.parametrize(("name", "width"), [("q_proj", 7), ("kv_up", 11)])
def test_latent_part_of_no_whole_heads(name, width):
    module = latent()
    setattr(module, name, nn.Linear(getattr(module, name).in_features, width))
    refusal(lambda: (module, [module]), {"x": X, "cos": COS, "sin": SIN})


def demands():
    """Raises and calls of checks in the library, each with the argument it is about."""
    for definition in library():
        for node in ast.walk(definition):
            if isinstance(node, ast.Raise) and node.exc is not None:  # no refusal passed on
                yield node, None
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("require_"):
                named = [
                    k.arg
                    for k in node.keywords
                    if k.arg not in ("above", "optional", "kind", "layer")
                ]
                if node.func.id == "require_tensor" and isinstance(node.args[0], ast.Constant):
                    named = [node.args[0].value]
                for name in named or [None]:
                    yield node, name


def test_every_raise_and_check_is_hit():
    hits = []
    calls = [(CALLS[n].make, CALLS[n].arguments | {a: w.value}) for n, a, w in CASES]
    others = [*COMBINATIONS.values(), *BEHIND_THE_APPEND.values()]
    for make, arguments in calls + [(make, {}) for make, _, _ in others]:
        function, _ = make()
        try:
            function(**arguments)
        except Exception as error:
            hits.append((set(lines_in_script(error)), str(error)))
    missed = [
        f"line {node.lineno}: {name or ast.unparse(node)[:60]}"
        for node, name in demands()
        if not any(
            lines & set(range(node.lineno, node.end_lineno + 1))
            and (name is None or message.startswith(name))
            for lines, message in hits
        )
    ]
    assert missed == []


def test_no_assert_guards_an_argument():
    asserts = [n.lineno for d in library() for n in ast.walk(d) if isinstance(n, ast.Assert)]
    assert asserts == []


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_refused_construction_draws_none(name):
    call, moved, before = CALLS[name], set(), torch.get_rng_state()
    for argument, wrong in ((a, w) for a, kind in call.kinds.items() for w in kind):
        with pytest.raises((ValueError, TypeError, NotImplementedError)):
            call.make()[0](**call.arguments | {argument: wrong.value})
        if not torch.equal(torch.get_rng_state(), before):
            moved.add(argument)
            torch.set_rng_state(before)
    assert moved == set()


# =============================================================================================
# Several wrong arguments, drawn
# =============================================================================================


@st.composite
def spoiled_calls(drawn):
    """A public call with up to three arguments wrong; two wrong shapes might fit each other."""
    name = drawn(st.sampled_from([name for name, call in CALLS.items() if call.kinds]))
    kinds, wrong, shapes = CALLS[name].kinds, {}, 0
    for argument in drawn(st.lists(st.sampled_from(list(kinds)), min_size=1, max_size=3)):
        value = drawn(st.sampled_from(kinds[argument]))
        is_shape = isinstance(value.value, torch.Tensor) and value.error is ValueError
        shapes += is_shape
        if not (is_shape and shapes > 1):
            wrong[argument] = value
    return name, wrong


@given(spoiled=spoiled_calls(), mode=st.sampled_from([torch.enable_grad, torch.inference_mode]))
def test_several_wrong_arguments(spoiled, mode):
    name, wrong = spoiled
    call = CALLS[name]
    arguments = call.arguments | {argument: w.value for argument, w in wrong.items()}
    with mode():
        error = refusal(call.make, arguments)
    names = {n for argument, w in wrong.items() for n in (w.names or (argument,))}
    assert any(n in str(error) for n in names), str(error)


shapes = st.lists(st.integers(0, 4), max_size=5)


def as_documented(x, mask=None, key_padding_mask=None, cos=None, sin=None, **_):
    """Whether all shapes are as documented, for d = 4 and heads two channels wide."""
    if x.dim() != 3 or x.shape[2] != 4:
        return False
    B, T, _ = x.shape
    if mask is not None and mask.shape not in ((T, T), (B, T, T)):
        return False
    if key_padding_mask is not None and key_padding_mask.shape != (B, T):
        return False
    if cos is None:
        return True
    return cos.shape == sin.shape and cos.dim() == 2 and len(cos) >= T and cos.shape[1] in (0, 2)


@given(data=st.data(), kind=st.sampled_from(["modern", "gpt2", "attention"]))
def test_shapes_are_as_documented(data, kind):
    """No size of 1 broadcasts, and no message of torch comes through."""
    build = {
        "modern": lambda: tb.ModernDecoderBlock(4, 2, 1, 4),
        "gpt2": lambda: tb.GPT2StyleDecoderLayer(4, 2, 4),
        "attention": lambda: tb.MultiHeadAttention(4, 2, 1, rope=True),
    }
    module, cache = build[kind](), tb.KVCache()
    near = st.sampled_from([(2, 3, 4), (2, 1, 4), (1, 3, 4), (2, 3, 1), (2, 0, 4), (0, 3, 4)])
    x = draw(*data.draw(st.one_of(near, shapes)))
    masks = st.one_of(st.sampled_from([(3, 3), (2, 3, 3), (2, 3), (1, 3), (3, 1), (1, 1)]), shapes)
    seen = {"kv_cache": cache} if data.draw(st.booleans()) else {}
    for name in ("mask", "key_padding_mask"):
        if data.draw(st.booleans()):
            seen[name] = torch.ones(data.draw(masks), dtype=torch.bool)
    if kind != "gpt2":
        tables = st.one_of(st.sampled_from([(3, 2), (5, 2), (3, 4), (1, 2), (3, 1)]), shapes)
        seen |= {name: torch.ones(data.draw(tables)) for name in ("cos", "sin")}
    if as_documented(x, **seen):
        out = module(x, **seen)
        assert (out[0] if kind == "attention" else out).shape == x.shape
    else:
        refusal(lambda: (module, [module, cache]), {"x": x, **seen})
