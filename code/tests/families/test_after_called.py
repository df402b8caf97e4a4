"""The files of the newest operators as programs: their proofs, what they show, wrong calls."""

import ast
import builtins
import functools
import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import transformer_block as tb

import after_2025
import after_2026

FILES = [after_2025, after_2026]
TOOLS = ("demo_", "check_", "prove_", "reference_", "main")


def names_of(file: ModuleType) -> list[str]:
    """Its classes and functions, without the proofs and their tools."""
    own = [n for n, v in vars(file).items() if getattr(v, "__module__", "") == file.__name__]
    return [name for name in own if not name.startswith(TOOLS)]


NAMES = [(file, name) for file in FILES for name in names_of(file)]


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch):
    """Three files parsed anew for every name take ten seconds."""
    monkeypatch.setattr(tb, "main_definitions", PARSED)


PARSED = functools.cache(tb.main_definitions)


def shown(file: ModuleType, name: str, capsys) -> str:
    assert file.main(["--show", name]) == 0
    return capsys.readouterr().out


def test_every_proof_passes():
    command = [sys.executable, after_2025.__file__]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stdout
    assert [line[:5] for line in lines[:5]] == [f"[A0{i}]" for i in range(1, 6)]
    assert all(line.endswith("  PASS") for line in lines[:5])
    assert lines[5:] == ["", "all operators of 2025 and 2026 proved ✓"]


def test_proofs_leave_the_generator():
    state = torch.get_rng_state()
    after_2025.demo_A04()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("file", "proof"), [(after_2025, "A04"), (after_2026, "B02")])
def test_list_and_single_proofs(file, proof, capsys):
    assert file.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == 5
    assert file.main([proof.lower()]) == 0
    assert capsys.readouterr().out.startswith(f"[{proof}]")


WRONG = [
    (after_2025, ["A9"]),
    (after_2025, ["--show", "Nothing"]),
    (after_2025, ["--show", "check_chunks"]),
    (after_2025, ["A01", "--list"]),
    (after_2026, ["B9"]),
    (after_2026, ["--show", "Nothing"]),
    (after_2026, ["B01", "--list"]),
]


@pytest.mark.parametrize(("file", "wrong"), WRONG)
def test_wrong_calls_are_one_line(file, wrong, capsys):
    assert file.main(wrong) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not out


def test_a_failed_proof_is_status_1(monkeypatch, capsys):
    monkeypatch.setattr(after_2025.OutputGatedAttention, "forward", lambda self, x, **_: (x, None))
    assert after_2025.main(["A01"]) == 1
    assert capsys.readouterr().out.splitlines()[0].endswith("FAIL")


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_shown_text_runs_alone(file, name, capsys):
    text = shown(file, name, capsys)
    nodes = ast.parse(text).body
    imported = [a for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names]
    imported = [alias.asname or alias.name.partition(".")[0] for alias in imported]
    defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    used = {part.id for part in ast.walk(ast.parse(text)) if isinstance(part, ast.Name)}
    assert name in defined and "transformer_block" not in text.replace("transformer_block.py", "")
    assert len(set(imported + defined)) == len(imported + defined) and set(imported) <= used
    space: dict[str, object] = {}
    exec(text, space)
    known = {*vars(tb), *vars(after_2025), *vars(after_2026)} - set(dir(builtins))
    assert not {word for word in used & known if word not in space}


def test_shown_text_works(capsys):
    space: dict[str, object] = {}
    exec(shown(after_2025, "GatedDeltaNet", capsys), space)
    layer, x = space["GatedDeltaNet"](8, 1, 2, k_dim=4, v_dim=4), torch.randn(2, 70, 8)
    state = layer.new_cache()
    parts = [layer(part, kv_cache=state)[0] for part in x.split((69, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x)[0])


def test_show_of_methods_in_any_case(capsys):
    text = shown(after_2025, "gateddeltanet.FORWARD", capsys)
    assert text.startswith("def forward(self, x: Tensor")
    assert shown(after_2025, "SINKHORN", capsys).count("\ndef ") == 1


def test_each_class_and_function_fits_on_a_page():
    for file, name in NAMES:
        assert len(inspect.getsource(getattr(file, name)).splitlines()) <= 70, name


def test_only_torch_and_the_project():
    nodes = [*ast.walk(ast.parse(inspect.getsource(after_2026)))]
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    found = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert found == {"torch", "transformer_block", "after_2025"}
