"""Cases: calls whose results are compared, and running them on a subject."""

import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from judge.compare import CLOSE, Expectation, kind_in_words
from judge.state import SubmittedFile, raised_in


class Trouble(Exception):  # noqa: N818, it is a finding, not an error of ours
    """What is wrong with a call, in words."""


class Unjudged(Exception):  # noqa: N818
    """The answer itself fails in a case, which then says nothing of a submission."""


class Case(NamedTuple):
    """A call as shown, what it gives by name, and how that is compared.

    half: it runs in less than float64. inputs: the arguments by name, where they can be printed;
    independent where others of their shapes would do as well.
    """

    call: str
    run: Callable[[object], dict[str, object]]
    how: Expectation = Expectation()
    half: bool = False
    inputs: Mapping[str, object] | None = None
    independent: bool = True


class ArrayFunction:
    """A function that is judged by its values alone: of NumPy arrays, or the answer beside it."""

    def __init__(self, function: Callable, arrays: bool):
        self.function, self.arrays = function, arrays

    def __call__(self, *arguments: object) -> object:
        """Tensors become arrays on the way in; arrays and NumPy's numbers become tensors."""
        if not self.arrays:
            return self.function(*arguments)
        given = [a.detach().numpy().copy() if isinstance(a, Tensor) else a for a in arguments]
        before = [one.copy() if hasattr(one, "copy") else one for one in given]
        result = self.function(*given)
        for old, new in zip(before, given):
            if hasattr(old, "shape") and not (old == new).all():
                raise Trouble("it changes its input in place: the caller's array is another now")
        if type(result).__module__ == "numpy":
            return torch.as_tensor(result)
        return result


class Outcomes:
    """What the cases give for one subject, each run once.

    file is the submitted one, None for an answer of ours; running is told what runs.
    """

    def __init__(
        self, cases: list[Case], subject: object, file: SubmittedFile | None = None,
        running: Callable[[str], None] | None = None,
    ):  # fmt: skip
        self.cases, self.subject, self.file, self.running = cases, subject, file, running
        self._found: dict[int, dict[str, object]] = {}

    def __getitem__(self, i: int) -> dict[str, object]:
        """The results of case i by name, or {"trouble": …}, or {"raised": …}."""
        if i not in self._found:
            if self.running:
                self.running(self.cases[i].call)
            self._found[i] = self._run(self.cases[i])
        return self._found[i]

    def _run(self, case: Case) -> dict[str, object]:
        try:
            return case.run(self.subject)
        except Trouble as trouble:
            return {"trouble": str(trouble)}
        except (Exception, SystemExit) as error:
            filename = self.file.filename if self.file else "<whiteboard>"
            return {"raised": raised_in(filename, error)}
        finally:
            if self.file:
                self.file.restore()


def result_of(function: Callable, *arguments: object) -> object:
    """What a function returns, which must leave its arguments and the generator alone."""
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
    return plain(result)


def plain(value: object) -> object:
    """A tensor without the class that was put on it, which could answer comparisons itself."""
    if isinstance(value, Tensor) and type(value) is not Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def as_tensor(value: object) -> Tensor:
    """The result, which must be one tensor."""
    if isinstance(value, Tensor):
        return plain(value)
    raise Trouble(f"it must return one tensor, it returned {kind_in_words(value)}")


def drawn(name: str, *shape: int) -> Tensor:
    """N(0, 1) in float64 from a generator of its own: the same name and shape, the same values."""
    seed = zlib.crc32(f"{name}{shape}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def argument_as_shown(value: object) -> str:
    """An argument as it stands in a case: the shape of a tensor, else the value."""
    return f" {list(value.shape)}" if isinstance(value, Tensor) else f"={value!r}"


def gradients_of(result: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Of a weighted sum of the result, by leaf."""
    if not result.requires_grad:
        raise Trouble("its result has no gradient: something detaches it, or no_grad is on")
    weighted = (result * drawn("loss", *result.shape).to(result.dtype)).sum()
    found = torch.autograd.grad(weighted, list(leaves.values()), allow_unused=True)
    return {f"the gradient of {name}": grad for name, grad in zip(leaves, found)}


def function_case(
    name: str, sizes: dict[str, int], *, grads: bool = True, more: str = "",
    close: float = CLOSE, float32_is_right: bool = False, **arguments: object,
) -> Case:  # fmt: skip
    """A call of a function by position; its float tensors get gradients as well.

    sizes are those of the letters in the task; more is said behind the call.
    """

    def run(function: Callable) -> dict[str, object]:
        given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        result = result_of(function, *given.values())
        outcome = {"the result": result}
        floats = {
            k: v.requires_grad_()
            for k, v in given.items()
            if grads and isinstance(v, Tensor) and v.is_floating_point()
        }
        if floats and isinstance(result, Tensor) and not isinstance(function, ArrayFunction):
            outcome |= gradients_of(as_tensor(function(*given.values())), floats)
        return outcome

    call = ", ".join(f"{k}{argument_as_shown(v)}" for k, v in arguments.items())
    how = Expectation({size: letter for letter, size in sizes.items()}, close, float32_is_right)
    tensors = [v for v in arguments.values() if isinstance(v, Tensor)]
    half = any(t.is_floating_point() and t.dtype != torch.float64 for t in tensors)
    return Case(f"{name}({call}){more}", run, how, half, arguments)
