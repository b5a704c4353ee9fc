"""How much memory a computation takes, counted from the tensors that it makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows every storage that operations make while it is active, until it is freed.

    `now` is what is alive, `peak` the most at one time. Storages are counted once however many views there
    are, on every device alike, those of `known` tensors never; nor is the scratch memory inside one
    operation. Tensors without numbers, on the device "meta" or fake, count like any other. `unit` is what an
    allocator rounds sizes up to.
    """

    def __init__(self, known: Iterable[Tensor] = (), unit: int = 1) -> None:
        super().__init__()
        self.known = {storage._cdata for storage in storages(list(known))}
        self.unit = unit
        self.sizes: dict[int, int] = {}
        """Bytes of each storage that is alive."""
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage._cdata for storage in storages((args, kwargs))}
        fresh: list[int] = []
        for storage in storages(result):
            key = storage._cdata
            if key in self.sizes:
                self.now -= self.sizes[key]  # an operation may have made it longer
            elif key in given or key in self.known:
                continue
            else:
                fresh.append(key)
                weakref.finalize(storage, self._release, key)
            self.sizes[key] = -(-storage.nbytes() // self.unit) * self.unit
            self.now += self.sizes[key]
        self.seen(func, args, kwargs, result, fresh)
        self.peak = max(self.peak, self.now)
        return result

    def seen(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, fresh: list[int]
    ) -> None:
        """Called after each operation, with the storages that it made; for those who want to know more."""

    def _release(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def storages(tensors: Any) -> Iterator[torch.UntypedStorage]:
    """What the tensors among the leaves of `tensors` lie in."""
    for leaf in tree_leaves(tensors):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()


def peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The most bytes that tensors made by function(*args) take at one time, its result included.

    The arguments themselves do not count, nor does the scratch memory inside one operation of PyTorch.
    """
    with LiveBytes(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)) as live:
        function(*args)
    return live.peak


def allocated_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator on the CPU hands out at one time during function().

    This is the allocator's own account, so that the scratch memory inside of operations is in it.
    """
    # Imported here as the profiler starts threads of its own.
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
