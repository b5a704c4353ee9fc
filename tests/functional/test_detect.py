from __future__ import annotations

import math

import pytest
import torch

from quire.errors import InputError
from quire.functional import boxes as B
from quire.functional import detect
from quire.functional.reduction import LOSSES
from quire.functional.suppression import nms


def some_boxes(n, dtype=torch.float64, spread=10.0):
    corner = torch.rand(n, 2, dtype=dtype) * spread
    return torch.cat([corner, corner + 0.5 + torch.rand(n, 2, dtype=dtype) * 4], 1)


# Default boxes --------------------------------------------------------------------------------


def test_default_boxes_solved_by_hand():
    assert detect.default_scales(3) == pytest.approx((0.2, 0.55, 0.9, 1.0))
    assert detect.default_scales(1, 0.3) == (0.3, 1.0)
    boxes = detect.default_boxes([(1, 2)], [0.25, 0.36], [[1, 4]], dtype=torch.float64)
    # Centres (1/4, 1/2) and (3/4, 1/2); sides 1/4; 1/2 by 1/8; √(1/4 · 0.36) = 0.3.
    expected = []
    for x in (0.25, 0.75):
        for w, h in ((0.25, 0.25), (0.5, 0.125), (0.3, 0.3)):
            expected.append([x - w / 2, 0.5 - h / 2, x + w / 2, 0.5 + h / 2])
    torch.testing.assert_close(boxes, torch.tensor(expected, dtype=torch.float64))


def test_default_boxes_stand_in_the_order_of_a_permuted_prediction():
    sizes, ratios = [(3, 4), (2, 2)], [[1, 2, 0.5], [1]]
    boxes = detect.default_boxes(sizes, detect.default_scales(2), ratios)
    assert len(boxes) == 3 * 4 * 4 + 2 * 2 * 2
    assert B.valid_boxes(boxes).all()
    # A prediction that carries its own row and column, as a convolution gives it: (boxes · 2, rows, columns).
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"))
    flat = grid.repeat(4, 1, 1).permute(1, 2, 0).reshape(-1, 2)
    centre = B.convert_boxes(boxes[:48], "corners", "centre")
    torch.testing.assert_close(centre[:, 0], (flat[:, 1] + 0.5) / 4)
    torch.testing.assert_close(centre[:, 1], (flat[:, 0] + 0.5) / 3)


# Matching -------------------------------------------------------------------------------------


def match_by_loop(defaults, truth, threshold):
    overlap = B.iou_matrix(truth, defaults)
    index = [-1] * len(defaults)
    for i in range(len(defaults)):
        best = max(range(len(truth)), key=lambda j: (overlap[j, i].item(), -j), default=None)
        if best is not None and overlap[best, i] >= threshold:
            index[i] = best
    free_truth, free_boxes = set(range(len(truth))), set(range(len(defaults)))
    while free_truth and free_boxes:
        pairs = [(overlap[j, i].item(), -j, -i) for j in free_truth for i in free_boxes]
        value, j, i = max(pairs)
        if value == 0:
            break
        index[-i] = -j
        free_truth.remove(-j)
        free_boxes.remove(-i)
    return index


def test_matching_equals_a_loop():
    torch.manual_seed(0)
    defaults = detect.default_boxes(
        [(5, 5), (3, 3)], [0.2, 0.4, 0.8], [[1, 2], [1, 0.5]], dtype=torch.float64
    )
    for n in (1, 2, 5, 9):
        truth = some_boxes(n, spread=8) / 13
        index = detect.match_boxes(defaults, truth)
        assert index.tolist() == match_by_loop(defaults, truth, 0.5)
    low = detect.match_boxes(defaults, truth, threshold=0.1)
    assert low.tolist() == match_by_loop(defaults, truth, 0.1)
    assert (low >= 0).sum() > len(truth)


def test_each_true_box_gets_a_default_box_of_its_own():
    defaults = torch.tensor([[0.0, 0.0, 4.0, 4.0], [20.0, 20.0, 30.0, 30.0], [3.0, 3.0, 12.0, 12.0]])
    # Both overlap default box 0 most; the second more, so the first takes what is left: box 2.
    truth = torch.tensor([[1.0, 1.0, 4.0, 4.0], [0.0, 0.0, 4.0, 3.5]])
    assert detect.match_boxes(defaults, truth).tolist() == [1, -1, 0]
    # A true box that overlaps nothing matches nothing.
    nowhere = torch.tensor([[50.0, 50.0, 51.0, 51.0]])
    assert detect.match_boxes(defaults, nowhere).tolist() == [-1, -1, -1]


def test_a_batch_with_missing_rows_matches_as_its_images_do():
    defaults = detect.default_boxes([(4, 4)], [0.3, 0.5], [[1, 2]], dtype=torch.float64)
    images = [some_boxes(n, spread=8) / 13 for n in (3, 0, 5)]
    truth = torch.full((3, 5, 4), math.nan, dtype=torch.float64)
    present = torch.zeros(3, 5, dtype=torch.bool)
    for i, boxes in enumerate(images):
        truth[i, : len(boxes)], present[i, : len(boxes)] = boxes, True
    together = detect.match_boxes(defaults, truth, present=present)
    for i, boxes in enumerate(images):
        assert torch.equal(together[i], detect.match_boxes(defaults, boxes))
    assert (together[1] == -1).all()
    labels = torch.randint(1, 4, (3, 5))
    classes, offsets = detect.multibox_targets(together, defaults, truth, labels)
    assert offsets.isfinite().all()
    assert ((classes > 0) == (together >= 0)).all()


def test_targets_decode_to_the_true_boxes():
    defaults = detect.default_boxes([(4, 4)], [0.3, 0.5], [[1, 2]], dtype=torch.float64)
    truth, labels = some_boxes(4, spread=8) / 13, torch.tensor([3, 1, 2, 1])
    index = detect.match_boxes(defaults, truth)
    classes, offsets = detect.multibox_targets(index, defaults, truth, labels)
    decoded = B.decode_boxes(offsets, defaults)
    for i, j in enumerate(index.tolist()):
        torch.testing.assert_close(decoded[i], truth[j] if j >= 0 else defaults[i])
        assert classes[i] == (labels[j] if j >= 0 else 0)
    none = detect.multibox_targets(index * 0 - 1, defaults, truth[:0], labels[:0])
    assert none[0].sum() == 0
    assert none[1].abs().sum() == 0


def test_trusting_the_boxes_gives_the_same():
    defaults = detect.default_boxes([(4, 4)], [0.3, 0.5], [[1, 2]], dtype=torch.float64)
    truth, labels = (some_boxes(12, spread=8) / 13).view(2, 6, 4), torch.randint(1, 4, (2, 6))
    checked = detect.match_boxes(defaults, truth)
    assert torch.equal(detect.match_boxes(defaults, truth, degenerate="zero"), checked)
    for a, b in zip(
        detect.multibox_targets(checked, defaults, truth, labels),
        detect.multibox_targets(checked, defaults, truth, labels, degenerate="zero"),
        strict=True,
    ):
        assert torch.equal(a, b)
    # A box without area is not there.
    truth[0, 2, 2:] = truth[0, 2, :2]
    truth[1, 0] = math.nan
    good = torch.ones(2, 6, dtype=torch.bool)
    good[0, 2] = good[1, 0] = False
    trusted = detect.match_boxes(defaults, truth, degenerate="zero")
    assert torch.equal(trusted, detect.match_boxes(defaults, truth, present=good))
    assert detect.multibox_targets(trusted, defaults, truth, labels, degenerate="zero")[1].isfinite().all()


def test_background_in_a_crowd_is_left_out():
    # Four default boxes in a row; the crowd covers half of the second and all of the third and fourth.
    defaults = torch.tensor([[float(i), 0.0, i + 1.0, 1.0] for i in range(4)])
    truth = torch.tensor([[1.5, 0.0, 9.0, 1.0], [3.0, 0.0, 4.0, 1.0], [0.0, 0.0, 4.0, 1.0]])
    crowd = torch.tensor([True, False, False])
    present = torch.tensor([False, True, False])
    index = detect.match_boxes(defaults, truth, present=present)
    assert index.tolist() == [-1, -1, -1, 1]
    assert detect.leave_out_crowds(index, defaults, truth, crowd).tolist() == [-1, -2, -2, 1]
    left = detect.leave_out_crowds(index, defaults, truth, crowd, threshold=0.51)
    assert left.tolist() == [-1, -1, -2, 1]
    classes, offsets = detect.multibox_targets(left, defaults, truth, torch.tensor([1, 2, 1]))
    assert classes.tolist() == [0, 0, -1, 2]
    assert offsets.abs().sum() == 0
    batch = detect.leave_out_crowds(index.expand(2, 4), defaults, truth.expand(2, 3, 4), crowd.expand(2, 3))
    assert batch.tolist() == [[-1, -2, -2, 1]] * 2


def test_scales_are_fitted_to_the_sizes_of_the_boxes():
    side = torch.linspace(0.1, 0.6, 1001, dtype=torch.float64)
    wide = side * 1.5
    boxes = torch.stack([0 * side, 0 * side, wide, side.square() / wide], 1)
    boxes = torch.cat([boxes, torch.zeros(300, 4)])  # rows without a box
    scales = detect.fit_scales(boxes.view(-1, 1, 4), 3)
    made = detect.default_boxes([(1, 1)] * 3, scales, [[1.0]] * 3, dtype=torch.float64)
    found = B.box_area(made).sqrt()
    # 2% of the way from 0.1 to 0.6, then five equal ratios.
    expected = [0.11 * (0.59 / 0.11) ** (i / 5) for i in range(6)]
    assert found.tolist() == pytest.approx(expected)
    assert detect.fit_scales(boxes[:1], 2) == pytest.approx((0.1, 0.1, 0.1))


# Multibox -------------------------------------------------------------------------------------


def multibox_by_loop(scores, offsets, labels, targets, alpha, ratio):
    """Mean over matched boxes, in plain Python."""
    total, matched = 0.0, 0
    for n in range(len(labels)):
        entropy = [
            torch.logsumexp(scores[n, i], 0) - scores[n, i, max(int(labels[n, i]), 0)]
            for i in range(len(labels[n]))
        ]
        positive = [i for i in range(len(entropy)) if labels[n, i] > 0]
        negative = [i for i in range(len(entropy)) if labels[n, i] == 0]
        negative.sort(key=lambda i: -entropy[i].item())
        for i in positive + negative[: int(ratio * len(positive))]:
            total = total + entropy[i]
        for i in positive:
            gap = (offsets[n, i] - targets[n, i]).abs()
            total = total + alpha * torch.where(gap < 1, gap.square() / 2, gap - 0.5).sum()
        matched += len(positive)
    return total / matched


def test_multibox_equals_a_loop():
    (prediction, labels, targets), _ = LOSSES["multibox"].example(
        torch.Generator().manual_seed(5), 6, torch.float64
    )
    assert (labels < 0).any()
    prediction.requires_grad_()
    for alpha, ratio in ((1.0, 3.0), (0.5, 1.0), (2.0, 0.0)):
        found = detect.multibox(prediction, labels, targets, alpha=alpha, negatives=ratio)
        expected = multibox_by_loop(prediction[..., 4:], prediction[..., :4], labels, targets, alpha, ratio)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        gradients = [torch.autograd.grad(value, prediction)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_multibox_solved_by_hand():
    # One match, three negatives; equal logits cost log 2 each, and the offsets are 2 off: 4 · (2 − ½).
    prediction = torch.zeros(1, 4, 6)
    prediction[0, :, :4] = 2.0
    labels = torch.tensor([[0, 1, 0, 0]])
    loss = detect.multibox(prediction, labels, torch.zeros(1, 4, 4), negatives=2.0, alpha=0.5)
    assert loss.item() == pytest.approx(3 * math.log(2) + 0.5 * 6)


def test_the_largest_losses_are_mined():
    losses = torch.tensor([[5.0, 1.0, 4.0, 9.0, 4.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    labels = torch.tensor([[0, 0, 0, 2, 0, -1], [0, 0, 0, 0, 0, 0]])
    mined = detect.hard_negatives(losses, labels, 2.0)
    assert mined.tolist() == [[True, False, True, False, False, False], [False] * 6]
    assert torch.equal(detect.hard_negatives(losses, labels, 2.9), mined)  # at most, not at least
    assert detect.hard_negatives(losses, labels, 100.0)[0].tolist() == [True, True, True, False, True, False]
    # At least one: more than two for each match in the second image only, which has none.
    mined = detect.hard_negatives(losses, labels, 2.0, least=1)
    assert mined.tolist() == [[True, False, True, False, False, False], [False] * 5 + [True]]
    scores, place = torch.zeros(2, 6, 3), torch.zeros(2, 6, 4)
    classes, _ = detect.multibox_parts(scores, place, labels, place, negatives=2.0, least_negatives=4)
    # One match and four of its negatives; then four of six negatives.
    assert classes.tolist() == pytest.approx([5 * math.log(3), 4 * math.log(3)])


def test_nothing_matched_is_zero_with_a_zero_gradient():
    prediction = torch.randn(2, 5, 7, requires_grad=True)
    loss = detect.multibox(prediction, torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, 4))
    loss.backward()
    assert loss == 0
    assert prediction.grad.abs().max() == 0


def test_a_model_learns_from_it():
    torch.manual_seed(0)
    defaults = detect.default_boxes([(4, 4)], [0.3, 0.5], [[1]])
    truth = torch.tensor([[0.1, 0.1, 0.4, 0.45], [0.5, 0.5, 0.95, 0.9]])
    index = detect.match_boxes(defaults, truth)
    labels, targets = detect.multibox_targets(index, defaults, truth, torch.tensor([1, 2]))
    prediction = torch.zeros(1, len(defaults), 4 + 3, requires_grad=True)
    descent = torch.optim.Adam([prediction], lr=0.3)
    for _ in range(150):
        descent.zero_grad()
        detect.multibox(prediction, labels[None], targets[None]).backward()
        descent.step()
    scores = prediction[0, :, 4:].softmax(-1)
    boxes = B.decode_boxes(prediction[0, :, :4], defaults).detach()
    for k in (1, 2):
        kept = nms(boxes, scores[:, k])
        assert B.iou(boxes[kept[:1]], truth[k - 1 : k]).item() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_mines_the_same_boxes(dtype):
    (prediction, labels, targets), options = LOSSES["multibox"].example(
        torch.Generator().manual_seed(2), 8, dtype
    )
    wide = detect.multibox(prediction.double(), labels, targets.double(), **options)
    narrow = detect.multibox(prediction, labels, targets, **options)
    assert narrow.dtype == dtype
    assert narrow.item() == pytest.approx(wide.item(), rel=2e-2)


# Messages and device --------------------------------------------------------------------------

UNIT = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
LABELS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: detect.default_scales(0), r"0 maps[\s\S]*at least one map"),
        (
            lambda: detect.default_boxes([(2, 2)], [0.2], [[1]]),
            r"1 sizes, 1 lists of ratios and 1 scales[\s\S]*one scale more[\s\S]*default_scales",
        ),
        (lambda: detect.default_boxes([(2, 2)], [0.2, 1], [[1, 0]]), r"ratios \[\[1, 0\]\][\s\S]*positive"),
        (lambda: detect.match_boxes(UNIT, UNIT.flip(1)), r"match_boxes: box 0 is \(1, 1, 0, 0\)"),
        (lambda: detect.match_boxes(UNIT.flip(1), UNIT), r"\(default boxes\): box 0"),
        (lambda: detect.match_boxes(UNIT, UNIT, threshold=0), r"threshold=0[\s\S]*0 < threshold"),
        (
            lambda: detect.match_boxes(UNIT, UNIT, present=torch.ones(2, dtype=torch.bool)),
            r"present of shapes \(1,\) and \(2,\)",
        ),
        (
            lambda: detect.multibox(torch.zeros(2, 3, 5), LABELS, torch.zeros(2, 3, 4)),
            r"shape \(2, 3, 5\)[\s\S]*4 offsets \+ background \+ classes[\s\S]*torch.cat",
        ),
        (
            lambda: detect.multibox(torch.zeros(2, 4, 6), LABELS, torch.zeros(2, 4, 4)),
            r"scores \(2, 4, 2\) with labels \(2, 3\)",
        ),
        (
            lambda: detect.multibox(torch.zeros(2, 3, 6), LABELS + 2, torch.zeros(2, 3, 4)),
            r"a label 2 and 2 scores a box[\s\S]*up to 1[\s\S]*one score more",
        ),
        (
            lambda: detect.multibox(torch.zeros(2, 3, 6), LABELS, torch.zeros(2, 4)),
            r"offsets and targets of shapes \(2, 3, 4\) and \(2, 4\)",
        ),
        (lambda: detect.fit_scales(UNIT * 0, 2), r"0 boxes with an area to 2 maps[\s\S]*at least one"),
        (
            lambda: detect.leave_out_crowds(torch.zeros(1), UNIT, UNIT, torch.ones(2).bool()),
            r"rows and crowd of shapes \(1,\) and \(2,\)",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.gpu
def test_on_the_gpu():
    defaults = detect.default_boxes([(5, 5)], [0.3, 0.5], [[1, 2]], device="cuda")
    truth, labels = some_boxes(4, torch.float32, spread=8) / 13, torch.tensor([1, 2, 1, 1])
    index = detect.match_boxes(defaults, truth.cuda())
    assert torch.equal(index.cpu(), detect.match_boxes(defaults.cpu(), truth))
    classes, targets = detect.multibox_targets(index, defaults, truth.cuda(), labels.cuda())
    prediction = torch.randn(1, len(defaults), 7)
    loss = detect.multibox(prediction.cuda(), classes[None], targets[None])
    expected = detect.multibox(prediction, classes[None].cpu(), targets[None].cpu())
    torch.testing.assert_close(loss.cpu(), expected)
    assert loss.is_cuda


@pytest.mark.gpu
def test_trusting_the_boxes_never_waits_for_the_gpu():
    defaults = detect.default_boxes([(5, 5)], [0.3, 0.5], [[1, 2]], device="cuda")
    truth = some_boxes(12, torch.float32, spread=8).view(3, 4, 4).cuda() / 13
    labels, present = torch.ones(3, 4, device="cuda").long(), torch.ones(3, 4, device="cuda").bool()
    wanted = detect.match_boxes(defaults, truth, present=present)
    torch.cuda.set_sync_debug_mode("error")
    try:
        index = detect.match_boxes(defaults, truth, present=present, degenerate="zero")
        index = detect.leave_out_crowds(index, defaults, truth, ~present)
        detect.multibox_targets(index, defaults, truth, labels, degenerate="zero")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(index, wanted)
