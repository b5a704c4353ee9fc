"""K-means with scikit-learn's interface.

N rows, D features, K clusters, R starts.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from quire.data.batch import TensorData
from quire.errors import InputError
from quire.estimators.base import Array, in_form_of, read_features, read_weights, to_numpy, to_tensor
from quire.estimators.network import RandomState, draw_seed, is_number
from quire.functional.clusters import centre_distances, inertia
from quire.functional.nearest import nearest_centres
from quire.options import check
from quire.tasks.kmeans import KMeansTask
from quire.tasks.kmeans_rows import WEIGHT
from quire.train.statistics import fit_statistics

RANDOM_STARTS = 10
"""Starts that n_init="auto" takes from random rows; one from k-means++ or given centres."""


class KMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):
    """K-means: minimise J = Σ w ‖x − c‖² over K centres c, each row x counted with the nearest of them.

    n_clusters: K.
    init: "k-means++", "random" for K different rows, or an array (K, D) of centres.
    n_init: how many starts, of which the best is kept; they go through the rows together. "auto" is 10 for
        "random" and 1 otherwise.
    max_iter: the most times that centres are moved.
    tol: centres that move by less than √(tol · mean variance of a feature), all together, have settled.

    X may be an array, a data frame or a tensor on any device; what comes of a tensor is a tensor there.
    Labels are those that float64 gives, also for float32 rows.

    Attributes: `cluster_centers_` (K, D), `labels_` (N,), `inertia_`, `n_iter_`, `n_features_in_`,
    `feature_names_in_`.
    """

    cluster_centers_: Array
    labels_: Array
    inertia_: float
    n_iter_: int

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: int | str = "auto",
        max_iter: int = 300,
        tol: float = 1e-4,
        random_state: RandomState = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # -- Learning ------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the centres of X (N, D); y is ignored."""
        self._fit(X, sample_weight)
        return self

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Find the centres of X, and give the number of each row's cluster."""
        return in_form_of(X, self._fit(X, sample_weight))

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Find the centres of X, and give the distances of each row to all of them, (N, K)."""
        return self.fit(X, sample_weight=sample_weight).transform(X)

    def _fit(self, X: Any, sample_weight: Any) -> Tensor:
        self._check_parameters()
        x = read_features(self, X, reset=True)
        if len(x) < self.n_clusters:
            raise InputError(
                f"n_samples={len(x)} for n_clusters={self.n_clusters}",
                expected="n_samples >= n_clusters",
                fix="give more rows, or ask for fewer clusters",
            )
        given = self._given(x)
        fields, weights = {"inputs": x}, None
        if sample_weight is not None:
            fields[WEIGHT] = weights = read_weights(sample_weight, x).to(x.device)
        task = KMeansTask(
            x.shape[1],
            int(self.n_clusters),
            init=self.init if given is None else "random",
            starts=self._starts(given),
            tol=float(self.tol),
            max_iter=int(self.max_iter),
        ).to(x.device)
        data = TensorData(fields)
        if given is not None:
            task.begin(data, given)
        # A sweep that fills empty clusters comes on top of the one that found them.
        fit_statistics(
            task, data, sweeps=2 * task.max_iter, seed=draw_seed(self.random_state), device=x.device,
            started=given is not None,
        )  # fmt: skip
        centres = task.centres[task.best].to(x.dtype)
        labels = nearest_centres(x, centres).to(torch.int32)
        self.cluster_centers_, self.labels_ = to_numpy(centres), to_numpy(labels)
        self.inertia_ = float(inertia(x, centres, labels, weights=weights))
        self.n_iter_ = int(task.iterations[task.best])
        distinct = len(labels.unique())
        if distinct < self.n_clusters:
            warnings.warn(
                f"{distinct} distinct clusters found, fewer than n_clusters={self.n_clusters}: rows of X may "
                "be equal to each other",
                ConvergenceWarning,
                stacklevel=3,
            )
        return labels

    def _check_parameters(self) -> None:
        whole = {"n_clusters": self.n_clusters, "max_iter": self.max_iter}
        for name, value in whole.items():
            check(is_number(value, 1, np.inf, whole=True), name, value, "an integer >= 1")
        good = (isinstance(self.n_init, str) and self.n_init == "auto") or is_number(
            self.n_init, 1, np.inf, whole=True
        )
        check(good, "n_init", self.n_init, '"auto" or an integer >= 1')
        check(is_number(self.tol, 0, np.inf), "tol", self.tol, "a number >= 0")
        good = not isinstance(self.init, str) or self.init in ("k-means++", "random")
        check(good, "init", self.init, '"k-means++", "random" or an array (n_clusters, n_features)')

    def _given(self, x: Tensor) -> Tensor | None:
        """Centres to begin with, (K, D)."""
        if isinstance(self.init, str):
            return None
        given = self.init.detach() if isinstance(self.init, Tensor) else to_tensor(np.asarray(self.init))
        wanted = (int(self.n_clusters), x.shape[1])
        if given.shape != wanted or given.is_complex():
            raise InputError(
                f"init of shape {tuple(given.shape)}",
                expected=f"(n_clusters, n_features) = {wanted}",
                fix="give one centre for each cluster",
            )
        if not bool(given.isfinite().all()):
            raise InputError("init contains NaN or infinity", expected="finite centres")
        return given.to(x.device, torch.float64)

    def _starts(self, given: Tensor | None) -> int:
        if given is not None:
            if self.n_init not in ("auto", 1):
                warnings.warn(
                    f"init gives the centres: one start instead of n_init={self.n_init}",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return 1
        if isinstance(self.n_init, str):
            return RANDOM_STARTS if self.init == "random" else 1
        return int(self.n_init)

    # -- Using ---------------------------------------------------------------------------------

    @property
    def _n_features_out(self) -> int:
        return len(self.cluster_centers_)

    def _centres(self, x: Tensor) -> Tensor:
        return to_tensor(self.cluster_centers_).to(x.device)

    def predict(self, X: Any) -> Any:
        """The number of the nearest centre of each row."""
        x = read_features(self, X)
        return in_form_of(X, nearest_centres(x, self._centres(x)).to(torch.int32))

    def transform(self, X: Any) -> Any:
        """The distances of each row to all centres, (N, K)."""
        x = read_features(self, X)
        return in_form_of(X, centre_distances(x, self._centres(x)))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """−J of X under these centres."""
        x = read_features(self, X)
        weights = None if sample_weight is None else read_weights(sample_weight, x).to(x.device)
        centres = self._centres(x)
        return -float(inertia(x, centres, nearest_centres(x, centres), weights=weights))
