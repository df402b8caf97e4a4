"""The operators of 2025: against transformers on the same weights, and by planted faults.

The official classes compute norms, softmax, the delta rule and index scores in float32. Here they
are made to do so in float64 (the fixture wide), and what is left is the rounding of the rotation
tables, 1e-7; test_within_float32 takes them as they are.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformer_block as tb
from planted import faulty, proofs_hold, read_faults
from torch import Tensor, nn
from transformers import (
    DeepseekV4Config,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import after_2025
from after_2025 import (
    DeltaNetState,
    GatedDeltaNet,
    HyperConnectedBlock,
    HyperConnection,
    IndexedCache,
    IndexedSparseAttention,
    OutputGatedAttention,
    StreamCollapse,
    delta_rule_chunked,
    delta_rule_recurrent,
)

LIMIT = 1e-6
V, D, D_FF = 61, 32, 40


class WideTorch:
    """torch to a module that asks for float32: it gets float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    for module in (qwen, v32, v4):
        monkeypatch.setattr(module, "torch", WideTorch())


def spread(model: nn.Module) -> nn.Module:
    """In float64, with weights large enough that every part is felt; decays and biases differ."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(weight, -3, 1)
        else:
            nn.init.normal_(weight, std=(0.2 if weight.dim() > 1 else 0.5))
    return model.double().eval()


def load(ours: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Ours with exactly these weights, in float64."""
    ours = ours.double().eval()
    ours.load_state_dict(weights, assign=True)
    return ours


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


# =============================================================================================
# Qwen3-Next: three DeltaNet layers and one of gated attention
# =============================================================================================

QWEN = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": D_FF,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "rms_norm_eps": 1e-4,
    "attn_implementation": "eager",
}


def delta_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """in_proj_qkvz holds, for each key head, q, k, and of its value heads v, then the gate."""
    n_k, d_k, d_v, ratio = 2, 5, 7, 3
    sizes = d_k, d_k, ratio * d_v, ratio * d_v
    packed = theirs.in_proj_qkvz.weight.unflatten(0, (n_k, -1)).split(sizes, dim=1)
    beta, decay = theirs.in_proj_ba.weight.unflatten(0, (n_k, -1)).split((ratio, ratio), dim=1)
    q, k, v, gate, beta, decay = (part.flatten(0, 1) for part in (*packed, beta, decay))
    return {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "gate_proj.weight": gate,
        "beta_proj.weight": beta,
        "decay_proj.weight": decay,
        "conv.weight": theirs.conv1d.weight[:, 0].T.contiguous(),
        "A_log": theirs.A_log,
        "dt_bias": theirs.dt_bias,
        "norm.weight": theirs.norm.weight,
        "o_proj.weight": theirs.out_proj.weight,
    }


def gated_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """q_proj holds, for each head, the query and then the gate; norms store what exceeds 1."""
    q, gate = theirs.q_proj.weight.unflatten(0, (4, -1)).chunk(2, dim=1)
    return {
        "attn.q_proj.weight": q.flatten(0, 1),
        "attn.k_proj.weight": theirs.k_proj.weight,
        "attn.v_proj.weight": theirs.v_proj.weight,
        "attn.q_norm.weight": 1 + theirs.q_norm.weight,
        "attn.k_norm.weight": 1 + theirs.k_norm.weight,
        "o_proj.weight": theirs.o_proj.weight,
        "gate_proj.weight": gate.flatten(0, 1),
    }


def our_gated() -> OutputGatedAttention:
    options = {"head_dim": 16, "rope": True, "qk_norm": True, "norm_eps": 1e-4}
    return OutputGatedAttention(tb.MultiHeadAttention(D, 4, 2, **options))


def our_delta(chunk: int = 64) -> GatedDeltaNet:
    return GatedDeltaNet(D, 2, 6, k_dim=5, v_dim=7, chunk=chunk, norm_eps=1e-4)


def below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}


@pytest.fixture(scope="module")
def qwen_pair() -> tuple[nn.Module, nn.Module]:
    """The official model and ours of the same weights."""
    theirs = spread(Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN)))
    weights = {
        "embedding.weight": theirs.model.embed_tokens.weight,
        "final_norm.weight": 1 + theirs.model.norm.weight,
        "lm_head.weight": theirs.lm_head.weight,
    }
    for number, layer in enumerate(theirs.model.layers):
        full = number == 3
        own = gated_weights(layer.self_attn) if full else delta_weights(layer.linear_attn)
        own = below("attn", own) | {
            "norm1.weight": 1 + layer.input_layernorm.weight,
            "norm2.weight": 1 + layer.post_attention_layernorm.weight,
            "ffn.gate.weight": layer.mlp.gate_proj.weight,
            "ffn.up.weight": layer.mlp.up_proj.weight,
            "ffn.down.weight": layer.mlp.down_proj.weight,
        }
        weights |= below(f"blocks.{number}", own)

    def make_block(layer: int) -> nn.Module:
        attn = our_gated() if layer == 3 else our_delta(chunk=4)
        return tb.ModernDecoderBlock(D, d_ff=D_FF, attn=attn, eps=1e-4)

    options = {"rope_dim": 4, "max_len": 40, "tie_embeddings": False, "eps": 1e-4}
    ours = load(tb.DecoderOnlyLM(V, D, 4, make_block=make_block, **options), weights)
    return theirs, ours


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_qwen3_next_pass_and_decoding(qwen_pair):
    theirs, ours = qwen_pair
    ids = torch.randint(V, (2, 21))
    expected = theirs(ids).logits
    assert expected.std() > 0.5
    assert largest(ours(ids), expected) < LIMIT
    caches, cache = ours.new_caches(), DynamicCache(config=theirs.config)
    assert [type(c) for c in caches] == [DeltaNetState] * 3 + [tb.KVCache]
    for part in ids.split((6, 1, 1, 9, 1, 3), dim=1):
        step = ours(part, kv_caches=caches)
        if part.shape[1] in (1, 6):
            assert largest(step, theirs(part, cache=cache).logits) < LIMIT
        else:  # tokens one at a time there
            single = [theirs(token, cache=cache).logits for token in part.split(1, dim=1)]
            assert largest(step, torch.cat(single, dim=1)) < LIMIT


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_qwen3_next_left_padded(qwen_pair):
    theirs, ours = qwen_pair
    ids = torch.randint(1, V, (3, 9))
    real = torch.arange(9) >= torch.tensor([0, 3, 8])[:, None]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(ids, attention_mask=real.long(), **options)
    tokens = ours.generate(ids, 12, key_padding_mask=real)
    assert torch.equal(tokens, expected)
    for row, start in zip(tokens, (0, 3, 8)):
        alone = ours.generate(row[None, start:9], 12)
        assert torch.equal(alone[0], row[start:])
    assert (
        largest(ours(ids, key_padding_mask=real)[real], theirs(ids, real.long()).logits[real])
        < LIMIT
    )


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_gated_attention_equals_theirs():
    config = Qwen3NextConfig(**QWEN)
    theirs = spread(qwen.Qwen3NextAttention(config, 3))
    ours = load(our_gated(), gated_weights(theirs))
    cos, sin = tb.build_rope_cache(12, 4)
    x, cache, kept = torch.randn(2, 12, D).double(), DynamicCache(config=config), tb.KVCache()
    tables = cos[None].double(), sin[None].double()
    hidden = torch.zeros(12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf)
    hidden = hidden[None, None].double()
    expected = theirs(x, tables, hidden)[0]
    assert largest(ours(x, causal=True, cos=cos, sin=sin)[0], expected) < LIMIT
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        rows = [table[:, start:stop] for table in tables]
        step = theirs(x[:, start:stop], rows, hidden[..., start:stop, :stop], cache)[0]
        out = ours(x[:, start:stop], causal=True, cos=cos, sin=sin, kv_cache=kept)[0]
        assert largest(out, step) < LIMIT


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.usefixtures("wide")
def test_delta_net_equals_theirs(chunk):
    config = Qwen3NextConfig(**QWEN)
    theirs = spread(qwen.Qwen3NextGatedDeltaNet(config, 0))
    ours = load(our_delta(chunk), delta_weights(theirs))
    x = torch.randn(2, 70, D).double()
    assert largest(ours(x)[0], theirs(x)) < LIMIT
    cache, state = DynamicCache(config=config), ours.new_cache()
    for part in (x[:, :67], *x[:, 67:].split(1, dim=1)):
        assert largest(ours(part, kv_cache=state)[0], theirs(part, cache)) < LIMIT
    layer = cache.layers[0]
    assert largest(state.state, cache.get_recurrent_state(0, state_idx=0).double()) < LIMIT
    columns = cache.get_conv_state(0, state_idx=0)[:, :, -3:].mT
    assert largest(state.columns, columns) < LIMIT, layer
    real = torch.arange(70) >= torch.tensor([0, 5])[:, None]
    assert largest(ours(x, key_padding_mask=real)[0], theirs(x, attention_mask=real)) < LIMIT


@pytest.mark.parametrize("steps", [1, 5, 64, 130])
@pytest.mark.usefixtures("wide")
def test_delta_rules_equal_theirs(steps):
    torch.manual_seed(steps)
    q, k = F.normalize(torch.randn(2, 2, 3, steps, 8).double(), dim=-1)
    v, log_decay = torch.randn(2, 3, steps, 6).double(), -torch.rand(2, 3, steps).double()
    beta, state = torch.rand(2, 3, steps).double(), torch.randn(2, 3, 8, 6).double()
    theirs = [t.transpose(1, 2) for t in (q, k, v, log_decay, beta)]
    scaled = q * 8**-0.5, k, v, log_decay, beta, state
    for official in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        out, last = official(*theirs, initial_state=state, output_final_state=True)
        for ours in (delta_rule_recurrent, delta_rule_chunked):
            got = ours(*scaled)
            assert largest(got[0], out.transpose(1, 2)) < LIMIT
            assert largest(got[1], last.double()) < LIMIT


@torch.no_grad()
def test_state_does_not_grow():
    layer, state = our_delta(), DeltaNetState()
    held = []
    for length in (500, 1, 1):
        layer(torch.randn(1, length, D), kv_cache=state)
        pairs = state.state, state.columns, *state._before[1].values()
        held.append(sum(t.untyped_storage().nbytes() for t in pairs if t is not None))
    assert held[1] == held[2] == 2 * held[0] == 2 * 4 * (6 * 5 * 7 + 3 * (2 * 10 + 42))


@torch.no_grad()
def test_state_is_float32_in_half():
    layer, x = our_delta(), torch.randn(1, 300, D)
    exact = layer.double()(x.double())[0]
    for dtype, limit in ((torch.float16, 5e-3), (torch.bfloat16, 5e-2)):
        state = DeltaNetState()
        out = [layer.to(dtype)(part, kv_cache=state)[0] for part in x.to(dtype).split(150, dim=1)]
        assert state.state.dtype == torch.float32 and out[0].dtype == dtype
        assert largest(torch.cat(out, dim=1).double(), exact) < limit * exact.abs().max()
    with pytest.raises(TypeError, match=r"kv_cache.*float64.*float32"):
        layer.double()(x.double(), kv_cache=state)


def test_copied_state_goes_its_own_way():
    layer, x, state = our_delta().double(), torch.randn(1, 6, D).double(), DeltaNetState()
    with torch.no_grad():
        layer(x[:, :3], kv_cache=state)
        twins = copy.copy(state), copy.deepcopy(state)
        layer(x[:, :2], kv_cache=state)
        full = layer(x)[0][:, 3:]
        assert all(largest(layer(x[:, 3:], kv_cache=twin)[0], full) < 1e-12 for twin in twins)


@torch.no_grad()
def test_within_float32():
    """The official layers as they are, with their parts in float32: within 5e-6."""
    config = Qwen3NextConfig(**QWEN)
    theirs = spread(qwen.Qwen3NextGatedDeltaNet(config, 0))
    x = torch.randn(2, 30, D).double()
    assert largest(load(our_delta(), delta_weights(theirs))(x)[0], theirs(x)) < 5e-6
    theirs = spread(qwen.Qwen3NextAttention(config, 3))
    cos, sin = tb.build_rope_cache(30, 4)
    hidden = torch.full((30, 30), -math.inf).triu(1)[None, None].double()
    expected = theirs(x, (cos[None].double(), sin[None].double()), hidden)[0]
    out = load(our_gated(), gated_weights(theirs))(x, causal=True, cos=cos, sin=sin)[0]
    assert largest(out, expected) < 5e-6
    theirs = spread(v32.DeepseekV32Attention(v32_config(TOP_K), 0))
    cos, sin = tb.build_rope_cache(30, ROPE)
    expected = theirs(x, (cos[None].double(), sin[None].double()), hidden)[0]
    ours = load(our_indexed(), indexed_weights(theirs))
    assert largest(ours(x, causal=True, cos=cos, sin=sin)[0], expected) < 5e-6
    theirs = spread(v4.DeepseekV4HyperConnection(v4_config(4)))
    ours = load(HyperConnection(D, eps=1e-3, norm_eps=1e-2), connection_weights(theirs))
    streams = torch.randn(2, 5, 4, D).double()
    post, mix, h = theirs(streams)
    expected = post[..., None] * h.sin()[:, :, None] + mix.mT.double() @ streams
    assert largest(ours(streams, torch.sin), expected) < 5e-6


# =============================================================================================
# DeepSeek-V3.2
# =============================================================================================

KV_RANK, Q_RANK, ROPE, NOPE, V_DIM, INDEX_DIM, TOP_K = 20, 24, 6, 10, 9, 14, 5


def half_split(weight: Tensor, width: int, start: int) -> Tensor:
    """Rows start … start + ROPE of each head from pairs (2i, 2i + 1) to halves."""
    stop = start + ROPE
    order = [*range(start), *range(start, stop, 2), *range(start + 1, stop, 2)]
    order += range(stop, width)
    return weight.unflatten(0, (-1, width))[:, order].flatten(0, 1)


def indexed_weights(theirs: nn.Module) -> dict[str, Tensor]:
    indexer = theirs.indexer
    return {
        "attn.q_down.weight": theirs.q_a_proj.weight,
        "attn.q_norm.weight": theirs.q_a_layernorm.weight,
        "attn.q_up.weight": half_split(theirs.q_b_proj.weight, NOPE + ROPE, NOPE),
        "attn.kv_down.weight": half_split(
            theirs.kv_a_proj_with_mqa.weight, KV_RANK + ROPE, KV_RANK
        ),
        "attn.kv_norm.weight": theirs.kv_a_layernorm.weight,
        "attn.kv_up.weight": theirs.kv_b_proj.weight,
        "attn.o_proj.weight": theirs.o_proj.weight,
        "index_q.weight": indexer.wq_b.weight,
        "index_k.weight": indexer.wk.weight,
        "index_norm.weight": indexer.k_norm.weight,
        "index_norm.bias": indexer.k_norm.bias,
        "index_weight.weight": indexer.weights_proj.weight,
    }


def our_indexed(top_k: int = TOP_K) -> IndexedSparseAttention:
    sizes = {"kv_rank": KV_RANK, "rope_dim": ROPE, "nope_dim": NOPE, "v_dim": V_DIM}
    attn = tb.MultiHeadLatentAttention(D, 4, **sizes, q_rank=Q_RANK)
    return IndexedSparseAttention(attn, n_index_heads=8, index_dim=INDEX_DIM, top_k=top_k)


def v32_config(top_k: int) -> DeepseekV32Config:
    return DeepseekV32Config(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=D_FF,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=KV_RANK,
        q_lora_rank=Q_RANK,
        qk_rope_head_dim=ROPE,
        head_dim=ROPE,
        v_head_dim=V_DIM,
        qk_nope_head_dim=NOPE,
        mlp_layer_types=["dense"] * 2,
        index_topk=top_k,
        index_head_dim=INDEX_DIM,
        index_n_heads=8,
        attn_implementation="eager",
    )


@pytest.fixture(scope="module", params=[TOP_K, 100])
def indexed_pair(request) -> tuple[nn.Module, nn.Module]:
    theirs = spread(DeepseekV32ForCausalLM(v32_config(request.param)))
    weights = {
        "embedding.weight": theirs.model.embed_tokens.weight,
        "final_norm.weight": theirs.model.norm.weight,
        "lm_head.weight": theirs.lm_head.weight,
    }
    for number, layer in enumerate(theirs.model.layers):
        own = below("attn", indexed_weights(layer.self_attn)) | {
            "norm1.weight": layer.input_layernorm.weight,
            "norm2.weight": layer.post_attention_layernorm.weight,
            "ffn.gate.weight": layer.mlp.gate_proj.weight,
            "ffn.up.weight": layer.mlp.up_proj.weight,
            "ffn.down.weight": layer.mlp.down_proj.weight,
        }
        weights |= below(f"blocks.{number}", own)

    def make_block(_layer: int) -> nn.Module:
        return tb.ModernDecoderBlock(D, d_ff=D_FF, attn=our_indexed(request.param))

    options = {"make_block": make_block, "max_len": 40, "tie_embeddings": False}
    return theirs, load(tb.DecoderOnlyLM(V, D, 2, **options), weights)


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_deepseek_v32_pass_and_decoding(indexed_pair):
    theirs, ours = indexed_pair
    ids = torch.randint(V, (2, 17))
    expected = theirs(ids).logits
    assert expected.std() > 0.5
    assert largest(ours(ids), expected) < LIMIT
    caches, cache = ours.new_caches(), DynamicCache(config=theirs.config)
    assert [type(c) for c in caches] == [IndexedCache] * 2
    for part in ids.split((3, 5, 1, 1, 6, 1), dim=1):
        step = theirs(part, cache=cache).logits
        assert largest(ours(part, kv_caches=caches), step) < LIMIT


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_deepseek_v32_left_padded(indexed_pair):
    theirs, ours = indexed_pair
    ids = torch.randint(2, V, (3, 9))
    real = torch.arange(9) >= torch.tensor([0, 2, 7])[:, None]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(ids, attention_mask=real.long(), **options)
    tokens = ours.generate(ids, 12, key_padding_mask=real)
    assert torch.equal(tokens, expected)
    for row, start in zip(tokens, (0, 2, 7)):
        assert torch.equal(ours.generate(row[None, start:9], 12)[0], row[start:])


@torch.no_grad()
def test_token_reads_only_chosen_rows(monkeypatch):
    layer, (cos, sin) = our_indexed().double(), tb.build_rope_cache(30, ROPE)
    x, cache, read = torch.randn(2, 30, D).double(), IndexedCache(), []
    run = layer.attn.absorbed
    monkeypatch.setattr(layer.attn, "absorbed", lambda *a: read.append(a[2].shape[2]) or run(*a))
    layer(x[:, :29], causal=True, cos=cos, sin=sin, kv_cache=cache)
    one = layer(x[:, 29:], causal=True, cos=cos, sin=sin, kv_cache=cache)[0]
    assert read == [TOP_K]
    assert largest(one, layer(x, causal=True, cos=cos, sin=sin)[0][:, 29:]) < 1e-12


@torch.no_grad()
def test_packed_documents_through_shell(indexed_pair):
    _, ours = indexed_pair
    ids = torch.randint(V, (1, 14))
    documents = (torch.arange(14) < 6)[:, None] == (torch.arange(14) < 6)
    packed = ours(ids, mask=documents)
    assert largest(packed[:, :6], ours(ids[:, :6])) < 1e-6
    assert largest(packed[:, 6:], ours(ids[:, 6:])) < 1e-6  # tables are float32: other positions


# =============================================================================================
# DeepSeek-V4
# =============================================================================================


def v4_config(n_streams: int, n_rounds: int = 20) -> DeepseekV4Config:
    sizes = {"num_hidden_layers": 1, "head_dim": 16, "num_attention_heads": 2, "hidden_size": D}
    sizes |= {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"o_groups": 1, "o_lora_rank": 8, "q_lora_rank": 8, "index_n_heads": 2}
    streams = {"hc_mult": n_streams, "hc_sinkhorn_iters": n_rounds, "hc_eps": 1e-3}
    return DeepseekV4Config(**sizes, **streams, rms_norm_eps=1e-2, vocab_size=V)


def connection_weights(theirs: nn.Module) -> dict[str, Tensor]:
    return {"proj.weight": theirs.fn, "bias": theirs.base, "scale": theirs.scale}


@torch.no_grad()
@pytest.mark.parametrize(("n_streams", "n_rounds"), [(4, 20), (3, 1), (2, 2)])
@pytest.mark.usefixtures("wide")
def test_hyper_connection_equals_theirs(n_streams, n_rounds):
    theirs = spread(v4.DeepseekV4HyperConnection(v4_config(n_streams, n_rounds)))
    options = {"n_rounds": n_rounds, "eps": 1e-3, "norm_eps": 1e-2}
    ours = load(HyperConnection(D, n_streams, **options), connection_weights(theirs))
    streams = torch.randn(2, 5, n_streams, D).double()
    post, mix, collapsed = theirs(streams)
    seen = []
    out = ours(streams, lambda h: seen.append(h) or h.sin())
    expected = post[..., None] * collapsed.sin()[:, :, None] + mix.mT.double() @ streams
    assert largest(seen[0], collapsed) < LIMIT and largest(out, expected) < LIMIT


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_collapse_equals_theirs():
    theirs = spread(v4.DeepseekV4HyperHead(v4_config(4)))
    weights = {"proj.weight": theirs.hc_fn, "bias": theirs.hc_base, "scale": theirs.hc_scale}
    ours = load(StreamCollapse(D, eps=1e-3, norm_eps=1e-2), weights)
    streams = torch.randn(2, 5, 4, D).double()
    assert largest(ours(streams), theirs(streams)) < LIMIT


class Plugged(nn.Module):
    """One of our sublayers in the place of one of V4's own."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x: Tensor, **_: object) -> object:
        return self.run(x)


@torch.no_grad()
@pytest.mark.usefixtures("wide")
def test_streams_wired_as_theirs():
    theirs = v4.DeepseekV4DecoderLayer(v4_config(4), 0)
    attn, ffn = tb.MultiHeadAttention(D, 4, 2, rope=True), tb.GatedFFN(D, D_FF)
    cos, sin = tb.build_rope_cache(6, 8)
    theirs.self_attn, theirs.mlp = nn.Module(), nn.Module()
    spread(theirs), attn.double(), ffn.double()
    theirs.self_attn = Plugged(lambda x: attn(x, causal=True, cos=cos, sin=sin))
    theirs.mlp = Plugged(ffn)
    ours = HyperConnectedBlock(D, attn=attn, ffn=ffn, eps=1e-2).double()
    for name, part in (("attn_hc", ours.attn_streams), ("ffn_hc", ours.ffn_streams)):
        part.eps, part.norm_eps = 1e-3, 1e-2
        load(part, connection_weights(getattr(theirs, name)))
    ours.norm1.weight = theirs.input_layernorm.weight
    ours.norm2.weight = theirs.post_attention_layernorm.weight
    streams = torch.randn(2, 6, 4, D).double()
    assert largest(ours(streams, cos, sin), theirs(streams)) < LIMIT


@torch.no_grad()
def test_streams_stay_bounded():
    """A product of doubly stochastic matrices is one: no sublayer, a thousand layers."""
    layer = HyperConnection(8).double()
    nn.init.normal_(layer.bias, std=3)
    start = streams = torch.randn(1, 1, 4, 8).double()
    for _ in range(1000):
        streams = layer(streams, torch.zeros_like)
    assert 0.9 < streams.mean(2).norm() / start.mean(2).norm() < 1.1


# =============================================================================================
# In the script's shell, compiled, on other paths
# =============================================================================================


def hybrid() -> tb.DecoderOnlyLM:
    def make_block(layer: int) -> nn.Module:
        return tb.ModernDecoderBlock(D, d_ff=D_FF, attn=our_gated() if layer == 3 else our_delta())

    torch.manual_seed(1)
    return tb.DecoderOnlyLM(V, D, 4, rope_dim=4, make_block=make_block, max_len=64)


def test_hybrid_learns():
    model = hybrid()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(V, (1, 6)).repeat(4, 5)
    losses = []
    for _ in range(12):
        loss = tb.next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(V)) < 0.2 and losses[-1] < 0.5 * losses[0]


def test_hybrid_refuses_truncate():
    model, ids = hybrid(), torch.randint(V, (1, 8))
    holes = torch.ones(8, 8, dtype=torch.bool)
    holes[5, 2] = False
    with pytest.raises(ValueError, match="mask must be causal within documents"):
        model(ids, mask=holes)
    model.windows[0] = 4
    with pytest.raises(ValueError, match="mask must be causal within documents"):
        model(ids)
    with pytest.raises(TypeError, match="DeltaNetState"):
        hybrid()(ids, kv_caches=[tb.KVCache() for _ in range(4)])


@torch.no_grad()
@pytest.mark.parametrize("make", [our_gated, our_delta, our_indexed])
def test_layers_are_one_graph(make):
    layer, x = make(), torch.randn(1, 7, D)
    cos, sin = tb.build_rope_cache(8, 16 if make is our_gated else ROPE)
    given = {"causal": True, "cos": cos, "sin": sin}
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    full, cache = layer(x, **given)[0], getattr(layer, "new_cache", tb.KVCache)()
    torch.testing.assert_close(compiled(x, **given)[0], full)
    steps = [compiled(part, kv_cache=cache, **given)[0] for part in x.split((5, 1, 1), dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), full)


@pytest.mark.parametrize("B_T", [(0, 5), (3, 0), (1, 1)])
def test_empty_and_single_inputs(B_T):
    model = hybrid()
    out = model(torch.zeros(B_T, dtype=torch.long), kv_caches=model.new_caches())
    assert out.shape == (*B_T, V)


# =============================================================================================
# Planted faults: the file's own proofs must turn FAIL
# =============================================================================================

FAULTS = read_faults(after_2025.__file__)


def test_each_operator_has_ten_faults():
    places = [fault.place for fault in FAULTS]
    names = "OutputGatedAttention", "GatedDeltaNet", "IndexedSparseAttention", "HyperConnection"
    assert all(places.count(name) >= 10 for name in names)


def test_proofs_hold_without_a_fault():
    same = "HyperConnection", "n_streams**2  #", "n_streams * n_streams  #"
    assert proofs_hold(faulty(after_2025.__file__, *same), "A04")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_turns_a_proof(fault):
    module = faulty(after_2025.__file__, fault.place, fault.old, fault.new)
    assert not proofs_hold(module, fault.proof)
