"""Every number of sections 0 to 5 and 7 of the notes, recomputed and looked up in the text.

A claim is a section and a text; the digits in the text are computed here, from plain arithmetic or
from the script's counting functions, and the whole phrase must stand in that section (white space
and line breaks do not matter).
"""

import ast
import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "code" / "transformer_block.py"
NOTES = (ROOT / "transformer_block_tutorial.md").read_text(encoding="utf-8")
SOURCE = SCRIPT.read_text(encoding="utf-8")
spec = importlib.util.spec_from_file_location("transformer_block_numbers", SCRIPT)
tb = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tb)

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def section(number):
    """The text from the heading of a section to the next section's, white space collapsed."""
    found = re.search(rf"^## §{number} .*?(?=^## |\Z)", NOTES, re.M | re.S)
    assert found, f"no section {number} in the notes"
    return re.sub(r"\s+", " ", found.group(0))


def n(x):
    """An exact integer with thousands separators."""
    assert x == int(x), x
    return f"{int(x):,}"


def percent(x):
    return f"{100 * x:.0f} %"


def trim(x, digits):
    """At most so many digits, without trailing zeros: 10.00 -> 10, 1.250 -> 1.25."""
    return f"{x:.{digits}f}".rstrip("0").rstrip(".")


def row(*cells):
    return re.sub(r"\s+", " ", "| " + " | ".join(str(cell) for cell in cells) + " |")


# --- section 1: the default block and the counting rules


def block_account():
    d, heads, kv, h = 96, 8, 2, 256
    dh = d // heads
    q, k, f = d * heads * dh, d * kv * dh, d * h
    attention, ffn = tb.attention_parameters(d, heads, kv), tb.ffn_parameters(d, h, gated=True)
    assert attention == 2 * q + 2 * k and ffn == 3 * f
    total = attention + ffn
    yield 1, f"so `head_dim={dh}`"
    yield 1, row("`q_proj`", "96 × 96", n(q))
    yield 1, row("`k_proj`", f"96 × {kv * dh}", n(k))
    yield 1, row("`v_proj`", f"96 × {kv * dh}", n(k))
    yield 1, row("`o_proj`", "96 × 96", n(q))
    yield 1, row("attention", "", f"**{n(attention)}**")
    yield 1, row("`gate`", "96 × 256", n(f))
    yield 1, row("`up`", "96 × 256", n(f))
    yield 1, row("`down`", "256 × 96", n(f))
    yield 1, row("FFN", "", f"**{n(ffn)}**")
    yield 1, row("linear maps together", "", f"**{n(total)}**")
    yield 1, row("two norms", "2 × 96", n(2 * d))
    yield 1, row("block", "", f"**{n(total + 2 * d)}**")
    block = tb.ModernDecoderBlock(d, heads, kv, h)
    assert sum(p.numel() for p in block.parameters()) == total + 2 * d
    mha = tb.attention_parameters(d, heads)
    yield 1, f"The FFN holds {percent(ffn / total)} of the linear weights"
    yield 1, f"attention would hold {n(mha)}, and the FFN would still hold "
    yield 1, f"the FFN would still hold {percent(ffn / (ffn + mha))}"
    router, experts = 4 * d, 4 * ffn
    assert sum(p.numel() for p in tb.MoEFFN(d, h, 4).parameters()) == router + experts
    yield 1, f"a router hold {n(router + experts)} weights where one FFN held {n(ffn)}"
    yield 1, f"a token uses {n(router + ffn)} of them"
    assert tb.ffn_parameters(d, 4 * d, False) == tb.ffn_parameters(d, 8 * d // 3, True) == ffn
    yield 1, f"At d = 96 that is {8 * d // 3}, and both kinds hold {n(ffn)}"
    fewer = tb.kv_cache_elements(heads, dh) // tb.kv_cache_elements(kv, dh)
    yield 1, f"the cache falls by a factor of {fewer}, the weights only from "
    yield 1, f"the weights only from {n(mha)} to {n(attention)}"


HIDDEN = [
    ("Llama-2-7B", 4096, 1.0, 256),
    ("Llama-3-8B", 4096, 1.3, 1024),
    ("Llama-2-70B", 8192, 1.3, 4096),
]
WIDTHS = [
    ("Gemma-1 7B", 16, 256, 3072),
    ("Qwen3-30B-A3B", 32, 128, 2048),
    ("gpt-oss-120b", 64, 64, 2880),
    ("PaLM 540B", 48, 256, 18432),
    ("T5-11B", 128, 128, 1024),
]


def counting():
    assert 16384 / 2048 == 24576 / 3072  # Gemma-1 2B and 7B
    yield 1, f"Qwen2-7B has a ratio of {18944 / 3584:.2f}, Gemma-1 one of {16384 // 2048}"
    for model, d, multiplier, multiple in HIDDEN:
        hidden = tb.gated_hidden_size(d, multiple, multiplier)
        yield 1, row(model, n(d), multiplier, n(multiple), n(hidden))
    for model, heads, dh, d in WIDTHS:
        assert heads * dh != d
        yield 1, row(model, n(heads * dh), n(d))
    yield 1, row("MHA, H = 64", "`2 * H * d_h`", n(tb.kv_cache_elements(64, 128)))
    yield 1, row("GQA, G = 8", "`2 * G * d_h`", n(tb.kv_cache_elements(8, 128)))
    yield 1, row("MQA", "`2 * d_h`", n(tb.kv_cache_elements(1, 128)))
    yield 1, row("MLA, 512 and 64", "`d_c + d_h^R`", n(512 + 64))
    # Llama-3-8B: two FLOPs a weight against 4 * keys * H * d_h, with 32 heads of 128
    weights = tb.attention_parameters(4096, 32, 8) + tb.ffn_parameters(4096, 14336, gated=True)
    yield 1, f"For a Llama-3-8B block the two meet at {n(2 * weights / (4 * 32 * 128))} keys"


# --- sections 2 and 3


def encoder_decoder():
    B, S, T, d, H = 2, 5, 7, 96, 8
    dh = d // H
    yield 2, f"With B {B}, S {S}, T {T}, d {d}, and {H} heads of width {dh}"
    yield 2, row("stream", "x", f"`[{B}, {T}, {d}]`")
    yield 2, row("second input", "`memory`", f"`[{B}, {S}, {d}]`")
    yield 2, row("queries, from x", "q", f"`[{B}, {H}, {T}, {dh}]`")
    yield 2, row("keys, from `memory`", "k", f"`[{B}, {H}, {S}, {dh}]`")
    yield 2, row("values, from `memory`", "v", f"`[{B}, {H}, {S}, {dh}]`")
    yield 2, row("q times k transposed", "scores", f"`[{B}, {H}, {T}, {S}]`")
    yield 2, row("weights times v", "per head", f"`[{B}, {H}, {T}, {dh}]`")
    yield 2, row("heads joined, `o_proj`", "out", f"`[{B}, {T}, {d}]`")
    yield 2, f"each of the {T} rows is a distribution over {S} memory positions"
    yield 2, row("d_model", 512, d)
    yield 2, row("d_ff", n(4 * 512), 4 * d)
    yield 2, row("heads", 8, H)
    yield 2, row("head_dim", 512 // 8, dh)
    yield 2, f"multiplied by √d, which is about {math.sqrt(512):.1f} at d = 512"


def families():
    yield 3, f"SwiGLU**, {trim(14336 / 4096, 2)}d"
    grid = torch.linspace(-6, 6, 240001, dtype=torch.float64)
    gap = (F.gelu(grid) - F.gelu(grid, approximate="tanh")).abs().max().item()
    yield 3, f"differ by at most about {gap:.4f}"


# --- section 4


def norms_and_rotation():
    largest = torch.finfo(torch.float16).max
    assert largest < 256**2
    yield 4, f"256 squared is {n(256**2)} and the largest float16 number is {n(largest)}"
    w = torch.tensor(15.8125, dtype=torch.bfloat16)
    narrow, wide = (1 + w).item(), (1 + w.float()).item()
    yield 4, f"1 + {w.item()} becomes {narrow} in place of {wide}"
    x, eps = 1e-4, 1e-6
    yield 4, f"the right entry is {x / math.sqrt(x * x + eps):.4f}, with eps outside"
    yield 4, f"with eps outside the root it would be {x / (x + eps):.3f}"
    yield 4, f"257 rounds to {int(torch.tensor(257.0).bfloat16().item())}"
    yield 4, f"GPT-NeoX {int(0.25 * 96)} of 96"
    yield 4, f"Phi-2 {int(0.4 * 80)} of 80"
    right, wrong = F.silu(torch.tensor([2.0, -6.0], dtype=torch.float64)).tolist()
    yield 4, f"the right product is −{abs(right * -3):.3f}"
    yield 4, f"SiLU around the product gives −{abs(wrong):.3f}"
    yield 4, f"Llama-3.2-1B: {n(128256 * 2048)}"


# --- section 5


def llama2_70b(kv_heads, length):
    return tb.kv_cache_bytes(80, kv_heads, 128, length)


def caches():
    mha, gqa = ([llama2_70b(heads, length) for length in (1, 4096, 8192)] for heads in (64, 8))
    gib = [f"{trim(size / GIB, 2)} GiB" for size in (*mha[1:], *gqa[1:])]
    yield 5, row("if it were MHA (64)", f"{trim(mha[0] / MIB, 2)} MiB", gib[0], gib[1])
    yield 5, row("as released, GQA (8)", f"{trim(gqa[0] / KIB, 2)} KiB", gib[2], gib[3])
    yield 5, f"{gib[1]} is {mha[2] / 1e9:.1f} GB"
    weights = tb.attention_parameters(1024, 16, 4) + tb.ffn_parameters(1024, 2816, gated=True)
    yield 5, f"the {4 * weights / MIB:.0f} MiB of weights"
    kept = tb.kv_cache_bytes(1, 4, 64, 4096, bytes_per_element=4)
    yield 5, f"At 4,096 the cache is {trim(kept / MIB, 1)} MiB"


def latent():
    mla, wide = 512 + 64, 128 * (128 + 64 + 128)
    mha, gqa, mqa = (tb.kv_cache_elements(heads, 128) for heads in (128, 8, 1))
    assert mqa < mla < gqa
    yield 5, row("MHA", n(mha), f"{mha / mla:.1f}×")
    yield 5, row("GQA, 8 KV heads", n(gqa), f"{gqa / mla:.2f}×")
    yield 5, row("**MLA**", f"**{mla}**", "1×")
    yield 5, row("MQA", mqa, f"{mqa / mla:.2f}×")
    yield 5, f"{mqa} against {mla}"
    yield 5, f"MHA would store {n(wide)}, which is {wide / mla:.1f} times as much"
    yield 5, f"{mla} is what GQA with {mla / (2 * 128)} KV heads of 128 would store"
    yield 5, f"a token costs {60 * mla * 2 / KIB:.1f} KiB over the 60 layers of V2"
    yield 5, f"{61 * mla * 2 / KIB:.1f} KiB over the 61 of V3"
    v2, v3 = (tb.kv_cache_bytes(layers, 128, 128, 1) / MIB for layers in (60, 61))
    yield 5, f"As MHA it would be {v2:.2f} MiB and {v3:.2f} MiB"
    yield 5, f"keys of width {mla} and values of width 512"
    yield 5, f"multiplies {mla} + 512 numbers where the expanded form multiplies {128 + 64} + 128"


# --- section 7


def numerics():
    bound = math.sqrt(128)
    moved = 100 * (1 - 50 * math.tanh(bound / 50) / bound)
    yield 7, f"bounds the scaled score by √d_h, {bound:.1f} for head_dim 128"
    yield 7, f"even that largest score by only {moved:.1f} %"
    yield 7, f"scale by 1/√{4608 // 32} and 1/√{5376 // 32}"


def windows():
    mask = tb.build_causal_mask(torch.arange(6), torch.arange(6), window=3)
    yield 7, f"the rows hold {', '.join(str(int(row)) for row in mask.sum(1))} keys"
    assert all(layers % 6 for layers in (26, 34, 62)) and 48 % 6 == 0
    (a, b), (c, d), (e, f) = ((layers - layers // 6, layers // 6) for layers in (26, 34, 62))
    yield 7, f"the 1B has {a} local and {b} global layers, the 4B {c} and {d}, the 27B {e} and {f}"
    yield 7, f"positions back: {n(32 * (4096 - 1))} for Mistral's 32 layers"
    token = tb.kv_cache_bytes(1, 16, 128, 1)
    full, mixed = token * 62 * 131072, token * (f * 131072 + e * 1024)
    yield 7, f"at {n(131072)} tokens: {trim(full / GIB, 1)} GiB if every layer were global"
    yield 7, f"{mixed / GIB:.1f} GiB with {e} layers holding {n(1024)} tokens each"


PARTS = [
    block_account,
    counting,
    encoder_decoder,
    families,
    norms_and_rotation,
    caches,
    latent,
    numerics,
    windows,
]
CLAIMS = [claim for part in PARTS for claim in part()]


@pytest.mark.parametrize(("number", "text"), CLAIMS, ids=[text[:48] for _, text in CLAIMS])
def test_a_recomputed_number_stands_in_its_section(number, text):
    assert text in section(number)


# --- the two charts


def chart(number, title):
    """The bar and line values of the chart with that title in that section."""
    found = re.search(rf'title "{re.escape(title)}"(.*?)```', section(number))
    assert found, f"no chart {title!r} in section {number}"
    series = re.findall(r"(bar|line) \[([^\]]*)\]", found[1])
    return {kind: [float(x) for x in values.split(",")] for kind, values in series}


def stream_rms(depth=64, d_model=96, batch=256, length=1):
    """RMS of the stream before the first and after each of depth fresh default blocks."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        cos, sin = tb.build_rope_cache(length, d_model // 8)
        x = torch.randn(batch, length, d_model)
        rms = [x.square().mean().sqrt().item()]
        for _ in range(depth):
            x = tb.ModernDecoderBlock(d_model)(x, cos, sin)
            rms.append(x.square().mean().sqrt().item())
    return rms


def test_the_chart_of_the_stream_is_measured_and_its_line_is_the_square_root_law():
    rms = stream_rms()
    slope = (rms[64] ** 2 - rms[0] ** 2) / 64
    assert slope == pytest.approx(0.13, abs=0.005) and "c = 0.13" in section(4)
    drawn = chart(4, "RMS of the stream after l blocks, at initialisation")
    law = [math.sqrt(1 + 0.13 * blocks) for blocks in range(0, 65, 8)]
    assert drawn["bar"] == pytest.approx(rms[::8], rel=0.02)
    assert drawn["line"] == pytest.approx(law, abs=0.005)
    stated = re.search(
        r"from 16 to 64 blocks, takes the RMS from (\d\.\d+) to (\d\.\d+)", section(4)
    )
    assert [float(stated[1]), float(stated[2])] == pytest.approx([rms[16], rms[64]], rel=0.02)
    # what it illustrates: half way, the variance lies on the chord of its ends and the RMS above
    assert rms[32] ** 2 == pytest.approx((rms[0] ** 2 + rms[64] ** 2) / 2, rel=0.05)
    assert rms[32] > 1.08 * (rms[0] + rms[64]) / 2
    assert "with many unlike tokens the first blocks add less" in section(4)
    assert stream_rms(8, batch=4, length=64)[8] < rms[8] - 0.2


def test_the_chart_of_the_cache_is_the_log_of_the_bytes():
    mha, gqa, mqa = (2 * tb.kv_cache_elements(heads, 128) for heads in (128, 8, 1))
    mla = 2 * (512 + 64)
    drawn = chart(5, "KV cache per token and layer, 128 heads of 128, 16 bits")
    logs = [math.log2(size) for size in (mha, gqa, mla, mqa)]
    assert drawn["bar"] == pytest.approx(logs, abs=0.005)
    assert f"In bytes the bars are {n(mha)}, {n(gqa)}, {n(mla)} and {n(mqa)}" in section(5)


# --- what must be pasted with a snippet


def needed(name):
    """The script's other definitions that one needs to run, in the order of the file."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    definitions = {node.name: node for node in ast.parse(SOURCE).body if isinstance(node, kinds)}
    seen, todo = {name}, [name]
    while todo:
        used = {node.id for node in ast.walk(definitions[todo.pop()]) if isinstance(node, ast.Name)}
        fresh = [other for other in definitions if other in used - seen]
        seen.update(fresh)
        todo.extend(fresh)
    return [other for other in definitions if other in seen - {name}]


PASTED = re.findall(
    r"Paste with ([^()]*) \(`--show (\w+)` prints all of it\)", re.sub(r"\s+", " ", NOTES)
)


@pytest.mark.parametrize(("listed", "name"), PASTED, ids=[name for _, name in PASTED])
def test_the_paste_list_under_a_snippet_is_what_it_needs(listed, name):
    assert re.findall(r"`(\w+)`", listed) == needed(name)


def test_the_header_has_every_import_that_the_quoted_definitions_use():
    header = re.search(r"```text\n(import .*?)```", NOTES, re.S)[1]
    scope = {}
    exec(header, scope)
    kinds = (ast.FunctionDef, ast.ClassDef)
    definitions = {node.name: node for node in ast.parse(SOURCE).body if isinstance(node, kinds)}
    imported = {name for name in vars(tb) if name not in definitions and not name.startswith("_")}
    for name in {listed for _, listed in PASTED}:
        for part in (name, *needed(name)):
            names = {n.id for n in ast.walk(definitions[part]) if isinstance(n, ast.Name)}
            assert names & imported <= scope.keys(), part


# --- sizes of named models, where a default of the library is the checkpoint's


def test_sizes_of_named_models_are_those_of_the_library():
    transformers = pytest.importorskip("transformers")
    gptj, neox = transformers.GPTJConfig(), transformers.GPTNeoXConfig()
    head = gptj.n_embd // gptj.n_head
    assert f"GPT-J rotates {gptj.rotary_dim} of {head} per head" in section(4)
    assert neox.hidden_size // neox.num_attention_heads == 96
    gpt2, llama = transformers.GPT2Config(), transformers.LlamaConfig()
    assert gpt2.resid_pdrop == gpt2.attn_pdrop == gpt2.embd_pdrop == 0.1
    assert llama.attention_dropout == 0.0
    gemma, oss = transformers.Gemma2Config(), transformers.GptOssConfig()
    caps = [round(gemma.attn_logit_softcapping), round(gemma.final_logit_softcapping)]
    assert f"Gemma-2: {caps[0]} on attention scores, {caps[1]} on logits" in section(7)
    assert f"Gemma-2: {caps[1]}" in section(4)
    assert row("Gemma-2", "every second, local first", n(gemma.sliding_window)) in section(7)
    assert row("gpt-oss", "every second, local first", oss.sliding_window) in section(7)
    chunk = transformers.Llama4TextConfig().attention_chunk_size
    assert f"fixed chunks of {n(chunk)}" in section(7)
    vision = transformers.models.mllama.configuration_mllama.MllamaTextConfig()
    crossed, layers = len(vision.cross_attention_layers), vision.num_hidden_layers
    assert f"gives {crossed} of its {layers} layers cross-attention" in section(3)
    v3 = transformers.DeepseekV3Config()
    assert (v3.num_hidden_layers, v3.num_attention_heads, v3.v_head_dim) == (61, 128, 128)
    assert (v3.qk_nope_head_dim, v3.qk_rope_head_dim, v3.kv_lora_rank) == (128, 64, 512)
    assert "128 heads, 128 + 64 channels per query and key, values of 128, d_c = 512" in section(5)
