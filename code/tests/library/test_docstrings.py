"""Every public docstring of the library says the shapes, the errors and the source."""

import ast
import inspect
import re

import pytest
import transformer_block as tb

SOURCE = inspect.getsource(tb).partition("# === Demos")[0]
METHODS = {
    "KVCache": ["append", "reset", "truncate"],
    "DecoderOnlyLM": ["forward", "new_caches", "stream", "generate"],
}
# Bookkeeping and definitions that no paper is the source of.
NO_PAPER = {
    "at_least_float32", "combined_mask", "table_rows", "start_position",
    "split_heads", "count_choices", "next_token_loss", "kv_cache_bytes",
}  # fmt: skip


def definitions() -> dict[str, ast.AST]:
    found = {}
    for node in ast.parse(SOURCE).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
            methods = METHODS.get(node.name, [])
            for part in node.body:
                if getattr(part, "name", "") in methods:
                    found[f"{node.name}.{part.name}"] = part
    return found


DEFINITIONS = definitions()
CLASSES = {name for name, node in DEFINITIONS.items() if isinstance(node, ast.ClassDef)}
PUBLIC = [name for name in DEFINITIONS if "." not in name]


def signature(name: str) -> str:
    """Of a class that of its forward."""
    node = DEFINITIONS[name]
    if name in CLASSES:
        forwards = [part for part in node.body if getattr(part, "name", "") == "forward"]
        node = forwards[0] if forwards else None
    return "" if node is None else ast.unparse(node.args) + ast.unparse(node.returns)


def refuses(name: str) -> bool:
    """Whether it raises, or asks a check of arguments."""
    calls = (n for n in ast.walk(DEFINITIONS[name]) if isinstance(n, (ast.Raise, ast.Call)))
    return any(
        isinstance(n, ast.Raise) or getattr(n.func, "id", "").startswith("require_") for n in calls
    )


@pytest.mark.parametrize("name", DEFINITIONS)
def test_there_is_a_docstring(name):
    assert ast.get_docstring(DEFINITIONS[name])


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if "Tensor" in signature(name)])
def test_docstring_gives_the_shapes(name):
    if name != "at_least_float32":  # of any shape
        assert re.search(r"\[[A-Za-z.][^\]]*\]", ast.get_docstring(DEFINITIONS[name]))


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if refuses(name)])
def test_docstring_gives_the_errors(name):
    words = r"ValueError|TypeError|[Ee]rrors as (there|in)|errors as there"
    assert re.search(words, ast.get_docstring(DEFINITIONS[name]))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NO_PAPER])
def test_docstring_gives_the_source(name):
    assert re.search(r"arXiv:\d{4}\.\d{5}", ast.get_docstring(DEFINITIONS[name]))
