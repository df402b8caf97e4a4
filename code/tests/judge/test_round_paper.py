"""The file of a bug round as a text: its form, its bugs, and that a seed always means the same."""

import ast
import hashlib
import itertools
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from judge.round.paper import (
    CODE_LINES,
    FIRST,
    LINES,
    clean_paper,
    drawn_sets,
    kinds,
    matches,
    nth_set,
    pieces,
    plantable,
)

SEEDS = range(60)
NOTES = Path(__file__).resolve().parents[3] / "transformer_block_tutorial.md"
KNOWN_TEXTS = {  # of Python 3.10 to 3.13 and any torch; new ones come with a new VERSION
    (0, 4): "fcffde2ee3559ac1",
    (17, 4): "dabd82e89d862a8c",
    (123, 3): "ba1063263e28e333",
    (9999, 5): "e18048cd8bdb3f63",
}


@pytest.fixture(scope="module")
def papers():
    return [clean_paper(seed, 3 + seed % 3) for seed in SEEDS]


def test_sixty_kinds_and_more_from_ten_places_each_with_all_it_says():
    assert len(kinds()) >= 60
    assert len({kind.place for kind in kinds()}) >= 10
    names = [kind.name for kind in kinds()]
    assert len(set(names)) == len(names)
    for kind in kinds():
        assert kind.symptom and kind.mend and kind.ask.endswith("?") and kind.see, kind.name
        assert kind.styles, kind.name
        for right, wrong in kind.styles:
            assert right and wrong and right != wrong, kind.name
            assert all(line.strip() and "#" not in line for line in right + wrong), kind.name


def test_the_notes_have_the_sections_that_kinds_point_to():
    notes = NOTES.read_text(encoding="utf-8")
    for kind in kinds():
        assert kind.see.startswith("§"), kind.name
        assert re.search(rf"^### {re.escape(kind.see[1:])} ", notes, re.M), kind.name


def test_every_style_of_every_kind_stands_in_some_file_and_is_python_there():
    """A style that no file has would never be planted, and nobody would see it."""
    left = {(kind.name, number) for kind in kinds() for number in range(len(kind.styles))}
    for seed in range(400):
        paper = clean_paper(seed, 4)
        for kind in kinds():
            bug = plantable(paper, kind)
            if bug is None:
                continue
            texts = [tuple(line.strip() for line in right) for right, _ in kind.styles]
            wrongs = [tuple(line.strip() for line in wrong) for _, wrong in kind.styles]
            stripped = [tuple(line.strip() for line in part) for part in (bug.right, bug.wrong)]
            number = next(i for i, both in enumerate(zip(texts, wrongs)) if list(both) == stripped)
            if (kind.name, number) in left:
                left.remove((kind.name, number))
                ast.parse(paper.text([bug]))
        if not left:
            break
    assert not left


def test_files_keep_their_limits(papers):
    for paper in papers:
        text = paper.text(nth_set(paper, 1))
        lines = text.split("\n")
        code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        assert len(lines) <= LINES and len(code) <= CODE_LINES, paper.seed
        assert max(map(len, lines)) <= 100, paper.seed
        below = text.partition("\n\n")[2]
        assert "#" not in below, "no comment gives a bug away"


def test_only_torch_and_the_standard_library_are_imported(papers):
    for paper in papers:
        found = set()
        for node in ast.walk(ast.parse(paper.text())):
            if isinstance(node, ast.Import):
                found |= {one.name.split(".")[0] for one in node.names}
            if isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
        assert found <= {"torch", "math", "dataclasses"}, paper.seed


def test_bugs_are_whole_lines_that_stand_once_apart_from_each_other(papers):
    for paper in papers:
        planted = nth_set(paper, 1)
        assert len(planted) == paper.faults
        assert len({bug.kind.place for bug in planted}) == paper.faults
        assert sum(bool(bug.kind.breaks) for bug in planted) <= 1
        lines = paper.text(planted).split("\n")
        for bug in planted:
            wrong = tuple(paper.in_file(bug.wrong).split("\n"))
            places = matches(lines, wrong)
            assert len(places) == 1, (paper.seed, bug.kind.name)
            assert places[0][0] + 1 == paper.first_line_of(bug, planted)
        for one, other in itertools.pairwise(planted):
            assert one.line + len(one.right) < other.line


def test_a_bug_that_breaks_does_not_stand_in_a_constructor(papers):
    for paper in papers:
        lines = paper.body.split("\n")
        for kind in kinds():
            bug = plantable(paper, kind) if kind.breaks else None
            if bug:
                above = [line for line in lines[: bug.line] if line.lstrip().startswith("def ")]
                assert "__init__" not in above[-1], kind.name


def test_mending_each_bug_by_its_right_lines_gives_the_clean_file(papers):
    for paper in papers:
        planted = nth_set(paper, 1)
        text = paper.text(planted)
        for bug in planted:
            wrong = paper.in_file(bug.wrong)
            assert text.count(wrong) == 1
            text = text.replace(wrong, paper.in_file(bug.right))
        assert text == paper.text()


def test_no_two_of_sixty_files_are_alike(papers):
    bodies = [paper.text().partition("\n\n")[2] for paper in papers]
    assert len(set(bodies)) == len(bodies)
    for name, options in pieces()[0].items():
        assert {paper.choices[name] for paper in papers} == set(options), name


def test_a_seed_gives_the_same_file_on_every_python():
    for (seed, faults), known in KNOWN_TEXTS.items():
        paper = clean_paper(seed, faults)
        text = paper.text(nth_set(paper, 1)) + "".join(b.kind.name for b in nth_set(paper, 2))
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == known, (seed, faults)


def test_the_first_line_tells_the_seed_and_a_sealed_one_does_not(papers):
    paper = papers[17]
    found = FIRST.match(paper.text((), 2).split("\n")[0])
    assert (found["seed"], found["faults"], found["set"]) == ("17", str(paper.faults), "2")
    sealed = paper.text((), None)
    assert FIRST.match(sealed.split("\n")[0])["seed"] is None
    assert "seed 17" not in sealed


def test_sets_go_on_and_differ():
    paper = clean_paper(5, 4)
    sets = drawn_sets(paper)
    names = [tuple(bug.kind.name for bug in next(sets)) for _ in range(8)]
    assert len(set(names)) > 4


@pytest.mark.parametrize("faults", [2, 6])
def test_other_numbers_of_bugs_are_refused(faults):
    with pytest.raises(ValueError, match=f"faults must be 3, 4 or 5, got {faults}"):
        clean_paper(1, faults)
