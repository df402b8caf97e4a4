"""The notes: quotes equal the script, commands run, links resolve, GitHub shows them as meant."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import cmarkgfm
import pytest
import torch
from cmarkgfm.cmark import Options
from documented import DOCUMENTED, without_figures

from notes import build

TEXT = build.NOTES.read_text(encoding="utf-8")
README = (build.ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {"notes": TEXT, "README": README}
DETAILS = re.compile(r"<details>.*?</details>\n?", re.S)
TARGET = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.M)


def fences(text: str, language: str) -> list[str]:
    return [body for _, found, body in build.FENCE.findall(text) if found == language]


def words(text: str) -> str:
    """What is read as text: no fences, code spans, comments, link targets and summaries."""
    text = TARGET.sub("", build.prose(text))
    text = re.sub(r"^#+ .*$|<!--.*?-->|<summary>.*?</summary>", "", text, flags=re.M)
    return re.sub(r"(`+)[^`].*?\1", "", text)


@pytest.mark.parametrize("kind", ["quotes", "benchmark", "links"])
def test_nothing_is_stale(kind):
    assert build.stale(kind) == [], f"python code/notes/build.py {kind}"


def test_every_python_fence_is_a_quote():
    assert len(build.SNIPPET.findall(TEXT)) == len(fences(TEXT, "python")) > 7


@pytest.mark.parametrize(
    ("kind", "was", "becomes"),
    [
        ("quotes", "def rotate(x, positions", "def rotate(y, positions"),
        ("quotes", "def absorbed(self, q_nope", "def absorbed(self, q"),
        ("benchmark", "<!-- prefill-2048-explicit-eager", "9<!-- prefill-2048-explicit-eager"),
        ("links", "[§5.4]: #54-mla", "[§5.4]: #53-cache-contracts"),
    ],
)
def test_stale_is_found_and_written(kind, was, becomes, tmp_path, monkeypatch, capsys):
    changed = tmp_path / "notes.md"
    changed.write_text(TEXT.replace(was, becomes, 1), encoding="utf-8")
    monkeypatch.setattr(build, "DOCUMENTS", (changed,))
    line = TEXT[: TEXT.index(was)].count("\n") + 1
    assert build.main([kind, "--check"]) == 1
    assert capsys.readouterr().out == f"notes.md:{line}: {kind} stale\n"
    assert build.main([kind]) == 0
    assert changed.read_text(encoding="utf-8") == TEXT
    assert build.main([kind, "--check"]) == 0


@pytest.mark.parametrize("mark", ["RECIPES", "FAULTS", "LINKS", "BENCHMARK", "FIGURE"])
def test_marks_of_each_kind(mark):
    assert any(getattr(build, mark).search(text) for text in DOCUMENTS.values())


def test_whiteboard_quotes_run():
    quoted = [(name, body) for _, name, body in build.SNIPPET.findall(TEXT) if name[:6] == "whiteb"]
    assert "whiteboard.ModernBlock" in dict(quoted)
    for name, body in quoted:
        scope = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn}
        exec(compile(body, name, "exec"), scope)
        assert name.partition(".")[2] in scope
    scope = {"torch": torch, "F": torch.nn.functional, "nn": torch.nn}
    exec(dict(quoted)["whiteboard.ModernBlock"], scope)
    block, x = scope["ModernBlock"](16, 4, 2, 24), torch.randn(2, 5, 16)
    first, cache = block(x[:, :3])
    assert torch.allclose(block(x)[0], torch.cat((first, block(x[:, 3:], cache)[0]), 1), atol=1e-5)


def test_open_page_is_short():
    opened = DETAILS.sub("", TEXT)
    assert opened.count("\n") <= 1900 and len(opened.encode()) <= 110_000
    assert TEXT.count("\n") <= 3200
    assert "<details" not in opened and "</details" not in opened


def test_readme_output_and_names():
    documented = without_figures(DOCUMENTED).splitlines()
    (output,) = (body for body in fences(README, "text") if body.startswith("[D01]"))
    assert without_figures(output).splitlines() == [documented[0], "…", *documented[-3:]]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*$", README, re.M)))
    parts = {"attn", "ffn", "x", "memory", "truncate", "reset", "generate"}
    assert {name for name in names if name not in parts} <= set(build.DEFINITIONS[build.SCRIPT])
    assert len(set(names)) > 20


@pytest.mark.parametrize("command", list(fences(TEXT, "sh")))
def test_commands_run(command):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=build.ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_output_in_the_notes():
    documented = DOCUMENTED.strip()
    blocks = [body.strip() for body in fences(TEXT, "text") if body.startswith("[D01]")]
    assert [without_figures(block) for block in blocks] == [without_figures(documented)]


def anchors(text: str) -> set[str]:
    return {*build.slugs(text), *re.findall(r'<a id="([^"]+)"></a>', build.prose(text))}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_pictures_resolve(name):
    text = build.prose(DOCUMENTS[name])
    targets = re.findall(r"\]\(([^)]+)\)", text) + [target for _, target in TARGET.findall(text)]
    for target in targets:
        file, _, anchor = target.partition("#")
        if file.startswith("http"):
            continue
        assert not file or (build.ROOT / file).exists(), target
        if anchor:
            other = (build.ROOT / file).read_text(encoding="utf-8") if file else DOCUMENTS[name]
            assert anchor in anchors(other), target


def test_anchors_are_unique():
    found = re.findall(r'<a id="([^"]+)"></a>', TEXT)
    assert len(found) == len(set(found)) == 15 + 62
    assert not set(found) & set(build.slugs(TEXT))


def test_what_is_named_is_a_link():
    text = words(TEXT)
    text = re.sub(r'<a id="d\d\d"></a>D\d\d', "", text)  # the list of demos itself
    text = re.sub(r"\[arXiv:(\d{4}\.\d{5})\]\(https://arxiv.org/abs/\1\)", "", text)
    defined = {label for label, _ in TARGET.findall(TEXT)}
    for label in re.findall(rf"\[({build.LABEL.pattern})\]", text):
        assert label in defined, label
    text = re.sub(rf"\[({build.LABEL.pattern})\]", "", text)
    bare = [(m[0], text[m.start() - 40 : m.end() + 20]) for m in build.LABEL.finditer(text)]
    assert not bare
    assert not re.search(r"\[\d+\.\d+\]|§ \d", text)


def test_labels_become_links():
    rendered = cmarkgfm.github_flavored_markdown_to_html(TEXT, options=Options.CMARK_OPT_UNSAFE)
    rendered = re.sub(r"<code.*?</code>|<pre.*?</pre>", "", rendered, flags=re.S)
    assert not re.search(r"\[(§\d|[DQ]\d)", rendered)
    for label, target in TARGET.findall(TEXT):
        assert f'<a href="{target}">{label}</a>' in rendered, label
    assert len(re.findall(r'href="#\d', rendered)) > 150


def test_pictures_have_alt_texts():
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", TEXT)
    assert len({path for _, path in pictures}) >= 12
    assert all(len(alt) > 60 and path.startswith("code/figures/") for alt, path in pictures)
    assert "```mermaid" not in TEXT


def test_sections_have_one_form():
    sections = re.split(r"^### ", build.prose(TEXT), flags=re.M)[1:]
    for section in sections:
        heading, _, body = section.partition("\n")
        body = body.partition("\n## ")[0]
        if re.match(r"([1-7]\.\d|8\.1) |1[0234]\.\d |11\.[134] ", heading):
            order = [body.find(f"**{part}.**") for part in ("Claim", "What people ask", "Trap")]
            assert -1 < order[0] < order[1] < order[2], heading
            assert body.strip().startswith("**Claim.**"), heading


def test_named_demos_exist():
    assert set(re.findall(r"\bD\d\d\b", TEXT)) == {f"D{i:02d}" for i in range(1, 16)}
    assert set(map(int, re.findall(r"\bQ(\d+)\b", TEXT))) == set(range(1, 63))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_formulas_survive_markdown(name):
    text = DOCUMENTS[name]
    options = Options.CMARK_OPT_UNSAFE
    rendered = cmarkgfm.github_flavored_markdown_to_html(text, options=options)
    flat = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", rendered)))
    plain = re.sub(r"(`+)[^`].*?\1", "", build.prose(text))
    formulas = re.findall(r"(?<![\\$])\$(?![\s$])([^$\n]+?)(?<!\s)\$", plain)
    assert all(formula in flat for formula in formulas)
    banned = (
        r"\\(operatorname|mbox|h?phantom|vphantom|(re)?newcommand|def|let|require|href|class)\b"
    )
    for formula in [*formulas, *fences(text, "math")]:
        assert not re.search(banned, formula), formula
    assert "$$" not in plain


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_and_code_fit_github(name):
    lines = build.prose(DOCUMENTS[name]).split("\n")

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
            assert cells(line) <= (8 if "q/kv | FFN | Ratio" in lines[i - 1] else 6), lines[i - 1]
        if "</summary>" in line:
            assert not lines[i + 1].strip(), line
        if line.strip() == "</details>":
            assert not lines[i - 1].strip(), lines[i - 2]
    for body in fences(DOCUMENTS[name], "python"):
        assert max(map(len, body.split("\n"))) <= 100


def test_week_has_everything():
    week = TEXT[TEXT.index("| Day | Read |") : TEXT.index("```sh", TEXT.index("| Day | Read |"))]
    helpers = {"SwiGLU", "MultiHeadAttention", "merged", "try"}
    exercises = set(re.findall(r"`(\w+)`", week))
    answers = {name for text in build.ANSWERS for name in build.DEFINITIONS[text]}
    assert exercises - helpers == {name for name in answers if "." not in name} - helpers
    asked = set()
    for first, _, last in re.findall(r"\[Q(\d+)\]( to \[Q(\d+)\])?", week):
        asked |= set(range(int(first), int(last or first) + 1))
    assert asked == set(range(1, 63))
    drills = re.findall(r"drill ([\d, ]+)", week)
    assert sorted(int(n) for row in drills for n in row.split(",")) == list(range(1, 11))
    days = [line.split("|")[2] for line in week.split("\n")[2:] if line.startswith("|")]
    sections = {f"§{n}" for n in range(15)} - {"§9"}
    assert len(days) == 10 and sections <= set(re.findall(r"§\d+", " ".join(days)))


def test_oldest_versions_are_said_once():
    """Who installs, who checks and who reads are told of the same ones."""
    code, versions = build.ROOT / "code", README[README.index("## Versions") :]
    (torch_version,) = re.findall(
        r"^torch==([\d.]+)$", (code / "tests" / "oldest.txt").read_text("utf-8"), re.M
    )
    python, named = re.search(r"on\nPython ([\d.]+) with torch ([\d.]+) ", versions).groups()
    assert named == torch_version
    floor = (build.ROOT / "requirements.txt").read_text("utf-8")
    assert floor.startswith(f"torch>={torch_version.removesuffix('.0')} ")
    target = python.replace(".", "")
    assert f'target-version = "py{target}"' in (code / "ruff.toml").read_text("utf-8")
    assert f"Python {python} or newer" in README
    run = (build.ROOT / ".ci" / "run").read_text("utf-8")
    assert f"python{python} " in run and "-r code/tests/oldest.txt" in run
