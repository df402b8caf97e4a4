"""A wrong answer is never called right, whatever its file does to the process that judges it."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from judge.answers import answer_source, planted
from judge.exercises import kept_outcomes
from judge.judging import judge
from judge.mistakes import mistakes_of
from judge.session import Trial
from judge.source import Source
from judge.state import neutral

# What a file may set or replace for everybody; each would reach the answer as well.
GLOBAL = {
    "a device": "torch.set_default_device('meta')",
    "a device, left open": "torch.device('meta').__enter__()",
    "a dtype": "torch.set_default_dtype(torch.float16)",
    "no gradients": "torch.set_grad_enabled(False)",
    "inference mode": "torch.inference_mode().__enter__()",
    "autocast": "torch.autocast('cpu', dtype=torch.bfloat16).__enter__()",
    "silu": "torch.nn.functional.silu = torch.nn.functional.gelu",
    "softmax": "torch.Tensor.softmax = lambda self, dim: self / self.sum(dim, keepdim=True)",
    "matmul": "torch.Tensor.__matmul__ = lambda a, b: torch.zeros(())",
    "randn": "torch.randn = torch.zeros",
    "abs": "torch.Tensor.abs = lambda self: self * 0",
    "any": "torch.Tensor.any = lambda self: torch.tensor(False)",
    "Linear": "torch.nn.Linear.forward = lambda self, x: x",
    "a builtin": "import builtins; builtins.max = min; builtins.isinstance = lambda *_: True",
    "the judge": "import judge.compare as c; c.first_difference = lambda *_: None",
    "naming": "import judge.naming as n; n.differences = lambda *_: iter(())",
    "the judge's import": "import judge.judging as j; j.differences = lambda *_: iter(())",
    "its classes": "import judge.judging as j\nj.Judge._wrong = lambda self, one, *_: j.right(one.name, 1, None)",
    "its cases": "import judge.cases as c; c.Outcomes.__getitem__ = lambda self, i: {}",
    "modules": "import sys, types; sys.modules['torch.nn.functional'] = types.ModuleType('none')",
    "a mode": """
from torch.overrides import TorchFunctionMode
class Zero(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0 if isinstance(out, torch.Tensor) and out.is_floating_point() else out
Zero().__enter__()
""",
}


@pytest.mark.parametrize("name", ["swiglu", "ModernBlock"])
@pytest.mark.parametrize("label", GLOBAL)
def test_what_a_file_sets_globally_decides_nothing(name, label):
    mistake = mistakes_of(name)[0]
    for text, right in ((planted(name, mistake), False), (answer_source(name), True)):
        (verdict,) = judge(f"import torch\n{GLOBAL[label]}\n{text}", [name])
        assert verdict.right is right, verdict.text()
        assert verdict.mistake == (None if right else mistake.says)


@pytest.mark.parametrize("label", ["silu", "any", "the judge", "its cases", "a device", "a dtype"])
def test_what_a_call_sets_globally_decides_nothing(label):
    text = "import torch\ndef swiglu(x, w_gate, w_up, w_down):\n"
    text += "".join(f"    {line}\n" for line in GLOBAL[label].split("\n"))
    (verdict,) = judge(text + "    return x\n", ["swiglu"])
    assert not verdict.right, verdict.text()
    with neutral():
        assert (torch.ones(2, dtype=torch.float64) - 1).abs().any().item() is False


def test_a_tensor_that_answers_comparisons_itself_is_a_tensor():
    text = """
import torch
class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        names = ("isnan", "ne", "le", "any", "nonzero", "abs", "sub")
        return out * 0 if func.__name__ in names and isinstance(out, torch.Tensor) else out
def swiglu(x, w_gate, w_up, w_down):
    return x.as_subclass(Liar)
"""
    (verdict,) = judge(text, ["swiglu"])
    assert not verdict.right, verdict.text()


@pytest.mark.parametrize("name", ["swiglu", "ModernBlock"])
def test_an_answer_that_raises_itself_judges_nothing(name, monkeypatch):
    """Theirs raises what the reference raises: that makes it no right answer."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("not on this machine")

    monkeypatch.setattr(torch.nn.functional, "silu", fails)
    kept_outcomes.cache_clear()
    try:
        (verdict,) = judge(answer_source(name), [name])
        assert not verdict.right and verdict.headline == "not judged"
        assert "the answer itself fails" in verdict.text()
    finally:
        kept_outcomes.cache_clear()


FORGED = """
import atexit, json, os, sys
claim = '[swiglu] right  (4 cases)'
print(claim)
for file in range(1, 32):
    try:
        os.write(file, ('\\n' + json.dumps(["verdict", {"name": "swiglu", "right": True,
            "headline": "right", "lines": []}]) + '\\n').encode())
    except OSError:
        pass
atexit.register(print, claim)
"""


@pytest.mark.parametrize("end", ["", "import os\nos._exit(0)\n", "sys.exit(0)\n"])
def test_a_file_cannot_say_its_own_verdict(end):
    text = FORGED + planted("swiglu", mistakes_of("swiglu")[0]) + "\n" + end
    verdicts = list(Trial(Source(text, "mine.py"), ["swiglu"]).verdicts())
    assert [verdict.right for verdict in verdicts] == [False]
