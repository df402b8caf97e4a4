"""Experts on two gloo ranks whose tokens go to different experts, against the layer in one piece.

Each rank's loss is the sum of squares of its own rows, and the gradients are averaged: they must
be the mean of what the layer gets from both ranks' rows. An expert that is idle on one rank must
take part there with zeros, or the ranks wait for each other or add up different parameters.
"""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformer_block as tb
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

RANKS, D, STEPS = 2, 8, 2
# fully_shard records events on streams, which those of a CPU know in newer versions of torch only.
CPU_EVENTS = hasattr(torch.cpu.Stream, "record_event")


def switch() -> nn.Module:
    """Rank 0's rows, which are positive, choose expert 0; rank 1's, negative, choose expert 1."""
    layer = tb.MoEFFN(D, 6, n_experts=2)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, D) / D)
    return layer


def mixture() -> nn.Module:
    """Rank 0 chooses among the experts 0 to 2, rank 1 among 3 to 5."""
    router = tb.SoftmaxRouter(D, 6, 2)
    with torch.no_grad():
        sides = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])[:, None] * torch.ones(D)
        router.router.weight.copy_(sides + 0.1 * torch.randn(6, D))
    experts = (tb.GatedFFN(D, 6) for _ in range(6))
    return tb.MixtureFFN(router, experts, tb.DenseFFN(D, 6))


LAYERS = {"MoEFFN": switch, "MixtureFFN": mixture}


def new_layer(name: str) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return LAYERS[name]().double()


def rows(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    positive = torch.rand(5, D, generator=generator, dtype=torch.float64)
    return positive if rank == 0 else -positive


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def gradients(layer: nn.Module, rank: int) -> list[dict[str, Tensor]]:
    """Of each step, which all see the same weights."""
    seen = []
    for step in range(STEPS):
        layer.zero_grad()
        layer(rows(rank, step)).square().sum().backward()
        named = layer.named_parameters()
        seen.append({n.removeprefix("module."): whole(p.grad).clone() for n, p in named})
    return seen


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh, seen = init_device_mesh("cpu", (RANKS,)), {}
    for name in LAYERS:
        layer = new_layer(name)
        layer(rows(rank, 0))
        router = getattr(layer.router, "router", None)
        counts = (layer if router is None else layer.router).tokens_per_expert
        seen[name, "experts"] = [expert for expert, count in enumerate(counts) if count]
        seen[name, "DDP"] = gradients(DistributedDataParallel(new_layer(name)), rank)
        if CPU_EVENTS:
            seen[name, "FSDP"] = gradients(fully_shard(new_layer(name), mesh=mesh), rank)
    torch.save(seen, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads outlive the group, and can abort the interpreter's shutdown


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, (folder,), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_use_different_experts(ranks, name):
    first, second = (set(seen[name, "experts"]) for seen in ranks)
    assert first and second and not first & second


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "how",
    [
        "DDP",
        pytest.param(
            "FSDP",
            marks=pytest.mark.skipif(not CPU_EVENTS, reason="no fully_shard on a CPU before"),
        ),
    ],
)
def test_gradients_are_the_ranks_mean(ranks, name, how):
    for step in range(STEPS):
        layer = new_layer(name)
        for rank in range(RANKS):
            (layer(rows(rank, step)).square().sum() / RANKS).backward()
        used = {expert for seen in ranks for expert in seen[name, "experts"]}
        for parameter_name, parameter in layer.named_parameters():
            number = re.search(r"experts\.(\d+)", parameter_name)
            assert parameter.grad.any() == (number is None or int(number[1]) in used)
            for seen in ranks:
                torch.testing.assert_close(
                    seen[name, how][step][parameter_name], parameter.grad, atol=1e-12, rtol=0
                )
