"""Colours, holes and mixtures of images, against explicit loops and Pillow."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from quire.functional import augment
from tests.functional.test_augment_images import photos, seeded

# Pixels ---------------------------------------------------------------------------------------


def adjusted_by_loop(image: np.ndarray, b: float, c: float, s: float) -> np.ndarray:
    """Brightness, then contrast, then saturation, one pixel at a time."""
    image = image.astype(np.float64) * b
    channels, height, width = image.shape

    def grey(i: int, j: int) -> float:
        pixel = image[:, i, j]
        return float(pixel[0]) if channels == 1 else float(np.dot(pixel, [0.299, 0.587, 0.114]))

    mean = np.mean([grey(i, j) for i in range(height) for j in range(width)])
    image = mean + c * (image - mean)
    for i in range(height):
        for j in range(width):
            level = grey(i, j)
            image[:, i, j] = level + s * (image[:, i, j] - level)
    return np.clip(image, 0, 255)


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_are_those_of_a_loop(channels: int) -> None:
    x = photos(6, channels, 5, 4)
    factors = 0.3 + 1.4 * torch.rand(3, 6, generator=seeded(), dtype=torch.float64)
    found = augment.adjust_colour(x.double(), *factors)
    for i, image in enumerate(x.numpy()):
        loop = torch.from_numpy(adjusted_by_loop(image, *factors[:, i].tolist()))
        torch.testing.assert_close(found[i], loop, rtol=0, atol=1e-9)
    rounded = augment.adjust_colour(x, *factors)
    assert rounded.dtype == torch.uint8
    assert (rounded.double() - found).abs().max() <= 0.5 + 1e-4
    assert (found == 0).any()
    assert (found == 255).any()


@pytest.mark.parametrize(
    ("place", "enhance"),
    [(0, ImageEnhance.Brightness), (1, ImageEnhance.Contrast), (2, ImageEnhance.Color)],
)
def test_each_factor_is_pillows(place: int, enhance: Callable[[Image.Image], ImageEnhance._Enhance]) -> None:
    x = photos(1, height=16, width=16)
    for value in (0.0, 0.4, 1.3):
        factors = [torch.ones(1) for _ in range(3)]
        factors[place] = torch.tensor([value])
        picture = Image.fromarray(x[0].permute(1, 2, 0).numpy())
        wanted = torch.from_numpy(np.array(enhance(picture).enhance(value))).permute(2, 0, 1)
        found = augment.adjust_colour(x, *factors)[0]
        assert (found.int() - wanted.int()).abs().max() <= 1  # Pillow cuts off and rounds grey to a byte


def test_grey_images_have_no_saturation() -> None:
    x, one = photos(4, 1), torch.ones(4)
    assert torch.equal(augment.adjust_colour(x, one, one, torch.tensor([0.0, 0.5, 1.0, 2.0])), x)
    same = photos(4, 1).expand(-1, 3, -1, -1)
    found = augment.adjust_colour(same, one, one, torch.tensor([0.0, 0.5, 1.0, 2.0]))
    assert torch.equal(found, same)


def test_jitter_draws_factors_evenly_about_one() -> None:
    x = torch.full((4000, 1, 2, 2), 100.0)
    factor = augment.colour_jitter(x, 0.3, seeded())[:, 0, 0, 0] / 100  # of an even image: brightness
    assert 0.7 <= factor.min() < 0.705
    assert 1.295 < factor.max() <= 1.3
    assert abs(factor.mean() - 1) < 4 * 0.3 / math.sqrt(3 * 4000)
    assert torch.equal(augment.colour_jitter(photos(), 0.0), photos())
    red = torch.tensor([200.0, 0, 0]).reshape(1, 3, 1, 1).expand(500, 3, 1, 1)
    assert len(augment.colour_jitter(red, 0.3, seeded()).flatten(1)[:, 2].unique()) > 100  # saturation moves


def test_cut_out_by_a_share_in_a_colour() -> None:
    x = torch.full((50, 3, 20, 30), 9, dtype=torch.uint8)
    found = augment.cut_out(x, 0.25, seeded(), fill=(100.4, 50.0, 3.0))
    hole = (found != 9).all(1)
    assert torch.equal(found[:, 0][hole].unique(), torch.tensor([100], dtype=torch.uint8))
    assert torch.equal(found[:, 1][hole].unique(), torch.tensor([50], dtype=torch.uint8))
    assert hole.any(2).sum(1).max() == hole.any(1).sum(1).max() == 5  # a quarter of the shorter side
    assert torch.equal(augment.cut_out(x, 0.0, seeded()), x)
    assert torch.equal(augment.cut_out(x, 0.25, seeded()), augment.cut_out(x, 5, seeded()))


# Pairs ----------------------------------------------------------------------------------------


def test_cutmix_pastes_a_window_and_counts_its_pixels() -> None:
    count, height, width = 200, 11, 17
    number = torch.arange(count)[:, None, None]
    place = (torch.arange(height)[:, None] * width + torch.arange(width)).expand(count, -1, -1)
    x = torch.stack([number.expand_as(place), place], 1).to(torch.float64)
    y = torch.eye(count, dtype=torch.float64)
    mixed, target = augment.cutmix(x, y, 1.0, seeded())
    assert torch.equal(mixed[:, 1], x[:, 1])  # whatever is pasted keeps its place
    shares = []
    for i, (image, row) in enumerate(zip(mixed[:, 0], target, strict=True)):
        foreign = image != i
        owners = image[foreign].unique().long().tolist()
        assert len(owners) <= 1
        rows, columns = foreign.any(1), foreign.any(0)
        assert torch.equal(foreign, rows[:, None] & columns[None, :])
        for span in (rows, columns):
            assert (span.int().diff().abs().sum() <= 2) or not span.any()
        share = foreign.double().mean().item()
        expected = torch.zeros(count, dtype=torch.float64)
        expected[i] += 1 - share
        if owners:
            expected[owners[0]] += share
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)
        high, wide = rows.sum().item(), columns.sum().item()
        assert abs(high / height - wide / width) <= 0.5 / height + 0.5 / width + 1e-9  # the image's own shape
        shares.append(share)
    assert abs(np.mean(shares) - 0.5) < 4 * np.std(shares) / count**0.5  # λ of Beta(1, 1)
    assert 0.2 < np.std(shares) < 0.4


@pytest.mark.parametrize("mix", [augment.mixup, augment.cutmix])
def test_rows_apart_are_left_alone(mix: Callable[..., tuple[Tensor, Tensor]]) -> None:
    x = photos(60)
    y = torch.eye(60)
    apart = torch.rand(60, generator=seeded(9)) < 0.4
    y[apart] = 0
    mixed, target = mix(x, y, 1.0, seeded(), apart)
    assert mixed.dtype == torch.uint8
    assert torch.equal(mixed[apart], x[apart])
    assert (target[apart] == 0).all()
    assert (target[:, apart] == 0).all()
    torch.testing.assert_close(target[~apart].sum(1), torch.ones(int((~apart).sum())))
    assert (target.diagonal()[~apart] < 1).sum() > 5
    free, _ = mix(x, y, 1.0, seeded())
    assert not torch.equal(free[apart], x[apart])


def test_mixup_of_bytes_is_that_of_numbers_rounded() -> None:
    x, y = photos(30), torch.eye(30)
    found, target = augment.mixup(x, y, 0.4, seeded())
    exact, same = augment.mixup(x.double(), y, 0.4, seeded())
    assert torch.equal(target, same)
    assert (found.double() - exact).abs().max() <= 0.5 + 1e-4
    hardly = augment.mixup(torch.ones(5000, 1), torch.ones(5000, 1), 1e-3, seeded())[1]
    assert hardly.isfinite().all()
