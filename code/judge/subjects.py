"""What the cases of a class run on: the answer's class, and one that somebody wrote."""

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from judge.assignment import Assignment, AssignmentSearch, Flags
from judge.cases import Trouble
from judge.compare import equal_outputs, kind_in_words
from judge.layout import WeightLayout
from judge.state import SubmittedFile, default_dtype

SEARCH_SECONDS = 2.0  # of computing, for the assignments at one size
OTHER_SIZES_TRIES = 200  # where parameters have another form at other sizes
GREEDINESS = (0.2, 1.5)  # nearly by cost, nearly straight down

Sizes = dict[str, int]


class LoadedModule(NamedTuple):
    """A module that holds the drawn weights, and where each of them lies."""

    module: nn.Module
    layout: dict[str, Tensor]
    weights: WeightLayout

    def gradient(self) -> Tensor:
        """Of all places, from the parameters; none counts as zero."""
        parameters = dict(self.module.named_parameters())
        flat = torch.zeros(self.weights.size, dtype=torch.float64)
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


def start_values(module: nn.Module, layout: dict[str, Tensor], size: int) -> Tensor:
    """What the parameters hold, flat as the layout says."""
    flat = torch.full((size,), torch.nan, dtype=torch.float64)
    parameters = dict(module.named_parameters())
    for name, places in layout.items():
        flat[places] = parameters[name].detach().double()
    return flat


def size_key(sizes: Sizes) -> tuple:
    """Sizes as a key of a dict."""
    return tuple(sizes.items())


class ReferenceClass:
    """The answer's class, or one with a mistake, with the drawn weights in it."""

    def __init__(self, exercise: object, cls: type):
        """exercise: a ClassExercise."""
        self.exercise, self.cls = exercise, cls
        self._modules: dict[tuple, nn.Module] = {}
        self._weights: dict[tuple, WeightLayout] = {}
        self._outputs: dict[tuple, Tensor | None] = {}

    def first_output(self, sizes: Sizes) -> Tensor | None:
        """What one full pass gives; None where it raises."""
        key = (*size_key(sizes), torch.get_default_dtype())
        if key not in self._outputs:
            self._outputs[key] = self.exercise.first_output(self.make(sizes).module, sizes)
        return self._outputs[key]

    def weights(self, sizes: Sizes) -> WeightLayout:
        """Its parameters at these sizes."""
        if size_key(sizes) not in self._weights:
            module = self.exercise.build(self.cls, sizes)
            self._modules[(*size_key(sizes), torch.get_default_dtype())] = module
            shapes = {n: (tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()}
            known = self.exercise.weight_layouts.setdefault(size_key(sizes), {})
            key = tuple(shapes.items())  # of most mistakes the parameters are the answer's
            if key not in known:
                known[key] = WeightLayout(module, sizes, self.exercise.halves(sizes))
            self._weights[size_key(sizes)] = known[key]
        return self._weights[size_key(sizes)]

    def make(self, sizes: Sizes, steep: float = 1.0) -> LoadedModule:
        """A module with the drawn weights; steep makes its scores so many times as large."""
        weights = self.weights(sizes)
        key = (*size_key(sizes), torch.get_default_dtype())
        if key not in self._modules:
            self._modules[key] = self.exercise.build(self.cls, sizes)
        load(self._modules[key], weights.layout, weights.values_with_steep_scores(steep**0.5))
        return LoadedModule(self._modules[key], weights.layout, weights)

    def start(self, sizes: Sizes) -> Tensor:
        """The values of a fresh module."""
        module = self.exercise.build(self.cls, sizes)
        weights = self.weights(sizes)
        return start_values(module, weights.layout, weights.size)

    def forget_modules(self) -> None:
        """Build anew what is asked for next."""
        self._modules.clear()

    def in_dtype(self, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        """New tensors have this dtype inside."""
        return default_dtype(dtype)


class UsedParameters(ReferenceClass):
    """A known class without the parameters that nothing depends on."""

    def weights(self, sizes: Sizes) -> WeightLayout:
        """Its parameters that get a gradient."""
        if size_key(sizes) not in self._weights:
            module = self.exercise.build(self.cls, sizes)
            inputs = self.exercise.inputs(sizes, 2, 5)
            self.exercise.results(module, *inputs, guarded=False)["y"].sum().backward()
            for p in module.parameters():
                p.requires_grad_(p.grad is not None)
            halves = self.exercise.halves(sizes)
            self._weights[size_key(sizes)] = WeightLayout(module, sizes, halves)
        return self._weights[size_key(sizes)]


class Submission:
    """A class that somebody wrote; its parameters are read by one assignment at all sizes.

    reference: the class whose weights it is given. exercise: a ClassExercise.
    """

    def __init__(
        self, exercise: object, cls: Callable, reference: ReferenceClass, file: SubmittedFile
    ):
        self.exercise, self.cls, self.reference, self.file = exercise, cls, reference, file
        self.seconds, self.all_tried = SEARCH_SECONDS, False
        self.modules: dict[tuple, nn.Module] = {}
        self._searches: dict[tuple, dict[tuple, AssignmentSearch]] = {}
        self._layouts: dict[tuple, dict[str, Tensor]] = {}
        self._read: Assignment | None = None

    def built(self, sizes: Sizes) -> nn.Module:
        """One module a size and dtype, run once so that lazy parameters are there."""
        key = (*size_key(sizes), torch.get_default_dtype())
        if key not in self.modules:
            module = self.exercise.build(self.cls, sizes)
            if not isinstance(module, nn.Module):
                raise Trouble(f"it must be an nn.Module, it is {kind_in_words(module)}")
            with torch.no_grad():
                self.exercise.probe(module, sizes)
            self.modules[key] = module
        return self.modules[key]

    def search(self, sizes: Sizes, turned: bool = True, flags: bool = False) -> AssignmentSearch:
        """Over its parameters: square raw matrices as [in, out] or not, gradients used or not."""
        ways = self._searches.setdefault(size_key(sizes), {})
        before = dict(self._read.keys) if self._read else {}
        key = (turned, flags, *before.items())
        if key not in ways:
            weights, module = self.reference.weights(sizes), self.built(sizes)

            @functools.cache
            def probed() -> Flags:
                return self.exercise.unused_entries(self.reference.make(sizes), module, sizes)

            probes = probed if flags else None
            ways[key] = AssignmentSearch(weights, module, probes, turned, before)
        return ways[key]

    def assignments(self, sizes: Sizes) -> Iterator[Assignment]:
        """By names alone and with what gradients tell, of raw matrices both ways, in turns.

        What gradients tell is right where the class is right; where it is wrong, names say more.
        """
        first, seen = self.search(sizes), set()
        square = any(one.is_square_matrix for one in first.parameters)
        ways = itertools.product((True, False) if square else (True,), (False, True), GREEDINESS)
        until = time.process_time() + self.seconds
        streams = [self.search(sizes, *way).assignments(until, greed) for *way, greed in ways]
        for several in itertools.zip_longest(*streams):
            for one in several:
                if one is not None and (one.turned, one.keys) not in seen:
                    seen.add((one.turned, one.keys))
                    yield one
        self.all_tried = time.process_time() < until

    def read_by(self, sizes: Sizes, assignment: Assignment) -> "Submission":
        """The same class with its parameters read by an assignment at these sizes."""
        reader = Submission(self.exercise, self.cls, self.reference, self.file)
        reader.modules, reader._searches = self.modules, self._searches
        reader._layouts, reader._read = {size_key(sizes): assignment.layout}, assignment
        return reader

    def layout(self, sizes: Sizes) -> dict[str, Tensor]:
        """At these sizes: by the same keys, or one that fits where parameters have another form."""
        if size_key(sizes) not in self._layouts:
            search = self.search(sizes, self._read.turned)
            layout = search.as_before(dict(self._read.keys))
            found = self._searched(sizes) if layout is None else layout
            self._layouts[size_key(sizes)] = found
        return self._layouts[size_key(sizes)]

    def _searched(self, sizes: Sizes) -> dict[str, Tensor]:
        """The first assignment whose output is the answer's, else the likeliest."""
        wanted = self.reference.first_output(sizes)
        weights, module, likeliest = self.reference.weights(sizes), self.built(sizes), None
        for assignment in itertools.islice(self.assignments(sizes), OTHER_SIZES_TRIES):
            likeliest = assignment.layout if likeliest is None else likeliest
            load(module, assignment.layout, weights.values)
            if equal_outputs(wanted, self.exercise.first_output(module, sizes)):
                return assignment.layout
        if likeliest is None:
            raise Trouble("its parameters have another form at these sizes")
        return likeliest

    def make(self, sizes: Sizes, steep: float = 1.0) -> LoadedModule:
        """A module with the drawn weights; steep makes its scores so many times as large."""
        module, layout = self.built(sizes), self.layout(sizes)
        weights = self.reference.weights(sizes)
        load(module, layout, weights.values_with_steep_scores(steep**0.5))
        return LoadedModule(module, layout, weights)

    def start(self, sizes: Sizes) -> Tensor:
        """The values of a fresh module, in the places of the answer's."""
        layout = self.layout(sizes)
        module = self.exercise.build(self.cls, sizes)
        with torch.no_grad():
            self.exercise.probe(module, sizes)
        return start_values(module, layout, self.reference.weights(sizes).size)

    def forget_modules(self) -> None:
        """Build anew what is asked for next."""
        self.modules.clear()

    def in_dtype(self, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        """New tensors have this dtype inside, and tables that its code caches are made anew."""
        return default_dtype(dtype, self.file.forget)

    def fill(self, module: nn.Module, sizes: Sizes, weights: dict[str, Tensor]) -> None:
        """Write weights, by the names of the answer's state dict, into a module of these sizes."""
        layout = self.reference.weights(sizes)
        values = torch.zeros(layout.size, dtype=next(iter(weights.values())).dtype)
        for name, places in layout.layout.items():
            values[places] = weights[name]
        load(module, self.layout(sizes), values)

    def gradient_in_words(self, line: str, sizes: Sizes) -> str:
        """A place in the flat gradient, `at [7] …`, as an entry of a parameter of the class."""
        place = int(re.search(r"\[(\d+)", line)[1])
        parameters = dict(self.built(sizes).named_parameters())
        for name, places in self.layout(sizes).items():
            at = (places == place).nonzero()
            if len(at):
                if parameters[name].grad is None:
                    return f"{name} gets no gradient: nothing depends on it"
                where = f"[{', '.join(map(str, at[0].tolist()))}]"
                return f"the gradient of {name}: " + re.sub(r"at \[\d+\]", f"at {where}", line)
        return line
