"""Pictures of the two players: the curves and levels that are drawn, the surface and the points on it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from quire.errors import InputError
from quire.report.adversarial import MOST_POINTS, players_figure, surface_figure
from quire.report.pictures import embed
from quire.report.style import to_svg
from tests.report.checking import Page

STEPS = np.arange(1, 6) * 100
CURVES = np.array([1.5, 1.3, 1.4, 1.38, 1.39]), np.array([0.5, 0.9, 0.7, 0.69, 0.7])


def texts(fig: Figure) -> list[str]:
    return Page(embed(to_svg(fig), "picture.svg", "a picture")[0]).of("text")


def levels(fig: Figure) -> list[float]:
    """Heights of the dashed lines of the first panel."""
    lines = [line for line in fig.axes[0].lines if line.get_linestyle() == "--" and len(line.get_ydata())]
    return [float(line.get_ydata()[0]) for line in lines]


@pytest.mark.parametrize(("minimax", "level"), [(False, math.log(2)), (True, -math.log(2))])
def test_both_curves_are_drawn_with_their_equilibrium(minimax: bool, level: float) -> None:
    fig = players_figure(STEPS, *CURVES, minimax=minimax)
    assert levels(fig) == [2 * math.log(2), level]
    drawn = [line for line in fig.axes[0].lines if len(line.get_xdata()) == len(STEPS)]
    assert [line.get_label() for line in drawn] == ["discriminator", "generator"]
    for line, curve in zip(drawn, CURVES, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), curve)
    words = texts(fig)
    assert {"step", "loss of a row (nats)", "2 log 2", "−log 2" if minimax else "log 2"} <= set(words)


def test_accuracies_have_a_panel_of_their_own() -> None:
    real, fake = np.linspace(0.9, 0.5, 5), np.linspace(0.8, 0.6, 5)
    fig = players_figure(STEPS, *CURVES, real, fake)
    assert len(fig.axes) == 2
    curves = {line.get_label(): line.get_ydata() for line in fig.axes[1].lines}
    np.testing.assert_array_equal(curves["on data"], real)
    np.testing.assert_array_equal(curves["on samples"], fake)
    assert "Accuracy of the discriminator" in texts(fig)


def test_values_that_are_missing_leave_a_gap() -> None:
    holes = np.array([1.5, np.nan, 1.4, 1.38, 1.39])
    assert "step" in texts(players_figure(STEPS, holes, CURVES[1]))


def test_curves_of_another_length_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)\(5,\) steps and values of shapes \(5,\), \(4,\)"):
        players_figure(STEPS, CURVES[0], CURVES[1][:4])


def surface(points: int = 20) -> Figure:
    x, y = np.linspace(-2, 2, 30), np.linspace(-1, 1, 20)
    probability = 1 / (1 + np.exp(-3 * x))[None].repeat(20, 0)
    draw = np.random.default_rng(0)
    real, fake = draw.normal(size=(points, 2)), draw.normal(size=(points, 2)) - 1
    return surface_figure(x, y, probability, real, fake, columns=("length <cm>", "width"))


def test_the_surface_carries_its_points_and_the_line_of_doubt() -> None:
    fig = surface()
    axes = fig.axes[0]
    curves = {line.get_label(): line.get_xydata() for line in axes.lines}
    draw = np.random.default_rng(0)
    np.testing.assert_allclose(curves["data"], draw.normal(size=(20, 2)))
    np.testing.assert_allclose(curves["samples"], draw.normal(size=(20, 2)) - 1)
    (contour,) = [c for c in axes.collections if c.get_paths()]
    line = np.concatenate([path.vertices for path in contour.get_paths()])
    np.testing.assert_allclose(line[:, 0], 0, atol=0.01)  # D = ½ at x = 0
    left, right, bottom, top = axes.images[0].get_extent()
    assert left < -2 < 2 < right
    assert bottom < -1 < 1 < top
    words = set(texts(fig))
    assert {"length <cm>", "width", "probability D of being data", "data", "samples", "D = ½"} <= words


def test_many_points_are_thinned_and_the_picture_stays_small() -> None:
    fig = surface(20_000)
    assert {len(line.get_xdata()) for line in fig.axes[0].lines} <= {0, MOST_POINTS}
    assert len(to_svg(fig)) < 600_000


def test_a_discriminator_without_doubt_has_no_line() -> None:
    places = np.linspace(0, 1, 5)
    fig = surface_figure(places, places, np.full((5, 5), 0.9), np.zeros((3, 2)), np.ones((3, 2)))
    assert "D = ½" not in texts(fig)


def test_surfaces_and_points_that_do_not_fit_are_refused() -> None:
    places, points = np.linspace(0, 1, 5), np.zeros((3, 2))
    with pytest.raises(InputError, match=r"a surface of shape \(5, 4\) over 5 × 5 places"):
        surface_figure(places, places, np.zeros((5, 4)), points, points)
    with pytest.raises(InputError, match=r"(?s)points of shape \(3, 3\).*choose two columns"):
        surface_figure(places, places, np.zeros((5, 5)), points, np.zeros((3, 3)))
