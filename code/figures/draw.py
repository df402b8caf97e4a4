"""Draws the figures of the notes from the library itself: what a forward does, what a table holds.

    python3 code/figures/draw.py               writes all SVG files beside this file
    python3 code/figures/draw.py masks rope    only those
    python3 code/figures/draw.py --out DIR     somewhere else

Every figure is 390 pt wide, so that its smallest letters can be read on a phone, and lies on an
opaque card, so that one file serves light and dark pages. Nothing drawn is typed in: wirings come
from traced forwards, shapes from hooks, masks from what attend lets through, counts from modules.
"""

import argparse
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
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path as Outline
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import transformer_block as tb

WIDTH = 390
INK, GREY, PALE, CARD = "#1f2328", "#59636e", "#d1d9e0", "#fbfaf7"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2f6fb7", "#c9660a", "#3a8a3f", "#7d54b8", "#c0392b"
STREAM = {"color": INK, "width": 1.8}
TINTS = {BLUE: "#d6e5f7", ORANGE: "#fbe2c6", GREEN: "#d5ecd6", PURPLE: "#e6dcf5", PALE: "#ffffff"}
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
    "path.simplify": False,
}

# =============================================================================================
# Pens
# =============================================================================================


def card(height: float) -> Figure:
    """An empty card of WIDTH x height points."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), facecolor="none")
    frame = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    frame.axis("off")
    frame.add_patch(
        FancyBboxPatch(
            (2, 2),
            WIDTH - 4,
            height - 4,
            fc=CARD,
            ec=PALE,
            lw=1,
            boxstyle="round,pad=0,rounding_size=6",
            clip_on=False,
        )  # fmt: skip
    )
    return figure


def sheet(height: float) -> tuple[Figure, Axes]:
    """A card and axes on it whose unit is a point, y downwards."""
    figure = card(height)
    return figure, figure.axes[0]


def chart(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes for data at a place of the card given in points from its upper left corner."""
    total = figure.get_size_inches()[1] * 72
    place = (left / WIDTH, 1 - (top + height) / total, width / WIDTH, height / total)
    return figure.add_axes(place, facecolor="none")


def write(ax: Axes, x: float, y: float, text: str, size: float = 10, color: str = INK,
          ha: str = "center", weight: str = "normal", va: str = "center") -> None:  # fmt: skip
    ax.text(x, y, text, fontsize=size, color=color, ha=ha, va=va, fontweight=weight)


def box(ax: Axes, x: float, y: float, text: str, color: str = PALE, width: float = 60,
        height: float = 20, size: float = 10) -> None:  # fmt: skip
    """A labelled box with its centre at (x, y)."""
    ax.add_patch(
        FancyBboxPatch((x - width / 2, y - height / 2), width, height, ec=color, lw=1.2, zorder=3,
                       fc=TINTS.get(color, color), boxstyle="round,pad=0,rounding_size=4", clip_on=False)
    )  # fmt: skip
    ax.text(x, y, text, fontsize=size, ha="center", va="center", zorder=4, linespacing=1.15)


def wire(ax: Axes, *points: tuple[float, float], color: str = GREY, width: float = 1.2,
         head: bool = True, style: str = "-") -> None:  # fmt: skip
    """A line through the points, with a head at its end."""
    ax.add_patch(PathPatch(Outline(points), fc="none", ec=color, lw=width, ls=style, zorder=1,
                           clip_on=False))  # fmt: skip
    if head:
        (x0, y0), (x, y) = points[-2:]
        length = math.hypot(x - x0, y - y0)
        u, v = 5 * (x - x0) / length, 5 * (y - y0) / length
        corners = [(x, y), (x - u - v / 2, y - v + u / 2), (x - u + v / 2, y - v - u / 2)]
        ax.add_patch(Polygon(corners, fc=color, ec="none", zorder=2, clip_on=False))


def plus(ax: Axes, x: float, y: float) -> None:
    disc(ax, x, y, "+", INK, CARD)


def disc(ax: Axes, x: float, y: float, text: str, color: str, fill: str | None = None) -> None:
    ax.plot(x, y, "o", ms=14, mfc=fill or TINTS[color], mec=color, mew=1.2, zorder=3, clip_on=False)
    ax.text(x, y, text, fontsize=9.5, ha="center", va="center_baseline", zorder=4)


def cells(ax: Axes, x: float, y: float, width: float, height: float, levels: Tensor,
          colors: list[str], gap: float = 0.5) -> None:  # fmt: skip
    """A matrix of integer levels as rectangles, one path a level; (x, y) is its upper left."""
    vertices: dict[int, list[tuple[float, float]]] = {level: [] for level in range(len(colors))}
    for row, line in enumerate(levels.tolist()):
        top, bottom = y + row * height + gap, y + (row + 1) * height - gap
        for level, run in itertools.groupby(range(len(line)), line.__getitem__):
            columns = list(run)
            for start, *_, end in (
                [[*columns, columns[-1]]] if not gap else [[c, c] for c in columns]
            ):
                left, right = x + start * width + gap, x + (end + 1) * width - gap
                vertices[level] += [
                    (left, top),
                    (right, top),
                    (right, bottom),
                    (left, bottom),
                    (left, top),
                ]
    for level, corners in vertices.items():
        codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY] * (len(corners) // 5)
        if corners:
            ax.add_patch(
                PathPatch(Outline(corners, codes), fc=colors[level], ec="none", clip_on=False)
            )


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
        """Draw x + a + b as one addition of three."""
        for outer in self.nodes[:]:
            for inner in outer.reads:
                alone = sum(inner in node.reads for node in self.nodes) == 1
                if outer.label == inner.label == "+" and alone:
                    rest = [read for read in outer.reads if read is not inner]
                    outer.reads = inner.reads + rest
                    self.nodes.remove(inner)

    def _place(self) -> None:
        """Rows by the longest way from an input; the stream is what all additions add to."""
        for node in self.nodes:
            node.row = max((read.row + 1 for read in node.reads), default=0)
        node = self.last
        while node:
            node.column = 0
            node = min(node.reads, key=lambda read: read.row, default=None)
        for addition in (node for node in self.nodes if node.label == "+"):
            branches = [read for read in addition.reads if read.column == -1]
            for column, node in enumerate(branches, 1):
                while node.column == -1:
                    node.column, node = column, node.reads[0]
        for node in self.nodes:
            for read in node.reads:
                if read.column == -1:  # a second input stands beside what reads it
                    read.column, read.row = node.column + 1, node.row


COLORS = {
    tb.RMSNorm: GREEN, nn.LayerNorm: GREEN, tb.MultiHeadAttention: BLUE,
    tb.MultiHeadLatentAttention: BLUE, tb.DenseFFN: ORANGE, tb.GatedFFN: ORANGE,
}  # fmt: skip


def draw_wiring(ax: Axes, wiring: Wiring, xs: list[float], top: float, step: float,
                label: Callable[[Node], str], width: float = 46, height: float = 19,
                size: float = 9) -> None:  # fmt: skip
    """The graph downwards: the stream at xs[0], branches at xs[1], xs[2], a row every step."""

    def at(node: Node) -> tuple[float, float]:
        return xs[node.column], top + node.row * step

    for node in wiring.nodes:
        x, y = at(node)
        edge = y - (7 if node.label == "+" else height / 2)
        for read in node.reads:
            x0, y0 = at(read)
            if x0 == x:
                wire(ax, (x, y0), (x, edge), **(STREAM if node.column == 0 else {}))
            elif node.label == "+":
                wire(ax, (x0, y0), (x0, y), (x + 7, y))
            elif read.row == node.row:
                wire(ax, (x0, y), (x + width / 2, y))
            else:
                turn = edge - (step - height) / 2
                wire(ax, (x0, turn), (x, turn), (x, edge))
        if node.label == "+":
            plus(ax, x, y)
        elif node.part is None:
            ax.plot(x, y, "o", ms=18, mfc=CARD, mec="none", zorder=3, clip_on=False)
            ax.text(x, y, node.label, fontsize=11, ha="center", va="center_baseline", zorder=4)
        else:
            box(ax, x, y, label(node), COLORS[type(node.part)], width, height, size)
    x, y = at(wiring.last)
    wire(ax, (x, y), (x, y + 26), **STREAM)
    ax.text(x, y + 34, "y", fontsize=11, ha="center", va="center_baseline")


@dataclass
class Step:
    """A box of a data flow drawn by hand; without a color it is bare text."""

    x: float
    y: float
    text: str
    color: str | None = PALE
    width: float = 98
    height: float = 31
    size: float = 9.5


def draw_flow(ax: Axes, steps: dict[str, Step], arrows: list[tuple[str, str]]) -> None:
    """Boxes by name, and arrows downwards between them; a step "+…" is an addition."""
    for name, step in steps.items():
        if name[0] == "+":
            plus(ax, step.x, step.y)
            step.width = step.height = 14
        elif step.color is None:
            write(ax, step.x, step.y, step.text, 11)
            step.width = step.height = 18
        else:
            box(ax, step.x, step.y, step.text, step.color, step.width, step.height, step.size)
    for names in arrows:
        start, end = (steps[name] for name in names)
        bottom, top = start.y + start.height / 2, end.y - end.height / 2
        if end.width == 14 and start.x != end.x:
            side = 7 if start.x > end.x else -7
            wire(ax, (start.x, bottom), (start.x, end.y), (end.x + side, end.y))
            continue
        inner = start if start.width < end.width else end  # the narrower box sets where it meets
        outer = end if inner is start else start
        if abs(inner.x - outer.x) < outer.width / 2:
            stream = all(name[0] == "+" or steps[name].color is None for name in names)
            wire(ax, (inner.x, bottom), (inner.x, top), **(STREAM if stream else {}))
        else:
            turn = top - 7
            wire(ax, (start.x, bottom), (start.x, turn), (end.x, turn), (end.x, top))


# =============================================================================================
# Figures: one function each, named as its file
# =============================================================================================


def traced(block: nn.Module, d_model: int = 96, head_dim: int = 12, **more: Tensor) -> Wiring:
    """The wiring of a block on x [3, 7, d]; a block that rotates gets its tables."""
    rotates = "cos" in inspect.signature(block.forward).parameters
    tables = dict(zip(("cos", "sin"), tb.build_rope_cache(7, head_dim))) if rotates else {}
    return Wiring(block, partial(block, **tables), x=torch.randn(3, 7, d_model), **more)


def short_name(node: Node) -> str:
    """A submodule's name without its sublayer, which the picture shows."""
    return node.label.removeprefix("attn_").removeprefix("ffn_")


def topologies() -> Figure:
    """The four topologies, each traced from its class."""
    columns = {
        "Post-LN": (tb.VanillaEncoderLayer2017(), (24, 69), 42),
        "Pre-LN": (tb.ModernDecoderBlock(), (14, 57), 58),
        "Parallel": (tb.ParallelDecoderBlock(), (12, 40, 76), 33),
        "Pre and post": (tb.BranchNormDecoderBlock(), (14, 57), 58),
    }
    figure, ax = sheet(360)
    for number, (title, (block, xs, width)) in enumerate(columns.items()):
        left = 7 + number * 94
        write(ax, left + 46, 20, title, 10.5, weight="bold")
        draw_wiring(ax, traced(block), [left + x for x in xs], 44, 32, short_name, width, 20, 10)
    return figure


def layers_2017() -> Figure:
    """The encoder layer and the decoder layer of 2017."""
    figure, ax = sheet(440)
    label = operator.attrgetter("label")
    write(ax, 90, 20, "Encoder layer", 11, weight="bold")
    write(ax, 265, 20, "Decoder layer", 11, weight="bold")
    draw_wiring(ax, traced(tb.VanillaEncoderLayer2017()), [45, 120], 46, 34, label, 68, 22, 10)
    decoder = traced(tb.VanillaSeq2SeqDecoderLayer2017(), memory=torch.randn(3, 5, 96))
    draw_wiring(ax, decoder, [205, 285, 355], 46, 34, label, 68, 22, 10)
    return figure


def bias(linear: nn.Linear) -> str:
    return "no biases" if linear.bias is None else "biases"


def describe(part: nn.Module, d_model: int) -> str:
    """What a part is, read off the module."""
    if isinstance(part, tb.MultiHeadAttention):
        H, G = (proj.out_features // part.head_dim for proj in (part.q_proj, part.k_proj))
        heads = f"MHA, {H} heads" if H == G else f"GQA, {H} heads on {G}"
        rotation = "RoPE on q and k" if part.rope else "no rotation"
        return f"{heads}\n{rotation}\n{bias(part.q_proj)}"
    if isinstance(part, tb.DenseFFN | tb.GatedFFN):
        gate = " gate" if isinstance(part, tb.GatedFFN) else ""
        matrices = len([p for p in part.parameters() if p.dim() == 2])
        size = f"h = {part.up.out_features / d_model:g} d"
        return f"{part.act.__name__.upper()}{gate}, {size}\n{matrices} matrices\n{bias(part.up)}"
    return type(part).__name__


def gpt2_llama() -> Figure:
    """GPT-2 small and Llama-3 8B: the same wiring of other parts."""
    with torch.device("meta"):
        gpt2 = traced(tb.GPT2StyleDecoderLayer(768, 12, 3072), 768)
        llama = traced(tb.ModernDecoderBlock(4096, 32, 8, 14336), 4096, 128)
    figure, ax = sheet(468)
    for left, title, wiring in ((4, "GPT-2 small", gpt2), (196, "Llama-3 8B", llama)):
        d_model = wiring.last.out.shape[-1]
        write(ax, left + 96, 20, f"{title}, d = {d_model:,}", 10.5, weight="bold")
        draw_wiring(ax, wiring, [left + 20, left + 114], 48, 62,
                    lambda node: describe(node.part, d_model), 140, 48, 10)  # fmt: skip
    return figure


def modern_block() -> Figure:
    """The modern block with the shape of every tensor, from hooks on a real forward."""
    names = {3: "B", 7: "T", 11: "S", 96: "d", 8: "H", 2: "G", 10: "d_h", 256: "h",
             80: "H·d_h", 20: "G·d_h"}  # fmt: skip
    shapes: dict[str, str] = {}

    def note(name: str, *shape: int) -> None:
        shapes[name] = spell(shape, names)

    def hook(name: str, part: nn.Module, args: tuple, out: Tensor) -> None:
        note(f"{name} in", *args[0].shape), note(name, *out.shape)

    attend = Mock(wraps=tb.attend)
    attn = tb.MultiHeadAttention(96, 8, 2, head_dim=10, rope=True, attend=attend)
    block = tb.ModernDecoderBlock(96, 8, 2, 256, attn=attn)
    for name, part in block.named_modules():
        if isinstance(part, nn.Linear | tb.RMSNorm):
            part.register_forward_hook(partial(hook, name))
    cache, (cos, sin) = tb.KVCache(), tb.build_rope_cache(11, 10)
    with torch.no_grad(), patch.object(tb, "apply_rope", wraps=tb.apply_rope) as rotate:
        for cached in (4, 7):
            y = block(torch.randn(3, cached, 96), cos, sin, kv_cache=cache)
    q, k, v = attend.call_args.args[:3]
    for name, call in zip("qk", rotate.call_args_list[-2:]):
        note(f"rotate {name}", *call.args[0].shape)
    note("scores", *q.shape[:3], k.shape[2]), note("sum", *q.shape[:3], v.shape[3])
    note("cache k", *cache.k.shape), note("cache v", *cache.v.shape), note("y", *y.shape)

    def step(x: float, row: float, text: str, shape: str | None, color: str | None = PALE,
             width: float = 98) -> Step:  # fmt: skip
        shape = f"\n{shapes[shape]}" if shape else ""
        return Step(x, 26 + 44 * row, text + shape, color, width)

    steps = {
        "x": step(24, 0, "x", None, None),
        "norm1": step(212, 1, "norm1", "norm1", GREEN),
        **{f"{p}_proj": step(x, 2, f"{p}_proj", f"attn.{p}_proj", BLUE)
           for p, x in (("q", 104), ("k", 212), ("v", 320))},
        "rotate q": step(104, 3, "split, rotate", "rotate q"),
        "rotate k": step(212, 3, "split, rotate", "rotate k"),
        "cache": step(248, 4, "cache: all keys, all values", "cache k", PURPLE, 244),
        "scores": step(160, 5, "scores, causal, softmax", "scores", BLUE, 170),
        "sum": step(262, 6, "weighted sum of values", "sum", BLUE, 214),
        "o_proj": step(212, 7, "join heads, o_proj", "attn.o_proj", BLUE, 130),
        "+1": step(24, 8, "", None),
        "norm2": step(212, 9, "norm2", "norm2", GREEN),
        "gate": step(150, 10, "gate, SiLU", "ffn.gate", ORANGE),
        "up": step(274, 10, "up", "ffn.up", ORANGE),
        "product": step(212, 11, "gate · up", "ffn.down in", ORANGE, 160),
        "down": step(212, 12, "down", "ffn.down", ORANGE),
        "+2": step(24, 13, "", None),
        "y": step(24, 14, "y", None, None),
    }  # fmt: skip
    figure, ax = sheet(660)
    draw_flow(ax, steps, [
        ("x", "norm1"), ("norm1", "q_proj"), ("norm1", "k_proj"), ("norm1", "v_proj"),
        ("q_proj", "rotate q"), ("k_proj", "rotate k"), ("rotate k", "cache"), ("v_proj", "cache"),
        ("rotate q", "scores"), ("cache", "scores"), ("scores", "sum"), ("cache", "sum"),
        ("sum", "o_proj"), ("o_proj", "+1"), ("x", "+1"), ("+1", "norm2"), ("norm2", "gate"),
        ("norm2", "up"), ("gate", "product"), ("up", "product"), ("product", "down"),
        ("down", "+2"), ("+1", "+2"), ("+2", "y"),
    ])  # fmt: skip
    return figure


def visible(keep: Tensor) -> Tensor:
    """Which keys [T, S] each query's output depends on: attend over one-hot values."""
    T, S = keep.shape
    weights = tb.attend(
        torch.zeros(1, 1, T, 1), torch.zeros(1, 1, S, 1), torch.eye(S)[None, None], keep
    )
    return (weights[0, 0] > 0).long()


def masks() -> Figure:
    """Who sees whom, as attend lets it through."""
    T, cached = 8, 5
    at = torch.arange(T)
    causal = tb.build_causal_mask(at, at)
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    panels = {
        "encoder": torch.ones(T, T, dtype=torch.bool),
        "causal": causal,
        f"chunk, {cached} cached": tb.build_causal_mask(at[cached:], at),
        "window 3": tb.build_causal_mask(at, at, window=3),
        "chunks of 4": causal & (at[:, None] // 4 == at // 4),
        "prefix of 3": causal | (at < 3),
        "packed": causal & (document[:, None] == document),
        "left padding": causal & (at >= 3),
        "cross, S = 5": torch.ones(T, 5, dtype=torch.bool),
    }
    figure, ax = sheet(408)
    for number, (title, keep) in enumerate(panels.items()):
        left, top = 27 + number % 3 * 120, 22 + number // 3 * 128
        write(ax, left + 48, top, title, 10.5, weight="bold")
        cells(ax, left, top + 12, 12, 12, visible(keep), ["#e4e7eb", BLUE])
    ax.text(16, 82, "queries", fontsize=9, color=GREY, ha="center", va="center", rotation=90)
    write(ax, 75, 139, "keys", 9, GREY)
    return figure


def heads_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Which KV heads each query head's output depends on, bool [H, G]."""
    v = v.detach().requires_grad_()
    out = tb.attend(q.detach(), k.detach(), v)[0]
    return torch.stack([torch.autograd.grad(head.sum(), v, retain_graph=True)[0][0].any(-1).any(-1)
                        for head in out])  # fmt: skip


def kv_sharing() -> Figure:
    """Eight query heads and the keys each reads, from what attend was given and depends on."""
    d_model, H, d_h = 512, 8, 64
    mla = {"kv_rank": 4 * d_h, "rope_dim": d_h // 2, "nope_dim": d_h, "v_dim": d_h}
    panels = {
        f"MHA, G = {H}": tb.MultiHeadAttention(d_model, H),
        "GQA, G = 2": tb.MultiHeadAttention(d_model, H, 2),
        "MQA, G = 1": tb.MultiHeadAttention(d_model, H, 1),
        "MLA, no heads cached": tb.MultiHeadLatentAttention(d_model, H, **mla),
    }
    figure, ax = sheet(300)
    for number, (title, attn) in enumerate(panels.items()):
        left, top = 14 + number % 2 * 190, 24 + number // 2 * 142
        latent = isinstance(attn, tb.MultiHeadLatentAttention)
        tables = dict(zip(("cos", "sin"), tb.build_rope_cache(4, d_h // 2))) if latent else {}
        cache, attend = tb.KVCache(), Mock(wraps=tb.attend)
        with (
            torch.no_grad(),
            patch.object(tb, "attend", attend),
            patch.object(attn, "attend", attend, create=True),
        ):
            for length in (3, 1):
                attn(torch.randn(1, length, d_model), causal=True, kv_cache=cache, **tables)
        read = heads_read(*attend.call_args.args[:3])
        numbers = (cache.k.numel() + cache.v.numel()) // cache.next_pos
        write(ax, left + 86, top, title, 10.5, weight="bold")
        write(ax, left + 86, top + 108, f"{numbers:,} numbers a token", 10)
        xs = [left + 12 + 21 * head for head in range(H)]
        for g, readers in enumerate(read.T):
            x = sum(x for x, reads in zip(xs, readers) if reads) / int(readers.sum())
            for x0 in (x for x, reads in zip(xs, readers) if reads):
                wire(ax, (x0, top + 26), (x0 if latent else x, top + 76), head=False)
                if latent:
                    box(ax, x0, top + 52, "W", ORANGE, 15, 15, 9)
            held = f"latent {attn.kv_rank} and key {attn.rope_dim}" if latent else "kv"
            box(ax, x, top + 84, held, PURPLE, 172 if latent else 18, 20, 10 if latent else 9)
        for x in xs:
            disc(ax, x, top + 26, "q", BLUE)
    return figure


def pairs(rotate: Callable[[Tensor], Tensor], width: int) -> list[tuple[int, int]]:
    """Which two channels a rotation of x [1, 1, 1, width] mixes."""
    turned = torch.cat([rotate(unit.view(1, 1, 1, -1)).view(1, -1) for unit in torch.eye(width)])
    return [(a, b) for a, b in turned.nonzero().tolist() if a < b]


def rope() -> Figure:
    """Top: how far each pair of channels is turned at each position. Below: which pair up."""
    positions, d_h = 64, 16
    cos, _ = tb.build_rope_cache(positions, d_h)
    shades = ["#2f6fb7", "#7aa5d6", "#bcd3ec", "#f1efe9", "#f6d5ae", "#e7a45c", "#d1720f"]
    levels = ((cos[:, : d_h // 2].T + 1) / 2 * (len(shades) - 1)).round().long()
    figure, ax = sheet(356)
    write(ax, WIDTH / 2, 20, "cosine of the angle: orange 1, blue −1", 10.5, weight="bold")
    cells(ax, 46, 34, 5.2, 16, levels, shades, gap=0)
    for pair in range(d_h // 2):
        write(ax, 38, 42 + 16 * pair, str(pair), 10, ha="right")
    for position in range(0, positions, 10):
        write(ax, 48.6 + 5.2 * position, 172, str(position), 10)
    ax.text(16, 98, "channel pair", fontsize=10, ha="center", va="center", rotation=90)
    write(ax, 212, 188, "position", 10)

    width, (cos, sin) = 8, tb.build_rope_cache(2, 8)
    order = torch.arange(width).view(-1, 2).T.flatten()  # 0 2 4 6 1 3 5 7

    def half_split(x: Tensor) -> Tensor:
        return tb.apply_rope(x, cos[1:], sin[1:])

    def adjacent(x: Tensor) -> Tensor:
        return half_split(x[..., order])[..., order.argsort()]

    colors = [BLUE, ORANGE, GREEN, PURPLE]
    for top, title, rotate in ((214, "half-split", half_split), (284, "adjacent", adjacent)):
        write(ax, 20, top + 30, title, 10.5, ha="left", weight="bold")
        for (a, b), color in zip(pairs(rotate, width), colors):
            start, end = 110 + 34 * a, 110 + 34 * b
            ax.add_patch(Arc(((start + end) / 2, top + 30), end - start, 26 + 10 * (b - a), theta1=180,
                             theta2=360, color=color, lw=2, clip_on=False))  # fmt: skip
            for channel, x in ((a, start), (b, end)):
                box(ax, x, top + 30, str(channel), color, 22, 20)
    return figure


def mla() -> Figure:
    """One decoding step of DeepSeek-V3's attention in both forms, and what each multiplies."""
    S, flops, seen = 4096, {}, {}
    with torch.device("meta"), torch.no_grad():
        attn = tb.MultiHeadLatentAttention(7168, 128, q_rank=1536, kv_rank=512, rope_dim=64,
                                           nope_dim=128, v_dim=128)  # fmt: skip
        tables = dict(zip(("cos", "sin"), tb.build_rope_cache(S + 1, 64)))
        for form in ("expanded", "absorbed"):
            spy, cache = Mock(side_effect=getattr(attn, form)), tb.KVCache()
            with patch.multiple(attn, expanded=spy, absorbed=spy):
                for length in (S, 1):
                    attn(torch.randn(1, length, 7168), causal=True, kv_cache=cache, **tables)
            for work, call in zip(("prefill", "step"), spy.call_args_list):
                with patch.object(tb, "attend", wraps=tb.attend) as attend:
                    with FlopCounterMode(display=False) as counter:
                        getattr(attn, form)(*call.args)
                flops[work, form] = counter.get_total_flops() / 1e9
            seen[form] = attend.call_args.args[:3]  # q, k, v of the step
    figure, ax = sheet(410)
    write(ax, 98, 20, "expanded", 10.5, weight="bold")
    write(ax, 292, 20, "absorbed", 10.5, weight="bold")
    H, latent, key = seen["absorbed"][0].shape[1], attn.kv_rank, attn.rope_dim

    def attention(x: float, form: str) -> Step:
        q, k, v = seen[form]
        heads, widths = k.shape[1], f"q {q.shape[-1]}, k {k.shape[-1]}, v {v.shape[-1]}"
        return Step(
            x, 160, f"attend: {heads} KV head{'s'[: heads - 1]}\n{widths}", BLUE, 170, 36, 10
        )

    steps = {
        "cache": Step(
            195, 50, f"cache, a token: latent {latent}, rotated key {key}", PURPLE, 364, 24, 10
        ),
        "up": Step(
            98,
            104,
            f"kv_up of all S tokens\n{H} × ({attn.nope_dim} + {attn.v_dim})",
            ORANGE,
            170,
            36,
            10,
        ),
        "query": Step(
            278,
            104,
            f"q, by kv_up's keys\n{H} × ({attn.nope_dim} to {latent})",
            ORANGE,
            140,
            36,
            10,
        ),
        "expanded": attention(98, "expanded"),
        "absorbed": attention(293, "absorbed"),
        "down": Step(
            293,
            216,
            f"out, by kv_up's values\n{H} × ({latent} to {attn.v_dim})",
            ORANGE,
            170,
            36,
            10,
        ),
        "o_proj": Step(195, 266, "o_proj", BLUE, 364, 24, 10),
    }
    draw_flow(ax, steps, [("cache", "up"), ("up", "expanded"), ("query", "absorbed"),
                          ("absorbed", "down"), ("expanded", "o_proj"), ("down", "o_proj")])  # fmt: skip
    wire(ax, (363, 62), (363, 142))
    named = {f"{work}, {form}": flops[work, form] for work, form in sorted(flops, reverse=True)}
    bars(chart(figure, 124, 308, 200, 84), named, [ORANGE, BLUE] * 2)
    write(ax, 195, 296, f"GFLOP of a layer at S = {S:,}, log scale", 10)
    return figure


def bars(ax: Axes, values: dict[str, float], colors: list[str], log: bool = True) -> None:
    """Labelled horizontal bars, the first on top."""
    ax.barh(list(values), list(values.values()), color=colors, log=log, height=0.7)
    for row, value in enumerate(values.values()):
        ax.annotate(f"{value:,.0f}" if value >= 100 else f"{value:.3g}", (value, row), (4, 0),
                    textcoords="offset points", va="center")  # fmt: skip
    ax.invert_yaxis()
    ax.tick_params(left=False, bottom=False, labelbottom=False, which="both")
    ax.spines["bottom"].set_visible(False)


def stream_growth() -> Figure:
    """RMS of the stream after each of 64 fresh blocks, for each topology."""
    depth, d_model = 64, 96
    cos, sin = tb.build_rope_cache(1, 12)
    makers = {
        "pre and post": (partial(tb.BranchNormDecoderBlock, d_model), {"cos": cos, "sin": sin}),
        "parallel": (partial(tb.ParallelDecoderBlock, d_model), {}),
        "Pre-LN": (partial(tb.ModernDecoderBlock, d_model), {"cos": cos, "sin": sin}),
        "Post-LN": (partial(tb.VanillaEncoderLayer2017, d_model), {}),
    }
    figure = card(330)
    ax = chart(figure, 34, 44, 232, 240)
    write(
        figure.axes[0],
        WIDTH / 2,
        22,
        "RMS of the stream, fresh blocks, one-token inputs",
        10.5,
        weight="bold",
    )
    depths, height = range(depth + 1), math.inf
    for (name, (make, options)), color in zip(makers.items(), (PURPLE, ORANGE, BLUE, GREEN)):
        torch.manual_seed(0)
        x = torch.randn(256, 1, d_model)
        sizes = [x.square().mean().sqrt().item()]
        with torch.no_grad():
            for _ in range(depth):
                x = make()(x, **options)
                sizes.append(x.square().mean().sqrt().item())
        ax.plot(depths, sizes, color=color, lw=2)
        height = min(height - 0.7, sizes[-1])  # names that would touch move apart
        ax.annotate(f"{name} {sizes[-1]:.1f}", (depth, height), (6, 0), color=color, va="center",
                    textcoords="offset points")  # fmt: skip
    ax.plot(depths, [math.sqrt(1 + 2 * n) for n in depths], color=INK, lw=1.2, ls=":")
    ax.annotate("dots: √(1 + 2l)", (34, 7.4), color=INK)
    ax.set(xlim=(0, depth), ylim=(0, 12), xticks=range(0, depth + 1, 16), xlabel="blocks")
    return figure


def routing() -> Figure:
    """Tokens per expert before and after the router has learned from the balance loss."""
    moe, n_experts = tb.MoEFFN(32, 8, 8), 8
    tokens = torch.randn(1024, 32) + 0.7 * torch.randn(32)  # what all share favours a few experts
    optimizer = torch.optim.Adam(moe.router.parameters(), lr=0.01)
    loads = {}
    for step in range(201):
        moe(tokens)
        if step in (0, 200):
            loads[f"after {step} steps on the balance loss"] = (
                moe.tokens_per_expert,
                moe.aux_loss.item(),
            )
        optimizer.zero_grad()
        moe.aux_loss.backward()
        optimizer.step()
    figure = card(360)
    for number, (title, (load, loss)) in enumerate(loads.items()):
        ax = chart(figure, 54, 44 + 165 * number, 318, 100)
        ax.bar(range(n_experts), load, color=BLUE if number else ORANGE, width=0.75)
        ax.axhline(len(tokens) / n_experts, color=INK, lw=1, ls="--")
        ax.set_title(f"{title}: {loss:.2f}", fontsize=10.5, fontweight="bold")
        ax.set(xticks=range(n_experts), xlabel="expert", ylabel="tokens", ylim=(0, 500))
    return figure


def online_softmax() -> Figure:
    """One row of scores read in tiles: running maximum, running sum, and what is shrunk between."""
    d_h, S, tile = 4, 16, 4
    q, k, v = 2 * torch.randn(1, d_h), torch.randn(S, d_h), torch.randn(S, 3)
    scores = (q @ k.T)[0] * d_h**-0.5
    largest, total, out = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(3)
    columns = []
    for part, values in zip(scores.split(tile), v.split(tile)):
        new = torch.maximum(largest, part.max())
        shrink, weights = (largest - new).exp(), (part - new).exp()
        total, out, largest = total * shrink + weights.sum(), out * shrink + weights @ values, new
        columns.append((largest, shrink, total))
    whole = tb.attend(q[None, None], k[None, None], v[None, None])[0, 0, 0]
    torch.testing.assert_close(out / total, whole)  # the row read at once gives the same

    figure, ax = sheet(300)
    write(ax, WIDTH / 2, 20, "one row of scores in four tiles", 10.5, weight="bold")
    plot = chart(figure, 74, 36, 304, 130)
    colors = [color for color in (BLUE, ORANGE, GREEN, PURPLE) for _ in range(tile)]
    plot.bar(range(S), scores, color=colors, width=0.8)
    plot.step([tile * n - 0.5 for n in range(S // tile + 1)], [columns[0][0], *(c[0] for c in columns)],
              color=INK, lw=1.5)  # fmt: skip
    plot.set(xlim=(-0.5, S - 0.5), xticks=[], ylabel="score")
    plot.spines["bottom"].set_visible(False)
    for row, name in enumerate(("max so far", "shrink by", "sum so far")):
        y = 194 + 28 * row
        write(ax, 10, y, name, 10, ha="left")
        for column, numbers in enumerate(columns):
            write(ax, 112 + 76 * column, y, f"{numbers[row]:.2f}", 10.5)
    write(ax, WIDTH / 2, 280, "sum = old sum × shrink + new weights", 10, GREY)
    return figure


def whole_model() -> Figure:
    """Token ids to logits, with the shapes of a real forward."""
    names, shapes = {3: "B", 7: "T", 96: "d", 50: "V", 1: "1"}, {}
    model = tb.DecoderOnlyLM(50)
    parts = {"embedding": model.embedding, "final norm": model.final_norm, "logits": model}
    parts |= {f"block {number}": block for number, block in enumerate(model.blocks)}
    for name, part in parts.items():
        part.register_forward_hook(
            lambda _, args, out, name=name: shapes.update({name: spell(out.shape, names)})
        )
    ids = torch.randint(50, (3, 7))
    with torch.no_grad():
        last = spell(model(ids, last_only=True).shape, names)
        model(ids)
    head = "head: the embedding again" if model.lm_head is None else "head"
    rows = {
        "ids": ("token ids\n" + spell(ids.shape, names), PALE),
        "embedding": ("embedding\n" + shapes["embedding"], GREEN),
        "first": ("block 1\n" + shapes["block 0"], BLUE),
        "dots": ("…", None),
        "block": ("block L\n" + shapes["block 1"], BLUE),
        "norm": ("final norm\n" + shapes["final norm"], GREEN),
        "head": (f"{head}\n{shapes['logits']}", ORANGE),
    }
    steps = {name: Step(195, 34 + 50 * row, text, color, 190, 34, 10)
             for row, (name, (text, color)) in enumerate(rows.items())}  # fmt: skip
    steps["train"] = Step(
        100, 392, f"training: loss on all T\n{shapes['logits']}", PALE, 170, 34, 10
    )
    steps["run"] = Step(290, 392, f"generating: the last one\n{last}", PALE, 170, 34, 10)
    figure, ax = sheet(424)
    draw_flow(ax, steps, [*itertools.pairwise(rows), ("head", "train"), ("head", "run")])
    return figure


def spell(shape: torch.Size, names: dict[int, str]) -> str:
    """A shape in the letters of its sizes."""
    return f"[{','.join(names.get(size, '?') for size in shape)}]"


FIGURES = {figure.__name__: figure for figure in (
    topologies, modern_block, layers_2017, gpt2_llama, masks, kv_sharing, rope, mla, stream_growth,
    routing, online_softmax, whole_model,
)}  # fmt: skip


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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="*", help="figures to draw, all by default")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="folder to write to"
    )
    options = parser.parse_args(argv)
    unknown = set(options.name) - set(FIGURES)
    if unknown:
        parser.error(f"no figure {', '.join(sorted(unknown))}: there are {', '.join(FIGURES)}")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # so that another machine's rounding cannot be seen
    try:
        with mpl.rc_context(STYLE):
            for name in options.name or FIGURES:
                torch.manual_seed(0)
                (options.out / f"{name}.svg").write_text(svg(FIGURES[name]()), encoding="utf-8")
    finally:
        torch.set_default_dtype(dtype)


if __name__ == "__main__":
    main()
