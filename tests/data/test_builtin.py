"""Built-in sets: the same rows each time, the right ones, and simulated ones that follow their truth."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import datasets
from sklearn.linear_model import LogisticRegression

from quire.data.builtin import BUILTIN, WAVE_NOISE, builtin, heteroscedastic_truth, wave_truth
from quire.data.types import read_numbers
from quire.errors import InputError


@pytest.mark.parametrize("name", BUILTIN)
def test_same_rows_each_time(name: str) -> None:
    table = builtin(name)
    assert table.data.equals(builtin(name).data)
    assert table.source == f"{name} (built in)"
    assert table.lines.tolist() == list(range(1, len(table) + 1))


@pytest.mark.parametrize("name", ["digits", "iris", "wine", "breast_cancer", "diabetes"])
def test_scikit_learn_sets(name: str) -> None:
    arguments = {"scaled": False} if name == "diabetes" else {}
    data = getattr(datasets, f"load_{name}")(**arguments)
    table = builtin(name)
    values = np.stack([read_numbers(table, column) for column in table.names[:-1]], 1)
    np.testing.assert_array_equal(values, data.data)
    target = table.column(table.names[-1]).to_pylist()
    numbers_only = name in ("digits", "diabetes")
    assert target == (data.target if numbers_only else data.target_names[data.target]).tolist()


def columns(name: str) -> tuple[np.ndarray, np.ndarray]:
    table = builtin(name)
    return read_numbers(table, "x"), read_numbers(table, "y")


def test_heteroscedastic_follows_its_truth() -> None:
    """Standardised by the truth the residuals are N(0, 1): mean and variance within 4 standard errors,
    in the lower and the upper half of x alike."""
    x, y = columns("heteroscedastic")
    mean, std = heteroscedastic_truth(x)
    z = (y - mean) / std
    for part in (z[x < 2], z[x >= 2]):
        assert abs(part.mean()) < 4 / len(part) ** 0.5
        assert abs(part.var() - 1) < 4 * (2 / len(part)) ** 0.5
    assert heteroscedastic_truth(np.array([0.0, 4.0]))[1].tolist() == [0.1, 0.7]


def test_wave_follows_its_truth() -> None:
    x, y = columns("wave")
    z = (y - wave_truth(x)) / WAVE_NOISE
    assert abs(z.mean()) < 4 / len(z) ** 0.5
    assert abs(z.var() - 1) < 4 * (2 / len(z)) ** 0.5


def test_two_clouds_have_a_logistic_posterior() -> None:
    """Unpenalised logistic regression finds the weights (2, 1) and no intercept, within 4 standard errors
    from the information matrix Σ p(1−p) x̃x̃ᵀ."""
    table = builtin("two_clouds")
    X = np.stack([read_numbers(table, name) for name in ("x", "y")], 1)
    right = np.array(table.column("cloud").to_pylist()) == "right"
    model = LogisticRegression(C=1e10).fit(X, right)
    p = model.predict_proba(X)[:, 1]
    X1 = np.column_stack([X, np.ones(len(X))])
    errors = np.sqrt(np.diag(np.linalg.inv((X1 * (p * (1 - p))[:, None]).T @ X1)))
    found = np.array([*model.coef_[0], model.intercept_[0]])
    assert (np.abs(found - [2, 1, 0]) < 4 * errors).all()


def test_unknown_name() -> None:
    with pytest.raises(InputError, match=r"unknown built-in data set 'digit'(.|\n)*did you mean 'digits'\?"):
        builtin("digit")
