"""Faults to plant in the script: what each changes, what one would see, which demos turn FAIL.

python3 code/notes/planted_faults.py              the table of the notes, measured
python3 code/notes/planted_faults.py NAME ...     the change a fault makes, and what the demos say
python3 code/notes/planted_faults.py --list       the names, and what one would see
"""

import argparse
import ast
import difflib
import functools
import itertools
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

SCRIPT = Path(__file__).resolve().parents[1] / "transformer_block.py"
NOTES = SCRIPT.parents[1] / "transformer_block_tutorial.md"
TABLE = re.compile(r"(?<=<!-- faults -->\n\n).*?(?=\n\n<!-- /faults -->)", re.S)
CLASSICS_TABLE = re.compile(r"(?<=<!-- classics -->\n\n).*?(?=\n\n<!-- /classics -->)", re.S)


class Fault(NamedTuple):
    """In the definition at place (Class.method or function), old becomes new."""

    name: str
    place: str
    old: str
    new: str
    symptom: str


WIRING = [
    Fault(
        "residual-from-norm",
        "ModernDecoderBlock.forward",
        "x = x + self.attn(self.norm1(x), **seen, **at)[0]",
        "x = self.norm1(x)\n        x = x + self.attn(x, **seen, **at)[0]",
        "the skip path carries the normed x; zeroed sublayers no longer give x",
    ),
    Fault(
        "norm-after-the-add",
        "GPT2StyleDecoderLayer.forward",
        "x + self.attn(self.norm1(x), kv_cache=kv_cache, **seen)[0]",
        "self.norm1(x + self.attn(x, kv_cache=kv_cache, **seen)[0])",
        "zeroed sublayers give a normed x; the stream is normed in every layer",
    ),
    Fault(
        "one-norm-used-twice",
        "ModernDecoderBlock.forward",
        "self.ffn(self.norm2(x))",
        "self.ffn(self.norm1(x))",
        "nothing with fresh weights; norm2 never gets a gradient",
    ),
    Fault(
        "norms-swapped",
        "BranchNormDecoderBlock.forward",
        "self.attn_post_norm(self.attn(self.attn_pre_norm(x)",
        "self.attn_pre_norm(self.attn(self.attn_post_norm(x)",
        "nothing with fresh weights; a loaded checkpoint gives garbage",
    ),
    Fault(
        "norm-missing",
        "GPT2StyleDecoderLayer.forward",
        "self.ffn(self.norm2(x))",
        "self.ffn(x)",
        "the FFN reads ever larger numbers with depth",
    ),
    Fault(
        "post-norm-on-the-stream",
        "BranchNormDecoderBlock.forward",
        "x + self.attn_post_norm(self.attn(self.attn_pre_norm(x), **seen, **at)[0])",
        "self.attn_post_norm(x + self.attn(self.attn_pre_norm(x), **seen, **at)[0])",
        "zeroed sublayers give a normed x instead of x",
    ),
    Fault(
        "serial-made-parallel",
        "ModernDecoderBlock.forward",
        "x = x + self.attn(self.norm1(x), **seen, **at)[0]\n"
        "        return x + self.ffn(self.norm2(x))",
        "y = self.attn(self.norm1(x), **seen, **at)[0]\n"
        "        return x + y + self.ffn(self.norm2(x))",
        "the FFN does not see what attention wrote",
    ),
    Fault(
        "parallel-made-serial",
        "ParallelDecoderBlock.forward",
        "return x + self.attn(h, **seen, **at)[0] + self.ffn(h_ffn)",
        "x = x + self.attn(h, **seen, **at)[0]\n"
        "        return x + self.ffn((self.ffn_norm or self.norm)(x))",
        "the branches no longer add up; GPT-J weights give garbage",
    ),
    Fault(
        "ffn-dropped",
        "VanillaSeq2SeqDecoderLayer2017.forward",
        "self.ln3(x + self.ffn(x))",
        "self.ln3(x)",
        "shapes stay right; half of the weights get no gradient",
    ),
]

MASKS = [
    Fault(
        "cross-attention-reads-x",
        "VanillaSeq2SeqDecoderLayer2017.forward",
        "self.cross_attn(x, memory,",
        "self.cross_attn(x, x,",
        "the output does not depend on memory; the future leaks in",
    ),
    Fault(
        "cross-attention-causal",
        "VanillaSeq2SeqDecoderLayer2017.forward",
        "self.cross_attn(x, memory,",
        "self.cross_attn(x, memory, mask=x.new_ones(x.shape[1], S).tril() > 0,",
        "the first token reads one memory position, not all",
    ),
    Fault(
        "memory-padding-ignored",
        "VanillaSeq2SeqDecoderLayer2017.forward",
        ", key_padding_mask=memory_key_padding_mask",
        "",
        "the output moves with the content of padded memory",
    ),
    Fault(
        "seq2seq-not-causal",
        "VanillaSeq2SeqDecoderLayer2017.forward",
        '"causal": mask is None',
        '"causal": False',
        "training loss far too good, then nonsense when decoding",
    ),
    Fault(
        "causal-mask-inverted",
        "without_later_keys",
        "k_positions <= q_positions[:, None]",
        "k_positions >= q_positions[:, None]",
        "every position sees itself and the future",
    ),
    Fault(
        "causal-mask-top-left",
        "without_later_keys",
        "torch.arange(start, S, device=device) for start in (S - T, 0)",
        "torch.arange(n, device=device) for n in (T, S)",
        "with a cache the new tokens see the start of the history only",
    ),
    Fault(
        "causal-skipped-with-cache",
        "GPT2StyleDecoderLayer.forward",
        '"causal": mask is None',
        '"causal": mask is None and kv_cache is None',
        "one-token steps are right, a prefill leaks the future",
    ),
    Fault(
        "padding-ignored",
        "MultiHeadAttention.combined_mask",
        "return padding if mask is None else mask & padding",
        "return mask",
        "the content of padding moves real rows",
    ),
    Fault(
        "padding-inverted",
        "MultiHeadAttention.combined_mask",
        "padding = key_padding_mask",
        "padding = ~key_padding_mask",
        "real tokens attend to padding only",
    ),
    Fault(
        "padding-on-the-query-axis",
        "MultiHeadAttention.combined_mask",
        "key_padding_mask[:, None, None]",
        "key_padding_mask[:, None, -T:, None]",
        "padded rows turn to zero, real rows still read padding",
    ),
    Fault(
        "mask-dropped-with-padding",
        "MultiHeadAttention.combined_mask",
        "return padding if mask is None else mask & padding",
        "return padding",
        "the future leaks, but only in padded batches",
    ),
    Fault(
        "masks-joined-by-or",
        "MultiHeadAttention.combined_mask",
        "mask & padding",
        "mask | padding",
        "every real key is visible, later ones too",
    ),
    Fault(
        "window-off-by-one",
        "build_causal_mask",
        "(distance < window)",
        "(distance <= window)",
        "rows of W + 1 keys: self plus W earlier ones",
    ),
    Fault(
        "window-ignored",
        "DecoderOnlyLM.forward",
        "build_causal_mask(positions[start:], positions, window)",
        "build_causal_mask(positions[start:], positions)",
        "local layers see everything; short prompts hide it",
    ),
]

ATTENTION = [
    Fault(
        "groups-tiled",
        "attend",
        "    (B, H, T, head_dim), (G, S) = q.shape, k.shape[1:3]",
        "    k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))\n"
        "    (B, H, T, head_dim), (G, S) = q.shape, k.shape[1:3]",
        "query head i reads KV head i mod G; right for G = H and for G = 1",
    ),
    Fault(
        "scale-by-d-model",
        "attend",
        "head_dim**-0.5 if",
        "(H * head_dim) ** -0.5 if",
        "attention too flat by a factor √H in the scores",
    ),
    Fault(
        "scale-dropped",
        "attend",
        "(q * scale)",
        "q",
        "attention too sharp, the more so the wider the heads",
    ),
    Fault(
        "scale-applied-twice",
        "attend",
        "q @ k.mT",
        "scale * q @ k.mT",
        "attention too flat; the explicit and the fused path disagree",
    ),
    Fault(
        "scaled-after-the-product",
        "attend",
        "(q * scale).reshape(B, G, H // G * T, head_dim)  # (B, G, H/G*T, head_dim)\n"
        "    scores = q @ k.mT if T > 1 else (k @ q.mT).mT.contiguous()  # (B, G, H/G*T, S)\n",
        "q.reshape(B, G, H // G * T, head_dim)\n    scores = q @ k.mT * scale\n",
        "equal in float32; float16 scores overflow",
    ),
    Fault(
        "softmax-over-queries",
        "attend",
        "scores.softmax(dim=-1)",
        "scores.softmax(dim=-2)",
        "the weights of a query do not sum to one; queries feel each other",
    ),
    Fault(
        "mask-after-softmax",
        "attend",
        "        scores = scores.view(B, H, T, S).masked_fill(blocked, -math.inf).view_as(scores)\n"
        "    out = scores.softmax(dim=-1)",
        "    weights = scores.softmax(dim=-1)\n"
        "    if keep is not None:\n"
        "        weights = weights.view(B, H, T, S).masked_fill(blocked, 0).view_as(weights)\n"
        "    out = weights",
        "the weights of early queries sum to less than one",
    ),
    Fault(
        "mask-added-to-scores",
        "attend",
        "scores.view(B, H, T, S).masked_fill(blocked, -math.inf)",
        "(scores.view(B, H, T, S) + keep)",
        "allowed keys gain 1 in the score, forbidden ones are still read",
    ),
    Fault(
        "soft-cap-after-the-mask",
        "attend",
        "masked_fill(blocked, -math.inf)",
        "masked_fill(blocked, -(logit_softcap or math.inf))",
        "forbidden keys get the score -c instead of -inf: a small leak",
    ),
    Fault(
        "soft-cap-not-passed-on",
        "MultiHeadAttention.forward",
        ', "logit_softcap": self.logit_softcap',
        "",
        "the output is the same for any cap",
    ),
    Fault(
        "soft-cap-in-half",
        "attend",
        "    scores = scores.float() if q.dtype in (torch.float16, torch.bfloat16) else scores\n",
        "",
        "half precision rounds capped scores twice; equal in float32 and without a cap",
    ),
    Fault(
        "dead-rows-nan-gradient",
        "attend",
        "blocked = alive & ~keep",
        "blocked = ~keep",
        "the forward is right, gradients are NaN",
    ),
    Fault(
        "dead-rows-see-all",
        "attend",
        "out if keep is None else out.masked_fill(~alive, 0)",
        "out",
        "a row that may attend to nothing averages what is forbidden",
    ),
    Fault(
        "heads-merged-unturned",
        "MultiHeadAttention.forward",
        "out.transpose(1, 2).flatten(2)",
        "out.reshape(B, T, q.shape[1] * self.head_dim)",
        "right shape, tokens and heads mixed up",
    ),
    Fault(
        "query-bias-missing",
        "MultiHeadAttention.__init__",
        "nn.Linear(d_model, n_q_heads * head_dim, bias=qkv_bias)",
        "nn.Linear(d_model, n_q_heads * head_dim, bias=bias)",
        "Qwen2 weights do not load: q has no bias, k and v have",
    ),
    Fault(
        "qk-norm-eps-ignored",
        "MultiHeadAttention.__init__",
        "self.k_norm = RMSNorm(head_dim, norm_eps)",
        "self.k_norm = RMSNorm(head_dim)",
        "right for the default eps only",
    ),
    Fault(
        "qk-norm-after-rotation",
        "MultiHeadAttention.forward",
        "        q = q if self.q_norm is None else self.q_norm(q)\n"
        "        k = k if self.k_norm is None else self.k_norm(k)\n"
        "        v = self.split_heads(self.v_proj(source), self.head_dim)  # (B, G, S, head_dim)\n"
        "        if self.rope:\n"
        "            cos, sin = self.table_rows(cos, sin, start, T)\n"
        "            turned = apply_rope(torch.cat((q, k), dim=1), cos, sin)"
        "  # (B, H+G, T, head_dim)\n"
        "            q, k = turned.split((q.shape[1], k.shape[1]), dim=1)\n",
        "        v = self.split_heads(self.v_proj(source), self.head_dim)\n"
        "        if self.rope:\n"
        "            cos, sin = self.table_rows(cos, sin, start, T)\n"
        "            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)\n"
        "        q = q if self.q_norm is None else self.q_norm(q)\n"
        "        k = k if self.k_norm is None else self.k_norm(k)\n",
        "nothing with fresh weights; trained ones do not commute with it",
    ),
    Fault(
        "fused-scale-dropped",
        "attend_fused",
        "is_causal=is_causal, scale=scale,",
        "is_causal=is_causal,",
        "the two paths disagree for any scale but the default",
    ),
    Fault(
        "rotated-memory-allowed",
        "MultiHeadAttention.forward",
        "if self.rope or kv_cache is not None:",
        "if kv_cache is not None:",
        "memory keys turn by positions of another sequence, without an error",
    ),
    Fault(
        "head-width-cut-down",
        "MultiHeadAttention.__init__",
        "if head_dim is None and d_model % n_q_heads:",
        "if head_dim is None and d_model < n_q_heads:",
        "d_model=10 with 4 heads becomes a width of 8, without an error",
    ),
]

POSITIONS = [
    Fault(
        "rotation-sign",
        "apply_rope",
        "(-second, first)",
        "(second, -first)",
        "trains as well, because all turn alike; loaded weights give garbage",
    ),
    Fault(
        "rotation-interleaved",
        "apply_rope",
        "    turned = (turning * cos + torch.cat((-second, first), dim=-1) * sin)",
        "    cos, sin = (t[:, : r // 2].repeat_interleave(2, dim=1) for t in (cos, sin))\n"
        "    first, second = turning[..., ::2], turning[..., 1::2]\n"
        "    turned = turning * cos + torch.stack((-second, first), dim=-1).flatten(-2) * sin\n"
        "    turned = turned",
        "trains well; half-split weights give garbage after a few tokens",
    ),
    Fault(
        "rotation-widens-dtype",
        "apply_rope",
        " * sin).to(x.dtype)",
        " * sin)",
        "a half-precision model gets float32 queries and keys",
    ),
    Fault(
        "rope-base-ignored",
        "build_rope_cache",
        "base**-exponents",
        "10000.0**-exponents",
        "right for the default base only",
    ),
    Fault(
        "rope-tables-in-bfloat16",
        "build_rope_cache",
        "torch.outer(positions, base**-exponents)",
        "torch.outer(positions, base**-exponents).bfloat16()",
        "angles wrong from position 257 on; quality falls with length",
    ),
    Fault(
        "values-rotated",
        "MultiHeadAttention.forward",
        "q, k = turned.split((q.shape[1], k.shape[1]), dim=1)",
        "q, k = turned.split((q.shape[1], k.shape[1]), dim=1)\n"
        "            v = apply_rope(v, cos, sin)",
        "what is read depends on absolute position",
    ),
    Fault(
        "query-not-rotated",
        "MultiHeadAttention.forward",
        "q, k = turned.split((q.shape[1], k.shape[1]), dim=1)",
        "k = turned[:, q.shape[1] :]",
        "scores depend on the key's position, not on the distance",
    ),
    Fault(
        "keys-rotated-twice",
        "MultiHeadAttention.forward",
        "            cos, sin = self.table_rows(cos, sin, start, T)\n"
        "            turned = apply_rope(torch.cat((q, k), dim=1), cos, sin)"
        "  # (B, H+G, T, head_dim)\n"
        "            q, k = turned.split((q.shape[1], k.shape[1]), dim=1)\n"
        "        if kv_cache is not None:\n"
        "            k, v = kv_cache.append(k, v)\n",
        "            tables = cos, sin\n"
        "            cos, sin = self.table_rows(cos, sin, start, T)\n"
        "            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)\n"
        "        if kv_cache is not None:\n"
        "            k, v = kv_cache.append(k, v)\n"
        "            if self.rope:\n"
        "                k = apply_rope(k, *self.table_rows(*tables, 0, k.shape[2]))\n",
        "cached decoding differs from the full pass",
    ),
    Fault(
        "position-restarts",
        "MultiHeadAttention.forward",
        "self.table_rows(cos, sin, start, T)",
        "self.table_rows(cos, sin, 0, T)",
        "a full pass is right, every later chunk starts at position 0",
    ),
    Fault(
        "position-after-the-append",
        "MultiHeadAttention.forward",
        "            cos, sin = self.table_rows(cos, sin, start, T)\n"
        "            turned = apply_rope(torch.cat((q, k), dim=1), cos, sin)"
        "  # (B, H+G, T, head_dim)\n"
        "            q, k = turned.split((q.shape[1], k.shape[1]), dim=1)\n"
        "        if kv_cache is not None:\n"
        "            k, v = kv_cache.append(k, v)\n",
        "            k = apply_rope(k, *self.table_rows(cos, sin, start, T))\n"
        "        if kv_cache is not None:\n"
        "            k, v = kv_cache.append(k, v)\n"
        "            start = kv_cache.next_pos\n"
        "        q = apply_rope(q, *self.table_rows(cos, sin, start, T)) if self.rope else q\n",
        "with a cache queries turn T positions too far",
    ),
    Fault(
        "sinusoids-swapped",
        "sinusoidal_positions",
        "angles.sin(), angles.cos()",
        "angles.cos(), angles.sin()",
        "cosines on even channels; trains, but no weights fit",
    ),
]

CACHE = [
    Fault(
        "cache-filled-after-widening",
        "MultiHeadAttention.forward",
        "k, v = kv_cache.append(k, v)",
        "k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))\n"
        "            k, v = kv_cache.append(k, v)",
        "outputs are right, the cache holds H heads instead of G",
    ),
    Fault(
        "cache-overwrites",
        "KVCache.append",
        "            self._k[:, :, start:end] = k_new\n"
        "            self._v[:, :, start:end] = v_new",
        "            self._k[:, :, start:end] = self._k[:, :, :T] = k_new\n"
        "            self._v[:, :, start:end] = self._v[:, :, :T] = v_new",
        "each step writes over the oldest keys as well",
    ),
    Fault(
        "cache-truncates-late",
        "KVCache.truncate",
        "self.next_pos = length",
        "self.next_pos = length + 1",
        "one rejected token stays after a roll-back",
    ),
    Fault(
        "cache-reset-keeps-counter",
        "KVCache.reset",
        "        self.next_pos = 0\n"
        "        if self.max_len is None:\n"
        "            self._k = self._v = self._writable = None",
        "        self._k, self._v = torch.zeros_like(self._k), torch.zeros_like(self._v)",
        "the second prompt attends to a row of zeros for each old token",
    ),
    Fault(
        "cache-keeps-refused-call",
        "DecoderOnlyLM.forward",
        "            for cache in kv_caches:\n                cache.truncate(start)\n",
        "",
        "after a caught error the cache is longer than the text",
    ),
    Fault(
        "start-pos-not-checked",
        "MultiHeadAttention.start_position",
        "if kv_cache is not None and start_pos != start:",
        "if kv_cache is not None and start_pos > start:",
        "keys land at positions that are taken, without an error",
    ),
]

LATENT_ATTENTION = [
    Fault(
        "mla-latent-not-normed",
        "MultiHeadLatentAttention.forward",
        "self.kv_norm(latent)",
        "latent",
        "trains less stably; loaded weights give garbage",
    ),
    Fault(
        "mla-latent-rotated",
        "MultiHeadLatentAttention.forward",
        "k_rope = apply_rope(k_rope, cos, sin)",
        "latent, k_rope = (apply_rope(t, cos, sin) for t in (latent, k_rope))",
        "a position inside the latent: kv_up cannot be absorbed any more",
    ),
    Fault(
        "mla-absorbed-split",
        "MultiHeadLatentAttention.absorbed",
        "k_up, v_up = up.split((self.nope_dim, self.v_dim), dim=1)",
        "v_up, k_up = up.split((self.v_dim, self.nope_dim), dim=1)",
        "prefill is right, decoding is not",
    ),
    Fault(
        "mla-scale-without-rope",
        "MultiHeadLatentAttention.__init__",
        "(nope_dim + rope_dim) ** -0.5",
        "nope_dim**-0.5",
        "attention too sharp: the rotated channels are left out of the width",
    ),
    Fault(
        "mla-absorbed-scaled-twice",
        "MultiHeadLatentAttention.absorbed",
        ", scale=1.0",
        "",
        "prefill is right, decoding is too flat",
    ),
]

NORM_AND_FFN = [
    Fault(
        "rms-norm-centred",
        "RMSNorm.forward",
        "        normed =",
        "        wide = wide - wide.mean(dim=-1, keepdim=True)\n        normed =",
        "it is LayerNorm without a bias; a constant vector gives 0",
    ),
    Fault(
        "rms-eps-outside-the-root",
        "RMSNorm.forward",
        "torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)",
        "1 / (wide.square().mean(dim=-1, keepdim=True).sqrt() + self.eps)",
        "equal for large x; small activations come out too large",
    ),
    Fault(
        "rms-squares-in-half",
        "RMSNorm.forward",
        "wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
        "wide = x",
        "float16 values over 255 give zeros",
    ),
    Fault(
        "rms-one-plus-weight",
        "RMSNorm.forward",
        "normed * self.weight",
        "normed * (1 + self.weight)",
        "everything twice as large with fresh weights",
    ),
    Fault(
        "eps-not-passed-on",
        "ModernDecoderBlock.__init__",
        "self.norm2 = RMSNorm(d_model, eps)",
        "self.norm2 = RMSNorm(d_model)",
        "right for the default eps only",
    ),
    Fault(
        "swiglu-branches-swapped",
        "GatedFFN.forward",
        "self.act(self.gate(x)) * self.up(x)",
        "self.act(self.up(x)) * self.gate(x)",
        "trains as well; loaded weights give garbage",
    ),
    Fault(
        "swiglu-over-the-product",
        "GatedFFN.forward",
        "self.act(self.gate(x)) * self.up(x)",
        "self.act(self.gate(x) * self.up(x))",
        "no branch stays linear; no error anywhere",
    ),
    Fault(
        "swiglu-without-up",
        "GatedFFN.forward",
        "self.act(self.gate(x)) * self.up(x)",
        "self.act(self.gate(x))",
        "a plain SiLU FFN; up gets no gradient",
    ),
    Fault(
        "gelu-tanh",
        "DenseFFN.forward",
        "self.act(self.up(x))",
        'F.gelu(self.up(x), approximate="tanh") if self.act is F.gelu else self.act(self.up(x))',
        "off in the fourth decimal of each layer",
    ),
]

EXPERTS = [
    Fault(
        "moe-renormalised",
        "MoEFFN.forward",
        "weight, expert = probs.max(dim=1)",
        "weight, expert = probs.max(dim=1)\n        weight = weight / weight",
        "the weight is always 1, the router never learns",
    ),
    Fault(
        "moe-weight-on-the-input",
        "MoEFFN.forward",
        "pieces = tokens.index_select(0, order).split(sizes)",
        "pieces = (weight[:, None] * tokens).to(x.dtype).index_select(0, order).split(sizes)\n"
        "        weight = torch.ones_like(weight)",
        "the probability goes through the expert's activation",
    ),
    Fault(
        "moe-tokens-not-sorted",
        "MoEFFN.forward",
        "expert.argsort()",
        "torch.arange(len(tokens), device=x.device)",
        "right counts, tokens at experts that they did not choose",
    ),
    Fault(
        "moe-idle-experts-skipped",
        "MoEFFN.forward",
        "zip(self.experts, pieces)]",
        "zip(self.experts, pieces) if len(piece)]",
        "no gradient where no token went: ranks whose tokens route apart disagree",
    ),
    Fault(
        "balance-constant",
        "balance_loss",
        "mean = (scores / (scores.sum(dim=1, keepdim=True) + 1e-20)).sum(dim=0)",
        "mean = scores.sum() / scores.sum(dim=1).add(1e-20).sum() * len(scores) / len(counts)",
        "averaged over experts too: always 1, no gradient into the router",
    ),
    Fault(
        "balance-counts-top-k-as-tokens",
        "balance_loss",
        "counts.sum().clamp(min=1)",
        "max(len(scores), 1)",
        "k times too large for k choices a token; right for top-1",
    ),
    Fault(
        "router-weights-sum-below-one",
        "SoftmaxRouter.forward",
        "weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)",
        "pass",
        "Mixtral's and Qwen3's FFNs come out too small, most where the router hesitates",
    ),
    Fault(
        "router-renormalised-over-all",
        "SoftmaxRouter.forward",
        "weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)",
        "weights = weights / (scores.sum(dim=1, keepdim=True) + 1e-20)",
        "nothing for a softmax, which sums to 1 already; sigmoid weights shrink",
    ),
    Fault(
        "router-scale-lost",
        "SoftmaxRouter.forward",
        "(self.scale * weights).to(",
        "weights.to(",
        "DeepSeek's routed experts 16 or 2.5 times too small beside the shared one",
    ),
    Fault(
        "router-in-half",
        "SoftmaxRouter.forward",
        "logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits",
        "logits",
        "scores rounded to 8 bits: near ties go to other experts",
    ),
    Fault(
        "groups-ignored",
        "SoftmaxRouter.best_experts",
        "masked_fill(shut[:, :, None], -math.inf)",
        "masked_fill(shut[:, :, None] & False, -math.inf)",
        "a token's experts lie in more groups than it may reach",
    ),
    Fault(
        "groups-shut-with-zero",
        "SoftmaxRouter.best_experts",
        "masked_fill(shut[:, :, None], -math.inf)",
        "masked_fill(shut[:, :, None], 0.0)",
        "a shut expert at 0 beats an open one whose selection bias is negative",
    ),
    Fault(
        "groups-by-their-mean",
        "SoftmaxRouter.best_experts",
        "groups.topk(min(group_best, groups.shape[2])).values.sum(dim=2)",
        "groups.mean(dim=2)",
        "a group with one outstanding expert loses to an even one",
    ),
    Fault(
        "group-scored-by-its-best",
        "SigmoidRouter.choose",
        "group_best=2",
        "group_best=1",
        "DeepSeek-V2's rule in V3: other groups where the runner-up decides",
    ),
    Fault(
        "selection-bias-in-the-weight",
        "SigmoidRouter.choose",
        "return scores, self.best_experts(ranked, group_best=2)",
        "return ranked, self.best_experts(ranked, group_best=2)",
        "balancing the load changes what the experts add, also a negative weight",
    ),
    Fault(
        "selection-bias-unused",
        "SigmoidRouter.choose",
        "scores if self.selection_bias is None else scores + self.selection_bias",
        "scores",
        "nothing before training moves it; then crowded experts stay crowded",
    ),
    Fault(
        "sigmoid-router-softmaxes",
        "SigmoidRouter.choose",
        "logits.sigmoid()",
        "logits.softmax(dim=1)",
        "the same order, so only the weights differ, and choices under a bias",
    ),
    Fault(
        "mixture-weight-on-the-wrong-side",
        "MixtureFFN.forward",
        "if self.weigh_input else share * ffn(given)",
        "if not self.weigh_input else share * ffn(given)",
        "Mixtral as Llama-4 and the other way round: an expert is not linear in its input",
    ),
    Fault(
        "mixture-input-not-weighed",
        "MixtureFFN.__init__",
        "self.weigh_input = weigh_input",
        "self.weigh_input = False",
        "Llama-4 as Mixtral with a sigmoid: an expert is not linear in its input",
    ),
    Fault(
        "mixture-weights-not-sorted",
        "MixtureFFN.forward",
        "weights.flatten()[order, None].split(sizes)",
        "weights.flatten()[:, None].split(sizes)",
        "experts weighted by what other tokens gave them",
    ),
    Fault(
        "mixture-tokens-repeated-in-blocks",
        "MixtureFFN.forward",
        "(order // chosen.shape[1])",
        "(order % len(tokens))",
        "the right number of rows, of other tokens; right for top-1",
    ),
    Fault(
        "mixture-keeps-the-last-expert",
        "MixtureFFN.forward",
        "out.index_add_(0, row, given.to(x.dtype))",
        "out = out.index_copy(0, row, given.to(x.dtype))",
        "of a token's experts only the one with the highest number is heard; right for top-1",
    ),
    Fault(
        "shared-expert-gated",
        "MixtureFFN.forward",
        "out + self.shared(x)",
        "out + weights.sum(dim=1).view(x.shape[:-1])[..., None] * self.shared(x)",
        "the expert that is always on fades where the router is unsure",
    ),
    Fault(
        "shared-expert-missing",
        "MixtureFFN.forward",
        "out if self.shared is None else out + self.shared(x)",
        "out",
        "its parameters never get a gradient",
    ),
    Fault(
        "clamp-below-the-gate",
        "ClampedGatedFFN.forward",
        "self.gate(x).clamp(max=self.limit)",
        "self.gate(x).clamp(-self.limit, self.limit)",
        "only gates below -limit differ, where the sigmoid is near 0 anyway",
    ),
    Fault(
        "clamped-up-without-plus-one",
        "ClampedGatedFFN.forward",
        "(up + 1)",
        "up",
        "up = 0 shuts the expert instead of letting the gate through",
    ),
    Fault(
        "clamped-gate-as-silu",
        "ClampedGatedFFN.forward",
        "torch.sigmoid(self.alpha * gate)",
        "torch.sigmoid(gate)",
        "alpha = 1: off by up to a tenth",
    ),
]

SINKS = [
    Fault(
        "sink-kept-in-the-sum",
        "SinkAttention.forward",
        ".softmax(dim=-1)[..., :S]",
        ".softmax(dim=-1)[..., :S]\n"
        "        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)",
        "weights sum to 1 again: plain attention, the sinks get no gradient",
    ),
    Fault(
        "sink-scaled",
        "SinkAttention.forward",
        "sinks = self.sinks[:, None, None]",
        "sinks = (self.sinks * (head_dim**-0.5 if scale is None else scale))[:, None, None]",
        "each sink is pulled towards 0 by the width of a head",
    ),
    Fault(
        "sink-one-for-all-heads",
        "SinkAttention.forward",
        "sinks = self.sinks[:, None, None]",
        "sinks = self.sinks.mean().expand(H)[:, None, None]",
        "nothing while the sinks are equal, as at the start",
    ),
    Fault(
        "sink-of-the-kv-head",
        "SinkAttention.forward",
        "sinks = self.sinks[:, None, None]",
        "sinks = self.sinks[:G].repeat_interleave(H // G)[:, None, None]",
        "query heads of a group share one sink; right for MHA",
    ),
]

MODEL = [
    Fault(
        "final-norm-missing",
        "DecoderOnlyLM._logits",
        "self.final_norm(x[:, -1:] if last_only else x)",
        "x[:, -1:] if last_only else x",
        "logits grow with depth; final_norm gets no gradient",
    ),
    Fault(
        "tying-lost",
        "DecoderOnlyLM.__init__",
        "self.lm_head = None if tie_embeddings else nn.Linear(d_model, vocab_size, bias=False)",
        "self.lm_head = nn.Linear(d_model, vocab_size, bias=False)",
        "V·d more parameters; the head never learns what the embedding does",
    ),
    Fault(
        "embedding-scale-missing",
        "DecoderOnlyLM._logits",
        "self.embedding(ids.long()) * self.embedding_scale",
        "self.embedding(ids.long())",
        "the stream starts too small against what the blocks add",
    ),
    Fault(
        "logit-cap-missing",
        "DecoderOnlyLM._logits",
        "(self.logit_softcap * torch.tanh(wide / self.logit_softcap)).to(logits.dtype)",
        "logits",
        "same ranking, so greedy text does not show it",
    ),
    Fault(
        "padding-lost-in-decoding",
        "DecoderOnlyLM._steps",
        "F.pad(key_padding_mask, (0, 1), value=True)",
        "F.pad(key_padding_mask, (0, 1)) | True",
        "short prompts of a batch change their text from the second token on",
    ),
    Fault(
        "eos-stops-all",
        "DecoderOnlyLM._steps",
        "done.all()",
        "done.any()",
        "the first row to end cuts all others off",
    ),
    Fault(
        "top-p-off-by-one",
        "pick_next_token",
        "probs >= top_p",
        "probs > top_p",
        "one token too many where the sum meets top_p exactly",
    ),
    Fault(
        "loss-unshifted",
        "next_token_loss",
        "targets = ids[:, 1:].long()",
        "targets = ids[:, :-1].long()",
        "the model learns to copy; loss near 0, text repeats",
    ),
    Fault(
        "loss-counts-padding",
        "next_token_loss",
        "        pairs = key_padding_mask[:, :-1] & key_padding_mask[:, 1:]\n",
        "",
        "the loss changes with the amount of padding",
    ),
]

COUNTING = [
    Fault(
        "cache-size-without-values",
        "kv_cache_elements",
        "2 * n_kv_heads",
        "n_kv_heads",
        "a cache that is planned at half its size",
    ),
]

GROUPS = {
    "Wiring": WIRING,
    "Masks": MASKS,
    "Attention": ATTENTION,
    "Positions": POSITIONS,
    "Cache": CACHE,
    "Latent attention": LATENT_ATTENTION,
    "Norm and FFN": NORM_AND_FFN,
    "Experts": EXPERTS,
    "Sinks": SINKS,
    "Model and counting": [*MODEL, *COUNTING],
}
FAULTS = list(itertools.chain(*GROUPS.values()))
BY_NAME = {fault.name: fault for fault in FAULTS}
CLASSICS = (
    "residual-from-norm",
    "one-norm-used-twice",
    "causal-skipped-with-cache",
    "causal-mask-top-left",
    "window-off-by-one",
    "groups-tiled",
    "soft-cap-after-the-mask",
    "dead-rows-nan-gradient",
    "keys-rotated-twice",
    "position-after-the-append",
    "cache-filled-after-widening",
    "moe-renormalised",
)


@functools.cache
def parts() -> tuple[dict[str, types.CodeType], dict[str, str]]:
    """The statements of the script, compiled one by one, and the sources of its definitions."""
    source = SCRIPT.read_text(encoding="utf-8")
    lines, codes, sources = source.splitlines(keepends=True), {}, {}
    for node in ast.parse(source).body:
        top = getattr(node, "name", f"line {node.lineno}")
        codes[top] = compile(ast.Module([node], []), SCRIPT.name, "exec")
        for part in [node, *(getattr(node, "body", []) if isinstance(node, ast.ClassDef) else [])]:
            if isinstance(part, (ast.ClassDef, ast.FunctionDef)):
                name = top if part is node else f"{top}.{part.name}"
                sources[name] = "".join(lines[part.lineno - 1 : part.end_lineno])
    return codes, sources


def patched(fault: Fault) -> str:
    """The definition with the fault in it."""
    source = parts()[1].get(fault.place, "")
    if source.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: old must occur once in {fault.place}")
    return source.replace(fault.old, fault.new)


def planted(fault: Fault | None) -> types.ModuleType:
    """The script as a module of its own, with the fault in it."""
    codes, sources = parts()
    module = types.ModuleType("faulty_transformer_block")
    module.__file__ = str(SCRIPT)
    for name, code in codes.items():
        faulty = fault is not None and name == fault.place.partition(".")[0]
        text = sources[name].replace(sources[fault.place], patched(fault)) if faulty else code
        exec(text, module.__dict__)
    return module


@functools.cache
def verdicts(fault: Fault | None) -> dict[str, tuple[bool, str]]:
    """What each demo says, by its id."""
    module = planted(fault)
    return {name: module.main_verdict(run, "cpu") for name, run in module.main_demos().items()}


def failing(fault: Fault | None, compared: bool = False) -> list[str]:
    """The demos that turn FAIL; with compared those only that ran to their end."""
    said = verdicts(fault).items()
    return [n for n, (ok, text) in said if not ok and not (compared and text.startswith("raised "))]


def rows(faults: Iterable[Fault]) -> str:
    """Faults as a Markdown table; a demo stands in brackets, which the notes turn into a link."""
    lines = ["| Fault | What you would see | Turn FAIL |", "|:--|:--|:--|"]
    for fault in faults:
        demos = " ".join(f"[{name}]" for name in failing(fault))
        lines.append(f"| {fault.name} | {fault.symptom} | {demos} |")
    return "\n".join(lines)


def table() -> str:
    """All faults, each group folded."""
    folds = []
    for title, faults in GROUPS.items():
        summary = f"<summary>{title}: {len(faults)} faults</summary>"
        folds.append(f"<details>\n{summary}\n\n{rows(faults)}\n\n</details>")
    return "\n".join(folds)


def classics() -> str:
    """The twelve that everybody meets."""
    return rows(BY_NAME[name] for name in CLASSICS)


def explain(fault: Fault) -> str:
    """The change as a diff, and the lines of the demos that turn FAIL."""
    before, after = parts()[1][fault.place].splitlines(), patched(fault).splitlines()
    diff = list(difflib.unified_diff(before, after, fault.place, fault.name, lineterm="", n=1))
    said = [f"[{name}] {verdicts(fault)[name][1]}  FAIL" for name in failing(fault)]
    return "\n".join([*diff, *said])


def fault_named(parser: argparse.ArgumentParser, name: str) -> Fault:
    """The fault of that name, in any case; an error with the nearest names, or all of them."""
    if name.lower() in BY_NAME:
        return BY_NAME[name.lower()]
    word = name.lower()
    near = [known for known in BY_NAME if len(word) > 2 and word in known]
    near += difflib.get_close_matches(word, BY_NAME)
    hint = f"nearest: {', '.join(dict.fromkeys(near))}" if near else f"known: {', '.join(BY_NAME)}"
    parser.error(f"unknown fault {name}; {hint}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="planted_faults.py",
        description="Plants faults in transformer_block.py, one at a time, and runs its demos.",
        epilog=f"Without a name all {len(FAULTS)} are planted, which takes half a minute.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="faults: their change and what the demos then say"
    )
    parser.add_argument("--list", action="store_true", help="the names and what one would see")
    parser.add_argument("--write", action="store_true", help="put the table into the notes")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    options = parser.parse_args(argv)
    chosen = list(dict.fromkeys(fault_named(parser, name) for name in options.names))
    if bool(chosen) + options.list + options.write > 1:
        parser.error("names, --list and --write exclude each other")
    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    if options.write:
        notes = NOTES.read_text(encoding="utf-8")
        notes = CLASSICS_TABLE.sub(lambda _: classics(), TABLE.sub(lambda _: table(), notes))
        NOTES.write_text(notes, encoding="utf-8")
    elif options.list:
        width = max(map(len, BY_NAME))
        print("\n".join(f"{fault.name:{width}}  {fault.symptom}" for fault in FAULTS))
    else:
        print("\n\n".join(map(explain, chosen)) or table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
