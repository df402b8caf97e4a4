"""After pre-training: the losses of preference and reinforcement learning."""

import torch
import torch.nn.functional as F


def token_log_probs(logits, ids):
    """Log-probability [B, T-1] of each next token: logits [B, T, V] at t, ids [B, T] at t + 1."""
    log_probs = logits[:, :-1].log_softmax(dim=-1)  # (B, T-1, V)
    return log_probs.gather(2, ids[:, 1:, None])[:, :, 0]  # (B, T-1)


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    """mean of -log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected))).

    Each [B] holds the summed log-probabilities of answers, under the model or the reference.
    """
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)  # (B)
    return -F.logsigmoid(beta * margin).mean()


def grpo_loss(log_probs, old_log_probs, ref_log_probs, rewards, mask, clip=0.2, beta=0.04):
    """The loss of G answers to one prompt: log-probabilities and bool mask [G, T], rewards [G].

    A = (r - mean) / (std + 1e-4), ratio = e^(lp - old), k3 = e^(ref - lp) - (ref - lp) - 1; of
    min(ratio A, clipped ratio A) - beta k3 the mean over a row's tokens, then over rows, negated.
    No gradient through old, ref and rewards.
    """
    old, ref, rewards = (t.detach() for t in (old_log_probs, ref_log_probs, rewards))
    advantage = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]  # (G, 1)
    ratio = torch.exp((log_probs - old) * mask)  # (G, T), 1 on padding, whatever stands there
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)  # (G, T)
    gap = (ref - log_probs) * mask  # (G, T)
    k3 = gap.exp() - gap - 1
    return -(((gain - beta * k3) * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def gae(rewards, values, gamma, lam):
    """Advantages [T] of rewards [T] and values [T + 1], the last one the bootstrap.

    delta_t = r_t + gamma V_(t+1) - V_t, and A_t = delta_t + gamma lam A_(t+1).
    """
    advantages, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] - values[t]
        last = delta + gamma * lam * last
        advantages[t] = last
    return advantages
