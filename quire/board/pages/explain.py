"""Explain: pick a model, see shapes, cost and receptive field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.board.markup import Markup, tag
from quire.board.pages.frame import facts, notice, page, section, table
from quire.errors import QuireError

START = "resnet18"
BATCH = 2
RUN = "runs/"
"""Before the name of a run, among names of models."""
RUNS = 30
"""To pick from, the newest; the page of any run leads to its own explanation."""


def explain_page(
    models: Mapping[str, Sequence[str]],
    runs: Sequence[str],
    model: str,
    input: str,
    batch: int,
    found: Mapping[str, Any] | QuireError,
) -> str:
    chosen = [model.removeprefix(RUN)] if model.startswith(RUN) else []
    names = {
        "Networks": {name: name for name in models["networks"]},
        "Families": {name: name for name in models["families"]},
        "Your runs": {name: f"{RUN}{name}" for name in dict.fromkeys([*chosen, *runs])},
    }
    groups = [
        tag(
            "optgroup",
            [tag("option", name, value=value, selected=value == model) for name, value in group.items()],
            label=label,
        )
        for label, group in names.items()
        if group
    ]
    form = tag(
        "form",
        tag("div", tag("label", "Model", for_="model"), tag("select", groups, id="model", name="model")),
        tag("div", tag("label", "One sample, such as 3,224,224 (empty: the model’s own)", for_="input"),
            tag("input", id="input", name="input", value=input, maxlength="80", autocomplete="off")),
        tag("div", tag("label", "Samples in a step", for_="batch"),
            tag("input", id="batch", name="batch", type="number", min="1", max="1024", value=batch)),
        tag("button", "Explain"),
        method="get", action="/explain", class_="fields",
    )  # fmt: skip
    content = problem(found) if isinstance(found, QuireError) else outcome(found)
    return page("Explain", form, content, place="explain", scripts=("explain",))


def problem(error: QuireError) -> Markup:
    words = " ".join(
        filter(None, [f"{error.got}.", error.expected and f"Expected: {error.expected}.", error.fix])
    )
    return notice(words, kind="bad")


def outcome(found: Mapping[str, Any]) -> list[Markup]:
    numbers = "ttt" + "n" * (len(found["columns"]) - 3)
    layers = found["layers"]
    bars = [
        tag("figure", tag("figcaption", title), class_="chart", data_bars=key, data_unit=unit)
        for title, key, unit in (
            ("Work of a step by layer", "flops", "FLOPs"),
            ("Parameters by layer", "parameters", "parameters"),
            ("Activations kept by layer", "activations", "bytes"),
            ("Receptive field by layer", "field", "pixels"),
        )
        if any(layer[key] for layer in layers)
    ]  # fmt: skip
    names = ("name", "flops", "parameters", "activations", "field")
    data = [{f"data_{name}": layer[name] for name in names} for layer in layers]
    return [
        section("In all", tag("p", "Input: ", ", ".join(found["input"])), facts(found["totals"]),
                [notice(note) for note in found["notes"]], anchor="totals"),
        section("Pictures", tag("div", bars, class_="pictures"),
                tag("ol", [tag("li", **each) for each in data], id="layers", hidden=True), anchor="pictures"),
        section("By layer", table("Costs by layer", found["columns"], found["rows"], numeric=numbers),
                anchor="layers-table"),
    ]  # fmt: skip
