"""A failing case as a few lines of Python for a REPL: sizes, seed, call, and what is expected.

The judge's own numbers would fill pages. Here the call is made with numbers that a seed gives, and
kept where the mistake shows with them; the lines go behind the definitions of the file, as after
`python3 -i mine.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from judge.cases import Case, Outcomes, result_of
from judge.classes import ClassExercise
from judge.compare import Expectation, brief_value, tensor_difference
from judge.naming import Wrong
from judge.subjects import Sizes, Submission, load

SEEDS = 3
SCALES = (1.0, 0.001, 100.0)
STD = 0.4  # of the weights that the lines draw
MANY_NUMBERS = 400  # of a case that is written out
ROUNDING = Expectation(close=1e-4)


def replay_function(name: str, answer: Outcomes, theirs: Outcomes, wrong: Wrong) -> str | None:
    """The smallest failing call; None where its inputs cannot be written as a few lines."""
    for i, _ in wrong:
        for lines, inputs in written_inputs(theirs.cases[i]):
            want, have = (value_of(one.subject, inputs) for one in (answer, theirs))
            call = f"{name}({', '.join(inputs)})"
            shown = shown_difference(call, want, have)
            if shown is not None:
                return "\n".join(["import torch", *lines, shown])
    return None


def written_inputs(case: Case) -> Iterator[tuple[list[str], dict[str, object]]]:
    """Inputs of the same shapes, and the lines that make them: drawn anew, at last as they are."""
    inputs = case.inputs
    if not inputs:
        return
    for scale in SCALES if case.independent else ():
        for seed in range(SEEDS):
            generator = torch.Generator().manual_seed(seed)
            lines, values = [f"g = torch.Generator().manual_seed({seed})"], {}
            for name, value in inputs.items():
                text, values[name] = drawn_anew(value, generator, scale if not values else 1.0)
                lines.append(f"{name} = {text}")
            yield lines, values
    if sum(v.numel() for v in inputs.values() if isinstance(v, Tensor)) <= MANY_NUMBERS:
        yield [f"{name} = {as_written(value)}" for name, value in inputs.items()], dict(inputs)


def drawn_anew(value: object, generator: torch.Generator, scale: float) -> tuple[str, object]:
    """A float tensor drawn from a generator, with its line; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return as_written(value), value
    shape = ", ".join(map(str, value.shape))
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    text = f"torch.randn({shape}, generator=g, dtype=torch.float64)"
    if scale != 1:
        text, drawn = f"{scale:g} * {text}", scale * drawn
    if value.dtype != torch.float64:
        text, drawn = f"({text}).to({value.dtype})", drawn.to(value.dtype)
    return text, drawn


def as_written(value: object) -> str:
    """A value as Python text."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"torch.tensor({value.tolist()}, dtype={value.dtype})"


def value_of(function: Callable, inputs: Mapping[str, object]) -> object:
    """What a call gives; the exception where it raises."""
    given = [v.clone() if isinstance(v, Tensor) else v for v in inputs.values()]
    try:
        return result_of(function, *given)
    except Exception as error:
        return error


def shown_difference(call: str, want: object, have: object) -> str | None:
    """The call, at the first entry that differs, with what is expected; None where none does."""
    if isinstance(want, Exception):
        return None
    if isinstance(have, Exception):
        return f"{call}  # raises {type(have).__name__}, expected {brief_value(want)}"
    if isinstance(want, tuple) and isinstance(have, tuple) and len(want) == len(have):
        parts = enumerate(zip(want, have))
        return next(filter(None, (shown_difference(f"{call}[{i}]", *p) for i, p in parts)), None)
    if isinstance(want, Tensor) and isinstance(have, float):
        have = torch.tensor(have)
    if isinstance(want, tuple):
        return f"{call}  # expected {brief_value(want)}, yours {brief_value(have)}"
    if not isinstance(want, Tensor):
        return None if want == have else f"{call}  # expected {want!r}, yours {brief_value(have)}"
    if tensor_difference(want, have, ROUNDING) is None:
        return None
    if not isinstance(have, Tensor) or have.shape != want.shape:
        return f"{call}.shape  # expected {list(want.shape)}"
    gap = (want.detach().double() - have.detach().double()).abs().nan_to_num(torch.inf)
    places = (gap > ROUNDING.close * want.double().abs().max()).nonzero()
    if not len(places):  # of another dtype
        return None
    at = tuple(places[0].tolist())
    place = f"[{', '.join(map(str, at))}]" if at else ""
    values = f"expected {brief_value(want[at])}, yours {brief_value(have[at])}"
    return f"{call}{place}  # {values}"


# ── Classes ──────────────────────────────────────────────────────────────────────────────────


def replay_class(one: ClassExercise, submission: Submission) -> str | None:
    """A full pass, or two chunks, on weights that a seed gives; None where all is equal."""
    with contextlib.suppress(Exception):
        for sizes in one.sizes[:2]:
            for cut in (None, 3) if one.style == "cached" else (None,):
                found = replay_pass(one, submission, sizes, cut)
                if found is not None:
                    return found
    return None


def replay_pass(
    one: ClassExercise, submission: Submission, sizes: Sizes, cut: int | None
) -> str | None:
    """One pass over five tokens, in two chunks where cut says so."""
    reference = submission.reference.make(sizes)
    made = constructor(one, sizes)
    module = one.build(submission.cls, sizes).double()
    one.probe(module, sizes)
    inputs = one.inputs(sizes, 2, 5)
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=STD)
    inputs = [torch.randn(x.shape, dtype=torch.float64) for x in inputs]
    values = torch.zeros(reference.weights.size)
    parameters = dict(module.named_parameters())
    for name, places in submission.layout(sizes).items():
        values[places] = parameters[name].detach()
    load(reference.module, reference.layout, values)
    names = ("x", "memory")[: len(inputs)]
    lines = ["import torch", f"block = {made}.double()", "torch.manual_seed(0)"]
    lines += [f"for p in block.parameters(): torch.nn.init.normal_(p, std={STD})", ""]
    for name, x in zip(names, inputs):
        shape = ", ".join(map(str, x.shape))
        lines.append(f"{name} = torch.randn({shape}, dtype=torch.float64)")
    returned = "y, cache" if one.style == "cached" else "y, loss" if one.style == "balance" else "y"
    if cut is None:
        lines.append(f"{returned} = block({', '.join(names)})")
        want, have = (one.results(part, *inputs)["y"] for part in (reference.module, module))
    else:
        lines.append(f"y, cache = block(x[:, :{cut}])")
        lines.append(f"y, cache = block(x[:, {cut}:], cache)")
        want, have = (in_chunks(one, part, inputs[0], cut) for part in (reference.module, module))
    shown = shown_difference("y", want, have)
    return None if shown is None else "\n".join([*lines, shown])


def constructor(one: ClassExercise, sizes: Sizes) -> str:
    """The call that makes an instance."""
    if "rank" in sizes:
        bias = "" if sizes["bias"] else ", bias=False"
        linear = f"torch.nn.Linear({sizes['in']}, {sizes['out']}{bias})"
        return f"{one.name}({linear}, {sizes['rank']}, {sizes['alpha']})"
    return f"{one.name}({', '.join(map(str, sizes.values()))})"


def in_chunks(one: ClassExercise, module: nn.Module, x: Tensor, cut: int) -> Tensor:
    """What the second of two chunks gives."""
    first = one.results(module, x[:, :cut])
    return one.results(module, x[:, cut:], cache=(first["cache"],))["y"]
