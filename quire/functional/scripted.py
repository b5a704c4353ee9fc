"""Loops of short operations that run without Python.

Threads that each go through their own rows share one Python, and what is short waits for it: a sweep over
chunks that lie in a core's cache took a third longer for that. PyTorch's interpreter of scripts (TorchScript)
runs the same loop without it, and calls an operation in half the time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class scripted(Generic[P, T]):
    """The function as a script, made when it is first called; itself where PyTorch makes none of it.

    TorchScript is no longer developed, so nothing depends on it but speed: the function is ordinary code.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self.function = function
        self._program: Any = None
        self._making = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        program = self._program or self._make()
        if program is self.function:
            return self.function(*args, **kwargs)
        with torch.jit.optimized_execution(False):  # nothing to fuse, and to look for it takes two runs
            found: T = program(*args, **kwargs)
        return found

    def _make(self) -> Any:
        with self._making, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._program is None:
                try:
                    self._program = torch.jit.script(self.function)
                except Exception:  # whatever PyTorch says of it, the function can be called
                    self._program = self.function
        return self._program
