"""What a submission does, in words, where no known mistake fits: seen in its results.

Each sentence is measured on the submission and on the answer beside it, so it is true whatever the
text looks like: a token sees a later one, an argument changes nothing, the result is twice itself.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from judge.cases import Case, Outcomes, drawn
from judge.classes import ClassExercise
from judge.compare import (
    CLOSE,
    Expectation,
    brief_value,
    difference_in_words,
    problem_of,
)

Pair = tuple[Case, Tensor, Tensor]  # a case, what it must give, and what it gives
EXACT = 1e-4  # of a factor


def unlike(one: object, other: object) -> bool:
    """Whether two results are different by more than rounding; of other shapes too."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) != len(other) or any(map(unlike, one, other))
    return difference_in_words(one, other, Expectation(close=10 * CLOSE)) is not None


# ── Results beside what they must be ─────────────────────────────────────────────────────────


def wrong_pairs(answer: Outcomes, theirs: Outcomes, wrong: Iterable[int]) -> list[Pair]:
    """Of each failing case the first result that differs; none where one is no plain number."""
    found = []
    for i in wrong:
        case = answer.cases[i]
        if case.half:
            continue
        if problem_of(theirs[i]) is not None:
            return []
        key, want = next(
            (key, want)
            for key, want in answer[i].items()
            if difference_in_words(want, theirs[i].get(key), case.how) is not None
        )
        have = theirs[i].get(key)
        if type(want) in (int, float) and type(have) is type(want):
            want, have = (torch.tensor(float(n), dtype=torch.float64) for n in (want, have))
        same = isinstance(want, Tensor) and isinstance(have, Tensor) and want.shape == have.shape
        if (
            not same
            or want.dtype != have.dtype
            or want.dtype == torch.bool
            or key.startswith("the gradient")
        ):
            return []
        found.append((case, want.detach().double(), have.detach().double()))
    return found


def seen_in_results(answer: Outcomes, theirs: Outcomes, wrong: list[int]) -> str | None:
    """How all wrong results come from the right ones, or that gradients alone are wrong."""
    said = gradients_alone(answer, theirs, wrong)
    if said is not None:
        return said
    pairs = wrong_pairs(answer, theirs, wrong)
    for find in (overflow, factor, offset):
        found = find(pairs) if pairs else None
        if found is not None:
            return found
    return None


def overflow(pairs: list[Pair]) -> str | None:
    """NaN or infinity in every case that fails."""
    if all(want.isfinite().all() and not have.isfinite().all() for _, want, have in pairs):
        return "it gives NaN or infinity where there are numbers"
    return None


def factor(pairs: list[Pair]) -> str | None:
    """One factor for all entries: a number, or the size of an axis or an argument."""
    ratios = []
    for _, want, have in pairs:
        seen = want.abs() > 1e-6 * want.abs().max()
        ratio = (have / want)[seen]
        if not len(ratio) or not ratio.isfinite().all() or (have[~seen].abs() > 1e-9).any():
            return None
        if ratio.max() - ratio.min() > EXACT * ratio.abs().max():
            return None
        ratios.append(ratio.mean().item())
    if len(pairs) < 2 and pairs[0][1].numel() < 2:
        return None
    alike = max(ratios) - min(ratios) <= EXACT * max(map(abs, ratios))
    if alike and ratios[0] and abs(ratios[0] - 1) > 10 * EXACT:
        return f"the result is {brief_value(ratios[0])} times what it must be"
    for name, sizes in sizes_of([case for case, *_ in pairs]):
        for power, said in ((1, "{}"), (-1, "1 / {}"), (0.5, "√{}"), (-0.5, "1 / √{}"), (2, "{}²")):
            wanted = [size**power if size > 0 else 0 for size in sizes]
            if all(abs(r - w) <= EXACT * w for r, w in zip(ratios, wanted)):
                return f"the result is {said.format(name)} times what it must be"
    return None


def sizes_of(cases: list[Case]) -> Iterator[tuple[str, list[float]]]:
    """The numbers that all cases are given, and the lengths of their tensors' axes, by name."""
    for name, first in (cases[0].inputs or {}).items():
        values = [(case.inputs or {}).get(name) for case in cases]
        if all(type(value) in (int, float) for value in values):
            yield name, values
        elif all(isinstance(value, Tensor) for value in values):
            for axis in range(first.ndim):
                if all(value.ndim > axis for value in values):
                    yield f"{name}.shape[{axis}]", [value.shape[axis] for value in values]


def offset(pairs: list[Pair]) -> str | None:
    """One number for all entries, or an argument, is added."""
    gaps = [have - want for _, want, have in pairs]
    flat = torch.cat([gap.flatten() for gap in gaps])
    if len(flat) > 1 and (flat - flat[0]).abs().max() <= 1e-6 * (flat[0].abs() + 1e-9):
        more = "more" if flat[0] > 0 else "less"
        return f"the result is {brief_value(abs(flat[0]))} {more} than it must be, everywhere"
    for name in pairs[0][0].inputs or {}:
        values = [(case.inputs or {}).get(name) for case, *_ in pairs]
        if all(isinstance(v, Tensor) and v.shape == gap.shape for v, gap in zip(values, gaps)):
            for sign, said in ((1, "added to"), (-1, "subtracted from")):
                if not any(unlike(sign * v.double(), gap) for v, gap in zip(values, gaps)):
                    return f"{name} is {said} what the result must be"
    return None


def gradients_alone(answer: Outcomes, theirs: Outcomes, wrong: Iterable[int]) -> str | None:
    """The values are right in every case, and a gradient is not."""
    keys = set()
    for i in wrong:
        for key, want in answer[i].items():
            if difference_in_words(want, theirs[i].get(key), answer.cases[i].how) is not None:
                keys.add(key)
    if keys and all(key.startswith("the gradient") for key in keys):
        return f"the values are right and {min(keys)} is not"
    return None


# ── Functions: what changes with what ────────────────────────────────────────────────────────


def function_behaviour(answer: Outcomes, theirs: Outcomes, wrong: list[int]) -> str | None:
    """What a function does, in words."""
    found = seen_in_results(answer, theirs, wrong)
    ran = [i for i, case in enumerate(answer.cases) if case.inputs and not case.half]
    ran = [i for i in ran if problem_of(theirs[i]) is None]
    failing = [answer.cases[i] for i in ran if i in wrong]
    for find, cases in ((repeated, failing[:4]), (unused_argument, [answer.cases[i] for i in ran])):
        with contextlib.suppress(Exception):
            found = found or find(cases, answer.subject, theirs.subject)
    return found


def call(function: Callable, arguments: Iterable[object]) -> object:
    """What a function returns for copies of arguments."""
    with torch.no_grad():
        return function(*(a.clone() if isinstance(a, Tensor) else a for a in arguments))


def repeated(cases: list[Case], answer: Callable, theirs: Callable) -> str | None:
    """The same call gives something else the second time."""
    for case in cases:
        values = case.inputs.values()
        alike = [not unlike(call(f, values), call(f, values)) for f in (answer, theirs)]
        if alike == [True, False]:
            return "the same call gives another result the second time: something is kept"
    return None


def unused_argument(cases: list[Case], answer: Callable, theirs: Callable) -> str | None:
    """An argument that changes the answer's result and theirs in no case."""
    used, unused = set(), []
    for case in cases:
        values = dict(case.inputs)
        ours, before = call(answer, values.values()), call(theirs, values.values())
        for name, value in values.items():
            for other in others_of(value):
                given = {**values, name: other}.values()
                if unlike(before, call(theirs, given)):
                    used.add(name)
                elif unlike(ours, call(answer, given)):
                    unused.append(name)
    alone = [name for name in unused if name not in used]
    return f"{alone[0]} is not used: another one changes nothing" if alone else None


def others_of(value: object) -> Iterator[object]:
    """Other values of an argument, as unlike as its kind allows."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value + 0.5 * drawn("another", *value.shape).to(value.dtype)
        elif value.dtype == torch.bool:
            yield ~value
            yield torch.ones_like(value)
        else:
            yield value.roll(1)
            yield value.clamp(max=0)
    elif isinstance(value, float):
        yield from (value / 2, value * 3)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from (value + 1, max(value - 1, 0))


# ── Classes: which token sees which ──────────────────────────────────────────────────────────


def class_behaviour(
    one: ClassExercise, make: Callable[[], nn.Module], ours: nn.Module
) -> str | None:
    """What a class does, in words; make gives a new instance that holds the same weights."""
    sizes = one.sizes[0]
    for find in (seen_tokens, unused_parameter):
        with contextlib.suppress(Exception), torch.enable_grad():
            found = find(one, sizes, make, ours)
            if found is not None:
                return found
    return None


def output(one: ClassExercise, module: nn.Module, inputs: list[Tensor]) -> Tensor:
    """What a call gives, without gradients."""
    with torch.no_grad():
        return one.results(module, *inputs, guarded=False)["y"]


def kept_state(one: ClassExercise, sizes: dict, make: Callable[[], nn.Module]) -> str | None:
    """A second call, or a second instance, goes on where the first one ended."""
    inputs, first, state = one.inputs(sizes, 2, 5), make(), torch.get_rng_state()
    before = output(one, first, inputs)
    if not torch.equal(state, torch.get_rng_state()):
        return None  # what draws is another thing the second time

    def other(module: nn.Module) -> bool:
        try:
            return unlike(before, output(one, module, inputs))
        except Exception:
            return True

    if other(make()):
        return "what one call leaves behind reaches a new instance: a default argument or a global"
    if other(first):
        return "the module keeps what one call leaves behind: the next text begins with it"
    return None


def seen_tokens(
    one: ClassExercise, sizes: dict, make: Callable[[], nn.Module], ours: nn.Module
) -> str | None:
    """Which output changes with which input token, and with which of the memory's."""
    crowded = "n_experts" in sizes
    inputs = one.inputs(sizes, 2, 40, name="crowded") if crowded else one.inputs(sizes, 2, 5)
    if one.style == "masked":
        inputs.append(torch.tensor([[True] * 3 + [False] * 2, [True] * 5]))
    module = make()
    for place, words in ((0, "x"), (1, "memory"))[: 2 if one.style == "memory" else 1]:
        for s in range(5):
            changed = list(inputs)
            changed[place] = inputs[place].clone()
            changed[place][0, s] = drawn("another token", inputs[place].shape[-1])
            moves = (output(one, m, inputs) - output(one, m, changed) for m in (module, ours))
            theirs, wanted = (move.abs().amax(dim=-1) > 1e-7 for move in moves)
            said = f"token {s} of {words}"
            if theirs[1].any():
                return f"row 1 of the batch depends on {said}, row 0"
            for t in (theirs[0] != wanted[0]).nonzero()[:, 0].tolist():
                if one.style == "masked" and t > 2:
                    continue
                if wanted[0, t]:
                    return f"the output of token {t} does not depend on {said}, and must"
                later = ", a later one" if words == "x" and s > t and not crowded else ""
                hidden = ", which is padding" if one.style == "masked" and s > 2 else ""
                return f"the output of token {t} depends on {said}{later}{hidden}, and must not"
    return None


def unused_parameter(
    one: ClassExercise, sizes: dict, make: Callable[[], nn.Module], ours: nn.Module
) -> str | None:
    """A parameter that no output depends on."""
    module = make()
    found = one.results(module, *one.inputs(sizes, 2, 5), guarded=False)
    y = found["y"]
    (y * drawn("loss", *y.shape)).sum().backward()
    unused = [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and p.numel() > 1 and (p.grad is None or not p.grad.any())
    ]
    if unused and "n_experts" not in sizes and "rank" not in sizes:
        return f"{unused[0]} is not used: the output does not depend on it"
    return None
