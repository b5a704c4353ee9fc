"""What the worker can be asked for: a closed list, each answer of plain numbers, texts and lists."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.board import explain, instruments
from quire.registry import Registry
from quire.report.style import to_svg
from quire.sheet.registry import ENTRIES, Entry, locate

CALLS: Registry[Callable[..., Any]] = Registry("call")


def answer(call: str, given: Mapping[str, Any]) -> Any:
    return CALLS[call](**given)


@CALLS.register("sheet")
@functools.cache
def sheet() -> list[dict[str, Any]]:
    """Every entry, in the sheet's order."""
    import quire.sheet  # noqa: F401  registers every entry

    return [_described(entry) for _, entry in ENTRIES.items()]


def _described(entry: Entry) -> dict[str, Any]:
    words = (sys.modules[entry.proof.__module__].__doc__ or "").strip().splitlines()
    return {
        "id": entry.id,
        "chapter": entry.chapter,
        "about": words[0] if words else "",
        "title": entry.title,
        "latex": entry.latex,
        "erratum": entry.erratum,
        "tolerance": entry.tolerance,
        "picture": entry.picture is not None,
    }


@CALLS.register("chapter")
def chapter(name: str) -> list[dict[str, Any]]:
    """The entries of a chapter, with the source of their code and of their proof."""
    return [
        {
            **described,
            "code": [
                {"place": locate(item), "source": source_of(item)} for item in ENTRIES[described["id"]].code
            ],
            "proof": source_of(ENTRIES[described["id"]].proof),
        }
        for described in sheet()
        if described["chapter"] == name
    ]


def source_of(item: Any) -> str:
    try:
        return inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(item)))
    except (TypeError, OSError):
        return ""  # written in C


@CALLS.register("proof")
def proof(id: str) -> dict[str, Any]:
    import quire.sheet  # noqa: F401

    verdict = ENTRIES[id].verify()
    return {
        "id": id,
        "passed": verdict.passed,
        "error": f"{verdict.error:.3g}",
        "tolerance": f"{verdict.tolerance:.3g}",
        "refuted": None if verdict.refuted is None else f"{verdict.refuted:.3g}",
        "seconds": f"{verdict.seconds:.3g}",
        "detail": verdict.detail,
    }


@CALLS.register("picture")
def picture(id: str) -> str:
    """The picture of an entry as SVG, empty where it has none."""
    import quire.sheet  # noqa: F401

    made = ENTRIES[id].picture
    return "" if made is None else to_svg(made())


@CALLS.register("diagnose")
def diagnose(folder: str) -> dict[str, Any]:
    """The doctor's verdict on a run."""
    from quire.runs import load

    verdict = load(Path(folder)).diagnose()
    names = ("severity", "what", "where", "evidence", "fix", "code")
    return {
        "sentence": verdict.sentence,
        "good": not verdict.findings.codes("error", "warning"),
        "findings": [{name: str(getattr(finding, name)) for name in names} for finding in verdict.findings],
    }


CALLS.register("models")(explain.models)
CALLS.register("explain")(explain.costs)
CALLS.register("explain_run")(explain.costs_of_run)
CALLS.register("instrument")(instruments.answer)
