"""Every class in every floating dtype, copied, pickled, and under torch.device("meta")."""

import copy
import io
import pickle

import pytest
import torch
import transformer_block as tb
from blocks import (
    COS,
    D_FF,
    DECODERS,
    LAYERS_2017,
    SIN,
    D,
    attention,
    decoder,
    language_model,
    latent,
    randomised,
    run,
)
from torch import nn

# Largest difference to the float64 run, relative to its largest value.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 8e-2,
    torch.float16: 1e-2,
}
HALF = [torch.float16, torch.bfloat16]
PATHS = [tb.attend, tb.attend_fused]

B, T = 2, 5
KEEP = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def rotated(module, x):
    return module(x, cos=COS, sin=SIN, mask=CAUSAL, key_padding_mask=KEEP)[0]


# Everything that is not a decoder block: how to make it and how to call it.
OTHERS = {
    "rms_norm": (lambda: tb.RMSNorm(D), lambda m, x: m(x)),
    "attention": (
        lambda: attention(bias=True, qk_norm=True, logit_softcap=3.0),
        rotated,
    ),
    "attention fused": (lambda: attention(attend=tb.attend_fused), rotated),
    "cross attention": (
        lambda: tb.MultiHeadAttention(D, 4, 2),
        lambda m, x: m(x, x[:, :3], key_padding_mask=KEEP[:, :3])[0],
    ),
    "latent attention": (lambda: latent(q_rank=6), rotated),
    "dense": (lambda: tb.DenseFFN(D, D_FF, bias=True), lambda m, x: m(x)),
    "gated": (lambda: tb.GatedFFN(D, D_FF, bias=True), lambda m, x: m(x)),
    "moe": (lambda: tb.MoEFFN(D, D_FF), lambda m, x: m(x)),
    "encoder": (LAYERS_2017["encoder"], lambda m, x: m(x, KEEP)),
    "seq2seq": (
        LAYERS_2017["seq2seq"],
        lambda m, x: m(x, x[:, 1:] * 0.5, key_padding_mask=KEEP),
    ),
}
MODULES = [*OTHERS, *DECODERS]


def build(kind):
    """The module in float64 with random parameters, and its call."""
    torch.manual_seed(0)
    if kind in DECODERS:
        return decoder(kind), run
    make, call = OTHERS[kind]
    return randomised(make()), call


def draw(dtype=torch.float64):
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_near(got, wanted, tolerance):
    assert got.isfinite().all()
    assert (got.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


# =============================================================================================
# Each dtype through every class
# =============================================================================================


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", MODULES)
def test_output_near_the_float64_run(kind, dtype):
    module, call = build(kind)
    narrow = copy.deepcopy(module).to(dtype)
    exact = copy.deepcopy(narrow).double()  # the rounded weights, so only the arithmetic differs
    x = draw(dtype)
    out = call(narrow, x)
    assert out.dtype == dtype
    assert_near(out, call(exact, x.double()), TOLERANCE[dtype])
    out.float().square().mean().backward()
    for name, parameter in narrow.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", DECODERS)
def test_decoding_near_the_float64_run(kind, dtype):
    module, call = build(kind)
    narrow = module.to(dtype)
    exact = copy.deepcopy(narrow).double()
    x, cache = draw(dtype), tb.KVCache()
    with torch.no_grad():
        chunks = [call(narrow, part, kv_cache=cache) for part in x.split([2, 1, 2], dim=1)]
    assert cache.k.dtype == cache.v.dtype == dtype
    assert_near(torch.cat(chunks, dim=1), call(exact, x.double()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_model_in_each_dtype(dtype):
    model = language_model(logit_softcap=20.0).to(dtype)
    ids = torch.arange(10).view(2, 5)
    logits = model(ids)
    assert logits.dtype == dtype
    assert_near(logits, copy.deepcopy(model).double()(ids), TOLERANCE[dtype])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert tb.next_token_loss(logits, ids).dtype == wide
    for temperature in (0.0, 0.8):
        assert model.generate(ids, 3, temperature=temperature).shape == (2, 8)


@pytest.mark.parametrize("autocast", HALF)
@pytest.mark.parametrize("kind", MODULES)
def test_autocast_near_the_float64_run(kind, autocast):
    module, call = build(kind)
    x = draw(torch.float32)
    wanted = call(module, x.double())
    module.float()
    with torch.autocast("cpu", autocast):
        out = call(module, x)
        assert_near(out, wanted, TOLERANCE[autocast])
        if kind in DECODERS:
            cache = tb.KVCache()
            chunks = [call(module, part, kv_cache=cache) for part in x.split([3, 2], dim=1)]
            assert_near(torch.cat(chunks, dim=1), wanted, TOLERANCE[autocast])
    out.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_autocast_of_the_model():
    model, ids = language_model().float(), torch.arange(10).view(2, 5)
    wanted = tb.next_token_loss(model(ids), ids)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tb.next_token_loss(model(ids), ids)
        assert model.generate(ids, 2).shape == (2, 7)
    assert abs(loss - wanted) < 0.1 * wanted
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# =============================================================================================
# Half precision keeps its range and the positions theirs
# =============================================================================================


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep", [None, torch.tensor([[1, 0, 1]]).bool()])
def test_scaled_scores_do_not_overflow(path, keep):
    """40 * 40 * 64 is past 65504, an eighth of it is not."""
    q = torch.full((1, 2, 3, 64), 40.0).half().requires_grad_()
    k = torch.full((1, 1, 3, 64), 40.0).half()
    v = torch.randn(1, 1, 3, 4).half()
    out = path(q, k, v, keep)
    real = v.double() if keep is None else v.double()[:, :, keep[0]]
    wanted = real.mean(dim=2, keepdim=True).expand(1, 2, 3, 4)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-3)
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
def test_small_scale_does_not_overflow(path):
    q = torch.full((1, 1, 2, 4), 1000.0).half()
    k = torch.tensor([[1000.0] * 4, [999.0] * 4]).half().view(1, 1, 2, 4)
    v = torch.eye(2).half().view(1, 1, 2, 2)
    weights = torch.tensor([4.0, 3.996]).softmax(dim=0).double()
    out = path(q, k, v, scale=1e-6).double()
    torch.testing.assert_close(out[0, 0], weights.expand(2, 2), rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", HALF)
def test_soft_cap_in_float32(dtype):
    """In half, 100 * tanh(1.01) - 100 * tanh(1) is off by a tenth and more."""
    q = torch.tensor([100.0, 101.0], dtype=dtype).view(1, 1, 1, 2)
    one_hot = torch.eye(2, dtype=dtype).view(1, 1, 2, 2)
    weights = tb.attend(q, one_hot, one_hot, scale=1.0, logit_softcap=100.0)
    wanted = (100 * (q.double() / 100).tanh()).softmax(dim=-1)
    torch.testing.assert_close(weights.double(), wanted, rtol=0, atol=3e-3)


@pytest.mark.parametrize(
    "cached",
    [False, True],
)
def test_latent_scores_do_not_overflow(cached):
    """The unscaled product of a query with kv_up is 200 * 10 * 64, past 65504; an eighth fits."""
    attn = tb.MultiHeadLatentAttention(64, 1, kv_rank=4, rope_dim=2, nope_dim=62, v_dim=4)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.zero_()
        attn.q_proj.weight[:62, 0] = 200.0
        attn.kv_down.weight[:4, 1] = torch.tensor([1.0, -1.0, 1.0, -1.0])
        attn.kv_up.weight[:62] = 10.0
        attn.kv_up.weight[62:] = torch.eye(4)
        attn.o_proj.weight[:4, :4] = torch.eye(4)
        attn.kv_norm.weight.fill_(1.0)
    x = torch.zeros(1, 3, 64)
    x[..., :2] = 1.0
    wanted = rotated_once(copy.deepcopy(attn).double(), x.double(), cached)
    got = rotated_once(attn.half(), x.half(), cached)
    assert wanted[..., :4].abs().min() > 0.9
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=0.01)


def rotated_once(attn, x, cached):
    cos, sin = tb.build_rope_cache(8, 2)
    cache = tb.KVCache()
    if cached:
        attn(x[:, :2], cos=cos, sin=sin, kv_cache=cache)
        x = x[:, 2:]
    return attn(x, cos=cos, sin=sin, kv_cache=cache)[0]


@pytest.mark.parametrize("value", [300.0, 6e4, 1e-3])
def test_rms_norm_in_half(value):
    out = tb.RMSNorm(4).half()(torch.full((2, 4), value).half())
    torch.testing.assert_close(out.float(), torch.full((2, 4), 1.0), rtol=0, atol=0.3 * (value < 1))
    small = tb.RMSNorm(4, eps=1e-12).half()(torch.full((2, 4), 1e-3).half())
    torch.testing.assert_close(small, torch.ones(2, 4).half(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", DECODERS)
def test_large_activations_stay_finite(kind, dtype):
    module, call = build(kind)
    module.to(dtype)
    x = (30 * draw()).to(dtype)
    left = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    out = call(module, x, key_padding_mask=left)
    wanted = call(copy.deepcopy(module).double(), x.double(), key_padding_mask=left)
    kept = left[..., None].expand_as(out)
    assert out.isfinite().all()
    assert_near(out[kept], wanted[kept], 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation_is_rounded_once(dtype):
    cos, sin = tb.build_rope_cache(400, 8)
    x = draw().reshape(B, 1, T, D)[..., :8].to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = tb.apply_rope(x, cos[300 : 300 + T], sin[300 : 300 + T])
    assert got.dtype == dtype
    c, s = cos[300 : 300 + T].to(wide), sin[300 : 300 + T].to(wide)
    first, second = x.to(wide).split(4, dim=-1)
    turned = torch.cat(
        (first * c[:, :4] - second * s[:, :4], second * c[:, 4:] + first * s[:, 4:]), dim=-1
    )
    torch.testing.assert_close(got, turned.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rope_tables_in_each_dtype(dtype):
    wide, narrow = tb.build_rope_cache(4096, 8), tb.build_rope_cache(4096, 8, dtype=dtype)
    for table, cast in zip(wide, narrow):
        assert cast.dtype == dtype
        assert torch.equal(cast, table.to(dtype))


def test_tables_stay_float32_in_a_cast():
    """Positions past 256 collide in bfloat16: logits far out must not change with the casts."""
    model = tb.DecoderOnlyLM(23, 12, 1, 3, 1, 10, max_len=700)
    ids = torch.arange(600).view(1, 600) % 23
    fresh = copy.deepcopy(model)
    model.bfloat16().float()
    fresh.load_state_dict(model.state_dict())  # the rounded weights under tables never cast
    with torch.no_grad():
        assert torch.equal(model(ids), fresh(ids))
        assert_near(copy.deepcopy(fresh).bfloat16()(ids), fresh(ids).double(), 8e-2)


@pytest.mark.parametrize("dtype", HALF)
def test_blocks_get_float32_tables(dtype):
    model, seen = language_model().to(dtype), []
    model.blocks[0].register_forward_pre_hook(
        lambda block, args, options: seen.append((options["cos"], options["sin"])), with_kwargs=True
    )
    model(torch.arange(10).view(2, 5))
    for table, exact in zip(seen[0], tb.build_rope_cache(40, 4)):
        assert table.dtype == torch.float32
        assert torch.equal(table[:5], exact[:5])


# =============================================================================================
# A NaN that came in stays one
# =============================================================================================


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("keep", [None, torch.ones(3, 3).bool(), torch.ones(3, 3).bool().tril()])
def test_nan_query_is_a_nan_row(keep, cap):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 3, 2)
    q[0, 1, 2] = torch.nan
    outs = [tb.attend(q, k, k, keep, logit_softcap=cap)]
    if keep is not None and cap is None:
        outs.append(tb.attend_fused(q, k, k, keep))
    for out in outs:
        assert out[0, 1, 2].isnan().all()
        out[0, 1, 2] = 0
        assert out.isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in MODULES if "fused" not in kind])
def test_nan_token_stays_in_its_row(kind):
    module, call = build(kind)
    x, wanted = draw(), call(module, draw())
    x[1, 4] = torch.nan
    out = call(module, x)
    assert out[1, 4].isnan().all()
    torch.testing.assert_close(out[0], wanted[0])


# =============================================================================================
# Copies, pickles and the state dict
# =============================================================================================


def duplicates(module):
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    yield torch.load(stream, weights_only=False)


@pytest.mark.parametrize("kind", MODULES)
def test_copies_after_a_forward(kind):
    module, call = build(kind)
    wanted = call(module, draw())
    for other in duplicates(module):
        assert torch.equal(call(other, draw()), wanted)
        mine, theirs = list(module.parameters()), list(other.parameters())
        assert not {p.data_ptr() for p in mine} & {p.data_ptr() for p in theirs}


def test_copies_of_the_model():
    model = language_model(make_block=lambda _: DECODERS["modern mla moe"](3, 1), windows=[2, None])
    ids = torch.arange(10).view(2, 5)
    wanted = model(ids)
    for other in duplicates(model):
        assert torch.equal(other(ids), wanted)
        assert other.lm_head is None
        assert other.embedding.weight is not model.embedding.weight


def test_moe_statistics_in_a_copy():
    moe = tb.MoEFFN(D, D_FF)
    moe(torch.randn(3, D))
    for other in duplicates(moe):
        assert other.tokens_per_expert == moe.tokens_per_expert
        assert torch.equal(other.aux_loss, moe.aux_loss)
    assert moe.aux_loss.requires_grad


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_state_dict_round_trip(kind, assign):
    module, call = build(kind)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    other, _ = build(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(stream, weights_only=True), assign=assign)
    assert torch.equal(call(other, draw()), call(module, draw()))
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}


# =============================================================================================
# torch.device("meta"): a lost device= would put a tensor there
# =============================================================================================


@pytest.mark.parametrize("kind", MODULES)
def test_cpu_call_in_a_meta_context(kind):
    module, call = build(kind)
    x, wanted = draw(), call(module, draw())
    with torch.device("meta"):
        assert torch.equal(call(module, x), wanted)
        if kind in DECODERS:
            cache = tb.KVCache()
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                cache.reset()
                with mode():
                    chunks = [call(module, part, kv_cache=cache) for part in x.split(3, dim=1)]
                    torch.testing.assert_close(torch.cat(chunks, dim=1), wanted)


def test_functions_in_a_meta_context():
    model, ids = language_model(windows=[2, None]), torch.arange(10).view(2, 5)
    keep = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    loss, tokens = tb.next_token_loss(model(ids), ids, keep), model.generate(ids, 3)
    logits = torch.randn(2, 9)
    q, positions = torch.randn(1, 4, 3, 4), torch.arange(3)
    options = {"temperature": 1.0, "top_k": 4, "top_p": 0.9}
    with torch.device("meta"):
        assert torch.equal(tb.next_token_loss(model(ids), ids, keep), loss)
        assert torch.equal(model.generate(ids, 3), tokens)
        assert model.generate(ids, 3, key_padding_mask=keep, eos_id=1, **options).device == q.device
        assert tb.pick_next_token(logits, **options).device == q.device
        for path in PATHS:
            assert path(q, q, q, CAUSAL[:3, :3]).isfinite().all()
        assert tb.build_causal_mask(positions, positions, 2).tolist()[2] == [False, True, True]
        assert [table.device.type for table in tb.build_rope_cache(4, 4, device="cpu")] == [
            "cpu"
        ] * 2
        assert tb.build_rope_cache(4, 4)[0].device.type == "meta"
        assert tb.sinusoidal_positions(4, 4).device.type == "meta"
    assert tb.build_rope_cache(4, 4, device="meta")[0].device.type == "meta"


@pytest.mark.parametrize("filled", ["to_empty", "assign"])
@pytest.mark.parametrize("kind", MODULES)
def test_module_built_under_meta(kind, filled):
    module, call = build(kind)
    wanted = call(module, draw())
    with torch.device("meta"):
        other = DECODERS[kind](4, 2) if kind in DECODERS else OTHERS[kind][0]()
    assert all(parameter.is_meta for parameter in other.parameters())
    fill(other, module, filled)
    assert torch.equal(call(other, draw()), wanted)


def fill(other, module, how):
    if how == "to_empty":
        other.double().to_empty(device="cpu")
    other.load_state_dict(module.state_dict(), assign=how == "assign")


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("filled", ["to_empty", "assign"])
def test_model_built_under_meta(filled, tie):
    model, ids = language_model(tie_embeddings=tie), torch.arange(10).view(2, 5)
    with torch.device("meta"):
        other = tb.DecoderOnlyLM(23, D, 2, 3, 1, D_FF, max_len=40, tie_embeddings=tie)
    assert all(parameter.is_meta for parameter in other.parameters())
    fill(other, model, filled)
    assert (other.lm_head is None) == tie
    assert torch.equal(other(ids), model(ids))
    assert torch.equal(other.generate(ids, 3), model.generate(ids, 3))


def test_model_moved_to_meta_and_back():
    model, ids = language_model(), torch.arange(10).view(2, 5)
    state, wanted = copy.deepcopy(model.state_dict()), model(ids)
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(model(ids), wanted)


def test_model_in_a_parent():
    model, ids = language_model(), torch.arange(10).view(2, 5)
    parent, wanted = nn.ModuleDict({"lm": model}).float(), model(ids)
    state = copy.deepcopy(parent.state_dict())
    assert [name for name in state if "block" not in name] == [
        "lm.embedding.weight",
        "lm.final_norm.weight",
    ]
    with torch.no_grad():
        model.embedding.weight.zero_()
    parent.load_state_dict(state, assign=True)
    assert wanted.dtype == torch.float32
    assert torch.equal(model(ids), wanted)
