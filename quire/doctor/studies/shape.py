"""What kind of function a trained network is: into how many linear pieces it cuts its inputs, and what it
makes of inputs that are moved, mirrored, turned or put into another order.

N rows, D numbers of a row, L layers of a chain, H×W pixels, T places of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.doctor.pictures import new_axes
from quire.doctor.studies.refit import Study
from quire.errors import InputError
from quire.functional.geometry import equivariance_error
from quire.functional.modes import evaluating
from quire.functional.regions import PlaneRegion, line_regions, plane_regions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_WEIGHTS = 2**26
"""Of one layer written out as a matrix."""
MOST_PIECES = 60
"""Of a line on average, up to which a plane is looked at: it has some squares of that number."""
AFFINE = (
    nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Flatten, nn.Unflatten,
    nn.Identity, nn.Sequential, nn.modules.dropout._DropoutNd, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.ZeroPad2d,
)  # fmt: skip
"""Layers that are W·x + b in evaluation; of `nn.Sequential` the empty one, which leaves its input."""


# Linear regions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A network as ReLU layers: weights (D_l, D_{l−1}) and biases (D_l,), the last without a ReLU."""

    weights: list[Tensor]
    biases: list[Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        z = rows.flatten(1).double()
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            z = torch.relu(z @ weight.T + bias)
        return z @ self.weights[-1].T + self.biases[-1]

    @property
    def units(self) -> int:
        """Hidden ones, each of which can bend the function."""
        return sum(len(bias) for bias in self.biases[:-1])


@torch.no_grad()
def relu_chain(model: nn.Module, rows: Tensor) -> Chain:
    """The network written out as ReLU layers, if that is what it computes on `rows`: dense, convolutional,
    averaging and batch-norm layers between ReLUs are each one matrix in evaluation.

    InputError names the layer that is none of these; a network whose layers meet in another way than one
    after the other (residual, attention) is found by its outputs, which the chain does not give.
    """
    calls: list[tuple[str, nn.Module, tuple[int, ...]]] = []
    watches = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):

            def note(module: nn.Module, given: Any, output: Any, name: str = name) -> None:
                calls.append((name, module, tuple(given[0].shape[1:])))

            watches.append(module.register_forward_hook(note))
    try:
        with evaluating(model):
            truth = model(rows)
            calls = calls[:]
    finally:
        for watch in watches:
            watch.remove()
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    weight: Tensor | None = None
    bias: Tensor | None = None
    for name, module, shape in calls:
        if isinstance(module, nn.ReLU):
            if weight is None or bias is None:
                raise _no_chain(f"a ReLU ({name}) before the first layer with weights")
            weights.append(weight)
            biases.append(bias)
            weight = bias = None
            continue
        if not isinstance(module, AFFINE):
            raise _no_chain(f"the layer {name or 'model'} ({type(module).__name__})")
        matrix, offset = _matrix(module, shape, name, rows.device)
        if weight is None or bias is None:
            weight, bias = matrix, offset
        else:
            weight, bias = matrix @ weight, matrix @ bias + offset
    if weight is None or bias is None:
        raise _no_chain("a network that ends with a ReLU, or without layers")
    chain = Chain([*weights, weight], [*biases, bias])
    found = chain(rows) if chain.weights[0].shape[1] == rows[0].numel() else None
    if not isinstance(truth, Tensor) or found is None or found.shape != truth.flatten(1).shape:
        raise _no_chain("a network whose layers do not follow each other")
    if not torch.allclose(found, truth.flatten(1).double(), rtol=1e-3, atol=1e-4 * float(truth.abs().max())):
        raise _no_chain("a network whose layers do not follow each other (their chain has other outputs)")
    return chain


def _matrix(
    module: nn.Module, shape: tuple[int, ...], name: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """W and b of a layer in float64, from what it makes of zero and of the unit vectors."""
    size = torch.Size(shape).numel()
    own = next(module.parameters(), torch.empty(0)).dtype
    with evaluating(module):
        offset = module(torch.zeros(1, *shape, dtype=own, device=device)).flatten()
        if len(offset) * size > MOST_WEIGHTS:
            raise InputError(
                f"the layer {name} as a matrix of {len(offset):,} × {size:,}",
                expected=f"at most {MOST_WEIGHTS:,} numbers",
                fix="study a network for smaller inputs",
            )
        units = torch.eye(size, dtype=own, device=device).view(size, *shape)
        columns = torch.cat([module(part).flatten(1) for part in units.split(256)])
    if isinstance(module, nn.Linear):  # as it is, without what rounding made of a difference
        return module.weight.double(), offset.double()
    return (columns.double() - offset.double()).T.contiguous(), offset.double()


def _no_chain(what: str) -> InputError:
    return InputError(
        f"linear regions of {what}",
        expected="layers one after the other, each linear or a ReLU, as in an MLP",
        fix="study a run of 'mlp' with --model.activation relu",
    )


@dataclass(frozen=True)
class Regions(Study):
    """How often a network bends between rows of its data."""

    lines: list[int]
    """Linear pieces on the segment between two rows, of each pair."""
    units: int
    plane: int | None
    """Pieces on the triangle's plane of three rows; None where they were not counted."""
    polygons: tuple[PlaneRegion, ...] = ()

    @property
    def mean(self) -> float:
        return sum(self.lines) / len(self.lines)

    @property
    def verdict(self) -> str:
        found = (
            f"Between two rows the network has {self.mean:.3g} linear pieces on average ({min(self.lines)} "
            f"to {max(self.lines)} over {len(self.lines)} pairs), with {self.units:,} hidden units"
        )
        if self.plane is not None:
            found += f"; around three rows a plane is cut into {self.plane:,}"
        if max(self.lines) == 1:
            return f"{found}: it is linear there, as a network without hidden layers would be."
        return f"{found}."

    @property
    def table(self) -> tuple[list[str], list[list[object]]]:
        order = sorted(self.lines)
        middle = order[len(order) // 2]
        return ["pairs", "fewest", "middle", "mean", "most", "hidden units", "in a plane"], [
            [len(order), order[0], middle, self.mean, order[-1], self.units, self.plane]
        ]

    @property
    def numbers(self) -> dict[str, Any]:
        return {"lines": self.lines, "mean": self.mean, "units": self.units, "plane": self.plane}

    def figure(self) -> Figure:
        """The pieces of a plane through three rows, or how many pieces lines have."""
        from matplotlib.collections import PolyCollection

        size = (5.4, 4.6)
        if not self.polygons:
            picture, axes = new_axes("Linear pieces between two rows", "pieces", "pairs of rows", size)
            axes.hist(self.lines, bins=min(20, 1 + max(self.lines) - min(self.lines)))
            return picture
        names = ("towards the second row", "towards the third row")
        picture, axes = new_axes(f"{self.plane:,} linear regions", *names, size)
        colours = torch.tensor([region.gradient.norm() for region in self.polygons])
        pieces = PolyCollection(
            [region.polygon.numpy() for region in self.polygons], array=colours.numpy(), edgecolors="white",
            linewidths=0.3,
        )  # fmt: skip
        axes.add_collection(pieces)
        corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        axes.plot(corners[:, 0].tolist(), corners[:, 1].tolist(), "o", color="tab:red", label="rows")
        axes.autoscale_view()
        picture.colorbar(pieces, ax=axes, label="slope of the outputs")
        axes.legend()
        return picture


def linear_regions(model: nn.Module, rows: Tensor, *, pairs: int = 50, seed: int = 0) -> Regions:
    """Count the linear pieces of a piecewise linear network, exactly, on the segments between `pairs` random
    pairs of rows, and on the plane through three of them, a little beyond the three."""
    if len(rows) < 3:
        raise InputError(f"{len(rows)} rows", expected="at least 3, to draw lines and a plane between")
    chain = relu_chain(model, rows[:8])
    flat = rows.flatten(1).double()
    generator = torch.Generator().manual_seed(seed)
    counts = []
    for _ in range(pairs):
        start, end = torch.randperm(len(rows), generator=generator)[:2].tolist()
        counts.append(len(line_regions(chain.weights, chain.biases, flat[start], flat[end])))
    if sum(counts) > MOST_PIECES * pairs:
        return Regions(counts, chain.units, None)
    one, two, three = flat[torch.randperm(len(rows), generator=generator)[:3].to(flat.device)].cpu()
    plane = plane_regions(
        [w.cpu() for w in chain.weights], [b.cpu() for b in chain.biases],
        origin=one, axes=torch.stack([two - one, three - one]), u=(-0.25, 1.25), v=(-0.25, 1.25),
    )  # fmt: skip
    return Regions(counts, chain.units, len(plane), tuple(plane))


# Equivariance -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equivariance(Study):
    """What a network makes of changed inputs, by change: how far its outputs are from those of the unchanged
    inputs (or from these, changed alike, where outputs have places), and how many answers stay."""

    error: dict[str, float]
    """max |f(Tx) − T f(x)| / max |T f(x)|."""
    same: dict[str, float]
    """Share of rows whose largest output stays the same; only of outputs without places."""
    rows: int

    @property
    def verdict(self) -> str:
        kept = [name for name, error in self.error.items() if error < 1e-3]
        lost = [name for name in self.error if name not in kept]
        parts = [f"follows {', '.join(kept)}"] if kept else []
        for name in lost:
            stay = f", {self.same[name]:.0%} of the answers stay" if name in self.same else ""
            parts.append(f"does not follow {name} (relative error {self.error[name]:.3g}{stay})")
        return f"On {self.rows:,} rows the network {'; '.join(parts)}."

    @property
    def table(self) -> tuple[list[str], list[list[object]]]:
        return ["change", "error", "answers that stay"], [
            [name, error, self.same.get(name)] for name, error in self.error.items()
        ]

    @property
    def numbers(self) -> dict[str, Any]:
        return {"error": self.error, "same": self.same, "rows": self.rows}

    def figure(self) -> Figure:
        label = "relative error (0: unmoved)"
        picture, axes = new_axes("Outputs of changed inputs", label, "change", (6.0, 3.6))
        names = list(self.error)
        axes.barh(names, [self.error[name] for name in names], height=0.5)
        for place, name in enumerate(names):
            text = f" {self.same[name]:.0%} of the answers stay" if name in self.same else ""
            axes.text(self.error[name], place, text, va="center")
        axes.margins(x=0.8)
        return picture


Change = Callable[[Tensor], Tensor]


def _reordered(x: Tensor, real: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The real places of each row by ascending key (N, T), and that order (N, T); the others stay."""
    places = torch.arange(x.shape[1], device=x.device).expand(real.shape)
    first = places < real.sum(1, keepdim=True)
    order = places.clone()
    order[real] = key.masked_fill(~real, torch.inf).argsort(1)[first]
    return x.gather(1, order if x.dim() == 2 else order[..., None].expand_as(x)), order


@torch.no_grad()
def equivariance(
    model: Callable[[Tensor], Tensor],
    rows: Tensor,
    *,
    real: Tensor | None = None,
    margin: int = 0,
    seed: int = 0,
) -> Equivariance:
    """The errors of a network under the changes that its inputs can have.

    Images (N, C, H, W): moved by a pixel around the edge, mirrored, turned by a quarter (where H = W).
    Sequences and sets (N, T) or (N, T, D): the places in another order, and reversed. `real` (N, T) tells
    places from padding, which stays. `margin` leaves out border pixels of outputs that are images.
    """
    if rows.dim() not in (2, 3, 4) or not len(rows):
        raise InputError(
            f"inputs of shape {tuple(rows.shape)}",
            expected="images (N, C, H, W), or sequences (N, T) or (N, T, D)",
            fix="add the missing dimensions with unsqueeze",
        )
    error: dict[str, float] = {}
    same: dict[str, float] = {}
    with evaluating(model):
        plain = model(rows)
        if not isinstance(plain, Tensor) or len(plain) != len(rows):
            raise InputError(
                f"a network that gives {type(plain).__name__}",
                expected="one tensor with a row for each input",
                fix="wrap the network in a function that gives its main output",
            )
        if rows.dim() == 4:
            changes: dict[str, Change] = {"shift": lambda x: x.roll(1, -1), "flip": lambda x: x.flip(-1)}
            if rows.shape[-1] == rows.shape[-2]:
                changes["rotation"] = lambda x: torch.rot90(x, 1, (-2, -1))
            for name, change in changes.items():
                error[name] = equivariance_error(model, rows, name, margin=margin)  # type: ignore[arg-type]
                if plain.dim() == 2:
                    same[name] = _stay(plain, model(change(rows)))
            return Equivariance(error, same, len(rows))
        there = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device) if real is None else real
        draws = torch.rand(there.shape, generator=torch.Generator().manual_seed(seed)).to(rows.device)
        backwards = -torch.arange(rows.shape[1], device=rows.device).float().expand(there.shape)
        for name, key in (("permutation", draws), ("reversal", backwards)):
            changed, moved = _reordered(rows, there, key)
            found, wanted = model(changed), plain
            if plain.dim() == 3 and plain.shape[1] == rows.shape[1]:
                wanted = plain.gather(1, moved[..., None].expand_as(plain))
            elif plain.dim() == 2:
                same[name] = _stay(plain, found)
            error[name] = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return Equivariance(error, same, len(rows))


def _stay(one: Tensor, other: Tensor) -> float:
    return float((one.argmax(1) == other.argmax(1)).double().mean())
