"""The blocks under torch.compile, torch.export and torch.func, without changes to the script.

Without a cache every dense block is one graph, forward and backward. With a cache the lengths of a
growing buffer decide which decoding steps are compiled anew: the tests at the end pin that down.
"""

import copy
import shutil

import pytest
import torch
import transformer_block as tb
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

D, H, G, D_FF, MAX_LEN = 32, 4, 2, 48, 128
B, T, S = 2, 7, 5
# Which of 64 decoding steps may compile where nothing but the length changes. The first sees it as
# a number, the second as a variable; torch 2.6 takes every length as a number, up to its limit of
# eight graphs, and runs the steps after that without compiling.
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
FIRST_STEPS = {1, 2} if TORCH >= (2, 13) else set(range(1, 8))
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


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two gain nothing at these sizes, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
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
def test_each_block_is_one_graph_forward_and_backward(name, path):
    make, others = BLOCKS[name]
    block, x = on_path(make(), path).double(), torch.randn(B, T, D, dtype=torch.float64)
    others = tuple(other.double() for other in others)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = output_and_gradients(block, compiled, x, others)
    for got, expected in zip(results, output_and_gradients(block, block, x, others)):
        torch.testing.assert_close(got, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
def test_the_default_backend_compiles_a_block():
    block, x = tb.ModernDecoderBlock(D, H, G, D_FF), torch.randn(B, T, D)
    compiled = torch.compile(block, fullgraph=True)
    results = output_and_gradients(block, compiled, x, (COS, SIN))
    for got, expected in zip(results, output_and_gradients(block, block, x, (COS, SIN))):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["modern", "latent"])
def test_an_exported_block_takes_other_batches_and_lengths(name):
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
def test_per_sample_gradients_are_those_of_a_loop(name, path):
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


def compiling_steps(cache: tb.KVCache, prompt: int = 5, steps: int = 64) -> set[int]:
    """Which steps of decoding made torch.compile add a graph; the prompt comes before step 1."""
    counter = CompileCounter()
    block = tb.ModernDecoderBlock(D, H, G, D_FF)
    compiled = torch.compile(block, backend=counter)
    plain, added, graphs = copy.deepcopy(cache), set(), 0
    for step, length in enumerate((prompt, *[1] * steps)):
        x = torch.randn(B, length, D)
        out = compiled(x, COS, SIN, kv_cache=cache)
        torch.testing.assert_close(out, block(x, COS, SIN, kv_cache=plain))
        if counter.frame_count > graphs:
            added.add(step)
        graphs = counter.frame_count
    return added - {0}


@torch.no_grad()
def test_with_a_cache_of_fixed_size_only_the_first_steps_of_64_compile():
    assert compiling_steps(tb.KVCache(MAX_LEN)) <= FIRST_STEPS


@torch.no_grad()
def test_with_a_growing_cache_the_last_new_graph_of_64_steps_is_that_of_the_second_growth():
    # A prompt of 5 gets a buffer of 5. Step 1 makes it longer, and so does a step soon after: each
    # takes another way than the steps that find room, first with numbers, then with variables.
    steps = compiling_steps(tb.KVCache())
    assert 1 in steps
    assert max(steps) <= 8


@torch.no_grad()
def test_a_block_with_a_cache_is_one_graph_from_torch_2_14_on_and_refused_before():
    block, cache, x = tb.ModernDecoderBlock(D, H, G, D_FF), tb.KVCache(), torch.randn(B, T, D)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    if TORCH >= (2, 14):  # the first to enter the `with` block of a class like KVCache
        torch.testing.assert_close(compiled(x, COS, SIN, kv_cache=cache), block(x, COS, SIN))
        assert cache.next_pos == T
    else:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(x, COS, SIN, kv_cache=cache)
        assert cache.next_pos == 0


def test_training_through_a_cache_only_the_first_steps_of_64_compile():
    assert compiling_steps(tb.KVCache()) <= FIRST_STEPS  # it concatenates, whatever the length
