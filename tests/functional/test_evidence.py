"""Maps of evidence against closed forms, finite differences, and images whose evidence is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.evidence import activation_maps, class_activation_map, evidence_maps, grad_cam
from quire.models import MODELS, build_model
from quire.models.vision import ConvNet


class Pooled(nn.Module):
    """Two stages, an average over places and a linear layer, with dropout and batch norm on the way."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True))
        self.second = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(5, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(0.5)
        )
        self.classifier = nn.Linear(6, classes)

    def stages(self, x: Tensor) -> list[Tensor]:
        first = self.first(x)
        return [first, self.second(first)]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.second(self.first(x)).mean((2, 3)))


def photos(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 10, 8, dtype=torch.float64)


def test_a_class_activation_map_is_a_weighted_sum_whose_mean_is_the_logit() -> None:
    features, linear = torch.randn(5, 6, 4, 3).double(), nn.Linear(6, 7).double()
    classes = torch.tensor([0, 6, 3, 3, 1])
    found = class_activation_map(features, linear.weight, classes)
    for n, c in enumerate(classes.tolist()):
        loop = torch.zeros(4, 3, dtype=torch.float64)
        for k in range(6):
            loop += linear.weight[c, k] * features[n, k]
        torch.testing.assert_close(found[n], loop)
    logits = linear(features.mean((2, 3)))[torch.arange(5), classes]
    torch.testing.assert_close(found.mean((1, 2)) + linear.bias[classes], logits)
    one = class_activation_map(features, linear.weight, 3)
    torch.testing.assert_close(one[2:4], found[2:4])


def test_grad_cam_of_a_pooled_network_is_its_class_activation_map() -> None:
    torch.manual_seed(0)
    model, x = Pooled().double().eval(), photos()
    found = evidence_maps(model, x, 2)
    features = model.stages(x)[-1].detach()
    assert features.shape == (5, 6, 5, 4)
    closed = class_activation_map(features, model.classifier.weight, 2).clamp(min=0) / (5 * 4)
    torch.testing.assert_close(found.maps, closed.detach())
    torch.testing.assert_close(found.logits, model(x).detach())
    assert 0 < (found.maps == 0).double().mean() < 1


def test_grad_cam_is_that_of_finite_differences() -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    features = torch.randn(2, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    classes = torch.tensor([2, 0])
    found = grad_cam(features, head(features), classes)
    step = 1e-5
    for n, c in enumerate(classes.tolist()):
        slopes = torch.zeros(4, 2, 3, dtype=torch.float64)
        for place in torch.cartesian_prod(torch.arange(4), torch.arange(2), torch.arange(3)).tolist():
            move = torch.zeros(2, 4, 2, 3, dtype=torch.float64)
            move[n][tuple(place)] = step
            with torch.no_grad():
                rise = head(features + move)[n, c] - head(features - move)[n, c]
            slopes[tuple(place)] = rise / (2 * step)
        weighed = sum(slopes[k].mean() * features[n, k].detach() for k in range(4))
        assert isinstance(weighed, Tensor)
        torch.testing.assert_close(found[n], weighed.clamp(min=0), rtol=1e-6, atol=1e-8)


def test_images_do_not_see_each_other() -> None:
    model, x = Pooled().double(), photos()  # in training mode batch norm would mix them
    together = evidence_maps(model, x)
    alone = [evidence_maps(model, x[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(together.maps, torch.cat([one.maps for one in alone]))
    assert torch.equal(together.classes, together.logits.argmax(1))


@pytest.mark.parametrize(("side", "places"), [(8, 4), (7, 7), (3, 3)])
def test_a_map_that_is_too_coarse_is_not_taken(side: int, places: int) -> None:
    """Stages of 8 and 4, 7 and 3, 3 and 1 places a side."""
    maps = evidence_maps(Pooled(), torch.randn(2, 3, side, side)).maps
    assert maps.shape == (2, places, places)


def test_evidence_lies_where_the_class_is() -> None:
    """A network that sums up red for class 0 and blue for class 1."""
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3).reshape(3, 3, 1, 1))  # type: ignore[union-attr,operator]
        model[4].weight.copy_(torch.tensor([[1.0, 0.0, -1.0], [-1.0, 0.0, 1.0]]))  # type: ignore[union-attr,operator]
    x = torch.zeros(1, 3, 8, 8)
    x[0, 0, 1:3, 1:4] = 1.0
    x[0, 2, 5:8, 5:7] = 1.0
    for kind, channel in ((0, 0), (1, 2)):
        maps = evidence_maps(model, x, kind, layer="1").maps
        assert torch.equal(maps[0] > 0, x[0, channel] > 0)


def test_the_model_is_left_as_it_was() -> None:
    model, x = Pooled().double(), photos()
    model.second[2].eval()
    modes = [module.training for module in model.modules()]
    running = model.second[2].running_mean.clone()  # type: ignore[union-attr,operator]
    with torch.no_grad():
        evidence_maps(model, x)
        evidence_maps(model, x, layer="second")
        activation_maps(model, x, ["first"])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model.second[2].running_mean, running)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert not x.requires_grad


def test_frozen_networks_have_evidence_too() -> None:
    model, x = Pooled().double(), photos()
    wanted = evidence_maps(model, x).maps
    model.requires_grad_(False)
    torch.testing.assert_close(evidence_maps(model, x).maps, wanted)
    named = evidence_maps(model, x, layer="second")
    torch.testing.assert_close(named.maps, wanted)
    assert not named.logits.requires_grad


LINEAR = {"resnet": "fc", "densenet": "classifier", "googlenet": "fc"}


@pytest.mark.parametrize("name", [n for n, entry in MODELS.items() if issubclass(entry.module, ConvNet)])
def test_the_networks_of_the_library_have_evidence(name: str) -> None:
    """Of those that average a map and read it linearly, it is the class activation map."""
    entry = MODELS[name]
    model = build_model({"model": name, **entry.example.config}).double().eval()
    channels, height, width = entry.example.input_shape
    x = torch.randn(2, channels, 4 * height, 4 * width, dtype=torch.float64)
    try:
        logits = model(x)
    except InputError:  # a network for one size of images
        x = x[:, :, :height, :width]
        logits = model(x)
    found = evidence_maps(model, x)
    torch.testing.assert_close(found.logits, logits.detach())
    assert found.maps.isfinite().all()
    maps = model.stages(x)
    fine = [one for one in maps if min(one.shape[2:]) >= 4]
    features = fine[-1] if fine else maps[0]
    assert found.maps.shape[1:] == features.shape[2:]
    if name in LINEAR:
        assert features is maps[-1]
        weights = model.get_submodule(LINEAR[name]).get_parameter("weight")
        closed = class_activation_map(features, weights, found.classes).clamp(min=0)
        torch.testing.assert_close(found.maps, closed.detach() / features[0, 0].numel())


def test_activation_maps_are_what_the_layers_gave() -> None:
    model, x = Pooled().double(), photos()
    found = activation_maps(model, x, ["second", "first.0", "first"])
    assert list(found) == ["second", "first.0", "first"]
    model.eval()
    before = model.first[0](x)
    torch.testing.assert_close(found["first.0"], before)  # although the ReLU after it writes in place
    torch.testing.assert_close(found["first"], before.clamp(min=0))
    torch.testing.assert_close(found["second"], model.second(before.clamp(min=0)))
    assert not found["second"].requires_grad
    shared = nn.Linear(2, 2)
    y = torch.randn(1, 2)
    twice = activation_maps(nn.Sequential(shared, shared), y, ["0"])["0"]
    torch.testing.assert_close(twice, shared(shared(y)).detach())


def test_messages() -> None:
    model, x = Pooled().double(), photos()
    with pytest.raises(InputError, match=r"unknown layer 'secnd'\n(.*\n)*.*did you mean 'second'"):
        activation_maps(model, x, ["secnd"])
    with pytest.raises(InputError, match=r"classes from 4 to 4\n  expected: numbers from 0 to 3"):
        evidence_maps(model, x, 4)
    with pytest.raises(InputError, match=r"expected: one class number, or 5 of them"):
        evidence_maps(model, x, torch.tensor([1, 2]))
    with pytest.raises(InputError, match=r"a Sequential, which has no stages\(x\)\n(.*\n)*.*layer=…"):
        evidence_maps(nn.Sequential(nn.Flatten()), x)
    with pytest.raises(InputError, match="not computed from the maps"):
        grad_cam(torch.ones(5, 2, 2, 2, requires_grad=True), model(x), 0)
    with pytest.raises(InputError, match="not computed from the maps"):
        grad_cam(torch.ones(5, 2, 2, 2), torch.ones(5, 2), 0)
    with pytest.raises(InputError, match=r"features of shape \(5, 6\)"):
        class_activation_map(torch.ones(5, 6), torch.ones(2, 6), 0)
    with pytest.raises(InputError, match=r"features of shape \(5, 4\)"):
        evidence_maps(model, x, layer="classifier")
    with pytest.raises(InputError, match=r"weights of shape \(2, 5\)"):
        class_activation_map(torch.ones(5, 6, 2, 2), torch.ones(2, 5), 0)

    class Outside(Pooled):
        def stages(self, x: Tensor) -> list[Tensor]:
            return [self.second(self.first(x)).relu()]

    with pytest.raises(
        InputError, match=r"an? Outside, which makes the last map of its stages outside of any"
    ):
        evidence_maps(Outside().double(), x)

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Flatten()])

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[0](x)

    with pytest.raises(InputError, match="layers that were never called: parts"):
        activation_maps(Listed(), x, ["parts"])
