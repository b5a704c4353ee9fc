from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional import augment


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def images(count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, 1 + count * 3 * 4 * 5, dtype=dtype).reshape(count, 3, 4, 5)


def tokens() -> Tensor:
    return torch.tensor([[5, 6, 7, 8, 0, 0], [9, 8, 7, 6, 5, 4], [3, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])


CALLS: dict[str, Callable[[Any, torch.Generator | None], Any]] = {
    "random_crop": lambda like, g: augment.random_crop(images().to(like), (3, 3), 1, g),
    "random_shift": lambda like, g: augment.random_shift(images().to(like), 2, g),
    "random_flip": lambda like, g: augment.random_flip(images().to(like), 0.5, g),
    "cut_out": lambda like, g: augment.cut_out(images().to(like), 2, g),
    "column_noise": lambda like, g: augment.column_noise(images().to(like).flatten(1), 0.1, g),
    "mixup": lambda like, g: augment.mixup(images().to(like), torch.eye(6).to(like), 0.4, g)[0],
    "swap_noise": lambda like, g: augment.swap_noise(images().to(like).flatten(1), 0.4, g),
}
TOKEN_CALLS: dict[str, Callable[[Any, torch.Generator | None], Any]] = {
    "token_drop": lambda device, g: augment.token_drop(tokens().to(device), 0.4, 0, g),
    "token_swap": lambda device, g: augment.token_swap(tokens().to(device), 0.8, 0, g),
    "token_mask": lambda device, g: augment.token_mask(tokens().to(device), 0.5, 99, 0, g)[0],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_types_are_kept_and_the_generator_decides(name: str, dtype: torch.dtype) -> None:
    like = torch.zeros(1, dtype=dtype)
    first, again, other = (CALLS[name](like, seeded(seed)) for seed in (1, 1, 2))
    assert first.dtype == dtype
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", TOKEN_CALLS)
def test_the_generator_decides_for_tokens_too(name: str) -> None:
    first, again = (TOKEN_CALLS[name]("cpu", seeded(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert any(not torch.equal(first, TOKEN_CALLS[name]("cpu", seeded(seed))) for seed in range(2, 8))
    assert first.dtype == torch.int64
    assert first.shape == tokens().shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CALLS, *TOKEN_CALLS])
def test_on_the_gpu(name: str) -> None:
    device = torch.zeros(1, device="cuda")
    call = (
        CALLS[name](device, seeded(1, "cuda"))
        if name in CALLS
        else TOKEN_CALLS[name]("cuda", seeded(1, "cuda"))
    )
    assert call.device.type == "cuda"


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    x = images()
    padded = torch.nn.functional.pad(x, [1, 1, 1, 1])
    for image, source in zip(augment.random_crop(x, (3, 4), 1, seeded()), padded, strict=True):
        places = [(i, j) for i in range(4) for j in range(4)]
        assert sum(torch.equal(image, source[:, i : i + 3, j : j + 4]) for i, j in places) == 1


def test_samples_are_augmented_independently() -> None:
    x = images(1).expand(200, -1, -1, -1)
    assert len(augment.random_shift(x, 1, seeded()).flatten(1).unique(dim=0)) == 9
    assert len(augment.random_flip(x, 0.5, seeded()).flatten(1).unique(dim=0)) == 2
    assert len(augment.cut_out(x, 1, seeded()).flatten(1).unique(dim=0)) == 20


def test_cut_out_is_a_square_that_may_stand_over_the_edge() -> None:
    x = torch.ones(300, 1, 7, 7)
    holes = (augment.cut_out(x, 3, seeded()) == 0).squeeze(1)
    heights, widths = holes.any(2).sum(1), holes.any(1).sum(1)
    assert torch.equal(holes.sum((1, 2)), heights * widths)
    assert set(heights.tolist()) == set(widths.tolist()) == {2, 3}
    even = (augment.cut_out(x, 2, seeded()) == 0).sum((1, 2, 3))
    assert set(even.tolist()) == {1, 2, 4}


def test_flip_at_its_ends() -> None:
    x = images()
    assert torch.equal(augment.random_flip(x, 0.0), x)
    assert torch.equal(augment.random_flip(x, 1.0), x.flip(-1))


def test_augmentation_is_differentiable() -> None:
    x = images(dtype=torch.float64).requires_grad_()
    out = augment.cut_out(augment.random_flip(augment.random_shift(x, 1)), 2)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert set(gradient.unique().tolist()) == {0.0, 1.0}


def test_column_noise_scales_with_given_standard_deviations() -> None:
    x = torch.zeros(5000, 2)
    out = augment.column_noise(x, 0.5, seeded(), std=torch.tensor([2.0, 0.0]))
    assert out[:, 0].std().item() == pytest.approx(1.0, rel=0.05)
    assert (out[:, 1] == 0).all()


def test_mixup_keeps_distributions_and_totals() -> None:
    x, y = torch.randn(50, 3), torch.eye(5).repeat(10, 1)
    mixed, labels = augment.mixup(x, y, 0.5, seeded())
    assert torch.allclose(labels.sum(1), torch.ones(50))
    assert (labels >= 0).all()
    assert mixed.min() >= x.min()
    assert mixed.max() <= x.max()


def test_token_drop_by_hand() -> None:
    out = augment.token_drop(tokens(), 0.999, 0, seeded())
    assert ((out != 0).sum(1) == torch.tensor([1, 1, 1, 0])).all()  # one stays, an empty row stays empty
    assert (out[:, 1:] == 0).all()
    assert torch.equal(augment.token_drop(tokens(), 0.0, 0), tokens())


def test_token_swap_by_hand() -> None:
    row = torch.tensor([[1, 2, 3, 4, 5, 0, 0]])
    seen = {tuple(augment.token_swap(row, 1.0, 0, seeded(seed))[0].tolist()) for seed in range(20)}
    assert seen == {(2, 1, 4, 3, 5, 0, 0), (1, 3, 2, 5, 4, 0, 0)}
    assert torch.equal(augment.token_swap(row, 0.0, 0), row)


def test_token_mask_by_hand() -> None:
    out, hidden = augment.token_mask(tokens(), 1.0, 99, 0)
    assert torch.equal(hidden, tokens() != 0)
    assert torch.equal(out == 99, hidden)


def test_two_views_differ_and_stay_aligned() -> None:
    x = torch.randn(8, 3)
    one, other = augment.two_views(x, lambda rows, g: augment.column_noise(rows, 0.01, g), seeded())
    assert not torch.equal(one, other)
    assert torch.equal(torch.cdist(one, other).argmin(1), torch.arange(8))


def test_messages() -> None:
    with pytest.raises(InputError, match=r"a tensor of shape \(4, 5\)\n  expected: a batch of images"):
        augment.random_flip(torch.ones(4, 5))
    with pytest.raises(InputError, match="a crop of 9×9 out of 6×7"):
        augment.random_crop(images(), (9, 9), 1)
    with pytest.raises(InputError, match=r"probability 2\n  expected: a number in \[0, 1\]"):
        augment.swap_noise(torch.ones(3, 3), 2)
    with pytest.raises(InputError, match=r"targets of type torch\.int64"):
        augment.mixup(torch.ones(2, 2), torch.tensor([0, 1]))
    with pytest.raises(InputError, match="alpha is 0"):
        augment.mixup(torch.ones(2, 2), torch.ones(2), 0)
    with pytest.raises(InputError, match="expected: token numbers"):
        augment.token_drop(torch.ones(2, 2), 0.1, 0)
    with pytest.raises(InputError, match=r"share of tokens to drop 1\n"):
        augment.token_drop(tokens(), 1, 0)
