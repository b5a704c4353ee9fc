"""Which modules of a model can be put together by themselves while the rest of it is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.data.batch import Batch
from quire.functional.modes import evaluating
from quire.train.randomness import random_state, restore_random_state
from quire.train.task import Task

BLOCK = 2**15
"""Numbers that a block has at least to be put together by itself: to send fewer takes less than to ask."""


def separate_blocks(task: nn.Module, rehearse: Callable[[], object]) -> list[nn.Module]:
    """The modules that stand in a row (`nn.ModuleList`, `nn.Sequential`), are large enough to be put together
    one by one, and are the only ones to use their parameters."""
    found: dict[int, nn.Module] = {}
    names: dict[nn.Parameter, set[int]] = {}
    for module in _in_rows(task):
        found[id(module)] = module
        for parameter in module.parameters():
            names.setdefault(parameter, set()).add(id(module))
    watch = _Watch(names)
    handles = []
    for key, module in found.items():
        handles.append(module.register_forward_pre_hook(lambda *_, key=key: watch.enter(key)))
        handles.append(module.register_forward_hook(lambda *_, key=key: watch.leave(key), always_call=True))
    try:
        with watch:
            rehearse()
    finally:
        for handle in handles:
            handle.remove()
    shared = {key for owners in names.values() if len(owners) > 1 for key in owners}
    apart = watch.touched | shared | _used_elsewhere(task, found, names)
    return [module for key, module in found.items() if key in watch.entered and key not in apart]


def _in_rows(module: nn.Module) -> Iterator[nn.Module]:
    """Members of lists and sequences, the outermost of each; those of members that are too small."""
    for child in module.children():
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        large = sum(p.numel() for p in child.parameters()) >= BLOCK
        if listed and called and large:
            yield child
        else:
            yield from _in_rows(child)


def _used_elsewhere(
    task: nn.Module, found: Mapping[int, nn.Module], names: Mapping[nn.Parameter, set[int]]
) -> set[int]:
    """Blocks that share a parameter with a module outside them."""
    inside = {id(m) for block in found.values() for m in block.modules()}
    return {
        key
        for module in task.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
        for key in names.get(parameter, ())
    }


class _Watch(TorchFunctionMode):
    """Notes which blocks compute, and which have their parameters used while they do not."""

    def __init__(self, owners: Mapping[nn.Parameter, set[int]]) -> None:
        super().__init__()
        self.owners = {id(parameter): keys for parameter, keys in owners.items()}
        self.inside: list[int] = []
        self.entered: set[int] = set()
        self.touched: set[int] = set()

    def enter(self, key: int) -> None:
        self.inside.append(key)
        self.entered.add(key)

    def leave(self, key: int) -> None:
        self.inside.remove(key)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _tensors((*args, *kwargs.values())):
            self.touched |= self.owners.get(id(value), set()) - set(self.inside)
        return function(*args, **kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


@torch.no_grad()
def rehearse(task: Task, batch: Batch) -> None:
    """What a step computes, without a trace."""
    before = random_state()
    batch = task.augment(batch)
    with evaluating(task):
        for player in task.players:
            task.terms(batch, player)
        if task.couples_samples:
            task.represent(batch)
    restore_random_state(before)
