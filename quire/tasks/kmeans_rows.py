"""Rows as K-means takes them: their weights, a survey of all, and what is kept of them from sweep to sweep.

N rows, B rows of a batch, D features, K clusters, M rows that empty clusters want.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from quire.data.batch import Batch, Data, in_order
from quire.functional import tally as on_host
from quire.functional.clusters import Farthest, farthest_rows, inertia
from quire.functional.nearest import Backend, running_sums, takes_kernels
from quire.functional.screen import pieces
from quire.functional.tally import Tally
from quire.functional.threads import one_thread, share_rows
from quire.train.statistics import as_rows

if TYPE_CHECKING:
    from quire.kernels.grouped import RunningSums

T = TypeVar("T")
WEIGHT = "weight"
"""The field that weighs rows."""
SHARE_ROWS = 2**12
"""Rows below which a thread is not worth starting."""


def weighted_rows(batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Rows (B, D) and their weights (B,), None where each counts once."""
    return as_rows(batch.inputs), batch.fields.get(WEIGHT)


def divided(work: Callable[[slice], T], rows: Tensor) -> list[T]:
    """`work` of all rows, on the CPU divided among threads."""
    if rows.device.type != "cpu":
        return [work(slice(0, len(rows)))]
    return share_rows(work, len(rows), least=SHARE_ROWS)


def shared_inertia(rows: Tensor, centres: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Σ w‖x − c‖² of rows and their centres, in float64."""

    def work(span: slice) -> Tensor:
        weight = None if weights is None else weights[span]
        return inertia(rows[span], centres, labels[span], weights=weight)

    return sum(divided(work, rows), centres.new_zeros(()))


def shared_farthest(
    rows: Tensor, centres: Tensor, labels: Tensor, count: int, weights: Tensor | None
) -> Farthest:
    """The `count` rows farthest from their centres."""

    def work(span: slice) -> Farthest:
        weight = None if weights is None else weights[span]
        return farthest_rows(rows[span], centres, labels[span], count, weights=weight)

    found = Farthest(*(torch.cat(parts) for parts in zip(*divided(work, rows), strict=True)))
    order = found.squared.sort(descending=True, stable=True).indices[:count]
    return Farthest(*(part[order] for part in found))


# Before the first sweep -----------------------------------------------------------------------


class Survey(NamedTuple):
    """What does not change from sweep to sweep, in float64."""

    shift: Tensor
    """A point amid the rows, (D,), which the others are about."""
    variance: Tensor
    """Mean variance of a feature, each row counted once."""
    squares: Tensor
    """Σ w‖x − shift‖²."""
    radius: Tensor
    """max ‖x − shift‖."""
    mass: Tensor
    """Σ w."""


def survey(data: Data, device: torch.device) -> Survey:
    """In one pass, about a provisional mean."""
    shift: Tensor | None = None
    for batch in in_order(data):
        rows, weights = weighted_rows(batch.to(device))
        if shift is None:
            # Rounded to the rows' own type, so that taking it off them means the same everywhere.
            with one_thread():
                shift = rows[next(pieces(rows))].double().mean(0).to(rows.dtype).double()
            sums, largest = shift.new_zeros(2 * len(shift) + 2), shift.new_zeros(())
        for part, distance in divided(partial(_power_sums, rows, weights, shift), rows):
            sums, largest = sums + part, torch.maximum(largest, distance)
    assert shift is not None
    first, second = sums[:-2].view(2, -1) / len(data)
    variance = (second - first.square()).clamp_min(0).mean()
    return Survey(shift, variance, sums[-2], largest.sqrt(), sums[-1])


def _power_sums(rows: Tensor, weights: Tensor | None, shift: Tensor, span: slice) -> tuple[Tensor, Tensor]:
    """Σ x, Σ x², Σ w‖x‖² and Σ w of rows less the shift, (2D + 2,), and the largest ‖x‖²."""
    if on_host.takes(rows, shift):
        return on_host.power_sums(rows[span], None if weights is None else weights[span], shift)
    largest, sums = shift.new_zeros(()), shift.new_zeros(2 * len(shift) + 2)
    for part in pieces(rows[span]):
        x = rows[span][part] - shift
        first = x.sum(0)
        second, squared = x.square_().sum(0), x @ torch.ones_like(shift)
        weight = torch.ones_like(squared) if weights is None else weights[span][part].double()
        sums += torch.cat([first, second, (weight @ squared)[None], weight.sum()[None]])
        largest = torch.maximum(largest, squared.max())
    return sums, largest


# From sweep to sweep --------------------------------------------------------------------------


class Tallies:
    """The sums of each start's last sweep. Where few rows change sides, the next one's follow from them."""

    def __init__(self, clusters: int, backend: Backend) -> None:
        self.clusters, self.backend = clusters, backend
        self._kept: dict[int, Tally | RunningSums] = {}

    def find(
        self, start: int, batch: Batch, centres: Tensor, *, shift: Tensor, radius: float
    ) -> Tally | RunningSums | None:
        """Of a start, for a batch of all rows; None where these are weighed, or do not lie in memory as they
        are."""
        rows, weights = weighted_rows(batch)
        place = rows.data_ptr()
        if weights is not None or place != batch.inputs.data_ptr():
            return None
        kernels = rows.is_cuda and takes_kernels(rows, centres, self.backend)
        if not kernels and (self.backend == "torch" or not on_host.takes(rows, centres)):
            return None
        kept = self._kept.get(start)
        if kept is None or kept.rows.data_ptr() != place:
            make = running_sums if kernels else Tally
            kept = make(rows, self.clusters, shift, radius)
            if kept is not None:
                self._kept[start] = kept
        return kept

    def forget(self) -> None:
        self._kept = {}


# For empty clusters ---------------------------------------------------------------------------


def candidates(some: Farthest) -> Tensor:
    """Rows far from their centres as numbers (M, D + 4): present, ‖x − c‖², label, weight, x. Each batch has
    places of its own for them, in which all others add zeros."""
    columns = (torch.ones_like(some.squared), some.squared, some.labels, some.weights)
    return torch.cat([torch.stack(columns, 1), some.rows], 1)


def farthest(places: Tensor, count: int) -> Farthest:
    """The `count` farthest of all batches' candidates (…, M, D + 4)."""
    found = places.flatten(0, 1)
    found = found[found[:, 0] > 0]
    order = found[:, 1].sort(descending=True, stable=True).indices[:count]
    _, squared, label, weight = found[order, :4].unbind(1)
    return Farthest(squared, label.long(), weight, found[order, 4:])
