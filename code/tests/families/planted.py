"""Faults to plant in a file of operators that proves itself, and whether its proofs see them.

In faults_after_*.txt a line `# place: proof, model` names a definition of the file, the proof that
is the likeliest to see it changed and the model of transformers that is composed of it. Its faults
follow, in the format of judge/mistakes.py; their first line says who must see them.
"""

import re
import types
from pathlib import Path
from typing import NamedTuple

import transformer_block as tb

from judge.mistakes import read_mistakes
from notes import planted_faults


class Fault(NamedTuple):
    """In the class or function at place, old becomes new."""

    place: str
    proof: str
    model: str
    seen_by: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.place}-{self.old}-{self.new}"


def read_faults(file: str) -> list[Fault]:
    """The faults planted in a file of operators, in their order."""
    text = Path(__file__).with_name(f"faults_{Path(file).stem}.txt").read_text(encoding="utf-8")
    faults = []
    for section in re.split(r"^# ", text, flags=re.M)[1:]:
        head, _, body = section.partition("\n")
        place, proof, model = re.fullmatch(r"(\w+): (\w+)(?:, (.+))?", head).groups()
        faults += [Fault(place, proof, model, *mistake) for mistake in read_mistakes(body)]
    return faults


def faulty(file: str, place: str, old: str, new: str) -> types.ModuleType:
    """The file as a module, with old made new in that class or function."""
    return planted_faults.planted(planted_faults.Fault(old, place, "", old, new), Path(file))


def proofs_hold(module: types.ModuleType, likeliest: str) -> bool:
    """Whether every proof holds; the likeliest to fail comes first."""
    proofs = {name[5:]: proof for name, proof in vars(module).items() if name.startswith("demo_")}
    order = sorted(proofs, key=lambda name: name != likeliest)
    return all(tb.main_verdict(proofs[name], "cpu")[0] for name in order)
