"""Chapter 16: positions, against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.functional.position import (
    concatenate_project,
    frequencies,
    relative_dot_product,
    shift_matrix,
    sinusoidal,
)
from quire.nn.position import LearnedPosition, SinusoidalPosition
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _picture() -> Figure:
    from quire.report.style import figure

    table = sinusoidal(96, 32, 1000.0)
    fig = figure(9.4, 3.4)
    waves, similar = fig.subplots(1, 2)
    image = waves.imshow(table.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
    waves.set(title="sinusoidal positions", xlabel="part of r_n", ylabel="place n")
    fig.colorbar(image, ax=waves)
    image = similar.imshow((table @ table.mT / 16).numpy(), cmap="RdBu", vmin=-1, vmax=1)
    similar.set(title="similarity r_n·r_m / (E/2)", xlabel="place m", ylabel="place n")
    fig.colorbar(image, ax=similar)
    return fig


def _half_exponent(positions: int | Tensor, size: int, base: float = 10_000.0, **options: Any) -> Tensor:
    """base^(−i/E), which forgets that there are two parts to a wave."""
    places = torch.arange(positions) if isinstance(positions, int) else positions
    angles = places.double()[..., None] * base ** (-torch.arange(size // 2, dtype=torch.float64) / size)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


class _FromOne(SinusoidalPosition):
    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        return super().forward(x, offset + 1)


@entry(
    "position/sinusoidal",
    "Sinusoidal positions",
    r"r_{n,2i} = \sin(w_i n), \quad r_{n,2i+1} = \cos(w_i n), \quad w_i = 10000^{-2i/E}; \qquad "
    r"|r_{n,j}| \le 1, \quad r_n \ne r_m \text{ for } n \ne m",
    code=(sinusoidal, SinusoidalPosition),
    wrong=(_half_exponent, _FromOne),
    tolerance=1e-9,
    picture=_picture,
)
def _sinusoidal(waves: Code, layer: Code) -> float:
    size = 6
    places = [0, 1, 2, 17, 4095, 10**6]  # any length: nothing ends
    wanted = []
    for n in places:
        angles = [n / 10_000 ** (2 * i / size) for i in range(size // 2)]
        wanted.append([part for angle in angles for part in (math.sin(angle), math.cos(angle))])
    got = waves(torch.tensor(places), size, dtype=torch.float64)
    table = waves(2000, 8, dtype=torch.float64)
    distances = torch.cdist(table, table).fill_diagonal_(torch.inf)
    x = _random(2, 5, size)
    added = layer(size).double()(x, offset=3) - x
    return worst(
        gap(got, torch.tensor(wanted, dtype=torch.float64)),
        require(bool((table.abs() <= 1).all())),
        require(float(distances.min()) > 0.1),
        gap(added, sinusoidal(torch.arange(3, 8), size, dtype=torch.float64).expand(2, -1, -1)),
    )


class _FirstRow(LearnedPosition):
    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        return x + self.weight[offset]


@entry(
    "position/learned",
    "Learned positions",
    r"z_n = x_n + R_n, \quad R \in \mathbb R^{T_{\max} \times E}",
    code=LearnedPosition,
    wrong=_FirstRow,
    tolerance=1e-12,
)
def _learned(build: Code) -> float:
    layer, peer = build(9, 4).double(), nn.Embedding(9, 4).double()
    layer.load_state_dict(peer.state_dict())
    x = _random(3, 5, 4)
    out = layer(x, offset=2)
    factors = _random(3, 5, 4)
    (slope,) = torch.autograd.grad((out * factors).sum(), layer.weight)
    (wanted,) = torch.autograd.grad(((x + peer(torch.arange(2, 7))) * factors).sum(), peer.weight)
    return worst(gap(out, x + peer.weight[2:7]), gap(slope, wanted))


@entry(
    "position/relative-dot-product",
    "The dot product knows the distance alone",
    r"r_n^\top r_m = \sum_i \cos(w_i (n - m))",
    code=(relative_dot_product, sinusoidal),
    wrong=(
        lambda distance, size, base=10_000.0: (distance[..., None] * frequencies(size, base)).sin().sum(-1),
        _half_exponent,
    ),
    tolerance=1e-10,
)
def _relative(closed_form: Code, waves: Code) -> float:
    errors = []
    for size, base in ((8, 10_000.0), (6, 100.0)):
        for shift in (0, 1000):
            places = torch.arange(shift, shift + 20)
            table = waves(places, size, base, dtype=torch.float64)
            wanted = torch.zeros(20, 20, dtype=torch.float64)
            for n in range(20):
                for m in range(20):
                    wanted[n, m] = sum(math.cos(base ** (-2 * i / size) * (n - m)) for i in range(size // 2))
            distances = places[:, None] - places
            errors += [gap(table @ table.mT, wanted), gap(closed_form(distances, size, base), wanted)]
    return worst(*errors)


@entry(
    "position/shift-matrix",
    "A shift is one rotation for all places",
    r"r_{n+k} = M_k r_n, \quad M_k = \bigoplus_i \begin{pmatrix} \cos w_i k & \sin w_i k \\ "
    r"-\sin w_i k & \cos w_i k \end{pmatrix} \text{ free of } n",
    code=shift_matrix,
    wrong=lambda shift, size, base=10_000.0: shift_matrix(shift, size, base).mT,
    tolerance=1e-9,
)
def _shift(build: Code) -> float:
    errors = []
    size = 8
    places = torch.cat([torch.arange(12), torch.tensor([500, 77_777])])
    table = sinusoidal(places, size, dtype=torch.float64)
    for k in (1, 5, 300, -2):
        matrix = build(k, size)
        moved = sinusoidal(places + k, size, dtype=torch.float64)
        errors += [gap(table @ matrix.mT, moved), gap(matrix @ matrix.mT, torch.eye(size))]
    return worst(*errors, gap(build(2, size) @ build(3, size), build(5, size)))


@entry(
    "position/concatenate-project",
    "Concatenating and projecting is adding projections",
    r"W \begin{pmatrix} x_n \\ r_n \end{pmatrix} = W_x x_n + W_r r_n, \quad W = (W_x \; W_r)",
    code=concatenate_project,
    wrong=lambda x, position, weight: (x + position) @ weight[:, : x.shape[-1]].mT,
    tolerance=1e-12,
)
def _concatenate(project: Code) -> float:
    x, weight = _random(2, 5, 6), _random(3, 12)
    position = sinusoidal(5, 6, dtype=torch.float64)
    wanted = torch.zeros(2, 5, 3, dtype=torch.float64)
    for b in range(2):
        for n in range(5):
            both = [*x[b, n].tolist(), *position[n].tolist()]
            for o in range(3):
                wanted[b, n, o] = sum(w * z for w, z in zip(weight[o].tolist(), both, strict=True))
    return gap(project(x, position, weight), wanted)
