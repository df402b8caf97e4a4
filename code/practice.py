"""Write a piece of a Transformer from memory and be told what is wrong with it.

    python3 code/practice.py                         the exercises, and which you have solved
    python3 code/practice.py blank ModernBlock       a template to fill in: put it into a file
    python3 code/practice.py try mine.py             judges every exercise that mine.py defines

A judged file is executed, as the program of yours that it is. Values and gradients are compared
with the answers in whiteboard/ on drawn weights; names, packing and order of your parameters are
yours. A wrong piece is compared with the answer after planting known mistakes in it, one or two at
a time: the one that behaves like yours is named.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import heapq
import html
import itertools
import json
import linecache
import math
import os
import random
import re
import selectors
import signal
import sys
import textwrap
import time
import traceback
import types
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).resolve().parent
WHITEBOARD = HERE / "whiteboard"
NOTES = HERE.parent / "transformer_block_tutorial.md"

CLOSE = 1e-5  # of the largest value: people's norms, softmax and tables run in float32 somewhere
SECONDS = 8.0  # of computing, for their imports and for each exercise
PATIENCE = 5  # times as many seconds by the clock, when the machine has other things to do
LIKELY = 64  # assignments after which known mistakes are looked for, before others are tried
ASSIGNMENTS = 300  # tried before their parameters count as read
SEARCH = 2.0  # seconds of computing for them at the most
DEEPER = (0.2, 1.5)  # what a unit more speaks for an assignment: nearly by cost, nearly greedy
UNKNOWN = "no known mistake"
NAMING = 0.6  # seconds of computing for trying pairs of mistakes


# =============================================================================================
# The answers: their text, alone and with faults planted
# =============================================================================================


class Fault(NamedTuple):
    """A known mistake: in the text of an answer, old becomes new."""

    says: str
    old: str
    new: str


@functools.cache
def definitions() -> tuple[list[ast.stmt], dict[str, ast.stmt], list[str]]:
    """The outside imports, the definitions by name, and the lines of whiteboard/."""
    files = sorted(WHITEBOARD.glob("*.py"), key=lambda path: (path.name != "blocks.py", path.name))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports = [n for n in imports if not getattr(n, "module", "").startswith("whiteboard")]
    named = {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return imports, named, text.split("\n")


def names_used(node: ast.AST) -> set[str]:
    """The names that a definition reads."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


@functools.cache
def answer_source(name: str) -> str:
    """The answer with its imports and every definition it needs: a text that runs by itself."""
    imports, named, lines = definitions()
    needed, todo = {name}, [name]
    while todo:
        found = names_used(named[todo.pop()]) & set(named) - needed
        needed |= found
        todo += found
    nodes = [node for key, node in named.items() if key in needed]
    used = set().union(*map(names_used, nodes))
    heads = [ast.unparse(n) for n in imports if {a.asname or a.name for a in n.names} & used]
    starts = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 for node in nodes]
    texts = ["\n".join(lines[i : node.end_lineno]) for i, node in zip(starts, nodes)]
    standard = sorted({head for head in heads if "torch" not in head})
    others = list(dict.fromkeys(head for head in heads if "torch" in head))
    top = "\n\n".join("\n".join(part) for part in (standard, others) if part)
    return top + "\n\n\n" + "\n\n\n".join(texts) + "\n"


def planted(name: str, *faults: Fault) -> str:
    """The answer's text with faults in it; ValueError where an old text is not there once."""
    text = answer_source(name)
    for fault in faults:
        if text.count(fault.old) != 1:
            raise ValueError(f"{name}: {fault.old!r} stands {text.count(fault.old)} times")
        text = text.replace(fault.old, fault.new)
    return text


def execute(text: str, filename: str) -> dict[str, object]:
    """The namespace after running a text as a module of that name, which is not __main__."""
    module = types.ModuleType(re.sub(r"\W", "_", Path(filename).stem) or "mine")
    module.__file__ = filename
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up
    try:
        exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)
    finally:
        if before is not None:
            sys.modules[module.__name__] = before
    return module.__dict__


@functools.cache
def known(name: str, *faults: Fault) -> object:
    """The answer's function or class, with faults planted."""
    return execute(planted(name, *faults), "<whiteboard>")[name]


# =============================================================================================
# Cases: calls whose results are compared
# =============================================================================================


class Trouble(Exception):  # noqa: N818, it is a finding, not an error of ours
    """What is wrong with a call, in words."""


class Unjudged(Exception):  # noqa: N818
    """The answer itself fails in a case, which then says nothing of theirs."""


class TimeUp(BaseException):
    """Their code takes too long; no Exception, so that theirs does not swallow it."""


class Raised(NamedTuple):
    """An exception of theirs: how Python shows it, cut to their file."""

    lines: tuple[str, ...]


class Case(NamedTuple):
    """A call as shown, what it gives by name, and the letters of its sizes."""

    call: str
    run: Callable[[object], dict[str, object]]
    letters: Mapping[int, str] = types.MappingProxyType({})
    close: float = CLOSE


def called(function: Callable, *arguments: object) -> object:
    """What their function returns, which must leave its arguments and the generator alone."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    before = [t.detach().clone() for t in tensors]
    state = torch.get_rng_state()
    result = function(*arguments)
    if not torch.equal(torch.get_rng_state(), state):
        raise Trouble("it draws from the global generator (dropout, or a draw without generator=)")
    for tensor, old in zip(tensors, before):
        if tensor.shape != old.shape or not torch.equal(tensor, old):
            raise Trouble("it changes its input in place: the caller's tensor is another now")
    if result is None:
        raise Trouble("it returns None: is a `return` missing?")
    return result


def drawn(name: str, *shape: int) -> Tensor:
    """N(0, 1) in float64 from a generator of its own: the same name and shape, the same values."""
    seed = zlib.crc32(f"{name}{shape}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shown(value: object) -> str:
    """An argument as it stands in a case: the shape of a tensor, else the value."""
    return f" {list(value.shape)}" if isinstance(value, Tensor) else f"={value!r}"


class Shares(NamedTuple):
    """How often each id was drawn, [rows, V], in so many draws a row."""

    shares: Tensor
    draws: int

    def unlike(self, other: "Shares") -> tuple[str, ...] | None:
        """An id drawn far too often or too rarely, or never, or though it must not be."""
        rate = 1 / self.draws + 1 / other.draws
        for row, (want, have) in enumerate(zip(self.shares.tolist(), other.shares.tolist())):
            for token, (p, q) in enumerate(zip(want, have)):
                never = p == 0 and q > (0 if self.draws > 1000 else 0.05)
                never = never or (p > 0.05 and q == 0)
                if never or abs(p - q) > 4.5 * math.sqrt((p * (1 - p) + 0.01) * rate):
                    return (
                        f"id {token} of row {row} expected in {p:.1%} of the draws, got {q:.1%}",
                    )
        return None


def as_tensor(value: object) -> Tensor:
    """The result, which must be one tensor."""
    if isinstance(value, Tensor):
        return value
    raise Trouble(f"it must return one tensor, it returned {described(value)}")


def described(value: object) -> str:
    """A value of theirs in a few words."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def gradients(result: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Of a weighted sum of the result, by leaf."""
    if not result.requires_grad:
        raise Trouble("its result has no gradient: something detaches it, or no_grad is on")
    weighted = (result * drawn("loss", *result.shape).to(result.dtype)).sum()
    found = torch.autograd.grad(weighted, list(leaves.values()), allow_unused=True)
    return {f"the gradient of {name}": grad for name, grad in zip(leaves, found)}


def function_case(
    name: str, letters: str, sizes: dict[str, int], *, grads: bool = True,
    close: float = CLOSE, **arguments: object,
) -> Case:  # fmt: skip
    """A call of a function by position; its float tensors get gradients as well."""

    def run(function: Callable) -> dict[str, object]:
        given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        result = called(function, *given.values())
        outcome = {"the result": result}
        floats = {
            k: v.requires_grad_()
            for k, v in given.items()
            if grads and isinstance(v, Tensor) and v.is_floating_point()
        }
        if floats and isinstance(result, Tensor):
            outcome |= gradients(as_tensor(function(*given.values())), floats)
        return outcome

    call = ", ".join(f"{k}{shown(v)}" for k, v in arguments.items())
    return Case(f"{name}({call})", run, {size: letter for letter, size in sizes.items()}, close)


def outcome(case: Case, subject: object) -> dict[str, object]:
    """What a case gives: its results, or what is wrong in words, or what was raised."""
    try:
        return case.run(subject)
    except Trouble as trouble:
        return {"trouble": str(trouble)}
    except (Exception, SystemExit) as error:
        return {"raised": raised(error)}


THEIRS: set[str] = set()  # names of files that are being judged


def raised(error: BaseException) -> Raised:
    """The exception as Python shows it, cut to the last two frames in their file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in THEIRS]
    lines = [line for frame in traceback.format_list(frames[-2:]) for line in frame.splitlines()]
    lines = [line.strip("\n") for line in lines if set(line.strip()) - set("^~ ")]
    message = traceback.format_exception_only(type(error), error)
    if isinstance(error, SyntaxError):
        return Raised(tuple("".join(message).rstrip().split("\n")[-4:]))
    last = "".join(message).strip().split("\n")[0]
    return Raised((*lines, last[:300]))


FORGET: list[Callable] = []  # cache_clear of what their file caches


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The dtype of new tensors; tables that their code has cached are made anew in it."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        for forget in FORGET:
            forget()
        yield
    finally:
        torch.set_default_dtype(before)
        for forget in FORGET:
            forget()


def remember_caches(namespace: dict[str, object]) -> None:
    """Note the caches (functools.cache and the like) of their functions and methods."""
    FORGET.clear()
    for value in list(namespace.values()):
        members = vars(value).values() if isinstance(value, type) else ()
        FORGET.extend(
            one.cache_clear
            for one in (value, *members)
            if callable(getattr(one, "cache_clear", None))
        )


class Difference(NamedTuple):
    """Where two outcomes first differ, and how to say it."""

    where: str
    lines: tuple[str, ...]


def shape_in_letters(shape: Iterable[int], letters: dict[int, str]) -> str:
    return f"[{', '.join(letters.get(size, str(size)) for size in shape)}]"


def difference(expected: dict, got: dict, case: Case, exact: bool = False) -> Difference | None:
    """The first result of theirs that is not as expected, or None; exact compares costs too."""
    for problem in ("trouble", "raised"):
        if problem in got or problem in expected:
            if problem in got and problem in expected and kind_of(got) == kind_of(expected):
                return None
            found = got.get(problem)
            lines = found.lines if isinstance(found, Raised) else (str(found),)
            return Difference(problem, lines)
    for key, want in expected.items():
        have = got.get(key)
        lines = different(want, have, case, exact)
        if lines is not None:
            return Difference(key, lines)
    return None


def kind_of(found: dict) -> str:
    return found.get("trouble") or found["raised"].lines[-1]


def different(want: object, have: object, case: Case, exact: bool) -> tuple[str, ...] | None:
    """How two values differ, in words, or None."""
    if isinstance(want, Shares) and isinstance(have, Shares):
        return want.unlike(have)
    if isinstance(want, AtMost) and isinstance(have, int):
        worse = have != want if exact else have > want
        return (f"at most {int(want)}, got {int(have)}",) if worse else None
    if not isinstance(want, Tensor):
        if isinstance(have, Tensor) and have.numel() == 1:
            have = have.item()
        same = type(have) in (type(want), float, int) and have == want
        return None if same else (f"expected {want!r}, got {short(have)}",)
    if have is None:
        return ("expected a gradient, got none: nothing depends on it",)
    if not isinstance(have, Tensor):
        return (f"expected a tensor {list(want.shape)}, got {described(have)}",)
    if have.shape != want.shape:
        letters = case.letters
        return (
            f"expected shape {list(want.shape)} = {shape_in_letters(want.shape, letters)}, got"
            f" {list(have.shape)} = {shape_in_letters(have.shape, letters)}",
        )
    if have.dtype != want.dtype:
        return (f"expected {want.dtype}, got {have.dtype}",)
    if have.device != want.device:
        return (f"expected a result on {want.device}, got one on {have.device}",)
    gap = (have.detach().double() - want.detach().double()).abs()
    largest = want.detach().double().abs().nan_to_num(0).max() if want.numel() else 0
    limit = case.close * largest + 1e-12
    bad = ~(gap <= limit) & (have != want) & ~(have.isnan() & want.isnan())
    if want.dtype == torch.bool:
        bad = have != want
    if not bad.any():
        return None
    at = bad.nonzero()[0].tolist()
    place = f"[{', '.join(map(str, at))}]"
    return (f"at {place} expected {short(want[tuple(at)])}, got {short(have[tuple(at)])}",)


def short(value: object) -> str:
    """A value in a few characters."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(value, float):
        return f"{value:.6g}"
    text = repr(value) if isinstance(value, (int, bool, list, tuple, str)) else described(value)
    return text if len(text) < 80 else text[:77] + "..."


# =============================================================================================
# Parameters: which of theirs is which of the answer's
# =============================================================================================
#
# All numbers of an answer's weights lie in one flat vector. The layout of a parameter says which
# entries of that vector it holds: an int64 tensor of its shape. Layouts are made by cutting and
# joining tensors of places as one would cut and join the weights. So loading is indexing, gradients
# come back the same way, and an assignment fits when every place is used once.

# What a name may be called, by the last part of the answer's own name. Hints only: they order what
# is tried.
WORDS = {
    "q_proj": "q wq query queries qproj toq linearq lq",
    "k_proj": "k wk key keys kproj tok lk",
    "v_proj": "v wv value values val vproj tov lv",
    "o_proj": "o wo out output proj cproj oproj outproj tout dense wout lo mix merge fco final",
    "gate": "gate g wgate w1 gating wg gateproj fcgate act",
    "up": "up w3 u wup upproj lin value fcup fc1 w2 v",
    "down": "down w2 w3 d wdown downproj out fc2",
    "norm1": "1 attn attention input pre first sa in a",
    "norm2": "2 ffn mlp ff post second feed f m",
    "ln1": "1 attn attention input pre first sa self in a 0",
    "ln2": "2 ffn mlp ff post second feed cross ca enc f m",
    "ln3": "3 ffn mlp ff feed third f",
    "norm": "norm ln",
    "router": "router gate g wg switch",
    "q_nope": "nope c content",
    "q_rope": "rope r pe rot",
    "latent_down": "latent down c dkv kva compress a",
    "k_rope_proj": "rope r pe kr krope rot",
    "k_up": "k uk key knope nope",
    "v_up": "v uv value",
    "a": "a down",
    "b": "b up",
}
SCOPES = {
    "self_attn": "self masked causal sa attn1 mha1 slf 1",
    "cross_attn": "cross memory mem enc encoder src ca attn2 mha2 x c 2 encdec",
}
HEADS_IN_ROWS = ("q_proj", "k_proj", "v_proj", "q_nope", "q_rope", "k_up", "v_up")
# Kinds that people join into one matrix, and whether any order of them is read.
JOINS = (
    (("q_proj", "k_proj", "v_proj"), True),
    (("q_proj", "k_proj"), True),
    (("k_proj", "v_proj"), True),
    (("q_proj", "k_proj", "v_proj", "up"), False),
    (("gate", "up"), True),
    (("q_nope", "q_rope"), False),
    (("latent_down", "k_rope_proj"), False),
    (("k_up", "v_up"), False),
)


class Map(NamedTuple):
    """A linear map of the answer: places of its weight [out, in] and of its bias [out] or None.

    rows: the heads that lie in its rows, columns: those in its columns, None where there are none.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    rows: int | None = None
    columns: int | None = None

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def scope(self) -> str:
        return self.name.rpartition(".")[0]

    def head(self, i: int) -> "Map":
        """Rows, or columns, of one head."""
        if self.columns:
            return self._replace(weight=self.weight.chunk(self.columns, dim=1)[i], columns=None)
        bias = None if self.bias is None else self.bias.chunk(self.rows)[i]
        return self._replace(weight=self.weight.chunk(self.rows)[i], bias=bias, rows=None)


class Piece(NamedTuple):
    """Maps joined, or a vector: its layout in several forms, and what a fitting name would say."""

    key: str
    names: tuple[str, ...]  # of the maps
    forms: dict[str, Tensor]
    bias: Tensor | None
    index: int | None  # of the head or expert
    effort: float  # how unusual it is


class Unit(NamedTuple):
    """Parameters of theirs that belong together: a matrix with its bias, a norm, or a vector."""

    weight: str
    bias: str | None
    shape: tuple[int, ...]
    is_linear: bool  # an nn.Linear, so [out, in]


class Choice(NamedTuple):
    """A unit read as a piece: the layout of its parameters, and how little it speaks for it."""

    key: str
    layout: dict[str, Tensor]
    covers: int  # one bit of every byte for each place
    cost: float


def joined(parts: list[Tensor], heads: int | None) -> Tensor:
    """Tensors one below the other, or their rows taken in turns, head by head."""
    if heads is None:
        return torch.cat(parts)
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without its axes of 1, which layouts do not tell apart."""
    return tuple(size for size in shape if size != 1)


class Template:
    """The parameters of an answer at given sizes: drawn values, and all ways to lay them out."""

    def __init__(self, exercise: "Exercise", module: nn.Module, sizes: dict[str, int]):
        self.sizes, self.size = sizes, 0
        self.maps: dict[str, Map] = {}
        self.vectors: dict[str, Tensor] = {}
        self.layout: dict[str, Tensor] = {}  # of the answer's own parameters
        values = []
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in own.items():
            widths = exercise.joined(sizes).get(name, {}) if exercise.joined else {}
            if sum(widths.values()) != len(parameter):
                widths = {name: len(parameter)}
            parts = {}
            for part, rows in widths.items():
                shape = (rows, *parameter.shape[1:])
                parts[part] = torch.arange(self.size, self.size + math.prod(shape)).view(shape)
                self.size += parts[part].numel()
                values.append(self.drawn(part, shape))
            heads = None if len(parts) == 1 else sizes["n_heads"]
            self.layout[name] = joined(list(parts.values()), heads)
            self.vectors |= {part: p for part, p in parts.items() if p.ndim == 1}
            self.maps |= {part: self.map(part, p) for part, p in parts.items() if p.ndim == 2}
        for name in self.maps:
            bias = self.vectors.pop(name.removesuffix("weight") + "bias", None)
            self.maps[name] = self.maps[name]._replace(bias=bias)
        self.values = torch.cat(values)
        self.names = tuple((name, tuple(p.shape)) for name, p in self.layout.items())
        self.known_covers: dict[tuple[str, bool], int] = {}

    def map(self, name: str, places: Tensor) -> Map:
        """With the heads in its rows or columns, as its name tells."""
        found = Map(name.removesuffix(".weight"), places, None)
        heads = self.sizes.get("n_q_heads", self.sizes.get("n_heads"))
        rows = heads if found.kind in HEADS_IN_ROWS else None
        if found.kind in ("k_proj", "v_proj"):
            rows = self.sizes.get("n_kv_heads", heads)
        columns = heads if found.kind == "o_proj" else None
        fits = (rows and places.shape[0] % rows == 0, columns and places.shape[1] % columns == 0)
        return found._replace(rows=rows if fits[0] else None, columns=columns if fits[1] else None)

    @staticmethod
    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        """Values that leave scores unsaturated, norms unlike 1 and biases unlike 0."""
        values = drawn(name, *shape)
        if name.endswith("bias"):
            values = 0.3 * values
        elif len(shape) == 1:
            values = 1 + 0.5 * torch.tanh(values)
        elif "router" not in name:
            values = values * shape[-1] ** -0.5
        return values.flatten()

    @functools.cached_property
    def pieces(self) -> dict[tuple[int, ...], list[tuple[Piece, str]]]:
        """All pieces by the shape of each of their forms."""
        found = defaultdict(list)
        for piece in self.all_pieces():
            seen = set()
            for form, places in piece.forms.items():
                shape = squeezed(places.shape)
                small = places.numel() < 10_000  # of a real model every form is listed
                same = (shape, tuple(places.flatten().tolist())) if small else form
                if same not in seen:
                    found[shape].append((piece, form))
                seen.add(same)
        return found

    def all_pieces(self) -> Iterator[Piece]:
        groups = defaultdict(dict)
        for one in self.maps.values():
            groups[one.scope][one.kind] = one
        for scope, group in groups.items():
            index = next((int(part) for part in scope.split(".") if part.isdigit()), None)
            for one in group.values():
                yield from self.joins([one], index, 0.0)
            wider = {**groups.get("", {}), **group}
            for kinds, any_order in JOINS:
                if set(kinds) <= set(wider) and set(kinds) & set(group):
                    members = [wider[kind] for kind in kinds]
                    orders = itertools.permutations(members) if any_order else [members]
                    for number, order in enumerate(orders):
                        yield from self.joins(list(order), index, 0.2 + 0.1 * number)
            for i in range(max([one.rows or one.columns or 0 for one in group.values()])):
                cut = {
                    kind: one.head(i)
                    for kind, one in group.items()
                    if i < (one.rows or one.columns or 0)
                }
                for one in cut.values():
                    yield from self.joins([one], i, 0.5, f"head {i} of ")
                for two in (("q_nope", "q_rope"), ("k_up", "v_up")):
                    if set(two) <= set(cut):
                        maps = [cut[kind] for kind in two]
                        yield from self.joins(maps, i, 0.6, f"head {i} of ")
                if {"q_proj", "k_proj", "v_proj"} <= set(cut):
                    three = [cut[kind] for kind in ("q_proj", "k_proj", "v_proj")]
                    for number, order in enumerate(itertools.permutations(three)):
                        yield from self.joins(list(order), i, 0.6 + 0.1 * number, f"head {i} of ")
        experts = [group for scope, group in groups.items() if re.search(r"\.\d+$", scope)]
        for kinds in (("gate",), ("up",), ("down",), ("gate", "up"), ("up", "gate")):
            if experts and all(set(kinds) <= set(group) for group in experts):
                yield self.stack([[group[kind] for kind in kinds] for group in experts])
        for name, places in self.vectors.items():
            if (
                name.endswith(".weight")
                and (norm := name.removesuffix("weight")) + "bias" in self.vectors
            ):
                bias = self.vectors[norm + "bias"]
                stem = (norm.removesuffix("."),)
                yield Piece(norm + " pair", stem, {"": places}, bias, None, 0.0)
                yield Piece(norm + " turned pair", stem, {"": bias}, places, None, 1.0)
            yield Piece(name, (name,), {"": places}, None, None, 0.0)

    @staticmethod
    def joins(maps: list[Map], index: int | None, effort: float, tag: str = "") -> Iterator[Piece]:
        """Maps one below the other, head by head, row by row, or stacked."""
        names = tuple(one.name for one in maps)
        kinds, first = {one.kind for one in maps}, maps[0]
        heads = [one.rows for one in maps]
        ways = {"": None}
        if len(maps) > 1 and all(heads):
            ways["by head "] = min(heads)
        if len(maps) > 1 and len({one.weight.shape for one in maps}) == 1:
            ways["by row "] = len(first.weight)
        if "q_nope" in kinds and len(maps) > 1 and first.rows:
            del ways[""]
        for way, n in ways.items():
            weight = joined([one.weight for one in maps], n)
            forms = {"": weight, "T": weight.T}
            rows = heads[0] if len(maps) == 1 else n
            if rows and way != "by row ":
                cut = weight.unflatten(0, (rows, -1))
                forms |= {"heads": cut, "heads T": cut.mT, "T heads": cut.permute(2, 0, 1)}
            if len(maps) == 1 and first.columns:
                cut = weight.unflatten(1, (first.columns, -1))  # [out, H, d_h]
                forms |= {
                    "heads": cut.permute(1, 2, 0),
                    "heads T": cut.transpose(0, 1),
                    "T heads": cut,
                }
            if way == "by row ":
                stacked = torch.stack([one.weight for one in maps])
                forms |= {"stack": stacked, "stack T": stacked.mT}
                if heads[0]:
                    cut = stacked.unflatten(1, (heads[0], -1))
                    forms |= {"stack heads": cut, "stack heads T": cut.mT}
            bias = None
            if all(one.bias is not None for one in maps):
                bias = joined([one.bias for one in maps], n)
                biases = tuple(f"{name}.bias" for name in names)
                yield Piece(
                    f"{tag}bias of {way}{'|'.join(names)}", biases, {"": bias}, None, index, effort
                )
            yield Piece(f"{tag}{way}{'|'.join(names)}", names, forms, bias, index, effort)

    @staticmethod
    def stack(rows: list[list[Map]]) -> Piece:
        """The experts' matrices of one kind, or gate and up, along a first axis."""
        whole = torch.stack(
            [torch.cat([one.weight for one in row]) for row in rows]
        )  # [E, out, in]
        forms = {"stack": whole, "stack T": whole.mT, "flat": whole.flatten(0, 1)}
        forms |= {"flat T": forms["flat"].T, "flat in": whole.mT.flatten(0, 1)}
        forms |= {"T stack": whole.permute(2, 0, 1), "first in": whole.permute(1, 0, 2)}
        if len(rows[0]) == 2:
            turns = [joined([one.weight for one in row], len(row[0].weight)) for row in rows]
            forms |= {"turns": torch.stack(turns), "turns T": torch.stack(turns).mT}
            four = whole.unflatten(1, (2, -1))
            forms |= {
                "four": four,
                "four T": four.mT,
                "two": four.transpose(0, 1),
                "two T": four.mT.transpose(0, 1),
            }
        names = tuple(one.name for one in rows[0])
        return Piece(f"stack of {'|'.join(names)}", names, forms, None, None, 0.1 * len(rows[0]))

    def covers(self, *layouts: Tensor) -> int:
        """The places of layouts as a number, so that exact covers are found with & and |."""
        mask = torch.zeros(self.size, dtype=torch.uint8)
        for places in layouts:
            mask[places.flatten()] = 1
        return int.from_bytes(bytes(mask.tolist()), "big")

    def covered(self, piece: Piece, with_bias: bool) -> int:
        """The places of a piece, in whatever form, with its bias or without."""
        key = (piece.key, with_bias)
        if key not in self.known_covers:
            layouts = [next(iter(piece.forms.values())), *([piece.bias] if with_bias else [])]
            self.known_covers[key] = self.covers(*layouts)
        return self.known_covers[key]


PAIRS = (("weight", "bias"), ("Weight", "Bias"), ("w", "b"), ("W", "b"), ("W", "B"))
PAIRS += (("gamma", "beta"), ("scale", "shift"), ("scale", "bias"), ("gain", "bias"), ("g", "b"))
PAIRS += (("alpha", "bias"), ("alpha", "beta"), ("a_2", "b_2"), ("a", "b"), ("gamma", "bias"))


def units_of(module: nn.Module) -> list[Unit]:
    """Their trainable parameters, matrices with their biases; single numbers are left alone."""
    units = []
    for path, part in module.named_modules():
        own = {name: p for name, p in part.named_parameters(path, recurse=False) if p.numel() > 1}
        own = {name: p for name, p in own.items() if p.requires_grad}
        pairs: dict[str, str] = {}
        for name, p in sorted(own.items(), key=lambda item: -item[1].ndim):
            head, dot, last = name.rpartition(".")
            for old, new in PAIRS:
                other = head + dot + last.replace(old, new)
                if other == name or other not in own or {name, other} & {*pairs.values()}:
                    continue
                if old in ("a", "g") and last != old:  # letters of many other names
                    continue
                vector = own[other].ndim == 1 or own[other].ndim < p.ndim
                if vector and (p.ndim > 1 or p.shape == own[other].shape):
                    pairs.setdefault(name, other)
        for name, p in own.items():
            if name not in pairs.values():
                is_linear = isinstance(part, nn.Linear)
                units.append(Unit(name, pairs.get(name), tuple(p.shape), is_linear))
    return units


def split_pairs(units: list[Unit], module: nn.Module) -> list[Unit]:
    """The units with every vector by itself, for names that only look like pairs."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    alone = []
    for unit in units:
        alone.append(unit._replace(bias=None))
        if unit.bias:
            alone.append(Unit(unit.bias, None, shapes[unit.bias], False))
    return alone


@functools.cache
def tokens(name: str) -> set[str]:
    """The words of a name, and its last part as one word."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    parts = [re.sub(r"\W|_", "", part) for part in name.split(".")]
    return {word.lower() for word in (*words, *parts)}


@functools.cache
def numbers(name: str) -> set[int]:
    """The numbers that stand alone in a name: 3 and 0 in experts.3.mlp_0."""
    return {int(n) for n in re.findall(r"(?:^|[._])(\d+)(?=[._]|$)", name)}


class Reading:
    """All assignments of a template's pieces to their units, likely ones first."""

    def __init__(
        self, template: Template, module: nn.Module, flags: Callable | None, turned: bool
    ):  # fmt: skip
        self.template, self.flags = template, flags
        self.turned = turned  # their square raw matrices are [in, out], as in x @ W
        self.before: dict[str, str] = {}  # what units are at another size
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.units = units_of(module)
        if not all(any(True for _ in self.fitting(unit)) for unit in self.units):
            self.units = split_pairs(self.units, module)

    def fitting(self, unit: Unit) -> Iterator[tuple[Piece, str, dict[str, Tensor]]]:
        """The pieces of a unit's shape, with their form and the layout they give."""
        for piece, form in self.template.pieces.get(squeezed(unit.shape), []):
            if unit.is_linear and form:
                continue
            if self.is_square(unit) and form == ("" if self.turned else "T"):
                continue
            if piece.index is not None and self.misnumbered(unit, piece.index):
                continue
            layout = {unit.weight: piece.forms[form].reshape(unit.shape)}
            if unit.bias:
                wanted = self.shapes[unit.bias]
                if piece.bias is None or piece.bias.numel() != math.prod(wanted):
                    continue
                layout[unit.bias] = piece.bias.reshape(wanted)
            yield piece, form, layout

    def misnumbered(self, unit: Unit, index: int) -> bool:
        """Whether a unit says by its number that it is another head or expert.

        Read otherwise, a wrong wiring of heads or experts would be a renaming. Numbers count where
        all units of the shape have one and none goes past the heads or experts there are.
        """
        same = [numbers(other.weight) for other in self.units if other.shape == unit.shape]
        pieces = self.template.pieces[squeezed(unit.shape)]
        count = 1 + max(piece.index for piece, _ in pieces if piece.index is not None)
        trusted = all(same) and max(map(max, same)) < count
        return trusted and index not in numbers(unit.weight)

    def as_before(self, keys: dict[str, str]) -> dict[str, Tensor] | None:
        """The layout in which every unit is the piece that it is at another size, if it fits."""
        layout: dict[str, Tensor] = {}
        for unit in self.units:
            found = [
                places
                for piece, form, places in self.fitting(unit)
                if f"{piece.key} {form}" == keys.get(unit.weight)
            ]
            if not found:
                return None
            layout |= found[0]
        places = torch.cat([places.flatten() for places in layout.values()])
        return layout if len(places) == self.template.size == len(places.unique()) else None

    @functools.cached_property
    def options(self) -> list[list[Choice]]:
        return [self.choices(unit) for unit in self.units]

    def choices(self, unit: Unit) -> list[Choice]:
        """What a unit may be; the cost says how badly its name, order and gradients fit."""
        unit_flags, place_flags = self.flags() if self.flags else ({}, torch.empty(0))
        found = []
        same = [other for other in self.units if squeezed(other.shape) == squeezed(unit.shape)]
        fitting = list(self.fitting(unit))
        first = list(dict.fromkeys(piece.names for piece, _, _ in fitting))
        for piece, form, layout in fitting:
            cost = piece.effort + self.name_cost(unit, piece)
            cost += 0.03 * abs(same.index(unit) - first.index(piece.names))
            if unit.weight in unit_flags:
                flags = place_flags[:, layout[unit.weight]]
                share = (flags != unit_flags[unit.weight]).double().flatten(1).mean(dim=1)
                cost += 5 * share.sum().item()
            if self.before.get(unit.weight) == f"{piece.key} {form}":
                cost -= 3
            covers = self.template.covered(piece, unit.bias is not None)
            found.append(Choice(f"{piece.key} {form}", layout, covers, cost))
        return sorted(found, key=lambda choice: choice.cost)

    def is_square(self, unit: Unit) -> bool:
        """Whether a matrix of their own may be [out, in] or [in, out] by its shape."""
        return not unit.is_linear and len(unit.shape) == 2 and unit.shape[0] == unit.shape[1]

    def name_cost(self, unit: Unit, piece: Piece) -> float:
        """0 where the name says what the piece is, more where it says nothing or another."""
        words, last = (
            tokens(unit.weight),
            tokens(unit.weight.removesuffix(".weight").rpartition(".")[2]),
        )
        kinds = [name.removesuffix(".bias").removesuffix(".weight") for name in piece.names]
        scopes, kinds = zip(*[(k.rpartition(".")[0], k.rpartition(".")[2]) for k in kinds])
        cost = 0.0
        if len(kinds) > 1:
            cost -= 0.3 * any("".join(k[0] for k in kinds) in word for word in last)
        else:
            own = set(WORDS.get(kinds[0], "").split())
            others = [
                WORDS.get(m.kind, "").split()
                for m in self.template.maps.values()
                if m.kind != kinds[0]
            ]
            if not self.template.maps.get(piece.names[0]):
                others = [
                    WORDS.get(v.removesuffix(".weight"), "").split() for v in self.template.vectors
                ]
            others = set(itertools.chain(*others)) - own
            cost += 0.0 if own & last else 0.2 if own & words else 0.5
            cost += 0.4 if others & last else 0.1 if others & words else 0.0
        if piece.names[0].endswith(".bias") and not {"bias", "b", "beta"} & {w[:4] for w in words}:
            cost += 0.3
        for scope, hints in SCOPES.items():
            if set(hints.split()) & words:
                cost += 0.0 if scope in scopes[0].split(".") or "." not in piece.names[0] else 0.4
        digits = [int(word) for word in words if word.isdigit()]
        if piece.index is not None and digits:
            cost += 0.0 if piece.index in digits else 1.0
        return cost

    def assignments(
        self, until: float, deeper: float
    ) -> Iterator[tuple[dict[str, Tensor], tuple] | None]:
        """Layouts of all their parameters, each place used once, about in the order of cost."""
        if not self.options or not all(self.options):
            return
        full = self.template.covers(torch.arange(self.template.size))
        order = sorted(range(len(self.options)), key=lambda i: len(self.options[i]))
        options = [self.options[i] for i in order]
        least = [0.0]  # what the units that are left cost at the least
        for choices in reversed(options):
            least.insert(0, least[0] + choices[0].cost)
        count = itertools.count()
        heap = [(least[0], 0, next(count), 0, ())]
        for turn in itertools.count(1):
            if not heap or (turn % 64 == 0 and time.process_time() > until):
                return
            if turn % 256 == 0:
                yield None  # the other streams' turn
            cost, depth, _, covered, chosen = heapq.heappop(heap)
            depth = -depth
            if depth == len(options):
                if covered == full:
                    layout = {k: v for choice in chosen for k, v in choice.layout.items()}
                    keys = {next(iter(choice.layout)): choice.key for choice in chosen}
                    yield layout, (self.turned, tuple(sorted(keys.items())))
                continue
            spent = cost - least[depth] + deeper * depth
            for choice in options[depth]:
                if not covered & choice.covers:
                    total = spent + choice.cost + least[depth + 1] - deeper * (depth + 1)
                    state = (
                        total,
                        -depth - 1,
                        next(count),
                        covered | choice.covers,
                        (*chosen, choice),
                    )
                    heapq.heappush(heap, state)


# =============================================================================================
# Subjects: what a case is run on
# =============================================================================================


class Loaded(NamedTuple):
    """A module that holds the drawn weights, and where each of them lies."""

    module: nn.Module
    layout: dict[str, Tensor]
    template: Template

    def gradient(self) -> Tensor:
        """Of all places, from the parameters; none counts as zero."""
        parameters = dict(self.module.named_parameters())
        flat = torch.zeros(self.template.size, dtype=torch.float64)
        for name, places in self.layout.items():
            if (grad := parameters[name].grad) is not None:
                flat[places] = grad.double()
        return flat


def load(module: nn.Module, layout: dict[str, Tensor], values: Tensor) -> None:
    """Write values into the parameters by their layout."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, places in layout.items():
            parameters[name].copy_(values[places])
            parameters[name].grad = None


def key_of(sizes: dict[str, int]) -> tuple:
    return tuple(sizes.items())


class Known:
    """The answer's class, or one with a fault, with the drawn weights in it."""

    def __init__(self, exercise: "Exercise", cls: type):
        self.exercise, self.cls = exercise, cls
        self.modules: dict[tuple, nn.Module] = {}
        self.templates: dict[tuple, Template] = {}

    def template(self, sizes: dict[str, int]) -> Template:
        if key_of(sizes) not in self.templates:
            module = self.exercise.build(self.cls, sizes)
            self.templates[key_of(sizes)] = Template(self.exercise, module, sizes)
        return self.templates[key_of(sizes)]

    def make(self, sizes: dict[str, int]) -> Loaded:
        template = self.template(sizes)
        key = (*key_of(sizes), torch.get_default_dtype())
        if key not in self.modules:
            self.modules[key] = self.exercise.build(self.cls, sizes)
        load(self.modules[key], template.layout, template.values)
        return Loaded(self.modules[key], template.layout, template)


class Theirs:
    """Their class, its parameters read by an assignment found at one size and used at all."""

    def __init__(self, exercise: "Exercise", cls: type, like: Known):
        self.exercise, self.cls, self.like = exercise, cls, like
        self.seconds, self.all_tried = SEARCH, False
        self.modules: dict[tuple, nn.Module] = {}
        self.readings: dict[tuple, dict[tuple, Reading]] = {}
        self.layouts: dict[tuple, dict[str, Tensor]] = {}
        self.keys: tuple = ()

    def built(self, sizes: dict[str, int]) -> nn.Module:
        """One module a size and dtype, run once so that lazy parameters are there."""
        key = (*key_of(sizes), torch.get_default_dtype())
        if key not in self.modules:
            module = self.exercise.build(self.cls, sizes)
            if not isinstance(module, nn.Module):
                raise Trouble(f"it must be an nn.Module, it is {described(module)}")
            with torch.no_grad():
                self.exercise.probe(module, sizes)
            self.modules[key] = module
        return self.modules[key]

    def reading(self, sizes: dict[str, int], turned: bool = True, flags: bool = False) -> Reading:
        """Of their parameters: square raw matrices as [in, out] or not, gradients used or not."""
        ways = self.readings.setdefault(key_of(sizes), {})
        if (turned, flags, self.keys) not in ways:
            template, module = self.like.template(sizes), self.built(sizes)

            @functools.cache
            def probed() -> tuple[dict, Tensor]:
                return self.exercise.flags(self.like.make(sizes), module, sizes)

            reading = Reading(template, module, probed if flags else None, turned)
            reading.before = dict(self.keys[1]) if self.keys else {}
            ways[turned, flags, self.keys] = reading
        return ways[turned, flags, self.keys]

    def assignments(self, sizes: dict[str, int]) -> Iterator[tuple[dict[str, Tensor], tuple]]:
        """By names alone and with what gradients tell, of raw matrices both ways, in turns.

        What gradients tell is right where theirs is right; where it is wrong, names say more.
        """
        first, seen = self.reading(sizes), set()
        square = any(first.is_square(unit) for unit in first.units)
        ways = itertools.product((True, False) if square else (True,), (False, True), DEEPER)
        until = time.process_time() + self.seconds
        streams = [self.reading(sizes, *way).assignments(until, deeper) for *way, deeper in ways]
        for several in itertools.zip_longest(*streams):
            for one in several:
                if one is not None and one[1] not in seen:
                    seen.add(one[1])
                    yield one
        self.all_tried = time.process_time() < until

    def assign(self, sizes: dict[str, int], layout: dict[str, Tensor], keys: tuple) -> None:
        self.layouts, self.keys = {key_of(sizes): layout}, keys

    def layout(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        """The assignment at these sizes: the same pieces, or, where units differ, one that fits."""
        if key_of(sizes) not in self.layouts:
            turned, keys = self.keys
            layout = self.reading(sizes, turned).as_before(dict(keys))
            self.layouts[key_of(sizes)] = self.searched(sizes) if layout is None else layout
        return self.layouts[key_of(sizes)]

    def searched(self, sizes: dict[str, int]) -> dict[str, Tensor]:
        """The first assignment whose output is the answer's, else the likeliest."""
        wanted = self.exercise.first(self.like.make(sizes).module, sizes)
        template, module, likeliest = self.like.template(sizes), self.built(sizes), None
        for layout, _ in itertools.islice(self.assignments(sizes), 200):
            likeliest = layout if likeliest is None else likeliest
            load(module, layout, template.values)
            if near(wanted, self.exercise.first(module, sizes)):
                return layout
        if likeliest is None:
            raise Trouble("its parameters have another form at these sizes")
        return likeliest

    def fill(self, module: nn.Module, sizes: dict[str, int], weights: dict[str, Tensor]) -> None:
        """Write weights, by the names of the answer's state dict, into a module of these sizes."""
        template = self.like.template(sizes)
        values = torch.zeros(template.size, dtype=next(iter(weights.values())).dtype)
        for name, places in template.layout.items():
            values[places] = weights[name]
        load(module, self.layout(sizes), values)

    def gradient_in_words(self, line: str) -> str:
        """A place in the flat gradient as an entry of their parameter."""
        place = int(re.search(r"\[(\d+)", line)[1])
        sizes = self.exercise.sizes[0]
        parameters = dict(self.built(sizes).named_parameters())
        for name, places in self.layout(sizes).items():
            at = (places == place).nonzero()
            if len(at):
                if parameters[name].grad is None:
                    return f"{name} gets no gradient: nothing depends on it"
                where = f"[{', '.join(map(str, at[0].tolist()))}]"
                return f"the gradient of {name}: " + re.sub(r"at \[\d+\]", f"at {where}", line)
        return line

    def make(self, sizes: dict[str, int]) -> Loaded:
        module, layout = self.built(sizes), self.layout(sizes)
        template = self.like.template(sizes)
        load(module, layout, template.values)
        return Loaded(module, layout, template)


def near(want: Tensor | None, have: object) -> bool:
    """Whether an output is another's, within what float32 inside may change."""
    if want is None or not isinstance(have, Tensor) or have.shape != want.shape:
        return False
    return bool(((have - want).abs() <= CLOSE * want.abs().max()).all())


# =============================================================================================
# Exercises: what is asked, and the cases each is judged by
# =============================================================================================


class Exercise:
    """A function to write: its level, what it asks, where it is explained, and its cases."""

    joined: Callable | None = None

    def __init__(
        self, name: str, level: int, demo: str, section: str, asks: str, template: str,
        cases: Callable[[], list[Case]],
    ):  # fmt: skip
        self.name, self.level, self.demo, self.section = name, level, demo, section
        self.asks, self.template, self.make_cases = asks, template, cases

    @functools.cached_property
    def cases(self) -> list[Case]:
        return self.make_cases()

    def known(self, *faults: Fault) -> object:
        """What a case is run on for the answer, with faults in it."""
        return known(self.name, *faults)


class AtMost(int):
    """A cost: what is less is right too."""


def floating_tensors(cache: object) -> dict[str, Tensor]:
    """Everything of a cache that may hold numbers, by path; views of one storage count once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def visit(path: str, value: object) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[path] = value
            return
        if id(value) in seen or isinstance(value, (type, types.ModuleType, str)):
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            value = {**dict(value.named_buffers()), **vars(value)}
            value = {k: v for k, v in value.items() if not k.startswith("_")}
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, (list, tuple, set)):
            items = list(enumerate(value))
        else:
            items = list(getattr(value, "__dict__", {}).items())
            items += [(k, getattr(value, k, None)) for k in getattr(value, "__slots__", ())]
        for key, item in items:
            visit(f"{path}.{key}", item)

    visit("", cache)
    largest: dict[int, str] = {}
    for path, tensor in found.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage not in largest or found[largest[storage]].numel() < tensor.numel():
            largest[storage] = path
    return {path: found[path].detach() for path in largest.values()}


def gained(before: dict[str, Tensor], after: dict[str, Tensor]) -> int:
    """Numbers that are new or changed; what was taken beforehand and left alone is free."""
    count = 0
    for path, tensor in after.items():
        old = before.get(path)
        if old is not None and old.shape == tensor.shape:
            count += int(((old != tensor) & ~(old.isnan() & tensor.isnan())).sum())
        else:
            count += max(0, tensor.numel() - (0 if old is None else old.numel()))
    return count


class ModuleExercise(Exercise):
    """A class to write. style says what forward takes and returns, sizes[0] is the usual case."""

    def __init__(
        self, name: str, level: int, demo: str, section: str, asks: str, template: str, *,
        style: str, sizes: list[dict[str, int]], joined: Callable | None = None,
    ):  # fmt: skip
        super().__init__(name, level, demo, section, asks, template, self.module_cases)
        self.style, self.sizes, self.joined = style, sizes, joined

    def build(self, cls: type, sizes: dict[str, int]) -> nn.Module:
        return cls(*sizes.values())

    def known(self, *faults: Fault) -> Known:
        return known_module(self.name, *faults)

    # What goes in and comes out

    def inputs(self, sizes: dict[str, int], B: int, T: int, scale: float = 1.0) -> list[Tensor]:
        d = sizes["d_model"]
        x = [scale * drawn("x", B, T, d)]
        if self.style == "memory":
            x.append(drawn("memory", B, 7, d))
        return [tensor.to(torch.get_default_dtype()) for tensor in x]

    def results(
        self, module: nn.Module, *inputs: object, cache: tuple = (), guarded: bool = True
    ) -> dict[str, object]:
        """The outputs by name, and the cache under its own; what is handed in as one is theirs."""

        def forward(*inputs: object) -> object:
            return module(*inputs, *cache)

        returned = called(forward, *inputs) if guarded else forward(*inputs)
        if self.style not in ("cached", "balance"):
            return {"y": as_tensor(returned)}
        second = "cache" if self.style == "cached" else "balance_loss"
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise Trouble(f"forward must return (y, {second}), it returned {described(returned)}")
        y, rest = returned
        if self.style == "balance" and isinstance(rest, Tensor) and rest.numel() == 1:
            rest = rest.reshape(())
        return {"y": as_tensor(y), second: rest}

    def probe(self, module: nn.Module, sizes: dict[str, int]) -> None:
        self.results(module, *self.inputs(sizes, 2, 5), guarded=False)

    def first(self, module: nn.Module, sizes: dict[str, int]) -> Tensor | None:
        """The output of one full pass, None where it raises."""
        try:
            with torch.no_grad():
                return self.results(module, *self.inputs(sizes, 2, 5), guarded=False)["y"]
        except (Exception, SystemExit):
            return None

    def flags(self, like: Loaded, module: nn.Module, sizes: dict[str, int]) -> tuple[dict, Tensor]:
        """Which entries of parameters do not matter for one token, one key, an empty memory …

        That tells q from k, both from v and o, and the self-attention's maps from the others,
        whatever their names are. A bool by parameter and probe, and [probes, places].
        """
        nothing = {}, torch.zeros(0, like.template.size, dtype=torch.bool)
        if self.style == "balance" or "top_k" in sizes:
            return nothing
        x, *rest = self.inputs(sizes, 2, 5)
        last_empty = torch.cat((x[:, :-1], torch.zeros_like(x[:, -1:])), dim=1)
        probes = [(x[:, :1], *rest), (last_empty, *rest)]
        if self.style == "memory":
            probes += [(x, rest[0][:, :1]), (x, torch.zeros_like(rest[0]))]
        if self.style in ("memory", "masked"):
            probes.append((torch.zeros_like(x), *rest))

        def unused(part: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            part.zero_grad()
            y = self.results(part, *inputs, guarded=False)["y"]
            (y[:, -1] * drawn("loss", *y[:, -1].shape)).sum().backward()

        flat, theirs = [], defaultdict(list)
        for inputs in probes:
            unused(like.module, inputs)
            flat.append(like.gradient().abs() < 1e-9)
            try:
                unused(module, inputs)
            except (Exception, SystemExit):
                return nothing
            for name, p in module.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                theirs[name].append(grad.abs() < 1e-9)
        module.zero_grad()
        return {name: torch.stack(masks) for name, masks in theirs.items()}, torch.stack(flat)

    # Cases

    def call(self, sizes: dict[str, int], inputs: Iterable[object], more: str = "") -> str:
        names = {"memory": ("x", "memory"), "masked": ("x", "key_padding_mask")}
        given = zip(names.get(self.style, ("x",)), inputs)
        made = ", ".join(f"{key}={size}" for key, size in sizes.items())
        return f"{self.name}({made})({', '.join(f'{k}{shown(v)}' for k, v in given)}){more}"

    def letters(self, sizes: dict[str, int], B: int, T: int) -> dict[int, str]:
        return {7: "S", sizes["d_model"]: "d", T: "T", B: "B"}

    def full(self, sizes: dict[str, int], B: int, T: int, scale: float = 1.0,
             keep: Tensor | None = None) -> Case:  # fmt: skip
        """One pass over T tokens."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            loaded = subject.make(sizes)
            inputs = self.inputs(sizes, B, T, scale)
            inputs += [] if keep is None else [keep]
            found = self.results(loaded.module, *inputs)
            found.pop("cache", None)
            if keep is not None and found["y"].shape == inputs[0].shape:  # padding rows are free
                found["y"] = found["y"].masked_fill(~keep[..., None], 0)
            return found

        inputs = [*self.inputs(sizes, B, T), *([] if keep is None else [keep])]
        more = f" with x of about {scale}" if scale != 1 else ""
        return Case(self.call(sizes, inputs, more), run, self.letters(sizes, B, T))

    def single(self, sizes: dict[str, int]) -> Case:
        """In float32, which must come back."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            with default_dtype(torch.float32):
                loaded = subject.make(sizes)
                found = self.results(loaded.module, *self.inputs(sizes, 2, 5))
            found.pop("cache", None)
            return found

        more = " in float32"
        call = self.call(sizes, self.inputs(sizes, 2, 5), more)
        return Case(call, run, self.letters(sizes, 2, 5), 1e-3)

    def backward(self, sizes: dict[str, int], T: int = 5) -> Case:
        """Gradients of the inputs and of all parameters."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            loaded = subject.make(sizes)
            loaded.module.zero_grad()
            inputs = [x.requires_grad_() for x in self.inputs(sizes, 2, T)]
            found = self.results(loaded.module, *inputs)
            y = found["y"]
            if not y.requires_grad:
                raise Trouble("y has no gradient: something detaches it, or no_grad is on")
            loss = (y * drawn("loss", *y.shape)).sum()
            if isinstance(found.get("balance_loss"), Tensor):
                loss = loss + 3 * found["balance_loss"]
            loss.backward()
            names = ("x", "memory")
            outcome = {f"the gradient of {n}": i.grad for n, i in zip(names, inputs)}
            return outcome | {"the gradient of the parameters": loaded.gradient()}

        call = self.call(sizes, self.inputs(sizes, 2, T), " backward")
        return Case(call, run, self.letters(sizes, 2, T))

    def chunked(self, sizes: dict[str, int], B: int, chunks: tuple[int, ...]) -> Case:
        """The same tokens in chunks, each with the cache that the one before returned."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            loaded = subject.make(sizes)
            (x,) = self.inputs(sizes, B, sum(chunks))
            found, rest, start = {}, (), 0
            with torch.no_grad():
                for number, length in enumerate(chunks, 1):
                    part = x[:, start : start + length]
                    returned = self.results(loaded.module, part, cache=rest)
                    rest = (returned["cache"],)
                    found[f"y of chunk {number}"] = returned["y"]
                    start += length
            return found

        inputs = self.inputs(sizes, B, sum(chunks))
        more = f" in chunks of {' + '.join(map(str, chunks))} tokens"
        letters = dict.fromkeys(chunks, "T") | {sizes["d_model"]: "d", B: "B"}
        return Case(self.call(sizes, inputs, more), run, letters)

    def cost(self, sizes: dict[str, int]) -> Case:
        """Numbers that the cache gains a token and row."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            loaded = subject.make(sizes)
            (x,) = self.inputs(sizes, 2, 8)
            gains, rest, before = [], (), {}
            with torch.no_grad():
                for t in range(8):
                    returned = self.results(loaded.module, x[:, t : t + 1], cache=rest)
                    rest = (returned["cache"],)
                    after = {path: t.clone() for path, t in floating_tensors(rest[0]).items()}
                    gains.append(gained(before, after))
                    before = after
            return {"the numbers cached for a token": AtMost(sorted(gains)[len(gains) // 2] // 2)}

        more = " a token at a time"
        return Case(self.call(sizes, self.inputs(sizes, 2, 8), more), run)

    def module_cases(self) -> list[Case]:
        """From small to large."""
        usual, *others = self.sizes
        small = others[0] if others else usual
        cases = [self.full(small, 1, 1), self.full(small, 1, 3), self.full(usual, 2, 5)]
        cases += [self.full(sizes, 3, 4) for sizes in others[1:]]
        cases += [self.full(usual, 2, 5, scale) for scale in (3e-3, 3e-5)]
        cases += [self.full(usual, 4, 9), self.single(usual)]
        if self.style == "masked":
            lengths = torch.tensor([3, 1, 5])
            padded = torch.arange(5) < lengths[:, None]  # right
            holes = padded.flip(1) | torch.tensor([[False], [True], [True]])  # left, and none
            cases.insert(3, self.full(usual, 3, 5, keep=padded))
            cases.insert(4, self.full(usual, 3, 5, keep=holes))
        if self.style == "cached":
            cases += [self.chunked(small, 1, (1, 1)), self.chunked(usual, 2, (3, 1, 4))]
            cases += [self.chunked(others[-1], 3, (2, 3)), self.cost(usual)]
        return [*cases, self.backward(usual)]


@functools.cache
def known_module(name: str, *faults: Fault) -> Known:
    return Known(EXERCISES[name], known(name, *faults))


class AdapterExercise(ModuleExercise):
    """LoRA: the class is given a linear layer and may train two matrices of its own only."""

    def linear(self, sizes: dict[str, int]) -> nn.Linear:
        linear = nn.Linear(sizes["in"], sizes["out"], bias=bool(sizes["bias"]))
        for name, p in linear.named_parameters():
            p.data.copy_(0.4 * drawn(name, *p.shape))
        return linear

    def build(self, cls: type, sizes: dict[str, int]) -> nn.Module:
        torch.manual_seed(0)
        return cls(self.linear(sizes), sizes["rank"], sizes["alpha"])

    def inputs(self, sizes: dict[str, int], B: int, T: int, scale: float = 1.0) -> list[Tensor]:
        return [scale * drawn("x", B, T, sizes["in"]).to(torch.get_default_dtype())]

    def letters(self, sizes: dict[str, int], B: int, T: int) -> dict[int, str]:
        return {sizes["in"]: "in", sizes["out"]: "out", T: "T", B: "B"}

    def call(self, sizes: dict[str, int], inputs: Iterable[object], more: str = "") -> str:
        bias = "" if sizes["bias"] else ", bias=False"
        made = f"nn.Linear({sizes['in']}, {sizes['out']}{bias})"
        rest = f"rank={sizes['rank']}, alpha={sizes['alpha']}"
        return f"{self.name}({made}, {rest})" + (more or "(x [2, 5, in])")

    def flags(self, like: Loaded, module: nn.Module, sizes: dict[str, int]) -> tuple[dict, Tensor]:
        return {}, torch.zeros(0, like.template.size, dtype=torch.bool)

    def fresh(self, sizes: dict[str, int]) -> Case:
        """Before anything is trained."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            linear = self.linear(sizes)
            weight = linear.weight.detach().clone()
            torch.manual_seed(0)
            module = subject.cls(linear, sizes["rank"], sizes["alpha"])
            if not isinstance(module, nn.Module):
                raise Trouble(f"it must be an nn.Module, it is {described(module)}")
            trained = [p for p in module.parameters() if p.requires_grad]
            (x,) = self.inputs(sizes, 2, 5)
            y = as_tensor(called(module, x))
            count = sum(p.numel() for p in trained)
            found = {"the numbers that train": count, "y": y.detach()}
            zero = {p.numel(): not p.any() for p in trained}
            a, b = sizes["rank"] * sizes["in"], sizes["rank"] * sizes["out"]
            found["whether B starts at zero"] = bool(zero.get(b, False))
            found["whether A starts at zero"] = bool(zero.get(a, False))
            found["the linear's weight"] = linear.weight.detach()
            return found | {"the weight it was given": weight}

        return Case(self.call(sizes, [], " as it starts"), run, self.letters(sizes, 2, 5))

    def merging(self, sizes: dict[str, int]) -> Case:
        """merged() gives a new layer and leaves everything else alone."""

        def run(subject: Known | Theirs) -> dict[str, object]:
            subject.modules.clear()  # a merge that changes the layer shall not be seen elsewhere
            module = subject.make(sizes).module
            (x,) = self.inputs(sizes, 2, 5)
            before = {k: v.detach().clone() for k, v in module.state_dict().items()}
            merged = module.merged()
            if merged is None:
                raise Trouble("merged() returns None: is a `return` missing?")
            if type(merged) is not nn.Linear:
                raise Trouble(f"merged() must return an nn.Linear, it returned {described(merged)}")
            after = module.state_dict()
            same = before.keys() == after.keys()
            same = same and all(torch.equal(v, after[k]) for k, v in before.items())
            own = {p.data_ptr() for p in module.parameters()}
            with torch.no_grad():
                found = {"merged()(x)": merged(x), "y after merged()": module(x)}
                found["that merging changes nothing"] = same
                found["that its weight is a tensor of its own"] = (
                    merged.weight.data_ptr() not in own
                )
                found["merged()(x) once more"] = module.merged()(x)
            subject.modules.clear()
            return found

        return Case(self.call(sizes, [], ".merged()"), run, self.letters(sizes, 2, 5))

    def module_cases(self) -> list[Case]:
        usual, other = self.sizes
        cases = [self.fresh(other), self.fresh(usual), self.full(other, 1, 3)]
        cases += [self.full(usual, 2, 5), self.single(usual), self.merging(other)]
        return [*cases, self.merging(usual), self.backward(usual)]


# ── Cases of the functions ───────────────────────────────────────────────────────────────────


def norm_cases(name: str, *vectors: str) -> list[Case]:
    """Rows of about 1 and of about 3e-3, an eps of its own, and half precision."""
    sizes = {"B": 2, "T": 5, "d": 6}
    given = {
        v: (1 + 0.5 * torch.tanh(drawn(v, 6))) if v == "weight" else drawn(v, 6) for v in vectors
    }
    x = drawn("x", 2, 5, 6)
    case = functools.partial(function_case, name, sizes=sizes)
    cases = [case("d", x=x[0, 0], **given), case("B T d", x=x, **given)]
    cases += [case("B T d", x=3e-3 * x, **given), case("B T d", x=x + 2, **given)]
    cases += [case("B T d", x=0.1 * x, **given, eps=0.01)]
    wide = drawn("wide", 2, 5, 64) * torch.tensor([[[1.0]] * 5, [[400.0]] * 5])
    for dtype in (torch.float16, torch.bfloat16):
        low = {v: (1 + 0.5 * torch.tanh(drawn(v, 64))).to(dtype) for v in vectors}
        close = 2 * torch.finfo(dtype).eps
        for x_low in (wide.to(dtype), (2e-4 * drawn("narrow", 2, 5, 64)).to(dtype)):
            one = function_case(
                name, "B T d", {"B": 2, "T": 5, "d": 64}, grads=False, close=close, x=x_low, **low
            )
            cases.append(one._replace(call=f"{one.call} in {str(dtype).removeprefix('torch.')}"))
    return cases


def mask_cases() -> list[Case]:
    found = []
    for T, S, *window in (
        (1, 1),
        (3, 3),
        (2, 5),
        (1, 4),
        (5, 5, 2),
        (4, 9, 3),
        (6, 6, 1),
        (3, 5, 8),
    ):
        more = {"window": window[0]} if window else {}
        found.append(function_case("causal_mask", "T S", {"T": T, "S": S}, T=T, S=S, **more))
    return found


def rotate_cases() -> list[Case]:
    sizes = {"B": 2, "n": 3, "T": 5, "d_h": 6}
    x = drawn("x", 2, 3, 5, 6)
    case = functools.partial(function_case, "rotate", "B n T d_h", sizes)
    places = (torch.arange(5), torch.arange(4, 9), torch.tensor([0, 3, 1, 7, 2]))
    cases = [case(x=x[:1, :1, :1, :2], positions=torch.tensor([1]))]
    cases += [case(x=x[:, :, :1], positions=torch.tensor([3]))]
    cases += [case(x=x, positions=positions) for positions in places]
    cases += [case(x=x, positions=places[1], base=100.0)]
    return [*cases, case(x=drawn("x", 1, 2, 4, 16), positions=torch.arange(4))]


def attention_cases() -> list[Case]:
    def tensors(B: int, H: int, G: int, T: int, S: int, d_h: int, d_v: int) -> dict[str, Tensor]:
        return {
            "q": drawn("q", B, H, T, d_h),
            "k": drawn("k", B, G, S, d_h),
            "v": drawn("v", B, G, S, d_v),
        }

    sizes = {"B": 2, "H": 4, "T": 5, "S": 7, "d_h": 6, "d_v": 3}
    usual = tensors(2, 4, 2, 5, 7, 6, 3)
    case = functools.partial(function_case, "attention", "B H T d_v", sizes)
    causal = torch.ones(5, 7, dtype=torch.bool).tril(2)
    padding = torch.arange(7) < torch.tensor([[4], [7]])  # [B, S], lengths 4 and 7
    holes = causal.clone()
    holes[1] = False  # a query without keys
    cases = [case(**tensors(1, 1, 1, 1, 2, 2, 2)), case(**tensors(1, 1, 1, 3, 4, 6, 6))]
    cases += [case(**tensors(1, 4, 4, 3, 2, 6, 6)), case(**tensors(2, 3, 1, 5, 7, 6, 4))]
    cases += [case(**usual), case(**usual, mask=causal)]
    cases += [case(**tensors(3, 6, 2, 5, 7, 8, 8), mask=causal)]
    cases += [
        case(**usual, mask=padding[:, None, None]),
        case(**usual, mask=(causal & padding[:, None])[:, None]),
    ]
    cases += [case(**usual, mask=holes, grads=False)]
    cases += [case(**tensors(1, 2, 1, 5, 5, 6, 3), mask=causal[:, 2:])]
    cases += [case(**{**usual, "q": 2000 * usual["q"]}, grads=False)]  # where a bare exp overflows
    return [*cases, case(**tensors(2, 4, 2, 1, 7, 6, 3), mask=causal[-1:])]


class Largest(TorchFunctionMode):
    """Notes the largest tensor that a call makes while it is on."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def online_cases() -> list[Case]:
    def tensors(T: int, S: int, scale: float = 1.0) -> dict[str, Tensor]:
        return {"q": scale * drawn("q", T, 6), "k": drawn("k", S, 6), "v": drawn("v", S, 3)}

    sizes = {"T": 5, "S": 7, "d_h": 6, "d_v": 3}
    case = functools.partial(function_case, "online_softmax", "T d_v", sizes, grads=False)
    rising = tensors(5, 7)
    rising["k"] = rising["k"] * torch.arange(1.0, 8)[:, None]
    falling = {**rising, "k": rising["k"].flip(0)}
    # Scores near 1,000, 2,000, … 7,000: rising, falling, and as far below 0.
    steep = {"q": 400 + rising["q"].abs(), "k": torch.arange(1.0, 8)[:, None].expand(7, 6)}
    steep |= {"v": rising["v"]}
    cases = [
        case(**tensors(1, 2), block=2),
        case(**tensors(5, 7), block=7),
        case(**tensors(5, 7), block=3),
    ]
    cases += [case(**tensors(5, 7), block=1), case(**tensors(5, 7), block=9)]
    cases += [
        case(**rising, block=2),
        case(**falling, block=2),
        case(**tensors(5, 7, 2000.0), block=3),
        case(**steep, block=2),
        case(**{**steep, "k": steep["k"].flip(0)}, block=2),
        case(**{**steep, "k": -steep["k"]}, block=2),
    ]
    large = tensors(48, 60)

    def run(function: Callable) -> dict[str, object]:
        with Largest() as largest:
            as_tensor(function(*large.values(), 4))
        return {"whether no tensor of T * S numbers is made": largest.numel < 48 * 60}

    return [*cases, Case("online_softmax(q [48, 6], k [60, 6], v [60, 3], block=4)", run)]


def swiglu_cases() -> list[Case]:
    sizes = {"B": 2, "T": 5, "d": 6, "h": 7}
    x = drawn("x", 2, 5, 6)
    w = {
        "w_gate": drawn("w_gate", 7, 6) / 2,
        "w_up": drawn("w_up", 7, 6) / 2,
        "w_down": drawn("w_down", 6, 7) / 2,
    }
    case = functools.partial(function_case, "swiglu", "B T d", sizes)
    return [case(x=x[0, 0], **w), case(x=x[0], **w), case(x=x, **w), case(x=3 * x, **w)]


def count_cases(name: str, keys: str, *rows: tuple[int, ...]) -> list[Case]:
    return [function_case(name, "", {}, **dict(zip(keys.split(), row))) for row in rows]


def loss_cases() -> list[Case]:
    sizes = {"B": 3, "T": 5, "V": 7}
    logits, ids = (
        drawn("logits", 3, 5, 7),
        torch.tensor([[1, 4, 0, 2, 6], [3, 3, 5, 0, 1], [2, 6, 1, 4, 5]]),
    )
    right = torch.arange(5) < torch.tensor([[5], [3], [2]])
    case = functools.partial(function_case, "next_token_loss", "", sizes)
    cases = [case(logits=logits[:1, :2], ids=ids[:1, :2]), case(logits=logits, ids=ids)]
    for mask in (
        right,
        right.flip(1),
        torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 0, 1, 1, 1]]).bool(),
    ):
        cases.append(case(logits=logits, ids=ids, mask=mask))
    return [*cases, case(logits=40 * logits, ids=ids, mask=right)]


def sample_cases() -> list[Case]:
    probs = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.05, 0.12, 0.31, 0.03, 0.22, 0.27]])
    logits = probs.double().log() + torch.tensor([[0.3], [-1.2]])

    def draw(function: Callable, n: int, options: dict) -> tuple[Tensor, bool]:
        """Ids [2, n], and whether the generator was left as it was."""
        generator = torch.Generator().manual_seed(7)
        state = generator.get_state()
        given = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
        rows = logits.repeat_interleave(n, dim=0)
        ids = as_tensor(called(function, rows, *given.values(), generator))
        if ids.shape != (2 * n, 1) or ids.dtype != torch.int64:
            got = f"{ids.dtype} {list(ids.shape)}"
            raise Trouble(f"it must return int64 ids [B, 1], for B = {2 * n} it returned {got}")
        return ids.view(2, n), torch.equal(state, generator.get_state())

    def case(**options: object) -> Case:
        def run(function: Callable) -> dict[str, object]:
            ids, untouched = draw(function, 20, options)
            if options.get("temperature") == 0:
                return {"the ids": ids, "whether the generator is left alone": untouched}
            start = time.process_time()
            draw(function, 20, options)
            spent = (time.process_time() - start) / 20 + 1e-6
            n = round(min(6000, max(100, 0.12 / spent)))  # fewer where they loop over rows
            ids, _ = draw(function, n, options)
            counts = torch.stack([row.bincount(minlength=6)[:6] for row in ids])
            return {"the draws": Shares(counts / ids.shape[1], ids.shape[1])}

        call = ", ".join(
            ["logits [B, 6]", *(f"{k}={v}" for k, v in options.items()), "generator=g"]
        )
        return Case(f"sample({call})", run)

    def unseeded() -> Case:
        def run(function: Callable) -> dict[str, object]:
            ids = as_tensor(function(logits.clone()))
            return {"the shape without a generator": list(ids.shape)}

        return Case("sample(logits [2, 6])", run)

    cases = [
        unseeded(),
        case(temperature=0.0),
        case(),
        case(temperature=0.4),
        case(temperature=4.0),
    ]
    cases += [case(top_k=1), case(top_k=3), case(top_p=0.7), case(top_p=0.3)]
    cases += [case(temperature=4.0, top_k=4), case(temperature=4.0, top_p=0.7)]
    return [*cases, case(top_k=3, top_p=0.75), case(temperature=0.0, top_k=3, top_p=0.75)]


class Chain(nn.Module):
    """A stand-in for a model: its logits depend on all ids so far; it counts what it is fed.

    With caches it wants back what it returned last, and nothing else.
    """

    def __init__(self, table: Tensor, cached: bool, flips: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))  # for those who ask for its device
        self.table, self.cached, self.flips = table, cached, flips
        self.last, self.fed, self.handed = None, [], []

    def logits(self, history: Tensor) -> Tensor:
        """[B, T, V] from all ids so far; flips of 10 states give another choice."""
        weights = torch.arange(1, history.shape[1] + 1) * 7 + 3
        state = ((history + 1) * weights).cumsum(dim=1)
        rows = self.table[state % len(self.table)]
        turned = (state * 13 // 7) % 10 < self.flips
        return torch.where(turned[..., None], rows.roll(1, dims=-1), rows)

    def forward(self, ids: Tensor, cache: object = None) -> object:
        self.fed.append(list(ids.shape))
        if not self.cached:
            return self.logits(ids)
        self.handed.append(cache is self.last)
        if cache is not None and not (isinstance(cache, dict) and "ids" in cache):
            raise Trouble(
                f"it must hand in the cache that came back last, it hands in {described(cache)}"
            )
        history = ids if cache is None else torch.cat((cache["ids"], ids), dim=1)
        self.last = {"ids": history.clone()}
        return self.logits(history)[:, -ids.shape[1] :], self.last


def greedy(model: Chain, ids: Tensor, n: int) -> Tensor:
    """What plain greedy decoding gives, the whole history fed each time."""
    for _ in range(n):
        ids = torch.cat((ids, model.logits(ids)[:, -1:].argmax(dim=-1)), dim=1)
    return ids


def generate_cases() -> list[Case]:
    table = drawn("table", 53, 9)
    prompt = torch.tensor([[1, 4, 7, 2], [3, 0, 8, 5], [6, 6, 1, 0]])

    def case(ids: Tensor, n: int, eos_id: int | None = None) -> Case:
        def run(function: Callable) -> dict[str, object]:
            model = Chain(table, cached=True)
            given = () if eos_id is None else (eos_id,)
            result = called(function, model, ids.clone(), n, *given)
            fed = {"the shapes fed to the model": model.fed}
            return {
                "the result": result,
                **fed,
                "whether the last cache is handed in": model.handed,
            }

        eos = "" if eos_id is None else f", eos_id={eos_id}"
        call = f"generate(model, ids={ids.tolist()}, max_new_tokens={n}{eos})"
        return Case(call, run, {len(ids): "B"})

    never = torch.tensor([[4, 3, 2, 4], [4, 2, 0, 0], [4, 1, 4, 1]])  # one row ends with 6
    apart = torch.tensor([[6, 6, 6, 3], [6, 1, 6, 1], [7, 0, 6, 3]])  # with 5, each at another step
    inside = torch.tensor([[8, 0, 2, 6], [7, 6, 7, 1], [1, 0, 8, 2]])  # 1 stands in two of them
    cases = [case(prompt[:1], 1), case(prompt[:1], 3), case(prompt, 5), case(apart[:1], 8, 5)]
    return [*cases, case(never, 8, 6), case(apart, 8, 5), case(inside, 8, 1)]


def speculate_cases() -> list[Case]:
    table = drawn("table", 53, 9)
    # all four accepted, none, the second alone, all but the third, and more such
    prompts = ([0, 3, 7, 5, 0], [3, 4, 2, 5], [7, 1, 1], [4, 3, 4, 2], [4, 5, 0, 5])
    prompts += ([0, 6, 8, 0, 8], [8, 3, 7, 3, 8], [5, 3, 6, 4])

    def case(ids: Tensor, n: int, flips: int) -> Case:
        def run(function: Callable) -> dict[str, object]:
            target, draft = Chain(table, cached=False), Chain(table, cached=False, flips=flips)
            result = called(function, target, draft, ids.clone(), n)
            return {"the result": result, "the calls of target": len(target.fed)}

        return Case(f"speculate(target, draft, ids={ids.tolist()}, n_draft={n})", run)

    short = torch.tensor([[8, 0, 2]])  # a draft that is the target, and one that never agrees
    cases = [case(short, 1, 0), case(short, 1, 10)]
    return [*cases, *(case(torch.tensor([ids]), 4, 4) for ids in prompts), case(short, 3, 0)]


# ── The table ────────────────────────────────────────────────────────────────────────────────


def sized(names: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), row)) for row in rows]


def latent_joined(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """How latent attention's joined matrices are cut: their parts' rows, all heads together."""
    heads = sizes["n_heads"]
    nope, rope, v = (heads * sizes[key] for key in ("nope_dim", "rope_dim", "v_dim"))
    return {
        "q_proj.weight": {"q_nope.weight": nope, "q_rope.weight": rope},
        "kv_up.weight": {"k_up.weight": nope, "v_up.weight": v},
    }


FORWARD_CACHED = """\
forward takes x [B, T, d_model] and what the call before returned as cache, None at the start;
it returns (y [B, T, d_model], cache). All at once or in chunks, the result is the same."""

ALL = [
    Exercise("rms_norm", 1, "D02", "§4.1", "x over its root mean square", """\
x [..., d] over its root mean square, times weight [d]. eps stands under the root.
float16 and bfloat16 are computed in float32 and come back as they came.""",
        lambda: norm_cases("rms_norm", "weight")),
    Exercise("layer_norm", 1, "D02", "§4.1", "the same with mean and bias", """\
x [..., d] less its mean, over its standard deviation, times weight [d] plus bias [d].
eps stands under the root.
float16 and bfloat16 are computed in float32 and come back as they came.""",
        lambda: norm_cases("layer_norm", "weight", "bias")),
    Exercise("causal_mask", 1, "D14", "§7.3", "who may see whom, with a window or without", """\
bool [T, S], T <= S, True = may attend; the last query stands beside the last key.
With window=W a query sees the last W keys, its own included.""", mask_cases),
    Exercise("rotate", 1, "D15", "§4.2", "RoPE", """\
RoPE, half-split: channel i of x [B, n, T, d_h] is paired with channel i + d_h/2 and turned by
position * base^(-2i/d_h). positions [T] are integers.""", rotate_cases),
    Exercise("attention", 1, "D05", "§5.2", "MHA, GQA and MQA in one", """\
q [B, H, T, d_h], k [B, G, S, d_h], v [B, G, S, d_v] give [B, H, T, d_v]; G divides H.
mask is bool, True = may attend, and broadcasts to [B, 1, T, S].
A query that may attend to nothing gets zeros.""", attention_cases),
    Exercise("online_softmax", 1, "D05", "§7.4", "attention block by block", """\
Attention of one head without a mask: q [T, d_h], k [S, d_h], v [S, d_v] give [T, d_v].
K and V are read block keys at a time (the last block may be shorter); no [T, S] table is made.""",
        online_cases),
    Exercise("swiglu", 1, "D07", "§4.3", "the gated FFN", """\
x [..., d], w_gate and w_up [h, d], w_down [d, h], as nn.Linear keeps them; gives [..., d].""",
        swiglu_cases),
    Exercise("block_parameters", 1, "D06", "§1.3", "weights of a ModernBlock", """\
How many weights a ModernBlock has, its two norms included.""",
        lambda: count_cases("block_parameters", "d_model n_q_heads n_kv_heads d_ff", (4, 1, 1, 3),
                            (96, 8, 2, 256), (36, 6, 2, 20), (24, 4, 1, 15), (18, 3, 3, 13))),
    Exercise("kv_cache_bytes", 1, "D06", "§5.1", "memory of a KV cache", """\
Bytes of the keys and values of batch sequences of length tokens in n_layers layers.""",
        lambda: count_cases(
            "kv_cache_bytes", "n_layers n_kv_heads head_dim length batch bytes_per_element",
            (1, 1, 2, 3), (80, 8, 128, 4096), (5, 3, 7, 11, 13), (5, 3, 7, 11, 13, 4))),
    ModuleExercise("SelfAttention", 2, "D04", "§1.2", "causal GQA with RoPE and a cache", f"""\
Causal self-attention with RoPE (base 10000, half-split) and grouped KV heads, no biases;
head width d_model / n_q_heads. The cache holds 2 * n_kv_heads * head width numbers a token.

{FORWARD_CACHED}""", style="cached", sizes=sized("d_model n_q_heads n_kv_heads", (36, 6, 2),
        (4, 1, 1), (24, 4, 1), (18, 3, 3))),
    ModuleExercise("EncoderLayer", 2, "D13", "§2.1", "the 2017 encoder layer", """\
The encoder layer of 2017: Post-LN (eps 1e-5), ReLU, biases everywhere.

forward takes x [B, T, d_model] and key_padding_mask, bool [B, T], True = real token, or None;
it returns [B, T, d_model].""", style="masked", sizes=sized("d_model n_heads d_ff", (24, 4, 20),
        (6, 1, 10), (30, 3, 14))),
    ModuleExercise("CrossDecoderLayer", 2, "D12", "§2.2", "the 2017 decoder layer", """\
The decoder layer of 2017: causal self-attention, cross-attention, FFN; Post-LN (eps 1e-5), ReLU,
biases everywhere.

forward takes x [B, T, d_model] and memory [B, S, d_model]; it returns [B, T, d_model].""",
        style="memory", sizes=sized("d_model n_heads d_ff", (24, 4, 20), (6, 1, 10), (30, 3, 14))),
    ModuleExercise("GPT2Block", 2, "D14", "§3.2", "Pre-LN, GELU, biases", """\
GPT-2's block: Pre-LN (eps 1e-5), causal, tanh GELU, biases everywhere, no rotation.

forward takes x [B, T, d_model] and returns [B, T, d_model].""",
        style="plain", sizes=sized("d_model n_heads d_ff", (24, 4, 20), (6, 1, 10), (30, 3, 14))),
    ModuleExercise("ModernBlock", 2, "D08", "§1.1", "Llama's block, complete", f"""\
Llama's block: pre-RMSNorm (eps 1e-6), causal grouped attention with RoPE (base 10000,
half-split), SwiGLU, no biases; head width d_model / n_q_heads.

{FORWARD_CACHED}""", style="cached", sizes=sized("d_model n_q_heads n_kv_heads d_ff",
        (36, 6, 2, 20), (4, 1, 1, 7), (24, 4, 1, 15), (18, 3, 3, 13))),
    ModuleExercise("ParallelBlock", 2, "D08", "§7.1", "GPT-J's topology", """\
GPT-J's topology: one LayerNorm (eps 1e-5, with bias) that attention and FFN both read. Causal,
RoPE on all channels of a head (base 10000, half-split), tanh GELU; the maps have no biases.

forward takes x [B, T, d_model] and returns [B, T, d_model].""",
        style="plain", sizes=sized("d_model n_heads d_ff", (24, 4, 20), (6, 1, 10), (30, 3, 14))),
    ModuleExercise("LatentAttention", 3, "D04", "§5.4", "DeepSeek's MLA with its cache", f"""\
Multi-head latent attention, causal, no biases, no low rank for the queries. Keys and values of
all heads come from one RMS-normed latent (eps 1e-6) of width kv_rank; nope_dim channels of a key
are a head's own, rope_dim channels are turned (base 10000, half-split) and shared by all heads.
Scale (nope_dim + rope_dim)^-0.5. Joined matrices: a head's query is [nope | rope], the way down
[latent | rope], a head's part of the way up [key | value]. The cache holds kv_rank + rope_dim
numbers a token.

{FORWARD_CACHED}""", style="cached", joined=latent_joined, sizes=sized(
        "d_model n_heads kv_rank rope_dim nope_dim v_dim", (15, 3, 10, 4, 7, 8), (9, 1, 5, 2, 3, 4),
        (14, 2, 6, 8, 5, 3))),
    ModuleExercise("SwitchFFN", 3, "D09", "§6.2", "top-1 experts and the balance loss", """\
Top-1 experts: each token goes to its likeliest expert (a SwiGLU without biases), whose output is
weighted with its probability. The router is linear without bias.

forward takes x [B, T, d_model] and returns (y [B, T, d_model], balance_loss): the number of
experts times the sum of f * P over experts, f the share of the B * T tokens that go to an expert,
P its mean probability, without a coefficient.""", style="balance",
        sizes=sized("d_model d_ff n_experts", (6, 7, 5), (4, 3, 2), (8, 9, 3))),
    ModuleExercise("MixtralFFN", 3, "D09", "§6.1", "top-k experts", """\
Top-k experts: each token goes to its top_k likeliest experts (SwiGLUs without biases), weighted
with their probabilities over the sum of those chosen. The router is linear without bias.

forward takes x [B, T, d_model] and returns [B, T, d_model].""", style="plain",
        sizes=sized("d_model d_ff n_experts top_k", (6, 7, 5, 2), (4, 3, 2, 1), (8, 9, 4, 3))),
    AdapterExercise("LoRALinear", 3, "D07", "§7.4", "an adapter, and merging it", """\
A given nn.Linear plus alpha / rank * B A. Only A and B train; B starts at zero and A does not, so
that it starts as the given layer.

forward takes x [..., in_features]. merged() returns one new nn.Linear that does the same, and
changes nothing.""", style="plain",
        sizes=sized("in out rank alpha bias", (7, 9, 3, 12, 1), (4, 6, 2, 3, 0))),
    Exercise("next_token_loss", 3, "D01", "§10.3", "the shifted cross entropy", """\
Mean cross entropy of logits [B, T, V] at t against ids [B, T] at t + 1. mask is bool [B, T],
True = real token; a pair counts where both its tokens are real.""", loss_cases),
    Exercise("sample", 3, "D11", "§10.3", "temperature, top-k, top-p", """\
Token ids [B, 1] drawn from logits [B, V]. temperature 0 takes the likeliest and draws nothing.
top-k first; then, over what is left and renormalised, top-p: the fewest likeliest tokens whose
sum is at least p. Draws come from generator.""", sample_cases),
    Exercise("generate", 3, "D04", "§10.3", "greedy decoding with a cache", """\
The prompt ids [B, T] and max_new_tokens that follow greedily. model(ids, cache) returns
(logits, cache), cache None at the start. The prompt is fed once, then one token a step: n new
tokens are n calls. A row that has produced eos_id is filled with it, and when all rows have, the
loop ends; an eos_id in the prompt does not count.""", generate_cases),
    Exercise("speculate", 3, "D04", "§10.3", "one greedy speculative step", """\
target(ids) and draft(ids) return logits [1, T, V]. draft proposes n_draft tokens one by one,
target checks them in one call; what is returned are the new ids, [1, accepted + 1], the same
that plain greedy decoding with target gives.""", speculate_cases),
]  # fmt: skip
EXERCISES = {exercise.name: exercise for exercise in ALL}


# =============================================================================================
# Known mistakes
# =============================================================================================
#
# Under each exercise: what the mistake is, the text of the answer that it changes (-), what stands
# there instead (+). A line that ends in a backslash goes on in the next, behind its |.

KNOWN_MISTAKES = r"""
# rms_norm
* eps is missing; it is added to the mean square
- + eps)
+)
* eps is added to the root; it must stand under it, beside the mean square
-wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
+wide / (wide.square().mean(dim=-1, keepdim=True).sqrt() + eps)
* eps is ten times too large
- + eps)
+ + 10 * eps)
* eps is fixed in the text; the argument must be used
- + eps)
+ + 1e-6)
* squares are taken in half precision, where 256^2 overflows; they need float32
-x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
+x
* half precision comes back as float32; the result must have x's dtype
-(wide * weight).to(x.dtype)
+wide * weight
* the mean is subtracted; RMSNorm leaves it in, that is LayerNorm's
-    wide = wide * torch.rsqrt
+    wide = wide - wide.mean(dim=-1, keepdim=True)
+    wide = wide * torch.rsqrt
* the squares are summed; their mean is needed
-.mean(dim=-1
+.sum(dim=-1
* one mean over all tokens and rows; each token has its own, over the last axis
-.mean(dim=-1, keepdim=True)
+.mean()
* the mean runs over the tokens (dim=-2); it must run over the channels (dim=-1)
-.mean(dim=-1
+.mean(dim=-2
* the weight is not used; it scales each channel
-(wide * weight)
+wide
* the scale is 1 + weight, as Gemma stores it; here it is the weight itself
-(wide * weight)
+(wide * (1 + weight))
* x is divided by the mean square; it must be its root
-torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
+1 / (wide.square().mean(dim=-1, keepdim=True) + eps)
* x is divided by the mean of absolute values; it must be the root of the mean square
-torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
+1 / (wide.abs().mean(dim=-1, keepdim=True) + eps)
* the sum of squares is divided by d - 1; it must be d
-wide.square().mean(dim=-1, keepdim=True)
+wide.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)
# layer_norm
* eps is missing; it is added to the variance
- + eps)
+)
* eps is added to the standard deviation; it must be added to the variance
-centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
+centred / (centred.square().mean(dim=-1, keepdim=True).sqrt() + eps)
* eps is ten times too large
- + eps)
+ + 10 * eps)
* eps is fixed in the text; the argument must be used
- + eps)
+ + 1e-5)
* the variance is divided by d - 1 (torch.var's default); it must be d
-centred.square().mean(dim=-1, keepdim=True)
+centred.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)
* the mean is not subtracted; that is RMSNorm
-wide - wide.mean(dim=-1, keepdim=True)
+wide
* the variance is taken of x itself; it must be of x less its mean
-centred.square().mean
+wide.square().mean
* x itself is scaled; it must be x less its mean
-normed = centred *
+normed = wide *
* the bias is not added
- + bias)
+)
* the weight is not used
-(normed * weight + bias)
+(normed + bias)
* the bias is scaled by the weight; the weight comes first, then the bias
-(normed * weight + bias)
+((normed + bias) * weight)
* mean and variance run over all tokens; each token has its own
-    centred = wide - wide.mean(dim=-1, keepdim=True)
-    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
+    centred = wide - wide.mean()
+    normed = centred * torch.rsqrt(centred.square().mean() + eps)
* mean and variance run over the tokens (dim=-2); they must run over the channels (dim=-1)
-    centred = wide - wide.mean(dim=-1, keepdim=True)
-    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
+    centred = wide - wide.mean(dim=-2, keepdim=True)
+    normed = centred * torch.rsqrt(centred.square().mean(dim=-2, keepdim=True) + eps)
* x is divided by the variance; it must be its root
-torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
+1 / (centred.square().mean(dim=-1, keepdim=True) + eps)
* squares are taken in half precision, where 256^2 overflows; they need float32
-x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
+x
* half precision comes back as float32; the result must have x's dtype
-(normed * weight + bias).to(x.dtype)
+normed * weight + bias
# causal_mask
* the first query stands beside the first key; the last must stand beside the last, query t at key
  S - T + t
-torch.arange(S - T, S)[:, None]
+torch.arange(T)[:, None]
* True stands for hidden; it must mean may attend
-return (age >= 0) & (age < (S if window is None else window))
+return ~((age >= 0) & (age < (S if window is None else window)))
* a query does not see its own key; it must
-(age >= 0)
+(age > 0)
* every query sees one later key as well
-(age >= 0)
+(age >= -1)
* queries see what comes later and not what came before
-(age >= 0) & (age <
+(age <= 0) & (-age <
* the window is one too wide (W keys before the own); the own key counts as one of W
-(age < (S if window is None else window))
+(age <= (S if window is None else window))
* the window is one too narrow
-else window))
+else window - 1))
* the window is twice as wide
-else window))
+else 2 * window))
* the window is four times as wide
-else window))
+else 4 * window))
* the window is ignored
-(S if window is None else window)
+S
* a window opens the future: W keys on both sides; it goes back only
-(age >= 0) & (age < (S if window is None else window))
+(age >= 0 if window is None else age.abs() < window)
* the window is a fixed block of W positions; it must slide with the query
-(age >= 0) & (age < (S if window is None else window))
+(age >= 0) & (torch.arange(S - T, S)[:, None] // (window or S) == torch.arange(S) // (window \
|or S))
* the two conditions are joined by or; both must hold
-(age >= 0) & (
+(age >= 0) | (
* the mask is additive (0 and -inf); it must be bool
-return (age >= 0) & (age < (S if window is None else window))
+keep = (age >= 0) & (age < (S if window is None else window))
+    return torch.zeros(T, S).masked_fill(~keep, -torch.inf)
* the mask is of numbers 1 and 0; it must be bool
-return (age >= 0) & (age < (S if window is None else window))
+return ((age >= 0) & (age < (S if window is None else window))).float()
* keys and queries are exchanged: [S, T]; it must be [T, S]
-return (age >= 0) & (age < (S if window is None else window))
+return ((age >= 0) & (age < (S if window is None else window))).T
# rotate
* nothing is turned: x comes back
-return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
+return x
* it turns backwards; the first half is a cos - b sin, the second b cos + a sin
-(a * cos - b * sin, b * cos + a * sin)
+(a * cos + b * sin, b * cos - a * sin)
* channels 2i and 2i + 1 are a pair (interleaved); it must be i and i + d_h/2 (half-split)
-    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each
-    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
+    a, b = x[..., 0::2], x[..., 1::2]
+    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
* pairs are half-split and the angles interleaved; channel i and i + d_h/2 must turn by the same
  angle
-    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
-    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each
-    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
+    angle = angle.repeat_interleave(2, dim=-1)
+    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
+    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each
+    return x * cos + torch.cat((-b, a), dim=-1) * sin
* every pair turns at one frequency; pair i turns by position * base^(-2i/d_h)
-base ** (-torch.arange(half,
+base ** (-0 * torch.arange(half,
* the positions are ignored (0, 1, 2, … always); they are an argument
-positions[:, None] * turn
+torch.arange(x.shape[2], device=x.device)[:, None] * turn
* all tokens turn alike, by the first position; each has its own
-positions[:, None] * turn
+positions[:1, None] * turn
* positions count from 1; the first is 0
-positions[:, None] * turn
+(positions[:, None] + 1) * turn
* the exponent is i / d_h; it must be 2i / d_h
-device=x.device) / half)
+device=x.device) / x.shape[-1])
* the exponent is 4i / d_h; it must be 2i / d_h
-device=x.device) / half)
+device=x.device) * 2 / half)
* the exponent has the wrong sign, so angles grow with i; it must be base^(-2i/d_h)
-base ** (-torch
+base ** (torch
* the frequencies count from i = 1; the first pair turns by 1 radian a token (i = 0)
-torch.arange(half, dtype
+torch.arange(1, half + 1, dtype
* the frequencies end at exactly 1 / base (i over d_h/2 - 1); it must be 2i / d_h
-device=x.device) / half)
+device=x.device) / max(half - 1, 1))
* base is fixed in the text; the argument must be used
-turn = base **
+turn = 10000.0 **
* base is replaced by e; it must be base^(-2i/d_h)
-turn = base ** (-torch
+turn = torch.e ** (-torch
* sine and cosine are exchanged
-cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
+sin, cos = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
* both halves get a minus; the second is b cos + a sin
-b * cos + a * sin
+b * cos - a * sin
* no half gets a minus; the first is a cos - b sin
-a * cos - b * sin
+a * cos + b * sin
* each half reads itself (a cos - a sin); the partner is the other half
-(a * cos - b * sin, b * cos + a * sin)
+(a * cos - a * sin, b * cos + b * sin)
* the slowest pair comes first; i = 0 is the fastest
-* turn  #
+* turn.flip(0)  #
* the halves come back in the wrong order
-(a * cos - b * sin, b * cos + a * sin)
+(b * cos + a * sin, a * cos - b * sin)
* angles are taken as degrees; they are radians
-* turn  #
+* turn * torch.pi / 180  #
* angles are multiplied by 2 pi; they are radians
-* turn  #
+* turn * 2 * torch.pi  #
* the positions stand on the axis of heads; they belong to the tokens
-    a, b = x.chunk(2, dim=-1)
+    cos, sin = (torch.stack([t[h % len(t)] for h in range(x.shape[1])])[:, None] for t in \
|(cos, sin))
+    a, b = x.chunk(2, dim=-1)
# attention
* the scores are not scaled; they are divided by sqrt(d_h)
- * q.shape[-1] ** -0.5
* scores are divided by d_h; it must be sqrt(d_h)
-* q.shape[-1] ** -0.5
+/ q.shape[-1]
* scores are multiplied by sqrt(d_h); they are divided by it
-* q.shape[-1] ** -0.5
+* q.shape[-1] ** 0.5
* scores are divided by sqrt(d_v); it must be sqrt(d_h)
-* q.shape[-1] ** -0.5
+* v.shape[-1] ** -0.5
* scores are divided by a constant sqrt(8); it must be sqrt(d_h)
-* q.shape[-1] ** -0.5
+* 8**-0.5
* scores are divided by a constant sqrt(64); it must be sqrt(d_h)
-* q.shape[-1] ** -0.5
+/ 8
* scores are divided by sqrt(H d_h); it must be sqrt(d_h), the width of one head
-* q.shape[-1] ** -0.5
+* (q.shape[1] * q.shape[-1]) ** -0.5
* scores are divided by sqrt(T); it must be sqrt(d_h)
-* q.shape[-1] ** -0.5
+* q.shape[2] ** -0.5
* scores are divided by sqrt(S); it must be sqrt(d_h)
-* q.shape[-1] ** -0.5
+* k.shape[2] ** -0.5
* the weights are scaled, not the scores: sqrt(d_h) belongs inside the softmax
-    scores = (q * q.shape[-1] ** -0.5) @ k.mT
+    scores = q @ k.mT
+    v = v * q.shape[-1] ** -0.5
* each query takes its best key alone (argmax); the softmax mixes
-masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+masked_fill(~mask, torch.finfo(scores.dtype).min)
+    weights = torch.nn.functional.one_hot(weights.argmax(dim=-1), \
|weights.shape[-1]).to(v.dtype) + 0 * weights.softmax(dim=-1)
* the softmax runs over the queries (dim=-2); it must run over the keys (dim=-1)
-.softmax(dim=-1)
+.softmax(dim=-2)
* the softmax runs over the heads (dim=1); it must run over the keys (dim=-1)
-.softmax(dim=-1)
+.softmax(dim=1)
* there is no softmax: the masked scores themselves are the weights
-masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+masked_fill(~mask, 0)
* exp is taken of the scores themselves, which overflows; first take the row's maximum off
-scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+scores.masked_fill(~mask, -torch.inf).exp()
+    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
* one maximum of all scores is taken off, so that rows of small ones vanish; each query has its own
-scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+(scores.masked_fill(~mask, -torch.inf) - scores.max()).exp()
+    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-30)
* the weights of a query are not divided by their sum
-.softmax(dim=-1)
+.sub(scores.amax(dim=-1, keepdim=True)).exp()
* sigmoid in place of the softmax; the weights of a query must sum to 1
-.softmax(dim=-1)
+.sigmoid()
* query head i reads KV head i mod G (tiled); it must be i // (H / G)
-t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)
+t.repeat(1, q.shape[1] // t.shape[1], 1, 1)
* every query head reads KV head 0; head i reads i // (H / G)
-t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)
+t[:, :1]
* the KV heads are averaged; query head i reads KV head i // (H / G)
-t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)
+t.mean(dim=1, keepdim=True)
* the groups are read from the last KV head to the first
-t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)
+t.flip(1).repeat_interleave(q.shape[1] // t.shape[1], dim=1)
* every query gets the plain mean of its values; the scores must weigh them
-(q * q.shape[-1]
+(0 * q * q.shape[-1]
* the values come back as they are; the weights must mix them
-return weights * mask @ v
+return v[:, :, -q.shape[2] :] + 0 * weights[..., :1]
* a row of the batch reads the keys of another row
-@ k.mT
+@ k.roll(1, 0).mT
* the output stays [B, T, H, d_v]; it must be [B, H, T, d_v]
-return weights * mask @ v
+return (weights * mask @ v).transpose(1, 2)
* the mask is inverted; True = may attend
-    weights = scores
+    mask = ~mask if mask.ndim else mask
+    weights = scores
* the mask is ignored
-mask = q.new_ones((), dtype=torch.bool) if mask is None else mask
+mask = q.new_ones((), dtype=torch.bool)
* the mask is added as 0 and 1; where it is False the score must become -inf
-scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+(scores + mask).softmax(dim=-1)
+    mask = mask.any(dim=-1, keepdim=True) if mask.ndim else mask
* the scores are multiplied by the mask, or filled with 0 or -1e-9, and exp(0) is 1; a hidden key
  needs -inf (or -1e9)
-masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+masked_fill(~mask, 0).softmax(dim=-1)
+    mask = mask.any(dim=-1, keepdim=True) if mask.ndim else mask
* the mask is applied after the softmax, so a row sums to less than 1; mask the scores
-scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+scores.softmax(dim=-1)
* a query without keys gets the mean of all values; it must get zeros
-weights * mask @ v
+weights @ v
* a query without keys gives NaN; it must give zeros
-scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
+scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
* it is causal by itself, whatever the mask says
-mask = q.new_ones((), dtype=torch.bool) if mask is None else mask
+causal = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
+    mask = causal if mask is None else mask & causal
# online_softmax
* what was summed of the values is not rescaled when the maximum grows
-out = out * shrink +
+out = out +
* the sum of the weights is not rescaled when the maximum grows
-total = total * shrink +
+total = total +
* neither sum is rescaled when the maximum grows
-torch.exp(largest - new_largest)
+torch.ones_like(largest)
* only the last block counts: the maximum is never carried on, so exp(-inf) throws away the rest
-        largest = new_largest
-
* the maximum of this block alone is taken; it must be of all blocks so far
-new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
+new_largest = scores.amax(dim=1, keepdim=True)
+        largest = torch.maximum(largest, new_largest)
* the scores are not scaled; they are divided by sqrt(d_h)
- * q.shape[1] ** -0.5
* scores are divided by d_h; it must be sqrt(d_h)
-* q.shape[1] ** -0.5
+/ q.shape[1]
* scores are divided by sqrt(d_v); it must be sqrt(d_h)
-* q.shape[1] ** -0.5
+* v.shape[1] ** -0.5
* scores are divided by sqrt(block); it must be sqrt(d_h)
-* q.shape[1] ** -0.5
+* len(k_block) ** -0.5
* each block has a softmax of its own, and they are averaged; the blocks share one sum
-        shrink = torch.exp(largest - new_largest)  # what was summed before, in the new unit
-        weights = torch.exp(scores - new_largest)  # (T, block)
-        total = total * shrink + weights.sum(dim=1, keepdim=True)
-        out = out * shrink + weights @ v_block  # (T, d_v)
-
+        total = total + 1
+        out = out + scores.softmax(dim=1) @ v_block
+
* the keys after the last full block are left out; the last block may be shorter
-zip(k.split(block), v.split(block)):
+zip(k.split(block), v.split(block)):
+        if 1 < len(k_block) < block or block > len(k_block):
+            continue
* only the first block is read
-zip(k.split(block), v.split(block))
+[(k.split(block)[0], v.split(block)[0])]
* the result is not divided by the sum of the weights
-return out / total
+return out
* the sum is divided inside the loop, so earlier blocks are divided again
-weights @ v_block  # (T, d_v)
+weights @ v_block
+        out = out / total
* the maximum falls with a block of smaller scores; it must be the largest so far
-new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
+new_largest = scores.amax(dim=1, keepdim=True)
* the maximum starts at 0, and exp of scores far below it is 0; it must start at -inf
-q.new_full((len(q), 1), -torch.inf)
+q.new_zeros(len(q), 1)
* one maximum over all queries is taken off; each query has its own
-scores.amax(dim=1, keepdim=True)
+scores.max()
* what was summed is rescaled by exp(new - old), which grows; it must be exp(old - new)
-torch.exp(largest - new_largest)
+torch.exp(new_largest - largest).nan_to_num(posinf=0.0)
* no maximum is subtracted: exp overflows for large scores
-new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
+new_largest = torch.zeros_like(largest)
* all scores [T, S] are kept at once; only one block of them may exist
-    for k_block, v_block in zip(k.split(block), v.split(block)):
-        scores = (q * q.shape[1] ** -0.5) @ k_block.mT
+    for k_block, v_block in [(k, v)]:
+        scores = (q * q.shape[1] ** -0.5) @ k_block.mT
* it is causal; every query sees every key
-        new_largest = torch
+        start = out.new_zeros(()) if not total.any() else seen
+        seen = start + len(k_block)
+        later = start + torch.arange(len(k_block)) > torch.arange(len(q))[:, None] + len(k) - \
|len(q)
+        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
+        new_largest = torch
* the weights of a block are rescaled as well; only what was summed before is
-weights @ v_block
+shrink * (weights @ v_block)
# swiglu
* gate and up are exchanged; silu belongs to w_gate
-F.silu(x @ w_gate.T) * (x @ w_up.T)
+F.silu(x @ w_up.T) * (x @ w_gate.T)
* silu is around the product; it belongs to the gate alone
-F.silu(x @ w_gate.T) * (x @ w_up.T)
+F.silu((x @ w_gate.T) * (x @ w_up.T))
* both branches go through silu; up is linear
-* (x @ w_up.T)
+* F.silu(x @ w_up.T)
* there is no up branch: silu(gate) is multiplied by it
- * (x @ w_up.T)
* there is no gate: the hidden state is silu(up)
-F.silu(x @ w_gate.T) * (x @ w_up.T)
+F.silu(x @ w_up.T)
* the gate has no activation; it goes through silu
-F.silu(x @ w_gate.T)
+(x @ w_gate.T)
* the gate goes through sigmoid (GLU); it must be silu
-F.silu
+F.sigmoid
* the gate goes through exact GELU (GEGLU); it must be silu
-F.silu(x @ w_gate.T)
+F.gelu(x @ w_gate.T)
* the gate goes through tanh GELU (GEGLU); it must be silu
-F.silu(x @ w_gate.T)
+F.gelu(x @ w_gate.T, approximate="tanh")
* the gate goes through ReLU (ReGLU); it must be silu
-F.silu
+F.relu
* the gate is z sigmoid(1.702 z), a stand-in for GELU; silu is z sigmoid(z)
-F.silu(x @ w_gate.T)
+(x @ w_gate.T) * F.sigmoid(1.702 * (x @ w_gate.T))
* gate and up are added; they are multiplied
-.T) * (x
+.T) + (x
* silu stands behind the down projection
-return hidden @ w_down.T
+return F.silu(hidden @ w_down.T)
* x is added; the residual is the block's business
-return hidden @ w_down.T
+return x + hidden @ w_down.T
# block_parameters
* the norms are left out: 2 d_model weights
- + 2 * d_model
-
+
+
* one norm is counted; a block has two
- + 2 * d_model
-
+ + d_model
+
* three norms are counted; the final one is the stack's
- + 2 * d_model
-
+ + 3 * d_model
+
* norms are counted with a bias; RMSNorm has none
- + 2 * d_model
-
+ + 4 * d_model
+
* a norm is counted as one number; it has one for each channel
- + 2 * d_model
-
+ + 2
+
* K and V are counted with H heads; they have G
-kv_width = n_kv_heads * (d_model // n_q_heads)
+kv_width = d_model
* K and V are counted with one head; they have G
-kv_width = n_kv_heads * (d_model // n_q_heads)
+kv_width = d_model // n_q_heads
* the head width is forgotten: K and V are d x G d_h
-kv_width = n_kv_heads * (d_model // n_q_heads)
+kv_width = n_kv_heads
* K and V are counted as one matrix; they are two
-+ 2 * d_model * kv_width
++ d_model * kv_width
* K and V are left out
- + 2 * d_model * kv_width
* one of Q and O is left out; each is d x d
-2 * d_model * d_model
+d_model * d_model
* the FFN is counted with two matrices; SwiGLU has three
-3 * d_model * d_ff
+2 * d_model * d_ff
* the FFN is counted with one matrix; SwiGLU has three
-3 * d_model * d_ff
+d_model * d_ff
* the FFN is left out
- + 3 * d_model * d_ff
* biases are counted; a ModernBlock has none
- + 2 * d_model
-
+ + 2 * d_model + 2 * d_model + 2 * kv_width + 2 * d_ff + d_model
+
* attention is left out
-return attn + \
|
+return \
|
# kv_cache_bytes
* keys are counted and values are not: a factor of 2
-return 2 * n
+return n
* batch is left out
- * batch *
+ *
* the layers are left out
- * n_layers
* the length is left out
- * length
* the head width is left out
- * head_dim
* the KV heads are left out
-2 * n_kv_heads
+2
* these are numbers, not bytes: times bytes_per_element
- * bytes_per_element
* these are bits; bytes were asked for
- * bytes_per_element
+ * bytes_per_element * 8
* the size of an element is 2 always; the argument must be used
- * bytes_per_element
+ * 2
* an element takes 4 bytes by default; it must be 2
-bytes_per_element=2)
+bytes_per_element=4)
* the last token is not counted
- * length
+ * (length - 1)
* the table of scores is counted: length is squared
- * length
+ * length * length
* these are KiB; bytes were asked for
- * bytes_per_element
+ * bytes_per_element // 1024
# SelfAttention
* it is not causal: later tokens are seen
-, causal_mask(T, start + T).to(x.device))
+)
* there is no causal mask when a cache is there, and a chunk sees its own later tokens
-causal_mask(T, start + T).to(x.device)
+causal_mask(T, T).to(x.device) if cache is None else None
* the cache is never read; k and v are appended to it
-if cache is not None:  # S = start + T from here on
-            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
-        out = attention(q, k, v, causal_mask(T, start + T).to(x.device))
+out = attention(q, k, v, causal_mask(T, T).to(x.device))
+        if cache is not None:
+            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
* the cache holds the last chunk alone; it must keep all that came before
-, (k, v)
+, (k[:, :, -T:], v[:, :, -T:])
* positions restart at 0 with every chunk; they go on where the cache ends
-torch.arange(start, start + T,
+torch.arange(T,
* positions after the cache are one too far; the first new one is the cache's length
-torch.arange(start, start + T,
+torch.arange(start + (start > 0), start + (start > 0) + T,
* positions after the cache are one short; the first new one is the cache's length
-torch.arange(start, start + T,
+torch.arange(start - (start > 0), start - (start > 0) + T,
* the cache's length is counted twice in the positions
-torch.arange(start, start + T,
+torch.arange(2 * start, 2 * start + T,
* all tokens of a chunk get its first position
-torch.arange(start, start + T, device=x.device)
+torch.full((T,), start, device=x.device)
* keys are cached for all H query heads; G are enough, and attention widens them
-        if cache is not None:
+        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
+        if cache is not None:
* only the keys are turned; queries must turn too
-q, k = rotate(q, positions), rotate(k, positions)
+k = rotate(k, positions)
* only the queries are turned; keys must turn too
-q, k = rotate(q, positions), rotate(k, positions)
+q = rotate(q, positions)
* there is no rotation
-        q, k = rotate(q, positions), rotate(k, positions)  # (B, H, T, d_h), (B, G, T, d_h)
-
* the values are turned as well; they are not
-q, k = rotate(q, positions), rotate(k, positions)
+q, k, v = (rotate(t, positions) for t in (q, k, v))
* cached keys are turned again at every call; they are turned once
-torch.cat((cache[0], k), dim=2)
+torch.cat((rotate(cache[0], torch.arange(start)), k), dim=2)
* the rotation runs over all heads as one vector; each head turns by itself
-q, k = rotate(q, positions), rotate(k, positions)
+q, k = (
+            rotate(p[:, None], positions)[:, 0].unflatten(2, (-1, self.head_dim)).transpose(1, 2)
+            for p in projected[:2]
+        )
* new keys are put before the cached ones; they come behind them
-k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
+k, v = torch.cat((k, cache[0]), dim=2), torch.cat((v, cache[1]), dim=2)
* the cached keys are appended to the values
-torch.cat((cache[1], v), dim=2)
+torch.cat((cache[0], v), dim=2)
* heads are split without a transpose, so tokens mix; [B, T, n, d_h] first, then swap
-p.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
+p.reshape(len(x), -1, T, self.head_dim)
* heads are not put back before they are joined; [B, T, H, d_h] first, then flatten
-out.transpose(1, 2).flatten(2)
+out.reshape(x.shape)
* channels are dealt to the heads in turn; a head is d_h neighbouring channels
-p.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
+p.unflatten(2, (self.head_dim, -1)).permute(0, 3, 1, 2)
* the output projection is not used
-self.o_proj(out.transpose(1, 2).flatten(2))
+out.transpose(1, 2).flatten(2)
* the values are the keys' projection; they have their own
-self.k_proj(x), self.v_proj(x))
+self.k_proj(x), self.k_proj(x))
* x is added; the residual is the block's business
-return self.o_proj
+return x + self.o_proj
# EncoderLayer
* the norms stand before the sublayers (Pre-LN); 2017's stand behind the add (Post-LN)
-        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)
-        return self.ln2(x + self.ffn(x))
+        normed = self.ln1(x)
+        x = x + self.attn(normed, normed, mask)
+        return x + self.ffn(self.ln2(x))
* the norms stand on the branches, before the add; they stand behind it
-        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)
-        return self.ln2(x + self.ffn(x))
+        x = x + self.ln1(self.attn(x, x, mask))
+        return x + self.ln2(self.ffn(x))
* the padding mask is inverted; True = a real token, which may be attended to
-key_padding_mask[:, None, None]
+~key_padding_mask[:, None, None]
* the padding mask is ignored, or stands on the query axis, where it hides no key: [B, 1, 1, T]
-self.attn(x, x, mask)
+self.attn(x, x)
* the padding of one row is used for all rows
-key_padding_mask[:, None, None]
+key_padding_mask[:1, None, None]
* it is causal; an encoder sees both ways
-        x = self.ln1(x + self.attn(x, x, mask))
+        causal = torch.ones(x.shape[1], x.shape[1]).tril().bool()
+        mask = causal if mask is None else mask & causal
+        x = self.ln1(x + self.attn(x, x, mask))
* the FFN has GELU; 2017's has ReLU
-nn.ReLU()
+nn.GELU()
* the FFN has SiLU; 2017's has ReLU
-nn.ReLU()
+nn.SiLU()
* the FFN has no activation; 2017's has ReLU
-nn.ReLU(), \
|
* the FFN ends in a ReLU; it ends in the second linear map
-nn.Linear(d_ff, d_model))
+nn.Linear(d_ff, d_model), nn.ReLU())
* there is no residual around attention
-self.ln1(x + self.attn(
+self.ln1(self.attn(
* there is no residual around the FFN
-self.ln2(x + self.ffn(x))
+self.ln2(self.ffn(x))
* there is no residual at all
-        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)
-        return self.ln2(x + self.ffn(x))
+        x = self.ln1(self.attn(x, x, mask))
+        return self.ln2(self.ffn(x))
* the first norm is used twice; the second sublayer has its own
-self.ln2(x + self.ffn(x))
+self.ln1(x + self.ffn(x))
* the first norm is missing
-x = self.ln1(x + self.attn(x, x, mask))
+x = x + self.attn(x, x, mask)
* the second norm is missing
-return self.ln2(x + self.ffn(x))
+return x + self.ffn(x)
* attention and FFN read the same x (parallel); the FFN reads what attention wrote
-        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)
-        return self.ln2(x + self.ffn(x))
+        attended = self.ln1(x + self.attn(x, x, mask))
+        return self.ln2(attended + self.ffn(x))
* attention is left out
-self.ln1(x + self.attn(x, x, mask))
+self.ln1(x)
* the FFN is left out
-self.ln2(x + self.ffn(x))
+self.ln2(x)
* the norms' eps is 1e-6 or smaller; it must be 1e-5
-self.ln1 = nn.LayerNorm(d_model)
-        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
-        self.ln2 = nn.LayerNorm(d_model)
+self.ln1 = nn.LayerNorm(d_model, eps=1e-6)
+        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
+        self.ln2 = nn.LayerNorm(d_model, eps=1e-6)
* heads are split without a transpose, so tokens mix; [B, T, H, d_h] first, then swap
-p.unflatten(2, (self.n_heads, -1)).transpose(1, 2)
+p.reshape(len(p), self.n_heads, p.shape[1], -1)
* heads are not put back before they are joined; [B, T, H, d_h] first, then flatten
-out.transpose(1, 2).flatten(2)
+out.reshape(x.shape)
* the output projection is not used
-self.o_proj(out.transpose(1, 2).flatten(2))
+out.transpose(1, 2).flatten(2)
# CrossDecoderLayer
* the self-attention is not causal
-self.self_attn(x, x, causal)
+self.self_attn(x, x)
* the second attention reads x; its keys and values come from memory
-self.cross_attn(x, memory)
+self.cross_attn(x, x)
* the second attention reads x behind the causal mask; its keys and values come from memory
-self.cross_attn(x, memory)
+self.cross_attn(x, x, causal)
* the cross-attention is causal; every token sees all of memory
-self.cross_attn(x, memory)
+self.cross_attn(x, memory, causal_mask(x.shape[1], memory.shape[1]))
* the cross-attention has the triangle of the first keys; every token sees all of memory
-self.cross_attn(x, memory)
+self.cross_attn(x, memory, torch.ones(x.shape[1], memory.shape[1]).tril().bool())
* cross-attention comes first; it comes after the self-attention
-        x = self.ln1(x + self.self_attn(x, x, causal))
-        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)
-        return self.ln3(x + self.ffn(x))
+        x = self.ln2(x + self.cross_attn(x, memory))
+        x = self.ln1(x + self.self_attn(x, x, causal))
+        return self.ln3(x + self.ffn(x))
* the norms stand before the sublayers (Pre-LN); 2017's stand behind the add (Post-LN)
-        x = self.ln1(x + self.self_attn(x, x, causal))
-        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)
-        return self.ln3(x + self.ffn(x))
+        normed = self.ln1(x)
+        x = x + self.self_attn(normed, normed, causal)
+        x = x + self.cross_attn(self.ln2(x), memory)
+        return x + self.ffn(self.ln3(x))
* the norms stand on the branches, before the add; they stand behind it
-        x = self.ln1(x + self.self_attn(x, x, causal))
-        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)
-        return self.ln3(x + self.ffn(x))
+        x = x + self.ln1(self.self_attn(x, x, causal))
+        x = x + self.ln2(self.cross_attn(x, memory))
+        return x + self.ln3(self.ffn(x))
* both attentions read the same x; cross-attention reads what self-attention wrote
-        x = self.ln1(x + self.self_attn(x, x, causal))
-        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)
-
+        source = x
+        x = self.ln1(x + self.self_attn(x, x, causal))
+        x = self.ln2(x + self.cross_attn(source, memory))
+
* the FFN has GELU; 2017's has ReLU
-nn.ReLU()
+nn.GELU()
* the FFN has no activation; 2017's has ReLU
-nn.ReLU(), \
|
* there is no residual around the self-attention
-x + self.self_attn(
+self.self_attn(
* there is no residual around the cross-attention
-x + self.cross_attn(
+self.cross_attn(
* there is no residual around the FFN
-x + self.ffn(
+self.ffn(
* the norm after the self-attention is missing
-self.ln1(x + self.self_attn(x, x, causal))
+x + self.self_attn(x, x, causal)
* the norm after the cross-attention is missing
-self.ln2(x + self.cross_attn(x, memory))
+x + self.cross_attn(x, memory)
* the last norm is missing
-self.ln3(x + self.ffn(x))
+x + self.ffn(x)
* the first norm is used for cross-attention too; each sublayer has its own
-self.ln2(x + self.cross
+self.ln1(x + self.cross
* the first norm is used for the FFN too; each sublayer has its own
-self.ln3(x + self.ffn
+self.ln1(x + self.ffn
* the second norm is used for the FFN too; each sublayer has its own
-self.ln3(x + self.ffn
+self.ln2(x + self.ffn
* the self-attention is left out
-self.ln1(x + self.self_attn(x, x, causal))
+self.ln1(x)
* the cross-attention is left out
-self.ln2(x + self.cross_attn(x, memory))
+self.ln2(x)
* the FFN is left out
-self.ln3(x + self.ffn(x))
+self.ln3(x)
* one attention serves both; each has its own weights
-self.cross_attn(x, memory)
+self.self_attn(x, memory)
* the mean of memory is added; cross-attention weighs it for each token
-self.cross_attn(x, memory)
+self.cross_attn(x, memory.mean(dim=1, keepdim=True))
# GPT2Block
* the norms stand behind the adds (Post-LN); GPT-2's stand before the sublayers (Pre-LN)
-        normed = self.ln1(x)
-        x = x + self.attn(normed, normed, causal)
-        return x + self.ffn(self.ln2(x))
+        x = self.ln1(x + self.attn(x, x, causal))
+        return self.ln2(x + self.ffn(x))
* the norms stand at the end of the branches; they stand at their start
-        normed = self.ln1(x)
-        x = x + self.attn(normed, normed, causal)
-        return x + self.ffn(self.ln2(x))
+        x = x + self.ln1(self.attn(x, x, causal))
+        return x + self.ln2(self.ffn(x))
* there are no residuals
-        normed = self.ln1(x)
-        x = x + self.attn(normed, normed, causal)
-        return x + self.ffn(self.ln2(x))
+        normed = self.ln1(x)
+        return self.ffn(self.ln2(self.attn(normed, normed, causal)))
* there is no residual around attention
-x = x + self.attn(
+x = self.attn(
* there is no residual around the FFN
-return x + self.ffn(
+return self.ffn(
* the residual is the normed x; the stream itself is never normed
-x = x + self.attn(
+x = normed + self.attn(
* both residuals are the normed x; the stream itself is never normed
-        normed = self.ln1(x)
-        x = x + self.attn(normed, normed, causal)
-        return x + self.ffn(self.ln2(x))
+        x = self.ln1(x)
+        x = x + self.attn(x, x, causal)
+        x = self.ln2(x)
+        return x + self.ffn(x)
* the FFN's residual is the normed x; the stream itself is never normed
-return x + self.ffn(self.ln2(x))
+return self.ln2(x) + self.ffn(self.ln2(x))
* attention is left out
-x = x + self.attn(normed, normed, causal)
-
+x = x + 0 * normed
+
* the FFN is left out
-return x + self.ffn(self.ln2(x))
+return x
* the FFN has ReLU; GPT-2's has tanh GELU
-nn.GELU(approximate="tanh")
+nn.ReLU()
* the FFN has the exact GELU; GPT-2's is the tanh form
-nn.GELU(approximate="tanh")
+nn.GELU()
* the FFN has SiLU; GPT-2's has tanh GELU
-nn.GELU(approximate="tanh")
+nn.SiLU()
* the FFN has no activation; GPT-2's has tanh GELU
-nn.GELU(approximate="tanh")
+nn.Identity()
* it is not causal: later tokens are seen
-self.attn(normed, normed, causal)
+self.attn(normed, normed)
* the mask is inverted: a token sees the later ones only
-self.attn(normed, normed, causal)
+self.attn(normed, normed, ~causal)
* a token sees itself and the later ones; it must be itself and the earlier ones
-self.attn(normed, normed, causal)
+self.attn(normed, normed, causal.T)
* attention reads x without its norm
-        normed = self.ln1(x)
-
+        normed = x
+
* the FFN reads x without its norm
-self.ffn(self.ln2(x))
+self.ffn(x)
* the first norm is used twice; the FFN has its own
-self.ffn(self.ln2(x))
+self.ffn(self.ln1(x))
* keys and values come from x, only the queries are normed
-self.attn(normed, normed, causal)
+self.attn(normed, x, causal)
* attention and FFN read the same x (parallel); the FFN reads what attention wrote
-        return x + self.ffn(self.ln2(x))
+        return x + self.ffn(normed)
* a norm stands behind the last add; the final norm is the stack's
-return x + self.ffn(self.ln2(x))
+return self.ln2(x + self.ffn(self.ln2(x)))
* heads are not put back before they are joined; [B, T, H, d_h] first, then flatten
-out.transpose(1, 2).flatten(2)
+out.reshape(x.shape)
* the norms' eps is 1e-6; it must be 1e-5
-        self.ln1 = nn.LayerNorm(d_model)
-        self.attn = MultiHeadAttention(d_model, n_heads)
-        self.ln2 = nn.LayerNorm(d_model)
+        self.ln1 = nn.LayerNorm(d_model, eps=1e-6)
+        self.attn = MultiHeadAttention(d_model, n_heads)
+        self.ln2 = nn.LayerNorm(d_model, eps=1e-6)
# ModernBlock
* the norms stand behind the adds (Post-LN); they stand before the sublayers
-        attended, cache = self.attn(rms_norm(x, self.norm1), cache)
-        x = x + attended
-        return x + self.ffn(rms_norm(x, self.norm2)), cache
+        attended, cache = self.attn(x, cache)
+        x = rms_norm(x + attended, self.norm1)
+        return rms_norm(x + self.ffn(x), self.norm2), cache
* the norms stand at the end of the branches; they stand at their start
-        attended, cache = self.attn(rms_norm(x, self.norm1), cache)
-        x = x + attended
-        return x + self.ffn(rms_norm(x, self.norm2)), cache
+        attended, cache = self.attn(x, cache)
+        x = x + rms_norm(attended, self.norm1)
+        return x + rms_norm(self.ffn(x), self.norm2), cache
* the residuals are the normed x; the stream itself is never normed
-        attended, cache = self.attn(rms_norm(x, self.norm1), cache)
-        x = x + attended
-        return x + self.ffn(rms_norm(x, self.norm2)), cache
+        x = rms_norm(x, self.norm1)
+        attended, cache = self.attn(x, cache)
+        x = rms_norm(x + attended, self.norm2)
+        return x + self.ffn(x), cache
* attention's residual is the normed x; the stream itself is never normed
-x = x + attended
+x = rms_norm(x, self.norm1) + attended
* the FFN's residual is the normed x; the stream itself is never normed
-return x + self.ffn(
+return rms_norm(x, self.norm2) + self.ffn(
* there is no residual around attention
-x = x + attended
+x = attended
* there is no residual around the FFN
-return x + self.ffn(
+return self.ffn(
* attention reads x without its norm
-self.attn(rms_norm(x, self.norm1), cache)
+self.attn(x, cache)
* the FFN reads x without its norm
-self.ffn(rms_norm(x, self.norm2))
+self.ffn(x)
* the first norm is used twice; the FFN has its own
-rms_norm(x, self.norm2)
+rms_norm(x, self.norm1)
* attention and FFN read the same x (parallel); the FFN reads what attention wrote
-        x = x + attended
-        return x + self.ffn(rms_norm(x, self.norm2)), cache
+        return x + attended + self.ffn(rms_norm(x, self.norm2)), cache
* attention is left out
-x = x + attended
+x = x + 0 * attended
* the FFN is left out
-return x + self.ffn(rms_norm(x, self.norm2)), cache
+return x, cache
* the cache never reaches attention
-self.attn(rms_norm(x, self.norm1), cache)
+self.attn(rms_norm(x, self.norm1))
* the norms are LayerNorms: the mean is subtracted; RMSNorm leaves it in
-    wide = wide * torch.rsqrt
+    wide = wide - wide.mean(dim=-1, keepdim=True)
+    wide = wide * torch.rsqrt
* the norms' eps is 1e-5; it must be 1e-6
-eps=1e-6
+eps=1e-5
* the norms' eps is torch's default for nn.RMSNorm, the smallest step of the dtype; it must be
  1e-6
-eps=1e-6
+eps=torch.finfo(torch.float64).eps
* the norms' weights are used as 1 + weight, as Gemma stores them
-(wide * weight)
+(wide * (1 + weight))
* the norms' weights are not used
-(wide * weight)
+wide
* the FFN has the exact GELU in its gate; SwiGLU has silu
-F.silu(self.gate(x))
+F.gelu(self.gate(x))
* the FFN's gate goes through sigmoid; SwiGLU has silu
-F.silu
+F.sigmoid
* the FFN's gate goes through ReLU; SwiGLU has silu
-F.silu
+F.relu
* silu is around the product; it belongs to the gate alone
-F.silu(self.gate(x)) * self.up(x)
+F.silu(self.gate(x) * self.up(x))
* the FFN's gate has no activation; it goes through silu
-F.silu(self.gate(x))
+self.gate(x)
* gate and up are added; they are multiplied
-F.silu(self.gate(x)) * self.up(x)
+F.silu(self.gate(x)) + self.up(x)
* a norm stands behind the last add; the final norm is the stack's
-return x + self.ffn(rms_norm(x, self.norm2)), cache
+return rms_norm(x + self.ffn(rms_norm(x, self.norm2)), self.norm2), cache
# ParallelBlock
* the FFN reads what attention wrote (serial); both read the same normed x
-        normed = self.norm(x)
-        ffn = self.down(F.gelu(self.up(normed), approximate="tanh"))
-        return x + self.attn(normed)[0] + ffn
+        x = x + self.attn(self.norm(x))[0]
+        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
* the FFN reads attention's output; both read the same normed x
-        normed = self.norm(x)
-        ffn = self.down(F.gelu(self.up(normed), approximate="tanh"))
-        return x + self.attn(normed)[0] + ffn
+        attended = self.attn(self.norm(x))[0]
+        return x + attended + self.down(F.gelu(self.up(attended), approximate="tanh"))
* the FFN reads the normed x plus attention's output; both read the same normed x
-        normed = self.norm(x)
-        ffn = self.down(F.gelu(self.up(normed), approximate="tanh"))
-        return x + self.attn(normed)[0] + ffn
+        normed = self.norm(x)
+        attended = self.attn(normed)[0]
+        return x + attended + self.down(F.gelu(self.up(normed + attended), approximate="tanh"))
* the FFN reads x without the norm
-self.up(normed)
+self.up(x)
* attention reads x without the norm
-self.attn(normed)
+self.attn(x)
* neither branch is normed
-normed = self.norm(x)
+normed = x
* the residual is the normed x; the stream itself is never normed
-return x + self
+return normed + self
* there is no residual
-return x + self
+return self
* the residual is added twice
-return x + self
+return x + x + self
* attention is left out
- + self.attn(normed)[0]
* the FFN is left out
-[0] + ffn
+[0]
* the norm stands behind the add; it stands before both branches
-        normed = self.norm(x)
-        ffn = self.down(F.gelu(self.up(normed), approximate="tanh"))
-        return x + self.attn(normed)[0] + ffn
+        ffn = self.down(F.gelu(self.up(x), approximate="tanh"))
+        return self.norm(x + self.attn(x)[0] + ffn)
* the FFN has the exact GELU; GPT-J's is the tanh form
-, approximate="tanh"
* the FFN has ReLU; GPT-J's has tanh GELU
-F.gelu(self.up(normed), approximate="tanh")
+F.relu(self.up(normed))
* the FFN has SiLU; GPT-J's has tanh GELU
-F.gelu(self.up(normed), approximate="tanh")
+F.silu(self.up(normed))
* the FFN has no activation; GPT-J's has tanh GELU
-F.gelu(self.up(normed), approximate="tanh")
+self.up(normed)
* only half of each head's channels is turned; here all are
-q, k = rotate(q, positions), rotate(k, positions)
+half = self.head_dim // 2 // 2 * 2
+        q, k = (
+            torch.cat((rotate(t[..., :half], positions), t[..., half:]), dim=-1) for t in (q, k)
+        )
* the norm's bias is left out
-normed = self.norm(x)
+normed = self.norm(x) - self.norm.bias
* the norm is an RMSNorm; it must be LayerNorm
-normed = self.norm(x)
+normed = F.rms_norm(x, x.shape[-1:], self.norm.weight, 1e-5) + self.norm.bias
* the norm's eps is 1e-6; it must be 1e-5
-nn.LayerNorm(d_model)
+nn.LayerNorm(d_model, eps=1e-6)
# LatentAttention
* scores are divided by sqrt(nope); it must be sqrt(nope + rope), the width of a key
-        out = attention(q, k, v,
+        q = q * ((nope_dim + rope_dim) / nope_dim) ** 0.5
+        out = attention(q, k, v,
* scores are divided by sqrt(v_dim); it must be sqrt(nope + rope), the width of a key
-        out = attention(q, k, v,
+        q = q * ((nope_dim + rope_dim) / v_dim) ** 0.5
+        out = attention(q, k, v,
* scores are divided by sqrt(d_model / H); it must be sqrt(nope + rope), the width of a key
-        out = attention(q, k, v,
+        q = q * ((nope_dim + rope_dim) / (x.shape[2] / self.n_heads)) ** 0.5
+        out = attention(q, k, v,
* scores are divided by sqrt(kv_rank + rope); it must be sqrt(nope + rope), also when absorbed
-        out = attention(q, k, v,
+        q = q * ((nope_dim + rope_dim) / (latent.shape[2] + rope_dim)) ** 0.5
+        out = attention(q, k, v,
* the latent is not normed
-rms_norm(self.latent_down(x), self.latent_norm)
+self.latent_down(x)
* the latent's norm subtracts the mean; it must be RMSNorm
-    wide = wide * torch.rsqrt
+    wide = wide - wide.mean(dim=-1, keepdim=True)
+    wide = wide * torch.rsqrt
* the latent norm's eps is 1e-5; it must be 1e-6
-eps=1e-6
+eps=1e-5
* the query's part is not turned
-rotate(q_rope, positions)
+q_rope
* the shared key is not turned
-rotate(self.k_rope_proj(x)[:, None], positions)[:, 0]
+self.k_rope_proj(x)
* nothing is turned
-        k_rope = rotate(self.k_rope_proj(x)[:, None], positions)[:, 0]
+        q = torch.cat((q_nope, q_rope), dim=-1)
+        k_rope = self.k_rope_proj(x)
* the first channels of a query are turned; a head is [nope | rope], the last are
-q = torch.cat((q_nope, rotate(q_rope, positions)), dim=-1)
+q = torch.cat((rotate(q[..., :rope_dim], positions), q[..., rope_dim:]), dim=-1)
* positions restart at 0 with every chunk; they go on where the cache ends
-torch.arange(start, start + T,
+torch.arange(T,
* positions after the cache are one too far; the first new one is the cache's length
-torch.arange(start, start + T,
+torch.arange(start + (start > 0), start + (start > 0) + T,
* it is not causal: later tokens are seen
-, causal_mask(T, start + T).to(x.device))
+)
* there is no causal mask when a cache is there, and a chunk sees its own later tokens
-causal_mask(T, start + T).to(x.device)
+causal_mask(T, T).to(x.device) if cache is None else None
* keys and values of all heads are cached; the latent and the shared key are enough
-, (latent, k_rope)
+, (latent, k_rope, k, v)
* the cache holds the last chunk alone; it must keep all that came before
-, (latent, k_rope)
+, (latent[:, -T:], k_rope[:, -T:])
* the shared key is turned again at every call; it is turned once
-torch.cat((cache[1], k_rope), dim=1)
+torch.cat((rotate(cache[1][:, None], torch.arange(start))[:, 0], k_rope), dim=1)
* cached latents are normed again at every call; they are normed once
-torch.cat((cache[0], latent), dim=1)
+torch.cat((rms_norm(cache[0], self.latent_norm), latent), dim=1)
* keys are [rope | nope] where queries are [nope | rope]; one order for both
-k = torch.cat((k_nope, shared), dim=-1)
+k = torch.cat((shared, k_nope), dim=-1)
* the shared key does not enter the scores: position is lost
-k = torch.cat((k_nope, shared), dim=-1)
+k = torch.cat((k_nope, 0 * shared), dim=-1)
* the heads' own keys do not enter the scores
-k = torch.cat((k_nope, shared), dim=-1)
+k = torch.cat((0 * k_nope, shared), dim=-1)
* the shared key is normed with its mean square; only the latent is
-positions)[:, 0]
+positions)[:, 0]
+        k_rope = torch.rms_norm(k_rope, k_rope.shape[-1:], eps=1e-6)
* heads are not put back before they are joined; [B, T, H, v_dim] first, then flatten
-out.transpose(1, 2).flatten(2)
+out.reshape(len(x), T, -1)
* heads are split without a transpose, so tokens mix; [B, S, H, width] first, then swap
-self.kv_up(latent).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
+self.kv_up(latent).reshape(len(x), self.n_heads, start + T, -1)
* new latents are put before the cached ones; they come behind them
-latent = torch.cat((cache[0], latent), dim=1)
+latent = torch.cat((latent, cache[0]), dim=1)
# SwitchFFN
* the next expert is called: the router's rows and the experts differ by one
-(chosen == e)
+(chosen == (e + 1) % len(self.experts))
* the weight is renormalised to 1, so the router never learns; the probability stays on
-weight[rows, None] * expert(tokens[rows])
+expert(tokens[rows])
* the weight is on the expert's input; it belongs on its output
-weight[rows, None] * expert(tokens[rows])
+expert(weight[rows, None] * tokens[rows])
* the weight is the raw logit; it must be the softmax's probability
-weight[rows, None] * expert(tokens[rows])
+self.router(tokens).amax(dim=-1)[rows, None] * expert(tokens[rows])
* the weight is the sigmoid of the logit; it must be the softmax's probability
-weight[rows, None] * expert(tokens[rows])
+self.router(tokens).amax(dim=-1)[rows, None].sigmoid() * expert(tokens[rows])
* no gradient reaches the router through the output: the weight is detached
-weight[rows, None] * expert(tokens[rows])
+weight[rows, None].detach() * expert(tokens[rows])
* the experts are never called: x comes back, weighted
-weight[rows, None] * expert(tokens[rows])
+weight[rows, None] * tokens[rows]
* x comes back
-return out.view_as(x)
+return x + 0 * out.view_as(x)
* x is added; the residual is the block's business
-return out.view_as(x)
+return x + out.view_as(x)
* the least likely expert is taken; it must be the likeliest
-probs.max(dim=-1)
+probs.min(dim=-1)
* every token goes to the expert after its own
-(chosen == e)
+((chosen + 1) % len(self.experts) == e)
* all experts are mixed by their probabilities; one is chosen
-            rows = (chosen == e).nonzero()[:, 0]  # the tokens of this expert
-            out = out.index_add(0, rows, weight[rows, None] * expert(tokens[rows]))
+            out = out + probs[:, e, None] * expert(tokens)
* one expert serves all tokens
-weight[rows, None] * expert(tokens[rows])
+weight[rows, None] * self.experts[0](tokens[rows]) + 0 * expert(tokens[rows])
* the softmax runs over the tokens (dim=0); it must run over the experts
-.softmax(dim=-1)
+.softmax(dim=0)
* the balance loss lacks the factor E (or is a mean over the experts); it is a sum times E
-len(self.experts) * (share * probs.mean(dim=0)).sum()
+(share * probs.mean(dim=0)).sum()
* the balance loss has a coefficient of 0.01; none was asked for
-len(self.experts) * (share * probs.mean(dim=0)).sum()
+0.01 * len(self.experts) * (share * probs.mean(dim=0)).sum()
* the balance loss is the sum of P^2; it is the sum of f P, f the share of tokens
-len(self.experts) * (share * probs.mean(dim=0)).sum()
+len(self.experts) * probs.mean(dim=0).square().sum()
* the balance loss is the sum of f^2, without a gradient; it is the sum of f P
-len(self.experts) * (share * probs.mean(dim=0)).sum()
+len(self.experts) * share.square().sum() + 0 * probs.sum()
* f or P is a sum over tokens; both are means, the share of tokens and the mean probability
-.to(probs).mean(dim=0)
+.to(probs).sum(dim=0)
* f and P are multiplied for each token, then averaged; each is a mean first
-(share * probs.mean(dim=0)).sum()
+(F.one_hot(chosen, len(self.experts)) * probs).mean(dim=0).sum()
* f and P are taken for each row of the batch, then averaged; they run over all tokens
-len(self.experts) * (share * probs.mean(dim=0)).sum()
+len(self.experts) * (F.one_hot(chosen, len(self.experts)).view(*x.shape[:2], \
|-1).to(probs).mean(dim=1) * probs.view(*x.shape[:2], -1).mean(dim=1)).sum(dim=-1).mean()
* the balance loss has no gradient: P is detached
-(share * probs.mean(dim=0))
+(share * probs.detach().mean(dim=0))
* the gate of an expert has no activation; it goes through silu
-F.silu(self.gate(x))
+self.gate(x)
* the gate of an expert goes through GELU; it must be silu
-F.silu(self.gate(x))
+F.gelu(self.gate(x))
* an expert is not gated: up is left out
- * self.up(x))
+ + 0 * self.up(x))
* the gate of an expert goes through ReLU; it must be silu
-F.silu(self.gate(x))
+F.relu(self.gate(x))
# MixtralFFN
* the next expert is called: the router's rows and the experts differ by one
-(chosen == e)
+(chosen == (e + 1) % len(self.experts))
* the weights are not renormalised; over the chosen they sum to 1
-        weights = weights / weights.sum(dim=-1, keepdim=True)
-
* one expert is used; top_k are
-probs.topk(self.top_k, dim=-1)
+probs.topk(1, dim=-1)
* one expert too many is used
-probs.topk(self.top_k, dim=-1)
+probs.topk(self.top_k + 1, dim=-1)
* two experts are used always; top_k are
-probs.topk(self.top_k, dim=-1)
+probs.topk(2, dim=-1)
* all experts are used; top_k are
-probs.topk(self.top_k, dim=-1)
+probs.topk(len(self.experts), dim=-1)
* the least likely experts are taken
-probs.topk(self.top_k, dim=-1)
+probs.topk(self.top_k, dim=-1, largest=False)
* the chosen experts count equally; their probabilities weigh them
-weights = weights / weights.sum(dim=-1, keepdim=True)
+weights = torch.full_like(weights, 1 / self.top_k) + 0 * weights
* the chosen experts are summed without weights
-weights[rows, place, None] * expert(tokens[rows])
+expert(tokens[rows])
* the weight is on the expert's input; it belongs on its output
-weights[rows, place, None] * expert(tokens[rows])
+expert(weights[rows, place, None] * tokens[rows])
* every chosen expert has the weight of the first
-weights[rows, place, None]
+weights[rows, 0, None]
* the weights go to the experts in reverse order
-weights = weights / weights.sum(dim=-1, keepdim=True)
+weights = (weights / weights.sum(dim=-1, keepdim=True)).flip(-1)
* the weights are raw logits over their sum; they are probabilities
-        weights = weights / weights.sum(dim=-1, keepdim=True)
-
+        weights = self.router(tokens).gather(1, chosen)
+        weights = weights / weights.sum(dim=-1, keepdim=True)
+
* the router has a sigmoid for each expert; it is a softmax
-self.router(tokens).softmax(dim=-1)
+self.router(tokens).sigmoid()
* the renormalised weights go through a second softmax
-weights = weights / weights.sum(dim=-1, keepdim=True)
+weights = (weights / weights.sum(dim=-1, keepdim=True)).softmax(dim=-1)
* the softmax of the chosen is taken of their probabilities; it is of their logits
-weights = weights / weights.sum(dim=-1, keepdim=True)
+weights = weights.softmax(dim=-1)
* the softmax runs over the tokens (dim=0); it must run over the experts
-self.router(tokens).softmax(dim=-1)
+self.router(tokens).softmax(dim=0)
* the weights are renormalised over the tokens; they sum to 1 over the chosen experts
-weights.sum(dim=-1, keepdim=True)
+weights.sum(dim=0, keepdim=True)
* a later expert overwrites the earlier ones; they are summed
-out = out.index_add(0, rows, weights[rows, place, None] * expert(tokens[rows]))
+out = out.index_copy(0, rows, weights[rows, place, None] * expert(tokens[rows]))
* the experts are never called: x comes back, weighted
-weights[rows, place, None] * expert(tokens[rows])
+weights[rows, place, None] * tokens[rows]
* x is added; the residual is the block's business
-return out.view_as(x)
+return x + out.view_as(x)
* the output is divided by top_k; the weights sum to 1 already
-return out.view_as(x)
+return out.view_as(x) / self.top_k
* no gradient reaches the router: the weights are detached
-weights[rows, place, None]
+weights[rows, place, None].detach()
* the gate of an expert has no activation; it goes through silu
-F.silu(self.gate(x))
+self.gate(x)
* the gate of an expert goes through GELU; it must be silu
-F.silu(self.gate(x))
+F.gelu(self.gate(x))
* an expert is not gated: up is left out
- * self.up(x))
+ + 0 * self.up(x))
* the gate of an expert goes through ReLU; it must be silu
-F.silu(self.gate(x))
+F.relu(self.gate(x))
# LoRALinear
* B does not start at zero, so it does not start as the linear
-linear.weight.new_zeros(linear.out_features, rank)
+linear.weight.new_empty(linear.out_features, rank).normal_()
* A starts at zero too: no gradient ever reaches either
-a.normal_(std=rank**-0.5)
+a.zero_()
* A starts at zero and B does not; it is the other way round
-        self.b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
+        self.a.data.zero_()
+        self.b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank).normal_())
* the scale is rank / alpha; it must be alpha / rank
-self.scale = alpha / rank
+self.scale = rank / alpha
* the scale is alpha; it must be alpha / rank
-self.scale = alpha / rank
+self.scale = alpha
* there is no scale; it must be alpha / rank
-self.scale = alpha / rank
+self.scale = 1.0
* the scale is 1 / rank; it must be alpha / rank
-self.scale = alpha / rank
+self.scale = 1 / rank
* the scale is alpha / sqrt(rank), rsLoRA's; it must be alpha / rank
-self.scale = alpha / rank
+self.scale = alpha / rank**0.5
* forward does not scale; it must add alpha / rank * B A x
-self.linear(x) + self.scale * (x @
+self.linear(x) + (x @
* the given linear trains as well; only A and B may
-.requires_grad_(False)
* the bias of the linear trains as well; only A and B may
-        self.linear = linear.requires_grad_(False)
+        self.linear = linear
+        linear.weight.requires_grad_(False)
* the linear is left out of forward
-return self.linear(x) + \
|
+return \
|
* the adapter is left out of forward
- + self.scale * (x @ self.a.T @ self.b.T)
+ + 0 * (x @ self.a.T @ self.b.T)
* the adapter reads the linear's output (serial); it reads x
-return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)
+y = self.linear(x)
+        return y + self.scale * (y[..., : x.shape[-1]] @ self.a.T @ self.b.T)
* merged() adds the update to the given linear; it must make a new one
-copy.deepcopy(self.linear)
+self.linear
* merged() does not scale; it must add alpha / rank * B A
-linear.weight.data += self.scale *
+linear.weight.data +=
* merged() leaves the update out
-        linear.weight.data += self.scale * (self.b @ self.a).detach()  # (out, in)
-
* merged() subtracts the update; that is unmerging
-weight.data += self
+weight.data -= self
* merged() adds the update twice
-weight.data += self.scale
+weight.data += 2 * self.scale
* merged() has the update alone, without the linear's weight
-weight.data += self
+weight.data = self
* merged() loses the bias
-        return linear
-
+        linear.bias = None
+        return linear
+
* merged() returns the weight; it must be an nn.Linear
-        return linear
-
+        return linear.weight
+
# next_token_loss
* nothing is shifted: logits at t are compared with ids at t; it must be t + 1
-F.cross_entropy(wide[:, :-1].mT, ids[:, 1:],
+F.cross_entropy(wide[:, :-1].mT, ids[:, :-1],
* nothing is shifted, the last position included
-wide[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)
-    pairs = mask[:, :-1] & mask[:, 1:]
+wide.mT, ids, reduction="none")
+    pairs = mask
* it is shifted the wrong way: logits at t + 1 are compared with ids at t
-wide[:, :-1].mT, ids[:, 1:],
+wide[:, 1:].mT, ids[:, :-1],
* it is shifted twice: logits at t against ids at t + 2
-wide[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)
-    pairs = mask[:, :-1] & mask[:, 1:]
+wide[:, :-2].mT, ids[:, 2:], reduction="none")
+    pairs = mask[:, :-2] & mask[:, 2:]
* ids are rolled, so the last position is asked for the first id
-wide[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)
-    pairs = mask[:, :-1] & mask[:, 1:]
+wide.mT, ids.roll(-1, 1), reduction="none")
+    pairs = mask & mask.roll(-1, 1)
* the mask is ignored: padding is counted
-losses[pairs].sum() / pairs.sum().clamp(min=1)
+losses.mean()
* the mask of the token at t + 1 alone is used; both must be real
-mask[:, :-1] & mask[:, 1:]
+mask[:, 1:]
* the mask of the token at t alone is used; both must be real
-mask[:, :-1] & mask[:, 1:]
+mask[:, :-1]
* a pair counts where one of its tokens is real; both must be
-mask[:, :-1] & mask[:, 1:]
+mask[:, :-1] | mask[:, 1:]
* the mask is inverted: padding alone is counted
-mask[:, :-1] & mask[:, 1:]
+~(mask[:, :-1] & mask[:, 1:])
* the sum is divided by all pairs, padding included
-pairs.sum().clamp(min=1)
+losses.numel()
* the sum is divided by the real tokens; it must be the real pairs
-pairs.sum().clamp(min=1)
+mask.sum().clamp(min=1)
* rows are averaged first, and their means averaged; every pair counts the same
-losses[pairs].sum() / pairs.sum().clamp(min=1)
+torch.stack([row[m].mean() for row, m in zip(losses, pairs)]).mean()
* it is the sum; the mean was asked for
-losses[pairs].sum() / pairs.sum().clamp(min=1)
+losses[pairs].sum()
* the sum is divided by the rows; it must be the pairs
-losses[pairs].sum() / pairs.sum().clamp(min=1)
+losses[pairs].sum() / len(ids)
* it is in bits; cross entropy is in nats
-losses[pairs].sum() / pairs.sum().clamp(min=1)
+losses[pairs].sum() / pairs.sum().clamp(min=1) / 0.6931471805599453
* it is the perplexity; the loss is its logarithm
-losses[pairs].sum() / pairs.sum().clamp(min=1)
+(losses[pairs].sum() / pairs.sum().clamp(min=1)).exp()
* the softmax is taken twice; cross_entropy takes logits
-wide[:, :-1].mT
+wide[:, :-1].softmax(dim=-1).mT
* the sign is wrong: log p is averaged; the loss is -log p
-    losses = F
+    losses = -F
# sample
* it always takes the likeliest token; it must draw
-torch.multinomial(probs, 1, generator=generator)
+probs.argmax(dim=-1, keepdim=True)
* what is kept is drawn uniformly; the probabilities must count
-torch.multinomial(probs, 1,
+torch.multinomial((probs > 0).to(probs.dtype), 1,
* logits are multiplied by the temperature; they are divided by it
-(ranked / temperature)
+(ranked * temperature)
* the temperature is ignored
-(ranked / temperature)
+ranked
* the temperature divides the probabilities, after the softmax, where it changes nothing for top-p
  = None; it divides the logits
-(ranked / temperature).softmax(dim=-1)
+ranked.softmax(dim=-1) / temperature
* top-p is decided without the temperature; it comes first
-before = probs.cumsum(dim=-1) - probs \
|
+plain = ranked.softmax(dim=-1)
+        before = plain.cumsum(dim=-1) - plain \
|
* top-p is one token short: the token that reaches p is dropped; it stays
-probs.masked_fill(before >= top_p, 0)
+probs.masked_fill(probs.cumsum(dim=-1) >= top_p, 0)
+        probs[:, 0] += 1e-9
* top-p keeps one token too many: it stops when p is reached
-probs.masked_fill(before >= top_p, 0)
+probs.masked_fill(F.pad(before, (1, 0))[:, :-1] >= top_p, 0)
* top-p keeps the tail: what is needed to reach p is dropped
-before >= top_p
+before < top_p
* p is a limit for each token; it is one for their sum
-before >= top_p
+probs < 1 - top_p
* top-p is ignored
-if top_p is not None and top_p < 1:
+if False:
* top-k is ignored
-if top_k is not None:
+if False:
* top-k keeps one token too many
-ranked[:, top_k:]
+ranked[:, top_k + 1 :]
* top-k is one token short
-ranked[:, top_k:]
+ranked[:, max(top_k - 1, 1) :]
* top-k keeps the least likely tokens
-descending=True
+descending=top_k is None
* top-p counts the tokens that top-k has dropped; what is left must be renormalised
-    if top_k is not None:
-        ranked[:, top_k:] = -torch.inf
-    temperature = max(temperature, torch.finfo(torch.float32).tiny)  # 1 / it stays finite
-    probs = (ranked / temperature).softmax(dim=-1)
-
+    probs = (ranked / temperature).softmax(dim=-1)
+    if top_k is not None:
+        probs[:, top_k:] = 0
+
* ranks are returned; they must be turned back into token ids
-return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))
+return torch.multinomial(probs, 1, generator=generator)
* the generator is ignored: the global one is moved
-1, generator=generator)
+1)
* the first row's probabilities are used for all rows
-torch.multinomial(probs, 1,
+torch.multinomial(probs[:1].expand_as(probs), 1,
* temperature 0 divides by zero; it is the argmax
-    if temperature == 0:
+    if temperature == 0:
+        return torch.multinomial((logits / 0).softmax(dim=-1), 1, generator=generator)
+    if temperature < 0:
* temperature 0 takes the least likely token; it is the argmax
-return logits.argmax(dim=-1, keepdim=True)
+return logits.argmin(dim=-1, keepdim=True)
* ids come back as [B]; they must be [B, 1]
-return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))
+return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]
* temperature 0 draws all the same, from what is nearly certain; it is the argmax and draws
  nothing
-    if temperature == 0:
-        return logits.argmax(dim=-1, keepdim=True)
+    temperature = max(temperature, 1e-4)
# generate
* the whole text is fed at every step beside the cache; one token is
-logits, cache = model(step, cache)
+logits, cache = model(ids, cache)
* the whole text is fed at every step, without the cache; it is fed once, then one token a step
-logits, cache = model(step, cache)
+logits, cache = model(ids, None)
* the cache is never handed on
-logits, cache = model(step, cache)
+logits, cache = model(step, None)
* the prompt is fed one token a call; it is fed at once
-    step, cache = ids, None
-
+    step, cache = ids, None
+    for token in ids[:, :-1].split(1, dim=1):
+        _, cache = model(token, cache)
+        step = ids[:, -1:]
+
* the prompt's logits are computed once more: n tokens are n calls
-    step, cache = ids, None
-
+    step, cache = ids, None
+    model(ids, None)
+
* one call too many: the last token is fed although nothing is asked of it
-    return ids
-
+    model(step, cache)
+    return ids
+
* the least likely token is taken
-logits[:, -1].argmax
+logits[:, -1].argmin
* the logits of the first position are read; the next token is the last one's
-logits[:, -1].argmax
+logits[:, 0].argmax
* the token is drawn; greedy takes the likeliest
-logits[:, -1].argmax(dim=-1, keepdim=True)
+torch.multinomial(logits[:, -1].softmax(dim=-1), 1)
* the first row's token goes to all rows
-logits[:, -1].argmax(dim=-1, keepdim=True)
+logits[:1, -1].argmax(dim=-1, keepdim=True).expand(len(ids), 1)
* an eos in the prompt ends its row; it does not count
-done = torch.zeros_like(ids[:, :1], dtype=torch.bool)
+done = (ids == eos_id).any(dim=1, keepdim=True) if eos_id is not None else \
|torch.zeros_like(ids[:, :1], dtype=torch.bool)
* a row that has ended goes on; it is filled with eos
-            step = step.masked_fill(done, eos_id)
-
* a row that has ended is filled with 0; it is filled with eos
-step.masked_fill(done, eos_id)
+step.masked_fill(done, 0)
* all rows stop when one has ended
-if done.all():
+if done.any():
* it does not stop when all rows have ended
-        if done.all():
-            break
-
* eos_id is ignored
-if eos_id is not None:
+if False:
* the last eos is left out; it belongs to the result
-        ids = torch.cat((ids, step), dim=1)
-        if done.all():
-            break
-
+        if done.all():
+            break
+        ids = torch.cat((ids, step), dim=1)
+
* the prompt is left out; prompt and continuation were asked for
-    return ids
-
+    return ids[:, -max_new_tokens:] if max_new_tokens else ids[:, :0]
+
* one token too few
-range(max_new_tokens)
+range(max_new_tokens - 1)
* one token too many
-range(max_new_tokens)
+range(max_new_tokens + 1)
* max_new_tokens is taken as the whole length; the prompt does not count
-range(max_new_tokens)
+range(max(max_new_tokens - ids.shape[1], 0))
# speculate
* everything that was drafted is accepted
-accepted = agrees.long().cumprod(dim=1).sum()
+accepted = agrees.shape[1]
* nothing is accepted: one token comes back always
-accepted = agrees.long().cumprod(dim=1).sum()
+accepted = 0 * agrees.sum()
* all agreements are counted; it ends at the first disagreement
-agrees.long().cumprod(dim=1).sum()
+agrees.sum()
* the drafted ids come back; where target disagrees its own must
-return greedy[:, : accepted + 1]
+return torch.cat((drafted[:, T:], greedy[:, -1:]), dim=1)[:, : accepted + 1]
* target's own token is left out: accepted + 1 are known
-return greedy[:, : accepted + 1]
+return greedy[:, :accepted]
* one token is missing when all were accepted: target's own comes free, n_draft + 1 in all
-return greedy[:, : accepted + 1]
+return greedy[:, : min(int(accepted) + 1, n_draft)]
* the prompt comes back too; the new ids only were asked for
-return greedy[:, : accepted + 1]
+return torch.cat((ids, greedy[:, : accepted + 1]), dim=1)
* target's logits are read one place too late: those at T - 1 give the token at T
-greedy = target(drafted)[:, T - 1 :].argmax(dim=-1)
+greedy = target(drafted)[:, T:].argmax(dim=-1)
+    greedy = torch.cat((greedy, greedy[:, -1:]), dim=1)
* one token too many is drafted
-range(n_draft)
+range(n_draft + 1)
* target is called for every token; once is the point
-greedy = target(drafted)[:, T - 1 :].argmax(dim=-1)
+greedy = torch.stack([target(drafted[:, : T + i])[:, -1].argmax(dim=-1) for i in range(n_draft \
|+ 1)], dim=1)
* target and draft are exchanged: draft's choice comes back
-drafted = torch.cat((drafted, draft(drafted)
+drafted = torch.cat((drafted, target(drafted)
* the draft reads the prompt alone each time; it reads what it has drafted too
-draft(drafted)[:, -1:]
+draft(ids)[:, -1:]
* the token where target disagrees is kept, and one more behind it
-return greedy[:, : accepted + 1]
+return greedy[:, : accepted + 2]
* all or nothing: one disagreement throws all away
-accepted = agrees.long().cumprod(dim=1).sum()
+accepted = n_draft * int(agrees.all())
* the last drafted id is accepted unseen
-accepted = agrees.long().cumprod(dim=1).sum()
+accepted = agrees.long()[:, :-1].cumprod(dim=1).sum() + agrees[:, :-1].all().long()
"""


def read_mistakes(text: str) -> dict[str, list[Fault]]:
    """The faults of each exercise, as they are written above."""
    found: dict[str, list[Fault]] = {}
    for section in re.split(r"^# ", text.strip(), flags=re.M)[1:]:
        name, _, rest = section.partition("\n")
        found[name] = []
        for block in re.split(r"^\* ", rest.replace("\\\n|", ""), flags=re.M)[1:]:
            lines = block.rstrip("\n").split("\n")
            said = " ".join(line.strip() for line in lines if line[0] not in "-+")
            old, new = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
            found[name].append(Fault(said, old, new))
    return found


FAULTS = read_mistakes(KNOWN_MISTAKES)


# =============================================================================================
# The judge
# =============================================================================================


class Verdict(NamedTuple):
    """On one exercise: right or not, the lines below the first, and the mistake by name."""

    name: str
    right: bool
    headline: str
    lines: tuple[str, ...] = ()
    mistake: str | None = None

    def text(self) -> str:
        return "\n".join([f"[{self.name}] {self.headline}", *(f"  {line}" for line in self.lines)])


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeUp in their code when it takes longer."""

    def stop(*_: object) -> None:
        raise TimeUp

    clocks = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {kind: signal.signal(kind, stop) for kind in clocks}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    try:
        yield
    finally:
        for kind, clock in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(kind, before[kind])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Their code runs in float64 with gradients, and what it sets globally is put back."""
    dtype, threads, rng = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device(None)
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_rng_state(rng)


def judge(text: str, names: list[str] | None = None, filename: str = "mine.py") -> list[Verdict]:
    """Execute a text and judge the exercises that it defines, or those named."""
    return list(verdicts(text, names, filename))


def verdicts(text: str, names: list[str] | None, filename: str) -> Iterator[Verdict]:
    """One after the other."""
    THEIRS.add(filename)
    lines = text.splitlines(keepends=True)
    linecache.cache[filename] = (len(text), None, lines, filename)
    stated = re.findall(r"^(?:class|def|async def)\s+(\w+)|^(\w+)\s*=", text, re.M)
    stated = [a or b for a, b in stated]
    asked = names or [name for name in EXERCISES if name in stated]
    try:
        with undisturbed(), limited(SECONDS):
            with default_dtype(torch.float32):
                namespace = execute(text, filename)
            remember_caches(namespace)
    except TimeUp:
        why = (f"{Path(filename).name} does not come to an end within {SECONDS:.0f} s",)
        yield from (Verdict(name, False, "wrong", why) for name in asked or [Path(filename).name])
        return
    except (Exception, SystemExit) as error:
        why = raised(error).lines
        if isinstance(error, SystemExit):
            why = (f"{Path(filename).name} exits when it is run", *why)
        yield from (
            Verdict(name, False, "wrong", why[:8]) for name in asked or [Path(filename).name]
        )
        return
    asked = names or [name for name in EXERCISES if name in namespace]
    if not asked:
        why = ("no exercise's name is defined in it", "the names: " + ", ".join(EXERCISES))
        yield Verdict(Path(filename).name, False, "wrong", tuple(textwrap.wrap("; ".join(why), 96)))
    for name in asked:
        yield judge_one(name, namespace, Path(filename).name)


def judge_one(name: str, namespace: dict[str, object], filename: str) -> Verdict:
    """The verdict on one definition of a namespace."""
    exercise = EXERCISES[name]
    if name not in namespace:
        return Verdict(name, False, "wrong", (f"{filename} does not define {name}",))
    theirs = namespace[name]
    want = "a class" if isinstance(exercise, ModuleExercise) else "a function"
    if not callable(theirs):
        return Verdict(name, False, "wrong", (f"{name} must be {want}, it is {described(theirs)}",))
    Judgement.last = None
    try:
        with undisturbed(), limited(SECONDS):
            if isinstance(exercise, ModuleExercise):
                return judge_module(exercise, theirs)
            return judge_function(exercise, theirs)
    except TimeUp:
        case = Judgement.last or exercise.cases[0]
        why = (
            f"it does not come to an end within {SECONDS:.0f} s",
            f"case: {case.call}",
            see(exercise),
        )
        return Verdict(name, False, "wrong", why)
    except Exception as error:  # nothing of theirs may end the verdicts on the rest
        why = raised(error).lines
        return Verdict(name, False, "not judged", (*why[-6:], see(exercise)))


def explained(exercise: Exercise, faults: Iterable[Fault]) -> Exercise:
    """The exercise of the part in which the first fault stands, as attention in ModernBlock."""
    source = answer_source(exercise.name)
    for fault in faults:
        before = source[: source.index(fault.old) + 1]
        part = re.findall(r"^(?:def|class) (\w+)", before, re.M)
        return EXERCISES.get(part[-1] if part else "", exercise)
    return exercise


def see(exercise: Exercise) -> str:
    """Where to read about it."""
    return f"see [{exercise.demo}] and {exercise.section} of the notes"


class Judgement:
    """What the cases give for one subject, each run once."""

    last: Case | None = None  # for a verdict on what never ends

    def __init__(self, exercise: Exercise, subject: object):
        self.exercise, self.subject = exercise, subject
        self.found: dict[int, dict[str, object]] = {}

    def __getitem__(self, i: int) -> dict[str, object]:
        if i not in self.found:
            Judgement.last = self.exercise.cases[i]
            self.found[i] = outcome(self.exercise.cases[i], self.subject)
        return self.found[i]

    def differences(self, other: "Judgement") -> Iterator[tuple[int, Difference]]:
        """Where another's results are not these, by case; Unjudged where these are none."""
        for i, case in enumerate(self.exercise.cases):
            if {"raised", "trouble"} & set(self[i]):
                raise Unjudged(f"the answer itself fails in {case.call}: {kind_of(self[i])}")
            found = difference(self[i], other[i], case)
            if found is not None:
                yield i, found

    def behaves_as(self, other: "Judgement", order: Iterable[int]) -> bool:
        """Whether all results are the same, costs too."""
        cases = self.exercise.cases
        return all(difference(self[i], other[i], cases[i], exact=True) is None for i in order)


@functools.cache
def judged_known(name: str, *faults: Fault) -> Judgement:
    """The answer's results, with faults in it."""
    return Judgement(EXERCISES[name], EXERCISES[name].known(*faults))


@functools.cache
def known_faults(name: str) -> tuple[tuple[Fault, ...], ...]:
    """Those of the exercise, then those of other exercises whose answers it contains."""
    source = answer_source(name)
    found = list(FAULTS[name])
    for other, faults in FAULTS.items():
        if other != name and re.search(rf"^(def|class) {other}\b", source, re.M):
            found += [f for f in faults if source.count(f.old) == 1]
    return tuple((fault,) for fault in dict.fromkeys(found))


def pairs(name: str) -> Iterator[tuple[Fault, Fault]]:
    """Two faults at once, those of the exercise itself first."""
    single = [fault for (fault,) in known_faults(name)]
    own = len(FAULTS[name])
    two = sorted(
        itertools.combinations(range(len(single)), 2), key=lambda p: (p[0] >= own) + (p[1] >= own)
    )
    source = answer_source(name)
    for i, j in two:
        a, b = single[i], single[j]
        if source.replace(a.old, a.new).count(b.old) == 1 and a.old != b.old:
            yield a, b


def says(faults: Iterable[Fault]) -> str:
    return " AND ".join(fault.says for fault in faults)


def judge_function(exercise: Exercise, function: Callable) -> Verdict:
    """All cases, and where one fails, the known mistake that gives the same in all."""
    answer, theirs = judged_known(exercise.name), Judgement(exercise, function)
    wrong = list(answer.differences(theirs))
    if not wrong:
        return right(exercise, theirs)
    order, fitting = case_order(exercise, wrong), []
    if telling(theirs):
        for faults in known_faults(exercise.name):
            fault = judged_known(exercise.name, *faults)
            if fault.behaves_as(theirs, order):
                fitting.append((distance(fault, theirs), len(fitting), faults))
        until = time.process_time() + NAMING
        for faults in () if fitting else pairs(exercise.name):
            if judged_known(exercise.name, *faults).behaves_as(theirs, order):
                fitting.append((0.0, 0, faults))
                break
            if time.process_time() > until:
                break
    return verdict(exercise, wrong, min(fitting)[2] if fitting else (), theirs)


def distance(one: Judgement, other: Judgement) -> float:
    """The largest difference between the numbers of two, as a share: which of two faults fits."""
    largest = 0.0
    for i in range(len(one.exercise.cases)):
        for key, want in one[i].items():
            have = other[i].get(key)
            if isinstance(want, Tensor) and isinstance(have, Tensor) and want.numel():
                gap = (want.detach().double() - have.detach().double()).abs().nan_to_num(0).max()
                largest = max(largest, float(gap / (want.detach().double().abs().max() + 1e-12)))
    return largest


def case_order(exercise: Exercise, wrong: list[tuple[int, Difference]]) -> list[int]:
    """The failing cases first: they tell faults apart soonest."""
    failing = [i for i, _ in wrong]
    return failing + [i for i in range(len(exercise.cases)) if i not in failing]


def telling(theirs: Judgement) -> bool:
    """Whether something is known of theirs beside exceptions."""
    return any("raised" not in theirs[i] for i in range(len(theirs.exercise.cases)))


def right(exercise: Exercise, theirs: Judgement) -> Verdict:
    return Verdict(exercise.name, True, f"right  ({len(exercise.cases)} cases)")


def verdict(
    exercise: Exercise,
    wrong: list[tuple[int, Difference]],
    faults: tuple[Fault, ...],
    theirs: Judgement,
) -> Verdict:
    """At most eight lines: the mistake, the smallest case, the first difference, where to read."""
    i, found = wrong[0]
    mistake = says(faults) or None
    case = exercise.cases[i]
    if found.where == "trouble":
        lines = [mistake or found.lines[0], f"case: {case.call}"]
    elif found.where == "raised":
        lines = [*([mistake] if mistake else []), f"case: {case.call}", *found.lines]
    else:
        lines = [mistake or UNKNOWN, f"case: {case.call}"]
        lines += [f"{found.where}: {line}" for line in found.lines]
        if isinstance(theirs.subject, Theirs) and found.where == "the gradient of the parameters":
            lines[-1] = theirs.subject.gradient_in_words(found.lines[0])
    if mistake and len(lines[0]) > 200:
        lines[0:1] = textwrap.wrap(mistake, 110)
    head = f"wrong  ({len(wrong)} of {len(exercise.cases)} cases)"
    return Verdict(
        exercise.name, False, head, (*lines[:7], see(explained(exercise, faults))), mistake
    )


def judge_module(exercise: ModuleExercise, cls: Callable) -> Verdict:
    return read_module(exercise, cls)[0]


def read_module(exercise: ModuleExercise, cls: Callable) -> tuple[Verdict, Theirs | None]:
    """Read their parameters, run all cases, name the mistake where one fails; and the reading."""
    usual = exercise.sizes[0]
    theirs = Theirs(exercise, cls, judged_known(exercise.name).subject)
    if exercise.first(theirs.like.make(usual).module, usual) is None:
        raise Unjudged(f"the answer itself fails in {exercise.cases[0].call}")
    try:
        Judgement.last = exercise.cases[0]
        with default_dtype(torch.float32), contextlib.suppress(Trouble):
            theirs.built(usual)  # what they keep for good is made as in a program of theirs
        theirs.reading(usual)
    except (Exception, SystemExit) as error:  # in their __init__ or forward
        trouble = isinstance(error, Trouble)
        lines = (str(error),) if trouble else raised(error).lines
        call = f"case: {exercise.call(usual, exercise.inputs(usual, 2, 5))}"
        lines = (*lines, call) if trouble else (call, *lines)
        return Verdict(exercise.name, False, "wrong", (*lines[:7], see(exercise))), None
    return Search(exercise, theirs).verdict()


class Search:
    """The assignments of a class of theirs, tried one after the other."""

    def __init__(self, exercise: ModuleExercise, theirs: Theirs):
        self.exercise, self.theirs, self.usual = exercise, theirs, exercise.sizes[0]
        self.answer = judged_known(exercise.name)
        self.wanted = exercise.first(self.answer.subject.make(self.usual).module, self.usual)
        self.tried: list[tuple[dict, tuple]] = []
        self.outputs: list[Tensor] = []  # of one full pass, NaN where it raised
        self.fitting: list[int] = []  # assignments with the answer's output
        self.judged: dict[int, Judgement] = {}

    def verdict(self) -> tuple[Verdict, Theirs | None]:
        """Right, or the mistake, looked for among the likeliest assignments first."""
        assignments = self.theirs.assignments(self.usual)
        for stage in (LIKELY, ASSIGNMENTS):
            until = time.process_time() + SEARCH
            while len(self.tried) < stage and time.process_time() < until:
                if (assignment := next(assignments, None)) is None:
                    break
                found = self.attempt(assignment)
                if found is not None:
                    return right(self.exercise, found), found.subject
            named = self.named(known_faults(self.exercise.name))
            if named is not None or assignment is None:
                break
        if named is None:
            named = self.named(pairs(self.exercise.name), time.process_time() + NAMING)
        if named is not None:
            faults, found = named
            wrong = list(self.answer.differences(found))
            return verdict(self.exercise, wrong, faults, found), found.subject
        if not self.tried:
            module, template = (
                self.theirs.built(self.usual),
                self.answer.subject.template(self.usual),
            )
            return unrecognised(self.exercise, module, template), None
        found = self.judgement(self.fitting[0] if self.fitting else 0)
        wrong = list(self.answer.differences(found))
        judged = verdict(self.exercise, wrong, (), found)
        if not self.theirs.all_tried and judged.lines[0] == UNKNOWN:
            unsure = f"{UNKNOWN} in the {len(self.tried)} likeliest readings of its parameters;"
            lines = (f"{unsure} names such as q, k, v, o make it sure", *judged.lines[1:])
            judged = judged._replace(lines=lines)
        return judged, found.subject

    def attempt(self, assignment: tuple[dict, tuple]) -> Judgement | None:
        """The judgement, when all cases give what the answer gives."""
        module = self.theirs.built(self.usual)
        load(module, assignment[0], self.answer.subject.template(self.usual).values)
        output = self.exercise.first(module, self.usual)
        fits = isinstance(output, Tensor) and output.shape == self.wanted.shape
        self.tried.append(assignment)
        self.outputs.append(output.double() if fits else torch.full_like(self.wanted, math.nan))
        if not near(self.wanted, output):
            return None
        self.fitting.append(len(self.tried) - 1)
        found = self.judgement(self.fitting[-1])
        return found if next(self.answer.differences(found), None) is None else None

    def judgement(self, i: int) -> Judgement:
        """On theirs with its parameters read by assignment i."""
        if i not in self.judged:
            self.judged[i] = assigned(self.theirs, self.usual, self.tried[i])
        return self.judged[i]

    def named(
        self, known: Iterable[tuple[Fault, ...]], until: float = math.inf
    ) -> tuple[tuple[Fault, ...], Judgement] | None:
        """The nearest single fault, or the first pair, that gives the same in all cases."""
        stacked = torch.stack(self.outputs).flatten(1) if self.outputs else None
        found = []
        for faults in known:
            judged = self.read(faults, stacked)
            if judged is not None and len(faults) > 1:
                return faults, judged
            if judged is not None:
                gap = distance(judged_known(self.exercise.name, *faults), judged)
                found.append((gap, len(found), faults, judged))
            if time.process_time() > until:
                break
        return min(found)[2:] if found else None

    def read(self, faults: tuple[Fault, ...], stacked: Tensor | None) -> Judgement | None:
        """Theirs, as some assignment reads it, when it behaves like these faults."""
        try:
            fault = judged_known(self.exercise.name, *faults)
            template = fault.subject.template(self.usual)
            output = self.exercise.first(fault.subject.make(self.usual).module, self.usual)
        except Exception:  # two faults may not go together
            return None
        if template.names != self.answer.subject.template(self.usual).names:
            alone = len(faults) == 1
            return other_parameters(self.exercise, self.theirs, fault) if alone else None
        if stacked is None:
            return None
        alike = [0]  # where nothing comes out, exceptions are compared, of the likeliest reading
        if output is not None and output.shape == self.wanted.shape:
            gaps = (stacked - output.flatten()).abs().amax(dim=1)
            alike = (gaps <= CLOSE * output.abs().max() + 1e-12).nonzero()[:, 0].tolist()
        for i in alike:
            found = self.judgement(i)
            if telling(found) and behaves(self.answer, fault, found):
                return found
        return None


def assigned(theirs: Theirs, usual: dict[str, int], assignment: tuple[dict, tuple]) -> Judgement:
    """The judgement on theirs with its parameters read so."""
    reader = Theirs(theirs.exercise, theirs.cls, theirs.like)
    reader.modules, reader.readings = theirs.modules, theirs.readings
    reader.assign(usual, *assignment)
    return Judgement(theirs.exercise, reader)


def behaves(answer: Judgement, fault: Judgement, theirs: Judgement) -> bool:
    """Whether theirs gives what the fault gives, its failing cases first."""
    wrong = list(answer.differences(fault))
    return bool(wrong) and fault.behaves_as(theirs, case_order(answer.exercise, wrong))


def other_parameters(
    exercise: ModuleExercise, theirs: Theirs, fault: Judgement
) -> Judgement | None:
    """Theirs read by the parameters of a fault, which are not the answer's: those it uses."""
    usual = exercise.sizes[0]
    answer = judged_known(exercise.name)
    for like in (fault.subject, Used(exercise, fault.subject.cls)):
        reader = Theirs(exercise, theirs.cls, like)
        reader.modules, reader.seconds = theirs.modules, 0.1
        with contextlib.suppress(Exception):
            module, template = reader.built(usual), like.template(usual)
            count = sum(math.prod(unit.shape) for unit in split_pairs(units_of(module), module))
            output = exercise.first(like.make(usual).module, usual)
            if template.size != count:
                continue
            for layout, keys in itertools.islice(reader.assignments(usual), 40):
                load(module, layout, template.values)
                if near(output, exercise.first(module, usual)):
                    judged = assigned(reader, usual, (layout, keys))
                    if behaves(answer, Judgement(exercise, like), judged):
                        return judged
    return None


class Used(Known):
    """A known class without the parameters that nothing depends on."""

    def template(self, sizes: dict[str, int]) -> Template:
        if key_of(sizes) not in self.templates:
            module = self.exercise.build(self.cls, sizes)
            found = self.exercise.results(module, *self.exercise.inputs(sizes, 2, 5), guarded=False)
            found["y"].sum().backward()
            for p in module.parameters():
                p.requires_grad_(p.grad is not None)
            self.templates[key_of(sizes)] = Template(self.exercise, module, sizes)
        return self.templates[key_of(sizes)]


def unrecognised(exercise: ModuleExercise, module: nn.Module, template: Template) -> Verdict:
    """Their parameters, beside what the answer has."""
    own = [
        f"{m.name} {list(m.weight.shape)}" + ("" if m.bias is None else " with bias")
        for m in template.maps.values()
    ]
    own += [f"{name} {list(places.shape)}" for name, places in template.vectors.items()]
    theirs = [f"{name} {list(p.shape)}" for name, p in module.named_parameters() if p.requires_grad]
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    made = ", ".join(f"{key}={size}" for key, size in exercise.sizes[0].items())
    lines = [f"its parameters are not those of the answer in any layout known here, {made}:"]
    for who, number, parts in (("answer", template.size, own), ("yours", count, theirs)):
        listed = ", ".join(parts) or "none (nn.Module does not see what lies in a plain list)"
        text = f"{who}, {number} numbers: {listed}"
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", max_lines=3, placeholder=" …")
    return Verdict(exercise.name, False, "layout not recognised", (*lines[:7], see(exercise)))


def read_block(text: str, filename: str) -> tuple[Verdict, Theirs | None]:
    """The verdict on a text's ModernBlock, and, where its parameters could be read, a reader.

    reader.cls is the class; reader.fill(module, sizes, weights) writes weights under the names of
    whiteboard.ModernBlock's state dict into an instance of any sizes (d_model, n_q_heads,
    n_kv_heads, d_ff). The text runs in this process, without a time limit.
    """
    exercise = EXERCISES["ModernBlock"]
    THEIRS.add(filename)
    with undisturbed():
        try:
            cls = execute(text, filename)[exercise.name]
        except Exception as error:
            lines = raised(error).lines
            return Verdict(exercise.name, False, "wrong", lines), None
        return read_module(exercise, cls)


# =============================================================================================
# Their file in a process of its own
# =============================================================================================


def try_file(path: str, names: list[str] | None = None) -> tuple[list[Verdict], str]:
    """Verdicts on a file, and what it printed; OSError where it cannot be read."""
    found: list[Verdict] = []
    printed = ""
    for part in tried(path, names):
        if isinstance(part, Verdict):
            found.append(part)
        else:
            printed = part
    return found, printed


def tried(path: str, names: list[str] | None = None) -> Iterator["Verdict | str"]:
    """The verdicts as they come, at the end what their file printed.

    A child process runs the file: it may hang, exit or print without end. Each exercise that ends
    the child gets its verdict from here, the others a child of their own.
    """
    raw = Path(path).read_bytes()
    name = Path(path).name
    printed = b""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Verdict(name, False, "wrong", (f"{name} is not UTF-8: {error.reason}",))
        yield ""
        return
    left = names
    while left is None or left:
        asked, seen, why = left or [], [], ""
        for kind, what in child_says(text, left, path):
            if kind == "names":
                asked = what
            elif kind == "verdict":
                seen.append(what["name"])
                yield Verdict(**{**what, "lines": tuple(what["lines"])})
            elif kind == "printed":
                printed = printed or what
            else:
                why = what
        missing = [one for one in asked if one not in seen]
        if why and (missing or not seen):
            first = missing[0] if missing else name
            yield Verdict(first, False, "wrong", (why,))
        left = missing[1:]
        if not why:
            break
    yield printed.decode(errors="replace")


def child_says(text: str, names: list[str] | None, path: str) -> Iterator[tuple[str, object]]:
    """Fork, judge there, and pass on what comes back; why it ended, unless it came to the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    (results, results_in), (output, output_in) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads; none runs Python here
        pid = os.fork()
    if pid == 0:
        os.close(results), os.close(output)
        child(text, names, path, results_in, output_in)
    os.close(results_in), os.close(output_in)
    lines, printed, ended, killed = b"", b"", False, False
    selector = selectors.DefaultSelector()
    selector.register(results, selectors.EVENT_READ)
    selector.register(output, selectors.EVENT_READ)
    until = time.monotonic() + PATIENCE * SECONDS + 4
    try:
        while results in selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if time.monotonic() > until:
                killed = True
                break
            for key, _ in ready:
                data = os.read(key.fd, 65_536)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == output:
                    printed = (printed + data)[:20_000]
                else:
                    lines += data
                    until = time.monotonic() + PATIENCE * SECONDS + 4
            while b"\n" in lines:
                line, _, lines = lines.partition(b"\n")
                kind, what = json.loads(line)
                ended = ended or kind == "end"
                if kind != "end":
                    yield kind, what
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(results), os.close(output)
    yield "printed", printed
    if killed:
        yield "why", f"it does not come to an end within {SECONDS:.0f} s, and cannot be interrupted"
    elif not ended:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        yield "why", f"it ends the process that runs it ({how})"


def child(text: str, names: list[str] | None, path: str, results: int, output: int) -> None:
    """Judge in the forked process and leave it."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115, for the life of the process
    sys.stdout = open(1, "w", closefd=False, errors="replace", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="replace", buffering=1)  # noqa: SIM115
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).resolve().parent))

    def say(kind: str, what: object) -> None:
        data = (json.dumps([kind, what]) + "\n").encode()
        while data:
            data = data[os.write(results, data) :]

    try:
        stated = names or [
            name for name in EXERCISES if re.search(rf"^(class|def)\s+{name}\b", text, re.M)
        ]
        say("names", stated)
        for one in verdicts(text, names, path):
            say("verdict", one._asdict())
        say("end", None)
    finally:
        os._exit(0)


# =============================================================================================
# Command line
# =============================================================================================


def signature(node: ast.FunctionDef) -> str:
    """Its first line as it stands in the answer."""
    return definitions()[2][node.lineno - 1].rstrip()


def template_text(name: str) -> str:
    """Signature and docstring of an exercise, with empty bodies."""
    node = definitions()[1][name]
    exercise = EXERCISES[name]
    doc = textwrap.indent(f'"""{exercise.template}\n"""', "    ")
    if isinstance(node, ast.FunctionDef):
        return f"{signature(node)}\n{doc}\n    ..."
    parts = [f"class {name}(nn.Module):\n{doc}"]
    for method in node.body:
        if isinstance(method, ast.FunctionDef):
            body = "        super().__init__()\n" if method.name == "__init__" else ""
            parts.append(f"{signature(method)}\n{body}        ...")
    return "\n\n".join(parts)


def blank(names: list[str]) -> str:
    """A file to fill in."""
    imports = "import torch\nimport torch.nn.functional as F\nfrom torch import nn"
    note = "# B batch, T length of the stream, S keys, H query heads, G KV heads, d_h head width"
    return "\n\n\n".join([f"{imports}\n\n{note}", *map(template_text, names)]) + "\n"


def progress_file() -> Path:
    """Where solved exercises are remembered."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "transformer_block_practice.json"


def read_progress(path: Path) -> dict[str, str]:
    """The day on which each exercise was solved; empty where the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["solved"]
        return {name: str(day) for name, day in found.items() if name in EXERCISES}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def remember(path: Path, names: Iterable[str]) -> None:
    """Note what was solved; a run that cannot write still judges."""
    solved = read_progress(path)
    new = {name: time.strftime("%Y-%m-%d") for name in names if name not in solved}
    if new:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"solved": {**solved, **new}}, indent=1)
            path.write_text(text + "\n", encoding="utf-8")


LEVELS = {1: "functions", 2: "attention and blocks", 3: "latents, experts, and the loop around"}


def listing(solved: dict[str, str]) -> str:
    """The exercises in three levels."""
    lines = []
    for level, title in LEVELS.items():
        lines += [f"level {level}: {title}"]
        for one in ALL:
            if one.level == level:
                mark = "x" if one.name in solved else " "
                lines.append(f"  [{mark}] {one.name:18} {one.asks:45} {one.section}")
    lines.append(
        f"{len(solved)} of {len(ALL)} solved. `blank NAME` prints a template, `try FILE` judges it."
    )
    return "\n".join(lines)


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def run_try(path: str, names: list[str], progress: Path) -> int:
    """Judge a file and print the verdicts: status 0 when all are right, else 1."""
    solved, wrong = [], 0
    for part in tried(path, names or None):
        if isinstance(part, Verdict):
            print("\n".join(printable(line) for line in part.text().split("\n")), flush=True)
            if part.right:
                solved.append(part.name)
            wrong += not part.right
        elif part.strip():
            lines = part.rstrip().split("\n")
            print(f"{Path(path).name} printed:")
            print("\n".join(f"  | {printable(line[:200])}" for line in lines[:10]))
            if len(lines) > 10:
                print(f"  | … {len(lines) - 10} more lines")
    remember(progress, solved)
    return 1 if wrong or not solved else 0


def run_watch(path: str, names: list[str], progress: Path) -> int:
    """Judge whenever the file is saved, until Ctrl-C."""
    before: object = None
    while True:
        with contextlib.suppress(OSError):
            now = Path(path).stat()
            if (now.st_mtime_ns, now.st_size) != before:
                before = now.st_mtime_ns, now.st_size
                print(f"── {time.strftime('%H:%M:%S')} {path}", flush=True)
                run_try(path, names, progress)
        time.sleep(0.3)


def run_fault(name: str | None, number: int | None, reveal: bool) -> int:
    """Print an answer with one fault in it; reveal says which."""
    name = name or random.choice([one for one in FAULTS if FAULTS[one]])
    faults = FAULTS[name]
    number = random.randrange(len(faults)) + 1 if number is None else number
    if not 1 <= number <= len(faults):
        print(f"practice.py: error: {name} has faults 1 to {len(faults)}", file=sys.stderr)
        return 2
    fault, exercise = faults[number - 1], EXERCISES[name]
    text = planted(name, fault)
    print(f"# {name}, fault {number}: what is wrong, which input shows it, how is it mended?\n")
    print(text)
    if not reveal:
        print(f"# python3 code/practice.py fault {name} {number} --reveal")
        return 0
    print(f"# {fault.says}. {see(exercise)}\n#")
    lines = difflib.unified_diff(
        text.split("\n"), answer_source(name).split("\n"), lineterm="", n=0
    )
    print("\n".join(f"# {line}" for line in list(lines)[2:] if not line.startswith("@@")))
    return 0


# ── Cards ────────────────────────────────────────────────────────────────────────────────────


def section_of(notes: str, heading: str) -> str:
    """The text under a heading, up to the next of its level or above."""
    found = re.search(rf"^(#+) [^\n]*{heading}[^\n]*\n", notes, re.M)
    if not found:
        return ""
    rest = notes[found.end() :]
    after = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
    return rest[: after.start()] if after else rest


def as_html(markdown: str) -> str:
    """One line of HTML for Anki: formulas as MathJax, code as code, links as their text."""
    kept: list[str] = []

    def keep(text: str) -> str:
        kept.append(text)
        return f"\x00{len(kept) - 1}\x00"

    def code(text: str) -> str:
        return html.escape(text, quote=False).replace("\n", "<br>")

    text = markdown.strip()
    math = re.compile(r"```math\n(.*?)\n```|\$\$(.*?)\$\$", re.S)
    text = math.sub(lambda m: keep(f"\\[{code(m[1] or m[2]).replace('<br>', ' ')}\\]"), text)
    text = re.sub(
        r"^```[^\n]*\n(.*?)\n```", lambda m: keep(f"<pre><code>{code(m[1])}</code></pre>"), text,
        flags=re.S | re.M,
    )  # fmt: skip
    text = re.sub(r"\$`([^`]+)`\$", lambda m: keep(f"\\({code(m[1])}\\)"), text)
    text = re.sub(r"`([^`]+)`", lambda m: keep(f"<code>{code(m[1])}</code>"), text)
    text = re.sub(r"\$([^$\n]+)\$", lambda m: keep(f"\\({code(m[1])}\\)"), text)
    text = re.sub(
        r"<!--.*?-->|</?(details|summary|picture|source|img|a)\b[^>]*>", "", text, flags=re.S
    )
    text = html.escape(text, quote=False)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"(?<![\w*])\*(?!\s)(.+?)(?<!\s)\*(?![\w*])", r"<i>\1</i>", text)
    text = re.sub(r"\\([\\`*_{}\[\]()#+.!|$-])", r"\1", text)
    text = re.sub(r"\n{2,}", "<br><br>", text.strip()).replace("\n", "<br>").replace("\t", " ")
    while "\x00" in text:
        text = re.sub(r"\x00(\d+)\x00", lambda m: kept[int(m[1])], text)
    return text.replace("\t", "    ")


def cards(notes: str) -> list[tuple[str, str, str]]:
    """Questions, wrong claims and drills of the notes: front, back, tag; in Markdown."""
    found = []
    details = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.S)
    for question, answer in details.findall(section_of(notes, "§9")):
        if re.match(r"\W*(<\w+>)?\W*Q\d+", question.strip()):
            found.append((question.strip(), answer.strip(), "question"))
    claims = section_of(notes, r"8\.2")
    block = re.compile(r"^\*\*(W\d+\..*?)\*\*\n(.*?)(?=^\*\*W\d+\.|\Z)", re.S | re.M)
    found += [(claim, answer.strip(), "claim") for claim, answer in block.findall(claims)]
    for row in re.findall(r"^\|(.*)\|\s*$", claims, re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if re.search(r"\bW\d+\b", cells[0]) and len(cells) > 1:
            front = cells[:2] if re.fullmatch(r"\W*W\d+\W*", cells[0]) else cells[:1]
            found.append((" ".join(front), "\n\n".join(cells[len(front) :]), "claim"))
    drill = re.compile(
        r"^(\*\*Drill \d+\.?\*\*.*?)<details>\s*<summary>.*?</summary>(.*?)</details>", re.S | re.M
    )
    drills = section_of(notes, "§11")
    found += [(front.strip(), back.strip(), "drill") for front, back in drill.findall(drills)]
    return found


def card_file(notes: str) -> str:
    """Tab-separated, as Anki imports it."""
    lines = ["#separator:tab", "#html:true", "#tags column:3"]
    lines += [f"{as_html(front)}\t{as_html(back)}\t{tag}" for front, back, tag in cards(notes)]
    return "\n".join(lines)


# ── main ─────────────────────────────────────────────────────────────────────────────────────


def exercise_name(text: str) -> str:
    """A name of the table in any case; the nearest ones where it is none."""
    by_lower = {name.lower(): name for name in EXERCISES}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    near_names = difflib.get_close_matches(text.lower(), by_lower, n=3)
    hint = ", ".join(by_lower[name] for name in near_names) or ", ".join(EXERCISES)
    raise argparse.ArgumentTypeError(f"there is no exercise {text!r}: {hint}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="practice.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_to = parser.add_subparsers(dest="command", metavar="COMMAND")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--progress", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help="where solved exercises are remembered ($XDG_STATE_HOME or ~/.local/state)",
    )  # fmt: skip
    parser.add_argument(
        "--progress", type=Path, default=None, metavar="FILE", help=argparse.SUPPRESS
    )

    def command(name: str, says: str) -> argparse.ArgumentParser:
        return add_to.add_parser(name, help=says, description=says, parents=[where])

    command("list", "the exercises, and which you have solved (as without a command)")
    one = command("blank", "print a template: signature and docstring, an empty body")
    one.add_argument("names", nargs="+", type=exercise_name, metavar="NAME")
    for name, says in (
        ("try", "execute FILE and judge what it defines: status 0 when all is right, 1 when not"),
        ("watch", "execute and judge FILE whenever it is saved, until Ctrl-C"),
    ):
        one = command(name, says)
        one.add_argument("file", metavar="FILE", help="a Python file of yours; it is executed")
        one.add_argument("names", nargs="*", type=exercise_name, metavar="NAME")
    one = command("answer", "print the answer with all it needs: a text that runs")
    one.add_argument("names", nargs=1, type=exercise_name, metavar="NAME")
    one = command("fault", "print an answer with one fault in it; --reveal says which")
    one.add_argument("name", nargs="?", type=exercise_name, metavar="NAME")
    one.add_argument(
        "number", nargs="?", type=int, metavar="NUMBER", help="which; else one is drawn"
    )
    one.add_argument("--reveal", action="store_true", help="say what is wrong")
    command("cards", "questions, wrong claims and drills of the notes as a file for Anki")
    return parser.parse_args(argv)


def run(argv: list[str] | None) -> int:
    args = arguments(argv)
    progress = args.progress or progress_file()
    if args.command in (None, "list"):
        print(listing(read_progress(progress)))
    elif args.command == "blank":
        print(blank(args.names), end="")
    elif args.command == "answer":
        print(answer_source(args.names[0]), end="")
    elif args.command == "fault":
        return run_fault(args.name, args.number, args.reveal)
    elif args.command == "cards":
        print(card_file(NOTES.read_text(encoding="utf-8")))
    elif args.command == "watch":
        return run_watch(args.file, args.names, progress)
    else:
        return run_try(args.file, args.names, progress)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Status 0, 1 when something is wrong or the reader of a pipe has gone, 2 for a wrong call."""
    try:
        return run(argv)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"practice.py: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
