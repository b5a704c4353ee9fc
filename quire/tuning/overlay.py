"""How a weight W of a layer is replaced by W₀ + Σ ΔW without the layer knowing.

The layer's class is exchanged for a subclass in which `weight` is a property that gives the sum. So whatever
reads the weight, be it an LSTM's kernel, an attention that multiplies by parts of `in_proj_weight` or a fused
encoder, gets the right one. Dense layers, convolutions and embeddings also get a forward that sends the input
through the thin factors and never forms the sum.

The parameter stays where it is and keeps its name: state dicts of the base model load and save as before, and
what is learned comes beside it as `LAYER.tuning.WEIGHT.adapters.NAME.A`. A weight that is stored in
NormalFloat4 is `LAYER.tuning.WEIGHT.stored.codes` … instead of `LAYER.WEIGHT`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from quire.tuning.factors import Change, Full, LowRank
from quire.tuning.stored import Stored

CHILD = "tuning"
"""The submodule of a layer that holds its overlays."""
POINTWISE = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}
"""By the dimensions of a kernel."""


@final
class Named(nn.Module):
    """Submodules by name."""

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __setitem__(self, name: str, module: nn.Module) -> None:
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


@final
class Overlay(nn.Module):
    """One weight: how it is stored, what the adapters make of it, and which of them are active."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: Stored | None = None
        self.adapters = Named()
        self.active: dict[str, float] = {}

    def changes(self) -> list[tuple[Change, float]]:
        return [(self.adapters[name], weight) for name, weight in self.active.items()]

    def base(self, parameter: Tensor | None) -> Tensor:
        """W₀."""
        if self.stored is not None:
            return self.stored.dequantise()
        assert parameter is not None
        return parameter

    def value(self, parameter: Tensor | None) -> Tensor:
        """W₀ + Σ weight·ΔW."""
        base = self.base(parameter)
        changes = self.changes()
        if len(changes) == 1 and isinstance(changes[0][0], Full) and changes[0][1] == 1:
            return changes[0][0].value.to(base.dtype)  # W₀ + (V − W₀), without rounding
        total = base
        for change, weight in changes:
            delta = change.delta(base)
            total = total + (delta if weight == 1 else delta * weight).to(base.dtype)
        return total

    def exact(self, parameter: Tensor | None) -> Tensor:
        """The same in float64, also of a weight that is stored."""
        base = self.stored.dequantise(torch.float32) if self.stored is not None else self.base(parameter)
        base = base.detach().double()
        total = base
        for change, weight in self.changes():
            total = total + change.delta(base).detach() * weight
        return total

    @property
    def thin(self) -> bool:
        """Whether the inputs can go through the factors instead of through the sum."""
        return all(isinstance(change, LowRank) for change, _ in self.changes())


def overlay_of(module: nn.Module, name: str) -> Overlay | None:
    """The overlay of a layer's weight, if it has one."""
    holder = module._modules.get(CHILD)
    if not isinstance(holder, Named) or name not in holder:
        return None
    found: Overlay = holder[name]
    return found


def lay_over(module: nn.Module, name: str, overlay: Overlay) -> None:
    """From now on `module.name` is what `overlay` says."""
    holder = module._modules.get(CHILD)
    if holder is None:
        holder = Named()
        module.add_module(CHILD, holder)
    assert isinstance(holder, Named)
    holder[name] = overlay
    _set_class(module, holder)


def take_away(module: nn.Module, name: str) -> None:
    """The weight is the layer's own again; a layer without overlays is of its old class."""
    holder = module._modules[CHILD]
    assert isinstance(holder, Named)
    del holder[name]
    if not len(holder):
        del module._modules[CHILD]
    _set_class(module, holder)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The layer's class as it was."""
    found: type[nn.Module] = getattr(type(module), "class_before", type(module))
    return found


def is_transposed(kind: type[nn.Module]) -> bool:
    """Whether a layer is y = xW + b with W of (in, out), as GPT-2's `Conv1D`."""
    return any(c.__name__ == "Conv1D" for c in kind.__mro__) and not issubclass(kind, nn.Conv1d)


def is_product(kind: type[nn.Module]) -> bool:
    """Whether calling the layer is one product with its weight, and nothing else reads it."""
    return kind.forward is nn.Linear.forward or is_transposed(kind)


# Classes --------------------------------------------------------------------------------------


def _set_class(module: nn.Module, holder: Named) -> None:
    kind: Any = plain_class(module)
    module.__class__ = _overlaid(kind, tuple(holder)) if len(holder) else kind
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


@functools.cache
def _overlaid(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    members: dict[str, Any] = {name: _weight_property(name) for name in names}
    members["class_before"] = kind
    if issubclass(kind, nn.RNNBase):
        # PyTorch's recurrent layers hand their kernels a list of weights that is filled once.
        members["_init_flat_weights"] = _list_parameters
        members["_update_flat_weights"] = _leave
        members["forward"] = _recurrent_forward
    forward = _forward_of(kind) if "weight" in names else None
    if forward is not None:
        members["forward"] = forward
    made: type[nn.Module] = type(f"Tuned{kind.__name__}", (kind,), members)
    return made


def _weight_property(name: str) -> property:
    def value(self: nn.Module) -> Tensor:
        overlay: Overlay = self._modules[CHILD]._modules[name]  # type: ignore[union-attr,assignment]
        return overlay.value(self._parameters.get(name))

    return property(value)


def _list_parameters(self: nn.RNNBase) -> None:
    self._flat_weights = [self._parameters.get(name) for name in self._flat_weights_names]


def _leave(self: nn.RNNBase) -> None:
    """The list is as `_recurrent_forward` made it."""


def _recurrent_forward(self: nn.RNNBase, *inputs: Any, **options: Any) -> Any:
    self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]
    try:
        return plain_class(self).forward(self, *inputs, **options)
    finally:
        self._init_flat_weights()


def _forward_of(kind: type[nn.Module]) -> Callable[..., Tensor] | None:
    if is_transposed(kind):
        return _transposed_forward
    plain: dict[object, Callable[..., Tensor]] = {
        nn.Linear.forward: _linear_forward,
        nn.Embedding.forward: _embedding_forward,
        nn.Conv1d.forward: _convolution_forward,
        nn.Conv2d.forward: _convolution_forward,
        nn.Conv3d.forward: _convolution_forward,
    }
    return plain.get(kind.forward)


def _parts(module: nn.Module) -> tuple[Overlay, Tensor | None]:
    overlay: Overlay = module._modules[CHILD]._modules["weight"]  # type: ignore[union-attr,assignment]
    return overlay, module._parameters.get("weight")


def _scaled(values: Tensor, factor: float) -> Tensor:
    return values if factor == 1 else values * factor


def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """x W₀ᵀ + b + Σ s·x Rᵀ Lᵀ."""
    overlay, weight = _parts(self)
    if not overlay.thin:
        return nn.functional.linear(input, self.weight, self.bias)
    if overlay.stored is not None:
        result = overlay.stored.product(input, self.bias, by_rows=False)
    else:
        assert weight is not None
        result = nn.functional.linear(input, weight, self.bias)
    for change, share in overlay.changes():
        assert isinstance(change, LowRank)
        left, right = change.sides(input.dtype)
        hidden = nn.functional.linear(change.drop(input), right)
        low = nn.functional.linear(_scaled(hidden, share * change.scale), left)
        result = result + low.to(result.dtype)
    return result


def _transposed_forward(self: Any, x: Tensor) -> Tensor:
    """x W₀ + b + Σ s·x L R."""
    overlay, weight = _parts(self)
    bias = getattr(self, "bias", None)
    if not overlay.thin:
        return nn.functional.linear(x, self.weight.T, bias)
    if overlay.stored is not None:
        result = overlay.stored.product(x, bias, by_rows=True)
    else:
        assert weight is not None
        result = nn.functional.linear(x, weight.T, bias)
    for change, share in overlay.changes():
        assert isinstance(change, LowRank)
        left, right = change.sides(x.dtype)
        hidden = change.drop(x) @ left
        result = result + (_scaled(hidden, share * change.scale) @ right).to(result.dtype)
    return result


def _convolution_forward(self: Any, input: Tensor) -> Tensor:
    """x * W₀ + b + Σ s·(x * A) * B: to r channels with W's own geometry, then a kernel of 1."""
    overlay, weight = _parts(self)
    if not overlay.thin or self.groups > 1:
        return self._conv_forward(input, self.weight, self.bias)
    result = self._conv_forward(input, weight, self.bias)
    for change, share in overlay.changes():
        assert isinstance(change, LowRank)
        dtype = input.dtype
        hidden = self._conv_forward(change.drop(input), change.A.to(dtype), None)
        hidden = _scaled(hidden, share * change.scale)
        result = result + POINTWISE[change.B.dim()](hidden, change.B.to(dtype))
    return result


def _embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:
    """W₀[x] + Σ s·L[x] R."""
    overlay, weight = _parts(self)
    look_up = functools.partial(
        nn.functional.embedding,
        input,
        padding_idx=self.padding_idx,
        scale_grad_by_freq=self.scale_grad_by_freq,
    )
    if not overlay.thin or self.max_norm is not None:
        return look_up(self.weight, max_norm=self.max_norm, norm_type=self.norm_type)
    assert weight is not None
    result = look_up(weight)
    for change, share in overlay.changes():
        assert isinstance(change, LowRank)
        left, right = change.sides(result.dtype)
        hidden = look_up(left)
        if change.dropout:  # of one-hot inputs: a token keeps its change as a whole, or loses it
            hidden = hidden * change.drop(torch.ones_like(input, dtype=hidden.dtype)).unsqueeze(-1)
        result = result + _scaled(hidden, share * change.scale) @ right
    return result
