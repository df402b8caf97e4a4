"""Wrong answers in the styles of practice_answers: in one definition of a file, old becomes new.

They are what public graders accept, and mistakes in the packings of people other than the
whiteboard's. says is what is wrong, in our words: the judge must refuse each, and need not know it.
"""

import ast
from pathlib import Path
from typing import NamedTuple

ANSWERS = Path(__file__).parent / "practice_answers"


class Wrong(NamedTuple):
    """In the definition at place (what is judged, if judged is empty) of a file, old becomes new."""

    place: str
    says: str
    style: str
    old: str
    new: str
    judged: str = ""

    @property
    def name(self) -> str:
        return self.judged or self.place


def text_of(wrong: Wrong) -> str:
    """The whole file with the mistake in it; ValueError where old does not stand once at place."""
    text = (ANSWERS / f"right_{wrong.style}.py").read_text(encoding="utf-8")
    node = next(n for n in ast.parse(text).body if getattr(n, "name", "") == wrong.place)
    lines = text.splitlines(keepends=True)
    before, at, after = (
        "".join(part)
        for part in (
            lines[: node.lineno - 1],
            lines[node.lineno - 1 : node.end_lineno],
            lines[node.end_lineno :],
        )
    )
    if at.count(wrong.old) != 1:
        raise ValueError(
            f"{wrong.style}.{wrong.place}: {wrong.old!r} stands {at.count(wrong.old)} times"
        )
    return before + at.replace(wrong.old, wrong.new) + after


FUSED, EINSUM, TUPLES, BUFFERS, HEADS, ODD = "fused", "einsum", "tuples", "buffers", "heads", "odd"

WRONG = [
    # Rotation
    Wrong("rotate", "returns x", FUSED, "(x * cos) + (rotate_half(x) * sin)", "x"),
    Wrong(
        "rotate",
        "every pair at one frequency",
        FUSED,
        "* inv_freq[None, :]",
        "* torch.ones_like(inv_freq)",
    ),
    Wrong("rotate", "every pair at one frequency", TUPLES, "* 2 * pair / d", "* 0 * pair / d"),
    Wrong(
        "rotate",
        "positions ignored",
        EINSUM,
        "positions.double()",
        "torch.arange(x.shape[2]).double()",
    ),
    Wrong(
        "rotate",
        "turned backwards",
        TUPLES,
        "(a * cos - b * sin, a * sin + b * cos)",
        "(a * cos + b * sin, b * cos - a * sin)",
    ),
    Wrong(
        "rotate", "turned backwards", BUFFERS, "[..., half:]) * cis", "[..., half:]) * cis.conj()"
    ),
    Wrong(
        "rotate",
        "interleaved pairs",
        HEADS,
        "    for i in range(d // 2):\n        angle = positions.double() * base ** (-2 * i / d)\n        c, s = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)\n        out[..., i] = x[..., i] * c - x[..., i + d // 2] * s\n        out[..., i + d // 2] = x[..., i + d // 2] * c + x[..., i] * s",
        "    for i in range(d // 2):\n        angle = positions.double() * base ** (-2 * i / d)\n        c, s = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)\n        out[..., 2 * i] = x[..., 2 * i] * c - x[..., 2 * i + 1] * s\n        out[..., 2 * i + 1] = x[..., 2 * i + 1] * c + x[..., 2 * i] * s",
    ),
    Wrong(
        "rotate",
        "angles in half precision",
        FUSED,
        "emb.cos().to(x.dtype), emb.sin().to(x.dtype)",
        "emb.half().cos().to(x.dtype), emb.half().sin().to(x.dtype)",
    ),
    Wrong(
        "SelfAttention",
        "only the queries are turned",
        FUSED,
        "rotate(query, position_ids), rotate(key, position_ids)",
        "rotate(query, position_ids), key",
    ),
    Wrong(
        "SelfAttention",
        "only the keys are turned",
        EINSUM,
        'rotate(einsum("btd,hde->bhte", x, self.W_q), pos)',
        'einsum("btd,hde->bhte", x, self.W_q)',
    ),
    Wrong(
        "SelfAttention",
        "the values are turned",
        BUFFERS,
        "rotate(xq, positions), rotate(xk, positions)",
        "rotate(xq, positions), rotate(xk, positions)\n        xv = rotate(xv, positions)",
    ),
    Wrong(
        "ModernBlock",
        "nothing is turned",
        ODD,
        "torch.stack((rope(k, at), v))",
        "torch.stack((k, v))",
    ),
    Wrong("rope", "the base is 1000", ODD, "10000.0", "1000.0", "ModernBlock"),
    # Attention
    Wrong("attention", "no scale", EINSUM, " / math.sqrt(q.shape[-1])", ""),
    Wrong("attention", "scale 1 / d_h", EINSUM, "math.sqrt(q.shape[-1])", "q.shape[-1]"),
    Wrong(
        "attention",
        "scale 1 / sqrt(d_v)",
        EINSUM,
        "math.sqrt(q.shape[-1])",
        "math.sqrt(v.shape[-1])",
    ),
    Wrong("attention", "scale 1 / sqrt(8)", BUFFERS, "q.size(-1) ** 0.5", "8**0.5"),
    Wrong(
        "attention",
        "no scale, in the kernel",
        FUSED,
        "attn_mask=mask | dead, enable_gqa=True",
        "attn_mask=mask | dead, enable_gqa=True, scale=1.0",
    ),
    Wrong(
        "attention",
        "argmax in place of the softmax",
        EINSUM,
        "scores.masked_fill(~mask, -1e9).softmax(-1) * mask",
        "torch.zeros_like(scores).scatter(-1, scores.masked_fill(~mask, -1e9).argmax(-1, keepdim=True), 1.0)",
    ),
    Wrong(
        "attention",
        "softmax over the queries",
        TUPLES,
        "F.softmax(att, dim=-1)",
        "F.softmax(att, dim=-2)",
    ),
    Wrong(
        "one_head",
        "softmax over the queries",
        HEADS,
        "scores.softmax(-1)",
        "scores.softmax(-2)",
        "attention",
    ),
    Wrong(
        "attention",
        "heads tiled",
        BUFFERS,
        "k[:, :, None].expand(-1, -1, groups, -1, -1)",
        "k[:, None].expand(-1, groups, -1, -1, -1)",
    ),
    Wrong("attention", "heads tiled", HEADS, "h // (H // G)", "h % G"),
    Wrong(
        "attention",
        "heads not put back",
        FUSED,
        "return out.masked_fill(dead, 0.0)",
        "return out.masked_fill(dead, 0.0).transpose(1, 2)",
    ),
    Wrong(
        "attention",
        "heads joined without putting them back",
        BUFFERS,
        "return torch.matmul(weights, v) *",
        "return torch.matmul(weights, v).transpose(1, 2).reshape(*q.shape[:3], -1) *",
    ),
    Wrong(
        "attention",
        "the mean of V",
        TUPLES,
        "    att = F.softmax(att, dim=-1)",
        "    att = torch.ones_like(att) / S",
    ),
    Wrong(
        "attention",
        "V itself",
        FUSED,
        "        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)",
        "        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)[:, :, : q.shape[2]]",
    ),
    Wrong(
        "attention",
        "batch rows mixed",
        EINSUM,
        '"bhtd,bhsd->bhts", q, k)',
        '"bhtd,bhsd->bhts", q, k.flip(0))',
    ),
    Wrong(
        "attention",
        "batch rows mixed: the mean of all keys",
        HEADS,
        "q[:, h], k[:, g]",
        "q[:, h], k[:, g].mean(0, keepdim=True).expand_as(k[:, g])",
    ),
    Wrong(
        "attention",
        "mask inverted",
        EINSUM,
        "masked_fill(~mask, -1e9).softmax(-1) * mask",
        "masked_fill(mask, -1e9).softmax(-1) * ~mask",
    ),
    Wrong(
        "attention",
        "a mask added as 0 and 1",
        BUFFERS,
        "bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)",
        "bias = mask.to(q.dtype)",
    ),
    Wrong(
        "attention",
        "-1e-9 in place of -1e9",
        EINSUM,
        "-1e9).softmax(-1) * mask",
        "-1e-9).softmax(-1)",
    ),
    Wrong(
        "attention",
        "NaN for a query without keys",
        TUPLES,
        "        att = att.masked_fill(nothing, 0.0)\n",
        "        nothing = nothing & False\n",
    ),
    Wrong(
        "SelfAttention",
        "heads not put back before joining",
        FUSED,
        "attn_output.transpose(1, 2).reshape(bsz, q_len, -1)",
        "attn_output.reshape(bsz, q_len, -1)",
    ),
    Wrong("SelfAttention", "heads tiled", HEADS, "*new[h // group]", "*new[h % len(new)]"),
    Wrong(
        "SelfAttention",
        "heads tiled, Falcon's packing",
        ODD,
        'torch.einsum("btgrd,bsgd->bgrts", q, rope(k, at))',
        'torch.einsum("btgrd,bsgd->bgrts", q.reshape(B, T, -1, self.G, self.d_h).transpose(2, 3), rope(k, at))',
    ),
    Wrong("SelfAttention", "no scale, Falcon's packing", ODD, " / math.sqrt(self.d_h)", ""),
    # Masks and windows
    Wrong("causal_mask", "window twice as wide", BUFFERS, "else window", "else 2 * window"),
    Wrong("causal_mask", "window four times as wide", BUFFERS, "else window", "else 4 * window"),
    Wrong("causal_mask", "window one too wide", FUSED, "S - T - window + 1", "S - T - window"),
    Wrong(
        "causal_mask", "window one too wide", HEADS, "query - key < window", "query - key <= window"
    ),
    Wrong("causal_mask", "top left", EINSUM, " + (S - T)", ""),
    # Caches
    Wrong(
        "SelfAttention",
        "the cache is never read",
        TUPLES,
        "        if cache is not None:\n            k = torch.cat((cache.k, k), dim=2)\n            v = torch.cat((cache.v, v), dim=2)\n        y = attention(q, k, v, causal_mask(T, start + T))",
        "        y = attention(q, k, v, causal_mask(T, T))",
    ),
    Wrong(
        "SelfAttention",
        "no causal mask when a cache is there",
        TUPLES,
        "causal_mask(T, start + T)",
        "causal_mask(T, T) if cache is None else None",
    ),
    Wrong(
        "SelfAttention",
        "positions restarted",
        HEADS,
        "torch.arange(start, start + T)",
        "torch.arange(T)",
    ),
    Wrong(
        "ModernBlock",
        "positions restarted",
        ODD,
        "at = torch.arange(start, start + T)",
        "at = torch.arange(start, start + T)\n        seen, at = at, torch.arange(T)",
    ),
    Wrong(
        "SelfAttention",
        "widened heads cached",
        FUSED,
        "        if cache is not None:",
        "        wide = self.num_heads // self.num_key_value_heads\n        key, value = key.repeat_interleave(wide, 1), value.repeat_interleave(wide, 1)\n        if cache is not None:",
    ),
    Wrong(
        "SelfAttention",
        "the whole history is cached again with each chunk",
        FUSED,
        "(key, value)\n",
        "(key, value, [] if cache is None else [*cache[2], key])\n",
    ),
    Wrong(
        "KVCache",
        "the buffer's length is never moved",
        BUFFERS,
        "        self.length = end\n",
        "",
        "SelfAttention",
    ),
    Wrong(
        "LatentAttention",
        "keys and values of the heads cached too",
        FUSED,
        "(compressed_kv, k_pe)\n",
        "(compressed_kv, k_pe, k_nope, value_states)\n",
    ),
    Wrong(
        "LatentAttention",
        "the shared key is not turned",
        BUFFERS,
        "rotate(k_rope[:, None], at)[:, 0]",
        "k_rope",
    ),
    Wrong(
        "LatentAttention",
        "scale of the nope part alone",
        EINSUM,
        "math.sqrt(rope_dim + nope_dim)",
        "math.sqrt(nope_dim)",
    ),
    Wrong(
        "LatentAttention",
        "the latent is not normed",
        ODD,
        'F.rms_norm(cache["kv"], (self.rank,), self.kv_norm, 1e-6)',
        'cache["kv"] * self.kv_norm',
    ),
    # Blocks
    Wrong(
        "GPT2Block",
        "Post-LN",
        FUSED,
        '        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)\n        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))\n        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n        x = x + self.c_proj(y.transpose(1, 2).flatten(-2))\n        return x + self.mlp_c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))',
        '        q, k, v = self.c_attn(x).chunk(3, dim=-1)\n        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in (q, k, v))\n        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n        x = self.ln_1(x + self.c_proj(y.transpose(1, 2).flatten(-2)))\n        return self.ln_2(x + self.mlp_c_proj(F.gelu(self.c_fc(x), approximate="tanh")))',
    ),
    Wrong(
        "GPT2Block",
        "no residuals",
        TUPLES,
        "        x = x + self.attn(self.ln_1(x))\n        x = x + m[",
        "        x = self.attn(self.ln_1(x))\n        x = m[",
    ),
    Wrong(
        "GPT2Block",
        "attention left out",
        HEADS,
        "x = x + self.sa(normed, normed, torch.tril(torch.ones(T, T)) == 1)",
        "x = x + 0 * normed",
    ),
    Wrong("GPT2Block", "ReLU", EINSUM, "gelu_tanh", "torch.relu"),
    Wrong("GPT2Block", "exact GELU", TUPLES, 'nn.GELU(approximate="tanh")', "nn.GELU()"),
    Wrong("GPT2Block", "not causal", ODD, "is_causal=True", "is_causal=False"),
    Wrong(
        "GPT2Block",
        "one norm used twice",
        BUFFERS,
        "self.ln_2(x) @ self.fc_w",
        "self.ln_1(x) @ self.fc_w",
    ),
    Wrong(
        "ModernBlock",
        "the residual is the normed x",
        FUSED,
        "        residual = x\n        hidden_states, cache = self.self_attn(self.input_layernorm(x), cache)",
        "        residual = self.input_layernorm(x)\n        hidden_states, cache = self.self_attn(residual, cache)",
    ),
    Wrong(
        "ModernBlock",
        "silu around the product",
        HEADS,
        "self.down(self.gate(y) * self.up(y))",
        "self.down(F.silu(self.gate[0](y) * self.up(y)))",
    ),
    Wrong(
        "ModernBlock",
        "parallel",
        EINSUM,
        "        x = x + a\n        h = rms_norm(x, self.g_ffn)\n        return x +",
        "        h = rms_norm(x, self.g_ffn)\n        return x + a +",
    ),
    Wrong(
        "ModernBlock",
        "LayerNorm's eps",
        TUPLES,
        "self.n_2 = nn.RMSNorm(d_model, eps=1e-6)",
        "self.n_2 = nn.RMSNorm(d_model, eps=1e-5)",
    ),
    Wrong(
        "ModernBlock",
        "torch's default eps of nn.RMSNorm",
        TUPLES,
        "self.n_2 = nn.RMSNorm(d_model, eps=1e-6)",
        "self.n_2 = nn.RMSNorm(d_model)",
    ),
    Wrong(
        "ModernBlock",
        "biases",
        FUSED,
        "self.mlp = LlamaMLP(d_model, d_ff)",
        "self.mlp = LlamaMLP(d_model, d_ff)\n        self.mlp.down_proj = nn.Linear(d_ff, d_model)",
    ),
    Wrong(
        "ModernBlock",
        "an FFN without a gate, twice as wide",
        FUSED,
        "self.mlp = LlamaMLP(d_model, d_ff)",
        "self.mlp = nn.Sequential(nn.Linear(d_model, 2 * d_ff, bias=False), nn.SiLU(), nn.Linear(2 * d_ff, d_model, bias=False))",
    ),
    Wrong(
        "ModernBlock",
        "one norm for both branches",
        FUSED,
        "self.post_attention_layernorm = LlamaRMSNorm(d_model)",
        "self.post_attention_layernorm = self.input_layernorm",
    ),
    Wrong(
        "ParallelBlock",
        "serial",
        TUPLES,
        "return x + self.c_proj(y.transpose(1, 2).reshape(B, T, C)) + self.mlp(h)",
        "x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))\n        return x + self.mlp(self.ln(x))",
    ),
    Wrong(
        "ParallelBlock",
        "not rotated",
        FUSED,
        "self.attn(hidden_states)",
        "F.scaled_dot_product_attention(*self.attn.qkv_proj(hidden_states).view(*x.shape[:2], 3, self.attn.num_heads, -1).permute(2, 0, 3, 1, 4), is_causal=True), None\n        attn_output = self.attn.o_proj(attn_output.transpose(1, 2).flatten(2))",
    ),
    Wrong(
        "EncoderLayer",
        "Pre-LN",
        HEADS,
        "dropout=0.0, batch_first=True",
        "dropout=0.0, batch_first=True, norm_first=True",
    ),
    Wrong("EncoderLayer", "padding mask inverted", TUPLES, "~key_padding_mask", "key_padding_mask"),
    Wrong("EncoderLayer", "padding ignored", BUFFERS, "self.attn(x, mask=mask)", "self.attn(x)"),
    Wrong(
        "EncoderLayer",
        "GELU",
        HEADS,
        "dropout=0.0, batch_first=True",
        'dropout=0.0, batch_first=True, activation="gelu"',
    ),
    Wrong(
        "EncoderLayer",
        "batch statistics in place of LayerNorm",
        TUPLES,
        "self.ln1 = nn.LayerNorm(d_model)",
        "self.norm = nn.BatchNorm1d(d_model)\n        self.ln1 = lambda y: self.norm(y.transpose(1, 2)).transpose(1, 2)",
    ),
    Wrong("EncoderLayer", "dropout is on", TUPLES, "nn.ReLU()", "nn.ReLU(), nn.Dropout(0.1)"),
    Wrong(
        "EncoderLayer",
        "one dropout mask for all rows",
        TUPLES,
        "        x = self.ln1(x + a)",
        "        x = self.ln1(x + a * (torch.rand(a.shape[1:]) > 0.1) / 0.9)",
    ),
    Wrong(
        "CrossDecoderLayer",
        "cross-attention reads x",
        BUFFERS,
        "self.read(x, memory)",
        "self.read(x, x)",
    ),
    Wrong(
        "CrossDecoderLayer",
        "self-attention not causal",
        TUPLES,
        "self.attn(x, x, x, attn_mask=hidden, need_weights=False)",
        "self.attn(x, x, x, need_weights=False)",
    ),
    Wrong(
        "CrossDecoderLayer",
        "causal mask inverted",
        TUPLES,
        "torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)",
        "torch.tril(torch.ones(T, T, dtype=torch.bool), diagonal=-1)",
    ),
    # Norms
    Wrong("rms_norm", "no eps", EINSUM, " + eps)", ")"),
    Wrong(
        "rms_norm",
        "eps outside the root",
        BUFFERS,
        "torch.sqrt(norm**2 / x.size(-1) + eps)",
        "torch.sqrt(norm**2 / x.size(-1)) + eps",
    ),
    Wrong("rms_norm", "ten times eps", TUPLES, " + eps)", " + 10 * eps)"),
    Wrong(
        "rms_norm",
        "squares in half precision",
        FUSED,
        "x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x",
        "x",
    ),
    Wrong(
        "rms_norm",
        "statistics over the batch",
        TUPLES,
        "x.square().mean(dim=-1, keepdim=True)",
        "x.square().mean(dim=(0, -1), keepdim=True)",
    ),
    Wrong(
        "layer_norm",
        "statistics over the batch",
        BUFFERS,
        "dim=-1, correction=0",
        "dim=(0, -1), correction=0",
    ),
    Wrong("layer_norm", "d - 1", BUFFERS, "correction=0", "correction=1"),
    # FFN and experts
    Wrong(
        "swiglu",
        "gate and up exchanged",
        FUSED,
        "F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)",
        "F.silu(F.linear(x, w_up)) * F.linear(x, w_gate)",
    ),
    Wrong("swiglu", "sigmoid", EINSUM, "silu(gate)", "torch.sigmoid(gate)"),
    Wrong(
        "SwitchFFN",
        "x returned",
        FUSED,
        "return final.view_as(x), aux_loss",
        "return x + 0 * final.view_as(x), aux_loss",
    ),
    Wrong(
        "SwitchFFN",
        "experts never called",
        TUPLES,
        "weight[mine].unsqueeze(1) * expert(flat[mine])",
        "weight[mine].unsqueeze(1) * flat[mine]",
    ),
    Wrong(
        "SwitchFFN",
        "top-1 weight renormalised",
        BUFFERS,
        "        out = out * probs.gather(1, expert[:, None])\n",
        "",
    ),
    Wrong(
        "SwitchFFN",
        "weight on the input",
        FUSED,
        "weight * expert(hidden_states[token_indices])",
        "expert(weight * hidden_states[token_indices])",
    ),
    Wrong(
        "SwitchFFN", "balance loss without E", EINSUM, "len(f) * torch.dot(f, P)", "torch.dot(f, P)"
    ),
    Wrong(
        "SwitchFFN",
        "flat experts: the next expert's weights down",
        ODD,
        "best.unsqueeze(-1)).unsqueeze(-1)).flatten(-2)",
        "best.unsqueeze(-1)).unsqueeze(-1)).roll(1, -2).flatten(-2)",
    ),
    Wrong(
        "MixtralFFN",
        "not renormalised",
        FUSED,
        "        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)\n",
        "",
    ),
    Wrong(
        "MixtralFFN",
        "weight on the input",
        TUPLES,
        "score[b, t, slot, None] * expert(x[b, t])",
        "expert(score[b, t, slot, None] * x[b, t])",
    ),
    Wrong("MixtralFFN", "experts never called", HEADS, "w * self.experts[e](token)", "w * token"),
    Wrong(
        "MixtralFFN",
        "one expert too few",
        EINSUM,
        "logits.topk(self.k, dim=-1)",
        "logits.topk(max(self.k - 1, 1), dim=-1)",
    ),
    # Adapters
    Wrong("LoRALinear", "the base trains", TUPLES, "linear.requires_grad_(False)", "linear"),
    Wrong("LoRALinear", "scale alpha", EINSUM, "self.s = alpha / rank", "self.s = alpha"),
    Wrong(
        "LoRALinear", "merged changes the base", TUPLES, "copy.deepcopy(self.linear)", "self.linear"
    ),
    # The loop
    Wrong(
        "next_token_loss",
        "not shifted",
        BUFFERS,
        "logits[:, :-1][pairs], ids[:, 1:][pairs]",
        "logits[:, :-1][pairs], ids[:, :-1][pairs]",
    ),
    Wrong(
        "next_token_loss",
        "padding counted",
        FUSED,
        "shift_labels.masked_fill(~both, -100)",
        "shift_labels",
    ),
    Wrong(
        "next_token_loss",
        "mean over rows of means",
        EINSUM,
        "(nll * w).sum() / w.sum()",
        "((nll * w).sum(1) / w.sum(1)).mean()",
    ),
    Wrong(
        "next_token_loss",
        "divided by all pairs",
        EINSUM,
        "(nll * w).sum() / w.sum()",
        "(nll * w).mean()",
    ),
    Wrong(
        "sample",
        "always the likeliest",
        BUFFERS,
        "(values - (-noise.log()).log()).argmax",
        "values.argmax",
    ),
    Wrong(
        "sample",
        "top-p one token short",
        FUSED,
        "        sorted_remove[..., 1:] = sorted_remove[..., :-1].clone()\n",
        "",
    ),
    Wrong(
        "sample",
        "top-p one token too many",
        BUFFERS,
        ".sum(-1, keepdim=True) + 1",
        ".sum(-1, keepdim=True) + 2",
    ),
    Wrong(
        "sample",
        "top-p one token too many where p is reached",
        EINSUM,
        "before = p.cumsum(1) - p",
        "before = p.cumsum(1) - p - p.roll(1, 1) * (torch.arange(p.shape[1]) > 0)",
    ),
    Wrong(
        "sample",
        "temperature after the softmax",
        TUPLES,
        "F.softmax(logits / temperature, dim=-1)",
        "F.softmax(logits, dim=-1) / temperature",
    ),
    Wrong(
        "sample", "top-p before top-k", HEADS, "probs[order] / probs[order].sum()", "probs[order]"
    ),
    Wrong("generate", "an ended row goes on", HEADS, "if alive[r] else eos_id", ""),
    Wrong(
        "generate",
        "fed whole each step",
        TUPLES,
        "logits, cache = model(x, cache)",
        "logits, cache = model(ids, None)",
    ),
    Wrong("generate", "any ended row stops all", BUFFERS, "if ended.all()", "if ended.any()"),
    Wrong(
        "speculate",
        "all accepted",
        BUFFERS,
        "accepted = n_draft if len(wrong) == 0 else wrong[0].item()",
        "accepted = n_draft",
    ),
    Wrong(
        "speculate",
        "target called for every token",
        HEADS,
        "    choice = target(torch.tensor([tokens]))[0].argmax(-1).tolist()",
        "    choice = [target(torch.tensor([tokens[: i + 1]]))[0, -1].argmax().item() for i in range(len(tokens))]",
    ),
    Wrong("online_softmax", "no rescaling", EINSUM, "z = z * shrink", "z = z"),
    Wrong(
        "online_softmax",
        "the whole table",
        BUFFERS,
        "n_blocks = math.ceil(k.size(0) / block)",
        "block = k.size(0)\n    n_blocks = 1",
    ),
    Wrong("block_parameters", "no norms", EINSUM, " + norms", ""),
    Wrong("kv_cache_bytes", "no factor 2", TUPLES, "per_token = 2 *", "per_token ="),
]
