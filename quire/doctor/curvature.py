"""The curvature of any PyTorch model's loss: extreme eigenvalues, trace and spectral density of its Hessian.

The Hessian H is never formed. A product Hv is the gradient of (∇E)ᵀv, at about the price of two backward
passes; Lanczos' method turns k such products into a k×k tridiagonal matrix T whose eigenvalues θ
(Ritz values) approach those of H from the ends of the spectrum inwards. The first components τ of T's
eigenvectors give quadrature weights τ², from which the whole density follows (stochastic Lanczos
quadrature: Golub and Welsch 1969; Ubaru, Chen and Saad 2017).

Where an activation has a kink (ReLU), the curvature is that of the smooth pieces.

n parameters, k Lanczos steps, P random start vectors ("probes").
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.errors import InputError
from quire.functional.modes import evaluating

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batches = Iterable[tuple[Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Tensor]
WeightedLosses = Callable[[], Iterable[tuple[float, Tensor]]]


class Hessian:
    """The linear map v ↦ Hv, for the weighted mean of the losses that `losses()` gives."""

    def __init__(self, losses: WeightedLosses, parameters: Iterable[Tensor]) -> None:
        self.losses = losses
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise InputError(
                "a model without trainable parameters",
                expected="at least one parameter that requires a gradient",
                fix="call requires_grad_() on what should be examined",
            )
        self.size = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device

    @classmethod
    def of_model(
        cls, model: nn.Module, loss: LossFunction, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> Hessian:
        """Of the mean of ``loss(model(inputs), target)`` over `batches`, each weighted by its rows.

        `loss` is a mean over rows. The model is run as in evaluation, so that dropout and batch norm
        neither make H random nor are changed by looking at it; its mode is restored.
        """
        # An iterator would be used up by the first product.
        kept: Batches = list(batches) if isinstance(batches, Iterator) else batches

        def losses() -> Iterator[tuple[float, Tensor]]:
            with evaluating(model), _twice_differentiable():
                for inputs, target in kept:
                    yield len(target), loss(model(inputs), target)

        return cls(losses, model.parameters())

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv for a flat vector (n,)."""
        if vector.shape != (self.size,):
            raise InputError(
                f"a vector of shape {tuple(vector.shape)}",
                expected=f"shape ({self.size},): one number for each parameter",
            )
        pieces = _split(vector, self.parameters)
        product, total = torch.zeros_like(vector), 0.0
        with torch.enable_grad():
            for weight, loss in self.losses():
                gradients = _gradients(loss, self.parameters, create_graph=True)
                slope = loss.new_zeros(())
                for gradient, piece in zip(gradients, pieces, strict=True):
                    slope = slope + (gradient * piece).sum()
                product += weight * _flatten(_gradients(slope, self.parameters))
                total += weight
        if total == 0:
            raise InputError("no batch to compute a loss from", expected="at least one (inputs, target) pair")
        return product / total


def hessian_vector_product(
    function: Callable[[], Tensor], parameters: Iterable[Tensor], vector: Tensor
) -> Tensor:
    """Hv of the scalar that `function()` computes from `parameters`, for a flat vector v."""
    return Hessian(lambda: [(1.0, function())], parameters)(vector)


class Tridiagonal(NamedTuple):
    """T = QᵀHQ of Lanczos' method, in float64."""

    diagonal: Tensor
    """(k,)."""
    off_diagonal: Tensor
    """(k − 1,)."""
    residual: float
    """β_k, the norm of what is left; 0 where the basis spans an invariant subspace."""
    basis: Tensor
    """Qᵀ (k, n), orthonormal rows."""

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues θ of T, ascending, and its eigenvectors as columns."""
        matrix = torch.diag(self.diagonal)
        matrix += torch.diag(self.off_diagonal, 1) + torch.diag(self.off_diagonal, -1)
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tridiagonal:
    """k steps of Lanczos' method from `start` (n,), for a symmetric map given as a function.

    Each new vector is made orthogonal to all earlier ones, twice: without it rounding lets converged
    directions come back, and the spectrum shows eigenvalues that are not there.
    """
    n = start.numel()
    steps = min(steps, n)
    basis = start.new_empty(steps, n)
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    scale = 0.0
    while True:
        k = len(diagonal)
        vector = product(basis[k])
        diagonal.append(torch.dot(vector.double(), basis[k].double()).item())
        for _ in range(2):
            vector = vector - basis[: k + 1].t() @ (basis[: k + 1] @ vector)
        residual = vector.double().norm().item()
        scale = max(scale, abs(diagonal[-1]), residual)
        if residual <= scale * n**0.5 * torch.finfo(start.dtype).eps:
            residual = 0.0
        if residual == 0.0 or k + 1 == steps:
            break
        off_diagonal.append(residual)
        basis[k + 1] = vector / residual
    used = len(diagonal)
    return Tridiagonal(
        torch.tensor(diagonal, dtype=torch.float64),
        torch.tensor(off_diagonal, dtype=torch.float64),
        residual,
        basis[:used],
    )


@dataclass(frozen=True)
class Spectrum:
    """What k·P products with the Hessian say about it."""

    largest: float
    """λmax."""
    smallest: float
    """λmin; below 0 the point is a saddle, not a minimum."""
    largest_error: float
    """|λmax − an eigenvalue of H| is at most this."""
    smallest_error: float
    trace: float
    trace_error: float
    """Standard error of the trace; 0 where it is exact."""
    nodes: Tensor
    """Ritz values of all probes."""
    weights: Tensor
    """Their weights, which sum to 1."""
    grid: Tensor
    density: Tensor
    """Spectral density on the grid, smoothed by a Gaussian; its integral is 1."""
    size: int
    """n."""

    @property
    def condition_number(self) -> float:
        """κ = λmax/λmin; infinite where λmin is not positive beyond its error."""
        positive = self.smallest > self.smallest_error and self.largest > 0
        return self.largest / self.smallest if positive else math.inf

    @property
    def stable_step(self) -> float:
        """2/λmax: gradient descent diverges above it."""
        return 2 / self.largest if self.largest > 0 else math.inf

    @property
    def best_first_step(self) -> float:
        """1/λmax: removes the steepest direction in one step."""
        return self.stable_step / 2

    @property
    def negative_share(self) -> float:
        """Share of the eigenvalues below 0, by their quadrature weights, beyond a thousandth of |λ|max."""
        limit = -1e-3 * max(abs(self.largest), abs(self.smallest))
        return float(self.weights[self.nodes < limit].sum())

    def advice(self, step_size: float | None = None, momentum: float = 0.0) -> str:
        """In words: which step sizes can work, and what stands in the way of fast convergence."""
        if self.largest <= 0:
            return "No direction curves upwards here (λmax ≤ 0): no step size is too large for stability."
        limit = self.stable_step * (1 + momentum)
        with_momentum = f" (with momentum {momentum:g})" if momentum else ""
        lines = [
            f"Gradient descent diverges above a step size of {limit:.3g}{with_momentum}; "
            f"{self.best_first_step:.3g} = 1/λmax removes the steepest direction in one step."
        ]
        if step_size is not None and step_size >= limit:
            lines.append(f"The step size {step_size:g} is too large: try {self.best_first_step:.2g}.")
        elif step_size is not None and step_size < self.best_first_step / 100:
            lines.append(
                f"The step size {step_size:g} is {self.best_first_step / step_size:.0f} times smaller."
            )
        if self.smallest < -max(self.smallest_error, 1e-3 * self.largest):
            lines.append(
                f"λmin = {self.smallest:.3g} is negative: this is a saddle or a slope, not yet a minimum, "
                f"and descent goes on along it ({100 * self.negative_share:.0f}% of the directions)."
            )
        elif math.isinf(self.condition_number):
            lines.append("Some directions are flat (λmin ≈ 0): the loss does not depend on them.")
        elif self.condition_number > 100:
            lines.append(
                f"The condition number {self.condition_number:.3g} is large: the flattest direction shrinks "
                f"by a factor of 1 − {1 / self.condition_number:.1g} a step. Standardised inputs, "
                "normalisation, momentum or Adam help."
            )
        return " ".join(lines)

    def figure(self) -> Figure:
        """The density on a logarithmic axis, with λmin and λmax."""
        from matplotlib.figure import Figure

        picture = Figure(figsize=(7, 4), layout="constrained")
        axes = picture.add_subplot()
        grid, density = self.grid.tolist(), self.density.clamp(min=1e-12).tolist()
        axes.fill_between(grid, 1e-12, density, alpha=0.3)
        axes.plot(grid, density, label=f"density of {self.size} eigenvalues")
        axes.axvline(self.largest, color="tab:red", linestyle="--", label=f"λmax = {self.largest:.3g}")
        axes.axvline(self.smallest, color="tab:green", linestyle="--", label=f"λmin = {self.smallest:.3g}")
        axes.set_yscale("log")
        peak = max(density)
        axes.set_ylim(1e-5 * peak, 3 * peak)
        axes.set_xlabel("eigenvalue λ of the Hessian")
        axes.set_ylabel("spectral density (1 / unit of λ)")
        axes.set_title(f"Curvature of the loss: stable step sizes are below {self.stable_step:.3g}")
        axes.legend()
        return picture


def spectrum(
    model: nn.Module,
    loss: LossFunction,
    batches: Batches,
    *,
    k: int = 40,
    probes: int = 8,
    points: int = 400,
    seed: int = 0,
) -> Spectrum:
    """Extreme eigenvalues, trace and spectral density of the Hessian of the mean loss over `batches`.

    Costs k·probes products with the Hessian; memory for k vectors of the size of the model. The
    trace is exact where that costs no more than estimating did (n ≤ k·probes).
    """
    return hessian_spectrum(
        Hessian.of_model(model, loss, batches), k=k, probes=probes, points=points, seed=seed
    )


def hessian_spectrum(
    hessian: Hessian, *, k: int = 40, probes: int = 8, points: int = 400, seed: int = 0
) -> Spectrum:
    """`spectrum` for a Hessian that is already given as a product."""
    if k < 1 or probes < 1:
        raise InputError(f"k = {k} and probes = {probes}", expected="at least 1 each")
    generator = torch.Generator().manual_seed(seed)
    runs: list[tuple[Tensor, Tensor]] = []
    traces: list[float] = []
    largest, smallest = (-math.inf, 0.0), (math.inf, 0.0)
    for _ in range(probes):
        # ±1 entries: the variance of vᵀHv is then free of H's diagonal. The same on every device.
        signs = torch.randint(0, 2, (hessian.size,), generator=generator) * 2 - 1
        tridiagonal = lanczos(hessian, signs.to(hessian.device, hessian.dtype), k)
        values, vectors = tridiagonal.ritz()
        runs.append((values, vectors[0].square()))
        traces.append(hessian.size * tridiagonal.diagonal[0].item())
        # A Ritz value lies within β_k·|last component of its vector| of an eigenvalue, up to rounding.
        rounding = values.abs().max() * hessian.size**0.5 * torch.finfo(hessian.dtype).eps
        errors = tridiagonal.residual * vectors[-1].abs() + rounding
        largest = max(largest, (values[-1].item(), errors[-1].item()))
        smallest = min(smallest, (values[0].item(), errors[0].item()))
    if hessian.size <= k * probes:
        trace, trace_error = _exact_trace(hessian), 0.0
    else:
        samples = torch.tensor(traces, dtype=torch.float64)
        trace = samples.mean().item()
        trace_error = (samples.std() / math.sqrt(probes)).item() if probes > 1 else math.inf
    nodes = torch.cat([values for values, _ in runs])
    weights = torch.cat([weight for _, weight in runs]) / probes
    grid, density = smooth_density(nodes, weights, points)
    return Spectrum(
        largest[0], smallest[0], largest[1], smallest[1], trace, trace_error,
        nodes, weights, grid, density, hessian.size,
    )  # fmt: skip


def smooth_density(
    nodes: Tensor, weights: Tensor, points: int = 400, width: float | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_j w_j N(x; θ_j, width²) on an even grid that reaches four widths beyond the nodes."""
    low, high = nodes.min().item(), nodes.max().item()
    spread = width or max((high - low) / 100, 1e-6 * max(abs(low), abs(high)), 1e-12)
    grid = torch.linspace(low - 4 * spread, high + 4 * spread, points, dtype=nodes.dtype)
    distance = (grid.unsqueeze(1) - nodes) / spread
    bells = torch.exp(-distance.square() / 2) / (spread * math.sqrt(2 * math.pi))
    return grid, bells @ weights


def _exact_trace(hessian: Hessian) -> float:
    unit = torch.zeros(hessian.size, dtype=hessian.dtype, device=hessian.device)
    total = 0.0
    for i in range(hessian.size):
        unit[i] = 1
        total += hessian(unit)[i].item()
        unit[i] = 0
    return total


def _gradients(value: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    if not value.requires_grad:  # a loss that is linear in the parameters has a constant gradient
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(
        value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _split(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    pieces = vector.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


@contextlib.contextmanager
def _twice_differentiable() -> Iterator[None]:
    # The fused attention and recurrent kernels have a first derivative only.
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield
