"""What else the judge tells apart: NumPy, helpers, dtypes, ready layers, several mistakes."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from judge.answers import answer_source, planted
from judge.judging import judge
from judge.mistakes import mistakes_of
from judge.process import CODE, Child
from judge.session import WORKER, Trial, try_file
from judge.source import Source

NUMPY = {
    "rms_norm": """
def rms_norm(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
""",
    "causal_mask": """
def causal_mask(T, S, window=None):
    age = np.arange(S - T, S)[:, None] - np.arange(S)
    return (age >= 0) & (age < (S if window is None else window))
""",
    "attention": """
def attention(q, k, v, mask=None):
    k, v = (np.repeat(t, q.shape[1] // t.shape[1], axis=1) for t in (k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300) @ v
""",
    "online_softmax": """
def online_softmax(q, k, v, block):
    m = np.full((len(q), 1), -np.inf)
    total, out = np.zeros((len(q), 1)), np.zeros((len(q), v.shape[1]))
    for i in range(0, len(k), block):
        s = q @ k[i : i + block].T / np.sqrt(q.shape[1])
        new = np.maximum(m, s.max(1, keepdims=True))
        shrink, e = np.exp(m - new), np.exp(s - new)
        total = total * shrink + e.sum(1, keepdims=True)
        out, m = out * shrink + e @ v[i : i + block], new
    return out / total
""",
    "next_token_loss": """
def next_token_loss(logits, ids, mask=None):
    mask = np.ones(ids.shape, bool) if mask is None else mask
    z = logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_p, ids[:, 1:, None], -1)[..., 0]
    pairs = mask[:, :-1] & mask[:, 1:]
    return losses[pairs].mean()
""",
}


@pytest.mark.parametrize("name", NUMPY)
def test_a_right_answer_in_numpy_is_judged_by_its_values(name):
    (verdict,) = judge("import numpy as np\n" + NUMPY[name], [name])
    assert verdict.right and "NumPy keeps no gradients" in verdict.text(), verdict.text()


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("rms_norm", " + eps", "", "eps is missing"),
        ("attention", " / np.sqrt(q.shape[-1])", "", "not scaled"),
        ("attention", "np.repeat(t, q.shape[1] // t.shape[1], axis=1)",
         "np.tile(t, (1, q.shape[1] // t.shape[1], 1, 1))", "tiled"),
        ("online_softmax", "total * shrink +", "total +", "sum of the weights is not rescaled"),
        ("next_token_loss", "ids[:, 1:, None]", "ids[:, :-1, None]", "nothing is shifted"),
    ],
)  # fmt: skip
def test_a_wrong_answer_in_numpy_is_named(name, old, new, words):
    assert old in NUMPY[name]
    (verdict,) = judge("import numpy as np\n" + NUMPY[name].replace(old, new), [name])
    assert words in (verdict.mistake or ""), verdict.text()
    assert len(verdict.lines) <= 8 and "NumPy keeps no gradients" in verdict.text()


def test_numpy_that_keeps_the_whole_table_is_refused():
    text = "import numpy as np\n" + NUMPY["online_softmax"]
    text = text.replace("    m = np", "    table = np.zeros((len(q), len(k)))\n    m = np")
    (verdict,) = judge(text, ["online_softmax"])
    assert not verdict.right and "T * S" in verdict.text()


def test_numpy_changes_nothing_in_place_and_draws_need_torch():
    text = "import numpy as np\ndef swiglu(x, w_gate, w_up, w_down):\n    x *= 2\n    return np.abs(x)\n"
    assert "in place" in judge(text, ["swiglu"])[0].text()
    text = "import numpy as np\ndef sample(logits, *rest):\n    return np.argmax(logits)\n"
    assert not judge(text, ["sample"])[0].right


HELPERS = answer_source("ModernBlock").replace(
    "rotate(x, positions, base=10000.0)", "rotate(x, positions, base, d)"
)
HELPERS = HELPERS.replace("rotate(q, positions), rotate(k, positions)", "rotate(q, positions, 1e4, 2), rotate(k, positions, 1e4, 2)")  # fmt: skip


def test_a_helper_with_the_name_of_an_exercise_is_left_alone():
    trial = Trial(Source(HELPERS, "mine.py"))
    verdicts = {verdict.name: verdict for verdict in trial.verdicts()}
    assert "rotate" not in verdicts and verdicts["ModernBlock"].right
    assert any("rotate is left alone" in note for note in trial.notes)
    alone = HELPERS[HELPERS.index("def rotate") : HELPERS.index("def attention")]
    assert [v.name for v in judge("import torch\n" + alone)] == ["rotate"]  # nobody uses it
    assert not judge(HELPERS, ["rotate"])[0].right  # asked for by name


READY = [
    ("rms_norm", "    return F.rms_norm(x, x.shape[-1:], weight, eps)", "rms_norm"),
    ("layer_norm", "    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)", "layer_norm"),
]


@pytest.mark.parametrize(("name", "body", "ready"), READY)
def test_a_ready_function_of_torch_is_right_and_said(name, body, ready):
    head = answer_source(name).split("def ")[1].split("\n")[0]
    (verdict,) = judge(f"import torch.nn.functional as F\ndef {head}\n{body}\n", [name])
    assert verdict.right and f"by torch's own {ready}" in verdict.headline


def test_a_ready_layer_of_torch_is_right_and_said():
    inherited = """
from torch import nn
class EncoderLayer(nn.TransformerEncoderLayer):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__(d_model, n_heads, d_ff, dropout=0.0, batch_first=True)
    def forward(self, x, key_padding_mask=None):
        hidden = None if key_padding_mask is None else ~key_padding_mask
        return super().forward(x, src_key_padding_mask=hidden)
"""
    (verdict,) = judge(inherited, ["EncoderLayer"])
    assert verdict.right, verdict.text()
    assert "by torch's own nn.TransformerEncoderLayer" in verdict.headline
    assert "torch's own" not in judge(answer_source("EncoderLayer"), ["EncoderLayer"])[0].headline


def test_a_loss_computed_in_float32_is_right_and_a_norm_in_float32_is_not():
    text = answer_source("next_token_loss").replace("wide[:, :-1]", "wide.float()[:, :-1]")
    assert judge(text, ["next_token_loss"])[0].right
    text = "import torch\ndef rms_norm(x, weight, eps=1e-6):\n    x = x.float()\n"
    text += "    return x * (x.square().mean(-1, True) + eps).rsqrt() * weight.float()\n"
    (verdict,) = judge(text, ["rms_norm"])
    assert "the result is float32; it must have the dtype" in verdict.mistake


def test_parameters_of_a_fixed_dtype_are_told_what_the_judge_runs_in():
    text = answer_source("ModernBlock").replace("bias=False)", "bias=False, dtype=torch.float32)")
    (verdict,) = judge(text, ["ModernBlock"])
    assert not verdict.right and "runs it in float64" in verdict.text()


def test_of_three_mistakes_one_is_named_as_one_of_several():
    text = answer_source("ModernBlock").replace(
        "F.silu(self.gate(x))", "F.gelu(self.gate(x)) * 1.7"
    )
    text = text.replace("eps=1e-6", "eps=3e-3").replace(
        "-torch.arange(half", "-0.9 * torch.arange(half"
    )
    (verdict,) = judge(text.replace("x = x + attended", "x = attended"), ["ModernBlock"])
    assert not verdict.right
    assert verdict.mistake is None or verdict.lines[0].startswith("one of several mistakes")
    three = [next(m for m in mistakes_of("attention") if m.says.startswith(s))
             for s in ("the scores are not scaled", "query head i reads", "a query without keys gets")]  # fmt: skip
    (verdict,) = judge(planted("attention", *three), ["attention"])
    assert verdict.lines[0].startswith("one of several mistakes: ")
    assert verdict.mistake in [mistake.says for mistake in three]


@pytest.mark.parametrize("name", ["rms_norm", "ModernBlock", "CrossDecoderLayer"])
def test_a_wrong_answer_is_judged_in_two_seconds_of_computing(name):
    judge(answer_source("rms_norm"), ["rms_norm"])  # what torch loads at its first calls
    text = answer_source(name).replace("eps=1e-6", "eps=3e-4").replace("nn.ReLU()", "nn.ELU()")
    start = time.process_time()
    (verdict,) = judge(text, [name])
    assert not verdict.right
    assert time.process_time() - start < 4  # what it takes when nothing is known, is less than 2


def test_try_works_behind_autograd_in_a_thread_and_after_a_compiler(tmp_path):
    torch.ones(3, requires_grad=True).sum().backward()
    mine, found = tmp_path / "mine.py", []
    mine.write_text(answer_source("ModernBlock"))
    names = ["ModernBlock"]
    thread = threading.Thread(target=lambda: found.extend(try_file(str(mine), names)[0]))
    thread.start()
    thread.join()
    assert [verdict.right for verdict in found] == [True]


def test_a_warm_child_judges_without_importing_torch_anew():
    """The seconds from the request to the verdict, without those of the import."""
    source = Source(answer_source("rms_norm"), "mine.py")
    with Child(WORKER) as warm:
        list(Trial(source, ["rms_norm"]).verdicts())  # as long as the import takes
        start = time.perf_counter()
        verdicts = list(Trial(source, ["rms_norm"]).verdicts(warm))
        waited = time.perf_counter() - start
    start = time.perf_counter()
    list(Trial(source, ["rms_norm"]).verdicts())
    assert [v.right for v in verdicts] == [True] and waited < time.perf_counter() - start


def test_breakpoint_works_with_debug(tmp_path):
    mine = tmp_path / "mine.py"
    text = answer_source("swiglu").replace("    hidden =", "    breakpoint()\n    hidden =")
    mine.write_text(text)
    command = [
        sys.executable,
        CODE / "practice.py",
        "try",
        mine,
        "--debug",
        "--progress",
        tmp_path / "p",
    ]
    done = subprocess.run(
        command, input="p 6 * 7\nq\n", capture_output=True, text=True, check=False
    )
    assert "42" in done.stdout and "(Pdb)" in done.stdout
