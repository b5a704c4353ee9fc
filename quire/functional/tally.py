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
the bounds would leave most rows in doubt (first sweeps, structureless rows of many features), which some rows
and the way of the centres foretell, all are searched as they lie; so they are where a search takes hardly
longer than to ask.

Threads do the long operations of a search. What is left, to move the rows that have changed sides, is short
operations as a rule, at which threads of Python hold each other up: one does that.

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
# Nanoseconds that a doubtful row takes besides, to be found and to get a new limit.
EXTRA = 30.0
# Sweeps between two tries of the bounds, at most.
LONGEST_PAUSE = 16
# Of the share of doubtful rows up to which bounds pay, the part at which they are begun with: limits for all
# rows have to be worth it for some sweeps.
START = 0.7
# Rows by which it is foretold how many will be doubtful.
SAMPLE = 1000


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
        self.pause = 0
        """Sweeps since limits held."""
        # In nanoseconds: a row that is searched where it lies, and what it takes in addition to fetch it and
        # put its label back.
        self.search, self.fetch = search_time(clusters, features), features / 4 + EXTRA
        self.pays = self.search > CHEAP
        """Whether to leave a row alone can take less time than to search it."""
        self.most = self.search / (self.search + self.fetch)
        """The share of doubtful rows above which all are searched."""
        self.last = rows
        self.sample = np.arange(0, rows, max(1, rows // SAMPLE))
        self.gaps = np.zeros(len(self.sample), np.float32)
        """How far the centres of some rows could have moved when limits were last written for all."""

    def move(self, centres: Tensor, reach: float, radius: float, labels: Tensor) -> None:
        """Centres are these (K, D) now, and no farther than `reach` from where rows are within `radius`."""
        if not self.pays:
            return
        now = centres.numpy()
        path = np.zeros_like(self.drift)
        if self.centres is not None:
            moved = now - self.centres
            path = np.sqrt(np.einsum("kd,kd->k", moved, moved))
            others = np.full_like(path, path.max())
            if len(path) > 1:
                own = int(path.argmax())
                others[own] = np.delete(path, own).max()
            path = (path + others) * (1 + 1e-9)
        some = labels.numpy().take(self.sample)
        if self.live:
            self.drift += path
            self.live = self._few(self.limits.numpy().take(self.sample), self.drift.take(some), self.most)
        if not self.live:
            # Limits are written anew where, by the rows' last ones, they would serve for a sweep at least.
            self.drift[:] = 0
            self.pause = (self.pause + 1) % LONGEST_PAUSE
            self.renews = (
                self.centres is None
                or not self.pause
                or self._few(self.gaps, path.take(some), self.most * START)
            )
        self.centres = now.copy()
        # Distances that float64 itself cannot tell apart are no reason to leave a row alone.
        guard = 4e-15 * (self.features + 8) * (reach + radius)
        # Rounded up and down: what float32 leaves out must not make a row look safe.
        drift = torch.from_numpy(self.drift)
        self.levels = torch.nextafter((drift + guard).float(), torch.tensor(torch.inf))
        self.floors = (drift * (1 - 2.0**-20)).float()

    def _few(self, limits: np.ndarray, drift: np.ndarray, most: float) -> bool:
        """Whether no more than such a share of the sample is doubtful."""
        return int(np.count_nonzero(limits > drift)) >= (1 - most) * len(limits)

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
        if not self.live and self.renews:
            self.live, self.pause = True, 0
            self.gaps = self.limits.numpy().take(self.sample)


class Tally:
    """Sums of rows (N, D) by their labels, kept from one set of centres to the next.

    Rows are added as whole numbers, which add up alike in any order: a sum that rows have come to and gone
    from is the sum of those that are there, to the last bit. float64 holds them up to 2⁵³, so their unit
    leaves room for all rows; of float64's rows, what that leaves out is added apart, in units 2³⁰ times
    smaller.
    """

    def __init__(self, rows: Tensor, clusters: int, shift: Tensor, radius: float) -> None:
        self.rows, self.workspace = rows, Workspace()
        offset = float(shift.double().norm())
        self.is_shifted = rows.dtype != torch.float32 or not rows.is_contiguous() or 8 * offset > radius
        """Whether rows are searched and added with the shift taken off, or as they are."""
        if not self.is_shifted:
            shift, radius = torch.zeros_like(shift), radius + offset
        exponent = 51 - max(len(rows), 1).bit_length() - math.frexp(max(radius, 1e-300))[1]
        self.scale = 2.0 ** max(min(exponent, 1000), -1000)
        self.shift = (shift.double() * self.scale).round().numpy() / self.scale
        self.labels = torch.full((len(rows),), -1, dtype=torch.int64)
        self.signs = torch.full((len(rows),), -1.0)
        """Those of the labels, as a screen finds them."""
        self.screen: Screen | None = None
        """Of the last sweep, which the next one aims anew."""
        self.counts = np.zeros(clusters)
        self.totals = np.zeros((2 if rows.dtype == torch.float64 else 1, clusters, rows.shape[1]))
        """Sums, and those of what they leave out."""
        self.near = rows if not self.is_shifted else None
        if self.near is None and rows.numel() <= KEPT_NUMBERS:
            self.near = torch.empty(rows.shape)
        self.squares = torch.empty(len(rows))
        """4‖x‖² as they are searched, rounded up."""
        self.entered = False
        """Whether rows have labels."""
        self.bounds = Bounds(len(rows), rows.shape[1], clusters)

    def sweep(self, screen: Screen, most: int) -> tuple[Tensor, Tensor]:
        """Labels are written under the screen's centres; S_k (K, D) and n_k (K,) are given. Threads are
        `most` at the most."""
        threads = max(1, min(most, int(self.bounds.expected() / THREAD_TIME)))
        self.bounds.move(screen.centres, screen.reach, screen.radius, self.labels)
        left = list(self._blocks(len(screen.codes), threads))
        left.reverse()
        jobs = [
            partial(self._search, screen, _taken(left), thread) for thread in range(min(threads, len(left)))
        ]
        seen = [one for part in together(jobs) for one in part]
        self.bounds.judge(sum(doubtful for _, _, doubtful in seen))
        places, signs = (np.concatenate([one[i] for one in seen]) for i in range(2))
        if len(places):
            self._move(screen, places, signs, most)
        self.entered = True
        # NumPy's short operations take a third of the time of PyTorch's. Rows that are not finite make sums
        # that are not, and that is for others to say.
        with np.errstate(all="ignore"):
            sums = self.totals[0] / self.scale
            if len(self.totals) > 1:
                sums += self.totals[1] * (FINER / self.scale)
            sums += self.counts[:, None] * self.shift
        return torch.from_numpy(sums), torch.from_numpy(self.counts.copy())

    def _blocks(self, cells: int, threads: int) -> Iterator[slice]:
        """As many to each thread, if none is held up."""
        rows = max(1, BLOCK_NUMBERS // (cells + 2 * self.rows.shape[1]))
        count = -(-len(self.rows) // (rows * threads)) * threads
        return spans(len(self.rows), max(1, -(-len(self.rows) // count)))

    def _search(
        self, screen: Screen, blocks: Iterable[slice], thread: int
    ) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Of each block: numbers of the rows whose signs have changed, these signs, and how many rows were
        doubtful. Long operations alone, which threads can do side by side."""
        seen = []
        for block in blocks:
            if not self.entered and (self.is_shifted or self.bounds.pays):
                self._enter(block, screen)
            numbers = self.bounds.doubtful(block, self.labels)
            size = block.stop - block.start
            doubtful = size if numbers is None else len(numbers)
            if numbers is not None and doubtful > self.bounds.most * size:
                numbers = None
            where = block if numbers is None else numbers
            signs = screen.signs(where, thread, self.bounds.renews)
            if self.bounds.renews:
                self.bounds.write(where, screen.limits(signs, _at(self.squares, where), thread))
            changed = np.flatnonzero(signs.numpy() != _at(self.signs, where).numpy())
            places = changed + block.start if numbers is None else numbers.numpy().take(changed)
            seen.append((places, signs.numpy().take(changed), doubtful))
        return seen

    def _move(self, screen: Screen, places: np.ndarray, signs: np.ndarray, most: int) -> None:
        """Rows with these signs leave their clusters and join others; some may be told to stay by float64."""
        signs -= screen.first
        labels, joined = self.labels.numpy(), signs.astype(np.int64)
        left = labels.take(places)
        unsure = (joined.view(np.uint64) >= len(self.counts)).nonzero()[0]  # what is below zero is large
        if len(unsure):
            doubted = places.take(unsure)
            joined[unsure] = screen.settled(torch.from_numpy(doubted)).numpy()
            self.bounds.limits.numpy()[doubted] = -math.inf
        labels[places] = joined
        self.signs.numpy()[places] = joined + screen.first
        threads = max(1, min(most, int(len(places) * move_time(self.rows.shape[1]) / THREAD_TIME)))
        parts = spans(len(places), max(1, -(-len(places) // threads)))
        for moves in together([partial(self._moves, places[p], left[p], joined[p]) for p in parts]):
            self.totals += moves
        self.counts += np.bincount(joined, minlength=len(self.counts))
        if self.entered:
            self.counts -= np.bincount(left, minlength=len(self.counts))

    def _moves(self, places: np.ndarray, left: np.ndarray, joined: np.ndarray) -> np.ndarray:
        """What rows (m,) bring to the totals by changing sides."""
        moves = np.zeros(self.totals.shape)
        most = min(len(places), max(1, PIECE_NUMBERS // self.rows.shape[1]))
        taken = self.rows.new_empty(most, self.rows.shape[1])
        exact, whole = (np.empty(taken.shape) for _ in range(2))
        for part in spans(len(places), most):
            n = part.stop - part.start
            rows, wide, added = taken[:n], exact[:n], whole[:n]
            torch.index_select(self.rows, 0, torch.from_numpy(places[part]), out=rows)
            to, off = torch.from_numpy(joined[part]), torch.from_numpy(left[part])
            with np.errstate(all="ignore"):
                np.multiply(rows.numpy(), self.scale, out=wide, dtype=np.float64)
                if self.is_shifted:
                    wide -= self.shift * self.scale
                for number, total in enumerate(moves):
                    if number:
                        wide -= added
                        wide /= FINER
                    np.rint(wide, out=added)
                    sums, some = torch.from_numpy(total), torch.from_numpy(added)
                    sums.index_add_(0, to, some)
                    if self.entered:
                        sums.index_add_(0, off, some, alpha=-1)
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


def search_time(clusters: int, features: int) -> float:
    """Nanoseconds in which a core finds the nearest centre of a row, by measurement."""
    return features * clusters / 50 + (features + clusters) / 3 + 2


def move_time(features: int) -> float:
    """Nanoseconds in which a core takes a row from one sum to another, by measurement."""
    return 2.5 * features + 20


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
