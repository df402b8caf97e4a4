"""The weights of an answer: drawn values, and all ways in which a class may keep them.

All numbers of an answer's weights lie in one flat vector. The layout of a parameter says which
entries of that vector it holds: an int64 tensor of its shape. Layouts are made by cutting and
joining tensors of places as one would cut and join the weights. So loading is indexing, gradients
come back the same way, and an assignment fits when every place is used once.
"""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from judge.cases import drawn

HEADS_IN_ROWS = ("q_proj", "k_proj", "v_proj", "q_nope", "q_rope", "k_up", "v_up")
# Kinds that people join into one matrix, and whether any order of them is read.
JOINS = (
    (("q_proj", "k_proj", "v_proj"), True),
    (("q_proj", "k_proj"), True),
    (("k_proj", "v_proj"), True),
    (("q_proj", "k_proj", "v_proj", "o_proj"), False),
    (("q_proj", "k_proj", "v_proj", "up"), False),
    (("gate", "up"), True),
    (("q_nope", "q_rope"), False),
    (("latent_down", "k_rope_proj"), False),
    (("k_up", "v_up"), False),
)
HEAD_JOINS = (("q_nope", "q_rope"), ("k_up", "v_up"))  # of the matrices of one head
STEEP = ("q_proj", "k_proj", "q_nope", "q_rope", "k_up", "k_rope_proj")  # queries and keys
SMALL = 10_000  # numbers up to which equal forms are found by their entries


class LinearMap(NamedTuple):
    """A linear map of the answer: places of its weight [out, in] and of its bias [out] or None.

    rows: the heads that lie in its rows, columns: those in its columns, None where there are none.
    groups: the KV heads that these are shared out among.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    rows: int | None = None
    columns: int | None = None
    groups: int | None = None

    @property
    def kind(self) -> str:
        """q_proj of self_attn.q_proj."""
        return self.name.rpartition(".")[2]

    @property
    def scope(self) -> str:
        """self_attn of self_attn.q_proj."""
        return self.name.rpartition(".")[0]

    def head(self, i: int) -> "LinearMap":
        """Rows, or columns, of one head."""
        if self.columns:
            return self._replace(weight=self.weight.chunk(self.columns, dim=1)[i], columns=None)
        bias = None if self.bias is None else self.bias.chunk(self.rows)[i]
        return self._replace(weight=self.weight.chunk(self.rows)[i], bias=bias, rows=None)


class Packing(NamedTuple):
    """Maps joined, or a vector, as one parameter: its layout in several forms.

    names: of the maps. index: of the head or expert, None where there is none. effort: how unusual
    the packing is.
    """

    key: str
    names: tuple[str, ...]
    forms: dict[str, Tensor]
    bias: Tensor | None
    index: int | None
    effort: float


def joined(parts: list[Tensor], turns: int | None) -> Tensor:
    """Tensors one below the other, or cut in so many turns and taken in turn, as head by head."""
    if turns is None:
        return torch.cat(parts)
    return torch.cat([part.unflatten(0, (turns, -1)) for part in parts], dim=1).flatten(0, 1)


def without_ones(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without its axes of 1, which layouts do not tell apart."""
    return tuple(size for size in shape if size != 1)


# ── Packings: one small function for each way to keep maps ───────────────────────────────────


def forms_of_rows(
    weight: Tensor, heads: int | None, groups: int | None = None
) -> dict[str, Tensor]:
    """A matrix as it stands or turned, and with its rows cut into heads, or groups of heads."""
    forms = {"": weight, "T": weight.T}
    if heads:
        cut = weight.unflatten(0, (heads, -1))  # (H, d_h, in)
        cuts = {
            "heads": cut,
            "heads T": cut.mT,  # (H, in, d_h)
            "T heads": cut.permute(2, 0, 1),  # (in, H, d_h)
        }
        forms |= cuts | by_groups(cuts, heads, groups)
    return forms


def forms_of_columns(weight: Tensor, heads: int, groups: int | None = None) -> dict[str, Tensor]:
    """The output projection with its columns cut into heads, or groups of heads."""
    cut = weight.unflatten(1, (heads, -1))  # (out, H, d_h)
    cuts = {
        "heads": cut.permute(1, 2, 0),  # (H, d_h, out)
        "heads T": cut.transpose(0, 1),  # (H, out, d_h)
        "T heads": cut,
    }
    return cuts | by_groups(cuts, heads, groups)


def by_groups(cuts: dict[str, Tensor], heads: int, groups: int | None) -> dict[str, Tensor]:
    """The same forms with their axis of heads cut in two: groups, and the heads of a group."""
    if not groups or heads % groups:
        return {}
    two = (groups, heads // groups)
    return {
        form.replace("heads", "groups"): cut.unflatten(1 if form == "T heads" else 0, two)
        for form, cut in cuts.items()
    }


def forms_of_stack(weights: list[Tensor], heads: int | None) -> dict[str, Tensor]:
    """Matrices of one shape along a first axis."""
    stacked = torch.stack(weights)  # (n, out, in)
    forms = {"stack": stacked, "stack T": stacked.mT}
    if heads:
        cut = stacked.unflatten(1, (heads, -1))  # (n, H, d_h, in)
        forms |= {
            "stack heads": cut,
            "stack heads T": cut.mT,
            "stack T heads": cut.permute(0, 3, 1, 2),  # (n, in, H, d_h)
            "T stack heads": cut.permute(3, 0, 1, 2),  # (in, n, H, d_h)
        }
    return forms


def packed_alone(one: LinearMap, index: int | None, effort: float, tag: str) -> Iterator[Packing]:
    """One map by itself."""
    forms = forms_of_rows(one.weight, one.rows, one.groups)
    if one.columns:
        forms |= forms_of_columns(one.weight, one.columns, one.groups)
    yield from with_bias([one], forms, one.bias, index, effort, tag)


def packed_below(
    maps: list[LinearMap], index: int | None, effort: float, tag: str
) -> Iterator[Packing]:
    """Maps one below the other, each with all its rows."""
    if "q_nope" in {one.kind for one in maps} and maps[0].rows:
        return  # a query's parts are joined head by head
    forms = forms_of_rows(torch.cat([one.weight for one in maps]), None)
    yield from with_bias(maps, forms, joined_bias(maps, None), index, effort, tag)


def packed_by_heads(
    maps: list[LinearMap], index: int | None, effort: float, tag: str
) -> Iterator[Packing]:
    """Maps taken in turns, head by head."""
    if not all(one.rows for one in maps):
        return
    heads = min(one.rows for one in maps)
    forms = forms_of_rows(joined([one.weight for one in maps], heads), heads)
    bias = joined_bias(maps, heads)
    yield from with_bias(maps, forms, bias, index, effort, f"{tag}by head ")


def packed_by_rows(
    maps: list[LinearMap], index: int | None, effort: float, tag: str
) -> Iterator[Packing]:
    """Maps of one shape taken row by row, or stacked along a first axis."""
    if len({one.weight.shape for one in maps}) > 1:
        return
    turns = len(maps[0].weight)
    forms = forms_of_rows(joined([one.weight for one in maps], turns), None)
    forms |= forms_of_stack([one.weight for one in maps], maps[0].rows)
    yield from with_bias(maps, forms, joined_bias(maps, turns), index, effort, f"{tag}by row ")


def joined_bias(maps: list[LinearMap], turns: int | None) -> Tensor | None:
    """Their biases, joined as the weights are; None where one has none."""
    biases = [one.bias for one in maps]
    return None if any(bias is None for bias in biases) else joined(biases, turns)


def with_bias(
    maps: list[LinearMap], forms: dict[str, Tensor], bias: Tensor | None, index: int | None,
    effort: float, tag: str,
) -> Iterator[Packing]:  # fmt: skip
    """The packing, and its bias as a parameter by itself."""
    names = tuple(one.name for one in maps)
    if bias is not None:
        biases = tuple(f"{name}.bias" for name in names)
        yield Packing(f"{tag}bias of {'|'.join(names)}", biases, {"": bias}, None, index, effort)
    yield Packing(f"{tag}{'|'.join(names)}", names, forms, bias, index, effort)


def packed_together(
    maps: list[LinearMap], index: int | None, effort: float, tag: str = ""
) -> Iterator[Packing]:
    """All ways to keep several maps in one parameter."""
    for pack in (packed_below, packed_by_heads, packed_by_rows):
        yield from pack(maps, index, effort, tag)


def packed_experts(rows: list[list[LinearMap]]) -> Packing:
    """The experts' matrices of one kind, or gate and up, in one parameter."""
    whole = torch.stack([torch.cat([one.weight for one in row]) for row in rows])  # (E, out, in)
    flat = whole.flatten(0, 1)  # (E*out, in)
    forms = {
        "stack": whole,
        "stack T": whole.mT,  # (E, in, out)
        "flat": flat,
        "flat T": flat.T,
        "flat in": whole.mT.flatten(0, 1),  # (E*in, out)
        "T stack": whole.permute(2, 0, 1),  # (in, E, out)
        "first in": whole.permute(1, 0, 2),  # (out, E, in)
    }
    if len(rows[0]) == 2:  # gate and up
        turns = [joined([one.weight for one in row], len(row[0].weight)) for row in rows]
        four = whole.unflatten(1, (2, -1))  # (E, 2, out, in)
        forms |= {
            "turns": torch.stack(turns),
            "turns T": torch.stack(turns).mT,
            "four": four,
            "four T": four.mT,
            "two": four.transpose(0, 1),  # (2, E, out, in)
            "two T": four.mT.transpose(0, 1),
        }
    names = tuple(one.name for one in rows[0])
    return Packing(f"stack of {'|'.join(names)}", names, forms, None, None, 0.1 * len(rows[0]))


def packed_vectors(vectors: dict[str, Tensor]) -> Iterator[Packing]:
    """Each vector alone, and a norm's weight with its bias, in either order of the two."""
    for name, places in vectors.items():
        norm = name.removesuffix("weight")
        if name.endswith(".weight") and norm + "bias" in vectors:
            bias, stem = vectors[norm + "bias"], (norm.removesuffix("."),)
            yield Packing(norm + " pair", stem, {"": places}, bias, None, 0.0)
            yield Packing(norm + " turned pair", stem, {"": bias}, places, None, 1.0)
        yield Packing(name, (name,), {"": places}, None, None, 0.0)


def packed_norms(vectors: dict[str, Tensor]) -> Iterator[Packing]:
    """The weights of all norms in one parameter, their biases in another, or both in one."""
    weights = [name for name in vectors if not name.endswith("bias")]
    if len(weights) < 2 or len({len(vectors[name]) for name in weights}) > 1:
        return
    for number, names in enumerate(itertools.permutations(weights)):
        key, effort = "|".join(names), 0.2 + 0.1 * number
        order = [name.removesuffix("weight") for name in names]
        whole = torch.stack([vectors[name] for name in names])  # (n, d)
        biases = [vectors[f"{norm}bias"] for norm in order if f"{norm}bias" in vectors]
        bias = torch.stack(biases) if biases else None
        yield Packing(f"stack of {key}", names, {"stack": whole}, None, None, effort)
        if bias is not None:
            of = tuple(f"{norm}bias" for norm in order)
            yield Packing(f"bias stack of {key}", of, {"stack": bias}, None, None, effort)
            stems = tuple(norm.removesuffix(".") for norm in order)
            yield Packing(f"pairs of {key}", stems, {"stack": whole}, bias, None, effort)
            both = {"pairs": torch.stack((whole, bias), dim=1), "two": torch.stack((whole, bias))}
            yield Packing(f"all of {key}", stems, both, None, None, effort)


def packed_flat(maps: dict[str, LinearMap], vectors: dict[str, Tensor]) -> Packing:
    """Everything in one vector: in the answer's order, or its matrices first, or last."""
    parts: dict[str, list[Tensor]] = {}
    for name in [*vectors, *maps]:
        found = maps.get(name)
        parts[name] = [vectors[name]] if found is None else [found.weight, found.bias]
    ordered = sorted(parts, key=lambda name: int(parts[name][0].min()))
    orders = {"": ordered, "maps first": [*maps, *vectors], "maps last": [*vectors, *maps]}
    forms = {}
    for order, names in orders.items():
        for form in ("", "T"):
            turned = [p.T if form else p for name in names for p in parts[name] if p is not None]
            forms[f"{order} {form}".strip()] = torch.cat([p.flatten() for p in turned])
    return Packing("everything", tuple(ordered), forms, None, None, 0.2)


# ── The layout of an answer ──────────────────────────────────────────────────────────────────


class WeightLayout:
    """The parameters of an answer at given sizes: drawn values, and all ways to keep them.

    halves: for a parameter that holds several maps head by head, their rows by name.
    """

    def __init__(self, module: nn.Module, sizes: dict[str, int], halves: dict[str, dict[str, int]]):
        self.sizes, self.size = sizes, 0
        self.maps: dict[str, LinearMap] = {}
        self.vectors: dict[str, Tensor] = {}
        self.layout: dict[str, Tensor] = {}  # of the answer's own parameters
        values = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            widths = halves.get(name, {})
            if sum(widths.values()) != len(parameter):
                widths = {name: len(parameter)}
            parts = {}
            for part, rows in widths.items():
                shape = (rows, *parameter.shape[1:])
                parts[part] = torch.arange(self.size, self.size + math.prod(shape)).view(shape)
                self.size += parts[part].numel()
                values.append(drawn_weights(part, shape))
            heads = None if len(parts) == 1 else sizes["n_heads"]
            self.layout[name] = joined(list(parts.values()), heads)
            self.vectors |= {part: p for part, p in parts.items() if p.ndim == 1}
            self.maps |= {part: self._map(part, p) for part, p in parts.items() if p.ndim == 2}
        for name in self.maps:
            bias = self.vectors.pop(name.removesuffix("weight") + "bias", None)
            self.maps[name] = self.maps[name]._replace(bias=bias)
        self.values = torch.cat(values)
        self.names = tuple((name, tuple(p.shape)) for name, p in self.layout.items())
        self._covers: dict[tuple[str, bool], int] = {}

    def _map(self, name: str, places: Tensor) -> LinearMap:
        """With the heads in its rows or columns, as its name tells."""
        found = LinearMap(name.removesuffix(".weight"), places, None)
        heads = self.sizes.get("n_q_heads", self.sizes.get("n_heads"))
        rows = heads if found.kind in HEADS_IN_ROWS else None
        if found.kind in ("k_proj", "v_proj"):
            rows = self.sizes.get("n_kv_heads", heads)
        columns = heads if found.kind == "o_proj" else None
        fits = (rows and places.shape[0] % rows == 0, columns and places.shape[1] % columns == 0)
        groups = self.sizes.get("n_kv_heads") if heads in (rows, columns) else None
        return found._replace(
            rows=rows if fits[0] else None, columns=columns if fits[1] else None, groups=groups
        )

    def values_with_steep_scores(self, factor: float) -> Tensor:
        """The drawn values with the maps of queries and keys so many times as large."""
        values = self.values.clone()
        for one in self.maps.values():
            if one.kind in STEEP:
                values[one.weight] *= factor
        return values

    @functools.cached_property
    def packings(self) -> dict[tuple[int, ...], list[tuple[Packing, str]]]:
        """All packings by the shape of each of their forms."""
        found = defaultdict(list)
        for packing in self._all_packings():
            seen = set()
            for form, places in packing.forms.items():
                shape = without_ones(places.shape)
                small = places.numel() < SMALL  # of a real model every form is listed
                same = (shape, tuple(places.flatten().tolist())) if small else form
                if same not in seen:
                    found[shape].append((packing, form))
                seen.add(same)
        return found

    def _all_packings(self) -> Iterator[Packing]:
        groups = defaultdict(dict)
        for one in self.maps.values():
            groups[one.scope][one.kind] = one
        for scope, group in groups.items():
            index = next((int(part) for part in scope.split(".") if part.isdigit()), None)
            for one in group.values():
                yield from packed_alone(one, index, 0.0, "")
            yield from self._joins(group, {**groups.get("", {}), **group}, index)
            yield from self._heads(group)
        experts = [group for scope, group in groups.items() if re.search(r"\.\d+$", scope)]
        for kinds in (("gate",), ("up",), ("down",), ("gate", "up"), ("up", "gate")):
            if experts and all(set(kinds) <= set(group) for group in experts):
                yield packed_experts([[group[kind] for kind in kinds] for group in experts])
        yield from packed_vectors(self.vectors)
        yield from packed_norms(self.vectors)
        if not experts:
            yield packed_flat(self.maps, self.vectors)

    @staticmethod
    def _joins(group: dict, wider: dict, index: int | None) -> Iterator[Packing]:
        """Maps of a scope, and of the scope around it, that people join."""
        for kinds, any_order in JOINS:
            if set(kinds) <= set(wider) and set(kinds) & set(group):
                members = [wider[kind] for kind in kinds]
                orders = itertools.permutations(members) if any_order else [members]
                for number, order in enumerate(orders):
                    yield from packed_together(list(order), index, 0.2 + 0.1 * number)

    @staticmethod
    def _heads(group: dict[str, LinearMap]) -> Iterator[Packing]:
        """The matrices of each head by themselves, and joined."""
        for i in range(max(one.rows or one.columns or 0 for one in group.values())):
            cut = {k: m.head(i) for k, m in group.items() if i < (m.rows or m.columns or 0)}
            tag = f"head {i} of "
            for one in cut.values():
                yield from packed_alone(one, i, 0.5, tag)
            for two in HEAD_JOINS:
                if set(two) <= set(cut):
                    yield from packed_together([cut[kind] for kind in two], i, 0.6, tag)
            if {"q_proj", "k_proj", "v_proj"} <= set(cut):
                three = [cut[kind] for kind in ("q_proj", "k_proj", "v_proj")]
                for number, order in enumerate(itertools.permutations(three)):
                    yield from packed_together(list(order), i, 0.6 + 0.1 * number, tag)

    def covers(self, *layouts: Tensor) -> int:
        """The places of layouts as a number, so that exact covers are found with & and |."""
        mask = torch.zeros(self.size, dtype=torch.uint8)
        for places in layouts:
            mask[places.flatten()] = 1
        return int.from_bytes(bytes(mask.tolist()), "big")

    def covered(self, packing: Packing, with_bias: bool) -> int:
        """The places of a packing, in whatever form, with its bias or without."""
        key = (packing.key, with_bias)
        if key not in self._covers:
            biases = [packing.bias] if with_bias else []
            self._covers[key] = self.covers(next(iter(packing.forms.values())), *biases)
        return self._covers[key]


def drawn_weights(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that leave scores unsaturated, norms unlike 1 and biases unlike 0; flat."""
    values = drawn(name, *shape)
    if name.endswith("bias"):
        values = 0.3 * values
    elif len(shape) == 1:
        values = 1 + 0.5 * torch.tanh(values)
    elif "router" not in name:
        values = values * shape[-1] ** -0.5
    return values.flatten()
