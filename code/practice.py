"""Write a piece of a Transformer from memory and be told what is wrong with it.

    python3 code/practice.py                         the exercises, and which you have solved
    python3 code/practice.py blank ModernBlock       a template to fill in: put it into a file
    python3 code/practice.py try mine.py             judges every exercise that mine.py defines

A judged file is executed, as the program of yours that it is, in a process of its own. Values and
gradients are compared with the answers in whiteboard/ on drawn weights; names, packing and order of
your parameters are yours. What is wrong is compared with the answer after planting known mistakes
in it: the one that behaves like yours is named. Two at once are often found, of more one is named.
In a notebook: %load_ext judge, then %%judge above a cell; or try notes.ipynb.
"""

import argparse
import contextlib
import datetime
import difflib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from judge.answers import answer_source, planted
from judge.catalogue import LEVELS, TASKS, task_named
from judge.mistakes import mistakes_of
from judge.notes import section
from judge.process import Child
from judge.progress import Progress, progress_file
from judge.round.command import is_round, run_debug, run_try_round
from judge.round.paper import FAULTS
from judge.session import WORKER, Trial
from judge.source import Unreadable, read_source
from judge.templates import blank
from judge.today import today
from judge.verdict import Verdict, wrong

HERE = Path(__file__).resolve().parent
PRINTED_LINES = 10  # of what a file prints
SAVED_SECONDS = 0.2  # between two looks at a watched file
EVERYTHING = "all"


# =============================================================================================
# try, watch
# =============================================================================================


def run_try(args: argparse.Namespace, progress: Progress, warm: Child | None = None) -> int:
    """Judge a file and print the verdicts: status 0 when all are right, else 1."""
    try:
        source = read_source(args.file)
    except Unreadable as why:
        print(printable(wrong(Path(args.file).name, str(why)).text()))
        return 1
    if is_round(source.text):
        return run_try_round(source.text, Path(args.file), progress, args.hint, args.key)
    trial = Trial(source, args.names or None, args.case)
    solved, failed = [], {}
    for verdict in debugged(source, trial) if args.debug else trial.verdicts(warm):
        print(printable(shown(verdict, args, progress)), flush=True)
        if verdict.right:
            solved.append(verdict.name)
        else:
            failed[verdict.name] = verdict.mistake
    for note in trial.notes:
        print(printable(note))
    if trial.printed.strip():
        print(printed_lines(source.filename, trial.printed))
    progress.remember_tries(failed, solved)
    return 1 if failed or not solved else 0


def debugged(source: object, trial: Trial) -> list[Verdict]:
    """The verdicts, judged in this process without limits, so that breakpoint() works."""
    from judge.worker import in_this_process  # noqa: PLC0415, it imports torch

    judge = in_this_process(source, trial.names, trial.case)
    yield from judge.verdicts()
    trial.notes += judge.notes


def shown(verdict: Verdict, args: argparse.Namespace, progress: Progress) -> str:
    """A verdict as the options ask for it."""
    if verdict.right:
        return verdict.text()
    if args.hint and verdict.mistake:
        verdict = hinted(verdict, progress.hints_given(verdict.name, verdict.mistake))
    text = verdict.text()
    if args.case:
        replay = verdict.replay or "# there are no lines for a REPL: the case is above"
        text += f"\n\n{replay}\n"
    return text


def hinted(verdict: Verdict, times: int) -> Verdict:
    """The name kept back: at first the case and where it differs, then the place, then the name."""
    if times > 2:
        return verdict
    start = next((i for i, line in enumerate(verdict.lines) if line.startswith("case: ")), 1)
    lines = verdict.lines[start:-1]
    if times == 2:
        return verdict._replace(
            lines=(verdict.hint or "no place is known", *lines, verdict.lines[-1])
        )
    return verdict._replace(lines=("a known mistake; --hint again for its place", *lines))


def printed_lines(filename: str, text: str) -> str:
    """What a file printed, apart from the verdicts."""
    lines = text.rstrip().split("\n")
    found = [f"{Path(filename).name} printed:"]
    found += [f"  | {printable(line[:200])}" for line in lines[:PRINTED_LINES]]
    if len(lines) > PRINTED_LINES:
        found.append(f"  | … {len(lines) - PRINTED_LINES} more lines")
    return "\n".join(found)


def printable(text: str) -> str:
    """Without what moves the cursor of a terminal."""
    return "\n".join(
        "".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n")
    )


def run_watch(args: argparse.Namespace, progress: Progress) -> int:
    """Judge whenever the file is saved, until Ctrl-C; the next process waits, torch imported."""
    before: object = None
    warm = Child(WORKER)
    try:
        while True:
            with contextlib.suppress(OSError):
                now = Path(args.file).stat()
                if (now.st_mtime_ns, now.st_size) != before:
                    before = now.st_mtime_ns, now.st_size
                    print(f"── {time.strftime('%H:%M:%S')} {args.file}", flush=True)
                    run_try(args, progress, warm)
                    warm = Child(WORKER)
            time.sleep(SAVED_SECONDS)
    finally:
        warm.close()


# =============================================================================================
# What is printed without judging
# =============================================================================================


def listing(progress: Progress) -> str:
    """The exercises by level, with what is remembered of each."""
    solved = progress.solved
    lines = []
    for level, title in LEVELS.items():
        lines.append(f"level {level}: {title}")
        for task in TASKS.values():
            if task.level == level:
                mark = "x" if task.name in solved else " "
                often = "*" if task.often else " "
                line = f"  [{mark}] {task.name:21} {often} {task.asks:48} {task.section:6}"
                lines.append(f"{line} {remembered(progress.record(task.name))}".rstrip())
    count = f"{len(solved)} of {len(TASKS)} solved, * are asked most."
    return "\n".join([*lines, f"{count} `blank NAME` prints a template, `try FILE` judges it."])


def remembered(record: dict) -> str:
    """The last mistake where it is wrong, else the day and the minutes that it took."""
    if record.get("failed"):
        return f"last: {record.get('mistake') or 'wrong'}"
    if not record["right"]:
        return ""
    took = f", {max(1, round(record['seconds'] / 60))} min" if "seconds" in record else ""
    return f"{record['right'][-1]}{took}"


def run_fault(args: argparse.Namespace) -> int:
    """Print an answer with one mistake in it; reveal says which."""
    name = args.name or random.choice([one for one in TASKS if mistakes_of(one)])
    known = mistakes_of(name)
    number = random.randrange(len(known)) + 1 if args.number is None else args.number
    if not 1 <= number <= len(known):
        return fail(f"{name} has faults 1 to {len(known)}")
    mistake = known[number - 1]
    text = planted(name, mistake)
    print(f"# {name}, fault {number}: what is wrong, which input shows it, how is it mended?\n")
    print(text)
    if not args.reveal:
        print(f"# python3 code/practice.py fault {name} {number} --reveal")
        return 0
    print(f"# {mistake.says}. {TASKS[name].reading}\n#")
    answer = answer_source(name).split("\n")
    lines = list(difflib.unified_diff(text.split("\n"), answer, lineterm="", n=0))
    print("\n".join(f"# {line}" for line in lines[2:] if not line.startswith("@@")))
    return 0


def run_cards() -> int:
    """Print the cards, which a program beside the notes makes."""
    return subprocess.call([sys.executable, HERE / "notes" / "cards.py"])


# =============================================================================================
# The command line
# =============================================================================================


def exercise(text: str) -> str:
    """A name of the table in any case, for argparse."""
    try:
        return task_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def exercise_or_all(text: str) -> str:
    """The same, or `all`."""
    return text if text == EVERYTHING else exercise(text)


def seed(text: str) -> int:
    """A whole number from 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="practice.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_to = parser.add_subparsers(dest="command", metavar="COMMAND")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--progress", type=Path, default=argparse.SUPPRESS, metavar="FILE",
        help="where solved exercises are remembered ($XDG_STATE_HOME or ~/.local/state)",
    )  # fmt: skip
    parser.add_argument("--progress", type=Path, metavar="FILE", help=argparse.SUPPRESS)

    def command(name: str, says: str) -> argparse.ArgumentParser:
        return add_to.add_parser(name, help=says, description=says, parents=[where])

    command("list", "the exercises, and which you have solved (as without a command)")
    command("today", "two exercises, a bug round and five questions: what is due again first")
    one = command("blank", "print a template: signature and docstring, an empty body; or all")
    one.add_argument("names", nargs="+", type=exercise_or_all, metavar="NAME")
    for name, says in (
        ("try", "execute FILE and judge what it defines: status 0 when all is right, 1 when not"),
        ("watch", "execute and judge FILE whenever it is saved, until Ctrl-C"),
    ):
        one = command(name, says)
        add_options(one, name)
    one = command("answer", "print the answer with all it needs: a text that runs")
    one.add_argument("names", nargs=1, type=exercise, metavar="NAME")
    one = command("read", "print the section of the notes that explains an exercise")
    one.add_argument("names", nargs=1, type=exercise, metavar="NAME")
    one = command("fault", "print an answer with one fault in it; --reveal says which")
    one.add_argument("name", nargs="?", type=exercise, metavar="NAME")
    one.add_argument("number", nargs="?", type=int, metavar="NUMBER", help="else one is drawn")
    one.add_argument("--reveal", action="store_true", help="say what is wrong")
    one = command("debug", "print a mini-GPT with hidden bugs: mend it in a file, try it")
    one.add_argument("--seed", type=seed, metavar="N", help="the same file, else one is drawn")
    one.add_argument("--faults", type=int, choices=FAULTS, default=4, help="4 unless said")
    one.add_argument("--sealed", type=Path, metavar="DIR", help="a paper, its key, a score sheet")
    command("cards", "questions, wrong claims and drills of the notes as a file for Anki")
    return parser.parse_args(argv)


def add_options(one: argparse.ArgumentParser, command: str) -> None:
    """What try and watch take."""
    add = one.add_argument
    add("file", metavar="FILE", help="a Python file or notebook of yours; it is executed")
    add("names", nargs="*", type=exercise, metavar="NAME")
    add("--hint", action="store_true",
        help="keep the name back: first the case, then the place, then the name")  # fmt: skip
    add("--case", action="store_true", help="print the failing case as Python for a REPL")
    add("--key", type=Path, metavar="FILE", help="of a sealed paper (key.json beside it)")
    one.set_defaults(debug=False)
    if command == "try":
        add("--debug", action="store_true", help="without limits, for breakpoint() in FILE")


def run(argv: list[str] | None) -> int:
    """Do what the command line asks for; the exit status."""
    args = arguments(argv)
    progress = Progress(args.progress or progress_file())
    if args.command in (None, "list"):
        print(listing(progress))
    elif args.command == "blank":
        names = list(TASKS) if EVERYTHING in args.names else args.names
        progress.remember_blank(names)
        print(blank(names), end="")
    elif args.command == "today":
        print(today(progress, datetime.date.today()))
    elif args.command == "answer":
        print(answer_source(args.names[0]), end="")
    elif args.command == "read":
        print(section(TASKS[args.names[0]].section))
    elif args.command == "fault":
        return run_fault(args)
    elif args.command == "debug":
        return run_debug(args.seed, args.faults, args.sealed, progress)
    elif args.command == "cards":
        return run_cards()
    elif args.command == "watch":
        return run_watch(args, progress)
    else:
        return run_try(args, progress)
    return 0


def fail(message: str) -> int:
    """Say what is wrong with the call: status 2."""
    print(f"practice.py: error: {message}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Status 0, 1 when something is wrong or the reader of a pipe has gone, 2 for a wrong call."""
    try:
        return run(argv)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
