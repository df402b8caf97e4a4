"""Whether a ready layer of torch does the work of an answer: right all the same, and said."""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from judge.cases import drawn

FUNCTIONS = {
    "rms_norm": (F.rms_norm, torch.rms_norm),
    "layer_norm": (F.layer_norm, torch.layer_norm),
    "attention": (F.scaled_dot_product_attention,),
}
CLASSES = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder)


class Called(TorchFunctionMode):
    """Notes the functions of torch that are called while it is on."""

    def __init__(self):
        super().__init__()
        self.functions: list[Callable] = []

    def __torch_function__(self, func: Callable, types: object, args=(), kwargs=None) -> object:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def ready_layer(name: str, answer: Callable) -> str | None:
    """The name of torch's function or layer that does the whole of an answer, if one does."""
    if inspect.isclass(answer):
        return ready_class(answer)
    if name not in FUNCTIONS:
        return None
    tensors = {
        "rms_norm": (drawn("x", 2, 6), drawn("weight", 6)),
        "layer_norm": (drawn("x", 2, 6), drawn("weight", 6), drawn("bias", 6)),
        "attention": tuple(drawn(one, 1, 2, 3, 4) for one in "qkv"),
    }
    with Called() as called:
        answer(*tensors[name])
    ready = [one for one in FUNCTIONS[name] if one in called.functions]
    return f"{ready[0].__name__}" if ready else None


def ready_class(cls: type) -> str | None:
    """A layer of torch that a class inherits from, or builds and calls for the whole piece."""
    if not issubclass(cls, nn.Module):
        return None
    inherited = [one for one in CLASSES if issubclass(cls, one)]
    if inherited:
        return f"nn.{inherited[0].__name__}"
    try:
        module = cls(8, 2, 8)
    except Exception:  # other sizes: no layer of torch takes its place
        return None
    held = [one for one in CLASSES for part in module.modules() if isinstance(part, one)]
    return f"nn.{held[0].__name__}" if held else None
