"""The file of a bug round: put together from pieces by a seed, with bugs planted in it.

Nothing here needs torch, and a seed gives the same text on every Python: what is drawn comes from
`random.Random(seed).random()` alone, the one sequence that Python promises to keep.
"""

import ast
import functools
import itertools
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

HERE = Path(__file__).resolve().parent
VERSION = 2  # of pieces, kinds and drawing: a seed means the same file within a version
FAULTS = (3, 4, 5)
LINES, CODE_LINES = 230, 170  # at most, in a file and of code in it
FIRST = re.compile(
    r"# bug round: (?:seed (?P<seed>\d+), faults (?P<faults>\d+), set (?P<set>\d+)|sealed), "
    r"version (?P<version>\d+)"
)
ROOM = 3  # lines of code that bugs may add
HEADS = ("The head's matrix is the token table itself.", "The head has its own matrix.")
COUNT = {3: "Three", 4: "Four", 5: "Five"}
SIZES = (  # context, width, heads, batch size, micro-batches, steps, warm-up, largest rate, least
    (24, 48, 4, 6, 2, 140, 14, 4e-3, 4e-4),
    (32, 48, 3, 4, 3, 120, 10, 3e-3, 3e-4),
    (28, 60, 4, 6, 2, 130, 12, 3e-3, 1e-4),
    (20, 64, 4, 5, 2, 150, 15, 2e-3, 2e-4),
    (36, 40, 5, 4, 2, 150, 20, 5e-3, 5e-4),
)
SIZE_NAMES = ("CONTEXT", "WIDTH", "HEADS", "ROWS", "MICRO", "STEPS", "WARMUP", "RATE", "FLOOR")

One = TypeVar("One")


class Draw:
    """Choices that depend on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def one(self, options: Sequence[One]) -> One:
        return options[int(self.random() * len(options))]

    def shuffled(self, items: Sequence[One]) -> list[One]:
        left = list(items)
        return [left.pop(int(self.random() * len(left))) for _ in range(len(left))]


class Kind(NamedTuple):
    """A kind of bug. `styles` are pairs of whole lines, right and wrong, without indentation."""

    name: str
    place: str
    symptom: str
    mend: str
    ask: str
    see: str
    breaks: str  # "NaN" or "raises" where nothing behind it can be measured, else ""
    hides: str  # the places whose bugs cannot be seen beside it
    when: str
    styles: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


class Planted(NamedTuple):
    """A bug in a file: at `line`, counted from 0, the lines `right` were replaced by `wrong`."""

    kind: Kind
    line: int
    right: tuple[str, ...]
    wrong: tuple[str, ...]


class Paper(NamedTuple):
    """A file without bugs, and what its seed decided."""

    seed: int
    faults: int
    choices: dict[str, str]
    names: dict[str, str]
    given: dict[str, str]  # the sizes and the line of TEXT
    header: str
    body: str  # in the names of pieces.txt, as the kinds write them

    def text(self, planted: Sequence[Planted] = (), number: int | None = 1) -> str:
        """The file with these bugs, set `number` of its seed; None: sealed, without a seed."""
        lines = self.body.split("\n")
        for bug in sorted(planted, key=lambda bug: -bug.line):
            lines[bug.line : bug.line + len(bug.right)] = bug.wrong
        drawn = f"seed {self.seed}, faults {self.faults}, set {number}"
        first = f"# bug round: {'sealed' if number is None else drawn}, version {VERSION}\n"
        return first + self.header + self.in_file(lines)

    def first_line_of(self, bug: Planted, planted: Sequence[Planted]) -> int:
        """Where a bug begins in the file, counted from 1."""
        above = sum(len(b.wrong) - len(b.right) for b in planted if b.line < bug.line)
        return bug.line + above + 2 + self.header.count("\n")

    def in_choices(self, choices: dict[str, str]) -> "Paper":
        """The same file in other styles."""
        return self._replace(choices=choices, body=body_of(choices, self.given))

    def in_file(self, lines: Sequence[str]) -> str:
        """Lines in the names of this file."""
        norm = {"Norm": "nn.LayerNorm"} if self.choices["norm"] == "builtin" else {}
        return renamed("\n".join(lines), self.names | norm)


def renamed(text: str, names: dict[str, str]) -> str:
    """Every whole word that has another name in this file, all at once; TEXT stays as it is."""
    words = _words(tuple(names))
    lines = []
    for line in text.split("\n"):
        code, quote, rest = line.partition('"') if line.startswith("TEXT = ") else (line, "", "")
        lines.append(words.sub(lambda word: names[word[0]], code) + quote + rest)
    return "\n".join(lines)


@functools.cache
def _words(names: tuple[str, ...]) -> re.Pattern:
    return re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# The clean file
# ---------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    slot: str
    wanted: dict[str, tuple[str, ...]]
    lines: list[str]


@functools.cache
def pieces() -> tuple[dict[str, list[str]], list[Piece]]:
    """The choices with their options, and the pieces, of pieces.txt."""
    return parsed_pieces(read("pieces.txt"))


def parsed_pieces(text: str) -> tuple[dict[str, list[str]], list[Piece]]:
    """The same of any text in that form."""
    head, *parts = re.split(r"^== ", text, flags=re.M)
    choices = {}
    for line in head.split("\n"):
        if line.startswith("choice "):
            name, _, options = line.removeprefix("choice ").partition(": ")
            choices[name] = options.split()
    found = []
    for part in parts:
        title, _, text = part.partition("\n")
        slot, *conditions = title.split()
        wanted = {}
        for condition in conditions:
            name, _, options = condition.partition("=")
            wanted[name] = tuple(options.split("/"))
        found.append(Piece(slot, wanted, text.rstrip("\n").split("\n")))
        if slot in ("norm", "split_heads"):  # a blank line behind it, where it stands
            found[-1].lines.append("")
    return choices, found


def fits(wanted: dict[str, tuple[str, ...]], choices: dict[str, str]) -> bool:
    return all(choices[name] in options for name, options in wanted.items())


def body_of(choices: dict[str, str], given: dict[str, str]) -> str:
    """The file below its header, in the names of pieces.txt."""
    sizes = {name: given[name] for name in SIZE_NAMES}
    text = renamed("\n".join(filled("file", choices, given)), sizes)
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def filled(
    slot: str, choices: dict[str, str], given: dict[str, str], parts: list[Piece] | None = None
) -> list[str]:
    """The lines of a slot, with the slots inside it filled; none where no piece fits."""
    parts = pieces()[1] if parts is None else parts
    if slot in given:
        return [given[slot]]
    fitting = [one for one in parts if one.slot == slot and fits(one.wanted, choices)]
    if len(fitting) > 1:
        raise ValueError(f"{len(fitting)} pieces fit slot {slot}, at most one may")
    out: list[str] = []
    for line in fitting[0].lines if fitting else []:
        inner = re.fullmatch(r"( *)<<(\w+)>>", line)
        if inner:
            out += [
                f"{inner[1]}{one}" if one else "" for one in filled(inner[2], choices, given, parts)
            ]
        else:
            out.append(line)
    return out


@functools.cache
def name_columns() -> list[tuple[list[str], list[list[str]]]]:
    rows = [line.split(" | ") for line in read("names.txt").split("\n") if " | " in line]
    return [(row[0].split(), [column.split() for column in row[1:]]) for row in rows]


def clean_paper(seed: int, faults: int) -> Paper:
    """The file of a seed before bugs are planted in it.

    ValueError where faults is not 3, 4 or 5.
    """
    if faults not in FAULTS:
        raise ValueError(f"faults must be 3, 4 or 5, got {faults}")
    draw = Draw(seed)
    names = {}
    for own, columns in name_columns():
        names.update(zip(own, draw.one(columns)))
    given = dict(zip(SIZE_NAMES, map(str, draw.one(SIZES))))
    given["text"] = f'TEXT = "{draw.one(read("texts.txt").splitlines())}"'
    norm = draw.one(("builtin", "builtin", "builtin", "deviation", "variance"))
    while True:  # norm is not drawn again: the long ones would seldom fit
        choices = {name: draw.one(options) for name, options in pieces()[0].items()}
        choices["norm"] = norm
        body = body_of(choices, given)
        if sum(1 for line in body.split("\n") if line) <= CODE_LINES - ROOM:
            break
    paper = Paper(seed, faults, choices, names, given, "", body)
    head = HEADS[choices["head"] == "untied"]
    said = read("header.txt").format(faults=COUNT[faults], tied=head, **names)
    lines = ["#"]
    for line in said.strip().split("\n"):
        behind = "  " + " " * 10 * bool(re.match(r"\w+ {2,}", line))
        lines += textwrap.wrap(
            line, 98, initial_indent="# ", subsequent_indent=f"#{behind[1:]}"
        ) or ["#"]
    return paper._replace(header="\n".join(lines) + "\n\n")


# ---------------------------------------------------------------------------------------------
# The bugs
# ---------------------------------------------------------------------------------------------


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """All kinds of kinds.txt."""
    found = []
    for section in re.split(r"^## ", read("kinds.txt"), flags=re.M)[1:]:
        place, _, rest = section.partition("\n")
        found += [read_kind(block, place) for block in rest.strip().split("\n\n")]
    return tuple(found)


def read_kind(block: str, place: str) -> Kind:
    name, *lines = block.split("\n")
    said = dict.fromkeys(("symptom", "mend", "ask", "see", "breaks", "hides", "when"), "")
    styles: list[tuple[list[str], list[str]]] = []
    for line in lines:
        if line[0] == "-":
            if not styles or styles[-1][1]:
                styles.append(([], []))
            styles[-1][0].append(line[1:])
        elif line[0] == "+":
            styles[-1][1].append(line[1:])
        else:
            word, _, rest = line.partition(" ")
            if word not in said:
                raise ValueError(f"{name}: {word!r} is none of {', '.join(said)}")
            said[word] = rest
    pairs = tuple((tuple(right), tuple(wrong)) for right, wrong in styles)
    return Kind(name, place, **said, styles=pairs)


def matches(lines: list[str], wanted: tuple[str, ...]) -> list[tuple[int, str]]:
    """Where these lines stand, and how far they are indented there."""
    margin = len(wanted[0]) - len(wanted[0].lstrip())
    found = []
    for at, line in enumerate(lines[: len(lines) - len(wanted) + 1]):
        if line.strip() != wanted[0].strip():
            continue
        shift = " " * (len(line) - len(line.lstrip()) - margin)
        if all(lines[at + i] == shift + want for i, want in enumerate(wanted)):
            found.append((at, shift))
    return found


def plantable(paper: Paper, kind: Kind) -> Planted | None:
    """The kind in this file: the first of its styles whose right lines stand there exactly once."""
    if kind.when:
        name, _, option = kind.when.partition("=")
        if paper.choices[name] != option:
            return None
    lines = paper.body.split("\n")
    for right, wrong in kind.styles:
        places = matches(lines, right)
        if len(places) == 1:
            at, shift = places[0]
            bug = Planted(
                kind, at, tuple(shift + one for one in right), tuple(shift + one for one in wrong)
            )
            changed = lines[:at] + list(bug.wrong) + lines[at + len(right) :]
            if names_known(bug, lines) and len(matches(changed, bug.wrong)) == 1:
                return bug
    return None


def names_known(bug: Planted, lines: list[str]) -> bool:
    """Whether each local name that only the wrong lines use is bound above them in the function."""
    start = next((i for i in range(bug.line, -1, -1) if re.match(r" *def ", lines[i])), 0)
    before = "\n".join(lines[start : bug.line])
    wrong = "\n".join(bug.wrong)
    return all(
        not re.search(rf"(?<![.\w]){name}\b(?!\s*=[^=])", wrong)
        or re.search(rf"\b{name}\b", before)
        or re.search(rf"(?<![.\w]){name}\b(?!\s*=[^=])", "\n".join(bug.right))
        or re.search(rf"^\s*{name} = ", wrong, re.M)
        for name in ("places", "T", "later", "place", "hidden")
    )


class Definition(NamedTuple):
    """A function or class at the left margin: its lines, counted from 0, and the words in it."""

    lines: range
    words: frozenset[str]


@functools.lru_cache(maxsize=16)
def definitions(body: str) -> dict[str, Definition]:
    """By the names of pieces.txt; a decorator belongs to what it decorates."""
    found, lines = {}, body.split("\n")
    for node in ast.parse(body).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1
            words = re.findall(r"\w+", "\n".join(lines[first : node.end_lineno]))
            found[node.name] = Definition(range(first, node.end_lineno), frozenset(words))
    return found


def owner(paper: Paper, bug: Planted) -> str | None:
    """The definition in which a bug stands; None where it stands in none."""
    whole = definitions(paper.body).items()
    return next((name for name, one in whole if bug.line in one.lines), None)


def reached(paper: Paper, planted: Sequence[Planted], calls: Sequence[str]) -> set[str | None]:
    """The definitions that can run when some are called: a definition reaches those it names.

    get_batch is not reached from the loop: the judge puts its own in its place. None is among
    them: what stands in no definition always runs.
    """
    words = {name: set(one.words) for name, one in definitions(paper.body).items()}
    for bug in planted:
        if inside := owner(paper, bug):
            words[inside] |= set(re.findall(r"\w+", "\n".join(bug.wrong)))
    found, ahead = {None}, {"Settings", *calls}
    while ahead:
        found |= ahead
        named = set().union(*(words[name] for name in ahead))
        ahead = (named & words.keys()) - found - {"get_batch"}
    return found


def together(one: Planted, other: Planted) -> bool:
    """Whether two bugs may stand in one file: their texts do not touch, and neither hides one."""
    first, second = sorted((one, other), key=lambda bug: bug.line)
    hidden = one.kind.place in other.kind.hides or other.kind.place in one.kind.hides
    both = bool(one.kind.breaks and other.kind.breaks)
    return not (hidden or both) and first.line + len(first.right) < second.line


def drawn_sets(paper: Paper) -> Iterator[tuple[Planted, ...]]:
    """Sets of bugs for this file, one after another: one of a place, at most one that breaks."""
    draw = Draw(paper.seed + (1 << 40))
    by_place: dict[str, list[Planted]] = {}
    for kind in kinds():
        bug = plantable(paper, kind)
        if bug:
            by_place.setdefault(kind.place, []).append(bug)
    while True:
        chosen: list[Planted] = []
        for place in draw.shuffled(list(by_place)):
            bug = draw.one(by_place[place])
            if len(chosen) < paper.faults and all(together(bug, one) for one in chosen):
                chosen.append(bug)
        if len(chosen) == paper.faults:
            yield tuple(sorted(chosen, key=lambda bug: bug.line))


def nth_set(paper: Paper, number: int) -> tuple[Planted, ...]:
    """The set of this number, from 1."""
    return next(itertools.islice(drawn_sets(paper), number - 1, None))
