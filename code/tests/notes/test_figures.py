"""The figures are what the library does today, small, and readable on a phone and on any page."""

import importlib
import inspect
import re
import sys

import pytest
import torch
import transformer_block as tb
from torch import nn

from notes import build

pytest.importorskip("matplotlib")

FOLDER = build.ROOT / "code" / "figures"
sys.path.insert(0, str(FOLDER))
draw = importlib.import_module("draw")

NAMES = [figure.__name__ for figure in draw.FIGURES]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
DOCUMENTS = (build.NOTES, build.ROOT / "README.md")


def committed(name: str) -> str:
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("figures")
    draw.main(["--out", str(folder)])
    return {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def labels(svg: str) -> list[str]:
    """What is written in a figure; matplotlib notes each text before its letters' paths."""
    return re.findall(r"<!-- (.*?) -->", svg, re.S)


def differences(old: str, new: str, limit: float) -> list[tuple[str, str]]:
    """Where two texts differ but for numbers that are at most limit apart."""
    words = [re.split(r"(-?\d+(?:\.\d+)?)", text) for text in (old, new)]
    if len(words[0]) != len(words[1]):
        return [(f"{len(words[0])} words", f"{len(words[1])} words")]
    odd = [(a, b) for a, b in zip(*words) if a != b]
    return [
        (a, b)
        for a, b in odd
        if not (NUMBER.fullmatch(a) and NUMBER.fullmatch(b) and abs(float(a) - float(b)) <= limit)
    ]


def version(svg: str) -> str:
    return re.search(r"Matplotlib v([\d.]+)", svg)[1]


def test_folder_holds_what_is_drawn(drawn):
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(drawn) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_todays(drawn, name):
    old, new = labels(committed(name)), labels(drawn[name])
    # A measured figure may round the other way on another machine.
    assert not differences("|".join(old), "|".join(new), limit=0.011), "python code/figures/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_drawing_is_todays(drawn, name):
    old, new = committed(name), drawn[name]
    if version(old) != version(new):
        pytest.skip(f"drawn with matplotlib {version(old)}, here is {version(new)}")
    assert not differences(old, new, limit=0.3), "python code/figures/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_small_and_readable(name):
    svg = committed(name)
    assert len(svg) < 60_000
    assert f'width="{draw.WIDTH}pt"' in svg
    assert f"fill: {draw.CARD}" in svg  # an opaque card, for dark pages too
    assert "<dc:date>" not in svg
    assert "<image" not in svg
    sizes = [float(size) * 100 for size in re.findall(r"scale\(([\d.]+) -[\d.]+\)", svg)]
    assert min(sizes) >= 9, "letters of less than 9 pt are lost on a phone"


def alt_texts(name: str) -> list[str]:
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    return re.findall(rf"!\[(.*)\]\(code/figures/{name}\.svg\)", texts)


@pytest.mark.parametrize("name", NAMES)
def test_shown_with_an_alt_text(name):
    assert alt_texts(name)
    assert all(len(alt.split()) >= 12 for alt in alt_texts(name))


MEASURED = [
    "gpt2_llama",
    "stream_growth",
    "kv_sharing",
    "mla",
    "cache_per_token",
    "mixed_caches",
    "weights",
]


@pytest.mark.parametrize("name", MEASURED)
def test_alt_numbers_stand_in_it(name):
    def figures(text: str) -> set[str]:
        return set(re.findall(r"(?<![\w.-])\d(?:[\d,]*\d)?(?:\.\d+)?(?!\w)", text))

    said = {figure for alt in alt_texts(name) for figure in figures(alt)}
    assert said <= figures(" ".join(labels(committed(name))))
    assert said


def test_no_picture_is_missing():
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert set(re.findall(r"code/figures/(\w+)\.svg", texts)) == set(NAMES)


def test_a_difference_is_seen():
    svg = committed("masks")
    label = labels(svg)[0]
    assert differences(svg, svg.replace(draw.BLUE, draw.GREEN), limit=0.3)
    assert differences(svg, svg.replace("12.5", "13.5"), limit=0.3)
    assert differences(svg, svg.replace("\nz\n", "\n", 1), limit=0.3)
    assert differences("|".join(labels(svg)), "|".join([*labels(svg), label]), limit=0.011)
    assert not differences("at 1.25", "at 1.26", limit=0.011)
    assert differences("576 numbers", "577 numbers", limit=0.011)


def edges(block: nn.Module) -> set[str]:
    wiring = draw.traced(block)
    return {f"{read.label} {node.label}" for node in wiring.nodes for read in node.reads}


SERIAL = {"x norm1", "norm1 attn", "attn +", "x +", "+ norm2", "norm2 ffn", "ffn +", "+ +"}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            tb.VanillaEncoderLayer2017,
            {"x attn", "x +", "attn +", "+ ln1", "ln1 ffn", "ln1 +", "ffn +", "+ ln2"},
        ),
        (tb.GPT2StyleDecoderLayer, SERIAL),
        (tb.ModernDecoderBlock, SERIAL),
        (tb.ParallelDecoderBlock, {"x norm", "norm attn", "norm ffn", "x +", "attn +", "ffn +"}),
    ],
)
def test_wiring_is_that_of_the_formula(block, expected):
    assert edges(block()) == expected


class Rewired(tb.ModernDecoderBlock):
    """The FFN reads x, not the updated stream: both additions become one of three."""

    def forward(self, x, cos, sin):
        h = x + self.attn(self.norm1(x), cos=cos, sin=sin, causal=True)[0]
        return h + self.ffn(self.norm2(x))


def test_wiring_shows_a_rewired_block():
    assert edges(Rewired()) ^ SERIAL == {"+ norm2", "x norm2", "+ +"}


def test_stream_and_branches():
    nodes = draw.traced(tb.ParallelDecoderBlock(shared_norm=False)).nodes
    places = {node.label: (node.row, node.column) for node in nodes}
    assert places == {
        "x": (0, 0), "norm": (1, 1), "attn": (2, 1), "ffn_norm": (1, 2), "ffn": (2, 2), "+": (3, 0),
    }  # fmt: skip


def test_masks_are_those_of_a_loop():
    """Each panel that causality rules, from the definition, one pair at a time."""
    seen = draw.visible(None, 3, 8, causal=True).bool()
    assert seen.tolist() == [[key <= 5 + query for key in range(8)] for query in range(3)]
    at = torch.arange(8)
    window = draw.visible(tb.build_causal_mask(at, at, window=3), 8, 8)
    assert window.sum(1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]


def test_pairs_are_found():
    cos, sin = tb.build_rope_cache(2, 6)
    assert draw.pairs(lambda x: tb.apply_rope(x, cos[1:], sin[1:]), 6) == [(0, 3), (1, 4), (2, 5)]


def test_heads_read_their_group():
    q, k, v = torch.randn(1, 6, 2, 4), torch.randn(1, 3, 5, 4), torch.randn(1, 3, 5, 2)
    assert draw.heads_read(q, k, v) == [[0, 1], [2, 3], [4, 5]]


def test_figure_says_what_it_shows():
    assert all(inspect.getdoc(figure) for figure in draw.FIGURES)


def test_an_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        draw.main(["mask"])
    assert "masks" in capsys.readouterr().err
