"""Pictures and tables of a classifier: who is taken for whom, and whether its probabilities are true.

K classes, N rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from quire.report.reading import Array, Predictions, Target
from quire.report.style import BLUE, GREY, INK, VERMILION, figure, plain
from quire.report.summary import wilson

ALL_CLASSES = 20
"""Up to so many classes the whole matrix is shown."""
MOST_CONFUSED = 15
BINS = 10


@dataclass(frozen=True)
class Confusion:
    classes: tuple[str, ...]
    counts: Array
    """(K, K): rows are the truth, columns the prediction."""

    @property
    def right(self) -> int:
        return int(np.trace(self.counts))

    def pairs(self, limit: int = 10) -> list[tuple[str, str, int, float]]:
        """(truth, prediction, count, share of the truth's rows) of the most frequent mistakes."""
        return [
            (
                self.classes[truth],
                self.classes[taken_for],
                int(self.counts[truth, taken_for]),
                self.counts[truth, taken_for] / self.counts[truth].sum(),
            )
            for truth, taken_for in self._ordered_mistakes()[:limit]
        ]

    def _ordered_mistakes(self) -> list[tuple[int, int]]:
        mistakes = self.counts.copy()
        np.fill_diagonal(mistakes, 0)
        truth, taken_for = np.nonzero(mistakes)
        order = np.argsort(-mistakes[truth, taken_for], kind="stable")
        return [(int(truth[i]), int(taken_for[i])) for i in order]

    def shown(self) -> list[int]:
        """The classes of the picture: all, or those of the most frequent mistakes, in their own order."""
        if len(self.classes) <= ALL_CLASSES:
            return list(range(len(self.classes)))
        chosen: list[int] = []
        for pair in self._ordered_mistakes():
            new = [index for index in dict.fromkeys(pair) if index not in chosen]
            if len(chosen) + len(new) <= MOST_CONFUSED:
                chosen += new
        largest = np.argsort(-self.counts.sum(axis=1), kind="stable")
        chosen += [int(i) for i in largest if i not in chosen][: max(0, 2 - len(chosen))]
        return sorted(chosen)


def confusion(target: Target, found: Predictions) -> Confusion:
    """Counts by truth and prediction; classes in the target's order, unknown ones after them."""
    unknown = sorted({*found.truth, *found.prediction} - set(target.classes))
    classes = (*target.classes, *unknown)
    place = {name: i for i, name in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    truth, prediction = ([place[name] for name in column] for column in (found.truth, found.prediction))
    np.add.at(counts, (truth, prediction), 1)
    return Confusion(classes, counts)


def short_names(names: list[str], limit: int = 16) -> list[str]:
    """Labels of about `limit` characters at most that still differ from each other."""
    labels = [plain(name, limit) for name in names]
    if len(set(labels)) < len(names):
        start = _shared(names)
        end = _shared([name[start:][::-1] for name in names])
        cores = [name[start : len(name) - end] for name in names]
        labels = [plain(f"{'…' * (start > 0)}{core}{'…' * (end > 0)}", limit) for core in cores]
    if len(set(labels)) < len(names):
        labels = [f"{text} ({place})" for place, text in enumerate(labels, start=1)]
    return labels


def _shared(names: list[str]) -> int:
    """How many characters all names begin with, whole words only."""
    same = list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*names, strict=False)))
    while same and same[-1][0].isalnum():
        same.pop()
    return len(same)


def confusion_figure(matrix: Confusion, name: str) -> Figure:
    """A cell per pair: its count, and its share of the row as per cent and as depth of colour."""
    shown = matrix.shown()
    totals = matrix.counts.sum(axis=1)[shown]
    cells = matrix.counts[np.ix_(shown, shown)]
    columns = short_names([matrix.classes[i] for i in shown])
    if len(shown) < len(matrix.classes):
        cells = np.column_stack([cells, totals - cells.sum(axis=1)])
        columns.append("others")
    rows, width = cells.shape
    cell = 0.62 if width <= 6 else 0.42
    longest = max(len(text) for text in columns)
    margin = 0.75 + 0.075 * longest
    fig = figure(max(3.4, margin + cell * width), 0.9 + margin * 0.75 + cell * 0.86 * rows)
    axes = fig.subplots()
    axes.grid(False)
    shares = cells / np.maximum(totals, 1)[:, None]
    for i, j in np.ndindex(cells.shape):
        if cells[i, j] == 0:
            continue
        color = BLUE if i == j and j < rows else VERMILION
        # The square root of the share: a mistake made once in a hundred must still be seen.
        depth = 0.08 + 0.92 * float(shares[i, j]) ** 0.5
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=color, alpha=depth, linewidth=0))
        ink = "white" if depth > 0.6 else INK
        large = 9.5 if width <= 6 else 8.5
        share = f"{100 * shares[i, j]:.0f} %"
        axes.text(j, i - 0.14, f"{cells[i, j]:,}", ha="center", va="center", color=ink, fontsize=large)
        axes.text(j, i + 0.26, share, ha="center", va="center", color=ink, fontsize=large - 2.5)
    axes.set(xlim=(-0.5, width - 0.5), ylim=(rows - 0.5, -0.5))
    turn = 0.09 * longest > cell
    axes.set_xticks(range(width), columns, rotation=45 if turn else 0, ha="right" if turn else "center")
    axes.set_yticks(range(rows), columns[:rows])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_alpha(0.4)
    axes.set_xlabel("prediction")
    axes.set_ylabel("truth")
    axes.set_title(plain(f"Confusion matrix: {name}"), loc="left", fontsize=11)
    return fig


@dataclass(frozen=True)
class Reliability:
    """Rows in bins of equal width by the probability of their predicted class."""

    edges: Array
    rows: Array
    right: Array
    probability: Array
    """Mean probability of each bin; NaN where it is empty."""

    @property
    def error(self) -> float:
        """Expected calibration error Σ_bins n/N · |share right − mean probability|."""
        used = self.rows > 0
        gap = np.abs(self.right[used] / self.rows[used] - self.probability[used])
        return float((gap * self.rows[used]).sum() / self.rows.sum())


def reliability(found: Predictions) -> Reliability | None:
    """None where the file has no probabilities."""
    if found.probability is None:
        return None
    known = np.isfinite(found.probability)
    probability = np.clip(found.probability[known], 0, 1)
    if not len(probability):
        return None
    is_right = (found.truth == found.prediction)[known].astype(float)
    place = np.minimum((probability * BINS).astype(int), BINS - 1)
    rows = np.bincount(place, minlength=BINS)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(place, probability, minlength=BINS) / rows
    right = np.bincount(place, is_right, minlength=BINS)
    return Reliability(np.linspace(0, 1, BINS + 1), rows, right.astype(int), mean)


def reliability_figure(bins: Reliability, name: str) -> Figure:
    """Share of right answers against the probability that was claimed, with how often it was claimed."""
    fig = figure(4.6, 4.0)
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot([0, 1], [0, 1], color=INK, ls=":", lw=1, label="perfect")
    used = bins.rows > 0
    share = bins.right[used] / bins.rows[used]
    spread = [wilson(int(hit), int(n)) for hit, n in zip(bins.right[used], bins.rows[used], strict=True)]
    low, high = np.array(spread).T
    top.errorbar(
        bins.probability[used], share, yerr=[np.maximum(share - low, 0), np.maximum(high - share, 0)],
        fmt="o-", color=BLUE, ms=5, lw=1.4, elinewidth=1, capsize=2, label="observed, 95 % interval",
    )  # fmt: skip
    top.set(ylim=(-0.03, 1.03), ylabel="share right")
    top.set_title(plain(f"Reliability: {name}"), loc="left", fontsize=11)
    top.legend(loc="upper left", fontsize=8.5)
    bottom.bar(bins.edges[:-1], bins.rows, width=np.diff(bins.edges), align="edge", color=GREY, alpha=0.7)
    bottom.set(xlim=(-0.02, 1.02), xlabel="probability of the predicted class", ylabel="rows")
    return fig


def worst_rows(found: Predictions, limit: int) -> tuple[Array, bool]:
    """Places of the mistakes with the highest loss; without a mistake, of the least sure answers.

    The second value tells whether they are mistakes.
    """
    if found.loss is not None:
        badness = found.loss
    elif found.truth_probability is not None:
        badness = 1 - found.truth_probability
    else:
        badness = np.zeros(len(found))
    wrong = found.truth != found.prediction
    candidates = np.flatnonzero(wrong) if wrong.any() else np.arange(len(found))
    order = np.argsort(-np.nan_to_num(badness[candidates], nan=np.inf, posinf=np.inf), kind="stable")
    return candidates[order][:limit], bool(wrong.any())
