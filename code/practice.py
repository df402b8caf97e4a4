"""Write a piece of a Transformer from memory and be told what is wrong with it.

    python3 code/practice.py                         the exercises, and which you have solved
    python3 code/practice.py blank ModernBlock       a template to fill in: put it into a file
    python3 code/practice.py try mine.py             judges every exercise that mine.py defines

A judged file is executed, as the program of yours that it is. Values and gradients are compared
with the answers in whiteboard.py on drawn weights; names, packing and order of your parameters are
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
WHITEBOARD = HERE / "whiteboard.py"
NOTES = HERE.parent / "transformer_block_tutorial.md"

CLOSE = 1e-5  # of the largest value: people's norms, softmax and tables run in float32 somewhere
SECONDS = 8.0  # of computing, for their imports and for each exercise
PATIENCE = 5  # times as many seconds by the clock, when the machine has other things to do
SEARCH = 0.9  # seconds for trying which of their parameters is which
NAMING = 0.9  # seconds for trying pairs of mistakes
DEEPER = 0.05  # what a unit more speaks for an assignment that is searched on
LIKELY = 24  # assignments after which known mistakes are looked for, before the others are tried
ASSIGNMENTS = 600  # tried before their parameters count as read


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
    """The imports, the definitions by name, and the lines of whiteboard.py."""
    text = WHITEBOARD.read_text(encoding="utf-8")
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
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
    standard = [head for head in heads if "torch" not in head]
    others = [head for head in heads if "torch" in head]
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


class TimeUp(BaseException):
    """Their code takes too long; no Exception, so that theirs does not swallow it."""


class Raised(NamedTuple):
    """An exception of theirs: its kind, and how Python shows it, cut to their file."""

    kind: str
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
    return str(list(value.shape)) if isinstance(value, Tensor) else f"= {value!r}"


class Shares(NamedTuple):
    """How often each id was drawn, [rows, V], in so many draws a row."""

    shares: Tensor
    draws: int

    def unlike(self, other: "Shares") -> tuple[str, ...] | None:
        """An id drawn far too often or too rarely, or never, or though it must not be."""
        rate = 1 / self.draws + 1 / other.draws
        for row, (want, have) in enumerate(zip(self.shares.tolist(), other.shares.tolist())):
            for token, (p, q) in enumerate(zip(want, have)):
                never = (p == 0 and q > 0) or (p > 0.05 and q == 0)
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
    return {f"gradient of {name}": grad for name, grad in zip(leaves, found)}


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

    call = ", ".join(f"{k} {shown(v)}" for k, v in arguments.items())
    return Case(f"{name}({call})", run, {size: letter for letter, size in sizes.items()}, close)


def outcome(case: Case, subject: object) -> dict[str, object]:
    """What a case gives: its results, or what is wrong in words, or what was raised."""
    try:
        return case.run(subject)
    except Trouble as trouble:
        return {"trouble": str(trouble)}
    except (Exception, SystemExit) as error:
        return {"raised": raised(error)}


def raised(error: BaseException, filename: str | None = None) -> Raised:
    """The exception as Python shows it, frames of this file and of torch left out."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_theirs(f.filename)]
    lines = [line for frame in traceback.format_list(frames[-2:]) for line in frame.splitlines()]
    lines = [line.strip("\n") for line in lines if set(line.strip()) - set("^~ ")]
    message = traceback.format_exception_only(type(error), error)
    if isinstance(error, SyntaxError):
        return Raised(type(error).__name__, tuple("".join(message).rstrip().split("\n")[-4:]))
    last = "".join(message).strip().split("\n")[0]
    return Raised(type(error).__name__, (*lines, last[:300]))


THEIRS: set[str] = set()  # names of files that are being judged


def is_theirs(filename: str) -> bool:
    return filename in THEIRS


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
# The answer's weights are cut into atoms: one matrix or vector each, all numbers of all atoms in
# one flat vector. A layout says for a parameter which entries of that vector it holds: an int64
# tensor of the parameter's shape. It is made by cutting and joining tensors of places as one would
# cut and join the weights. Loading is indexing, and gradients come back the same way.

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
        for name, p in own.items():
            head, dot, last = name.rpartition(".")
            for old, new in PAIRS:
                other = head + dot + last.replace(old, new)
                if other == name or other not in own or other in pairs.values():
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
            layout = {unit.weight: piece.forms[form].reshape(unit.shape)}
            if unit.bias:
                wanted = self.shapes[unit.bias]
                if piece.bias is None or piece.bias.numel() != math.prod(wanted):
                    continue
                layout[unit.bias] = piece.bias.reshape(wanted)
            yield piece, form, layout

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

    def assignments(self) -> Iterator[tuple[dict[str, Tensor], tuple]]:
        """Layouts of all their parameters, each place used once, in the order of their cost."""
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
        until = time.process_time() + SEARCH
        while heap and (next(count) % 64 or time.process_time() < until):
            cost, depth, _, covered, chosen = heapq.heappop(heap)
            depth = -depth
            if depth == len(options):
                if covered == full:
                    layout = {k: v for choice in chosen for k, v in choice.layout.items()}
                    keys = {next(iter(choice.layout)): choice.key for choice in chosen}
                    yield layout, (self.turned, tuple(sorted(keys.items())))
                continue
            spent = cost - least[depth] + DEEPER * depth
            for choice in options[depth]:
                if not covered & choice.covers:
                    total = spent + choice.cost + least[depth + 1] - DEEPER * (depth + 1)
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
        ways = itertools.product((True, False) if square else (True,), (False, True))
        streams = [self.reading(sizes, *way).assignments() for way in ways]
        for several in itertools.zip_longest(*streams):
            for one in several:
                if one is not None and one[1] not in seen:
                    seen.add(one[1])
                    yield one

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


def near(want: Tensor, have: object) -> bool:
    """Whether an output is another's, within what float32 inside may change."""
    if not isinstance(have, Tensor) or have.shape != want.shape:
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
        return f"{self.name}({made})({', '.join(f'{k} {shown(v)}' for k, v in given)}){more}"

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
        cases += [self.full(usual, 2, 5, 3e-3), self.full(usual, 4, 9), self.single(usual)]
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
    ]
    large = tensors(48, 60)

    def run(function: Callable) -> dict[str, object]:
        with Largest() as largest:
            as_tensor(function(*large.values(), 4))
        return {"whether no tensor of T * S numbers is made": largest.numel < 48 * 60}

    return [*cases, Case("online_softmax(q [48, 6], k [60, 6], v [60, 3], block = 4)", run)]


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
            start = time.process_time()
            ids, untouched = draw(function, 20, options)
            if options.get("temperature") == 0:
                return {"the ids": ids, "whether the generator is left alone": untouched}
            slow = time.process_time() - start > 0.004  # a loop over rows
            ids, _ = draw(function, 250 if slow else 6000, options)
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
        case(temperature=0.5),
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
        call = f"generate(model, ids = {ids.tolist()}, max_new_tokens={n}{eos})"
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

        return Case(f"speculate(target, draft, ids = {ids.tolist()}, n_draft={n})", run)

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
FAULTS: dict[str, list[Fault]] = {name: [] for name in EXERCISES}


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
    torch.set_num_threads(1)  # the tensors are tiny
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
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


def see(exercise: Exercise) -> str:
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
        """Where another's results are not these, by case."""
        for i, case in enumerate(self.exercise.cases):
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
    return verdict(exercise, wrong, says(min(fitting)[2]) if fitting else None, theirs)


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
    exercise: Exercise, wrong: list[tuple[int, Difference]], mistake: str | None, theirs: Judgement
) -> Verdict:
    """At most eight lines: the mistake, the smallest case, the first difference, where to read."""
    i, found = wrong[0]
    case = exercise.cases[i]
    if found.where == "trouble":
        lines = [mistake or found.lines[0], f"case: {case.call}"]
    elif found.where == "raised":
        lines = [*([mistake] if mistake else []), f"case: {case.call}", *found.lines]
    else:
        lines = [mistake or "no known mistake", f"case: {case.call}"]
        lines += [f"{found.where}: {line}" for line in found.lines]
        if isinstance(theirs.subject, Theirs) and found.where == "the gradient of the parameters":
            lines[-1] = theirs.subject.gradient_in_words(found.lines[0])
    if mistake and len(lines[0]) > 200:
        lines[0:1] = textwrap.wrap(mistake, 110)
    head = f"wrong  ({len(wrong)} of {len(exercise.cases)} cases)"
    return Verdict(exercise.name, False, head, (*lines[:7], see(exercise)), mistake)


def judge_module(exercise: ModuleExercise, cls: Callable) -> Verdict:
    return read_module(exercise, cls)[0]


def read_module(exercise: ModuleExercise, cls: Callable) -> tuple[Verdict, Theirs | None]:
    """Read their parameters, run all cases, name the mistake where one fails; and the reading."""
    usual = exercise.sizes[0]
    theirs = Theirs(exercise, cls, judged_known(exercise.name).subject)
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
        until = time.process_time() + SEARCH
        assignments = self.theirs.assignments(self.usual)
        for stage in (LIKELY, ASSIGNMENTS):
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
            return verdict(self.exercise, wrong, says(faults), found), found.subject
        if not self.tried:
            module, template = (
                self.theirs.built(self.usual),
                self.answer.subject.template(self.usual),
            )
            return unrecognised(self.exercise, module, template), None
        found = self.judgement(self.fitting[0] if self.fitting else 0)
        wrong = list(self.answer.differences(found))
        return verdict(self.exercise, wrong, None, found), found.subject

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
        own = self.answer.subject.template(self.usual)
        if template.names != own.names or stacked is None:
            alone = len(faults) == 1
            return other_parameters(self.exercise, self.theirs, fault) if alone else None
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
        reader.modules = theirs.modules
        try:
            module = reader.built(usual)
            count = sum(p.numel() for p in module.parameters() if p.requires_grad)
            if like.template(usual).size > count:
                continue
            output = exercise.first(like.make(usual).module, usual)
        except Exception:
            continue
        for layout, keys in itertools.islice(reader.assignments(usual), 40):
            load(module, layout, like.template(usual).values)
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
            front = cells[:2] if len(cells[0]) < 20 and len(cells) > 2 else cells[:1]
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
