"""What a cache costs: the numbers that it gains with a token, whatever it is made of."""

import types

import torch
from torch import Tensor, nn


def floating_tensors(cache: object) -> dict[str, Tensor]:
    """Everything of a cache that may hold numbers, by path; views of one storage count once."""
    found: dict[str, Tensor] = {}
    _visit("", cache, found, set())
    largest: dict[int, str] = {}
    for path, tensor in found.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage not in largest or found[largest[storage]].numel() < tensor.numel():
            largest[storage] = path
    return {path: found[path].detach() for path in largest.values()}


def _visit(path: str, value: object, found: dict[str, Tensor], seen: set[int]) -> None:
    """Walk through containers, modules and objects."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found[path] = value
        return
    if id(value) in seen or isinstance(value, (type, types.ModuleType, str)):
        return
    seen.add(id(value))
    for key, item in _members(value):
        _visit(f"{path}.{key}", item, found, seen)


def _members(value: object) -> list[tuple[object, object]]:
    if isinstance(value, nn.Module):
        value = {**dict(value.named_buffers()), **vars(value)}
        return [(k, v) for k, v in value.items() if not k.startswith("_")]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set)) or type(value).__name__ == "deque":
        return list(enumerate(value))
    slots = getattr(value, "__slots__", ())
    return [*getattr(value, "__dict__", {}).items(), *((k, getattr(value, k, None)) for k in slots)]


def numbers_gained(before: dict[str, Tensor], after: dict[str, Tensor]) -> int:
    """Numbers that are new or changed; what was taken beforehand and left alone is free."""
    count = 0
    for path, tensor in after.items():
        old = before.get(path)
        if old is not None and old.shape == tensor.shape:
            count += int(((old != tensor) & ~(old.isnan() & tensor.isnan())).sum())
        else:
            count += max(0, tensor.numel() - (0 if old is None else old.numel()))
    return count


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As they are now, for they may be changed in place."""
    return {path: torch.clone(t) for path, t in tensors.items()}
