"""What a finding says in words: the number of their file, and what it should be. Never the place."""

import math
from collections.abc import Callable, Sequence

from judge.round.measuring import Measured, Note, Raised, Reading
from judge.round.subject import SIZES

Words = Callable[[str, object, object, Reading], str]


def number(value: float) -> str:
    return "NaN" if math.isnan(value) else "0" if abs(value) < 5e-6 else f"{value:.3g}"


def largest(found: Measured) -> float:
    return float(found.numbers.abs().max()) if found.numbers.numel() else 0.0


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def first_gap(theirs: Measured, wanted: Measured) -> int:
    """Where two lists of numbers differ first."""
    if theirs.numbers.shape != wanted.numbers.shape:
        return 0
    gaps = (theirs.numbers - wanted.numbers).nan_to_num(nan=math.inf).abs() / theirs.unit
    far = (gaps > theirs.same).nonzero()
    return int(far[0]) if len(far) else 0


def logits(name: str, theirs: Measured, wanted: Measured, _: Reading) -> str:
    length = name.rsplit(" ", 1)[1]
    text = f"logits of {length} token{'s' * (length != '1')}, on the judge's weights,"
    missing = int(theirs.numbers.isnan().sum())
    if missing:
        return f"{text} hold NaN in {missing} of {theirs.numbers.numel()} places"
    if theirs.numbers.shape != wanted.numbers.shape:
        return f"{text} have shape {list(theirs.numbers.shape)}, not {list(wanted.numbers.shape)}"
    gap = float((theirs.numbers - wanted.numbers).abs().max())
    return (
        f"{text} are off by up to {number(gap)}, {100 * gap / wanted.unit:.2g} % of the largest, from "
        "a model that follows the first lines"
    )


def unequal(name: str, theirs: tuple, wanted: tuple) -> list[tuple[str, object, object]]:
    """Entries of two tables by name that are not the same."""
    expected = dict(wanted)
    return [(n, value, expected.get(n)) for n, value in theirs if expected.get(n) != value]


def gradients(name: str, theirs: tuple, wanted: tuple, _: Reading) -> str:
    gaps = unequal(name, theirs, wanted)
    lost = [n for n, value, _ in gaps if value != "some"]
    states = sorted({value for _, value, _ in gaps if value != "some"})
    if not lost:
        return f"gradients where none were expected: {listed([n for n, _, _ in gaps])}"
    return f"{len(lost)} of {len(theirs)} gradients are {' or '.join(states)}: {listed(lost)}"


def rows(name: str, theirs: tuple, wanted: tuple, _: Reading) -> str:
    gaps = unequal(name, theirs, wanted)
    if not gaps:
        return "gradients are missing in some rows"
    table, count, expected = gaps[0]
    return f"{count} rows of {table} get a gradient, {expected} should"


def sizes(name: str, theirs: Measured, wanted: Measured, _: Reading) -> str:
    at = first_gap(theirs, wanted)
    ratio = math.exp(float(theirs.numbers[at] - wanted.numbers[at]))
    return f"gradients have other sizes: parameter {at} by a factor of {number(ratio)}"


def schedule(name: str, theirs: Measured, wanted: Measured, _: Reading) -> str:
    at = first_gap(theirs, wanted)
    got, expected = (float(found.numbers[at]) for found in (theirs, wanted))
    return (
        f"the schedule from 0.4 down to 0.1, with a warm-up of 5 of 20 steps, gives {number(got)} "
        f"at step {at}, not {number(expected)}"
    )


def times(name: str, theirs: tuple, wanted: tuple, _: Reading) -> str:
    gaps = unequal(name, theirs, wanted)
    return (
        f"{len(gaps)} of {len(theirs)} parameters are {gaps[0][1]} times in the optimiser, not once"
    )


def decays(name: str, theirs: tuple, wanted: tuple, _: Reading) -> str:
    gaps = unequal(name, theirs, wanted)
    on = sum(value is True for _, value, _ in gaps)
    return (
        f"{on} parameters decay that should not, {len(gaps) - on} do not that should, "
        f"of {len(theirs)} in the model"
    )


def loss(name: str, theirs: Measured, wanted: Measured, _: Reading) -> str:
    some = ", some targets being -1" if name.endswith("-1") else ""
    return (
        f"the loss is {number(float(theirs.numbers))} times the cross entropy of the file's own "
        f"logits{some}"
    )


def steps(name: str, theirs: Measured, wanted: Measured, _: Reading) -> str:
    values = [number(float(value)) for value in theirs.numbers.flatten()]
    what = {
        "cosines": "the cosine of the gradient at step() with the mean gradient of the "
        "micro-batches seen since the step before is {}, step by step; 1 is right",
        "norms": "the gradient at step() is {} times as long as the mean gradient of the "
        "micro-batches seen, step by step; 1 is right",
        "rates": "the rate in the optimiser is off the schedule by {} of the largest rate, "
        "step by step",
        "clipped cosines": "with a limit that every gradient passes, the cosine of the gradient "
        "at step() with the mean gradient is {}; 1 is right",
        "clipped norms": "with a limit that every gradient passes, the gradient at step() is {} "
        "limits long; 1 is right",
    }[name]
    return what.format(", ".join(values) or "not to be had, as no optimiser steps")


def shares(name: str, theirs: Measured, wanted: Measured, reading: Reading) -> str:
    gap = theirs.numbers - wanted.numbers
    at = int(gap.abs().argmax())
    more = ""
    if "top-k" in name:
        more = f"; {reading['tokens drawn by top-k']} tokens were drawn for a k of 3"
    return (
        f"of 4000 draws at {name.removeprefix('frequencies, ')} token {at} comes in a share that is "
        f"{number(float(theirs.numbers[at]))} off the softmax of the file's own logits{more}"
    )


def greedy(name: str, theirs: object, wanted: object, reading: Reading) -> str:
    which = name.removeprefix("greedy ").replace("short", "a short prompt")
    which = {"row": "a single row", "over the context": "a prompt longer than the context"}.get(
        which, which
    )
    agree = reading.get(f"agreement {name.removeprefix('greedy ')}")
    count = f"{agree} tokens" if agree else "not all tokens"
    return (
        f"for {which}, generate at temperature 0 agrees in {count} with the argmax of the file's own "
        "logits in eval mode"
    )


def names(text: str) -> Words:
    return lambda _, theirs, __, ___: text.format(len(theirs), listed(theirs))


def shared(name: str, theirs: tuple, wanted: tuple, _: Reading) -> str:
    more, fewer = (
        [one for one in a if one not in b] for a, b in ((theirs, wanted), (wanted, theirs))
    )
    if more:
        return f"{len(more)} parameters are shared that should not be: {' = '.join(more[0])}"
    return f"{len(fewer)} parameters should be shared and are not: {' = '.join(fewer[0])}"


def gap(text: str) -> Words:
    return lambda _, theirs, wanted, __: text.format(
        number(largest(theirs)), number(largest(wanted))
    )


def flag(text: str) -> Words:
    def words(_: str, theirs: object, wanted: object, reading: Reading) -> str:
        notes = {name.replace(" ", "_"): v for name, v in reading.items() if isinstance(v, Note)}
        return text.format(theirs, wanted, **notes)

    return words


LN_V = f"{math.log(SIZES['vocab_size']):.2f}"

TELLING: tuple[tuple[str, Words], ...] = (  # from what tells most to what tells least
    ("later tokens", gap("logits before place t change by up to {} when the token at t changes; 0 is right")),
    ("fresh loss", flag(f"a fresh model's loss is {{fresh_loss_number}}, ln V is {LN_V}")),
    ("zero matrices", names("{} matrices of a fresh model hold zeros alone: {}")),
    ("unknown to the model", names("{} parameters are not among the model's: {}")),
    ("shared parameters", shared),
    ("gradients", gradients),
    ("row alone", gap("a row alone has logits that are {} off those in a batch; 0 is right")),
    ("beginning alone", gap("the first 4 tokens alone have logits that are {} off those in a longer text; 0 is right")),
    ("rows with gradients", rows),
    ("two eval passes equal", flag("two passes in eval mode differ by {gap_of_two_eval_passes}")),
    ("train mode at rate 0", gap("a pass in train mode with a dropout of 0 is {} off one in eval mode; 0 is right")),
    ("repeated token", gap("logits of one token, repeated, differ by {} from place to place; a model that follows the first lines gives {}")),
    ("loss", loss),
    ("loss with -1", loss),
    ("logits with targets", gap("logits differ by {} when targets are given; 0 is right")),
    ("steps", flag("the optimiser makes {0} steps in a run of {1}")),
    ("moved", flag("parameters moved in a run of 3 steps: {0}")),
    ("optimisers", flag("{0} optimisers make the steps of one run")),
    ("descends", flag("along the mean gradient, parameters go {0} step by step (1 down, -1 up, 0 not); {1} is right")),
    ("modes", flag("while training, the model is in train mode: {0}; right is {1}")),
    ("batches", flag("the batches of a run are {0}; in the right one they {1}")),
    ("rows", flag("rows seen before each step: {0}; {1} are right")),
    ("cosines", steps),
    ("norms", steps),
    ("clipped cosines", steps),
    ("clipped norms", steps),
    ("rates", steps),
    ("losses", flag("train returns {0} losses, {1} steps were asked for")),
    ("schedule", schedule),
    ("times in the optimiser", times),
    ("decays", decays),
    ("maximises", flag("the optimiser is told to go up: {0}")),
    ("tables equally wide", flag("the position table of a fresh model is {ratio_of_tables} times as wide as the token table")),
    ("y - x", flag("on the data 0, 1, 2 … y - x is {0}, not {1}")),
    ("rows differ", flag("all rows of a batch are the same")),
    ("draws differ", flag("all of 12 batches are the same")),
    ("first ids", flag("rows start at {first_ids_number} places, in 768 rows")),
    ("tokens of a row", flag("on the data 0, 1, 2 … the steps within a row are {0}, not {1}")),
    ("shape of a batch", flag("a batch has shapes {0}, not {1}")),
    ("parts overlap", flag("the two parts of split have tokens in common: {0}")),
    ("parts hold tokens", flag("both parts of split hold tokens of the data: {0}")),
    ("decode(encode(text)) is text", flag("decode(encode(text)) gives back the text: {0}")),
    *((f"length of {one}", flag("generate returns the shape {0}, not {1}")) for one in ("short", "over the context", "row")),
    *((f"prompt of {one} kept", flag("what generate returns begins with the prompt: {0}")) for one in ("short", "over the context", "row")),
    *((f"greedy {one}", greedy) for one in ("short", "over the context", "row")),
    *((f"mode after {one}", flag("after generate the model is in train mode: {0}; it was: {1}")) for one in ("short", "over the context", "row")),
    ("frequencies, T = 1", shares),
    ("frequencies, T = 0.3", shares),
    ("frequencies, top-k of 3", shares),
    ("logits of 7", logits),
    (f"logits of {SIZES['context']}", logits),
    ("logits of 1", logits),
    ("sizes of gradients", sizes),
)  # fmt: skip
ORDER = {name: rank for rank, (name, _) in enumerate(TELLING)}


NOTHING = 1e-3  # of the largest logit: what should not be and is less than this is not


def rank(name: str, theirs: Reading) -> int:
    """How much a finding of theirs tells: exceptions first, what theirs does not hold last."""
    if name.endswith(" raises"):
        return -1
    found = theirs.get(name)
    if found is None:
        return len(ORDER) + 1
    silent = (
        (name == "gradients" and all(state == "some" for _, state in found))
        or (name in ("later tokens", "row alone", "beginning alone") and not moves(found))
        or (name == "repeated token" and moves(found))
    )
    return len(ORDER) if silent else ORDER.get(name, len(ORDER))


def moves(found: Measured) -> bool:
    return not largest(found) <= NOTHING * found.unit


def symptom(name: str, theirs: Reading, wanted: Reading) -> str:
    """A sentence on a finding of theirs; wanted is the reading of a right file."""
    found, right = theirs.get(name), wanted.get(name)
    if isinstance(found, Raised):
        at = f", line {found.line}" if found.line else ""
        return f"it raises {found.kind}: {found.words}{at}"
    words = dict(TELLING).get(name)
    if words is None or found is None or right is None or type(found) is not type(right):
        return f"{name}: {found if not isinstance(found, Measured) else 'other numbers'}"
    return words(name, found, right, theirs)
