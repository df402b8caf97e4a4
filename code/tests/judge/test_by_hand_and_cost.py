"""What the cases of the newer exercises must see beside values: autograd, cost, tolerances.

The planted mistakes and the right answers in other styles are those of test_practice.
"""

import functools
import re
from pathlib import Path

import practice_wrong
import pytest
import torch

from judge.answers import answer_source, planted
from judge.catalogue import TASKS
from judge.exercises import answer_outcomes
from judge.gradients import CASES as BY_HAND
from judge.judging import judge
from judge.mistakes import mistakes_of, read_mistakes
from judge.state import neutral
from judge.verdict import UNKNOWN, Verdict

NEWER = [task.name for task in TASKS.values() if task.level > 3]
HARD = {
    "AdamW": "eps is added before the bias correction",
    "contrastive_loss": "one direction is left out",
    "beam_search": "ended beams are set aside and no longer compete",
    "bpe_train": "a merge merges again with what it has made",
    "linear_backward": "db is not summed over the batch",
    "layer_norm_backward": "the mean term of LayerNorm's gradient is missing",
}


def verdict_on(name: str, text: str) -> Verdict:
    """With the lines of --case, which must not get in its way."""
    (verdict,) = judge(text, [name], case=True)
    assert verdict.headline != "not judged", verdict.text()
    return verdict


def test_there_are_210_mistakes_and_the_hard_ones_are_among_them():
    assert len(NEWER) == 26
    assert sum(len(mistakes_of(name)) for name in NEWER) >= 210
    for name, says in HARD.items():
        (mistake,) = [one for one in mistakes_of(name) if one.says.startswith(says)]
        assert verdict_on(name, planted(name, mistake)).mistake == mistake.says


@pytest.mark.parametrize("name", NEWER)
def test_no_two_mistakes_give_one_function(name):
    with neutral():
        found = [(one.says, answer_outcomes(name, one)) for one in mistakes_of(name)]
        cases = answer_outcomes(name).cases
        keys = {}
        for says, outcomes in found:
            key = str([results_in_words(outcomes[i]) for i in range(len(cases))])
            assert key not in keys, f"{says} AND {keys.get(key)}"
            keys[key] = says


def results_in_words(outcome: dict) -> list:
    """The numbers of a case, rounded, with their dtype."""
    words = []
    for key, value in outcome.items():
        shown = str(value)
        if isinstance(value, torch.Tensor):
            numbers = value.detach().double().flatten().tolist()
            shown = f"{value.dtype} {[f'{x:.5g}' for x in numbers]}"
        words.append((key, shown))
    return words


@pytest.mark.parametrize("name", NEWER)
def test_what_the_cases_call_true_is_true_of_the_answer(name):
    with neutral():
        outcomes = answer_outcomes(name)
        for i in range(len(outcomes.cases)):
            for key, value in outcomes[i].items():
                assert not (key.startswith("whether") and value is not True), key


AUTOGRAD = {
    "torch.autograd.grad": """
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return torch.autograd.grad(F.rms_norm(x, weight.shape, weight, eps), x, dy)[0], weight""",
    "backward": """
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        (F.rms_norm(x, weight.shape, weight, eps) * dy).sum().backward()
        return x.grad, weight""",
    "torch.func.vjp": """
    _, back = torch.func.vjp(lambda x, w: F.rms_norm(x, w.shape, w, eps), x, weight)
    return back(dy)""",
    "torch.func.jacfwd": """
    jacobian = torch.func.jacfwd(lambda w: F.rms_norm(x, w.shape, w, eps))(weight)
    return x, jacobian.sum()""",
    "an imported name": """
    from torch.autograd import grad
    x = x.clone().requires_grad_()
    return grad(F.rms_norm(x, weight.shape, weight, eps), x, dy)[0], weight""",
    "what it swallows": """
    try:
        x = x.clone().requires_grad_()
        (F.rms_norm(x, weight.shape, weight, eps) * dy).sum().backward()
    except Exception:
        pass
    return RIGHT(x.detach(), weight, dy, eps)""",
}


@pytest.mark.parametrize("how", AUTOGRAD)
def test_autograd_is_refused_in_words(how):
    right = answer_source("rms_norm_backward").replace("def rms_norm_backward", "def RIGHT")
    text = f"import torch.nn.functional as F\n{right}\n\n"
    text += f"def rms_norm_backward(x, weight, dy, eps=1e-6):{AUTOGRAD[how]}\n"
    verdict = verdict_on("rms_norm_backward", text)
    assert not verdict.right
    assert "it uses torch's autograd; the gradient is asked for by hand" in verdict.text()


def test_a_ready_gradient_of_aten_is_refused_in_words():
    text = """import torch
def layer_norm_backward(x, weight, dy, eps=1e-5):
    shape = [x.shape[-1]]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, weight, eps)
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, weight, [True, True, True])
"""
    verdict = verdict_on("layer_norm_backward", text)
    assert not verdict.right and "native_layer_norm_backward" in verdict.text()


def test_the_forbidden_calls_work_again_afterwards():
    verdict_on("rms_norm_backward", answer_source("rms_norm_backward"))
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("name", [name for name in BY_HAND if name not in ("Value",)])
def test_gradients_are_judged_to_1e9(name):
    """An answer computed in float32 is near, and not right."""
    text = answer_source(name)
    first = re.search(rf"def {name}\((.*?)\):", text)[1]
    names = [part.split("=")[0].strip() for part in first.split(",")]
    floats = [n for n in names if n not in ("targets", "mask", "block", "eps")]
    text += f"\n\nexact = {name}\n\n\ndef {name}({first}):\n"
    text += "".join(f"    {n} = {n}.float()\n" for n in floats)
    text += f"    return tuple(x.double() for x in exact({', '.join(names)}))\n"
    assert not verdict_on(name, text).right


# Of each cost a right value that costs too much, and what is said of it.
COSTLY = {
    "flash_backward": ("all weights", "T, S"),
    "accumulate": ("the graphs of all batches", "graph"),
    "Value": ("backward walks along every path", "path"),
    "WindowAttention": ("the cache keeps the whole text", "cache"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_too_much_is_refused_in_words(name):
    says, word = COSTLY[name]
    (mistake,) = [one for one in mistakes_of(name) if one.says.startswith(says)]
    verdict = verdict_on(name, planted(name, mistake))
    assert not verdict.right and word in verdict.lines[0]
    assert verdict.headline.startswith("wrong  (1 of") or name == "accumulate", verdict.headline


def test_numpy_is_taken_and_said():
    text = """import numpy as np
def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    x = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return np.logaddexp(0, -x).mean()
"""
    verdict = verdict_on("dpo_loss", text)
    assert verdict.right and "NumPy" in verdict.text()
    wrong = verdict_on("dpo_loss", text.replace(".mean()", ".sum()"))
    assert wrong.mistake == "it is the sum; the mean was asked for"


def test_numpy_inside_a_class_of_numbers_is_no_array_answer():
    text = answer_source("Value").replace("import math", "import numpy as math")
    assert verdict_on("Value", text).right


def test_a_name_that_a_file_only_imports_is_not_judged():
    text = "from torch.optim import AdamW\nfrom torch.nn.functional import dropout\n"
    names = [verdict.name for verdict in judge(text + answer_source("gae"))]
    assert names == ["gae"]


TOLERATED = {  # what two right people do apart: each is right
    "clip_grad_norm": [("g.mul_(max_norm / norm)", "g.mul_(max_norm / (norm + 1e-6))")],
    "AdamW": [("p.grad = None", "p.grad = p.grad if p.grad is None else p.grad * 0")],
    "quantize_int8": [("to(torch.int8), scale", "to(torch.int8), divisor")],
    "Value": [("float(self.data > 0)", "float(self.data >= 0)")],
    "alibi": [("[:, None, None] * distance", "[:, None, None] * distance.clamp(max=0)")],
    "left_pad": [("positions >= 0,", "(positions >= 0).long(),")],
    "WindowAttention": [("t[:, :, -self.window :]", "t[:, :, max(0, t.shape[2] - self.window) :]")],
    "dropout": [("        return x\n", "        return x.clone()\n")],
}


@pytest.mark.parametrize("name", TOLERATED)
def test_what_is_settled_as_free_is_right(name):
    for old, new in TOLERATED[name]:
        text = answer_source(name)
        assert text.count(old) == 1
        verdict = verdict_on(name, text.replace(old, new))
        assert verdict.right, verdict.text()


# Slips in the styles of practice_answers, written down before they were judged.
OTHERS = Path(__file__).with_name("wrong_in_other_styles.txt").read_text(encoding="utf-8")
SECTIONS = dict(
    part.split("\n", 1) for part in re.split(r"^# ", OTHERS, flags=re.M)[1:]
)  # "explicit gae": its slips


@pytest.mark.parametrize("section", SECTIONS)
def test_slips_in_other_styles_are_refused(section):
    for says, verdict in judged_slips(section):
        assert not verdict.right, says


def test_most_slips_in_other_styles_are_named():
    found = [verdict for section in SECTIONS for _, verdict in judged_slips(section)]
    named = [v for v in found if v.mistake or not v.lines[0].startswith((UNKNOWN, "case: "))]
    assert len(found) >= 115
    assert len(named) >= 0.85 * len(found), f"{len(named)} of {len(found)}"


@functools.cache
def judged_slips(section: str) -> list[tuple[str, Verdict]]:
    """What each slip is, and what the judge says of the definition with it."""
    style, name = section.split(" ")
    found = []
    for one in read_mistakes(SECTIONS[section]):
        wrong = practice_wrong.Wrong(name, one.says, style, one.old, one.new)
        found.append((one.says, verdict_on(name, practice_wrong.text_of(wrong))))
    return found
