from __future__ import annotations

import math

import pytest
import torch

from quire.errors import InputError
from quire.functional import quadratic
from quire.functional.quadratic import QuadraticModel


def model(*eigenvalues: float) -> QuadraticModel:
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    hessian = rotation * values @ rotation.t()
    return QuadraticModel((hessian + hessian.t()) / 2, torch.randn(len(values), dtype=torch.float64), 1.5)


def test_value_and_gradient_equal_the_quadratic_form_and_autograd() -> None:
    e = model(0.5, 2.0, 7.0)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    form = 1.5 + (w - e.minimiser) @ e.hessian @ (w - e.minimiser) / 2
    torch.testing.assert_close(e.value(w), form)
    torch.testing.assert_close(e.gradient(w).detach(), torch.autograd.grad(form, w)[0])
    torch.testing.assert_close(e.point(e.coordinates(w)), w)


@pytest.mark.parametrize("step_size", [0.01, 0.1, 0.28, 0.3])
def test_predicted_paths_equal_simulated_ones(step_size: float) -> None:
    e = model(0.5, 2.0, 7.0)
    start = torch.randn(3, dtype=torch.float64)
    predicted, simulated = e.predict(start, step_size, 30), e.simulate(start, step_size, 30)
    torch.testing.assert_close(predicted, simulated, rtol=1e-9, atol=1e-9)
    grows = e.value(simulated[-1]) > e.value(simulated[0])
    assert bool(grows) is not quadratic.is_stable(e.eigenvalues, step_size)


def test_numbers_of_a_case_by_hand() -> None:
    eigenvalues = torch.tensor([4.0, 1.0])
    assert quadratic.condition_number(eigenvalues) == 4
    assert quadratic.stable_step_size(eigenvalues) == 0.5
    assert quadratic.steepest_step_size(eigenvalues) == 0.25
    assert quadratic.slowest_rate(eigenvalues) == 0.75
    assert quadratic.best_step_size(eigenvalues) == 0.4
    rates = quadratic.descent_rates(eigenvalues, 0.4).tolist()
    assert rates == pytest.approx([-0.6, 0.6])
    alpha = torch.tensor([1.0, 2.0])
    assert quadratic.quadratic_energy(alpha, eigenvalues, 3.0).item() == 3 + (4 + 4) / 2
    path = quadratic.predicted_coordinates(alpha, eigenvalues, 0.25, 2)
    assert path.tolist() == [[1, 2], [0, 1.5], [0, 1.125]]


def test_no_step_size_beats_the_best_one() -> None:
    eigenvalues = torch.tensor([0.3, 1.0, 5.0])
    best = quadratic.best_step_size(eigenvalues)
    worst_rate = quadratic.descent_rates(eigenvalues, best).abs().max()
    for step_size in torch.linspace(0.01, 0.6, 60).tolist():
        assert quadratic.descent_rates(eigenvalues, step_size).abs().max() >= worst_rate - 1e-6


def test_stability_is_strict_at_both_ends() -> None:
    eigenvalues = torch.tensor([1.0, 4.0])
    assert not quadratic.is_stable(eigenvalues, 0.5)
    assert quadratic.is_stable(eigenvalues, math.nextafter(0.5, 0) - 1e-7)
    assert not quadratic.is_stable(eigenvalues, 0.0)
    assert not quadratic.is_stable(torch.tensor([0.0, 1.0]), 0.5)
    assert not quadratic.is_stable(torch.tensor([-1.0, 1.0]), 0.5)


def test_errors_say_what_is_expected() -> None:
    with pytest.raises(InputError, match=r"an eigenvalue of -1(.|\n)*positive"):
        quadratic.condition_number(torch.tensor([-1.0, 2.0]))
    with pytest.raises(InputError, match=r"shape \(2, 3\) for 3 parameters"):
        QuadraticModel(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(InputError, match="symmetric"):
        QuadraticModel(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.zeros(2))
