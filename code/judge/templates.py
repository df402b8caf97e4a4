"""What `blank` prints: signatures and docstrings, with empty bodies."""

import ast
import re
import textwrap

from judge.answers import whiteboard
from judge.catalogue import TASKS

IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn"
LETTERS = "# B batch, T length of the stream, S keys, H query heads, G KV heads, d_h head width"


def blank(names: list[str]) -> str:
    """A file to fill in."""
    return "\n\n\n".join([f"{IMPORTS}\n\n{LETTERS}", *map(template, names)]) + "\n"


def template(name: str) -> str:
    """Signature and docstring of an exercise, with empty bodies."""
    node = whiteboard().definitions[name]
    doc = textwrap.indent(f'"""{TASKS[name].template}\n"""', "    ")
    if isinstance(node, ast.FunctionDef):
        return f"{signature(node)}\n{doc}\n    ..."
    base = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    parts = [f"class {name}{base}:\n{doc}"]
    for method in node.body:
        public = isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if public or getattr(method, "name", "") == "__init__":
            first = "        super().__init__()\n" if base and method.name == "__init__" else ""
            parts.append(f"{signature(method)}\n{first}        ...")
    return "\n\n".join(parts)


def signature(node: ast.FunctionDef) -> str:
    """Its first line as in the answer, without a body behind it or private arguments."""
    line = re.sub(r", _\w+=\(\)", "", whiteboard().lines[node.lineno - 1].rstrip())
    return line if line.endswith(":") else line.partition("): ")[0] + "):"
