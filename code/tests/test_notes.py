"""The notes: quotes equal the script, commands run, links resolve, GitHub shows them as meant."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import cmarkgfm
import notes
import pytest
import transformer_block as tb
from cmarkgfm.cmark import Options
from test_script import without_figures

TEXT = notes.NOTES.read_text(encoding="utf-8")
README = (notes.ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {"notes": TEXT, "README": README}
FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.M | re.S)


def fences(text: str, language: str) -> list[str]:
    return [body for _, found, body in FENCE.findall(text) if found == language]


def prose(text: str) -> str:
    """The text without its fences, line numbers kept."""
    return FENCE.sub(lambda m: "\n" * m[0].count("\n"), text)


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


@pytest.mark.parametrize("name", DOCUMENTS)
def test_quotes_are_those_of_the_script_and_the_benchmark(name):
    text = DOCUMENTS[name]
    assert notes.rewritten(text) == text, "python code/tests/notes.py writes them anew"
    assert notes.BENCHMARK.search(text)


def test_every_python_fence_is_a_quote():
    assert len(notes.SNIPPET.findall(TEXT)) == len(fences(TEXT, "python")) > 20


def test_a_changed_quote_is_seen():
    changed = TEXT.replace("def apply_rope(x: Tensor", "def apply_rope(y: Tensor")
    assert changed != TEXT
    assert notes.rewritten(changed) == TEXT


def test_every_whole_quote_runs_with_what_show_prints():
    whole = {name for _, name, start, _ in notes.SNIPPET.findall(TEXT) if "." not in name + start}
    for name in whole:
        shown = tb.main_source(None, [name])
        assert notes.definition(name) in shown
        exec(compile(shown, name, "exec"), {"__name__": "pasted"})


def test_the_readme_shows_the_documented_output_and_names_that_exist():
    documented = without_figures(notes.DOCUMENTED.read_text(encoding="utf-8")).splitlines()
    (output,) = (body for body in fences(README, "text") if body.startswith("[D01]"))
    assert without_figures(output).splitlines() == [documented[0], "…", *documented[-3:]]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*$", README, re.M)))
    parts = {"attn", "ffn", "x", "memory", "truncate", "reset", "generate"}
    assert {name for name in names if name not in parts} <= set(notes.definitions)
    assert len(set(names)) > 20


@pytest.mark.parametrize("command", list(fences(TEXT, "sh")))
def test_commands_run(command):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=notes.ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_output_is_the_documented_one():
    documented = notes.DOCUMENTED.read_text(encoding="utf-8").strip()
    blocks = [body.strip() for body in fences(TEXT, "text") if body.startswith("[D01]")]
    assert [without_figures(block) for block in blocks] == [without_figures(documented)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_resolve(name):
    text = prose(DOCUMENTS[name])
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        if file.startswith("http"):
            continue
        assert not file or (notes.ROOT / file).exists(), target
        if anchor:
            other = (notes.ROOT / file).read_text(encoding="utf-8") if file else DOCUMENTS[name]
            assert anchor in slugs(other), target


def test_named_demos_and_questions_exist():
    assert set(re.findall(r"\bD\d\d\b", TEXT)) <= {f"D{i:02d}" for i in range(1, 16)}
    assert set(map(int, re.findall(r"\bQ(\d+)\b", TEXT))) == set(range(1, 31))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_formulas_survive_the_markdown_pass(name):
    text = DOCUMENTS[name]
    options = Options.CMARK_OPT_UNSAFE
    rendered = cmarkgfm.github_flavored_markdown_to_html(text, options=options)
    flat = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", rendered)))
    plain = re.sub(r"(`+)[^`].*?\1", "", prose(text))
    formulas = re.findall(r"(?<![\\$])\$(?![\s$])([^$\n]+?)(?<!\s)\$", plain)
    assert all(formula in flat for formula in formulas)
    banned = (
        r"\\(operatorname|mbox|h?phantom|vphantom|(re)?newcommand|def|let|require|href|class)\b"
    )
    for formula in [*formulas, *fences(text, "math")]:
        assert not re.search(banned, formula), formula
    assert "$$" not in plain


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_details_and_code_fit_github(name):
    lines = prose(DOCUMENTS[name]).split("\n")

    def cells(row: str) -> int:
        return len(re.findall(r"(?<!\\)\|", row.strip().strip("|"))) + 1

    for i, line in enumerate(lines):
        if re.fullmatch(r"\|[\s:|-]+\|", line):
            rows = [lines[i - 1]]
            for row in lines[i + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(row)
            assert {cells(row) for row in rows} == {cells(line)}, (i, lines[i - 1])
            assert cells(line) <= 6, lines[i - 1]
        if "</summary>" in line:
            assert not lines[i + 1].strip(), line
        if line.strip() == "</details>":
            assert not lines[i - 1].strip(), lines[i - 2]
    for body in fences(DOCUMENTS[name], "python"):
        assert max(map(len, body.split("\n"))) <= 100
