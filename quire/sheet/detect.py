"""Chapter 22: boxes, default boxes, matching, the multibox loss and suppression, against explicit loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.functional import boxes as B
from quire.functional import detect as D
from quire.functional import suppression as S
from quire.models.ssd import SSD, SSDConfig
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]

TOLERANCE = 1e-12


def _boxes(n: int, spread: float = 1.0) -> Tensor:
    corner = torch.rand(n, 2, dtype=torch.float64) * spread
    return torch.cat([corner, corner + 0.05 + torch.rand(n, 2, dtype=torch.float64) * 0.4], 1)


def _table(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Overlap --------------------------------------------------------------------------------------


def _shared(a: list[float], b: list[float]) -> float:
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _size(a: list[float]) -> float:
    return (a[2] - a[0]) * (a[3] - a[1])


def _overlap(a: list[float], b: list[float]) -> float:
    return _shared(a, b) / (_size(a) + _size(b) - _shared(a, b))


def _counted(a: Tensor, b: Tensor) -> float:
    """IoU of two boxes with whole corners from the cells that they cover."""
    cells = torch.zeros(2, 12, 12, dtype=torch.bool)
    for canvas, box in zip(cells, (a, b), strict=True):
        x1, y1, x2, y2 = (int(value) for value in box)
        canvas[y1:y2, x1:x2] = True
    return ((cells[0] & cells[1]).sum() / (cells[0] | cells[1]).sum()).item()


def _sum_of_areas(first: Tensor, second: Tensor) -> Tensor:
    """Counts the shared part twice in the union."""
    first, second = first[:, None], second[None]
    return B.intersection(first, second) / (B.box_area(first) + B.box_area(second))


@entry(
    "detect/iou",
    "Intersection over union",
    r"\mathrm{IoU}(A, B) = \frac{|A \cap B|}{|A \cup B|} = \frac{|A \cap B|}{|A| + |B| - |A \cap B|}",
    code=(B.iou_matrix, B.iou),
    wrong=(_sum_of_areas, B.iou),
    tolerance=TOLERANCE,
)
def _iou(matrix: Code, paired: Code) -> float:
    first, second = _boxes(20), _boxes(25)
    loop = _table([[_overlap(a, b) for b in second.tolist()] for a in first.tolist()])
    low = torch.randint(0, 6, (10, 2), dtype=torch.float64)
    whole = torch.cat([low, low + torch.randint(1, 7, (10, 2))], 1)
    covered = _table([[_counted(a, b) for b in whole] for a in whole])
    return worst(
        gap(matrix(first, second), loop),
        gap(paired(first, second[:20]), loop[:, :20].diagonal()),
        require(gap(matrix(whole, whole), covered) < 1e-6),  # cells are counted in float32
        gap(matrix(first * 7 + 3, second * 7 + 3), loop),  # free of scale and place
    )


def _around_the_union(first: Tensor, second: Tensor) -> Tensor:
    """Divides the empty part of the hull by the union, which is not bounded by −1."""
    low = torch.minimum(first[..., :2], second[..., :2])
    high = torch.maximum(first[..., 2:], second[..., 2:])
    hull = B.box_area(torch.cat([low, high], -1))
    shared = B.intersection(first, second)
    union = B.box_area(first) + B.box_area(second) - shared
    return shared / union - (hull - union) / union


@entry(
    "detect/generalised-iou",
    "Generalised intersection over union",
    r"\mathrm{GIoU}(A, B) = \mathrm{IoU}(A, B) - \frac{|H| - |A \cup B|}{|H|}, \quad "
    r"H \text{ the smallest box around both}",
    code=B.generalised_iou,
    wrong=_around_the_union,
    tolerance=TOLERANCE,
)
def _generalised(generalised: Code) -> float:
    first, second = _boxes(60), _boxes(60)
    loop = []
    for a, b in zip(first.tolist(), second.tolist(), strict=True):
        hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
        union = _size(a) + _size(b) - _shared(a, b)
        loop.append(_overlap(a, b) - (hull - union) / hull)
    # Two unit squares d apart: H = d + 2, so GIoU = −d/(d + 2), with a gradient though they do not meet.
    distance = torch.tensor([0.5, 2.0, 100.0], dtype=torch.float64, requires_grad=True)
    unit = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64).expand(3, 4)
    moved = unit + torch.stack([distance + 1, distance * 0], 1).repeat(1, 2)
    value = generalised(unit, moved)
    (slope,) = torch.autograd.grad(value.sum(), distance)
    apart = distance.detach()
    return worst(
        gap(generalised(first, second), torch.tensor(loop, dtype=torch.float64)),
        gap(value, -apart / (apart + 2)),
        gap(slope, -2 / (apart + 2).square()),
        gap(generalised(first, first), torch.ones(60, dtype=torch.float64)),
    )


# Default boxes, matching, coding --------------------------------------------------------------


def _default_picture() -> Figure:
    from matplotlib.patches import Rectangle

    from quire.report.style import BLUE, GREY, PURPLE, VERMILION, figure

    sizes = [(4, 4), (2, 2)]
    made = D.default_boxes(sizes, D.default_scales(2, 0.3, 0.6), [[1, 2, 0.5]] * 2, dtype=torch.float64)
    truth = torch.tensor([[0.02, 0.3, 0.48, 0.52], [0.5, 0.42, 1.0, 0.98]], dtype=torch.float64)
    matched = D.match_boxes(made, truth)
    fig = figure(7.0, 3.4)
    for axes, start, end, (rows, columns) in zip(fig.subplots(1, 2), (0, 64), (64, 80), sizes, strict=True):
        for i in range(start, end):
            x1, y1, x2, y2 = made[i].tolist()
            j = int(matched[i])
            colour, width = (GREY, 0.4) if j < 0 else ((BLUE, PURPLE)[j], 1.4)
            axes.add_patch(Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=colour, lw=width))
        for j, (x1, y1, x2, y2) in enumerate(truth.tolist()):
            name = "true boxes" if j == 0 else None
            axes.add_patch(
                Rectangle(
                    (x1, y1), x2 - x1, y2 - y1, fill=False, edgecolor=VERMILION, lw=2, ls="--", label=name
                )
            )
        axes.plot([], [], color=BLUE, label="matched to the first")
        axes.plot([], [], color=PURPLE, label="matched to the second")
        axes.plot([], [], color=GREY, lw=0.6, label="background")
        axes.set(title=f"Default boxes of a {rows}×{columns} map", xlabel="x (share of the width)")
        axes.set(ylabel="y (share of the height)", xlim=(-0.2, 1.2), ylim=(1.2, -0.2), aspect="equal")
    fig.legend(*fig.axes[0].get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center")
    return fig


def _columns_first(sizes: Any, scales: Any, ratios: Any, dtype: torch.dtype) -> Tensor:
    """Walks down the columns, so boxes and predictions of a map that is not symmetric do not meet."""
    turned = [[1 / a for a in each] for each in ratios]
    swapped = D.default_boxes([(columns, rows) for rows, columns in sizes], scales, turned, dtype=dtype)
    return swapped[:, [1, 0, 3, 2]]


@entry(
    "detect/default-boxes",
    "Default boxes",
    r"s_k = s_{\min} + \frac{s_{\max} - s_{\min}}{m - 1}(k - 1), \quad w = s_k \sqrt{a}, \; "
    r"h = \frac{s_k}{\sqrt{a}}, \; s'_k = \sqrt{s_k s_{k+1}}, \quad "
    r"c = \Big(\frac{j + \frac12}{W_k}, \frac{i + \frac12}{H_k}\Big)",
    code=(D.default_boxes, D.default_scales),
    wrong=(_columns_first, D.default_scales),
    tolerance=TOLERANCE,
    picture=_default_picture,
)
def _defaults(default_boxes: Code, default_scales: Code) -> float:
    sizes = [(4, 3), (2, 2), (1, 1)]
    ratios: list[list[float]] = [[1, 2, 0.5], [1, 3], [1]]
    scales = default_scales(3, 0.2, 0.9)
    loop = []
    for k, (rows, columns) in enumerate(sizes):
        side = 0.2 + (0.9 - 0.2) / 2 * k
        following = 0.2 + (0.9 - 0.2) / 2 * (k + 1) if k < 2 else 1.0
        for i in range(rows):
            for j in range(columns):
                x, y = (j + 0.5) / columns, (i + 0.5) / rows
                shapes = [(side * a**0.5, side / a**0.5) for a in ratios[k]]
                for w, h in [*shapes, ((side * following) ** 0.5,) * 2]:
                    loop.append([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
    return gap(default_boxes(sizes, scales, ratios, dtype=torch.float64), _table(loop))


def _threshold_only(defaults: Tensor, truth: Tensor, threshold: float = 0.5) -> Tensor:
    """Leaves out the first step, so a true box that no default box covers well is never learned."""
    if not len(truth):
        return torch.full((len(defaults),), -1)
    best, index = B.iou_matrix(defaults, truth).max(1)
    return torch.where(best >= threshold, index, -1)


@entry(
    "detect/matching",
    "Matching of default boxes",
    r"x_{ij}^p = 1 \text{ if } (i, j) \text{ is greedily the best pair left, or } "
    r"j = \arg\max_{j'} \mathrm{IoU}(d_i, g_{j'}) \text{ and } \mathrm{IoU}(d_i, g_j) \ge \tfrac12",
    code=D.match_boxes,
    wrong=_threshold_only,
    tolerance=0.0,
)
def _matching(match: Code) -> float:
    defaults = D.default_boxes([(4, 4), (2, 2)], [0.25, 0.5, 0.8], [[1, 2], [1, 0.5]], dtype=torch.float64)
    errors = []
    for count in (1, 3, 7):
        truth = _boxes(count, 0.6)
        overlap = [[_overlap(d, g) for g in truth.tolist()] for d in defaults.tolist()]
        expected = [row.index(max(row)) if max(row) >= 0.5 else -1 for row in overlap]
        rows, columns = set(range(len(overlap))), set(range(count))
        while columns:
            _, i, j = max((overlap[i][j], i, j) for i in rows for j in columns)
            expected[i] = j
            rows.remove(i)
            columns.remove(j)
        found = match(defaults, truth)
        errors.append(gap(found, torch.tensor(expected)))
        errors.append(require(set(range(count)) <= set(found.tolist())))  # each is learned by somebody
    return worst(*errors, gap(match(defaults, torch.zeros(0, 4).double()), torch.full((len(defaults),), -1)))


def _not_divided(boxes: Tensor, defaults: Tensor, variances: tuple[float, float] = B.VARIANCES) -> Tensor:
    """Leaves the shift in units of the image instead of the default box."""
    offsets = B.encode_boxes(boxes, defaults, variances)
    return torch.cat([offsets[:, :2] * (defaults[:, 2:] - defaults[:, :2]), offsets[:, 2:]], 1)


@entry(
    "detect/box-coding",
    "Box coding",
    r"t_{cx} = \frac{g_{cx} - d_{cx}}{v_1 d_w}, \; t_{cy} = \frac{g_{cy} - d_{cy}}{v_1 d_h}, \; "
    r"t_w = \frac{1}{v_2} \log\frac{g_w}{d_w}, \; t_h = \frac{1}{v_2} \log\frac{g_h}{d_h}",
    code=(B.encode_boxes, B.decode_boxes),
    wrong=(_not_divided, B.decode_boxes),
    tolerance=1e-11,
)
def _coding(encode: Code, decode: Code) -> float:
    boxes, defaults = _boxes(30), _boxes(30)
    loop = []
    for g, d in zip(boxes.tolist(), defaults.tolist(), strict=True):
        w, h = d[2] - d[0], d[3] - d[1]
        x, y = (g[0] + g[2] - d[0] - d[2]) / 2 / w, (g[1] + g[3] - d[1] - d[3]) / 2 / h
        loop.append([x / 0.1, y / 0.1, math.log((g[2] - g[0]) / w) / 0.2, math.log((g[3] - g[1]) / h) / 0.2])
    offsets = encode(boxes, defaults)
    whole_image = torch.tensor([[0.0, 0.0, 640.0, 480.0]], dtype=torch.float64)
    stretch = torch.tensor([640.0, 480.0, 640.0, 480.0], dtype=torch.float64)
    return worst(
        gap(offsets, _table(loop)),
        gap(decode(offsets, defaults), boxes),
        gap(encode(boxes * stretch, defaults * stretch), offsets),  # the same in pixels
        gap(decode(torch.zeros(1, 4).double(), whole_image), whole_image),
    )


# Multibox loss --------------------------------------------------------------------------------


def _all_negatives(prediction: Tensor, *inputs: Tensor, negatives: float = 3.0, **options: Any) -> Tensor:
    """Counts every background box: they drown the few that hold something."""
    return D.multibox(prediction, *inputs, negatives=1e9, **options)


@entry(
    "detect/multibox",
    "Multibox loss with hard negatives",
    r"L = \frac{1}{N} (L_{cls} + \alpha L_{loc}), \quad "
    r"L_{cls} = -\sum_{i \in Pos} \log \hat c_i^{p} - \sum_{i \in Neg} \log \hat c_i^0, \quad "
    r"L_{loc} = \sum_{i \in Pos} \mathrm{smooth}_{L1}(t_i - \hat t_i)",
    code=D.multibox,
    wrong=_all_negatives,
    tolerance=TOLERANCE,
)
def _multibox(multibox: Code) -> float:
    images, boxes, classes, alpha, ratio = 3, 20, 4, 0.7, 3.0
    prediction = torch.randn(images, boxes, 4 + classes + 1, dtype=torch.float64, requires_grad=True)
    targets = 2 * torch.randn(images, boxes, 4, dtype=torch.float64)
    labels = torch.randint(1, classes + 1, (images, boxes)) * (torch.rand(images, boxes) < 0.15)
    labels[0, :2] = torch.tensor([1, 2])
    total, matched = torch.zeros((), dtype=torch.float64), 0
    for n in range(images):
        surprise = [-(prediction[n, i, 4:].softmax(0)[labels[n, i]]).log() for i in range(boxes)]
        positive = [i for i in range(boxes) if labels[n, i] > 0]
        negative = sorted((i for i in range(boxes) if labels[n, i] == 0), key=lambda i: -surprise[i].item())
        for i in [*positive, *negative[: int(ratio * len(positive))]]:
            total = total + surprise[i]
        for i in positive:
            distance = (prediction[n, i, :4] - targets[n, i]).abs()
            each = torch.where(distance < 1, distance.square() / 2, distance - 0.5)
            total = total + alpha * each.sum()
        matched += len(positive)
    expected = total / matched
    found = multibox(prediction, labels, targets, alpha=alpha, negatives=ratio)
    slopes = [torch.autograd.grad(value, prediction)[0] for value in (found, expected)]
    nothing = multibox(prediction, labels * 0, targets)
    return worst(gap(found, expected), gap(*slopes), gap(nothing, 0.0))


# Non-maximum suppression ----------------------------------------------------------------------


def _in_one_pass(
    boxes: Tensor, scores: Tensor, *, threshold: float = 0.5, groups: Tensor | None = None
) -> Tensor:
    """Lets boxes that are themselves suppressed suppress others."""
    order = scores.argsort(descending=True, stable=True)
    over = B.iou_matrix(boxes[order], boxes[order]) > threshold
    if groups is not None:
        over &= groups[order][:, None] == groups[order]
    return order[~over.triu(1).any(0)]


@entry(
    "detect/nms",
    "Non-maximum suppression by class",
    r"\text{keep } b_i \iff \mathrm{IoU}(b_i, b_j) \le \theta \text{ for every kept } b_j "
    r"\text{ of its class with } s_j > s_i",
    code=(S.nms, S.suppress),
    wrong=(_in_one_pass, S.suppress),
    tolerance=0.0,
)
def _nms(nms: Code, suppress: Code) -> float:
    errors = []
    for classes, threshold in ((1, 0.3), (3, 0.5), (3, 0.0)):
        boxes, scores = _boxes(60, 0.5), torch.randint(0, 15, (60,)) / 15  # with ties
        labels = torch.randint(0, classes, (60,))
        kept: list[int] = []
        for i in sorted(range(60), key=lambda i: (-scores[i].item(), i)):
            rivals = [j for j in kept if labels[j] == labels[i]]
            if all(_overlap(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in rivals):
                kept.append(i)
        errors.append(gap(nms(boxes, scores, threshold=threshold, groups=labels), torch.tensor(kept)))
        # The same for a batch: the image, and the image with its boxes in another order.
        turn = torch.randperm(60)
        batch = [torch.stack([t, t[turn]]) for t in (boxes, scores + torch.arange(60) / 1e6, labels)]
        first, second = suppress(*batch, threshold=threshold, most=60)
        alone = nms(boxes, scores + torch.arange(60) / 1e6, threshold=threshold, groups=labels)
        errors.append(gap(first[first >= 0], alone))
        errors.append(gap(turn[second[second >= 0]], alone))
    return worst(*errors)


# The detector ---------------------------------------------------------------------------------


def _reshaped_at_once(model: SSD, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the channels before the cells, so predictions go to the wrong default boxes."""
    maps, numbers = model.maps(x), model.config.num_classes + 1
    logits = [head(m).reshape(len(x), -1, numbers) for head, m in zip(model.classes, maps, strict=True)]
    offsets = [head(m).reshape(len(x), -1, 4) for head, m in zip(model.offsets, maps, strict=True)]
    return torch.cat(logits, 1), torch.cat(offsets, 1)


@entry(
    "detect/ssd",
    "Single-shot detector",
    r"\hat c_{kijb} = \Big(\sum_{u,v,m} W^k_{(b,c)muv} F^k_{m,i+u,j+v} + \beta^k_{(b,c)}\Big)_{c=0}^{C}, "
    r"\quad \hat t_{kijb} \in \mathbb{R}^4 \text{ alike}, \quad A = \sum_k H_k W_k B",
    code=SSD.forward,
    wrong=_reshaped_at_once,
    tolerance=TOLERANCE,
)
def _ssd(forward: Code) -> float:
    backbone = {"model": "resnet", "small": True, "planes": 8, "block": "basic", "layers": [1, 1]}
    config = SSDConfig(
        backbone, num_classes=2, in_channels=1, size=(8, 12), levels=2, stride=2, width=3, ratios=(1.0, 2.0),
        scales=(0.3, 0.6, 0.9),
    )  # fmt: skip
    model = SSD(config).double().eval()
    x = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    maps = [m.detach() for m in model.maps(x)]
    loop: dict[int, list[list[float]]] = {3: [], 4: []}
    centres = []
    for k, features in enumerate(maps):
        rows, columns = features.shape[2:]
        for i in range(rows):
            for j in range(columns):
                for b in range(3):
                    centres.append([(j + 0.5) / columns, (i + 0.5) / rows])
                    for numbers, head in ((3, model.classes[k]), (4, model.offsets[k])):
                        loop[numbers].append(
                            [_at_cell(head, features[1], b * numbers + c, i, j) for c in range(numbers)]
                        )
    logits, offsets = forward(model, x)
    centre = B.convert_boxes(model.defaults, "corners", "centre")[:, :2]
    return worst(
        gap(logits[1], _table(loop[3])),
        gap(offsets[1], _table(loop[4])),
        require(gap(centre, _table(centres)) < 1e-6),  # default boxes are made in float32
        gap(len(model.defaults), float(sum(m.shape[2] * m.shape[3] * 3 for m in maps))),
    )


def _at_cell(head: Any, features: Tensor, channel: int, row: int, column: int) -> float:
    """One number of a 3×3 convolution with zeros around the map, by its sum."""
    total = head.bias[channel].item()
    for u in range(3):
        for v in range(3):
            i, j = row + u - 1, column + v - 1
            if 0 <= i < features.shape[1] and 0 <= j < features.shape[2]:
                for m in range(len(features)):
                    total += (head.weight[channel, m, u, v] * features[m, i, j]).item()
    return total
