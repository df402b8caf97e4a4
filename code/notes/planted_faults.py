"""Faults to plant in the script: what each changes, what one would see, which demos turn FAIL.

python3 code/notes/planted_faults.py              the table of the notes, measured
python3 code/notes/planted_faults.py NAME ...     the change a fault makes, and what the demos say
python3 code/notes/planted_faults.py --list       the names, and what one would see

In faults.txt a fault begins with `* name, place: symptom`; then come the lines of the script that
it changes (-) and what stands there instead (+). A line that ends in a space has a backslash.
"""

import argparse
import ast
import difflib
import functools
import itertools
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

SCRIPT = Path(__file__).resolve().parents[1] / "transformer_block.py"
sys.path.insert(0, str(SCRIPT.parent))

import transformer_block as tb  # noqa: E402, the path comes first


class Fault(NamedTuple):
    """In the definition at place (Class.method or function), old becomes new."""

    name: str
    place: str
    symptom: str
    old: str
    new: str


def read_faults(text: str) -> dict[str, list[Fault]]:
    """The faults of faults.txt by their group."""
    groups = {}
    for title, body in re.findall(r"^# ([^\n]*)\n(.*?)(?=^# |\Z)", text, re.M | re.S):
        faults = [fault.split("\n") for fault in re.split(r"^\* ", body.rstrip(), flags=re.M)[1:]]
        groups[title] = [read_fault(lines) for lines in faults]
    return groups


def read_fault(lines: list[str]) -> Fault:
    said = " ".join(line.strip() for line in lines if line and line[0] not in "-+")
    name, place, symptom = re.fullmatch(r"(\S+), (\S+): (.*)", said).groups()
    old, new = (
        "\n".join(line[1:].removesuffix("\\") for line in lines if line[:1] == sign)
        for sign in "-+"
    )
    return Fault(name, place, symptom, old, new)


GROUPS = read_faults(Path(__file__).with_name("faults.txt").read_text(encoding="utf-8"))
FAULTS = list(itertools.chain(*GROUPS.values()))
BY_NAME = {fault.name: fault for fault in FAULTS}
CLASSICS = (
    "residual-from-norm",
    "one-norm-used-twice",
    "causal-skipped-with-cache",
    "causal-mask-top-left",
    "window-off-by-one",
    "groups-tiled",
    "soft-cap-after-the-mask",
    "dead-rows-nan-gradient",
    "keys-rotated-twice",
    "position-after-the-append",
    "cache-filled-after-widening",
    "moe-renormalised",
)


@functools.cache
def parts(path: Path = SCRIPT) -> tuple[dict[str, types.CodeType], dict[str, str]]:
    """The statements of a file, compiled one by one, and the sources of its definitions."""
    source = path.read_text(encoding="utf-8")
    lines, codes, sources = source.splitlines(keepends=True), {}, {}
    for node in ast.parse(source).body:
        top = getattr(node, "name", f"line {node.lineno}")
        codes[top] = compile(ast.Module([node], []), path.name, "exec")
        for part in [node, *(getattr(node, "body", []) if isinstance(node, ast.ClassDef) else [])]:
            if isinstance(part, (ast.ClassDef, ast.FunctionDef)):
                name = top if part is node else f"{top}.{part.name}"
                sources[name] = "".join(lines[part.lineno - 1 : part.end_lineno])
    return codes, sources


def patched(fault: Fault, path: Path = SCRIPT) -> str:
    """The definition with the fault in it."""
    source = parts(path)[1].get(fault.place, "")
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: old must occur once in {fault.place}")
    return source.replace(fault.old, fault.new)


def planted(fault: Fault | None, path: Path = SCRIPT) -> types.ModuleType:
    """The file as a module of its own, with the fault in it."""
    codes, sources = parts(path)
    module = types.ModuleType("faulty")
    module.__file__ = str(path)
    for name, code in codes.items():
        faulty = fault is not None and name == fault.place.partition(".")[0]
        text = sources[name].replace(sources[fault.place], patched(fault, path)) if faulty else code
        exec(text, module.__dict__)
    return module


@functools.cache
def verdicts(fault: Fault | None) -> dict[str, tuple[bool, str]]:
    """What each demo says, by its id."""
    module = planted(fault)
    return {name: module.main_verdict(run, "cpu") for name, run in module.main_demos().items()}


def failing(fault: Fault | None, compared: bool = False) -> list[str]:
    """The demos that turn FAIL; with compared those only that ran to their end."""
    said = verdicts(fault).items()
    return [n for n, (ok, text) in said if not ok and not (compared and text.startswith("raised "))]


def rows(faults: Iterable[Fault]) -> str:
    """Faults as a Markdown table; a demo stands in brackets, which the notes turn into a link."""
    lines = ["| Fault | What you would see | Turn FAIL |", "|:--|:--|:--|"]
    for fault in faults:
        demos = " ".join(f"[{name}]" for name in failing(fault))
        lines.append(f"| {fault.name} | {fault.symptom} | {demos} |")
    return "\n".join(lines)


def table() -> str:
    """All faults, each group folded."""
    folds = []
    for title, faults in GROUPS.items():
        summary = f"<summary>{title}: {len(faults)} faults</summary>"
        folds.append(f"<details>\n{summary}\n\n{rows(faults)}\n\n</details>")
    return "\n".join(folds)


def classics() -> str:
    """The twelve that everybody meets."""
    return rows(BY_NAME[name] for name in CLASSICS)


def explain(fault: Fault) -> str:
    """The change as a diff, and the lines of the demos that turn FAIL."""
    before, after = parts()[1][fault.place].splitlines(), patched(fault).splitlines()
    diff = list(difflib.unified_diff(before, after, fault.place, fault.name, lineterm="", n=1))
    said = [f"[{name}] {verdicts(fault)[name][1]}  FAIL" for name in failing(fault)]
    return "\n".join([*diff, *said])


def fault_named(parser: argparse.ArgumentParser, name: str) -> Fault:
    """The fault of that name, in any case; an error with the nearest names, or all of them."""
    if name.lower() not in BY_NAME:
        tb.main_unknown(parser, "fault", name, BY_NAME)
    return BY_NAME[name.lower()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="planted_faults.py",
        description="Plants faults in transformer_block.py, one at a time, and runs its demos.",
        epilog=f"Without a name all {len(FAULTS)} are planted, which takes half a minute.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="faults: their change and what the demos then say"
    )
    parser.add_argument("--list", action="store_true", help="the names and what one would see")

    def answer(options: argparse.Namespace) -> int:
        chosen = list(dict.fromkeys(fault_named(parser, name) for name in options.names))
        if chosen and options.list:
            parser.error("names and --list exclude each other")
        torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
        if options.list:
            width = max(map(len, BY_NAME))
            print("\n".join(f"{fault.name:{width}}  {fault.symptom}" for fault in FAULTS))
        else:
            print("\n\n".join(map(explain, chosen)) or table())
        return 0

    return tb.main_program(parser, argv, answer)


if __name__ == "__main__":
    sys.exit(main())
