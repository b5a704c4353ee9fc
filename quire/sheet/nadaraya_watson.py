"""Chapter 15: Nadaraya-Watson, against direct sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.estimators.nadaraya_watson import NadarayaWatsonClassifier, NadarayaWatsonRegressor
from quire.functional.kernel_pooling import KERNELS, kernel_weights, nadaraya_watson
from quire.sheet.registry import entry, gap, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _kernel_picture() -> Figure:
    from quire.report.style import GREY, figure

    random = torch.Generator().manual_seed(3)
    key = torch.rand(50, 1, generator=random, dtype=torch.float64).sort(0).values * 5
    noise = 0.35 * torch.randn(50, 1, generator=random, dtype=torch.float64)
    value = 2 * key.sin() + key.sqrt() + noise
    query = torch.linspace(0, 5, 200, dtype=torch.float64)[:, None]
    widths = {"gaussian": 0.3, "boxcar": 0.6, "epanechnikov": 0.7}
    fig = figure(9.6, 5.4)
    axes = fig.subplots(2, 3)
    for (top, bottom), kernel in zip(axes.T, KERNELS, strict=True):
        width = widths[kernel]
        fit = nadaraya_watson(query, key, value, kernel, width)  # type: ignore[arg-type]
        top.plot(key[:, 0], value[:, 0], ".", color=GREY, markersize=4, label="data")
        top.plot(query[:, 0], (2 * query.sin() + query.sqrt())[:, 0], "--", label="truth")
        top.plot(query[:, 0], fit[:, 0], label="fit")
        top.set(title=f"{kernel}, width {width}", xlabel="query", ylabel="value")
        weights = kernel_weights(query, key, kernel, width)  # type: ignore[arg-type]
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
        image = bottom.imshow(
            weights.numpy(), aspect="auto", origin="lower", extent=(0, 50, 0, 5), cmap="viridis"
        )
        bottom.set(title="weights", xlabel="key (sorted)", ylabel="query")
        fig.colorbar(image, ax=bottom)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return fig


def _triangular(query: Tensor, key: Tensor, value: Tensor, kernel: str, width: float) -> Tensor:
    if kernel != "epanechnikov":
        return nadaraya_watson(query, key, value, kernel, width)  # type: ignore[arg-type]
    weights = (1 - torch.cdist(query, key) / width).clamp(min=0)
    return weights @ value / weights.sum(-1, keepdim=True)


class _WidthAsVariance(NadarayaWatsonRegressor):
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> _WidthAsVariance:
        super().fit(X, y, sample_weight)
        self.width_ = self.width_**0.5
        return self


class _Unweighted(NadarayaWatsonClassifier):
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> _Unweighted:
        super().fit(X, y)
        return self


@entry(
    "attention/nadaraya-watson",
    "Nadaraya-Watson regression and classification",
    r"\hat y(q) = \sum_i \frac{K(\|q - k_i\| / h)}{\sum_j K(\|q - k_j\| / h)} v_i; \qquad "
    r"K(u) = e^{-u^2/2}, \quad \mathbb 1[u \le 1], \quad \max(0, 1 - u^2)",
    code=(nadaraya_watson, NadarayaWatsonRegressor, NadarayaWatsonClassifier),
    wrong=(_triangular, _WidthAsVariance, _Unweighted),
    tolerance=1e-10,
    erratum="Epanechnikov's kernel is often printed as max(0, 1 − |u|), which is the triangular one; "
    "its own is the parabola max(0, 1 − u²).",
    picture=_kernel_picture,
)
def _nadaraya_watson(pool: Code, regressor: Code, classifier: Code) -> float:
    kernels: dict[str, Callable[[float], float]] = {
        "gaussian": lambda u: math.exp(-u * u / 2),
        "boxcar": lambda u: float(u <= 1),
        "epanechnikov": lambda u: max(0.0, 1 - u * u),
    }
    errors = []
    for dimensions, width in ((1, 0.8), (3, 2.5)):
        query, key, value = _random(6, dimensions), _random(30, dimensions), _random(30, 1)
        factors = torch.rand(30, dtype=torch.float64) + 0.5
        labels = (value[:, 0] > 0.3).long()
        for name, kernel in kernels.items():
            rows, weighted, shares = [], [], []
            for q in query:
                k = [kernel(math.dist(q.tolist(), place.tolist()) / width) for place in key]
                s = [a * b.item() for a, b in zip(k, factors, strict=True)]
                rows.append(sum(a * v for a, v in zip(k, value, strict=True)) / sum(k))
                weighted.append(sum(a * v for a, v in zip(s, value, strict=True)) / sum(s))
                shares.append(sum(a for a, label in zip(s, labels, strict=True) if label) / sum(s))
            errors.append(gap(pool(query, key, value, name, width), torch.stack(rows)))
            options = (key.numpy(), value[:, 0].numpy(), factors.numpy())
            predicted = regressor(name, width).fit(*options).predict(query.numpy())
            errors.append(gap(torch.from_numpy(predicted), torch.cat(weighted)))
            chosen = classifier(name, width).fit(options[0], labels.numpy(), options[2])
            errors.append(gap(chosen.predict_proba(query.numpy())[:, 1], np.array(shares)))
    return worst(*errors)
