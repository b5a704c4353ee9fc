"""Pictures of components and clusters say what the numbers say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.patches import Ellipse

from quire.errors import InputError
from quire.report.classical import clusters_figure, principal_plane, scree_figure
from quire.report.style import to_svg


def test_bars_are_shares_and_the_line_is_their_sum() -> None:
    fig = scree_figure(np.array([0.5, 0.3, 0.1]))
    axes = fig.axes[0]
    assert [round(bar.get_height(), 6) for bar in axes.patches] == [50, 30, 10]
    assert np.allclose(axes.lines[0].get_ydata(), [50, 80, 90])
    assert "90.0 %" in axes.get_title(loc="right")


def test_ellipses_have_the_axes_of_the_covariance() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 2))
    turned = np.array([[np.cos(0.5), -np.sin(0.5)], [np.sin(0.5), np.cos(0.5)]])
    covariance = turned @ np.diag([9.0, 1.0]) @ turned.T
    fig = clusters_figure(rows, np.zeros(50, int), np.array([[1.0, 2.0]]), covariance[None])
    (ellipse,) = [patch for patch in fig.axes[0].patches if isinstance(patch, Ellipse)]
    assert ellipse.center == (1.0, 2.0)
    assert (ellipse.width, ellipse.height) == (pytest.approx(12.0), pytest.approx(4.0))
    assert np.sin(np.radians(ellipse.angle) - 0.5) == pytest.approx(0.0, abs=1e-9)
    assert to_svg(fig)


def test_the_plane_is_that_of_the_largest_variance() -> None:
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(400, 4)) * [0.1, 5.0, 0.1, 2.0]
    plane = principal_plane(rows)
    assert np.abs(plane.axes[1, 0]) > 0.99
    assert np.abs(plane.axes[3, 1]) > 0.99
    assert np.allclose(plane.axes.T @ plane.axes, np.eye(2))


def test_many_rows_and_one_feature_are_drawn() -> None:
    generator = np.random.default_rng(2)
    fig = clusters_figure(generator.normal(size=(3000, 1)), np.zeros(3000, int), np.zeros((1, 1)))
    assert "1,000 of 3,000" in fig.axes[0].get_title(loc="right")


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(InputError, match="shares of shape"):
        scree_figure(np.zeros((2, 2)))
    with pytest.raises(InputError, match="clusters of shape"):
        clusters_figure(np.zeros((3, 2)), np.zeros(2, int), np.zeros((1, 2)))
