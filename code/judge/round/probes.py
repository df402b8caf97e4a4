"""The probes P1 to P12: what is measured of a file, cheap ones first.

Each takes the file as a `Subject` and the drawn weights, and returns a reading. P6, P7, P11 and P12
compare the file with its own logits, so that a bug in the model does not move them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from judge.round.loop import clipped_loop, watched_loop
from judge.round.measuring import Note, Reading, absolute, relative
from judge.round.subject import SIZES, Subject, drawn_ids

CONTEXT, VOCABULARY = SIZES["context"], SIZES["vocab_size"]
ROWS = 4000  # of one prompt: two fair samples differ by less than SHARE, bugs by more than three
SHARE = 0.05
PROMPTS = (("short", 3, 4, 6), ("over the context", CONTEXT + 2, 3, 8), ("row", 5, 2, 1))
NEAR = 0.6  # of ln V: heads by Xavier or Kaiming are 0.2 to 0.4 above it, tables of width 1 1.8
LEAST = 1e-5  # of the whole gradient: below it a parameter's is rounding

Layout = dict[str, Tensor]


class Probe(NamedTuple):
    """`runs` names what it calls of a file, in the names of pieces.txt: nothing else moves it."""

    name: str
    about: str
    read: Callable[[Subject, Layout], Reading]
    runs: tuple[str, ...]


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)[0]


@torch.no_grad()
def forward_pass(subject: Subject, layout: Layout) -> Reading:
    """P1 and P2: logits on drawn weights; which of them move with later tokens and other rows."""
    model = subject.model(layout)
    found: Reading = {}
    for T in (7, CONTEXT, 1):
        found[f"logits of {T}"] = relative(logits_of(model, drawn_ids(f"P1 {T}", 3, T)))
    unit = max(found["logits of 7"].unit, found[f"logits of {CONTEXT}"].unit)
    ids = drawn_ids("P2", 2, CONTEXT)
    before = logits_of(model, ids)
    later = torch.zeros(CONTEXT)
    for t in range(1, CONTEXT):
        other = ids.clone()
        other[:, t] = (other[:, t] + 1) % VOCABULARY
        later[t] = (logits_of(model, other) - before)[:, :t].abs().max()
    short = logits_of(model, ids[:, :4])
    alone = torch.cat([logits_of(model, ids[i : i + 1]) for i in range(2)])
    repeated = logits_of(model, ids[:1, :1].expand(1, 6).contiguous())
    gaps = {
        "later tokens": later,
        "beginning alone": (short - before[:, :4]).abs().max(),
        "row alone": (alone - before).abs().max(),
        "repeated token": (repeated - repeated[:, :1]).abs().max(),
    }
    return found | {name: relative(gap)._replace(unit=unit) for name, gap in gaps.items()}


def gradients(subject: Subject, layout: Layout) -> Reading:
    """P3: the gradient that each parameter gets from the cross entropy of their own logits."""
    model = subject.model(layout)
    parameters = {name: subject.parameter(model, name) for name in layout}
    model(drawn_ids("P1 7", 3, 7))[0]
    logits = logits_of(model, drawn_ids("P3", 5, 7))
    loss = F.cross_entropy(logits.flatten(0, 1), drawn_ids("P3 targets", 5, 7).flatten())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    norms = {n: None if g is None else float(g.norm()) for n, g in zip(parameters, grads)}
    whole = math.sqrt(sum(norm**2 for norm in norms.values() if norm) or 1.0)
    states, sizes = [], []
    for name, norm in norms.items():
        state = "None" if norm is None else "NaN" if math.isnan(norm) else "some"
        state = "0" if state == "some" and norm <= LEAST * whole else state
        states.append((name, state))
        sizes.append(math.log(norm) if state == "some" else 0.0)
    rows = {}
    for name, grad in zip(parameters, grads):
        if grad is not None and grad.dim() == 2:
            rows[name] = int((grad.abs().amax(dim=1) > LEAST * whole).sum())
    return {
        "gradients": tuple(states),
        "rows with gradients": tuple(rows.items()),
        "sizes of gradients": absolute(sizes, 2e-3),
    }


def modes(subject: Subject, layout: Layout) -> Reading:
    """P4: two passes in eval mode, and one in train mode with a rate of 0."""
    ids = drawn_ids("P4", 3, 7)
    model = subject.model(layout, drop_rate=0.5)
    with torch.no_grad():
        first, second = logits_of(model, ids), logits_of(model, ids)
        plain = subject.model(layout, drop_rate=0.0)
        quiet = logits_of(plain, ids)
        training = logits_of(plain.train(), ids)
    unit = relative(quiet).unit
    return {
        "two eval passes equal": bool(torch.allclose(first, second, equal_nan=True)),
        "gap of two eval passes": Note(f"{float((first - second).abs().max()):.2g}"),
        "train mode at rate 0": relative(training - quiet)._replace(unit=unit),
    }


def start(subject: Subject, layout: Layout) -> Reading:
    """P5: a fresh model: its loss against ln V, matrices of zeros, tables, what the model knows."""
    losses = []
    ids, targets = drawn_ids("P5", 4, CONTEXT), drawn_ids("P5 targets", 4, CONTEXT)
    for seed in range(3):
        torch.manual_seed(seed)
        model = subject.fresh().eval()
        with torch.no_grad():
            logits = logits_of(model, ids)
        losses.append(float(F.cross_entropy(logits.flatten(0, 1), targets.flatten())))
    loss = sum(losses) / len(losses)
    parameters = {name: subject.parameter(model, name) for name in layout}
    widths = {name: float(p.detach().std()) for name, p in parameters.items() if p.dim() == 2}
    zeros = tuple(name for name, width in widths.items() if width == 0.0)
    table, places = subject.names["token_table"], subject.names["place_table"]
    known = {id(p) for p in model.parameters()}
    tables = [
        next(w for name, w in widths.items() if name.split(".")[0] == t) for t in (table, places)
    ]
    ratio = tables[1] / tables[0] if tables[0] else 1.0
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return {
        "fresh loss": (
            "NaN"
            if math.isnan(loss)
            else "near"
            if abs(loss / math.log(VOCABULARY) - 1) < NEAR
            else "far"
        ),
        "fresh loss number": Note(f"{loss:.2f}"),
        "zero matrices": zeros,
        "tables equally wide": 0.2 < ratio < 5,
        "ratio of tables": Note(f"{ratio:.2g}"),
        "unknown to the model": tuple(n for n, p in parameters.items() if id(p) not in known),
        "shared parameters": tuple(tuple(g) for g in groups.values() if len(g) > 1),
    }


def loss(subject: Subject, layout: Layout) -> Reading:
    """P6: their loss against the cross entropy of their own logits."""
    model = subject.model(layout)
    ids, targets = drawn_ids("P6", 4, 7), drawn_ids("P6 targets", 4, 7)
    padded = targets.clone()
    padded[0, 4:] = padded[2, 1:] = -1
    found: Reading = {}
    with torch.no_grad():
        for name, wanted in (("loss", targets), ("loss with -1", padded)):
            logits, value = model(ids, wanted)
            own = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1)
            found[name] = absolute(torch.as_tensor(value, dtype=torch.float64) / own, 1e-4)
        gap = (logits - logits_of(model, ids)).abs().max()
        found["logits with targets"] = relative(gap)._replace(unit=relative(logits).unit)
    return found


def groups(subject: Subject, layout: Layout) -> Reading:
    """P8: how often each parameter stands in the optimiser, and whether it decays there."""
    model = subject.model(layout)
    optimizer = subject["make_optimizer"](model, subject.settings())
    times: dict[int, int] = {}
    decays: dict[int, bool] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            times[id(parameter)] = times.get(id(parameter), 0) + 1
            decays[id(parameter)] = group.get("weight_decay", 0.0) > 0
    parameters = {name: subject.parameter(model, name) for name in layout}
    return {
        "times in the optimiser": tuple((n, times.get(id(p), 0)) for n, p in parameters.items()),
        "decays": tuple((n, decays.get(id(p))) for n, p in parameters.items()),
        "maximises": any(group.get("maximize") for group in optimizer.param_groups),
    }


def schedule(subject: Subject, layout: Layout) -> Reading:
    """P9: 23 rates of their schedule, with a warm-up of 5 of 20 steps."""
    settings = subject.settings(warmup=5, steps=20, max_rate=0.4, min_rate=0.1)
    rates = [float(subject["learning_rate"](step, settings)) for step in range(23)]
    return {"schedule": relative(torch.tensor(rates))}


def batches(subject: Subject, layout: Layout) -> Reading:
    """P10: batches of the data 0 … 39, the two parts of split, and encode against decode."""
    data, T = torch.arange(40), CONTEXT
    settings = subject.settings(batch_size=64)
    torch.manual_seed(5)
    draws = [subject["get_batch"](data, settings) for _ in range(12)]
    inputs = torch.stack([x for x, _ in draws])
    shifts = torch.stack([y - x for x, y in draws]).flatten()
    firsts = inputs[..., 0].flatten()
    train, held = subject["split"](data)
    train, held = set(map(int, train)), set(map(int, held))
    text = subject.space.get(subject.names["TEXT"])
    text = text if isinstance(text, str) else "a text"
    return {
        "shape of a batch": tuple(map(tuple, (inputs.shape, draws[0][1].shape))),
        "tokens of a row": tuple(
            sorted(set((inputs[..., 1:] - inputs[..., :-1]).flatten().tolist()))
        ),
        "y - x": tuple(sorted(set(shifts.tolist()))) if len(set(shifts.tolist())) < 4 else "mixed",
        "first ids": "many" if len(set(firsts.tolist())) > 0.8 * (40 - T - 1) else "few",
        "first ids number": Note(f"{len(set(firsts.tolist()))} of {40 - T}"),
        "rows differ": all(len(set(x[:, 0].tolist())) > 1 for x in inputs),
        "draws differ": any(not torch.equal(inputs[0], x) for x in inputs[1:]),
        "parts overlap": bool(train & held),
        "parts hold tokens": bool(train) and bool(held) and train | held <= set(range(40)),
        "decode(encode(text)) is text": subject["decode"](subject["encode"](text)) == text,
    }


def greedy(subject: Subject, layout: Layout) -> Reading:
    """P11: generate at temperature 0 against a loop over their own logits; the mode behind it."""
    found: Reading = {}
    bias = subject.names["last_norm"] + ".bias"  # it would favour one token everywhere
    varied = {name: 0 * w if name == bias else w for name, w in layout.items()}
    for name, T, n, B in PROMPTS:
        model = subject.model(varied, drop_rate=0.8)
        prompt = drawn_ids(f"P11 {name}", B, T)
        expected = prompt
        with torch.no_grad():
            for _ in range(n):
                last = logits_of(model, expected[:, -CONTEXT:])[:, -1]
                expected = torch.cat([expected, last.argmax(-1, keepdim=True)], dim=1)
        if name == "short":
            model.train()
        torch.manual_seed(7)
        got = subject["generate"](model, prompt.clone(), n, temperature=0)
        found[f"length of {name}"] = tuple(got.shape)
        same_length = got.shape == expected.shape
        found[f"prompt of {name} kept"] = same_length and torch.equal(got[:, :T], prompt)
        found[f"greedy {name}"] = same_length and torch.equal(got, expected)
        found[f"mode after {name}"] = model.training
        if same_length:
            agree = int((got[:, T:] == expected[:, T:]).sum())
            found[f"agreement {name}"] = Note(f"{agree} of {B * n}")
    return found


def frequencies(subject: Subject, layout: Layout) -> Reading:
    """P12: how often each token follows one prompt, less the softmax of their own logits."""
    last = subject.names["last_norm"] + "."
    softer = {name: 0.7 * w if name.startswith(last) else w for name, w in layout.items()}
    model = subject.model(softer)  # no token so likely that the others are never drawn
    prompt = drawn_ids("P12", 1, 1)
    with torch.no_grad():
        logits = logits_of(model, prompt)[0, -1].double()
    found: Reading = {}
    for name, T, k in (("T = 1", 1.0, None), ("T = 0.3", 0.3, None), ("top-k of 3", 1.0, 3)):
        wanted = logits / T
        if k:
            wanted = wanted.masked_fill(wanted < wanted.topk(k).values[-1], -math.inf)
        torch.manual_seed(11)
        more = {} if k is None else {"top_k": k}
        rows = prompt.expand(ROWS, 1).contiguous()
        ids = subject["generate"](model, rows, 1, temperature=T, **more)[:, -1]
        counts = torch.bincount(ids, minlength=VOCABULARY).double() / ROWS
        found[f"frequencies, {name}"] = absolute(counts - wanted.softmax(-1), SHARE, 3 * SHARE)
        if k:
            found["tokens drawn by top-k"] = Note(str(int((counts > 0).sum())))
    return found


MODEL, LOOP = ("GPT",), ("GPT", "train", "make_optimizer", "learning_rate")

PROBES = (
    Probe("P9", "the schedule", schedule, ("learning_rate",)),
    Probe("P8", "the optimiser's groups", groups, ("GPT", "make_optimizer")),
    Probe("P1", "the logits", forward_pass, MODEL),
    Probe("P6", "the loss", loss, MODEL),
    Probe("P4", "eval and train mode", modes, MODEL),
    Probe("P3", "gradients", gradients, MODEL),
    Probe("P10", "batches and text", batches, ("get_batch", "split", "encode", "decode")),
    Probe("P5", "a fresh model", start, MODEL),
    Probe("P11", "greedy generation", greedy, ("GPT", "generate")),
    Probe("P7", "the training loop", watched_loop, LOOP),
    Probe("P7 tight", "clipping in the training loop", clipped_loop, LOOP),
    Probe("P12", "sampling", frequencies, ("GPT", "generate")),
)
