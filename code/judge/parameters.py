"""The parameters of a class that somebody wrote, and what their names say of them. Hints only."""

import functools
import itertools
import re
from typing import NamedTuple

from torch import nn

from judge.layout import Packing, WeightLayout

# What a map or a vector may be called, by the last part of the answer's own name.
WORDS = {
    "q_proj": "q wq query queries qproj toq linearq lq",
    "k_proj": "k wk key keys kproj tok lk",
    "v_proj": "v wv value values val vproj tov lv",
    "o_proj": "o wo out output proj cproj oproj outproj tout dense wout lo mix merge fco final",
    "gate": "gate g wgate w1 gating wg gateproj fcgate act",
    "up": "up w3 u wup upproj lin value fcup fc1 w2 v",
    "down": "down w2 w3 d wdown downproj out fc2",
    "norm1": "1 attn attention input pre first sa in a",
    "norm2": "2 ffn mlp ff post second feed f m",
    "ln1": "1 attn attention input pre first sa self in a 0",
    "ln2": "2 ffn mlp ff post second feed cross ca enc f m",
    "ln3": "3 ffn mlp ff feed third f",
    "norm": "norm ln",
    "router": "router gate g wg switch",
    "q_nope": "nope c content",
    "q_rope": "rope r pe rot",
    "latent_down": "latent down c dkv kva compress a",
    "k_rope_proj": "rope r pe kr krope rot",
    "k_up": "k uk key knope nope",
    "v_up": "v uv value",
    "a": "a down",
    "b": "b up",
}
SCOPES = {
    "self_attn": "self masked causal sa attn1 mha1 slf 1",
    "cross_attn": "cross memory mem enc encoder src ca attn2 mha2 x c 2 encdec",
}
# How little a name speaks for a packing.
OWN_WORD_ELSEWHERE, NO_OWN_WORD = 0.2, 0.5  # its word stands in another part of the name, nowhere
OTHER_WORD, OTHER_WORD_ELSEWHERE = 0.4, 0.1  # the word of another map stands in the last part
OTHER_SCOPE = 0.4
OTHER_NUMBER = 1.0
NO_WORD_OF_BIAS = 0.3
INITIALS = -0.3  # a joined matrix that is called qkv

PAIRS = (
    ("weight", "bias"), ("Weight", "Bias"), ("w", "b"), ("W", "b"), ("W", "B"), ("gamma", "beta"),
    ("scale", "shift"), ("scale", "bias"), ("gain", "bias"), ("g", "b"), ("alpha", "bias"),
    ("alpha", "beta"), ("a_2", "b_2"), ("a", "b"), ("gamma", "bias"),
)  # fmt: skip
COMMON_LETTERS = ("a", "g")  # which stand in many other names


class Parameter(NamedTuple):
    """Parameters that belong together: a matrix with its bias, a norm, or a vector."""

    weight: str
    bias: str | None
    shape: tuple[int, ...]
    is_linear: bool  # an nn.Linear, so [out, in]

    @property
    def is_square_matrix(self) -> bool:
        """Whether a raw matrix may be [out, in] or [in, out] by its shape."""
        return not self.is_linear and len(self.shape) == 2 and self.shape[0] == self.shape[1]


def parameters_of(module: nn.Module) -> list[Parameter]:
    """The trainable ones, matrices with their biases; single numbers are left alone."""
    found = []
    for path, part in module.named_modules():
        own = {name: p for name, p in part.named_parameters(path, recurse=False) if p.numel() > 1}
        own = {name: p for name, p in own.items() if p.requires_grad}
        biases = biases_by_name({name: tuple(p.shape) for name, p in own.items()})
        is_linear = isinstance(part, nn.Linear)
        for name, p in own.items():
            if name not in biases.values():
                found.append(Parameter(name, biases.get(name), tuple(p.shape), is_linear))
    return found


def biases_by_name(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Which parameter of a module is the bias of which, as their names and shapes tell."""
    biases: dict[str, str] = {}
    for name, shape in sorted(shapes.items(), key=lambda item: -len(item[1])):
        head, dot, last = name.rpartition(".")
        for old, new in PAIRS:
            if old in COMMON_LETTERS and last != old:
                continue
            other = head + dot + last.replace(old, new)
            if other == name or other not in shapes or {name, other} & {*biases.values()}:
                continue
            smaller = len(shapes[other]) == 1 or len(shapes[other]) < len(shape)
            if smaller and (len(shape) > 1 or shape == shapes[other]):
                biases.setdefault(name, other)
    return biases


def without_pairs(parameters: list[Parameter], module: nn.Module) -> list[Parameter]:
    """The same with every vector by itself, for names that only look like pairs."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    alone = []
    for one in parameters:
        alone.append(one._replace(bias=None))
        if one.bias:
            alone.append(Parameter(one.bias, None, shapes[one.bias], False))
    return alone


@functools.cache
def words_of(name: str) -> set[str]:
    """The words of a name, and each of its parts as one word."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    parts = [re.sub(r"\W|_", "", part) for part in name.split(".")]
    return {word.lower() for word in (*words, *parts)}


@functools.cache
def numbers_of(name: str) -> set[int]:
    """The numbers that stand alone in a name: 3 and 0 in experts.3.mlp_0."""
    return {int(n) for n in re.findall(r"(?:^|[._])(\d+)(?=[._]|$)", name)}


def name_cost(parameter: Parameter, packing: Packing, layout: WeightLayout) -> float:
    """0 where the name says what the packing is, more where it says nothing or another."""
    words = words_of(parameter.weight)
    last = words_of(parameter.weight.removesuffix(".weight").rpartition(".")[2])
    names = [name.removesuffix(".bias").removesuffix(".weight") for name in packing.names]
    kinds = [name.rpartition(".")[2] for name in names]
    if len(kinds) > 1:
        initials = "".join(kind[0] for kind in kinds)
        cost = INITIALS * any(initials in word for word in last)
    else:
        cost = word_cost(words, last, kinds[0], other_kinds(packing, kinds[0], layout))
    if packing.names[0].endswith(".bias") and not {"bias", "b", "beta"} & {w[:4] for w in words}:
        cost += NO_WORD_OF_BIAS
    scope = names[0].rpartition(".")[0].split(".")
    for own, hints in SCOPES.items():
        if set(hints.split()) & words and own not in scope and "." in packing.names[0]:
            cost += OTHER_SCOPE
    digits = [int(word) for word in words if word.isdigit()]
    if packing.index is not None and digits and packing.index not in digits:
        cost += OTHER_NUMBER
    return cost


def word_cost(words: set[str], last: set[str], kind: str, others: list[str]) -> float:
    """What the words of a name cost for one kind of map, beside the kinds that it might be."""
    own = set(WORDS.get(kind, "").split())
    foreign = set(itertools.chain(*(WORDS.get(other, "").split() for other in others))) - own
    cost = 0.0 if own & last else OWN_WORD_ELSEWHERE if own & words else NO_OWN_WORD
    if foreign & last:
        return cost + OTHER_WORD
    return cost + (OTHER_WORD_ELSEWHERE if foreign & words else 0.0)


def other_kinds(packing: Packing, kind: str, layout: WeightLayout) -> list[str]:
    """The kinds of the answer's other maps, or of its vectors, for a packing that is one."""
    if f"{packing.names[0]}.weight" in layout.maps:
        return [one.kind for one in layout.maps.values() if one.kind != kind]
    return [vector.removesuffix(".weight") for vector in layout.vectors]
