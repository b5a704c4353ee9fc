"""When memory runs out in the middle of a step.

The gradient of a batch is a sum over its rows, so it can be computed in more and smaller parts: the try is
undone, the parts are halved, and the step is taken from where it began. What a try may have changed besides
gradients is what forward passes write to, moments of batch norms and the like, and random generators.

Random numbers that are drawn for a part (dropout) are others when the parts are others; all else is the same
sum in another order.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, distributed, nn

from quire.errors import QuireError
from quire.functional.copies import Copies

WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed", "bad_alloc")
"""What errors say that are no `OutOfMemoryError`: the CPU's allocator, cuBLAS, cuDNN, the C++ library."""
TABLES = (torch.bool, torch.uint8)
"""Types of buffers that no forward pass writes to: masks, and weights in four bits, which may be large."""
SHOWN = 200


class OutOfMemory(QuireError, MemoryError):
    """There is not enough memory, and no smaller part of a batch to try."""


class Elsewhere(Exception):
    """Another process has run out of memory in this step; all go back to where it began."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that memory ran out."""
    if isinstance(error, QuireError | distributed.DistError):  # of which the latter says that touch is lost
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error).lower()
    if isinstance(error, RuntimeError | OSError) and any(word in words for word in WORDS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def shortage(error: Exception) -> str:
    """What an error says of a want of memory, in a line; any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= SHOWN else said[:SHOWN] + " …"


def free(device: torch.device) -> None:
    """Give back what nobody holds any more. To be called when the error is gone, which holds activations."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def too_little(
    what: str, said: str, *, expected: str = "memory for one row at least", fix: str
) -> OutOfMemory:
    return OutOfMemory(f"out of memory {what}: {said}", expected=expected, fix=fix)


@contextmanager
def told_of_memory(
    doing: str,
    expected: str = "memory for weights, their gradients and what the optimiser keeps, besides a batch",
    smaller: str = "a smaller model or batch, --optim.name sgd",
) -> Iterator[None]:
    """A want of memory in the with-block that nothing there can cure is told as one of our errors."""
    said = ""
    try:
        yield
    except Exception as error:
        said = shortage(error)
    if said:
        raise too_little(
            doing,
            said,
            expected=expected,
            fix=f"take {smaller}, or a machine with more memory; a run that was saved goes on with --resume",
        )


class Before:
    """What a forward pass may change, as it was before.

    Which of it changes at all is seen in the first pass, so that a model without such things pays nothing."""

    def __init__(self, task: nn.Module, device: torch.device, *, all_buffers: bool = False) -> None:
        """With `all_buffers` they all change, and random numbers do not: nothing has to be seen first."""
        self.task, self.device, self.all_buffers = task, device, all_buffers
        self.forget()

    def forget(self) -> None:
        """Look at everything again: layers that were frozen may have joined in."""
        self.known = False
        self.places: list[tuple[dict[str, Tensor | None], str]] = []
        self.tensors: list[Tensor] = []
        self.copies = Copies()
        self.draws: list[Source] = []
        self.drawn: list[Any] = []

    def remember(self) -> None:
        if not self.known:
            self._look()
        if self.places:
            self.tensors = [buffers[name] for buffers, name in self.places]  # type: ignore[misc]
            self.copies.take(self.tensors)
        if self.draws:
            self.drawn = [source.get() for source in self.draws]

    def _look(self) -> None:
        """All buffers and all sources of random numbers."""
        self.places = [
            (module._buffers, name)
            for module in self.task.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (self.all_buffers or buffer.dtype not in TABLES)
        ]
        self.draws = [] if self.all_buffers else [*generators(self.device), _Python(), _Numpy()]
        self.known = self.all_buffers

    def learn(self) -> None:
        """After a pass that went well: keep an eye on the modules and sources that it has changed, and on
        nothing else."""
        if self.known:
            return
        self.known = True
        written = {
            id(buffers)
            for (buffers, name), old, saved in zip(
                self.places, self.tensors, self.copies.saved(), strict=True
            )
            if buffers[name] is not old or not torch.equal(old, saved)
        }
        kept = [i for i, (buffers, _) in enumerate(self.places) if id(buffers) in written]
        self.places, self.tensors = [self.places[i] for i in kept], [self.tensors[i] for i in kept]
        self.copies.keep(kept)
        pairs = list(zip(self.draws, self.drawn, strict=True))
        moved = [(source, state) for source, state in pairs if not source.same(state)]
        self.draws, self.drawn = [source for source, _ in moved], [state for _, state in moved]

    @torch.no_grad()
    def restore(self) -> None:
        for (buffers, name), tensor, saved in zip(
            self.places, self.tensors, self.copies.saved(), strict=True
        ):
            tensor.copy_(saved)
            buffers[name] = tensor
        for source, state in zip(self.draws, self.drawn, strict=True):
            source.set(state)


# -- Sources of random numbers ---------------------------------------------------------------------


class Source(Protocol):
    def get(self) -> Any: ...

    def set(self, state: Any) -> object: ...

    def same(self, state: Any) -> bool: ...


def generators(device: torch.device) -> list[Source]:
    """PyTorch's, of the host and of a GPU; what `get` gives can be `set` again."""
    return [_Torch(), _Cuda(device)] if device.type == "cuda" else [_Torch()]


class _Torch:
    get = staticmethod(torch.default_generator.get_state)
    set = staticmethod(torch.default_generator.set_state)

    def same(self, state: Tensor) -> bool:
        return torch.equal(state, torch.default_generator.get_state())


class _Cuda:
    """The GPU's numbers are a function of a seed and of how many were drawn."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        self.generator = torch.cuda.default_generators[index]

    def get(self) -> int:
        return self.generator.get_offset()

    def set(self, state: int) -> None:
        self.generator.set_offset(state)

    def same(self, state: int) -> bool:
        return self.get() == state


class _Python:
    get = staticmethod(random.getstate)
    set = staticmethod(random.setstate)

    def same(self, state: object) -> bool:
        return random.getstate() == state


class _Numpy:
    get = staticmethod(np.random.get_state)
    set = staticmethod(np.random.set_state)

    def same(self, state: Any) -> bool:
        name, words, *rest = np.random.get_state()
        return name == state[0] and np.array_equal(words, state[1]) and tuple(rest) == state[2:]
