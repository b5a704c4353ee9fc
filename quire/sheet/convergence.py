"""Chapter 7: convergence of gradient descent near a minimum, and the curvature of real networks.

λ eigenvalues of the Hessian H, α coordinates along its eigenvectors, η step size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.doctor import Spectrum, spectrum
from quire.functional.quadratic import (
    QuadraticModel,
    condition_number,
    is_stable,
    slowest_rate,
    steepest_step_size,
)
from quire.models.mlp import MLP, MLPConfig
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _double(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


# The quadratic model --------------------------------------------------------------------------


class _HalfSteps(QuadraticModel):
    """Predicts with half the step size."""

    def predict(self, start: Tensor, step_size: float, steps: int) -> Tensor:
        return super().predict(start, step_size / 2, steps)


def _quadratic_picture() -> Figure:
    from quire.report.style import figure

    model = QuadraticModel(
        torch.tensor([[2.2, 1.2], [1.2, 1.3]], dtype=torch.float64), torch.zeros(2).double()
    )
    start, steps = torch.tensor([-1.7, 0.2], dtype=torch.float64), 14
    picture = figure(9, 4)
    plane, rates = picture.subplots(1, 2)
    axis = torch.linspace(-2, 2, 80, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    energy = model.value(points).view(80, 80).t()
    plane.contour(axis.numpy(), axis.numpy(), energy.numpy(), levels=12, alpha=0.35)
    largest = model.eigenvalues[-1].item()
    for product in (0.3, 1.0, 1.8, 2.1):
        path = model.simulate(start, product / largest, steps)
        (line,) = plane.plot(*path.t().tolist(), marker="o", markersize=3, linewidth=1)
        predicted = model.value(model.predict(start, product / largest, steps))
        label = f"ηλmax = {product:g}"
        rates.semilogy(predicted.tolist(), color=line.get_color(), label=label)
        rates.semilogy(model.value(path).tolist(), "o", color=line.get_color(), markersize=3)
    plane.set(title="Paths of gradient descent", xlabel="w₁", ylabel="w₂", xlim=(-2, 2), ylim=(-2, 2))
    rates.set(title="E − E*: predicted (lines), simulated (dots)", xlabel="step", ylabel="E − E*")
    rates.legend()
    return picture


@entry(
    "convergence/quadratic-model",
    "Gradient descent near a minimum",
    r"E \approx E^* + \tfrac12 \sum_i \lambda_i \alpha_i^2, \qquad "
    r"\nabla E = \sum_i \alpha_i \lambda_i u_i, \qquad "
    r"\alpha_i \leftarrow (1 - \eta\lambda_i)\,\alpha_i, \qquad 0 < \eta\lambda_i < 2, \qquad "
    r"1 - \frac{\lambda_{\min}}{\lambda_{\max}}, \qquad \kappa = \frac{\lambda_{\max}}{\lambda_{\min}}",
    code=(QuadraticModel, is_stable, steepest_step_size, slowest_rate, condition_number),
    wrong=(
        _HalfSteps,
        lambda eigenvalues, step_size: bool((step_size * eigenvalues < 1).all()),
        lambda eigenvalues: 2 / eigenvalues.max().item(),
        lambda eigenvalues: (eigenvalues.min() / eigenvalues.max()).item(),
        lambda eigenvalues: (eigenvalues.max() - eigenvalues.min()).item(),
    ),
    tolerance=1e-10,
    picture=_quadratic_picture,
)
def _(
    quadratic_model: Code,
    is_stable: Code,
    steepest_step_size: Code,
    slowest_rate: Code,
    condition_number: Code,
) -> float:
    factor = torch.randn(6, 6, dtype=torch.float64)
    hessian = factor @ factor.t() / 6 + 0.2 * torch.eye(6, dtype=torch.float64)
    minimiser, start = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    model = quadratic_model(hessian, minimiser, 0.7)
    eigenvalues, eigenvectors = torch.linalg.eigh(hessian)
    smallest, largest = eigenvalues[0].item(), eigenvalues[-1].item()

    def energy(w: Tensor) -> Tensor:
        return 0.7 + (w - minimiser) @ hessian @ (w - minimiser) / 2

    def slope(w: Tensor) -> Tensor:
        leaf = w.clone().requires_grad_()
        return torch.autograd.grad(energy(leaf), leaf)[0]

    errors = [
        gap(model.value(start), energy(start)),
        gap(model.gradient(start), slope(start)),
        gap(_double(condition_number(eigenvalues)), torch.linalg.cond(hessian)),
        gap(_double(slowest_rate(eigenvalues)), _double(1 - smallest / largest)),
    ]
    # Predicted against simulated, on both sides of the limit of stability.
    for product in (0.5, 1.0, 1.99, 2.01):
        step_size, w, path = product / largest, start, [start]
        for _ in range(60):
            w = w - step_size * slope(w)
            path.append(w)
        errors.append(gap(model.predict(start, step_size, 60), torch.stack(path)))
        errors.append(gap(model.simulate(start, step_size, 60), torch.stack(path)))
        before, after = ((point - minimiser) @ eigenvectors[:, -1] for point in path[:2])
        errors.append(require(bool(after.abs() < before.abs()) == is_stable(eigenvalues, step_size)))
    errors.append(require(not is_stable(eigenvalues, -0.1)))
    # η = 1/λmax: the steepest direction is gone after one step, the flattest shrinks by 1 − λmin/λmax.
    alpha = (model.simulate(start, steepest_step_size(eigenvalues), 1) - minimiser) @ eigenvectors
    errors.append(gap(alpha[1, -1], _double(0.0)))
    errors.append(gap(alpha[1, 0] / alpha[0, 0], _double(slowest_rate(eigenvalues))))
    return worst(*errors)


# The spectrum of a network --------------------------------------------------------------------


def _each_batch_alike(
    model: nn.Module, loss: Code, batches: list[tuple[Tensor, Tensor]], **options: Any
) -> Spectrum:
    """Weighs batches of different sizes alike, by repeating the rows of the smaller ones."""
    most = max(len(target) for _, target in batches)
    rows = [torch.arange(most) % len(target) for _, target in batches]
    alike = [(x[index], y[index]) for (x, y), index in zip(batches, rows, strict=True)]
    return spectrum(model, loss, alike, **options)


def _spectrum_picture() -> Figure:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = torch.randint(0, 3, (90,))
        angle = torch.randn(90) * 0.3 + target * 2.1
        inputs = torch.stack([torch.cos(angle), torch.sin(angle)], 1) * (1 + 0.2 * torch.randn(90, 1))
        model = MLP(MLPConfig(2, 3, (16,), "tanh"))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimiser.step()
    return spectrum(model, nn.functional.cross_entropy, [(inputs, target)], k=30, probes=6).figure()


@entry(
    "convergence/spectrum",
    "Curvature of a network without its Hessian, and step-size advice",
    r"Hv = \nabla_w\big((\nabla_w E)^{\top} v\big), \qquad H Q_k \approx Q_k T_k, \qquad "
    r"\operatorname{tr} H = \mathbb{E}[v^{\top} H v], \qquad "
    r"p(\lambda) \approx \sum_j \tau_j^2\, \mathcal{N}(\lambda; \theta_j, s^2), \qquad "
    r"\eta < \frac{2}{\lambda_{\max}}",
    code=spectrum,
    wrong=_each_batch_alike,
    tolerance=1e-8,
    picture=_spectrum_picture,
)
def _(spectrum: Code) -> float:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    batches = [(torch.randn(n, 2).double(), torch.randn(n, 1).double()) for n in (8, 3, 1)]
    inputs, target = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    shapes = [parameter.shape for parameter in model.parameters()]

    def energy(flat: Tensor) -> Tensor:
        parts = [
            part.view(shape)
            for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        hidden = torch.tanh(inputs @ parts[0].t() + parts[1])
        return (hidden @ parts[2].t() + parts[3] - target).square().mean()

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    hessian = torch.autograd.functional.hessian(energy, flat)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    found = spectrum(model, nn.functional.mse_loss, batches, k=len(flat), probes=4)
    made_from = found.weights @ found.nodes
    errors = [
        gap(_double(found.largest), eigenvalues[-1]),
        gap(_double(found.smallest), eigenvalues[0]),
        gap(_double(found.trace), hessian.trace()),
        gap(_double(found.stable_step), 2 / eigenvalues[-1]),
        # As many steps as parameters: each probe finds every eigenvalue.
        gap(found.nodes.view(4, -1), eigenvalues.expand(4, -1)),
        gap(found.weights.sum(), torch.ones(())),
        # The density is a distribution, with the mean of what it was made from.
        require(abs(torch.trapezoid(found.density, found.grid) - 1) < 1e-3),
        require(abs(torch.trapezoid(found.density * found.grid, found.grid) - made_from) < 1e-3),
        require(found.size == len(flat)),
    ]
    # Fewer steps and an estimated trace: the ends still, within the bound that is given.
    rough = spectrum(model, nn.functional.mse_loss, batches, k=2, probes=5)
    errors.append(require((eigenvalues - rough.largest).abs().min() <= rough.largest_error + 1e-12))
    errors.append(require(abs(rough.trace - hessian.trace()) <= 5 * rough.trace_error))
    # The advice, on a loss that is exactly quadratic: descent converges below 2/λmax and diverges above.
    line = nn.Linear(2, 1).double()
    exact = spectrum(line, nn.functional.mse_loss, batches)
    padded = torch.cat([inputs, torch.ones(12, 1).double()], 1)
    errors.append(gap(_double(exact.condition_number), torch.linalg.cond(padded.t() @ padded)))
    best = torch.linalg.lstsq(padded, target).solution
    for factor in (0.98, 1.02):
        w = best + torch.ones_like(best)
        for _ in range(400):
            w = w - factor * exact.stable_step * padded.t() @ (padded @ w - target) * 2 / 12
        errors.append(require(((w - best).norm() < 1e-2) == (factor < 1)))
    return worst(*errors)
