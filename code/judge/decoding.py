"""The cases of the loop around the model: the loss, sampling, and greedy decoding."""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from judge.cases import Case, Trouble, as_tensor, drawn, function_case, result_of
from judge.compare import Expectation, Shares, kind_in_words


def loss_cases() -> list[Case]:
    """Without a mask, with padding on either side, with holes, and large logits."""
    sizes = {"B": 3, "T": 5, "V": 7}
    logits, ids = (
        drawn("logits", 3, 5, 7),
        torch.tensor([[1, 4, 0, 2, 6], [3, 3, 5, 0, 1], [2, 6, 1, 4, 5]]),
    )
    right = torch.arange(5) < torch.tensor([[5], [3], [2]])
    case = functools.partial(function_case, "next_token_loss", sizes, float32_is_right=True)
    cases = [case(logits=logits[:1, :2], ids=ids[:1, :2]), case(logits=logits, ids=ids)]
    for mask in (
        right,
        right.flip(1),
        torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0], [1, 0, 1, 1, 1]]).bool(),
    ):
        cases.append(case(logits=logits, ids=ids, mask=mask))
    return [*cases, case(logits=40 * logits, ids=ids, mask=right)]


def sample_cases() -> list[Case]:
    """Temperatures, top-k and top-p alone and together, judged by how often each id comes."""
    probs = torch.tensor([[0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.05, 0.12, 0.31, 0.03, 0.22, 0.27]])
    logits = probs.double().log() + torch.tensor([[0.3], [-1.2]])

    def draw(function: Callable, n: int, options: dict) -> tuple[Tensor, bool]:
        """Ids [2, n], and whether the generator was left as it was."""
        generator = torch.Generator().manual_seed(7)
        state = generator.get_state()
        given = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
        rows = logits.repeat_interleave(n, dim=0)
        ids = as_tensor(result_of(function, rows, *given.values(), generator))
        if ids.shape != (2 * n, 1) or ids.dtype != torch.int64:
            got = f"{ids.dtype} {list(ids.shape)}"
            raise Trouble(f"it must return int64 ids [B, 1], for B = {2 * n} it returned {got}")
        return ids.view(2, n), torch.equal(state, generator.get_state())

    def case(**options: object) -> Case:
        def run(function: Callable) -> dict[str, object]:
            ids, untouched = draw(function, 20, options)
            if options.get("temperature") == 0:
                return {"the ids": ids, "whether the generator is left alone": untouched}
            start = time.process_time()
            draw(function, 20, options)
            spent = (time.process_time() - start) / 20 + 1e-6
            n = round(min(6000, max(100, 0.12 / spent)))  # fewer where they loop over rows
            ids, _ = draw(function, n, options)
            counts = torch.stack([row.bincount(minlength=6)[:6] for row in ids])
            return {"the draws": Shares(counts / ids.shape[1], ids.shape[1])}

        call = ", ".join(
            ["logits [B, 6]", *(f"{k}={v}" for k, v in options.items()), "generator=g"]
        )
        return Case(f"sample({call})", run)

    def unseeded() -> Case:
        def run(function: Callable) -> dict[str, object]:
            ids = as_tensor(function(logits.clone()))
            return {"the shape without a generator": list(ids.shape)}

        return Case("sample(logits [2, 6])", run)

    cases = [
        unseeded(),
        case(temperature=0.0),
        case(),
        case(temperature=0.4),
        case(temperature=4.0),
    ]
    cases += [case(top_k=1), case(top_k=3), case(top_p=0.7), case(top_p=0.3)]
    cases += [case(temperature=4.0, top_k=4), case(temperature=4.0, top_p=0.7), case(top_k=9)]
    return [*cases, case(top_k=3, top_p=0.75), case(temperature=0.0, top_k=3, top_p=0.75)]


class Chain(nn.Module):
    """A stand-in for a model: its logits depend on all ids so far; it counts what it is fed.

    With caches it wants back what it returned last, and nothing else.
    """

    def __init__(self, table: Tensor, cached: bool, flips: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))  # for those who ask for its device
        self.table, self.cached, self.flips = table, cached, flips
        self.last, self.fed, self.handed = None, [], []

    def logits(self, history: Tensor) -> Tensor:
        """[B, T, V] from all ids so far; flips of 10 states give another choice."""
        weights = torch.arange(1, history.shape[1] + 1) * 7 + 3
        state = ((history + 1) * weights).cumsum(dim=1)
        rows = self.table[state % len(self.table)]
        turned = (state * 13 // 7) % 10 < self.flips
        return torch.where(turned[..., None], rows.roll(1, dims=-1), rows)

    def forward(self, ids: Tensor, cache: object = None) -> object:
        self.fed.append(list(ids.shape))
        if not self.cached:
            return self.logits(ids)
        self.handed.append(cache is self.last)
        if cache is not None and not (isinstance(cache, dict) and "ids" in cache):
            raise Trouble(
                f"it must hand in the cache that came back last, it hands in {kind_in_words(cache)}"
            )
        history = ids if cache is None else torch.cat((cache["ids"], ids), dim=1)
        self.last = {"ids": history.clone()}
        return self.logits(history)[:, -ids.shape[1] :], self.last


def greedy(model: Chain, ids: Tensor, n: int) -> Tensor:
    """What plain greedy decoding gives, the whole history fed each time."""
    for _ in range(n):
        ids = torch.cat((ids, model.logits(ids)[:, -1:].argmax(dim=-1)), dim=1)
    return ids


def generate_cases() -> list[Case]:
    """One row and three, with an end and without; eos 0, and no token at all."""
    table = drawn("table", 53, 9)
    prompt = torch.tensor([[1, 4, 7, 2], [3, 0, 8, 5], [6, 6, 1, 0]])

    def case(ids: Tensor, n: int, eos_id: int | None = None) -> Case:
        def run(function: Callable) -> dict[str, object]:
            model = Chain(table, cached=True)
            given = () if eos_id is None else (eos_id,)
            result = result_of(function, model, ids.clone(), n, *given)
            fed = {"the shapes fed to the model": model.fed}
            return {
                "the result": result,
                **fed,
                "whether the last cache is handed in": model.handed,
            }

        eos = "" if eos_id is None else f", eos_id={eos_id}"
        call = f"generate(model, ids={ids.tolist()}, max_new_tokens={n}{eos})"
        return Case(call, run, Expectation({len(ids): "B"}))

    never = torch.tensor([[4, 3, 2, 4], [4, 2, 0, 0], [4, 1, 4, 1]])  # one row ends with 6
    apart = torch.tensor([[6, 6, 6, 3], [6, 1, 6, 1], [7, 0, 6, 3]])  # with 5, each at another step
    inside = torch.tensor([[8, 0, 2, 6], [7, 6, 7, 1], [1, 0, 8, 2]])  # 1 stands in two of them
    cases = [case(prompt[:1], 1), case(prompt[:1], 3), case(prompt, 5), case(apart[:1], 8, 5)]
    cases += [case(never, 8, 6), case(apart, 8, 5), case(inside, 8, 1)]
    return [*cases, case(prompt, 0), case(prompt, 9, 0)]


def speculate_cases() -> list[Case]:
    """Drafts that agree never, always, and in part."""
    table = drawn("table", 53, 9)
    # all four accepted, none, the second alone, all but the third, and more such
    prompts = ([0, 3, 7, 5, 0], [3, 4, 2, 5], [7, 1, 1], [4, 3, 4, 2], [4, 5, 0, 5])
    prompts += ([0, 6, 8, 0, 8], [8, 3, 7, 3, 8], [5, 3, 6, 4])

    def case(ids: Tensor, n: int, flips: int) -> Case:
        def run(function: Callable) -> dict[str, object]:
            target, draft = Chain(table, cached=False), Chain(table, cached=False, flips=flips)
            result = result_of(function, target, draft, ids.clone(), n)
            calls = "one" if len(target.fed) == 1 else "none" if not target.fed else "more than one"
            return {"the result": result, "the calls of target": calls}

        return Case(f"speculate(target, draft, ids={ids.tolist()}, n_draft={n})", run)

    short = torch.tensor([[8, 0, 2]])  # a draft that is the target, and one that never agrees
    cases = [case(short, 1, 0), case(short, 1, 10)]
    return [*cases, *(case(torch.tensor([ids]), 4, 4) for ids in prompts), case(short, 3, 0)]


CASES = {
    "next_token_loss": loss_cases,
    "sample": sample_cases,
    "generate": generate_cases,
    "speculate": speculate_cases,
}
