"""Tokens and decoding against independent loops, the tokenizers library, and transformers."""

import random
import re

import pytest
import torch
import transformer_block as tb
from torch import Tensor

from whiteboard import blocks
from whiteboard import tokens as wb

TEXTS = (
    "", "a", "aa", "aaa", "aaaa", "aaaaaaaaaaa", "abababab", "the theme of the thesis",
    "naïve café, 東京 🙂🙂", "ab" * 7 + "aab" * 5 + "a" * 9, "\x00\xff\n\n\n tab",
)  # fmt: skip


def drawn_text(seed: int, length: int = 60) -> str:
    return "".join(random.Random(seed).choices("aab é", k=length))


ALL = (*TEXTS, *(drawn_text(seed) for seed in range(30)))


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


# ── Byte-pair encoding ───────────────────────────────────────────────────────────────────────


def replaced(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Left to right by a search in text: each token is a run of hex digits between bars."""
    a, b = (one.hex() for one in pair)
    line = "|" + "||".join(one.hex() for one in parts) + "|" if parts else ""
    line = re.sub(re.escape(f"|{a}||{b}|"), f"|{a + b}|", line)
    return [bytes.fromhex(one) for one in re.findall(r"\|([0-9a-f]+)\|", line)]


def trained(text: str, n_merges: int) -> list[tuple[bytes, bytes]]:
    parts, found = [bytes([b]) for b in text.encode("utf-8")], []
    while len(found) < n_merges and len(parts) > 1:
        pairs = [(parts[i], parts[i + 1]) for i in range(len(parts) - 1)]
        top = max(pairs.count(pair) for pair in pairs)
        found.append(sorted(pair for pair in pairs if pairs.count(pair) == top)[-1])
        parts = replaced(parts, found[-1])
    return found


@pytest.mark.parametrize("text", ALL)
def test_bpe_train(text: str) -> None:
    for n_merges in (0, 1, 5, 100):
        assert wb.bpe_train(text, n_merges) == trained(text, n_merges)


@pytest.mark.parametrize("learned", ALL)
def test_bpe_encode_and_decode(learned: str) -> None:
    merges = wb.bpe_train(learned, 12)
    assert len({a + b for a, b in merges}) == len(merges)  # no two merges make the same bytes
    vocabulary = [bytes([b]) for b in range(256)] + [a + b for a, b in merges]
    for text in ALL:
        parts = [bytes([b]) for b in text.encode("utf-8")]
        for pair in merges:
            parts = replaced(parts, pair)
        ids = wb.bpe_encode(text, merges)
        assert [vocabulary[i] for i in ids] == parts
        assert wb.bpe_decode(ids, merges) == text


def test_bpe_encode_against_tokenizers() -> None:
    """The library's own BPE over the same merges, bytes written as its byte-level alphabet."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    assert sorted(letter.values()) == alphabet

    def spelt(part: bytes) -> str:
        return "".join(letter[b] for b in part)

    for learned in ALL:
        merges = wb.bpe_train(learned, 12)
        vocabulary = {letter[b]: b for b in range(256)}
        vocabulary |= {spelt(a + b): 256 + i for i, (a, b) in enumerate(merges)}
        pairs = [(spelt(a), spelt(b)) for a, b in merges]
        library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        for text in ALL:
            assert wb.bpe_encode(text, merges) == library.encode(text).ids


def test_bpe_decode_of_broken_bytes() -> None:
    merges = [(b"\xe6", b"\x9d"), (b"a", b"b")]
    for ids in ([97, 97], [0xE6], [256], [0x9D, 257, 0xFF], [256, 0xB1, 98], [0xC3], []):
        vocabulary = {256: b"\xe6\x9d", 257: b"ab"}
        joined = b"".join(vocabulary.get(i) or bytes([i]) for i in ids)
        assert wb.bpe_decode(ids, merges) == joined.decode("utf-8", errors="replace")
    assert wb.bpe_decode([256, 0xB1], merges) == "東"
    assert wb.bpe_decode([0xE6, 97], merges) == "\ufffda"


# ── Padding and beams ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pad_id", [0, 9])
@pytest.mark.parametrize(
    "prompts", [[[5, 6, 7], [8], []], [[0, 0, 3]], [[1, 0], [0, 0, 0, 9], [4, 4, 4]]]
)
def test_left_pad(prompts: list[list[int]], pad_id: int) -> None:
    ids, mask, positions = wb.left_pad(prompts, pad_id)
    T = max(map(len, prompts))
    assert ids.shape == mask.shape == positions.shape == (len(prompts), T)
    assert ids.dtype == positions.dtype == torch.int64 and mask.dtype == torch.bool
    for b, prompt in enumerate(prompts):
        gap = T - len(prompt)
        for t in range(T):
            real = t >= gap
            assert mask[b, t] == real
            assert ids[b, t] == (prompt[t - gap] if real else pad_id)
            assert positions[b, t] == (t - gap if real else 0)


def next_logits(seed: int, V: int):
    """A model whose next token depends on the last two, by a table."""
    table = 2 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed))

    def model(ids: Tensor) -> Tensor:
        before = torch.cat((ids[:, :1], ids[:, :-1]), dim=1)
        return table[before, ids]

    return model


def beams_by_hand(model, ids, n_beams, n, eos_id):
    """The definition, over strings of ids in dictionaries; every extension is a candidate."""
    T, beams = ids.shape[1], {tuple(ids[0].tolist()): 0.0}

    def ended(beam):
        return len(beam) > T and beam[-1] == eos_id

    for _ in range(n):
        grown = {}
        for beam, total in beams.items():
            if ended(beam):
                grown[beam] = total
                continue
            log_probs = model(torch.tensor([beam]))[0, -1].log_softmax(dim=0)
            for token in range(len(log_probs)):
                grown[(*beam, token)] = total + log_probs[token].item()
        order = sorted(grown, key=grown.get)[-n_beams:]
        beams = {beam: grown[beam] for beam in order}
    best = max(beams, key=lambda beam: beams[beam] / max(len(beam) - T, 1))
    return torch.tensor([best])


@pytest.mark.parametrize("eos_id", [None, 2, 0])
@pytest.mark.parametrize("n_beams", [1, 2, 3, 5, 40])
def test_beam_search(n_beams: int, eos_id: int | None) -> None:
    lengths = set()
    for seed in range(25):
        model = next_logits(seed, 5)
        for n in (0, 1, 2, 5):
            ids = torch.tensor([[3, 2, 0]])
            found = wb.beam_search(model, ids, n_beams, n, eos_id)
            assert torch.equal(found, beams_by_hand(model, ids, n_beams, n, eos_id))
            assert found.dtype == ids.dtype
            lengths.add(found.shape[1])
    assert eos_id is None or len(lengths) > 4


def test_beam_search_of_a_language_model() -> None:
    """With every continuation as a beam it is the best of all; without eos one beam is greedy."""
    lm, ids = tb.DecoderOnlyLM(4, 24, 1, 4, 2, 20), torch.tensor([[1, 3]])
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(3)
    assert torch.equal(wb.beam_search(lm, ids, 1, 5), lm.generate(ids, 5))
    rows = torch.cartesian_prod(*[torch.arange(4)] * 3)
    full = torch.cat((ids.expand(64, 2), rows), dim=1)
    log_probs = lm(full)[:, 1:-1].log_softmax(dim=-1)
    sums = log_probs.gather(2, rows[:, :, None]).sum(dim=(1, 2))
    assert torch.equal(wb.beam_search(lm, ids, 64, 3)[0], full[sums.argmax()])


def test_beam_search_against_transformers() -> None:
    """Without eos both do the same: the best sum of the beams that survive."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=24, n_layer=1, n_head=3, n_positions=30, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    gpt2 = transformers.GPT2LMHeadModel(config).double().eval()
    for p in gpt2.parameters():
        p.data.mul_(6)
    ids = torch.tensor([[3, 2, 0, 6]])
    for n_beams in (2, 3, 4):
        want = gpt2.generate(
            ids, max_new_tokens=6, num_beams=n_beams, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip
        found = wb.beam_search(lambda x: gpt2(x).logits, ids, n_beams, 6)
        assert torch.equal(found, want)


# ── A window, and a slope ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("window", [1, 2, 4, 30])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3)])
def test_window_attention(heads: tuple[int, int], window: int) -> None:
    d_model = 6 * heads[0]
    attn = wb.WindowAttention(d_model, *heads, window)
    script = tb.MultiHeadAttention(d_model, *heads, rope=True)
    script.load_state_dict(attn.state_dict())
    turn = torch.arange(17)[:, None] * 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    angle = torch.cat((turn, turn), dim=1)
    x = torch.randn(2, 17, d_model)
    mask = blocks.causal_mask(17, 17, window)
    for i in range(17):
        assert mask[i].nonzero().flatten().tolist() == list(range(max(0, i - window + 1), i + 1))
    want = script(x, mask=mask, cos=angle.cos(), sin=angle.sin())[0]
    for chunks in ((17,), (3, 1, 4, 9), (1,) * 17, (9, 8), (1, 15, 1)):
        outputs, cache = [], None
        for part in x.split(chunks, dim=1):
            y, cache = attn(part, cache)
            outputs.append(y)
            numbers = [t for t in cache if isinstance(t, Tensor)]
            assert sum(t.untyped_storage().nbytes() // 8 for t in numbers) <= (
                2 * 2 * heads[1] * 6 * window
            )
        assert (torch.cat(outputs, dim=1) - want).abs().max() < 1e-9


@pytest.mark.parametrize("n_heads", [1, 2, 8, 16])
def test_alibi(n_heads: int) -> None:
    bias = wb.alibi(n_heads, 3, 7)
    assert bias.shape == (n_heads, 3, 7)
    for h in range(n_heads):
        for t in range(3):
            for s in range(4 + t + 1):
                assert abs(bias[h, t, s] - 2 ** (-8 * (h + 1) / n_heads) * (s - (4 + t))) < 1e-6


def test_alibi_against_transformers() -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    want = bloom.build_alibi_tensor(torch.ones(1, 7), 8, torch.float64).view(8, 1, 7)
    found = wb.alibi(8, 1, 7)  # theirs counts from the first key: a row's softmax is the same
    assert ((found - found[:, :, :1]) - want).abs().max() < 1e-6
