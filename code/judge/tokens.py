"""The cases of tokens and decoding: byte pairs, padding, beams, a window, a slope."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from judge.answers import executed_answer
from judge.cache_cost import copied, floating_tensors
from judge.cases import Case, Trouble, as_tensor, drawn, result_of
from judge.classes import ClassExercise, Subject
from judge.compare import AtMost, Expectation, kind_in_words
from judge.gradients import named_results
from judge.subjects import Sizes

TEXTS = (
    "ab", "aaab", "aaaaaaa", "abababcabab", "the theme of the thesis", "bananas and bandanas",
    "caféé, naïve café", "東京都東京", "aabaabaaabaa", "xyxyxzxzxyxyz", "mississippi",
)  # fmt: skip


def train_cases() -> list[Case]:
    """Ties, runs of one letter, letters of several bytes, more merges than there are pairs."""

    def case(text: str, n_merges: int) -> Case:
        def run(function: Callable) -> dict[str, object]:
            merges = result_of(function, text, n_merges)
            if not isinstance(merges, (list, tuple)):
                raise Trouble(f"it must return a list, it returned {kind_in_words(merges)}")
            wrong = [m for m in merges if not (isinstance(m, (tuple, list)) and len(m) == 2)]
            if wrong:
                raise Trouble(f"a merge is (bytes, bytes), one of them is {wrong[0]!r}")
            return {"the merges": [tuple(merge) for merge in merges]}

        given = {"text": text, "n_merges": n_merges}
        return Case(f"bpe_train({text!r}, {n_merges})", run, inputs=given)

    cases = [case("", 3), case("a", 3), case("ab", 3), case("abab", 1)]
    return [*cases, *(case(text, 4) for text in TEXTS), *(case(text, 30) for text in TEXTS)]


ACCENTS = [(b"\xc3", b"\xa9"), (b"f", b"\xc3\xa9"), (b"a", b"f\xc3\xa9"), (b"c", b"af\xc3\xa9")]
LEARNED = (
    "aaabaaaabbbab",
    "caacccabbbabbcccbba",
    "aabaaabaa",
    "the theme of the thesis",
    "café" * 3,
)
ENCODED = (
    "aaaa", "aaaaaaaab", "bbbaabbbb", "abbbababa", "ccccbccac", "cbbccbaac", "the theme of the",
    "a café, 東京",
)  # fmt: skip


def encode_cases() -> list[Case]:
    """Texts that the merges were learned on and others; merges that get in each other's way."""

    def case(text: str, merges: list[tuple[bytes, bytes]]) -> Case:
        def run(function: Callable) -> dict[str, object]:
            given = list(merges)
            ids = result_of(function, text, given)
            if given != merges:
                raise Trouble("it changes the list of merges that it is given")
            try:
                return {"the ids": [int(i) for i in ids]}
            except (TypeError, ValueError):
                raise Trouble(f"it must return ids, it returned {kind_in_words(ids)}") from None

        given = {"text": text, "merges": merges}
        return Case(f"bpe_encode({text!r}, {merges})", run, inputs=given)

    train = executed_answer("bpe_train")
    cases = [case("abc", []), case("", train("aaab", 2)), case("é", [])]
    for learned in LEARNED:
        merges = train(learned, 5)
        cases += [case(text, merges) for text in (learned, *ENCODED)]
    return cases


def decode_cases() -> list[Case]:
    """Whole letters, letters in pieces, bytes that are no UTF-8."""

    def case(ids: list[int], merges: list[tuple[bytes, bytes]]) -> Case:
        def run(function: Callable) -> dict[str, object]:
            text = result_of(function, list(ids), list(merges))
            if not isinstance(text, str):
                raise Trouble(f"it must return a str, it returned {kind_in_words(text)}")
            return {"the text": text}

        given = {"ids": ids, "merges": merges}
        return Case(f"bpe_decode({ids}, {merges})", run, inputs=given)

    letters = [(b"a", b"b"), (b"ab", b"c"), (b"b", b"abc")]
    return [
        case([97, 98], []), case([97, 97, 98, 97], []), case([], []), case([256, 257], letters),
        case([258, 98], letters),
        case([259, 33], ACCENTS), case([195, 169], ACCENTS), case([0xE6, 0x9D, 0xB1], []),
        case([0xE6, 0x9D], []), case([97, 0xFF, 98], []), case([195, 97], ACCENTS),
        case([169, 256], ACCENTS), case([0xF0, 0x9F, 0x99, 0x82, 10], []), case([65533 % 256], []),
    ]  # fmt: skip


def pad_cases() -> list[Case]:
    """Equal and unequal lengths, an empty prompt, prompts that contain the padding's id."""

    def case(prompts: list[list[int]], pad_id: int) -> Case:
        def run(function: Callable) -> dict[str, object]:
            given = [list(prompt) for prompt in prompts]
            result = result_of(function, given, pad_id)
            if given != prompts:
                raise Trouble("it changes the prompts that it is given")
            found = named_results(result, ("ids", "mask", "positions"))
            return {**found, "mask": found["mask"] != 0}

        letters = {max(map(len, prompts)): "T", len(prompts): "B"}
        given = {"prompts": prompts, "pad_id": pad_id}
        return Case(f"left_pad({prompts}, {pad_id})", run, Expectation(letters), inputs=given)

    return [
        case([[5, 6, 7]], 0), case([[5, 6, 7], [8, 9, 1]], 0), case([[5], [6, 7, 8], [9, 4]], 0),
        case([[3, 3, 1], [3], [2, 3]], 3), case([[], [4, 2]], 9), case([[1, 0, 0], [0, 1]], 0),
    ]  # fmt: skip


class TableModel(nn.Module):
    """Logits of the next token from the last two ids; it notes no calls: they are free."""

    def __init__(self, seed: int, V: int = 6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))  # for those who ask for its device
        self.table = 0.6 * drawn(f"beams {seed}", V, V, V)

    def forward(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise Trouble("model wants ids [n, T], as integers")
        before = torch.cat((ids[:, :1], ids[:, :-1]), dim=1)
        return self.table[before, ids]


# Tables, beams and steps where an ended beam competes with those that go on, and where the sum and
# the mean choose apart: searched for, since with most tables a wrong search finds the same.
COMPETING = (
    (75, 3, 4), (43, 3, 5), (43, 3, 6), (74, 3, 4), (23, 3, 4), (77, 3, 5), (69, 3, 6), (2, 3, 6),
    (23, 2, 4), (7, 3, 4), (0, 2, 6), (3, 2, 4), (3, 2, 5), (16, 2, 6), (20, 3, 4), (20, 3, 5),
    (20, 3, 6), (21, 2, 6), (60, 3, 6), (30, 3, 5), (21, 3, 6), (42, 2, 4), (12, 3, 6), (30, 3, 6),
)  # fmt: skip


def beam_cases() -> list[Case]:
    """One beam and several, with an end and without, over several tables."""

    def case(seed: int, n_beams: int, n: int, eos_id: int | None = None, start=(3, 2)) -> Case:
        ids = torch.tensor([start])

        def run(function: Callable) -> dict[str, object]:
            given = (n_beams, n) if eos_id is None else (n_beams, n, eos_id)
            return {
                "the result": as_tensor(result_of(function, TableModel(seed), ids.clone(), *given))
            }

        eos = "" if eos_id is None else f", eos_id={eos_id}"
        options = f"n_beams={n_beams}, max_new_tokens={n}{eos}"
        call = f"beam_search(table {seed}, ids={ids.tolist()}, {options})"
        return Case(call, run, Expectation({1: "1"}))

    cases = [case(0, 1, 1), case(0, 1, 4), case(1, 2, 1), case(0, 2, 0)]
    cases += [case(seed, 2, 4) for seed in (1, 2, 3)]
    cases += [case(seed, 3, 5) for seed in (4, 5, 75)]
    cases += [case(seed, n_beams, n, 1) for seed, n_beams, n in COMPETING]
    cases += [case(seed, n, 5, 1) for n in (2, 3) for seed in range(6)]
    cases += [case(seed, 1, 6, 4) for seed in range(3)]
    cases += [case(seed, 2, 4, 0) for seed in range(5)]
    return [*cases, case(6, 20, 2), case(7, 3, 4, 2), case(8, 2, 5, 3)]


class WindowExercise(ClassExercise):
    """A cached class whose cache stops growing: held is counted, not what a token adds."""

    def cost(self, sizes: Sizes) -> Case:
        """The most numbers of a row that a cache shows, over a text longer than the window."""

        def run(subject: Subject) -> dict[str, object]:
            loaded = subject.make(sizes)
            (x,) = self.inputs(sizes, 2, 14)
            most, cache = 0, ()
            with torch.no_grad():
                for part in x.split((5, 1, 1, 6, 1), dim=1):
                    returned = self.results(loaded.module, part, cache=cache)
                    cache = (returned["cache"],)
                    held = copied(floating_tensors(cache[0])).values()
                    most = max(most, sum(tensor.numel() for tensor in held))
            return {"the numbers a row that the cache holds": AtMost(most // 2)}

        more = " in chunks of 5 + 1 + 1 + 6 + 1 tokens"
        return Case(self.call(sizes, self.inputs(sizes, 2, 14), more), run)

    def all_cases(self) -> list[Case]:
        """As of attention with a cache; texts longer than the window in chunks of all lengths."""
        usual, *others = self.sizes
        more = [self.full(usual, 2, 12), self.chunked(usual, 2, (7, 5, 1))]
        more += [self.chunked(usual, 1, (1,) * 9), self.chunked(others[-1], 2, (2, 9, 1, 1))]
        return [*super().all_cases(), *more]


def alibi_cases() -> list[Case]:
    """Squares and rectangles; what stands at later keys is free."""

    def case(n_heads: int, T: int, S: int) -> Case:
        def run(function: Callable) -> dict[str, object]:
            bias = named_results(result_of(function, n_heads, T, S), ("the bias",))["the bias"]
            if bias.shape != (n_heads, T, S):
                got, wanted = list(bias.shape), [n_heads, T, S]
                raise Trouble(f"expected shape {wanted} = [H, T, S], got {got}")
            later = torch.arange(S) > torch.arange(S - T, S)[:, None]
            return {"the bias": bias.double().masked_fill(later, 0)}

        given = {"n_heads": n_heads, "T": T, "S": S}
        call = ", ".join(f"{k}={v}" for k, v in given.items())
        return Case(f"alibi({call})", run, Expectation(close=1e-6), inputs=given)

    sizes = ((1, 1, 1), (2, 3, 3), (4, 5, 5), (8, 3, 7), (4, 1, 6), (16, 2, 5))
    return [case(*one) for one in sizes]


CASES = {
    "bpe_train": train_cases,
    "bpe_encode": encode_cases,
    "bpe_decode": decode_cases,
    "left_pad": pad_cases,
    "beam_search": beam_cases,
    "alibi": alibi_cases,
}
