"""%%judge in a real kernel, and the code cells of a notebook file."""

import json
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import practice
from judge.process import CODE
from judge.source import Unreadable, read_source, text_of_cell, with_context

RIGHT = """\
def rms_norm(x, weight, eps=1e-6):
    wide = x.float() if x.dtype in HALF else x
    return (wide * torch.rsqrt(wide.square().mean(-1, True) + eps) * weight).to(x.dtype)
"""
SETUP = "import torch\nHALF = (torch.float16, torch.bfloat16)\n"


def outputs(cell: dict) -> str:
    """What a cell has printed."""
    return "".join(part.get("text", "") for part in cell["outputs"])


@pytest.fixture(scope="module")
def notebook():
    """A notebook that ran in a kernel: torch's generator moved, autograd used, cells judged."""
    cells = [
        f"import sys; sys.path.insert(0, {str(CODE)!r})\n%load_ext judge",
        f"{SETUP}x = torch.ones(2, requires_grad=True)\nx.sum().backward()",
        f"%%judge\n{RIGHT}",
        f"%%judge rms_norm\n{RIGHT.replace(' + eps', '')}\nprint('said by the cell')",
        "print(rms_norm(torch.full((1, 4), 2.0), torch.ones(4)).tolist(), os.getpid())",
        "%%judge rmsnrom\npass",
        "%%judge\ndef rms_norm(x, weight, eps=1e-6):\n    raise RuntimeError('mine')\n",
    ]
    cells[4] = "import os\n" + cells[4]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(made, timeout=None, kernel_name="python3")
    client.execute()
    return made.cells


def test_a_right_cell_is_right_with_what_earlier_cells_define(notebook):
    assert outputs(notebook[2]).startswith("[rms_norm] right")


def test_a_wrong_cell_is_told_its_mistake(notebook):
    said = outputs(notebook[3])
    assert "[rms_norm] wrong" in said and "eps is missing" in said
    assert said.count("said by the cell") == 1


def test_the_kernel_lives_on_with_the_cells_definitions(notebook):
    assert "[[1.0, 1.0, 1.0, 1.0]]" in outputs(notebook[4])


def test_a_misspelt_name_behind_the_magic_is_answered_with_the_nearest(notebook):
    assert "rms_norm" in outputs(notebook[5])


def test_what_a_cell_raises_points_into_the_cell(notebook):
    said = outputs(notebook[6])
    assert "RuntimeError: mine" in said and "in rms_norm" in said


def written(path: Path, *cells: str) -> Path:
    """A notebook file with these code cells."""
    found = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    found.insert(0, {"cell_type": "markdown", "source": ["# def rms_norm"]})
    path.write_text(json.dumps({"cells": found, "nbformat": 4}))
    return path


def test_try_judges_the_code_cells_of_a_notebook(tmp_path, capsys):
    cells = ("%load_ext judge", "!ls", SETUP, f"%%judge\n{RIGHT}", "%%bash\nexit 1")
    path = written(tmp_path / "mine.ipynb", *cells)
    status = practice.main(["try", str(path), "--progress", str(tmp_path / "p.json")])
    assert status == 0 and "[rms_norm] right" in capsys.readouterr().out


def test_a_file_that_is_no_notebook_is_said_to_be_none(tmp_path):
    path = tmp_path / "mine.ipynb"
    path.write_text("{}")
    with pytest.raises(Unreadable, match="no notebook"):
        read_source(str(path))


def test_magics_are_left_out_of_a_cell():
    assert text_of_cell("%matplotlib inline\nx = 5 % 2\n  !ls") == (
        "pass  # %matplotlib inline\nx = 5 % 2\n  pass  # %ls"
    )
    assert text_of_cell("%%timeit\nx = 1") == ""


def test_of_earlier_cells_the_latest_definition_counts():
    before = ["def f():\n    return 1", "import math\nY = 3", "def f():\n    return math.pi", "g("]
    text = with_context("def h():\n    return f()\n", before)
    assert "math.pi" in text and "return 1" not in text and "import math" in text
