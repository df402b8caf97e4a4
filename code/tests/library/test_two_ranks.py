"""ModernDecoderBlock on two gloo ranks, compared in float64 with the same block in one piece.

Two processes are started once; each writes down what it saw, and the tests read that.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformer_block as tb
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "code" / "examples" / "tensor_parallel.py"
RANKS = 2
D, H, G, D_H, D_FF = 48, 8, 4, 6, 40
B, PIECES = 2, [5, 1, 3, 1]  # a prompt, then a token, a chunk, a token
COLUMNS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "ffn.gate", "ffn.up")
ROWS = ("attn.o_proj", "ffn.down")
PATHS = {"explicit": tb.attend, "fused": tb.attend_fused}
# fully_shard records events on streams, which those of a CPU know in newer versions of torch only.
CPU_EVENTS = hasattr(torch.cpu.Stream, "record_event")


def new_block(path=tb.attend, n_kv_heads: int = G) -> tb.ModernDecoderBlock:
    """The same weights on every rank, norms included, which start as ones."""
    torch.manual_seed(0)
    attn = tb.MultiHeadAttention(D, H, n_kv_heads, rope=True, qk_norm=True, attend=path)
    block = tb.ModernDecoderBlock(D, H, n_kv_heads, D_FF, attn=attn).double()
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return block


def split_block(block: nn.Module, mesh) -> nn.Module:
    plan = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    return parallelize_module(copy.deepcopy(block), mesh, plan)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(B, sum(PIECES), D, dtype=torch.float64)
    return x, *tb.build_rope_cache(sum(PIECES), D_H)


def gathered(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def tensor_parallel(mesh, path) -> dict:
    x, cos, sin = inputs()
    block = split_block(new_block(path), mesh)
    out = block(x, cos, sin)
    out.square().mean().backward()
    cache = tb.KVCache()
    with torch.no_grad():
        pieces = x.split(PIECES, dim=1)
        decoded = torch.cat([block(piece, cos, sin, kv_cache=cache) for piece in pieces], dim=1)
    gradients = {name: gathered(p.grad) for name, p in block.named_parameters()}
    result = {"out": out.detach(), "decoded": decoded, "gradients": gradients}
    return result | {"k": cache.k.clone(), "v": cache.v.clone()}


def too_many_ranks(mesh) -> str:
    x, cos, sin = inputs()
    cache = tb.KVCache()
    try:
        split_block(new_block(n_kv_heads=1), mesh)(x, cos, sin, kv_cache=cache)
    except ValueError as error:
        return f"{error} [{cache.next_pos} cached]"
    return "no error"


def fully_sharded(mesh) -> dict[str, Tensor]:
    """Parameters after a step on this rank's row of the batch; fully_shard averages gradients."""
    x, cos, sin = inputs()
    block = fully_shard(new_block(), mesh=mesh)
    train_one_step(block, x[mesh.get_rank()][None], cos, sin)
    return {name: gathered(p).detach() for name, p in block.named_parameters()}


def new_lm(latent: bool) -> tb.DecoderOnlyLM:
    """The same weights on every rank; the head is tied."""
    torch.manual_seed(2)

    def make_block(_layer: int) -> nn.Module:
        sizes = {"kv_rank": 5, "rope_dim": 4, "nope_dim": 3, "v_dim": 2}
        attn = tb.MultiHeadLatentAttention(D, H, **sizes) if latent else None
        return tb.ModernDecoderBlock(D, H, G, D_FF, attn=attn)

    lm = tb.DecoderOnlyLM(11, D, 1, H, G, D_FF, max_len=16, make_block=make_block).double()
    for parameter in lm.parameters():
        nn.init.normal_(parameter, std=0.5)
    return lm


SHARDED = {"embedding": (False, ["embedding"]), "embedding and kv_up": (True, ["kv_up"])}
IDS = torch.tensor([[1, 5, 10, 3, 0, 7, 7], [2, 9, 4, 4, 8, 6, 1]])


def fully_sharded_parts(mesh, case: str) -> dict:
    """Only the named parts are sharded: whatever reads a weight around their call sees a piece."""
    latent, parts = SHARDED[case]
    lm = new_lm(latent)
    for name, part in list(lm.named_modules()):
        if name.rpartition(".")[2] in ("embedding", *parts):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
    caches = lm.new_caches()
    with torch.no_grad():
        decoded = torch.cat([lm(ids, kv_caches=caches) for ids in IDS.split((4, 1, 2), 1)], dim=1)
    loss = lm(IDS[mesh.get_rank()][None]).square().mean()
    loss.backward()
    gradients = {
        name: p.grad.full_tensor() for name, p in lm.named_parameters() if isinstance(p, DTensor)
    }
    return {"decoded": decoded, "gradients": gradients}


def train_one_step(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    block(x, cos, sin).square().mean().backward()
    optimizer.step()


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    seen = {name: tensor_parallel(mesh, path) for name, path in PATHS.items()}
    seen["too many ranks"] = too_many_ranks(mesh)
    if CPU_EVENTS:
        seen["fully sharded"] = fully_sharded(mesh)
        seen["parts"] = {case: fully_sharded_parts(mesh, case) for case in SHARDED}
    torch.save(seen, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive the group, and can abort the interpreter's shutdown


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (folder,), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_split_block_gives_the_same(ranks, path):
    x, cos, sin = inputs()
    expected = new_block()(x, cos, sin).detach()
    for seen in ranks:
        assert_same(seen[path]["out"], expected)
        assert_same(seen[path]["decoded"], expected)


@pytest.mark.parametrize("path", PATHS)
def test_rank_caches_its_kv_heads(ranks, path):
    x, cos, sin = inputs()
    whole = tb.KVCache()
    new_block()(x, cos, sin, kv_cache=whole)
    for name, expected in (("k", whole.k), ("v", whole.v)):
        halves = [seen[path][name] for seen in ranks]
        assert [half.shape for half in halves] == [(B, G // RANKS, sum(PIECES), D_H)] * RANKS
        assert_same(torch.cat(halves, dim=1), expected.detach())


@pytest.mark.parametrize("path", PATHS)
def test_split_gradients_are_the_same(ranks, path):
    x, cos, sin = inputs()
    block = new_block()
    block(x, cos, sin).square().mean().backward()
    for name, parameter in block.named_parameters():
        if name in {"attn.q_norm.weight", "attn.k_norm.weight"}:  # each rank norms its own heads
            assert_same(sum(seen[path]["gradients"][name] for seen in ranks), parameter.grad)
        else:
            for seen in ranks:
                assert_same(seen[path]["gradients"][name], parameter.grad)


def test_more_ranks_than_kv_heads(ranks):
    for seen in ranks:
        message = seen["too many ranks"]
        assert "n_kv_heads" in message
        assert "ranks" in message
        assert message.endswith("[0 cached]")


@pytest.mark.skipif(not CPU_EVENTS, reason="this torch cannot fully_shard on a CPU")
def test_fully_sharded_step(ranks):
    start, block = new_block(), new_block()
    train_one_step(block, *inputs())
    for name, parameter in block.named_parameters():
        assert not torch.equal(parameter, start.get_parameter(name))
        for seen in ranks:
            torch.testing.assert_close(
                seen["fully sharded"][name], parameter.detach(), atol=1e-9, rtol=0
            )


@pytest.mark.skipif(not CPU_EVENTS, reason="this torch cannot fully_shard on a CPU")
@pytest.mark.parametrize("case", SHARDED)
def test_single_parts_sharded(ranks, case):
    lm = new_lm(SHARDED[case][0])
    wanted = lm(IDS).detach()
    sum(lm(row[None]).square().mean() / RANKS for row in IDS).backward()
    for seen in ranks:
        torch.testing.assert_close(seen["parts"][case]["decoded"], wanted, atol=1e-10, rtol=0)
        assert len(seen["parts"][case]["gradients"]) == len(case.split(" and "))
        for name, gradient in seen["parts"][case]["gradients"].items():
            wanted_gradient = lm.get_parameter(name).grad
            torch.testing.assert_close(gradient, wanted_gradient, atol=1e-10, rtol=0)


def run_example(*command: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    environment.pop("RANK", None)
    options = {"capture_output": True, "text": True, "env": environment, **options}
    return subprocess.run([sys.executable, *command], check=False, **options)


def test_example_under_torchrun():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    run = run_example(*torchrun, str(EXAMPLE))
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].endswith("over 2 ranks")
    assert any("KV heads" in line and "2 of 4" in line for line in lines)
    assert any("ValueError" in line and "n_kv_heads=1" in line for line in lines)
    assert lines[-1] == "equal to the block in one piece"


@pytest.mark.parametrize(("options", "status"), [(["--help"], 0), ([], 2)])
def test_example_says_its_command(options, status):
    run = run_example(str(EXAMPLE.relative_to(ROOT)), *options, cwd=ROOT)
    assert run.returncode == status
    line = "torchrun --standalone --nproc-per-node 2 code/examples/tensor_parallel.py"
    assert line in (run.stderr if status else run.stdout)
    assert "Traceback" not in run.stderr
    assert run.stderr.count("\n") == (1 if status else 0)
