"""Numbers behind the pictures, against scikit-learn, SciPy, explicit loops and cases solved by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix

from quire.report import classes, values
from quire.report.curves import curve_figure, thin, wide_range
from quire.report.reading import Curve, Predictions, Target
from quire.report.summary import duration, flatten, number, option_text, size, wilson, wording
from tests.report import folders


def classified(names: list[str], rows: int) -> Predictions:
    columns = folders.class_columns(names, rows, wrong=0.3)
    texts = {name: np.array(columns[name], dtype=object) for name in ("truth", "prediction")}
    numbers = {name: columns[name] for name in ("row", "loss", "probability", "truth_probability")}
    return Predictions(**texts, **numbers)


def test_confusion_equals_scikit_learns() -> None:
    names = ["c", "a", "b", "never seen"]
    found = classified(names[:3], 200)
    matrix = classes.confusion(Target("t", "classification", tuple(names)), found)
    np.testing.assert_array_equal(
        matrix.counts, confusion_matrix(list(found.truth), list(found.prediction), labels=names)
    )
    assert matrix.right == (found.truth == found.prediction).sum()


def test_a_class_that_the_target_does_not_name_comes_last() -> None:
    found = Predictions(
        np.array([1, 2]), np.array(["a", "x"], dtype=object), np.array(["a", "a"], dtype=object)
    )
    matrix = classes.confusion(Target("t", "classification", ("a", "b")), found)
    assert matrix.classes == ("a", "b", "x")
    assert matrix.counts.tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]


def test_most_confused_pairs_by_hand() -> None:
    matrix = classes.Confusion(("a", "b", "c"), np.array([[8, 2, 0], [5, 5, 0], [1, 0, 9]]))
    assert matrix.pairs() == [("b", "a", 5, 0.5), ("a", "b", 2, 0.2), ("c", "a", 1, 0.1)]


def test_of_many_classes_the_most_confused_are_shown() -> None:
    counts = np.eye(100, dtype=int) * 50
    counts[70, 3] = 9
    counts[12, 88] = 7
    matrix = classes.Confusion(tuple(map(str, range(100))), counts)
    assert matrix.shown() == [3, 12, 70, 88]
    rng = np.random.default_rng(0)
    crowded = classes.Confusion(matrix.classes, rng.integers(0, 9, (100, 100)))
    assert 2 <= len(crowded.shown()) <= classes.MOST_CONFUSED
    perfect = classes.Confusion(matrix.classes, np.diag(np.arange(100)))
    assert perfect.shown() == [98, 99]


def test_reliability_by_an_explicit_loop() -> None:
    found = classified(["a", "b", "c"], 300)
    assert found.probability is not None
    bins = classes.reliability(found)
    assert bins is not None
    error = 0.0
    for place in range(10):
        chosen = [i for i in range(300) if min(int(found.probability[i] * 10), 9) == place]
        assert bins.rows[place] == len(chosen)
        if chosen:
            right = sum(found.truth[i] == found.prediction[i] for i in chosen) / len(chosen)
            claimed = sum(found.probability[i] for i in chosen) / len(chosen)
            error += len(chosen) / 300 * abs(right - claimed)
    assert bins.error == pytest.approx(error, rel=1e-12)


def test_reliability_of_a_certain_and_right_classifier_is_perfect() -> None:
    names = np.array(["a", "b"], dtype=object)
    bins = classes.reliability(Predictions(np.array([1, 2]), names, names, probability=np.ones(2)))
    assert bins is not None
    assert bins.error == 0
    assert bins.rows.tolist() == [0] * 9 + [2]


def test_worst_rows_are_wrong_ones_by_loss() -> None:
    truth = np.array(["a", "a", "b", "b"], dtype=object)
    prediction = np.array(["a", "b", "a", "a"], dtype=object)
    found = Predictions(np.arange(4), truth, prediction, loss=np.array([9.0, 1.0, 3.0, np.nan]))
    places, are_mistakes = classes.worst_rows(found, 10)
    assert (places.tolist(), are_mistakes) == ([3, 2, 1], True)
    places, are_mistakes = classes.worst_rows(Predictions(np.arange(4), truth, truth, loss=found.loss), 2)
    assert (places.tolist(), are_mistakes) == ([3, 0], False)


def test_wilson_equals_scipys() -> None:
    for hits, total in [(0, 5), (3, 7), (90, 100), (20, 20), (1, 1)]:
        interval = binomtest(hits, total).proportion_ci(0.95, method="wilson")
        assert wilson(hits, total) == pytest.approx((interval.low, interval.high), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_coverage_by_an_explicit_loop() -> None:
    columns = folders.value_columns(230)
    found = Predictions(**columns, level=0.9)
    measured = values.coverage(found)
    assert measured is not None
    inside = [columns["low"][i] <= columns["truth"][i] <= columns["high"][i] for i in range(230)]
    assert (measured.covered, measured.rows) == (sum(inside), 230)
    order = sorted(range(230), key=lambda i: columns["prediction"][i])
    groups = [sum(inside[i] for i in order[start : start + 46]) for start in range(0, 230, 46)]
    assert measured.group_covered.tolist() == groups
    assert measured.group_rows.tolist() == [46] * 5
    assert values.coverage(Predictions(np.arange(2), np.ones(2), np.ones(2))) is None


def test_short_names_stay_different() -> None:
    assert classes.short_names(["ash", "oak"]) == ["ash", "oak"]
    family = [f"species {i:03d} of the genus" for i in (15, 16, 91)]
    assert classes.short_names(family) == ["…015…", "…016…", "…091…"]
    stubborn = ["x" * 20 + letter + "y" * 20 for letter in "ab"]
    assert len(set(classes.short_names(stubborn))) == 2


def test_thin_averages_neighbours() -> None:
    curve = thin(Curve(np.arange(10), np.arange(10.0) ** 2), points=5)
    assert curve.steps.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert curve.values.tolist() == [0.5, 6.5, 20.5, 42.5, 72.5]
    short = Curve(np.arange(3), np.arange(3.0))
    assert thin(short, points=5) is short


@pytest.mark.parametrize(
    ("entries", "is_wide"),
    [
        ([1.0, 99.0], False),
        ([1.0, 101.0], True),
        ([-1.0, 1000.0], False),
        ([0.0, 1000.0], False),
        ([np.nan, 5.0], False),
        ([1e-280, 1e280], True),
    ],
)
def test_log_scale_for_more_than_two_decades(entries: list[float], is_wide: bool) -> None:
    curve = Curve(np.arange(2), np.array(entries))
    assert wide_range(curve.values) == is_wide
    fig = curve_figure("loss", {"train": curve}, None)
    assert fig is not None
    assert fig.axes[0].get_yscale() == ("log" if is_wide else "linear")


@pytest.mark.parametrize("measure", ["r2", "species.accuracy", "map50"])
def test_what_is_read_by_its_distance_from_one_has_no_log_scale(measure: str) -> None:
    curve = Curve(np.arange(1, 4), np.array([0.001, 0.5, 0.9]))
    fig = curve_figure(measure, {"train": curve}, None)
    assert fig is not None
    assert fig.axes[0].get_yscale() == "linear"
    ticks = fig.axes[0].get_xticks()
    assert np.array_equal(ticks, ticks.round()), "there is no half of a step"


def test_the_best_step_is_marked_where_validation_stood() -> None:
    splits = {
        "train": Curve(np.array([10, 20]), np.array([1.0, 0.5])),
        "validation": Curve(np.array([10, 20]), np.array([0.9, 0.8])),
    }
    fig = curve_figure("loss", splits, 10)
    assert fig is not None
    star = next(line for line in fig.axes[0].lines if line.get_marker() == "*")
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([10], [0.9])
    assert curve_figure("loss", {"train": Curve(np.array([1]), np.array([np.nan]))}, 1) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.97777, "0.9778"),
        (12, "12"),
        (9610, "9,610"),
        (0.0, "0"),
        (-0.5, "−0.5"),
        (12345.67, "12,345.7"),
        (2.5e-7, "2.500e-07"),
        (-2.5e-7, "−2.500e-07"),
        (float("nan"), "not a number"),
        (float("-inf"), "−∞"),
        (None, "–"),
    ],
)
def test_numbers(value: object, text: str) -> None:
    assert number(value) == text


def test_units() -> None:
    assert [duration(s) for s in (0.0123, 59.94, 60, 3599.7, 7384)] == [
        *("0.0123 s", "59.9 s", "1 min 00 s", "1 h 00 min", "2 h 03 min"),
    ]
    assert [size(b) for b in (12, 2048, 312 * 2**20, 5 * 2**30)] == ["12 bytes", "2 KiB", "312 MiB", "5 GiB"]
    words = {"gradient_norm": "gradient norm", "a.b.r2": "a.b: R²", "lr": "learning rate"}
    assert {measure: wording(measure) for measure in words} == words


def test_options_are_flattened_and_written_as_in_the_file() -> None:
    assert flatten({"a": 1, "b": {"c": [1, 2], "d": {"e": True}}}) == {"a": 1, "b.c": [1, 2], "b.d.e": True}
    written = ["true", "1, 2", "(none)", "(empty)", "0.1"]
    assert [option_text(value) for value in (True, [1, 2], [], "", 0.1)] == written
