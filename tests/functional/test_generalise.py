from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from sklearn.preprocessing import PolynomialFeatures
from torch import Tensor

from quire.errors import InputError
from quire.functional import generalise
from quire.sheet.registry import ENTRIES, Entry, run_proof

CHAPTERS = ("optimise", "regularise", "generalise")


def parts() -> list[tuple[str, int]]:
    for chapter in CHAPTERS:
        importlib.import_module(f"quire.sheet.{chapter}")
    entries = [entry for _, entry in ENTRIES.items() if entry.chapter in CHAPTERS]
    return [(e.id, i) for e in entries for i in range(len(e.code)) if e.code[i] is not e.wrong[i]]


@pytest.mark.parametrize(("name", "part"), parts())
def test_each_part_of_a_proof_is_needed(name: str, part: int) -> None:
    """One wrong part among right ones is refuted by a number, not by an exception."""
    entry: Entry = ENTRIES[name]
    code = [*entry.code]
    code[part] = entry.wrong[part]
    error, problem = run_proof(entry.proof, tuple(code))
    assert error > entry.tolerance
    assert problem == ""


def test_monte_carlo_by_hand() -> None:
    estimate = generalise.monte_carlo(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert estimate.value == 3.0
    assert estimate.standard_error == pytest.approx((14 / 3) ** 0.5 / 2)
    assert estimate.interval(2.0) == pytest.approx((3 - (14 / 3) ** 0.5, 3 + (14 / 3) ** 0.5))
    assert str(estimate) == "3 ± 1.1"


def test_an_interval_covers_95_percent_unless_said_otherwise() -> None:
    within = generalise.Estimate(10.0, 2.0).interval()
    assert within == pytest.approx((10 - 3.92, 10 + 3.92))
    assert math.erf(1.96 / math.sqrt(2)) == pytest.approx(0.95, abs=1e-4)


def test_generalisation_error_takes_any_loss() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0])
    estimate = generalise.generalisation_error(lambda v: v, x, y, lambda a, b: (a - b).abs())
    assert estimate.value == 2.0


@pytest.mark.parametrize("stratified", [False, True])
def test_k_fold_partitions(stratified: bool) -> None:
    seed = int(torch.randint(10_000, ()))
    classes = torch.randint(3, (29,)) if stratified else None
    pairs = generalise.k_fold(29, 4, torch.Generator().manual_seed(seed), classes)
    assert sorted(torch.cat([held for _, held in pairs]).tolist()) == list(range(29))
    for inside, outside in pairs:
        assert sorted([*inside.tolist(), *outside.tolist()]) == list(range(29))
    sizes = [len(outside) for _, outside in pairs]
    assert max(sizes) - min(sizes) <= 1
    if classes is not None:
        for label in range(3):
            counts = [int((classes[outside] == label).sum()) for _, outside in pairs]
            assert max(counts) - min(counts) <= 1


def test_k_fold_without_generator_is_in_order() -> None:
    pairs = generalise.k_fold(5, 2)
    assert [outside.tolist() for _, outside in pairs] == [[0, 1, 2], [3, 4]]
    assert [inside.tolist() for inside, _ in pairs] == [[3, 4], [0, 1, 2]]


def test_cross_validation_by_hand() -> None:
    """The mean as a model: each fold is judged by the mean of the other."""
    y = torch.tensor([0.0, 2.0, 4.0, 10.0])

    def fit(x: Tensor, y: Tensor) -> generalise.Predict:
        return lambda rows: y.mean().expand(len(rows))

    result = generalise.cross_validate(fit, y, y, folds=2)
    assert result.train.tolist() == [9.0, 1.0]  # {4, 10} about 7, {0, 2} about 1
    assert result.validation.tolist() == [37.0, 45.0]  # (7²+5²)/2, (3²+9²)/2
    assert result.score.value == 41.0


def test_bias_and_variance_of_a_constant_predictor_by_hand() -> None:
    """f_D = the first training target: mean 3, variance 2 over the training sets {1,3,5,3,…}."""
    targets = iter([1.0, 3.0, 5.0, 3.0])

    def resample(generator: object) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.tensor([next(targets)])

    def fit(x: Tensor, y: Tensor) -> generalise.Predict:
        return lambda rows: y.expand(len(rows))

    truth = torch.tensor([2.0, 3.0])
    result = generalise.bias_variance(fit, resample, torch.zeros(2), truth, resamples=4)
    variance = 8 / 3
    assert result.variance.value == pytest.approx(variance)
    assert result.bias2.value == pytest.approx((1 + 0) / 2 - variance / 4)
    assert result.total.value == pytest.approx(((1 + 1 + 9 + 1) + (4 + 0 + 4 + 0)) / 8)
    assert result.residual == pytest.approx(0, abs=1e-12)
    assert result.pointwise_variance.tolist() == pytest.approx([variance, variance])
    assert result.pointwise_bias2.mean().item() == pytest.approx(result.bias2.value)
    # Standard errors s/√4: of 2(3 − 2.5)(f − 3) = −2, 0, 2, 0; of 4/3·(4, 0, 4, 0); of 2.5, 0.5, 6.5, 0.5.
    assert result.bias2.standard_error == pytest.approx((8 / 3) ** 0.5 / 2)
    assert result.variance.standard_error == pytest.approx((256 / 27) ** 0.5 / 2)
    assert result.total.standard_error == pytest.approx(8**0.5 / 2)


def test_resampled_rows_come_from_the_data_in_pairs() -> None:
    x = torch.arange(50.0)
    draw = generalise.resample_rows(x, 2 * x)
    a, b = draw(torch.Generator().manual_seed(0))
    assert torch.equal(b, 2 * a)
    assert len(a) == 50
    assert 20 < len(a.unique()) < 45


def test_more_flexible_models_trade_bias_for_variance() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 25).double()

    def draw(generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return x, torch.sin(4 * x) + 0.2 * torch.randn(25, generator=generator, dtype=torch.float64)

    line, quintic = (
        generalise.bias_variance(
            lambda a, b, d=degree: generalise.fit_polynomial(a, b, d),
            draw,
            x,
            torch.sin(4 * x),
            resamples=100,
        )
        for degree in (1, 5)
    )
    assert line.bias2.value > 100 * abs(quintic.bias2.value)
    # On the design itself, least squares has variance σ²·(coefficients)/(points).
    for result, coefficients in ((line, 2), (quintic, 6)):
        assert abs(result.variance.value - 0.04 * coefficients / 25) < 4.5 * result.variance.standard_error


def test_polynomial_features_of_two_inputs_by_hand() -> None:
    got = generalise.polynomial_features(torch.tensor([[2.0, 3.0]]), 2)
    assert got.tolist() == [[1, 2, 3, 4, 6, 9]]
    assert generalise.polynomial_features(torch.tensor([[2.0, 3.0]]), 1, bias=False).tolist() == [[2, 3]]
    assert generalise.polynomial_features(torch.ones(3), 0, bias=False).shape == (3, 0)


@pytest.mark.parametrize(("inputs", "degree"), [(1, 5), (2, 4), (4, 3)])
def test_polynomial_features_are_scikit_learns(inputs: int, degree: int) -> None:
    x = torch.randn(7, inputs).double()
    for bias in (True, False):
        expected = PolynomialFeatures(degree, include_bias=bias).fit_transform(x.numpy())
        np.testing.assert_allclose(
            generalise.polynomial_features(x, degree, bias).numpy(), expected, rtol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polynomial_through_its_own_points(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=dtype)
    fit = generalise.fit_polynomial(x, 1 - 2 * x + x**3, 3)
    assert fit.coefficients.dtype == dtype
    assert fit.coefficients.tolist() == pytest.approx([1, -2, 0, 1], abs=1e-4)
    assert fit(torch.tensor([4.0], dtype=dtype)).item() == pytest.approx(57, rel=1e-4)


def test_more_coefficients_than_points_still_fit() -> None:
    x = torch.tensor([0.0, 1.0, 2.0]).double()
    fit = generalise.fit_polynomial(x, x**2, 6)
    assert torch.allclose(fit(x), x**2, atol=1e-9)


def test_degree_curve_finds_the_cubic_and_is_repeatable() -> None:
    x = torch.linspace(-1, 1, 60).double()
    y = 2 * x**3 - x + 0.05 * torch.randn(60, generator=torch.Generator().manual_seed(1)).double()
    first, second = (
        generalise.degree_curve(x, y, [0, 1, 2, 3], generator=torch.Generator().manual_seed(4))
        for _ in range(2)
    )
    assert first.best == 3
    assert first.validation.shape == (4, 5)
    assert torch.equal(first.validation, second.validation)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    x = torch.linspace(-1, 1, 40, dtype=torch.float64, device="cuda")
    y = x**3 - x
    assert generalise.degree_curve(x, y, [1, 2, 3]).best == 3
    result = generalise.bias_variance(
        lambda a, b: generalise.fit_polynomial(a, b, 1),
        generalise.resample_rows(x, y),
        x,
        y,
        resamples=10,
        generator=torch.Generator("cuda").manual_seed(0),
    )
    assert abs(result.residual) < 1e-12


def test_a_column_of_predictions_is_refused() -> None:
    """Beside a vector of targets it would be compared with all of them."""
    x, y = torch.randn(10, 2), torch.randn(10)
    with pytest.raises(InputError, match=r"squared_error of shapes \(8, 1\) and \(8,\)"):
        generalise.cross_validate(lambda x, y: lambda x: x[:, :1], x, y)


def test_messages() -> None:
    with pytest.raises(InputError, match="7 folds of 5 rows\n  expected: at least 2 folds"):
        generalise.k_fold(5, 7)
    with pytest.raises(InputError, match="3 classes to stratify 5 rows by"):
        generalise.k_fold(5, 2, stratify=torch.zeros(3))
    with pytest.raises(InputError, match=r"values of shape \(1,\)"):
        generalise.monte_carlo(torch.ones(1))
    with pytest.raises(InputError, match="degree -1 of inputs"):
        generalise.polynomial_features(torch.ones(3), -1)
    with pytest.raises(InputError, match="no degree to try"):
        generalise.degree_curve(torch.ones(5), torch.ones(5), [])
    draw = generalise.resample_rows(torch.ones(4), torch.ones(4))

    def fit(x: Tensor, y: Tensor) -> generalise.Predict:
        return lambda rows: torch.ones(len(rows), 2)

    with pytest.raises(InputError, match="1 resamples"):
        generalise.bias_variance(fit, draw, torch.ones(4), torch.ones(4), resamples=1)
    with pytest.raises(InputError, match=r"4 test points and true values of shape \(3,\)"):
        generalise.bias_variance(fit, draw, torch.ones(4), torch.ones(3))
    with pytest.raises(InputError, match="8 predictions for 4 test points"):
        generalise.bias_variance(fit, draw, torch.ones(4), torch.ones(4))
