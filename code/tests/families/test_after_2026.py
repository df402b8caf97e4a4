"""The operators of 2026: planted faults are seen by the file's proofs and by transformers' classes,
and the file as it is called. That the operators equal the classes is in test_families.py."""

import ast
import builtins
import functools
import inspect
import sys
import types
from pathlib import Path

import pytest
import recipe_parts
import test_families as families
import torch
import transformer_block as tb
from torch import nn

import after_2025
import after_2026

FILE = Path(after_2026.__file__)
BOTH, PROOFS_ONLY = True, False  # caches, gradients and checks are not what the classes are asked

# In the class or function, what stands there once becomes something else.
FAULTS: dict[str, list[tuple[str, str, bool]]] = {
    "NarrowValueAttention": [
        ("self.value_scale * split_heads", "split_heads", BOTH),
        ("apply_rope(split_heads(self.q_proj(x), self.head_dim), *rows)",
         "split_heads(self.q_proj(x), self.head_dim)", BOTH),
        ("v = self.value_scale * split_heads(self.v_proj(x), self.v_dim)",
         "v = self.value_scale * split_heads(self.v_proj(x), self.v_dim).flip(1)", BOTH),
        ("keep, causal=causal)", "keep)", PROOFS_ONLY),
        ("self.attend(q, k, v, keep", "attend(q, k, v, keep", BOTH),
        ("k, v = kv_cache.append(k, v)", "k, v = kv_cache.append(k, v / self.value_scale)",
         PROOFS_ONLY),
        ("start_position(start_pos, kv_cache)", "0", PROOFS_ONLY),
    ],
    "GatedSharedExpert": [
        ("torch.sigmoid(self.gate(x)) * self.expert(x)", "self.expert(x)", BOTH),
        ("torch.sigmoid(self.gate(x))", "torch.sigmoid(-self.gate(x))", BOTH),
        ("torch.sigmoid(self.gate(x))", "self.gate(x)", BOTH),
        ("self.gate(x)) * self.expert(x)", "self.gate(self.expert(x))) * self.expert(x)", BOTH),
    ],
    "LimitedGatedFFN": [
        (".clamp(max=self.limit)", ".clamp(-self.limit, self.limit)", BOTH),
        (".clamp(max=self.limit)", "", BOTH),
        (".clamp(-self.limit, self.limit)", "", BOTH),
        (".clamp(-self.limit, self.limit)", ".clamp(max=self.limit)", BOTH),
        ("F.silu(gate)", "F.gelu(gate)", BOTH),
        ("F.silu(gate) *", "F.silu(gate) + F.silu(gate) *", BOTH),
    ],
    "SqrtSoftplusRouter": [
        ("F.softplus(logits).sqrt()", "F.softplus(logits)", BOTH),
        ("F.softplus(logits).sqrt()", "logits.sigmoid()", BOTH),
        ("else scores + self.selection_bias", "else scores", BOTH),
        ("return scores, self", "return ranked, self", BOTH),
        ("scores + self.selection_bias", "scores - self.selection_bias", BOTH),
    ],
    "HashRouter": [
        ("F.embedding(ids.long(), self.table)", "F.embedding(ids.long() * 0, self.table)", BOTH),
        (".sqrt()", "", BOTH),
        ("weights / (weights.sum(dim=1, keepdim=True) + 1e-20)", "weights", BOTH),
        ("(self.scale * weights)", "weights", BOTH),
        ("scores.gather(1, experts)", "scores.topk(self.top_k).values", BOTH),
    ],
    "HashMixtureFFN": [
        ("weights[row, place, None] * expert", "expert", BOTH),
        ("out.index_add(0, row, given.to(x.dtype))", "out.index_copy(0, row, given)", BOTH),
        ("else out + self.shared(x)", "else out", BOTH),
        ("self.router(tokens, ids.flatten())", "self.router(tokens, ids.flatten().flip(0))", BOTH),
    ],
    "GroupedLinear": [
        ("(parts @ self.weight)", "(parts @ self.weight.flip(0))", BOTH),
    ],
    "EntryPooling": [
        ("gate = gate + self.slot_bias", "pass", BOTH),
        (".softmax(dim=2)", ".softmax(dim=3)", BOTH),
        ("at_least_float32(gate).softmax(dim=2).to(kv)", "torch.ones_like(kv) / kv.shape[2]", BOTH),
        ("kv_a[:, :-1], kv_b[:, 1:]", "kv_b[:, :-1], kv_b[:, 1:]", BOTH),
        ("kv_a[:, :-1], kv_b[:, 1:]", "kv_a[:, 1:], kv_b[:, 1:]", BOTH),
        ("value=-math.inf)", "value=0.0)", BOTH),
        ("self.norm((weights * kv).sum(dim=2))", "(weights * kv).sum(dim=2)", BOTH),
        ("first = self.rate * torch.arange", "first = torch.arange", BOTH),
        ("cos[first.to(cos.device)]", "cos[first.to(cos.device) + 1]", BOTH),
        ("else torch.cat((pending, both), dim=1)", "else both", PROOFS_ONLY),
        ("self.rate if self.overlap and start >= self.rate else 0", "0", PROOFS_ONLY),
        ("(self.rate if self.overlap and done else 0)", "0", PROOFS_ONLY),
    ],
    "EntryIndex": [
        ("F.relu(at_least_float32(keys[:, 0]) @ rows.mT)",
         "(at_least_float32(keys[:, 0]) @ rows.mT)", PROOFS_ONLY),
        ("(weight[..., None] * hits)", "hits", BOTH),
        ("apply_rope(split_heads(self.q_proj(latent.detach()), self.width), cos, sin)",
         "split_heads(self.q_proj(latent.detach()), self.width)", BOTH),
        ("self.q_proj(latent.detach())", "self.q_proj(latent)", PROOFS_ONLY),
        ("self.weight_proj(x.detach())", "self.weight_proj(x)", PROOFS_ONLY),
    ],
    "CompressedAttention": [
        ("out = apply_rope(out, rows[0], -rows[1])", "pass", BOTH),
        ("rows[0], -rows[1])", "rows[0], rows[1])", BOTH),
        ("F.rms_norm(q, q.shape[-1:], eps=self.norm_eps)", "q", BOTH),
        ("self.kv_norm(self.kv_proj(x))", "self.kv_proj(x)", BOTH),
        ("self.attend(q, k, k, keep)", "attend(q, k, k, keep)", BOTH),
        ("positions, self.window)", "positions, self.window + 1)", BOTH),
        ("positions, self.window)", "positions)", BOTH),
        ("self.q_norm(self.q_down(x))", "self.q_down(x)", BOTH),
        ("self.o_proj(self.o_groups(out.transpose(1, 2).flatten(2)))",
         "self.o_proj(self.o_groups(out.flip(1).transpose(1, 2).flatten(2)))", BOTH),
        ("else torch.cat((cache.keys, k), dim=2)", "else k", PROOFS_ONLY),
        ("k.shape[2] - self.window + 1", "k.shape[2] - self.window - 1", PROOFS_ONLY),
    ],
    "pooled_entries": [
        ("after[:, None] // rate", "(after[:, None] - 1) // rate", BOTH),
        ("after[:, None] // rate", "(after[:, None] + rate - 1) // rate", BOTH),
        (".masked_fill(~seen, -math.inf)", "", BOTH),
        ("min(index.top_k, keys.shape[2])", "keys.shape[2]", BOTH),
        ("seen & torch.zeros_like(seen).scatter(-1, best, True)", "seen", BOTH),
        ("torch.cat((cache.entries, entries), dim=2)", "entries", PROOFS_ONLY),
        ("torch.cat((cache.index_entries, keys), dim=2)", "keys", PROOFS_ONLY),
    ],
    "require_compressed": [
        ("if mask is not None or not causal:", "if mask is not None:", PROOFS_ONLY),
        ("if kv_cache is None and start:", "if False:", PROOFS_ONLY),
        ("and not key_padding_mask.all()", "and False", PROOFS_ONLY),
        ("require_forward_pass()", "pass", PROOFS_ONLY),
        ('kv_cache.require_part("keys", shape, x.dtype, x.device)', "pass", PROOFS_ONLY),
    ],
    "IndependentConnection": [
        ("torch.eye(self.n_streams).to(wide)",
         "torch.full((self.n_streams,) * 2, 1 / self.n_streams).to(wide)", BOTH),
        ("self.magnitude * torch.sigmoid", "torch.sigmoid", BOTH),
        ("self.scale[1] * post + post_bias", "post + post_bias", BOTH),
        ("self.scale[0] * pre + pre_bias", "self.scale[0] * pre", BOTH),
        ("torch.sigmoid(self.scale[0] * pre + pre_bias)",
         "(self.scale[0] * pre + pre_bias).softmax(-1)", BOTH),
        ("normed = F.rms_norm(wide, wide.shape[-1:], eps=self.norm_eps)", "normed = wide", BOTH),
        ("pre_bias) + self.eps", "pre_bias)", PROOFS_ONLY),
        ("post_bias) + self.eps", "post_bias)", PROOFS_ONLY),
        ("-math.log(n_streams - 1)", "-math.log(n_streams + 5)", PROOFS_ONLY),
    ],
    "SinkLatentAttention": [
        ("return self.attend(q, k, v, keep, causal=causal, scale=1.0)",
         "return attend(q, k, v, keep, causal=causal, scale=1.0)", BOTH),
        ("out = self.attend(q, k, k[..., : self.kv_rank]",
         "out = attend(q, k, k[..., : self.kv_rank]", PROOFS_ONLY),
    ],
    "GatedLatentAttention": [
        ("heads * torch.sigmoid(self.gate_proj(x))", "heads", BOTH),
        ("torch.sigmoid(self.gate_proj(x))", "F.silu(self.gate_proj(x))", BOTH),
        ("torch.sigmoid(self.gate_proj(x))", "torch.sigmoid(self.gate_proj(x)).mean(-1, True)",
         BOTH),
    ],
    "SharedIndexAttention": [
        ("choice[-1], keep", "None, keep", BOTH),
        ("choice[-1], keep", "choice[-1].flip(1), keep", BOTH),
        ("choice[-1], keep", "choice[-1], None", BOTH),
        ("if not choice:", "if False:", PROOFS_ONLY),
    ],
    "IndexGroup": [
        ("choice=choice, **options)", "choice=[*choice, None], **options)", BOTH),
        ("kv_cache=cache, choice", "kv_cache=None, choice", PROOFS_ONLY),
        ("if not isinstance(layer.attn, wanted):", "if False:", PROOFS_ONLY),
    ],
    "GroupCache": [
        ("            cache.truncate(length)", "            self.caches[0].truncate(length)",
         PROOFS_ONLY),
        ("            cache.reset()", "            self.caches[0].reset()", PROOFS_ONLY),
    ],
    "TokenRoutedLM": [
        ('options | {"ids": ids}', 'options | {"ids": ids * 0}', BOTH),
    ],
}  # fmt: skip
PROOFS = {"NarrowValueAttention": "B01", "SinkLatentAttention": "B04", "TokenRoutedLM": "B05"}
PROOFS |= dict.fromkeys(("GatedSharedExpert", "LimitedGatedFFN", "SqrtSoftplusRouter"), "B02")
PROOFS |= dict.fromkeys(("HashRouter", "HashMixtureFFN"), "B02")
PROOFS |= dict.fromkeys(("IndependentConnection", "GatedLatentAttention", "GroupCache"), "B04")
PROOFS |= dict.fromkeys(("SharedIndexAttention", "IndexGroup"), "B04")
MODELS = dict.fromkeys(PROOFS, "Hy4-preview") | {
    "NarrowValueAttention": "MiMo-V2-Flash",
    "GatedSharedExpert": "Qwen3-Next 80B-A3B",
    "TokenRoutedLM": "DeepSeek-V4-Flash",
}
V4 = ("SqrtSoftplusRouter", "HashRouter", "HashMixtureFFN", "LimitedGatedFFN")
MODELS |= dict.fromkeys(V4, "DeepSeek-V4-Flash")
CASES = [(place, *fault) for place, faults in FAULTS.items() for fault in faults]


def faulty(place: str, old: str, new: str) -> types.ModuleType:
    """The module with old made new in that class or function."""
    source = FILE.read_text(encoding="utf-8")
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == place)
    lines = source.splitlines(keepends=True)
    text = "".join(lines[node.lineno - 1 : node.end_lineno])
    assert text.count(old) == 1, f"{old!r} must stand once in {place}"
    module = types.ModuleType("faulty")
    exec(compile(source.replace(text, text.replace(old, new)), FILE.name, "exec"), module.__dict__)
    return module


def proofs_hold(module: types.ModuleType, place: str) -> bool:
    """Whether every proof holds; the likeliest to fail comes first."""
    proofs = {name[5:]: proof for name, proof in vars(module).items() if name.startswith("demo_B")}
    order = sorted(proofs, key=lambda name: name != PROOFS.get(place, "B03"))
    return all(tb.main_verdict(proofs[name], "cpu")[0] for name in order)


@functools.cache
def official(model: str) -> tuple[families.Family, nn.Module, torch.Tensor]:
    """The row's small model in transformers, and its logits."""
    family = families.FAMILIES[f"row {model}"]
    theirs = families.official_model(family)
    with torch.no_grad():
        return family, theirs, theirs(families.token_ids())[0]


def equals_transformers(module: types.ModuleType, model: str, monkeypatch) -> bool:
    """Whether the model composed of this module's classes gives transformers' logits."""
    family, theirs, expected = official(model)
    for name in vars(recipe_parts).keys() & vars(module).keys():
        if getattr(vars(module)[name], "__module__", "") == "faulty":
            monkeypatch.setattr(recipe_parts, name, vars(module)[name])
    try:
        ours = families.load(family.ours(), theirs, family.names)
        with torch.no_grad():
            gap = (ours(families.token_ids()) - expected).abs().max()
    except Exception:  # it does not even run
        return False
    return bool(gap < 1e-4)


def test_without_a_fault_both_hold(monkeypatch):
    module = faulty("HashRouter", "% n_experts  #", "% (n_experts)  #")
    assert proofs_hold(module, "HashRouter")
    for model in sorted({*MODELS.values(), "DeepSeek-V4-Flash"}):
        assert equals_transformers(module, model, monkeypatch), model


@pytest.mark.parametrize(("place", "old", "new", "both"), CASES)
def test_planted_fault_is_seen(place, old, new, both, monkeypatch):
    """By the proofs, and where the full pass of a model shows it by transformers too."""
    module = faulty(place, old, new)
    assert not proofs_hold(module, place)
    if both:
        model = MODELS.get(place, "DeepSeek-V4-Flash")
        assert not equals_transformers(module, model, monkeypatch)


# =============================================================================================
# The file as it is called
# =============================================================================================

NAMES = [
    name
    for name, value in vars(after_2026).items()
    if getattr(value, "__module__", "") == "after_2026"
    and not name.startswith(("demo_", "check_", "reference_", "main"))
]


def shown(name: str, capsys) -> str:
    assert after_2026.main(["--show", name]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_shown_text_runs_alone(name, capsys):
    text = shown(name, capsys)
    used = {part.id for part in ast.walk(ast.parse(text)) if isinstance(part, ast.Name)}
    space: dict[str, object] = {}
    exec(text, space)
    assert name in space and "import transformer_block" not in text
    known = {*vars(tb), *vars(after_2025), *vars(after_2026)} - set(dir(builtins))
    assert not {word for word in used & known if word not in space}


def test_every_class_and_function_fits_on_a_page():
    for name in NAMES:
        assert len(inspect.getsource(getattr(after_2026, name)).splitlines()) <= 70, name


def test_list_single_proofs_and_wrong_calls(capsys):
    assert after_2026.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == 5
    assert after_2026.main(["b02"]) == 0
    assert capsys.readouterr().out.startswith("[B02]")
    for wrong in (["B9"], ["--show", "Nothing"], ["B01", "--list"]):
        assert after_2026.main(wrong) == 2
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and not out


def test_only_torch_and_the_project():
    nodes = ast.walk(ast.parse(FILE.read_text(encoding="utf-8")))
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    nodes = ast.walk(ast.parse(FILE.read_text(encoding="utf-8")))
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    found = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert found == {"torch", "transformer_block", "after_2025"}
