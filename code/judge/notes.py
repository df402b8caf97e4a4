"""Sections of the notes, by their number."""

import re

from judge.answers import CODE

NOTES = CODE.parent / "transformer_block_tutorial.md"


def section(number: str) -> str:
    """A section such as "§5.2" with its heading, up to the next of its level or above."""
    return section_of(NOTES.read_text(encoding="utf-8"), number.removeprefix("§"))


def section_of(notes: str, number: str) -> str:
    """The same of any text; empty where it has none. A # in a code block is no heading."""
    found: list[str] = []
    level, in_code = 0, False
    for line in notes.split("\n"):
        in_code ^= line.startswith("```")
        heading = None if in_code else re.match(r"(#+) §?(\S*)", line)
        if heading and level and len(heading[1]) <= level:
            break
        if heading and not level and heading[2] == number:
            level = len(heading[1])
        if level:
            found.append(line)
    return "\n".join(found).rstrip()
