"""Answers by somebody who had not seen the judge, and what the judge says of them.

python3 code/tests/judge/outsider_answers.py [NAME …]    judges them and prints the table
    --half looked-at | kept    one half alone
    --words words.jsonl        writes what was said of each
    --write                    keeps the short table in outsider.md, for code/notes/build.py

outsider/<exercise>.txt holds the answers of an exercise. Each begins with a line
`#= right | slug | its style` or `#= wrong | slug | its mistake`. Mistakes and cases of the judge
were learned from the half "looked at" alone; "kept" is the measure of what it knows of the rest.
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from judge.catalogue import TASKS
from judge.judging import judge

FOLDER = Path(__file__).with_name("outsider")
TABLE = FOLDER.with_suffix(".md")
HALVES = ("looked-at", "kept")
FIRST_LEVELS = 3  # of the exercises that were there first
LIMIT_SECONDS = 20  # of computing an answer


class Answer(NamedTuple):
    """A text that somebody wrote for an exercise; says is its style or its mistake."""

    name: str
    is_right: bool
    slug: str
    says: str
    text: str

    @property
    def half(self) -> str:
        """Which half it belongs to, by a hash of exercise and slug."""
        digest = hashlib.sha256(f"{self.name}/{self.slug}".encode()).digest()
        return HALVES[digest[0] % 2]


class Finding(NamedTuple):
    """What the judge said of an answer: accepted, and whether it named a mistake."""

    answer: Answer
    accepted: bool
    named: bool
    said: str


def answers_of(name: str) -> list[Answer]:
    """All answers of an exercise, in the order of its file."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    found = []
    for block in re.split(r"^#= ", text, flags=re.M)[1:]:
        head, _, body = block.partition("\n")
        verdict, slug, says = head.split(" | ", 2)
        found.append(Answer(name, verdict == "right", slug, says, body))
    return found


class TooLong(BaseException):
    """An answer has computed longer than the limit; no `except Exception` takes it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what runs inside after so many seconds of computing."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def found_in(answer: Answer) -> Finding:
    """What the judge says of an answer, in this process; what the answer prints is dropped."""
    filename = f"{answer.name}_{answer.slug}.py"
    try:
        with limited(LIMIT_SECONDS), contextlib.redirect_stdout(io.StringIO()):
            (verdict,) = judge(answer.text, [answer.name], filename)
    except TooLong:
        return Finding(answer, False, False, f"longer than {LIMIT_SECONDS} s of computing")
    return Finding(answer, verdict.right, verdict.mistake is not None, verdict.text())


def counts(findings: Iterable[Finding]) -> list[int]:
    """Right answers, those accepted; wrong ones, those refused, those named."""
    right = [f for f in findings if f.answer.is_right]
    wrong = [f for f in findings if not f.answer.is_right]
    refused = [f for f in wrong if not f.accepted]
    accepted = sum(f.accepted for f in right)
    return [len(right), accepted, len(wrong), len(refused), sum(f.named for f in refused)]


def table(findings: list[Finding], rows: dict[str, Callable[[Finding], bool]]) -> str:
    """One row for each kind of finding."""
    lines = [
        "| Answers | Right | Accepted | Wrong | Refused | Named |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for title, belongs in rows.items():
        one = counts(list(filter(belongs, findings)))
        share = f" ({one[4] / one[2]:.0%})" if one[2] else ""
        cells = " | ".join(map(str, one))
        lines.append(f"| {title} | {cells}{share} |")
    return "\n".join(lines)


def is_first(finding: Finding) -> bool:
    """Whether it is of an exercise that was there first."""
    return TASKS[finding.answer.name].level <= FIRST_LEVELS


SHORT_ROWS = {
    f"{title}, {half}": lambda f, first=first, half=half: (
        is_first(f) == first and f.answer.half == half
    )
    for title, first in (
        ("levels 1 to 3", True),
        ("levels 4 to 7", False),
    )
    for half in HALVES
} | {"**all**": lambda f: True}


def rows_by_exercise(names: Iterable[str]) -> dict[str, Callable[[Finding], bool]]:
    """One row for each exercise."""
    return {f"`{name}`": lambda f, name=name: f.answer.name == name for name in names}


def main() -> None:
    """Judge what was asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--words", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.write and (args.names or args.half):
        parser.error("--write needs all answers")
    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    names, findings = args.names or list(TASKS), []
    with args.words.open("w") if args.words else contextlib.nullcontext() as words:
        for answer in (one for name in names for one in answers_of(name)):
            if args.half in (None, answer.half):
                finding = found_in(answer)
                findings.append(finding)
                if words:
                    row = {**answer._asdict(), "half": answer.half, **finding._asdict()}
                    words.write(json.dumps({**row, "answer": None}) + "\n")
                    words.flush()
    print(table(findings, rows_by_exercise(names)))
    short = table(findings, SHORT_ROWS)
    print(f"\n{short}")
    if args.write:
        TABLE.write_text(short + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
