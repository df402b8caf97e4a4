"""The catalogue of faults that public Transformer code has shipped, each as its right value.

Without a place in the script, or with a part that has none:
F21 positions of each row: the tables are 1-D by contract, and what is not is refused.
F24 learned positions: they are added outside the blocks; the rotated half is tested.
F38 scale 1 + w: the norm multiplies by w.
F43 activation by name: activations are passed as functions; the three matrices are tested.
F47 padding in the balance loss: the loss takes no mask, as the docstring says of what it counts.
F53 position table on the batch axis: the script adds no table, rotation is tested instead.
"""

import copy
import math

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
import transformer_block as tb
from torch import nn

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

PATHS = pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
COS, SIN = tb.build_rope_cache(64, 2)
SPLITS = [[6], [1] * 6, [4, 2], [2, 3, 1], [4, 1, 1]]
close = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.double()


def att(**options):
    """Four query heads and two KV heads, rotated, float64."""
    return randomised(tb.MultiHeadAttention(8, 4, 2, **{"rope": True} | options))


def causal(start, end):
    return torch.tensor([[j <= i for j in range(end)] for i in range(start, end)])


def attended(module, x, cache=None, **options):
    start = 0 if cache is None else cache.next_pos
    options = {"mask": causal(start, start + x.shape[1]), "cos": COS, "sin": SIN} | options
    return module(x, kv_cache=cache, **options)[0]


def reference_attention(module, x, keep, **options):
    p = {name: w.detach().numpy() for name, w in module.state_dict().items()}
    rows = [
        reference.multi_head_attention(p, row.numpy(), 2, keep=keep, rope=(0, 2, 1e4), **options)[0]
        for row in x
    ]
    return torch.from_numpy(np.stack(rows))


def in_chunks(module, x, lengths):
    cache, outs = tb.KVCache(), []
    for part in x.split(lengths, dim=1):
        outs.append(attended(module, part, cache))
    return torch.cat(outs, dim=1), cache


def weights_of(path, scores, keep=None, **options):
    """The attention weights for given scores [T, S]: one query channel a key, values one-hot."""
    q = scores[None, None]
    S = scores.shape[1]
    one_hot = torch.eye(S, dtype=scores.dtype)[None, None]
    return path(q, one_hot, one_hot, keep, scale=1.0, **options)[0, 0]


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


BLOCKS = {
    "gpt2": lambda: tb.GPT2StyleDecoderLayer(8, 4, 12),
    "modern": lambda: tb.ModernDecoderBlock(8, 4, 2, 12),
    "parallel": lambda: tb.ParallelDecoderBlock(8, 4, 2, 12),
    "parallel two norms": lambda: tb.ParallelDecoderBlock(8, 4, 2, 12, shared_norm=False),
    "branch norm": lambda: tb.BranchNormDecoderBlock(8, 4, 2, 12),
    "latent": lambda: tb.ModernDecoderBlock(
        8,
        d_ff=12,
        attn=tb.MultiHeadLatentAttention(8, 4, kv_rank=5, rope_dim=2, nope_dim=3, v_dim=2),
    ),
}
ALL_DECODERS = pytest.mark.parametrize("kind", BLOCKS)


def block(kind):
    return randomised(BLOCKS[kind]())


def run(module, x, **options):
    if not isinstance(module, tb.GPT2StyleDecoderLayer):
        options |= {"cos": COS, "sin": SIN}
    return module(x, **options)


def lm(**options):
    return randomised(tb.DecoderOnlyLM(19, 8, 2, 4, 2, 12, max_len=32, **options))


# =============================================================================================
# Part A. Masks
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
def test_F01_causal_mask_goes_by_position(q, k, keep):
    q, k = torch.tensor(q, dtype=torch.long), torch.tensor(k)
    got = tb.build_causal_mask(q, k)
    assert got.dtype == torch.bool
    assert got.tolist() == torch.tensor(keep).bool().view(len(q), len(k)).tolist()


@pytest.mark.parametrize("lengths", SPLITS, ids=str)
@ALL_DECODERS
def test_F02_mask_covers_the_cached_keys(kind, lengths):
    module, x, cache = block(kind), torch.randn(1, 6, 8).double(), tb.KVCache()
    chunks = [run(module, part, kv_cache=cache) for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), run(module, x), **close)


@pytest.mark.parametrize("lengths", SPLITS, ids=str)
def test_F02_attention_in_chunks_equals_the_loop(lengths):
    module, x = att(), torch.randn(2, 6, 8).double()
    got, _ = in_chunks(module, x, lengths)
    wanted = reference_attention(module, x, np.tril(np.ones((6, 6), bool)))
    torch.testing.assert_close(got, wanted, **close)


@ALL_DECODERS
def test_F03_prefill_with_a_cache_is_causal(kind):
    module, x = block(kind), torch.randn(2, 6, 8).double()
    changed = x.clone()
    changed[:, 5] += 1
    out, moved = (run(module, t, kv_cache=tb.KVCache()) for t in (x, changed))
    assert torch.equal(out[:, :5], moved[:, :5])
    assert (out[:, 5] != moved[:, 5]).any()
    torch.testing.assert_close(out, run(module, x), **close)


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k not in ("gpt2", "parallel")])
def test_F04_table_too_short_is_refused_and_never_clipped(kind):
    module = block(kind)
    if kind.startswith("parallel"):
        module.attn = att()
    x, cache = torch.randn(1, 5, 8).double(), tb.KVCache()
    with pytest.raises(ValueError, match=r"cos .*4 .*5"):
        module(x, cos=COS[:4], sin=SIN[:4])
    module(x[:, :3], cos=COS[:4], sin=SIN[:4], kv_cache=cache)
    with pytest.raises(ValueError, match=r"cos .*4 .*5"):
        module(x[:, 3:], cos=COS[:4], sin=SIN[:4], kv_cache=cache)
    assert cache.next_pos == 3
    assert module(x[:, 3:4], cos=COS[:4], sin=SIN[:4], kv_cache=cache).shape == (1, 1, 8)


def test_F04_model_past_its_length_is_refused():
    model = lm()
    with pytest.raises(ValueError, match=r"33.*max_len=32"):
        model(torch.zeros(1, 33, dtype=torch.long))
    assert model(torch.zeros(1, 32, dtype=torch.long)).shape == (1, 32, 19)


def test_F05_window_counts_self():
    positions = torch.arange(6)
    mask = tb.build_causal_mask(positions, positions, window=3)
    assert mask.sum(dim=1).tolist() == [1, 2, 3, 3, 3, 3]
    assert mask[4].tolist() == [False, False, True, True, True, False]
    assert torch.equal(tb.build_causal_mask(positions, positions, 1), torch.eye(6).bool())
    chunk = tb.build_causal_mask(positions[4:], positions, window=3)
    assert torch.equal(chunk, mask[4:])


@PATHS
def test_F06_mask_is_no_bias(path):
    got = weights_of(path, torch.zeros(3, 3).double(), causal(0, 3))
    wanted = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3] * 3]).double()
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@PATHS
def test_F07_key_masked_twice_stays_finite_in_half(path, dtype):
    module = att(attend=path)
    x = 30 * torch.randn(2, 6, 8).to(dtype)
    keep = bools([0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1])
    out = attended(copy.deepcopy(module).to(dtype), x, key_padding_mask=keep)
    wanted = attended(module.to(dtype).float(), x.float(), key_padding_mask=keep)
    assert out.isfinite().all()
    difference = (out.float() - wanted)[keep].abs().max()
    assert difference < 0.05 * wanted[keep].abs().max()


@PATHS
@pytest.mark.parametrize("kind", ["left padding", "all padding", "memory all padding"])
def test_F08_row_that_sees_nothing_is_zero_with_finite_gradients(path, kind):
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
def test_F08_whole_call_without_keys_is_zero(path):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 0, 2)
    assert torch.equal(path(q, k, k), torch.zeros(1, 4, 3, 2))


@PATHS
def test_F09_true_means_may_attend(path):
    got = weights_of(path, torch.randn(1, 4).double(), bools([0, 0, 1, 0]))
    assert got.tolist() == [[0, 0, 1, 0]]


def test_F09_multi_head_attention_of_torch_takes_the_negated_mask():
    theirs = nn.MultiheadAttention(8, 4, bias=False, batch_first=True, dtype=torch.float64)
    ours = tb.MultiHeadAttention(8, 4).double()
    q, k, v = theirs.in_proj_weight.detach().chunk(3)
    weights = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    ours.load_state_dict(weights | {"o_proj.weight": theirs.out_proj.weight.detach()})
    x, keep = torch.randn(2, 4, 8).double(), bools([0, 0, 1, 0], [1, 0, 1, 1])
    wanted, _ = theirs(x, x, x, key_padding_mask=~keep)
    torch.testing.assert_close(ours(x, key_padding_mask=keep)[0], wanted, **close)


def test_F10_padding_lies_on_the_key_axis():
    keep = tb.MultiHeadAttention.combined_mask(causal(0, 4), bools([1, 1, 0, 0]), 1, 4, 4)
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert keep.expand(1, 1, 4, 4)[0, 0].int().tolist() == wanted
    encoder = randomised(tb.VanillaEncoderLayer2017(8, 4, 12))
    x, padding = torch.randn(1, 4, 8).double(), bools([1, 1, 0, 0])
    changed = x.clone()
    changed[:, 2:] += 5
    out, moved = encoder(x, padding), encoder(changed, padding)
    assert torch.equal(out[:, :2], moved[:, :2])
    assert (encoder(x) != encoder(changed))[:, :2].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", ["mask", "key_padding_mask", "keep"])
def test_F11_mask_of_another_dtype_is_refused(name, dtype):
    x, mask = torch.randn(1, 3, 8).double(), torch.ones(3, 3).to(dtype)
    with pytest.raises(TypeError, match=rf"{name} .*bool.*{dtype}"):
        if name == "keep":
            tb.attend(x[None], x[None], x[None], mask)
        else:
            att(rope=False)(x, **{name: mask if name == "mask" else mask[:1]})


@PATHS
def test_F12_weights_sum_to_one_under_a_mask(path):
    q, k = torch.randn(2, 4, 3, 2).double(), torch.randn(2, 2, 3, 2).double()
    got = path(q, k, torch.ones(2, 2, 3, 1).double(), causal(0, 3))
    torch.testing.assert_close(got, torch.ones_like(got), rtol=0, atol=1e-12)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("padding", [None, [0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1]])
@ALL_DECODERS
def test_F13_causal_whatever_else_is_given(kind, padding, cached, train):
    module, x = block(kind).train(train), torch.randn(1, 6, 8).double()
    options = {} if padding is None else {"key_padding_mask": bools(padding)}
    changed = x.clone()
    changed[:, 5] += 1
    out, moved = (
        run(module, t, kv_cache=tb.KVCache() if cached else None, **options) for t in (x, changed)
    )
    assert torch.equal(out[:, :5], moved[:, :5])
    assert (out[:, 5] != moved[:, 5]).any()


@PATHS
def test_F13_padding_and_causal_mask_are_joined(path):
    module, x = att(attend=path), torch.randn(1, 4, 8).double()
    got = attended(module, x, key_padding_mask=bools([1, 0, 1, 1]))
    both = np.tril(np.ones((4, 4), bool)) & np.array([1, 0, 1, 1], bool)
    torch.testing.assert_close(got, reference_attention(module, x, both), **close)


@PATHS
def test_F14_mask_constant_fits_half(path):
    module, x = att(attend=path), torch.randn(1, 5, 8)
    got = attended(copy.deepcopy(module).half(), x.half())
    wanted = attended(module, x.double())
    assert (got.double() - wanted).abs().max() < 1e-2 * wanted.abs().max()


# =============================================================================================
# Part B. Rotation
# =============================================================================================


def test_F15_rotation_is_half_split():
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


def test_F16_angles_are_exact_far_out_in_every_dtype():
    angles = torch.arange(4096).double()[:, None] * 10000 ** (-torch.arange(0, 64, 2).double() / 64)
    exact = angles.cos().repeat(1, 2)
    for dtype, tolerance in ((torch.bfloat16, 0.005), (torch.float16, 0.001)):
        cos, _ = tb.build_rope_cache(4096, 64, dtype=dtype)
        assert (cos.double() - exact).abs().max() < tolerance


def test_F16_model_cast_down_and_up_keeps_its_tables():
    model = tb.DecoderOnlyLM(19, 8, 1, 4, 2, 12, max_len=600)
    never_cast = copy.deepcopy(model)
    model.bfloat16().float().bfloat16().float()
    never_cast.load_state_dict(model.state_dict())
    ids = torch.arange(600)[None] % 19
    assert torch.equal(model(ids), never_cast(ids))


def test_F17_rotation_depends_on_the_offset_not_the_length_alone():
    module, x = att(), torch.randn(1, 4, 8).double()
    for start in (0, 4, 0):
        _, (k, _) = module(x, cos=COS, sin=SIN, start_pos=start)
        p = {name: w.numpy() for name, w in module.state_dict().items()}
        keys = reference.heads(reference.linear(p, "k_proj", x[0].numpy()), 2)
        np.testing.assert_allclose(k[0].detach(), reference.rotate(keys, start, 2, 1e4), atol=1e-10)


def test_F18_position_goes_on_where_the_cache_ends():
    module, x = att(), torch.randn(1, 6, 8).double()
    cache, outs, seen = tb.KVCache(), [], []
    for part in x.split([4, 1, 1], dim=1):
        outs.append(attended(module, part, cache))
        seen.append(cache.next_pos)
    assert seen == [4, 5, 6]
    wanted = reference_attention(module, x, np.tril(np.ones((6, 6), bool)))
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted, **close)


@pytest.mark.parametrize("attn", ["heads", "latent"])
def test_F18_start_pos_that_disagrees_with_the_cache_is_refused(attn):
    module = att() if attn == "heads" else block("latent").attn
    x, cache = torch.randn(1, 3, 8).double(), tb.KVCache()
    attended(module, x, cache, start_pos=0)
    for wrong in (0, 2, 4):
        with pytest.raises(ValueError, match=rf"start_pos .*3.*{wrong}"):
            module(x, cos=COS, sin=SIN, kv_cache=cache, start_pos=wrong)
    assert cache.next_pos == 3
    module(x, cos=COS, sin=SIN, kv_cache=cache, start_pos=3)
    assert cache.next_pos == 6


def test_F19_position_is_read_before_the_append():
    module, x = att(), torch.randn(1, 6, 8).double()
    got, cache = in_chunks(module, x, [6])
    wanted = reference_attention(module, x, np.tril(np.ones((6, 6), bool)))
    torch.testing.assert_close(got, wanted, **close)
    position = cache.next_pos
    cache.append(*torch.randn(2, 1, 2, 1, 2).double())
    assert (position, cache.next_pos) == (6, 7)


@pytest.mark.parametrize("lengths", SPLITS, ids=str)
def test_F20_keys_are_rotated_once_and_values_never(lengths):
    module, x = att(), torch.randn(1, 6, 8).double()
    _, cache = in_chunks(module, x, lengths)
    p = {name: w.numpy() for name, w in module.state_dict().items()}
    k, v = (
        reference.heads(reference.linear(p, name, x[0].numpy()), 2) for name in ("k_proj", "v_proj")
    )
    np.testing.assert_allclose(cache.k[0].detach(), reference.rotate(k, 0, 2, 1e4), atol=1e-10)
    np.testing.assert_allclose(cache.v[0].detach(), v, atol=1e-10)


def test_F21_positions_of_each_row_are_refused():
    x = torch.randn(4, 4, 3, 2)
    by_row = COS[torch.tensor([[0, 1, 2]] * 4)]
    with pytest.raises(ValueError, match=r"cos .*\[4, 3, 2\]"):
        tb.apply_rope(x, by_row, by_row)
    with pytest.raises(ValueError, match=r"q_positions .*\[2, 3\]"):
        tb.build_causal_mask(torch.zeros(2, 3).long(), torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_F22_rotation_keeps_the_dtype(dtype):
    x = torch.randn(1, 2, 3, 2).to(dtype)
    got = tb.apply_rope(x, COS[:3], SIN[:3])
    assert got.dtype == dtype
    wanted = tb.apply_rope(x.double(), COS[:3], SIN[:3]).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tb.build_rope_cache(4, 5), "head_dim .*even.*5"),
        (lambda: tb.MultiHeadAttention(10, 4, 2), "n_q_heads=4 .*d_model=10"),
        (lambda: tb.MultiHeadAttention(12, 6, 4), "n_kv_heads=4 .*n_q_heads=6"),
        (lambda: tb.MultiHeadAttention(12, 4, 4, rope=True), "head_dim .*even.*3"),
        (lambda: tb.ModernDecoderBlock(12, 4, 4), "head_dim .*even.*3"),
        (
            lambda: tb.MultiHeadLatentAttention(8, 2, kv_rank=4, rope_dim=3, nope_dim=4, v_dim=4),
            "rope_dim .*even.*3",
        ),
    ],
)
def test_F23_odd_or_indivisible_head_dim_is_refused_at_construction(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_F24_left_padded_rows_generate_what_they_generate_alone():
    model = lm()
    ids, keep = torch.tensor([[3, 3, 5, 6], [7, 8, 9, 10]]), bools([0, 0, 1, 1], [1, 1, 1, 1])
    together = model.generate(ids, 3, key_padding_mask=keep)
    assert together[0, 2:].tolist() == model.generate(ids[:1, 2:], 3)[0].tolist()
    assert together[1].tolist() == model.generate(ids[1:], 3)[0].tolist()
    logits = model(ids, key_padding_mask=keep)
    torch.testing.assert_close(logits[:1, 2:], model(ids[:1, 2:]), rtol=0, atol=1e-5)


# =============================================================================================
# Part C. KVCache
# =============================================================================================


@pytest.mark.parametrize("max_len", [None, 9])
@pytest.mark.parametrize("lengths", [(3, 6), (6, 3)])
def test_F25_reset_forgets_everything(max_len, lengths):
    module, cache = att(), tb.KVCache(max_len)
    first, second = (torch.randn(1, n, 8).double() for n in lengths)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            attended(module, first, cache)
            cache.reset()
            assert (cache.next_pos, cache.k, cache.v) == (0, None, None)
            got = attended(module, second, cache)
            torch.testing.assert_close(got, attended(module, second), **close)
            cache.reset()


def test_F25_generate_twice_is_the_same_answer():
    model, ids = lm(), torch.tensor([[1, 2, 3]])
    first = model.generate(ids, 4)
    model.generate(torch.tensor([[4, 5, 6, 7, 8]]), 4)
    assert torch.equal(model.generate(ids, 4), first)


def test_F26_cache_holds_kv_heads_only():
    module, cache = att(), tb.KVCache()
    with torch.no_grad():
        attended(module, torch.randn(5, 3, 8).double(), cache)
    assert cache.k.shape == cache.v.shape == (5, 2, 3, 2)
    stored = cache.k.numel() * 8 + cache.v.numel() * 8
    assert stored == tb.kv_cache_bytes(1, 2, 2, 3, batch=5, bytes_per_element=8)


@pytest.mark.parametrize("lengths", SPLITS, ids=str)
def test_F27_model_with_and_without_cache_gives_the_same_logits(lengths):
    model, ids = lm(windows=[2, None]), torch.arange(12).view(2, 6)
    caches = model.new_caches()
    chunks = [model(part, kv_caches=caches) for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), model(ids), **close)


# =============================================================================================
# Part D. Attention
# =============================================================================================


@PATHS
def test_F28_head_reads_its_group(path):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 5, 2)
    got = path(q, k, v)
    wanted = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 4, 1, 1).expand(1, 4, 3, 2)
    torch.testing.assert_close(got, wanted)


def test_F28_channels_of_the_whole_attention_follow_their_group():
    module = att(rope=False)
    with torch.no_grad():
        module.v_proj.weight.zero_()
        module.v_proj.weight[2:, 0] = 1.0  # the second KV head copies channel 0, which is 1
        module.o_proj.weight.copy_(torch.eye(8))
    x = torch.randn(1, 3, 8).double()
    x[..., 0] = 1.0
    wanted = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).double().expand(1, 3, 8)
    torch.testing.assert_close(module(x)[0], wanted, **close)


def test_F29_heads_are_split_and_merged_by_a_transpose():
    module = tb.MultiHeadAttention(4, 2)
    split = module.split_heads(torch.arange(8).view(1, 2, 4), module.head_dim)
    assert split.tolist() == [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]
    merging = tb.MultiHeadAttention(
        4, 2, attend=lambda *_, **__: torch.arange(8.0).view(1, 2, 2, 2)
    )
    with torch.no_grad():
        merging.o_proj.weight.copy_(torch.eye(4))
    assert merging(torch.zeros(1, 2, 4))[0].tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7]]]


def test_F29_permuted_tokens_give_permuted_outputs():
    module, x = att(rope=False), torch.randn(2, 5, 8).double()
    order = [3, 0, 4, 1, 2]
    torch.testing.assert_close(module(x[:, order])[0], module(x)[0][:, order], **close)


@PATHS
@pytest.mark.parametrize("head_dim", [2, 6])
def test_F30_scale_is_that_of_the_head_dim(path, head_dim):
    module = randomised(tb.MultiHeadAttention(8, 4, 2, head_dim=head_dim, attend=path))
    x = torch.randn(1, 4, 8).double()
    p = {name: w.detach().numpy() for name, w in module.state_dict().items()}
    wanted, _ = reference.multi_head_attention(p, x[0].numpy(), head_dim, scale=head_dim**-0.5)
    torch.testing.assert_close(module(x)[0][0], torch.from_numpy(wanted), **close)


@PATHS
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_F31_scale_is_applied_once_on_both_paths(path, scale):
    q = torch.tensor([3.0, 0, 0, 0]).double().view(1, 1, 1, 4)
    k = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0]]).double().view(1, 1, 2, 4)
    v = torch.eye(2).double().view(1, 1, 2, 2)
    first, second = path(q, k, v, scale=scale).flatten().tolist()
    assert second / first == pytest.approx(math.exp(3 * (0.5 if scale is None else scale)))


@PATHS
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_F31_scale_of_the_layer_reaches_both_paths(path, scale):
    module, x = att(attend=path, scale=scale), torch.randn(1, 4, 8).double()
    wanted = reference_attention(module, x, np.tril(np.ones((4, 4), bool)), scale=scale)
    torch.testing.assert_close(attended(module, x), wanted, **close)


@PATHS
def test_F32_softmax_runs_over_the_keys(path):
    q, k = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2)
    ones = path(q, k, torch.ones(1, 2, 5, 2))
    torch.testing.assert_close(ones, torch.ones(1, 4, 3, 2))
    v = torch.randn(1, 2, 5, 2)
    torch.testing.assert_close(path(q, k, v)[:, :, :1], path(q[:, :, :1], k, v))


@pytest.mark.parametrize(("T", "S"), [(3, 5), (5, 3), (4, 4)])
def test_F33_cross_attention_takes_the_mask_of_its_memory(T, S):
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


PADDED = {
    **BLOCKS,
    "encoder": lambda: tb.VanillaEncoderLayer2017(8, 4, 12),
    "seq2seq": lambda: tb.VanillaSeq2SeqDecoderLayer2017(8, 4, 12),
}


@pytest.mark.parametrize("B", [1, 2, 4, 5])  # also B = G, B = H and B = T
@pytest.mark.parametrize("kind", PADDED)
def test_F34_content_of_padding_reaches_no_real_row(kind, B):
    module, x = randomised(PADDED[kind]()), torch.randn(B, 5, 8).double()
    keep = (torch.arange(5)[None] + torch.arange(B)[:, None]) % 4 != 1
    changed = torch.where(keep[..., None], x, x + 3)

    def call(x):
        if kind == "encoder":
            return module(x, keep)
        if kind == "seq2seq":
            return module(x, torch.ones(B, 2, 8).double(), key_padding_mask=keep)
        return run(module, x, key_padding_mask=keep)

    assert torch.equal(call(x)[keep], call(changed)[keep])


def test_F35_norm_of_q_and_k_comes_before_the_rotation():
    module, x = att(qk_norm=True, norm_eps=1e-3), torch.randn(1, 5, 8).double()
    wanted = reference_attention(module, x, np.tril(np.ones((5, 5), bool)), norm_eps=1e-3)
    torch.testing.assert_close(attended(module, x), wanted, **close)


def test_F36_soft_cap_acts_before_the_mask_and_is_never_dropped():
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


@pytest.mark.parametrize("cap", [0.5, 3])
def test_F36_soft_cap_of_the_layer_is_not_dropped(cap):
    module, x = att(logit_softcap=cap), torch.randn(1, 4, 8).double()
    wanted = reference_attention(module, x, np.tril(np.ones((4, 4), bool)), cap=cap)
    torch.testing.assert_close(attended(module, x), wanted, **close)


# =============================================================================================
# Part E. Norms
# =============================================================================================


@pytest.mark.parametrize("value", [300.0, 6e4, -300.0])
def test_F37_rms_norm_squares_in_float32(value):
    got = tb.RMSNorm(4).half()(torch.full((4,), value).half())
    assert got.tolist() == [math.copysign(1, value)] * 4


def test_F39_layer_norm_of_the_blocks_divides_by_n():
    norms = (
        tb.VanillaEncoderLayer2017(4, 2, 4).ln1,
        tb.GPT2StyleDecoderLayer(4, 2, 4).norm1,
        tb.ParallelDecoderBlock(4, 2, 2, 4).norm,
    )
    for norm in norms:
        got = norm(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        assert got[0].item() == pytest.approx(-1.341635, abs=1e-6)


def test_F40_eps_stands_under_the_root_and_reaches_every_norm():
    got = tb.RMSNorm(3, 1e-6)(torch.full((3,), 1e-4))
    assert got[0].item() == pytest.approx(0.099504, abs=1e-6)
    zero = torch.zeros(3, requires_grad=True)
    tb.RMSNorm(3)(zero).sum().backward()
    assert zero.grad.isfinite().all()
    for kind, default in (("gpt2", 1e-5), ("modern", 1e-6), ("parallel two norms", 1e-5)):
        eps = {m.eps for m in BLOCKS[kind]().modules() if hasattr(m, "eps")}
        assert eps == {default}
    assert tb.GPT2StyleDecoderLayer(2, 1, 2).norm1(torch.tensor([1e-3, -1e-3]))[0].item() == (
        pytest.approx(0.301511, abs=1e-6)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda eps: tb.VanillaEncoderLayer2017(8, 4, 12, eps=eps),
        lambda eps: tb.VanillaSeq2SeqDecoderLayer2017(8, 4, 12, eps=eps),
        lambda eps: tb.GPT2StyleDecoderLayer(8, 4, 12, eps=eps),
        lambda eps: tb.ModernDecoderBlock(8, 4, 2, 12, eps=eps),
        lambda eps: tb.ParallelDecoderBlock(8, 4, 2, 12, shared_norm=False, eps=eps),
        lambda eps: tb.BranchNormDecoderBlock(8, 4, 2, 12, eps=eps),
    ],
)
def test_F40_eps_of_the_constructor_reaches_every_norm(make):
    norms = [m for m in make(0.25).modules() if isinstance(m, (nn.LayerNorm, tb.RMSNorm))]
    assert len(norms) >= 2
    assert {norm.eps for norm in norms} == {0.25}


# =============================================================================================
# Part F. Feed-forward networks
# =============================================================================================


def scalar_dense(**options):
    ffn = tb.DenseFFN(1, 1, **options)
    for linear in (ffn.up, ffn.down):
        nn.init.ones_(linear.weight)
    return ffn


def test_F41_gelu_is_the_exact_one_by_default_and_the_tanh_one_on_demand():
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


def test_F42_swiglu_activates_the_gate_alone():
    got = scalar_gated(-3.0)(torch.ones(1, 1)).item()
    assert got == pytest.approx(-5.2847825, abs=1e-6)


def test_F43_swiglu_has_three_matrices():
    ffn = tb.GatedFFN(6, 10)
    assert sum(p.numel() for p in ffn.parameters()) == 3 * 6 * 10
    assert scalar_gated(0.0)(torch.ones(1, 1)).item() == 0
    with pytest.raises(TypeError, match=r"act .*'swiglu'"):
        tb.DenseFFN(6, 10, act="swiglu")


# =============================================================================================
# Part G. Experts
# =============================================================================================


def experts(**options):
    return randomised(tb.MoEFFN(6, 8, **options))


def test_F44_router_learns_from_the_output_alone():
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


def test_F45_probability_weights_the_output():
    moe, x = experts(), torch.randn(7, 6).double()
    p = {name: w.numpy() for name, w in moe.state_dict().items()}
    wanted, counts, balance = reference.moe_ffn(p, x.numpy())
    np.testing.assert_allclose(moe(x).detach(), wanted, atol=1e-12)
    assert moe.tokens_per_expert == counts
    assert moe.aux_loss.item() == pytest.approx(balance, abs=1e-12)


class Constant(nn.Module):
    def forward(self, x):
        return torch.full_like(x, 3.0)


def test_F45_expert_that_ignores_its_input_is_weighted_all_the_same():
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
def test_F46_balance_loss_by_hand(probabilities, loss, counts):
    moe = routed(probabilities)
    assert moe.aux_loss.item() == pytest.approx(loss, abs=1e-6)
    assert moe.tokens_per_expert == counts


def test_F46_balance_loss_lowers_the_crowded_expert_and_is_that_of_one_layer():
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
# Part H. Blocks
# =============================================================================================


def silenced(module, *names):
    """Zero output weights and biases of the named sublayers."""
    with torch.no_grad():
        for name in names:
            sublayer = getattr(module, name)
            last = sublayer.o_proj if hasattr(sublayer, "o_proj") else sublayer.down
            for parameter in last.parameters():
                parameter.zero_()
    return module


@ALL_DECODERS
def test_F48_F50_pre_norm_blocks_without_sublayers_are_the_identity(kind):
    module, x = silenced(block(kind), "attn", "ffn"), torch.randn(2, 4, 8).double()
    assert torch.equal(run(module, x), x)


def test_F48_post_norm_layers_without_sublayers_norm_the_stream():
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


def test_F49_final_norm_is_applied_once():
    model, ids = lm(), torch.tensor([[1, 2, 3]])
    stream = []
    model.blocks[-1].register_forward_hook(lambda m, args, out: stream.append(out))
    logits = model(ids)
    p = {name: w.numpy() for name, w in model.state_dict().items()}
    normed = reference.rms_norm(p, "final_norm", stream[0][0].detach().numpy(), 1e-6)
    wanted = normed @ p["embedding.weight"].T
    np.testing.assert_allclose(logits[0].detach(), wanted, atol=1e-10)


@pytest.mark.parametrize("kind", ["parallel", "parallel two norms"])
def test_F51_parallel_branches_read_the_same_stream_and_add_up(kind):
    x = torch.randn(2, 4, 8).double()
    module = block(kind)
    both = run(module, x)
    attn_only = run(silenced(copy.deepcopy(module), "ffn"), x)
    ffn_only = run(silenced(copy.deepcopy(module), "attn"), x)
    torch.testing.assert_close(both - x, (attn_only - x) + (ffn_only - x), **close)
    p = {name: w.numpy() for name, w in module.state_dict().items()}
    name = "norm" if kind == "parallel" else "ffn_norm"
    h = reference.layer_norm(p, name, x.reshape(-1, 8).numpy(), 1e-5)
    wanted = x.reshape(-1, 8).numpy() + reference.dense_ffn(reference.sub(p, "ffn"), h)
    np.testing.assert_allclose(ffn_only.detach().reshape(-1, 8), wanted, atol=1e-10)
    assert len([m for m in module.modules() if isinstance(m, nn.LayerNorm)]) == (
        1 if kind == "parallel" else 2
    )


def test_F52_post_norms_act_on_the_branch():
    module, x = block("branch norm"), torch.randn(1, 5, 8).double()
    p = {name: w.numpy() for name, w in module.state_dict().items()}

    def attn(h):
        keep = np.tril(np.ones((5, 5), bool))
        inner = reference.sub(p, "attn")
        return reference.multi_head_attention(inner, h, 2, keep=keep, rope=(0, 2, 1e4))[0]

    def ffn(h):
        return reference.gated_ffn(reference.sub(p, "ffn"), h)

    wanted = reference.branch_norm(p, x[0].numpy(), attn, ffn, 1e-6)
    np.testing.assert_allclose(run(module, x)[0].detach(), wanted, atol=1e-10)


# =============================================================================================
# Part I. Embedding, model, generation
# =============================================================================================


@pytest.mark.parametrize(("B", "T"), [(5, 5), (2, 3), (4, 4)])
@ALL_DECODERS
def test_F53_rows_of_a_batch_do_not_meet(kind, B, T):
    module, x = block(kind), torch.randn(B, T, 8).double()
    out = run(module, x)
    for b in range(B):
        torch.testing.assert_close(out[b : b + 1], run(module, x[b : b + 1]), **close)
    alike = run(module, x[:1].expand(B, T, 8))
    torch.testing.assert_close(alike, alike[:1].expand(B, T, 8), **close)


def test_F54_embedding_is_scaled_once_and_not_in_place():
    scale = math.sqrt(8)
    model, ids = lm(embedding_scale=scale), torch.tensor([[1, 2, 3]])
    seen, before = [], model.embedding.weight.detach().clone()
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    logits = model(ids)
    assert torch.equal(seen[0], before[ids] * scale)
    assert torch.equal(model.embedding.weight, before)
    normed = model.final_norm(model.blocks[1](model.blocks[0](seen[0], COS, SIN), COS, SIN))
    torch.testing.assert_close(logits, normed @ before.T, **close)


def test_F55_temperature_zero_is_argmax_and_tiny_ones_are_no_nan():
    model, ids = lm(), torch.tensor([[1, 2, 3]])
    state = torch.get_rng_state()
    first = model.generate(ids, 5, temperature=0)
    assert torch.equal(first, model.generate(ids, 5, temperature=0.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.generate(ids, 5, temperature=1e-8), first)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert tb.pick_next_token(logits, 1e-40).item() == 1
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"temperature .*{bad}"):
            model.generate(ids, 5, temperature=bad)


class NextToken(nn.Module):
    """In place of the head: row b gets the token rows[b][step], whatever it reads."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.step = rows, 0

    def forward(self, x):
        logits = F.one_hot(torch.tensor([row[self.step] for row in self.rows]), 19).double()
        self.step += 1
        return logits[:, None].expand(-1, x.shape[1], -1)


def test_F56_eos_ends_its_own_row_only():
    eos = 5
    model = lm(tie_embeddings=False)
    model.lm_head = NextToken([[eos, 1, 1, 1, 1], [2, 3, eos, 1, 1]])
    out = model.generate(torch.tensor([[eos, 7], [7, 7]]), 5, eos_id=eos)
    assert out.tolist() == [[eos, 7, eos, eos, eos], [7, 7, 2, 3, eos]]
    assert model.lm_head.step == 3
