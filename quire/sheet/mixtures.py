"""Chapter 21: Gaussian mixtures by expectation-maximisation, against scikit-learn on the same start."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.estimators.mixture import GaussianMixture
from quire.functional.mixtures import (
    COVARIANCE_TYPES,
    Mixture,
    Moments,
    akaike_information,
    bayesian_information,
    covariance_shape,
    make_mixture,
    mixture_log_densities,
    mixture_moments,
    mixture_parameter_count,
    mixture_responsibilities,
    mixture_update,
)
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]
COMPONENTS, FEATURES = 3, 2


def _rows(count: int = 240) -> Tensor:
    """Three clusters of different shapes that overlap."""
    parts = [
        torch.randn(count // COMPONENTS, FEATURES) @ torch.randn(FEATURES, FEATURES)
        + 2 * torch.randn(FEATURES)
        for _ in range(COMPONENTS)
    ]
    return torch.cat(parts).double() + 5


def _start(x: Tensor, kind: str) -> Mixture:
    shape = covariance_shape(kind, COMPONENTS, FEATURES)
    unit = torch.eye(FEATURES).expand(shape) if len(shape) == 3 else torch.ones(shape)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    return make_mixture(weights, x[[0, 80, 160]], unit.double() * 1.5)


def _as_peer(values: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """Covariances in scikit-learn's shape."""
    plain = values[0] if kind == "tied" else values[:, 0] if kind == "spherical" else values
    return plain.numpy()


def _picture() -> Figure:
    from matplotlib.patches import Ellipse

    from quire.report.style import figure

    torch.manual_seed(2)
    x = _rows(600)
    fig = figure(9.4, 3.6)
    for axes, kind in zip(fig.subplots(1, 4), COVARIANCE_TYPES, strict=True):
        model = GaussianMixture(COMPONENTS, covariance_type=kind, n_init=3, random_state=0, max_iter=300).fit(
            x
        )
        axes.scatter(*x.T, s=4, c=model.predict(x), cmap="viridis", alpha=0.6)
        for mean, covariance in zip(model.means_, _matrices(model), strict=True):
            values, directions = np.linalg.eigh(covariance)
            angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))
            for deviations in (1, 2):
                width, height = 2 * deviations * np.sqrt(values[::-1])
                axes.add_patch(Ellipse(mean, width, height, angle=angle, fill=False, color="black"))
        axes.set(title=f"{kind}, BIC {model.bic(x):.0f}", xlabel="$x_1$", ylabel="$x_2$")
    return fig


def _matrices(model: GaussianMixture) -> list[np.ndarray[Any, Any]]:
    own = model.covariances_
    if model.covariance_type == "full":
        return list(own)
    if model.covariance_type == "tied":
        return [own] * COMPONENTS
    return [np.diag(np.broadcast_to(variance, FEATURES)) for variance in own]


def _without_weights(log_densities: Tensor) -> tuple[Tensor, Tensor]:
    """Responsibilities as if all components were as heavy as each other."""
    shares, likelihood = mixture_responsibilities(log_densities)
    return torch.full_like(shares, 1 / shares.shape[-1]), likelihood


def _about_zero(moments: Moments, like: Mixture, shift: Tensor, floor: Any = 0.0) -> Mixture:
    """Σ r (x − s)(x − s)ᵀ / N_k, the second moment instead of the covariance."""
    right = mixture_update(moments, like, shift, floor)
    centred = mixture_update(moments._replace(first=torch.zeros_like(moments.first)), like, shift, floor)
    return make_mixture(right.weights, right.means, centred.covariances)


@entry(
    "classical/mixture",
    "Gaussian mixture: responsibilities and updates",
    r"r_{nk} = \frac{\pi_k \mathcal N(x_n; \mu_k, \Sigma_k)}{\sum_j \pi_j \mathcal N(x_n; \mu_j, \Sigma_j)}, "
    r"\quad N_k = \sum_n r_{nk}, \quad \pi_k = \frac{N_k}{N}, \quad \mu_k = \frac{1}{N_k} \sum_n r_{nk} x_n, "
    r"\quad \Sigma_k = \frac{1}{N_k} \sum_n r_{nk} (x_n - \mu_k)(x_n - \mu_k)^\top",
    code=(mixture_log_densities, mixture_responsibilities, mixture_moments, mixture_update),
    wrong=(mixture_log_densities, _without_weights, mixture_moments, _about_zero),
    tolerance=1e-8,
    picture=_picture,
)
def _mixture(log_densities: Code, responsibilities: Code, sums: Code, update: Code) -> float:
    from sklearn.mixture import GaussianMixture as Peer

    x, errors = _rows(), []
    for kind in COVARIANCE_TYPES:
        mixture = _start(x, kind)
        peer = Peer(COMPONENTS, covariance_type=kind)
        peer.weights_, peer.means_ = mixture.weights.numpy(), mixture.means.numpy()
        peer.precisions_cholesky_ = _as_peer(mixture.factors, kind)
        shares, likelihood = responsibilities(log_densities(x, mixture))
        errors += [
            gap(shares, torch.tensor(peer.predict_proba(x.numpy()))),
            gap(likelihood, torch.tensor(peer.score_samples(x.numpy()))),
        ]
        for shift in (x.mean(0), mixture.means):
            floor = 1e-6 * torch.eye(FEATURES) if mixture.matrices else 1e-6
            new = update(sums(x, shares, mixture, shift), mixture, shift, floor)
            peer._m_step(x.numpy(), np.log(peer.predict_proba(x.numpy())))
            errors += [
                gap(new.weights, torch.tensor(peer.weights_)),
                gap(new.means, torch.tensor(peer.means_)),
                gap(torch.tensor(_as_peer(new.covariances, kind)), torch.tensor(peer.covariances_)),
                gap(torch.tensor(_as_peer(new.factors, kind)), torch.tensor(peer.precisions_cholesky_)),
            ]
            peer.weights_, peer.means_ = mixture.weights.numpy(), mixture.means.numpy()
            peer.precisions_cholesky_ = _as_peer(mixture.factors, kind)
    return worst(*errors)


class _EquallyHeavy(GaussianMixture):
    """Begins as if all components were as heavy as each other."""

    def fit(self, X: Any, y: Any = None) -> _EquallyHeavy:
        self.weights_init = np.full_like(self.weights_init, 1 / self.n_components)
        return super().fit(X, y)


@entry(
    "classical/mixture-em",
    "Expectation-maximisation: the log-likelihood never falls",
    r"\sum_n \ln \sum_k \pi_k^{t+1} \mathcal N(x_n; \mu_k^{t+1}, \Sigma_k^{t+1}) \ge "
    r"\sum_n \ln \sum_k \pi_k^{t} \mathcal N(x_n; \mu_k^{t}, \Sigma_k^{t})",
    code=GaussianMixture,
    wrong=_EquallyHeavy,
    tolerance=1e-8,
)
def _expectation_maximisation(build: Code) -> float:
    from sklearn.mixture import GaussianMixture as Peer

    x, errors = _rows(), []
    for kind in COVARIANCE_TYPES:
        start = _start(x, kind)
        options = {
            "covariance_type": kind,
            "tol": 0.0,
            "max_iter": 12,
            "weights_init": start.weights.numpy(),
            "means_init": start.means.numpy(),
            "precisions_init": _as_peer(start.factors.square(), kind),  # the matrices are diagonal
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # twelve steps are not enough, and need not be
            mine, peer = (
                build(COMPONENTS, **options).fit(x.numpy()),
                Peer(COMPONENTS, **options).fit(x.numpy()),
            )
        bounds = np.array(mine.lower_bounds_)
        errors += [
            gap(torch.tensor(mine.weights_), torch.tensor(peer.weights_)),
            gap(torch.tensor(mine.means_), torch.tensor(peer.means_)),
            gap(torch.tensor(mine.covariances_), torch.tensor(peer.covariances_)),
            gap(torch.tensor(bounds), torch.tensor(np.array(peer.lower_bounds_))),
            require(bool((np.diff(bounds) > -1e-9).all())),
            require(bounds[-1] > bounds[0]),
        ]
    return worst(*errors)


@entry(
    "classical/information-criteria",
    "How many components: BIC and AIC",
    r"\mathrm{BIC} = p \ln N - 2 \ln L, \quad \mathrm{AIC} = 2p - 2 \ln L, \quad "
    r"p = K - 1 + KD + \{\tfrac{KD(D+1)}{2}, \tfrac{D(D+1)}{2}, KD, K\}",
    code=(bayesian_information, akaike_information, mixture_parameter_count),
    wrong=(
        bayesian_information,
        akaike_information,
        # The weights sum to 1, so one of them is not free.
        lambda kind, components, features: mixture_parameter_count(kind, components, features) + 1,
    ),
    tolerance=1e-10,
)
def _information_criteria(bayesian: Code, akaike: Code, count: Code) -> float:
    from sklearn.mixture import GaussianMixture as Peer

    x, errors = _rows(), []
    for kind in COVARIANCE_TYPES:
        for components in (1, 3):
            peer = Peer(components, covariance_type=kind, random_state=0).fit(x.numpy())
            likelihood, parameters = peer.score(x.numpy()) * len(x), count(kind, components, FEATURES)
            errors += [
                gap(bayesian(likelihood, parameters, len(x)), peer.bic(x.numpy())),
                gap(akaike(likelihood, parameters), peer.aic(x.numpy())),
            ]
    return worst(*errors)
