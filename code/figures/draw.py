"""Draws the figures of the notes from the library itself: what a forward does, what a table holds.

    python3 code/figures/draw.py               writes all SVG files beside this file
    python3 code/figures/draw.py masks rope    only those
    python3 code/figures/draw.py --out DIR     somewhere else

A figure is 390 pt wide, so that its smallest letters can be read on a phone, and lies on an opaque
card, so that one file serves light and dark pages. Wirings come from traced forwards, shapes from
hooks, masks from what attend lets through, counts from modules and caches.
"""

import argparse
import functools
import inspect
import io
import itertools
import math
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import recipes
import transformer_block as tb

WIDTH = 390
INK, GREY, PALE, CARD = "#1f2328", "#59636e", "#d1d9e0", "#fbfaf7"
BLUE, ORANGE, GREEN, PURPLE = "#2f6fb7", "#c9660a", "#3a8a3f", "#7d54b8"
IDLE = "#f3c594"
TINTS = {BLUE: "#d6e5f7", ORANGE: "#fbe2c6", GREEN: "#d5ecd6", PURPLE: "#e6dcf5", PALE: "#ffffff"}
COLORS = {
    tb.RMSNorm: GREEN,
    nn.LayerNorm: GREEN,
    tb.MultiHeadAttention: BLUE,
    tb.DenseFFN: ORANGE,
    tb.GatedFFN: ORANGE,
}
STYLE = {
    "svg.fonttype": "path",  # the letters do not depend on what fonts a reader has
    "svg.hashsalt": "transformer blocks",  # the same ids in every run
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}

# =============================================================================================
# The card everything is drawn on
# =============================================================================================

Point = tuple[float, float]


@dataclass
class Step:
    """A box of a drawing; without a color it is bare text, and with a + an addition."""

    x: float
    y: float
    text: str
    color: str | None = None
    width: float = 14
    height: float = 16


class Card:
    """An opaque card of WIDTH x height points; x runs to the right, y downwards."""

    def __init__(self, height: float, title: str = ""):
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")
        self.ax = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
        self.ax.axis("off")
        self.box(Step(WIDTH / 2, height / 2, "", PALE, WIDTH - 4, height - 4), CARD)
        self.title(WIDTH / 2, title)

    def text(self, x: float, y: float, text: str, **options: object) -> None:
        va = "center" if "\n" in text else "center_baseline"
        options = {"ha": "center", "va": va, "linespacing": 1.15, "zorder": 4, **options}
        self.ax.text(x, y, text, **options)

    def title(self, x: float, text: str, y: float = 20) -> None:
        self.text(x, y, text, fontsize=10.5, fontweight="bold")

    def outline(self, points: list[Point], **options: object) -> None:
        self.ax.add_patch(PathPatch(Outline(points), clip_on=False, **options))

    def box(self, step: Step, fill: str | None = None, size: float = 10) -> None:
        left, top = step.x - step.width / 2, step.y - step.height / 2
        self.ax.add_patch(
            FancyBboxPatch((left, top), step.width, step.height, ec=step.color, clip_on=False,
                           fc=fill or TINTS[step.color], lw=1.2, zorder=0 if fill else 3,
                           boxstyle="round,pad=0,rounding_size=4")
        )  # fmt: skip
        self.text(step.x, step.y, step.text, fontsize=size)

    def disc(self, x: float, y: float, text: str, color: str = INK) -> None:
        fill = TINTS.get(color, CARD)
        self.ax.plot(x, y, "o", ms=14, mfc=fill, mec=color, mew=1.2, clip_on=False, zorder=3)
        self.text(x, y, text)

    def step(self, step: Step, size: float = 10) -> None:
        """A box, an addition or bare text."""
        if step.color:
            self.box(step, size=size)
        elif step.text == "+":
            self.disc(step.x, step.y, "+")
        else:
            self.text(step.x, step.y, step.text, fontsize=11)

    def wire(self, *points: Point, stream: bool = False, head: bool = True) -> None:
        """A line through the points with a head at its end; the residual stream is strong."""
        color, width = (INK, 1.8) if stream else (GREY, 1.2)
        self.outline(points, fc="none", ec=color, lw=width, zorder=1)
        if head:
            (x0, y0), (x, y) = points[-2:]
            u, v = (5 * side / math.hypot(x - x0, y - y0) for side in (x - x0, y - y0))
            corners = [(x, y), (x - u - v / 2, y - v + u / 2), (x - u + v / 2, y - v - u / 2)]
            self.outline(corners, fc=color, ec="none", zorder=2)

    def arrow(self, start: Step, end: Step, stream: bool = False) -> None:
        """From a box down to one below it, or from the side into an addition or a box beside it."""
        bottom, top = start.y + start.height / 2, end.y - end.height / 2
        narrow, wide = sorted((start, end), key=operator.attrgetter("width"))
        if start.y == end.y:
            self.wire((start.x - start.width / 2, start.y), (end.x + end.width / 2, end.y))
        elif end.text == "+" and start.x != end.x:
            self.wire((start.x, bottom), (start.x, end.y), (end.x + end.width / 2, end.y))
        elif abs(narrow.x - wide.x) < wide.width / 2:
            self.wire((narrow.x, bottom), (narrow.x, top), stream=stream)
        else:
            self.wire((start.x, bottom), (start.x, top - 6), (end.x, top - 6), (end.x, top))

    def flow(self, steps: dict[str, Step], arrows: str, size: float = 10) -> None:
        """Boxes by name, and arrows written as "a b, b c"."""
        for pair in arrows.split(","):
            start, end = (steps[name] for name in pair.split())
            self.arrow(start, end, stream=not start.color and not end.color)
        for step in steps.values():
            self.step(step, size)

    def cells(self, x: float, y: float, width: float, height: float, levels: Tensor,
              colors: list[str], gap: float = 0.5) -> None:  # fmt: skip
        """A matrix of integer levels, one path a level; without a gap, equal neighbours join."""
        corners: dict[int, list[Point]] = {level: [] for level in range(len(colors))}
        for row, line in enumerate(levels.tolist()):
            top, bottom = y + row * height + gap, y + (row + 1) * height - gap
            runs = itertools.groupby(range(len(line)), None if gap else line.__getitem__)
            for columns in (list(run) for _, run in runs):
                left, right = x + columns[0] * width + gap, x + (columns[-1] + 1) * width - gap
                ring = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
                corners[line[columns[0]]] += ring
        for level, points in corners.items():
            codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * (len(points) // 5)
            if points:
                path = Outline(points, codes)
                self.ax.add_patch(PathPatch(path, fc=colors[level], ec="none", clip_on=False))

    def chart(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes for data at a place of the card."""
        scale = (WIDTH, self.height, WIDTH, self.height)
        place = (left, self.height - top - height, width, height)
        place = [side / whole for side, whole in zip(place, scale)]
        return self.figure.add_axes(place, facecolor="none")


# =============================================================================================
# Reading the library
# =============================================================================================


@dataclass(eq=False)
class Node:
    """A step of a block's forward: an input, a submodule that was called, or an addition."""

    label: str
    part: nn.Module | None
    reads: list["Node"]
    out: Tensor
    row: int = 0
    column: int = -1  # 0 is the stream, 1 and more are branches beside it


class Wiring(TorchFunctionMode):
    """The graph of one real forward: what each submodule read, and what was added to what."""

    def __init__(self, block: nn.Module, call: Callable, **inputs: Tensor):
        super().__init__()
        self._made: dict[int, Node] = {}  # by the id of what it made, which it keeps alive
        self._inside = 0
        for name, tensor in inputs.items():
            self._made[id(tensor)] = Node(name, None, [], tensor)
        hooks = []
        for name, part in block.named_children():
            hooks.append(part.register_forward_pre_hook(self._enter))
            hooks.append(part.register_forward_hook(partial(self._leave, name), with_kwargs=True))
        with torch.no_grad(), self:
            self.last = self._made[id(call(*inputs.values()))]
        for hook in hooks:
            hook.remove()
        self.nodes = list(self._made.values())
        self._join_additions()
        self._place()

    def _record(self, label: str, part: nn.Module | None, read: list, out: Tensor) -> None:
        reads = [self._made[id(tensor)] for tensor in read if id(tensor) in self._made]
        if reads:
            self._made[id(out)] = Node(label, part, reads, out)

    def _enter(self, *_: object) -> None:
        self._inside += 1

    def _leave(self, name: str, part: nn.Module, args: tuple, kwargs: dict, out: object) -> None:
        self._inside -= 1
        out = out[0] if isinstance(out, tuple) else out
        self._record(name, part, [*args, *kwargs.values()], out)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._inside and getattr(func, "__name__", "") == "add":
            self._record("+", None, list(args), out)
        return out

    def _join_additions(self) -> None:
        """x + a + b is one addition of three."""
        for outer in self.nodes[:]:
            for inner in outer.reads:
                alone = sum(inner in node.reads for node in self.nodes) == 1
                if outer.label == inner.label == "+" and alone:
                    outer.reads = inner.reads + [read for read in outer.reads if read is not inner]
                    self.nodes.remove(inner)

    def _place(self) -> None:
        """Rows by the longest way from an input; the stream is what all additions add to."""
        for node in self.nodes:
            node.row = max((read.row + 1 for read in node.reads), default=0)
        node = self.last
        while node:
            node.column = 0
            node = min(node.reads, key=operator.attrgetter("row"), default=None)
        for addition in (node for node in self.nodes if node.label == "+"):
            branches = [read for read in addition.reads if read.column == -1]
            for column, branch in enumerate(branches, 1):
                node = branch
                while node.column == -1:
                    node.column, node = column, node.reads[0]
        for node in self.nodes:
            for read in node.reads:
                if read.column == -1:  # a second input stands beside what reads it
                    read.column, read.row = node.column + 1, node.row

    def draw(self, card: Card, xs: list[float], top: float, pitch: float, width: float,
             height: float, label: Callable[[Node], str]) -> None:  # fmt: skip
        """Downwards: the stream at xs[0], branches at xs[1], xs[2], a row every pitch points."""
        steps = {}
        for node in self.nodes:
            x, y = xs[node.column], top + node.row * pitch
            bare = Step(x, y, node.label, None, max(14, 8 * len(node.label)))
            part = node.part and Step(x, y, label(node), COLORS[type(node.part)], width, height)
            steps[node] = part or bare
        for node in self.nodes:
            for read in node.reads:
                card.arrow(steps[read], steps[node], stream=node.column == read.column == 0)
        end = Step(steps[self.last].x, steps[self.last].y + 32, "y")
        card.arrow(steps[self.last], end, stream=True)
        for step in (*steps.values(), end):
            card.step(step)


def traced(block: nn.Module, d_model: int = 96, head_dim: int = 12, **more: Tensor) -> Wiring:
    """The wiring of a block on x [3, 7, d]; a block that rotates gets its tables."""
    rotates = "cos" in inspect.signature(block.forward).parameters
    tables = dict(zip(("cos", "sin"), tb.build_rope_cache(7, head_dim))) if rotates else {}
    return Wiring(block, partial(block, **tables), x=torch.randn(3, 7, d_model), **more)


built = functools.cache(recipes.built)  # several figures ask for the same models


def spell(shape: tuple[int, ...], names: dict[int, str]) -> str:
    """A shape in the letters of its sizes."""
    return f"[{','.join(names.get(size, '?') for size in shape)}]"


# =============================================================================================
# Figures: one function each, named as its file
# =============================================================================================


def topologies() -> Card:
    """The four topologies, each traced from its class."""
    columns = {
        "Post-LN": (tb.VanillaEncoderLayer2017(), (24, 69), 42),
        "Pre-LN": (tb.ModernDecoderBlock(), (13, 58), 60),
        "Parallel": (tb.ParallelDecoderBlock(), (12, 40, 76), 33),
        "Pre and post": (tb.BranchNormDecoderBlock(), (13, 58), 60),
    }

    def short(node: Node) -> str:
        return node.label.removeprefix("attn_").removeprefix("ffn_")

    card = Card(352)
    for number, (title, (block, xs, width)) in enumerate(columns.items()):
        left = 7 + number * 94
        card.title(left + 46, title)
        traced(block).draw(card, [left + x for x in xs], 44, 32, width, 20, short)
    return card


def layers_2017() -> Card:
    """The encoder layer and the decoder layer of 2017."""
    card, label = Card(428), operator.attrgetter("label")
    card.title(90, "Encoder layer")
    card.title(260, "Decoder layer")
    traced(tb.VanillaEncoderLayer2017()).draw(card, [45, 124], 46, 34, 70, 22, label)
    decoder = traced(tb.VanillaSeq2SeqDecoderLayer2017(), memory=torch.randn(3, 5, 96))
    decoder.draw(card, [200, 279, 356], 46, 34, 70, 22, label)
    return card


def describe(node: Node) -> str:
    """What a part is, read off the module."""
    part, d_model = node.part, node.out.shape[-1]
    if isinstance(part, tb.MultiHeadAttention):
        H, G = (proj.out_features // part.head_dim for proj in (part.q_proj, part.k_proj))
        heads = f"MHA, {H} heads" if H == G else f"GQA, {H} heads on {G}"
        lines = [heads, "RoPE on q and k" if part.rope else "no rotation"]
    elif isinstance(part, (tb.DenseFFN, tb.GatedFFN)):
        gate = " gate" if isinstance(part, tb.GatedFFN) else ""
        matrices = sum(weight.dim() == 2 for weight in part.parameters())
        size = f"h = {part.up.out_features / d_model:g} d"
        act = getattr(part.act, "func", part.act).__name__
        lines = [f"{act}{gate}, {size}", f"{matrices} matrices"]
    else:
        return type(part).__name__
    biased = any("bias" in name for name, _ in part.named_parameters())
    return "\n".join([*lines, "biases" if biased else "no biases"])


def gpt2_llama() -> Card:
    """GPT-2 XL and Llama-3 8B: the same wiring of other parts."""
    card = Card(462)
    for left, name in ((4, "GPT-2 XL"), (196, "Llama-3 8B")):
        sizes = recipes.RECIPES[name].sizes
        with torch.device("meta"):
            wiring = traced(built(name).blocks[0], sizes.d_model, sizes.head_dim)
        card.title(left + 96, f"{name}, d = {sizes.d_model:,}")
        wiring.draw(card, [left + 20, left + 114], 44, 60, 140, 46, describe)
    return card


def modern_block() -> Card:
    """The modern block with the shape of every tensor, from hooks on a real forward."""
    names = {3: "B", 7: "T", 11: "S", 96: "d", 8: "H", 2: "G", 10: "d_h", 256: "h"}
    names |= {80: "H·d_h", 20: "G·d_h"}
    shapes: dict[str, str] = {}

    def note(name: str, *shape: int) -> None:
        shapes[name] = spell(shape, names)

    def hook(name: str, part: nn.Module, args: tuple, out: Tensor) -> None:
        note(f"{name} in", *args[0].shape)
        note(name, *out.shape)

    attend = Mock(wraps=tb.attend)
    attn = tb.MultiHeadAttention(96, 8, 2, head_dim=10, rope=True, attend=attend)
    block = tb.ModernDecoderBlock(96, 8, 2, 256, attn=attn)
    for name, part in block.named_modules():
        if isinstance(part, (nn.Linear, tb.RMSNorm)):
            part.register_forward_hook(partial(hook, name))
    cache, (cos, sin) = tb.KVCache(), tb.build_rope_cache(11, 10)
    with torch.no_grad(), patch.object(cache, "append", wraps=cache.append) as append:
        for length in (4, 7):
            block(torch.randn(3, length, 96), cos, sin, kv_cache=cache)
    q, k, v = attend.call_args.args[:3]
    note("rotate q", *q.shape)
    note("rotate k", *append.call_args.args[0].shape)
    note("scores", *q.shape[:3], k.shape[2])
    note("sum", *q.shape[:3], v.shape[3])
    note("cache", *cache.k.shape)

    def step(x: float, row: float, text: str, shape: str, color: str, width: float = 98) -> Step:
        return Step(x, 26 + 44 * row, f"{text}\n{shapes[shape]}", color, width, 31)

    steps = {
        "x": Step(24, 26, "x"),
        "norm1": step(212, 1, "norm1", "norm1", GREEN),
        "q": step(104, 2, "q_proj", "attn.q_proj", BLUE),
        "k": step(212, 2, "k_proj", "attn.k_proj", BLUE),
        "v": step(320, 2, "v_proj", "attn.v_proj", BLUE),
        "q_turned": step(104, 3, "split, rotate", "rotate q", PALE),
        "k_turned": step(212, 3, "split, rotate", "rotate k", PALE),
        "cache": step(248, 4, "cache: all keys, all values", "cache", PURPLE, 244),
        "scores": step(160, 5, "scores, causal, softmax", "scores", BLUE, 170),
        "sum": step(262, 6, "weighted sum of values", "sum", BLUE, 214),
        "o": step(212, 7, "join heads, o_proj", "attn.o_proj", BLUE, 130),
        "add1": Step(24, 26 + 44 * 8, "+"),
        "norm2": step(212, 9, "norm2", "norm2", GREEN),
        "gate": step(150, 10, "gate, SiLU", "ffn.gate", ORANGE),
        "up": step(274, 10, "up", "ffn.up", ORANGE),
        "product": step(212, 11, "gate · up", "ffn.down in", ORANGE, 160),
        "down": step(212, 12, "down", "ffn.down", ORANGE),
        "add2": Step(24, 26 + 44 * 13, "+"),
        "y": Step(24, 26 + 44 * 14, "y"),
    }
    arrows = (
        "x norm1, norm1 q, norm1 k, norm1 v, q q_turned, k k_turned, k_turned cache, v cache,"
        "q_turned scores, cache scores, scores sum, cache sum, sum o, o add1, x add1,"
        "add1 norm2, norm2 gate, norm2 up, gate product, up product, product down, down add2,"
        "add1 add2, add2 y"
    )
    card = Card(664)
    card.flow(steps, arrows, size=9.5)
    return card


def visible(keep: Tensor | None, T: int, S: int, causal: bool = False) -> Tensor:
    """Which of S keys the output of each of T queries depends on: attend over one-hot values."""
    q, k, v = torch.zeros(1, 1, T, 1), torch.zeros(1, 1, S, 1), torch.eye(S)[None, None]
    return (tb.attend(q, k, v, keep, causal=causal)[0, 0] > 0).long()


def masks() -> Card:
    """Who sees whom, as attend lets it through."""
    T, at = 8, torch.arange(8)
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    causal = tb.build_causal_mask(at, at)
    panels = {
        "encoder": visible(None, T, T),
        "causal": visible(None, T, T, causal=True),
        "chunk, 5 cached": visible(None, 3, T, causal=True),
        "window 3": visible(tb.build_causal_mask(at, at, window=3), T, T),
        "chunks of 4": visible(at[:, None] // 4 == at // 4, T, T, causal=True),
        "prefix of 3": visible(causal | (at < 3), T, T),
        "packed": visible(document[:, None] == document, T, T, causal=True),
        "left padding": visible((at >= 3).expand(T, T), T, T, causal=True),
        "cross, S = 5": visible(None, T, 5),
    }
    card = Card(414)
    for number, (title, levels) in enumerate(panels.items()):
        left, top = 27 + number % 3 * 120, 20 + number // 3 * 132
        card.title(left + 48, title, top)
        card.cells(left, top + 12, 12, 12, levels, ["#e1e4e8", BLUE])
    card.text(16, 80, "queries", color=GREY, rotation=90, va="center")
    card.text(75, 136, "keys", color=GREY)
    return card


def heads_read(q: Tensor, k: Tensor, v: Tensor) -> list[list[int]]:
    """For each KV head the query heads whose output depends on it."""
    v = v.detach().requires_grad_()
    out = tb.attend(q.detach(), k.detach(), v)[0]  # (H, T, d_v)
    grads = [torch.autograd.grad(head.sum(), v, retain_graph=True)[0][0] for head in out]
    return [[i for i, grad in enumerate(grads) if grad[g].any()] for g in range(v.shape[1])]


def kv_heads(number: int) -> str:
    return f"{number} KV head{'s' if number > 1 else ''}"


def kv_sharing() -> Card:
    """Eight query heads and the keys each reads, from what attend was given and depends on."""
    d_model, H, d_h, spy = 512, 8, 64, Mock(wraps=tb.attend)
    mla = {"kv_rank": 4 * d_h, "rope_dim": d_h // 2, "nope_dim": d_h, "v_dim": d_h}
    panels = {
        "MHA": tb.MultiHeadAttention(d_model, H, attend=spy),
        "GQA": tb.MultiHeadAttention(d_model, H, 2, attend=spy),
        "MQA": tb.MultiHeadAttention(d_model, H, 1, attend=spy),
        "MLA": tb.MultiHeadLatentAttention(d_model, H, **mla),
    }
    card = Card(296)
    for number, (title, attn) in enumerate(panels.items()):
        left, top = 14 + number % 2 * 190, 20 + number // 2 * 142
        latent, cache = isinstance(attn, tb.MultiHeadLatentAttention), tb.KVCache()
        tables = dict(zip(("cos", "sin"), tb.build_rope_cache(4, d_h // 2))) if latent else {}
        with torch.no_grad(), patch.object(tb, "attend", spy):
            for length in (3, 1):
                attn(torch.randn(1, length, d_model), causal=True, kv_cache=cache, **tables)
        groups = heads_read(*spy.call_args.args[:3])
        numbers = (cache.k.numel() + cache.v.numel()) // cache.next_pos
        card.title(left + 86, title if latent else f"{title}, {kv_heads(len(groups))}", top)
        card.text(left + 86, top + 108, f"{numbers:,} numbers a token")
        xs = [left + 12 + 21 * head for head in range(H)]
        for readers in groups:
            x = sum(xs[head] for head in readers) / len(readers)
            held = Step(x, top + 84, "kv", PURPLE, 18, 20)
            if latent:
                text = f"latent {attn.kv_rank} and key {attn.rope_dim}"
                held = Step(x, top + 84, text, PURPLE, 172, 20)
            for head in readers:
                card.wire((xs[head], top + 26), (xs[head] if latent else x, top + 76), head=False)
                if latent:
                    card.box(Step(xs[head], top + 52, "W", ORANGE, 15, 15), size=9)
            card.box(held, size=10 if latent else 9)
        for x in xs:
            card.disc(x, top + 26, "q", BLUE)
    return card


def pairs(rotate: Callable[[Tensor], Tensor], width: int) -> list[tuple[int, int]]:
    """Which two channels a rotation of x [1, 1, 1, width] mixes."""
    turned = torch.cat([rotate(unit.view(1, 1, 1, -1)).view(1, -1) for unit in torch.eye(width)])
    return [(a, b) for a, b in turned.nonzero().tolist() if a < b]


def rope() -> Card:
    """Top: how far each pair of channels is turned at each position. Below: which pair up."""
    positions, d_h = 64, 16
    cos, _ = tb.build_rope_cache(positions, d_h)
    shades = ["#2f6fb7", "#7aa5d6", "#bcd3ec", "#f1efe9", "#f6d5ae", "#e7a45c", "#d1720f"]
    levels = ((cos[:, : d_h // 2].T + 1) / 2 * (len(shades) - 1)).round().long()
    card = Card(350, "cosine of the angle: orange 1, blue −1")
    card.cells(46, 34, 5.2, 16, levels, shades, gap=0)
    for pair in range(d_h // 2):
        card.text(38, 42 + 16 * pair, str(pair), ha="right")
    for position in range(0, positions, 10):
        card.text(48.6 + 5.2 * position, 172, str(position))
    card.text(16, 98, "channel pair", rotation=90, va="center")
    card.text(212, 188, "position")

    width, (cos, sin) = 8, tb.build_rope_cache(2, 8)
    order = torch.arange(width).view(-1, 2).T.flatten()  # 0 2 4 6 1 3 5 7

    def half_split(x: Tensor) -> Tensor:
        return tb.apply_rope(x, cos[1:], sin[1:])

    def adjacent(x: Tensor) -> Tensor:
        return half_split(x[..., order])[..., order.argsort()]

    for y, title, rotate in ((246, "half-split", half_split), (316, "adjacent", adjacent)):
        card.text(20, y, title, ha="left", fontweight="bold")
        for (a, b), color in zip(pairs(rotate, width), (BLUE, ORANGE, GREEN, PURPLE)):
            start, end = 110 + 34 * a, 110 + 34 * b
            arc = {"theta1": 180, "theta2": 360, "color": color, "lw": 2, "clip_on": False}
            size = end - start, 26 + 10 * (b - a)
            card.ax.add_patch(Arc(((start + end) / 2, y), *size, **arc))
            for channel, x in ((a, start), (b, end)):
                card.box(Step(x, y, str(channel), color, 22, 20))
    return card


def turns(tables: tuple[Tensor, Tensor]) -> Tensor:
    """Radians a position of each channel pair, read off the tables' second row."""
    cos, sin = (table[1, : table.shape[1] // 2] for table in tables)
    return torch.atan2(sin, cos)


def rope_stretch() -> Card:
    """How much slower each channel pair turns under four rules for a context 8 times as long."""
    d_h, base, old_len, factor = 128, 500_000.0, 8192, 8.0
    plain = turns(tb.build_rope_cache(2, d_h, base))
    longer = base * factor ** (d_h / (d_h - 2))
    yarn = recipes.yarn_tables(2, d_h, base, factor=factor, old_len=old_len)
    rules = {
        "interpolation": (recipes.linear_tables(2, d_h, base, factor=factor), GREEN),
        "NTK-aware": (tb.build_rope_cache(2, d_h, longer), PURPLE),
        "YaRN": (yarn, ORANGE),
        "Llama-3.1": (recipes.llama3_tables(2, d_h, base, factor=factor, old_len=old_len), BLUE),
    }
    card = Card(330, "angle a position, of its value before")
    ax = card.chart(44, 44, 318, 232)
    for tables, color in rules.values():
        ax.plot(range(d_h // 2), turns(tables) / plain, color=color, lw=2)
    ax.set_yscale("log", base=2)
    labels = {"interpolation": (4, 0.135), "NTK-aware": (45, 0.25), "YaRN": (22.6, 0.84),
              "Llama-3.1": (32, 0.84)}  # fmt: skip
    for name, (pair, share) in labels.items():
        ax.text(pair, share, name, color=rules[name][1], fontweight="bold")
    shares = [2.0**-power for power in range(4)]
    ax.set(xlim=(0, d_h // 2 - 1), ylim=(0.115, 1.08), xticks=range(0, 64, 16), yticks=shares)
    ax.set(yticklabels=["1", "1/2", "1/4", "1/8"], xlabel="channel pair, fast to slow")
    ax.minorticks_off()
    return card


def bars(ax: Axes, values: dict[str, float], colors: list[str]) -> None:
    """Labelled horizontal bars on a log scale, the first on top."""
    ax.barh(list(values), list(values.values()), color=colors, log=True, height=0.7)
    for row, value in enumerate(values.values()):
        text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        ax.annotate(text, (value, row), (4, 0), textcoords="offset points", va="center")
    ax.invert_yaxis()
    ax.tick_params(left=False, bottom=False, labelbottom=False, which="both")
    ax.spines["bottom"].set_visible(False)


def mla() -> Card:
    """One decoding step of DeepSeek-V3's attention in both forms, and what each multiplies."""
    S, flops, seen, recipe = 4096, {}, {}, recipes.RECIPES["DeepSeek-V3"]
    with torch.device("meta"), torch.no_grad():
        attn = recipe.parts["attn"](recipe.sizes, 0)
        cases = itertools.product(("expanded", "absorbed"), ((S,), (S - 1, 1)))
        for form, lengths in cases:
            spy, cache = Mock(side_effect=getattr(attn, form)), tb.KVCache()
            with patch.multiple(attn, expanded=spy, absorbed=spy):
                for length in lengths:
                    attn(torch.randn(1, length, attn.d_model), causal=True, kv_cache=cache)
            count, attend = FlopCounterMode(display=False), Mock(wraps=tb.attend)
            with count, patch.object(tb, "attend", attend):
                getattr(attn, form)(*spy.call_args.args)
            work = "step" if length == 1 else "prefill"
            flops[work, form] = count.get_total_flops() / 1e9
            seen[form] = attend.call_args.args[:3]  # q, k, v of the step

    def attention(x: float, form: str) -> Step:
        q, k, v = seen[form]
        widths = f"q {q.shape[-1]}, k {k.shape[-1]}, v {v.shape[-1]}"
        return Step(x, 160, f"attend: {kv_heads(k.shape[1])}\n{widths}", BLUE, 170, 36)

    H, latent, key = seen["absorbed"][0].shape[1], attn.kv_rank, attn.rope_dim
    up = f"kv_up of all S tokens\n{H} × ({attn.nope_dim} + {attn.v_dim})"
    query = f"q, by kv_up's keys\n{H} × ({attn.nope_dim} to {latent})"
    out = f"out, by kv_up's values\n{H} × ({latent} to {attn.v_dim})"
    steps = {
        "cache": Step(195, 50, f"cache, a token: latent {latent}, key {key}", PURPLE, 364, 24),
        "up": Step(98, 104, up, ORANGE, 170, 36),
        "query": Step(278, 104, query, ORANGE, 140, 36),
        "expanded": attention(98, "expanded"),
        "absorbed": attention(293, "absorbed"),
        "out": Step(293, 216, out, ORANGE, 170, 36),
        "o_proj": Step(195, 266, "o_proj", BLUE, 364, 24),
    }
    card = Card(406)
    card.title(98, "expanded")
    card.title(293, "absorbed")
    arrows = "cache up, up expanded, query absorbed, absorbed out, expanded o_proj, out o_proj"
    card.flow(steps, arrows)
    card.wire((364, 62), (364, 142))
    card.text(WIDTH / 2, 298, f"GFLOP from cache to o_proj, S = {S:,}, log scale")
    named = {f"{work}, {form}": flops[work, form] for work, form in sorted(flops, reverse=True)}
    bars(card.chart(124, 310, 200, 84), named, [ORANGE, BLUE] * 2)
    return card


def stream_growth() -> Card:
    """RMS of the stream after each of 64 fresh blocks, for each topology."""
    depth, d_model, tables = 64, 96, tb.build_rope_cache(1, 12)
    stacks = {
        "pre and post": (tb.BranchNormDecoderBlock, tables, PURPLE),
        "parallel": (tb.ParallelDecoderBlock, (), ORANGE),
        "Pre-LN": (tb.ModernDecoderBlock, tables, BLUE),
        "Post-LN": (tb.VanillaEncoderLayer2017, (), GREEN),
    }
    card = Card(326, "RMS of the stream, fresh blocks, one-token inputs")
    ax, depths, place = card.chart(34, 40, 236, 240), range(depth + 1), math.inf
    for name, (block, inputs, color) in stacks.items():
        torch.manual_seed(0)
        x, sizes = torch.randn(256, 1, d_model), []
        with torch.no_grad():
            for _ in depths:
                sizes.append(x.square().mean().sqrt().item())
                x = block(d_model)(x, *inputs)
        ax.plot(depths, sizes, color=color, lw=2)
        place = min(place - 0.7, sizes[-1])  # names that would touch move apart
        label = {"textcoords": "offset points", "color": color, "va": "center"}
        ax.annotate(f"{name} {sizes[-1]:.1f}", (depth, place), (6, 0), **label)
    ax.plot(depths, [math.sqrt(1 + 2 * n) for n in depths], color=INK, lw=1.2, ls=":")
    ax.text(35, 7.4, "dots: √(1 + 2l)")
    ax.set(xlim=(0, depth), ylim=(0, 12), xticks=range(0, depth + 1, 16), xlabel="blocks")
    return card


def routing() -> Card:
    """Tokens per expert before and after two ways to balance them."""
    d_model, n_experts, steps = 32, 8, 200
    tokens = torch.randn(1024, d_model)
    tokens += torch.randn(d_model)  # what all share favours a few experts
    even = len(tokens) / n_experts
    softmax, sigmoid = (
        kind(d_model, n_experts, 1) for kind in (tb.SoftmaxRouter, tb.SigmoidRouter)
    )
    sigmoid.router.load_state_dict(softmax.router.state_dict())
    optimizer = torch.optim.Adam(softmax.parameters(), lr=0.01)
    softmax(tokens)
    loads = {"untrained, top-1": softmax.tokens_per_expert}
    for _ in range(steps):
        softmax(tokens)
        optimizer.zero_grad()
        softmax.aux_loss.backward()
        optimizer.step()
        sigmoid(tokens)
        sigmoid.selection_bias += 0.01 * (even - torch.tensor(sigmoid.tokens_per_expert)).sign()
    loads[f"{steps} steps on the balance loss"] = softmax.tokens_per_expert
    loads[f"{steps} steps of the selection bias"] = sigmoid.tokens_per_expert
    card = Card(400)
    for number, (title, load) in enumerate(loads.items()):
        top = 34 + 122 * number
        card.title(WIDTH / 2, title, top - 14)
        ax = card.chart(54, top, 318, 72)
        ax.bar(range(n_experts), load, color=(ORANGE, BLUE, GREEN)[number])
        ax.axhline(even, color=INK, lw=1, ls="--")
        ax.set(xticks=range(n_experts), ylabel="tokens", ylim=(0, 500), yticks=(0, 250, 500))
    card.text(213, 386, "expert")
    return card


def online_softmax() -> Card:
    """One row of scores read in tiles: running maximum, running sum, and what is shrunk between."""
    d_h, S, tile = 4, 16, 4
    q, k, v = 2 * torch.randn(1, d_h), torch.randn(S, d_h), torch.randn(S, 3)
    scores = (q @ k.T)[0] * d_h**-0.5
    largest, total, out, columns = torch.tensor(-math.inf), torch.zeros(()), torch.zeros(3), []
    for part, values in zip(scores.split(tile), v.split(tile)):
        new = torch.maximum(largest, part.max())
        shrink, weights = (largest - new).exp(), (part - new).exp()
        total, out, largest = total * shrink + weights.sum(), out * shrink + weights @ values, new
        columns.append((largest.item(), shrink.item(), total.item()))
    whole = tb.attend(q[None, None], k[None, None], v[None, None])[0, 0, 0]
    torch.testing.assert_close(out / total, whole)  # the row read at once gives the same

    card = Card(296, "one row of scores in four tiles")
    ax = card.chart(74, 36, 304, 130)
    colors = [color for color in (BLUE, ORANGE, GREEN, PURPLE) for _ in range(tile)]
    ax.bar(range(S), scores.tolist(), color=colors)
    edges = [tile * n - 0.5 for n in range(S // tile + 1)]
    ax.stairs([largest for largest, _, _ in columns], edges, baseline=None, color=INK, lw=1.5)
    ax.set(xlim=(-0.5, S - 0.5), xticks=[], ylabel="score")
    ax.spines["bottom"].set_visible(False)
    for row, name in enumerate(("max so far", "shrink by", "sum so far")):
        card.text(10, 192 + 28 * row, name, ha="left")
        for column, numbers in enumerate(columns):
            card.text(112 + 76 * column, 192 + 28 * row, f"{numbers[row]:.2f}")
    card.text(WIDTH / 2, 277, "sum = old sum × shrink + new weights", color=GREY)
    return card


def whole_model() -> Card:
    """Token ids to logits, with the shapes of a real forward."""
    names, shapes = {3: "B", 7: "T", 96: "d", 50: "V", 1: "1"}, {}
    model, ids = tb.DecoderOnlyLM(50), torch.randint(50, (3, 7))

    def hook(name: str, part: nn.Module, args: tuple, out: Tensor) -> None:
        shapes.setdefault(name, spell(out.shape, names))  # a tied embedding is called twice

    for name, part in model.named_modules():
        if re.fullmatch(r"|[a-z_]+|blocks\.\d+", name):  # the model, its parts, its blocks
            part.register_forward_hook(partial(hook, name))
    with torch.no_grad():
        model(ids)
        last = spell(model(ids, last_only=True).shape, names)
    rows = [
        ("ids", "token ids", spell(ids.shape, names), PALE),
        ("embedding", "embedding", shapes["embedding"], GREEN),
        ("first", "block 1", shapes["blocks.0"], BLUE),
        ("dots", "…", "", None),
        ("block", "block L", shapes["blocks.1"], BLUE),
        ("norm", "final norm", shapes["final_norm"], GREEN),
        ("head", "head (tied: the embedding)", shapes[""], ORANGE),
    ]
    steps = {
        name: Step(WIDTH / 2, 34 + 50 * row, f"{text}\n{shape}".strip(), color, 190, 34)
        for row, (name, text, shape, color) in enumerate(rows)
    }
    steps["dots"].height = 18
    steps["train"] = Step(102, 390, f"training: loss on all T\n{shapes['']}", PALE, 170, 34)
    steps["run"] = Step(288, 390, f"generating: the last one\n{last}", PALE, 170, 34)
    card = Card(420)
    names = [name for name, *_ in rows]
    chain = ",".join(f"{start} {end}" for start, end in itertools.pairwise(names))
    card.flow(steps, f"{chain}, head train, head run")
    return card


def cache_per_token() -> Card:
    """KiB that one token leaves in the cache of ten models at 16 bits, every layer counted."""
    names = ("GPT-3 175B", "Llama-2 7B", "Llama-3.1 405B", "Gemma-3 27B", "Llama-2 70B",
             "Llama-4 Scout", "Llama-3 8B", "DeepSeek-V3", "gpt-oss 20b", "Gemma-1 2B")  # fmt: skip
    colors = {"MHA": ORANGE, "GQA": BLUE, "MLA": PURPLE, "MQA": GREEN}
    sizes = {}
    for name in names:
        layers = [block.attn for block in built(name).blocks]
        label = f"{name}, {recipes.sharing(layers[0])[:3]}"
        sizes[label] = 2 * sum(map(recipes.cache_elements, layers)) / 1024
    sizes = dict(sorted(sizes.items(), key=operator.itemgetter(1), reverse=True))
    card = Card(306, "KiB of cache a token, 16 bits, log scale")
    bars(card.chart(150, 36, 186, 258), sizes, [colors[label[-3:]] for label in sizes])
    return card


def mixed_caches() -> Card:
    """What each layer of three stacks has cached after 131,072 tokens, layer 0 at the bottom."""
    length, card = 131072, Card(424, "MiB a layer has cached after 131,072 tokens, 16 bits")
    short = {"DeltaNet": "DeltaNet", "GQA gated": "GQA", "GQA": "GQA"}
    for x, name in ((30, "Qwen3-Next 80B-A3B"), (154, "MiMo-V2-Flash"), (278, "DeepSeek-V4-Flash")):
        model, uses = recipes.outlined(name), recipes.cache_use(recipes.outlined(name))
        kinds = [recipes.kind_of(model, n) for n in range(len(recipes.layers_of(model)))]
        colors = dict(
            zip(sorted(uses, key=lambda kind: uses[kind].at(length)), (GREEN, BLUE, ORANGE))
        )
        each = {kind: 2 * use._replace(layers=1).at(length) / 2**20 for kind, use in uses.items()}
        card.text(x + 48, 44, name.removesuffix(" 80B-A3B"), fontsize=10)
        ax = card.chart(x, 54, 96, 244)
        for kind, color in colors.items():  # one broken line a kind
            rows = [row for row, other in enumerate(kinds) if other == kind]
            ends = [0.05, each[kind], math.nan] * len(rows)
            rows = [row for row in rows for _ in range(3)]
            ax.plot(ends, rows, color=color, lw=4, solid_capstyle="butt", clip_on=False)
        ax.set(xscale="log", xlim=(0.05, 400), yticks=[0, len(kinds) - 1])
        ax.set(xticks=[1, 100], xticklabels=["1", "100"], ylim=(-1, 47.6))
        ax.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        for row, (kind, color) in enumerate(colors.items()):
            words = short.get(kind, re.sub(r".*(entries of \d+).*", r"\1", kind))
            words = words.replace("GQA window", "window")
            size = f"{each[kind]:,.{2 if each[kind] < 10 else 0}f}"
            card.ax.plot(x - 10, 334 + 28 * row, "s", ms=7, color=color)
            words = f"{uses[kind].layers} × {words}\n{size} MiB"
            card.text(x - 2, 334 + 28 * row, words, ha="left", fontsize=9)
        total = 2 * sum(use.at(length) for use in uses.values()) / 2**30
        card.text(x + 40, 334 + 28 * 3 - 8, f"all: {total:.2f} GiB", fontsize=10)
    return card


def weights() -> Card:
    """Shares of the parameters of eight models, counted on the composed models."""
    names = ("Gemma-3 1B", "Llama-3.2 1B", "Llama-3 8B", "GPT-2 XL", "Llama-3.1 405B",
             "Mixtral 8x7B", "gpt-oss 20b", "DeepSeek-V3")  # fmt: skip
    kinds = {"vocabulary": GREEN, "attention": BLUE, "FFN in use": ORANGE, "idle experts": IDLE}
    card = Card(336, "where the weights are, per cent")
    for (kind, color), x in zip(kinds.items(), (26, 118, 202, 296)):
        card.ax.plot(x, 42, "s", ms=9, color=color)
        card.text(x + 9, 42, kind, ha="left")
    ax = card.chart(104, 54, 272, 270)
    for row, name in enumerate(names):
        sums, left = dict.fromkeys(kinds, 0), 0
        for path, weight in built(name).named_parameters():
            part = {"attn", "ffn"}.intersection(path.split("."))
            kind = {"attn": "attention", "ffn": "FFN in use"}[part.pop()] if part else "vocabulary"
            sums[kind] += weight.numel()
        sums["idle experts"] = recipes.idle_parameters(built(name))
        sums["FFN in use"] -= sums["idle experts"]
        for kind, color in kinds.items():
            share = 100 * sums[kind] / sum(sums.values())
            ax.barh(row, share, left=left, color=color, height=0.72)
            if share >= 9:
                ink = INK if color == IDLE else CARD
                ax.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center", color=ink)
            left += share
    ax.set(xlim=(0, 100), xticks=[], yticks=range(len(names)), yticklabels=names)
    ax.tick_params(left=False)
    ax.invert_yaxis()
    ax.spines[:].set_visible(False)
    return card


FIGURES = (
    topologies, modern_block, layers_2017, gpt2_llama, rope, rope_stretch, stream_growth,
    kv_sharing, mla, routing, masks, online_softmax, whole_model, cache_per_token,
    mixed_caches, weights,
)  # fmt: skip


# =============================================================================================
# Command line
# =============================================================================================


def svg(figure: Figure) -> str:
    """The figure as text, without a date, in numbers as fine as the eye."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    text = re.sub(r"\d+\.\d{3,}", rounded, text.getvalue())
    return re.sub(r" *\n *", "\n", text)


def rounded(number: re.Match) -> str:
    value = float(number[0])
    return f"{value:.{2 if value >= 1 else 5}f}".rstrip("0").rstrip(".")  # scales are below 1


def main(argv: list[str] | None = None) -> None:
    figures = {figure.__name__: figure for figure in FIGURES}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="*", help=f"all, or some of: {', '.join(figures)}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder")
    options = parser.parse_args(argv)
    unknown = set(options.name) - set(figures)
    if unknown:
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(figures)}")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that another machine's rounding cannot be seen
    try:
        with mpl.rc_context(STYLE), torch.random.fork_rng(devices=[]):
            for name in options.name or figures:
                torch.manual_seed(0)
                text = svg(figures[name]().figure)
                (options.out / f"{name}.svg").write_text(text, encoding="utf-8")
    finally:
        torch.set_default_dtype(dtype)


if __name__ == "__main__":
    main()
