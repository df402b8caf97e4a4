"""Writes into the notes and the README what stands elsewhere: the one program that does.

    python code/notes/build.py                  writes everything anew
    python code/notes/build.py --check          only says what is stale; the exit status is 1 then
    python code/notes/build.py quotes links     only these kinds; so with --check

quotes      The fence under `<!-- snippet: Name -->` or `<!-- snippet: Class.method -->` is that
            definition of the script. Under `<!-- snippet: whiteboard.Name -->` it is an answer of
            whiteboard/ with all it needs from its file.
benchmark   A figure before `<!-- row -->` is the ratio of that row of code/benchmarks/results.md; a
            table under `<!-- benchmark: row ... -->` has such rows whole.
recipes     The table under `<!-- recipes: title -->` is what the models of recipes.py show.
faults      Between the two marks `classics` stands what the demos say of twelve faults of
            faults.txt: they are planted.
outsider    Between the two marks `judge: outsider` stands the table that
            code/tests/judge/outsider_answers.py --write has kept; how many answers, before it.
links       Between the two marks `links` stand the targets of [§N], [Dnn], [Qn] and [arXiv:id].
"""

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "code"))

import transformer_block as tb  # noqa: E402, the path comes first

from judge.notes import section_of  # noqa: E402

NOTES = ROOT / "transformer_block_tutorial.md"
README = ROOT / "README.md"
DOCUMENTS = (NOTES, README)
OUTSIDER_TABLE = ROOT / "code" / "tests" / "judge" / "outsider.md"
RESULTS = ROOT / "code" / "benchmarks" / "results.md"
SNIPPET = re.compile(r"(<!-- snippet: ([\w.]+) -->\n```python\n)(.*?)\n?```", re.S)
BENCHMARK = re.compile(r"(<!-- benchmark: ([^>]+) -->\n)((?:\|.*\n)*)")
FIGURE = re.compile(r"\d+\.\d+(<!-- ([a-z0-9-]+) -->)")
RECIPES = re.compile(r"(<!-- recipes: ([^>]+) -->\n)((?:\|.*\n)*)")
FAULTS = re.compile(r"(<!-- classics -->\n\n).*?(?=\n\n<!-- /classics -->)", re.S)
OUTSIDER = re.compile(r"(<!-- judge: outsider -->\n\n).*?(?=\n\n<!-- /judge -->)", re.S)
LINKS = re.compile(r"(<!-- links: [^>]*-->\n).*?(?=\n<!-- /links -->)", re.S)
FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.M | re.S)
LABEL = re.compile(r"§\d+(?:\.\d+)?|[DQ]\d+|arXiv:\d{4}\.\d{5}")


# =============================================================================================
# The notes as text
# =============================================================================================


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


def phrases_of(text: str, number: str) -> str:
    """section_of in one line, to look phrases up in: white space and line breaks do not matter."""
    section = section_of(text, number)
    if not section:
        raise ValueError(f"no section {number}")
    return re.sub(r"\s+", " ", section)


def cells_of(row: str) -> list[str]:
    """The cells of a row of a table."""
    cells = re.split(r"(?<!\\)\|", row.strip().strip("|"))
    return [cell.replace(r"\|", "|").strip() for cell in cells]


def recipe_tables(text: str) -> dict[str, dict[str, dict[str, str]]]:
    """The tables of models in the notes by their title: {title: {model: {column: cell}}}.

    The front one has twelve models, those of 2025 and 2026 have their own, the others have all.
    """
    tables = {}
    for _, title, table in RECIPES.findall(text):
        (_, *columns), _, *rows = map(cells_of, table.strip().split("\n"))
        tables[title] = {model: dict(zip(columns, cells)) for model, *cells in rows}
        if any(len(row) != len(columns) + 1 for row in rows) or len(tables[title]) != len(rows):
            raise ValueError(f"a row of the table {title!r} is broken or stands twice")
    return tables


def recipe_cells(text: str) -> dict[str, dict[str, str]]:
    """{model: {column: cell}} over the tables that have all models."""
    models: dict[str, dict[str, str]] = {}
    for title, table in recipe_tables(text).items():
        if title != "front" and not title.endswith("2025 and 2026"):
            for model, cells in table.items():
                models.setdefault(model, {}).update(cells)
    return models


# =============================================================================================
# Kinds
# =============================================================================================


SUBJECTS = ("blocks", "gradients", "training", "tokens", "after")
SCRIPT = (ROOT / "code" / "transformer_block.py").read_text(encoding="utf-8")
ANSWERS = [
    (ROOT / "code" / "whiteboard" / f"{subject}.py").read_text(encoding="utf-8")
    for subject in SUBJECTS
]
DEFINITIONS = {text: tb.main_definitions(text)[0] for text in (SCRIPT, *ANSWERS)}


def quote(name: str) -> str:
    """What stands under `<!-- snippet: name -->`."""
    file, _, answer = name.partition(".")
    if file != "whiteboard":
        return DEFINITIONS[SCRIPT][name][0].rstrip("\n")
    text = next(text for text in ANSWERS if answer in DEFINITIONS[text])
    source = re.sub(r"^(?:from|import) .*\n", "", tb.main_source([answer], text), flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", source).strip("\n")


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


def recipe_table(title: str) -> str:
    """One of the tables of models; front is the one with twelve of them."""
    import recipes  # noqa: PLC0415, the other kinds do without

    if title == "front":
        return recipes.markdown_table(recipes.FRONT, recipes.FRONT_MODELS) + "\n"
    if title in recipes.TABLES_2026:
        columns = recipes.TABLES_2026[title]
        return recipes.markdown_table(columns, recipes.RECIPES_2026, recipes.cells_2026) + "\n"
    return recipes.markdown_table(recipes.TABLES[title]) + "\n"


def fault_table() -> str:
    """What the demos say of the classics among the planted faults."""
    from notes import planted_faults  # noqa: PLC0415, it brings torch

    return planted_faults.classics()


def with_outsider(text: str) -> str:
    """The last full run of the judge over the answers of its tests, and how many they are."""
    table = OUTSIDER_TABLE.read_text(encoding="utf-8").strip()
    _, right, _, wrong, *_ = cells_of(table.split("\n")[-1])
    text = re.sub(r"(an outsider's )\d+( answers)", rf"\g<1>{int(right) + int(wrong)}\2", text)
    return OUTSIDER.sub(lambda m: m[1] + table, text)


def with_benchmark(text: str) -> str:
    text = BENCHMARK.sub(lambda m: m[1] + benchmark_table(m[2].split()), text)
    return FIGURE.sub(lambda m: benchmark_row(m[2])[2] + m[1], text)


KINDS: dict[str, Callable[[str], str]] = {
    "quotes": lambda text: SNIPPET.sub(lambda m: f"{m[1]}{quote(m[2])}\n```", text),
    "benchmark": with_benchmark,
    "recipes": lambda text: RECIPES.sub(lambda m: m[1] + recipe_table(m[2]), text),
    "faults": lambda text: FAULTS.sub(lambda m: m[1] + fault_table(), text),
    "outsider": with_outsider,
    "links": lambda text: LINKS.sub(lambda m: f"{m[1]}{link_targets(text)}\n", text),
}


# =============================================================================================
# Command line
# =============================================================================================


def stale(kind: str) -> list[str]:
    """The places, as file:line, from which on this kind would write something else."""
    places = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        lines = itertools.zip_longest(text.split("\n"), KINDS[kind](text).split("\n"))
        changed = [number for number, (was, becomes) in enumerate(lines, 1) if was != becomes]
        places += [f"{path.name}:{number}" for number in changed[:1]]
    return places


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="build.py", description="Writes into the notes and the README what stands elsewhere."
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    options = parser.parse_args(argv)
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        parser.error(f"no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    kinds = options.kinds or list(KINDS)
    if options.check:
        places = [f"{place}: {kind} stale" for kind in kinds for place in stale(kind)]
        print("\n".join(places) or "nothing is stale")
        return 1 if places else 0
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for kind in kinds:
            text = KINDS[kind](text)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
