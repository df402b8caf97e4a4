"""Which known mistakes behave like a submission: one, a pair, or one of several."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from judge.answers import answer_source, parts_of
from judge.behaviour import function_behaviour
from judge.cases import Outcomes, Unjudged
from judge.catalogue import TASKS
from judge.compare import (
    Difference,
    Expectation,
    difference_in_words,
    first_difference,
    largest_gap,
    problem_of,
    tensor_difference,
)
from judge.exercises import answer_outcomes
from judge.mistakes import Mistake, mistakes_of

PAIRS = 120  # are tried: a count, not seconds, so that every machine names the same
EVIDENCE_CASES = 6  # failing cases that a mistake may explain alone

Wrong = list[tuple[int, Difference]]


class Named(NamedTuple):
    """The mistakes that were found; of_several when others are there that are not known."""

    mistakes: tuple[Mistake, ...]
    of_several: bool = False

    @property
    def text(self) -> str:
        """As it is said."""
        return " AND ".join(mistake.says for mistake in self.mistakes)


@functools.cache
def known_mistakes(name: str) -> tuple[Mistake, ...]:
    """Those of the exercise, then those of the parts of its answer, outer parts first."""
    source = answer_source(name)
    found = list(mistakes_of(name))
    for part in reversed(parts_of(name)):
        if part in TASKS and part != name:
            found += [one for one in mistakes_of(part) if source.count(one.old) == 1]
    return tuple(dict.fromkeys(found))


def differences(answer: Outcomes, other: Outcomes) -> Iterator[tuple[int, Difference]]:
    """Where another's results are not the answer's, by case; Unjudged where the answer has none."""
    for i, case in enumerate(answer.cases):
        problem = problem_of(answer[i])
        if problem is not None:
            raise Unjudged(f"the answer itself fails in {case.call}: {problem}")
        found = first_difference(answer[i], other[i], case.how)
        if found is not None:
            yield i, found


def behaves_as(mistake: Outcomes, other: Outcomes, order: Iterable[int]) -> bool:
    """Whether all results are those of a mistake.

    Where a mistake leaves a row without keys, some get NaN and some zeros: NaN is passed over.
    Two texts with one mistake raise in the same cases, each in words of its own.
    """
    for i in order:
        known, theirs = mistake[i], other[i]
        how = mistake.cases[i].how
        if not alike(with_zeros(known, theirs), with_zeros(theirs, known), how):
            return False
    return True


def with_zeros(outcome: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    """An outcome whose missing gradients are zeros of the other's shapes: 0 * q, or no q at all."""
    found = dict(outcome)
    for key, value in other.items():
        if key in found and found[key] is None and isinstance(value, Tensor):
            found[key] = torch.zeros_like(value)
    return found


def alike(known: dict, theirs: dict, how: Expectation) -> bool:
    """Whether a submission gives what a mistake gives, but for NaN and the words of an error."""
    if "raised" in known and "raised" in theirs:
        kinds = [problem_of(one).split(":")[0].split(".")[-1] for one in (known, theirs)]
        return kinds[0] == kinds[1]
    found = first_difference(known, theirs, how)
    if found is None or found.where in ("trouble", "raised"):
        return found is None
    pairs = [(want, theirs.get(key)) for key, want in known.items()]
    if not all(isinstance(t, Tensor) for pair in pairs for t in pair):
        return False
    if any(want.shape != have.shape or want.dtype != have.dtype for want, have in pairs):
        return False
    if not all(have.is_floating_point() for _, have in pairs):
        return False
    numbers = [~have.isnan() for _, have in pairs]
    if all(kept.all() for kept in numbers) or not any(kept.sum() > 1 for kept in numbers):
        return False
    seen = [(want[kept], have[kept]) for (want, have), kept in zip(pairs, numbers)]
    return all(tensor_difference(want, have, how) is None for want, have in seen)


def case_order(answer: Outcomes, wrong: Wrong) -> list[int]:
    """The failing cases first: they tell mistakes apart soonest.

    Half precision is left out where other cases fail too: there people round elsewhere.
    """
    failing = [i for i, _ in wrong]
    rest = [i for i in range(len(answer.cases)) if i not in failing]
    if any(not answer.cases[i].half for i in failing):
        return [i for i in failing + rest if not answer.cases[i].half]
    return failing + rest


def returns_anything(theirs: Outcomes) -> bool:
    """Whether something is known of a submission beside exceptions."""
    return any("raised" not in theirs[i] for i in range(len(theirs.cases)))


def nearness(mistake: Outcomes, theirs: Outcomes) -> tuple[bool, int]:
    """Of two mistakes that fit, which is nearer: without NaN passed over, then by decades."""
    cases, places = theirs.cases, range(len(theirs.cases))
    strict = all(first_difference(mistake[i], theirs[i], cases[i].how) is None for i in places)
    gaps = [largest_gap(mistake[i], theirs[i]) for i in places]
    return not strict, math.floor(math.log10(max(gaps) + 1e-9))


def nearest_mistake(name: str, theirs: Outcomes, order: list[int]) -> Mistake | None:
    """The single mistake that behaves like a function; of equal ones the exercise's own."""
    fitting = []
    for place, mistake in enumerate(known_mistakes(name)):
        outcomes = answer_outcomes(name, mistake)
        if behaves_as(outcomes, theirs, order):
            fitting.append((nearness(outcomes, theirs), place, mistake))
    return min(fitting)[2] if fitting else None


def explained_results(answer: dict, mistake: dict, theirs: dict, how: Expectation) -> list[object]:
    """The results that are wrong as a mistake makes them wrong."""
    if any(problem_of(one) is not None for one in (answer, mistake, theirs)):
        return []
    found = []
    for key, right in answer.items():
        if key not in mistake or key not in theirs:
            continue
        if (
            difference_in_words(right, theirs[key], how) is not None
            and difference_in_words(right, mistake[key], how) is not None
            and difference_in_words(mistake[key], theirs[key], how) is None
        ):
            found.append(theirs[key])
    return found


def is_telling(value: object) -> bool:
    """Whether an equal result is hardly chance: real numbers, not all the same as zeros are."""
    several = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1
    return several and bool((value != value.flatten()[0]).any())


def telling_results(values: list[object]) -> int:
    """How many equal results are hardly chance; of whole numbers, or one alone, three others."""
    found = sum(map(is_telling, values))
    lists = [v for v in values if isinstance(v, list) and v]
    ids = [v for v in values if isinstance(v, Tensor) and not is_telling(v) and v.numel()]
    ids = [v for v in ids if v.dtype != torch.bool and (v.is_floating_point() or v.numel() > 1)]
    return found or int(len({str(v) for v in (*lists, *ids)}) >= 3)


def explained_alone(
    name: str, theirs: Outcomes, wrong: Wrong, mistakes: Iterable[Mistake]
) -> list[tuple[Mistake, int]]:
    """Mistakes that give some wrong result of a submission, those of most results first.

    The number is that of results that are hardly equal by chance.
    """
    answer, results = answer_outcomes(name), {one: [] for one in mistakes}
    order = [i for i in case_order(answer, wrong) if i in {i for i, _ in wrong}]
    order = [i for i in order if problem_of(theirs[i]) is None]
    several = order and any(map(is_telling, theirs[order[0]].values()))
    for i in order[: 2 if several else EVIDENCE_CASES]:
        for mistake in results:
            outcome = answer_outcomes(name, mistake)[i]
            how = answer.cases[i].how
            how = how._replace(close=10 * how.close)  # another eps beside it may not hide it
            results[mistake] += explained_results(answer[i], outcome, theirs[i], how)
    found = [(one, len(known), telling_results(known)) for one, known in results.items()]
    found = sorted((one for one in found if one[1]), key=lambda item: -item[1])
    return [(mistake, telling) for mistake, _, telling in found]


def pairs_with(name: str, first: Iterable[Mistake]) -> Iterator[tuple[Mistake, Mistake]]:
    """Pairs that begin with one of these, in their order; the exercise's own mistakes first."""
    first, own = list(first), mistakes_of(name)
    known, source, seen = known_mistakes(name), answer_source(name), set()
    rounds = ((first[:3], own), (first[:3], known), (first, own), (first, known))
    for a, b in itertools.chain(*(itertools.product(*one) for one in rounds)):
        goes = source.replace(a.old, a.new).count(b.old) == 1 and a.old != b.old
        if goes and frozenset((a, b)) not in seen:
            seen.add(frozenset((a, b)))
            yield a, b


def named_function_mistake(name: str, theirs: Outcomes, wrong: Wrong) -> Named | None:
    """What is wrong with a function, where it is known."""
    if not returns_anything(theirs):
        return None
    order = case_order(answer_outcomes(name), wrong)
    single = nearest_mistake(name, theirs, order)
    failing = [i for i, _ in wrong]
    if single is not None:
        return Named((single,))
    if all("trouble" in theirs[i] for i in failing):
        return None  # what is said of the first tells more than what would hide behind it
    explained = explained_alone(name, theirs, wrong, known_mistakes(name))
    first = dict.fromkeys(mistake for mistake, _ in explained) | dict.fromkeys(mistakes_of(name))
    for pair in itertools.islice(pairs_with(name, first), PAIRS):
        if behaves_as(answer_outcomes(name, *pair), theirs, order):
            return Named(pair)
    said = function_behaviour(answer_outcomes(name), theirs, failing)
    return one_of_several(explained) or seen(said)


def seen(said: str | None) -> Named | None:
    """What is seen in the results, as a mistake."""
    return Named((Mistake(said, "", ""),)) if said else None


def one_of_several(explained: list[tuple[Mistake, int]]) -> Named | None:
    """The mistake that explains most, where that is hardly chance."""
    if explained and explained[0][1]:
        return Named((explained[0][0],), of_several=True)
    return None
