"""Bagging: the members, their average, out-of-bag rows and intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import make_moons

from quire.errors import InputError
from quire.estimators import BaggingEnsemble, MLPClassifier, MLPRegressor
from quire.tasks.bagging import bootstrap_counts


def fixed(epochs: int, **options: object) -> dict[str, object]:
    return {"max_iter": epochs, "n_iter_no_change": epochs, "random_state": 0, **options}


def noisy_moons(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    X, y = make_moons(rows, noise=0.35, random_state=seed)
    return np.hstack([X, np.random.default_rng(seed).normal(size=(rows, 10))]), y


def wave(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (rows, 1))
    return x, 100 + 10 * np.sin(3 * x[:, 0]) + 3 * rng.normal(size=rows)


def test_counts_are_a_bootstrap() -> None:
    counts = bootstrap_counts(200, 60, seed=3)
    assert counts.shape == (200, 60)
    assert (counts.sum(0) == 200).all()
    # A row is left out with probability (1 − 1/N)^N ≈ 1/e; 12000 cells give a standard error of 0.4%.
    assert float((counts == 0).float().mean()) == pytest.approx((1 - 1 / 200) ** 200, abs=0.016)
    assert torch.equal(counts, bootstrap_counts(200, 60, seed=3))
    assert not torch.equal(counts[:, 0], counts[:, 1])


@pytest.fixture(scope="module")
def moons() -> BaggingEnsemble:
    X, y = noisy_moons(150, 0)
    return BaggingEnsemble(
        n_estimators=12, hidden_layer_sizes=(32,), **fixed(80, learning_rate_init=5e-3)
    ).fit(X, y)


def test_prediction_is_the_average_of_the_members(moons: BaggingEnsemble) -> None:
    X, _ = noisy_moons(50, 1)
    scaled = torch.tensor((X - moons.scaling_.mean) / moons.scaling_.scale)
    each = torch.stack([member.double()(scaled).softmax(1) for member in moons.members_]).detach()
    assert len(moons.members_) == 12
    np.testing.assert_allclose(moons.predict_proba(X), each.mean(0), atol=1e-9)
    np.testing.assert_allclose(moons.predict(X, mode="mean"), each.mean(0), atol=1e-9)
    np.testing.assert_allclose(moons.predict_std(X), each.numpy().std(0), atol=1e-9)
    np.testing.assert_allclose(moons.predict_log_proba(X), each.mean(0).log(), atol=1e-9)
    assert float(each.numpy().std(0).max()) > 0.1, "the members differ"
    assert moons.predict(X, mode="interval", level=0.95).sum(1).max() == 2
    assert set(moons.predict(X, mode="sample")) == {0, 1}


def test_better_than_one_net(moons: BaggingEnsemble) -> None:
    X, y = noisy_moons(3000, 2)
    options = fixed(80, learning_rate_init=5e-3)
    train = noisy_moons(150, 0)
    alone = [
        MLPClassifier((32,), **{**options, "random_state": seed}).fit(*train).score(X, y) for seed in range(4)
    ]
    together = moons.score(X, y)
    assert together > np.mean(alone) + 0.01
    # The out-of-bag score is an honest forecast: 150 rows give a standard error of about 3%.
    assert moons.oob_score_ == pytest.approx(together, abs=0.1)
    assert moons.score(*train) > moons.oob_score_ + 0.05


def test_a_member_learns_as_it_would_alone() -> None:
    # Without bootstrap, one member is an MLPClassifier with the same weights at the start; two nets
    # trained together do not disturb each other.
    X, y = noisy_moons(64, 0)
    two = BaggingEnsemble(n_estimators=2, bootstrap=False, hidden_layer_sizes=(8,), **fixed(5)).fit(X, y)
    start = BaggingEnsemble(
        n_estimators=2, bootstrap=False, hidden_layer_sizes=(8,), **fixed(1, learning_rate_init=1e-30)
    ).fit(X, y)
    scaled = torch.tensor((X - two.scaling_.mean) / two.scaling_.scale, dtype=torch.float32)
    for member, initial in zip(two.members_, start.members_, strict=True):
        optimiser = torch.optim.Adam(initial.parameters(), lr=1e-3)
        for _ in range(5):  # 64 rows are one batch, so their order does not matter
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(initial(scaled), torch.tensor(y)).backward()
            optimiser.step()
        for ours, theirs in zip(member.parameters(), initial.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert np.isnan(two.oob_score_)


def test_counts_weigh_the_losses() -> None:
    # One full-batch step of SGD from known weights on a linear member: w ← w − η·Σ c_n ∇ℓ_n / N.
    X, y = noisy_moons(20, 0)
    options = {"solver": "sgd", "momentum": 0.0, "hidden_layer_sizes": (), "n_estimators": 2}
    start = BaggingEnsemble(**options, **fixed(1, learning_rate_init=1e-30)).fit(X, y)
    moved = BaggingEnsemble(**options, **fixed(1, learning_rate_init=0.1)).fit(X, y)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    counts = bootstrap_counts(20, 2, seed).numpy()
    scaled = (X - start.scaling_.mean) / start.scaling_.scale
    for m, (before, after) in enumerate(zip(start.members_, moved.members_, strict=True)):
        weight = before.head.weight.detach().double().numpy()
        logits = scaled @ weight.T
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        error = counts[:, m : m + 1] * (p - np.eye(2)[y]) / 20
        np.testing.assert_allclose(after.head.weight.detach(), weight - 0.1 * error.T @ scaled, atol=1e-6)


def test_regression_in_the_units_of_the_target() -> None:
    X, y = wave(400, 0)
    new, truth = wave(3000, 1)
    options = fixed(60, learning_rate_init=1e-2)
    model = BaggingEnsemble("regression", n_estimators=15, hidden_layer_sizes=(24,), **options).fit(X, y)
    # The best possible R² is 1 − 9/Var(y).
    assert model.score(new, truth) > 1 - 9 / truth.var() - 0.03
    assert model.oob_score_ == pytest.approx(model.score(new, truth), abs=0.06)
    for level in (0.5, 0.9):
        low, high = model.predict(new, mode="interval", level=level)
        assert np.mean((low <= truth) & (truth <= high)) == pytest.approx(level, abs=0.05)
    # Away from the data the members disagree, and the interval knows it.
    assert model.predict_std([[4.0]])[0] > 3 * model.predict_std([[0.0]])[0]
    width = np.subtract(*model.predict([[0.0], [4.0]], mode="interval")[::-1])
    assert width[1] > 1.3 * width[0]


def test_regression_better_than_one_net() -> None:
    def nuisance(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        X, y = wave(rows, seed)
        return np.hstack([X, np.random.default_rng(seed).normal(size=(rows, 8))]), y

    train, test = nuisance(150, 0), nuisance(2000, 1)
    options = fixed(60, learning_rate_init=1e-2, hidden_layer_sizes=(24,))
    model = BaggingEnsemble("regression", n_estimators=12, **options).fit(*train)
    alone = [MLPRegressor(**{**options, "random_state": seed}).fit(*train).score(*test) for seed in range(4)]
    assert model.score(*test) > np.mean(alone) + 0.02


def test_several_outputs() -> None:
    X, y = wave(60, 0)
    both = np.stack([y, -y], 1)
    model = BaggingEnsemble("regression", n_estimators=3, **fixed(2)).fit(X, both)
    assert model.predict(X).shape == model.predict_std(X).shape == (60, 2)
    assert model.predict(X, mode="interval")[0].shape == (60, 2)


def test_messages() -> None:
    X, y = noisy_moons(20, 0)
    with pytest.raises(InputError, match=r"unknown task 'regresion'(.|\n)*did you mean 'regression'"):
        BaggingEnsemble("regresion").fit(X, y)
    with pytest.raises(InputError, match="n_estimators is 0\n  expected: an integer >= 1"):
        BaggingEnsemble(n_estimators=0).fit(X, y)
