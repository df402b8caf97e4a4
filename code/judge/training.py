"""The cases of the loop around a model: optimiser, clipping, schedule, accumulation, dropout."""

import functools
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from judge.cases import Case, Trouble, as_tensor, drawn, function_case, gradients_of, result_of
from judge.compare import Expectation
from judge.gradients import named_results, number

SHAPES = ((3, 4), (5,), (), (2, 6), (3, 4))  # two alike, which a table by shape would mix


def parameters_of(values: dict[str, Tensor | None]) -> dict[str, nn.Parameter]:
    """Parameters with gradients of these values, by name; None is no gradient."""
    found = {}
    for (name, grad), shape in zip(values.items(), SHAPES):
        found[name] = nn.Parameter(drawn(name, *shape))
        found[name].grad = None if grad is None else grad.clone()
    return found


def gradients_at(step: int, size: float, without: str = "") -> dict[str, Tensor | None]:
    """Gradients of five parameters; those named have none."""
    names = "w", "b", "s", "v", "u"
    return {
        n: None if n in without else size * drawn(f"gradient {step} of {n}", *shape)
        for n, shape in zip(names, SHAPES)
    }


def optimizer_case(
    more: str, *options: object, steps: int = 3, size: float = 1.0, rates: tuple[float, ...] = (),
    without: str = "", once: bool = False, flat: int | None = None,
) -> Case:  # fmt: skip
    """Some steps with drawn gradients, zeros at step flat; the parameters after the last."""

    def run(cls: Callable) -> dict[str, object]:
        given = parameters_of(gradients_at(0, size, without))
        optimizer = cls(iter(given.values()) if once else list(given.values()), *options)
        for step in range(steps):
            slope = 0.0 if step == flat else size
            for name, grad in gradients_at(step, slope, without).items():
                given[name].grad = None if grad is None else grad.clone()
            if rates:
                optimizer.lr = rates[step]
            optimizer.step()
        optimizer.zero_grad()
        left = [p.grad is None or not p.grad.any() for p in given.values()]
        found = {f"{name} after step {steps}": p.detach() for name, p in given.items()}
        return {**found, "whether zero_grad clears the gradients": all(left)}

    shown = ", ".join(map(repr, options))
    return Case(f"AdamW(parameters{', ' if shown else ''}{shown}){more}", run)


def optimizer_cases() -> list[Case]:
    """One step and several; large decay, large eps with small gradients, changing rates."""
    betas, other = (0.9, 0.999), (0.5, 0.7)
    case = optimizer_case
    return [
        case(", one step", 0.1, betas, 1e-8, 0.0, steps=1),
        case(", 3 steps", 0.1, betas, 1e-8, 0.0),
        case(", one step", 0.1, betas, 1e-8, 0.5, steps=1),
        case(", 4 steps", 0.1, other, 1e-8, 0.5, steps=4),
        case(", 3 steps"),
        case(", 4 steps of small gradients", 0.1, betas, 1e-2, 0.0, steps=4, size=1e-3),
        case(", 4 steps of small gradients", 0.1, other, 1e-2, 0.1, steps=4, size=1e-2),
        case(", its lr set before each step", 0.1, other, 1e-8, 0.5, rates=(0.3, 0.05, 0.2)),
        case(", b and s without gradients", 0.1, other, 1e-8, 0.5, without="bs"),
        case(", the parameters from an iterator", 0.1, betas, 1e-8, 0.5, once=True),
        case(", the second gradients being 0", 0.1, betas, 1e-8, 0.5, flat=1),
    ]


def clip_cases() -> list[Case]:
    """Over and under the limit, from an iterator, some or all without gradients."""

    def case(
        max_norm: float, more: str = "", without: str = "", only: str = "", once: bool = False
    ) -> Case:
        def run(function: Callable) -> dict[str, object]:
            given = parameters_of(gradients_at(0, 1.0, without))
            before = {name: p.detach().clone() for name, p in given.items()}
            chosen = [p for name, p in given.items() if not only or name in only]
            norm = number(function(iter(chosen) if once else chosen, max_norm), "the norm")
            found = {"the norm it returns": norm}
            for name, p in given.items():
                found[f"{name}.grad"] = None if p.grad is None else p.grad
                found[f"{name} itself"] = p.detach() - before[name]
            return {key: value for key, value in found.items() if value is not None}

        return Case(f"clip_grad_norm(parameters, max_norm={max_norm}){more}", run)

    said = ", one without a gradient"
    return [
        case(0.5, ", one parameter", only="b"),
        case(0.5, ", two parameters", only="wb"),
        case(0.5), case(3.0), case(100.0), case(2.5, said, without="b"),
        case(50.0, said, without="w"), case(1.5, ", from an iterator", once=True),
        case(1.0, ", none with a gradient", without="wbsvu"),
    ]  # fmt: skip


def rate_cases() -> list[Case]:
    """Each step of two schedules, one without warm-up, and behind their ends."""

    def case(step: int, max_lr: float, min_lr: float, warmup: int, total: int) -> Case:
        given = {"step": step, "max_lr": max_lr, "min_lr": min_lr, "warmup": warmup, "total": total}

        def run(function: Callable) -> dict[str, object]:
            return {"the rate": number(result_of(function, *given.values()))}

        call = ", ".join(f"{k}={v}" for k, v in given.items())
        return Case(f"learning_rate({call})", run, inputs=given)

    cases = [case(step, 0.3, 0.07, 4, 11) for step in (4, 2, 0, 1, 3, 5, 8, 10, 11, 12, 30)]
    return [*cases, *(case(step, 2.0, 0.5, 0, 6) for step in (0, 1, 3, 5, 6, 7))]


class Saved:
    """A tensor that a graph holds for its backward pass; dies with the graph, or after backward."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class WatchedModel(nn.Module):
    """Logits from all ids so far; it sees whether what an earlier call has saved is still held."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(drawn("table", 9, 6) / 2)
        self.up = nn.Parameter(drawn("up", 7, 6) / 2)
        self.head = nn.Parameter(drawn("head", 9, 7) / 2)
        self.unused = nn.Parameter(drawn("unused", 4))
        self.saved: list[weakref.ref] = []
        self.graphs_alive = False

    def pack(self, tensor: Tensor) -> Saved:
        """What the graph keeps in place of a tensor."""
        saved = Saved(tensor)
        self.saved.append(weakref.ref(saved))
        return saved

    def forward(self, ids: Tensor) -> Tensor:
        self.graphs_alive |= any(saved() is not None for saved in self.saved)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved.tensor):
            hidden = self.table[ids].cumsum(dim=1) / 2
            return torch.tanh(hidden @ self.up.T) @ self.head.T


def batch_of(name: str, *rows: str) -> tuple[Tensor, Tensor]:
    """ids and mask, x in a row for a real token and . for padding."""
    mask = torch.tensor([[letter == "x" for letter in row] for row in rows])
    return (100 * drawn(name, *mask.shape)).abs().long() % 9, mask


def accumulate_cases() -> list[Case]:
    """One batch and several of unequal counts, on top of gradients that are there already."""

    def case(more: str, *batches: tuple[Tensor, Tensor], before: bool = False) -> Case:
        def run(function: Callable) -> dict[str, object]:
            model = WatchedModel()
            if before:
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
            given = [(ids.clone(), mask.clone()) for ids, mask in batches]
            found = {"the loss": number(result_of(function, model, given), "the loss")}
            for name, p in model.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                found[f"the gradient of {name}"] = grad
                if not torch.equal(p.detach(), values[name]):
                    raise Trouble("it changes the parameters; only their gradients are asked for")
            if model.graphs_alive:
                raise Trouble(
                    "the graph of an earlier batch is still held when the model is called again:"
                    " call backward() batch by batch, so that one graph is alive at a time"
                )
            return found

        return Case(f"accumulate(model, batches){more}", run)

    first, second = batch_of("first", "xxxxx", "..xxx"), batch_of("second", "xx....", "......")
    third = batch_of("third", "xxxx", "xx.x", ".xx.")
    nothing = batch_of("nothing", "x.", "..")
    return [
        case(" of one batch without padding", batch_of("one", "xxx", "xxx")),
        case(" of one batch", first),
        case(" of two batches of one shape", batch_of("a", "xxx"), batch_of("b", "xxx")),
        case(" of two batches", first, second),
        case(" of three batches", second, third, first),
        case(" of three batches, one of a row", second, batch_of("row", "xx.xx"), first),
        case(" of one batch, with gradients from before", first, before=True),
        case(" of three batches, with gradients from before", third, second, first, before=True),
        case(" of two batches, the last without a pair", third, nothing),
    ]  # fmt: skip


def dropout_cases() -> list[Case]:
    """Shares, scale, seeds, gradients; p = 0, p = 1, and not training."""
    x = 1 + drawn("x", 60, 80).abs()

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    def statistics(p: float) -> Case:
        def run(function: Callable) -> dict[str, object]:
            y = as_tensor(result_of(function, x.clone(), p, True, generator()))
            if y.shape != x.shape:
                raise Trouble(f"it must return {list(x.shape)}, it returned {list(y.shape)}")
            one = generator()
            again, next_one = (
                as_tensor(result_of(function, x.clone(), p, True, one)) for _ in range(2)
            )
            dropped = y.detach() == 0
            kept = (y.detach() / x)[~dropped]
            if not kept.numel():
                raise Trouble(f"all entries are 0 at p = {p}")
            share, spread = dropped.double(), 5 * math.sqrt(p * (1 - p))
            return {
                f"whether about {p:.0%} of the entries are zeros":
                    abs(share.mean().item() - p) < spread / math.sqrt(x.numel()),
                "the smallest factor of what is kept": kept.min(),
                "the largest factor of what is kept": kept.max(),
                "whether every entry of a row has its own draw":
                    bool(((share.mean(dim=1) - p).abs() < spread / math.sqrt(80)).all()),
                "whether every row has its own draws":
                    bool(((share.mean(dim=0) - p).abs() < spread / math.sqrt(60)).all()),
                "whether the same seed gives the same": torch.equal(y, again),
                "whether the generator moves on": not torch.equal(again, next_one),
            }  # fmt: skip

        return Case(f"dropout(x [60, 80], p={p}, training=True, generator=g)", run)

    def gradient(p: float) -> Case:
        def run(function: Callable) -> dict[str, object]:
            leaf = x.clone().requires_grad_()
            y = as_tensor(function(leaf, p, True, generator()))
            (grad,) = gradients_of(y, {"x": leaf}).values()
            want = torch.where(y == 0, 0, drawn("loss", 60, 80) / (1 - p))
            return {"whether its gradient is that of what is kept": torch.allclose(grad, want)}

        return Case(f"dropout(x [60, 80], p={p}, training=True, generator=g) backward", run)

    def exact(p: float, training: bool) -> Case:
        def run(function: Callable) -> dict[str, object]:
            y = as_tensor(result_of(function, x[:3, :4].clone(), p, training, generator()))
            return {"the result": y.detach()}

        return Case(f"dropout(x [3, 4], p={p}, training={training}, generator=g)", run)

    def unseeded() -> Case:
        def run(function: Callable) -> dict[str, object]:
            torch.manual_seed(3)
            one, other = (as_tensor(function(x.clone(), 0.5, True)) == 0 for _ in range(2))
            return {"whether two calls draw apart": not torch.equal(one, other)}

        return Case("dropout(x [60, 80], p=0.5, training=True) twice", run)

    return [
        exact(0.3, False), exact(0.0, True), exact(1.0, True), exact(1.0, False),
        statistics(0.3), statistics(0.8), unseeded(), gradient(0.3),
    ]  # fmt: skip


def contrastive_cases() -> list[Case]:
    """Wide and narrow temperatures, rows of all lengths, and float32 at temperature 0.01."""
    a, b = drawn("a", 5, 7), drawn("b", 5, 7)
    case = functools.partial(function_case, "contrastive_loss", {"N": 5, "d": 7})
    long = torch.arange(1.0, 6)[:, None].double()
    cases = [case(a=a[:1], b=b[:1], temperature=0.5), case(a=a[:2], b=b[:2], temperature=1.0)]
    cases += [case(a=a, b=b, temperature=5.0), case(a=a, b=b, temperature=0.5)]
    cases += [case(a=a, b=b, temperature=0.07), case(a=long * a, b=b / long, temperature=0.7)]
    low = a.float(), (a + 0.1 * b).float()  # cosines near 1, whose exp(100) is over float32's range

    def run(function: Callable) -> dict[str, object]:
        return {"the loss + 1": 1 + number(result_of(function, *(x.clone() for x in low), 0.01))}

    call = "contrastive_loss(a [5, 7], b [5, 7], temperature=0.01) in float32"
    return [*cases, Case(call, run, Expectation(close=1e-3))]


def quantize_cases() -> list[Case]:
    """Rows of one size and of many, a row of zeros, float32."""

    def case(w: Tensor, more: str = "") -> Case:
        def run(function: Callable) -> dict[str, object]:
            q, scale = named_results(result_of(function, w.clone()), ("q", "scale")).values()
            alive = w.abs().amax(dim=1) > 0
            found = {"q": q, "the scale": scale}
            if scale.shape == alive.shape:
                found["the scale"] = scale[alive]
                found["whether the scales are finite"] = bool(scale.isfinite().all())
            return found

        sizes = {len(w): "out", w.shape[1]: "in"}
        return Case(
            f"quantize_int8(w {list(w.shape)}){more}", run, Expectation(sizes), inputs={"w": w}
        )

    w = drawn("w", 5, 8)
    spread = torch.tensor([1e-3, 1.0, 40.0, 0.2, 1e4])[:, None].double()
    zeros = w.clone()
    zeros[[1, 3]] = 0
    return [
        case(w[:1]), case(w), case(-w.abs(), " below 0"), case(spread * w, " of rows of all sizes"),
        case(1e-9 * w, " of tiny weights"), case(zeros, " with rows of zeros"),
        case(drawn("w", 4, 9).float(), " in float32"),
    ]  # fmt: skip


CASES = {
    "AdamW": optimizer_cases,
    "clip_grad_norm": clip_cases,
    "learning_rate": rate_cases,
    "accumulate": accumulate_cases,
    "dropout": dropout_cases,
    "contrastive_loss": contrastive_cases,
    "quantize_int8": quantize_cases,
}
