"""Pictures of kernel regression: what it makes of one or two features, which rows it asked, and its width.

N training rows, D features, Q queries, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from quire.data.batch import TensorData
from quire.data.load import TableData
from quire.functional.kernel_pooling import kernel_weights, nearest_key
from quire.functional.modes import evaluating
from quire.models.nadaraya_watson import NadarayaWatson
from quire.nn.heads import Gaussian
from quire.recipes.plan import Picture
from quire.report.style import BLUE, GREY, PALETTE, VERMILION, figure, plain
from quire.tasks.kernel import LeaveOneOut

MOST_POINTS = 800
"""Training rows that are drawn."""
MOST_MOVED = 200
"""Rows by which it is told how much a feature matters."""
MOST_LOSSES = 400
"""Rows that the curve of the loss is made from."""
MOST_SHOWN = 20
"""Features whose widths are drawn."""
MOST_COLUMNS = 400
"""Training rows whose weights are drawn side by side."""
GRID = 60
LINE = 200

Array = np.ndarray


class Feature(NamedTuple):
    """A column of the inputs, and the units of the file: value = centre + scale·input."""

    number: int
    name: str
    centre: float
    scale: float
    graded: bool
    """Whether there are places between its values, as a category has none."""

    def values(self, inputs: Tensor) -> Array:
        return self.centre + self.scale * inputs[:, self.number].double().cpu().numpy()


def pooling_pictures(
    task: LeaveOneOut, data: TableData, widths: Sequence[float], seed: int
) -> Sequence[Picture]:
    """The fit and the weights along the features that matter most, and how the width was found."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    train = data.train.subset(order[:MOST_POINTS]).to(task.device)
    with evaluating(task):
        shown = relevant_features(task, data, train.inputs[:MOST_MOVED])
        draw = line_figure if len(shown) == 1 else plane_figure
        said = caption(shown, len(train), data.train)
        return [
            Picture("fit", "Fit and weights", said, draw(task, data, train, shown)),
            width_picture(task, data, widths, seed),
        ]


def caption(shown: Sequence[Feature], drawn: int, train: TensorData) -> str:
    names = " and ".join(feature.name for feature in shown)
    others = train.inputs.shape[1] - len(shown)
    fixed = f" The other {others:,} features are at their medians." if others else ""
    some = f" {drawn:,} of {len(train):,} rows are drawn." if drawn < len(train) else ""
    if len(shown) == 1:
        return (
            f"The fit along {names}; on the right, the share of each training row (across) in the answer at "
            f"each place (up).{fixed}{some}"
        )
    return (
        f"The fit over {names}, which change it most, with training rows as dots.{fixed} On the right, the "
        f"share of each row in the answer for the row marked by ×, of which all features count.{some}"
    )


# Numbers --------------------------------------------------------------------------------------


def features_of(data: TableData) -> list[Feature]:
    """All features; categories, indicators and dates stay as the network sees them."""
    found: list[Feature] = []
    for column in data.preparation.inputs:
        for name in column.feature_names:
            value = name == column.name and column.labels is None
            own = column.kind == "number" and value
            units = (column.center, column.scale) if own else (0.0, 1.0)
            said = f"{name} (in deviations)" if column.kind == "date" and value else name
            found.append(Feature(len(found), said, *units, value))
    return found


@torch.no_grad()
def sensitivity(model: NadarayaWatson, inputs: Tensor) -> Tensor:
    """How much the averages change, in the mean, where feature d goes from half a deviation below to half a
    deviation above: √ E‖ŷ(x + ½e_d) − ŷ(x − ½e_d)‖², (D,)."""
    found = []
    for d in range(inputs.shape[1]):
        step = torch.zeros(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
        step[d] = 0.5
        change = model(inputs + step) - model(inputs - step)
        found.append(change.square().sum(1).mean().sqrt())
    return torch.stack(found)


def relevant_features(task: LeaveOneOut, data: TableData, inputs: Tensor) -> list[Feature]:
    """The one or two features that change the fit most; numbers before categories, which have no places
    between them. One where the second changes nothing."""
    change = sensitivity(task.model, inputs).tolist()
    first, *others = sorted(features_of(data), key=lambda f: (not f.graded, -change[f.number]))
    least = 1e-6 * change[first.number]  # less is rounding
    return [first, *(f for f in others[:1] if f.graded and change[f.number] > least)]


@torch.no_grad()
def fit_at(task: LeaveOneOut, queries: Tensor) -> Tensor:
    """Means in the target's units (Q, 1), or probabilities (Q, C)."""
    found = task.predict(queries)
    return found["value"].reshape(len(queries), -1) if "value" in found else found["probabilities"]


@torch.no_grad()
def weights_at(model: NadarayaWatson, queries: Tensor, rows: Tensor) -> Array:
    """The share of some remembered rows, by number, in the answers of all: (Q, rows). Query by query, since
    there may be many rows."""
    found = []
    for query in queries.split(1):
        weights = kernel_weights(query, model.keys, model.config.kernel, model.width).double()[0]
        if not weights.any():  # no row in reach: the nearest answers
            weights[nearest_key(query, model.keys, model.width)] = 1.0
        found.append(weights[rows] / weights.sum())
    return torch.stack(found).cpu().numpy()


def along(inputs: Tensor, features: Sequence[Feature], steps: int) -> list[Tensor]:
    """Evenly spaced values of each feature, over the range that the rows have."""
    spans = [(float(inputs[:, f.number].min()), float(inputs[:, f.number].max())) for f in features]
    spans = [(low, high) if low < high else (low - 1, high + 1) for low, high in spans]
    return [torch.linspace(*span, steps, dtype=inputs.dtype, device=inputs.device) for span in spans]


# Drawing --------------------------------------------------------------------------------------


def line_figure(task: LeaveOneOut, data: TableData, train: TensorData, shown: Sequence[Feature]) -> Figure:
    """One feature: the fit through the rows, and the weights of all rows along the way."""
    (feature,) = shown
    (places,) = along(train.inputs, shown, LINE)
    queries = train.inputs.median(0).values.repeat(LINE, 1)
    queries[:, feature.number] = places
    fig = figure(8.6, 3.3)
    left, right = fig.subplots(1, 2)
    x, fit = feature.values(queries), fit_at(task, queries).double().cpu().numpy()
    target = data.preparation.target
    if isinstance(task.head, Gaussian):
        known = train.target.double().cpu().numpy()
        left.plot(feature.values(train.inputs), known, ".", color=GREY, markersize=4, label="training rows")
        found = task.predict(queries, "interval", level=0.9)
        low, high = (found[name].double().cpu().numpy() for name in ("low", "high"))
        left.fill_between(x, low, high, color=BLUE, alpha=0.18, linewidth=0, label="90% interval")
        left.plot(x, fit[:, 0], color=BLUE, label="fit")
        left.set_ylabel(plain(target.name))
    else:
        classes = train.target.cpu().numpy()
        for c, label in enumerate(target.classes[: len(PALETTE)]):
            left.plot(x, fit[:, c], color=PALETTE[c], label=plain(label, 20))
            own = feature.values(train.inputs)[classes == c]
            left.plot(own, np.full(len(own), -0.04), "|", color=PALETTE[c], markersize=5)
        left.set_ylabel("probability")
    left.set(title=f"Fit, {task.model.config.kernel} kernel", xlabel=plain(feature.name))
    left.legend(fontsize=8)
    keys = task.model.keys[:, feature.number].argsort()
    picked = torch.linspace(0, len(keys) - 1, min(len(keys), MOST_COLUMNS), device=keys.device).round().long()
    weights = weights_at(task.model, queries, keys[picked])
    image = right.imshow(
        weights, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest",
        extent=(0, len(keys), float(x[0]), float(x[-1])),
    )  # fmt: skip
    right.grid(False)
    words = f"training row, by {plain(feature.name)}"
    right.set(title="Weights", xlabel=words, ylabel=f"place: {plain(feature.name)}")
    fig.colorbar(image, ax=right, label="weight").outline.set_visible(False)
    return fig


def plane_figure(task: LeaveOneOut, data: TableData, train: TensorData, shown: Sequence[Feature]) -> Figure:
    """Two features: the fit over both, and which rows answer for one place."""
    one, two = shown
    across, up = along(train.inputs, shown, GRID)
    queries = train.inputs.median(0).values.repeat(GRID * GRID, 1)
    queries[:, one.number], queries[:, two.number] = across.repeat(GRID), up.repeat_interleave(GRID)
    x, y = one.values(train.inputs), two.values(train.inputs)
    corners = one.values(queries)[[0, -1]], two.values(queries)[[0, -1]]
    (left_edge, right_edge), (bottom, top) = (values.tolist() for values in corners)
    extent = (left_edge, right_edge, bottom, top)
    fig = figure(8.6, 3.5)
    left, right = fig.subplots(1, 2)
    fit = fit_at(task, queries).double().cpu().numpy().reshape(GRID, GRID, -1)
    target = data.preparation.target
    if isinstance(task.head, Gaussian):
        known = train.target.double().cpu().numpy()
        low, high = np.quantile(known, (0.02, 0.98))
        image = left.imshow(fit[..., 0], cmap="viridis", vmin=low, vmax=high, extent=extent, origin="lower",
                            aspect="auto", interpolation="bilinear")  # fmt: skip
        left.scatter(x, y, c=known, cmap="viridis", vmin=low, vmax=high, s=12, edgecolors="white",
                     linewidths=0.4)  # fmt: skip
        fig.colorbar(image, ax=left, label=plain(target.name)).outline.set_visible(False)
    else:
        names = [str(label) for label in target.classes]
        _class_regions(left, fit, (x, y), train.target.cpu().numpy(), names, extent)
        if len(names) > len(PALETTE):
            fig.colorbar(left.images[0], ax=left, label="largest probability").outline.set_visible(False)
    left.set_title(f"Fit, {task.model.config.kernel} kernel")
    query = (data.test or data.train).inputs[:1].to(task.device)
    keys = task.model.keys
    weights = weights_at(task.model, query, torch.arange(len(keys), device=keys.device))[0]
    order = np.argsort(weights)[-MOST_POINTS:]
    dots = right.scatter(
        one.values(keys)[order], two.values(keys)[order], c=weights[order], cmap="viridis", s=14,
        vmin=0, vmax=weights.max(),
    )  # fmt: skip
    right.plot(one.values(query), two.values(query), "x", color=VERMILION, markersize=9, mew=2, zorder=5)
    many = 1 / np.square(weights).sum()
    right.set_title(f"Weights for ×, worth {many:,.0f} equal rows")
    fig.colorbar(dots, ax=right, label="weight").outline.set_visible(False)
    for axes in (left, right):
        axes.grid(False)
        axes.set(xlabel=plain(one.name), ylabel=plain(two.name))
    return fig


def _class_regions(
    axes: Axes, fit: Array, places: tuple[Array, Array], classes: Array, names: list[str],
    extent: tuple[float, float, float, float],
) -> None:  # fmt: skip
    """The likeliest class of each place in its colour, the stronger the surer, and the rows in theirs; of
    more classes than there are colours, how sure the likeliest is."""
    if len(names) > len(PALETTE):
        axes.imshow(fit.max(-1), cmap="viridis", vmin=0, vmax=1, extent=extent, origin="lower", aspect="auto",
                    interpolation="nearest")  # fmt: skip
        axes.plot(*places, ".", color=GREY, markersize=4)
        return
    colours = np.array([to_rgb(PALETTE[c]) for c in range(len(names))])
    even = 1 / len(names)
    sure = 0.08 + 0.5 * (fit.max(-1) - even) / max(1 - even, 1e-12)
    pixels = np.concatenate([colours[fit.argmax(-1)], sure[..., None].clip(0, 1)], -1)
    axes.imshow(pixels, extent=extent, origin="lower", aspect="auto", interpolation="nearest")
    for c, name in enumerate(names):
        own = classes == c
        axes.plot(
            places[0][own],
            places[1][own],
            "o",
            color=colours[c],
            markersize=3.5,
            mec="white",
            mew=0.3,
            label=plain(name, 18),
        )
    axes.legend(fontsize=7.5, loc="best")


def width_picture(task: LeaveOneOut, data: TableData, widths: Sequence[float], seed: int) -> Picture:
    """The widths of the features, or the loss as a function of the only width."""
    from quire.recipes.pooling import leave_one_out_losses

    found = task.model.width.detach().double().cpu().numpy()
    if task.model.config.per_feature:
        return _dots(found, [feature.name for feature in features_of(data)])
    train = data.train.to(task.device)
    losses = leave_one_out_losses(task, train, [*widths, float(found[0])], seed, MOST_LOSSES)
    fig = figure(5.0, 3.1)
    axes = fig.subplots()
    axes.plot(widths, losses[:-1], marker="o", markersize=3, label="leave-one-out")
    axes.plot(found, losses[-1:], "D", color=VERMILION, label=f"the run's: {found[0]:.3g}")
    axes.set(title="Loss by width", xlabel="width of the kernel, in deviations of a feature", ylabel="loss",
             xscale="log")  # fmt: skip
    axes.legend(fontsize=8)
    rows = min(len(train), MOST_LOSSES)
    caption = (
        f"Loss of {rows:,} training rows, each predicted from all others. Narrow kernels follow the noise, "
        "wide ones see no difference between places."
    )
    return Picture("width", "Width of the kernel", caption, fig)


def _dots(widths: Array, names: list[str]) -> Picture:
    order = np.argsort(widths)[:MOST_SHOWN]
    fig = figure(5.4, 0.9 + 0.22 * len(order))
    axes = fig.subplots()
    axes.plot(widths[order], range(len(order)), "o", color=BLUE, markersize=6)
    axes.set_yticks(range(len(order)), [plain(names[i], 24) for i in order], fontsize=8)
    axes.set(title="Width of each feature", xlabel="width, in deviations of the feature", xscale="log")
    axes.set(ylim=(len(order) - 0.5, -0.5), xlim=(widths[order[0]] / 1.5, widths[order[-1]] * 1.5))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    some = f" The narrowest {len(order)} of {len(widths)} are shown." if len(order) < len(widths) else ""
    caption = f"The narrower a feature's width, the more it decides which rows are near.{some}"
    return Picture("width", "Widths of the kernel", caption, fig)
