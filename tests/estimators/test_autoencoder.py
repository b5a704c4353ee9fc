"""The autoencoder as a transformer: scikit-learn's checks, forms and devices, and what each kind learns."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from torch import nn

from quire.errors import InputError
from quire.estimators.autoencoder import KINDS, Autoencoder

# Few epochs are enough here; that they are few is said by a warning.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]


def fixed(epochs: int, **options: Any) -> dict[str, Any]:
    """Train for exactly this many epochs."""
    return {"max_iter": epochs, "n_iter_no_change": epochs, "random_state": 0, **options}


@pytest.fixture(scope="module")
def digits() -> Any:
    X, y = load_digits(return_X_y=True)
    return X[:600], y[:600]


# Forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_give_tensors(kind: Any, device: str, digits: Any) -> None:
    X = digits[0][:100, 10:20]
    tensor = torch.tensor(X, device=device, requires_grad=True)
    model = Autoencoder(3, kind, hidden_layer_sizes=(8,), **fixed(2)).fit(tensor)
    codes = model.transform(tensor)
    assert isinstance(codes, torch.Tensor)
    assert codes.shape == (100, 3)
    assert codes.device == tensor.device
    assert codes.dtype == torch.float64
    assert not codes.requires_grad
    back = model.inverse_transform(codes)
    assert back.device == tensor.device
    assert back.shape == (100, 10)
    from_array = model.transform(X)
    assert isinstance(from_array, np.ndarray)
    np.testing.assert_allclose(from_array, codes.cpu().numpy(), atol=1e-6)
    np.testing.assert_allclose(model.inverse_transform(from_array), back.cpu().numpy(), atol=1e-5)
    assert model.transform(tensor.float()).dtype == torch.float32
    assert model.inverse_transform(codes.float()).dtype == torch.float32
    assert model.transform(X.astype(np.float32)).dtype == np.float32
    if device == "cpu":
        arrays = clone(model).fit_transform(X)
        np.testing.assert_allclose(arrays, from_array, atol=1e-12)


def test_names_and_pickles(digits: Any) -> None:
    frame = pd.DataFrame(digits[0][:50, 10:14], columns=list("abcd"))
    model = Autoencoder(2, **fixed(1)).fit(frame)
    assert model.feature_names_in_.tolist() == ["a", "b", "c", "d"]
    assert model.get_feature_names_out().tolist() == ["autoencoder0", "autoencoder1"]
    with pytest.raises(ValueError, match="feature names should match"):
        model.transform(frame[["d", "c", "b", "a"]])
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.transform(frame), model.transform(frame))
    assert model.set_output(transform="pandas").transform(frame).columns.tolist()[0] == "autoencoder0"


def test_pipeline_and_search(digits: Any) -> None:
    X, y = digits
    quick = fixed(20, learning_rate_init=5e-3)
    pipe = make_pipeline(Autoencoder(hidden_layer_sizes=(32,), **quick), LogisticRegression(max_iter=2000))
    search = GridSearchCV(pipe, {"autoencoder__n_components": [1, 16]}, cv=2).fit(X, y)
    assert search.best_params_ == {"autoencoder__n_components": 16}
    assert search.best_score_ > 0.7


def test_random_state_decides_everything(digits: Any) -> None:
    X = digits[0]
    state = torch.get_rng_state()
    first, second, third = (
        Autoencoder(3, "denoising", hidden_layer_sizes=(8,), **fixed(2, random_state=seed)).fit_transform(X)
        for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, third)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are left alone"


# What is learned ------------------------------------------------------------------------------


def test_codes_and_rows_by_the_weights(digits: Any) -> None:
    X = digits[0]
    model = Autoencoder(4, hidden_layer_sizes=(8,), activation="tanh", **fixed(3)).fit(X)
    layers = [layer for layer in model.model_.modules() if isinstance(layer, nn.Linear)]
    (w1, b1), (w2, b2), (v1, c1), (v2, c2) = (
        (layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()) for layer in layers
    )
    scaled = (X - model.scaling_.mean) / model.scaling_.scale
    codes = np.tanh(scaled @ w1.T + b1) @ w2.T + b2
    np.testing.assert_allclose(model.transform(X), codes, atol=1e-9)
    back = np.tanh(codes @ v1.T + c1) @ v2.T + c2
    rows = back * model.scaling_.scale + model.scaling_.mean
    np.testing.assert_allclose(model.inverse_transform(codes), rows, atol=1e-9)
    wanted = 1 - np.square(back - scaled).sum() / np.square(scaled).sum()
    assert model.score(X) == pytest.approx(wanted, abs=1e-9)
    assert model.n_iter_ == len(model.loss_curve_) == 3
    assert model.n_components_ == 4


def test_linear_reaches_the_principal_subspace() -> None:
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 2)) @ random.normal(size=(2, 6)) + 0.3 * random.normal(size=(300, 6)) + 5
    scaled = (X - X.mean(0)) / X.std(0)
    peer = PCA(2).fit(scaled)
    model = Autoencoder(2, "linear", **fixed(150, learning_rate_init=1e-2, batch_size=30)).fit(X)
    assert model.score(X) == pytest.approx(peer.explained_variance_ratio_.sum(), abs=2e-3)
    decoder = model.model_.decoder.layers[0].weight.detach().double().numpy()
    spanned = np.linalg.qr(decoder)[0]
    cosines = np.linalg.svd(peer.components_ @ spanned, compute_uv=False)
    assert cosines.min() > 0.999
    assert len([layer for layer in model.model_.modules() if isinstance(layer, nn.Linear)]) == 2


def test_each_kind_differs_from_the_plain_one_as_it_should(digits: Any) -> None:
    X = digits[0]
    options = fixed(25, hidden_layer_sizes=(64,), learning_rate_init=5e-3)
    linear, plain = (Autoencoder(8, kind, **options).fit(X) for kind in ("linear", "plain"))
    assert plain.score(X) > linear.score(X) + 0.1
    inputs = torch.tensor((X - plain.scaling_.mean) / plain.scaling_.scale)
    same: dict[str, Any] = {"tied": True, "code_activation": "sigmoid"}
    free, contractive = (
        Autoencoder(8, "contractive", penalty=penalty, **same, **options).fit(X) for penalty in (0, 5)
    )
    slopes = [model.model_.double().contraction(inputs).mean().item() for model in (free, contractive)]
    assert slopes[1] < 0.5 * slopes[0]
    loose, sparse = (Autoencoder(32, "sparse", penalty=penalty, **options).fit(X) for penalty in (0, 1.0))
    active = [(model.transform(X) > 0.01).mean() for model in (loose, sparse)]
    assert active[1] < 0.7 * active[0]
    copies, restores = (
        Autoencoder(32, "denoising", noise="masking", amount=amount, **options).fit(X) for amount in (0, 0.5)
    )
    damaged = np.where(np.random.default_rng(0).random(X.shape) < 0.5, X.mean(0), X)
    errors = [
        np.square((m.inverse_transform(m.transform(damaged)) - X) / m.scaling_.scale).mean()
        for m in (copies, restores)
    ]
    assert errors[1] < 0.8 * errors[0]


def test_flat_images_by_convolutions(digits: Any) -> None:
    X = digits[0]
    model = Autoencoder(6, image_shape=(1, 8, 8), hidden_layer_sizes=(), **fixed(15, learning_rate_init=1e-2))
    codes = model.fit_transform(X)
    assert any(isinstance(layer, nn.Conv2d) for layer in model.model_.modules())
    assert model.inverse_transform(codes).shape == X.shape
    assert model.score(X) > 0.4


def test_early_stopping_keeps_the_best(digits: Any) -> None:
    X = digits[0][:120]
    model = Autoencoder(
        16, max_iter=400, early_stopping=True, n_iter_no_change=5, learning_rate_init=1e-2, random_state=0
    ).fit(X)
    losses = model.validation_losses_
    assert len(losses) == model.n_iter_ < 400
    assert np.argmin(losses) < len(losses) - 1


def test_score_of_rows_that_do_not_vary() -> None:
    X = np.ones((6, 3))
    model = Autoencoder(1, **fixed(1)).fit(X)
    assert model.score(X) == 1.0
    shifted = Autoencoder(1, "linear", standardize=False, **fixed(1)).fit(X + np.arange(6)[:, None])
    scaled = shifted.inverse_transform(shifted.transform(X))
    wanted = 1 - np.square(scaled - X).sum() / np.square(X - shifted.mean_).sum()
    assert shifted.score(X) == pytest.approx(wanted, abs=1e-9)


# Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sparce"}, "unknown kind of autoencoder 'sparce'(.|\n)*did you mean 'sparse'"),
        ({"n_components": 0}, "n_components is 0\n  expected: an integer >= 1"),
        ({"penalty": -1.0}, "penalty is -1.0"),
        ({"amount": -1.0}, "amount is -1.0"),
        ({"kind": "denoising", "noise": "masking", "amount": 2.0}, "amount is 2.0"),
        ({"noise": "gauss"}, "unknown kind of noise 'gauss'"),
        ({"tied": "yes"}, "tied is 'yes'\n  expected: True, False or 'auto'"),
        ({"kind": "linear", "code_activation": "relu"}, "code_activation is 'relu'"),
        ({"code_activation": "rleu"}, "unknown activation 'rleu'"),
        ({"image_shape": (1, 3, 3)}, r"image_shape=\(1, 3, 3\) for kind='plain' and rows of 4 features"),
        ({"kind": "linear", "image_shape": (1, 2, 2)}, "a kind that is not linear"),
        ({"hidden_layer_sizes": (8, 0)}, r"hidden_layer_sizes is \(8, 0\)"),
        ({"max_iter": 0}, "max_iter is 0"),
    ],
)
def test_wrong_parameters(options: dict[str, Any], message: str) -> None:
    model = Autoencoder(**options)  # the constructor only stores
    with pytest.raises(InputError, match=message):
        model.fit(np.eye(4))


def test_wrong_rows_and_codes() -> None:
    with pytest.raises(NotFittedError):
        Autoencoder().inverse_transform(np.eye(2))
    with pytest.raises(InputError, match="early_stopping with 1 sample"):
        Autoencoder(early_stopping=True).fit(np.ones((1, 3)))
    model = Autoencoder(2, **fixed(1)).fit(np.random.default_rng(0).normal(size=(9, 4)))
    with pytest.raises(InputError, match=r"codes of shape \(2, 3\)\n  expected: a batch of shape \(B, 2\)"):
        model.inverse_transform(np.ones((2, 3)))
    with pytest.raises(InputError, match=r"codes of shape \(3,\)"):
        model.inverse_transform(torch.ones(3))
    with pytest.raises(ValueError, match="contains NaN"):
        model.inverse_transform([[np.nan, 0.0]])
