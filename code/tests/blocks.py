"""One small block of each kind, for the tests that go through all of them."""

import torch
import transformer_block as tb
from torch import Tensor, nn

D, D_FF, V, MAX_LEN = 12, 10, 23, 40
COS, SIN = tb.build_rope_cache(MAX_LEN, 4)  # all rotated heads are 4 wide
LATENT = {"kv_rank": 5, "rope_dim": 4, "nope_dim": 3, "v_dim": 2}


def attention(H: int = 4, G: int = 2, **options) -> tb.MultiHeadAttention:
    """Rotated, with heads of 4."""
    return tb.MultiHeadAttention(D, H, G, head_dim=4, rope=True, **options)


def latent(H: int = 4, **options) -> tb.MultiHeadLatentAttention:
    return tb.MultiHeadLatentAttention(D, H, **LATENT | options)


# From the numbers of query and KV heads, a block with every kind of sublayer once.
DECODERS = {
    "gpt2": lambda H, G: tb.GPT2StyleDecoderLayer(D, H, D_FF),
    "modern": lambda H, G: tb.ModernDecoderBlock(D, d_ff=D_FF, attn=attention(H, G)),
    "modern fused": lambda H, G: tb.ModernDecoderBlock(
        D, d_ff=D_FF, attn=attention(H, G, attend=tb.attend_fused, qk_norm=True)
    ),
    "modern mla": lambda H, G: tb.ModernDecoderBlock(D, d_ff=D_FF, attn=latent(H)),
    "modern mla moe": lambda H, G: tb.ModernDecoderBlock(
        D, attn=latent(H, q_rank=7), ffn=tb.MoEFFN(D, D_FF)
    ),
    "parallel": lambda H, G: tb.ParallelDecoderBlock(D, H, G, D_FF),
    "parallel rotated": lambda H, G: tb.ParallelDecoderBlock(
        D, d_ff=D_FF, shared_norm=False, attn=attention(H, G, bias=True)
    ),
    "branch norm": lambda H, G: tb.BranchNormDecoderBlock(
        D, d_ff=D_FF, attn=attention(H, G, logit_softcap=2.0, scale=0.7)
    ),
}

LAYERS_2017 = {
    "encoder": lambda: tb.VanillaEncoderLayer2017(D, 4, D_FF),
    "seq2seq": lambda: tb.VanillaSeq2SeqDecoderLayer2017(D, 4, D_FF),
}


def randomised(module: nn.Module, std: float = 0.5) -> nn.Module:
    """The module in float64, every parameter drawn anew: fresh norms are 1, fresh biases 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std)
    return module.double()


def decoder(kind: str, H: int = 4, G: int = 2) -> nn.Module:
    return randomised(DECODERS[kind](H, G))


def run(block: nn.Module, x: Tensor, **options) -> Tensor:
    """The block's output, with the tables where it takes some."""
    if not isinstance(block, tb.GPT2StyleDecoderLayer):
        options |= {"cos": COS, "sin": SIN}
    return block(x, **options)


def language_model(**options) -> tb.DecoderOnlyLM:
    """Two default blocks with three query heads and one KV head."""
    torch.manual_seed(1)
    return randomised(tb.DecoderOnlyLM(V, D, 2, 3, 1, D_FF, max_len=MAX_LEN, **options))
