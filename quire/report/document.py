"""From a run folder to its report: result first, then what explains it, then how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from quire.files import write_bytes, write_sums
from quire.report.curves import curve_figure, gaps
from quire.report.judgement import judgement
from quire.report.page import code, document, escape, facts, folded, paragraph, picture, pictures, table
from quire.report.pictures import recipe_pictures
from quire.report.reading import TRAINER_VALUES, Run, read_run, read_samples
from quire.report.style import inline, to_svg
from quire.report.summary import (
    SPLITS,
    duration,
    flatten,
    headline,
    number,
    option_text,
    percent,
    size,
    wording,
)

_LONG_TABLE = 40
_MANY_FEATURES = 40
_STOPPED = {
    "finished": "all steps done",
    "early": "stopped early: no further improvement",
    "converged": "converged",
    "interrupted": "interrupted before its end",
}


def write(run_folder: Path) -> Path:
    """Make ``report.html`` in a run folder from the files of that folder alone, and return its path."""
    run = read_run(run_folder)
    text = build(run)
    path = run.folder / "report.html"
    content = text.encode("utf-8", errors="replace")
    if run.result is not None:
        write_sums(run.folder, anew={path.name: content})
    else:
        write_bytes(path, content)
    return path


def build(run: Run) -> str:
    """The page as text."""
    sections = [
        ("measures", "Measures", _measures(run)),
        ("curves", "Curves", _curves(run)),
        *_targets(run),
        ("samples", "Samples", _samples(run)),
        ("pictures", "Pictures", pictures(recipe_pictures(run.folder))),
        ("model", "Model", _model(run)),
        ("cost", "Time and memory", _cost(run)),
        ("data", "Data", _data(run)),
        ("configuration", "Configuration", _configuration(run)),
        ("repeat", "Repeat this run", _repeat(run)),
    ]
    title = f"{run.folder.resolve().name} · Quire report"
    return document(title, _header(run), [entry for entry in sections if entry[2]])


def _header(run: Run) -> str:
    result = run.result or {}
    summary = str(result.get("summary") or "")
    name = f"{run.recipe}: {summary}" if summary else run.recipe
    several = len(run.targets) > 1
    main = headline(run)
    shown = [main] if main else []
    if several:
        each = (headline(run, target) for target in run.targets)
        shown += [entry for entry in each if entry is not None and entry not in shown]
    numbers = "".join(
        f"<div><b>{escape(number(entry.value))}</b>"
        f"<span>{escape(entry.split)} {escape(wording(entry.measure))}</span></div>"
        for entry in shown
    )
    parts = [f"<h1>{escape(name)}</h1>\n", f'<div class="results">{numbers}</div>\n' if numbers else ""]
    expected = result.get("expected") or {}
    if expected.get("text"):
        kind, verdict = ("", "expected on the built-in data")
        if expected.get("met") is not None:
            kind, verdict = ("good", "✓ as expected") if expected["met"] else ("bad", "✗ not as expected")
        words = f"{verdict}: {expected['text']}"
        parts.append(f'<p><span class="verdict {kind}">{escape(words)}</span></p>\n')
    parts += [paragraph(" · ".join(_at_a_glance(run)), "soft"), _warnings(run)]
    return "<header>\n" + "".join(parts) + "</header>\n"


def _at_a_glance(run: Run) -> Iterator[str]:
    result = run.result
    if result is None:
        return
    if result.get("seconds") is not None:
        yield f"{duration(result['seconds'])} on {result.get('device', 'an unknown device')}"
    if result.get("parameters") is not None:
        yield f"{number(result['parameters'])} parameters"
    if result.get("epochs") is not None:
        yield f"{number(result['epochs'])} epochs, {number(result.get('steps'))} steps"
    elif result.get("steps") is not None:
        yield f"{number(result['steps'])} sweeps"
    yield _STOPPED.get(str(result.get("stopped")), str(result.get("stopped", "")))


def _warnings(run: Run) -> str:
    notes = []
    if run.result is None:
        notes.append("This run is unfinished: it has no result yet. " + _recorded(run))
    elif run.result.get("stopped") == "interrupted":
        notes.append("This run was interrupted before its end; its result is that of the weights so far.")
    if run.cut_off:
        notes.append("The last line of metrics.jsonl was cut off and is left out.")
    notes += [f"{wording(m)}: {gap}" for m, splits in run.curves.items() if (gap := gaps(splits))]
    notes += [str(text) for text in (run.result or {}).get("warnings") or []]
    items = "".join(f"<li>{escape(text)}</li>\n" for text in notes)
    return f'<ul class="warnings" aria-label="Warnings">\n{items}</ul>\n' if items else ""


def _recorded(run: Run) -> str:
    if not run.curves:
        return "It has recorded no measures either; shown is its configuration."
    return (
        f"Shown is what it recorded up to step {run.last_step:,} (epoch {number(run.last_epoch)}); "
        "the numbers above are its last, not a test result."
    )


def _measures(run: Run) -> str:
    splits = [split for split in reversed(SPLITS) if run.measures.get(split)]
    names = list(dict.fromkeys(name for split in splits for name in run.measures[split]))
    rows = [
        [wording(name), *(number(run.measures[split].get(name)) for split in splits)]
        for name in sorted(names, key=lambda name: (name.rpartition(".")[0], name == "loss"))
    ]
    return table(["measure", *splits], rows, numeric="t" + "n" * len(splits)) if rows else ""


def _curves(run: Run) -> str:
    best = (run.result or {}).get("best_step")
    # Loss first, the trainer's own values last.
    order = sorted(run.curves, key=lambda name: (name in TRAINER_VALUES, name.rpartition(".")[2] != "loss"))
    blocks = []
    for measure in order:
        fig = curve_figure(measure, run.curves[measure], best if isinstance(best, int) else None)
        if fig is not None:
            name = wording(measure)
            blocks.append(picture(inline(to_svg(fig), f"curve {measure}", f"{name} over the steps")))
    return pictures(blocks)


def _targets(run: Run) -> Iterator[tuple[str, str, str]]:
    targets = run.targets
    for index, target in enumerate(targets, start=1):
        title = "Predictions" if len(targets) == 1 else f"Target: {target.name}"
        yield f"target-{index}", title, judgement(run, target)


def _samples(run: Run) -> str:
    """Texts that the model made."""
    return "".join(f"<h3>{escape(name)}</h3>\n{code(text)}" for name, text in read_samples(run))


def _model(run: Run) -> str:
    result = run.result or {}
    layers = result.get("layers") or []
    rows = [
        (
            layer.get("name", ""),
            layer.get("kind", ""),
            " × ".join(str(n) for n in layer.get("output_shape") or []) or "–",
            number(layer.get("parameters")),
        )
        for layer in layers
    ]
    if not rows:
        total = result.get("parameters")
        return paragraph(f"{number(total)} parameters.") if total is not None else ""
    rows.append(("total", "", "", number(result.get("parameters"))))
    listing = table(["layer", "kind", "output shape", "parameters"], rows, numeric="tttn", foot=True)
    if len(layers) <= _LONG_TABLE:
        return listing
    text = f"{len(layers):,} layers, {number(result.get('parameters'))} parameters"
    return folded(text, listing)


def _cost(run: Run) -> str:
    result = run.result
    if result is None:
        return ""
    names = ("steps", "epochs", "best_step") if result.get("epochs") is not None else ("steps",)
    steps = [
        ("sweeps" if len(names) == 1 else name.replace("_", " "), number(result.get(name))) for name in names
    ]
    pairs = [
        ("training time", duration(result.get("seconds"))),
        ("samples per second", number(result.get("samples_per_second"))),
        ("peak memory", size(result.get("peak_memory_bytes"))),
        ("device", result.get("device", "–")),
        ("threads", number(result.get("threads"))),
        *steps,
        ("end", _STOPPED.get(str(result.get("stopped")), str(result.get("stopped", "–")))),
    ]
    return facts(pairs)


def _data(run: Run) -> str:
    result = run.result or {}
    parts = [paragraph(f"Source: {result['data']}") if result.get("data") else ""]
    rows: Mapping[str, int] = {split: n for split, n in (result.get("rows") or {}).items() if n}
    total = sum(rows.values())
    if total:
        lines = [(split, f"{n:,}", percent(n / total)) for split, n in rows.items()]
        lines.append(("total", f"{total:,}", ""))
        parts.append(table(["split", "rows", "share"], lines, numeric="tnn", foot=True))
    targets = [(t.name, t.kind, len(t.classes) or "–", _first(t.classes)) for t in run.targets]
    if targets:
        parts.append(table(["target", "kind", "classes", ""], targets, numeric="ttn"))
    features = [str(name) for name in result.get("features") or []]
    if features:
        listing = paragraph(", ".join(features))
        parts.append(folded(f"{len(features):,} features", listing, opened=len(features) <= _MANY_FEATURES))
    return "".join(parts)


def _first(classes: tuple[str, ...], limit: int = 12) -> str:
    more = f" and {len(classes) - limit:,} more" if len(classes) > limit else ""
    return ", ".join(classes[:limit]) + more


def _configuration(run: Run) -> str:
    flat = flatten(run.config.get("options") or {})
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value in flat.items():
        group = name.partition(".")[0] if "." in name else ""
        groups.setdefault(group, []).append((name, option_text(value)))
    return "".join(facts(pairs) for _, pairs in sorted(groups.items()))


def _repeat(run: Run) -> str:
    command = run.config.get("command")
    parts = [code(str(command)) if command else ""]
    versions = [(str(name), version) for name, version in (run.config.get("versions") or {}).items()]
    if run.config.get("date"):
        versions.append(("date", run.config["date"]))
    return "".join(parts) + facts(versions)
