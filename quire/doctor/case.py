"""What is examined: a model of anybody's, its loss and some batches, and what one step through them shows.

Everything happens on a copy, and draws its random numbers apart: the model, the optimiser and the stream of
random numbers are left as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.errors import InputError

MOST_BATCHES = 8
NORMS = (nn.modules.batchnorm._BatchNorm,)
Loss = Callable[[Any, Any], Tensor]


@dataclass
class Layer:
    """What a module without children gave in one step."""

    name: str
    module: nn.Module
    outputs: list[Tensor] = field(default_factory=list)
    """Detached, of each call."""

    @property
    def output(self) -> Tensor:
        return self.outputs[-1]


@dataclass
class Step:
    """One forward and backward pass in training mode."""

    layers: dict[str, Layer]
    output: Any = None
    loss: Tensor | None = None
    problem: Exception | None = None
    """What stopped it."""
    stage: str = "forward"
    """Where: "forward", "loss" or "backward"; "done" where nothing did."""


@dataclass(frozen=True)
class Pair:
    """A batch."""

    inputs: tuple[Any, ...]
    target: Any

    @classmethod
    def of(cls, batch: Any) -> Pair:
        if isinstance(batch, Mapping) and {"inputs", "target"} <= set(batch):
            return cls((batch["inputs"],), batch["target"])
        if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) >= 2:
            return cls(tuple(batch[:-1]), batch[-1])
        raise InputError(
            f"a batch of type {type(batch).__name__}",
            expected="(inputs, target), or a mapping with 'inputs' and 'target'",
            fix="wrap the loader: ((x, y) for x, y, *_ in loader)",
        )


class Case:
    """A model with its loss and batches; facts are found when they are asked for, once."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Iterable[Any],
        optimisers: Sequence[torch.optim.Optimizer] = (),
        seed: int = 0,
    ) -> None:
        self.original, self.loss, self.optimisers, self.seed = model, loss, tuple(optimisers), seed
        self.batches = [Pair.of(batch) for batch in islice(iter(batches), MOST_BATCHES)]
        if not self.batches:
            raise InputError("no batch", expected="at least one", fix="check the loader and its data set")
        first = next((p for p in model.parameters()), None)
        self.device = torch.device("cpu") if first is None else first.device

    @cached_property
    def first(self) -> Pair:
        """The first batch, where the model is."""

        def to(value: Any) -> Any:
            return value.to(self.device) if isinstance(value, Tensor) else value

        pair = self.batches[0]
        return Pair(tuple(to(value) for value in pair.inputs), to(pair.target))

    @cached_property
    def model(self) -> nn.Module:
        """The copy that `step` went through, in the mode that it was given in; its parameters carry
        gradients."""
        model = copy.deepcopy(self.original)
        model.zero_grad(set_to_none=True)
        return model

    @cached_property
    def step(self) -> Step:
        layers = {
            name: Layer(name, module)
            for name, module in self.model.named_modules()
            if not any(True for _ in module.children()) and name
        }
        if not layers:
            layers = {"model": Layer("model", self.model)}

        def watch(layer: Layer) -> Any:
            def keep(module: nn.Module, given: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    layer.outputs.append(tensor.detach().clone())

            return keep

        hooks = [layer.module.register_forward_hook(watch(layer)) for layer in layers.values()]
        found = Step(layers)
        pair = self.first
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.enable_grad():
                torch.manual_seed(self.seed)
                found.output = self.model(*pair.inputs)
                found.stage = "loss"
                found.loss = self.loss(found.output, pair.target)
                found.stage = "backward"
                if isinstance(found.loss, Tensor) and found.loss.requires_grad and found.loss.numel() == 1:
                    found.loss.backward()
                found.stage = "done"
        except Exception as problem:
            found.problem = problem
        finally:
            for hook in hooks:
                hook.remove()
        return found

    @property
    def output(self) -> Tensor | None:
        return self.step.output.detach() if isinstance(self.step.output, Tensor) else None

    @cached_property
    def kind(self) -> str | None:
        """Which known loss this one is, told by its values, whatever it is called or wrapped in."""
        output, target, loss = self.output, self.first.target, self.step.loss
        if (
            output is None
            or not isinstance(target, Tensor)
            or not isinstance(loss, Tensor)
            or loss.numel() != 1
        ):
            return None
        value = float(loss.detach())
        for name, known in KNOWN.items():
            try:
                wanted = float(known(output, target))
            except Exception:  # does not apply to these shapes or types
                continue
            if abs(value - wanted) <= 1e-4 * max(1.0, abs(wanted)):
                return name
        return None

    @cached_property
    def classes(self) -> int | None:
        """C where the target is the number of a class and the output has a value for each."""
        output, target = self.output, self.first.target
        if output is None or not isinstance(target, Tensor) or target.is_floating_point() or output.ndim < 2:
            return None
        shape = (output.shape[0], *output.shape[2:])
        return int(output.shape[1]) if tuple(target.shape) == shape and output.shape[1] > 1 else None


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda o, t: F.cross_entropy(o, t),
    "negative cross-entropy": lambda o, t: -F.cross_entropy(o, t),
    "negative log-likelihood": lambda o, t: F.nll_loss(o, t),
    "log-likelihood": lambda o, t: -F.nll_loss(o, t),
    "binary cross-entropy of logits": lambda o, t: F.binary_cross_entropy_with_logits(o, t.to(o.dtype)),
    "binary cross-entropy": lambda o, t: F.binary_cross_entropy(o, t.to(o.dtype)),
    "squared error": lambda o, t: (o - t).square().mean(),
    "absolute error": lambda o, t: (o - t).abs().mean(),
}


def finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
