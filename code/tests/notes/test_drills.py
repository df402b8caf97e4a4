"""The drills: each fault is planted, each answer's diff applied, and the demos decide."""

import re
import types
from typing import NamedTuple

import pytest

from notes import build
from notes import planted_faults as pf

TEXT = build.NOTES.read_text(encoding="utf-8")
DRILL = re.compile(r"^\*\*Drill (\d+)\.\*\* `([\w.]+)`\. .*?^</details>$", re.M | re.S)


class Drill(NamedTuple):
    number: int
    place: str
    shown: str
    fault: pf.Fault
    removed: str
    added: str
    demos: list[str]


def drills() -> list[Drill]:
    found = []
    for match in DRILL.finditer(TEXT):
        (shown,) = re.findall(r"```text\n(.*?)\n```", match[0], re.S)
        (diff,) = re.findall(r"```diff\n(.*?)\n```", match[0], re.S)
        lines = diff.split("\n")
        assert {line[0] for line in lines} <= set("-+ ")
        removed, added = ("\n".join(x[1:] for x in lines if x[0] in kind) for kind in ("- ", "+ "))
        fault = pf.BY_NAME[re.search(r"Fault `([a-z0-9-]+)`", match[0])[1]]
        demos = re.findall(r"\[(D\d\d)\]", match[0])
        found.append(Drill(int(match[1]), match[2], shown, fault, removed, added, demos))
    return found


DRILLS = drills()


def corrected(source: str, removed: str, added: str) -> str:
    """The source with the removed lines, wherever they stand and however indented, replaced."""
    wanted = [re.escape(line.strip()) for line in removed.split("\n")]
    inner = len(removed) - len(removed.lstrip())
    if len(wanted) == 1 and added and "\n" not in added:  # a part of a line
        assert source.count(removed.strip()) == 1, removed
        return source.replace(removed.strip(), added.strip())
    place = re.compile(r"^( *)" + r" *(?:#.*)?\n *".join(wanted) + r" *(?:#.*)?$", re.M)
    assert len(place.findall(source)) == 1, removed

    def replacement(match: re.Match) -> str:
        indent = match[1][inner:]
        return "\n".join(indent + line for line in added.split("\n")) if added else ""

    return place.sub(replacement, source)


def failing(place: str, text: str) -> list[str]:
    """The demos that turn FAIL when the definition at place reads as text does."""
    codes, sources = pf.parts()
    module = types.ModuleType("corrected_transformer_block")
    module.__file__ = str(pf.SCRIPT)
    for name, code in codes.items():
        changed = name == place.partition(".")[0]
        exec(sources[name].replace(sources[place], text) if changed else code, module.__dict__)
    demos = module.main_demos().items()
    return [name for name, run in demos if not module.main_verdict(run, "cpu")[0]]


def test_ten_drills_of_ten_faults():
    assert [drill.number for drill in DRILLS] == list(range(1, 11))
    assert len({drill.fault.name for drill in DRILLS}) == 10


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.fault.name)
def test_answer_takes_the_fault_out(drill):
    assert drill.place == drill.fault.place
    faulty = pf.patched(drill.fault)
    assert failing(drill.place, faulty)
    assert not failing(drill.place, corrected(faulty, drill.removed, drill.added))


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.fault.name)
def test_answer_names_its_demos(drill):
    assert drill.demos and set(drill.demos) <= set(pf.failing(drill.fault))


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.fault.name)
def test_drill_shows_the_faulty_text(drill):
    faulty, right = (
        [line.partition("  #")[0].strip() for line in text.split("\n")]
        for text in (pf.patched(drill.fault), pf.parts()[1][drill.place])
    )
    shown = [line.strip() for line in drill.shown.split("\n") if line.strip() != "…"]

    def stands(line: str, source: list[str]) -> bool:
        start, cut, _ = line.partition("…")
        return any(text == line or (cut and text.startswith(start.strip())) for text in source)

    assert all(stands(line, faulty) for line in shown)
    assert not all(stands(line, right) for line in shown)


def test_diff_that_leaves_the_fault():
    drill = next(drill for drill in DRILLS if drill.fault.name == "dead-rows-nan-gradient")
    faulty = pf.patched(drill.fault)
    assert failing(
        drill.place, corrected(faulty, drill.removed, "masked_fill(~keep & ~alive, -math.inf)")
    )
