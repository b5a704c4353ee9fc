"""Convolution, pooling and their inverses against torch.nn.functional, loops and cases solved by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional import convolutions as F
from quire.functional.feedforward import mlp

CORRELATE: Any = (functional.conv1d, functional.conv2d, functional.conv3d)
MAX_POOL: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
AVERAGE_POOL: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)
SIZES = {1: (11,), 2: (7, 9), 3: (5, 4, 6)}


def same_with_gradients(got: Tensor, wanted: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(got, wanted)
    factors = torch.randn_like(wanted)
    for own, peer in zip(
        torch.autograd.grad((got * factors).sum(), inputs),
        torch.autograd.grad((wanted * factors).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(own, peer)


# Convolution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, "same", 2), (3, "valid", 1), (2, 3, 2)]
)
def test_cross_correlation_is_torchs(
    count: int, groups: int, stride: int, padding: int | str, dilation: int
) -> None:
    x = torch.randn(2, 4, *SIZES[count]).double().requires_grad_()
    weight = torch.randn(6, 4 // groups, *(3, 2, 1)[:count]).double().requires_grad_()
    bias = torch.randn(6).double().requires_grad_()
    got = F.cross_correlation(
        x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    wanted = CORRELATE[count - 1](x, weight, bias, stride, padding, dilation, groups)
    same_with_gradients(got, wanted, x, weight, bias)
    flipped = F.convolution(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
    turned = weight.flip(list(range(2, 2 + count)))
    same_with_gradients(
        flipped, CORRELATE[count - 1](x, turned, bias, stride, padding, dilation, groups), x, weight, bias
    )


def test_convolution_is_numpys() -> None:
    f, g = torch.randn(9).double(), torch.randn(4).double()
    wanted = torch.from_numpy(np.convolve(f.numpy(), g.numpy()))
    torch.testing.assert_close(F.convolution(f[None, None], g[None, None], padding=3)[0, 0], wanted)
    torch.testing.assert_close(
        F.cross_correlation(f[None, None], g[None, None])[0, 0],
        torch.from_numpy(np.correlate(f.numpy(), g.numpy())),
    )


def test_by_hand() -> None:
    x, weight = torch.tensor([[[1.0, 2, 3]]]), torch.tensor([[[1.0, 10]]])
    assert F.cross_correlation(x, weight).tolist() == [[[21.0, 32.0]]]
    assert F.convolution(x, weight).tolist() == [[[12.0, 23.0]]]
    assert F.cross_correlation(x, weight, padding="same").tolist() == [[[21.0, 32.0, 3.0]]]
    assert F.cross_correlation(x, weight, padding=[(1, 0)]).tolist() == [[[10.0, 21.0, 32.0]]]
    assert F.cross_correlation(x, weight, stride=2, padding="same").tolist() == [[[21.0, 3.0]]]


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_same_padding_keeps_the_size_over_the_stride(size: int, stride: int, kernel: int) -> None:
    x, weight = torch.randn(1, 1, size, 4), torch.randn(1, 1, kernel, 1)
    got = F.cross_correlation(x, weight, stride=(stride, 1), padding="same")
    assert got.shape == (1, 1, math.ceil(size / stride), 4)


def test_pairs_of_padding_are_explicit_zeros() -> None:
    x, weight = torch.randn(2, 3, 5, 6), torch.randn(4, 3, 3, 3)
    got = F.cross_correlation(x, weight, padding=[(2, 0), (1, 3)])
    torch.testing.assert_close(got, functional.conv2d(functional.pad(x, (1, 3, 2, 0)), weight))
    torch.testing.assert_close(
        F.cross_correlation(x, weight, padding=(0, 2)), functional.conv2d(x, weight, padding=(0, 2))
    )


def test_gradients_by_differences() -> None:
    inputs = [torch.randn(shape).double().requires_grad_() for shape in ((1, 2, 4, 3), (2, 1, 2, 2), (2,))]
    assert torch.autograd.gradcheck(
        lambda x, w, b: F.convolution(x, w, b, stride=2, padding="same", groups=2), inputs
    )


@pytest.mark.parametrize("size", [(6,), (3, 4), (2, 3, 2)])
def test_pointwise_is_an_mlp_for_each_pixel(size: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, *size).double().requires_grad_()
    weights = [torch.randn(shape).double().requires_grad_() for shape in ((5, 3), (5, 5), (2, 5))]
    biases = [torch.randn(width).double().requires_grad_() for width in (5, 5, 2)]
    wanted = mlp(x.movedim(1, -1), weights, biases, torch.tanh).movedim(-1, 1)
    got = F.pointwise(x, weights, biases, torch.tanh)
    same_with_gradients(got, wanted, x, *weights, *biases)
    without = F.pointwise(x, weights[:1], [None])
    torch.testing.assert_close(without, torch.einsum("oc,nc...->no...", weights[0], x))


# Pooling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, None, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0)])
def test_pooling_is_torchs(count: int, kernel: int, stride: int | None, padding: int) -> None:
    x = torch.randn(2, 3, *SIZES[count]).double().requires_grad_()
    got, indices = F.max_pool(x, kernel, stride, padding=padding, return_indices=True)
    wanted, places = MAX_POOL[count - 1](x, kernel, stride, padding, return_indices=True)
    same_with_gradients(got, wanted, x)
    assert torch.equal(indices, places)
    unfolded = wanted_again(x, count, kernel, stride, padding)
    same_with_gradients(F.max_pool(x, kernel, stride, padding=padding), unfolded, x)
    for counted in (True, False):
        got = F.average_pool(x, kernel, stride, padding=padding, count_padding=counted)
        wanted = AVERAGE_POOL[count - 1](x, kernel, stride, padding, count_include_pad=counted)
        same_with_gradients(got, wanted, x)


def wanted_again(x: Tensor, count: int, kernel: int, stride: int | None, padding: int) -> Tensor:
    """Max pooling with unfold, padded with −∞."""
    padded = functional.pad(x, [padding] * 2 * count, value=-math.inf)
    for dim in range(2, 2 + count):
        padded = padded.unfold(dim, kernel, stride or kernel)
    return padded.flatten(-count).amax(-1)


def test_pooling_by_hand() -> None:
    x = torch.tensor([[[1.0, 5, 2, -3, -4]]])
    assert F.max_pool(x, 2).tolist() == [[[5.0, 2.0]]]
    assert F.max_pool(x, 2, 1, dilation=2).tolist() == [[[2.0, 5.0, 2.0]]]
    assert F.max_pool(-x.abs(), 3, 2, padding=1).tolist() == [[[-1.0, -2.0, -3.0]]]
    assert F.average_pool(x, 3, 2, padding=1)[0, 0].tolist() == pytest.approx([2, 4 / 3, -7 / 3])
    assert F.average_pool(x, 3, 2, padding=1, count_padding=False)[0, 0, 0] == 3.0


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "stride"), [(2, None), (3, 2), (2, 3)])
def test_unpool_puts_maxima_back(count: int, kernel: int, stride: int | None) -> None:
    x = torch.rand(2, 3, *SIZES[count]).double() + 1
    pooled, indices = F.max_pool(x, kernel, stride, return_indices=True)
    got = F.unpool(pooled, indices, kernel, stride, size=SIZES[count])
    wanted = torch.zeros_like(x)
    for n in range(2):
        for c in range(3):
            for value, place in zip(pooled[n, c].flatten(), indices[n, c].flatten(), strict=True):
                wanted[n, c].view(-1)[place] = value
    assert torch.equal(got, wanted)
    assert torch.equal(got, torch.where(got != 0, x, 0.0))
    torch.testing.assert_close(F.max_pool(got, kernel, stride), pooled)


def test_unpool_has_the_size_and_gradient_of_torchs() -> None:
    x = torch.randn(2, 3, 6, 9).double()
    pooled, indices = F.max_pool(x, (2, 3), return_indices=True)
    pooled.requires_grad_()
    same_with_gradients(
        F.unpool(pooled, indices, (2, 3)), functional.max_unpool2d(pooled, indices, (2, 3)), pooled
    )
    pooled, indices = F.max_pool(x[..., :5, :], 3, 2, padding=1, return_indices=True)
    got = F.unpool(pooled, indices, 3, 2, padding=1)
    assert got.shape == (2, 3, 5, 9)
    torch.testing.assert_close(got, functional.max_unpool2d(pooled, indices, 3, 2, 1))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample_is_torchs(count: int, mode: Any) -> None:
    x = torch.randn(2, 3, *(4, 3, 2)[:count]).double().requires_grad_()
    scale = (2, 3, 1)[:count]
    kind = mode if mode == "nearest" else ("linear", "bilinear", "trilinear")[count - 1]
    wanted = functional.interpolate(x, scale_factor=scale, mode=kind)
    same_with_gradients(F.upsample(x, scale, mode), wanted, x)


def test_upsample_by_hand() -> None:
    x = torch.tensor([[[0.0, 4.0]]])
    assert F.upsample(x, 2).tolist() == [[[0.0, 0.0, 4.0, 4.0]]]
    assert F.upsample(x, 2, "linear").tolist() == [[[0.0, 1.0, 3.0, 4.0]]]
    # Averages of the repeated pixels are the pixels.
    images = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(F.average_pool(F.upsample(images, 3), 3), images)


# Types, extremes, devices ---------------------------------------------------------------------


def results(x: Tensor, weight: Tensor) -> list[Tensor]:
    pooled, indices = F.max_pool(x, 2, return_indices=True)
    return [
        F.cross_correlation(x, weight, padding="same"),
        F.convolution(x, weight, stride=2),
        F.pointwise(x, [weight[..., 0, 0]], [None]),
        pooled,
        F.average_pool(x, 2),
        F.unpool(pooled, indices, 2),
        F.upsample(x, 2),
        F.upsample(x, 2, "linear"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    x, weight = x.to(dtype), weight.to(dtype)
    # A pixel at half precision is the rounded exact one.
    tolerance = 8 * torch.finfo(dtype).eps
    for got, exact in zip(results(x, weight), results(x.double(), weight.double()), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=4 * tolerance)


def test_extremes() -> None:
    x = torch.full((1, 1, 4), -math.inf)
    assert F.max_pool(x, 2).tolist() == [[[-math.inf, -math.inf]]]
    x[0, 0, 1] = math.nan
    assert F.max_pool(x, 2).isnan().tolist() == [[[True, False]]]
    big = torch.full((1, 1, 4), 1e38)
    assert F.max_pool(big, 2).tolist() == big[..., :2].tolist()
    assert torch.isfinite(F.upsample(big, 2, "linear")).all()
    assert F.cross_correlation(torch.zeros(0, 3, 8), torch.ones(2, 3, 3)).shape == (0, 2, 6)
    # A signal that is not contiguous, and a kernel as large as the input.
    turned = torch.randn(2, 5, 3).transpose(1, 2)
    torch.testing.assert_close(F.cross_correlation(turned, torch.ones(1, 3, 5))[:, 0, 0], turned.sum((1, 2)))


def test_compiled_without_a_break() -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    compiled = torch.compile(results, backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(x, weight), results(x, weight), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    x, weight = torch.randn(2, 3, 6, 6).double(), torch.randn(4, 3, 3, 3).double()
    for there, here in zip(results(x.cuda(), weight.cuda()), results(x, weight), strict=True):
        assert there.device.type == "cuda"
        torch.testing.assert_close(there.cpu(), here)


# Messages -------------------------------------------------------------------------------------


X, W = torch.zeros(1, 4, 5, 5), torch.zeros(2, 4, 3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.cross_correlation(X[0, 0], W), r"cross_correlation of shape \(5, 5\)"),
        (lambda: F.cross_correlation(X, W[0]), r"weight of shape \(4, 3, 3\) for an input of shape"),
        (lambda: F.cross_correlation(X, W, groups=2), "2 filters of 4 channels in 2 groups on 4 channels"),
        (lambda: F.cross_correlation(X, W[:1, :2], groups=2), "filters divisible by groups"),
        (lambda: F.cross_correlation(X, W, dilation=3), r"spans 7 pixels on 5 \(padding included\)"),
        (lambda: F.cross_correlation(X, W, stride=0), "stride 0 for 2 spatial dimensions"),
        (lambda: F.cross_correlation(X, W, stride=(1, 2, 3)), "a whole number of at least 1, or 2 of them"),
        (lambda: F.cross_correlation(X, W, padding="sam"), "did you mean 'same'"),
        (lambda: F.cross_correlation(X, W, padding=-1), "padding -1"),
        (lambda: F.cross_correlation(X, W, padding=[(1, 2), 1]), r"a pair \(before, after\) for each"),
        (lambda: F.cross_correlation(X, W, padding=[(1, -2), (1, 1)]), "padding .* for 2 spatial"),
        (lambda: F.pointwise(X, [W[..., 0, 0]], []), "pointwise with 1 weights and 0 biases"),
        (lambda: F.max_pool(X, 6), "spans 6 pixels on 5"),
        (lambda: F.average_pool(X, 2, padding=2), "at most half the kernel"),
        (lambda: F.max_pool(X, 2, 1.5), "stride 1.5"),
        (lambda: F.unpool(X, X[:, :2].long(), 2), r"indices of shape \(1, 2, 5, 5\)"),
        (lambda: F.unpool(X, torch.full(X.shape, 150), 2), "unpool to 10×10 with a value for place 150"),
        (lambda: F.upsample(X, 0), "scale 0"),
        (lambda: F.upsample(X, 2, "cubic"), "unknown way of upsampling 'cubic'"),
    ],
)
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
