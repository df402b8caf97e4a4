"""Every block once more in numpy and plain loops, float64, without torch and without the script.

Arrays carry no batch axis: x is [T, d], a mask bool [T, S] with True = may attend, and p maps
parameter names (those of a state dict) to arrays. Slow on purpose: an attention sum gathers the
allowed keys of one query of one head and nothing else.
"""

import math

import numpy as np


def sub(p, prefix):
    """The parameters below prefix, without it."""
    return {name[len(prefix) + 1 :]: w for name, w in p.items() if name.startswith(prefix + ".")}


def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)


def layer_norm(p, name, x, eps):
    rows = [(row - row.mean()) / math.sqrt(((row - row.mean()) ** 2).mean() + eps) for row in x]
    return np.array(rows).reshape(x.shape) * p[f"{name}.weight"] + p[f"{name}.bias"]


def rms_norm(p, name, x, eps):
    flat = x.reshape(-1, x.shape[-1])
    rows = [row / math.sqrt(sum(v * v for v in row) / len(row) + eps) for row in flat]
    return np.array(rows).reshape(x.shape) * p[f"{name}.weight"]


def relu(x):
    return np.where(x > 0, x, 0.0)


def gelu(x):
    return np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.flat]).reshape(x.shape)


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x, start, r, base):
    """x [n, T, d_h]: channels i and i + r/2 are one complex number, times exp(i * angle).

    cos and sin are rounded to float32, which is the script's contract for its tables.
    """
    out = x.copy()
    for t in range(x.shape[1]):
        for i in range(r // 2):
            angle = (start + t) * base ** (-2 * i / r)
            turn = complex(np.float32(math.cos(angle)), np.float32(math.sin(angle)))
            turned = (x[:, t, i] + 1j * x[:, t, i + r // 2]) * turn
            out[:, t, i], out[:, t, i + r // 2] = turned.real, turned.imag
    return out


def causal(q_positions, k_positions, window=None):
    """keep[i][j], one comparison each."""
    span = math.inf if window is None else window
    rows = [[0 <= q - k < span for k in k_positions] for q in q_positions]
    return np.array(rows, dtype=bool).reshape(len(q_positions), len(k_positions))


def attention(q, k, v, keep=None, *, scale=None, cap=None):
    """q [H, T, d_h], k [G, S, d_h], v [G, S, d_v]: one query of one head at a time."""
    (H, T, head_dim), G = q.shape, k.shape[0]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = np.zeros((H, T, v.shape[-1]))
    for head in range(H):
        keys, values = k[head * G // H], v[head * G // H]
        for t in range(T):
            allowed = [s for s in range(k.shape[1]) if keep is None or keep[t, s]]
            scores = [scale * float(q[head, t] @ keys[s]) for s in allowed]
            if cap is not None:
                scores = [cap * math.tanh(score / cap) for score in scores]
            weights = [math.exp(score - max(scores)) for score in scores]
            for s, weight in zip(allowed, weights):
                out[head, t] += weight / sum(weights) * values[s]
    return out


def heads(x, width):
    """[T, n * width] -> [n, T, width], channel by channel."""
    n = x.shape[-1] // width
    return np.stack([x[:, i * width : (i + 1) * width] for i in range(n)])


def merged(x):
    return np.concatenate(list(x), axis=-1)


def multi_head_attention(
    p, x, head_dim, *, memory=None, keep=None, rope=None, scale=None, cap=None, norm_eps=1e-6
):
    """rope is (start, r, base) or None; norms of q and k are used when p has them."""
    source = x if memory is None else memory
    q = heads(linear(p, "q_proj", x), head_dim)
    k = heads(linear(p, "k_proj", source), head_dim)
    v = heads(linear(p, "v_proj", source), head_dim)
    if "q_norm.weight" in p:
        q, k = rms_norm(p, "q_norm", q, norm_eps), rms_norm(p, "k_norm", k, norm_eps)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    out = attention(q, k, v, keep, scale=scale, cap=cap)
    return linear(p, "o_proj", merged(out)), (k, v)


def latent_attention(p, x, *, kv_rank, rope_dim, nope_dim, v_dim, keep=None, rope):
    """DeepSeek's attention with keys and values of every head written out."""
    q = linear(p, "q_proj", x) if "q_proj.weight" in p else None
    if q is None:
        q = linear(p, "q_up", rms_norm(p, "q_norm", linear(p, "q_down", x), 1e-6))
    q = heads(q, nope_dim + rope_dim)
    down = linear(p, "kv_down", x)
    latent = rms_norm(p, "kv_norm", down[:, :kv_rank], 1e-6)
    shared = rotate(down[None, :, kv_rank:], *rope)[0]
    up = heads(linear(p, "kv_up", latent), nope_dim + v_dim)
    q = np.concatenate([q[..., :nope_dim], rotate(q[..., nope_dim:], *rope)], axis=-1)
    k = np.stack([np.concatenate([one[:, :nope_dim], shared], axis=-1) for one in up])
    return linear(p, "o_proj", merged(attention(q, k, up[..., nope_dim:], keep)))


def dense_ffn(p, x, act=gelu):
    return linear(p, "down", act(linear(p, "up", x)))


def gated_ffn(p, x, act=silu):
    return linear(p, "down", act(linear(p, "gate", x)) * linear(p, "up", x))


def moe_ffn(p, x):
    """One token at a time; returns the output, tokens per expert and the balance loss."""
    n_experts, n_tokens = p["router.weight"].shape[0], len(x)
    out, counts, mean = np.zeros_like(x), [0] * n_experts, np.zeros(n_experts)
    for t, token in enumerate(x):
        logits = p["router.weight"] @ token
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        best = int(probs.argmax())
        out[t] = probs[best] * gated_ffn(sub(p, f"experts.{best}"), token[None])[0]
        counts[best] += 1
        mean += probs / n_tokens
    balance = n_experts * sum(c / max(n_tokens, 1) * m for c, m in zip(counts, mean))
    return out, counts, balance


def post_ln_encoder(p, x, attn, ffn, eps):
    x = layer_norm(p, "ln1", x + attn(x), eps)
    return layer_norm(p, "ln2", x + ffn(x), eps)


def post_ln_seq2seq(p, x, *, self_attn, cross_attn, ffn, eps):
    x = layer_norm(p, "ln1", x + self_attn(x), eps)
    x = layer_norm(p, "ln2", x + cross_attn(x), eps)
    return layer_norm(p, "ln3", x + ffn(x), eps)


def pre_norm(p, x, attn, ffn, *, eps, norm):
    x = x + attn(norm(p, "norm1", x, eps))
    return x + ffn(norm(p, "norm2", x, eps))


def parallel(p, x, attn, ffn, eps):
    h = layer_norm(p, "norm", x, eps)
    other = layer_norm(p, "ffn_norm", x, eps) if "ffn_norm.weight" in p else h
    return x + attn(h) + ffn(other)


def branch_norm(p, x, attn, ffn, eps):
    h = attn(rms_norm(p, "attn_pre_norm", x, eps))
    x = x + rms_norm(p, "attn_post_norm", h, eps)
    h = ffn(rms_norm(p, "ffn_pre_norm", x, eps))
    return x + rms_norm(p, "ffn_post_norm", h, eps)
