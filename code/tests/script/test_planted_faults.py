"""Each fault of the catalogue, planted: the demos see it, and the notes say which."""

import pytest

from notes import build, planted_faults


def test_names_are_unique():
    assert len(planted_faults.BY_NAME) == len(planted_faults.FAULTS) >= 40


def test_script_without_a_fault_passes():
    assert not planted_faults.failing(None)


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_demo_turns_fail(fault):
    assert planted_faults.failing(fault, compared=True), planted_faults.explain(fault)


def test_table_in_the_notes():
    assert build.stale("faults") == [], "python code/notes/build.py faults"
