"""Each fault of the catalogue, planted: the demos see it, and the notes say which."""

import re

import planted_faults
import pytest
import torch

NOTES = planted_faults.NOTES.read_text(encoding="utf-8")
DRILL = re.compile(r"^\*\*Drill \d+\..*?^</details>$", re.M | re.S)
DRILLS = DRILL.findall(NOTES.partition("## §11")[2])

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other


def pieces(text: str) -> list[str]:
    """What stands between the … of some code, without comments, every gap one space."""
    code = " ".join(re.sub(r"#.*", "", text).split())
    return [piece.strip() for piece in code.split("…") if piece.strip()]


def test_names_are_unique_and_there_are_enough():
    assert len(planted_faults.BY_NAME) == len(planted_faults.FAULTS) >= 40


def test_script_without_a_fault_passes():
    assert not planted_faults.failing(None)


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_demo_turns_fail_by_comparison(fault):
    assert planted_faults.failing(fault, compared=True), planted_faults.explain(fault)


def test_table_in_the_notes_is_the_measured_one():
    write = "python code/tests/planted_faults.py --write"
    assert planted_faults.TABLE.findall(NOTES) == [planted_faults.table()], write
    assert planted_faults.CLASSICS_TABLE.findall(NOTES) == [planted_faults.classics()], write


@pytest.mark.parametrize("drill", DRILLS, ids=range(1, len(DRILLS) + 1))
def test_drill_shows_a_fault_of_the_catalogue_and_demos_that_see_it(drill):
    question, answer = drill.split("<details>")
    fault = planted_faults.BY_NAME[re.search(r"Fault `([a-z0-9-]+)`", answer)[1]]
    (right,), (wrong,) = (
        pieces(planted_faults.parts()[1][fault.place]),
        pieces(planted_faults.patched(fault)),
    )
    (shown,) = re.findall(r"```text\n(.*?)```", question, re.S)
    assert all(piece in wrong for piece in pieces(shown))
    known = planted_faults.parts()[1][fault.place].splitlines()
    assert not set(map(str.strip, shown.splitlines())) <= {*map(str.strip, known), "…"}
    (change,) = re.findall(r"```diff\n(.*?)```", answer, re.S)
    for sign, source in (("-", wrong), ("+", right)):
        lines = [line[1:] for line in change.splitlines() if line.startswith(sign)]
        assert all(piece in source for piece in pieces("\n".join(lines)))
    named = re.findall(r"\[(D\d\d)\]", answer)
    assert named and set(named) <= set(planted_faults.failing(fault))


def test_there_are_ten_drills():
    assert len(DRILLS) == 10


def refused(capsys, *arguments):
    """The one line that a wrong call gets."""
    with pytest.raises(SystemExit) as stopped:
        planted_faults.main(list(arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    return err


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("keys-rotated-twise", "nearest: keys-rotated-twice"),
        ("group-tiled", "nearest: groups-tiled"),
        ("top-p", "nearest: top-p-off-by-one"),
        ("zzzz", f"known: {', '.join(planted_faults.BY_NAME)}\n"),
    ],
)
def test_an_unknown_fault_gets_the_nearest_names(name, nearest, capsys):
    assert f"unknown fault {name}; {nearest}" in refused(capsys, name)


def test_options_that_exclude_each_other_are_refused(capsys):
    assert "exclude" in refused(capsys, "--list", "--write")
    assert "exclude" in refused(capsys, "groups-tiled", "--write")


def test_help_says_what_the_command_does(capsys):
    with pytest.raises(SystemExit) as stopped:
        planted_faults.main(["--help"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, err) == (0, "")
    assert all(word in out for word in ("NAME", "--list", "--write", "demos"))


def test_list_and_one_fault_are_printed(capsys):
    assert planted_faults.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(planted_faults.BY_NAME)
    assert planted_faults.main(["Groups-Tiled"]) == 0
    out = capsys.readouterr().out
    assert out == planted_faults.explain(planted_faults.BY_NAME["groups-tiled"]) + "\n"
    assert re.search(r"^\[D05\].*FAIL$", out, re.M)
