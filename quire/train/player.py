"""Who has parameters of its own, and moves them: the network, or one of two that play against each other."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.functional.moves import Move
from quire.options import Optim
from quire.train.groups import make_groups, make_whole
from quire.train.optimisers import make_optimiser
from quire.train.task import Task

if TYPE_CHECKING:
    from quire.train.shard import Shards


class Player:
    """One player's parameters and its optimiser; with `shards` what this process has of them."""

    def __init__(
        self, task: Task, name: str, options: Optim, steps_per_epoch: int, shards: Shards | None = None
    ) -> None:
        self.name = name
        self.options = options
        self.shards = shards
        parameters = task.player_parameters(name)
        factors = {key: task.step_factor(key) for key in parameters}
        joins = {key: round(task.frozen_epochs(key) * steps_per_epoch) for key in parameters}
        biases = [] if options.decay_biases else [n for n, p in parameters.items() if task.is_bias(n, p)]
        self._group = partial(make_groups, undecayed=biases, step_factors=factors, joins=joins)
        self.groups = self._group(parameters, make=make_whole if shards is None else shards.make_pieces)
        self.optimiser = make_optimiser(self.groups, options)
        self.move: Move | None = None
        """`Optimiser.at_once`, where nothing comes between the gradient and the step."""

    def regroup(self, task: Task) -> None:
        """Once nothing is split any more: groups of whole parameters, which the optimiser does not know."""
        self.groups, self.shards = self._group(task.player_parameters(self.name)), None

    def begin(self, explicit: bool) -> None:
        """No gradient yet: the explicit equations add to the buffer, autograd is given room for its own."""
        for group in self.groups:
            if explicit:
                group.grad.zero_()
            else:
                group.loosen()

    def end(self, explicit: bool) -> None:
        """The gradients of a step are in the buffer."""
        if not explicit:
            for group in self.groups:
                group.gather()

    def norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(group.grad) for group in self.groups]
        if self.shards is not None:
            return self.shards.norm(self.groups, norms)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def add_l1(self) -> None:
        """The gradient of the L1 penalty, l1·sign(w)."""
        for group in self.groups:
            group.grad.add_(group.flat.sign(), alpha=self.options.l1)

    def clip(self, norm: Tensor) -> Tensor | None:
        """By value first, then g ← (γ/‖g‖)g where ‖g‖ > γ. A GPU's optimiser can divide while it reads the
        gradients: what it is to divide by is returned."""
        limit, bound = self.options.clip_value, self.options.clip_norm
        if limit is not None:
            for group in self.groups:
                group.grad.clamp_(-limit, limit)
            norm = self.norm() if bound is not None else norm
        if bound is None:
            return None
        excess = (norm / bound).clamp(min=1.0)
        if excess.is_cuda and excess.dtype == torch.float32:
            return excess
        for group in self.groups:
            group.grad.div_(excess)
        return None

    def penalty(self) -> float:
        """What the penalties add to the loss that is optimised; decoupled decay is no penalty."""
        o = self.options
        total = 0.0
        for group in self.groups if self.shards is None else self.shards.counted(self.groups):
            if o.l1:
                total += o.l1 * float(group.flat.abs().sum())
            if o.weight_decay and o.decay == "l2" and group.decays:
                total += 0.5 * o.weight_decay * float(group.flat.square().sum())
        return total if self.shards is None else self.shards.add(total)
