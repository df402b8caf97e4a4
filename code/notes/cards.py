"""Questions, wrong claims and drills of the notes as a tab-separated file for Anki.

    python3 code/notes/cards.py > cards.txt          (needs cmarkgfm)

Front, back and tag stand in a line; formulas are in the form of Anki's MathJax.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

NOTES = Path(__file__).resolve().parents[2] / "transformer_block_tutorial.md"
sys.path.insert(0, str(NOTES.parent / "code"))

from judge.notes import section_of  # noqa: E402, the path comes first

# Blocks of code first: a $ in them is no formula, a ``` in a formula does not occur.
PARTS = re.compile(
    r"```math\n(?P<block>.*?)\n```|(?P<code>^```.*?^```)|\$\$(?P<display>.*?)\$\$"
    r"|\$`(?P<quoted>[^`]+)`\$|(?P<word>`[^`\n]+`)|\$(?P<inline>[^$\n]+)\$",
    re.S | re.M,
)
FRAME = re.compile(r"<!--.*?-->|</?(?:details|summary|picture|source|img|a)\b[^>]*>", re.S)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
# Labels of demos, which are nothing to look up on a card, and the sentence that had them alone.
LABELS = (re.compile(r"\[D\d\d\], "), re.compile(r",? \[D\d\d\]"), re.compile(r" See\."))
DETAILS = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.S)
CLAIM = re.compile(r"^\*\*(W\d+\..*?)\*\*\n(.*?)(?=^\*\*W\d+\.|\Z)", re.S | re.M)
DRILL = re.compile(
    r"^(\*\*Drill \d+\.?\*\*.*?)<details>\s*<summary>.*?</summary>(.*?)</details>", re.S | re.M
)


def cards(notes: str) -> list[tuple[str, str, str]]:
    """Front, back and tag, in Markdown."""
    found = []
    for question, answer in DETAILS.findall(section_of(notes, "9")):
        if re.match(r"(?:<[^>]+>|\W)*Q\d+", question):
            found.append((question.strip(), answer.strip(), "question"))
    claims = section_of(notes, "8.2")
    found += [(claim, answer.strip(), "claim") for claim, answer in CLAIM.findall(claims)]
    for row in re.findall(r"^\|(.*)\|\s*$", claims, re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if re.search(r"\bW\d+\b", cells[0]) and len(cells) > 1:
            front = cells[:2] if re.fullmatch(r"\W*W\d+\W*", cells[0]) else cells[:1]
            found.append((" ".join(front), "\n\n".join(cells[len(front) :]), "claim"))
    drills = DRILL.findall(section_of(notes, "11"))
    return found + [(front.strip(), back.strip(), "drill") for front, back in drills]


def as_html(markdown: str, to_html: Callable[[str], str]) -> str:
    """One line of HTML: formulas as MathJax, links and pictures as their text.

    to_html is cmarkgfm's. It sees a word in the place of a formula, whose letters are Markdown.
    """
    kept: list[str] = []

    def without_formula(part: re.Match) -> str:
        shown = part["block"] or part["display"]
        formula = shown or part["quoted"] or part["inline"]
        if not formula:
            return part[0]  # code
        text = formula.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
        kept.append(f"\\[{text}\\]" if shown else f"\\({text}\\)")
        return f"kept{len(kept) - 1}formula"

    text = PARTS.sub(without_formula, markdown)
    text = LINK.sub(r"\1", FRAME.sub("", text))
    for label in LABELS:
        text = label.sub("", text)
    html = to_html(text).strip()
    html = re.sub(r"kept(\d+)formula", lambda m: kept[int(m[1])], html)
    inside = re.fullmatch(r"<p>((?:(?!<p>).)*)</p>", html, re.S)  # one paragraph needs no frame
    html = inside[1] if inside else html
    return re.sub(r"(<pre.*?</pre>)|\n", lambda m: (m[1] or " ").replace("\n", "<br>"), html,
                  flags=re.S).replace("\t", "    ")  # fmt: skip


def card_file(notes: str, to_html: Callable[[str], str]) -> str:
    """All cards, as Anki imports them."""
    lines = ["#separator:tab", "#html:true", "#tags column:3"]
    for front, back, tag in cards(notes):
        lines.append(f"{as_html(front, to_html)}\t{as_html(back, to_html)}\t{tag}")
    return "\n".join(lines)


def main() -> int:
    """Print the file: status 0, 2 where cmarkgfm is missing."""
    try:
        from cmarkgfm import github_flavored_markdown_to_html  # noqa: PLC0415, said if missing
    except ModuleNotFoundError:
        print("cards.py: error: it needs cmarkgfm: pip install cmarkgfm", file=sys.stderr)
        return 2
    print(card_file(NOTES.read_text(encoding="utf-8"), github_flavored_markdown_to_html))
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
