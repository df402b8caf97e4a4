"""The second and the third order: a KV cache, then a classifier, judged on the mended file."""

import torch
from torch import Tensor, nn

from judge.round.measuring import raised
from judge.round.probes import Layout
from judge.round.subject import SIZES, Subject, drawn_ids, reset

CONTEXT = SIZES["context"]
CLOSE = 1e-5  # of the largest logit
CLASSES = 5


class WrongError(Exception):
    """What is wrong, in words."""


def judged(subject: Subject, layout: Layout) -> dict[str, str | None]:
    """For each order that the file fills: None where it is right, else what is wrong."""
    found: dict[str, str | None] = {}
    cached = hasattr(subject["GPT"], "step") or "generate_cached" in subject.space
    for name, there, check in (
        ("second", cached, cache_is_right),
        ("third", "Classifier" in subject.space, classifier_is_right),
    ):
        if there:
            reset()
            try:
                check(subject, layout)
                found[name] = None
            except WrongError as wrong:
                found[name] = str(wrong)
            except Exception as error:
                one = raised(error, subject.filename)
                at = f" (line {one.line})" if one.line else ""
                found[name] = f"it raises {one.kind}: {one.words}{at}"
    reset()
    return found


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongError(otherwise)


def gap(one: Tensor, other: Tensor, what: str) -> float:
    """The largest difference, in parts of the largest value of `other`."""
    require(
        isinstance(one, Tensor) and one.shape == other.shape,
        f"{what} has shape {list(getattr(one, 'shape', []))}, not {list(other.shape)}",
    )
    return float((one - other).abs().max() / other.abs().max())


def cache_is_right(subject: Subject, layout: Layout) -> None:
    """step in any chunks is the full pass; generate_cached gives the tokens of generate."""
    model = subject.model(layout)
    require(callable(getattr(model, "step", None)), "the model has no step(ids, cache=None)")
    require(callable(subject.space.get("generate_cached")), "it defines no generate_cached")
    ids = drawn_ids("second order", 3, CONTEXT)
    with torch.no_grad():
        full = model(ids)[0]
        for chunks in ((CONTEXT,), (1,) * CONTEXT, (4, CONTEXT - 4), (3, 1, CONTEXT - 4)):
            cache, at, logits = None, 0, []
            for t in chunks:
                piece, cache = model.step(ids[:, at : at + t], cache)
                expected = full[:, at : at + t]
                off = gap(piece, expected, f"step's logits of {t} tokens behind {at}")
                logits.append(off)
                at += t
            require(
                max(logits) <= CLOSE,
                f"chunks of {', '.join(map(str, chunks))} tokens: logits are off the full pass by "
                f"{max(logits):.2g} of the largest",
            )
        two_texts(model, ids, full)
    for T, n in ((4, CONTEXT - 4), (6, 1), (1, 3)):
        same_tokens(subject, model, T, n)


def two_texts(model: nn.Module, ids: Tensor, full: Tensor) -> None:
    """Two texts with a cache each, in turns: a cache kept in the model would mix them."""
    caches: list[object] = [None, None]
    for t in range(4):
        for row in range(2):
            piece, caches[row] = model.step(ids[row : row + 1, t : t + 1], caches[row])
            off = gap(piece, full[row : row + 1, t : t + 1], "step's logits")
            require(
                off <= CLOSE, f"two texts in turns, a cache each, disturb each other ({off:.2g})"
            )


def same_tokens(subject: Subject, model: nn.Module, T: int, n: int) -> None:
    prompt = drawn_ids(f"second order {T}", 2, T)
    wanted = subject["generate"](model, prompt.clone(), n, temperature=0)
    calls, full_passes = [], []
    plain = model.step

    def step(ids: Tensor, *rest: object, **more: object) -> object:
        calls.append(ids.shape[1])
        return plain(ids, *rest, **more)

    hook = model.register_forward_pre_hook(lambda *_: full_passes.append(1))
    model.step = step
    model.train()
    try:
        got = subject["generate_cached"](model, prompt.clone(), n, temperature=0)
    finally:
        del model.step
        hook.remove()
    was_training = model.training
    model.eval()
    require(got.shape == wanted.shape, f"{T} and {n} tokens give {list(got.shape)} ids")
    agree = int((got[:, T:] == wanted[:, T:]).sum())
    require(torch.equal(got, wanted), f"{agree} of {2 * n} greedy tokens are those of generate")
    require(not full_passes, f"{n} tokens: the full model is called {len(full_passes)} times")
    require(calls == [T] + [1] * (n - 1), f"{n} tokens: step reads {calls} tokens, call by call")
    require(was_training, "generate_cached leaves the model in eval mode, it was in train mode")
    one = subject["generate_cached"](model, prompt.clone(), n, temperature=1.0, top_k=1)
    require(torch.equal(one, wanted), "generate_cached with top_k=1 is not greedy")


def classifier_is_right(subject: Subject, layout: Layout) -> None:
    """Padding has no influence, every real token and every parameter below has one."""
    torch.manual_seed(0)
    model = subject.model(layout)
    judge = subject.space["Classifier"](model, CLASSES).eval()
    require(
        any(part is model for part in judge.modules()),
        "the classifier does not hold the model itself",
    )
    lengths = (3, 5, 6)
    ids = drawn_ids("third order", 3, 6)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    scores = judge(ids, mask)
    require(
        isinstance(scores, Tensor) and scores.shape == (3, CLASSES),
        f"scores have shape {list(getattr(scores, 'shape', []))}, not {[3, CLASSES]}",
    )
    plain = scores.detach()

    def same(other: Tensor, wanted: Tensor, what: str) -> None:
        off = gap(other.detach(), wanted, "scores")
        require(off <= CLOSE, f"{what} by {off:.2g} of the largest")

    with torch.no_grad():
        changed = torch.where(mask, ids, (ids + 1) % SIZES["vocab_size"])
        same(judge(changed, mask), plain, "other ids under the padding change the scores")
        longer = torch.cat([ids, ids[:, :2]], dim=1)
        wider = torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], dim=1)
        same(judge(longer, wider), plain, "more padding changes the scores")
        for row, length in enumerate(lengths):
            alone = judge(ids[row : row + 1, :length], mask[row : row + 1, :length])
            same(alone, plain[row : row + 1], "a row alone, without padding, changes its scores")
    classifier_gradients(subject, model, judge, ids, mask)


def classifier_gradients(
    subject: Subject, model: nn.Module, judge: nn.Module, ids: Tensor, mask: Tensor
) -> None:
    embedded: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad and output.dim() == 3:
            output.retain_grad()
            embedded.append(output)

    table = getattr(model, subject.names["token_table"])
    hook = table.register_forward_hook(keep)
    model.zero_grad(set_to_none=True)
    scores = judge(ids, mask)
    hook.remove()
    direction = torch.arange(1.0, scores.numel() + 1).reshape(scores.shape).cos()
    (scores * direction).sum().backward()
    head = subject.names["head"] + "."
    lost = [
        name for name, p in model.named_parameters()
        if not name.startswith(head) and (p.grad is None or not p.grad.abs().sum() > 0)
    ]  # fmt: skip
    require(not lost, f"no gradient reaches {', '.join(lost[:3])}")
    if embedded and embedded[0].grad is not None and embedded[0].shape[:2] == ids.shape:
        size = embedded[0].grad.abs().sum(-1)
        require(bool((size[mask] > 0).all()), "no gradient reaches some of the real tokens")
        require(bool((size[~mask] == 0).all()), "a gradient reaches the padding")
