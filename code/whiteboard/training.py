"""The loop around the model: optimiser, clipping, schedule, accumulation, and what stands beside.

They equal torch's own (torch.optim.AdamW, clip_grad_norm_) to rounding.
"""

import math

import torch
import torch.nn.functional as F


class AdamW:
    """Adam with decoupled weight decay; t counts a parameter's steps, g is its gradient.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, and then, with m' = m / (1 - b1^t) and
    v' = v / (1 - b2^t), p = p - lr weight_decay p - lr m' / (sqrt(v') + eps).
    """

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.steps = [0 for _ in self.parameters]
        self.means = [torch.zeros_like(p) for p in self.parameters]
        self.squares = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for i, (p, m, v) in enumerate(zip(self.parameters, self.means, self.squares)):
            if p.grad is None:
                continue
            self.steps[i] += 1
            m.mul_(b1).add_((1 - b1) * p.grad)
            v.mul_(b2).add_((1 - b2) * p.grad.square())
            mean, square = m / (1 - b1 ** self.steps[i]), v / (1 - b2 ** self.steps[i])
            p.mul_(1 - self.lr * self.weight_decay)  # the weight's own decay, not the gradient's
            p.sub_(self.lr * mean / (square.sqrt() + self.eps))

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def clip_grad_norm(parameters, max_norm):
    """The norm of all gradients as one vector; they are scaled down in place if it is over max."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = sum(g.square().sum() for g in grads) ** 0.5
    if norm > max_norm:
        for g in grads:
            g.mul_(max_norm / norm)
    return norm


def learning_rate(step, max_lr, min_lr, warmup, total):
    """max_lr step / warmup below warmup, a cosine from max_lr to min_lr up to total, min_lr after.

    The cosine: min_lr + (max_lr - min_lr) (1 + cos(pi (step - warmup) / (total - warmup))) / 2.
    """
    if step < warmup:
        return max_lr * step / warmup
    progress = min((step - warmup) / (total - warmup), 1)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


def accumulate(model, batches):
    """.grad becomes the gradient of the mean loss over all pairs of all batches; returns the loss.

    batches is a list of (ids [B, T], mask [B, T], True = real); model(ids) gives logits [B, T, V].
    A pair is two real neighbours: logits at t against ids at t + 1. The sum of a batch is divided
    by the pairs of all batches, since a mean of means would weigh the pairs of a short batch more.
    """
    model.zero_grad()
    pairs = [mask[:, :-1] & mask[:, 1:] for _, mask in batches]  # (B, T-1) each
    count, loss = sum(p.sum() for p in pairs), 0.0
    for (ids, _), counted in zip(batches, pairs):
        logits = model(ids)[:, :-1].mT  # (B, V, T-1)
        losses = F.cross_entropy(logits, ids[:, 1:], reduction="none")  # (B, T-1)
        share = losses[counted].sum() / count
        share.backward()  # frees this batch's graph before the next one's is built
        loss += share.item()
        del logits, losses, share
    return loss


def dropout(x, p, training, generator=None):
    """x with each entry zeroed with probability p and the others divided by 1 - p."""
    if not training or p == 0:
        return x
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= p  # none at p = 1
    return x * keep / (1 - p if p < 1 else 1)


def contrastive_loss(a, b, temperature):
    """CLIP's loss of pairs: row i of a [N, d] belongs to row i of b [N, d].

    The mean cross entropy of a's rows choosing among b's and of b's among a's, averaged; the logits
    are cosines over temperature.
    """
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / temperature  # (N, N)
    own = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def quantize_int8(w):
    """(q int8 [out, in], scale [out]): w [out, in] is about q scale, -127 ... 127 in each row."""
    scale = w.abs().amax(dim=1) / 127  # (out)
    divisor = scale.masked_fill(scale == 0, 1)  # a row of zeros stays zeros
    return (w / divisor[:, None]).round().to(torch.int8), scale
