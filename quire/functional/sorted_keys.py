"""Boxcar and Epanechnikov pooling of one-dimensional keys: exact sums in O((N + M) log M).

B batch, N queries, M keys, V width of values, W = V + 1 columns: the weighted values, then the weights.

Sorted, the keys in reach of a query are a range [l, r), whose ends are found by halving with the very
comparison that the direct sum makes, so that keys on the edge fall on the same side. A binary tree over the
sorted keys holds, for each node,

    S_0 = Σ v,   S_1 = Σ (k − c) v,   S_2 = Σ (k − c)² v      with c a point amidst the node's own keys,

and with r = q − c a node inside the range adds

    Σ (1 − (q − k)²/h²) v = (1 − r²/h²) S_0 + (2 r S_1 − S_2)/h².

A range is at most 2 log₂ M whole nodes. Differences of prefix sums would do with two, but they lose what is
small beside everything to its left; here sums are only added, about origins that are near, so the
error is that of the direct sum. All of it is differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels import refusal


class SortedPooling(NamedTuple):
    """The averages (…, N, V), whether any key was in reach (…, N), and the number of the nearest key (…, N).

    Without a key in reach the average is 0. Of keys equally near, the first is the nearest.
    """

    pooled: Tensor
    reached: Tensor
    nearest: Tensor


def sorted_pooling(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: str,
    width: float | Tensor,
    *,
    weights: Tensor | None = None,
    exclude_self: bool = False,
) -> SortedPooling:
    """Σ s K(|q − k|/h) v / Σ s K(|q − k|/h) for (…, N), (…, M), (…, M, V), computed in float64.

    With `exclude_self`, query n is key n and is answered by the others.
    """
    batch = torch.broadcast_shapes(query.shape[:-1], key.shape[:-1], value.shape[:-2])
    rows = batch.numel()  # 1 where there is no batch
    q = query.double().expand(*batch, -1).reshape(rows, query.shape[-1])
    k = key.double().expand(*batch, -1).reshape(rows, key.shape[-1])
    v = value.double().expand(*batch, -1, -1).reshape(rows, *value.shape[-2:])
    s = torch.ones_like(k) if weights is None else weights.double().expand(*batch, -1).reshape(k.shape)
    h = torch.as_tensor(width, dtype=torch.float64, device=k.device).reshape(())

    # Queries in their order as well: what neighbours look up lies side by side.
    asked = q.detach().argsort(dim=-1, stable=True)
    q = q.gather(1, asked)
    order = k.detach().argsort(dim=-1, stable=True)
    k, s = k.gather(1, order), s.gather(1, order)
    columns = torch.cat([v.gather(1, order[..., None].expand_as(v)) * s[..., None], s[..., None]], -1)
    left, right = _reach(q.detach(), k.detach(), h.detach(), kernel)
    ranges = [(left, right)]
    if exclude_self:
        rank = order.argsort(-1).gather(1, asked)
        ranges = [(left, rank), (rank + 1, right)]
    sums = _sum_ranges(q, k, columns, h, kernel, ranges)
    total = sums[..., -1:]
    reached = total > 0
    pooled = torch.where(reached, sums[..., :-1] / torch.where(reached, total, 1.0), 0.0)
    nearest = _nearest(q.detach(), k.detach(), order, rank if exclude_self else None)
    place = asked.argsort(-1)
    pooled = pooled.gather(1, place[..., None].expand_as(pooled))
    reached, nearest = reached[..., 0].gather(1, place), nearest.gather(1, place)
    return SortedPooling(
        pooled.to(value.dtype).reshape(*batch, *pooled.shape[1:]),
        reached.reshape(*batch, q.shape[1]),
        nearest.reshape(*batch, q.shape[1]),
    )


def _reach(query: Tensor, key: Tensor, width: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    """The range [l, r) of sorted keys that have a weight, for each query: (B, N), (B, N)."""

    def outside(k: Tensor) -> Tensor:
        # As the direct sum computes it. Each step rounds, but none of them changes the order of distances.
        squared = (query - k).square() / (width * width)
        return squared > 1 if kernel == "boxcar" else 1 - squared <= 0

    left = _count_true(lambda k: (k < query) & outside(k), *_around(query - width, query, key, width), key)
    right = _count_true(lambda k: (k <= query) | ~outside(k), *_around(query + width, query, key, width), key)
    return left, right


def _around(edge: Tensor, query: Tensor, key: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds (B, N) on how many sorted keys lie before an edge of the reach, whatever was rounded."""
    slack = (query.abs() + width) * 2.0**-48
    low = torch.searchsorted(key, edge - slack)
    high = torch.searchsorted(key, edge + slack, right=True)
    # What is not a number stands after all keys: nothing is known then.
    return torch.where((edge - slack).isnan(), 0, low), high


def _count_true(test: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, key: Tensor) -> Tensor:
    """How many of the sorted keys pass a test that the first ones pass and the others do not, with bounds
    that are known already: (B, N)."""
    most = int((high - low).max()) if low.numel() else 0
    for _ in range(most.bit_length()):
        middle = (low + high) // 2
        searching = low < high
        passed = searching & test(key.gather(1, middle.clamp(max=key.shape[1] - 1)))
        low = torch.where(passed, middle + 1, low)
        high = torch.where(searching & ~passed, middle, high)
    return low


class _Level(NamedTuple):
    """The nodes of one height of the tree: their points c (B, n), and S_0, S_1, S_2 (B, n, W)."""

    centre: Tensor
    zeroth: Tensor
    first: Tensor
    second: Tensor

    def parents(self) -> _Level:
        """Pairs of nodes as one. With δ = c_child − c_parent: S_1 + δ S_0, S_2 + 2δ S_1 + δ² S_0."""
        padded = self
        if self.centre.shape[1] % 2:  # a last node without a partner gets an empty one at its own place
            padded = _Level(
                torch.cat([self.centre, self.centre[:, -1:]], 1),
                *(torch.cat([part, torch.zeros_like(part[:, -1:])], 1) for part in self[1:]),
            )
        pairs = padded.centre.unflatten(1, (-1, 2))
        centre = pairs[..., 0] + (pairs[..., 1] - pairs[..., 0]) / 2
        shift = (pairs - centre[..., None])[..., None]
        zeroth, first, second = (part.unflatten(1, (-1, 2)) for part in padded[1:])
        return _Level(
            centre,
            zeroth.sum(2),
            (first + shift * zeroth).sum(2),
            (second + shift * (2 * first + shift * zeroth)).sum(2),
        )

    def sums(self, node: Tensor, query: Tensor, width: Tensor, kernel: str) -> Tensor:
        """Σ K v over the keys of these nodes (B, N), which all lie in reach: (B, N, W)."""
        wide = node[..., None].expand(-1, -1, self.zeroth.shape[-1])
        zeroth = self.zeroth.gather(1, wide)
        if kernel == "boxcar":
            return zeroth
        distance = (query - self.centre.gather(1, node))[..., None]
        moments = 2 * distance * self.first.gather(1, wide) - self.second.gather(1, wide)
        square = width * width
        return (1 - distance.square() / square) * zeroth + moments / square


def _sum_ranges(
    query: Tensor,
    key: Tensor,
    columns: Tensor,
    width: Tensor,
    kernel: str,
    ranges: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Σ K v over ranges of sorted keys (B, N, W): from the leaves up, whole nodes are taken off both ends."""
    total = columns.new_zeros(*query.shape, columns.shape[-1])
    if not key.shape[1] or not query.shape[1]:
        return total
    empty = torch.zeros_like(columns)
    level = _Level(key, columns, empty, empty)
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, columns, width))
    if not learned and not refusal(key.new_empty(0, dtype=torch.float32)):
        return _climb(query, level, width, kernel, ranges)
    while True:
        last = level.centre.shape[1] - 1
        remaining = []
        for start, stop in ranges:
            at_start = (start < stop) & (start % 2 == 1)
            total = total + _where(at_start, level.sums(start.clamp(max=last), query, width, kernel))
            start = (start + 1) // 2
            at_stop = (2 * start < stop) & (stop % 2 == 1)
            total = total + _where(at_stop, level.sums((stop - 1).clamp(0, last), query, width, kernel))
            remaining.append((start, stop // 2))
        ranges = remaining
        if not last or not any(bool((start < stop).any()) for start, stop in ranges):
            return total
        level = level.parents()


def _climb(
    query: Tensor, level: _Level, width: Tensor, kernel: str, ranges: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """The same by a Triton kernel, which has no gradient."""
    from quire.kernels.ranges import sum_ranges

    levels = [level]
    # No range is longer than the longest, so there is no need of nodes that hold more.
    longest = max(int((stop - start).max()) for start, stop in ranges)
    while len(levels) <= longest.bit_length() and levels[-1].centre.shape[1] > 1:
        levels.append(levels[-1].parents())
    moments = kernel != "boxcar"
    parts = list(zip(*levels, strict=True))
    tree = [torch.cat(part, 1) for part in (parts if moments else parts[:2])]
    tree += tree[1:] * (not moments) * 2
    keys, square = level.centre.shape[1], width * width
    found = [sum_ranges(query, *ends, square, tree, keys, len(levels), moments=moments) for ends in ranges]
    return found[0] if len(found) == 1 else found[0] + found[1]


def _where(chosen: Tensor, sums: Tensor) -> Tensor:
    return torch.where(chosen[..., None], sums, 0.0)


def _nearest(query: Tensor, key: Tensor, order: Tensor, rank: Tensor | None) -> Tensor:
    """The number of the nearest of the sorted keys, the first of equals; a query's own key is passed over."""
    last = key.shape[1] - 1
    if last < 0:
        return torch.zeros(query.shape, dtype=torch.int64, device=query.device)
    if rank is None:
        above = torch.searchsorted(key, query.contiguous())
        below = above - 1
    else:
        below, above = rank - 1, rank + 1
    found = []
    for place in (below, above):
        near = key.gather(1, place.clamp(0, last))
        first = torch.searchsorted(key, near)  # of equal keys, the one that was given first
        first = first if rank is None else torch.where(first == rank, place.clamp(0, last), first)
        there = (place >= 0) & (place <= last)
        distance = torch.where(there, (query - near).abs(), torch.inf)
        found.append((distance, order.gather(1, first)))
    (low, low_number), (high, high_number) = found
    take_low = (low < high) | ((low == high) & (low_number < high_number))
    return torch.where(take_low, low_number, high_number)
