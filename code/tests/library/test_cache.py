"""Decoding with a cache gives what one full pass gives; what a refusal or an error leaves of it."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import reference
import torch
import transformer_block as tb
from blocks import (
    COS,
    DECODERS,
    LATENT,
    SIN,
    D,
    V,
    attention,
    decoder,
    language_model,
    latent,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

close = {"rtol": 0, "atol": 1e-10}

MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


HEADS = [(4, 4), (4, 2), (6, 2), (4, 1)]


@st.composite
def splits(draw, longest=7):
    """Chunk lengths, now and then 0."""
    lengths = draw(st.lists(st.sampled_from([1, 1, 2, 3, 0]), min_size=1, max_size=5))
    return lengths if sum(lengths) <= longest else [longest]


def in_chunks(call, x, lengths, mode, padding=None, window=None):
    """call(part, options) for each chunk in the mode; options hold what the chunk needs."""
    outs, start = [], 0
    for length in lengths:
        end = start + length
        options = {} if padding is None else {"key_padding_mask": padding[:, :end]}
        if window is not None:
            options["mask"] = causal(start, end, window)
        with MODES[mode]():
            outs.append(call(x[:, start:end], **options))
        start = end
    return torch.cat(outs, dim=1)


def causal(start, end, window=None):
    return torch.from_numpy(reference.causal(range(start, end), range(end), window))


# =============================================================================================
# Any split equals the full pass
# =============================================================================================


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), lengths=splits(), mode=st.sampled_from(list(MODES)))
def test_any_split_is_the_full_pass(kind, data, lengths, mode):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    block = decoder(kind, *data.draw(st.sampled_from(HEADS[:2] if kind == "parallel" else HEADS)))
    B, T = data.draw(st.integers(1, 3)), sum(lengths)
    window = data.draw(st.sampled_from([None, None, 1, 2, 3]))
    padding = torch.rand(B, T) < 0.7 if data.draw(st.booleans()) else None
    x = torch.randn(B, T, D).double()
    cache = tb.KVCache(data.draw(st.sampled_from([None, T + 1])))
    mask = None if window is None else causal(0, T, window)
    full = run(block, x, mask=mask, key_padding_mask=padding)

    def step(part, **options):
        return run(block, part, kv_cache=cache, **options)

    chunked = in_chunks(step, x, lengths, mode, padding, window)
    torch.testing.assert_close(chunked, full, **close)
    assert cache.next_pos == T


@given(data=st.data(), lengths=splits(), mode=st.sampled_from(list(MODES)))
def test_any_split_through_the_model(data, lengths, mode):
    windows = data.draw(st.sampled_from([None, [2, None], [1, 3]]))
    model = language_model(windows=windows, logit_softcap=data.draw(st.sampled_from([None, 3.0])))
    B, T = data.draw(st.integers(1, 3)), sum(lengths)
    ids = torch.randint(0, V, (B, T))
    padding = torch.rand(B, T) < 0.7 if data.draw(st.booleans()) else None
    caches = model.new_caches()
    full = model(ids, key_padding_mask=padding)

    def step(part, **options):
        return model(part, kv_caches=caches, **options)

    torch.testing.assert_close(in_chunks(step, ids, lengths, mode, padding), full, **close)
    assert [cache.next_pos for cache in caches] == [T, T]


@pytest.mark.parametrize("kind", DECODERS)
def test_chunks_in_other_modes(kind):
    block, x = decoder(kind), torch.randn(2, 6, D).double()
    full = run(block, x)
    for modes in (("inference", "grad", "no_grad"), ("no_grad", "inference", "grad")):
        cache, outs = tb.KVCache(), []
        for i, mode in enumerate([*modes, *modes]):
            with MODES[mode]():
                outs.append(run(block, x[:, i : i + 1], kv_cache=cache).clone())
        torch.testing.assert_close(torch.cat(outs, dim=1), full, **close)


@pytest.mark.parametrize("lengths", [[6], [1] * 6, [4, 2], [2, 0, 3, 1]])
def test_cached_keys_and_values(lengths):
    attn = attention(4, 2, qk_norm=True, bias=True).double()
    nn.init.normal_(attn.k_norm.weight)
    x, cache = torch.randn(2, 6, D).double(), tb.KVCache()

    def step(part):
        return attn(part, cos=COS, sin=SIN, kv_cache=cache)[0]

    in_chunks(step, x, lengths, "no_grad")
    p = {name: w.double().numpy() for name, w in attn.state_dict().items()}
    assert cache.k.shape == cache.v.shape == (2, 2, 6, 4)
    for b in range(2):
        k = reference.heads(reference.linear(p, "k_proj", x[b].numpy()), 4)
        k = reference.rotate(reference.rms_norm(p, "k_norm", k, 1e-6), 0, 4, 10000.0)
        v = reference.heads(reference.linear(p, "v_proj", x[b].numpy()), 4)
        np.testing.assert_allclose(cache.k[b], k, rtol=0, atol=1e-12)
        np.testing.assert_allclose(cache.v[b], v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[6], [1] * 6, [4, 2]])
def test_cached_latent_and_key(lengths):
    attn = latent().double()
    nn.init.normal_(attn.kv_norm.weight)
    x, cache = torch.randn(2, 6, D).double(), tb.KVCache()

    def step(part):
        return attn(part, cos=COS, sin=SIN, kv_cache=cache)[0]

    in_chunks(step, x, lengths, "no_grad")
    widths = cache.k.shape[-1] + cache.v.shape[-1]
    assert widths == LATENT["kv_rank"] + LATENT["rope_dim"]
    assert cache.k.shape[:3] == (2, 1, 6)
    p = {name: w.numpy() for name, w in attn.state_dict().items()}
    stored = torch.cat((cache.k, cache.v), dim=-1)[:, 0].numpy()
    for b in range(2):
        down = reference.linear(p, "kv_down", x[b].numpy())
        compressed = reference.rms_norm(p, "kv_norm", down[:, :5], 1e-6)
        shared = reference.rotate(down[None, :, 5:], 0, 4, 10000.0)[0]
        np.testing.assert_allclose(stored[b], np.hstack((compressed, shared)), rtol=0, atol=1e-12)


def test_latent_step_expands_no_keys():
    """The absorbed form: a step's work in kv_up does not grow with the cache."""
    attn, work = latent(), []
    for length in (9, 21):
        cache = tb.KVCache()
        with torch.no_grad():
            attn(torch.randn(1, length, D), cos=COS, sin=SIN, kv_cache=cache)
            with FlopCounterMode(display=False) as counter:
                attn(torch.randn(1, 1, D), cos=COS, sin=SIN, kv_cache=cache)
        work.append(counter.get_total_flops())
    a_key = (
        2 * 4 * (LATENT["kv_rank"] + LATENT["rope_dim"]) + 2 * 4 * LATENT["kv_rank"]
    )  # score, sum
    assert work[1] - work[0] == 12 * a_key


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("lengths", [[5], [1] * 5, [3, 2], [2, 0, 1, 2]])
def test_gradients_through_chunks(kind, lengths):
    block, x = decoder(kind), torch.randn(2, 5, D).double().requires_grad_()
    weighting, cache = torch.randn(2, 5, D).double(), tb.KVCache()

    def step(part):
        return run(block, part, kv_cache=cache)

    wanted_from = (run(block, x) * weighting).sum()
    got_from = (in_chunks(step, x, lengths, "grad") * weighting).sum()
    leaves = [x, *block.parameters()]
    wanted = torch.autograd.grad(wanted_from, leaves, allow_unused=True, materialize_grads=True)
    got = torch.autograd.grad(got_from, leaves, allow_unused=True, materialize_grads=True)
    for gradient, want in zip(got, wanted):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-9)
    assert wanted[0].abs().min() > 0


@pytest.mark.parametrize("lengths", [[5], [1] * 5, [3, 2]])
def test_model_gradients_through_chunks(lengths):
    model, ids = language_model(windows=[2, None]), torch.arange(10).view(2, 5)
    caches = model.new_caches()

    def step(part):
        return model(part, kv_caches=caches)

    wanted = torch.autograd.grad(model(ids).sin().sum(), list(model.parameters()))
    got = torch.autograd.grad(
        in_chunks(step, ids, lengths, "grad").sin().sum(), list(model.parameters())
    )
    for gradient, want in zip(got, wanted):
        torch.testing.assert_close(gradient, want, rtol=0, atol=1e-9)


# =============================================================================================
# KVCache against a list that copies everything
# =============================================================================================

OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(list(MODES)), st.integers(0, 3)),
    st.tuples(st.sampled_from(["truncate"]), st.integers(0, 4)),
    st.tuples(st.sampled_from(["reset", "deepcopy", "copy", "pickle", "refuse"]), st.just(0)),
)


@given(steps=st.lists(OPERATIONS, max_size=12), max_len=st.sampled_from([None, 9]))
def test_cache_holds_what_a_list_holds(steps, max_len):
    torch.manual_seed(0)
    cache, k, v = tb.KVCache(max_len), torch.zeros(2, 3, 0, 4), torch.zeros(2, 3, 0, 1)
    for action, number in steps:
        if action in MODES and not (max_len and k.shape[2] + number > max_len):
            k_new, v_new = torch.randn(2, 3, number, 4), torch.randn(2, 3, number, 1)
            with MODES[action]():
                got_k, got_v = cache.append(k_new, v_new)
            k, v = torch.cat((k, k_new), dim=2), torch.cat((v, v_new), dim=2)
            assert torch.equal(got_k, k)
            assert torch.equal(got_v, v)
        elif action == "truncate":
            length = min(number, k.shape[2])
            cache.truncate(length)
            k, v = k[:, :, :length], v[:, :, :length]
        elif action == "reset":
            cache.reset()
            k, v = k[:, :, :0], v[:, :, :0]
        elif action == "refuse":
            with pytest.raises(ValueError, match="v_new"):
                cache.append(torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 2, 1))
        elif action in ("deepcopy", "copy"):
            cache = getattr(copy, action)(cache)
        elif action == "pickle":
            cache = pickle.loads(pickle.dumps(cache))
        assert cache.next_pos == k.shape[2]
        assert_holds(cache, k, v)


def assert_holds(cache, k, v):
    if k.shape[2] == 0:
        assert cache.k is None
        assert cache.v is None
    else:
        assert torch.equal(cache.k, k)
        assert torch.equal(cache.v, v)


def rows(length, B=2, G=3, width_k=4, width_v=1, **options):
    return (torch.randn(B, G, length, width, **options) for width in (width_k, width_v))


def addresses(cache, n, mode):
    """Where the keys lie after each of n one-token steps; views keep the storages alive."""
    views = []
    with MODES[mode]():
        for _ in range(n):
            cache.append(*rows(1))
            views.append(cache.k)
    return [view.untyped_storage().data_ptr() for view in views], views


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_growth_copies_rarely(mode):
    pointers, views = addresses(tb.KVCache(), 500, mode)
    assert len(set(pointers)) <= 12
    last = views[-1].untyped_storage().nbytes() / views[-1].element_size()
    assert last <= 2 * 512 * 2 * 3 * 4


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_max_len_takes_memory_once(mode):
    cache = tb.KVCache(10)
    first, views = addresses(cache, 10, mode)
    cache.truncate(4)
    second, more = addresses(cache, 6, mode)
    cache.reset()
    third, _ = addresses(cache, 10, mode)
    cache.truncate(0)
    fourth, _ = addresses(cache, 10, mode)
    assert len({*first, *second, *third, *fourth}) == 1
    assert views[0].untyped_storage().nbytes() == 2 * 3 * 10 * 4 * 4
    assert more[-1].shape == (2, 3, 10, 4)


def test_reset_takes_other_shapes():
    cache = tb.KVCache(6)
    with torch.no_grad():
        cache.append(*rows(3))
        for change in ({"B": 5}, {"G": 1}, {"width_k": 2}, {"dtype": torch.float64}):
            cache.reset()
            k, v = rows(2, **change)
            got_k, got_v = cache.append(k, v)
            assert torch.equal(got_k, k)
            assert torch.equal(got_v, v)


def test_grad_mode_decides():
    """A tensor without grad may still be saved by autograd for the gradient of another one."""
    cache, views = tb.KVCache(), []
    for _ in range(3):
        k, _ = cache.append(*rows(1))
        views.append((k, k.clone()))
    assert all(torch.equal(view, before) for view, before in views)
    assert len({view.untyped_storage().data_ptr() for view, _ in views}) == 3


def test_append_spares_saved_buffers():
    cache = tb.KVCache(8)
    with torch.no_grad():
        k, v = cache.append(*rows(3, width_v=4))
    q = torch.randn(2, 3, 2, 4, requires_grad=True)
    loss = tb.attend(q, k, v).sum()
    cache.append(*rows(1, width_v=4))  # needs no gradient itself
    loss.backward()
    assert q.grad.isfinite().all()


def test_appended_tensors_are_copied():
    for mode, context in MODES.items():
        cache = tb.KVCache()
        with context():
            k, v = rows(2)
            wanted = k.clone()
            cache.append(k, v)
            k.zero_()
            assert torch.equal(cache.k, wanted), mode


@pytest.mark.parametrize("max_len", [None, 8])
@pytest.mark.parametrize("outside", ["grad", "no_grad"])
def test_buffer_of_inference_mode(max_len, outside):
    cache = tb.KVCache(max_len)
    k, v = rows(3)
    with torch.inference_mode():
        cache.append(k, v)
        cache.append(*rows(1))
        cache.truncate(3)
    with MODES[outside]():
        k_new, v_new = rows(1)
        got_k, got_v = cache.append(k_new.requires_grad_(), v_new)
        assert torch.equal(got_k, torch.cat((k, k_new), dim=2))
        assert torch.equal(got_v, torch.cat((v, v_new), dim=2))
        assert not got_k.is_inference()
        if outside == "grad":
            got_k.square().sum().backward()
            torch.testing.assert_close(k_new.grad, 2 * k_new)


@pytest.mark.parametrize("max_len", [None, 8])
@pytest.mark.parametrize("before", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("after", ["no_grad", "inference"])
def test_backward_after_truncate(max_len, before, after):
    """What autograd has saved of a step must not be written over by a later one."""
    attn, cache = tb.MultiHeadAttention(D, 4, 2).double(), tb.KVCache(max_len)
    past, x = torch.randn(1, 2, D).double(), torch.randn(1, 2, D).double().requires_grad_()
    with MODES[before]():
        attn(past, kv_cache=cache)
    out, _ = attn(x, kv_cache=cache)
    with MODES[after]():
        cache.truncate(3)
        attn(torch.randn(1, 1, D).double(), kv_cache=cache)  # as long as what it replaces
        cache.truncate(2)
        attn(torch.randn(1, 3, D).double(), kv_cache=cache)
        cache.reset()
        attn(torch.randn(1, 3, D).double(), kv_cache=cache)
    wanted, _ = attn(torch.cat((past, x), dim=1))
    (want,) = torch.autograd.grad(wanted[:, 2:].square().sum(), [x])
    (got,) = torch.autograd.grad(out.square().sum(), [x])
    torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda c: copy.deepcopy([c])[0]])
@pytest.mark.parametrize("max_len", [None, 8])
def test_copies_are_apart(duplicate, mode, max_len):
    with MODES[mode]():
        cache = tb.KVCache(max_len)
        cache.append(*rows(4))
        cache.append(*rows(1))
        other = duplicate(cache)
        assert torch.equal(other.k, cache.k)
        assert (other.next_pos, other.max_len) == (5, max_len)
        third, kept = duplicate(cache), cache.k.clone()
        third.truncate(2)
        third.append(*rows(3))
        assert torch.equal(cache.k, kept)
        mine, theirs = list(rows(1)), list(rows(1))
        cache.append(*mine)
        other.append(*theirs)
        assert torch.equal(cache.k[:, :, 5:], mine[0])
        assert torch.equal(other.k[:, :, 5:], theirs[0])
        kept = cache.k.clone()
        other.truncate(2)
        other.append(*rows(3))
        assert torch.equal(cache.k, kept)
        other.reset()
        assert cache.next_pos == 6


def test_copies_with_a_graph():
    attn, cache = tb.MultiHeadAttention(D, 4, 2), tb.KVCache()
    attn(torch.randn(1, 3, D), kv_cache=cache)
    for other in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(other.k, cache.k)
        assert torch.equal(other.v, cache.v)


def test_truncate_forgets_the_rest():
    block, x = decoder("modern"), torch.randn(2, 6, D).double()
    with torch.no_grad():
        cache = tb.KVCache()
        run(block, x[:, :3], kv_cache=cache)
        run(block, torch.randn(2, 4, D).double(), kv_cache=cache)
        cache.truncate(3)
        rest = run(block, x[:, 3:], kv_cache=cache)
        torch.testing.assert_close(rest, run(block, x)[:, 3:], **close)


# =============================================================================================
# A model that raises leaves its caches as they were; a block alone keeps what was stored
# =============================================================================================


class StopHereError(Exception):
    pass


def stop(*_args, **_options):
    raise StopHereError


def snapshot(caches):
    return [None if c.k is None else (c.next_pos, c.k.clone(), c.v.clone()) for c in caches]


def assert_unchanged(caches, before):
    for cache, state in zip(caches, before):
        if state is None:
            assert cache.next_pos == 0
            assert cache.k is None
        else:
            assert cache.next_pos == state[0]
            assert_holds(cache, *state[1:])


@contextlib.contextmanager
def failing(module):
    """The module raises once its own work is done."""
    handle = module.register_forward_hook(stop)
    yield
    handle.remove()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("kind", DECODERS)
def test_block_that_raises_keeps_rows(kind, filled, mode):
    block, cache, x = decoder(kind), tb.KVCache(), torch.randn(2, 5, D).double()
    full, start, raised = run(block, x), 2 * filled, 0
    with MODES[mode]():
        if filled:
            run(block, x[:, :start], kv_cache=cache)
        before = snapshot([cache])
        for part in (part for part in block.modules() if part is not block):
            with failing(part):
                try:
                    run(block, x[:, start:], kv_cache=cache)  # not every part is called: kv_up
                except StopHereError:
                    raised += 1
            assert cache.next_pos in (start, 5)
            cache.truncate(start)
            assert_unchanged([cache], before)
        assert raised >= 8
        rest = run(block, x[:, start:], kv_cache=cache)
        torch.testing.assert_close(rest, full[:, start:], **close)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [StopHereError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 1])
def test_model_whose_attend_raises(layer, error, mode):
    def interrupted(*_args, **_options):
        raise error

    model, ids = language_model(), torch.arange(10).view(2, 5)
    caches, full = [tb.KVCache(6), tb.KVCache()], model(ids)
    with MODES[mode]():
        model(ids[:, :3], kv_caches=caches)
        before, attn = snapshot(caches), model.blocks[layer].attn
        attn.attend = interrupted
        with pytest.raises(error):
            model(ids[:, 3:], kv_caches=caches)
        assert_unchanged(caches, before)
        attn.attend = tb.attend
        torch.testing.assert_close(model(ids[:, 3:], kv_caches=caches), full[:, 3:], **close)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filled", [False, True])
def test_model_that_raises_anywhere(filled, mode):
    model, ids = language_model(), torch.arange(10).view(2, 5)
    parts = [m for m in model.modules() if m is not model and not isinstance(m, nn.ModuleList)]
    caches, full = model.new_caches(), model(ids)
    with MODES[mode]():
        if filled:
            model(ids[:, :2], kv_caches=caches)
        before = snapshot(caches)
        for part in parts:
            with failing(part), pytest.raises(StopHereError):
                model(ids[:, 2 * filled :], kv_caches=caches)
            assert_unchanged(caches, before)
        rest = model(ids[:, 2 * filled :], kv_caches=caches)
        torch.testing.assert_close(rest, full[:, 2 * filled :], **close)


def test_cache_is_no_context():
    """A with block over a cache that truncates and appends took back the wrong rows."""
    assert not hasattr(tb.KVCache, "__enter__")
    assert not hasattr(tb.KVCache, "__exit__")
    with pytest.raises((TypeError, AttributeError)), tb.KVCache():  # AttributeError: Python 3.10
        pass


@pytest.mark.parametrize("mode", MODES)
def test_cut_and_filled_again(mode):
    cache, (first, _), (second, _) = tb.KVCache(), rows(4), rows(1)
    with MODES[mode]():
        cache.append(first, first)
        with pytest.raises(StopHereError):
            cache.truncate(1)
            cache.append(second, second)
            raise StopHereError
        assert cache.next_pos == 2
        assert_holds(cache, *[torch.cat((first[:, :, :1], second), dim=2)] * 2)


@pytest.mark.parametrize("max_len", [None, 16])
@pytest.mark.parametrize("forget", ["truncate", "reset", "truncate to 0"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_views_may_be_appended(mode, sizes, forget, max_len):
    with MODES[mode]():
        cache, (k, v) = tb.KVCache(max_len), rows(10, *sizes)
        cache.append(k[:, :, :9], v[:, :, :9])
        k_all, v_all = cache.append(k[:, :, 9:], v[:, :, 9:])
        kept = 2 if forget == "truncate" else 0
        cache.reset() if forget == "reset" else cache.truncate(kept)
        cache.append(k_all[:, :, -8:], v_all[:, :, -8:])  # over the memory that they are views of
        wanted = [torch.cat((t[:, :, :kept], t[:, :, -8:]), dim=2) for t in (k, v)]
        assert_holds(cache, *wanted)


@pytest.mark.parametrize("max_len", [None, 16])
@pytest.mark.parametrize("outside", ["grad", "no_grad"])
@pytest.mark.parametrize("load", ["pickle", "file"])
def test_loaded_in_inference_mode(load, outside, max_len, tmp_path):
    cache, (k, v) = tb.KVCache(max_len), rows(6)
    with torch.no_grad():
        cache.append(k[:, :, :4], v[:, :, :4])
    with torch.inference_mode():
        if load == "pickle":
            cache = pickle.loads(pickle.dumps(cache))
        else:
            torch.save(cache, tmp_path / "cache.pt")
            cache = torch.load(tmp_path / "cache.pt", weights_only=False)
    for end in (5, 6):
        with MODES[outside]():
            cache.append(k[:, :, end - 1 : end], v[:, :, end - 1 : end])
    assert_holds(cache, k, v)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("kind", DECODERS)
def test_cached_forward_not_recomputed(kind, past, reentrant):
    block, cache = decoder(kind), tb.KVCache()
    x = torch.randn(2, 3 + past, D, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        run(block, x[:, :past], kv_cache=cache)
    call = lambda new: run(block, new, kv_cache=cache)  # noqa: E731
    options = {} if reentrant else {"determinism_check": "none"}
    out = checkpoint(call, x[:, past:], use_reentrant=reentrant, **options)
    assert cache.next_pos == 3 + past
    with pytest.raises(RuntimeError, match=r"kv_cache .*backward"):
        out.square().sum().backward()
    assert cache.next_pos == 3 + past


@pytest.mark.parametrize("reentrant", [True, False])
def test_model_recomputed_without_caches(reentrant):
    lm, ids = language_model(), torch.randint(0, V, (2, 4))
    caches, x = lm.new_caches(), torch.ones(2, 4, D, dtype=torch.float64, requires_grad=True)

    def call(x, **options):
        lm.blocks[0].register_forward_pre_hook(lambda _block, args: (args[0] + x,))
        return lm(ids, **options)

    out = checkpoint(call, x, use_reentrant=reentrant)
    out.square().sum().backward()
    assert x.grad.any()
    out = (
        checkpoint(call, x, use_reentrant=reentrant, kv_caches=caches)
        if not reentrant
        else (checkpoint(lambda x: call(x, kv_caches=caches), x, use_reentrant=True))
    )
    with pytest.raises(RuntimeError, match="kv_cache"):
        out.square().sum().backward()
    assert [cache.next_pos for cache in caches] == [4] * len(caches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("filled", [0, 3])
@pytest.mark.parametrize("part", ["attend", "latent", "sinks"])
def test_failed_attend_keeps_nothing(part, filled, error, mode):
    def fails(*_args, **_options):
        raise error

    if part == "latent":
        attn = latent()
    else:
        attend = tb.SinkAttention(4) if part == "sinks" else tb.attend
        attn = attention(4, 2, attend=attend)
    attn.double()
    cache, x = tb.KVCache(), torch.randn(2, 5, D, dtype=torch.float64)
    with MODES[mode]():
        if filled:
            attn(x[:, :filled], cos=COS, sin=SIN, kv_cache=cache)
        before = snapshot([cache])
        if part == "attend":
            attn.attend = fails
        elif part == "sinks":
            handle = attn.attend.register_forward_hook(fails)
        else:
            handle = attn.kv_up.register_forward_hook(fails)
        with pytest.raises(error):
            attn(x[:, filled:], cos=COS, sin=SIN, kv_cache=cache)
        assert_unchanged([cache], before)
        if part == "attend":
            attn.attend = tb.attend
        else:
            handle.remove()
        whole, _ = attn(x, cos=COS, sin=SIN, causal=True)
        out, _ = attn(x[:, filled:], cos=COS, sin=SIN, causal=True, kv_cache=cache)
        torch.testing.assert_close(out, whole[:, filled:], **close)
