"""Outcomes as text, and as a table for people who decide."""

from __future__ import annotations

from typing import Any

from quire.bench.measure import Outcome


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:,.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def amount(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def text(outcome: Outcome) -> str:
    """A case: one line for each contestant, one for each bar."""
    lines = [outcome.title]
    own = next(iter(outcome.contestants.values()))
    width = max(map(len, outcome.contestants))
    for name, seen in outcome.contestants.items():
        if seen.absent:
            lines.append(f"  {name:{width}}  absent: {seen.absent}")
            continue
        parts = [f"{seconds(seen.seconds):>9}/{outcome.unit}"]
        if outcome.amount > 1 or seen.seconds < 1e-4:
            parts.append(f"{1 / seen.seconds:>13,.0f} {outcome.unit}s/s")
        if not own.absent:
            parts.append(f"{seen.seconds / own.seconds:6.2f} × Quire's time")
        parts.append(f"±{50 * seen.spread:.0f} %")
        if seen.bytes is not None:
            parts.append(f"{amount(seen.bytes):>9} extra")
        if outcome.limit is not None:
            parts.append(f"{100 * outcome.limit / seen.seconds:5.1f} % of the limit ({outcome.limited_by})")
        if seen.error is not None:
            parts.append(f"error {seen.error:.1e}")
        if seen.result is not None:
            parts.append(f"{outcome.result_name} {seen.result:.5g}")
        lines.append(f"  {name:{width}}  " + "  ".join(parts))
    lines += [f"  {bar_text(bar, outcome.unit)}" for bar in outcome.bars]
    return "\n".join(lines)


def bar_text(bar: dict[str, Any], unit: str) -> str:
    """ "time / torch 0.84, at most 1: met"."""
    what = f"{bar['of']} / {bar['rival']}'s" if bar["rival"] else str(bar["of"])
    side = "at most" if bar["at_most"] is not None else "at least"
    wanted = bar["at_most"] if bar["at_most"] is not None else bar["at_least"]
    verdict = {True: "met", False: "NOT MET", None: "not seen here"}[bar["met"]]
    found = "" if bar["found"] is None else f" {_show(bar, bar['found'], unit)},"
    return f"bar: {what}{found} {side} {_show(bar, wanted, unit)}: {verdict}"


def _show(bar: dict[str, Any], value: float, unit: str) -> str:
    if bar["rival"]:
        return f"{value:.3g}"
    if bar["of"] == "time":
        return seconds(value)
    if bar["of"] == "memory":
        return amount(value)
    if bar["of"] == "rate":
        return f"{value:,.0f} {unit}s/s"
    return f"{value:.4g}"


def markdown(outcomes: list[tuple[str, dict[str, Any]]]) -> str:
    """The table of README: (machine, outcome as plain data) of each case."""
    rows = ["| subject | machine | Quire | fastest beside it | ratio | extra memory | share of the limit |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for machine, found in outcomes:
        own, *others = found["contestants"]
        if own["absent"]:
            continue
        # Quire in another way is no peer.
        present = [other for other in others if not (other["absent"] or other["name"].startswith("quire"))]
        rival = min(present, key=lambda other: float(other["seconds"]), default=None)
        cells = [
            found["title"],
            machine,
            _speed(own["seconds"], found) + (own["name"][5:] if own["name"].startswith("quire,") else ""),
            f"{rival['name']}: {_speed(rival['seconds'], found)}" if rival else "",
            f"{rival['seconds'] / own['seconds']:.2g} ×" if rival else "",
            amount(own["bytes"]) if own["bytes"] is not None else "",
            f"{100 * found['limit'] / own['seconds']:.0f} %" if found["limit"] else "",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _speed(value: float, found: dict[str, Any]) -> str:
    if found["unit"] in ("token", "image", "row"):
        return f"{1 / value:,.0f} {found['unit']}s/s"
    each = "" if found["unit"] in ("call", "run") else f" per {found['unit']}"
    return seconds(value) + each
