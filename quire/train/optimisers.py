"""Optimisers over flat groups. The formulas stand in `quire.functional.optimise`; here PyTorch's
fused kernels compute them, called directly because `torch.optim`'s own bookkeeping costs a small
model more than the arithmetic does.

On a CPU a loop of ours moves all groups in one call that checks the gradient first (`Move`), which takes less
time than to read the gradient once more.

`skip` is a float tensor of 1.0 (leave the parameters as they are) or 0.0, so that on a GPU a step can
be withheld without asking the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.functional import moves
from quire.functional.moves import Move, Part, make_move
from quire.options import Optim
from quire.train.groups import Group


class Optimiser(ABC):
    """Steps on groups; its state is saved by parameter name, independent of the flat layout."""

    def __init__(self, groups: list[Group], options: Optim) -> None:
        self.groups = groups
        self.options = options
        self.done = 0
        """Groups that have moved in the step under way: one that fails goes on from here when it is called
        again."""

    @abstractmethod
    def step(self, lr: float | Tensor, skip: Tensor | None = None, excess: Tensor | None = None) -> None:
        """Move the parameters along their gradients, after dividing these by `excess` in place."""

    @abstractmethod
    def buffers(self) -> dict[str, list[Tensor]]:
        """Flat buffers by kind, one per group."""

    @abstractmethod
    def counts(self) -> list[Tensor]:
        """Steps taken, one scalar per group."""

    def at_once(self, *, threads: int = 1, checked: bool = True) -> Move | None:
        """A step of all groups in one call, where they lie in a CPU's memory; `threads` have computed the
        gradient."""
        decay, buffers = self.options.weight_decay, list(self.buffers().values())
        if any(group.split for group in self.groups):
            return None
        parts = [
            Part(
                group.flat, group.grad, [buffer[i] for buffer in buffers], self.counts()[i],
                decay if group.decays else 0.0, group.step_factor,
            )
            for i, group in enumerate(self.groups)
        ]  # fmt: skip
        decoupled = self.options.decay == "decoupled"
        return self._make_move(parts, decoupled=decoupled, threads=threads, checked=checked)

    @abstractmethod
    def _make_move(self, parts: list[Part], *, decoupled: bool, threads: int, checked: bool) -> Move | None:
        """By the loop of this optimiser."""

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for kind, buffers in self.buffers().items():
            for group, buffer in zip(self.groups, buffers, strict=True):
                state |= {f"{kind}:{name}": view for name, view in group.named(buffer).items()}
        for group, count in zip(self.groups, self.counts(), strict=True):
            state[f"count:{group.counted_as}"] = count
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        mine = self.state()
        if mine.keys() != dict(state).keys():
            odd = sorted(mine.keys() ^ dict(state).keys())
            raise CheckpointError(
                f"optimiser state that does not fit: {len(odd)} entries differ, first '{odd[0]}'",
                expected="the state of the same model and optimiser",
                fix="resume with the options that the run was started with",
            )
        for name, target in mine.items():
            target.copy_(state[name])
        for group, count in zip(self.groups, self.counts(), strict=True):  # of which several may be one there
            count.copy_(state[f"count:{group.counted_as}"])


class Adam(Optimiser):
    """m, v moving averages of g and g², bias-corrected; decay decoupled or as an L2 penalty."""

    def __init__(self, groups: list[Group], options: Optim) -> None:
        super().__init__(groups, options)
        self.first = [torch.zeros_like(g.flat) for g in groups]
        self.second = [torch.zeros_like(g.flat) for g in groups]
        self.taken = [torch.zeros((), device=g.flat.device) for g in groups]
        self.one = torch.ones((), device=groups[0].flat.device)
        # Everything but the step size is known now; gathering it in each step would cost 6 µs.
        fused = torch._fused_adamw_ if options.decay == "decoupled" else torch._fused_adam_
        self.kernels = [
            partial(
                fused, [group.flat], [group.grad], [m], [v], [], [taken],
                beta1=options.beta1, beta2=options.beta2, eps=options.eps,
                weight_decay=options.weight_decay if group.decays else 0.0,
                amsgrad=False, maximize=False,
            )
            for group, m, v, taken in zip(groups, self.first, self.second, self.taken, strict=True)
        ]  # fmt: skip

    def step(self, lr: float | Tensor, skip: Tensor | None = None, excess: Tensor | None = None) -> None:
        for i in range(self.done, len(self.groups)):
            group = self.groups[i]
            if group.active:
                self.taken[i].add_(self.one)
                try:  # a skipped step ends the training anyway
                    self.kernels[i](lr=lr * group.step_factor, found_inf=skip, grad_scale=excess)
                except BaseException:
                    self.taken[i].sub_(self.one)
                    raise
            self.done = i + 1
        self.done = 0

    def _make_move(self, parts: list[Part], *, decoupled: bool, threads: int, checked: bool) -> Move | None:
        o = self.options
        return make_move(
            parts, moves.ADAM, decoupled=decoupled, beta1=o.beta1, beta2=o.beta2, eps=o.eps,
            threads=threads, checked=checked,
        )  # fmt: skip

    def buffers(self) -> dict[str, list[Tensor]]:
        return {"first": self.first, "second": self.second}

    def counts(self) -> list[Tensor]:
        return self.taken


class SGD(Optimiser):
    """w ← w − ηu with u ← μu + g."""

    def __init__(self, groups: list[Group], options: Optim) -> None:
        super().__init__(groups, options)
        self.velocity = [torch.zeros_like(g.flat) for g in groups] if options.momentum else []
        self.taken = [torch.zeros((), device=g.flat.device) for g in groups]
        self.shrunk = 0
        """Groups that have been decayed in the step under way."""

    def step(self, lr: float | Tensor, skip: Tensor | None = None, excess: Tensor | None = None) -> None:
        o = self.options
        for i in range(self.done, len(self.groups)):
            group = self.groups[i]
            if not group.active:
                continue
            rate = lr * group.step_factor
            decay = o.weight_decay if group.decays else 0.0
            if decay and o.decay == "decoupled":
                if self.shrunk <= i:
                    shrink = rate * decay if skip is None else rate * decay * (1 - skip.double())
                    group.flat.mul_(1 - shrink)
                    self.shrunk = i + 1
                decay = 0.0
            torch._fused_sgd_(
                [group.flat], [group.grad], [self.velocity[i]] if o.momentum else [],
                weight_decay=decay, momentum=o.momentum, lr=rate, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=False, grad_scale=excess, found_inf=skip,
            )  # fmt: skip
            self.taken[i] += 1
            self.done = i + 1
        self.done = self.shrunk = 0

    def _make_move(self, parts: list[Part], *, decoupled: bool, threads: int, checked: bool) -> Move | None:
        return make_move(
            parts, moves.SGD, decoupled=decoupled, beta1=self.options.momentum,
            threads=threads, checked=checked,
        )  # fmt: skip

    def buffers(self) -> dict[str, list[Tensor]]:
        return {"velocity": self.velocity} if self.options.momentum else {}

    def counts(self) -> list[Tensor]:
        return self.taken


def make_optimiser(groups: list[Group], options: Optim) -> Optimiser:
    return {"adam": Adam, "sgd": SGD}[options.name](groups, options)
