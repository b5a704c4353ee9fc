"""Views of images and rows: what they change, what they leave, and that their description is enough."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.nn.views import ImageViews, RowViews, build_views

EVERYTHING = {
    "shift": 0.1, "zoom": 1.2, "rotate": 20.0, "shear": 0.2, "bend": 0.05, "flip": 0.5, "colour": 0.3,
    "cut_out": 0.3,
}  # fmt: skip


def photos(count: int = 8, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, channels, 10, 12), dtype=torch.uint8)


def test_views_without_changes_are_the_images_themselves() -> None:
    x = photos()
    assert ImageViews([0.0, 0.0, 0.0])(x) is x
    rows = torch.randn(4, 3)
    assert RowViews()(rows) is rows


@pytest.mark.parametrize("name", list(EVERYTHING))
def test_each_change_is_made(name: str) -> None:
    torch.manual_seed(0)
    x = photos()
    views = ImageViews([1.0, 2.0, 3.0], **{name: EVERYTHING[name]})
    found = views(x)
    assert found.shape == x.shape
    assert found.dtype == torch.uint8
    assert not torch.equal(found, x)
    assert not torch.equal(views(x), found), "another view each time"


def test_what_is_cut_out_or_moved_in_has_the_colour_of_the_background() -> None:
    torch.manual_seed(0)
    x = torch.full((50, 3, 10, 12), 200, dtype=torch.uint8)
    for options in ({"cut_out": 0.5}, {"shift": 0.4}, {"zoom": 3.0}):
        found = ImageViews([10.0, 20.0, 30.0], **options)(x).flatten(2)
        assert found.amin((0, 2)).tolist() == [10, 20, 30], options
        assert found.amax((0, 2)).tolist() == [200, 200, 200], options


def test_views_are_rebuilt_from_their_description() -> None:
    x = photos()
    for views in (ImageViews([1.0, 2.5, 3.0], **EVERYTHING), RowViews(noise=0.2, swap=0.1)):
        again = build_views(json.loads(json.dumps(views.spec())))
        assert again.spec() == views.spec()
        given = x if isinstance(views, ImageViews) else torch.randn(20, 4)
        torch.manual_seed(3)
        one = views(given)
        torch.manual_seed(3)
        assert torch.equal(again(given), one)
        assert not views.state_dict(), "nothing is saved with the weights"


def test_rows_get_noise_and_values_of_other_rows() -> None:
    torch.manual_seed(0)
    x = torch.arange(40_000.0).reshape(10_000, 4)
    noise = RowViews(noise=0.5)(x) - x
    assert noise.std().item() == pytest.approx(0.5, rel=0.02)
    assert noise.mean().item() == pytest.approx(0.0, abs=0.02)
    swapped = RowViews(swap=0.25)(x)
    assert (swapped != x).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(swapped % 4, x % 4), "of the same column"


def test_a_damaged_description_is_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)views of 'sounds'.*images or rows"):
        build_views({"kind": "sounds"})
