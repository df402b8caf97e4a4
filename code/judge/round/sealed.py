"""A sealed paper for who interviews: the file, its key in two forms, a score sheet."""

import json
from collections.abc import Sequence
from pathlib import Path

from judge.round.paper import VERSION, Paper, Planted, read


def write_sealed(folder: Path, paper: Paper, planted: Sequence[Planted], number: int) -> list[Path]:
    """Write paper.py, key.json, key.md and score.md; the folder is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "paper.py": paper.text(planted, None),
        "key.json": json.dumps(key(paper, planted, number), indent=1) + "\n",
        "key.md": key_in_words(paper, planted),
        "score.md": read("score.md").replace("{faults}", str(len(planted))),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def key(paper: Paper, planted: Sequence[Planted], number: int) -> dict:
    return {
        "seed": paper.seed,
        "version": VERSION,
        "set": number,
        "faults": [
            {
                "name": bug.kind.name,
                "place": bug.kind.place,
                "line": paper.first_line_of(bug, planted),
                "wrong": paper.in_file(bug.wrong),
                "right": paper.in_file(bug.right),
            }
            for bug in planted
        ],
    }


def key_in_words(paper: Paper, planted: Sequence[Planted]) -> str:
    """Each bug: where it stands, what it shows, how it is mended, what to ask."""
    parts = [f"# Key to paper.py\n\nSeed {paper.seed}, {len(planted)} bugs.\n"]
    for bug in planted:
        parts.append(
            f"## Line {paper.first_line_of(bug, planted)}: {bug.kind.name} ({bug.kind.place})\n\n"
            f"```python\n{paper.in_file(bug.wrong)}\n```\n\n"
            f"- Symptom: {bug.kind.symptom}.\n"
            f"- Mend: {bug.kind.mend}.\n\n"
            f"```python\n{paper.in_file(bug.right)}\n```\n\n"
            f"- Ask: {bug.kind.ask} ({bug.kind.see} of the notes)\n"
        )
    return "\n".join([*parts, read("answers.md")])


def key_of(path: Path) -> tuple[int, int, int]:
    """Seed, number of bugs and number of the set; ValueError, KeyError where it is no key."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["version"] != VERSION:
        raise ValueError(f"made by version {content['version']}, this is version {VERSION}")
    return int(content["seed"]), len(content["faults"]), int(content["set"])
