"""Images and their boxes under augmentation, against Pillow, explicit loops and drawn rectangles."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from quire.errors import InputError
from quire.functional import augment


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def photos(count: int = 5, channels: int = 3, height: int = 9, width: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, channels, height, width), generator=seeded(seed), dtype=torch.uint8)


def scenes(count: int = 40, rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Boxes anywhere in the image, and which of them are there."""
    corner = torch.rand(count, rows, 2, generator=seeded(seed), dtype=torch.float64) * 0.8
    size = 0.05 + torch.rand(count, rows, 2, generator=seeded(seed + 1), dtype=torch.float64) * 0.5
    present = torch.rand(count, rows, generator=seeded(seed + 2)) < 0.8
    boxes = torch.cat([corner, (corner + size).clamp(max=1)], -1)
    return torch.where(present[..., None], boxes, 0.0), present


# Windows --------------------------------------------------------------------------------------

WINDOWS = torch.tensor(
    [
        [0.0, 0.0, 1.0, 1.0],
        [0.25, 0.1, 0.75, 0.45],
        [-0.4, -0.3, 1.5, 1.2],
        [-0.3, 0.2, 1.4, 0.9],
        [0.0, 0.0, 0.3, 0.3],
    ],
    dtype=torch.float64,
)


def by_pillow(image: Tensor, window: list[float], fill: list[float]) -> Tensor:
    """Pillow's own resampling of a part of the image, channel by channel."""
    height, width = image.shape[1:]
    extent = (window[0] * width, window[1] * height, window[2] * width, window[3] * height)
    channels = []
    for channel, colour in zip(image.numpy(), fill, strict=True):
        picture = Image.fromarray(channel.astype(np.float32))
        taken = picture.transform(
            (width, height), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR, fillcolor=colour
        )
        channels.append(torch.from_numpy(np.array(taken)))
    return torch.stack(channels).double()


def test_windows_are_resampled_like_pillows() -> None:
    x, fill = photos().double(), [10.0, 200.0, 77.0]
    found = augment.take_windows(x, WINDOWS, fill)
    for image, window, result in zip(x, WINDOWS.tolist(), found, strict=True):
        torch.testing.assert_close(result, by_pillow(image, window, fill), rtol=0, atol=1e-3)


def test_the_whole_image_stays_as_it_is() -> None:
    x = photos(height=31, width=57)
    assert torch.equal(augment.random_window(x), x)
    torch.testing.assert_close(augment.random_window(x.float()), x.float(), rtol=0, atol=0.02)


def test_windows_of_bytes_are_those_of_numbers_rounded() -> None:
    x = photos()
    options = {"smallest": 0.4, "largest": 1.7, "aspect": 1.5, "fill": (1.0, 2.0, 3.0)}
    exact = augment.random_window(x.double(), generator=seeded(), **options)  # type: ignore[call-overload]
    found = augment.random_window(x, generator=seeded(), **options)  # type: ignore[call-overload]
    assert found.dtype == torch.uint8
    assert (found.double() - exact).abs().max() <= 0.5 + 1e-3


def test_drawn_windows_keep_their_bounds() -> None:
    x = torch.zeros(20_000, 1, 1, 1)
    windows = augment.draw_windows(x, smallest=0.5, largest=2.0, aspect=2.0, generator=seeded())
    corner, sides = windows[:, :2], windows[:, 2:] - windows[:, :2]
    assert sides.min() >= 0.5 - 1e-6
    assert sides.max() <= 2.0 + 1e-6
    ratio = sides[:, 0] / sides[:, 1]
    assert 1.95 < ratio.max() <= 2.0 + 1e-5
    assert 0.5 - 1e-6 <= ratio.min() < 0.52
    inside = (corner >= 0) & (corner + sides <= 1 + 1e-6)
    around = (corner <= 0) & (corner + sides >= 1 - 1e-6)
    assert torch.equal(inside, sides <= 1)
    assert torch.equal(around, sides >= 1)


def test_sides_and_places_are_spread_evenly() -> None:
    x = torch.zeros(20_000, 1, 1, 1)
    windows = augment.draw_windows(x, smallest=0.25, largest=4.0, generator=seeded()).double()
    sides = windows[:, 2:] - windows[:, :2]
    torch.testing.assert_close(sides[:, 0], sides[:, 1], rtol=1e-5, atol=0)
    place = sides[:, 0].log() / math.log(4.0)  # uniform in ±1
    where = windows[:, :2] / (1 - sides)  # uniform in 0…1, across and down by themselves
    for sample, mean, variance in ((place, 0, 1 / 3), (where[:, 0], 0.5, 1 / 12), (where[:, 1], 0.5, 1 / 12)):
        assert abs(sample.mean() - mean) < 4 * (variance / 20_000) ** 0.5
        assert sample.var().item() == pytest.approx(variance, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([place, *where.T]))[[0, 0, 1], [1, 2, 2]]).max() < 0.03


def follow(box: list[float], window: list[float]) -> list[float] | None:
    """One box in one window, by hand."""
    x0, y0, x1, y1 = window
    centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    if not (x0 <= centre[0] <= x1 and y0 <= centre[1] <= y1):
        return None
    cut = [max(box[0], x0), max(box[1], y0), min(box[2], x1), min(box[3], y1)]
    if cut[2] <= cut[0] or cut[3] <= cut[1]:
        return None
    return [(cut[0] - x0) / (x1 - x0), (cut[1] - y0) / (y1 - y0), (cut[2] - x0) / (x1 - x0),
            (cut[3] - y0) / (y1 - y0)]  # fmt: skip


def window_of(result: Tensor) -> list[list[float]]:
    """The windows that were drawn, read off an image whose pixels hold their own place (see `places`)."""
    side = result.shape[-1]
    lines = result.double()
    found = []
    for image in lines:
        across, down = image[0, side // 2], image[1, :, side // 2]
        ends = []
        for line in (across, down):
            # Where the image neither ends nor is filled, places rise evenly.
            step = line.diff()
            known = ((line > 0.05) & (line < 0.95)).nonzero().flatten()[1:-1]
            slope = step[known[:-1]].median()
            start = line[known[0]] - slope * (known[0] + 0.5)
            ends.append((start.item(), (start + slope * side).item()))
        found.append([ends[0][0], ends[1][0], ends[0][1], ends[1][1]])
    return found


def places(count: int, side: int = 64) -> Tensor:
    """Images of two channels that say where each pixel is."""
    place = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    return torch.stack(torch.broadcast_tensors(place[None, :], place[:, None])).expand(count, -1, -1, -1)


def test_boxes_follow_the_window_that_the_image_shows() -> None:
    boxes, present = scenes()
    image, moved, left = augment.random_window(
        places(40), boxes, present, smallest=0.4, largest=1.8, aspect=1.5, fill=-1.0, generator=seeded(4)
    )
    assert moved.dtype == boxes.dtype
    kept = 0
    for n, window in enumerate(window_of(image)):
        for g in range(boxes.shape[1]):
            expected = follow(boxes[n, g].tolist(), window) if present[n, g] else None
            assert (expected is not None) == bool(left[n, g])
            assert moved[n, g].tolist() == pytest.approx(expected or [0.0] * 4, abs=2e-4)
            kept += expected is not None
    assert 20 < kept < int(present.sum()) - 20  # some went, some stayed


def test_boxes_in_windows_by_hand() -> None:
    boxes = torch.tensor([[[0.2, 0.2, 0.4, 0.6], [0.0, 0.0, 0.24, 1.0], [0.3, 0.3, 0.5, 0.5]]])
    present = torch.tensor([[True, True, False]])
    found, left = augment.boxes_in_windows(boxes, present, torch.tensor([[0.1, 0.1, 0.6, 0.5]]))
    torch.testing.assert_close(found[0], torch.tensor([[0.2, 0.25, 0.6, 1.0], [0, 0, 0.28, 1], [0] * 4]))
    assert left.tolist() == [[True, True, False]]
    # Its centre at 0.12 is just outside this one; a box without area is nothing.
    _, left = augment.boxes_in_windows(boxes, present, torch.tensor([[0.13, 0.0, 0.6, 1.0]]))
    assert left.tolist() == [[True, False, False]]
    flat = torch.tensor([[[0.3, 0.3, 0.3, 0.5]]])
    assert not augment.boxes_in_windows(flat, present[:, :1], torch.tensor([[0.0, 0, 1, 1]]))[1]


def drawn(pixels: Tensor, height: int, width: int) -> Tensor:
    """Black images with the box (N, 4), in whole pixels, in white."""
    x = torch.zeros(len(pixels), 1, height, width, dtype=torch.uint8)
    for image, (x1, y1, x2, y2) in zip(x, pixels.tolist(), strict=True):
        image[0, y1:y2, x1:x2] = 255
    return x


MOVES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "window": lambda x, b, p: augment.random_window(
        x, b, p, smallest=0.5, largest=2.0, aspect=2.0, generator=seeded(2)
    ),
    "shift": lambda x, b, p: augment.random_shift(x, 9, seeded(2), b, p),
    "crop": lambda x, b, p: augment.random_crop(x, (20, 30), 3, seeded(2), b, p),
    "flip": lambda x, b, p: augment.random_flip(x, 0.5, seeded(2), b, p),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_rectangle_lands_where_its_box_says(name: str) -> None:
    corner = torch.randint(0, 20, (200, 1, 2), generator=seeded(3))
    size = torch.randint(4, 12, (200, 1, 2), generator=seeded(5))
    pixels = torch.cat([corner, corner + size], -1)
    boxes = pixels / torch.tensor([48, 32, 48, 32])
    before = boxes.clone()
    x, moved, left = MOVES[name](drawn(pixels[:, 0], 32, 48), boxes, torch.ones(200, 1, dtype=torch.bool))
    assert torch.equal(boxes, before)
    seen = x[:, 0] > 127
    height, width = x.shape[2:]
    for lit, box, there in zip(seen, moved[:, 0], left[:, 0], strict=True):
        if not there:
            continue
        # Linear interpolation passes half of white exactly at the edge, so centres inside the box are lit.
        for line, extent, low, high in (
            (lit.any(0), width, box[0], box[2]),
            (lit.any(1), height, box[1], box[3]),
        ):
            centre = (torch.arange(extent) + 0.5) / extent
            expected = (centre > low) & (centre < high)
            undecided = ((centre - low).abs() < 1e-3) | ((centre - high).abs() < 1e-3)
            assert torch.equal(line | undecided, expected | undecided)
    assert left.sum() > 50
    assert (moved - before).abs().max() > 0.1


def test_flipped_boxes_by_hand() -> None:
    boxes = torch.tensor([[[0.1, 0.2, 0.4, 0.9], [0.0, 0.0, 0.0, 0.0]]])
    present = torch.tensor([[True, False]])
    _, moved, left = augment.random_flip(photos(1), 1.0, None, boxes, present)
    torch.testing.assert_close(moved[0], torch.tensor([[0.6, 0.2, 0.9, 0.9], [0.0] * 4]))
    assert torch.equal(left, present)
    assert torch.equal(augment.random_flip(photos(1), 0.0, None, boxes, present)[1], boxes)


def test_the_same_pixels_with_and_without_boxes() -> None:
    x, (boxes, present) = photos(40), scenes()
    assert torch.equal(
        augment.random_shift(x, 3, seeded()), augment.random_shift(x, 3, seeded(), boxes, present)[0]
    )
    assert torch.equal(
        augment.random_flip(x, 0.5, seeded()), augment.random_flip(x, 0.5, seeded(), boxes, present)[0]
    )
    alone = augment.random_window(x, smallest=0.5, generator=seeded())
    assert torch.equal(alone, augment.random_window(x, boxes, present, smallest=0.5, generator=seeded())[0])


# Errors and devices ---------------------------------------------------------------------------


def test_messages() -> None:
    x, (boxes, present) = photos(40), scenes()
    with pytest.raises(InputError, match=r"windows of sides from 1 to 0.5 .*\n  expected: 0 < smallest"):
        augment.random_window(x, smallest=1.0, largest=0.5)
    with pytest.raises(InputError, match=r"an aspect of 0\.5"):
        augment.random_window(x, aspect=0.5)
    with pytest.raises(InputError, match=r"a colour of 2 values for images with 3 channels"):
        augment.random_window(x, fill=(1.0, 2.0))
    with pytest.raises(InputError, match=r"boxes \(40, 6, 4\) and present \(40, 5\) for 40 images"):
        augment.random_flip(x, 0.5, None, boxes, present[:, :5])
    with pytest.raises(InputError, match=r"for 3 images\n  expected: boxes \(3, G, 4\)"):
        augment.random_shift(x[:3], 1, None, boxes, present)
    with pytest.raises(InputError, match="boxes of shape"):
        augment.random_window(x, boxes[..., :3], present)
    for change in (augment.random_flip, augment.random_shift):
        with pytest.raises(InputError, match=r"boxes without present\n  expected: both, or images alone"):
            change(x, 1, None, boxes)
    with pytest.raises(InputError, match="present without boxes"):
        augment.random_window(x, None, present)
    with pytest.raises(InputError, match="boxes without present"):
        augment.random_crop(x, (4, 4), 0, None, boxes)
    with pytest.raises(InputError, match="colours of images with 4 channels"):
        augment.colour_jitter(photos(2, 4), 0.1)
    with pytest.raises(InputError, match=r"share to cut out 1.5\n  expected: a number in \[0, 1\]"):
        augment.cut_out(x, 1.5)
    with pytest.raises(InputError, match="strength of colour changes 2"):
        augment.colour_jitter(x, 2)
    with pytest.raises(InputError, match=r"targets of type torch\.int64"):
        augment.cutmix(x, torch.zeros(40, dtype=torch.long))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x, (boxes, present) = photos(40).cuda(), scenes()
    boxes, present, fill = boxes.float().cuda(), present.cuda(), torch.tensor([9.0, 8.0, 7.0]).cuda()
    y, draw = torch.eye(40).cuda(), seeded(0, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = augment.random_window(
            x, boxes, present, smallest=0.5, largest=2.0, aspect=2.0, fill=fill, generator=draw
        )
        made = augment.random_shift(made[0], 3, draw, made[1], made[2])
        made = augment.random_flip(made[0], 0.5, draw, made[1], made[2])
        pixels = augment.cut_out(augment.colour_jitter(made[0], 0.4, draw), 0.2, draw, fill)
        pixels, y = augment.mixup(pixels, y, 0.2, draw, y[:, 0] > 0)
        pixels, y = augment.cutmix(pixels, y, 0.2, draw, y[:, 0] > 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pixels.is_cuda
    assert pixels.dtype == torch.uint8
    windows = WINDOWS.float()
    on_cpu = augment.take_windows(photos(), windows, 5.0)
    found = augment.take_windows(photos().cuda(), windows.cuda(), 5.0).cpu()
    assert (found.int() - on_cpu.int()).abs().max() <= 1
