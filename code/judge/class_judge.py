"""A submitted class: its parameters are read, all cases run, and the mistake named."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from judge.assignment import Assignment
from judge.behaviour import class_behaviour, kept_state, seen_in_results
from judge.cases import Outcomes
from judge.classes import ClassExercise
from judge.compare import CLOSE, equal_outputs
from judge.exercises import answer_outcomes, exercise
from judge.mistakes import Mistake, mistakes_of
from judge.naming import (
    PAIRS,
    Named,
    behaves_as,
    case_order,
    differences,
    explained_alone,
    known_mistakes,
    nearness,
    one_of_several,
    pairs_with,
    returns_anything,
    seen,
)
from judge.parameters import parameters_of, without_pairs
from judge.subjects import SEARCH_SECONDS, Submission, UsedParameters, load

LIKELY_TRIES = 64  # assignments after which known mistakes are looked for, before others are tried
ALL_TRIES = 300  # assignments tried before the parameters count as read
OTHER_PARAMETERS_TRIES = 40  # assignments to the parameters of a mistake that has others
OTHER_PARAMETERS_SECONDS = 0.1


class Reading:
    """The assignments of a submitted class, tried one after the other.

    Afterwards: outcomes (under the assignment that was chosen, None where there is none) and named.
    """

    def __init__(self, name: str, submission: Submission, running: object = None):
        self.name, self.submission, self.running = name, submission, running
        self.exercise: ClassExercise = exercise(name)
        self.usual = self.exercise.sizes[0]
        self.answer = answer_outcomes(name)
        self.wanted = self.answer.subject.first_output(self.usual)
        self.tried: list[Assignment] = []
        self.named: Named | None = None
        self.outcomes: Outcomes | None = None
        self.is_right = False
        self._outputs: list[Tensor] = []  # of one full pass, NaN where it raised
        self._fitting: list[int] = []  # assignments with the answer's output
        self._outcomes: dict[int, Outcomes] = {}
        self._other_parameters: set[tuple[Mistake, ...]] = set()  # mistakes that were tried

    def read(self) -> None:
        """Look for the answer, then for known mistakes, among the likeliest assignments first."""
        assignments = self.submission.assignments(self.usual)
        singles = [(mistake,) for mistake in known_mistakes(self.name)]
        for stage in (LIKELY_TRIES, ALL_TRIES):
            exhausted = self._try_until(stage, assignments)
            if self.is_right or self._name_state() or self._name(singles) or exhausted:
                break
        if self.is_right or self.named:
            return
        if self.tried:
            self.outcomes = self._under(self._fitting[0] if self._fitting else 0)
            self._name_several()

    def _try_until(self, count: int, assignments: Iterator[Assignment]) -> bool:
        """Try assignments up to a number; whether there are no more."""
        until = time.process_time() + SEARCH_SECONDS
        while len(self.tried) < count and time.process_time() < until:
            assignment = next(assignments, None)
            if assignment is None:
                return True
            found = self._attempt(assignment)
            if found is not None:
                self.is_right, self.outcomes = True, found
                return True
        return False

    def _attempt(self, assignment: Assignment) -> Outcomes | None:
        """The outcomes, when all cases give what the answer gives."""
        module = self.submission.built(self.usual)
        weights = self.answer.subject.weights(self.usual)
        load(module, assignment.layout, weights.values)
        output = self.exercise.first_output(module, self.usual)
        fits = isinstance(output, Tensor) and output.shape == self.wanted.shape
        self.tried.append(assignment)
        self._outputs.append(output.double() if fits else torch.full_like(self.wanted, math.nan))
        if not equal_outputs(self.wanted, output):
            return None
        self._fitting.append(len(self.tried) - 1)
        found = self._under(self._fitting[-1])
        return found if next(differences(self.answer, found), None) is None else None

    def _under(self, i: int) -> Outcomes:
        """What the cases give with the parameters read by assignment i."""
        if i not in self._outcomes:
            reader = self.submission.read_by(self.usual, self.tried[i])
            self._outcomes[i] = Outcomes(
                self.exercise.cases, reader, self.submission.file, self.running
            )
        return self._outcomes[i]

    def _name(self, known: Iterable[tuple[Mistake, ...]]) -> bool:
        """Find the nearest single mistake, or the first pair, that gives the same in all cases."""
        stacked = torch.stack(self._outputs).flatten(1) if self._outputs else None
        found = []
        for mistakes in known:
            outcomes = self._behaving_as(mistakes, stacked)
            if outcomes is not None:
                gap = nearness(answer_outcomes(self.name, *mistakes), outcomes)
                found.append((gap, len(found), mistakes, outcomes))
                if len(mistakes) > 1:
                    break
        if found:
            *_, mistakes, self.outcomes = min(found)
            self.named = Named(mistakes)
        return bool(found)

    def _behaving_as(
        self, mistakes: tuple[Mistake, ...], stacked: Tensor | None
    ) -> Outcomes | None:
        """The class, as some assignment reads it, when it behaves like these mistakes."""
        try:
            known = answer_outcomes(self.name, *mistakes)
            names = known.subject.weights(self.usual).names
            output = known.subject.first_output(self.usual)
        except Exception:  # two mistakes may not go together
            return None
        if names != self.answer.subject.weights(self.usual).names:
            if len(mistakes) > 1 or mistakes in self._other_parameters:
                return None
            self._other_parameters.add(mistakes)
            return self._with_other_parameters(known)
        if stacked is None:
            return None
        alike = [0]  # where nothing comes out, exceptions are compared, of the likeliest reading
        if output is not None and output.shape == self.wanted.shape:
            gaps = (stacked - output.flatten()).abs().amax(dim=1)
            alike = (gaps <= CLOSE * output.abs().max() + 1e-12).nonzero()[:, 0].tolist()
        for i in alike:
            found = self._under(i)
            if returns_anything(found) and self._behaves(known, found):
                return found
        return None

    def _behaves(self, known: Outcomes, theirs: Outcomes) -> bool:
        """Whether a class gives what a mistake gives, the mistake's failing cases first."""
        wrong = list(differences(self.answer, known))
        return bool(wrong) and behaves_as(known, theirs, case_order(self.answer, wrong))

    def _with_other_parameters(self, known: Outcomes) -> Outcomes | None:
        """The class read by the parameters of a mistake, which are not the answer's."""
        for reference in (known.subject, UsedParameters(self.exercise, known.subject.cls)):
            reader = Submission(self.exercise, self.submission.cls, reference, self.submission.file)
            reader.modules, reader.seconds = self.submission.modules, OTHER_PARAMETERS_SECONDS
            with contextlib.suppress(Exception):
                module, weights = reader.built(self.usual), reference.weights(self.usual)
                own = without_pairs(parameters_of(module), module)
                output = reference.first_output(self.usual)
                if weights.size != sum(math.prod(one.shape) for one in own):
                    continue
                tries = itertools.islice(reader.assignments(self.usual), OTHER_PARAMETERS_TRIES)
                for assignment in tries:
                    load(module, assignment.layout, weights.values)
                    if equal_outputs(output, self.exercise.first_output(module, self.usual)):
                        found = reader.read_by(self.usual, assignment)
                        theirs = Outcomes(self.exercise.cases, found, self.submission.file)
                        mistaken = Outcomes(self.exercise.cases, reference)
                        if self._behaves(mistaken, theirs):
                            return theirs
        return None

    def _name_several(self) -> None:
        """Two mistakes at once, or one of several, by what one of them explains alone."""
        wrong = list(differences(self.answer, self.outcomes))
        if not returns_anything(self.outcomes):
            return
        names = self.answer.subject.weights(self.usual).names
        alike = [
            mistake for mistake in known_mistakes(self.name) if self._names_with(mistake) == names
        ]
        explained = explained_alone(self.name, self.outcomes, wrong, alike)
        first = dict.fromkeys(mistake for mistake, _ in explained)
        pairs = pairs_with(self.name, first | dict.fromkeys(mistakes_of(self.name)))
        if not self._name(itertools.islice(pairs, PAIRS)):
            failing = [i for i, _ in wrong]
            said = seen_in_results(self.answer, self.outcomes, failing)
            said = said or class_behaviour(self.exercise, self._new_module, self._answer_module)
            self.named = one_of_several(explained) or seen(said)

    def _name_state(self) -> bool:
        """Whether a call leaves something behind that reaches another."""
        if self.tried and self.outcomes is None:
            with contextlib.suppress(Exception):
                said = kept_state(self.exercise, self.usual, self._new_module)
                if said:
                    self.named, self.outcomes = seen(said), self._under(0)
        return self.named is not None

    def _new_module(self) -> nn.Module:
        """Another instance with the drawn weights, as the likeliest reading has them."""
        module = self.exercise.build(self.submission.cls, self.usual)
        load(module, self.tried[0].layout, self.answer.subject.weights(self.usual).values)
        return module

    @property
    def _answer_module(self) -> nn.Module:
        return self.answer.subject.make(self.usual).module

    def _names_with(self, mistake: Mistake) -> tuple | None:
        """The parameters of the answer with a mistake; None where it cannot be built."""
        with contextlib.suppress(Exception):
            return answer_outcomes(self.name, mistake).subject.weights(self.usual).names
        return None
