"""Trying a file: its verdicts, from as many child processes as it ends. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from judge.process import Child, Limits
from judge.source import Source, Unreadable, read_source
from judge.verdict import Verdict, wrong

WORKER = "judge.worker"


@dataclass
class Trial:
    """A text that is judged; printed and notes are whole when verdicts() has come to its end."""

    source: Source
    names: list[str] | None = None
    case: bool = False  # with the failing case as lines for a REPL
    limits: Limits = field(default_factory=Limits)
    printed: str = ""
    notes: list[str] = field(default_factory=list)

    def verdicts(self, warm: Child | None = None) -> Iterator[Verdict]:
        """As they come; an exercise that ends the process is followed by a process for the rest."""
        left = self.names
        while left is None or left:
            with warm or Child(WORKER, self.limits) as child:
                asked, judged = left or [], []
                for kind, content in child.ask(self._request(left)):
                    if kind == "names":
                        asked = content
                    elif kind == "verdict":
                        judged.append(content["name"])
                        yield Verdict.from_json(content)
                    else:
                        self.notes.append(content)
            self.printed = self.printed or child.printed
            missing, warm = [name for name in asked if name not in judged], None
            if child.failure is None:
                return
            if missing or not judged:
                yield self._failed(missing[0] if missing else None, child)
            left = missing[1:]

    def _request(self, names: list[str] | None) -> dict:
        text, filename = self.source.text, self.source.filename
        return {"text": text, "filename": filename, "names": names, "case": self.case}

    def _failed(self, name: str | None, child: Child) -> Verdict:
        """The verdict on an exercise that has ended the process, or was ended with it."""
        failure = child.failure
        case = () if failure.stage in (None, name) else (f"case: {failure.stage}",)
        return wrong(name or Path(self.source.filename).name, failure.words, *case)


def try_file(path: str, names: list[str] | None = None) -> tuple[list[Verdict], str]:
    """Verdicts on a file, and what it printed; OSError where it cannot be read."""
    try:
        trial = Trial(read_source(path), names)
    except Unreadable as why:
        return [wrong(Path(path).name, str(why))], ""
    return list(trial.verdicts()), trial.printed
