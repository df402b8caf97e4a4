"""The known mistakes: one text file for each exercise, in mistakes/.

A mistake begins with a line `* ` that says what is wrong (more lines follow indented by two), then
come the lines of the answer that it changes (-) and what stands there instead (+). A line that ends
in a space has a backslash behind it.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("mistakes")


class Mistake(NamedTuple):
    """In the text of an answer, old becomes new."""

    says: str
    old: str
    new: str


@functools.cache
def mistakes_of(name: str) -> tuple[Mistake, ...]:
    """The known mistakes of an exercise, none where it has no file."""
    path = FOLDER / f"{name}.txt"
    return read_mistakes(path.read_text(encoding="utf-8")) if path.exists() else ()


def read_mistakes(text: str) -> tuple[Mistake, ...]:
    """The mistakes of a file, in its order."""
    found = []
    for block in re.split(r"^\* ", text, flags=re.M)[1:]:
        first, *lines = block.rstrip("\n").split("\n")
        more = [line.strip() for line in lines if line[:1] not in ("-", "+")]
        said = " ".join([first.strip(), *more])
        old, new = (
            "\n".join(re.sub(r" \\$", " ", line[1:]) for line in lines if line[:1] == sign)
            for sign in "-+"
        )
        found.append(Mistake(said, old, new))
    return tuple(found)
