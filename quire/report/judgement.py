"""The sections of a report that judge the predictions of one target."""

from __future__ import annotations

import numpy as np

from quire.report import classes, values
from quire.report.page import paragraph, picture, pictures, table
from quire.report.reading import Array, Predictions, Run, Target, read_predictions
from quire.report.style import inline, to_svg
from quire.report.summary import number, percent, wilson

MISTAKES = 20
_WIDE_MATRIX = 11


def judged_split(run: Run) -> str:
    """The split that the predictions are of."""
    rows = (run.result or {}).get("rows") or {}
    return "test" if rows.get("test") or "test" in run.measures else "validation"


def judgement(run: Run, target: Target) -> str:
    """Pictures and tables of one target, or nothing where the run has no predictions for it."""
    found = read_predictions(run, target)
    if found is None:
        return ""
    split = judged_split(run)
    if len(found) == 0:
        return paragraph(f"No row of the {split} split has both a truth and a prediction.")
    parts = [_classification(target, found, split)] if target.kind == "classification" else []
    parts += [_regression(target, found, split)] if target.kind != "classification" else []
    if found.left_out:
        note = f"{found.left_out:,} rows without a truth or with a prediction that is no number are left out."
        parts.append(paragraph(note, "soft"))
    return "".join(parts)


def _classification(target: Target, found: Predictions, split: str) -> str:
    matrix = classes.confusion(target, found)
    low, high = wilson(matrix.right, len(found))
    said = (
        f"{matrix.right:,} of {len(found):,} {split} rows right: {percent(matrix.right / len(found))} "
        f"(95 % interval {100 * low:.1f} to {percent(high)})."
    )
    shown, total = len(matrix.shown()), len(matrix.classes)
    caption = f"Rows of the {split} split by truth and prediction; per cent are of the truth's rows."
    if shown < total:
        caption += f" The {shown} most confused of {total} classes."
    fig = classes.confusion_figure(matrix, target.name)
    svg = inline(to_svg(fig), f"confusion {target.prefix}", f"Confusion matrix of {target.name}")
    blocks = [picture(svg, caption, shape="wide" if shown >= _WIDE_MATRIX else "tall")]
    bins = classes.reliability(found)
    if bins is not None:
        svg = inline(
            to_svg(classes.reliability_figure(bins, target.name)),
            f"reliability {target.prefix}",
            f"Reliability diagram of {target.name}",
        )
        text = f"Expected calibration error {number(bins.error)}: the mean gap between the two, over rows."
        blocks.append(picture(svg, text))
    parts = [paragraph(said), pictures(blocks)]
    pairs = matrix.pairs()
    if pairs:
        rows = [(truth, taken, f"{count:,}", percent(share)) for truth, taken, count, share in pairs]
        head = ["truth", "taken for", "rows", "share of truth"]
        parts += ["<h3>Most confused pairs</h3>\n", table(head, rows, numeric="ttnn")]
    return "".join(parts) + _class_mistakes(found, split)


def _class_mistakes(found: Predictions, split: str) -> str:
    places, are_mistakes = classes.worst_rows(found, MISTAKES)
    columns: list[tuple[str, str, Array]] = [
        ("row in source", "n", found.row),
        ("truth", "t", found.truth),
        ("prediction", "t", found.prediction),
    ]
    for title, column in (
        ("p(prediction)", found.probability),
        ("p(truth)", found.truth_probability),
        ("loss", found.loss),
    ):
        columns += [(title, "n", column)] if column is not None else []
    if are_mistakes:
        title = "Largest mistakes"
        note = f"The wrong answers of the {split} split with the highest loss; p is the probability given."
    else:
        places = places[:5]
        title, note = "Least sure answers", f"No mistake in the {split} split; these had the highest loss."
    return f"<h3>{title}</h3>\n" + paragraph(note, "soft") + _rows(columns, places)


def _regression(target: Target, found: Predictions, split: str) -> str:
    error = found.prediction - found.truth
    said = (
        f"{len(found):,} {split} rows: mean error {number(float(error.mean()))}, mean absolute error "
        f"{number(float(np.abs(error).mean()))}, root mean squared error "
        f"{number(float(np.sqrt((error**2).mean())))}."
    )
    caption = f"Rows of the {split} split."
    drawn = len(values.drawn_rows(found))
    if drawn < len(found):
        caption += f" {drawn:,} of {len(found):,} rows, evenly over the file."
    name = target.name
    svg = to_svg(values.scatter_figure(found, name))
    svg = inline(svg, f"scatter {target.prefix}", f"Prediction against truth of {name}")
    blocks = [picture(svg, caption, shape="tall")]
    spread = f"Mean {number(float(error.mean()))}, standard deviation {number(float(error.std()))}."
    svg = to_svg(values.residual_figure(found, name))
    blocks.append(picture(inline(svg, f"residuals {target.prefix}", f"Residuals of {name}"), spread))
    measured = values.coverage(found)
    if measured is not None:
        svg = to_svg(values.coverage_figure(measured, name))
        text = _coverage_text(measured)
        blocks.append(picture(inline(svg, f"coverage {target.prefix}", f"Coverage of {name}"), text))
    return paragraph(said) + pictures(blocks) + _value_mistakes(found, error, split)


def _coverage_text(measured: values.Coverage) -> str:
    low, high = wilson(measured.covered, measured.rows)
    text = (
        f"{measured.covered:,} of {measured.rows:,} truths lie within their interval: "
        f"{percent(measured.share)} (95 % interval {100 * low:.1f} to {percent(high)})"
    )
    if measured.level is None:
        return text + "; the nominal level is not recorded."
    verdict = "agrees with" if low <= measured.level <= high else "differs from"
    return f"{text}, which {verdict} the nominal {percent(measured.level)}."


def _value_mistakes(found: Predictions, error: Array, split: str) -> str:
    places = np.argsort(-np.abs(error), kind="stable")[:MISTAKES]
    columns: list[tuple[str, str, Array]] = [
        ("row in source", "n", found.row),
        ("truth", "n", found.truth),
        ("prediction", "n", found.prediction),
        ("error", "n", error),
    ]
    for title, column in (("low", found.low), ("high", found.high), ("loss", found.loss)):
        columns += [(title, "n", column)] if column is not None else []
    note = f"The rows of the {split} split with the largest absolute error (prediction − truth)."
    return "<h3>Largest mistakes</h3>\n" + paragraph(note, "soft") + _rows(columns, places)


def _rows(columns: list[tuple[str, str, Array]], places: Array) -> str:
    cells = ([_cell(column[place]) for _, _, column in columns] for place in places)
    return table([title for title, _, _ in columns], cells, numeric="".join(kind for _, kind, _ in columns))


def _cell(value: object) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and 1e-3 <= abs(value) < 1e4:
        # Trailing zeros are kept here, so that the numbers of a column line up.
        return f"{value:#.4g}".rstrip(".").replace("-", "−")
    return str(value) if isinstance(value, int) else number(value)
