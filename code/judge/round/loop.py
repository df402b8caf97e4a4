"""P7: their training loop, watched from the model's calls and the optimiser's steps."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from judge.round.measuring import Reading, absolute, relative
from judge.round.subject import SIZES, Subject, drawn_ids

TIGHT = 0.05  # a limit that every gradient passes


class Step:
    """What was seen between two steps of an optimiser, and at the second of them.

    A call counts when a gradient flows back from it: a loss that is only looked at is none.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, bool]] = []  # ids, targets, train mode
        self.cosine = self.norm = self.ratio = math.nan
        self.rate = math.nan
        self.descent = 0.0


class Watch:
    """Hooks on one model and on every optimiser, while they are on."""

    def __init__(self, model: nn.Module, parameters: list[Tensor]):
        self.model, self.parameters = model, parameters
        self.steps, self.now = [], Step()
        self.optimizers: list[object] = []
        self.asking = False
        self.given: list[tuple[Tensor, Tensor]] = []  # inputs and targets of the batches
        self.before: list[Tensor] = []
        self.mean: list[Tensor] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = [
            self.model.register_forward_hook(self.called, with_kwargs=True),
            register_optimizer_step_pre_hook(self.steps_now),
            register_optimizer_step_post_hook(self.has_stepped),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def called(self, model: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        """Without targets, it is their own loss: the targets are those that came with the ids."""
        values = dict(zip(("ids", "targets"), args)) | kwargs
        ids, targets = next(iter(values.values())), values.get("targets")
        targets = self.targets_of(ids) if targets is None else targets
        if self.asking or targets is None:
            return
        call = ids.detach().clone(), targets.detach().clone(), model.training

        def counted(_: Tensor) -> None:
            if not any(one is call for one in self.now.calls):
                self.now.calls.append(call)

        for part in output:
            if isinstance(part, Tensor) and part.requires_grad:
                part.register_hook(counted)

    def targets_of(self, ids: Tensor) -> Tensor | None:
        """What the batches gave for these rows; None where a row is of no batch."""
        if not self.given:
            return None
        inputs, targets = (torch.cat(part) for part in zip(*self.given))
        if ids.shape[1:] != inputs.shape[1:]:
            return None
        same = (ids[:, None] == inputs).all(dim=-1)
        return targets[same.int().argmax(dim=1)] if same.any(dim=1).all() else None

    def steps_now(self, optimizer: object, *_: object) -> None:
        """Compare the gradient handed over with the mean of the micro-batches seen."""
        self.optimizers.append(optimizer)
        step = self.now
        step.rate = float(optimizer.param_groups[0]["lr"])
        self.mean = self.mean_gradient(step)
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        dot = sum(float((a.double() * b.double()).sum()) for a, b in zip(given, self.mean))
        norms = [
            math.sqrt(sum(float(g.double().square().sum()) for g in x)) for x in (given, self.mean)
        ]
        step.norm = norms[0]
        step.ratio = norms[0] / norms[1] if norms[1] else math.nan
        step.cosine = dot / (norms[0] * norms[1]) if norms[0] and norms[1] else 0.0
        self.before = [p.detach().clone() for p in self.parameters]

    def mean_gradient(self, step: Step) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in self.parameters]
        self.asking = True
        with torch.enable_grad():
            for ids, targets, _ in step.calls:
                loss = self.model(ids, targets)[1]
                grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                for one, grad in zip(total, grads):
                    if grad is not None:
                        one.add_(grad, alpha=len(ids))
        self.asking = False
        rows = sum(len(ids) for ids, _, _ in step.calls) or 1
        return [one / rows for one in total]

    def has_stepped(self, *_: object) -> None:
        step, self.now = self.now, Step()
        moves = [p.detach() - old for p, old in zip(self.parameters, self.before)]
        step.descent = -sum(
            float((m.double() * g.double()).sum()) for m, g in zip(moves, self.mean)
        )
        self.steps.append(step)


def batch(
    number: int, data: Tensor, settings: object, names: dict[str, str]
) -> tuple[Tensor, Tensor]:
    """The judge's own batch: the same for each number, whatever else was drawn."""
    T, B = (getattr(settings, names[one]) for one in ("context", "batch_size"))
    starts = drawn_ids(f"P7 {number}", B, below=max(1, len(data) - T))
    inputs = torch.stack([data[i : i + T] for i in starts])
    return inputs, torch.stack([data[i + 1 : i + 1 + T] for i in starts])


def watched_loop(subject: Subject, layout: dict[str, Tensor]) -> Reading:
    """P7: gradient, rate, mode and batches at each step."""
    found = one_run(subject, layout)
    found.pop("lengths")  # of the model's making
    return found


def clipped_loop(subject: Subject, layout: dict[str, Tensor]) -> Reading:
    """P7 again, with a limit that every gradient passes: its length and direction at a step."""
    found = one_run(subject, layout, clip=TIGHT, steps=1)
    return {"clipped cosines": found["cosines"], "clipped norms": found["lengths"]}


def one_run(subject: Subject, layout: dict[str, Tensor], **changes: object) -> Reading:
    settings = subject.settings(**changes)
    model = subject.model(layout, **changes)
    parameters = list({id(p): p for p in (subject.parameter(model, n) for n in layout)}.values())
    data = drawn_ids("P7 data", 60)
    numbers = iter(range(10**6))

    watch = Watch(model, parameters)

    def get_batch(data: Tensor, settings: object) -> tuple[Tensor, Tensor]:
        watch.given.append(batch(next(numbers), data, settings, subject.names))
        return watch.given[-1]

    theirs, subject.space["get_batch"] = subject.space["get_batch"], get_batch
    at_first = [p.detach().clone() for p in parameters]
    torch.manual_seed(3)
    try:
        with watch.on():
            losses = subject["train"](model, data, settings)
    finally:
        subject.space["get_batch"] = theirs
    moved = any(not torch.equal(p.detach(), old) for p, old in zip(parameters, at_first))
    steps = watch.steps
    rates = [step.rate / SIZES["max_rate"] for step in steps]
    planned = [
        float(subject["learning_rate"](i, settings)) / SIZES["max_rate"] for i in range(len(steps))
    ]
    ratios = absolute([step.ratio for step in steps], 5e-4)
    seen = [ids.flatten().tolist() for step in steps for ids, _, _ in step.calls]
    return {
        "steps": len(steps),
        "losses": len(losses) if hasattr(losses, "__len__") else None,
        "cosines": absolute([step.cosine for step in steps], 1e-4),
        "norms": ratios._replace(unit=max(1.0, relative(ratios.numbers).unit)),
        "lengths": absolute([step.norm / TIGHT for step in steps], 1e-3),
        "rates": absolute([a - b for a, b in zip(rates, planned)], 1e-3),
        "modes": tuple({train for step in steps for _, _, train in step.calls}),
        "rows": tuple(sum(len(ids) for ids, _, _ in step.calls) for step in steps),
        "batches": "differ" if len(seen) < 2 or any(x != seen[0] for x in seen) else "equal",
        "moved": moved,
        "descends": tuple((step.descent > 0) - (step.descent < 0) for step in steps),
        "optimisers": len({id(one) for one in watch.optimizers}),
    }
