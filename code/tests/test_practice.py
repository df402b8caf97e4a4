"""The judge is judged: planted faults, right and wrong answers in other styles, broken files.

python3 code/tests/test_practice.py --write    measures the two tables of the notes anew
"""

import ast
import functools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import practice_wrong
import pytest
import torch

import practice
from practice import EXERCISES, FAULTS
from whiteboard import blocks

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

NOTES = Path(practice.__file__).parents[1] / "transformer_block_tutorial.md"
STYLES = sorted(path.stem.removeprefix("right_") for path in practice_wrong.ANSWERS.glob("right_*"))
WHITEBOARD = Path(blocks.__file__).read_text(encoding="utf-8")


def style(name: str) -> str:
    """The text of right answers in one style."""
    return (practice_wrong.ANSWERS / f"right_{name}.py").read_text(encoding="utf-8")


def defines(text: str) -> list[str]:
    """The exercises that a text defines."""
    defined = {getattr(node, "name", "") for node in ast.parse(text).body}
    return [name for name in EXERCISES if name in defined]


# =============================================================================================
# The two tables, measured
# =============================================================================================


@functools.cache
def judged_faults(name: str) -> list[tuple[str, practice.Verdict]]:
    """What each planted fault is, and what the judge says of the text with it."""
    texts = [(fault.says, practice.planted(name, fault)) for fault in FAULTS[name]]
    return [(says, practice.judge(text, [name])[0]) for says, text in texts]


@functools.cache
def judged_style(name: str) -> dict[str, practice.Verdict]:
    """The verdicts on all answers of a style."""
    return {verdict.name: verdict for verdict in practice.judge(style(name))}


def fault_table(judged: Callable = judged_faults) -> str:
    """Planted faults, those rejected, those named as themselves, by exercise."""
    rows, sums = [], [0, 0, 0]
    for name in EXERCISES:
        found = judged(name)
        rejected = [verdict for _, verdict in found if not verdict.right]
        named = [says for says, verdict in found if verdict.mistake == says]
        counts = [len(found), len(rejected), len(named)]
        sums = [a + b for a, b in zip(sums, counts)]
        rows.append(f"| `{name}` | {counts[0]} | {counts[1]} | {counts[2]} |")
    head = "| Exercise | Faults planted | Rejected | Named as themselves |\n|:--|--:|--:|--:|"
    return "\n".join([head, *rows, "| **all** | {} | {} | {} |".format(*sums)])


def style_table(judged: Callable = judged_style) -> str:
    """Right answers in other styles, and those accepted, by exercise."""
    rows, sums = [], [0, 0]
    for name in EXERCISES:
        found = [judged(one)[name] for one in STYLES if name in judged(one)]
        counts = [len(found), sum(verdict.right for verdict in found)]
        sums = [a + b for a, b in zip(sums, counts)]
        rows.append(f"| `{name}` | {counts[0]} | {counts[1]} |")
    head = "| Exercise | Right answers in other styles | Accepted |\n|:--|--:|--:|"
    return "\n".join([head, *rows, "| **all** | {} | {} |".format(*sums)])


def all_named(name: str) -> list[tuple[str, practice.Verdict]]:
    """The faults as judged where test_every_planted_fault_is_rejected_and_named_as_itself holds."""
    return [(f.says, practice.Verdict(name, False, "wrong", (), f.says)) for f in FAULTS[name]]


def all_accepted(name: str) -> dict[str, practice.Verdict]:
    """The style as judged where test_right_answers_in_another_style_are_accepted holds."""
    return {one: practice.Verdict(one, True, "right") for one in defines(style(name))}


TABLES = {"faults": fault_table, "styles": style_table}


def table_in(notes: str, name: str) -> list[str]:
    """What stands between the marks of a table."""
    return re.findall(rf"<!-- judge: {name} -->\n(.*?)\n*<!-- /judge -->", notes, re.S)


def write_tables() -> None:
    """Measure both tables and put them into the notes."""
    notes = NOTES.read_text(encoding="utf-8")
    for name, measured in TABLES.items():
        pattern = rf"(<!-- judge: {name} -->\n).*?(<!-- /judge -->)"
        table = f"\n{measured()}\n\n"
        notes = re.sub(pattern, lambda m, t=table: m[1] + t + m[2], notes, flags=re.S)
    NOTES.write_text(notes, encoding="utf-8")


# =============================================================================================
# Faults
# =============================================================================================


def test_there_are_enough_faults_and_no_two_say_the_same():
    assert all(len(FAULTS[name]) >= 8 for name in EXERCISES)
    assert sum(map(len, FAULTS.values())) >= 200
    for name, faults in FAULTS.items():
        assert len({fault.says for fault in faults}) == len(faults), name
        assert not [fault.says for fault in faults if fault.says.endswith(".")], name


@pytest.mark.parametrize("name", EXERCISES)
def test_every_planted_fault_is_rejected_and_named_as_itself(name):
    found = judged_faults(name)
    assert not [says for says, verdict in found if verdict.right]
    assert not [(says, v.mistake) for says, v in found if v.mistake != says]
    for says, verdict in found:  # the mistake, the case, the difference, where to read: eight lines
        text = "\n".join(verdict.lines)
        assert len(verdict.lines) <= 8, text
        assert says in text.replace("\n", " ")
        assert re.search(r"^case: ", text, re.M), text
        assert re.search(r"^see \[D\d\d\] and §\d+(\.\d+)? of the notes$", text, re.M), text


def test_a_mistake_in_a_part_points_to_the_part():
    tiled = next(fault for fault in FAULTS["attention"] if "(tiled)" in fault.says)
    for name in ("attention", "SelfAttention", "ModernBlock"):
        (verdict,) = practice.judge(practice.planted(name, tiled), [name])
        assert verdict.lines[-1] == "see [D05] and §5.2 of the notes"
    own = FAULTS["ModernBlock"][0]
    (verdict,) = practice.judge(practice.planted("ModernBlock", own), ["ModernBlock"])
    assert verdict.lines[-1] == f"see [D08] and {EXERCISES['ModernBlock'].section} of the notes"


def test_two_faults_at_once_are_both_named():
    for name, first, second in (
        ("attention", "the scores are not scaled", "query head i reads KV head i mod G"),
        ("rms_norm", "eps is missing", "the mean is subtracted"),
        ("SelfAttention", "positions restart", "the output projection is not used"),
    ):
        pair = [next(f for f in FAULTS[name] if f.says.startswith(s)) for s in (first, second)]
        (verdict,) = practice.judge(practice.planted(name, *pair), [name])
        assert not verdict.right
        assert verdict.mistake is not None, (name, verdict.lines)
        assert first in verdict.mistake and second in verdict.mistake


def test_a_mistake_nobody_planted_is_no_known_mistake():
    text = practice.answer_source("rms_norm").replace("wide.square()", "wide.abs().pow(1.7)")
    (verdict,) = practice.judge(text, ["rms_norm"])
    assert not verdict.right and verdict.mistake is None
    assert verdict.lines[0] == "no known mistake"


# =============================================================================================
# Right answers
# =============================================================================================


@pytest.mark.parametrize("name", STYLES)
def test_right_answers_in_another_style_are_accepted(name):
    refused = [v.text() for v in judged_style(name).values() if not v.right]
    assert not refused, "\n".join(refused)
    assert list(judged_style(name)) == defines(style(name))


def test_there_are_three_styles_an_exercise_or_more():
    counts = {name: sum(name in defines(style(one)) for one in STYLES) for name in EXERCISES}
    assert min(counts.values()) >= 3, counts


def test_the_whiteboard_is_accepted_in_ten_seconds_of_computing():
    start = time.process_time()
    verdicts = practice.judge(WHITEBOARD)
    assert [v.name for v in verdicts if not v.right] == []
    assert {v.name for v in verdicts} == set(EXERCISES)
    assert time.process_time() - start < 10


TAKEN = set(dir(torch.Tensor)) | set(dir(torch.nn.MultiheadAttention(4, 1)))
TAKEN |= set(dir(torch.nn.Linear(2, 2))) | set(dir(torch.nn.TransformerEncoderLayer(4, 1)))


MODULES = {"torch", "nn", "F", "torch.nn", "torch.nn.functional", "math", "copy"}


def disguised(text: str, seed: int) -> str:
    """The text with other names for its attributes, and what __init__ makes in another order."""
    tree, rng = ast.parse(text), random.Random(seed)
    stores = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    words = ["alpha", "beta", "moon", "river", "left", "right", "first", "zeta", "iron", "wave"]
    names = {}
    for attr in sorted(set(stores) - TAKEN):
        names[attr] = f"{rng.choice(words)}_{len(names)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in MODULES:
            node.attr = names.get(node.attr, node.attr)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            shuffle_layers(node, rng)
    return ast.unparse(tree)


def shuffle_layers(init: ast.FunctionDef, rng: random.Random) -> None:
    """Let the assignments to self that read nothing of self or of locals change places."""
    given = {argument.arg for argument in init.args.args}
    local = {
        node.id
        for node in ast.walk(init)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }

    def moves(statement: ast.stmt) -> bool:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return False
        if not isinstance(statement.targets[0], ast.Attribute):
            return False
        read = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
        return not read & (local - given) and "self" not in read

    places = [i for i, statement in enumerate(init.body) if moves(statement)]
    moved = [init.body[i] for i in places]
    rng.shuffle(moved)
    for i, statement in zip(places, moved):
        init.body[i] = statement


@pytest.mark.parametrize("seed", [1, 2])
def test_names_and_order_of_layers_do_not_matter(seed):
    text = disguised(WHITEBOARD, seed)
    refused = [v.text() for v in practice.judge(text) if not v.right]
    assert not refused, text + "\n".join(refused)


@pytest.mark.parametrize("name", ["fused", "tuples"])
def test_names_and_order_of_layers_do_not_matter_in_other_styles(name):
    text = disguised(style(name), 3)
    refused = [v.text() for v in practice.judge(text) if not v.right]
    assert not refused, text + "\n".join(refused)


# =============================================================================================
# Wrong answers
# =============================================================================================


@pytest.mark.parametrize("name", sorted({wrong.name for wrong in practice_wrong.WRONG}))
def test_wrong_answers_in_other_styles_are_refused(name, monkeypatch):
    monkeypatch.setattr(practice, "known_faults", lambda _: ())  # to refuse needs no name
    monkeypatch.setattr(practice, "pairs", lambda _: ())
    accepted = [
        (wrong.style, wrong.says)
        for wrong in practice_wrong.WRONG
        if wrong.name == name and practice.judge(practice_wrong.text_of(wrong), [name])[0].right
    ]
    assert not accepted


@pytest.mark.parametrize(
    ("one", "part", "name"),
    [
        ("einsum", "attention", "ModernBlock"),
        ("fused", "rotate", "ModernBlock"),
        ("buffers", "attention", "GPT2Block"),
        ("buffers", "attention", "CrossDecoderLayer"),
        ("tuples", "attention", "LatentAttention"),
        ("heads", "rotate", "ParallelBlock"),
    ],
)
def test_a_wrong_part_is_wrong_in_every_packing(one, part, name, monkeypatch):
    """Faults of a part, planted in what the classes of a style use."""
    monkeypatch.setattr(practice, "known_faults", lambda _: ())
    monkeypatch.setattr(practice, "pairs", lambda _: ())
    seen = [f for f in FAULTS[part] if not re.match(UNSEEN_IN_CLASSES, f.says)]
    texts = {f.says: style(one) + "\n\n" + practice.planted(part, f) for f in seen[::3]}
    assert len(texts) >= 5
    assert not [says for says, text in texts.items() if practice.judge(text, [name])[0].right]


# Of the parts' faults those that no class can show: what its calls do not use.
UNSEEN_IN_CLASSES = (
    "a query without keys|base is fixed|every query head reads KV head 0|the KV heads are averaged"
    "|the groups are read|query head i|scores are divided by sqrt\\(d_v\\)|the positions are ignored"
    "|positions count from 1|the output stays|the mask is ignored|it is causal by itself"
    "|scores are divided by sqrt\\(8\\)"
)

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
    "a template left as it is": (practice.blank(["rms_norm"]), ["return"]),
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
SLOW = [label for label, (_, words) in BROKEN.items() if words == ["does not come to an end"]]


@pytest.mark.parametrize("label", BROKEN)
def test_a_broken_file_gets_a_clear_verdict(tmp_path, label, monkeypatch):
    text, words = BROKEN[label]
    if label in SLOW:
        monkeypatch.setattr(practice, "SECONDS", 0.5)
        monkeypatch.setattr(practice, "PATIENCE", 1)
    mine = tmp_path / "mine.py"
    mine.write_text(text)
    verdicts, _ = practice.try_file(str(mine), [NAMED[label]] if label in NAMED else None)
    assert verdicts and not any(verdict.right for verdict in verdicts)
    said = "\n".join(verdict.text() for verdict in verdicts)
    for word in words:
        assert re.search(word, said), said
    assert all(len(verdict.lines) <= 8 for verdict in verdicts), said
    assert "practice.py" not in said.replace(str(tmp_path), ""), said  # their frames only


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
    assert not progress.exists()


def test_escape_codes_that_a_file_prints_do_not_reach_the_terminal(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text("print('\\x1b[2J\\r[rms_norm] right')\n" + RMS + "    return x\n")
    practice.main(["try", str(mine), "--progress", str(tmp_path / "p.json")])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\r" not in out


# =============================================================================================
# Never a false right
# =============================================================================================

GLOBALS = [
    "torch.set_default_device('meta')",
    "torch.set_default_dtype(torch.float16)",
    "torch.set_grad_enabled(False)",
]


@pytest.mark.parametrize("line", GLOBALS)
@pytest.mark.parametrize("name", ["swiglu", "ModernBlock"])
def test_what_a_file_sets_globally_decides_nothing(name, line):
    fault = FAULTS[name][0]
    for text, right in (
        (practice.planted(name, fault), False),
        (practice.answer_source(name), True),
    ):
        (verdict,) = practice.judge(f"import torch\n{line}\n{text}", [name])
        assert verdict.right is right, verdict.text()
        assert verdict.mistake == (None if right else fault.says)


@pytest.mark.parametrize("name", ["swiglu", "ModernBlock"])
def test_an_answer_that_raises_itself_judges_nothing(name, monkeypatch):
    """Theirs raises what the reference raises: that makes it no right answer."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("not on this machine")

    monkeypatch.setattr(torch.nn.functional, "silu", fails)
    practice.judged_known.cache_clear()
    practice.known_module.cache_clear()
    try:
        (verdict,) = practice.judge(practice.answer_source(name), [name])
        assert not verdict.right and verdict.headline == "not judged"
        assert "the answer itself fails" in verdict.text()
    finally:
        practice.judged_known.cache_clear()
        practice.known_module.cache_clear()


# =============================================================================================
# Command line
# =============================================================================================


@pytest.fixture
def command(tmp_path, capsys):
    """Runs practice.py in this process: status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = practice.main(
                [*map(str, arguments), "--progress", str(tmp_path / "progress.json")]
            )
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


def test_try_has_status_0_when_all_is_right_and_1_when_one_is_wrong(tmp_path, command):
    mine = tmp_path / "mine.py"
    mine.write_text(
        practice.answer_source("swiglu") + RMS.removeprefix("import torch\n") + RIGHT_RMS
    )
    status, out, _ = command("try", mine)
    assert status == 0 and out.count("right") == 2
    mine.write_text(mine.read_text().replace("F.silu", "F.gelu"))
    status, out, _ = command("try", mine)
    assert status == 1 and "[swiglu] wrong" in out and "[rms_norm] right" in out
    assert command("try", mine, "rms_norm")[0] == 0  # the one that is named
    status, out, _ = command("try", mine, "attention")
    assert status == 1 and "does not define attention" in out


@pytest.mark.parametrize(
    "arguments", [["try"], ["tyr", "x.py"], ["try", "x.py", "rmsnrom"], ["blank"], ["blank", "nothing"], ["fault", "rms_norm", "99"], ["try", "/nowhere/mine.py"]]
)  # fmt: skip
def test_a_wrong_call_has_status_2(command, arguments):
    status, out, err = command(*arguments)
    assert status == 2 and out == "" and "error" in err


def test_a_misspelt_exercise_is_answered_with_the_nearest(command):
    assert "rms_norm" in command("blank", "rmsnorm")[2] or command("blank", "rmsnorm")[0] == 0


@pytest.mark.parametrize("name", EXERCISES)
def test_blank_is_a_template_that_runs_and_gives_no_steps(command, name):
    status, out, _ = command("blank", name)
    assert status == 0
    node = next(n for n in ast.parse(out).body if getattr(n, "name", "") == name)
    assert ast.get_docstring(node)
    comments = [line for line in out.splitlines() if line.strip().startswith("#")]
    assert len(comments) <= 1  # the letters of the sizes
    practice.execute(out, "blank.py")
    answer = next(n for n in ast.parse(WHITEBOARD).body if getattr(n, "name", "") == name)
    for have, want in zip(functions_of(node), functions_of(answer)):
        assert (have.name, ast.unparse(have.args)) == (want.name, ast.unparse(want.args))


def functions_of(node: ast.AST) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]


def test_answer_prints_a_text_that_runs(command):
    status, out, _ = command("answer", "ModernBlock")
    assert status == 0 and out == practice.answer_source("ModernBlock")
    assert practice.judge(out, ["ModernBlock"])[0].right


def test_fault_shows_a_wrong_answer_and_reveal_says_which(command):
    for name, fault in (("attention", 1), ("ModernBlock", 3), ("sample", 5)):
        status, hidden, _ = command("fault", name, fault)
        assert status == 0
        says = FAULTS[name][fault - 1].says
        assert says not in hidden
        assert not practice.judge(hidden, [name])[0].right
        shown = command("fault", name, fault, "--reveal")[1]
        assert says in shown
        assert re.search(r"§\d", shown)
    assert command("fault")[0] == 0


def test_list_shows_three_levels_and_what_is_solved(tmp_path, command):
    before = command()[1]
    assert all(name in before for name in EXERCISES)
    assert len(re.findall(r"^level \d", before, re.M)) == 3 and "[x]" not in before
    mine = tmp_path / "mine.py"
    mine.write_text(practice.answer_source("swiglu"))
    assert command("try", mine)[0] == 0
    after = command("list")[1]
    assert re.search(r"\[x\] swiglu", after) and after.count("[x]") == 1
    json.loads((tmp_path / "progress.json").read_text())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"solved": 3}', '{"solved": {"nothing": 1}}'])
def test_a_damaged_progress_file_is_no_obstacle(tmp_path, command, content):
    (tmp_path / "progress.json").write_text(content)
    mine = tmp_path / "mine.py"
    mine.write_text(practice.answer_source("swiglu"))
    assert command("try", mine)[0] == 0
    assert command()[1].count("[x]") == 1


def test_a_run_that_cannot_write_progress_still_judges(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(practice.answer_source("swiglu"))
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "progress.json"
    assert practice.main(["try", str(mine), "--progress", str(nowhere)]) == 0
    assert "[swiglu] right" in capsys.readouterr().out


def test_watch_judges_again_when_the_file_is_saved(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(practice.answer_source("swiglu").replace("F.silu", "F.relu"))
    command = [sys.executable, practice.__file__, "watch", mine, "--progress", tmp_path / "p.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:  # fmt: skip
        try:
            for expected in ("[swiglu] wrong", "[swiglu] right"):
                while not (line := process.stdout.readline()).startswith("["):
                    assert line, "watch has ended"
                assert line.startswith(expected)
                mine.write_text(practice.answer_source("swiglu"))
        finally:
            process.kill()


def test_help_says_that_the_file_is_executed(command):
    assert "execute" in command("try", "--help")[1]


def test_progress_stands_in_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert practice.progress_file().parent == tmp_path
    monkeypatch.delenv("XDG_STATE_HOME")
    assert practice.progress_file().parent == Path.home() / ".local" / "state"


def test_cards_are_lines_of_three_fields_with_mathjax(command):
    status, out, _ = command("cards")
    assert status == 0
    rows = [line for line in out.splitlines() if not line.startswith("#")]
    assert len(rows) >= 30
    assert all(
        line.count("\t") == 2 and all(part.strip() for part in line.split("\t")) for line in rows
    )
    assert {line.split("\t")[2] for line in rows} <= {"question", "claim", "drill"}
    assert "\\(" in out and "$" not in re.sub(r"<code>.*?</code>|<pre>.*?</pre>", "", out)


def test_judge_and_answers_import_torch_and_the_standard_library_alone():
    allowed = set(sys.stdlib_module_names) | {"torch", "whiteboard", "transformer_block"}
    for path in (Path(practice.__file__), *Path(blocks.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed


# =============================================================================================
# Tables in the notes
# =============================================================================================


@pytest.mark.parametrize(
    ("name", "table"), [("faults", fault_table(all_named)), ("styles", style_table(all_accepted))]
)
def test_table_in_the_notes_is_what_the_tests_above_measure(name, table):
    tables = table_in(NOTES.read_text(encoding="utf-8"), name)
    assert len(tables) == 1, f"the notes lack <!-- judge: {name} -->"
    assert tables[0].strip() == table, "python3 code/tests/test_practice.py --write"


def test_the_verdict_in_the_readme_is_a_real_one():
    readme = (NOTES.parent / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(\[ModernBlock\] wrong.*?)\n```", readme, re.S)
    tiled = next(fault for fault in FAULTS["attention"] if "(tiled)" in fault.says)
    (verdict,) = practice.judge(practice.planted("ModernBlock", tiled), ["ModernBlock"])
    assert shown == verdict.text()


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_tables()
    else:
        sys.exit("usage: python3 code/tests/test_practice.py --write")
