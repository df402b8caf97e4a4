"""What is said of a class whose parameters are not the answer's."""

import textwrap

from torch import nn

from judge.assignment import AssignmentSearch
from judge.layout import WeightLayout, without_ones
from judge.subjects import Sizes, Submission, size_key


class StrippedSubmission(Submission):
    """A submitted class whose biases, which nobody asked for, are 0 and stay so."""

    def __init__(self, submission: Submission, biases: list[str]):
        super().__init__(submission.exercise, submission.cls, submission.reference, submission.file)
        self._biases = biases

    def built(self, sizes: Sizes) -> nn.Module:
        """One module a size and dtype, its biases 0."""
        new = not any(key[: len(sizes)] == size_key(sizes) for key in self.modules)
        module = super().built(sizes)
        parameters = dict(module.named_parameters())
        for name in self._biases:
            parameters[name].data.zero_()
            parameters[name].requires_grad_(False)
        if new:
            self._searches.pop(size_key(sizes), None)
        return module

    def read_by(self, sizes: Sizes, assignment: object) -> "Submission":
        """The same with its parameters read by an assignment at these sizes."""
        reader = StrippedSubmission(self, self._biases)
        reader.modules, reader._searches = self.modules, self._searches
        reader._layouts, reader._read = {size_key(sizes): assignment.layout}, assignment
        return reader


def extra_biases(search: AssignmentSearch) -> list[str]:
    """The biases of matrices for which the answer has none."""
    paired = {one.bias: one for one in search.paired if one.bias and len(one.shape) > 1}
    return [
        bias
        for bias, one in paired.items()
        if all(
            packing.bias is None
            for packing, _ in search.layout.packings.get(without_ones(one.shape), [])
        )
    ]


def unrecognised_lines(sizes: Sizes, module: nn.Module, weights: WeightLayout) -> list[str]:
    """What the class has and the answer has not, and the other way round; in shapes."""
    own = [
        f"{m.name} {list(m.weight.shape)}" + ("" if m.bias is None else " with bias")
        for m in weights.maps.values()
    ]
    own += [f"{name} {list(places.shape)}" for name, places in weights.vectors.items()]
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    theirs = [f"{name} {list(p.shape)}" for name, p in trained.items()]
    count = sum(p.numel() for p in trained.values())
    made = ", ".join(f"{key}={size}" for key, size in sizes.items())
    lines = [f"its parameters are not those of the answer in any layout known here, {made}:"]
    for who, number, parts in (("answer", weights.size, own), ("yours", count, theirs)):
        listed = ", ".join(parts) or "none (nn.Module does not see what lies in a plain list)"
        text = f"{who}, {number} numbers: {listed}"
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", max_lines=3, placeholder=" …")
    return lines
