"""Receptive fields: formula, gradient support and brute force against each other."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.functional.receptive import Branches, ReceptiveField, Window, receptive_field, receptive_field_of


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.skip = inner, skip or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.inner(x) + self.skip(x))


class Joined(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def conv(inputs: int, outputs: int, *window: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, *window), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def brute_force(model: nn.Module, size: Sequence[int], position: Sequence[int]) -> Tensor:
    """Which pixels turn the output into NaN when they are NaN, one at a time."""
    model = copy.deepcopy(model).double().eval()
    seen = torch.zeros(*size, dtype=torch.bool)
    with torch.no_grad():
        for place in seen.logical_not().nonzero().tolist():
            x = torch.ones(1, 2, *size).double()
            x[(0, slice(None), *place)] = torch.nan
            seen[tuple(place)] = bool(model(x)[(0, slice(None), *position)].isnan().any())
    return seen


# By formula -----------------------------------------------------------------------------------


def test_by_hand() -> None:
    assert receptive_field([]) == ReceptiveField(1, 1, 0)
    assert receptive_field([Window(3), Window(3)]).size == 5
    assert receptive_field([Window(7, 2, 3), Window(3, 2, 1)]) == ReceptiveField(11, 4, -5)
    # Dilations 1, 2, 4, 8 of two taps: 16, as in WaveNet.
    assert receptive_field([Window(2, dilation=2**k) for k in range(4)]).size == 16
    assert receptive_field([Window(3, 2, 1)]).span(4) == (7, 10)


def test_published_sizes() -> None:
    """The features of VGG-16 see 212 pixels, those of AlexNet 195, each with the last pooling."""
    vgg: list[Window | Branches] = []
    for convolutions in (2, 2, 3, 3, 3):
        vgg += [Window(3, 1, 1)] * convolutions + [Window(2, 2)]
    assert receptive_field(vgg).size == 212
    alexnet = [
        Window(11, 4, 2), Window(3, 2), Window(5, 1, 2), Window(3, 2),
        Window(3, 1, 1), Window(3, 1, 1), Window(3, 1, 1), Window(3, 2),
    ]  # fmt: skip
    assert receptive_field(alexnet).size == 195


def test_branches_see_what_one_of_them_sees() -> None:
    wide, narrow = [Window(5, 1, 2)], [Window(1)]
    assert receptive_field([Branches([wide, narrow, []])]) == receptive_field(wide)
    shifted = Branches([[Window(3)], [Window(1)]])  # without padding, both start at pixel 0
    assert receptive_field([shifted, Window(2, 2), shifted]) == ReceptiveField(8, 2, 0)
    with pytest.raises(InputError, match=r"branches with strides of \[2, 1\] input pixels"):
        receptive_field([Branches([[Window(3, 2)], []])])
    with pytest.raises(InputError, match="at least one chain"):
        receptive_field([Branches([])])
    with pytest.raises(InputError, match="kernel, stride and dilation of at least 1"):
        receptive_field([Window(3, 0)])


# Measured -------------------------------------------------------------------------------------

MODELS: dict[str, tuple[nn.Module, list[Window | Branches]]] = {
    "chain": (
        nn.Sequential(conv(2, 3, 3, 2, 1), nn.MaxPool2d(2), nn.Conv2d(3, 2, 3, 1, 1)),
        [Window(3, 2, 1), Window(2, 2), Window(3, 1, 1)],
    ),
    "skip": (
        nn.Sequential(conv(2, 4, 3), Residual(nn.Sequential(conv(4, 4, 3, 1, 1), conv(4, 4, 3, 1, 1)))),
        [Window(3), Branches([[Window(3, 1, 1)] * 2, []])],
    ),
    "strided skip": (
        Residual(nn.Sequential(conv(2, 4, 3, 2, 1), conv(4, 4, 3, 1, 1)), nn.Conv2d(2, 4, 1, 2)),
        [Branches([[Window(3, 2, 1), Window(3, 1, 1)], [Window(1, 2)]])],
    ),
    "inception": (
        nn.Sequential(
            Joined(conv(2, 2, 1), conv(2, 3, 5, 1, 2), nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(2, 2, 1))),
            nn.AvgPool2d(2),
            conv(7, 2, 3),
        ),
        [Branches([[Window(1)], [Window(5, 1, 2)], [Window(3, 1, 1), Window(1)]]), Window(2, 2), Window(3)],
    ),
    "dilated maxima": (
        nn.Sequential(nn.MaxPool2d(3, 1, 1, 2), nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(2, 1, 2)),
        [Window(3, 1, 1, 2), Window(2, 2), Window(2)],
    ),
    "saturating": (
        nn.Sequential(nn.Conv2d(2, 40, 5), nn.Sigmoid(), nn.Conv2d(40, 2, 3), nn.Tanh(), nn.GELU()),
        [Window(5), Window(3)],
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_formula_gradient_and_brute_force_agree(name: str) -> None:
    model, chain = MODELS[name]
    size = (17, 15)
    field, found = receptive_field(chain), receptive_field_of(model, (2, *size))
    clipped = [
        (max(first, 0), min(stop, extent))
        for (first, stop), extent in zip(map(field.span, found.position), size, strict=True)
    ]
    assert list(found.spans) == clipped
    assert torch.equal(found.support, brute_force(model, size, found.position))
    corner = receptive_field_of(model, (2, *size), (0, 0))
    assert torch.equal(corner.support, brute_force(model, size, (0, 0)))
    assert corner.touches_border


@pytest.mark.parametrize("count", [1, 3])
def test_other_dimensions(count: int) -> None:
    layer = {1: nn.Conv1d, 3: nn.Conv3d}[count]
    pool = {1: nn.MaxPool1d, 3: nn.MaxPool3d}[count]
    model = nn.Sequential(layer(1, 2, 3), nn.ReLU(), pool(2), layer(2, 1, 2))
    field = receptive_field([Window(3), Window(2, 2), Window(2)])
    found = receptive_field_of(model, (1, *[12] * count))
    assert found.size == (field.size,) * count
    assert not found.touches_border
    assert found.support.all() == (field.size == 12)
    assert int(found.support.sum()) == field.size**count


def test_dilation_leaves_holes() -> None:
    found = receptive_field_of(nn.Conv1d(1, 1, 3, dilation=3), (1, 11), (2,))
    assert found.support.nonzero().flatten().tolist() == [2, 5, 8]
    assert (found.size, found.spans) == ((7,), ((2, 9),))


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[..., :6, :].amax((2, 3))


@pytest.mark.parametrize(
    "head", [nn.AdaptiveMaxPool2d(1), nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(6, return_indices=True)]
)
def test_global_pooling_sees_everything(head: nn.Module) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv2d(1, 2, 3), head

        def forward(self, x: Tensor) -> Tensor:
            out = self.head(self.first(x))
            return (out[0] if isinstance(out, tuple) else out).flatten(1)

    found = receptive_field_of(Net(), (1, 8, 8))
    assert found.position == ()
    assert found.support.all()


def test_a_maximum_over_a_part() -> None:
    found = receptive_field_of(Largest(), (1, 9, 4))
    assert found.spans == ((0, 6), (0, 4))


class LargerNeighbour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(x[..., :-1], x[..., 1:])


def test_draws_are_joined() -> None:
    generator = torch.Generator().manual_seed(0)
    assert receptive_field_of(LargerNeighbour(), (1, 6), (2,), probes=1, generator=generator).size == (1,)
    found = receptive_field_of(LargerNeighbour(), (1, 6), (2,), probes=20, generator=generator)
    assert found.spans == ((2, 4),)


def test_an_output_that_sees_nothing() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(1, 1, 4)

    found = receptive_field_of(Constant(), (1, 4))
    assert (found.size, found.support.any().item()) == ((0,), False)


def test_the_model_is_not_changed_and_any_type_is_taken() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.9)).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        assert receptive_field_of(model, (1, 9, 9)).size == (3, 3)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_deep_chain_is_not_lost_to_underflow() -> None:
    model = nn.Sequential(*[nn.Conv1d(1, 1, 3, padding=1) for _ in range(100)])
    assert receptive_field_of(model, (1, 221)).size == (201,)


@pytest.mark.parametrize("last", [nn.ReLU6(inplace=True), nn.Sigmoid(), nn.Hardsigmoid(), nn.Tanh()])
def test_a_deep_net_is_not_lost_to_saturation(last: nn.Module) -> None:
    blocks = [Residual(conv(2, 2, 3, 1, 1)) for _ in range(12)]
    found = receptive_field_of(nn.Sequential(*blocks, last, nn.Conv2d(2, 1, 1)), (2, 27, 27))
    assert found.size == (25, 25)


def test_messages() -> None:
    model = nn.Conv2d(1, 1, 3)
    with pytest.raises(InputError, match=r"position \(6, 0\) of an output of size \(6, 6\)"):
        receptive_field_of(model, (1, 8, 8), (6, 0))
    with pytest.raises(InputError, match="one index inside the output for each"):
        receptive_field_of(model, (1, 8, 8), (0,))
    with pytest.raises(InputError, match="leave out the number of samples"):
        receptive_field_of(model, (0, 1, 8, 8))
    with pytest.raises(InputError, match="the model returns tuple"):
        receptive_field_of(nn.MaxPool2d(2, return_indices=True), (1, 8, 8))


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    model, _ = MODELS["inception"]
    here = receptive_field_of(model, (2, 17, 15))
    there = receptive_field_of(copy.deepcopy(model).cuda(), (2, 17, 15))
    assert torch.equal(here.support, there.support)
