"""The cases of the functions: norms, masks, rotation, attention, the gated FFN, and counts."""

import functools
import tracemalloc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from judge.cases import ArrayFunction, Case, as_tensor, drawn, function_case


def norm_cases(name: str, *vectors: str) -> list[Case]:
    """Rows of about 1 and of about 3e-3, an eps of its own, and half precision."""
    sizes = {"B": 2, "T": 5, "d": 6}
    given = {
        v: (1 + 0.5 * torch.tanh(drawn(v, 6))) if v == "weight" else drawn(v, 6) for v in vectors
    }
    x = drawn("x", 2, 5, 6)
    case = functools.partial(function_case, name, sizes)
    cases = [case(x=x[0, 0], **given), case(x=x, **given), case(x=3e-3 * x, **given)]
    cases += [case(x=x + 2, **given), case(x=0.1 * x, **given, eps=0.01)]
    wide = drawn("wide", 2, 5, 64) * torch.tensor([[[1.0]] * 5, [[400.0]] * 5])
    for dtype in (torch.float16, torch.bfloat16):
        low = {v: (1 + 0.5 * torch.tanh(drawn(v, 64))).to(dtype) for v in vectors}
        half = functools.partial(
            function_case, name, {"B": 2, "T": 5, "d": 64}, grads=False,
            close=2 * torch.finfo(dtype).eps, more=f" in {str(dtype).removeprefix('torch.')}",
        )  # fmt: skip
        cases += [half(x=wide.to(dtype), **low)]
        cases += [half(x=(2e-4 * drawn("narrow", 2, 5, 64)).to(dtype), **low)]
    return cases


def mask_cases() -> list[Case]:
    """Squares and rectangles, windows narrower and wider than the text."""
    sizes = ((1, 1), (3, 3), (2, 5), (1, 4), (5, 5, 2), (4, 9, 3), (6, 6, 1), (3, 5, 8))
    found = []
    for T, S, *window in sizes:
        more = {"window": window[0]} if window else {}
        found.append(function_case("causal_mask", {"T": T, "S": S}, T=T, S=S, **more))
    return found


def rotate_cases() -> list[Case]:
    """Positions from 0 and from elsewhere, another base; then far positions in low precision."""
    x = drawn("x", 2, 3, 5, 6)
    case = functools.partial(function_case, "rotate", {"B": 2, "n": 3, "T": 5, "d_h": 6})
    places = (torch.arange(5), torch.arange(4, 9), torch.tensor([0, 3, 1, 7, 2]))
    cases = [case(x=x[:1, :1, :1, :2], positions=torch.tensor([1]))]
    cases += [case(x=x[:, :, :1], positions=torch.tensor([3]))]
    cases += [case(x=x, positions=positions) for positions in places]
    cases += [case(x=x, positions=places[1], base=100.0)]
    cases += [case(x=drawn("x", 1, 2, 4, 16), positions=torch.arange(4))]
    low, x = functools.partial(case, grads=False), drawn("x", 2, 3, 5, 16)
    far, near = torch.tensor([0, 5, 777, 1499, 3000]), torch.tensor([0, 5, 77, 149, 299])
    cases += [low(x=x.float(), positions=far, close=1e-3, more=" in float32")]
    cases += [low(x=x.half(), positions=near, close=4e-3, more=" in float16")]
    return [*cases, low(x=x.bfloat16(), positions=near, close=3e-2, more=" in bfloat16")]


def attention_cases() -> list[Case]:
    """MHA, GQA, MQA; masks of all shapes; queries without keys; scores of all sizes."""

    def tensors(B: int, H: int, G: int, T: int, S: int, d_h: int, d_v: int) -> dict[str, Tensor]:
        return {
            "q": drawn("q", B, H, T, d_h),
            "k": drawn("k", B, G, S, d_h),
            "v": drawn("v", B, G, S, d_v),
        }

    usual = tensors(2, 4, 2, 5, 7, 6, 3)
    sizes = {"B": 2, "H": 4, "T": 5, "S": 7, "d_h": 6, "d_v": 3}
    case = functools.partial(function_case, "attention", sizes)
    causal = torch.ones(5, 7, dtype=torch.bool).tril(2)
    padding = torch.arange(7) < torch.tensor([[4], [7]])  # [B, S], lengths 4 and 7
    holes = causal.clone()
    holes[1] = False  # a query without keys
    cases = [case(**tensors(1, 1, 1, 1, 2, 2, 2)), case(**tensors(1, 1, 1, 3, 4, 6, 6))]
    cases += [case(**tensors(1, 4, 4, 3, 2, 6, 6)), case(**tensors(2, 3, 1, 5, 7, 6, 4))]
    cases += [case(**usual), case(**usual, mask=causal)]
    cases += [case(**tensors(3, 6, 2, 5, 7, 8, 8), mask=causal)]
    cases += [case(**usual, mask=padding[:, None, None])]
    cases += [case(**usual, mask=(causal & padding[:, None])[:, None])]
    cases += [case(**usual, mask=holes)]
    cases += [case(**tensors(1, 2, 1, 5, 5, 6, 3), mask=causal[:, 2:])]
    cases += [case(**{**usual, "q": 2000 * usual["q"]}, grads=False)]  # where a bare exp overflows
    for largest in (200.0, 1e3, 1e5):
        steep = {**usual, **steep_scores(largest)}
        said = f" with scores up to {largest:g}"
        cases += [case(**steep, mask=causal, grads=False, more=said)]
    return [*cases, case(**tensors(2, 4, 2, 1, 7, 6, 3), mask=causal[-1:])]


def steep_scores(largest: float) -> dict[str, Tensor]:
    """q [2, 4, 5, 6] and k [2, 2, 7, 6] whose scores are up to largest, and far apart.

    The later the key, the larger its score, from -largest on: what a causal mask hides is larger
    than what it shows, by more than a mask of -30, -100 or -1e4 takes off.
    """
    steps = torch.linspace(-1, 1, 7, dtype=torch.float64) * largest
    q, k = torch.zeros(2, 4, 5, 6), torch.zeros(2, 2, 7, 6)
    q[..., 0] = 6**0.5 * torch.tensor([[1.0], [0.9], [0.95], [1.0]])
    k[..., 0] = steps
    k[..., 1] = drawn("other channels", 2, 2, 7)  # orthogonal to every query
    return {"q": q.double(), "k": k.double()}


class Largest(TorchFunctionMode):
    """Notes the largest tensor that a call makes while it is on."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def online_cases() -> list[Case]:
    """Blocks of all lengths, scores that rise, fall and are huge; and what is kept at once."""

    def tensors(T: int, S: int, scale: float = 1.0) -> dict[str, Tensor]:
        return {"q": scale * drawn("q", T, 6), "k": drawn("k", S, 6), "v": drawn("v", S, 3)}

    sizes = {"T": 5, "S": 7, "d_h": 6, "d_v": 3}
    case = functools.partial(function_case, "online_softmax", sizes, grads=False)
    rising = tensors(5, 7)
    rising["k"] = rising["k"] * torch.arange(1.0, 8)[:, None]
    falling = {**rising, "k": rising["k"].flip(0)}
    # Scores near 1,000, 2,000, … 7,000: rising, falling, and as far below 0.
    steep = {"q": 400 + rising["q"].abs(), "k": torch.arange(1.0, 8)[:, None].expand(7, 6)}
    steep |= {"v": rising["v"]}
    cases = [
        case(**tensors(1, 2), block=2),
        case(**tensors(5, 7), block=7),
        case(**tensors(5, 7), block=3),
    ]
    cases += [case(**tensors(5, 7), block=1), case(**tensors(5, 7), block=9)]
    cases += [
        case(**rising, block=2),
        case(**falling, block=2),
        case(**tensors(5, 7, 2000.0), block=3),
        case(**steep, block=2),
        case(**{**steep, "k": steep["k"].flip(0)}, block=2),
        case(**{**steep, "k": -steep["k"]}, block=2),
    ]
    large = tensors(48, 60)

    def run(function: Callable) -> dict[str, object]:
        if isinstance(function, ArrayFunction):
            return {
                "whether no array of T * S numbers is made": array_bytes(function) < 8 * 600 * 800
            }
        with Largest() as largest:
            as_tensor(function(*large.values(), 4))
        return {"whether no tensor of T * S numbers is made": largest.numel < 48 * 60}

    return [*cases, Case("online_softmax(q [48, 6], k [60, 6], v [60, 3], block=4)", run)]


def array_bytes(function: ArrayFunction) -> int:
    """What a NumPy answer takes at its peak, of 600 queries and 800 keys: 0 for ours."""
    if not function.arrays:
        return 0
    tracemalloc.start()
    try:
        function(drawn("q", 600, 6), drawn("k", 800, 6), drawn("v", 800, 3), 8)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def swiglu_cases() -> list[Case]:
    """Vectors, rows and batches."""
    sizes = {"B": 2, "T": 5, "d": 6, "h": 7}
    x = drawn("x", 2, 5, 6)
    w = {
        "w_gate": drawn("w_gate", 7, 6) / 2,
        "w_up": drawn("w_up", 7, 6) / 2,
        "w_down": drawn("w_down", 6, 7) / 2,
    }
    case = functools.partial(function_case, "swiglu", sizes)
    return [case(x=x[0, 0], **w), case(x=x[0], **w), case(x=x, **w), case(x=3 * x, **w)]


def count_cases(name: str, keys: str, *rows: tuple[int, ...]) -> list[Case]:
    """A count for each row of sizes."""
    return [function_case(name, {}, **dict(zip(keys.split(), row))) for row in rows]


CASES = {
    "rms_norm": lambda: norm_cases("rms_norm", "weight"),
    "layer_norm": lambda: norm_cases("layer_norm", "weight", "bias"),
    "causal_mask": mask_cases,
    "rotate": rotate_cases,
    "attention": attention_cases,
    "online_softmax": online_cases,
    "swiglu": swiglu_cases,
    "block_parameters": lambda: count_cases(
        "block_parameters", "d_model n_q_heads n_kv_heads d_ff",
        (4, 1, 1, 3), (96, 8, 2, 256), (36, 6, 2, 20), (24, 4, 1, 15), (18, 3, 3, 13),
    ),
    "kv_cache_bytes": lambda: count_cases(
        "kv_cache_bytes", "n_layers n_kv_heads head_dim length batch bytes_per_element",
        (1, 1, 2, 3), (80, 8, 128, 4096), (5, 3, 7, 11, 13), (5, 3, 7, 11, 13, 4),
    ),
}  # fmt: skip
