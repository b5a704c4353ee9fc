"""Detection with default boxes: where they lie, what they should learn, and the loss that teaches it.

N images, A default boxes, G true boxes of an image, C classes; class 0 is the background, objects are 1 … C.
Boxes are corners (x₁, y₁, x₂, y₂), see `quire.functional.boxes`. The method is that of SSD (Liu et al.,
2016): x_ij^p = 1 says that default box i learns true box j of class p. `quire.functional.suppression` reads
detections off the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import InputError
from quire.functional.boxes import (
    VARIANCES,
    Degenerate,
    box_area,
    convert_boxes,
    encode_boxes,
    encode_centres,
    intersection,
    iou_matrix,
    require_boxes,
    require_valid,
)
from quire.functional.reduction import (
    Example,
    loss,
    normal,
    reduce,
    require_positive,
    require_same_shape,
    uniform,
)
from quire.kernels import Backend, refusal, use_triton

BACKGROUND = 0
UNMATCHED = -1
LEFT_OUT = -2
"""In place of the number of a true box: neither an object nor background."""
TAIL = 0.02
"""Share of the boxes at either end of the sizes to which default boxes are not fitted."""
MOST_BOXES = 4096
"""True boxes of an image up to which the kernel matches them."""


# Default boxes --------------------------------------------------------------------------------


def default_scales(maps: int, low: float = 0.2, high: float = 0.9) -> tuple[float, ...]:
    """s_k = low + (high − low)(k − 1)/(m − 1) for k = 1 … m, then 1 for the extra box of the last map."""
    if maps < 1 or not 0 < low <= high:
        raise InputError(
            f"default_scales of {maps} maps from {low:g} to {high:g}",
            expected="at least one map, and 0 < low ≤ high",
            fix="give the smallest scale first, as a share of the image",
        )
    step = (high - low) / max(maps - 1, 1)
    return (*(low + step * k for k in range(maps)), 1.0)


def fit_scales(boxes: Tensor, maps: int) -> tuple[float, ...]:
    """Scales for `default_boxes` such that its squares span the sizes √(w·h) of true boxes (…, 4).

    A map has squares of side s_k and √(s_k s_{k+1}). They rise in 2m equal ratios from the size that all but
    2% of the boxes reach to the one that all but 2% stay below. Boxes without area are not counted.
    """
    require_boxes("fit_scales", boxes)
    side = box_area(boxes.double()).sqrt().flatten()
    side = side[side > 0]
    if maps < 1 or not len(side):
        raise InputError(
            f"fit_scales of {len(side)} boxes with an area to {maps} maps",
            expected="at least one of each",
            fix="give the true boxes of the training images as corners",
        )
    low, high = (torch.quantile(side, q).item() for q in (TAIL, 1 - TAIL))
    ratio = (high / low) ** (1 / (2 * maps - 1))
    return tuple(low * ratio ** (2 * k) for k in range(maps + 1))


def default_boxes(
    sizes: Sequence[tuple[int, int]],
    scales: Sequence[float],
    ratios: Sequence[Sequence[float]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Boxes (A, 4) around the cells of feature maps, as corners in shares of the image.

    Map k has `sizes[k]` = (rows, columns). At the centre ((j + ½)/columns, (i + ½)/rows) of each cell stand
    boxes of width s_k √a and height s_k / √a for each aspect a of `ratios[k]`, then a square of side
    √(s_k s_{k+1}). The order is map, row, column, box: that of a prediction (N, rows, columns, ·). Boxes at
    the border reach outside the image; `clip_boxes(boxes, 1, 1)` cuts them.
    """
    if not len(sizes) == len(ratios) == len(scales) - 1:
        raise InputError(
            f"default_boxes of {len(sizes)} sizes, {len(ratios)} lists of ratios and {len(scales)} scales",
            expected="as many lists of ratios as sizes, and one scale more",
            fix="use default_scales(len(sizes)), which adds the last scale",
        )
    numbers = [*scales, *(a for each in ratios for a in each), *(n for size in sizes for n in size)]
    if not all(number > 0 for number in numbers):
        raise InputError(
            f"default_boxes of sizes {list(sizes)}, scales {list(scales)} and ratios {list(ratios)}",
            expected="positive numbers",
            fix="remove the zero or negative ones",
        )
    made = []
    for k, (rows, columns) in enumerate(sizes):
        shapes = [(scales[k] * math.sqrt(a), scales[k] / math.sqrt(a)) for a in ratios[k]]
        extra = math.sqrt(scales[k] * scales[k + 1])
        size = torch.tensor(
            [*shapes, (extra, extra)], dtype=dtype or torch.get_default_dtype(), device=device
        )
        y = (torch.arange(rows, dtype=size.dtype, device=device) + 0.5) / rows
        x = (torch.arange(columns, dtype=size.dtype, device=device) + 0.5) / columns
        grid = torch.stack([x.expand(rows, -1), y[:, None].expand(-1, columns)], -1)  # rows, columns, 2
        shape = (rows, columns, len(size), 2)
        made.append(torch.cat([grid[:, :, None].expand(shape), size.expand(shape)], -1).flatten(0, 2))
    return convert_boxes(torch.cat(made), "centre", "corners")


# Matching -------------------------------------------------------------------------------------


def match_boxes(
    defaults: Tensor,
    truth: Tensor,
    *,
    threshold: float = 0.5,
    present: Tensor | None = None,
    degenerate: Degenerate = "refuse",
    backend: Backend = "auto",
) -> Tensor:
    """The number j of the true box that each default box learns, −1 for the background: (…, A).

    First the pair with the largest IoU of all is matched, then the largest of the boxes left on both sides,
    until each true box that overlaps anything has one default box of its own. After that every other default
    box learns the true box that it overlaps most, if their IoU is at least the threshold. Among equal
    overlaps the first true box wins, then the first default box.

    `defaults` are (A, 4), `truth` (…, G, 4). Images with fewer than G true boxes say which rows are boxes in
    `present` (…, G); what stands in the other rows is not read. With `degenerate="zero"` boxes without area
    match nothing, and the device is not asked for anything.
    """
    require_boxes("match_boxes", truth)
    if present is not None:
        require_same_shape("match_boxes: rows and present", truth[..., 0], present)
    if degenerate == "refuse":
        require_valid("match_boxes (default boxes)", defaults)
        filler = truth.new_tensor([0.0, 0.0, 1.0, 1.0])
        rows = truth if present is None else torch.where(present[..., None], truth, filler)
        require_valid("match_boxes", rows)
    if not 0 < threshold <= 1:
        raise InputError(
            f"match_boxes with threshold={threshold:g}",
            expected="0 < threshold ≤ 1",
            fix="the usual value is 0.5",
        )
    if use_triton(backend, _reason(defaults, truth)):
        from quire.kernels.matching import match

        *batch, count, _ = truth.shape
        flags = None if present is None else present.reshape(math.prod(batch), count)
        rows = truth.detach().reshape(math.prod(batch), count, 4)
        found: Tensor = match(defaults.detach(), rows, flags, threshold)
        return found.view(*batch, len(defaults))
    overlap = iou_matrix(truth, defaults, degenerate="zero")  # …, G, A
    if present is not None:
        overlap = overlap.masked_fill(~present[..., None], 0.0)
    *batch, count, boxes = overlap.shape
    if not count or not boxes:
        return torch.full((*batch, boxes), UNMATCHED, dtype=torch.long, device=overlap.device)
    best, index = overlap.max(-2).values, overlap.argmax(-2)
    index = torch.where(best >= threshold, index, UNMATCHED).view(-1, boxes)
    left = overlap.reshape(-1, count, boxes).clone()
    images = torch.arange(len(left), device=left.device)
    nothing = left.new_zeros(())  # a number of the host's would have to be copied, and waited for
    on_host = left.device.type == "cpu"  # where asking costs less than going on
    for _ in range(min(count, boxes)):
        flat = left.flatten(1)
        place = flat.argmax(1)
        row, column = place // boxes, place % boxes
        top = flat[images, place]
        overlaps = top > 0
        if on_host and not top.any():
            break
        index[images, column] = torch.where(overlaps, row, index[images, column])
        left[images, row] = nothing
        left[images, :, column] = nothing
    return index.view(*batch, boxes)


def _reason(defaults: Tensor, truth: Tensor, exactly: torch.dtype | None = None) -> str:
    """Why no kernel can compare these boxes; `exactly` is the one type that both must have."""
    if exactly is not None and not defaults.dtype == truth.dtype == exactly:
        return f"boxes of types {defaults.dtype} and {truth.dtype}"
    if defaults.dim() != 2:
        return f"default boxes of shape {tuple(defaults.shape)}"
    if truth.dim() < 2 or truth.shape[-2] > MOST_BOXES:
        return f"true boxes of shape {tuple(truth.shape)}"
    return refusal(defaults, truth)


def leave_out_crowds(
    index: Tensor,
    defaults: Tensor,
    truth: Tensor,
    crowd: Tensor,
    *,
    threshold: float = 0.5,
    backend: Backend = "auto",
) -> Tensor:
    """`index` of `match_boxes` with −2 for default boxes that match nothing but lie in a crowd.

    A default box lies in a crowd if at least the threshold's share of its area is inside one of the boxes
    (…, G, 4) for which `crowd` (…, G) is true; so does COCO measure the overlap with a crowd.
    """
    require_boxes("leave_out_crowds", truth)
    require_same_shape("leave_out_crowds: rows and crowd", truth[..., 0], crowd)
    if crowd.device.type == "cpu" and not crowd.any():
        return index
    if use_triton(backend, _reason(defaults, truth, exactly=torch.float32)):
        from quire.kernels.matching import leave_out_crowds as leave_out

        count = truth.shape[-2]
        batch = torch.broadcast_shapes(index.shape[:-1], truth.shape[:-2])
        images = math.prod(batch)
        left: Tensor = leave_out(
            index.expand(*batch, len(defaults)).reshape(images, len(defaults)),
            defaults.detach(),
            truth.detach().expand(*batch, count, 4).reshape(images, count, 4),
            crowd.expand(*batch, count).reshape(images, count),
            threshold,
        )
        return left.view(*batch, len(defaults))
    inside = intersection(truth[..., :, None, :], defaults) / box_area(defaults)  # …, G, A
    lies = ((inside >= threshold) & crowd[..., None]).any(-2)
    return torch.where(lies & (index == UNMATCHED), LEFT_OUT, index)


def multibox_targets(
    index: Tensor,
    defaults: Tensor,
    truth: Tensor,
    labels: Tensor,
    variances: tuple[float, float] = VARIANCES,
    *,
    degenerate: Degenerate = "refuse",
) -> tuple[Tensor, Tensor]:
    """Class (…, A) and coded offsets (…, A, 4) that each default box should predict.

    `index` comes from `match_boxes`; `labels` (…, G) are 1 … C. The background is class 0 with offsets 0, and
    what `leave_out_crowds` left out is class −1. `degenerate="zero"` trusts that matched boxes have an area.
    """
    require_boxes("multibox_targets", truth)
    require_same_shape("multibox_targets: labels and index rows", labels, truth[..., 0])
    matched = index >= 0
    background = torch.where(index == LEFT_OUT, -1, BACKGROUND)
    if not truth.shape[-2]:
        return background, defaults.new_zeros(*index.shape, 4)
    row = index.clamp(min=0)
    chosen = truth.gather(-2, row[..., None].expand(*row.shape, 4))
    # A default box without a match codes itself, which is 0 exactly.
    chosen = torch.where(matched[..., None], chosen, defaults)
    classes = torch.where(matched, labels.long().gather(-1, row), background)
    if degenerate == "refuse":
        return classes, encode_boxes(chosen, defaults, variances)
    box, default = (convert_boxes(boxes, "corners", "centre") for boxes in (chosen, defaults))
    return classes, encode_centres(box, default, variances)


# Multibox loss --------------------------------------------------------------------------------


def hard_negatives(losses: Tensor, labels: Tensor, ratio: float = 3.0, least: int = 0) -> Tensor:
    """Which default boxes count as negatives: in each image the ones with the largest losses.

    `losses` and `labels` are (N, A). There are at most `ratio` of them for each positive of the image, or
    `least` where that is more, the first among equal ones. Labels below 0 are neither positive nor negative.
    """
    require_same_shape("hard_negatives", losses, labels)
    limit = (ratio * (labels > BACKGROUND).sum(-1, keepdim=True)).floor().clamp(min=least)
    candidates = losses.detach().masked_fill(labels != BACKGROUND, -math.inf)
    order = candidates.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(labels.shape[-1], device=labels.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return (labels == BACKGROUND) & (rank < limit)


def multibox_parts(
    scores: Tensor,
    offsets: Tensor,
    labels: Tensor,
    targets: Tensor,
    *,
    negatives: float = 3.0,
    least_negatives: int = 0,
    beta: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """L_cls and L_loc of each image (N,), summed over its default boxes.

    `scores` (N, A, C + 1) are logits, background first, `offsets` and `targets` (N, A, 4) coded boxes. L_cls
    is the cross-entropy of positives and mined negatives, L_loc the smooth L1 of positives. `negatives` and
    `least_negatives` are those of `hard_negatives`.
    """
    if scores.dim() != 3 or labels.shape != scores.shape[:2]:
        raise InputError(
            f"multibox of scores {tuple(scores.shape)} with labels {tuple(labels.shape)}",
            expected="scores (images, default boxes, classes + 1) and labels (images, default boxes)",
            fix="permute the prediction so that classes come last",
        )
    require_same_shape("multibox: offsets and targets", offsets, targets)
    # On a GPU the same check would wait for the device; its kernel asserts instead.
    if labels.device.type == "cpu" and labels.numel() and labels.max() >= scores.shape[2]:
        raise InputError(
            f"multibox with a label {labels.max().item()} and {scores.shape[2]} scores a box",
            expected=f"labels up to {scores.shape[2] - 1}; 0 is the background",
            fix="predict one score more than there are classes, the first for the background",
        )
    require_positive("multibox", "beta", beta)
    # In bfloat16 many losses tie, and mining would choose among them by position.
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    ignored = labels < 0
    entropy = F.cross_entropy(
        wide.flatten(0, 1), labels.long().masked_fill(ignored, -100).flatten(), reduction="none"
    ).view(labels.shape)
    positive = labels > BACKGROUND
    counted = positive | hard_negatives(entropy, labels, negatives, least_negatives)
    place = F.smooth_l1_loss(offsets.to(wide.dtype), targets.to(wide.dtype), reduction="none", beta=beta).sum(
        -1
    )
    # Not a product: an infinite target of a box that does not count must not become NaN.
    classification = torch.where(counted, entropy, 0.0).sum(1)
    location = torch.where(positive, place, 0.0).sum(1)
    return classification.to(scores.dtype), location.to(scores.dtype)


def count_positives(_: object, labels: Tensor, *__: object, **___: object) -> Tensor:
    """N of the multibox loss: how many default boxes are matched, in all images together."""
    # An integer tensor would make a float32 of whatever is divided by it.
    return (labels > BACKGROUND).sum(dtype=torch.float64)


def _multibox_example(generator: torch.Generator, n: int, dtype: torch.dtype) -> Example:
    boxes, classes = 9, 3
    device = generator.device
    labels = torch.randint(1, classes + 1, (n, boxes), generator=generator, device=device)
    kind = uniform(generator, torch.float32, n, boxes)
    labels = labels.masked_fill(kind > 0.2, BACKGROUND).masked_fill(kind > 0.9, -1)
    prediction = normal(generator, dtype, n, boxes, 4 + classes + 1)
    return (prediction, labels, normal(generator, dtype, n, boxes, 4)), {"alpha": 0.7, "negatives": 2.0}


@loss("multibox", weigh=count_positives, example=_multibox_example)
def multibox(
    prediction: Tensor,
    labels: Tensor,
    targets: Tensor,
    /,
    *,
    alpha: float = 1.0,
    negatives: float = 3.0,
    beta: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """L = (1/N)(L_cls + α L_loc) with N matched default boxes; 0 where nothing is matched.

    `prediction` (images, A, 4 + C + 1) holds the four offsets, then the logits, background first. `labels`
    (images, A) and `targets` (images, A, 4) come from `multibox_targets`; labels below 0 are ignored. The
    mean is over matched boxes; "none" gives L_cls + α L_loc of each image. Negatives are mined image by
    image, so the sums of parts of a batch add up.
    """
    if prediction.dim() != 3 or prediction.shape[-1] < 6:
        raise InputError(
            f"multibox of a prediction of shape {tuple(prediction.shape)}",
            expected="(images, default boxes, 4 offsets + background + classes)",
            fix="join offsets and scores: torch.cat([offsets, scores], -1)",
        )
    offsets, scores = prediction[..., :4], prediction[..., 4:]
    classification, location = multibox_parts(
        scores, offsets, labels, targets, negatives=negatives, beta=beta
    )
    return reduce(classification + alpha * location, reduction)
