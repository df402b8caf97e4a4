"""Faults that public Transformer code has shipped, each as a right value that is known by hand.

What the other files of this folder compare with a reference or with torch is not here.
"""

import copy
import math

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
import transformer_block as tb
from blocks import COS, DECODERS, LAYERS_2017, SIN, D, decoder, randomised, run
from torch import nn

PATHS = pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
NARROW = dict(zip(("cos", "sin"), tb.build_rope_cache(64, 2)))  # for the heads of att()
close = {"rtol": 0, "atol": 1e-10}


def att(**options):
    """Four query heads and two KV heads, rotated, float64."""
    return randomised(tb.MultiHeadAttention(8, 4, 2, **{"rope": True} | options))


def causal(start, end):
    return torch.tensor([[j <= i for j in range(end)] for i in range(start, end)])


def attended(module, x, cache=None, **options):
    start = 0 if cache is None else cache.next_pos
    options = {"mask": causal(start, start + x.shape[1])} | NARROW | options
    return module(x, kv_cache=cache, **options)[0]


def weights_of(path, scores, keep=None, **options):
    """The attention weights for given scores [T, S]: one query channel a key, values one-hot."""
    q = scores[None, None]
    S = scores.shape[1]
    one_hot = torch.eye(S, dtype=scores.dtype)[None, None]
    return path(q, one_hot, one_hot, keep, scale=1.0, **options)[0, 0]


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


ALL_DECODERS = pytest.mark.parametrize("kind", DECODERS)


def lm(**options):
    return randomised(tb.DecoderOnlyLM(19, 8, 2, 4, 2, 12, max_len=32, **options))


# =============================================================================================
# Masks
# =============================================================================================


@pytest.mark.parametrize(
    ("q", "k", "keep"),
    [
        ([3, 4], [0, 1, 2, 3, 4], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        ([0, 1, 2, 3, 4], [3, 4], [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]),
        ([7], [0, 2, 9], [[1, 1, 0]]),
        ([], [1, 2], []),
    ],
)
def test_causal_mask_by_position(q, k, keep):
    q, k = torch.tensor(q, dtype=torch.long), torch.tensor(k)
    got = tb.build_causal_mask(q, k)
    assert got.dtype == torch.bool
    assert got.tolist() == torch.tensor(keep).bool().view(len(q), len(k)).tolist()


@pytest.mark.parametrize("kind", [k for k in DECODERS if k not in ("gpt2", "parallel")])
def test_short_table_is_never_clipped(kind):
    module = decoder(kind)
    x, cache = torch.randn(1, 5, D).double(), tb.KVCache()
    with pytest.raises(ValueError, match=r"cos .*4 .*5"):
        module(x, cos=COS[:4], sin=SIN[:4])
    module(x[:, :3], cos=COS[:4], sin=SIN[:4], kv_cache=cache)
    with pytest.raises(ValueError, match=r"cos .*4 .*5"):
        module(x[:, 3:], cos=COS[:4], sin=SIN[:4], kv_cache=cache)
    assert cache.next_pos == 3
    assert module(x[:, 3:4], cos=COS[:4], sin=SIN[:4], kv_cache=cache).shape == (1, 1, D)


def test_window_counts_self():
    positions = torch.arange(6)
    mask = tb.build_causal_mask(positions, positions, window=3)
    assert mask.sum(dim=1).tolist() == [1, 2, 3, 3, 3, 3]
    assert mask[4].tolist() == [False, False, True, True, True, False]
    assert torch.equal(tb.build_causal_mask(positions, positions, 1), torch.eye(6).bool())
    chunk = tb.build_causal_mask(positions[4:], positions, window=3)
    assert torch.equal(chunk, mask[4:])


@PATHS
def test_mask_is_no_bias(path):
    got = weights_of(path, torch.zeros(3, 3).double(), causal(0, 3))
    wanted = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3] * 3]).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)


@PATHS
@pytest.mark.parametrize("kind", ["left padding", "all padding", "memory all padding"])
def test_dead_rows_are_zero(path, kind):
    module = att(attend=path, rope=kind != "memory all padding", bias=True)
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    keep = bools([0, 0, 1, 1] if kind == "left padding" else [0, 0, 0, 0], [1, 1, 1, 1])
    if kind == "memory all padding":
        memory = torch.randn(2, 4, 8).double()
        out = module(x, memory, key_padding_mask=keep)[0]
        dead, alone = (0, slice(None)), module(x[1:], memory[1:])[0]
    else:
        out = attended(module, x, key_padding_mask=keep)
        dead = (0, slice(0, 2) if kind == "left padding" else slice(None))
        alone = attended(module, x[1:])
    bias = module.o_proj.bias.expand_as(out[dead])
    assert torch.equal(out[dead], bias)
    torch.testing.assert_close(out[1:], alone, **close)
    if kind == "left padding":  # positions shift by two, which rotation cannot see
        torch.testing.assert_close(out[:1, 2:], attended(module, x[:1, 2:]), rtol=0, atol=1e-6)
    out.square().sum().backward()
    for tensor in (x, *module.parameters()):
        assert tensor.grad.isfinite().all()


@PATHS
def test_no_keys_give_zeros(path):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 0, 2)
    assert torch.equal(path(q, k, k), torch.zeros(1, 4, 3, 2))


@PATHS
def test_true_means_may_attend(path):
    got = weights_of(path, torch.randn(1, 4).double(), bools([0, 0, 1, 0]))
    assert got.tolist() == [[0, 0, 1, 0]]


def test_padding_is_on_the_key_axis():
    keep = tb.combined_mask(causal(0, 4), bools([1, 1, 0, 0]), 1, 4, 4)
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert keep.expand(1, 1, 4, 4)[0, 0].int().tolist() == wanted
    encoder = randomised(tb.VanillaEncoderLayer2017(8, 4, 12))
    x, padding = torch.randn(1, 4, 8).double(), bools([1, 1, 0, 0])
    changed = x.clone()
    changed[:, 2:] += 5
    out, moved = encoder(x, padding), encoder(changed, padding)
    assert torch.equal(out[:, :2], moved[:, :2])
    assert (encoder(x) != encoder(changed))[:, :2].any()


@PATHS
def test_masked_weights_sum_to_one(path):
    q, k = torch.randn(2, 4, 3, 2).double(), torch.randn(2, 2, 3, 2).double()
    got = path(q, k, torch.ones(2, 2, 3, 1).double(), causal(0, 3))
    torch.testing.assert_close(got, torch.ones_like(got), rtol=0, atol=1e-12)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("padding", [None, [0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1]])
@ALL_DECODERS
def test_causal_whatever_is_given(kind, padding, cached, train):
    module, x = decoder(kind).train(train), torch.randn(1, 6, D).double()
    options = {} if padding is None else {"key_padding_mask": bools(padding)}
    changed = x.clone()
    changed[:, 5] += 1
    out, moved = (
        run(module, t, kv_cache=tb.KVCache() if cached else None, **options) for t in (x, changed)
    )
    assert torch.equal(out[:, :5], moved[:, :5])
    assert (out[:, 5] != moved[:, 5]).any()


# =============================================================================================
# Rotation
# =============================================================================================


def test_rotation_is_half_split():
    cos, sin = tb.build_rope_cache(8, 4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    got = tb.apply_rope(x, cos[1:2], sin[1:2])
    wanted = torch.tensor([-1.984111, 1.959901, 2.462378, 4.019800]).view(1, 1, 1, 4)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(got.norm(), x.norm())
    order = [0, 2, 1, 3]  # its own inverse
    interleaved = tb.apply_rope(x[..., order], cos[1:2], sin[1:2])[..., order]
    wanted = torch.tensor([-1.14264, 1.922076, 2.959851, 4.0298]).view(1, 1, 1, 4)
    torch.testing.assert_close(interleaved, wanted, rtol=0, atol=1e-5)


def test_angles_are_exact_far_out():
    angles = torch.arange(4096).double()[:, None] * 10000 ** (-torch.arange(0, 64, 2).double() / 64)
    exact = angles.cos().repeat(1, 2)
    for dtype, tolerance in ((torch.bfloat16, 0.005), (torch.float16, 0.001)):
        cos, _ = tb.build_rope_cache(4096, 64, dtype=dtype)
        assert (cos.double() - exact).abs().max() < tolerance


def test_rotation_starts_at_start_pos():
    module, x = att(), torch.randn(1, 4, 8).double()
    for start in (0, 4, 0):
        _, (k, _) = module(x, **NARROW, start_pos=start)
        p = {name: w.numpy() for name, w in module.state_dict().items()}
        keys = reference.heads(reference.linear(p, "k_proj", x[0].numpy()), 2)
        np.testing.assert_allclose(k[0].detach(), reference.rotate(keys, start, 2, 1e4), atol=1e-10)


@pytest.mark.parametrize("kind", ["modern", "modern mla"])
def test_start_pos_against_the_cache(kind):
    module, x, cache = decoder(kind), torch.randn(1, 3, D).double(), tb.KVCache()
    run(module, x, kv_cache=cache, start_pos=0)
    for wrong in (0, 2, 4):
        with pytest.raises(ValueError, match=rf"start_pos .*3.*{wrong}"):
            run(module, x, kv_cache=cache, start_pos=wrong)
    assert cache.next_pos == 3
    run(module, x, kv_cache=cache, start_pos=3)
    assert cache.next_pos == 6


# =============================================================================================
# KVCache
# =============================================================================================


def test_cache_holds_kv_heads_only():
    module, cache = att(), tb.KVCache()
    with torch.no_grad():
        attended(module, torch.randn(5, 3, 8).double(), cache)
    assert cache.k.shape == cache.v.shape == (5, 2, 3, 2)
    stored = cache.k.numel() * 8 + cache.v.numel() * 8
    assert stored == tb.kv_cache_bytes(1, 2, 2, 3, batch=5, bytes_per_element=8)


# =============================================================================================
# Attention
# =============================================================================================


@PATHS
def test_head_reads_its_group(path):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 5, 2)
    got = path(q, k, v)
    wanted = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 4, 1, 1).expand(1, 4, 3, 2)
    torch.testing.assert_close(got, wanted)


def test_channels_follow_their_group():
    module = att(rope=False)
    with torch.no_grad():
        module.v_proj.weight.zero_()
        module.v_proj.weight[2:, 0] = 1.0  # the second KV head copies channel 0, which is 1
        module.o_proj.weight.copy_(torch.eye(8))
    x = torch.randn(1, 3, 8).double()
    x[..., 0] = 1.0
    wanted = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).double().expand(1, 3, 8)
    torch.testing.assert_close(module(x)[0], wanted, **close)


def test_heads_are_split_and_merged():
    module = tb.MultiHeadAttention(4, 2)
    split = tb.split_heads(torch.arange(8).view(1, 2, 4), module.head_dim)
    assert split.tolist() == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]
    merging = tb.MultiHeadAttention(
        4, 2, attend=lambda *_, **__: torch.arange(8.0).view(1, 2, 2, 2)
    )
    with torch.no_grad():
        merging.o_proj.weight.copy_(torch.eye(4))
    assert merging(torch.zeros(1, 2, 4))[0].tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_permuted_tokens_without_mask():
    module, x = att(rope=False), torch.randn(2, 5, 8).double()
    order = [3, 0, 4, 1, 2]
    torch.testing.assert_close(module(x[:, order])[0], module(x)[0][:, order], **close)


@PATHS
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_scale_is_applied_once(path, scale):
    q = torch.tensor([3.0, 0, 0, 0]).double().view(1, 1, 1, 4)
    k = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0]]).double().view(1, 1, 2, 4)
    v = torch.eye(2).double().view(1, 1, 2, 2)
    first, second = path(q, k, v, scale=scale).flatten().tolist()
    assert second / first == pytest.approx(math.exp(3 * (0.5 if scale is None else scale)))


@PATHS
def test_softmax_runs_over_the_keys(path):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2)
    ones = path(q, k, torch.ones(1, 2, 5, 2))
    torch.testing.assert_close(ones, torch.ones(1, 4, 3, 2))
    v = torch.randn(1, 2, 5, 2)
    torch.testing.assert_close(path(q, k, v)[:, :, :1], path(q[:, :, :1], k, v))


@pytest.mark.parametrize(("T", "S"), [(3, 5), (5, 3), (4, 4)])
def test_memory_has_its_own_mask(T, S):
    module = randomised(tb.VanillaSeq2SeqDecoderLayer2017(8, 4, 12))
    x, memory = torch.randn(1, T, 8).double(), torch.randn(1, S, 8).double()
    memory_keep = torch.arange(S)[None] < S - 1
    keep = torch.ones(1, T).bool()

    def rows_moved(x_change=None, memory_change=None):
        outs = []
        for amount in (0, 1):
            a, b = x.clone(), memory.clone()
            if x_change is not None:
                a[:, x_change] += amount
            if memory_change is not None:
                b[:, memory_change] += amount
            outs.append(module(a, b, key_padding_mask=keep, memory_key_padding_mask=memory_keep))
        return (outs[0] != outs[1]).any(dim=-1)[0].tolist()

    assert rows_moved(memory_change=S - 1) == [False] * T
    assert rows_moved(memory_change=S - 2) == [True] * T
    assert rows_moved(x_change=2) == [t >= 2 for t in range(T)]


@pytest.mark.parametrize("B", [1, 2, 4, 5])  # also B = G, B = H and B = T
@pytest.mark.parametrize("kind", [*DECODERS, *LAYERS_2017])
def test_padding_reaches_no_real_row(kind, B):
    x = torch.randn(B, 5, D).double()
    module = decoder(kind) if kind in DECODERS else randomised(LAYERS_2017[kind]())
    keep = (torch.arange(5)[None] + torch.arange(B)[:, None]) % 4 != 1
    changed = torch.where(keep[..., None], x, x + 3)

    def call(x):
        if kind == "encoder":
            return module(x, keep)
        if kind == "seq2seq":
            return module(x, torch.ones(B, 2, D).double(), key_padding_mask=keep)
        return run(module, x, key_padding_mask=keep)

    torch.testing.assert_close(call(x)[keep], call(changed)[keep], **close)


def test_soft_cap_acts_before_the_mask():
    scores = torch.tensor([[2.0, 100.0]]).double()
    capped = weights_of(tb.attend, scores, bools([1, 0]), logit_softcap=5.0)
    assert capped.tolist() == [[1, 0]]
    open_weights = weights_of(tb.attend, scores, logit_softcap=5.0)[0]
    a, b = (5 * math.tanh(s / 5) for s in (2, 100))
    assert open_weights[1].item() == pytest.approx(1 / (1 + math.exp(a - b)))
    with pytest.raises(ValueError, match=r"logit_softcap .*5\.0"):
        weights_of(tb.attend_fused, scores, logit_softcap=5.0)
    with pytest.raises(ValueError, match=r"logit_softcap .*5\.0"):
        tb.MultiHeadAttention(8, 4, logit_softcap=5.0, attend=tb.attend_fused)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"logit_softcap .*{bad}"):
            weights_of(tb.attend, scores, logit_softcap=bad)
        with pytest.raises(ValueError, match=f"logit_softcap .*{bad}"):
            tb.MultiHeadAttention(8, 4, logit_softcap=bad)


# =============================================================================================
# Norms
# =============================================================================================


def test_layer_norm_divides_by_n():
    norms = (
        tb.VanillaEncoderLayer2017(4, 2, 4).ln1,
        tb.GPT2StyleDecoderLayer(4, 2, 4).norm1,
        tb.ParallelDecoderBlock(4, 2, 2, 4).norm,
    )
    for norm in norms:
        got = norm(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        assert got[0].item() == pytest.approx(-1.341635, abs=1e-6)


def test_eps_stands_under_the_root():
    got = tb.RMSNorm(3, 1e-6)(torch.full((3,), 1e-4))
    assert got[0].item() == pytest.approx(0.099504, abs=1e-6)
    zero = torch.zeros(3, requires_grad=True)
    tb.RMSNorm(3)(zero).sum().backward()
    assert zero.grad.isfinite().all()
    for kind, default in (("gpt2", 1e-5), ("modern", 1e-6), ("parallel rotated", 1e-5)):
        eps = {m.eps for m in decoder(kind).modules() if hasattr(m, "eps")}
        assert eps == {default}
    assert tb.GPT2StyleDecoderLayer(2, 1, 2).norm1(torch.tensor([1e-3, -1e-3]))[0].item() == (
        pytest.approx(0.301511, abs=1e-6)
    )


# =============================================================================================
# Feed-forward networks
# =============================================================================================


def scalar_dense(**options):
    ffn = tb.DenseFFN(1, 1, **options)
    for linear in (ffn.up, ffn.down):
        nn.init.ones_(linear.weight)
    return ffn


def test_gelu_is_exact_by_default():
    tanh = {"act": lambda x: F.gelu(x, approximate="tanh")}
    for ffn, wanted in (
        (scalar_dense(), (0.8413447, 2.2753345)),
        (scalar_dense(**tanh), (0.8411920, 2.2756730)),
    ):
        got = ffn(torch.tensor([[1.0], [2.3]])).flatten().tolist()
        assert got == pytest.approx(wanted, abs=1e-6)


def scalar_gated(up):
    ffn = tb.GatedFFN(1, 1)
    for linear, value in ((ffn.gate, 2.0), (ffn.up, up), (ffn.down, 1.0)):
        nn.init.constant_(linear.weight, value)
    return ffn


def test_swiglu_activates_the_gate():
    got = scalar_gated(-3.0)(torch.ones(1, 1)).item()
    assert got == pytest.approx(-5.2847825, abs=1e-6)


def test_swiglu_has_three_matrices():
    ffn = tb.GatedFFN(6, 10)
    assert sum(p.numel() for p in ffn.parameters()) == 3 * 6 * 10
    assert scalar_gated(0.0)(torch.ones(1, 1)).item() == 0
    with pytest.raises(TypeError, match=r"act .*'swiglu'"):
        tb.DenseFFN(6, 10, act="swiglu")


# =============================================================================================
# Experts
# =============================================================================================


def experts(**options):
    return randomised(tb.MoEFFN(6, 8, **options))


def test_router_learns_from_the_output():
    moe, x = experts(), torch.randn(9, 6).double()
    moe(x).sum().backward()
    gradient = moe.router.weight.grad.clone()
    assert gradient.norm() > 1e-2
    for e, c in ((0, 0), (1, 3), (2, 5), (3, 1)):
        sums = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                moe.router.weight[e, c] += step
                sums.append(moe(x).sum().item())
                moe.router.weight[e, c] -= step
        assert gradient[e, c].item() == pytest.approx((sums[0] - sums[1]) / 2e-6, abs=1e-6)


class Constant(nn.Module):
    def forward(self, x):
        return torch.full_like(x, 3.0)


def test_constant_expert_is_weighted():
    moe, x = experts(), torch.randn(5, 6).double()
    moe.experts = nn.ModuleList(Constant() for _ in range(4))
    best = (x @ moe.router.weight.T).softmax(dim=-1).max(dim=-1, keepdim=True).values
    torch.testing.assert_close(moe(x), 3 * best.expand(5, 6), **close)


def routed(probabilities):
    """A layer whose router gives these probabilities to the rows of the identity."""
    n, E = len(probabilities), len(probabilities[0])
    moe = tb.MoEFFN(n, 4, n_experts=E).double()
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor(probabilities).double().log().T)
    moe(torch.eye(n).double())
    return moe


@pytest.mark.parametrize(
    ("probabilities", "loss", "counts"),
    [
        ([[0.7, 0.3], [0.6, 0.4], [0.4, 0.6]], 1.044444, [2, 1]),
        ([[0.7, 0.3], [0.6, 0.4], [0.4, 0.6]] + [[0.9, 0.1]] * 5, 1.4125, [7, 1]),
        ([[1.0, 1e-12, 1e-12, 1e-12]] * 3, 4.0, [3, 0, 0, 0]),
        ([[0.3, 0.7], [0.7, 0.3]], 1.0, [1, 1]),
    ],
)
def test_balance_loss_by_hand(probabilities, loss, counts):
    moe = routed(probabilities)
    assert moe.aux_loss.item() == pytest.approx(loss, abs=1e-6)
    assert moe.tokens_per_expert == counts


def test_balance_loss_lowers_the_crowd():
    moe = routed([[0.7, 0.3], [0.6, 0.4], [0.4, 0.6]])
    moe.aux_loss.backward()
    with torch.no_grad():
        moe.router.weight -= 0.1 * moe.router.weight.grad
    before = moe.aux_loss.item()
    moe(torch.eye(3).double())
    assert moe.aux_loss.item() < before
    moe(torch.eye(3).double()[:0])
    assert moe.aux_loss.item() == 0
    assert moe.tokens_per_expert == [0, 0]


# =============================================================================================
# Blocks
# =============================================================================================


def silenced(module, *names):
    """Zero output weights and biases of the named sublayers."""
    with torch.no_grad():
        for name in names:
            for part, linear in getattr(module, name).named_modules():
                if part.rpartition(".")[2] in ("o_proj", "down"):
                    for parameter in linear.parameters():
                        parameter.zero_()
    return module


@ALL_DECODERS
def test_silent_blocks_are_the_identity(kind):
    module, x = silenced(decoder(kind), "attn", "ffn"), torch.randn(2, 4, D).double()
    assert torch.equal(run(module, x), x)


def test_silent_post_norm_layers_norm():
    x, memory = torch.randn(2, 4, 8).double(), torch.randn(2, 3, 8).double()
    encoder = silenced(randomised(tb.VanillaEncoderLayer2017(8, 4, 12)), "attn", "ffn")
    decoder = silenced(
        randomised(tb.VanillaSeq2SeqDecoderLayer2017(8, 4, 12)), "self_attn", "cross_attn", "ffn"
    )
    for module, got in ((encoder, encoder(x)), (decoder, decoder(x, memory))):
        p = {name: w.numpy() for name, w in module.state_dict().items()}
        wanted = x.reshape(-1, 8).numpy()
        for name in ("ln1", "ln2", "ln3")[: 2 + (module is decoder)]:
            wanted = reference.layer_norm(p, name, wanted, 1e-5)
        np.testing.assert_allclose(got.detach().reshape(-1, 8), wanted, atol=1e-10)


@pytest.mark.parametrize("kind", ["parallel", "parallel rotated"])
def test_parallel_branches_add_up(kind):
    x = torch.randn(2, 4, D).double()
    module = decoder(kind)
    both = run(module, x)
    attn_only = run(silenced(copy.deepcopy(module), "ffn"), x)
    ffn_only = run(silenced(copy.deepcopy(module), "attn"), x)
    torch.testing.assert_close(both - x, (attn_only - x) + (ffn_only - x), **close)
    p = {name: w.numpy() for name, w in module.state_dict().items()}
    name = "norm" if kind == "parallel" else "ffn_norm"
    h = reference.layer_norm(p, name, x.reshape(-1, D).numpy(), 1e-5)
    wanted = x.reshape(-1, D).numpy() + reference.dense_ffn(reference.sub(p, "ffn"), h)
    np.testing.assert_allclose(ffn_only.detach().reshape(-1, D), wanted, atol=1e-10)
    assert len([m for m in module.modules() if isinstance(m, nn.LayerNorm)]) == (
        1 if kind == "parallel" else 2
    )


# =============================================================================================
# Embedding, model, generation
# =============================================================================================


@pytest.mark.parametrize(("B", "T"), [(5, 5), (2, 3), (4, 4)])
@ALL_DECODERS
def test_rows_of_a_batch_do_not_meet(kind, B, T):
    module, x = decoder(kind), torch.randn(B, T, D).double()
    out = run(module, x)
    for b in range(B):
        torch.testing.assert_close(out[b : b + 1], run(module, x[b : b + 1]), **close)
    alike = run(module, x[:1].expand(B, T, D))
    torch.testing.assert_close(alike, alike[:1].expand(B, T, D), **close)


def test_embedding_is_scaled_once():
    scale = math.sqrt(8)
    model, ids = lm(embedding_scale=scale), torch.tensor([[1, 2, 3]])
    seen, before = [], model.embedding.weight.detach().clone()
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    logits = model(ids)
    assert torch.equal(seen[0], before[ids] * scale)
    assert torch.equal(model.embedding.weight, before)
    normed = model.final_norm(model.blocks[1](model.blocks[0](seen[0], **NARROW), **NARROW))
    torch.testing.assert_close(logits, normed @ before.T, **close)
