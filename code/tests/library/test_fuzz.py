"""Drawn sizes, groups, masks, windows and dtypes against the plain reference.

The profiles are those of conftest.py: --hypothesis-profile=thorough draws 2,000 examples a test.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
import transformer_block as tb
from blocks import randomised
from hypothesis import given
from hypothesis import strategies as st

# Largest difference to the reference, relative to its largest value (at least 1).
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
ROWS = 24  # of every rotation table

seeds = st.integers(0, 2**32 - 1)
wide_dtypes = st.sampled_from([torch.float64, torch.float64, torch.float32])
maybe = st.booleans()


def draw(*shape, dtype=torch.float64, scale=1.0):
    return (scale * torch.randn(shape, dtype=torch.float64)).to(dtype)


def drawn_mask(data, *shape):
    """Any bool mask, rows of nothing and of everything included, or None."""
    share = data.draw(st.sampled_from([None, 0.0, 0.4, 0.8, 1.0]))
    return None if share is None else torch.rand(shape) < share


def arrays(module):
    return {name: w.double().numpy() for name, w in module.state_dict().items()}


def assert_near(got, wanted, dtype):
    assert got.dtype == dtype
    got = got.detach().double().numpy()
    assert got.shape == wanted.shape
    limit = TOLERANCE[dtype] * max(1.0, np.abs(wanted).max(initial=0.0))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=limit)


# =============================================================================================
# Blocks
# =============================================================================================


class Sizes(NamedTuple):
    """What a block is drawn from; rope is None, or start, width and base of the rotation."""

    H: int
    G: int
    head_dim: int
    d_model: int
    d_ff: int
    rope: tuple | None


@st.composite
def sizes(draw, rotated=True):
    G, ratio = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    d_model = max(4, G * ratio * head_dim)
    if d_model % (G * ratio):
        d_model = 4 * G * ratio
    width = draw(st.sampled_from(range(2, head_dim + 1, 2)))
    rope = (draw(st.integers(0, 9)), width, draw(st.sampled_from([10000.0, 7.0, 2])))
    d_ff = draw(st.sampled_from([1, 3, 8]))
    return Sizes(G * ratio, G, head_dim, d_model, d_ff, rope if rotated else None)


def drawn_heads(data, s):
    """Attention over heads, and its reference."""
    path = data.draw(st.sampled_from([tb.attend, tb.attend_fused]))
    cap = None if path is tb.attend_fused else data.draw(st.sampled_from([None, 0.7, 5]))
    scale = data.draw(st.sampled_from([None, 0.3, 2]))
    attn = tb.MultiHeadAttention(
        s.d_model,
        s.H,
        s.G,
        head_dim=s.head_dim,
        rope=s.rope is not None,
        bias=data.draw(maybe),
        qkv_bias=data.draw(st.sampled_from([None, True, False])),
        qk_norm=data.draw(maybe),
        scale=scale,
        logit_softcap=cap,
        norm_eps=1e-3,
        attend=path,
    )

    def wanted(p, x, keep):
        return reference.multi_head_attention(
            p, x, s.head_dim, keep=keep, rope=s.rope, scale=scale, cap=cap, norm_eps=1e-3
        )[0]

    return attn, wanted


def drawn_latent(data, s):
    widths = {"kv_rank": 3, "nope_dim": s.head_dim, "rope_dim": s.rope[1], "v_dim": s.d_ff}
    attn = tb.MultiHeadLatentAttention(
        s.d_model, s.H, **widths, q_rank=data.draw(st.sampled_from([None, 5]))
    )

    def wanted(p, x, keep):
        return reference.latent_attention(p, x, **widths, keep=keep, rope=s.rope)

    return attn, wanted


def drawn_ffn(data, s):
    options = {"bias": data.draw(maybe)}
    return data.draw(
        st.sampled_from(
            [
                (tb.GatedFFN(s.d_model, s.d_ff, **options), reference.gated_ffn),
                (tb.DenseFFN(s.d_model, s.d_ff, **options), reference.dense_ffn),
                (
                    tb.GatedFFN(s.d_model, s.d_ff, act=torch.relu),
                    lambda p, x: reference.gated_ffn(p, x, reference.relu),
                ),
                (
                    tb.MoEFFN(s.d_model, s.d_ff, n_experts=data.draw(st.integers(1, 5))),
                    lambda p, x: reference.moe_ffn(p, x)[0],
                ),
            ]
        )
    )


def pre_rms(p, x, attn, ffn, eps):
    return reference.pre_norm(p, x, attn, ffn, eps=eps, norm=reference.rms_norm)


def pre_layer(p, x, attn, ffn, eps):
    return reference.pre_norm(p, x, attn, ffn, eps=eps, norm=reference.layer_norm)


COMPOSED = {
    "modern": (tb.ModernDecoderBlock, pre_rms, drawn_heads, {}),
    "modern latent": (tb.ModernDecoderBlock, pre_rms, drawn_latent, {}),
    "parallel": (tb.ParallelDecoderBlock, reference.parallel, drawn_heads, {}),
    "parallel two norms": (
        tb.ParallelDecoderBlock,
        reference.parallel,
        drawn_heads,
        {"shared_norm": False},
    ),
    "branch norm": (tb.BranchNormDecoderBlock, reference.branch_norm, drawn_heads, {}),
    "branch norm latent": (tb.BranchNormDecoderBlock, reference.branch_norm, drawn_latent, {}),
}


def keep_of_row(b, T, mask, padding, window=None):
    """What row b may attend to: the causal rule where no mask is given, and the padding."""
    keep = reference.causal(range(T), range(T), window)
    if mask is not None:
        keep = (mask[b] if mask.dim() == 3 else mask).numpy()
    return keep if padding is None else keep & padding[b].numpy()[None]


def in_two_chunks(block, x, cut, cache, *, mask, key_padding_mask, **tables):
    """The tokens through a cache, cut in two; the second chunk sees the first."""
    parts = []
    for start, end in ((0, cut), (cut, x.shape[1])):
        seen = {
            "mask": None if mask is None else mask[..., start:end, :end],
            "key_padding_mask": None if key_padding_mask is None else key_padding_mask[:, :end],
        }
        parts.append(block(x[:, start:end], kv_cache=cache, **seen, **tables))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("kind", COMPOSED)
@given(data=st.data(), seed=seeds, s=sizes(), dtype=wide_dtypes)
def test_block_equals_the_reference(kind, data, seed, s, dtype):
    torch.manual_seed(seed)
    build, topology, drawn_attn, options = COMPOSED[kind]
    cached = data.draw(maybe)
    s = s._replace(rope=(0, *s.rope[1:])) if cached else s
    attn, wanted_attn = drawn_attn(data, s)
    ffn, wanted_ffn = drawn_ffn(data, s)
    eps = data.draw(st.sampled_from([1e-3, 0.1]))
    block = randomised(build(s.d_model, attn=attn, ffn=ffn, eps=eps, **options)).to(dtype)
    B, T = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    x, padding = draw(B, T, s.d_model, dtype=dtype), drawn_mask(data, B, T)
    window = data.draw(st.sampled_from([None, 1, 2, 9]))
    mask = None if window is None else tb.build_causal_mask(*[torch.arange(T)] * 2, window)
    start, width, base = s.rope
    cos, sin = tb.build_rope_cache(ROWS, width, base)
    seen = {"mask": mask, "key_padding_mask": padding, "cos": cos, "sin": sin}
    if cached:
        cut, cache = data.draw(st.integers(0, T)), tb.KVCache(data.draw(st.sampled_from([None, 7])))
        with data.draw(st.sampled_from([torch.no_grad, torch.enable_grad, torch.inference_mode]))():
            out = in_two_chunks(block, x, cut, cache, **seen)
    else:
        if data.draw(maybe):
            seen["mask"] = mask = drawn_mask(data, *data.draw(st.sampled_from([(T, T), (B, T, T)])))
        out = block(x, **seen, start_pos=start)
    p = arrays(block)
    for b in range(B):
        keep = keep_of_row(b, T, mask, padding)
        wanted = topology(
            p,
            x[b].double().numpy(),
            lambda h, keep=keep: wanted_attn(reference.sub(p, "attn"), h, keep),
            lambda h: wanted_ffn(reference.sub(p, "ffn"), h),
            eps=eps,
        )
        assert_near(out[b], wanted, dtype)


FIXED = {
    "encoder": (tb.VanillaEncoderLayer2017, reference.post_ln_encoder, reference.relu),
    "gpt2": (tb.GPT2StyleDecoderLayer, pre_layer, reference.gelu),
}


@pytest.mark.parametrize("kind", FIXED)
@given(data=st.data(), seed=seeds, s=sizes(rotated=False), dtype=wide_dtypes)
def test_layer_equals_the_reference(kind, data, seed, s, dtype):
    torch.manual_seed(seed)
    build, topology, act = FIXED[kind]
    d_model = 2 * s.H * s.head_dim
    layer = randomised(build(d_model, s.H, s.d_ff, eps=1e-3)).to(dtype)
    B, T = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    x, padding = draw(B, T, d_model, dtype=dtype), drawn_mask(data, B, T)
    mask = drawn_mask(data, T, T)
    if kind == "encoder":
        out, mask = layer(x, padding), torch.ones(T, T, dtype=torch.bool)
    else:
        out = layer(x, mask, key_padding_mask=padding)
    p = arrays(layer)

    def attn(h, keep):
        return reference.multi_head_attention(
            reference.sub(p, "attn"), h, 2 * s.head_dim, keep=keep
        )[0]

    for b in range(B):
        keep = keep_of_row(b, T, mask, padding)
        wanted = topology(
            p,
            x[b].double().numpy(),
            lambda h, keep=keep: attn(h, keep),
            lambda h: reference.dense_ffn(reference.sub(p, "ffn"), h, act),
            eps=1e-3,
        )
        assert_near(out[b], wanted, dtype)


@given(data=st.data(), seed=seeds, s=sizes(rotated=False), dtype=wide_dtypes)
def test_seq2seq_equals_the_reference(data, seed, s, dtype):
    torch.manual_seed(seed)
    head_dim, d_model = 2 * s.head_dim, 2 * s.H * s.head_dim
    layer = randomised(tb.VanillaSeq2SeqDecoderLayer2017(d_model, s.H, s.d_ff, eps=1e-3)).to(dtype)
    B, T, S = (data.draw(st.integers(0, n)) for n in (3, 5, 5))
    x, memory = draw(B, T, d_model, dtype=dtype), draw(B, S, d_model, dtype=dtype)
    mask, padding = drawn_mask(data, T, T), drawn_mask(data, B, T)
    memory_padding = drawn_mask(data, B, S)
    out = layer(x, memory, mask, key_padding_mask=padding, memory_key_padding_mask=memory_padding)
    p = arrays(layer)

    def attend_to(name, h, keep, source=None):
        inner = reference.sub(p, name)
        return reference.multi_head_attention(inner, h, head_dim, memory=source, keep=keep)[0]

    for b in range(B):
        keep = keep_of_row(b, T, mask, padding)
        cross = np.ones((T, S), bool)
        cross = cross if memory_padding is None else cross & memory_padding[b].numpy()[None]
        wanted = reference.post_ln_seq2seq(
            p,
            x[b].double().numpy(),
            self_attn=lambda h, keep=keep: attend_to("self_attn", h, keep),
            cross_attn=lambda h, b=b, cross=cross: attend_to(
                "cross_attn", h, cross, memory[b].double().numpy()
            ),
            ffn=lambda h: reference.dense_ffn(reference.sub(p, "ffn"), h, reference.relu),
            eps=1e-3,
        )
        assert_near(out[b], wanted, dtype)


# =============================================================================================
# Operators, half precision included
# =============================================================================================

dtypes = st.sampled_from(list(TOLERANCE))


@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
@given(data=st.data(), seed=seeds, dtype=dtypes)
def test_attend_equals_the_reference(path, data, seed, dtype):
    torch.manual_seed(seed)
    G, ratio, B = (data.draw(st.integers(1, 3)) for _ in range(3))
    T, S = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    head_dim, width = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4))
    q, k, v = (
        draw(B, n, *shape, dtype=dtype)
        for n, shape in ((G * ratio, (T, head_dim)), (G, (S, head_dim)), (G, (S, width)))
    )
    shape = data.draw(
        st.sampled_from([(T, S), (1, S), (T, 1), (S,), (), (B, 1, T, S), (B, 1, 1, S), (1, T, S)])
    )
    keep = drawn_mask(data, *shape)
    options = {"scale": data.draw(st.sampled_from([None, 0.5, 2]))}
    if path is tb.attend:
        options["logit_softcap"] = data.draw(st.sampled_from([None, 0.7, 3]))
    out = path(q, k, v, keep, **options)
    whole = torch.ones(B, 1, T, S, dtype=torch.bool) if keep is None else keep.expand(B, 1, T, S)
    for b in range(B):
        wanted = reference.attention(
            *(t[b].double().numpy() for t in (q, k, v)),
            whole[b, 0].numpy(),
            scale=options["scale"],
            cap=options.get("logit_softcap"),
        )
        assert_near(out[b], wanted, dtype)


@given(data=st.data(), seed=seeds, dtype=wide_dtypes)
def test_cross_equals_the_reference(data, seed, dtype):
    torch.manual_seed(seed)
    s = data.draw(sizes(rotated=False))
    attn = randomised(drawn_heads(data, s)[0]).to(dtype)
    B, T, S = (data.draw(st.integers(0, n)) for n in (3, 4, 5))
    x, memory = draw(B, T, s.d_model, dtype=dtype), draw(B, S, s.d_model, dtype=dtype)
    mask = drawn_mask(data, *data.draw(st.sampled_from([(T, S), (B, T, S)])))
    padding = drawn_mask(data, B, S)
    out, (k, v) = attn(x, memory, mask=mask, key_padding_mask=padding)
    assert k.shape == v.shape == (B, s.G, S, s.head_dim)
    p = arrays(attn)
    for b in range(B):
        keep = np.ones((T, S), bool) if mask is None else keep_of_row(b, T, mask, None)
        keep = keep if padding is None else keep & padding[b].numpy()[None]
        wanted, (k_wanted, v_wanted) = reference.multi_head_attention(
            p,
            x[b].double().numpy(),
            s.head_dim,
            memory=memory[b].double().numpy(),
            keep=keep,
            scale=attn.scale,
            cap=attn.logit_softcap,
            norm_eps=1e-3,
        )
        assert_near(out[b], wanted, dtype)
        assert_near(k[b], k_wanted, dtype)
        assert_near(v[b], v_wanted, dtype)


@given(data=st.data(), seed=seeds, dtype=dtypes)
def test_rotation_equals_the_reference(data, seed, dtype):
    torch.manual_seed(seed)
    head_dim = data.draw(st.integers(2, 8))
    r = data.draw(st.sampled_from(range(2, head_dim + 1, 2)))
    B, n, T, start = (data.draw(st.integers(0, high)) for high in (2, 3, 5, 400))
    base = data.draw(st.sampled_from([10000.0, 3, 1e6]))
    cos, sin = tb.build_rope_cache(start + T + 1, r, base)
    x = draw(B, n, T, head_dim, dtype=dtype)
    out = tb.apply_rope(x, cos[start : start + T], sin[start : start + T])
    for b in range(B):
        assert_near(out[b], reference.rotate(x[b].double().numpy(), start, r, base), dtype)


@given(data=st.data(), seed=seeds, dtype=dtypes)
def test_norm_and_ffn_equal_it(data, seed, dtype):
    torch.manual_seed(seed)
    d_model, d_ff = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    x = draw(*shape, d_model, dtype=dtype)
    rows = x.double().reshape(-1, d_model).numpy()
    norm = randomised(tb.RMSNorm(d_model, eps=1e-2)).to(dtype)
    wanted = reference.rms_norm({"n.weight": arrays(norm)["weight"]}, "n", rows, 1e-2)
    assert_near(norm(x).reshape(-1, d_model), wanted, dtype)
    for ffn, apply in (
        (tb.DenseFFN(d_model, d_ff, bias=True), reference.dense_ffn),
        (tb.GatedFFN(d_model, d_ff, bias=True), reference.gated_ffn),
    ):
        out = randomised(ffn).to(dtype)(x)
        assert out.shape == x.shape
        assert_near(out.reshape(-1, d_model), apply(arrays(ffn), rows), dtype)


@given(data=st.data(), seed=seeds, n_experts=st.integers(1, 6))
def test_experts_one_token_at_a_time(data, seed, n_experts):
    torch.manual_seed(seed)
    moe = randomised(tb.MoEFFN(4, 3, n_experts))
    x = draw(*data.draw(st.lists(st.integers(0, 4), max_size=2)), 4)
    out = moe(x)
    wanted, counts, balance = reference.moe_ffn(arrays(moe), x.reshape(-1, 4).numpy())
    assert_near(out.reshape(-1, 4), wanted, torch.float64)
    assert moe.tokens_per_expert == counts
    assert math.isclose(moe.aux_loss.item(), balance, abs_tol=1e-9)


@given(
    q=st.lists(st.integers(0, 40), max_size=6),
    k=st.lists(st.integers(0, 40), max_size=6),
    window=st.sampled_from([None, 1, 3, 50]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
)
def test_mask_by_single_comparisons(q, k, window, dtype):
    got = tb.build_causal_mask(torch.tensor(q, dtype=dtype), torch.tensor(k, dtype=dtype), window)
    assert torch.equal(got, torch.from_numpy(reference.causal(q, k, window)))
