"""What a layer keeps between calls: padding, documents, copies, forwards that are recomputed."""

import copy
import math
import pickle

import pytest
import torch
import transformer_block as tb
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import after_2025
import after_2026
from after_2025 import (
    DeltaNetState,
    GatedDeltaNet,
    IndexedCache,
    IndexedSparseAttention,
    delta_rule_chunked,
    delta_rule_recurrent,
)

D = 12
COS, SIN = tb.build_rope_cache(40, 4)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def delta_net(chunk: int = 4) -> nn.Module:
    layer = GatedDeltaNet(D, 2, 4, k_dim=3, v_dim=5, conv_width=3, chunk=chunk)
    return tb.check_randomized(layer)


def indexed(top_k: int = 3) -> nn.Module:
    sizes = {"kv_rank": 6, "rope_dim": 4, "nope_dim": 3, "v_dim": 5, "q_rank": 7}
    attn = tb.MultiHeadLatentAttention(D, 2, **sizes)
    layer = IndexedSparseAttention(attn, n_index_heads=8, index_dim=6, top_k=top_k)
    return tb.check_randomized(layer)


def tables(layer: nn.Module) -> dict[str, object]:
    return {"causal": True} | ({} if isinstance(layer, GatedDeltaNet) else {"cos": COS, "sin": SIN})


# === Padding =================================================================================


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize(
    "new", ["0011", "1100", "0110", "1001", "0101", "0000", "1", "0", "01", "001101110"]
)
@pytest.mark.parametrize("cached", ["", "1111", "0011", "1010", "00"])
def test_padding_leaves_no_trace_wherever_it_stands(cached, new, chunk):
    """Each row alone, its padding left out: outputs, state and columns."""
    layer, S = delta_net(chunk), len(cached) + len(new)
    real = torch.tensor([[c == "1" for c in cached + new], [True] * S])
    x, cache = draw(2, S, D), DeltaNetState()
    x[~real] = math.nan
    parts = []
    for start, stop in ((0, len(cached)), (len(cached), S)):
        if start < stop:
            seen = real[:, :stop]
            parts.append(layer(x[:, start:stop], key_padding_mask=seen, kv_cache=cache)[0])
    out = torch.cat(parts, dim=1)
    for b in range(2):
        alone = DeltaNetState()
        expected = layer(x[b, real[b]][None], kv_cache=alone)[0][0]
        torch.testing.assert_close(out[b, real[b]], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(cache.state[b], alone.state[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(cache.columns[b], alone.columns[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_cached_tokens_cannot_be_hidden_afterwards():
    layer, x, cache = delta_net(), draw(1, 6, D), DeltaNetState()
    layer(x[:, :4], kv_cache=cache)
    held = cache.state.clone()
    for hidden in range(4):
        real = torch.ones(1, 6, dtype=torch.bool)
        real[0, hidden] = False
        with pytest.raises(ValueError, match="key_padding_mask"):
            layer(x[:, 4:], key_padding_mask=real, kv_cache=cache)
    assert cache.next_pos == 4 and torch.equal(cache.state, held)
    layer(x[:, 4:], key_padding_mask=torch.ones(1, 6, dtype=torch.bool), kv_cache=cache)


@torch.no_grad()
@pytest.mark.parametrize("layer", [delta_net, indexed])
def test_a_row_of_padding_at_the_end_of_a_batch_changes_no_other_row(layer):
    layer, x = layer(), draw(3, 7, D)
    real = torch.ones(3, 7, dtype=torch.bool)
    real[0, 5:] = real[2] = False
    out = layer(x, key_padding_mask=real, **tables(layer))[0]
    alone = layer(x[1:2], **tables(layer))[0]
    torch.testing.assert_close(out[1:2], alone, rtol=0, atol=1e-12)
    short = layer(x[:1, :5], **tables(layer))[0]
    torch.testing.assert_close(out[:1, :5], short, rtol=0, atol=1e-12)


# === Documents ===============================================================================


def documents(*lengths: int) -> Tensor:
    number = torch.repeat_interleave(torch.tensor(lengths))
    return (number[:, None] == number) & torch.ones(len(number), len(number)).tril().bool()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("split", [(9,), (1,) * 9, (4, 5), (2, 1, 6), (3, 6)])
def test_the_state_starts_anew_with_each_document(chunk, split):
    """Each document alone, in one pass or in pieces that cut documents and borders."""
    layer, x, cache = delta_net(chunk), draw(2, 9, D), DeltaNetState()
    lengths = (3, 1, 5), (9,)
    mask = torch.stack([documents(*row) for row in lengths])
    start, parts = 0, []
    for piece in split:
        seen = mask[:, start : start + piece, : start + piece]
        parts.append(layer(x[:, start : start + piece], mask=seen, kv_cache=cache)[0])
        start += piece
    out = torch.cat(parts, dim=1)
    for b in range(2):
        pieces = x[b : b + 1].split(lengths[b], dim=1)
        expected = torch.cat([layer(piece)[0] for piece in pieces], dim=1)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=0, atol=1e-12)
    last = DeltaNetState()
    layer(x[:1, 4:], kv_cache=last)
    torch.testing.assert_close(cache.state[:1], last.state, rtol=0, atol=1e-12)
    torch.testing.assert_close(cache.columns[:1], last.columns, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_document_that_begins_in_padding():
    """The border stands on a padded token, and the first real one comes with the next call."""
    layer, x, cache = delta_net(), draw(1, 6, D), DeltaNetState()
    mask, real = documents(3, 3)[None], torch.tensor([[True, True, True, False, True, True]])
    layer(x[:, :4], mask=mask[:, :4, :4], key_padding_mask=real[:, :4], kv_cache=cache)
    assert not cache.state.any() and not cache.columns.any()
    out = layer(x[:, 4:], mask=mask[:, 4:], key_padding_mask=real, kv_cache=cache)[0]
    torch.testing.assert_close(out, layer(x[:, 4:])[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_masks_that_a_recurrence_cannot_keep():
    layer, x, cache = delta_net(), draw(1, 6, D), DeltaNetState()
    positions = torch.arange(6)
    window = tb.build_causal_mask(positions, positions, 3)
    holes = documents(6)
    holes[4, 1] = False
    for mask in (window, holes, torch.ones(6, 6, dtype=torch.bool), ~documents(6)):
        with pytest.raises(ValueError, match="mask"):
            layer(x, mask=mask)
    mask = documents(2, 4)
    layer(x[:, :4], mask=mask[:4, :4], kv_cache=cache)
    for wrong in (documents(6)[4:], documents(3, 3)[4:], documents(1, 5)[4:], None):
        with pytest.raises(ValueError, match="mask"):
            layer(x[:, 4:], mask=wrong, kv_cache=cache)
    assert cache.next_pos == 4
    layer(x[:, 4:], mask=mask[4:], kv_cache=cache)


@torch.no_grad()
def test_documents_pass_through_a_hybrid_model():
    """Each packed document as alone: rotation sees differences, the state starts anew."""

    def make_block(layer: int) -> nn.Module:
        attn = tb.MultiHeadAttention(D, 2, rope=True) if layer else delta_net().float()
        return tb.ModernDecoderBlock(D, d_ff=16, attn=attn)

    lm = tb.DecoderOnlyLM(31, D, 2, make_block=make_block, max_len=20).double()
    ids = torch.randint(31, (1, 9))
    packed = lm(ids, mask=documents(4, 5))
    alone = torch.cat((lm(ids[:, :4]), lm(ids[:, 4:])), dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)


# === Copies, dtypes, refusals ================================================================


@pytest.mark.parametrize("make", [delta_net, indexed])
def test_copies_after_a_forward_with_gradients(make):
    """copy, deepcopy and pickle go their own way; a subclass keeps its class and attributes."""
    layer, x = make(), draw(1, 7, D)

    class Own(layer.new_cache):
        pass

    cache = Own()
    cache.note = ["mine"]
    layer(x[:, :4], kv_cache=cache, **tables(layer))
    with torch.no_grad():
        expected = layer(x, **tables(layer))[0][:, 4:]
        for twin in (copy.copy(cache), copy.deepcopy(cache)):
            assert type(twin) is Own and twin.note == ["mine"] and twin.next_pos == 4
            out = layer(x[:, 4:], kv_cache=twin, **tables(layer))[0]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        assert cache.next_pos == 4
        assert copy.deepcopy(cache).note is not cache.note
    plain = layer.new_cache()
    with torch.no_grad():
        layer(x[:, :4], kv_cache=plain, **tables(layer))
    loaded = pickle.loads(pickle.dumps(plain))
    out = layer(x[:, 4:], kv_cache=loaded, **tables(layer))[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [delta_net, indexed])
def test_a_deep_copy_shares_no_memory(make):
    layer, x = make(), draw(1, 5, D)
    cache = layer.new_cache()
    layer(x, kv_cache=cache, **tables(layer))
    twin = copy.deepcopy(cache)

    def memory(value: object) -> set[int]:
        if isinstance(value, Tensor):
            return {value.untyped_storage().data_ptr()}
        parts = value if isinstance(value, tuple) else vars(value).values()
        return set().union(
            *(memory(p) for p in parts if isinstance(p, (Tensor, tuple, tb.KVCache)))
        )

    assert len(memory(cache) - {0}) > 1  # 0: the empty values beside latents
    assert not memory(cache) & memory(twin) - {0}


@torch.no_grad()
@pytest.mark.parametrize("make", [delta_net, indexed])
def test_other_dtypes_shapes_and_lengths_are_refused_and_change_nothing(make):
    layer, x = make(), draw(2, 6, D)
    cache = layer.new_cache()
    layer(x[:, :4], kv_cache=cache, **tables(layer))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        other = copy.deepcopy(layer).to(dtype)
        with pytest.raises(TypeError, match="float64"):
            other(x[:, 4:].to(dtype), kv_cache=cache, **tables(layer))
    with pytest.raises(ValueError, match=r"1"):
        layer(x[:1, 4:], kv_cache=cache, **tables(layer))
    for length in (5, -1):
        with pytest.raises(ValueError, match="length"):
            cache.truncate(length)
    for length in (True, 1.0, None):
        with pytest.raises(TypeError, match="length"):
            cache.truncate(length)
    assert cache.next_pos == 4
    out = layer(x[:, 4:], kv_cache=cache, **tables(layer))[0]
    torch.testing.assert_close(out, layer(x, **tables(layer))[0][:, 4:], rtol=0, atol=1e-12)


def test_a_state_of_one_half_precision_is_no_state_of_the_other():
    """Both keep the state itself in float32; the columns tell them apart."""
    cache = DeltaNetState()
    with torch.no_grad():
        delta_net().half()(draw(1, 3, D).half(), kv_cache=cache)
        with pytest.raises(TypeError, match=r"columns.*bfloat16.*float16"):
            delta_net().bfloat16()(draw(1, 3, D).bfloat16(), kv_cache=cache)
    assert cache.next_pos == 3


def test_truncate_cuts_both_parts_of_an_indexed_cache():
    layer, x, cache = indexed(), draw(1, 6, D), IndexedCache(max_len=8)
    with torch.no_grad():
        layer(x, kv_cache=cache, **tables(layer))
        cache.truncate(2)
        assert cache.next_pos == cache.latent.next_pos == cache.index.next_pos == 2
        with pytest.raises(ValueError, match="max_len=8"):
            layer(draw(1, 7, D), kv_cache=cache, **tables(layer))
        assert cache.next_pos == 2
        cache.reset()
        assert cache.next_pos == cache.index.next_pos == 0


@torch.no_grad()
def test_an_attention_that_fails_at_a_single_token_keeps_nothing(monkeypatch):
    layer, x, cache = indexed(), draw(1, 7, D), IndexedCache()
    layer(x[:, :6], kv_cache=cache, **tables(layer))

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer.attn, "absorbed", fails)
        with pytest.raises(KeyboardInterrupt):
            layer(x[:, 6:], kv_cache=cache, **tables(layer))
    assert cache.next_pos == cache.latent.next_pos == 6
    out = layer(x[:, 6:], kv_cache=cache, **tables(layer))[0]
    torch.testing.assert_close(out, layer(x, **tables(layer))[0][:, 6:], rtol=0, atol=1e-12)


# === A forward that is recomputed ============================================================


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cached", [0, 3])
@pytest.mark.parametrize("make", [delta_net, indexed])
def test_a_recomputed_forward_is_refused_at_the_backward(make, cached, reentrant):
    layer, x = make(), draw(1, 5, D).requires_grad_()
    cache = layer.new_cache()
    with torch.no_grad():
        layer(draw(1, cached, D), kv_cache=cache, **tables(layer))

    def run(x: Tensor) -> Tensor:
        return layer(x, kv_cache=cache, **tables(layer))[0]

    with pytest.raises((ValueError, RuntimeError)):
        checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [delta_net, indexed])
def test_without_a_cache_a_recomputed_forward_has_the_same_gradients(make, reentrant):
    layer, x = make(), draw(1, 5, D).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return layer(x, **tables(layer))[0]

    (expected,) = torch.autograd.grad(run(x).square().sum(), x)
    layer.zero_grad()
    checkpoint(run, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


# === Gates without bounds ====================================================================


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_a_decay_of_zero_is_the_recurrence(chunk):
    q, k, v = draw(1, 2, 9, 3), draw(1, 2, 9, 3), draw(1, 2, 9, 4)
    log_decay, beta = -draw(1, 2, 9).exp(), draw(1, 2, 9).sigmoid()
    log_decay[0, 0, [0, 4, 5, 8]] = log_decay[0, 1] = -math.inf
    inputs = [t.requires_grad_() for t in (q, k, v, log_decay, beta, draw(1, 2, 3, 4))]
    expected, state = delta_rule_recurrent(*inputs)
    out, last = delta_rule_chunked(*inputs, chunk)
    torch.testing.assert_close((out, last), (expected, state), rtol=0, atol=1e-12)
    ours = torch.autograd.grad(out.square().sum() + last.sum(), inputs)
    theirs = torch.autograd.grad(expected.square().sum() + state.sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("value", [100.0, 1000.0, -1000.0])
@pytest.mark.parametrize("step", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("T", [1, 7])
def test_gates_at_their_ends_are_numbers(value, step, T):
    """A head that forgets at once or never: outputs and gradients stay finite in float32."""
    layer = delta_net().float()
    nn.init.constant_(layer.A_log, value)
    nn.init.constant_(layer.dt_bias, step)
    out, (state, _) = layer(draw(1, T, D).float())
    out.square().sum().backward()
    assert out.isfinite().all() and state.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in layer.parameters())


@torch.no_grad()
def test_a_head_that_forgets_at_once_sees_its_own_token_only():
    """conv_width 1, so that nothing but the state could tell of earlier tokens."""
    layer = GatedDeltaNet(D, 1, 2, k_dim=3, v_dim=5, conv_width=1).double()
    nn.init.constant_(layer.A_log, 1000.0)
    nn.init.constant_(layer.dt_bias, 1.0)
    x = draw(1, 6, D)
    single = torch.cat([layer(token)[0] for token in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(layer(x)[0], single, rtol=0, atol=1e-12)


# === What the indexer learns from ============================================================


def test_a_loss_on_index_scores_moves_the_indexer_alone():
    layer, x = indexed(), draw(2, 6, D).requires_grad_()
    rows = COS[:6], SIN[:6]
    layer.index_scores(x, layer.index_keys(x, *rows), *rows).square().sum().backward()
    moved = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.any()}
    assert {name.partition(".")[0] for name in moved} == {
        *("index_q", "index_k", "index_norm", "index_weight")
    }
    assert x.grad is None
    layer.zero_grad()
    layer(x, causal=True, cos=COS, sin=SIN)[0].square().sum().backward()
    moved = {name for name, p in layer.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {name for name, _ in layer.named_parameters() if name.startswith("attn.")}


# === Parts are called, not read around =======================================================


def compressed() -> nn.Module:
    return after_2026.check_compressed_layer("csa")


def narrow() -> nn.Module:
    layer = after_2026.NarrowValueAttention(D, 2, 1, head_dim=4, v_dim=3)
    return tb.check_randomized(layer)


def gated() -> nn.Module:
    attn = tb.MultiHeadAttention(D, 2, 1, head_dim=4, rope=True, qk_norm=True)
    return tb.check_randomized(after_2025.OutputGatedAttention(attn))


def group() -> nn.Module:
    return after_2026.check_group(2)


@torch.no_grad()
@pytest.mark.parametrize("make", [delta_net, indexed, compressed, narrow, gated, group])
def test_every_part_with_weights_goes_through_its_own_call(make):
    """So that hooks, offloading and shards see it: at once, and in steps with a cache."""
    layer, width = make(), 10 if make is compressed else D
    x = draw(1, 8, 2, width) if make is group else draw(1, 8, width)
    options = {"causal": True, "cos": COS, "sin": SIN}
    if make is group:
        options.pop("causal")
    called = set()
    for name, part in layer.named_modules():
        if name and any(True for _ in part.parameters(recurse=False)):
            part.register_forward_hook(lambda *_, name=name: called.add(name))
    wanted = {name for name, part in layer.named_modules() if name and part._forward_hooks}
    cache = layer.new_cache() if hasattr(layer, "new_cache") else tb.KVCache()
    layer(x, **options)
    assert called == wanted
    for part in x.split((5, 1, 1, 1), dim=1):
        called.clear()
        layer(part, kv_cache=cache, **options)
        assert called == wanted
