"""Triton kernels of sums by label: of all rows, or of those that changed sides since the last time.

N rows, D features, K labels.

Of all rows, in float64: rows are taken in the order of their labels, a run of equal labels at a time.

From one sweep of K-means to the next few rows change sides. `RunningSums` keeps the sums, takes these rows
from one and adds them to another. Rows are added as whole numbers, in units so small that 2⁶³ holds all of
them together: these add up alike in any order, so a sum is the same to the last bit however it came about. A
sweep then reads 8 bytes of each row, and all of a row that moved.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NOBODY = tl.constexpr(2147483647)
SPAN, FEW, MOVERS = 512, 64, 8
"""A program of so many warps looks through so many rows for those that moved, and takes so many at a time."""
LEAST_CLUSTERS = 64
"""With fewer, rows that are added one by one would wait for each other."""
MOST_EXPONENT = 120
"""Of a unit, which is a float32."""


@triton.jit
def _whole(x, shift_ptr, scale, d, wide):  # type: ignore[no-untyped-def]
    """(x − shift)·scale, rounded."""
    shift = tl.load(shift_ptr + d, mask=wide, other=0.0)
    return tl.floor((x.to(tl.float64) - shift[None, :]) * scale + 0.5).to(tl.int64)


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    x_ptr, weights_ptr, shift_ptr, order_ptr, labels_ptr, sums_ptr, counts_ptr, scale, rows, features,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """sums, counts += those of ROWS rows in the order of their labels, one run of equal labels at a time.
    WHOLE: of (x − shift)·scale as whole numbers, without weights."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    ok, wide = i < rows, d < features
    n = tl.load(order_ptr + i, mask=ok, other=0).to(tl.int64)
    label = tl.load(labels_ptr + i, mask=ok, other=-1).to(tl.int32)
    x = tl.load(x_ptr + n[:, None] * features + d[None, :], mask=ok[:, None] & wide[None, :], other=0.0)
    weight = tl.load(weights_ptr + n, mask=ok, other=0.0) if WEIGHTED else ok.to(tl.float64)
    current = tl.min(tl.where(ok, label, NOBODY), 0)
    last = tl.max(label, 0)
    while current <= last:
        mine = label == current
        if WHOLE:
            share = mine.to(tl.int64)
            total = tl.sum(tl.where(mine[:, None], _whole(x, shift_ptr, scale, d, wide), 0), 0)
        elif WEIGHTED:
            share = tl.where(mine, weight, 0.0)
            total = tl.sum(share[:, None] * x.to(tl.float64), 0)
        else:
            share = mine.to(tl.float64)
            total = tl.sum(tl.where(mine[:, None], x, 0.0).to(tl.float64), 0)
        tl.atomic_add(sums_ptr + current.to(tl.int64) * features + d, total, mask=wide, sem="relaxed")
        if tl.program_id(1) == 0:
            tl.atomic_add(counts_ptr + current, tl.sum(share, 0), sem="relaxed")
        current = tl.min(tl.where(label > current, label, NOBODY), 0)


def sums_by_label(
    rows: Tensor, labels: Tensor, clusters: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ w·x (K, D) and Σ w (K,) of each cluster, in float64; labels (N,), weights (N,) float64."""
    features = rows.shape[1]
    flat = torch.zeros(clusters * (features + 1), dtype=torch.float64, device=rows.device)
    sums, counts = flat[: clusters * features].view(clusters, features), flat[clusters * features :]
    _by_runs(rows, labels, sums, counts, weights)
    return sums, counts


def _by_runs(
    rows: Tensor, labels: Tensor, sums: Tensor, counts: Tensor, weights: Tensor | None = None,
    shift: Tensor | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """sums, counts += those of all rows; with a shift, as whole numbers."""
    (n, features), clusters = rows.shape, len(counts)
    # A narrow key makes a shorter sort; equal labels keep their order.
    ordered, order = (labels.to(torch.int16) if clusters <= 2**15 else labels).sort(stable=True)
    # Few enough rows that most programs see one label, and that several fit on a multiprocessor.
    block = min(max(triton.next_power_of_2(triton.cdiv(n, clusters)) // 8, 16), 128)
    width = min(max(triton.next_power_of_2(features), 16), 64)
    _collect[(triton.cdiv(n, block), triton.cdiv(features, width))](
        rows, rows if weights is None else weights, rows if shift is None else shift, order, ordered,
        sums, counts, scale, n, features,
        ROWS=block, WIDTH=width, WEIGHTED=weights is not None, WHOLE=shift is not None,
    )  # fmt: skip


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    x_ptr, fresh_ptr, labels_ptr, shift_ptr, totals_ptr, counts_ptr, list_ptr, scale,
    rows, features,
    SPAN: tl.constexpr, FEW: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """labels ← fresh; totals, counts += rows that joined, −= rows that left."""
    start = tl.program_id(0) * SPAN
    number = start + tl.arange(0, SPAN)
    ok = number < rows
    fresh = tl.load(fresh_ptr + number, mask=ok, other=0)
    label = tl.load(labels_ptr + number, mask=ok, other=0)
    moved = (fresh != label).to(tl.int32)
    tl.store(list_ptr + start + tl.cumsum(moved, 0) - 1, number, mask=moved > 0)
    tl.debug_barrier()
    total = tl.sum(moved, 0)
    for first in range(0, total, FEW):
        i = first + tl.arange(0, FEW)
        here = i < total
        n = tl.load(list_ptr + start + i, mask=here, other=0)
        to, origin = tl.load(fresh_ptr + n, mask=here, other=0), tl.load(labels_ptr + n, mask=here, other=0)
        one = tl.full((FEW,), 1, tl.int64)
        tl.atomic_add(counts_ptr + to, one, mask=here, sem="relaxed")
        tl.atomic_add(counts_ptr + origin, -one, mask=here, sem="relaxed")
        for offset in range(0, features, WIDTH):
            d = offset + tl.arange(0, WIDTH)
            real = here[:, None] & (d < features)[None, :]
            x = tl.load(x_ptr + n.to(tl.int64)[:, None] * features + d[None, :], mask=real, other=0.0)
            whole = _whole(x, shift_ptr, scale, d, d < features)
            place = totals_ptr + to.to(tl.int64)[:, None] * features + d[None, :]
            tl.atomic_add(place, whole, mask=real, sem="relaxed")
            place = totals_ptr + origin.to(tl.int64)[:, None] * features + d[None, :]
            tl.atomic_add(place, -whole, mask=real, sem="relaxed")
    tl.debug_barrier()
    tl.store(labels_ptr + number, fresh, mask=ok)


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    totals_ptr, counts_ptr, shift_ptr, sums_ptr, masses_ptr, unit, features, numbers, BLOCK: tl.constexpr
):
    """sums ← totals·unit + counts·shift, masses ← counts, in float64."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = i < numbers
    k, d = i // features, i % features
    count = tl.load(counts_ptr + k, mask=ok, other=0).to(tl.float64)
    total = tl.load(totals_ptr + i, mask=ok, other=0).to(tl.float64) * unit
    tl.store(sums_ptr + i, total + count * tl.load(shift_ptr + d, mask=ok, other=0.0), mask=ok)
    tl.store(masses_ptr + k, count, mask=ok & (d == 0))


class RunningSums:
    """Σ x (K, D) and counts (K,) of rows (N, D) by their labels, kept from one set of labels to the next."""

    def __init__(self, rows: Tensor, clusters: int, shift: Tensor, radius: float) -> None:
        """`radius` is max ‖x − shift‖, which no entry of a row exceeds."""
        self.rows, self.clusters, self.shift = rows, clusters, shift.double()
        exponent = 61 - len(rows).bit_length() - math.frexp(max(radius, 1e-300))[1]
        self.scale = 2.0 ** max(min(exponent, MOST_EXPONENT), -MOST_EXPONENT)
        device, spans = rows.device, triton.cdiv(len(rows), SPAN)
        self.labels = torch.empty(len(rows), dtype=torch.int32, device=device)
        self.totals = torch.zeros(clusters, rows.shape[1], dtype=torch.int64, device=device)
        self.counts = torch.zeros(clusters, dtype=torch.int64, device=device)
        self.is_new = True
        self.list = torch.empty(spans * SPAN, dtype=torch.int32, device=device)

    def move(self, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """The sums and counts under these labels, (N,) int32, in float64."""
        (n, features), clusters = self.rows.shape, self.clusters
        width = min(max(triton.next_power_of_2(features), 16), 64)
        if self.is_new:
            # Recorded, this would be added again each time.
            assert not self.rows.is_cuda or not torch.cuda.is_current_stream_capturing()
            _by_runs(self.rows, fresh, self.totals, self.counts, None, self.shift, self.scale)
            self.labels.copy_(fresh)
            self.is_new = False
        _move[(triton.cdiv(n, SPAN),)](
            self.rows, fresh, self.labels, self.shift, self.totals, self.counts, self.list, self.scale,
            n, features, SPAN=SPAN, FEW=FEW, WIDTH=width, num_warps=MOVERS,
        )  # fmt: skip
        sums, counts = torch.empty_like(self.totals, dtype=torch.float64), self.shift.new_empty(clusters)
        _read[(triton.cdiv(clusters * features, 1024),)](
            self.totals, self.counts, self.shift, sums, counts, 1 / self.scale, features, clusters * features,
            BLOCK=1024,
        )  # fmt: skip
        return sums, counts
