"""The curvature of any PyTorch model's loss: extreme eigenvalues, trace and spectral density of its Hessian.

Lanczos' method turns k products with the Hessian (`hessian.py`) into a k×k tridiagonal matrix T whose
eigenvalues θ approach those of H from the ends of the spectrum inwards. The first components τ of T's
eigenvectors give quadrature weights τ², from which the whole density follows (stochastic Lanczos
quadrature: Golub and Welsch 1969; Ubaru, Chen and Saad 2017).

n parameters, k Lanczos steps, P random start vectors ("probes").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.doctor.curvature.hessian import Batches, Hessian, LossFunction, lanczos
from quire.doctor.pictures import new_axes
from quire.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        title = f"Curvature of the loss: stable step sizes are below {self.stable_step:.3g}"
        labels = ("eigenvalue λ of the Hessian", "spectral density (1 / unit of λ)")
        picture, axes = new_axes(title, *labels, size=(7, 4))
        grid, density = self.grid.tolist(), self.density.clamp(min=1e-12).tolist()
        axes.fill_between(grid, 1e-12, density, alpha=0.3)
        axes.plot(grid, density, label=f"density of {self.size} eigenvalues")
        axes.axvline(self.largest, color="tab:red", linestyle="--", label=f"λmax = {self.largest:.3g}")
        axes.axvline(self.smallest, color="tab:green", linestyle="--", label=f"λmin = {self.smallest:.3g}")
        axes.set_yscale("log")
        peak = max(density)
        axes.set_ylim(1e-5 * peak, 3 * peak)
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
    keep: bool = False,
    compile: bool = False,
) -> Spectrum:
    """Extreme eigenvalues, trace and spectral density of the Hessian of the mean loss over `batches`.

    Costs k·probes products with the Hessian; memory for k vectors of the size of the model. The
    trace is exact where that costs no more than estimating did (n ≤ k·probes). `keep` and `compile` make
    a product a third cheaper at the price of memory for the activations of all batches (see `Hessian`).
    """
    hessian = Hessian.of_model(model, loss, batches, keep=keep, compile=compile)
    return hessian_spectrum(hessian, k=k, probes=probes, points=points, seed=seed)


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
        errors = tridiagonal.errors(values, vectors)
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
