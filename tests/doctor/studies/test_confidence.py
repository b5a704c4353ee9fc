"""Calibration against scikit-learn and planted temperatures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression

from quire.doctor.studies import from_estimator
from quire.doctor.studies.confidence import (
    best_temperature,
    calibration,
    expected_calibration_error,
    reliability,
)
from quire.doctor.studies.refit import Answers
from quire.errors import InputError

pytestmark = pytest.mark.slow

IRIS = load_iris()


def test_bins_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.01, 0.99, 500)
    right = rng.uniform(size=500) < confidence**2
    said, true, count = reliability(torch.from_numpy(confidence), torch.from_numpy(right))
    wanted_true, wanted_said = calibration_curve(right, confidence, n_bins=10)
    np.testing.assert_allclose(said[count > 0], wanted_said)
    np.testing.assert_allclose(true[count > 0], wanted_true)
    by_hand = np.sum(count.numpy()[count > 0] / 500 * np.abs(wanted_true - wanted_said))
    assert expected_calibration_error(torch.from_numpy(confidence), torch.from_numpy(right)) == pytest.approx(
        by_hand
    )


def classes_drawn(rows: int, sharper: float, seed: int) -> Answers:
    """Classes drawn from known probabilities, and these made `sharper` times as sure."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return Answers(target, probabilities=(sharper * logits).softmax(1))


@pytest.mark.parametrize("sharper", [0.4, 1.0, 2.5])
def test_a_planted_temperature_is_found(sharper: float) -> None:
    other = classes_drawn(4000, sharper, 1)
    assert best_temperature(other.probabilities, other.target) == pytest.approx(sharper, rel=0.06)  # type: ignore[arg-type]
    found = calibration(classes_drawn(3000, sharper, 0), other)
    assert found.calibrated == (sharper == 1.0)
    assert found.error_after < 0.02
    word = "Calibrated" if sharper == 1 else "Too sure" if sharper > 1 else "Not sure enough"
    assert str(found).startswith(word)
    assert len(found.figure().axes) == 1


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_deviations_of_values_are_judged_by_their_intervals(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sigma = 0.5 + torch.rand(4000, generator=generator, dtype=torch.float64)
    values = torch.randn(4000, generator=generator, dtype=torch.float64)
    target = values + sigma * torch.randn(4000, generator=generator, dtype=torch.float64)
    found = calibration(Answers(target, values=values, deviations=factor * sigma))
    assert found.factor == pytest.approx(1 / factor, rel=0.05)
    assert found.calibrated == (factor == 1.0)
    # A central interval of level q covers 2Φ(factor·z) − 1.
    wanted = [2 * stats.norm.cdf(factor * stats.norm.ppf((1 + q) / 2)) - 1 for q in found.said]
    np.testing.assert_allclose(found.happened, wanted, atol=0.03)


def test_what_is_not_sure_of_anything_cannot_be_calibrated() -> None:
    values = from_estimator(LinearRegression(), IRIS.data, IRIS.target)(None, 0).answers(torch.arange(150))
    with pytest.raises(InputError, match="answers without probabilities"):
        calibration(values)
    with pytest.raises(InputError, match="at least 10 to judge"):
        calibration(classes_drawn(12, 1.0, 0))
