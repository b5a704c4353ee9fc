"""Data augmentation on whole batches: images, tables and token sequences.

Every function is pure, works on the device of its input without a loop over samples, and draws from
`generator` (which then must live on that device) or from the global one. Images hold values from 0 to 255,
in uint8 or floating point. What moves pixels, and boxes with them, stands in `image_augment` and is
exported here too.

N samples, C channels, H×W pixels, D columns, T tokens
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.image_augment import (
    Colour,
    Generator,
    boxes_in_windows,
    check_images,
    chosen,
    colour_values,
    draw_windows,
    in_type_of,
    integers,
    random_crop,
    random_flip,
    random_shift,
    random_window,
    take_windows,
    widen,
)
from quire.functional.regularise import check_rate

__all__ = [
    "adjust_colour", "boxes_in_windows", "colour_jitter", "column_noise", "cut_out", "cutmix", "draw_windows",
    "mixup", "random_crop", "random_flip", "random_shift", "random_window", "swap_noise", "take_windows",
    "token_drop", "token_mask", "token_swap", "two_views",
]  # fmt: skip

# Images (N, C, H, W) --------------------------------------------------------------------------


def cut_out(x: Tensor, size: float, generator: Generator = None, fill: Colour = 0.0) -> Tensor:
    """A square set to `fill` at a random centre of each image; it may stand over the edge.

    `size` is its side: an int in pixels, a float as a share of the image's shorter side.
    """
    check_images(x)
    if not isinstance(size, int):
        check_rate(size, "share to cut out", allow_one=True)
        size = round(size * min(x.shape[2:]))
    rows, columns = (_near_centre(x, extent, size, generator) for extent in x.shape[2:])
    hole = (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)
    return torch.where(hole, in_type_of(colour_values(x, fill), x), x)


def adjust_colour(x: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Factors (N,) of each image's brightness b, then contrast c about its mean grey, then saturation s about
    each pixel's own grey, kept in 0…255:

        y = b (c (s x + (1 − s) g) + (1 − c) ḡ),  g = 0.299 R + 0.587 G + 0.114 B,  ḡ its mean

    A grey image is its own g, so that saturation does nothing to it.
    """
    check_images(x)
    if x.shape[1] not in (1, 3):
        raise InputError(
            f"colours of images with {x.shape[1]} channels",
            expected="1 channel (grey) or 3 (red, green, blue)",
            fix="leave colour augmentation off for other channels",
        )
    values = widen(x)
    b, c, s = (factor.to(values).reshape(-1, 1, 1, 1) for factor in (brightness, contrast, saturation))
    red, green, blue = values[:, :1], values[:, 1:2], values[:, 2:]
    grey = values if x.shape[1] == 1 else 0.299 * red + 0.587 * green + 0.114 * blue  # Rec. 601
    mean = grey.mean((2, 3), keepdim=True)
    return in_type_of((b * (c * torch.lerp(grey, values, s) + (1 - c) * mean)).clamp(0, 255), x)


def colour_jitter(x: Tensor, strength: float, generator: Generator = None) -> Tensor:
    """`adjust_colour` by three factors for each image, uniform in [1 − strength, 1 + strength]."""
    check_images(x)
    check_rate(strength, "strength of colour changes", allow_one=True)
    u = torch.rand(3, len(x), generator=generator, device=x.device)
    return adjust_colour(x, *(1 + strength * (2 * u - 1)).unbind(0))


# Tables (N, D) --------------------------------------------------------------------------------


def column_noise(x: Tensor, scale: float, generator: Generator = None, std: Tensor | None = None) -> Tensor:
    """x + scale·std_d·ε with ε ~ N(0, 1): noise in proportion to each column's spread.

    `std` (D,) is the training set's; the batch's own is used without it.
    """
    spread = x.std(0, correction=0) if std is None else std
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return x + scale * spread * noise


def swap_noise(x: Tensor, rate: float, generator: Generator = None) -> Tensor:
    """Each entry replaced with probability `rate` by the same column's entry of a random row, so that
    every column keeps its set of values."""
    donors = torch.gather(x, 0, integers(x, x.shape, 0, len(x), generator))
    return torch.where(chosen(x, x.shape, rate, generator), donors, x)


# Token sequences (N, T), integers -------------------------------------------------------------


def token_drop(tokens: Tensor, rate: float, padding: int, generator: Generator = None) -> Tensor:
    """Tokens left out with probability `rate`; the rest close ranks in order, padding fills the end.
    A sequence keeps at least one token."""
    _check_tokens(tokens)
    check_rate(rate, "share of tokens to drop")
    real = tokens != padding
    scores = torch.rand(tokens.shape, generator=generator, device=tokens.device).masked_fill(~real, -1.0)
    survivor = torch.zeros_like(real).scatter_(1, scores.argmax(1, keepdim=True), True)
    keep = real & ((scores >= rate) | survivor)
    order = (~keep).to(torch.uint8).argsort(dim=1, stable=True)
    return torch.where(keep, tokens, padding).gather(1, order)


def token_swap(tokens: Tensor, rate: float, padding: int, generator: Generator = None) -> Tensor:
    """Neighbours exchanged: each sequence is cut into pairs, from its first or second token on, and
    each pair of real tokens is swapped with probability `rate`."""
    _check_tokens(tokens)
    length = tokens.shape[1]
    place = torch.arange(length, device=tokens.device)
    offset = integers(tokens, (len(tokens), 1), 0, 2, generator)
    partner = torch.where((place + offset) % 2 == 0, place + 1, place - 1)  # (N, T)
    inside = (partner >= 0) & (partner < length)
    partner = torch.where(inside, partner, place)
    swap = chosen(tokens, tokens.shape, rate, generator)
    swap = swap.gather(1, torch.minimum(partner, place))  # both of a pair take the first one's lot
    real = (tokens != padding) & (tokens.gather(1, partner) != padding)
    return tokens.gather(1, torch.where(swap & real, partner, place))


def token_mask(
    tokens: Tensor, rate: float, mask_token: int, padding: int, generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Real tokens replaced by `mask_token` with probability `rate`, and where that happened."""
    _check_tokens(tokens)
    hidden = chosen(tokens, tokens.shape, rate, generator) & (tokens != padding)
    return torch.where(hidden, mask_token, tokens), hidden


# Pairs ----------------------------------------------------------------------------------------


def mixup(
    x: Tensor, y: Tensor, alpha: float = 0.2, generator: Generator = None, apart: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """λx_i+(1−λ)x_j and λy_i+(1−λ)y_j with λ ~ Beta(α, α) for each row i and a random partner j.

    Classes must come as one-hot or probability rows. Rows marked in `apart` (N,) are left as they are and
    lent to nobody.
    """
    share, partner = _partners(x, y, alpha, generator, apart)
    return _blend(x, partner, share), _blend(y, partner, share)


def cutmix(
    x: Tensor, y: Tensor, alpha: float = 1.0, generator: Generator = None, apart: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A window of a random partner j pasted into each image i, where it is in j: with λ ~ Beta(α, α) it is
    √(1 − λ) as high and as wide as the image, in whole pixels, anywhere inside it. Targets become
    λy_i + (1 − λ)y_j with 1 − λ the window's exact share of the pixels.

    Classes must come as one-hot or probability rows. Rows marked in `apart` (N,) are left as they are and
    lent to nobody.
    """
    check_images(x)
    share, partner = _partners(x, y, alpha, generator, apart)
    spans = [_span(x, extent, (1 - share).sqrt(), generator) for extent in x.shape[2:]]
    window = spans[0][:, :, None] & spans[1][:, None, :]  # (N, H, W)
    kept = 1 - window.to(torch.promote_types(y.dtype, torch.float32)).mean((1, 2))
    return torch.where(window.unsqueeze(1), x[partner], x), _blend(y, partner, kept)


def two_views(
    x: Tensor, augment: Callable[[Tensor, Generator], Tensor], generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Two independent augmentations of the same batch: rows i of both are a positive pair of a
    contrastive loss, rows i and j≠i a negative one."""
    return augment(x, generator), augment(x, generator)


# Helpers --------------------------------------------------------------------------------------


def _span(x: Tensor, extent: int, share: Tensor, generator: Generator) -> Tensor:
    """(N, extent): which places along one side lie in a span of that share of it, anywhere inside."""
    length = (share * extent).round()
    start = (torch.rand(len(x), generator=generator, device=x.device) * (extent - length + 1)).floor()
    place = torch.arange(extent, device=x.device)
    return (place >= start[:, None]) & (place < (start + length)[:, None])


def _near_centre(x: Tensor, extent: int, size: int, generator: Generator) -> Tensor:
    """(N, extent): which places along one side lie in a span of `size` around a random centre."""
    start = integers(x, (len(x), 1), 0, extent, generator) - size // 2
    place = torch.arange(extent, device=x.device)
    return (place >= start) & (place < start + size)


def _partners(
    x: Tensor, y: Tensor, alpha: float, generator: Generator, apart: Tensor | None
) -> tuple[Tensor, Tensor]:
    """λ ~ Beta(α, α) for each row and its partner's place; λ is 1 where either of them is `apart`."""
    if not y.is_floating_point():
        raise InputError(
            f"targets of type {y.dtype}",
            expected="numbers or one-hot rows in floating point, which can be mixed",
            fix="turn class numbers into one-hot rows first",
        )
    if not alpha > 0:
        raise InputError(f"alpha is {alpha!r}", expected="a number > 0", fix="0.2 mixes mildly")
    # torch.distributions takes no generator; this is the sampler under it.
    share = torch._sample_dirichlet(x.new_full((len(x), 2), alpha, dtype=torch.float), generator)[:, 0]
    partner = torch.randperm(len(x), generator=generator, device=x.device)
    return share if apart is None else share.masked_fill(apart | apart[partner], 1.0), partner


def _blend(values: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """λv_i + (1 − λ)v_j for each row i with its share λ and its partner j."""
    wide = widen(values)
    weight = share.to(wide.dtype).reshape(-1, *[1] * (wide.dim() - 1))
    return in_type_of(weight * wide + (1 - weight) * wide[partner], values)


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError(
            f"a tensor of shape {tuple(tokens.shape)} and type {tokens.dtype}",
            expected="token numbers (N, T) as integers",
        )
