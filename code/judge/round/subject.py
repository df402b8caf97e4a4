"""A file of the round as an object: executed, with the judge's sizes, on drawn weights."""

import dataclasses
import linecache
import random
import sys
import types
import warnings
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from judge.round.measuring import NotMeasuredError

SIZES = {  # pairwise different where a mix-up could hide
    "vocab_size": 13, "context": 9, "width": 24, "n_heads": 3, "n_layers": 2, "drop_rate": 0.0,
    "batch_size": 4, "micro_batches": 2, "steps": 3, "warmup": 2, "max_rate": 1e-5,
    "min_rate": 1e-6, "decay": 0.1, "clip": 1e9,
}  # fmt: skip
FUNCTIONS = (
    "encode", "decode", "split", "get_batch", "make_optimizer", "learning_rate", "train",
    "generate",
)  # fmt: skip


def stream(name: str) -> Callable[[], float]:
    """Numbers in [0, 1) that depend on a name alone, on any Python and any torch."""
    return random.Random(zlib.crc32(name.encode())).random


def drawn_ids(name: str, *shape: int, below: int = SIZES["vocab_size"]) -> Tensor:
    draw = stream(name)
    count = torch.Size(shape).numel()
    return torch.tensor([int(draw() * below) for _ in range(count)]).reshape(shape)


def drawn_weight(name: str, shape: torch.Size) -> Tensor:
    """Numbers for a parameter, spread so that each part of the model shows in the logits."""
    draw = stream(name)
    numbers = torch.tensor([2 * draw() - 1 for _ in range(shape.numel())]).reshape(shape)
    if len(shape) == 1:
        return 0.3 * numbers + (1.0 if name.endswith("weight") else 0.0)
    table = shape[0] in (SIZES["vocab_size"], SIZES["context"])
    return numbers * (0.6 if table else 2.2 / shape[1] ** 0.5)


class Subject:
    """An executed file; `names` says how it calls what pieces.txt calls otherwise."""

    def __init__(self, text: str, names: dict[str, str], filename: str):
        self.names, self.filename = names, filename
        self.space = executed(text, filename)
        for name in (names["Settings"], names["GPT"], *FUNCTIONS):
            if not callable(self.space.get(name)):
                raise NotMeasuredError(f"it defines no {name}")

    def __getitem__(self, name: str) -> Callable:
        return self.space[self.names.get(name, name)]

    def settings(self, **changes: object) -> object:
        """Their settings with the judge's sizes."""
        values = {self.names.get(k, k): v for k, v in {**SIZES, **changes}.items()}
        try:
            return self["Settings"](**values)
        except TypeError as error:
            raise NotMeasuredError(f"{self.names['Settings']} has other fields: {error}") from None

    def fresh(self, **changes: object) -> nn.Module:
        model = self["GPT"](self.settings(**changes))
        if not isinstance(model, nn.Module):
            raise NotMeasuredError(f"{self.names['GPT']} is no nn.Module")
        return model

    def model(self, layout: dict[str, Tensor], **changes: object) -> nn.Module:
        """Their model in eval mode, holding drawn weights."""
        model = self.fresh(**changes)
        with torch.no_grad():
            for name, weight in layout.items():
                parameter = self.parameter(model, name)
                if parameter.shape != weight.shape:
                    raise NotMeasuredError(
                        f"parameter {name} has shape {list(parameter.shape)}, "
                        f"it must keep {list(weight.shape)}"
                    )
                parameter.copy_(weight)
        return model.eval()

    def parameter(self, model: nn.Module, path: str) -> Tensor:
        """A parameter by its path, also where the model does not know of it."""
        part: object = model
        for step in path.split("."):
            if isinstance(part, (list, tuple)) and step.isdigit() and int(step) < len(part):
                part = part[int(step)]
            else:
                part = getattr(part, step, None)
        if not isinstance(part, Tensor):
            raise NotMeasuredError(f"{self.names['GPT']} has no parameter {path}")
        return part


def drawn_layout(clean: Subject) -> dict[str, Tensor]:
    """Weights for each parameter of the contract; names of one parameter get the same."""
    layout: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, parameter in clean.fresh().named_parameters(remove_duplicate=False):
        seen.setdefault(id(parameter), drawn_weight(name, parameter.shape))
        layout[name] = seen[id(parameter)]
    return layout


def executed(text: str, filename: str) -> dict[str, object]:
    """The names that a file defines; what it sets globally is put back."""
    module = types.ModuleType(f"round_{zlib.crc32(filename.encode())}")
    module.__file__ = filename
    sys.modules[module.__name__] = module  # dataclasses look their module up
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    code = compile(text, filename, "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, module.__dict__)
    reset()
    return module.__dict__


def reset() -> None:
    """What decides about numbers is the judge's, whatever a file has set."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.set_num_threads(1)


def with_changes(settings: object, **changes: object) -> object:
    """Settings with other values, whatever class they are of."""
    if dataclasses.is_dataclass(settings):
        return dataclasses.replace(settings, **changes)
    return type(settings)(**{**vars(settings), **changes})
