"""debug and try of the bug round on the command line. Imports no torch: a child measures."""

import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

from judge.process import Child, Limits
from judge.progress import Progress
from judge.round.paper import FIRST, VERSION, Paper, Planted, clean_paper, nth_set, read
from judge.round.sealed import key_of, write_sealed

WORKER = "judge.round.worker"
LIMITS = Limits(computing=8.0, clock=20.0)
SEEDS = 10_000  # of which one is drawn where none is given
ROUND = "# bug round: "


class Drawn(NamedTuple):
    """Which file it is: by its first line, or by the key of a sealed one."""

    seed: int
    faults: int
    number: int
    sealed: bool = False

    @property
    def label(self) -> str:
        return "[round sealed]" if self.sealed else f"[round {self.seed}]"


class CallError(Exception):
    """A wrong call, in one line."""


def is_round(text: str) -> bool:
    """Whether a file is one of the bug round."""
    return text.startswith(ROUND)


def drawn_number(seed: int, faults: int) -> int:
    """The number of the set that a seed gets; RuntimeError where the child fails."""
    with Child(WORKER, Limits(60.0, 300.0)) as child:
        for kind, content in child.ask({"do": "make", "seed": seed, "faults": faults}):
            if kind == "set":
                return content
    raise RuntimeError(f"the set was not made: {child.failure} {child.printed}")


def bugs_of(drawn: Drawn) -> tuple[Paper, tuple[Planted, ...]]:
    """The clean file and the bugs that were planted in it."""
    paper = clean_paper(drawn.seed, drawn.faults)
    return paper, nth_set(paper, drawn.number)


def run_debug(seed: int | None, faults: int, sealed: Path | None, progress: Progress) -> int:
    """Print a file with hidden bugs, or write a sealed paper with its key."""
    seed = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    drawn = Drawn(seed, faults, drawn_number(seed, faults))
    paper, planted = bugs_of(drawn)
    if sealed is not None:
        print("\n".join(map(str, write_sealed(sealed, paper, planted, drawn.number))))
        return 0
    print(paper.text(planted, drawn.number), end="")
    note_round(progress, drawn, begun=time.time())
    return 0


def note_round(progress: Progress, drawn: Drawn, **more: object) -> None:
    """Keep what is new of a round in the progress file."""
    rounds = progress.table("rounds")
    before = rounds.get(str(drawn.seed))
    before = before if isinstance(before, dict) else {}
    progress.content["rounds"] = {**rounds, str(drawn.seed): {**before, **more}}
    progress.write()


def read_drawn(text: str, path: Path, key: Path | None) -> Drawn:
    """Which file it is; CallError where a key is missing, ValueError where the line is damaged."""
    found = FIRST.match(text.split("\n", 1)[0].strip())
    if not found:
        raise ValueError("its first line is no longer the one it was made with")
    if int(found["version"]) != VERSION:
        raise ValueError(f"it was made by version {found['version']}, this is version {VERSION}")
    if found["seed"]:
        return Drawn(int(found["seed"]), int(found["faults"]), int(found["set"]))
    where = key or path.parent / "key.json"
    try:
        seed, faults, number = key_of(where)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CallError(f"{path.name} is sealed and needs its key: {where}: {error}") from None
    return Drawn(seed, faults, number, sealed=True)


def run_try_round(
    text: str, path: Path, progress: Progress, hint: bool = False, key: Path | None = None
) -> int:
    """Judge a file: 0 where nothing is left and nothing is new, 1 where not, 2 a wrong call."""
    try:
        drawn = read_drawn(text, path, key)
    except CallError as error:
        print(f"practice.py: error: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"[round] not measured: {error}")
        return 1
    found = measured(text, path, drawn)
    if "why" in found:
        print(f"{drawn.label} not measured: {found['why']}")
        return 1
    print(headline(found, drawn, progress))
    for name in ("new symptom", "symptom"):
        if name in found:
            print(f"  {'new: ' if name == 'new symptom' else ''}{found[name]}")
    if hint and "bug" in found:
        print("\n".join(f"  {line}" for line in hints(found["bug"], drawn, text, progress)))
    if found["left"] or found["new"]:
        return 1
    return finished(found["orders"], drawn, progress)


def measured(text: str, path: Path, drawn: Drawn) -> dict:
    """What the child found, or why it could not."""
    request = {
        "do": "try", "text": text, "filename": str(path), "seed": drawn.seed,
        "faults": drawn.faults, "set": drawn.number,
    }  # fmt: skip
    with Child(WORKER, LIMITS) as child:
        for kind, content in child.ask(request):
            if kind == "found":
                return content
    failure = child.failure
    if failure is None:
        return {"why": "it ends the process that runs it"}
    stage = "" if failure.stage in (None, "the file") else f", in {failure.stage}"
    return {"why": f"{failure.words}{stage}"}


def headline(found: dict, drawn: Drawn, progress: Progress) -> str:
    """[round 17] 2 of 4 left, 1 new, 12 min"""
    begun = progress.table("rounds").get(str(drawn.seed), {})
    begun = begun.get("begun") if isinstance(begun, dict) and not drawn.sealed else None
    parts = [f"{found['left']} of {found['of']} left"]
    parts += ["1 new"] * found["new"]
    if isinstance(begun, (int, float)):
        parts.append(f"{max(0, round((time.time() - begun) / 60))} min")
    return f"{drawn.label} {', '.join(parts)}"


def hints(number: int, drawn: Drawn, text: str, progress: Progress) -> list[str]:
    """The place, at the second call for the same bug the line, at the third the mend."""
    paper, planted = bugs_of(drawn)
    bug = planted[number]
    steps = progress.hints_given(drawn.label.strip("[]"), bug.kind.name)
    lines = [f"place: {bug.kind.place}"]
    if steps > 1:
        wrong = paper.in_file(bug.wrong)
        before = text.partition(wrong)[0] if wrong in text else None
        at = f"line {before.count(chr(10)) + 1}" if before is not None else "it stood as"
        lines += [f"{at}: {bug_line.strip()}" for bug_line in wrong.split("\n")]
    if steps > 2:
        lines += [f"mend: {bug.kind.mend}"]
    return lines


def finished(orders: dict[str, str | None], drawn: Drawn, progress: Progress) -> int:
    """Nothing is left: what was built on top, and what can be built next."""
    begun = progress.table("rounds").get(str(drawn.seed), {})
    if not drawn.sealed and isinstance(begun, dict) and "solved" not in begun:
        took = {"seconds": round(time.time() - begun["begun"])} if "begun" in begun else {}
        note_round(progress, drawn, solved=time.strftime("%Y-%m-%d"), **took)
    for name, wrong in orders.items():
        print(f"  {name} order: {'right' if wrong is None else f'wrong: {wrong}'}")
    second, third = read("orders.txt").strip().split("\n\n")
    if "second" not in orders:
        print(f"\n{second}")
    elif "third" not in orders:
        print(f"\n{third}")
    return 1 if any(orders.values()) else 0
