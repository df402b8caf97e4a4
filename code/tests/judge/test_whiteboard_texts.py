"""The answers stay as short as promised, and each printed text runs by itself."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from judge.answers import answer_source
from judge.catalogue import TASKS
from judge.judging import judge
from whiteboard import blocks

FILES = sorted(Path(blocks.__file__).parent.glob("*.py"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in FILES}


def code_lines(text: str) -> int:
    """Lines that are neither blank, nor comments, nor part of a docstring."""
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.split("\n"), 1)
    return sum(1 for i, x in lines if i not in documented and x.strip() and x.strip()[0] != "#")


def test_budgets() -> None:
    assert sum(text.count("\n") for text in TEXTS.values()) <= 900
    assert code_lines(answer_source("ModernBlock")) <= 60
    alone = {"SelfAttention": 25, "LatentAttention": 40, "MixtralFFN": 25, "Value": 35}
    for text in TEXTS.values():
        for node in ast.walk(ast.parse(text)):
            name = getattr(node, "name", "")
            if name in alone:
                assert code_lines(ast.get_source_segment(text, node)) <= alone[name], name
            elif isinstance(node, ast.FunctionDef):
                limit = 35 if name == "beam_search" else 25
                assert code_lines(ast.get_source_segment(text, node)) <= limit, name


def test_every_exercise_has_an_answer_that_runs_alone() -> None:
    """One process runs all printed texts, each in a namespace of its own."""
    texts = {name: answer_source(name) for name in TASKS}
    program = f"""
for name, text in {texts!r}.items():
    space = {{}}
    exec(text, space)
    assert callable(space[name])
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")


@pytest.mark.parametrize("name", TASKS)
def test_printed_answer_is_judged_right_and_imports_no_more_than_it_uses(name: str) -> None:
    text = answer_source(name)
    (found,) = judge(text, [name])
    assert found.right, found.text()
    imported = {
        a.asname or a.name for n in ast.parse(text).body if hasattr(n, "names") for a in n.names
    }
    used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert imported <= used


def test_shape_comments_and_no_checks() -> None:
    for name, text in TEXTS.items():
        assert not [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Raise, ast.Assert))]
        tensors = name not in ("tokens.py", "training.py")
        assert not tensors or text.count("# (") > text.count("def ") // 2, name
