"""What a probe finds, and when two findings are the same.

A reading is a dict of findings by name. A finding is a flag (any plain value, compared exactly) or
`Measured` numbers, which are the same up to a tolerance, apart from ten times that, and between
the two neither: sets of bugs with such a pair are not used.
"""

import traceback
from typing import NamedTuple

import torch
from torch import Tensor

SAME, BETWEEN, APART = 0, 1, 2


class Measured(NamedTuple):
    """Numbers; up to `same` they are equal, from `apart` on different, both of `unit`."""

    numbers: Tensor
    same: float = 5e-4  # of the largest: GELU by tanh, which is none, moves logits by 3.4e-4
    apart: float = 5e-3
    unit: float = 1.0


class Raised(NamedTuple):
    """A probe ended in an exception of the file."""

    kind: str
    words: str
    line: int | None


class Note(str):
    """A number for the symptom; it decides nothing, so all are equal."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note)

    __hash__ = None


class NotMeasuredError(Exception):
    """The file cannot be measured; the message says why."""


Reading = dict[str, object]


def relative(numbers: Tensor) -> Measured:
    """Numbers that count by their largest."""
    numbers = numbers.detach().double()
    finite = numbers[numbers.isfinite()]
    return Measured(numbers, unit=max(float(finite.abs().max()) if finite.numel() else 1.0, 1e-6))


def absolute(numbers: object, same: float, apart: float | None = None) -> Measured:
    """Numbers on a scale of their own."""
    numbers = torch.as_tensor(numbers).detach().double()
    return Measured(numbers, same, 10 * same if apart is None else apart)


def difference(one: object, other: object) -> int:
    """SAME, BETWEEN or APART."""
    if not (isinstance(one, Measured) and isinstance(other, Measured)):
        if isinstance(one, Raised) and isinstance(other, Raised):
            return SAME if one.kind == other.kind else APART
        return SAME if type(one) is type(other) and one == other else APART
    first, second = one.numbers, other.numbers
    if first.shape != second.shape or not torch.equal(first.isnan(), second.isnan()):
        return APART
    gap = (first - second).nan_to_num(nan=0.0).abs()
    if not gap.numel():
        return SAME
    largest = float(gap.max()) / max(one.unit, other.unit)
    if largest <= one.same:
        return SAME
    return APART if largest >= one.apart else BETWEEN


def differing(one: Reading, other: Reading) -> dict[str, int]:
    """The findings that are not the same in two readings of one probe."""
    names = list(dict.fromkeys([*one, *other]))
    gaps = {name: difference(one.get(name), other.get(name)) for name in names}
    return {name: gap for name, gap in gaps.items() if gap != SAME}


def raised(error: BaseException, filename: str) -> Raised:
    """The exception, and the last line of the file that it passed."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == filename
    ]  # fmt: skip
    words = " ".join(str(error).split())
    return Raised(type(error).__name__, words[:160], lines[-1] if lines else None)
