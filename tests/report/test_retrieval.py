"""The picture of retrieval: what stands where, and which frames are green."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from quire.errors import InputError
from quire.report.pictures import embed
from quire.report.retrieval import MOST_PIXELS, retrieval_figure
from quire.report.style import GREEN, VERMILION, to_svg
from tests.report.checking import Page

draw = np.random.default_rng(0)


@pytest.mark.parametrize("channels", [1, 3])
def test_neighbours_stand_beside_their_query_in_their_order(channels: int) -> None:
    queries = draw.integers(0, 256, (2, channels, 5, 7))
    neighbours = draw.integers(0, 256, (2, 3, channels, 5, 7))
    found = [["cat", "dog", "cat"], ["dog", "dog", "a $strange$ name of a class"]]
    likeness = np.array([[0.99, 0.5, -0.25], [1.0, 0.75, 0.1]])
    fig = retrieval_figure(queries, neighbours, ["cat", "dog"], found, likeness)
    grid = np.array(fig.axes).reshape(2, 4)
    for i in range(2):
        for j, image in enumerate([queries[i], *neighbours[i]]):
            axes = grid[i, j]
            shown = np.asarray(axes.images[0].get_array())
            wanted = image[0] if channels == 1 else image.transpose(1, 2, 0)
            np.testing.assert_array_equal(shown, wanted)
            if not j:
                assert axes.get_title() == ["cat", "dog"][i]
                assert not any(spine.get_visible() for spine in axes.spines.values())
                continue
            right = found[i][j - 1] == ["cat", "dog"][i]
            for spine in axes.spines.values():
                assert spine.get_visible()
                assert to_hex(spine.get_edgecolor()) == (GREEN if right else VERMILION)
                assert spine.get_linestyle() == ("-" if right else "--"), "told apart without colour"
    assert grid[0, 2].get_title() == "dog  0.50"
    assert grid[0, 3].get_title() == "cat  -0.25"
    page = Page(embed(to_svg(fig), "picture.svg", "a picture")[0])
    assert "Nearest neighbours" in page.text


def test_large_images_are_shrunk() -> None:
    fig = retrieval_figure(
        np.zeros((1, 3, 400, 200)), np.zeros((1, 1, 3, 400, 200)), ["a"], [["a"]], np.ones((1, 1))
    )
    assert np.asarray(fig.axes[0].images[0].get_array()).shape == (MOST_PIXELS, MOST_PIXELS // 2, 3)


def test_what_does_not_belong_together_is_refused() -> None:
    one, two = np.zeros((1, 1, 4, 4)), np.zeros((1, 2, 1, 4, 4))
    good = ["a"], [["a", "b"]], np.ones((1, 2))
    retrieval_figure(one, two, *good)
    for wrong in (
        (one, two[:, :, :, :3], *good),
        (np.zeros((1, 2, 4, 4)), np.zeros((1, 2, 2, 4, 4)), *good),
        (one, two, ["a", "b"], *good[1:]),
        (one, two, ["a"], [["a"]], good[2]),
        (one, two, *good[:2], np.ones((2, 1))),
    ):
        with pytest.raises(InputError, match=r"\(Q, C, H, W\), \(Q, k, C, H, W\)"):
            retrieval_figure(*wrong)
