"""The cases of the gradients by hand: autograd is forbidden while a submission runs."""

import contextlib
import functools
import gc
import math
import operator
import tracemalloc
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from judge.cases import ArrayFunction, Case, Trouble, argument_as_shown, drawn, result_of
from judge.compare import Expectation, kind_in_words
from judge.functions import Largest, steep_scores

BY_HAND = 1e-9  # of the largest value
EXACT = Expectation(close=BY_HAND)


class NoReadyGradients(TorchDispatchMode):
    """Notes the operations that compute a gradient, as aten's native_layer_norm_backward."""

    def __init__(self, used: list[str]):
        super().__init__()
        self.used = used

    def __torch_dispatch__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        if "_backward" in func.__name__:
            self.used.append(f"torch's ready {func.__name__.partition('.')[0]}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_autograd() -> Iterator[None]:
    """Trouble where what runs inside has asked torch for a gradient, even if it went on after."""
    used: list[str] = []

    def forbidden(*_: object, **__: object) -> None:
        used.append("torch's autograd")
        raise Trouble("autograd")

    engines = ((torch.autograd, "_engine_run_backward"), (torch.autograd.forward_ad, "make_dual"))
    with contextlib.ExitStack() as stack:
        for owner, name in engines:
            stack.enter_context(mock.patch.object(owner, name, forbidden))
        stack.enter_context(NoReadyGradients(used))
        try:
            yield
        except Exception:
            if not used:
                raise
    if used:
        raise Trouble(f"it uses {used[0]}; the gradient is asked for by hand")


def as_array(value: object, name: str) -> Tensor:
    """A tensor of a tensor, an array or a number."""
    if type(value).__module__ == "numpy" or isinstance(value, (int, float)):
        value = torch.as_tensor(value, dtype=None if hasattr(value, "dtype") else torch.float64)
    if not isinstance(value, Tensor):
        raise Trouble(f"{name} must be a tensor, it is {kind_in_words(value)}")
    return value.detach()


def named_results(result: object, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The parts of a result under their names."""
    if len(names) == 1:
        return {names[0]: as_array(result, names[0])}
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        wanted = f"({', '.join(names)})"
        raise Trouble(f"it must return {wanted}, it returned {kind_in_words(result)}")
    return {name: as_array(part, name) for name, part in zip(names, result)}


def arrays_case(
    name: str, results: tuple[str, ...], sizes: dict[str, int], *, close: float = BY_HAND,
    least: float = EXACT.least, more: str = "", numbers: tuple[str, ...] = (),
    by_hand: bool = True, **arguments: object,
) -> Case:  # fmt: skip
    """A call by position that returns arrays; those in numbers may be a number of any kind."""

    def run(function: Callable) -> dict[str, object]:
        given = [v.clone() if isinstance(v, Tensor) else v for v in arguments.values()]
        with without_autograd() if by_hand else contextlib.nullcontext():
            found = named_results(result_of(function, *given), results)
        for number in numbers:
            if found[number].numel() == 1:
                found[number] = found[number].double().reshape(())
        return found

    call = ", ".join(f"{k}{argument_as_shown(v)}" for k, v in arguments.items())
    letters = {size: letter for letter, size in sizes.items()}
    how, whole = Expectation(letters, close, least=least), "lse" in arguments
    return Case(f"{name}({call}){more}", run, how, inputs=arguments, independent=not whole)


def cross_entropy_cases() -> list[Case]:
    """A row, some rows, and logits whose exp overflows or vanishes."""
    results = ("the loss", "dlogits")
    case = functools.partial(
        arrays_case, "softmax_cross_entropy", results, {"N": 5, "V": 7}, numbers=("the loss",)
    )
    logits, targets = drawn("logits", 5, 7), torch.tensor([3, 0, 6, 6, 2])
    cases = [case(logits=logits[:1], targets=targets[:1]), case(logits=logits, targets=targets)]
    cases += [case(logits=drawn("logits", 9, 4), targets=torch.tensor([1, 0, 3, 2, 2, 1, 0, 0, 3]))]
    for sign in (1, -1):
        far = logits + sign * 1e4
        cases += [case(logits=far, targets=targets, more=f" near {sign * 10_000:,}", close=1e-7)]
    return [*cases, case(logits=1e4 * logits, targets=targets, more=" up to 1e4")]


def linear_backward_cases() -> list[Case]:
    """One, two and three axes in front of the channels."""
    case = functools.partial(
        arrays_case, "linear_backward", ("dx", "dw", "db"), {"B": 2, "T": 5, "in": 6, "out": 7}
    )
    w, found = drawn("w", 7, 6), []
    for axes in ((1,), (5,), (2, 5), (2, 3, 5)):
        found.append(case(x=drawn("x", *axes, 6), w=w, dy=drawn("dy", *axes, 7)))
    square = drawn("w", 6, 6)  # where a turned weight fits as well
    return [*found, case(x=drawn("x", 2, 5, 6), w=square, dy=drawn("dy", 2, 5, 6))]


def norm_backward_cases(name: str, results: tuple[str, ...]) -> list[Case]:
    """As the norms: x of about 1 and of about 3e-3, an eps of its own, a mean of 2."""
    case = functools.partial(arrays_case, name, results, {"B": 2, "T": 5, "d": 6})
    weight = 1 + 0.5 * torch.tanh(drawn("weight", 6))
    x, dy, deep = drawn("x", 2, 5, 6), drawn("dy", 2, 5, 6), drawn("x", 3, 2, 5, 6)
    cases = [case(x=x[0, :1], weight=weight, dy=dy[0, :1]), case(x=x[0], weight=weight, dy=dy[0])]
    cases += [case(x=x, weight=weight, dy=dy), case(x=3e-3 * x, weight=weight, dy=dy)]
    cases += [case(x=x + 2, weight=weight, dy=dy), case(x=0.1 * x, weight=weight, dy=dy, eps=0.01)]
    return [*cases, case(x=deep, weight=weight, dy=drawn("dy", 3, 2, 5, 6))]


def swiglu_backward_cases() -> list[Case]:
    """One and two axes in front, and gates that are nearly shut."""
    case = functools.partial(
        arrays_case, "swiglu_backward", ("dx", "dw_gate", "dw_up", "dw_down"),
        {"B": 2, "T": 5, "d": 6, "h": 7},
    )  # fmt: skip
    w = {"w_gate": drawn("w_gate", 7, 6) / 2, "w_up": drawn("w_up", 7, 6) / 2}
    w["w_down"] = drawn("w_down", 6, 7) / 2
    x, dy = drawn("x", 2, 5, 6), drawn("dy", 2, 5, 6)
    cases = [case(x=x[0, :1], **w, dy=dy[0, :1]), case(x=x[0], **w, dy=dy[0])]
    square = {name: drawn(name, 6, 6) / 2 for name in w}  # where a turned weight fits as well
    cases += [case(x=x, **w, dy=dy), case(x=5 * x, **w, dy=dy)]
    return [*cases, case(x=x, **square, dy=dy)]


def attention_backward_cases() -> list[Case]:
    """MHA, GQA, MQA; no mask and masks of several shapes; queries without keys; large scores."""

    def given(B: int, H: int, G: int, T: int, S: int, d_h: int, d_v: int) -> dict[str, Tensor]:
        q, k, v = drawn("q", B, H, T, d_h), drawn("k", B, G, S, d_h), drawn("v", B, G, S, d_v)
        return {"q": q, "k": k, "v": v, "dout": drawn("dout", B, H, T, d_v)}

    sizes = {"B": 2, "H": 4, "T": 5, "S": 7, "d_h": 6, "d_v": 3}
    case = functools.partial(arrays_case, "attention_backward", ("dq", "dk", "dv"), sizes)
    usual, causal = given(2, 4, 2, 5, 7, 6, 3), torch.ones(5, 7, dtype=torch.bool).tril(2)
    padding = torch.arange(7) < torch.tensor([[4], [7]])  # [B, S], lengths 4 and 7
    holes = causal.clone()
    holes[1] = False  # a query without keys
    cases = [case(**given(1, 1, 1, 1, 2, 2, 2)), case(**given(1, 1, 1, 3, 4, 6, 5))]
    cases += [case(**given(1, 4, 4, 3, 2, 6, 5)), case(**given(2, 3, 1, 5, 7, 6, 4))]
    cases += [case(**usual), case(**usual, mask=causal)]
    cases += [case(**given(3, 6, 2, 5, 7, 8, 9), mask=causal)]
    cases += [case(**usual, mask=padding[:, None, None]), case(**usual, mask=holes)]
    cases += [case(**usual, mask=(holes & padding[:, None])[:, None])]
    for steep in ({"q": 3e3 * usual["q"]}, steep_scores(1e4)):
        given = {**usual, **steep, "mask": causal}
        # The row sum from dout and the output leaves 1e-16 of it, which dk multiplies by q.
        cases.append(case(**given, close=1e-6, least=1e-9, more=" with scores up to 1e4"))
    return cases


def flash_inputs(T: int, S: int, scale: float = 1.0) -> dict[str, Tensor]:
    """q, k, v, and what the forward pass has kept of them."""
    q, k, v = scale * drawn("q", T, 6), drawn("k", S, 6), drawn("v", S, 3)
    scores = q @ k.T / math.sqrt(6)
    out, lse = scores.softmax(dim=1) @ v, scores.logsumexp(dim=1)
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": drawn("dout", T, 3)}


def flash_backward_cases() -> list[Case]:
    """Blocks of all lengths, and what is kept at once."""
    results = ("dq", "dk", "dv")
    sizes = {"T": 5, "S": 7, "d_h": 6, "d_v": 3}
    case = functools.partial(arrays_case, "flash_backward", results, sizes)
    usual = flash_inputs(5, 7)
    cases = [case(**flash_inputs(1, 2), block=2)]
    cases += [case(**usual, block=block) for block in (7, 3, 1, 9)]
    cases += [case(**flash_inputs(8, 4), block=3)]
    cases += [case(**flash_inputs(5, 7, 100.0), block=2, close=1e-7, more=" with large scores")]

    def run(function: Callable) -> dict[str, object]:
        if isinstance(function, ArrayFunction):
            small = flash_array_bytes(function) < 8 * 600 * 800 / 2
        else:
            given = flash_inputs(48, 60).values()
            with Largest() as largest:
                result_of(function, *given, 4)
            small = largest.numel < 48 * 60 / 2
        if not small:
            raise Trouble(
                "it makes a table of T * S numbers; one block of keys is enough at a time"
            )
        return {}

    call = "flash_backward(q [48, 6], k [60, 6], v [60, 3], out [48, 3], lse [48], dout [48, 3]"
    return [*cases, Case(f"{call}, block=4)", run)]


def flash_array_bytes(function: ArrayFunction) -> int:
    """What a NumPy answer takes at its peak, of 600 queries and 800 keys: 0 for ours."""
    if not function.arrays:
        return 0
    given = flash_inputs(600, 800)
    tracemalloc.start()
    try:
        function(*given.values(), 8)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ── Value ────────────────────────────────────────────────────────────────────────────────────

SYMBOLS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
COMPOSED: dict[str, Callable] = {
    "a + a": lambda a, b, c: a + a,
    "a * a": lambda a, b, c: a * a,
    "-a": lambda a, b, c: -a,
    "a * b + a": lambda a, b, c: a * b + a,
    "(a * b) * (a + b)": lambda a, b, c: (a * b) * (a + b),
    "(a + b).tanh() * a": lambda a, b, c: (a + b).tanh() * a,
    "(a * b).exp() - a / b": lambda a, b, c: (a * b).exp() - a / b,
    "(a - a * b) ** 2 + 1 / (b * b)": lambda a, b, c: (a - a * b) ** 2 + 1 / (b * b),
    "(b * 2).log() * (c * a).exp()": lambda a, b, c: (b * 2).log() * (c * a).exp(),
    "a * b * (a * b + c) + (a * b + c) ** 2": lambda a, b, c: product_and_square(a * b, c),
}


def product_and_square(d: object, c: object) -> object:
    """d is used by the result and by e, which is used twice itself."""
    e = d + c
    return d * e + e * e


def expressions() -> dict[str, Callable]:
    """What is written of a, b and c, from small to large; each is differentiated by all three."""
    found: dict[str, Callable] = {}
    for symbol, operation in SYMBOLS.items():
        found[f"a {symbol} b"] = lambda a, b, c, do=operation: do(a, b)
        found[f"a {symbol} 3"] = lambda a, b, c, do=operation: do(a, 3)
        found[f"3 {symbol} a"] = lambda a, b, c, do=operation: do(3, a)
    for power in (2, 3, -1, 0.5):
        found[f"b ** {power}"] = lambda a, b, c, power=power: b**power
    for name in ("exp", "log", "tanh", "relu"):
        found[f"b.{name}()"] = lambda a, b, c, name=name: getattr(b, name)()
    found["c.relu()"] = lambda a, b, c: c.relu()
    return {**found, **COMPOSED}


def value_case(text: str, expression: Callable) -> Case:
    """An expression of a = 0.7, b = 1.9 and c = -0.4, and its gradients."""

    def run(cls: Callable) -> dict[str, object]:
        leaves = {name: cls(x) for name, x in (("a", 0.7), ("b", 1.9), ("c", -0.4))}
        start = {f"{n}.grad before": number(leaf.grad, ".grad") for n, leaf in leaves.items()}
        y = expression(**leaves)
        y.backward()
        found = [number(y.data, ".data")]
        found += [number(leaf.grad, ".grad") for leaf in leaves.values()]
        return {**start, "y.data, a.grad, b.grad, c.grad": torch.stack(found)}

    return Case(f"y of a, b, c = Value(0.7), Value(1.9), Value(-0.4): {text}", run, EXACT)


def number(value: object, name: str = "the result") -> Tensor:
    """A number of any kind as a tensor."""
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Trouble(f"{name} must be a number, it is {kind_in_words(value)}") from None


def doubled(cls: Callable, start: float, times: int) -> tuple[object, object]:
    """A leaf, and y = (y + y) * 0.5 so many times: as many nodes twice over, 2^times paths."""
    leaf = y = cls(start)
    for _ in range(times):
        y = (y + y) * 0.5
    y.backward()
    return leaf, y


def operations_of_paths(cls: Callable) -> int:
    """Sums and products of numbers over 12 doublings: of 4,096 paths, or of 25 nodes."""
    done = []

    def counted(value: float) -> float:
        done.append(value)
        return Counted(value)

    class Counted(float):
        """A number whose sums and products are counted."""

        __add__ = __radd__ = lambda self, other: counted(float(self) + float(other))
        __mul__ = __rmul__ = lambda self, other: counted(float(self) * float(other))

    doubled(cls, Counted(1.0), 12)
    return len(done)


def value_cases() -> list[Case]:
    """Each operator, nodes that are used twice, two graphs, and a long row."""

    def twice(cls: Callable) -> dict[str, object]:
        a, b = cls(0.7), cls(1.9)
        (a * b).backward()
        (a * a + b).backward()
        return {"a.grad": number(a.grad, ".grad"), "b.grad": number(b.grad, ".grad")}

    def row(cls: Callable) -> dict[str, object]:
        if operations_of_paths(cls) > 3000:
            raise Trouble(
                "backward walks along every path: 12 times y = (y + y) * 0.5 took over 3,000 sums"
                " and products; visit each node once, behind all that use it"
            )
        a, y = doubled(cls, 0.7, 3)
        if a.grad == 1:  # else that is wrong already
            gc.disable()  # it would look through all objects of torch again and again
            try:
                a, y = doubled(cls, 0.7, 10_000)
            except RecursionError:
                raise Trouble(
                    "it hits Python's recursion limit in a row of 20,000 nodes; keep the nodes that"
                    " are still to do in a list"
                ) from None
            finally:
                gc.enable()
        return {"a.grad": number(a.grad, ".grad"), "y.data": number(y.data, ".data")}

    return [
        *(value_case(text, expression) for text, expression in expressions().items()),
        Case("a, b = Value(0.7), Value(1.9); (a * b).backward(); (a * a + b).backward()",
             twice, EXACT),
        Case("y = Value(0.7); 10,000 times y = (y + y) * 0.5; y.backward()", row, EXACT),
    ]  # fmt: skip


CASES = {
    "softmax_cross_entropy": cross_entropy_cases,
    "linear_backward": linear_backward_cases,
    "layer_norm_backward": lambda: norm_backward_cases(
        "layer_norm_backward", ("dx", "dweight", "dbias")
    ),
    "rms_norm_backward": lambda: norm_backward_cases("rms_norm_backward", ("dx", "dweight")),
    "swiglu_backward": swiglu_backward_cases,
    "attention_backward": attention_backward_cases,
    "flash_backward": flash_backward_cases,
    "Value": value_cases,
}
