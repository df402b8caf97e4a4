"""try --case: the lines run by themselves and show what they say."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from judge.answers import answer_source, planted
from judge.judging import judge
from judge.mistakes import mistakes_of

ROWS = [
    ("rms_norm", "eps is missing"),
    ("rms_norm", "the mean is subtracted"),
    ("attention", "the mask is ignored"),
    ("causal_mask", "the window is one too wide"),
    ("kv_cache_bytes", "batch is left out"),
    ("ModernBlock", "there is no residual around attention"),
    ("ModernBlock", "attention is left out"),
    ("SelfAttention", "positions restart"),
    ("CrossDecoderLayer", "the second attention reads x;"),
    ("MixtralFFN", "the weights are not renormalised"),
    ("LoRALinear", "the scale is rank / alpha"),
    ("layer_norm_backward", "the mean term of LayerNorm's gradient is missing"),
    ("flash_backward", "delta is missing"),
    ("softmax_cross_entropy", "the loss is in bits"),
    ("left_pad", "positions count from 1"),
    ("grpo_loss", "nothing is clipped"),
    ("WindowAttention", "the keys are not turned"),
]


def values_of(replay: str, text: str) -> tuple[str, str]:
    """What the last line gives behind a file's text, and what is written behind it."""
    *lines, last = replay.split("\n")
    expression, _, said = last.partition("  # ")
    scope: dict = {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # as in a REPL
    try:
        exec(text + "\n" + "\n".join(lines), scope)
        value = eval(expression, scope)
    finally:
        torch.set_default_dtype(before)
    value = value.item() if isinstance(value, torch.Tensor) else value
    return (f"{value:.4g}" if isinstance(value, float) else repr(value)), said


@pytest.mark.parametrize(("name", "says"), ROWS)
def test_the_lines_of_a_case_give_what_they_say(name, says):
    mistake = next(one for one in mistakes_of(name) if one.says.startswith(says))
    text = planted(name, mistake)
    (verdict,) = judge(text, [name], case=True)
    assert verdict.replay, verdict.text()
    mine, said = values_of(verdict.replay, text)
    expected, yours = re.fullmatch(r"expected (.*), yours (.*)", said).groups()
    assert same(yours, mine) and not same(expected, mine)
    if name in ("rms_norm", "attention", "causal_mask", "kv_cache_bytes"):  # of names alone
        right, _ = values_of(verdict.replay, answer_source(name))
        assert same(expected, right)
    assert len(verdict.replay.split("\n")) <= 12


def same(one: str, other: str) -> bool:
    try:
        return abs(float(one) - float(other)) <= 1e-3 * abs(float(other)) + 1e-9
    except ValueError:
        return one == other
