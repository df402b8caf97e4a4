"""Which parameter of a class is which of the answer's: all assignments, likely ones first."""

import functools
import heapq
import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from judge.layout import Packing, WeightLayout, without_ones
from judge.parameters import (
    Parameter,
    name_cost,
    numbers_of,
    parameters_of,
    without_pairs,
)

# What a name and the order of registration cost is added up; so is what follows.
OUT_OF_ORDER = 0.03  # for each place that a parameter stands away from where the answer has it
OTHER_GRADIENTS = 5.0  # for the share of entries that matter where the answer's do not, or not
SAME_AS_BEFORE = -3.0  # what it is at another size
TURN = 256  # states of one search before the others have theirs
LOOK = 64  # states between two looks at the time


class Assignment(NamedTuple):
    """A layout of all parameters: each place of the answer's weights used once.

    turned: raw square matrices are read as [in, out]. keys: what each parameter is read as, which
    finds the same assignment at other sizes.
    """

    layout: dict[str, Tensor]
    turned: bool
    keys: tuple[tuple[str, str], ...]


class Role(NamedTuple):
    """Parameters read as packings: what each is, the layout, and how little speaks for it."""

    keys: dict[str, str]
    layout: dict[str, Tensor]
    covers: int  # one bit of every byte for each place
    cost: float
    numbered: bool  # of a head or an expert


class Partial(NamedTuple):
    """Roles of the first parameters, with one more, in the order in which the search goes on.

    priority: what is spent, what the rest costs at the least, less a reward for each parameter
    that has a role (greediness: 0 goes by cost alone, much of it straight down). No two have the
    same number, so that nothing behind it is compared.
    """

    priority: float
    minus_depth: int
    number: int
    place: int  # of the one more, among the roles of its parameter
    roles: tuple[Role, ...]  # of those before
    covered: int  # by those before


Flags = tuple[dict[str, Tensor], Tensor]  # see ClassExercise.unused_entries


class AssignmentSearch:
    """All ways to read the parameters of a module as a layout's packings."""

    def __init__(
        self, layout: WeightLayout, module: nn.Module, flags: Callable[[], Flags] | None,
        turned: bool, before: dict[str, str],
    ):  # fmt: skip
        """flags: which entries do not matter in the probes; before: the keys at another size."""
        self.layout, self.flags, self.turned, self.before = layout, flags, turned, before
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.parameters = self.paired = parameters_of(module)
        self._numbered: dict[tuple[int, ...], bool] = {}  # shapes whose names' numbers count
        if not all(any(True for _ in self.fitting(one)) for one in self.parameters):
            self.parameters = without_pairs(self.parameters, module)
            self._numbered.clear()

    def fitting(self, one: Parameter) -> Iterator[tuple[Packing, str, dict[str, Tensor]]]:
        """The packings of a parameter's shape, with their form and the layout they give."""
        for packing, form in self.layout.packings.get(without_ones(one.shape), []):
            if one.is_linear and form:
                continue
            if one.is_square_matrix and form == ("" if self.turned else "T"):
                continue
            if packing.index is not None and self._is_misnumbered(one, packing.index):
                continue
            layout = {one.weight: packing.forms[form].reshape(one.shape)}
            if one.bias:
                wanted = self.shapes[one.bias]
                if packing.bias is None or packing.bias.numel() != math.prod(wanted):
                    continue
                layout[one.bias] = packing.bias.reshape(wanted)
            yield packing, form, layout

    def _is_misnumbered(self, one: Parameter, index: int) -> bool:
        """Whether a parameter says by its number that it is another head or expert.

        Read otherwise, a wrong wiring of heads or experts would be a renaming. Numbers count where
        all parameters of the shape have one and none goes past the heads or experts there are.
        """
        if one.shape not in self._numbered:
            same = [numbers_of(p.weight) for p in self.parameters if p.shape == one.shape]
            packings = self.layout.packings[without_ones(one.shape)]
            count = 1 + max(packing.index for packing, _ in packings if packing.index is not None)
            self._numbered[one.shape] = all(same) and max(map(max, same)) < count
        return self._numbered[one.shape] and index not in numbers_of(one.weight)

    def as_before(self, keys: dict[str, str]) -> dict[str, Tensor] | None:
        """The layout in which every parameter is what it is at another size, if it fits."""
        layout: dict[str, Tensor] = {}
        for one in self.parameters:
            found = [
                places
                for packing, form, places in self.fitting(one)
                if key_of(packing, form) == keys.get(one.weight)
            ]
            if not found:
                return None
            layout |= found[0]
        places = torch.cat([places.flatten() for places in layout.values()])
        return layout if len(places) == self.layout.size == len(places.unique()) else None

    @functools.cached_property
    def roles(self) -> list[list[Role]]:
        """What each parameter may be, or each family that only its numbers tell apart."""
        alone = {one.weight: self._roles_of(one) for one in self.parameters}
        families = defaultdict(list)
        for one in self.parameters:
            families[re.sub(r"(?<![^._])\d+(?![^._])", "#", one.weight), one.shape].append(one)
        found = []
        for members in families.values():
            several = [alone[one.weight] for one in members]
            alike = roles_of_family(several) if len(several) > 1 else []
            found += [alike] if alike else several
        return found

    def _roles_of(self, one: Parameter) -> list[Role]:
        """The cost says how badly name, order and gradients of a parameter fit."""
        own_flags, place_flags = self.flags() if self.flags else ({}, torch.empty(0))
        shape = without_ones(one.shape)
        same = [other for other in self.parameters if without_ones(other.shape) == shape]
        fitting = list(self.fitting(one))
        order = list(dict.fromkeys(packing.names for packing, _, _ in fitting))
        found = []
        for packing, form, layout in fitting:
            key = key_of(packing, form)
            cost = packing.effort + name_cost(one, packing, self.layout)
            cost += OUT_OF_ORDER * abs(same.index(one) - order.index(packing.names))
            if one.weight in own_flags:
                flags = place_flags[:, layout[one.weight]]
                share = (flags != own_flags[one.weight]).double().flatten(1).mean(dim=1)
                cost += OTHER_GRADIENTS * share.sum().item()
            if self.before.get(one.weight) == key:
                cost += SAME_AS_BEFORE
            covers = self.layout.covered(packing, one.bias is not None)
            numbered = packing.index is not None
            found.append(Role({one.weight: key}, layout, covers, cost, numbered))
        return sorted(found, key=lambda role: role.cost)

    def assignments(self, until: float, greediness: float) -> Iterator[Assignment | None]:
        """Each place used once, about in the order of cost; None when it is the others' turn."""
        if not self.roles or not all(self.roles):
            return
        full = self.layout.covers(torch.arange(self.layout.size))
        roles = sorted(self.roles, key=len)
        least = [0.0]  # what the parameters that are left cost at the least
        for choices in reversed(roles):
            least.insert(0, least[0] + choices[0].cost)
        numbers, heap = itertools.count(), []

        def push(spent: float, covered: int, chosen: tuple[Role, ...], place: int) -> None:
            """The cheapest role that goes with those chosen; the next follows when it is taken."""
            depth = len(chosen)
            for i in range(place, len(roles[depth])):
                role = roles[depth][i]
                if not covered & role.covers:
                    priority = spent + role.cost + least[depth + 1] - greediness * (depth + 1)
                    more = Partial(priority, -depth - 1, next(numbers), i, chosen, covered)
                    heapq.heappush(heap, more)
                    return

        push(0.0, 0, (), 0)
        for turn in itertools.count(1):
            if not heap or (turn % LOOK == 0 and time.process_time() > until):
                return
            if turn % TURN == 0:
                yield None
            _, _, _, place, before, covered = heapq.heappop(heap)
            spent, role = sum(role.cost for role in before), roles[len(before)][place]
            push(spent, covered, before, place + 1)
            chosen, covered = (*before, role), covered | role.covers
            if len(chosen) < len(roles):
                push(spent + role.cost, covered, chosen, 0)
            elif covered == full:
                yield self._assignment(chosen)

    def _assignment(self, roles: tuple[Role, ...]) -> Assignment:
        layout = {name: places for role in roles for name, places in role.layout.items()}
        keys = {name: key for role in roles for name, key in role.keys.items()}
        return Assignment(layout, self.turned, tuple(sorted(keys.items())))


def key_of(packing: Packing, form: str) -> str:
    """What a parameter is read as, in words that hold at all sizes."""
    return f"{packing.key} {form}"


def roles_of_family(members: list[list[Role]]) -> list[Role]:
    """Roles in which all experts, or all heads, are read alike; none where that does not fit."""

    def pattern(role: Role) -> str:
        return re.sub(r"\d+", "#", next(iter(role.keys.values())))

    if not all(role.numbered for roles in members for role in roles):
        return []
    by_pattern = [defaultdict(list) for _ in members]
    for roles, found in zip(members, by_pattern):
        for role in roles:
            found[pattern(role)].append(role)
    alike = []
    for name in by_pattern[0]:
        parts = [found.get(name, []) for found in by_pattern]
        if any(len(part) != 1 for part in parts):
            continue
        chosen = [part[0] for part in parts]
        covers = functools.reduce(lambda a, b: a | b, (role.covers for role in chosen))
        keys = {k: v for role in chosen for k, v in role.keys.items()}
        layout = {k: v for role in chosen for k, v in role.layout.items()}
        alike.append(Role(keys, layout, covers, sum(role.cost for role in chosen), True))
    return sorted(alike, key=lambda role: role.cost)
