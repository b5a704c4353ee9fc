"""Sizes, counts, separable filters and equivariance against torch and brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from quire.errors import InputError
from quire.functional import geometry as F

# Sizes and counts -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3))
def test_output_size_is_that_of_a_convolution(w: int, k: int, s: int, p: int, d: int) -> None:
    if d * (k - 1) + 1 > w + 2 * p:
        with pytest.raises(InputError, match="a kernel that fits into the padded input"):
            F.output_size(w, k, s, p, d)
        return
    real = functional.conv1d(torch.zeros(1, 1, w), torch.zeros(1, 1, k), None, s, p, d)
    assert F.output_size(w, k, s, p, d) == real.shape[-1]


def test_output_size_by_hand_and_in_several_dimensions() -> None:
    assert F.output_size(224, 7, 2, 3) == 112
    assert F.output_size((224, 10), 3, 2, 1) == (112, 5)
    assert F.output_size((9, 8, 7), (3, 1, 2), (2, 1, 1), 0, (1, 1, 3)) == (4, 8, 4)
    with pytest.raises(InputError, match=r"kernel \(3, 3\) for 1 spatial dimension"):
        F.output_size(9, (3, 3))  # type: ignore[call-overload]
    with pytest.raises(InputError, match="stride 0"):
        F.output_size(9, 3, 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_parameter_count_is_that_of_the_layer(groups: int, bias: bool) -> None:
    layer = nn.Conv2d(4, 8, (3, 5), groups=groups, bias=bias)
    real = sum(parameter.numel() for parameter in layer.parameters())
    assert F.convolution_parameter_count(8, (3, 5), 4, groups, bias) == real


def test_parameter_count_by_hand() -> None:
    assert F.convolution_parameter_count(64, (11, 11), 3) == 23_296  # AlexNet's first layer
    with pytest.raises(InputError, match=r"8 filters of \(3, 3\) over 4 channels in 3 groups"):
        F.convolution_parameter_count(8, (3, 3), 4, 3)
    with pytest.raises(InputError, match="positive numbers"):
        F.convolution_parameter_count(8, (3, 0), 4)


# Separable filters ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150, 1e-300, 1e300])
@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (1, 4), (4, 1), (1, 1)])
def test_a_product_is_split(shape: tuple[int, int], scale: float) -> None:
    filter = torch.outer(torch.randn(shape[0]).double(), torch.randn(shape[1]).double()) * scale
    pair = F.separate(filter)
    assert pair is not None
    column, row = pair
    torch.testing.assert_close(torch.outer(column, row) / scale, filter / scale)
    assert column[column.abs().argmax()] > 0


def test_two_passes_are_one() -> None:
    binomial = torch.tensor([1.0, 4, 6, 4, 1])
    pair = F.separate(torch.outer(binomial, binomial))
    assert pair is not None
    torch.testing.assert_close(pair[0], binomial)
    torch.testing.assert_close(pair[1], binomial)


def test_higher_ranks_do_not_split() -> None:
    singular = torch.arange(1.0, 10).reshape(3, 3)  # determinant 0, rank 2
    assert abs(float(singular.double().det())) < 1e-9
    assert F.separate(singular) is None
    assert F.separate(torch.eye(3)) is None
    assert F.separate(torch.eye(3) * 1e-30) is None
    near = torch.ones(3, 3).double() + 1e-6 * torch.eye(3).double()
    assert F.separate(near) is None
    # Singular values 3 and 1e-6: it is their ratio that counts.
    assert F.separate(near, tolerance=5e-7) is not None
    assert F.separate(near, tolerance=2e-7) is None


def test_separable_types() -> None:
    zeros = F.separate(torch.zeros(2, 3))
    assert zeros is not None
    assert [part.tolist() for part in zeros] == [[0, 0], [0, 0, 0]]
    sobel = torch.tensor([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.float16):
        pair = F.separate(sobel.to(dtype))
        assert pair is not None
        assert pair[0].dtype == (dtype if dtype.is_floating_point else torch.float32)
        torch.testing.assert_close(torch.outer(*pair).float(), sobel.float(), rtol=0.02, atol=1e-6)
    for wrong in (torch.ones(3), torch.ones(0, 3), torch.tensor([[math.nan]])):
        with pytest.raises(InputError, match=r"a matrix \(height, width\) of finite numbers"):
            F.separate(wrong)


# Equivariance ---------------------------------------------------------------------------------


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3, 8, 8)).double()


def circular(channels: int = 3) -> nn.Module:
    return nn.Conv2d(channels, 4, 3, padding=1, padding_mode="circular").double()


@pytest.mark.parametrize("amount", [0, 1, 5, -3])
def test_a_circular_convolution_follows_every_shift(amount: int) -> None:
    model = nn.Sequential(circular(), nn.ReLU(), circular(4))
    assert F.equivariance_error(model, images(), "shift", amount=amount) < 1e-12


def test_zeros_at_the_edge_change_the_edge_alone() -> None:
    model = nn.Conv2d(3, 4, 3, padding=1).double()
    assert F.equivariance_error(model, images(), "shift") > 1e-3
    assert F.equivariance_error(model, images(), "shift", margin=2) < 1e-12
    assert F.equivariance_error(nn.Conv1d(2, 3, 3).double(), images(1, 2, 9), "shift", margin=1) < 1e-12


def test_a_stride_leaves_multiples_of_itself() -> None:
    x = images()
    strided = nn.Sequential(circular(), nn.MaxPool2d(2), nn.AvgPool2d(2))
    assert F.equivariance_error(strided, x, "shift", amount=4, stride=4) < 1e-12
    assert F.equivariance_error(strided, x, "shift", amount=1, stride=4) > 1e-2
    # The difference is the smaller one of the two whole shifts.
    pool = nn.MaxPool2d(2)
    moved, plain = pool(x.roll(1, -1)), pool(x)
    differences = [float((moved - plain.roll(k, -1)).abs().max() / plain.abs().max()) for k in (0, 1)]
    assert F.equivariance_error(pool, x, "shift", stride=2) == pytest.approx(min(differences))


def test_flips_and_rotations() -> None:
    x, model = images(), circular()
    assert F.equivariance_error(model, x, "flip") > 1e-2
    assert F.equivariance_error(model, x, "rotation") > 1e-2
    blur = nn.AvgPool2d(3, 1, 1)
    assert F.equivariance_error(blur, x, "flip") < 1e-12
    for amount in (1, 2, 3):
        assert F.equivariance_error(blur, images(2, 3, 8, 5), "rotation", amount=amount) < 1e-12
    with pytest.raises(InputError, match="outputs whose size follows the transform"):
        F.equivariance_error(nn.AvgPool2d((2, 1)), x, "rotation")


def test_an_output_without_places_is_asked_for_invariance() -> None:
    pooled = nn.Sequential(circular(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    flat = nn.Sequential(circular(), nn.Flatten())
    assert F.equivariance_error(pooled, images(), "shift") < 1e-12
    assert F.equivariance_error(flat, images(), "shift") > 1e-2


def test_the_model_is_judged_in_evaluation_mode_and_left_as_it_was() -> None:
    model = nn.Sequential(circular(), nn.BatchNorm2d(4).double(), nn.Dropout(0.5))
    model[1].eval()
    assert F.equivariance_error(model, images(), "shift") < 1e-12
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert F.equivariance_error(torch.relu, images(), "flip") == 0.0


@pytest.mark.parametrize(
    ("x", "transform", "options", "message"),
    [
        (images(), "shfit", {}, "did you mean 'shift'"),
        (images(2, 3, 8), "rotation", {}, "with at least 4 dimensions"),
        (images(2, 3), "flip", {}, r"a flip of shape \(2, 3\)"),
        (images(), "shift", {"stride": 0}, "stride 0 and margin 0"),
        (images(), "shift", {"margin": 4}, r"a margin of 4 on an output of \(8, 8\)"),
    ],
)
def test_messages(x: torch.Tensor, transform: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        F.equivariance_error(torch.relu, x, transform, **options)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    assert F.equivariance_error(circular().cuda(), images().cuda(), "shift") < 1e-12
    pair = F.separate(torch.ones(3, 3, device="cuda"))
    assert pair is not None
    assert pair[0].device.type == "cuda"
