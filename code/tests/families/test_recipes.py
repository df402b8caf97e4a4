"""recipes.py: the models at their real size, what it prints, and the notes' tables."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import recipes
import torch
import transformer_block as tb
from recipes import RECIPES

CODE = Path(__file__).resolve().parents[2]
NOTES = (CODE.parent / "transformer_block_tutorial.md").read_text(encoding="utf-8")

# Total and active parameters, counted by hand from the released sizes or with the class in
# transformers on the meta device, tied tables once; active includes both tables.
COUNTED = {
    "GPT-2 XL": 1_557_611_200,
    # tables, then a layer's matrices, biases and norms, then the final norm
    "GPT-3 175B": (50257 + 2048) * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288,
    "GPT-J 6B": 6_050_882_784,
    "GPT-NeoX 20B": 20_554_567_680,
    # table and final norm, then a layer's q and o, k and v, SwiGLU and norm
    "PaLM 540B": 256001 * 18432 + 118 * 18432 * (2 * 48 * 256 + 2 * 256 + 3 * 73728 + 1),
    "Llama-1 7B": 6_738_415_616,
    "Llama-2 7B": 6_738_415_616,
    "Llama-2 70B": 68_976_648_192,
    "Llama-3 8B": 8_030_261_248,
    "Llama-3 70B": 70_553_706_496,
    "Llama-3.1 405B": 405_853_388_800,
    "Llama-3.2 1B": 1_235_814_400,
    "Llama-4 Scout": (107_769_861_120, 17_172_894_720),
    "Llama-4 Maverick": (400_711_848_960, 17_184_691_200),
    "Mistral 7B v0.1": 7_241_732_096,
    "Mixtral 8x7B": (46_702_792_704, 12_879_925_248),
    "Qwen2/2.5 7B": 7_615_616_512,
    "Qwen3 8B": 8_190_735_360,
    "Qwen3 30B-A3B": (30_532_122_624, 3_353_032_704),
    "Gemma-1 2B": 2_506_172_416,
    "Gemma-1 7B": 8_537_680_896,
    "Gemma-2 9B": 9_241_705_984,
    "Gemma-2 27B": 27_227_128_320,
    "Gemma-3 1B": 999_885_952,
    "Gemma-3 27B": 27_009_002_240,
    "DeepSeek-V2": (235_741_434_880, 21_375_800_320),
    "DeepSeek-V3": (671_026_404_352, 37_552_282_624),
    "OLMo-2 7B": 7_298_617_344,
    "Phi-2": 2_779_683_840,
    "Falcon 7B": 6_921_720_704,
    "Falcon 40B": 41_303_293_952,
    "Command-R 35B": 34_980_831_232,
    "gpt-oss 20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss 120b": (116_829_156_672, 5_711_982_912),
}


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_at_real_size(name):
    """Those of the released sizes exactly, and nearly what the authors print.

    gpt-oss leaves its input table out of the active ones, Scout counts its vision part.
    """
    model, (printed, printed_active) = recipes.built(name), RECIPES[name].published
    assert all(parameter.is_meta for parameter in model.parameters())
    recipes.cells(name)  # kept for the tables of the notes: these models take long to make
    total = recipes.count(model)
    active = total - recipes.idle_parameters(model)
    assert (total, active) == (
        COUNTED[name] if isinstance(COUNTED[name], tuple) else (COUNTED[name],) * 2
    )
    assert total == pytest.approx(printed, rel=0.04)
    active -= recipes.count(model.embedding) if name.startswith("gpt-oss") else 0
    assert active == pytest.approx(printed_active or printed, rel=0.04)


def test_a_layer_runs_at_real_size_without_memory():
    model = recipes.built("gpt-oss 20b")
    x = torch.empty(1, 3, 2880, device="meta")
    cos, sin = tb.build_rope_cache(3, 64)
    with torch.device("meta"):
        assert model.blocks[1].attn(x, causal=True, cos=cos, sin=sin)[0].shape == x.shape


# =============================================================================================
# Parts
# =============================================================================================


def test_chunks_are_blocks_and_padding_does_not_shift_them():
    q = k = torch.zeros(2, 1, 6, 4)
    v = torch.eye(6)[None, None].expand(2, 1, 6, 6)
    keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    keep[1, 0, 0, :2] = False
    out = recipes.attend_in_chunks(q, k, v, keep, chunk=3, causal=True)
    seen = [[(row > 0).nonzero().flatten().tolist() for row in rows] for rows in out[:, 0]]
    assert seen[0] == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5]]
    assert seen[1] == [[], [], [2], [2, 3], [2, 3, 4], [5]]
    last = recipes.attend_in_chunks(q[:, :, -1:], k, v, keep, chunk=3, causal=True)
    torch.testing.assert_close(last, out[:, :, -1:])


def test_temperature_rises_with_the_logarithm_of_the_position():
    """Figures for floor_scale 8,192: 1 up to 8,190, then 1.0693, 1.1099 at 16,383, 1.2833 …"""
    for position, factor in ((8190, 1), (8191, 1.0693), (16383, 1.1099), (131071, 1.2833)):
        q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        k = torch.zeros(1, 1, position + 1, 1, dtype=torch.float64)
        k[..., 0, :] = 1.0  # the score of the first key is the factor, all others are 0
        v = torch.zeros_like(k)
        v[..., 0, :] = 1.0
        weight = recipes.attend_tempered(q, k, v, causal=True, floor_scale=8192).item()
        assert weight * position / (1 - weight) == pytest.approx(2.718281828**factor, rel=1e-4)


def test_stretched_tables():
    """Pairs unchanged, mixed and divided, as the papers and configurations have them."""
    plain = recipes.rope_frequencies(128, 5e5)
    cos, sin = recipes.llama3_tables(2, 128, 5e5, factor=8)
    ratio = plain / torch.atan2(sin[1], cos[1])[:64].double()
    assert ratio[:29] == pytest.approx(torch.ones(29), rel=1e-4)
    assert ratio[29:35].tolist() == pytest.approx([1.21, 1.55, 2.03, 2.69, 3.68, 5.26], rel=5e-3)
    assert ratio[35:] == pytest.approx(torch.full((29,), 8.0), rel=1e-3)
    plain = recipes.rope_frequencies(64, 1.5e5)
    gain = recipes.yarn_gain(32)
    cos, sin = recipes.yarn_tables(2, 64, 1.5e5, factor=32, rounded=False, gain=gain)
    ratio = plain / torch.atan2(sin[1], cos[1])[:32].double()
    assert ratio[:9] == pytest.approx(torch.ones(9), rel=1e-4)
    assert ratio[[9, 17]].tolist() == pytest.approx([1.104, 13.76], rel=5e-3)
    assert ratio[18:] == pytest.approx(torch.full((14,), 32.0), rel=1e-3)
    assert cos[0].tolist() == pytest.approx([1.3466] * 64, rel=1e-4)


# =============================================================================================
# What is printed
# =============================================================================================


@pytest.fixture
def run(capsys) -> Callable[..., str]:
    """What the command prints with these arguments."""

    def said(*arguments: str) -> str:
        assert recipes.main([*arguments]) == 0
        return capsys.readouterr().out

    return said


def note_tables() -> dict[tuple[str, ...], dict[str, list[str]]]:
    """Tables of the notes that list models: columns -> model -> cells."""
    tables, columns = {}, ()
    for line in NOTES.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| Model |"):
            columns = tuple(cells[1:])
        elif not line.startswith("|"):
            columns = ()
        elif columns and not set(line) <= set("|-: "):
            tables.setdefault(columns, {})[cells[0]] = cells[1:]
    return tables


def test_the_notes_have_what_the_models_show():
    """Every table of models whose columns are a recipe's, whole or in part."""
    known, compared = set(recipes.cells("GPT-2 XL")), set()
    for columns, rows in note_tables().items():
        if set(columns) <= known:
            for name, cells in rows.items():
                shown = [recipes.cells(name)[column] for column in columns]
                assert cells == shown, name
            compared |= {column for column in columns if set(rows) == set(RECIPES)}
    assert compared >= {column for columns in recipes.TABLES.values() for column in columns}
    assert list(note_tables()[tuple(recipes.FRONT)]) == recipes.FRONT_MODELS


def test_markdown_is_what_the_notes_hold(run):
    tables = re.findall(r"(?:^\|.*\n?)+", run("--markdown"), re.M)
    assert len(tables) == 1 + len(recipes.TABLES)
    for table in tables:
        assert table.strip() in NOTES


def test_overview_has_a_line_for_each_model(run):
    lines = run().splitlines()
    assert [line.split("  ")[0] for line in lines[1 : 1 + len(RECIPES)]] == list(RECIPES)
    (line,) = [line for line in lines if line.startswith("Mixtral 8x7B")]
    assert re.split(r"\s{2,}", line)[1:] == ["32", "4,096", "46.7 B", "12.9 B", "128"]


def test_a_model_says_how_it_is_composed_and_what_it_costs(run):
    text = run("DEEPSEEK-v3")
    for piece in (
        "3 layers: 0, 1, 2",
        "58 layers: 3, 4,",
        "MultiHeadLatentAttention(128 heads, q_rank 1536, kv_rank 512, nope 128 + rope 64, v 128)",
        "SigmoidRouter, top-8 of 256; groups: best 4 of 8; times 2.5",
        "671,026,404,352",
        "37,552,282,624",
        "arXiv:2412.19437",
        "70,272 bytes of cache",
    ):
        assert piece in text
    parts = dict(re.findall(r"^  (\w[\w ]*?) +([\d,]+)$", text, re.M))
    numbers = {part: int(number.replace(",", "")) for part, number in parts.items()}
    pieces = ("embedding", "attention", "FFN", "norms", "final norm", "head")
    assert sum(numbers[piece] for piece in pieces) == numbers["total"]


def test_what_a_token_costs(run):
    """GPT-2 XL by hand: 12 d^2 a layer and the head, 4 d for each position and layer."""
    text = run("GPT-2 XL")
    matrices = 48 * 12 * 1600**2 + 50257 * 1600
    gflop = float(re.search(r"([\d.]+) GFLOP", text)[1])
    assert gflop == pytest.approx(2 * matrices / 1e9, rel=0.03)
    assert f"{48 * 4 * 1600:,} FLOP in the attentions" in text
    assert f"{48 * 2 * 1600 * 2:,} bytes of cache" in text
    assert "36 of 48 layers keep 8,192 positions at most" in run("llama-4 scout")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Mixtral 8x22B"], ["Mixtral 8x7B"]),
        (["gptoss"], ["gpt-oss 20b", "gpt-oss 120b"]),
        (["llama-3"], ["Llama-3 8B"]),
        (["zzz"], ["GPT-2 XL", "gpt-oss 120b"]),
        (["--markdown", "Phi-2"], ["--markdown"]),
    ],
)
def test_wrong_names_get_the_nearest_ones(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        recipes.main(arguments)
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert not said.out
    assert all(word in said.err for word in words), said.err


def test_a_closed_pipe_and_ascii_are_no_traceback():
    command = [sys.executable, str(CODE / "recipes.py"), "gpt-2 xl"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    reader, writer = os.pipe()
    os.close(reader)
    for out in (writer, subprocess.DEVNULL):
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, env=environment, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(writer)


def test_only_torch_and_the_script():
    text = (CODE / "recipes.py").read_text(encoding="utf-8")
    found = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    assert found - set(sys.stdlib_module_names) == {"torch", "transformer_block"}
