"""Lloyd's algorithm over rows in a CPU's memory, by the loops of `quire/kernels/host/nearest.cpp`.

N rows, D features, K centres; x a row, c a centre, s a shift; d₁ and d₂ a row's distances to the nearest
centre and to the next.

*Search.* The smallest of ‖c‖² − 2x·c is looked for in float32, with s taken off both. Where the next comes
closer than rounding can tell apart, given the size of the row, float64 decides by differences, the lower
number winning an exact tie. So labels are those of float64.

*Bounds.* Most rows keep their centre from one sweep to the next, and it can be known without looking at them
(Hamerly, "Making k-means even faster", 2010; sums of movements in place of two bounds a row: Hamerly and
Drake, 2015). A centre that moves by p comes closer by at most p and goes away by at most p, so a row stays
with its own for as long as

    d₂ − d₁ > Σ_sweeps (p_own + max_others p)

One number a row is kept: the sum at which it becomes doubtful. A sweep reads that and searches the doubtful
rows only. From scores in float32 that may be wrong by δ together,

    d₂ − d₁ = (d₂² − d₁²) / (d₁ + d₂) ≥ (s₂ − s₁ − δ) / √(2(s₁ + s₂ + δ) + 4‖x‖²)

so what rounding can do is taken off before a row is left alone, and labels are those of a full search.

*Sums.* Rows are added as whole numbers, which add up alike in any order: a sum that rows have come to and
gone from is the sum of those that are there, to the last bit. float64 holds them up to 2⁵³, so their unit
leaves room for all rows; of float64's rows, what that leaves out is added apart, in units 2³⁰ times smaller.

A full search takes 2KD operations and reads each row once; a row that is left alone takes 12 bytes.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.functional.threads import together
from quire.kernels import host

# Nanoseconds that a thread should have to do.
THREAD_TIME = 1.5e5
# Numbers of float32 that are kept beside rows of float64, which take twice as long to read: 1 GiB.
KEPT_NUMBERS = 2**28
# Numbers of float64 for what threads add to sums, each apart: 256 MiB.
MOVED_NUMBERS = 2**25


class _Sweep(ctypes.Structure):
    """`Sweep` of nearest.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "features", "clusters")),
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("wide", "stride")),
        *((name, ctypes.c_void_p) for name in ("weights", "shift", "origin", "kept", "centres", "before")),
        *((name, ctypes.c_void_p) for name in ("drift", "codes", "biases", "labels", "limits", "moves")),
        *((name, ctypes.c_void_p) for name in ("gains", "totals", "counts", "sums")),
        *((name, ctypes.c_double) for name in ("scale", "slope", "offset")),
        *((name, ctypes.c_int64) for name in ("levels", "threads", "swept", "entered")),
        *((name, ctypes.c_int64) for name in ("searched", "decided")),
    ]


def takes(rows: Tensor, centres: Tensor) -> bool:
    """Whether these rows (N, D) can be searched by loops of a CPU."""
    return host.takes(rows) and centres.device.type == "cpu" and rows.shape[1] > 0


class Tally:
    """Labels of rows (N, D) and sums under them, kept from one set of centres to the next.

    With a `radius`, max ‖x − shift‖ or more, each search starts from what the last one found; without one,
    each is a search of its own, whose rows may be weighed, or which may be after `labels` alone.
    """

    def __init__(
        self,
        rows: Tensor,
        clusters: int,
        shift: Tensor,
        radius: float | None = None,
        *,
        weights: Tensor | None = None,
        collect: bool = True,
    ) -> None:
        count, features = rows.shape
        self.rows, self.collect = rows, collect
        wide, keeps = rows.dtype == torch.float64, radius is not None
        offset = shift.detach().double().contiguous().numpy()
        scale = 0.0
        if radius is not None:
            exponent = 51 - max(count, 1).bit_length() - math.frexp(max(radius, 1e-300))[1]
            scale = 2.0 ** max(min(exponent, 1000), -1000)
            with np.errstate(all="ignore"):  # rows that are not finite have a shift that is not
                offset = np.rint(offset * scale) / scale
        levels, kept = 2 if wide and keeps else 1, wide and keeps and rows.numel() <= KEPT_NUMBERS
        self.most = max(1, min(torch.get_num_threads(), MOVED_NUMBERS // (levels * clusters * features)))
        library: Any = host.library()
        self._library, padded = library, library.quire_padded(clusters)
        self.labels = torch.empty(count, dtype=torch.int64)
        self.counts, self.sums = np.zeros(clusters), np.zeros((clusters, features))
        own = host.as_rows(rows)
        self._kept: dict[str, Tensor | np.ndarray | None] = {
            "rows": own,
            "weights": weights,
            "shift": offset,
            "origin": np.zeros(features, np.float32) if wide else offset.astype(np.float32),
            "kept": np.empty(rows.shape, np.float32) if kept else None,
            "before": np.zeros((clusters, features)),
            "drift": np.zeros(clusters),
            "codes": np.zeros((padded, features), np.float32),
            "biases": np.zeros(padded, np.float32),
            "labels": self.labels,
            "limits": np.empty(count, np.float32) if keeps else None,
            "moves": np.zeros((self.most, levels, clusters, features)) if collect else None,
            "gains": np.zeros((self.most, clusters)),
            "totals": np.zeros((levels, clusters, features)),
            "counts": self.counts,
            "sums": self.sums,
        }
        self._sweep = _Sweep(
            count=count, features=features, clusters=clusters, wide=wide, stride=own.stride(0), scale=scale,
            levels=levels, **{name: _address(values) for name, values in self._kept.items()},
        )  # fmt: skip
        self._place = ctypes.addressof(self._sweep)
        self.search_time = search_time(clusters, features)
        self.searched, self.decided = count, 0
        """Rows of the last sweep that were searched, and those of them that float64 had to decide."""

    def sweep(self, centres: Tensor) -> tuple[Tensor, Tensor]:
        """Labels are written under these centres (K, D), float64; S_k (K, D) and n_k (K,) are given."""
        centres = centres.contiguous()
        work = len(self.rows) + self.searched * self.search_time
        threads = max(1, min(self.most, int(work / THREAD_TIME)))
        self._sweep.centres, self._sweep.threads = centres.data_ptr(), threads
        self._library.quire_aim(self._place)
        if any(together([partial(self._share, thread) for thread in range(threads)])):
            raise MemoryError(f"no room for {threads} times 16 rows of {centres.shape[1]} features")
        self.searched, self.decided = self._sweep.searched, self._sweep.decided
        if not self.collect:
            return centres.new_zeros(0), centres.new_zeros(0)
        self._library.quire_total(self._place)
        return torch.from_numpy(self.sums.copy()), torch.from_numpy(self.counts.copy())

    def _share(self, thread: int) -> int:
        return int(self._library.quire_sweep(self._place, thread))


def power_sums(rows: Tensor, weights: Tensor | None, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Σ x, Σ x², Σ w‖x‖² and Σ w of rows (N, D) less the shift, (2D + 2,), and the largest ‖x‖²."""
    rows = host.as_rows(rows)
    weights = None if weights is None else weights.double().contiguous()
    found, (count, features) = shift.new_zeros(2 * len(shift) + 3), rows.shape
    library: Any = host.library()
    library.quire_survey(
        rows.data_ptr(), rows.dtype == torch.float64, count, features, rows.stride(0), _address(weights),
        shift.data_ptr(), found.data_ptr(),
    )  # fmt: skip
    return found[:-1], found[-1]


def _address(values: Tensor | np.ndarray | None) -> int | None:
    if values is None:
        return None
    return values.data_ptr() if isinstance(values, Tensor) else values.ctypes.data


def search_time(clusters: int, features: int) -> float:
    """Nanoseconds in which a core finds the nearest centre of a row, by measurement."""
    return clusters * features / 50 + clusters / 9 + features / 2 + 3
