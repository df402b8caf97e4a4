"""What the judge says of one exercise."""

from typing import NamedTuple

UNKNOWN = "no known mistake"
MAX_LINES = 8


class Verdict(NamedTuple):
    """On one exercise: right or not, the lines below the first, and the mistake by name.

    hint is what may be said before the name is: the place where the mistake stands. replay is the
    failing case as lines of Python.
    """

    name: str
    right: bool
    headline: str
    lines: tuple[str, ...] = ()
    mistake: str | None = None
    hint: str | None = None
    replay: str | None = None

    def text(self) -> str:
        """As it is printed."""
        return "\n".join([f"[{self.name}] {self.headline}", *(f"  {line}" for line in self.lines)])

    @classmethod
    def from_json(cls, content: dict) -> "Verdict":
        """What a child process has sent."""
        return cls(**{**content, "lines": tuple(content["lines"])})


def wrong(name: str, *lines: str) -> Verdict:
    """A verdict on what could not be run."""
    return Verdict(name, False, "wrong", lines[:MAX_LINES])
