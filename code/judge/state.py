"""What a judged file may set for the whole process, and putting it back.

A default device, a dtype, gradients switched off or another softmax in torch.nn.functional would
reach the answers as well, and make a wrong answer equal to them.
"""

import builtins
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import linecache
import math
import operator
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from judge.answers import execute

MODULES = (builtins, copy, functools, inspect, itertools, math, random, torch, nn)
TORCH_MODULES = ("nn.functional", "nn.init", "linalg", "special", "autograd", "random", "overrides")


class Patches:
    """What modules and classes held when this was made; undo() gives it back to them."""

    def __init__(self):
        modules = [*MODULES, *(importlib.import_module(f"torch.{name}") for name in TORCH_MODULES)]
        modules += [m for name, m in sys.modules.items() if name.split(".")[0] == "judge"]
        classes = [torch.Tensor, nn.Parameter, torch.Generator, torch.Size]
        classes += [one for one in vars(nn).values() if isinstance(one, type)]
        for module in modules:
            if module.__name__.startswith("judge"):
                classes += [one for one in vars(module).values() if isinstance(one, type)]
        self.modules = {name: m for name, m in sys.modules.items() if m in modules}
        self.held = [(owner, dict(vars(owner))) for owner in dict.fromkeys((*modules, *classes))]

    def undo(self) -> None:
        """Put back what has been replaced, and take off what classes have gained."""
        sys.modules.update(self.modules)
        for owner, before in self.held:
            now = vars(owner)
            if not all(map(operator.is_, map(now.get, before), before.values())):
                for name in [name for name in before if now.get(name) is not before[name]]:
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(owner, name, before[name])
            if isinstance(owner, type) and len(now) != len(before):
                for name in [name for name in now if name not in before]:
                    with contextlib.suppress(AttributeError, TypeError):
                        delattr(owner, name)


def reset_settings() -> None:
    """What is set in torch for everybody, as the judge needs it: float64 on the CPU, gradients."""
    torch.set_default_device(None)
    while torch._C._len_torch_function_stack():  # modes that were entered and never left
        torch._C._pop_torch_function_stack()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the call imports the compiler
        torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_autocast_enabled("cpu", False)
    torch.set_flush_denormal(False)
    torch.set_num_threads(1)  # the tensors are tiny


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """The settings of the judge inside, those of the caller afterwards."""
    dtype, threads, rng = torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state()
    depth = sys.getrecursionlimit()
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reset_settings()
            yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_rng_state(rng)
        sys.setrecursionlimit(depth)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype, forget: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The dtype of new tensors; forget clears tables that code has cached in another."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        forget()
        yield
    finally:
        torch.set_default_dtype(before)
        forget()


class Raised(NamedTuple):
    """An exception of a submitted file: how Python shows it, cut to that file."""

    lines: tuple[str, ...]


class SubmittedFile:
    """A text that was executed: its definitions, what it raises, and what it changed for others."""

    def __init__(self, text: str, filename: str):
        """Nothing runs yet: run() does it, and may raise whatever the text raises."""
        self.text, self.filename = text, filename
        self.namespace: dict[str, object] = {}
        lines = text.splitlines(keepends=True)
        linecache.cache[filename] = (len(text), None, lines, filename)
        self._patches = Patches()
        self._caches: list[Callable[[], None]] = []

    def run(self) -> None:
        """Execute it, in float32 as a program runs."""
        try:
            with default_dtype(torch.float32):
                self.namespace = execute(self.text, self.filename)
        finally:
            self.restore()
        for value in list(self.namespace.values()):
            members = vars(value).values() if isinstance(value, type) else ()
            found = [getattr(one, "cache_clear", None) for one in (value, *members)]
            self._caches += [clear for clear in found if callable(clear)]

    def restore(self) -> None:
        """Take back what it has set or replaced for everybody."""
        reset_settings()
        self._patches.undo()

    def forget(self) -> None:
        """Clear what its functions have cached."""
        for clear in self._caches:
            clear()

    def raised(self, error: BaseException) -> Raised:
        """The exception as Python shows it, cut to the last two frames in the file."""
        return raised_in(self.filename, error)


def raised_in(filename: str, error: BaseException) -> Raised:
    """The same of any file; only what is said at the end where it has no frame in it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == filename][-2:]
    lines = [line for frame in traceback.format_list(own) for line in frame.splitlines()]
    lines = [line.strip("\n") for line in lines if set(line.strip()) - set("^~ ")]
    message = "".join(traceback.format_exception_only(type(error), error))
    if isinstance(error, SyntaxError):
        return Raised(tuple(message.rstrip().split("\n")[-4:]))
    return Raised((*lines, message.strip().split("\n")[0][:300]))
