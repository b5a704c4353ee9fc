"""Data augmentation on whole batches: images, tables and token sequences.

Every function is pure, works on the device of its input without a loop over samples, and draws from
`generator` (which then must live on that device) or from the global one.

N samples, C channels, H×W pixels, D columns, T tokens
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.regularise import check_rate

Generator = torch.Generator | None


# Images (N, C, H, W) --------------------------------------------------------------------------


def random_crop(x: Tensor, size: tuple[int, int], padding: int = 0, generator: Generator = None) -> Tensor:
    """A window of `size` at a random place of each image, after `padding` zeros on all sides."""
    _check_images(x)
    x = functional.pad(x, [padding] * 4) if padding else x
    free = [x.shape[2] - size[0], x.shape[3] - size[1]]
    if min(free) < 0 or min(size) < 1:
        raise InputError(
            f"a crop of {size[0]}×{size[1]} out of {x.shape[2]}×{x.shape[3]} (padding included)",
            expected="a window inside the image",
            fix="take a smaller window or more padding",
        )
    top, left = (_integers(x, (len(x), 1), 0, space + 1, generator) for space in free)
    rows = top + torch.arange(size[0], device=x.device)  # (N, h)
    columns = left + torch.arange(size[1], device=x.device)  # (N, w)
    taller = x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return taller.gather(3, columns[:, None, None, :].expand(-1, x.shape[1], size[0], -1))


def random_shift(x: Tensor, limit: int, generator: Generator = None) -> Tensor:
    """Each image moved by up to `limit` pixels in both directions; zeros come in."""
    _check_images(x)
    return random_crop(x, (x.shape[2], x.shape[3]), limit, generator)


def random_flip(x: Tensor, rate: float = 0.5, generator: Generator = None) -> Tensor:
    """Each image mirrored left to right with probability `rate`."""
    _check_images(x)
    return torch.where(_chosen(x, (len(x), 1, 1, 1), rate, generator), x.flip(-1), x)


def cut_out(x: Tensor, size: int, generator: Generator = None) -> Tensor:
    """A square of `size` pixels set to 0 at a random centre of each image; it may stand over the edge."""
    _check_images(x)
    rows, columns = (_near_centre(x, extent, size, generator) for extent in x.shape[2:])
    return x.masked_fill((rows[:, :, None] & columns[:, None, :]).unsqueeze(1), 0.0)


# Tables (N, D) --------------------------------------------------------------------------------


def column_noise(x: Tensor, scale: float, generator: Generator = None, std: Tensor | None = None) -> Tensor:
    """x + scale·std_d·ε with ε ~ N(0, 1): noise in proportion to each column's spread.

    `std` (D,) is the training set's; the batch's own is used without it.
    """
    spread = x.std(0, correction=0) if std is None else std
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return x + scale * spread * noise


def mixup(x: Tensor, y: Tensor, alpha: float = 0.2, generator: Generator = None) -> tuple[Tensor, Tensor]:
    """λx_i+(1−λ)x_j and λy_i+(1−λ)y_j with λ ~ Beta(α, α) for each row i and a random partner j.

    Classes must come as one-hot or probability rows.
    """
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
    partner = _permutation(x, generator)

    def blend(values: Tensor) -> Tensor:
        weight = share.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
        return weight * values + (1 - weight) * values[partner]

    return blend(x), blend(y)


def swap_noise(x: Tensor, rate: float, generator: Generator = None) -> Tensor:
    """Each entry replaced with probability `rate` by the same column's entry of a random row, so that
    every column keeps its set of values."""
    donors = torch.gather(x, 0, _integers(x, x.shape, 0, len(x), generator))
    return torch.where(_chosen(x, x.shape, rate, generator), donors, x)


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
    offset = _integers(tokens, (len(tokens), 1), 0, 2, generator)
    partner = torch.where((place + offset) % 2 == 0, place + 1, place - 1)  # (N, T)
    inside = (partner >= 0) & (partner < length)
    partner = torch.where(inside, partner, place)
    chosen = _chosen(tokens, tokens.shape, rate, generator)
    chosen = chosen.gather(1, torch.minimum(partner, place))  # both of a pair take the first one's lot
    real = (tokens != padding) & (tokens.gather(1, partner) != padding)
    return tokens.gather(1, torch.where(chosen & real, partner, place))


def token_mask(
    tokens: Tensor, rate: float, mask_token: int, padding: int, generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Real tokens replaced by `mask_token` with probability `rate`, and where that happened."""
    _check_tokens(tokens)
    hidden = _chosen(tokens, tokens.shape, rate, generator) & (tokens != padding)
    return torch.where(hidden, mask_token, tokens), hidden


# Pairs ----------------------------------------------------------------------------------------


def two_views(
    x: Tensor, augment: Callable[[Tensor, Generator], Tensor], generator: Generator = None
) -> tuple[Tensor, Tensor]:
    """Two independent augmentations of the same batch: rows i of both are a positive pair of a
    contrastive loss, rows i and j≠i a negative one."""
    return augment(x, generator), augment(x, generator)


# Helpers --------------------------------------------------------------------------------------


def _integers(like: Tensor, shape: tuple[int, ...], low: int, high: int, generator: Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=like.device)


def _permutation(like: Tensor, generator: Generator) -> Tensor:
    return torch.randperm(len(like), generator=generator, device=like.device)


def _chosen(like: Tensor, shape: tuple[int, ...], rate: float, generator: Generator) -> Tensor:
    """Independent true values with probability `rate`."""
    check_rate(rate, "probability", allow_one=True)
    return torch.rand(shape, generator=generator, device=like.device) < rate


def _near_centre(x: Tensor, extent: int, size: int, generator: Generator) -> Tensor:
    """(N, extent): which places along one side lie in a span of `size` around a random centre."""
    start = _integers(x, (len(x), 1), 0, extent, generator) - size // 2
    place = torch.arange(extent, device=x.device)
    return (place >= start) & (place < start + size)


def _check_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise InputError(
            f"a tensor of shape {tuple(x.shape)}",
            expected="a batch of images (N, C, H, W)",
            fix="add the missing dimensions with x.unsqueeze(…)",
        )


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError(
            f"a tensor of shape {tuple(tokens.shape)} and type {tokens.dtype}",
            expected="token numbers (N, T) as integers",
        )
