"""What fine-tuning needs in memory, before anything is made.

    weights + trained weights + their gradients + their optimiser's state      from sizes alone
    + activations                                                              from a step without numbers

The first four are exact sums over tensors. Activations come from running the step on tensors that have shapes
and no memory, while bytes that are alive are counted; what an allocator rounds up and a library's work space
are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from quire.errors import unknown_name
from quire.functional.memory import LiveBytes
from quire.functional.nf4 import nf4_bytes
from quire.tuning.config import LoRAConfig
from quire.tuning.quantised import can_be_stored
from quire.tuning.stored import TABLE_BYTES
from quire.tuning.targets import Site, choose, find_sites

Optimiser = Literal["adam", "momentum", "sgd"]
STATES: dict[str, int] = {"adam": 2, "momentum": 1, "sgd": 0}
"""Numbers that an optimiser keeps for each that it trains."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step."""

    base: int
    """Frozen weights and buffers."""
    trained: int
    """Adapters, or all weights in full fine-tuning."""
    gradients: int
    optimiser: int
    activations: int = 0
    """The most that is alive at once besides the rest, if a step was run through."""

    @property
    def total(self) -> int:
        return self.base + self.trained + self.gradients + self.optimiser + self.activations

    def __str__(self) -> str:
        parts = {name: getattr(self, name) / 2**20 for name in self.__dataclass_fields__}
        return ", ".join(f"{name} {value:.1f} MiB" for name, value in parts.items() if value)


def predict_memory(
    model: nn.Module,
    config: LoRAConfig | None = None,
    *,
    quantise: Iterable[str] | None = None,
    optimiser: Optimiser = "adam",
) -> Memory:
    """What tuning a plain model will take, which stays as it is and may be on the device "meta".

    Without `config` all weights are trained. `quantise` are the targets that NormalFloat4 is to store.
    """
    stored = {site.name for site in choose(model, quantise or ()) if can_be_stored(site)}
    base = sum(buffer.nbytes for buffer in model.buffers())
    for site in find_sites(model):
        weight = site.base
        base += nf4_bytes(weight.numel()) + TABLE_BYTES if site.name in stored else weight.nbytes
    if config is None:
        trained = sum(parameter.nbytes for parameter in model.parameters())
        base -= trained
    else:
        full = choose(model, config.full, vectors=True)
        whole = {site.name for site in full}
        thin = [site for site in choose(model, config.targets) if site.name not in whole]
        trained = sum(_low_rank_bytes(site, config.rank) for site in thin)
        trained += sum(site.base.numel() * _item(site.base) for site in full)
    return Memory(base, trained, trained, _states(optimiser) * trained)


def measure_memory(model: nn.Module, *, optimiser: Optimiser = "adam") -> Memory:
    """The same of a model as it is, from what is frozen in it and what is trained."""
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    frozen += sum(buffer.nbytes for buffer in model.buffers())
    return Memory(frozen, trained, trained, _states(optimiser) * trained)


def step_memory(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss: Callable[[Any], Tensor],
    *,
    optimiser: Optimiser = "adam",
) -> Memory:
    """The memory of a step, activations included: loss(model(*inputs)) and its gradient, without numbers."""
    memory = measure_memory(model, optimiser=optimiser)
    with FakeTensorMode() as mode:
        known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fakes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in known.items()}
        given = tree_map_only(Tensor, mode.from_tensor, tuple(inputs))
        with LiveBytes() as live:
            loss(functional_call(model, fakes, given)).backward()
    return replace(memory, activations=max(live.peak - memory.gradients, 0))


def _low_rank_bytes(site: Site, rank: int) -> int:
    rows, numel = site.shape[0], site.base.numel()
    return rank * (rows + numel // rows) * _item(site.base)


def _states(optimiser: str) -> int:
    if optimiser not in STATES:
        raise unknown_name("optimiser", optimiser, STATES)
    return STATES[optimiser]


def _item(weight: Tensor) -> int:
    """Bytes of a number that is trained."""
    return torch.promote_types(weight.dtype, torch.float32).itemsize
