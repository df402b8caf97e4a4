"""debug and try of the bug round on the command line: verdicts, hints, sealed papers, clear answers."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import practice
from judge.process import Limits
from judge.round import command as command_line
from judge.round.command import Drawn, bugs_of
from judge.round.paper import kinds
from judge.round.worker import tried

SEED = 17


@pytest.fixture(scope="module")
def drawn():
    """Seed 17: its paper, its bugs, and the text with them."""
    paper, planted = bugs_of(Drawn(SEED, 4, 1))
    return paper, planted, paper.text(planted)


@pytest.fixture
def command(tmp_path, capfd):
    """Runs practice.py in this process: status, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = practice.main(
                [*map(str, arguments), "--progress", str(tmp_path / "progress.json")]
            )
        except SystemExit as end:
            status = end.code
        out, err = capfd.readouterr()
        return status, out, err

    return run


@pytest.fixture
def try_text(tmp_path, command):
    """Judges a text as round.py."""

    def judged(text: str, *options: object) -> tuple[int, str, str]:
        (tmp_path / "round.py").write_text(text, encoding="utf-8")
        return command("try", tmp_path / "round.py", *options)

    return judged


class Quiet:
    """A channel to nobody."""

    def stage(self, label: str) -> None: ...

    running = stage


def mended(drawn, *numbers: int) -> str:
    paper, planted, _ = drawn
    return paper.text([bug for i, bug in enumerate(planted) if i not in numbers])


def test_debug_prints_the_same_file_for_a_seed_and_try_counts_down(drawn, command, try_text):
    status, text, _ = command("debug", "--seed", SEED)
    assert status == 0 and text == drawn[2]
    status, out, _ = try_text(text)
    assert status == 1
    assert re.match(r"\[round 17\] 4 of 4 left, \d+ min\n  \S.*\d", out)
    readme = Path(__file__).resolve().parents[3].joinpath("README.md").read_text(encoding="utf-8")
    assert out.split("\n")[1] in readme.split("\n"), "the README shows another symptom"
    status, out, _ = try_text(mended(drawn, 0, 1))
    assert status == 1 and re.match(r"\[round 17\] 2 of 4 left, \d+ min\n", out)
    status, out, _ = try_text(mended(drawn, 0, 1, 2, 3))
    assert status == 0 and re.match(r"\[round 17\] 0 of 4 left, \d+ min\n", out)
    assert "Second order" in out and "model.step(ids [B, t], cache=None)" in out


def test_a_symptom_has_a_number_and_not_the_place(drawn, try_text, monkeypatch):
    """Of each bug alone; the first as the command prints it."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    paper, planted, _ = drawn
    _, out, _ = try_text(paper.text(planted[:1]))
    for number, bug in enumerate(planted):
        request = {"text": paper.text([bug]), "filename": "round.py"}
        request |= {"seed": SEED, "faults": 4, "set": 1}
        found = tried(request, Quiet())
        assert (found["left"], found["of"], found["new"], found["bug"]) == (1, 4, False, number)
        said = found["symptom"]
        assert re.search(r"\d", said)
        assert "line " not in said and bug.kind.mend not in said
        assert not any(line.strip() in said for line in bug.wrong)
        if number == 0:
            assert out == f"[round 17] 1 of 4 left\n  {said}\n"


def test_hints_name_the_place_then_the_line_then_the_mend(drawn, try_text, monkeypatch):
    """Of one measurement, as the file stays the same."""
    once = functools.cache(command_line.measured)
    monkeypatch.setattr(command_line, "measured", once)
    text = mended(drawn, 1, 2, 3)
    paper, (bug, *_), _ = drawn
    seen = [try_text(text, "--hint")[1] for _ in range(3)]
    wrong = paper.in_file(bug.wrong).strip().split("\n")[0].strip()
    assert f"place: {bug.kind.place}" in seen[0] and wrong not in seen[0]
    assert wrong in seen[1] and bug.kind.mend not in seen[1]
    assert int(re.search(r"line (\d+)", seen[1])[1]) == paper.first_line_of(bug, [])
    assert f"mend: {bug.kind.mend}" in seen[2]


FAKED = "print('[round 17] 0 of 4 left')\nimport os\nos.write(1, b'[round 17] 0 of 4 left\\n')\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("def train(", "def train(("), r"line \d+: "),
        (lambda text: re.sub(r"\b(LanguageModel|MiniGPT|Decoder|GPT)\b", "Other", text),
         r"it defines no \w+"),
        (lambda text: text.replace("def split(", "def parts("), "it defines no split"),
        (lambda text: text + "\nwhile True:\n    pass\n", "does not come to an end within"),
        (lambda text: text + "\nimport time\ntime.sleep(1000)\n", "does not come to an end within .* by the clock"),
        (lambda text: text + "\nraise RuntimeError('not today')\n",
         r"it raises RuntimeError: not today \(line \d+\)"),
        (lambda text: text + "\nimport os\nos._exit(0)\n", "ends the process"),
        (lambda text: text + "\nimport sys\nsys.exit(0)\n", "SystemExit"),
        (lambda text: text.replace("proj = nn.Linear", "last = nn.Linear", 1), "no parameter|raises"),
        (lambda text: re.sub(r"version \d+", "version 9", text, count=1), "made by version 9"),
        (lambda text: text.replace("# bug round: seed", "# bug round: the seed", 1), "first line"),
    ],
    ids=["syntax", "model renamed", "function renamed", "endless", "asleep", "raises", "leaves",
         "exits", "parameter renamed", "version", "first line"],
)  # fmt: skip
def test_what_cannot_be_measured_is_said(drawn, try_text, change, says, monkeypatch):
    monkeypatch.setattr(command_line, "LIMITS", Limits(2.0, 6.0))
    text = change(mended(drawn, 0, 1, 2, 3))
    status, out, _ = try_text(text)
    assert status == 1
    assert re.match(rf"\[round( 17)?\] not measured: .*({says})", out), out
    assert out.count("\n") == 1


def test_a_printed_verdict_does_not_count(drawn, try_text):
    status, out, _ = try_text(drawn[2] + FAKED)
    assert status == 1 and out.startswith("[round 17] 4 of 4 left")
    assert "0 of 4" not in out
    status, out, _ = try_text(drawn[2] + FAKED + "os._exit(0)\n")
    assert status == 1 and out.startswith("[round 17] not measured: ")


def test_a_new_bug_is_never_done(drawn, try_text):
    text = drawn[0].text()
    new = text.replace("return logits, None", "return 1.01 * logits, None")
    status, out, _ = try_text(new)
    assert new != text and status == 1
    assert out.startswith("[round 17] 0 of 4 left, 1 new\n  new: ")


def test_a_sealed_paper_needs_its_key(tmp_path, command):
    folder = tmp_path / "sealed"
    status, out, _ = command("debug", "--seed", 18, "--faults", 3, "--sealed", folder)
    assert status == 0
    names = ["key.json", "key.md", "paper.py", "score.md"]
    assert sorted(path.name for path in folder.iterdir()) == names
    paper = (folder / "paper.py").read_text(encoding="utf-8")
    key = json.loads((folder / "key.json").read_text(encoding="utf-8"))
    assert "18" not in paper.split("\n")[0]
    assert key["seed"] == 18 and len(key["faults"]) == 3
    words = (folder / "key.md").read_text(encoding="utf-8")
    for fault in key["faults"]:
        assert set(fault) == {"name", "place", "line", "wrong", "right"}
        assert "\n".join(paper.split("\n")[fault["line"] - 1 :]).startswith(fault["wrong"])
        kind = next(kind for kind in kinds() if kind.name == fault["name"])
        assert kind.symptom in words and kind.mend in words and kind.ask in words
    status, out, _ = command("try", folder / "paper.py")
    assert status == 1 and out.startswith("[round sealed] 3 of 3 left\n")
    for fault in key["faults"]:
        paper = paper.replace(fault["wrong"], fault["right"])
    alone = tmp_path / "alone.py"
    alone.write_text(paper, encoding="utf-8")
    status, out, err = command("try", alone)
    assert (status, out) == (2, "") and err.count("\n") == 1 and "key.json" in err
    status, out, _ = command("try", alone, "--key", folder / "key.json")
    assert status == 0 and out.startswith("[round sealed] 0 of 3 left\n")
    (folder / "key.json").write_text("{}", encoding="utf-8")
    status, out, err = command("try", alone, "--key", folder / "key.json")
    assert (status, out) == (2, "") and err.count("\n") == 1


@pytest.mark.parametrize("options", [("--faults", 7), ("--seed", "-1"), ("--seed", "x")])
def test_wrong_calls_have_status_2(command, options):
    assert command("debug", *options)[0] == 2
