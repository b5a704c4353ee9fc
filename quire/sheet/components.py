"""Chapter 21: principal components, against NumPy's decomposition, scikit-learn and Eckart–Young."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.estimators.pca import PCA
from quire.functional.components import (
    Components,
    components_for_share,
    explained_variance_ratio,
    pca_covariance,
    pca_randomised,
    pca_svd,
    project,
    reconstruct,
)
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _rows(n: int, singular_values: Tensor, offset: float = 0.0) -> Tensor:
    """Rows whose centred singular values are known, in random directions."""
    d = len(singular_values)
    left = torch.randn(n, d, dtype=torch.float64)
    left = torch.linalg.qr(left - left.mean(0))[0]
    right = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    return (left * singular_values) @ right.mT + offset


def _falling(first: float, last: float, d: int) -> Tensor:
    return torch.linspace(first, last, d, dtype=torch.float64)


def _oracle(x: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and axes of the centred rows, by NumPy; the largest entry of each axis is positive."""
    _, values, axes = np.linalg.svd(x.numpy() - x.numpy().mean(0), full_matrices=False)
    largest = np.take_along_axis(axes, np.abs(axes).argmax(1, keepdims=True), 1)
    return torch.from_numpy(values), torch.from_numpy(axes * np.sign(largest))


def _apart(found: Components, x: Tensor, k: int) -> float:
    values, axes = _oracle(x)
    variances = values.square() / (len(x) - 1)
    return worst(
        gap(found.mean, x.mean(0)),
        gap(found.axes, axes[:k]),
        gap(found.variances / variances[:k], torch.ones(k)),
        gap(found.total_variance, variances.sum()),
    )


def _uncentred(x: Tensor, k: int, **options: Any) -> Components:
    """The axes of Σ xxᵀ, which begin with the mean."""
    values, vectors = torch.linalg.eigh(x.mT @ x / (len(x) - 1))
    return Components(x.mean(0), vectors.mT.flip(0)[:k], values.flip(0)[:k], values.sum())


def _largest_last(x: Tensor, k: int, **options: Any) -> Components:
    """Eigenvalues as `eigh` gives them: the first are the smallest."""
    values, vectors = torch.linalg.eigh(torch.cov(x.mT))
    return Components(x.mean(0), vectors.mT[:k], values[:k], values.sum())


def _one_pass(x: Tensor, k: int) -> Components:
    """From one scatter alone, whatever its rounding hides."""
    values, vectors = torch.linalg.eigh(torch.cov(x.mT))
    return Components(x.mean(0), vectors.mT.flip(0)[:k], values.flip(0)[:k].clamp_min(0), values.sum())


@entry(
    "classical/pca",
    "Principal components: eigenvectors of the covariance",
    r"\Sigma = \frac{1}{N-1} \sum_n (x_n - \mu)(x_n - \mu)^\top "
    r"= \frac{1}{N-1} \Bigl( \sum_n z_n z_n^\top - \tfrac1N t t^\top \Bigr), \quad z_n = x_n - s, \quad "
    r"t = \sum_n z_n; \qquad \Sigma v_k = \lambda_k v_k, \quad \lambda_1 \ge \lambda_2 \ge \dots",
    code=pca_covariance,
    wrong=_one_pass,
    tolerance=1e-6,
)
def _covariance(pca: Code) -> float:
    easy = _rows(300, _falling(9, 1, 7), offset=100.0)
    far = _rows(2000, _falling(9, 1, 5), offset=1e6)
    steep = _rows(300, torch.logspace(1, -8, 7, dtype=torch.float64))
    return worst(
        _apart(pca(easy, 3), easy, 3),
        _apart(pca(easy, 7), easy, 7),
        _apart(pca(far, 2), far, 2),
        # A scatter squares the singular values: the smallest of these is lost in one pass.
        _apart(pca(steep, 7), steep, 7),
    )


@entry(
    "classical/pca-svd",
    "Principal components: singular vectors of the centred rows",
    r"X - \mathbf 1 \mu^\top = U \operatorname{diag}(\sigma) V^\top, \quad "
    r"\lambda_k = \frac{\sigma_k^2}{N-1}, \quad v_k = V_{\cdot k}",
    code=(pca_svd, PCA),
    wrong=(_uncentred, lambda k: _Uncentred(k)),
    tolerance=1e-6,
)
def _svd(pca: Code, estimator: Code) -> float:
    from sklearn.decomposition import PCA as Peer

    x = _rows(200, _falling(9, 1, 6), offset=3.0)
    errors = [_apart(pca(x, 4), x, 4)]
    for rows in (x, x.mT.contiguous()):
        ours, peer = estimator(4).fit(rows.numpy()), Peer(4, svd_solver="full").fit(rows.numpy())
        errors += [
            gap(torch.from_numpy(ours.components_), torch.from_numpy(peer.components_)),
            gap(ours.singular_values_, peer.singular_values_),
            gap(ours.noise_variance_, peer.noise_variance_),
        ]
    return worst(*errors)


class _Uncentred:
    """Without taking the mean off."""

    def __init__(self, k: int) -> None:
        self.k = k

    def fit(self, x: Any) -> _Uncentred:
        _, values, axes = np.linalg.svd(x, full_matrices=False)
        self.components_, self.singular_values_ = axes[: self.k], values[: self.k]
        self.noise_variance_ = float((values[self.k :] ** 2).mean()) / (len(x) - 1)
        return self


@entry(
    "classical/pca-randomised",
    "Principal components: randomised",
    r"Q = \operatorname{orth}(S^q \Omega), \quad \Omega \in \mathbb R^{D \times (k+p)} \text{ random}, \quad "
    r"S \approx S Q (Q^\top S Q)^{-1} Q^\top S; \qquad \text{error} \sim "
    r"\bigl(\lambda_{k+p+1}/\lambda_k\bigr)^{q}",
    code=pca_randomised,
    wrong=_largest_last,
    tolerance=1e-6,
)
def _randomised(pca: Code) -> float:
    spectrum = torch.cat([_falling(50, 30, 4), _falling(5, 1, 36)])
    x = _rows(120, spectrum, offset=2.0)
    values, _ = _oracle(x)
    errors = []
    for q in (0, 1, 3):
        found = pca(x, 4, oversamples=4, power_iterations=q)
        short = 1 - found.variances.sum() / (values[:4].square().sum() / 119)
        errors.append(float(short))
    falls = errors[0] > errors[1] > errors[2] > -1e-12  # never more than there is, and nearer with each pass
    return worst(require(falls), _apart(pca(x, 4, oversamples=4, power_iterations=9), x, 4))


def _picture() -> Figure:
    from sklearn.datasets import load_digits

    from quire.report.style import figure

    found = pca_covariance(torch.from_numpy(load_digits().data), 64)
    ratio = explained_variance_ratio(found.variances, found.total_variance)
    fig = figure(9.4, 3.4)
    each, together = fig.subplots(1, 2)
    each.bar(range(1, 65), ratio.numpy())
    each.set(title="digits: explained by each component", xlabel="component", ylabel="share of the variance")
    together.plot(range(1, 65), ratio.cumsum(0).numpy())
    together.axhline(0.9, linestyle=":", color="grey")
    together.set(title="explained together", xlabel="components", ylabel="share of the variance")
    return fig


@entry(
    "classical/explained-variance",
    "Explained variance",
    r"\rho_k = \frac{\lambda_k}{\sum_d \lambda_d}, \quad \sum_k \lambda_k = \operatorname{tr} \Sigma; \qquad "
    r"K(\alpha) = \min\Bigl\{K : \sum_{k \le K} \rho_k > \alpha\Bigr\}",
    code=(explained_variance_ratio, components_for_share),
    wrong=(
        lambda variances, total: variances / variances.sum(),
        lambda variances, total, share: int((variances / total > 1 - share).sum()),
    ),
    tolerance=1e-9,
    picture=_picture,
)
def _explained(ratio: Code, number: Code) -> float:
    from sklearn.decomposition import PCA as Peer

    x = _rows(150, _falling(9, 1, 8), offset=1.0)
    found = pca_svd(x, 5)
    errors = [
        gap(found.total_variance, torch.cov(x.mT).trace()),
        gap(
            ratio(found.variances, found.total_variance),
            torch.from_numpy(Peer(5, svd_solver="full").fit(x.numpy()).explained_variance_ratio_),
        ),
    ]
    every = pca_svd(x, 8)
    for share in (0.3, 0.7, 0.95):
        peer = Peer(share, svd_solver="full").fit(x.numpy())
        errors.append(require(number(every.variances, every.total_variance, share) == peer.n_components_))
    return worst(*errors)


def _from_origin(x: Tensor, mean: Tensor, axes: Tensor) -> Tensor:
    return x @ axes.mT


@entry(
    "classical/pca-inverse",
    "Projection and its inverse: the nearest plane",
    r"h = V(x - \mu), \quad \hat x = V^\top h + \mu; \qquad "
    r"\sum_n \lVert x_n - \hat x_n \rVert^2 = (N-1) \sum_{k > K} \lambda_k "
    r"= \min_{\operatorname{rank} \le K} \lVert (X - \mathbf 1\mu^\top) - Y \rVert_F^2",
    code=(project, reconstruct),
    wrong=(_from_origin, lambda scores, mean, axes: scores @ axes),
    tolerance=1e-9,
)
def _inverse(forward: Code, back: Code) -> float:
    x = _rows(100, _falling(9, 1, 6), offset=4.0)
    found, (values, _) = pca_svd(x, 2), _oracle(x)
    scores = forward(x, found.mean, found.axes)
    distance = float((x - back(scores, found.mean, found.axes)).square().sum())
    rivals = []
    for _ in range(50):  # other planes through the mean, near and far
        step = float(torch.rand(())) ** 4
        axes = torch.linalg.qr((found.axes + step * torch.randn(2, 6, dtype=torch.float64)).mT)[0].mT
        other = back(forward(x, found.mean, axes), found.mean, axes)
        rivals.append(float((x - other).square().sum()))
    whole = pca_svd(x, 6)
    returned = back(forward(x, whole.mean, whole.axes), whole.mean, whole.axes)
    return worst(
        gap(distance, values[2:].square().sum()),
        require(distance <= min(rivals)),
        gap(scores.mean(0), torch.zeros(2)),
        gap(scores.mT @ scores, values[:2].square().diag()),
        gap(returned, x),
    )
