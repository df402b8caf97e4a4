"""Every number of sections 0 to 5 and 7 of the notes, recomputed and looked up in the text.

A claim is a section and a text; the digits in the text are computed here, from plain arithmetic or
from the script's counting functions, and the whole phrase must stand in that section (white space
and line breaks do not matter).
"""

import math
import re

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb

from notes import build

NOTES = build.NOTES.read_text(encoding="utf-8")
SOURCE = build.SCRIPT

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def section(number):
    return build.phrases_of(NOTES, str(number))


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
    yield 1, row("`q_proj`, `o_proj`", "96 × 96 each", f"{n(q)} each")
    yield 1, row("`k_proj`, `v_proj`", f"96 × {kv * dh} each", f"{n(k)} each")
    yield 1, row("attention", "", f"**{n(attention)}**")
    yield 1, row("`gate`, `up`, `down`", f"96 × {h} each", f"{n(f)} each")
    yield 1, row("FFN", "", f"**{n(ffn)}**")
    yield 1, row("linear maps together", "", f"**{n(total)}**")
    yield 1, row("block, with two norms of 96", "", f"**{n(total + 2 * d)}**")
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


def counting():
    a, b, c = (
        tb.gated_hidden_size(*x) for x in ((4096, 256), (4096, 1024, 1.3), (8192, 4096, 1.3))
    )
    yield 1, f"d 4,096 gives {n(a)} with multiples of 256 (Llama-2-7B) and {n(b)} with factor 1.3"
    yield 1, f"d 8,192 gives {n(c)} with 1.3 and 4,096 (Llama-2-70B)"
    yield 1, f"In Gemma-1 7B H · d_h is {n(16 * 256)} of d 3,072"
    yield 1, f"in gpt-oss-120b {n(64 * 64)} of 2,880, in T5-11B {n(128 * 128)} of 1,024"
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
    yield 2, row("stream; second input", "x; `memory`", f"`[{B}, {T}, {d}]`; `[{B}, {S}, {d}]`")
    yield 2, row("queries, from x", "q", f"`[{B}, {H}, {T}, {dh}]`")
    yield 2, row("keys and values, from `memory`", "k, v", f"`[{B}, {H}, {S}, {dh}]`")
    yield 2, row("q times k transposed", "scores", f"`[{B}, {H}, {T}, {S}]`")
    yield 2, row("weights times v", "per head", f"`[{B}, {H}, {T}, {dh}]`")
    yield 2, row("heads joined, `o_proj`", "out", f"`[{B}, {T}, {d}]`")
    yield 2, f"each of the {T} rows is a distribution over {S} memory positions"
    yield 2, f"d_model 512 and {d}, d_ff {n(4 * 512)} and {4 * d}, {H} heads in both"
    yield 2, f"head_dim {512 // 8} and {dh}"
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


def intensity():
    """FLOPs of scores and weighted sum against the bytes of a cached token, 16 bits."""

    def flops(heads, key, value):
        return 2 * heads * (key + value)

    assert flops(64, 128, 128) == 2 * tb.kv_cache_elements(64, 128)  # MHA: 1
    eight, seventy = (flops(h, 128, 128) / (2 * tb.kv_cache_elements(8, 128)) for h in (32, 64))
    yield 5, f"H / G: {trim(eight, 1)} in Llama-3-8B, {trim(seventy, 1)} in Llama-2-70B"
    v3, k2, stored = flops(128, 576, 512), flops(64, 576, 512), 2 * 576
    yield 5, f"2·128·(576 + 512) = {n(v3)} | {n(stored)} | {v3 / stored:.0f} |"
    yield 5, f"{n(k2)} | {n(stored)} | {k2 / stored:.0f} |"
    yield 9, f"absorbed MLA {v3 / stored:.0f} in DeepSeek-V3"


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
    down = 7168 * (1536 + 576) + 1536 * 128 * 192
    weights = down + 512 * 128 * 256 + 128 * 128 * 7168
    wide = 4 * 7168 * 128 * 128
    small = tb.MultiHeadLatentAttention(
        32, 4, kv_rank=16, rope_dim=2, nope_dim=4, v_dim=4, q_rank=8
    )
    counted = sum(p.numel() for name, p in small.named_parameters() if "norm" not in name)
    assert counted == 32 * (8 + 18) + 8 * 4 * 6 + 16 * 4 * 8 + 4 * 4 * 32
    yield 5, f"A V3 layer's attention holds {weights / 1e6:.0f} M weights"
    yield 5, f"MHA of 128 heads of 128 would hold {wide / 1e6:.0f} M"
    saved = 7168 * 128 * 192 - 1536 * (7168 + 128 * 192)  # a full query projection for the pair
    assert wide - weights > saved  # the rest is the KV latent's
    yield 5, f"it would hold {(weights + saved) / 1e6:.0f} M, so the query latent saves"
    yield 5, f"the query latent saves {saved / 1e6:.0f} M"
    yield 9, f"has {weights / 1e6:.0f} M attention weights; with a full query projection"
    yield 9, f"it would have {(weights + saved) / 1e6:.0f} M, as MHA {wide / 1e6:.0f} M"
    yield 5, f"have rank 512 instead of {n(mha)}"
    yield 5, f"keys of width {mla} and values of width 512"
    yield 5, f"multiplies {mla} + 512 numbers where the expanded form multiplies {128 + 64} + 128"


# --- section 7


def numerics():
    bound = math.sqrt(128)
    moved = 100 * (1 - 50 * math.tanh(bound / 50) / bound)
    scores, sink = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), 0.5
    kept = scores.exp().sum() / (scores.exp().sum() + math.exp(sink))
    assert kept.item() == pytest.approx(torch.sigmoid(scores.logsumexp(0) - sink).item())
    yield 7, f"Scores 1, 0, −1 and b = 0.5 leave {kept:.4f} for the keys"
    yield 7, f"bounds the scaled score by √d_h, {bound:.1f} for head_dim 128"
    yield 7, f"even that largest score by only {moved:.1f} %"
    yield 7, f"scale by 1/√{4608 // 32} and 1/√{5376 // 32}"


def windows():
    mask = tb.build_causal_mask(torch.arange(6), torch.arange(6), window=3)
    yield 7, f"the rows hold {', '.join(str(int(row)) for row in mask.sum(1))} keys"
    assert all(layers % 6 for layers in (26, 34, 62)) and 48 % 6 == 0
    yield 7, "Gemma-3's period is six"
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
    intensity,
    latent,
    numerics,
    windows,
]
CLAIMS = [claim for part in PARTS for claim in part()]


@pytest.mark.parametrize(("number", "text"), CLAIMS, ids=[text[:48] for _, text in CLAIMS])
def test_number_stands_in_its_section(number, text):
    assert text in section(number)


# --- what happens to the stream


def stream_rms(depth=64, d_model=96, batch=256, length=1, make_block=tb.ModernDecoderBlock):
    """RMS of the stream before the first and after each of depth fresh blocks."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        cos, sin = tb.build_rope_cache(length, d_model // 8)
        x = torch.randn(batch, length, d_model)
        rms = [x.square().mean().sqrt().item()]
        for _ in range(depth):
            block = make_block(d_model)
            tables = hasattr(block, "norm1") or hasattr(block, "attn_pre_norm")
            x = block(x, cos, sin) if tables else block(x)
            rms.append(x.square().mean().sqrt().item())
    return rms


def test_the_stream_grows_as_stated():
    rms = stream_rms()
    slope = (rms[64] ** 2 - rms[0] ** 2) / 64
    assert slope == pytest.approx(0.13, abs=0.005) and "c = 0.13" in section(4)
    stated = re.search(
        r"from 16 to 64 blocks, takes the RMS from (\d\.\d+) to (\d\.\d+)", section(4)
    )
    assert [float(stated[1]), float(stated[2])] == pytest.approx([rms[16], rms[64]], rel=0.02)
    # what it illustrates: half way, the variance lies on the chord of its ends and the RMS above
    assert rms[32] ** 2 == pytest.approx((rms[0] ** 2 + rms[64] ** 2) / 2, rel=0.05)
    assert rms[32] > 1.08 * (rms[0] + rms[64]) / 2
    assert "With many unlike tokens attention averages and the first blocks add less" in section(4)
    assert stream_rms(8, batch=4, length=64)[8] < rms[8] - 0.2
    branch = stream_rms(make_block=tb.BranchNormDecoderBlock)
    assert branch[64] == pytest.approx(math.sqrt(1 + 2 * 64), rel=0.03)
    assert f"√(1 + 2l), {math.sqrt(1 + 2 * 64):.1f} after 64" in section(4)
    parallel = stream_rms(make_block=tb.ParallelDecoderBlock)
    assert 0.8 < parallel[64] / rms[64] < 1.3  # "Parallel and pre+post do the same"
    post = stream_rms(make_block=tb.VanillaEncoderLayer2017)
    assert post[64] == pytest.approx(1, abs=0.01)


def test_norm_after_post_ln_rounds():
    x = tb.VanillaEncoderLayer2017()(torch.randn(2, 5, 96))
    assert (torch.nn.LayerNorm(96)(x) - x).abs().max() < 1e-4
    assert "behind a fresh norm it changes nothing but rounding" in section(2)


# --- positions: what a mask alone gives, and other schemes


def causal_stack(x, layers, causal=True):
    """x through layers of attention and FFN without positions, drawn anew from one seed."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for _ in range(layers):
            attn, ffn = tb.MultiHeadAttention(16, 4).double(), tb.DenseFFN(16, 32).double()
            x = x + attn(x, causal=causal)[0]
            x = x + ffn(x)
    return x


def test_order_without_positions():
    x = torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = x[:, [2, 0, 3, 1, 4, 5]]
    both = causal_stack(x, 2, causal=False)[:, [2, 0, 3, 1, 4, 5]]
    assert torch.allclose(causal_stack(turned, 2, causal=False), both)  # equivariance
    last = [(causal_stack(x, n) - causal_stack(turned, n))[:, -1].abs().max() for n in (1, 2)]
    assert last[0] < 1e-12 and last[1] > 1e-3
    same = causal_stack(x[:, :1].expand(-1, 6, -1), 3)
    assert (same - same[:, :1]).abs().max() < 1e-12
    assert "one layer does not change when earlier tokens are permuted; that of two" in section(4)


def longer_contexts():
    def wavelengths(base, width):
        return [2 * math.pi * base ** (2 * i / width) for i in range(width // 2)]

    yield 4, f"goes from {n(round(wavelengths(10000, 128)[-1], -1))} positions (base 10,000)"
    yield 4, f"to {wavelengths(500000, 128)[-1] / 1e6:.2f} million (500,000)"
    slow, fast = 4 ** (128 / 126), 1  # the base grows by s^(d/(d-2)): pair i turns slower by
    factors = [slow ** (2 * i / 128) for i in range(64)]
    assert factors[0] == fast and factors[-1] == pytest.approx(4)
    pairs = wavelengths(500000, 128)
    kept, divided = sum(w < 8192 / 4 for w in pairs), sum(w > 8192 for w in pairs)
    yield 4, f"that is {kept} pairs kept, {64 - kept - divided} mixed, {divided} divided"
    yield 4, f"{(0.1 * math.log(32) + 1) ** 2:.4f} at gpt-oss's s = 32"
    slopes = [2 ** (-8 * h / 8) for h in range(1, 9)]
    assert slopes[0] == 1 / 2 and slopes[-1] == 1 / 256
    yield 4, "1/2 to 1/256 for 8 heads"
    yield 4, f"{0.02 / math.sqrt(2 * 12):.4f} for 12 layers"
    gate, up = 1.0, 2.0
    clamped = (up + 1) * gate * torch.sigmoid(torch.tensor(1.702 * gate, dtype=torch.float64))
    yield 4, f"for (gate, up) = (1, 2) it gives {clamped:.4f}"


# --- mixtures


def routers():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    p, s = logits.softmax(0), logits.sigmoid()
    pair = p[:2] / p[:2].sum()
    assert torch.allclose(pair, logits[:2].softmax(0))  # over the chosen: the same numbers
    yield 6, f"that probability, top-1 | {p[0]:.4f} |"
    yield 6, f"renormalised over the chosen 2, 8 | {pair[0]:.4f}, {pair[1]:.4f} |"
    yield 6, f"not renormalised, times 16 | {16 * p[0]:.3f}, {16 * p[1]:.3f} |"
    v3 = 2.5 * s[:2] / s[:2].sum()
    yield 6, f"renormalised over the 8, times 2.5 | {v3[0]:.4f}, {v3[1]:.4f} |"
    yield 6, f"multiplies the expert's **input** | {s[0]:.4f} |"
    yield 6, f"{math.ceil(1.25 * 1024 / 8)} for 1,024 tokens, 8 experts, 1.25"


# --- overlays


def overlays():
    m, total, out = -math.inf, 0.0, 0.0
    stages = []
    for scores, values in (((1, 3), (10, 20)), ((2, 4), (30, 40))):
        larger = max(m, *scores)
        shrink, weights = math.exp(m - larger), [math.exp(s - larger) for s in scores]
        total = shrink * total + sum(weights)
        out = shrink * out + sum(w * v for w, v in zip(weights, values))
        m = larger
        stages.append((m, total, out))
    plain = torch.tensor([1.0, 3.0, 2.0, 4.0], dtype=torch.float64).softmax(0)
    assert out / total == pytest.approx(plain @ torch.tensor([10.0, 20, 30, 40]).double())
    (m1, l1, o1), (m2, l2, o2) = stages
    yield 7, f"After the first tile m = {m1}, l = {l1:.4f}, o = {o1:.4f}"
    yield 7, f"after the second m = {m2}, l = {l2:.4f}, o = {o2:.4f}, and o / l = {o2 / l2:.4f}"
    yield 7, f"({8192 * 8192 * 2 // MIB} MiB a head at 8,192 tokens and 16 bits)"
    d, q, kv, heads, h = 4096, 32 * 128, 8 * 128, 32, 14336
    kept = 8 * d + 4 * q + 4 * kv + 4 * heads + 8 * h
    yield 7, f"{n(kept)} bytes a token and layer, {kept / d:.0f} d, two thirds of it the FFN's"
    assert 0.64 < 8 * h / kept < 0.7
    yield 7, f"32 layers of 8,192 tokens take {kept * 32 * 8192 / GIB:.0f} GiB"
    yield 7, "33 % more FLOPs"  # three passes of a forward's cost become four
    yield 9, f"About {kept / d:.0f} d bytes a token and layer"
    rate, drafted = 0.8, 3
    yield 10, f"a pass yields {(1 - rate ** (drafted + 1)) / (1 - rate):.2f} tokens"


def also_asked():
    weights, bandwidth, peak = 70e9 * 2, 3.35e12, 990e12  # an H100's, as its data sheet has them
    yield (
        9,
        f"{weights / 1e9:.0f} GB; at 3.35 TB/s that is {weights / bandwidth * 1e3:.0f} ms a step",
    )
    rows = peak / bandwidth  # 2 FLOPs and 2 bytes a weight and row: one FLOP a byte and row
    yield 9, f"about {round(rows, -2):.0f} rows on"
    p = torch.tensor([0.99, 0.01], dtype=torch.float64).log().requires_grad_()
    p.softmax(0)[0].backward()
    yield 9, f"A weight of 0.99 leaves {p.grad[0]:.4f} on its own score"
    many, few = math.comb(128, 8), math.comb(32, 2)
    yield 9, f"128 experts with 8 chosen offer {many / 1e12:.1f}e12 combinations where 32"
    yield 9, f"with 2 offer {few}"


def after_2025():
    index, absorbed = 2 * 64 * 128, 2 * 128 * (576 + 512)
    yield 7, "576 + 128 in place of 576"
    yield 7, f"The cache *grows*, by {100 * 128 / 576:.0f} %"
    yield 7, f"each {absorbed // index} times cheaper"
    yield 9, f"{absorbed // index} times cheaper a pair"
    state = 32 * 128 * 128
    yield 7, f"a state of {n(state)} numbers"
    bytes_held = 4 * state + 2 * 8192 * 4  # float32 state, the convolution's last columns
    tokens = bytes_held / (2 * tb.kv_cache_elements(2, 256))
    yield 7, f"as one of its full layers caches for {n(tokens)} tokens"
    yield 7, f"the states weigh as much as {n(36 / 12 * tokens)} cached tokens"
    yield 7, f"{(512 + 128) // 4} or {512 // 128}, and a window of 128"


LATER = [longer_contexts, routers, overlays, also_asked, after_2025]
LATER_CLAIMS = [claim for part in LATER for claim in part()]


@pytest.mark.parametrize(("number", "text"), LATER_CLAIMS, ids=[t[:48] for _, t in LATER_CLAIMS])
def test_number_stands_since_edition_2(number, text):
    assert text in section(number)


def test_rank_of_latent_attention():
    up = torch.randn(
        16 * 2 * 16, 64, dtype=torch.float64
    )  # 16 heads, K and V of 16, a latent of 64
    assert torch.linalg.matrix_rank(up[:16]) == 16 and torch.linalg.matrix_rank(up) == 64


def test_where_the_two_paths_differ():
    q = torch.full((1, 1, 1, 64), 120.0).half()
    v = torch.ones_like(q)
    assert tb.attend(q, q, v).isnan().any() and tb.attend_fused(q, q, v).isfinite().all()
    assert "float16 scores over 65,504 overflow in `attend` alone" in section(7)


def test_single_query_may_need_a_mask():
    mask = tb.build_causal_mask(torch.tensor([5]), torch.arange(6), window=3)
    assert mask.tolist() == [[False] * 3 + [True] * 3]
    assert "none, unless a window or padding hides keys" in section(1)


def test_balance_loss_counts_padding():
    moe, x = tb.MoEFFN(8, 16), torch.randn(1, 6, 8)
    moe(torch.cat((x, torch.zeros(1, 4, 8)), 1))
    assert sum(moe.tokens_per_expert) == 10
    assert "`MoEFFN` routes and counts padding too" in section(6)


# --- sizes of named models, where a default of the library is the checkpoint's


def test_sizes_of_named_models():
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
    assert f"(Gemma-2: {caps[1]})" in section(4)
    assert f"Gemma-2: every second layer, local first, {n(gemma.sliding_window)}." in section(7)
    assert f"gpt-oss: every second, local first, {oss.sliding_window}." in section(7)
    assert oss.layer_types[:2] == ["sliding_attention", "full_attention"]
    chunk = transformers.Llama4TextConfig().attention_chunk_size
    assert f"fixed chunks of {n(chunk)}" in section(7)
    vision = transformers.models.mllama.configuration_mllama.MllamaTextConfig()
    crossed, layers = len(vision.cross_attention_layers), vision.num_hidden_layers
    stated = f"inserts {crossed} layers with gated cross-attention"
    assert stated in section(3) and f"between the {layers - crossed} self-attention" in section(3)
    assert f"{layers} in all" in section(3)
    nano = transformers.Gemma3nTextConfig()
    shared, all_layers = nano.num_kv_shared_layers, nano.num_hidden_layers
    assert f"{all_layers - shared} of {all_layers} layers store any" in section(7)
    assert transformers.Llama4TextConfig().no_rope_layers[:4] == [1, 1, 1, 0]
    assert transformers.SmolLM3Config().no_rope_layers[:4] == [1, 1, 1, 0]
    sparse = transformers.DeepseekV32Config()
    assert (sparse.index_topk, sparse.index_head_dim, sparse.index_n_heads) == (2048, 128, 64)
    linear = transformers.Qwen3NextConfig()
    assert (
        linear.linear_num_value_heads * linear.linear_value_head_dim * (linear.linear_key_head_dim)
        == 32 * 128 * 128
    )
    assert [kind[0] for kind in linear.layer_types[:4]] == ["l", "l", "l", "f"]
    v3 = transformers.DeepseekV3Config()
    assert (v3.num_hidden_layers, v3.num_attention_heads, v3.v_head_dim) == (61, 128, 128)
    assert (v3.qk_nope_head_dim, v3.qk_rope_head_dim, v3.kv_lora_rank) == (128, 64, 512)
    assert "128 heads, 128 + 64 channels per query and key, values of 128, d_c = 512" in section(5)


def test_routers_give_the_examples():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    cases = [
        (tb.SoftmaxRouter(4, 4, 1, renormalise=False), "0.6439"),
        (tb.SoftmaxRouter(4, 4, 2), "0.7311, 0.2689"),
        (tb.SoftmaxRouter(4, 4, 2, renormalise=False, scale=16.0), "10.303, 3.790"),
        (tb.SigmoidRouter(4, 4, 2, scale=2.5), "1.3661, 1.1339"),
        (tb.SigmoidRouter(4, 4, 1, renormalise=False, selection_bias=False), "0.8808"),
    ]
    for router, example in cases:
        with torch.no_grad():
            router.router.weight.copy_(torch.eye(4))
            weights, experts = router(logits)
        assert experts.tolist()[0] == list(range(len(example.split(", "))))
        assert weights[0].tolist() == pytest.approx(
            [float(x) for x in example.split(", ")], abs=6e-4
        )
        assert f"| {example} |" in section(6)


def test_sink_is_the_formulas_gate():
    sink = tb.SinkAttention(2).double()
    with torch.no_grad():
        sink.sinks.copy_(torch.tensor([0.5, -1.0]))
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3))
    lse = (q @ k.mT / 2).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).logsumexp(-1)
    gate = torch.sigmoid(lse - sink.sinks[:, None])[..., None]
    assert torch.allclose(sink(q, k, v, causal=True), gate * tb.attend(q, k, v, causal=True))
