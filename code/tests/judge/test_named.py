"""What public code does wrong is refused and named, and what it does right is accepted."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import outside_style

from judge.answers import answer_source
from judge.judging import judge


def replaced(text: str, replacements: list[tuple[str, str]]) -> str:
    """The text with every place of old texts changed; each must be there."""
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_the_block_without_a_mistake_is_right():
    assert [v.text() for v in judge(outside_style.LLAMA) if not v.right] == []


@pytest.mark.parametrize(
    ("replacements", "words"), outside_style.BLOCK_MISTAKES,
    ids=[f"{i}-{words}" for i, (_, words) in enumerate(outside_style.BLOCK_MISTAKES)],
)  # fmt: skip
def test_a_block_with_a_mistake_is_refused_and_named(replacements, words):
    (verdict,) = judge(replaced(outside_style.LLAMA, replacements), ["ModernBlock"])
    assert not verdict.right
    assert verdict.mistake and words in verdict.mistake, verdict.text()


@pytest.mark.parametrize("name", ["MixtralFFN", "SwitchFFN"])
@pytest.mark.parametrize("turned", [False, True])
def test_experts_of_raw_matrices_are_read_either_way(name, turned):
    text = outside_style.EXPERTS
    if turned:  # [in, out]
        text = text.replace(".t()", "").replace("randn(h, d)", "randn(H, D)")
        text = text.replace("randn(d, h)", "randn(h, d)").replace("randn(H, D)", "randn(d, h)")
    (verdict,) = judge(text, [name])
    assert verdict.right, verdict.text()


def test_experts_that_take_the_wrong_activation_are_named():
    text = outside_style.EXPERTS.replace("F.silu", "F.gelu")
    for name in ("MixtralFFN", "SwitchFFN"):
        (verdict,) = judge(text, [name])
        assert "GELU" in (verdict.mistake or ""), verdict.text()


KEPT_CACHES = {
    "the module keeps what one call leaves behind: the next text begins with it": [
        ("        self.head_dim =", "        self.kept = None\n        self.head_dim ="),
        ("        start, T", "        cache = cache or self.kept\n        start, T"),
        ("        out =", "        self.kept = k, v\n        out ="),
    ],
    "what one call leaves behind reaches a new instance: a default argument or a global": [
        ("cache=None):", "cache=[]):"),
        ("0 if cache is None", "0 if not cache"),
        ("if cache is not None", "if cache"),
        (
            "        out =",
            "        if type(cache) is list:\n            cache[:] = k, v\n        out =",
        ),
    ],
}


@pytest.mark.parametrize("says", KEPT_CACHES)
def test_a_cache_that_outlives_its_call_is_named(says):
    parts, name, own = answer_source("SelfAttention").partition("class SelfAttention")
    (verdict,) = judge(parts + name + replaced(own, KEPT_CACHES[says]), ["SelfAttention"])
    assert not verdict.right and verdict.mistake == says
