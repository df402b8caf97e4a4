"""Files that do not parse, raise, print, hang or crash get a clear verdict, and nothing else."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import practice
from judge.judging import judge
from judge.process import Limits
from judge.session import Trial
from judge.source import Source
from judge.templates import blank
from judge.verdict import Verdict
from whiteboard import blocks

WHITEBOARD = Path(blocks.__file__).read_text(encoding="utf-8")

# =============================================================================================
# Broken files
# =============================================================================================

RMS = "import torch\ndef rms_norm(x, weight, eps=1e-6):\n"
RIGHT_RMS = "    return (x.double() * (x.double().square().mean(-1, True) + eps).rsqrt() * weight.double()).to(x.dtype)\n"
BLOCK = WHITEBOARD

BROKEN = {
    "syntax": ("def rms_norm(x, weight, eps=1e-6)\n    return x\n", ["SyntaxError", "line 1"]),
    "raises when run": (RMS + RIGHT_RMS + "raise RuntimeError('not today')\n", ["RuntimeError: not today", "line 4"]),
    "imports what is not there": ("import nosuchmodule\n" + RMS + RIGHT_RMS, ["ModuleNotFoundError", "nosuchmodule"]),
    "exits": (RMS + RIGHT_RMS + "import sys\nsys.exit(0)\n", ["exits"]),
    "exits in the function": (RMS + "    raise SystemExit(0)\n", ["SystemExit"]),
    "ends its process": (RMS + "    import os\n    os._exit(0)\n", ["ends the process"]),
    "crashes its process": (RMS + "    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n", ["ends the process", "signal 11"]),
    "no return": (RMS + "    y = x * weight\n", ["return"]),
    "raises in the function": (RMS + "    return x @ weight[:, :2]\n", ["IndexError", "line 3", "rms_norm"]),
    "wrong shape": (RMS + "    return (x * weight).mean(-1)\n", ["shape", "[..., d]|\\[2, 5\\]|\\[.*d\\]"]),
    "in place": (RMS + "    x *= (x.square().mean(-1, keepdim=True) + eps).rsqrt()\n    return x * weight\n", ["in place"]),
    "moved generator": (RMS + "    torch.rand(1)\n" + RIGHT_RMS, ["generator"]),
    "dropout": (RMS + RIGHT_RMS.replace("return ", "return torch.nn.functional.dropout(").rstrip() + ", 0.1)\n", ["generator|dropout"]),
    "another dtype": (RMS + RIGHT_RMS.replace(".to(x.dtype)", ".float()"), ["float32"]),
    "another device": (RMS + RIGHT_RMS.rstrip() + ".to('meta')\n", ["meta"]),
    "no tensor": (RMS + "    return [1.0]\n", ["list"]),
    "no gradient": (RMS + RIGHT_RMS.rstrip() + ".detach()\n", ["gradient"]),
    "endless loop": (RMS + "    while True:\n        pass\n", ["does not come to an end"]),
    "endless loop when run": (RMS + RIGHT_RMS + "while True:\n    pass\n", ["does not come to an end"]),
    "swallows everything in a loop": (RMS + "    while True:\n        try:\n            while True:\n                pass\n        except BaseException:\n            pass\n", ["does not come to an end"]),
    "endless printing": (RMS + "    while True:\n        print('spam' * 100)\n", ["does not come to an end"]),
    "deep recursion": (RMS + "    return rms_norm(x, weight, eps)\n", ["RecursionError"]),
    "not a function": ("rms_norm = 3\n", ["must be a function"]),
    "wrong arguments": ("def rms_norm(x):\n    return x\n", ["TypeError"]),
    "empty": ("", ["no exercise"]),
    "asks for input": (RMS + "    input()\n" + RIGHT_RMS, ["EOFError"]),
    "a template left as it is": (blank(["rms_norm"]), ["return"]),
    "an unused parameter": (
        BLOCK.replace("rms_norm(x, self.norm2)", "rms_norm(x, self.norm1)"),
        ["norm|gradient"],
    ),
    "not a module": ("class ModernBlock:\n    def __init__(self, *sizes):\n        pass\n", ["nn.Module"]),
    "no super().__init__()": (
        "from torch import nn\nclass ModernBlock(nn.Module):\n    def __init__(self, *sizes):\n        self.a = nn.Linear(2, 2)\n",
        ["super|__init__"],
    ),
    "y without cache": (
        BLOCK.replace("return x + self.ffn(rms_norm(x, self.norm2)), cache", "return x + self.ffn(rms_norm(x, self.norm2))"),
        ["cache"],
    ),
    "layers in a plain list": (
        BLOCK.replace("self.experts = nn.ModuleList(SwiGLU(d_model, d_ff) for _ in range(n_experts))\n\n    def forward(self, x):\n        tokens = x.flatten(0, 1)  # (N, d)\n        probs = self.router(tokens).softmax(dim=-1)  # (N, E)\n        weight,", "self.experts = [SwiGLU(d_model, d_ff) for _ in range(n_experts)]\n\n    def forward(self, x):\n        tokens = x.flatten(0, 1)  # (N, d)\n        probs = self.router(tokens).softmax(dim=-1)  # (N, E)\n        weight,"),
        ["not recognised", "30 numbers: router"],
    ),
}  # fmt: skip
NAMED = {
    "an unused parameter": "ModernBlock",
    "y without cache": "ModernBlock",
    "layers in a plain list": "SwitchFFN",
}
ENDLESS = [label for label, (_, words) in BROKEN.items() if words == ["does not come to an end"]]
PROCESS = [*ENDLESS, "ends its process", "crashes its process", "asks for input"]
LIMITS = Limits(computing=0.5, clock=10.0)


def judged(label: str, text: str, mine: Path) -> list[Verdict]:
    """In a process where the file would end or hold this one, else here, where it is faster."""
    mine.write_text(text)
    names = [NAMED[label]] if label in NAMED else None
    if label in PROCESS:
        return list(Trial(Source(text, str(mine)), names, limits=LIMITS).verdicts())
    return judge(text, names, str(mine))


@pytest.mark.parametrize("label", BROKEN)
def test_a_broken_file_gets_a_clear_verdict(tmp_path, label):
    text, words = BROKEN[label]
    verdicts = judged(label, text, tmp_path / "mine.py")
    assert verdicts and not any(verdict.right for verdict in verdicts)
    said = "\n".join(verdict.text() for verdict in verdicts)
    for word in words:
        assert re.search(word, said), said
    assert all(len(verdict.lines) <= 8 for verdict in verdicts), said
    assert "judge/" not in said.replace(str(tmp_path), ""), said  # their frames only


def test_what_a_file_prints_is_kept_apart_from_the_verdict(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "print('[swiglu] right  (99 cases)')\n"
        + RMS
        + "    print('[rms_norm] right')\n    return x\n"
    )
    progress = tmp_path / "progress.json"
    assert practice.main(["try", str(mine), "--progress", str(progress)]) == 1
    out = capsys.readouterr().out
    verdicts = [line for line in out.splitlines() if line.startswith("[")]
    assert len(verdicts) == 1 and verdicts[0].startswith("[rms_norm] wrong")
    assert "  | [swiglu] right" in out
    assert "swiglu" not in progress.read_text(encoding="utf-8")


def test_escape_codes_that_a_file_prints_do_not_reach_the_terminal(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text("print('\\x1b[2J\\r[rms_norm] right')\n" + RMS + "    return x\n")
    practice.main(["try", str(mine), "--progress", str(tmp_path / "p.json")])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out
