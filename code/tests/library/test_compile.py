"""Blocks, model and loss under torch.compile, torch.export and torch.func, as the script has them.

Every dense block is one graph, without a cache forward and backward too, and so is the model
without caches. With a cache the lengths of a growing buffer decide which decoding steps are
compiled anew.
"""

import copy
import shutil

import pytest
import torch
import transformer_block as tb
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

D, H, G, D_FF, MAX_LEN = 32, 4, 2, 48, 128
B, T, S = 2, 7, 5
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
needs_one_graph = pytest.mark.skipif(
    TORCH < (2, 13), reason="older compilers take every length of a cache as a number"
)
COS, SIN = tb.build_rope_cache(MAX_LEN, D // H)


def latent_block() -> tb.ModernDecoderBlock:
    sizes = {"kv_rank": 12, "rope_dim": D // H, "nope_dim": 6, "v_dim": 10}
    return tb.ModernDecoderBlock(D, H, G, D_FF, attn=tb.MultiHeadLatentAttention(D, H, **sizes))


# How each block is made, and what its forward takes after x.
BLOCKS = {
    "encoder 2017": (lambda: tb.VanillaEncoderLayer2017(D, H, D_FF), ()),
    "decoder 2017": (lambda: tb.VanillaSeq2SeqDecoderLayer2017(D, H, D_FF), (torch.ones(B, S, D),)),
    "GPT-2": (lambda: tb.GPT2StyleDecoderLayer(D, H, D_FF), ()),
    "modern": (lambda: tb.ModernDecoderBlock(D, H, G, D_FF), (COS, SIN)),
    "parallel": (lambda: tb.ParallelDecoderBlock(D, H, G, D_FF), ()),
    "branch norm": (lambda: tb.BranchNormDecoderBlock(D, H, G, D_FF), (COS, SIN)),
    "latent": (latent_block, (COS, SIN)),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def on_path(block: nn.Module, path) -> nn.Module:
    """The block with every attention through attend or attend_fused; latent attention has one."""
    for module in block.modules():
        if isinstance(module, tb.MultiHeadAttention):
            module.attend = path
    return block


def output_and_gradients(block: nn.Module, call, x: Tensor, others: tuple) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = call(x, *others)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_one_graph(name, path):
    make, others = BLOCKS[name]
    block, x = on_path(make(), path).double(), torch.randn(B, T, D, dtype=torch.float64)
    others = tuple(other.double() for other in others)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = output_and_gradients(block, compiled, x, others)
    for got, expected in zip(results, output_and_gradients(block, block, x, others)):
        torch.testing.assert_close(got, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
def test_default_backend():
    block, x = tb.ModernDecoderBlock(D, H, G, D_FF), torch.randn(B, T, D)
    compiled = torch.compile(block, fullgraph=True)
    results = output_and_gradients(block, compiled, x, (COS, SIN))
    for got, expected in zip(results, output_and_gradients(block, block, x, (COS, SIN))):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["modern", "latent"])
def test_exported_block(name):
    make, others = BLOCKS[name]
    block, any_size = make(), torch.export.Dim.DYNAMIC
    sizes = {"x": {0: any_size, 1: any_size}, "cos": None, "sin": None}
    program = torch.export.export(block, (torch.randn(B, T, D), *others), dynamic_shapes=sizes)
    for shape in ((B, T, D), (B + 1, 2 * T, D)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x, *others), block(x, *others))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # no vmap rule: it loops
@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
@pytest.mark.parametrize("name", BLOCKS)
def test_per_sample_gradients(name, path):
    make, others = BLOCKS[name]
    block = on_path(make(), path).double()
    others = tuple(other[:1].double() if other.dim() == 3 else other for other in others)
    samples = torch.randn(3, T, D, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        out = torch.func.functional_call(block, parameters, (sample[None], *others))
        return out.square().sum()

    parameters = {key: p.detach() for key, p in block.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples)
    for row, sample in enumerate(samples):
        block.zero_grad()
        block(sample[None], *others).square().sum().backward()
        for key, parameter in block.named_parameters():
            torch.testing.assert_close(per_sample[key][row], parameter.grad, atol=1e-11, rtol=0)


def compiling_steps(
    block: nn.Module, others: tuple, cache: tb.KVCache, *, prompt: int = 5, steps: int = 20
) -> set[int]:
    """Which steps of decoding made torch.compile add a graph, each call being one; 0: the prompt.

    Each step's output is compared with the block's own.
    """
    counter = CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    plain, added, graphs = copy.deepcopy(cache), set(), 0
    for step, length in enumerate((prompt, *[1] * steps)):
        x = torch.randn(B, length, D)
        out = compiled(x, *others, kv_cache=cache)
        torch.testing.assert_close(out, block(x, *others, kv_cache=plain))
        assert cache.next_pos == prompt + step
        if counter.frame_count > graphs:
            added.add(step)
        graphs = counter.frame_count
    return added


WITH_CACHE = ["GPT-2", "modern", "parallel", "branch norm", "latent"]


@needs_one_graph
@pytest.mark.parametrize("name", WITH_CACHE)
@torch.no_grad()
def test_graphs_with_a_fixed_cache(name):
    make, others = BLOCKS[name]
    assert compiling_steps(make(), others, tb.KVCache(MAX_LEN)) == {0, 1}


@needs_one_graph
@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
@torch.inference_mode()
def test_graphs_with_a_growing_cache(path):
    # A prompt of 5 gets a buffer of 5, step 1 one of 12: with numbers that is a graph. Step 2 finds
    # room: another one. Step 8 is the next to grow it, and from there on the room is a variable.
    block = on_path(tb.ModernDecoderBlock(D, H, G, D_FF), path)
    added = compiling_steps(block, (COS, SIN), tb.KVCache())
    assert {0, 1, 2} <= added
    assert max(added) <= 8
    assert len(added) <= 5


@needs_one_graph
def test_graphs_of_cached_training():
    make, others = BLOCKS["modern"]
    assert compiling_steps(make(), others, tb.KVCache()) == {0, 1, 2}  # it concatenates


# =============================================================================================
# The model and its loss
# =============================================================================================


def make_lm(**options) -> tb.DecoderOnlyLM:
    return tb.DecoderOnlyLM(31, D, 2, H, G, D_FF, max_len=MAX_LEN, **options).double()


MODELS = {
    "modern": {},
    "windows, untied": {"windows": [3, None], "tie_embeddings": False},
    "parallel": {"make_block": lambda _: tb.ParallelDecoderBlock(D, H, G, D_FF)},
    "branch norm": {"make_block": lambda _: tb.BranchNormDecoderBlock(D, H, G, D_FF)},
    "latent": {"make_block": lambda _: BLOCKS["latent"][0]()},
    "sinks": {
        "make_block": lambda _: tb.ModernDecoderBlock(
            D, attn=tb.MultiHeadAttention(D, H, G, rope=True, attend=tb.SinkAttention(H))
        )
    },
    "fused": {
        "make_block": lambda _: tb.ModernDecoderBlock(
            D, attn=tb.MultiHeadAttention(D, H, G, rope=True, attend=tb.attend_fused)
        )
    },
}


def graphs_of_steps(model, caches, steps):
    """How many graphs a prompt and these steps take, each step compared."""
    counter = CompileCounterWithBackend("eager")
    compiled, plain = torch.compile(model, backend=counter), model.new_caches()
    ids = torch.randint(0, 31, (B, 4))
    for _ in range(steps + 1):
        wanted = model(ids, kv_caches=plain, last_only=True)
        torch.testing.assert_close(compiled(ids, kv_caches=caches, last_only=True), wanted)
        ids = wanted.argmax(dim=-1)
    return counter.frame_count


@needs_one_graph
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_model_with_fixed_caches(name):
    torch._dynamo.reset()
    model = tb.DecoderOnlyLM(31, D, 2, H, G, D_FF, max_len=64, **MODELS[name]).double()
    assert graphs_of_steps(model, [tb.KVCache(64) for _ in model.blocks], 20) == 2


@needs_one_graph
@pytest.mark.parametrize("name", ["modern", "latent"])
@torch.no_grad()
def test_model_with_growing_caches(name):
    torch._dynamo.reset()
    model = tb.DecoderOnlyLM(31, D, 2, H, G, D_FF, max_len=64, **MODELS[name]).double()
    # 4 tokens, then room for 9, 19 and 39: three growths, and from the second on it is a variable.
    assert graphs_of_steps(model, model.new_caches(), 20) <= 2 + 3


IDS = torch.randint(0, 31, (B, T), generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * T]).bool()
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2])
PACKED = DOCUMENTS[:, None] == DOCUMENTS
CALLS = {
    "plain": ({}, {}),
    "fused, capped logits": ({"path": tb.attend_fused, "logit_softcap": 2.0}, {}),
    "padded": ({}, {"key_padding_mask": PADDING}),
    "windows and packed documents": ({"windows": [3, None]}, {"mask": PACKED}),
    "last position, untied": ({"tie_embeddings": False}, {"last_only": True}),
}


@pytest.mark.parametrize("case", CALLS)
def test_model_is_one_graph(case):
    options, given = CALLS[case]
    options = dict(options)
    path = options.pop("path", tb.attend)
    model, graphs = on_path(make_lm(**options), path), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    wanted, got = model(IDS, **given), compiled(IDS, **given)
    torch.testing.assert_close(got, wanted)
    assert graphs.frame_count == 1
    wanted = torch.autograd.grad(wanted.sin().sum(), list(model.parameters()))
    got = torch.autograd.grad(got.sin().sum(), list(model.parameters()))
    for gradient, want in zip(got, wanted):
        torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("path", [tb.attend, tb.attend_fused])
def test_second_length_is_a_variable(path):
    block, graphs = on_path(tb.ModernDecoderBlock(D, H, G, D_FF), path), CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    for length in (5, 7, 9, 12):
        x = torch.randn(B, length, D)
        torch.testing.assert_close(compiled(x, COS, SIN), block(x, COS, SIN))
    assert graphs.frame_count == 2


def test_exported_model():
    model, any_size = make_lm(), torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (IDS,), dynamic_shapes={"ids": {0: any_size, 1: any_size}})
    for shape in ((B, T), (B + 1, 2 * T)):
        ids = torch.randint(0, 31, shape)
        torch.testing.assert_close(program.module()(ids), model(ids))


LOSSES = {
    "all": {},
    "padded": {"key_padding_mask": PADDING},
    "answer": {"predict": DOCUMENTS.expand(B, T) > 0},
    "both": {"key_padding_mask": PADDING, "predict": DOCUMENTS.expand(B, T) > 0},
}


@pytest.mark.parametrize("case", LOSSES)
def test_loss_is_one_graph(case):
    logits = torch.randn(B, T, 31, dtype=torch.float64, requires_grad=True)
    wanted = tb.next_token_loss(logits, IDS, **LOSSES[case])
    compiled = torch.compile(tb.next_token_loss, fullgraph=True, backend="aot_eager")
    got = compiled(logits, IDS, **LOSSES[case])
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(got, [logits]), torch.autograd.grad(wanted, [logits])
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", LOSSES)
def test_loss_under_vmap_and_grad(case):
    logits = torch.randn(3, B, T, 31, dtype=torch.float64)
    ids = torch.randint(0, 31, (3, B, T))

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return tb.next_token_loss(logits, ids, **LOSSES[case])

    together = torch.func.vmap(torch.func.grad_and_value(loss))(logits, ids)
    for row in range(3):
        leaf = logits[row].clone().requires_grad_()
        alone = loss(leaf, ids[row])
        torch.testing.assert_close(together[1][row], alone.detach())
        torch.testing.assert_close(together[0][row], torch.autograd.grad(alone, [leaf])[0])


def test_per_sample_model_gradients():
    model = make_lm()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (row[None],))
        return tb.next_token_loss(logits, row[None])

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, IDS)
    for row, ids in enumerate(IDS):
        model.zero_grad()
        tb.next_token_loss(model(ids[None]), ids[None]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(per_sample[name][row], parameter.grad)
