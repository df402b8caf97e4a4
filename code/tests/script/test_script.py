"""The script as a program: the documented output, the demos in any order, the command line."""

import ast
import contextlib
import functools
import gc
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
import types
import zipfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformer_block as tb
from documented import DOCUMENTED, MEASURED, without_figures

SCRIPT = Path(tb.__file__)
DEMOS = tb.main_demos()
SOURCE = SCRIPT.read_text(encoding="utf-8")
DEFINITIONS = {
    node.name: node
    for node in ast.parse(SOURCE).body
    if isinstance(node, (ast.ClassDef, ast.FunctionDef))
}
PUBLIC = list(DEFINITIONS)
METHODS = [
    f"{name}.{part.name}"
    for name, node in DEFINITIONS.items()
    if isinstance(node, ast.ClassDef)
    for part in node.body
    if isinstance(part, ast.FunctionDef)
]
BLOCKS = [name for name in PUBLIC if "Layer" in name or "Block" in name]


def run(*arguments: str, python: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *python, str(SCRIPT), *arguments]
    options = {"capture_output": True, "encoding": "utf-8", **options}
    options["env"] = {**os.environ, "PYTHONIOENCODING": "utf-8", **options.get("env", {})}
    return subprocess.run(command, check=False, **options)


def said(capsys, *arguments: str, program: types.ModuleType = tb) -> tuple[int, str, str]:
    """Status, output and errors of main() in this process, which has torch already."""
    status = program.main(list(arguments))
    return status, *capsys.readouterr()


def refused(capsys, *arguments: str, program: types.ModuleType = tb) -> str:
    """The one line that a wrong call gets."""
    status, out, err = said(capsys, *arguments, program=program)
    assert (status, out) == (2, "")
    assert err.startswith("transformer_block.py: error: ") and err.count("\n") == 1
    assert err.endswith("\n")
    return err


@pytest.mark.parametrize("python", [(), ("-O",)], ids=["plain", "-O"])
def test_output_is_the_documented_one(python, tmp_path):
    done = run(python=python, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert without_figures(done.stdout) == without_figures(DOCUMENTED)
    assert all(float(figure) <= 5e-6 for figure in MEASURED.findall(done.stdout))


def test_figures_and_thresholds():
    assert "tol 1e-04" in without_figures(DOCUMENTED)
    assert len(MEASURED.findall(DOCUMENTED)) == 11


def test_demos_in_any_order():
    torch.manual_seed(123)
    before, expected = torch.get_rng_state(), {}
    for name in [*DEMOS, *reversed(DEMOS), *DEMOS]:
        ok, text = DEMOS[name]()
        assert ok is True
        assert expected.setdefault(name, text) == text
        assert torch.equal(before, torch.get_rng_state())
    lines = [f"[{name}] {text}  PASS" for name, text in expected.items()]
    assert without_figures("\n".join(lines)) == without_figures(DOCUMENTED.partition("\n\n")[0])


def test_demos_take_a_device_alone():
    for name, demo in DEMOS.items():
        (parameter,) = inspect.signature(demo).parameters.values()
        assert (parameter.name, parameter.default) == ("device", "cpu"), name


def test_demos_under_no_grad():
    with torch.no_grad():
        assert DEMOS["D09"]()[0]
        assert not torch.is_grad_enabled()


def test_selected_demos_in_order():
    done = run("d08", "D04", "d3", "D007")
    assert done.returncode == 0
    assert re.findall(r"^\[(D\d\d)\]", done.stdout, re.M) == ["D08", "D04", "D03", "D07"]
    assert done.stdout.count("\n") == 4


@pytest.mark.parametrize("python", [(), ("-OO",)], ids=["plain", "-OO"])
def test_list_says_what_demos_claim(python):
    done = run("--list", python=python)
    assert (done.returncode, done.stderr) == (0, "")
    claims = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert claims == {name: demo.__doc__ for name, demo in DEMOS.items()}
    assert all(len(claim.split()) > 4 for claim in claims.values())


@pytest.mark.parametrize("arguments", [["D99"], ["--show", "Nothing"], ["--device", "nonsense"]])
def test_wrong_call_is_status_2(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert arguments[-1] in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["D99"], ["D99", "nearest: D09", "D01", "D15"]),
        (["D04", "d44"], ["d44", "nearest: ", "D04", "D01"]),
        (["d0"], ["unknown demo d0", "D01", "D15"]),
        (["4"], ["unknown demo 4", "D01", "D15"]),
        (["zz"], ["zz", "D01", "D15"]),
        (["torch"], ["unknown demo torch"]),
        (["ModernDecoderBlock"], ["no demo", "--show ModernDecoderBlock"]),
        (["modernDecoderblock"], ["no demo", "--show"]),
        (["D04", "KVCache.append"], ["no demo", "--show KVCache.append"]),
        (["--show", "D04"], ["D04 is a demo", "--show demo_D04"]),
        (["--show", "RMSNorm", "d04"], ["D04 is a demo"]),
        (["--show", "Nothing"], ["unknown name Nothing", "ModernDecoderBlock", "apply_rope"]),
        (["--show", "ModernDecoderBlok"], ["nearest: ModernDecoderBlock"]),
        (["--show", "atend"], ["nearest: attend, "]),
        (["--show", "rope"], ["nearest: ", "build_rope_cache", "apply_rope"]),
        (["--show", "KVCache.apend"], ["nearest: KVCache.append"]),
        (["--show", "append"], ["nearest: KVCache.append"]),
        (["--list", "--show", "RMSNorm"], ["--list and --show exclude each other"]),
        (["--list", "--device", "cpu"], ["--list and --device exclude each other"]),
        (["--show", "RMSNorm", "--device", "cpu"], ["--show and --device exclude each other"]),
        (["D04", "--show", "RMSNorm"], ["--show and demo ids exclude each other"]),
        (["D04", "--list"], ["--list and demo ids exclude each other"]),
        (["--device", "meta"], ["meta"]),
        (["--device", "nonsense"], ["nonsense"]),
        (["--unknown"], ["--unknown"]),
        (["--show"], ["--show"]),
    ],
)
def test_wrong_arguments_are_one_line(arguments, words, capsys):
    line = refused(capsys, *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("name", ["Nothing", "zzzz", "demo_D16", "check_clse"])
def test_no_helper_is_offered(name, capsys):
    offered = re.findall(r"\w+", refused(capsys, "--show", name).partition(";")[2])
    helpers = ("demo_", "check_", "prove_", "reference_", "require_", "main")
    assert offered and not [word for word in offered if word.startswith(helpers)]


def test_names_differ_without_case():
    names = [*PUBLIC, *METHODS, *DEMOS]
    assert len({name.lower() for name in names}) == len(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is there")
def test_a_device_that_is_not_there():
    done = run("--device", "cuda")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_ascii_terminal():
    done = run(env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "passed ?" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--list"], ["--show", "demo_D04"], ["Ω"]])
@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "latin-1"])
def test_no_encoding_stops_it(arguments, encoding, capsys):
    """Read back by main() itself, as the streams are what PYTHONIOENCODING makes of them."""
    status, out, err = said(capsys, *arguments)
    name, _, errors = encoding.partition(":")
    streams = [io.TextIOWrapper(io.BytesIO(), name, errors or "strict") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        assert tb.main(arguments) == status
    for stream, text in zip(streams, (out, err)):
        assert stream.errors == (errors or "strict")
        assert stream.buffer.getvalue() == text.encode(name, "replace")


@pytest.mark.parametrize("arguments", [["--help"], [], ["--list"], ["--show", "DecoderOnlyLM"]])
def test_closed_pipe_is_no_traceback(arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_broken_demos_fail_alone(tmp_path):
    source = SOURCE
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


def test_without_torch():
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    for arguments in ([], ["--show", "RMSNorm"]):
        done = subprocess.run(
            [*command, *arguments], capture_output=True, encoding="utf-8", check=False
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "pip install torch" in done.stderr


def test_without_numpy(tmp_path):
    """That one alone, and in the program alone: who imports the script hears all of torch."""
    said_by_torch = "Failed to initialize NumPy: No module named 'numpy' (made up)"
    (tmp_path / "torch.py").write_text(
        f"import warnings\nwarnings.warn({said_by_torch!r})\n"
        "warnings.warn('another warning')\nraise SystemExit\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SCRIPT.parent}"}
    options = {"capture_output": True, "encoding": "utf-8", "env": environment}
    program = subprocess.run([sys.executable, str(SCRIPT)], check=False, **options)
    assert "NumPy" not in program.stderr and "another warning" in program.stderr
    module = subprocess.run(
        [sys.executable, "-c", "import transformer_block"], check=False, **options
    )
    assert "NumPy" in module.stderr and "another warning" in module.stderr


@pytest.mark.parametrize("arguments", [["D03"], ["--list"], ["--help"], ["D99"], ["--nothing"]])
def test_main_leaves_the_session(arguments, capsys):
    def state():
        streams = [stream.errors for stream in (sys.stdout, sys.stderr)]
        return gc.get_freeze_count(), gc.isenabled(), gc.get_threshold(), streams

    before = state()
    tb.main(arguments)
    assert state() == before
    frozen = [object() for _ in range(10)]
    gc.freeze()
    try:
        assert gc.get_freeze_count() > len(frozen)
        tb.main(arguments)
        assert gc.get_freeze_count() > len(frozen), "what was frozen before has been thawed"
    finally:
        gc.unfreeze()


def test_run_leaves_the_collector():
    run_it = f"sys.argv = ['x', '--list']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    code = f"import gc, runpy, sys\ntry: {run_it}\nexcept SystemExit: print(gc.isenabled())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.stdout.splitlines()[-1] == "True"


@pytest.fixture(scope="module")
def zipped(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "blocks.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("__main__.py", SOURCE)
    return path


def test_from_a_zip_the_same_text(zipped, capsys):
    wanted = shown("attend")
    command = [sys.executable, str(zipped), "--show", "attend"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, wanted, "")
    for path in (zipped, SCRIPT):
        run_by_path = types.SimpleNamespace(**runpy.run_path(str(path), run_name="read"))
        assert said(capsys, "--show", "attend", program=run_by_path) == (0, wanted, "")


@pytest.mark.parametrize(("python", "option"), [([], "--show"), (["-OO"], "--list")])
def test_run_from_a_pipe(python, option):
    command = [sys.executable, *python, "-", *([option, "RMSNorm"][: 2 - len(python)])]
    pipe = {"input": SOURCE, "capture_output": True, "encoding": "utf-8"}
    done = subprocess.run(command, check=False, **pipe)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "file" in done.stderr
    done = subprocess.run([sys.executable, *python, "-", "D03"], check=False, **pipe)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("  PASS\n")


class Refuse:
    """A parser for what must not be refused."""

    @staticmethod
    def error(message: str):
        raise AssertionError(message)


@functools.cache
def shown(*names: str) -> str:
    once = functools.cache(tb.main_definitions)  # two hundred times the whole file takes long
    with patch.object(tb, "main_definitions", SHOWN.setdefault("definitions", once)):
        return tb.main_show(Refuse, list(names))


SHOWN: dict = {}  # the parsed script, for all tests


@pytest.mark.parametrize("name", METHODS)
def test_show_prints_a_method_alone(name):
    """Without indentation, with its decorators: what Python takes for its source."""
    owner, _, method = name.partition(".")
    method = vars(getattr(tb, owner))[method]
    method = getattr(method, "fget", None) or getattr(method, "__func__", method)
    written = inspect.getsource(inspect.unwrap(method))
    assert shown(name.swapcase()) == textwrap.dedent(written)


def test_methods_behind_what_runs():
    text = shown("KVCache.append", "RMSNorm", "kvcache.reset", "KVCache.append")
    methods = [shown("KVCache.append"), shown("KVCache.reset")]
    assert text == "\n\n".join([shown("RMSNorm"), *methods])


def definitions(text: str) -> list[str]:
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in ast.parse(text).body if isinstance(node, kinds)]


TOOLS = ("demo_", "check_", "prove_", "reference_", "main")


@pytest.mark.parametrize("name", PUBLIC)
def test_shown_text_runs_by_itself(name):
    """A demo and its tools import the library; everything else is printed."""
    text = shown(name)
    namespace = {"__name__": "pasted"}
    exec(compile(text, "pasted", "exec"), namespace)
    assert name in namespace
    chosen = definitions(text)
    assert chosen == [other for other in PUBLIC if other in chosen]
    tree = ast.parse(text)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert set(chosen) - loaded <= {name}, "a definition that nothing needs"
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound = {a.asname or a.name.partition(".")[0] for node in imports for a in node.names}
    assert bound <= loaded, "an import that nothing needs"
    library = {other for other in PUBLIC if not other.startswith(TOOLS)}
    imported = bound & library
    assert not (loaded & set(PUBLIC)) - set(chosen) - imported, "a definition is missing"
    assert not (imported if name in library else set(chosen) & library)


def test_neighbours_are_named(tmp_path, capsys):
    """Found by looking beside the script, which works without them too."""
    known = {
        "modernblock": "ModernBlock stands in code/whiteboard",
        "OutputGatedAttention": "OutputGatedAttention stands in code/after_2025.py: "
        "python3 code/after_2025.py --show OutputGatedAttention",
    }
    for name, words in known.items():
        assert words in refused(capsys, "--show", name)
    assert "python3 code/practice.py answer ModernBlock" in refused(capsys, "--show", "ModernBlock")
    alone = tmp_path / "transformer_block.py"
    alone.write_text(SOURCE, encoding="utf-8")
    program = types.SimpleNamespace(**runpy.run_path(str(alone), run_name="read"))
    line = refused(capsys, "--show", "ModernBlock", program=program)
    assert "unknown name ModernBlock; nearest: " in line
    (tmp_path / "whiteboard").mkdir()
    (tmp_path / "whiteboard" / "blocks.py").write_text(
        "class MadeUp:\n    pass\n", encoding="utf-8"
    )
    line = refused(capsys, "--show", "madeup", program=program)
    folder = tmp_path.name
    assert f"MadeUp stands in {folder}/whiteboard: python3 {folder}/practice.py answer" in line


BELOW = """
import math
from functools import partial

SIZE = 3  # of everything


def area(r):
    return math.pi * r * r * SIZE


def unused():
    return partial
"""
ABOVE = """
import math as m
from collections import deque, OrderedDict
from below import area
import below


class Circle:
    def size(self):
        return area(2)

    def root(self):
        return m.sqrt(4)


def whole():
    return below.unused(), deque()
"""


def test_shown_from_two_modules():
    text = tb.main_source(["Circle"], BELOW, ABOVE)
    assert text.startswith("import math\nimport math as m\n\n\nSIZE = 3  # of everything\n\n\ndef ")
    assert definitions(text) == ["area", "Circle"]
    namespace = {}
    exec(text, namespace)
    assert namespace["Circle"]().size() == pytest.approx(12 * 3.141592653589793)
    assert namespace["Circle"]().root() == 2
    text = tb.main_source(["whole", "Circle.root"], BELOW, ABOVE)
    assert text.startswith("from collections import deque\n\nimport below\n\n\ndef whole")
    assert text.endswith("\n\n\ndef root(self):\n    return m.sqrt(4)\n")
    with pytest.raises(KeyError, match="nothing"):
        tb.main_source(["nothing"], BELOW, ABOVE)


def test_later_module_is_meant():
    later = ABOVE + "\n\ndef unused():\n    return area\n"
    text = tb.main_source(["unused"], BELOW, later)
    assert definitions(text) == ["area", "unused"] and "partial" not in text
    renamed = "from below import area as theirs\n\n\ndef area():\n    return theirs\n"
    text = tb.main_source(["area"], BELOW, renamed)
    assert text.startswith("from below import area as theirs\n") and "math" not in text


@pytest.mark.parametrize("name", DEMOS)
def test_pasted_demo_says_the_same(name):
    """With every helper and constant that it reaches."""
    namespace = {"__name__": "pasted"}
    exec(shown(f"demo_{name}"), namespace)
    ok, text = namespace[f"demo_{name}"]()
    assert ok, text
    assert without_figures(text) == without_figures(DEMOS[name]()[1])


def test_show_prints_what_it_says():
    done = run("--show", "rmsnorm", "--show", "Attend", "RMSNorm")
    assert (done.returncode, done.stdout, done.stderr) == (0, shown("RMSNorm", "attend"), "")


@pytest.mark.parametrize("name", BLOCKS)
def test_pasted_block_gives_the_same(name):
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
def test_blocks_need_few_definitions(name):
    others = [other for other in definitions(shown(name)) if other != name]
    checks = [other for other in others if other.startswith("require_")]
    assert len(others) - len(checks) <= 10 and len(checks) <= 3


@pytest.mark.parametrize("name", PUBLIC)
def test_checks_stand_last(name):
    chosen = definitions(shown(name))
    kinds = [other.startswith("require_") for other in chosen[: chosen.index(name) + 1]]
    assert name.startswith(("require_", *TOOLS)) or not any(kinds)


def test_no_assert_guards_anything():
    tree = ast.parse(SOURCE)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_no_text_is_evaluated():
    names = {node.id for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec", "locals"}


BANNERS = re.findall(r"^# === (\w+)", SOURCE, re.M)


def test_order_of_the_file():
    """The library, the demos, the checks of arguments, formulas, tools, proofs, command line."""
    assert BANNERS[BANNERS.index("Demos") - 1 :] == [
        "Counting",
        "Demos",
        "Argument",
        "What",
        "Tools",
        "Proofs",
        "Command",
    ]
    proofs = [name for name in PUBLIC if name.startswith("prove_")]
    assert proofs == sorted(proofs, key=lambda name: name[6:9])


def test_lengths_of_the_parts():
    lines = SOURCE.splitlines()
    starts = [next(i for i, t in enumerate(lines) if t.startswith(f"# === {b}")) for b in BANNERS]
    demos, checks = (starts[BANNERS.index(name)] for name in ("Demos", "Argument"))
    assert demos - starts[0] <= 1300
    assert checks - demos <= 420
    assert len(lines) <= 3560


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.startswith(TOOLS)])
def test_demos_and_proofs_are_short(name):
    node = DEFINITIONS[name]
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno - start < 40


@pytest.mark.parametrize("name", DEMOS)
def test_show_of_a_demo_is_short(name):
    assert len(shown(f"demo_{name}").splitlines()) <= 150


def test_proofs_belong_to_demos():
    registered = [proof for proofs in tb.DEMO_PROOFS.values() for proof in proofs]
    assert [proof.__name__ for proof in registered] == [n for n in PUBLIC if n[:6] == "prove_"]
    for name, demo in DEMOS.items():
        missed = {"a planted claim": False}
        with patch.dict(tb.DEMO_PROOFS, {name: [lambda device, missed=missed: missed.items()]}):
            ok, text = demo()
        assert not ok and text.endswith("(not so: <lambda>: a planted claim)")


def test_proof_that_raises_fails():
    def prove_nothing(device):
        raise KeyError("planted")

    with patch.dict(tb.DEMO_PROOFS, {"D07": [prove_nothing]}):
        ok, text = tb.demo_D07()
    assert not ok
    assert re.search(r"\(not so: prove_nothing: raised KeyError: 'planted' \(prove_nothing, ", text)


def test_demos_are_all_listed():
    assert [f"demo_{name}" for name in DEMOS] == [n for n in PUBLIC if n.startswith("demo_D")]


def test_defined_before_use():
    for name in PUBLIC:
        later = PUBLIC[PUBLIC.index(name) + 1 :]
        used = {part.id for part in ast.walk(DEFINITIONS[name]) if isinstance(part, ast.Name)}
        later_on = ("check_", "reference_", "demo_count", "require_")
        allowed = {other for other in later if other.startswith(later_on)}
        assert not used & set(later) - allowed, name


def test_shape_comments_are_right():
    """A trailing comment such as `# (B, H, T, d_v)` holds for its line, in every demo."""
    checked = compare_shape_comments()
    assert len(checked) > 30


SHAPE = re.compile(r"# \(([A-Za-z0-9_*/+\- ]+(?:, [A-Za-z0-9_*/+\- ]+)*)\)$")


def compare_shape_comments() -> set[int]:
    """Run the demos with a tracer that compares shape comments; returns the lines it compared."""
    lines = SOURCE.splitlines()
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
