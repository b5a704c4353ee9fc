from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import sklearn.metrics as peer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InputError
from quire.functional import measures as M

CLASSES = 5
pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(pairs)
def test_classification_equals_scikit_learn(samples):
    prediction, target = torch.tensor(samples).T
    labels = list(range(CLASSES))
    expected = peer.confusion_matrix(target, prediction, labels=labels)
    assert M.confusion_matrix(prediction, target, CLASSES).tolist() == expected.tolist()
    assert M.accuracy(prediction, target).item() == pytest.approx(peer.accuracy_score(target, prediction))
    for ours, theirs in (
        (M.precision, peer.precision_score),
        (M.recall, peer.recall_score),
        (M.f1, peer.f1_score),
    ):
        for average in ("macro", "weighted"):
            value = theirs(target, prediction, average=average, zero_division=0)
            assert ours(prediction, target, CLASSES, average=average).item() == pytest.approx(value)
        each = theirs(target, prediction, average=None, labels=labels, zero_division=0)
        np.testing.assert_allclose(ours(prediction, target, CLASSES, average="none"), each)


@settings(deadline=None, max_examples=60)
@given(pairs)
def test_both_forms_of_f1_agree(samples):
    prediction, target = torch.tensor(samples).T
    matrix = M.confusion_matrix(prediction, target, CLASSES)
    precision = M.precision_from_confusion(matrix, "none")
    recall = M.recall_from_confusion(matrix, "none")
    counted = M.f1_from_counts(*M.class_counts(matrix))
    torch.testing.assert_close(M.f1_from_precision_recall(precision, recall), counted)


def test_solved_by_hand():
    #                             truth: two of class 0, three of class 1
    prediction, target = torch.tensor([0, 1, 1, 1, 0]), torch.tensor([0, 0, 1, 1, 1])
    matrix = M.confusion_matrix(prediction, target, 2)
    assert matrix.tolist() == [[1, 1], [1, 2]]
    measures = M.measures_from_confusion(matrix)
    assert measures["accuracy"] == pytest.approx(3 / 5)
    assert measures["precision"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert measures["recall"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert measures["f1"] == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_matrices_of_batches_add_up_and_ignored_targets_stay_out():
    prediction, target = torch.randint(0, 4, (2, 100))
    whole = M.confusion_matrix(prediction, target, 4)
    parts = zip(prediction.split(30), target.split(30), strict=True)
    assert torch.equal(sum(M.confusion_matrix(p, t, 4) for p, t in parts), whole)
    ignored = torch.where(torch.arange(100) < 20, -100, target)
    expected = M.confusion_matrix(prediction[20:], target[20:], 4)
    assert torch.equal(M.confusion_matrix(prediction, ignored, 4, ignore_index=-100), expected)


def test_nothing_to_count_is_zero():
    empty = torch.zeros(0, dtype=torch.long)
    assert M.accuracy(empty, empty) == 0
    assert set(M.measures_from_confusion(M.confusion_matrix(empty, empty, 3)).values()) == {0.0}
    assert M.f1_from_counts(*torch.zeros(3, 1)) == 0
    sums = M.regression_sums(torch.zeros(0), torch.zeros(0))
    assert all(math.isfinite(value) for value in M.measures_from_sums(sums).values())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_curve_and_area_equal_scikit_learn(samples):
    scores = torch.tensor([score / 4 for score, _ in samples], dtype=torch.float64)
    target = torch.tensor([int(positive) for _, positive in samples])
    precision, recall, thresholds = M.precision_recall_curve(scores, target)
    if target.sum():
        expected = peer.precision_recall_curve(target, scores)
        for ours, theirs in zip((precision, recall, thresholds), expected, strict=True):
            np.testing.assert_allclose(ours, theirs)
        area = peer.average_precision_score(target, scores)
        assert M.average_precision(scores, target).item() == pytest.approx(area)
    else:  # nothing to find: recall has no denominator, and is 0 here
        assert (recall == 0).all()
        assert M.average_precision(scores, target) == 0


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_regression_equals_scikit_learn(shape):
    target = torch.randn(*shape) * 3 + 7
    prediction = target + torch.randn(*shape)
    expected = {
        "mse": peer.mean_squared_error(target.double(), prediction.double()),
        "rmse": peer.root_mean_squared_error(target.double(), prediction.double()),
        "mae": peer.mean_absolute_error(target.double(), prediction.double()),
        "r2": peer.r2_score(target.double(), prediction.double()),
    }
    direct = {
        "mse": M.mean_squared_error, "rmse": M.root_mean_squared_error,
        "mae": M.mean_absolute_error, "r2": M.r2_score,
    }  # fmt: skip
    parts = [M.regression_sums(p, t) for p, t in zip(prediction.split(7), target.split(7), strict=True)]
    added = {name: sum(part[name] for part in parts) for name in parts[0]}
    from_sums = M.measures_from_sums(added)
    for name, value in expected.items():
        assert direct[name](prediction, target).item() == pytest.approx(value, rel=1e-10)
        assert from_sums[name] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 / 3])
@pytest.mark.parametrize(("off", "expected"), [(0.0, 1.0), (0.5, 0.0)])
def test_r2_of_a_constant_target(constant, off, expected):
    target = torch.full((1000,), constant, dtype=torch.float64)
    assert M.r2_score(target + off, target) == expected
    assert M.measures_from_sums(M.regression_sums(target + off, target))["r2"] == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert peer.r2_score(np.full(4, 2.0), np.full(4, 2.0 + off)) == expected


def test_a_small_spread_about_a_large_mean_is_still_a_spread():
    target = 1e5 + torch.randn(1000, dtype=torch.float64)
    prediction = target + torch.randn(1000, dtype=torch.float64) / 2
    expected = peer.r2_score(target, prediction)
    assert M.r2_score(prediction, target).item() == pytest.approx(expected, rel=1e-9)
    from_sums = M.measures_from_sums(M.regression_sums(prediction, target))
    assert from_sums["r2"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_predictions_are_summed_exactly(dtype):
    target = torch.ones(5000, dtype=dtype)
    assert M.mean_absolute_error(torch.zeros_like(target), target) == 1  # bfloat16 would stop at 256
    assert M.regression_sums(torch.zeros_like(target), target)["absolute_errors"] == 5000


def test_interval_coverage():
    low, high = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([1.0, 2.0, 2.0])
    assert M.interval_coverage(low, high, torch.tensor([1.0, 3.0, 1.5])).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: M.confusion_matrix(torch.tensor([0, 4]), torch.tensor([0, 1]), 3),
            r"from 0 to 4[\s\S]*from 0 to 2[\s\S]*number them from 0",
        ),
        (lambda: M.confusion_matrix(torch.tensor([0]), torch.tensor([-1]), 3), r"from -1 to 0"),
        (lambda: M.accuracy(torch.zeros(2), torch.zeros(3)), r"accuracy of shapes \(2,\) and \(3,\)"),
        (
            lambda: M.f1(torch.tensor([0]), torch.tensor([0]), 2, average="micros"),
            r"unknown average 'micros'[\s\S]*macro",
        ),
        (
            lambda: M.precision_recall_curve(torch.zeros(2, 2), torch.zeros(2, 2)),
            r"shape \(2, 2\)[\s\S]*a vector",
        ),
        (
            lambda: M.average_precision(torch.zeros(2), torch.tensor([1, 2])),
            r"other than 0 and 1[\s\S]*target == k",
        ),
        (
            lambda: M.average_precision(torch.tensor([0.5, math.nan]), torch.tensor([1, 0])),
            r"1 scores that are not numbers[\s\S]*can be sorted",
        ),
        (
            lambda: M.precision(torch.tensor([0.7, 0.2]), torch.tensor([1, 0]), 2),
            r"with a fraction[\s\S]*class numbers[\s\S]*argmax",
        ),
        (lambda: M.f1(torch.tensor([math.nan]), torch.tensor([1]), 2), r"with a fraction, or of none"),
        (lambda: M.regression_sums(torch.tensor(1.0), torch.tensor(1.0)), r"single number"),
    ],
)
def test_messages(call, words):
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.gpu
def test_on_the_gpu():
    prediction, target = torch.randint(0, 4, (2, 100))
    matrix = M.confusion_matrix(prediction.cuda(), target.cuda(), 4)
    assert matrix.is_cuda
    assert torch.equal(matrix.cpu(), M.confusion_matrix(prediction, target, 4))
    scores = torch.randn(100)
    there = M.average_precision(scores.cuda(), (target == 1).long().cuda())
    torch.testing.assert_close(there.cpu(), M.average_precision(scores, (target == 1).long()))
