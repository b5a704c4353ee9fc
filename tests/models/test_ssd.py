from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional.boxes import convert_boxes
from quire.models import MODELS, build_model, model_spec
from quire.models.ssd import SSD, SSDConfig

TINY = {"model": "resnet", "small": True, "planes": 8, "block": "basic", "layers": [1, 1, 1]}
BACKBONES = sorted(name for name, entry in MODELS.items() if hasattr(entry.module, "stages"))


def tiny(**changes):
    values = {
        "backbone": TINY, "num_classes": 3, "in_channels": 1, "size": (16, 24), "levels": 2, "stride": 2,
        "width": 8, "scales": (0.2, 0.5, 0.9),
    }  # fmt: skip
    return SSD(SSDConfig(**{**values, **changes}))


def example_backbone(name, in_channels):
    """The example of a registered network, on images large enough to have several stages."""
    entry = MODELS[name]
    spec = {"model": name, **entry.example.config, "in_channels": in_channels}
    return json.loads(json.dumps(spec)), max(32, entry.example.input_shape[1])


# Shape and order ------------------------------------------------------------------------------


def test_shapes_are_fixed_by_the_config():
    model = tiny(levels=3, scales=(0.2, 0.4, 0.6, 0.8))
    # Stride 2, 4 and one convolution more; three ratios and one square more in each cell.
    assert model.sizes == ((8, 12), (4, 6), (2, 3))
    boxes = 4 * (96 + 24 + 6)
    logits, offsets = model(torch.randn(5, 1, 16, 24))
    assert logits.shape == (5, boxes, 4)
    assert offsets.shape == (5, boxes, 4)
    assert model.defaults.shape == (boxes, 4)
    assert "defaults" not in model.state_dict()


def test_predictions_stand_in_the_order_of_the_default_boxes(monkeypatch):
    """Maps that hold each cell's row and column, heads that read them off and add the box's own number."""
    model = tiny(width=2)
    maps = []
    for rows, columns in model.sizes:
        y, x = torch.meshgrid(torch.arange(float(rows)), torch.arange(float(columns)), indexing="ij")
        maps.append(torch.stack([(y + 0.5) / rows, (x + 0.5) / columns])[None])
    monkeypatch.setattr(model, "maps", lambda _: maps)
    boxes = 4
    for head, numbers in [(h, 4) for h in (*model.classes, *model.offsets)]:
        weight = torch.zeros(boxes, numbers, 2, 3, 3)
        weight[:, 0, 0, 1, 1] = 1  # the first number is the row, the second the column, the third the box
        weight[:, 1, 1, 1, 1] = 1
        bias = torch.zeros(boxes, numbers)
        bias[:, 2] = torch.arange(boxes)
        head.weight.data, head.bias.data = weight.flatten(0, 1), bias.flatten()
    centre = convert_boxes(model.defaults, "corners", "centre")
    shapes = [(0.2, 1.0), (0.2, 2.0), (0.2, 0.5), (math.sqrt(0.2 * 0.5), 1.0)]
    shapes += [(0.5, 1.0), (0.5, 2.0), (0.5, 0.5), (math.sqrt(0.5 * 0.9), 1.0)]
    for out in model(torch.zeros(1, 1, 16, 24)):
        torch.testing.assert_close(out[0, :, 0], centre[:, 1])
        torch.testing.assert_close(out[0, :, 1], centre[:, 0])
        for i, (_, _, box, _) in enumerate(out[0].tolist()):
            side, ratio = shapes[round(box) + (4 if i >= 8 * 12 * 4 else 0)]
            expected = [side * math.sqrt(ratio), side / math.sqrt(ratio)]
            assert centre[i, 2:].tolist() == pytest.approx(expected)


def test_channels_last_gives_the_same():
    model, x = tiny().eval(), torch.randn(2, 1, 16, 24)
    expected = model(x)
    last = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    for a, b in zip(last, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("prior", [0.5, 0.99])
def test_the_background_begins_with_its_prior(prior):
    model = tiny(prior=prior)
    for head in model.classes:
        nn.init.zeros_(head.weight)
    probabilities = model(torch.randn(2, 1, 16, 24))[0].softmax(-1)
    torch.testing.assert_close(probabilities[..., 0], torch.full_like(probabilities[..., 0], prior))
    torch.testing.assert_close(
        probabilities[..., 1:], torch.full_like(probabilities[..., 1:], (1 - prior) / 3)
    )


# Backbones ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
def test_every_network_can_be_the_backbone(name):
    backbone, side = example_backbone(name, 3)
    model = SSD(SSDConfig(backbone, num_classes=2, size=(side, side), levels=2, stride=1, width=8))
    whole = build_model(backbone)
    own = model.backbone.state_dict()
    missing, unexpected = model.backbone.load_state_dict(
        {key: value for key, value in whole.state_dict().items() if key in own}
    )
    assert not missing
    assert not unexpected
    # Nothing that the maps depend on was left out.
    x = torch.randn(2, 3, side, side)
    stages = whole.eval().stages(x)
    for kept, full in zip(model.eval().backbone.stages(x), stages[: model.first + 2], strict=False):
        assert torch.equal(kept, full)
    # All that they do not depend on was: a gradient reaches each parameter that is left.
    logits, offsets = model.train()(torch.randn(8, 3, side, side))
    (logits.square().sum() + (offsets - 1).square().sum()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key
    left = sum(p.numel() for p in model.backbone.parameters())
    assert left < sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("name", BACKBONES)
def test_parts_hold_every_parameter_once(name):
    backbone, side = example_backbone(name, 1)
    model = SSD(SSDConfig(backbone, in_channels=1, size=(side, side), levels=2, stride=1, width=8))
    for key, _ in model.named_parameters():
        assert sum(key.startswith(prefix) for part in model.parts for prefix in part) == 1, key
    assert model.parts[0][0].startswith("backbone.")
    assert all(part for part in model.parts)


def test_a_detector_can_be_built_where_nothing_is_differentiated():
    with torch.no_grad():
        model = tiny()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in tiny().named_parameters()]


def test_the_finest_map_has_the_stride_that_was_asked_for():
    assert tiny(stride=1).sizes == ((16, 24), (8, 12))
    assert tiny(stride=3).sizes == ((4, 6), (2, 3))
    assert tiny(stride=4).sizes == ((4, 6), (2, 3))
    odd = tiny(size=(15, 21), stride=4)
    assert odd.sizes == ((4, 6), (2, 3))
    assert odd(torch.randn(2, 1, 15, 21))[0].shape == (2, len(odd.defaults), 4)


def depends(output, parameter):
    (gradient,) = torch.autograd.grad(output.square().sum(), parameter, allow_unused=True, retain_graph=True)
    return gradient is not None and bool(gradient.abs().sum() > 0)


@pytest.mark.parametrize("neck", ["none", "top-down"])
def test_only_the_path_from_coarse_to_fine_tells_finer_maps_of_coarser_ones(neck):
    model = tiny(neck=neck, levels=3, scales=(0.2, 0.4, 0.6, 0.8))
    fine, middle, coarse = model.maps(torch.randn(2, 1, 16, 24))
    assert [m.shape[2:] for m in (fine, middle, coarse)] == list(model.sizes)
    joined = neck == "top-down"
    assert depends(fine, model.lateral[0][0].weight)
    assert depends(fine, model.lateral[1][0].weight) == joined
    assert depends(fine, model.extra[0][1][0].weight) == joined
    assert depends(coarse, model.lateral[1][0].weight)  # which the additional map is made from
    assert not depends(coarse, model.lateral[0][0].weight)


def test_a_description_is_plain_json():
    model = tiny(backbone={**TINY, "layers": (1, 1, 1)})
    spec = model_spec(model)
    text = json.dumps(spec)
    again = build_model(json.loads(text))
    assert model_spec(again) == json.loads(text) == spec
    again.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 16, 24)
    for a, b in zip(again.eval()(x), model.eval()(x), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(again.defaults, model.defaults)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backbone": {"model": "mlp", "in_features": 3, "out_features": 2}}, r"in_channels"),
        ({"backbone": {"model": "resnett"}}, r"resnett[\s\S]*did you mean 'resnet'"),
        ({"backbone": {}}, r"without its name"),
        ({"stride": 16}, r"stride is 16[\s\S]*4×6 cells[\s\S]*at most 1×2[\s\S]*smaller stride"),
        (
            {"levels": 6, "scales": ()},
            r"6 levels from images of 16×24[\s\S]*at most 4[\s\S]*set levels to 4",
        ),
        ({"levels": 0, "scales": (1.0,)}, r"levels is 0[\s\S]*>= 1"),
        ({"size": (16, 0)}, r"width in size is 0"),
        ({"scales": (0.2, 0.5)}, r"2 scales for 2 levels[\s\S]*one more[\s\S]*fit_scales"),
        ({"neck": "top"}, r"unknown neck 'top'[\s\S]*top-down"),
        ({"prior": 1.0}, r"prior is 1.0"),
    ],
)
def test_messages(changes, words):
    with pytest.raises(InputError, match=words):
        tiny(**changes)


def test_a_network_without_feature_maps_is_refused(monkeypatch):
    entry = MODELS["resnet"]
    bare = type("Bare", (nn.Module,), {"__init__": lambda self, config: nn.Module.__init__(self)})
    monkeypatch.setitem(MODELS._entries, "resnet", entry._replace(module=bare))
    with pytest.raises(InputError, match=r"'resnet' under a detector[\s\S]*vgg[\s\S]*convolutional"):
        tiny()


def test_images_of_another_size_are_refused():
    model = tiny()
    for shape in ((2, 1, 24, 16), (2, 3, 16, 24), (1, 16, 24)):
        with pytest.raises(InputError, match=r"images of shape[\s\S]*\(N, 1, 16, 24\)[\s\S]*size"):
            model(torch.zeros(shape))
