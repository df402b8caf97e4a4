"""The answers of blocks.py equal the script's classes on the same weights, in three dtypes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
from torch import Tensor, nn

from whiteboard import blocks as wb

CHUNKS = ((8,), (3, 1, 4), (1,) * 8)
# Of the largest value. Half precision is rounded after each step, by us and by the script, and not
# at the same places: a few units of its last place.
CLOSE = {torch.float64: 1e-9, torch.float16: 4e-3, torch.bfloat16: 3e-2}
in_float64 = pytest.mark.parametrize("dtype", [torch.float64], indirect=True)


@pytest.fixture(autouse=True, params=CLOSE, ids=str)
def dtype(request: pytest.FixtureRequest):
    """Everything in one dtype, the same numbers in every test."""
    torch.set_default_dtype(request.param)
    torch.manual_seed(0)
    yield request.param
    torch.set_default_dtype(torch.float32)


def randomized(module: nn.Module) -> nn.Module:
    """Weights of a size that leaves scores unsaturated; norms unlike 1, biases unlike 0."""
    for p in module.parameters():
        p.data.normal_(1.0 if p.ndim == 1 else 0.0, 0.3)
    return module


def tables(length: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin, computed in float64: the script's own tables are rounded to float32."""
    turn = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length)[:, None] * torch.cat((turn, turn))
    dtype = torch.get_default_dtype()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def close(a: Tensor, b: Tensor) -> bool:
    """Equal shape and dtype, and values within what the dtype of the test allows."""
    allowed = CLOSE[torch.get_default_dtype()] * b.abs().max().clamp(min=1)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and bool((a - b).abs().max() < allowed)


def in_chunks(module: Callable, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    outputs, cache = [], None
    for part in x.split(lengths, dim=1):
        y, cache = module(part, cache)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def renamed(module: nn.Module, **names: str) -> dict[str, Tensor]:
    """Its state dict under the script's names: the longest prefix that is given is replaced."""
    state = {}
    for key, value in module.state_dict().items():
        old = max((n for n in names if key.startswith(n.replace("__", "."))), key=len, default=None)
        state[key if old is None else key.replace(old.replace("__", "."), names[old], 1)] = value
    return state


FFN = {"ffn__0": "ffn.up", "ffn__2": "ffn.down"}


def test_norms() -> None:
    x, weight, bias = torch.randn(2, 5, 6), torch.randn(6), torch.randn(6)
    norm = tb.RMSNorm(6)
    norm.weight.data.copy_(weight)
    for scale in (1, 3e-3):
        assert close(wb.rms_norm(scale * x, weight), norm(scale * x))
        assert close(
            wb.layer_norm(scale * x, weight, bias), F.layer_norm(scale * x, (6,), weight, bias)
        )
    low, wide = weight.bfloat16(), 300 * x
    norm.weight.data.copy_(low)
    assert torch.equal(wb.rms_norm(wide.bfloat16(), low), norm.bfloat16()(wide.bfloat16()))
    assert wb.rms_norm(wide.half(), weight.half()).isfinite().all()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (4, 4), (2, 7)])
def test_causal_mask(T: int, S: int, window: int | None) -> None:
    want = tb.build_causal_mask(torch.arange(S - T, S), torch.arange(S), window)
    assert torch.equal(wb.causal_mask(T, S, window), want)


def test_rotate() -> None:
    x, positions = torch.randn(2, 3, 5, 6), torch.tensor([4, 0, 301, 2, 299])
    cos, sin = tables(302, 6)
    assert close(wb.rotate(x, positions), tb.apply_rope(x, cos[positions], sin[positions]))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_attention(n_kv_heads: int) -> None:
    q, k, v = (
        torch.randn(2, 4, 5, 6),
        torch.randn(2, n_kv_heads, 7, 6),
        torch.randn(2, n_kv_heads, 7, 3),
    )
    holes = wb.causal_mask(5, 7)
    holes[1] = False
    for mask in (None, wb.causal_mask(5, 7), holes, torch.rand(2, 1, 1, 7) < 0.6):
        assert close(wb.attention(q, k, v, mask), tb.attend(q, k, v, mask))


def test_attention_where_the_product_overflows_float16() -> None:
    """q k^T is 102,400 before the scale, 12,800 behind it."""
    q, k, v = torch.full((1, 2, 3, 64), 40.0), torch.full((1, 1, 5, 64), 40.0), torch.randn(5, 7)
    want = v.mean(dim=0).expand(1, 2, 3, 7)
    assert close(tb.attend(q, k, v[None, None]), want)
    assert close(wb.attention(q, k, v[None, None]), want)
    assert close(wb.online_softmax(q[0, 0], k[0, 0], v, 2), want[0, 0])


@pytest.mark.parametrize("block", [1, 3, 7, 9])
def test_online_softmax(block: int) -> None:
    q, k, v = 300 * torch.randn(5, 6), torch.randn(7, 6), torch.randn(7, 3)
    for q_scaled in (q, q / 300):
        want = tb.attend(q_scaled[None, None], k[None, None], v[None, None])[0, 0]
        assert close(wb.online_softmax(q_scaled, k, v, block), want)


def test_swiglu() -> None:
    ffn, x = randomized(tb.GatedFFN(6, 7)), torch.randn(2, 5, 6)
    weights = (ffn.gate.weight, ffn.up.weight, ffn.down.weight)
    assert close(wb.swiglu(x, *weights), ffn(x))


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3), (1, 1)])
def test_modern_block(heads: tuple[int, int], chunks: tuple[int, ...]) -> None:
    d_model = 6 * heads[0]
    block = randomized(wb.ModernBlock(d_model, *heads, 20))
    script = tb.ModernDecoderBlock(d_model, *heads, 20)
    script.load_state_dict(renamed(block, norm1="norm1.weight", norm2="norm2.weight"))
    x = torch.randn(2, 8, d_model)
    assert close(in_chunks(block, x, chunks), script(x, *tables(8, 6)))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_self_attention(chunks: tuple[int, ...]) -> None:
    attn, script = (
        randomized(wb.SelfAttention(36, 6, 2)),
        tb.MultiHeadAttention(36, 6, 2, rope=True),
    )
    script.load_state_dict(attn.state_dict())
    x, (cos, sin) = torch.randn(2, 8, 36), tables(8, 6)
    want = script(x, mask=wb.causal_mask(8, 8), cos=cos, sin=sin)[0]
    assert close(in_chunks(attn, x, chunks), want)


def test_layers_of_2017() -> None:
    x, memory = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    encoder, script = randomized(wb.EncoderLayer(24, 4, 20)), tb.VanillaEncoderLayer2017(24, 4, 20)
    script.load_state_dict(renamed(encoder, **FFN))
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    assert close(encoder(x), script(x))
    assert close(encoder(x, keep), script(x, keep))
    decoder = randomized(wb.CrossDecoderLayer(24, 4, 20))
    script = tb.VanillaSeq2SeqDecoderLayer2017(24, 4, 20)
    script.load_state_dict(renamed(decoder, **FFN))
    assert close(decoder(x, memory), script(x, memory))


def test_gpt2_block() -> None:
    block, x = randomized(wb.GPT2Block(24, 4, 20)), torch.randn(2, 5, 24)
    script = tb.GPT2StyleDecoderLayer(24, 4, 20, act=lambda h: F.gelu(h, approximate="tanh"))
    script.load_state_dict(renamed(block, ln1="norm1", ln2="norm2", **FFN))
    assert close(block(x), script(x))


def test_parallel_block() -> None:
    block, x = randomized(wb.ParallelBlock(24, 4, 20)), torch.randn(2, 5, 24)
    script = tb.ParallelDecoderBlock(
        24, 4, d_ff=20, attn=tb.MultiHeadAttention(24, 4, rope=True),
        ffn=tb.DenseFFN(24, 20, act=lambda h: F.gelu(h, approximate="tanh")),
    )  # fmt: skip
    script.load_state_dict(renamed(block, up="ffn.up", down="ffn.down"))
    cos, sin = tables(5, 6)
    assert close(block(x), script(x, cos=cos, sin=sin))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_latent_attention(chunks: tuple[int, ...]) -> None:
    attn = randomized(wb.LatentAttention(15, 3, 10, 4, 7, 8))
    script = tb.MultiHeadLatentAttention(15, 3, kv_rank=10, rope_dim=4, nope_dim=7, v_dim=8)
    state = renamed(attn, latent_norm="kv_norm.weight")
    down = torch.cat((state.pop("latent_down.weight"), state.pop("k_rope_proj.weight")))
    script.load_state_dict({**state, "kv_down.weight": down})
    x, (cos, sin) = torch.randn(2, 8, 15), tables(8, 4)
    want = script(x, mask=wb.causal_mask(8, 8), cos=cos, sin=sin)[0]
    assert close(in_chunks(attn, x, chunks), want)


def test_switch_ffn() -> None:
    ffn, script, x = randomized(wb.SwitchFFN(6, 7, 5)), tb.MoEFFN(6, 7, 5), torch.randn(3, 8, 6)
    script.load_state_dict(ffn.state_dict())
    y, loss = ffn(x)
    assert close(y, script(x))
    assert close(loss, script.aux_loss.to(loss.dtype))  # float32 in half precision


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_mixtral_ffn_against_one_token_at_a_time(top_k: int) -> None:
    ffn, x = randomized(wb.MixtralFFN(6, 7, 5, top_k)), torch.randn(2, 4, 6)
    want = torch.zeros_like(x)
    for b in range(2):
        for t in range(4):
            logits = ffn.router.weight @ x[b, t]
            best = sorted(range(5), key=lambda e: -logits[e].item())[:top_k]
            total = sum(logits[e].exp() for e in best)
            for e in best:
                want[b, t] += logits[e].exp() / total * ffn.experts[e](x[b, t])
    assert close(ffn(x), want)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_mixtral_ffn(top_k: int) -> None:
    ffn, x = randomized(wb.MixtralFFN(6, 7, 5, top_k)), torch.randn(2, 4, 6)
    experts = [tb.GatedFFN(6, 7) for _ in range(5)]
    script = tb.MixtureFFN(tb.SoftmaxRouter(6, 5, top_k), experts)
    script.load_state_dict(renamed(ffn, router="router.router"))
    assert close(ffn(x), script(x))


@in_float64
def test_mixtral_ffn_against_transformers() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=6, intermediate_size=7, num_local_experts=5, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    block, ffn = mixtral.MixtralSparseMoeBlock(config), randomized(wb.MixtralFFN(6, 7, 5, 2))
    state = dict.fromkeys(block.state_dict())
    assert set(state) == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    both = [torch.cat((e.gate.weight, e.up.weight)) for e in ffn.experts]
    block.load_state_dict({
        "gate.weight": ffn.router.weight,
        "experts.gate_up_proj": torch.stack(both),
        "experts.down_proj": torch.stack([e.down.weight for e in ffn.experts]),
    })  # fmt: skip
    x = torch.randn(2, 4, 6)
    found = block(x)
    found = found[0] if isinstance(found, tuple) else found
    assert (found - ffn(x)).abs().max() < 1e-6  # its router runs in float32


def test_lora() -> None:
    linear, x = nn.Linear(7, 9), torch.randn(2, 5, 7)
    before = linear.weight.detach().clone()
    lora = wb.LoRALinear(linear, 3, 12)
    assert torch.equal(lora(x), linear(x))
    assert {n for n, p in lora.named_parameters() if p.requires_grad} == {"a", "b"}
    lora.b.data.normal_()
    want = F.linear(x, before + 4 * lora.b @ lora.a, linear.bias)
    assert close(lora(x), want)
    assert close(lora.merged()(x), want)
    assert torch.equal(linear.weight, before)


def test_next_token_loss() -> None:
    logits, ids = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 1, 1]]).bool()
    assert close(wb.next_token_loss(logits, ids), tb.next_token_loss(logits, ids))
    assert close(wb.next_token_loss(logits, ids, mask), tb.next_token_loss(logits, ids, mask))
    apart = torch.tensor([[1, 0, 1, 0, 1]]).bool().expand(3, 5)
    for none in ((logits, ids, apart), (logits[:, :1], ids[:, :1]), (logits[:0], ids[:0])):
        assert close(wb.next_token_loss(*none), tb.next_token_loss(*none))
        assert wb.next_token_loss(*none) == 0


@pytest.mark.parametrize("top_p", [None, 0.3, 0.7])
@pytest.mark.parametrize("top_k", [None, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_sample(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits, (a, b) = torch.randn(500, 6), (torch.Generator().manual_seed(1) for _ in range(2))
    want = tb.pick_next_token(logits, temperature, top_k, top_p, a)
    assert torch.equal(wb.sample(logits, temperature, top_k, top_p, b), want)


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-30, 1e-37, 1e-38, 1e-40])
def test_sample_at_tiny_temperatures_takes_the_likeliest(temperature: float) -> None:
    logits = 30 * torch.randn(500, 6)
    logits[:, 2] = logits.amax(dim=1) + 1
    for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"top_p": 1}):
        assert torch.equal(wb.sample(logits, temperature, **options), logits.argmax(1)[:, None])
        assert torch.equal(
            tb.pick_next_token(logits, temperature, **options), logits.argmax(1)[:, None]
        )


def test_top_p_of_one_drops_nothing() -> None:
    """Summed from the likeliest, 3,000 probabilities reach 1 in float32 before the last ones."""
    logits = torch.cat((torch.full((1, 2000), 9.0), torch.full((1, 1000), -6.0)), dim=1).float()
    probs = logits.softmax(dim=-1)
    assert ((probs.cumsum(dim=-1) - probs)[0, 2000:] >= 1).any()
    kept = []

    def multinomial(probs: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        kept.append(probs)
        return probs.argmax(dim=-1, keepdim=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", multinomial)
        wb.sample(logits, 1.0, None, 1)
    assert (kept[0] > 0).all()


def test_generate() -> None:
    model, prompt = tb.DecoderOnlyLM(17, 24, 2, 4, 2, 20), torch.randint(17, (3, 4))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # so that the likeliest token is not always the last one

    def cached(ids: Tensor, caches: list | None) -> tuple[Tensor, list]:
        caches = model.new_caches() if caches is None else caches
        return model(ids, kv_caches=caches), caches

    free = model.generate(prompt, 9)
    assert torch.equal(wb.generate(cached, prompt, 9), free)
    for eos_id in free[:, 5].tolist():
        want = model.generate(prompt, 9, eos_id=eos_id)
        assert torch.equal(wb.generate(cached, prompt, 9, eos_id), want)


@pytest.mark.parametrize("n_draft", [1, 4])
def test_speculate_is_greedy_decoding(n_draft: int) -> None:
    target, ids = tb.DecoderOnlyLM(17, 24, 2, 4, 2, 20), torch.randint(17, (1, 4))
    lengths = set()
    for weight in (0.0, 0.02, 1.0):  # drafts that agree always, sometimes, hardly ever
        other = torch.randn(17, 17)

        def draft(ids: Tensor, weight: float = weight, other: Tensor = other) -> Tensor:
            return target(ids) + 30 * weight * other[ids]

        done = ids
        while done.shape[1] < 20:
            new = wb.speculate(target, draft, done, n_draft)
            lengths.add(new.shape[1])
            done = torch.cat((done, new), dim=1)
        want = target.generate(ids, done.shape[1] - 4)
        assert torch.equal(done, want)
    assert n_draft + 1 in lengths


def test_counts() -> None:
    for sizes in ((96, 8, 2, 256), (36, 6, 2, 20), (18, 3, 3, 13)):
        block = wb.ModernBlock(*sizes)
        assert wb.block_parameters(*sizes) == sum(p.numel() for p in block.parameters())
    want = tb.kv_cache_bytes(5, 3, 7, 11, 13, 4)
    assert wb.kv_cache_bytes(5, 3, 7, 11, 13, 4) == want
    assert wb.kv_cache_bytes(80, 8, 128, 4096) == tb.kv_cache_bytes(80, 8, 128, 4096)
