"""A ModernBlock that somebody wrote, where DecoderOnlyLM expects ModernDecoderBlocks.

smollm2.py --block FILE runs a trained model through it; whose weights go where is found by the
judge of practice.py, whatever they are called.
"""

import ast
import contextlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoints import CheckpointError
from transformer_block import DecoderOnlyLM, KVCache

import practice

SIZES = ("d_model", "n_q_heads", "n_kv_heads", "d_ff")


class BlockError(CheckpointError):
    """A file has no block that could be run; the message begins with what is wrong."""


class OwnBlock(nn.Module):
    """A block that is called as block(x, cache), in the place of a ModernDecoderBlock.

    What it returns as cache is kept with the KVCache of its layer, which counts the positions.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, kv_cache: KVCache | None = None, **_tables: object) -> Tensor:
        own = None if kv_cache is None or kv_cache.next_pos == 0 else kv_cache.own
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is not the model's answer
            try:
                y, own = self.block(x, own)
            except Exception as error:
                message = f"ModernBlock raised {type(error).__name__}: {error}"
                raise BlockError(message) from error
        if kv_cache is not None:
            kv_cache.own = own
            kv_cache.append(*[x.new_zeros(len(x), 1, x.shape[1], 1)] * 2)
        return y


class Constants(ast.NodeTransformer):
    """Puts other values in the place of numbers, however they are written: 10000, 1e4, 10**4."""

    PARTS = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)

    def __init__(self, values: dict[float, float]):
        self.values = values
        self.found: set[float] = set()

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and all(isinstance(n, self.PARTS) for n in ast.walk(node)):
            with contextlib.suppress(Exception):  # an expression of constants that is no number
                value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
                if type(value) in (int, float) and value in self.values:
                    self.found.add(value)
                    new = self.values[value]
                    new = int(new) if type(value) is int and new == int(new) else new
                    return ast.copy_location(ast.Constant(new), node)
        return self.generic_visit(node)


def put_in(
    model: DecoderOnlyLM,
    path: str | Path,
    sizes: tuple[int, int, int, int],
    base: float,
    eps: float,
) -> str:
    """Replace the model's blocks by the ModernBlock in a file; returns the judge's verdict.

    sizes are d_model, n_q_heads, n_kv_heads and d_ff. An exercise fixes the rotation's base and the
    norms' eps, a trained model has its own: the file is run with these numbers in the place of
    10000 and 1e-6. A block that is right is compared with the one that it replaces, on the weights
    of the last layer; BlockError where it cannot be run, or is right and gives something else.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BlockError(f"{path} cannot be read: {error}") from None
    with contextlib.redirect_stdout(sys.stderr):
        verdict, reader = practice.read_block(text, str(path))
        report = verdict.text()
        if reader is None:
            raise BlockError(f"no ModernBlock to run in {path.name}\n{report}")
        constants = Constants({10000: base, 1e-6: eps})
        with_values = ast.unparse(ast.fix_missing_locations(constants.visit(ast.parse(text))))
        try:
            with practice.undisturbed():  # float64, in which a layout is told from another
                reader.layout(dict(zip(SIZES, sizes)))
            cls = practice.execute(with_values, str(path))["ModernBlock"]
            blocks = [OwnBlock(filled(cls, reader, sizes, block)) for block in model.blocks]
            if verdict.right:
                compare(blocks[-1].block, model.blocks[-1], model, constants)
        except BlockError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise BlockError(f"{path.name}: {kind} at the model's sizes: {error}") from error
    model.blocks = nn.ModuleList(blocks)
    return report if verdict.right else report + "\n  the model runs through it all the same"


def filled(cls: type, reader: object, sizes: tuple[int, ...], block: nn.Module) -> nn.Module:
    """A block of theirs with the weights of one of ours."""
    own = cls(*sizes)
    names = {"norm1.weight": "norm1", "norm2.weight": "norm2"}
    weights = {names.get(name, name): p.detach() for name, p in block.named_parameters()}
    reader.fill(own, dict(zip(SIZES, sizes)), weights)
    return own.requires_grad_(False).eval()


@torch.no_grad()
def compare(own: nn.Module, ours: nn.Module, model: DecoderOnlyLM, constants: Constants) -> None:
    """Refuse a right block that does not do what the model's does, with its base and eps."""
    T = 64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, T, model.embedding.weight.shape[1], generator=generator)
    cos, sin = (table[:T] for table in model._rope_tables)
    gap, size = (own(x)[0] - ours(x, cos, sin)).abs().max(), ours(x, cos, sin).abs().max()
    if gap <= 1e-3 * size:
        return
    missing = [f"{name} {value:g}" for name, value in (("base", 10000), ("eps", 1e-6))
               if value not in constants.found]  # fmt: skip
    why = f"no {' and no '.join(missing)} stands in its text to be replaced" if missing else (
        "10000 or 1e-6 stands for something else in its text")  # fmt: skip
    raise BlockError(f"a right block, which could not be given the model's base and eps: {why}")
