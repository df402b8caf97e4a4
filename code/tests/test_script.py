"""The script as a program: the documented output, the demos in any order, the command line."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformer_block as tb

SCRIPT = Path(tb.__file__)
DOCUMENTED = (Path(__file__).parent / "documented_output.txt").read_text(encoding="utf-8")
MEASURED = re.compile(r"(?<==)\s?\d\.\d\de[+-]\d\d")
DEMOS = tb.main_demos()
PUBLIC = [
    node.name
    for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
    if isinstance(node, (ast.ClassDef, ast.FunctionDef))
]
BLOCKS = [name for name in PUBLIC if "Layer" in name or "Block" in name]


def run(*arguments: str, python: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *python, str(SCRIPT), *arguments]
    options = {"capture_output": True, "encoding": "utf-8", "timeout": 120, **options}
    options["env"] = {**os.environ, "PYTHONIOENCODING": "utf-8", **options.get("env", {})}
    return subprocess.run(command, check=False, **options)


def without_figures(text: str) -> str:
    return MEASURED.sub("#", text)


@pytest.mark.parametrize("python", [(), ("-O",)], ids=["plain", "-O"])
def test_output_is_the_documented_one(python, tmp_path):
    done = run(python=python, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert without_figures(done.stdout) == without_figures(DOCUMENTED)
    assert all(float(figure) <= 5e-6 for figure in MEASURED.findall(done.stdout))


def test_figures_are_measured_and_thresholds_are_text():
    assert "tol 1e-04" in without_figures(DOCUMENTED)
    assert len(MEASURED.findall(DOCUMENTED)) == 11


def test_demos_alone_reversed_and_twice_print_the_same_and_touch_no_generator():
    torch.manual_seed(123)
    before, expected = torch.get_rng_state(), {}
    for name in [*DEMOS, *reversed(DEMOS), *DEMOS]:
        ok, text = DEMOS[name]()
        assert ok is True
        assert expected.setdefault(name, text) == text
        assert torch.equal(before, torch.get_rng_state())
    lines = [f"[{name}] {text}  PASS" for name, text in expected.items()]
    assert without_figures("\n".join(lines)) == without_figures(DOCUMENTED.partition("\n\n")[0])


def test_demos_take_nothing_but_a_device():
    for name, demo in DEMOS.items():
        (parameter,) = inspect.signature(demo).parameters.values()
        assert (parameter.name, parameter.default) == ("device", "cpu"), name


def test_demos_run_under_no_grad_and_leave_grad_mode():
    with torch.no_grad():
        assert DEMOS["D09"]()[0]
        assert not torch.is_grad_enabled()


def test_selected_demos_run_in_the_order_given():
    done = run("D08", "D04")
    assert done.returncode == 0
    assert re.findall(r"^\[(D\d\d)\]", done.stdout, re.M) == ["D08", "D04"]
    assert done.stdout.count("\n") == 2


def test_list_names_each_demo_and_its_claim():
    lines = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(DEMOS)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["D99"], ["D99", "D01", "D15"]),
        (["D04", "d4"], ["d4", "D01"]),
        (["--show", "Nothing"], ["Nothing", "ModernDecoderBlock", "apply_rope"]),
        (["--device", "meta"], ["meta"]),
        (["--device", "nonsense"], ["nonsense"]),
        (["--unknown"], ["--unknown"]),
        (["--show"], ["--show"]),
    ],
)
def test_wrong_arguments_are_a_one_line_error(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is there")
def test_a_device_that_is_not_there():
    done = run("--device", "cuda")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_ascii_terminal():
    done = run(env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "passed ?" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--list"], ["--show", "DecoderOnlyLM"]])
def test_closed_pipe_is_no_traceback(arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_broken_demos_fail_and_the_rest_still_run(tmp_path):
    source = SCRIPT.read_text(encoding="utf-8")
    body = 'def demo_D05(device: str = "cpu") -> tuple[bool, str]:\n'
    assert body in source
    source = source.replace(body, body + "    raise KeyError('planted\\nfault')\n")
    body = body.replace("D05", "D07")
    source = source.replace(body, body + "    return False, 'planted'\n")
    broken = tmp_path / "broken.py"
    broken.write_text(source, encoding="utf-8")
    for python in ([], ["-O"]):
        command = [sys.executable, *python, str(broken)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        lines = done.stdout.splitlines()
        assert done.returncode == 1 and done.stderr == ""
        assert sum(line.endswith("  PASS") for line in lines) == 13
        (raised,) = (line for line in lines if line.startswith("[D05]"))
        assert re.search(r"raised KeyError: .*\(demo_D05, broken\.py:\d+\)  FAIL$", raised)
        assert "[D07] planted  FAIL" in lines
        assert lines[-1] == "2 of 15 FAILED: D05, D07"


def test_importing_does_nothing():
    program = (
        "import sys, torch; state, threads = torch.get_rng_state(), torch.get_num_threads()\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r}); before = set(sys.modules)\n"
        "import transformer_block\n"
        "assert torch.equal(state, torch.get_rng_state()) and threads == torch.get_num_threads()\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= {'transformer_block', *sys.stdlib_module_names, 'torch'}, new\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def shown(name: str) -> str:
    class Refuse:
        def error(self, message: str):
            raise AssertionError(message)

    return tb.main_source(Refuse(), [name])


def definitions(text: str) -> list[str]:
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in ast.parse(text).body if isinstance(node, kinds)]


@pytest.mark.parametrize("name", PUBLIC)
def test_show_is_exact_and_runs_by_itself(name):
    text = shown(name)
    namespace = {"__name__": "pasted"}
    exec(compile(text, "pasted", "exec"), namespace)
    assert name in namespace
    chosen = definitions(text)
    assert chosen == [other for other in PUBLIC if other in chosen]
    tree = ast.parse(text)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(chosen) - loaded <= {name}, "a definition that nothing needs"
    bound = {
        alias.asname or alias.name.partition(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert bound <= loaded, "an import that nothing needs"
    assert not (loaded & set(PUBLIC)) - set(chosen), "a definition is missing"


def test_show_prints_what_it_says():
    assert run("--show", "RMSNorm", "attend").stdout == tb.main_source(None, ["RMSNorm", "attend"])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_pasted_block_gives_what_the_script_gives(name):
    namespace = {"__name__": "pasted"}
    exec(shown(name), namespace)
    x = torch.randn(2, 5, 96)
    given = {
        "VanillaSeq2SeqDecoderLayer2017": {"memory": torch.randn(2, 3, 96)},
        "ModernDecoderBlock": dict(zip(("cos", "sin"), tb.build_rope_cache(5, 12))),
        "BranchNormDecoderBlock": dict(zip(("cos", "sin"), tb.build_rope_cache(5, 12))),
    }.get(name, {})
    pasted, ours = namespace[name](), getattr(tb, name)()
    pasted.load_state_dict(ours.state_dict())
    assert torch.equal(pasted(x, **given), ours(x, **given))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_need_few_other_definitions(name):
    assert len(definitions(shown(name))) - 1 <= 9


def test_no_assert_guards_anything():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_nothing_is_used_before_it_is_defined():
    for name in PUBLIC:
        later = PUBLIC[PUBLIC.index(name) + 1 :]
        node = next(
            node
            for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
            if getattr(node, "name", None) == name
        )
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        allowed = {other for other in later if other.startswith("check_")}
        assert not used & set(later) - allowed, name


def test_shape_comments_are_right():
    """A trailing comment such as `# (B, H, T, d_v)` holds for its line, in every demo."""
    checked = compare_shape_comments()
    assert len(checked) > 30


SHAPE = re.compile(r"# \(([A-Za-z0-9_*/+\- ]+(?:, [A-Za-z0-9_*/+\- ]+)*)\)$")


def compare_shape_comments() -> set[int]:
    """Run the demos with a tracer that compares shape comments; returns the lines it compared."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    notes = {}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Assign) and (found := SHAPE.search(lines[node.end_lineno - 1])):
            targets = getattr(node.targets[0], "elts", [node.targets[0]])
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names and " or " not in found[1]:
                notes[node.lineno] = (node.end_lineno, names[0], found[1].split(", "))
    compared, pending = set(), {}

    def compare(frame) -> None:
        line = pending.pop(id(frame), None)
        if line is None:
            return
        _, name, axes = notes[line]
        value = frame.f_locals.get(name)
        if isinstance(value, torch.Tensor):
            assert value.dim() == len(axes), (line, name, axes, value.shape)
            compared.add(line)
            sizes = bound.setdefault(id(frame), {})
            for axis, size in zip(axes, value.shape):
                if axis.isidentifier():
                    assert sizes.setdefault(axis, size) == size, (line, name, axes, value.shape)

    def trace(frame, event, _):
        if frame.f_code.co_filename != str(SCRIPT):
            return None
        if event in ("line", "return"):
            last = notes[pending[id(frame)]][0] if id(frame) in pending else 0
            if not frame.f_lineno <= last or event == "return":
                compare(frame)
            if event == "line" and frame.f_lineno in notes:
                pending[id(frame)] = frame.f_lineno
        if event == "return":
            bound.pop(id(frame), None)
        return trace

    bound: dict[int, dict[str, int]] = {}
    sys.settrace(trace)
    try:
        for demo in DEMOS.values():
            demo()
    finally:
        sys.settrace(None)
    return compared
