"""The judge is judged: planted faults, and right and wrong answers in other styles."""

import ast
import functools
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import practice_wrong
import pytest
import torch

from judge.answers import answer_source, planted, whiteboard, with_all_it_needs
from judge.catalogue import TASKS
from judge.judging import judge
from judge.mistakes import mistakes_of
from judge.verdict import Verdict
from whiteboard import blocks

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

NOTES = Path(blocks.__file__).parents[2] / "transformer_block_tutorial.md"
STYLES = sorted(path.stem.removeprefix("right_") for path in practice_wrong.ANSWERS.glob("right_*"))
WHITEBOARD = Path(blocks.__file__).read_text(encoding="utf-8")


def style(name: str) -> str:
    """The text of right answers in one style."""
    return (practice_wrong.ANSWERS / f"right_{name}.py").read_text(encoding="utf-8")


def defines(text: str) -> list[str]:
    """The exercises that a text defines."""
    defined = {getattr(node, "name", "") for node in ast.parse(text).body}
    return [name for name in TASKS if name in defined]


# =============================================================================================
# The two tables, measured
# =============================================================================================


@functools.cache
def judged_faults(name: str) -> list[tuple[str, Verdict]]:
    """What each planted fault is, and what the judge says of the text with it."""
    texts = [(fault.says, planted(name, fault)) for fault in mistakes_of(name)]
    return [(says, judge(text, [name])[0]) for says, text in texts]


@functools.cache
def judged_style(name: str) -> dict[str, Verdict]:
    """The verdicts on all answers of a style."""
    return {verdict.name: verdict for verdict in judge(style(name))}


# =============================================================================================
# Faults
# =============================================================================================


def test_there_are_enough_faults_and_no_two_say_the_same():
    assert all(len(mistakes_of(name)) >= 8 for name in TASKS)
    faults_by_name = {name: mistakes_of(name) for name in TASKS}
    assert sum(map(len, faults_by_name.values())) >= 200
    for name, faults in faults_by_name.items():
        assert len({fault.says for fault in faults}) == len(faults), name
        assert not [fault.says for fault in faults if fault.says.endswith(".")], name


@pytest.mark.parametrize("name", TASKS)
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
    tiled = next(fault for fault in mistakes_of("attention") if "(tiled)" in fault.says)
    for name in ("attention", "SelfAttention", "ModernBlock"):
        (verdict,) = judge(planted(name, tiled), [name])
        assert verdict.lines[-1] == "see [D05] and §5.2 of the notes"
    own = mistakes_of("ModernBlock")[0]
    (verdict,) = judge(planted("ModernBlock", own), ["ModernBlock"])
    assert verdict.lines[-1] == f"see [D08] and {TASKS['ModernBlock'].section} of the notes"


def test_two_faults_at_once_are_both_named():
    for name, first, second in (
        ("attention", "the scores are not scaled", "query head i reads KV head i mod G"),
        ("rms_norm", "eps is missing", "the mean is subtracted"),
        ("SelfAttention", "positions restart", "the output projection is not used"),
    ):
        pair = [next(f for f in mistakes_of(name) if f.says.startswith(s)) for s in (first, second)]
        (verdict,) = judge(planted(name, *pair), [name])
        assert not verdict.right
        assert verdict.mistake is not None, (name, verdict.lines)
        assert first in verdict.mistake and second in verdict.mistake


def test_a_mistake_nobody_planted_is_no_known_mistake():
    text = answer_source("rms_norm").replace("wide.square()", "wide.abs().pow(1.7)")
    (verdict,) = judge(text, ["rms_norm"])
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
    counts = {name: sum(name in defines(style(one)) for one in STYLES) for name in TASKS}
    assert min(counts.values()) >= 3, counts


def test_the_whiteboard_is_accepted_in_ten_seconds_of_computing():
    start = time.process_time()
    verdicts = judge(with_all_it_needs(whiteboard(), set(TASKS)))
    assert [v.name for v in verdicts if not v.right] == []
    assert {v.name for v in verdicts} == set(TASKS)
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
    refused = [v.text() for v in judge(text) if not v.right]
    assert not refused, text + "\n".join(refused)


@pytest.mark.parametrize("name", ["fused", "tuples"])
def test_names_and_order_of_layers_do_not_matter_in_other_styles(name):
    text = disguised(style(name), 3)
    refused = [v.text() for v in judge(text) if not v.right]
    assert not refused, text + "\n".join(refused)


# =============================================================================================
# Wrong answers
# =============================================================================================


@pytest.mark.parametrize("name", sorted({wrong.name for wrong in practice_wrong.WRONG}))
@pytest.mark.usefixtures("without_names")
def test_wrong_answers_in_other_styles_are_refused(name):
    accepted = [
        (wrong.style, wrong.says)
        for wrong in practice_wrong.WRONG
        if wrong.name == name and judge(practice_wrong.text_of(wrong), [name])[0].right
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
@pytest.mark.usefixtures("without_names")
def test_a_wrong_part_is_wrong_in_every_packing(one, part, name):
    """Faults of a part, planted in what the classes of a style use."""
    seen = [f for f in mistakes_of(part) if not re.match(UNSEEN_IN_CLASSES, f.says)]
    texts = {f.says: style(one) + "\n\n" + planted(part, f) for f in seen[::3]}
    assert len(texts) >= 5
    assert not [says for says, text in texts.items() if judge(text, [name])[0].right]


# Of the parts' faults those that no class can show: what its calls do not use.
UNSEEN_IN_CLASSES = (
    "a query without keys|base is fixed|every query head reads KV head 0|the KV heads are averaged"
    "|the groups are read|query head i|scores are divided by sqrt\\(d_v\\)"
    "|the positions are ignored|positions count from 1|the output stays|the mask is ignored"
    "|it is causal by itself"
    "|scores are divided by sqrt\\(8\\)"
    "|-inf is added to hidden scores|the result is given q's shape"
    "|angles are computed in the dtype|the two halves go to the wrong places"
    "|the maximum is taken over hidden keys"
)


def test_the_verdict_in_the_readme_is_a_real_one():
    readme = (NOTES.parent / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(\[ModernBlock\] wrong.*?)\n```", readme, re.S)
    tiled = next(fault for fault in mistakes_of("attention") if "(tiled)" in fault.says)
    (verdict,) = judge(planted("ModernBlock", tiled), ["ModernBlock"])
    assert shown == verdict.text()
