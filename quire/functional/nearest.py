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
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.threads import one_thread, together
from quire.kernels import refusal, use_triton

Backend = Literal["auto", "torch", "triton"]

# Scores of a chunk, by measurement: with the rows they should lie in a core's cache, and be many enough that
# calling PyTorch is not what takes the time.
CHUNK_NUMBERS = {"cpu": 3 * 2**19, "other": 2**25}
CHUNK_ROWS = {"cpu": (1024, 12288), "other": (2**12, 2**22)}
# Numbers of float64 in a piece of what is computed beside the scores.
PIECE_NUMBERS = {"cpu": 2**17, "other": 2**23}
# Rows below which a second thread is not worth starting.
ROWS_PER_THREAD = 2**14
# Relative error of one float32 operation.
ROUNDING = 2.0**-24
# More than any score.
FAR = 3e38
# Differences in float64 for rows that are decided without being asked about their size first.
FEW_NUMBERS = 2**18
# Of the unit of a tally, the unit of what it leaves out.
FINER = 2.0**-30
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

    With a `tally` of the same rows, which have no weights, only those are added that have changed sides; the
    labels are then in its memory, which the search after the next one takes again.
    """
    return _search(rows, centres, weights, shift, radius, backend, collect=True, tally=tally)


class Workspace:
    """Memory that one search leaves to the next: what is asked for anew has to be mapped page by page."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._turn = 0

    def room(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        found = self._kept.get(name)
        if found is None or found.shape != shape or found.dtype != dtype or found.device != like.device:
            found = self._kept[name] = torch.empty(shape, dtype=dtype, device=like.device)
        return found

    def labels(self, rows: Tensor) -> Tensor:
        """Of two by turns: the last ones are still asked for while the next are found."""
        self._turn = 1 - self._turn
        return self.room(f"labels {self._turn}", len(rows), like=rows, dtype=torch.int64)


class Tally:
    """Sums of rows (N, D) by their labels, kept from one set of centres to the next.

    Rows are added as whole numbers, which add up alike in any order: a sum that rows have come to and gone
    from is the sum of those that are there, to the last bit. float64 holds them up to 2⁵³, so their unit
    leaves room for all rows; of float64's rows, what that leaves out is added apart, in units 2³⁰ times
    smaller.
    """

    def __init__(self, rows: Tensor, clusters: int, shift: Tensor, radius: float) -> None:
        self.rows, self.workspace = rows, Workspace()
        exponent = 51 - max(len(rows), 1).bit_length() - math.frexp(max(radius, 1e-300))[1]
        self.scale = 2.0 ** max(min(exponent, 1000), -1000)
        self.shift = (shift.double() * self.scale).round() / self.scale
        self.labels = torch.full((len(rows),), clusters, dtype=torch.int64, device=rows.device)
        # The last row is of those that have no label yet, the first column counts.
        parts = 2 if rows.dtype == torch.float64 else 1
        self.totals = self.shift.new_zeros(clusters + 1, 1 + parts * rows.shape[1])

    def take(self, labels: Tensor, moves: Tensor) -> tuple[Tensor, Tensor]:
        """S_k (K, D) and n_k (K,) under these labels, from what their rows have moved."""
        self.labels = labels
        self.totals += moves
        counts, width = self.totals[:-1, :1], self.rows.shape[1]
        sums = self.totals[:-1, 1 : 1 + width]
        if self.totals.shape[1] > 1 + width:
            sums = sums + self.totals[:-1, 1 + width :] * FINER
        return sums / self.scale + counts * self.shift, counts[:, 0].clone()

    def moves(self, share: slice, labels: Tensor) -> Tensor:
        """What the rows of a share bring to each cluster by changing sides, as `totals`."""
        changed = differing(labels[share], self.labels[share]) + share.start
        gained, lost = torch.zeros_like(self.totals), torch.zeros_like(self.totals)
        width, zero = self.rows.shape[1], -self.shift * self.scale
        most = max(1, PIECE_NUMBERS["cpu"] // self.totals.shape[1])

        def room(name: str, columns: int, dtype: torch.dtype = torch.float64) -> Tensor:
            place = f"{name} {share.start}"
            return self.workspace.room(place, most, columns, like=self.rows, dtype=dtype)

        taken, row = room("taken", width, self.rows.dtype), room("row", width)
        added = room("added", self.totals.shape[1])
        added[:, 0] = 1
        whole, rest = added[:, 1 : 1 + width], added[:, 1 + width :]
        for part in spans(len(changed), most):
            numbers, n = changed[part], part.stop - part.start
            torch.index_select(self.rows, 0, numbers, out=taken[:n])
            row[:n].copy_(taken[:n]).mul_(self.scale).add_(zero)
            torch.round(row[:n], out=whole[:n])
            if rest.shape[1]:
                torch.round(row[:n].sub_(whole[:n]).mul_(1 / FINER), out=rest[:n])
            gained.index_add_(0, labels.index_select(0, numbers), added[:n])
            lost.index_add_(0, self.labels.index_select(0, numbers), added[:n])
        return gained.sub_(lost)


def _search(
    rows: Tensor,
    centres: Tensor,
    weights: Tensor | None,
    shift: Tensor | None,
    radius: float | None,
    backend: Backend,
    *,
    collect: bool,
    tally: Tally | None = None,
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
        screen = Screen(rows, centres, shift, weights, radius, collect=collect, tally=tally)
        sums, counts = screen.run(max(threads, 1))
        if tally is not None:
            return ClusterSums(screen.labels, *tally.take(screen.labels, sums))
    return ClusterSums(screen.labels, sums[: len(centres)], counts[: len(centres)])


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


class _Views(NamedTuple):
    """That memory as a chunk of n rows fills it, made once: each takes as long as a short operation."""

    scores: Tensor
    """(G·L, n)"""
    grid: Tensor
    """The same, (G, L, n)."""
    least: Tensor
    """Smallest scores, (2G, n): of each group, then of each place."""
    groups: Tensor
    places: Tensor
    best: Tensor
    """(n,)"""
    hits: Tensor
    """(2G, n)"""
    found: Tensor
    """Sum of the hits' numbers, and how many there are, (2, n)."""
    number: Tensor
    many: Tensor


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
        tally: Tally | None = None,
    ) -> None:
        self.rows, self.centres, self.shift, self.weights = rows, centres, shift, weights
        # With a tally, sums wait until labels are known; otherwise rows are added while they are in a cache.
        self.tally, self.collect = tally, collect and tally is None
        self.workspace = Workspace() if tally is None else tally.workspace
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
        self.labels = self.workspace.labels(rows)
        self.hits = self.workspace.room("hits", len(rows), like=rows, dtype=torch.float32)
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

    def run(self, threads: int = 1) -> tuple[Tensor, Tensor]:
        """Labels are written; sums (G·L, D), or what the rows of a tally have moved, and counts are given."""
        shares = list(spans(len(self.rows), max(1, -(-len(self.rows) // threads))))
        if not shares:
            return torch.zeros_like(self.codes).double(), torch.zeros_like(self.biases[:, 0]).double()
        rooms = [self._room(share.stop - share.start, number) for number, share in enumerate(shares)]
        chunks: list[Iterable[slice]] = [
            list(spans(share.stop, rooms[0].size, share.start)) for share in shares
        ]
        if not self.collect:
            # Nothing is added yet, so it does not matter who takes which: a thread that is held up takes
            # fewer. (Lists are popped by one thread at a time.)
            left = [chunk for share in chunks for chunk in share]
            chunks = [_taken(left) for _ in shares]
        with torch.no_grad():
            jobs = [partial(self.over, part, room) for part, room in zip(chunks, rooms, strict=True)]
            sums = together(jobs)
            ends = [partial(self.settle, share, part) for share, part in zip(shares, sums, strict=True)]
            found = together(ends)
        return torch.stack([part for part, _ in found]).sum(0), torch.stack([n for _, n in found]).sum(0)

    def settle(self, span: slice, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of a span made sure of, and sums and counts under them."""
        labels, unsure = self.labels, self.unsure(span)
        if len(unsure):
            before, after = labels[unsure], self.settled(unsure)
            labels[unsure] = after
            if self.collect:  # rows that change sides take their sums with them
                moved = self.rows[unsure].double()
                moved *= 1 if self.weights is None else self.weights[unsure, None]
                sums.index_add_(0, after, moved).index_add_(0, before, moved.neg_())
        if self.tally is not None:
            sums = self.tally.moves(span, labels)
        if not self.collect:
            return sums, sums[:, 0]
        weights = None if self.weights is None else self.weights[span]
        return sums, torch.bincount(labels[span], weights, minlength=len(self.codes)).double()

    def _room(self, rows: int, thread: int = 0) -> _Room:
        cells, d = self.codes.shape
        kind = "cpu" if self.rows.device.type == "cpu" else "other"
        least, most = CHUNK_ROWS[kind]
        size = min(rows, max(least, min(most, CHUNK_NUMBERS[kind] // (cells + 2 * d))))
        size = -(-rows // -(-rows // size))  # as many, of equal size

        def room(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return self.workspace.room(f"{name} {thread}", *shape, like=self.biases, dtype=dtype)

        return _Room(
            size,
            room("scores", cells * size),
            room("least", 2 * self.groups * size),
            room("hits", 2 * self.groups * size),
            room("best", 3 * size),
            room("near", size, d) if self.is_shifted else self.biases,
            room("wide", size, d, dtype=torch.float64) if self.collect else self.biases,
        )

    def over(self, chunks: Iterable[slice], room: _Room) -> Tensor:
        """Labels and numbers of hits of chunks, and the sums under these labels if they are collected."""
        cells, d = self.codes.shape
        sums = self.centres.new_zeros(cells, d)
        views = self._views(room, room.size)
        for place in chunks:
            rows, label = self.rows[place], self.labels[place]
            n = len(rows)
            if n != len(views.best):
                views = self._views(room, n)
            moved = torch.sub(rows, self.shift, out=room.near[:n]) if self.is_shifted else rows
            if 8 * cells <= d:  # a product with so short a side is faster the other way round
                views.scores.copy_(torch.addmm(self.biases[:, 0], moved, self.codes.T).T)
            else:
                torch.addmm(self.biases, self.codes, moved.T, out=views.scores)
            torch.amin(views.grid, 1, out=views.groups)
            torch.amin(views.grid, 0, out=views.places)
            torch.amin(views.groups, 0, out=views.best)
            torch.le(views.least, views.best.add_(self.doubt), out=views.hits)
            torch.mm(self.meaning, views.hits, out=views.found)
            label.copy_(views.number)
            self.hits[place] = views.many
            if self.collect:
                label.clamp_(max=cells - 1)  # where several centres hit, the sum of their numbers is none
                if self.weights is not None:
                    rows = torch.mul(rows, self.weights[place, None], out=room.wide[:n])
                elif rows.dtype != torch.float64:
                    rows = room.wide[:n].copy_(rows)
                sums.index_add_(0, label, rows)
        return sums

    def _views(self, room: _Room, n: int) -> _Views:
        cells, groups, places = len(self.codes), self.groups, self.places
        scores = room.scores[: cells * n].view(cells, n)
        least, hits = (part[: 2 * groups * n].view(-1, n) for part in (room.least, room.hits))
        least[groups + places :] = FAR  # there are fewer places than groups, or as many
        found = room.best[n : 3 * n].view(2, n)
        return _Views(
            scores, scores.view(groups, places, n), least, least[:groups], least[groups : groups + places],
            room.best[:n], hits, found, found[0], found[1],
        )  # fmt: skip

    def unsure(self, span: slice) -> Tensor:
        """Numbers of the rows where a second centre comes closer than rounding could hide for the largest
        row."""
        return differing(self.hits[span], torch.full_like(self.hits[:1], 2.0)) + span.start

    def settled(self, numbers: Tensor) -> Tensor:
        """Labels of those rows: of many, each is first asked about its own size."""
        if len(numbers) * self.centres.numel() <= FEW_NUMBERS:
            return by_differences(self.rows[numbers].double(), self.centres)
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
            label[close[few]] = by_differences(x[close[few]], centres)
        labels[part] = label
    return labels


def by_differences(rows: Tensor, centres: Tensor) -> Tensor:
    """argmin_k ‖x − c_k‖², in float64 and without any cancellation."""
    return (rows[:, None] - centres).square_().sum(2).argmin(1)


def differing(values: Tensor, others: Tensor) -> Tensor:
    """Places where two tensors (n,) differ; on the CPU by NumPy, which takes a fifth of the time."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(values.numpy() != others.numpy()))
    return (values != others).nonzero()[:, 0]


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


def spans(total: int, size: int, first: int = 0) -> Iterator[slice]:
    """Slices of `size` that make up what lies from `first` to `total`."""
    return (slice(start, min(start + size, total)) for start in range(first, total, size))


def _taken(left: list[slice]) -> Iterator[slice]:
    """What is left, while others take from it too."""
    while left:
        try:
            yield left.pop()
        except IndexError:  # somebody was faster
            return
