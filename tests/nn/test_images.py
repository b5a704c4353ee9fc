"""The scale of images, and what augmentation does to batches of them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional import augment
from quire.nn.heads import IGNORE, Categorical
from quire.nn.images import Augmentation, ImageInputs
from quire.options import Augment

MEAN, STD = (10.0, 120.0, 200.0), (3.0, 60.0, 0.5)


def photos(count: int = 6, channels: int = 3) -> Tensor:
    return torch.randint(0, 256, (count, channels, 10, 12), dtype=torch.uint8)


# The scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.bfloat16])
def test_pixels_are_standardised_by_channel(dtype: torch.dtype) -> None:
    x = photos().to(dtype)
    found = ImageInputs(MEAN, STD)(x)
    wanted = np.stack(
        [(x[:, c].double().numpy() - MEAN[c]) / STD[c] for c in range(3)], 1
    )  # numpy, channel by channel
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_the_type_is_that_of_the_buffers_and_the_layout_that_of_the_images() -> None:
    layer = ImageInputs(MEAN, STD)
    assert layer.double()(photos()).dtype == torch.float64
    assert layer.bfloat16()(photos().float()).dtype == torch.bfloat16
    strided = photos().contiguous(memory_format=torch.channels_last)
    assert layer.float()(strided).is_contiguous(memory_format=torch.channels_last)
    assert layer(photos()).is_contiguous()


def test_the_scale_travels_with_the_weights_and_in_its_description() -> None:
    layer = ImageInputs((0.1, 1 / 3), (7.7, 1e-3))
    again = ImageInputs.from_spec(json.loads(json.dumps(layer.spec())))
    assert torch.equal(again.mean, layer.mean)
    assert torch.equal(again.std, layer.std)
    other = ImageInputs((0.0, 0.0), (1.0, 1.0))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.mean, layer.mean)
    assert set(layer.state_dict()) == {"mean", "std"}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = ImageInputs(MEAN, STD)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.scale(x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_it_is_exported_with_any_number_of_images(dtype: torch.dtype) -> None:
    model, x = Scaled().eval(), photos().to(dtype)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
def test_onnxruntime_computes_the_same_from_bytes() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = Scaled().eval(), photos()
    program = torch.onnx.export(
        model, (x[:2],), dynamo=True, verbose=False, dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    assert program is not None
    buffer = io.BytesIO()
    program.save(buffer)
    session = onnxruntime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_messages_of_the_scale() -> None:
    with pytest.raises(InputError, match=r"images of shape \(6, 1, 10, 12\)\n  expected: \(N, 3, H, W\)"):
        ImageInputs(MEAN, STD)(photos(channels=1))
    with pytest.raises(InputError, match="2 means and 1 standard deviations"):
        ImageInputs((1.0, 2.0), (1.0,))
    with pytest.raises(InputError, match="the standard deviations above 0\n  fix: give a channel that never"):
        ImageInputs((1.0,), (0.0,))
    with pytest.raises(InputError, match="finite"):
        ImageInputs((float("nan"),), (1.0,))


# Augmentation ---------------------------------------------------------------------------------


def make(classes: int | None = 5, **options: Any) -> Augmentation:
    return Augmentation(Augment(**options), classes, MEAN)


def boxes_and_labels(count: int = 6) -> tuple[Tensor, Tensor]:
    corner = torch.rand(count, 4, 2) * 0.7
    labels = torch.randint(0, 3, (count, 4))
    labels[:, -1] = -1
    boxes = torch.cat([corner, corner + 0.3], -1)
    return torch.where((labels >= 0)[..., None], boxes, 0.0), labels


def test_nothing_is_touched_where_nothing_is_on() -> None:
    x, target, (boxes, labels) = photos(), torch.arange(6), boxes_and_labels()
    before = torch.get_rng_state()
    off = make(aspect=2.0)  # a window as large as the image has no room for another shape
    assert not off.active
    assert all(a is b for a, b in zip(off.images(x, target), (x, target), strict=True))
    assert all(a is b for a, b in zip(off.scenes(x, boxes, labels), (x, boxes, labels), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


ALONE: dict[str, Any] = {
    "crop": lambda x: augment.random_window(x, smallest=0.5, fill=torch.tensor(MEAN)),
    "zoom_out": lambda x: augment.random_window(x, largest=2.0, fill=torch.tensor(MEAN)),
    "shift": lambda x: augment.random_shift(x, 3),  # of 12 pixels, the longer side
    "flip": lambda x: augment.random_flip(x, 0.5),
    "colour": lambda x: augment.colour_jitter(x, 0.5),
    "cut_out": lambda x: augment.cut_out(x, 0.5, fill=torch.tensor(MEAN)),
}
VALUES = {"crop": 0.5, "zoom_out": 2.0, "shift": 0.25, "flip": 0.5, "colour": 0.5, "cut_out": 0.5}


@pytest.mark.parametrize("name", ALONE)
def test_each_option_is_its_function_under_the_global_seed(name: str) -> None:
    x, target = photos(), torch.arange(6)
    torch.manual_seed(3)
    found, same = make(**{name: VALUES[name]}).images(x, target)
    torch.manual_seed(3)
    assert torch.equal(found, ALONE[name](x))
    assert found.dtype == torch.uint8
    assert same is target


def test_changes_come_in_their_order() -> None:
    x, target = photos(), torch.arange(6) % 5
    torch.manual_seed(3)
    found, shares = make(**VALUES, aspect=2.0, mixup=0.4).images(x, target)
    torch.manual_seed(3)
    y = augment.random_window(x, smallest=0.5, largest=2.0, aspect=2.0, fill=MEAN)
    for name in ("shift", "flip", "colour", "cut_out"):
        y = ALONE[name](y)
    y, wanted = augment.mixup(y, torch.eye(5)[target], 0.4)
    assert torch.equal(found, y)
    assert torch.equal(shares, wanted)


@pytest.mark.parametrize("options", [{"mixup": 0.5}, {"cutmix": 0.5}, {"mixup": 0.5, "cutmix": 0.5}])
def test_ignored_images_stay_ignored_when_others_are_mixed(options: dict[str, float]) -> None:
    x, target = photos(200), torch.randint(0, 5, (200,))
    target[::3] = IGNORE
    before = target.clone()
    mixed, shares = make(**options).images(x, target)
    ignored = target == IGNORE
    assert torch.equal(target, before)
    assert shares.shape == (200, 5)
    assert shares.dtype == torch.float32
    assert (shares[ignored] == 0).all()
    assert torch.equal(mixed[ignored], x[ignored])
    torch.testing.assert_close(shares[~ignored].sum(1), torch.ones(int((~ignored).sum())))
    assert ((shares > 0).sum(1) == 2).sum() > 20
    assert Categorical(5).weigh(shares) == (~ignored).sum()


def test_mixup_and_cutmix_share_the_batch_by_lot() -> None:
    x = torch.arange(400).reshape(-1, 1, 1, 1).expand(-1, 1, 8, 8).float()
    mixed, shares = Augmentation(Augment(mixup=1.0, cutmix=1.0), 400, (0.0,)).images(x, torch.arange(400))
    values = [len(image.unique()) for image in mixed]
    pasted = sum(count == 2 for count in values)
    assert set(values) == {1, 2}  # blended evenly, or of two images
    assert 130 < pasted < 250  # half, but for windows that are empty or the whole image
    expected = (shares.double() @ torch.arange(400.0).double()).float()  # the same shares mix both
    torch.testing.assert_close(mixed.mean((1, 2, 3)), expected, rtol=1e-4, atol=1e-3)


def test_scenes_lose_the_labels_of_boxes_that_left() -> None:
    x, (boxes, labels) = photos(60), boxes_and_labels(60)
    before = labels.clone()
    torch.manual_seed(5)
    found, moved, kinds = make(None, crop=0.4, flip=0.5, shift=0.2, colour=0.2, cut_out=0.2).scenes(
        x, boxes, labels
    )
    torch.manual_seed(5)
    y, b, p = augment.random_window(x, boxes, labels >= 0, smallest=0.4, fill=MEAN)
    y, b, p = augment.random_shift(y, 2, None, b, p)
    y, b, p = augment.random_flip(y, 0.5, None, b, p)
    assert torch.equal(found, augment.cut_out(augment.colour_jitter(y, 0.2), 0.2, fill=MEAN))
    assert torch.equal(moved, b)
    assert torch.equal(kinds >= 0, p)
    assert torch.equal(kinds[p], labels[p])
    assert (kinds[~p] == -1).all()
    assert (moved[~p] == 0).all()
    assert torch.equal(labels, before)
    assert 10 < p.sum() < (labels >= 0).sum()


def test_boxes_cannot_be_blended() -> None:
    text = (
        r"--augment.cutmix 0.5 where targets are not classes\n  expected: .*\n  fix: leave --augment.cutmix"
    )
    with pytest.raises(InputError, match=text):
        make(None, cutmix=0.5)
    with pytest.raises(InputError, match=r"--augment\.mixup"):
        make(5, mixup=0.2).check_scenes()
    with pytest.raises(InputError, match=r"--augment\.mixup"):
        make(5, mixup=0.2).scenes(photos(), *boxes_and_labels())
    make(None, flip=0.5).check_scenes()


def test_augmentation_leaves_nothing_in_the_weights() -> None:
    assert make(flip=0.5).state_dict() == {}
    assert list(make(flip=0.5).parameters()) == []


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x, target, (boxes, labels) = photos().cuda(), torch.arange(6).cuda() % 5, boxes_and_labels()
    boxes, labels = boxes.cuda(), labels.cuda()
    full = make(**VALUES, aspect=2.0, mixup=0.4, cutmix=0.4).cuda()
    plain, scale = make(None, **VALUES).cuda(), ImageInputs(MEAN, STD).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            pixels, shares = full.images(x, target)
            scaled = scale(plain.scenes(x, boxes, labels)[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pixels.is_cuda
    assert shares.is_cuda
    assert scaled.is_cuda
