"""What the doctor says as a page: the verdict in a sentence, the findings, then pictures of how activations
and gradients flow, of the curvature, and of the curves with the moments that were named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from quire.files import write_bytes
from quire.report.page import document, escape, facts, paragraph, picture, pictures, table
from quire.report.style import BLUE, GREEN, INK, OCHRE, VERMILION, figure, inline, plain, to_svg

Curve = Sequence[tuple[int, float]]
_COLOURS = {"error": VERMILION, "warning": OCHRE, "note": INK}
WIDE = 6.0
"""Inches from which on a picture takes the whole width of the page."""
_NAMES = 24
"""Layers whose names still fit under an axis."""


class Shown(NamedTuple):
    """A picture with its words."""

    title: str
    caption: str
    figure: Figure


class Flow(NamedTuple):
    """Sizes by layer, in the order in which layers are run through; NaN where there is none."""

    label: str
    names: Sequence[str]
    activations: Sequence[float]
    gradients: Sequence[float]


class Page(NamedTuple):
    title: str
    sentence: str
    good: bool
    findings: Sequence[Mapping[str, str]]
    """severity, what, where, evidence, fix, code."""
    pictures: Sequence[Shown]
    facts: Sequence[tuple[str, Any]]


def write(path: Path, page: Page) -> Path:
    write_bytes(path, build(page).encode("utf-8", errors="replace"))
    return path


def build(page: Page) -> str:
    kind, mark = ("good", "✓") if page.good else ("bad", "✗")
    words = f'<p><span class="verdict {kind}">{mark} {escape(page.sentence)}</span></p>\n'
    header = f"<header>\n<h1>{escape(page.title)}</h1>\n{words}</header>\n"
    blocks = [
        picture(
            inline(to_svg(shown.figure), f"doctor {number}", shown.title),
            f"{shown.title}. {shown.caption}.",
            shape="wide" if shown.figure.get_figwidth() > WIDE else "",
        )
        for number, shown in enumerate(page.pictures)
    ]
    sections = [
        ("findings", "Findings", findings_table(page.findings)),
        ("pictures", "Pictures", pictures(blocks)),
        ("facts", "Numbers", facts(page.facts)),
    ]
    return document(f"{page.title} · Quire doctor", header, [entry for entry in sections if entry[2]])


def findings_table(findings: Sequence[Mapping[str, str]]) -> str:
    if not findings:
        return paragraph("Nothing was found that would keep this model from learning.")
    names = ("severity", "what", "where", "evidence", "fix", "code")
    rows = [[finding[name] for name in names] for finding in findings]
    silence = "quire doctor … --silence CODE leaves a finding out."
    return table(["severity", "what", "where", "evidence", "what helps", "code"], rows) + paragraph(
        silence, "soft"
    )


def flow_figure(flows: Sequence[Flow], what: str = "activations") -> Figure | None:
    """Sizes of activations, or of gradients, by layer, a line for each flow."""
    if not flows or not flows[0].names:
        return None
    names = flows[0].names
    fig = figure(9.4, 3.6)
    axes = fig.subplots()
    drawn = False
    for flow, (colour, dashes) in zip(flows, ((BLUE, "--"), (VERMILION, "-"), (GREEN, ":")), strict=False):
        sizes = flow.activations if what == "activations" else flow.gradients
        values = [v if math.isfinite(v) and v > 0 else math.nan for v in sizes]
        if any(map(math.isfinite, values)):
            marker = "o" if len(values) <= 60 else ""
            axes.plot(range(len(values)), values, dashes, color=colour, marker=marker, ms=3, label=flow.label)
            drawn = True
    if not drawn:
        return None
    axes.set_yscale("log")
    title = "Activations" if what == "activations" else "Gradients of the loss by activation"
    axes.set_title(f"{title}, layer by layer", loc="left", fontsize=11)
    axes.set_ylabel("root mean square (log scale)")
    step = max(1, math.ceil(len(names) / _NAMES))
    places = range(0, len(names), step)
    axes.set_xticks(list(places))
    axes.set_xticklabels([plain(names[i], 22) for i in places], rotation=60, ha="right", fontsize=8)
    axes.set_xlabel("layer, in the order of the forward pass")
    axes.legend(fontsize=8.5)
    return fig


def units_figure(names: Sequence[str], dead: Sequence[float], saturated: Sequence[float]) -> Figure | None:
    """Share of dead and saturated units by layer."""
    known = [i for i in range(len(names)) if dead[i] >= 0 or saturated[i] >= 0]
    if not known:
        return None
    fig = figure(4.6, 2.9)
    axes = fig.subplots()
    for values, colour, label in ((dead, VERMILION, "dead"), (saturated, BLUE, "saturated")):
        heights = [100 * max(values[i], 0.0) for i in known]
        if any(values[i] >= 0 for i in known):
            axes.bar(range(len(known)), heights, color=colour, alpha=0.8, label=label)
    axes.set_ylim(0, 100)
    axes.set_title("Units that take no part", loc="left", fontsize=11)
    axes.set_ylabel("share of the units (%)")
    step = max(1, math.ceil(len(known) / 12))
    axes.set_xticks(list(range(0, len(known), step)))
    labels = [plain(names[known[i]], 16) for i in range(0, len(known), step)]
    axes.set_xticklabels(labels, rotation=60, ha="right", fontsize=8)
    axes.set_xlabel("layer")
    axes.legend(fontsize=8.5)
    return fig


def course_figure(
    train: Curve, validation: Curve, moments: Sequence[tuple[int, str, str]] = ()
) -> Figure | None:
    """The loss, and a line at each moment: step, severity, what was seen there."""
    curves = [("training", train, BLUE, "--"), ("validation", validation, VERMILION, "-")]
    known = [
        (label, [(s, v) for s, v in curve if math.isfinite(v)], colour, dashes)
        for label, curve, colour, dashes in curves
    ]
    known = [entry for entry in known if len(entry[1]) > 1]
    if not known:
        return None
    fig = figure(4.6, 2.9)
    axes = fig.subplots()
    for label, curve, colour, dashes in known:
        marker = "o" if len(curve) <= 30 else ""
        steps, values = zip(*curve, strict=True)
        axes.plot(steps, values, dashes, color=colour, marker=marker, ms=3, lw=1.6, label=label)
    for step, severity, what in moments:
        axes.axvline(step, color=_COLOURS.get(severity, INK), lw=1.2, ls=":", label=plain(what, 44))
    every = [v for _, curve, _, _ in known for _, v in curve]
    if min(every) > 0 and max(every) > 100 * min(every):
        axes.set_yscale("log")
    axes.set_title("Loss", loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss" + (" (log scale)" if axes.get_yscale() == "log" else ""))
    axes.legend(fontsize=8.5)
    return fig


def norms_figure(norms: Curve) -> Figure | None:
    values = [(step, value) for step, value in norms if math.isfinite(value) and value > 0]
    if len(values) < 2:
        return None
    fig = figure(4.6, 2.9)
    axes = fig.subplots()
    axes.plot(*zip(*values, strict=True), color=BLUE, marker="o" if len(values) <= 30 else "", ms=3)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="norm of the gradient (log scale)")
    axes.set_title("Size of the gradient", loc="left", fontsize=11)
    return fig


def density_figure(
    grid: Sequence[float], density: Sequence[float], largest: float, smallest: float
) -> Figure:
    """Spectral density of the Hessian."""
    fig = figure(4.6, 2.9)
    axes = fig.subplots()
    values = [max(value, 1e-12) for value in density]
    axes.fill_between(grid, 1e-12, values, color=BLUE, alpha=0.25)
    axes.plot(grid, values, color=BLUE)
    axes.axvline(largest, color=VERMILION, ls="--", lw=1.2, label=f"λmax = {largest:.3g}")
    axes.axvline(smallest, color=GREEN, ls="--", lw=1.2, label=f"λmin = {smallest:.3g}")
    axes.set_yscale("log")
    axes.set_ylim(1e-5 * max(values), 3 * max(values))
    axes.set_xlabel("eigenvalue λ of the Hessian")
    axes.set_ylabel("density (log scale)")
    axes.set_title("Curvature of the loss", loc="left", fontsize=11)
    axes.legend(fontsize=8.5)
    return fig
