"""Inputs for each function of quire.functional that has derivatives; `gradients` checks that none is missing.

They are small, in float64, and away from kinks; each call draws its own, from the name of its function.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import quire.functional as f
from quire.functional import (
    attention,
    boxes,
    clusters,
    components,
    image_augment,
    losses,
    masks,
    mixture_sweeps,
    mixtures,
    recurrent,
    reduction,
    sampling,
    streaming,
    suppression,
    through_time,
    warp,
)  # fmt: skip

GENERATOR = torch.Generator()
"""Stands for a generator that is new in each call, so that each call draws the same."""


class Draw:
    """Inputs that are differentiated, but for whole numbers."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def __call__(self, *shape: int) -> Tensor:
        """Normal."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).requires_grad_()

    def between(self, low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (low + (high - low) * drawn).requires_grad_()

    def positive(self, *shape: int) -> Tensor:
        return self.between(0.3, 1.3, *shape)

    def away(self, *shape: int) -> Tensor:
        """Of either sign, away from 0."""
        return (self.positive(*shape).detach() * self(*shape).detach().sign()).requires_grad_()

    def apart(self, *shape: int) -> Tensor:
        """No two numbers near each other."""
        order = torch.randperm(torch.Size(shape).numel(), generator=self.generator)
        return (order.double().view(shape) * 0.3 - 1.1).requires_grad_()

    def shares(self, *shape: int) -> Tensor:
        """Rows that sum to 1."""
        return self(*shape).detach().softmax(-1).requires_grad_()

    def boxes(self, *shape: int) -> Tensor:
        """Corners, in a square of which each box covers so much that no two are disjoint."""
        low, side = self.between(0.0, 0.4, *shape, 2).detach(), self.between(0.45, 0.58, *shape, 2).detach()
        return torch.cat([low, low + side], -1).requires_grad_()

    def images(self, *shape: int) -> Tensor:
        return self.between(60, 140, *shape)

    def whole(self, count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=self.generator)

    def constant(self, *shape: int) -> Tensor:
        return self(*shape).detach()


class Call(NamedTuple):
    """A function with arguments; `by` calls it another way, with the same arguments."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    by: Callable[..., Any] | None


def at(*arguments: Any, by: Callable[..., Any] | None = None, **options: Any) -> Call:
    return Call(arguments, options, by)


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    draw: Callable[[Draw], Call]
    once: str
    """Why there is no second derivative; "" where there is one."""


def name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__.removeprefix('quire.functional.')}.{function.__name__}"


Row = tuple[Callable[..., Any], Callable[[Draw], Call]]


def numbered(rows: Iterable[Row], once: str = "") -> list[Case]:
    return [Case(name_of(function), function, draw, once) for function, draw in rows]


def _whole_mask(*rows: str) -> Tensor:
    return torch.tensor([[place == "1" for place in row] for row in rows])


MASK = _whole_mask("11011", "01101", "00000")
"""For 3 queries, of which the last sees nothing, and 5 keys."""
ADDED = torch.where(MASK, 0.3, -torch.inf).double()
SMOOTH = [
    f.linear, f.sigmoid, f.sigmoid_derivative, f.arctan, f.arctan_derivative, f.tanh, f.tanh_derivative,
    f.tanh_from_exponentials, f.tanh_from_sigmoid, f.log_sigmoid, f.log_sigmoid_derivative,
]  # fmt: skip
MIXING = [f.softmax, f.log_softmax, f.softmin]
PULLING = [f.softmax_pull_back, f.log_softmax_pull_back, f.softmin_pull_back]


def full_mixture(weights: Tensor, means: Tensor, root: Tensor) -> mixtures.Mixture:
    """Covariances that stay symmetric and positive definite, whichever number of `root` is moved."""
    unit = torch.eye(root.shape[-1], dtype=root.dtype)
    return f.make_mixture(weights, means, root @ root.mT + unit)


def of_full(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weights, means, root, *others: function(*others, full_mixture(weights, means, root))


def of_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mixture from diagonal variances (K, D), or spherical ones (K, 1)."""
    return lambda weights, means, variances, *others: function(
        *others, f.make_mixture(weights, means, variances)
    )


def _updated(weights: Tensor, means: Tensor, root: Tensor, x: Tensor, shift: Tensor) -> mixtures.Mixture:
    like = full_mixture(weights, means, root) if root.ndim == 3 else f.make_mixture(weights, means, root)
    shares, _ = f.mixture_responsibilities(f.mixture_log_densities(x, like))
    return f.mixture_update(f.mixture_moments(x, shares, like, shift), like, shift, 0.1)


def _sampled(weights: Tensor, means: Tensor, root: Tensor, generator: torch.Generator) -> Any:
    return f.sample_mixture(full_mixture(weights, means, root), 4, generator)


def _value(*arguments: Any, **options: Any) -> Tensor:
    return f.streamed_pooling(*arguments, **options).value


def _parameters(d: Draw, *covariances: int) -> tuple[Tensor, Tensor, Tensor]:
    return d.shares(2), d(2, 3), d.positive(*covariances)


def _pooled(d: Draw, width: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: (2, 3, D), (2, 5, D), (2, 5, 2)."""
    return d(2, 3, width), d(2, 5, width), d(2, 5, 2)


def _cell(d: Draw, gates: int) -> tuple[Tensor, ...]:
    """Weights and biases for 3 inputs and 2 units."""
    return d(gates * 2, 3), d(gates * 2, 2), d(gates * 2), d(gates * 2)


PLAIN = f.make_mixture(torch.ones(2), torch.ones(2, 3), torch.ones(2, 3))
FULL = f.make_mixture(torch.ones(2), torch.ones(2, 3), torch.eye(3).expand(2, 3, 3))
"""Of which the shapes alone are looked at."""
LENGTHS = torch.tensor([4, 2])
CROPPED = {"smallest": 0.6, "largest": 1.3, "aspect": 1.2, "generator": GENERATOR}
PRESENT = _whole_mask("11", "10")


TWICE: list[Row] = [
    # activations
    *((function, lambda d: at(d(2, 3, 5))) for function in SMOOTH),
    *((function, lambda d: at(d(2, 3, 5), dim=1)) for function in MIXING),
    *((function, lambda d: at(d(2, 3, 2), d(2, 3, 2), dim=1)) for function in PULLING),
    (f.relu, lambda d: at(d.away(2, 3, 5))),
    (f.leaky_relu, lambda d: at(d.away(2, 3, 5), negative_slope=0.3)),
    (f.relu6, lambda d: at(d.apart(2, 3, 5))),
    (f.softplus, lambda d: at(d(2, 3, 5), beta=2.5)),
    (f.softplus_derivative, lambda d: at(d(2, 3, 5), beta=2.5)),
    # adversarial
    (f.discriminator_loss, lambda d: at(d(2, 3), d(4, 3))),
    (f.discriminator_loss, lambda d: at(d(2, 3), d(4, 3), reduction="sum")),
    (f.minimax_generator_loss, lambda d: at(d(2, 3))),
    (f.non_saturating_generator_loss, lambda d: at(d(2, 3), reduction="sum")),
    (f.discriminator_value, lambda d: at(d.shares(2, 5), d.shares(2, 5), d.between(0.1, 0.9, 2, 5))),
    (f.optimal_discriminator, lambda d: at(d.shares(2, 5), d.shares(2, 5))),
    (f.value_at_optimum, lambda d: at(d.shares(2, 5), d.shares(2, 5))),
    (f.sliced_wasserstein, lambda d: at(d(5, 3), d(5, 3), d(2, 3))),
    (f.sliced_wasserstein, lambda d: at(d.apart(5, 3), d.apart(5, 3))),
    # attention
    (f.dot_score, lambda d: at(d(2, 3, 2), d(2, 5, 2))),
    (f.scaled_dot_score, lambda d: at(d(2, 3, 2), d(2, 5, 2))),
    (f.gaussian_score, lambda d: at(d(2, 3, 2), d(2, 5, 2), d.positive(2))),
    (f.additive_score, lambda d: at(d(2, 3, 2), d(2, 5, 3), d(4, 2), d(4, 3), d(4))),
    (attention.projected_score, lambda d: at(d(2, 3, 4), d(2, 5, 4), d(4))),
    (f.masked_softmax, lambda d: at(d(2, 3, 5), MASK)),
    (f.masked_softmax, lambda d: at(d(2, 3, 5), lengths=torch.tensor([5, 2]), causal=True)),
    (f.masked_softmax, lambda d: at(d(2, 3, 5), d(3, 5))),
    (f.nonnegative_weights, lambda d: at(d.away(2, 3, 5), MASK)),
    (f.bmm, lambda d: at(d(2, 3, 5), d(2, 5, 2))),
    (f.attention_pooling, lambda d: at(*_pooled(d), mask=MASK)),
    (f.attention_pooling, lambda d: at(*_pooled(d), f.dot_score, "non-negative", causal=True)),
    (attention.attention, lambda d: at(*_pooled(d), MASK)),
    (attention.attention, lambda d: at(*_pooled(d), d(3, 5), scale=0.7)),
    (attention.attention, lambda d: at(*_pooled(d), lengths=torch.tensor([5, 2]), causal=True)),
    (attention.fused_attention, lambda d: at(*_pooled(d), MASK | ~MASK.any(1, keepdim=True))),
    # augment and image_augment
    (f.cut_out, lambda d: at(d.images(2, 3, 3, 4), 2, GENERATOR)),
    (f.adjust_colour, lambda d: at(d.images(2, 3, 2, 2), *(d.between(0.8, 1.2, 2) for _ in range(3)))),
    (f.adjust_colour, lambda d: at(d.images(2, 1, 2, 3), *(d.between(0.8, 1.2, 2) for _ in range(3)))),
    (f.colour_jitter, lambda d: at(d.images(2, 3, 2, 2), 0.3, GENERATOR)),
    (f.column_noise, lambda d: at(d(5, 3), 0.4, GENERATOR)),
    (f.column_noise, lambda d: at(d(5, 3), 0.4, GENERATOR, d.positive(3))),
    (f.swap_noise, lambda d: at(d(5, 3), 0.5, GENERATOR)),
    (f.mixup, lambda d: at(d(5, 3), d.shares(5, 2), 0.7, GENERATOR, torch.arange(5) == 3)),
    (f.cutmix, lambda d: at(d.images(3, 1, 3, 4), d.shares(3, 2), 1.0, GENERATOR)),
    (f.two_views, lambda d: at(d(5, 3), lambda x, g: f.column_noise(x, 0.3, g), GENERATOR)),
    (f.random_crop, lambda d: at(d.images(2, 1, 3, 4), (2, 3), 1, GENERATOR)),
    (f.random_shift, lambda d: at(d.images(2, 1, 3, 4), 1, GENERATOR)),
    (f.random_flip, lambda d: at(d.images(2, 1, 3, 4), 0.5, GENERATOR, d.boxes(2, 2), PRESENT)),
    (f.take_windows, lambda d: at(d.images(2, 1, 3, 4), d.boxes(2))),
    (f.random_window, lambda d: at(d.images(2, 1, 3, 4), d.boxes(2, 2), PRESENT, **CROPPED)),
    (f.boxes_in_windows, lambda d: at(d.boxes(2, 2), PRESENT, d.boxes(2))),
    (image_augment.widen, lambda d: at(d(2, 3))),
    (image_augment.in_type_of, lambda d: at(d(2, 3), d(1))),
    # autoencode
    (f.code_sparsity, lambda d: at(d.away(3, 5))),
    (f.laplace_nll, lambda d: at(d.away(3, 5), 0.7)),
    (f.contractive_layer, lambda d: at(d(2, 3), d(4, 3), d(4), "tanh")),
    (f.contractive_layer, lambda d: at(d(2, 3), d(4, 3), None, "softplus")),
    (f.contractive_penalty, lambda d: at(d(2, 3), d(4, 3), by=lambda x, w: f.contractive_penalty(
        lambda z: (z @ w.T).tanh(), x))),
    (f.masking_noise, lambda d: at(d(3, 5), 0.4, GENERATOR)),
    (f.salt_and_pepper, lambda d: at(d(3, 5), 0.6, d(5), d(5), GENERATOR)),
    (f.corrupt, lambda d: at(d(3, 5), "gaussian", 0.4, generator=GENERATOR)),
    # boxes
    *((f.convert_boxes, lambda d, pair=pair: at(d.boxes(2, 3), *pair))
      for pair in (("corners", "centre"), ("corners", "size"), ("size", "corners"), ("centre", "size"))),
    (f.clip_boxes, lambda d: at(d.boxes(2, 3), 0.8, 0.7)),
    (f.box_area, lambda d: at(d.boxes(2, 3))),
    (f.intersection, lambda d: at(d.boxes(5), d.boxes(5))),
    (f.iou, lambda d: at(d.boxes(5), d.boxes(5))),
    (f.iou_matrix, lambda d: at(d.boxes(2), d.boxes(3), degenerate="zero")),
    (f.generalised_iou, lambda d: at(d.boxes(5), d.boxes(5))),
    (f.generalised_iou_matrix, lambda d: at(d.boxes(2), d.boxes(3))),
    (f.encode_boxes, lambda d: at(d.boxes(2, 3), d.boxes(3), (0.3, 0.4))),
    (boxes.encode_centres, lambda d: at(d.positive(2, 4), d.positive(2, 4), (0.3, 0.4))),
    (f.decode_boxes, lambda d: at(d(2, 3, 4), d.boxes(3), (0.3, 0.4))),
    # clusters
    (f.centre_update, lambda d: at(d(2, 3, 2), d.positive(2, 3))),
    (f.centre_update, lambda d: at(d(3, 2), torch.tensor([2.0, 0.0, 5.0]).double())),
    (f.inertia, lambda d: at(d(5, 3), d(2, 3), d.whole(2, 5), weights=d.positive(5))),
    (f.inertia_from_sums, lambda d: at(d(3, 2), d(3, 2), d.positive(3), d.between(50, 60))),
    (f.squared_distances, lambda d: at(d(5, 3), d(2, 3), d.whole(2, 5))),
    (f.centre_distances, lambda d: at(d(5, 3), d(2, 3))),
    (f.farthest_rows, lambda d: at(d(5, 3), d(2, 3), d.whole(2, 5), 2, weights=d.positive(5))),
    (f.relocate_empty, lambda d: at(d(3, 2), torch.tensor([2.0, 0.0, 5.0]).double(),
                                    clusters.Farthest(d.constant(1).abs(), torch.tensor([2]), d.positive(1),
                                                      d(1, 2)))),
    (f.seeding_probabilities, lambda d: at(d(5, 3), d(2, 3), weights=d.positive(5))),
    # components
    (f.pca_svd, lambda d: at(d(5, 3), 2)),
    (f.explained_variance_ratio, lambda d: at(d.positive(4), d.between(4, 5))),
    (f.project, lambda d: at(d(5, 3), d(3), d(2, 3))),
    (f.reconstruct, lambda d: at(d(5, 2), d(3), d(2, 3))),
    (components.align_signs, lambda d: at(d(3, 4))),
    (components.orthonormal_rows, lambda d: at(d(2, 4))),
    # convexity
    (f.jensen_gap, lambda d: at(torch.exp, d(2, 5), d.shares(2, 5))),
    # convolutions
    (f.cross_correlation, lambda d: at(d(2, 4, 7), d(6, 2, 3), d(6), stride=2, padding=2, dilation=2,
                                       groups=2)),
    (f.cross_correlation, lambda d: at(d(1, 2, 4, 5), d(3, 2, 2, 3), d(3), padding="same", stride=(1, 2))),
    (f.cross_correlation, lambda d: at(d(1, 2, 2, 3, 2), d(2, 2, 2, 1, 2), padding=((1, 0), (0, 1), (0, 0)))),
    (f.convolution, lambda d: at(d(1, 2, 4, 3), d(2, 2, 2, 2), d(2), padding=1)),
    (f.pointwise, lambda d: at(d(2, 3, 4), [d(2, 3), d(3, 2)], [d(2), None], torch.tanh)),
    (f.max_pool, lambda d: at(d.apart(2, 2, 4, 5), (2, 3), stride=(1, 2), padding=1)),
    (f.max_pool, lambda d: at(d.apart(2, 3, 5), 2, dilation=2)),
    (f.average_pool, lambda d: at(d(2, 2, 4, 5), (2, 3), 2, padding=1, count_padding=False)),
    (f.unpool, lambda d: at(d(1, 2, 3), torch.tensor([[[0, 3, 4], [1, 2, 5]]]), 2)),
    (f.upsample, lambda d: at(d(1, 2, 2, 3), (2, 3))),
    (f.upsample, lambda d: at(d(1, 2, 2, 3), 2, "linear")),
    # detect and suppression
    (f.multibox_targets, lambda d: at(torch.tensor([[0, -1, 1], [1, 0, -2]]), d.boxes(3), d.boxes(2, 2),
                                      d.whole(3, 2, 2) + 1)),
    (f.multibox_parts, lambda d: at(d(2, 5, 3), d(2, 5, 4), torch.tensor([[1, 0, 0, 2, -1], [0, 2, 0, 0, 0]]),
                                    d(2, 5, 4), negatives=1.0, beta=0.7)),
    (f.multibox, lambda d: at(d(2, 4, 6), torch.tensor([[1, 0, 0, -1], [0, 1, 1, 0]]), d(2, 4, 4), alpha=0.7,
                              beta=0.5)),
    (suppression.log_odds, lambda d: at(d(2, 3, 4), d.whole(4, 2, 3))),
    (f.read_detections, lambda d: at(d(2, 3, 3), d(2, 3, 4), d.boxes(3), candidates=4, most=2)),
    # evidence
    (f.class_activation_map, lambda d: at(d(2, 3, 2, 2), d(4, 3), torch.tensor([1, 3]))),
    # feedforward
    (f.dense, lambda d: at(d(2, 3), d(4, 3), d(4), torch.tanh)),
    (f.mlp, lambda d: at(d(2, 3), [d(4, 3), d(2, 4)], [d(4), d(2)], torch.tanh)),
    (f.temperature_softmax, lambda d: at(d(2, 3, 5), 0.7, dim=1)),
    (f.permute_inputs, lambda d: at(d(2, 3), torch.tensor([2, 0, 1]))),
    (f.monotone_violation, lambda d: at(lambda x: x.square().sum(1), d(3), 1,
                                        torch.linspace(-2, 3, 6).double().requires_grad_())),
    # The first kink lies on the first x, so x itself is not moved.
    (f.relu_basis_fit, lambda d: at(d.constant(6), d(6), d.away(3), by=lambda x, y, points: f.relu_basis_fit(
        x, y, 3)(points))),
    # few_labels
    (f.contrastive_margin, lambda d: at(d(4, 3), d(4, 3), torch.tensor([1, -1, -1, 1]), margin=3.0)),
    (f.pseudo_label, lambda d: at(d(5, 3), 3 * d.constant(5, 3), threshold=0.6)),
    *((f.pair_losses_each, lambda d, kind=kind: at(
        d(5, 3), torch.tensor([0, 1, 0, 1, -1]), kind,
        by=lambda codes, *others: f.pair_losses_each(codes / codes.norm(dim=1, keepdim=True), *others, 0.4)))
      for kind in ("siamese", "cosine", "triplet")),
    (f.nearest_codes, lambda d: at(d(3, 2), d(5, 2), 2)),
    (f.neighbour_votes, lambda d: at(d(2, 5), d.whole(3, 2, 5), 3, temperature=0.5)),
    # generalise
    (f.squared_error, lambda d: at(d(5), d(5))),
    (f.polynomial_features, lambda d: at(d(3, 2), 3)),
    (f.fit_polynomial, lambda d: at(d.apart(6), d(6), by=lambda *xy: f.fit_polynomial(*xy, 2).coefficients)),
    # geometry: of any matrix, the leading part
    (f.separate, lambda d: at(d(3, 4), 2.0)),
    # initialise
    (f.recurrent_growth, lambda d: at(d(3, 3), 3, d(3))),
    # kernel_pooling
    (f.kernel_weights, lambda d: at(d(2, 3, 2), d(2, 5, 2), "gaussian", d.positive(2))),
    (f.kernel_weights, lambda d: at(d(2, 3, 2), d(2, 5, 2), "epanechnikov", d.between(1.3, 1.4))),
    *((f.nadaraya_watson, lambda d, kernel=kernel, empty=empty: at(
        d(2, 3, 1), d(2, 5, 1), d(2, 5, 2), kernel, d.between(0.5, 0.6), weights=d.positive(2, 5),
        empty=empty))
      for kernel, empty in (("epanechnikov", "mean"), ("boxcar", "nearest"))),
    (f.nadaraya_watson, lambda d: at(d(5, 1), d(5, 2), d.between(1.0, 1.1), by=lambda k, v, width:
                                     f.nadaraya_watson(k, k, v, "epanechnikov", width, exclude_self=True))),
    *((f.sorted_pooling, lambda d, kernel=kernel: at(d(2, 3), d(2, 5), d(2, 5, 2), kernel,
                                                     d.between(0.8, 0.9), weights=d.positive(2, 5)))
      for kernel in ("epanechnikov", "boxcar")),
    # losses: the gradient of each reduction is one of the others', scaled
    *((function, lambda d: at(d(2, 3, 2), d(2, 3, 2)))
      for function in (f.quadratic_cost, f.mse, f.half_squared_error, f.l1)),
    (f.quadratic_cost, lambda d: at(d(2, 3), d(2, 3), reduction="sum")),
    (f.smooth_l1, lambda d: at(d(2, 5), d(2, 5), beta=0.7)),
    (f.gaussian_nll, lambda d: at(d(2, 5), d(2, 5), d.positive(2, 5), full=True, reduction="none")),
    (f.binary_cross_entropy, lambda d: at(d.between(0.1, 0.9, 2, 5), d.between(0.1, 0.9, 2, 5).detach(),
                                          d.positive(2, 5).detach())),
    (f.binary_cross_entropy_with_logits, lambda d: at(
        d(2, 5), d.between(0, 1, 2, 5), d.positive(2, 5).detach(), pos_weight=d.positive(5).detach())),
    (f.multi_label, lambda d: at(d(2, 5), d.between(0, 1, 2, 5), weight=d.positive(5))),
    (f.cross_entropy, lambda d: at(d(3, 5), torch.tensor([1, -100, 4]), weight=d.positive(5).detach(),
                                   label_smoothing=0.1)),
    (f.cross_entropy, lambda d: at(d(2, 3, 4), d.whole(3, 2, 4), reduction="none")),
    (f.cross_entropy, lambda d: at(d(3, 5), d.shares(3, 5))),
    (f.nll, lambda d: at(d(3, 5), torch.tensor([1, -7, 4]), weight=d.positive(5).detach(), ignore_index=-7)),
    (f.kl_div, lambda d: at(d(2, 5), d.shares(2, 5))),
    (f.kl_div, lambda d: at(d(2, 5), d(2, 5), log_target=True, reduction="sum")),
    (f.perplexity, lambda d: at(d(3, 5), torch.tensor([1, -100, 4]))),
    (f.softmax_gradient, lambda d: at(d(3, 5), d.shares(3, 5))),
    (f.logistic_gradient, lambda d: at(d(3, 2), d(3), d.between(0, 1, 3))),
    (losses.weigh_classes, lambda d: at(
        None, torch.tensor([1, -100, 4]), weight=d.positive(5))),
    (f.mean_of, lambda d: at(d(), d.positive())),
    (reduction.reduce, lambda d: at(d(2, 3), "sum")),
    (f.margin_ranking, lambda d: at(d(5), d(5), torch.tensor([1, -1, 1, -1, 1]).double(), margin=0.3)),
    (f.triplet_margin, lambda d: at(d(3, 4), d(3, 4), d(3, 4), margin=2.0, p=3.0, swap=True)),
    (f.cosine_embedding, lambda d: at(d(5, 3), d(5, 3), torch.tensor([1, -1, 1, -1, -1]), margin=-0.9)),
    (f.info_nce, lambda d: at(d(3, 4), d(3, 4), temperature=0.4)),
    # masks
    (masks.applied, lambda d: at(d(2, 3, 5), MASK, d(3, 5), by=lambda *a: masks.applied(*a).exp())),
    # maths
    *((f.p_norm, lambda d, p=p: at(d.away(2, 3, 5), p, dim=(0, 2))) for p in (1.0, 2.0, 3.5, torch.inf)),
    (f.hadamard, lambda d: at(d(2, 3, 5), d(2, 3, 5))),
    (f.log_base, lambda d: at(d.positive(5), 3.0)),
    (f.power_rule, lambda d: at(d.positive(5), by=lambda x: f.power_rule(2.5)(x))),
    (f.exponential_rule, lambda d: at(d(5), by=lambda x: f.exponential_rule(3.0)(x))),
    (f.logarithm_rule, lambda d: at(d.positive(5), by=lambda x: f.logarithm_rule(3.0)(x))),
    (f.product_rule, lambda d: at(d(5), by=lambda x: f.product_rule(
        torch.sin, torch.cos, torch.exp, torch.exp)(x))),
    (f.quotient_rule, lambda d: at(d(5), by=lambda x: f.quotient_rule(
        torch.sin, torch.cos, torch.exp, torch.exp)(x))),
    (f.chain_rule, lambda d: at(d(5), by=lambda x: f.chain_rule(torch.cos, torch.exp, torch.exp)(x))),
    (f.jacobian_chain_rule, lambda d: at(d(4), by=lambda x: f.jacobian_chain_rule(
        lambda y: y.cos().diag(), torch.exp, lambda y: y.exp().diag())(x))),
    (f.convolve, lambda d: at(d(2, 3), d(2, 5))),
    (f.difference, lambda d: at(d(2, 5))),
    (f.convolved_difference, lambda d: at(d(2, 3), d(5))),
    # measures, whose counts may be shares
    (f.class_counts, lambda d: at(d.positive(3, 3))),
    (f.f1_from_counts, lambda d: at(d.positive(3), d.positive(3), d.positive(3))),
    (f.f1_from_precision_recall, lambda d: at(d.positive(3), d.positive(3))),
    (f.accuracy_from_confusion, lambda d: at(d.positive(3, 3))),
    *((function, lambda d: at(d.positive(3, 3), "weighted"))
      for function in (f.precision_from_confusion, f.recall_from_confusion, f.f1_from_confusion)),
    *((function, lambda d: at(d(5, 2), d(5, 2)))
      for function in (f.regression_sums, f.mean_squared_error, f.root_mean_squared_error,
                       f.mean_absolute_error, f.r2_score)),
    # mixtures
    (f.make_mixture, lambda d: at(*_parameters(d, 2, 3, 3), by=full_mixture)),
    (f.make_mixture, lambda d: at(*_parameters(d, 2, 3))),
    (mixtures.log_constants, lambda d: at(*_parameters(d, 1, 3, 3), by=of_full(mixtures.log_constants))),
    (f.mixture_log_densities, lambda d: at(*_parameters(d, 2, 3, 3), d(4, 3),
                                           by=of_full(f.mixture_log_densities))),
    (f.mixture_log_densities, lambda d: at(*_parameters(d, 2, 1), d(4, 3),
                                           by=of_plain(f.mixture_log_densities))),
    (f.mixture_responsibilities, lambda d: at(d(2, 5, 3))),
    (f.mixture_moments, lambda d: at(d(4, 3), d.shares(4, 2), d(2, 3), by=lambda *rows_and_shift:
                                     f.mixture_moments(*rows_and_shift[:2], PLAIN, rows_and_shift[2]))),
    *((f.mixture_update, lambda d, shape=shape: at(*_parameters(d, *shape), d(4, 3), d(2, 3), by=_updated))
      for shape in ((2, 3, 3), (1, 3, 3), (2, 3), (2, 1))),
    (f.sample_mixture, lambda d: at(d.shares(2).detach(), d(2, 3), d(2, 3, 3), GENERATOR, by=_sampled)),
    (f.cancellation, lambda d: at(*_parameters(d, 2, 3, 3), by=of_full(f.cancellation))),
    *((f.mixture_coefficients, lambda d, shape=shape: at(*_parameters(d, *shape),
                                                         by=of_full(f.mixture_coefficients)))
      for shape in ((2, 3, 3), (1, 3, 3))),
    (f.mixture_coefficients, lambda d: at(*_parameters(d, 2, 3), by=of_plain(f.mixture_coefficients))),
    (mixture_sweeps.moments_of_features, lambda d: at(d(2, 10), by=lambda sums:
                                                      mixture_sweeps.moments_of_features(sums, FULL))),
    # nf4
    (f.dequantise_scales, lambda d: at(d.whole(7, 5), d.positive(1), d.between(3, 4), d(7))),
    # normalise
    (f.standardisation, lambda d: at(d(5, 3))),
    (f.standardise, lambda d: at(d(5, 3), d(3), d.positive(3))),
    (f.unstandardise, lambda d: at(d(5, 3), d(3), d.positive(3))),
    (f.channel_statistics, lambda d: at(d(2, 3, 5))),
    (f.batch_norm, lambda d: at(d(2, 3, 2), d(3), d.positive(3), d(3), d(3), 1e-3)),
    (f.moving_average, lambda d: at(d(3), d(3), 0.9, "average")),
    (f.layer_norm, lambda d: at(d(2, 3, 2), 2, d(3, 2), d(3, 2), 1e-3)),
    # optimise
    (f.gradient_descent_step, lambda d: at([d(2, 3), d(3)], [d(2, 3), d(3)], 0.1)),
    (f.momentum_step, lambda d: at(d(5), d(5), d(5), 0.1, 0.7)),
    (f.adam_step, lambda d: at(d(5), d(5), d(5), d.positive(5), 3, 0.1, 0.7, 0.8)),
    (f.decay_weights, lambda d: at(d(5), 0.1, 0.3)),
    (f.add_l2_gradient, lambda d: at(d(5), d(5), 0.3)),
    (f.add_l1_gradient, lambda d: at(d(5), d.away(5), 0.3)),
    (f.global_norm, lambda d: at([d(2, 3), d(3)])),
    (f.clip_by_norm, lambda d: at([d(2, 3), d(3)], 0.5)),
    (f.clip_by_norm, lambda d: at(d(5), 50.0)),
    (f.clip_by_value, lambda d: at(d.apart(2, 5), 0.6)),
    (f.checkpointed, lambda d: at(d(2, 3), d(4, 3), by=lambda x, w: f.checkpointed(
        lambda x, w: (x @ w.T).tanh())(x, w))),
    # packed
    (f.pack, lambda d: at(d(2, 4, 3), LENGTHS)),
    (f.packed_attention, lambda d: at(d(6, 2, 3), d(6, 2, 3), d(6, 2, 3), LENGTHS, causal=True)),
    (f.unpack, lambda d: at(d(6, 3), LENGTHS, 5)),
    # position
    (f.sinusoidal, lambda d: at(d(2, 3), 4, 50.0, dtype=torch.float64)),
    (f.relative_dot_product, lambda d: at(d(2, 3), 4, 50.0)),
    (f.concatenate_project, lambda d: at(d(2, 3, 2), d(3, 4), d(5, 6))),
    # probability
    (f.bayes, lambda d: at(d.shares(3), d.shares(3, 4))),
    (f.entropy, lambda d: at(d.shares(2, 5))),
    *((function, lambda d: at(d.shares(2, 5), d.shares(2, 5)))
      for function in (f.distribution_cross_entropy, f.kl_divergence, f.js_divergence)),
    (f.gaussian_mle, lambda d: at(d(5, 2), d(5, 3))),
    # quadratic
    (f.quadratic_energy, lambda d: at(d(2, 3), d.positive(3), d())),
    (f.quadratic_gradient, lambda d: at(d(2, 3), d.positive(3), d(3, 3))),
    (f.descent_rates, lambda d: at(d.positive(3), 0.3)),
    (f.predicted_coordinates, lambda d: at(d(3), d.positive(3), 0.3, 4)),
    (f.descend, lambda d: at(torch.sin, d(3), 0.3, 4)),
    # recurrent
    (recurrent.elman_step, lambda d: at(d(3, 2), d(3, 2), d(2, 2), d(2), nonlinearity="arctan")),
    (recurrent.lstm_step, lambda d: at(d(3, 8), (d(3, 2), d(3, 2)), d(8, 2), d(8))),
    *((recurrent.gru_step, lambda d, reset=reset, keeps=keeps: at(
        d(3, 6), d(3, 2), d(6, 2), d(6), reset=reset, keeps=keeps))
      for reset in ("after", "before") for keeps in ("z", "1-z")),
    (f.elman_cell, lambda d: at(d(3, 3), d(3, 2), *_cell(d, 1), nonlinearity="relu")),
    (f.lstm_cell, lambda d: at(d(2, 3), (d(2, 2), d(2, 2)), *_cell(d, 4))),
    (f.gru_cell, lambda d: at(d(2, 3), d(2, 2), *_cell(d, 3), reset="before")),
    *((f.unroll, lambda d, lengths=lengths, reverse=reverse: at(
        d(2, 4, 2), d(2, 2), d(2, 2), by=lambda x, h, w: f.unroll(
            lambda a, h: recurrent.elman_step(a, h, w), x, h, lengths, reverse=reverse)))
      for lengths in (None, LENGTHS) for reverse in (False, True)),
    # through_time: both cells, both directions, with and without lengths and biases
    *((through_time.elman_through_time, lambda d, kind=kind, reverse=reverse, lengths=lengths: at(
        d(2, 4, 3), d(2, 2), *_cell(d, 1), nonlinearity=kind, reverse=reverse, lengths=lengths))
      for kind in ("tanh", "relu") for reverse in (False, True) for lengths in (None, LENGTHS)),
    *((through_time.gru_through_time, lambda d, reverse=reverse, lengths=lengths: at(
        d(2, 3, 2), d(2, 2), d(6, 2), d(6, 2), d(6), d(6), reverse=reverse, lengths=lengths))
      for reverse in (False, True) for lengths in (None, LENGTHS - 1)),
    (through_time.gru_through_time, lambda d: at(d(2, 3, 2), d(2, 2), d(6, 2), d(6, 2))),
    # regularise
    (f.l1_penalty, lambda d: at([d.away(2, 3), d.away(3)], 0.3)),
    (f.l2_penalty, lambda d: at([d(2, 3), d(3)], 0.3)),
    (f.max_norm, lambda d: at(d(3, 2, 2), 1.5)),
    (f.dropout, lambda d: at(d(2, 3, 5), 0.4, True, GENERATOR)),
    (f.keep_scaled, lambda d: at(d(2, 3), 0.4)),
    (f.gaussian_noise, lambda d: at(d(2, 3), 0.4, GENERATOR)),
    (f.multi_task_loss, lambda d: at({"first": d(), "second": d()}, {"second": 0.3})),
    (f.masked_reconstruction_loss, lambda d: at(d(2, 3, 5), d(2, 3, 5), MASK)),
    (f.semi_supervised_loss, lambda d: at(d(3, 4), torch.tensor([1, -100, 3]), d(3, 2), d(3, 2), 0.3)),
    # sampling: −∞ is no number that differences can be taken of
    (f.temperature, lambda d: at(d(2, 5), 0.7)),
    (f.top_k, lambda d: at(d(2, 5), 2, by=lambda *a: f.top_k(*a).exp())),
    (f.top_p, lambda d: at(d(2, 5), 0.7, by=lambda *a: f.top_p(*a).exp())),
    (sampling.filter_logits, lambda d: at(d(2, 5), by=lambda a: sampling.filter_logits(
        a, temperature=0.7, top_k=4, top_p=0.8).exp())),
    # streaming: what fits in one block is not streamed
    (f.additive_attention, lambda d: at(*_pooled(d, 4), d(4), lengths=torch.tensor([5, 2]))),
    (streaming.flattened, lambda d: at((2,), d(3, 2), d(2, 3, 2))),
    # variational
    (f.reparameterise, lambda d: at(d(2, 3), d(2, 3), d(4, 2, 3))),
    (f.latent_kl_by_dimension, lambda d: at(d(2, 3), d(2, 3))),
    (f.latent_kl, lambda d: at(d(2, 3), d(2, 3))),
    (f.diagonal_normal_log_density, lambda d: at(d(4, 2, 3), d(2, 3), d(2, 3))),
    (f.bernoulli_log_likelihood, lambda d: at(d(4, 2, 3), d.between(0, 1, 2, 3))),
    (f.gaussian_log_likelihood, lambda d: at(d(4, 2, 3), d(2, 3), d(3))),
    (f.elbo, lambda d: at(d(4, 2), d(2))),
    (f.log_importance_weights, lambda d: at(d(4, 2), d(4, 2, 3), d(2, 3), d(2, 3))),
    (f.importance_weighted_bound, lambda d: at(d(4, 2))),
    (f.traversal, lambda d: at(d(4), [2, 0], 3, 1.5)),
    # warp
    (warp.take_warps, lambda d: at(
        d.images(2, 1, 3, 4), warp.Warps(d(2, 2, 2), d(2, 2), d(2, 2, 4, 4)), 90.0)),
]  # fmt: skip

STREAMED = "the backward recomputes blocks, which is written for one derivative"

CASES: list[Case] = [
    *numbered(TWICE),
    *numbered(
        [
            (f.linear_cross_entropy, lambda d: at(d(5, 3), d(4, 3), torch.tensor([0, 1, -100, 3, 3]), d(4),
                                                  chunk=2)),
            (f.linear_cross_entropy, lambda d: at(d(2, 2, 3), d(4, 3), d.whole(4, 2, 2), reduction="none",
                                                  chunk=3)),
            (f.linear_cross_entropy, lambda d: at(d(5, 3), d(4, 3), d.whole(4, 5), reduction="sum")),
        ],
        once="its gradient is made with the loss, where the logits are",
    ),
    *numbered(
        [
            *((f.streamed_pooling, lambda d, o=options: at(
                attention.projected_score, *_pooled(d, 4), [d(4)], block=(2, 2), **o,
                by=_value))
              for options in ({"mask": MASK}, {"mask": ADDED}, {"lengths": torch.tensor([5, 0])},
                              {"causal": True})),
            (f.streamed_pooling, lambda d: at(f.dot_score, *(d(2, 5, 2) for _ in range(3)), exclude_self=True,
                                              block=(3, 2), by=_value)),
            (f.additive_attention, lambda d: at(*_pooled(d, 4), d(4), mask=MASK, backend="torch")),
            (f.gaussian_pooling, lambda d: at(*_pooled(d), d.positive(2), weights=d.positive(2, 5),
                                              lengths=torch.tensor([5, 2]))),
            (f.nadaraya_watson, lambda d: at(*_pooled(d), "gaussian", d.positive())),
            *((f.nadaraya_watson, lambda d, kernel=kernel, empty=empty: at(
                *_pooled(d), kernel, d.between(1.3, 1.4), weights=d.positive(2, 5), empty=empty))
              for kernel, empty in (("epanechnikov", "zero"), ("boxcar", "mean"))),
        ],
        once=STREAMED,
    ),
    *numbered(
        [(attention.fused_attention, lambda d: at(*(d(1, 2, 3, 2) for _ in range(3)), causal=True))],
        once="PyTorch's kernel for (B, H, N, D) has one derivative",
    ),
]  # fmt: skip
