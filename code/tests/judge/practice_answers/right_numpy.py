"""Right answers in NumPy, where an exercise is a function of arrays."""

import numpy as np


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rows(x):
    return x.reshape(-1, x.shape[-1])


def softmax_cross_entropy(logits, targets):
    n = logits.shape[0]
    p = softmax(logits)
    z = logits - logits.max(axis=1, keepdims=True)
    loss = (np.log(np.exp(z).sum(1)) - z[np.arange(n), targets]).sum() / n
    onehot = np.eye(logits.shape[1])[targets]
    return loss, (p - onehot) / n


def linear_backward(x, w, dy):
    dw = np.einsum("no,ni->oi", rows(dy), rows(x))
    return np.einsum("...o,oi->...i", dy, w), dw, rows(dy).sum(0)


def layer_norm_backward(x, weight, dy, eps=1e-5):
    d = x.shape[-1]
    mu = x.mean(-1, keepdims=True)
    sigma = np.sqrt(x.var(-1, keepdims=True) + eps)
    hat = (x - mu) / sigma
    dhat = dy * weight
    dx = (d * dhat - dhat.sum(-1, keepdims=True) - hat * (dhat * hat).sum(-1, keepdims=True)) / (
        d * sigma
    )
    return dx, rows(dy * hat).sum(0), rows(dy).sum(0)


def rms_norm_backward(x, weight, dy, eps=1e-6):
    ms = np.mean(x * x, axis=-1, keepdims=True) + eps
    dhat = dy * weight
    dot = np.mean(dhat * x, axis=-1, keepdims=True)
    dx = dhat / np.sqrt(ms) - x * dot / ms**1.5
    return dx, rows(dy * x / np.sqrt(ms)).sum(0)


def swiglu_backward(x, w_gate, w_up, w_down, dy):
    g, u = x @ w_gate.T, x @ w_up.T
    s = 1 / (1 + np.exp(-g))
    dh = dy @ w_down
    du, dg = dh * g * s, dh * u * (s + g * s * (1 - s))
    dx = dg @ w_gate + du @ w_up
    hidden = g * s * u
    return dx, rows(dg).T @ rows(x), rows(du).T @ rows(x), rows(dy).T @ rows(hidden)


def attention_backward(q, k, v, dout, mask=None):
    B, H, T, d = q.shape
    G, S = k.shape[1], k.shape[2]
    q5, do5 = q.reshape(B, G, H // G, T, d), dout.reshape(B, G, H // G, T, -1)
    s = np.einsum("bgrtd,bgsd->bgrts", q5, k) / np.sqrt(d)
    keep = np.ones((B, H, T, S), bool) if mask is None else np.broadcast_to(mask, (B, H, T, S))
    keep = keep.reshape(B, G, H // G, T, S)
    s = np.where(keep, s, -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    dp = np.einsum("bgrte,bgse->bgrts", do5, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(d)
    dq = np.einsum("bgrts,bgsd->bgrtd", ds, k).reshape(q.shape)
    dk = np.einsum("bgrts,bgrtd->bgsd", ds, q5)
    return dq, dk, np.einsum("bgrts,bgrte->bgse", p, do5)


def flash_backward(q, k, v, out, lse, dout, block):
    c = 1 / np.sqrt(q.shape[1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    D = np.einsum("td,td->t", out, dout)
    for j in range(0, len(k), block):
        part = slice(j, j + block)
        p = np.exp(c * q @ k[part].T - lse[:, None])
        ds = c * p * (dout @ v[part].T - D[:, None])
        dq += ds @ k[part]
        dk[part] = ds.T @ q
        dv[part] = p.T @ dout
    return dq, dk, dv


def learning_rate(step, max_lr, min_lr, warmup, total):
    if step < warmup:
        return max_lr * step / warmup
    t = np.clip((step - warmup) / (total - warmup), 0, 1)
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + np.cos(np.pi * t))


def contrastive_loss(a, b, temperature):
    a = a / np.linalg.norm(a, axis=1, keepdims=True)
    b = b / np.linalg.norm(b, axis=1, keepdims=True)
    s = a @ b.T / temperature

    def cross(z):
        z = z - z.max(1, keepdims=True)
        return np.mean(np.log(np.exp(z).sum(1)) - np.diag(z))

    return (cross(s) + cross(s.T)) / 2


def quantize_int8(w):
    scale = np.abs(w).max(1) / 127
    safe = np.where(scale > 0, scale, 1)
    return np.rint(w / safe[:, None]).astype(np.int8), scale


def left_pad(prompts, pad_id):
    longest = max(len(p) for p in prompts)
    ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    mask = np.zeros((len(prompts), longest), dtype=np.int64)
    positions = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        for i, token in enumerate(prompt):
            at = longest - len(prompt) + i
            ids[row, at], mask[row, at], positions[row, at] = token, 1, i
    return ids, mask, positions


def alibi(n_heads, T, S):
    slopes = np.array([2 ** (-8 * (h + 1) / n_heads) for h in range(n_heads)])
    back = np.arange(S - T, S)[:, None] - np.arange(S)[None]
    return -slopes[:, None, None] * np.maximum(back, 0)


def token_log_probs(logits, ids):
    z = logits[:, :-1]
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, ids[:, 1:, None], axis=-1)[..., 0]


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    x = beta * (chosen - rejected - ref_chosen + ref_rejected)
    return np.logaddexp(0, -x).mean()


def grpo_loss(log_probs, old_log_probs, ref_log_probs, rewards, mask, clip=0.2, beta=0.04):
    a = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    r = np.exp(log_probs - old_log_probs)
    gain = np.minimum(r * a[:, None], np.clip(r, 1 - clip, 1 + clip) * a[:, None])
    delta = ref_log_probs - log_probs
    per_token = np.where(mask, gain - beta * (np.expm1(delta) - delta), 0)
    return -np.mean(per_token.sum(1) / mask.sum(1))


def gae(rewards, values, gamma, lam):
    deltas = rewards + gamma * values[1:] - values[:-1]
    out = deltas.copy()
    for t in range(len(deltas) - 2, -1, -1):
        out[t] += gamma * lam * out[t + 1]
    return out
