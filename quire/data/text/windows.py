"""Tokens as training data: windows of a text, and streams that go on from batch to batch.

L tokens of a text, N rows, B rows of a batch, T tokens of a window (the context).

A row is T tokens and the T that follow each of them: inputs x_s … x_{s+T-1}, targets x_{s+1} … x_{s+T}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.data.batch import GATHER_BYTES, Batch
from quire.errors import InputError

IGNORE = -100
"""Target of a place where there is nothing to learn."""
MAPPED_BYTES = 4 * 2**20
"""Gathered at once from a memory map, where reading ahead helps less."""


class Tokens(Protocol):
    """L tokens that can be looked up many at a time."""

    def __len__(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def gather_bytes(self) -> int:
        """Of the tensors that are made at once."""

    @property
    def pinned(self) -> bool:
        """Whether batches are put into memory from which copies to the GPU are not waited for."""

    def windows(self, starts: Tensor, width: int, *, whole: bool) -> Tensor:
        """(B, width) int64, the tokens from each of the starts (B,) on. Where not all of them are `whole`,
        the last token is repeated beyond the end of the text."""

    def to(self, device: torch.device | str) -> Tokens: ...


def smallest_type(vocab_size: int) -> type[np.integer[Any]]:
    """Of those that PyTorch can index."""
    return np.uint8 if vocab_size <= 2**8 else np.int16 if vocab_size <= 2**15 else np.int32


class TensorTokens:
    """Tokens that lie in memory, of the CPU or the GPU."""

    gather_bytes = GATHER_BYTES

    def __init__(self, values: Tensor, *, pinned: bool = False) -> None:
        self.values, self.pinned = values, pinned

    @classmethod
    def of(cls, values: np.ndarray, vocab_size: int) -> TensorTokens:
        """In the smallest type that holds the vocabulary."""
        return cls(torch.from_numpy(values.astype(smallest_type(vocab_size))))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device

    def windows(self, starts: Tensor, width: int, *, whole: bool) -> Tensor:
        starts = _onto(starts, self.device)
        if whole and len(self):
            # Every window as a view, of which rows are picked: no array of places is made.
            found = self.values.unfold(0, width, 1).index_select(0, starts)
        else:
            places = starts[:, None] + torch.arange(width, device=self.device)
            found = self.values[places.clamp_(max=len(self) - 1)]
        return found.to(torch.int64)

    def to(self, device: torch.device | str) -> TensorTokens:
        """On the device; where a GPU has no room for them, batches are sent there from pinned memory."""
        device = torch.device(device)
        if device.type == "cuda" and self.values.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
            return TensorTokens(self.values, pinned=True)
        return TensorTokens(self.values.to(device))


class MappedTokens:
    """Tokens that stay in a file; batches lie on the CPU."""

    gather_bytes = MAPPED_BYTES

    def __init__(self, values: np.ndarray, *, pinned: bool = False) -> None:
        self.values, self.pinned = values, pinned

    def __len__(self) -> int:
        return len(self.values)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def windows(self, starts: Tensor, width: int, *, whole: bool) -> Tensor:
        begin = starts.cpu().numpy()
        if whole and len(self):
            found = np.lib.stride_tricks.sliding_window_view(self.values, width)[begin]
        else:
            found = self.values[np.minimum(begin[:, None] + np.arange(width), len(self) - 1)]
        return torch.from_numpy(found.astype(np.int64))

    def to(self, device: torch.device | str) -> MappedTokens:
        return MappedTokens(self.values, pinned=torch.device(device).type == "cuda")


def _onto(values: Tensor, device: torch.device) -> Tensor:
    """On the device without waiting for the copy."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class TokenWindows:
    """Row r is the window that starts at token r·stride.

    With stride 1, for training, every whole window is a row: N = L - T. With stride T and `partial`, for
    judging, every token but the first is predicted once, N = ⌈(L - 1)/T⌉, and the last window is filled up
    with `IGNORE` in the target.
    """

    def __init__(
        self,
        tokens: Tokens,
        context: int,
        stride: int = 1,
        *,
        partial: bool = False,
        starts: Tensor | None = None,
    ) -> None:
        if context < 1 or stride < 1:
            raise InputError(f"a context of {context} and a stride of {stride}", expected="both at least 1")
        targets = len(tokens) - 1
        rows = -(-targets // stride) if partial else (targets - context) // stride + 1
        if rows < 1:
            raise InputError(
                f"{len(tokens)} tokens for windows of {context} and one that follows",
                expected=f"at least {2 if partial else context + 1} tokens",
                fix="give more text, or use a shorter context",
            )
        self.tokens, self.context, self.stride, self.partial = tokens, context, stride, partial
        self.starts = starts
        """(N,) first token of each row on the CPU, where rows were picked."""
        self._rows = rows if starts is None else len(starts)
        last = (rows - 1) * stride if starts is None else int(starts.max()) if len(starts) else 0
        self.complete = last + context <= targets

    def __len__(self) -> int:
        return self._rows

    @property
    def row_size(self) -> int:
        return self.context

    def places(self, rows: Tensor | None = None) -> Tensor:
        """First token of each of the rows, of all without."""
        if rows is None:
            return torch.arange(len(self)) * self.stride if self.starts is None else self.starts
        rows = rows.cpu()
        return rows * self.stride if self.starts is None else self.starts[rows]

    def streams(self, batch_size: int) -> TokenStreams:
        """The same text in parallel streams that go on from batch to batch."""
        return TokenStreams(self.tokens, batch_size, self.context)

    def judged(self) -> TokenWindows:
        """The same text in windows side by side, each token predicted once."""
        return TokenWindows(self.tokens, self.context, self.context, partial=True)

    def to(self, device: torch.device | str) -> TokenWindows:
        tokens = self.tokens.to(device)
        return TokenWindows(tokens, self.context, self.stride, partial=self.partial, starts=self.starts)

    def subset(self, rows: Tensor) -> TokenWindows:
        starts = self.places(rows)
        return TokenWindows(self.tokens, self.context, self.stride, partial=self.partial, starts=starts)

    def take(self, rows: Tensor) -> Batch:
        inputs, target = self._gather(self.places(rows))
        return Batch({"inputs": inputs, "target": target}, rows, self.complete)

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        rows = rows[start * batch_size :]
        at_once = max(1, self.tokens.gather_bytes // (16 * self.context * batch_size)) * batch_size
        for chunk in torch.split(rows, at_once) if len(rows) else ():
            fields = [torch.split(values, batch_size) for values in self._gather(self.places(chunk))]
            for part, inputs, target in zip(torch.split(chunk, batch_size), *fields, strict=True):
                yield Batch({"inputs": inputs, "target": target}, part, self.complete)

    def _gather(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        return _fields(self.tokens, starts, self.context, None if self.complete else len(self.tokens))


def _fields(
    tokens: Tokens, starts: Tensor, context: int, stops: Tensor | int | None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T) from `starts` (B,) on; targets at or beyond `stops` are ignored."""
    found = tokens.windows(starts, context + 1, whole=stops is None)
    # Of a single row `contiguous` would give two views of the same numbers, and the target is written to.
    inputs, target = found[:, :-1].contiguous(), found[:, 1:].clone(memory_format=torch.contiguous_format)
    if stops is not None:
        places = starts[:, None] + torch.arange(1, context + 1)
        beyond = places >= (stops[:, None] if isinstance(stops, Tensor) else stops)
        target.masked_fill_(_onto(beyond, target.device), IGNORE)
    return (inputs.pin_memory(), target.pin_memory()) if tokens.pinned else (inputs, target)


class TokenStreams:
    """B parallel streams through one text, for truncated backpropagation through time.

    Stream i reads the i-th of B parts of the text, T tokens a batch. Row b·B + i is its b-th stretch, so rows
    in their own order, B at a time, go on where the batch before them stopped. The field "begin" (B,) says
    for each row whether it does not: at the start of a stream, or where rows come in another order. Every
    token but the first of the text is predicted once; what a stream has too little of is `IGNORE`.
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, context: int, *, picked: Tensor | None = None
    ) -> None:
        targets = len(tokens) - 1
        if batch_size < 1 or context < 1 or targets < batch_size:
            raise InputError(
                f"{len(tokens)} tokens for {batch_size} streams with a context of {context}",
                expected="both at least 1, and a token more than there are streams",
                fix="give more text, or use a smaller batch",
            )
        self.tokens, self.batch_size, self.context, self.picked = tokens, batch_size, context, picked
        self.stretch = -(-targets // batch_size)
        """Targets of one stream; the last ones may have fewer."""
        self.steps = -(-self.stretch // context)
        """Batches in which the text is read once."""

    def __len__(self) -> int:
        return self.steps * self.batch_size if self.picked is None else len(self.picked)

    @property
    def row_size(self) -> int:
        return self.context

    def to(self, device: torch.device | str) -> TokenStreams:
        return TokenStreams(self.tokens.to(device), self.batch_size, self.context, picked=self.picked)

    def subset(self, rows: Tensor) -> TokenStreams:
        return TokenStreams(self.tokens, self.batch_size, self.context, picked=self._numbers(rows))

    def take(self, rows: Tensor) -> Batch:
        return self._batch(rows, None)

    def batches(self, rows: Tensor, batch_size: int, start: int = 0) -> Iterator[Batch]:
        parts = torch.split(rows, batch_size) if len(rows) else ()
        for i in range(start, len(parts)):
            yield self._batch(parts[i], parts[i - 1] if i else None)

    def _numbers(self, rows: Tensor) -> Tensor:
        """b·B + i of each row."""
        return rows.cpu() if self.picked is None else self.picked[rows.cpu()]

    def _batch(self, rows: Tensor, before: Tensor | None) -> Batch:
        numbers = self._numbers(rows)
        step, stream = numbers // self.batch_size, numbers % self.batch_size
        starts = stream * self.stretch + step * self.context
        stops = ((stream + 1) * self.stretch + 1).clamp(max=len(self.tokens))
        whole = bool((starts + self.context < stops).all())
        inputs, target = _fields(self.tokens, starts, self.context, None if whole else stops)
        begin = torch.ones(len(rows), dtype=torch.bool)
        if before is not None:
            earlier = self._numbers(before)[: len(rows)]
            begin[: len(earlier)] = earlier + self.batch_size != numbers[: len(earlier)]
        fields = {"inputs": inputs, "target": target, "begin": _onto(begin, inputs.device)}
        return Batch(fields, rows, whole)
