"""Tokens and decoding: byte-pair encoding, padding, beams, and attention that forgets or fades."""

from collections import Counter
from itertools import pairwise

import torch
from torch import nn

from whiteboard.blocks import attention, causal_mask, rotate


def merged(tokens, pair):
    """The list of bytes with each (a, b) of neighbours joined, from left to right."""
    result, i = [], 0
    while i < len(tokens):
        width = 2 if tuple(tokens[i : i + 2]) == pair else 1
        result.append(b"".join(tokens[i : i + width]))
        i += width
    return result


def bpe_train(text, n_merges):
    """The merges learned from a text, a list of (bytes, bytes).

    Starts from the single bytes of the UTF-8 text. The most frequent pair of neighbours is merged,
    of equally frequent ones the greater tuple; ends early when no pair is left.
    """
    tokens, merges = [bytes([byte]) for byte in text.encode()], []
    for _ in range(n_merges):
        counts = Counter(pairwise(tokens))
        if not counts:
            break
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        tokens = merged(tokens, merges[-1])
    return merges


def bpe_encode(text, merges):
    """Token ids: byte b is b, merge i is 256 + i; merges apply in the order they were learned."""
    tokens = [bytes([byte]) for byte in text.encode()]
    for pair in merges:
        tokens = merged(tokens, pair)
    ids = {bytes([byte]): byte for byte in range(256)}
    ids |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    return [ids[token] for token in tokens]


def bpe_decode(ids, merges):
    """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [a + b for a, b in merges]
    return b"".join(vocabulary[i] for i in ids).decode("utf-8", errors="replace")


def left_pad(prompts, pad_id):
    """(ids, mask, positions) [B, T] of lists of ids, padded on the left; mask True = real token."""
    T = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (T - len(prompt)) + prompt for prompt in prompts])  # (B, T)
    padding = torch.tensor([[T - len(prompt)] for prompt in prompts])  # (B, 1)
    positions = torch.arange(T) - padding  # (B, T), negative on padding
    return ids, positions >= 0, positions.clamp(min=0)


@torch.no_grad()
def beam_search(model, ids, n_beams, max_new_tokens, eos_id=None):
    """ids [1, T] and the best continuation found; model(ids [n, T]) returns logits [n, T, V].

    The n_beams best sums of log-probabilities survive a step. A beam that has ended stays as it is
    and competes by its sum. At the end the best sum over its number of new tokens wins, its eos
    counted.
    """
    T, beams = ids.shape[1], [(0.0, ids[0].tolist(), False)]  # sum, tokens, ended
    for _ in range(max_new_tokens):
        candidates = [beam for beam in beams if beam[2]]
        alive = [beam for beam in beams if not beam[2]]
        if not alive:
            break
        logits = model(ids.new_tensor([tokens for _, tokens, _ in alive]))[:, -1]  # (alive, V)
        best = logits.log_softmax(dim=-1).topk(min(n_beams, logits.shape[-1]))  # enough of each
        for (total, tokens, _), values, nexts in zip(alive, *(b.tolist() for b in best)):
            candidates += [(total + v, [*tokens, i], i == eos_id) for v, i in zip(values, nexts)]
        beams = sorted(candidates, key=lambda beam: beam[0], reverse=True)[:n_beams]
    best = max(beams, key=lambda beam: beam[0] / max(len(beam[1]) - T, 1))
    return ids.new_tensor([best[1]])


class WindowAttention(nn.Module):
    """SelfAttention over the last `window` keys; the cache (k, v, length) holds no more of them."""

    def __init__(self, d_model, n_q_heads, n_kv_heads, window):
        super().__init__()
        self.head_dim, self.window = d_model // n_q_heads, window
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, cache=None):
        start, T = 0 if cache is None else cache[2], x.shape[1]
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))  # (B, T, n*d_h) each
        q, k, v = (p.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in projected)
        positions = torch.arange(start, start + T, device=x.device)  # of the whole text
        q, k = rotate(q, positions), rotate(k, positions)  # (B, H, T, d_h), (B, G, T, d_h)
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        mask = causal_mask(T, k.shape[2], self.window).to(x.device)  # (T, S), S < window + T
        out = attention(q, k, v, mask)  # (B, H, T, d_h)
        k, v = (t[:, :, -self.window :].clone() for t in (k, v))  # a view would keep all of it
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v, start + T)


def alibi(n_heads, T, S):
    """Bias [H, T, S] on scores: slope (key's position - query's), the last query at the last key.

    The slopes are 2^(-8 i / H) for i = 1 ... H, H a power of two.
    """
    slopes = 2.0 ** (-8 * torch.arange(1, n_heads + 1) / n_heads)  # (H)
    distance = torch.arange(S) - torch.arange(S - T, S)[:, None]  # (T, S), not above 0 where seen
    return slopes[:, None, None] * distance
