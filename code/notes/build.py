"""What the notes quote, and their links: find it, compare it, or write it anew.

    python code/notes/build.py      rewrites quotes, benchmark figures and link targets

A Python fence under `<!-- snippet: Name -->` or `<!-- snippet: Class.method -->` is that definition
of the script. Under `<!-- snippet: whiteboard.Name -->` it is that of whiteboard/ with all it needs
from there. A figure before `<!-- row -->` is the ratio of that row of
code/benchmarks/results.md; a table under `<!-- benchmark: row … -->` has such rows whole. Between
the two `links` comments stand the targets of [§N], [Dnn], [Qn] and [arXiv:id].
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "transformer_block_tutorial.md"
README = ROOT / "README.md"
RESULTS = ROOT / "code" / "benchmarks" / "results.md"
SNIPPET = re.compile(r"(<!-- snippet: ([\w.]+) -->\n```python\n)(.*?)\n?```", re.S)
BENCHMARK = re.compile(r"(<!-- benchmark: ([^>]+) -->\n)((?:\|.*\n)*)")
FIGURE = re.compile(r"\d+\.\d+(<!-- ([a-z0-9-]+) -->)")
LINKS = re.compile(r"(<!-- links: [^>]*-->\n).*?(?=\n<!-- /links -->)", re.S)
FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.M | re.S)
LABEL = re.compile(r"§\d+(?:\.\d+)?|[DQ]\d+|arXiv:\d{4}\.\d{5}")


class Quoted:
    """The definitions of one file of code/."""

    def __init__(self, name: str):
        path = ROOT / "code" / name
        self.source = path.read_text(encoding="utf-8")
        kinds = (ast.FunctionDef, ast.ClassDef)
        body = ast.parse(self.source).body
        self.nodes = {node.name: node for node in body if isinstance(node, kinds)}

    def definition(self, name: str) -> str:
        """The source of a definition or method, without indentation."""
        node = self.nodes[name.partition(".")[0]]
        if "." in name:
            method = name.partition(".")[2]
            node = next(sub for sub in node.body if getattr(sub, "name", "") == method)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = self.source.split("\n")[first - 1 : node.end_lineno]  # with a comment at the end
        return textwrap.dedent("\n".join(lines))

    def with_all(self, name: str) -> str:
        """A definition behind all that it needs from its file, in the order of the file."""
        seen, todo = {name}, [name]
        while todo:
            node = self.nodes[todo.pop()]
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            todo += [other for other in self.nodes if other in used - seen]
            seen.update(todo)
        return "\n\n".join(self.definition(other) for other in self.nodes if other in seen)


SCRIPT, WHITEBOARD = Quoted("transformer_block.py"), Quoted("whiteboard/blocks.py")


def quote(name: str) -> str:
    """What stands under `<!-- snippet: name -->`."""
    file, _, rest = name.partition(".")
    return WHITEBOARD.with_all(rest) if file == "whiteboard" else SCRIPT.definition(name)


def benchmark_row(row: str) -> list[str]:
    """The cells of a row of the benchmark's last full run: what, what it took, the ratio, …"""
    results = RESULTS.read_text(encoding="utf-8")
    cells = re.search(rf"^\| `{row}` \|(.*)\|$", results, re.M)[1].split(" | ")
    return [cell.strip() for cell in cells]


def benchmark_table(rows: list[str]) -> str:
    """Rows of the benchmark's last full run by name: both sides, what they took, the ratio."""
    lines = ["| Ours | Reference | Time or size of both | Ratio |", "|:--|:--|--:|--:|"]
    for row in rows:
        what, took, ratio = benchmark_row(row)[:3]
        ours, reference = what.split("; ")
        lines.append(f"| {ours} | {reference} | {took} | {ratio} |")
    return "\n".join(lines) + "\n"


def prose(text: str) -> str:
    """The text without its fences, line numbers kept."""
    return FENCE.sub(lambda m: "\n" * m[0].count("\n"), text)


def slugs(text: str) -> dict[str, str]:
    """The headings by the anchors that GitHub gives them."""
    result: dict[str, str] = {}
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.M):
        slug = base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = 0
        while slug in result:
            count += 1
            slug = f"{base}-{count}"
        result[slug] = heading
    return result


def link_targets(text: str) -> str:
    """A definition for each label that stands in brackets, in the order of sections and numbers."""
    sections = {}
    for slug, heading in slugs(text).items():
        if number := re.match(r"§?(\d+(?:\.\d+)?) ", heading):
            sections[f"§{number[1]}"] = f"#{slug}"
    targets = {}
    for label in set(re.findall(rf"\[({LABEL.pattern})\](?![(:])", prose(text))):
        if label.startswith("arXiv"):
            targets[label] = f"https://arxiv.org/abs/{label.partition(':')[2]}"
        else:
            targets[label] = sections[label] if label[0] == "§" else f"#{label.lower()}"

    def order(label: str) -> tuple:
        return "§DQa".index(label[0]), [int(part) for part in re.findall(r"\d+", label)]

    return "".join(f"\n[{label}]: {targets[label]}" for label in sorted(targets, key=order))


def rewritten(text: str) -> str:
    """The text with every quote, figure and link target as its source has it."""
    text = BENCHMARK.sub(lambda m: m[1] + benchmark_table(m[2].split()), text)
    text = FIGURE.sub(lambda m: benchmark_row(m[2])[2] + m[1], text)
    text = SNIPPET.sub(lambda m: f"{m[1]}{quote(m[2])}\n```", text)
    return LINKS.sub(lambda m: f"{m[1]}{link_targets(text)}\n", text)


if __name__ == "__main__":
    for path in (NOTES, README):
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
