#!/usr/bin/env python3
"""Time and memory of the script's pieces, each beside a reference measured in the same run.

    pip install -r code/benchmarks/requirements.txt            Python 3.11, as transformers needs
    python3 code/benchmarks/benchmark.py                       everything, about ten minutes
    python3 code/benchmarks/benchmark.py --quick               fewer rounds: a first impression
    python3 code/benchmarks/benchmark.py decode moe            what starts with these names
    python3 code/benchmarks/benchmark.py --write speed.md      the table into a file as well

Ours and its reference take turns in one process; a figure is the median of its turns, a ratio that
of two such medians; of the two attention paths a decode row takes the faster. The decoder layer of
transformers holds the same weights, and a row whose two sides do not compute the same is an error.
Peaks of memory come from the allocator's events in the profiler, in a run that is not timed. The
status is 1 when a row misses its limit.
"""

import argparse
import contextlib
import functools
import gc
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import transformer_block as tb

import after_2025

D, H, G, D_FF, D_H = 1024, 16, 4, 2816, 64  # the block that is timed: batch 1, float32
# Where each weight of our block stands in a LlamaDecoderLayer.
LLAMA_NAMES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
PATHS = {"explicit": tb.attend, "fused": tb.attend_fused}


class Row(NamedTuple):
    """One line of the table: ours against a reference, and the most their ratio may be."""

    name: str
    what: str
    ours: float
    reference: float
    unit: str  # "s" or "B"; "" for plain numbers
    limit: float  # math.inf where the row only informs

    @property
    def ratio(self) -> float:
        return self.ours / self.reference

    @property
    def holds(self) -> bool:
        return self.ratio <= self.limit

    def line(self) -> str:
        figures = f"{shown(self.ours, self.unit)} / {shown(self.reference, self.unit)}"
        verdict = "yes" if self.holds else "**no**"
        cells = (f"`{self.name}`", self.what, figures, f"{self.ratio:.2f}")
        limit = "–" if self.limit == math.inf else f"{self.limit:.2f}"
        return f"| {' | '.join(cells)} | {limit} | {verdict} |"


def shown(value: float, unit: str) -> str:
    """A number with three digits and a prefix that fits."""
    if not unit:
        return f"{value:.3g}"
    scales = [(1, unit), (1e-3, f"m{unit}"), (1e-6, f"µ{unit}")]
    if unit == "B":
        scales = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")]
    scale, name = next(((s, n) for s, n in scales if value >= s), scales[-1])
    return f"{value / scale:.3g} {name}"


# =============================================================================================
# Measuring
# =============================================================================================


def take_turns(
    calls: dict[str, Callable], rounds: int, reset: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median seconds of each call. They take turns, and every other round goes backwards."""
    for call in calls.values():  # the first call of each pays for what later ones find ready
        reset()
        call()
    seconds = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            reset()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler writes a line to stderr, from outside Python, whenever it starts or stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_bytes(call: Callable, at_least: int = 0) -> int:
    """The most that is alive at once during call, in blocks of at least so many bytes."""
    with (
        quiet_stderr(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        call()
    events = profiler.profiler.kineto_results.events()
    events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    alive = peak = 0
    for event in events:  # nbytes is positive where a block is taken, negative where it is freed
        if abs(event.nbytes()) >= at_least:
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


class CopiedBytes(TorchDispatchMode):
    """Counts the bytes that copy_ and cat write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.cat.default):
            self.total += out.numel() * out.element_size()
        return out


def storage_bytes(cache: tb.KVCache) -> int:
    """What the cache really holds, room for later tokens included."""
    return sum(t.untyped_storage().nbytes() for t in (cache.k, cache.v))


def require_same(ours: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=2e-4, rtol=1e-4)


# =============================================================================================
# What is compared
# =============================================================================================


def llama_layer(implementation: str = "sdpa") -> nn.Module:
    from transformers import LlamaConfig  # noqa: PLC0415 - seconds that most rows need not pay
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=D,
        intermediate_size=D_FF,
        num_attention_heads=H,
        num_key_value_heads=G,
        num_hidden_layers=1,
        attn_implementation=implementation,
    )
    return LlamaDecoderLayer(config, 0)


def same_weights(block: nn.Module, layer: nn.Module) -> nn.Module:
    """The block with the layer's parameters: the same tensors, not copies."""
    for name, theirs in LLAMA_NAMES.items():
        block.get_submodule(name).weight = layer.get_submodule(theirs).weight
    return block


def our_blocks(layer: nn.Module) -> dict[str, nn.Module]:
    """A ModernDecoderBlock for each attention path."""
    blocks = {}
    for name, path in PATHS.items():
        attn = tb.MultiHeadAttention(D, H, G, rope=True, attend=path)
        blocks[name] = same_weights(tb.ModernDecoderBlock(D, H, G, D_FF, attn=attn), layer)
    return blocks


class Decoding:
    """Token after token around a cached length: our two paths, and the layer of transformers.

    Each decodes into a cache of its own, which grows through the run as it does in use.
    """

    def __init__(self, length: int, steps: int):
        from transformers import DynamicCache  # noqa: PLC0415

        layer = llama_layer()
        stored = torch.randn(2, 1, G, length - steps // 2, D_H)
        x = torch.randn(1, 1, D)
        cos, sin = tb.build_rope_cache(length + steps, D_H)
        theirs = DynamicCache(config=layer.self_attn.config)
        theirs.update(*stored, 0)

        def their_step() -> Tensor:
            row = theirs.get_seq_length()
            tables = cos[None, row : row + 1], sin[None, row : row + 1]
            return layer(x, position_embeddings=tables, cache=theirs)

        self.calls: dict[str, Callable] = {"layer": their_step}
        for name, block in our_blocks(layer).items():
            cache = tb.KVCache()
            cache.append(*stored)
            self.calls[name] = partial(block, x, cos, sin, kv_cache=cache)
        expected = their_step()
        for path in PATHS:
            require_same(self.calls[path](), expected)


def better(seconds: dict[str, float]) -> str:
    return min(PATHS, key=lambda path: seconds[path])


# =============================================================================================
# The rows
# =============================================================================================


@torch.no_grad()
def decode(length: int, limit: float, rounds: int) -> Iterator[Row]:
    steps = 20 * rounds
    seconds = take_turns(Decoding(length, steps).calls, steps)
    path = better(seconds)
    what = f"a token at {length:,} cached, {path}; the Llama layer, DynamicCache"
    yield Row(f"decode-{length}", what, seconds[path], seconds["layer"], "s", limit)


class PlainStep:
    """A step of the block as plain as it can be: no checks, and a cache taken beforehand.

    The same operators of torch on the same weights, the kernel with the queries of a group folded.
    """

    def __init__(self, block: nn.Module, stored: Tensor, room: int):
        self.block, self.position = block, stored.shape[3]
        self.k, self.v = torch.empty(2, 1, G, self.position + room, D_H)
        self.k[:, :, : self.position], self.v[:, :, : self.position] = stored

    @staticmethod
    def normed(norm: nn.Module, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps) * norm.weight

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attn, ffn, at = self.block.attn, self.block.ffn, self.position
        self.position = end = at + 1
        h = self.normed(self.block.norm1, x)
        q = attn.q_proj(h).view(1, 1, H, D_H).transpose(1, 2)
        k = attn.k_proj(h).view(1, 1, G, D_H).transpose(1, 2)
        self.v[:, :, at:end] = attn.v_proj(h).view(1, 1, G, D_H).transpose(1, 2)
        cos, sin = cos[at:end], sin[at:end]
        self.k[:, :, at:end] = self.turned(k, cos, sin)
        q = self.turned(q, cos, sin).reshape(1, G, H // G, D_H)
        out = nn.functional.scaled_dot_product_attention(q, self.k[:, :, :end], self.v[:, :, :end])
        x = x + attn.o_proj(out.reshape(1, 1, H * D_H))
        h = self.normed(self.block.norm2, x)
        return x + ffn.down(nn.functional.silu(ffn.gate(h)) * ffn.up(h))


@torch.no_grad()
def decode_plain(length: int, rounds: int) -> Iterator[Row]:
    """The block's step beside the plainest right one, and both beside what they cannot avoid."""
    steps = 20 * rounds
    first, room = length - steps // 2, steps + 2  # one step to compare, one to warm up
    stored, x = torch.randn(2, 1, G, first, D_H), torch.randn(1, 1, D)
    cos, sin = tb.build_rope_cache(first + room, D_H)
    blocks = our_blocks(llama_layer())
    plain = PlainStep(blocks["fused"], stored, room)
    calls: dict[str, Callable] = {"plain": partial(plain, x, cos, sin)}
    for name, block in blocks.items():
        cache = tb.KVCache(first + room)  # taken beforehand, as the plain one's
        cache.append(*stored)
        calls[name] = partial(block, x, cos, sin, kv_cache=cache)
    wide, low, k, v = torch.randn(1, 1, D_FF), torch.randn(1, 1, D), plain.k, plain.v
    attn, ffn = blocks["fused"].attn, blocks["fused"].ffn
    linears = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, ffn.gate, ffn.up)

    def products_and_read() -> None:
        for linear in linears:
            linear(low)
        ffn.down(wide)
        k[:, :, :length].sum()
        v[:, :, :length].sum()

    calls["floor"] = products_and_read
    expected = calls["plain"]()
    for path in PATHS:
        require_same(calls[path](), expected)
    evict = torch.randn(2**24).sum  # the other layers of a model push this one out of the caches
    seconds = take_turns(calls, steps, evict)
    path, at = better(seconds), f"a token at {length:,} cached"
    what = f"{at}, {path}; the same operators of torch without class, check and growth"
    yield Row(f"decode-plain-{length}", what, seconds[path], seconds["plain"], "s", 1.08)
    floor = "its seven products and one read of K and V"
    for name, side in ((path, "block"), ("plain", "plain")):
        row = f"decode-floor-{length}-{side}"
        yield Row(row, f"{at}, {name}; {floor}", seconds[name], seconds["floor"], "s", math.inf)


@torch.no_grad()
def decode_compiled(length: int, rounds: int) -> Iterator[Row]:
    """torch.compile of the step, one graph with a fixed cache; needs a C++ compiler."""
    steps = 20 * rounds
    stored, x = torch.randn(2, 1, G, length - steps // 2, D_H), torch.randn(1, 1, D)
    tables = tb.build_rope_cache(length + steps, D_H)
    block, calls = our_blocks(llama_layer())["fused"], {}
    for name in ("eager", "compiled"):
        cache = tb.KVCache(length + steps)
        cache.append(*stored)
        step = torch.compile(block, fullgraph=True) if name == "compiled" else block
        calls[name] = partial(step, x, *tables, kv_cache=cache)
    for _ in range(3):  # positions are a constant in the first graph, a symbol from the second on
        require_same(calls["compiled"](), calls["eager"]())
    seconds = take_turns(calls, steps)
    what = f"a token at {length:,} cached, fused, compiled; not compiled"
    name = f"decode-compiled-{length}"
    yield Row(name, what, seconds["compiled"], seconds["eager"], "s", math.inf)


class SmolLM2(NamedTuple):
    """A real model, LlamaForCausalLM with the same tensors, and the ids of a short prompt."""

    ours: tb.DecoderOnlyLM
    theirs: nn.Module
    question: Tensor


@functools.cache
def load_smollm2() -> SmolLM2:
    import checkpoints  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    file = checkpoints.GGUFFile(checkpoints.package_file(checkpoints.SMOLLM2, ".gguf"))
    ours, tokenizer = checkpoints.load_smollm2(file), checkpoints.load_smollm2_tokenizer(file)
    config = LlamaConfig(
        vocab_size=ours.embedding.num_embeddings,
        hidden_size=file["llama.embedding_length"],
        intermediate_size=file["llama.feed_forward_length"],
        num_hidden_layers=len(ours.blocks),
        num_attention_heads=file["llama.attention.head_count"],
        num_key_value_heads=file["llama.attention.head_count_kv"],
        max_position_embeddings=ours.max_len,
        rms_norm_eps=file["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": file["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)  # its table is no parameter
    theirs.get_input_embeddings().weight = theirs.lm_head.weight = ours.embedding.weight
    theirs.model.norm.weight = ours.final_norm.weight
    for layer, block in zip(theirs.model.layers, ours.blocks):
        for name, place in LLAMA_NAMES.items():
            layer.get_submodule(place).weight = block.get_submodule(name).weight
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    question = tokenizer.encode(checkpoints.chat_prompt(file, "What is attention?")).ids
    return SmolLM2(ours, theirs, torch.tensor([question]))


@torch.no_grad()
def smollm2(kind: str, n_new: int, limit: float, rounds: int) -> Iterator[Row]:
    """A real model beside LlamaForCausalLM: the same greedy tokens."""
    ours, theirs, ids = load_smollm2()
    text = "64 tokens after a short prompt"
    if kind == "prompt":
        ids, text = torch.randint(theirs.config.vocab_size, (1, 2048)), "a prompt of 2,048 tokens"
    calls = {
        "ours": partial(ours.generate, ids, n_new),
        "theirs": partial(theirs.generate, ids, max_new_tokens=n_new, do_sample=False),
    }
    if not torch.equal(calls["ours"](), calls["theirs"]()):
        raise AssertionError(f"smollm2-{kind}: the two sides continue differently")
    seconds = take_turns(calls, max(rounds // 2, 2))
    what = f"SmolLM2-135M, {text}; LlamaForCausalLM.generate, sdpa, the same tensors"
    yield Row(f"smollm2-{kind}", what, seconds["ours"], seconds["theirs"], "s", limit)


@torch.no_grad()
def smollm2_compiled(rounds: int) -> Iterator[Row]:
    """Steps of the whole model as one graph with fixed caches, against both of theirs."""
    from transformers import DynamicCache, StaticCache  # noqa: PLC0415

    if not (shutil.which("c++") or shutil.which("g++")):
        return
    (ours, theirs, ids), n_new = load_smollm2(), 64
    length = ids.shape[1] + n_new
    compiled = {"ours": torch.compile(ours), "theirs": torch.compile(theirs)}

    def our_tokens() -> Tensor:
        caches, step, tokens = [tb.KVCache(length) for _ in ours.blocks], ids, []
        for _ in range(n_new):
            step = compiled["ours"](step, kv_caches=caches, last_only=True).argmax(dim=-1)
            tokens.append(step)
        return torch.cat(tokens, dim=1)

    def their_tokens(model: Callable, past: object) -> Tensor:
        step, tokens = ids, []
        for _ in range(n_new):
            out = model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
            step = out.logits.argmax(dim=-1)
            tokens.append(step)
        return torch.cat(tokens, dim=1)

    calls = {
        "ours": our_tokens,
        "eager": lambda: their_tokens(theirs, DynamicCache(config=theirs.config)),
        "static": lambda: their_tokens(
            compiled["theirs"], StaticCache(config=theirs.config, max_cache_len=length)
        ),
    }
    wanted = calls["eager"]()
    for name in ("ours", "static"):  # the second time a length is a symbol: nothing is compiled
        for _ in range(2):
            if not torch.equal(calls[name](), wanted):
                raise AssertionError(f"smollm2-compiled: {name} continues differently")
    seconds = take_turns(calls, max(rounds // 2, 2))
    what = "SmolLM2-135M, 64 tokens, torch.compile with fixed caches; LlamaForCausalLM"
    for name, text, limit in (
        ("eager", "not compiled", 0.85),
        ("static", "compiled with a static cache", 1.0),
    ):
        row = f"smollm2-compiled-{name}"
        yield Row(row, f"{what}, {text}", seconds["ours"], seconds[name], "s", limit)


@torch.no_grad()
def decode_attention(length: int, limit: float, rounds: int) -> Iterator[Row]:
    """Cache and attention of a step alone: its seven projections are the same on both sides."""
    from transformers import DynamicCache  # noqa: PLC0415
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415

    attn, steps = llama_layer().self_attn, 20 * rounds
    stored = torch.randn(2, 1, G, length - steps // 2, D_H)
    q, (k_new, v_new) = torch.randn(1, H, 1, D_H), torch.randn(2, 1, G, 1, D_H)
    theirs = DynamicCache(config=attn.config)
    theirs.update(*stored, 0)

    def their_step() -> Tensor:
        k, v = theirs.update(k_new, v_new, 0)
        return sdpa_attention_forward(attn, q, k, v, None, scaling=attn.scaling)[0]

    def step(path: Callable, cache: tb.KVCache) -> Tensor:
        return path(q, *cache.append(k_new, v_new)).transpose(1, 2)

    calls, expected = {"layer": their_step}, their_step()
    for name, path in PATHS.items():
        cache = tb.KVCache()
        cache.append(*stored)
        calls[name] = partial(step, path, cache)
        require_same(calls[name](), expected)
    evict = torch.randn(2**24).sum  # in a block the weights push K and V out of the caches
    seconds = take_turns(calls, steps, evict)
    path = better(seconds)
    what = f"cache and attention of a token at {length:,}, {path}; the layer's, DynamicCache"
    yield Row(f"decode-attention-{length}", what, seconds[path], seconds["layer"], "s", limit)


@torch.no_grad()
def decode_growth(rounds: int) -> Iterator[Row]:
    """A step with a long cache against the straight line through two shorter ones."""
    lengths, steps = (256, 4096, 16384), 10 * rounds
    cases = {str(length): Decoding(length, steps).calls for length in lengths}
    for path in PATHS:
        seconds = take_turns({length: calls[path] for length, calls in cases.items()}, steps)
        short, middle, long = seconds.values()
        slope = (middle - short) / (lengths[1] - lengths[0])
        line = middle + slope * (lengths[2] - lengths[1])
        what = f"a token at 16,384 cached, {path}; the line through 256 and 4,096 continued"
        yield Row(f"decode-growth-{path}", what, long, line, "s", 1.15)


def whole_sequence(length: int, train: bool, rounds: int) -> Iterator[Row]:
    """One pass over a whole sequence, forward or forward and backward: time, then peak memory."""
    layer, eager = llama_layer(), llama_layer("eager")
    eager.load_state_dict(layer.state_dict())
    blocks = our_blocks(layer)
    x = torch.randn(1, length, D, requires_grad=train)
    cos, sin = tb.build_rope_cache(length, D_H)
    position = {"position_embeddings": (cos[None], sin[None])}
    positions = torch.arange(length)

    def keep() -> Tensor:
        return tb.build_causal_mask(positions, positions)[None, None]

    def additive() -> Tensor:
        return torch.zeros(1, 1, length, length).masked_fill(~keep(), -math.inf)

    forwards = {  # each builds the mask it needs, as our blocks do
        "causal": lambda: layer(x, **position),
        "eager": lambda: eager(x, attention_mask=additive(), **position),
        "explicit": partial(blocks["explicit"], x, cos, sin),
        "fused": partial(blocks["fused"], x, cos, sin),
    }

    def run(forward: Callable) -> None:
        with torch.set_grad_enabled(train):
            out = forward()
            if train:
                out.sum().backward()

    with torch.no_grad():
        expected = forwards["causal"]()
        for forward in forwards.values():
            require_same(forward(), expected)
    calls = {name: partial(run, forward) for name, forward in forwards.items()}
    seconds = take_turns(calls, max(rounds * 2048 // length, 2))
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    kind = "train" if train else "prefill"
    run_name = f"{'a training step' if train else 'a prefill'} of {length:,} tokens"
    compared = (
        ("explicit", "eager", "the layer, written-out attention", 1.05, 1.05),
        ("explicit", "causal", "the layer, causal kernel without scores", 3.0, math.inf),
        ("fused", "causal", "the layer, the same causal kernel", 1.05, 1.05),
    )
    for path, reference, against, limit, memory_limit in compared:
        name, what = f"{kind}-{length}-{path}-{reference}", f"{run_name}, {path}; {against}"
        yield Row(name, what, seconds[path], seconds[reference], "s", limit)
        if memory_limit < math.inf:
            what = f"memory of {what}"
            yield Row(f"{name}-memory", what, peaks[path], peaks[reference], "B", memory_limit)


def score_memory(_rounds: int) -> Iterator[Row]:
    """Peaks in tensors of the size of all scores (explicit) or of one T x T table (fused).

    Only blocks of at least T*T bytes count, the size of a bool mask; the widths are so small that
    nothing but masks and scores is that large.
    """
    T = 2048
    x = torch.randn(1, T, 256, requires_grad=True)

    def peak(path: str, heads: int, train: bool) -> int:
        attn = tb.MultiHeadAttention(256, heads, heads // 4, rope=True, attend=PATHS[path])
        block = tb.ModernDecoderBlock(256, heads, heads // 4, 384, attn=attn)
        tables = tb.build_rope_cache(T, 256 // heads)

        def run() -> None:
            with torch.set_grad_enabled(train):
                out = block(x, *tables)
                if train:
                    out.sum().backward()

        return peak_bytes(run, at_least=T * T)

    table = T * T * 4
    scores = H * table
    for train, kind, limit in ((False, "forward", 3), (True, "backward", 4)):
        what = f"large tensors, explicit, {H} heads, {kind}; one score tensor"
        ours = peak("explicit", H, train)
        yield Row(f"memory-explicit-{kind}", what, ours, scores, "B", limit)
        for heads in (4, 32):
            what = f"large tensors, fused, {heads} heads, {kind}; one T×T float table"
            ours = peak("fused", heads, train)
            yield Row(f"memory-fused-{kind}-{heads}", what, ours, table, "B", 0)


@torch.no_grad()
def cache(_rounds: int) -> Iterator[Row]:
    """Bytes held, and bytes of history copied, while a cache grows one token at a time."""
    length = 5000
    k_new, v_new = torch.randn(2, 1, G, 1, D_H)
    wanted = partial(tb.kv_cache_bytes, 1, G, D_H, bytes_per_element=4)
    limits = {"growing": (None, 2, 2), "fixed": (length, 1, 0)}
    for name, (max_len, held_limit, copied_limit) in limits.items():
        kept, held, copied = tb.KVCache(max_len), {}, {}
        with CopiedBytes() as counter:
            for n in range(1, length + 1):
                kept.append(k_new, v_new)
                held[n] = storage_bytes(kept)
                copied[n] = (counter.total - wanted(n)) / n  # each entry itself is written once
        at = length if max_len else max(held, key=lambda n: held[n] / n)
        what = f"{name} cache: bytes held at {at:,} of 1 … {length:,} tokens; `kv_cache_bytes`"
        yield Row(f"cache-{name}-held", what, held[at], wanted(at), "B", held_limit)
        at = max(copied, key=copied.get)
        what = f"{name} cache: history copied a token, on average so far, at most; one entry"
        yield Row(f"cache-{name}-copied", what, copied[at], wanted(1), "B", copied_limit)


def masked_loop(ffn: tb.MoEFFN, x: Tensor) -> Tensor:
    """Routing as it is often written: a mask over all tokens for each expert."""
    tokens = x.flatten(0, -2)
    weight, expert = ffn.router(tokens).softmax(dim=-1).max(dim=-1)
    out = torch.zeros_like(tokens)
    for index, one in enumerate(ffn.experts):
        chosen = expert == index
        if chosen.any():
            out[chosen] = weight[chosen, None] * one(tokens[chosen])
    return out.view_as(x)


def dense_loop(ffn: tb.MoEFFN, x: Tensor) -> Tensor:
    """Every expert on every token, with what was not chosen multiplied by zero."""
    tokens = x.flatten(0, -2)
    weight, expert = ffn.router(tokens).softmax(dim=-1).max(dim=-1)
    out = torch.zeros_like(tokens)
    for index, one in enumerate(ffn.experts):
        out = out + (weight * (expert == index))[:, None] * one(tokens)
    return out.view_as(x)


def experts_alone(ffn: tb.MoEFFN, x: Tensor) -> None:
    """No routing: every expert computes an equal slice of the tokens."""
    for one, tokens in zip(ffn.experts, x[0].chunk(len(ffn.experts))):
        one(tokens)


@torch.no_grad()
def moe(rounds: int) -> Iterator[Row]:
    n_tokens, width, counts = 4096, 256, (4, 16, 64)
    x = torch.randn(1, n_tokens, width)
    ffns = {count: tb.MoEFFN(width, 2 * width, n_experts=count) for count in counts}
    calls = {f"ours {count}": partial(ffn, x) for count, ffn in ffns.items()}
    calls |= {f"masks {count}": partial(masked_loop, ffn, x) for count, ffn in ffns.items()}
    calls |= {f"alone {count}": partial(experts_alone, ffn, x) for count, ffn in ffns.items()}
    calls["dense 4"] = partial(dense_loop, ffns[4], x)
    for call, other in (("ours 4", "masks 4"), ("ours 4", "dense 4"), ("ours 64", "masks 64")):
        require_same(calls[call](), calls[other]())
    seconds = take_turns(calls, 4 * rounds)
    for count in (16, 64):  # as many multiplications, but products of fewer rows are slower
        limit = 1.25 * seconds[f"alone {count}"] / seconds["alone 4"]
        what = f"{n_tokens:,} tokens over {count} experts; over 4 experts"
        yield Row(f"moe-{count}", what, seconds[f"ours {count}"], seconds["ours 4"], "s", limit)
    for count in counts:
        what = f"{count} experts; a loop that masks the tokens of each"
        ours, theirs = seconds[f"ours {count}"], seconds[f"masks {count}"]
        yield Row(f"moe-masks-{count}", what, ours, theirs, "s", 1.05)
        what = f"{count} experts; the experts alone, each on as many tokens"
        yield Row(f"moe-alone-{count}", what, ours, seconds[f"alone {count}"], "s", 1.5)
    what = "4 experts; every expert on every token"
    yield Row("moe-dense-4", what, seconds["ours 4"], seconds["dense 4"], "s", 0.5)


@torch.no_grad()
def mixture(rounds: int) -> Iterator[Row]:
    """Eight experts a token; the reference gets the tokens of each, gathered beforehand."""
    n_tokens, width, n_experts, top_k = 4096, 256, 64, 8
    x = torch.randn(1, n_tokens, width)
    router = tb.SoftmaxRouter(width, n_experts, top_k)
    ffn = tb.MixtureFFN(router, (tb.GatedFFN(width, 2 * width) for _ in range(n_experts)))
    weights, chosen = router(x[0])
    given = [x[0, (chosen == index).any(dim=1)] for index in range(n_experts)]
    out = torch.zeros_like(x[0])
    for index, (one, tokens) in enumerate(zip(ffn.experts, given)):
        out[(chosen == index).any(dim=1)] += weights[chosen == index][:, None] * one(tokens)
    require_same(ffn(x)[0], out)

    def alone() -> None:
        for one, tokens in zip(ffn.experts, given):
            one(tokens)

    seconds = take_turns({"ours": partial(ffn, x), "alone": alone}, 2 * rounds)
    what = f"{n_tokens:,} tokens, {top_k} of {n_experts} experts; the same products of the experts"
    yield Row("mixture", what, seconds["ours"], seconds["alone"], "s", 1.25)


@torch.no_grad()
def mla(rounds: int) -> Iterator[Row]:
    """Latent attention in DeepSeek's proportions: a latent of 4 heads, half a head turned."""
    length, kv_rank, rope_dim = 4096, 4 * D_H, D_H // 2
    sizes = {"kv_rank": kv_rank, "rope_dim": rope_dim, "nope_dim": D_H, "v_dim": D_H}
    attn = tb.MultiHeadLatentAttention(D, H, **sizes)
    cos, sin = tb.build_rope_cache(length + 1, rope_dim)
    held, gqa = tb.KVCache(length), tb.KVCache(length)
    prompt, x = torch.randn(1, length, D).split((length - 1, 1), dim=1)
    attn(prompt[:, :1], cos=cos, sin=sin, kv_cache=held)  # shows what is cached, and its widths
    stored = [torch.randn(*t.shape[:2], length - 1, t.shape[3]) for t in (held.k, held.v)]
    held.reset()
    held.append(*stored)
    absorbed, expanded = attn.absorbed, attn.expanded

    def step(form: Callable) -> Tensor:
        attn.absorbed = form  # what a step with a cache calls
        return attn(x, cos=cos, sin=sin, kv_cache=held)[0]

    calls = {"absorbed": partial(step, absorbed), "expanded": partial(step, expanded)}
    reset = partial(held.truncate, length - 1)
    absorbed_out = calls["absorbed"]()
    reset()
    require_same(absorbed_out, calls["expanded"]())
    seconds = take_turns(calls, 4 * rounds, reset)
    what = f"latent attention, a token at {length:,} cached, absorbed; the expanded form"
    yield Row("mla-absorbed", what, seconds["absorbed"], seconds["expanded"], "s", 0.5)
    gqa.append(*torch.zeros(2, 1, 8, length, D_H))
    what = f"latent attention, bytes cached for {length:,} tokens; 8 KV heads of {D_H}"
    yield Row("mla-cache", what, storage_bytes(held), storage_bytes(gqa), "B", 0.3)


@torch.no_grad()
def after(rounds: int) -> Iterator[Row]:
    """A token at 16,384 through each operator of 2025 and 2026, beside GQA through the kernel."""
    length, gqa = 16384, partial(tb.MultiHeadAttention, D, H, G, rope=True, attend=tb.attend_fused)
    sizes = {"kv_rank": 4 * D_H, "rope_dim": D_H // 2, "nope_dim": D_H, "v_dim": D_H}
    latent = tb.MultiHeadLatentAttention(D, H, **sizes, q_rank=6 * D_H)
    index = {"n_index_heads": H // 2, "index_dim": D_H, "top_k": 2048}
    layers = {
        "gqa": gqa(),
        "gated": after_2025.OutputGatedAttention(gqa()),
        "delta": after_2025.GatedDeltaNet(D, 4, 8, k_dim=2 * D_H, v_dim=2 * D_H),
        "latent": latent,
        "indexed": after_2025.IndexedSparseAttention(latent, **index),
    }
    caches = {name: getattr(layer, "new_cache", tb.KVCache)() for name, layer in layers.items()}
    x, calls = torch.randn(1, 1, D), {}
    for name, layer in layers.items():
        width = layer.rope_dim if name == "latent" else D_H // 2 if name == "indexed" else D_H
        cos, sin = tb.build_rope_cache(length + 1, width)
        step = partial(layer, causal=True, cos=cos, sin=sin, kv_cache=caches[name])
        step(x)  # shows what is cached, and its widths; then as many tokens of noise
        if name == "delta":
            caches[name].update(length - 2, caches[name].state, caches[name].columns)
        for kept in vars(caches[name]).values() if name == "indexed" else [caches[name]]:
            if isinstance(kept, tb.KVCache):
                kept.append(*(t.new_empty(1, t.shape[1], length - 2, t.shape[3]).normal_()
                              for t in (kept.k, kept.v)))  # fmt: skip
        calls[name] = partial(step, x)

    def reset() -> None:
        for cache in caches.values():
            cache.truncate(length - 1)

    def held(name: str) -> int:
        cache = caches[name]
        if name == "delta":  # two states: that of the last token, and the one to go back to
            kept = cache.state, cache.columns, *cache._before[1:]
            return sum(t.untyped_storage().nbytes() for t in kept)
        parts = (cache.latent, cache.index) if name == "indexed" else (cache,)
        return sum(t.nbytes for part in parts for t in (part.k, part.v))

    for call in calls.values():
        call()
    bytes_held = {name: held(name) for name in calls}
    reset()
    seconds = take_turns(calls, 4 * rounds, reset)
    compared = (
        ("gated", "gqa", "output-gated attention", "GQA of 4 heads", 1.5, 1.0),
        ("delta", "gqa", "Gated DeltaNet", "GQA of 4 heads", 1.0, 0.1),
        ("indexed", "latent", "indexed attention, 2,048 keys", "dense latent attention", 1.1, 1.3),
        ("indexed", "gqa", "indexed attention, 2,048 keys", "GQA of 4 heads", 2.0, 1.0),
    )
    for name, other, what, against, time_limit, held_limit in compared:
        row = f"after-{name}-{other}"
        text = f"{what}, a token at {length:,}; {against}"
        yield Row(row, text, seconds[name], seconds[other], "s", time_limit)
        text = f"{what}, bytes held at {length:,}; {against}"
        yield Row(f"{row}-held", text, bytes_held[name], bytes_held[other], "B", held_limit)


def start(rounds: int) -> Iterator[Row]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    run = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, env=environment)
    script, bare = [sys.executable, tb.__file__], [sys.executable, "-c", "import torch"]
    calls = {"script": partial(run, script), "import": partial(run, bare)}
    seconds = take_turns(calls, 2 * rounds + 1)
    what = "the whole script, one thread; `import torch` alone"
    yield Row("start", what, seconds["script"], seconds["import"], "s", 1.10)


MEASUREMENTS: dict[str, Callable[[int], Iterator[Row]]] = {
    "decode-256": partial(decode, 256, 1.05),
    "decode-1024": partial(decode, 1024, 1.05),
    "decode-4096": partial(decode, 4096, 1.05),
    "decode-plain-256": partial(decode_plain, 256),
    "decode-plain-4096": partial(decode_plain, 4096),
    "decode-plain-16384": partial(decode_plain, 16384),
    "decode-compiled-4096": partial(decode_compiled, 4096),
    "smollm2-tokens": partial(smollm2, "tokens", 64, 0.95),
    "smollm2-prompt": partial(smollm2, "prompt", 1, 1.05),
    "smollm2-compiled": smollm2_compiled,
    "decode-attention-4096": partial(decode_attention, 4096, 0.80),
    "decode-growth": decode_growth,
    "prefill-2048": partial(whole_sequence, 2048, False),
    "prefill-4096": partial(whole_sequence, 4096, False),
    "train-2048": partial(whole_sequence, 2048, True),
    "train-4096": partial(whole_sequence, 4096, True),
    "memory": score_memory,
    "cache": cache,
    "moe": moe,
    "mixture": mixture,
    "mla": mla,
    "after": after,
    "start": start,
}


def wanted(known: str, names: list[str]) -> bool:
    """Whether one of the names begins this measurement's, or is that of one of its rows."""
    return any(name and (known.startswith(name) or name.startswith(known)) for name in names)


def other_seconds() -> float:
    """Processor seconds that other programs have used so far; 0 where /proc/stat does not tell."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split()[1:9]
    except OSError:
        return 0.0
    idle, waiting = map(int, fields[3:5])
    busy = sum(map(int, fields)) - idle - waiting
    return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"beginnings of: {' '.join(MEASUREMENTS)}")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--write", metavar="FILE", help="write the table there as well")
    options = parser.parse_args(argv)
    for name in options.names:
        if not any(wanted(known, [name]) for known in MEASUREMENTS):
            parser.error(f"no measurement starts with {name!r}: {' '.join(MEASUREMENTS)}")
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.write:
        try:
            open(options.write, "a").close()
        except OSError as error:  # now, not after ten minutes
            parser.error(f"--write {options.write}: {error.strerror}")
    torch.set_num_threads(options.threads)
    rounds, start_time, start_busy = 2 if options.quick else 10, time.time(), other_seconds()
    lines = [
        "| row | ours; reference | ours / reference | ratio | limit | holds |",
        "|---|---|--:|--:|--:|---|",
    ]
    print("\n".join(lines), flush=True)
    all_hold = True
    for known, measure in MEASUREMENTS.items():
        if not options.names or wanted(known, options.names):
            torch.manual_seed(0)
            for row in measure(rounds):
                all_hold &= row.holds
                lines.append(row.line())
                print(lines[-1], flush=True)
    others = (other_seconds() - start_busy) / (time.time() - start_time)
    lines += [
        "",
        f"torch {torch.__version__}, {options.threads} threads, float32, batch 1; decode, prefill "
        f"and train: a block of d {D}, {H} query and {G} KV heads, h {D_FF}; "
        f"{'fewer' if options.quick else 'all'} rounds; "
        f"other programs took {others:.0%} of a core.",
    ]
    if others > 0.2:  # two threads that wait for each other make a step ten times as long
        lines[-1] += " **Disturbed: the ratios of times do not count.**"
    print("\n".join(lines[-2:]))
    if options.write:
        Path(options.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
