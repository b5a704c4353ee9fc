"""The moving average of weights that a run may be judged by and left with.

    a ← βa + (1 − β)w,    β = min(decay, n / (n + 10)) after n steps

so the early average leans on the newest weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from quire.errors import CheckpointError
from quire.train.groups import Group
from quire.train.keeping import State


class Average:
    """Of the weights of these groups, which hold them one after the other."""

    def __init__(self, groups: Sequence[Group], decay: float) -> None:
        self.groups, self.decay = groups, decay
        self.flats = [group.flat.detach().clone() for group in groups]

    def update(self, step: int) -> None:
        decay = min(self.decay, step / (step + 10))
        for average, group in zip(self.flats, self.groups, strict=True):
            average.lerp_(group.flat, 1 - decay)

    def load(self) -> None:
        """The weights are the average from now on."""
        for average, group in zip(self.flats, self.groups, strict=True):
            group.flat.copy_(average)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average within the with-block."""
        current = [group.flat.clone() for group in self.groups]
        self.load()
        try:
            yield
        finally:
            for group, value in zip(self.groups, current, strict=True):
                group.flat.copy_(value)

    def named(self) -> State:
        """By the names of the parameters; views of the average itself."""
        found = zip(self.groups, self.flats, strict=True)
        return {name: value for group, flat in found for name, value in group.named(flat).items()}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        for name, value in self.named().items():
            if name not in kept:
                raise CheckpointError(
                    f"no moving average of '{name}' in the checkpoint",
                    expected="averages by the names of parameters, as this version saves them",
                    fix="start again, or resume with the version of Quire that began the run",
                )
            value.copy_(kept[name])
