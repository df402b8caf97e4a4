"""A sample of the answers of somebody who had not seen the judge: right accepted, wrong refused."""

import random

import outsider_answers
import pytest

from judge.catalogue import TASKS

SEED = 20
SAMPLE = 60  # of 1,199; `outsider_answers.py` judges all
ALWAYS = {("attention_backward", "b_head_by_head")}  # right, but for rounding where scores are huge


def sampled() -> list[outsider_answers.Answer]:
    """One answer of each exercise at least, right ones and wrong ones."""
    generator = random.Random(SEED)
    by_name = {name: outsider_answers.answers_of(name) for name in TASKS}
    chosen = [generator.choice(answers) for answers in by_name.values()]
    chosen += [a for answers in by_name.values() for a in answers if (a.name, a.slug) in ALWAYS]
    rest = [answer for answers in by_name.values() for answer in answers if answer not in chosen]
    return chosen + generator.sample(rest, SAMPLE - len(chosen))


def test_every_exercise_has_right_and_wrong_answers_with_names_of_their_own():
    for name in TASKS:
        answers = outsider_answers.answers_of(name)
        assert sum(answer.is_right for answer in answers) >= 3, name
        assert sum(not answer.is_right for answer in answers) >= 7, name
        assert len({(answer.is_right, answer.slug) for answer in answers}) == len(answers), name


@pytest.mark.parametrize("answer", sampled(), ids=lambda answer: f"{answer.name}-{answer.slug}")
@pytest.mark.usefixtures("without_names")
def test_right_answers_are_accepted_and_wrong_ones_refused(answer):
    finding = outsider_answers.found_in(answer)
    assert finding.accepted == answer.is_right, f"{answer.says}\n{finding.said}"
