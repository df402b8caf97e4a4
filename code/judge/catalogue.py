"""What can be written from memory: the exercises, what each asks, and where it is explained."""

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from judge.answers import CODE

LEVELS = {
    1: "functions",
    2: "attention and blocks",
    3: "latents, experts, and the loop around",
    4: "gradients by hand",
    5: "the training loop",
    6: "tokens and decoding",
    7: "after pre-training",
}
TEXTS = Path(__file__).with_name("tasks.txt")


class Task(NamedTuple):
    """An exercise as a reader sees it; template is what its docstring says."""

    name: str
    level: int
    demo: str
    section: str
    asks: str
    template: str
    often: bool = False  # one of those that are asked most

    @property
    def reading(self) -> str:
        """Where to read about it."""
        return f"see [{self.demo}] and {self.section} of the notes"


def read_tasks(text: str) -> list[Task]:
    """Each begins with `# name | level | demo | section | asks`, and a star where asked most."""
    found = []
    for part in re.split(r"^# ", text, flags=re.M)[1:]:
        head, _, template = part.partition("\n")
        name, level, demo, section, asks = head.removesuffix(" *").split(" | ")
        often = head.endswith(" *")
        found.append(Task(name, int(level), demo, section, asks, template.rstrip("\n"), often))
    return found


ALL = read_tasks(TEXTS.read_text(encoding="utf-8"))
TASKS = {task.name: task for task in ALL}


def task_named(text: str) -> str:
    """The name of an exercise, given in any case; ValueError with the nearest names else."""
    by_lower = {name.lower(): name for name in TASKS}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    close = difflib.get_close_matches(text.lower(), by_lower, n=3)
    hint = ", ".join(by_lower[name] for name in close) or ", ".join(TASKS)
    if text in script_names():
        hint += f"; it is a definition of the script: transformer_block.py --show {text}"
    raise ValueError(f"there is no exercise {text!r}: {hint}")


def script_names() -> list[str]:
    """The definitions that transformer_block.py --show prints."""
    script = (CODE / "transformer_block.py").read_text(encoding="utf-8")
    return re.findall(r"^(?:class|def) ([A-Za-z]\w*)", script, re.M)
