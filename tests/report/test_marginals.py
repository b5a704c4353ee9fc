"""Columns of data and samples side by side: shares in common bins, categories in pairs."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from quire.errors import InputError
from quire.report.marginals import MOST_COLUMNS, Column, marginals_figure
from quire.report.pictures import embed
from quire.report.style import to_svg
from tests.report.checking import Page


def texts(fig: Figure) -> list[str]:
    return Page(embed(to_svg(fig), "picture.svg", "a picture")[0]).of("text")


def test_numbers_are_shares_in_common_bins() -> None:
    data, samples = np.array([0.0, 1.0, 2.0, 10.0, np.nan]), np.array([0.5, 9.9, 400.0, 1.0])
    fig = marginals_figure([Column("size $m$", data, samples)])
    ours, theirs = (patch.get_data() for patch in fig.axes[0].patches if isinstance(patch, StepPatch))
    assert np.array_equal(ours.edges, theirs.edges)
    assert ours.edges[0] == pytest.approx(-1.5)
    assert ours.edges[-1] == pytest.approx(11.5)
    for found, values in ((ours, data[:4]), (theirs, samples)):
        for share, low, high in zip(found.values, found.edges[:-1], found.edges[1:], strict=True):
            assert share == sum(low <= v < high for v in values) / 4
    assert theirs.values.sum() == 0.75
    assert {"size $m$", "data", "samples", "25 % outside", "share of rows"} <= set(texts(fig))


def test_categories_stand_in_pairs_the_most_frequent_first() -> None:
    data = np.array(["b", "a", "b", "c", "b"])
    fig = marginals_figure([Column("kind", data, np.array(["a", "a", "z", "b"]))])
    heights = [bar.get_height() for bar in fig.axes[0].patches]
    assert heights == pytest.approx([0.6, 0.2, 0.2, 0.25, 0.5, 0.0])
    found = texts(fig)
    assert [t for t in found if t in "abc"] == ["b", "a", "c"]


def test_dates_are_written_as_dates_and_may_be_missing() -> None:
    days = np.array(["2024-03-01", "2024-03-31", "NaT"], dtype="datetime64[D]")
    fig = marginals_figure([Column("day", days, days[:2])])
    ours, theirs = (patch.get_data() for patch in fig.axes[0].patches if isinstance(patch, StepPatch))
    assert ours.values.sum() == theirs.values.sum() == 1
    assert any("Mar" in text or "Apr" in text for text in texts(fig))


def test_many_columns_are_cut_and_few_are_needed() -> None:
    one = np.arange(4.0)
    fig = marginals_figure([Column(f"c{i}", one, one) for i in range(MOST_COLUMNS + 3)])
    assert len(fig.axes) == MOST_COLUMNS
    assert "Columns of data and samples, 12 of 15" in texts(fig)
    assert len(marginals_figure([Column(f"c{i}", one, one) for i in range(4)]).axes) == 4
    constant = np.ones(4)
    texts(marginals_figure([Column("constant", constant, constant), Column("gone", constant * np.nan, one)]))
    for wrong in ([], [Column("empty", one[:0], one)]):
        with pytest.raises(InputError, match="at least one, with rows"):
            marginals_figure(wrong)
