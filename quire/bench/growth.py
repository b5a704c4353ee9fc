"""How time and memory grow with size, as a picture beside the order that is expected."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.bench.case import MEGABYTE, Case, Growth, Place
from quire.bench.machine import describe
from quire.bench.measure import Say, growth_figures
from quire.bench.results import stem
from quire.bench.table import amount, seconds
from quire.files import canonical_json, write_files


@dataclass
class Grown:
    growth: Growth
    points: dict[str, list[dict[str, Any]]]

    def order(self, name: str, what: str) -> float | None:
        """d ln(time or memory)/d ln(size) over the larger half of the sizes, by least squares."""
        known = [(p["size"], p[what]) for p in self.points[name] if p[what]]
        known = known[len(known) // 2 :]
        if len(known) < 2:
            return None
        xs = [math.log(size) for size, _ in known]
        ys = [math.log(value) for _, value in known]
        x, y = sum(xs) / len(xs), sum(ys) / len(ys)
        below = sum((a - x) ** 2 for a in xs)
        return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / below

    def lines(self) -> Iterator[str]:
        yield self.growth.title
        for name, points in self.points.items():
            for point in points:
                extra = "" if point["bytes"] is None else f"  {amount(point['bytes']):>9} extra"
                taken = "unknown" if point["seconds"] is None else seconds(point["seconds"])
                yield f"  {name:18} {point['size']:>12,}  {taken:>9}{extra}"
            orders = [self.order(name, what) for what in ("seconds", "bytes")]
            shown = ["unknown" if order is None else f"{order:.2f}" for order in orders]
            yield (
                f"  {name:18} order of time {shown[0]} (expected {self.growth.order:g}), "
                f"of memory {shown[1]} (expected at most {self.growth.memory_order:g})"
            )


def measure(growth: Growth, place: Place, *, say: Say) -> Grown:
    def cases() -> Iterator[tuple[int, Case]]:
        for size in growth.sizes:
            try:
                yield size, growth.make(size)
            except (torch.OutOfMemoryError, MemoryError):
                return  # the inputs alone do not fit

    return Grown(growth, growth_figures(cases(), place, say=say))


def save_growth(folder: Path, name: str, device: torch.device, found: Grown) -> Path:
    path = folder / f"{stem(f'growth-{name}', device)}.png"
    picture = io.BytesIO()
    draw(found, describe(device).splitlines()[0]).savefig(picture, format="png", dpi=120, facecolor="white")
    grown = found.growth
    numbers = {
        "format": 1, "title": grown.title, "variable": grown.variable, "order": grown.order,
        "memory_order": grown.memory_order, "machine": describe(device), "points": found.points,
    }  # fmt: skip
    parts = {path.name: picture.getvalue(), path.with_suffix(".json").name: canonical_json(numbers)}
    write_files(folder, parts)
    return path


def draw(found: Grown, machine: str) -> Any:
    from quire.report.style import PALETTE, figure

    fig = figure(9.2, 3.6)
    left, right = fig.subplots(1, 2)
    for colour, (name, points) in zip(PALETTE, found.points.items(), strict=False):
        for axes, what, unit in ((left, "seconds", 1.0), (right, "bytes", MEGABYTE)):
            known = [(p["size"], p[what] / unit) for p in points if p[what]]
            if known:
                axes.plot(*zip(*known, strict=True), "o-", color=colour, label=name, markersize=4)
    own = next(iter(found.points.values()))
    _slope(left, own, "seconds", 1.0, found.growth.order)
    _slope(right, own, "bytes", MEGABYTE, found.growth.memory_order)
    left.set(title="Time", xlabel=found.growth.variable, ylabel="seconds", xscale="log", yscale="log")
    right.set(title="Extra memory", xlabel=found.growth.variable, ylabel="MiB", xscale="log", yscale="log")
    for axes in (left, right):
        axes.xaxis.set_minor_formatter("")  # within a decade, labels of its parts would overlap
    low, high = right.get_ylim()
    if high < 4 * low:  # memory that does not grow would be shown with all its bytes
        right.set_ylim(low / 4, high * 4)
    left.legend()
    fig.suptitle(f"{found.growth.title}\n{machine}", fontsize=9)
    return fig


def _slope(axes: Any, points: list[dict[str, Any]], what: str, unit: float, order: float) -> None:
    """A dashed line of the expected order through the last point."""
    known = [p for p in points if p[what]]
    if len(known) < 2:
        return
    last = known[-1]
    sizes = [p["size"] for p in known]
    values = [last[what] / unit * (size / last["size"]) ** order for size in sizes]
    axes.plot(sizes, values, "--", linewidth=1, color="#808790", label=f"order {order:g}")
