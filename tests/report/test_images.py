"""Pictures of networks that see: what is drawn, how it is named, and that it stays small."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from PIL import Image

from quire.errors import InputError
from quire.report.images import (
    Boxes,
    boxes_figure,
    filter_figure,
    maps_figure,
    mistakes_figure,
    precision_recall_figure,
    samples_figure,
)
from quire.report.pictures import embed
from quire.report.style import PALETTE, to_svg
from tests.report.checking import Page

pytestmark = pytest.mark.slow

draw = np.random.default_rng(0)


def photos(count: int, channels: int = 3, height: int = 20, width: int = 30) -> np.ndarray:
    return draw.integers(0, 256, (count, channels, height, width)).astype(np.uint8)


def texts(fig: Figure) -> list[str]:
    return Page(embed(to_svg(fig), "picture.svg", "a picture")[0]).of("text")


def seen(fig: Figure) -> list[Any]:
    return [axes for axes in fig.axes if axes.get_visible()]


def figures() -> dict[str, Figure]:
    x, boxes = photos(3), Boxes(np.array([[0.1, 0.2, 0.5, 0.6]]), np.array([0]), np.array([0.9]))
    mistakes = mistakes_figure(x, ["a", "b", "c"], ["b", "b", "a"], np.array([0.5, 0.6, 0.7]))
    assert mistakes is not None
    curve = (np.linspace(0, 1, 11), np.linspace(1, 0, 11), 0.5)
    return {
        "filters": filter_figure(draw.normal(size=(6, 3, 5, 5))),
        "maps": maps_figure(x, {"conv": draw.normal(size=(3, 4, 5, 5))}, draw.random((3, 2, 3)), ["a"] * 3),
        "samples": samples_figure(x, photos(3), ["a", "b", "c"]),
        "mistakes": mistakes,
        "boxes": boxes_figure(x, [boxes] * 3, [boxes] * 3, ["cell"]),
        "precision": precision_recall_figure({"cell": curve}),
    }


@pytest.mark.parametrize("name", ["filters", "maps", "samples", "mistakes", "boxes", "precision"])
def test_every_picture_has_a_title_and_goes_into_the_page(name: str) -> None:
    fig = figures()[name]
    titled = fig.get_suptitle() or any(axes.get_title(loc="left") for axes in fig.axes)
    assert titled
    markup, width = embed(to_svg(fig), "picture.svg", "a picture")
    assert markup.startswith("<svg ")  # drawn in the page's own colours, not as a foreign image
    assert width > 0
    page = Page(markup)
    assert page.tags["svg"] == 1
    assert (page.tags["image"] > 0) == (name != "precision")
    assert markup.count("data:image/png;base64,") == page.tags["image"]


# Filters and maps -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "words", "drawn", "axes"),
    [
        ((6, 3, 5, 5), "6 filters of 5×5", 6, 1),
        ((1, 1, 7, 3), "1 filter of 7×3", 1, 2),
        ((20, 8, 3, 3), "20 filters of 3×3, mean over 8 channels", 20, 2),
        ((100, 3, 11, 11), "64 of 100 filters of 11×11", 64, 1),
    ],
)
def test_filters_are_counted_and_signed_ones_have_a_scale(
    shape: tuple[int, ...], words: str, drawn: int, axes: int
) -> None:
    fig = filter_figure(draw.normal(size=shape), "conv1")
    assert len(fig.axes) == axes  # a colour bar where colour is a number
    assert len(fig.axes[0].images) == drawn
    assert fig.axes[0].get_title(loc="left") == "Filters of conv1"
    assert fig.axes[0].get_xlabel() == words
    assert ("weight" in texts(fig)) == (axes == 2)


def test_filters_share_one_scale_with_zero_in_the_middle() -> None:
    weights = np.zeros((2, 1, 2, 2))
    weights[1] = [[[-3.0, 1.0], [0.0, 2.0]]]
    image = filter_figure(weights).axes[0].images[0]
    low, high = image.get_clim()
    assert low == -high
    assert 2.5 < high <= 3.0
    grey = filter_figure(np.zeros((1, 3, 2, 2))).axes[0].images[0].get_array()
    assert grey is not None
    assert (grey == 0.5).all()


def test_maps_stand_beside_their_image() -> None:
    x = photos(2)
    first, second = np.zeros((2, 5, 4, 6)), np.zeros((2, 3, 2, 3))
    first[:, 1, 0], first[:, 4, 0], second[:, 2, 0] = 2.0, 5.0, 1.0  # the others answer nothing anywhere
    evidence = np.array([[[0.0, 4.0], [0.0, -1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    fig = maps_figure(
        x, {"stem": first, "block.0": second}, evidence, ["cat (98 %), is cat", "dog (51 %), is cat"]
    )
    assert len(fig.axes) == 2 * (1 + 2 + 2 + 1)
    heads = [axes.get_title() for axes in fig.axes[:6]]
    assert heads[:3] == ["image", "stem\nchannel 1", "stem\nchannel 4"]
    assert heads[4] == "block.0\nchannel 2"
    assert heads[5] == "evidence"
    assert not any(axes.get_title() for axes in fig.axes[6:])
    last = fig.axes[5]
    assert " ".join(last.get_xlabel().split()) == "cat (98 %), is cat"
    image, overlay = last.images
    assert image.get_extent() == overlay.get_extent() == [0.0, 30.0, 20.0, 0.0]
    strength = np.asarray(overlay.get_array())
    assert strength.max() == pytest.approx(1.0)  # whatever its unit
    assert strength.min() == 0.0
    row, column = np.unravel_index(strength.argmax(), strength.shape)
    assert row < strength.shape[0] / 2 <= column  # above, on the right
    assert np.asarray(fig.axes[11].images[1].get_array()).max() == 0  # no evidence is shown as none
    assert len(maps_figure(x, {"stem": first}).axes) == 2 * 3


# Samples and mistakes -------------------------------------------------------------------------


def test_samples_before_and_after() -> None:
    before, after = photos(4, 1), photos(4, 1)
    fig = samples_figure(before, after, ["0", "1", "2", "3"], ["0", "1", "½ 2, ½ 3", "3"])
    assert len(fig.axes) == 8
    assert [axes.get_title() for axes in fig.axes] == ["0", "1", "2", "3", "0", "1", "½ 2, ½ 3", "3"]
    assert fig.axes[0].get_ylabel() == "as it is"
    assert fig.axes[4].get_ylabel() == "as trained on"
    shown = np.asarray(fig.axes[6].images[0].get_array()).astype(int)
    assert np.abs(shown - after[2, 0]).max() <= 3  # 64 shades
    assert np.abs(shown - before[2, 0]).max() > 100


def test_the_surest_mistakes_come_first() -> None:
    truth = ["a", "b", "c", "a"]
    fig = mistakes_figure(photos(4), truth, ["b", "b", "a", "c$"], np.array([0.5, 1.0, 0.71, 0.9]))
    assert fig is not None
    assert [(axes.get_title(), axes.get_xlabel()) for axes in seen(fig)] == [
        (r"c\$ (90 %)", "is a"),
        ("a (71 %)", "is c"),
        ("b (50 %)", "is a"),
    ]
    assert fig.get_suptitle() == "Surest mistakes (3 of 3)"
    assert "c$ (90 %)" in texts(fig)
    assert mistakes_figure(photos(2), ["a", "b"], ["a", "b"], np.ones(2)) is None


def test_many_mistakes_are_cut_to_a_page() -> None:
    fig = mistakes_figure(photos(90), ["a"] * 90, ["b"] * 90, np.linspace(0, 1, 90))
    assert fig is not None
    assert len(seen(fig)) == 24
    assert fig.get_suptitle() == "Surest mistakes (24 of 90)"
    odd = mistakes_figure(photos(9), ["a"] * 9, ["b"] * 9, np.ones(9))
    assert odd is not None
    assert len(seen(odd)) == 9


# Boxes ----------------------------------------------------------------------------------------


def outlines(axes: Any) -> list[PathPatch]:
    return [patch for patch in axes.patches if isinstance(patch, PathPatch)]


def test_boxes_lie_where_they_are_and_say_what_they_are() -> None:
    true = Boxes(np.array([[0.1, 0.2, 0.5, 0.6], [0.0, 0.0, 0.2, 0.2]]), np.array([0, 2]))
    found = Boxes(np.array([[0.1, 0.25, 0.5, 0.5]]), np.array([2]), np.array([0.876]))
    none = Boxes(np.zeros((0, 4)), np.zeros(0, dtype=int), np.zeros(0))
    fig = boxes_figure(photos(2), [true, none], [found, none], ["cell", "other", "platelet"], "Test images")
    first, second = seen(fig)
    lines = outlines(first)
    assert [line.get_linestyle() != "-" for line in lines] == [True] * 4 + [False] * 2  # true ones are dashed
    around = lines[1].get_path().vertices
    assert np.allclose(np.unique(np.asarray(around), axis=0), [[3, 4], [3, 12], [15, 4], [15, 12]])
    assert lines[1].get_edgecolor() == pytest.approx(rgba(PALETTE[0]))
    assert lines[5].get_edgecolor() == pytest.approx(rgba(PALETTE[2]))
    assert [text.get_text() for text in first.texts] == ["platelet 88"]
    assert outlines(second) == []
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    assert legend == ["cell", "platelet", "true", "found, with score in %"]
    assert fig.get_suptitle() == "Test images"


def rgba(color: str) -> tuple[float, float, float, float]:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue, 1.0


def test_crowded_images_carry_scores_alone_unless_colours_repeat() -> None:
    corners = np.tile([0.1, 0.2, 0.5, 0.6], (8, 1))
    few = Boxes(corners, np.zeros(8, dtype=int), np.full(8, 0.5))
    many = Boxes(corners, np.arange(8), np.full(8, 0.5))
    names = [f"kind {i}" for i in range(8)]
    assert seen(boxes_figure(photos(1), [few], [few], names))[0].texts[0].get_text() == "50"
    assert seen(boxes_figure(photos(1), [many], [many], names))[0].texts[7].get_text() == "kind 7 50"


def test_scenes_without_predictions_speak_of_true_boxes_only() -> None:
    true = Boxes(np.array([[0.1, 0.2, 0.5, 0.6]]), np.array([0]))
    none = Boxes(np.zeros((0, 4)), np.zeros(0, dtype=int))
    fig = boxes_figure(photos(4, 1), [true] * 4, [none] * 4, ["cell"])
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["cell", "true"]
    assert len(seen(fig)) == 4


def test_precision_and_recall_by_class() -> None:
    recall = np.linspace(0, 1, 101)
    curves = {f"kind {i}": (recall, 1 - recall * i / 20, 1 - i / 40) for i in range(3)}
    fig = precision_recall_figure(curves, "At IoU 0.5")
    (axes,) = fig.axes
    assert [line.get_label() for line in axes.lines] == [f"kind {i}: AP {1 - i / 40:.3f}" for i in range(3)]
    assert axes.get_xlabel() == "recall"
    assert axes.get_ylabel() == "precision"
    assert axes.get_title(loc="left") == "At IoU 0.5"
    many = {f"kind {i}": (recall, 1 - recall * i / 20, 1 - i / 40) for i in range(20)}
    (axes,) = precision_recall_figure(many).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels[0] == "kind 0: AP 1.000"
    assert labels[5:] == ["kind 19: AP 0.525", "14 others"]
    assert sum(len(np.asarray(line.get_xdata())) == 101 for line in axes.lines) == 20
    looks = {(line.get_color(), line.get_linestyle()) for line in precision_recall_figure(
        {f"{i}": (recall, recall, 0.5) for i in range(12)}).axes[0].lines}  # fmt: skip
    assert len(looks) == 12


# Size -----------------------------------------------------------------------------------------


def embedded(fig: Figure) -> list[Image.Image]:
    found = re.findall(r'base64,([^"]*)"', to_svg(fig))
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in found]


def test_large_images_are_embedded_small() -> None:
    none = Boxes(np.zeros((0, 4)), np.zeros(0, dtype=int))
    fig = boxes_figure(photos(3, 3, 900, 1200), [none] * 3, [none] * 3, ["cell"])
    pictures = embedded(fig)
    assert len(pictures) == 3
    assert max(side for picture in pictures for side in picture.size) <= 256
    source = np.asarray(fig.axes[0].images[0].get_array())
    assert source.shape == (180, 240, 3)
    ramp = np.broadcast_to(np.linspace(0, 255, 1200), (1, 900, 1200))
    shown = np.asarray(samples_figure(ramp[None], ramp[None], ["a"]).axes[0].images[0].get_array())
    assert shown.shape == (90, 120)
    assert np.abs(shown[5] - np.linspace(0, 255, 120)).max() < 5  # all of it
    stripes = np.broadcast_to(255 * (np.arange(1200) % 2), (1, 1, 900, 1200))
    shown = np.asarray(samples_figure(stripes, stripes, ["a"]).axes[0].images[0].get_array())
    assert set(shown.flat) <= {125, 126, 127, 128, 129, 130}  # an average


def test_other_channels_are_refused() -> None:
    with pytest.raises(InputError, match=r"an image of shape \(4, 8, 8\)\n  expected: \(1, H, W\) in grey"):
        samples_figure(photos(1, 4, 8, 8), photos(1, 4, 8, 8), ["a"])
