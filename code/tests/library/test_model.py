"""DecoderOnlyLM, generate, pick_next_token and next_token_loss."""

import copy
import math
import pickle

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
import transformer_block as tb
from blocks import DECODERS, randomised
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

V, D, LAYERS, H, G, D_FF, MAX_LEN = 19, 12, 2, 3, 1, 10, 24
HEAD_DIM = D // H
PROMPTS = [[5, 6, 7, 8], [9, 3], [11, 2, 4], [1]]


def make(seed=0, std=0.5, **options):
    """A model in float64, every parameter drawn anew with std."""
    torch.manual_seed(seed)
    options = {"max_len": MAX_LEN} | options
    return randomised(tb.DecoderOnlyLM(V, D, LAYERS, H, G, D_FF, **options), std)


def padded(prompts):
    """Prompts as ids and mask, padded on the left with a token that is not neutral."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[13] * (longest - len(prompt)) + prompt for prompt in prompts]
    keep = [[False] * (longest - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(keep)


# What make_block is, by name: each kind of block, and one with experts in every second layer.
BLOCKS = {
    **{kind: lambda _, build=build: build(H, G) for kind, build in DECODERS.items()},
    "every second with experts": lambda layer: DECODERS[
        "modern mla moe" if layer % 2 else "modern"
    ](H, G),
}
del BLOCKS["gpt2"]  # it takes no tables

# =============================================================================================
# Logits
# =============================================================================================


def reference_logits(model, ids, *, windows, scale=1.0, cap=None, keep=None, base=10000.0):
    """One row of token ids through the default blocks, in numpy."""
    p = {name: w.numpy() for name, w in model.state_dict().items()}
    x = p["embedding.weight"][ids] * scale
    positions = range(len(ids))
    for layer, window in enumerate(windows):
        block = reference.sub(p, f"blocks.{layer}")
        mask = reference.causal(positions, positions, window)
        mask = mask if keep is None else mask & np.array(keep)[None]

        def attn(h, block=block, mask=mask):
            p = reference.sub(block, "attn")
            return reference.multi_head_attention(
                p, h, HEAD_DIM, keep=mask, rope=(0, HEAD_DIM, base)
            )[0]

        def ffn(h, block=block):
            return reference.gated_ffn(reference.sub(block, "ffn"), h)

        x = reference.pre_norm(block, x, attn, ffn, eps=1e-6, norm=reference.rms_norm)
    head = p.get("lm_head.weight", p["embedding.weight"])
    logits = reference.rms_norm(p, "final_norm", x, 1e-6) @ head.T
    return logits if cap is None else cap * np.tanh(logits / cap)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_embeddings": False},
        {"embedding_scale": math.sqrt(D)},
        {"logit_softcap": 2.0},
        {"rope_base": 100.0},
        {"windows": [2, None]},
        {"windows": (None, 3)},
        {"windows": [1, 1]},
    ],
    ids=str,
)
def test_logits_equal_the_reference(options):
    model = make(**options)
    ids, keep = padded(PROMPTS)
    logits = model(ids, key_padding_mask=keep)
    assert logits.shape == (4, 4, V)
    for row, (tokens, real) in enumerate(zip(ids.tolist(), keep.tolist())):
        wanted = reference_logits(
            model,
            tokens,
            windows=options.get("windows", [None] * LAYERS),
            scale=options.get("embedding_scale", 1.0),
            cap=options.get("logit_softcap"),
            base=options.get("rope_base", 10000.0),
            keep=real,
        )
        np.testing.assert_allclose(logits[row].detach().numpy(), wanted, rtol=0, atol=1e-10)


def test_windows_add_up_over_layers():
    """Windows of 3 and 2 see 2 + 1 positions back, not 4."""
    model, ids = make(windows=[3, 2]), torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 2] = 17
    moved = (model(ids) - model(changed)).abs().amax(dim=-1)[0] > 0
    assert moved.tolist() == [False, False, True, True, True, True, False, False]


def test_eps_reaches_every_norm():
    norms = [m for m in make(eps=0.5).modules() if hasattr(m, "eps")]
    assert [norm.eps for norm in norms] == [0.5] * 5


def test_make_block_gets_each_layer():
    asked, made = [], []

    def make_block(layer):
        asked.append(layer)
        made.append(tb.ModernDecoderBlock(D, H, G, D_FF))
        return made[-1]

    model = make(make_block=make_block)
    assert asked == [0, 1]
    assert list(model.blocks) == made


def test_rope_dim_is_the_table_width():
    def wide(layer):
        return tb.ModernDecoderBlock(
            D, d_ff=D_FF, attn=tb.MultiHeadAttention(D, H, G, head_dim=8, rope=True)
        )

    logits = make(make_block=wide, rope_dim=8)(torch.arange(5)[None])
    partial = make(make_block=wide, rope_dim=4)(torch.arange(5)[None])
    default = make(make_block=wide)(torch.arange(5)[None])
    assert torch.equal(logits, default)
    assert (logits - partial).abs().max() > 1e-3


def test_state_dict_is_the_parameters():
    for model in (make(), make(tie_embeddings=False)):
        assert set(model.state_dict()) == {
            name for name, _ in model.named_parameters(remove_duplicate=False)
        }
        assert list(model.buffers()) == []
    assert model.lm_head.bias is None


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 1), (0, 0)])
def test_empty_batch_and_empty_stream(shape):
    model, ids = make(), torch.zeros(shape, dtype=torch.long)
    assert model(ids).shape == (*shape, V)
    assert model(ids, kv_caches=model.new_caches()).shape == (*shape, V)


UNDER_INFERENCE_MODE = {
    "call": lambda model, ids: model(ids, kv_caches=model.new_caches()),
    "to": lambda model, ids: model.to(ids.device),
    "load_state_dict": lambda model, ids: model.load_state_dict(model.state_dict()),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("what", UNDER_INFERENCE_MODE)
def test_trains_after_inference_mode(what, device):
    """What is kept of it must not be an inference tensor: autograd refuses to save one."""
    model, ids = make().float().to(device), torch.arange(10, device=device).view(2, 5)
    with torch.inference_mode():
        UNDER_INFERENCE_MODE[what](model, ids)
    model(ids).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_integer_ids_are_ids(dtype):
    """A continuation or a vocabulary past the range of the dtype must not wrap around."""
    model = tb.DecoderOnlyLM(700, D, 1, H, G, D_FF, max_len=MAX_LEN)
    with torch.no_grad():
        model.embedding.weight[600] *= 100  # the likeliest token after itself
    wide = torch.tensor([[5, 100, 7]])
    assert torch.equal(model(wide.to(dtype)), model(wide))
    wanted = model.generate(wide, 5)
    assert wanted.max() > 255
    assert torch.equal(model.generate(wide.to(dtype), 5), wanted)
    assert model.generate(wide.to(dtype), 0).dtype == torch.int64
    logits = torch.randn(1, 3, 700)
    loss = F.cross_entropy(logits[0, :2], wide[0, 1:])
    torch.testing.assert_close(tb.next_token_loss(logits, wide.to(dtype)), loss)


# =============================================================================================
# Tying and the start of training
# =============================================================================================


def round_trip(assign):
    def load(model):
        state = copy.deepcopy(model.state_dict())
        model.load_state_dict(state, assign=assign)
        return model

    return load


def recast(model):
    return model.to(torch.float32).to(torch.float64)


def converted(model):
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model.float().double()


def overwritten(model):
    """With this flag .to() replaces parameters instead of their data."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def refilled(model):
    """Through the meta device, parameters given back one by one."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta")
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        setattr(model.get_submodule(module), kind, nn.Parameter(tensor))
    return model


MOVES = {
    "fresh": lambda model: model,
    "to dtype": recast,
    "half": lambda model: model.half().double(),
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "apply": lambda model: model._apply(lambda t: t.clone()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy of a cast": lambda model: copy.deepcopy(recast(model)),
    "state dict": round_trip(False),
    "state dict assigned": round_trip(True),
    "embedding replaced, then cast": converted,
    "parameters swapped on conversion": overwritten,
    "filled one by one": refilled,
}


@pytest.mark.parametrize("how", MOVES)
def test_tied_stays_tied(how):
    model = MOVES[how](make())
    assert model.lm_head is None
    names = [name for name, _ in model.named_parameters()]
    assert names == list(model.state_dict())
    assert [name for name in names if "block" not in name] == [
        "embedding.weight",
        "final_norm.weight",
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.1, 0.9)  # to_empty leaves anything
    normed = []
    model.final_norm.register_forward_hook(lambda module, args, out: normed.append(out))
    logits = model(torch.arange(4)[None])
    words = model.embedding.weight.detach()
    rows = [[row @ word for word in words] for row in normed[0][0].detach()]
    torch.testing.assert_close(logits[0], torch.tensor(rows, dtype=logits.dtype))


@pytest.mark.parametrize("how", [name for name in MOVES if "replaced" not in name])
def test_untied_stays_untied(how):
    model = MOVES[how](make(tie_embeddings=False))
    assert model.lm_head.weight is not model.embedding.weight
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == sum(p.numel() for p in make().parameters()) + V * D


def test_tied_gradient_is_of_both_uses():
    tied, untied = make(), make(tie_embeddings=False)
    state = tied.state_dict()
    untied.load_state_dict(state | {"lm_head.weight": state["embedding.weight"]})
    ids = torch.arange(10).view(2, 5)
    for model in (tied, untied):
        tb.next_token_loss(model(ids), ids).backward()
    both = untied.embedding.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=0, atol=1e-12)
    assert untied.embedding.weight.grad[15].abs().max() == 0
    assert tied.embedding.weight.grad[15].abs().max() > 0


@pytest.mark.parametrize("tie", [True, False])
def test_fresh_loss_is_near_ln_v(tie):
    model = tb.DecoderOnlyLM(997, 96, tie_embeddings=tie, max_len=64)
    weight = model.embedding.weight
    assert abs(weight.mean()) < 2e-4
    assert abs(weight.std() - 0.02) < 2e-4
    assert weight.abs().max() > 3 * 0.02
    ids = torch.randint(0, 997, (4, 64))
    assert abs(tb.next_token_loss(model(ids), ids) - math.log(997)) < 0.25


# =============================================================================================
# Loss
# =============================================================================================


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_is_of_real_pairs(dtype):
    logits = (3 * torch.randn(3, 5, V)).to(dtype)
    ids = torch.randint(0, V, (3, 5))
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    for mask in (None, keep):
        losses = []
        for b in range(3):
            for t in range(4):
                if mask is None or (mask[b, t] and mask[b, t + 1]):
                    row = logits[b, t].double()
                    losses.append(row.logsumexp(0) - row[ids[b, t + 1]])
        got = tb.next_token_loss(logits, ids, mask)
        torch.testing.assert_close(got.double(), sum(losses) / len(losses), rtol=0, atol=1e-5)


def test_loss_without_a_pair_is_zero():
    for B, T in ((2, 0), (2, 1), (0, 4)):
        assert tb.next_token_loss(torch.zeros(B, T, V), torch.zeros(B, T).long()) == 0
    logits = torch.randn(2, 3, V, requires_grad=True)
    loss = tb.next_token_loss(logits, torch.zeros(2, 3).long(), torch.zeros(2, 3).bool())
    loss.backward()
    assert loss == 0
    assert logits.grad.abs().max() == 0


def test_nan_logits_of_padding():
    logits = torch.randn(1, 4, V)
    logits[0, 0] = math.nan
    ids, keep = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1]]).bool()
    logits.requires_grad_()
    loss = tb.next_token_loss(logits, ids, keep)
    assert loss.isfinite()
    torch.testing.assert_close(loss, F.cross_entropy(logits[0, 1:3], ids[0, 2:]))


# =============================================================================================
# Sampling
# =============================================================================================


def allowed_probabilities(logits, temperature, top_k=None, top_p=None):
    """Temperature, top-k and top-p written out over a list, the likeliest first."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: -weights[i])[:top_k]
    total = sum(weights[i] for i in ranked)
    kept, reached = [], 0.0
    for i in ranked:
        kept.append(i)
        reached += weights[i] / total
        if top_p is not None and reached >= top_p - 1e-6:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


LOGITS = [0.3, 2.0, -1.0, 1.5, 0.9, -3.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 99},
        {"top_p": 0.4},
        {"top_p": 0.7},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"top_k": 3, "top_p": 0.75},
        {"top_k": 4, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3, 1e-8, 1e-320])
def test_draws_follow_the_distribution(temperature, options, dtype):
    n = 20000
    logits = torch.tensor(LOGITS, dtype=dtype).expand(n, -1)
    generator = torch.Generator().manual_seed(0)
    tokens = tb.pick_next_token(logits, temperature, generator=generator, **options)
    assert (tokens.shape, tokens.dtype) == ((n, 1), torch.int64)
    shares = tokens.flatten().bincount(minlength=len(LOGITS)) / n
    wanted = allowed_probabilities(LOGITS, max(temperature, 1e-30), **options)
    for share, probability in zip(shares.tolist(), wanted):
        assert abs(share - probability) < 0.015
        assert probability > 0 or share == 0


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, 3), (0.81, 3), (0.79, 2), (0.51, 2), (0.49, 1), (1e-9, 1)]
)
def test_top_p_keeps_the_fewest(top_p, kept):
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(4000, 3)
    drawn = set(tb.pick_next_token(logits, 1.0, top_p=top_p).flatten().tolist())
    assert drawn == {1, 2, 0} if kept == 3 else drawn == {1, 2} if kept == 2 else drawn == {1}


def test_top_p_counts_what_top_k_left():
    """0.4 of 0.9 is under 0.5, of 1.0 too; 0.7 of 0.9 reaches 0.75, of 1.0 it does not."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(8000, 4)
    drawn = tb.pick_next_token(logits, 1.0, 3, 0.75).unique().tolist()
    assert drawn == [0, 1]
    assert tb.pick_next_token(logits, 1.0, None, 0.75).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_p_of_1_keeps_every_token(dtype, monkeypatch):
    """The running sum of 50,257 probabilities in float32 reaches 1 before the last of them."""
    logits = torch.linspace(4, -12, 50257).to(dtype)[None]
    drawn_from, multinomial = [], torch.multinomial

    def watched(probs, *args, **options):
        drawn_from.append(probs)
        return multinomial(probs, *args, **options)

    monkeypatch.setattr(torch, "multinomial", watched)
    tokens = [
        tb.pick_next_token(logits, 1.0, None, p, torch.Generator().manual_seed(3))
        for p in (1.0, 1, None, 0.9)
    ]
    assert [int((probs > 0).sum()) for probs in drawn_from[:3]] == [50257] * 3
    assert (drawn_from[3] > 0).sum() < 50257
    assert tokens[0] == tokens[1] == tokens[2]


def test_draw_by_its_generator():
    logits = torch.zeros(200, 50)
    first, again, other = (
        tb.pick_next_token(logits, 1.0, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().numel() > 30


def test_masked_tokens_are_never_drawn():
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf]).expand(500, 4)
    for options in ({}, {"top_p": 0.9}, {"top_k": 3}):
        assert set(tb.pick_next_token(logits, 1.0, **options).flatten().tolist()) <= {0, 2}


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_temperature_zero_is_argmax(generator):
    states = [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(0))
    best = [max(range(V), key=lambda i, row=row: row[i]) for row in logits.tolist()]
    got = tb.pick_next_token(logits, 0.0, top_k=3, top_p=0.5, generator=generator)
    assert got.flatten().tolist() == best
    model = make()
    states[0] = torch.get_rng_state()
    model.generate(torch.tensor([[1, 2]]), 4, generator=generator)
    assert torch.equal(torch.get_rng_state(), states[0])
    if generator is not None:
        assert torch.equal(generator.get_state(), states[1])


def test_own_generator_alone_is_used():
    model = make()
    before = torch.get_rng_state()
    model.generate(torch.tensor([[1]]), 4, temperature=1.0, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_are_left_alone():
    logits = torch.randn(2, V)
    before = logits.clone()
    tb.pick_next_token(logits, 0.7, 3, 0.5)
    assert torch.equal(logits, before)


# =============================================================================================
# generate
# =============================================================================================


def greedy(model, prompt, n, eos_id=None):
    """The whole prompt again for each token, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] == eos_id:
                break
    return tokens


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("windows", [None, [2, None]])
def test_greedy_equals_full_passes(kind, windows):
    model = make(make_block=BLOCKS[kind], windows=windows, rope_dim=4)
    ids, keep = padded(PROMPTS)
    together = model.generate(ids, 6, key_padding_mask=keep)
    assert torch.equal(together[:, :4], ids)
    for row, prompt in zip(together.tolist(), PROMPTS):
        wanted = greedy(model, prompt, 6)
        assert row[4 - len(prompt) :] == wanted
        assert model.generate(torch.tensor([prompt]), 6).tolist() == [wanted]
    assert len({tuple(row[4:]) for row in together.tolist()}) > 1


@pytest.mark.parametrize("kind", BLOCKS)
def test_left_padded_logits(kind):
    model = make(make_block=BLOCKS[kind], rope_dim=4)
    ids, keep = padded(PROMPTS)
    logits = model(ids, key_padding_mask=keep)
    for row, prompt in zip(logits, PROMPTS):
        alone = model(torch.tensor([prompt]))[0]
        torch.testing.assert_close(row[4 - len(prompt) :], alone, rtol=0, atol=1e-7)


def test_one_prefill_then_single_steps():
    model, lengths = make(), []
    model.blocks[0].register_forward_hook(lambda m, args, out: lengths.append(args[0].shape[1]))
    model.generate(torch.tensor([[1, 2, 3]]), 4)
    assert lengths == [3, 1, 1, 1]
    assert model.generate(torch.tensor([[1, 2, 3]]), 0).tolist() == [[1, 2, 3]]
    assert lengths == [3, 1, 1, 1]


def test_generate_up_to_max_len_twice():
    model, ids = make(), torch.tensor([[1, 2, 3]])
    first = model.generate(ids, MAX_LEN - 3)
    assert first.shape == (1, MAX_LEN)
    model.generate(torch.tensor([[4, 5, 6, 7, 8]]), 3)
    assert torch.equal(model.generate(ids, MAX_LEN - 3), first)
    assert ids.tolist() == [[1, 2, 3]]


class Rigged(nn.Module):
    """In place of the final norm: the stream becomes one-hot for the token that is to come.

    rows[b] lists the tokens row b gets, step by step.
    """

    def __init__(self, rows):
        super().__init__()
        self.rows, self.step = rows, 0

    def forward(self, x):
        out = torch.zeros(x.shape[0], x.shape[1], V, dtype=torch.float64)
        for b, row in enumerate(self.rows):
            out[b, -1, row[self.step]] = 50.0
        self.step += 1
        return out


def rigged(rows):
    model = make(tie_embeddings=False)
    model.final_norm, model.lm_head = Rigged(rows), nn.Identity()
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finished_rows_get_eos(temperature):
    eos = 7
    model = rigged([[eos, 3, 4, 5, 6, 6], [8, 9, eos, 5, 6, 6], [1, 2, 3, eos, 6, 6]])
    prompt = torch.tensor([[1, 2], [eos, eos], [3, eos]])  # eos in a prompt ends nothing
    out = model.generate(prompt, 6, eos_id=eos, temperature=temperature)
    wanted = [[1, 2, eos, eos, eos, eos], [eos, eos, 8, 9, eos, eos], [3, eos, 1, 2, 3, eos]]
    assert out.tolist() == wanted
    assert model.final_norm.step == 4


def test_without_eos_id_none_ends():
    assert rigged([[7, 7, 3]]).generate(torch.tensor([[7]]), 3).tolist() == [[7, 7, 7, 3]]


def test_eos_zero_ends_a_row():
    model = rigged([[4, 0, 5, 5]])
    assert model.generate(torch.tensor([[1]]), 4, eos_id=0).tolist() == [[1, 4, 0]]


@pytest.mark.parametrize("kind", [list, tuple, set, iter, torch.Size])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_ends_at_any_of_several(kind, temperature):
    model = rigged([[7, 3, 4, 5, 6, 6], [8, 9, 2, 5, 7, 6], [1, 5, 3, 2, 6, 6]])
    prompt = torch.tensor([[1, 2], [7, 2], [3, 7]])
    out = model.generate(prompt, 6, eos_id=kind([7, 2]), temperature=temperature)
    wanted = [[1, 2, 7, 7, 7, 7], [7, 2, 8, 9, 2, 2], [3, 7, 1, 5, 3, 2]]
    assert out.tolist() == wanted
    assert model.final_norm.step == 4


@pytest.mark.parametrize("ends", [[], [5], [5, 5]])
def test_no_and_one_end_in_a_list(ends):
    model = rigged([[4, 5, 6, 7]])
    wanted = [[1, 4, 5]] if ends else [[1, 4, 5, 6, 7]]
    assert model.generate(torch.tensor([[1]]), 4, eos_id=ends).tolist() == wanted


def test_rows_with_eos_equal_rows_alone():
    model = make(seed=3)
    ids, keep = padded(PROMPTS)
    free = model.generate(ids, 8, key_padding_mask=keep)
    eos = int(free[0, 5])
    together = model.generate(ids, 8, key_padding_mask=keep, eos_id=eos)
    for row, prompt in zip(together.tolist(), PROMPTS):
        alone = greedy(model, prompt, 8, eos_id=eos)
        got = row[4 - len(prompt) :]
        assert got[: len(alone)] == alone
        assert set(got[len(alone) :]) <= {eos}


def test_empty_batch_generates_nothing():
    model = make()
    out = model.generate(torch.zeros(0, 3, dtype=torch.long), 2)
    assert out.shape == (0, 5)
    assert model.generate(torch.zeros(0, 3, dtype=torch.long), 2, eos_id=1).shape[0] == 0


def test_sampling_by_its_generator():
    model, ids = make(), torch.tensor([[1, 2, 3]])
    options = {"temperature": 2.0, "top_k": 12, "top_p": 0.95}
    outs = [
        model.generate(ids, 12, **options, generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in (1, 1, 2)
    ]
    assert outs[0] == outs[1] != outs[2]


def test_sampling_with_all_options():
    """The distribution of the first new token over many equal rows."""
    model, n = make(std=0.4), 6000
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]]))[0, -1].tolist()
    options = {"temperature": 1.5, "top_k": 6, "top_p": 0.9}
    ids = torch.tensor([[1, 2, 3]]).expand(n, 3)
    out = model.generate(ids, 1, **options, generator=torch.Generator().manual_seed(0))
    shares = out[:, 3].bincount(minlength=V) / n
    wanted = allowed_probabilities(logits, 1.5, 6, 0.9)
    for share, probability in zip(shares.tolist(), wanted):
        assert abs(share - probability) < 0.03
        assert probability > 0 or share == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_no_new_tokens(dtype):
    model, ids = make(), torch.tensor([[1, 2, 3]]).to(dtype)
    out = model.generate(ids, 0)
    assert (out.tolist(), out.dtype) == ([[1, 2, 3]], torch.int64)
    out[0, 0] = 9
    assert ids[0, 0] == 1
    assert list(model.stream(ids, 0)) == []


@pytest.mark.parametrize("options", [{}, {"eos_id": [3, 7]}, {"temperature": 1.5, "top_k": 9}])
def test_stream_gives_generates_steps(options):
    model, (ids, keep) = make(), padded(PROMPTS)
    outs = []
    for call in (model.generate, lambda *a, **o: torch.cat((ids, *model.stream(*a, **o)), dim=1)):
        generator = torch.Generator().manual_seed(0)
        outs.append(call(ids, 7, key_padding_mask=keep, generator=generator, **options))
    assert torch.equal(*outs)
    steps = list(model.stream(ids, 3, key_padding_mask=keep))
    assert all((step.shape, step.dtype) == ((4, 1), torch.int64) for step in steps)
    assert len(steps) == 3


def test_stream_works_step_by_step():
    model, calls = make(), []
    model.final_norm.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.stream(torch.tensor([[1]]), -1)
    steps = model.stream(torch.tensor([[1, 2]]), 5)
    assert calls == []
    for count in (1, 2):
        next(steps)
        assert len(calls) == count
    steps.close()
    assert len(calls) == 2


def test_stream_keeps_its_own_tokens():
    model = tb.DecoderOnlyLM(50, 16, 2, 4, 2, 32, max_len=12, tie_embeddings=False)
    ids = torch.randint(50, (2, 4))
    expected, steps = model.generate(ids, 6)[:, 4:], model.stream(ids, 6)
    assert len(expected.unique()) > 3
    seen = []
    for token in steps:
        seen.append(token.clone())
        token.zero_()
    assert torch.equal(torch.cat(seen, dim=1), expected)


def test_block_put_in_between_steps():
    model, seen = tb.DecoderOnlyLM(50, 16, 1, 4, 2, 32, max_len=12).eval(), []
    steps = model.stream(torch.randint(50, (1, 4)), 3)
    next(steps)
    block = tb.ModernDecoderBlock(16, 4, 2, 32)
    block.register_forward_pre_hook(lambda block, _: seen.append(block.ffn.training))
    model.blocks[0] = block
    next(steps)
    assert seen == [True]


def test_flags_between_two_steps():
    model = make()
    before = mixed_modes(model)
    for step in model.stream(torch.tensor([[1, 2]]), 3):
        assert not step.requires_grad
        assert torch.is_grad_enabled()
        assert [module.training for module in model.modules()] == before
        tb.next_token_loss(model(IDS), IDS).backward()


def test_two_streams_side_by_side():
    model, prompts = make(), [torch.tensor([[1, 2]]), torch.tensor([[5, 6, 7]])]
    steps = zip(*(model.stream(ids, 6) for ids in prompts))
    together = zip(*steps)
    for ids, tokens in zip(prompts, together):
        assert torch.equal(torch.cat((ids, *tokens), dim=1), model.generate(ids, 6))


# =============================================================================================
# The last position alone, packed documents, the loss of the answer
# =============================================================================================


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}, {"logit_softcap": 2.0}])
def test_last_only_is_the_last_row(options):
    model, (ids, keep), rows = make(**options), padded(PROMPTS), []
    wanted = model(ids, key_padding_mask=keep)[:, -1:]
    for part in (model.final_norm, *([model.lm_head] if model.lm_head else [])):
        part.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    got = model(ids, key_padding_mask=keep, last_only=True)
    assert got.shape == (4, 1, V)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    model.generate(ids, 3, key_padding_mask=keep)
    assert set(rows) == {1}
    caches = model.new_caches()
    model(ids[:, :2], kv_caches=caches, last_only=True)
    torch.testing.assert_close(
        model(ids[:, 2:], kv_caches=caches, last_only=True), model(ids)[:, -1:], rtol=0, atol=1e-12
    )


def test_last_only_costs_one_row():
    """The tied product has no module to hook: its size is counted."""
    model = make()
    with FlopCounterMode(display=False) as one:
        model(IDS, last_only=True)
    with FlopCounterMode(display=False) as all_rows:
        model(IDS)
    assert all_rows.get_total_flops() - one.get_total_flops() == 2 * 2 * D * V


DOCUMENTS = [[1, 5, 2, 8], [9, 3], [4, 4, 17]]


def pack(documents):
    """One row of ids, and which of its positions belong to one document."""
    ids = torch.tensor([[token for document in documents for token in document]])
    number = torch.tensor([i for i, document in enumerate(documents) for _ in document])
    return ids, number[:, None] == number


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("windows", [None, [2, None], [1, 3]])
def test_packed_documents_stay_apart(kind, windows):
    model = make(make_block=BLOCKS[kind], windows=windows, rope_dim=4)
    ids, mask = pack(DOCUMENTS)
    alone = torch.cat([model(torch.tensor([document])) for document in DOCUMENTS], dim=1)
    # rotation sees differences alone, up to the float32 rounding of its tables
    torch.testing.assert_close(model(ids, mask=mask), alone, rtol=0, atol=1e-5)
    assert (model(ids) - alone).abs().max() > 1e-3
    torch.testing.assert_close(model(ids, mask=mask[None]), alone, rtol=0, atol=1e-5)
    caches, pieces = model.new_caches(), []
    for start, end in ((0, 3), (3, 4), (4, 9)):
        rows = mask[start:end, :end]
        pieces.append(model(ids[:, start:end], mask=rows, kv_caches=caches))
    torch.testing.assert_close(torch.cat(pieces, dim=1), alone, rtol=0, atol=1e-5)


def test_packed_rows_with_padding():
    model, rows = make(windows=[3, None]), [DOCUMENTS, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]]
    packed = [pack(documents) for documents in rows]
    ids = torch.cat([row for row, _ in packed])
    mask = torch.stack([mask for _, mask in packed])
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, 7:] = False  # the last document of the second row is padding
    got = model(ids, mask=mask, key_padding_mask=keep)
    for row, documents in enumerate(rows):
        start = 0
        for document in documents[: 3 - row]:
            alone = model(torch.tensor([document]))[0]
            end = start + len(document)
            torch.testing.assert_close(got[row, start:end], alone, rtol=0, atol=1e-5)
            start = end


def test_mask_shows_nothing_later():
    model, ids = make(), torch.arange(6)[None]
    torch.testing.assert_close(model(ids, mask=torch.ones(6, 6).bool()), model(ids))


@pytest.mark.parametrize("padded_too", [False, True])
def test_loss_of_the_answer_alone(padded_too):
    logits, ids = torch.randn(3, 6, V), torch.randint(0, V, (3, 6))
    predict, keep = torch.rand(3, 6) < 0.5, torch.ones(3, 6).bool()
    if padded_too:
        keep[0, :2] = keep[2, 4:] = False
    losses = [
        -logits[b, t].double().log_softmax(0)[ids[b, t + 1]]
        for b in range(3)
        for t in range(5)
        if predict[b, t + 1] and keep[b, t] and keep[b, t + 1]
    ]
    got = tb.next_token_loss(logits, ids, keep if padded_too else None, predict=predict)
    torch.testing.assert_close(got.double(), sum(losses) / len(losses), rtol=0, atol=1e-6)
    assert 2 <= len(losses) < 15
    nothing = tb.next_token_loss(logits, ids, predict=torch.zeros(3, 6).bool())
    assert nothing == 0


def test_prompt_gets_no_gradient():
    logits = torch.randn(1, 5, V, requires_grad=True)
    predict = torch.tensor([[False, False, False, True, True]])
    tb.next_token_loss(logits, torch.tensor([[1, 2, 3, 4, 5]]), predict=predict).backward()
    assert (logits.grad[0].abs().sum(-1) > 0).tolist() == [False, False, True, True, False]


# =============================================================================================
# What generate leaves as it was, and what it refuses
# =============================================================================================


def mixed_modes(model):
    """Training flags set one by one, as with a frozen part."""
    model.train()
    model.blocks[0].eval()
    model.blocks[1].ffn.eval()
    return [module.training for module in model.modules()]


def test_training_flags_stay():
    model, seen = make(), []
    before = mixed_modes(model)
    hook = model.final_norm.register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), *(m.training for m in model.modules())))
    )
    model.generate(torch.tensor([[1]]), 2)
    hook.remove()
    assert [module.training for module in model.modules()] == before
    assert seen == [(False, *before)] * 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_flags_after_an_error(error):
    def stop(*_):
        raise error

    model = make()
    before = mixed_modes(model)
    model.blocks[1].ffn.down.register_forward_hook(stop)
    with pytest.raises(error):
        model.generate(torch.tensor([[1]]), 2)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_generated_ids_carry_no_graph():
    assert not make().generate(torch.tensor([[1]]), 2).requires_grad


IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("temperature", [1e-8, 1e-320, 1e5])
def test_extreme_temperature(temperature):
    out = make().generate(IDS, 3, temperature=temperature)
    assert 0 <= out.min() <= out.max() < V


def test_huge_temperature_draws_all():
    tokens = tb.pick_next_token(torch.tensor(LOGITS).expand(3000, 6), 1e30)
    assert tokens.unique().numel() == 6


def test_huge_top_k_keeps_all():
    tokens = tb.pick_next_token(torch.zeros(3000, 6), 1.0, top_k=2**62)
    assert tokens.unique().numel() == 6


def test_forward_past_max_len():
    model = make()
    caches = model.new_caches()
    assert [type(cache) for cache in caches] == [tb.KVCache] * LAYERS
    model(torch.zeros(1, MAX_LEN, dtype=torch.long), kv_caches=caches)
    with pytest.raises(ValueError, match=f"max_len={MAX_LEN}"):
        model(torch.zeros(1, 1, dtype=torch.long), kv_caches=caches)
    caches[0].truncate(3)
    with pytest.raises(ValueError, match=rf"kv_caches .*\[3, {MAX_LEN}\]"):
        model(torch.zeros(1, 1, dtype=torch.long), kv_caches=caches)
    assert [cache.next_pos for cache in caches] == [3, MAX_LEN]


def test_caches_partly_there():
    model = make()
    assert torch.equal(model(IDS, kv_caches=None), model(IDS))
    cache = tb.KVCache()
    model(IDS, kv_caches=[cache, tb.KVCache()])
    with pytest.raises(ValueError, match="kv_caches"):
        model(IDS, kv_caches=[cache, None])


def test_one_cache_for_two_layers():
    model, cache = make(), tb.KVCache()
    with pytest.raises(ValueError, match="kv_caches"):
        model(IDS, kv_caches=[cache, cache])
    assert cache.next_pos == 0


@pytest.mark.parametrize("kind", [nn.Embedding, tb.TiedEmbedding])
def test_grown_embedding_may_end_rows(kind):
    model = make(tie_embeddings=True)
    model.embedding = kind(V + 2, model.final_norm.weight.numel()).double()
    assert model.generate(torch.tensor([[V + 1]]), 3, eos_id=V + 1).shape[1] <= 4
    assert model(torch.tensor([[V + 1]])).shape == (1, 1, V + 2)
    with pytest.raises(ValueError, match=f"eos_id .*{V + 2}"):
        model.generate(torch.tensor([[1]]), 0, eos_id=V + 2)


def test_larger_tied_table_ends_rows():
    model = make(tie_embeddings=True)
    table = model.embedding.weight.detach()
    model.embedding.weight = nn.Parameter(torch.cat((table, 50 * table[3:4], -50 * table[3:4])))
    out = model.generate(torch.tensor([[1, 2]]), 6, eos_id=(V, V + 1))
    assert out[0, 2] in (V, V + 1)  # no other row is as long
    assert out.shape == (1, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_logits_without_a_finite_best(dtype, temperature, value):
    logits = torch.zeros(3, 5, dtype=dtype)
    logits[1, 2] = value
    with pytest.raises(ValueError, match=r"logits .*0\.0, (nan|inf), 0\.0"):
        tb.pick_next_token(logits, temperature)
    logits[1] = -torch.inf
    with pytest.raises(ValueError, match="logits"):
        tb.pick_next_token(logits, temperature)
    logits[1, 4] = 0.0
    assert tb.pick_next_token(logits, temperature)[1] == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1e-46, 5e-324, 1e-38])
def test_smallest_top_p_is_greedy(top_p, dtype):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 5.0]], dtype=dtype)
    assert tb.pick_next_token(logits, 1.0, top_p=top_p).tolist() == [[1], [2]]
