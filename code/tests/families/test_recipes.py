"""recipes.py: the models at their real size, what it prints, and the notes' tables."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import recipe_parts
import recipes
import torch
import transformer_block as tb
from recipes import RECIPES, RECIPES_2026, ROWS

from notes import build

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


# Total, and active with both vocabulary tables, without the input table, without both; then what
# the caches hold: numbers a token for ever, and fixed. Totals were counted on the meta device from
# the checkpoint's cells, by formula and with the class where one fits, apart from this file.
COUNTED_2026 = {
    "Kimi K2": (1_026_408_209_408, "32.86 31.69 30.51", 61 * 576, 0),
    "SmolLM3 3B": (3_075_098_624, "3.08 3.08 2.81", 36 * 1024, 0),
    "OLMo-3 7B": (7_298_011_136, "7.30 6.89 6.48", 8 * 8192, 24 * 8192 * 4095),
    "MiniMax-M2": (228_689_748_992, "11.03 10.42 9.80", 62 * 2048, 0),
    "Qwen3-Next 80B-A3B": (
        79_674_391_296,
        "3.87 3.56 3.25",
        12 * 1024,
        36 * (524_288 + 3 * 8192),
    ),
    "DeepSeek-V3.2": (671_877_929_216, "38.40 37.48 36.55", 61 * 704, 0),
    "MiMo-V2-Flash": (308_778_768_832, "15.45 14.82 14.20", 9 * 1280, 39 * 2560 * 128),
    "GLM-5": (743_911_199_232, "41.78 40.83 39.88", 78 * 704, 0),
    "MiMo-V2.6-Pro": (1_021_248_099_840, "41.89 40.96 40.02", 10 * 2560, 60 * 2560 * 128),
    "DeepSeek-V4-Flash": (284_332_230_231, "13.80 13.27 12.74", 21 * 160 + 20 * 4, 43 * 127 * 512),
    "Hy4-preview": (769_907_389_085, "49.06 48.32 47.57", 78 * 576 + 21 * 128, 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_parameters_at_real_size(name):
    """Those of the released sizes exactly, and nearly what the authors print.

    gpt-oss leaves its input table out of the active ones, Scout counts its vision part.
    """
    model, (printed, printed_active) = recipes.outlined(name), ROWS[name].published
    assert all(parameter.is_meta for parameter in model.parameters())
    total = recipes.all_parameters(model)
    active = total - recipes.idle_parameters(model)
    assert total == pytest.approx(printed, rel=0.04)
    if name in RECIPES:
        counted = COUNTED[name] if isinstance(COUNTED[name], tuple) else (COUNTED[name],) * 2
        assert (total, active) == counted
        active -= recipes.count(model.embedding) if name.startswith("gpt-oss") else 0
        assert active == pytest.approx(printed_active or printed, rel=0.04)
    else:
        counted, ways, grows, fixed = COUNTED_2026[name]
        found = recipes.active_parameters(model)
        assert total == counted and found[0] == active
        assert " ".join(f"{number / 1e9:.2f}" for number in found) == ways
        uses = recipes.cache_use(model).values()
        assert sum(use.layers for use in uses) == len(recipes.layers_of(model))
        assert sum(use.layers * use.grows for use in uses) == grows
        assert sum(use.layers * use.fixed for use in uses) == fixed
        if printed_active is not None:
            assert any(round(number / 1e9) == printed_active / 1e9 for number in found)


def compare_with_outline(whole: torch.nn.Module, outline: torch.nn.Module) -> None:
    """Layer by layer: parameters, own tables, description."""
    assert len(set(whole.blocks)) == len(outline.blocks) > len(set(outline.blocks))
    assert recipes.layer_groups(outline) == recipes.layer_groups(whole)
    assert recipes.idle_parameters(outline) == recipes.idle_parameters(whole)
    assert recipes.cache_use(outline) == recipes.cache_use(whole)
    for ours, theirs in zip(recipes.layers_of(outline), recipes.layers_of(whole)):
        assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
        assert own_hooks(ours) == own_hooks(theirs)


@pytest.mark.parametrize("name", ROWS)
def test_an_outline_is_the_whole_model_with_one_block_a_kind(name, monkeypatch):
    """Both with one expert standing for all of a layer, which takes a hundredth of the time."""
    make = tb.MixtureFFN.__init__

    def one_expert(self, router, experts, *others, **options):
        first = next(iter(experts))
        make(self, router, [first] * router.router.out_features, *others, **options)

    monkeypatch.setattr(tb.MixtureFFN, "__init__", one_expert)
    with torch.device("meta"), recipes.Unfilled():
        compare_with_outline(ROWS[name].build(), ROWS[name].outline())


WHOLE = ["GPT-2 XL", "PaLM 540B", "Gemma-3 27B", "Mixtral 8x7B", "gpt-oss 20b", "OLMo-3 7B"]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_count_as_their_outlines(name):
    whole, outline = recipes.built(name), recipes.outlined(name)
    assert recipes.count(whole) == recipes.all_parameters(whole) == recipes.all_parameters(outline)
    compare_with_outline(whole, outline)


def own_hooks(block: torch.nn.Module) -> int:
    """How many parts turn by tables of their own."""
    return sum(len(part._forward_pre_hooks) for part in block.modules())


def test_layer_runs_without_memory():
    model = recipes.built("gpt-oss 20b")
    x = torch.empty(1, 3, 2880, device="meta")
    cos, sin = tb.build_rope_cache(3, 64)
    with torch.device("meta"):
        assert model.blocks[1].attn(x, causal=True, cos=cos, sin=sin)[0].shape == x.shape


# =============================================================================================
# Parts
# =============================================================================================


def test_chunks_do_not_shift_with_padding():
    q = k = torch.zeros(2, 1, 6, 4)
    v = torch.eye(6)[None, None].expand(2, 1, 6, 6)
    keep = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    keep[1, 0, 0, :2] = False
    out = recipe_parts.attend_in_chunks(q, k, v, keep, chunk=3, causal=True)
    seen = [[(row > 0).nonzero().flatten().tolist() for row in rows] for rows in out[:, 0]]
    assert seen[0] == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5]]
    assert seen[1] == [[], [], [2], [2, 3], [2, 3, 4], [5]]
    last = recipe_parts.attend_in_chunks(q[:, :, -1:], k, v, keep, chunk=3, causal=True)
    torch.testing.assert_close(last, out[:, :, -1:])


def test_temperature_of_positions():
    """Figures for floor_scale 8,192: 1 up to 8,190, then 1.0693, 1.1099 at 16,383, 1.2833 …"""
    for position, factor in ((8190, 1), (8191, 1.0693), (16383, 1.1099), (131071, 1.2833)):
        q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        k = torch.zeros(1, 1, position + 1, 1, dtype=torch.float64)
        k[..., 0, :] = 1.0  # the score of the first key is the factor, all others are 0
        v = torch.zeros_like(k)
        v[..., 0, :] = 1.0
        weight = recipe_parts.attend_tempered(q, k, v, causal=True, floor_scale=8192).item()
        assert weight * position / (1 - weight) == pytest.approx(2.718281828**factor, rel=1e-4)


def test_stretched_tables():
    """Pairs unchanged, mixed and divided, as the papers and configurations have them."""
    plain = recipe_parts.rope_frequencies(128, 5e5)
    cos, sin = recipe_parts.llama3_tables(2, 128, 5e5, factor=8)
    ratio = plain / torch.atan2(sin[1], cos[1])[:64].double()
    assert ratio[:29] == pytest.approx(torch.ones(29), rel=1e-4)
    assert ratio[29:35].tolist() == pytest.approx([1.21, 1.55, 2.03, 2.69, 3.68, 5.26], rel=5e-3)
    assert ratio[35:] == pytest.approx(torch.full((29,), 8.0), rel=1e-3)
    plain = recipe_parts.rope_frequencies(64, 1.5e5)
    gain = recipe_parts.yarn_gain(32)
    cos, sin = recipe_parts.yarn_tables(2, 64, 1.5e5, factor=32, rounded=False, gain=gain)
    ratio = plain / torch.atan2(sin[1], cos[1])[:32].double()
    assert ratio[:9] == pytest.approx(torch.ones(9), rel=1e-4)
    assert ratio[[9, 17]].tolist() == pytest.approx([1.104, 13.76], rel=5e-3)
    assert ratio[18:] == pytest.approx(torch.full((14,), 32.0), rel=1e-3)
    assert cos[0].tolist() == pytest.approx([1.3466] * 64, rel=1e-4)


@pytest.mark.parametrize(("width", "old_len"), [(4, 6), (4, 8), (8, 6), (16, 6), (64, 6), (2, 6)])
def test_yarn_with_a_ramp_of_no_width_is_as_in_transformers(width, old_len):
    """Both ends of the ramp fall on one pair: theirs widens it by 0.001."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.0}
    rope |= {"original_max_position_embeddings": old_len, "beta_fast": 32.0, "beta_slow": 1.0}
    config = transformers.LlamaConfig(
        hidden_size=width, num_attention_heads=1, head_dim=width, rope_parameters=rope
    )
    theirs = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[0]
    cos, sin = recipe_parts.yarn_tables(2, width, 1e4, factor=8.0, old_len=old_len)
    ours = torch.atan2(sin[1], cos[1])[: width // 2]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_ramp_of_no_width_is_a_step():
    """Llama-3.1's with low = high: pairs that turn more are kept, those that turn less slowed."""
    cos, sin = recipe_parts.llama3_tables(2, 64, 1e4, factor=8.0, old_len=64, low=2.0, high=2.0)
    plain = recipe_parts.rope_frequencies(64, 1e4)
    ratio = plain / torch.atan2(sin[1], cos[1])[:32].double()
    turns = 64 * plain / (2 * torch.pi)
    assert ratio[turns > 2.01] == pytest.approx(torch.ones(int((turns > 2.01).sum())), rel=1e-4)
    slow = ratio[turns < 2]
    assert slow == pytest.approx(torch.full((len(slow),), 8.0), rel=1e-3)


# =============================================================================================
# Learned positions
# =============================================================================================


def small_gpt2(max_len: int = 12) -> recipe_parts.LearnedPositionLM:
    torch.manual_seed(0)
    model = recipe_parts.gpt2(
        recipe_parts.Sizes(2, 16, 4, 4, 4, 24, 31, tied=True, max_len=max_len)
    )
    return model.double()


@torch.no_grad()
@pytest.mark.parametrize("hidden", [[0, 1, 2], [0, 3, 5], [6, 7], [0, 1, 7], [2, 4]])
def test_learned_positions_follow_the_padding_mask(hidden):
    """Three pads on the left, or anywhere: the row as without padding, at once and in steps."""
    model, ids = small_gpt2(), torch.randint(31, (2, 8))
    real = torch.ones(2, 8, dtype=torch.bool)
    real[0, hidden] = False
    alone = [model(ids[b, real[b]][None])[0] for b in range(2)]
    whole = model(ids, key_padding_mask=real)
    caches = model.new_caches()
    steps = [
        model(ids[:, start:end], kv_caches=caches, key_padding_mask=real[:, :end])
        for start, end in ((0, 3), (3, 4), (4, 8))
    ]
    for out in (whole, torch.cat(steps, dim=1)):
        for b in range(2):
            torch.testing.assert_close(out[b, real[b]], alone[b], rtol=0, atol=1e-12)


@torch.no_grad()
def test_learned_positions_generate_with_padding_on_the_left():
    model, ids = small_gpt2(20), torch.randint(31, (2, 6))
    real = torch.arange(6) >= torch.tensor([[0], [4]])
    tokens = model.generate(ids, 5, key_padding_mask=real)
    assert torch.equal(tokens[1:, 4:], model.generate(ids[1:, 4:], 5))
    for end in range(7, 12):
        picked = model(tokens[:1, : end - 1])[:, -1].argmax()
        assert picked == tokens[0, end - 1]


def test_learned_positions_past_their_table_are_refused():
    model = small_gpt2(max_len=6)
    caches = model.new_caches()
    with pytest.raises(ValueError, match="ids would reach position 7, past max_len=6"):
        model(torch.zeros(1, 7, dtype=torch.long))
    model(torch.zeros(1, 5, dtype=torch.long), kv_caches=caches)
    with pytest.raises(ValueError, match=r"ids.*max_len=6"):
        model(torch.zeros(1, 2, dtype=torch.long), kv_caches=caches)
    for ids in ([[31]], [[-1]]):
        with pytest.raises(ValueError, match="ids"):
            model(torch.tensor(ids), kv_caches=caches)
    with pytest.raises(TypeError, match="ids"):
        model(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="kv_caches"):
        model(torch.zeros(1, 1, dtype=torch.long), kv_caches=caches[:1])
    assert [cache.next_pos for cache in caches] == [5, 5]


@torch.no_grad()
def test_learned_positions_logits_go_through_the_embeddings_own_call():
    """A hook on the embedding sees ids and vectors; an adapter put in its place is called."""
    model, ids = small_gpt2(), torch.randint(31, (1, 5))
    expected, seen = model(ids), []
    model.embedding.register_forward_hook(lambda _m, given, _out: seen.append(given[0].dtype))
    assert torch.equal(model(ids), expected)
    assert seen == [torch.int64, torch.float64]
    plain = torch.nn.Embedding(33, 16).double()  # two rows more
    plain.weight[:31] = model.embedding.weight
    model.embedding = plain
    torch.testing.assert_close(model(ids)[..., :31], expected)
    assert model.generate(ids, 3, eos_id=32).shape[1] <= 8


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


def test_notes_have_what_models_show():
    """Every table of models whose columns are a recipe's, whole or in part."""
    known, compared = set(recipes.cells("GPT-2 XL")), set()
    for columns, rows in note_tables().items():
        later = set(rows) == set(RECIPES_2026)
        read = recipes.cells_2026 if later else recipes.cells
        if later or set(columns) <= known:
            for name, cells in rows.items():
                shown = [read(name)[column] for column in columns]
                assert cells == shown, name
            compared |= {column for column in columns if set(rows) == set(RECIPES)}
    assert compared >= {column for columns in recipes.TABLES.values() for column in columns}
    assert list(note_tables()[tuple(recipes.FRONT)]) == recipes.FRONT_MODELS
    for columns in recipes.TABLES_2026.values():
        assert list(note_tables()[tuple(columns)]) == list(RECIPES_2026)


def test_tables_of_the_notes():
    tables = 1 + len(recipes.TABLES) + len(recipes.TABLES_2026)
    assert len(build.RECIPES.findall(NOTES)) == tables
    assert build.stale("recipes") == [], "python code/notes/build.py recipes"


def test_overview_lists_each_model(run):
    lines = run().splitlines()
    assert [line.split("  ")[0] for line in lines[1 : 1 + len(ROWS)]] == list(ROWS)
    assert lines[0].split() == [
        "Model",
        "Layers",
        "d_model",
        "Parameters",
        "Active",
        "KiB",
        "a",
        "token",
    ]
    (line,) = [line for line in lines if line.startswith("Mixtral 8x7B")]
    assert re.split(r"\s{2,}", line)[1:] == ["32", "4,096", "46.7 B", "12.9 B", "128"]


def test_model_says_what_it_costs(run):
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


@pytest.mark.parametrize("name", RECIPES_2026)
def test_a_later_model_says_what_it_caches_and_its_parts_add_up(run, name):
    text = run(name)
    parts = dict(re.findall(r"^  (\w[\w ]*?) +([\d,]+)$", text, re.M))
    numbers = {part: int(number.replace(",", "")) for part, number in parts.items()}
    pieces = ("embedding", "attention", "FFN", "streams", "norms", "final norm", "head")
    total, _, grows, _ = COUNTED_2026[name]
    assert sum(numbers.get(piece, 0) for piece in pieces) == numbers["total"] == total
    kinds = re.findall(r"^  (\d+) x .*: ([\d,]+) a token, ([\d,]+) fixed$", text, re.M)
    cached = [(int(layers), int(each.replace(",", ""))) for layers, each, _ in kinds]
    assert sum(layers * each for layers, each in cached) == grows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Mixtral 8x22B"], ["Mixtral 8x7B"]),
        (["gptoss"], ["gpt-oss 20b", "gpt-oss 120b"]),
        (["llama-3"], ["Llama-3 8B"]),
        (["zzz"], ["GPT-2 XL", "gpt-oss 120b"]),
    ],
)
def test_wrong_names_get_the_nearest(arguments, words, capsys):
    assert recipes.main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    assert all(word in said.err for word in words), said.err


def test_closed_pipe_and_ascii():
    command = [sys.executable, str(CODE / "recipes.py"), "gpt-2 xl"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    reader, writer = os.pipe()
    os.close(reader)
    for out, status in ((writer, 1), (subprocess.DEVNULL, 0)):
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, env=environment, check=False
        )
        assert (done.returncode, done.stderr) == (status, b"")
    os.close(writer)


def test_only_torch_and_the_script():
    text = (CODE / "recipes.py").read_text(encoding="utf-8")
    found = set(re.findall(r"^(?:import|from) (\w+)", text, re.M))
    ours = {"transformer_block", "recipe_parts", "after_2025", "after_2026"}
    assert found - set(sys.stdlib_module_names) == {"torch"} | ours
