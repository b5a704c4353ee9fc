"""Many short tensors copied at once, again and again, by `quire/kernels/host/copy.cpp`.

PyTorch takes a microsecond for each of them, which for two small networks with batch norms is a hundredth
of a step.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels import host

ALIGNMENT = 16
"""Bytes to whose multiples copies are laid out, as the largest of numbers has so many."""


class Copies:
    """Copies of tensors that are written to in place, or replaced by others."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._places: list[int] = []
        self._copy: Callable[[], object] = list
        self._flat: Tensor | None = None
        """Where all copies lie one behind the other, by bytes; None where each is a tensor of its own."""
        self._starts: list[int] = []
        self._clones: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy these, which are usually those of the last time. Where each lies is asked every time: memory
        that is made to be shared with other processes moves under tensors that stay the same."""
        places = list(map(Tensor.data_ptr, tensors))
        if places != self._places or not all(map(operator.is_, tensors, self._tensors)):
            self._tensors, self._places = list(tensors), places
            self._lay_out()
        self._copy()

    def saved(self) -> list[Tensor]:
        """The copies, in the order of the tensors."""
        flat = self._flat
        if flat is None:
            return self._clones
        return [
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(self._starts, self._tensors, strict=True)
        ]

    def keep(self, chosen: Sequence[int]) -> None:
        """Have nothing to do with the others any more; the copies of these stay."""
        self._tensors, self._places = [self._tensors[i] for i in chosen], [self._places[i] for i in chosen]
        if self._flat is None:
            self._clones = [self._clones[i] for i in chosen]
        else:
            self._starts = [self._starts[i] for i in chosen]
        self._prepare()

    def _lay_out(self) -> None:
        self._flat = None
        if host.library() is not None and all(t.is_cpu and t.is_contiguous() for t in self._tensors):
            self._starts, end = [], 0
            for tensor in self._tensors:
                self._starts.append(end)
                end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            self._flat = torch.empty(end, dtype=torch.uint8)
        else:
            self._clones = [tensor.detach().clone() for tensor in self._tensors]
        self._prepare()

    def _prepare(self) -> None:
        """One call that copies them all."""
        if self._flat is None:
            self._copy = partial(torch._foreach_copy_, self._clones, self._tensors) if self._clones else list
            return
        table: list[int] = []  # rows of `Copy` in copy.cpp
        base = self._flat.data_ptr()
        for start, place, tensor in zip(self._starts, self._places, self._tensors, strict=True):
            table += (base + start, place, tensor.nbytes)
        library: Any = host.library()
        self._copy = partial(library.quire_copy, (ctypes.c_int64 * len(table))(*table), len(self._tensors))
