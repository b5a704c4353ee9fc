"""The nearest of K centres, and the sums of the rows that each centre got, in one pass over the rows.

N rows, D features, K centres, n rows of a chunk; x a row, c a centre, s a shift. The scores of a chunk are
(K, n), seen as a grid of G groups of L centres.

The smallest of ‖c‖² − 2x·c is looked for in float32, with s taken off both, in chunks that stay in a core's
cache. Only two reductions touch all scores: the smallest of each group and the smallest of each place in a
group. Two centres differ in one or the other, so of these (G + L, n) numbers exactly two are as small as the
best where no other centre comes close, and their places are its number. A row for which one comes closer than
rounding can tell apart is decided again in float64, in the end by differences, the lower number winning an
exact tie. So labels are those of float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.threads import one_thread, together
from quire.kernels import refusal, use_triton

Backend = Literal["auto", "torch", "triton"]

# Scores of a chunk, by measurement: with the rows they should lie in a core's cache, and be many enough that
# calling PyTorch is not what takes the time.
CHUNK_NUMBERS = {"cpu": 2**20, "other": 2**25}
CHUNK_ROWS = {"cpu": (1024, 8192), "other": (2**12, 2**22)}
# Numbers of float64 in a piece of what is computed beside the scores.
PIECE_NUMBERS = {"cpu": 2**17, "other": 2**23}
# Rows below which a second thread is not worth starting.
ROWS_PER_THREAD = 2**14
# Relative error of one float32 operation.
ROUNDING = 2.0**-24
# More than any score.
FAR = 3e38
# Doubts below it come from scores that float32 has lost digits of, or all.
SMALLEST = 1e-30


class ClusterSums(NamedTuple):
    """Which rows belong to which centre, and what the next centres are made of."""

    labels: Tensor
    """k(n), (N,) int64"""
    sums: Tensor
    """S_k = Σ w x of each cluster, (K, D) float64"""
    counts: Tensor
    """n_k = Σ w of each cluster, (K,) float64"""


def nearest_centres(
    rows: Tensor,
    centres: Tensor,
    *,
    shift: Tensor | None = None,
    radius: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """k(n) = argmin_k ‖x_n − c_k‖² as in float64, the lowest on a tie: (N, D), (K, D) → (N,).

    `shift` (D,) is a point amid the rows, the mean of the centres unless given; `radius` is max ‖x − shift‖
    or more, which saves a pass over the rows where it is known.
    """
    return _search(rows, centres, None, shift, radius, backend, collect=False).labels


def cluster_sums(
    rows: Tensor,
    centres: Tensor,
    *,
    weights: Tensor | None = None,
    shift: Tensor | None = None,
    radius: float | None = None,
    tally: Tally | None = None,
    backend: Backend = "auto",
) -> ClusterSums:
    """Labels, sums and counts of the rows under these centres: (N, D), (K, D), (N,) → (N,), (K, D), (K,).

    With a `tally` of the same rows, which have no weights, only those are added that have changed sides.
    """
    if tally is None:
        return _search(rows, centres, weights, shift, radius, backend, collect=True)
    labels = _search(rows, centres, None, shift, radius, backend, collect=False).labels
    return ClusterSums(labels, *tally.update(labels))


class Tally:
    """Sums of rows (N, D) by their labels, kept from one set of centres to the next.

    Rows are added as whole numbers of a unit that is far below their rounding: whole numbers add up alike in
    any order, so that a sum which rows have come to and gone from is the sum of those that are there.
    """

    def __init__(self, rows: Tensor, clusters: int, shift: Tensor, radius: float) -> None:
        self.rows = rows
        # Of 62 bits, what the number of rows leaves for each of them.
        exponent = 61 - max(len(rows), 1).bit_length() - math.frexp(max(radius, 1e-300))[1]
        self.unit = 2.0 ** -max(min(exponent, 1000), -1000)
        self.shift = (shift.double() / self.unit).round() * self.unit
        self.labels = torch.full((len(rows),), clusters, dtype=torch.int64, device=rows.device)
        # The last is of rows that have no label yet, and is left out.
        self.totals = torch.zeros(clusters + 1, rows.shape[1], dtype=torch.int64, device=rows.device)

    def update(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """S_k (K, D) and n_k (K,) under these labels."""
        threads = min(torch.get_num_threads(), 1 + len(labels) // ROWS_PER_THREAD)
        shares = list(spans(len(labels), max(1, -(-len(labels) // threads))))
        self.totals += torch.stack(together([partial(self._moves, share, labels) for share in shares])).sum(0)
        self.labels = labels
        counts = torch.bincount(labels, minlength=len(self.totals) - 1).double()
        return self.totals[:-1].double() * self.unit + counts[:, None] * self.shift, counts

    def _moves(self, share: slice, labels: Tensor) -> Tensor:
        """What the rows of a share bring to each cluster by changing sides."""
        changed = (labels[share] != self.labels[share]).nonzero()[:, 0] + share.start
        gained = torch.zeros_like(self.totals)
        for part in pieces(changed, self.rows.shape[1]):
            numbers = changed[part]
            row = self.rows[numbers].double().sub_(self.shift).mul_(1 / self.unit).round_().long()
            gained.index_add_(0, labels[numbers], row).index_add_(0, self.labels[numbers], row, alpha=-1)
        return gained


def _search(
    rows: Tensor,
    centres: Tensor,
    weights: Tensor | None,
    shift: Tensor | None,
    radius: float | None,
    backend: Backend,
    *,
    collect: bool,
) -> ClusterSums:
    if rows.ndim != 2 or centres.ndim != 2 or rows.shape[1] != centres.shape[1] or not len(centres):
        raise InputError(
            f"rows of shape {tuple(rows.shape)} and centres of shape {tuple(centres.shape)}",
            expected="(N, D) and (K, D) with the same D and K ≥ 1",
        )
    centres = centres.double()
    shift = (centres.mean(0) if shift is None else shift).to(rows.dtype)
    weights = None if weights is None else weights.double().contiguous()
    if takes_kernels(rows, centres, backend):
        from quire.kernels import kmeans as kernels

        labels = kernels.nearest_labels(rows, centres, shift)
        if not collect:
            return ClusterSums(labels.long(), torch.zeros_like(centres), centres.new_zeros(len(centres)))
        return ClusterSums(labels.long(), *kernels.sums_by_label(rows, labels, len(centres), weights))
    on_cpu = rows.device.type == "cpu"
    threads = min(torch.get_num_threads(), len(rows) // ROWS_PER_THREAD) if on_cpu else 1
    with one_thread(threads > 1):
        screen = Screen(rows, centres, shift, weights, radius, collect=collect)
        sums = screen.run(max(threads, 1))
        labels, unsure = screen.labels, screen.unsure()
        if len(unsure):
            before, after = labels[unsure], screen.settled(unsure)
            labels[unsure] = after
            changed = after != before
            if collect and bool(changed.any()):
                # Rows that change sides take their sums with them.
                moved, old, new = unsure[changed], before[changed], after[changed]
                weighted = rows[moved].double() * (1 if weights is None else weights[moved, None])
                sums.index_add_(0, old, weighted, alpha=-1).index_add_(0, new, weighted)
        counts = torch.bincount(labels, weights, minlength=len(centres)) if collect else sums[:, 0]
    return ClusterSums(labels, sums[: len(centres)], counts[: len(centres)].double())


def _norms(rows: Tensor) -> float:
    """max ‖x‖."""
    return float(torch.linalg.vector_norm(rows, dim=1).max())


class _Room(NamedTuple):
    """Memory for a chunk, asked for once and by one thread: what a thread hands back is mapped anew."""

    size: int
    scores: Tensor
    least: Tensor
    hits: Tensor
    best: Tensor
    near: Tensor
    wide: Tensor


class Screen:
    """The float32 pass over all rows: labels, how close another centre comes, and sums under the labels."""

    def __init__(
        self,
        rows: Tensor,
        centres: Tensor,
        shift: Tensor,
        weights: Tensor | None,
        radius: float | None,
        *,
        collect: bool,
    ) -> None:
        self.rows, self.centres, self.shift = rows, centres, shift
        self.weights, self.collect = weights, collect
        moved = centres - shift.double()
        reach, offset = _norms(moved), float(shift.double().norm())
        # Rows that lie about the origin already are taken as they are.
        self.is_shifted = rows.dtype != torch.float32 or 2 * offset > reach
        if not self.is_shifted:
            moved, reach = centres, _norms(centres)
            radius = None if radius is None else radius + offset
        (k, d), device = centres.shape, rows.device
        self.groups = math.isqrt(k - 1) + 1
        self.places = -(-k // self.groups)
        cells = self.groups * self.places
        self.codes = torch.zeros(cells, d, dtype=torch.float32, device=device)
        self.biases = torch.full((cells, 1), FAR, dtype=torch.float32, device=device)
        self.codes[:k] = -2 * moved
        self.biases[:k, 0] = moved.square().sum(1)
        # What a hit counts for: the number of its group or place, and one.
        steps = torch.arange(self.groups, dtype=torch.float32, device=device)
        numbers = torch.cat([steps * self.places, steps])
        self.meaning = torch.stack([numbers, torch.ones_like(numbers)])
        self.labels = torch.empty(len(rows), dtype=torch.int64, device=device)
        self.hits = torch.empty(len(rows), dtype=torch.float32, device=device)
        # What two scores can be wrong by together, for a row of norm 1 and of norm 0.
        self.slope = 2.02 * ROUNDING * (d + 8) * 2 * reach
        self.offset = 2.02 * ROUNDING * 8 * reach**2
        self.doubt = self.slope * (self._radius() if radius is None else radius) + self.offset
        if self.doubt < SMALLEST:
            self.doubt = math.inf

    def _radius(self) -> float:
        """max ‖x − s‖."""
        parts = pieces(self.rows)
        return max((_norms(self._near(self.rows[part])) for part in parts), default=0.0)

    def _near(self, rows: Tensor) -> Tensor:
        return (rows - self.shift).float() if self.is_shifted else rows

    def run(self, threads: int = 1) -> Tensor:
        """Labels and numbers of hits are written; sums (G·L, D) come back."""
        shares = list(spans(len(self.rows), max(1, -(-len(self.rows) // threads))))
        rooms = [self._room(share.stop - share.start) for share in shares]
        jobs = [partial(self.over, share, room) for share, room in zip(shares, rooms, strict=True)]
        with torch.no_grad():
            return torch.stack(together(jobs)).sum(0) if jobs else torch.zeros_like(self.codes).double()

    def _room(self, rows: int) -> _Room:
        cells, d = self.codes.shape
        kind = "cpu" if self.rows.device.type == "cpu" else "other"
        least, most = CHUNK_ROWS[kind]
        size = min(rows, max(least, min(most, CHUNK_NUMBERS[kind] // (cells + 2 * d))))
        return _Room(
            size,
            self.biases.new_empty(cells * size),
            self.biases.new_empty(2 * self.groups * size),
            self.biases.new_empty(2 * self.groups * size),
            self.biases.new_empty(3 * size),
            self.biases.new_empty(size, d) if self.is_shifted else self.biases,
            self.centres.new_empty(size, d),
        )

    def over(self, span: slice, room: _Room) -> Tensor:
        """The same for a span of the rows."""
        cells, d = self.codes.shape
        sums = self.centres.new_zeros(cells, d)
        for start in range(span.start, span.stop, room.size):
            place = slice(start, min(start + room.size, span.stop))
            rows, label = self.rows[place], self.labels[place]
            n = len(rows)
            moved = torch.sub(rows, self.shift, out=room.near[:n]) if self.is_shifted else rows
            scores = room.scores[: cells * n].view(cells, n)
            if 8 * cells <= d:  # a product with so short a side is faster the other way round
                scores.copy_(torch.addmm(self.biases[:, 0], moved, self.codes.T).T)
            else:
                torch.addmm(self.biases, self.codes, moved.T, out=scores)
            grid = scores.view(self.groups, self.places, n)
            least, hits = (part[: 2 * self.groups * n].view(-1, n) for part in (room.least, room.hits))
            torch.amin(grid, 1, out=least[: self.groups])
            torch.amin(grid, 0, out=least[self.groups : self.groups + self.places])
            if self.places < self.groups:
                least[self.groups + self.places :] = FAR
            best, found = room.best[:n], room.best[n : 3 * n].view(2, n)
            torch.amin(least[: self.groups], 0, out=best)
            torch.le(least, best.add_(self.doubt), out=hits)
            torch.mm(self.meaning, hits, out=found)
            label.copy_(found[0])
            self.hits[place] = found[1]
            if self.collect:
                label.clamp_(max=cells - 1)  # where several centres hit, the sum of their numbers is none
                if self.weights is not None:
                    rows = torch.mul(rows, self.weights[place, None], out=room.wide[:n])
                elif rows.dtype != torch.float64:
                    rows = room.wide[:n].copy_(rows)
                sums.index_add_(0, label, rows)
        return sums

    def unsure(self) -> Tensor:
        """Numbers of the rows where a second centre comes closer than rounding could hide for the largest
        row."""
        return (self.hits != 2).nonzero()[:, 0]

    def settled(self, numbers: Tensor) -> Tensor:
        """Labels of those rows: each is asked about its own size, and in float64 where that tells nothing."""
        labels = torch.empty_like(numbers)
        for part in pieces(numbers, max(self.codes.shape)):
            rows = self.rows[numbers[part]]
            near = self._near(rows)
            scores = torch.addmm(self.biases, self.codes, near.T)
            best, label = scores.min(0)
            own = self.slope * torch.linalg.vector_norm(near, dim=1) + self.offset
            close = ((scores <= best + own).sum(0) != 1) | ~(own > SMALLEST)
            if bool(close.any()):
                label[close] = decide(rows[close], self.centres, self.shift)
            labels[part] = label
        return labels


def decide(rows: Tensor, centres: Tensor, shift: Tensor) -> Tensor:
    """Labels in float64: by scores where these can tell, by differences otherwise."""
    k, d = centres.shape
    labels = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    if k == 1:
        return labels
    moved = centres - shift.double()
    squared = moved.square().sum(1)
    largest = squared.max()
    for part in pieces(rows, max(k, d)):
        x = rows[part].double()
        near = x - shift.double()
        scores = torch.addmm(squared, near, moved.T, alpha=-2)
        best, label = scores.min(1)
        lead = scores.scatter_(1, label[:, None], torch.inf).amin(1) - best
        doubt = 4e-16 * (d + 8) * (2 * torch.linalg.vector_norm(near, dim=1) * largest.sqrt() + largest)
        close = (~(lead > doubt)).nonzero()[:, 0]
        for few in pieces(close, k * d):
            label[close[few]] = (x[close[few], None] - centres).square_().sum(2).argmin(1)
        labels[part] = label
    return labels


def takes_kernels(rows: Tensor, centres: Tensor, backend: Backend = "auto") -> bool:
    """Whether Triton's kernels search these, without ever waiting for the GPU."""
    reason = refusal(rows)
    if not reason:
        from quire.kernels import kmeans as kernels

        if not kernels.supports(rows, centres):
            reason = f"{len(rows)} rows of {rows.dtype} and {len(centres)} centres"
    return use_triton(backend, reason, takes=", float32 rows one after the other")


def pieces(rows: Tensor, width: int | None = None) -> Iterator[slice]:
    """Slices of the rows that are computed at once where each makes `width` numbers, D unless given."""
    numbers = PIECE_NUMBERS["cpu" if rows.device.type == "cpu" else "other"]
    return spans(len(rows), max(1, numbers // (rows.shape[1] if width is None else width)))


def spans(total: int, size: int) -> Iterator[slice]:
    """Slices of `size` that make up `total`."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
