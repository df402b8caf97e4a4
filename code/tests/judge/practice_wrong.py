"""Wrong answers in the styles of practice_answers: in one definition of a file, old becomes new.

They are what public graders accept, and mistakes in the packings of people other than the
whiteboard's: the judge must refuse each, and need not know it. In practice_wrong.txt a line
`# style exercise` names the file and what is judged (`: definition` behind it what is changed, if
that is another); mistakes in the judge's own format follow (judge/mistakes.py).
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from judge.mistakes import read_mistakes

ANSWERS = Path(__file__).parent / "practice_answers"


class Wrong(NamedTuple):
    """In the definition at place (what is judged, if judged is empty) old becomes new."""

    place: str
    says: str
    style: str
    old: str
    new: str
    judged: str = ""

    @property
    def name(self) -> str:
        return self.judged or self.place


def read_wrong(text: str) -> list[Wrong]:
    """The wrong answers of a file, in its order."""
    found = []
    for section in re.split(r"^# ", text, flags=re.M)[1:]:
        head, _, body = section.partition("\n")
        style, name, place = re.fullmatch(r"(\w+) (\w+)(?:: (\w+))?", head).groups()
        found += [
            Wrong(place or name, one.says, style, one.old, one.new, name if place else "")
            for one in read_mistakes(body)
        ]
    return found


WRONG = read_wrong(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))


def text_of(wrong: Wrong) -> str:
    """The whole file with the mistake in it; ValueError where old does not stand once at place."""
    text = (ANSWERS / f"right_{wrong.style}.py").read_text(encoding="utf-8")
    node = next(n for n in ast.parse(text).body if getattr(n, "name", "") == wrong.place)
    lines = text.splitlines(keepends=True)
    definition = "".join(lines[node.lineno - 1 : node.end_lineno])
    count = definition.count(wrong.old)
    if count != 1:
        raise ValueError(f"{wrong.style}.{wrong.place}: {wrong.old!r} stands {count} times")
    changed = definition.replace(wrong.old, wrong.new)
    return "".join((*lines[: node.lineno - 1], changed, *lines[node.end_lineno :]))
