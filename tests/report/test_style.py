from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from quire.report.style import INK, PALETTE, figure, inline, plain, to_svg
from tests.report.checking import Page


def example(title: str = "Loss") -> Figure:
    fig = figure()
    axes = fig.subplots()
    axes.plot([0, 1, 2], [3, 1, 2], label="train")
    axes.axhline(1.5, color="k")
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.text(1, 2, "a note")
    axes.legend()
    return fig


def linear_light(color: str) -> np.ndarray:
    return np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)])


def luminance(color: str) -> float:
    return float(np.dot([0.2126, 0.7152, 0.0722], linear_light(color)))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", ["#ffffff", "#15181c"])
def test_colours_are_readable_on_both_papers(paper: str) -> None:
    assert contrast(INK, paper) > 4
    assert min(contrast(color, paper) for color in PALETTE) > 3


# Linear-light matrices of Machado, Oliveira and Fernandes (2009) at full severity.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
PROTANOPIA = np.array(
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
)


TRITANOPIA = np.array(
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
)


@pytest.mark.parametrize("vision", [np.eye(3), DEUTERANOPIA, PROTANOPIA, TRITANOPIA])
def test_first_colours_differ_in_any_vision(vision: np.ndarray) -> None:
    seen = [np.clip(vision @ linear_light(color), 0, 1) ** (1 / 2.2) for color in PALETTE[:4]]
    gaps = [np.abs(seen[i] - seen[j]).max() for i in range(4) for j in range(i)]
    assert min(gaps) > 0.25


def test_equal_figures_give_equal_text() -> None:
    assert to_svg(example()) == to_svg(example())
    assert to_svg(example()) != to_svg(example("Other"))


def test_svg_is_one_element_without_date_style_sheet_or_black() -> None:
    svg = to_svg(example())
    root = ElementTree.fromstring(svg)
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names <= {"svg", "g", "defs", "path", "use", "text", "tspan", "clipPath", "rect"}
    assert svg.startswith("<svg ")
    assert "#000000" not in svg
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss", "step", "loss", "train", "a note"} <= set(texts)
    # Text that names no fill would be black, which dark paper swallows.
    assert all("fill:" in e.get("style", "") for e in root.iter("{http://www.w3.org/2000/svg}text"))


def test_chosen_colours_stay() -> None:
    fig = figure()
    axes = fig.subplots()
    axes.plot([0, 1], [0, 1], color="#123456")
    assert "#123456" in to_svg(fig)


def test_no_grid_across_a_colour_bar() -> None:
    fig = figure()
    axes = fig.subplots()
    fig.colorbar(axes.imshow(np.eye(2)), ax=axes)
    assert not fig.axes[1].yaxis.get_gridlines()[0].get_visible()
    assert axes.yaxis.get_gridlines()[0].get_visible()


def test_inline_pictures_share_a_page() -> None:
    svg = to_svg(example())
    label = 'say "<b>"'
    both = inline(svg, "one", label) + inline(svg, "two", label)
    page = Page(both)
    assert page.tags["svg"] == 2
    assert page.tags["b"] == 0
    assert page.links, "clip paths and marks are found by their ids"
    assert "http" not in both
    assert INK not in both
    assert "currentColor" in both


def test_labels_are_the_users_text() -> None:
    hostile = 'x id="q" d="1.23456" #757b84 <script>'
    svg = inline(to_svg(example(plain(hostile))), "page")
    assert hostile in Page(svg).text


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("cost in $ or $", 40, r"cost in \$ or \$"),
        ("two\nlines\t\x00here", 40, "two lines here"),
        ("abcdefghijklmnop", 9, "abcde…nop"),
        ("short", 9, "short"),
        ("turned \u202e round", 40, "turned round"),
    ],
)
def test_plain(text: str, limit: int, shown: str) -> None:
    assert plain(text, limit) == shown


def test_dollars_are_no_mathematics() -> None:
    assert "cost $x^2$" in Page(inline(to_svg(example(plain("cost $x^2$"))), "page")).of("text")
