"""Lloyd's algorithm over rows that stay in memory: what one search leaves to the next.

N rows, D features, K centres, m rows that are searched; x a row, c a centre, d₁ and d₂ its distances to the
nearest centre and to the next.

Most rows keep their centre from one sweep to the next, and it can be known without looking at them (Hamerly,
"Making k-means even faster", 2010; sums of movements in place of two bounds a row: Hamerly and Drake, 2015).
A centre that moves by p comes closer by at most p and goes away by at most p, so a row stays with its own for
as long as

    d₂ − d₁ > Σ_sweeps (p_own + max_others p)

One number a row is kept: the sum at which it becomes doubtful. A sweep reads that and searches the doubtful
rows only. From scores s = ‖c‖² − 2x·c in float32 that may be wrong by δ together,

    d₂ − d₁ = (d₂² − d₁²) / (d₁ + d₂) ≥ (s₂ − s₁ − δ) / √(2(s₁ + s₂ + δ) + 4‖x‖²)

so what rounding can do is taken off before a row is left alone, and labels are those of a full search. Where
the bounds leave most rows in doubt (first sweeps, structureless rows of many features), rows are searched as
they lie, and bounds are tried again after a while; where a search takes hardly longer than to ask, never.

A full search takes 2KD operations and reads 4D bytes a row; a row that is left alone takes 12 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.functional.threads import together

if TYPE_CHECKING:
    from quire.functional.screen import Screen

# Of the unit of a tally, the unit of what it leaves out.
FINER = 2.0**-30
# Rows and scores of a block, numbers: what a thread takes at a time.
BLOCK_NUMBERS = 2**24
# Numbers of float64 in a piece of rows that are added up.
PIECE_NUMBERS = 2**17
# Numbers of float32 that are kept beside the rows: 1 GiB.
KEPT_NUMBERS = 2**28
# Nanoseconds that a thread should have to do: threads that take turns at short operations hold each other up.
THREAD_TIME = 7e5
# Nanoseconds that a row may take to be searched without being asked first whether it has to be.
CHEAP = 25.0
# Sweeps between two tries of the bounds, at most.
LONGEST_PAUSE = 16


class Workspace:
    """Memory that one search leaves to the next: what is asked for anew has to be mapped page by page."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def room(self, name: str, *shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        found = self._kept.get(name)
        if found is None or found.shape != shape or found.dtype != dtype or found.device != like.device:
            found = self._kept[name] = torch.empty(shape, dtype=dtype, device=like.device)
        return found

    def size(self, name: str) -> int:
        """Numbers that are kept under a name."""
        return self._kept[name].numel() if name in self._kept else 0


class Bounds:
    """How far centres may move before a row has to be searched again."""

    def __init__(self, rows: int, features: int, clusters: int) -> None:
        self.features = features
        self.limits = torch.empty(rows, dtype=torch.float32)
        """The drift at which each row becomes doubtful."""
        self.drift = np.zeros(clusters)
        """Σ (p_own + max_others p) for the rows of each cluster."""
        self.centres: np.ndarray | None = None
        self.live = False
        """Whether the limits of all rows hold."""
        self.renews = False
        """Whether a search writes limits."""
        self.misses, self.pause = 0, 0
        # In nanoseconds: a row that is searched where it lies, and what it takes in addition to fetch it and
        # put its label back.
        self.search, self.fetch = search_time(clusters, features), features / 4 + 15
        self.pays = self.search > CHEAP
        """Whether to leave a row alone can take less time than to search it."""
        self.most = self.search / (self.search + self.fetch)
        """The share of doubtful rows above which all are searched."""
        self.last = rows

    def move(self, centres: Tensor, reach: float, radius: float) -> None:
        """Centres are these (K, D) now, and no farther than `reach` from where rows are within `radius`."""
        if not self.pays:
            return
        now = centres.numpy()
        if not self.live:
            self.renews = self.pause == 0
            self.pause = max(0, self.pause - 1)
            self.drift[:] = 0
        elif self.centres is not None:
            moved = now - self.centres
            paths = np.sqrt(np.einsum("kd,kd->k", moved, moved))
            others = np.full_like(paths, paths.max())
            if len(paths) > 1:
                own = int(paths.argmax())
                others[own] = np.delete(paths, own).max()
            self.drift += (paths + others) * (1 + 1e-9)
        self.centres = now.copy()
        # Distances that float64 itself cannot tell apart are no reason to leave a row alone.
        guard = 4e-15 * (self.features + 8) * (reach + radius)
        # Rounded up and down: what float32 leaves out must not make a row look safe.
        drift = torch.from_numpy(self.drift)
        self.levels = torch.nextafter((drift + guard).float(), torch.tensor(torch.inf))
        self.floors = (drift * (1 - 2.0**-20)).float()

    def doubtful(self, block: slice, labels: Tensor) -> Tensor | None:
        """Numbers of the rows of a block that may have changed sides; None for all."""
        if not self.live:
            return None
        own = self.levels.index_select(0, labels[block])
        # Not "limits <= own": NaN is doubtful.
        return torch.from_numpy(np.flatnonzero(~(self.limits[block].numpy() > own.numpy()))).add_(block.start)

    def write(self, where: slice | Tensor, limits: Tensor) -> None:
        if isinstance(where, slice):
            self.limits[where] = limits
        else:
            self.limits.index_copy_(0, where, limits)

    def expected(self) -> float:
        """Nanoseconds of a sweep with as many doubtful rows as the last."""
        if not self.live:
            return len(self.limits) * self.search
        return len(self.limits) + self.last * (self.search + self.fetch)

    def judge(self, doubtful: int) -> None:
        """After a sweep in which so many rows were doubtful."""
        self.last = doubtful
        if not self.live:
            self.live = self.renews
        elif doubtful <= self.most * len(self.limits):
            self.misses = 0
        else:
            self.misses += 1
            self.pause = min(2**self.misses, LONGEST_PAUSE) - 2
            self.live = self.renews = self.pause == 0


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
        self.labels = torch.full((len(rows),), -1, dtype=torch.int64, device=rows.device)
        self.signs = torch.full((len(rows),), -1.0, dtype=torch.float32, device=rows.device)
        """Those of the labels, as a screen finds them."""
        self.screen: Screen | None = None
        """Of the last sweep, which the next one aims anew."""
        # The first column counts.
        parts = 2 if rows.dtype == torch.float64 else 1
        self.totals = self.shift.new_zeros(clusters, 1 + parts * rows.shape[1])
        offset = float(shift.double().norm())
        self.is_shifted = rows.dtype != torch.float32 or not rows.is_contiguous() or 8 * offset > radius
        """Whether rows are searched with the shift taken off, or as they are."""
        self.near = rows if not self.is_shifted else None
        if self.near is None and rows.numel() <= KEPT_NUMBERS:
            self.near = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        self.squares = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        """4‖x‖² as they are searched, rounded up."""
        self.entered = False
        """Whether rows have labels."""
        self.bounds = Bounds(len(rows), rows.shape[1], clusters)

    def sweep(self, screen: Screen, threads: int) -> tuple[Tensor, Tensor]:
        """Labels are written under the screen's centres; S_k (K, D) and n_k (K,) are given."""
        self.bounds.move(screen.centres, screen.reach, screen.radius)
        left = list(self._blocks(len(screen.codes), threads))
        left.reverse()
        jobs = [
            partial(self._over, screen, _taken(left), thread) for thread in range(min(threads, len(left)))
        ]
        found = together(jobs)
        self.entered = True
        self.bounds.judge(sum(doubtful for _, doubtful in found))
        # NumPy's short operations take a third of the time of PyTorch's. Rows that are not finite make sums
        # that are not, and that is for others to say.
        totals, width = self.totals.numpy(), self.rows.shape[1]
        with np.errstate(all="ignore"):
            for moves, _ in found:
                if moves is not None:
                    totals += moves.numpy()
            counts, sums = totals[:, 0].copy(), totals[:, 1 : 1 + width] / self.scale
            if totals.shape[1] > 1 + width:
                sums += totals[:, 1 + width :] * (FINER / self.scale)
            sums += counts[:, None] * self.shift.numpy()
        return torch.from_numpy(sums), torch.from_numpy(counts)

    def _blocks(self, cells: int, threads: int) -> Iterator[slice]:
        """As many to each thread, if none is held up."""
        rows = max(1, BLOCK_NUMBERS // (cells + 2 * self.rows.shape[1]))
        count = -(-len(self.rows) // (rows * threads)) * threads
        return spans(len(self.rows), max(1, -(-len(self.rows) // count)))

    def _over(self, screen: Screen, blocks: Iterable[slice], thread: int) -> tuple[Tensor | None, int]:
        """What the rows of blocks bring to each cluster by changing sides, and how many were doubtful."""
        moves: Tensor | None = None
        doubtful = 0
        for block in blocks:
            if not self.entered:
                self._enter(block, screen)
            numbers = self.bounds.doubtful(block, self.labels)
            size = block.stop - block.start
            doubtful += size if numbers is None else len(numbers)
            if numbers is not None and len(numbers) > self.bounds.most * size:
                numbers = None
            if numbers is not None and not len(numbers):
                continue
            moves = self._search(screen, block if numbers is None else numbers, thread, moves)
        return moves, doubtful

    def _search(
        self, screen: Screen, where: slice | Tensor, thread: int, moves: Tensor | None
    ) -> Tensor | None:
        """Find the labels of rows, and add to the moves of a thread what they bring by changing sides."""
        signs = screen.signs(where, thread, self.bounds.renews)
        unsure = changed = differing(signs, _at(self.signs, where))
        if len(changed):
            places = changed + where.start if isinstance(where, slice) else where.index_select(0, changed)
            joined, unsettled = screen.read(signs.index_select(0, changed), places)
            left, unsure = self.labels.index_select(0, places), changed.index_select(0, unsettled)
            if len(unsure):
                moved = differing(joined, left)
                places, joined, left = (some.index_select(0, moved) for some in (places, joined, left))
            if moves is None:
                moves = self._room("moves", thread, *self.totals.shape).zero_()
            self._add(moves, places, left, joined, thread)
            self.labels.index_copy_(0, places, joined)
            self.signs.index_copy_(0, places, joined.float().add_(screen.first))
        if self.bounds.renews:
            limits = screen.limits(_at(self.labels, where), _at(self.squares, where), unsure, thread)
            self.bounds.write(where, limits)
        return moves

    def _enter(self, block: slice, screen: Screen) -> None:
        """Fill in what is kept beside the rows of a block."""
        for part in spans(block.stop, max(1, PIECE_NUMBERS // self.rows.shape[1]), block.start):
            near = self.rows[part]
            if self.is_shifted:
                kept = torch.empty(near.shape) if self.near is None else self.near[part]
                near = torch.sub(near, screen.shift, out=kept)
            torch.linalg.vector_norm(near, dim=1, out=self.squares[part])
        rounding = 1 + 2.0**-22 * (self.rows.shape[1] + 8)
        self.squares[block].square_().mul_(4 * rounding)

    def _room(self, name: str, thread: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return self.workspace.room(f"{name} {thread}", *shape, like=self.rows, dtype=dtype)

    def _add(self, moves: Tensor, places: Tensor, left: Tensor, joined: Tensor, thread: int) -> None:
        """Rows (m,) leave their clusters and join others."""
        width, zero = self.rows.shape[1], -self.shift * self.scale
        most = max(1, PIECE_NUMBERS // moves.shape[1])
        taken = self._room("taken", thread, most, width, dtype=self.rows.dtype)
        row, added = self._room("row", thread, most, width), self._room("added", thread, most, moves.shape[1])
        for part in spans(len(places), most):
            n = part.stop - part.start
            some, whole, wide = added[:n], added[:n, 1 : 1 + width], row[:n]
            torch.index_select(self.rows, 0, places[part], out=taken[:n])
            torch.add(zero, taken[:n], alpha=self.scale, out=wide)
            torch.round(wide, out=whole)
            some[:, 0] = 1
            if moves.shape[1] > 1 + width:
                torch.round(wide.sub_(whole).mul_(1 / FINER), out=some[:, 1 + width :])
            moves.index_add_(0, joined[part], some)
            if self.entered:
                moves.index_add_(0, left[part], some.neg_())


def search_time(clusters: int, features: int) -> float:
    """Nanoseconds in which a core finds the nearest centre of a row, by measurement."""
    return features * clusters / 50 + (features + clusters) / 3 + 2


def differing(values: Tensor, others: Tensor) -> Tensor:
    """Places where two tensors (n,) differ; on the CPU by NumPy, which takes a fifth of the time."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(values.numpy() != others.numpy()))
    return (values != others).nonzero()[:, 0]


def _at(values: Tensor, where: slice | Tensor) -> Tensor:
    return values[where] if isinstance(where, slice) else values.index_select(0, where)


def spans(total: int, size: int, first: int = 0) -> Iterator[slice]:
    """Slices of `size` that make up what lies from `first` to `total`."""
    return (slice(start, min(start + size, total)) for start in range(first, total, size))


def _taken(left: list[slice]) -> Iterator[slice]:
    """What is left, while others take from it too. (Lists are popped by one thread at a time.)"""
    while left:
        try:
            yield left.pop()
        except IndexError:  # somebody was faster
            return
