from __future__ import annotations

import math

import pytest
import torch

from quire.errors import InputError
from quire.functional import boxes as B
from quire.functional import suppression as S


def some_boxes(*shape, dtype=torch.float64, spread=10.0):
    corner = torch.rand(*shape, 2, dtype=dtype) * spread
    return torch.cat([corner, corner + 0.5 + torch.rand(*shape, 2, dtype=dtype) * 4], -1)


def nms_by_loop(boxes, scores, threshold, groups):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    overlap = B.iou_matrix(boxes, boxes)
    kept = []
    for i in order:
        if all(groups[i] != groups[j] or overlap[i, j] <= threshold for j in kept):
            kept.append(i)
    return kept


# Any number of boxes --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 1024])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_nms_equals_a_loop(block, threshold, monkeypatch):
    monkeypatch.setattr(S, "BLOCK", block)
    boxes = some_boxes(70, spread=5)
    scores = torch.randint(0, 20, (70,)) / 20  # ties
    groups = torch.randint(-1, 3, (70,))
    for each in (groups, torch.zeros(70, dtype=torch.long)):
        expected = nms_by_loop(boxes, scores, threshold, each)
        assert S.nms(boxes, scores, threshold=threshold, groups=each).tolist() == expected
    assert S.nms(boxes, scores, threshold=threshold).tolist() == expected


def test_a_chain_of_suppression_solved_by_hand():
    # Each overlaps the next by 3/5: 0 removes 1, so 1 cannot remove 2, and so on.
    boxes = torch.tensor([[i, 0.0, i + 4.0, 1.0] for i in range(6)])
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    assert S.nms(boxes, scores, threshold=0.5).tolist() == [0, 2, 4]
    assert S.nms(boxes, scores.flip(0), threshold=0.5).tolist() == [5, 3, 1]
    assert S.nms(boxes, scores, threshold=0.6).tolist() == [0, 1, 2, 3, 4, 5]  # IoU 3/5 is not above
    assert S.nms(boxes, scores, groups=torch.arange(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert S.nms(boxes[:0], scores[:0]).shape == (0,)
    flat = torch.tensor([[0.0, 0.0, 0.0, 4.0]] * 2)
    assert S.nms(flat, torch.ones(2)).tolist() == [0, 1]  # without area nothing overlaps
    one = torch.zeros(1, 6, dtype=torch.long)
    assert S.suppress(boxes[None], scores[None], one, threshold=0.5).tolist() == [[0, 2, 4, -1, -1, -1]]
    assert S.suppress(boxes[None], scores.flip(0)[None], one, threshold=0.5, most=2).tolist() == [[5, 3]]
    scores[0] = -math.inf  # what is no candidate strikes out nothing
    assert S.suppress(boxes[None], scores[None], one, threshold=0.5, most=4).tolist() == [[1, 3, 5, -1]]


# A batch of images ----------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
def test_a_batch_keeps_what_a_loop_keeps_in_each_image(threshold):
    images, count, classes = 4, 60, 3
    boxes = some_boxes(images, count, spread=5)
    boxes[0, 5, 2:] = boxes[0, 5, :2]  # without area
    scores = torch.randint(0, 30, (images, count)) / 30  # with ties
    scores[0, 5] = 2.0
    labels = torch.randint(0, classes, (images, count))
    scores[scores < 0.2] = -math.inf
    scores[3] = -math.inf
    for most in (1, 8, 60, 100):
        kept = S.suppress(boxes, scores, labels, threshold=threshold, most=most)
        assert kept.shape == (images, min(most, count))
        for n in range(images):
            rows = [i for i in range(count) if scores[n, i] >= 0 and (n or i != 5)]
            loop = nms_by_loop(boxes[n, rows], scores[n, rows], threshold, labels[n, rows])
            wanted = ([] if n else [5]) + [rows[i] for i in loop]
            assert kept[n].tolist() == wanted[:most] + [-1] * (kept.shape[1] - len(wanted[:most]))
            alive = (scores[n] >= 0).nonzero().flatten()
            groups = labels[n, alive]
            peer = alive[S.nms(boxes[n, alive], scores[n, alive], threshold=threshold, groups=groups)]
            assert peer.tolist() == wanted


def detections_by_loop(logits, offsets, defaults, threshold, least_score, most):
    """All boxes and classes of one image, one by one."""
    probability = logits.softmax(-1)
    found = []
    for c in range(logits.shape[1] - 1):
        boxes = torch.stack([B.decode_boxes(o, d) for o, d in zip(offsets, defaults, strict=True)])
        boxes = boxes.clamp(0, 1)
        scores = probability[:, c + 1]
        rows = ((scores >= least_score) & B.valid_boxes(boxes)).nonzero().flatten()
        zeros = torch.zeros(len(rows))
        kept = rows[nms_by_loop(boxes[rows], scores[rows], threshold, zeros)]
        found += [(scores[i].item(), c, boxes[i].tolist()) for i in kept]
    return sorted(found, key=lambda each: -each[0])[:most]


@pytest.mark.parametrize("most", [5, 100])
def test_detections_equal_a_loop(most):
    images, classes = 3, 4
    defaults = some_boxes(50, spread=9) / 13
    logits = 3 * torch.randn(images, 50, classes + 1, dtype=torch.float64)
    logits[2, :, 0] = 1e3  # nothing there
    offsets = torch.randn(images, 50, 4, dtype=torch.float64)
    offsets[0, 0, 0] = 1e4  # far outside
    boxes, scores, labels = S.read_detections(
        logits, offsets, defaults, threshold=0.4, least_score=0.05, candidates=500, most=most
    )
    assert boxes.shape == (images, min(most, 200), 4)
    for n in range(images):
        wanted = detections_by_loop(logits[n], offsets[n], defaults, 0.4, 0.05, most)
        assert bool(wanted) == (n < 2)
        number = len(wanted)
        assert labels[n, :number].tolist() == [c for _, c, _ in wanted]
        assert scores[n, :number].tolist() == pytest.approx([s for s, _, _ in wanted], rel=1e-12)
        torch.testing.assert_close(
            boxes[n, :number], torch.tensor([b for _, _, b in wanted], dtype=torch.float64).view(-1, 4)
        )
        assert (labels[n, number:] == -1).all()
        assert scores[n, number:].abs().sum() == 0
        assert boxes[n, number:].abs().sum() == 0


def test_the_first_of_equal_scores_wins():
    defaults = some_boxes(300, spread=9) / 13
    logits, offsets = torch.zeros(2, 300, 3).double(), torch.zeros(2, 300, 4).double()
    logits[:, :, 0] = -1e3 * (torch.arange(300) % 2 == 0)  # certain, as saturated scores are
    logits[:, :, 2] = -1e3
    boxes, scores, labels = S.read_detections(logits, offsets, defaults, threshold=0.0, candidates=600)
    wanted = detections_by_loop(logits[0], offsets[0], defaults, 0.0, 0.01, 100)
    assert len({score for score, _, _ in wanted[:5]}) == 1
    for n in range(2):
        assert labels[n, : len(wanted)].tolist() == [c for _, c, _ in wanted]
        expected = torch.tensor([b for _, _, b in wanted], dtype=torch.float64)
        torch.testing.assert_close(boxes[n, : len(wanted)], expected)
        assert (scores[n, len(wanted) :] == 0).all()


def test_log_odds_are_those_of_the_probability():
    logits, classes = 3 * torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(0, 5, (4, 6))
    p = logits.softmax(-1).gather(-1, classes[..., None]).squeeze(-1)
    torch.testing.assert_close(S.log_odds(logits, classes), torch.logit(p))


def test_certain_detections_keep_their_order():
    """Both probabilities are 1 in float32; the second box is the better one."""
    defaults = torch.tensor([[0.1, 0.1, 0.5, 0.5], [0.12, 0.1, 0.52, 0.5]])
    logits = torch.tensor([[[0.0, 20.0], [0.0, 25.0]]])
    assert (logits.softmax(-1)[..., 1] == 1).all()
    boxes, _, labels = S.read_detections(logits, torch.zeros(1, 2, 4), defaults)
    assert labels.tolist() == [[0, -1]]
    torch.testing.assert_close(boxes[0, 0], defaults[1])


def test_low_precision_is_read_in_float32():
    defaults = some_boxes(20, dtype=torch.float32) / 15
    logits, offsets = torch.randn(1, 20, 3).bfloat16(), torch.randn(1, 20, 4).bfloat16()
    narrow = S.read_detections(logits, offsets, defaults)
    wide = S.read_detections(logits.float(), offsets.float(), defaults)
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda box: S.nms(box, torch.zeros(2)), r"nms of shapes \(1, 4\), \(2,\)"),
        (lambda box: S.nms(box.flip(1), torch.zeros(1)), r"nms: box 0 is \(1.0, 1.0, 0.0, 0.0\)"),
        (lambda box: S.nms(box, torch.full((1,), math.nan)), r"score nan[\s\S]*look for NaN"),
        (
            lambda box: S.suppress(box, torch.zeros(1), torch.zeros(1)),
            r"suppress of shapes \(1, 4\), \(1,\), \(1,\)[\s\S]*\(N, K, 4\)[\s\S]*batch of one",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call(torch.tensor([[0.0, 0.0, 1.0, 1.0]]))


@pytest.mark.gpu
def test_on_the_gpu():
    boxes, scores, groups = some_boxes(3000, spread=30), torch.rand(3000), torch.randint(0, 3, (3000,))
    there = S.nms(boxes.cuda(), scores.cuda(), groups=groups.cuda())
    assert there.is_cuda
    assert torch.equal(there.cpu(), S.nms(boxes, scores, groups=groups))
    defaults = some_boxes(500, spread=9) / 13
    logits, offsets = torch.randn(4, 500, 5).double(), torch.randn(4, 500, 4).double()
    here = S.read_detections(logits, offsets, defaults)
    logits, offsets, defaults = logits.cuda(), offsets.cuda(), defaults.cuda()
    torch.cuda.set_sync_debug_mode("error")  # nothing waits for the device
    try:
        there = S.read_detections(logits, offsets, defaults)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a.cpu(), b)
