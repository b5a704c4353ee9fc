"""Perceptrons: what they learn, how they predict, and that the trainer does what the parameters say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from torch import nn

from quire.errors import InputError, NonFiniteError
from quire.estimators import MLPClassifier, MLPRegressor
from quire.estimators.network import hold_out


def fixed(epochs: int, **options: object) -> dict[str, object]:
    """Train for exactly this many epochs."""
    return {"max_iter": epochs, "n_iter_no_change": epochs, "random_state": 0, **options}


@pytest.fixture(scope="module")
def digits() -> list[np.ndarray]:
    X, y = load_digits(return_X_y=True)
    return train_test_split(X, y, test_size=0.25, random_state=0, stratify=y)


@pytest.fixture(scope="module")
def classifier(digits: list[np.ndarray]) -> MLPClassifier:
    X, _, y, _ = digits
    return MLPClassifier((32,), **fixed(8, learning_rate_init=5e-3)).fit(X, y)


def test_learns_digits(classifier: MLPClassifier, digits: list[np.ndarray]) -> None:
    _, X, _, y = digits
    assert classifier.score(X, y) > 0.93
    assert classifier.n_iter_ == len(classifier.loss_curve_) == 8
    assert classifier.best_loss_ == min(classifier.loss_curve_)
    assert classifier.loss_curve_[-1] < 0.2 * classifier.loss_curve_[0]
    assert [w.shape for w in classifier.coefs_] == [(64, 32), (32, 10)]
    assert [b.shape for b in classifier.intercepts_] == [(32,), (10,)]
    assert isinstance(classifier.model_, nn.Module)


def test_probabilities_are_those_of_the_weights(classifier: MLPClassifier, digits: list[np.ndarray]) -> None:
    X = digits[1]
    hidden = (X - classifier.scaling_.mean) / classifier.scaling_.scale
    hidden = np.maximum(hidden @ classifier.coefs_[0] + classifier.intercepts_[0], 0)
    logits = hidden @ classifier.coefs_[1] + classifier.intercepts_[1]
    odds = np.exp(logits - logits.max(1, keepdims=True))
    expected = odds / odds.sum(1, keepdims=True)
    np.testing.assert_allclose(classifier.predict_proba(X), expected, atol=1e-9)
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(X)), expected, atol=1e-9)


def test_modes_of_a_classifier(classifier: MLPClassifier, digits: list[np.ndarray]) -> None:
    X = digits[1]
    probabilities = classifier.predict_proba(X)
    np.testing.assert_array_equal(classifier.predict(X), classifier.classes_[probabilities.argmax(1)])
    np.testing.assert_allclose(classifier.predict(X, mode="mean"), probabilities)
    sets = classifier.predict(X, mode="interval", level=0.99)
    assert sets.dtype == bool
    inside = (probabilities * sets).sum(1)
    smallest = np.where(sets, probabilities, np.inf).min(1)
    assert (inside >= 0.99).all()
    assert (inside - smallest < 0.99).all(), "a class could be left out"
    torch.manual_seed(0)
    many = np.repeat(X[:1], 4000, axis=0)
    flat = MLPClassifier((4,), **fixed(1)).fit(digits[0], digits[2])  # hardly trained, so unsure
    drawn = np.bincount(flat.predict(many, mode="sample"), minlength=10) / 4000
    expected = flat.predict_proba(X[:1])[0]
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / 4000)
    with pytest.raises(InputError, match="unknown prediction mode 'median'"):
        classifier.predict(X, mode="median")


def test_random_state_decides_everything(digits: list[np.ndarray]) -> None:
    X, other, y, _ = digits
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second, third = (
        MLPClassifier((8,), **fixed(2, random_state=seed, dropout=0.2)).fit(X, y).predict_proba(other)
        for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, third)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are left alone"


def test_number_of_threads_is_given_back(digits: list[np.ndarray]) -> None:
    X, _, y, _ = digits
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        MLPClassifier((4,), **fixed(1)).fit(X, y)
        assert torch.get_num_threads() == 2
        with pytest.raises(NonFiniteError):
            MLPRegressor((4,), **fixed(5, solver="sgd", learning_rate_init=1e30)).fit(X, y)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_alpha_shrinks_weights(digits: list[np.ndarray]) -> None:
    X, _, y, _ = digits
    free, held = (
        MLPClassifier((8,), **fixed(8, alpha=alpha, learning_rate_init=1e-2)).fit(X, y) for alpha in (0, 30)
    )
    assert np.abs(held.coefs_[1]).mean() < 0.3 * np.abs(free.coefs_[1]).mean()


def test_steps_of_sgd_with_alpha_by_hand() -> None:
    # Steps on the whole batch: w ← w − η(∂loss/∂w + alpha/B·w), b ← b − η·∂loss/∂b.
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 3)), np.array([0] * 7 + [1] * 4 + [2])
    options = {"solver": "sgd", "momentum": 0.0, "standardize": False, "alpha": 6.0}
    start = MLPClassifier((), **fixed(1, learning_rate_init=1e-30, **options)).fit(X, y)
    weight, bias = start.coefs_[0].astype(float), start.intercepts_[0].astype(float)
    for _ in range(3):
        logits = X @ weight + bias
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        error = (p - np.eye(3)[y]) / 12
        weight = weight - 0.5 * (X.T @ error + 6 / 12 * weight)
        bias = bias - 0.5 * error.sum(0)
    model = MLPClassifier((), **fixed(3, learning_rate_init=0.5, **options)).fit(X, y)
    np.testing.assert_allclose(model.coefs_[0], weight, atol=1e-6)
    np.testing.assert_allclose(model.intercepts_[0], bias, atol=1e-6)


def test_stops_on_a_plateau(digits: list[np.ndarray]) -> None:
    X, _, y, _ = digits
    model = MLPClassifier((16,), max_iter=60, tol=0.05, n_iter_no_change=2, random_state=0).fit(X, y)
    losses = model.loss_curve_
    assert model.n_iter_ == len(losses) < 60
    assert min(losses[:-2]) - min(losses[-2:]) < 0.05
    with pytest.warns(ConvergenceWarning, match="still improved after max_iter=2 epochs"):
        MLPClassifier((16,), max_iter=2, n_iter_no_change=1, random_state=0).fit(X, y)


def test_early_stopping_keeps_the_best_weights(digits: list[np.ndarray]) -> None:
    X, _, y, _ = digits
    noisy = np.where(np.random.default_rng(0).random(len(y)) < 0.4, (y + 1) % 10, y)
    model = MLPClassifier(
        (64,), max_iter=60, early_stopping=True, n_iter_no_change=4, learning_rate_init=5e-3, random_state=0
    ).fit(X, noisy)
    losses = model.validation_losses_
    assert len(losses) == model.n_iter_ < 60
    assert np.argmin(losses) < len(losses) - 1


@pytest.mark.parametrize(("share", "rows"), [(0.1, 20), (0.4, 80)])
def test_validation_fraction_is_the_share_that_is_held_out(share: float, rows: int) -> None:
    X, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 2
    model = MLPClassifier(early_stopping=True, validation_fraction=share)
    held = hold_out(model, {"inputs": torch.tensor(X)}, 0, torch.tensor(y))[1]
    assert held is not None
    assert len(held) == rows


@pytest.mark.parametrize("outputs", [(), (1,), (2,)])
def test_regressor_keeps_the_shape_and_the_units(outputs: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2)) * [1, 1000]
    slope = np.ones((2, *outputs)) / [[1], [1000]] if outputs else np.array([1, 1e-3])
    y = 1e6 + 50 * (X @ slope)
    model = MLPRegressor((16,), **fixed(30, learning_rate_init=1e-2)).fit(X, y)
    assert model.predict(X).shape == y.shape
    assert model.score(X, y) > 0.98
    low, high = model.predict(X, mode="interval")
    assert low.shape == high.shape == y.shape
    assert (low < high).all()
    np.testing.assert_allclose((low + high) / 2, model.predict(X), rtol=1e-9)
    assert model.predict(X, mode="sample").shape == y.shape


def wave(rows: int, seed: int, loud: float) -> tuple[np.ndarray, np.ndarray]:
    """A sine with noise whose deviation grows from 0.1 at the left to `loud` at the right."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, 1))
    deviation = 0.1 * (loud / 0.1) ** ((x[:, 0] + 1) / 2)
    return x, np.sin(3 * x[:, 0]) + deviation * rng.normal(size=rows)


@pytest.mark.parametrize(("noise", "loud"), [("homoscedastic", 0.1), ("heteroscedastic", 0.5)])
def test_intervals_cover_what_they_say(noise: str, loud: float) -> None:
    model = MLPRegressor(
        (32,), noise=noise, max_iter=60, early_stopping=True, learning_rate_init=1e-2, random_state=0
    ).fit(*wave(2000, 1, loud))
    X, y = wave(4000, 2, loud)
    right = X[:, 0] > 0
    for level in (0.5, 0.9):
        low, high = model.predict(X, mode="interval", level=level)
        covered = (low <= y) & (y <= high)
        for part in (right, ~right):
            assert covered[part].mean() == pytest.approx(level, abs=0.06)
        # The deviation of each half is that of the other times √(loud/0.1).
        wider = (high - low)[right].mean() / (high - low)[~right].mean()
        assert wider == pytest.approx((loud / 0.1) ** 0.5, rel=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "lbfgs"}, "solver is 'lbfgs'\n  expected: 'adam' or 'sgd'"),
        ({"hidden_layer_sizes": (8, 0)}, r"hidden_layer_sizes is \(8, 0\)"),
        ({"activation": "rleu"}, "unknown activation 'rleu'(.|\n)*did you mean 'relu'"),
        ({"max_iter": 0}, "max_iter is 0\n  expected: an integer >= 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"learning_rate_init": 0.0}, "learning_rate_init is 0.0\n  expected: a number > 0"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"momentum": 1.0}, r"momentum is 1.0\n  expected: a number in \[0, 1\)"),
        ({"validation_fraction": 1.0}, r"validation_fraction is 1.0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"activation": ["relu"]}, r"unknown activation '\['relu'\]'"),
        ({"device": "gpu"}, "device is 'gpu'\n  expected: 'auto', or a device of this machine"),
        ({"device": "cuda:99"}, "device is 'cuda:99'"),
    ],
)
def test_wrong_parameters(options: dict[str, object], message: str) -> None:
    model = MLPClassifier(**options)  # the constructor only stores
    with pytest.raises(InputError, match=message):
        model.fit([[0.0], [1.0]], [0, 1])


def test_wrong_noise() -> None:
    with pytest.raises(InputError, match="unknown noise 'none'"):
        MLPRegressor(noise="none").fit([[0.0], [1.0]], [0.0, 1.0])


@pytest.mark.parametrize("name", ["logistic", "identity", "tanh", "leaky_relu"])
def test_names_of_activations(name: str) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    assert MLPClassifier((4,), name, **fixed(1)).fit(X, X[:, 0] > 0).predict(X).dtype == bool
