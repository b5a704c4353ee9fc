from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from quire.errors import InputError
from quire.functional import boxes as B


def some_boxes(n, dtype=torch.float64, seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    corner = torch.rand(n, 2, dtype=dtype) * 10
    return torch.cat([corner, corner + 0.5 + torch.rand(n, 2, dtype=dtype) * 6], 1)


def iou_by_loop(a, b):
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    high = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - wide * high
    return wide * high / union, union


def generalised_by_loop(a, b):
    share, union = iou_by_loop(a, b)
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return share - (hull - union) / hull


def test_iou_equals_pycocotools_and_a_loop():
    mask = pytest.importorskip("pycocotools.mask")
    first, second = some_boxes(40), some_boxes(30)
    matrix = B.iou_matrix(first, second)
    sizes = [B.convert_boxes(boxes, "corners", "size").numpy() for boxes in (first, second)]
    np.testing.assert_allclose(matrix, mask.iou(*sizes, [0] * 30), rtol=0, atol=1e-14)
    loop = [[iou_by_loop(a, b)[0] for b in second.tolist()] for a in first.tolist()]
    np.testing.assert_allclose(matrix, loop, rtol=0, atol=1e-14)
    torch.testing.assert_close(B.iou(first[:30], second), matrix[:30].diagonal(), rtol=0, atol=0)
    assert 0 < (matrix > 0).double().mean() < 1


def test_generalised_iou_equals_a_loop():
    first, second = some_boxes(20), some_boxes(25)
    matrix = B.generalised_iou_matrix(first, second)
    loop = [[generalised_by_loop(a, b) for b in second.tolist()] for a in first.tolist()]
    np.testing.assert_allclose(matrix, loop, rtol=0, atol=1e-14)
    torch.testing.assert_close(B.generalised_iou(first, second[:20]), matrix[:, :20].diagonal())
    assert matrix.min() < 0
    assert (matrix <= B.iou_matrix(first, second) + 1e-15).all()


def test_solved_by_hand():
    square = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
    others = torch.tensor(
        [[1.0, 1.0, 3.0, 3.0], [0.0, 0.0, 2.0, 2.0], [2.0, 0.0, 4.0, 2.0], [4.0, 0.0, 6.0, 2.0]]
    )
    torch.testing.assert_close(B.iou_matrix(square, others)[0], torch.tensor([1 / 7, 1.0, 0.0, 0.0]))
    expected = torch.tensor([1 / 7 - 2 / 9, 1.0, 0.0, -4 / 12])
    torch.testing.assert_close(B.generalised_iou_matrix(square, others)[0], expected)
    coded = B.encode_boxes(torch.tensor([[1.0, 0.0, 3.0, 4.0]]), square, (0.1, 0.2))
    torch.testing.assert_close(coded, torch.tensor([[5.0, 5.0, 0.0, math.log(2) / 0.2]]))
    assert B.clip_boxes(torch.tensor([[-1.0, -2.0, 9.0, 3.0]]), 6, 2).tolist() == [[0, 0, 6, 2]]
    assert B.box_area(torch.tensor([[1.0, 1.0, 3.0, 5.0], [3.0, 3.0, 1.0, 1.0]])).tolist() == [8, 0]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(B.FORMATS, repeat=2)))
def test_formats(source, target):
    forms = {"corners": [2.0, 4.0, 8.0, 6.0], "size": [2.0, 4.0, 6.0, 2.0], "centre": [5.0, 5.0, 6.0, 2.0]}
    assert B.convert_boxes(torch.tensor(forms[source]), source, target).tolist() == forms[target]


def test_coding_goes_there_and_back():
    boxes, defaults = some_boxes(50), some_boxes(50)
    for variances in ((0.1, 0.2), (1.0, 1.0)):
        offsets = B.encode_boxes(boxes, defaults, variances)
        torch.testing.assert_close(B.decode_boxes(offsets, defaults, variances), boxes, rtol=0, atol=1e-12)
    assert (B.encode_boxes(defaults, defaults) == 0).all()
    batch = B.decode_boxes(torch.randn(3, 50, 4).double(), defaults)
    assert batch.shape == (3, 50, 4)
    assert B.valid_boxes(batch).all()
    assert B.decode_boxes(torch.full((1, 4), 1e4), defaults[:1].float()).isfinite().all()


def test_gradients():
    first, second = some_boxes(8, seed=1).requires_grad_(), some_boxes(8, seed=2)
    for function in (B.iou, B.iou_matrix, B.generalised_iou, B.generalised_iou_matrix, B.encode_boxes):
        assert torch.autograd.gradcheck(lambda boxes, f=function: f(boxes, second), first)
    offsets = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: B.decode_boxes(t, second), offsets)


def test_disjoint_boxes_meet_by_descent_on_generalised_iou_alone():
    goal = torch.tensor([[6.0, 6.0, 8.0, 8.0]], dtype=torch.float64)
    box = torch.tensor([[0.0, 0.0, 2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(B.iou(box, goal).sum(), box)[0].abs().max() == 0
    for _ in range(400):
        gradient = torch.autograd.grad((1 - B.generalised_iou(box, goal)).sum(), box)[0]
        box = (box - 0.3 * gradient).detach().requires_grad_()
    assert B.iou(box, goal).item() > 0


def test_no_boxes():
    none, some = torch.zeros(0, 4), some_boxes(3, torch.float32)
    assert B.iou_matrix(none, some).shape == (0, 3)
    assert B.generalised_iou_matrix(some, none).shape == (3, 0)
    assert B.iou(none, none).shape == (0,)
    assert B.encode_boxes(none, none).shape == B.decode_boxes(none, none).shape == (0, 4)
    assert B.clip_boxes(none, 3, 3).shape == (0, 4)
    assert B.iou_matrix(torch.zeros(2, 0, 4), some).shape == (2, 0, 3)


def test_degenerate_boxes_overlap_nothing_where_that_is_asked_for():
    bad = torch.tensor(
        [[1.0, 1.0, 1.0, 5.0], [4.0, 4.0, 2.0, 6.0], [math.nan, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 9.0]]
    )
    bad.requires_grad_()
    overlap = B.iou_matrix(bad, bad, degenerate="zero")
    assert overlap.tolist() == torch.tensor([0.0, 0.0, 0.0, 1.0]).diag().tolist()
    general = B.generalised_iou_matrix(bad, bad, degenerate="zero")
    assert general.isfinite().all()
    assert general.min() >= -1
    (overlap.sum() + general.sum()).backward()
    assert bad.grad.isfinite().all()
    assert B.valid_boxes(bad).tolist() == [False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_narrow_boxes_are_compared_in_float32(dtype):
    first = torch.tensor([[0, 0, 300, 300], [10, 20, 410, 500]]).to(dtype)
    overlap = B.iou_matrix(first, first)
    assert overlap.dtype == torch.float32
    torch.testing.assert_close(overlap, B.iou_matrix(first.float(), first.float()))
    assert B.iou(first.double(), first.double()).dtype == torch.float64


GOOD = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
BAD = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0], [3.0, 0.0, 1.0, 5.0]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: B.iou_matrix(GOOD, BAD),
            r"iou_matrix: box 1 is \(0, 0, 1, 0\), and 1 more[\s\S]*degenerate=",
        ),
        (lambda: B.iou(BAD[2:], GOOD), r"iou: box 0 is \(3, 0, 1, 5\)\n"),
        (lambda: B.iou_matrix(GOOD, BAD[None]), r"box \(0, 1\) is"),
        (lambda: B.encode_boxes(BAD, BAD), r"encode_boxes: box 1 is[\s\S]*valid_boxes"),
        (lambda: B.iou(GOOD * torch.nan, GOOD), r"box 0 is \(nan"),
        (lambda: B.iou(GOOD, BAD), r"iou of \(1, 4\) and \(3, 4\) boxes[\s\S]*use iou_matrix"),
        (lambda: B.iou_matrix(GOOD[0], GOOD), r"shapes \(4,\) and \(1, 4\)[\s\S]*box\[None\]"),
        (lambda: B.box_area(torch.zeros(3)), r"box_area of shape \(3,\)[\s\S]*\(…, 4\)[\s\S]*zeros\(0, 4\)"),
        (lambda: B.convert_boxes(GOOD, "corners", "center"), r"box format 'center'[\s\S]*'centre'"),
        (lambda: B.iou(GOOD, GOOD, degenerate="drop"), r"degenerate boxes 'drop'[\s\S]*refuse, zero"),
    ],
)
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.gpu
def test_on_the_gpu():
    first, second = some_boxes(30, torch.float32), some_boxes(30, torch.float32)
    for function in (B.iou_matrix, B.generalised_iou_matrix, B.iou, B.encode_boxes, B.decode_boxes):
        there = function(first.cuda(), second.cuda())
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), function(first, second), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="box 1 is"):
        B.iou_matrix(BAD.cuda(), BAD.cuda())
