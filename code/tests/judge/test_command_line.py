"""The command line of practice.py."""

import ast
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import practice
from judge.answers import answer_source, execute, planted, whiteboard
from judge.catalogue import LEVELS, TASKS
from judge.judging import judge
from judge.mistakes import mistakes_of
from judge.process import CODE
from judge.progress import Progress, progress_file
from judge.today import proposed, today

RMS = "import torch\ndef rms_norm(x, weight, eps=1e-6):\n"
RIGHT_RMS = "    return (x.double() * (x.double().square().mean(-1, True) + eps).rsqrt() * weight.double()).to(x.dtype)\n"

# =============================================================================================
# Command line
# =============================================================================================


@pytest.fixture
def command(tmp_path, capfd):
    """Runs practice.py in this process: status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = practice.main(
                [*map(str, arguments), "--progress", str(tmp_path / "progress.json")]
            )
        except SystemExit as stop:
            status = stop.code
        return status, *capfd.readouterr()

    return run


def test_try_has_status_0_when_all_is_right_and_1_when_one_is_wrong(tmp_path, command):
    mine = tmp_path / "mine.py"
    mine.write_text(answer_source("swiglu") + RMS.removeprefix("import torch\n") + RIGHT_RMS)
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


@pytest.mark.parametrize("name", TASKS)
def test_blank_is_a_template_that_runs_and_gives_no_steps(command, name):
    status, out, _ = command("blank", name)
    assert status == 0
    node = next(n for n in ast.parse(out).body if getattr(n, "name", "") == name)
    assert ast.get_docstring(node)
    comments = [line for line in out.splitlines() if line.strip().startswith("#")]
    assert len(comments) <= 1  # the letters of the sizes
    execute(out, "blank.py")
    answer = {one.name: one for one in functions_of(whiteboard().definitions[name])}
    for have in functions_of(node):
        asked = re.sub(r", _\w+=\(\)", "", ast.unparse(answer[have.name].args))
        assert ast.unparse(have.args) == asked  # private arguments are the answer's own


def functions_of(node: ast.AST) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]


def test_answer_prints_a_text_that_runs(command):
    status, out, _ = command("answer", "ModernBlock")
    assert status == 0 and out == answer_source("ModernBlock")
    assert judge(out, ["ModernBlock"])[0].right


def test_exercises_and_definitions_of_the_script_point_to_each_other(command):
    status, _, err = command("answer", "ModernDecoderBlock")
    assert status == 2 and "transformer_block.py --show ModernDecoderBlock" in err
    script = [sys.executable, CODE / "transformer_block.py", "--show", "ModernBlock"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "practice.py answer ModernBlock" in done.stderr


def test_read_prints_the_section_of_the_notes(command):
    status, out, _ = command("read", "rotate")
    assert status == 0 and out.startswith("### 4.2 RoPE") and "### 4.3" not in out
    for name in TASKS:
        assert command("read", name)[1].startswith("#"), name


def test_blank_all_is_every_template(command):
    out = command("blank", "all")[1]
    assert [name for name in TASKS if not re.search(rf"^(class|def) {name}\b", out, re.M)] == []


def test_hints_keep_the_name_back_twice(tmp_path, command):
    mine = tmp_path / "mine.py"
    mine.write_text(planted("swiglu", mistakes_of("swiglu")[0]))
    says = mistakes_of("swiglu")[0].says
    first, second, third = (command("try", mine, "--hint")[1] for _ in range(3))
    assert says not in first and "case: swiglu" in first and "expected" in first
    assert says not in second and "the mistake is one of swiglu's" in second
    assert says in third
    mine.write_text(planted("swiglu", mistakes_of("swiglu")[2]))
    assert mistakes_of("swiglu")[2].says not in command("try", mine, "--hint")[1]


def test_case_prints_lines_for_a_repl(tmp_path, command):
    mine = tmp_path / "mine.py"
    mine.write_text(planted("swiglu", mistakes_of("swiglu")[0]))
    out = command("try", mine, "--case")[1]
    assert "torch.Generator().manual_seed(0)" in out and re.search(r"swiglu\(.*# expected", out)


def test_fault_shows_a_wrong_answer_and_reveal_says_which(command):
    for name, fault in (("attention", 1), ("ModernBlock", 3), ("sample", 5)):
        status, hidden, _ = command("fault", name, fault)
        assert status == 0
        says = mistakes_of(name)[fault - 1].says
        assert says not in hidden
        assert not judge(hidden, [name])[0].right
        shown = command("fault", name, fault, "--reveal")[1]
        assert says in shown
        assert re.search(r"§\d", shown)
    assert command("fault")[0] == 0


def test_list_shows_all_levels_and_what_is_solved(tmp_path, command):
    before = command()[1]
    assert all(name in before for name in TASKS)
    assert len(re.findall(r"^level \d", before, re.M)) == len(LEVELS) and "[x]" not in before
    mine = tmp_path / "mine.py"
    mine.write_text(answer_source("swiglu"))
    assert command("try", mine)[0] == 0
    after = command("list")[1]
    assert re.search(r"\[x\] swiglu", after) and after.count("[x]") == 1
    json.loads((tmp_path / "progress.json").read_text())


def test_today_proposes_what_failed_then_what_is_due_then_what_is_new(tmp_path):
    day = datetime.date(2026, 3, 10)
    tries = {
        "swiglu": {"right": ["2026-03-01"], "failed": "2026-03-09", "mistake": "up is missing"},
        "rotate": {"right": ["2026-03-08"]},  # right once: due after a day
        "rms_norm": {"right": ["2026-03-01", "2026-03-08"]},  # twice: after three
        "attention": {"right": ["2026-02-01", "2026-02-02", "2026-03-01"]},  # thrice: after seven
    }
    path = tmp_path / "progress.json"
    path.write_text(json.dumps({"solved": {"causal_mask": "2026-03-01"}, "tries": tries}))
    found = dict(proposed(Progress(path), day))
    order = list(found)
    assert order[0] == "swiglu" and "up is missing" in found["swiglu"]
    assert order[1:4] == ["causal_mask", "attention", "rotate"]  # the first of an older form
    assert "rms_norm" not in found and found[order[4]].startswith("new: ")
    said = today(Progress(path), day)
    assert said.count("\n  Q") == 5 and "practice.py debug --seed" in said
    assert (
        today(Progress(path), day + datetime.timedelta(1)).split("aloud")[1]
        != said.split("aloud")[1]
    )


def test_tries_are_remembered_and_shown(tmp_path, command):
    mine = tmp_path / "mine.py"
    mine.write_text(command("blank", "swiglu")[1].replace("...", "return x"))
    assert command("try", mine)[0] == 1
    record = json.loads((tmp_path / "progress.json").read_text())["tries"]["swiglu"]
    assert record["failed"] and record["right"] == [] and record["blank"] > 0
    assert "swiglu" in command("today")[1].split("\n")[0]
    mine.write_text(answer_source("swiglu"))
    assert command("try", mine)[0] == 0
    record = json.loads((tmp_path / "progress.json").read_text())["tries"]["swiglu"]
    assert record["failed"] is None and len(record["right"]) == 1 and record["seconds"] >= 0
    assert re.search(r"\[x\] swiglu.*\d{4}-\d\d-\d\d, \d+ min", command()[1])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"solved": 3}', '{"solved": {"nothing": 1}}'])
def test_a_damaged_progress_file_is_no_obstacle(tmp_path, command, content):
    (tmp_path / "progress.json").write_text(content)
    mine = tmp_path / "mine.py"
    mine.write_text(answer_source("swiglu"))
    assert command("try", mine)[0] == 0
    assert command()[1].count("[x]") == 1


def test_a_run_that_cannot_write_progress_still_judges(tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(answer_source("swiglu"))
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "progress.json"
    assert practice.main(["try", str(mine), "--progress", str(nowhere)]) == 0
    assert "[swiglu] right" in capsys.readouterr().out


def test_watch_judges_again_when_the_file_is_saved(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(answer_source("swiglu").replace("F.silu", "F.relu"))
    command = [sys.executable, practice.__file__, "watch", mine, "--progress", tmp_path / "p.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:  # fmt: skip
        try:
            for expected in ("[swiglu] wrong", "[swiglu] right"):
                while not (line := process.stdout.readline()).startswith("["):
                    assert line, "watch has ended"
                assert line.startswith(expected)
                mine.write_text(answer_source("swiglu"))
        finally:
            process.kill()


def test_help_says_that_the_file_is_executed(command):
    assert "execute" in command("try", "--help")[1]


def test_progress_stands_in_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert progress_file().parent == tmp_path
    monkeypatch.delenv("XDG_STATE_HOME")
    assert progress_file().parent == Path.home() / ".local" / "state"


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


def imported_by(path: Path) -> set[str]:
    """The packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        found |= {name.split(".")[0] for name in names}
    return found


def test_judge_and_answers_import_torch_and_the_standard_library_alone():
    allowed = set(sys.stdlib_module_names) | {"torch", "whiteboard", "judge"}
    for folder in ("judge", "whiteboard"):
        for path in (CODE / folder).rglob("*.py"):
            extra = imported_by(path) - allowed
            assert extra <= ({"IPython"} if path.name == "notebook.py" else set()), path


def test_the_command_line_imports_no_torch():
    text = "import sys, practice; print([name for name in sys.modules if name == 'torch'])"
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=CODE, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_of_the_judge_is_longer_than_600_lines():
    files = [CODE / "practice.py", *(CODE / "judge").rglob("*.py")]
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert max(lengths.values()) <= 600, lengths
