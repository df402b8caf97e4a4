"""The text that is judged, of a Python file or a notebook's code cells, and what it defines."""

import ast
import functools
import json
import re
from pathlib import Path

from judge.answers import Text, names_used, parsed
from judge.catalogue import TASKS

LINE_MAGIC = re.compile(r"^(\s*)[%!?]")


class Unreadable(Exception):  # noqa: N818
    """Why a file holds no text to judge, in words."""


class Source:
    """A text and the name under which Python shows its lines."""

    def __init__(self, text: str, filename: str):
        self.text, self.filename = text, filename

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Its syntax; empty where it does not parse."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError, RecursionError):
            return ast.Module(body=[], type_ignores=[])

    @functools.cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """What stands at the left margin, by name: classes, functions, assignments."""
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found[node.name] = node
            elif isinstance(node, ast.Assign):
                names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
                targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
                found |= {name: node for name in targets if name in names}
        return found

    def exercises(self) -> list[str]:
        """The exercises that the text defines, as far as reading it tells."""
        return [name for name in TASKS if name in self.definitions]

    def needed_by(self, name: str) -> set[str]:
        """The definitions of the text that one uses, itself included."""
        needed, queue = set(), [name]
        while queue:
            one = queue.pop()
            if one in self.definitions and one not in needed:
                needed.add(one)
                queue += names_used(self.definitions[one])
        return needed

    @functools.cached_property
    def imported(self) -> dict[str, str]:
        """The package from which a name of the text is imported."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package = alias.name.split(".")[0]
                    found[alias.asname or package] = package
            elif isinstance(node, ast.ImportFrom):
                package = (node.module or "").split(".")[0]
                found |= {alias.asname or alias.name: package for alias in node.names}
        return found

    def is_numpy(self, name: str) -> bool:
        """Whether an answer uses NumPy and not torch, or stands in a file that does."""
        nodes = [self.definitions[one] for one in self.needed_by(name)]
        used = {self.imported.get(word) for node in nodes for word in names_used(node)}
        if not used & {"numpy", "torch"}:
            used = set(self.imported.values())
        return "numpy" in used and "torch" not in used


def read_source(path: str) -> Source:
    """The text of a .py or .ipynb file; OSError where it cannot be read, Unreadable in words."""
    name, raw = Path(path).name, Path(path).read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{name} is not UTF-8: {error.reason}") from None
    if name.endswith(".ipynb"):
        text = text_of_notebook(text, name)
    return Source(text, path)


def text_of_notebook(text: str, name: str) -> str:
    """Its code cells, one below the other; Unreadable where it is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{name} is no notebook: {type(error).__name__}: {error}") from None
    return "\n\n".join(filter(None, map(text_of_cell, code)))


def text_of_cell(cell: str) -> str:
    """Its Python: without magics, and nothing of a cell that another magic than %%judge runs."""
    lines = cell.split("\n")
    if lines[0].startswith("%%"):
        if not re.match(r"%%judge\b", lines[0]):
            return ""
        lines[0] = f"# {lines[0]}"
    return "\n".join(LINE_MAGIC.sub(r"\1pass  # %", line) for line in lines)


def with_context(cell: str, before: list[str]) -> str:
    """A cell below what it uses of cells that ran before: their imports and definitions.

    The latest definition of a name counts, as in the kernel.
    """
    imports, definitions, lines = [], {}, []
    for text in map(text_of_cell, before):
        try:
            found = parsed(text)
        except SyntaxError:
            continue
        shift = len(lines)
        lines += found.lines
        named = Source(text, "").definitions  # assignments too
        for node in dict.fromkeys((*found.imports, *named.values())):
            ast.increment_lineno(node, shift)
        imports += found.imports
        definitions |= named
    return needed_text(Text(imports, definitions, lines), cell) + cell


def needed_text(before: Text, cell: str) -> str:
    """What a cell uses of a text, or nothing."""
    try:
        used = names_used(ast.parse(cell))
    except SyntaxError:
        return ""
    own = Source(cell, "").definitions
    needed, queue = set(), [name for name in used if name not in own]
    while queue:
        name = queue.pop()
        if name in before.definitions and name not in needed:
            needed.add(name)
            queue += names_used(before.definitions[name])
    nodes = list(dict.fromkeys(before.definitions[name] for name in needed))
    used |= set().union(*map(names_used, nodes)) if nodes else set()
    heads = [
        ast.unparse(node)
        for node in before.imports
        if {(a.asname or a.name).split(".")[0] for a in node.names} & used
    ]
    decorators = [getattr(node, "decorator_list", []) for node in nodes]
    starts = [min([n.lineno, *(d.lineno for d in ds)]) - 1 for n, ds in zip(nodes, decorators)]
    order = sorted(zip(starts, (n.end_lineno for n in nodes)))
    parts = ["\n".join(before.lines[start:end]) for start, end in order]
    return "\n\n".join([*dict.fromkeys(heads), *parts, ""])
