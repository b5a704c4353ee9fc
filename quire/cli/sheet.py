"""`quire sheet`: list, show, verify."""

from __future__ import annotations

import fnmatch
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from quire.cli.parse import parse
from quire.cli.paths import refuse_existing
from quire.cli.show import print_json, print_table
from quire.errors import InputError, unknown_name

if TYPE_CHECKING:
    from quire.sheet.registry import Entry, Verdict


@dataclass(frozen=True)
class SheetListOptions:
    """Every entry of the sheet."""

    chapter: str | None = None
    """Only this chapter."""
    json: bool = False
    """Print a list of {id, title, code, erratum, picture}."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class SheetShowOptions:
    """One entry: formula, code, erratum, the result of its proof, and its picture as SVG."""

    id: Positional[str]
    """Entry, such as dense/layer."""
    out: Path | None = None
    """The picture's file; the default is sheet-CHAPTER-NAME.svg in the current folder."""
    json: bool = False
    """Print one object."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix.lower() != ".svg":
            raise InputError(f"--out {self.out}", expected="a name ending in .svg", fix="change the ending")


@dataclass(frozen=True)
class SheetVerifyOptions:
    """Run the proofs; the exit code is 1 if any fails."""

    ids: Positional[tuple[str, ...]] = ()
    """Entries, chapters or patterns such as 'loss/*'; without any, the whole sheet."""
    json: bool = False
    """Print a list of {id, error, tolerance, passed}."""
    debug: bool = False
    """Show the traceback of an error."""


USAGE = """usage: quire sheet {list,show,verify} [OPTIONS]

  list                 every entry; --chapter NAME for one chapter
  show ID              formula, code, erratum, proof and picture of an entry
  verify [ID ...]      run the proofs; entries, chapters or patterns such as 'loss/*'

quire sheet verify --help"""


def main(words: Sequence[str]) -> int:
    actions = {"list": list_entries, "show": show, "verify": verify}
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words[0] not in actions:
        raise unknown_name("action of quire sheet", words[0], actions)
    return actions[words[0]](words[1:])


def entries() -> dict[str, Entry]:
    import quire.sheet  # noqa: F401  registers every entry
    from quire.sheet.registry import ENTRIES

    return dict(ENTRIES.items())


def select(known: dict[str, Entry], wanted: Iterable[str]) -> list[Entry]:
    """The entries that ids, chapter names or patterns mean, each once, in the sheet's order."""
    wanted = list(wanted)
    chapters = {entry.chapter for entry in known.values()}
    chosen: set[str] = set()
    for word in wanted:
        pattern = f"{word}/*" if word in chapters else word
        found = fnmatch.filter(known, pattern)
        if not found:
            raise unknown_entry(word, known, chapters)
        chosen.update(found)
    return [entry for id, entry in known.items() if not wanted or id in chosen]


def unknown_entry(word: str, known: Iterable[str], chapters: Iterable[str]) -> Exception:
    error = unknown_name("sheet entry", word, [*known, *chapters])
    kind = type(error)
    return kind(error.got, expected="an entry, a chapter or a pattern; see quire sheet list", fix=error.fix)


def list_entries(words: Sequence[str]) -> int:
    options = parse(SheetListOptions, words, prog="quire sheet list")
    known = entries()
    chapters = list(dict.fromkeys(entry.chapter for entry in known.values()))
    if options.chapter is not None and options.chapter not in chapters:
        raise unknown_name("chapter", options.chapter, chapters)
    chosen = [entry for entry in known.values() if options.chapter in (None, entry.chapter)]
    if options.json:
        print_json(
            [
                {
                    "id": entry.id,
                    "title": entry.title,
                    "code": entry.locations(),
                    "erratum": entry.erratum,
                    "picture": entry.picture is not None,
                }
                for entry in chosen
            ]
        )
        return 0
    marks = [("erratum " * bool(entry.erratum) + "picture" * bool(entry.picture)) for entry in chosen]
    rows = [(entry.id, entry.title, mark) for entry, mark in zip(chosen, marks, strict=True)]
    print_table(["entry", "title", "also"], rows)
    return 0


def show(words: Sequence[str]) -> int:
    options = parse(SheetShowOptions, words, prog="quire sheet show")
    known = entries()
    if options.id not in known:
        raise unknown_entry(options.id, known, ())
    entry = known[options.id]
    path = options.out or Path(f"sheet-{entry.id.replace('/', '-')}.svg")
    refuse_existing(path, overwrite=True)
    verdict = entry.verify()
    picture = save_picture(entry, path) if entry.picture else None
    if options.json:
        print_json(
            {
                "id": entry.id,
                "title": entry.title,
                "latex": entry.latex,
                "code": entry.locations(),
                "erratum": entry.erratum,
                "error": verdict.error,
                "tolerance": verdict.tolerance,
                "passed": verdict.passed,
                "picture": picture,
            }
        )
        return 0 if verdict.passed else 1
    print(f"{entry.id}: {entry.title}\n")
    print(f"  {entry.latex}\n")
    for place in entry.locations():
        print(f"code: {place}")
    if entry.erratum:
        print(f"erratum: {entry.erratum}")
    print(f"proof: {'passed' if verdict.passed else 'FAILED'}, {describe(verdict)}")
    if picture:
        print(f"picture: {picture}")
    return 0 if verdict.passed else 1


def describe(verdict: Verdict) -> str:
    text = f"error {verdict.error:.3g}, tolerance {verdict.tolerance:.3g}"
    if verdict.refuted is not None:
        text += f"; the wrong form has error {verdict.refuted:.3g}"
    return f"{text}; {verdict.detail}" if verdict.detail else text


def save_picture(entry: Entry, path: Path) -> Path:
    from quire.files import write_bytes

    assert entry.picture is not None
    figure, content = entry.picture(), io.BytesIO()
    figure.savefig(content, format="svg", bbox_inches="tight")
    write_bytes(path, content.getvalue())
    return path


def verify(words: Sequence[str]) -> int:
    options = parse(SheetVerifyOptions, words, prog="quire sheet verify")
    verdicts = run_proofs(select(entries(), options.ids))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if options.json:
        keys = ("id", "error", "tolerance", "passed")
        print_json([{name: getattr(verdict, name) for name in keys} for verdict in verdicts])
        return 1 if failed else 0
    rows = [(v.id, f"{v.error:.2e}", f"{v.tolerance:.2e}", "pass" if v.passed else "FAIL") for v in verdicts]
    print_table(["entry", "error", "tolerance", "result"], rows)
    for verdict in failed:
        print(f"FAIL {verdict.id}: {describe(verdict)}")
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(f"{len(verdicts) - len(failed)} of {len(verdicts)} proofs passed in {seconds:.1f} s")
    return 1 if failed else 0


def run_proofs(chosen: Sequence[Entry]) -> list[Verdict]:
    """Each verdict in turn, with a line of progress on a terminal."""
    if not sys.stderr.isatty():
        return [entry.verify() for entry in chosen]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    verdicts: list[Verdict] = []
    columns: Any = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task("", total=len(chosen))
        for entry in chosen:
            progress.update(line, description=entry.id)
            verdicts.append(entry.verify())
            progress.advance(line)
    return verdicts
