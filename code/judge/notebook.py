"""The cell magic %%judge: a cell is run as any other, and judged in a process of its own."""

import shlex

from judge.catalogue import task_named
from judge.session import Trial
from judge.source import Source, with_context

CELL = "cell.py"  # the name under which tracebacks show the cell's lines


def register(shell: object) -> None:
    """Make the magic known to an IPython shell."""

    def judge(line: str, cell: str) -> None:
        """Judge the cell's definitions, or the exercises named behind %%judge."""
        judge_cell(shell, line, cell)

    shell.register_magic_function(judge, magic_kind="cell")


def judge_cell(shell: object, line: str, cell: str) -> None:
    """Run a cell in the kernel, where its definitions stay; judge it with what it uses."""
    names = exercises(line)
    if names is None:
        return
    before = list(shell.user_ns.get("In", []))[:-1]
    shell.run_cell(cell)
    trial = Trial(Source(with_context(cell, before), CELL), names or None)
    for verdict in trial.verdicts():
        print(verdict.text(), flush=True)
    for note in trial.notes:
        print(note)


def exercises(line: str) -> list[str] | None:
    """The names behind %%judge; None, and a line that says why, where one is none."""
    try:
        return [task_named(word) for word in shlex.split(line)]
    except ValueError as error:
        print(f"%%judge: {error}")
        return None
