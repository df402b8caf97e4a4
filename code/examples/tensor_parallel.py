#!/usr/bin/env python3
"""Split one ModernDecoderBlock over ranks, with nothing but torch.distributed around it.

    torchrun --standalone --nproc-per-node 2 code/examples/tensor_parallel.py

First tensor parallel: q, k, v, gate and up are split by columns, o and down by rows, so that each
rank computes its own heads and caches its own KV heads. Then fully sharded: each rank keeps a
slice of every parameter and trains on its part of the batch. Both are compared in float64 with the
same block in one piece. It runs on CPUs, over gloo.
"""

import argparse
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformer_block import KVCache, ModernDecoderBlock, build_rope_cache

D, H, G, D_FF, MAX_LEN = 64, 8, 4, 160, 32
PROMPT, STEPS, ROWS = 6, 6, 2  # a prompt, tokens decoded after it, rows of the batch for each rank
LIMIT = 1e-12  # of a difference in float64: what another order of adding up can do

# How each projection is split. The norms stay whole on every rank; with qk_norm=True the gradients
# of q_norm and k_norm would have to be summed over the ranks, which see only their own heads.
PLAN = {
    "attn.q_proj": ColwiseParallel,
    "attn.k_proj": ColwiseParallel,
    "attn.v_proj": ColwiseParallel,
    "attn.o_proj": RowwiseParallel,
    "ffn.gate": ColwiseParallel,
    "ffn.up": ColwiseParallel,
    "ffn.down": RowwiseParallel,
}


def new_block(n_kv_heads: int = G) -> ModernDecoderBlock:
    """The same block on every rank."""
    torch.manual_seed(0)
    return ModernDecoderBlock(D, H, n_kv_heads, D_FF).double()


def split_block(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A copy of the block of which this rank holds its part."""
    return parallelize_module(copy.deepcopy(block), mesh, {k: how() for k, how in PLAN.items()})


def numel_held(module: nn.Module) -> int:
    """How many parameters of the module this rank holds."""
    parameters = module.parameters()
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)


def gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def show_tensor_parallel(mesh: DeviceMesh, say: Callable[[str], None]) -> list[float]:
    """The split block against the whole one: a full pass, then a prompt and single tokens."""
    whole = new_block()
    split = split_block(whole, mesh)
    cos, sin = build_rope_cache(MAX_LEN, D // H)
    x = torch.randn(2, PROMPT + STEPS, D, dtype=torch.float64)
    pieces = x.split([PROMPT] + [1] * STEPS, dim=1)
    cache = KVCache()
    with torch.no_grad():
        expected = whole(x, cos, sin)
        full = gap(split(x, cos, sin), expected)
        decoded = torch.cat([split(piece, cos, sin, kv_cache=cache) for piece in pieces], dim=1)
    decoding = gap(decoded, expected)
    say("tensor parallel: q, k, v, gate, up by columns; o, down by rows")
    say(f"  parameters a rank holds   {numel_held(split):,} of {numel_held(whole):,}")
    say(f"  KV heads a rank caches    {cache.k.shape[1]} of {G}: k is {list(cache.k.shape)}")
    say(f"  one full pass             difference {full:.1e}")
    say(f"  a prompt and {STEPS} steps      difference {decoding:.1e}")
    return [full, decoding]


def show_too_many_ranks(mesh: DeviceMesh, say: Callable[[str], None]) -> None:
    """One KV head cannot be split: the block says so instead of computing with half a head."""
    split = split_block(new_block(n_kv_heads=1), mesh)
    try:
        split(torch.zeros(1, 1, D, dtype=torch.float64), *build_rope_cache(1, D // H))
    except ValueError as error:
        say(f"  with n_kv_heads=1         ValueError: {error}")


def show_fully_sharded(mesh: DeviceMesh, say: Callable[[str], None]) -> list[float]:
    """One step of training on a part of the batch each, against one step on all of it."""
    start, whole = new_block(), new_block()
    sharded = fully_shard(new_block(), mesh=mesh)
    held = numel_held(sharded)
    cos, sin = build_rope_cache(MAX_LEN, D // H)
    x, target = torch.randn(2, ROWS * mesh.size(), PROMPT, D, dtype=torch.float64)
    mine = slice(ROWS * mesh.get_rank(), ROWS * (mesh.get_rank() + 1))
    for block, rows in ((whole, slice(None)), (sharded, mine)):
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        (block(x[rows], cos, sin) - target[rows]).square().mean().backward()
        optimizer.step()
    parameters = {name: p.full_tensor() for name, p in sharded.named_parameters()}
    gaps = [gap(parameters[name], p) for name, p in whole.named_parameters()]
    moved = max(gap(start.get_parameter(name), p) for name, p in whole.named_parameters())
    say("fully sharded: a slice of every parameter, a part of the batch")
    say(f"  parameters a rank holds   {held:,} of {numel_held(whole):,}")
    say(f"  after one step of SGD     difference {max(gaps):.1e}, of a step of {moved:.1e}")
    return gaps


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        script = os.path.relpath(__file__)
        print(f"start it with torchrun --standalone --nproc-per-node 2 {script}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    ranks = mesh.size()
    say = print if mesh.get_rank() == 0 else lambda _line: None
    try:
        if G % ranks:
            say(f"{G} KV heads cannot be split over {ranks} ranks")
            return 2
        say(f"ModernDecoderBlock({D}, {H}, {G}, {D_FF}) over {ranks} ranks")
        gaps = show_tensor_parallel(mesh, say)
        if ranks > 1:
            show_too_many_ranks(mesh, say)
        if hasattr(torch.cpu.Stream, "record_event"):  # which fully_shard calls
            gaps += show_fully_sharded(mesh, say)
        else:
            say(f"fully sharded: torch {torch.__version__} cannot do it on a CPU")
        same = max(gaps) < LIMIT
        say("equal to the block in one piece" if same else f"FAIL: a difference over {LIMIT}")
        return 0 if same else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    # torch keeps gloo's threads past destroy_process_group. One that still has a tensor to release
    # while the interpreter shuts down aborts the process, so that shutdown is left out.
    sys.stdout.flush()
    os._exit(status)
