"""Every number of sections 6, 8, 9, 10 and of the one-page sheet, recomputed and looked up in the text.

The digits are computed here: from plain arithmetic, the script's counting functions, or the cells of the recipe tables (which
test_model_tables.py checks against the library). The whole phrase must stand in the section; white space does not matter.
"""

import math
import re
from functools import lru_cache

import pytest
import transformer_block as tb

from notes import build

NOTES = build.NOTES.read_text(encoding="utf-8")
GIB, KIB = 1024**3, 1024


@lru_cache(None)
def section(name):
    return build.phrases_of(NOTES, name.removeprefix("§"))


def stands(name, *phrases):
    for phrase in phrases:
        assert phrase in section(name), f"not in {name}: {phrase}"


@lru_cache(None)
def recipes():
    rows = build.recipe_cells(NOTES)
    assert len(rows) == 34 and all(len(row) == 20 for row in rows.values())
    return rows


def number(text):
    return int(re.match(r"[\d,]+", text)[0].replace(",", ""))


def sizes(model):
    """L, d, q heads, KV heads, head_dim, d_ff (of an expert), V of a row."""
    r = recipes()[model]
    q, kv = (int(x) for x in r["Heads q / kv"].split(" / "))
    return (
        number(r["Layers"]),
        number(r["d_model"]),
        q,
        kv,
        number(r["head_dim"]),
        number(r["d_ff"]),
        number(r["Vocabulary"]),
    )


def tables(model):
    _L, d, *_, V = sizes(model)
    return V * d * (1 if recipes()[model]["Tied"] == "yes" else 2)


def weights(model):
    """Matrices of the blocks, without norms and biases, of a dense model."""
    L, d, q, kv, dh, h, _V = sizes(model)
    return L * (2 * d * (q + kv) * dh + (3 if "GLU" in recipes()[model]["FFN"] else 2) * d * h)


# ---------------------------------------------------------------- section 6


def test_mixtral_by_hand():
    L, d, q, kv, _dh, h, V = sizes("Mixtral 8x7B")
    expert, attention = tb.ffn_parameters(d, h, gated=True), tb.attention_parameters(d, q, kv)
    assert (expert, attention) == (176_160_768, 41_943_040)
    rest = 2 * V * d + L * (8 * d + 2 * d) + d
    total, active = L * (8 * expert + attention) + rest, L * (2 * expert + attention) + rest
    assert (total, active) == (46_702_792_704, 12_879_925_248)
    assert 2 * V * d == 262_144_000
    stands(
        "§6",
        r"176{,}160{,}768",
        r"41{,}943{,}040",
        f"{active / 1e9:.1f} of {total / 1e9:.1f} billion parameters are active",
        f"{100 * active / total:.0f} %",
        r"262{,}144{,}000",
        f"Routers and norms add {(L * 10 * d + d) / 1e6:.1f} million",
        f"| Mixtral 8x7B | {total / 1e9:.1f} B | {active / 1e9:.1f} B |",
        r"\approx 46.7",
        r"\approx 12.9",
    )
    stands("One-page", f"{active / 1e9:.1f} of {total / 1e9:.1f}")


# counted on the meta device by test_model_tables.py (total); active: all but the experts a token does not use
@pytest.mark.parametrize(
    "model, total, experts, k, moe_layers, h, d, given",
    [
        (
            "Qwen3 30B-A3B",
            30_532_122_624,
            128,
            8,
            48,
            768,
            2048,
            "| Qwen3 30B-A3B | 30.5 B | 3.4 B |",
        ),
        ("DeepSeek-V2", 235_741_434_880, 160, 6, 59, 1536, 5120, "| DeepSeek-V2 | 236 B | 21 B |"),
        (
            "Llama-4 Maverick",
            400_711_848_960,
            128,
            1,
            24,
            8192,
            5120,
            "| Llama-4 Maverick | 400 B | 17 B |",
        ),
    ],
)
def test_active_parameters(model, total, experts, k, moe_layers, h, d, given):
    active = total - moe_layers * (experts - k) * 3 * d * h
    printed_total, printed_active = (float(x) for x in re.findall(r"([\d.]+) B", given))
    assert abs(total / 1e9 - printed_total) <= 1 and abs(active / 1e9 - printed_active) <= 0.4
    assert (
        recipes()[model]["Experts"].startswith(str(experts))
        and f"top-{k}" in recipes()[model]["Experts"]
    )
    stands("§6", given)


def test_active_without_input_table():
    for total, experts, layers, given in (
        (20_914_757_184, 32, 24, "| gpt-oss 20b | 20.9 B | 3.6 B | active without the"),
        (116_829_156_672, 128, 36, "| gpt-oss 120b | 116.8 B | 5.1 B | active without the"),
    ):
        d = h = 2880
        expert, table = 3 * d * h + 2 * h + d, 201_088 * d
        active = total - layers * (experts - 4) * expert
        assert f"{total / 1e9:.1f} B | {(active - table) / 1e9:.1f} B" in given
        stands("§6", f"{given} input table; {active / 1e9:.1f} B with it |")
    total, expert = 671_026_404_352, 3 * 7168 * 2048
    active = total - 58 * (256 - 8) * expert - 129_280 * 7168
    assert active == 36_625_603_584
    stands("§6", f"| DeepSeek-V3 | {total / 1e9:.0f} B | {active / 1e9:.0f} B |")


def test_teaching_mixture():
    ffn = tb.ffn_parameters(96, 256, gated=True)
    assert tb.gated_hidden_size(96) == 256
    stands("§1", f"a router hold {4 * ffn + 384:,} weights where one FFN held {ffn:,}")
    stands("§1", f"a token uses {ffn + 384:,} of them")


def test_balance_loss_examples():
    p = [[0.7, 0.3], [0.6, 0.4], [0.4, 0.6]]
    f, P = [2 / 3, 1 / 3], [sum(r[e] for r in p) / 3 for e in (0, 1)]
    stands("§6", f"the loss is {2 * sum(a * b for a, b in zip(f, P)):.4f}")
    even, collapsed = [0.25] * 4, [1, 0, 0, 0]

    def loss(f):
        return 4 * sum(a * a for a in f)

    pooled = [(a + b) / 2 for a, b in zip(even, collapsed)]
    assert loss(even) == 1 and loss(collapsed) == 4
    stands("§6", f"a mean of {(loss(even) + loss(collapsed)) / 2}, pooled {loss(pooled)}")


def test_experts_reached_by_a_batch():
    stands("§6", f"16 tokens reach on average {8 * (1 - (6 / 8) ** 16):.1f} of Mixtral's 8 experts")


def test_fine_grained_experts():
    for model, d, h in (("Qwen3 30B-A3B", 2048, 768), ("DeepSeek-V3", 7168, 2048)):
        assert number(recipes()[model]["d_ff"]) == h and number(recipes()[model]["d_model"]) == d
        stands("§6", f"{h:,} in {model} ({h / d:.2f} × d_model)")


# ---------------------------------------------------------------- section 8


def test_what_the_table_shows():
    rows = recipes()
    assert not [m for m in rows if "Post-LN" in rows[m]["Topology"]]
    for model, r in rows.items():
        if r["Norm"].startswith("LayerNorm"):
            assert "parallel" in r["Topology"] or model == "GPT-2 XL"
        if model.startswith(
            ("Llama", "Mistral", "Mixtral", "Qwen", "Gemma", "DeepSeek", "OLMo", "gpt-oss")
        ):
            assert r["Norm"].startswith("RMSNorm") and "parallel" not in r["Topology"]
        assert not ("QK-norm" in r["Extras"] and "caps" in r["Extras"])

    def topology(text):
        return {m for m in rows if rows[m]["Topology"] == text}

    assert topology("parallel, two norms") == {"GPT-NeoX 20B", "Falcon 40B"}
    assert topology("parallel, one norm") == {"GPT-J 6B", "Phi-2", "Falcon 7B", "Command-R 35B"}
    assert {m for m in rows if not rows[m]["Position"].startswith("RoPE")} == {
        "GPT-2 XL",
        "GPT-3 175B",
    }
    thetas = [number(r["Theta"]) for r in rows.values() if r["Theta"][0].isdigit()]
    stands("§8", f"Theta runs from {min(thetas):,} to {max(thetas):,}")
    partial = {
        m: rows[m]["Position"]
        for m in rows
        if " of " in rows[m]["Position"] and "layers" not in rows[m]["Position"]
    }
    assert set(partial) == {"GPT-J 6B", "GPT-NeoX 20B", "Phi-2", "DeepSeek-V2", "DeepSeek-V3"}
    stands("§4", "GPT-J rotates 64 of 256 per head, GPT-NeoX 24 of 96, Phi-2 32 of 80")
    kv = [rows[m]["Heads q / kv"].split(" / ")[1] for m in rows if rows[m]["Sharing"] == "GQA"]
    assert max(set(kv), key=kv.count) == "8"
    assert {m for m in rows if rows[m]["Sharing"] == "MQA"} == {
        "PaLM 540B",
        "Gemma-1 2B",
        "Gemma-3 1B",
        "Falcon 7B",
    }
    assert {"OLMo-2 7B", "Phi-2", "Command-R 35B"} <= {
        m for m in rows if rows[m]["Sharing"] == "MHA"
    }


def test_head_products_not_d_model():
    off = set()
    for model in recipes():
        r = recipes()[model]
        if r["Sharing"].startswith("MLA"):
            continue
        q, dh, d = (
            int(r["Heads q / kv"].split(" / ")[0]),
            number(r["head_dim"]),
            number(r["d_model"]),
        )
        if q * dh != d:
            off.add(model)
    assert off == {
        "PaLM 540B",
        "Qwen3 30B-A3B",
        "Gemma-1 7B",
        "Gemma-2 9B",
        "Gemma-2 27B",
        "Gemma-3 1B",
        "Gemma-3 27B",
        "gpt-oss 20b",
        "gpt-oss 120b",
    }
    stands("§8", f"PaLM 540B ({48 * 256:,} of 18,432)", f"Qwen3 30B-A3B ({32 * 128:,} of 2,048)")
    stands("§8", f"DeepSeek-V2 and V3 (values {128 * 128:,} of 5,120 and 7,168)")
    for model, d in (("DeepSeek-V2", 5120), ("DeepSeek-V3", 7168)):
        r = recipes()[model]
        assert number(r["d_model"]) == d and r["head_dim"].endswith("v 128")
        assert r["Heads q / kv"].startswith("128")


def test_table_in_front():
    front = build.recipe_tables(NOTES)["front"]
    columns = ("Topology", "Norm", "Position", "Heads q / kv", "FFN", "d_ff / d_model", "Extras")
    assert len(front) == 12
    for model, row in front.items():
        cells = [*row.values()]
        cells[3] = cells[3].replace("/", " / ")
        assert cells == [recipes()[model][column] for column in columns], model


def test_tying_follows_the_family():
    for family, ties in (("Llama", {"Llama-3.2 1B"}), ("Qwen", set())):
        rows = {m: r for m, r in recipes().items() if m.startswith(family)}
        assert {m for m, r in rows.items() if r["Tied"] == "yes"} == ties
    always = [m for m in recipes() if m.startswith("Gemma")] + ["PaLM 540B", "Command-R 35B"]
    assert all(recipes()[m]["Tied"] == "yes" for m in always)
    stands("§10", f"Gemma-2 27B is tied at {100 * 256000 * 4608 / 27_227_128_320:.0f} %")


def test_ratio_column_and_its_range():
    for model, r in recipes().items():
        assert r["d_ff / d_model"] == f"{number(r['d_ff']) / number(r['d_model']):.2f}", model
    ratio = {
        m: float(r["d_ff / d_model"])
        for m, r in recipes().items()
        if "GLU" in r["FFN"] and r["Experts"] == "-"
    }
    assert min(ratio.values()) == ratio["Llama-1 7B"] == 2.69 and max(ratio.values()) == 8.0
    assert {m for m in ratio if ratio[m] == 8} == {"Gemma-1 2B", "Gemma-1 7B", "Gemma-2 27B"}
    stands(
        "§8",
        "from 2.69 (Llama-1 7B) over 3.50 (Llama-3 8B) and 5.29 (Qwen2/2.5 7B) to 8.00",
        "Llama-3 8B 3.50, Qwen2/2.5 7B 5.29",
    )
    assert (
        ratio["Llama-3 8B"] == 3.5
        and ratio["Qwen2/2.5 7B"] == 5.29
        and recipes()["PaLM 540B"]["d_ff / d_model"] == "4.00"
    )


def test_gate_and_up_printed_together():
    assert (
        2 * number(recipes()["Gemma-1 2B"]["d_ff"]) == 32768
        and 2 * number(recipes()["OLMo-2 7B"]["d_ff"]) == 22016
    )
    assert 4 * number(recipes()["PaLM 540B"]["d_model"]) == 73728 and 8 * 18432 // 3 == 49152
    stands(
        "§8",
        "32,768 for the 2B where each matrix is 16,384",
        "22,016 for 11,008",
        "73,728 is real",
        "49,152 are wrong",
    )


def test_scales():
    for model, root in (("Gemma-2 27B", 144), ("Gemma-3 27B", 168)):
        _, d, q, _, dh, *_ = sizes(model)
        assert d // q == root and dh == 128
        stands("§8", f"{model} " + ("uses " if root == 144 else "") + f"1/√{root}")
    stands("§9", "divides by √144 instead of √128")


def test_latent_against_heads():
    elements = tb.kv_cache_elements
    latent, mha, gqa, mqa = 512 + 64, elements(128, 128), elements(8, 128), elements(1, 128)
    assert (
        recipes()["DeepSeek-V3"]["Sharing"]
        == recipes()["DeepSeek-V2"]["Sharing"]
        == f"MLA, {latent} cached"
    )
    stands("§8", f"{latent} numbers against {gqa:,} for GQA with 8 heads and {mqa} for MQA")
    stands(
        "§9",
        f"512 + 64 = {latent}",
        f"MHA of that shape: {mha:,}, {mha / latent:.1f} times as much",
        f"8 heads of 128: {gqa:,}. MQA: {mqa}",
    )
    stands(
        "One-page",
        f"| {latent} |",
        f"MHA of that shape {mha:,}, {mha / latent:.1f} times",
        f"| {mqa} |",
    )
    assert mqa < latent


def test_teaching_attention():
    mha, gqa = tb.attention_parameters(96, 8), tb.attention_parameters(96, 8, 2)
    stands("§8", f"MHA's {mha:,} weights become {gqa:,}; the {2 * 96 * 96:,} of Q and O")
    stands("§9", f"{mha:,}, and {gqa:,} with G = 2")
    ffn = tb.ffn_parameters(96, 256, gated=True)
    assert tb.ffn_parameters(96, 384, gated=False) == ffn
    stands(
        "§9",
        f"{ffn:,} of {ffn + gqa:,} in the teaching block, {100 * ffn / (ffn + gqa):.0f} %",
        f"both are {ffn:,} weights, with widths 384 and 256",
    )
    stands(
        "One-page",
        f"| {ffn + gqa:,} |",
        f"{gqa:,} attention, {ffn:,} FFN",
        f"| {100 * ffn / (ffn + gqa):.0f} % |",
        f"| {mha:,} |",
    )


# ---------------------------------------------------------------- section 9


def test_score_deviation():
    stands("§9", f"{math.sqrt(128):.1f} at 128")
    stands("One-page", f"| {math.sqrt(128):.1f} |")


def test_vocabulary_shares():
    total = {
        "Llama-3.2 1B": 1_235_814_400,
        "Gemma-3 1B": 999_885_952,
        "Llama-3 8B": 8_030_261_248,
        "Llama-3.1 405B": 405_853_388_800,
    }
    for model, n in total.items():
        _L, d, *_, V = sizes(model)
        share = 100 * V * d / n
        text = f"{share:.1f}" if share < 1 else f"{share:.0f}"
        stands("§10", f"| {model} | {V * d / 1e6:,.1f} M | {text} %")
    assert round(100 * 128256 * 2048 / total["Llama-3.2 1B"]) == 21
    stands("§9", "21 % of Llama-3.2 1B", "half a percent of Llama-3.1 405B")
    stands("One-page", "| 21 % |")
    untied = total["Llama-3.2 1B"] + 128256 * 2048
    stands(
        "§10",
        f"would have {untied / 1e9:.2f} billion parameters instead of {total['Llama-3.2 1B'] / 1e9:.2f}",
    )


def test_llama_widths():
    g = tb.gated_hidden_size
    assert int(2 * 4 * 4096 / 3) == 10922 and g(4096, 256) == 11008 and g(4096, 1024, 1.3) == 14336
    stands(
        "§9",
        "4,096 gives 10,922, then 11,008 with multiples of 256",
        "With factor 1.3 and multiples of 1,024 the same d gives 14,336",
    )
    stands("One-page", "| 11,008 |")


def test_cache_of_llama_2_70b():
    L, _d, q, kv, dh, *_ = sizes("Llama-2 70B")
    own, mha = tb.kv_cache_bytes(L, kv, dh, 4096), tb.kv_cache_bytes(L, q, dh, 4096)
    stands("§9", f"{own / GIB:.2f} GiB; the same model as MHA would need {mha / GIB:.0f} GiB")
    stands("One-page", f"| {own / GIB:.2f} GiB |", f"{mha / GIB:.0f} GiB if it were MHA")


def test_where_scores_meet_weights():
    # 2 FLOPs a weight = 4 S n_q_heads head_dim
    assert 2 * 12 / 4 == 6
    _L, d, q, kv, dh, h, _ = sizes("Llama-3 8B")
    per_layer = tb.attention_parameters(d, q, kv) + tb.ffn_parameters(d, h, gated=True)
    assert per_layer == 13 * d * d and q * dh == d
    meet = 2 * per_layer / (4 * d)
    stands("§9", "at S = 6d", f"Llama-3 8B has 13d² and meets at {meet / d} d = {meet:,.0f} keys")


def test_gemma_merge_and_falcon_groups():
    _, d, q, _, dh, *_ = sizes("Gemma-1 7B")
    stands("§9", f"Gemma-1 7B: {q * dh:,} to {d:,}")
    q = sizes("Falcon 7B")[2]
    assert [g for g in range(1, q + 1) if q % g == 0] == [1, q]
    stands("§9", f"{q} query heads, as in Falcon 7B, allow only 1 or {q}")


def test_questions_in_three_levels():
    text = NOTES
    summary = r"<summary><a id=\"q\d+\"></a>Q(\d+)\. "
    asked = [int(x) for x in re.findall(summary, text)]
    assert asked == list(range(1, 63))
    text = text[text.index("## §9") : text.index("## §10")]
    levels = {"Level 1": (1, 10), "Level 2": (11, 27), "Level 3": (28, 30), "Also asked": (31, 62)}
    for title, (first, last) in levels.items():
        part = text[text.index(f"### {title}") :]
        part = part[: part.find("\n### ", 5)] if "\n### " in part[5:] else part
        found = [int(x) for x in re.findall(summary, part)]
        assert found == list(range(first, last + 1)), title
    answers = re.findall(summary + r".*?</summary>\n\n(.*?)\n\n</details>", text, re.S)
    assert len(answers) == 62
    for which, answer in answers:
        if int(which) > 30:
            assert len(answer) < 400 and "\n" not in answer, which
        closing = answer.split("*Weak answer:*")[1] if int(which) <= 30 else answer
        assert re.search(r"\[D\d\d\]|\[§\d", closing), which


def test_twelve_wrong_answers():
    rows = re.findall(r"\| W(\d+)\. \"[^|]+\" \| [^|]+ \| \[Q\d+\], \[§[\d.]+\] \|", section("§8"))
    assert [int(row) for row in rows] == list(range(1, 13))


# ---------------------------------------------------------------- section 10

RATIOS = {  # model: (without vocabulary, all), counted on the meta device by test_model_tables.py
    "GPT-J 6B": 6_050_882_784,
    "Llama-2 7B": 6_738_415_616,
    "Qwen3 8B": 8_190_735_360,
    "Llama-3 8B": 8_030_261_248,
    "Falcon 7B": 6_921_720_704,
    "Gemma-2 9B": 9_241_705_984,
    "Gemma-1 7B": 8_537_680_896,
    "Llama-3.2 1B": 1_235_814_400,
}


@pytest.mark.parametrize("model", list(RATIOS))
def test_twelve_l_d_squared(model):
    L, d, *_, V = sizes(model)
    total = RATIOS[model]
    vocabulary = (
        V * d if model == "Falcon 7B" else tables(model)
    )  # Falcon is counted with one table
    without = total - vocabulary
    assert abs(without / weights(model) - 1) < 2e-3
    rule = 12 * L * d * d
    stands("§10", f"| {model} | {without / rule:.2f} | {total / rule:.2f} |")


def test_twelve_l_d_squared_of_mixtures():
    total, rule = 671_026_404_352, 12 * 61 * 7168**2
    stands(
        "§10", f"| DeepSeek-V3 | {(total - 2 * 129280 * 7168) / rule:.1f} | {total / rule:.1f} |"
    )


def test_first_loss():
    stands("§10", f"{math.log(50257):.1f} for 50,257 tokens, {math.log(128256):.1f} for 128,256")


def test_logits_of_a_prompt():
    stands("§10", f"At V = 128,256 and 8,192 positions they take {8192 * 128256 * 4 / GIB:.1f} GiB")


def test_tokens_and_flops():
    assert 1.4e12 / 70e9 == 20
    n = 8_030_261_248
    without_table = n - 128_256 * 4096  # a look-up, no product
    assert round(15e12 / n, -1) == 1870 and f"{6 * without_table * 15e12:.1e}" == "6.8e+23"
    assert f"{without_table / 1e9:.2f}" == "7.50"
    stands(
        "§10",
        "about 1,870 a parameter",
        "6 × 7.50e9 × 15e12 ≈ 6.8e23",
        f"Llama-3 8B takes {2 * n / 1e9:.1f} GB",
        f"Llama-3.1 405B {2 * 405_853_388_800 / 1e9:.0f} GB",
    )
    assert 2 + 2 + 4 + 4 + 4 == 16
    stands("§10", "commonly 16 bytes a parameter")


def test_depth_and_width():
    def ratio(m):
        return number(recipes()[m]["d_model"]) / number(recipes()[m]["Layers"])

    stands(
        "§10",
        f"{ratio('GPT-3 175B'):.0f} in GPT-3, {ratio('Llama-2 70B'):.0f} in Llama-2 70B, {ratio('Llama-3.1 405B'):.0f} in "
        f"Llama-3.1 405B, {ratio('DeepSeek-V3'):.0f} in DeepSeek-V3",
    )
    rows = (
        "GPT-3 175B",
        "Llama-2 70B",
        "Llama-3.1 405B",
        "DeepSeek-V3",
        "Llama-4 Maverick",
        "Gemma-3 27B",
        "gpt-oss 120b",
    )
    assert all(79.5 <= ratio(m) <= 130.5 for m in rows)
    stands("§10", "between 80 and 131")


@pytest.mark.parametrize(
    "model, given",
    [
        ("GPT-3 175B", "175 B"),
        ("Llama-2 70B", "69.0 B"),
        ("Llama-3.1 405B", "405.9 B"),
        ("DeepSeek-V3", "671 B, 37 B"),
        ("Llama-4 Maverick", "400 B, 17 B"),
        ("Gemma-3 27B", "27.0 B"),
        ("gpt-oss 120b", "116.8 B, 5.1 B"),
    ],
)
def test_sizes_table(model, given):
    r = recipes()[model]
    stands("§10", f"| {model} | {r['Layers']} | {r['d_model']} | {given} |")


def test_sizes_of_dense_rows():
    for model, printed in (("Llama-2 70B", 69.0), ("Llama-3.1 405B", 405.9), ("Gemma-3 27B", 27.0)):
        assert abs((weights(model) + tables(model)) / 1e9 - printed) < 0.06
    gpt3 = 12 * 96 * 12288**2 + 50257 * 12288
    assert abs(gpt3 / 1e9 - 175) < 0.6


@pytest.mark.parametrize(
    "model",
    [
        "GPT-3 175B",
        "Llama-3.1 405B",
        "Gemma-3 27B",
        "Llama-2 70B",
        "Llama-4 Maverick",
        "gpt-oss 120b",
    ],
)
def test_cache_from_the_card(model):
    r = recipes()[model]
    kv, dh, L = int(r["Heads q / kv"].split(" / ")[1]), number(r["head_dim"]), number(r["Layers"])
    per_token = tb.kv_cache_bytes(L, kv, dh, 1)
    assert per_token % KIB == 0
    assert re.search(rf"\| {re.escape(model)} \|[^\n]*\| 2 × {kv} × {dh} \|", NOTES)
    stands(
        "§10",
        f"| 2 × {kv} × {dh} | {per_token // KIB:,} |",
    )


def test_cache_of_latents_and_windows():
    stands("§10", f"671 B, 37 B | 576 | {576 * 61 * 2 / KIB:.1f} |")
    long = tb.kv_cache_bytes(126, 8, 128, 131072)
    stands("§10", f"Llama-3.1 405B at 131,072 tokens needs {long / GIB:.0f} GiB")
    kinds = [(i + 1) % 6 == 0 for i in range(62)]
    whole, local = sum(kinds), len(kinds) - sum(kinds)
    full = tb.kv_cache_bytes(62, 16, 128, 32768)
    short = tb.kv_cache_bytes(whole, 16, 128, 32768) + tb.kv_cache_bytes(local, 16, 128, 1024)
    stands(
        "§10",
        f"32,768 tokens {full / GIB:.1f} GiB shrinks to {short / GIB:.1f} GiB, since {local} of its 62 layers keep 1,024",
    )


def test_sheet_is_short():
    text = NOTES
    sheet = text[text.index("## One-page sheet") :]
    sheet = sheet[: sheet.find("\n## ", 5)]
    code = "\n".join(re.findall(r"```python\n(.*?)\n```", sheet, re.S)).split("\n")
    code = [line.strip() for line in code]
    assert len([x for x in code if x and not x.startswith(("#", '"""'))]) <= 60
    assert len(re.findall(r"^\d+\. \\quad", sheet, re.M)) == 10
    numbers = sheet[sheet.index("### Ten numbers") : sheet.index("### Six sentences")]
    assert len(re.findall(r"^\| ", numbers, re.M)) == 11


# ---------------------------------------------------------------- stated by others: phrase and source


@pytest.mark.parametrize(
    "where, phrase, source",
    [
        ("§4", "about 4.5 % per layer", "Alignment Forum 8mizBCm3dyc432nK8; a post"),
        ("§8", "MQA is of 2019, GQA of 2023", "arXiv:1911.02150, arXiv:2305.13245"),
        ("§8", "stretches the positions of its global layers by a factor of 8", "gemma_pytorch"),
        (
            "§9",
            "of order $d \\sqrt{\\ln d}$ for Post-LN, at any depth, and smaller by √L for Pre-LN",
            "arXiv:2002.04745 Theorem 1",
        ),
        ("§10", "a 70-billion model trained on 1.4 trillion tokens", "arXiv:2203.15556"),
        ("§10", "Llama-3 8B saw over 15 trillion", "meta-llama/llama3 MODEL_CARD.md"),
        ("§3", "Of the released Llama-2 models only the 70B has GQA", "arXiv:2307.09288"),
        (
            "§7",
            "CaiT's released models 1e-5 or 1e-6, by depth",
            "facebookresearch/deit cait_models.py",
        ),
        ("§7", "a small loss at 8 billion parameters, none at 62", "arXiv:2204.02311 §2"),
    ],
)
def test_stated_by_others(where, phrase, source):
    stands(where, phrase)
    assert source


def test_inputs_of_the_worked_examples():
    L, d, q, kv, _dh, h, _V = sizes("Mixtral 8x7B")
    stands(
        "§6",
        f"d = {d:,}, d_ff = {h:,}, {L} layers, {q} query heads and {kv} KV heads",
        r"2 \cdot 32000 \cdot 4096",
        "Then f is (2/3, 1/3)",
    )
    assert math.isclose((0.7 + 0.6 + 0.4), 1.7) and math.isclose(0.3 + 0.4 + 0.6, 1.3)
    stands("§6", "P is (1.7/3, 1.3/3)")
    stands("One-page", "GQA 8/2 has 23,040", "rounded up to a multiple of 256", "√128")
