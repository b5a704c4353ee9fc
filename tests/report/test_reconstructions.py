"""Pictures of autoencoders: what stands above what, in which units, and under which names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from sklearn.decomposition import PCA

from quire.errors import InputError
from quire.report.pictures import embed
from quire.report.reconstructions import (
    MOST_POINTS,
    latent_figure,
    latent_plane,
    reconstruction_figure,
)
from quire.report.style import PALETTE, to_svg
from tests.report.checking import Page

draw = np.random.default_rng(0)


def images(count: int, channels: int = 1) -> np.ndarray:
    return draw.uniform(0, 255, (count, channels, 6, 5))


def texts(fig: Figure) -> list[str]:
    return Page(embed(to_svg(fig), "picture.svg", "a picture")[0]).of("text")


# Reconstructions ------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_originals_stand_above_reconstructions(channels: int) -> None:
    before, after = images(4, channels), images(4, channels)
    fig = reconstruction_figure(before, after)
    (axes,) = fig.axes
    found = sorted(axes.images, key=lambda image: (image.get_extent()[3], image.get_extent()[0]))
    assert len(found) == 8
    for shown, wanted in zip(found, [*before, *after], strict=True):
        pixels = np.asarray(shown.get_array())
        pixels = pixels[:, :, None] if channels == 1 else pixels
        np.testing.assert_allclose(pixels.transpose(2, 0, 1), np.rint(wanted))
        left, right, bottom, top = shown.get_extent()
        assert (right - left, bottom - top) == pytest.approx((5, 6))
        assert (shown.norm.vmin, shown.norm.vmax) == (0, 255)
    assert found[4].get_extent()[3] > found[0].get_extent()[2], "below, and not touching"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["original", "reconstruction"]
    assert fig.get_suptitle() == "Originals and reconstructions"
    markup, _ = embed(to_svg(fig), "picture.svg", "a picture")
    assert markup.startswith("<svg ")


def test_many_images_take_several_lines_and_damage_stands_between() -> None:
    fig = reconstruction_figure(images(13), images(13), damaged=images(13), name="Digits")
    (axes,) = fig.axes
    assert len(axes.images) == 39
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["original", "as it was seen", "reconstruction"] * 2
    tops = sorted({image.get_extent()[3] for image in axes.images})
    assert len(tops) == 6
    counts = [sum(image.get_extent()[3] == top for image in axes.images) for top in tops]
    assert counts == [10, 10, 10, 3, 3, 3]
    assert "Digits" in texts(fig)


def test_pixels_stay_between_black_and_white() -> None:
    fig = reconstruction_figure(images(1), np.full((1, 1, 6, 5), 300.0))
    assert all(np.asarray(image.get_array()).max() <= 255 for image in fig.axes[0].images)


@pytest.mark.parametrize(("count", "panels"), [(1, 1), (2, 2), (5, 4), (9, 6)])
def test_rows_are_lines(count: int, panels: int) -> None:
    before, after = draw.normal(size=(count, 4)), draw.normal(size=(count, 4))
    fig = reconstruction_figure(before, after, features=["height", "width", "depth", "$age"])
    assert len(fig.axes) == panels
    for i, axes in enumerate(fig.axes):
        solid, dashed = axes.lines
        np.testing.assert_allclose(solid.get_ydata(), before[i])
        np.testing.assert_allclose(dashed.get_ydata(), after[i])
        assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
        assert axes.get_title(loc="left") == f"row {i + 1}"
    words = texts(fig)
    assert {"original", "reconstruction", "feature", "value", "height"} <= set(words)
    assert words.count("height") == min(panels, 2), "named at the bottom alone"
    unnamed = texts(reconstruction_figure(before, after, features=["height"]))
    assert "height" not in unnamed


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (images(2), images(3), r"shapes \(2, 1, 6, 5\), \(3, 1, 6, 5\)"),
        (images(2, 2), images(2, 2), "images with 2 channels"),
        (np.zeros((0, 4)), np.zeros((0, 4)), "N at least 1"),
        (np.zeros(4), np.zeros(4), "one shape"),
    ],
)
def test_what_cannot_be_compared(before: Any, after: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        reconstruction_figure(before, after)


# The latent plane -----------------------------------------------------------------------------


def test_two_numbers_are_the_plane() -> None:
    codes = draw.normal(size=(7, 2))
    points, names = latent_plane(codes)
    np.testing.assert_array_equal(points, codes)
    assert names == ("code 1", "code 2")


def test_more_numbers_are_turned_to_their_principal_directions() -> None:
    codes = draw.normal(size=(60, 4)) * [1, 5, 2, 0.1] + 3
    points, names = latent_plane(codes)
    peer = PCA(2).fit(codes)
    wanted = peer.transform(codes)
    np.testing.assert_allclose(np.abs(points), np.abs(wanted), atol=1e-9)
    first, second = (round(100 * share) for share in peer.explained_variance_ratio_)
    assert names == (
        f"principal direction 1 of codes ({first} %)",
        f"principal direction 2 of codes ({second} %)",
    )
    for seed in range(6):  # directions have a sign by luck; that of the largest weight is made positive
        wide = np.random.default_rng(seed).normal(size=(60, 4)) * [1, 5, 2, 0.1]
        across, up = latent_plane(wide).points.T
        assert np.corrcoef(across, wide[:, 1])[0, 1] > 0.9
        assert np.corrcoef(up, wide[:, 2])[0, 1] > 0.8


def test_one_number_is_laid_out_by_rank() -> None:
    points, names = latent_plane(np.array([[3.0], [1.0], [2.0], [9.0]]))
    np.testing.assert_allclose(points, [[3, 0.5], [1, 0], [2, 0.25], [9, 0.75]])
    assert names == ("code 1", "share of rows below")


def test_classes_have_colours_and_a_legend() -> None:
    codes, labels = draw.normal(size=(40, 2)), np.arange(40) % 9 - 1
    classes = [f"kind {k}" for k in range(8)]
    fig = latent_figure(codes, labels, classes, "Codes of wines")
    (axes,) = fig.axes
    said = {dots.get_label(): dots for dots in axes.collections}
    assert list(said) == ["not known", *classes]
    for k, name in enumerate(classes):
        np.testing.assert_allclose(np.asarray(said[name].get_offsets()), codes[labels == k])
        assert to_hex(said[name].get_facecolor()[0]) == PALETTE[k % len(PALETTE)]
    marks = [said[name].get_paths()[0].vertices.shape for name in ("kind 0", "kind 6")]
    assert marks[0] != marks[1], "the same colour, another mark"
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["not known", *classes]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("code 1", "code 2")
    assert axes.get_title(loc="left") == "Codes of wines"
    assert {"class", "kind 7", "code 1"} <= set(texts(fig))


def test_without_classes_there_is_no_legend_and_many_codes_are_thinned() -> None:
    codes = draw.normal(size=(3 * MOST_POINTS, 2))
    fig = latent_figure(codes)
    assert fig.legends == []
    (dots,) = fig.axes[0].collections
    assert len(np.asarray(dots.get_offsets())) == MOST_POINTS
    assert fig.axes[0].get_title(loc="right") == f"{MOST_POINTS:,} of {3 * MOST_POINTS:,} rows"


def test_wrong_codes_and_labels() -> None:
    with pytest.raises(InputError, match=r"codes of shape \(0, 2\)"):
        latent_plane(np.zeros((0, 2)))
    with pytest.raises(InputError, match=r"labels of shape \(2,\) up to 1\n  expected: 3 numbers below 2"):
        latent_figure(np.zeros((3, 2)), np.array([0, 1]), ["a", "b"])
    with pytest.raises(InputError, match="up to 2\n  expected: 3 numbers below 2"):
        latent_figure(np.zeros((3, 2)), np.array([0, 1, 2]), ["a", "b"])
