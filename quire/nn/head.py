"""What every output distribution has in common; the distributions themselves are in `quire.nn.heads`.

B rows, D outputs; `raw` is (B, …, outputs_needed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.registry import Registry

MODES = ("mode", "mean", "sample", "interval")

Weight = float | Tensor

HEADS: Registry[type[Head]] = Registry("head")


class Head(nn.Module, ABC):
    """p(y | raw): its loss, its predictions and its measures."""

    name: ClassVar[str]

    def __init__(self, dim: int) -> None:
        super().__init__()
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise InputError(
                f"a {self.name} head of dimension {dim!r}",
                expected="an integer >= 1",
                fix="give the number of classes, labels or outputs",
            )
        self.dim = dim

    @property
    def outputs_needed(self) -> int:
        """How many numbers the backbone must give for each row."""
        return self.dim

    @property
    def counts_all(self) -> bool:
        """Whether every target that is not ignored counts once, so that their number is their weight."""
        return True

    @abstractmethod
    def loss_each(self, raw: Tensor, target: Tensor) -> Tensor:
        """The loss of each row, summed over whatever a row holds; (B,)."""

    def loss_sum(self, raw: Tensor, target: Tensor) -> Tensor:
        """The loss summed over the batch; a scalar."""
        return self.loss_each(raw, target).sum()

    @abstractmethod
    def weigh(self, target: Tensor) -> Weight:
        """How many target values count: what `loss_sum` is divided by to give a mean."""

    def predict(
        self,
        raw: Tensor,
        mode: str = "mode",
        *,
        level: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """Named columns of B rows. mode and mean are those of the distribution, sample is a draw from
        it, interval is the narrowest range (of classes: the smallest set) of probability `level`."""
        if mode not in MODES:
            raise unknown_name("prediction mode", mode, MODES)
        if not 0.0 < level < 1.0:
            raise InputError(
                f"level is {level!r}", expected="a probability in (0, 1)", fix="write 0.9 for 90%"
            )
        return self._predict(full_precision(raw), mode, level, generator)

    @abstractmethod
    def _predict(
        self, raw: Tensor, mode: str, level: float, generator: torch.Generator | None
    ) -> dict[str, Tensor]: ...

    @abstractmethod
    def tally(self, raw: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Statistics that add up over batches and from which `measures` follow."""

    @abstractmethod
    def measures(self, tallies: Mapping[str, Tensor]) -> dict[str, float]:
        """The measures of the summed tallies."""

    def fit_target(self, target: Tensor) -> None:
        """Learn the target's units from the training targets; only regression has any."""

    def options(self) -> dict[str, Any]:
        """What the constructor was given besides `dim`, as plain JSON values."""
        return {}

    def spec(self) -> dict[str, Any]:
        """Everything needed to build this head again (its tensors travel with the weights)."""
        return {"head": self.name, "dim": self.dim, **self.options()}

    @staticmethod
    def from_spec(spec: Mapping[str, Any]) -> Head:
        return build_head(spec)

    def extra_repr(self) -> str:
        return ", ".join([str(self.dim), *(f"{key}={value}" for key, value in self.options().items())])


def build_head(spec: Mapping[str, Any]) -> Head:
    """The head that ``{"head": NAME, "dim": D, …}`` describes."""
    name = spec.get("head")
    if not isinstance(name, str):
        raise InputError(
            f"a head description without its name: {dict(spec)}",
            expected='an entry "head": NAME',
            fix=f"add one of {', '.join(sorted(HEADS))}",
        )
    kind = HEADS[name]
    try:
        return kind(**{key: value for key, value in spec.items() if key != "head"})
    except TypeError as problem:
        raise InputError(
            f"a description that the {name} head does not understand: {dict(spec)}",
            expected=f"the keys of {kind.__name__}(dim, …).spec()",
            fix=str(problem),
        ) from None


# Parts of the heads -------------------------------------------------------------------------


def full_precision(raw: Tensor) -> Tensor:
    """float32 for half-precision outputs: a sum of many losses in bf16 has two digits."""
    return raw.float() if raw.dtype in (torch.bfloat16, torch.float16) else raw


def rowwise(losses: Tensor) -> Tensor:
    return losses.reshape(len(losses), -1).sum(dim=1) if losses.dim() > 1 else losses


def check_width(head: Head, raw: Tensor) -> None:
    if raw.shape[-1] != head.outputs_needed:
        raise InputError(
            f"outputs of shape {tuple(raw.shape)} for a {head.name} head of dimension {head.dim}",
            expected=f"a last dimension of {head.outputs_needed}",
            fix=f"build the backbone with {head.outputs_needed} outputs (head.outputs_needed)",
        )


def align(head: Head, raw: Tensor, target: Tensor) -> Tensor:
    """The target as (B, …, D), which (B,) may stand for when D is 1; nothing else is broadcast."""
    check_width(head, raw)
    shape = (*raw.shape[:-1], head.dim)
    if target.shape == shape:
        return target
    if head.dim == 1 and target.shape == shape[:-1]:
        return target.unsqueeze(-1)
    raise InputError(
        f"targets of shape {tuple(target.shape)} for outputs of shape {tuple(raw.shape)}",
        expected=f"shape {shape}" + (f" or {shape[:-1]}" if head.dim == 1 else ""),
        fix=f"give one number for each of the {head.dim} outputs of a row",
    )


def columns(head: Head, value: Tensor) -> Tensor:
    return value.squeeze(-1) if head.dim == 1 else value
