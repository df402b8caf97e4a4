"""Whether two results are equal, and in words where they are not."""

import math
import types
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from judge.state import Raised

CLOSE = 1e-5  # of the largest value: people's norms, softmax and tables run in float32 somewhere
RARE = 0.004  # of the draws: what was never drawn may have had that much of a chance


class Expectation(NamedTuple):
    """How results of a case are compared: the letters of its sizes, and how near is equal.

    close: as a share of the largest value; least: a gap that is rounding, whatever the values.
    """

    letters: Mapping[int, str] = types.MappingProxyType({})
    close: float = CLOSE
    float32_is_right: bool = False  # as a result of float64 inputs
    least: float = 1e-12


class Difference(NamedTuple):
    """Where two outcomes first differ, and how to say it."""

    where: str
    lines: tuple[str, ...]


class AtMost(int):
    """A cost: what is less is right too."""


class Shares(NamedTuple):
    """How often each id was drawn, [rows, V], in so many draws a row."""

    shares: Tensor
    draws: int

    def unlike(self, other: "Shares") -> tuple[str, ...] | None:
        """An id drawn far too often or too rarely, or never, or though it must not be."""
        rate = 1 / self.draws + 1 / other.draws
        for row, (want, have) in enumerate(zip(self.shares.tolist(), other.shares.tolist())):
            for token, (p, q) in enumerate(zip(want, have)):
                never = p == 0 and q > (RARE if self.draws > 1000 else 0.05)
                never = never or (p > 0.05 and q == 0)
                if never or abs(p - q) > 4.5 * math.sqrt((p * (1 - p) + 0.01) * rate):
                    shares = f"in {p:.1%} of the draws, got {q:.1%}"
                    return (f"id {token} of row {row} expected {shares}",)
        return None


def first_difference(expected: dict, got: dict, how: Expectation) -> Difference | None:
    """The first result that is not as expected, or None."""
    for problem in ("trouble", "raised"):
        if problem in got or problem in expected:
            both = problem in got and problem in expected
            if both and problem_of(got) == problem_of(expected):
                return None
            found = got.get(problem)
            return Difference(problem, found.lines if isinstance(found, Raised) else (str(found),))
    for key, want in expected.items():
        lines = difference_in_words(want, got.get(key), how)
        if lines is not None:
            return Difference(key, lines)
    return None


def problem_of(outcome: dict) -> str | None:
    """What a case says where it gives no results; None where it does."""
    if "raised" in outcome:
        return outcome["raised"].lines[-1]
    return outcome.get("trouble")


def difference_in_words(want: object, have: object, how: Expectation) -> tuple[str, ...] | None:
    """How two values differ, or None."""
    if isinstance(want, Shares) and isinstance(have, Shares):
        return want.unlike(have)
    if isinstance(want, AtMost) and isinstance(have, int):
        return (f"at most {int(want)}, got {int(have)}",) if have > want else None
    if isinstance(want, Tensor):
        return tensor_difference(want, have, how)
    if isinstance(have, Tensor) and have.numel() == 1:
        have = have.item()
    same = type(have) in (type(want), float, int) and have == want
    return None if same else (f"expected {want!r}, got {brief_value(have)}",)


def tensor_difference(want: Tensor, have: object, how: Expectation) -> tuple[str, ...] | None:
    """How a result differs from an expected tensor, or None."""
    if have is None:
        return ("expected a gradient, got none: nothing depends on it",)
    if not isinstance(have, Tensor):
        return (f"expected a tensor {list(want.shape)}, got {kind_in_words(have)}",)
    if have.shape != want.shape:
        return (
            f"expected shape {list(want.shape)} = {shape_in_letters(want.shape, how.letters)},"
            f" got {list(have.shape)} = {shape_in_letters(have.shape, how.letters)}",
        )
    if how.float32_is_right and (have.dtype, want.dtype) == (torch.float32, torch.float64):
        have = have.double()
    if have.dtype != want.dtype:
        return (f"expected {want.dtype}, got {have.dtype}",)
    if have.device != want.device:
        return (f"expected a result on {want.device}, got one on {have.device}",)
    wide, ours = have.detach().double(), want.detach().double()
    gap = (wide - ours).abs()
    largest = ours.abs().nan_to_num(0).max() if want.numel() else 0
    bad = (
        ~(gap <= how.close * largest + how.least) & (wide != ours) & ~(wide.isnan() & ours.isnan())
    )
    if want.dtype == torch.bool:
        bad = have != want
    if not bad.any():
        return None
    at = bad.nonzero()[0].tolist()
    place = f"[{', '.join(map(str, at))}]"
    values = f"expected {brief_value(want[tuple(at)])}, got {brief_value(have[tuple(at)])}"
    return (f"at {place} {values}",)


def largest_gap(one: dict[str, object], other: dict[str, object]) -> float:
    """The largest difference between the numbers of two outcomes, as a share of the largest."""
    largest = 0.0
    for key, want in one.items():
        have = other.get(key)
        same = isinstance(want, Tensor) and isinstance(have, Tensor) and want.shape == have.shape
        if same and want.numel():
            wide, ours = have.detach().double(), want.detach().double()
            gap = (wide - ours).abs().nan_to_num(0).max()
            largest = max(largest, float(gap / (ours.abs().max() + 1e-12)))
    return largest


def equal_outputs(want: Tensor | None, have: object) -> bool:
    """Whether an output is another's, within what float32 inside may change."""
    if want is None or not isinstance(have, Tensor) or have.shape != want.shape:
        return False
    return bool(((have - want).abs() <= CLOSE * want.abs().max()).all())


def shape_in_letters(shape: Iterable[int], letters: Mapping[int, str]) -> str:
    """[2, 5] as [B, T]."""
    return f"[{', '.join(letters.get(size, str(size)) for size in shape)}]"


def kind_in_words(value: object) -> str:
    """A value in a few words: a tuple of 3, a list."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def brief_value(value: object) -> str:
    """A value in a few characters."""
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(value, float):
        return f"{value:.6g}"
    plain = isinstance(value, (int, bool, list, tuple, str))
    text = repr(value) if plain else kind_in_words(value)
    return text if len(text) < 80 else text[:77] + "..."
