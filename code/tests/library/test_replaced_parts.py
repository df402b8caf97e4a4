"""Whatever is put in a module's place later is called, moved, copied, saved and loaded as it is.

Every submodule of every block and of the model is wrapped by an adapter, hooked or replaced. What a
module must then give is what a model gives whose own weights hold the sum.
"""

import copy
import io
import itertools
import pickle
import threading

import accelerate
import pytest
import torch
import torch.nn.utils.parametrize
import transformer_block as tb
from blocks import randomised
from torch import nn

V, D, H, G, D_FF, MAX_LEN = 31, 16, 4, 2, 24, 64
IDS = torch.tensor([[5, 0, 30, 7, 7, 12, 1], [3, 9, 9, 2, 28, 4, 11]])
PIECES = (4, 1, 2)
close = {"rtol": 0, "atol": 1e-11}


def latent_attention(**options):
    sizes = {"kv_rank": 6, "rope_dim": 4, "nope_dim": 3, "v_dim": 5, "q_rank": 7} | options
    return tb.MultiHeadLatentAttention(D, H, **sizes)


def rich_attention():
    return tb.MultiHeadAttention(D, H, G, rope=True, bias=True, qk_norm=True, logit_softcap=3.0)


MODELS = {
    "modern": lambda _: tb.ModernDecoderBlock(D, H, G, D_FF),
    "rich": lambda _: tb.BranchNormDecoderBlock(D, d_ff=D_FF, attn=rich_attention()),
    "parallel": lambda _: tb.ParallelDecoderBlock(D, H, G, D_FF, shared_norm=False),
    "latent": lambda _: tb.ModernDecoderBlock(D, d_ff=D_FF, attn=latent_attention()),
    "latent without q_rank": lambda _: tb.ParallelDecoderBlock(
        D, d_ff=D_FF, attn=latent_attention(q_rank=None)
    ),
    "experts": lambda _: tb.ModernDecoderBlock(D, H, G, ffn=tb.MoEFFN(D, D_FF, n_experts=3)),
}


def make_lm(kind="modern", seed=0, **options):
    """A model in float64 with every parameter drawn, norms too."""
    torch.manual_seed(seed)
    lm = tb.DecoderOnlyLM(V, D, 2, H, G, D_FF, max_len=MAX_LEN, make_block=MODELS[kind], **options)
    return randomised(lm)


def in_pieces(lm, ids, lengths=PIECES):
    caches = lm.new_caches()
    with torch.no_grad():
        return torch.cat([lm(part, kv_caches=caches) for part in ids.split(lengths, 1)], dim=1)


def parts_of(kind):
    """Names of all submodules of a model that are called with one tensor, or are a block."""
    model = make_lm(kind, tie_embeddings=False)
    return [name for name, part in model.named_modules() if name and not is_list(part)]


def is_list(part):
    return isinstance(part, nn.ModuleList)


PARTS = [
    (kind, name) for kind in MODELS for name in parts_of(kind) if not name.startswith("blocks.1")
]


def changed(out):
    """No norm undoes this; of an attention's (out, (k, v)) the output alone."""
    first, *rest = out if isinstance(out, tuple) else (out,)
    first = first + 0.5 * first.flip(-1)
    return (first, *rest) if isinstance(out, tuple) else first


class Adapter(nn.Module):
    """What the base says, changed."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, *args, **options):
        return changed(self.base(*args, **options))


class AdapterWithWeight(Adapter):
    """As adapters do, so that code which reads .weight sees the base's."""

    @property
    def weight(self):
        return self.base.weight


def put(model, name, part):
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)
    return model


def hooked(model, name):
    model.get_submodule(name).register_forward_hook(lambda _module, _args, out: changed(out))


WAYS = {
    "adapter": lambda model, name: put(model, name, Adapter(model.get_submodule(name))),
    "adapter with .weight": lambda model, name: put(
        model, name, AdapterWithWeight(model.get_submodule(name))
    ),
    "forward hook": hooked,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "name"), PARTS, ids=[f"{k}-{n}" for k, n in PARTS])
def test_wrapped_part_is_called(kind, name, way):
    lm = make_lm(kind, tie_embeddings=False)
    before = lm(IDS)
    called = []
    WAYS[way](lm, name)
    lm.get_submodule(name).register_forward_hook(lambda *_: called.append(1))
    wrapped = lm(IDS)
    assert called
    keys = list(lm.state_dict())
    used = "experts.2" not in name or not torch.equal(
        before, wrapped
    )  # an idle expert changes nothing
    assert not used or (before - wrapped).abs().max() > 1e-6
    called.clear()
    torch.testing.assert_close(in_pieces(lm, IDS), wrapped, **close)
    assert len(called) >= len(PIECES)  # at every step, and for a part of one block
    lm = copy.deepcopy(lm.to("cpu").float().double())
    lm.load_state_dict(lm.state_dict())
    assert list(lm.state_dict()) == keys
    torch.testing.assert_close(lm(IDS), wrapped, rtol=0, atol=1e-4)


# =============================================================================================
# The head and the embedding
# =============================================================================================


class LowRankHead(nn.Module):
    """base(x) + x A^T B^T, without a .weight."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        width = base.weight.shape
        self.A = nn.Parameter(torch.randn(rank, width[1]).double())
        self.B = nn.Parameter(torch.randn(width[0], rank).double())

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


class BareEmbedding(nn.Module):
    """Two tables added; no .weight."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(V, D).double() for _ in range(2))

    def forward(self, ids):
        return self.tables[0][ids] + self.tables[1][ids]


def reloaded(assign):
    def load(lm):
        state = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
        assert not any(lm.load_state_dict(state, assign=assign))
        return lm

    return load


def through_a_file(lm):
    file = io.BytesIO()
    torch.save(lm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MOVES = {
    "to": lambda lm: lm.to("cpu"),
    "cast": lambda lm: lm.float().double(),
    "to the meta device and filled": lambda lm: filled(lm.to("meta"), lm),
    "state dict": reloaded(False),
    "state dict assigned": reloaded(True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda lm: pickle.loads(pickle.dumps(lm)),
    "file": through_a_file,
    "apply": lambda lm: lm.apply(lambda _module: None),
}
STATE = {}


def filled(skeleton, _):
    """Parameters given one by one, as loaders for large files do."""
    for name, tensor in STATE["kept"].items():
        module, _, leaf = name.rpartition(".")
        setattr(skeleton.get_submodule(module), leaf, nn.Parameter(tensor))
    return skeleton


def exact(move):
    """A cast to float32 and back rounds; all other moves leave every bit."""
    return {"rtol": 0, "atol": 1e-4 if move == "cast" else 1e-11}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("tied", [True, False])
def test_classifier_as_head(tied, move):
    lm = make_lm(tie_embeddings=tied)
    lm.lm_head = nn.Linear(D, 2, bias=False).double()
    weight, wanted = lm.lm_head.weight.detach().clone(), lm(IDS)
    keys = list(lm.state_dict())
    STATE["kept"] = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    lm = MOVES[move](lm)
    assert wanted.shape == (2, 7, 2)
    torch.testing.assert_close(lm(IDS), wanted, **exact(move))
    torch.testing.assert_close(lm.lm_head.weight.detach(), weight, **exact(move))
    assert list(lm.state_dict()) == keys
    assert lm.lm_head.weight.shape == (2, D)


@pytest.mark.parametrize("move", MOVES)
def test_low_rank_head_and_embedding(move):
    lm = make_lm(tie_embeddings=False)
    lm.lm_head, lm.embedding = LowRankHead(lm.lm_head), BareEmbedding()
    wanted, keys = lm(IDS), list(lm.state_dict())
    STATE["kept"] = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    lm = MOVES[move](lm)
    torch.testing.assert_close(lm(IDS), wanted, **exact(move))
    assert list(lm.state_dict()) == keys
    assert {"lm_head.A", "lm_head.base.weight", "embedding.tables.0"} <= set(keys)


@pytest.mark.parametrize("move", MOVES)
def test_larger_embedding_is_the_head(move):
    lm = make_lm()
    lm(IDS)  # nothing of the old table may be kept
    lm.embedding = nn.Embedding(V + 3, D).double()
    wanted = lm(IDS + 3)
    STATE["kept"] = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    lm = MOVES[move](lm)
    assert wanted.shape == (2, 7, V + 3)
    torch.testing.assert_close(lm(IDS + 3), wanted, **exact(move))
    assert sum(p.shape == (V + 3, D) for p in lm.parameters()) == 1


@pytest.mark.parametrize("kind", ["modern", "experts"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("tied", [True, False])
def test_state_dict_keys_stay(kind, tied, move):
    lm = make_lm(kind, tie_embeddings=tied)
    keys, wanted = list(lm.state_dict()), lm(IDS)
    STATE["kept"] = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    lm = MOVES[move](lm)
    assert keys == list(lm.state_dict()) == [name for name, _ in lm.named_parameters()]
    assert ("lm_head.weight" in keys) != tied
    assert not any("rope" in key or "cos" in key for key in keys)
    torch.testing.assert_close(lm(IDS), wanted, **exact(move))


# =============================================================================================
# Tied files, quantised copies, skeletons without memory
# =============================================================================================


def test_strict_load_of_a_tied_file():
    tied, untied = make_lm(seed=1), make_lm(seed=2, tie_embeddings=False)
    fresh, state = make_lm(seed=3), untied.state_dict()
    assert not any(fresh.load_state_dict(tied.state_dict()))
    assert torch.equal(fresh(IDS), tied(IDS))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*lm_head\.weight"):
        fresh.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*lm_head\.weight"):
        untied.load_state_dict(tied.state_dict())
    assert "lm_head.weight" in state


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["modern", "latent", "experts"])
def test_model_of_int8_layers(kind, tied):
    lm = make_lm(kind, tie_embeddings=tied).float()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(0.3)
    small = torch.ao.quantization.quantize_dynamic(lm, {nn.Linear}, dtype=torch.qint8)
    wanted = small(IDS)
    assert (wanted - lm(IDS)).abs().max() < 0.1 * lm(IDS).abs().max()
    small = small.to("cpu")
    small.load_state_dict(copy.deepcopy(small.state_dict()))
    assert torch.equal(small(IDS), wanted)
    assert small.generate(IDS, 2).shape == (2, 9)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_functional_call_of_a_skeleton(kind, tied):
    lm = make_lm(kind, tie_embeddings=tied)
    base = copy.deepcopy(lm).to("meta")
    assert all(parameter.is_meta for parameter in base.parameters())
    out = torch.func.functional_call(base, dict(lm.named_parameters()), (IDS,))
    assert torch.equal(out, lm(IDS))
    with torch.device("meta"):
        other = tb.DecoderOnlyLM(
            V, D, 2, H, G, D_FF, max_len=MAX_LEN, make_block=MODELS[kind], tie_embeddings=tied
        )
    assert torch.equal(
        torch.func.functional_call(other, dict(lm.named_parameters()), (IDS,)), lm(IDS)
    )
    STATE["kept"] = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    assert torch.equal(filled(other, lm)(IDS), lm(IDS))


def test_stacked_models_under_vmap():
    models = [make_lm(seed=seed) for seed in (1, 2, 3)]
    parameters, _ = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(given):
        return torch.func.functional_call(base, given, (IDS,))

    together = torch.func.vmap(call)(parameters)
    for out, model in zip(together, models):
        torch.testing.assert_close(out, model(IDS), **close)


# =============================================================================================
# Latent attention calls kv_up whatever it is
# =============================================================================================


def with_bias(mla):
    mla.kv_up = nn.Linear(6, H * 8).double()


def patched(mla):
    whole = mla.kv_up.forward
    mla.kv_up.forward = lambda x: whole(x).sin()


UPS = {
    "bias": with_bias,
    "sequence": lambda m: setattr(m, "kv_up", nn.Sequential(m.kv_up, nn.Tanh())),
    "forward hook": lambda m: m.kv_up.register_forward_hook(lambda _m, _a, out: out.sin()),
    "pre hook": lambda m: m.kv_up.register_forward_pre_hook(lambda _m, args: (args[0].sin(),)),
    "parametrised": lambda m: nn.utils.parametrizations.weight_norm(m.kv_up),
    "forward of the instance": patched,
    "subclass": lambda m: setattr(m, "kv_up", Squared(6, H * 8, bias=False).double()),
}


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x).square()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("up", UPS)
def test_pieces_with_any_kv_up(up, mode):
    mla, cache = latent_attention().double(), tb.KVCache()
    UPS[up](mla)
    x, (cos, sin) = torch.randn(2, 6, D).double(), tb.build_rope_cache(8, 4)
    with mode():
        full = mla(x, cos=cos, sin=sin, causal=True)[0]
        steps = [
            mla(part, cos=cos, sin=sin, causal=True, kv_cache=cache)[0]
            for part in x.split((4, 1, 1), dim=1)
        ]
        torch.testing.assert_close(torch.cat(steps, dim=1), full, **close)


def test_gradient_hooks_of_kv_up():
    mla, cache, seen = latent_attention().double(), tb.KVCache(), []
    mla.kv_up.register_full_backward_hook(lambda *_: seen.append(1))
    x, (cos, sin) = torch.randn(1, 5, D).double().requires_grad_(), tb.build_rope_cache(8, 4)
    for part in x.split((3, 1, 1), dim=1):
        mla(part, cos=cos, sin=sin, causal=True, kv_cache=cache)[0].sum().backward(
            retain_graph=True
        )
    assert len(seen) >= 3


# =============================================================================================
# Rotation widths, blocks added and dropped
# =============================================================================================


def wide_block(_layer):
    attn = tb.MultiHeadAttention(D, H, G, head_dim=8, rope=True)
    return tb.ModernDecoderBlock(D, d_ff=D_FF, attn=attn)


BUILDERS = {
    "head_dim of 8": (wide_block, 8),
    "latent, rope_dim of 2": (
        lambda _: tb.ModernDecoderBlock(D, d_ff=D_FF, attn=latent_attention(rope_dim=2)),
        2,
    ),
    "wrapped": (lambda layer: Adapter(wide_block(layer)), 8),
    "one of two layers turns": (
        lambda layer: tb.ParallelDecoderBlock(
            D, d_ff=D_FF, attn=tb.MultiHeadAttention(D, H, G, head_dim=6, rope=layer == 1)
        ),
        6,
    ),
    "nothing turns": (lambda _: tb.ParallelDecoderBlock(D, H, G, D_FF), 4),
}


@pytest.mark.parametrize("builder", BUILDERS)
def test_default_rotation_width(builder):
    make_block, width = BUILDERS[builder]
    models = []
    for options in ({}, {"rope_dim": width}):
        torch.manual_seed(0)
        models.append(
            tb.DecoderOnlyLM(V, D, 2, H, G, max_len=MAX_LEN, make_block=make_block, **options)
        )
    assert torch.equal(models[0](IDS), models[1](IDS))


def test_all_of_a_wide_head_is_turned():
    """The logits of a shell without rope_dim equal its parts called with a table of width 8."""
    lm = tb.DecoderOnlyLM(V, D, 2, H, G, max_len=MAX_LEN, make_block=wide_block).double()
    cos, sin = tb.build_rope_cache(7, 8)
    x = lm.embedding(IDS)
    for block in lm.blocks:
        x = block(x, cos, sin)
    torch.testing.assert_close(lm(IDS), lm.final_norm(x) @ lm.embedding.weight.T, **close)
    narrow = tb.DecoderOnlyLM(V, D, 2, H, G, max_len=MAX_LEN, make_block=wide_block, rope_dim=4)
    narrow.double().load_state_dict(lm.state_dict())
    assert (narrow(IDS) - lm(IDS)).abs().max() > 1e-7


def test_differing_widths_need_rope_dim():
    def make_block(layer):
        return wide_block(layer) if layer else tb.ModernDecoderBlock(D, H, G, D_FF)

    with pytest.raises(ValueError, match=r"rope_dim .*\[4, 8\]"):
        tb.DecoderOnlyLM(V, D, 2, H, G, make_block=make_block)
    assert tb.DecoderOnlyLM(V, D, 2, H, G, make_block=make_block, rope_dim=4)(IDS).shape[-1] == V


CHANGES = {
    "append": lambda blocks: blocks.append(MODELS["modern"](0).double()),
    "insert": lambda blocks: blocks.insert(0, MODELS["modern"](0).double()),
    "extend": lambda blocks: blocks.extend([MODELS["modern"](0).double()]),
    "pop": lambda blocks: blocks.pop(0),
    "delete": lambda blocks: blocks.__delitem__(-1),
}


@pytest.mark.parametrize("call", ["forward", "cached", "generate"])
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_added_or_dropped(change, call):
    lm, calls = make_lm(), []

    def run():
        if call == "generate":
            return lm.generate(IDS, 1)
        return lm(IDS, kv_caches=lm.new_caches() if call == "cached" else None)

    CHANGES[change](lm.blocks)
    with pytest.raises(ValueError, match=f"windows .*{len(lm.blocks)} blocks"):
        run()
    lm.windows = [None] * len(lm.blocks)
    for block in lm.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    run()
    assert len(calls) == len(lm.blocks)
    assert len(lm.new_caches()) == len(lm.blocks)


def test_list_of_blocks_is_the_stack():
    lm = make_lm()
    kept = lm.blocks[1]
    lm.blocks, lm.windows = nn.ModuleList([kept]), [None]
    cos, sin = tb.build_rope_cache(7, 4)
    x = kept(lm.embedding(IDS), cos, sin)
    torch.testing.assert_close(lm(IDS), lm.final_norm(x) @ lm.embedding.weight.T, **close)


# =============================================================================================
# Caches that are taken back when a part fails
# =============================================================================================


class StopHereError(Exception):
    pass


FAILING = {
    "first block": "blocks.0",
    "second block": "blocks.1",
    "attention": "blocks.1.attn",
    "output projection": "blocks.0.attn.o_proj",
    "FFN": "blocks.1.ffn",
    "final norm": "final_norm",
    "head": "lm_head",
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("error", [StopHereError, KeyboardInterrupt])
@pytest.mark.parametrize("part", FAILING)
def test_failing_part_restores_caches(part, error, mode):
    def fail(*_):
        raise error

    lm = make_lm("latent" if part == "FFN" else "modern", tie_embeddings=False)
    full = lm(IDS)
    for lengths, stored in itertools.product((None, MAX_LEN), (0, 3)):
        caches = [tb.KVCache(lengths), tb.KVCache()]
        with mode():
            if stored:
                lm(IDS[:, :stored], kv_caches=caches)
            before = [None if c.k is None else (c.k.clone(), c.v.clone()) for c in caches]
            hook = lm.get_submodule(FAILING[part]).register_forward_hook(fail)
            for rows in (1, 4):
                with pytest.raises(error):
                    lm(IDS[:, stored : stored + rows], kv_caches=caches)
                assert [cache.next_pos for cache in caches] == [stored] * 2
            hook.remove()
            for cache, held in zip(caches, before):
                assert (cache.k is None) == (held is None)
                if held is not None:
                    assert torch.equal(cache.k, held[0])
                    assert torch.equal(cache.v, held[1])
            rest = lm(IDS[:, stored:], kv_caches=caches)
            torch.testing.assert_close(rest, full[:, stored:], **close)


class Marked(tb.KVCache):
    """A subclass with attributes of its own, as for statistics or a name."""

    def __init__(self, name, max_len=None):
        super().__init__(max_len)
        self.name, self.log = name, []

    def append(self, k_new, v_new):
        self.log.append(k_new.shape[2])
        return super().append(k_new, v_new)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda c: copy.deepcopy({1: c})[1]]
)
@pytest.mark.parametrize("filled", [False, True])
def test_copies_of_a_subclass(duplicate, filled):
    cache, lm = Marked("first", MAX_LEN), make_lm()
    if filled:
        lm(IDS, kv_caches=[cache, tb.KVCache()])
    twin = duplicate(cache)
    assert type(twin) is Marked
    assert (twin.name, twin.log, twin.max_len) == ("first", [7] * filled, MAX_LEN)
    assert (twin.log is cache.log) == (duplicate is copy.copy)
    twin.append(*torch.randn(2, 2, G, 1, 4).double())
    assert (cache.next_pos, twin.next_pos) == (7 * filled, 7 * filled + 1)


# =============================================================================================
# Threads
# =============================================================================================


def together(calls):
    """What each call returns, all started at once in a thread of its own."""
    outs, errors, start = [None] * len(calls), [], threading.Barrier(len(calls))

    def run(i):
        try:
            start.wait()
            outs[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return outs


@pytest.mark.parametrize("kind", ["modern", "latent", "experts"])
def test_eight_threads_share_a_model(kind):
    lm = make_lm(kind, windows=[3, None]).eval()
    streams = [torch.randint(0, V, (1 + i % 3, 3 + i)) for i in range(8)]
    with torch.no_grad():
        wanted = [(lm(ids), lm.generate(ids, 6)) for ids in streams]

    def work(ids):
        outs = []
        for _ in range(6):
            with torch.no_grad():
                outs.append(lm(ids))
            outs.append(torch.cat((ids, *lm.stream(ids, 6)), dim=1))
        return outs

    results = together([lambda ids=ids: work(ids) for ids in streams])
    for outs, (logits, tokens) in zip(results, wanted):
        assert all(torch.equal(out, logits) for out in outs[::2])
        assert all(torch.equal(out, tokens) for out in outs[1::2])
    assert not any(module.training for module in lm.modules())


# =============================================================================================
# One table for both ends: its module sees both
# =============================================================================================


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_offloaded_weights(kind, tied):
    lm = make_lm(kind, tie_embeddings=tied)
    wanted, said = lm(IDS), lm.generate(IDS[:1], 4, eos_id=V - 1)
    pieces = in_pieces(lm, IDS)
    accelerate.cpu_offload(lm)
    assert all(parameter.is_meta for parameter in lm.parameters())
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(lm(IDS), wanted.detach(), rtol=0, atol=0)
    torch.testing.assert_close(in_pieces(lm, IDS), pieces, **close)
    assert torch.equal(lm.generate(IDS[:1], 4, eos_id=V - 1), said)


@pytest.mark.parametrize("plain", [False, True])
def test_tied_logits_and_gradients(plain):
    lm = make_lm()
    if plain:
        table, lm.embedding = lm.embedding.weight, nn.Embedding(V, D).double()
        lm.embedding.weight = table
    hidden = []
    lm.final_norm.register_forward_hook(lambda _module, _args, out: hidden.append(out))
    lm.blocks = nn.ModuleList()
    lm.windows = []
    logits = lm(IDS)
    x = lm.embedding.weight[IDS]
    x = x / (x.square().mean(-1, keepdim=True) + lm.final_norm.eps).sqrt() * lm.final_norm.weight
    torch.testing.assert_close(hidden[0], x, **close)
    torch.testing.assert_close(logits, torch.einsum("btd,vd->btv", x, lm.embedding.weight), **close)
    (got,) = torch.autograd.grad(logits.sin().sum(), lm.embedding.weight, retain_graph=True)
    wanted = torch.einsum("btd,vd->btv", x, lm.embedding.weight).sin().sum()
    (wanted,) = torch.autograd.grad(wanted, lm.embedding.weight)
    torch.testing.assert_close(got, wanted, **close)


def test_wrapped_tied_embedding():
    lm, seen = make_lm(), []
    lm.embedding.register_forward_hook(lambda _module, args, _out: seen.append(args[0].dtype))
    before = lm(IDS)
    assert seen == [torch.int64, torch.float64]
    lm.embedding = Adapter(lm.embedding)
    lm.embedding.register_forward_hook(lambda _module, _args, out: seen.append(out.shape[-1]))
    after = lm(IDS)
    assert seen[2:] == [torch.int64, D, torch.float64, V]
    assert (after - before).abs().max() > 1e-3


def test_hooked_tied_embedding():
    lm = make_lm()
    table, lm.embedding = lm.embedding.weight, nn.Embedding(V, D).double()
    lm.embedding.weight = table
    lm.embedding.register_forward_hook(lambda _module, _args, out: 3 * out)
    doubled = make_lm()
    doubled.embedding.weight.data *= 3
    torch.testing.assert_close(lm(IDS), doubled(IDS), **close)


@pytest.mark.parametrize("router", [tb.SoftmaxRouter, tb.SigmoidRouter])
def test_grown_router_and_mixture(router):
    def built(n_experts):
        torch.manual_seed(3)
        ffn = tb.MixtureFFN(
            router(D, n_experts, 2), [tb.GatedFFN(D, D_FF) for _ in range(n_experts)]
        )
        return ffn.double()

    grown, wanted, x = built(3), built(4), torch.randn(2, 5, D).double()
    grown.experts.append(wanted.experts[3])
    grown.router.router = wanted.router.router
    if router is tb.SigmoidRouter:
        grown.router.selection_bias = torch.zeros(4).double()
    for have, want in zip(grown.experts, wanted.experts):
        have.load_state_dict(want.state_dict())
    torch.testing.assert_close(grown(x), wanted(x), **close)
    assert grown.router.tokens_per_expert == wanted.router.tokens_per_expert
    assert len(tb.MixtureFFN(grown.router, grown.experts).experts) == 4


def test_kv_up_of_no_plain_tensor():
    class Int8(torch.Tensor):
        """As quantised weights are: a product is all that it can do."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            assert func is not torch.Tensor.unflatten, "read around the module's call"
            return super().__torch_function__(func, types, args, kwargs)

    lm = make_lm("latent")
    wanted = lm(IDS)
    for block in lm.blocks:
        weight = block.attn.kv_up.weight.detach().as_subclass(Int8)
        block.attn.kv_up.weight = nn.Parameter(weight, requires_grad=False)
    torch.testing.assert_close(in_pieces(lm, IDS).as_subclass(torch.Tensor), wanted, **close)


def test_kv_up_with_a_parametrization():
    class Halved(nn.Module):
        def forward(self, weight):
            return 0.5 * weight

    lm = make_lm("latent")
    for block in lm.blocks:
        nn.utils.parametrize.register_parametrization(block.attn.kv_up, "weight", Halved())
    torch.testing.assert_close(in_pieces(lm, IDS), lm(IDS), **close)
