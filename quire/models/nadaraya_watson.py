"""Nadaraya-Watson as a network: it remembers the training rows, and learns how far a row can be seen.

B queries, N remembered rows, D features, V width of values, h = exp(log_width) width of the kernel.

    ŷ(x) = Σ_n K(‖(x − k_n)/h‖) v_n / Σ_n K(‖(x − k_n)/h‖)

Keys k and values v are buffers that `remember` fills; until then they are drawn at random, as weights are.
The only parameter is the logarithm of h, one for all features or one for each.

A remembered row would answer for itself, the more so the narrower the kernel, so widths are learned from
`leave_one_out`: row n is answered by all others. Both ways stream, so that a step needs O((B + N)(D + V))
numbers. The boxcar's weights do not change with a small change of h: its gradient is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.functional.kernel_pooling import KERNELS, Kernel, nadaraya_watson
from quire.functional.streaming import streamed_pooling
from quire.models.mlp import check_positive_integer
from quire.models.registry import Example, model

BLOCK = 1 << 22
"""Differences of features that are held at once where the nearest row is looked for."""


@dataclass(frozen=True)
class NadarayaWatsonConfig:
    in_features: int
    out_features: int
    """Width of the values: 1 for a number, the number of classes for their shares."""
    rows: int
    """Rows that are remembered."""
    kernel: Kernel = "gaussian"
    per_feature: bool = False
    """A width for each feature instead of one for all."""
    width: float = 1.0
    """Where h begins."""

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "rows"):
            check_positive_integer(name, getattr(self, name))
        if self.kernel not in KERNELS:
            raise unknown_name("kernel", str(self.kernel), KERNELS)
        if not (math.isfinite(self.width) and self.width > 0):
            raise InputError(f"a kernel of width {self.width!r}", expected="a number > 0")


@model(
    "nadaraya-watson",
    NadarayaWatsonConfig,
    example=Example({"in_features": 3, "out_features": 2, "rows": 40, "per_feature": True}, (3,)),
)
class NadarayaWatson(nn.Module):
    """Queries (B, D) → averages (B, V) of the remembered values; where no row is in reach of a compact
    kernel, the value of the nearest."""

    keys: Tensor
    values: Tensor

    def __init__(self, config: NadarayaWatsonConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("keys", torch.randn(config.rows, config.in_features))
        self.register_buffer("values", torch.randn(config.rows, config.out_features))
        count = config.in_features if config.per_feature else 1
        self.log_width = nn.Parameter(torch.full((count,), math.log(config.width)))

    @property
    def width(self) -> Tensor:
        """h, (1,) or (D,)."""
        return self.log_width.exp()

    @torch.no_grad()
    def set_width(self, width: float) -> None:
        """The same h for all features."""
        self.log_width.fill_(math.log(width))

    @torch.no_grad()
    def remember(self, keys: Tensor, values: Tensor) -> None:
        """Take in the rows (N, D) and what they say (N, V)."""
        for name, given in (("keys", keys), ("values", values)):
            own: Tensor = getattr(self, name)
            if given.shape != own.shape:
                raise InputError(
                    f"{name} of shape {tuple(given.shape)}",
                    expected=f"{tuple(own.shape)}, as the configuration says",
                )
            own.copy_(given)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if torch.compiler.is_exporting():
            return self._held(x)
        return nadaraya_watson(x, self.keys, self.values, self.config.kernel, self.width)

    def leave_one_out(self, x: Tensor, own: Tensor) -> Tensor:
        """(B, D) → (B, V), where query b does not see the row of number own_b (B,)."""
        self._check(x)
        pooled, reached = self._among_others(x, own)
        if self.config.kernel == "gaussian" or len(self.keys) == 1 or bool(reached.all()):
            return pooled
        alone = (~reached).nonzero().squeeze(1)
        return pooled.index_copy(0, alone, self.values[self._nearest_other(x[alone], own[alone])])

    def _among_others(self, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """The averages (B, V), and whether any other row is in reach (B,). The last column of queries and
        keys is the number of a row, by which a query knows its own key."""
        numbers = torch.arange(len(self.keys), dtype=torch.float64, device=x.device)[:, None]
        queries, keys, last = x.double(), self.keys.double(), own.double()[:, None]
        if self.config.kernel == "gaussian":
            parts = _as_dot_product(queries / self.width, keys / self.width)
            query, key = torch.cat([parts[0], last], 1), torch.cat([parts[1], numbers], 1)
            value, total = streamed_pooling(_other_dot, query, key, self.values)
        else:
            query, key = torch.cat([queries, last], 1), torch.cat([keys, numbers], 1)
            score = _other_boxcar if self.config.kernel == "boxcar" else _other_epanechnikov
            value, total = streamed_pooling(
                score, query, key, self.values, (self.width.double(),), hidden=query.shape[1]
            )
        return value, total != -torch.inf

    @torch.no_grad()
    def _nearest_other(self, x: Tensor, own: Tensor) -> Tensor:
        """The number (B,) of the nearest row that is not the query's own."""
        rows, keys, found = max(1, BLOCK // self.keys.numel()), self.keys.double(), []
        for some, number in zip(x.double().split(rows), own.split(rows), strict=True):
            squared = _squared(some, keys, self.width).scatter_(1, number[:, None], torch.inf)
            found.append(squared.argmin(1))
        return torch.cat(found)

    def _held(self, x: Tensor) -> Tensor:
        """`forward` with B×N weights at once, in operations that an exported program can hold."""
        query, key, value = x.double(), self.keys.double(), self.values.double()
        if self.config.kernel == "gaussian":
            query, key = _as_dot_product(query / self.width, key / self.width)
            return ((query @ key.mT).softmax(-1) @ value).to(self.values.dtype)
        squared = _squared(query, key, self.width)
        boxcar = self.config.kernel == "boxcar"
        weights = (squared <= 1).double() if boxcar else (1 - squared).clamp(min=0)
        total = weights.sum(-1, keepdim=True)
        pooled = weights @ value / torch.where(total > 0, total, 1.0)
        return torch.where(total > 0, pooled, value[squared.argmin(-1)]).to(self.values.dtype)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.config.in_features:
            raise InputError(
                f"inputs of shape {tuple(x.shape)}", expected=f"(rows, {self.config.in_features})"
            )

    def extra_repr(self) -> str:
        return f"{self.config.kernel}, rows={self.config.rows}, per_feature={self.config.per_feature}"


# Scores of a block of queries and keys, whose last column is the number of their row -----------


def _apart(scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """−∞ where query and key are the same row."""
    return scores.masked_fill(query[:, None, -1] == key[None, :, -1], -torch.inf)


def _other_dot(query: Tensor, key: Tensor) -> Tensor:
    return _apart(query[:, :-1] @ key[:, :-1].mT, query, key)


def _other_boxcar(query: Tensor, key: Tensor, width: Tensor) -> Tensor:
    """ln K: 0 inside, −∞ outside."""
    squared = _squared(query[:, :-1], key[:, :-1], width).detach()
    return _apart(torch.zeros_like(squared).masked_fill(squared > 1, -torch.inf), query, key)


def _other_epanechnikov(query: Tensor, key: Tensor, width: Tensor) -> Tensor:
    """ln(1 − u²), −∞ where u ≥ 1, and no gradient there."""
    squared = _squared(query[:, :-1], key[:, :-1], width)
    inside = squared < 1
    logarithm = torch.where(inside, 1 - squared, 1.0).log()
    return _apart(logarithm.masked_fill(~inside, -torch.inf), query, key)


def _squared(query: Tensor, key: Tensor, width: Tensor) -> Tensor:
    """‖(q − k)/h‖² (B, N), in the order of operations of `quire.functional.nadaraya_watson`, so that both
    agree on what lies on the edge."""
    difference = query[:, None] - key[None]
    if width.numel() > 1:
        return (difference / width).square().sum(-1)
    return difference.square().sum(-1) / (width * width)


def _as_dot_product(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """(B, D + 2) and (N, D + 2) whose dot product is −½‖q − k‖², taken from the keys' mean, where it cancels
    least."""
    centre = key.detach().mean(0)
    query, key = query - centre, key - centre
    from_query = -0.5 * query.square().sum(1, keepdim=True)
    from_key = -0.5 * key.square().sum(1, keepdim=True)
    return (
        torch.cat([query, from_query, torch.ones_like(from_query)], 1),
        torch.cat([key, torch.ones_like(from_key), from_key], 1),
    )
