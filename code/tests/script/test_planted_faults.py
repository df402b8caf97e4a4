"""Each fault of the catalogue, planted: the demos see it, and the notes say which."""

import pytest
import torch

from notes import planted_faults

NOTES = planted_faults.NOTES.read_text(encoding="utf-8")

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other


def test_names_are_unique_and_there_are_enough():
    assert len(planted_faults.BY_NAME) == len(planted_faults.FAULTS) >= 40


def test_script_without_a_fault_passes():
    assert not planted_faults.failing(None)


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_demo_turns_fail_by_comparison(fault):
    assert planted_faults.failing(fault, compared=True), planted_faults.explain(fault)


def test_table_in_the_notes_is_the_measured_one():
    write = "python code/notes/planted_faults.py --write"
    assert planted_faults.TABLE.findall(NOTES) == [planted_faults.table()], write
    assert planted_faults.CLASSICS_TABLE.findall(NOTES) == [planted_faults.classics()], write
