"""From the text of a file to the verdicts on the exercises that it defines."""

import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from judge.answers import executed_answer, part_with
from judge.cases import ArrayFunction, Case, Outcomes, Trouble, Unjudged
from judge.catalogue import TASKS
from judge.class_judge import Reading
from judge.classes import ClassExercise
from judge.compare import kind_in_words
from judge.exercises import FunctionExercise, answer_outcomes, exercise
from judge.layout_words import StrippedSubmission, extra_biases, unrecognised_lines
from judge.naming import (
    Named,
    Wrong,
    behaves_as,
    differences,
    known_mistakes,
    named_function_mistake,
)
from judge.ready import ready_layer
from judge.replay import replay_class, replay_function
from judge.source import Source
from judge.state import SubmittedFile, neutral
from judge.subjects import Submission
from judge.verdict import MAX_LINES, UNKNOWN, Verdict, wrong

WIDE_MISTAKE = 200  # characters of a mistake that stand in one line
DTYPES = re.compile(r"dtype|Float|Double|float|double")


class Judge:
    """Judges one text; stage is told the exercise that begins, running each case.

    case: verdicts carry the failing case as lines for a REPL.
    """

    def __init__(
        self, source: Source, names: list[str] | None = None,
        stage: Callable[[str], None] | None = None, running: Callable[[str], None] | None = None,
        case: bool = False,
    ):  # fmt: skip
        self.source, self.names, self.case = source, names, case
        self.stage, self.running = stage or (lambda label: None), running
        self.file = SubmittedFile(source.text, source.filename)
        self.notes: list[str] = []  # what is to be said beside the verdicts

    def verdicts(self) -> Iterator[Verdict]:
        """One after the other."""
        short = Path(self.source.filename).name
        with neutral():
            for name in self.names or self.source.exercises():
                self._run_answer(name)  # before the file can reach it
            try:
                self.stage(f"{short} as it is run")
                self.file.run()
            except (Exception, SystemExit) as error:
                why = self.file.raised(error).lines
                if isinstance(error, SystemExit):
                    why = (f"{short} exits when it is run", *why)
                for name in self.names or self.source.exercises() or [short]:
                    yield wrong(name, *why)
                return
            asked = self.names or self._defined()
            if not asked:
                why = "no exercise's name is defined in it; the names: " + ", ".join(TASKS)
                yield wrong(short, *textwrap.wrap(why, 96))
            for name in asked:
                self.stage(name)
                yield self._verdict_on(name)

    def _run_answer(self, name: str) -> None:
        """All its cases, so that nothing of a file can change what is expected."""
        outcomes = answer_outcomes(name)
        for i in range(len(outcomes.cases)):
            outcomes[i]

    def _defined(self) -> list[str]:
        """The exercises that the file defines, without helpers that only have the name of one."""
        found = []
        for name in TASKS:
            imported = name in self.source.imported and name not in self.source.definitions
            if imported or name not in self.file.namespace:
                continue
            if self._is_helper(name):
                self.notes.append(
                    f"{name} is left alone: its signature is not the exercise's, and others use it"
                )
            else:
                found.append(name)
        return found

    def _is_helper(self, name: str) -> bool:
        """Whether a definition with another signature serves another exercise of the file."""
        used = any(name in self.source.needed_by(other) for other in TASKS if other != name)
        if not used:
            return False
        return signature_of(self.file.namespace[name]) != signature_of(executed_answer(name))

    def _verdict_on(self, name: str) -> Verdict:
        """The verdict on one definition; nothing of it may end the verdicts on the rest."""
        one, short = exercise(name), Path(self.source.filename).name
        if name not in self.file.namespace:
            return wrong(name, f"{short} does not define {name}")
        theirs = self.file.namespace[name]
        kind = "a class" if inspect.isclass(executed_answer(name)) else "a function"
        if not callable(theirs):
            return wrong(name, f"{name} must be {kind}, it is {kind_in_words(theirs)}")
        try:
            if isinstance(one, ClassExercise):
                return self._verdict_on_class(one, theirs)
            return self._verdict_on_function(one, theirs)
        except Unjudged as why:
            return Verdict(name, False, "not judged", (str(why), one.task.reading))
        except Exception as error:
            why = self.file.raised(error).lines
            return Verdict(name, False, "not judged", (*why[-6:], one.task.reading))
        finally:
            self.file.restore()

    # Functions

    def _verdict_on_function(self, one: FunctionExercise, function: Callable) -> Verdict:
        if self.source.is_numpy(one.name) and any(case.inputs for case in one.cases):
            return self._verdict_on_arrays(one, function)
        answer = answer_outcomes(one.name)
        theirs = Outcomes(one.cases, function, self.file, self.running)
        found = list(differences(answer, theirs))
        if not found:
            return right(one.name, len(one.cases), ready_layer(one.name, function))
        named = named_function_mistake(one.name, theirs, found)
        shown = replay_function(one.name, answer, theirs, found) if self.case else None
        return self._wrong(one, theirs, found, named, shown)

    def _verdict_on_arrays(self, one: FunctionExercise, function: Callable) -> Verdict:
        """By the values of float64 arrays; names of mistakes come from the same cases."""
        cases = [case for case in one.cases if takes_arrays(case)]
        answer = Outcomes(cases, ArrayFunction(executed_answer(one.name), arrays=False))
        theirs = Outcomes(cases, ArrayFunction(function, arrays=True), self.file, self.running)
        found = list(differences(answer, theirs))
        note = "NumPy keeps no gradients: values alone are judged"
        if not found:
            return right(one.name, len(cases), None, note)
        verdict = self._wrong(one, theirs, found, name_of_arrays(one.name, theirs, found), None)
        return verdict._replace(
            lines=(*verdict.lines[:-1][: MAX_LINES - 2], note, verdict.lines[-1])
        )

    # Classes

    def _verdict_on_class(self, one: ClassExercise, cls: Callable) -> Verdict:
        return self.read_class(one, cls)[0]

    def read_class(self, one: ClassExercise, cls: Callable) -> tuple[Verdict, Submission | None]:
        """The verdict, and the submission with its parameters read, where they could be."""
        answer = answer_outcomes(one.name)
        next(differences(answer, answer), None)  # Unjudged where the answer itself fails
        submission = Submission(one, cls, answer.subject, self.file)
        if self.running:
            self.running(one.cases[0].call)
        failure = self._failure_to_build(one, submission)
        if failure is not None:
            return failure, None
        reading = Reading(one.name, submission, self.running)
        reading.read()
        if reading.is_right:
            verdict = right(one.name, len(one.cases), ready_layer(one.name, cls))
            return verdict, reading.outcomes.subject
        if reading.outcomes is None:
            return self._without_biases(one, submission)
        return self._wrong_class(one, reading), reading.outcomes.subject

    def _failure_to_build(self, one: ClassExercise, submission: Submission) -> Verdict | None:
        """What its constructor or its first call raise, in words."""
        usual = one.sizes[0]
        try:
            with submission.in_dtype(torch.float32), contextlib.suppress(Trouble):
                submission.built(usual)  # what it keeps for good is made as in a program
            submission.search(usual)
        except Trouble as trouble:
            call = f"case: {one.call(usual, one.inputs(usual, 2, 5))}"
            return wrong(one.name, str(trouble), call, one.task.reading)
        except (Exception, SystemExit) as error:
            call = f"case: {one.call(usual, one.inputs(usual, 2, 5))}"
            lines = (call, *self.file.raised(error).lines, *dtype_note(error))
            return wrong(one.name, *lines[: MAX_LINES - 1], one.task.reading)
        return None

    def _wrong_class(self, one: ClassExercise, reading: Reading, more: str = "") -> Verdict:
        """Of a class whose parameters were read; more is a mistake that was seen before."""
        found = list(differences(reading.answer, reading.outcomes))
        shown = replay_class(one, reading.outcomes.subject) if found and self.case else None
        verdict = self._wrong(one, reading.outcomes, found, reading.named, shown, more)
        unsure = not reading.submission.all_tried and verdict.lines[0] == UNKNOWN
        if unsure:
            said = f"{UNKNOWN} in the {len(reading.tried)} likeliest readings of its parameters;"
            lines = (f"{said} names such as q, k, v, o make it sure", *verdict.lines[1:])
            verdict = verdict._replace(lines=lines)
        return verdict

    def _without_biases(
        self, one: ClassExercise, submission: Submission
    ) -> tuple[Verdict, Submission | None]:
        """Of a class whose parameters are not the answer's: its biases put to 0, or not read."""
        usual, weights = one.sizes[0], submission.reference.weights(one.sizes[0])
        extra = extra_biases(submission.search(usual))
        if extra:
            stripped = StrippedSubmission(submission, extra)
            reading = Reading(one.name, stripped, self.running)
            reading.read()
            more = biases_in_words(extra)
            if reading.is_right:
                lines = (more, f"case: {one.cases[2].call}", "without it, all is right")
                verdict = Verdict(one.name, False, "wrong", (*lines, one.task.reading), more)
                return verdict._replace(hint="the maps and their parameters"), None
            if reading.outcomes is not None:
                return self._wrong_class(one, reading, more), None
        lines = unrecognised_lines(usual, submission.built(usual), weights)
        headline = "layout not recognised"
        return Verdict(one.name, False, headline, (*lines[:7], one.task.reading)), None

    # Words

    def _wrong(
        self, one: FunctionExercise | ClassExercise, theirs: Outcomes, found: Wrong,
        named: Named | None, shown: str | None, more: str = "",
    ) -> Verdict:  # fmt: skip
        """At most eight lines: the mistake, the smallest case, the difference, where to read."""
        if not found:  # all is right but for what was seen before
            return Verdict(one.name, False, "wrong", (more, one.task.reading), more)
        i, difference = next(
            (item for item in found if item[0] == first_plain(theirs, found)), found[0]
        )
        mistake = " AND ".join(filter(None, (more, named.text if named else ""))) or None
        said = f"one of several mistakes: {mistake}" if named and named.of_several else mistake
        if mistake is None:
            words = difference.lines[0] if difference.where == "trouble" else None
            mistake = said = words or dtype_mistake(difference.lines)
        case, lines = one.cases[i] if len(one.cases) == len(theirs.cases) else theirs.cases[i], []
        if difference.where == "trouble":
            lines = [said or difference.lines[0], f"case: {case.call}"]
        elif difference.where == "raised":
            last = dtype_note(difference.lines[-1])
            lines = [*([said] if said else []), f"case: {case.call}", *difference.lines, *last]
        else:
            lines = [said or UNKNOWN, f"case: {case.call}"]
            lines += [f"{difference.where}: {line}" for line in difference.lines]
            if difference.where == "the gradient of the parameters":
                lines[-1] = theirs.subject.gradient_in_words(difference.lines[0], one.sizes[0])
        if said and len(lines[0]) > WIDE_MISTAKE:
            lines[0:1] = textwrap.wrap(said, 110)
        part = part_with(one.name, named.mistakes[0]) if named else one.name
        head = f"wrong  ({len(found)} of {len(theirs.cases)} cases)"
        reading = TASKS.get(part, one.task).reading
        hint = f"the mistake is one of {part}'s" if named else None
        return Verdict(
            one.name, False, head, (*lines[: MAX_LINES - 1], reading), mistake, hint, shown
        )


def first_plain(theirs: Outcomes, found: Wrong) -> int:
    """The first failing case, one in half precision only where no other fails."""
    return next((i for i, _ in found if not theirs.cases[i].half), found[0][0])


def right(name: str, cases: int, ready: str | None, *lines: str) -> Verdict:
    """The verdict on a right answer; ready is torch's own layer, where it does the work."""
    by = f", by torch's own {ready}" if ready else ""
    return Verdict(name, True, f"right  ({cases} cases){by}", lines)


def takes_arrays(case: Case) -> bool:
    """Whether a case can be run with NumPy arrays: float64, integers and bools alone."""
    if case.inputs is None:
        return case.call.startswith(("online_softmax", "flash_backward"))
    tensors = [v for v in case.inputs.values() if isinstance(v, torch.Tensor)]
    return not any(t.is_floating_point() and t.dtype != torch.float64 for t in tensors)


def name_of_arrays(name: str, theirs: Outcomes, found: Wrong) -> Named | None:
    """The single mistake that gives the same values."""
    order = [*(i for i, _ in found), *range(len(theirs.cases))]
    for mistake in known_mistakes(name):
        known = ArrayFunction(executed_answer(name, mistake), arrays=False)
        outcomes = Outcomes(theirs.cases, known)
        if behaves_as(outcomes, theirs, order):
            return Named((mistake,))
    return None


def biases_in_words(names: list[str]) -> str:
    """Which parameters are biases that were not asked for."""
    owners = [name.rpartition(".")[0] or name for name in names]
    if len(owners) == 1:
        return f"{owners[0]} has a bias; none was asked"
    shown = ", ".join(owners[:3]) + (f" and {len(owners) - 3} more" if len(owners) > 3 else "")
    return f"{shown} have biases; none were asked"


def dtype_note(error: object) -> tuple[str, ...]:
    """What the judge runs in, where an exception is about dtypes."""
    text = str(error)
    if "dtype" in text and DTYPES.search(text):
        return ("the judge runs it in float64, its default dtype: leave dtype= out, or follow x",)
    return ()


def dtype_mistake(lines: Iterable[str]) -> str | None:
    """A wrong dtype as a mistake."""
    found = re.match(r"expected torch\.(\w+), got torch\.(\w+)$", next(iter(lines), ""))
    if found:
        return f"the result is {found[2]}; it must have the dtype of the input, {found[1]}"
    return None


def signature_of(function: object) -> tuple[int, int] | None:
    """How many arguments it needs and takes by position; None where that cannot be read."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = [p for p in parameters if p.kind in kinds]
        needed = sum(p.default is inspect.Parameter.empty for p in own)
        return needed, len(own)
    return None


def judge(
    text: str, names: list[str] | None = None, filename: str = "mine.py", case: bool = False
) -> list[Verdict]:
    """Execute a text in this process, without limits, and judge what it defines, or the names."""
    return list(Judge(Source(text, filename), names, case=case).verdicts())


def read_block(text: str, filename: str) -> tuple[Verdict, Submission | None]:
    """The verdict on a text's ModernBlock, and, where its parameters could be read, a reader.

    reader.cls is the class; reader.fill(module, sizes, weights) writes weights under the names of
    the answer's state dict into an instance of any sizes (d_model, n_q_heads, n_kv_heads, d_ff).
    The text runs in this process, without a time limit.
    """
    one = exercise("ModernBlock")
    judge_of_text = Judge(Source(text, filename), [one.name])
    file = judge_of_text.file
    with neutral():
        try:
            file.run()
            cls = file.namespace[one.name]
        except Exception as error:
            return wrong(one.name, *file.raised(error).lines), None
        return judge_of_text.read_class(one, cls)
