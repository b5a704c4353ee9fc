"""One run: its curves while they grow, its result, its samples, what the doctor says, its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from quire.board.markup import Markup, address, tag
from quire.board.pages.charts import charts
from quire.board.pages.explain import RUN
from quire.board.pages.frame import facts, page, section, state, table, value_of
from quire.board.runs import Summary
from quire.report.reading import Run
from quire.report.summary import SPLITS, duration, flatten, number, option_text, wording


def run_page(
    run: Run,
    summary: Summary,
    texts: Sequence[tuple[str, str]],
    figures: Sequence[tuple[str, str, str]],
    has: Sequence[str],
) -> str:
    """`texts` are samples, title and text; `figures` are file, title and caption; `has` says which of report
    and doctor lie in the folder."""
    name = summary.name
    links = []
    if "report" in has:
        links.append(tag("a", "Report", href=address("runs", name, "report")))
    links.append(tag("a", "What its model costs", href=f"/explain?{urlencode({'model': f'{RUN}{name}'})}"))
    links.append(tag("a", "Compare with others", href=f"/?{urlencode({'words': run.recipe})}"))
    parts = [
        tag(
            "p",
            tag("span", state(summary.state), id="state", role="status"),
            " · ",
            run.recipe,
            " · ",
            summary.when,
        ),
        tag("p", value_of(summary.main), id="value", class_="big"),
        tag("p", links, class_="links"),
        warnings(run),
        section("Curves", charts([name], list(run.curves)), anchor="curves"),
        section("Results", results(run), anchor="results"),
        doctor(name, "doctor" in has),
        samples(name, texts, figures),
        section("Configuration", configuration(run), anchor="configuration"),
    ]
    return page(name, parts, place="runs", scripts=("curves", "doctor"))


def warnings(run: Run) -> Markup | None:
    notes = [str(text) for text in (run.result or {}).get("warnings") or []]
    expected = (run.result or {}).get("expected") or {}
    if expected.get("met") is False:
        notes.insert(0, f"Not as expected on the built-in data: {expected.get('text', '')}")
    return (
        tag("ul", [tag("li", note) for note in notes], class_="warnings", aria_label="Warnings")
        if notes
        else None
    )


def results(run: Run) -> Any:
    splits = [split for split in reversed(SPLITS) if run.measures.get(split)]
    names = list(dict.fromkeys(measure for split in splits for measure in run.measures[split]))
    result = run.result or {}
    parts: list[Any] = []
    if names:
        rows = [
            [wording(name), *(number(run.measures[split].get(name)) for split in splits)] for name in names
        ]
        what = "Measures by split" if run.result else "Last recorded measures by split"
        parts.append(table(what, ["measure", *splits], rows, numeric="t" + "n" * len(splits)))
    else:
        parts.append(tag("p", "Nothing has been recorded yet.", class_="soft"))
    known = [
        ("time", duration(result.get("seconds"))), ("parameters", number(result.get("parameters"))),
        ("device", result.get("device", "–")), ("steps", number(run.last_step)),
        ("epochs", number(run.last_epoch)), ("data", result.get("data", "–")),
    ]  # fmt: skip
    return [*parts, facts(known)]


def doctor(name: str, has_page: bool) -> Markup:
    kept = tag("p", tag("a", "The doctor's page", href=address("runs", name, "doctor"))) if has_page else None
    ask = tag("button", "Ask the doctor", type="button", data_run=name, id="ask")
    return section(
        "Doctor",
        tag(
            "p",
            "Looks at the records, the network and the data of this run; it takes some seconds.",
            class_="soft",
        ),
        tag("div", ask, class_="tools"),
        tag("div", id="verdict", role="status"),
        kept,
        anchor="doctor",
    )


def samples(
    name: str, texts: Sequence[tuple[str, str]], figures: Sequence[tuple[str, str, str]]
) -> Markup | None:
    made = [[tag("h3", title), tag("pre", tag("code", text))] for title, text in texts]
    pictures = [
        tag(
            "figure",
            tag("img", src=address("runs", name, "figures", file), alt=title, loading="lazy"),
            tag("figcaption", f"{title}. {caption}" if caption else title),
        )
        for file, title, caption in figures
    ]
    if not made and not pictures:
        return None
    return section("Samples and pictures", made, tag("div", pictures, class_="pictures"), anchor="samples")


def configuration(run: Run) -> Any:
    command = run.config.get("command")
    options = flatten(run.config.get("options") or {})
    versions = run.config.get("versions") or {}
    return [
        tag("pre", tag("code", command)) if command else None,
        facts((option, option_text(value)) for option, value in sorted(options.items())),
        facts((name, value) for name, value in versions.items()) if isinstance(versions, dict) else None,
    ]
