"""Gradients by hand: what autograd does, written out.

Each *_backward takes the inputs of the forward pass and dy, the loss's gradient by its output, and
returns the gradients by its inputs. They equal torch.autograd's to 1e-9 in float64. Letters as in
blocks.py; `...` is one axis or more.
"""

import math
from collections import defaultdict

import torch


def softmax_cross_entropy(logits, targets):
    """(loss, dlogits): the mean cross entropy of logits [N, V] for int targets [N].

    loss = mean(logsumexp(z) - z[target]), dlogits = (softmax(z) - onehot) / N.
    """
    rows = torch.arange(len(targets), device=logits.device)
    shifted = logits - logits.amax(dim=1, keepdim=True)  # (N, V), exp cannot overflow
    log_probs = shifted - shifted.exp().sum(dim=1, keepdim=True).log()  # (N, V)
    loss = -log_probs[rows, targets].mean()
    dlogits = log_probs.exp()  # (N, V)
    dlogits[rows, targets] -= 1
    return loss, dlogits / len(targets)


def linear_backward(x, w, dy):
    """(dx, dw, db) of y = x w^T + b: x [..., in], w [out, in], dy [..., out]."""
    x_rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)  # (N, in), (N, out)
    return dy @ w, dy_rows.T @ x_rows, dy_rows.sum(dim=0)


def layer_norm_backward(x, weight, dy, eps=1e-5):
    """(dx, dweight, dbias): x and dy [..., d], weight [d].

    With n the normed x and g = weight dy: dx = (g - mean(g) - n mean(g n)) / std.
    """
    centred = x - x.mean(dim=-1, keepdim=True)
    inv_std = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)  # (..., 1)
    normed, g = centred * inv_std, dy * weight  # (..., d)
    along = (g * normed).mean(dim=-1, keepdim=True)  # (..., 1)
    dx = inv_std * (g - g.mean(dim=-1, keepdim=True) - normed * along)
    return dx, (dy * normed).flatten(0, -2).sum(dim=0), dy.flatten(0, -2).sum(dim=0)


def rms_norm_backward(x, weight, dy, eps=1e-6):
    """(dx, dweight): x and dy [..., d], weight [d].

    With n = x / rms and g = weight dy: dx = (g - n mean(g n)) / rms.
    """
    inv_rms = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)  # (..., 1)
    normed, g = x * inv_rms, dy * weight  # (..., d)
    dx = inv_rms * (g - normed * (g * normed).mean(dim=-1, keepdim=True))
    return dx, (dy * normed).flatten(0, -2).sum(dim=0)


def swiglu_backward(x, w_gate, w_up, w_down, dy):
    """(dx, dw_gate, dw_up, dw_down) of down(silu(gate) up): x and dy [..., d], w_down [d, h].

    silu(z) = z s(z), and its slope is s(z) (1 + z (1 - s(z))).
    """
    x_rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)  # (N, d)
    gate, up = x_rows @ w_gate.T, x_rows @ w_up.T  # (N, h)
    sigmoid = gate.sigmoid()
    dhidden = dy_rows @ w_down  # (N, h)
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dhidden * gate * sigmoid
    dx = (dgate @ w_gate + dup @ w_up).view_as(x)  # (..., d)
    return dx, dgate.T @ x_rows, dup.T @ x_rows, dy_rows.T @ (gate * sigmoid * up)


def attention_backward(q, k, v, dout, mask=None):
    """(dq, dk, dv) of attention: q [B, H, T, d_h], k [B, G, S, d_h], v [B, G, S, d_v].

    dout [B, H, T, d_v], P the weights: dP = dout v^T, dscores = P (dP - sum over keys of P dP).
    """
    G, scale = k.shape[1], q.shape[-1] ** -0.5
    k, v = (t.repeat_interleave(q.shape[1] // G, dim=1) for t in (k, v))  # H heads
    scores = q @ k.mT * scale  # (B, H, T, S)
    mask = q.new_ones((), dtype=torch.bool) if mask is None else mask
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1) * mask
    dweights = dout @ v.mT  # (B, H, T, S)
    dscores = weights * (dweights - (weights * dweights).sum(dim=-1, keepdim=True)) * scale
    dk, dv = dscores.mT @ q, weights.mT @ dout  # (B, H, S, d_h), (B, H, S, d_v)
    dk, dv = (t.unflatten(1, (G, -1)).sum(dim=2) for t in (dk, dv))  # a group's heads add up
    return dscores @ k, dk, dv


def flash_backward(q, k, v, out, lse, dout, block):
    """(dq, dk, dv) of one head, q [T, d_h], k [S, d_h], v [S, d_v], without a [T, S] table.

    out and dout [T, d_v]; lse [T] is the logsumexp of the scaled scores, so that a block's weights
    are exp(scores - lse). The sum over keys of P dP is that of out dout over channels.
    """
    scale = q.shape[1] ** -0.5
    delta = (out * dout).sum(dim=1, keepdim=True)  # (T, 1)
    dq, dk, dv = torch.zeros_like(q), [], []
    for k_block, v_block in zip(k.split(block), v.split(block)):
        weights = torch.exp(q @ k_block.mT * scale - lse[:, None])  # (T, block)
        dscores = weights * (dout @ v_block.mT - delta) * scale
        dq = dq + dscores @ k_block  # (T, d_h)
        dk.append(dscores.mT @ q)  # (block, d_h)
        dv.append(weights.mT @ dout)  # (block, d_v)
    return dq, torch.cat(dk), torch.cat(dv)


class Value:
    """A scalar that knows what it was made of: (operand, slope) pairs, for backward()."""

    def __init__(self, data, _made_of=()):
        self.data, self.grad, self.made_of = data, 0.0, _made_of

    def __add__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, ((self, 1), (other, 1)))

    def __mul__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, ((self, other.data), (other, self.data)))

    def __pow__(self, power):
        return Value(self.data**power, ((self, power * self.data ** (power - 1)),))

    # fmt: off
    def exp(self): return Value(math.exp(self.data), ((self, math.exp(self.data)),))
    def log(self): return Value(math.log(self.data), ((self, 1 / self.data),))
    def tanh(self): return Value(math.tanh(self.data), ((self, 1 - math.tanh(self.data) ** 2),))
    def relu(self): return Value(max(self.data, 0.0), ((self, float(self.data > 0)),))
    def __neg__(self): return self * -1
    def __sub__(self, other): return self + -other
    def __rsub__(self, other): return -self + other
    def __truediv__(self, other): return self * other**-1
    def __rtruediv__(self, other): return self**-1 * other
    __radd__, __rmul__ = __add__, __mul__
    # fmt: on

    def backward(self):
        """Adds d self / d node to .grad of every node: each once, after all that use it."""
        order, seen, todo = [], set(), [(self, False)]
        while todo:
            node, done = todo.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                todo += [(node, True), *((operand, False) for operand, _ in node.made_of)]
        slopes = defaultdict(float, {self: 1.0})  # of self by each node
        for node in reversed(order):
            node.grad += slopes[node]
            for operand, slope in node.made_of:
                slopes[operand] += slope * slopes[node]
