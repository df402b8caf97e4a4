"""The answers of the whiteboard as text: one with all it needs, alone or with mistakes planted."""

import ast
import functools
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

from judge.mistakes import Mistake

CODE = Path(__file__).resolve().parents[1]


class Text(NamedTuple):
    """A Python text: its imports, its definitions by name, and its lines."""

    imports: list[ast.stmt]
    definitions: dict[str, ast.stmt]
    lines: list[str]


def parsed(text: str) -> Text:
    """A text taken apart; SyntaxError where it is none."""
    body = ast.parse(text).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    named = {n.name: n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    return Text(imports, named, text.split("\n"))


def answer_files() -> list[Path]:
    """The files of the whiteboard: the blocks first, for the others use them."""
    files = (CODE / "whiteboard").glob("*.py")
    return sorted(files, key=lambda path: (path.name != "blocks.py", path.name)) or [
        CODE / "whiteboard.py"
    ]


@functools.cache
def whiteboard() -> Text:
    """All answers in one text; what its files import of each other is left out."""
    found = parsed("\n".join(path.read_text(encoding="utf-8") for path in answer_files()))
    imports = [n for n in found.imports if not is_own_import(n)]
    return found._replace(imports=imports)


def is_own_import(node: ast.stmt) -> bool:
    """Whether a file of the whiteboard imports another."""
    if not isinstance(node, ast.ImportFrom):
        return False
    return node.level > 0 or (node.module or "").split(".")[0] == "whiteboard"


def names_used(node: ast.AST) -> set[str]:
    """The names that a definition reads."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def with_all_it_needs(text: Text, names: set[str]) -> str:
    """The definitions of these names, what they use, and the imports for it: a text that runs."""
    needed, queue = set(names), list(names)
    while queue:
        found = names_used(text.definitions[queue.pop()]) & set(text.definitions) - needed
        needed |= found
        queue += found
    nodes = [node for name, node in text.definitions.items() if name in needed]
    used = set().union(*map(names_used, nodes))
    heads = [ast.unparse(n) for n in text.imports if {a.asname or a.name for a in n.names} & used]
    heads = list(dict.fromkeys(heads))
    standard = [head for head in heads if "torch" not in head]
    others = [head for head in heads if "torch" in head]
    top = "\n\n".join("\n".join(part) for part in (standard, others) if part)
    starts = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 for node in nodes]
    parts = ["\n".join(text.lines[i : node.end_lineno]) for i, node in zip(starts, nodes)]
    return top + "\n\n\n" + "\n\n\n".join(parts) + "\n"


@functools.cache
def answer_source(name: str) -> str:
    """The answer to an exercise with everything it needs: a text that runs by itself."""
    return with_all_it_needs(whiteboard(), {name})


def parts_of(name: str) -> list[str]:
    """The definitions that an answer consists of, its own the last."""
    return re.findall(r"^(?:def|class) (\w+)", answer_source(name), re.M)


def planted(name: str, *mistakes: Mistake) -> str:
    """The answer's text with mistakes in it; ValueError where an old text is not there once."""
    text = answer_source(name)
    for mistake in mistakes:
        if text.count(mistake.old) != 1:
            raise ValueError(f"{name}: {mistake.old!r} stands {text.count(mistake.old)} times")
        text = text.replace(mistake.old, mistake.new)
    return text


def part_with(name: str, mistake: Mistake) -> str:
    """The definition of an answer in which a mistake stands, as attention in ModernBlock."""
    source = answer_source(name)
    before = source[: source.index(mistake.old) + 1]
    found = re.findall(r"^(?:def|class) (\w+)", before, re.M)
    return found[-1] if found else name


def execute(text: str, filename: str) -> dict[str, object]:
    """The namespace after running a text as a module of that name, which is not __main__."""
    module = types.ModuleType(re.sub(r"\W", "_", Path(filename).stem) or "mine")
    module.__file__ = filename
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up
    try:
        exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)
    finally:
        if before is not None:
            sys.modules[module.__name__] = before
    return module.__dict__


@functools.cache
def executed_answer(name: str, *mistakes: Mistake) -> object:
    """The answer's function or class, with mistakes planted."""
    return execute(planted(name, *mistakes), "<whiteboard>")[name]
