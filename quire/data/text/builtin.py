"""Text that needs no download: Python's own reference and source, and pairs made by code."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.data.text.numbers import dates, numbers
from quire.errors import InputError
from quire.registry import Registry


class Pair(NamedTuple):
    source: str
    target: str
    group: str


class Labelled(NamedTuple):
    text: str
    label: str
    group: str
    """What the text is taken from; none of it is in two parts."""


CORPORA: Registry[Callable[[], str]] = Registry("built-in text")
PAIRS: Registry[Callable[[], list[Pair]]] = Registry("built-in set of pairs")
LABELLED: Registry[Callable[[], list[Labelled]]] = Registry("built-in set of labelled texts")

EACH = 800
"""Texts of each class of `python-lines`."""
SOURCE_FILES = 16
"""Files of `python-source`."""
SHORTEST, LONGEST = 20, 120
"""Characters of such a text."""
_LONG_TEXT = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'')
_MESSAGE = re.compile(r"""raise \w+\(\s*[fr]?(["'])((?:(?!\1)[^\\\n])+)\1""")
_MODULE_NAMES = (
    "argparse ast base64 bdb bisect calendar cmd code codecs collections/__init__ configparser contextlib "
    "copy csv dataclasses datetime decimal difflib dis doctest email/message enum filecmp fileinput "
    "fnmatch fractions ftplib functools getopt glob gzip heapq html/parser http/client imaplib inspect "
    "ipaddress json/decoder json/encoder keyword linecache locale logging/__init__ mailbox mimetypes "
    "optparse os pathlib pathlib/__init__ pdb pickle platform plistlib poplib posixpath pprint profile "
    "pyclbr pydoc queue random re/__init__ reprlib sched selectors shelve shlex shutil smtplib socket "
    "socketserver statistics string subprocess symtable tarfile tempfile textwrap threading timeit "
    "tokenize trace traceback types typing unittest/case unittest/mock urllib/parse urllib/request uuid "
    "warnings wave weakref xml/dom/minidom zipapp zipfile zipfile/__init__"
)
MODULES = tuple(_MODULE_NAMES.split())


@CORPORA.register("python-reference")
def python_reference() -> str:
    """Python's language reference as `help()` shows it: about half a megabyte of English, in the order of the
    topics' names."""
    return "\n\n".join(text.strip("\n") for _, text in _topics()) + "\n"


@CORPORA.register("python-source")
def python_source() -> str:
    """Source files of Python's standard library, about half a megabyte."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in MODULES[:: len(MODULES) // SOURCE_FILES]]
    texts = [path.read_text(encoding="utf-8") for path in files if path.exists()]
    if not texts:
        raise InputError(
            f"no source files in {library}",
            expected="the standard library's own source",
            fix="give a text of your own with --data",
        )
    return "\n\n".join(texts)


def _topics() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    return sorted(topics.items())


@PAIRS.register("number-words")
def number_pairs() -> list[Pair]:
    """All numbers from 1 to 9999 in words and in digits: "three hundred forty-two", "342"."""
    return [Pair(*case) for case in numbers()]


@PAIRS.register("dates")
def date_pairs() -> list[Pair]:
    """9999 days from 1900 to 2099: "the 3rd of May, 1999", "1999-05-03"."""
    return [Pair(*case) for case in dates()]


@PAIRS.register("numbers-and-dates")
def mixed_pairs() -> list[Pair]:
    """Both of these, in turn."""
    return [pair for both in zip(number_pairs(), date_pairs(), strict=True) for pair in both]


@LABELLED.register("python-lines")
def python_lines() -> list[Labelled]:
    """3200 lines: code, comments and error messages of the standard library, and sentences of the language
    reference. A file or topic is in one part of the data alone."""
    found: dict[str, list[Labelled]] = {"code": [], "comment": [], "message": [], "reference": []}
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        path = library / f"{name}.py"
        if path.exists():  # not every version of Python has every module
            for label, text in _lines_of_source(path.read_text(encoding="utf-8")):
                found[label].append(Labelled(text, label, f"{name}.py"))
    for topic, text in _topics():
        found["reference"] += [Labelled(line, "reference", f"topic {topic}") for line in _prose(text)]
    rows: list[Labelled] = []
    seen: set[str] = set()
    for label, texts in found.items():
        distinct = list({row.text: row for row in texts if row.text not in seen}.values())
        seen.update(row.text for row in distinct)
        if len(distinct) < EACH:
            raise InputError(
                f"{len(distinct)} texts of kind '{label}' in Python's own library",
                expected=f"{EACH}; the source files of the standard library may be missing",
                fix="give a table or folder of your own with --data",
            )
        spread = np.linspace(0, len(distinct) - 1, EACH).round().astype(int)
        rows += [distinct[i] for i in spread]
    return rows


def _fits(text: str) -> bool:
    one_line = "\n" not in text and SHORTEST <= len(text) <= LONGEST
    return one_line and any(sign.isalpha() for sign in text)


def _lines_of_source(source: str) -> Iterator[tuple[str, str]]:
    """(kind, line) of the lines of a Python file that are of a good length, without indentation. Code is what
    has no texts and no comments in it, messages are the texts of raise statements."""
    source = _LONG_TEXT.sub('""', source)
    yield from (("message", match[2]) for match in _MESSAGE.finditer(source) if _fits(match[2]))
    for line in map(str.strip, source.splitlines()):
        comment = line.lstrip("# ") if line.startswith("#") else ""
        if comment and _fits(comment):
            yield "comment", comment
        elif _fits(line) and not set(line) & set("#\"'"):
            yield "code", line


def _prose(text: str) -> Iterator[str]:
    """Lines of paragraphs: what is indented, quoted or a heading is left out."""
    for line in text.splitlines():
        if not line[:1].isspace() and not re.search(r"::=|>>>|\*\*\*|===|---|~~~", line) and _fits(line):
            yield line.strip()
