"""What a file of the bug round still holds: counted in every state of repair, in other styles."""

import ast
import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from round_survey import judged, survey

from judge.round import paper as round_paper
from judge.round.measuring import APART, absolute, difference, differing, relative
from judge.round.paper import (
    definitions,
    filled,
    kinds,
    owner,
    parsed_pieces,
    plantable,
    reached,
    read_kind,
    together,
)
from judge.round.probes import PROBES
from judge.round.states import States, breaks, measured
from judge.round.subject import Subject
from judge.round.worker import without_compiler

HERE = Path(__file__).resolve().parent
REPAIRS = parsed_pieces(HERE.joinpath("round_repairs.txt").read_text("utf-8"))[1]
STYLES = (1, 2, 3)
clean_paper = functools.cache(round_paper.clean_paper)  # asked for again and again
without_compiler()


def definition_at(text: str, line: int) -> ast.stmt | None:
    """The definition at the left margin that holds a line, counted from 1."""
    for node in ast.parse(text).body:
        if getattr(node, "name", None) or isinstance(node, ast.Assign):
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if start <= line <= node.end_lineno:
                return node
    return None


def name_of(node: ast.stmt) -> str:
    return node.targets[0].id if isinstance(node, ast.Assign) else node.name


def replaced(paper, name: str, style: int):
    """The clean file with one definition written in another way."""
    lines = paper.body.split("\n")
    node = next(n for n in ast.parse(paper.body).body if getattr(n, "name", None) == name
                or (isinstance(n, ast.Assign) and n.targets[0].id == name))  # fmt: skip
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    new = filled(f"{name}.{style}", paper.choices, {}, REPAIRS)
    assert new, f"no repair {style} of {name} for {paper.choices}"
    body = "\n".join([*lines[: start - 1], *new, *lines[node.end_lineno :]])
    choices = paper.choices | ({"norm": "deviation"} if name == "Norm" else {})
    return paper._replace(body=body, choices=choices)


def first_paper(**wanted: str):
    """The file of the first seed with these choices."""
    for seed in range(2000):
        paper = clean_paper(seed, 4)
        if all(paper.choices[name] == option for name, option in wanted.items()):
            return paper
    raise AssertionError(wanted)


PAPERS = (  # names of parameters, and definitions, that go together
    {"packing": "apart", "mlp": "functional", "head": "tied", "places": "table", "codec": "index"},
    {"packing": "chunk", "mlp": "sequential", "head": "untied", "norm": "deviation"},
    {"packing": "permute", "head": "matrix", "places": "parameter", "codec": "dictionary"},
    {"drawing": "helper", "mlp": "modules", "norm": "variance"},
)


def moved(states, text: str) -> str:
    """What a text shows that a clean file should not; empty where it is nothing."""
    subject = Subject(text, states.paper.names, "theirs.py")
    readings = [(probe, measured(probe, subject, states.layout)) for probe in PROBES]
    gaps = {
        probe.name: (list(differing(theirs, states.reading(states.all[0], probe))), breaks(theirs))
        for probe, theirs in readings
    }
    return "; ".join(f"{name}: {found}" for name, found in gaps.items() if found[0])


def test_each_definition_in_three_other_styles_is_right():
    """Whatever bug stood in it: all are written anew at once, alone where that is off."""
    seen = set()
    for wanted, style in itertools.product(PAPERS, STYLES):
        paper = first_paper(**wanted)
        states = States(paper, ())
        names = [name_of(node) for node in ast.parse(paper.body).body
                 if getattr(node, "name", "main") not in ("main", "Settings")
                 or (isinstance(node, ast.Assign) and name_of(node) == "NUMBERS")]  # fmt: skip
        new = {name: tuple(filled(f"{name}.{style}", paper.choices, {}, REPAIRS)) for name in names}
        other = functools.reduce(lambda one, name: replaced(one, name, style), names, paper)
        if moved(states, other.text()):
            alone = {name: moved(states, replaced(paper, name, style).text()) for name in names}
            raise AssertionError((style, {name: said for name, said in alone.items() if said}))
        seen |= set(new.values())
    assert len(seen) >= 3 * 15


def test_every_kind_stands_in_a_definition_that_is_written_in_three_other_styles():
    left = {kind.name for kind in kinds()}
    known = {piece.slot for piece in REPAIRS}
    for seed in range(300):
        paper = clean_paper(seed, 4)
        for kind in kinds():
            bug = plantable(paper, kind) if kind.name in left else None
            if bug:
                node = definition_at(paper.body, bug.line + 1)
                assert all(f"{name_of(node)}.{style}" in known for style in STYLES), kind.name
                left.remove(kind.name)
    assert not left


@pytest.mark.parametrize("part", range(4))
def test_every_kind_shows_alone(part):
    """In the first file that can have it, by ten times the tolerance of a probe."""
    left = {kind.name: kind for kind in kinds()[part::4]}
    for seed in range(300):
        paper = clean_paper(seed, 4)
        bugs = [bug for kind in left.values() if (bug := plantable(paper, kind))]
        if not bugs:
            continue
        clean = States(paper, ())
        for bug in bugs:
            states = States(paper, (bug,), clean.layout)
            if any(
                APART in differing(
                    states.reading(frozenset(), probe), clean.reading(clean.all[0], probe)
                ).values()
                for probe in PROBES
            ):  # fmt: skip
                del left[bug.kind.name]
        if not left:
            return
    assert not left


@pytest.mark.parametrize(("seed", "faults"), [(17, 3), (40, 3)])
def test_all_states_of_repair_are_counted_right_in_other_styles(seed, faults):
    found = survey(seed, faults, extra=4)
    assert found["states"] == 2**faults
    assert not found["wrong"] and not found["done"]


def test_a_bug_mended_by_another_is_new():
    """The mask's bug gives way to another one of the mask."""
    paper = first_paper(mask="triu", scores="matmul")
    bugs = planted(paper, "mask-transposed", "argmin")
    got, off = judged(States(paper, bugs), paper.text([*planted(paper, "mask-fill-zero"), bugs[1]]))
    assert off and 1 not in got


def without(paper, names):
    """The clean file in which these definitions raise when they are called."""
    lines = paper.body.split("\n")
    whole = definitions(paper.body)
    for name in sorted(names, key=lambda name: -whole[name].lines.start):
        at = whole[name].lines
        lines[at.start : at.stop] = [f"def {name}(*_, **__): raise AssertionError"]
    return paper._replace(body="\n".join(lines)).text()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_probe_runs_nothing_but_what_it_names(seed):
    """So a bug elsewhere cannot move it, and is not measured again for it."""
    paper = clean_paper(seed, 4)
    states = States(paper, ())
    seen = set()
    for probe in PROBES:
        runs = reached(paper, (), probe.runs)
        seen |= runs
        subject = Subject(
            without(paper, definitions(paper.body).keys() - runs), paper.names, "less.py"
        )
        theirs = measured(probe, subject, states.layout)
        assert not differing(theirs, states.reading(states.all[0], probe)), probe.name
    assert seen >= definitions(paper.body).keys() - {"main"}


def test_a_bug_may_reach_further_than_the_right_lines():
    paper = first_paper(loop="divided")
    kind = next(kind for kind in kinds() if kind.name == "optimiser-of-another-model")
    bug = plantable(paper, kind)
    assert owner(paper, bug) == "train"
    assert "GPT" not in reached(paper, (), ("train",))
    assert "GPT" in reached(paper, (bug,), ("train",))


def planted(paper, *names):
    by_name = {kind.name: kind for kind in kinds()}
    return [plantable(paper, by_name[name]) for name in names]


def test_gradients_of_any_length_are_compared_by_their_length():
    """Stretched to a limit of a billion, they differ in other styles by more than 1."""
    paper = first_paper(clip="own", norm="builtin", block="lines", scores="matmul")
    other = paper.in_choices(paper.choices | {"norm": "variance", "block": "steps"})
    states = States(paper, planted(paper, "clip-lengthens"))
    assert judged(states, other.text(planted(other, "clip-lengthens"))) == (frozenset(), 0)


def test_a_missing_crop_needs_the_positions_to_raise():
    paper = first_paper(places="table", mask="compare")
    assert not together(*planted(paper, "crop-missing", "positions-not-added"))
    assert together(*planted(paper, "crop-missing", "no-scale"))


HARMLESS = [  # each with one style
    kind._replace(styles=(style,))
    for block in HERE.joinpath("round_harmless.txt").read_text("utf-8").strip().split("\n\n")[1:]
    for kind in [read_kind(block, "harmless")]
    for style in kind.styles
]


def apart(changes) -> list:
    """As many of these changes as do not touch each other."""
    chosen = []
    for change in changes:
        if all(together(change, other) for other in chosen):
            chosen.append(change)
    return chosen


def test_harmless_changes_stay_harmless():
    """Many at once, in the files that have most; where they move a probe, each is tried alone."""
    assert len({kind.name for kind in HARMLESS}) >= 60
    papers = [clean_paper(seed, 4) for seed in range(100)]
    fitting = [[c for kind in HARMLESS if (c := plantable(paper, kind))] for paper in papers]
    left = HARMLESS
    while left:
        sets = [apart(change for change in one if change.kind in left) for one in fitting]
        number = max(range(len(sets)), key=lambda number: len(sets[number]))
        assert sets[number], [kind.name for kind in left]
        states = States(papers[number], ())
        found = moved(states, states.paper.text(sets[number]))
        alone = {
            one.kind.name: moved(states, states.paper.text([one]))
            for one in (sets[number] if found else ())
        }
        assert not found, {name: said for name, said in alone.items() if said} or found
        placed = [change.kind for change in sets[number]]
        left = [kind for kind in left if kind not in placed]


def test_findings_that_are_neither_same_nor_apart_are_told():
    one = relative(torch.tensor([1.0, 2.0]))
    assert difference(one, relative(torch.tensor([1.0, 2.0002]))) == 0
    assert difference(one, relative(torch.tensor([1.0, 2.004]))) == 1
    assert difference(one, relative(torch.tensor([1.0, 2.1]))) == 2
    assert difference(one, relative(torch.tensor([1.0, torch.nan]))) == 2
    assert difference(one, relative(torch.tensor([1.0]))) == 2
    assert difference(absolute(1.0, 0.1), absolute(1.05, 0.1)) == 0
    assert difference(True, 1) == 2
