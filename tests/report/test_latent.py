"""Pictures of generative models: every image in its place, every axis named, dead dimensions marked."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from quire.errors import InputError
from quire.report.latent import kl_figure, samples_grid_figure, traversal_figure
from quire.report.pictures import embed
from quire.report.style import VERMILION, to_svg
from tests.report.checking import Page


def texts(fig: Figure) -> list[str]:
    return Page(embed(to_svg(fig), "picture.svg", "a picture")[0]).of("text")


def mosaic(fig: Figure) -> np.ndarray:
    (axes,) = fig.axes
    (image,) = axes.images
    return np.asarray(image.get_array())


def test_samples_stand_row_by_row_with_nothing_where_there_is_none() -> None:
    images = np.arange(1, 8)[:, None, None, None] * np.full((1, 1, 4, 6), 10)
    fig = samples_grid_figure(images, columns=3, names=["a", "b", "c"], title="Samples of all classes")
    pixels = mosaic(fig)  # a gap of one pixel follows each image
    assert pixels.shape == (3 * 5, 3 * 7, 4)
    for i in range(7):
        row, column = divmod(i, 3)
        cell = pixels[5 * row : 5 * row + 4, 7 * column : 7 * column + 6]
        assert (cell[..., :3] == 10 * (i + 1)).all()
        assert (cell[..., 3] == 255).all()
    assert (pixels[10:, 7:, 3] == 0).all(), "two places are left free"
    found = texts(fig)
    assert {"a", "b", "c", "Samples of all classes"} <= set(found)


def test_colours_and_values_out_of_range() -> None:
    images = np.array([-20.0, 128.4, 300.0]).reshape(1, 3, 1, 1) * np.ones((2, 1, 5, 5))
    assert mosaic(samples_grid_figure(images))[0, 0].tolist() == [0, 128, 255, 255]


def test_large_images_are_made_small() -> None:
    images = np.zeros((2, 1, 300, 600))
    images[:, :, :, 300:] = 200
    pixels = mosaic(samples_grid_figure(images))
    assert pixels.shape[0] < 60
    assert pixels.shape[1] < 220
    assert pixels[10, 10, 0] == 0
    assert pixels[10, 90, 0] == 200


def test_a_traversal_names_dimensions_and_values() -> None:
    images = np.zeros((2, 3, 1, 8, 8), dtype=np.uint8)
    images[1, 2] = 77
    fig = traversal_figure(images, np.array([-2.5, 0.0, 2.5]), ["z4 (1.2 nats)", "z0 (0.3 nats)"])
    found = set(texts(fig))
    assert {"z4 (1.2 nats)", "z0 (0.3 nats)", "-2.5", "0", "2.5", "Latent traversal"} <= found
    assert any("standard deviations of the prior" in text for text in found)
    assert (mosaic(fig)[9:17, 18:26, 0] == 77).all()
    (axes,) = fig.axes
    assert axes.get_yticks()[0] == 0.5
    assert {"z0", "z1"} <= set(texts(traversal_figure(images, np.arange(3))))


def test_dead_dimensions_are_marked() -> None:
    fig = kl_figure(np.array([1.5, 0.001, 0.5, 0.0]))
    (axes,) = fig.axes
    assert [bar.get_height() for bar in axes.patches] == [1.5, 0.5]
    (marks,) = (line for line in axes.lines if line.get_color() == VERMILION)
    assert np.asarray(marks.get_xdata()).tolist() == [1, 3]
    found = texts(fig)
    assert {"2 in use", "2 dead (< 0.01 nats)", "latent dimension", "KL (nats)"} <= set(found)
    assert "What the codes carry: 2.00 nats" in found
    assert not any("dead" in text for text in texts(kl_figure(np.array([1.0, 2.0]))))
    assert len(kl_figure(np.ones(300)).axes[0].get_xticks()) <= 40


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of shape \(3, 2, 8, 8\)(?s:.*)1 or 3 channels"):
        samples_grid_figure(np.zeros((3, 2, 8, 8)))
    with pytest.raises(InputError, match=r"\(K, T, C, H, W\)"):
        traversal_figure(np.zeros((3, 1, 8, 8)), np.zeros(3))
    with pytest.raises(InputError, match="2 values for 3 images in a row"):
        traversal_figure(np.zeros((2, 3, 1, 8, 8)), np.zeros(2))
    with pytest.raises(InputError, match="1 names for 2 rows"):
        traversal_figure(np.zeros((2, 3, 1, 8, 8)), np.zeros(3), ["z0"])
