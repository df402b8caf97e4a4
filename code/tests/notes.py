"""The notes quote the script and the benchmark: find the quotes, compare, or write them anew.

    python code/tests/notes.py      rewrites quotes, paste lists and benchmark tables

A Python fence under `<!-- snippet: Name -->` or `<!-- snippet: Class.method -->` is that
definition, with `from "text"` behind the name its lines from the one that starts so; "Paste with
…" lists what `--show` prints beside it. A table under `<!-- benchmark: row … -->` has those rows of
code/benchmarks/results.md, in the notes and in the README.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "code" / "transformer_block.py"
NOTES = ROOT / "transformer_block_tutorial.md"
README = ROOT / "README.md"
RESULTS = ROOT / "code" / "benchmarks" / "results.md"
DOCUMENTED = Path(__file__).parent / "documented_output.txt"
SNIPPET = re.compile(
    r'(<!-- snippet: ([\w.]+)(?: from "([^"]+)")? -->\n```python\n)(.*?)\n```', re.S
)
BENCHMARK = re.compile(r"(<!-- benchmark: ([^>]+) -->\n)((?:\|.*\n)*)")
PASTE_LIST = re.compile(r"Paste with ([^()]*) (\(`--show (\w+)` prints all of it\))")

source = SCRIPT.read_text(encoding="utf-8")
definitions = {
    node.name: node
    for node in ast.parse(source).body
    if isinstance(node, (ast.FunctionDef, ast.ClassDef))
}


def definition(name: str, start: str = "") -> str:
    """The source of a definition or method, from the line that starts so, without indentation."""
    node = definitions[name.partition(".")[0]]
    if "." in name:
        method = name.partition(".")[2]
        node = next(sub for sub in node.body if getattr(sub, "name", "") == method)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.split("\n")[first - 1 : node.end_lineno]  # with a comment at the end
    lines = textwrap.dedent("\n".join(lines)).split("\n")
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    return textwrap.dedent("\n".join(lines[first:]))


def paste_list(name: str) -> str:
    """The other definitions of the file that a definition needs, in the order of the file."""
    seen, todo = {name}, [name]
    while todo:
        node = definitions[todo.pop()]
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        todo += [other for other in definitions if other in used - seen]
        seen.update(todo)
    return ", ".join(f"`{other}`" for other in definitions if other in seen - {name})


def benchmark_table(rows: list[str]) -> str:
    """Rows of the benchmark's last full run by name: both sides, what they took, the ratio."""
    results = RESULTS.read_text(encoding="utf-8")
    lines = ["| Ours | Reference | Time or size of both | Ratio |", "|:--|:--|--:|--:|"]
    for row in rows:
        cells = re.search(rf"^\| `{row}` \|(.*)\|$", results, re.M)[1].split(" | ")
        what, took, ratio = (cell.strip() for cell in cells[:3])
        ours, reference = what.split("; ")
        lines.append(f"| {ours} | {reference} | {took} | {ratio} |")
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The text with every quote as the script, or the benchmark's last full run, has it."""
    text = BENCHMARK.sub(lambda m: m[1] + benchmark_table(m[2].split()), text)
    text = SNIPPET.sub(lambda m: f"{m[1]}{definition(m[2], m[3] or '')}\n```", text)
    return PASTE_LIST.sub(lambda m: f"Paste with {paste_list(m[3])} {m[2]}", text)


if __name__ == "__main__":
    for path in (NOTES, README):
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
