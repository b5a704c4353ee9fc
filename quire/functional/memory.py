"""How much memory a computation takes, counted from the tensors that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Count(TorchDispatchMode):
    """Follows every storage that appears while it is active, until it is freed."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {id: item for id, item in self.alive.items() if not item[0].expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.known:
                    self.alive[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The most bytes that tensors made by function(*args) take at one time, its result included.

    The arguments themselves do not count, nor does the scratch memory inside one operation of PyTorch.
    Storages are counted once however many views there are, on every device alike.
    """
    with _Count([leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]) as count:
        function(*args)
    return count.peak
