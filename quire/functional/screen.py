"""The search for the nearest of K centres in float32, and what float64 says where that cannot tell.

N rows, D features, K centres, n rows of a chunk; x a row, c a centre, s a shift. The scores of a chunk are
(K, n), seen as a grid of G groups of L centres.

The smallest of ‖c‖² − 2x·c is looked for in float32, with s taken off both, in chunks that stay in a core's
cache. Only two reductions touch all scores: the smallest of each group and the smallest of each place in a
group. Two centres differ in one or the other, so of these (G + L, n) numbers exactly two are as small as the
best where no other centre comes close, and their places are its number. What hits count for is added up to
one number a row, its sign: that of centre k where k alone comes close, any other where more do. (Up to 16
centres are one group, whose scores are looked at themselves.) A row for which one comes closer than rounding
can tell apart is decided again in float64, in the end by differences, the lower number winning an exact tie.
So labels are those of float64.

Few and long operations: each takes microseconds to be called at all, in which a core finds the nearest of
eight centres for a thousand rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.functional.tally import Tally, spans
from quire.functional.threads import together

# Rows and scores of a chunk, by measurement: they should lie in a core's cache, and be so many that to call
# PyTorch is not what takes the time.
CHUNK_NUMBERS = {"cpu": 2**20, "other": 2**25}
CHUNK_ROWS = {"cpu": (512, 50000), "other": (2**12, 2**22)}
# Numbers of float64 in a piece of what is computed beside the scores.
PIECE_NUMBERS = {"cpu": 2**17, "other": 2**23}
# Rows so long are copied to where they are multiplied, by measurement.
LONG_ROW = 64
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


class _Views(NamedTuple):
    """Memory for a chunk of n rows, as it is filled; made once, since each takes as long as a short
    operation."""

    scores: Tensor
    """(G·L, n)"""
    grid: Tensor
    """The same, (G, L, n)."""
    least: Tensor
    """Smallest scores, (G + L, n): of each group, then of each place. The scores themselves if they are
    few."""
    groups: Tensor
    places: Tensor
    best: Tensor
    """(n,)"""
    hits: Tensor
    """As many as `least`."""


class _Room(NamedTuple):
    """Memory for chunks, asked for once and by one thread: what a thread hands back is mapped anew."""

    scores: Tensor
    least: Tensor
    hits: Tensor
    best: Tensor
    near: Tensor
    wide: Tensor
    views: list[_Views]
    """As the last chunk filled it."""


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
        self.rows, self.shift, self.weights = rows, shift, weights
        self.tally, self.collect = tally, collect
        self.origin = shift.double()
        offset = float(self.origin.norm())
        if tally is not None:
            self.is_shifted = tally.is_shifted
        else:  # rows that lie about the origin already are taken as they are
            self.is_shifted = rows.dtype != torch.float32 or 2 * offset > _norms(centres - self.origin)
        (k, d), device = centres.shape, rows.device
        self.is_flat = k <= FEW_CENTRES
        """Whether the scores are few enough to be looked at one by one."""
        self.groups = 1 if self.is_flat else math.isqrt(k - 1) + 1
        self.places = -(-k // self.groups)
        self.copies = device.type == "cpu" and d >= LONG_ROW
        cells = self.groups * self.places
        self.codes = torch.zeros(cells, d, dtype=torch.float32, device=device)
        self.biases = torch.full((cells, 1), FAR, dtype=torch.float32, device=device)
        self._aimed = self.codes[:k], self.biases[:k, 0]  # what is left has no centre
        # What a hit counts for: the number of its group or place, and more than all these for itself.
        steps = torch.arange(max(self.groups, self.places), dtype=torch.float32, device=device)
        numbers = steps if self.is_flat else torch.cat([steps * self.places, steps[: self.places]])
        step = 2.0 ** cells.bit_length()
        self.meaning = (numbers + step)[None]
        self.first = step if self.is_flat else 2 * step
        """The sign of the first centre; those of the others follow, and none is as large as three hits'."""
        if tally is None:
            self.labels = torch.empty(len(rows), dtype=torch.int64, device=device)
        self.radius = self._radius() if radius is None else radius + (0.0 if self.is_shifted else offset)
        kind = "cpu" if device.type == "cpu" else "other"
        fewest, most = CHUNK_ROWS[kind]
        self.size = max(1, min(len(rows), max(fewest, min(most, CHUNK_NUMBERS[kind] // (cells + d)))))
        """Rows of a chunk at most."""
        self._rooms: dict[int, _Room] = {}
        self.aim(centres)

    def aim(self, centres: Tensor) -> None:
        """These (K, D) are the centres now."""
        self.centres = centres
        moved = centres.cpu().numpy()  # of short operations, NumPy's are the fastest
        if self.is_shifted:
            moved = moved - self.origin.cpu().numpy()
        squared, (codes, biases) = np.einsum("kd,kd->k", moved, moved), self._aimed
        codes.copy_(torch.from_numpy(-2 * moved))
        biases.copy_(torch.from_numpy(squared))
        self.reach = math.sqrt(max(squared.tolist()))
        # What two scores can be wrong by together, for a row of norm 1 and of norm 0.
        self.slope = 2.02 * ROUNDING * (centres.shape[1] + 8) * 2 * self.reach
        self.offset = 2.02 * ROUNDING * 8 * self.reach**2
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
        jobs = [partial(self.share, share, self._room(thread)) for thread, share in enumerate(shares)]
        found = together(jobs)
        return torch.stack([part for part, _ in found]).sum(0), torch.stack([n for _, n in found]).sum(0)

    def share(self, span: slice, room: _Room) -> tuple[Tensor, Tensor]:
        """Labels of a span, and sums and counts under them."""
        sums = self.over(span, room)
        labels, unsure = self.labels, self.unsure(self.labels[span]) + span.start
        if len(unsure):
            before, after = self._some(labels[unsure]), self.settled(unsure)
            labels[unsure] = after
            if self.collect:  # rows that change sides take their sums with them
                moved = self.rows[unsure].double()
                moved *= 1 if self.weights is None else self.weights[unsure, None]
                sums.index_add_(0, after, moved).index_add_(0, before, moved.neg_())
        if not self.collect:
            return sums, sums[:, 0]
        weights = None if self.weights is None else self.weights[span]
        return sums, torch.bincount(labels[span], weights, minlength=len(self.codes)).double()

    def over(self, span: slice, room: _Room) -> Tensor:
        """Labels of a span, none where a row is unsure, and the sums under these if they are collected."""
        cells, d = self.codes.shape
        sums = self.centres.new_zeros(cells, d)
        for place in self.chunks(span.stop, span.start):
            n = place.stop - place.start
            rows, label, views = self.rows[place], self.labels[place], self._views(room, n)
            near = rows
            if self.is_shifted:
                near = torch.sub(rows, self.shift, out=room.near[:n])
            elif self.copies:
                near = room.near[:n].copy_(rows)
            hits = self._look(near, views, views.least)
            label.copy_(torch.mm(self.meaning, hits)[0].sub_(self.first))
            if self.collect:
                if self.weights is not None:
                    rows = torch.mul(rows, self.weights[place, None], out=room.wide[:n])
                elif rows.dtype != torch.float64:
                    rows = room.wide[:n].copy_(rows)
                sums.index_add_(0, self._some(label), rows)
        return sums

    def unsure(self, labels: Tensor) -> Tensor:
        """Places (m,) of labels that are none: there a second centre comes closer than rounding could hide
        for the largest row."""
        if labels.device.type == "cpu":  # what is below zero is large without a sign
            return torch.from_numpy(np.flatnonzero(labels.numpy().view(np.uint64) >= len(self.centres)))
        return ((labels < 0) | (labels >= len(self.centres))).nonzero()[:, 0]

    def _some(self, labels: Tensor) -> Tensor:
        """Some label where there is none."""
        return labels.clamp(0, len(self.codes) - 1)

    # -- Rows of a tally -----------------------------------------------------------------------

    def signs(self, where: slice | Tensor, thread: int, limits: bool) -> Tensor:
        """Signs of a tally's rows from a place to another, or of these numbers, (m,). What their `limits`
        are made of is kept if asked for."""
        count = where.stop - where.start if isinstance(where, slice) else len(where)
        room, signs = self._room(thread), self._memory("signs", count, thread)
        if limits:
            best, second = (self._memory(name, count, thread) for name in ("first", "second"))
        for part in self.chunks(count):
            n = part.stop - part.start
            views = self._views(room, n)
            hits = self._look(self._fetch(where, part, room, n), views, views.hits if limits else views.least)
            torch.mm(self.meaning, hits, out=signs[part].unsqueeze(0))
            if limits:
                best[part] = views.best
                torch.amin(views.least.add_(views.hits, alpha=FAR), 0, out=second[part])
        return signs

    def _memory(self, name: str, count: int, thread: int) -> Tensor:
        assert self.tally is not None
        workspace, name = self.tally.workspace, f"{name} {thread}"
        most = max(count, workspace.size(name))
        return workspace.room(name, most, like=self.biases, dtype=torch.float32)[:count]

    def limits(self, signs: Tensor, squares: Tensor, thread: int) -> Tensor:
        """The drift at which each of the rows becomes doubtful whose signs a thread has found last, (m,); it
        means nothing where they are unsure."""
        assert self.tally is not None
        best, second = (self._memory(name, len(signs), thread) for name in ("first", "second"))
        # `best` has one doubt on it already, the other covers what the root is wrong by.
        root = torch.add(squares, torch.add(best, second), alpha=2).rsqrt_()
        labels = signs.sub(self.first).numpy().astype(np.intp)
        drift = torch.from_numpy(self.tally.bounds.floors.numpy().take(labels, mode="clip"))
        return drift.addcmul_(second.sub_(best).sub_(self.doubt), root, value=1 - 1e-5)

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

    def _room(self, thread: int = 0) -> _Room:
        """A thread's own, for `size` rows."""
        if thread not in self._rooms:
            (cells, d), n = self.codes.shape, self.size
            gathers = self.is_shifted or self.copies or self.tally is not None
            widens = self.collect and self.tally is None
            self._rooms[thread] = _Room(
                self._empty(cells * n),
                self._empty(0 if self.is_flat else (self.groups + self.places) * n),
                self._empty(self.meaning.shape[1] * n if self.tally is not None else 0),
                self._empty(n),
                self._empty(n if gathers else 0, d),
                self._empty(n if widens else 0, d).double(),
                [],
            )
        return self._rooms[thread]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.codes.device)

    def chunks(self, stop: int, start: int = 0) -> Iterator[slice]:
        """Rows from one place to another, in as many chunks as it takes, of equal size."""
        count = max(1, -(-(stop - start) // self.size))
        return spans(stop, max(1, -(-(stop - start) // count)), start)

    def _views(self, room: _Room, n: int) -> _Views:
        if (last := room.views) and len(last[0].best) == n:
            return last[0]
        groups, places = self.groups, self.places
        grid = room.scores[: groups * places * n].view(groups, places, n)
        scores = grid.view(-1, n)
        least = scores if self.is_flat else room.least[: (groups + places) * n].view(-1, n)
        hits = room.hits[: self.meaning.shape[1] * n].view(-1, n)  # no memory where nobody asks for limits
        views = _Views(scores, grid, least, least[:groups], least[groups:], room.best[:n], hits)
        room.views[:] = [views]
        return views

    def _look(self, near: Tensor, views: _Views, hits: Tensor) -> Tensor:
        """Scores of a chunk, the best with the doubt on it, and hits, which may take the scores' place."""
        torch.addmm(self.biases, self.codes, near.T, out=views.scores)
        if self.is_flat:
            torch.amin(views.scores, 0, out=views.best)
        else:
            torch.amin(views.grid, 1, out=views.groups)
            torch.amin(views.grid, 0, out=views.places)
            torch.amin(views.groups, 0, out=views.best)
        return torch.le(views.least, views.best.add_(self.doubt), out=hits)

    def settled(self, numbers: Tensor) -> Tensor:
        """Labels of those rows: of many, each is first asked about its own size."""
        if len(numbers) * self.centres.numel() <= FEW_NUMBERS:
            return by_differences(self.rows.index_select(0, numbers).double(), self.centres)
        labels, (codes, biases) = torch.empty_like(numbers), self._aimed
        for part in pieces(numbers, max(codes.shape)):
            rows = self.rows[numbers[part]]
            near = self._near(rows)
            scores = torch.addmm(biases[:, None], codes, near.T)
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
