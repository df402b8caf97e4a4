"""Draft: known mistakes in the answers. For each exercise (says, old, new)."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A known mistake: in the text of an answer, old becomes new."""

    says: str
    old: str
    new: str


FAULTS: dict[str, list[Fault]] = {}

FAULTS["rms_norm"] = [
    Fault("eps is missing; it is added to the mean square", " + eps)", ")"),
    Fault(
        "eps is added to the root; it must stand under it, beside the mean square",
        "wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)",
        "wide / (wide.square().mean(dim=-1, keepdim=True).sqrt() + eps)",
    ),
    Fault("eps is ten times too large", " + eps)", " + 10 * eps)"),
    Fault("eps is fixed in the text; the argument must be used", " + eps)", " + 1e-6)"),
    Fault(
        "squares are taken in half precision, where 256^2 overflows; they need float32",
        "x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
        "x",
    ),
    Fault(
        "half precision comes back as float32; the result must have x's dtype",
        "(wide * weight).to(x.dtype)",
        "wide * weight",
    ),
    Fault(
        "the mean is subtracted; RMSNorm leaves it in, that is LayerNorm's",
        "    wide = wide * torch.rsqrt",
        "    wide = wide - wide.mean(dim=-1, keepdim=True)\n    wide = wide * torch.rsqrt",
    ),
    Fault("the squares are summed; their mean is needed", ".mean(dim=-1", ".sum(dim=-1"),
    Fault(
        "one mean over all tokens and rows; each token has its own, over the last axis",
        ".mean(dim=-1, keepdim=True)",
        ".mean()",
    ),
    Fault(
        "the mean runs over the tokens (dim=-2); it must run over the channels (dim=-1)",
        ".mean(dim=-1",
        ".mean(dim=-2",
    ),
    Fault("the weight is not used; it scales each channel", "(wide * weight)", "wide"),
    Fault(
        "the scale is 1 + weight, as Gemma stores it; here it is the weight itself",
        "(wide * weight)",
        "(wide * (1 + weight))",
    ),
    Fault(
        "x is divided by the mean square; it must be its root",
        "torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)",
        "1 / (wide.square().mean(dim=-1, keepdim=True) + eps)",
    ),
    Fault(
        "x is divided by the mean of absolute values; it must be the root of the mean square",
        "torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)",
        "1 / (wide.abs().mean(dim=-1, keepdim=True) + eps)",
    ),
    Fault(
        "the sum of squares is divided by d - 1; it must be d",
        "wide.square().mean(dim=-1, keepdim=True)",
        "wide.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)",
    ),
]

FAULTS["layer_norm"] = [
    Fault("eps is missing; it is added to the variance", " + eps)", ")"),
    Fault(
        "eps is added to the standard deviation; it must be added to the variance",
        "centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)",
        "centred / (centred.square().mean(dim=-1, keepdim=True).sqrt() + eps)",
    ),
    Fault("eps is ten times too large", " + eps)", " + 10 * eps)"),
    Fault("eps is fixed in the text; the argument must be used", " + eps)", " + 1e-5)"),
    Fault(
        "the variance is divided by d - 1 (torch.var's default); it must be d",
        "centred.square().mean(dim=-1, keepdim=True)",
        "centred.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)",
    ),
    Fault(
        "the mean is not subtracted; that is RMSNorm",
        "wide - wide.mean(dim=-1, keepdim=True)",
        "wide",
    ),
    Fault(
        "the variance is taken of x itself; it must be of x less its mean",
        "centred.square().mean",
        "wide.square().mean",
    ),
    Fault(
        "x itself is scaled; it must be x less its mean", "normed = centred *", "normed = wide *"
    ),
    Fault("the bias is not added", " + bias)", ")"),
    Fault("the weight is not used", "(normed * weight + bias)", "(normed + bias)"),
    Fault(
        "the bias is scaled by the weight; the weight comes first, then the bias",
        "(normed * weight + bias)",
        "((normed + bias) * weight)",
    ),
    Fault(
        "mean and variance run over all tokens; each token has its own",
        "    centred = wide - wide.mean(dim=-1, keepdim=True)\n"
        "    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)",
        "    centred = wide - wide.mean()\n"
        "    normed = centred * torch.rsqrt(centred.square().mean() + eps)",
    ),
    Fault(
        "mean and variance run over the tokens (dim=-2); they must run over the channels (dim=-1)",
        "    centred = wide - wide.mean(dim=-1, keepdim=True)\n"
        "    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)",
        "    centred = wide - wide.mean(dim=-2, keepdim=True)\n"
        "    normed = centred * torch.rsqrt(centred.square().mean(dim=-2, keepdim=True) + eps)",
    ),
    Fault(
        "x is divided by the variance; it must be its root",
        "torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)",
        "1 / (centred.square().mean(dim=-1, keepdim=True) + eps)",
    ),
    Fault(
        "squares are taken in half precision, where 256^2 overflows; they need float32",
        "x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
        "x",
    ),
    Fault(
        "half precision comes back as float32; the result must have x's dtype",
        "(normed * weight + bias).to(x.dtype)",
        "normed * weight + bias",
    ),
]

FAULTS["causal_mask"] = [
    Fault(
        "the first query stands beside the first key; the last must stand beside the last,"
        " query t at key S - T + t",
        "torch.arange(S - T, S)[:, None]",
        "torch.arange(T)[:, None]",
    ),
    Fault(
        "True stands for hidden; it must mean may attend",
        "return (age >= 0) & (age < (S if window is None else window))",
        "return ~((age >= 0) & (age < (S if window is None else window)))",
    ),
    Fault("a query does not see its own key; it must", "(age >= 0)", "(age > 0)"),
    Fault("every query sees one later key as well", "(age >= 0)", "(age >= -1)"),
    Fault(
        "queries see what comes later and not what came before",
        "(age >= 0) & (age <",
        "(age <= 0) & (-age <",
    ),
    Fault(
        "the window is one too wide (W keys before the own); the own key counts as one of W",
        "(age < (S if window is None else window))",
        "(age <= (S if window is None else window))",
    ),
    Fault("the window is one too narrow", "else window))", "else window - 1))"),
    Fault("the window is twice as wide", "else window))", "else 2 * window))"),
    Fault("the window is four times as wide", "else window))", "else 4 * window))"),
    Fault("the window is ignored", "(S if window is None else window)", "S"),
    Fault(
        "a window opens the future: W keys on both sides; it goes back only",
        "(age >= 0) & (age < (S if window is None else window))",
        "(age >= 0 if window is None else age.abs() < window)",
    ),
    Fault(
        "the window is a fixed block of W positions; it must slide with the query",
        "(age >= 0) & (age < (S if window is None else window))",
        "(age >= 0) & (torch.arange(S - T, S)[:, None] // (window or S)"
        " == torch.arange(S) // (window or S))",
    ),
    Fault(
        "the two conditions are joined by or; both must hold", "(age >= 0) & (", "(age >= 0) | ("
    ),
    Fault(
        "the mask is additive (0 and -inf); it must be bool",
        "return (age >= 0) & (age < (S if window is None else window))",
        "keep = (age >= 0) & (age < (S if window is None else window))\n"
        "    return torch.zeros(T, S).masked_fill(~keep, -torch.inf)",
    ),
    Fault(
        "the mask is of numbers 1 and 0; it must be bool",
        "return (age >= 0) & (age < (S if window is None else window))",
        "return ((age >= 0) & (age < (S if window is None else window))).float()",
    ),
    Fault(
        "keys and queries are exchanged: [S, T]; it must be [T, S]",
        "return (age >= 0) & (age < (S if window is None else window))",
        "return ((age >= 0) & (age < (S if window is None else window))).T",
    ),
]

FAULTS["rotate"] = [
    Fault(
        "nothing is turned: x comes back",
        "return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
        "return x",
    ),
    Fault(
        "it turns backwards; the first half is a cos - b sin, the second b cos + a sin",
        "(a * cos - b * sin, b * cos + a * sin)",
        "(a * cos + b * sin, b * cos - a * sin)",
    ),
    Fault(
        "channels 2i and 2i + 1 are a pair (interleaved); it must be i and i + d_h/2 (half-split)",
        "    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each\n"
        "    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
        "    a, b = x[..., 0::2], x[..., 1::2]\n"
        "    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)",
    ),
    Fault(
        "pairs are half-split and the angles interleaved; channel i and i + d_h/2 must turn by"
        " the same angle",
        "    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)\n"
        "    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each\n"
        "    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
        "    angle = angle.repeat_interleave(2, dim=-1)\n"
        "    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)\n"
        "    a, b = x.chunk(2, dim=-1)  # (B, n, T, d_h/2) each\n"
        "    return x * cos + torch.cat((-b, a), dim=-1) * sin",
    ),
    Fault(
        "every pair turns at one frequency; pair i turns by position * base^(-2i/d_h)",
        "base ** (-torch.arange(half,",
        "base ** (-0 * torch.arange(half,",
    ),
    Fault(
        "the positions are ignored (0, 1, 2, … always); they are an argument",
        "positions[:, None] * turn",
        "torch.arange(x.shape[2], device=x.device)[:, None] * turn",
    ),
    Fault(
        "all tokens turn alike, by the first position; each has its own",
        "positions[:, None] * turn",
        "positions[:1, None] * turn",
    ),
    Fault(
        "positions count from 1; the first is 0",
        "positions[:, None] * turn",
        "(positions[:, None] + 1) * turn",
    ),
    Fault(
        "the exponent is i / d_h; it must be 2i / d_h",
        "device=x.device) / half)",
        "device=x.device) / x.shape[-1])",
    ),
    Fault(
        "the exponent is 4i / d_h; it must be 2i / d_h",
        "device=x.device) / half)",
        "device=x.device) * 2 / half)",
    ),
    Fault(
        "the exponent has the wrong sign, so angles grow with i; it must be base^(-2i/d_h)",
        "base ** (-torch",
        "base ** (torch",
    ),
    Fault(
        "the frequencies count from i = 1; the first pair turns by 1 radian a token (i = 0)",
        "torch.arange(half, dtype",
        "torch.arange(1, half + 1, dtype",
    ),
    Fault(
        "the frequencies end at exactly 1 / base (i over d_h/2 - 1); it must be 2i / d_h",
        "device=x.device) / half)",
        "device=x.device) / max(half - 1, 1))",
    ),
    Fault(
        "base is fixed in the text; the argument must be used",
        "turn = base **",
        "turn = 10000.0 **",
    ),
    Fault(
        "base is replaced by e; it must be base^(-2i/d_h)",
        "turn = base ** (-torch",
        "turn = torch.e ** (-torch",
    ),
    Fault(
        "sine and cosine are exchanged",
        "cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)",
        "sin, cos = angle.cos().to(x.dtype), angle.sin().to(x.dtype)",
    ),
    Fault(
        "both halves get a minus; the second is b cos + a sin",
        "b * cos + a * sin",
        "b * cos - a * sin",
    ),
    Fault(
        "no half gets a minus; the first is a cos - b sin",
        "a * cos - b * sin",
        "a * cos + b * sin",
    ),
    Fault(
        "each half reads itself (a cos - a sin); the partner is the other half",
        "(a * cos - b * sin, b * cos + a * sin)",
        "(a * cos - a * sin, b * cos + b * sin)",
    ),
    Fault("the slowest pair comes first; i = 0 is the fastest", "* turn  #", "* turn.flip(0)  #"),
    Fault(
        "the halves come back in the wrong order",
        "(a * cos - b * sin, b * cos + a * sin)",
        "(b * cos + a * sin, a * cos - b * sin)",
    ),
    Fault(
        "angles are taken as degrees; they are radians", "* turn  #", "* turn * torch.pi / 180  #"
    ),
    Fault(
        "angles are multiplied by 2 pi; they are radians", "* turn  #", "* turn * 2 * torch.pi  #"
    ),
    Fault(
        "the positions stand on the axis of heads; they belong to the tokens",
        "    a, b = x.chunk(2, dim=-1)",
        "    cos, sin = (torch.stack([t[h % len(t)] for h in range(x.shape[1])])[:, None]"
        " for t in (cos, sin))\n    a, b = x.chunk(2, dim=-1)",
    ),
]

SCALE = "* q.shape[-1] ** -0.5"
SOFTMAX = "masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)"
FAULTS["attention"] = [
    Fault("the scores are not scaled; they are divided by sqrt(d_h)", f" {SCALE}", ""),
    Fault("scores are divided by d_h; it must be sqrt(d_h)", SCALE, "/ q.shape[-1]"),
    Fault(
        "scores are multiplied by sqrt(d_h); they are divided by it", SCALE, "* q.shape[-1] ** 0.5"
    ),
    Fault("scores are divided by sqrt(d_v); it must be sqrt(d_h)", SCALE, "* v.shape[-1] ** -0.5"),
    Fault("scores are divided by a constant sqrt(8); it must be sqrt(d_h)", SCALE, "* 8**-0.5"),
    Fault("scores are divided by a constant sqrt(64); it must be sqrt(d_h)", SCALE, "/ 8"),
    Fault(
        "scores are divided by sqrt(H d_h); it must be sqrt(d_h), the width of one head",
        SCALE,
        "* (q.shape[1] * q.shape[-1]) ** -0.5",
    ),
    Fault("scores are divided by sqrt(T); it must be sqrt(d_h)", SCALE, "* q.shape[2] ** -0.5"),
    Fault("scores are divided by sqrt(S); it must be sqrt(d_h)", SCALE, "* k.shape[2] ** -0.5"),
    Fault(
        "the weights are scaled, not the scores: sqrt(d_h) belongs inside the softmax",
        f"    scores = q @ k.mT {SCALE}",
        "    scores = q @ k.mT\n    v = v * q.shape[-1] ** -0.5",
    ),
    Fault(
        "each query takes its best key alone (argmax); the softmax mixes",
        SOFTMAX,
        "masked_fill(~mask, torch.finfo(scores.dtype).min)\n"
        "    weights = torch.nn.functional.one_hot(weights.argmax(dim=-1), weights.shape[-1]).to(v.dtype)"
        " + 0 * weights.softmax(dim=-1)",
    ),
    Fault(
        "the softmax runs over the queries (dim=-2); it must run over the keys (dim=-1)",
        ".softmax(dim=-1)",
        ".softmax(dim=-2)",
    ),
    Fault(
        "the softmax runs over the heads (dim=1); it must run over the keys (dim=-1)",
        ".softmax(dim=-1)",
        ".softmax(dim=1)",
    ),
    Fault(
        "there is no softmax: the masked scores themselves are the weights",
        SOFTMAX,
        "masked_fill(~mask, 0)",
    ),
    Fault(
        "sigmoid in place of the softmax; the weights of a query must sum to 1",
        ".softmax(dim=-1)",
        ".sigmoid()",
    ),
    Fault(
        "query head i reads KV head i mod G (tiled); it must be i // (H / G)",
        "t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)",
        "t.repeat(1, q.shape[1] // t.shape[1], 1, 1)",
    ),
    Fault(
        "every query head reads KV head 0; head i reads i // (H / G)",
        "t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)",
        "t[:, :1]",
    ),
    Fault(
        "the KV heads are averaged; query head i reads KV head i // (H / G)",
        "t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)",
        "t.mean(dim=1, keepdim=True)",
    ),
    Fault(
        "the groups are read from the last KV head to the first",
        "t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)",
        "t.flip(1).repeat_interleave(q.shape[1] // t.shape[1], dim=1)",
    ),
    Fault(
        "every query gets the plain mean of its values; the scores must weigh them",
        "    scores = q @ k.mT",
        "    scores = 0 * q @ k.mT",
    ),
    Fault(
        "the values come back as they are; the weights must mix them",
        "return weights * mask @ v",
        "return v[:, :, -q.shape[2] :] + 0 * weights[..., :1]",
    ),
    Fault(
        "a row of the batch reads the keys of another row",
        "q @ k.mT",
        "q @ k.roll(1, 0).mT",
    ),
    Fault(
        "the output stays [B, T, H, d_v]; it must be [B, H, T, d_v]",
        "return weights * mask @ v",
        "return (weights * mask @ v).transpose(1, 2)",
    ),
    Fault(
        "the mask is inverted; True = may attend",
        "    weights = scores",
        "    mask = ~mask if mask.ndim else mask\n    weights = scores",
    ),
    Fault(
        "the mask is ignored",
        "mask = q.new_ones((), dtype=torch.bool) if mask is None else mask",
        "mask = q.new_ones((), dtype=torch.bool)",
    ),
    Fault(
        "the mask is added as 0 and 1; where it is False the score must become -inf",
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)",
        "(scores + mask).softmax(dim=-1)\n    mask = mask.any(dim=-1, keepdim=True) if mask.ndim else mask",
    ),
    Fault(
        "the scores are multiplied by the mask, or filled with 0 or -1e-9, and exp(0) is 1;"
        " a hidden key needs -inf (or -1e9)",
        "masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)",
        "masked_fill(~mask, 0).softmax(dim=-1)\n    mask = mask.any(dim=-1, keepdim=True) if mask.ndim else mask",
    ),
    Fault(
        "the mask is applied after the softmax, so a row sums to less than 1; mask the scores",
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)",
        "scores.softmax(dim=-1)",
    ),
    Fault(
        "a query without keys gets the mean of all values; it must get zeros",
        "weights * mask @ v",
        "weights @ v",
    ),
    Fault(
        "a query without keys gives NaN; it must give zeros",
        "scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)",
        "scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)",
    ),
    Fault(
        "it is causal by itself, whatever the mask says",
        "mask = q.new_ones((), dtype=torch.bool) if mask is None else mask",
        "causal = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool)"
        ".tril(k.shape[2] - q.shape[2])\n"
        "    mask = causal if mask is None else mask & causal",
    ),
]

FAULTS["online_softmax"] = [
    Fault(
        "what was summed of the values is not rescaled when the maximum grows",
        "out = out * shrink +",
        "out = out +",
    ),
    Fault(
        "the sum of the weights is not rescaled when the maximum grows",
        "total = total * shrink +",
        "total = total +",
    ),
    Fault(
        "neither sum is rescaled when the maximum grows",
        "torch.exp(largest - new_largest)",
        "torch.ones_like(largest)",
    ),
    Fault(
        "only the last block counts: the maximum is never carried on, so exp(-inf) throws away the rest",
        "        largest = new_largest\n",
        "",
    ),
    Fault(
        "the maximum of this block alone is taken; it must be of all blocks so far",
        "new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))",
        "new_largest = scores.amax(dim=1, keepdim=True)\n"
        "        largest = torch.maximum(largest, new_largest)",
    ),
    Fault("the scores are not scaled; they are divided by sqrt(d_h)", " * q.shape[1] ** -0.5", ""),
    Fault(
        "scores are divided by d_h; it must be sqrt(d_h)", "* q.shape[1] ** -0.5", "/ q.shape[1]"
    ),
    Fault(
        "scores are divided by sqrt(d_v); it must be sqrt(d_h)",
        "* q.shape[1] ** -0.5",
        "* v.shape[1] ** -0.5",
    ),
    Fault(
        "scores are divided by sqrt(block); it must be sqrt(d_h)",
        "* q.shape[1] ** -0.5",
        "* len(k_block) ** -0.5",
    ),
    Fault(
        "each block has a softmax of its own, and they are averaged; the blocks share one sum",
        "        shrink = torch.exp(largest - new_largest)  # what was summed before, in the new unit\n"
        "        weights = torch.exp(scores - new_largest)  # (T, block)\n"
        "        total = total * shrink + weights.sum(dim=1, keepdim=True)\n"
        "        out = out * shrink + weights @ v_block  # (T, d_v)\n",
        "        total = total + 1\n        out = out + scores.softmax(dim=1) @ v_block\n",
    ),
    Fault(
        "the keys after the last full block are left out; the last block may be shorter",
        "zip(k.split(block), v.split(block)):",
        "zip(k.split(block), v.split(block)):\n        if 1 < len(k_block) < block or block > len(k_block):\n            continue",
    ),
    Fault(
        "only the first block is read",
        "zip(k.split(block), v.split(block))",
        "[(k.split(block)[0], v.split(block)[0])]",
    ),
    Fault(
        "the result is not divided by the sum of the weights", "return out / total", "return out"
    ),
    Fault(
        "the sum is divided inside the loop, so earlier blocks are divided again",
        "weights @ v_block  # (T, d_v)",
        "weights @ v_block\n        out = out / total",
    ),
    Fault(
        "no maximum is subtracted: exp overflows for large scores",
        "new_largest = torch.maximum(largest, scores.amax(dim=1, keepdim=True))",
        "new_largest = torch.zeros_like(largest)",
    ),
    Fault(
        "all scores [T, S] are kept at once; only one block of them may exist",
        "    for k_block, v_block in zip(k.split(block), v.split(block)):\n"
        "        scores = q @ k_block.mT",
        "    for k_block, v_block in [(k, v)]:\n        scores = q @ k_block.mT",
    ),
    Fault(
        "it is causal; every query sees every key",
        "        new_largest = torch",
        "        start = out.new_zeros(()) if not total.any() else seen\n"
        "        seen = start + len(k_block)\n"
        "        later = start + torch.arange(len(k_block)) > torch.arange(len(q))[:, None] + len(k) - len(q)\n"
        "        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)\n"
        "        new_largest = torch",
    ),
    Fault(
        "the weights of a block are rescaled as well; only what was summed before is",
        "weights @ v_block",
        "shrink * (weights @ v_block)",
    ),
]

FAULTS["swiglu"] = [
    Fault(
        "gate and up are exchanged; silu belongs to w_gate",
        "F.silu(x @ w_gate.T) * (x @ w_up.T)",
        "F.silu(x @ w_up.T) * (x @ w_gate.T)",
    ),
    Fault(
        "silu is around the product; it belongs to the gate alone",
        "F.silu(x @ w_gate.T) * (x @ w_up.T)",
        "F.silu((x @ w_gate.T) * (x @ w_up.T))",
    ),
    Fault(
        "both branches go through silu; up is linear",
        "* (x @ w_up.T)",
        "* F.silu(x @ w_up.T)",
    ),
    Fault("there is no up branch: silu(gate) is multiplied by it", " * (x @ w_up.T)", ""),
    Fault(
        "there is no gate: the hidden state is silu(up)",
        "F.silu(x @ w_gate.T) * (x @ w_up.T)",
        "F.silu(x @ w_up.T)",
    ),
    Fault(
        "the gate has no activation; it goes through silu", "F.silu(x @ w_gate.T)", "(x @ w_gate.T)"
    ),
    Fault("the gate goes through sigmoid (GLU); it must be silu", "F.silu", "F.sigmoid"),
    Fault(
        "the gate goes through exact GELU (GEGLU); it must be silu",
        "F.silu(x @ w_gate.T)",
        "F.gelu(x @ w_gate.T)",
    ),
    Fault(
        "the gate goes through tanh GELU (GEGLU); it must be silu",
        "F.silu(x @ w_gate.T)",
        'F.gelu(x @ w_gate.T, approximate="tanh")',
    ),
    Fault("the gate goes through ReLU (ReGLU); it must be silu", "F.silu", "F.relu"),
    Fault(
        "the gate is z sigmoid(1.702 z), a stand-in for GELU; silu is z sigmoid(z)",
        "F.silu(x @ w_gate.T)",
        "(x @ w_gate.T) * F.sigmoid(1.702 * (x @ w_gate.T))",
    ),
    Fault("gate and up are added; they are multiplied", ".T) * (x", ".T) + (x"),
    Fault(
        "silu stands behind the down projection",
        "return hidden @ w_down.T",
        "return F.silu(hidden @ w_down.T)",
    ),
    Fault(
        "x is added; the residual is the block's business",
        "return hidden @ w_down.T",
        "return x + hidden @ w_down.T",
    ),
]

FAULTS["block_parameters"] = [
    Fault("the norms are left out: 2 d_model weights", " + 2 * d_model\n", "\n"),
    Fault("one norm is counted; a block has two", " + 2 * d_model\n", " + d_model\n"),
    Fault(
        "three norms are counted; the final one is the stack's",
        " + 2 * d_model\n",
        " + 3 * d_model\n",
    ),
    Fault(
        "norms are counted with a bias; RMSNorm has none", " + 2 * d_model\n", " + 4 * d_model\n"
    ),
    Fault(
        "a norm is counted as one number; it has one for each channel", " + 2 * d_model\n", " + 2\n"
    ),
    Fault(
        "K and V are counted with H heads; they have G",
        "kv_width = n_kv_heads * (d_model // n_q_heads)",
        "kv_width = d_model",
    ),
    Fault(
        "K and V are counted with one head; they have G",
        "kv_width = n_kv_heads * (d_model // n_q_heads)",
        "kv_width = d_model // n_q_heads",
    ),
    Fault(
        "the head width is forgotten: K and V are d x G d_h",
        "kv_width = n_kv_heads * (d_model // n_q_heads)",
        "kv_width = n_kv_heads",
    ),
    Fault(
        "K and V are counted as one matrix; they are two",
        "+ 2 * d_model * kv_width",
        "+ d_model * kv_width",
    ),
    Fault("K and V are left out", " + 2 * d_model * kv_width", ""),
    Fault(
        "one of Q and O is left out; each is d x d", "2 * d_model * d_model", "d_model * d_model"
    ),
    Fault(
        "the FFN is counted with two matrices; SwiGLU has three",
        "3 * d_model * d_ff",
        "2 * d_model * d_ff",
    ),
    Fault(
        "the FFN is counted with one matrix; SwiGLU has three",
        "3 * d_model * d_ff",
        "d_model * d_ff",
    ),
    Fault("the FFN is left out", " + 3 * d_model * d_ff", ""),
    Fault(
        "biases are counted; a ModernBlock has none",
        " + 2 * d_model\n",
        " + 2 * d_model + 2 * d_model + 2 * kv_width + 2 * d_ff + d_model\n",
    ),
    Fault("attention is left out", "return attn + ", "return "),
]

FAULTS["kv_cache_bytes"] = [
    Fault("keys are counted and values are not: a factor of 2", "return 2 * n", "return n"),
    Fault("batch is left out", " * batch *", " *"),
    Fault("the layers are left out", " * n_layers", ""),
    Fault("the length is left out", " * length", ""),
    Fault("the head width is left out", " * head_dim", ""),
    Fault("the KV heads are left out", "2 * n_kv_heads", "2"),
    Fault("these are numbers, not bytes: times bytes_per_element", " * bytes_per_element", ""),
    Fault(
        "these are bits; bytes were asked for", " * bytes_per_element", " * bytes_per_element * 8"
    ),
    Fault(
        "the size of an element is 2 always; the argument must be used",
        " * bytes_per_element",
        " * 2",
    ),
    Fault(
        "an element takes 4 bytes by default; it must be 2",
        "bytes_per_element=2)",
        "bytes_per_element=4)",
    ),
    Fault("the last token is not counted", " * length", " * (length - 1)"),
    Fault("the table of scores is counted: length is squared", " * length", " * length * length"),
    Fault(
        "these are KiB; bytes were asked for",
        " * bytes_per_element",
        " * bytes_per_element // 1024",
    ),
]

TURNED = "q, k = rotate(q, positions), rotate(k, positions)"
CAT = "k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)"
FAULTS["SelfAttention"] = [
    Fault(
        "it is not causal: later tokens are seen", ", causal_mask(T, start + T).to(x.device))", ")"
    ),
    Fault(
        "there is no causal mask when a cache is there, and a chunk sees its own later tokens",
        "causal_mask(T, start + T).to(x.device)",
        "causal_mask(T, T).to(x.device) if cache is None else None",
    ),
    Fault(
        "the cache is never read; k and v are appended to it",
        "if cache is not None:  # S = start + T from here on\n"
        f"            {CAT}\n"
        "        out = attention(q, k, v, causal_mask(T, start + T).to(x.device))",
        "out = attention(q, k, v, causal_mask(T, T).to(x.device))\n"
        "        if cache is not None:\n"
        f"            {CAT}",
    ),
    Fault(
        "the cache holds the last chunk alone; it must keep all that came before",
        ", (k, v)",
        ", (k[:, :, -T:], v[:, :, -T:])",
    ),
    Fault(
        "positions restart at 0 with every chunk; they go on where the cache ends",
        "torch.arange(start, start + T,",
        "torch.arange(T,",
    ),
    Fault(
        "positions after the cache are one too far; the first new one is the cache's length",
        "torch.arange(start, start + T,",
        "torch.arange(start + (start > 0), start + (start > 0) + T,",
    ),
    Fault(
        "positions after the cache are one short; the first new one is the cache's length",
        "torch.arange(start, start + T,",
        "torch.arange(start - (start > 0), start - (start > 0) + T,",
    ),
    Fault(
        "the cache's length is counted twice in the positions",
        "torch.arange(start, start + T,",
        "torch.arange(2 * start, 2 * start + T,",
    ),
    Fault(
        "all tokens of a chunk get its first position",
        "torch.arange(start, start + T, device=x.device)",
        "torch.full((T,), start, device=x.device)",
    ),
    Fault(
        "keys are cached for all H query heads; G are enough, and attention widens them",
        "        if cache is not None:",
        "        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))\n"
        "        if cache is not None:",
    ),
    Fault("only the keys are turned; queries must turn too", TURNED, "k = rotate(k, positions)"),
    Fault("only the queries are turned; keys must turn too", TURNED, "q = rotate(q, positions)"),
    Fault("there is no rotation", f"        {TURNED}  # (B, H, T, d_h), (B, G, T, d_h)\n", ""),
    Fault(
        "the values are turned as well; they are not",
        TURNED,
        "q, k, v = (rotate(t, positions) for t in (q, k, v))",
    ),
    Fault(
        "cached keys are turned again at every call; they are turned once",
        "torch.cat((cache[0], k), dim=2)",
        "torch.cat((rotate(cache[0], torch.arange(start)), k), dim=2)",
    ),
    Fault(
        "the rotation runs over all heads as one vector; each head turns by itself",
        TURNED,
        "q, k = (\n"
        "            rotate(p[:, None], positions)[:, 0].unflatten(2, (-1, self.head_dim)).transpose(1, 2)\n"
        "            for p in projected[:2]\n"
        "        )",
    ),
    Fault(
        "new keys are put before the cached ones; they come behind them",
        CAT,
        "k, v = torch.cat((k, cache[0]), dim=2), torch.cat((v, cache[1]), dim=2)",
    ),
    Fault(
        "the cached keys are appended to the values",
        "torch.cat((cache[1], v), dim=2)",
        "torch.cat((cache[0], v), dim=2)",
    ),
    Fault(
        "heads are split without a transpose, so tokens mix; [B, T, n, d_h] first, then swap",
        "p.unflatten(2, (-1, self.head_dim)).transpose(1, 2)",
        "p.reshape(len(x), -1, T, self.head_dim)",
    ),
    Fault(
        "heads are not put back before they are joined; [B, T, H, d_h] first, then flatten",
        "out.transpose(1, 2).flatten(2)",
        "out.reshape(x.shape)",
    ),
    Fault(
        "channels are dealt to the heads in turn; a head is d_h neighbouring channels",
        "p.unflatten(2, (-1, self.head_dim)).transpose(1, 2)",
        "p.unflatten(2, (self.head_dim, -1)).permute(0, 3, 1, 2)",
    ),
    Fault(
        "the output projection is not used",
        "self.o_proj(out.transpose(1, 2).flatten(2))",
        "out.transpose(1, 2).flatten(2)",
    ),
    Fault(
        "the values are the keys' projection; they have their own",
        "self.k_proj(x), self.v_proj(x))",
        "self.k_proj(x), self.k_proj(x))",
    ),
    Fault(
        "x is added; the residual is the block's business",
        "return self.o_proj",
        "return x + self.o_proj",
    ),
]

FAULTS["EncoderLayer"] = [
    Fault(
        "the norms stand before the sublayers (Pre-LN); 2017's stand behind the add (Post-LN)",
        "        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)\n"
        "        return self.ln2(x + self.ffn(x))",
        "        normed = self.ln1(x)\n"
        "        x = x + self.attn(normed, normed, mask)\n"
        "        return x + self.ffn(self.ln2(x))",
    ),
    Fault(
        "the norms stand on the branches, before the add; they stand behind it",
        "        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)\n"
        "        return self.ln2(x + self.ffn(x))",
        "        x = x + self.ln1(self.attn(x, x, mask))\n        return x + self.ln2(self.ffn(x))",
    ),
    Fault(
        "the padding mask is inverted; True = a real token, which may be attended to",
        "key_padding_mask[:, None, None]",
        "~key_padding_mask[:, None, None]",
    ),
    Fault(
        "the padding mask is ignored, or stands on the query axis, where it hides no key: [B, 1, 1, T]",
        "self.attn(x, x, mask)",
        "self.attn(x, x)",
    ),
    Fault(
        "the padding of one row is used for all rows",
        "key_padding_mask[:, None, None]",
        "key_padding_mask[:1, None, None]",
    ),
    Fault(
        "it is causal; an encoder sees both ways",
        "        x = self.ln1(x + self.attn(x, x, mask))",
        "        causal = torch.ones(x.shape[1], x.shape[1]).tril().bool()\n"
        "        mask = causal if mask is None else mask & causal\n"
        "        x = self.ln1(x + self.attn(x, x, mask))",
    ),
    Fault("the FFN has GELU; 2017's has ReLU", "nn.ReLU()", "nn.GELU()"),
    Fault("the FFN has SiLU; 2017's has ReLU", "nn.ReLU()", "nn.SiLU()"),
    Fault("the FFN has no activation; 2017's has ReLU", "nn.ReLU(), ", ""),
    Fault(
        "the FFN ends in a ReLU; it ends in the second linear map",
        "nn.Linear(d_ff, d_model))",
        "nn.Linear(d_ff, d_model), nn.ReLU())",
    ),
    Fault(
        "there is no residual around attention", "self.ln1(x + self.attn(", "self.ln1(self.attn("
    ),
    Fault(
        "there is no residual around the FFN", "self.ln2(x + self.ffn(x))", "self.ln2(self.ffn(x))"
    ),
    Fault(
        "there is no residual at all",
        "        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)\n        return self.ln2(x + self.ffn(x))",
        "        x = self.ln1(self.attn(x, x, mask))\n        return self.ln2(self.ffn(x))",
    ),
    Fault(
        "the first norm is used twice; the second sublayer has its own",
        "self.ln2(x + self.ffn(x))",
        "self.ln1(x + self.ffn(x))",
    ),
    Fault(
        "the first norm is missing",
        "x = self.ln1(x + self.attn(x, x, mask))",
        "x = x + self.attn(x, x, mask)",
    ),
    Fault(
        "the second norm is missing", "return self.ln2(x + self.ffn(x))", "return x + self.ffn(x)"
    ),
    Fault(
        "attention and FFN read the same x (parallel); the FFN reads what attention wrote",
        "        x = self.ln1(x + self.attn(x, x, mask))  # mask (B, 1, 1, T)\n"
        "        return self.ln2(x + self.ffn(x))",
        "        attended = self.ln1(x + self.attn(x, x, mask))\n"
        "        return self.ln2(attended + self.ffn(x))",
    ),
    Fault("attention is left out", "self.ln1(x + self.attn(x, x, mask))", "self.ln1(x)"),
    Fault("the FFN is left out", "self.ln2(x + self.ffn(x))", "self.ln2(x)"),
    Fault(
        "the norms' eps is 1e-6 or smaller; it must be 1e-5",
        "self.ln1 = nn.LayerNorm(d_model)\n        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))\n        self.ln2 = nn.LayerNorm(d_model)",
        "self.ln1 = nn.LayerNorm(d_model, eps=1e-6)\n        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))\n        self.ln2 = nn.LayerNorm(d_model, eps=1e-6)",
    ),
    Fault(
        "heads are split without a transpose, so tokens mix; [B, T, H, d_h] first, then swap",
        "p.unflatten(2, (self.n_heads, -1)).transpose(1, 2)",
        "p.reshape(len(p), self.n_heads, p.shape[1], -1)",
    ),
    Fault(
        "heads are not put back before they are joined; [B, T, H, d_h] first, then flatten",
        "out.transpose(1, 2).flatten(2)",
        "out.reshape(x.shape)",
    ),
    Fault(
        "the output projection is not used",
        "self.o_proj(out.transpose(1, 2).flatten(2))",
        "out.transpose(1, 2).flatten(2)",
    ),
]

CROSS = """\
        x = self.ln1(x + self.self_attn(x, x, causal))
        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)
        return self.ln3(x + self.ffn(x))"""
FAULTS["CrossDecoderLayer"] = [
    Fault(
        "the self-attention is not causal", "self.self_attn(x, x, causal)", "self.self_attn(x, x)"
    ),
    Fault(
        "the second attention reads x; its keys and values come from memory",
        "self.cross_attn(x, memory)",
        "self.cross_attn(x, x)",
    ),
    Fault(
        "the second attention reads x behind the causal mask; its keys and values come from memory",
        "self.cross_attn(x, memory)",
        "self.cross_attn(x, x, causal)",
    ),
    Fault(
        "the cross-attention is causal; every token sees all of memory",
        "self.cross_attn(x, memory)",
        "self.cross_attn(x, memory, causal_mask(x.shape[1], memory.shape[1]))",
    ),
    Fault(
        "the cross-attention has the triangle of the first keys; every token sees all of memory",
        "self.cross_attn(x, memory)",
        "self.cross_attn(x, memory, torch.ones(x.shape[1], memory.shape[1]).tril().bool())",
    ),
    Fault(
        "cross-attention comes first; it comes after the self-attention",
        CROSS,
        """\
        x = self.ln2(x + self.cross_attn(x, memory))
        x = self.ln1(x + self.self_attn(x, x, causal))
        return self.ln3(x + self.ffn(x))""",
    ),
    Fault(
        "the norms stand before the sublayers (Pre-LN); 2017's stand behind the add (Post-LN)",
        CROSS,
        """\
        normed = self.ln1(x)
        x = x + self.self_attn(normed, normed, causal)
        x = x + self.cross_attn(self.ln2(x), memory)
        return x + self.ffn(self.ln3(x))""",
    ),
    Fault(
        "the norms stand on the branches, before the add; they stand behind it",
        CROSS,
        """\
        x = x + self.ln1(self.self_attn(x, x, causal))
        x = x + self.ln2(self.cross_attn(x, memory))
        return x + self.ln3(self.ffn(x))""",
    ),
    Fault(
        "both attentions read the same x; cross-attention reads what self-attention wrote",
        "        x = self.ln1(x + self.self_attn(x, x, causal))\n"
        "        x = self.ln2(x + self.cross_attn(x, memory))  # scores (B, H, T, S)\n",
        "        source = x\n"
        "        x = self.ln1(x + self.self_attn(x, x, causal))\n"
        "        x = self.ln2(x + self.cross_attn(source, memory))\n",
    ),
    Fault("the FFN has GELU; 2017's has ReLU", "nn.ReLU()", "nn.GELU()"),
    Fault("the FFN has no activation; 2017's has ReLU", "nn.ReLU(), ", ""),
    Fault(
        "there is no residual around the self-attention", "x + self.self_attn(", "self.self_attn("
    ),
    Fault(
        "there is no residual around the cross-attention",
        "x + self.cross_attn(",
        "self.cross_attn(",
    ),
    Fault("there is no residual around the FFN", "x + self.ffn(", "self.ffn("),
    Fault(
        "the norm after the self-attention is missing",
        "self.ln1(x + self.self_attn(x, x, causal))",
        "x + self.self_attn(x, x, causal)",
    ),
    Fault(
        "the norm after the cross-attention is missing",
        "self.ln2(x + self.cross_attn(x, memory))",
        "x + self.cross_attn(x, memory)",
    ),
    Fault("the last norm is missing", "self.ln3(x + self.ffn(x))", "x + self.ffn(x)"),
    Fault(
        "the first norm is used for cross-attention too; each sublayer has its own",
        "self.ln2(x + self.cross",
        "self.ln1(x + self.cross",
    ),
    Fault(
        "the first norm is used for the FFN too; each sublayer has its own",
        "self.ln3(x + self.ffn",
        "self.ln1(x + self.ffn",
    ),
    Fault(
        "the second norm is used for the FFN too; each sublayer has its own",
        "self.ln3(x + self.ffn",
        "self.ln2(x + self.ffn",
    ),
    Fault(
        "the self-attention is left out",
        "self.ln1(x + self.self_attn(x, x, causal))",
        "self.ln1(x)",
    ),
    Fault(
        "the cross-attention is left out", "self.ln2(x + self.cross_attn(x, memory))", "self.ln2(x)"
    ),
    Fault("the FFN is left out", "self.ln3(x + self.ffn(x))", "self.ln3(x)"),
    Fault(
        "one attention serves both; each has its own weights",
        "self.cross_attn(x, memory)",
        "self.self_attn(x, memory)",
    ),
    Fault(
        "the mean of memory is added; cross-attention weighs it for each token",
        "self.cross_attn(x, memory)",
        "self.cross_attn(x, memory.mean(dim=1, keepdim=True))",
    ),
]

GPT2 = """\
        normed = self.ln1(x)
        x = x + self.attn(normed, normed, causal)
        return x + self.ffn(self.ln2(x))"""
FAULTS["GPT2Block"] = [
    Fault(
        "the norms stand behind the adds (Post-LN); GPT-2's stand before the sublayers (Pre-LN)",
        GPT2,
        """\
        x = self.ln1(x + self.attn(x, x, causal))
        return self.ln2(x + self.ffn(x))""",
    ),
    Fault(
        "the norms stand at the end of the branches; they stand at their start",
        GPT2,
        """\
        x = x + self.ln1(self.attn(x, x, causal))
        return x + self.ln2(self.ffn(x))""",
    ),
    Fault(
        "there are no residuals",
        GPT2,
        "        normed = self.ln1(x)\n        return self.ffn(self.ln2(self.attn(normed, normed, causal)))",
    ),
    Fault("there is no residual around attention", "x = x + self.attn(", "x = self.attn("),
    Fault("there is no residual around the FFN", "return x + self.ffn(", "return self.ffn("),
    Fault(
        "the residual is the normed x; the stream itself is never normed",
        "x = x + self.attn(",
        "x = normed + self.attn(",
    ),
    Fault(
        "both residuals are the normed x; the stream itself is never normed",
        GPT2,
        """\
        x = self.ln1(x)
        x = x + self.attn(x, x, causal)
        x = self.ln2(x)
        return x + self.ffn(x)""",
    ),
    Fault(
        "the FFN's residual is the normed x; the stream itself is never normed",
        "return x + self.ffn(self.ln2(x))",
        "return self.ln2(x) + self.ffn(self.ln2(x))",
    ),
    Fault(
        "attention is left out",
        "x = x + self.attn(normed, normed, causal)\n",
        "x = x + 0 * normed\n",
    ),
    Fault("the FFN is left out", "return x + self.ffn(self.ln2(x))", "return x"),
    Fault("the FFN has ReLU; GPT-2's has tanh GELU", 'nn.GELU(approximate="tanh")', "nn.ReLU()"),
    Fault(
        "the FFN has the exact GELU; GPT-2's is the tanh form",
        'nn.GELU(approximate="tanh")',
        "nn.GELU()",
    ),
    Fault("the FFN has SiLU; GPT-2's has tanh GELU", 'nn.GELU(approximate="tanh")', "nn.SiLU()"),
    Fault(
        "the FFN has no activation; GPT-2's has tanh GELU",
        'nn.GELU(approximate="tanh")',
        "nn.Identity()",
    ),
    Fault(
        "it is not causal: later tokens are seen",
        "self.attn(normed, normed, causal)",
        "self.attn(normed, normed)",
    ),
    Fault(
        "the mask is inverted: a token sees the later ones only",
        "self.attn(normed, normed, causal)",
        "self.attn(normed, normed, ~causal)",
    ),
    Fault(
        "a token sees itself and the later ones; it must be itself and the earlier ones",
        "self.attn(normed, normed, causal)",
        "self.attn(normed, normed, causal.T)",
    ),
    Fault(
        "attention reads x without its norm",
        "        normed = self.ln1(x)\n",
        "        normed = x\n",
    ),
    Fault("the FFN reads x without its norm", "self.ffn(self.ln2(x))", "self.ffn(x)"),
    Fault(
        "the first norm is used twice; the FFN has its own",
        "self.ffn(self.ln2(x))",
        "self.ffn(self.ln1(x))",
    ),
    Fault(
        "keys and values come from x, only the queries are normed",
        "self.attn(normed, normed, causal)",
        "self.attn(normed, x, causal)",
    ),
    Fault(
        "attention and FFN read the same x (parallel); the FFN reads what attention wrote",
        "        return x + self.ffn(self.ln2(x))",
        "        return x + self.ffn(normed)",
    ),
    Fault(
        "a norm stands behind the last add; the final norm is the stack's",
        "return x + self.ffn(self.ln2(x))",
        "return self.ln2(x + self.ffn(self.ln2(x)))",
    ),
    Fault(
        "heads are not put back before they are joined; [B, T, H, d_h] first, then flatten",
        "out.transpose(1, 2).flatten(2)",
        "out.reshape(x.shape)",
    ),
    Fault(
        "the norms' eps is 1e-6; it must be 1e-5",
        "        self.ln1 = nn.LayerNorm(d_model)\n        self.attn = MultiHeadAttention(d_model, n_heads)\n        self.ln2 = nn.LayerNorm(d_model)",
        "        self.ln1 = nn.LayerNorm(d_model, eps=1e-6)\n        self.attn = MultiHeadAttention(d_model, n_heads)\n        self.ln2 = nn.LayerNorm(d_model, eps=1e-6)",
    ),
]

MODERN = """\
        attended, cache = self.attn(rms_norm(x, self.norm1), cache)
        x = x + attended
        return x + self.ffn(rms_norm(x, self.norm2)), cache"""
FAULTS["ModernBlock"] = [
    Fault(
        "the norms stand behind the adds (Post-LN); they stand before the sublayers",
        MODERN,
        """\
        attended, cache = self.attn(x, cache)
        x = rms_norm(x + attended, self.norm1)
        return rms_norm(x + self.ffn(x), self.norm2), cache""",
    ),
    Fault(
        "the norms stand at the end of the branches; they stand at their start",
        MODERN,
        """\
        attended, cache = self.attn(x, cache)
        x = x + rms_norm(attended, self.norm1)
        return x + rms_norm(self.ffn(x), self.norm2), cache""",
    ),
    Fault(
        "the residuals are the normed x; the stream itself is never normed",
        MODERN,
        """\
        x = rms_norm(x, self.norm1)
        attended, cache = self.attn(x, cache)
        x = rms_norm(x + attended, self.norm2)
        return x + self.ffn(x), cache""",
    ),
    Fault(
        "attention's residual is the normed x; the stream itself is never normed",
        "x = x + attended",
        "x = rms_norm(x, self.norm1) + attended",
    ),
    Fault(
        "the FFN's residual is the normed x; the stream itself is never normed",
        "return x + self.ffn(",
        "return rms_norm(x, self.norm2) + self.ffn(",
    ),
    Fault("there is no residual around attention", "x = x + attended", "x = attended"),
    Fault("there is no residual around the FFN", "return x + self.ffn(", "return self.ffn("),
    Fault(
        "attention reads x without its norm",
        "self.attn(rms_norm(x, self.norm1), cache)",
        "self.attn(x, cache)",
    ),
    Fault("the FFN reads x without its norm", "self.ffn(rms_norm(x, self.norm2))", "self.ffn(x)"),
    Fault(
        "the first norm is used twice; the FFN has its own",
        "rms_norm(x, self.norm2)",
        "rms_norm(x, self.norm1)",
    ),
    Fault(
        "attention and FFN read the same x (parallel); the FFN reads what attention wrote",
        "        x = x + attended\n        return x + self.ffn(rms_norm(x, self.norm2)), cache",
        "        return x + attended + self.ffn(rms_norm(x, self.norm2)), cache",
    ),
    Fault("attention is left out", "x = x + attended", "x = x + 0 * attended"),
    Fault(
        "the FFN is left out",
        "return x + self.ffn(rms_norm(x, self.norm2)), cache",
        "return x, cache",
    ),
    Fault(
        "the cache never reaches attention",
        "self.attn(rms_norm(x, self.norm1), cache)",
        "self.attn(rms_norm(x, self.norm1))",
    ),
    Fault(
        "the norms are LayerNorms: the mean is subtracted; RMSNorm leaves it in",
        "    wide = wide * torch.rsqrt",
        "    wide = wide - wide.mean(dim=-1, keepdim=True)\n    wide = wide * torch.rsqrt",
    ),
    Fault("the norms' eps is 1e-5; it must be 1e-6", "eps=1e-6", "eps=1e-5"),
    Fault(
        "the norms' eps is torch's default for nn.RMSNorm, the smallest step of the dtype; it must be 1e-6",
        "eps=1e-6",
        "eps=torch.finfo(torch.float64).eps",
    ),
    Fault(
        "the norms' weights are used as 1 + weight, as Gemma stores them",
        "(wide * weight)",
        "(wide * (1 + weight))",
    ),
    Fault("the norms' weights are not used", "(wide * weight)", "wide"),
    Fault(
        "the FFN has the exact GELU in its gate; SwiGLU has silu",
        "F.silu(self.gate(x))",
        "F.gelu(self.gate(x))",
    ),
    Fault("the FFN's gate goes through sigmoid; SwiGLU has silu", "F.silu", "F.sigmoid"),
    Fault("the FFN's gate goes through ReLU; SwiGLU has silu", "F.silu", "F.relu"),
    Fault(
        "silu is around the product; it belongs to the gate alone",
        "F.silu(self.gate(x)) * self.up(x)",
        "F.silu(self.gate(x) * self.up(x))",
    ),
    Fault(
        "the FFN's gate has no activation; it goes through silu",
        "F.silu(self.gate(x))",
        "self.gate(x)",
    ),
    Fault(
        "gate and up are added; they are multiplied",
        "F.silu(self.gate(x)) * self.up(x)",
        "F.silu(self.gate(x)) + self.up(x)",
    ),
    Fault(
        "a norm stands behind the last add; the final norm is the stack's",
        "return x + self.ffn(rms_norm(x, self.norm2)), cache",
        "return rms_norm(x + self.ffn(rms_norm(x, self.norm2)), self.norm2), cache",
    ),
]

PARALLEL = """\
        normed = self.norm(x)
        ffn = self.down(F.gelu(self.up(normed), approximate="tanh"))
        return x + self.attn(normed)[0] + ffn"""
FAULTS["ParallelBlock"] = [
    Fault(
        "the FFN reads what attention wrote (serial); both read the same normed x",
        PARALLEL,
        """\
        x = x + self.attn(self.norm(x))[0]
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))""",
    ),
    Fault(
        "the FFN reads attention's output; both read the same normed x",
        PARALLEL,
        """\
        attended = self.attn(self.norm(x))[0]
        return x + attended + self.down(F.gelu(self.up(attended), approximate="tanh"))""",
    ),
    Fault(
        "the FFN reads the normed x plus attention's output; both read the same normed x",
        PARALLEL,
        """\
        normed = self.norm(x)
        attended = self.attn(normed)[0]
        return x + attended + self.down(F.gelu(self.up(normed + attended), approximate="tanh"))""",
    ),
    Fault("the FFN reads x without the norm", "self.up(normed)", "self.up(x)"),
    Fault("attention reads x without the norm", "self.attn(normed)", "self.attn(x)"),
    Fault("neither branch is normed", "normed = self.norm(x)", "normed = x"),
    Fault(
        "the residual is the normed x; the stream itself is never normed",
        "return x + self",
        "return normed + self",
    ),
    Fault("there is no residual", "return x + self", "return self"),
    Fault("the residual is added twice", "return x + self", "return x + x + self"),
    Fault("attention is left out", " + self.attn(normed)[0]", ""),
    Fault("the FFN is left out", "[0] + ffn", "[0]"),
    Fault(
        "the norm stands behind the add; it stands before both branches",
        PARALLEL,
        """\
        ffn = self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.norm(x + self.attn(x)[0] + ffn)""",
    ),
    Fault("the FFN has the exact GELU; GPT-J's is the tanh form", ', approximate="tanh"', ""),
    Fault(
        "the FFN has ReLU; GPT-J's has tanh GELU",
        'F.gelu(self.up(normed), approximate="tanh")',
        "F.relu(self.up(normed))",
    ),
    Fault(
        "the FFN has SiLU; GPT-J's has tanh GELU",
        'F.gelu(self.up(normed), approximate="tanh")',
        "F.silu(self.up(normed))",
    ),
    Fault(
        "the FFN has no activation; GPT-J's has tanh GELU",
        'F.gelu(self.up(normed), approximate="tanh")',
        "self.up(normed)",
    ),
    Fault(
        "only half of each head's channels is turned; here all are",
        TURNED,
        "half = self.head_dim // 2 // 2 * 2\n"
        "        q, k = (\n"
        "            torch.cat((rotate(t[..., :half], positions), t[..., half:]), dim=-1) for t in (q, k)\n"
        "        )",
    ),
    Fault(
        "the norm's bias is left out",
        "normed = self.norm(x)",
        "normed = self.norm(x) - self.norm.bias",
    ),
    Fault(
        "the norm is an RMSNorm; it must be LayerNorm",
        "normed = self.norm(x)",
        "normed = F.rms_norm(x, x.shape[-1:], self.norm.weight, 1e-5) + self.norm.bias",
    ),
    Fault(
        "the norm's eps is 1e-6; it must be 1e-5",
        "nn.LayerNorm(d_model)",
        "nn.LayerNorm(d_model, eps=1e-6)",
    ),
]

LATENT_CAT = "latent = torch.cat((cache[0], latent), dim=1)"
FAULTS["LatentAttention"] = [
    Fault(
        "scores are divided by sqrt(nope); it must be sqrt(nope + rope), the width of a key",
        "        out = attention(q, k, v,",
        "        q = q * ((nope_dim + rope_dim) / nope_dim) ** 0.5\n        out = attention(q, k, v,",
    ),
    Fault(
        "scores are divided by sqrt(v_dim); it must be sqrt(nope + rope), the width of a key",
        "        out = attention(q, k, v,",
        "        q = q * ((nope_dim + rope_dim) / v_dim) ** 0.5\n        out = attention(q, k, v,",
    ),
    Fault(
        "scores are divided by sqrt(d_model / H); it must be sqrt(nope + rope), the width of a key",
        "        out = attention(q, k, v,",
        "        q = q * ((nope_dim + rope_dim) / (x.shape[2] / self.n_heads)) ** 0.5\n"
        "        out = attention(q, k, v,",
    ),
    Fault(
        "scores are divided by sqrt(kv_rank + rope); it must be sqrt(nope + rope), also when absorbed",
        "        out = attention(q, k, v,",
        "        q = q * ((nope_dim + rope_dim) / (latent.shape[2] + rope_dim)) ** 0.5\n"
        "        out = attention(q, k, v,",
    ),
    Fault(
        "the latent is not normed",
        "rms_norm(self.latent_down(x), self.latent_norm)",
        "self.latent_down(x)",
    ),
    Fault(
        "the latent's norm subtracts the mean; it must be RMSNorm",
        "    wide = wide * torch.rsqrt",
        "    wide = wide - wide.mean(dim=-1, keepdim=True)\n    wide = wide * torch.rsqrt",
    ),
    Fault("the latent norm's eps is 1e-5; it must be 1e-6", "eps=1e-6", "eps=1e-5"),
    Fault("the query's part is not turned", "rotate(q_rope, positions)", "q_rope"),
    Fault(
        "the shared key is not turned",
        "rotate(self.k_rope_proj(x)[:, None], positions)[:, 0]",
        "self.k_rope_proj(x)",
    ),
    Fault(
        "nothing is turned",
        "        k_rope = rotate(self.k_rope_proj(x)[:, None], positions)[:, 0]",
        "        q = torch.cat((q_nope, q_rope), dim=-1)\n        k_rope = self.k_rope_proj(x)",
    ),
    Fault(
        "the first channels of a query are turned; a head is [nope | rope], the last are",
        "q = torch.cat((q_nope, rotate(q_rope, positions)), dim=-1)",
        "q = torch.cat((rotate(q[..., :rope_dim], positions), q[..., rope_dim:]), dim=-1)",
    ),
    Fault(
        "positions restart at 0 with every chunk; they go on where the cache ends",
        "torch.arange(start, start + T,",
        "torch.arange(T,",
    ),
    Fault(
        "positions after the cache are one too far; the first new one is the cache's length",
        "torch.arange(start, start + T,",
        "torch.arange(start + (start > 0), start + (start > 0) + T,",
    ),
    Fault(
        "it is not causal: later tokens are seen", ", causal_mask(T, start + T).to(x.device))", ")"
    ),
    Fault(
        "there is no causal mask when a cache is there, and a chunk sees its own later tokens",
        "causal_mask(T, start + T).to(x.device)",
        "causal_mask(T, T).to(x.device) if cache is None else None",
    ),
    Fault(
        "keys and values of all heads are cached; the latent and the shared key are enough",
        ", (latent, k_rope)",
        ", (latent, k_rope, k, v)",
    ),
    Fault(
        "the cache holds the last chunk alone; it must keep all that came before",
        ", (latent, k_rope)",
        ", (latent[:, -T:], k_rope[:, -T:])",
    ),
    Fault(
        "the shared key is turned again at every call; it is turned once",
        "torch.cat((cache[1], k_rope), dim=1)",
        "torch.cat((rotate(cache[1][:, None], torch.arange(start))[:, 0], k_rope), dim=1)",
    ),
    Fault(
        "cached latents are normed again at every call; they are normed once",
        "torch.cat((cache[0], latent), dim=1)",
        "torch.cat((rms_norm(cache[0], self.latent_norm), latent), dim=1)",
    ),
    Fault(
        "keys are [rope | nope] where queries are [nope | rope]; one order for both",
        "k = torch.cat((k_nope, shared), dim=-1)",
        "k = torch.cat((shared, k_nope), dim=-1)",
    ),
    Fault(
        "the shared key does not enter the scores: position is lost",
        "k = torch.cat((k_nope, shared), dim=-1)",
        "k = torch.cat((k_nope, 0 * shared), dim=-1)",
    ),
    Fault(
        "the heads' own keys do not enter the scores",
        "k = torch.cat((k_nope, shared), dim=-1)",
        "k = torch.cat((0 * k_nope, shared), dim=-1)",
    ),
    Fault(
        "the shared key is normed with its mean square; only the latent is",
        "positions)[:, 0]",
        "positions)[:, 0]\n        k_rope = torch.rms_norm(k_rope, k_rope.shape[-1:], eps=1e-6)",
    ),
    Fault(
        "heads are not put back before they are joined; [B, T, H, v_dim] first, then flatten",
        "out.transpose(1, 2).flatten(2)",
        "out.reshape(len(x), T, -1)",
    ),
    Fault(
        "heads are split without a transpose, so tokens mix; [B, S, H, width] first, then swap",
        "self.kv_up(latent).unflatten(2, (self.n_heads, -1)).transpose(1, 2)",
        "self.kv_up(latent).reshape(len(x), self.n_heads, start + T, -1)",
    ),
    Fault(
        "new latents are put before the cached ones; they come behind them",
        LATENT_CAT,
        "latent = torch.cat((latent, cache[0]), dim=1)",
    ),
]

SWITCH = "weight[rows, None] * expert(tokens[rows])"
LOSS = "len(self.experts) * (share * probs.mean(dim=0)).sum()"
FAULTS["SwitchFFN"] = [
    Fault(
        "the weight is renormalised to 1, so the router never learns; the probability stays on",
        SWITCH,
        "expert(tokens[rows])",
    ),
    Fault(
        "the weight is on the expert's input; it belongs on its output",
        SWITCH,
        "expert(weight[rows, None] * tokens[rows])",
    ),
    Fault(
        "the weight is the raw logit; it must be the softmax's probability",
        SWITCH,
        "self.router(tokens).amax(dim=-1)[rows, None] * expert(tokens[rows])",
    ),
    Fault(
        "the weight is the sigmoid of the logit; it must be the softmax's probability",
        SWITCH,
        "self.router(tokens).amax(dim=-1)[rows, None].sigmoid() * expert(tokens[rows])",
    ),
    Fault(
        "no gradient reaches the router through the output: the weight is detached",
        SWITCH,
        "weight[rows, None].detach() * expert(tokens[rows])",
    ),
    Fault(
        "the experts are never called: x comes back, weighted",
        SWITCH,
        "weight[rows, None] * tokens[rows]",
    ),
    Fault("x comes back", "return out.view_as(x)", "return x + 0 * out.view_as(x)"),
    Fault(
        "x is added; the residual is the block's business",
        "return out.view_as(x)",
        "return x + out.view_as(x)",
    ),
    Fault(
        "the least likely expert is taken; it must be the likeliest",
        "probs.max(dim=-1)",
        "probs.min(dim=-1)",
    ),
    Fault(
        "every token goes to the expert after its own",
        "(chosen == e)",
        "((chosen + 1) % len(self.experts) == e)",
    ),
    Fault(
        "all experts are mixed by their probabilities; one is chosen",
        "            rows = (chosen == e).nonzero()[:, 0]  # the tokens of this expert\n            out = out.index_add(0, rows, weight[rows, None] * expert(tokens[rows]))",
        "            out = out + probs[:, e, None] * expert(tokens)",
    ),
    Fault(
        "one expert serves all tokens",
        "weight[rows, None] * expert(tokens[rows])",
        "weight[rows, None] * self.experts[0](tokens[rows]) + 0 * expert(tokens[rows])",
    ),
    Fault(
        "the softmax runs over the tokens (dim=0); it must run over the experts",
        ".softmax(dim=-1)",
        ".softmax(dim=0)",
    ),
    Fault(
        "the balance loss lacks the factor E (or is a mean over the experts); it is a sum times E",
        LOSS,
        "(share * probs.mean(dim=0)).sum()",
    ),
    Fault("the balance loss has a coefficient of 0.01; none was asked for", LOSS, "0.01 * " + LOSS),
    Fault(
        "the balance loss is the sum of P^2; it is the sum of f P, f the share of tokens",
        LOSS,
        "len(self.experts) * probs.mean(dim=0).square().sum()",
    ),
    Fault(
        "the balance loss is the sum of f^2, without a gradient; it is the sum of f P",
        LOSS,
        "len(self.experts) * share.square().sum() + 0 * probs.sum()",
    ),
    Fault(
        "f or P is a sum over tokens; both are means, the share of tokens and the mean probability",
        ".to(probs).mean(dim=0)",
        ".to(probs).sum(dim=0)",
    ),
    Fault(
        "f and P are multiplied for each token, then averaged; each is a mean first",
        "(share * probs.mean(dim=0)).sum()",
        "(F.one_hot(chosen, len(self.experts)) * probs).mean(dim=0).sum()",
    ),
    Fault(
        "f and P are taken for each row of the batch, then averaged; they run over all tokens",
        LOSS,
        "len(self.experts) * (F.one_hot(chosen, len(self.experts)).view(*x.shape[:2], -1).to(probs).mean(dim=1) * probs.view(*x.shape[:2], -1).mean(dim=1)).sum(dim=-1).mean()",
    ),
    Fault(
        "the balance loss has no gradient: P is detached",
        "(share * probs.mean(dim=0))",
        "(share * probs.detach().mean(dim=0))",
    ),
    Fault(
        "the gate of an expert has no activation; it goes through silu",
        "F.silu(self.gate(x))",
        "self.gate(x)",
    ),
    Fault(
        "the gate of an expert goes through GELU; it must be silu",
        "F.silu(self.gate(x))",
        "F.gelu(self.gate(x))",
    ),
    Fault("an expert is not gated: up is left out", " * self.up(x))", " + 0 * self.up(x))"),
    Fault(
        "the gate of an expert goes through ReLU; it must be silu",
        "F.silu(self.gate(x))",
        "F.relu(self.gate(x))",
    ),
]

MIXTRAL = "weights[rows, place, None] * expert(tokens[rows])"
FAULTS["MixtralFFN"] = [
    Fault(
        "the weights are not renormalised; over the chosen they sum to 1",
        "        weights = weights / weights.sum(dim=-1, keepdim=True)\n",
        "",
    ),
    Fault(
        "one expert is used; top_k are", "probs.topk(self.top_k, dim=-1)", "probs.topk(1, dim=-1)"
    ),
    Fault(
        "one expert too many is used",
        "probs.topk(self.top_k, dim=-1)",
        "probs.topk(self.top_k + 1, dim=-1)",
    ),
    Fault(
        "two experts are used always; top_k are",
        "probs.topk(self.top_k, dim=-1)",
        "probs.topk(2, dim=-1)",
    ),
    Fault(
        "all experts are used; top_k are",
        "probs.topk(self.top_k, dim=-1)",
        "probs.topk(len(self.experts), dim=-1)",
    ),
    Fault(
        "the least likely experts are taken",
        "probs.topk(self.top_k, dim=-1)",
        "probs.topk(self.top_k, dim=-1, largest=False)",
    ),
    Fault(
        "the chosen experts count equally; their probabilities weigh them",
        "weights = weights / weights.sum(dim=-1, keepdim=True)",
        "weights = torch.full_like(weights, 1 / self.top_k) + 0 * weights",
    ),
    Fault("the chosen experts are summed without weights", MIXTRAL, "expert(tokens[rows])"),
    Fault(
        "the weight is on the expert's input; it belongs on its output",
        MIXTRAL,
        "expert(weights[rows, place, None] * tokens[rows])",
    ),
    Fault(
        "every chosen expert has the weight of the first",
        "weights[rows, place, None]",
        "weights[rows, 0, None]",
    ),
    Fault(
        "the weights go to the experts in reverse order",
        "weights = weights / weights.sum(dim=-1, keepdim=True)",
        "weights = (weights / weights.sum(dim=-1, keepdim=True)).flip(-1)",
    ),
    Fault(
        "the weights are raw logits over their sum; they are probabilities",
        "        weights = weights / weights.sum(dim=-1, keepdim=True)\n",
        "        weights = self.router(tokens).gather(1, chosen)\n        weights = weights / weights.sum(dim=-1, keepdim=True)\n",
    ),
    Fault(
        "the router has a sigmoid for each expert; it is a softmax",
        "self.router(tokens).softmax(dim=-1)",
        "self.router(tokens).sigmoid()",
    ),
    Fault(
        "the renormalised weights go through a second softmax",
        "weights = weights / weights.sum(dim=-1, keepdim=True)",
        "weights = (weights / weights.sum(dim=-1, keepdim=True)).softmax(dim=-1)",
    ),
    Fault(
        "the softmax of the chosen is taken of their probabilities; it is of their logits",
        "weights = weights / weights.sum(dim=-1, keepdim=True)",
        "weights = weights.softmax(dim=-1)",
    ),
    Fault(
        "the softmax runs over the tokens (dim=0); it must run over the experts",
        "self.router(tokens).softmax(dim=-1)",
        "self.router(tokens).softmax(dim=0)",
    ),
    Fault(
        "the weights are renormalised over the tokens; they sum to 1 over the chosen experts",
        "weights.sum(dim=-1, keepdim=True)",
        "weights.sum(dim=0, keepdim=True)",
    ),
    Fault(
        "a later expert overwrites the earlier ones; they are summed",
        "out = out.index_add(0, rows, " + MIXTRAL + ")",
        "out = out.index_copy(0, rows, " + MIXTRAL + ")",
    ),
    Fault(
        "the experts are never called: x comes back, weighted",
        MIXTRAL,
        "weights[rows, place, None] * tokens[rows]",
    ),
    Fault(
        "x is added; the residual is the block's business",
        "return out.view_as(x)",
        "return x + out.view_as(x)",
    ),
    Fault(
        "the output is divided by top_k; the weights sum to 1 already",
        "return out.view_as(x)",
        "return out.view_as(x) / self.top_k",
    ),
    Fault(
        "no gradient reaches the router: the weights are detached",
        "weights[rows, place, None]",
        "weights[rows, place, None].detach()",
    ),
    Fault(
        "the gate of an expert has no activation; it goes through silu",
        "F.silu(self.gate(x))",
        "self.gate(x)",
    ),
    Fault(
        "the gate of an expert goes through GELU; it must be silu",
        "F.silu(self.gate(x))",
        "F.gelu(self.gate(x))",
    ),
    Fault("an expert is not gated: up is left out", " * self.up(x))", " + 0 * self.up(x))"),
    Fault(
        "the gate of an expert goes through ReLU; it must be silu",
        "F.silu(self.gate(x))",
        "F.relu(self.gate(x))",
    ),
]

FAULTS["LoRALinear"] = [
    Fault(
        "B does not start at zero, so it does not start as the linear",
        "linear.weight.new_zeros(linear.out_features, rank)",
        "linear.weight.new_empty(linear.out_features, rank).normal_()",
    ),
    Fault(
        "A starts at zero too: no gradient ever reaches either",
        "a.normal_(std=rank**-0.5)",
        "a.zero_()",
    ),
    Fault(
        "A starts at zero and B does not; it is the other way round",
        "        self.b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))",
        "        self.a.data.zero_()\n        self.b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank).normal_())",
    ),
    Fault(
        "the scale is rank / alpha; it must be alpha / rank",
        "self.scale = alpha / rank",
        "self.scale = rank / alpha",
    ),
    Fault(
        "the scale is alpha; it must be alpha / rank",
        "self.scale = alpha / rank",
        "self.scale = alpha",
    ),
    Fault(
        "there is no scale; it must be alpha / rank",
        "self.scale = alpha / rank",
        "self.scale = 1.0",
    ),
    Fault(
        "the scale is 1 / rank; it must be alpha / rank",
        "self.scale = alpha / rank",
        "self.scale = 1 / rank",
    ),
    Fault(
        "the scale is alpha / sqrt(rank), rsLoRA's; it must be alpha / rank",
        "self.scale = alpha / rank",
        "self.scale = alpha / rank**0.5",
    ),
    Fault(
        "forward does not scale; it must add alpha / rank * B A x",
        "self.linear(x) + self.scale * (x @",
        "self.linear(x) + (x @",
    ),
    Fault("the given linear trains as well; only A and B may", ".requires_grad_(False)", ""),
    Fault(
        "the bias of the linear trains as well; only A and B may",
        "        self.linear = linear.requires_grad_(False)",
        "        self.linear = linear\n        linear.weight.requires_grad_(False)",
    ),
    Fault("the linear is left out of forward", "return self.linear(x) + ", "return "),
    Fault(
        "the adapter is left out of forward",
        " + self.scale * (x @ self.a.T @ self.b.T)",
        " + 0 * (x @ self.a.T @ self.b.T)",
    ),
    Fault(
        "the adapter reads the linear's output (serial); it reads x",
        "return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)",
        "y = self.linear(x)\n        return y + self.scale * (y[..., : x.shape[-1]] @ self.a.T @ self.b.T)",
    ),
    Fault(
        "merged() adds the update to the given linear; it must make a new one",
        "copy.deepcopy(self.linear)",
        "self.linear",
    ),
    Fault(
        "merged() does not scale; it must add alpha / rank * B A",
        "linear.weight.data += self.scale *",
        "linear.weight.data +=",
    ),
    Fault(
        "merged() leaves the update out",
        "        linear.weight.data += self.scale * (self.b @ self.a).detach()  # (out, in)\n",
        "",
    ),
    Fault(
        "merged() subtracts the update; that is unmerging",
        "weight.data += self",
        "weight.data -= self",
    ),
    Fault(
        "merged() adds the update twice",
        "weight.data += self.scale",
        "weight.data += 2 * self.scale",
    ),
    Fault(
        "merged() has the update alone, without the linear's weight",
        "weight.data += self",
        "weight.data = self",
    ),
    Fault(
        "merged() loses the bias",
        "        return linear\n",
        "        linear.bias = None\n        return linear\n",
    ),
    Fault(
        "merged() returns the weight; it must be an nn.Linear",
        "        return linear\n",
        "        return linear.weight\n",
    ),
]

FAULTS["next_token_loss"] = [
    Fault(
        "nothing is shifted: logits at t are compared with ids at t; it must be t + 1",
        "F.cross_entropy(logits[:, :-1].mT, ids[:, 1:],",
        "F.cross_entropy(logits[:, :-1].mT, ids[:, :-1],",
    ),
    Fault(
        "nothing is shifted, the last position included",
        'logits[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)\n    return losses[mask[:, :-1] & mask[:, 1:]].mean()',
        'logits.mT, ids, reduction="none")\n    return losses[mask].mean()',
    ),
    Fault(
        "it is shifted the wrong way: logits at t + 1 are compared with ids at t",
        "logits[:, :-1].mT, ids[:, 1:],",
        "logits[:, 1:].mT, ids[:, :-1],",
    ),
    Fault(
        "it is shifted twice: logits at t against ids at t + 2",
        'logits[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)\n    return losses[mask[:, :-1] & mask[:, 1:]].mean()',
        'logits[:, :-2].mT, ids[:, 2:], reduction="none")\n    return losses[mask[:, :-2] & mask[:, 2:]].mean()',
    ),
    Fault(
        "ids are rolled, so the last position is asked for the first id",
        'logits[:, :-1].mT, ids[:, 1:], reduction="none")  # (B, T-1)\n    return losses[mask[:, :-1] & mask[:, 1:]].mean()',
        'logits.mT, ids.roll(-1, 1), reduction="none")\n    return losses[mask & mask.roll(-1, 1)].mean()',
    ),
    Fault(
        "the mask is ignored: padding is counted",
        "losses[mask[:, :-1] & mask[:, 1:]].mean()",
        "losses.mean()",
    ),
    Fault(
        "the mask of the token at t + 1 alone is used; both must be real",
        "mask[:, :-1] & mask[:, 1:]",
        "mask[:, 1:]",
    ),
    Fault(
        "the mask of the token at t alone is used; both must be real",
        "mask[:, :-1] & mask[:, 1:]",
        "mask[:, :-1]",
    ),
    Fault(
        "a pair counts where one of its tokens is real; both must be",
        "mask[:, :-1] & mask[:, 1:]",
        "mask[:, :-1] | mask[:, 1:]",
    ),
    Fault(
        "the mask is inverted: padding alone is counted",
        "mask[:, :-1] & mask[:, 1:]",
        "~(mask[:, :-1] & mask[:, 1:])",
    ),
    Fault(
        "the sum is divided by all pairs, padding included",
        "losses[mask[:, :-1] & mask[:, 1:]].mean()",
        "losses[mask[:, :-1] & mask[:, 1:]].sum() / losses.numel()",
    ),
    Fault(
        "the sum is divided by the real tokens; it must be the real pairs",
        "losses[mask[:, :-1] & mask[:, 1:]].mean()",
        "losses[mask[:, :-1] & mask[:, 1:]].sum() / mask.sum()",
    ),
    Fault(
        "rows are averaged first, and their means averaged; every pair counts the same",
        "losses[mask[:, :-1] & mask[:, 1:]].mean()",
        "torch.stack([row[m].mean() for row, m in zip(losses, mask[:, :-1] & mask[:, 1:])]).mean()",
    ),
    Fault("it is the sum; the mean was asked for", "& mask[:, 1:]].mean()", "& mask[:, 1:]].sum()"),
    Fault(
        "the sum is divided by the rows; it must be the pairs",
        "& mask[:, 1:]].mean()",
        "& mask[:, 1:]].sum() / len(ids)",
    ),
    Fault(
        "it is in bits; cross entropy is in nats",
        "& mask[:, 1:]].mean()",
        "& mask[:, 1:]].mean() / 0.6931471805599453",
    ),
    Fault(
        "it is the perplexity; the loss is its logarithm",
        "& mask[:, 1:]].mean()",
        "& mask[:, 1:]].mean().exp()",
    ),
    Fault(
        "the softmax is taken twice; cross_entropy takes logits",
        "logits[:, :-1].mT",
        "logits[:, :-1].softmax(dim=-1).mT",
    ),
    Fault(
        "the sign is wrong: log p is averaged; the loss is -log p",
        "    losses = F",
        "    losses = -F",
    ),
]

FAULTS["sample"] = [
    Fault(
        "it always takes the likeliest token; it must draw",
        "torch.multinomial(probs, 1, generator=generator)",
        "probs.argmax(dim=-1, keepdim=True)",
    ),
    Fault(
        "what is kept is drawn uniformly; the probabilities must count",
        "torch.multinomial(probs, 1,",
        "torch.multinomial((probs > 0).to(probs.dtype), 1,",
    ),
    Fault(
        "logits are multiplied by the temperature; they are divided by it",
        "(ranked / temperature)",
        "(ranked * temperature)",
    ),
    Fault("the temperature is ignored", "(ranked / temperature)", "ranked"),
    Fault(
        "the temperature divides the probabilities, after the softmax, where it changes nothing for top-p = None; it divides the logits",
        "(ranked / temperature).softmax(dim=-1)",
        "ranked.softmax(dim=-1) / temperature",
    ),
    Fault(
        "top-p is decided without the temperature; it comes first",
        "before = probs.cumsum(dim=-1) - probs ",
        "plain = ranked.softmax(dim=-1)\n        before = plain.cumsum(dim=-1) - plain ",
    ),
    Fault(
        "top-p is one token short: the token that reaches p is dropped; it stays",
        "probs.masked_fill(before >= top_p, 0)",
        "probs.masked_fill(probs.cumsum(dim=-1) >= top_p, 0)\n        probs[:, 0] += 1e-9",
    ),
    Fault(
        "top-p keeps one token too many: it stops when p is reached",
        "probs.masked_fill(before >= top_p, 0)",
        "probs.masked_fill(F.pad(before, (1, 0))[:, :-1] >= top_p, 0)",
    ),
    Fault(
        "top-p keeps the tail: what is needed to reach p is dropped",
        "before >= top_p",
        "before < top_p",
    ),
    Fault(
        "p is a limit for each token; it is one for their sum",
        "before >= top_p",
        "probs < 1 - top_p",
    ),
    Fault("top-p is ignored", "if top_p is not None:", "if False:"),
    Fault("top-k is ignored", "if top_k is not None:", "if False:"),
    Fault("top-k keeps one token too many", "ranked[:, top_k:]", "ranked[:, top_k + 1 :]"),
    Fault("top-k is one token short", "ranked[:, top_k:]", "ranked[:, max(top_k - 1, 1) :]"),
    Fault("top-k keeps the least likely tokens", "descending=True", "descending=top_k is None"),
    Fault(
        "top-p counts the tokens that top-k has dropped; what is left must be renormalised",
        "    if top_k is not None:\n        ranked[:, top_k:] = -torch.inf\n    probs = (ranked / temperature).softmax(dim=-1)\n",
        "    probs = (ranked / temperature).softmax(dim=-1)\n    if top_k is not None:\n        probs[:, top_k:] = 0\n",
    ),
    Fault(
        "ranks are returned; they must be turned back into token ids",
        "return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))",
        "return torch.multinomial(probs, 1, generator=generator)",
    ),
    Fault("the generator is ignored: the global one is moved", "1, generator=generator)", "1)"),
    Fault(
        "the first row's probabilities are used for all rows",
        "torch.multinomial(probs, 1,",
        "torch.multinomial(probs[:1].expand_as(probs), 1,",
    ),
    Fault(
        "temperature 0 divides by zero; it is the argmax",
        "if temperature == 0:",
        "if temperature < 0:",
    ),
    Fault(
        "temperature 0 takes the least likely token; it is the argmax",
        "return logits.argmax(dim=-1, keepdim=True)",
        "return logits.argmin(dim=-1, keepdim=True)",
    ),
    Fault(
        "ids come back as [B]; they must be [B, 1]",
        "return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))",
        "return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]",
    ),
    Fault(
        "temperature 0 draws all the same, from what is nearly certain; it is the argmax and draws nothing",
        "    if temperature == 0:\n        return logits.argmax(dim=-1, keepdim=True)",
        "    temperature = max(temperature, 1e-4)",
    ),
]

STEP = "logits, cache = model(step, cache)"
FAULTS["generate"] = [
    Fault(
        "the whole text is fed at every step beside the cache; one token is",
        STEP,
        "logits, cache = model(ids, cache)",
    ),
    Fault(
        "the whole text is fed at every step, without the cache; it is fed once, then one token a step",
        STEP,
        "logits, cache = model(ids, None)",
    ),
    Fault("the cache is never handed on", STEP, "logits, cache = model(step, None)"),
    Fault(
        "the prompt is fed one token a call; it is fed at once",
        "    step, cache = ids, None\n",
        "    step, cache = ids, None\n    for token in ids[:, :-1].split(1, dim=1):\n        _, cache = model(token, cache)\n        step = ids[:, -1:]\n",
    ),
    Fault(
        "the prompt's logits are computed once more: n tokens are n calls",
        "    step, cache = ids, None\n",
        "    step, cache = ids, None\n    model(ids, None)\n",
    ),
    Fault(
        "one call too many: the last token is fed although nothing is asked of it",
        "    return ids\n",
        "    model(step, cache)\n    return ids\n",
    ),
    Fault("the least likely token is taken", "logits[:, -1].argmax", "logits[:, -1].argmin"),
    Fault(
        "the logits of the first position are read; the next token is the last one's",
        "logits[:, -1].argmax",
        "logits[:, 0].argmax",
    ),
    Fault(
        "the token is drawn; greedy takes the likeliest",
        "logits[:, -1].argmax(dim=-1, keepdim=True)",
        "torch.multinomial(logits[:, -1].softmax(dim=-1), 1)",
    ),
    Fault(
        "the first row's token goes to all rows",
        "logits[:, -1].argmax(dim=-1, keepdim=True)",
        "logits[:1, -1].argmax(dim=-1, keepdim=True).expand(len(ids), 1)",
    ),
    Fault(
        "an eos in the prompt ends its row; it does not count",
        "done = torch.zeros_like(ids[:, :1], dtype=torch.bool)",
        "done = (ids == eos_id).any(dim=1, keepdim=True) if eos_id is not None else torch.zeros_like(ids[:, :1], dtype=torch.bool)",
    ),
    Fault(
        "a row that has ended goes on; it is filled with eos",
        "            step = step.masked_fill(done, eos_id)\n",
        "",
    ),
    Fault(
        "a row that has ended is filled with 0; it is filled with eos",
        "step.masked_fill(done, eos_id)",
        "step.masked_fill(done, 0)",
    ),
    Fault("all rows stop when one has ended", "if done.all():", "if done.any():"),
    Fault(
        "it does not stop when all rows have ended",
        "        if done.all():\n            break\n",
        "",
    ),
    Fault("eos_id is ignored", "if eos_id is not None:", "if False:"),
    Fault(
        "the last eos is left out; it belongs to the result",
        "        ids = torch.cat((ids, step), dim=1)\n        if done.all():\n            break\n",
        "        if done.all():\n            break\n        ids = torch.cat((ids, step), dim=1)\n",
    ),
    Fault(
        "the prompt is left out; prompt and continuation were asked for",
        "    return ids\n",
        "    return ids[:, -max_new_tokens:] if max_new_tokens else ids[:, :0]\n",
    ),
    Fault("one token too few", "range(max_new_tokens)", "range(max_new_tokens - 1)"),
    Fault("one token too many", "range(max_new_tokens)", "range(max_new_tokens + 1)"),
    Fault(
        "max_new_tokens is taken as the whole length; the prompt does not count",
        "range(max_new_tokens)",
        "range(max(max_new_tokens - ids.shape[1], 0))",
    ),
]

FAULTS["speculate"] = [
    Fault(
        "everything that was drafted is accepted",
        "accepted = agrees.long().cumprod(dim=1).sum()",
        "accepted = agrees.shape[1]",
    ),
    Fault(
        "nothing is accepted: one token comes back always",
        "accepted = agrees.long().cumprod(dim=1).sum()",
        "accepted = 0 * agrees.sum()",
    ),
    Fault(
        "all agreements are counted; it ends at the first disagreement",
        "agrees.long().cumprod(dim=1).sum()",
        "agrees.sum()",
    ),
    Fault(
        "the drafted ids come back; where target disagrees its own must",
        "return greedy[:, : accepted + 1]",
        "return torch.cat((drafted[:, T:], greedy[:, -1:]), dim=1)[:, : accepted + 1]",
    ),
    Fault(
        "target's own token is left out: accepted + 1 are known",
        "return greedy[:, : accepted + 1]",
        "return greedy[:, :accepted]",
    ),
    Fault(
        "one token is missing when all were accepted: target's own comes free, n_draft + 1 in all",
        "return greedy[:, : accepted + 1]",
        "return greedy[:, : min(int(accepted) + 1, n_draft)]",
    ),
    Fault(
        "the prompt comes back too; the new ids only were asked for",
        "return greedy[:, : accepted + 1]",
        "return torch.cat((ids, greedy[:, : accepted + 1]), dim=1)",
    ),
    Fault(
        "target's logits are read one place too late: those at T - 1 give the token at T",
        "greedy = target(drafted)[:, T - 1 :].argmax(dim=-1)",
        "greedy = target(drafted)[:, T:].argmax(dim=-1)\n    greedy = torch.cat((greedy, greedy[:, -1:]), dim=1)",
    ),
    Fault("one token too many is drafted", "range(n_draft)", "range(n_draft + 1)"),
    Fault(
        "target is called for every token; once is the point",
        "greedy = target(drafted)[:, T - 1 :].argmax(dim=-1)",
        "greedy = torch.stack([target(drafted[:, : T + i])[:, -1].argmax(dim=-1) for i in range(n_draft + 1)], dim=1)",
    ),
    Fault(
        "target and draft are exchanged: draft's choice comes back",
        "drafted = torch.cat((drafted, draft(drafted)",
        "drafted = torch.cat((drafted, target(drafted)",
    ),
    Fault(
        "the draft reads the prompt alone each time; it reads what it has drafted too",
        "draft(drafted)[:, -1:]",
        "draft(ids)[:, -1:]",
    ),
    Fault(
        "the token where target disagrees is kept, and one more behind it",
        "return greedy[:, : accepted + 1]",
        "return greedy[:, : accepted + 2]",
    ),
    Fault(
        "all or nothing: one disagreement throws all away",
        "accepted = agrees.long().cumprod(dim=1).sum()",
        "accepted = n_draft * int(agrees.all())",
    ),
    Fault(
        "the last drafted id is accepted unseen",
        "accepted = agrees.long().cumprod(dim=1).sum()",
        "accepted = agrees.long()[:, :-1].cumprod(dim=1).sum() + agrees[:, :-1].all().long()",
    ),
]
