"""The operators of 2026: planted faults are seen by the file's proofs and by transformers' classes.
That the operators equal the classes is in test_families.py."""

import functools
import types

import pytest
import recipe_parts
import test_families as families
import torch
from planted import faulty, proofs_hold, read_faults
from torch import nn

import after_2026

FAULTS = read_faults(after_2026.__file__)


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
    same = "HashRouter", "% n_experts  #", "% (n_experts)  #"
    module = faulty(after_2026.__file__, *same)
    assert proofs_hold(module, "B02")
    for model in sorted({fault.model for fault in FAULTS}):
        assert equals_transformers(module, model, monkeypatch), model


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_seen(fault, monkeypatch):
    """By the proofs, and where the full pass of a model shows it by transformers too."""
    module = faulty(after_2026.__file__, fault.place, fault.old, fault.new)
    assert not proofs_hold(module, fault.proof)
    if "transformers" in fault.seen_by:  # caches, gradients and checks are not asked of the classes
        assert not equals_transformers(module, fault.model, monkeypatch)
