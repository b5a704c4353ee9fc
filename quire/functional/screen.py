"""The search for the nearest of K centres in float32, and what float64 says where that cannot tell.

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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.functional.tally import Tally, Workspace, differing, spans
from quire.functional.threads import together

# Scores of a chunk, by measurement: they should lie in a core's cache, and be so many that to call PyTorch
# is not what takes the time.
CHUNK_NUMBERS = {"cpu": 3 * 2**17, "other": 2**25}
CHUNK_ROWS = {"cpu": (1024, 12288), "other": (2**12, 2**22)}
# Numbers of float64 in a piece of what is computed beside the scores.
PIECE_NUMBERS = {"cpu": 2**17, "other": 2**23}
# Rows so long are multiplied with so many centres where they have been copied to, by measurement.
LONG_ROW, MANY_CENTRES = 128, 32
# Centres up to which their scores are looked at without a grid.
FEW_CENTRES = 16
# Relative error of one float32 operation.
ROUNDING = 2.0**-24
# More than any score.
FAR = 3e38
# Differences in float64 for rows that are decided without being asked about their size first.
FEW_NUMBERS = 2**18
# Doubts below it come from scores that float32 has lost digits of, or all.
SMALLEST = 1e-30


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
    """Smallest scores, (2G, n): of each group, then of each place. The scores themselves if they are few."""
    groups: Tensor
    places: Tensor
    best: Tensor
    """(n,)"""
    hits: Tensor
    """As many as `least`."""
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
        self.tally, self.collect = tally, collect
        self.workspace = Workspace() if tally is None else tally.workspace
        moved = centres - shift.double()
        self.reach, offset = _norms(moved), float(shift.double().norm())
        # Rows that lie about the origin already are taken as they are.
        self.is_shifted = rows.dtype != torch.float32 or 2 * offset > self.reach
        if tally is not None:
            self.is_shifted = tally.is_shifted
        if not self.is_shifted:
            moved, self.reach = centres, _norms(centres)
            radius = None if radius is None else radius + offset
        (k, d), device = centres.shape, rows.device
        self.is_flat = k <= FEW_CENTRES
        """Whether the scores are few enough to be looked at one by one."""
        self.groups = 1 if self.is_flat else math.isqrt(k - 1) + 1
        self.places = -(-k // self.groups)
        self.copies = tally is not None and d >= LONG_ROW and k >= MANY_CENTRES
        cells = self.groups * self.places
        self.codes = torch.zeros(cells, d, dtype=torch.float32, device=device)
        self.biases = torch.full((cells, 1), FAR, dtype=torch.float32, device=device)
        torch.mul(moved, -2, out=self.codes[:k])
        self.biases[:k, 0] = moved.square().sum(1)
        # What a hit counts for: the number of its group or place, and one.
        steps = torch.arange(max(self.groups, self.places), dtype=torch.float32, device=device)
        numbers = steps if self.is_flat else torch.cat([steps * self.places, steps])
        self.meaning = torch.stack([numbers, torch.ones_like(numbers)])
        self.sole = 1.0 if self.is_flat else 2.0
        """How many hits there are where no other centre comes close."""
        if tally is None:
            self.labels = torch.empty(len(rows), dtype=torch.int64, device=device)
            self.hits = torch.empty(len(rows), dtype=torch.float32, device=device)
        # What two scores can be wrong by together, for a row of norm 1 and of norm 0.
        self.slope = 2.02 * ROUNDING * (d + 8) * 2 * self.reach
        self.offset = 2.02 * ROUNDING * 8 * self.reach**2
        self.radius = self._radius() if radius is None else radius
        self.doubt = self.slope * self.radius + self.offset
        if self.doubt < SMALLEST:
            self.doubt = math.inf

    def _radius(self) -> float:
        """max ‖x − s‖."""
        parts = pieces(self.rows)
        return max((_norms(self._near(self.rows[part])) for part in parts), default=0.0)

    def _near(self, rows: Tensor) -> Tensor:
        return (rows - self.shift).float() if self.is_shifted else rows

    # -- All rows, once ------------------------------------------------------------------------

    def run(self, threads: int = 1) -> tuple[Tensor, Tensor]:
        """Labels are written; sums (G·L, D) and counts (G·L,) are given."""
        shares = list(spans(len(self.rows), max(1, -(-len(self.rows) // threads))))
        if not shares:
            return torch.zeros_like(self.codes).double(), torch.zeros_like(self.biases[:, 0]).double()
        rooms = [self._room(share.stop - share.start, number) for number, share in enumerate(shares)]
        jobs = [partial(self.share, share, room) for share, room in zip(shares, rooms, strict=True)]
        found = together(jobs)
        return torch.stack([part for part, _ in found]).sum(0), torch.stack([n for _, n in found]).sum(0)

    def share(self, span: slice, room: _Room) -> tuple[Tensor, Tensor]:
        """Labels of a span, and sums and counts under them."""
        sums = self.over(spans(span.stop, room.size, span.start), room)
        labels, unsure = self.labels, self.unsure(span)
        if len(unsure):
            before, after = labels[unsure], self.settled(unsure)
            labels[unsure] = after
            if self.collect:  # rows that change sides take their sums with them
                moved = self.rows[unsure].double()
                moved *= 1 if self.weights is None else self.weights[unsure, None]
                sums.index_add_(0, after, moved).index_add_(0, before, moved.neg_())
        if not self.collect:
            return sums, sums[:, 0]
        weights = None if self.weights is None else self.weights[span]
        return sums, torch.bincount(labels[span], weights, minlength=len(self.codes)).double()

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
            self._look(moved, views)
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

    def unsure(self, span: slice) -> Tensor:
        """Numbers of the rows where a second centre comes closer than rounding could hide for the largest
        row."""
        return self._unsure(self.hits[span]) + span.start

    # -- Rows of a tally -----------------------------------------------------------------------

    def labelled(self, where: slice | Tensor, thread: int, limits: bool) -> Tensor:
        """Labels of a tally's rows from a place to another, or of these numbers; their `limits` are written
        if asked for."""
        tally = self.tally
        assert tally is not None
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        room = self._room(count, thread)

        def memory(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return self.workspace.room(f"{name} {thread}", most, like=self.biases, dtype=dtype)[:count]

        most = max(count, self.workspace.size(f"labels {thread}"))
        labels, many = memory("labels", torch.int64), memory("many")
        best, second = memory("first"), memory("second")
        views = self._views(room, room.size)
        for part in spans(count, room.size):
            n = part.stop - part.start
            if n != len(views.best):
                views = self._views(room, n)
            self._look(self._fetch(where, part, room, n), views)
            labels[part] = views.number
            many[part] = views.many
            if limits:
                best[part] = views.best
                torch.amin(views.least.add_(views.hits, alpha=FAR), 0, out=second[part])
        unsure = self._unsure(many)
        if len(unsure):
            numbers = unsure + where.start if isinstance(where, slice) else where.index_select(0, unsure)
            labels[unsure] = self.settled(numbers)
        if limits:
            squares = (
                tally.squares[where] if isinstance(where, slice) else tally.squares.index_select(0, where)
            )
            # `best` has one doubt on it already, the other covers what the root is wrong by.
            root = torch.add(squares, torch.add(best, second), alpha=2).rsqrt_()
            drift = tally.bounds.floors.index_select(0, labels)
            limit = drift.addcmul_(second.sub_(best).sub_(self.doubt), root, value=1 - 1e-5)
            if len(unsure):
                limit[unsure] = -math.inf
            tally.bounds.write(where, limit)
        return labels

    def _fetch(self, where: slice | Tensor, part: slice, room: _Room, n: int) -> Tensor:
        """Rows of a tally in float32, as they are searched."""
        tally = self.tally
        assert tally is not None
        kept = self.rows if tally.near is None else tally.near
        if isinstance(where, slice):
            rows = kept[where.start + part.start : where.start + part.stop]
            if tally.near is None:
                return torch.sub(rows, self.shift, out=room.near[:n])
            # In a cache they are multiplied faster, by more than it takes to copy them there.
            return room.near[:n].copy_(rows) if self.copies else rows
        if tally.near is None:
            return torch.sub(kept.index_select(0, where[part]), self.shift, out=room.near[:n])
        # NumPy takes two thirds of the time of index_select.
        np.take(kept.numpy(), where[part].numpy(), 0, out=room.near[:n].numpy(), mode="clip")
        return room.near[:n]

    # -- A chunk -------------------------------------------------------------------------------

    def _room(self, rows: int, thread: int = 0) -> _Room:
        cells, d = self.codes.shape
        kind = "cpu" if self.rows.device.type == "cpu" else "other"
        least, most = CHUNK_ROWS[kind]
        size = max(least, min(most, CHUNK_NUMBERS[kind] // (cells + (d if self.copies else d // 4))))
        size = min(rows, size) if self.tally is None else size

        def room(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return self.workspace.room(f"{name} {thread}", *shape, like=self.biases, dtype=dtype)

        gathers = self.is_shifted or self.tally is not None
        memory = (
            room("scores", cells * size),
            room("least", 1 if self.is_flat else 2 * self.groups * size),
            room("hits", self.meaning.shape[1] * size),
            room("best", 3 * size),
            room("near", size, d) if gathers else self.biases,
            room("wide", size, d, dtype=torch.float64)
            if self.collect and self.tally is None
            else self.biases,
        )
        return _Room(max(1, -(-rows // -(-rows // size))), *memory)  # as many chunks, of equal size

    def _views(self, room: _Room, n: int) -> _Views:
        cells, groups, places = len(self.codes), self.groups, self.places
        scores = room.scores[: cells * n].view(cells, n)
        hits = room.hits[: self.meaning.shape[1] * n].view(-1, n)
        found = room.best[n : 3 * n].view(2, n)
        if self.is_flat:
            return _Views(
                scores, scores, scores, scores, scores, room.best[:n], hits, found, found[0], found[1]
            )
        least = room.least[: 2 * groups * n].view(-1, n)
        least[groups + places :] = FAR  # there are fewer places than groups, or as many
        return _Views(
            scores, scores.view(groups, places, n), least, least[:groups], least[groups : groups + places],
            room.best[:n], hits, found, found[0], found[1],
        )  # fmt: skip

    def _look(self, near: Tensor, views: _Views) -> None:
        """Scores of a chunk, the best with the doubt on it, and hits and their numbers."""
        if 8 * len(self.codes) <= self.codes.shape[1]:  # a product with so short a side is faster this way
            views.scores.copy_(torch.addmm(self.biases[:, 0], near, self.codes.T).T)
        else:
            torch.addmm(self.biases, self.codes, near.T, out=views.scores)
        if not self.is_flat:
            torch.amin(views.grid, 1, out=views.groups)
            torch.amin(views.grid, 0, out=views.places)
        torch.amin(views.groups, 0, out=views.best)
        torch.le(views.least, views.best.add_(self.doubt), out=views.hits)
        torch.mm(self.meaning, views.hits, out=views.found)

    def _unsure(self, hits: Tensor) -> Tensor:
        return differing(hits, torch.full_like(hits[:1], self.sole))

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


def pieces(rows: Tensor, width: int | None = None) -> Iterator[slice]:
    """Slices of the rows that are computed at once where each makes `width` numbers, D unless given."""
    numbers = PIECE_NUMBERS["cpu" if rows.device.type == "cpu" else "other"]
    return spans(len(rows), max(1, numbers // (rows.shape[1] if width is None else width)))
