"""Writing W₀ + ΔW into a weight, what rounding does to it, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.functional.nf4 import quantise_nf4
from quire.tuning.overlay import Named, Overlay, lay_over, take_away
from quire.tuning.stored import Stored
from quire.tuning.targets import Place


class MergeError(NamedTuple):
    """How far the stored weight is from the sum that it stands for."""

    largest: float
    """max |W − (W₀ + ΔW)|."""
    squared: float
    """‖W − (W₀ + ΔW)‖² in the Frobenius norm."""
    norm_squared: float
    """‖W₀ + ΔW‖²."""

    @property
    def relative(self) -> float:
        """‖W − (W₀ + ΔW)‖ / ‖W₀ + ΔW‖."""
        return (self.squared / self.norm_squared) ** 0.5 if self.norm_squared else 0.0


@dataclass(frozen=True)
class MergeReport:
    """The errors of a merge by weight: rounding to the weight's type, or to NormalFloat4."""

    errors: Mapping[str, MergeError]

    @property
    def total(self) -> MergeError:
        """Of all weights together."""
        largest, squared, norms = zip(*self.errors.values(), strict=True)
        return MergeError(max(largest), sum(squared), sum(norms))

    def __str__(self) -> str:
        total = self.total
        return (
            f"{len(self.errors)} weights merged: largest error {total.largest:.3g}, "
            f"relative error {total.relative:.3g} (Frobenius)"
        )


@dataclass(frozen=True)
class Merged:
    """One merged weight and what it was before."""

    name: str
    places: tuple[Place, ...]
    overlay: Overlay
    adapters: Named
    active: dict[str, float]
    before: Tensor | Stored | None
    """W₀; None where no active adapter changed the weight."""
    error: MergeError | None

    def undo(self) -> None:
        place = self.places[0]
        parameter = place.module._parameters.get(place.tensor)
        if parameter is not None:  # the model may have moved since
            self.adapters.to(parameter.device)
        if isinstance(self.before, Stored):
            if parameter is not None:
                self.before.to(parameter.device)
                for each in self.places:
                    del each.module._parameters[each.tensor]
            elif self.overlay.stored is not None:
                self.before.to(self.overlay.stored.codes.device)
                self.adapters.to(self.overlay.stored.codes.device)
            self.overlay.stored = self.before
        elif self.before is not None:
            assert parameter is not None
            parameter.data = self.before.to(parameter.device)
        self.overlay.adapters, self.overlay.active = self.adapters, self.active
        for each in self.places:
            lay_over(each.module, each.tensor, self.overlay)


def merge_weight(name: str, places: tuple[Place, ...], overlay: Overlay, dequantise: bool) -> Merged:
    """Merge the active adapters of one weight; the overlay goes unless it stores the weight."""
    place = places[0]
    parameter = place.module._parameters.get(place.tensor)
    adapters, active, stored = overlay.adapters, overlay.active, overlay.stored
    before: Tensor | Stored | None = None
    error = None
    if overlay.active:
        exact = overlay.exact(parameter)
        # What can fail comes before the first change.
        if stored is not None and not dequantise:
            again = Stored(quantise_nf4(exact.float(), double=stored.small_scales), stored.dtype)
            error = _error(again.dequantise(torch.float32), exact)
            before, overlay.stored = stored, again
        elif stored is not None:
            made = nn.Parameter(exact.to(stored.dtype), requires_grad=False)
            error = _error(made, exact)
            before, overlay.stored = stored, None
            for each in places:
                others = {**each.module._parameters}
                each.module._parameters.clear()
                each.module._parameters.update({each.tensor: made, **others})  # in the layer's own order
        else:
            assert parameter is not None
            now = exact.to(parameter.dtype)
            error = _error(now, exact)
            before, parameter.data = parameter.data, now
    if overlay.stored is None:
        for each in places:
            take_away(each.module, each.tensor)
    else:
        overlay.adapters, overlay.active = Named(), {}
    return Merged(name, places, overlay, adapters, active, before, error)


def _error(now: Tensor, exact: Tensor) -> MergeError:
    difference = now.double() - exact
    largest = difference.abs().max().item() if exact.numel() else 0.0
    return MergeError(largest, difference.square().sum().item(), exact.square().sum().item())
