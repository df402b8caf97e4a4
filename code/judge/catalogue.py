"""What can be written from memory: the exercises, what each asks, and where it is explained."""

import difflib
import re
from typing import NamedTuple

from judge.answers import CODE

LEVELS = {1: "functions", 2: "attention and blocks", 3: "latents, experts, and the loop around"}


class Task(NamedTuple):
    """An exercise as a reader sees it; template is what its docstring says."""

    name: str
    level: int
    demo: str
    section: str
    asks: str
    template: str

    @property
    def reading(self) -> str:
        """Where to read about it."""
        return f"see [{self.demo}] and {self.section} of the notes"


FORWARD_CACHED = """\
forward takes x [B, T, d_model] and what the call before returned as cache, None at the start;
it returns (y [B, T, d_model], cache). All at once or in chunks, the result is the same."""

ALL = [
    Task("rms_norm", 1, "D02", "§4.1", "x over its root mean square", """\
x [..., d] over its root mean square, times weight [d]. eps stands under the root.
float16 and bfloat16 are computed in float32 and come back as they came."""),
    Task("layer_norm", 1, "D02", "§4.1", "the same with mean and bias", """\
x [..., d] less its mean, over its standard deviation, times weight [d] plus bias [d].
eps stands under the root.
float16 and bfloat16 are computed in float32 and come back as they came."""),
    Task("causal_mask", 1, "D14", "§7.3", "who may see whom, with a window or without", """\
bool [T, S], T <= S, True = may attend; the last query stands beside the last key.
With window=W a query sees the last W keys, its own included."""),
    Task("rotate", 1, "D15", "§4.2", "RoPE", """\
RoPE, half-split: channel i of x [B, n, T, d_h] is paired with channel i + d_h/2 and turned by
position * base^(-2i/d_h). positions [T] are integers. Angles are computed in float32 or wider,
also where x is float16 or bfloat16; the result has the dtype of x."""),
    Task("attention", 1, "D05", "§5.2", "MHA, GQA and MQA in one", """\
q [B, H, T, d_h], k [B, G, S, d_h], v [B, G, S, d_v] give [B, H, T, d_v]; G divides H.
mask is bool, True = may attend, and broadcasts to [B, 1, T, S]. Scores may be of any size.
A query that may attend to nothing gets zeros, and leaves no NaN in any gradient."""),
    Task("online_softmax", 1, "D05", "§7.4", "attention block by block", """\
Attention of one head without a mask: q [T, d_h], k [S, d_h], v [S, d_v] give [T, d_v].
K and V are read block keys at a time (the last block may be shorter); no [T, S] table is made."""),
    Task("swiglu", 1, "D07", "§4.3", "the gated FFN", """\
x [..., d], w_gate and w_up [h, d], w_down [d, h], as nn.Linear keeps them; gives [..., d]."""),
    Task("block_parameters", 1, "D06", "§1.3", "weights of a ModernBlock", """\
How many weights a ModernBlock has, its two norms included."""),
    Task("kv_cache_bytes", 1, "D06", "§5.1", "memory of a KV cache", """\
Bytes of the keys and values of batch sequences of length tokens in n_layers layers."""),
    Task("SelfAttention", 2, "D04", "§1.2", "causal GQA with RoPE and a cache", f"""\
Causal self-attention with RoPE (base 10000, half-split) and grouped KV heads, no biases;
head width d_model / n_q_heads. The cache holds 2 * n_kv_heads * head width numbers a token.

{FORWARD_CACHED}"""),
    Task("EncoderLayer", 2, "D13", "§2.1", "the 2017 encoder layer", """\
The encoder layer of 2017: Post-LN (eps 1e-5), ReLU, biases everywhere.

forward takes x [B, T, d_model] and key_padding_mask, bool [B, T], True = real token, or None;
it returns [B, T, d_model]."""),
    Task("CrossDecoderLayer", 2, "D12", "§2.2", "the 2017 decoder layer", """\
The decoder layer of 2017: causal self-attention, cross-attention, FFN; Post-LN (eps 1e-5), ReLU,
biases everywhere.

forward takes x [B, T, d_model] and memory [B, S, d_model]; it returns [B, T, d_model]."""),
    Task("GPT2Block", 2, "D14", "§3.2", "Pre-LN, GELU, biases", """\
GPT-2's block: Pre-LN (eps 1e-5), causal, tanh GELU, biases everywhere, no rotation.

forward takes x [B, T, d_model] and returns [B, T, d_model]."""),
    Task("ModernBlock", 2, "D08", "§1.1", "Llama's block, complete", f"""\
Llama's block: pre-RMSNorm (eps 1e-6), causal grouped attention with RoPE (base 10000,
half-split), SwiGLU, no biases; head width d_model / n_q_heads.

{FORWARD_CACHED}"""),
    Task("ParallelBlock", 2, "D08", "§7.1", "GPT-J's topology", """\
GPT-J's topology: one LayerNorm (eps 1e-5, with bias) that attention and FFN both read. Causal,
RoPE on all channels of a head (base 10000, half-split), tanh GELU; the maps have no biases.

forward takes x [B, T, d_model] and returns [B, T, d_model]."""),
    Task("LatentAttention", 3, "D04", "§5.4", "DeepSeek's MLA with its cache", f"""\
Multi-head latent attention, causal, no biases, no low rank for the queries. Keys and values of
all heads come from one RMS-normed latent (eps 1e-6) of width kv_rank; nope_dim channels of a key
are a head's own, rope_dim channels are turned (base 10000, half-split) and shared by all heads.
Scale (nope_dim + rope_dim)^-0.5. Joined matrices: a head's query is [nope | rope], the way down
[latent | rope], a head's part of the way up [key | value]. The cache holds kv_rank + rope_dim
numbers a token.

{FORWARD_CACHED}"""),
    Task("SwitchFFN", 3, "D09", "§6.2", "top-1 experts and the balance loss", """\
Top-1 experts: each token goes to its likeliest expert (a SwiGLU without biases), whose output is
weighted with its probability; none is dropped. The router is linear without bias.

forward takes x [B, T, d_model] and returns (y [B, T, d_model], balance_loss): the number of
experts times the sum of f * P over experts, f the share of the B * T tokens that go to an expert,
P its mean probability, without a coefficient."""),
    Task("MixtralFFN", 3, "D09", "§6.1", "top-k experts", """\
Top-k experts: each token goes to its top_k likeliest experts (SwiGLUs without biases), weighted
with their probabilities over the sum of those chosen. The router is linear without bias.

forward takes x [B, T, d_model] and returns [B, T, d_model]."""),
    Task("LoRALinear", 3, "D07", "§7.4", "an adapter, and merging it", """\
A given nn.Linear plus alpha / rank * B A. Only A and B train; B starts at zero and A does not, so
that it starts as the given layer.

forward takes x [..., in_features]. merged() returns one new nn.Linear that does the same, and
changes nothing."""),
    Task("next_token_loss", 3, "D01", "§10.3", "the shifted cross entropy", """\
Mean cross entropy of logits [B, T, V] at t against ids [B, T] at t + 1. mask is bool [B, T],
True = real token; a pair counts where both its tokens are real."""),
    Task("sample", 3, "D11", "§10.3", "temperature, top-k, top-p", """\
Token ids [B, 1] drawn from logits [B, V]. temperature 0 takes the likeliest and draws nothing.
top-k first (above V it keeps all); then, over what is left and renormalised, top-p: the fewest
likeliest tokens whose sum is at least p. Draws come from generator."""),
    Task("generate", 3, "D04", "§10.3", "greedy decoding with a cache", """\
The prompt ids [B, T] and max_new_tokens that follow greedily. model(ids, cache) returns
(logits, cache), cache None at the start. The prompt is fed once, then one token a step: n new
tokens are n calls. A row that has produced eos_id is filled with it, and when all rows have, the
loop ends; an eos_id in the prompt does not count, and eos_id may be 0."""),
    Task("speculate", 3, "D04", "§10.3", "one greedy speculative step", """\
target(ids) and draft(ids) return logits [1, T, V]. draft proposes n_draft tokens one by one,
target checks them in one call; what is returned are the new ids, [1, accepted + 1], the same
that plain greedy decoding with target gives."""),
]  # fmt: skip
TASKS = {task.name: task for task in ALL}


def task_named(text: str) -> str:
    """The name of an exercise, given in any case; ValueError with the nearest names else."""
    by_lower = {name.lower(): name for name in TASKS}
    if text.lower() in by_lower:
        return by_lower[text.lower()]
    close = difflib.get_close_matches(text.lower(), by_lower, n=3)
    hint = ", ".join(by_lower[name] for name in close) or ", ".join(TASKS)
    if text in script_names():
        hint += f"; it is a definition of the script: transformer_block.py --show {text}"
    raise ValueError(f"there is no exercise {text!r}: {hint}")


def script_names() -> list[str]:
    """The definitions that transformer_block.py --show prints."""
    script = (CODE / "transformer_block.py").read_text(encoding="utf-8")
    return re.findall(r"^(?:class|def) ([A-Za-z]\w*)", script, re.M)
