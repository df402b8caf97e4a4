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
from transformer_block import DecoderOnlyLM, KVCache, build_rope_cache

from judge.answers import execute
from judge.judging import read_block
from judge.state import neutral

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


class OwnFile:
    """A file with a ModernBlock, judged: verdict is what practice.py says of it.

    It imports what lies beside it, as a program does. BlockError where the file has no block, or
    its parameters could not be read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BlockError(f"{path} cannot be read: {error}") from None
        sys.path.insert(0, str(self.path.resolve().parent))
        with contextlib.redirect_stdout(sys.stderr):
            self.verdict, self.reader = read_block(self.text, str(path))
        if self.reader is None:
            raise BlockError(f"no ModernBlock to run in {self.path.name}\n{self.verdict.text()}")

    def put_in(self, model: DecoderOnlyLM, sizes: tuple[int, ...], base: float, eps: float) -> None:
        """Replace the model's blocks, of sizes (d_model, n_q_heads, n_kv_heads, d_ff), by theirs.

        The exercise fixes the rotation's base and the norms' eps, a trained model has its own: the
        file is run with these numbers in the place of 10000 and 1e-6. A block that is right is
        compared with the one that it replaces, on the weights of the last layer; BlockError where
        it does something else, or cannot be built.
        """
        constants = Constants({10000: base, 1e-6: eps})
        tree = ast.fix_missing_locations(constants.visit(ast.parse(self.text)))
        with contextlib.redirect_stdout(sys.stderr):
            try:
                with neutral():  # float64, in which a layout is told from another
                    self.reader.layout(dict(zip(SIZES, sizes)))
                cls = execute(ast.unparse(tree), str(self.path))["ModernBlock"]
                blocks = [OwnBlock(filled(cls, self.reader, sizes, ours)) for ours in model.blocks]
                same = not self.verdict.right or agree(
                    blocks[-1].block, model.blocks[-1], sizes, base
                )
            except Exception as error:
                what = f"{type(error).__name__} at the model's sizes: {error}"
                raise BlockError(f"{self.path.name}: {what}") from error
        if not same:
            numbers = {"base 10000": 10000, "eps 1e-6": 1e-6}
            missing = [name for name, value in numbers.items() if value not in constants.found]
            why = "10000 or 1e-6 stands for something else too"
            if missing:
                why = f"no {' and no '.join(missing)} stands in its text"
            given = f"base {base:g} and eps {eps:g}"
            raise BlockError(f"{self.path.name} is right, and cannot be given {given}: {why}")
        model.blocks = nn.ModuleList(blocks)


def filled(cls: type, reader: object, sizes: tuple[int, ...], block: nn.Module) -> nn.Module:
    """A block of theirs with the weights of one of ours."""
    own = cls(*sizes)
    names = {"norm1.weight": "norm1", "norm2.weight": "norm2"}
    weights = {names.get(name, name): p.detach() for name, p in block.named_parameters()}
    reader.fill(own, dict(zip(SIZES, sizes)), weights)
    return own.requires_grad_(False).eval()


@torch.no_grad()
def agree(own: nn.Module, ours: nn.Module, sizes: tuple[int, ...], base: float) -> bool:
    """Whether two blocks give the same for 64 drawn tokens."""
    d_model, n_q_heads = sizes[:2]
    x = torch.randn(1, 64, d_model, generator=torch.Generator().manual_seed(0))
    wanted = ours(x, *build_rope_cache(64, d_model // n_q_heads, base))
    return bool((own(x)[0] - wanted).abs().max() <= 1e-3 * wanted.abs().max())
