"""The same weights in torch's own layers: outputs and gradients equal to 1e-9 in float64.

torch.nn.MultiheadAttention and the layers built on it mark what is left out with True, so every
mask goes in inverted. What padding rows hold differs between the two, so kept rows are compared.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
from blocks import randomised
from torch import nn

# No two axes are alike, so that none can stand in for another.
B, T, S, D, H, D_FF = 3, 5, 7, 12, 4, 20
close = {"rtol": 0, "atol": 1e-9}

PADDINGS = {
    "none": None,
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1], [1, 1, 0, 1, 1]],
}


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def padding(kind):
    return None if kind == "none" else torch.tensor(PADDINGS[kind], dtype=torch.bool)


def inverted(mask):
    return None if mask is None else ~mask


def renamed(tensors, modules):
    """Parameters (or their gradients) of a layer of torch under our names."""
    out = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind.startswith("in_proj_"):
            for letter, part in zip("qkv", tensor.chunk(3)):
                out[f"{modules[module]}{letter}_proj.{kind.removeprefix('in_proj_')}"] = part
        else:
            out[f"{modules[module]}{kind}"] = tensor
    return out


def assert_equal_with_gradients(ours, our_out, theirs, their_out, modules, inputs, kept=...):
    """Outputs on the kept rows, and what a random weighting of them sends back."""
    torch.testing.assert_close(our_out[kept], their_out[kept], **close)
    weighting = torch.randn_like(our_out[kept])
    got = torch.autograd.grad((our_out[kept] * weighting).sum(), [*ours.parameters(), *inputs])
    wanted = torch.autograd.grad(
        (their_out[kept] * weighting).sum(), [*theirs.parameters(), *inputs]
    )
    n = len(inputs)
    names = [name for name, _ in theirs.named_parameters()]
    wanted_by_name = renamed(dict(zip(names, wanted)), modules)
    for (name, _), gradient in zip(ours.named_parameters(), got):
        torch.testing.assert_close(gradient, wanted_by_name[name], **close)
    for gradient, want in zip(got[-n:], wanted[-n:]):
        torch.testing.assert_close(gradient, want, **close)


def copied(ours, theirs, modules):
    randomised(theirs)
    ours.double().load_state_dict(renamed(dict(theirs.named_parameters()), modules))
    return ours, theirs


ATTENTION = {"self_attn": "attn.", "self_attn.out_proj": "attn.o_proj."}
FFN = {"linear1": "ffn.up.", "linear2": "ffn.down."}
ENCODER = {**ATTENTION, **FFN, "norm1": "ln1.", "norm2": "ln2."}
GPT2 = {**ATTENTION, **FFN, "norm1": "norm1.", "norm2": "norm2."}
SEQ2SEQ = {
    "self_attn": "self_attn.",
    "self_attn.out_proj": "self_attn.o_proj.",
    "multihead_attn": "cross_attn.",
    "multihead_attn.out_proj": "cross_attn.o_proj.",
    **FFN,
    **{f"norm{i}": f"ln{i}." for i in (1, 2, 3)},
}
ALONE = {"": "", "out_proj": "o_proj."}


def torch_layer(kind, **options):
    return kind(D, H, D_FF, dropout=0.0, batch_first=True, dtype=torch.float64, **options)


@pytest.mark.parametrize("act", [F.relu, F.gelu])
@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_encoder_layer_equals_torch(pad, act, eps):
    ours, theirs = copied(
        tb.VanillaEncoderLayer2017(D, H, D_FF, act=act, eps=eps),
        torch_layer(nn.TransformerEncoderLayer, activation=act, layer_norm_eps=eps),
        ENCODER,
    )
    x, keep = draw(B, T, D), padding(pad)
    their_out = theirs(x, src_key_padding_mask=inverted(keep))
    kept = ... if keep is None else keep
    assert_equal_with_gradients(ours, ours(x, keep), theirs, their_out, ENCODER, [x], kept)


def test_encoder_act_is_relu_by_default():
    ours, theirs = copied(
        tb.VanillaEncoderLayer2017(D, H, D_FF), torch_layer(nn.TransformerEncoderLayer), ENCODER
    )
    x = draw(B, T, D)
    torch.testing.assert_close(ours(x), theirs(x), **close)


@pytest.mark.parametrize("pad", PADDINGS)
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_gpt2_layer_equals_torch(pad, eps):
    ours, theirs = copied(
        tb.GPT2StyleDecoderLayer(D, H, D_FF, eps=eps),
        torch_layer(
            nn.TransformerEncoderLayer, activation=F.gelu, norm_first=True, layer_norm_eps=eps
        ),
        GPT2,
    )
    x, keep = draw(B, T, D), padding(pad)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    their_out = theirs(x, src_mask=~causal, src_key_padding_mask=inverted(keep))
    our_out = ours(x, key_padding_mask=keep)
    if pad in ("left", "holes"):  # rows that see nothing are NaN in torch, and its gradient
        torch.testing.assert_close(our_out[keep], their_out[keep], **close)
    else:
        kept = ... if keep is None else keep
        assert_equal_with_gradients(ours, our_out, theirs, their_out, GPT2, [x], kept)


@pytest.mark.parametrize("memory_pad", [False, True])
@pytest.mark.parametrize("pad", ["none", "right"])
@pytest.mark.parametrize("lengths", [(T, S), (T, 2), (T, T)])
def test_seq2seq_layer_equals_torch(pad, memory_pad, lengths):
    ours, theirs = copied(
        tb.VanillaSeq2SeqDecoderLayer2017(D, H, D_FF),
        torch_layer(nn.TransformerDecoderLayer),
        SEQ2SEQ,
    )
    _, n_memory = lengths
    x, memory, keep = draw(B, T, D), draw(B, n_memory, D), padding(pad)
    memory_keep = None
    if memory_pad:
        memory_keep = torch.arange(n_memory) >= torch.tensor([[0], [1], [n_memory - 1]])
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    their_out = theirs(
        x,
        memory,
        tgt_mask=~causal,
        tgt_key_padding_mask=inverted(keep),
        memory_key_padding_mask=inverted(memory_keep),
    )
    our_out = ours(x, memory, key_padding_mask=keep, memory_key_padding_mask=memory_keep)
    kept = ... if keep is None else keep
    assert_equal_with_gradients(ours, our_out, theirs, their_out, SEQ2SEQ, [x, memory], kept)


def test_seq2seq_layer_with_own_mask():
    ours, theirs = copied(
        tb.VanillaSeq2SeqDecoderLayer2017(D, H, D_FF),
        torch_layer(nn.TransformerDecoderLayer),
        SEQ2SEQ,
    )
    x, memory = draw(B, T, D), draw(B, S, D)
    mask = torch.eye(T, dtype=torch.bool) | (torch.rand(T, T) < 0.4)
    torch.testing.assert_close(ours(x, memory, mask), theirs(x, memory, tgt_mask=~mask), **close)


@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("masks", ["none", "mask", "mask of each row", "padding", "both"])
def test_attention_equals_torch(path, bias, cross, masks):
    ours, theirs = copied(
        tb.MultiHeadAttention(D, H, bias=bias, attend=path),
        nn.MultiheadAttention(D, H, bias=bias, batch_first=True, dtype=torch.float64),
        ALONE,
    )
    x, memory = draw(B, T, D), draw(B, S, D)
    n_keys, source, inputs = (S, memory, [x, memory]) if cross else (T, x, [x])
    mask = padding_mask = per_head = None
    if masks in ("mask", "both"):
        per_head = mask = (torch.rand(T, n_keys) < 0.5).index_fill(1, torch.tensor([1]), True)
    if masks == "mask of each row":
        mask = (torch.rand(B, T, n_keys) < 0.5).index_fill(2, torch.tensor([1]), True)
        per_head = mask.repeat_interleave(H, dim=0)
    if masks in ("padding", "both"):
        padding_mask = torch.arange(n_keys) < torch.tensor([[n_keys], [2], [3]])
    their_out, _ = theirs(
        x,
        source,
        source,
        attn_mask=inverted(per_head),
        key_padding_mask=inverted(padding_mask),
        need_weights=False,
    )
    our_out, (k, v) = ours(x, memory if cross else None, mask=mask, key_padding_mask=padding_mask)
    assert k.shape == v.shape == (B, H, n_keys, D // H)
    assert_equal_with_gradients(ours, our_out, theirs, their_out, ALONE, inputs)


@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("keep_shape", [None, (T, S), (1, S), (B, 1, 1, S), (B, 1, T, S), (S,), ()])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attend_equals_torch(path, groups, keep_shape, scale):
    q, k, v = draw(B, 6, T, 4), draw(B, groups, S, 4), draw(B, groups, S, 3)
    keep = None if keep_shape is None else torch.rand(keep_shape) < 0.6
    if keep_shape:
        keep[..., 2:3] = True  # no row without a key
    wide_k, wide_v = (t.repeat_interleave(6 // groups, dim=1) for t in (k, v))
    whole = None if keep is None else keep.expand(B, 1, T, S)  # torch takes no mask of one axis
    wanted = F.scaled_dot_product_attention(q, wide_k, wide_v, whole, scale=scale)
    got = path(q, k, v, keep, scale=scale)
    torch.testing.assert_close(got, wanted, **close)
    weighting = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad((got * weighting).sum(), [q, k, v]),
        torch.autograd.grad((wanted * weighting).sum(), [q, k, v]),
    ):
        torch.testing.assert_close(ours, theirs, **close)


def loop_attention(q, k, v, allowed, scale):
    """One query at a time over the keys that allowed(b, t, s) leaves it; zeros where none are."""
    (B, H, T, _), (G, S) = q.shape, k.shape[1:3]
    out = torch.zeros(B, H, T, v.shape[-1], dtype=q.dtype)
    rows = {}
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        g, seen = h * G // H, [s for s in range(S) if allowed(b, t, s)]
        if seen:
            scores = torch.stack([scale * (q[b, h, t] @ k[b, g, s]) for s in seen])
            rows[b, h, t] = scores.softmax(0) @ torch.stack([v[b, g, s] for s in seen])
    for at, row in rows.items():
        out = out.index_put(tuple(torch.tensor(i) for i in at), row)
    return out


CAUSAL_SIZES = {
    "T = S": (4, 4),
    "a chunk behind a cache": (2, 5),
    "more queries than keys": (5, 2),
    "one query": (1, 5),
    "one query, one key": (1, 1),
    "no keys": (3, 0),
    "one query, no keys": (1, 0),
    "no queries": (0, 3),
}
KEEPS = {
    "none": lambda T, S: None,
    "rows": lambda T, S: torch.rand(T, S) < 0.6,
    "padding with a dead row": lambda T, S: (
        (torch.rand(2, 1, 1, S) < 0.6) & ~torch.eye(2, S).bool().flip(0).view(2, 1, 1, S)
    ),
    "each row its own, one dead": lambda T, S: (
        (torch.rand(2, 1, T, S) < 0.7) & (torch.arange(2) < 1).view(2, 1, 1, 1)
    ),
}


@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused, tb.SinkAttention(4).double()])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("sizes", CAUSAL_SIZES)
def test_causal_paths_equal_a_loop(sizes, keep, groups, path):
    """The last query stands beside the last key; queries before the first key get zeros."""
    T, S = CAUSAL_SIZES[sizes]
    q, k, v = draw(2, 4, T, 6), draw(2, groups, S, 6), draw(2, groups, S, 3)
    keep = KEEPS[keep](T, S)
    both = None if keep is None else keep.expand(2, 1, T, S)
    sink = isinstance(path, nn.Module)
    if sink:  # a key whose score is -1000 everywhere takes no part; a sink of 0 does
        path.sinks.data.fill_(-1000.0)

    def allowed(b, t, s):
        return S - s > T - 1 - t and (both is None or bool(both[b, 0, t, s]))

    out = path(q, k, v, keep, causal=True, scale=0.7)
    wanted = loop_attention(q, k, v, allowed, 0.7)
    torch.testing.assert_close(out, wanted, **close)
    weighting = torch.randn_like(out)
    options = {"allow_unused": True, "materialize_grads": True}
    if out.requires_grad and wanted.requires_grad:
        got = torch.autograd.grad((out * weighting).sum(), [q, k, v], **options)
        want = torch.autograd.grad((wanted * weighting).sum(), [q, k, v], **options)
        for ours, theirs in zip(got, want):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, theirs, **close)


def test_fused_causality_is_the_kernels(monkeypatch):
    asked, kernel = [], F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, **options):
        asked.append((attn_mask is None, options["is_causal"]))
        return kernel(q, k, v, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, k = draw(2, 4, 5, 6), draw(2, 2, 5, 6)
    tb.attend_fused(q, k, k, causal=True)
    tb.attend_fused(q[:, :, -1:], k, k, causal=True)
    tb.attend_fused(q, k, k)
    tb.attend_fused(q, k, k, torch.ones(5, 5).bool(), causal=True)
    tb.attend_fused(q[:, :, :3], k, k, causal=True)
    assert asked == [(True, True), (True, False), (True, False), (False, False), (False, False)]


@pytest.mark.parametrize("name", ["GPT2StyleDecoderLayer", "ModernDecoderBlock"])
def test_blocks_make_no_mask(name):
    """A mask that is given is the whole of what may be seen, later keys too."""
    asked = []

    def attend(q, k, v, keep, *, causal, scale, logit_softcap):
        asked.append((keep, causal))
        return tb.attend(q, k, v, keep, causal=causal)

    sizes = (D, 6, D_FF) if name.startswith("GPT2") else (D, 6, 2, D_FF)
    block = getattr(tb, name)(*sizes)
    block.attn.attend = attend
    tables = dict(zip(("cos", "sin"), tb.build_rope_cache(9, 2))) if block.attn.rope else {}
    x, mask = torch.randn(B, T, D), torch.ones(T, T).bool()
    block(x, **tables)
    block(x, mask=mask, **tables)
    block(x, kv_cache=tb.KVCache(), **tables)
    assert asked[0] == (None, True)
    assert torch.equal(asked[1][0], mask)
    assert asked[1][1] is False
    assert asked[2] == (None, True)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("shape", [(D,), (T, D), (B, T, D), (2, B, T, D), (0, D)])
def test_rms_norm_equals_torch(eps, shape):
    ours, theirs = tb.RMSNorm(D, eps).double(), randomised(nn.RMSNorm(D, eps).double())
    ours.load_state_dict(theirs.state_dict())
    x = draw(*shape)
    torch.testing.assert_close(ours(x), theirs(x), **close)
    for got, want in zip(
        torch.autograd.grad(ours(x).sin().sum(), [ours.weight, x]),
        torch.autograd.grad(theirs(x).sin().sum(), [theirs.weight, x]),
    ):
        torch.testing.assert_close(got, want, **close)


def complex_rotation(x, turns):
    """Channels i and i + r/2 of x as one complex number, times turns [T, r/2]."""
    r = 2 * turns.shape[-1]
    turned = torch.complex(x[..., : r // 2], x[..., r // 2 : r]) * turns
    return torch.cat((turned.real, turned.imag, x[..., r:]), dim=-1)


@pytest.mark.parametrize("r", [2, 4, 8])
@pytest.mark.parametrize("start", [0, 3, 295])
@pytest.mark.parametrize("base", [10000.0, 7])
def test_rotation_is_complex_product(r, start, base):
    cos, sin = (table[start : start + T] for table in tb.build_rope_cache(300, r, base))
    angles = torch.arange(start, start + T).double()[:, None] * base ** (
        -torch.arange(0, r, 2).double() / r
    )
    exact = torch.polar(torch.ones_like(angles), angles)
    stored = torch.complex(exact.real.float().double(), exact.imag.float().double())
    x = draw(B, 2, T, 8)
    got = tb.apply_rope(x, cos, sin)
    torch.testing.assert_close(got, complex_rotation(x, stored), **close)
    torch.testing.assert_close(got, complex_rotation(x, exact), rtol=0, atol=1e-6)
    weighting = torch.randn_like(got)
    (ours,) = torch.autograd.grad((got * weighting).sum(), [x])
    (theirs,) = torch.autograd.grad((complex_rotation(x, stored) * weighting).sum(), [x])
    torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("base", [10000.0, 500000.0, 3])
def test_rope_tables_are_exact(base):
    cos, sin = tb.build_rope_cache(5000, 6, base)
    assert cos.shape == sin.shape == (5000, 6)
    angles = torch.arange(5000).double()[:, None] * base ** (-torch.arange(0, 6, 2).double() / 6)
    for table, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table.double(), exact.repeat(1, 2), rtol=0, atol=3.1e-8)


@pytest.mark.parametrize("d_model", [1, 6, 7])
def test_sinusoidal_table(d_model):
    table = tb.sinusoidal_positions(400, d_model)
    assert (table.shape, table.dtype) == ((400, d_model), torch.float32)
    for channel in range(d_model):
        wave = (torch.sin, torch.cos)[channel % 2]
        angles = torch.arange(400).double() / 10000 ** (2 * (channel // 2) / d_model)
        torch.testing.assert_close(table[:, channel].double(), wave(angles), rtol=0, atol=3.1e-8)


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_formulas():
    for d_model, heads in ((12, 4), (96, 8)):
        whole = size(nn.MultiheadAttention(d_model, heads, bias=False))
        assert tb.attention_parameters(d_model, heads) == whole
        assert tb.attention_parameters(d_model, heads, heads) == whole
        for groups in (1, 2):
            narrow = nn.Linear(d_model, groups * d_model // heads, bias=False)
            wide = nn.Linear(d_model, d_model, bias=False)
            counted = tb.attention_parameters(d_model, heads, groups)
            assert counted == 2 * size(wide) + 2 * size(narrow)
    matrix = size(nn.Linear(12, 20, bias=False))
    assert tb.ffn_parameters(12, 20, gated=False) == 2 * matrix
    assert tb.ffn_parameters(12, 20, gated=True) == 3 * matrix


def test_cache_formulas():
    k = v = torch.zeros(5, 2, 7, 16, dtype=torch.float16)  # (batch, KV heads, length, head_dim)
    assert tb.kv_cache_elements(2, 16) == k[0, :, 0].numel() + v[0, :, 0].numel()
    assert tb.kv_cache_bytes(3, 2, 16, 7, batch=5) == 3 * (k.nbytes + v.nbytes)
    wide = 3 * (k.double().nbytes + v.double().nbytes)
    assert tb.kv_cache_bytes(3, 2, 16, 7, 5, 8) == wide
    assert tb.kv_cache_bytes(3, 2, 16, 7) * 5 == tb.kv_cache_bytes(3, 2, 16, 7, batch=5)


@pytest.mark.parametrize(
    ("d_model", "multiple_of", "multiplier", "d_ff"),
    [
        (4096, 256, 1.0, 11008),  # Llama 7B
        (5120, 256, 1.0, 13824),  # Llama 13B
        (8192, 4096, 1.3, 28672),  # Llama-2 70B
        (4096, 1024, 1.3, 14336),  # Llama-3 8B
        (96, 1, 1.0, 256),
        (5, 1, 1.0, 13),
        (5, 4, 1.0, 16),
    ],
)
def test_gated_hidden_size_of_llama(d_model, multiple_of, multiplier, d_ff):
    assert tb.gated_hidden_size(d_model, multiple_of, multiplier) == d_ff
